"""Previews thresholds on recorded traces: runs the core once per policy, and scores the GPUs it would reclaim."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import PPM, SECOND, UNKNOWN_JOB, Device, Observation, Owner, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.prices import Price
from exporter.preview.scoring import (
    HOUR_SECONDS,
    HUNG,
    NO_PROCESS,
    ZOMBIE,
    Episode,
    EpisodeScorer,
    PolicyRow,
    PreviewJob,
    PreviewResult,
    left_alone_notes,
    limit_note,
    trigger_states,
)

_TRIGGER_STATES = {ZOMBIE: State.ZOMBIE, HUNG: State.HUNG}
_OWN_LIMIT_FIELDS = {ZOMBIE: "zombie_seconds", HUNG: "hang_seconds"}


class PriceLookup(Protocol):
    """Returns prices."""

    def __call__(self, device: Device, wall: int, /) -> Price | None:
        """Price per hour of that GPU at a Unix time in nanoseconds; None: unknown."""
        ...


OpenLedger = Callable[[Policy], Ledger]


class _ReclaimedGpu(Struct):
    """An episode that has not ended."""

    uuid: str
    owners: tuple[Owner, ...]
    start: int
    until: int
    """End of the time in which the allocation was observed, as `start`."""
    wall: int
    """Unix nanoseconds of the start."""
    weight: float
    price: Price | None
    zombie: bool = False
    """It was a zombie when last observed; it can become stalled from that state only by work."""


class _PolicyReplay:
    """One row's ledger of one recording, and the GPUs it has reclaimed."""

    def __init__(
        self,
        row: PolicyRow,
        scorer: EpisodeScorer,
        triggers: frozenset[str],
        *,
        open_ledger: OpenLedger,
        price_of: PriceLookup,
    ) -> None:
        self.ledger, self._scorer, self._triggers, self._price_of = open_ledger(row.policy), scorer, triggers, price_of
        self._reclaimed: dict[str, _ReclaimedGpu] = {}
        self.unknown_gpus: set[str] = set()
        """GPUs that would have been reclaimed from an unknown owner."""

    def advance(self, observation: Observation) -> None:
        advance(self.ledger, observation)
        for uuid, gpu in self.ledger.gpus.items():
            reclaimed = self._reclaimed.get(uuid)
            if reclaimed is not None:
                self._update_reclaimed(reclaimed, gpu)
            elif gpu.holders:
                self._reclaim_if_triggered(gpu)

    def _reclaim_if_triggered(self, gpu: Gpu) -> None:
        """Reclaim the GPU if its state requires it and its owners are known and not exempt."""
        since = _reclaimed_since(gpu, self._triggers)
        if since is None:
            return
        owners = tuple(holder.owner for holder in gpu.holders)
        if _any_unknown(owners):
            self.unknown_gpus.add(gpu.device.uuid)
            return
        offset = self.ledger.wall - (self.ledger.at or 0)
        exempt_until = max(round(owner.exempt_until * SECOND) for owner in owners) - offset
        start = max(since, exempt_until)
        if start < gpu.book.until:
            price = self._price_of(gpu.device, start + offset)
            weight = gpu.device.weight / PPM
            self._reclaimed[gpu.device.uuid] = _ReclaimedGpu(
                gpu.device.uuid, owners, start, gpu.book.until, start + offset, weight, price,
                zombie=gpu.state is State.ZOMBIE,
            )  # fmt: skip

    def _update_reclaimed(self, reclaimed: _ReclaimedGpu, gpu: Gpu) -> None:
        """Close the episode if the owners have changed or the GPU has worked."""
        if _owner_unreported(gpu):
            reclaimed.zombie = False
            return
        if [holder.owner.job_id for holder in gpu.holders] != [owner.job_id for owner in reclaimed.owners]:
            self._close(reclaimed, max(reclaimed.until, gpu.since), worked=False)
        elif _has_worked(gpu, reclaimed):
            self._close(reclaimed, gpu.since, worked=True)
        else:
            reclaimed.until = gpu.book.until
            if gpu.state is not State.UNOBSERVED:
                reclaimed.zombie = gpu.state is State.ZOMBIE

    def _close(self, reclaimed: _ReclaimedGpu, end: int, *, worked: bool) -> None:
        del self._reclaimed[reclaimed.uuid]
        self._scorer.add(
            Episode(
                uuid=reclaimed.uuid,
                jobs=tuple(PreviewJob(owner.job_id, owner.name, owner.user) for owner in reclaimed.owners),
                start=reclaimed.wall / SECOND,
                seconds=(end - reclaimed.start) / SECOND,
                worked=worked,
                weight=reclaimed.weight,
                price=reclaimed.price,
            )
        )

    def end(self) -> None:
        """Close all episodes at the end of the recording."""
        for reclaimed in list(self._reclaimed.values()):
            self._close(reclaimed, reclaimed.until, worked=False)


