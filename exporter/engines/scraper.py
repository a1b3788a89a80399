"""Scrapes the serving engines of this node in a thread of its own, each with its own schedule and backoff.

Limits each page in time and decompressed size, follows no redirect, and counts failures by kind. Metrics of a front end
count only if no worker of the same job answers.
"""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx

from exporter.clock import Backoff, Clock
from exporter.config import Config
from exporter.core.model import SECOND, Fault, ServingReport
from exporter.engines.base import FAILURE_KINDS, EngineMetrics, ScrapeFailure
from exporter.engines.discovery import DiscoveredEngines, EngineDiscovery, MetricsEndpoint
from exporter.engines.page import MetricsPage
from exporter.engines.registry import engine_of_command, read_metrics
from exporter.engines.replica import Replica
from exporter.http_body import ACCEPTED, BodyError, read_body_async
from exporter.redact import redact_secrets
from exporter.worker import Worker
from exporter.workloads import ProcessLookup, WorkloadListener, WorkloadProcess, WorkloadUpdate

LIMIT_BYTES = 4 << 20
"""Size limit of a page after decompression. A vLLM page with 8 engines is about 0.5 MB."""
MAX_LINES = 20_000
"""Lines of a page: each costs some 60 bytes beyond its text, and some 40 microseconds of a processor. A vLLM page has
561 for one engine."""
MAX_PAGES, MAX_PAGES_OF_JOB = 16, 4
"""Pages that are fetched at once: a job whose engines send long pages, or slowly, delays its own."""
_REDIRECTS = range(300, 400)
_BODY_REMEDIES = {
    "encoding": "check for a proxy in front of it",
    "half_page": "see whether it runs, and read its log",
    "too_large": "look for another server behind its address",
}


async def fetch(client: httpx.AsyncClient, url: str, *, seconds: float, limit: int = LIMIT_BYTES) -> str:
    """Fetch the text of a whole page. Raises ScrapeFailure for anything else."""
    try:
        # httpx has a timeout per read only: an engine that sends its headers slowly could hold a connection for ever.
        async with asyncio.timeout(seconds), client.stream("GET", url) as response:
            _refuse(response)
            body = await read_body_async(response, limit=limit)
    except (TimeoutError, httpx.TimeoutException):
        raise ScrapeFailure(
            "timeout", f"gave no whole page within {seconds:g} s", "see whether it hangs, or raise timeout_seconds"
        ) from None
    except BodyError as error:
        raise ScrapeFailure(error.kind, str(error), _BODY_REMEDIES[error.kind]) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        what = f"could not be read ({str(error) or type(error).__name__})"
        kind = "half_page" if isinstance(error, httpx.RemoteProtocolError) else "refused"
        raise ScrapeFailure(kind, what, "see whether it runs, and read its log") from error
    return _text(body)


def _refuse(response: httpx.Response) -> None:
    status = response.status_code
    if status in _REDIRECTS:
        raise ScrapeFailure("redirect", f"redirects (HTTP {status})", "give its real address in engines.endpoints")
    if status != httpx.codes.OK:
        raise ScrapeFailure(
            "status", f"answered HTTP {status}", "switch its metrics on, or give their address in engines.endpoints"
        )


def _text(body: bytes) -> str:
    if body.count(b"\n") > MAX_LINES:
        raise ScrapeFailure(
            "too_large", f"has more than {MAX_LINES} lines", "look for another server behind its address"
        )
    text = body.decode("utf-8", "replace")
    if text.lstrip()[:1] == "<":
        raise ScrapeFailure(
            "html", "is an HTML page, not metrics", "name the engine's metrics page in engines.endpoints"
        )
    if text and not text.endswith("\n"):
        # The text format ends every line with a line feed: a truncated number would be a wrong number.
        kind = "not_an_engine" if text.lstrip()[:1] in "{[" else "half_page"
        raise ScrapeFailure(
            kind, "does not end with a whole line", "see whether it is a metrics page, and read its log"
        )
    return text


