"""MIG: which instances a board is cut into, and which share of it each one is.

Owns the layout: one Device for each GPU instance with a compute instance in it, the rest of the board beside them,
together exactly one GPU. Refuses to guess: a board that does not say how it is cut is unobserved until it does.

An instance that NVML hides from this process (a container is shown its own) counts as not cut out: the daemon must
see all MIG devices of the node, as NVIDIA_VISIBLE_DEVICES=all gives them.
"""

import re
from collections.abc import Iterator, Mapping
from ctypes import byref, c_uint
from typing import Any, NamedTuple

from msgspec.structs import replace

from exporter.core.model import PPM, SECOND, Device, Spec
from exporter.sources import shares
from exporter.sources.nvml import probes
from exporter.sources.nvml.asking import Asking
from exporter.sources.nvml.gpm import Gpm, free
from exporter.sources.nvml.units import MIG, NVLINK, Board, Unit
from exporter.specs import sliced

_CORES = {(8, 0): 64, (9, 0): 128, (10, 0): 128, (10, 3): 128, (12, 0): 128}
"""CUDA cores of a multiprocessor by compute capability, of the boards that have MIG (CUDA C++ Programming Guide)."""
LAID_OUT_EVERY = 10 * SECOND
"""An instance that was made anew at the place of another may have its UUID: all is asked again that often."""
_KINDS = 64
"""Kinds of profile to try at most; NVML knows 18 today and says when there are no more."""
_COMPUTE_PART = re.compile(r"^\d+c\.")
"""What names the compute instance in "1c.3g.40gb"; the rest names its GPU instance."""


class Profile(NamedTuple):
    """A GPU instance profile as NVML describes it."""

    id: int
    name: str
    slices: int
    multiprocessors: int
    megabytes: int
    most: int
    """Instances of it that fit."""
    peers: bool
    """Peer-to-peer works, so it has links."""


class Whole(NamedTuple):
    """What instances are shares of; it does not change while the board is in MIG mode."""

    profiles: tuple[Profile, ...]
    slices: int
    """Of compute: 7 on most boards, 4 on an A30."""
    multiprocessors: float
    """0: not known."""
    megabytes: int
    """0: not known."""


class Cut(NamedTuple):
    """A GPU instance that has a compute instance."""

    uuid: str
    gi: int
    places: tuple[int, ...]
    profile: str
    slices: int
    spec: Spec | None
    peers: bool


