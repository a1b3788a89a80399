"""The page of `gpu-efficiency cluster` for the simulated fleet, as Slurm would be heard.

Owns what the scheduler says: one node more than has a daemon (it is down, and paid for), a queue that grows, jobs that
were thrown back, a reservation. The sums over them are the exporter's own. Refuses to know what the nodes do.
"""

from exporter.cluster.analysis import spread
from exporter.cluster.interruptions import NodeFailure
from exporter.cluster.metrics import page
from exporter.cluster.model import (
    ClusterJob,
    ClusterNode,
    Demand,
    Jobs,
    NodeRequirements,
    Nodes,
    PendingJob,
    Reservation,
    Reservations,
    Topology,
)
from exporter.cluster.watcher import ClusterView, QuestionStatus, QueueTotals, fitting_now, fitting_totals, queue_totals
from exporter.core.model import SECOND
from tests.dashboards.past import Series, Target

EVERY = 60
GPUS = 8
"""Of a node."""
NODES = tuple(f"gpu-node-{number:02d}" for number in range(11))
EMPTY, DOWN = NODES[7], NODES[10]
_PARTITION = ("gpu",)
_QUESTIONS = ("jobs", "nodes", "reservations")
_FAILED, _PREEMPTED, LOST = 90 * 60, 40 * 60, 2 * 3600
"""Seconds before the end."""


def pages(cluster: str, *, start: float, end: float) -> Series:
    """Everything that the scheduler's exporter says from `start` to `end`, a page a minute."""
    target = Target(cluster=cluster, instance="slurm:19410", job="gpu-efficiency-cluster")
    for number in range(int((end - start) // EVERY), -1, -1):
        at = end - number * EVERY
        target.scraped(at, page(_view(at, end), now=round(at * SECOND)).decode())
    return target.series


def _view(at: float, end: float) -> ClusterView:
    jobs, nodes = Jobs(_pending(at, end), _runs(), {"": NodeRequirements(_PARTITION)}), Nodes(tuple(map(_node, NODES)))
    queue = queue_totals(jobs.pending, now=at)
    kept = Reservations((Reservation("maintenance", end + 86_400, end + 90_000, nodes=(EMPTY,)),))
    return ClusterView(
        scheduler="slurm", queue=queue, nodes=nodes.nodes, reservations=kept.reservations,
        questions=tuple(QuestionStatus(name, 30 * SECOND, round((at - 10) * SECOND), asked=60) for name in _QUESTIONS),
        fitting=fitting_totals(fitting_now(jobs, nodes, reservations=kept, now=at), queue),
        spread=spread(jobs.runs, nodes.nodes, groups=_topology().groups, most=100),
        interrupted_jobs=_interrupted(at, end, 1), interrupted_gpus=_interrupted(at, end, GPUS),
        interrupted_gpu_seconds=_interrupted(at, end, GPUS * LOST),
        preemptions=_preempted(at, end, 1), preempted_gpu_seconds=_preempted(at, end, GPUS * LOST),
        preemption_costs={("40000", "gpu"): 2 * GPUS * LOST} if at >= end - _PREEMPTED else {},
        failures=(NodeFailure(DOWN, "40077", "gpu", end - _FAILED),) if at >= end - _FAILED else (),
    )  # fmt: skip


def queued(at: float, end: float) -> QueueTotals:
    """Jobs and GPUs that wait at a moment."""
    return queue_totals(_pending(at, end), now=at)


def _pending(at: float, end: float) -> tuple[PendingJob, ...]:
    """One that wants two nodes, small ones that a limit holds back, and one more every 20 minutes."""
    large = PendingJob(
        "40100", "gpu", "resources", (Demand(2 * GPUS, per_node=GPUS, nodes=2),), since=end - 7200, priority=9
    )
    small = PendingJob("40200", "gpu", "limit", (Demand(2),), count=3, since=end - 3600)
    later = tuple(
        PendingJob(f"4030{n}", "gpu", "priority", (Demand(4),), since=end - 1200 * n, priority=n)
        for n in range(1, 7) if end - 1200 * n <= at
    )  # fmt: skip
    return (large, small, *later)


def _runs() -> tuple[ClusterJob, ...]:
    both = ClusterJob("40000", "gpu", dict.fromkeys(NODES[:2], GPUS), NODES[:2], running=True)
    alone = (ClusterJob(f"{41_001 + 1000 * n}", "gpu", {NODES[n]: GPUS}, (NODES[n],), running=True) for n in (3, 4, 6))
    return (both, *alone)


def _node(name: str) -> ClusterNode:
    used = 0 if name in {EMPTY, DOWN} else GPUS
    state = "down" if name == DOWN else "idle" if name == EMPTY else "allocated"
    return ClusterNode(
        name, {"h100": GPUS}, {"h100": used}, model="NVIDIA H100 80GB HBM3", state=state, partitions=_PARTITION,
        open_partitions=_PARTITION,
    )  # fmt: skip


def _topology() -> Topology:
    return Topology({"switch": {name: f"leaf-{number % 2}" for number, name in enumerate(NODES)}})


def _preempted(at: float, end: float, amount: int) -> dict[tuple[str, str, str, str], int]:
    """The two that had to make room: of the partition spot, for a job of gpu; before that there is no series."""
    return {("spot", "low", "gpu", "high"): 2 * amount} if at >= end - _PREEMPTED else {}


def _interrupted(at: float, end: float, gpus: int) -> dict[tuple[str, str, str], int]:
    """How often, times GPUs: a node failed one job, and two small ones had to make room."""
    return {
        ("gpu", "node_failure", "requeued"): gpus if at >= end - _FAILED else 0,
        ("gpu", "preempted", "requeued"): 2 * gpus if at >= end - _PREEMPTED else 0,
    }
