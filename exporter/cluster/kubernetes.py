"""The `ClusterSource` of Kubernetes: lists and watches of all pods and of all nodes, on a separate thread.

Derives queue, expected GPUs and placement from pods and nodes. An object that cannot be decoded is rejected by itself
and counted; DRA claims are not counted. Needs list and watch on pods and nodes, and for Kueue on its workloads and
local queues. Sources: Kubernetes' "Pod disruption conditions"; labels of GKE, of Topograph and of NVIDIA's GPU
feature discovery; annotations of nodes by device plugins (Project-HAMi/HAMi, docs/develop/protocol.md, "Device
Register"; volcano-sh/volcano, pkg/scheduler/api/devices/nvidia/vgpu/utils.go, decodeNodeDevices).
"""

import asyncio
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from msgspec import structs

from exporter.clock import SystemClock
from exporter.cluster.kueue import (
    GATE,
    LOCAL_QUEUES,
    WORKLOADS,
    Evictions,
    LocalQueue,
    Queues,
    Workload,
    add_workloads,
    gpus_of_workload,
)
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
from exporter.cluster.pods import (
    HARD_EFFECTS,
    ClusterPod,
    NodeLabels,
    gpu_type,
    job_id_of,
    requirements,
)
from exporter.cluster.watcher import ClusterUnavailableError, Question
from exporter.config import ConfigError
from exporter.schedulers.kubernetes.api import ApiServer, ApiTimeouts, Informer, LoopThread, api_url
from exporter.schedulers.kubernetes.objects import Condition, KubernetesNode, node_condition
from exporter.schedulers.kubernetes.requests import gpus_in, gpus_of_pod

