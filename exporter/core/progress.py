"""Tracks a training job's progress from its reports: steps, runs, phases, loss and quality.

Progress belongs to the whole job and does not affect the ledger; only steps that are repeated do (`Rework`).
"""

from collections import Counter
from math import inf, isfinite, sqrt
from operator import attrgetter

from msgspec import Struct, field

from exporter.core.model import NEVER, PHASES, SECOND, Owner, Parallel, TrainingReport
from exporter.core.policy import Policy
from exporter.core.workload import Rework, bubble_time

WALL_TIME_PHASES = (*PHASES, "rework", "unreported")
"""Categories of a job's reported wall time."""
LOSS_EVENTS = ("spike", "not_finite", "rollback")
_STEP_PHASES = ("compute", "communication", "bubble")
_SILENT_AFTER = 60 * SECOND
"""After this time without a report another process may represent the job."""
_MAX_RANKS = 64
"""Maximum number of ranks of one job on one node; a further one replaces one that is silent."""
_LOSS_SMOOTHING = 0.98
"""Smoothing factor of the running mean and variance of the loss: about fifty reports."""
_MIN_LOSSES = 20
_LARGEST_LOSS = 1e100
"""Larger losses are ignored because their square may be infinite."""
_MAX_RUNS = 16
"""Maximum number of run names of one job; each is a series. Further runs are counted like the first, as `other`."""
_MAX_OPEN_RUNS = 64
"""Maximum number of runs whose progress in one job is kept: those reported last."""
_MAX_QUALITIES = 16
"""Maximum number of quality names of one job; each is a series."""


OWN_RUN = "#"
"""With this a run ID begins that is the job's own, and not shared with its restarts."""


def run_key(owner: Owner, name: str) -> tuple[str, str, str]:
    """User, namespace and name of a run, so that no other user can affect it."""
    return owner.user, owner.namespace, f"{owner.job_id}{name}" if name.startswith(OWN_RUN) else name


class TrainingRun(Struct, eq=False):
    """A training run, shared by a job and its restarts, as far as this node has seen it."""

    since: int
    advanced_at: int
    """When it was first reported, and when it last completed a new step."""
    highest: int = 0
    good: int = 0
    """Highest step, and nanoseconds spent in new steps."""

    @classmethod
    def starting_at(cls, since: int) -> "TrainingRun":
        """A run first reported at `since`."""
        return cls(since, since)


class RankProgress(Struct):
    """Latest step times of one rank."""

    end: int = NEVER
    """End of the last report about an interval: a loss or a phase alone reports no time."""
    uuids: tuple[str, ...] = ()
    worked_until: int | None = None
    """End of the last report with steps or FLOPs; before the first, where the reports of this process began."""
    step_seconds: float = 0.0
    """Mean duration of a step."""
    busy_seconds: float = 0.0
    """Mean duration of a step without communication and bubbles."""


class LossStats(Struct, eq=False):
    """Running mean and variance of the loss."""

    last: float | None = None
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, loss: float, limit: float) -> str:
        """Add a loss; return its event, or "". Spikes and non-finite values do not affect the mean."""
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
        """Standard deviation over the mean; None with too few losses or a mean near zero."""
        spread = sqrt(self.variance) / abs(self.mean) if self.count >= _MIN_LOSSES and self.mean else inf
        return spread if isfinite(spread) else None


class RunProgress(Struct, eq=False):
    """What one job has reported of one of its runs. A process represents all others that report this run."""

    rank: int = 1 << 30
    uuids: tuple[str, ...] = ()
    end: int = NEVER
    """The process that represents the run: its rank, its GPUs, and the end of its last report."""
    step: int | None = None
    repeated: float = 0.0
    """Share of repeated steps in its latest report."""
    losses: LossStats = field(default_factory=LossStats)

    def is_sender(self, report: TrainingReport) -> bool:
        """Whether the process that represents the run sent the report."""
        return _rank_number(report) == self.rank and _may_be_one_process(report.uuids, self.uuids)


class TrainingTotals(Struct, eq=False):
    """Totals of a job's training reports. FLOPs, tokens and samples are this node's share."""

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
    """GPU-nanoseconds on this node covered by reports."""
    checkpoints: int = 0
    restarts: int = 0
    recovery: int = 0
    """Nanoseconds from the last new step before a restart to the first new step after it."""
    parallel: Parallel | None = None


_totals = attrgetter(*TrainingTotals.__struct_fields__)


