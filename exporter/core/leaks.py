"""Defines LEAKS, one row per way in which a paid GPU-second is lost, in the order in which they draw from the pools.

Contains the table, its detectors, and the splitting of a span. A detector returns parts per million of the span;
`split_into_leaks` clips them to what its pools still hold, so no estimate can exceed the measured time.
Shares only: the ledger multiplies them by the duration.
"""

from collections.abc import Callable, Container, Iterable
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from msgspec import Struct

from exporter.core.attribution import divide_proportionally
from exporter.core.communication import UNKNOWN_LEVELS, Estimate, SmLevels, estimate_communication, own_dram
from exporter.core.evidence import SPIN, Evidence, busier
from exporter.core.model import PPM, State
from exporter.core.pipes import TENSOR as TENSOR_PIPE
from exporter.core.pipes import pipe_activity
from exporter.core.policy import Policy
from exporter.core.serving import ServingShares
from exporter.core.timers import BEGINNING, LAUNCHES, NO_SIGNS, RESTARTED, SAVING, STARVED, STEADY, has_gaps
from exporter.core.workload import (
    BUBBLE,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    MODEL,
    RECOMPUTATION,
    REPEATED,
    RESTORE,
    STARTUP,
    WorkloadCredit,
)

WAIT, SLACK, CLOCK, TENSOR, UNRESOLVED = range(5)
"""Pools: no kernel; a kernel without tensor work; tensor time lost to the clock; tensor time at full clock;
kernel time whose usefulness is unknown."""
REPORTING = "reporting"
"""Indicator of a span whose owner, or its serving engine, reports what it does."""


TIMED_PHASES = frozenset({DATA, CHECKPOINT, RESTORE, STARTUP})
"""Phases without kernels that jobs time."""
_NO_SHARES = ServingShares()


class Span(Struct, gc=False):
    """One owner's part of an interval of one GPU, in one state."""

    ev: Evidence
    state: State
    policy: Policy
    pools: list[int]
    """What each pool holds, parts per million of the interval; detectors drain them."""
    whole: int
    """This owner's share of the interval, parts per million."""
    gpus: int = 1
    restarts: int = 0
    signs: frozenset[str] = NO_SIGNS
    peers_save: int = 0
    """The part of it in which other GPUs of the job save, ppm of the interval."""
    serves: bool = False
    """The owner is a server: without a kernel it waits for requests."""
    share: int = PPM
    """This owner's part of the GPU's activity, parts per million."""
    ms: int = 0
    """Duration in milliseconds; required with `credit`."""
    credit: WorkloadCredit | None = None
    """Balances from the owner's reports, while they are valid."""
    model_ppm: int | None = None
    """Tensor work of training steps, repeated ones included, by reported FLOPs, ppm; None: not reported."""
    surplus: int = 0
    """The part of the GPU its owner has never needed, parts per million of the interval."""
    levels: SmLevels = UNKNOWN_LEVELS
    """SM activity of the owner's computing and communicating kernels."""
    timed: float | None = None
    """Share of time in which collectives executed, as a profiler plugin timed them; None: not timed."""
    communication: int = 0
    """The part of slack in which only communication kernels are estimated to have run, ppm."""
    most_communication: int = 0
    """The most that it may be, as far as no levels are measured: idle SMs between the two are named neither
    communication nor small kernels."""
    polled: int = 0
    """The part of `communication` in which a peer saves or a stage of a pipeline waits for its neighbour, ppm."""
    estimate: Estimate | None = None
    """That of communication, once a detector has asked for it."""
    exposed: Estimate | None = None
    """The same, where it was booked."""
    pipe: str = TENSOR_PIPE
    """The pipe whose activity is useful."""
    scale: float = 1.0
    """What is left of slack after exposed communication, over what the estimate would have left."""

    def reported(self, balance: int, estimate: int = 0) -> int:
        """What the balance still covers, ppm; `estimate` if it was never reported.

        Gaps between launches look like waiting for a phase, and so does what little nearly full readings leave. Of them
        a phase takes only what longer waits have left.
        """
        credit = self.credit
        if credit is None or balance not in credit.known:
            return estimate
        gaps = self.launching or (balance in TIMED_PHASES and self.nearly_full)
        return credit.available(balance, self.ms, beyond_last=gaps)

    @property
    def nearly_full(self) -> bool:
        """Kernels that do not poll run nearly all the time: what is left are gaps between them."""
        return self.ev.engine >= self.policy.host_gap_engine and not self.spinning

    @property
    def launching(self) -> bool:
        """Its kernels are small and wait for the CPU that launches them."""
        return LAUNCHES in self.signs and has_gaps(self.ev, self.policy)

    @property
    def times_phases(self) -> bool:
        """The job reports how long phases took that have no kernels, so that the rest is its steps."""
        return self.credit is not None and not TIMED_PHASES.isdisjoint(self.credit.known)

    @property
    def restarted(self) -> bool:
        """It has not worked since a restart, by the scheduler or inside the allocation."""
        return BEGINNING in self.signs and (self.restarts > 0 or RESTARTED in self.signs)

    @property
    def shares(self) -> ServingShares:
        """Loss shares from the serving engine's last report; all 0 without one."""
        return _NO_SHARES if self.credit is None else self.credit.shares

    def without_kernel(self, left: int) -> int:
        """The part of `left` in the pools WAIT and SLACK, which drain in this order, in which no kernel runs."""
        return max(0, left - self.pools[SLACK])

    def waiting(self, left: int) -> int:
        """The part of `left` in the pools WAIT and SLACK in which nothing progresses: no kernel, or one that polls."""
        return left if self.spinning else self.without_kernel(left)

    def owned(self, share: float) -> int:
        """This owner's ppm of an activity that took `share` of the GPU's time, 0-1."""
        return int(max(0.0, share) * self.share)

    @property
    def spinning(self) -> bool:
        """The kernel only polls for a peer."""
        return self.ev.spin == SPIN


