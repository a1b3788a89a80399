"""How far a training job has come, by its own word: steps, time by phase, what was done twice, loss and quality.

Owns the figures of a job and the memory of its run, which outlives the job. Refuses pools: what of this a GPU's books
show is `told`'s. Nothing here can move a second of the ledger.
"""

from math import inf, isfinite, sqrt

from msgspec import Struct, field

from exporter.core.model import NEVER, PHASES, SECOND, Parallel, Report
from exporter.core.policy import Policy
from exporter.core.told import Rework, bubble_of

LASTING = (*PHASES, "rework", "unreported")
"""Where a job's wall time goes, by its own word."""
EVENTS = ("spike", "not_finite", "rollback")
_ADVANCING = ("compute", "communication", "bubble")
_SILENT = 60 * SECOND
"""A process that has said nothing for so long no longer speaks for its job."""
_MOST_RANKS = 64
"""Of one job on one node."""
_MEMORY = 0.98
"""Of the running mean and variance of the loss: about fifty reports."""
_LEAST_LOSSES = 20
_LARGEST_LOSS = 1e100
"""The square of a larger one may not be finite."""
_MOST_RUNS = 16
"""Of one job, one after another."""
_MOST_QUALITIES = 16
"""Names of figures of one job: each is a series."""


class Run(Struct, eq=False):
    """What a job and its restarts have in common, as this node knows it."""

    since: int
    advanced_at: int
    """When it was heard of first, and when it last made a step that was new."""
    highest: int = 0
    good: int = 0
    """Its furthest step, and nanoseconds of steps that were new."""

    @classmethod
    def begun(cls, since: int) -> "Run":
        """One that is heard of first."""
        return cls(since, since)


class Rank(Struct):
    """The latest of one process."""

    end: int = NEVER
    uuids: tuple[str, ...] = ()
    step_seconds: float = 0.0
    """Mean of a step."""
    busy_seconds: float = 0.0
    """The same without communication and bubbles."""


class Losses(Struct, eq=False):
    """A running mean of the loss, and what left it."""

    last: float | None = None
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def hear(self, loss: float, limit: float) -> str:
        """Take it in; the event it is, or "". What is not finite, or is a spike, does not move the mean."""
        self.last = loss
        if not isfinite(loss):
            return "not_finite"
        if abs(loss) > _LARGEST_LOSS:
            return "spike"
        if self.count >= _LEAST_LOSSES and loss - self.mean > limit * sqrt(self.variance):
            return "spike"
        self.count += 1
        keep = min(_MEMORY, 1.0 - 1.0 / self.count)
        off = loss - self.mean
        self.mean += (1.0 - keep) * off
        self.variance = keep * (self.variance + (1.0 - keep) * off * off)
        return ""

    @property
    def spread(self) -> float | None:
        """Standard deviation over the mean; None while there are few, or the mean is next to nothing."""
        spread = sqrt(self.variance) / abs(self.mean) if self.count >= _LEAST_LOSSES and self.mean else inf
        return spread if isfinite(spread) else None


