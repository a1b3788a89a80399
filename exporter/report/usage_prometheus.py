"""Reads the GPU time of many jobs, and of unallocated GPUs, from Prometheus; needs no recording rule.

The growth of a counter is the difference of its samples, so that periods add up; `increase` is used only after a
restart. If one query would read too many samples, time is split by leak with recording rules, if there are any.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.prices import EnergyTerms
from exporter.report.build import sum_by_key
from exporter.report.energy import MeanIntensity
from exporter.report.model import JobIdentity, ReportError
from exporter.report.query import (
    DAY_SECONDS,
    LOOKBACK_SECONDS,
    MAX_SAMPLES_READ,
    SCRAPE_INTERVAL_SECONDS,
    InstanceKey,
    MetricQuery,
    QueryServer,
    VectorSample,
    identity_of,
    promql_string,
    range_duration,
)
from exporter.report.scrape_gaps import BeganWithin, ScrapeGaps
from exporter.report.summary import FleetUsage
from exporter.report.usage import NOT_SPLIT, Period, UsageRecord

LEAK_SERIES_FACTOR = 30
"""Number of series by leak for each series of their total."""
_READS_PER_SAMPLE = 4
"""How often a query reads each sample."""
UNSPLIT_LEAK = "unresolved"
"""The leak of time that no recording rule covers."""
LabelValues = tuple[str, ...]
_INSTANCE_LABELS = "cluster, instance"


def growth_query(selector: str, start: float, end: float, *, lookback: float, older: str, on: str) -> str:
    """Return a query for the growth of each counter from `start` to `end`, to be evaluated at `end`.

    A sample up to `lookback` seconds before the start is the value at the start. `older` is a query for the series that
    existed before the start, matched by the labels `on`.
    """
    duration, before = range_duration(start, end), range_duration(0, lookback)
    last = f"last_over_time({selector}[{duration}])"
    previous_value = f"last_over_time({selector}[{before}] offset {duration})"
    fell = f"(resets({selector}[{range_duration(start - lookback, end)}]) > 0)"
    first = f"min_over_time({selector}[{duration}])"
    known = f"(({last} - {previous_value}) unless {fell})"
    new = f"({last} unless {previous_value} unless {fell} unless on ({on}) {older})"
    late = f"((({last} - {first}) unless {previous_value} unless {fell}) and on ({on}) {older})"
    increased_again = f"(increase({selector}[{duration}]) and {fell})"
    return f"({known} or {new} or {late} or {increased_again})"


class TimeCounters(NamedTuple):
    """Selectors and labels of the counters to read."""

    by_leak: str
    paid: str
    """The same time in one series instead of one for each leak."""
    recorded: str
    """Selector of a recording rule's series by leak."""
    owner_labels: LabelValues
    """Labels that identify the holder of the time."""
    recorded_owner_labels: LabelValues
    """The subset of `owner_labels` that the recording rule keeps."""
    split_labels: LabelValues
    """Labels by which time is split; the last one is the leak."""
    start_metric: str
    """Selector of a gauge: the holder's start, Unix seconds; empty if it is always before the period."""
    daemon_start_metric: str = ""
    """Selector of a gauge: the daemon's start, Unix seconds."""


class EnergyRates(NamedTuple):
    """What a daemon's energy costs and emits, on average over a period."""

    terms: EnergyTerms = EnergyTerms()
    intensity: MeanIntensity = MeanIntensity(None, 0.0)


