"""Previews thresholds on recorded traces: runs the core once per policy, and scores the GPUs it would reclaim.

The core's states only determine when a GPU is reclaimed; whether that was right is determined from the readings alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import PPM, SECOND, UNKNOWN_JOB, Allocation, Device, Observation, Owner, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.prices import Price
from exporter.preview.observations import ObservationSplitter
from exporter.preview.real_work import PLAIN_RULE, PLAIN_SECONDS, Activity, ActivityReader, WorkMeter
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
    Score,
    common_class,
    left_alone_notes,
    limit_note,
    trigger_states,
    unjudged_notes,
)

_TRIGGER_STATES = {ZOMBIE: State.ZOMBIE, HUNG: State.HUNG}
_WORKING_STATES = (State.STALLED, State.ACTIVE)
_OWN_LIMIT_FIELDS = {ZOMBIE: "zombie_seconds", HUNG: "hang_seconds"}


class PriceLookup(Protocol):
    """Returns prices."""

    def __call__(self, device: Device, wall: int, /) -> Price | None:
        """Price per hour of that GPU at a Unix time in nanoseconds; None: unknown."""
        ...


OpenLedger = Callable[[Policy], Ledger]


Trigger = Callable[[Gpu, Sequence[Activity]], int | None]
"""Called with a GPU and its latest activities; returns since when a rule takes it back, as times of readings."""
MAX_GAP_SECONDS = 60.0
"""E: the same job back after a shorter observed absence never left: the scheduler's answer was incomplete."""


class _ReclaimedGpu(Struct):
    """An episode that has not ended."""

    uuid: str
    holders: tuple[Allocation, ...]
    start: int
    until: int
    """End of the time in which the allocation was observed, as `start`."""
    wall: int
    """Unix nanoseconds of the start."""
    weight: float
    price: Price | None
    meter: WorkMeter
    left: int | None = None
    """When the allocation seems to have ended; None: it has not."""

    def is_held_by(self, holders: tuple[Allocation, ...]) -> bool:
        """Whether these are the same jobs, in the same run and without a longer absence."""
        if [_run_of(holder) for holder in holders] != [_run_of(holder) for holder in self.holders]:
            return False
        starts = [holder.start for holder in holders]
        if self.left is None or starts == [holder.start for holder in self.holders]:
            return True
        return self.observed_absence(max(starts)) <= MAX_GAP_SECONDS * SECOND

    def observed_absence(self, until: int) -> int:
        """Observed nanoseconds since its jobs seem to have left."""
        return 0 if self.left is None else self.meter.observed_between(self.left, until)


def _run_of(holder: Allocation) -> tuple[str, int]:
    return holder.owner.job_id, holder.restarts