def detect_checkpoint(span: Span, left: int) -> int:
    """The reported phase; else all waiting since it began to copy state to the host, or while a peer does (E)."""
    waiting, beside = span.waiting(left), span.peers_save * span.whole // PPM
    saving = waiting if SAVING in span.signs else min(waiting, beside)
    if span.credit is not None and CHECKPOINT in span.credit.known:
        return min(waiting, span.reported(CHECKPOINT, saving))
    if beside and not span.spinning and span.gpus > 1:
        rest = beside if SAVING in span.signs else beside - saving
        span.polled = min(rest, span.pools[SLACK], span.owned(estimate_of(span).value))
    return saving + span.polled


def detect_exposed_communication(span: Span, left: int) -> int:
    """Slack of a job with several GPUs: all while spinning, else the reported phase, else the estimate (E).

    What is reported for an interval may be booked in another one: the rest of slack is then split by the estimate.
    """
    if span.gpus == 1:
        return 0
    if span.spinning:
        return left
    estimate = estimate_of(span)
    estimated = span.most_communication = min(left + span.polled, span.owned(estimate.value))
    amount = estimated - min(estimated, span.polled)
    if span.credit is not None and COMMUNICATION in span.credit.known:
        amount = min(left, span.credit.available(COMMUNICATION, span.ms))
        span.scale = (left - amount) / (left - estimated) if left > estimated else 0.0
    else:
        span.exposed = estimate
        if span.timed is None and not span.launching:
            most = estimate.value + (1.0 - span.levels.trust) * (estimate.high - estimate.value)
            span.most_communication = min(left + span.polled, span.owned(most))
    span.communication = estimated
    return amount


def estimate_of(span: Span) -> Estimate:
    """The estimate of the time in which only communication kernels ran; several detectors of a span need it."""
    if span.estimate is None:
        launches = span.launching
        span.estimate = estimate_communication(span.ev, span.levels, span.policy, span.timed, launches=launches)
    return span.estimate


def estimate_data_stall(span: Span, left: int) -> int:
    """All waiting while input arrives, without what the stages of a pipeline wait for each other (E)."""
    if STARVED not in span.signs or span.spinning:
        return 0
    return int(span.without_kernel(left) * (1.0 - span.levels.bubbles.idle))


def detect_pipeline_bubble(span: Span, left: int) -> int:
    """The reported time; else what a batch job's GPUs wait as the stages of a pipeline do (E).

    Of a job that times its other waits, all that they have left without a kernel is its bubbles.
    """
    bubbles, known = span.levels.bubbles, () if span.credit is None else span.credit.known
    if BUBBLE in known or COMMUNICATION in known or span.serves:
        return span.reported(BUBBLE)
    share = 1.0 if bubbles.idle and span.times_phases else bubbles.idle
    idle, polls = min(span.without_kernel(left), span.pools[WAIT] * share), 0.0
    if bubbles.polling:
        slack = span.pools[SLACK]
        polls = slack if span.spinning else min(slack, span.owned(estimate_of(span).value))
        polls = (polls - span.polled) * bubbles.polling
        span.polled += int(polls)
    return min(left, int(idle + polls))


