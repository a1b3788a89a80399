"""A kubelet's pod-resources service on a real unix socket, with grpc's own server and protobuf's own messages.

Has descriptors of the whole official `v1` message set, written apart from the product's decoder, so that each checks
the other (kubernetes/kubelet pkg/apis/podresources/v1/api.proto).
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

STRING, _INT64, _UINT64, _MESSAGE = (
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
)
_MESSAGES: dict[str, dict[str, tuple[int, Any]]] = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": (1, ["PodResources"])},
    "GetPodResourcesRequest": {"pod_name": (1, STRING), "pod_namespace": (2, STRING)},
    "GetPodResourcesResponse": {"pod_resources": (1, "PodResources")},
    "AllocatableResourcesRequest": {},
    "AllocatableResourcesResponse": {
        "devices": (1, ["ContainerDevices"]),
        "cpu_ids": (2, [_INT64]),
        "memory": (3, ["ContainerMemory"]),
    },
    "PodResources": {
        "name": (1, STRING),
        "namespace": (2, STRING),
        "containers": (3, ["ContainerResources"]),
        "cpu_ids": (4, [_INT64]),
        "memory": (5, ["ContainerMemory"]),
    },
    "ContainerResources": {
        "name": (1, STRING),
        "devices": (2, ["ContainerDevices"]),
        "cpu_ids": (3, [_INT64]),
        "memory": (4, ["ContainerMemory"]),
        "dynamic_resources": (5, ["DynamicResource"]),
    },
    "ContainerMemory": {"memory_type": (1, STRING), "size": (2, _UINT64), "topology": (3, "TopologyInfo")},
    "TopologyInfo": {"nodes": (1, ["NUMANode"])},
    "NUMANode": {"ID": (1, _INT64)},
    "ContainerDevices": {"resource_name": (1, STRING), "device_ids": (2, [STRING]), "topology": (3, "TopologyInfo")},
    "DynamicResource": {
        "class_name": (1, STRING),
        "claim_name": (2, STRING),
        "claim_namespace": (3, STRING),
        "claim_resources": (4, ["ClaimResource"]),
    },
    "ClaimResource": {
        "cdi_devices": (1, ["CDIDevice"]),
        "driver_name": (2, STRING),
        "pool_name": (3, STRING),
        "device_name": (4, STRING),
        "share_id": (5, STRING),
    },
    "CDIDevice": {"name": (1, STRING)},
}


def message_classes(package: str, messages: Mapping[str, Mapping[str, tuple[int, Any]]]) -> dict[str, Any]:
    """Return protobuf's classes of messages: name, and by field its number and type; a list of one type repeats it."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            one: Any = kind[0] if isinstance(kind, list) else kind
            field = described.field.add(name=name, number=number, label=3 if isinstance(kind, list) else 1)
            field.type = _MESSAGE if isinstance(one, str) else one
            if isinstance(one, str):
                field.type_name = f".{package}.{one}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


MESSAGES = message_classes("v1", _MESSAGES)


def devices(resource: str, *ids: str) -> Any:
    """Return ContainerDevices with a NUMA node, as device plugins report one."""
    numa = MESSAGES["TopologyInfo"](nodes=[MESSAGES["NUMANode"](ID=1)])
    return MESSAGES["ContainerDevices"](resource_name=resource, device_ids=ids, topology=numa)


def container(*held: Any, name: str = "main", claims: Iterable[Any] = ()) -> Any:
    """Return ContainerResources with CPUs and memory beside the devices, as static policies report them."""
    memory = [MESSAGES["ContainerMemory"](memory_type="memory", size=1 << 40)]
    resources = [MESSAGES["DynamicResource"](claim_name="c", claim_namespace="ml", claim_resources=claims)]
    dynamic = resources if claims else []
    return MESSAGES["ContainerResources"](
        name=name, devices=held, cpu_ids=[0, 300], memory=memory, dynamic_resources=dynamic
    )


def claim(*cdi: str, driver: str = "", pool: str = "", device: str = "") -> Any:
    """Return a ClaimResource; kubelets before 1.34 set the CDI names alone."""
    names = [MESSAGES["CDIDevice"](name=name) for name in cdi]
    return MESSAGES["ClaimResource"](cdi_devices=names, driver_name=driver, pool_name=pool, device_name=device)


def pod(name: str, *containers: Any, namespace: str = "ml") -> Any:
    """Return PodResources."""
    return MESSAGES["PodResources"](name=name, namespace=namespace, containers=containers)


class Kubelet:
    """The service; `pods` is what it lists, by namespace and name."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: dict[tuple[str, str], Any] = {}
        self.offered: list[Any] = []
        self.lists = 0
        self.says: Callable[[Any], bytes] | None = None
        """Called with the call's context instead of listing; it may abort."""
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self.start()

    def holds(self, *pods: Any) -> None:
        """List exactly these from now on."""
        with self._lock:
            self.pods = {(each.namespace, each.name): each for each in pods}

    def gives(self, name: str, *ids: str, resource: str = "nvidia.com/gpu", namespace: str = "ml") -> None:
        """Add a pod with one container."""
        given = pod(name, container(devices(resource, *ids)), namespace=namespace)
        with self._lock:
            self.pods[namespace, name] = given

    def drops(self, name: str, namespace: str = "ml") -> None:
        with self._lock:
            del self.pods[namespace, name]

    def start(self) -> None:
        """Listen, on a new socket that replaces the old one as a restarted kubelet's does."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        methods = {"List": self._list, "Get": self._get, "GetAllocatableResources": self._allocatable}
        handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in methods.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def _list(self, request: bytes, context: Any) -> bytes:
        MESSAGES["ListPodResourcesRequest"].FromString(request)
        self.lists += 1
        if self.says is not None:
            return self.says(context)
        with self._lock:
            answer: bytes = MESSAGES["ListPodResourcesResponse"](pod_resources=self.pods.values()).SerializeToString()
        return answer

    def _get(self, request: bytes, context: Any) -> bytes:
        asked = MESSAGES["GetPodResourcesRequest"].FromString(request)
        found = self.pods.get((asked.pod_namespace, asked.pod_name))
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "pod not found")
        answer: bytes = MESSAGES["GetPodResourcesResponse"](pod_resources=found).SerializeToString()
        return answer

    def _allocatable(self, request: bytes, _context: Any) -> bytes:
        MESSAGES["AllocatableResourcesRequest"].FromString(request)
        answer: bytes = MESSAGES["AllocatableResourcesResponse"](devices=self.offered).SerializeToString()
        return answer
