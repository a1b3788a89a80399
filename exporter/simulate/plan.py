"""Defines scenarios and the plan of one node: jobs, their timelines, faults, and the ground truth.

No reading is ever derived from the ground truth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import pairwise, zip_longest
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import MS, Allocation, Owner, Process
from exporter.simulate.boards import BoardModel, busy_demand, cuda_process, governed_clock
from exporter.simulate.workload import (
    FOREVER_MS,
    IDLE_CYCLE,
    NORMAL_CLIMATE,
    Climate,
    Cycle,
    Load,
    Program,
    ReportingOptions,
    Stage,
    seeded_random,
)

Leftover = Literal["nothing", "zeros", "stale", "refusal"]
"""What telemetry reports while a profiler has the performance counters: no value, 0, a value marked as stale, or no
value and each time the fault that they are refused."""


class SimulatedJob(Struct, frozen=True, kw_only=True):
    """One job: its allocation of GPUs on this node, and the work of its processes, one rank per GPU."""

    owner: Owner
    slots: tuple[int, ...]
    """Ordinals of its GPUs on this node, in rank order."""
    stages: Program
    start_ms: int = 0
    hold_ms: int = FOREVER_MS
    """How long the GPUs are allocated to this job."""
    orphans: frozenset[int] = frozenset()
    """Ranks whose process survives the end of the allocation."""
    gpus: int = 0
    """GPUs on all nodes; 0 means those of `slots`."""
    restarts: int = 0
    reporting: ReportingOptions | None = None
    """How its training processes report; None if they do not."""
    serves: bool = False
    """Whether a serving engine runs in it, which can be scraped."""

    @property
    def end_ms(self) -> int:
        """When the allocation ends."""
        return self.start_ms + self.hold_ms

    def allocation(self, slot: int, uuid: str, *, now_ms: int) -> Allocation:
        """Return the allocation of one GPU as known at `now_ms`: without an end that lies in the future.

        Ranks are known of a job on this node alone: the plan does not say which part of a larger one is here.
        """
        return Allocation(
            uuid=uuid,
            ranks="" if self.gpus else str(self.slots.index(slot)),
            owner=self.owner,
            start=self.start_ms * MS,
            end=self.end_ms * MS if self.end_ms <= now_ms else None,
            gpus=self.gpus or len(self.slots),
            restarts=self.restarts,
        )


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that will happen to one node. Times are milliseconds from the simulation's beginning."""

    jobs: tuple[SimulatedJob, ...] = ()
    lost_ms: Mapping[int, int] = {}
    """When the GPU in a slot falls off the bus."""
    silent_ms: tuple[tuple[int, int], ...] = ()
    """Intervals [start, end) in which the telemetry source returns nothing."""
    drained_ms: Mapping[int, int] = {}
    """When an operator drains the GPU in a slot: its job continues, and it is not allocated again."""
    profiler_ms: tuple[tuple[int, int], ...] = ()
    """Intervals [start, end) in which another process's profiler holds the performance counters."""
    profiler_leaves: Leftover = "nothing"
    still_ms: tuple[tuple[int, int], ...] = ()
    """Intervals [start, end) in which the daemon itself stands still: nothing is observed, so it refuses its page."""
    unanswered_ms: tuple[tuple[int, int], ...] = ()
    """Intervals [start, end) in which the scheduler does not answer."""
    clock_ahead_ms: int = 0
    """By how much the node's wall clock is ahead."""
    slices_known: bool = False
    """Whether devices carry the MIG slices that the boards could be divided into."""
    power_floor: float = 0.0
    """Minimum share of its limit that a board draws while a kernel is resident (power smoothing)."""
    noise: float = 1.0
    """Factor on every sensor's error; 0: exact."""

    def profiled(self, now_ms: int) -> bool:
        """Whether another process's profiler holds the performance counters at this time."""
        return _in_any(self.profiler_ms, now_ms)

    def stands_still(self, now_ms: int) -> bool:
        """Whether the daemon observes nothing at this time."""
        return _in_any(self.still_ms, now_ms)

    def answered_ms(self, now_ms: int) -> int | None:
        """Return when the scheduler last answered, if it does not answer at this time; else None."""
        return next((start for start, end in self.unanswered_ms if start <= now_ms < end), None)

    def condition(self, slot: int, now_ms: int) -> str:
        """Return "lost" or "drained" if the scheduler cannot use this GPU at this time, else an empty string."""
        if self.lost(slot, now_ms):
            return "lost"
        return "drained" if self.drained_ms.get(slot, FOREVER_MS) <= now_ms else ""

    def silent(self, now_ms: int) -> bool:
        """Whether the telemetry source returns nothing at this time."""
        return _in_any(self.silent_ms, now_ms)

    def lost(self, slot: int, now_ms: int) -> bool:
        """Whether this GPU has fallen off the bus at this time."""
        return self.lost_ms.get(slot, FOREVER_MS) <= now_ms


