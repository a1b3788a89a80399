"""A board or a MIG instance between reads: what was last said of it, and where its last reading ended.

Owns the edges of its readings on the host's clock and its share of the board's energy. Refuses identity and questions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from exporter.core.model import NEVER, PPM, Device, Reading
from exporter.sources.dcgm.engine import Entity, Sample
from exporter.sources.dcgm.series import Cycles, Interval, Series

Span = tuple[int, int, Interval | None]
"""Monotonic nanoseconds [start, end) and what was measured over it; None: there are only gauges."""


class Unit:
    """A board or an instance: a device with its entity, its series, and where its last reading ended."""

    def __init__(self, device: Device, entity: Entity) -> None:
        self.device, self.entity = device, entity
        self.series: Series | None = None
        self.cycles: Cycles | None = None
        self.latest: dict[int, Sample] = {}
        self.newest = 0
        """Stamp of the newest of the latest values."""
        self._ended, self._joined = NEVER, False
        """End of the last reading, and whether the next begins there."""
        self._gauged: int | None = None
        self._counter: tuple[int, float] | None = None

    def begin(self, series: Series, cycles: Cycles | None) -> None:
        """Profiling values are to come, through a new series."""
        self.series, self.cycles = series, cycles

    def forget(self, wall: int) -> None:
        """Drop every baseline; values stamped before `wall`, microseconds of the engine's clock, are over."""
        self._joined, self._counter = False, None
        self.latest = {}
        if self.series is not None:
            self.series.forget(wall)
        if self.cycles is not None:
            self.cycles.forget()

    def number(self, field: int) -> float | int | None:
        """The latest value of a field, if it is one."""
        sample = self.latest.get(field)
        return sample.value if sample is not None and isinstance(sample.value, (int, float)) else None

    @property
    def silent(self) -> bool:
        """Not one of its fields has a value."""
        return not any(isinstance(sample.value, (int, float)) for sample in self.latest.values())

    @property
    def profiled(self) -> bool:
        """Profiling values are to be expected."""
        return self.series is not None and bool(self.series.fields)

    def spans(
        self, intervals: Iterable[Interval], host: Callable[[int], int], *, slack: int, floor: int
    ) -> Iterator[Span]:
        """Intervals on the host's clock, each beginning where the last ended; never before `floor`.

        An interval longer than `slack` is believed for its last part only.
        """
        for interval in intervals:
            end = host(interval.end)
            begun = self._ended if self._joined else max(host(interval.start), self._ended)
            start = max(begun, end - slack, floor)
            if end > start:
                self._ended, self._joined = end, True
                yield start, end, interval

    def since_last(self, now: int, *, slack: int, floor: int) -> list[Span]:
        """The time since the last read, for a unit without profiling; none while no gauge has been taken anew."""
        newest = max((sample.at for sample in self.latest.values()), default=0)
        if newest <= self.newest:
            return []
        before, self._gauged, self.newest = self._gauged, now, newest
        start = now if before is None else max(before, self._ended, now - slack, floor)
        if start >= now:
            return []
        self._ended, self._joined = now, False
        return [(start, now, None)]

    def energies(self, told: tuple[int, float] | None, durations: Sequence[int]) -> list[float | None]:
        """This unit's share of what the board's counter moved, at the rate between the last two times it was told.

        `told` is when (microseconds) and how many joules. Readings rarely cover just the time between the two.
        """
        if not durations:
            return []
        before, self._counter = self._counter, told
        if before is None or told is None or told[1] < before[1] or told[0] <= before[0]:
            return [None] * len(durations)
        rate = (told[1] - before[1]) / (told[0] - before[0]) / 1000 * self.device.weight / PPM
        return [rate * duration for duration in durations]

    def reading(
        self, start: int, end: int, values: Mapping[str, Any], gauges: Mapping[str, Any], joules: float | None
    ) -> Reading:
        """One reading: what was measured over it, and the latest gauges."""
        return Reading(self.device.uuid, start, end, energy_joules=joules, **{**gauges, **values})
