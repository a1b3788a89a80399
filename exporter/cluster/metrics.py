"""METRICS of `gpu-efficiency cluster`, one row each, and the page that holds them.

Owns names, meanings and the bound: with P partitions (200 at most), N nodes (20,000 at most) of T types of GPU each,
R reservations (200 at most) and J jobs told of (`cluster.max_jobs`), there are at most 70 P + N (2 + 2 T) + 3 R + 9 J
+ 150 series. Partition, reason, node, reservation and job id are the only words of others on it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from msgspec import Struct

from exporter import __version__
from exporter.cluster.view import View, age, free_gpus, reserved_gpus
from exporter.core import exposition
from exporter.core.catalog import Metric, Read, Sample
from exporter.core.snapshot import Snapshot

_P = "gpu_efficiency_cluster_"
KINDS = ("silent", "unreadable")


class Now(Struct, frozen=True):
    """A view at the moment of a scrape."""

    view: View
    now: int
    """Monotonic nanoseconds."""

    def live(self, *questions: str) -> bool:
        """Whether the answers to all of these still count."""
        return self.view.live(*questions, now=self.now)


def page(view: View, *, now: int, openmetrics: bool = False) -> bytes:
    """The exposition, without OpenMetrics' closing `# EOF`; `now` is monotonic nanoseconds."""
    # The writer hands its first argument through to the rows, whatever it is.
    return exposition.render(cast("Snapshot", Now(view, now)), openmetrics=openmetrics, metrics=METRICS)


def _read(read: Callable[[Now], Iterable[Sample]]) -> Read:
    return cast("Read", read)


