"""Runs a synchronous training job on a world's GPUs: steps with jitter, skew and stragglers, stalls, saves, crashes.

Every rank computes, then polls inside a collective until the slowest rank of the job is there, then all exchange data.
What makes one rank late is that rank's own loss; the polling of the others is exposed communication, whoever is to
blame. Only what a whole job does together (saving, starting, recovering) has its own cause on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tests.truth.causes import (
    CHECKPOINT,
    DATA_STALL,
    EXPOSED_COMMUNICATION,
    FAILURE_RECOVERY,
    HOST_OVERHEAD,
    PIPELINE_BUBBLE,
    STARTUP,
    UNATTRIBUTED_STALL,
)
from tests.truth.kernels import gemm
from tests.truth.loads import GB, UNUSED, Load, mix, spin, wait, worthless
from tests.truth.tracks import Pattern, pattern
from tests.truth.world import Holding, Job, Progress, World


@dataclass(frozen=True)
class Data:
    """How the input pipeline makes a job wait in front of a step."""

    mean_ms: float = 0.0
    spread: float = 0.4
    """Standard deviation as a share of the mean."""
    every: int = 1
    """One step in so many waits."""
    shared: bool = True
    """All ranks wait alike, as for a file system; else each draws its own time."""
    pcie_rx: float = 0.2 * GB


@dataclass(frozen=True)
class Checkpoint:
    """Saving. `who`: all ranks at once, rank0 for all, shards one by one, or async: only a short copy holds steps."""

    every_s: float = 900.0
    copy_s: float = 3.0
    write_s: float = 15.0
    who: str = "all"
    polls: bool = True
    """Ranks that wait poll inside a barrier kernel; else they wait without one."""
    pcie_tx: float = 12 * GB


@dataclass(frozen=True)
class Evaluation:
    """A regular evaluation on all ranks."""

    every_s: float
    seconds: float
    work: Pattern


@dataclass(frozen=True)
class Pipeline:
    """Pipeline parallelism over `stages` of this node's GPUs, with the 1F1B schedule."""

    stages: int = 4
    microbatches: int = 8
    polls: bool = False
    """A waiting stage polls inside a receive kernel."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank. `kind`: clock (a board that runs slower), host (gaps between its kernels), or load (more work)."""

    rank: int
    factor: float
    kind: str = "clock"


@dataclass(frozen=True)
class Failure:
    """A crash: ranks poll until it is noticed, then the processes restart and restore."""

    at_s: float
    detect_s: float = 20.0
    restart_s: float = 40.0
    restore_s: float = 30.0
    requeue: bool = False
    """The scheduler takes the GPUs away and gives them back, instead of the launcher restarting the processes."""


@dataclass(frozen=True)
class Plan:
    """A synchronous training job."""

    work: Pattern
    step_ms: float
    """Time of `work` on a normal rank."""
    collective: Load
    other_work: Pattern | None = None
    """What some steps do instead of `work`, such as those with longer sequences."""
    other_share: float = 0.0
    """Probability of such a step."""
    other_ms: float = 0.0
    """Time of `other_work` on a normal rank."""
    collective_ms: float = 0.0
    """Exposed part of the exchange at the end of a step."""
    congestion: float = 0.01
    """Probability that an exchange takes 2 to 6 times as long."""
    spin: Load = field(default_factory=spin)
    accumulate: int = 1
    """Batches per exchange, each of `step_ms`."""
    jitter: float = 0.02
    """Standard deviation of a step's length, the same on all ranks, as a share."""
    skew: float = 0.008
    """Standard deviation of a rank's own length, as a share."""
    remote: float = 0.0
    """Further wait for ranks on other nodes, as a mean share of the step."""
    gap_ms: float = 3.0
    """Between steps, without kernels: logging, the loop itself."""
    hiccups: float = 4.0
    """An hour: a rank stands still for 0.2 to 3 s, without a kernel, for no reason the process knows."""
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint | None = None
    evaluation: Evaluation | None = None
    pipeline: Pipeline | None = None
    stragglers: tuple[Straggler, ...] = ()
    failures: tuple[Failure, ...] = ()
    startup_s: float = 60.0
    memory_bytes: float = 62e9
    model_share: float = 0.92
    """Model FLOPs as a share of what the tensor pipe could have done while active; recomputation lowers it."""
    dtype: str = ""
    end_s: float | None = None
    """The job ends; None: it runs on."""


