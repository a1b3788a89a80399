"""Joins the JobRecords of all nodes, from stores or from daemons, into the report of the last run of a job.

Nanoseconds are summed as integers until the last division.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct

from exporter.core.job_record import JobRecord, JobSample, sum_bounds, sum_evidence
from exporter.core.model import SECOND
from exporter.core.prices import NO_PRICE, CarbonIntensity, EnergyTerms
from exporter.core.progress import TrainingView
from exporter.core.serving import ServingView
from exporter.core.uncertainty import main_evidence
from exporter.formatting import format_amount, format_percent
from exporter.report.build import (
    LAYER_BY_LEAK,
    NANOSECONDS_PER_HOUR,
    JobBooks,
    LatencyValue,
    ReportedTraining,
    RunData,
    build_report,
    earlier_run_note,
    latency_summaries,
    latest_maximum,
    mean_tokens_per_pass,
    quality_metric,
    rank_summaries,
    reported_evidence,
    sum_by_key,
    utilization_means,
    weighted_mean,
    with_tokens,
)
from exporter.report.communication import communication_summary
from exporter.report.energy import EnergyInterval, carbon_notes, mean_intensity
from exporter.report.hangs import ongoing_hang
from exporter.report.model import (
    CourseInterval,
    JobIdentity,
    JobReport,
    OngoingHang,
    QualityMetric,
    ReportError,
    RunPeriod,
    ServingSummary,
)
from exporter.report.uncounted import CounterSegment, Tolerance, Uncounted, uncounted, unknown_note
from exporter.report.usage import job_identity
from exporter.specs import find_spec

View = TypeVar("View", TrainingView, ServingView)
_SAME_RUN_SECONDS = 60.0
"""Records closer than this are of one run."""
_STALE_SECONDS = 180.0
"""Maximum age of a running job's record relative to the newest: a store is written once a minute."""
_TOLERANCE = Tolerance(start=_SAME_RUN_SECONDS, between=5.0, end=_STALE_SECONDS)


class NodeRun(Struct, frozen=True, kw_only=True):
    """A job's time on one node: one record for each ledger of its daemon, in order of time."""

    node: str
    records: tuple[JobRecord, ...]

    @property
    def last(self) -> JobRecord:
        """The latest record."""
        return self.records[-1]

    @property
    def max_gpus(self) -> float:
        """The most whole GPUs held at once."""
        return max(record.whole_gpus for record in self.records)


class JobRun(Struct, frozen=True, kw_only=True):
    """One run of a job on all nodes that have records of it. Unix seconds."""

    start: float
    end: float
    running: bool
    node_runs: tuple[NodeRun, ...]
    previous_end: float | None = None
    """End of the previous run with the same job ID."""

    @property
    def records(self) -> tuple[JobRecord, ...]:
        """The records of all nodes."""
        return tuple(record for node_run in self.node_runs for record in node_run.records)


def find_last_run(records: Iterable[JobRecord], *, job_id: str, at: float) -> JobRun:
    """Return the last run that began before `at`, Unix seconds. Raises ReportError if there is none."""
    matching = _latest_records(record for record in records if record.owner.job_id == job_id and record.start <= at)
    if not matching:
        raise ReportError(
            f"no source has a record of job {job_id}: is the id as gpu_efficiency_job_info has it (Kubernetes:"
            " namespace/kind/name)? Try --since, --at, or other nodes and stores"
        )
    # the latest record belongs to the run even if a damaged row has an impossible end
    start, same_run = matching[0].start, [matching[0]]
    for record in matching[1:]:
        if record.end >= start - _SAME_RUN_SECONDS:
            same_run.append(record)
            start = min(start, record.start)
    earlier_ends = [record.end for record in matching if record not in same_run]
    end = max(record.end for record in same_run)
    same_run.sort(key=attrgetter("end"))
    nodes = sorted({record.node for record in same_run})
    node_runs = tuple(NodeRun(node=node, records=tuple(r for r in same_run if r.node == node)) for node in nodes)
    running = any(each.last.running and each.last.end >= end - _STALE_SECONDS for each in node_runs)
    return JobRun(
        start=start, end=end, running=running, node_runs=node_runs, previous_end=max(earlier_ends, default=None)
    )


