"""Previews zombie thresholds on data stored in Prometheus: when each GPU last worked, and which jobs held it.

Approximate: any effective work ends a period without work, and times are accurate to one step. Rejects thresholds for
which Prometheus stores no data.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter

from msgspec import Struct

from exporter.config import ConfigError
from exporter.core.model import UNKNOWN_JOB
from exporter.core.policy import Policy
from exporter.core.prices import Price
from exporter.preview.prometheus import PrometheusClient, PrometheusError, PrometheusSeries
from exporter.preview.scoring import (
    HOUR_SECONDS,
    SHORT_NAMES,
    ZOMBIE,
    Episode,
    EpisodeScorer,
    PolicyRow,
    PreviewJob,
    PreviewResult,
    known_price,
    left_alone_notes,
    limit_note,
)

START_GRACE_SECONDS = 90.0
"""Seconds after a daemon's start in which its time of last work may only be that of its first sample."""
GpuKey = tuple[str, str]
"""Cluster and UUID."""
WorkSample = tuple[float, frozenset[str], float]
"""Unix time of the sample, jobs that hold the GPU, and Unix time of its last work."""


class NoWorkPeriod(Struct):
    """A period in which a GPU has not worked, since `last_work`. Times are Unix seconds."""

    jobs: frozenset[str]
    last_work: float
    reported_work: float
    """Value of its series; differs from `last_work` after a restart of the daemon."""
    first_seen: float
    """First sample of the period."""
    last_seen: float
    """Last sample of the period."""


PeriodCallback = Callable[[GpuKey, NoWorkPeriod, float | None], None]
"""Called with each ended period, and the time at which its job worked again; None: it did not."""


class NoWorkTracker:
    """Tracks the current period without work of each GPU, from samples in order of time."""

    def __init__(self, on_period: PeriodCallback) -> None:
        self._on_period = on_period
        self.min_seconds = 0.0
        """Seconds; shorter periods are not reported, because there is one between any two samples of work."""
        self._current: dict[GpuKey, NoWorkPeriod] = {}
        self.held_seconds: dict[GpuKey, float] = defaultdict(float)
        """Seconds between samples of the same holders, without gaps."""

    def feed(self, gpu: GpuKey, samples: Iterable[WorkSample], *, starts: Iterable[float] = (), step: float) -> None:
        """Add samples of one GPU; `starts`: Unix times at which its daemon started."""
        starts, held_seconds = tuple(starts), 0.0
        period = self._current.get(gpu)
        for at, jobs, last_work in samples:
            if period is None or jobs != period.jobs:
                self._finish(gpu, period, None)
                period = NoWorkPeriod(jobs, last_work, last_work, at, at)
                continue
            held_seconds += min(at - period.last_seen, 2 * step)
            if last_work > period.reported_work and not _daemon_restarted(period, last_work, starts):
                worked = max(period.last_seen, min(last_work, at))
                self._finish(gpu, period, worked)
                period = NoWorkPeriod(jobs, last_work, last_work, at, at)
            else:
                period.reported_work, period.last_seen = last_work, at
        self.held_seconds[gpu] += held_seconds
        if period is not None:
            self._current[gpu] = period

    def _finish(self, gpu: GpuKey, period: NoWorkPeriod | None, worked: float | None) -> None:
        if period is not None and period.last_seen - period.last_work >= self.min_seconds:
            self._on_period(gpu, period, worked)

    def end(self) -> None:
        """Finish the current periods: there are no more samples."""
        for gpu, period in self._current.items():
            self._finish(gpu, period, None)
        self._current.clear()


def _daemon_restarted(period: NoWorkPeriod, last_work: float, starts: tuple[float, ...]) -> bool:
    """Whether the daemon has started since, so that its time of last work is that of its first sample."""
    return any(period.last_seen < start and last_work <= start + START_GRACE_SECONDS for start in starts)


def merge_holders(series: Iterable[tuple[str, Iterable[tuple[float, str]]]]) -> Iterator[WorkSample]:
    """Merge the series of each job that holds one GPU into its samples, in order of time."""
    series = list(series)
    if len(series) == 1:
        ((job, values),) = series
        holder = frozenset({job})
        yield from ((at, holder, float(value)) for at, value in values)
        return
    samples = sorted((at, job, float(value)) for job, values in series for at, value in values)
    for at, simultaneous in groupby(samples, key=itemgetter(0)):
        rows = list(simultaneous)
        yield at, frozenset(job for _, job, _ in rows), max(last_work for _, _, last_work in rows)


_MIG_SHARE_UNITS = 28
"""MIG shares are multiples of 1/28: of 1/7, or of 1/4 on boards with four slices."""


