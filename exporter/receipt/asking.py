"""Questions about one job's series. Owns selectors, and parts small enough for an answer; refuses to judge any of it.

Ranges are asked for in milliseconds. Two that follow one another share no sample: from Prometheus 3 on a range is open
at its beginning, before that it was closed ("Querying basics").
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

SCRAPED_SECONDS = 15.0
"""A usual interval between two scrapes."""
MOST_SAMPLES = 500_000
"""In one answer: some 15 MB on the way."""
MOST_READ = 20_000_000
"""Samples that one question reads; Prometheus refuses 50 million (`--query.max-samples`)."""
LOOKBACK_SECONDS = 300.0
"""How old a series' last sample may be."""
_APART = 0.001
"""Seconds between a part and the next."""
Place = tuple[str, str]
"""Cluster and instance: one daemon under one address."""


class ReceiptError(Exception):
    """No receipt can be made of what is stored; the message says why and what to do."""


class Told(Protocol):
    """A series of an answer: of a range its values, of an instant its value; both with Unix seconds."""

    @property
    def metric(self) -> dict[str, str]:
        """Its labels."""
        ...

    @property
    def values(self) -> tuple[tuple[float, str], ...]:
        """Of a range."""
        ...

    @property
    def value(self) -> tuple[float, str]:
        """Of an instant."""
        ...


class Server(Protocol):
    """Whoever answers a question of PromQL for a moment in Unix seconds."""

    def now(self, query: str, at: float) -> Sequence[Told]:
        """All series of the answer."""
        ...


class Sample(NamedTuple):
    """One value and whose it is."""

    labels: dict[str, str]
    value: float

    @property
    def name(self) -> str:
        """Without the project's prefix and `job_`."""
        return self.labels.get("__name__", "").removeprefix("gpu_efficiency_job_")

    @property
    def place(self) -> Place:
        """Where it was scraped."""
        return place_of(self.labels)


class Track(NamedTuple):
    """All samples of a series, in their order: Unix seconds, value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def place(self) -> Place:
        """Where it was scraped."""
        return place_of(self.labels)


def place_of(labels: dict[str, str]) -> Place:
    """Labels that name a daemon."""
    return labels.get("cluster", ""), labels.get("instance", "")


class Asking:
    """Asks one server about one job. `matchers` narrow it, as in a selector, without braces."""

    def __init__(self, server: Server, job_id: str, *, matchers: str = "") -> None:
        self._server, self.job_id = server, job_id
        self._matchers = matchers.strip().removeprefix("{").removesuffix("}").strip(", ")

    def series(self, name: str, *more: str) -> str:
        """Selector of a job's series by the end of its name."""
        return self.selector(f"gpu_efficiency_job_{name}", *more)

    def selector(self, name: str, *more: str) -> str:
        """Selector of any series that has the job's id; an empty name: of those that `more` picks."""
        return f"{name}{{{self._inside(f'job_id={quoted(self.job_id)}', *more)}}}"

    def anyone(self, name: str) -> str:
        """Selector of a series of nobody's in particular."""
        return f"{name}{{{self._inside()}}}"

    def _inside(self, *matchers: str) -> str:
        return ",".join(filter(None, (*matchers, self._matchers)))

    def now(self, query: str, at: float) -> list[Sample]:
        """The value of each series at a moment."""
        return [Sample(row.metric, float(row.value[1])) for row in self._server.now(query, at)]

    def raw(self, selector: str, start: float, end: float, *, series: int = 1) -> list[Track]:
        """Every sample from `start` to `end`, of about so many series."""
        points: dict[frozenset[tuple[str, str]], dict[float, float]] = defaultdict(dict)
        for a, b in parts(start, end, series=series, most=MOST_SAMPLES):
            for row in self._server.now(f"{selector}[{span(a, b)}]", b):
                points[frozenset(row.metric.items())] |= {at: float(text) for at, text in row.values}
        return [Track(dict(key), sorted(found.items())) for key, found in points.items()]

    def most(self, selector: str, start: float, end: float, *, series: int = 1) -> list[Sample]:
        """The greatest value of each series in a time."""
        return self._each("max_over_time", selector, start, end, series=series)

    def mean(self, selector: str, start: float, end: float, *, series: int = 1, step: float = 0) -> list[Sample]:
        """The mean of all samples of each series in a time; of what is no selector but a question, with a `step`."""
        sums = self._each("sum_over_time", selector, start, end, series=series, step=step)
        counts = self._each("count_over_time", selector, start, end, series=series, step=step)
        of = {frozenset(each.labels.items()): each.value for each in counts}
        return [Sample(s.labels, s.value / of[frozenset(s.labels.items())]) for s in sums]

    def _each(
        self, function: str, selector: str, start: float, end: float, *, series: int, step: float = 0
    ) -> list[Sample]:
        found: dict[frozenset[tuple[str, str]], float] = {}
        for a, b in parts(start, end, series=series, most=MOST_READ):
            every = f":{math.ceil(step)}s" if step else ""
            for each in self.now(f"{function}({selector}[{span(a, b)}{every}])", b):
                key = frozenset(each.labels.items())
                known = found.get(key)
                if known is None:
                    found[key] = each.value
                else:
                    found[key] = max(known, each.value) if function == "max_over_time" else known + each.value
        return [Sample(dict(key), value) for key, value in found.items()]


def quoted(text: str) -> str:
    """As PromQL writes a string."""
    return json.dumps(text, ensure_ascii=False)


def span(start: float, end: float) -> str:
    """A range's length."""
    return f"{max(1, round((end - start) * 1000))}ms"


def parts(start: float, end: float, *, series: int, most: int) -> Iterator[tuple[float, float]]:
    """[start, end] in parts of about `most` samples."""
    length = max(60.0, most * SCRAPED_SECONDS / max(1, series))
    at = start
    while at + length + _APART < end:
        yield at, at + length
        at += length + _APART
    yield at, end
