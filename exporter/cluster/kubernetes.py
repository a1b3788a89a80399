"""The `ClusterSource` of Kubernetes: one list and watch of all pods and one of all nodes, on a separate thread.

Derives queue, expected GPUs and placement from pods and nodes. An object that cannot be decoded is rejected by itself
and counted; DRA claims are not counted. Needs get, list and watch on pods and nodes. Sources: Kubernetes' "Assigning
Pods to Nodes", "Init Containers", "Pod disruption conditions"; labels of NVIDIA's GPU feature discovery and Topograph.
"""

import asyncio
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from msgspec import structs

from exporter.clock import SystemClock
from exporter.cluster.model import (
    ClusterJob,
    ClusterNode,
    Demand,
    Jobs,
    NodeRequirements,
    Nodes,
    PendingJob,
    parse_each,
)
from exporter.cluster.watcher import ClusterUnavailableError, Question
from exporter.config import ConfigError
from exporter.schedulers.kubernetes.api import ApiServer, ApiTimeouts, Informer, LoopThread, api_url
from exporter.schedulers.kubernetes.objects import (
    ContainerRequest,
    KubernetesNode,
    NodeSelectorRequirement,
    PodObject,
    Taint,
    Toleration,
    job_of,
    node_condition,
)

ClusterPod = PodObject[ContainerRequest]


def gpus_in(quantities: dict[str, str | int] | None, patterns: tuple[str, ...]) -> dict[str, int]:
    """Return the GPUs by resource name; extended resources are whole numbers. Raises ValueError."""
    found = {name: value for name, value in (quantities or {}).items() if any(fnmatchcase(name, p) for p in patterns)}
    return {name: count for name, count in ((name, int(value)) for name, value in found.items()) if count > 0}


def gpus_of_pod(pod: ClusterPod, patterns: tuple[str, ...]) -> Counter[str]:
    """Return the GPUs reserved for a pod: those of all parallel containers, or of one init container if more.

    Source: Kubernetes' "Init Containers", resource sharing within containers. Raises ValueError.
    """
    init = pod.spec.init_containers or ()
    together = [*(pod.spec.containers or ()), *(each for each in init if each.restart_policy == "Always")]
    counts = Counter[str]()
    for container in together:
        counts += Counter(_requested_gpus(container, patterns))
    for container in init:
        counts |= Counter(_requested_gpus(container, patterns))  # the larger count of each
    return counts


def _requested_gpus(container: ContainerRequest, patterns: tuple[str, ...]) -> dict[str, int]:
    """Return the container's GPUs; a request equals its limit, and either may be omitted."""
    return gpus_in(container.resources.limits, patterns) | gpus_in(container.resources.requests, patterns)


