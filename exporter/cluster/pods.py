"""The nodes that a pod could run on, whether it is there or a template.

Sources: Kubernetes' "Assigning Pods to Nodes", "Taints and Tolerations".
"""

from collections.abc import Iterable

from exporter.cluster.model import NodeRequirements
from exporter.schedulers.kubernetes.objects import (
    ContainerRequest,
    KubernetesNode,
    NodeSelectorRequirement,
    ObjectMeta,
    PodObject,
    Taint,
    Toleration,
    job_of,
)

HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints that keep new pods away."""
ClusterPod = PodObject[ContainerRequest]


class NodeLabels:
    """The labels and taints that any node has."""

    def __init__(self, nodes: Iterable[KubernetesNode]) -> None:
        self.known: dict[str, set[str]] = {}
        self.taints: set[Taint] = set()
        for node in nodes:
            for key, value in (node.metadata.labels or {}).items():
                self.known.setdefault(key, set()).add(value)
            self.taints |= {taint for taint in node.spec.taints or () if taint.effect in HARD_EFFECTS}


def requirements(pod: ClusterPod, labels: NodeLabels) -> NodeRequirements:
    """Return selector, required affinity of one term, and tolerations; anything else makes it unknown."""
    features = {f"{key}={value}" for key, value in (pod.spec.node_selector or {}).items()}
    choices, known = _affinity(pod, labels)
    tolerated = (taint for taint in labels.taints if any(_tolerates(t, taint) for t in pod.spec.tolerations or ()))
    return NodeRequirements(
        features=frozenset(features),
        choices=choices,
        tolerated=frozenset(map(str, tolerated)),
        known=known,
    )


def _affinity(pod: ClusterPod, labels: NodeLabels) -> tuple[tuple[frozenset[str], ...], bool]:
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    terms = (required.node_selector_terms or ()) if required else ()
    if not terms:
        return (), True
    if len(terms) > 1 or terms[0].match_fields:
        return (), False
    choices = [_choice(each, labels) for each in terms[0].match_expressions or ()]
    return tuple(each for each in choices if each is not None), None not in choices


def _choice(wanted: NodeSelectorRequirement, labels: NodeLabels) -> frozenset[str] | None:
    """Return the features of which a node needs one; None for an unsupported operator."""
    if wanted.operator == "In":
        return frozenset(f"{wanted.key}={value}" for value in wanted.values or ())
    if wanted.operator == "Exists":
        return frozenset(f"{wanted.key}={value}" for value in labels.known.get(wanted.key, ()))
    return None


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    return toleration.operator == "Exists" or bool(toleration.key and toleration.value == taint.value)


def gpu_type(resource: str) -> str:
    """Return the type of GPU that a resource name stands for."""
    return resource.rpartition("/")[2]


def job_id_of(metadata: ObjectMeta) -> str:
    """Return the id of a pod's job, the same as on the daemon of the pod's node."""
    return "/".join((metadata.namespace, *job_of(metadata)))