class Progress(Struct, eq=False):
    """One job's own figures. Those of FLOPs, tokens and samples are this node's share of them."""

    run: Run
    run_id: str = ""
    turns: int = 0
    speaker: tuple[int, int] = (1 << 30, NEVER)
    """The lowest rank that speaks, which is believed for the whole job, and when it did last."""
    last_end: int | None = None
    ranks: dict[str, Rank] = {}
    step: int | None = None
    steps: int = 0
    rework_steps: int = 0
    checkpoints: int = 0
    restarts: int = 0
    repeated: float = 0.0
    """Share of the latest steps that had been made before."""
    epoch: float | None = None
    world: int = 0
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LASTING, 0))
    bubble: int = 0
    step_time: int = 0
    """Nanoseconds of steps, and of bubbles in them, where these are told."""
    flops: float = 0.0
    hardware_flops: float = 0.0
    tokens: float = 0.0
    padding: float = 0.0
    samples: float = 0.0
    gpu_time: int = 0
    """GPU-nanoseconds on this node that reports speak of."""
    recovering: int | None = None
    """When the last new step before a restart had ended."""
    recovery: int = 0
    losses: Losses = field(default_factory=Losses)
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    qualities: set[str] = set()
    """Names of figures that were told."""
    quality: Report | None = None
    """The latest that told one."""
    quality_start: float = 0.0
    target_at: int | None = None
    parallel: Parallel | None = None

    def replays(self, report: Report) -> bool:
        """Whether it speaks of time that this process has spoken of already; one on other GPUs is another one."""
        rank = self.ranks.get(report.rank)
        return rank is not None and report.start < rank.end and report.uuids == rank.uuids

    def takes_up(self, report: Report) -> bool:
        """Whether the job names another run than before, and not one too many."""
        return report.run != self.run_id and self.turns < _MOST_RUNS

    def turn(self, run: Run, name: str) -> None:
        """Go on with another run: its steps have nothing to do with those before, if these had a name."""
        self.step = None if self.run_id else self.step
        self.run, self.run_id, self.turns = run, name, self.turns + 1

    def leads(self, report: Report) -> bool:
        """Whether its process is believed for the whole job: the lowest rank that has spoken within a minute."""
        lowest, last = self.speaker
        return _number(report) <= lowest or report.end - last > _SILENT

    def hear(self, report: Report, *, here: int, gpus: int, policy: Policy) -> Rework:
        """Take in a report about `here` GPUs of this node, of whose `gpus` its figures are."""
        self._count(report, here=here, share=here / gpus)
        self._time(report)
        if self.leads(report):
            # Who takes over speaks of the same steps as who spoke before: after a restart of ours, in any order.
            told = _number(report) != self.speaker[0] and self.last_end is not None and report.start < self.last_end
            self.speaker = (_number(report), report.end)
            if not told:
                self._advance(report, policy)
        return Rework(self.repeated, self.step is not None and self.step < self.run.highest)

    def _count(self, report: Report, *, here: int, share: float) -> None:
        self.gpu_time += (report.end - report.start) * here
        flops = report.model_flops or 0.0
        self.flops += flops * share
        self.hardware_flops += (report.hardware_flops or _with_recompute(flops, report.recompute)) * share
        self.tokens += (report.tokens or 0.0) * share
        self.padding += (report.padding or 0.0) * share
        self.samples += (report.samples or 0.0) * share

    def _time(self, report: Report) -> None:
        """Step time of a rank, and how much of it the rank itself worked."""
        rank = self.ranks.get(report.rank)
        if rank is None:
            if len(self.ranks) >= _MOST_RANKS:
                return
            rank = self.ranks[report.rank] = Rank()
        rank.end, rank.uuids = max(rank.end, report.end), report.uuids
        if not report.steps:
            return
        phases = dict(report.phases)
        beside = sum(lasted for name, lasted in phases.items() if name not in (*_ADVANCING, "data"))
        waited = phases.get("communication", 0) + phases.get("bubble", 0)
        lasted = report.end - report.start - beside
        rank.step_seconds = lasted / report.steps / SECOND
        rank.busy_seconds = (lasted - waited) / report.steps / SECOND

    def _advance(self, report: Report, policy: Policy) -> None:
        """What only one process may say for the whole job."""
        self.world = report.world_size or self.world
        self.epoch = self.epoch if report.epoch is None else report.epoch
        self.parallel = report.parallel or self.parallel
        self.checkpoints += report.checkpoints
        self.repeated = self._step(report)
        self._spend(report, repeated=self.repeated)
        if report.loss is not None:
            event = self.losses.hear(report.loss, policy.loss_spike_deviations)
            if event:
                self.events[event] += 1
        if report.quality is not None:
            self._judge(report, report.quality)

    def _step(self, report: Report) -> float:
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

    def _new_step(self, report: Report, step: int) -> None:
        self.run.highest = step
        self.run.advanced_at = report.end
        if self.recovering is not None:
            self.recovery += max(0, report.end - self.recovering)
            self.recovering = None

    def _spend(self, report: Report, *, repeated: float) -> None:
        """Lay the interval's time to its phases; steps that were made before are rework."""
        if self.last_end is not None and report.start > self.last_end:
            self.phases["unreported"] += report.start - self.last_end
        self.last_end = report.end
        spent = dict.fromkeys(PHASES, 0) | dict(report.phases)
        spent["compute"] += max(0, report.end - report.start - sum(spent.values()))
        bubble = spent["bubble"] or bubble_of(report)
        moved = bubble - spent["bubble"]
        for source in ("communication", "compute"):
            part = min(moved, spent[source])
            spent[source] -= part
            moved -= part
        spent["bubble"] = bubble - moved
        if report.bubble is not None or dict(report.phases).get("bubble"):
            self.bubble += spent["bubble"]
            self.step_time += sum(spent[name] for name in _ADVANCING)
        for name, lasted in spent.items():
            again = round(lasted * repeated) if name in _ADVANCING else 0
            self.phases[name] += lasted - again
            self.phases["rework"] += again
            self.run.good += lasted - again if name in _ADVANCING and report.steps else 0

    def _judge(self, report: Report, value: float) -> None:
        if report.quality_name not in self.qualities and len(self.qualities) >= _MOST_QUALITIES:
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


