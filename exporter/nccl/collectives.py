"""Adds up the timed collectives of one process, and reports them as `CollectiveReport`s.

The time in which at least one collective executes is the exact union of their intervals over all communicators. Events
come late and out of order: a report ends `SETTLE` before the last event's end, and what comes later for time that was
already reported is added to the next reports, as far as they have room. Memory is bounded: of reported time only the
last minute is known, and at most MOST_INTERVALS intervals are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from msgspec import Struct

from exporter.core.model import MS, NEVER, SECOND, CollectiveReport, CollectiveUse
from exporter.nccl.events import CollectiveEvent
from exporter.workloads import WorkloadProcess

MICROSECOND = 1000
"""Nanoseconds."""
SETTLE = SECOND
"""Communicators are written one after the other, so that the last event is not the last to have ended."""
LONGEST_REPORT = 60 * SECOND
"""Of a longer time without reports only the end is reported."""
RETENTION = 60 * SECOND
"""How much of the reported time is kept for late events; those that are even later are left out of the union."""
MOST_INTERVALS = 4096
_MOST_LATE = 60 * SECOND


class IntervalUnion:
    """The union of intervals, as disjoint intervals in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._floor = NEVER
        """Nothing before it is known or added."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> int:
        """Add [start, end); return how much of it was not covered yet."""
        start = max(start, self._floor)
        if start >= end:
            return 0
        if not self._ends or start > self._ends[-1]:  # as most do
            self._starts.append(start)
            self._ends.append(end)
            return end - start
        left, right = bisect_left(self._ends, start), bisect_right(self._starts, end)
        covered = sum(self._ends[left:right]) - sum(self._starts[left:right])
        if left < right:
            start, end = min(start, self._starts[left]), max(end, self._ends[right - 1])
        self._starts[left:right], self._ends[left:right] = [start], [end]
        return end - start - covered

    def covered(self, start: int, end: int) -> int:
        """How much of [start, end) is covered."""
        left, right = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or left >= right:
            return 0
        whole = sum(self._ends[left:right]) - sum(self._starts[left:right])
        return whole - max(0, start - self._starts[left]) - max(0, self._ends[right - 1] - end)

    def forget(self, before: int, *, most: int = MOST_INTERVALS) -> None:
        """Forget what is before a moment, and the oldest intervals beyond `most`."""
        surplus = len(self) - most
        if surplus > 0:
            before = max(before, self._ends[surplus - 1])
        self._floor = max(self._floor, before)
        gone = bisect_right(self._ends, self._floor)
        del self._starts[:gone], self._ends[:gone]


def place_events(events: Sequence[CollectiveEvent]) -> list[tuple[int, int]]:
    """Start and end of each event, Unix microseconds; the events are in the order in which they were written.

    An event that is not `exact` had ended by its `end`, the time of the dump, and several are dumped at once. A
    communicator executes its collectives one after the other, and so are transfers with the same peer in one direction:
    each ended at the latest when the next began.
    """
    placed = [(event.start, event.end) for event in events]
    begin_of_next: dict[tuple[str, str, int | None], int] = {}
    for index in reversed(range(len(events))):
        event = events[index]
        if event.exact:
            continue
        sequence = (event.communicator, "" if event.peer is None else event.name, event.peer)
        end = min(event.end, begin_of_next.get(sequence, event.end))
        begin_of_next[sequence] = end - event.duration
        placed[index] = (end - event.duration, end)
    return placed


class _Sums(Struct):
    """Calls of one kind since the last report."""

    calls: int = 0
    nanoseconds: int = 0
    bytes: int = 0
    bus_bytes: float | None = None

    def add(self, event: CollectiveEvent) -> None:
        self.calls += 1
        self.nanoseconds += event.duration * MICROSECOND
        self.bytes += event.bytes
        if event.bus_bandwidth is not None:
            self.bus_bytes = (self.bus_bytes or 0.0) + event.bus_bandwidth * event.duration * MICROSECOND / SECOND


class CollectiveAccumulator:
    """Adds up the events of one process."""

    def __init__(self) -> None:
        self._union = IntervalUnion()
        self._sums: dict[str, _Sums] = {}
        self._first: int | None = None
        """Start of the earliest event before the first report."""
        self._last = NEVER
        """End of the latest event."""
        self._reported_until: int | None = None
        self._largest = (0, "")
        """Ranks of the largest communicator, and the process's rank in it."""
        self.late = 0
        """Nanoseconds of communication in time that was already reported, to be added to the next reports."""

    def add(self, events: Sequence[CollectiveEvent], *, offset: int) -> None:
        """Add events as they were written; `offset` converts Unix to monotonic nanoseconds."""
        for event, (start, end) in zip(events, place_events(events), strict=True):
            sums = self._sums.get(event.name)
            if sums is None:
                sums = self._sums[event.name] = _Sums()
            sums.add(event)
            if event.ranks > self._largest[0]:
                self._largest = event.ranks, str(event.rank)
            self._add_interval(start * MICROSECOND + offset, end * MICROSECOND + offset)

    def report(self, process: WorkloadProcess, source: str, *, final: bool = False) -> CollectiveReport | None:
        """Report the time since the last report; None if there is none. `final`: no more events will come."""
        until = (self._last - (0 if final else SETTLE)) // MS * MS
        start = self._begin_of_report(until)
        if start is None or start >= until:
            return None
        found = self._union.covered(start, until)
        busy = min(until - start, found + self.late)
        self.late = min(_MOST_LATE, self.late - (busy - found))
        self._reported_until = until
        self._union.forget(until - RETENTION)
        uses, self._sums = tuple(_uses(self._sums.items())), {}
        rank, uuids = process.rank or self._largest[1], process.uuids
        return CollectiveReport(process.job_id, start, until, busy, uuids, rank, uses, source)

    def _add_interval(self, start: int, end: int) -> None:
        reported = self._reported_until
        if reported is None:
            self._first = start if self._first is None else min(self._first, start)
        elif start < reported:
            self.late += self._union.add(start, min(end, reported))
            start = reported
        self._union.add(start, end)
        self._last = max(self._last, end)
        if len(self._union) > MOST_INTERVALS:
            self._union.forget(NEVER)

    def _begin_of_report(self, until: int) -> int | None:
        begin = self._first if self._reported_until is None else self._reported_until
        return None if begin is None else max(begin // MS * MS, until - LONGEST_REPORT)


def _uses(sums: Iterable[tuple[str, _Sums]]) -> Iterable[CollectiveUse]:
    return (CollectiveUse(name, each.calls, each.nanoseconds, float(each.bytes), each.bus_bytes) for name, each in sums)