def detect_host_overhead(span: Span, left: int) -> int:
    """All waiting while the engine is partly busy, evenly, with kernels that fill few SMs or leave only gaps (E).

    A server's kernels are small by nature: what they wait for is the CPU that schedules the next batch. A job that
    times its phases says when it waits for input or saves. What even gaps are left in its steps, or gaps in readings
    that are nearly full, or between kernels that fill few SMs, are launches.
    """
    ev, policy, even = span.ev, span.policy, STEADY in span.signs
    if not policy.host_bound_engine_low <= ev.engine <= policy.host_bound_engine_high:
        return 0
    if span.launching:
        return left
    small = ev.sm is not None and ev.sm < policy.small_kernel_share * ev.engine
    if span.times_phases and (even or small or span.nearly_full):
        return left
    return left if even and (small or span.serves or ev.engine >= policy.host_gap_engine) else 0


def detect_idle_allocation(span: Span, left: int) -> int:
    """All waiting of a zombie or of a server without requests, and the time of a kernel that polls for them.

    A server whose engine does not show whether it has any is taken to have none while no kernel runs for most of a
    reading (E). A kernel that polls may hang in requests that were counted before.
    """
    if span.state is State.ZOMBIE or span.shares.no_demand:
        return span.waiting(left)
    lasts = span.credit is not None and span.credit.shares_until >= span.ev.reading.end
    shares = span.shares if lasts else _NO_SHARES
    if not span.serves or BEGINNING in span.signs or shares.demand:
        return 0
    if span.spinning:
        return 0 if shares.past_demand else left
    return span.pools[WAIT] if span.ev.engine < span.policy.host_bound_engine_low else 0


def detect_low_parallelism(span: Span, _: int) -> int:
    """SMs without a warp while a kernel runs that does not communicate; 0 without SM activity."""
    ev = span.ev
    if ev.sm is None:
        return 0
    empty = span.owned(ev.engine - ev.sm) - int(span.most_communication * (1.0 - span.levels.communicating))
    return int(empty * span.scale)


def detect_memory_bound(span: Span, left: int) -> int:
    """Resident warps of kernels limited by DRAM; 0 without DRAM activity.

    DRAM traffic of links and of the tensor cores limits nothing; what is left is compared with the ceiling.
    """
    ev, spec, policy = span.ev, span.ev.device.spec, span.policy
    if ev.dram is None or spec is None or not ev.engine:
        return 0
    tensor, useful = ev.tensor or 0.0, pipe_activity(ev, span.pipe)
    pipes = max(tensor, busier(ev.reading.fp64_active, ev.reading.fp32_active) or 0.0)
    fed = max(policy.tensor_dram * pipes, policy.simd_dram * useful if span.pipe != TENSOR_PIPE else 0.0)
    own, ceiling = own_dram(ev), policy.dram_reached * spec.dram_ceiling
    # What the link's traffic takes of the bandwidth, a kernel beside it cannot have.
    own = max(0.0, own - fed) / (ceiling - min(ceiling / 2, ev.dram - own))
    if ev.sm is None:
        return int(left * min(1.0, own / ev.engine))
    resident = span.owned(ev.sm - useful) - int(span.communication * span.levels.communicating)
    return int(min(resident, span.owned(own * ev.sm / ev.engine)) * span.scale)


def detect_recomputation(span: Span, left: int) -> int:
    """Tensor work beyond the model's FLOPs, up to what the job's recomputation explains."""
    if span.model_ppm is None or span.credit is None:
        return 0
    span.credit.add_recomputation(span.pools[TENSOR], span.ms)
    return min(left - span.model_ppm, span.credit.available(RECOMPUTATION, span.ms))


def detect_padding(span: Span, left: int) -> int:
    """Tensor work that neither the model's FLOPs nor recomputation explain; 0 while a log leaves open what it is."""
    if span.model_ppm is None or span.credit is None or not span.credit.explained:
        return 0
    return left - span.model_ppm


