"""What Kubernetes says: the kubelet's protobuf, device ids, the API server's events and objects. Owns these doors."""

import asyncio
import json
import weakref

import httpx
import msgspec

from exporter.cluster.kubernetes import read_nodes, read_pods
from exporter.cluster.kueue import Evictions, LocalQueue, Queues, Workload, add_workloads
from exporter.cluster.model import Jobs
from exporter.cluster.pods import ClusterPod, NodeLabels
from exporter.core.model import Device
from exporter.schedulers.kubernetes import kubelet as wire
from exporter.schedulers.kubernetes.api import UNREADABLE, ApiError, ApiServer, ApiTimeouts, Informer
from exporter.schedulers.kubernetes.kubelet import DeviceResolver, UnknownIdError, dra_devices, is_gpu
from exporter.schedulers.kubernetes.objects import KubernetesNode, Pod, ResourceSlice, owner_of, restarts_of, size_of
from exporter.schedulers.kubernetes.vgpu import Assignments
from exporter.schedulers.rules import Rules
from tests.fuzz.trying import Feed, Target, promise
from tests.kubernetes import cluster, kubelet

RULES = Rules()
GPUS = ("nvidia.com/gpu", "nvidia.com/mig-*")


def _json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def _kubelet_samples() -> list[bytes]:
    held = kubelet.container(kubelet.devices("nvidia.com/gpu", cluster.gpu_uuid(0), cluster.gpu_uuid(1)))
    mig = kubelet.container(
        kubelet.devices("nvidia.com/mig-1g.10gb", "MIG-GPU-0/1/0", f"{cluster.gpu_uuid(2)}::3", "nvidia0/gi1")
    )
    claim = kubelet.claim("k8s.gpu.nvidia.com/claim=uid-gpu-3", driver="gpu.nvidia.com", pool="node-1", device="gpu-3")
    pods = [
        kubelet.pod("train-0", held),
        kubelet.pod("mig", mig, namespace="lab"),
        kubelet.pod("dra", kubelet.container(claims=[claim])),
    ]
    listed = kubelet.MESSAGES["ListPodResourcesResponse"](pod_resources=pods)
    return [
        bytes(listed.SerializeToString()),
        *(bytes(kubelet.MESSAGES["ListPodResourcesResponse"](pod_resources=[pod]).SerializeToString()) for pod in pods),
    ]


def _kubelet() -> Feed:
    boards = DeviceResolver(cluster.GPUS, proc="/nonexistent")

    def feed(data: bytes) -> None:
        for held in wire.read_list(data):
            names = [name for devices in held.devices for name in devices.ids]
            boards.resolve(names, [claim for claim in held.claims if is_gpu(claim)], {})
        wire.read_allocatable(data)

    return feed


def _ids() -> Feed:
    """Names of CUDA and MIG devices as plugins, drivers and resource slices write them."""
    boards = DeviceResolver(
        (*cluster.GPUS, Device("MIG-1", "0:1", parent=cluster.gpu_uuid(0), profile="1g.10gb")), proc="/nonexistent"
    )

    def feed(data: bytes) -> None:
        boards.resolve_id(data.decode("utf-8", "replace"))

    return feed


def _pods() -> list[object]:
    labels = {
        "batch.kubernetes.io/job-name": "train",
        "training.kubeflow.org/job-name": "t",
        "kueue.x-k8s.io/queue-name": "q",
    }
    limits = {"limits": {"nvidia.com/gpu": "8"}}
    shared = {
        "hami.io/bind-phase": "success",
        "hami.io/vgpu-devices-allocated": f"{cluster.gpu_uuid(1)},NVIDIA,3000,30:;",
        "hami.io/vgpu-mig-allocations": "[]",
    }
    plain = cluster.pod_object(
        "train-0",
        labels=labels,
        annotations=shared,
        ownerReferences=cluster.kept_by("Job", "train"),
        resourceVersion="7",
    )
    asking = cluster.pod_object("asks", phase="Pending")
    asking["spec"]["containers"][0] |= {"resources": limits, "env": [{"name": "WORLD_SIZE", "value": "16"}]}
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    asking["spec"] |= {"nodeSelector": {"gpu": "h100"}, "affinity": affinity, "tolerations": [{"operator": "Exists"}]}
    return [plain, asking]