class _Reclaims:
    """The GPUs that one rule reclaims in one recording, each once in an allocation."""

    def __init__(self, scorer: EpisodeScorer, trigger: Trigger, price_of: PriceLookup) -> None:
        self._scorer, self._trigger, self._price_of = scorer, trigger, price_of
        self._reclaimed: dict[str, _ReclaimedGpu] = {}
        self.unknown_gpus: set[str] = set()
        """GPUs that would have been reclaimed from an unknown owner."""

    def advance(self, ledger: Ledger, activities: Mapping[str, Sequence[Activity]]) -> None:
        """Process one observation, to which the ledger has already advanced."""
        for uuid, gpu in ledger.gpus.items():
            seen = activities.get(uuid, ())
            since = self._trigger(gpu, seen)
            if uuid in self._reclaimed:
                self._update_reclaimed(self._reclaimed[uuid], gpu, seen)
            if since is not None and gpu.holders and uuid not in self._reclaimed:
                self._reclaim(ledger, gpu, since, seen)

    def _reclaim(self, ledger: Ledger, gpu: Gpu, since: int, seen: Sequence[Activity]) -> None:
        """Reclaim the GPU if its owners are known and not exempt."""
        uuid, owners = gpu.device.uuid, tuple(holder.owner for holder in gpu.holders)
        if _any_unknown(owners):
            self.unknown_gpus.add(uuid)
            return
        offset = ledger.wall - (ledger.at or 0)
        exempt_until = max(round(owner.exempt_until * SECOND) for owner in owners) - offset
        start = max(since, exempt_until)
        if start <= gpu.book.until:
            price = self._price_of(gpu.device, start + offset)
            reclaimed = _ReclaimedGpu(
                uuid, gpu.holders, start, start, start + offset, gpu.device.weight / PPM, price, WorkMeter(start)
            )
            self._reclaimed[uuid] = reclaimed
            self._update_reclaimed(reclaimed, gpu, seen)

    def _update_reclaimed(self, reclaimed: _ReclaimedGpu, gpu: Gpu, seen: Sequence[Activity]) -> None:
        """Measure its work while it is held by the same jobs, and close the episode when they have left."""
        reclaimed.meter.add(seen)
        if _owner_unreported(gpu):
            return
        if reclaimed.is_held_by(gpu.holders):
            reclaimed.left, reclaimed.until = None, gpu.book.until
            reclaimed.meter.settle(reclaimed.until)
            return
        reclaimed.left = reclaimed.until
        if reclaimed.observed_absence(gpu.book.until) > MAX_GAP_SECONDS * SECOND:
            self._close(reclaimed)

    def _close(self, reclaimed: _ReclaimedGpu) -> None:
        del self._reclaimed[reclaimed.uuid]
        owners, meter, end = [holder.owner for holder in reclaimed.holders], reclaimed.meter, reclaimed.until
        if end == reclaimed.start:
            return
        self._scorer.add(
            Episode(
                uuid=reclaimed.uuid,
                jobs=tuple(PreviewJob(owner.job_id, owner.name, owner.user) for owner in owners),
                workload_class=common_class(owner.workload_class for owner in owners),
                start=reclaimed.wall / SECOND,
                seconds=(end - reclaimed.start) / SECOND,
                observed_seconds=meter.observed_ns / SECOND,
                work_seconds=meter.work_seconds,
                worked_after=None if meter.first_work is None else (meter.first_work - reclaimed.start) / SECOND,
                weight=reclaimed.weight,
                price=reclaimed.price,
            )
        )

    def end(self) -> None:
        """Close all episodes at the end of the recording."""
        for reclaimed in list(self._reclaimed.values()):
            self._close(reclaimed)


def _state_trigger(triggers: frozenset[str]) -> Trigger:
    """The rule of a row: the GPU is in a state to which the previewed thresholds lead."""
    return lambda gpu, _seen: _reclaimed_since(gpu, triggers)


def _reclaimed_since(gpu: Gpu, triggers: frozenset[str]) -> int | None:
    """Time since which the GPU is in a triggering state; None: it is in none.

    A state can begin where a reading ends, and the next one, of work, ends it before anybody sees it.
    """
    moments = [gpu.since for name, state in _TRIGGER_STATES.items() if name in triggers and gpu.state is state]
    begins = {ZOMBIE: gpu.timers.zombie, HUNG: gpu.timers.hung}
    if gpu.state in _WORKING_STATES and any(begins[name] for name in triggers & begins.keys()):
        moments.append(gpu.book.until)
    no_process_since = gpu.timers.bare_since
    if NO_PROCESS in triggers and no_process_since is not None:
        limit_ns = round(gpu.criteria.policy.no_process_seconds * SECOND)
        moments += [no_process_since + limit_ns] if gpu.book.until - no_process_since >= limit_ns else []
    return min(moments, default=None)


