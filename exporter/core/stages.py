"""Recognizes a pipeline by how its stages wait: each for its neighbour, while others compute, and all for as long.

In a step of a synchronous job all GPUs begin together, and those that are done early wait for the last. Without a
pipeline, that last one is a slow GPU, which hardly waits itself, or chance, which makes the others wait little. The
stages of a pipeline have the same work and the same step, so that all wait for as long, but one after the other.
Readings longer than a step do not show who waits when; what moved between the GPUs still shows whether they exchanged
data while they polled.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

_LEAST_IDLE, _LEAST_POLLING = 0.05, 0.1
"""E: share of the time that stages wait while others compute, without a kernel, or in one that polls. GPUs whose work
differs from step to step poll for each other, too, but less."""
_KNOWN = 0.5
"""E: so much less polling shows stages that were seen to wait in turn before, if so much of it is in turn again: a
pipeline stays one. Waiting without a kernel has more causes, such as a save."""
_ALIKE = 0.5
"""E: each waits at least this share of the mean of all, so that none is the one that the others wait for."""
_OTHER_KIND = 0.25
"""E: stages wait without a kernel or poll, by their library. Where some wait without a kernel, as for input, and others
then poll for them, the two take about as long."""
_TOGETHER, _GAPS = 0.8, 0.5
"""E: of stages whose turns no reading shows, each polls for at least so much of what the mean does, and they are for at
most so much of that time without a kernel: gaps between small kernels look like polling, too."""
_LEAST_SILENT = 0.3
"""E: share of such polling that no traffic explains. Stages exchange some data, other programs nearly as little."""


class Bubbles(Struct, frozen=True):
    """Shares of a job's waiting that are pipeline bubbles, 0-1, by how stages wait."""

    idle: float = 0.0
    """Of the time without a kernel."""
    polling: float = 0.0
    """Of the time in which communication kernels alone are estimated to run."""


NO_BUBBLES = Bubbles()


class StageReading(Struct, frozen=True):
    """What one GPU did in some time, shares of it, 0-1."""

    uuid: str
    idle: float
    polling: float
    """In which only communication kernels ran."""
    computing: float
    exchanges: bool
    """Its link moved data."""
    transferring: float = 0.0
    """In which short collectives would have moved what its link did."""
    hides_turns: bool = False
    """It also computed, and no data went to other nodes."""


class _StageSums(Struct, eq=False, array_like=True):
    """Milliseconds of one GPU."""

    seen: int = 0
    idle: float = 0.0
    polling: float = 0.0
    idle_meanwhile: float = 0.0
    polling_meanwhile: float = 0.0
    """Those in which another GPU of the job computed."""
    exchanged: int = 0
    transferring: float = 0.0
    hidden: int = 0
    """Those of readings in which it may have polled in turn with others. Last: checkpoints store fields by place."""


class StageWaits(Struct, eq=False, array_like=True):
    """The waiting of a job's GPUs on this node in the current minute."""

    gpus: dict[str, _StageSums] = {}
    seen_before: bool = False
    """An earlier minute showed bubbles. Last: checkpoints store fields by place."""

    def add(self, readings: Sequence[StageReading], ms: int) -> None:
        """Add what the job's GPUs did in the same `ms` milliseconds."""
        most = max(reading.computing for reading in readings)
        for reading in readings:
            sums = self.gpus.setdefault(reading.uuid, _StageSums())
            sums.seen += ms
            sums.exchanged += ms if reading.exchanges else 0
            sums.transferring += reading.transferring * ms
            sums.hidden += ms if reading.hides_turns and reading.polling >= _LEAST_POLLING else 0
            waits = reading.idle + reading.polling
            if waits > 0.0:
                meanwhile = min(1.0, (most - reading.computing) / waits) * ms
                sums.idle += reading.idle * ms
                sums.polling += reading.polling * ms
                sums.idle_meanwhile += reading.idle * meanwhile
                sums.polling_meanwhile += reading.polling * meanwhile

    def bubbles(self) -> Bubbles:
        """What the minute shows; nothing unless its GPUs wait like the stages of a pipeline."""
        sums = self.gpus.values()
        if len(sums) < 2 or not all(each.exchanged for each in sums):  # noqa: PLR2004  a stage and its neighbour
            return NO_BUBBLES
        by_turns = self._by_turns()
        return self._by_traffic() if by_turns == NO_BUBBLES else by_turns

    def _by_turns(self) -> Bubbles:
        """What is waited while others compute."""
        sums = self.gpus.values()
        seen = sum(each.seen for each in sums)
        idle, polling = sum(each.idle_meanwhile for each in sums), sum(each.polling_meanwhile for each in sums)
        if min(idle, polling) > _OTHER_KIND * max(idle, polling):
            return NO_BUBBLES
        if idle >= max(_LEAST_IDLE * seen, polling) and _are_alike(each.idle_meanwhile / each.seen for each in sums):
            return Bubbles(idle=_middle(idle, sum(each.idle for each in sums)))
        whole = sum(each.polling for each in sums)
        known = self.seen_before and polling >= _KNOWN * whole
        least = _LEAST_POLLING * (_KNOWN if known else 1.0)
        if polling >= max(least * seen, idle) and _are_alike(each.polling_meanwhile / each.seen for each in sums):
            return Bubbles(polling=_middle(polling, whole))
        return NO_BUBBLES

    def _by_traffic(self) -> Bubbles:
        """What all polled for as long in each reading, though they moved hardly any data, and none to other nodes."""
        sums = self.gpus.values()
        if any(each.hidden < each.seen for each in sums):
            return NO_BUBBLES
        idle, polling = sum(each.idle for each in sums), sum(each.polling for each in sums)
        most = _GAPS * polling / (_KNOWN if self.seen_before else 1.0)
        silent = 1.0 - sum(each.transferring for each in sums) / polling
        if idle > most or silent < _LEAST_SILENT:
            return NO_BUBBLES
        together = _are_alike((each.polling / each.seen for each in sums), least=_TOGETHER)
        return Bubbles(polling=silent) if together else NO_BUBBLES


def _middle(meanwhile: float, whole: float) -> float:
    """The share between what is seen and all: a reading hides what takes turns within it, and gaps are no bubbles."""
    return (meanwhile / whole + 1.0) / 2


def _are_alike(shares: Iterable[float], *, least: float = _ALIKE) -> bool:
    found = [*shares]
    return min(found) >= least * sum(found) / len(found)
