"""METRICS of `gpu-efficiency cluster`, one row each, and the exposition of them.

With P partitions (200 at most), N nodes (20,000 at most) of T types of GPU each, R reservations (200 at most) and J
jobs (`cluster.max_jobs`) there are at most 70 P + N (2 + 2 T) + 3 R + 9 J + 150 series.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from msgspec import Struct

from exporter import __version__
from exporter.cluster.watcher import ClusterView, age, free_gpus, reserved_gpus
from exporter.core import exposition
from exporter.core.metrics import Metric, MetricReader, MetricSample
from exporter.core.snapshot import Snapshot

_P = "gpu_efficiency_cluster_"
FAILURE_KINDS = ("silent", "unreadable")


class ClusterScrape(Struct, frozen=True):
    """A view at the moment of a scrape."""

    view: ClusterView
    now: int
    """Monotonic nanoseconds."""

    def live(self, *questions: str) -> bool:
        """Whether the answers to all of these questions are still live."""
        return self.view.live(*questions, now=self.now)


def page(view: ClusterView, *, now: int, openmetrics: bool = False) -> bytes:
    """Return the exposition without OpenMetrics' closing `# EOF`; `now` is monotonic nanoseconds."""
    # The writer passes its first argument to the rows, whatever its type.
    return exposition.render(cast("Snapshot", ClusterScrape(view, now)), openmetrics=openmetrics, metrics=METRICS)


def _expected(scrape: ClusterScrape) -> Iterator[MetricSample]:
    for node in scrape.view.nodes:
        for kind, gpus in node.gpus.items():
            yield (node.name, kind), gpus / node.shares


def _allocated(scrape: ClusterScrape) -> Iterator[MetricSample]:
    for node in scrape.view.nodes:
        for kind in node.gpus:
            yield (node.name, kind), node.used.get(kind, 0) / node.shares


def _left_out(scrape: ClusterScrape) -> Iterator[MetricSample]:
    yield ("nodes",), scrape.view.nodes_left_out
    if scrape.live("jobs", "nodes"):
        yield ("jobs",), scrape.view.spread.left_out


def _reservation_gpus(scrape: ClusterScrape) -> Iterator[MetricSample]:
    nodes = {node.name: node for node in scrape.view.nodes}
    for reservation in scrape.view.reservations:
        gpus = reserved_gpus(reservation, nodes)
        if gpus is not None:
            yield (reservation.name,), gpus


def _age(scrape: ClusterScrape) -> Iterator[MetricSample]:
    for status in scrape.view.questions:
        seconds = age(status, scrape.now)
        if seconds is not None:
            yield (status.name,), seconds


def _row(
    name: str,
    kind: str,
    about: str,
    *,
    read: Callable[[ClusterScrape], Iterable[MetricSample]],
    labels: tuple[str, ...] = (),
    unit: str = "",
    live: tuple[str, ...] = (),
) -> Metric:
    """Define one metric; it has no samples while an answer in `live` is too old."""

    def samples(scrape: ClusterScrape) -> Iterable[MetricSample]:
        return read(scrape) if scrape.live(*live) else ()

    return Metric(_P + name, kind, about, cast("MetricReader", samples), labels, unit, "cluster")


