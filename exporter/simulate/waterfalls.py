"""Defines scenarios with a known expected waterfall: the worked example, and two days of 100 GPU-hours.

The tests compare them with expected results that were calculated by hand.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from exporter.core.model import Latency
from exporter.simulate.boards import BoardModel
from exporter.simulate.kernels import SPIN
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, impatient, server_owner
from exporter.simulate.programs import at_reference
from exporter.simulate.stages import (
    SMALL_JOB,
    PhaseSegment,
    cycle,
    exchange,
    idle_part,
    idle_server,
    latencies,
    other_kernels,
    phase_stage,
    polling_part,
    products,
    restore_after_failure,
    steps,
)
from exporter.simulate.workload import (
    FOREVER_MS,
    HOUR_MS,
    IDLE_CYCLE,
    Cycle,
    Load,
    ReportingOptions,
    Segment,
    ServingCounts,
    Stage,
    Stages,
)

_DAY_MS = 10 * HOUR_MS
"""100 GPU-hours on ten GPUs."""


def _carpenter(setting: Setting) -> Plan:
    """Plan two unallocated hours, then 20 minutes of steps and ten of waiting for data in turn."""
    board = setting.board

    def stages(_: Random) -> Stages:
        part = products(board, 1000, tensor=0.5, dram=0.3, sm=0.8)
        for turn in range(12):
            yield steps(board, 1200, part, after=1200 * turn, model=0.8, counted=True)
            yield phase_stage("no input", 600_000, idle_part(1000.0, "data"))

    jobs = tuple(
        SimulatedJob(
            owner=batch_owner(setting, slot, "carpenter"),
            slots=(slot,),
            stages=stages,
            start_ms=2 * HOUR_MS,
            reporting=ReportingOptions(run=f"carpenter-{slot}", recompute="selective"),
        )
        for slot in setting.slots
    )
    return Plan(jobs=jobs, noise=0.0)


# Training: eight GPUs pretrain all day; the ninth falls off the bus; the tenth runs two small jobs.

_TRAINING_CLOCK = 0.97155
"""Share of the reference clock that a power limit allows all day."""
_STARTS_MS, _STUCK_MS, _RESTART_MS, _RESTORES_MS = 450_000, 750_000, 225_000, 450_000
_SAVES_MS, _EVALUATION_MS = 90_000, 90_000
_LOST_STEPS = 1110


def _day_of_steps(board: BoardModel) -> tuple[PhaseSegment, ...]:
    return (
        idle_part(57.0, "data"),
        polling_part(71.0),
        products(board, 754.0, tensor=0.663, sm=0.97, dram=0.496),
        exchange(board, 118.0, wire=0.5),
    )


def _training_steps(board: BoardModel, count: int, *, after: int, highest: int | None = None) -> Stage:
    return steps(
        board, count, *_day_of_steps(board),
        after=after, highest=highest, model=0.8536, padding=0.0343, counted=True, clock=_TRAINING_CLOCK,
    )  # fmt: skip


def _pretraining(board: BoardModel) -> Iterator[Stage]:
    """Ten blocks of steps, each followed by a checkpoint and a validation; failures in the fifth, after the eighth."""
    yield phase_stage("weights are loaded", _STARTS_MS, idle_part(1000.0, "startup"))
    done = 0
    for block in range(10):
        count = 3000 if block == 9 else 3060  # noqa: PLR2004  the last block is shorter
        if block == 4:  # noqa: PLR2004  the fifth
            yield _training_steps(board, _LOST_STEPS, after=done)
            yield Stage("all ranks wait", _STUCK_MS, (Cycle(Segment(1000.0, SPIN, "waiting_peer")),), memory=0.85)
            yield from _restore(done, highest=done + _LOST_STEPS)
        if block == 8:  # noqa: PLR2004  before the ninth
            yield from _restore(done, highest=done)
        yield _training_steps(board, count, after=done, highest=done + _LOST_STEPS if block == 4 else None)  # noqa: PLR2004
        done += count
        yield phase_stage(
            "a checkpoint is written", _SAVES_MS, idle_part(1000.0, "checkpoint", pcie_tx=1e9), checkpoints=1
        )
        judged = other_kernels(board, 1000.0, sm=0.1, dram=0.05)
        yield phase_stage("samples are written one by one", _EVALUATION_MS, PhaseSegment(judged.segment, "evaluation"))


def _restore(done: int, *, highest: int) -> Iterator[Stage]:
    return restore_after_failure(done, restart_ms=_RESTART_MS, restore_ms=_RESTORES_MS, highest=highest)


def _short_kernels(setting: Setting, *, memory: float, hold_ms: int, start_ms: int) -> SimulatedJob:
    """Return a job of kernels that are shorter than the launch of the next."""
    board = setting.board
    shorts = cycle(products(board, 5.0, tensor=0.25, sm=0.4, dram=0.15), idle_part(7.0, "compute"))
    slow = Stage("short kernels", FOREVER_MS, (shorts,), memory=memory, climates=(at_reference(board),))
    return SimulatedJob(
        owner=batch_owner(setting, 90 + start_ms // HOUR_MS, "ablation"),
        slots=(9,),
        stages=lambda _: iter((slow,)),
        start_ms=start_ms,
        hold_ms=hold_ms,
    )


def _training(setting: Setting) -> Plan:
    board = setting.board
    pretrain = impatient(
        SimulatedJob(
            owner=batch_owner(setting, 1, "pretrain"),
            slots=tuple(range(8)),
            stages=lambda _: _pretraining(board),
            reporting=ReportingOptions(run="pretrain", every_ms=10_000, times=("data", "communication", "bubble")),
        )
    )
    small = _short_kernels(setting, memory=0.4, start_ms=0, hold_ms=9_900_000)
    large = _short_kernels(setting, memory=0.85, start_ms=9_900_000, hold_ms=18_900_000)
    lost = {8: 8 * HOUR_MS + 400}
    return Plan(jobs=(impatient(pretrain), small, large), lost_ms=lost, slices_known=True, noise=0.0)


# Inference: two replicas of two GPUs, four of one; the ninth GPU has a small batch job, the tenth falls off the bus.

_SERVING_CLOCK = 0.925
"""Share of the reference clock that the room's power allows."""