def _in_any(intervals: tuple[tuple[int, int], ...], now_ms: int) -> bool:
    return any(start <= now_ms < end for start, end in intervals)


class GroundTruth(Struct, frozen=True, kw_only=True):
    """Actual activity of one GPU from `at` until its next entry: physics only, without any classification.

    `*_share` are shares of time, `*_active` of the unit's capacity: means over one cycle of the work, without sensor
    errors. `clock_ratio` is the SM clock over the board's tensor reference clock while a kernel runs.
    An entry without a uuid applies to the whole node.
    """

    at: int
    phase: str
    uuid: str = ""
    job_id: str = ""
    """The job whose process runs on the GPU, or to which it is allocated."""
    process: bool = False
    held: bool = False
    """Whether the GPU is allocated to `job_id`."""
    engine_active: float = 0.0
    sm_active: float = 0.0
    tensor_active: float = 0.0
    dram_active: float = 0.0
    clock_ratio: float = 0.0
    peer_bytes_per_second: float = 0.0
    pcie_bytes_per_second: float = 0.0
    computing_share: float = 0.0
    exchanging_share: float = 0.0
    copying_share: float = 0.0
    waiting_input_share: float = 0.0
    waiting_peer_share: float = 0.0


class TimelineInterval(Struct, frozen=True):
    """An interval of one GPU's time in which the same cycle repeats. Times are milliseconds."""

    start: int
    end: int
    name: str
    origin: int = 0
    """When the first repetition of the cycle began."""
    cycle: Cycle = IDLE_CYCLE
    climate: Climate = NORMAL_CLIMATE
    process: Process | None = None
    job: SimulatedJob | None = None
    stage: Stage | None = None

    @property
    def complete(self) -> bool:
        """Whether it ends with its stage, not because the process was killed."""
        return self.stage is not None and self.end == self.origin + self.stage.ms


def timeline(plan: Plan, slot: int, *, board: BoardModel, seed: int) -> Iterator[TimelineInterval]:
    """Yield the intervals of one GPU's time, without gaps, from 0 to FOREVER_MS.

    Raises ValueError if a job is still on the GPU when the next job starts.
    """
    now = 0
    jobs = sorted((job for job in plan.jobs if slot in job.slots), key=lambda job: job.start_ms)
    for job, successor in zip_longest(jobs, jobs[1:]):
        yield from _free_interval(now, job.start_ms)
        now = job.start_ms
        free_by = successor.start_ms if successor else FOREVER_MS
        for interval in _job_timeline(job, slot, board=board, seed=seed):
            if interval.end > free_by:
                raise ValueError(f"job {job.owner.job_id} is still on GPU {slot} when the next one starts")
            yield interval
            now = interval.end
    yield from _free_interval(now, FOREVER_MS)


def _free_interval(start: int, end: int) -> Iterator[TimelineInterval]:
    if start < end:
        yield TimelineInterval(start, end, "free")


def _job_timeline(job: SimulatedJob, slot: int, *, board: BoardModel, seed: int) -> Iterator[TimelineInterval]:
    """Yield a job's intervals on one of its GPUs: its stages until it is killed, then the rest of the allocation."""
    rank = job.slots.index(slot)
    killed_at = FOREVER_MS if rank in job.orphans else min(FOREVER_MS, job.end_ms)
    pid = seeded_random(seed, job.owner.job_id, "pid").randrange(2_000, 4_000_000) + rank
    now = job.start_ms
    for stage in job.stages(seeded_random(seed, job.owner.job_id)):
        end = min(now + stage.ms, killed_at)
        process = cuda_process(board, pid, share=stage.memory, name=stage.program) if stage.context else None
        yield from _stage_intervals(job, stage, rank, span=(now, end), process=process)
        now = end
        if now >= killed_at:
            return
    if now < min(job.end_ms, FOREVER_MS):
        yield TimelineInterval(now, min(job.end_ms, FOREVER_MS), "held without a process", job=job)


def _stage_intervals(
    job: SimulatedJob, stage: Stage, rank: int, *, span: tuple[int, int], process: Process | None
) -> Iterator[TimelineInterval]:
    """Yield one rank's part of a stage, as two intervals if the allocation ends within it."""
    start, end = span
    cuts = [start, job.end_ms, end] if start < job.end_ms < end else [start, end]
    for left, right in pairwise(cuts):
        if left < right:
            yield TimelineInterval(
                left,
                right,
                stage.name,
                origin=start,
                cycle=stage.cycle(rank),
                climate=stage.climate(rank),
                process=process,
                job=job,
                stage=stage,
            )


def ground_truth(
    plan: Plan, uuids: Sequence[str], *, board: BoardModel, seed: int, end_ms: int
) -> Iterator[GroundTruth]:
    """Yield every change of the ground truth until `end_ms`, in order of time."""
    per_gpu = [
        _gpu_truth(plan, slot, uuid=uuid, board=board, seed=seed, end_ms=end_ms) for slot, uuid in enumerate(uuids)
    ]
    return merge(*per_gpu, _source_truth(plan, end_ms), key=lambda entry: entry.at)


