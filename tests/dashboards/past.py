"""A real Prometheus whose past is written down, so that nothing waits for a clock.

Owns three things. Samples of any moment go in by Prometheus' own remote-write door, with the marks of staleness that a
scrape leaves when a series or a whole target vanishes: a panel then reads of the past what it would have read in life.
Rules of `alerts/` are evaluated over the whole past by Prometheus itself, those that others read first; each has a
sample at the end. And questions are asked. An alert counts as firing in every moment in which its expression has a
sample: its `for` is not waited for, nor is it kept firing. Refuses to judge what the answers mean.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from graphlib import TopologicalSorter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from tests.alerts import packs
from tests.alerts.promql import Selector, parse, walk
from tests.dashboards.remote_write import Points, request
from tests.e2e.running import Labels, environment, running
from tests.ports import free_port
from tests.waiting import wait_for

Series = dict[Labels, Points]
"""By all labels, `__name__` among them."""
Found = tuple[dict[str, str], list[tuple[float, float]]]
_BATCH = 3000
"""Series in one request."""
_HEAD = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?")
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_TEMPLATE = re.compile(r'\{\{ (?:or )?\$labels\.(\w+)(?: "(\w+)")? \}\}')
"""A label of the series, or a word in its place."""


class Rule(Struct, frozen=True, kw_only=True):
    """A rule of a group: what it is called, what it reads, and how often in seconds."""

    name: str
    expr: str
    labels: Mapping[str, str] = {}
    interval: float = 60.0

    @property
    def reads(self) -> frozenset[str]:
        """Names of the series that it asks for."""
        return frozenset(node.name for node in walk(parse(self.expr)) if isinstance(node, Selector))


def seconds(text: str) -> float:
    """A duration of one unit, as rules and dashboards have them."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0, "y": 31_536_000.0}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhdwy])", text)
    if found is None:
        raise ValueError(f"{text!r} is no duration such as 90s or 5m")
    return float(found[1]) * units[found[2]]


def rules(*files: str) -> tuple[Rule, ...]:
    """Rules of these files of `alerts/`, of all files if none is named; an alert's name is ALERTS."""
    groups = [group for name in files or packs.files() for group in packs.groups()[name]]
    return tuple(_rule(row, seconds(group.get("interval", "1m"))) for group in groups for row in group["rules"])


def _rule(row: dict[str, Any], interval: float) -> Rule:
    labels = row.get("labels", {})
    if "alert" in row:
        labels = labels | {"alertname": row["alert"], "alertstate": "firing"}
    return Rule(name=row.get("record", "ALERTS"), expr=row["expr"], labels=labels, interval=interval)


def in_order(rows: Iterable[Rule]) -> Iterator[tuple[Rule, ...]]:
    """Rules that can be evaluated together, one such level after another. Its own last value a rule may read."""
    rows = tuple(rows)
    made: dict[str, list[int]] = {}
    for number, rule in enumerate(rows):
        made.setdefault(rule.name, []).append(number)
    sorter = TopologicalSorter(
        {
            number: {other for name in rule.reads for other in made.get(name, ()) if name != rule.name}
            for number, rule in enumerate(rows)
        }
    )
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        yield tuple(rows[number] for number in ready)
        sorter.done(*ready)


