"""Builds a JobReport from the accounts and metrics of one run, whichever source they come from.

Accounts are GPU-nanoseconds by node and leak; they are divided once, at the end.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import TypeVar

from msgspec import UNSET, Struct
from msgspec.structs import replace

from exporter.core.leaks import LAYER_OF, LEAK_NAMES, LEAKS, Leak
from exporter.core.model import SECOND
from exporter.core.pipes import NONE, PIPE_NOTES, TENSOR
from exporter.core.policy import Policy
from exporter.core.prices import JOULES_PER_KWH, EnergyTerms, energy_amount
from exporter.formatting import format_percent, format_time
from exporter.report.energy import with_energy
from exporter.report.model import (
    CommunicationSummary,
    CourseInterval,
    FailureCost,
    JobIdentity,
    JobReport,
    LatencySummary,
    LayerRatios,
    NodeShare,
    OngoingHang,
    QualityMetric,
    RankSummary,
    RunPeriod,
    ServingSummary,
    TargetReached,
    TrainingSummary,
    WaterfallPart,
)

Key = TypeVar("Key")


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return the mean of (value, weight) pairs; None if all weights are 0."""
    weighted = [(value, weight) for value, weight in pairs if weight > 0 and isfinite(value)]
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None


def latest_maximum(values: Sequence[float]) -> float | None:
    """Return the largest of the nodes' last values; a value that is not finite only if there is no other."""
    return max((value for value in values if isfinite(value)), default=values[0] if values else None)


def utilization_means(
    mfu: Mapping[Key, float], hfu: Mapping[Key, float], weights: Mapping[Key, float]
) -> dict[str, float | None]:
    """Return weighted means of the daemons' MFU, HFU, and HFU - MFU where a daemon reports both."""
    gap = {daemon: hfu[daemon] - mfu[daemon] for daemon in hfu if daemon in mfu}
    return {
        name: weighted_mean((value, weights.get(daemon, 0.0)) for daemon, value in values.items())
        for name, values in (("mfu", mfu), ("hfu", hfu), ("gap", gap))
    }


