"""Reads one run of a job from the series that Prometheus has stored, and builds its report.

GPU time that no daemon counted is unobserved, so that the parts add up to the time held.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from math import ceil

from msgspec.structs import replace

from exporter.core.findings import describe_culprit
from exporter.core.hangs import HUNG, Hang
from exporter.core.model import SECOND, HangFinding
from exporter.core.pipes import TENSOR
from exporter.core.prices import NO_PRICE
from exporter.report.build import (
    LAYER_BY_LEAK,
    JobBooks,
    LatencyValue,
    ReportedTraining,
    RunData,
    build_report,
    earlier_run_note,
    latency_summaries,
    mean_tokens_per_pass,
    quality_metric,
    rank_summaries,
    reported_evidence,
    to_nanoseconds,
    utilization_means,
    weighted_mean,
    with_tokens,
)
from exporter.report.hangs import ongoing_hang
from exporter.report.model import (
    JobIdentity,
    JobReport,
    OngoingHang,
    QualityMetric,
    ReportError,
    RunPeriod,
    ServingSummary,
)
from exporter.report.prometheus_run import PrometheusRunData, split_at_falls
from exporter.report.query import (
    DAY_SECONDS,
    LOOKBACK_SECONDS,
    InstanceKey,
    InstanceRun,
    JobQuery,
    VectorSample,
    find_run,
    identity_of,
    last_increase,
)
from exporter.report.uncounted import CounterSegment, Tolerance, Uncounted, uncounted, unknown_note

Point = tuple[float, float]
"""Unix seconds, value."""


def prometheus_books(data: PrometheusRunData) -> JobBooks:
    """Build the books of all nodes of the run."""
    seen = data.metrics.by_node("paid_seconds")
    gpus = _least_gpus(data, seen) | data.max_gpus
    unseen = {node: _node_uncounted(data, node).held for node in seen}
    currency, rates = _hourly_rates(data, seen)
    labels = [counter.labels for counter in data.metrics.counters("seconds")]
    reported_layers = {each.get("leak", ""): each.get("layer", "") for each in labels}
    return JobBooks(
        parts=_seconds_by_leak(data, seen),
        seen=to_nanoseconds(seen),
        unseen=to_nanoseconds({node: seconds for node, seconds in unseen.items() if seconds > 0}),
        gpus=gpus,
        currency=currency,
        rates=rates,
        layer_of=LAYER_BY_LEAK | reported_layers,
        evidence=reported_evidence(
            phase for phase, spent in data.metrics.by_label("phase", "run_seconds").items() if spent
        ),
        bounds=_bounds(data),
    )


def _bounds(data: PrometheusRunData) -> dict[str, tuple[float, float]]:
    """Return the bounds of exposed communication, the only ones with series of their own."""
    leak = "exposed_communication"
    low, high = (data.metrics.total(f"{leak}_{bound}_seconds") for bound in ("low", "high"))
    return {} if low is None or high is None else {leak: (low * SECOND, high * SECOND)}


def _seconds_by_leak(data: PrometheusRunData, nodes: Iterable[str]) -> dict[str, dict[str, float]]:
    seconds_by_node: dict[str, dict[str, float]] = {node: defaultdict(float) for node in nodes}
    for counter in data.metrics.counters("seconds"):
        seconds_by_node[counter.node][counter.labels.get("leak", "")] += counter.value
    return {node: to_nanoseconds(parts) for node, parts in seconds_by_node.items()}


def _hourly_rates(data: PrometheusRunData, nodes: Iterable[str]) -> tuple[str, dict[str, float]]:
    """Return the currency, and the price of a GPU-hour by node; the mean price for a node without one."""
    prices = list(_gpu_hour_prices(data))
    currencies = {price.labels.get("currency", "") for price in prices}
    if len(currencies) != 1 or currencies == {NO_PRICE.currency}:
        return "", {}
    paid_seconds = data.metrics.by_instance("paid_seconds")
    weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for price in prices:
        weights[data.node_names[price.instance]].append((price.value, paid_seconds.get(price.instance, 0.0)))
    rates = {node: rate for node, pairs in weights.items() if (rate := weighted_mean(pairs)) is not None}
    mean_rate = weighted_mean(chain.from_iterable(weights.values())) or 0.0
    return currencies.pop(), {node: rates.get(node, mean_rate) for node in nodes}


_SHARED_TOLERANCE = 0.15
"""Relative error of the GPUs computed from a run: up to a scrape interval at its end is not the job's."""