class ClassifiedJob(Struct, frozen=True):
    """A job with its workload class, which selects its limit."""

    job: PreviewJob
    workload_class: str


class ScrapedGpu(Struct, frozen=True):
    """A GPU with its model and scrape target."""

    model: str
    target: tuple[str, str, str]
    """Labels cluster, job and instance of the scrape."""


class PrometheusInventory:
    """Jobs, GPUs, prices and daemon starts found in Prometheus; each window adds to them."""

    def __init__(self, server: PrometheusClient, selector: str) -> None:
        self._server, self._selector = server, selector
        self.jobs: dict[tuple[str, str], ClassifiedJob] = {}
        """Jobs by cluster and job id."""
        self.gpus: dict[GpuKey, ScrapedGpu] = {}
        self.mig_weights: dict[GpuKey, float] = {}
        """Share of a board of each MIG instance."""
        self.own_limits: dict[tuple[str, str], float] = {}
        """Seconds of jobs with a zombie limit of their own, by cluster and job id."""
        self.exempt_jobs: set[tuple[str, str]] = set()
        self._prices: dict[tuple[str, str, str, str], Price] = {}
        self._daemon_starts: dict[tuple[str, str, str], set[float]] = {}

    def load(self, start: float, end: float, step: float) -> None:
        """Query everything about the window."""
        window = f"[{max(1, round(end - start + step))}s]"
        self._load_jobs(window, end)
        self._load_gpus(window, end)
        for series in self._server.range_query(self._daemon_start_query(), start, end, step):
            self._daemon_starts.setdefault(_scrape_target(series), set()).update(
                float(value) for _, value in series.values
            )

    def _load_jobs(self, window: str, end: float) -> None:
        for series in self._window_maximum("job_info", window, "cluster, job_id, name, user, workload_class", end):
            job = PreviewJob(*(_label_value(series, name) for name in ("job_id", "name", "user", "cluster")))
            self.jobs[job.key] = ClassifiedJob(job, _label_value(series, "workload_class"))
        for series in self._window_maximum("job_zombie_limit_seconds", window, "cluster, job_id", end):
            self.own_limits[_label_value(series, "cluster"), _label_value(series, "job_id")] = float(series.value[1])
        for series in self._window_maximum("job_exempt", window, "cluster, job_id", end):
            self.exempt_jobs.add((_label_value(series, "cluster"), _label_value(series, "job_id")))

    def _load_gpus(self, window: str, end: float) -> None:
        for series in self._window_maximum("gpu_info", window, "cluster, job, instance, uuid, model", end):
            self.gpus[_gpu_key(series)] = ScrapedGpu(_label_value(series, "model"), _scrape_target(series))
        for series in self._server.instant_query(self._mig_share_query(window), end):
            units = max(1, round(float(series.value[1]) * _MIG_SHARE_UNITS))
            self.mig_weights[_gpu_key(series)] = units / _MIG_SHARE_UNITS
        labels = "cluster, job, instance, model, currency"
        for series in self._window_maximum("price_per_gpu_hour", window, labels, end, matcher='held="true"'):
            price = Price(float(series.value[1]), _label_value(series, "currency"))
            self._prices[*_scrape_target(series), _label_value(series, "model")] = price

    def _window_maximum(
        self, name: str, window: str, labels: str, at: float, *, matcher: str = ""
    ) -> Iterator[PrometheusSeries]:
        query = f"max by ({labels}) (max_over_time({self.selector(name, matcher)}{window}))"
        yield from self._server.instant_query(query, at)

    def selector(self, name: str, matcher: str = "") -> str:
        """Selector of one of our metrics, with the user's matchers."""
        return add_matchers(f"gpu_efficiency_{name}", self._selector, matcher)

    def per_holder(self, name: str) -> str:
        """Query for a metric of a GPU, once for each job that holds it."""
        target_labels = "cluster, job, instance, uuid"
        return (
            f"max by (cluster, uuid, job_id) ({self.selector('allocation_info')}"
            f" * on ({target_labels}) group_left () {self.selector(name)})"
        )

    def _mig_share_query(self, window: str) -> str:
        instances = self.selector("gpu_info", 'parent!=""')
        return (
            f"max by (cluster, uuid) (rate({self.selector('paid_seconds_total')}{window})"
            f" and on (cluster, job, instance, uuid) last_over_time({instances}{window}))"
        )

    def _daemon_start_query(self) -> str:
        build_info = f"on (cluster, job, instance) {self.selector('build_info')}"
        return (
            "max by (cluster, job, instance)"
            f" ({add_matchers('process_start_time_seconds', self._selector)} and {build_info})"
        )

    def price(self, gpu: GpuKey) -> Price | None:
        """Price per hour of an allocated GPU; None: unknown."""
        known_gpu = self.gpus.get(gpu)
        price = None if known_gpu is None else self._prices.get((*known_gpu.target, known_gpu.model))
        return None if price is None else known_price(price)

    def daemon_starts(self, gpu: GpuKey) -> set[float]:
        """Unix times at which the GPU's daemon started."""
        known_gpu = self.gpus.get(gpu)
        return set() if known_gpu is None else self._daemon_starts.get(known_gpu.target, set())