def sum_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Sum the values of each key."""
    totals: dict[Key, float] = defaultdict(float)
    for key, value in pairs:
        totals[key] += value
    return dict(totals)


NANOSECONDS_PER_HOUR = 3600 * SECOND
LAYER_BY_LEAK = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
_LEAK_BY_NAME = {leak.name: leak for leak in LEAKS}
NOT_LOST = ("useful", "unresolved", "unobserved")
REPORTED_PHASE = {
    "failure_recovery": "restore", "startup": "startup", "checkpoint": "checkpoint", "data_stall": "data",
    "exposed_communication": "communication", "pipeline_bubble": "bubble",
}  # fmt: skip
"""The phase in which a job reports a leak that is otherwise measured or estimated."""


def reported_evidence(phases: Iterable[str]) -> dict[str, str]:
    """Return reported for the leaks whose phase a job reports, where the time by kind of evidence is not known."""
    reported = set(phases)
    return {leak: "reported" for leak, phase in REPORTED_PHASE.items() if phase in reported}


class JobBooks(Struct, kw_only=True):
    """The job's GPU-nanoseconds by node and leak; integers if they come from ledgers."""

    parts: Mapping[str, Mapping[str, float]]
    """Time by node and leak; time that no daemon counted is added to unobserved."""
    seen: Mapping[str, float]
    """Time by node that daemons counted."""
    unseen: Mapping[str, float]
    """Time by node that no daemon counted."""
    gpus: Mapping[str, float]
    """The most GPUs at once, by node."""
    currency: str
    rates: Mapping[str, float]
    """Price of a GPU-hour by node."""
    layer_of: Mapping[str, str]
    """Layers as daemons report them: a newer version may have other leaks."""
    evidence: Mapping[str, str]
    """By leak that can rest on several kinds of evidence, that of most of its time; the last kind of LEAKS without."""
    bounds: Mapping[str, tuple[float, float]]
    """The least and the most nanoseconds of all nodes, by leak that rests on an estimate."""

    def __post_init__(self) -> None:
        self.parts = {node: _with_unobserved(parts, self.unseen.get(node, 0)) for node, parts in self.parts.items()}

    @property
    def max_gpus(self) -> float:
        """The most GPUs at once, summed over the nodes."""
        return sum(self.gpus.values())

    @property
    def held(self) -> float:
        """The time for which the job held GPUs."""
        return sum(self.seen.values()) + sum(self.unseen.values())

    def money(self, time: Mapping[str, float]) -> float | None:
        """Return the price of GPU time by node; None if there is no price."""
        if not self.currency:
            return None
        return sum(held * self.rates.get(node, 0.0) for node, held in time.items()) / NANOSECONDS_PER_HOUR

    def cost(self, time: Mapping[str, float]) -> float:
        """Return the price of GPU time by node, or GPU-hours if there is no price."""
        money = self.money(time)
        return sum(time.values()) / NANOSECONDS_PER_HOUR if money is None else money

    def cost_per_hour(self) -> float:
        """Return the cost of an hour of the job, in money or GPU-hours."""
        return self.cost({node: gpus * NANOSECONDS_PER_HOUR for node, gpus in self.gpus.items()})

    def by_leak(self) -> dict[str, float]:
        """Return the GPU time of all nodes by leak."""
        by_leak: dict[str, float] = defaultdict(int)
        for parts in self.parts.values():
            for leak, time in parts.items():
                by_leak[leak] += time
        return dict(by_leak)

    def layer_ratios(self) -> LayerRatios:
        """Return the layer ratios of all nodes together."""
        return layer_ratios(self.by_leak(), self.layer_of)

    def leak_by_node(self, leak: str) -> dict[str, float]:
        """Return the GPU time of one leak by node."""
        return {node: parts.get(leak, 0) for node, parts in self.parts.items()}

    def waterfall(self) -> tuple[WaterfallPart, ...]:
        """Return the losses, the largest first, then useful, unresolved and unobserved."""
        sums = self.by_leak()
        return tuple(self._waterfall_part(leak, sums[leak]) for leak in waterfall_order(sums))

    def _waterfall_part(self, leak: str, time: float) -> WaterfallPart:
        part = WaterfallPart(
            name=leak,
            layer=self.layer_of[leak],
            gpu_hours=time / NANOSECONDS_PER_HOUR,
            share=time / self.held,
            money=self.money(self.leak_by_node(leak)),
            nanoseconds=round(time),
        )
        if leak in self.bounds:
            low, high = (bound / NANOSECONDS_PER_HOUR for bound in self.bounds[leak])
            part = replace(part, low_gpu_hours=low, high_gpu_hours=high)
        return with_guidance(part, self._evidence_of)

    def _evidence_of(self, definition: Leak) -> str:
        """Return the evidence of most of a leak's time; by counters, unless it is known to be another."""
        return self.evidence.get(definition.name, definition.evidence.split(" or ")[-1])

    def node_shares(self) -> tuple[NodeShare, ...]:
        """Return the nodes, the lowest product first."""
        shares = [self._node_share(name) for name in self.seen]
        return tuple(sorted(shares, key=lambda node: (node.product if node.product is not None else 2.0, node.name)))

    def _node_share(self, name: str) -> NodeShare:
        parts = self.parts[name]
        total, ratios = sum(parts.values()), layer_ratios(parts, self.layer_of)
        losses = {leak: seconds for leak, seconds in parts.items() if leak not in NOT_LOST}
        worst = min(losses, key=lambda leak: (-losses[leak], leak), default="")
        return NodeShare(
            name=name,
            gpus=self.gpus.get(name, 0.0),
            gpu_hours=total / NANOSECONDS_PER_HOUR,
            product=ratios.product,
            gau=ratios.gau,
            worst=worst,
            worst_share=losses.get(worst, 0.0) / total if total else 0.0,
            unseen_gpu_hours=self.unseen.get(name, 0.0) / NANOSECONDS_PER_HOUR,
        )


