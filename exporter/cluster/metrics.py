"""METRICS of `gpu-efficiency cluster`, one row each, and the exposition of them.

With P partitions (200 at most), N nodes (20,000 at most) of T types of GPU each, R reservations (200 at most) and J
jobs (`cluster.max_jobs`) there are at most 90 P + N (2 + 2 T) + 3 R + 9 J + 650 series.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from msgspec import Struct

from exporter import __version__
from exporter.cluster.model import POWERED_DOWN, ClusterNode
from exporter.cluster.watcher import ClusterView, free_gpus, reserved_gpus
from exporter.core import exposition
from exporter.core.metrics import Metric, MetricReader, MetricSample
from exporter.core.model import SECOND
from exporter.core.snapshot import Snapshot

FAILURE_KINDS = ("silent", "unreadable")


class ClusterScrape(Struct, frozen=True):
    """A view at the moment of a scrape."""

    view: ClusterView
    now: int
    """Monotonic nanoseconds."""


def page(view: ClusterView, *, now: int, openmetrics: bool = False) -> bytes:
    """Return the exposition without OpenMetrics' closing `# EOF`; `now` is monotonic nanoseconds."""
    # The writer passes its first argument to the rows, whatever its type.
    return exposition.render(cast("Snapshot", ClusterScrape(view, now)), openmetrics=openmetrics, metrics=METRICS)


def _node_gpus(count: Callable[[ClusterNode, str], int | None]) -> Callable[[ClusterView], Iterator[MetricSample]]:
    """Return a reader of the numbers that `count` gives by node and type; None: there is no sample."""

    def read(view: ClusterView) -> Iterator[MetricSample]:
        for node in view.nodes:
            for kind in node.gpus:
                gpus = count(node, kind)
                if gpus is not None:
                    yield (node.name, _type_of(node, kind)), gpus / node.shares

    return read


def _expected_gpus(node: ClusterNode, kind: str) -> int | None:
    """Leave out nodes that are powered down, as those that an autoscaler has removed: the rules then forget both."""
    return None if node.state == POWERED_DOWN else node.gpus[kind]


def _type_of(node: ClusterNode, kind: str) -> str:
    """Return the type of the node's GPUs; MIG instances are named as where each profile has a name of its own."""
    return kind.replace("gpu", f"mig-{node.profile}", 1) if node.profile else kind


def _reservation_gpus(view: ClusterView) -> Iterator[MetricSample]:
    nodes = {node.name: node for node in view.nodes}
    for reservation in view.reservations:
        gpus = reserved_gpus(reservation, nodes)
        if gpus is not None:
            yield (reservation.name,), gpus


def _left_out(scrape: ClusterScrape) -> Iterator[MetricSample]:
    yield ("nodes",), scrape.view.nodes_left_out
    if scrape.view.live("jobs", "nodes", now=scrape.now):
        yield ("jobs",), scrape.view.spread.left_out


def _ages(scrape: ClusterScrape) -> Iterator[MetricSample]:
    for status in scrape.view.questions:
        if status.at is not None:
            yield (status.name,), max(0, scrape.now - status.at) / SECOND


def _live(
    *questions: str, read: Callable[[ClusterView], Iterable[MetricSample]]
) -> Callable[[ClusterScrape], Iterable[MetricSample]]:
    """Return a reader that has no samples while the answer to one of `questions` is too old."""
    return lambda scrape: read(scrape.view) if scrape.view.live(*questions, now=scrape.now) else ()


def _row(
    name: str,
    kind: str,
    about: str,
    read: Callable[[ClusterScrape], Iterable[MetricSample]],
    labels: tuple[str, ...],
    *,
    unit: str = "",
) -> Metric:
    return Metric(f"gpu_efficiency_cluster_{name}", kind, about, cast("MetricReader", read), labels, unit, "cluster")


