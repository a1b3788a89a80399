"""The values that describe a cluster of any scheduler, and the allowed reasons and node states.

Holds no text written by users: names and comments of jobs are dropped by the sources. Times are Unix seconds. A MIG
instance that the scheduler allocates by itself counts as one GPU of its own type.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from msgspec import Struct

from exporter.schedulers.base import CONDITIONS

REASONS = frozenset({
    "resources", "priority", "limit", "reservation", "node_unavailable", "dependency", "held", "begin_time", "gated",
    "unschedulable", "impossible", "starting", "none", "other",
})  # fmt: skip
"""Why a job is pending; a scheduler's other reasons become "other", so that none can add series."""
BLOCKED = frozenset({"dependency", "held", "begin_time", "gated", "impossible", "starting"})
"""Reasons that free GPUs do not resolve."""
POWERED_DOWN = "powered_down"
"""State of a node that power saving has switched off or is switching off. In a cloud it is not paid for."""
NODE_STATES = frozenset({"idle", "mixed", "allocated", POWERED_DOWN, "unknown"}) | CONDITIONS
TAKES_WORK = frozenset({"idle", "mixed", "allocated", "planned"})
"""States in which free GPUs can be allocated; on a planned node to jobs that end before its plan begins."""
LEVELS = ("node", "switch", "nvlink_domain", "zone")
"""Levels of a job's placement; ordered by distance except nvlink_domain, which crosses nodes."""


A = TypeVar("A")
B = TypeVar("B")


def parse_each(parse: Callable[[A], B], items: Iterable[A]) -> tuple[list[B], int]:
    """Return the parsed items, and the number of items for which `parse` raised ValueError."""
    found: list[B] = []
    refused = 0
    for item in items:
        try:
            found.append(parse(item))
        except ValueError:
            refused += 1
    return found, refused


class Demand(Struct, frozen=True):
    """GPUs that are needed at the same time."""

    gpus: int
    """In total."""
    per_node: int = 0
    """On each node; 0: any split."""
    nodes: int = 1
    """Fewest nodes."""
    most_nodes: int = 0
    """Most nodes; 0: no limit."""
    type: str = ""
    """As the node's GPUs are called; empty: any type."""
    place: str = ""
    """Which nodes are possible: a key of `Jobs.places`."""


class PendingJob(Struct, frozen=True):
    """A pending job, or `count` identical tasks of one."""

    job_id: str
    partition: str
    """On Kubernetes the ClusterQueue of a workload of Kueue, else the namespace."""
    reason: str
    """One of REASONS."""
    parts: tuple[Demand, ...] = ()
    """All are needed at once; empty: it needs no GPU."""
    count: int = 1
    since: float | None = None
    """When it began to wait for GPUs; None: it waits for something else."""
    priority: int = 0
    """Higher goes first."""

    @property
    def gpus(self) -> int:
        """GPUs of all its tasks."""
        return self.count * sum(part.gpus for part in self.parts)


class ClusterJob(Struct, frozen=True):
    """A job's GPUs and restarts."""

    job_id: str
    partition: str
    gpus: Mapping[str, int] = {}
    """By node; empty: none, or unknown."""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    running: bool = False
    """Whether it runs on these nodes; False while it is completing."""
    qos: str = ""
    priority: int = 0
    """A pod's; Slurm's preemption goes by the tier of the partition or by QOS."""
    started: float | None = None
    """When this run began."""
    left: float | None = None
    """When its last run ended, if it had one and the scheduler reports it."""
    in_grace: bool = False
    """It runs, but has been preempted and will be ended."""
    each: int = 0
    """GPUs lost by one restart; 0: all of the job's."""
    cause: str = ""
    """Why it was interrupted, node_failure or preempted, if the scheduler reports it."""
    culprit: str = ""
    """The node that failed, if the scheduler reports it."""
    by: "ClusterJob | None" = None
    """The job that preempted it, if the scheduler reports it: its id and partition."""
    ended: bool = False
    """It will not be restarted."""


