"""LEAKS: every way a paid GPU-second is lost, in the order of pouring, one row each.

Owns the table and the pouring. A detector is one function `take(span, left) -> ppm`, in a file of its own where
it has a formula; the pouring clips it to what its pools still hold, so that no estimate can take what is not there.
Refuses time and money: a row says what share of a stretch is lost, the ledger how long it was.
"""

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from exporter.core.leaks import (
    checkpoint,
    communication,
    data_stall,
    failure_recovery,
    host_overhead,
    idle_allocation,
    low_parallelism,
    memory_bound,
    oversized,
    reported,
    serving,
    startup,
)
from exporter.core.leaks.span import CLOCK, POOLS, SLACK, SPEAKS, TENSOR, UNRESOLVED, WAIT, Span
from exporter.core.model import State
from exporter.core.told import AGAIN, BUBBLE, CHECKPOINT, COMMUNICATION, DATA, EXPLAINED, MODEL, RESTORE, STARTUP, Voice
from exporter.core.track import BEGINNING, EVEN, STARVED

Take = Callable[[Span, int], int]
"""`take(span, left)`: parts per million of the stretch it takes, out of the `left` that its pools still hold."""
_WORKING = frozenset({State.ZOMBIE, State.STALLED, State.ACTIVE})
LAYERS = ("gau", "ectr", "emfu", "useful", "unresolved", "unobserved")
"""What a second counts as: a loss of one of the three layers, or one of the three outcomes that are no loss."""


class Leak(Struct, frozen=True):
    """One row. `pools` are drained in their order; in a state it `swallows` it takes the whole stretch."""

    name: str
    layer: str
    takes: str
    """What it takes, in words; the catalogue and the page print it."""
    pools: tuple[int, ...] = ()
    evidence: str = "measured"
    """measured, estimated; reported, engine: taken only when a workload or a serving engine says so. What is both is
    estimated until the workload speaks."""
    team: str = "platform"
    watch: str = ""
    """The metric to watch."""
    fix: str = ""
    """What to do first."""
    take: Take | None = None
    """None: it is not poured into, but takes from those that are."""
    when: tuple[str, ...] = ()
    """Signs (see `track` and SPEAKS) without any of which it is not asked."""
    swallows: frozenset[State] = frozenset()
    states: frozenset[State] = _WORKING
    if_told: frozenset[State] = frozenset()
    """Further states in which it is asked while the owner speaks."""
    balance: int | None = None
    """What it takes is drawn from this balance of the owner's (see `told`)."""


def the_rest(_: Span, left: int) -> int:
    """All that is left; `pour` knows this detector and need not call it."""
    return left


