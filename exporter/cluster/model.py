"""The values in which any scheduler describes its cluster, with the closed sets of reasons and node states.

Holds no text written by users: names and comments of jobs end at the adapters. Times are Unix seconds. A MIG instance
that the scheduler allocates by itself counts as one GPU of its own type.
"""

from collections.abc import Mapping

from msgspec import Struct

from exporter.schedulers.base import CONDITIONS

REASONS = frozenset({
    "resources", "priority", "limit", "reservation", "node_unavailable", "dependency", "held", "begin_time", "gated",
    "unschedulable", "impossible", "starting", "none", "other",
})  # fmt: skip
"""Why a job is still pending; a scheduler's other reasons become "other", so that none can add series."""
BLOCKED = frozenset({"dependency", "held", "begin_time", "gated", "impossible", "starting"})
"""Reasons that free GPUs do not mend."""
NODE_STATES = frozenset({"idle", "mixed", "allocated", "unknown"}) | CONDITIONS
TAKES_WORK = frozenset({"idle", "mixed", "allocated", "planned"})
"""States in which free GPUs may be given away; a planned node is, for whoever ends before its plan begins."""
LEVELS = ("node", "switch", "nvlink_domain", "zone")
"""What a job can be spread over, from the nearest to the farthest but for NVLink, which crosses nodes."""
CAUSES = ("node_failure", "preempted", "unknown")
OUTCOMES = ("requeued", "ended")


class Demand(Struct, frozen=True):
    """GPUs that are wanted at once."""

    gpus: int
    """In all."""
    per_node: int = 0
    """On each node; 0: any split will do."""
    nodes: int = 1
    """At least."""
    most_nodes: int = 0
    """At most; 0: no limit."""
    type: str = ""
    """As the node's GPUs are called; empty: any."""
    place: str = ""
    """Which nodes will do, a key of `Jobs.places`."""


class PendingJob(Struct, frozen=True):
    """A job, or `count` tasks alike, without its GPUs."""

    job_id: str
    partition: str
    """Namespace on Kubernetes."""
    reason: str
    """One of REASONS."""
    parts: tuple[Demand, ...] = ()
    """All of them or none; empty: it wants no GPU."""
    count: int = 1
    since: float | None = None
    """When it began to wait for GPUs; None: it waits for something else."""
    priority: int = 0
    """The higher goes first."""

    @property
    def gpus(self) -> int:
        """Of all its tasks."""
        return self.count * sum(part.gpus for part in self.parts)


class ClusterJob(Struct, frozen=True):
    """What a job has, and how often it was thrown back."""

    job_id: str
    partition: str
    gpus: Mapping[str, int] = {}
    """By node; empty: none, or not known."""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    running: bool = False
    """It works on these nodes; not while it leaves them."""
    each: int = 0
    """GPUs that one restart costs, where that is not all of them; 0: all."""
    cause: str = ""
    """Why it was interrupted, one of CAUSES, where the scheduler reports it."""
    culprit: str = ""
    """The node that failed it, where the scheduler names it."""
    ended: bool = False
    """It will not come back."""


class NodeRequirements(Struct, frozen=True):
    """What a job asks of its nodes."""

    partitions: tuple[str, ...] = ()
    """Any of them; empty: all."""
    features: frozenset[str] = frozenset()
    """All of these, and one of each of `choices`; labels on Kubernetes, `key=value` or `key`."""
    choices: tuple[frozenset[str], ...] = ()
    tolerated: frozenset[str] = frozenset()
    """Taints it does not mind, of those that a node has."""
    required: frozenset[str] = frozenset()
    """One of these nodes; empty: any."""
    excluded: frozenset[str] = frozenset()
    reservation: str = ""
    known: bool = True
    """False: it asks for something that is not understood here, so nothing is known to fit."""


class Jobs(Struct, frozen=True):
    """One answer about jobs."""

    pending: tuple[PendingJob, ...] = ()
    runs: tuple[ClusterJob, ...] = ()
    places: Mapping[str, NodeRequirements] = {}
    refused: int = 0
    """Jobs that could not be read."""


class ClusterNode(Struct, frozen=True):
    """One node that has GPUs, or should."""

    name: str
    gpus: Mapping[str, int]
    """By type, as configured: those that are paid for."""
    used: Mapping[str, int] = {}
    """By type, given to jobs."""
    broken: Mapping[str, int] = {}
    """By type, what is configured but not offered."""
    shares: int = 1
    """As how many one GPU is handed out, where it is shared by time-slicing."""
    model: str = ""
    state: str = "unknown"
    """One of NODE_STATES."""
    partitions: tuple[str, ...] = ()
    """Empty: it belongs to all, as on Kubernetes."""
    open_partitions: tuple[str, ...] = ()
    """Of those, the ones that start jobs."""
    taints: frozenset[str] = frozenset()
    """Only who tolerates all of these may use it."""
    features: frozenset[str] = frozenset()
    groups: Mapping[str, str] = {}
    """By level (not "node"): what it belongs to there; a level that is missing is not known."""

    @property
    def total(self) -> int:
        """GPUs of all types."""
        return sum(self.gpus.values())

    @property
    def free(self) -> dict[str, int]:
        """By type, what nobody has; nothing where the node takes no work. A reserved one takes its reservation's."""
        if self.state not in TAKES_WORK | {"reserved"}:
            return {}
        used, broken = self.used, self.broken
        left = {kind: count - used.get(kind, 0) - broken.get(kind, 0) for kind, count in self.gpus.items()}
        return {kind: count for kind, count in left.items() if count > 0}


class Nodes(Struct, frozen=True):
    """One answer about nodes."""

    nodes: tuple[ClusterNode, ...] = ()
    refused: int = 0


class Reservation(Struct, frozen=True):
    """GPUs kept for somebody, or for maintenance."""

    name: str
    start: float | None
    end: float | None
    nodes: tuple[str, ...] = ()
    whole: bool = True
    """It has its nodes whole; else how many of their GPUs is known only by `gpus`."""
    gpus: int | None = None
    """As the scheduler reports; None: it does not."""


class Reservations(Struct, frozen=True):
    """One answer about reservations."""

    reservations: tuple[Reservation, ...] = ()
    refused: int = 0


class Topology(Struct, frozen=True):
    """One answer about how nodes hang together."""

    groups: Mapping[str, Mapping[str, str]] = {}
    """By level, then by node: what the node belongs to there."""
    refused: int = 0