NOT_AN_ENGINE_WAIT = 300 * SECOND
"""Wait before an endpoint that is not an engine is tried again."""
MAX_RETRY_WAIT = 60 * SECOND
"""Longest wait between two scrapes of an engine that has answered before or is starting."""
STARTUP_GRACE = 600 * SECOND
"""How long a known engine may fail before it is a fault: large weights take minutes to load."""
COST_SHARE, LONGEST_COST_WAIT = 200, 100 * SECOND
"""A scrape waits for so many times the processor time that parsing the last page took, 0.5 % of a processor, but no
longer than that: an engine's page takes milliseconds."""
JITTER = 0.1
"""Share by which a wait varies to either side, so that many nodes do not scrape at the same time."""
_STARTING = ("refused", "timeout", "half_page")
"""Failures of an engine that is not ready yet."""


class ScrapeSchedule:
    """An endpoint with its replica, its last failure and the time of its next scrape."""

    def __init__(
        self, endpoint: MetricsEndpoint, replica: Replica, *, interval: int, chance: Callable[[], float]
    ) -> None:
        """`interval` is nanoseconds; `chance` returns a random number in [0, 1)."""
        self.endpoint, self.replica = endpoint, replica
        self.due_at = 0
        self.busy = False
        self.frontend = False
        self.path_index = 0
        self.cost = 0
        """Processor time that parsing the last page took, nanoseconds."""
        self.scraped_at: int | None = None
        """Time of the last successful scrape, monotonic nanoseconds; None: none yet."""
        self.answering_since = 0
        """Since when it `answers` without a break, monotonic nanoseconds; 0: never yet."""
        self.failure: ScrapeFailure | None = None
        self._failing_since = 0
        self._interval, self._random = interval, chance
        self._backoff = Backoff(2 * interval, max(MAX_RETRY_WAIT, interval))

    def answers(self, now: int) -> bool:
        """Return whether a scrape succeeded within NOT_AN_ENGINE_WAIT."""
        return self.scraped_at is not None and now - self.scraped_at <= NOT_AN_ENGINE_WAIT

    def succeeded(self, now: int, *, frontend: bool) -> None:
        """Record a successful scrape."""
        if not self.answers(now):
            self.answering_since = now
        self.scraped_at, self.failure, self.frontend = now, None, frontend
        self._backoff.reset()
        self._schedule(now, self._interval)

    def failed(self, now: int, failure: ScrapeFailure) -> None:
        """Record a failure. Waits double up to MAX_RETRY_WAIT; for a non-engine the wait is NOT_AN_ENGINE_WAIT."""
        self._failing_since = now if self.failure is None else self._failing_since
        # Its frames hold the page.
        failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        self.failure, pause = failure, self._backoff.fail()
        if self.scraped_at is None and failure.kind not in _STARTING:
            pause = NOT_AN_ENGINE_WAIT
        self._schedule(now, pause)

    def fault(self, now: int, *, alone: bool) -> Fault | None:
        """Return a fault for a failing engine; None if there is no failure, or the endpoint may not be an engine.

        A failure is a fault if the endpoint answered before, was configured by the operator or speaks an unknown
        dialect; and after STARTUP_GRACE, if its command line is an engine's and no other endpoint of its job answers
        (`alone`).
        """
        failure = self.failure
        if failure is None:
            return None
        expected = self.scraped_at is not None or not self.endpoint.pid or failure.kind == "dialect"
        late = (
            alone
            and now - self._failing_since >= STARTUP_GRACE
            and engine_of_command(self.endpoint.command_lines) is not None
        )
        if not (expected or late):
            return None
        address = redact_secrets(f"{self.endpoint.base}{self.endpoint.paths[self.path_index]}")
        where = f"serving engine of job {self.endpoint.placement.job_id}: {address}"
        consequence = "Its job's efficiency comes from hardware counters alone until then"
        return Fault("engine_failed", f"{where} {failure.what}: {failure.remedy}. {consequence}")

    def _schedule(self, now: int, span: int) -> None:
        span = max(span, min(COST_SHARE * self.cost, LONGEST_COST_WAIT))
        self.due_at = now + int(span * (1 + JITTER * (2 * self._random() - 1)))