def _reclaimed_since(gpu: Gpu, triggers: frozenset[str]) -> int | None:
    """Time since which the GPU is in a triggering state; None: it is in none."""
    moments = [gpu.since for name, state in _TRIGGER_STATES.items() if name in triggers and gpu.state is state]
    no_process_since = gpu.timers.bare_since
    if NO_PROCESS in triggers and no_process_since is not None:
        limit_ns = round(gpu.criteria.policy.no_process_seconds * SECOND)
        moments += [no_process_since + limit_ns] if gpu.book.until - no_process_since >= limit_ns else []
    return min(moments, default=None)


def _any_unknown(owners: tuple[Owner, ...]) -> bool:
    return any(owner.job_id == UNKNOWN_JOB for owner in owners)


def _owner_unreported(gpu: Gpu) -> bool:
    """Whether the scheduler's data is too old or has no owner: the allocation may still be the same."""
    return gpu.reason == "owner_unknown" or _any_unknown(tuple(holder.owner for holder in gpu.holders))


def _has_worked(gpu: Gpu, reclaimed: _ReclaimedGpu) -> bool:
    """Whether the GPU is active, or has become stalled after it was a zombie, which only work does."""
    if gpu.state is State.ACTIVE:
        return gpu.reason != "idle_spin"
    return gpu.state is State.STALLED and reclaimed.zombie


class TracePreview:
    """A preview of any number of recordings, each with its own ledgers."""

    def __init__(self, rows: Sequence[PolicyRow], *, open_ledger: OpenLedger, price_of: PriceLookup) -> None:
        self._rows, self._open_ledger, self._price_of = rows, open_ledger, price_of
        self._triggers = trigger_states(rows)
        self._scorers = [EpisodeScorer(row.label, row.settings) for row in rows]
        self._jobs_with_own_limit: dict[str, set[str]] = {ZOMBIE: set(), HUNG: set()}
        """Jobs with limits of their own, by state."""
        self._exempt_jobs: set[str] = set()
        self._unknown_gpus: set[str] = set()
        self._since, self._until, self._held_seconds = float("inf"), 0.0, 0.0

    def run(self, observations: Iterable[Observation]) -> bool:
        """Replay one recording in every row; return False if it holds no observation."""
        replays = [
            _PolicyReplay(row, scorer, self._triggers, open_ledger=self._open_ledger, price_of=self._price_of)
            for row, scorer in zip(self._rows, self._scorers, strict=True)
        ]
        for observation in observations:
            self._note_owners(observation)
            for replay in replays:
                replay.advance(observation)
        self._held_seconds += sum(map(sum, replays[0].ledger.account_totals().values())) / SECOND
        for replay in replays:
            replay.end()
            self._unknown_gpus |= replay.unknown_gpus
        return replays[0].ledger.at is not None

    def _note_owners(self, observation: Observation) -> None:
        when = observation.wall / SECOND
        self._since, self._until = min(self._since, when), max(self._until, when)
        for holder in observation.allocations or ():
            owner = holder.owner
            for name, limit in _OWN_LIMIT_FIELDS.items():
                if getattr(owner, limit) is not None:
                    self._jobs_with_own_limit[name].add(owner.job_id)
            if owner.exempt_until:
                self._exempt_jobs.add(owner.job_id)

    def result(self, source: str) -> PreviewResult:
        """Return the result of all recordings."""
        return PreviewResult(
            source=source,
            since=self._since,
            until=self._until,
            gpu_hours_held=self._held_seconds / HOUR_SECONDS,
            taken_back_when=tuple(sorted(self._triggers)),
            rows=tuple(scorer.score() for scorer in self._scorers),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterable[str]:
        for name, jobs in self._jobs_with_own_limit.items():
            if jobs and name in self._triggers:
                yield limit_note(jobs, _OWN_LIMIT_FIELDS[name])
        yield from left_alone_notes(self._exempt_jobs, ", left alone while it lasted", self._unknown_gpus)
