"""The decoded parts of Kubernetes' API objects, and what follows from them: a pod's job, a node's condition.

Other fields are skipped; an object with wrong types is rejected by itself. The job's name comes from labels and owner
references on the pod alone, without further requests. Taints that only some pods tolerate are no condition. Sources:
Kubernetes API reference (Pod v1, Node v1, ResourceSlice), "Taints and Tolerations", "Node status".
"""

import re
from collections.abc import Container, Iterable, Iterator
from datetime import datetime
from typing import Generic, TypeVar

from msgspec import Raw, Struct, structs

from exporter.core.model import Owner
from exporter.schedulers.rules import Rules


class OwnerReference(Struct, frozen=True):
    """An object's owner; of several, the one with `controller` manages it."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class ObjectMeta(Struct, frozen=True, rename="camel"):
    """ObjectMeta and ListMeta."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class EnvVar(Struct, frozen=True):
    """EnvVar of a container; `value` is empty if it comes from elsewhere (valueFrom)."""

    name: str = ""
    value: str | None = None


class ResourceRequirements(Struct, frozen=True):
    """ResourceRequirements; quantities are strings or integers."""

    limits: dict[str, str | int] | None = None
    requests: dict[str, str | int] | None = None


class ContainerRequest(Struct, frozen=True, rename="camel"):
    """Container, as the cluster's instance decodes it: its resource requests alone."""

    resources: ResourceRequirements = ResourceRequirements()
    restart_policy: str = ""
    """`Always` marks an init container that runs beside the others (a sidecar)."""


class ContainerProgram(ContainerRequest, frozen=True):
    """Container, as the node's daemon decodes it: its program, too."""

    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None


class Toleration(Struct, frozen=True):
    """A taint that the pod tolerates; operator Exists without a key tolerates all."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class NodeSelectorRequirement(Struct, frozen=True):
    """NodeSelectorRequirement."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class NodeSelectorTerm(Struct, frozen=True, rename="camel"):
    """NodeSelectorTerm: all expressions must match."""

    match_expressions: tuple[NodeSelectorRequirement, ...] | None = None
    match_fields: tuple[NodeSelectorRequirement, ...] | None = None


class NodeSelector(Struct, frozen=True, rename="camel"):
    """NodeSelector: one of its terms must match."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinity(Struct, frozen=True, rename="camel"):
    """NodeAffinity; only what is required."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(Struct, frozen=True, rename="camel"):
    """Affinity of a pod; affinity to other pods is skipped."""

    node_affinity: NodeAffinity | None = None


class PodSchedulingGate(Struct, frozen=True):
    """PodSchedulingGate."""

    name: str = ""


C = TypeVar("C", bound=ContainerRequest)


class PodSpec(Struct, Generic[C], frozen=True, rename="camel"):
    """PodSpec."""

    containers: tuple[C, ...] | None = None
    init_containers: tuple[C, ...] | None = None
    node_name: str = ""
    priority: int | None = None
    priority_class_name: str = ""
    node_selector: dict[str, str] | None = None
    tolerations: tuple[Toleration, ...] | None = None
    affinity: Affinity | None = None
    scheduling_gates: tuple[PodSchedulingGate, ...] | None = None
    active_deadline_seconds: int | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """ContainerStatus."""

    name: str = ""
    restart_count: int = 0


class Condition(Struct, frozen=True, rename="camel"):
    """Condition of a pod, or of another object; `status` is True, False or Unknown, as text."""

    type: str = ""
    status: str = ""
    reason: str = ""
    last_transition_time: datetime | None = None


class PodStatus(Struct, frozen=True, rename="camel"):
    """PodStatus."""

    phase: str = ""
    start_time: datetime | None = None
    """When the kubelet admitted the pod and allocated its devices, before any image was pulled."""
    container_statuses: tuple[ContainerStatus, ...] | None = None
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    conditions: tuple[Condition, ...] | None = None


