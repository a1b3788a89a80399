"""Keeps what an NCCL profiler plugin timed of a job's communication: totals by kind, each rank's share, a GPU's time.

Such a report arrives seconds after the time it describes is booked, and entries are never reversed. Nor can it simply
fill a balance as a training report does: most communication overlaps with computation, is never booked as a loss, and
would be left over for later times. So each GPU has a *delay line* (`CommunicationLine`): reported time enters at one
end with the part of it in which collectives executed, and leaves at the other at the pace at which time is booked.
What was reported is available once, to the time that is as long, some seconds later.
"""

from statistics import median

from msgspec import Struct

from exporter.core.model import NEVER, PPM, SECOND, CollectiveReport, CollectiveUse

COLLECTIVE_NAMES = (
    "AllReduce", "AllGather", "AllGatherV", "ReduceScatter", "Broadcast", "Reduce", "AllToAll", "Gather", "Scatter",
    "SendRecv", "Send", "Recv", "other",
)  # fmt: skip
"""Kinds of communication, by NCCL's names of its functions; each is a series, so any other name counts as other."""
MOST_USES = 16
"""Maximum number of kinds in a report."""
_HALF_LIFE = 60 * SECOND
"""Age at which a report counts half in the recent means."""
_FORGOTTEN = 3600 * SECOND
_LIVE_FOR = 60 * SECOND
"""A rank that has reported nothing for this long is no longer compared."""
CLEARLY_LESS = 0.05
"""E: a rank is the one that others wait for if it communicates so much less of the time than their median."""
_MAX_RANKS = 64
"""Maximum number of ranks of one job on one node."""
_RANK_DIGITS = 9
_LARGEST_AMOUNT = 1e30
"""Larger amounts are rejected because their sums could become infinite."""
_LONGEST_LINE = 60 * SECOND
"""Longest reported time in the delay line: steps that report in bursts are rarely longer; older time is dropped."""
_MOST_SEGMENTS = 256


class CollectiveTotals(Struct, eq=False):
    """Totals of one kind of communication of one job on this node."""

    calls: int = 0
    nanoseconds: int = 0
    """Sum over all calls and ranks, which may overlap."""
    bytes: float = 0.0
    recent_bus_bytes: float = 0.0
    recent_seconds: float = 0.0
    """Decaying sums, of calls whose bus bandwidth is reported."""

    def add(self, use: CollectiveUse, weight: float) -> None:
        """Add the calls of one report; `weight` is what recent sums are still worth."""
        self.calls += use.calls
        self.nanoseconds += use.nanoseconds
        self.bytes += use.bytes
        if use.bus_bytes is not None:
            self.recent_bus_bytes = self.recent_bus_bytes * weight + use.bus_bytes
            self.recent_seconds = self.recent_seconds * weight + use.nanoseconds / SECOND


class RankCommunication(Struct, eq=False):
    """The recent communication of one rank."""

    end: int = NEVER
    """End of its last report."""
    busy: float = 0.0
    seen: float = 0.0
    """Decaying sums: nanoseconds in which a collective executed, of those that reports cover."""

    def add(self, report: CollectiveReport) -> None:
        """Add one report of the rank."""
        weight = _remaining(report.end - self.end)
        self.busy = self.busy * weight + report.busy
        self.seen = self.seen * weight + report.end - report.start
        self.end = max(self.end, report.end)


class CollectiveStats(Struct, eq=False):
    """Totals of one job's communication on this node; stored in checkpoints."""

    source: str = ""
    """The plugin of the last report: inspector or comma."""
    until: int = NEVER
    """End of the last report."""
    busy: int = 0
    covered: int = 0
    """Nanoseconds in which a process communicated, of those that its reports cover; summed over processes."""
    uses: dict[str, CollectiveTotals] = {}
    """Totals by kind, one of COLLECTIVE_NAMES."""
    ranks: dict[str, RankCommunication] = {}

    def add(self, report: CollectiveReport) -> None:
        """Add one report of one process."""
        weight = _remaining(report.end - self.until)
        self.source, self.until = report.source, max(self.until, report.end)
        self.busy += report.busy
        self.covered += report.end - report.start
        for use in report.collectives:
            name = use.name if use.name in COLLECTIVE_NAMES else "other"
            self.uses.setdefault(name, CollectiveTotals()).add(use, weight)
        if report.rank and (report.rank in self.ranks or len(self.ranks) < _MAX_RANKS):
            self.ranks.setdefault(report.rank, RankCommunication()).add(report)


def _remaining(age: int) -> float:
    """What a decaying sum is still worth after `age` nanoseconds."""
    return float(0.5 ** (min(max(0, age), _FORGOTTEN) / _HALF_LIFE))


class CollectiveView(Struct, frozen=True):
    """One kind of communication of a job, in a snapshot."""

    name: str
    calls: int
    nanoseconds: int
    bytes: float
    bus_bytes_per_second: float | None
    """Recent mean of the bus bandwidth, by NCCL's convention; None: not reported."""