def waterfall_order(sums: Mapping[str, float]) -> list[str]:
    """Sort leaks by size, the largest first; useful, unresolved and unobserved come last."""
    return sorted(sums, key=lambda leak: (NOT_LOST.index(leak) if leak in NOT_LOST else -1, -sums[leak], leak))


def with_guidance(part: WaterfallPart, evidence: Callable[[Leak], str]) -> WaterfallPart:
    """Add what LEAKS has about a leak; nothing about a leak that only a newer daemon knows."""
    leak = _LEAK_BY_NAME.get(part.name)
    if leak is None:
        return part
    return replace(part, evidence=evidence(leak), team=leak.team, watch=leak.watch, fix=leak.fix)


def layer_ratios(parts: Mapping[str, float], layer_of: Mapping[str, str] = LAYER_BY_LEAK) -> LayerRatios:
    """Compute the three ratios and their product from GPU time by leak (docs/accounting.md)."""
    by_layer: dict[str, float] = defaultdict(int)
    for leak, time in parts.items():
        by_layer[layer_of[leak]] += time
    resolved = by_layer["emfu"] + by_layer["useful"]
    computing = resolved + by_layer["unresolved"]
    occupied = computing + by_layer["ectr"]
    observed = occupied + by_layer["gau"]
    gau, ectr = _share_of(occupied, observed), _share_of(computing, occupied)
    emfu = _share_of(by_layer["useful"], resolved)
    floor = _share_of(by_layer["useful"], observed)
    product = None if gau is None or ectr is None or emfu is None else gau * ectr * emfu
    return LayerRatios(gau=gau, ectr=ectr, emfu=emfu, product=product if computing else floor, floor=floor)


