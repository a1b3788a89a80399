"""Pods and nodes of Kubernetes as the values that all schedulers share.

Owns what they mean: queue, what runs where, disruptions, expected and free GPUs, topology labels. Refuses an object
that cannot be read, by itself and counted. GPU types are the resources' names without their domain ("gpu",
"mig-1g.10gb", "gpu.shared").
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from exporter.cluster.kubernetes_objects import Expression, Node, NodeTaint, Pod, Toleration, gpus_in, gpus_of
from exporter.cluster.model import Demand, Jobs, Nodes, Pending, Place, Run
from exporter.cluster.model import Node as ClusterNode
from exporter.schedulers.kubernetes.node import condition_of
from exporter.schedulers.kubernetes.objects import Node as OneNode
from exporter.schedulers.kubernetes.objects import NodeSpec, NodeStatus, PodSpec
from exporter.schedulers.kubernetes.objects import Pod as OnePod
from exporter.schedulers.kubernetes.owners import owner_of
from exporter.schedulers.rules import Rules

_CAUSES = {
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "node_failure",
    "DeletionByPodGC": "node_failure",
}
"""Reasons of the pod condition DisruptionTarget that say it in so many words."""
_MOST_JOBS = 10_000
_HARD = frozenset({"NoSchedule", "NoExecute"})
_LEVELS = (
    ("nvlink_domain", ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")),
    ("switch", ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block")),
    ("zone", ("topology.kubernetes.io/zone",)),
)
"""Level -> labels, the surest first; "block" is what Topograph called a leaf before."""
_SHARES, _STRATEGY, _MODEL = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy", "nvidia.com/gpu.product"


class Disruptions:
    """Sees every change of a pod, so that one that is gone before the next look is counted; on the watches' thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[Pod, str]] = OrderedDict()

    def see(self, pod: Pod) -> object:
        """Remember the pod if it is being disrupted."""
        condition = pod.condition("DisruptionTarget")
        if condition is not None and condition.status == "True" and pod.spec.node_name:
            self._found[pod.metadata.uid] = (pod, _CAUSES.get(condition.reason, ""))
            while len(self._found) > _MOST_JOBS:
                self._found.popitem(last=False)
        return None

    def told(self) -> tuple[tuple[Pod, str], ...]:
        """All that were seen, the latest last."""
        return tuple(self._found.values())


def read_pods(
    pods: Iterable[Pod],
    nodes: Iterable[Node],
    *,
    resources: tuple[str, ...],
    rules: Rules,
    disruptions: Iterable[tuple[Pod, str]],
) -> Jobs:
    """Who waits for GPUs and who has some; pods of one job are one run."""
    pending: list[Pending] = []
    places: dict[str, Place] = {}
    runs: dict[str, Run] = {}
    labels = _Labels(nodes)
    refused = 0
    for pod in pods:
        try:
            gpus = gpus_of(pod, resources)
        except ValueError:
            refused += 1
            continue
        if not gpus or pod.status.phase in {"Succeeded", "Failed"}:
            continue
        if pod.spec.node_name:
            job = job_of(pod, rules)
            runs[job] = _joined(
                runs.get(job) or Run(job, pod.metadata.namespace, running=True), pod, sum(gpus.values())
            )
        else:
            waiting, place = _pending(pod, gpus, labels)
            pending.append(waiting)
            places[repr(place)] = place
    thrown = _thrown_back(disruptions, runs, rules=rules, resources=resources)
    return Jobs(tuple(pending), tuple(thrown.values()), places, refused)


def job_of(pod: Pod, rules: Rules) -> str:
    """The job's id, as on a node."""
    spec = PodSpec(priority_class_name=pod.spec.priority_class_name)
    return owner_of(pod.metadata.namespace, pod.metadata.name, OnePod(pod.metadata, spec), rules).job_id


def _joined(run: Run, pod: Pod, gpus: int) -> Run:
    by_node = dict(run.gpus)
    by_node[pod.spec.node_name] = by_node.get(pod.spec.node_name, 0) + gpus
    return Run(run.job_id, run.partition, by_node, tuple(by_node), running=True)


def _thrown_back(
    disruptions: Iterable[tuple[Pod, str]], runs: Mapping[str, Run], *, rules: Rules, resources: tuple[str, ...]
) -> dict[str, Run]:
    """Add to each job how many of its pods were disrupted so far."""
    found = dict(runs)
    for pod, cause in disruptions:
        gpus = _count(pod, resources)
        if gpus:
            job = job_of(pod, rules)
            run = found.get(job) or Run(job, pod.metadata.namespace)
            culprit = pod.spec.node_name if cause == "node_failure" else ""
            restarts = run.restarts + 1
            found[job] = structs.replace(run, restarts=restarts, each=gpus, cause=cause, culprit=culprit)
    return found


def _count(pod: Pod, resources: tuple[str, ...]) -> int:
    """0 where it cannot be read."""
    try:
        return sum(gpus_of(pod, resources).values())
    except ValueError:
        return 0


