"""Runs queries to slurmctld and walks through /proc on a separate thread.

Holds the queue of queries, with back-off while slurmctld does not answer. Blocks the reading thread only in
`wait_settled`, and drops queries about jobs that have left.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterable

from msgspec import Struct

from exporter.clock import Backoff
from exporter.core.model import SECOND, Fault
from exporter.schedulers.slurm.client import SlurmClient, SlurmUnavailableError, UnknownJobError
from exporter.schedulers.slurm.local_node import GpuMap, JobTasks, LocalNode
from exporter.schedulers.slurm.parsing import NodeState, SlurmJob
from exporter.worker import Worker

FIRST_PAUSE, LONGEST_PAUSE = 5 * SECOND, 60 * SECOND
"""Longest pauses after the first and after the last failure. Half of each is random: the nodes of a large job begin to
query at the same moment, and slurmctld's rate limit (rl_enable) must not turn them all away at the same moments."""

log = logging.getLogger(__name__)


class JobAnswer(Struct, frozen=True):
    """Results of the node's inspection or the controller's query about one job; each part may be missing."""

    job_id: str
    run: int
    """The job's run, as passed to the query."""
    tasks: JobTasks | None = None
    listening: frozenset[str] = frozenset()
    """Names of all bound sockets; set with `tasks`."""
    job: SlurmJob | None = None
    gone: bool = False
    refused: str = ""
    """Why the controller's response was rejected."""


class Updates(Struct):
    """Results since the last `take_updates`."""

    answers: list[JobAnswer] = []
    node: NodeState | None = None
    gpu_map: GpuMap | None = None
    faults: list[Fault] = []


class _JobQuery(Struct):
    job_id: str
    run: int
    queried_at: int
    detail: bool = False
    unanswered: bool = False