def detect_rework(span: Span, left: int) -> int:
    """FLOPs of repeated steps; if FLOPs are not reported, all tensor work during repeated steps."""
    credit = span.credit
    return 0 if credit is None else left if credit.rework else credit.available(REPEATED, span.ms)


def use_reported_flops(span: Span) -> None:
    """Without tensor counters, use the reported model FLOPs as tensor work and the remaining kernel time as slack."""
    pools, model = span.pools, span.model_ppm or 0
    known = min(model, pools[UNRESOLVED])
    pools[TENSOR] += known
    pools[SLACK] += pools[UNRESOLVED] - known
    pools[UNRESOLVED] = 0


def charge_surplus(
    taken: list[tuple[int, int]], surplus: int, *, to: int, sizable: Container[int]
) -> list[tuple[int, int]]:
    """Move at most `surplus` ppm of `taken` to leak `to`, from each of the `sizable` leaks pro rata."""
    lost = [ppm if index in sizable else 0 for index, ppm in taken]
    whole = sum(lost)
    if not whole:
        return taken
    kept = divide_proportionally(whole - min(surplus, whole), lost)
    remaining = [
        (index, left if index in sizable else ppm)
        for (index, ppm), left in zip(taken, kept, strict=True)
        if index not in sizable or left
    ]
    return [*remaining, (to, min(surplus, whole))]


Detector = Callable[[Span, int], int]
"""`detector(span, left)`: parts per million of the interval that the leak takes, of `left` in its pools."""
LAYERS = ("gau", "ectr", "emfu", "useful", "unresolved", "unobserved")
"""What a second counts as: a loss in one of the three layers, or one of the three outcomes that are no loss."""


class Leak(Struct, frozen=True):
    """One leak. It drains `pools` in order; in states of `takes_all_in` it takes the whole interval."""

    name: str
    layer: str
    description: str
    """What it is; shown in docs/leaks.md and docs/metrics.md, on the page and on dashboards."""
    pools: tuple[int, ...] = ()
    evidence: str = "measured"
    """measured, estimated, reported (by the workload) or engine (reported by a serving engine). With two kinds, the
    second applies until the workload reports. `uncertainty` finds out which applied, and adds calibrated."""
    team: str = "platform"
    """The role that can act; reports name it so, because `team` is also a label of jobs."""
    watch: str = ""
    """The metric to watch."""
    fix: str = ""
    """The first remedy."""
    colour: str = "#8C96A3"
    """Colour on the page and the dashboards, #RRGGBB: a hue of its layer (Okabe and Ito), unique to the leak."""
    detector: Detector | None = None
    """None: it takes whole intervals, or from other leaks."""
    signs: tuple[str, ...] = ()
    """Indicators (of `states`, or REPORTING) of which at least one is required; empty: none is."""
    takes_all_in: frozenset[State] = frozenset()
    balance: int | None = None
    """What it takes is deducted from this balance of the owner (see `workload`)."""


def take_remainder(_: Span, left: int) -> int:
    """All that is left; `split_into_leaks` recognises this detector and skips the call."""
    return left


