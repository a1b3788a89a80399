"""Reads from the kubelet's pod-resources service which pod holds which device, and maps device ids to GPU UUIDs.

Covers the gRPC connection, the messages (podresources.proto) and the device ids of NVIDIA's and GKE's device plugins
and NVIDIA's DRA driver. An ambiguous id is reported as unknown, and a message that cannot be decoded is rejected as a
whole. Loads protobuf: import it only where a kubelet is used.
"""

import asyncio
import errno
import os
import re
import socket
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from exporter.core.model import Device
from exporter.schedulers.base import SchedulerError
from exporter.schedulers.kubernetes import podresources_pb2 as wire
from exporter.schedulers.kubernetes.objects import DeviceAttribute, ResourceSlice, SliceDevice
from exporter.schedulers.procfs import read_uuids

LIST_METHOD = "/v1.PodResourcesLister/List"
ALLOCATABLE_METHOD = "/v1.PodResourcesLister/GetAllocatableResources"
M = TypeVar("M", bound=Message)
_MOST_PODS = 10_000
"""A kubelet's own limit is some hundreds (maxPods)."""


class ContainerDevices(Struct, frozen=True):
    """ContainerDevices: `ids` are made by the device plugin that offers `resource`."""

    resource: str
    ids: tuple[str, ...]
    container: str = ""
    """Which container has them; empty for what is offered to any."""


class ClaimResource(Struct, frozen=True):
    """ClaimResource of a DynamicResource: a device that a DRA driver allocated to a claim."""

    cdi: tuple[str, ...] = ()
    """Container Device Interface names, `vendor/class=device`."""
    driver: str = ""
    """Empty from kubelets before 1.34."""
    pool: str = ""
    device: str = ""
    container: str = ""


