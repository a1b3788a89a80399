"""Tracks the boards that the driver lists, and the MIG instances of each board.

A board that was listed stays, with a condition if it cannot work. Each GPU instance is a device weighted by its slices;
the weights of instances and unpartitioned remainder add up to exactly one GPU. A board whose layout is unknown is
unobserved. An instance that NVML hides from this process counts as not created: run with NVIDIA_VISIBLE_DEVICES=all.
"""

import re
from collections.abc import Iterator, Mapping
from ctypes import addressof, byref, c_uint
from typing import Any, NamedTuple

from msgspec.structs import replace

from exporter.core.model import PPM, SECOND, Device, Fault, Spec
from exporter.sources.base import NVLINK_SIGNALS, UNKNOWN_PREFIX, SourceError, instance_device, mig_weights
from exporter.sources.nvml import calls
from exporter.sources.nvml.calls import (
    MIG,
    GpmProbe,
    NvmlBoard,
    NvmlCalls,
    NvmlUnit,
    driver_gone,
)
from exporter.sources.nvml.gpm import free_samples
from exporter.specs import find_spec, mig_instance_spec, unknown_model

_CORES = {(8, 0): 64, (9, 0): 128, (10, 0): 128, (10, 3): 128, (12, 0): 128}
"""CUDA cores per multiprocessor by compute capability, for boards with MIG (CUDA C++ Programming Guide)."""
LAYOUT_INTERVAL = 10 * SECOND
"""Interval of reads of a whole layout, because a new instance may have the UUID of a former one."""
_MAX_PROFILE_KINDS = 64
"""Maximum number of profile ids to try; NVML has 18 today and reports the end of the list."""
_COMPUTE_PART = re.compile(r"^\d+c\.")
"""The compute instance's part of a name such as "1c.3g.40gb"; the rest is the GPU instance profile."""


class MigProfile(NamedTuple):
    """A GPU instance profile as NVML describes it."""

    id: int
    name: str
    slices: int
    multiprocessors: int
    megabytes: int
    max_instances: int
    """Number of instances that fit on the board."""
    peer_to_peer: bool
    """True if peer-to-peer works, so that it has NVLink."""


class MigCapacity(NamedTuple):
    """The resources of a board that its instances share; constant while the board is in MIG mode."""

    profiles: tuple[MigProfile, ...]
    slices: int
    """Compute slices: 7 on most boards, 4 on an A30."""
    multiprocessors: float
    """0: unknown."""
    megabytes: int
    """0: unknown."""


class MigInstance(NamedTuple):
    """A GPU instance that has a compute instance."""

    uuid: str
    instance_id: int
    device_indices: tuple[int, ...]
    profile: str
    slices: int
    spec: Spec | None
    peer_to_peer: bool