log = logging.getLogger(__name__)
TICK_SECONDS = 0.2
DISCOVERY_INTERVAL = 30 * SECOND
"""Interval between discoveries while the processes on GPUs do not change."""
MAX_PENDING = 4096
"""Maximum number of reports kept for the next `poll`; the oldest are dropped."""
OUTCOMES = ("engine_page", "engine_restart", *(f"engine_{kind}" for kind in FAILURE_KINDS))
"""All outcomes that are counted."""


class _NoEngines:
    """The listener if engines are disabled: it reports nothing."""

    def poll(self, _now: int, _processes: Sequence[WorkloadProcess], _lookup: ProcessLookup) -> WorkloadUpdate:
        return WorkloadUpdate()

    def close(self) -> None:
        """Nothing to release."""


def open_engines(config: Config, clock: Clock) -> WorkloadListener:
    """Create the listener for this node's engines, as configured in [engines]. Raises ConfigError."""
    return EngineScraper(config, clock) if config.engines.enabled else _NoEngines()


class EngineScraper:
    """The WorkloadListener of serving engines; its thread starts with the first processes and ends with `close`."""

    def __init__(self, config: Config, clock: Clock, *, discovery: EngineDiscovery | None = None) -> None:
        self._config, self._clock = config.engines, clock
        self._discovery = discovery or EngineDiscovery(config.engines, proc=config.host.proc)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._processes: tuple[WorkloadProcess, ...] = ()
        self._pids_to_identify: tuple[int, ...] | None = None
        self._members: Mapping[int, WorkloadProcess] | None = None
        self._pending: list[ServingReport] = []
        self._faults: tuple[Fault, ...] = ()
        self._counts = Counter(dict.fromkeys(OUTCOMES, 0))
        self._schedules: dict[tuple[str, str], ScrapeSchedule] = {}
        self._discovered, self._discovered_for = DiscoveredEngines(), frozenset[tuple[int, str]]()
        self._discovered_at: int | None = None
        self._unreachable_since: dict[tuple[str, str], int] = {}
        """Since when a job has not been listening or not been reachable, by (kind, job), monotonic nanoseconds."""
        self._pages: asyncio.Semaphore
        self._pages_of_job: dict[str, asyncio.Semaphore] = {}
        self._worker = Worker("engines", self._run, stop=self._stop)

    def poll(self, _now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:
        """See WorkloadListener. Identifies processes once per discovery, at most MAX_RELATIVES."""
        with self._lock:
            self._processes = tuple(processes)
            pids, self._pids_to_identify = self._pids_to_identify, None
        members = lookup(pids) if pids is not None else None
        with self._lock:
            self._members = members if members is not None else self._members
            pending, self._pending = self._pending, []
            faults = (*self._faults, *self._worker.faults("engine_failed"))
            collected = WorkloadUpdate(serving=tuple(pending), faults=faults, counts=tuple(self._counts.items()))
        if processes:
            self._worker.start()
        return collected

    def close(self) -> None:
        """See WorkloadListener. Waits for the thread, which cancels its requests."""
        self._stop.set()
        self._worker.join(self._config.timeout_seconds + 5)

    def _run(self) -> None:
        self._pages_of_job.clear()  # of an event loop that has failed
        for schedule in self._schedules.values():
            schedule.busy = False
        asyncio.run(self._scrape_loop())

    async def _scrape_loop(self) -> None:
        # No proxy from the environment: engines are on this node. No keep-alive: an open connection can delay a
        # server's shutdown.
        headers = ACCEPTED | {"Accept": "text/plain", "Connection": "close"}
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(trust_env=False, headers=headers, limits=limits, timeout=None) as client,  # nosec B113  # noqa: S113  `fetch` has the timeout
            asyncio.TaskGroup() as group,
        ):
            tasks: set[asyncio.Task[None]] = set()
            self._pages = asyncio.Semaphore(MAX_PAGES)
            while not self._stop.is_set():
                self._discover(self._clock.now())
                for schedule in self._due(self._clock.now()):
                    schedule.busy = True
                    tasks.add(group.create_task(self._scrape(client, schedule)))
                tasks = {task for task in tasks if not task.done()}
                await asyncio.sleep(TICK_SECONDS)
            for task in tasks:
                task.cancel()

    def _discover(self, now: int) -> None:
        """Determine the pids that the scheduler must identify; once it has, discover their endpoints."""
        with self._lock:
            processes, members, self._members = self._processes, self._members, None
        if members is not None:
            self._discovered = self._discovery.discover(processes, members)
            self._update_schedules(self._discovered.endpoints)
        seen = frozenset((process.pid, process.job_id) for process in processes)
        if (
            self._discovered_at is None
            or now - self._discovered_at >= DISCOVERY_INTERVAL
            or seen != self._discovered_for
        ):
            self._discovered_at, self._discovered_for = now, seen
            pids = self._discovery.relatives(processes)
            with self._lock:
                self._pids_to_identify = pids
        self._update_faults(now)

    def _update_schedules(self, endpoints: Sequence[MetricsEndpoint]) -> None:
        """Schedule `endpoints` and no other, keeping known schedules.

        Whoever listens on the port of a server that has ended may be another job's.
        """
        schedules: dict[tuple[str, str], ScrapeSchedule] = {}
        interval = int(self._config.interval_seconds * SECOND)
        for endpoint in endpoints:
            key = endpoint.base, endpoint.placement.job_id
            schedule = self._schedules.get(key)
            if schedule is None or schedule.endpoint.pid != endpoint.pid:
                replica = Replica(self._config.models, interval=interval)
                schedule = ScrapeSchedule(endpoint, replica, interval=interval, chance=random.random)
            schedule.endpoint = endpoint
            schedules[key] = schedule
        self._schedules = schedules
        present = {schedule.endpoint.placement.job_id for schedule in schedules.values()}
        self._pages_of_job = {job: pages for job, pages in self._pages_of_job.items() if job in present}

    def _due(self, now: int) -> Iterator[ScrapeSchedule]:
        """Yield the schedules that are due; of the ports on which a process answers, only the first that did."""
        answers = [one for one in self._schedules.values() if one.endpoint.pid and one.answers(now)]
        answers.sort(key=lambda one: one.answering_since, reverse=True)
        answering = {one.endpoint.pid: one for one in answers}
        for schedule in self._schedules.values():
            if (
                schedule.due_at <= now
                and not schedule.busy
                and answering.get(schedule.endpoint.pid, schedule) is schedule
            ):
                yield schedule

    async def _scrape(self, client: httpx.AsyncClient, schedule: ScrapeSchedule) -> None:
        job = schedule.endpoint.placement.job_id
        of_job = self._pages_of_job.setdefault(job, asyncio.Semaphore(MAX_PAGES_OF_JOB))
        try:
            async with of_job, self._pages:
                await self._scrape_page(client, schedule)
        except ScrapeFailure as failure:
            schedule.failed(self._clock.now(), failure)
            self._count(f"engine_{failure.kind}")
        except Exception as error:  # one page must not end the scrapes of the others
            if schedule.failure is None:
                log.exception(
                    "reading the page of %s failed; please report this", redact_secrets(schedule.endpoint.base)
                )
            schedule.failed(
                self._clock.now(), ScrapeFailure("malformed", f"cannot be read ({error!r})", "please report this")
            )
            self._count("engine_malformed")
        finally:
            schedule.busy = False

    async def _scrape_page(self, client: httpx.AsyncClient, schedule: ScrapeSchedule) -> None:
        endpoint = schedule.endpoint
        metrics = await self._fetch_page(client, schedule)
        now = self._clock.now()
        if schedule not in self._schedules.values():  # dropped while its page was fetched
            return
        restarts = schedule.replica.restarts
        serving = schedule.replica.update(metrics, now, placement=endpoint.placement)
        schedule.succeeded(now, frontend=metrics.frontend)
        self._count("engine_page")
        self._count("engine_restart", schedule.replica.restarts - restarts)
        if not (metrics.frontend and self._has_replica(endpoint.placement.job_id, now)):
            with self._lock:
                self._pending = [*self._pending, serving][-MAX_PENDING:]

    async def _fetch_page(self, client: httpx.AsyncClient, schedule: ScrapeSchedule) -> EngineMetrics:
        """Scrape the path that answered before; if none has, try all paths."""
        paths = range(len(schedule.endpoint.paths)) if schedule.scraped_at is None else (schedule.path_index,)
        failure: ScrapeFailure | None = None
        for schedule.path_index in paths:
            url = f"{schedule.endpoint.base}{schedule.endpoint.paths[schedule.path_index]}"
            try:
                text, began = await fetch(client, url, seconds=self._config.timeout_seconds), time.thread_time_ns()
                try:
                    return _parse_page(text, schedule.endpoint.command_lines)
                finally:
                    schedule.cost = time.thread_time_ns() - began
            except ScrapeFailure as error:
                if error.kind in ("refused", "timeout"):
                    raise
                failure = error
        raise failure or ScrapeFailure("not_an_engine", "has no path", "give its address in engines.endpoints")

    def _has_replica(self, job: str, now: int) -> bool:
        others = (schedule for schedule in self._schedules.values() if schedule.endpoint.placement.job_id == job)
        return any(other.answers(now) and not other.frontend for other in others)

    def _count(self, outcome: str, times: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += times

    def _update_faults(self, now: int) -> None:
        """Recompute the faults that `poll` reports."""
        answering = {a.endpoint.placement.job_id for a in self._schedules.values() if a.answers(now)}
        each = (a.fault(now, alone=a.endpoint.placement.job_id not in answering) for a in self._schedules.values())
        faults = [fault for fault in each if fault is not None] + self._unreachable_faults(now)
        with self._lock:
            self._faults = tuple(faults)

    def _unreachable_faults(self, now: int) -> list[Fault]:
        """Return faults of jobs that cannot be reached (at once) or do not listen (after STARTUP_GRACE)."""
        found = {("unreachable", f"{job} port {port}"): (job, port) for job, port in self._discovered.unreachable}
        not_listening = {("silent", f"{job} {engine}"): (job, engine) for job, engine in self._discovered.not_listening}
        for kind, _ in (found.keys() | not_listening.keys()) - self._unreachable_since.keys():
            self._count(f"engine_{kind}")
        self._unreachable_since = {key: self._unreachable_since.get(key, now) for key in (*found, *not_listening)}
        late = [pair for key, pair in not_listening.items() if now - self._unreachable_since[key] >= STARTUP_GRACE]
        return [_fault(job, _UNREACHABLE.format(port)) for job, port in found.values()] + [
            _fault(job, _NOT_LISTENING.format(engine)) for job, engine in late
        ]


def _parse_page(text: str, command: str) -> EngineMetrics:
    """Parse a page. Raises ScrapeFailure if a line cannot be parsed, because sums without it would be wrong."""
    page = MetricsPage(text)
    metrics = read_metrics(page, command)
    if page.bad:
        raise ScrapeFailure(
            "malformed",
            f"has {page.bad} lines that are not metrics, or too many or too long lines",
            "check for a proxy in front of it",
        )
    return metrics


_UNREACHABLE = (
    "listens on port {} of its own loopback only, or of no address it has: let it listen on 0.0.0.0, or give"
    " engines.endpoints an address that leads there"
)
_NOT_LISTENING = (
    "runs {}, none of whose processes listens on a port of engines.ports: add its port there, or its address to"
    " engines.endpoints"
)


def _fault(job: str, what: str) -> Fault:
    return Fault("engine_failed", f"serving engine of job {job} {what}")
