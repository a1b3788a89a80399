"""From jobs to allocations, and when each has ended.

Owns that two jobs of one GPU are told apart from one that took over another's: a suspended job yields its GPU to
who was given the same one. Refuses overlaps: who comes next begins where the last has ended.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from exporter.core.model import Allocation, Device
from exporter.schedulers.rules import Rules
from exporter.schedulers.slurm.gres import SHARED
from exporter.schedulers.slurm.holding import Entry
from exporter.schedulers.slurm.places import Places

Key = tuple[str, str, int]
"""GPU, job, and which run of it."""


class Holds:
    """The allocations that were told, to be compared with those that are."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._held: dict[Key, Allocation] = {}
        self._floors: dict[Key, int] = {}
        self._freed: dict[str, int] = {}
        self.contested: tuple[Entry, ...] = ()
        """Jobs that seem to hold a whole GPU that another has too."""
        self.problems: tuple[str, ...] = ()

    def adopt(self, rules: Rules) -> None:
        """Judge by these from now on."""
        self._rules = rules

    def held(self) -> frozenset[str]:
        """GPUs that somebody holds."""
        return frozenset(uuid for uuid, _, _ in self._held)

    def follow(
        self, entries: Iterable[Entry], places: Places | None, devices: Sequence[Device], *, now: int, wall: int
    ) -> tuple[Allocation, ...]:
        """Give all that hold a GPU at `now`, and once, with `end=now`, each that no longer does."""
        claims, problems = self._claims(entries, places, devices)
        self.problems = tuple(problems)
        whole = {uuid: [e for e in its if not _shared(e)] for uuid, its in claims.items()}
        rivals = {uuid: its for uuid, its in whole.items() if len(its) > 1}
        self.contested = tuple({e.run: e for its in rivals.values() for e in its}.values())
        present: dict[Key, Allocation] = {}
        counts = {e.run: sum(e in its for its in claims.values()) for its in claims.values() for e in its}
        for uuid, its in claims.items():
            yields = len([e for e in rivals.get(uuid, ()) if not e.suspended]) > 0
            for entry in its:
                if not (yields and entry.suspended and entry in rivals.get(uuid, ())):
                    key = (uuid, entry.job_id, entry.run)
                    present[key] = self._allocation(key, entry, gpus=counts[entry.run], now=now, wall=wall)
        return self._compare(present, now)

    def _claims(
        self, entries: Iterable[Entry], places: Places | None, devices: Sequence[Device]
    ) -> tuple[dict[str, list[Entry]], list[str]]:
        claims: dict[str, list[Entry]] = {}
        problems: list[str] = []
        for entry in entries if places is not None else ():
            if not entry.stale:
                found, complaints = entry.uuids(places, devices) if places else ((), ())
                problems += complaints
                for uuid in found:
                    claims.setdefault(uuid, []).append(entry)
        return claims, problems

    def _allocation(self, key: Key, entry: Entry, *, gpus: int, now: int, wall: int) -> Allocation:
        floor = self._floors.setdefault(key, self._freed.get(key[0], 0))
        start = min(max(entry.start(wall=wall, now=now), floor), now)
        restarts = entry.job.restarts if entry.job else 0
        return Allocation(key[0], entry.owner(self._rules), start, gpus=entry.gpus(gpus), restarts=restarts)

    def _compare(self, present: dict[Key, Allocation], now: int) -> tuple[Allocation, ...]:
        ended = [_ended(self._held[key], now) for key in self._held.keys() - present.keys()]
        self._freed |= {allocation.uuid: now for allocation in ended}
        self._held = present
        self._floors = {key: floor for key, floor in self._floors.items() if key in present}
        return (*present.values(), *ended)


def _ended(allocation: Allocation, now: int) -> Allocation:
    return replace(allocation, end=now)


def _shared(entry: Entry) -> bool:
    """It has parts of GPUs: others may have the rest."""
    return not SHARED.isdisjoint(name for name, _ in entry.indices)