_QUEUE = ("partition", "reason")
_NODE = ("node", "gpu_type")
_LOST = ("partition", "cause", "outcome")
_PREEMPTED = ("partition", "qos", "by_partition", "by_qos")
_SPREAD = ("job_id", "level")
METRICS: tuple[Metric, ...] = (
    _row(
        "build_info", "gauge", "1: version of gpu-efficiency cluster, and the scheduler that it queries.",
        lambda s: (((__version__, s.view.scheduler), 1),), ("version", "scheduler"),
    ),
    _row(
        "queue_jobs", "gauge",
        "Pending jobs that want GPUs, array tasks one by one, by partition (on Kubernetes the ClusterQueue of Kueue's"
        " workloads, else the namespace) and reason. Of a job in several partitions the first counts. Beyond 200"
        " partitions those with the shortest queues are other.",
        _live("jobs", read=lambda v: sorted(v.queue.jobs.items())), _QUEUE,
    ),
    _row(
        "queue_gpus", "gauge", "GPUs that pending jobs request, by partition and reason.",
        _live("jobs", read=lambda v: sorted(v.queue.gpus.items())), _QUEUE,
    ),
    _row(
        "queue_longest_wait_seconds", "gauge",
        "How long the longest waiting job has been eligible for GPUs: held jobs, and those that wait for another job"
        " or for a time, do not count.",
        _live("jobs", read=lambda v: (((name,), max(0.0, wait)) for name, wait in sorted(v.queue.waits.items()))),
        ("partition",), unit="seconds",
    ),
    _row(
        "queue_fitting_jobs", "gauge",
        "Pending jobs that would fit the GPUs which are free now, in order of priority, each whole: by GPUs and their"
        " type, nodes, partition, features and reservation. CPUs, memory and limits are not weighed: where this is not"
        " 0, something other than GPUs holds jobs back.",
        _live("jobs", "nodes", read=lambda v: sorted(v.fitting.jobs.items())), _QUEUE,
    ),
    _row(
        "queue_fitting_gpus", "gauge", "GPUs that the jobs in gpu_efficiency_cluster_queue_fitting_jobs request.",
        _live("jobs", "nodes", read=lambda v: sorted(v.fitting.gpus.items())), _QUEUE,
    ),
    _row(
        "queue_stuck_gpus", "gauge",
        "GPUs requested by pending jobs that have fitted the free GPUs at every poll for 15 minutes. The 15 minutes "
        "begin again for an array when one of its tasks starts, and for all jobs when this program restarts.",
        _live("jobs", "nodes", read=lambda v: sorted(v.stuck.gpus.items())), _QUEUE,
    ),
    _row(
        "partition_free_gpus", "gauge",
        "Unallocated GPUs on nodes that accept new jobs. A node in several partitions counts in each.",
        _live("nodes", read=lambda v: (((name,), n) for name, n in sorted(free_gpus(v.nodes).items())[:200])),
        ("partition",),
    ),
    _row(
        "node_expected_gpus", "gauge",
        "GPUs that the scheduler's configuration lists for the node; paid for, whether or not the node's daemon "
        "responds. A MIG"
        " instance that is handed out by itself counts as one, under its own type (mig-1g.10gb), also where it is"
        " offered as nvidia.com/gpu; time-sliced shares of a GPU are one. Absent while Slurm's power saving has"
        " switched the node off. Keeps its last value while the scheduler does not respond.",
        _live(read=_node_gpus(_expected_gpus)), _NODE,
    ),
    _row(
        "node_allocated_gpus", "gauge", "GPUs of the node that are allocated to jobs.",
        _live("nodes", read=_node_gpus(lambda node, kind: node.used.get(kind, 0))), _NODE,
    ),
    _row(
        "node_state", "gauge",
        "1 for the node's state: idle, mixed, allocated, drained, draining, down, maintenance, reserved, planned,"
        " cordoned, not_ready, powered_down or unknown.",
        _live("nodes", read=lambda v: (((node.name, node.state), 1) for node in v.nodes)), ("node", "state"),
    ),
    _row(
        "node_info", "gauge", "1: model of the node's GPUs, where the scheduler has one beside their type.",
        lambda s: (((node.name, node.model), 1) for node in s.view.nodes if node.model), ("node", "model"),
    ),
    _row(
        "reservation_gpus", "gauge", "GPUs of a reservation.",
        _live("reservations", "nodes", read=_reservation_gpus), ("reservation",),
    ),
    _row(
        "reservation_start_timestamp_seconds", "gauge", "Unix time at which the reservation starts.",
        _live("reservations", read=lambda v: (((r.name,), r.start) for r in v.reservations if r.start is not None)),
        ("reservation",), unit="seconds",
    ),
    _row(
        "reservation_end_timestamp_seconds", "gauge", "Unix time at which the reservation ends.",
        _live("reservations", read=lambda v: (((r.name,), r.end) for r in v.reservations if r.end is not None)),
        ("reservation",), unit="seconds",
    ),
    _row(
        "interruptions_total", "counter",
        "Times that jobs were requeued (outcome requeued) or terminated (ended) from outside since this program "
        "started. Cause node_failure: a node of the job went down, failed or was drained after the job was last seen "
        "running; preempted: the scheduler reports it, or a job that may preempt it took one of its nodes at the same "
        "time; unknown: neither.",
        lambda s: sorted(s.view.interrupted_jobs.items()), _LOST,
    ),
    _row(
        "interrupted_gpus_total", "counter", "GPUs those jobs had, each time.",
        lambda s: sorted(s.view.interrupted_gpus.items()), _LOST,
    ),
    _row(
        "interrupted_gpu_seconds_total", "counter",
        "Upper bound of the work that interrupted jobs lost: GPUs x duration of the interrupted run, as the scheduler "
        "reports it (for a pod: its own GPUs, since its job started). Checkpoints are not taken into account.",
        lambda s: sorted(s.view.interrupted_gpu_seconds.items()), _LOST,
    ),
    _row(
        "node_failure_timestamp_seconds", "gauge",
        "When a node was seen to have failed a job, Unix seconds; the latest 50.",
        lambda s: {(each.node, each.job_id, each.partition): each.at for each in s.view.failures}.items(),
        ("node", "job_id", "partition"), unit="seconds",
    ),
    _row(
        "preemptions_total", "counter",
        "Times jobs with GPUs were preempted, by partition and QOS of the preempted job and of the preempting one: "
        "the job that Kueue names, or a job with a higher priority tier (for pods: priority), or with the same tier "
        "and another QOS, that took one of its nodes at that time. by_partition unknown: no such job was found. "
        "Beyond 199 combinations:"
        " other.",
        lambda s: sorted(s.view.preemptions.items()), _PREEMPTED,
    ),
    _row(
        "preempted_gpu_seconds_total", "counter",
        "Work that those jobs lost, at most, as in interrupted_gpu_seconds_total.",
        lambda s: sorted(s.view.preempted_gpu_seconds.items()), _PREEMPTED,
    ),
    _row(
        "preemption_timestamp_seconds", "gauge",
        "When a job was seen to have been preempted by another, or by one that is unknown, Unix seconds; the latest"
        " 50.",
        lambda s: {(each.job_id, each.by_job_id): each.at for each in s.view.latest_preemptions}.items(),
        ("job_id", "by_job_id"), unit="seconds",
    ),
    _row(
        "preemption_cost_gpu_seconds", "gauge",
        "Upper bound of the work lost to the start of this job: by the jobs that it preempted, and by those that they "
        "preempted in turn. The latest 50 preempting jobs that had not been preempted themselves.",
        lambda s: s.view.preemption_costs.items(), ("job_id", "partition"), unit="seconds",
    ),
    _row(
        "job_gpus", "gauge", "GPUs of a running job of two or more; the largest jobs, as many as cluster.max_jobs.",
        _live("jobs", read=lambda v: (((job_id,), gpus) for job_id, gpus in v.spread.gpus)), ("job_id",),
    ),
    _row(
        "job_span", "gauge",
        "Nodes, leaf switches (switch), NVLink domains (nvlink_domain) or zones that such a job is spread over. A"
        " level that is not known of all nodes of its partition is absent.",
        _live("jobs", "nodes", read=lambda v: (((p.job_id, p.level), p.spans) for p in v.spread.placements)), _SPREAD,
    ),
    _row(
        "job_span_fewest", "gauge",
        "The fewest that hold as many GPUs of the same types in its partition, were all of them free.",
        _live("jobs", "nodes", read=lambda v: (((p.job_id, p.level), p.fewest) for p in v.spread.placements)), _SPREAD,
    ),
    _row(
        "left_out", "gauge",
        "Nodes beyond 20,000 and running jobs beyond cluster.max_jobs that have no series of their own.",
        _left_out, ("what",),
    ),
    _row(
        "answer_age_seconds", "gauge",
        "Age of the scheduler's last answer, by question. After three intervals what follows from it is left out.",
        _ages, ("question",), unit="seconds",
    ),
    _row(
        "questions_total", "counter", "Queries sent to the scheduler, by kind of query.",
        lambda s: (((each.name,), each.asked) for each in s.view.questions), ("question",),
    ),
    _row(
        "failed_questions_total", "counter",
        "Queries that failed: no response (silent), or one that cannot be parsed (unreadable).",
        lambda s: (((q.name, kind), q.failed.get(kind, 0)) for q in s.view.questions for kind in FAILURE_KINDS),
        ("question", "kind"),
    ),
    _row(
        "refused_total", "counter", "Jobs, nodes or lines of answers that could not be read, and are left out.",
        lambda s: (((each.name,), each.refused) for each in s.view.questions), ("question",),
    ),
)  # fmt: skip