def _events() -> list[bytes]:
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    lines = [{"type": kind, "object": pod} for kind in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") for pod in _pods()]
    return [line + b"\n" for line in _json(*lines, gone, {"type": "ERROR", "object": {"code": 500, "message": "no"}})]


def _nothing(*_: object) -> None:
    return


def _watch() -> Feed:
    loop = asyncio.new_event_loop()
    access = ApiServer("http://127.0.0.1:1", "", "", ApiTimeouts())
    store: Informer[Pod] = Informer(
        access,
        Pod,
        paths=("/pods",),
        selector="",
        significant=_nothing,
        on_update=lambda: None,
        on_change=lambda: None,
        now=lambda: 0,
    )
    good = b'{"type":"ADDED","object":{"metadata":{"uid":"good"}}}\n'

    def take(data: bytes) -> None:
        loop.run_until_complete(store._read_events(httpx.Response(200, content=data)))

    def feed(data: bytes) -> None:
        try:
            take(data)
        finally:
            take(good)
            promise("good" in store.objects, "a good event after a bad one is not taken")
        for pod in list(store.objects.values()):
            owner_of("ml", "train-0", pod, RULES), size_of(pod), restarts_of(pod, None)
            Assignments(GPUS).of(pod, (wire.ContainerDevices("nvidia.com/gpu", (f"{cluster.gpu_uuid(0)}-7",)),))

    weakref.finalize(feed, loop.close)
    return feed


def _objects() -> Feed:
    """A cluster's pods, nodes and slices, after the list is unpacked."""

    def feed(data: bytes) -> None:
        pod, node = msgspec.json.decode(data, type=ClusterPod), msgspec.json.decode(data, type=KubernetesNode)
        jobs = read_pods([pod], [node], resources=GPUS, disruptions=[(pod, "")])
        promise(len(jobs.pending) + len(jobs.runs) + jobs.refused <= 3, "one pod is counted more than once")
        read_nodes([node], [pod], resources=GPUS)
        dra_devices([msgspec.json.decode(data, type=ResourceSlice)])

    return feed


def _workloads() -> Feed:
    """Kueue's objects, after the list is unpacked."""

    def feed(data: bytes) -> None:
        workload, evictions = msgspec.json.decode(data, type=Workload), Evictions()
        evictions.observe(None, workload)
        queues = Queues([workload], [msgspec.json.decode(data, type=LocalQueue)])
        jobs = add_workloads(Jobs(), queues, evictions.workloads(), labels=NodeLabels(()), resources=GPUS)
        promise(len(jobs.pending) + len(jobs.runs) + jobs.refused <= 2, "one workload is counted more than once")

    return feed


def _workload_samples() -> list[bytes]:
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}
    said = "Preempted to accommodate a workload (UID: u, JobUID: j) due to x; preemptor path: /a/b; preemptee path: /a"
    waiting = {"type": "QuotaReserved", "status": "False", "reason": "Pending"}
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": said}
    owner = {"kind": "Job", "name": "a", "controller": True}
    return _json({
        "metadata": {"name": "job-a", "namespace": "ml", "uid": "u", "ownerReferences": [owner]},
        "spec": {"queueName": "q", "clusterQueue": "c", "podSets": [{"count": 2, "template": template}]},
        "status": {"admission": {"clusterQueue": "c"}, "conditions": [waiting, evicted]},
    })  # fmt: skip


def _cluster_samples() -> list[bytes]:
    node = cluster.node_object() | {
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": 8}}
    }
    return _json(*_pods(), node, cluster.slice_object(cluster.offered("gpu-0", uuid=cluster.gpu_uuid(0))))


_API = (ApiError, *UNREADABLE)
"""What the watch takes for an answer that cannot be used, and asks anew."""
KUBERNETES: tuple[Target, ...] = (
    Target(
        name="kubelet's protobuf",
        what="pods and device ids over gRPC",
        refuses=(ValueError,),
        samples=_kubelet_samples,
        make=_kubelet,
        modules=("exporter.schedulers.kubernetes.scheduler",),
    ),
    Target(
        name="CUDA and MIG ids",
        what="what device plugins and DRA call a GPU",
        refuses=(UnknownIdError,),
        samples=lambda: [
            b"GPU-0",
            b"MIG-GPU-0/1/0",
            b"nvidia0/gi1",
            b"0",
            b"GPU-0::3",
            cluster.gpu_uuid(0).encode(),
            b"MIG-1",
        ],
        make=_ids,
        modules=("exporter.schedulers.kubernetes.scheduler",),
    ),
    Target(
        name="watch of the API server",
        what="Kubernetes' JSON events",
        refuses=_API,
        samples=_events,
        make=_watch,
        modules=("exporter.schedulers.kubernetes.scheduler",),
    ),
    Target(
        name="objects of a cluster",
        what="Kubernetes' pods, nodes, slices",
        refuses=UNREADABLE,
        samples=_cluster_samples,
        make=_objects,
        modules=("exporter.cluster", "exporter.schedulers.kubernetes.scheduler"),
    ),
    Target(
        name="workloads of Kueue",
        what="Kueue's workloads, local queues",
        refuses=UNREADABLE,
        samples=_workload_samples,
        make=_workloads,
        modules=("exporter.cluster.kueue",),
    ),
)