LEAKS: tuple[Leak, ...] = (
    Leak("unavailable", "gau", "the GPU is lost, needs a reset, or is on a drained node and runs nothing",
        takes_all_in=frozenset({State.UNAVAILABLE}),
        watch="unavailable seconds by reason", fix="repair or return the GPU; shorten drains", colour="#AF2C1F"),
    Leak("idle_allocation", "gau",
        "the GPU is unallocated; or it is a zombie (its job has been idle for longer than its workload class may be);"
        " or its server has no requests",
        pools=(WAIT, SLACK), detector=detect_idle_allocation,
        takes_all_in=frozenset({State.UNALLOCATED, State.UNOWNED}),
        watch="share of GPU-hours that are unoccupied (1 - GAU)",
        fix="held: end the job or scale it down; free: run queued jobs, reserve less",
        colour="#DE6F0E"),
    Leak("hung", "ectr",
        "the job makes no progress: its kernels only spin (busy, without computing or moving data), or it crashes after"
        " each restart; a GPU that runs no kernel while the others spin and wait for it is hung, too",
        takes_all_in=frozenset({State.HUNG}), team="training",
        watch="time to detect, time to recover, goodput",
        fix="dump stacks on the culprit rank, then restart from the checkpoint",
        colour="#86319E"),
    Leak("failure_recovery", "ectr",
        "waiting from a restart to the first work after it, and while a checkpoint is loaded",
        pools=(WAIT, SLACK), evidence="reported or measured", signs=(BEGINNING, REPORTING),
        detector=lambda span, left: min(
            span.waiting(left), left if span.restarted else span.reported(RESTORE)
        ),
        balance=RESTORE, team="training",
        watch="time to recover, goodput",
        fix="checkpoint more often; restart in place; keep spare nodes", colour="#CB75D9"),
    Leak("startup", "ectr", "waiting from the allocation to the first work: pulling images, loading weights, compiling",
        pools=(WAIT, SLACK), evidence="reported or measured", signs=(BEGINNING, REPORTING),
        detector=lambda span, left: min(
            span.waiting(left), left if BEGINNING in span.signs else span.reported(STARTUP)
        ),
        balance=STARTUP,
        watch="time from allocation to first work", fix="cache images, weights and compiled kernels on the node",
        colour="#AD52B4"),
    Leak("checkpoint", "ectr", "waiting while a checkpoint is saved",
        pools=(WAIT, SLACK), evidence="reported or estimated", detector=detect_checkpoint, balance=CHECKPOINT,
        team="training",
        watch="checkpoint seconds per hour", fix="save asynchronously and in shards", colour="#F0A1F6"),
    Leak("data_stall", "ectr", "the job waits for its next batch of input",
        pools=(WAIT, SLACK), evidence="reported or estimated", signs=(STARVED, REPORTING),
        detector=lambda span, left: min(
            # Who waits for input runs no kernel: one that polls waits for a peer, whatever that waits for.
            span.without_kernel(left),
            span.reported(DATA, estimate_data_stall(span, left)),
        ),
        balance=DATA, team="data",
        watch="input wait per step", fix="more loader workers, prefetch, local copies of the data", colour="#962E8A"),
    Leak("pipeline_bubble", "emfu", "a stage of a pipeline waits for its neighbour",
        pools=(WAIT, SLACK), evidence="reported or estimated", balance=BUBBLE,
        detector=detect_pipeline_bubble, team="training",
        watch="bubble ratio", fix="more microbatches or interleaved stages", colour="#0B7D9E"),
    Leak("kv_cache_wait", "ectr", "gaps between kernels while requests queue because the KV cache is full",
        pools=(WAIT,), evidence="engine", signs=(REPORTING,), team="serving",
        detector=lambda span, left: left if span.shares.kv_full else 0,
        watch="KV-cache use, preemptions", fix="quantise or page the KV cache; add a replica", colour="#DB6BC0"),
    Leak("batching", "ectr",
        "a server's time without tensor work, multiplied by the share of batch slots that are empty although requests"
        " queue and the KV cache has room",
        pools=(WAIT, SLACK), evidence="engine", signs=(REPORTING,), team="serving",
        detector=lambda span, left: left * span.shares.empty_slots // PPM,
        watch="batch fill, queue time", fix="continuous batching; raise the batch limit", colour="#BB4999"),
    Leak("host_overhead", "ectr", "gaps between kernels in which the GPU waits for the CPU to launch the next one",
        pools=(WAIT,), evidence="estimated", detector=detect_host_overhead, signs=(STEADY, LAUNCHES, REPORTING),
        team="training",
        watch="share of time in which small kernels wait for the CPU",
        fix="CUDA graphs, compilation, fused kernels, a faster host loop",
        colour="#FF9ED8"),
    Leak("unattributed_stall", "ectr", "waiting of unknown cause; a job that reports its phases has little of it",
        pools=(WAIT,), detector=take_remainder, team="training",
        watch="stall seconds by job", fix="let the job report its phases; profile one step", colour="#9F2A6C"),
    Leak("exposed_communication", "ectr",
        "only kernels run that move data between GPUs or wait for another GPU; no computation hides that time",
        pools=(SLACK,), evidence="reported or estimated", detector=detect_exposed_communication, balance=COMMUNICATION,
        team="training",
        watch="time in communication that no computation hides",
        fix="overlap with compute; place ranks closer; find the straggler",
        colour="#E3679F"),
    Leak("prefill_decode_interference", "ectr",
        "time by which prefills on the same GPU lengthen decode steps; only kernel time without tensor work counts",
        pools=(SLACK,), evidence="engine", signs=(REPORTING,), team="serving",
        detector=lambda span, left: left * span.shares.prefill_slowdown // PPM,
        watch="TTFT, inter-token p99", fix="chunked prefill, or prefill and decode on GPUs of their own",
        colour="#C1487B"),
    Leak("memory_bound", "emfu", "kernels that wait for the GPU's memory: they are limited by DRAM bandwidth",
        pools=(SLACK,), detector=detect_memory_bound, team="model",
        watch="arithmetic intensity", fix="bigger batches, fused kernels, lower precision", colour="#4AC6FA"),
    Leak("low_parallelism", "emfu", "SMs without work while a kernel runs that is too small to fill the GPU",
        pools=(SLACK,), detector=detect_low_parallelism, team="model",
        watch="memory and compute that the job uses", fix="bigger batches; a smaller GPU or MIG slice",
        colour="#016085"),
    Leak("other_compute", "emfu",
        "kernel time that no other leak explains: its kernels do no tensor work although they fill most SMs and DRAM"
        " bandwidth does not limit them",
        pools=(SLACK,), detector=take_remainder, team="model",
        watch="tensor share of kernel time", fix="move the work to tensor cores; profile the top kernels",
        colour="#38A2DF"),
    Leak("throttled", "emfu",
        "tensor work lost because power, heat or settings keep the clock below the one for which the peak is specified",
        pools=(CLOCK,), detector=take_remainder,
        watch="clock event reasons", fix="cooling, power limit, clock settings", colour="#0978B7"),
    Leak("rejected_speculation", "emfu", "tensor work on draft tokens that were rejected",
        pools=(TENSOR,), evidence="engine", signs=(REPORTING,), team="serving",
        detector=lambda span, _: span.pools[TENSOR] * span.shares.rejected_drafts // PPM,
        watch="draft acceptance, tokens per forward pass", fix="a better draft model, shorter drafts, or none",
        colour="#78BEFD"),
    Leak("kv_cache_pressure", "emfu",
        "tensor work on tokens that are computed again, because their request had been evicted from a full KV cache",
        pools=(TENSOR,), evidence="engine", signs=(REPORTING,), team="serving",
        detector=lambda span, _: span.pools[TENSOR] * span.shares.recomputed // PPM,
        watch="preemptions", fix="give the KV cache more GPU memory; admit fewer requests at once", colour="#0C599D"),
    Leak("recomputation", "emfu", "activations computed a second time, for the backward pass, to save memory",
        pools=(TENSOR,), evidence="reported", detector=detect_recomputation, signs=(REPORTING,), balance=RECOMPUTATION,
        team="training",
        watch="HFU-MFU gap", fix="selective recomputation; sequence parallelism; offload what memory cannot hold",
        colour="#609AE7"),
    Leak("padding", "emfu", "tensor work on padding: in sequences, in tiles, and in expert slots that no token fills",
        pools=(TENSOR,), evidence="reported", signs=(REPORTING,), team="data",
        detector=detect_padding,
        watch="padding share of tokens", fix="pack sequences; sizes that fit the tiles", colour="#4370BD"),
    Leak("rework", "emfu", "steps that are run again after a restart, because the last checkpoint was older",
        pools=(TENSOR,), evidence="reported", detector=detect_rework, signs=(REPORTING,), balance=REPEATED,
        team="training",
        watch="steps repeated per restart", fix="checkpoint more often", colour="#95B6FD"),
    Leak("oversized_allocation", "gau",
        "of a job on one GPU: the share of the GPU beyond the smallest MIG slice that would hold the job; subtracted"
        " from the job's other leaks, so that nothing counts twice",
        evidence="estimated", team="scheduling",
        watch="memory and compute that the job uses, and the smallest MIG slice that would hold it",
        fix="a MIG slice or a smaller GPU; several models on one GPU", colour="#FBAC16"),
)  # fmt: skip

