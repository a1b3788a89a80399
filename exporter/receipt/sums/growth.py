"""How much counters of time grew, asked of a Prometheus in parts that it can answer. Refuses to know whose time it is.

`increase` alone is no sum: it reaches beyond the first and last sample by the slope, and does not see what a series
had when it was new. So a counter that did not fall is taken at the end of the time and before its beginning, and
periods that follow one another add up to the whole; one that fell, for its daemon began anew, by `increase`, which is
right within a scrape. A series that is new counts from nothing, unless what it is of is older than the time: then
nobody saw the beginning, and it counts from its first sample.

A series for each leak is thirty times what one for all of them is. What is too much for one answer is therefore counted
from the one for all, and split by what recording rules have summed, where there are such rules.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from exporter.receipt.asking import MOST_READ, Sample, span
from exporter.receipt.sums.lots import Period

LEAKS = 30
"""Series by leak for one of all."""
_READS = 4
"""Times that a question reads each sample."""
UNSPLIT = "unresolved"
"""What no rule has split."""
Ask = Callable[[str, float], list[Sample]]
Key = tuple[str, ...]

PER_DAEMON = "cluster, instance"


def grown(selector: str, start: float, end: float, *, back: float, older: str, on: str) -> str:
    """By series, the counters' growth from `start` to `end`, asked at `end`.

    `back`: how far before the start a sample counts as what was there then, seconds. `older`: a question whose series,
    by the labels `on`, are of what is older than the start.
    """
    whole, before = span(start, end), span(0, back)
    last = f"last_over_time({selector}[{whole}])"
    had = f"last_over_time({selector}[{before}] offset {whole})"
    fell = f"(resets({selector}[{span(start - back, end)}]) > 0)"
    first = f"min_over_time({selector}[{whole}])"
    known = f"(({last} - {had}) unless {fell})"
    new = f"({last} unless {had} unless {fell} unless on ({on}) {older})"
    late = f"((({last} - {first}) unless {had} unless {fell}) and on ({on}) {older})"
    again = f"(increase({selector}[{whole}]) and {fell})"
    return f"({known} or {new} or {late} or {again})"


def peak(question: str, start: float, end: float, *, every: float) -> str:
    """The greatest value of a question between two moments, looked at every so many seconds."""
    return f"max_over_time(({question})[{span(start, end)}:{span(0, every)}])"


class Count(NamedTuple):
    """What is to be counted: selectors, and labels."""

    by_leak: str
    paid: str
    """The same time, one series instead of one for each leak."""
    recorded: str
    """Of a rule that sums it by leak."""
    of: Key
    """Whose time it is."""
    recorded_of: Key
    """Whose it is for the rule: some of these."""
    parts: Key
    """What it is split by; the last is the leak."""
    began: str
    """Of a gauge: when that began whose time it is, Unix seconds; empty: always before."""
    daemon: str = ""
    """The same of its daemon."""


class Counting:
    """Counts. `interval`: seconds between two scrapes."""

    def __init__(self, ask: Ask, *, interval: float) -> None:
        self._ask, self._interval = ask, interval
        self.by_rules = False
        """Whether anything was split by what rules have recorded."""

    def time(self, count: Count, period: Period) -> Iterator[tuple[Key, float]]:
        """Seconds by whose they are and what they are split by, once or several times each."""
        samples = sum(
            row.value for row in self._ask(f"sum(count_over_time({count.paid}[{span(*period)}]))", period.end)
        )
        whole = list(self._cut(period, samples * LEAKS))
        shares = self._shares(count, period) if len(whole) > 1 else {}
        if not shares:
            for part in whole:
                rows = self._grown(count.by_leak, (*count.of, *count.parts), count, part)
                yield from ((_key(row, (*count.of, *count.parts)), row.value) for row in rows)
            return
        self.by_rules = True
        unsplit = {("true",) * (len(count.parts) - 1) + (UNSPLIT,): 1.0}
        for part in self._cut(period, samples):
            for row in self._grown(count.paid, count.of, count, part):
                split = shares.get(_key(row, count.recorded_of), unsplit)
                yield from (((*_key(row, count.of), *into), row.value * share) for into, share in split.items())

    def _grown(self, counter: str, labels: Key, count: Count, part: Period) -> list[Sample]:
        older = self._older(count, part) if count.began else f"count_over_time({counter}[{span(*part)}])"
        growth = grown(counter, *part, back=max(3600.0, 4 * self._interval), older=older, on=", ".join(count.of))
        return self._ask(f"sum by ({', '.join(labels)}) ({growth}) > 0", part.end)

    def _older(self, count: Count, part: Period) -> str:
        """Of what is older than a part, or than its daemon: that may go on counting under another address."""
        began = f"last_over_time({count.began}[{span(*part)}])"
        daemon = f"max by ({PER_DAEMON}) (last_over_time({count.daemon}[{span(*part)}]))"
        return f"({began} < {part.start!r} or {began} < on ({PER_DAEMON}) group_left () {daemon})"

    def _shares(self, count: Count, period: Period) -> dict[Key, dict[Key, float]]:
        """Empty where there is no such rule."""
        labels = (*count.recorded_of, *count.parts)
        question = f"sum by ({', '.join(labels)}) (sum_over_time({count.recorded}[{span(*period)}]))"
        sums: dict[Key, dict[Key, float]] = defaultdict(dict)
        for row in self._ask(question, period.end):
            sums[_key(row, count.recorded_of)][_key(row, count.parts)] = row.value
        return {key: _of_one(each) for key, each in sums.items()}

    def _cut(self, period: Period, samples: float) -> Iterator[Period]:
        """In parts of about as many samples as one answer may read."""
        number = max(1, math.ceil(samples * _READS / MOST_READ))
        length = max(4 * self._interval, (period.end - period.start) / number)
        start = period.start
        while start + 1.5 * length < period.end:
            yield Period(start, start + length)
            start += length
        yield Period(start, period.end)


def _key(row: Sample, labels: Iterable[str]) -> Key:
    return tuple(row.labels.get(label, "") for label in labels)


def _of_one(amounts: dict[Key, float]) -> dict[Key, float]:
    total = sum(amounts.values())
    return {key: value / total for key, value in amounts.items() if total > 0}
