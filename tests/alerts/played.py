"""Scrapes of simulated nodes -> promtool with all alert rules: which alerts fired, since when, how often.

Owns the writing of series and the reading of promtool's answer. Refuses to know which alerts should fire. promtool's
clock begins at Unix 0, and so do the nodes'. Unlike a real Prometheus it evaluates all groups in one order and at one
pace, and goes on while the one that is told of is down: what an alert rests on must not end within such a time.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from exporter.core.metrics import METRICS, Metric
from tests.alerts.packs import Rule, alerts, files, groups, needed
from tests.alerts.promql import Matcher, Selector, parse, walk
from tests.alerts.stories import Story, pages, within

JOB = "gpu-efficiency"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TESTS: Mapping[str, str] = {"=": r"{}", "!=": r"(?!{}$).*", "=~": r"{}", "!~": r"(?!(?:{})$).*"}


class Told(NamedTuple):
    """One alert that fired."""

    alert: str
    severity: str
    subject: str
    """The job it names, else the node, else nothing."""


class Firing(NamedTuple):
    """When it did."""

    first: int
    """Seconds from the story's beginning."""
    times: int
    """How often it began to fire."""


# -- series --


@cache
def read() -> Mapping[str, tuple[tuple[Matcher, ...], ...]]:
    """Name of each series that some rule reads -> the conditions of each such reading."""
    found: dict[str, set[tuple[Matcher, ...]]] = {}
    for rule in chain.from_iterable(_groups().values()):
        for node in walk(parse(rule["expr"])):
            if isinstance(node, Selector):
                found.setdefault(node.name, set()).add(node.matchers)
    return {name: tuple(each) for name, each in found.items()}


@cache
def _groups() -> Mapping[str, tuple[Rule, ...]]:
    """Give the alerts of each group and the recording rules that they read, directly or not, those read first.

    What no alert reads is most of the rules and of what they cost; it cannot make an alert fire.
    """
    there = needed(" ".join(alert["expr"] for alert in alerts().values()), list(files()))
    found = {group["name"]: group["rules"] for each in groups().values() for group in each}
    kept = {name: tuple(rule for rule in rows if "alert" in rule or rule in there) for name, rows in found.items()}
    return {name: rows for name, rows in kept.items() if rows}


_METRICS = tuple(metric for metric in METRICS if metric.name in read())


def _wanted(name: str, labels: Mapping[str, str]) -> bool:
    return any(all(_fits(each, labels) for each in matchers) for matchers in read().get(name, ()))


def _fits(matcher: Matcher, labels: Mapping[str, str]) -> bool:
    value = matcher.value if matcher.operator.endswith("~") else re.escape(matcher.value)
    return re.fullmatch(_TESTS[matcher.operator].format(value), labels.get(matcher.label, "")) is not None


@cache
def _series(head: str, cluster: str, node: int) -> str:
    """Give a sample's name and labels as the scrape stores them; empty: no rule reads it."""
    name, _, rest = head.partition("{")
    labels = dict(_LABEL.findall(rest)) | {"cluster": cluster, "instance": f"n{node}", "job": JOB}
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}" if _wanted(name, labels) else ""


def _samples(page: bytes | None, cluster: str, node: int, start: int) -> dict[str, str]:
    """Series -> value of one scrape, with what Prometheus says of it, and when the process was started."""
    kept = {_series("up{}", cluster, node): "0" if page is None else "1"}
    if page is not None:
        kept[_series("process_start_time_seconds{}", cluster, node)] = str(start)
    for line in (page or b"").decode().splitlines():
        head, _, value = line.rpartition(" ")
        if not line.startswith("#") and (series := _series(head, cluster, node)):
            kept[series] = value
    return kept


Play = Callable[[Story, int, Sequence[Metric]], Iterator[bytes | None]]
"""What each scrape of a story's node gets, of these metrics; None: no answer."""


def _input_series(story: Story, cluster: str, play: Play) -> list[dict[str, str]]:
    """Every series of every node, in promtool's shorthand."""
    rows = []
    for node in range(story.nodes):
        back = story.away[1] if node == 0 else 0
        scrapes = [
            _samples(page, cluster, node, back if number * story.every >= back else 0)
            for number, page in enumerate(play(story, node, _METRICS))
        ]
        lost = [within(number * story.every, story.down) for number in range(len(scrapes))]
        names = dict.fromkeys(name for scrape in scrapes for name in scrape)
        rows += [{"series": name, "values": _shorthand(_column(name, scrapes, lost))} for name in names]
    return rows


