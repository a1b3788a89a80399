"""The GPUs that HAMi's or Volcano's scheduler gave a pod, by the annotations that it writes on the pod.

Their device plugins offer each GPU as several devices. Of these the kubelet picks any, so its ids do not show the GPU:
the plugin gives the pod what the annotation names. Users may write annotations on their own pods, hence the limits:
as many GPUs as the kubelet lists devices for the pod, as they were when they were first read.

Sources: Project-HAMi/HAMi, docs/develop/protocol.md ("Schedule Decision"), docs/develop/initContainer-design.md,
pkg/device/devices.go (EncodePodSingleDevice), pkg/device/nvidia/mig_allocations.go, pkg/util/types.go;
Project-HAMi/volcano-vgpu-device-plugin, pkg/plugin/vgpu/plugin.go (Allocate) and util/util.go (EncodePodDevices);
volcano-sh/volcano, pkg/scheduler/api/devices/nvidia/vgpu/type.go and mig.go. Entries without a device (",,0,0:") are
from HAMi's issue 991.
"""

import re
from collections.abc import Container, Sequence

import msgspec
from msgspec import Struct

from exporter.schedulers.kubernetes.api import UNREADABLE
from exporter.schedulers.kubernetes.kubelet import ContainerDevices, is_virtual
from exporter.schedulers.kubernetes.objects import Pod
from exporter.schedulers.kubernetes.requests import requested_gpus

_MOST_CHARACTERS = 16_384
"""Of an annotation; a pod with 16 containers of 16 GPUs each has about 15,000."""
_FIELDS = 4
"""UUID, type, MiB of memory, percent of the cores."""
_NAME = re.compile(r"GPU-[0-9a-fA-F-]{36}(?:\[[\w.-]{1,64}\])?", re.ASCII)


class Annotations(Struct, frozen=True):
    """Names of the annotations of a scheduler."""

    gpus: str
    phase: str
    """`success` once the device plugin has given the pod its GPUs."""
    mig: str = ""
    """MIG instances on these GPUs, as JSON."""


_HAMI = Annotations("hami.io/vgpu-devices-allocated", "hami.io/bind-phase", "hami.io/vgpu-mig-allocations")
_VOLCANO = Annotations("volcano.sh/vgpu-ids-new", "volcano.sh/bind-phase")


class MigAllocation(Struct, frozen=True):
    """An entry of HAMi's annotation of MIG instances, from version 2.10 on."""

    container: int = msgspec.field(name="containerIndex")
    """Init containers first."""
    device: int = msgspec.field(name="deviceIndex")
    gpu: str = msgspec.field(name="gpuUUID")
    instance: str = msgspec.field(name="migUUID", default="")


class Assignment(Struct, frozen=True):
    """UUIDs of GPUs; of a MIG instance `GPU-...[MIG-...]`, or its place in a template, `GPU-...[0-1]`."""

    gpus: tuple[str, ...] = ()
    """Of containers and sidecars."""
    init: tuple[str, ...] = ()
    """Of ordinary init containers, which have them until all of these have ended."""


class Assigned(Struct, frozen=True):
    """What is known of a pod now."""

    gpus: tuple[str, ...] = ()
    problem: str = ""
    """What of its annotations is not believed, and why."""


class Assignments:
    """The assignments of the pods of this node, each as it was when it was first read."""

    def __init__(self, resources: tuple[str, ...]) -> None:
        """`resources` are patterns of the resource names of GPUs."""
        self._resources = resources
        self._first: dict[str, Assignment] = {}
        """By uid."""

    def of(self, pod: Pod, devices: Sequence[ContainerDevices]) -> Assigned:
        """Return the GPUs of a pod for which the kubelet lists these devices; none if no device is virtual."""
        virtual = [each.resource for each in devices for name in each.ids if is_virtual(name)]
        if not virtual:
            return Assigned()
        names = _VOLCANO if virtual[0].startswith("volcano.sh/") else _HAMI
        first = self._first.get(pod.metadata.uid)
        try:
            now = self._read(pod, names, count=len(virtual))
            problem = "" if first in (None, now) else "it has been changed, and what it said at first counts"
        except ValueError as err:
            now, problem = None, f"{err}"
        problem = f"annotation {names.gpus}: {problem}" if problem else ""
        first = first or now
        if first is None:
            return Assigned(problem=problem)
        self._first[pod.metadata.uid] = first
        return Assigned(first.gpus + (() if _is_initialized(pod) else first.init), problem)

    def keep(self, uids: Container[str]) -> None:
        """Forget all other pods."""
        self._first = {uid: first for uid, first in self._first.items() if uid in uids}

    def _read(self, pod: Pod, names: Annotations, *, count: int) -> Assignment:
        """Raises ValueError."""
        annotations = pod.metadata.annotations or {}
        if annotations.get(names.phase) != "success":
            raise ValueError(f"{names.phase} is not success")
        by_container = _decode(annotations.get(names.gpus, ""), annotations.get(names.mig, ""))
        init = pod.spec.init_containers or ()
        if len(by_container) != len(init) + len(pod.spec.containers or ()):
            init = ()  # HAMi before it counted them, and Volcano
        ordinary = {index: each for index, each in enumerate(init) if each.restart_policy != "Always"}
        gpus = tuple(gpu for index, given in enumerate(by_container) for gpu in given if index not in ordinary)
        of_init = tuple(gpu for index in ordinary for gpu in by_container[index])
        if len(gpus) != count:
            raise ValueError(f"it names {len(gpus)} GPUs, and the kubelet lists {count} devices")
        most = sum(sum(requested_gpus(each, self._resources).values()) for each in ordinary.values())
        if len(of_init) > most:
            raise ValueError(f"it names {len(of_init)} GPUs of init containers, which request {most}")
        return Assignment(gpus, of_init)


def is_allocating(pod: Pod) -> bool:
    """Whether a device plugin is about to give it the GPUs that its annotations name."""
    annotations = pod.metadata.annotations or {}
    return "allocating" in (annotations.get(_HAMI.phase), annotations.get(_VOLCANO.phase))


def _is_initialized(pod: Pod) -> bool:
    condition = pod.condition("Initialized")
    return condition is not None and condition.status == "True"


def _decode(text: str, mig: str) -> list[list[str]]:
    """Return the GPUs of each container, as in `Assignment`. Raises ValueError."""
    if max(len(text), len(mig)) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
    instances = _decode_instances(mig)
    containers = [_decode_container(part) for part in text.removesuffix(";").split(";")]
    named = [
        [instances.get((container, device, gpu), gpu) for device, gpu in enumerate(gpus)]
        for container, gpus in enumerate(containers)
    ]
    if not all(_NAME.fullmatch(gpu) for gpus in named for gpu in gpus):
        raise ValueError("a device is not named by a GPU's UUID")
    return named


def _decode_container(text: str) -> list[str]:
    devices = [device.split(",") for device in text.split(":") if device]
    if any(len(fields) < _FIELDS for fields in devices):
        raise ValueError(f"a device has fewer than {_FIELDS} fields")
    return [fields[0] for fields in devices if fields[0]]


def _decode_instances(text: str) -> dict[tuple[int, int, str], str]:
    """Return GPUs with their MIG instance, by container, device and GPU. Raises ValueError."""
    try:
        found = msgspec.json.decode(text or "[]", type=list[MigAllocation])
    except UNREADABLE as err:
        raise ValueError(f"{_HAMI.mig} cannot be read: {err}") from err
    return {(one.container, one.device, one.gpu): f"{one.gpu}[{one.instance}]" for one in found if one.instance}
