"""Accounts for what training jobs report: whether it is credible, the credit each leak may draw, the job's progress.

A report describes an interval that is already booked, and entries are never reversed. So every reported time becomes a
*balance* in nanoseconds of one GPU (`WorkloadCredit`): it fills when the report arrives, and the matching leak, or
`useful`, draws it down from then on, never beyond what was reported or what the hardware's own pool holds.
Progress (steps, phases, loss, quality) belongs to the whole job and never moves a second of the ledger.
"""

from collections.abc import Iterable
from math import inf, isfinite, sqrt
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct, field

from exporter.core.model import MS, NEVER, PHASES, PPM, SECOND, Device, Parallel, ServingReport, TrainingReport
from exporter.core.policy import Policy
from exporter.core.serving import ServingShares, serving_shares

DATA, CHECKPOINT, RESTORE, STARTUP, COMMUNICATION, BUBBLE, MODEL, REPEATED, RECOMPUTATION = range(9)
"""Balances: waiting for input, saving, restoring, starting, exposed communication, pipeline bubbles; FLOPs of steps
that moved the model, and of steps that had been made before; tensor work that recomputation explains."""
_PHASE_OF_BALANCE = ("data", "checkpoint", "restore", "startup", "communication", "bubble")
_PHASES_WITHOUT_STEPS = frozenset({"startup", "evaluation", "idle"})
"""Phases in which tensor work is no training step, and no FLOPs are told of it."""
FULL_RECOMPUTE = PPM // 4
"""Of tensor work: 2 of 8 FLOPs a parameter and token are the second forward pass."""
_LONGEST_INTERVAL = 300 * SECOND
"""Between two readings, by configuration."""
_MAX_SKEW = 10 * SECOND
"""E: reports, readings and the GPU's queue of kernels are out of step by less than this."""


class Rework(NamedTuple):
    """What a report tells of steps that were made before."""

    share: float
    """Of the interval's steps."""
    continues: bool
    """The next step is one too."""


