"""Compares two answers of RAS: whether a job's collectives move, and if not, which rank the others wait for.

Counts are collectives that a rank has launched, by communicator and function; ranks of one communicator launch the
same ones in the same order. So while nothing moves, ranks with the highest count of a function wait in it for those
with a lower one. Whoever waits in one communicator may be waited for in another (a tensor-parallel group whose data-
parallel peers wait): the culprit is a rank that is waited for and waits nowhere itself.

That a rank is waited for does not say that it hangs: it may wait for something that no counter shows, such as a reply
over HTTP or a child process. A hang is proven where what is waited for can never come: a rank is missing, or ranks of
one communicator have launched different functions. Both prove nothing where a rank is behind that is known to wait for
nobody, for then the others wait for that one. A rank that has been missing for long may have left a communicator that
nobody uses, or be out of RAS's reach alone: once a process cannot be connected to for 60 s, RAS considers it dead for
good (src/ras/rasnet.cc). It proves nothing where a rank is behind that may wait for nobody, as any of another node may.
And counts may be late: what a host callback launches is counted there (src/enqueue.cc, src/misc/profiler.cc).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from exporter.nccl.ras import Communicator, MissingRank, Process, RasAnswer, RasRank

_ORDERED = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""NCCL's functions that all ranks of a communicator launch in one order; point-to-point transfers have none."""


class Culprit(Struct, frozen=True):
    """The rank that the others wait for."""

    process: Process
    rank: str = ""
    """Its rank in the communicator of all processes, in digits; empty if there is none."""
    nvml_device: int = -1
    collective: str = ""
    """Function in which the others wait; empty: unknown."""
    sequence: int | None = None
    """Number of that collective in its communicator and function, from 1 on."""
    namesake: bool = False
    """It is missing, and another one that answers has its name: a pod with the host's network."""


class Comparison(Struct, frozen=True):
    """What two answers, some seconds apart, show about the application of some processes."""

    related: bool
    """Both answers have a communicator of these processes; otherwise nothing is known."""
    moving: bool = False
    culprit: Culprit | None = None
    """None although nothing moves: no count differs and no rank is missing, so who waits for whom is unknown."""
    proven: bool = False
    """What the ranks wait for can never come."""


class _Wait(NamedTuple):
    """Ranks of one communicator that wait in a function for others."""

    communicator: Communicator
    collective: str
    sequence: int
    ahead: list[RasRank]
    behind: list[RasRank]


def compare(
    first: RasAnswer,
    second: RasAnswer,
    *,
    processes: Collection[Process],
    spinning: Collection[Process] = (),
    resting: Collection[Process] = (),
    excused: Collection[Process] = (),
    long_dead: Collection[Process] = (),
) -> Comparison:
    """Compare two answers of the application to which `processes` belong; other applications' counts do not matter.

    `spinning`: processes whose GPU is known to spin, so that they wait themselves; `resting`: not to, so that they do
    not wait in a collective. `excused`: processes that are not waited for though RAS does not reach them; `long_dead`:
    that RAS may have considered dead before the spin began.
    """
    before = {each.key: each for each in connected(first, processes)}
    after = connected(second, processes)
    known = [(before[each.key], each) for each in after if each.key in before]
    if not known:
        return Comparison(related=False)
    if _created(after, before) or any(_moved(old, new) for old, new in known):
        return Comparison(related=True, moving=True)
    waits = [wait for each in after for wait in _waits(each)]
    waiting = _waiting(waits, after)
    lagging = _lagging_rank(waits, waiting, spinning=spinning, resting=resting)
    lost = _lost_rank(known, excused=excused, long_dead=long_dead)
    if lost is not None and (lagging is None or _waits_for(lost, lagging, spinning, resting, long_dead)):
        proven = lagging is not None or not (resting or lost.rank.process in long_dead)
        return Comparison(related=True, culprit=_culprit(lost, after), proven=proven)
    if lagging is None:
        return Comparison(related=True)
    process = lagging.rank.process
    proven = process in waiting and process not in resting and any(_have_diverged(each) for each in after)
    return Comparison(related=True, culprit=_culprit(lagging, after), proven=proven)


