"""From the stamped values of one entity to intervals that each value describes.

Owns time within one entity: a value describes the time from its field's value before to its own stamp. One field sets
the pace; the others are averaged over it, for another client may have the engine sample any field faster than the rest.
Pure: no engine, no clock. Microseconds of the engine's clock.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from exporter.sources.dcgm.fields import Blank, Value

RESEND = 3_000_000
"""How far back values are asked for again because a slower field is behind, at least."""
_LATE = 500_000
"""How much later than two periods a value may be stored."""
_PART = 4
"""A quarter of a piece more or less makes no other pace."""
_ALIKE = 10
"""Fields whose values come as often, to a tenth, are sampled in one cycle, be it that their stamps differ."""
_SLIVER = 100
"""Stamps of one cycle differ by microseconds: pieces that share less than a hundredth are of different cycles."""
_TRUE_AFTER = 10
"""Intervals over which counters of cycles are compared with the ratios before they are believed."""
_AGREE = 0.03


class Interval(NamedTuple):
    """What was measured over (start, end]."""

    start: int
    end: int
    values: dict[int, float]
    """Field id -> mean over the interval, or a counter at its end; what was not seen for at least half of it is not
    there."""
    blank: bool
    """The field that sets the pace said nothing."""


class Piece(NamedTuple):
    """One value and the time (start, end] it describes."""

    start: int
    end: int
    value: Value


class Series:
    """Values of one entity on their way to intervals. `fields` in order of who sets the pace: the first that speaks.

    `counters` are those of them that only grow. `period` is the longest time between two values, microseconds.
    """

    def __init__(self, fields: Sequence[int], *, period: int, since: int, counters: Collection[int] = ()) -> None:
        self._all, self._counters, self._period = tuple(fields), frozenset(counters), period
        self._patience = 2 * period + _LATE
        self.forget(since)

    def forget(self, since: int) -> None:
        """Begin anew: values stamped before `since` are over, the next one is the baseline."""
        self.edge: int | None = None
        self.newest = self._floor = since
        self._absent: set[int] = set()
        self._gap: dict[int, int] = {}
        """Of the fields that have spoken: the time between their last two values."""
        self._last = dict.fromkeys(self._all, since)
        self._waiting: dict[int, list[Piece]] = {field: [] for field in self._all}

    @property
    def fields(self) -> list[int]:
        """Those that exist here, as far as they have said: the others last said that they are not supported."""
        return [field for field in self._all if field not in self._absent]

    @property
    def since(self) -> int:
        """Stamp from which values are wanted next: behind the slowest field, but not for ever."""
        slowest = min((self._last[field] for field in self.fields), default=0)
        return max(self._floor, slowest + 1, self.newest - max(RESEND, self._patience))

    def add(self, field: int, at: int, value: Value) -> None:
        """Take one value; one seen before is dropped."""
        if field not in self._last or at <= self._last[field]:
            return
        gap = self._gap[field] = at - self._last[field] if field in self._gap else self._period
        self._last[field] = at
        self.newest = max(self.newest, at)
        if value is Blank.NOT_SUPPORTED:
            self._absent.add(field)
            return
        self._absent.discard(field)
        self._waiting[field].append(Piece(at - gap, at, value))

    def ripe(self, until: int) -> int:
        """Stamp up to which nothing more need be waited for; a field that is slower or late has a while, then none."""
        told = [field for field in self.fields if field in self._gap]
        alive = [field for field in told if self.newest - self._last[field] <= self._patience]
        pace = self._gap[alive[0]] if alive else 0
        fellows = {field for field in alive[1:] if abs(self._gap[field] - pace) <= pace // _ALIKE}
        known = [self._last[field] + (pace // _PART if field in fellows else 0) for field in alive]
        return max(until - self._patience, min([until, *known]))

    def take(self, until: int) -> list[Interval]:
        """Intervals that end at `until` or before: later stamps may still lack their fellows."""
        intervals = []
        while (piece := self._pace()) is not None and piece.end <= until:
            if self.edge is not None:
                intervals.append(self._interval(self.edge, piece))
            self.edge = piece.end
            for field, pieces in self._waiting.items():
                self._waiting[field] = [waiting for waiting in pieces if waiting.end > piece.end]
        return intervals

    def _pace(self) -> Piece | None:
        """The next piece of the first field that knows the time from the edge on; where none does, of any."""
        ahead = [piece for pieces in self._waiting.values() if (piece := self._next(pieces)) is not None]
        edge = self.edge
        known = (p for p in ahead if edge is None or (p.start - edge) * _PART <= p.end - p.start)
        return next(known, min(ahead, key=lambda piece: piece.start, default=None))

    def _next(self, pieces: Sequence[Piece]) -> Piece | None:
        """The first that reaches well beyond the edge."""
        edge = self.edge
        return next((p for p in pieces if edge is None or (p.end - edge) * _PART > p.end - p.start), None)

    def _interval(self, start: int, pace: Piece) -> Interval:
        seen = {}
        for field, pieces in self._waiting.items():
            at = _at if field in self._counters else _mean
            value = at(pieces, start, pace.end)
            if value is not None:
                seen[field] = value
        return Interval(start, pace.end, seen, isinstance(pace.value, Blank))


def _mean(pieces: Sequence[Piece], start: int, end: int) -> float | None:
    """Mean of the values over (start, end], weighted by their time; None where less than half of it is known."""
    known = []
    for piece in pieces:
        shared = min(piece.end, end) - max(piece.start, start)
        if shared * _SLIVER > min(piece.end - piece.start, end - start) and isinstance(piece.value, (int, float)):
            known.append((shared, piece.value))
    seen = sum(shared for shared, _ in known)
    if 2 * seen < end - start:
        return None
    return float(known[0][1]) if len(known) == 1 else sum(shared * value for shared, value in known) / seen


def _at(pieces: Sequence[Piece], start: int, end: int) -> float | None:
    """The value stamped nearest to `end`, if it is near."""
    near = min(pieces, key=lambda piece: abs(piece.end - end), default=None)
    if near is None or abs(near.end - end) * _PART > end - start or not isinstance(near.value, (int, float)):
        return None
    return float(near.value)


class Cycles:
    """Ratios from cumulative counters of cycles, once they have proved to agree with the ratios themselves.

    A difference of counters is exact over its interval; a ratio may describe a longer one (DCGM takes as baseline
    the newest sample at least one period old). Which cycles a counter counts is the driver's business: those that
    stay further than 3 points from the ratio over ten intervals are not used.
    """

    def __init__(self, elapsed: int, pairs: dict[int, int]) -> None:
        self._elapsed, self._pairs = elapsed, pairs
        """Field id of a counter -> field id of the ratio it is worth."""
        self._before: dict[int, float] = {}
        self._compared = dict.fromkeys(pairs, 0)
        self._apart = dict.fromkeys(pairs, 0.0)

    def forget(self) -> None:
        """The counters' last values belong to another time."""
        self._before = {}

    def correct(self, values: dict[int, float]) -> None:
        """Replace in one interval's `values` the ratios that the counters know better."""
        before, self._before = self._before, dict(values)
        elapsed = values.get(self._elapsed, 0.0) - before.get(self._elapsed, 0.0)
        if self._elapsed not in before or elapsed <= 0:
            return
        for counter, ratio in self._pairs.items():
            if counter in values and counter in before and ratio in values:
                self._judge(counter, ratio, (values[counter] - before[counter]) / elapsed, values)

    def _judge(self, counter: int, ratio: int, exact: float, values: dict[int, float]) -> None:
        self._compared[counter] += 1
        self._apart[counter] += exact - values[ratio]
        agree = abs(self._apart[counter]) <= _AGREE * self._compared[counter]
        if self._compared[counter] > _TRUE_AFTER and agree and 0.0 <= exact <= 1.0:
            values[ratio] = exact