class ControllerQueries:
    """Queue of queries. `step` processes one item; the thread calls it while there are any."""

    def __init__(
        self,
        client: SlurmClient,
        local: LocalNode,
        *,
        node: str,
        clock: Callable[[], int],
        phase: Callable[[], float] = random.random,
        threaded: bool = True,
    ) -> None:
        """`clock` returns monotonic nanoseconds, `phase` a random number in [0, 1).

        If not `threaded`, the caller calls `step`.
        """
        self._client, self._local, self._node, self._clock, self._phase = client, local, node, clock, phase
        self._changed = threading.Condition()
        self._inspections: dict[str, int] = {}
        self._queries: dict[str, _JobQuery] = {}
        self._node_queried_at: int | None = None
        self._gpu_map_wanted = self._gpu_map_read = self._conf_check_wanted = False
        self._conf_times: tuple[int, ...] = ()
        self._node_unanswered = self._busy = False
        self._stop = threading.Event()
        self._updates = Updates()
        self._silence_message = ""
        self._backoff, self._retry_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0
        self._worker = Worker("slurm", self._run, stop=self._stop) if threaded else None
        if self._worker is not None:
            self._worker.start()

    # -- called on the reading thread; only `wait_settled` blocks --

    @property
    def unanswered_since(self) -> int | None:
        """When the oldest query without a response was made (monotonic nanoseconds).

        None: no query has failed, or waited for longer than a minute (the thread may be blocked by a dead disk).
        """
        with self._changed:
            late = self._clock() - LONGEST_PAUSE
            waiting = [each.queried_at for each in self._queries.values() if each.unanswered or each.queried_at <= late]
            if self._node_queried_at is not None and self._node_unanswered:
                waiting.append(self._node_queried_at)
            return min(waiting, default=None)

    @property
    def alive(self) -> bool:
        """Whether queries are still processed."""
        return self._worker is None or self._worker.alive

    def query(self, job_id: str, run: int, *, detail: bool = False) -> None:
        """Queue an inspection of the job on this node and a query to the controller; results carry `run`."""
        with self._changed:
            self._inspections[job_id] = run
            self._queries[job_id] = _JobQuery(job_id, run, self._clock(), detail)
            self._changed.notify_all()

    def inspect(self, job_id: str, run: int) -> None:
        """Queue an inspection of the job on this node only."""
        with self._changed:
            self._inspections[job_id] = run
            self._changed.notify_all()

    def request_node_state(self) -> None:
        """Queue a query for this node's state."""
        with self._changed:
            if self._node_queried_at is None:
                self._node_queried_at = self._clock()
                self._changed.notify_all()

    def request_gpu_map(self) -> None:
        """Queue a reading of Slurm's and the driver's lists of GPUs."""
        with self._changed:
            self._gpu_map_wanted = True
            self._changed.notify_all()

    def check_conf(self) -> None:
        """Queue a look at slurm.conf and gres.conf: if they have changed, the lists of GPUs are read again."""
        with self._changed:
            self._conf_check_wanted = True
            self._changed.notify_all()

    def drop_others(self, jobs: Iterable[str]) -> None:
        """Drop queries and inspections of all jobs but these."""
        with self._changed:
            for queries in (self._inspections, self._queries):
                for job_id in queries.keys() - set(jobs):
                    del queries[job_id]

    def wait_settled(self, seconds: float) -> None:
        """Wait until the queue is empty or slurmctld does not answer, at most `seconds`."""
        with self._changed:
            if self._worker is not None:
                self._changed.wait_for(self._is_settled, seconds)

    def take_updates(self) -> Updates:
        """Return and clear the results so far."""
        with self._changed:
            updates, self._updates = self._updates, Updates()
            if self._worker is not None:
                updates.faults += self._worker.faults("scheduler_failed")
            if self._silence_message:
                updates.faults.append(Fault("controller_silent", self._silence_message))
            return updates

    def close(self) -> None:
        """Stop the thread, aborting a running query. Never raises."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._client.close()
        if self._worker is not None:
            self._worker.join(2.0)

    def _is_settled(self) -> bool:
        silent = self._clock() < self._retry_at
        return self._stop.is_set() or not (
            self._busy or self._inspections or self._gpu_map_wanted or (self._queries and not silent)
        )

    # -- called on the thread --

    def _run(self) -> None:
        while not self._stop.is_set():
            worked = self.step()
            with self._changed:
                self._changed.notify_all()
                if not worked and not self._stop.is_set() and not self._ready():
                    self._changed.wait(self._idle_seconds())

    def _ready(self) -> bool:
        due = self._clock() >= self._retry_at and (self._queries or self._node_queried_at is not None)
        return bool(self._inspections or self._gpu_map_wanted or self._conf_check_wanted or due)

    def _idle_seconds(self) -> float | None:
        """Seconds until the next item is due; None: until something is queued."""
        if not self._queries and self._node_queried_at is None:
            return None
        return max(0.0, (self._retry_at - self._clock()) / SECOND)

    def step(self) -> bool:
        """Process one item: inspections before queries, and these before the lists of GPUs, which may take long.

        The first lists come before all else. Return False if there is nothing to do.
        """
        with self._changed:
            first = self._gpu_map_wanted and not self._gpu_map_read
            inspections, self._inspections = self._inspections, {}
            due = self._clock() >= self._retry_at and not (inspections or first)
            query = next(iter(self._queries.values()), None) if due else None
            node = due and query is None and self._node_queried_at is not None
            idle = not (inspections or query or node)
            gpu_map, check = self._gpu_map_wanted and (first or idle), self._conf_check_wanted and idle
            self._gpu_map_wanted &= not gpu_map
            self._conf_check_wanted &= not check
            self._busy = bool(inspections or gpu_map or check or query or node)
        try:
            if gpu_map or check:
                self._read_gpu_map(only_if_changed=not gpu_map)
            if inspections:
                self._inspect(inspections)
            if query is not None:
                self._query_job(query)
            elif node:
                self._query_node()
        finally:
            with self._changed:
                self._busy = False
        return bool(inspections or gpu_map or check or query or node)

    def _inspect(self, inspections: dict[str, int]) -> None:
        found, listening = self._local.inspect_jobs(inspections), self._local.listening()
        with self._changed:
            self._updates.answers += [
                JobAnswer(job_id, run, tasks=found.get(job_id, JobTasks()), listening=listening)
                for job_id, run in inspections.items()
            ]

    def _read_gpu_map(self, *, only_if_changed: bool) -> None:
        self._gpu_map_read, last = True, self._conf_times
        self._conf_times = self._local.conf_times()
        if only_if_changed and self._conf_times == last:
            return
        gpu_map = self._local.gpu_map()
        with self._changed:
            self._updates.gpu_map = gpu_map

    def _query_job(self, query: _JobQuery) -> None:
        try:
            answer = self._answer_to(query)
        except SlurmUnavailableError as err:
            query.unanswered = True
            self._record_silence(err, query.queried_at)
            return
        self._record_answer()
        with self._changed:
            self._updates.answers.append(answer)
            if self._queries.get(query.job_id) is query:
                del self._queries[query.job_id]

    def _answer_to(self, query: _JobQuery) -> JobAnswer:
        job_id, run = query.job_id, query.run
        try:
            job = self._client.detail(job_id) if query.detail else None
            return JobAnswer(job_id, run, job=job or self._client.job(job_id))
        except UnknownJobError:
            return JobAnswer(job_id, run, gone=True)
        except ValueError as err:
            return JobAnswer(job_id, run, refused=str(err))
        except SlurmUnavailableError:
            raise
        except Exception as err:  # otherwise this query would be repeated for ever, before those of all other jobs
            log.exception("Slurm: the answer about job %s cannot be read; please report this", job_id)
            return JobAnswer(job_id, run, refused=repr(err))

    def _query_node(self) -> None:
        state: NodeState | None = None
        problems: list[Fault] = []
        try:
            state = self._client.node(self._node)
        except (SlurmUnavailableError, UnknownJobError) as err:
            self._node_unanswered = True
            self._record_silence(err, self._node_queried_at or self._clock())
            return
        except ValueError as err:
            problems.append(Fault("scheduler_refused", f"Slurm: node state: {err}"))
        self._record_answer()
        with self._changed:
            self._updates.faults += problems
            self._updates.node, self._node_queried_at, self._node_unanswered = state, None, False

    def _record_answer(self) -> None:
        self._backoff.reset()
        self._retry_at, self._silence_message = 0, ""

    def _record_silence(self, err: Exception, since: int) -> None:
        now, pause = self._clock(), int(self._backoff.fail() * (1 + self._phase()) / 2)
        self._retry_at = now + pause
        self._silence_message = (
            f"Slurm: {err} (asked {(now - since) // SECOND} s ago, again in {pause // SECOND} s). Until then only"
            " this node's own data is used: names and accounts of new jobs are missing"
        )
