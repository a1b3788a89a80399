"""The parts of pods and nodes that say who waits for GPUs, who has them, and where there are some.

Owns their shapes (Kubernetes API reference: Pod v1, Node v1) and the arithmetic of a pod's request. Everything else is
skipped unread. Refuses DRA claims: what they come to is not on the pod.
"""

from fnmatch import fnmatchcase

from msgspec import Struct

from exporter.schedulers.kubernetes.objects import Condition, Metadata, Taint


class Resources(Struct, frozen=True):
    """ResourceRequirements; quantities as text or number."""

    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class Container(Struct, frozen=True, rename="camel"):
    """A container as the pod asks for it."""

    resources: Resources = Resources()
    restart_policy: str = ""
    """Always: an init container that runs beside the others."""


class Toleration(Struct, frozen=True):
    """A taint that the pod does not mind; no key and Exists: none at all."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class Expression(Struct, frozen=True):
    """NodeSelectorRequirement."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class Term(Struct, frozen=True, rename="camel"):
    """NodeSelectorTerm: all of its expressions."""

    match_expressions: tuple[Expression, ...] | None = None
    match_fields: tuple[Expression, ...] | None = None


class NodeSelector(Struct, frozen=True, rename="camel"):
    """One of its terms must hold."""

    node_selector_terms: tuple[Term, ...] | None = None


class NodeAffinity(Struct, frozen=True, rename="camel"):
    """Only what is required."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Struct, frozen=True, rename="camel"):
    """Of a pod; to other pods is skipped."""

    node_affinity: NodeAffinity | None = None


class Gate(Struct, frozen=True):
    """PodSchedulingGate."""

    name: str = ""


class PodSpec(Struct, frozen=True, rename="camel"):
    """What was asked for."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str = ""
    priority: int | None = None
    node_selector: dict[str, str] | None = None
    tolerations: tuple[Toleration, ...] | None = None
    affinity: Affinity | None = None
    scheduling_gates: tuple[Gate, ...] | None = None
    priority_class_name: str = ""
    active_deadline_seconds: int | None = None


class PodCondition(Struct, frozen=True, rename="camel"):
    """One of a pod's conditions."""

    type: str = ""
    status: str = ""
    reason: str = ""


class PodStatus(Struct, frozen=True):
    """How the pod fares."""

    phase: str = ""
    conditions: tuple[PodCondition, ...] | None = None


class Pod(Struct, frozen=True):
    """Any pod of the cluster."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> PodCondition | None:
        """Its condition of that type, if it is there."""
        return next((each for each in self.status.conditions or () if each.type == kind), None)


class NodeTaint(Struct, frozen=True):
    """What keeps pods off a node."""

    key: str = ""
    value: str = ""
    effect: str = ""

    @property
    def plain(self) -> Taint:
        """As the node's own daemon reads it."""
        return Taint(self.key)


class NodeSpec(Struct, frozen=True):
    """What was decided about the node."""

    unschedulable: bool | None = None
    taints: tuple[NodeTaint, ...] | None = None


class NodeStatus(Struct, frozen=True):
    """How the node fares."""

    conditions: tuple[Condition, ...] | None = None
    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None


class Node(Struct, frozen=True):
    """Any node of the cluster."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def gpus_in(quantities: dict[str, str | int] | None, patterns: tuple[str, ...]) -> dict[str, int]:
    """Those that are GPUs, by the resource's name; extended resources are whole numbers. Raises ValueError."""
    found = {name: value for name, value in (quantities or {}).items() if any(fnmatchcase(name, p) for p in patterns)}
    counts = {name: int(value) for name, value in found.items()}
    return {name: count for name, count in counts.items() if count > 0}


def gpus_of(pod: Pod, patterns: tuple[str, ...]) -> dict[str, int]:
    """What the scheduler sets aside: all that run together, or one init container if it wants more.

    Source: Kubernetes' "Init Containers", resource sharing within containers. Raises ValueError.
    """
    init = pod.spec.init_containers or ()
    together = [*(pod.spec.containers or ()), *(each for each in init if each.restart_policy == "Always")]
    counts: dict[str, int] = {}
    for container in together:
        for name, count in _asked(container, patterns).items():
            counts[name] = counts.get(name, 0) + count
    for container in init:
        for name, count in _asked(container, patterns).items():
            counts[name] = max(counts.get(name, 0), count)
    return counts


def _asked(container: Container, patterns: tuple[str, ...]) -> dict[str, int]:
    """For extended resources a request equals its limit, and either may be left out."""
    return gpus_in(container.resources.limits, patterns) | gpus_in(container.resources.requests, patterns)