def add_matchers(name: str, selector: str, matcher: str = "") -> str:
    """NAME{...} with the matchers that are not empty."""
    matchers = ",".join(part for part in (selector, matcher) if part)
    return f"{name}{{{matchers}}}" if matchers else name


def _label_value(series: PrometheusSeries, name: str) -> str:
    return series.metric.get(name, "")


def _gpu_key(series: PrometheusSeries) -> GpuKey:
    return _label_value(series, "cluster"), _label_value(series, "uuid")


def _scrape_target(series: PrometheusSeries) -> tuple[str, str, str]:
    return _label_value(series, "cluster"), _label_value(series, "job"), _label_value(series, "instance")


LAST_WORK_METRIC = "last_work_timestamp_seconds"
MAX_POINTS = 10_000
"""Most points per series in one result; Prometheus rejects 11,000."""
MAX_SAMPLES = 1_000_000
"""Most samples in one result: about 30 MB to transfer and 200 MB in memory."""
MAX_STORED_SAMPLES = 20_000_000
"""Most stored samples that a query may read: Prometheus loads 50 million at most for one query."""
_SCRAPE_INTERVAL_SECONDS = 15.0
"""Assumed interval between two scrapes; with a shorter one queries read more samples."""
_FLEET_SIZE_POINTS = 200
"""Number of times at which the GPUs of the fleet are counted beforehand."""
_WORKLOAD_CLASSES = ("batch", "interactive", "serving")
_APPROXIMATION_NOTE = (
    "approximate: any effective work ends a period without work, because the duty cycle is not stored; times are"
    " accurate to one step; replay a trace for exact results"
)


def check_policies(rows: Sequence[PolicyRow]) -> None:
    """Raise ConfigError for a threshold whose evidence is not stored."""
    supported = [f"zombie_{kind}_seconds" for kind in _WORKLOAD_CLASSES]
    for name in sorted({name for row in rows for name in row.settings} - set(supported)):
        shown = next((short for short, field in SHORT_NAMES.items() if field == name), name)
        raise ConfigError(
            f"--policy {shown}: Prometheus does not store its input: give a trace instead, or preview one of "
            "zombie.batch, zombie.interactive, zombie.serving"
        )


def zombie_seconds(policy: Policy, workload_class: str) -> float:
    """The policy's limit without work in seconds for a workload class."""
    kind = workload_class if workload_class in _WORKLOAD_CLASSES else "batch"
    return float(getattr(policy, f"zombie_{kind}_seconds"))