LEAK_NAMES = (*(leak.name for leak in LEAKS), "useful", "unresolved", "unobserved")
"""Every value of the label `leak`: the leaks, then the outcomes that are no loss."""
LAYER_OF = (*(leak.layer for leak in LEAKS), "useful", "unresolved", "unobserved")
"""The layer of each, in the order of LEAK_NAMES."""
USEFUL_INDEX, UNRESOLVED_INDEX, UNOBSERVED_INDEX = (
    LEAK_NAMES.index(name) for name in ("useful", "unresolved", "unobserved")
)
Amount = TypeVar("Amount", int, float)


def sum_by_layer(column: Iterable[Amount]) -> dict[str, Amount]:
    """Sum a column in the order of LEAK_NAMES by layer, including zeros."""
    sums: dict[str, Amount] = dict.fromkeys(LAYERS, 0)
    for layer, amount in zip(LAYER_OF, column, strict=True):
        sums[layer] += amount
    return sums


_BALANCE_OF = {i: leak.balance for i, leak in enumerate(LEAKS) if leak.balance is not None}
_OVERSIZED_INDEX = LEAK_NAMES.index("oversized_allocation")
_SIZABLE = range(LEAK_NAMES.index("failure_recovery"), LEAK_NAMES.index("rework") + 1)
"""Losses of an allocated, working GPU, which a smaller GPU would not have had."""
MEMORY_BOUND_INDEX = LEAK_NAMES.index("memory_bound")