class PodObject(Struct, Generic[C], frozen=True):
    """A pod with containers of type `C`."""

    metadata: ObjectMeta
    spec: PodSpec[C] = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def terminal(self) -> bool:
        """Whether it has ended for good: it holds nothing then, even if older kubelets still list it."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def gates(self) -> frozenset[str]:
        """Names of what keeps the scheduler from placing it."""
        return frozenset(gate.name for gate in self.spec.scheduling_gates or ())

    def condition(self, kind: str) -> Condition | None:
        """Return its condition of that type, or None."""
        return next((each for each in self.status.conditions or () if each.type == kind), None)


Pod = PodObject[ContainerProgram]
"""A pod of this node."""


class Taint(Struct, frozen=True):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}"


class NodeSpec(Struct, frozen=True):
    """NodeSpec."""

    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class NodeCondition(Struct, frozen=True):
    """NodeCondition; `status` is True, False or Unknown, as text."""

    type: str = ""
    status: str = ""


class NodeStatus(Struct, frozen=True):
    """NodeStatus."""

    conditions: tuple[NodeCondition, ...] | None = None
    capacity: dict[str, str | int] | None = None
    allocatable: dict[str, str | int] | None = None


class KubernetesNode(Struct, frozen=True):
    """A node of the cluster."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class DeviceAttribute(Struct, frozen=True):
    """A DRA device's attribute; only strings are decoded."""

    string: str | None = None


class BasicDevice(Struct, frozen=True):
    """Device attributes in resource.k8s.io/v1beta1."""

    attributes: dict[str, DeviceAttribute] | None = None


class SliceDevice(Struct, frozen=True):
    """A device that a DRA driver offers on this node."""

    name: str = ""
    attributes: dict[str, DeviceAttribute] | None = None
    basic: BasicDevice | None = None


class ResourcePool(Struct, frozen=True):
    """A slice's pool; of a pool only the slices of its highest generation are valid."""

    name: str = ""
    generation: int = 0


class ResourceSliceSpec(Struct, frozen=True):
    """ResourceSliceSpec."""

    driver: str = ""
    pool: ResourcePool = ResourcePool()
    devices: tuple[SliceDevice, ...] | None = None


class ResourceSlice(Struct, frozen=True):
    """Devices that a DRA driver offers on this node."""

    metadata: ObjectMeta
    spec: ResourceSliceSpec = ResourceSliceSpec()


class ObjectList(Struct, frozen=True):
    """A list's response; items are decoded one by one, so that an invalid one does not affect the others."""

    metadata: ObjectMeta = ObjectMeta()
    items: tuple[Raw, ...] | None = None