def _with_gaps(work: Pattern, factor: float) -> Pattern:
    """Return the same work on a slow CPU: it takes `factor` times as long, the rest being gaps between kernels."""
    gap = wait(HOST_OVERHEAD)
    loads = [mix(load.name, ((1.0, load), (factor - 1.0, gap)), driver=0.99) for load in work.loads]
    return pattern("slow host", *zip(work.shares, loads, strict=True))


IDLE_START = wait(STARTUP, context=False)
LOAD_WEIGHTS = wait(STARTUP, pcie_rx=9 * GB, dram=0.01)
GAP = wait(UNATTRIBUTED_STALL)
DOWN = wait(FAILURE_RECOVERY, context=False)
RESTORE = wait(FAILURE_RECOVERY, pcie_rx=7 * GB, dram=0.01)


class Run:
    """A training job in progress. Times in milliseconds of the world."""

    def __init__(self, world: World, job: Job, gpus: Sequence[int], plan: Plan, *, purpose: str = "run") -> None:
        self.world, self.job, self.plan = world, job, plan
        self.gpus = [world.gpus[index] for index in gpus]
        self.ranks = range(len(self.gpus))
        self.tracks = [gpu.track for gpu in self.gpus]
        self.rng: Random = world.random(f"{purpose}:{job.job_id}")
        self.flops = self._flops(plan.work, plan.step_ms)
        self.other_flops = self._flops(plan.other_work or plan.work, plan.other_ms)
        self.works = [plan.work for _ in self.ranks]
        self.others = [plan.other_work or plan.work for _ in self.ranks]
        self.factors = [1.0 for _ in self.ranks]
        self._slow_down()
        self.failures = list(plan.failures)
        self._inner = {id(work): work.loss(EXPOSED_COMMUNICATION) for work in (*self.works, *self.others)}
        self._bubble = spin(PIPELINE_BUBBLE, sm=0.03, watts=12, doubt=EXPOSED_COMMUNICATION)
        self._idle_bubble = wait(PIPELINE_BUBBLE)
        self.data_wait = wait(DATA_STALL, pcie_rx=plan.data.pcie_rx)
        self.next_save = self.next_evaluation = 0.0

    def _slow_down(self) -> None:
        """Apply the stragglers."""
        for slow in self.plan.stragglers:
            self.factors[slow.rank] = slow.factor
            gpu = self.gpus[slow.rank]
            if slow.kind == "clock":
                clock = gpu.condition.power_and_clock(self.plan.work.mean())[1] / slow.factor
                gpu.condition = replace(gpu.condition, locked_hz=clock // 15e6 * 15e6)
            elif slow.kind == "host":
                for works in (self.works, self.others):
                    works[slow.rank] = _with_gaps(works[slow.rank], slow.factor)

    def _flops(self, work: Pattern, length_ms: float) -> float:
        """Model FLOPs per GPU of a step: what the tensor pipe does in it on a normal rank."""
        board = self.gpus[0].condition.board
        peak = board.flops * board.factor(self.plan.dtype) * self.plan.model_share
        whole = length_ms * self.plan.accumulate / 1e3
        active = sum(
            share * load.tensor * self.gpus[0].condition.clock_ratio(load)
            for share, load in zip(work.shares, work.loads, strict=True)
        )
        return peak * whole * active

    @property
    def now(self) -> int:
        """The time at which the last rank is ready."""
        return max(track.end for track in self.tracks)

    def together(self, what: Load | Pattern, milliseconds: float = 0.0) -> None:
        """Let all ranks do the same until `milliseconds` after the last is ready."""
        end = self.now + round(milliseconds)
        for track in self.tracks:
            track.until(end, what)

    def hold(self, start: int = 0, restarts: int = 0) -> None:
        """Allocate the GPUs to the job from `start` on."""
        indexes = tuple(gpu.index for gpu in self.gpus)
        self.world.holdings.append(Holding(self.job, indexes, start=start, restarts=restarts))

    def release(self, end: int) -> None:
        """End the job's hold on the GPUs."""
        holdings = self.world.holdings
        position = max(k for k, holding in enumerate(holdings) if holding.job.job_id == self.job.job_id)
        holdings[position] = replace(holdings[position], end=end)

    def note(self, start: int, phase: str) -> None:
        """Record a phase outside the steps that just ended."""
        self.world.progress.append(Progress(job_id=self.job.job_id, start=start, end=self.now, phase=phase))

    def memory(self, used: float) -> None:
        """Record the memory used from now on."""
        for gpu in self.gpus:
            gpu.memory.append((self.now, used * self.rng.uniform(0.97, 1.03)))

    def startup(self, seconds: float) -> None:
        """All before the first step: imports without a context, weights over PCIe, compilation and trial kernels."""
        if seconds <= 0:
            self.memory(self.plan.memory_bytes)
            return
        begin, whole = self.now, seconds * 1e3
        self.together(IDLE_START, whole * self.rng.uniform(0.25, 0.45))
        self.memory(1.5e9)
        self.together(LOAD_WEIGHTS, whole * self.rng.uniform(0.1, 0.25))
        self.memory(self.plan.memory_bytes * 0.6)
        trial = worthless(mix("trial", ((0.15, gemm(self.rng)), (0.85, wait(STARTUP)))), STARTUP)
        self.together(trial, begin + whole - self.now)
        self.together(spin(STARTUP, doubt=EXPOSED_COMMUNICATION), self.rng.uniform(200, 2500))
        self.memory(self.plan.memory_bytes)
        self.note(begin, "startup")

    def _data_waits(self, step: int) -> list[float]:
        data = self.plan.data
        if not data.mean_ms or step % data.every:
            return [0.0 for _ in self.ranks]
        draw: Callable[[], float] = lambda: max(0.0, self.rng.gauss(data.mean_ms, data.spread * data.mean_ms))  # noqa: E731
        if data.shared:
            common = draw()
            return [common * self.rng.uniform(0.97, 1.03) for _ in self.ranks]
        return [draw() for _ in self.ranks]

    def step(self, step: int) -> None:
        """One optimiser step of all ranks."""
        plan, begin = self.plan, self.now
        common = max(0.7, self.rng.gauss(1.0, plan.jitter))
        waits = self._data_waits(step)
        chance = plan.hiccups * (plan.step_ms * plan.accumulate / 1e3) / 3600
        stopped = self.rng.choice(self.ranks) if self.rng.random() < chance else -1
        bubbles = tuple(0.0 for _ in self.ranks)
        for rank, track in enumerate(self.tracks):
            track.add(waits[rank], self.data_wait)
            track.add(plan.gap_ms * self.rng.uniform(0.5, 1.5), GAP)
            if rank == stopped:
                track.add(self.rng.uniform(200, 3000), GAP)
        other = self.rng.random() < plan.other_share
        works, length = (self.others, plan.other_ms) if other else (self.works, plan.step_ms)
        length *= common
        if plan.pipeline is None:
            for rank in self.ranks:
                self._compute(rank, works[rank], length)
        else:
            bubbles = self._pipelined(plan.pipeline, works, length)
        ready = [track.end for track in self.tracks]
        late = abs(self.rng.gauss(0.0, plan.remote)) * plan.step_ms * plan.accumulate
        self.together(plan.spin, late)
        slow = self.rng.uniform(2, 6) if self.rng.random() < plan.congestion else self.rng.uniform(0.92, 1.15)
        self.together(plan.collective, plan.collective_ms * slow)
        end = self.now
        inner = [self._inner[id(works[rank])] * length * plan.accumulate * self.factors[rank] for rank in self.ranks]
        self.world.progress.append(
            Progress(
                job_id=self.job.job_id, start=begin, end=end, steps=1, flops=self.other_flops if other else self.flops,
                waits=(("data", tuple(waits)), ("bubble", bubbles)),
                communication=tuple(end - at + part for at, part in zip(ready, inner, strict=True)),
            )
        )  # fmt: skip

    def _compute(self, rank: int, work: Pattern, length: float) -> None:
        own = max(0.8, self.rng.gauss(1.0, self.plan.skew)) * self.factors[rank]
        for _ in range(self.plan.accumulate):
            self.tracks[rank].add(length * own, work)

    def _pipelined(self, pipe: Pipeline, works: Sequence[Pattern], length: float) -> tuple[float, ...]:
        """The 1F1B schedule: each stage is without work for (stages - 1) microbatches of a step, in three pieces."""
        load = self._bubble if pipe.polls else self._idle_bubble
        forward = length / pipe.microbatches / 3
        both = 3 * forward
        begin, bubbles = self.now, []
        slowest = max(self.factors)
        for rank, track in enumerate(self.tracks):
            stage = rank * pipe.stages // len(self.tracks)
            own = max(0.8, self.rng.gauss(1.0, self.plan.skew)) * self.factors[rank]
            pieces = (stage * forward, (pipe.stages - 1 - stage) * both, stage * 2 * forward)
            late = max(0.0, slowest - own) * both * pipe.microbatches
            warm = forward * min(pipe.stages - stage, pipe.microbatches)
            track.until(begin, load)
            track.add(pieces[0] * slowest, load)
            track.add(warm * own, works[rank])
            track.add(pieces[1] * slowest + late * 0.5, load)
            track.add((both * pipe.microbatches - warm) * own, works[rank])
            track.add(pieces[2] * slowest, load)
            bubbles.append(sum(pieces) * slowest + late * 0.5)
        return tuple(bubbles)

    def save(self) -> None:
        """One checkpoint."""
        plan = self.plan.checkpoint
        assert plan is not None
        begin = self.now
        copy, write = wait(CHECKPOINT, pcie_tx=plan.pcie_tx, dram=0.01), wait(CHECKPOINT)
        busy: Sequence[int] = [0] if plan.who == "rank0" else self.ranks
        for rank in busy:
            track = self.tracks[rank]
            if plan.who == "shards":
                track.until(self.now, self._waiting())
            track.add(plan.copy_s * 1e3 * self.rng.uniform(0.85, 1.2), copy)
            if plan.who != "async":
                track.add(plan.write_s * 1e3 * self.rng.uniform(0.7, 1.3), write)
        self.together(self._waiting())
        self.note(begin, "checkpoint")

    def _waiting(self) -> Load:
        plan = self.plan.checkpoint
        if plan is None or plan.polls:
            return spin(CHECKPOINT, doubt=EXPOSED_COMMUNICATION)
        return wait(CHECKPOINT)

    def evaluate(self) -> None:
        """One evaluation on all ranks."""
        plan = self.plan.evaluation
        assert plan is not None
        begin = self.now
        for track in self.tracks:
            track.add(plan.seconds * 1e3 * self.rng.uniform(0.95, 1.0), plan.work)
        self.together(self.plan.spin)
        self.note(begin, "evaluation")

    def fail(self, failure: Failure) -> None:
        """A crash, and all until the next step."""
        self.together(spin(FAILURE_RECOVERY, doubt=EXPOSED_COMMUNICATION), failure.detect_s * 1e3)
        self.memory(0.62e9)
        if failure.requeue:
            self.release(self.now)
            self.together(UNUSED, self.rng.uniform(5e3, 45e3))
            self.hold(self.now, restarts=1 + sum(h.restarts for h in self.world.holdings))
        self.together(DOWN, failure.restart_s * 1e3)
        begin = self.now
        self.together(RESTORE, failure.restore_s * 1e3)
        self.memory(self.plan.memory_bytes)
        self.note(begin, "restore")

    def run(self, until: int | None = None) -> None:
        """Steps, saves, evaluations and failures until `until`, or the world's end."""
        end = self.world.milliseconds if until is None else until
        plan, step = self.plan, 0
        save = plan.checkpoint.every_s * 1e3 if plan.checkpoint else None
        evaluation = plan.evaluation.every_s * 1e3 if plan.evaluation else None
        self.next_save = self.now + (save or 0.0)
        self.next_evaluation = self.now + (evaluation or 0.0)
        while self.now < end:
            if self.failures and self.now >= self.failures[0].at_s * 1e3:
                self.fail(self.failures.pop(0))
            if save is not None and self.now >= self.next_save:
                self.save()
                self.next_save = self.now + save
            if evaluation is not None and self.now >= self.next_evaluation:
                self.evaluate()
                self.next_evaluation = self.now + evaluation
            self.step(step)
            step += 1


def train(world: World, plan: Plan, job: Job, gpus: Sequence[int] | None = None, *, purpose: str = "run") -> Run:
    """Run a job on GPUs (all by default) from the world's beginning to its end, or to the job's own end."""
    run = Run(world, job, range(len(world.gpus)) if gpus is None else gpus, plan, purpose=purpose)
    world.dtype = plan.dtype
    run.hold()
    run.startup(plan.startup_s)
    if plan.end_s is None:
        run.run()
        return run
    run.run(round(plan.end_s * 1e3))
    run.release(run.now)
    run.memory(0.62e9)
    return run
