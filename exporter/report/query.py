"""Queries the series of one job in Prometheus, and finds when and on which instances the job ran.

Splits ranges until each response is small enough. A daemon exports the series of an ended job for some minutes with
constant counters: the run ends at the first sample that has the last value.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

from msgspec import Struct

from exporter.core.model import display_job_id, parse_display_id
from exporter.report.job_names import members_message
from exporter.report.model import JobIdentity, ReportError

SCRAPE_INTERVAL_SECONDS = 15.0
"""Usual scrape interval."""
MAX_SAMPLES_RETURNED = 500_000
"""Maximum samples in one response, about 15 MB."""
MAX_SAMPLES_READ = 20_000_000
"""Maximum samples that one query reads; Prometheus rejects more than 50 million (`--query.max-samples`)."""
LOOKBACK_SECONDS = 300.0
"""Maximum age of a series' last sample."""
_RANGE_GAP_SECONDS = 0.001
"""Seconds between two parts of a range."""
IDENTITY_LABELS = {
    "name": "name", "user": "user", "account": "account", "team": "team", "partition": "partition",
    "namespace": "workload_namespace", "workload_class": "workload_class",
}  # fmt: skip
"""Fields of JobIdentity, and the labels of `job_info` that hold them."""
_MEMBER_LABELS = ("array_id", "array_task_id", "het_job_offset")
"""Labels of `job_info` that give a Slurm job's place in an array or a heterogeneous job."""
InstanceKey = tuple[str, str]
"""Cluster and instance: one daemon under one address."""


class QueriedSeries(Protocol):
    """A series of a response: a range vector has `values`, an instant vector `value`, with times in Unix seconds."""

    @property
    def metric(self) -> dict[str, str]:
        """Labels of the series."""

    @property
    def values(self) -> tuple[tuple[float, str], ...]:
        """(Unix seconds, value) of each sample of a range vector."""

    @property
    def value(self) -> tuple[float, str]:
        """(Unix seconds, value) of an instant vector."""


class QueryServer(Protocol):
    """Evaluates PromQL instant queries."""

    def instant_query(self, query: str, at: float) -> Sequence[QueriedSeries]:
        """Evaluate a query at a time in Unix seconds and return all series."""


class VectorSample(NamedTuple):
    """One value with its labels."""

    labels: dict[str, str]
    value: float

    @property
    def name(self) -> str:
        """The metric name without `gpu_efficiency_job_`."""
        return self.labels.get("__name__", "").removeprefix("gpu_efficiency_job_")

    @property
    def instance(self) -> InstanceKey:
        """Cluster and instance from which it was scraped."""
        return instance_of(self.labels)