def _gpu_truth(plan: Plan, slot: int, *, uuid: str, board: BoardModel, seed: int, end_ms: int) -> Iterator[GroundTruth]:
    until = min(end_ms, plan.lost_ms.get(slot, end_ms))
    for interval in timeline(plan, slot, board=board, seed=seed):
        if interval.start >= until:
            break
        yield _interval_truth(interval, uuid, board)
    if until < end_ms:
        yield GroundTruth(at=until * MS, uuid=uuid, phase="off the bus")


def _source_truth(plan: Plan, end_ms: int) -> Iterator[GroundTruth]:
    for start, end in plan.silent_ms:
        if start < end_ms:
            yield GroundTruth(at=start * MS, phase="the telemetry source is silent")
        if end < end_ms:
            yield GroundTruth(at=end * MS, phase="the telemetry source answers again")


def _interval_truth(interval: TimelineInterval, uuid: str, board: BoardModel) -> GroundTruth:
    load, share = interval.cycle.mean(), interval.cycle.share
    return GroundTruth(
        at=interval.start * MS,
        uuid=uuid,
        phase=interval.name,
        job_id=interval.job.owner.job_id if interval.job else "",
        process=interval.process is not None,
        held=interval.job is not None and interval.start < interval.job.end_ms,
        engine_active=load.engine,
        sm_active=load.sm,
        tensor_active=load.tensor,
        dram_active=load.dram,
        clock_ratio=clock_ratio(board, load, interval.climate),
        peer_bytes_per_second=load.peer_tx + load.peer_rx,
        pcie_bytes_per_second=load.pcie_tx + load.pcie_rx,
        computing_share=share("computing"),
        exchanging_share=share("exchanging"),
        copying_share=share("copying"),
        waiting_input_share=share("waiting_input"),
        waiting_peer_share=share("waiting_peer"),
    )


def clock_ratio(board: BoardModel, load: Load, climate: Climate) -> float:
    """Return the SM clock over the tensor reference clock while this load's kernels run; 0 if there are none."""
    if load.engine <= 0:
        return 0.0
    clock = min(governed_clock(board, busy_demand(load)), climate.clock_cap_hz)
    return clock / board.reference_clock_hz


class Setting(Struct, frozen=True, kw_only=True):
    """Parameters of a scenario: the node's boards, its number in the fleet, and the duration."""

    board: BoardModel
    gpus: int
    node: int
    preroll_ms: int
    duration_ms: int
    """Total, including the pre-roll."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Every GPU of the node."""
        return tuple(range(self.gpus))


class Scenario(Struct, frozen=True):
    """One scenario: how its plan is built, its default duration, and its description."""

    plan: Callable[[Setting], Plan]
    duration_seconds: int
    description: str
    min_gpus: int = 1
    preroll_seconds: int = 0
    """Time simulated before the live part, in steps of a minute."""


def batch_owner(setting: Setting, number: int, name: str, *, user: str = "ada") -> Owner:
    """Return the owner of a Slurm batch job; job ids are unique within a fleet."""
    return Owner(
        job_id=str(41_000 + 1_000 * setting.node + number),
        scheduler="slurm",
        user=user,
        account="research",
        partition="gpu",
        name=name,
    )


def notebook_owner(setting: Setting, number: int) -> Owner:
    """Return the owner of a notebook under Slurm."""
    owner = batch_owner(setting, number, "jupyter", user="grace")
    return replace(owner, partition="interactive", workload_class="interactive")


def server_owner(setting: Setting, number: int) -> Owner:
    """Return the owner of a language-model server's pod."""
    pod = f"chat-{setting.node}-{number}"
    return Owner(
        job_id=f"inference/{pod}",
        scheduler="kubernetes",
        namespace="inference",
        pod=pod,
        name="chat",
        workload_class="serving",
    )


def whole_node(setting: Setting, name: str, program: Program, *, hold_ms: int | None = None) -> SimulatedJob:
    """Return a batch job on all GPUs of the node."""
    job = SimulatedJob(owner=batch_owner(setting, 1, name), slots=setting.slots, stages=program)
    return job if hold_ms is None else replace(job, hold_ms=hold_ms)


def one_each(setting: Setting, name: str, program: Program) -> tuple[SimulatedJob, ...]:
    """Return one batch job per GPU."""
    return tuple(
        SimulatedJob(owner=batch_owner(setting, slot, name), slots=(slot,), stages=program) for slot in setting.slots
    )


_PATIENCE_SECONDS = 300.0
"""The operator's limit for jobs of which it is known that none of their ranks works alone for longer."""


def impatient(job: SimulatedJob) -> SimulatedJob:
    """Return the job with an operator's limit: it is hung after five minutes of spinning, whatever else it does."""
    return replace(job, owner=replace(job.owner, hang_seconds=_PATIENCE_SECONDS))