class Mig:
    """Keeps boards' units in step with their MIG mode and layout."""

    def __init__(self, asking: Asking, gpms: tuple[Gpm, Gpm], overrides: Mapping[str, Spec]) -> None:
        self._asking, self._nvml, self._overrides = asking, asking.nvml, overrides
        self._whole_gpm, self._gpm = gpms
        self._wholes: dict[str, Whole] = {}

    def follow(self, board: Board, now: int) -> bool:
        """Bring the board's units up to date, at the price of two calls an instance; False: that could not be learnt.

        Raises NVMLError when the board is lost or its handle stale.
        """
        told = self._asking.ask(board.own, MIG)
        unsaid = board.mig if board.own.calls[MIG] else False  # a call that failed is no news, a declined one is
        mode = bool(told[MIG]) if MIG in told else unsaid
        if mode is None:
            return False
        if board.mig is None and not mode:
            board.mig = False  # as which it was introduced
        elif mode != board.mig:
            self._switch(board, on=mode)
        return not mode or self._follow_instances(board, now)

    def _switch(self, board: Board, *, on: bool) -> None:
        """Begin anew in the other mode, without instances."""
        for unit in board.units():
            free(self._nvml, unit)
        board.mig, board.layout, board.instances = on, None, {}
        self._wholes.pop(board.own.device.uuid, None)
        gpm = self._whole_gpm if board.gpm else None
        board.own.adopt(probes.rest(self._nvml) if on else probes.board(self._nvml, gpm))
        board.own.device = replace(board.own.device, weight=PPM, stranded=False)
        board.forget()

    def _follow_instances(self, board: Board, now: int) -> bool:
        try:
            found = self._listed(board)
            layout = tuple(uuid for uuid, _ in found)
            if layout != board.layout or now - board.laid_out_at >= LAID_OUT_EVERY:
                self._lay_out(board, found)
                board.layout, board.laid_out_at = layout, now
        except self._nvml.NVMLError as error:
            if self._asking.lost(board.own, error):
                raise
            said = f"is in MIG mode and does not say how it is cut up: {error} (error {error.value}): it is unobserved"
            self._asking.fault(board.own, "mig_layout", said)
            return False
        for unit in board.instances.values():
            unit.handles = tuple(found[place][1] for place in board.places[unit.device.uuid])
            unit.handle = unit.handles[0]
        return True

    def _listed(self, board: Board) -> list[tuple[str, Any]]:
        """Give UUID and handle of each MIG device. A handle may have come to mean another device: ask each time."""
        nvml, found = self._nvml, []
        if board.layout is None:
            board.places_at_most = nvml.nvmlDeviceGetMaxMigDeviceCount(board.own.handle)
        for index in range(board.places_at_most):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board.own.handle, index)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    raise
                continue  # the indices may have holes
            found.append((nvml.nvmlDeviceGetUUID(handle), handle))
        return found

    def _lay_out(self, board: Board, found: list[tuple[str, Any]]) -> None:
        whole = self._wholes.get(board.own.device.uuid) or self._learn(board)
        self._wholes[board.own.device.uuid] = whole
        cuts = sorted(self._cuts(board, whole, found), key=lambda cut: cut.gi)
        slices = [cut.slices for cut in cuts]
        weights = shares(slices, max(whole.slices, sum(slices)))
        left = PPM - sum(weights)
        stranded = left > 0 and self._stranded(board, whole, len(cuts))
        units = {cut.uuid: self._unit(board, cut, weight) for cut, weight in zip(cuts, weights, strict=True)}
        if list(units.values()) != list(board.instances.values()):
            self._replace(board, units)
        board.places = {cut.uuid: cut.places for cut in cuts}
        board.own.device = replace(board.own.device, weight=left, stranded=stranded)

    def _replace(self, board: Board, units: dict[str, Unit]) -> None:
        for unit in board.instances.values():
            if unit not in units.values():
                free(self._nvml, unit)
        board.instances = units
        board.own.since = None  # what is now left may have been an instance's until just now
        board.wanted = None  # nor is the same told of a board with instances and one without

    def _unit(self, board: Board, cut: Cut, weight: int) -> Unit:
        own = board.own.device
        device = Device(
            uuid=cut.uuid,
            index=f"{own.index}:{cut.gi}",
            model=own.model,
            spec=cut.spec,
            lacks=() if cut.peers else NVLINK,
            condition=own.condition,
            weight=weight,
            parent=own.uuid,
            profile=cut.profile,
        )
        unit = board.instances.get(cut.uuid)
        if unit is None or (unit.gi, unit.device.profile) != (cut.gi, cut.profile):
            unit = Unit(device, probes.instance(self._nvml, self._gpm if board.gpm else None))
            unit.board, unit.gi = board.own, cut.gi
        unit.device = device
        return unit

    # -- what NVML says of the instances, asked when the layout changes --

    def _cuts(self, board: Board, whole: Whole, found: list[tuple[str, Any]]) -> Iterator[Cut]:
        """Join the MIG devices, one a compute instance, into GPU instances, which is what the counters are of."""
        members: dict[int, list[int]] = {}
        for place, (_, handle) in enumerate(found):
            members.setdefault(self._nvml.nvmlDeviceGetGpuInstanceId(handle), []).append(place)
        for gi, places in members.items():
            uuid, handle = found[places[0]]
            name = uuid if len(places) == 1 else f"{board.own.device.uuid}/{gi}"
            yield self._cut(board, whole, handle, gi=gi, uuid=name, places=tuple(places))

    def _cut(self, board: Board, whole: Whole, handle: Any, *, gi: int, uuid: str, places: tuple[int, ...]) -> Cut:
        said = self._nvml.nvmlDeviceGetAttributes_v2(handle)
        name = self._nvml.nvmlDeviceGetName(handle)
        profile = _COMPUTE_PART.sub("", name.partition(" MIG ")[2])
        known = _match(whole, profile, said)
        # The attributes count a compute instance's multiprocessors, which may be fewer than the GPU instance's.
        entire = said.computeInstanceSliceCount == said.gpuInstanceSliceCount
        multiprocessors = known.multiprocessors if known else said.multiprocessorCount if entire else 0
        spec = self._overrides.get(name) or _share(board, whole, multiprocessors, said.memorySizeMB)
        peers = known is None or known.peers
        return Cut(uuid, gi, places, profile, said.gpuInstanceSliceCount, spec, peers)

    def _learn(self, board: Board) -> Whole:
        found = tuple(self._profiles(board.own.handle))
        slices = max((each.slices for each in found), default=board.places_at_most)
        most = max((each.multiprocessors for each in found), default=0)
        megabytes = max((each.megabytes for each in found), default=0)
        return Whole(found, slices or 1, self._multiprocessors(board.own.handle) or most, megabytes)

    def _profiles(self, handle: Any) -> Iterator[Profile]:
        """Give the board's profiles; kinds are tried until NVML knows no more of them, as its document says."""
        for kind in range(_KINDS):
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
            yield Profile(info.id, name, *counts, peers=bool(info.isP2pSupported))

    def _info(self, handle: Any, kind: int) -> Any:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind, version=1)  # drivers before 515: no name

    def _multiprocessors(self, handle: Any) -> float:
        """Give the board's own count: the largest profile of an A100 has 98 of its 108. 0: not known."""
        try:
            capability = tuple(self._nvml.nvmlDeviceGetCudaComputeCapability(handle))
            return float(self._nvml.nvmlDeviceGetNumGpuCores(handle) / _CORES[capability])
        except (self._nvml.NVMLError, KeyError):
            return 0.0

    def _stranded(self, board: Board, whole: Whole, cuts: int) -> bool:
        """Whether no profile can reach what is left; a refusal proves nothing: the calls need privileges (NVML doc).

        An instance without a compute instance also takes up room; its slices are within reach.
        """
        nvml, handle, there = self._nvml, board.own.handle, 0
        try:
            for profile in whole.profiles:
                if nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile.id):
                    return False
                found = c_uint(profile.most)
                room = (nvml.c_nvmlGpuInstance_t * profile.most)()
                nvml.nvmlDeviceGetGpuInstances(handle, profile.id, room, byref(found))
                there += found.value
        except nvml.NVMLError:
            return False
        return bool(whole.profiles) and there == cuts


def _match(whole: Whole, name: str, said: Any) -> Profile | None:
    """Find the instance's profile, by name where drivers name it, else by its size."""
    size = (said.gpuInstanceSliceCount, said.memorySizeMB)
    named = (each for each in whole.profiles if name and each.name == name)
    sized = (each for each in whole.profiles if (each.slices, each.megabytes) == size)
    return next(named, None) or next(sized, None)


def _share(board: Board, whole: Whole, multiprocessors: int, megabytes: int) -> Spec | None:
    """Scale the board's spec, by multiprocessors and memory; None where a share is not known."""
    if board.spec is None or not (multiprocessors and whole.multiprocessors and megabytes and whole.megabytes):
        return None
    compute, memory = multiprocessors / whole.multiprocessors, megabytes / whole.megabytes
    return sliced(board.spec, compute=min(1.0, compute), memory=min(1.0, memory))
