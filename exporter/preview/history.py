"""Previews zombie thresholds on data stored in Prometheus: when each GPU last worked, and which jobs held it.

Approximate: any effective work ends a period without work, a step in which a GPU worked counts as a whole, and times
are accurate to one step. Rejects thresholds for which Prometheus stores no data.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter

from msgspec import Struct

from exporter.config import ConfigError
from exporter.core.model import UNKNOWN_JOB
from exporter.core.policy import Policy
from exporter.core.prices import NO_PRICE, Price
from exporter.preview.prometheus import PrometheusClient, PrometheusError, PrometheusSeries
from exporter.preview.real_work import PLAIN_SECONDS
from exporter.preview.scoring import (
    HOUR_SECONDS,
    SHORT_NAMES,
    ZOMBIE,
    Episode,
    EpisodeScorer,
    PolicyRow,
    PreviewJob,
    PreviewResult,
    common_class,
    left_alone_notes,
    limit_note,
    unjudged_notes,
)

START_GRACE_SECONDS = 90.0
"""Seconds after a daemon's start in which its time of last work may only be that of its first sample."""
MIN_WORK_SECONDS = 0.5
"""A smaller growth of the time of last work is due to a daemon's two clocks. Steps are a second at least."""
GpuKey = tuple[str, str]
"""Cluster and UUID."""
WorkSample = tuple[float, frozenset[str], float]
"""Unix time of the sample, jobs that hold the GPU, and Unix time of its last work."""


class Pause(Struct):
    """A period in which a GPU has not worked, since `last_work`. Times are Unix seconds."""

    last_work: float
    first_seen: float
    """First sample of the period."""
    last_seen: float
    """Last sample of the period."""
    resumed: float | None = None
    """When it worked again; None: it did not."""
    work_seconds: float = 0.0
    """Work from then until the next pause, at most: a step in which it worked counts as a whole."""
    worked_before: float = 0.0
    """Work since the same jobs hold it, in the same way."""


class HeldGpu(Struct):
    """A GPU while the same jobs hold it: its pauses, in order of time; the last one is current."""

    jobs: frozenset[str]
    reported_work: float
    """Value of its series; differs from the last work of the pause after a restart of the daemon."""
    pauses: list[Pause]
    work_seconds: float = 0.0
    """All work, as in `Pause`."""
    unobserved: list[tuple[float, float]] = []
    """Gaps between two samples, Unix seconds."""

    @classmethod
    def since(cls, at: float, jobs: frozenset[str], last_work: float) -> "HeldGpu":
        """Begin with the first sample."""
        return cls(jobs, last_work, [Pause(last_work, at, at)])

    @property
    def last_seen(self) -> float:
        """Unix time of the latest sample."""
        return self.pauses[-1].last_seen

    def see(self, at: float, last_work: float, *, restarted: bool, min_seconds: float, max_gap: float) -> None:
        """Add a sample. Pauses below `min_seconds` are not kept, because there is one between any two samples."""
        pause = self.pauses[-1]
        if at - pause.last_seen > max_gap:
            self.unobserved.append((pause.last_seen + max_gap, at))
        if last_work - self.reported_work < MIN_WORK_SECONDS or restarted:
            self.reported_work, pause.last_seen = last_work, at
            return
        work_seconds = min(last_work - self.reported_work, at - pause.last_seen, max_gap)
        pause.resumed = max(pause.last_seen, min(last_work, at))
        pause.work_seconds += work_seconds
        self.work_seconds += work_seconds
        if pause.last_seen - pause.last_work < min_seconds:
            self.pauses.pop()
            if self.pauses:
                self.pauses[-1].work_seconds += pause.work_seconds
        self.reported_work = last_work
        self.pauses.append(Pause(last_work, at, at, worked_before=self.work_seconds))

    def observed_seconds(self, start: float, end: float) -> float:
        """Seconds of [start, end] without its gaps."""
        return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.unobserved)