DetectorPlan = tuple[tuple[int, tuple[int, ...], tuple[tuple[int, Detector], ...]], ...]
"""Groups of leaks that share pools, in order: the only pool or -1, all pools, (index in LEAK_NAMES, detector) pairs."""
_plans: dict[tuple[State, frozenset[str]], DetectorPlan] = {}


def _plan(state: State, signs: frozenset[str]) -> DetectorPlan:
    """The leaks that apply with these indicators where no leak takes all, neighbours that share pools in one group."""
    applicable = [
        (leak.pools, (i, leak.detector))
        for i, leak in enumerate(LEAKS)
        if leak.detector is not None and (not leak.signs or any(sign in signs for sign in leak.signs))
    ]
    plan = _plans[state, signs] = tuple(
        (pools[0] if len(pools) == 1 else -1, pools, tuple(detector for _, detector in rows))
        for pools, rows in groupby(applicable, key=itemgetter(0))
    )
    return plan


_TAKES_ALL = {state: i for i, leak in enumerate(LEAKS) for state in leak.takes_all_in} | {
    State.UNOBSERVED: UNOBSERVED_INDEX
}

LeakShares = list[tuple[int, int]]
"""(index into LEAK_NAMES, parts per million of the interval), adding up to the span's `whole`."""


def split_into_leaks(span: Span) -> LeakShares:
    """Assign all of a span to leaks and outcomes, each part exactly once."""
    takes_all = _TAKES_ALL.get(span.state)
    if takes_all is not None:
        return [(takes_all, span.whole)]
    if span.model_ppm is not None and span.pools[UNRESOLVED]:
        use_reported_flops(span)
    taken: LeakShares = []
    pools_left = span.pools
    for only_pool, pools, rows in _plans.get((span.state, span.signs)) or _plan(span.state, span.signs):
        left = before = pools_left[only_pool] if only_pool >= 0 else sum([pools_left[pool] for pool in pools])
        for index, detector in rows:
            if not left:
                break
            amount = left if detector is take_remainder else detector(span, left)
            if amount > 0:
                if amount > left:
                    amount = left
                taken.append((index, amount))
                left -= amount
        if only_pool >= 0:
            pools_left[only_pool] = left
        else:
            _drain(pools_left, pools, before - left)
    return _finish(span, taken)


def _finish(span: Span, taken: LeakShares) -> LeakShares:
    """Assign the remainder to outcomes, deduct balances, and move losses of a surplus to oversized_allocation."""
    left = span.pools
    if left[TENSOR]:
        taken.append((USEFUL_INDEX, left[TENSOR]))
    if left[UNRESOLVED]:
        taken.append((UNRESOLVED_INDEX, left[UNRESOLVED]))
    if span.credit is not None:
        _draw_balances(span, span.credit, taken)
    return charge_surplus(taken, span.surplus, to=_OVERSIZED_INDEX, sizable=_SIZABLE) if span.surplus else taken


def _draw_balances(span: Span, credit: WorkloadCredit, taken: LeakShares) -> None:
    """Deduct what was booked from the owner's balances."""
    for index, ppm in taken:
        balance = _BALANCE_OF.get(index)
        if balance is not None:
            credit.spend(balance, ppm, span.ms)
        elif span.model_ppm is not None and index == USEFUL_INDEX:
            credit.spend(MODEL, ppm, span.ms)


def _drain(left: list[int], pools: tuple[int, ...], amount: int) -> None:
    for pool in pools:
        part = min(amount, left[pool])
        left[pool] -= part
        amount -= part
