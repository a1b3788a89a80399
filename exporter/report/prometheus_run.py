"""Queries the series of one run of a job: last values of gauges, totals of counters, means, and how GPUs were held.

A counter that fell was restarted: the value before each fall is added. Two addresses of one node are one node.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from exporter.core.prices import NO_PRICE, EnergyTerms
from exporter.report.build import latest_maximum, sum_by_key, weighted_mean
from exporter.report.query import (
    LOOKBACK_SECONDS,
    MAX_SAMPLES_READ,
    SCRAPE_INTERVAL_SECONDS,
    InstanceKey,
    InstanceRun,
    JobQuery,
    PrometheusRun,
    RangeSamples,
    VectorSample,
    promql_string,
    range_duration,
    split_range,
)

_MAX_SUBQUERY_POINTS = 1000
_SCRAPE_LABELS = frozenset({"__name__", "cluster", "instance", "job"})
"""Labels that identify the scrape target, not the series."""


class CounterTotal(NamedTuple):
    """The increase of one daemon's counter in the run."""

    node: str
    instance: InstanceKey
    labels: dict[str, str]
    value: float


class RunMetrics:
    """Last values of gauges and increases of counters in the run, by name without the prefix `gpu_efficiency_job_`."""

    def __init__(self, gauges: Iterable[VectorSample], counters: Mapping[str, list[CounterTotal]]) -> None:
        """Take counters by name, without `gpu_efficiency_job_` and `_total`."""
        self._gauges, self._counters = list(gauges), counters

    def gauges(self, name: str) -> list[VectorSample]:
        """Return the last samples of a gauge."""
        return [sample for sample in self._gauges if sample.name == name]

    def latest(self, name: str) -> float | None:
        """Return the largest last value of all nodes."""
        return latest_maximum([sample.value for sample in self.gauges(name)])

    def counters(self, name: str) -> list[CounterTotal]:
        """Return the counter of each daemon."""
        return self._counters.get(name, [])

    def total(self, name: str) -> float | None:
        """Return the sum over all nodes; None if no daemon exports it."""
        counters = self.counters(name)
        return sum(counter.value for counter in counters) if counters else None

    def node_maximum(self, name: str, **labels: str) -> float | None:
        """Return the largest node's total, for what every node counts for the whole job."""
        counters = [counter for counter in self.counters(name) if labels.items() <= counter.labels.items()]
        return max(sum_by_key((counter.node, counter.value) for counter in counters).values(), default=None)

    def by_node(self, name: str) -> dict[str, float]:
        """Return the totals by node."""
        return sum_by_key((counter.node, counter.value) for counter in self.counters(name))

    def by_label(self, label: str, name: str) -> dict[str, float]:
        """Return the totals of all nodes by the value of a label."""
        return sum_by_key((counter.labels.get(label, ""), counter.value) for counter in self.counters(name))

    def by_instance(self, name: str) -> dict[InstanceKey, float]:
        """Return the totals by daemon."""
        return sum_by_key((counter.instance, counter.value) for counter in self.counters(name))