def _latest_records(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Return the latest of several records of one ledger, such as from a copy and from the node; newest end first."""
    latest: list[JobRecord] = []
    for record in sorted(records, key=lambda candidate: (-candidate.end, candidate.running)):
        if not any(_same_job(record, kept) for kept in latest):
            latest.append(record)
    return latest


def _same_job(record: JobRecord, kept: JobRecord) -> bool:
    """Whether both are of one run in one ledger: two runs with one job ID do not overlap."""
    return (record.node, record.life) == (kept.node, kept.life) and record.end > kept.start


# -- time that no daemon counted --


def node_uncounted(node_run: NodeRun, run: JobRun) -> Uncounted:
    """Return the GPU-seconds of the node that no ledger counted."""
    return uncounted(
        _segments(node_run.records),
        end=run.end,
        tolerance=_TOLERANCE,
        replaced=any(record.owner.namespace for record in node_run.records),
    )


def _segments(records: Sequence[JobRecord]) -> Iterator[CounterSegment]:
    """Yield a segment for each record: two in one ledger mean that the job left the node and returned."""
    before = None
    for record, following in zip_longest(records, records[1:]):
        same_ledger = before is not None and before.life == record.life
        first = record.start if same_ledger else books_start(record, record.start if before is None else before.end)
        yield CounterSegment(
            start=record.start,
            first=first,
            paid_at_first=0.0,
            last=record.end,
            gpus=record.whole_gpus,
            end_known=not record.running if following is None else record.left or following.life == record.life,
        )
        before = record


def books_start(record: JobRecord, before: float) -> float:
    """Return when the ledger began to count, from its first sample: the scheduler's start may be earlier."""
    if len(record.samples) > 1 and record.whole_gpus:
        return record.samples[0].at - record.samples[0].paid / record.whole_gpus
    return max(record.start, before)


# -- training and serving: counters of all records, and each node's last gauges --

ViewsByNode = Mapping[str, Sequence[View]]


def _training_totals(run: JobRun) -> ReportedTraining:
    views = _views_by_node(run, attrgetter("training"))
    gpu_seconds = _sum_by_node(views, lambda view: view.gpu_time / SECOND)
    phases = _labels_by_node(views, lambda view: [(phase, spent / SECOND) for phase, spent in view.phases])
    last = [node_run.last.training for node_run in run.node_runs if node_run.last.training is not None]
    return ReportedTraining(
        gpu_seconds=_total(gpu_seconds),
        gpu_seconds_by_node=gpu_seconds,
        phase_seconds=_sum_labels(phases),
        tokens=_total(_sum_by_node(views, attrgetter("tokens"))),
        padding_tokens=_total(_sum_by_node(views, attrgetter("padding"))),
        samples=_total(_sum_by_node(views, attrgetter("samples"))),
        steps=_maximum(_sum_by_node(views, attrgetter("steps"))),
        rework_steps=_maximum(_sum_by_node(views, attrgetter("rework_steps"))),
        checkpoints=_maximum(_sum_by_node(views, attrgetter("checkpoints"))),
        checkpoint_seconds=max((node["checkpoint"] for node in phases if "checkpoint" in node), default=None),
        restarts=_maximum(_sum_by_node(views, attrgetter("restarts"))),
        recovery_seconds=_maximum(_sum_by_node(views, lambda view: view.recovery / SECOND)),
        loss_events=_maximum_labels(_labels_by_node(views, attrgetter("events"))),
        step=_latest(last, "step"),
        world_size=_latest(last, "world"),
        bubble=_latest(last, "bubble"),
        loss=_latest(last, "loss"),
        loss_spread=_latest(last, "loss_spread"),
        target_at=min((view.target_at / SECOND for view in last if view.target_at is not None), default=None),
        **utilization_means(*_mfu_and_hfu(run), weights=gpu_seconds),
    )


def _views_by_node(run: JobRun, view_of: Callable[[JobRecord], View | None]) -> dict[str, list[View]]:
    views = {each.node: [view for record in each.records if (view := view_of(record))] for each in run.node_runs}
    return {node: of_node for node, of_node in views.items() if of_node}


def _sum_by_node(views: ViewsByNode[View], value: Callable[[View], float]) -> dict[str, float]:
    return sum_by_key((node, value(view)) for node, of_node in views.items() for view in of_node)


def _labels_by_node(
    views: ViewsByNode[View], pairs: Callable[[View], Iterable[tuple[str, float]]]
) -> list[dict[str, float]]:
    """Return each node's sums by label."""
    return [sum_by_key(pair for view in of_node for pair in pairs(view)) for of_node in views.values()]


def _sum_labels(nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return sum_by_key(item for node in nodes for item in node.items())


def _maximum_labels(nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest node's value of each label."""
    maximum: dict[str, float] = {}
    for label, value in (item for node in nodes for item in node.items()):
        maximum[label] = max(value, maximum.get(label, value))
    return maximum


def _total(by_node: Mapping[str, float]) -> float | None:
    return sum(by_node.values()) if by_node else None


def _maximum(by_node: Mapping[str, float]) -> float | None:
    return max(by_node.values(), default=None)


def _latest(last: Iterable[TrainingView], field: str) -> float | None:
    return latest_maximum([float(value) for view in last if (value := getattr(view, field)) is not None])


def _mfu_and_hfu(run: JobRun) -> tuple[dict[str, float], dict[str, float]]:
    """Return MFU and HFU by node, over the time that reports or an engine cover."""
    mfu, hfu = dict[str, float](), dict[str, float]()
    for node_run in run.node_runs:
        reportable = sum(record.reportable for record in node_run.records)
        if not reportable:
            continue
        mfu[node_run.node] = sum(record.reported for record in node_run.records) / reportable
        training = [record.training for record in node_run.records if record.training is not None]
        flops = sum(view.flops for view in training)
        if flops:
            hfu[node_run.node] = mfu[node_run.node] * sum(view.hardware_flops for view in training) / flops
    return mfu, hfu


def _busy_seconds(run: JobRun) -> Iterator[tuple[str, str, float]]:
    for node_run in run.node_runs:
        if node_run.last.training is not None:
            yield from ((rank, node_run.node, busy) for rank, _, busy in node_run.last.training.ranks)


def _serving_summary(run: JobRun, books: JobBooks) -> ServingSummary | None:
    """Return None if no engine reported tokens or requests. Records have no maximum of the KV cache and no MBU."""
    views = _views_by_node(run, attrgetter("service"))
    last = {node_run.node: node_run.last.service for node_run in run.node_runs if node_run.last.service is not None}
    tokens = _labels_by_node(views, attrgetter("tokens"))
    running, waiting = _sum_known(last, "running"), _sum_known(last, "waiting")
    if not any(tokens) and running is None and waiting is None:
        return None
    latencies = [value for view in last.values() for value in _latency_values(view)]
    undrafted = _total(_sum_by_node(views, lambda view: view.undrafted / SECOND))
    summary = ServingSummary(
        engines=tuple(sorted({view.engine for view in last.values()})),
        running=running,
        waiting=waiting,
        batch_fill=_weighted_by_paid(run, last, "fill"),
        kv_mean=_weighted_by_paid(run, last, "kv_use"),
        preemptions=_total(_sum_by_node(views, attrgetter("preemptions"))),
        tokens_per_pass=mean_tokens_per_pass(
            (generated["generated"], last[node].per_pass or 0.0)
            for node, generated in zip(views, tokens, strict=True)
            if node in last and "generated" in generated
        ),
        latencies=latency_summaries(last=latencies, maximum=latencies),
        advice={"speculative_decoding": undrafted / 3600} if undrafted else {},
    )
    return with_tokens(summary, _sum_labels(tokens), books)


def _sum_known(last: Mapping[str, ServingView], field: str) -> float | None:
    values = [value for view in last.values() if (value := getattr(view, field)) is not None]
    return sum(values) if values else None


def _weighted_by_paid(run: JobRun, last: Mapping[str, ServingView], field: str) -> float | None:
    paid = sum_by_key((record.node, record.paid / SECOND) for record in run.records)
    values = ((getattr(view, field), paid[node]) for node, view in last.items())
    return weighted_mean((value, weight) for value, weight in values if value is not None)


def _latency_values(view: ServingView) -> Iterator[LatencyValue]:
    for latency in view.latencies:
        for percentile in ("p50", "p95", "p99"):
            yield latency.kind, percentile, float(getattr(latency, percentile))


# -- the job over time --

MAX_INTERVALS = 96
"""Maximum number of intervals in a report."""
_COUNTERS = ("paid", "seen", "occupied", "computing", "useful", "joules")


def run_course(run: JobRun) -> tuple[CourseInterval, ...]:
    """Return consecutive intervals from start to end; none if there are no samples in between."""
    start, end = run.start, run.end
    series = [samples for node_run in run.node_runs for samples in _node_samples(node_run)]
    sample_times = sorted({sample.at for samples in series for sample in samples if start < sample.at < end})
    if not sample_times:
        return ()
    stride = max(1, -(-(len(sample_times) + 1) // MAX_INTERVALS))
    edges = [start, *sample_times[stride - 1 :: stride], end]
    edges = [a for a, b in pairwise(edges) if b - a >= 1.0] + [end]
    points = [[_interpolate(samples, edge) for samples in series] for edge in edges]
    counters = [[sum(values) for values in zip(*point, strict=True)] for point in points]
    increases = zip(pairwise(edge - start for edge in edges), pairwise(counters), strict=True)
    # two samples with the same time are of a damaged row
    return tuple(_course_interval(a, b, _increases(x, y)) for (a, b), (x, y) in increases if b > a)


def _node_samples(node_run: NodeRun) -> Iterator[list[JobSample]]:
    """Yield the samples of each ledger, preceded by zeros at its beginning."""
    before = node_run.records[0].start
    for record in node_run.records:
        if record.samples:
            origin = JobSample(min(books_start(record, before), record.samples[0].at), *(0.0,) * len(_COUNTERS))
            yield [origin, *record.samples]
        before = record.end


def _interpolate(samples: list[JobSample], at: float) -> list[float]:
    """Return the counters at a time, interpolated linearly."""
    after = bisect_right(samples, at, key=attrgetter("at"))
    if after == 0:
        return [0.0] * len(_COUNTERS)
    before, following = samples[after - 1], samples[min(after, len(samples) - 1)]
    fraction = (at - before.at) / (following.at - before.at) if following.at > before.at else 0.0
    return [(1 - fraction) * getattr(before, name) + fraction * getattr(following, name) for name in _COUNTERS]


def _increases(before: list[float], after: list[float]) -> dict[str, float]:
    return {name: max(0.0, b - a) for name, a, b in zip(_COUNTERS, before, after, strict=True)}


def _course_interval(start: float, end: float, increase: Mapping[str, float]) -> CourseInterval:
    return CourseInterval(
        start=start,
        end=end,
        gpus=increase["paid"] / (end - start),
        coverage=_capped_ratio(increase["seen"], increase["paid"]),
        gau=_capped_ratio(increase["occupied"], increase["seen"]),
        ectr=_capped_ratio(increase["computing"], increase["occupied"]),
        floor=_capped_ratio(increase["useful"], increase["seen"]),
        watts=increase["joules"] / (end - start),
    )


def _energy_intervals(run: JobRun) -> Iterator[EnergyInterval]:
    """Yield the energy between consecutive samples of each ledger."""
    for node_run in run.node_runs:
        before = node_run.records[0].start
        for record in node_run.records:
            points = [(sample.at, sample.joules) for sample in record.samples if sample.at < record.end]
            points = [(books_start(record, before), 0.0), *points, (record.end, sum(record.energy.values()))]
            yield from (EnergyInterval(a, b, high - low) for (a, low), (b, high) in pairwise(points) if high > low)
            before = record.end


def _capped_ratio(fraction: float, whole: float) -> float | None:
    return min(1.0, fraction / whole) if whole > 0 else None


class RecordSources(Struct, frozen=True, kw_only=True):
    """Where the records come from, as far as a report shows it."""

    source: str = "stores"
    """stores or nodes."""
    unanswered: tuple[str, ...] = ()
    """One sentence for each node that did not answer, with the reason."""
    notes: tuple[str, ...] = ()
    """Remarks on nodes that did."""
    energy: EnergyTerms = EnergyTerms()
    carbon: CarbonIntensity = CarbonIntensity()


_FROM_STORES = RecordSources()


def join_records(
    records: Sequence[JobRecord], *, job_id: str, at: float, sources: RecordSources = _FROM_STORES
) -> JobReport:
    """Build the report of the job's last run that began before `at`, Unix seconds. Raises ReportError."""
    run = _find_run(records, job_id, at, sources)
    books, run_records = record_books(run), run.records
    energy = _sum_labels(record.energy for record in run_records)
    intensity = mean_intensity(_energy_intervals(run), sources.carbon)
    data = RunData(
        source=sources.source,
        identity=_identity(run),
        period=RunPeriod(start=run.start, end=run.end, running=run.running),
        books=books,
        models=tuple(sorted({model for record in run_records for model in record.models})),
        joules=sum(energy.values()) or None,
        joules_by_leak=energy,
        energy=sources.energy,
        grams_co2_per_kwh=intensity.grams_per_kwh,
        ofu=_ofu(run_records),
        training=_training_totals(run),
        qualities=tuple(_quality_metrics(run, books)),
        serving=_serving_summary(run, books),
        has_engine=any(node_run.last.service is not None for node_run in run.node_runs),
        ranks=rank_summaries(_busy_seconds(run)),
        happened=_sum_labels(record.happened for record in run_records),
        smallest_slice=next((node_run.last.fitting for node_run in run.node_runs if node_run.last.fitting), ""),
        excess_gpu_hours=sum(record.unneeded for record in run_records) / NANOSECONDS_PER_HOUR,
        expected_nodes=max(record.owner.nodes for record in run_records),
        course=run_course(run),
        stalls={
            cause: spent / NANOSECONDS_PER_HOUR
            for cause, spent in _sum_labels(record.stalls for record in run_records).items()
        },
        communication=communication_summary(run_records),
        useful_pipe=Counter(node_run.last.useful_pipe for node_run in run.node_runs).most_common(1)[0][0],
        simulated=any(record.simulated for record in run_records),
        hang=_ongoing_hang(run),
        unseen=(*_unseen_notes(run, sources), *carbon_notes(intensity.hours_unknown, sources.carbon)),
    )
    return build_report(data)


def _ongoing_hang(run: JobRun) -> OngoingHang | None:
    """Return the hang in which the job's running nodes are; None if there is none."""
    last = [node_run.last for node_run in run.node_runs]
    current = [record for record in last if record.running and record.end >= run.end - _STALE_SECONDS]
    hangs = {record.node: record.hang for record in current if record.hang is not None}
    gpus = {node: float(len(hang.gpus)) for node, hang in hangs.items()}
    return ongoing_hang(hangs, gpus, end=run.end, several_nodes=len(run.node_runs) > 1)


def _find_run(records: Sequence[JobRecord], job_id: str, at: float, sources: RecordSources) -> JobRun:
    try:
        return find_last_run(records, job_id=job_id, at=at)
    except ReportError as err:
        raise ReportError("; ".join((str(err), *sources.unanswered))) from None


def record_books(run: JobRun) -> JobBooks:
    """Build the books of all nodes: exactly what the ledgers hold."""
    parts: dict[str, dict[str, int]] = {node_run.node: _sum_parts(node_run.records) for node_run in run.node_runs}
    unseen = {each.node: time for each in run.node_runs if (time := round(node_uncounted(each, run).held * SECOND)) > 0}
    seen = {node_run.node: sum(record.paid for record in node_run.records) for node_run in run.node_runs}
    currency, rates = _hourly_rates(run, seen)
    return JobBooks(
        parts=parts,
        seen=seen,
        unseen=unseen,
        gpus={node_run.node: node_run.max_gpus for node_run in run.node_runs},
        currency=currency,
        rates=rates,
        layer_of=defaultdict(lambda: "emfu", LAYER_BY_LEAK),
        evidence=_evidence(run),
        bounds={leak: (bounds.low, bounds.high) for leak, bounds in sum_bounds(run.records).items()},
    )


def _evidence(run: JobRun) -> dict[str, str]:
    """Return the evidence of most of a leak's time; records of older daemons only show what the job reported."""
    views = (record.training for record in run.records if record.training is not None)
    found = reported_evidence(phase for view in views for phase, spent in view.phases if spent)
    return found | {leak: main_evidence(kinds) for leak, kinds in sum_evidence(run.records).items()}


def _sum_parts(records: Sequence[JobRecord]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record.parts)
    return dict(totals)


def _hourly_rates(run: JobRun, seen: Mapping[str, int]) -> tuple[str, dict[str, float]]:
    """Return the currency, and the price of a GPU-hour by node; the mean price for a node without one."""
    currencies = {currency for record in run.records for currency in record.money} - {NO_PRICE.currency}
    if len(currencies) != 1:
        return "", {}
    currency = currencies.pop()
    priced = {each.node: [record for record in each.records if currency in record.money] for each in run.node_runs}
    money = {node: sum(record.money[currency] for record in records) for node, records in priced.items()}
    time = {node: sum(record.paid for record in records) for node, records in priced.items()}
    mean_rate = sum(money.values()) * NANOSECONDS_PER_HOUR / sum(time.values()) if any(time.values()) else 0.0
    rates = {node: money[node] * NANOSECONDS_PER_HOUR / time[node] if time[node] else mean_rate for node in seen}
    return currency, rates


def _identity(run: JobRun) -> JobIdentity:
    """Return the most common identity among the job's nodes."""
    owner = Counter(node_run.last.owner for node_run in run.node_runs).most_common(1)[0][0]
    return job_identity(owner)


def _ofu(records: Sequence[JobRecord]) -> float | None:
    """Return delivered FLOPs over the peak of the observed time; None for GPUs of several models."""
    models = {model for record in records for model in record.models}
    spec = find_spec(models.pop()) if len(models) == 1 else None
    seen = sum(record.tensor_seen for record in records)
    if spec is None or not spec.peak_flops or not seen:
        return None
    return sum(record.flops for record in records) / (seen * spec.peak_flops)


def _quality_metrics(run: JobRun, books: JobBooks) -> Iterator[QualityMetric]:
    """Yield quality metrics. A record has only the first value, the last, and when the target was reached."""
    node_run_by_name = {node_run.last.training.quality[0]: node_run for node_run in run.node_runs
            if node_run.last.training is not None and node_run.last.training.quality is not None}  # fmt: skip
    for name, node_run in sorted(node_run_by_name.items()):
        first = next(record.training for record in node_run.records if record.training is not None)
        last = node_run.last.training
        if last is None or last.quality is None:
            continue
        _, value, start, target = last.quality
        start = first.quality[2] if first.quality is not None and first.quality[0] == name else start
        seconds_to_target = None if last.target_at is None else last.target_at / 1e9 - run.start
        track = ((seconds_to_target, target),) if seconds_to_target is not None and target is not None else ()
        cost = books.cost(books.seen)
        yield quality_metric(name, (start, value), start=start, target=target, cost=cost, series=track)


# -- what was not observed --


def _unseen_notes(run: JobRun, sources: RecordSources) -> Iterator[str]:
    yield from (f"{sentence}: what it saw of the job is not in this receipt" for sentence in sources.unanswered)
    yield from sources.notes
    yield from _absent_nodes(run)
    for node_run in run.node_runs:
        if (lives := len({record.life for record in node_run.records})) > 1:
            yield f"the daemon of {node_run.node} began anew in the run: its {lives} parts are added"
        if unknown := node_uncounted(node_run, run).unknown:
            yield unknown_note(node_run.node, unknown)
    if run.previous_end is not None:
        yield earlier_run_note(run.previous_end)
    if any(record.service is not None for record in run.records):
        yield "requests, batch fill, KV cache and latencies are those told last: a node keeps no mean of them"


def _absent_nodes(run: JobRun) -> Iterator[str]:
    """Report how much of the job ran on nodes without records."""
    expected, node_count = max(record.owner.nodes for record in run.records), len(run.node_runs)
    if node_count < expected:
        gpus = sum(node_run.max_gpus for node_run in run.node_runs)
        world_size = max((record.training.world for record in run.records if record.training is not None), default=0)
        missing_gpus = world_size - gpus if world_size > gpus else gpus / node_count * (expected - node_count)
        hours = missing_gpus * (run.end - run.start) / 3600
        yield (
            f"{expected - node_count} of the job's {expected} nodes told nothing:"
            f" about {format_amount(missing_gpus)} GPUs, {hours:,.2f} GPU-hours,"
            f" {format_percent(missing_gpus / (missing_gpus + gpus))} of the job; all figures are of the others"
        )