def connected(answer: RasAnswer, processes: Collection[Process]) -> list[Communicator]:
    """Communicators of `processes`, of all that share one with them, and so on."""
    by_process: dict[Process, list[int]] = {}
    for index, each in enumerate(answer.communicators):
        for process in _members(each):
            by_process.setdefault(process, []).append(index)
    found: set[int] = set()
    seen, queue = set(processes), list(processes)
    while queue:
        for index in by_process.pop(queue.pop(), ()):
            if index not in found:
                found.add(index)
                joined = [process for process in _members(answer.communicators[index]) if process not in seen]
                seen.update(joined)
                queue += joined
    return [answer.communicators[index] for index in sorted(found)]


def _members(communicator: Communicator) -> Iterator[Process]:
    # RAS has -1 for a process that it does not know.
    yield from (rank.process for rank in communicator.members if rank.pid > 0)


def _created(after: Iterable[Communicator], before: Mapping[tuple[str, str], Communicator]) -> bool:
    """Whether ranks that had answered before have made a communicator since."""
    answered = {rank.process for each in before.values() for rank in each.ranks}
    return any(each.key not in before and any(rank.process in answered for rank in each.ranks) for each in after)


def _moved(old: Communicator, new: Communicator) -> bool:
    before = {rank.rank: rank.collective_counts for rank in old.ranks}
    return any(rank.rank in before and rank.collective_counts != before[rank.rank] for rank in new.ranks)


class _Awaited(NamedTuple):
    """A rank of a communicator, and the collective in which others wait for it."""

    communicator: Communicator
    rank: RasRank | MissingRank
    collective: str
    sequence: int | None


def present_processes(answer: RasAnswer) -> set[Process]:
    """Processes of ranks that have answered."""
    return {rank.process for each in answer.communicators for rank in each.ranks}


def first_process(answer: RasAnswer) -> set[Process]:
    """The process of the job's rank 0: rank 0 of all its communicators. Empty if there is none, or are several."""
    first = {process for each in answer.communicators for process in _members(each)}
    first -= {rank.process for each in answer.communicators for rank in each.members if rank.rank}
    return first if len(first) == 1 else set()


def lost_processes(answer: RasAnswer, *, dead: bool = False) -> set[Process]:
    """Processes of ranks that RAS could not reach; `dead`: and which it has given up."""
    missing = (rank for each in answer.communicators for rank in each.missing_ranks if rank.lost)
    return {rank.process for rank in missing if rank.status.considered_dead or not dead}


def _lost_rank(
    known: Iterable[tuple[Communicator, Communicator]],
    *,
    excused: Collection[Process],
    long_dead: Collection[Process],
) -> _Awaited | None:
    """The lowest rank that was unreachable both times, but for those of `excused`; of `long_dead` if there is no other.

    Lowest in the largest communicator.
    """
    lost: list[tuple[Communicator, MissingRank]] = []
    for old, new in known:
        before = {each.rank for each in old.missing_ranks if each.lost and each.process not in excused}
        lost += [(new, each) for each in new.missing_ranks if each.lost and each.rank in before and new.ranks]
    if not lost:
        return None
    communicator, rank = min(lost, key=lambda found: (found[1].process in long_dead, -found[0].size, found[1].rank))
    return _Awaited(communicator, rank, *_last_collective(communicator))


def _waits_for(
    lost: _Awaited,
    lagging: _Awaited,
    spinning: Collection[Process],
    resting: Collection[Process],
    long_dead: Collection[Process],
) -> bool:
    """Whether the rank that is behind waits, too: it does not rest or, if the other was lost long ago, it spins."""
    process = lagging.rank.process
    return process in spinning if lost.rank.process in long_dead else process not in resting