def _number(report: Report) -> int:
    """The rank; who does not say it comes last."""
    return int(report.rank) if report.rank else 1 << 29


def _with_recompute(flops: float, recompute: str) -> float:
    """With full recomputation there is a second forward pass: 8 FLOPs a parameter and token instead of 6."""
    return flops * 8 / 6 if recompute == "full" else flops


class ProgressView(Struct, frozen=True):
    """The same as a snapshot has it. Nanoseconds; times in Unix nanoseconds."""

    run: str
    step: int | None
    steps: int
    rework_steps: int
    epoch: float | None
    world: int
    flops: float
    hardware_flops: float
    tokens: float
    padding: float
    samples: float
    gpu_time: int
    phases: tuple[tuple[str, int], ...]
    goodput: float | None
    """Of the run's time as this node knows it the share that was spent in new steps."""
    checkpoints: int
    restarts: int
    recovery: int
    bubble: float | None
    ranks: tuple[tuple[str, float, float], ...]
    """Rank, seconds of a step, seconds of it that the rank worked."""
    loss: float | None
    loss_spread: float | None
    events: tuple[tuple[str, int], ...]
    quality: tuple[str, float, float, float | None] | None
    """Name, value, first value, target."""
    target_at: int | None
    parallel: Parallel | None


def progress_view(progress: Progress, *, at: int, wall: int) -> ProgressView:
    """The figures at `at`, whose Unix time is `wall`."""
    told, run = progress.quality, progress.run
    elapsed = (progress.last_end or run.since) - run.since
    return ProgressView(
        run=progress.run_id,
        step=progress.step,
        steps=progress.steps,
        rework_steps=progress.rework_steps,
        epoch=progress.epoch,
        world=progress.world,
        flops=progress.flops,
        hardware_flops=progress.hardware_flops,
        tokens=progress.tokens,
        padding=progress.padding,
        samples=progress.samples,
        gpu_time=progress.gpu_time,
        phases=tuple(progress.phases.items()),
        goodput=min(1.0, run.good / elapsed) if elapsed > 0 else None,
        checkpoints=progress.checkpoints,
        restarts=progress.restarts,
        recovery=progress.recovery,
        bubble=progress.bubble / progress.step_time if progress.step_time else None,
        ranks=tuple(
            (name, rank.step_seconds, rank.busy_seconds)
            for name, rank in sorted(progress.ranks.items())
            if rank.step_seconds and at - rank.end <= _SILENT
        ),
        loss=progress.losses.last,
        loss_spread=progress.losses.spread,
        events=tuple(progress.events.items()),
        quality=None
        if told is None or told.quality is None
        else (told.quality_name, told.quality, progress.quality_start, told.quality_target),
        target_at=None if progress.target_at is None else wall - (at - progress.target_at),
        parallel=progress.parallel,
    )