def _gpu_hour_prices(data: PrometheusRunData) -> Iterator[VectorSample]:
    """Yield the price of a GPU-hour of the job by daemon and currency.

    It is what the job's GPUs cost an hour, by their number; on a daemon that was scraped too seldom to tell the shares
    of its GPUs, the node's own price, if it is stored.
    """
    numbers, shares = data.mean_gpus, _gpus_held(data)
    prices = [price for price in data.hourly_prices() if price.instance in data.node_names]
    short = [run.instance for run in data.run.instance_runs if run.instance not in shares]
    of_nodes = data.gpu_hour_prices(short) if short else []
    yield from of_nodes
    known = {price.instance for price in of_nodes}
    for price in prices:
        gpus = shares.get(price.instance) or numbers.get(price.instance)
        if gpus and price.instance not in known:
            yield VectorSample(price.labels, price.value / gpus)


def _gpus_held(data: PrometheusRunData) -> dict[InstanceKey, float]:
    """Return paid GPUs by daemon: a MIG instance or a shared GPU counts as less than 1; without too short runs."""
    gpus_by_instance: dict[InstanceKey, float] = {}
    numbers = data.mean_gpus
    for run in data.run.instance_runs:
        segments = list(_instance_segments(data, run))
        duration = sum(each.last - each.first for each in segments)
        if duration * _SHARED_TOLERANCE <= run.scrape_interval:
            continue
        mean_gpus = sum(each.gpus * (each.last - each.first) for each in segments) / duration
        number = numbers.get(run.instance, 0.0)
        shared = 0 < mean_gpus < (1 - _SHARED_TOLERANCE) * number
        gpus_by_instance[run.instance] = mean_gpus if shared else number
    return gpus_by_instance


def _least_gpus(data: PrometheusRunData, paid: Mapping[str, float]) -> dict[str, float]:
    """Return by node the number of GPUs that the job held at least, for what was never sampled while it ran."""
    start_by_node = {data.node_names[each.instance]: each.start for each in data.run.instance_runs}
    lengths = {node: data.run.end - start for node, start in start_by_node.items()}
    return {node: float(ceil(paid[node] / lengths[node])) for node in paid if lengths.get(node, 0.0) > 0}


# -- time that no daemon counted --


def _node_uncounted(data: PrometheusRunData, node: str) -> Uncounted:
    """Return the GPU-seconds of the node that no daemon counted."""
    runs = [each for each in data.run.instance_runs if data.node_names[each.instance] == node]
    segments = list(chain.from_iterable(_instance_segments(data, each) for each in runs))
    most = max(each.gpus for each in segments) or max(map(_gpus_since_start, segments))
    gpus = min(most, data.max_gpus.get(node, most))
    interval = max(each.scrape_interval for each in runs)
    return uncounted(
        (each if each.gpus else replace(each, gpus=gpus) for each in segments),
        end=data.run.end,
        tolerance=Tolerance(start=interval, between=0.0, end=2 * interval),
        replaced=any(sample.labels.get("workload_namespace") for sample in data.metrics.gauges("info")),
    )


def _gpus_since_start(segment: CounterSegment) -> float:
    """Return the mean of the GPUs held up to its first sample, for a counter without growth."""
    held = segment.first - segment.start
    return segment.paid_at_first / held if held > 0 else 0.0


def _instance_segments(data: PrometheusRunData, run: InstanceRun) -> Iterator[CounterSegment]:
    """Yield a segment between each two falls of the daemon's counter."""
    if run.instance not in data.restarted:
        paid = data.metrics.by_instance("paid_seconds")[run.instance]
        first = data.first_samples.get(run.instance, (run.end, paid))
        yield _segment(first, (run.end, paid), run.start, end_known=run.ended)
        return
    starts = dict(data.restarted_starts.get(run.instance, ()))
    for points in split_at_falls(data.restarted[run.instance].points):
        end, first = last_increase(points), points[0]
        yield _segment(first, (end, points[-1][1]), starts.get(first[0], run.start), end_known=points[-1][0] > end)


