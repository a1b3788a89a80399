"""The few messages of the kubelet's pod-resources service that name GPUs, declared for protobuf: no generated code.

Owns their fields and their translation into plain values. Refuses a message that cannot be decoded, as a whole: half of
a list of owners would make GPUs look unallocated. Fields it does not know are skipped, so newer kubelets are read too.

Source of the numbers: kubernetes/kubelet pkg/apis/podresources/v1/api.proto.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Struct

LIST = "/v1.PodResourcesLister/List"
ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
_FIELDS = {
    # Message: its fields, each with its number and what it is: a text, texts, or messages of that name.
    "ListPodResourcesResponse": {"pods": (1, "PodResources")},
    "AllocatableResourcesResponse": {"devices": (1, "ContainerDevices")},
    "PodResources": {"name": (1, "text"), "namespace": (2, "text"), "containers": (3, "ContainerResources")},
    "ContainerResources": {"devices": (2, "ContainerDevices"), "dynamic": (5, "DynamicResource")},
    "ContainerDevices": {"resource": (1, "text"), "ids": (2, "texts")},
    "DynamicResource": {"claims": (4, "ClaimResource")},
    "ClaimResource": {"cdi": (1, "CDIDevice"), "driver": (2, "text"), "pool": (3, "text"), "device": (4, "text")},
    "CDIDevice": {"name": (1, "text")},
}
_MOST_PODS = 10_000
"""A kubelet's own limit is some hundreds (maxPods)."""


class Devices(Struct, frozen=True):
    """ContainerDevices: ids as the device plugin that offers `resource` made them."""

    resource: str
    ids: tuple[str, ...]


class Claimed(Struct, frozen=True):
    """ClaimResource of a DynamicResource: a device that a DRA driver gave to a claim."""

    cdi: tuple[str, ...] = ()
    """Container Device Interface names, `vendor/class=device`."""
    driver: str = ""
    """Empty from kubelets before 1.34."""
    pool: str = ""
    device: str = ""


class Held(Struct, frozen=True):
    """PodResources: all that a pod's containers hold, init and sidecar containers included."""

    namespace: str
    name: str
    devices: tuple[Devices, ...] = ()
    claims: tuple[Claimed, ...] = ()


def read_list(message: bytes) -> tuple[Held, ...]:
    """Read a ListPodResourcesResponse; raises ValueError for one that cannot be decoded."""
    pods = _decoded("ListPodResourcesResponse", message).pods
    if len(pods) > _MOST_PODS:
        raise ValueError(f"{len(pods)} pods, and no node has so many")
    return tuple(map(_held, pods))


def read_allocatable(message: bytes) -> tuple[Devices, ...]:
    """Read the devices of an AllocatableResourcesResponse; raises ValueError for one that cannot be decoded."""
    return tuple(map(_devices, _decoded("AllocatableResourcesResponse", message).devices))


def _held(pod: Any) -> Held:
    return Held(
        pod.namespace,
        pod.name,
        tuple(_devices(each) for one in pod.containers for each in one.devices),
        tuple(_claimed(claim) for one in pod.containers for dynamic in one.dynamic for claim in dynamic.claims),
    )


def _devices(said: Any) -> Devices:
    return Devices(said.resource, tuple(said.ids))


def _claimed(said: Any) -> Claimed:
    return Claimed(tuple(device.name for device in said.cdi), said.driver, said.pool, said.device)


def _decoded(name: str, message: bytes) -> Any:
    try:
        return _CLASSES[name].FromString(message)
    except DecodeError as err:
        raise ValueError(f"{len(message)} bytes that are no {name}: {err}") from err


def _declared() -> dict[str, Any]:
    """Message classes by name, in a pool of their own: another program's of that name in this process do not clash."""
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind == "text"
            declared = message.field.add(name=field, number=number, label="LABEL_OPTIONAL" if one else "LABEL_REPEATED")
            declared.type = declared.TYPE_STRING if kind in {"text", "texts"} else declared.TYPE_MESSAGE
            if declared.type == declared.TYPE_MESSAGE:
                declared.type_name = f".v1.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"v1.{name}") for name in _FIELDS}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


_CLASSES = _declared()
