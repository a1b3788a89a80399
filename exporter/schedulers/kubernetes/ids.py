"""From what a kubelet calls a GPU to its UUID.

Owns the forms of device ids: of NVIDIA's device plugin (UUIDs, MIG UUIDs, `id::N` replicas of time slicing and MPS, the
old `MIG-GPU-uuid/gi/ci`), of GKE's (`nvidia0`, `nvidia0/gi1`, `.../vgpu2`), plain ordinals, and the names that NVIDIA's
DRA driver gives (`gpu-0`, CDI names) with what its ResourceSlices say of them. Refuses to guess: an id that may be
another GPU is nobody's, with the reason, for a GPU given to the wrong owner is worse than one with a fault beside it.
HAMi's `GPU-uuid-N` is refused for that: its scheduler gives out other GPUs than the kubelet believes.

Minor numbers are those of the device nodes, which the driver tells in /proc/driver/nvidia; they are often, not always,
the ordinals.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exporter.core.model import Device
from exporter.schedulers.kubernetes.objects import Attribute, ResourceSlice, SliceDevice
from exporter.schedulers.kubernetes.wire import Claimed

DRIVER = "gpu.nvidia.com"
"""NVIDIA's DRA driver for GPUs; its other one, compute-domain.nvidia.com, gives no GPU."""
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_REPLICA = re.compile(r"(.+)::\d+")
_OLD_MIG = re.compile(rf"MIG-(GPU-{_UUID})/(\d+)/\d+")
_GKE = re.compile(r"nvidia(\d+)(?:/gi(\d+))?(?:/vgpu\d+)?")
_CDI = re.compile(rf"(?:k8s\.{re.escape(DRIVER)}|nvidia\.com)/(\w+)=(.+)")
_CLAIM_CDI = re.compile(rf"{_UUID}-(.+)")
_NAMED = re.compile(rf"(gpu|mig)-({_UUID})")
_NUMBERED = re.compile(r"gpu-(\d+)")
_INFORMATION = "driver/nvidia/gpus/*/information"
Slices = Mapping[tuple[str, str], SliceDevice]
"""DRA devices by pool and name."""


class UnknownIdError(Exception):
    """A device id that is no GPU of this node as far as can be told; the message says why."""


