"""The loop that queries the scheduler, a few calls per turn, and keeps the newest `ClusterView`.

Owns intervals, failures and the sums over the queue; an answer is live for three of its intervals. Refuses to retry at
once: after a failure no further questions are asked in that turn.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, structs

from exporter.clock import Clock
from exporter.cluster.analysis import Spread, allowed_nodes, fitting_jobs, spread
from exporter.cluster.interruptions import (
    InterruptionKey,
    Interruptions,
    NodeFailure,
    Preemption,
    PreemptionKey,
)
from exporter.cluster.model import TAKES_WORK, ClusterNode, Jobs, Nodes, PendingJob, Reservation, Reservations, Topology
from exporter.core.model import SECOND

MOST_PARTITIONS = 200
"""Partitions or namespaces with series of their own; the others, with the shortest queues, count as "other"."""
MOST_NODES = 20_000
MOST_RESERVATIONS = 200
LIVE_INTERVALS = 3
"""Intervals after which an answer is no longer live."""
STUCK_SECONDS = 900
"""Seconds for which a job must have fitted at every look to be stuck. An engineering estimate: Slurm's backfill looks
every 30 s by default (`bf_interval`, slurm.conf(5)), but gives way to other work of slurmctld, and a node boots for
minutes."""
QueueKey = tuple[str, str]
FittingJob = tuple[PendingJob, int]
"""A job, and how many of its tasks fit."""


class QuestionStatus(Struct, frozen=True):
    """Interval, last answer and failures of one question."""

    name: str
    interval: int
    """Nanoseconds between two askings."""
    at: int | None = None
    """Monotonic nanoseconds of the last answer; None before the first."""
    asked: int = 0
    failed: Mapping[str, int] = {}
    """By kind: silent, unreadable."""
    refused: int = 0
    """Lines or objects of all answers that could not be parsed."""

    def live(self, now: int) -> bool:
        """Whether the last answer is recent enough."""
        return self.at is not None and now - self.at <= LIVE_INTERVALS * self.interval


class QueueTotals(Struct, frozen=True):
    """Sums over pending jobs, by partition and reason."""

    jobs: Mapping[QueueKey, int] = {}
    gpus: Mapping[QueueKey, int] = {}
    waits: Mapping[str, float] = {}
    """Seconds that the longest waiting job has waited for GPUs, by partition."""


class ClusterView(Struct, frozen=True, kw_only=True):
    """All that is exported, at one moment."""

    scheduler: str
    questions: tuple[QuestionStatus, ...] = ()
    queue: QueueTotals = QueueTotals()
    fitting: QueueTotals = QueueTotals()
    """Of these jobs, those that would fit now; without waits."""
    stuck: QueueTotals = QueueTotals()
    """Of these, those that have fitted at every look for STUCK_SECONDS."""
    nodes: tuple[ClusterNode, ...] = ()
    nodes_left_out: int = 0
    reservations: tuple[Reservation, ...] = ()
    spread: Spread = Spread()
    interrupted_jobs: Mapping[InterruptionKey, int] = {}
    interrupted_gpus: Mapping[InterruptionKey, int] = {}
    interrupted_gpu_seconds: Mapping[InterruptionKey, float] = {}
    failures: tuple[NodeFailure, ...] = ()
    preemptions: Mapping[PreemptionKey, int] = {}
    preempted_gpu_seconds: Mapping[PreemptionKey, float] = {}
    latest_preemptions: tuple[Preemption, ...] = ()
    preemption_costs: Mapping[tuple[str, str], float] = {}
    """GPU-seconds by id and partition of the job that began the preemptions."""

    def live(self, *questions: str, now: int) -> bool:
        """Whether the answers to all of these questions are live; `now` is monotonic nanoseconds."""
        return {status.name for status in self.questions if status.live(now)}.issuperset(questions)


def queue_totals(pending: Iterable[PendingJob], *, now: float) -> QueueTotals:
    """Sum up the jobs that need GPUs; `now` is Unix seconds."""
    wanting = [job for job in pending if job.gpus]
    kept = _kept_partitions(wanting)
    jobs, gpus = Counter[QueueKey](), Counter[QueueKey]()
    waits: dict[str, float] = {}
    for job in wanting:
        partition = job.partition if job.partition in kept else "other"
        jobs[partition, job.reason] += job.count
        gpus[partition, job.reason] += job.gpus
        if job.since is not None:
            waits[partition] = max(waits.get(partition, 0.0), now - job.since)
    return QueueTotals(jobs, gpus, waits)


def _kept_partitions(pending: Iterable[PendingJob]) -> frozenset[str]:
    """Return the partitions with series of their own: all, or else those with most jobs."""
    sizes = Counter[str]()
    for job in pending:
        sizes[job.partition] += job.count
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return frozenset(names if len(names) <= MOST_PARTITIONS else names[: MOST_PARTITIONS - 1])


def fitting_now(jobs: Jobs, nodes: Nodes, *, reservations: Reservations, now: float) -> list[FittingJob]:
    """Return the jobs that would fit, with the number of fitting tasks. `now` is Unix seconds."""
    usable = allowed_nodes(jobs.places, nodes.nodes, reservations=reservations.reservations, now=now)
    return fitting_jobs(jobs.pending, {node.name: node.free for node in nodes.nodes}, usable=usable)


def fitting_totals(fitting: Iterable[FittingJob], queue: QueueTotals) -> QueueTotals:
    """Sum up the jobs that fit, with the keys of `queue`."""
    # Zeros for the whole queue: that nothing fits differs from that being unknown.
    count, gpus = dict.fromkeys(queue.jobs, 0), dict.fromkeys(queue.jobs, 0)
    for job, tasks in fitting:
        key = (job.partition, job.reason)
        if key not in queue.jobs:
            key = ("other", job.reason)
        count[key] += tasks
        gpus[key] += tasks * (job.gpus // job.count)
    return QueueTotals(count, gpus)


def free_gpus(nodes: Iterable[ClusterNode]) -> dict[str, int]:
    """Return unallocated GPUs by partition, on nodes that accept work."""
    free = Counter[str]()
    for node in nodes:
        for partition in node.partitions:
            usable = partition in node.open_partitions and node.state in TAKES_WORK
            free[partition] += sum(node.free.values()) if usable else 0
    return free


def reserved_gpus(reservation: Reservation, nodes: Mapping[str, ClusterNode]) -> int | None:
    """Return the reported GPUs, else all of its nodes if it has them whole; None if unknown."""
    if reservation.gpus is not None:
        return reservation.gpus
    if not reservation.whole:
        return None
    return sum(nodes[name].total for name in reservation.nodes if name in nodes)


log = logging.getLogger(__name__)
CALLS_PER_TURN = 3
_RETRY_TURNS = 2
"""Turns after which a rare question that failed is asked again."""
QuestionAnswer = Jobs | Nodes | Reservations | Topology


class ClusterUnavailableError(Exception):
    """The scheduler gave no answer; the message has what was tried and how to fix it."""


class Question(Struct, frozen=True):
    """One kind of request to the scheduler."""

    name: str
    """jobs, nodes, reservations or topology."""
    every: int
    """Interval in turns."""
    calls: int
    """RPCs that it costs."""
    ask: Callable[[], Any]
    """Return a QuestionAnswer. Raises ClusterUnavailableError, and ValueError if it cannot be parsed."""


class ClusterSource(Protocol):
    """A scheduler's answers about its cluster."""

    name: str

    @property
    def questions(self) -> Sequence[Question]:
        """Questions to ask, the most important first."""
        ...

    def close(self) -> None:
        """Abort what is under way. Never raises."""
        ...


