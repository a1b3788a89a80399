"""What Kueue's objects add to pods: which workloads wait for quota, and which were evicted, by whom.

A workload is a job as Kueue sees it: its pods are there once it is admitted, or wait behind a scheduling gate until
then. Its partition is the ClusterQueue. Sources: Kueue's apis/kueue/v1beta1 and v1beta2 (workload_types.go,
localqueue_types.go), and the message of the condition Preempted in pkg/scheduler/preemption, which names the other
workload's UID and, from 0.15 on, its ClusterQueue.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec import Struct, structs

from exporter.cluster.interruptions import UNKNOWN
from exporter.cluster.model import BLOCKED, ClusterJob, Demand, Jobs, NodeRequirements, PendingJob, parse_each
from exporter.cluster.pods import ClusterPod, NodeLabels, gpu_type, job_id_of, requirements
from exporter.schedulers.kubernetes.objects import Condition, ContainerRequest, ObjectMeta, PodSpec
from exporter.schedulers.kubernetes.requests import gpus_of_pod

_VERSIONS = ("v1beta2", "v1beta1")
WORKLOADS = tuple(f"/apis/kueue.x-k8s.io/{version}/workloads" for version in _VERSIONS)
LOCAL_QUEUES = tuple(f"/apis/kueue.x-k8s.io/{version}/localqueues" for version in _VERSIONS)
GATE = "kueue.x-k8s.io/admission"
"""Scheduling gate of pods whose workload is not admitted."""
_CAUSES = {
    "Preempted": "preempted",
    "PodsReadyTimeout": "",
    "AdmissionCheck": "",
    "ClusterQueueStopped": "",
    "LocalQueueStopped": "",
}
"""Cause of an interruption by reason of the condition Evicted; node failures are those of the pods."""
_REASONS = {
    "": "none",
    "PendingEvaluation": "none",
    "Pending": "limit",
    "WaitingForQuota": "limit",
    "WaitingForPodsReady": "limit",
    "WaitingForPreemptedWorkloads": "resources",
    "TopologyPlacementFailed": "resources",
    "Suspended": "held",
    "OnHold": "held",
    "AdmissionGated": "held",
    "Inadmissible": "impossible",
    "Misconfigured": "impossible",
    "NoMatchingFlavor": "impossible",
    "ExceedsMaxQuota": "impossible",
}
"""Reason for waiting by reason of the condition QuotaReserved."""
_STOPPED = frozenset({"ClusterQueueStopped", "LocalQueueStopped"})
_UID = re.compile(r"workload \(UID: ([^\s,)]+)")
_QUEUE = re.compile(r"preemptor path: (?:[^\s;]*/)?([^\s;/]+)(?:;|$)")
_MOST_EVICTIONS = 10_000
_MOST_PODS = 256
"""Pods of a workload up to which it is examined whether they fit."""


class PodTemplate(Struct, frozen=True):
    """PodTemplateSpec."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec[ContainerRequest] = PodSpec()


class PodSet(Struct, frozen=True):
    """PodSet: `count` equal pods."""

    template: PodTemplate = PodTemplate()
    count: int = 1


class WorkloadSpec(Struct, frozen=True, rename="camel"):
    """WorkloadSpec; `queue_name` is a LocalQueue's."""

    pod_sets: tuple[PodSet, ...] | None = None
    queue_name: str = ""
    priority: int | None = None
    active: bool | None = None


class WorkloadCondition(Condition, frozen=True, rename="camel"):
    """Condition with its message, which names the preempting workload."""

    message: str = ""


class Admission(Struct, frozen=True, rename="camel"):
    """Admission."""

    cluster_queue: str = ""


class WorkloadStatus(Struct, frozen=True):
    """WorkloadStatus."""

    admission: Admission | None = None
    conditions: tuple[WorkloadCondition, ...] | None = None


class Workload(Struct, frozen=True):
    """A job as Kueue queues it."""

    metadata: ObjectMeta
    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()

    def condition(self, kind: str) -> WorkloadCondition:
        """Return its condition of that type, or an empty one."""
        return next((each for each in self.status.conditions or () if each.type == kind), WorkloadCondition())

    def true(self, kind: str) -> bool:
        """Whether its condition of that type is True."""
        return self.condition(kind).status == "True"

    @property
    def job_id(self) -> str:
        """The id of its pods' job."""
        owners = self.metadata.owner_references or ()
        if owners and not any(owner.controller for owner in owners):  # all pods of a group own their workload
            return f"{self.metadata.namespace}/podgroup/{self.metadata.name}"
        return job_id_of(self.metadata)


class LocalQueueSpec(Struct, frozen=True, rename="camel"):
    """LocalQueueSpec."""

    cluster_queue: str = ""


class LocalQueue(Struct, frozen=True):
    """A namespace's entry to a ClusterQueue."""

    metadata: ObjectMeta
    spec: LocalQueueSpec = LocalQueueSpec()


def gpus_of_workload(workload: Workload, patterns: tuple[str, ...]) -> list[tuple[ClusterPod, Counter[str], int]]:
    """Return a pod of each set that has GPUs, with its GPUs by resource and the number of pods. Raises ValueError."""
    sets = [(each, ClusterPod(each.template.metadata, each.template.spec)) for each in workload.spec.pod_sets or ()]
    found = [(pod, gpus_of_pod(pod, patterns), each.count) for each, pod in sets]
    return [(pod, gpus, count) for pod, gpus, count in found if gpus and count > 0]