class RangeSamples(NamedTuple):
    """All samples of a series in order of time: Unix seconds, value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def instance(self) -> InstanceKey:
        """Cluster and instance from which it was scraped."""
        return instance_of(self.labels)


def instance_of(labels: dict[str, str]) -> InstanceKey:
    """Return the labels that identify a daemon: cluster and instance."""
    return labels.get("cluster", ""), labels.get("instance", "")


def without_braces(matchers: str) -> str:
    """Return label matchers that may be given as a whole selector."""
    return matchers.strip().removeprefix("{").removesuffix("}").strip(", ")


class MetricQuery:
    """Queries series of gpu-efficiency. `matchers` restrict all selectors; braces around them are ignored."""

    def __init__(self, server: QueryServer, *, matchers: str = "") -> None:
        self._server = server
        self.matchers = without_braces(matchers)

    def metric_selector(self, name: str, *matchers: str) -> str:
        """Return the selector of `gpu_efficiency_NAME`."""
        return f"gpu_efficiency_{name}{{{self._joined_matchers(*matchers)}}}"

    def _joined_matchers(self, *matchers: str) -> str:
        return ",".join(filter(None, (*matchers, self.matchers)))

    def instant_query(self, query: str, at: float) -> list[VectorSample]:
        """Return the value of each series at a time in Unix seconds."""
        return [VectorSample(row.metric, float(row.value[1])) for row in self._server.instant_query(query, at)]


class JobQuery(MetricQuery):
    """Queries the series of one job."""

    def __init__(self, server: QueryServer, job_id: str, *, matchers: str = "") -> None:
        super().__init__(server, matchers=matchers)
        self.job_id = job_id

    def job_selector(self, name: str, *matchers: str) -> str:
        """Return the selector of `gpu_efficiency_job_NAME` for the job."""
        return self.selector(f"gpu_efficiency_job_{name}", *matchers)

    def selector(self, name: str, *matchers: str) -> str:
        """Return a selector with the job's ID; with an empty name, `matchers` select the metrics."""
        return f"{name}{{{self._joined_matchers(f'job_id={promql_string(self.job_id)}', *matchers)}}}"

    def range_samples(self, selector: str, start: float, end: float, *, series: int = 1) -> list[RangeSamples]:
        """Return every sample from `start` to `end`; `series` is the expected number of series."""
        points: dict[frozenset[tuple[str, str]], dict[float, float]] = defaultdict(dict)
        for a, b in split_range(start, end, series=series, max_samples=MAX_SAMPLES_RETURNED):
            for row in self._server.instant_query(f"{selector}[{range_duration(a, b)}]", b):
                points[frozenset(row.metric.items())] |= {at: float(text) for at, text in row.values}
        return [RangeSamples(dict(key), sorted(samples.items())) for key, samples in points.items()]

    def maximum(self, selector: str, start: float, end: float, *, series: int = 1) -> list[VectorSample]:
        """Return the maximum of each series."""
        return self._over_time("max_over_time", selector, start, end, series=series)

    def mean(self, selector: str, start: float, end: float, *, series: int = 1, step: float = 0) -> list[VectorSample]:
        """Return the mean of all samples of each series; if `selector` is an expression, `step` is its resolution."""
        sums = self._over_time("sum_over_time", selector, start, end, series=series, step=step)
        counts = self._over_time("count_over_time", selector, start, end, series=series, step=step)
        count_of = {frozenset(count.labels.items()): count.value for count in counts}
        return [VectorSample(each.labels, each.value / count_of[frozenset(each.labels.items())]) for each in sums]

    def _over_time(
        self, function: str, selector: str, start: float, end: float, *, series: int, step: float = 0
    ) -> list[VectorSample]:
        values: dict[frozenset[tuple[str, str]], float] = {}
        for a, b in split_range(start, end, series=series, max_samples=MAX_SAMPLES_READ):
            resolution = f":{math.ceil(step)}s" if step else ""
            for sample in self.instant_query(f"{function}({selector}[{range_duration(a, b)}{resolution}])", b):
                key = frozenset(sample.labels.items())
                pair = (values[key], sample.value) if key in values else (sample.value,)
                values[key] = max(pair) if function == "max_over_time" else sum(pair)
        return [VectorSample(dict(key), value) for key, value in values.items()]


def identity_of(labels: Mapping[str, str]) -> JobIdentity:
    """Return the identity in the labels of `job_info`."""
    job_id = labels.get("job_id", "")
    return JobIdentity(
        job_id=job_id,
        display_id=display_job_id(job_id, *(labels.get(label, "") for label in _MEMBER_LABELS)),
        cluster=labels.get("cluster", ""),
        **{field: labels.get(label, "") for field, label in IDENTITY_LABELS.items()},
    )


def jobs_named(metric_query: MetricQuery, name: str, at: float, *, since: float) -> list[JobIdentity]:
    """Return the jobs with this id, or which users know by it, in the `since` seconds before `at`."""
    matchers: list[tuple[str, ...]] = [(f"job_id={promql_string(name)}",)]
    if (place := parse_display_id(name)) is not None:
        pairs = zip(_MEMBER_LABELS, place, strict=True)
        matchers.append(tuple(f"{label}={promql_string(value)}" for label, value in pairs))
    return _stored_jobs(metric_query, matchers, at, since)


def jobs_of_array(metric_query: MetricQuery, array_id: str, at: float, *, since: float) -> list[JobIdentity]:
    """Return the jobs of an array or heterogeneous job in the `since` seconds before `at`."""
    return _stored_jobs(metric_query, [(f"array_id={promql_string(array_id)}",)], at, since)


def _stored_jobs(
    metric_query: MetricQuery, matchers: Sequence[tuple[str, ...]], at: float, since: float
) -> list[JobIdentity]:
    selectors = [metric_query.metric_selector("job_info", *some) for some in matchers]
    series = " or ".join(f"last_over_time({selector}[{range_duration(0, since)}])" for selector in selectors)
    return [identity_of(sample.labels) for sample in metric_query.instant_query(series, at)]