class MigTracker:
    """Updates the units of boards from their MIG mode and layout."""

    def __init__(self, calls: NvmlCalls, gpms: tuple[GpmProbe, GpmProbe], overrides: Mapping[str, Spec]) -> None:
        self._calls, self._nvml, self._overrides = calls, calls.nvml, overrides
        self._whole_gpm, self._gpm = gpms
        self._capacities: dict[str, MigCapacity] = {}

    def update(self, board: NvmlBoard, now: int) -> bool:
        """Update the board's units, with two calls per instance; return False if its mode or layout is unknown.

        Raises NVMLError if the board is lost or its handle stale.
        """
        fields = self._calls.call(board.own, MIG)
        default = board.mig if board.own.calls[MIG] else False  # failed: unchanged; unsupported: no MIG
        mode = bool(fields[MIG]) if MIG in fields else default
        if mode is None:
            return False
        if board.mig is None and not mode:
            board.mig = False  # its probes are already those without MIG
        elif mode != board.mig:
            self._switch(board, on=mode)
        return not mode or self._update_instances(board, now)

    def _switch(self, board: NvmlBoard, *, on: bool) -> None:
        """Switch to the other mode, with new baselines and without instances."""
        for unit in board.units():
            free_samples(self._nvml, unit)
        board.mig, board.layout, board.instances = on, None, {}
        self._capacities.pop(board.own.device.uuid, None)
        gpm = self._whole_gpm if board.gpm else None
        board.own.set_probes(calls.unpartitioned_probes(self._nvml) if on else calls.board_probes(self._nvml, gpm))
        board.own.device = replace(board.own.device, weight=PPM, stranded=False)
        board.reset()

    def _update_instances(self, board: NvmlBoard, now: int) -> bool:
        try:
            found = self._list_devices(board)
            layout = tuple(uuid for uuid, _ in found)
            if layout != board.layout or now - board.layout_read_at >= LAYOUT_INTERVAL:
                self._set_layout(board, found)
                board.layout, board.layout_read_at = layout, now
        except self._nvml.NVMLError as error:
            if self._calls.is_lost(board.own, error):
                raise
            message = f"is in MIG mode and its layout is not known: {error} (error {error.value}): it is unobserved"
            self._calls.device_fault(board.own, "mig_layout", message)
            return False
        for unit in board.instances.values():
            unit.handles = tuple(found[device_index][1] for device_index in board.device_indices[unit.device.uuid])
            unit.handle = unit.handles[0]
        return True

    def _list_devices(self, board: NvmlBoard) -> list[tuple[str, Any]]:
        """Return UUID and handle of each MIG device; read each time, as a handle may come to mean another device."""
        nvml, found = self._nvml, []
        if board.layout is None:
            board.max_devices = nvml.nvmlDeviceGetMaxMigDeviceCount(board.own.handle)
        for index in range(board.max_devices):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board.own.handle, index)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    raise
                continue  # the indices may have holes
            found.append((nvml.nvmlDeviceGetUUID(handle), handle))
        return found

    def _set_layout(self, board: NvmlBoard, found: list[tuple[str, Any]]) -> None:
        capacity = self._capacities.get(board.own.device.uuid) or self._read_capacity(board)
        self._capacities[board.own.device.uuid] = capacity
        instances = sorted(self._instances(board, capacity, found), key=lambda instance: instance.instance_id)
        slices = [instance.slices for instance in instances]
        weights = mig_weights(slices, max(capacity.slices, sum(slices)))
        left = PPM - sum(weights)
        stranded = left > 0 and self._stranded(board, capacity, len(instances))
        units = {
            instance.uuid: self._unit(board, instance, weight)
            for instance, weight in zip(instances, weights, strict=True)
        }
        if list(units.values()) != list(board.instances.values()):
            self._replace_instances(board, units)
        board.device_indices = {instance.uuid: instance.device_indices for instance in instances}
        board.own.device = replace(board.own.device, weight=left, stranded=stranded)

    def _replace_instances(self, board: NvmlBoard, units: dict[str, NvmlUnit]) -> None:
        for unit in board.instances.values():
            if unit not in units.values():
                free_samples(self._nvml, unit)
        board.instances = units
        board.own.read_at = None  # the unpartitioned part may have been an instance until now
        board.health_fields = None  # a board with instances supports different health fields

    def _unit(self, board: NvmlBoard, instance: MigInstance, weight: int) -> NvmlUnit:
        own = board.own.device
        device = instance_device(
            own,
            instance.instance_id,
            uuid=instance.uuid,
            profile=instance.profile,
            weight=weight,
            spec=instance.spec,
            lacks=() if instance.peer_to_peer else NVLINK_SIGNALS,
        )
        unit = board.instances.get(instance.uuid)
        if unit is None or (unit.instance_id, unit.device.profile) != (instance.instance_id, instance.profile):
            unit = NvmlUnit(device, calls.instance_probes(self._nvml, self._gpm if board.gpm else None))
            unit.board, unit.instance_id = board.own, instance.instance_id
        unit.device = device
        return unit

    # -- what NVML reports of the instances, read when the layout changes --

    def _instances(
        self, board: NvmlBoard, capacity: MigCapacity, found: list[tuple[str, Any]]
    ) -> Iterator[MigInstance]:
        """Yield the GPU instances, to which the counters belong; NVML lists MIG devices, one per compute instance."""
        members: dict[int, list[int]] = {}
        for device_index, (_, handle) in enumerate(found):
            members.setdefault(self._nvml.nvmlDeviceGetGpuInstanceId(handle), []).append(device_index)
        for instance_id, device_indices in members.items():
            uuid, handle = found[device_indices[0]]
            attributes, name = self._nvml.nvmlDeviceGetAttributes_v2(handle), self._nvml.nvmlDeviceGetName(handle)
            profile = _COMPUTE_PART.sub("", name.partition(" MIG ")[2])
            known = _find_profile(capacity, profile, attributes)
            # The attributes count a compute instance's multiprocessors, which may be fewer than the GPU instance's.
            entire = attributes.computeInstanceSliceCount == attributes.gpuInstanceSliceCount
            multiprocessors = known.multiprocessors if known else attributes.multiprocessorCount if entire else 0
            yield MigInstance(
                uuid=uuid if len(device_indices) == 1 else f"{board.own.device.uuid}/{instance_id}",
                instance_id=instance_id,
                device_indices=tuple(device_indices),
                profile=profile,
                slices=attributes.gpuInstanceSliceCount,
                spec=self._overrides.get(name)
                or _instance_spec(board, capacity, multiprocessors, attributes.memorySizeMB),
                peer_to_peer=known is None or known.peer_to_peer,
            )

    def _read_capacity(self, board: NvmlBoard) -> MigCapacity:
        found = tuple(self._profiles(board.own.handle))
        slices = max((each.slices for each in found), default=board.max_devices)
        most = max((each.multiprocessors for each in found), default=0)
        megabytes = max((each.megabytes for each in found), default=0)
        return MigCapacity(found, slices or 1, self._multiprocessors(board.own.handle) or most, megabytes)

    def _profiles(self, handle: Any) -> Iterator[MigProfile]:
        """Yield the board's profiles; ids are tried until NVML reports that there are no more (NVML doc)."""
        for kind in range(_MAX_PROFILE_KINDS):
            try:
                info = self._info(handle, kind)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                    continue
                if error.value in (self._nvml.NVML_ERROR_INVALID_ARGUMENT, self._nvml.NVML_ERROR_NO_PERMISSION):
                    return
                raise
            name = getattr(info, "name", "").removeprefix("MIG ")
            counts = info.sliceCount, info.multiprocessorCount, info.memorySizeMB, info.instanceCount
            yield MigProfile(info.id, name, *counts, peer_to_peer=bool(info.isP2pSupported))

    def _info(self, handle: Any, kind: int) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind, version=1)  # drivers before 515: no name

    def _multiprocessors(self, handle: Any) -> float:
        """Return the board's own count, as an A100's largest profile has 98 of 108; 0: unknown."""
        try:
            capability = tuple(self._nvml.nvmlDeviceGetCudaComputeCapability(handle))
            return float(self._nvml.nvmlDeviceGetNumGpuCores(handle) / _CORES[capability])
        except (self._nvml.NVMLError, KeyError):
            return 0.0

    def _stranded(self, board: NvmlBoard, capacity: MigCapacity, instances: int) -> bool:
        """Return whether no profile fits into the remainder; False if a call fails, as they need privileges (NVML doc).

        An instance without a compute instance also takes up room, but its slices can be used.
        """
        nvml, handle, created = self._nvml, board.own.handle, 0
        try:
            for profile in capacity.profiles:
                if nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile.id):
                    return False
                found = c_uint(profile.max_instances)
                room = (nvml.c_nvmlGpuInstance_t * profile.max_instances)()
                nvml.nvmlDeviceGetGpuInstances(handle, profile.id, room, byref(found))
                created += found.value
        except nvml.NVMLError:
            return False
        return bool(capacity.profiles) and created == instances