def _share_of(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def to_nanoseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Convert the values from seconds to nanoseconds."""
    return {key: value * SECOND for key, value in seconds.items()}


def _with_unobserved(parts: Mapping[str, float], unseen: float) -> dict[str, float]:
    """Add time that no daemon counted to unobserved."""
    with_unobserved = dict(parts)
    if unseen:
        with_unobserved["unobserved"] = with_unobserved.get("unobserved", 0) + unseen
    return {leak: time for leak, time in with_unobserved.items() if time > 0}


_GOODPUT_PHASES = ("compute", "communication", "bubble")
"""Phases of new steps; repeated steps are `rework`."""


class ReportedTraining(Struct, frozen=True, kw_only=True):
    """What a job's training reports add up to in one run. None: no node reported it. Times are in seconds.

    Time, tokens, samples and phases are those of all nodes. Steps, checkpoints, restarts and events belong to the whole
    job: they are those of the node that counted most.
    """

    gpu_seconds: float | None = None
    gpu_seconds_by_node: Mapping[str, float] = {}
    phase_seconds: Mapping[str, float] = {}
    tokens: float | None = None
    padding_tokens: float | None = None
    samples: float | None = None
    steps: float | None = None
    rework_steps: float | None = None
    checkpoints: float | None = None
    checkpoint_seconds: float | None = None
    restarts: float | None = None
    recovery_seconds: float | None = None
    loss_events: Mapping[str, float] = {}
    mfu: float | None = None
    """The mean of the run, as are the next two, weighted by the GPU time that reports cover."""
    hfu: float | None = None
    gap: float | None = None
    step: float | None = None
    """The last value reported, as are all below; the greatest of all nodes."""
    world_size: float | None = None
    bubble: float | None = None
    loss: float | None = None
    loss_spread: float | None = None
    lost_bytes_per_second: float | None = None
    target_at: float | None = None
    """Unix seconds at which the first node reported that the target was reached."""


def training_summary(run: "RunData") -> TrainingSummary | None:
    """Return None if the job reported nothing."""
    totals, books = run.training, run.books
    if not totals.gpu_seconds:
        return None
    return TrainingSummary(
        told_share=min(1.0, totals.gpu_seconds * SECOND / sum(books.seen.values())),
        mfu=totals.mfu,
        hfu=totals.hfu,
        gap=totals.gap,
        checkpoint_gpu_hours=books.by_leak().get("checkpoint", 0.0) / NANOSECONDS_PER_HOUR,
        checkpoint_money=books.money(books.leak_by_node("checkpoint")),
        bubble=totals.bubble,
        loss=totals.loss,
        loss_spread=totals.loss_spread,
        loss_events={event: count for event, count in sorted(totals.loss_events.items()) if count},
        lost_bytes_per_second=totals.lost_bytes_per_second,
        qualities=run.qualities,
        target=_target_reached(run),
        phases=_phase_shares(totals),
        **_goodput_and_interruptions(totals),
        **_step_progress(totals),
        **_throughput(totals, books, totals.gpu_seconds),
    )


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return None if either is None or the divisor is 0."""
    return part / whole if part is not None and whole else None


def _phase_shares(totals: ReportedTraining) -> dict[str, float]:
    """Return each phase's share of the time of all nodes, the largest first."""
    total = sum(totals.phase_seconds.values())
    largest_first = sorted(totals.phase_seconds.items(), key=lambda item: -item[1])
    return {phase: seconds / total for phase, seconds in largest_first if seconds}


def _goodput_and_interruptions(totals: ReportedTraining) -> dict[str, float | None]:
    phases = totals.phase_seconds
    return {
        "goodput": ratio(sum(phases.get(phase, 0.0) for phase in _GOODPUT_PHASES), sum(phases.values())),
        "checkpoints": totals.checkpoints or None,
        "checkpoint_seconds": ratio(totals.checkpoint_seconds, totals.checkpoints),
        "restarts": totals.restarts or None,
        "recovery_seconds": ratio(totals.recovery_seconds, totals.restarts),
    }


def _step_progress(totals: ReportedTraining) -> dict[str, float | None]:
    repeated = ratio(totals.rework_steps, totals.steps)
    return {
        "step": totals.step,
        "steps": totals.steps or None,
        "rework_steps": totals.rework_steps,
        "progress": None if repeated is None else 1.0 - repeated,
    }


def _throughput(totals: ReportedTraining, books: JobBooks, gpu_seconds: float) -> dict[str, float | None]:
    tokens, samples = totals.tokens or None, totals.samples or None
    spent = books.cost(to_nanoseconds(totals.gpu_seconds_by_node))
    tokens_per_gpu_second = ratio(tokens, gpu_seconds)
    return {
        "tokens": tokens,
        "tokens_per_gpu_second": tokens_per_gpu_second,
        "tokens_per_second": None if tokens_per_gpu_second is None else tokens_per_gpu_second * books.max_gpus,
        "samples": samples,
        "samples_per_gpu_second": ratio(samples, gpu_seconds),
        "padding": ratio(totals.padding_tokens, tokens),
        "cost_per_step": ratio(books.cost(books.seen), totals.steps),
        "cost_per_token": ratio(spent, tokens),
        "cost_per_sample": ratio(spent, samples),
        "tokens_per_cost": ratio(tokens, spent),
    }


def _target_reached(run: "RunData") -> TargetReached | None:
    if run.training.target_at is None:
        return None
    seconds = run.training.target_at - run.period.start
    cost = run.books.cost_per_hour() * seconds * SECOND / NANOSECONDS_PER_HOUR
    return TargetReached(seconds=seconds, cost=cost)


def quality_metric(
    name: str,
    values: Sequence[float],
    *,
    start: float,
    target: float | None,
    cost: float,
    series: tuple[tuple[float, float], ...],
) -> QualityMetric:
    """Summarize a quality metric's values in order of time; lower is better if the target is below the start."""
    last = values[-1]
    rises = last >= start if target is None or target == start else target > start
    gain = last - start if rises else start - last
    return QualityMetric(
        name=name,
        start=start,
        last=last,
        best=max(values) if rises else min(values),
        rises=rises,
        target=target,
        gained=gain,
        cost_per_unit=cost / gain if gain > 0 else None,
        track=series,
    )


def rank_summaries(busy_seconds: Iterable[tuple[str, str, float]]) -> tuple[RankSummary, ...]:
    """Sort ranks by busy time per step, the slowest first, from (rank, node, seconds); empty for a single rank."""
    busy: dict[str, tuple[float, str]] = {}
    for rank, node, seconds in busy_seconds:
        busy[rank] = max((seconds, node), busy.get(rank, (0.0, "")))
    if len(busy) < 2:  # noqa: PLR2004  nothing to compare it with
        return ()
    median_seconds = median(seconds for seconds, _ in busy.values())
    summaries = [
        RankSummary(
            rank=rank, node=node, busy_seconds=seconds, of_median=seconds / median_seconds if median_seconds else 1.0
        )
        for rank, (seconds, node) in busy.items()
    ]
    return tuple(sorted(summaries, key=lambda summary: (-summary.busy_seconds, summary.rank)))


_LATENCY_ORDER = {"ttft": 0, "itl": 1, "queue": 2, "e2e": 3}
LatencyValue = tuple[str, str, float]
"""Kind, percentile, seconds."""


def latency_summaries(*, last: Iterable[LatencyValue], maximum: Iterable[LatencyValue]) -> tuple[LatencySummary, ...]:
    """Return latencies of the slowest replica: the last values reported, and the highest of the run."""
    last_values, worst = _worst_latencies(last), _worst_latencies(maximum)
    order = sorted(worst, key=lambda key: (_LATENCY_ORDER.get(key[0], len(_LATENCY_ORDER)), key))
    return tuple(
        LatencySummary(kind=key[0], percentile=key[1], last=last_values.get(key), worst=worst[key]) for key in order
    )


def _worst_latencies(values: Iterable[LatencyValue]) -> dict[tuple[str, str], float]:
    worst: dict[tuple[str, str], float] = {}
    for kind, percentile, seconds in values:
        worst[kind, percentile] = max(worst.get((kind, percentile), 0.0), seconds)
    return worst


def mean_tokens_per_pass(counts: Iterable[tuple[float, float]]) -> float | None:
    """Divide all tokens by all passes, from each daemon's (tokens generated, tokens per pass)."""
    known = [(generated, per_pass) for generated, per_pass in counts if per_pass > 0]
    return ratio(sum(generated for generated, _ in known), sum(generated / per_pass for generated, per_pass in known))


def with_tokens(summary: ServingSummary, tokens: Mapping[str, float], books: JobBooks) -> ServingSummary:
    """Add tokens by kind, the acceptance of draft tokens, and the generated tokens per cost."""
    return replace(
        summary,
        tokens={kind: count for kind, count in sorted(tokens.items()) if count},
        acceptance=ratio(tokens.get("accepted"), tokens.get("drafted")),
        generated_per_cost=ratio(tokens.get("generated"), books.cost(books.seen)),
    )


_LEAK_BY_FAILURE = {
    "hung": "hung", "zombie": "idle_allocation", "xid": "", "unavailable": "unavailable", "restart": "failure_recovery",
    "rework": "rework",
}  # fmt: skip
"""The leak in which the cost of each kind of failure is booked."""


def failure_costs(run: "RunData", waterfall: Iterable[WaterfallPart]) -> tuple[FailureCost, ...]:
    """Return the failures that happened or cost something, the most expensive first."""
    parts = {part.name: part for part in waterfall}
    times_by_kind = {**run.happened, "restart": run.training.restarts, "rework": run.training.rework_steps}
    failures = _occurred(times_by_kind, parts)
    return tuple(sorted(failures, key=lambda failure: -(failure.gpu_hours or 0.0)))


def _occurred(times_by_kind: Mapping[str, float | None], parts: Mapping[str, WaterfallPart]) -> Iterator[FailureCost]:
    no_cost = 0.0 if any(part.money is not None for part in parts.values()) else None
    for kind, leak in _LEAK_BY_FAILURE.items():
        times, part = times_by_kind.get(kind), parts.get(leak)
        if kind == "zombie" and not times:  # idle time alone is no failure: a job may pause, or wait for requests
            continue
        if times or part is not None:
            yield FailureCost(
                kind=kind,
                times=times,
                leak=leak,
                gpu_hours=part.gpu_hours if part else 0.0 if leak else None,
                money=part.money if part else no_cost if leak else None,
            )


_FULL_SHARE = 0.999
"""A lower share shows as less than 100.0 %."""


class RunData(Struct, frozen=True, kw_only=True):
    """One run of a job over all its nodes, whichever source it was read from. None or empty: not reported."""

    source: str
    """Prometheus, stores or nodes."""
    identity: JobIdentity
    period: RunPeriod
    books: JobBooks
    models: tuple[str, ...]
    joules: float | None
    ofu: float | None
    training: ReportedTraining
    qualities: tuple[QualityMetric, ...]
    serving: ServingSummary | None
    has_engine: bool
    """Whether an inference engine was found, even if it reported no tokens and no requests."""
    ranks: tuple[RankSummary, ...]
    happened: Mapping[str, float]
    """Number of GPU failures by kind: hung, zombie, xid, unavailable."""
    unseen: tuple[str, ...]
    """What the source could not observe, in sentences."""
    energy: EnergyTerms = EnergyTerms()
    grams_co2_per_kwh: float | None = None
    """Mean of the run's energy."""
    joules_by_leak: Mapping[str, float] = {}
    """Empty if the source has only the sum."""
    activity: dict[str, float] = {}
    activity_deviation: float | None = None
    smallest_slice: str = ""
    excess_gpu_hours: float = 0.0
    expected_nodes: int = 0
    course: tuple[CourseInterval, ...] = ()
    stalls: Mapping[str, float] = {}
    """GPU-hours of waiting by cause."""
    communication: CommunicationSummary | None = None
    useful_pipe: str = TENSOR
    simulated: bool = False
    hang: OngoingHang | None = None


def build_report(run: RunData) -> JobReport:
    """Derive all figures of the report."""
    books, training = run.books, training_summary(run)
    waterfall, by_leak = books.waterfall(), books.by_leak()
    kwh, terms = None if run.joules is None else run.joules / JOULES_PER_KWH, run.energy
    layers, nodes = books.layer_ratios(), books.node_shares()
    energy_useful = ratio(run.joules_by_leak.get("useful", 0.0), sum(run.joules_by_leak.values()))
    if run.useful_pipe == NONE:  # the minute before that was seen is no reason to claim 0 %
        layers, energy_useful = replace(layers, emfu=None, product=None, floor=None), None
        nodes = tuple(replace(node, product=None) for node in nodes)
    return JobReport(
        who=run.identity,
        when=run.period,
        nodes=nodes,
        models=run.models,
        gpus=books.max_gpus,
        gpu_hours=books.held / NANOSECONDS_PER_HOUR,
        seen_gpu_hours=sum(books.seen.values()) / NANOSECONDS_PER_HOUR,
        coverage=1.0 - by_leak.get("unobserved", 0) / books.held if books.held else None,
        currency=books.currency,
        money=books.money({node: sum(parts.values()) for node, parts in books.parts.items()}),
        energy_kwh=kwh,
        layers=layers,
        parts=with_energy(
            waterfall,
            run.joules_by_leak,
            money=_energy_amounts(run, terms.price_per_kwh),
            grams=_energy_amounts(run, run.grams_co2_per_kwh),
        ),
        evidence=_evidence_shares(waterfall),
        ofu=run.ofu,
        activity=run.activity,
        activity_deviation=run.activity_deviation,
        truth=training,
        served=run.serving,
        ranks=run.ranks if training else (),
        unseen=tuple(_unseen_notes(run, training)),
        source=run.source,
        simulated=run.simulated,
        failures=failure_costs(run, waterfall),
        energy_useful=energy_useful,
        co2_kg=None if kwh is None or run.grams_co2_per_kwh is None else kwh * run.grams_co2_per_kwh / 1000,
        energy_money=UNSET if kwh is None or terms.price_per_kwh is None else kwh * terms.price_per_kwh,
        energy_currency=UNSET if kwh is None or terms.price_per_kwh is None else terms.currency,
        expected_nodes=run.expected_nodes,
        expected_gpus=int(run.training.world_size or 0),
        fitting=run.smallest_slice,
        unneeded_gpu_hours=run.excess_gpu_hours,
        course=run.course,
        stalls=dict(sorted(run.stalls.items(), key=lambda each: (-each[1], each[0]))),
        communication=run.communication,
        useful_pipe=run.useful_pipe if run.useful_pipe in PIPE_NOTES else UNSET,
        hang=UNSET if run.hang is None else run.hang,
    )


def _energy_amounts(run: RunData, per_kwh: float | None) -> dict[str, float] | None:
    """Return an amount for the energy of each leak; None if the amount of a kilowatt-hour is not known."""
    if per_kwh is None:
        return None
    return {leak: energy_amount(joules, per_kwh) for leak, joules in run.joules_by_leak.items()}


def earlier_run_note(end: float) -> str:
    """Return a note that another run with the job's ID ended then, Unix seconds."""
    return f"an earlier run under the same id ended {format_time(end)}: --at with a time before shows it"


def _evidence_shares(waterfall: tuple[WaterfallPart, ...]) -> dict[str, float]:
    """Return the share of the total loss by kind of evidence."""
    losses = [part for part in waterfall if part.evidence]
    total = sum(part.gpu_hours for part in losses)
    kinds = {part.evidence for part in losses}
    shares = {kind: sum(part.gpu_hours for part in losses if part.evidence == kind) / total for kind in kinds}
    return dict(sorted(shares.items(), key=lambda item: (-round(item[1], 6), item[0])))


def _unseen_notes(run: RunData, training: TrainingSummary | None) -> Iterator[str]:
    books = run.books
    for node, time in sorted(books.unseen.items()):
        reason = "not scraped" if run.source == "Prometheus" else "has not reported the rest"
        yield (
            f"node {node}: {time / NANOSECONDS_PER_HOUR:,.2f} GPU-hours are unobserved: its daemon was down or {reason}"
        )
    yield from run.unseen
    if not books.currency:
        yield "no price, or several currencies: amounts are GPU-hours"
    world_size, gpus = run.training.world_size, books.max_gpus
    if world_size and world_size > gpus and run.expected_nodes <= len(books.seen):
        yield f"the job speaks of {world_size:g} GPUs, {gpus:g} were seen: the rest is on nodes without a daemon"
    yield from _missing_reports(run, training)
    yield from _mfu_contradiction(training.mfu if training else None, run.ofu)


def _missing_reports(run: RunData, training: TrainingSummary | None) -> Iterator[str]:
    if training is None:
        if not run.has_engine:
            yield "the job reported nothing: useful is the hardware's upper bound, padding and recomputation are in it"
    elif training.told_share < _FULL_SHARE:
        share = format_percent(training.told_share)
        yield f"reports speak of {share} of its GPU time; figures by token are of that part"


def _mfu_contradiction(mfu: float | None, ofu: float | None) -> Iterator[str]:
    """Report an MFU above what the tensor cores delivered: the job's FLOP count is wrong."""
    if mfu is not None and ofu is not None and mfu > ofu * Policy().flops_excess:
        yield (
            f"the job's count of FLOPs is wrong: it reports {format_percent(mfu)} of peak,"
            f" and the tensor cores delivered {format_percent(ofu)}"
        )
