"""Puts a scheduler's word and a source's readings together.

Owns what is remembered for that: a job's ranks on a GPU, while it holds it. Refuses to judge who holds what.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from exporter.core.model import Allocation, Device, Reading
from exporter.schedulers import Member, Word
from exporter.workloads import Guest


class Joining:
    """What is said of one GPU by two sides, said together."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], str] = {}

    def allocations(self, word: Word, readings: Iterable[Reading]) -> tuple[Allocation, ...]:
        """The allocations, with the ranks whose processes are, or were last, on each GPU."""
        self._ranks |= {key: _listed(ranks) for key, ranks in _ranks(word, readings).items()}
        held = {(a.uuid, a.owner.job_id) for a in word.allocations}
        self._ranks = {key: ranks for key, ranks in self._ranks.items() if key in held}
        if not self._ranks:
            return word.allocations
        return tuple(replace(a, ranks=self._ranks.get((a.uuid, a.owner.job_id), "")) for a in word.allocations)


def _ranks(word: Word, readings: Iterable[Reading]) -> dict[tuple[str, str], set[int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for reading in readings if word.members else ():
        for process in reading.processes or ():
            member = word.members.get(process.pid)
            if member is not None and member.rank:
                found.setdefault((reading.uuid, member.job_id), set()).add(int(member.rank))
    return found


def _listed(ranks: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ranks)))


def with_members(readings: tuple[Reading, ...], word: Word) -> tuple[Reading, ...]:
    """The readings, each process with the job it belongs to."""
    if not word.members:
        return readings
    return tuple(_with_members(reading, word) for reading in readings)


def _with_members(reading: Reading, word: Word) -> Reading:
    if not reading.processes:
        return reading
    members = word.members
    told = tuple(
        replace(process, job_id=members[process.pid].job_id) if process.pid in members else process
        for process in reading.processes
    )
    return replace(reading, processes=told)


def with_condition(devices: tuple[Device, ...], condition: str) -> tuple[Device, ...]:
    """The devices, those that are well under the node's own condition."""
    if not condition:
        return devices
    return tuple(device if device.condition else replace(device, condition=condition) for device in devices)


def guests(word: Word, readings: Iterable[Reading]) -> tuple[Guest, ...]:
    """The processes on GPUs that are known to be those of the job that holds the GPU."""
    holds = {(held.uuid, held.owner.job_id) for held in word.allocations if held.end is None}
    on: dict[int, list[str]] = {}
    for reading in readings if word.members else ():
        for process in reading.processes or ():
            member = word.members.get(process.pid)
            if member is not None and (reading.uuid, member.job_id) in holds:
                on.setdefault(process.pid, []).append(reading.uuid)
    here = {pid: member for pid, member in word.members.items() if pid in on}
    return tuple(invited(word, here, on).values())


def invited(word: Word, members: Mapping[int, Member], on: Mapping[int, Iterable[str]]) -> dict[int, Guest]:
    """Of these members those whose job holds a GPU here; `on` says on which GPUs a process is."""
    classes = {held.owner.job_id: held.owner.workload_class for held in word.allocations if held.end is None}
    return {
        pid: Guest(pid, member.job_id, tuple(on.get(pid, ())), member.rank, classes[member.job_id])
        for pid, member in members.items()
        if member.job_id in classes
    }