def _segment(first: Point, last: Point, start: float, *, end_known: bool) -> CounterSegment:
    gpus = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
    return CounterSegment(
        start=start, first=first[0], paid_at_first=first[1], last=last[0], gpus=gpus, end_known=end_known
    )


DEFAULT_LOOKBACK_SECONDS = 30 * DAY_SECONDS
"""Default range, in seconds, in which a job is searched."""


def report_from_prometheus(job_query: JobQuery, at: float, *, since: float = DEFAULT_LOOKBACK_SECONDS) -> JobReport:
    """Build the report of the job's last run that began before `at`, Unix seconds. Raises ReportError."""
    run = find_run(job_query, at, since=since)
    data = PrometheusRunData(job_query, run)
    if not data.metrics.counters("seconds"):
        raise ReportError(
            f"job {job_query.job_id} is stored there without gpu_efficiency_job_seconds_total: does the scrape drop it?"
        )
    return build_report(_run_data(data, prometheus_books(data)))


def _run_data(data: PrometheusRunData, books: JobBooks) -> RunData:
    run, metrics = data.run, data.metrics
    paid_seconds = metrics.by_instance("paid_seconds")
    training = _training_totals(data)
    return RunData(
        source="Prometheus",
        identity=_identity(data),
        period=RunPeriod(start=run.start, end=run.end, running=run.running),
        books=books,
        models=data.gpu_models(),
        joules=metrics.total("energy_joules"),
        energy=data.energy_terms(),
        grams_co2_per_kwh=data.grams_co2_per_kwh(),
        ofu=data.weighted_mean("ofu_ratio", weights=paid_seconds),
        activity=_activity_percentiles(data),
        activity_deviation=data.weighted_mean("activity_deviation_ratio", weights=paid_seconds),
        training=training,
        qualities=tuple(_quality_metrics(data, books)),
        serving=_serving_summary(data, books),
        has_engine=bool(metrics.gauges("engine_info")),
        useful_pipe=next((sample.labels.get("pipe", "") for sample in metrics.gauges("useful_pipe")), TENSOR),
        ranks=rank_summaries(_busy_seconds(data)) if training.gpu_seconds else (),
        happened=metrics.by_label("kind", "happened"),
        smallest_slice=next((sample.labels.get("profile", "") for sample in metrics.gauges("fitting_slice_ratio")), ""),
        excess_gpu_hours=(metrics.total("unneeded_seconds") or 0.0) / 3600,
        stalls={cause: spent / 3600 for cause, spent in metrics.by_label("cause", "stall_seconds").items() if spent},
        unseen=tuple(_unseen_notes(data)),
        simulated=data.simulated(),
        hang=ongoing_hang_of(data),
    )


def ongoing_hang_of(data: PrometheusRunData) -> OngoingHang | None:
    """Return the hang in which the job is at the run's end, on the nodes that are scraped then; None if there is none.

    Without the number of GPU-hours: the series of a job do not have the shares of its GPUs.
    """
    run, metrics = data.run, data.metrics
    current = {each.instance for each in run.instance_runs if not each.ended and each.end > run.end - LOOKBACK_SECONDS}
    hung = [each for each in metrics.gauges("state_gpus") if each.labels.get("state") == HUNG and each.value > 0]
    gpus = {each.instance: each.value for each in hung if each.instance in current}
    if not (run.running and gpus):
        return None
    began = {each.instance: each.value for each in metrics.gauges("spin_since_timestamp_seconds")}
    culprits = {each.instance: each for each in metrics.gauges("hang_culprit")}
    hangs = {
        data.node_names[instance]: _hang(count, began.get(instance), culprits.get(instance), end=run.end)
        for instance, count in gpus.items()
    }
    by_node = {data.node_names[instance]: count for instance, count in gpus.items()}
    found = ongoing_hang(hangs, by_node, end=run.end, several_nodes=len(data.run.instance_runs) > 1)
    return None if found is None else replace(found, gpu_hours=None, unconfirmed_gpu_hours=None)