class WatchEvent(Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, with the object or a Status."""

    type: str
    object: Raw


class ApiStatus(Struct, frozen=True):
    """The API server's error response (Status)."""

    code: int = 0
    message: str = ""


_JOB_LABELS: tuple[tuple[str, str], ...] = (
    # Label with the job's name, and the job's kind; outermost controller first, because its children have both labels.
    ("nvidia.com/dynamo-graph-deployment-name", "dynamographdeployment"),
    ("jobset.sigs.k8s.io/jobset-name", "jobset"),
    ("serving.kserve.io/inferenceservice", "inferenceservice"),
    ("leaderworkerset.sigs.k8s.io/name", "leaderworkerset"),
    ("ray.io/cluster", "raycluster"),
    ("volcano.sh/job-name", "vcjob"),
    ("sparkoperator.k8s.io/app-name", "sparkapplication"),
    ("spark-app-name", "spark"),
    ("notebook-name", "notebook"),
    ("serving.knative.dev/service", "ksvc"),
    ("workflows.argoproj.io/workflow", "workflow"),
    ("kueue.x-k8s.io/pod-group-name", "podgroup"),
)
_TRAINING, _TRAINING_OPERATOR = "training.kubeflow.org/job-name", "training.kubeflow.org/operator-name"
_RAY_KIND, _RAY_NAME = "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"
_USER_LABELS = ("hub.jupyter.org/username", "ray.io/user")
"""The requesting user, as written by JupyterHub's KubeSpawner and KubeRay's API server."""
_QUEUE_LABELS = ("kueue.x-k8s.io/queue-name", "kai.scheduler/queue", "volcano.sh/queue-name")
_SIZE_ANNOTATIONS = ("leaderworkerset.sigs.k8s.io/size", "kueue.x-k8s.io/pod-group-total-count")
"""Annotations with the number of pods that work together."""
_SIZE_VARIABLES = ("PET_NNODES", "RAY_NODE_COUNT")
"""Variables with that number, of torchrun and of KServe's servers on several nodes."""
_INDEPENDENT_KINDS = frozenset({
    "cronjob", "daemonset", "deployment", "inferenceservice", "job", "ksvc", "replicaset", "replicationcontroller",
    "rollout", "workflow",
})  # fmt: skip
"""Kinds whose pods are replicas or separate tasks, unless a pod's program is launched as part of a group."""
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation of the pods of an Indexed Job, whose ranks often come from it."""
_GROUP_VARIABLES = frozenset({*_SIZE_VARIABLES, "WORLD_SIZE", "NNODES", "MASTER_ADDR", "JAX_COORDINATOR_ADDRESS"})
_ONE_NODE = ("1", "localhost", "127.0.0.1")
_GROUP_COMMAND = re.compile(
    r"--(?:nnodes|num[_-]machines|rdzv[_-]endpoint|master[_-]addr|main[_-]process[_-]ip|dist[_-]init[_-]addr)\b"
    r"(?![= ](?:1(?![\d:])|localhost\b|127\.0\.0\.1\b))|\bray start\b"
)
"""Options that join a program to others: of torchrun, Accelerate and SGLang; and Ray's command."""
_HASH_LABELS = (("rollouts-pod-template-hash", "rollout"), ("pod-template-hash", "deployment"))
_CRON = re.compile(r"(.+)-(\d{8})")
_LATE_MINUTES = 24 * 60
"""A CronJob's Job is named after its scheduled minute, and may be created late (startingDeadlineSeconds)."""
_MOST_GPUS = 100_000
"""Most GPUs of a job; a larger number is an error."""


_KAI_GROUP, _KAI_NAMESPACES = "runai-gpu-group", ("kai-resource-reservation", "runai-reservation")


def gpu_groups(pod: Pod) -> frozenset[str]:
    """Return the groups in which the pod shares GPUs, by KAI Scheduler's labels; each group has one GPU."""
    labels = pod.metadata.labels or {}
    return frozenset(value for key, value in labels.items() if key.partition("/")[0] == _KAI_GROUP)


def reserves_gpu(pod: Pod) -> bool:
    """Whether KAI Scheduler made the pod to hold the GPU that the other pods of its group share."""
    return pod.metadata.namespace in _KAI_NAMESPACES and bool(gpu_groups(pod))


def pod_owner(namespace: str, name: str) -> Owner:
    """Return a pod as the owner of GPUs, where nothing but its name is known."""
    return Owner(f"{namespace}/pod/{name}", "kubernetes", namespace=namespace, pod=name, name=name, kind="pod")


def owner_of(namespace: str, name: str, pod: Pod | None, rules: Rules, *, exported: Iterable[str] = ()) -> Owner:
    """Return the owner of a pod's GPUs; if the API server has not reported the pod (None), the pod itself.

    `exported` are the keys of the labels that it keeps.
    """
    bare = pod_owner(namespace, name)
    if pod is None:
        return rules.apply(bare)
    labels = pod.metadata.labels or {}
    kind, job = job_of(pod.metadata)
    owner = structs.replace(
        bare,
        job_id=f"{namespace}/{kind}/{job}",
        name=job,
        kind=kind,
        user=next((labels[key] for key in _USER_LABELS if key in labels), ""),
        partition=next((labels[key] for key in _QUEUE_LABELS if key in labels), ""),
        qos=pod.spec.priority_class_name,
        time_limit_seconds=pod.spec.active_deadline_seconds,
        labels=tuple((key, labels[key]) for key in exported if labels.get(key)),
    )
    return rules.apply(owner, command=" ".join(_command_line(pod)), labels=labels)


def size_of(pod: Pod | None) -> tuple[int, int]:
    """Return the least number of a group's pods and GPUs, from annotations and launcher variables; 0: unknown."""
    if pod is None:
        return 0, 0
    annotations, environ = pod.metadata.annotations or {}, _environ(pod)
    pods = [annotations.get(key, "") for key in _SIZE_ANNOTATIONS] + [environ.get(key, "") for key in _SIZE_VARIABLES]
    return max(map(_number, pods)), _number(environ.get("WORLD_SIZE", ""))


def is_independent(pod: Pod) -> bool:
    """Whether it works independently of its job's other pods: by what created it, if nothing in it shows a group."""
    kind, _ = job_of(pod.metadata)
    if kind not in _INDEPENDENT_KINDS or _COMPLETION_INDEX in (pod.metadata.annotations or {}):
        return False
    variables = (each for container in pod.spec.containers or () for each in container.env or ())
    launched = any(each.name in _GROUP_VARIABLES and each.value not in _ONE_NODE for each in variables)
    return not launched and not _GROUP_COMMAND.search(" ".join(_command_line(pod)))


def restarts_of(pod: Pod | None, containers: Container[str] | None) -> int:
    """Return the restarts of that one of the containers that has had most; None: of all but init containers.

    Only `containers` with a GPU restart the work on it: a proxy or a log shipper beside them does not.
    """
    if pod is None:
        return 0
    statuses = pod.status.container_statuses or ()
    if containers is not None:
        statuses = tuple(
            each for each in (*statuses, *(pod.status.init_container_statuses or ())) if each.name in containers
        )
    return max((max(0, each.restart_count) for each in statuses), default=0)


def job_of(metadata: ObjectMeta) -> tuple[str, str]:
    """Return kind and name of a pod's job: the outermost controller in its labels or owner, else the pod itself."""
    labels = metadata.labels or {}
    if _RAY_NAME in labels and _RAY_KIND in labels:
        return labels[_RAY_KIND].lower(), labels[_RAY_NAME]
    if _TRAINING in labels:
        return _training_kind(metadata, labels), labels[_TRAINING]
    if "hub.jupyter.org/username" in labels:
        return "notebook", metadata.name
    for label, kind in _JOB_LABELS:
        if labels.get(label):
            return kind, labels[label]
    controller = _controller_of(metadata)
    return ("pod", metadata.name) if controller is None else _job_of_controller(controller, metadata, labels)


def _controller_of(metadata: ObjectMeta) -> OwnerReference | None:
    """Return the managing owner; None for a static pod, whose owner is its node."""
    references = (each for each in metadata.owner_references or () if each.controller and each.kind != "Node")
    return next(references, None)


def _training_kind(metadata: ObjectMeta, labels: dict[str, str]) -> str:
    """Return the kind from the operator's name: a Job manages an MPIJob's launcher, the MPIJob its workers."""
    operator = re.sub(r"-(?:controller|operator)$", "", labels.get(_TRAINING_OPERATOR, ""))
    if operator:
        return operator if operator.endswith("job") else f"{operator}job"
    controller = _controller_of(metadata)
    return controller.kind.lower() if controller else "trainingjob"


def _job_of_controller(controller: OwnerReference, metadata: ObjectMeta, labels: dict[str, str]) -> tuple[str, str]:
    if controller.kind == "ReplicaSet":
        for label, kind in _HASH_LABELS:
            if labels.get(label) and controller.name.endswith(f"-{labels[label]}"):
                return kind, controller.name.removesuffix(f"-{labels[label]}")
    if controller.kind == "Job" and (cron := _cron_job(controller.name, metadata)):
        return "cronjob", cron
    return controller.kind.lower(), controller.name


def _cron_job(job: str, metadata: ObjectMeta) -> str:
    """Return the CronJob's name if the Job's name ends in its scheduled minute: all its runs count as one job."""
    named, made = _CRON.fullmatch(job), metadata.creation_timestamp
    if named is None or made is None:
        return ""
    return named[1] if 0 <= made.timestamp() // 60 - int(named[2]) <= _LATE_MINUTES else ""


def _command_line(pod: Pod) -> Iterator[str]:
    for container in pod.spec.containers or ():
        yield from container.command or ()
        yield from container.args or ()


def _environ(pod: Pod) -> dict[str, str]:
    variables = (each for container in pod.spec.containers or () for each in container.env or ())
    return {each.name: each.value for each in variables if each.value}


def _number(text: str) -> int:
    """Return the number in `text`; 0 if it is none."""
    return min(int(text), _MOST_GPUS) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0


_TAINTS = {
    "node.kubernetes.io/out-of-service": "down",
    "node.cloudprovider.kubernetes.io/shutdown": "down",
    "ToBeDeletedByClusterAutoscaler": "draining",
    "karpenter.sh/disrupted": "draining",
    "karpenter.sh/disruption": "draining",  # Karpenter 0.32 to 0.37
    "karpenter.sh/unregistered": "not_ready",
    "node.kubernetes.io/unschedulable": "cordoned",
    "node.kubernetes.io/not-ready": "not_ready",
    "node.kubernetes.io/unreachable": "not_ready",
    "node.kubernetes.io/network-unavailable": "not_ready",
    "node.cloudprovider.kubernetes.io/uninitialized": "not_ready",
}
_CONDITIONS_BY_WEIGHT = ("down", "draining", "cordoned", "not_ready")
"""By precedence: what an administrator decided comes before what happened to the node."""


def node_condition(node: KubernetesNode | None) -> str:
    """Return one of CONDITIONS; "" for a node that accepts work or is unknown."""
    if node is None:
        return ""
    found = {_TAINTS[taint.key] for taint in node.spec.taints or () if taint.key in _TAINTS}
    if node.spec.unschedulable:
        found.add("cordoned")
    if any(each.type == "Ready" and each.status != "True" for each in node.status.conditions or ()):
        found.add("not_ready")
    return next((condition for condition in _CONDITIONS_BY_WEIGHT if condition in found), "")
