"""Which statements are one run of a job. Owns joining lives and nodes by their times; refuses what they say."""

from collections.abc import Iterable

from msgspec import Struct

from exporter.core.model import SECOND
from exporter.core.statement import Statement
from exporter.receipt.asking import ReceiptError

_SAME_RUN_SECONDS = 60.0
"""Statements closer than this are of one run."""
_LATE_SECONDS = 180.0
"""A statement of a job that runs may be so much older than the newest: a store is written once a minute."""
_BREAK_SECONDS = 5.0
"""Less between two lives is how clocks differ."""


class Stay(Struct, frozen=True, kw_only=True):
    """A job's time on one node: lives of its daemon's books, in their order."""

    node: str
    lives: tuple[Statement, ...]

    @property
    def last(self) -> Statement:
        """What was told last."""
        return self.lives[-1]

    @property
    def gpus(self) -> float:
        """The most at once."""
        return max(life.whole_gpus for life in self.lives)


class Run(Struct, frozen=True, kw_only=True):
    """One run, over all nodes that tell of it. Unix seconds."""

    start: float
    end: float
    running: bool
    stays: tuple[Stay, ...]
    earlier: float | None = None
    """End of another run under the same id, before this one."""

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All of them."""
        return tuple(life for stay in self.stays for life in stay.lives)


def last_run(statements: Iterable[Statement], *, job_id: str, at: float) -> Run:
    """The last that began before `at`. Raises ReceiptError."""
    known = _latest(each for each in statements if each.owner.job_id == job_id and each.start <= at)
    if not known:
        raise ReceiptError(
            f"nobody who was asked knows a job {job_id}: is the id as gpu_efficiency_job_info has it (Kubernetes:"
            " namespace/pod)? Try --since, --at, or other nodes and stores"
        )
    start, own = known[0].start, [known[0]]  # the last one is of the run, whatever a damaged row says of its end
    for each in known[1:]:
        if each.end >= start - _SAME_RUN_SECONDS:
            own.append(each)
            start = min(start, each.start)
    others = [each.end for each in known if each not in own]
    end = max(each.end for each in own)
    stays = tuple(Stay(node=node, lives=_ordered(own, node)) for node in sorted({each.node for each in own}))
    running = any(stay.last.running and stay.last.end >= end - _LATE_SECONDS for stay in stays)
    return Run(start=start, end=end, running=running, stays=stays, earlier=max(others, default=None))


def _latest(statements: Iterable[Statement]) -> list[Statement]:
    """Of one life told several times, from a copy and from the node say, the latest word; newest end first."""
    found: list[Statement] = []
    for each in sorted(statements, key=lambda told: (-told.end, told.running)):
        if not any(_same(each, known) for known in found):
            found.append(each)
    return found


def _same(one: Statement, known: Statement) -> bool:
    """One job of one life: two runs of it under one id do not overlap."""
    return (one.node, one.life) == (known.node, known.life) and one.end > known.start


def _ordered(own: Iterable[Statement], node: str) -> tuple[Statement, ...]:
    return tuple(sorted((each for each in own if each.node == node), key=lambda told: told.end))


# -- what is in nobody's books --


def unseen(stay: Stay, run: Run) -> int:
    """GPU-nanoseconds in which the node had the job's GPUs, and no life of its books counted."""
    seconds, before = 0.0, stay.lives[0].start
    for number, life in enumerate(stay.lives):
        gap = began(life, before) - before
        seconds += life.whole_gpus * gap if gap > (_BREAK_SECONDS if number else _SAME_RUN_SECONDS) else 0.0
        before = life.end
    silent = run.end - before
    if stay.last.running and silent > _LATE_SECONDS:
        seconds += stay.last.whole_gpus * silent
    return round(seconds * SECOND)


def began(life: Statement, before: float) -> float:
    """When its books begin, of which the scheduler's start says nothing: the first sample was taken soon after."""
    if len(life.samples) > 1 and life.whole_gpus:
        return life.samples[0].at - life.samples[0].paid / life.whole_gpus
    return max(life.start, before)