class CommunicationView(Struct, frozen=True):
    """What a profiler plugin timed of a job's communication on this node, in a snapshot."""

    source: str
    busy: int
    covered: int
    uses: tuple[CollectiveView, ...]
    """In the order of COLLECTIVE_NAMES."""
    ranks: tuple[tuple[str, float], ...]
    """Each rank with the share of its recent time in which a collective executed."""
    slowest: tuple[str, float] | None
    """The rank that others wait for, and by how much less of the time it communicates than their median."""


def communication_view(stats: CollectiveStats, at: int) -> CommunicationView:
    """Build the view at `at`, without ranks that no longer report."""
    ranks = tuple(
        (name, rank.busy / rank.seen)
        for name, rank in sorted(stats.ranks.items(), key=lambda item: int(item[0]))
        if at - rank.end <= _LIVE_FOR
    )
    uses = (_collective_view(name, stats.uses[name]) for name in COLLECTIVE_NAMES if name in stats.uses)
    return CommunicationView(stats.source, stats.busy, stats.covered, tuple(uses), ranks, _slowest(ranks))


def _collective_view(name: str, total: CollectiveTotals) -> CollectiveView:
    rate = total.recent_bus_bytes / total.recent_seconds if total.recent_seconds else None
    return CollectiveView(name, total.calls, total.nanoseconds, total.bytes, rate)


def _slowest(ranks: tuple[tuple[str, float], ...]) -> tuple[str, float] | None:
    """The rank that arrives last at collectives spends the least time in them: the others wait inside for it."""
    if len(ranks) < 2:  # noqa: PLR2004  a rank and one that waits for it
        return None
    last = min(ranks, key=lambda rank: rank[1])
    behind = median(share for name, share in ranks if name != last[0]) - last[1]
    return (last[0], behind) if behind >= CLEARLY_LESS else None


def is_credible_communication(report: CollectiveReport, at: int) -> bool:
    """Whether a report is plausible: not in the future, no more communication than time, and finite amounts."""
    return (
        report.start < report.end <= at
        and 0 <= report.busy <= report.end - report.start
        and len(report.collectives) <= MOST_USES
        and all(map(_is_credible_use, report.collectives))
        and (not report.rank or (report.rank.isdecimal() and len(report.rank) <= _RANK_DIGITS))
    )


def _is_credible_use(use: CollectiveUse) -> bool:
    amounts = (use.calls, use.nanoseconds, use.bytes, use.bus_bytes or 0.0)
    return all(0 <= amount <= _LARGEST_AMOUNT for amount in amounts)


class CommunicationLine(Struct, eq=False):
    """The delay line of one GPU and job; see the module's docstring.

    Its delay grows when reports come late and the line runs empty, so that it then spans the reports' jitter. While it
    is empty no report covers what is booked. Time that is booked without asking passes through it all the same.
    """

    segments: list[tuple[int, int | None]] = []
    """Nanoseconds of reported time, oldest first, and those of them with a collective; None: no report covers them."""
    length: int = 0
    """Sum of the segments."""
    frontier: int = NEVER
    """Up to when time has been reported."""
    until: int = NEVER
    """Up to when booked time has passed through."""
    rest: int = 0
    """What was rounded off shares so far, ppm times nanoseconds."""
    asked: tuple[int, int] = (NEVER, NEVER)
    share: int | None = None
    """The last interval asked for, and its share."""

    def add(self, start: int, end: int, busy: int) -> None:
        """Add `busy` nanoseconds of communication in [start, end); time that was reported before is left out."""
        if end <= self.frontier:
            return
        if start < self.frontier:
            busy = busy * (end - self.frontier) // (end - start)
            start = self.frontier
        if self.frontier != NEVER and start > self.frontier:
            self._append(min(start - self.frontier, _LONGEST_LINE), None)
        self._append(end - start, busy)
        self.frontier = end
        self._drop(self.length - _LONGEST_LINE)
        while len(self.segments) > _MOST_SEGMENTS:
            self._drop(self.segments[0][0])

    def take(self, start: int, end: int) -> int | None:
        """Share of [start, end) with a collective, ppm; None where no report covers it. Asks in order of time.

        Asking for the same interval again gives the same share.
        """
        if (start, end) == self.asked:
            return self.share
        if start < self.until:
            return None
        if self.until != NEVER:
            self._drop(start - self.until)
        self.until, self.asked = end, (start, end)
        busy, covered = self._draw(end - start)
        exact = busy * PPM + self.rest
        self.share = min(PPM, exact // (end - start)) if covered else None
        self.rest = exact - (self.share or 0) * (end - start)
        return self.share

    def _append(self, duration: int, busy: int | None) -> None:
        self.segments.append((duration, busy))
        self.length += duration

    def _drop(self, duration: int) -> None:
        if duration > 0:
            self._draw(duration)

    def _draw(self, duration: int) -> tuple[int, int]:
        """Remove the oldest `duration` nanoseconds; return their communication, and how much of them was covered."""
        busy = covered = 0
        while duration and self.segments:
            length, known = self.segments.pop(0)
            part = min(length, duration)
            own = None if known is None else known * part // length
            if part < length:
                self.segments.insert(0, (length - part, None if known is None else known - (own or 0)))
            busy += own or 0
            covered += 0 if own is None else part
            duration -= part
            self.length -= part
        return busy, covered
