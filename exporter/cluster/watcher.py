"""The loop that asks the scheduler what is due, a few calls each turn, and keeps the newest `ClusterView`.

Owns intervals, failures and the sums over the queue; an answer is live for three of its intervals. Refuses to ask more
because something failed: a controller in trouble gets no further questions that turn.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, structs

from exporter.clock import Clock
from exporter.cluster.analysis import InterruptionCounter, NodeFailure, Spread, allowed_nodes, fitting_jobs, spread
from exporter.cluster.model import TAKES_WORK, ClusterNode, Jobs, Nodes, PendingJob, Reservation, Reservations, Topology
from exporter.core.model import SECOND

MOST_PARTITIONS = 200
"""Partitions or namespaces with series of their own; the queues of the others, the shortest ones, count as "other"."""
MOST_NODES = 20_000
MOST_RESERVATIONS = 200
LIVE_INTERVALS = 3
"""Intervals after which an answer is no longer live."""
QueueKey = tuple[str, str]


class QuestionStatus(Struct, frozen=True):
    """How one question fares."""

    name: str
    interval: int
    """Nanoseconds between two."""
    at: int | None = None
    """Monotonic nanoseconds of the last answer; None: there was none yet."""
    asked: int = 0
    failed: Mapping[str, int] = {}
    """By kind: silent, unreadable."""
    refused: int = 0
    """Lines or objects of all answers that could not be read."""

    def live(self, now: int) -> bool:
        """Whether the last answer still counts."""
        return self.at is not None and now - self.at <= LIVE_INTERVALS * self.interval


class QueueTotals(Struct, frozen=True):
    """Sums over pending jobs; by partition and reason, but for the waits."""

    jobs: Mapping[QueueKey, int] = {}
    gpus: Mapping[QueueKey, int] = {}
    waits: Mapping[str, float] = {}
    """Seconds of the job that has waited longest for GPUs, by partition."""


class FittingTotals(Struct, frozen=True):
    """Of those, what would fit now."""

    jobs: Mapping[QueueKey, int] = {}
    gpus: Mapping[QueueKey, int] = {}


class ClusterView(Struct, frozen=True, kw_only=True):
    """Everything, at one moment."""

    scheduler: str
    questions: tuple[QuestionStatus, ...] = ()
    queue: QueueTotals = QueueTotals()
    fitting: FittingTotals = FittingTotals()
    nodes: tuple[ClusterNode, ...] = ()
    nodes_left_out: int = 0
    reservations: tuple[Reservation, ...] = ()
    spread: Spread = Spread()
    interrupted_jobs: Mapping[tuple[str, str, str], int] = {}
    interrupted_gpus: Mapping[tuple[str, str, str], int] = {}
    failures: tuple[NodeFailure, ...] = ()

    def live(self, *questions: str, now: int) -> bool:
        """Whether the answers to all of these still count."""
        ages = {status.name: status.live(now) for status in self.questions}
        return all(ages.get(question, False) for question in questions)


def queue_totals(pending: Iterable[PendingJob], *, now: float) -> QueueTotals:
    """Add up the jobs that want GPUs; `now` is Unix seconds."""
    jobs: dict[QueueKey, int] = {}
    gpus: dict[QueueKey, int] = {}
    waits: dict[str, float] = {}
    for job in pending:
        if job.gpus:
            _add(jobs, (job.partition, job.reason), job.count)
            _add(gpus, (job.partition, job.reason), job.gpus)
            if job.since is not None:
                waits[job.partition] = max(waits.get(job.partition, 0.0), now - job.since)
    return _bound_partitions(QueueTotals(jobs, gpus, waits))


def _add(sums: dict[QueueKey, int], key: QueueKey, more: int) -> None:
    sums[key] = sums.get(key, 0) + more


def _bound_partitions(queue: QueueTotals) -> QueueTotals:
    """The partitions with most jobs, and all others as one."""
    sizes: dict[str, int] = {}
    for (partition, _), count in queue.jobs.items():
        sizes[partition] = sizes.get(partition, 0) + count
    if len(sizes) <= MOST_PARTITIONS:
        return queue
    kept = frozenset(sorted(sizes, key=lambda name: (-sizes[name], name))[: MOST_PARTITIONS - 1])
    waits: dict[str, float] = {}
    for partition, wait in queue.waits.items():
        name = partition if partition in kept else "other"
        waits[name] = max(waits.get(name, 0.0), wait)
    return QueueTotals(_fold_partitions(queue.jobs, kept), _fold_partitions(queue.gpus, kept), waits)


def _fold_partitions(sums: Mapping[QueueKey, int], kept: frozenset[str]) -> dict[QueueKey, int]:
    folded: dict[QueueKey, int] = {}
    for (partition, reason), count in sums.items():
        _add(folded, (partition if partition in kept else "other", reason), count)
    return folded


def fitting_totals(
    jobs: Jobs, nodes: Nodes, *, reservations: Reservations, queue: QueueTotals, now: float
) -> FittingTotals:
    """What of the queue would fit; partitions are named as `queue` names them. `now` is Unix seconds."""
    usable = allowed_nodes(jobs.places, nodes.nodes, reservations=reservations.reservations, now=now)
    free = {node.name: node.free for node in nodes.nodes}
    # A zero is given for each part of the queue: nothing fits is not the same as not known.
    count, gpus = dict.fromkeys(queue.jobs, 0), dict.fromkeys(queue.jobs, 0)
    for job, tasks in fitting_jobs(jobs.pending, free, usable=usable):
        key = (job.partition, job.reason)
        if key not in queue.jobs:
            key = ("other", job.reason)
        count[key] += tasks
        gpus[key] += tasks * (job.gpus // job.count)
    return FittingTotals(count, gpus)


def job_spread(jobs: Jobs, nodes: Nodes, *, topology: Topology, most: int) -> Spread:
    """Placement of the running jobs."""
    return spread(jobs.runs, nodes.nodes, groups=topology.groups, most=most)


def free_gpus(nodes: Iterable[ClusterNode]) -> dict[str, int]:
    """By partition, those that nobody has on nodes that take anybody's work."""
    free: dict[str, int] = {}
    for node in nodes:
        for partition in node.partitions:
            usable = partition in node.open_partitions and node.state in TAKES_WORK
            free[partition] = free.get(partition, 0) + (sum(node.free.values()) if usable else 0)
    return free