def _column(name: str, scrapes: list[dict[str, str]], lost: list[bool]) -> Iterator[str]:
    """One series' values: `stale` at its end, unless a Prometheus that restarts never saw it end."""
    alive = False
    for scrape, unseen in zip(scrapes, lost, strict=True):
        value = None if unseen else scrape.get(name)
        yield value or ("stale" if alive and not unseen else "_")
        alive = value is not None


def _shorthand(values: Iterable[str]) -> str:
    return " ".join(_run(value, len(list(same))) for value, same in groupby(values))


def _run(value: str, count: int) -> str:
    if value == "_":
        return f"_x{count}"
    return value if count == 1 else f"{value}x{count - 1}"


# -- promtool --

_GOT = re.compile(r"(\{[^{}]*\}) (\S+?)(?:,|$)", re.MULTILINE)


def fired(stories: Mapping[str, Story], folder: Path, play: Play = pages) -> dict[str, dict[Told, Firing]]:
    """Play stories beside one another, each as a cluster of its own, and tell every alert that ever fired in each.

    One evaluation of all rules costs much the same for one cluster as for many: those with equal steps run together.
    promtool refuses a query that reads more than 10,000 samples: some sixty nodes at once are what it bears.
    """
    told: dict[str, dict[Told, Firing]] = {name: {} for name in stories}
    for every in sorted({story.every for story in stories.values()}):
        for cluster, what, firing in _played(
            {n: s for n, s in stories.items() if s.every == every}, every, folder, play
        ):
            told[cluster][what] = firing
    return told


def _played(stories: Mapping[str, Story], every: int, folder: Path, play: Play) -> Iterator[tuple[str, Told, Firing]]:
    case = {
        "interval": f"{every}s",
        "input_series": [row for name, story in stories.items() for row in _input_series(story, name, play)],
        "promql_expr_test": [_question(name, story) for name, story in stories.items()],
    }
    groups = [{"name": name, "rules": rows} for name, rows in _groups().items()]
    (folder / "rules.yaml").write_text(json.dumps({"groups": groups}))
    sheet = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": f"{every}s",
        "group_eval_order": list(_groups()),
        "tests": [case],
    }
    path = folder / f"every-{every}s.yaml"
    path.write_text(json.dumps(sheet))
    command = ["promtool", "test", "rules", f"{path}"]
    # Go collects its garbage less often: a third of the time, for some hundred megabytes.
    env = os.environ | {"GOGC": "400"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=env)
    return _firings(done.stderr) if done.returncode else iter(())


def _question(cluster: str, story: Story) -> dict[str, object]:
    """Ask at the story's end, and expect nothing: promtool tells a result only where it is not the expected one."""
    firing = f'ALERTS{{alertstate="firing",cluster="{cluster}"}}'
    window = f"[{story.length + story.every}s:{story.every}s]"
    first = f"min_over_time((timestamp({firing})){window})"
    times = f"count_over_time(({firing} unless {firing} offset {story.every}s){window})"
    both = f'label_replace({first}, "asked", "first", "", "") or label_replace({times}, "asked", "times", "", "")'
    return {"expr": both, "eval_time": f"{story.length}s", "exp_samples": []}


def _firings(said: str) -> Iterator[tuple[str, Told, Firing]]:
    """Read what promtool got; whatever else it says is an error of a rule, or of ours."""
    answers = re.findall(r"^ +got: (.*)$", said, re.MULTILINE)
    assert answers, said
    found: dict[tuple[str, Told], dict[str, int]] = {}
    for labels, value in ((dict(_LABEL.findall(p)), v) for answer in answers for p, v in _GOT.findall(answer)):
        told = Told(labels["alertname"], labels["severity"], labels.get("job_id") or labels.get("instance", ""))
        part = found.setdefault((labels["cluster"], told), {})
        assert labels["asked"] not in part, f"two alerts of one name and subject at once: {labels}"
        part[labels["asked"]] = round(float(value))
    return ((cluster, told, Firing(**part)) for (cluster, told), part in found.items())
