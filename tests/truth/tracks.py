"""What one GPU does over time, and exact integrals of it over any windows.

A `Track` is a row of blocks of whole milliseconds. A block is a `Pattern` stretched to the block's length: a row of
loads with fixed shares of it. So a step of a training job is one block, however many kernels it has, and the integral
over it is a product; only blocks that a window cuts are looked into.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from tests.truth.loads import Load, mix


@dataclass(frozen=True, eq=False)
class Pattern:
    """Loads one after the other, each for a fixed share of a block. Compared by identity."""

    name: str
    loads: tuple[Load, ...]
    shares: tuple[float, ...]
    """They add up to 1."""
    ends: tuple[float, ...]
    """Where each load ends, as a share of the block; the last is exactly 1."""

    def mean(self) -> Load:
        """Return the load averaged over the block."""
        return mix(self.name, zip(self.shares, self.loads, strict=True))

    def loss(self, cause: str) -> float:
        """Share of the block lost to `cause`."""
        return sum(s * sum(p for c, p in x.losses if c == cause) for s, x in zip(self.shares, self.loads, strict=True))


def pattern(name: str, *parts: tuple[float, Load]) -> Pattern:
    """Return a pattern from weights, which need not add up to 1, and loads."""
    kept = [(weight, load) for weight, load in parts if weight > 0]
    total = sum(weight for weight, _ in kept)
    shares = tuple(weight / total for weight, _ in kept)
    ends = (*list(accumulate(shares))[:-1], 1.0)
    return Pattern(name, tuple(load for _, load in kept), shares, ends)


def chain(name: str, *parts: tuple[float, Pattern | Load]) -> Pattern:
    """Return one pattern from several, with weights."""
    flat: list[tuple[float, Load]] = []
    for weight, part in parts:
        if isinstance(part, Load):
            flat.append((weight, part))
        else:
            flat.extend((weight * share, load) for share, load in zip(part.shares, part.loads, strict=True))
    return pattern(name, *flat)


@dataclass(frozen=True)
class Segment:
    """A time during which nothing changes."""

    start: float
    """Milliseconds."""
    end: float
    load: Load


@dataclass
class Track:
    """The blocks of one GPU, without gaps, from millisecond 0."""

    starts: list[int] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """For each block, its pattern's position in `patterns`."""
    patterns: list[Pattern] = field(default_factory=list)
    end: int = 0
    """Milliseconds."""
    _known: dict[int, int] = field(default_factory=dict)
    _loads: dict[int, tuple[Load, Pattern]] = field(default_factory=dict)

    def add(self, milliseconds: float, what: Pattern | Load) -> None:
        """Append a block, rounded to whole milliseconds of the track."""
        self.until(self.end + round(milliseconds), what)

    def until(self, end: int, what: Pattern | Load) -> None:
        """Append a block that ends at `end`; nothing if that is past."""
        if end <= self.end:
            return
        pattern_ = self._pattern(what)
        number = self._known.get(id(pattern_))
        if number is None:
            number = self._known[id(pattern_)] = len(self.patterns)
            self.patterns.append(pattern_)
        self.starts.append(self.end)
        self.durations.append(end - self.end)
        self.used.append(number)
        self.end = end

    def _pattern(self, what: Pattern | Load) -> Pattern:
        if isinstance(what, Pattern):
            return what
        found = self._loads.get(id(what))
        if found is None:
            found = self._loads[id(what)] = (what, pattern(what.name, (1.0, what)))
        return found[1]

    def trim(self, end: int) -> None:
        """Cut off everything after `end`, on a segment's exact boundary or within it."""
        while self.starts and self.starts[-1] >= end:
            self._pop()
        if not self.starts or self.end <= end:
            return
        start, whole = self.starts[-1], self.durations[-1]
        cut = self.patterns[self.used[-1]]
        self._pop()
        share = (end - start) / whole
        parts, begin = [], 0.0
        for stop, load in zip(cut.ends, cut.loads, strict=True):
            parts.append((max(0.0, min(stop, share) - begin), load))
            begin = stop
        self.until(end, pattern(cut.name, *parts))

    def _pop(self) -> None:
        self.end = self.starts.pop()
        self.durations.pop()
        self.used.pop()

    def segments(self) -> Iterator[Segment]:
        """Yield every segment, in order."""
        for start, whole, number in zip(self.starts, self.durations, self.used, strict=True):
            begin = 0.0
            for stop, load in zip(self.patterns[number].ends, self.patterns[number].loads, strict=True):
                yield Segment(start + begin * whole, start + stop * whole, load)
                begin = stop


Rates = Callable[[Load], Sequence[float]]
"""The quantities to integrate: rates per second under a load."""


class Integrals:
    """Exact integrals over a track, from its beginning to any time."""

    def __init__(self, track: Track, rates: Rates) -> None:
        self._track = track
        self._rates: list[list[Sequence[float]]] = []
        self._before: list[list[list[float]]] = []
        self._means: list[list[float]] = []
        self._seen: dict[int, Sequence[float]] = {}
        for pattern_ in track.patterns:
            self._enter(pattern_, rates)
        self.width = len(self._means[0]) if self._means else 0
        self._totals = [self._cumulative(channel) for channel in range(self.width)]

    def _enter(self, pattern_: Pattern, rates: Rates) -> None:
        rows = []
        for load in pattern_.loads:
            if id(load) not in self._seen:
                self._seen[id(load)] = rates(load)
            rows.append(self._seen[id(load)])
        before = [[0.0] * len(rows[0])]
        for share, row in zip(pattern_.shares, rows, strict=True):
            before.append([x + share * y for x, y in zip(before[-1], row, strict=True)])
        self._rates.append(rows)
        self._means.append(before.pop())
        self._before.append(before)

    def _cumulative(self, channel: int) -> list[float] | None:
        means = [row[channel] for row in self._means]
        if not any(means):
            return None
        track = self._track
        return list(accumulate(map(mul, track.durations, map(means.__getitem__, track.used)), initial=0.0))

    def _spot(self, edge: float) -> tuple[int, float, Sequence[float], float, Sequence[float]]:
        """Find the segment that contains the moment just before `edge`.

        Returns its block, the block's length, the integrals per millisecond of block before the segment, the
        milliseconds since its start, and its rates.
        """
        track = self._track
        block = max(0, bisect_left(track.starts, edge) - 1)
        whole, number = track.durations[block], track.used[block]
        inside = min(max(edge - track.starts[block], 0.0), whole)
        ends = track.patterns[number].ends
        if len(ends) == 1:
            return block, 0.0, self._before[number][0], inside, self._rates[number][0]
        segment = min(bisect_left(ends, inside / whole), len(ends) - 1)
        begin = ends[segment - 1] if segment else 0.0
        return block, whole, self._before[number][segment], inside - begin * whole, self._rates[number][segment]

    def until(self, edges: Sequence[float], channels: Sequence[int] | None = None) -> list[list[float]]:
        """Integrate each channel from 0 to each edge (milliseconds); the results are per second x seconds."""
        spots = [self._spot(edge) for edge in edges]
        wanted = range(self.width) if channels is None else channels
        result = []
        for k in wanted:
            total = self._totals[k]
            if total is None:
                result.append([0.0] * len(spots))
            else:
                result.append([(total[b] + w * p[k] + m * r[k]) / 1e3 for b, w, p, m, r in spots])
        return result

    def latest(self, edges: Sequence[float], channel: int) -> list[float]:
        """Return a channel's rate just before each edge."""
        return [self._spot(edge)[4][channel] for edge in edges]