HeldCallback = Callable[[GpuKey, HeldGpu], None]
"""Called when the jobs that held a GPU have left it, or the samples end."""
_ABSENT_STEPS = 2
"""Samples that may be missing, or have other holders: the same jobs back after them have never left."""


class PauseTracker:
    """Tracks who holds each GPU and when it did not work, from samples in order of time."""

    def __init__(self, on_end: HeldCallback) -> None:
        self._on_end = on_end
        self.min_seconds = 0.0
        """Seconds; the shortest pause that matters."""
        self._current: dict[GpuKey, HeldGpu] = {}
        self._previous: dict[GpuKey, HeldGpu] = {}
        """Holders before the current ones, who may be back."""
        self.held_seconds: dict[GpuKey, float] = defaultdict(float)
        """Seconds between samples of the same holders."""

    def feed(
        self,
        gpu: GpuKey,
        samples: Iterable[WorkSample],
        *,
        starts: Iterable[float] = (),
        scraped: Sequence[Sequence[float]] = (),
        step: float,
    ) -> None:
        """Add samples of one GPU.

        `starts`: Unix times at which its daemon started. `scraped`: when it was scraped without a gap, from and to.
        """
        starts, held_seconds, longest_absence = tuple(starts), 0.0, (_ABSENT_STEPS + 1) * step
        for at, jobs, last_work in samples:
            held = self._current.get(gpu)
            if held is not None and at - held.last_seen > longest_absence:
                restarted = _daemon_restarted(held, last_work, starts)
                absent = _overlap(scraped, held.last_seen, at) > longest_absence
                if absent and last_work > held.last_seen and not restarted:
                    self._on_end(gpu, self._current.pop(gpu))
                    held = None
            if held is None or held.jobs != jobs:
                held = self._change_holders(gpu, jobs, at, last_work, longest_absence=longest_absence)
            held_seconds += at - held.last_seen
            restarted = _daemon_restarted(held, last_work, starts)
            held.see(at, last_work, restarted=restarted, min_seconds=self.min_seconds, max_gap=2 * step)
        self.held_seconds[gpu] += held_seconds

    def _change_holders(
        self, gpu: GpuKey, jobs: frozenset[str], at: float, last_work: float, *, longest_absence: float
    ) -> HeldGpu:
        """Return the new holders; those before the last change if they are back soon."""
        previous, current = self._previous.pop(gpu, None), self._current.pop(gpu, None)
        if previous is not None and (previous.jobs != jobs or at - previous.last_seen > longest_absence):
            self._on_end(gpu, previous)
            previous = None
        if current is not None and previous is None:
            self._previous[gpu] = current
        self._current[gpu] = previous or HeldGpu.since(at, jobs, last_work)
        return self._current[gpu]

    def end(self) -> None:
        """Finish all: there are no more samples."""
        for held in (self._previous, self._current):
            for gpu, each in held.items():
                self._on_end(gpu, each)
            held.clear()


def _daemon_restarted(held: HeldGpu, last_work: float, starts: tuple[float, ...]) -> bool:
    """Whether the daemon has started since, so that its time of last work is that of its first sample."""
    return any(held.last_seen < start and last_work <= start + START_GRACE_SECONDS for start in starts)


