"""Describes what happens on one node: jobs, their timelines, faults, and the ground truth about them.

Also holds what a scenario is made of. No reading is ever made from the ground truth.
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

Leftover = Literal["nothing", "zeros", "stale"]
"""What is left for others while a profiler has a board's counters: no value, 0, or the driver's note that it is old."""


class SimulatedJob(Struct, frozen=True, kw_only=True):
    """One job: the scheduler's hold on GPUs of this node, and what its processes do, one rank a GPU."""

    owner: Owner
    slots: tuple[int, ...]
    """Ordinals of its GPUs on this node, in rank order."""
    stages: Program
    start_ms: int = 0
    hold_ms: int = FOREVER_MS
    """How long the scheduler gives the GPUs to this job."""
    orphans: frozenset[int] = frozenset()
    """Ranks whose process outlives the hold: nobody killed it."""
    gpus: int = 0
    """GPUs on all nodes; 0 means those of `slots`."""
    restarts: int = 0
    reporting: ReportingOptions | None = None
    """How its training processes speak of themselves; None: not at all."""
    serves: bool = False
    """A serving engine runs in it, which answers when asked."""

    @property
    def end_ms(self) -> int:
        """When the scheduler takes the GPUs back."""
        return self.start_ms + self.hold_ms

    def allocation(self, uuid: str, *, now_ms: int) -> Allocation:
        """Tell the hold on one GPU as known at `now_ms`: an end that has not come yet is not known."""
        return Allocation(
            uuid=uuid,
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
    """When the GPU in a slot falls off the bus, if it does."""
    silent_ms: tuple[tuple[int, int], ...] = ()
    """When the telemetry source gives nothing: [start, end)."""
    drained_ms: Mapping[int, int] = {}
    """When an operator drains the GPU in a slot: its job goes on, and no other is given it."""
    profiler_ms: tuple[tuple[int, int], ...] = ()
    """When somebody's profiler has the performance counters: [start, end)."""
    profiler_leaves: Leftover = "nothing"
    slices_known: bool = False
    """Whether the inventory says which MIG slices the boards could be cut into."""
    power_floor: float = 0.0
    """Share of its limit that a board draws at least while a kernel is resident: it smooths its power."""
    noise: float = 1.0

    def profiled(self, now_ms: int) -> bool:
        """Whether the performance counters are somebody else's at this moment."""
        return any(start <= now_ms < end for start, end in self.profiler_ms)

    def condition(self, slot: int, now_ms: int) -> str:
        """What keeps the scheduler from using this GPU at this moment, in one word; empty: nothing."""
        if self.lost(slot, now_ms):
            return "lost"
        return "drained" if self.drained_ms.get(slot, FOREVER_MS) <= now_ms else ""

    def silent(self, now_ms: int) -> bool:
        """Whether the source gives nothing at this moment."""
        return any(start <= now_ms < end for start, end in self.silent_ms)

    def lost(self, slot: int, now_ms: int) -> bool:
        """Whether this GPU no longer answers at this moment."""
        return self.lost_ms.get(slot, FOREVER_MS) <= now_ms


class GroundTruth(Struct, frozen=True, kw_only=True):
    """What really goes on with one GPU from `at` until its next entry: plain physics, no judgement.

    Shares are of time, `*_active` of the unit's capacity, all means over one cycle of the work, as intended and
    before any sensor. `clock_ratio` is the SM clock over the board's tensor reference clock while a kernel runs.
    An entry without a uuid is about the node as a whole.
    """

    at: int
    phase: str
    uuid: str = ""
    job_id: str = ""
    """The job whose process is there, or whose hold it is."""
    process: bool = False
    held: bool = False
    """Whether the scheduler has given the GPU to `job_id`."""
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
    """A stretch of one GPU's time in which nothing changes but the place within a cycle."""

    start: int
    end: int
    name: str
    origin: int = 0
    """When the cycle began its first time round."""
    cycle: Cycle = IDLE_CYCLE
    climate: Climate = NORMAL_CLIMATE
    process: Process | None = None
    job: SimulatedJob | None = None
    stage: Stage | None = None

    @property
    def complete(self) -> bool:
        """Whether it ends because its stage does: nobody has killed the process."""
        return self.stage is not None and self.end == self.origin + self.stage.ms


def timeline(plan: Plan, slot: int, *, board: BoardModel, seed: int) -> Iterator[TimelineInterval]:
    """All pieces of one GPU's time, without a gap, from 0 to FOREVER_MS.

    Raises ValueError if a job is still there when the next one starts.
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
    """Play a job on one of its GPUs: its stages, cut where the scheduler kills it, then what is left of the hold."""
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
    """Give one rank's part of a stage, in two pieces if the hold ends within it."""
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
    """Every change of what really goes on until `end_ms`, in order of time, lazily."""
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
    """Give the SM clock over the tensor reference clock while this load's kernels run; 0 if it has none."""
    if load.engine <= 0:
        return 0.0
    clock = min(governed_clock(board, busy_demand(load)), climate.clock_cap_hz)
    return clock / board.reference_clock_hz


class Setting(Struct, frozen=True, kw_only=True):
    """What a scenario is told: the node's boards, its number in the fleet, and how long the story will be."""

    board: BoardModel
    gpus: int
    node: int
    preroll_ms: int
    duration_ms: int
    """Altogether, the pre-roll included."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Every GPU of the node."""
        return tuple(range(self.gpus))


class Scenario(Struct, frozen=True):
    """One row of a table of scenarios: how to build it, how long it takes to show what it shows, and what that is."""

    plan: Callable[[Setting], Plan]
    duration_seconds: int
    description: str
    min_gpus: int = 1
    preroll_seconds: int = 0
    """How much of it has to have happened before anyone watches; played in steps of a minute."""


def batch_owner(setting: Setting, number: int, name: str, *, user: str = "ada") -> Owner:
    """Make a Slurm batch job; numbers do not repeat within a fleet."""
    return Owner(
        job_id=str(41_000 + 1_000 * setting.node + number),
        scheduler="slurm",
        user=user,
        account="research",
        partition="gpu",
        name=name,
    )


def notebook_owner(setting: Setting, number: int) -> Owner:
    """Make a notebook under Slurm."""
    return Owner(
        job_id=str(41_000 + 1_000 * setting.node + number),
        scheduler="slurm",
        user="grace",
        account="research",
        partition="interactive",
        name="jupyter",
        workload_class="interactive",
    )


def server_owner(setting: Setting, number: int) -> Owner:
    """Make a language-model server's pod."""
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
    """Give all GPUs of the node to one batch job."""
    job = SimulatedJob(owner=batch_owner(setting, 1, name), slots=setting.slots, stages=program)
    return job if hold_ms is None else replace(job, hold_ms=hold_ms)


def one_each(setting: Setting, name: str, program: Program) -> tuple[SimulatedJob, ...]:
    """Give a job of its own to every GPU."""
    return tuple(
        SimulatedJob(owner=batch_owner(setting, slot, name), slots=(slot,), stages=program) for slot in setting.slots
    )