class CounterQuery(MetricQuery):
    """Reads the growth of counters of time."""

    def __init__(self, server: QueryServer, *, matchers: str) -> None:
        super().__init__(server, matchers=matchers)
        self._interval = SCRAPE_INTERVAL_SECONDS
        self._gaps = ScrapeGaps(server, matchers=matchers, lookback=self._lookback)
        self.used_recording_rules = False
        """Whether any time was split with recording rules."""

    def _seconds(self, counters: TimeCounters, period: Period) -> Iterator[tuple[LabelValues, float]]:
        """Yield seconds by owner and split labels; the same labels may occur several times."""
        samples = self._count_samples(counters.paid, period)
        period_parts = list(self._split_period(period, samples * LEAK_SERIES_FACTOR))
        shares = self._recorded_shares(counters, period) if len(period_parts) > 1 else {}
        if not shares:
            labels = (*counters.owner_labels, *counters.split_labels)
            growth = self._growth(counters.by_leak, labels, counters, period, period_parts)
            yield from ((_label_values(sample, labels), sample.value) for sample in growth)
            return
        self.used_recording_rules = True
        unsplit = {("true",) * (len(counters.split_labels) - 1) + (UNSPLIT_LEAK,): 1.0}
        parts = list(self._split_period(period, samples))
        for sample in self._growth(counters.paid, counters.owner_labels, counters, period, parts):
            owner = _label_values(sample, counters.owner_labels)
            split = shares.get(_label_values(sample, counters.recorded_owner_labels), unsplit)
            yield from (((*owner, *into), sample.value * share) for into, share in split.items())

    def _sums(self, counter: str, counters: TimeCounters, period: Period) -> Iterator[tuple[LabelValues, float]]:
        """Yield the growth of another counter by owner; the same owner may occur several times."""
        parts = list(self._split_period(period, self._count_samples(counter, period)))
        for sample in self._growth(counter, counters.owner_labels, counters, period, parts, of_time=False):
            yield _label_values(sample, counters.owner_labels), sample.value

    def _count_samples(self, selector: str, period: Period) -> float:
        count = f"sum(count_over_time({selector}[{range_duration(*period)}]))"
        return sum(sample.value for sample in self.instant_query(count, period.end))

    def _growth(
        self,
        counter: str,
        labels: LabelValues,
        counters: TimeCounters,
        period: Period,
        parts: Sequence[Period],
        *,
        of_time: bool = True,
    ) -> Iterator[VectorSample]:
        for part in parts:
            yield from self._growth_in_part(counter, labels, counters, part)
        began_within = self._began_within(counters, parts) if counters.start_metric else None
        yield from self._gaps.growth(counter, labels, self._gaps.shares(period, parts), began_within, of_time=of_time)

    def _began_within(self, counters: TimeCounters, parts: Sequence[Period]) -> BeganWithin:
        """Return which holders that began within a gap no part counts as new ones."""

        def older(gap_end: float) -> str:
            part = next((part for part in parts if gap_end - LOOKBACK_SECONDS < part.end), None)
            if part is None:  # the gap ends after the report
                began = f"last_over_time({counters.start_metric}[{range_duration(0, LOOKBACK_SECONDS)}])"
                return f"({began} < {self._gaps.report_end!r})"
            return self._older_query(counters, part)

        return BeganWithin(counters.start_metric, ", ".join(counters.owner_labels), older)

    @property
    def _lookback(self) -> float:
        return max(3600.0, 4 * self._interval)

    def _growth_in_part(
        self, counter: str, labels: LabelValues, counters: TimeCounters, part: Period
    ) -> list[VectorSample]:
        older = f"count_over_time({counter}[{range_duration(*part)}])"
        if counters.start_metric:
            older = self._older_query(counters, part)
        on = ", ".join(counters.owner_labels)
        growth = growth_query(counter, *part, lookback=self._lookback, older=older, on=on)
        return self.instant_query(f"sum by ({', '.join(labels)}) ({growth}) > 0", part.end)

    def _older_query(self, counters: TimeCounters, part: Period) -> str:
        """Return a query for holders that started before the part, or before their daemon, which may have resumed."""
        range_of_part = f"[{range_duration(*part)}] @ {part.end!r}"
        began = f"last_over_time({counters.start_metric}{range_of_part})"
        daemon = f"max by ({_INSTANCE_LABELS}) (last_over_time({counters.daemon_start_metric}{range_of_part}))"
        return f"({began} < {part.start!r} or {began} < on ({_INSTANCE_LABELS}) group_left () {daemon})"

    def _recorded_shares(self, counters: TimeCounters, period: Period) -> dict[LabelValues, dict[LabelValues, float]]:
        """Return the share of each split by owner; empty if there is no such rule."""
        labels = (*counters.recorded_owner_labels, *counters.split_labels)
        query = f"sum by ({', '.join(labels)}) (sum_over_time({counters.recorded}[{range_duration(*period)}]))"
        sums: dict[LabelValues, dict[LabelValues, float]] = defaultdict(dict)
        for sample in self.instant_query(query, period.end):
            owner = _label_values(sample, counters.recorded_owner_labels)
            sums[owner][_label_values(sample, counters.split_labels)] = sample.value
        return {key: _normalized(amounts) for key, amounts in sums.items()}

    def _split_period(self, period: Period, samples: float) -> Iterator[Period]:
        """Split a period into parts in each of which a query reads at most MAX_SAMPLES_READ samples."""
        number = max(1, math.ceil(samples * _READS_PER_SAMPLE / MAX_SAMPLES_READ))
        length = max(4 * self._interval, (period.end - period.start) / number)
        start = period.start
        while start + 1.5 * length < period.end:
            yield Period(start, start + length)
            start += length
        yield Period(start, period.end)


