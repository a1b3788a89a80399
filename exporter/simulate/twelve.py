"""Stories of the twelve leaks: each where it is the largest loss, and a twin that does the same work without it.

Owns the table, and who has the GPUs where that is the story. Refuses figures of kernels, which are `trainers`' and
`replicas`'.
"""

from collections.abc import Callable

from msgspec.structs import replace

from exporter.simulate.boards import Board
from exporter.simulate.engines import passes, serving, unasked
from exporter.simulate.plan import Job, Plan
from exporter.simulate.replicas import (
    ALONE,
    EVICTING,
    FILLED,
    KEEPING,
    LONG_DRAFTS,
    MIXED,
    NO_DRAFTS,
    READS,
    ROOMY,
    SWAPPING,
    UNFILLED,
    WITH_DRAFTS,
    WRITES,
    replica,
    replicas,
)
from exporter.simulate.setting import Scenario, Setting
from exporter.simulate.trainers import (
    EXPOSED,
    FED,
    FUSED,
    HIDDEN,
    KEPT,
    LAUNCHED,
    NARROW,
    PACKED,
    PADDED,
    RECOMPUTED,
    REPLAYED,
    START_MS,
    STARVED,
    UNFUSED,
    WIDE,
    Made,
    Make,
    always,
    calm,
    dense,
    each,
    failing,
    falling_back,
    pipeline,
    saving,
    snapshotting,
    stuck,
    sweep,
    together,
    trainer,
)
from exporter.simulate.words import Service
from exporter.simulate.work import FOREVER_MS

# 2: GPUs nobody uses.