class Target:
    """What Prometheus would store of one target's pages. `labels` are the scrape's: cluster, instance, job."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._rows: dict[str, Points] = {}
        self._up: Points = []
        self._there: set[str] = set()

    def scraped(self, at: float, page: str) -> None:
        """A page at a moment: what was on the page before and is no longer ends here."""
        there = set()
        for line in page.splitlines():
            if line and line[0] != "#":
                head, _, value = line.rpartition(" ")
                self._rows.setdefault(head, []).append((at, float(value)))
                there.add(head)
        self._end(at, self._there - there)
        self._there = there
        self._up.append((at, 1.0))

    def failed(self, at: float) -> None:
        """A scrape without an answer: all series end."""
        self._end(at, self._there)
        self._there = set()
        self._up.append((at, 0.0))

    def _end(self, at: float, heads: Iterable[str]) -> None:
        for head in heads:
            self._rows[head].append((at, None))

    @property
    def series(self) -> Series:
        """By labels, those of the scrape added."""
        scrape = frozenset(self._labels.items())
        return {_read(head) | scrape: points for head, points in self._rows.items()} | {
            scrape | {("__name__", "up")}: self._up
        }


def _read(head: str) -> Labels:
    found = _HEAD.fullmatch(head)
    if found is None:
        raise ValueError(f"{head!r} is no series")
    pairs = ((name, _ESCAPED.sub(_meant, value)) for name, value in _PAIR.findall(found[2] or ""))
    return frozenset((("__name__", found[1]), *pairs))


def _meant(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


def named(metric: str, /, **labels: str) -> Labels:
    """The key of a series."""
    return frozenset({"__name__": metric, **labels}.items())


class Past:
    """A running Prometheus, to write into and to ask."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def write(self, series: Mapping[Labels, Points]) -> None:
        """Add samples; of each series they must be later than those it has."""
        rows = iter(series.items())
        while batch := list(islice(rows, _BATCH)):
            answer = self._client.post("/api/v1/write", content=request(batch))
            if answer.is_error:
                raise ValueError(f"Prometheus refused samples: {answer.text.strip()}")

    def record(
        self, rows: Iterable[Rule], *, start: float, end: float, since: Mapping[str, float] | None = None
    ) -> None:
        """Evaluate rules from `start` on, so that each has a sample at `end`.

        `since`: clusters of which nothing is recorded before a moment, for that was written already.
        """
        with ThreadPoolExecutor(2) as threads:
            for level in in_order(rows):
                for series in threads.map(lambda rule: self._evaluated(rule, start, end), level):
                    self.write(_from(since or {}, series))

    def _evaluated(self, rule: Rule, start: float, end: float) -> Series:
        if rule.name in rule.reads:
            self._step_by_step(rule, start, end)
            return {}
        steps = _steps(rule, start, end)
        return _recorded(rule, self._range(rule.expr, steps[0], end, rule.interval, rule.name), steps)

    def _step_by_step(self, rule: Rule, start: float, end: float) -> None:
        """Evaluate a rule that reads what it said last."""
        before: set[Labels] = set()
        for at in _steps(rule, start, end):
            series: Series = {_labelled(rule, labels): [(at, value)] for labels, value in self.ask(rule.expr, at)}
            now = set(series)
            self.write(series | {gone: [(at, None)] for gone in before - now})
            before = now

    def ask(self, query: str, at: float) -> list[tuple[dict[str, str], float]]:
        """An instant query: labels and value of each series."""
        found = self._get("query", query, time=at)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(row["metric"], float(row["value"][1])) for row in found["result"]]

    def ask_range(self, query: str, start: float, *, end: float, step: float) -> list[Found]:
        """A range query: labels and points of each series."""
        return self._range(query, start, end, step, query)

    def _range(self, query: str, start: float, end: float, step: float, what: str) -> list[Found]:
        found = self._get("query_range", query, what=what, start=start, end=end, step=step)
        return [(row["metric"], [(at, float(value)) for at, value in row["values"]]) for row in found["result"]]

    def _get(self, path: str, query: str, *, what: str = "", **more: float) -> dict[str, Any]:
        answer = self._client.post(f"/api/v1/{path}", data={"query": query, **{k: repr(v) for k, v in more.items()}})
        found: dict[str, Any] = msgspec.json.decode(answer.content)
        if found["status"] != "success":
            raise ValueError(f"{what or query}: {found['error']}")
        data: dict[str, Any] = found["data"]
        return data


def _steps(rule: Rule, start: float, end: float) -> list[float]:
    """Moments at which a rule is evaluated; the end is one of them."""
    count = int((end - start) // rule.interval)
    return [end - (count - number) * rule.interval for number in range(count + 1)]


def _labelled(rule: Rule, labels: Mapping[str, str]) -> Labels:
    own = {name: _expanded(value, labels) for name, value in rule.labels.items()}
    return frozenset({**labels, **own, "__name__": rule.name}.items())


def _expanded(value: str, labels: Mapping[str, str]) -> str:
    found = _TEMPLATE.fullmatch(value)
    return value if found is None else labels.get(found[1]) or found[2]


def _from(since: Mapping[str, float], series: Series) -> Series:
    """What is not before its cluster's moment."""
    begins = {labels: since[name] for labels in series if (name := dict(labels).get("cluster", "")) in since}
    return series | {labels: [p for p in series[labels] if p[0] >= begin] for labels, begin in begins.items()}


def _recorded(rule: Rule, found: Iterable[Found], steps: list[float]) -> Series:
    """Samples of a rule; where a series has none at a step, it ends there."""
    said: dict[Labels, dict[float, float]] = {}
    for labels, points in found:
        # `A * B or floor` gives two series that differ in nothing but their names, one after the other.
        said.setdefault(_labelled(rule, labels), {}).update(points)
    value = (lambda _: 1.0) if rule.name == "ALERTS" else float
    follower = dict(pairwise(steps))
    return {
        labels: list(_with_ends({at: value(v) for at, v in each.items()}, follower)) for labels, each in said.items()
    }


def _with_ends(said: Mapping[float, float], follower: Mapping[float, float]) -> Iterator[tuple[float, float | None]]:
    for at in sorted(said):
        yield at, said[at]
        after = follower.get(at)
        if after is not None and after not in said:
            yield after, None


@contextmanager
def prometheus(folder: Path, *, lookback: str = "5m") -> Iterator[Past]:
    """Start a Prometheus on the loopback that knows nothing yet; `lookback`: how long a sample counts."""
    (folder / "prometheus.yaml").write_text("scrape_configs: []\n")
    port = free_port()
    # The head takes samples that are up to half a block older than its latest: with such blocks, of months.
    words = [
        "prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=warn",
        f"--query.lookback-delta={lookback}", "--storage.tsdb.retention.time=100y",
        "--storage.tsdb.min-block-duration=300d", "--storage.tsdb.max-block-duration=300d",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with (
        running(words, folder / "prometheus.log", environment()) as program,
        httpx.Client(base_url=url, trust_env=False, timeout=120) as client,
    ):
        wait_for(lambda: program.alive() and _ready(client), "Prometheus is ready")
        yield Past(url, client)
        assert program.end() == 0


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