def promql_string(text: str) -> str:
    """Quote a PromQL string."""
    return json.dumps(text, ensure_ascii=False)


def range_duration(start: float, end: float) -> str:
    """Format the length of a range as a PromQL duration."""
    return f"{max(1, round((end - start) * 1000))}ms"


def split_range(start: float, end: float, *, series: int, max_samples: int) -> Iterator[tuple[float, float]]:
    """Split [start, end] into parts of about `max_samples` samples."""
    length = max(60.0, max_samples * SCRAPE_INTERVAL_SECONDS / max(1, series))
    at = start
    while at + length + _RANGE_GAP_SECONDS < end:
        yield at, at + length
        at += length + _RANGE_GAP_SECONDS
    yield at, end


DAY_SECONDS = 86400.0
_LOOKBACK_STEPS = (600.0, 6 * 3600.0, 2 * DAY_SECONDS, 14 * DAY_SECONDS)
"""Ranges in which a job is searched, tried in this order: a short one is cheap."""
_MAX_SUBQUERY_POINTS = 1000
_TAIL_SECONDS = 900.0
"""Longer than a daemon exports an ended job."""
_SAME_RUN_SECONDS = 60.0
"""Instance runs closer than this are one run."""


class InstanceRun(Struct, frozen=True, kw_only=True):
    """A job's time on one daemon, Unix seconds."""

    instance: InstanceKey
    start: float
    end: float
    """When its paid seconds last increased."""
    last_sample: float
    """Time of the last sample."""
    scrape_interval: float
    """Seconds between two samples."""

    @property
    def ended(self) -> bool:
        """Whether the daemon observed the job's end."""
        return self.last_sample > self.end


class PrometheusRun(Struct, frozen=True, kw_only=True):
    """One run of a job on all its nodes, Unix seconds."""

    start: float
    end: float
    running: bool
    instance_runs: tuple[InstanceRun, ...]
    previous_end: float | None = None
    """End of the previous run with the same job ID."""

    @property
    def query_start(self) -> float:
        """Start of queries: a little before the run, as clocks differ."""
        return self.start - _SAME_RUN_SECONDS

    @property
    def query_end(self) -> float:
        """End of queries."""
        return max(instance_run.last_sample for instance_run in self.instance_runs)


def find_run(job_query: JobQuery, at: float, *, since: float) -> PrometheusRun:
    """Return the last run that began in the `since` seconds before `at`. Raises ReportError if there is none."""
    starts = _find_starts(job_query, at, since)
    clusters = sorted({instance[0] for instance in starts})
    if len(clusters) > 1:
        raise ReportError(
            f"job {job_query.job_id} is stored in several clusters ({', '.join(clusters)}): pick one with --match"
            f" 'cluster=\"{clusters[0]}\"'"
        )
    instance_runs = sorted(_instance_runs(job_query, starts, at), key=lambda each: -each.last_sample)
    if not instance_runs:
        raise ReportError(
            f"job {job_query.job_id} has a start time but no paid seconds: its daemon is too old, update it"
        )
    return _last_run(instance_runs, at)


def _last_run(instance_runs: list[InstanceRun], at: float) -> PrometheusRun:
    """Join the newest instance run with those adjacent to it; the others are earlier runs."""
    start, same_run = instance_runs[0].start, list[InstanceRun]()
    for instance_run in instance_runs:
        if instance_run.last_sample >= start - _SAME_RUN_SECONDS:
            same_run.append(instance_run)
            start = min(start, instance_run.start)
    earlier_ends = [each.end for each in instance_runs if each not in same_run]
    return PrometheusRun(
        start=start,
        end=max(each.end for each in same_run),
        running=any(not each.ended and at - each.last_sample <= LOOKBACK_SECONDS for each in same_run),
        instance_runs=tuple(same_run),
        previous_end=max(earlier_ends, default=None),
    )


def _find_starts(job_query: JobQuery, at: float, since: float) -> dict[InstanceKey, float]:
    """Return when the job got its first GPU, by daemon, searching ever longer ranges."""
    for lookback in (*(seconds for seconds in _LOOKBACK_STEPS if seconds < since), since):
        starts = _starts_within(job_query, at, lookback)
        if starts:
            needed = min(since, at - min(starts.values()) + _SAME_RUN_SECONDS)
            return _starts_within(job_query, at, needed) if needed > lookback else starts
    raise ReportError(_no_job_message(job_query, at, since))