class NodeRequirements(Struct, frozen=True):
    """What a job requires of its nodes."""

    partitions: tuple[str, ...] = ()
    """Any of these; empty: all."""
    features: frozenset[str] = frozenset()
    """All of these, and one of each of `choices`; on Kubernetes labels, `key=value` or `key`."""
    choices: tuple[frozenset[str], ...] = ()
    tolerated: frozenset[str] = frozenset()
    """Existing taints that it tolerates."""
    required: frozenset[str] = frozenset()
    """One of these nodes; empty: any."""
    excluded: frozenset[str] = frozenset()
    reservation: str = ""
    known: bool = True
    """False: it has an unsupported requirement, so whether it fits is unknown."""


class Jobs(Struct, frozen=True):
    """One answer about jobs."""

    pending: tuple[PendingJob, ...] = ()
    runs: tuple[ClusterJob, ...] = ()
    places: Mapping[str, NodeRequirements] = {}
    refused: int = 0
    """Jobs that could not be parsed."""


class ClusterNode(Struct, frozen=True):
    """One node that has GPUs, or should."""

    name: str
    gpus: Mapping[str, int]
    """By type, as configured: those that are paid for."""
    used: Mapping[str, int] = {}
    """By type, allocated to jobs."""
    broken: Mapping[str, int] = {}
    """By type, configured but not offered."""
    shares: int = 1
    """Shares per GPU, if GPUs are time-sliced."""
    profile: str = ""
    """MIG profile, if instances are allocated under the name of whole GPUs."""
    model: str = ""
    state: str = "unknown"
    """One of NODE_STATES."""
    partitions: tuple[str, ...] = ()
    """Empty: it belongs to all, as on Kubernetes."""
    open_partitions: tuple[str, ...] = ()
    """Those of its partitions that start jobs."""
    taints: frozenset[str] = frozenset()
    """Only jobs that tolerate all of these can use it."""
    features: frozenset[str] = frozenset()
    groups: Mapping[str, str] = {}
    """Its group by level (not "node"); an unknown level is missing."""

    @property
    def total(self) -> int:
        """GPUs of all types."""
        return sum(self.gpus.values())

    @property
    def free(self) -> dict[str, int]:
        """Unallocated GPUs by type; none if the node takes no work. On a reserved node they are its reservation's."""
        if self.state not in TAKES_WORK | {"reserved"}:
            return {}
        used, broken = self.used, self.broken
        left = {kind: count - used.get(kind, 0) - broken.get(kind, 0) for kind, count in self.gpus.items()}
        return {kind: count for kind, count in left.items() if count > 0}


class Partition(Struct, frozen=True):
    """How jobs of a Slurm partition preempt those of others (slurm.conf(5), PreemptMode and PriorityTier)."""

    tier: int
    """Where preemption goes by partition, jobs preempt those of lower tiers."""
    preemptable: bool
    """Whether its jobs can be preempted."""


class Nodes(Struct, frozen=True):
    """One answer about nodes."""

    nodes: tuple[ClusterNode, ...] = ()
    partitions: Mapping[str, Partition] = {}
    """By name; empty on Kubernetes."""
    refused: int = 0


class Reservation(Struct, frozen=True):
    """Nodes or GPUs that are reserved for jobs or for maintenance."""

    name: str
    start: float | None
    end: float | None
    nodes: tuple[str, ...] = ()
    whole: bool = True
    """Whether it has whole nodes; if not, only `gpus` has the number of reserved GPUs."""
    gpus: int | None = None
    """As the scheduler reports; None if it does not."""


class Reservations(Struct, frozen=True):
    """One answer about reservations."""

    reservations: tuple[Reservation, ...] = ()
    refused: int = 0


class Topology(Struct, frozen=True):
    """One answer about the topology."""

    groups: Mapping[str, Mapping[str, str]] = {}
    """Group by level, then by node."""
    refused: int = 0