_CAUSES = {
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "node_failure",
    "DeletionByPodGC": "node_failure",
    "TerminationByKubelet": "node_failure",
}
"""Cause by reason of the pod condition DisruptionTarget. The kubelet ends pods of a node that shuts down or is short of
memory, disk or processes."""
_MOST_JOBS = 10_000
_LEVELS = (
    ("nvlink_domain", ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")),
    ("switch", ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block")),
    ("zone", ("topology.kubernetes.io/zone",)),
)
"""Labels by level, the most reliable first; "block" is Topograph's earlier name of a leaf."""
_SHARES = (
    ("nvidia.com/gpu.sharing-strategy", "nvidia.com/gpu.replicas"),
    ("cloud.google.com/gke-gpu-sharing-strategy", "cloud.google.com/gke-max-shared-clients-per-gpu"),
)
"""Labels of the strategy and of the number, by NVIDIA's feature discovery and by GKE."""
_REGISTERED = ("hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register")
"""Annotations of the plugins of HAMi and Volcano: each GPU with the number of devices as which it is offered."""
_SPLIT = re.compile(r'"count":(\d{1,4})\b|^[^,\[]+,(\d{1,4}),', re.ASCII)
"""That number of the first GPU, in JSON or between commas; a node has one for all."""
_MODEL, _GKE_PROFILE = "nvidia.com/gpu.product", "cloud.google.com/gke-gpu-partition-size"
_MIG_MODEL = re.compile(r".+-MIG-(\d.*?)(?:-SHARED)?")
"""Model where the plugin's MIG strategy is `single`: its MIG instances are called nvidia.com/gpu."""


class Disruptions:
    """Records disrupted pods at each change, so that pods gone before the next turn count; on the watch's thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[ClusterPod, str]] = OrderedDict()

    def observe(self, before: ClusterPod | None, pod: ClusterPod) -> None:
        """Record the pod if it is being disrupted and was not before."""
        condition = _disruption(pod)
        if condition is not None and pod.spec.node_name and (before is None or _disruption(before) is None):
            self._found[pod.metadata.uid] = (pod, _CAUSES.get(condition.reason, ""))
            while len(self._found) > _MOST_JOBS:
                self._found.popitem(last=False)

    def pods(self) -> tuple[tuple[ClusterPod, str], ...]:
        """Return the recorded pods with the cause, the latest last."""
        return tuple(self._found.values())


def _disruption(pod: ClusterPod) -> Condition | None:
    condition = pod.condition("DisruptionTarget")
    return condition if condition is not None and condition.status == "True" else None


def read_pods(
    pods: Iterable[ClusterPod],
    nodes: Iterable[KubernetesNode],
    *,
    resources: tuple[str, ...],
    disruptions: Iterable[tuple[ClusterPod, str]],
    queues: Mapping[str, str] | None = None,
) -> Jobs:
    """Return pending pods and jobs with GPUs; the pods of a job are one run.

    `queues` are Kueue's ClusterQueues by job id. With it, pods behind Kueue's gate are left to their workloads.
    """
    found, refused = parse_each(lambda pod: (pod, gpus_of_pod(pod, resources)), pods)
    active = [(pod, gpus) for pod, gpus in found if gpus and not pod.terminal]
    runs: dict[str, ClusterJob] = {}
    for pod, gpus in active:
        if pod.spec.node_name:
            run = _run_of(pod, runs, queues or {})
            by_node = Counter(run.gpus) + Counter({pod.spec.node_name: gpus.total()})
            runs[run.job_id] = structs.replace(
                run,
                gpus=by_node,
                nodes=tuple(by_node),
                running=True,
                priority=max(run.priority, pod.spec.priority or 0),
                started=_earliest(run.started, pod.status.start_time),
            )
    labels = NodeLabels(nodes)
    waiting = [(pod, gpus) for pod, gpus in active if not pod.spec.node_name]
    if queues is not None:
        waiting = [(pod, gpus) for pod, gpus in waiting if GATE not in pod.gates]
    pending = [_pending(pod, gpus, labels, queues or {}) for pod, gpus in waiting]
    disrupted = _add_disruptions(disruptions, runs, resources, queues or {})
    places = {repr(place): place for _, place in pending}
    return Jobs(tuple(job for job, _ in pending), tuple(disrupted.values()), places, refused)


def _run_of(pod: ClusterPod, runs: Mapping[str, ClusterJob], queues: Mapping[str, str]) -> ClusterJob:
    """Return the pod's job so far, or a new one."""
    job_id = job_id_of(pod.metadata)
    partition = queues.get(job_id, pod.metadata.namespace)
    return runs.get(job_id) or ClusterJob(job_id, partition, priority=pod.spec.priority or 0)


def _earliest(first: float | None, moment: datetime | None) -> float | None:
    times = (first, None if moment is None else moment.timestamp())
    return min((each for each in times if each is not None), default=None)


def _add_disruptions(
    disruptions: Iterable[tuple[ClusterPod, str]],
    runs: Mapping[str, ClusterJob],
    resources: tuple[str, ...],
    queues: Mapping[str, str],
) -> dict[str, ClusterJob]:
    """Add to each job the number of its disrupted pods so far."""
    found = dict(runs)
    counted, _ = parse_each(lambda item: (*item, gpus_of_pod(item[0], resources).total()), disruptions)
    for pod, cause, gpus in counted:
        if gpus:
            run = _run_of(pod, found, queues)
            culprit = pod.spec.node_name if cause == "node_failure" else ""
            condition = _disruption(pod)
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


def _pending(
    pod: ClusterPod, gpus: Mapping[str, int], labels: NodeLabels, queues: Mapping[str, str]
) -> tuple[PendingJob, NodeRequirements]:
    gated = bool(pod.gates)
    scheduled = pod.condition("PodScheduled")
    reason = "gated" if gated else _REASONS.get(scheduled.reason, "other") if scheduled else "none"
    made = pod.metadata.creation_timestamp
    place = requirements(pod, labels)
    waiting = PendingJob(
        f"{pod.metadata.namespace}/pod/{pod.metadata.name}",
        queues.get(job_id_of(pod.metadata), pod.metadata.namespace),
        reason,
        tuple(Demand(count, count, type=gpu_type(name), place=repr(place)) for name, count in sorted(gpus.items())),
        since=None if gated or made is None else made.timestamp(),
        priority=pod.spec.priority or 0,
    )
    return waiting, place


_REASONS = {"Unschedulable": "unschedulable", "SchedulingGated": "gated", "SchedulerError": "other", "": "none"}


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
    hard = (taint for taint in node.spec.taints or () if taint.effect in HARD_EFFECTS)
    return ClusterNode(
        node.metadata.name,
        _by_type(capacity),
        _by_type({name: used[name] for name in capacity}),
        _by_type({name: count - offered.get(name, 0) for name, count in capacity.items()}),
        shares=_shares(labels, node.metadata.annotations or {}),
        profile=_profile(labels),
        model=labels.get(_MODEL, ""),
        state=node_condition(node) or work,
        features=frozenset(f"{key}={value}" for key, value in labels.items()),
        taints=frozenset(map(str, hard)),
        groups=_groups(labels),
    )


def _by_type(counts: Mapping[str, int]) -> dict[str, int]:
    return {gpu_type(name): max(0, count) for name, count in counts.items()}


def _shares(labels: Mapping[str, str], annotations: Mapping[str, str]) -> int:
    """Return the number of pods that may share a GPU, or a MIG instance; 1 if the node does not show that."""
    numbers = [labels.get(number, "") for strategy, number in _SHARES if labels.get(strategy, "none") != "none"]
    splits = filter(None, (_SPLIT.search(annotations.get(name, "")) for name in _REGISTERED))
    numbers += [split[1] or split[2] for split in splits]
    return max((1, *(int(text) for text in numbers if text.isascii() and text.isdigit())))


def _profile(labels: Mapping[str, str]) -> str:
    """Return the MIG profile of the node's GPUs, if its MIG instances are offered as GPUs."""
    model = _MIG_MODEL.fullmatch(labels.get(_MODEL, ""))
    return model[1] if model else labels.get(_GKE_PROFILE, "")


def _groups(labels: Mapping[str, str]) -> dict[str, str]:
    found = ((level, next((labels[name] for name in names if labels.get(name)), "")) for level, names in _LEVELS)
    return {level: group for level, group in found if group}


_NOT_ENDED, _FAILED = "status.phase!=Succeeded,status.phase!=Failed", "status.phase=Failed"
_WAIT_SECONDS = 15.0
"""For the first lists, and for the watch's thread to return its objects."""
_POLL_SECONDS = 0.05
T = TypeVar("T")


class KubernetesCluster:
    """The `ClusterSource` of a Kubernetes cluster; runs a thread from construction to `close`."""

    name = "kubernetes"

    def __init__(
        self, api_server: ApiServer, *, resources: tuple[str, ...], now: Callable[[], int], kueue: bool = False
    ) -> None:
        """`resources` are patterns of the resource names of GPUs; `now` returns monotonic nanoseconds.

        `kueue`: workloads of Kueue are read too.
        """
        self._resources = resources
        self._disruptions = Disruptions()
        self._pod_informer = Informer(
            api_server, ClusterPod, paths=("/api/v1/pods",), selector=_NOT_ENDED, now=now,
            observe=self._disruptions.observe, accepts=self._asks_for_gpus,
        )  # fmt: skip
        # Kubelet and pod garbage collector set the condition and the phase at once. A watch that selects by phase then
        # sends the pod as it was before, as deleted (kubernetes/kubernetes, cacheWatcher.convertToWatchEvent).
        self._failed_informer = Informer(
            api_server, ClusterPod, paths=("/api/v1/pods",), selector=_FAILED, now=now,
            observe=self._disruptions.observe,
            accepts=lambda pod: _disruption(pod) is not None and self._asks_for_gpus(pod),
        )  # fmt: skip
        self._node_informer = Informer(api_server, KubernetesNode, paths=("/api/v1/nodes",), selector="", now=now)
        self._kueue = _KueueInformers(api_server, resources, now) if kueue else None
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
        kueue = self._kueue.all if self._kueue else ()
        informers: tuple[Informer[Any], ...] = (
            self._pod_informer,
            self._failed_informer,
            self._node_informer,
            *kueue,
        )
        async with asyncio.TaskGroup() as group:  # if one fails, the others end too, before all begin anew
            for informer in informers:
                group.create_task(informer.run())

    def _jobs(self) -> Jobs:
        pods, nodes = self._objects(self._pod_informer), self._objects(self._node_informer)
        self._objects(self._failed_informer)  # raises if disruptions may be missing
        disrupted = self._on_loop(_result_of(self._disruptions.pods))
        if self._kueue is None:
            return read_pods(pods, nodes, resources=self._resources, disruptions=disrupted)
        queues = Queues(self._objects(self._kueue.workloads), self._objects(self._kueue.local_queues))
        evicted = self._on_loop(_result_of(self._kueue.evictions.workloads))
        jobs = read_pods(pods, nodes, resources=self._resources, disruptions=disrupted, queues=queues.by_job)
        return add_workloads(jobs, queues, evicted, labels=NodeLabels(nodes), resources=self._resources)

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


class _KueueInformers:
    """Workloads that have GPUs and have not finished, the queues, and what was evicted."""

    def __init__(self, api_server: ApiServer, resources: tuple[str, ...], now: Callable[[], int]) -> None:
        self._resources = resources
        self.evictions = Evictions()
        self.workloads = Informer(
            api_server, Workload, paths=WORKLOADS, selector="", now=now, observe=self.evictions.observe,
            accepts=self._queues_gpus,
        )  # fmt: skip
        self.local_queues = Informer(api_server, LocalQueue, paths=LOCAL_QUEUES, selector="", now=now)
        self.all: tuple[Informer[Any], ...] = (self.workloads, self.local_queues)

    def _queues_gpus(self, workload: Workload) -> bool:
        """Return False for most workloads; an unreadable request is kept, to be counted as refused."""
        try:
            return not workload.true("Finished") and bool(gpus_of_workload(workload, self._resources))
        except ValueError:
            return True


async def _result_of(read: Callable[[], T]) -> T:
    return read()


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
    return KubernetesCluster(
        api_server, resources=settings.resources, now=SystemClock().now, kueue=config.cluster.kueue
    )