class WorkloadCredit:
    """What one job says, as far as it is about one GPU."""

    __slots__ = (
        "accrued",
        "booking_interval",
        "credit",
        "flops_changed_at",
        "flops_reported",
        "flops_until",
        "known",
        "own_report_at",
        "phase",
        "phase_since",
        "recompute",
        "report_interval",
        "rework",
        "shares",
        "shares_until",
        "stale_at",
        "unobserved",
    )  # fmt: skip

    def __init__(self) -> None:
        self.credit, self.accrued = [0] * 9, [0] * 9
        """Nanoseconds of this GPU, and those of them that an open phase has added since the last report."""
        self.known: set[int] = set()
        """Balances that were ever told of: of the others the hardware's estimate holds."""
        self.phase, self.phase_since = -1, 0
        """The balance that an open phase fills, and since when; -1: none."""
        self.flops_reported, self.flops_changed_at, self.flops_until = False, NEVER, NEVER
        """Model FLOPs are told of what the GPU does now; since when that is so, or is not; and until when the last
        report speaks for it."""
        self.stale_at = NEVER
        """When what was said last is too old."""
        self.report_interval = self.booking_interval = 0
        """Nanoseconds from report to report, and those booked at a time, at most, of late."""
        self.unobserved = 0
        """Nanoseconds since the last report in which nobody saw the GPU: what was told of them was not booked."""
        self.own_report_at = NEVER
        """When a process that works on this very GPU spoke last."""
        self.recompute = 0
        """Share of the tensor work that the recomputation policy explains, ppm."""
        self.rework = False
        """The step that is being made was made before, and no FLOPs are told of it."""
        self.shares, self.shares_until = ServingShares(), NEVER

    def add_report(
        self,
        report: TrainingReport,
        device: Device,
        at: int,
        *,
        policy: Policy,
        gpus: int,
        rework: Rework,
        since: int = NEVER,
    ) -> None:
        """Take in a report, at whose moment `at` nothing after `at` is booked; its figures are of `gpus` GPUs.

        The GPU has been watched since `since`.
        """
        duration, first = report.end - report.start, MODEL not in self.known
        if duration:
            self._update_interval(duration, at, age=at - report.end)
            unseen, self.unobserved = self.unobserved + max(0, since - report.start), 0
            seen = max(0, duration - unseen) / duration
            self._settle_report(report, device, gpus=gpus, repeated=rework.share, seen=seen)
        self._set_recompute(report, policy)
        phase = report.phase
        self.rework = rework.continues and MODEL not in self.known and phase not in _PHASES_WITHOUT_STEPS
        self.phase = _PHASE_OF_BALANCE.index(phase) if phase in _PHASE_OF_BALANCE else -1
        self.phase_since = report.end
        self._set_flops_reported(
            MODEL in self.known and phase not in _PHASES_WITHOUT_STEPS, report.start if first else report.end
        )
        if self.phase >= 0:
            self.known.add(self.phase)
            self.stale_at = max(self.stale_at, at + round(policy.phase_patience_seconds * 1000) * MS)

    def _update_interval(self, duration: int, at: int, *, age: int) -> None:
        self.report_interval = max(duration, self.report_interval // 2)
        self.booking_interval = max(self.booking_interval, min(age, _LONGEST_INTERVAL))
        self.stale_at = at + max(60 * SECOND, 3 * self.report_interval)
        self.flops_until = at + self.report_interval + self.report_interval // 2 + 2 * SECOND

    def _settle_report(
        self, report: TrainingReport, device: Device, *, gpus: int, repeated: float, seen: float
    ) -> None:
        """Add what the interval was told to hold, as far as it was seen, less what open phases have added already."""
        weight, room = device.weight, self._max_balance()
        named = {name for name, _ in report.phases}
        for balance, nanoseconds in enumerate(_phase_times(report)):
            if nanoseconds or _PHASE_OF_BALANCE[balance] in named:
                self.known.add(balance)
            self._add(
                balance, round(nanoseconds * seen) * weight // PPM - self.accrued[balance], room=room * weight // PPM
            )
            self.accrued[balance] = 0
        peak = peak_flops_of(device, report.dtype)
        if report.model_flops is None or not peak:
            return
        self.known.add(MODEL)
        unpadded = 1.0 - (report.padding or 0.0) / report.tokens if report.tokens else 1.0
        model = report.model_flops * unpadded * seen / gpus / peak * SECOND * weight / PPM
        limit = round(model * (room / (report.end - report.start)))
        self._add(MODEL, round(model * (1.0 - repeated)), room=limit)
        self._add(REPEATED, round(model * repeated), room=limit)

    def _max_balance(self) -> int:
        """The most that a balance may hold: what may be told before it can be booked, and a little."""
        return 2 * (self.report_interval + self.booking_interval) + _MAX_SKEW

    def _add(self, balance: int, nanoseconds: int, *, room: int) -> None:
        self.credit[balance] = max(-room, min(room, self.credit[balance] + nanoseconds))

    def _set_recompute(self, report: TrainingReport, policy: Policy) -> None:
        if report.hardware_flops and report.model_flops is not None:
            self.recompute = round((1.0 - report.model_flops / report.hardware_flops) * PPM)
        elif report.recompute:
            selective = round(policy.selective_recompute_share * PPM)
            self.recompute = {"full": FULL_RECOMPUTE, "selective": selective}.get(report.recompute, 0)

    def add_serving(self, serving: ServingReport, device: Device, at: int, *, policy: Policy) -> None:
        """Take in what a serving engine says of this GPU; its first word is of a moment, not of an interval."""
        duration = serving.end - serving.start
        self.shares = shares = serving_shares(serving, policy)
        self._update_interval(duration, at, age=at - serving.end)
        self.shares_until = at + 3 * duration + 5 * SECOND
        peak = peak_flops_of(device)
        if serving.flops is not None and peak and duration:
            self.known.add(MODEL)
            useful = 1.0 - (shares.rejected_drafts + shares.recomputed) / PPM
            model = serving.flops * useful / peak * SECOND * device.weight / PPM
            self._add(MODEL, round(model), room=round(model * (self._max_balance() / duration)))
        self._set_flops_reported(MODEL in self.known, serving.start)

    def _set_flops_reported(self, reported: bool, since: int) -> None:  # noqa: FBT001  what it is and since when, of one attribute
        if reported is not self.flops_reported:
            self.flops_reported, self.flops_changed_at = reported, since

    def advance(self, start: int, end: int, weight: int, *, seen: bool = True) -> bool:
        """Whether anything said still holds in [start, end); an open phase fills its balance, of what is `seen`."""
        self.unobserved += 0 if seen else end - start
        if start > self.stale_at or not seen:
            return False
        self.booking_interval = max(end - start, self.booking_interval - self.booking_interval // 16)
        if start > self.shares_until:
            self.shares = ServingShares()
        if self.phase >= 0 and end > self.phase_since:
            duration = (end - max(start, self.phase_since)) // MS * weight * MS // PPM
            self.credit[self.phase] += duration
            self.accrued[self.phase] += duration
        return True

    def has_flops_for(self, start: int, end: int) -> bool:
        """Whether tensor work in [start, end) is to be compared with model FLOPs; what most of that time was counts."""
        turned_later = self.flops_changed_at > (start + end) // 2
        return self.flops_reported is not turned_later and end <= self.flops_until

    def add_recomputation(self, tensor: int, ms: int) -> None:
        """Of `tensor` ppm of `ms` milliseconds recomputation may be its share."""
        share = tensor * self.recompute // PPM * ms
        self._add(RECOMPUTATION, share, room=self._max_balance() // MS * share // ms if ms else 0)

    def available(self, balance: int, ms: int) -> int:
        """Parts per million of `ms` milliseconds that the balance still covers."""
        credit = self.credit[balance]
        return credit // ms if credit > 0 else 0

    def spend(self, balance: int, ppm: int, ms: int) -> None:
        """So much of `ms` milliseconds was booked; what was booked beyond what was told is no debt."""
        credit = self.credit[balance]
        self.credit[balance] = max(credit - ppm * ms, min(credit, 0))


def peak_flops_of(device: Device, dtype: str = "") -> float:
    """Dense FLOP/s in that number format; 0 where it is not known."""
    return (device.spec.peak(dtype) if device.spec is not None else None) or 0.0


def _phase_times(report: TrainingReport) -> tuple[int, ...]:
    """Nanoseconds of the interval by balance, MODEL left out.

    A pipeline's bubble is what its schedule leaves empty of the steps, if no phase says it; the program sees it as
    waiting for a neighbour, which is communication to it. Where neither schedule nor bubble is told, a pipeline's
    communication is taken for its bubble (E).
    """
    phases = dict(report.phases)
    times = [phases.get(name, 0) for name in _PHASE_OF_BALANCE]
    if times[BUBBLE] or (not times[COMMUNICATION] and report.bubble is None):
        return tuple(times)
    if report.bubble is not None:
        times[BUBBLE] = bubble_time(report)
        times[COMMUNICATION] = max(0, times[COMMUNICATION] - times[BUBBLE])
    elif report.parallel is not None and report.parallel.pipeline > 1:
        times[BUBBLE], times[COMMUNICATION] = times[COMMUNICATION], 0
    return tuple(times)


def bubble_time(report: TrainingReport) -> int:
    """Nanoseconds of the interval's steps that the pipeline's schedule left empty."""
    other_phases = sum(duration for name, duration in report.phases if name not in ("compute", "communication"))
    steps = max(0, report.end - report.start - other_phases)
    return round((report.bubble or 0.0) * steps)


WALL_TIME_PHASES = (*PHASES, "rework", "unreported")
"""Where a job's wall time goes, by its own word."""
LOSS_EVENTS = ("spike", "not_finite", "rollback")
_STEP_PHASES = ("compute", "communication", "bubble")
_SILENT_AFTER = 60 * SECOND
"""A process that has said nothing for so long no longer speaks for its job."""
_MAX_RANKS = 64
"""Of one job on one node."""
_LOSS_SMOOTHING = 0.98
"""Of the running mean and variance of the loss: about fifty reports."""
_MIN_LOSSES = 20
_LARGEST_LOSS = 1e100
"""The square of a larger one may not be finite."""
_MAX_RUNS = 16
"""Of one job, one after another."""
_MAX_QUALITIES = 16
"""Names of figures of one job: each is a series."""


class TrainingRun(Struct, eq=False):
    """What a job and its restarts have in common, as this node knows it."""

    since: int
    advanced_at: int
    """When it was heard of first, and when it last made a step that was new."""
    highest: int = 0
    good: int = 0
    """Its furthest step, and nanoseconds of steps that were new."""

    @classmethod
    def starting_at(cls, since: int) -> "TrainingRun":
        """One that is heard of first."""
        return cls(since, since)


class RankProgress(Struct):
    """The latest of one process."""

    end: int = NEVER
    uuids: tuple[str, ...] = ()
    step_seconds: float = 0.0
    """Mean of a step."""
    busy_seconds: float = 0.0
    """The same without communication and bubbles."""


class LossStats(Struct, eq=False):
    """A running mean of the loss, and what left it."""

    last: float | None = None
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, loss: float, limit: float) -> str:
        """Take it in; the event it is, or "". What is not finite, or is a spike, does not move the mean."""
        self.last = loss
        if not isfinite(loss):
            return "not_finite"
        if abs(loss) > _LARGEST_LOSS:
            return "spike"
        if self.count >= _MIN_LOSSES and loss - self.mean > limit * sqrt(self.variance):
            return "spike"
        self.count += 1
        keep = min(_LOSS_SMOOTHING, 1.0 - 1.0 / self.count)
        deviation = loss - self.mean
        self.mean += (1.0 - keep) * deviation
        self.variance = keep * (self.variance + (1.0 - keep) * deviation * deviation)
        return ""

    @property
    def spread(self) -> float | None:
        """Standard deviation over the mean; None while there are few, or the mean is next to nothing."""
        spread = sqrt(self.variance) / abs(self.mean) if self.count >= _MIN_LOSSES and self.mean else inf
        return spread if isfinite(spread) else None


class TrainingTotals(Struct, eq=False):
    """What a job reports of its training. FLOPs, tokens and samples are this node's share of them."""

    step: int | None = None
    steps: int = 0
    rework_steps: int = 0
    epoch: float | None = None
    world: int = 0
    flops: float = 0.0
    hardware_flops: float = 0.0
    tokens: float = 0.0
    padding: float = 0.0
    samples: float = 0.0
    gpu_time: int = 0
    """GPU-nanoseconds on this node that reports cover."""
    checkpoints: int = 0
    restarts: int = 0
    recovery: int = 0
    """Nanoseconds from the last new step before a restart to the first one after it."""
    parallel: Parallel | None = None


_totals = attrgetter(*TrainingTotals.__struct_fields__)


class TrainingProgress(TrainingTotals, eq=False, kw_only=True):
    """The totals of one job, with what is needed to take in its next report."""

    run: TrainingRun
    run_id: str = ""
    turns: int = 0
    speaker: tuple[int, int] = (1 << 30, NEVER)
    """The lowest rank that reports, which is believed for the whole job, and the end of its last report."""
    last_end: int | None = None
    ranks: dict[str, RankProgress] = {}
    repeated: float = 0.0
    """Share of the latest steps that had been made before."""
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WALL_TIME_PHASES, 0))
    bubble: int = 0
    step_time: int = 0
    """Nanoseconds of steps, and of bubbles in them, where these are reported."""
    recovering: int | None = None
    """When the last new step before a restart had ended."""
    losses: LossStats = field(default_factory=LossStats)
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSS_EVENTS, 0))
    qualities: set[str] = set()
    """Names of the quality figures that were reported."""
    quality: TrainingReport | None = None
    """The latest report with one."""
    quality_start: float = 0.0
    target_at: int | None = None

    def is_duplicate(self, report: TrainingReport) -> bool:
        """Whether it speaks of time that this process has spoken of already; one on other GPUs is another one."""
        rank = self.ranks.get(report.rank)
        return rank is not None and report.start < rank.end and report.uuids == rank.uuids

    def changes_run(self, report: TrainingReport) -> bool:
        """Whether the job names another run than before, and not one too many."""
        return report.run != self.run_id and self.turns < _MAX_RUNS

    def switch_run(self, run: TrainingRun, name: str) -> None:
        """Go on with another run: its steps have nothing to do with those before, if these had a name."""
        self.step = None if self.run_id else self.step
        self.run, self.run_id, self.turns = run, name, self.turns + 1

    def leads(self, report: TrainingReport) -> bool:
        """Whether its process is believed for the whole job: the lowest rank that has spoken within a minute."""
        lowest, last = self.speaker
        return _rank_number(report) <= lowest or report.end - last > _SILENT_AFTER

    def add_report(self, report: TrainingReport, *, here: int, gpus: int, policy: Policy) -> Rework:
        """Take in a report about `here` GPUs of this node, of whose `gpus` its figures are."""
        self._add_totals(report, here=here, share=here / gpus)
        self._update_rank(report)
        if self.leads(report):
            # Who takes over speaks of the same steps as who spoke before: after a restart of ours, in any order.
            already_counted = (
                _rank_number(report) != self.speaker[0] and self.last_end is not None and report.start < self.last_end
            )
            self.speaker = (_rank_number(report), report.end)
            if not already_counted:
                self._apply_leader(report, policy)
        return Rework(self.repeated, self.step is not None and self.step < self.run.highest)

    def _add_totals(self, report: TrainingReport, *, here: int, share: float) -> None:
        self.gpu_time += (report.end - report.start) * here
        flops = report.model_flops or 0.0
        self.flops += flops * share
        self.hardware_flops += (report.hardware_flops or _with_recompute(flops, report.recompute)) * share
        self.tokens += (report.tokens or 0.0) * share
        self.padding += (report.padding or 0.0) * share
        self.samples += (report.samples or 0.0) * share

    def _update_rank(self, report: TrainingReport) -> None:
        """Step time of a rank, and how much of it the rank itself worked."""
        rank = self.ranks.get(report.rank)
        if rank is None:
            if len(self.ranks) >= _MAX_RANKS:
                return
            rank = self.ranks[report.rank] = RankProgress()
        rank.end, rank.uuids = max(rank.end, report.end), report.uuids
        if not report.steps:
            return
        phases = dict(report.phases)
        other_phases = sum(duration for name, duration in phases.items() if name not in (*_STEP_PHASES, "data"))
        waited = phases.get("communication", 0) + phases.get("bubble", 0)
        duration = report.end - report.start - other_phases
        rank.step_seconds = duration / report.steps / SECOND
        rank.busy_seconds = (duration - waited) / report.steps / SECOND

    def _apply_leader(self, report: TrainingReport, policy: Policy) -> None:
        """What only one process may say for the whole job."""
        self.world = report.world_size or self.world
        self.epoch = self.epoch if report.epoch is None else report.epoch
        self.parallel = report.parallel or self.parallel
        self.checkpoints += report.checkpoints
        self.repeated = self._count_steps(report)
        self._add_phases(report, repeated=self.repeated)
        if report.loss is not None:
            event = self.losses.add(report.loss, policy.loss_spike_deviations)
            if event:
                self.events[event] += 1
        if report.quality is not None:
            self._update_quality(report, report.quality)

    def _count_steps(self, report: TrainingReport) -> float:
        """Share of the interval's steps that were made before."""
        run, step = self.run, report.step
        run.highest = max(run.highest, report.highest_step or 0)
        if report.restart:
            self.restarts += 1
            self.recovering = run.advanced_at if self.recovering is None else self.recovering
        if step is None:
            return 0.0
        began = step - report.steps
        if self.step is not None and began < self.step and not report.restart:
            self.events["rollback"] += 1
        self.step = step
        repeated = max(0, min(step, run.highest) - began) if report.steps else 0
        self.steps += report.steps
        self.rework_steps += repeated
        if report.steps > repeated:
            self._new_step(report, step)
        return repeated / report.steps if report.steps else 0.0

    def _new_step(self, report: TrainingReport, step: int) -> None:
        self.run.highest = step
        self.run.advanced_at = report.end
        if self.recovering is not None:
            self.recovery += max(0, report.end - self.recovering)
            self.recovering = None

    def _add_phases(self, report: TrainingReport, *, repeated: float) -> None:
        """Lay the interval's time to its phases; steps that were made before are rework."""
        if self.last_end is not None and report.start > self.last_end:
            self.phases["unreported"] += report.start - self.last_end
        self.last_end = report.end
        spent = dict.fromkeys(PHASES, 0) | dict(report.phases)
        spent["compute"] += max(0, report.end - report.start - sum(spent.values()))
        bubble = spent["bubble"] or bubble_time(report)
        moved = bubble - spent["bubble"]
        for source in ("communication", "compute"):
            part = min(moved, spent[source])
            spent[source] -= part
            moved -= part
        spent["bubble"] = bubble - moved
        if report.bubble is not None or dict(report.phases).get("bubble"):
            self.bubble += spent["bubble"]
            self.step_time += sum(spent[name] for name in _STEP_PHASES)
        for name, duration in spent.items():
            repeated_time = round(duration * repeated) if name in _STEP_PHASES else 0
            self.phases[name] += duration - repeated_time
            self.phases["rework"] += repeated_time
            self.run.good += duration - repeated_time if name in _STEP_PHASES and report.steps else 0

    def _update_quality(self, report: TrainingReport, value: float) -> None:
        if report.quality_name not in self.qualities and len(self.qualities) >= _MAX_QUALITIES:
            return
        self.qualities.add(report.quality_name)
        known = self.quality
        if known is None or known.quality_name != report.quality_name:
            self.quality_start, self.target_at = value, None
        self.quality, target = report, report.quality_target
        if target is None:
            self.target_at = None
        elif self.target_at is None and (value <= target if report.quality_falls else value >= target):
            self.target_at = report.end