class TrainingProgress(TrainingTotals, eq=False, kw_only=True):
    """Totals of one job, with the state needed to add further reports."""

    run: TrainingRun
    run_id: str = ""
    run_names: set[str] = set()
    """Reported run IDs that have a series of their own."""
    runs: dict[str, RunProgress] = {}
    """By run ID, in the order of their latest reports; the key is empty for reports without one."""
    last_end: int | None = None
    ranks: dict[str, RankProgress] = {}
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WALL_TIME_PHASES, 0))
    bubble: int = 0
    step_time: int = 0
    """Nanoseconds of bubbles and of steps, where bubbles are reported."""
    recovering: int | None = None
    """End of the last new step before a restart, until a new step completes."""
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSS_EVENTS, 0))
    qualities: set[str] = set()
    """Reported quality names."""
    quality: TrainingReport | None = None
    """Latest report with a quality."""
    quality_start: float = 0.0
    target_at: int | None = None

    def is_duplicate(self, report: TrainingReport) -> bool:
        """Whether this process has already reported that time; the same rank on other GPUs is another process."""
        rank = self.ranks.get(report.rank)
        return rank is not None and report.start < rank.end and report.uuids == rank.uuids

    def other_users(self, report: TrainingReport, latest: dict[str, TrainingReport]) -> Counter[str]:
        """Number of other processes that use a GPU, by UUID; without those that had been silent for a minute.

        `latest`: by rank, the reports that are about to be added.
        """
        return Counter(
            uuid
            for name, rank in (self.ranks | latest).items()
            if name != report.rank and report.start - rank.end <= _SILENT_AFTER
            for uuid in rank.uuids
        )

    def worked_until(self, report: TrainingReport) -> int | None:
        """End of the last work that the same process reported; None: it has reported nothing yet."""
        rank = self.ranks.get(report.rank)
        return None if rank is None or not _may_be_one_process(report.uuids, rank.uuids) else rank.worked_until

    def set_run(self, run: TrainingRun, name: str) -> None:
        """Continue with this run. Steps of another are unrelated to those before, unless these had no run ID."""
        if not self.run_id and "" in self.runs and not name.startswith(OWN_RUN):
            self.runs[name] = self.runs.pop("")
        self.run, self.run_id = run, name
        if len(self.run_names) < _MAX_RUNS:
            self.run_names.add(name)

    @property
    def run_label(self) -> str:
        """The run ID, or `other` beyond the limit of series."""
        named = self.run_id in self.run_names or len(self.run_names) < _MAX_RUNS
        return self.run_id if named else "other"

    @property
    def current(self) -> RunProgress:
        """What the job has reported of its present run."""
        return self.runs.get(self.run_id) or RunProgress()

    def leads(self, report: TrainingReport) -> bool:
        """Whether its process represents the run: that of the lowest rank that has reported within a minute.

        Of processes with the same rank, or without one, it is the first: they may be trainings of their own.
        """
        current = self.current
        sent = _rank_number(report) < current.rank or current.is_sender(report)
        return sent or report.end - current.end > _SILENT_AFTER

    def add_report(self, report: TrainingReport, *, here: int, gpus: int, policy: Policy) -> Rework:
        """Add a report about `here` GPUs of this node; its figures are totals of `gpus` GPUs."""
        self._add_totals(report, here=here, share=here / gpus)
        self._update_rank(report)
        current, leads = self.current, self.leads(report)
        if leads:
            # A new leader may report steps already counted; after a daemon restart reports come in any order.
            already_counted = not current.is_sender(report) and report.start < current.end
            current.rank, current.uuids, current.end = _rank_number(report), report.uuids, report.end
            self._keep_run(current)
            if not already_counted:
                self._apply_leader(report, current, policy)
        return Rework(current.repeated, current.step is not None and current.step < self.run.highest)

    def _keep_run(self, current: RunProgress) -> None:
        """Make it the latest; the one whose latest report is oldest is forgotten beyond the limit."""
        self.runs.pop(self.run_id, None)
        self.runs[self.run_id] = current
        if len(self.runs) > _MAX_OPEN_RUNS:
            del self.runs[next(iter(self.runs))]

    def _add_totals(self, report: TrainingReport, *, here: int, share: float) -> None:
        self.gpu_time += (report.end - report.start) * here
        flops = report.model_flops or 0.0
        self.flops += flops * share
        self.hardware_flops += (report.hardware_flops or _with_recompute(flops, report.recompute)) * share
        self.tokens += (report.tokens or 0.0) * share
        self.padding += (report.padding or 0.0) * share
        self.samples += (report.samples or 0.0) * share

    def _update_rank(self, report: TrainingReport) -> None:
        """Update the step time of a rank, and the part of it in which the rank itself worked."""
        rank = self.ranks.get(report.rank)
        if rank is None and len(self.ranks) >= _MAX_RANKS:
            silent = min(self.ranks, key=lambda name: self.ranks[name].end)
            if report.end - self.ranks[silent].end <= _SILENT_AFTER:
                return
            del self.ranks[silent]
        if rank is None or not _may_be_one_process(report.uuids, rank.uuids):
            rank = self.ranks[report.rank] = RankProgress(worked_until=report.start)
        rank.worked_until = report.end if report.steps or report.model_flops else rank.worked_until
        rank.uuids = report.uuids
        if report.end > report.start:
            rank.end = max(rank.end, report.end)
        if not report.steps:
            return
        phases = dict(report.phases)
        other_phases = sum(duration for name, duration in phases.items() if name not in (*_STEP_PHASES, "data"))
        waited = phases.get("communication", 0) + phases.get("bubble", 0)
        duration = report.end - report.start - other_phases
        rank.step_seconds = duration / report.steps / SECOND
        rank.busy_seconds = (duration - waited) / report.steps / SECOND

    def _apply_leader(self, report: TrainingReport, current: RunProgress, policy: Policy) -> None:
        """Apply figures of the whole run, which are taken from one process only."""
        self.world = report.world_size or self.world
        self.epoch = self.epoch if report.epoch is None else report.epoch
        self.parallel = report.parallel or self.parallel
        self.checkpoints += report.checkpoints
        current.repeated = self._count_steps(report, current)
        self._add_phases(report, repeated=current.repeated)
        if report.loss is not None:
            event = current.losses.add(report.loss, policy.loss_spike_deviations)
            if event:
                self.events[event] += 1
        if report.quality is not None:
            self._update_quality(report, report.quality)

    def _count_steps(self, report: TrainingReport, current: RunProgress) -> float:
        """Count the report's steps; return the share that is repeated."""
        run, step = self.run, report.step
        run.highest = max(run.highest, report.highest_step or 0)
        if report.restart:
            self.restarts += 1
            self.recovering = run.advanced_at if self.recovering is None else self.recovering
        if step is None:
            return 0.0
        began = step - report.steps
        if current.step is not None and began < current.step and not report.restart:
            self.events["rollback"] += 1
        self.step = current.step = step
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
        """Add the interval's time to its phases; repeated steps are rework.

        What is reported about a moment, such as a loss, covers no time: the steps around it may be reported later.
        """
        if report.end == report.start:
            return
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
    """The rank; a missing rank sorts last."""
    return int(report.rank) if report.rank else 1 << 29