class PrometheusRunData:
    """Queries at once what every report needs, and on demand what only some reports need."""

    def __init__(self, job_query: JobQuery, run: PrometheusRun) -> None:
        self.job_query, self.run = job_query, run
        self.instance_count = len(run.instance_runs)
        """Number of daemons: about the number of series of a metric without labels of its own."""
        ends = {each.instance: each.end for each in run.instance_runs}
        gauges = self._last_samples(ends, job_query.selector("", '__name__=~"gpu_efficiency_job_.+"'))
        self.node_names = self._query_node_names(ends)
        self.restarted = self._query_restarted()
        """All samples of paid seconds of daemons whose counter fell: they began anew, or the job left and returned."""
        self._first_samples = self._query_first_samples()
        self._continued_from = self._find_continued()
        """By daemon: the instance whose counters it has resumed, and their value then."""
        self.metrics = RunMetrics(gauges, self._query_counters())

    def mean(self, name: str, *, series: int = 1) -> list[VectorSample]:
        """Return each series' mean of all samples of the run; `series` is their number per daemon."""
        return self._mean(self.job_query.job_selector(name), series=series)

    def _mean(self, query: str, *, series: int, step: float = 0) -> list[VectorSample]:
        start, end = self.run.query_start, self.run.query_end
        return self.job_query.mean(query, start, end, series=self.instance_count * series, step=step)

    def weighted_mean(self, name: str, *, weights: Mapping[InstanceKey, float]) -> float | None:
        """Return the weighted mean of a ratio over the run and all daemons."""
        return weighted_mean((sample.value, weights.get(sample.instance, 0.0)) for sample in self.mean(name))

    def maximum(self, name: str, *, series: int = 1) -> list[VectorSample]:
        """Return each series' maximum in the run."""
        selector, run = self.job_query.job_selector(name), self.run
        return self.job_query.maximum(selector, run.query_start, run.query_end, series=self.instance_count * series)

    def range_samples(self, name: str) -> list[RangeSamples]:
        """Return all samples of the run."""
        return self.job_query.range_samples(
            self.job_query.job_selector(name), self.run.query_start, self.run.query_end, series=self.instance_count
        )

    @cached_property
    def first_samples(self) -> dict[InstanceKey, tuple[float, float]]:
        """Each daemon's first sample of paid seconds, without the value resumed from another instance."""
        first_samples = dict(self._first_samples)
        for instance, (_, carried) in self._continued_from.items():
            first, paid_at_first = first_samples[instance]
            first_samples[instance] = first, max(0.0, paid_at_first - carried)
        return first_samples

    def _query_first_samples(self) -> dict[InstanceKey, tuple[float, float]]:
        """Read the first sample of each daemon that is stored; it may have counted long before."""
        paid, step = self.job_query.job_selector("paid_seconds_total"), self._resolution_seconds
        start, end = self.run.query_start, self.run.query_end
        recent = f"timestamp(last_over_time({paid}[{step}s]))"
        query = f"min by (cluster, instance) (min_over_time({recent}[{range_duration(start, end)}:{step}s]))"
        by_time: dict[float, set[InstanceKey]] = defaultdict(set)
        for sample in self.job_query.instant_query(query, end + step):  # the first step has no sample before the start
            by_time[sample.value].add(sample.instance)
        first_samples: dict[InstanceKey, tuple[float, float]] = {}
        for at, instances in by_time.items():
            begin = max(start, at - 2 * step)
            found = self.job_query.range_samples(paid, begin, min(at, end), series=self.instance_count)
            first_samples |= {series.instance: series.points[0] for series in found if series.instance in instances}
        return first_samples

    @cached_property
    def restarted_starts(self) -> dict[InstanceKey, list[tuple[float, float]]]:
        """Return all samples of the job's start on the daemons whose counter fell."""
        start, end = self.run.query_start, self.run.query_end
        return {
            instance: series.points
            for instance in self.restarted
            for series in self.job_query.range_samples(
                self.job_query.job_selector("start_timestamp_seconds", *_instance_matchers(instance)), start, end
            )
        }

    @cached_property
    def max_gpus(self) -> dict[str, float]:
        """Return the most GPUs the job held at once, by node."""
        gpus_held = f"sum by (cluster, instance) ({self.job_query.job_selector('state_gpus')})"
        whole = range_duration(self.run.query_start, self.run.query_end)
        query = f"max_over_time({gpus_held}[{whole}:{self._resolution_seconds}s])"
        samples = self.job_query.instant_query(query, self.run.query_end)
        most: dict[str, float] = {}
        for sample in samples:
            node = self.node_names.get(sample.instance)
            if node is not None:
                most[node] = max(most.get(node, 0.0), sample.value)
        return most

    def hourly_prices(self) -> list[VectorSample]:
        """Return the mean price of an hour of all GPUs the job held, by daemon and currency."""
        price = f"(sum by (cluster, instance, currency) ({self.job_query.job_selector('price_per_hour')}))"
        return self._mean(price, series=2, step=self._resolution_seconds)

    def gpu_hour_prices(self, instances: Collection[InstanceKey]) -> list[VectorSample]:
        """Return the last price of a GPU-hour of these daemons; the dearest of a node with several models."""
        unpriced = f"currency!={promql_string(NO_PRICE.currency)}"
        selector = self.job_query.metric_selector("price_per_gpu_hour", 'held="true"', unpriced)
        times = {each.instance: each.last_sample for each in self.run.instance_runs if each.instance in instances}
        dearest: dict[tuple[InstanceKey, str], VectorSample] = {}
        for sample in sorted(self._last_samples(times, selector), key=attrgetter("value")):
            dearest[sample.instance, sample.labels.get("currency", "")] = sample
        return list(dearest.values())

    @cached_property
    def mean_gpus(self) -> dict[InstanceKey, float]:
        """Return the mean number of GPUs or instances while the job held any, by daemon."""
        gpus_held = f"(sum by (cluster, instance) ({self.job_query.job_selector('state_gpus')}) > 0)"
        samples = self._mean(gpus_held, series=2, step=self._resolution_seconds)
        return {sample.instance: sample.value for sample in samples}

    @property
    def _resolution_seconds(self) -> int:
        """Resolution of subqueries in seconds."""
        return round(max(SCRAPE_INTERVAL_SECONDS, (self.run.query_end - self.run.query_start) / _MAX_SUBQUERY_POINTS))

    def energy_terms(self) -> EnergyTerms:
        """Return what a kilowatt-hour costs: the highest of its nodes."""
        query = f"last_over_time({self.job_query.metric_selector('price_per_kwh')}[5m])"
        samples = self.job_query.instant_query(query, self.run.end)
        of_nodes = (sample for sample in samples if sample.instance in self.node_names)
        price = max(of_nodes, key=attrgetter("value"), default=None)
        return EnergyTerms() if price is None else EnergyTerms(price.value, price.labels.get("currency", ""))

    def grams_co2_per_kwh(self) -> float | None:
        """Return the time-mean of the carbon intensity over the run: the highest of its nodes."""
        samples = self._mean(self.job_query.metric_selector("grams_co2_per_kwh"), series=1)
        return max((sample.value for sample in samples if sample.instance in self.node_names), default=None)

    def simulated(self) -> bool:
        """Whether any of its nodes is simulated."""
        query = f"last_over_time({self.job_query.metric_selector('simulated')}[5m]) == 1"
        samples = self.job_query.instant_query(query, self.run.end)
        return any(sample.instance in self.node_names for sample in samples)

    def gpu_models(self) -> tuple[str, ...]:
        """Return the models of the job's GPUs."""
        gpus_held = f"last_over_time({self.job_query.selector('gpu_efficiency_allocation_info')}[5m])"
        boards = f"last_over_time({self.job_query.metric_selector('gpu_info')}[5m])"
        query = f"group by (model) ({boards} and on (cluster, instance, uuid) {gpus_held})"
        samples = self.job_query.instant_query(query, self.run.end)
        return tuple(sorted(sample.labels.get("model", "") for sample in samples))

    def _find_continued(self) -> dict[InstanceKey, tuple[InstanceKey, float]]:
        """Find daemons that resumed from another instance of their node: they start with at least what it counted."""
        runs_by_node: dict[str, list[InstanceRun]] = defaultdict(list)
        for run in sorted(self.run.instance_runs, key=attrgetter("last_sample")):
            runs_by_node[self.node_names[run.instance]].append(run)
        continued: dict[InstanceKey, tuple[InstanceKey, float]] = {}
        for before, run in chain.from_iterable(map(pairwise, runs_by_node.values())):
            when, instance = before.last_sample, run.instance
            first = self._first_samples.get(instance) or self._first_sample_after(instance, when)
            paid = self.job_query.instant_query(self._paid(before.instance), when)
            carried = paid[0].value if paid else 0.0
            if first is not None and first[0] > when and first[1] >= carried > 0:
                self._first_samples[instance] = first
                continued[instance] = before.instance, carried
        return continued

    def _first_sample_after(self, instance: InstanceKey, when: float) -> tuple[float, float] | None:
        series = self.job_query.range_samples(self._paid(instance), when, self.run.query_end)
        return series[0].points[0] if series else None

    def _paid(self, instance: InstanceKey) -> str:
        return self.job_query.job_selector("paid_seconds_total", *_instance_matchers(instance))

    # -- queries --

    def _last_samples(self, times: Mapping[InstanceKey, float], selector: str) -> list[VectorSample]:
        """Return the last samples of each daemon's series up to its own end, within the lookback."""
        samples_found, wide = list[VectorSample](), range_duration(0, 2 * LOOKBACK_SECONDS)
        remaining = dict(sorted(times.items(), key=lambda item: -item[1]))
        while remaining:
            at = next(iter(remaining.values()))
            instances = {instance for instance, when in remaining.items() if when > at - LOOKBACK_SECONDS}
            samples = self.job_query.instant_query(f"last_over_time({selector}[{wide}])", at)
            samples_found += [sample for sample in samples if sample.instance in instances]
            remaining = {instance: when for instance, when in remaining.items() if instance not in instances}
        return samples_found

    def _query_node_names(self, ends: Mapping[InstanceKey, float]) -> dict[InstanceKey, str]:
        """Return the node name of each daemon; its address if no name is stored."""
        job_series = self.job_query.job_selector("start_timestamp_seconds")
        node_info = self.job_query.metric_selector("node_info")
        wide = range_duration(0, 2 * LOOKBACK_SECONDS)
        at = sorted(set(ends.values()))
        query = f"last_over_time({node_info}[{wide}]) and on (cluster, instance) last_over_time({job_series}[{wide}])"
        samples = [sample for when in _sparse_times(at) for sample in self.job_query.instant_query(query, when)]
        name_by_instance = {sample.instance: sample.labels.get("node", "") for sample in samples}
        return {instance: name_by_instance.get(instance) or instance[1] or "this node" for instance in ends}

    def _query_restarted(self) -> dict[InstanceKey, RangeSamples]:
        """Return all samples of paid seconds of daemons where they fell. Parts overlap, to see a fall between two."""
        start, end = self.run.query_start, self.run.query_end
        paid = self.job_query.job_selector("paid_seconds_total")
        restarted: set[InstanceKey] = set()
        for a, b in split_range(start, end, series=self.instance_count, max_samples=MAX_SAMPLES_READ):
            query = f"resets({paid}[{range_duration(a - LOOKBACK_SECONDS, b)}]) > 0"
            restarted |= {sample.instance for sample in self.job_query.instant_query(query, b)}
        return {
            instance: series
            for instance in sorted(restarted & self.node_names.keys())
            for series in self.job_query.range_samples(self._paid(instance), start, end)
        }

    def _query_counters(self) -> dict[str, list[CounterTotal]]:
        """Return the increase of each counter: its last value plus its value before each restart."""
        counters = '__name__=~"gpu_efficiency_job_.+_total"'
        last_samples = {each.instance: each.last_sample for each in self.run.instance_runs}
        steady = {instance: at for instance, at in last_samples.items() if instance not in self.restarted}
        samples = self._last_samples(steady, self.job_query.selector("", counters))
        for instance, series in self.restarted.items():
            selector = self.job_query.selector("", counters, *_instance_matchers(instance))
            restarts = [points[-1][0] for points in split_at_falls(series.points)[:-1]]
            for previous, at in pairwise([self.run.query_start, *restarts, last_samples[instance]]):
                lookback = range_duration(0, min(2 * LOOKBACK_SECONDS, at - previous - 0.001))
                samples += self.job_query.instant_query(f"last_over_time({selector}[{lookback}])", at)
        return self._counter_totals(samples)

    def _counter_totals(self, samples: Iterable[VectorSample]) -> dict[str, list[CounterTotal]]:
        values = [((sample.name, sample.instance, _own_labels(sample.labels)), sample.value) for sample in samples]
        last_values, totals = dict(values), sum_by_key(values)
        for name, instance, labels in totals:
            if instance in self._continued_from:
                carried = last_values.get((name, self._continued_from[instance][0], labels), 0.0)
                totals[name, instance, labels] = max(0.0, totals[name, instance, labels] - carried)
        counters: dict[str, list[CounterTotal]] = defaultdict(list)
        for (name, instance, labels), value in totals.items():
            counter = CounterTotal(self.node_names[instance], instance, dict(labels), value)
            counters[name.removesuffix("_total")].append(counter)
        return counters


def split_at_falls(points: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    """Split the samples of a counter where it fell."""
    falls = [number for number, ((_, high), (_, low)) in enumerate(pairwise(points), 1) if low < high]
    return [points[a:b] for a, b in pairwise([0, *falls, len(points)])]


def _instance_matchers(instance: InstanceKey) -> tuple[str, str]:
    """Return the matchers of one daemon."""
    return f"cluster={promql_string(instance[0])}", f"instance={promql_string(instance[1])}"


def _own_labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in labels.items() if key not in _SCRAPE_LABELS))


def _sparse_times(times: list[float]) -> Iterator[float]:
    """Yield so many of the ascending times that each is within the lookback of one yielded."""
    while times:
        last = times[-1]
        yield last
        times = [when for when in times if when <= last - LOOKBACK_SECONDS]
