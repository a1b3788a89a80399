"""Joins the time-stamped values of a DCGM entity's fields into intervals.

Uses no engine and no clock. All times are microseconds of the host engine's clock.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from exporter.sources.dcgm.client import Blank, Value

MIN_RESEND = 3_000_000
"""Values are read again from at least this far back, because slower fields may be behind."""
_MAX_DELAY = 500_000
"""Delay beyond two periods with which a value may be stored."""
_QUARTER = 4
"""Times that differ by less than a quarter of an interval count as equal."""
_SAME_CYCLE = 10
"""Fields whose periods differ by less than a tenth are sampled in one cycle, even if their stamps differ."""
SAME_CYCLE_US = 100_000
"""The values of one cycle are stamped one after the other as they are processed: 5 ms apart at the median, 46 ms at the
99th percentile with 8 GPUs on DCGM 4.6."""
_SMOOTHING = 0.9
_SAME_CADENCE = 5
"""An interval and a field's usual one that differ by less than a fifth are of the same cadence."""
_SLIVER = 100
"""Stamps of one cycle differ by microseconds: values that overlap by less than a hundredth are of different cycles."""


class MeasuredInterval(NamedTuple):
    """The values measured over (start, end]."""

    start: int
    end: int
    values: dict[int, float]
    """Field id -> mean over the interval, or a counter at its end; a field that was not measured for at
    least half of it is missing."""
    blank: bool
    """True if the field that sets the pace was blank."""


class StampedValue(Struct, frozen=True, gc=False):
    """A value and the time (start, end] that it describes."""

    start: int
    end: int
    value: Value


