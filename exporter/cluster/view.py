"""What is known of the cluster, put together from the answers; computed once an answer, not once a scrape.

Owns the sums over the queue and how long an answer may be called live: three times its interval. Refuses to serve
queue, placement and allocation beyond that; what was expected of a node, and counters, stay.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from exporter.cluster.fitting import allowed, fitting
from exporter.cluster.interruptions import Failure
from exporter.cluster.model import TAKES_WORK, Jobs, Node, Nodes, Pending, Reservation, Reservations, Topology
from exporter.cluster.placement import Spread, spread
from exporter.core.model import SECOND

MOST_PARTITIONS = 200
"""Partitions or namespaces with series of their own; the queues of the others, the shortest ones, count as "other"."""
MOST_NODES = 20_000
MOST_RESERVATIONS = 200
PATIENCE = 3
"""Intervals after which an answer is no longer live."""
Pair = tuple[str, str]


class Told(Struct, frozen=True):
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
        return self.at is not None and now - self.at <= PATIENCE * self.interval


class Queue(Struct, frozen=True):
    """Sums over pending jobs; by partition and reason, but for the waits."""

    jobs: Mapping[Pair, int]
    gpus: Mapping[Pair, int]
    waits: Mapping[str, float]
    """Seconds of the job that has waited longest for GPUs, by partition."""


class Fitting(Struct, frozen=True):
    """Of those, what would fit now."""

    jobs: Mapping[Pair, int]
    gpus: Mapping[Pair, int]


class View(Struct, frozen=True, kw_only=True):
    """Everything, at one moment."""

    scheduler: str
    told: tuple[Told, ...] = ()
    queue: Queue | None = None
    fitting: Fitting | None = None
    nodes: tuple[Node, ...] = ()
    nodes_left_out: int = 0
    reservations: tuple[Reservation, ...] = ()
    spread: Spread | None = None
    interrupted_jobs: Mapping[tuple[str, str, str], int] = {}
    interrupted_gpus: Mapping[tuple[str, str, str], int] = {}
    failures: tuple[Failure, ...] = ()

    def live(self, *questions: str, now: int) -> bool:
        """Whether the answers to all of these still count."""
        ages = {told.name: told.live(now) for told in self.told}
        return all(ages.get(question, False) for question in questions)


def queue_of(pending: Iterable[Pending], *, now: float) -> Queue:
    """Add up the jobs that want GPUs; `now` is Unix seconds."""
    jobs: dict[Pair, int] = {}
    gpus: dict[Pair, int] = {}
    waits: dict[str, float] = {}
    for job in pending:
        if job.gpus:
            _count(jobs, (job.partition, job.reason), job.count)
            _count(gpus, (job.partition, job.reason), job.gpus)
            if job.since is not None:
                waits[job.partition] = max(waits.get(job.partition, 0.0), now - job.since)
    return _bounded(Queue(jobs, gpus, waits))


def _count(sums: dict[Pair, int], key: Pair, more: int) -> None:
    sums[key] = sums.get(key, 0) + more


def _bounded(queue: Queue) -> Queue:
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
    return Queue(_folded(queue.jobs, kept), _folded(queue.gpus, kept), waits)


def _folded(sums: Mapping[Pair, int], kept: frozenset[str]) -> dict[Pair, int]:
    folded: dict[Pair, int] = {}
    for (partition, reason), count in sums.items():
        _count(folded, (partition if partition in kept else "other", reason), count)
    return folded


def fitting_of(jobs: Jobs, nodes: Nodes, *, reservations: Reservations, queue: Queue, now: float) -> Fitting:
    """What of the queue would fit; partitions are named as `queue` names them. `now` is Unix seconds."""
    usable = allowed(jobs.places, nodes.nodes, reservations=reservations.reservations, now=now)
    free = {node.name: node.free for node in nodes.nodes}
    # A zero is said of each part of the queue: nothing fits is not the same as not known.
    count, gpus = dict.fromkeys(queue.jobs, 0), dict.fromkeys(queue.jobs, 0)
    for job, tasks in fitting(jobs.pending, free, usable=usable):
        key = (job.partition, job.reason)
        if key not in queue.jobs:
            key = ("other", job.reason)
        count[key] += tasks
        gpus[key] += tasks * (job.gpus // job.count)
    return Fitting(count, gpus)


def spread_of(jobs: Jobs, nodes: Nodes, *, topology: Topology, most: int) -> Spread:
    """Placement of the running jobs."""
    return spread(jobs.runs, nodes.nodes, groups=topology.groups, most=most)


def free_gpus(nodes: Iterable[Node]) -> dict[str, int]:
    """By partition, those that nobody has on nodes that take anybody's work."""
    free: dict[str, int] = {}
    for node in nodes:
        for partition in node.partitions:
            usable = partition in node.open_partitions and node.state in TAKES_WORK
            free[partition] = free.get(partition, 0) + (sum(node.free.values()) if usable else 0)
    return free


def reserved_gpus(reservation: Reservation, nodes: Mapping[str, Node]) -> int | None:
    """As the scheduler says, else all GPUs of its nodes if it has them whole; None: not known."""
    if reservation.gpus is not None:
        return reservation.gpus
    if not reservation.whole:
        return None
    return sum(nodes[name].total for name in reservation.nodes if name in nodes)


def age(told: Told, now: int) -> float | None:
    """Seconds since the last answer; None: there was none."""
    return None if told.at is None else max(0, now - told.at) / SECOND