class _Labels:
    """Which labels, as features, any pod may ask of a node."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.known: dict[str, set[str]] = {}
        self.taints: set[NodeTaint] = set()
        for node in nodes:
            for key, value in (node.metadata.labels or {}).items():
                self.known.setdefault(key, set()).add(value)
            self.taints |= {taint for taint in node.spec.taints or () if taint.effect in _HARD}


def _pending(pod: Pod, gpus: Mapping[str, int], labels: _Labels) -> tuple[Pending, Place]:
    gated = bool(pod.spec.scheduling_gates)
    scheduled = pod.condition("PodScheduled")
    reason = "gated" if gated else _REASONS.get(scheduled.reason, "other") if scheduled else "none"
    made = pod.metadata.creation_timestamp
    place = _place(pod, labels)
    waiting = Pending(
        f"{pod.metadata.namespace}/pod/{pod.metadata.name}",
        pod.metadata.namespace,
        reason,
        tuple(Demand(count, count, type=_type(name), place=repr(place)) for name, count in sorted(gpus.items())),
        since=None if gated or made is None else made.timestamp(),
        priority=pod.spec.priority or 0,
    )
    return waiting, place


_REASONS = {"Unschedulable": "unschedulable", "SchedulingGated": "gated", "SchedulerError": "other", "": "none"}


def _place(pod: Pod, labels: _Labels) -> Place:
    """Selector, required affinity of one term, and tolerations; of anything else nothing is known to fit."""
    features = {f"{key}={value}" for key, value in (pod.spec.node_selector or {}).items()}
    choices, known = _affinity(pod, labels)
    tolerated = (taint for taint in labels.taints if any(_tolerates(t, taint) for t in pod.spec.tolerations or ()))
    return Place(
        features=frozenset(features),
        choices=choices,
        tolerated=frozenset(f"{taint.key}={taint.value}:{taint.effect}" for taint in tolerated),
        known=known,
    )


def _affinity(pod: Pod, labels: _Labels) -> tuple[tuple[frozenset[str], ...], bool]:
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    terms = (required.node_selector_terms or ()) if required else ()
    if not terms:
        return (), True
    if len(terms) > 1 or terms[0].match_fields:
        return (), False
    choices = [_choice(each, labels) for each in terms[0].match_expressions or ()]
    return tuple(each for each in choices if each is not None), None not in choices


def _choice(wanted: Expression, labels: _Labels) -> frozenset[str] | None:
    """Features of which a node needs one; None: not understood."""
    if wanted.operator == "In":
        return frozenset(f"{wanted.key}={value}" for value in wanted.values or ())
    if wanted.operator == "Exists":
        return frozenset(f"{wanted.key}={value}" for value in labels.known.get(wanted.key, ()))
    return None


def _tolerates(toleration: Toleration, taint: NodeTaint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    return toleration.operator == "Exists" or bool(toleration.key and toleration.value == taint.value)


def read_nodes(nodes: Iterable[Node], pods: Iterable[Pod], *, resources: tuple[str, ...]) -> Nodes:
    """Each node that has GPUs, with what its pods were given."""
    used = _used(pods, resources)
    found: list[ClusterNode] = []
    refused = 0
    for node in nodes:
        try:
            capacity = gpus_in(node.status.capacity, resources)
            offered = gpus_in(node.status.allocatable, resources)
        except ValueError:
            refused += 1
            continue
        if capacity:
            found.append(_node(node, capacity, offered=offered, used=used.get(node.metadata.name, {})))
    return Nodes(tuple(found), refused)


def _used(pods: Iterable[Pod], resources: tuple[str, ...]) -> dict[str, dict[str, int]]:
    used: dict[str, dict[str, int]] = {}
    for pod in pods:
        if pod.spec.node_name and pod.status.phase not in {"Succeeded", "Failed"}:
            try:
                gpus = gpus_of(pod, resources)
            except ValueError:
                continue
            here = used.setdefault(pod.spec.node_name, {})
            for name, count in gpus.items():
                here[name] = here.get(name, 0) + count
    return used


def _node(
    node: Node, capacity: Mapping[str, int], *, offered: Mapping[str, int], used: Mapping[str, int]
) -> ClusterNode:
    labels = node.metadata.labels or {}
    one = OneNode(
        node.metadata,
        NodeSpec(node.spec.unschedulable, tuple(taint.plain for taint in node.spec.taints or ())),
        NodeStatus(node.status.conditions),
    )
    given, total = sum(used.get(name, 0) for name in capacity), sum(capacity.values())
    work = "idle" if not given else "allocated" if given >= total else "mixed"
    hard = (taint for taint in node.spec.taints or () if taint.effect in _HARD)
    return ClusterNode(
        node.metadata.name,
        _typed(capacity),
        _typed({name: used.get(name, 0) for name in capacity}),
        _typed({name: count - offered.get(name, 0) for name, count in capacity.items()}),
        shares=_shares(labels),
        model=labels.get(_MODEL, ""),
        state=condition_of(one) or work,
        features=frozenset(f"{key}={value}" for key, value in labels.items()),
        taints=frozenset(f"{taint.key}={taint.value}:{taint.effect}" for taint in hard),
        groups=_groups(labels),
    )


def _typed(counts: Mapping[str, int]) -> dict[str, int]:
    return {_type(name): max(0, count) for name, count in counts.items()}


def _type(resource: str) -> str:
    return resource.rpartition("/")[2]


def _shares(labels: Mapping[str, str]) -> int:
    """Replicas of a GPU, where feature discovery says that it is shared."""
    text = labels.get(_SHARES, "")
    shared = labels.get(_STRATEGY, "none") != "none"
    return max(1, int(text)) if shared and text.isascii() and text.isdigit() else 1


def _groups(labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, Any] = {
        level: next((labels[name] for name in names if labels.get(name)), "") for level, names in _LEVELS
    }
    return {level: group for level, group in found.items() if group}