def _label_values(sample: VectorSample, labels: Iterable[str]) -> LabelValues:
    return tuple(sample.labels.get(label, "") for label in labels)


def _normalized(amounts: dict[LabelValues, float]) -> dict[LabelValues, float]:
    total = sum(amounts.values())
    return {key: value / total for key, value in amounts.items() if total > 0}


_JOBS_PER_QUERY = 200
"""Number of job IDs in one query."""
_MIN_PEAK_GRAIN_SECONDS = 300.0
"""Minimum range, in seconds, of the means of which the peak is taken."""
_UNATTRIBUTED_SHARE = 0.01
"""Share of a node's allocated time above which time that no job's series cover is reported."""
ProgressCallback = Callable[[float, float], None]
MoneyByCurrency = dict[str, float]


class UsageFilter(Struct, frozen=True, kw_only=True):
    """Selects jobs by owner; empty fields match all."""

    user: str = ""
    account: str = ""
    namespace: str = ""
    team: str = ""

    @property
    def matchers(self) -> str:
        """Matchers of `job_info`."""
        own = {"user": self.user, "account": self.account, "workload_namespace": self.namespace, "team": self.team}
        return ",".join(f"{label}={promql_string(value)}" for label, value in own.items() if value)

    def selects(self, identity: JobIdentity) -> bool:
        """Whether the owner is selected."""
        return all(getattr(self, field) in ("", getattr(identity, field)) for field in self.__struct_fields__)

    def __str__(self) -> str:
        chosen = [f"{field} {getattr(self, field)}" for field in self.__struct_fields__ if getattr(self, field)]
        return ", ".join(chosen) or "all"


class StoredUsage(Struct, frozen=True, kw_only=True):
    """The usage that Prometheus has stored of a time range."""

    usage: tuple[UsageRecord, ...]
    known_period: Period
    """The part of the range for which anything is stored."""
    fleet: FleetUsage | None
    """None if jobs are filtered."""
    daemon_restarts: int
    """Number of daemon restarts."""
    from_recording_rules: bool
    """Whether recording rules were used to split time by leak."""
    gaps: int = 0
    """Number of daemons that were not scraped for long when a period began or ended."""
    simulated: bool = False
    """Whether any daemon at the end of the range serves a simulated node."""