def reserved_gpus(reservation: Reservation, nodes: Mapping[str, ClusterNode]) -> int | None:
    """As the scheduler reports, else all GPUs of its nodes if it has them whole; None: not known."""
    if reservation.gpus is not None:
        return reservation.gpus
    if not reservation.whole:
        return None
    return sum(nodes[name].total for name in reservation.nodes if name in nodes)


def age(status: QuestionStatus, now: int) -> float | None:
    """Seconds since the last answer; None: there was none."""
    return None if status.at is None else max(0, now - status.at) / SECOND


log = logging.getLogger(__name__)
CALLS_PER_TURN = 3
_RETRY_TURNS = 2
"""Turns after which a rare question that failed is asked again."""
QuestionAnswer = Jobs | Nodes | Reservations | Topology


class ClusterUnavailableError(Exception):
    """The scheduler gave no answer; the message has what was tried and what to do."""


class Question(Struct, frozen=True):
    """One thing to ask for."""

    name: str
    """jobs, nodes, reservations or topology."""
    every: int
    """Turns between two."""
    calls: int
    """What it costs the scheduler."""
    ask: Callable[[], Any]
    """Gives a QuestionAnswer; raises ClusterUnavailableError, and ValueError for an answer that cannot be read."""


class ClusterSource(Protocol):
    """A scheduler, as far as this command asks it."""

    name: str

    @property
    def questions(self) -> Sequence[Question]:
        """What to ask, the most wanted first."""
        ...

    def close(self) -> None:
        """Give up what is under way. Never raises."""
        ...


class ClusterWatcher:
    """Asks turn by turn; `view` is the newest, swapped as one reference."""

    def __init__(self, source: ClusterSource, clock: Clock, *, refresh_seconds: float, max_jobs: int) -> None:
        """`max_jobs` bounds the jobs whose placement is exported."""
        self._source, self._clock = source, clock
        self._turn, self._most = round(refresh_seconds * SECOND), max_jobs
        self._status = {q.name: QuestionStatus(q.name, q.every * self._turn) for q in source.questions}
        self._last: dict[str, int] = {}
        """Turn in which each was asked last."""
        self._next: dict[str, int] = {}
        """Turn in which each is due."""
        self._turns, self._unanswered = 0, False
        self._known: dict[type, Any] = {}
        self._interruptions = InterruptionCounter()
        self.view = ClusterView(scheduler=source.name, questions=tuple(self._status.values()))
        self.error = "nothing has been asked yet"
        """Why something is not known; empty while all is."""

    def run(self, stop: threading.Event) -> None:
        """Take turns until `stop` is set."""
        due = self._clock.now()
        while not stop.is_set():
            self.turn()
            due = max(due + self._turn, self._clock.now())
            self._clock.wait(due, stop)

    def turn(self) -> None:
        """Ask what is due, and make the next view."""
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
        """Questions of this turn; those asked longest ago first, and of these as the source has them."""
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
        except (ClusterUnavailableError, ValueError) as err:
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
            self._interruptions.update_nodes(answer.nodes)

    def _build_view(self) -> ClusterView:
        """Put together what is known; what is too old is left out by who reads the view."""
        wall = self._clock.wall() / SECOND
        jobs: Jobs = self._known.get(Jobs, Jobs())
        nodes: Nodes = self._known.get(Nodes, Nodes())
        reservations: Reservations = self._known.get(Reservations, Reservations())
        queue = queue_totals(jobs.pending, now=wall)
        counted = self._interruptions
        return ClusterView(
            scheduler=self._source.name,
            questions=tuple(self._status.values()),
            queue=queue,
            fitting=fitting_totals(jobs, nodes, reservations=reservations, queue=queue, now=wall),
            nodes=nodes.nodes[:MOST_NODES],
            nodes_left_out=max(0, len(nodes.nodes) - MOST_NODES),
            reservations=reservations.reservations[:MOST_RESERVATIONS],
            spread=job_spread(jobs, nodes, topology=self._known.get(Topology, Topology()), most=self._most),
            interrupted_jobs=dict(counted.jobs),
            interrupted_gpus=dict(counted.gpus),
            failures=tuple(counted.failures),
        )