class _ReplicaMode(NamedTuple):
    """Activity of a replica for `ms`: shares of time, of SMs, of tensor cores and of achievable DRAM bandwidth."""

    name: str
    ms: int
    engine: float
    sm: float
    tensor: float
    dram: float
    counts: ServingCounts
    peers: float = 0.0
    """Share of time in communication with the replica's other GPU, at half the link bandwidth."""
    swaps: bool = False
    """Whether KV-cache blocks are swapped with the host while no kernel runs."""


def _with_work(mode: _ReplicaMode, board: BoardModel) -> ServingCounts:
    """Return the counts with FLOPs and bytes per second of one GPU, as the engine computes them from its tokens."""
    flops = mode.tensor * _SERVING_CLOCK * board.peak_flops
    return replace(mode.counts, flops=flops, bytes=mode.dram * board.dram_ceiling * board.bandwidth)


def _serving_stage(mode: _ReplicaMode, board: BoardModel) -> Stage:
    """Build the stage of this mode, with a cycle of one second."""
    own = mode.engine - mode.peers
    kernel = Load(
        engine=1.0,
        sm=mode.sm / own,
        occupancy=mode.sm / own / 4,
        tensor=mode.tensor / own,
        dram=mode.dram * board.dram_ceiling / own,
        fp32=0.02,
    )
    segments = [Segment(1000 * own, kernel, "computing")]
    if mode.peers:
        segments.append(exchange(board, 1000 * mode.peers, wire=0.5).segment)
    if mode.engine < 1:
        wire = 0.2 * board.pcie if mode.swaps else 0.0
        segments.append(Segment(1000 * (1 - mode.engine), Load(pcie_tx=wire, pcie_rx=wire), "idle"))
    climate = replace(at_reference(board), clock_cap_hz=_SERVING_CLOCK * board.reference_clock_hz)
    return Stage(
        mode.name, mode.ms, (Cycle(*segments),), memory=0.9, program="server", climates=(climate,),
        service=_with_work(mode, board),
    )  # fmt: skip


def _reported_latencies(itl: float, *, queue: float = 0.02) -> tuple[Latency, ...]:
    return latencies(ttft=0.4, itl=itl, queue=queue)


