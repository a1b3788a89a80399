"""Turns the time-stamped values of one DCGM entity into the intervals that each value describes.

It is pure: no engine and no clock. All times are microseconds of the host engine's clock.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from exporter.sources.dcgm.client import Blank, Value

MIN_RESEND = 3_000_000
"""How far back values are read again because a slower field is behind, at least."""
_MAX_DELAY = 500_000
"""How much later than two periods a value may be stored."""
_QUARTER = 4
"""Intervals that differ by less than a quarter have the same pace."""
_SAME_CYCLE = 10
"""Fields whose periods differ by less than a tenth are sampled in one cycle, even if their stamps differ."""
_SLIVER = 100
"""Stamps of one cycle differ by microseconds: values that share less than a hundredth are of different cycles."""
_TRUSTED_AFTER = 10
"""Intervals over which counters of cycles are compared with the ratios before they are believed."""
_AGREEMENT = 0.03


class MeasuredInterval(NamedTuple):
    """What was measured over (start, end]."""

    start: int
    end: int
    values: dict[int, float]
    """Field id -> mean over the interval, or a counter at its end; a field that was not measured for at
    least half of it is missing."""
    blank: bool
    """The field that sets the pace was blank."""


class StampedValue(NamedTuple):
    """One value and the time (start, end] it describes."""

    start: int
    end: int
    value: Value


class SampleSeries:
    """Joins the values of one entity into intervals. The first of `fields` that has values sets the pace.

    `counters` are those of them that only grow. `period` is the longest time between two values, microseconds.
    """

    def __init__(self, fields: Sequence[int], *, period: int, since: int, counters: Collection[int] = ()) -> None:
        self._all, self._counters, self._period = tuple(fields), frozenset(counters), period
        self._max_wait = 2 * period + _MAX_DELAY
        self.reset(since)

    def reset(self, since: int) -> None:
        """Drop values stamped before `since`; the next one is the baseline."""
        self.edge: int | None = None
        self.newest = self._floor = since
        self._absent: set[int] = set()
        self._gap: dict[int, int] = {}
        """Of the fields that have had a value: the time between their last two values."""
        self._last = dict.fromkeys(self._all, since)
        self._waiting: dict[int, list[StampedValue]] = {field: [] for field in self._all}

    @property
    def fields(self) -> list[int]:
        """The fields that exist here: the last value of the others was NOT_SUPPORTED."""
        return [field for field in self._all if field not in self._absent]

    @property
    def since(self) -> int:
        """Stamp from which values are read next: after the last one of the slowest field, but not for ever."""
        slowest = min((self._last[field] for field in self.fields), default=0)
        return max(self._floor, slowest + 1, self.newest - max(MIN_RESEND, self._max_wait))

    def add(self, field: int, stamp: int, value: Value) -> None:
        """Add one value; one that was added before is dropped."""
        if field not in self._last or stamp <= self._last[field]:
            return
        gap = self._gap[field] = stamp - self._last[field] if field in self._gap else self._period
        self._last[field] = stamp
        self.newest = max(self.newest, stamp)
        if value is Blank.NOT_SUPPORTED:
            self._absent.add(field)
            return
        self._absent.discard(field)
        self._waiting[field].append(StampedValue(stamp - gap, stamp, value))

    def complete_until(self, until: int) -> int:
        """Stamp up to which all values are there; a slow or late field is waited for, but not for ever."""
        reporting = [field for field in self.fields if field in self._gap]
        current = [field for field in reporting if self.newest - self._last[field] <= self._max_wait]
        pace = self._gap[current[0]] if current else 0
        same_cycle = {field for field in current[1:] if abs(self._gap[field] - pace) <= pace // _SAME_CYCLE}
        known = [self._last[field] + (pace // _QUARTER if field in same_cycle else 0) for field in current]
        return max(until - self._max_wait, min([until, *known]))

    def intervals_until(self, until: int) -> list[MeasuredInterval]:
        """Intervals that end at `until` or before: values of later stamps may still arrive."""
        intervals = []
        while (stamped := self._next_pacing_value()) is not None and stamped.end <= until:
            if self.edge is not None:
                intervals.append(self._interval(self.edge, stamped))
            self.edge = stamped.end
            for field, waiting_values in self._waiting.items():
                self._waiting[field] = [waiting for waiting in waiting_values if waiting.end > stamped.end]
        return intervals

    def _next_pacing_value(self) -> StampedValue | None:
        """The next value of the first field that covers the time after the edge; where none does, of any field."""
        ahead = [
            stamped for values in self._waiting.values() if (stamped := self._first_beyond_edge(values)) is not None
        ]
        edge = self.edge
        known = (p for p in ahead if edge is None or (p.start - edge) * _QUARTER <= p.end - p.start)
        return next(known, min(ahead, key=lambda stamped: stamped.start, default=None))

    def _first_beyond_edge(self, values: Sequence[StampedValue]) -> StampedValue | None:
        """The first that reaches well beyond the edge."""
        edge = self.edge
        return next((p for p in values if edge is None or (p.end - edge) * _QUARTER > p.end - p.start), None)

    def _interval(self, start: int, pace: StampedValue) -> MeasuredInterval:
        seen = {}
        for field, waiting_values in self._waiting.items():
            combine = _value_near if field in self._counters else _mean
            value = combine(waiting_values, start, pace.end)
            if value is not None:
                seen[field] = value
        return MeasuredInterval(start, pace.end, seen, isinstance(pace.value, Blank))


def _mean(values: Sequence[StampedValue], start: int, end: int) -> float | None:
    """Mean of the values over (start, end], weighted by their time; None where less than half of it is known."""
    known = []
    for stamped in values:
        shared = min(stamped.end, end) - max(stamped.start, start)
        if shared * _SLIVER > min(stamped.end - stamped.start, end - start) and isinstance(stamped.value, (int, float)):
            known.append((shared, stamped.value))
    seen = sum(shared for shared, _ in known)
    if 2 * seen < end - start:
        return None
    return float(known[0][1]) if len(known) == 1 else sum(shared * value for shared, value in known) / seen


def _value_near(values: Sequence[StampedValue], start: int, end: int) -> float | None:
    """The value stamped nearest to `end`, if it is near."""
    near = min(values, key=lambda stamped: abs(stamped.end - end), default=None)
    if near is None or abs(near.end - end) * _QUARTER > end - start or not isinstance(near.value, (int, float)):
        return None
    return float(near.value)


class CycleCounters:
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
        self._deviation = dict.fromkeys(pairs, 0.0)

    def reset(self) -> None:
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
                self._compare(counter, ratio, (values[counter] - before[counter]) / elapsed, values)

    def _compare(self, counter: int, ratio: int, exact: float, values: dict[int, float]) -> None:
        self._compared[counter] += 1
        self._deviation[counter] += exact - values[ratio]
        agree = abs(self._deviation[counter]) <= _AGREEMENT * self._compared[counter]
        if self._compared[counter] > _TRUSTED_AFTER and agree and 0.0 <= exact <= 1.0:
            values[ratio] = exact