class Boards:
    """The GPUs that the source sees, found by what a kubelet calls them."""

    def __init__(self, devices: Sequence[Device], *, proc: str | Path = "/proc") -> None:
        self._devices = {device.uuid: device for device in devices}
        self._ordinals = {d.index: d.uuid for d in devices if not d.parent}
        self._minors = {number: uuid for number, uuid in _minors(Path(proc)) if uuid in self._devices}

    def of(self, names: Iterable[str], claims: Iterable[Claimed], slices: Slices) -> tuple[list[str], list[str]]:
        """UUIDs of what a pod holds, each once, and of what cannot be told the name and the reason."""
        found: dict[str, None] = {}
        unknown: list[str] = []
        for name in names:
            try:
                found |= dict.fromkeys(self.find(name))
            except UnknownIdError as err:
                unknown.append(f"{name!r}: {err}")
        for claim in claims:
            try:
                found |= dict.fromkeys(self.claimed(claim, slices))
            except UnknownIdError as err:
                unknown.append(f"{claim.device or ' '.join(claim.cdi)!r} of DRA pool {claim.pool!r}: {err}")
        return list(found), unknown

    def find(self, name: str) -> tuple[str, ...]:
        """UUIDs of a device plugin's id, one but for a whole board in MIG mode; raises UnknownIdError."""
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
        raise UnknownIdError("no GPU that the source sees is called so")

    def claimed(self, claim: Claimed, slices: Slices) -> tuple[str, ...]:
        """UUIDs of what a DRA driver gave to a claim, none for what is no GPU; raises UnknownIdError."""
        names = _names(claim)
        offered = next((slices[claim.pool, name] for name in names if (claim.pool, name) in slices), None)
        if offered is not None:
            return self._offered(offered)
        if not names:
            raise UnknownIdError("the kubelet does not name it")
        return self._called(names[0])

    def _whole(self, uuid: str) -> tuple[str, ...]:
        """A board in MIG mode is all its instances to who was given it: nothing else of it can be held."""
        return tuple(d.uuid for d in self._devices.values() if d.parent == uuid) or (uuid,)

    def _instance(self, board: str, number: str) -> str:
        found = (d.uuid for d in self._devices.values() if d.parent == board and d.index.endswith(f":{number}"))
        uuid = next(found, "")
        if not uuid:
            raise UnknownIdError(f"{board} has no GPU instance {number} that the source sees")
        return uuid

    def _minor(self, number: str) -> str:
        numbers = self._minors or self._ordinals
        if number not in numbers:
            raise UnknownIdError(f"no GPU that the source sees has the minor number {number}")
        return numbers[number]

    def _offered(self, device: SliceDevice) -> tuple[str, ...]:
        """By the attributes that the driver publishes; a MIG device made on demand has only its board and profile."""
        uuid, parent, profile = (_attribute(device, name) for name in ("uuid", "parentUUID", "profile"))
        if uuid:
            return self.find(uuid)
        alike = [d.uuid for d in self._devices.values() if parent and (d.parent, d.profile) == (parent, profile)]
        if len(alike) != 1:
            raise UnknownIdError(
                f"its ResourceSlice gives no uuid, and {parent or 'no board'} has {len(alike)} {profile}"
            )
        return (alike[0],)

    def _called(self, name: str) -> tuple[str, ...]:
        """By the name alone: a number in it is the minor since 2025 and was the ordinal before, so both must agree."""
        if named := _NAMED.fullmatch(name):
            return self.find(f"{named[1].upper()}-{named[2]}")
        numbered = _NUMBERED.fullmatch(name)
        if numbered and numbered[1] in self._ordinals:
            ordinal = self._ordinals[numbered[1]]
            if len(self._ordinals) == 1 or self._minors.get(numbered[1]) == ordinal:
                return self._whole(ordinal)
        raise UnknownIdError("its name alone does not tell which GPU it is: let the daemon list resourceslices")


def offers(slices: Sequence[ResourceSlice]) -> Slices:
    """Devices of NVIDIA's driver by pool and name, of each pool's newest generation only."""
    ours = [one.spec for one in slices if one.spec.driver == DRIVER]
    newest: dict[str, int] = {}
    for spec in ours:
        newest[spec.pool.name] = max(spec.pool.generation, newest.get(spec.pool.name, spec.pool.generation))
    valid = (spec for spec in ours if spec.pool.generation == newest[spec.pool.name])
    return {(spec.pool.name, device.name): device for spec in valid for device in spec.devices or ()}


def is_gpu(claim: Claimed) -> bool:
    """Whether the claim's device is one of NVIDIA's GPU driver; older kubelets give its CDI name only."""
    return claim.driver == DRIVER or (not claim.driver and any(map(_CDI.fullmatch, claim.cdi)))


def _names(claim: Claimed) -> list[str]:
    """What the device may be called: as the kubelet says, else as the CDI name ends, after the claim's UID."""
    if claim.device:
        return [claim.device]
    names = [found[2] for found in map(_CDI.fullmatch, claim.cdi) if found]
    return [of_claim[1] if (of_claim := _CLAIM_CDI.fullmatch(name)) else name for name in names]


def _attribute(device: SliceDevice, name: str) -> str:
    given = device.attributes or (device.basic.attributes if device.basic else None) or {}
    found = given.get(name) or given.get(f"{DRIVER}/{name}") or Attribute()
    return found.string or ""


def _minors(proc: Path) -> list[tuple[str, str]]:
    """Minor numbers and UUIDs as the driver tells them; empty where it does not (a container without the host's)."""
    return [found for file in sorted(proc.glob(_INFORMATION)) if (found := _minor_of(file))]


def _minor_of(file: Path) -> tuple[str, str] | None:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    number, uuid = said.get("Device Minor", ""), said.get("GPU UUID", "")
    return (number, uuid) if number and uuid else None