_TWO_GPU_MODE = _ReplicaMode(
    "decoding on two GPUs", 8 * HOUR_MS, engine=1.0, sm=0.79, tensor=0.1505, dram=0.86, peers=0.14,
    counts=ServingCounts(running=200, generated_tokens=16_700, passes=84, kv_use=0.7,
                         latencies=_reported_latencies(0.012)),
)  # fmt: skip
_ONE_GPU_MODES = (
    _ReplicaMode(
        "a fifth of the batch is filled", 2 * HOUR_MS, engine=1.0, sm=0.45, tensor=0.06, dram=0.9,
        counts=ServingCounts(running=51, waiting=20, slots=255, generated_tokens=3330, passes=65, kv_use=0.3,
                     latencies=_reported_latencies(0.0153, queue=4.0)),
    ),
    _ReplicaMode(
        "the KV cache is full", HOUR_MS * 3 // 2, engine=2 / 3, sm=0.85 * 2 / 3, tensor=0.55 * 2 / 3,
        dram=0.7 * 2 / 3, swaps=True,
        counts=ServingCounts(running=220, waiting=50, kv_use=0.98, preemptions=9, prompt_tokens=19_350,
                             recomputed_tokens=9970, generated_tokens=1000, passes=5,
                             latencies=_reported_latencies(0.22, queue=6.0)),
    ),
    _ReplicaMode(
        "prompts between answers", 2 * HOUR_MS, engine=1.0, sm=0.9, tensor=0.4, dram=0.8,
        counts=ServingCounts(running=50, prompt_tokens=21_700, generated_tokens=500, passes=25, kv_use=0.5,
                     inter_token_seconds=0.1, calm_inter_token_seconds=0.017,
                     latencies=_reported_latencies(0.1)),
    ),
    _ReplicaMode(
        "long drafts", HOUR_MS * 5 // 8, engine=1.0, sm=0.92, tensor=0.62, dram=0.6,
        counts=ServingCounts(running=80, drafted_tokens=30_000, accepted_tokens=5920, generated_tokens=10_320,
                             passes=55, kv_use=0.5, latencies=_reported_latencies(0.00775)),
    ),
    _ReplicaMode(
        "few requests, slow host", HOUR_MS * 13 // 8, engine=0.35, sm=0.3, tensor=0.07, dram=0.15,
        counts=ServingCounts(running=8, generated_tokens=3880, passes=485, kv_use=0.1,
                             latencies=_reported_latencies(0.00206)),
    ),
)  # fmt: skip
_LOADS_MS, _UPDATES_MS, _RELOADS_MS, _LAST_MS = 900_000, 450_000, 1_800_000, 60_000


def _loading(name: str, ms: int) -> Stage:
    """Build a stage in which the engine does not respond yet."""
    return Stage(name, ms, (IDLE_CYCLE,), memory=0.3, program="server")


def _replica(setting: Setting, slots: tuple[int, ...], modes: tuple[_ReplicaMode, ...]) -> SimulatedJob:
    def stages(_: Random) -> Stages:
        yield _loading("weights are loaded", _LOADS_MS)
        yield from (_serving_stage(mode, setting.board) for mode in modes)
        yield _loading("new weights are loaded", _UPDATES_MS)
        yield idle_server()

    return SimulatedJob(owner=server_owner(setting, slots[0]), slots=slots, stages=stages, serves=True)


def _restarted(setting: Setting, slot: int) -> tuple[SimulatedJob, SimulatedJob]:
    """Return a replica that fails one minute before its last request, and the job of its restarted container."""
    first = _replica(setting, (slot,), _ONE_GPU_MODES)
    fails = _LOADS_MS + sum(mode.ms for mode in _ONE_GPU_MODES) - _LAST_MS
    again = replace(
        _replica(setting, (slot,), ()),
        owner=server_owner(setting, 10 + slot),
        stages=lambda _: iter((
            _loading("weights are loaded again", _RELOADS_MS),
            _serving_stage(_ONE_GPU_MODES[-1]._replace(ms=_LAST_MS), setting.board),
            _loading("new weights are loaded", _UPDATES_MS),
            idle_server(),
        )),
        start_ms=fails,
        restarts=1,
    )  # fmt: skip
    return replace(first, hold_ms=fails), again


def _inference(setting: Setting) -> Plan:
    embeds = Stage("embedding", FOREVER_MS, (Cycle(Segment(10.0, SMALL_JOB, "computing")),), memory=0.08)
    small = SimulatedJob(
        owner=batch_owner(setting, 8, "embed"), slots=(8,), stages=lambda _: iter((embeds,)), hold_ms=8 * HOUR_MS
    )
    jobs = (
        *(_replica(setting, pair, (_TWO_GPU_MODE,)) for pair in ((0, 1), (2, 3))),
        *(_replica(setting, (slot,), _ONE_GPU_MODES) for slot in (4, 5)),
        *(job for slot in (6, 7) for job in _restarted(setting, slot)),
        small,
    )
    return Plan(jobs=jobs, lost_ms={9: 9 * HOUR_MS + 400}, slices_known=True, noise=0.0)


WATERFALL_SCENARIOS: dict[str, Scenario] = {
    "carpenter_told": Scenario(
        _carpenter,
        8 * 3600,
        "the worked example, reported by the job: two hours unallocated, four of steps, two without input",
    ),
    "training_waterfall": Scenario(
        _training,
        _DAY_MS // 1000,
        "ten hours of ten GPUs, one job training on eight of them, with every leak of training",
        min_gpus=10,
    ),
    "inference_waterfall": Scenario(
        _inference,
        _DAY_MS // 1000,
        "ten hours of ten GPUs, eight of them serving, with every leak of serving",
        min_gpus=10,
    ),
}