class PrometheusUsage(CounterQuery):
    """Queries the usage of a time range. `matchers` restrict all selectors."""

    def __init__(self, server: QueryServer, usage_filter: UsageFilter, *, matchers: str = "") -> None:
        super().__init__(server, matchers=matchers)
        self._filter, self.daemon_restarts = usage_filter, 0

    def read(self, times: Sequence[Period], *, progress: ProgressCallback = lambda _, __: None) -> StoredUsage:
        """Read consecutive periods. Raises ReportError if nothing is stored."""
        known_period = self._known_period(Period(times[0].start, times[-1].end))
        self._gaps = ScrapeGaps(self._server, matchers=self.matchers, lookback=self._lookback)
        self._gaps.assign(times, known_period)
        usage: list[UsageRecord] = []
        for number, period in enumerate(times):
            progress(number, len(times))
            if period.end > known_period.start and period.start < known_period.end:
                usage += self._usage(number, period)
        fleet = None if self._filter.matchers else self._fleet_usage(usage, known_period)
        simulated = self._single_value(
            f"max(last_over_time({self.metric_selector('simulated')}[1h]))", known_period.end
        )
        return StoredUsage(
            usage=tuple(usage), known_period=known_period, fleet=fleet, daemon_restarts=self.daemon_restarts,
            from_recording_rules=self.used_recording_rules, simulated=bool(simulated),
            gaps=len({gap.instance for gap in self._gaps.found}),
        )  # fmt: skip

    def _single_value(self, query: str, at: float) -> float | None:
        return next((sample.value for sample in self.instant_query(query, at)), None)

    # -- the time that is stored --

    def _known_period(self, requested: Period) -> Period:
        """Return the time from the first sample to the last, extended to the requested limits if within 2 scrapes."""
        days = list(_split_days(requested))
        first = next((at for day in days if (at := self._tick_time("min", day)) is not None), None)
        last = next((at for day in days[::-1] if (at := self._tick_time("max", day)) is not None), None)
        if first is None or last is None:
            raise ReportError(
                "nothing of gpu-efficiency is stored there in that time: does that Prometheus scrape the daemons? Try"
                " --at with a time at which it did, a longer --since, or another --match"
            )
        day = Period(first - 1, min(last, first + DAY_SECONDS))
        counts = f"count_over_time({self.metric_selector('ticks_total')}[{range_duration(*day)}])"
        sample_count = self._single_value(f"max({counts})", day.end) or 1.0
        self._interval = max(1.0, (day.end - first) / max(1.0, sample_count - 1))
        tolerance = 2 * self._interval
        return Period(
            requested.start if first - requested.start <= tolerance else first,
            requested.end if requested.end - last <= tolerance else last,
        )

    def _tick_time(self, extreme: str, day: Period) -> float | None:
        """Return the time of the first or last sample on a day, by Prometheus' clock: a node's clock may be wrong."""
        when = f"timestamp({self.metric_selector('ticks_total')})"
        coarse = f"{extreme}_over_time({when}[{range_duration(*day)}:{range_duration(0, LOOKBACK_SECONDS)}])"
        approximate = self._single_value(f"{extreme}({extreme}({coarse}) or {extreme}({when}))", day.end)
        if approximate is None:
            return None
        # The steps of a subquery are up to the lookback apart: the first sample is before one, the last after one.
        fine = f"{extreme}_over_time({when}[{range_duration(0, LOOKBACK_SECONDS)}:5s])"
        at = approximate if extreme == "min" else min(day.end, approximate + LOOKBACK_SECONDS)
        exact = self._single_value(f"{extreme}({fine})", at) or approximate
        return max(day.start, min(approximate, exact)) if extreme == "min" else max(approximate, exact)

    @property
    def _peak_grain(self) -> float:
        return max(_MIN_PEAK_GRAIN_SECONDS, 4 * self._interval)

    # -- a period --

    def _usage(self, number: int, period: Period) -> Iterator[UsageRecord]:
        identities, prices = self._identities(period), self._gpu_hour_prices(period)
        rates, job_joules = self._energy_rates(period), self._job_joules(period, identities)
        held: dict[InstanceKey, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (instance_key, job_id), seconds in self._job_seconds(period, identities).items():
            for leak, value in seconds.items():
                held[instance_key][leak] += value
            identity = identities.get((instance_key[0], job_id), JobIdentity(job_id=job_id, cluster=instance_key[0]))
            money = _money(seconds, prices.get((instance_key, "true"), {}))
            record = UsageRecord(period=number, identity=identity, seconds=seconds, money=money)
            yield _with_energy(record, job_joules.get((instance_key, job_id), 0.0), rates[instance_key])
        if self._filter.matchers:
            return
        joules = self._node_joules(period)
        for (instance_key, _), spent in job_joules.items():
            joules[instance_key] -= spent
        for instance_key, share, record in self._unassigned_usage(number, period, held, prices):
            yield _with_energy(record, max(0.0, share * joules[instance_key]), rates[instance_key])

    def _identities(self, period: Period) -> dict[tuple[str, str], JobIdentity]:
        """Return the selected jobs by cluster and job ID, each with the owner that it had last in the period."""
        found = self._job_infos(self._filter.matchers, period)
        if self._filter.matchers:  # a selected job may have got another owner, who is not selected
            matchers = self._job_matchers(sorted({identity.job_id for identity in found}))
            found = [identity for matcher in matchers for identity in self._job_infos(matcher, period)]
        owners: dict[tuple[str, str], set[JobIdentity]] = defaultdict(set)
        for identity in found:
            owners[identity.cluster, identity.job_id].add(identity)
        changed = sorted({job for (_, job), of_job in owners.items() if len(of_job) > 1})
        last = {(identity.cluster, identity.job_id): identity for identity in self._in_order(changed, period)}
        identities = {key: last.get(key) or of_job.pop() for key, of_job in owners.items()}
        return {key: identity for key, identity in identities.items() if self._filter.selects(identity)}

    def _job_infos(self, matcher: str, period: Period) -> list[JobIdentity]:
        info = self.metric_selector("job_info", matcher)
        samples = self.instant_query(f"last_over_time({info}[{range_duration(*period)}])", period.end)
        return [identity_of(sample.labels) for sample in samples]

    def _in_order(self, job_ids: list[str], period: Period) -> list[JobIdentity]:
        """Return the owners of these jobs, sorted by when they had them last."""
        found: list[VectorSample] = []
        for matcher in _id_matchers(job_ids):
            when = f"timestamp({self.metric_selector('job_info', matcher)})"
            steps = f"[{range_duration(*period)}:{range_duration(0, LOOKBACK_SECONDS)}]"
            found += self.instant_query(f"max_over_time({when}{steps}) or {when}", period.end)
        return [identity_of(sample.labels) for sample in sorted(found, key=attrgetter("value"))]

    def _gpu_hour_prices(self, period: Period) -> dict[tuple[InstanceKey, str], MoneyByCurrency]:
        """Return prices of a GPU-hour by daemon and `held`; the mean over the GPUs of a node with several models."""
        duration = range_duration(*period)
        price_metric = self.metric_selector("price_per_gpu_hour")
        price = f"max by ({_INSTANCE_LABELS}, model, held, currency) (avg_over_time({price_metric}[{duration}]))"
        gpus = f"max by ({_INSTANCE_LABELS}, model) (avg_over_time({self.metric_selector('node_gpus')}[{duration}]))"
        query = (
            f"sum by ({_INSTANCE_LABELS}, held, currency)"
            f" ({price} * on ({_INSTANCE_LABELS}, model) group_left () {gpus})"
            f" / on ({_INSTANCE_LABELS}) group_left () sum by ({_INSTANCE_LABELS}) ({gpus})"
        )
        found: dict[tuple[InstanceKey, str], MoneyByCurrency] = defaultdict(dict)
        for sample in self.instant_query(query, period.end):
            found[sample.instance, sample.labels.get("held", "")][sample.labels.get("currency", "")] = sample.value
        return found

    def _energy_rates(self, period: Period) -> dict[InstanceKey, EnergyRates]:
        """Return what energy costs and emits by daemon; of several prices the highest."""
        means = {
            name: self.instant_query(
                f"max by ({_INSTANCE_LABELS}, currency)"
                f" (avg_over_time({self.metric_selector(name)}[{range_duration(*period)}]))",
                period.end,
            )
            for name in ("price_per_kwh", "grams_co2_per_kwh")
        }
        found: dict[InstanceKey, EnergyRates] = defaultdict(EnergyRates)
        for sample in sorted(means["price_per_kwh"], key=attrgetter("value")):
            found[sample.instance] = EnergyRates(EnergyTerms(sample.value, sample.labels.get("currency", "")))
        for sample in means["grams_co2_per_kwh"]:
            found[sample.instance] = found[sample.instance]._replace(intensity=MeanIntensity(sample.value, 0.0))
        return found

    def _job_joules(
        self, period: Period, identities: dict[tuple[str, str], JobIdentity]
    ) -> dict[tuple[InstanceKey, str], float]:
        """Return joules by daemon and job."""
        found: dict[tuple[InstanceKey, str], float] = defaultdict(float)
        for matcher in self._job_matchers(sorted({job for _, job in identities})):
            counter, counters = self.metric_selector("job_energy_joules_total", matcher), self._job_counters(matcher)
            for (cluster, instance, job), joules in self._sums(counter, counters, period):
                found[(cluster, instance), job] += joules
        return found

    def _node_joules(self, period: Period) -> dict[InstanceKey, float]:
        """Return joules by daemon."""
        found: dict[InstanceKey, float] = defaultdict(float)
        counter = self.metric_selector("node_energy_joules_total")
        for (cluster, instance), joules in self._sums(counter, self._node_counters(), period):
            found[cluster, instance] += joules
        return found

    def _job_seconds(
        self, period: Period, identities: dict[tuple[str, str], JobIdentity]
    ) -> dict[tuple[InstanceKey, str], dict[str, float]]:
        """Return GPU-seconds by daemon, job and leak."""
        found: dict[tuple[InstanceKey, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for matcher in self._job_matchers(sorted({job for _, job in identities})):
            for (cluster, instance, job, leak), seconds in self._seconds(self._job_counters(matcher), period):
                if not self._filter.matchers or (cluster, job) in identities:
                    found[(cluster, instance), job][leak] += seconds
        return found

    def _job_counters(self, matcher: str) -> TimeCounters:
        return TimeCounters(
            by_leak=self.metric_selector("job_seconds_total", matcher),
            paid=self.metric_selector("job_paid_seconds_total", matcher),
            recorded=f"job_leak:{self.metric_selector('seconds:rate5m', matcher)}",
            owner_labels=("cluster", "instance", "job_id"),
            recorded_owner_labels=("cluster", "job_id"),
            split_labels=("leak",),
            start_metric=self.metric_selector("job_start_timestamp_seconds", matcher),
            daemon_start_metric=f"process_start_time_seconds{{{self.matchers}}}",
        )

    def _job_matchers(self, job_ids: list[str]) -> Iterator[str]:
        """Yield matchers of the selected jobs; an empty one if all jobs are selected."""
        if not self._filter.matchers:
            yield ""
            return
        yield from _id_matchers(job_ids)

    # -- time that no job's series cover --

    def _unassigned_usage(
        self,
        number: int,
        period: Period,
        seconds_by_instance: dict[InstanceKey, dict[str, float]],
        prices: dict[tuple[InstanceKey, str], MoneyByCurrency],
    ) -> Iterator[tuple[InstanceKey, float, UsageRecord]]:
        """Yield each node's unallocated time, and its allocated time that no job's series cover.

        Each with its daemon, and with its share of all that no job's series cover.
        """
        found: dict[tuple[InstanceKey, str], dict[str, float]] = {}
        for (instance_key, held), seconds in self._node_seconds(period).items():
            job_seconds = seconds_by_instance.get(instance_key, {})
            remaining = seconds if held == "false" else self._uncovered_seconds(seconds, job_seconds)
            if remaining:
                found[instance_key, held] = remaining
        totals = sum_by_key((instance_key, sum(remaining.values())) for (instance_key, _), remaining in found.items())
        for (instance_key, held), remaining in found.items():
            yield instance_key, sum(remaining.values()) / totals[instance_key], UsageRecord(
                period=number, identity=JobIdentity(job_id="", cluster=instance_key[0]), seconds=remaining,
                money=_money(remaining, prices.get((instance_key, held), {})), attributed=held == "false",
            )  # fmt: skip

    def _uncovered_seconds(self, seconds: dict[str, float], job_seconds: dict[str, float]) -> dict[str, float]:
        """Return the node's time by leak that no job has; together with the jobs' it is never more than the node's."""
        remaining = {leak: value - job_seconds.get(leak, 0.0) for leak, value in seconds.items()}
        remaining = {leak: value for leak, value in remaining.items() if value > 0}
        total = sum(seconds.values()) - sum(job_seconds.values())
        if total <= max(self._interval, _UNATTRIBUTED_SHARE * sum(seconds.values())):
            return {}
        share = total / sum(remaining.values())
        return {leak: value * share for leak, value in remaining.items()}

    def _node_seconds(self, period: Period) -> dict[tuple[InstanceKey, str], dict[str, float]]:
        """Return GPU-seconds by daemon, `held`, and leak."""
        found: dict[tuple[InstanceKey, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        ticks = self.metric_selector("ticks_total")
        resets = self._single_value(f"sum(resets({ticks}[{range_duration(*period)}]))", period.end)
        self.daemon_restarts += round(resets or 0.0)
        for (cluster, instance, held, leak), seconds in self._seconds(self._node_counters(), period):
            found[(cluster, instance), held][leak] += seconds
        return found

    def _node_counters(self) -> TimeCounters:
        return TimeCounters(
            by_leak=self.metric_selector("node_seconds_total"),
            paid=self.metric_selector("paid_seconds_total"),
            recorded=f"node_model_leak:{self.metric_selector('seconds:rate5m')}",
            owner_labels=("cluster", "instance"),
            recorded_owner_labels=("cluster", "instance"),
            split_labels=("held", "leak"),
            start_metric="",
        )

    # -- GPUs --

    def _fleet_usage(self, usage: Sequence[UsageRecord], known_period: Period) -> FleetUsage:
        length = known_period.end - known_period.start
        paid = sum(sum(record.seconds.values()) for record in usage)
        free = sum(sum(each.seconds.values()) for each in usage if not each.identity.job_id and each.attributed)
        rate = f"sum(rate({self.metric_selector('job_paid_seconds_total')}[{range_duration(0, self._peak_grain)}]))"
        gpu_count = f"sum(last_over_time({self.metric_selector('node_gpus')}[{range_duration(0, self._peak_grain)}]))"
        return FleetUsage(
            gpus=paid / length,
            gpus_peak=self._peak_value(gpu_count, known_period),
            held=(paid - free) / length,
            held_peak=self._peak_value(rate, known_period),
            grain_seconds=self._peak_grain,
        )

    def _peak_value(self, query: str, known_period: Period) -> float | None:
        """Return the maximum over the known period; queried day by day to bound the samples read."""
        resolution = range_duration(0, self._peak_grain / 2)
        queries = (
            (f"max_over_time(({query})[{range_duration(*day)}:{resolution}])", day.end)
            for day in _split_days(known_period)
        )
        return max((peak for each in queries if (peak := self._single_value(*each)) is not None), default=None)


def _id_matchers(job_ids: list[str]) -> Iterator[str]:
    for first in range(0, len(job_ids), _JOBS_PER_QUERY):
        yield f"job_id=~{promql_string('|'.join(map(re.escape, job_ids[first : first + _JOBS_PER_QUERY])))}"


def _money(seconds: dict[str, float], price: MoneyByCurrency) -> MoneyByCurrency:
    hours = sum(seconds.values()) / 3600
    return {currency: hours * amount for currency, amount in price.items()}


def _with_energy(record: UsageRecord, joules: float, rates: EnergyRates) -> UsageRecord:
    if not joules:
        return record
    money = rates.terms.money(joules)
    return replace(record, energy={NOT_SPLIT: joules}, energy_money=money, intensity=rates.intensity)


def _split_days(period: Period) -> Iterator[Period]:
    start = period.start
    while start < period.end:
        yield Period(start, min(period.end, start + DAY_SECONDS))
        start += DAY_SECONDS