_QUEUE = ("partition", "reason")
_NODE = ("node", "gpu_type")
_LOST = ("partition", "cause", "outcome")
_SPREAD = ("job_id", "level")
METRICS: tuple[Metric, ...] = (
    _row(
        "build_info",
        "gauge",
        "1: version of this program, and whom it asks.",
        read=lambda s: (((__version__, s.view.scheduler), 1),),
        labels=("version", "scheduler"),
    ),
    _row(
        "queue_jobs",
        "gauge",
        "Pending jobs that want GPUs, array tasks one by one, by partition (namespace on Kubernetes) and reason. Of a"
        " job in several partitions the first counts. Beyond 200 partitions those with the shortest queues are other.",
        read=lambda s: sorted(s.view.queue.jobs.items()),
        live=("jobs",),
        labels=_QUEUE,
    ),
    _row(
        "queue_gpus",
        "gauge",
        "GPUs those jobs want.",
        read=lambda s: sorted(s.view.queue.gpus.items()),
        live=("jobs",),
        labels=_QUEUE,
    ),
    _row(
        "queue_longest_wait_seconds",
        "gauge",
        "How long the longest waiting job has been eligible for GPUs: held jobs, and those that wait for another job"
        " or for a time, do not count.",
        read=lambda s: (((name,), max(0.0, wait)) for name, wait in sorted(s.view.queue.waits.items())),
        live=("jobs",),
        labels=("partition",),
        unit="seconds",
    ),
    _row(
        "queue_fitting_jobs",
        "gauge",
        "Pending jobs that would fit the GPUs which are free now, in order of priority, each whole: by GPUs and their"
        " type, nodes, partition, features and reservation. CPUs, memory and limits are not weighed: where this is not"
        " 0, something else than GPUs holds jobs back.",
        read=lambda s: sorted(s.view.fitting.jobs.items()),
        live=("jobs", "nodes"),
        labels=_QUEUE,
    ),
    _row(
        "queue_fitting_gpus",
        "gauge",
        "GPUs those jobs want.",
        read=lambda s: sorted(s.view.fitting.gpus.items()),
        live=("jobs", "nodes"),
        labels=_QUEUE,
    ),
    _row(
        "partition_free_gpus",
        "gauge",
        "GPUs that nobody has, on nodes that take new work. A node in several partitions counts in each.",
        read=lambda s: (((name,), gpus) for name, gpus in sorted(free_gpus(s.view.nodes).items())[:200]),
        live=("nodes",),
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
    _row(
        "node_allocated_gpus",
        "gauge",
        "Of those, the ones that jobs have.",
        read=_allocated,
        live=("nodes",),
        labels=_NODE,
    ),
    _row(
        "node_state",
        "gauge",
        "1 for the node's state: idle, mixed, allocated, drained, draining, down, maintenance, reserved, planned,"
        " cordoned, not_ready or unknown.",
        read=lambda s: (((node.name, node.state), 1) for node in s.view.nodes),
        live=("nodes",),
        labels=("node", "state"),
    ),
    _row(
        "node_info",
        "gauge",
        "1: model of the node's GPUs, where the scheduler has one beside their type.",
        read=lambda s: (((node.name, node.model), 1) for node in s.view.nodes if node.model),
        labels=("node", "model"),
    ),
    _row(
        "reservation_gpus",
        "gauge",
        "GPUs a reservation keeps.",
        read=_reservation_gpus,
        live=("reservations", "nodes"),
        labels=("reservation",),
    ),
    _row(
        "reservation_start_timestamp_seconds",
        "gauge",
        "When it begins, Unix seconds.",
        read=lambda s: (((each.name,), each.start) for each in s.view.reservations if each.start is not None),
        live=("reservations",),
        labels=("reservation",),
        unit="seconds",
    ),
    _row(
        "reservation_end_timestamp_seconds",
        "gauge",
        "When it ends, Unix seconds.",
        read=lambda s: (((each.name,), each.end) for each in s.view.reservations if each.end is not None),
        live=("reservations",),
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
        read=lambda s: sorted(s.view.interrupted_jobs.items()),
        labels=_LOST,
    ),
    _row(
        "interrupted_gpus_total",
        "counter",
        "GPUs those jobs had, each time.",
        read=lambda s: sorted(s.view.interrupted_gpus.items()),
        labels=_LOST,
    ),
    _row(
        "node_failure_timestamp_seconds",
        "gauge",
        "When a node was seen to have failed a job, Unix seconds; the latest 50.",
        read=lambda s: {(each.node, each.job_id, each.partition): each.at for each in s.view.failures}.items(),
        labels=("node", "job_id", "partition"),
        unit="seconds",
    ),
    _row(
        "job_gpus",
        "gauge",
        "GPUs of a running job of two or more; the largest jobs, as many as cluster.max_jobs.",
        read=lambda s: (((job_id,), gpus) for job_id, gpus in s.view.spread.gpus),
        live=("jobs",),
        labels=("job_id",),
    ),
    _row(
        "job_span",
        "gauge",
        "Nodes, leaf switches (switch), NVLink domains (nvlink_domain) or zones that such a job is spread over. A"
        " level that is not known of all nodes of its partition is absent.",
        read=lambda s: (((each.job_id, each.level), each.spans) for each in s.view.spread.placements),
        live=("jobs", "nodes"),
        labels=_SPREAD,
    ),
    _row(
        "job_span_fewest",
        "gauge",
        "The fewest that hold as many GPUs of the same types in its partition, were all of them free.",
        read=lambda s: (((each.job_id, each.level), each.fewest) for each in s.view.spread.placements),
        live=("jobs", "nodes"),
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
    _row(
        "questions_total",
        "counter",
        "Questions asked.",
        read=lambda s: (((each.name,), each.asked) for each in s.view.questions),
        labels=("question",),
    ),
    _row(
        "failed_questions_total",
        "counter",
        "Questions without an answer (silent), or with one that cannot be read (unreadable).",
        read=lambda s: (
            ((each.name, kind), each.failed.get(kind, 0)) for each in s.view.questions for kind in FAILURE_KINDS
        ),
        labels=("question", "kind"),
    ),
    _row(
        "refused_total",
        "counter",
        "Jobs, nodes or lines of answers that could not be read, and are left out.",
        read=lambda s: (((each.name,), each.refused) for each in s.view.questions),
        labels=("question",),
    ),
)
