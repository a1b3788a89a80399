"""From a pod to the job that a person recognises.

Owns the labels and owner references that controllers are documented to write on a pod, and what follows from them:
the job's id `namespace/kind/name`, its kind, how many GPUs it has at least. Refuses further questions to the API
server, which would need rights on every kind of object: what is not on the pod is not known.
"""

import re
from collections.abc import Iterator

from msgspec import structs

from exporter.core.model import Owner
from exporter.schedulers.kubernetes.objects import Metadata, OwnerReference, Pod
from exporter.schedulers.rules import Rules

_LABELS: tuple[tuple[str, str], ...] = (
    # Label with the job's name, its kind; outermost controller first, for its children carry both labels.
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
_USERS = ("hub.jupyter.org/username", "ray.io/user")
"""JupyterHub's KubeSpawner and KubeRay's API server write who asked."""
_QUEUES = ("kueue.x-k8s.io/queue-name", "kai.scheduler/queue", "volcano.sh/queue-name")
_SIZES = ("leaderworkerset.sigs.k8s.io/size", "kueue.x-k8s.io/pod-group-total-count")
"""Annotations with the number of pods that work together."""
_HASHES = (("rollouts-pod-template-hash", "rollout"), ("pod-template-hash", "deployment"))
_CRON = re.compile(r"(.+)-(\d{8})")
_LATE_MINUTES = 24 * 60
"""A CronJob's Job is named after the minute it was due, and may be made late (startingDeadlineSeconds)."""
_LARGEST = 100_000
"""GPUs of a job at most: what says more is a slip."""


def owner_of(namespace: str, name: str, pod: Pod | None, rules: Rules) -> Owner:
    """Who holds what the pod holds; without the API server's word on it (`pod` is None) the pod itself."""
    bare = Owner(f"{namespace}/pod/{name}", "kubernetes", namespace=namespace, pod=name, name=name, kind="pod")
    if pod is None:
        return rules.judge(bare)
    labels = pod.metadata.labels or {}
    kind, job = _job(pod.metadata, labels) or ("pod", name)
    owner = structs.replace(
        bare,
        job_id=f"{namespace}/{kind}/{job}",
        name=job,
        kind=kind,
        user=next((labels[key] for key in _USERS if key in labels), ""),
        partition=next((labels[key] for key in _QUEUES if key in labels), ""),
        qos=pod.spec.priority_class_name,
        time_limit_seconds=pod.spec.active_deadline_seconds,
    )
    return rules.judge(owner, command=" ".join(_words(pod)), labels=labels)


def size_of(pod: Pod | None) -> tuple[int, int]:
    """Pods that work together and GPUs they have together, at least, as the group or its launcher wrote them; or 0."""
    if pod is None:
        return 0, 0
    annotations, environ = pod.metadata.annotations or {}, _environ(pod)
    pods = [annotations.get(key, "") for key in _SIZES] + [environ.get("PET_NNODES", "")]
    return max(map(_number, pods)), _number(environ.get("WORLD_SIZE", ""))


def restarts_of(pod: Pod | None) -> int:
    """Restarts of the container that has had most."""
    if pod is None:
        return 0
    statuses = (*(pod.status.container_statuses or ()), *(pod.status.init_container_statuses or ()))
    return max((max(0, each.restart_count) for each in statuses), default=0)


def _job(metadata: Metadata, labels: dict[str, str]) -> tuple[str, str] | None:
    """Kind and name of the outermost controller that left its name; None for a pod of its own."""
    if _RAY_NAME in labels and _RAY_KIND in labels:
        return labels[_RAY_KIND].lower(), labels[_RAY_NAME]
    if _TRAINING in labels:
        return _trained_by(metadata, labels), labels[_TRAINING]
    if "hub.jupyter.org/username" in labels:
        return "notebook", metadata.name
    for label, kind in _LABELS:
        if labels.get(label):
            return kind, labels[label]
    keeper = _keeper(metadata)
    return None if keeper is None else _kept_by(keeper, metadata, labels)


def _keeper(metadata: Metadata) -> OwnerReference | None:
    """The controlling owner; a static pod's is its node, which is nobody's job."""
    references = (each for each in metadata.owner_references or () if each.controller and each.kind != "Node")
    return next(references, None)


def _trained_by(metadata: Metadata, labels: dict[str, str]) -> str:
    """The kind from the operator's name, for an MPIJob's launcher is kept by a Job and its workers by the MPIJob."""
    operator = re.sub(r"-(?:controller|operator)$", "", labels.get(_TRAINING_OPERATOR, ""))
    if operator:
        return operator if operator.endswith("job") else f"{operator}job"
    keeper = _keeper(metadata)
    return keeper.kind.lower() if keeper else "trainingjob"


def _kept_by(keeper: OwnerReference, metadata: Metadata, labels: dict[str, str]) -> tuple[str, str]:
    if keeper.kind == "ReplicaSet":
        for label, kind in _HASHES:
            if labels.get(label) and keeper.name.endswith(f"-{labels[label]}"):
                return kind, keeper.name.removesuffix(f"-{labels[label]}")
    if keeper.kind == "Job" and (cron := _cron_job(keeper.name, metadata)):
        return "cronjob", cron
    return keeper.kind.lower(), keeper.name


def _cron_job(job: str, metadata: Metadata) -> str:
    """The CronJob's name, if the Job's ends in the minute at which it was due; runs of it are one job to people."""
    named, made = _CRON.fullmatch(job), metadata.creation_timestamp
    if named is None or made is None:
        return ""
    return named[1] if 0 <= made.timestamp() // 60 - int(named[2]) <= _LATE_MINUTES else ""


def _words(pod: Pod) -> Iterator[str]:
    for container in pod.spec.containers or ():
        yield from container.command or ()
        yield from container.args or ()


def _environ(pod: Pod) -> dict[str, str]:
    variables = (each for container in pod.spec.containers or () for each in container.env or ())
    return {each.name: each.value for each in variables if each.value}


def _number(text: str) -> int:
    """0 where it is none."""
    return min(int(text), _LARGEST) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0