def _find_profile(capacity: MigCapacity, name: str, attributes: Any) -> MigProfile | None:
    """Find the instance's profile by name if the driver reports names, else by size."""
    size = (attributes.gpuInstanceSliceCount, attributes.memorySizeMB)
    named = (each for each in capacity.profiles if name and each.name == name)
    sized = (each for each in capacity.profiles if (each.slices, each.megabytes) == size)
    return next(named, None) or next(sized, None)


def _instance_spec(board: NvmlBoard, capacity: MigCapacity, multiprocessors: int, megabytes: int) -> Spec | None:
    """Scale the board's spec by multiprocessors and memory; None if a share is unknown."""
    if board.spec is None or not (multiprocessors and capacity.multiprocessors and megabytes and capacity.megabytes):
        return None
    compute, memory = multiprocessors / capacity.multiprocessors, megabytes / capacity.megabytes
    return mig_instance_spec(board.spec, compute=min(1.0, compute), memory=min(1.0, memory))


class NvmlInventory:
    """Adds boards and marks lost ones; `boards` is by UUID, in the order in which they were listed."""

    def __init__(self, calls: NvmlCalls, gpm: GpmProbe, overrides: Mapping[str, Spec]) -> None:
        self._calls, self._nvml, self._gpm, self._overrides = calls, calls.nvml, gpm, overrides
        self.boards: dict[str, NvmlBoard] = {}
        self._count = -1
        self.changed = False
        """True if a board has a new handle, which must be registered for events again."""
        self._hidden = False
        """True if some GPU is not visible to this process."""

    def refresh(self) -> None:
        """List the boards again if their number changed or handles are missing.

        Raises SourceError if the driver is gone.
        """
        count = self._read_count()
        incomplete = self._hidden or any(board.own.handle is None for board in self.boards.values())
        if count != self._count or incomplete:
            self._read_list(count)

    def set_unavailable(self, board: NvmlBoard, condition: str, reason: str) -> None:
        """Mark a board that cannot work with its condition, and drop its handle."""
        self.drop_handle(board)
        board.set_condition(condition)
        message = f"is {condition}: {reason}: find its Xid in dmesg, then reset or drain it"
        self._calls.device_fault(board.own, f"gpu_{condition}", message)

    def drop_handle(self, board: NvmlBoard) -> None:
        """Drop a handle that can no longer be used, and the baselines measured with it."""
        board.own.handle = None
        board.reset()

    def _read_count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise driver_gone(error, "asked for the number of GPUs") from error

    def _read_list(self, count: int) -> None:
        self._count, self._hidden = count, False
        before = {uuid: board.own.handle for uuid, board in self.boards.items()}
        for board in self.boards.values():
            board.own.handle = None
        for index in range(count):
            try:
                self._update_board(index, before)
            except self._nvml.NVMLError as error:
                self._unreachable(index, error)
        for board in self.boards.values():
            if board.own.handle is None and board.own.device.condition not in ("lost", "reset_required"):
                self.set_unavailable(board, "missing", "it is no longer in the driver's list")

    def _update_board(self, index: int, before: Mapping[str, Any]) -> None:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        if uuid not in self.boards:
            self.boards[uuid] = self._new_board(handle, uuid)
        board = self.boards[uuid]
        self._set_handle(board, handle, before.get(uuid))
        if board.own.device.index != str(index):
            board.own.device = replace(board.own.device, index=str(index))
            board.layout = None  # the instances' indices contain the board's
        if board.own.device.condition != "recovery":
            board.set_condition("")
        self.boards.pop(_placeholder_uuid(index), None)

    def _set_handle(self, board: NvmlBoard, handle: Any, before: Any) -> None:
        """Set the handle. If NVML returns the same one after it was dropped, INVALID_ARGUMENT does not mean stale."""
        own, address = board.own, addressof(handle.contents)
        other = address != own.address
        own.handle, own.address = handle, address
        if other or before is None:
            own.doubtful = other
            self.changed = True
        if other:
            board.reset()

    def _new_board(self, handle: Any, uuid: str) -> NvmlBoard:
        model = self._nvml.nvmlDeviceGetName(handle)
        spec = self._spec(handle, model)
        if spec is None:
            self._calls.add_fault(unknown_model(uuid, model))
        links, gpm = self._links(handle), self._has_gpm(handle)
        lacks = NVLINK_SIGNALS if links == 0 else ()
        unit = NvmlUnit(Device(uuid=uuid, model=model, spec=spec, lacks=lacks), {})
        unit.set_probes(calls.board_probes(self._nvml, self._gpm if gpm else None))
        return NvmlBoard(unit, spec=spec, gpm=gpm, links=links or 0)

    def _spec(self, handle: Any, model: str) -> Spec | None:
        """Return the board's spec; for a vGPU only an override, because a guest has the PCI id of the whole board."""
        nvml = self._nvml
        if self._optional(nvml.nvmlDeviceGetVirtualizationMode, handle) == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
            return self._overrides.get(model)
        pci = self._optional(nvml.nvmlDeviceGetPciInfo, handle)
        return find_spec(model, None if pci is None else f"{pci.pciDeviceId:08x}", overrides=self._overrides)

    def _optional(self, call: Any, handle: Any) -> Any:
        """Return the result of an optional call; None if it failed."""
        try:
            return call(handle)
        except self._nvml.NVMLError as error:
            if self._calls.is_final(error):
                raise
            return None

    def _has_gpm(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except self._nvml.NVMLError as error:
            return not self._calls.is_declined(error)  # any other error: the first read reports it

    def _links(self, handle: Any) -> int | None:
        """Return the number of links; 0: none is up; None: unknown. INVALID_ARGUMENT marks the end of the list."""
        states: list[int] = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(self._nvml.nvmlDeviceGetNvLinkState(handle, link))
            except self._nvml.NVMLError as error:
                if not self._calls.is_declined(error) and not self._calls.is_stale(error):
                    return len(states) or None
                break
        return len(states) if any(states) else 0

    def _unreachable(self, index: int, error: Any) -> None:
        """Record a GPU without a handle; one off the bus often has the error UNKNOWN here, not GPU_IS_LOST."""
        self._calls.raise_if_fatal(error, "read the GPUs")
        if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
            message = f"NVML: GPU {index} is not visible to this process (no permission): it is left out"
            self._hidden = True
            self._calls.add_fault(Fault("nvml_no_permission", message))
            return
        same = (b for b in self.boards.values() if b.own.handle is None and b.own.device.index == str(index))
        placeholder = NvmlUnit(Device(uuid=_placeholder_uuid(index), index=str(index)), {})
        board = next(same, None) or NvmlBoard(placeholder, spec=None, gpm=False, links=0)
        self.boards[board.own.device.uuid] = board
        self.set_unavailable(board, self._calls.lost_condition(error) or "lost", str(error))


def require_visible(boards: Mapping[str, NvmlBoard]) -> None:
    """Raise SourceError if there is no GPU."""
    if not boards:
        raise SourceError("NVML: the driver lists no GPU that this process may see: try `nvidia-smi -L`")


def _placeholder_uuid(index: int) -> str:
    """Return the placeholder UUID of a GPU whose own cannot be read."""
    return f"{UNKNOWN_PREFIX}{index}"