def _have_diverged(communicator: Communicator) -> bool:
    """Whether one rank is ahead of another in one function and behind it in another one.

    Each has then launched a function of which the other has launched a different one in its place.
    """
    launched = {tuple(rank.collective_counts.get(name, 0) for name in _ORDERED) for rank in communicator.ranks}
    steps = pairwise(sorted(launched, key=sum))
    return any(fewer > more for before, after in steps for fewer, more in zip(before, after, strict=True))


def _last_collective(communicator: Communicator) -> tuple[str, int | None]:
    """The function in which the ranks wait, with its number: one in which counts differ, or the only one used."""
    waits = list(_waits(communicator))
    if waits:
        return waits[0].collective, waits[0].sequence
    used = {name: count for rank in communicator.ranks for name, count in rank.collective_counts.items() if count}
    return next(iter(used.items())) if len(used) == 1 else ("", None)


def _waits(communicator: Communicator) -> Iterator[_Wait]:
    names = dict.fromkeys(name for rank in communicator.ranks for name in rank.collective_counts)
    for name in names:
        counts = [rank.collective_counts.get(name, 0) for rank in communicator.ranks]
        most = max(counts)
        if min(counts) != most:
            pairs = list(zip(communicator.ranks, counts, strict=True))
            ahead = [rank for rank, count in pairs if count == most]
            yield _Wait(communicator, name, most, ahead, [rank for rank, count in pairs if count != most])


def _waiting(waits: Iterable[_Wait], communicators: Iterable[Communicator]) -> set[Process]:
    """Processes that wait for others; without those that several ranks of a communicator have in common.

    In pods with the host's network every rank of a node may be pid 1 on device 0: who of them waits is not known.
    """
    counted = [Counter(rank.process for rank in each.ranks) for each in communicators]
    shared = {process for each in counted for process, ranks in each.items() if ranks > 1}
    return {rank.process for wait in waits for rank in wait.ahead} - shared


def _lagging_rank(
    waits: Iterable[_Wait],
    waiting: Collection[Process],
    *,
    spinning: Collection[Process],
    resting: Collection[Process],
) -> _Awaited | None:
    """The rank that is waited for and waits least itself; None if no count differs."""

    def innocence(found: tuple[_Wait, RasRank]) -> tuple[bool, int, int, int, int]:
        wait, rank = found
        lag = rank.collective_counts.get(wait.collective, 0) - wait.sequence
        activity = (rank.process in spinning) - (rank.process in resting)
        return rank.process in waiting, activity, len(wait.behind), lag, rank.rank

    candidates = [(wait, rank) for wait in waits for rank in wait.behind]
    if not candidates:
        return None
    wait, rank = min(candidates, key=innocence)
    own = rank.collective_counts.get(wait.collective, 0)
    return _Awaited(wait.communicator, rank, wait.collective, own + 1)


def _culprit(awaited: _Awaited, communicators: list[Communicator]) -> Culprit:
    process = awaited.rank.process
    having = [each for each in communicators if any(rank.process == process for rank in each.ranks)]
    namesake = isinstance(awaited.rank, MissingRank) and bool(having)
    told_apart = not namesake or awaited.communicator in having
    return Culprit(
        process,
        rank=_global_rank(awaited, communicators) if told_apart else "",
        nvml_device=awaited.rank.nvml_dev,
        collective=awaited.collective,
        sequence=awaited.sequence,
        namesake=namesake,
    )


def _global_rank(awaited: _Awaited, communicators: list[Communicator]) -> str:
    """Its rank in a communicator that has all processes of the application; empty if there is none."""
    everyone = Counter[Process]()
    for each in communicators:
        everyone |= Counter(_members(each))  # the larger of both: several ranks may have one process's name
    for each in communicators:
        if each.size >= everyone.total():
            if each is awaited.communicator:
                return f"{awaited.rank.rank}"
            ranks = {rank.rank for rank in each.members if rank.process == awaited.rank.process}
            if len(ranks) == 1:
                return f"{ranks.pop()}"
    return ""
