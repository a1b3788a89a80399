"""Defines scenarios in which one leak is the largest loss, each with a twin that does the same work without it."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec.structs import replace

from exporter.core.model import Latency, Parallel
from exporter.simulate.boards import BoardModel
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner, impatient, one_each, server_owner
from exporter.simulate.stages import (
    SMALL_JOB,
    PhaseSegment,
    cache_swaps,
    cycle,
    exchange,
    forward_passes,
    idle_part,
    idle_server,
    latencies,
    loading_server,
    loading_weights,
    other_kernels,
    phase_stage,
    polling_part,
    products,
    restore_after_failure,
    scheduling_pause,
    serving,
    steps,
)
from exporter.simulate.workload import (
    FOREVER_MS,
    IDLE_CYCLE,
    Cycle,
    Load,
    ReportingOptions,
    Segment,
    ServingCounts,
    Stage,
    Stages,
    as_program,
)

START_MS = 20_000
"""Start-up time of every program here."""
STEPS = 1180
"""Steps of most training jobs here, with or without the leak; one second each with it."""

StageSequence = Iterable[Stage]
StageFactory = Callable[[BoardModel], StageSequence]


@as_program
def _after_loading(
    _: Random, board: BoardModel, load: Callable[[BoardModel, int], Stage], make: StageFactory
) -> Stages:
    yield load(board, START_MS)
    yield from make(board)


def training_job(setting: Setting, slots: tuple[int, ...], make: StageFactory, **options: Any) -> SimulatedJob:
    """Return a training job that reports, on these GPUs."""
    owner = batch_owner(setting, slots[0], "pretrain")
    return SimulatedJob(
        owner=owner,
        slots=slots,
        stages=_after_loading(setting.board, loading_weights, make),
        reporting=ReportingOptions(run=f"run-{owner.job_id}", **options),
    )


def job_per_gpu(make: StageFactory, **options: Any) -> Callable[[Setting], Plan]:
    """Plan one training job per GPU."""
    return lambda setting: Plan(jobs=tuple(training_job(setting, (slot,), make, **options) for slot in setting.slots))


def one_job(make: StageFactory, **options: Any) -> Callable[[Setting], Plan]:
    """Plan one training job on all GPUs."""
    return lambda setting: Plan(jobs=(training_job(setting, setting.slots, make, **options),))


def repeated_steps(*parts: Callable[[BoardModel], PhaseSegment], count: int = STEPS, **what: Any) -> StageFactory:
    """Return a factory of `count` steps of these parts."""
    return lambda board: [steps(board, count, *(part(board) for part in parts), **what)]


# 1: kernels limited by memory or by too few blocks.


def dense(ms: float, tensor: float = 0.6, **what: float) -> Callable[[BoardModel], PhaseSegment]:
    """Matrix products of `ms` milliseconds that hardly wait for memory."""
    return lambda board: products(board, ms, tensor=tensor, **{"dram": 0.15} | what)


def _other(ms: float, *, sm: float, dram: float) -> Callable[[BoardModel], PhaseSegment]:
    return lambda board: other_kernels(board, ms, sm=sm, dram=dram)


UNFUSED = repeated_steps(dense(400), _other(600, sm=0.9, dram=0.9))
FUSED = repeated_steps(dense(400), _other(60, sm=0.9, dram=0.3))
NARROW = repeated_steps(dense(300), _other(700, sm=0.08, dram=0.03))
WIDE = repeated_steps(dense(300), _other(40, sm=0.9, dram=0.3))

# 3: jobs smaller than their GPU.


def sweep(beside: int) -> Callable[[Setting], Plan]:
    """Plan a sweep over seeds, of which `beside` share each GPU."""
    together = Load(*[min(1.0, beside * value) for value in SMALL_JOB])
    doing = Stage("a sweep's seeds", FOREVER_MS, (Cycle(Segment(10.0, together, "computing")),), memory=0.08 * beside)

    def plan(setting: Setting) -> Plan:
        return Plan(jobs=one_each(setting, "sweep", lambda _: iter((doing,))), slices_known=True)

    return plan


# 4: a host too slow for its GPU: a step is one short kernel.

LAUNCHED = repeated_steps(dense(5, 0.25, sm=0.4), lambda _: idle_part(7.0, "compute"), count=STEPS * 1000 // 12)
REPLAYED = repeated_steps(dense(5, 0.25, sm=0.4), lambda _: idle_part(0.02, "compute"), count=STEPS * 1000 // 12)

# 5: failures.


def hanging_job(setting: Setting) -> Plan:
    """Plan training until the last rank stops, and the others wait in a collective without end."""

    def make(board: BoardModel) -> StageSequence:
        yield from FAULT_FREE(board)
        polling = cycle(polling_part(1000.0))
        waits = (*[polling] * (setting.gpus - 1), IDLE_CYCLE)
        yield Stage("one rank never comes", FOREVER_MS, waits, memory=0.85)

    return Plan(jobs=(impatient(training_job(setting, setting.slots, make)),))


FAULT_FREE = repeated_steps(
    dense(900), lambda b: exchange(b, 60.0, wire=0.8), lambda _: idle_part(40.0, "data"), count=580
)
"""Training without a fault: one step per second, with 60 ms of exposed communication."""


def failing(board: BoardModel) -> StageSequence:
    """Training in which a node fails every two minutes: it restarts and restores its state from slow storage."""
    done = 0
    while True:
        yield steps(board, 115, dense(1000)(board), after=done)
        done += 115
        yield from restore_after_failure(done, restart_ms=10_000, restore_ms=170_000, highest=done)


def saving(board: BoardModel) -> StageSequence:
    """Training with a synchronous checkpoint of the whole state after every hundred steps."""
    done = 0
    while True:
        yield steps(board, 100, dense(1000)(board), after=done)
        done += 100
        writes = idle_part(1000.0, "checkpoint", pcie_tx=1.2e9)
        yield phase_stage("a checkpoint is written", 96_000, writes, checkpoints=1)


def snapshotting(board: BoardModel) -> StageSequence:
    """Training with an asynchronous checkpoint of the same state."""
    load = dense(1000)(board).segment.load._replace(pcie_tx=1.15e9)
    part = PhaseSegment(Segment(1000.0, load, "computing"))
    done = 0
    while True:
        yield steps(board, 100, part, after=done, checkpoints=1)
        done += 100


def falling_back(*, to: int) -> StageFactory:
    """Training with two failures at step 300, each followed by a resume from step `to`."""

    def make(board: BoardModel) -> StageSequence:
        part = dense(1000, 0.65, sm=0.95, dram=0.2)(board)
        yield steps(board, 300, part)
        yield from restore_after_failure(to, restart_ms=5_000, restore_ms=10_000, highest=300)
        if to < 300:  # noqa: PLR2004  the step of both failures
            yield steps(board, 300 - to, part, after=to, highest=300)
        yield from restore_after_failure(to, restart_ms=5_000, restore_ms=10_000, highest=300)
        yield steps(board, 590 - to, part, after=to, highest=300)

    return make


# 6 and 7: waiting for other GPUs.

EXPOSED = repeated_steps(dense(400), lambda board: exchange(board, 600.0, wire=0.2))
HIDDEN = repeated_steps(lambda board: products(board, 400, tensor=0.6, dram=0.15, wire=0.3))


def pipeline(microbatches: int | None) -> Callable[[Setting], Plan]:
    """Plan a pipeline with one stage per GPU; each microbatch takes 100 ms per stage. None: no bubbles."""

    def plan(setting: Setting) -> Plan:
        stages = setting.gpus
        empty = 0 if microbatches is None else stages - 1
        bubble = empty / ((microbatches or 1) + empty)
        work = 100.0 * (microbatches or 4)

        def make(board: BoardModel) -> StageSequence:
            parts = (polling_part(0.0), dense(work)(board), polling_part(100.0 * empty))
            each = tuple(
                cycle(polling_part(100.0 * rank * bool(empty)), parts[1], polling_part(100.0 * max(0, empty - rank)))
                for rank in range(stages)
            )
            yield steps(board, 1685, *parts, cycle_by_rank=each)

        return one_job(make, times=(), bubble=bubble, parallel=Parallel(pipeline=stages))(setting)

    return plan


# 8, and the data pipeline.

RECOMPUTED = repeated_steps(dense(1000, 0.8, sm=0.96, dram=0.12), model=0.75)
NOT_RECOMPUTED = repeated_steps(dense(750, 0.8, sm=0.96, dram=0.12))
PADDED = repeated_steps(dense(1000, 0.75, sm=0.95), padding=0.5)
PACKED = repeated_steps(dense(500, 0.75, sm=0.95))
STARVED = repeated_steps(
    lambda _: idle_part(550.0, "data"), lambda board: idle_part(50.0, "data", pcie_rx=0.2 * board.pcie), dense(400)
)
FED = repeated_steps(dense(400))


def replica(make: StageFactory, setting: Setting, slot: int) -> SimulatedJob:
    """Return a server on one GPU, whose engine can be polled."""
    program = _after_loading(setting.board, loading_server, make)
    return SimulatedJob(owner=server_owner(setting, slot), slots=(slot,), stages=program, serves=True)


def replicas(*makes: StageFactory) -> Callable[[Setting], Plan]:
    """Plan one server per GPU, of these kinds in turn."""
    return lambda setting: Plan(jobs=tuple(replica(makes[slot % len(makes)], setting, slot) for slot in setting.slots))


def _repeated_rounds(name: str, *segments: Callable[[BoardModel], Segment], **counts: Any) -> StageFactory:
    """Return a factory of a server that repeats these segments."""
    return lambda board: [
        serving(board, name, *(segment(board) for segment in segments), counts=ServingCounts(**counts))
    ]


# 9 to 12: serving.


def _long_queue(itl: float) -> tuple[Latency, ...]:
    return latencies(ttft=0.4, itl=itl, queue=6.0)


def _short_queue(itl: float) -> tuple[Latency, ...]:
    return latencies(ttft=0.3, itl=itl, queue=0.05)


SWAPPING = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 400, 2400, dram=0.8), lambda b: cache_swaps(b, 600, wire=0.3),
    running=200, waiting=40, kv_use=0.99, preemptions=4, generated_tokens=2400, passes=12, latencies=_long_queue(0.083),
)  # fmt: skip
ROOMY = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 400, 2400, dram=0.8),
    running=200, kv_use=0.6, generated_tokens=2400, passes=12, latencies=_short_queue(0.033),
)  # fmt: skip


def _documents(again: int, ms: float, **counts: Any) -> StageFactory:
    """Long prompts, short answers: per round 13,840 prompt tokens, `again` recomputed tokens and 180 answer tokens."""
    return _repeated_rounds(
        "reading documents",
        lambda b: forward_passes(b, ms, 13_840 + again, dram=0.25, sm=0.9),
        lambda b: forward_passes(b, 60.0, 180, dram=0.8),
        prompt_tokens=13_840 + again, recomputed_tokens=again, generated_tokens=180, passes=3, running=60,
        **counts,
    )  # fmt: skip


EVICTING = _documents(20_000, 940.0, waiting=50, kv_use=0.98, preemptions=6, latencies=_long_queue(0.333))
NOT_EVICTING = _documents(0, 13_840 / 36, kv_use=0.7, latencies=_short_queue(0.148))


def _prefill(board: BoardModel) -> Segment:
    return forward_passes(board, 50.0, 1350, dram=0.2, sm=0.9)


def _decode(board: BoardModel) -> Segment:
    return forward_passes(board, 25.0, 50, dram=0.8)


MIXED = _repeated_rounds(
    "answering", _decode, _prefill,
    running=50, prompt_tokens=1350, generated_tokens=50, passes=2, kv_use=0.5,
    inter_token_seconds=0.075, calm_inter_token_seconds=0.025, latencies=latencies(ttft=0.4, itl=0.075, queue=0.2),
)  # fmt: skip
PREFILL_ONLY = _repeated_rounds("reading prompts", _prefill, running=1, prompt_tokens=1350, passes=1, kv_use=0.1)
DECODE_ONLY = _repeated_rounds(
    "writing answers", _decode,
    running=50, generated_tokens=50, passes=1, kv_use=0.5,
    inter_token_seconds=0.025, calm_inter_token_seconds=0.025, latencies=latencies(ttft=0.1, itl=0.025, queue=0.1),
)  # fmt: skip
UNFILLED = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 28.5, 16, dram=0.8), lambda _: scheduling_pause(1.5),
    running=16, waiting=40, slots=64, generated_tokens=16, passes=1, kv_use=0.3, latencies=_long_queue(0.03),
)  # fmt: skip
FILLED = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 31, 64, dram=0.8), lambda _: scheduling_pause(1.5),
    running=64, waiting=12, slots=64, generated_tokens=64, passes=1, kv_use=0.8, latencies=_short_queue(0.0325),
)  # fmt: skip
LONG_DRAFTS = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 20, 720, dram=0.4),
    running=80, drafted_tokens=640, accepted_tokens=80, generated_tokens=160, passes=1, kv_use=0.5,
    latencies=_short_queue(0.01),
)  # fmt: skip
NO_DRAFTS = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 9, 80, dram=0.8),
    running=80, generated_tokens=80, passes=1, kv_use=0.5, latencies=_short_queue(0.009),
)  # fmt: skip
ALONE = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 10, 8, dram=0.95),
    running=8, generated_tokens=8, passes=1, kv_use=0.1,
    latencies=_short_queue(0.01),
)  # fmt: skip
WITH_DRAFTS = _repeated_rounds(
    "answering", lambda b: forward_passes(b, 10.5, 32, dram=0.95),
    running=8, drafted_tokens=24, accepted_tokens=20, generated_tokens=28, passes=1, kv_use=0.1,
    latencies=_short_queue(0.003),
)  # fmt: skip


# 2: unused GPUs.

_GOOD_TRAINING = repeated_steps(dense(1000), count=FOREVER_MS // 1000)


_REQUESTS_MS = 300_000


def _briefly_used_server(board: BoardModel) -> StageSequence:
    passes = forward_passes(board, 25.0, 75, dram=0.8)
    counts = ServingCounts(running=75, generated_tokens=75, passes=1, kv_use=0.5,
                           inter_token_seconds=0.025, calm_inter_token_seconds=0.025)  # fmt: skip
    yield serving(board, "answering", passes, counts=counts, ms=_REQUESTS_MS)
    yield idle_server()


def _idle(setting: Setting) -> Plan:
    """Plan half of the GPUs unallocated; of the others every second is a server without requests after 5 minutes."""
    held = setting.slots[: max(1, setting.gpus // 2)]
    jobs = (
        training_job(setting, (slot,), _GOOD_TRAINING)
        if slot % 2 == 0
        else replica(_briefly_used_server, setting, slot)
        for slot in held
    )
    return Plan(jobs=tuple(jobs))


def _scaled(setting: Setting) -> Plan:
    """Plan the same servers, stopped when requests end; queued jobs get their GPUs at once."""
    jobs: list[SimulatedJob] = []
    for slot in setting.slots:
        if slot % 2 == 0:
            jobs.append(training_job(setting, (slot,), _GOOD_TRAINING))
            continue
        hold = START_MS + _REQUESTS_MS
        jobs.append(replace(replica(_briefly_used_server, setting, slot), hold_ms=hold))
        jobs.append(replace(training_job(setting, (slot,), _GOOD_TRAINING), start_ms=hold))
    return Plan(jobs=tuple(jobs))


LEAK_SCENARIOS: dict[str, Scenario] = {
    "memory_bound": Scenario(job_per_gpu(UNFUSED), 1200, "training with unfused kernels that wait for memory"),
    "memory_bound_twin": Scenario(job_per_gpu(FUSED), 560, "the same steps with fused kernels"),
    "low_parallelism": Scenario(job_per_gpu(NARROW), 1200, "training with kernels of a few blocks"),
    "low_parallelism_twin": Scenario(job_per_gpu(WIDE), 420, "the same steps with kernels that fill the chip"),
    "idle_allocation": Scenario(_idle, 1200, "unallocated GPUs, and a server without requests"),
    "idle_allocation_twin": Scenario(_scaled, 1200, "the same work on half of the GPUs, the server taken down in time"),
    "oversized_allocation": Scenario(sweep(1), 10_800, "seeds of a sweep, each with a GPU of its own"),
    "oversized_allocation_twin": Scenario(sweep(7), 10_800, "seven seeds side by side on one GPU"),
    "host_overhead": Scenario(job_per_gpu(LAUNCHED), 1200, "kernels shorter than the host takes to launch the next"),
    "host_overhead_twin": Scenario(job_per_gpu(REPLAYED), 510, "the same kernels replayed from a graph"),
    "hung": Scenario(hanging_job, 1800, "one rank stops after ten minutes, and the others wait", min_gpus=2),
    "hung_twin": Scenario(one_job(FAULT_FREE), 600, "the same steps, then the job ends", min_gpus=2),
    "failure_recovery": Scenario(one_job(failing), 1200, "a failure every two minutes, state read from slow storage"),
    "failure_recovery_twin": Scenario(
        one_job(repeated_steps(dense(1000), count=460)), 480, "the same steps without failures"
    ),
    "checkpoint": Scenario(one_job(saving, alone=True), 1200, "a synchronous checkpoint every hundred steps"),
    "checkpoint_twin": Scenario(one_job(snapshotting, alone=True), 620, "the same, written asynchronously"),
    "rework": Scenario(one_job(falling_back(to=20)), 1200, "two failures, far from the last checkpoint"),
    "rework_twin": Scenario(one_job(falling_back(to=300)), 640, "two failures just after a checkpoint"),
    "exposed_communication": Scenario(one_job(EXPOSED), 1200, "gradients go over a slow link after each step"),
    "exposed_communication_twin": Scenario(one_job(HIDDEN), 490, "the same bytes, overlapped with computation"),
    "pipeline_bubble": Scenario(pipeline(4), 1200, "a pipeline with as many microbatches as stages", min_gpus=4),
    "pipeline_bubble_twin": Scenario(pipeline(None), 690, "the same with a schedule without bubbles", min_gpus=4),
    "recomputation": Scenario(
        job_per_gpu(RECOMPUTED, recompute="full"), 1200, "training that computes activations twice"
    ),
    "recomputation_twin": Scenario(job_per_gpu(NOT_RECOMPUTED), 900, "the same steps, activations kept"),
    "kv_cache_wait": Scenario(replicas(SWAPPING), 1200, "a server that swaps blocks of its full KV cache to the host"),
    "kv_cache_wait_twin": Scenario(replicas(ROOMY), 490, "the same requests with half as much KV cache per token"),
    "kv_cache_pressure": Scenario(replicas(EVICTING), 1200, "a server that evicts requests and recomputes them"),
    "kv_cache_pressure_twin": Scenario(replicas(NOT_EVICTING), 540, "the same requests with enough KV cache"),
    "prefill_decode_interference": Scenario(replicas(MIXED), 1200, "prefill delays the decoding of other requests"),
    "prefill_decode_interference_twin": Scenario(
        replicas(PREFILL_ONLY, PREFILL_ONLY, DECODE_ONLY), 410, "prefill and decoding on separate GPUs", min_gpus=3
    ),
    "batching": Scenario(replicas(UNFILLED), 1200, "requests queue while the batch is a quarter full"),
    "batching_twin": Scenario(replicas(FILLED), 335, "the same requests, the batch always full"),
    "rejected_speculation": Scenario(replicas(LONG_DRAFTS), 1200, "drafts of eight tokens, of which one is accepted"),
    "rejected_speculation_twin": Scenario(replicas(NO_DRAFTS), 1080, "the same tokens without drafts"),
    "unused_drafts": Scenario(replicas(ALONE), 1200, "a few requests at a time, without drafts"),
    "unused_drafts_twin": Scenario(replicas(WITH_DRAFTS), 370, "the same tokens with good drafts"),
    "data_stall": Scenario(job_per_gpu(STARVED), 1200, "training in which every step waits for its batch"),
    "data_stall_twin": Scenario(job_per_gpu(FED), 490, "the same steps, with batches always ready"),
    "padding": Scenario(job_per_gpu(PADDED), 1200, "training on half padding tokens"),
    "padding_twin": Scenario(job_per_gpu(PACKED), 610, "the same tokens in packed sequences"),
}
"""Each twin's duration is what the same work takes, within a step or two."""
