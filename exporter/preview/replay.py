"""Recordings judged again: the core itself, once a row, and when it would have taken a GPU back.

Owns what an episode is on a trace: its moment is the core's, to the millisecond; what came of it is looked at after
each observation. Refuses to detect: the states, and since when no process was there, are the ledger's own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import PPM, SECOND, UNKNOWN_JOB, Device, Observation, Owner, State
from exporter.core.money import Price
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.preview.choices import HUNG, NO_PROCESS, ZOMBIE, Row, triggers
from exporter.preview.tally import HOUR, Answer, Episode, Person, Tally, listed

_SAME = {ZOMBIE: State.ZOMBIE, HUNG: State.HUNG}
_OWN_LIMITS = {ZOMBIE: "zombie_seconds", HUNG: "hang_seconds"}


class Money(Protocol):
    """Knows prices."""

    def __call__(self, device: Device, wall: int, /) -> Price | None:
        """What an hour of that GPU costs at a moment in Unix nanoseconds; None: nobody has said."""
        ...


OpenLedger = Callable[[Policy], Ledger]


class _Taken(Struct):
    """An episode that is not over."""

    uuid: str
    owners: tuple[Owner, ...]
    start: int
    until: int
    """Up to where the hold was seen."""
    wall: int
    """Unix nanoseconds of the start."""
    weight: float
    price: Price | None
    zombie: bool = False
    """The core called it a zombie when it was last looked at: from there it cannot come to rest without work."""


class _Watch:
    """One row's ledger of one recording, and the GPUs it has taken back."""

    def __init__(self, row: Row, tally: Tally, when: frozenset[str], *, open_ledger: OpenLedger, money: Money) -> None:
        self.ledger, self._tally, self._when, self._money = open_ledger(row.policy), tally, when, money
        self._taken: dict[str, _Taken] = {}
        self.unknown: set[str] = set()
        """GPUs that would have been taken from an owner nobody can name."""

    def advance(self, observation: Observation) -> None:
        advance(self.ledger, observation)
        for uuid, gpu in self.ledger.gpus.items():
            taken = self._taken.get(uuid)
            if taken is not None:
                self._follow(taken, gpu)
            elif gpu.holders:
                self._consider(gpu)

    def _consider(self, gpu: Gpu) -> None:
        """Take the GPU back if the state says so and nothing exempts its owners."""
        since = _since(gpu, self._when)
        if since is None:
            return
        owners = tuple(held.owner for held in gpu.holders)
        if _unknown(owners):
            self.unknown.add(gpu.device.uuid)
            return
        offset = self.ledger.wall - (self.ledger.at or 0)
        exempt_until = max(round(owner.exempt_until * SECOND) for owner in owners) - offset
        start = max(since, exempt_until)
        if start < gpu.book.until:
            price = self._money(gpu.device, start + offset)
            weight = gpu.device.weight / PPM
            self._taken[gpu.device.uuid] = _Taken(
                gpu.device.uuid, owners, start, gpu.book.until, start + offset, weight, price,
                zombie=gpu.state is State.ZOMBIE,
            )  # fmt: skip

    def _follow(self, taken: _Taken, gpu: Gpu) -> None:
        """Is it still held by the same, and has it worked?"""
        if _owner_not_told(gpu):
            taken.zombie = False
            return
        if [held.owner.job_id for held in gpu.holders] != [own.job_id for own in taken.owners]:
            self._close(taken, max(taken.until, gpu.since), worked=False)
        elif _works(gpu, taken):
            self._close(taken, gpu.since, worked=True)
        else:
            taken.until = gpu.book.until
            if gpu.state is not State.UNOBSERVED:
                taken.zombie = gpu.state is State.ZOMBIE

    def _close(self, taken: _Taken, end: int, *, worked: bool) -> None:
        del self._taken[taken.uuid]
        self._tally.add(
            Episode(
                uuid=taken.uuid,
                jobs=tuple(Person(owner.job_id, owner.name, owner.user) for owner in taken.owners),
                start=taken.wall / SECOND,
                seconds=(end - taken.start) / SECOND,
                worked=worked,
                weight=taken.weight,
                price=taken.price,
            )
        )

    def end(self) -> None:
        """The recording is over: what never worked again is freed up to here."""
        for taken in list(self._taken.values()):
            self._close(taken, taken.until, worked=False)