_CAUSES = {
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "node_failure",
    "DeletionByPodGC": "node_failure",
}
"""Cause by reason of the pod condition DisruptionTarget."""
_MOST_JOBS = 10_000
_HARD_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
_LEVELS = (
    ("nvlink_domain", ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")),
    ("switch", ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block")),
    ("zone", ("topology.kubernetes.io/zone",)),
)
"""Labels by level, the most reliable first; "block" is Topograph's earlier name of a leaf."""
_SHARES, _STRATEGY, _MODEL = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy", "nvidia.com/gpu.product"


class Disruptions:
    """Records disrupted pods at each change, so that pods gone before the next turn count; on the watch's thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[ClusterPod, str]] = OrderedDict()

    def observe(self, pod: ClusterPod) -> object:
        """Record the pod if it is being disrupted."""
        condition = pod.condition("DisruptionTarget")
        if condition is not None and condition.status == "True" and pod.spec.node_name:
            self._found[pod.metadata.uid] = (pod, _CAUSES.get(condition.reason, ""))
            while len(self._found) > _MOST_JOBS:
                self._found.popitem(last=False)
        return None

    def pods(self) -> tuple[tuple[ClusterPod, str], ...]:
        """Return the recorded pods with the cause, the latest last."""
        return tuple(self._found.values())


def read_pods(
    pods: Iterable[ClusterPod],
    nodes: Iterable[KubernetesNode],
    *,
    resources: tuple[str, ...],
    disruptions: Iterable[tuple[ClusterPod, str]],
) -> Jobs:
    """Return pending pods and jobs with GPUs; the pods of a job are one run."""
    found, refused = parse_each(lambda pod: (pod, gpus_of_pod(pod, resources)), pods)
    active = [(pod, gpus) for pod, gpus in found if gpus and not pod.terminal]
    runs: dict[str, ClusterJob] = {}
    for pod, gpus in active:
        if pod.spec.node_name:
            run = _run_of(pod, runs)
            by_node = Counter(run.gpus) + Counter({pod.spec.node_name: gpus.total()})
            runs[run.job_id] = structs.replace(
                run,
                gpus=by_node,
                nodes=tuple(by_node),
                running=True,
                priority=max(run.priority, pod.spec.priority or 0),
                started=_earliest(run.started, pod.status.start_time),
            )
    labels = _NodeLabels(nodes)
    pending = [_pending(pod, gpus, labels) for pod, gpus in active if not pod.spec.node_name]
    disrupted = _add_disruptions(disruptions, runs, resources)
    places = {repr(place): place for _, place in pending}
    return Jobs(tuple(job for job, _ in pending), tuple(disrupted.values()), places, refused)


def _run_of(pod: ClusterPod, runs: Mapping[str, ClusterJob]) -> ClusterJob:
    """Return the pod's job so far, or a new one with the same id as on the daemon of the pod's node."""
    job_id = "/".join((pod.metadata.namespace, *job_of(pod.metadata)))
    return runs.get(job_id) or ClusterJob(job_id, pod.metadata.namespace, priority=pod.spec.priority or 0)


def _earliest(first: float | None, moment: datetime | None) -> float | None:
    times = (first, None if moment is None else moment.timestamp())
    return min((each for each in times if each is not None), default=None)


def _add_disruptions(
    disruptions: Iterable[tuple[ClusterPod, str]],
    runs: Mapping[str, ClusterJob],
    resources: tuple[str, ...],
) -> dict[str, ClusterJob]:
    """Add to each job the number of its disrupted pods so far."""
    found = dict(runs)
    counted, _ = parse_each(lambda item: (*item, gpus_of_pod(item[0], resources).total()), disruptions)
    for pod, cause, gpus in counted:
        if gpus:
            run = _run_of(pod, found)
            culprit = pod.spec.node_name if cause == "node_failure" else ""
            condition = pod.condition("DisruptionTarget")
            since = condition and condition.last_transition_time
            found[run.job_id] = structs.replace(
                run,
                restarts=run.restarts + 1,
                each=gpus,
                cause=cause,
                culprit=culprit,
                left=since.timestamp() if since else None,
            )
    return found


class _NodeLabels:
    """The labels and taints that any node has."""

    def __init__(self, nodes: Iterable[KubernetesNode]) -> None:
        self.known: dict[str, set[str]] = {}
        self.taints: set[Taint] = set()
        for node in nodes:
            for key, value in (node.metadata.labels or {}).items():
                self.known.setdefault(key, set()).add(value)
            self.taints |= {taint for taint in node.spec.taints or () if taint.effect in _HARD_EFFECTS}


def _pending(pod: ClusterPod, gpus: Mapping[str, int], labels: _NodeLabels) -> tuple[PendingJob, NodeRequirements]:
    gated = bool(pod.spec.scheduling_gates)
    scheduled = pod.condition("PodScheduled")
    reason = "gated" if gated else _REASONS.get(scheduled.reason, "other") if scheduled else "none"
    made = pod.metadata.creation_timestamp
    place = _requirements(pod, labels)
    waiting = PendingJob(
        f"{pod.metadata.namespace}/pod/{pod.metadata.name}",
        pod.metadata.namespace,
        reason,
        tuple(Demand(count, count, type=_gpu_type(name), place=repr(place)) for name, count in sorted(gpus.items())),
        since=None if gated or made is None else made.timestamp(),
        priority=pod.spec.priority or 0,
    )
    return waiting, place


_REASONS = {"Unschedulable": "unschedulable", "SchedulingGated": "gated", "SchedulerError": "other", "": "none"}


def _requirements(pod: ClusterPod, labels: _NodeLabels) -> NodeRequirements:
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


def _affinity(pod: ClusterPod, labels: _NodeLabels) -> tuple[tuple[frozenset[str], ...], bool]:
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    terms = (required.node_selector_terms or ()) if required else ()
    if not terms:
        return (), True
    if len(terms) > 1 or terms[0].match_fields:
        return (), False
    choices = [_choice(each, labels) for each in terms[0].match_expressions or ()]
    return tuple(each for each in choices if each is not None), None not in choices


def _choice(wanted: NodeSelectorRequirement, labels: _NodeLabels) -> frozenset[str] | None:
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


def read_nodes(nodes: Iterable[KubernetesNode], pods: Iterable[ClusterPod], *, resources: tuple[str, ...]) -> Nodes:
    """Return each node that has GPUs, with those that its pods use."""
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    placed = (pod for pod in pods if pod.spec.node_name and not pod.terminal)
    for name, gpus in parse_each(lambda pod: (pod.spec.node_name, gpus_of_pod(pod, resources)), placed)[0]:
        used[name] += gpus
    found, refused = parse_each(lambda node: _node(node, used[node.metadata.name], resources), nodes)
    return Nodes(tuple(node for node in found if node.gpus), refused=refused)


def _node(node: KubernetesNode, used: Counter[str], resources: tuple[str, ...]) -> ClusterNode:
    capacity, offered = gpus_in(node.status.capacity, resources), gpus_in(node.status.allocatable, resources)
    labels = node.metadata.labels or {}
    given, total = sum(used[name] for name in capacity), sum(capacity.values())
    work = "idle" if not given else "allocated" if given >= total else "mixed"
    hard = (taint for taint in node.spec.taints or () if taint.effect in _HARD_EFFECTS)
    return ClusterNode(
        node.metadata.name,
        _by_type(capacity),
        _by_type({name: used[name] for name in capacity}),
        _by_type({name: count - offered.get(name, 0) for name, count in capacity.items()}),
        shares=_shares(labels),
        model=labels.get(_MODEL, ""),
        state=node_condition(node) or work,
        features=frozenset(f"{key}={value}" for key, value in labels.items()),
        taints=frozenset(map(str, hard)),
        groups=_groups(labels),
    )


def _by_type(counts: Mapping[str, int]) -> dict[str, int]:
    return {_gpu_type(name): max(0, count) for name, count in counts.items()}


def _gpu_type(resource: str) -> str:
    return resource.rpartition("/")[2]


def _shares(labels: Mapping[str, str]) -> int:
    """Return the replicas of a GPU, if feature discovery reports that it is shared."""
    text = labels.get(_SHARES, "")
    shared = labels.get(_STRATEGY, "none") != "none"
    return max(1, int(text)) if shared and text.isascii() and text.isdigit() else 1


def _groups(labels: Mapping[str, str]) -> dict[str, str]:
    found = ((level, next((labels[name] for name in names if labels.get(name)), "")) for level, names in _LEVELS)
    return {level: group for level, group in found if group}


_NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
_WAIT_SECONDS = 15.0
"""For the first lists, and for the watch's thread to return its objects."""
_POLL_SECONDS = 0.05
T = TypeVar("T")


class KubernetesCluster:
    """The `ClusterSource` of a Kubernetes cluster; runs a thread from construction to `close`."""

    name = "kubernetes"

    def __init__(self, api_server: ApiServer, *, resources: tuple[str, ...], now: Callable[[], int]) -> None:
        """`resources` are patterns of the resource names of GPUs; `now` returns monotonic nanoseconds."""
        self._resources = resources
        self._disruptions = Disruptions()
        self._pod_informer = Informer(
            api_server, ClusterPod, paths=("/api/v1/pods",), selector=_NOT_ENDED, now=now,
            significant=self._disruptions.observe, accepts=self._asks_for_gpus,
        )  # fmt: skip
        self._node_informer = Informer(api_server, KubernetesNode, paths=("/api/v1/nodes",), selector="", now=now)
        self.questions = (Question("jobs", 1, 1, self._jobs), Question("nodes", 1, 1, self._read_nodes))
        self._thread = LoopThread(self._run)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def _asks_for_gpus(self, pod: ClusterPod) -> bool:
        """Return False for most pods; an unreadable request is kept, to be counted as refused."""
        try:
            return bool(gpus_of_pod(pod, self._resources))
        except ValueError:
            return True

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:  # if one fails, the other ends too, before both begin anew
            for informer in (self._pod_informer, self._node_informer):
                group.create_task(informer.run())

    def _jobs(self) -> Jobs:
        pods, nodes = self._objects(self._pod_informer), self._objects(self._node_informer)
        disrupted = self._on_loop(self._disrupted_pods())
        return read_pods(pods, nodes, resources=self._resources, disruptions=disrupted)

    async def _disrupted_pods(self) -> tuple[tuple[ClusterPod, str], ...]:
        return self._disruptions.pods()

    def _read_nodes(self) -> Nodes:
        return read_nodes(
            self._objects(self._node_informer), self._objects(self._pod_informer), resources=self._resources
        )

    def _objects(self, informer: Informer[Any]) -> tuple[Any, ...]:
        """Return all current objects. Raises ClusterUnavailableError if the API server does not answer."""
        return self._on_loop(_objects_of(informer))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the watch's thread: a dictionary must not change while it is copied."""
        if not self._thread.alive:
            work.close()
            raise ClusterUnavailableError(
                "the watch of the API server has ended: read the log and restart this program"
            )
        done = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
        try:
            return done.result(timeout=2 * _WAIT_SECONDS)
        except TimeoutError as err:
            done.cancel()
            raise ClusterUnavailableError("the thread that watches the API server is too busy to answer") from err


async def _objects_of(informer: Informer[Any]) -> tuple[Any, ...]:
    """Wait for the first list, unless the server is known not to answer."""
    waited = 0.0
    while not (informer.synced.is_set() or informer.error or waited > _WAIT_SECONDS):
        await asyncio.sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS
    if not informer.live:
        raise ClusterUnavailableError(informer.error or "the API server has not answered yet")
    return tuple(informer.objects.values())


def open_kubernetes(
    config: Any, *, environ: Mapping[str, str] = os.environ, timeouts: ApiTimeouts | None = None
) -> KubernetesCluster:
    """Open with the API server of `config.kubernetes`. Raises ConfigError if there is none."""
    settings = config.kubernetes
    url = api_url(settings, environ)
    if not url:
        raise ConfigError(
            "kubernetes.api_url: no API server: run this in a pod with a service account, or name its address"
        )
    api_server = ApiServer(url, settings.token_file, settings.ca_file, timeouts or ApiTimeouts())
    return KubernetesCluster(api_server, resources=settings.resources, now=SystemClock().now)