LEAKS: tuple[Leak, ...] = (
    Leak(
        "unavailable", "gau", "all time a GPU cannot be scheduled and does not work",
        swallows=frozenset({State.UNAVAILABLE}),
        watch="unavailable seconds by reason", fix="repair or return the GPU; shorten drains",
    ),
    Leak(
        "idle_allocation", "gau", "time nobody holds the GPU; the waiting of zombies, and of servers without a request",
        pools=(WAIT, SLACK), take=idle_allocation.take, states=frozenset({State.ZOMBIE}), if_told=_WORKING,
        swallows=frozenset({State.UNALLOCATED, State.UNOWNED}),
        watch="unoccupied GPU-hour ratio", fix="reclaim zombies; backfill the queue; shrink the reservation",
    ),
    Leak(
        "hung", "ectr", "all time a job spins without progress, its idle culprits included",
        swallows=frozenset({State.HUNG}), team="training",
        watch="MTTD, MTTR, goodput", fix="dump stacks on the culprit rank, then restart from the checkpoint",
    ),
    Leak(
        "failure_recovery", "ectr", "waiting from a restart to the first work, and while state is restored",
        pools=(WAIT,), evidence="reported or measured", take=failure_recovery.take, when=(BEGINNING, SPEAKS),
        balance=RESTORE, team="training",
        watch="MTTR, goodput", fix="checkpoint more often; restart in place",
    ),
    Leak(
        "startup", "ectr", "waiting from the allocation to the first work",
        pools=(WAIT,), evidence="reported or measured", take=startup.take, when=(BEGINNING, SPEAKS), balance=STARTUP,
        watch="time from allocation to first work", fix="cache images, weights and compiled kernels on the node",
    ),
    Leak(
        "checkpoint", "ectr", "waiting while state is copied to the host",
        pools=(WAIT,), evidence="reported or estimated", take=checkpoint.take, balance=CHECKPOINT, team="training",
        watch="checkpoint seconds per hour", fix="save asynchronously and in shards",
    ),
    Leak(
        "data_stall", "ectr", "waiting for input",
        pools=(WAIT,), evidence="reported or estimated", take=data_stall.take, when=(STARVED, SPEAKS), balance=DATA,
        team="data",
        watch="input wait per step", fix="more loader workers, prefetch, local copies of the data",
    ),
    Leak(
        "pipeline_bubble", "emfu", "waiting for the neighbour stage of a pipeline",
        pools=(WAIT, SLACK), evidence="reported", take=reported.bubble, when=(SPEAKS,), balance=BUBBLE, team="training",
        watch="bubble ratio", fix="more microbatches or interleaved stages",
    ),
    Leak(
        "kv_cache_wait", "ectr", "waiting while requests queue because the KV cache is full",
        pools=(WAIT,), evidence="engine", take=serving.kv_cache_wait, when=(SPEAKS,), team="serving",
        watch="KV-cache use, preemptions", fix="quantise or page the KV cache; add a replica",
    ),
    Leak(
        "batching", "ectr", "empty batch slots while requests queue",
        pools=(WAIT, SLACK), evidence="engine", take=serving.batching, when=(SPEAKS,), team="serving",
        watch="batch fill, queue time", fix="continuous batching; raise the batch limit",
    ),
    Leak(
        "host_overhead", "ectr", "gaps between kernels too small to fill the GPU",
        pools=(WAIT,), evidence="estimated", take=host_overhead.take, when=(EVEN,), team="training",
        watch="host-bound fraction", fix="CUDA graphs, compilation, fused kernels, a faster host loop",
    ),
    Leak(
        "unattributed_stall", "ectr", "the rest of waiting",
        pools=(WAIT,), take=the_rest, team="training",
        watch="stall seconds by job", fix="let the job report its phases; profile one step",
    ),
    Leak(
        "exposed_communication", "ectr", "kernels that only move data between GPUs or wait for a peer",
        pools=(SLACK,), evidence="reported or estimated", take=communication.take, balance=COMMUNICATION,
        team="training",
        watch="exposed communication", fix="overlap with compute; place ranks closer; find the straggler",
    ),
    Leak(
        "prefill_decode_interference", "ectr", "decode steps stretched by prefills beside them",
        pools=(SLACK,), evidence="engine", take=serving.interference, when=(SPEAKS,), team="serving",
        watch="TTFT, inter-token p99", fix="chunked prefill, or prefill and decode on GPUs of their own",
    ),
    Leak(
        "memory_bound", "emfu", "kernels limited by DRAM",
        pools=(SLACK,), take=memory_bound.take, team="model",
        watch="arithmetic intensity", fix="bigger batches, fused kernels, lower precision",
    ),
    Leak(
        "low_parallelism", "emfu", "SMs without a warp while a kernel runs",
        pools=(SLACK,), take=low_parallelism.take, team="model",
        watch="per-workload memory and compute use", fix="bigger batches; a smaller GPU or MIG slice",
    ),
    Leak(
        "other_compute", "emfu", "the rest of kernel time without tensor work",
        pools=(SLACK,), take=the_rest, team="model",
        watch="tensor share of kernel time", fix="move the work to tensor cores; profile the top kernels",
    ),
    Leak(
        "throttled", "emfu", "tensor time lost because the clock is below the reference",
        pools=(CLOCK,), take=the_rest,
        watch="clock event reasons", fix="cooling, power limit, clock settings",
    ),
    Leak(
        "rejected_speculation", "emfu", "draft tokens computed and thrown away",
        pools=(TENSOR,), evidence="engine", take=serving.rejected, when=(SPEAKS,), team="serving",
        watch="draft acceptance, tokens per forward pass", fix="a better draft model, shorter drafts",
    ),
    Leak(
        "kv_cache_pressure", "emfu", "tokens computed twice after eviction",
        pools=(TENSOR,), evidence="engine", take=serving.computed_again, when=(SPEAKS,), team="serving",
        watch="preemptions", fix="more KV memory per request; limit concurrency",
    ),
    Leak(
        "recomputation", "emfu", "activations computed twice to save memory",
        pools=(TENSOR,), evidence="reported", take=reported.recomputation, when=(SPEAKS,), balance=EXPLAINED,
        team="training",
        watch="HFU-MFU gap", fix="selective recomputation",
    ),
    Leak(
        "padding", "emfu", "padded sequences and tiles, dropped expert slots",
        pools=(TENSOR,), evidence="reported", take=reported.padding, when=(SPEAKS,), team="data",
        watch="padding share of tokens", fix="pack sequences; sizes that fit the tiles",
    ),
    Leak(
        "rework", "emfu", "steps run a second time after a restart",
        pools=(TENSOR,), evidence="reported", take=reported.rework, when=(SPEAKS,), balance=AGAIN, team="training",
        watch="steps repeated per restart", fix="checkpoint more often",
    ),
    Leak(
        "oversized_allocation", "gau", "the part of a GPU a job never needed, out of what was lost anyway",
        evidence="estimated", team="scheduling",
        watch="peak need against the smallest slice", fix="MIG slice or a smaller board",
    ),
)  # fmt: skip