class Evictions:
    """Records each eviction once, at the change that shows it; on the watch's thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, datetime | None], Workload] = OrderedDict()

    def observe(self, before: Workload | None, workload: Workload) -> None:
        """Record the workload, as it is then, if it is evicted and was not before."""
        evicted = workload.condition("Evicted")
        if before is not None and before.condition("Evicted") == evicted:
            return
        if evicted.status == "True" and evicted.reason in _CAUSES:
            self._found[workload.metadata.uid, evicted.last_transition_time] = workload
            while len(self._found) > _MOST_EVICTIONS:
                self._found.popitem(last=False)

    def workloads(self) -> tuple[Workload, ...]:
        """Return the recorded workloads, the latest last."""
        return tuple(self._found.values())


class Queues:
    """The ClusterQueues of workloads and jobs."""

    def __init__(self, workloads: Iterable[Workload], local_queues: Iterable[LocalQueue]) -> None:
        self._local = {(each.metadata.namespace, each.metadata.name): each.spec.cluster_queue for each in local_queues}
        self.workloads = {each.metadata.uid: each for each in workloads}
        """By uid."""
        self.by_job = {each.job_id: self.of(each) for each in self.workloads.values()}

    def of(self, workload: Workload) -> str:
        """Return the workload's ClusterQueue, or UNKNOWN."""
        if workload.status.admission is not None:
            return workload.status.admission.cluster_queue
        return self._local.get((workload.metadata.namespace, workload.spec.queue_name), UNKNOWN)

    def preempting(self, evicted: Workload) -> ClusterJob | None:
        """Return the job for which the workload was evicted; without an id if only its ClusterQueue is known."""
        message = evicted.condition("Evicted").message
        uid, queue = _UID.search(message), _QUEUE.search(message)
        other = self.workloads.get(uid[1]) if uid else None
        if other is not None:
            return ClusterJob(other.job_id, self.of(other))
        return ClusterJob(UNKNOWN, queue[1]) if queue and queue[1] != "UNKNOWN" else None


def add_workloads(
    jobs: Jobs, queues: Queues, evictions: Iterable[Workload], *, labels: NodeLabels, resources: tuple[str, ...]
) -> Jobs:
    """Add the workloads that wait to the pods that do, and evictions to what interrupted their jobs."""
    waiting = ((each, reason) for each in queues.workloads.values() if (reason := _reason(each)))
    found, refused = parse_each(lambda pair: _pending(*pair, queues, labels=labels, resources=resources), waiting)
    runs = {run.job_id: run for run in jobs.runs}
    for workload in evictions:
        run = runs.get(workload.job_id) or ClusterJob(workload.job_id, queues.of(workload))
        runs[run.job_id] = _evicted(run, workload, queues)
    places = {key: place for _, some in found for key, place in some.items()}
    return structs.replace(
        jobs,
        pending=(*jobs.pending, *(job for job, _ in found)),
        runs=tuple(runs.values()),
        places={**jobs.places, **places},
        refused=jobs.refused + refused,
    )


def _evicted(run: ClusterJob, workload: Workload, queues: Queues) -> ClusterJob:
    """Return the run with one more restart, and with its cause unless a pod was disrupted later."""
    evicted, restarts = workload.condition("Evicted"), run.restarts + 1
    left = evicted.last_transition_time.timestamp() if evicted.last_transition_time else None
    if (run.left or 0.0) > (left or 0.0):
        return structs.replace(run, restarts=restarts)
    cause = _CAUSES[evicted.reason]
    by = queues.preempting(workload) if cause else None
    return structs.replace(run, restarts=restarts, each=0, cause=cause, culprit="", left=left, by=by)


def _reason(workload: Workload) -> str:
    """Return why it waits; empty if it does not: its pods speak for it."""
    if workload.true("Finished") or workload.true("Admitted"):
        return ""
    if workload.spec.active is False:
        return "held"
    if workload.true("QuotaReserved"):  # an admission check is not yet ready
        return "starting"
    requeued = workload.condition("Requeued")
    if requeued.status == "False":
        return "held" if requeued.reason in _STOPPED else "begin_time"
    return _REASONS.get(workload.condition("QuotaReserved").reason, "other")


def _pending(
    workload: Workload, reason: str, queues: Queues, *, labels: NodeLabels, resources: tuple[str, ...]
) -> tuple[PendingJob, Mapping[str, NodeRequirements]]:
    """Return the job as it waits, and what its pods require by key. Raises ValueError."""
    parts: list[Demand] = []
    places: dict[str, NodeRequirements] = {}
    for pod, gpus, count in gpus_of_workload(workload, resources):
        place = requirements(pod, labels)
        places[repr(place)] = place
        for name, each in sorted(gpus.items()):
            if len(parts) + count <= _MOST_PODS:
                parts += [Demand(each, each, type=gpu_type(name), place=repr(place))] * count
            else:
                parts.append(Demand(each * count, type=gpu_type(name)))
    evicted = workload.condition("Evicted")
    since = (evicted.last_transition_time if evicted.status == "True" else None) or workload.metadata.creation_timestamp
    job = PendingJob(
        workload.job_id,
        queues.of(workload),
        reason,
        tuple(parts),
        since=None if reason in BLOCKED or since is None else since.timestamp(),
        priority=workload.spec.priority or 0,
    )
    return job, places