def _queue_jobs(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs") and seen.view.queue is not None:
        yield from sorted(seen.view.queue.jobs.items())


def _queue_gpus(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs") and seen.view.queue is not None:
        yield from sorted(seen.view.queue.gpus.items())


def _waits(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs") and seen.view.queue is not None:
        for partition, seconds in sorted(seen.view.queue.waits.items()):
            yield (partition,), max(0.0, seconds)


def _fitting_jobs(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs", "nodes") and seen.view.fitting is not None:
        yield from sorted(seen.view.fitting.jobs.items())


def _fitting_gpus(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs", "nodes") and seen.view.fitting is not None:
        yield from sorted(seen.view.fitting.gpus.items())


def _free(seen: Now) -> Iterator[Sample]:
    if seen.live("nodes"):
        for partition, gpus in sorted(free_gpus(seen.view.nodes).items())[:200]:
            yield (partition,), gpus


def _expected(seen: Now) -> Iterator[Sample]:
    for node in seen.view.nodes:
        for kind, gpus in node.gpus.items():
            yield (node.name, kind), gpus / node.shares


def _allocated(seen: Now) -> Iterator[Sample]:
    if seen.live("nodes"):
        for node in seen.view.nodes:
            for kind in node.gpus:
                yield (node.name, kind), node.used.get(kind, 0) / node.shares


def _state(seen: Now) -> Iterator[Sample]:
    if seen.live("nodes"):
        for node in seen.view.nodes:
            yield (node.name, node.state), 1


def _models(seen: Now) -> Iterator[Sample]:
    for node in seen.view.nodes:
        if node.model:
            yield (node.name, node.model), 1


def _left_out(seen: Now) -> Iterator[Sample]:
    yield ("nodes",), seen.view.nodes_left_out
    if seen.live("jobs", "nodes") and seen.view.spread is not None:
        yield ("jobs",), seen.view.spread.left_out


def _reservation_gpus(seen: Now) -> Iterator[Sample]:
    nodes = {node.name: node for node in seen.view.nodes}
    for reservation in seen.view.reservations if seen.live("reservations", "nodes") else ():
        gpus = reserved_gpus(reservation, nodes)
        if gpus is not None:
            yield (reservation.name,), gpus


def _reservation_start(seen: Now) -> Iterator[Sample]:
    for reservation in seen.view.reservations if seen.live("reservations") else ():
        if reservation.start is not None:
            yield (reservation.name,), reservation.start


def _reservation_end(seen: Now) -> Iterator[Sample]:
    for reservation in seen.view.reservations if seen.live("reservations") else ():
        if reservation.end is not None:
            yield (reservation.name,), reservation.end


def _interruptions(seen: Now) -> Iterator[Sample]:
    yield from sorted(seen.view.interrupted_jobs.items())


def _interrupted_gpus(seen: Now) -> Iterator[Sample]:
    yield from sorted(seen.view.interrupted_gpus.items())


def _failures(seen: Now) -> Iterator[Sample]:
    latest = {(each.node, each.job_id, each.partition): each.at for each in seen.view.failures}
    yield from latest.items()


def _job_gpus(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs") and seen.view.spread is not None:
        for job_id, gpus in seen.view.spread.gpus:
            yield (job_id,), gpus


def _span(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs", "nodes") and seen.view.spread is not None:
        for each in seen.view.spread.placements:
            yield (each.job_id, each.level), each.spans


def _fewest(seen: Now) -> Iterator[Sample]:
    if seen.live("jobs", "nodes") and seen.view.spread is not None:
        for each in seen.view.spread.placements:
            yield (each.job_id, each.level), each.fewest


def _age(seen: Now) -> Iterator[Sample]:
    for told in seen.view.told:
        seconds = age(told, seen.now)
        if seconds is not None:
            yield (told.name,), seconds


def _asked(seen: Now) -> Iterator[Sample]:
    for told in seen.view.told:
        yield (told.name,), told.asked


def _failed(seen: Now) -> Iterator[Sample]:
    for told in seen.view.told:
        for kind in KINDS:
            yield (told.name, kind), told.failed.get(kind, 0)


def _refused(seen: Now) -> Iterator[Sample]:
    for told in seen.view.told:
        yield (told.name,), told.refused


def _build(seen: Now) -> Iterator[Sample]:
    yield (__version__, seen.view.scheduler), 1


def _row(
    name: str,
    kind: str,
    *about: str,
    read: Callable[[Now], Iterable[Sample]],
    labels: tuple[str, ...] = (),
    unit: str = "",
) -> Metric:
    return Metric(_P + name, kind, "".join(about), _read(read), labels, unit, "cluster")


_QUEUE = ("partition", "reason")
_NODE = ("node", "gpu_type")
_LOST = ("partition", "cause", "outcome")
_SPREAD = ("job_id", "level")
METRICS: tuple[Metric, ...] = (
    _row(
        "build_info",
        "gauge",
        "1: version of this program, and whom it asks.",
        read=_build,
        labels=("version", "scheduler"),
    ),
    _row(
        "queue_jobs",
        "gauge",
        "Pending jobs that want GPUs, array tasks one by one, by partition (namespace on Kubernetes) and reason. Of a"
        " job in several partitions the first counts. Beyond 200 partitions those with the shortest queues are other.",
        read=_queue_jobs,
        labels=_QUEUE,
    ),
    _row("queue_gpus", "gauge", "GPUs those jobs want.", read=_queue_gpus, labels=_QUEUE),
    _row(
        "queue_longest_wait_seconds",
        "gauge",
        "How long the longest waiting job has been eligible for GPUs: held jobs, and those that wait for another job"
        " or for a time, do not count.",
        read=_waits,
        labels=("partition",),
        unit="seconds",
    ),
    _row(
        "queue_fitting_jobs",
        "gauge",
        "Pending jobs that would fit the GPUs which are free now, in order of priority, each whole: by GPUs and their"
        " type, nodes, partition, features and reservation. CPUs, memory and limits are not weighed: where this is not"
        " 0, something else than GPUs holds jobs back.",
        read=_fitting_jobs,
        labels=_QUEUE,
    ),
    _row("queue_fitting_gpus", "gauge", "GPUs those jobs want.", read=_fitting_gpus, labels=_QUEUE),
    _row(
        "partition_free_gpus",
        "gauge",
        "GPUs that nobody has, on nodes that take new work. A node in several partitions counts in each.",
        read=_free,
        labels=("partition",),
    ),
    _row(
        "node_expected_gpus",
        "gauge",
        "GPUs that the scheduler's configuration has on the node: paid for, whether or not its daemon answers. A MIG"
        " instance that is handed out by itself counts as one, under its own type; time-sliced shares of a GPU are one."
        " Stays when the scheduler is silent.",
        read=_expected,
        labels=_NODE,
    ),
    _row("node_allocated_gpus", "gauge", "Of those, the ones that jobs have.", read=_allocated, labels=_NODE),
    _row(
        "node_state",
        "gauge",
        "1 for the node's state: idle, mixed, allocated, drained, draining, down, maintenance, reserved, planned,"
        " cordoned, not_ready or unknown.",
        read=_state,
        labels=("node", "state"),
    ),
    _row(
        "node_info",
        "gauge",
        "1: model of the node's GPUs, where the scheduler has one beside their type.",
        read=_models,
        labels=("node", "model"),
    ),
    _row("reservation_gpus", "gauge", "GPUs a reservation keeps.", read=_reservation_gpus, labels=("reservation",)),
    _row(
        "reservation_start_timestamp_seconds",
        "gauge",
        "When it begins, Unix seconds.",
        read=_reservation_start,
        labels=("reservation",),
        unit="seconds",
    ),
    _row(
        "reservation_end_timestamp_seconds",
        "gauge",
        "When it ends, Unix seconds.",
        read=_reservation_end,
        labels=("reservation",),
        unit="seconds",
    ),
    _row(
        "interruptions_total",
        "counter",
        "Times jobs were thrown back into the queue (outcome requeued) or ended (ended) by something else than"
        " themselves since this program began. Cause node_failure: a node it ran on has gone down, failed or been"
        " drained since it was last seen at work; preempted: the scheduler says so; unknown: neither, which includes"
        " Slurm's PreemptMode=REQUEUE.",
        read=_interruptions,
        labels=_LOST,
    ),
    _row("interrupted_gpus_total", "counter", "GPUs those jobs had, each time.", read=_interrupted_gpus, labels=_LOST),
    _row(
        "node_failure_timestamp_seconds",
        "gauge",
        "When a node was seen to have failed a job, Unix seconds; the latest 50.",
        read=_failures,
        labels=("node", "job_id", "partition"),
        unit="seconds",
    ),
    _row(
        "job_gpus",
        "gauge",
        "GPUs of a running job of two or more; the largest jobs, as many as cluster.max_jobs.",
        read=_job_gpus,
        labels=("job_id",),
    ),
    _row(
        "job_span",
        "gauge",
        "Nodes, leaf switches (switch), NVLink domains (nvlink_domain) or zones that such a job is spread over. A"
        " level that is not known of all nodes of its partition is absent.",
        read=_span,
        labels=_SPREAD,
    ),
    _row(
        "job_span_fewest",
        "gauge",
        "The fewest that hold as many GPUs of the same types in its partition, were all of them free.",
        read=_fewest,
        labels=_SPREAD,
    ),
    _row(
        "left_out",
        "gauge",
        "Nodes beyond 20,000 and running jobs beyond cluster.max_jobs that have no series of their own.",
        read=_left_out,
        labels=("what",),
    ),
    _row(
        "answer_age_seconds",
        "gauge",
        "Age of the scheduler's last answer, by question. After three intervals what follows from it is left out.",
        read=_age,
        labels=("question",),
        unit="seconds",
    ),
    _row("questions_total", "counter", "Questions asked.", read=_asked, labels=("question",)),
    _row(
        "failed_questions_total",
        "counter",
        "Questions without an answer (silent), or with one that cannot be read (unreadable).",
        read=_failed,
        labels=("question", "kind"),
    ),
    _row(
        "refused_total",
        "counter",
        "Jobs, nodes or lines of answers that could not be read, and are left out.",
        read=_refused,
        labels=("question",),
    ),
)