def _starts_within(job_query: JobQuery, at: float, lookback: float) -> dict[InstanceKey, float]:
    """Return the starts in a range; a subquery, because Prometheus then loads only the samples of one step."""
    step = range_duration(0, max(60.0, lookback / _MAX_SUBQUERY_POINTS))
    recent = f"last_over_time({job_query.job_selector('start_timestamp_seconds')}[{step}])"
    rows = job_query.instant_query(f"{recent} or last_over_time({recent}[{range_duration(0, lookback)}:{step}])", at)
    return {row.instance: row.value for row in rows if row.value <= at}


def _no_job_message(job_query: JobQuery, at: float, since: float) -> str:
    stored = job_query.instant_query(f"count(last_over_time({job_query.metric_selector('build_info')}[1h]))", at)
    if job_query.job_id.isdigit():
        members = members_message(job_query.job_id, jobs_of_array(job_query, job_query.job_id, at, since=since))
        if members:
            return members
    if stored:
        return (
            f"no job {job_query.job_id} is stored there in the {since / DAY_SECONDS:g} days before: is the id as"
            " gpu_efficiency_job_info has it (Kubernetes: namespace/kind/name)? Try --since, --at or --match"
        )
    return (
        "nothing of gpu-efficiency is stored there in the hour before: does that Prometheus scrape the daemons? Try"
        " --at with a time at which it did, or another --match"
    )


def _instance_runs(job_query: JobQuery, starts: dict[InstanceKey, float], at: float) -> Iterator[InstanceRun]:
    """Yield one for each daemon whose paid seconds are stored."""
    lookback = at - min(starts.values()) + _SAME_RUN_SECONDS
    step = max(SCRAPE_INTERVAL_SECONDS, lookback / _MAX_SUBQUERY_POINTS)
    for last_seen, instances in _instances_by_last_sample(job_query, at, lookback, step).items():
        tail = _TAIL_SECONDS + step
        for samples in _tail_samples(job_query, instances, min(last_seen, at), tail, lookback):
            yield _instance_run(samples, starts[samples.instance])


def _instances_by_last_sample(
    job_query: JobQuery, at: float, lookback: float, step: float
) -> dict[float, set[InstanceKey]]:
    """Group daemons by the time of their last sample of the job, rounded up to one step."""
    inner = f"timestamp(last_over_time({job_query.job_selector('paid_seconds_total')}[{range_duration(0, step)}]))"
    query = (
        "max by (cluster, instance)"
        f" (max_over_time({inner}[{range_duration(0, lookback + 2 * step)}:{range_duration(0, step)}]))"
    )
    instances: dict[float, set[InstanceKey]] = defaultdict(set)
    for row in job_query.instant_query(query, at + step):
        instances[row.value].add(row.instance)
    return instances


def _tail_samples(
    job_query: JobQuery, instances: set[InstanceKey], last_seen: float, tail: float, lookback: float
) -> Iterator[RangeSamples]:
    """Yield the last samples of daemons, back to before their last increase."""
    remaining = instances
    while remaining:
        series = job_query.range_samples(
            job_query.job_selector("paid_seconds_total"), last_seen - tail, last_seen, series=len(remaining)
        )
        for samples in series:
            if samples.instance in remaining and (samples.points[0][1] != samples.points[-1][1] or tail >= lookback):
                remaining = remaining - {samples.instance}
                yield samples
        if tail >= lookback:
            return
        tail *= 4


def _instance_run(samples: RangeSamples, start: float) -> InstanceRun:
    gaps = [b - a for (a, _), (b, _) in pairwise(samples.points)]
    return InstanceRun(
        instance=samples.instance,
        start=start,
        end=last_increase(samples.points),
        last_sample=samples.points[-1][0],
        scrape_interval=median(gaps or [SCRAPE_INTERVAL_SECONDS]),
    )


def last_increase(points: Sequence[tuple[float, float]]) -> float:
    """Return the time of the first sample with the last value."""
    end, last = points[-1]
    for at, value in reversed(points):
        if value != last:
            break
        end = at
    return end