class PodResources(Struct, frozen=True):
    """PodResources: the devices of a pod's containers and sidecars; kubelets leave out ordinary init containers."""

    namespace: str
    name: str
    devices: tuple[ContainerDevices, ...] = ()
    claims: tuple[ClaimResource, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The pod's namespace and name."""
        return self.namespace, self.name

    @property
    def containers(self) -> frozenset[str]:
        """Names of the containers that have a device."""
        return frozenset([*(each.container for each in self.devices), *(each.container for each in self.claims)])


def read_list(message: bytes) -> tuple[PodResources, ...]:
    """Decode a ListPodResourcesResponse. Raises ValueError."""
    pods = _decode(wire.ListPodResourcesResponse, message).pod_resources
    if len(pods) > _MOST_PODS:
        raise ValueError(f"{len(pods)} pods, and no node has so many")
    return tuple(map(_pod_resources, pods))


def read_allocatable(message: bytes) -> tuple[ContainerDevices, ...]:
    """Decode the devices of an AllocatableResourcesResponse. Raises ValueError."""
    return tuple(map(_container_devices, _decode(wire.AllocatableResourcesResponse, message).devices))


def _pod_resources(pod: wire.PodResources) -> PodResources:
    dynamic = ((each, container.name) for container in pod.containers for each in container.dynamic_resources)
    return PodResources(
        pod.namespace,
        pod.name,
        tuple(_container_devices(each, container.name) for container in pod.containers for each in container.devices),
        tuple(_claim_resource(claim, container) for each, container in dynamic for claim in each.claim_resources),
    )


def _container_devices(message: wire.ContainerDevices, container: str = "") -> ContainerDevices:
    return ContainerDevices(message.resource_name, tuple(message.device_ids), container)


def _claim_resource(message: wire.ClaimResource, container: str) -> ClaimResource:
    cdi = tuple(device.name for device in message.cdi_devices)
    return ClaimResource(cdi, message.driver_name, message.pool_name, message.device_name, container)


def _decode(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as err:
        raise ValueError(f"{len(message)} bytes that are no {kind.DESCRIPTOR.name}: {err}") from err


T = TypeVar("T")
DEADLINE_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel may get the old one's connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.default_authority", "localhost"),
)
_MOUNT = (
    "mount the host's /var/lib/kubelet/pod-resources, the folder and not the socket, for a restarted kubelet makes a"
    " new one; kubernetes.pod_resources_socket names it"
)


class KubeletError(SchedulerError):
    """The kubelet did not answer; the message has what was tried and how to fix it."""


class Kubelet:
    """Client of the kubelet behind a socket; used on one event loop."""

    def __init__(self, socket_path: str, *, deadline: float = DEADLINE_SECONDS) -> None:
        """Raises KubeletError if grpcio is not installed."""
        self._socket_path, self._deadline, self._grpc = socket_path, deadline, _grpc()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kubelet")
        self._channel: Any = None
        self.connections = 0
        """Connections made so far; a new one may be to a restarted kubelet."""
        self._socket_identity: tuple[int, int, int] | None = None

    async def list_pods(self) -> tuple[PodResources, ...]:
        """Return the devices that each pod of the node holds (List). Raises KubeletError."""
        return self._read(await self._call(LIST_METHOD), read_list)

    async def allocatable(self) -> tuple[ContainerDevices, ...]:
        """Return the devices that device plugins offer to pods (GetAllocatableResources). Raises KubeletError."""
        return self._read(await self._call(ALLOCATABLE_METHOD), read_allocatable)

    def close(self) -> None:
        """Close the connection, aborting a running call."""
        self._disconnect()
        self._executor.shutdown()

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _read(self, message: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(message)
        except ValueError as err:
            raise KubeletError(f"{self._socket_path}: the kubelet's answer cannot be read: {err}") from err

    async def _call(self, method: str) -> bytes:
        self._connect()
        # Blocking, on our own thread: grpc's asynchronous call starts a thread each time, at 2 ms of CPU.
        call = partial(self._channel.unary_unary(method), b"", timeout=self._deadline)
        try:
            answer: bytes = await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except self._grpc.RpcError as err:
            self._disconnect()
            raise KubeletError(self._error_message(method, err)) from err
        return answer

    def _connect(self) -> None:
        """Connect, and reconnect if the socket has been replaced. Raises KubeletError if there is none."""
        try:
            found = Path(self._socket_path).stat()
        except OSError as err:
            raise KubeletError(f"{self._socket_path}: no kubelet there: {err.strerror}: {_MOUNT}") from err
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns)  # inode numbers are reused
        if self._channel is None or self._socket_identity != identity:
            self._disconnect()
            self._socket_identity = identity
            self.connections += 1
            address = f"unix:{Path(self._socket_path).absolute()}"
            self._channel = self._grpc.insecure_channel(address, options=_OPTIONS)

    def _error_message(self, method: str, err: Any) -> str:
        code = self._grpc.StatusCode
        advice = {
            code.UNAVAILABLE: f"is the kubelet running, and this its socket? {_MOUNT}",
            code.DEADLINE_EXCEEDED: "the kubelet is too busy or hangs: look at its log",
            code.UNIMPLEMENTED: "the kubelet is older than 1.20, or its KubeletPodResources feature gate is off",
            code.RESOURCE_EXHAUSTED: "other clients on this node query it too often, or its response is too long",
        }.get(err.code(), "look at the kubelet's log")
        name = method.rpartition("/")[2]
        return f"{self._socket_path}: {name} failed: {err.code().name}: {err.details()}: {advice}"


def _grpc() -> Any:
    try:
        import grpc  # noqa: PLC0415  only nodes of a cluster need it
    except ImportError as err:
        message = f"grpcio is missing ({err}): pip install 'gpu-efficiency-exporter[kubernetes]'"
        raise KubeletError(message) from err
    return grpc


DRIVER = "gpu.nvidia.com"
"""NVIDIA's DRA driver for GPUs; its other driver, compute-domain.nvidia.com, allocates no GPU."""
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = re.compile(rf"GPU-{_UUID}")
_REPLICA = re.compile(r"(.+)::\d+")
_VIRTUAL = re.compile(rf"GPU-{_UUID}-\d+")
_OLD_MIG = re.compile(rf"MIG-(GPU-{_UUID})/(\d+)/\d+")
_GKE = re.compile(r"nvidia(\d+)(?:/gi(\d+))?(?:/vgpu\d+)?")
_CDI = re.compile(rf"(?:k8s\.{re.escape(DRIVER)}|nvidia\.com)/(\w+)=(.+)")
_CLAIM_CDI = re.compile(rf"{_UUID}-(.+)")
_NAMED = re.compile(rf"(gpu|mig)-({_UUID})")
_NUMBERED = re.compile(r"gpu-(\d+)")
DraDevices = Mapping[tuple[str, str], SliceDevice]
"""DRA devices by pool and name."""


def is_virtual(name: str) -> bool:
    """Whether it is a device of HAMi's or Volcano's plugin, which need not be of the GPU in its name."""
    return bool(_VIRTUAL.fullmatch(name))


class UnknownIdError(Exception):
    """A device id that cannot be resolved to a GPU of this node; the message has the reason."""

    def __init__(self, reason: str, candidates: Iterable[str]) -> None:
        """`candidates` are the UUIDs of the GPUs of which it may be one."""
        super().__init__(reason)
        self.candidates = frozenset(candidates)


class ResolvedDevices(Struct, frozen=True):
    """What the device ids and claims of a pod are."""

    uuids: tuple[str, ...]
    """Of its GPUs."""
    unknown: tuple[str, ...] = ()
    """Name and reason of each id or claim that cannot be resolved."""
    candidates: frozenset[str] = frozenset()
    """UUIDs of which any may be one of those."""

    def joined(self, other: "ResolvedDevices") -> "ResolvedDevices":
        """Return these and others of the same pod."""
        uuids = tuple(dict.fromkeys((*self.uuids, *other.uuids)))
        return ResolvedDevices(uuids, self.unknown + other.unknown, self.candidates | other.candidates)


class DeviceResolver:
    """Resolves the kubelet's device ids and claims to GPUs of the source."""

    def __init__(self, devices: Sequence[Device], *, proc: str | Path = "/proc") -> None:
        self._devices = {device.uuid: device for device in devices}
        self._ordinals = {d.index: d.uuid for d in devices if not d.parent}
        self._minors = {f"{n}": uuid for n, uuid in read_uuids(Path(proc)).items() if uuid in self._devices}

    def resolve(self, names: Iterable[str], claims: Iterable[ClaimResource], offered: DraDevices) -> ResolvedDevices:
        """Return the GPUs of a pod, and what of it cannot be resolved."""
        ids = ((f"{name!r}", partial(self.resolve_id, name)) for name in names)
        devices = ((_title(claim), partial(self.resolve_claim, claim, offered)) for claim in claims)
        return _resolve_each((*ids, *devices))

    def resolve_assigned(self, names: Iterable[str], listed: Container[str]) -> ResolvedDevices:
        """Return the GPUs that annotations name, unless pods hold them by ids of their own (`listed`, by UUID)."""
        return _resolve_each((f"{name!r} by its annotation", partial(self._assigned, name, listed)) for name in names)

    def _assigned(self, name: str, listed: Container[str]) -> tuple[str, ...]:
        """Raises UnknownIdError, with any GPU as a candidate where the annotation names none that can be its."""
        board, _, instance = name.removesuffix("]").partition("[")
        if board not in self._devices:
            raise UnknownIdError("no GPU of the source has this UUID", self._devices)
        instances = [uuid for uuid, device in self._devices.items() if device.parent == board]
        if instances and instance not in instances:
            raise UnknownIdError("it does not show which MIG instance", instances)
        uuid = instance if instances else board
        if uuid in listed:
            raise UnknownIdError("the kubelet lists this GPU for another pod", self._devices)
        return (uuid,)

    def resolve_id(self, name: str) -> tuple[str, ...]:
        """Return a device plugin id's UUID, or those of a MIG board's instances. Raises UnknownIdError."""
        replica = _REPLICA.fullmatch(name)
        name = replica[1] if replica else name
        if name in self._devices:
            return self._whole(name)
        if old := _OLD_MIG.fullmatch(name):
            return (self._instance(old[1], old[2]),)
        if gke := _GKE.fullmatch(name):
            board = self._minor(gke[1])
            return (self._instance(board, gke[2]),) if gke[2] else self._whole(board)
        if name in self._ordinals:
            return self._whole(self._ordinals[name])
        raise UnknownIdError("no GPU of the source has this id", self._candidates(name))

    def resolve_claim(self, claim: ClaimResource, offered_devices: DraDevices) -> tuple[str, ...]:
        """Return the UUIDs of a DRA claim's device. Raises UnknownIdError."""
        names = _claim_names(claim)
        offered = next(
            (offered_devices[claim.pool, name] for name in names if (claim.pool, name) in offered_devices), None
        )
        if offered is not None:
            return self._resolve_attributes(offered)
        if not names:
            raise UnknownIdError("the kubelet does not name it", self._devices)
        return self._resolve_name(names[0])

    def _candidates(self, name: str) -> Iterable[str]:
        """Return what an id that no GPU has may stand for: nothing here, if it is the UUID of a GPU elsewhere."""
        if _GPU.fullmatch(name):
            return ()
        return self._devices_of(mig=name.startswith("MIG-"))

    def offered_as(self, resource: str) -> Iterable[str]:
        """Return the UUIDs of the devices of which a device plugin may offer any under this resource name."""
        return self._devices_of(mig="/mig-" in resource)

    def _devices_of(self, *, mig: bool) -> Iterable[str]:
        instances = [uuid for uuid, device in self._devices.items() if device.parent]
        return instances if instances and mig else self._devices

    def _whole(self, uuid: str) -> tuple[str, ...]:
        """A board in MIG mode stands for all its instances: nothing else of it can be held."""
        return tuple(d.uuid for d in self._devices.values() if d.parent == uuid) or (uuid,)

    def _instance(self, board: str, number: str) -> str:
        found = (d.uuid for d in self._devices.values() if d.parent == board and d.index.endswith(f":{number}"))
        uuid = next(found, "")
        if not uuid:
            parts = self._whole(board) if board in self._devices else ()
            raise UnknownIdError(f"{board} has no GPU instance {number} that the source sees", parts)
        return uuid

    def _minor(self, number: str) -> str:
        numbers = self._minors or self._ordinals
        if number not in numbers:
            elsewhere = () if self._minors else self._devices
            raise UnknownIdError(f"no GPU that the source sees has the minor number {number}", elsewhere)
        return numbers[number]

    def _resolve_attributes(self, device: SliceDevice) -> tuple[str, ...]:
        """Resolve by the driver's attributes; a MIG device made on demand has only its board and profile."""
        uuid, parent, profile = (_attribute(device, name) for name in ("uuid", "parentUUID", "profile"))
        if uuid:
            return self.resolve_id(uuid)
        alike = [d.uuid for d in self._devices.values() if parent and (d.parent, d.profile) == (parent, profile)]
        if len(alike) != 1:
            raise UnknownIdError(
                f"its ResourceSlice gives no uuid, and {parent or 'no board'} has {len(alike)} {profile}",
                self._whole(parent) if parent in self._devices else self._devices,
            )
        return (alike[0],)

    def _resolve_name(self, name: str) -> tuple[str, ...]:
        """Resolve by name; its number is the minor since 2025 and was the ordinal before, so both must agree."""
        if named := _NAMED.fullmatch(name):
            return self.resolve_id(f"{named[1].upper()}-{named[2]}")
        numbered = _NUMBERED.fullmatch(name)
        if numbered and numbered[1] in self._ordinals:
            ordinal = self._ordinals[numbered[1]]
            if len(self._ordinals) == 1 or self._minors.get(numbered[1]) == ordinal:
                return self._whole(ordinal)
        reason = "its name alone does not identify the GPU: let the daemon list resourceslices"
        raise UnknownIdError(reason, self._devices)


def _resolve_each(asked: Iterable[tuple[str, Callable[[], tuple[str, ...]]]]) -> ResolvedDevices:
    """Resolve each of these, which have a title for messages."""
    found: dict[str, None] = {}
    errors: list[tuple[str, UnknownIdError]] = []
    for title, resolve in asked:
        try:
            found |= dict.fromkeys(resolve())
        except UnknownIdError as err:
            errors.append((f"{title}: {err}", err))
    return ResolvedDevices(
        tuple(found),
        tuple(message for message, _ in errors),
        frozenset[str]().union(*(err.candidates for _, err in errors)),
    )


def dra_devices(slices: Sequence[ResourceSlice]) -> DraDevices:
    """Return the devices of NVIDIA's driver by pool and name, of each pool's newest generation only."""
    ours = [one.spec for one in slices if one.spec.driver == DRIVER]
    newest: dict[str, int] = {}
    for spec in ours:
        newest[spec.pool.name] = max(spec.pool.generation, newest.get(spec.pool.name, spec.pool.generation))
    valid = (spec for spec in ours if spec.pool.generation == newest[spec.pool.name])
    return {(spec.pool.name, device.name): device for spec in valid for device in spec.devices or ()}


def is_gpu(claim: ClaimResource) -> bool:
    """Whether the claim's device is a GPU of NVIDIA's driver; older kubelets report only its CDI name."""
    return claim.driver == DRIVER or (not claim.driver and any(map(_CDI.fullmatch, claim.cdi)))


def _title(claim: ClaimResource) -> str:
    return f"{claim.device or ' '.join(claim.cdi)!r} of DRA pool {claim.pool!r}"


def _claim_names(claim: ClaimResource) -> list[str]:
    """Return the device's possible names: the kubelet's, else the CDI name's end after the claim's UID."""
    if claim.device:
        return [claim.device]
    names = [found[2] for found in map(_CDI.fullmatch, claim.cdi) if found]
    return [of_claim[1] if (of_claim := _CLAIM_CDI.fullmatch(name)) else name for name in names]


def _attribute(device: SliceDevice, name: str) -> str:
    given = device.attributes or (device.basic.attributes if device.basic else None) or {}
    found = given.get(name) or given.get(f"{DRIVER}/{name}") or DeviceAttribute()
    return found.string or ""


def try_kubelet(path: str) -> tuple[int, int]:
    """Return how many pods the kubelet lists and how many devices they hold. Raises SchedulerError."""
    _probe_socket(path)
    return asyncio.run(_list_once(path))


def _probe_socket(path: str) -> None:
    """Connect without grpc first, which reports "unavailable" for a socket without permission."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except PermissionError as err:
            raise SchedulerError(
                f"{path}: permission denied for uid {os.geteuid()}: the kubelet's socket is root's: run as root (no"
                " capability is needed), or give the socket a group"
            ) from err
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise SchedulerError(f"{path}: cannot be connected to: {err.strerror or err}") from err


async def _list_once(path: str) -> tuple[int, int]:
    kubelet = Kubelet(path)
    try:
        pods = await kubelet.list_pods()
    finally:
        kubelet.close()
    return len(pods), sum(len(devices.ids) for one in pods for devices in one.devices)