def _rank_number(report: TrainingReport) -> int:
    """The rank; who does not say it comes last."""
    return int(report.rank) if report.rank else 1 << 29


def _with_recompute(flops: float, recompute: str) -> float:
    """With full recomputation there is a second forward pass: 8 FLOPs a parameter and token instead of 6."""
    return flops * 8 / 6 if recompute == "full" else flops


class TrainingView(TrainingTotals, eq=True, kw_only=True):
    """The totals as a snapshot has them, with what is derived. Nanoseconds; times in Unix nanoseconds."""

    run: str
    phases: tuple[tuple[str, int], ...]
    goodput: float | None
    """Of the run's time as this node knows it the share that was spent in new steps."""
    bubble: float | None
    ranks: tuple[tuple[str, float, float], ...]
    """Rank, seconds of a step, seconds of it that the rank worked."""
    loss: float | None
    loss_spread: float | None
    events: tuple[tuple[str, int], ...]
    quality: tuple[str, float, float, float | None] | None
    """Name, value, first value, target."""
    target_at: int | None


def training_view(progress: TrainingProgress, *, at: int, wall: int) -> TrainingView:
    """The figures at `at`, whose Unix time is `wall`."""
    quality, run = progress.quality, progress.run
    elapsed = (progress.last_end or run.since) - run.since
    return TrainingView(
        *_totals(progress),
        run=progress.run_id,
        phases=tuple(progress.phases.items()),
        goodput=min(1.0, run.good / elapsed) if elapsed > 0 else None,
        bubble=progress.bubble / progress.step_time if progress.step_time else None,
        ranks=tuple(
            (name, rank.step_seconds, rank.busy_seconds)
            for name, rank in sorted(progress.ranks.items())
            if rank.step_seconds and at - rank.end <= _SILENT_AFTER
        ),
        loss=progress.losses.last,
        loss_spread=progress.losses.spread,
        events=tuple(progress.events.items()),
        quality=None
        if quality is None or quality.quality is None
        else (quality.quality_name, quality.quality, progress.quality_start, quality.quality_target),
        target_at=None if progress.target_at is None else wall - (at - progress.target_at),
    )