class SampleSeries:
    """Joins the values of one entity into intervals. The first of `fields` that has values sets the pace.

    `counters` are the cumulative ones among `fields`. `period` is the longest time between two values, microseconds.
    """

    def __init__(self, fields: Sequence[int], *, period: int, since: int, counters: Collection[int] = ()) -> None:
        self._all, self._counters, self._period = tuple(fields), frozenset(counters), period
        self._max_wait = 2 * period + _MAX_DELAY
        self.watched: list[int] = list(fields)
        """The fields that are watched, supported or not."""
        self.reset(since)

    def reset(self, since: int) -> None:
        """Drop values stamped before `since`; the next one is the baseline."""
        self.edge: int | None = None
        self.newest = self._floor = since
        self._absent: set[int] = set()
        self._gap: dict[int, int] = {}
        """Time between the last two values of each field that has had a value."""
        self._usual_gap: dict[int, float] = {}
        """The same, smoothed."""
        self._last = dict.fromkeys(self._all, since)
        self._waiting: dict[int, list[StampedValue]] = {field: [] for field in self._all}

    @property
    def fields(self) -> list[int]:
        """The supported fields: the last value of the others was NOT_SUPPORTED, or they are not watched any more."""
        return [field for field in self.watched if field not in self._absent]

    def leave(self, fields: Collection[int]) -> None:
        """Expect no values of `fields`, until this is called without them."""
        self.watched = [field for field in self._all if field not in fields]

    def is_known(self, field: int, stamp: int) -> bool:
        """Return whether the value of `field` stamped `stamp` was added before, or is older than the baseline."""
        return stamp <= self._last[field]

    def follows(self, field: int, stamp: int) -> bool:
        """Return whether no value was sampled between the last one of `field` and one stamped `stamp`."""
        return field in self._gap and (stamp - self._last[field]) * _QUARTER <= self._period * (_QUARTER + 1)

    @property
    def since(self) -> int:
        """Stamp to read from next: after the last value of the slowest field, supported or not, within a limit."""
        slowest = min((self._last[field] for field in self.watched), default=0)
        return max(self._floor, slowest + 1, self.newest - max(MIN_RESEND, self._max_wait))

    def add(self, field: int, stamp: int, value: Value) -> None:
        """Add one value; ignore it if it was added before."""
        if field not in self._last or self.is_known(field, stamp):
            return
        gap = self._gap[field] = stamp - self._last[field] if field in self._gap else self._period
        self._usual_gap[field] = gap + _SMOOTHING * (self._usual_gap.get(field, gap) - gap)
        self._last[field] = stamp
        self.newest = max(self.newest, stamp)
        if value is Blank.NOT_SUPPORTED:
            self._absent.add(field)
            return
        self._absent.discard(field)
        self._waiting[field].append(StampedValue(stamp - gap, stamp, value))

    def complete_until(self, until: int) -> int:
        """Return the stamp up to which all values have arrived; slow or late fields are waited for, within a limit."""
        reporting = [field for field in self.fields if field in self._gap]
        current = [field for field in reporting if self.newest - self._last[field] <= self._max_wait]
        pace = self._gap[current[0]] if current else 0
        same_cycle = {field for field in current[1:] if abs(self._gap[field] - pace) <= pace // _SAME_CYCLE}
        known = [self._last[field] + (pace // _QUARTER if field in same_cycle else 0) for field in current]
        return max(until - self._max_wait, min([until, *known]))

    def intervals_until(self, until: int) -> list[MeasuredInterval]:
        """Remove and return the intervals that end at `until` or before; later ones may still get values."""
        intervals = []
        while (stamped := self._next_pacing_value()) is not None and stamped.end <= until:
            if self.edge is not None:
                intervals.append(self._interval(self.edge, stamped))
            self.edge = stamped.end
            for field, waiting_values in self._waiting.items():
                self._waiting[field] = [waiting for waiting in waiting_values if waiting.end > stamped.end]
        return intervals

    def _next_pacing_value(self) -> StampedValue | None:
        """Return the next value of the first field that covers the time after the edge; if none does, the earliest."""
        ahead = [
            stamped for values in self._waiting.values() if (stamped := self._first_beyond_edge(values)) is not None
        ]
        edge = self.edge
        known = (value for value in ahead if edge is None or (value.start - edge) * _QUARTER <= value.end - value.start)
        return next(known, min(ahead, key=lambda stamped: stamped.start, default=None))

    def _first_beyond_edge(self, values: Sequence[StampedValue]) -> StampedValue | None:
        """Return the first value that ends well beyond the edge."""
        edge = self.edge
        ahead = (value for value in values if edge is None or (value.end - edge) * _QUARTER > value.end - value.start)
        return next(ahead, None)

    def _interval(self, start: int, pace: StampedValue) -> MeasuredInterval:
        seen = {}
        paces = (self._usual_gap[field] for field, values in self._waiting.items() if any(v is pace for v in values))
        usual_pace = next(paces, 0.0)
        for field, waiting_values in self._waiting.items():
            combine = _value_near if field in self._counters else _mean
            same_cycle = self._of_same_cycle(field, start, pace, usual_pace) if combine is _mean else None
            value = combine(waiting_values, start, pace.end) if same_cycle is None else _number(same_cycle.value)
            if value is not None:
                seen[field] = value
        return MeasuredInterval(start, pace.end, seen, isinstance(pace.value, Blank))

    def _of_same_cycle(self, field: int, start: int, pace: StampedValue, usual_pace: float) -> StampedValue | None:
        """Return the value that was measured over this very interval, although it was stamped somewhat off its end."""
        usual = self._usual_gap.get(field, 0.0)
        if abs(usual - usual_pace) * _SAME_CADENCE > usual:
            return None
        tolerance = min(SAME_CYCLE_US, (pace.end - start) // 2)
        return next((v for v in self._waiting[field] if _distance(v, start, pace.end) < tolerance), None)


def _distance(stamped: StampedValue, start: int, end: int) -> int:
    """Return how far the value's time lies from (start, end], microseconds."""
    return max(abs(stamped.end - end), abs(stamped.start - start))


def _mean(values: Sequence[StampedValue], start: int, end: int) -> float | None:
    """Return the time-weighted mean over (start, end]; None if the values cover less than half of it."""
    known = []
    for stamped in values:
        shared = min(stamped.end, end) - max(stamped.start, start)
        if shared * _SLIVER > min(stamped.end - stamped.start, end - start) and isinstance(stamped.value, (int, float)):
            known.append((shared, stamped.value))
    seen = sum(shared for shared, _ in known)
    if 2 * seen < end - start:
        return None
    return float(known[0][1]) if len(known) == 1 else sum(shared * value for shared, value in known) / seen


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _value_near(values: Sequence[StampedValue], start: int, end: int) -> float | None:
    """Return the value stamped nearest to `end`; None if none is near."""
    near = min(values, key=lambda stamped: abs(stamped.end - end), default=None)
    return None if near is None or abs(near.end - end) * _QUARTER > end - start else _number(near.value)


_CHECK_INTERVAL_NS = 30_000_000_000
_CHECK_PERIODS = 5
_FASTER = 0.75
"""Share of the period below which the mean time between two values means that they arrive faster."""


class Cadence:
    """Learns whether values arrive faster than they are read, so that the latest ones do not suffice.

    Another client of the engine may watch a field with a shorter period: the engine then samples it at that one, and
    each value describes the shorter time.
    """

    def __init__(self, period: int) -> None:
        """`period` is that of our own watch, microseconds."""
        self._period = period
        self._checked_at: int | None = None
        self._check_began: int | None = None
        self._faster = False
        self._stamps: dict[Hashable, list[int]] = {}
        """By series: the first stamp, the last, and the number of values after the first."""

    def needs_all(self, now: int) -> bool:
        """Return whether all values since the last read are needed, at `now` in monotonic nanoseconds."""
        due = self._checked_at is None or now - self._checked_at >= _CHECK_INTERVAL_NS
        return self._faster or self._check_began is not None or due

    def add_read(self, stamps: Iterable[tuple[Hashable, int]], now: int) -> None:
        """Count a read of all values: `stamps` are (series, stamp), oldest first; known ones may be among them."""
        for series, stamp in stamps:
            seen = self._stamps.setdefault(series, [stamp, stamp, 0])
            if stamp > seen[1]:
                seen[1], seen[2] = stamp, seen[2] + 1
        self._check_began = now if self._check_began is None else self._check_began
        if now - self._check_began >= _CHECK_PERIODS * 1000 * self._period:
            limit = _FASTER * self._period
            self._faster = any(n and last - first < limit * n for first, last, n in self._stamps.values())
            self._checked_at, self._check_began, self._stamps = now, None, {}