def split_windows(start: float, end: float, step: float, series: int) -> list[tuple[float, float]]:
    """Split [start, end] into windows, one step apart, that stay below the limits on samples."""
    series = max(1, series)
    stored = MAX_STORED_SAMPLES * _SCRAPE_INTERVAL_SECONDS / (series * step)
    points = max(1, min(MAX_POINTS, MAX_SAMPLES // series, int(stored)))
    parts, at = [], start
    while at <= end:
        parts.append((at, min(end, at + (points - 1) * step)))
        at += points * step
    return parts


class PrometheusPreview:
    """A preview of the data in one Prometheus."""

    def __init__(self, server: PrometheusClient, rows: Sequence[PolicyRow], *, selector: str = "") -> None:
        self._server, self._rows = server, rows
        self._inventory = PrometheusInventory(server, selector)
        self._scorers = [EpisodeScorer(row.label, row.settings) for row in rows]
        self._tracker = NoWorkTracker(self._judge_period)
        self._start = 0.0
        self._jobs_with_own_limit: set[str] = set()
        self._exempt_jobs: set[str] = set()
        self._unknown_gpus: set[GpuKey] = set()

    def run(self, start: float, end: float, step: float) -> Iterator[tuple[int, int]]:
        """Process window by window; yield how many are done, and of how many. Raises PrometheusError."""
        self._start = start
        parts = split_windows(start, end, step, self._fleet_size(start, end, step))
        for number, (a, b) in enumerate(parts, 1):
            self._inventory.load(a, b, step)
            limits = chain(self._inventory.own_limits.values(), self._class_limits())
            self._tracker.min_seconds = min(limits)
            self._feed(a, b, step)
            yield number, len(parts)
        self._tracker.end()

    def _fleet_size(self, start: float, end: float, step: float) -> int:
        """The most GPUs allocated at once, at some times of the range."""
        selector = self._inventory.selector(LAST_WORK_METRIC)
        resolution = max(step, (end - start) / _FLEET_SIZE_POINTS)
        window = f"[{round(end - start) or 1}s:{round(resolution) or 1}s]"
        series = self._server.instant_query(f"max_over_time(count({selector}){window}) or count({selector})", end)
        if not series:
            raise PrometheusError(
                f"no {selector} is stored there in that time:"
                " does it scrape gpu-efficiency, of a version that has that metric, and was any GPU held?"
                " Try another --since or --match"
            )
        return int(float(series[0].value[1]))

    def _class_limits(self) -> Iterator[float]:
        for row in self._rows:
            yield from (zombie_seconds(row.policy, kind) for kind in _WORKLOAD_CLASSES)

    def _feed(self, start: float, end: float, step: float) -> None:
        series: dict[GpuKey, list[tuple[str, tuple[tuple[float, str], ...]]]] = defaultdict(list)
        for row in self._server.range_query(self._inventory.per_holder(LAST_WORK_METRIC), start, end, step):
            series[_gpu_key(row)].append((_label_value(row, "job_id"), row.values))
        for gpu, rows in series.items():
            self._tracker.feed(gpu, merge_holders(rows), starts=self._inventory.daemon_starts(gpu), step=step)

    def _judge_period(self, gpu: GpuKey, period: NoWorkPeriod, worked_at: float | None) -> None:
        """Score a period without work in every row."""
        if UNKNOWN_JOB in period.jobs:
            self._unknown_gpus.add(gpu)
            return
        exempt = {job for job in period.jobs if (gpu[0], job) in self._inventory.exempt_jobs}
        if exempt:
            self._exempt_jobs |= exempt
            return
        for row, scorer in zip(self._rows, self._scorers, strict=True):
            self._score(gpu, period, worked_at, row.policy, scorer)

    def _score(
        self, gpu: GpuKey, period: NoWorkPeriod, worked_at: float | None, policy: Policy, scorer: EpisodeScorer
    ) -> None:
        limit_at = period.last_work + self._longest_limit(gpu[0], period.jobs, policy)
        if period.last_seen < limit_at:
            return
        reclaimed_at = max(limit_at, period.first_seen)
        scorer.add(
            Episode(
                uuid=gpu[1],
                jobs=tuple(self._job(gpu[0], job) for job in sorted(period.jobs)),
                start=reclaimed_at,
                seconds=(period.last_seen if worked_at is None else worked_at) - reclaimed_at,
                worked=worked_at is not None,
                weight=self._inventory.mig_weights.get(gpu, 1.0),
                price=self._inventory.price(gpu),
            )
        )

    def _longest_limit(self, cluster: str, jobs: frozenset[str], policy: Policy) -> float:
        """The longest limit of the jobs that hold a GPU."""
        return max(self._job_limit((cluster, job), policy) for job in jobs)

    def _job_limit(self, key: tuple[str, str], policy: Policy) -> float:
        """Limit of a job: its own, which no row changes, else its class's."""
        own_limit, known_job = self._inventory.own_limits.get(key), self._inventory.jobs.get(key)
        if own_limit is not None:
            self._jobs_with_own_limit.add(key[1])
            return own_limit
        return zombie_seconds(policy, known_job.workload_class if known_job else "batch")

    def _job(self, cluster: str, job: str) -> PreviewJob:
        known_job = self._inventory.jobs.get((cluster, job))
        return known_job.job if known_job else PreviewJob(job, cluster=cluster)

    def result(self, source: str, end: float) -> PreviewResult:
        """Return the result."""
        return PreviewResult(
            source=source,
            since=self._start,
            until=end,
            gpu_hours_held=self._held_seconds() / HOUR_SECONDS,
            taken_back_when=(ZOMBIE,),
            rows=tuple(scorer.score() for scorer in self._scorers),
            notes=tuple(self._notes()),
        )

    def _held_seconds(self) -> float:
        return sum(
            seconds * self._inventory.mig_weights.get(gpu, 1.0) for gpu, seconds in self._tracker.held_seconds.items()
        )

    def _notes(self) -> Iterator[str]:
        yield _APPROXIMATION_NOTE
        if self._jobs_with_own_limit:
            yield limit_note(self._jobs_with_own_limit)
        yield from left_alone_notes(self._exempt_jobs, " at some time, left alone", self._unknown_gpus)