class ClusterWatcher:
    """Asks questions turn by turn; `view` is the newest, replaced as a whole."""

    def __init__(self, source: ClusterSource, clock: Clock, *, refresh_seconds: float, max_jobs: int) -> None:
        """`max_jobs` limits the jobs whose placement is exported."""
        self._source, self._clock = source, clock
        self._turn, self._most = round(refresh_seconds * SECOND), max_jobs
        self._status = {q.name: QuestionStatus(q.name, q.every * self._turn) for q in source.questions}
        self._last: dict[str, int] = {}
        """Turn in which each question was last asked."""
        self._next: dict[str, int] = {}
        """Turn in which each question is due."""
        self._turns, self._unanswered = 0, False
        self._known: dict[type, Any] = {}
        self._interruptions = Interruptions()
        self._fitting_since: dict[tuple[str, int], int] = {}
        """Monotonic nanoseconds since when a job with that many pending tasks has fitted."""
        self.view = ClusterView(scheduler=source.name, questions=tuple(self._status.values()))
        self.error = "nothing has been asked yet"
        """Why something is unknown; empty while all is known."""

    def run(self, stop: threading.Event) -> None:
        """Take turns until `stop` is set."""
        due = self._clock.now()
        while not stop.is_set():
            try:
                self.turn()
            except Exception as err:  # the next turn comes when it is due: the scheduler is not asked more often
                log.exception("a turn failed; please report this")
                self.error = f"a turn failed: {err!r}"
            due = max(due + self._turn, self._clock.now())
            self._clock.wait(due, stop)

    def turn(self) -> None:
        """Ask the questions that are due, and build the next view."""
        calls, failures = CALLS_PER_TURN, []
        for question in self._due():
            if question.calls <= calls:
                calls -= question.calls
                failures += self._ask(question)
                if self._unanswered:
                    break
        self.error = "; ".join(failures)
        self._turns += 1
        self.view = self._build_view()

    def _due(self) -> list[Question]:
        """Return the questions of this turn, those asked longest ago first."""
        due = (q for q in self._source.questions if self._next.get(q.name, 0) <= self._turns)
        return sorted(due, key=lambda q: self._last.get(q.name, -1))

    def _ask(self, question: Question) -> list[str]:
        status = self._status[question.name]
        status = structs.replace(status, asked=status.asked + 1)
        self._unanswered = False
        self._last[question.name] = self._turns
        self._next[question.name] = self._turns + question.every
        try:
            answer: QuestionAnswer = question.ask()
        except Exception as err:
            if not isinstance(err, (ClusterUnavailableError, ValueError)):
                log.exception("%s: the answer cannot be read; please report this", question.name)
            self._next[question.name] = self._turns + min(question.every, _RETRY_TURNS)
            self._unanswered = isinstance(err, ClusterUnavailableError)
            kind = "silent" if self._unanswered else "unreadable"
            self._status[question.name] = structs.replace(
                status, failed={**status.failed, kind: status.failed.get(kind, 0) + 1}
            )
            log.warning("%s: %s", question.name, err)
            return [f"{question.name}: {err}"]
        if answer.refused:
            log.warning("%s: %d entries could not be read and are left out", question.name, answer.refused)
        refused = status.refused + answer.refused
        self._status[question.name] = structs.replace(status, at=self._clock.now(), refused=refused)
        self._apply(answer)
        return []

    def _apply(self, answer: QuestionAnswer) -> None:
        self._known[type(answer)] = answer
        wall = self._clock.wall() / SECOND
        if isinstance(answer, Jobs):
            self._interruptions.update_jobs(answer.runs, at=wall)
        elif isinstance(answer, Nodes):
            self._interruptions.update_nodes(answer)

    def _build_view(self) -> ClusterView:
        """Combine what is known; readers of the view leave out what is too old."""
        wall = self._clock.wall() / SECOND
        jobs: Jobs = self._known.get(Jobs, Jobs())
        nodes: Nodes = self._known.get(Nodes, Nodes())
        reservations: Reservations = self._known.get(Reservations, Reservations())
        topology: Topology = self._known.get(Topology, Topology())
        queue = queue_totals(jobs.pending, now=wall)
        fitting = fitting_now(jobs, nodes, reservations=reservations, now=wall)
        counted = self._interruptions
        return ClusterView(
            scheduler=self._source.name,
            questions=tuple(self._status.values()),
            queue=queue,
            fitting=fitting_totals(fitting, queue),
            stuck=fitting_totals(self._stuck(fitting), queue),
            nodes=nodes.nodes[:MOST_NODES],
            nodes_left_out=max(0, len(nodes.nodes) - MOST_NODES),
            reservations=reservations.reservations[:MOST_RESERVATIONS],
            spread=spread(jobs.runs, nodes.nodes, groups=topology.groups, most=self._most),
            interrupted_jobs=dict(counted.jobs),
            interrupted_gpus=dict(counted.gpus),
            interrupted_gpu_seconds=dict(counted.gpu_seconds),
            failures=tuple(counted.failures),
            preemptions=dict(counted.preemptions),
            preempted_gpu_seconds=dict(counted.preempted_gpu_seconds),
            latest_preemptions=tuple(counted.latest),
            preemption_costs=dict(counted.costs),
        )

    def _stuck(self, fitting: Sequence[FittingJob]) -> list[FittingJob]:
        """Return those that have fitted long enough; an array of which a task has started meanwhile begins anew."""
        now = self._clock.now()
        # While the scheduler is silent nobody looks, and nothing starts: that a job still fits shows nothing.
        if not all(self._status[name].live(now) for name in ("jobs", "nodes")):
            fitting = []
        keys = [(job.job_id, job.count) for job, _ in fitting]
        self._fitting_since = {key: self._fitting_since.get(key, now) for key in keys}
        since = map(self._fitting_since.__getitem__, keys)
        return [each for each, at in zip(fitting, since, strict=True) if now - at >= STUCK_SECONDS * SECOND]