def _since(gpu: Gpu, when: frozenset[str]) -> int | None:
    """The moment at which the GPU is taken back, if it is in such a state now."""
    moments = [gpu.since for name, state in _SAME.items() if name in when and gpu.state is state]
    bare = gpu.track.bare_since
    if NO_PROCESS in when and bare is not None:
        patience = round(gpu.standard.policy.no_process_seconds * SECOND)
        moments += [bare + patience] if gpu.book.until - bare >= patience else []
    return min(moments, default=None)


def _unknown(owners: tuple[Owner, ...]) -> bool:
    return any(owner.job_id == UNKNOWN_JOB for owner in owners)


def _owner_not_told(gpu: Gpu) -> bool:
    """The scheduler's word is too old: who held the GPU may hold it still."""
    return gpu.reason == "owner_unknown" or _unknown(tuple(held.owner for held in gpu.holders))


def _works(gpu: Gpu, taken: _Taken) -> bool:
    """The core says that it computes; or that it rests no more than any GPU does, which only work makes of a zombie."""
    if gpu.state is State.ACTIVE:
        return gpu.reason != "idle_spin"
    return gpu.state is State.STALLED and taken.zombie


class Replay:
    """A preview over any number of recordings, each with ledgers of its own."""

    def __init__(self, found: Sequence[Row], *, open_ledger: OpenLedger, money: Money) -> None:
        self._rows, self._open_ledger, self._money = found, open_ledger, money
        self._when = triggers(found)
        self._tallies = [Tally(row.label, row.settings) for row in found]
        self._own: dict[str, set[str]] = {ZOMBIE: set(), HUNG: set()}
        """Jobs with a limit of their own."""
        self._exempt: set[str] = set()
        self._unknown: set[str] = set()
        self._since, self._until, self._held = float("inf"), 0.0, 0.0

    def run(self, observations: Iterable[Observation]) -> bool:
        """Judge one recording in every row; False if it holds no observation."""
        watches = [
            _Watch(row, tally, self._when, open_ledger=self._open_ledger, money=self._money)
            for row, tally in zip(self._rows, self._tallies, strict=True)
        ]
        for observation in observations:
            self._hear(observation)
            for watch in watches:
                watch.advance(observation)
        self._held += sum(map(sum, watches[0].ledger.bills().values())) / SECOND
        for watch in watches:
            watch.end()
            self._unknown |= watch.unknown
        return watches[0].ledger.at is not None

    def _hear(self, observation: Observation) -> None:
        moment = observation.wall / SECOND
        self._since, self._until = min(self._since, moment), max(self._until, moment)
        for held in observation.allocations or ():
            owner = held.owner
            for name, limit in _OWN_LIMITS.items():
                if getattr(owner, limit) is not None:
                    self._own[name].add(owner.job_id)
            if owner.exempt_until:
                self._exempt.add(owner.job_id)

    def answer(self, source: str) -> Answer:
        """What it came to."""
        return Answer(
            source=source,
            since=self._since,
            until=self._until,
            gpu_hours_held=self._held / HOUR,
            taken_back_when=tuple(sorted(self._when)),
            rows=tuple(tally.score() for tally in self._tallies),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterable[str]:
        for name, jobs in self._own.items():
            if jobs and name in self._when:
                yield (
                    f"jobs with a limit of their own ({_OWN_LIMITS[name]}), which no row moves: "
                    f"{len(jobs)} ({listed(jobs)})"
                )
        if self._exempt:
            yield f"jobs exempted for a time, and left alone in it: {len(self._exempt)} ({listed(self._exempt)})"
        if self._unknown:
            yield f"GPUs left alone because the scheduler did not say whose they were: {len(self._unknown)}"