NAMES = (*(leak.name for leak in LEAKS), "useful", "unresolved", "unobserved")
"""Every value of the label `leak`: the leaks, then the outcomes that are none."""
LAYER_OF = (*(leak.layer for leak in LEAKS), "useful", "unresolved", "unobserved")
"""The layer of each, in the order of NAMES."""
USEFUL, UNRESOLVED_TIME, UNOBSERVED = (NAMES.index(name) for name in ("useful", "unresolved", "unobserved"))

_BALANCE_OF = {i: leak.balance for i, leak in enumerate(LEAKS) if leak.balance is not None}
_OVERSIZED = NAMES.index("oversized_allocation")
_SIZABLE = range(NAMES.index("failure_recovery"), NAMES.index("rework") + 1)
"""Losses of a GPU that somebody has and that works: what a smaller one would not have had."""
MEMORY_BOUND = NAMES.index("memory_bound")

Plan = tuple[tuple[int, tuple[int, ...], tuple[tuple[int, Take], ...]], ...]
"""The only pool or -1, all pools, and the leaks to ask for them in order, each with its index into NAMES."""
_plans: dict[tuple[State, frozenset[str]], Plan] = {}


def _plan(state: State, signs: frozenset[str]) -> Plan:
    """Rows that can take anything from a stretch in this state with these signs, neighbours of one pool together."""
    asked = [
        (leak.pools, (i, leak.take))
        for i, leak in enumerate(LEAKS)
        if leak.take is not None and _asked(leak, state, signs)
    ]
    plan = _plans[state, signs] = tuple(
        (pools[0] if len(pools) == 1 else -1, pools, tuple(row for _, row in run))
        for pools, run in groupby(asked, key=itemgetter(0))
    )
    return plan


def _asked(leak: Leak, state: State, signs: frozenset[str]) -> bool:
    if state not in leak.states and not (SPEAKS in signs and state in leak.if_told):
        return False
    return not leak.when or any(sign in signs for sign in leak.when)


_SWALLOWS = {state: i for i, leak in enumerate(LEAKS) for state in leak.swallows} | {State.UNOBSERVED: UNOBSERVED}

Taken = list[tuple[int, int]]
"""(index into NAMES, parts per million of the stretch), adding up to the span's whole."""


def pour(span: Span) -> Taken:
    """Give all of a span to leaks and outcomes: each part once, none twice, 0 <= taken <= left."""
    swallower = _SWALLOWS.get(span.state)
    if swallower is not None:
        return [(swallower, span.whole)]
    if span.model is not None and span.pools[UNRESOLVED]:
        reported.stand_in(span)
    taken: Taken = []
    pools_left = span.pools
    for only, pools, rows in _plans.get((span.state, span.signs)) or _plan(span.state, span.signs):
        left = before = pools_left[only] if only >= 0 else sum([pools_left[pool] for pool in pools])
        for index, take in rows:
            if not left:
                break
            amount = left if take is the_rest else take(span, left)
            if amount > 0:
                if amount > left:
                    amount = left
                taken.append((index, amount))
                left -= amount
        if only >= 0:
            pools_left[only] = left
        else:
            _drain(pools_left, pools, before - left)
    return _finish(span, taken)


def _finish(span: Span, taken: Taken) -> Taken:
    """What no leak has taken is an outcome; what was told is spent; what was too large was lost for that."""
    left = span.pools
    if left[TENSOR]:
        taken.append((USEFUL, left[TENSOR]))
    if left[UNRESOLVED]:
        taken.append((UNRESOLVED_TIME, left[UNRESOLVED]))
    if span.voice is not None:
        _spend(span, span.voice, taken)
    return oversized.moved(taken, span.surplus, to=_OVERSIZED, sizable=_SIZABLE) if span.surplus else taken


def _spend(span: Span, voice: Voice, taken: Taken) -> None:
    """Draw what was booked from what was told."""
    for index, ppm in taken:
        balance = _BALANCE_OF.get(index)
        if balance is not None:
            voice.spend(balance, ppm, span.ms)
        elif span.model is not None and index == USEFUL:
            voice.spend(MODEL, ppm, span.ms)


def _drain(left: list[int], pools: tuple[int, ...], amount: int) -> None:
    for pool in pools:
        part = min(amount, left[pool])
        left[pool] -= part
        amount -= part


__all__ = [
    "LAYERS",
    "LAYER_OF",
    "LEAKS",
    "MEMORY_BOUND",
    "NAMES",
    "POOLS",
    "SPEAKS",
    "UNOBSERVED",
    "USEFUL",
    "Leak",
    "Span",
    "pour",
]