def _hang(count: float, began: float | None, culprit: VectorSample | None, *, end: float) -> Hang:
    """Return a node's part of a hang, as far as its series show it; in a crash loop nothing spins."""
    return Hang(
        since=end if began is None else began,
        count=round(count),
        culprit="" if culprit is None else describe_culprit(_finding(culprit.labels)),
        culprit_pid=0 if culprit is None else _finding(culprit.labels).pid,
        culprit_host="" if culprit is None else culprit.labels.get("host", ""),
        crash_loop=began is None,
    )


def _finding(labels: Mapping[str, str]) -> HangFinding:
    """Return the finding of which the daemon made these labels."""
    pid, sequence = (labels.get(name, "") for name in ("pid", "sequence"))
    return HangFinding(
        job_id=labels.get("job_id", ""),
        at=0,
        moving=False,
        pid=int(pid) if pid.isdecimal() else 0,
        sequence=int(sequence) if sequence.isdecimal() else None,
        rank=labels.get("rank", ""),
        host=labels.get("host", ""),
        gpu=labels.get("gpu", ""),
        collective=labels.get("collective", ""),
        stack=labels.get("stack", ""),
    )


def _training_totals(data: PrometheusRunData) -> ReportedTraining:
    metrics = data.metrics
    reached = [sample.value for sample in metrics.gauges("target_reached_timestamp_seconds")]
    totals = ReportedTraining(
        gpu_seconds=metrics.total("reported_gpu_seconds"),
        gpu_seconds_by_node=metrics.by_node("reported_gpu_seconds"),
        phase_seconds=metrics.by_label("phase", "run_seconds"),
        tokens=metrics.total("tokens"),
        padding_tokens=metrics.total("padding_tokens"),
        samples=metrics.total("samples"),
        steps=metrics.node_maximum("steps"),
        rework_steps=metrics.node_maximum("rework_steps"),
        checkpoints=metrics.node_maximum("checkpoints"),
        checkpoint_seconds=metrics.node_maximum("run_seconds", phase="checkpoint"),
        restarts=metrics.node_maximum("restarts"),
        recovery_seconds=metrics.node_maximum("recovery_seconds"),
        loss_events={
            event: metrics.node_maximum("loss_events", event=event) or 0.0
            for event in metrics.by_label("event", "loss_events")
        },
        step=metrics.latest("step"),
        world_size=metrics.latest("world_size"),
        bubble=metrics.latest("bubble_ratio"),
        loss=metrics.latest("loss"),
        loss_spread=metrics.latest("loss_spread_ratio"),
        lost_bytes_per_second=metrics.latest("tensor_parallel_lost_bytes_per_second"),
        target_at=min(reached, default=None),
    )
    return replace(totals, **_utilization(data)) if totals.gpu_seconds else totals


def _utilization(data: PrometheusRunData) -> dict[str, float | None]:
    mfu = {sample.instance: sample.value for sample in data.mean("reported_mfu_ratio")}
    hfu = {sample.instance: sample.value for sample in data.mean("reported_hfu_ratio")}
    return utilization_means(mfu, hfu, weights=data.metrics.by_instance("reported_gpu_seconds"))


def _busy_seconds(data: PrometheusRunData) -> Iterator[tuple[str, str, float]]:
    for sample in data.mean("rank_busy_seconds", series=8):
        yield sample.labels.get("rank", ""), data.node_names.get(sample.instance, ""), sample.value


def _serving_summary(data: PrometheusRunData, books: JobBooks) -> ServingSummary | None:
    """Return None if no engine reported tokens or requests."""
    metrics, requests = data.metrics, data.mean("requests", series=2)
    tokens, weights = metrics.by_label("kind", "engine_tokens"), metrics.by_instance("paid_seconds")
    if not tokens and not requests:
        return None
    generated = {
        counter.instance: counter.value
        for counter in metrics.counters("engine_tokens")
        if counter.labels.get("kind") == "generated"
    }
    summary = ServingSummary(
        engines=tuple(sorted({sample.labels.get("engine", "") for sample in metrics.gauges("engine_info")})),
        running=_sum_by_state(requests, "running"),
        waiting=_sum_by_state(requests, "waiting"),
        batch_fill=data.weighted_mean("batch_fill_ratio", weights=weights),
        kv_mean=data.weighted_mean("kv_cache_ratio", weights=weights),
        kv_most=max((sample.value for sample in data.maximum("kv_cache_ratio")), default=None),
        preemptions=metrics.total("preemptions"),
        tokens_per_pass=mean_tokens_per_pass(
            (generated[sample.instance], sample.value)
            for sample in data.mean("tokens_per_pass_ratio")
            if sample.instance in generated
        ),
        mbu=data.weighted_mean("mbu_ratio", weights=weights),
        latencies=latency_summaries(
            last=_latency_values(metrics.gauges("latency_seconds")),
            maximum=_latency_values(data.maximum("latency_seconds", series=12)),
        ),
        advice={
            name: seconds / 3600 for name, seconds in metrics.by_label("advice", "advice_seconds").items() if seconds
        },
    )
    return with_tokens(summary, tokens, books)