def _overlap(periods: Sequence[Sequence[float]], start: float, end: float) -> float:
    """Seconds of [start, end] that lie in the periods."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in periods)


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
        self.simulated = False
        """Whether any daemon serves a simulated node."""
        self.mig_weights: dict[GpuKey, float] = {}
        """Share of a board of each MIG instance."""
        self.own_limits: dict[tuple[str, str], float] = {}
        """Seconds of jobs with a zombie limit of their own, by cluster and job id."""
        self.exempt_jobs: set[tuple[str, str]] = set()
        self._prices: dict[tuple[str, str, str, str], Price] = {}
        self._daemon_starts: dict[tuple[str, str, str], set[float]] = {}
        self._scraped: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
        """When each daemon was scraped, from and to."""

    def load(self, start: float, end: float, step: float) -> None:
        """Query everything about the window."""
        window = f"[{max(1, round(end - start + step))}s]"
        self._load_jobs(window, end)
        self._load_gpus(window, end)
        self.simulated |= any(
            float(series.value[1]) for series in self._window_maximum("simulated", window, "cluster", end)
        )
        for series in self._server.range_query(self._daemon_start_query(), start, end, step):
            target = _scrape_target(series)
            self._daemon_starts.setdefault(target, set()).update(float(value) for _, value in series.values)
            periods = self._scraped[target]
            for at, _ in series.values:
                if periods and at - periods[-1][1] <= (_ABSENT_STEPS + 1) * step:
                    periods[-1][1] = at
                else:
                    periods.append([at, at])

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
            weight = max(1, round(float(series.value[1]) * _MIG_SHARE_UNITS)) / _MIG_SHARE_UNITS
            self.mig_weights[_gpu_key(series)] = max(weight, self.mig_weights.get(_gpu_key(series), 0.0))
        self._load_prices(window, end)

    def _load_prices(self, window: str, end: float) -> None:
        """Load the prices; of a GPU whose currency changed within the window, that in the currency at its end."""
        labels, matcher = "cluster, job, instance, model, currency", f'held="true",currency!="{NO_PRICE.currency}"'
        found: dict[tuple[str, str, str, str], dict[str, float]] = defaultdict(dict)
        for series in self._window_maximum("price_per_gpu_hour", window, labels, end, matcher=matcher):
            found[_priced(series)][_label_value(series, "currency")] = float(series.value[1])
        if any(len(prices) > 1 for prices in found.values()):
            query = f"max by ({labels}) ({self.selector('price_per_gpu_hour', matcher)})"
            for series in self._server.instant_query(query, end):
                currency = _label_value(series, "currency")
                found[_priced(series)] = {currency: found[_priced(series)].get(currency, float(series.value[1]))}
        for key, prices in found.items():
            currency, price = max(prices.items())
            self._prices[key] = Price(price, currency)

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
        """Query for the growth of a MIG instance's paid time per second.

        The median of five minutes each, because it may exist for part of the window only, and because the first growth
        after a daemon's start has the time before it. Where there are too few samples for that, the mean.
        """
        instances, paid = self.selector("gpu_info", 'parent!=""'), self.selector("paid_seconds_total")
        growth = f"quantile_over_time(0.5, rate({paid}[5m]){window[:-1]}:5m]) or rate({paid}{window})"
        return (
            f"max by (cluster, uuid) (({growth})"
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
        return None if known_gpu is None else self._prices.get((*known_gpu.target, known_gpu.model))

    def scraped(self, gpu: GpuKey) -> Sequence[Sequence[float]]:
        """When the GPU's daemon was scraped, from and to, Unix seconds."""
        known_gpu = self.gpus.get(gpu)
        return () if known_gpu is None else self._scraped.get(known_gpu.target, ())

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