_LARGEST_AMOUNT = 1e30
"""Of any amount: sums of larger ones would soon be infinite."""


def _are_amounts(values: Iterable[float]) -> bool:
    return all(0 <= value <= _LARGEST_AMOUNT for value in values)


def is_credible_report(report: TrainingReport, at: int, *, most: float) -> bool:
    """Whether a report can be true: its time has been, its amounts are amounts, and nobody is that fast."""
    duration = report.end - report.start
    amounts = (
        report.model_flops, report.hardware_flops, report.tokens, report.padding, report.samples,
    )  # fmt: skip
    figures = [amount for amount in amounts if amount is not None]
    phases = [nanoseconds for _, nanoseconds in report.phases]
    return (
        duration >= 0 and report.end <= at
        and _are_amounts(figures) and _are_amounts(phases) and sum(phases) <= duration
        and (duration > 0 or (not any(figures) and not report.steps))
        and max(report.model_flops or 0.0, report.hardware_flops or 0.0) * SECOND <= most * duration
        and (report.padding or 0.0) <= (report.tokens or 0.0)
        and (report.model_flops or 0.0) <= (report.hardware_flops or report.model_flops or 0.0)
        and 0 <= report.steps <= (report.step or 0)
        and 0.0 <= (report.bubble or 0.0) < 1.0
        and (not report.rank or report.rank.isdecimal())
    )  # fmt: skip


def is_credible_serving(serving: ServingReport, most: float) -> bool:
    """Whether all its figures are amounts, and no GPU makes more than `most` FLOPs a second."""
    duration = serving.end - serving.start
    latencies = [seconds for latency in serving.latencies for seconds in (latency.p50, latency.p95, latency.p99)]
    figures = [
        getattr(serving, name)
        for name in serving.__struct_fields__
        if name not in {"job_id", "engine", "start", "end", "uuids", "latencies"}
    ]
    amounts = _are_amounts([value for value in figures if value is not None]) and _are_amounts(latencies)
    return amounts and (not duration or (serving.flops or 0.0) * SECOND <= most * duration)