def _sum_by_state(samples: list[VectorSample], state: str) -> float | None:
    values = [sample.value for sample in samples if sample.labels.get("state") == state]
    return sum(values) if values else None


def _latency_values(samples: list[VectorSample]) -> Iterator[LatencyValue]:
    for sample in samples:
        yield sample.labels.get("kind", ""), sample.labels.get("percentile", ""), sample.value


def _identity(data: PrometheusRunData) -> JobIdentity:
    """Return the most common identity among the job's nodes."""
    most_common = Counter(identity_of(sample.labels) for sample in data.metrics.gauges("info")).most_common(1)
    identity = most_common[0][0] if most_common else identity_of({"job_id": data.job_query.job_id})
    return replace(identity, cluster=next(iter(data.node_names))[0])


def _activity_percentiles(data: PrometheusRunData) -> dict[str, float]:
    """Return the means of the percentiles over the run and all nodes."""
    paid_seconds = data.metrics.by_instance("paid_seconds")
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in data.mean("activity_ratio", series=3):
        pair = sample.value, paid_seconds.get(sample.instance, 0.0)
        pairs[sample.labels.get("percentile", "")].append(pair)
    means = {percentile: weighted_mean(values) for percentile, values in sorted(pairs.items())}
    return {percentile: mean for percentile, mean in means.items() if mean is not None}


def _unseen_notes(data: PrometheusRunData) -> Iterator[str]:
    run = data.run
    if run.previous_end is not None:
        yield earlier_run_note(run.previous_end)
    if names := sorted({data.node_names[each.instance] for each in run.instance_runs if _began_anew(data, each)}):
        yield f"daemons that began anew in the run: {', '.join(names)}; what they had counted before is added"
    for node in sorted(data.metrics.by_node("paid_seconds")):
        if unknown := _node_uncounted(data, node).unknown:
            yield unknown_note(node, unknown)
    if unsampled := sorted(set(data.metrics.by_node("paid_seconds")) - data.max_gpus.keys()):
        yield f"no scrape of {', '.join(unsampled)} met the job at work: it held at least as many GPUs as are shown"


def _began_anew(data: PrometheusRunData, run: InstanceRun) -> bool:
    """Whether its counter fell while the job was there, and not because the job left the node and returned."""
    *before, _ = _instance_segments(data, run)
    return not all(segment.end_known for segment in before)


def _quality_metrics(data: PrometheusRunData, books: JobBooks) -> Iterator[QualityMetric]:
    """Yield the job's quality metrics, each with all changes of its value."""
    points: dict[str, list[Point]] = defaultdict(list)
    for series in data.range_samples("quality"):
        points[series.labels.get("name", "")] += series.points
    starts: dict[str, Point] = {}
    for series in data.range_samples("quality_start"):
        name = series.labels.get("name", "")
        starts[name] = min(series.points[0], starts.get(name, series.points[0]))
    targets = {sample.labels.get("name", ""): sample.value for sample in data.metrics.gauges("quality_target")}
    cost, start_time = books.cost(books.seen), data.run.start
    for name in sorted(points):
        run = [(at - start_time, value) for at, value in sorted(points[name])]
        start = starts[name][1] if name in starts else run[0][1]
        values = [value for _, value in run]
        changes = tuple(next(equal) for _, equal in groupby(run, key=lambda point: point[1]))
        yield quality_metric(name, values, start=start, target=targets.get(name), cost=cost, series=changes)
