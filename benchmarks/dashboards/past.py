"""A week and a day of recorded series, made from one evaluation of all rules.

Owns what went before: each series goes on backwards from the value that the rules gave it, a little lower at times, at
the pace of its group; a job that runs now was preceded by others on the same GPUs, of the same size and kind, one after
the other. Whole numbers stay as they are. Refuses raw series: rates, sums and joins come from the rules alone.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

from msgspec import Struct

from benchmarks.dashboards.blocks import Chunk, Refs, Samples, block, joined, stored
from tests.dashboards.remote_write import Points
from tests.e2e.running import Labels

WINDOW = 7200
"""Seconds of the smallest block; no chunk spans two of them, as Prometheus has it."""
_BLOCKS = (9, 3, 1)
"""Windows of the blocks into which Prometheus makes them with its usual retention of 15 days."""
_LIFE = 21.0
"""Windows that a job lives on average."""
_STEP = math.log(1.05)
"""Between levels of values: so many are told apart, and no more have to be encoded."""
_LARGE = 10_000.0
"""Whole numbers from here on vary like others: bytes, tokens."""
_STEADY = ("price", "threshold", "timestamp")
_LOWER = 0.08
Curve = tuple[float, bool]
"""The value, and whether it varies below that."""


class Recorded(Struct, frozen=True):
    """A series that the rules gave, and how often they do."""

    labels: Labels
    value: float
    interval: int


class Life(Struct, frozen=True):
    """A series in the windows in which it was."""

    refs: Refs
    curve: Curve
    interval: int
    begin: int
    end: int


# -- values --


def curve(name: str, value: float) -> Curve:
    """How a series goes on that had this value."""
    whole = value == int(value) if math.isfinite(value) else True
    if (whole and abs(value) < _LARGE) or any(word in name for word in _STEADY):
        return value, False
    return math.copysign(math.exp(math.floor(math.log(abs(value)) / _STEP + 1e-9) * _STEP), value), True


@cache
def _noise(of: Curve) -> tuple[float, ...]:
    """Factors that a curve goes through again and again; noise of full precision, as rates have it."""
    source = Random(repr(of))  # noqa: S311 - made-up figures
    return tuple(1 - _LOWER * source.random() for _ in range(1009))


def points(of: Curve, interval: int, begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Samples of [begin, end) in seconds."""
    level, varies = of
    noise = _noise(of) if varies else ()
    first = math.ceil(begin / interval)
    for number in range(first, math.ceil(end / interval)):
        yield number * interval, level * noise[number % 1009] if varies else level


def recent(found: Iterable[Recorded], begin: int, end: int) -> dict[Labels, Points]:
    """The same for the head: what the rules would have added after `begin` up to the end."""
    known: dict[tuple[Curve, int], Points] = {}
    made: dict[Labels, Points] = {}
    for row in found:
        key = curve(_name(row.labels), row.value), row.interval
        if key not in known:
            known[key] = list(points(*key, begin + 1, end + 1))
        if known[key]:
            made[row.labels] = known[key]
    return made


def _name(labels: Labels) -> str:
    return next(value for label, value in labels if label == "__name__")


# -- who was there before --


def lives(job: str, windows: int, *, servers: bool = False) -> list[tuple[str, int, int]]:
    """Jobs that held the same GPUs one after the other: name, first window and the one after the last."""
    if not job or servers:
        return [(job, 0, windows)]
    source, ends = Random(job), [windows]  # noqa: S311 - made-up figures
    while ends[-1] > 0:
        ends.append(max(0, ends[-1] - 1 - int(source.expovariate(1 / _LIFE))))
    names = (f"{job}-{number}" if number else job for number in range(windows + 1))
    return [(name, begin, end) for name, (end, begin) in zip(names, pairwise(ends), strict=False)]


def history(found: Sequence[Recorded], windows: int) -> tuple[list[str], list[Life]]:
    """All series of the past in the order of a block, and the table of their symbols."""
    serving = {_job(row.labels) for row in found if "engine" in dict(row.labels) or "requests" in _name(row.labels)}
    before = {job: lives(job, windows, servers=job in serving) for job in {_job(row.labels) for row in found}}
    words = {word for row in found for pair in row.labels for word in pair}
    symbols = sorted(words | {name for each in before.values() for name, _, _ in each})
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    rows = (
        Life(_refs(row.labels, name, numbers), curve(_name(row.labels), row.value), row.interval, begin, end)
        for row in found
        for name, begin, end in before[_job(row.labels)]
    )
    return symbols, sorted(rows, key=lambda life: life.refs)


def _job(labels: Labels) -> str:
    return next((value for label, value in labels if label == "job_id"), "")


def _refs(labels: Labels, job: str, numbers: Mapping[str, int]) -> Refs:
    pairs = sorted((label, job if label == "job_id" else value) for label, value in labels if value)
    return tuple(numbers[word] for pair in pairs for word in pair)


# -- blocks --


def spans(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Blocks that Prometheus would have by `end`, seconds, from window `begin` on; in windows. The last is not full."""
    at = begin
    while at * WINDOW < end:
        length = next(size for size in _BLOCKS if at % size == 0 and ((at + size) * WINDOW <= end or size == 1))
        yield at, at + length
        at += length


def write(folder: Path, found: Sequence[Recorded], *, begin: int, end: int) -> Mapping[str, int]:
    """Write all blocks of [begin, end), seconds. Returns how much there is of what."""
    first, last = begin // WINDOW, math.ceil(end / WINDOW)
    symbols, rows = history(found, last - first)
    sizes = {"numSamples": 0, "numChunks": 0, "bytes": 0, "blocks": 0}
    for start, stop in spans(first, end):
        there = [row for row in rows if row.begin < stop - first and row.end > start - first]
        content = _Content(start, stop, first, begin=begin, end=end)
        moments = {"begin": 1000 * max(begin, start * WINDOW), "end": 1000 * min(end, stop * WINDOW)}
        made = block(folder, symbols, ((row.refs, each) for row in there if (each := content.of(row))), **moments)
        sizes = {name: size + made.get(name, 1) for name, size in sizes.items()}
    return sizes


class _Content:
    """What series hold in one block; those that are alike share it."""

    def __init__(self, start: int, stop: int, first: int, *, begin: int, end: int) -> None:
        self._start, self._stop, self._first = start, stop, first
        self._begin, self._end = begin, end
        self._chunks: dict[tuple[Curve, int], list[Chunk | None]] = {}
        self._joined: dict[tuple[Curve, int, int, int], Samples | None] = {}

    def of(self, row: Life) -> Samples | None:
        """None where no moment of its pace lies within."""
        begin, end = max(self._start, row.begin + self._first), min(self._stop, row.end + self._first)
        key = row.curve, row.interval, begin, end
        if key not in self._joined:
            chunks = self._encoded(row.curve, row.interval)[begin - self._start : end - self._start]
            filled = [each for each in chunks if each]
            self._joined[key] = joined(filled) if filled else None
        return self._joined[key]

    def _encoded(self, of: Curve, interval: int) -> list[Chunk | None]:
        key = of, interval
        if key not in self._chunks:
            self._chunks[key] = [self._window(of, interval, number) for number in range(self._start, self._stop)]
        return self._chunks[key]

    def _window(self, of: Curve, interval: int, number: int) -> Chunk | None:
        begin, end = max(self._begin, number * WINDOW), min(self._end, (number + 1) * WINDOW)
        found = [(1000 * at, value) for at, value in points(of, interval, begin, end)]
        return (found[0][0], found[-1][0], len(found), stored(found)) if found else None