class RestingEngine:
    """The plain rule as a trigger: no engine activity for PLAIN_SECONDS, as far as it was observed, of one holder."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def __call__(self, gpu: Gpu, seen: Sequence[Activity]) -> int | None:
        """Since when the GPU fulfils the rule in these activities; None: it does not."""
        held_since = max((holder.start for holder in gpu.holders), default=0)
        found: int | None = None
        for activity in seen:
            if not activity.resting:
                self._since.pop(gpu.device.uuid, None)
                continue
            since = max(held_since, self._since.setdefault(gpu.device.uuid, activity.start))
            at = max(activity.start, since + round(PLAIN_SECONDS * SECOND))
            found = at if found is None and at < activity.end else found
        return found


def _any_unknown(owners: tuple[Owner, ...]) -> bool:
    return any(owner.job_id == UNKNOWN_JOB for owner in owners)


def _owner_unreported(gpu: Gpu) -> bool:
    """Whether the scheduler's data is too old or has no owner: the allocation may still be the same."""
    return gpu.reason == "owner_unknown" or _any_unknown(tuple(holder.owner for holder in gpu.holders))


class TracePreview:
    """A preview of any number of recordings, each with its own ledgers."""

    def __init__(self, rows: Sequence[PolicyRow], *, open_ledger: OpenLedger, price_of: PriceLookup) -> None:
        """The first row's policy has the thresholds by which work is recognized in all of them."""
        self._rows, self._open_ledger, self._price_of = rows, open_ledger, price_of
        self._triggers = trigger_states(rows)
        self._scorers = [EpisodeScorer(row.label, row.settings) for row in rows]
        self._plain_scorer = EpisodeScorer(PLAIN_RULE, {})
        self._jobs_with_own_limit: dict[str, set[str]] = {ZOMBIE: set(), HUNG: set()}
        """Jobs with limits of their own, by state."""
        self._exempt_jobs: set[str] = set()
        self._unknown_gpus: set[str] = set()
        self._since, self._until, self._held_seconds = float("inf"), 0.0, 0.0

    def run(self, observations: Iterable[Observation]) -> bool:
        """Replay one recording in every row; return False if it holds no observation."""
        ledgers = [self._open_ledger(row.policy) for row in self._rows]
        trigger = _state_trigger(self._triggers)
        reclaims = [
            (ledger, self._reclaims(scorer, trigger)) for ledger, scorer in zip(ledgers, self._scorers, strict=True)
        ]
        reclaims.append((ledgers[0], self._reclaims(self._plain_scorer, RestingEngine())))
        reader = ActivityReader(self._rows[0].policy)
        splitter = ObservationSplitter()
        for observation in observations:
            self._note_owners(observation)
            for part in splitter.split(observation):
                activities = reader.read(part)
                for ledger in ledgers:
                    advance(ledger, part)
                for ledger, each in reclaims:
                    each.advance(ledger, activities)
        books = [gpu.book for gpu in ledgers[0].gpus.values()]
        self._held_seconds += sum(book.paid - book.unheld.total() for book in books) / SECOND
        for _, each in reclaims:
            each.end()
            self._unknown_gpus |= each.unknown_gpus
        return ledgers[0].at is not None

    def _reclaims(self, scorer: EpisodeScorer, trigger: Trigger) -> _Reclaims:
        return _Reclaims(scorer, trigger, self._price_of)

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
        rows = tuple(scorer.score() for scorer in self._scorers)
        plain = self._plain_scorer.score() if self._triggers & {ZOMBIE, NO_PROCESS} else None
        return PreviewResult(
            source=source,
            since=self._since,
            until=self._until,
            gpu_hours_held=self._held_seconds / HOUR_SECONDS,
            taken_back_when=tuple(sorted(self._triggers)),
            rows=rows,
            plain_rule=plain,
            notes=tuple(self._notes((*rows, plain) if plain else rows)),
        )

    def _notes(self, rows: Sequence[Score]) -> Iterable[str]:
        for name, jobs in self._jobs_with_own_limit.items():
            if jobs and name in self._triggers:
                yield limit_note(jobs, _OWN_LIMIT_FIELDS[name])
        yield from left_alone_notes(self._exempt_jobs, ", left alone while it lasted", self._unknown_gpus)
        yield from unjudged_notes(rows)