_GOOD = always(dense(1000), count=FOREVER_MS // 1000)


def _asked(ms: int) -> Make:
    def make(board: Board) -> Made:
        round_ = passes(board, 25.0, 75, dram=0.8)
        does = Service(running=75, generated_tokens=75, passes=1, kv_use=0.5,
                       inter_token_seconds=0.025, calm_inter_token_seconds=0.025)  # fmt: skip
        yield serving(board, "answering", round_, does=does, ms=ms)
        yield unasked()

    return make


_ASKED_MS = 300_000


def _idle(setting: Setting) -> Plan:
    """Half of the GPUs nobody has, of the others one in two is a server that nobody asks after five minutes."""
    held = setting.slots[: max(1, setting.gpus // 2)]
    jobs = (
        trainer(setting, (slot,), _GOOD) if slot % 2 == 0 else replica(_asked(_ASKED_MS), setting, slot)
        for slot in held
    )
    return Plan(jobs=tuple(jobs))


def _scaled(setting: Setting) -> Plan:
    """The same servers are taken down when nobody asks, and their GPUs given to the next in the queue at once."""
    jobs: list[Job] = []
    for slot in setting.slots:
        if slot % 2 == 0:
            jobs.append(trainer(setting, (slot,), _GOOD))
            continue
        hold = START_MS + _ASKED_MS
        jobs.append(replace(replica(_asked(_ASKED_MS), setting, slot), hold_ms=hold))
        jobs.append(replace(trainer(setting, (slot,), _GOOD), start_ms=hold))
    return Plan(jobs=tuple(jobs))


def _row(plan: Callable[[Setting], Plan], seconds: int, description: str, *, min_gpus: int = 1) -> Scenario:
    return Scenario(description=description, plan=plan, duration_seconds=seconds, min_gpus=min_gpus)


TWELVE: dict[str, Scenario] = {
    "memory_bound": _row(each(UNFUSED), 1200, "training with unfused kernels that wait for memory"),
    "memory_bound_twin": _row(each(FUSED), 560, "the same steps with fused kernels"),
    "low_parallelism": _row(each(NARROW), 1200, "training with kernels of a few blocks"),
    "low_parallelism_twin": _row(each(WIDE), 420, "the same steps with kernels that fill the chip"),
    "idle_allocation": _row(_idle, 1200, "GPUs nobody has, and a server nobody asks"),
    "idle_allocation_twin": _row(_scaled, 1200, "the same work on half of the GPUs, the server taken down in time"),
    "oversized_allocation": _row(sweep(1), 10_800, "seeds of a sweep, each with a GPU of its own"),
    "oversized_allocation_twin": _row(sweep(7), 10_800, "seven seeds side by side on one GPU"),
    "host_overhead": _row(each(LAUNCHED), 1200, "kernels that end before the host has launched the next"),
    "host_overhead_twin": _row(each(REPLAYED), 510, "the same kernels replayed from a graph"),
    "hung": _row(stuck, 1800, "one rank stops after ten minutes, the others wait", min_gpus=2),
    "hung_twin": _row(together(calm(580)), 600, "the same steps, and the end", min_gpus=2),
    "failure_recovery": _row(together(failing), 1200, "a failure every two minutes, state read from slow storage"),
    "failure_recovery_twin": _row(together(always(dense(1000), count=460)), 480, "the same steps without failures"),
    "checkpoint": _row(together(saving, alone=True), 1200, "a checkpoint every hundred steps, while all wait"),
    "checkpoint_twin": _row(together(snapshotting, alone=True), 620, "the same, written behind the steps"),
    "rework": _row(together(falling_back(to=20)), 1200, "two failures, far from the last checkpoint"),
    "rework_twin": _row(together(falling_back(to=300)), 640, "two failures just after a checkpoint"),
    "exposed_communication": _row(together(EXPOSED), 1200, "gradients go over a slow link after each step"),
    "exposed_communication_twin": _row(together(HIDDEN), 490, "the same bytes go behind the products"),
    "pipeline_bubble": _row(pipeline(4), 1200, "a pipeline with as many microbatches as stages", min_gpus=4),
    "pipeline_bubble_twin": _row(pipeline(None), 690, "the same with a schedule without bubbles", min_gpus=4),
    "recomputation": _row(each(RECOMPUTED, recompute="full"), 1200, "training that computes activations twice"),
    "recomputation_twin": _row(each(KEPT), 900, "the same steps, activations kept"),
    "kv_cache_wait": _row(replicas(SWAPPING), 1200, "a server that swaps blocks of its full KV cache to the host"),
    "kv_cache_wait_twin": _row(replicas(ROOMY), 490, "the same requests with a KV cache of half the size a token"),
    "kv_cache_pressure": _row(replicas(EVICTING), 1200, "a server that evicts requests and computes them again"),
    "kv_cache_pressure_twin": _row(replicas(KEEPING), 540, "the same requests with room for all"),
    "prefill_decode_interference": _row(replicas(MIXED), 1200, "prompts are read between the tokens of others"),
    "prefill_decode_interference_twin": _row(
        replicas(READS, READS, WRITES), 410, "prompts and answers on GPUs of their own", min_gpus=3
    ),
    "batching": _row(replicas(UNFILLED), 1200, "requests queue while the batch is a quarter full"),
    "batching_twin": _row(replicas(FILLED), 335, "the same requests, the batch always full"),
    "rejected_speculation": _row(replicas(LONG_DRAFTS), 1200, "drafts of eight tokens, of which one is right"),
    "rejected_speculation_twin": _row(replicas(NO_DRAFTS), 1080, "the same tokens without drafts"),
    "unused_drafts": _row(replicas(ALONE), 1200, "a few requests at a time, without drafts"),
    "unused_drafts_twin": _row(replicas(WITH_DRAFTS), 370, "the same tokens with good drafts"),
    "data_stall": _row(each(STARVED), 1200, "every step waits for its batch"),
    "data_stall_twin": _row(each(FED), 490, "the same steps, the next batch always there"),
    "padding": _row(each(PADDED), 1200, "half of the tokens only fill up"),
    "padding_twin": _row(each(PACKED), 610, "the same tokens, packed"),
}
"""Each twin's time is about what the same work takes: within a step or two of its end."""