def _may_be_one_process(uuids: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether one process may use both sets of GPUs; a set is empty as long as it is not known."""
    return not (uuids and others) or not set(uuids).isdisjoint(others)


def _with_recompute(flops: float, recompute: str) -> float:
    """Full recomputation adds a second forward pass: 8 FLOPs per parameter and token instead of 6."""
    return flops * 8 / 6 if recompute == "full" else flops


class TrainingView(TrainingTotals, eq=True, kw_only=True):
    """Totals and derived figures of a training job, in a snapshot. Durations and Unix times are in nanoseconds."""

    run: str
    """Run ID; empty: none was reported; `other` beyond the limit of series."""
    phases: tuple[tuple[str, int], ...]
    goodput: float | None
    """Share of the run's time on this node that was spent in new steps."""
    bubble: float | None
    ranks: tuple[tuple[str, float, float], ...]
    """Rank, seconds per step, and seconds of it in which the rank worked."""
    loss: float | None
    loss_spread: float | None
    events: tuple[tuple[str, int], ...]
    quality: tuple[str, float, float, float | None] | None
    """Name, value, first value, target."""
    target_at: int | None


def training_view(progress: TrainingProgress, *, at: int, wall: int) -> TrainingView:
    """Build the view at `at`, whose Unix time is `wall` nanoseconds."""
    quality, run = progress.quality, progress.run
    elapsed = (progress.last_end or run.since) - run.since
    return TrainingView(
        *_totals(progress),
        run=progress.run_label,
        phases=tuple(progress.phases.items()),
        goodput=min(1.0, run.good / elapsed) if elapsed > 0 else None,
        bubble=progress.bubble / progress.step_time if progress.step_time else None,
        ranks=tuple(
            (name, rank.step_seconds, rank.busy_seconds)
            for name, rank in sorted(progress.ranks.items())
            if rank.step_seconds and at - rank.end <= _SILENT_AFTER
        ),
        loss=progress.current.losses.last,
        loss_spread=progress.current.losses.spread,
        events=tuple(progress.events.items()),
        quality=None
        if quality is None or quality.quality is None
        else (quality.quality_name, quality.quality, progress.quality_start, quality.quality_target),
        target_at=None if progress.target_at is None else wall - (at - progress.target_at),
    )