def _priced(series: PrometheusSeries) -> tuple[str, str, str, str]:
    """Scrape target and model."""
    return *_scrape_target(series), _label_value(series, "model")


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
_PLAIN_RULE = "no work for 300 min"
"""The plain rule, as far as it can be evaluated: the engine's activity at each time is not stored."""
_APPROXIMATION_NOTE = (
    "approximate: any effective work ends a period without work, because the duty cycle is not stored; a step in which"
    " a GPU worked counts as work as a whole; times are accurate to one step; replay a trace for exact results"
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
        self._plain_scorer = EpisodeScorer(_PLAIN_RULE, {})
        self._tracker = PauseTracker(self._judge)
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
            limits = chain(self._inventory.own_limits.values(), self._class_limits(), (PLAIN_SECONDS,))
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
            starts, scraped = self._inventory.daemon_starts(gpu), self._inventory.scraped(gpu)
            self._tracker.feed(gpu, merge_holders(rows), starts=starts, scraped=scraped, step=step)

    def _judge(self, gpu: GpuKey, held: HeldGpu) -> None:
        """Score one GPU while the same jobs held it, in every row."""
        if all(pause.last_seen - pause.last_work < self._tracker.min_seconds for pause in held.pauses):
            return
        if UNKNOWN_JOB in held.jobs:
            self._unknown_gpus.add(gpu)
            return
        exempt = {job for job in held.jobs if (gpu[0], job) in self._inventory.exempt_jobs}
        if exempt:
            self._exempt_jobs |= exempt
            return
        for row, scorer in zip(self._rows, self._scorers, strict=True):
            self._score(gpu, held, partial(self._longest_limit, gpu[0], held.jobs, row.policy), scorer)
        self._score(gpu, held, lambda _: PLAIN_SECONDS, self._plain_scorer)

    def _score(self, gpu: GpuKey, held: HeldGpu, limit_of: Callable[[Pause], float], scorer: EpisodeScorer) -> None:
        """Reclaim the GPU in the first pause that reaches its limit."""
        end = held.last_seen
        for number, pause in enumerate(held.pauses):
            limit = limit_of(pause)
            start = max(pause.last_work + limit, pause.first_seen)
            if pause.last_seen < pause.last_work + limit or start >= end:
                continue
            scorer.add(
                Episode(
                    uuid=gpu[1],
                    jobs=tuple(self._job(gpu[0], job) for job in sorted(held.jobs)),
                    workload_class=common_class(self._class_of((gpu[0], job)) for job in held.jobs),
                    start=start,
                    seconds=end - start,
                    observed_seconds=held.observed_seconds(start, end),
                    work_seconds=sum(each.work_seconds for each in held.pauses[number:]),
                    worked_after=None if pause.resumed is None else pause.resumed - start,
                    weight=self._inventory.mig_weights.get(gpu, 1.0),
                    price=self._inventory.price(gpu),
                )
            )
            return

    def _longest_limit(self, cluster: str, jobs: frozenset[str], policy: Policy, pause: Pause) -> float:
        """The longest limit of the jobs that hold a GPU, for one pause."""
        worked = pause.worked_before >= policy.zombie_worked_seconds
        return max(self._job_limit((cluster, job), policy, worked=worked) for job in jobs)

    def _job_limit(self, key: tuple[str, str], policy: Policy, *, worked: bool) -> float:
        """Limit of a job: its own, which no row changes, else its class's; longer for a batch job that has worked."""
        own_limit = self._inventory.own_limits.get(key)
        if own_limit is not None:
            self._jobs_with_own_limit.add(key[1])
            return own_limit
        limit = zombie_seconds(policy, self._class_of(key))
        return limit * policy.zombie_worked_factor if worked and limit == policy.zombie_batch_seconds else limit

    def _class_of(self, key: tuple[str, str]) -> str:
        known_job = self._inventory.jobs.get(key)
        return (known_job.workload_class if known_job else "") or "batch"

    def _job(self, cluster: str, job: str) -> PreviewJob:
        known_job = self._inventory.jobs.get((cluster, job))
        return known_job.job if known_job else PreviewJob(job, cluster=cluster)

    def result(self, source: str, end: float) -> PreviewResult:
        """Return the result."""
        return PreviewResult(
            source=f"{source} (SIMULATED)" if self._inventory.simulated else source,
            since=self._start,
            until=end,
            gpu_hours_held=self._held_seconds() / HOUR_SECONDS,
            taken_back_when=(ZOMBIE,),
            rows=tuple(scorer.score() for scorer in self._scorers),
            plain_rule=self._plain_scorer.score(),
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
        yield from unjudged_notes((*(scorer.score() for scorer in self._scorers), self._plain_scorer.score()))
        yield from self._server.remarks
