"""Which GPU a Slurm index means: index -> device file -> UUID.

Owns that chain. An index (SLURM_JOB_GPUS, IDX) is a place in slurmd's list of the node's GPUs: `slurmd -G` prints that
list in order. Its `Index=` is not it but the number at the end of the device file's name, so lines are counted
(measured on 22.05.8 and 24.11.5; _log_gres_slurmd_conf in Slurm's gres.c). A device file's number is the driver's
minor, which need not be its ordinal; /proc/driver/nvidia tells the UUID (NVIDIA driver README, "proc interface").
Refuses to guess: what the chain does not lead to is a reason, not a GPU.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from exporter.core.model import Device
from exporter.schedulers.slurm.gres import ON_GPUS
from exporter.schedulers.slurm.hostlist import expand_hostlist

_LINE = re.compile(r"Gres Name=(\S+) Type=(\S*) Count=(\d{1,9})(?: Index=\S+)?(?: ID=\d+)?(?: File=(\S+))?")
_BOARD = re.compile(r"nvidia(\d{1,4})")
_CAP = re.compile(r"nvidia-cap(\d{1,6})")
_MINOR = re.compile(r"^Device Minor:\s*(\d{1,4})\s*$", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_CAP_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d{1,6})\s*$", re.MULTILINE)


class Slot(Struct, frozen=True):
    """One place in slurmd's list."""

    minor: int | None = None
    """Of /dev/nvidiaN; None: the slot has no such file."""
    caps: tuple[int, ...] = ()
    """Of /dev/nvidia-caps/nvidia-capN: the slot is a MIG instance."""


class Places(Struct, frozen=True):
    """Slurm's and the driver's lists, as last read."""

    slots: Mapping[str, tuple[Slot, ...]] | None = None
    """By resource name; None: slurmd could not be asked, an index is taken for a minor."""
    uuids: Mapping[int, str] = {}
    """By minor; empty: the driver's /proc is not there, a minor is taken for the driver's ordinal."""
    instances: Mapping[int, tuple[int, int]] = {}
    """By a capability's minor: minor of the board and number of the GPU instance."""

    def find(self, name: str, index: int, devices: Sequence[Device]) -> tuple[str, ...]:
        """UUIDs of the GPU, or of all instances that it is cut into; raises ValueError with the reason."""
        slot = self._slot(name, index)
        if slot.caps:
            return (self._instance(slot, devices),)
        if slot.minor is None:
            raise ValueError(f"index {index} of gres/{name} has no device file in `slurmd -G`")
        board = self._board(slot.minor, devices)
        cut = tuple(device.uuid for device in devices if device.parent == board.uuid)
        return cut or (board.uuid,)

    def _slot(self, name: str, index: int) -> Slot:
        if self.slots is None:
            return Slot(index)
        slots = self.slots.get(name) or self.slots.get("gpu", ())
        if index >= len(slots):
            raise ValueError(f"index {index} of gres/{name} is not in `slurmd -G`, which lists {len(slots)}")
        return slots[index]

    def _board(self, minor: int, devices: Sequence[Device]) -> Device:
        uuid = self.uuids.get(minor)
        if self.uuids and uuid is None:
            raise ValueError(f"/dev/nvidia{minor} is not in /proc/driver/nvidia")
        # Boards alone: an instance's index is "0:1".
        found = [d for d in devices if not d.parent and (d.uuid == uuid if uuid else d.index == str(minor))]
        if len(found) != 1:
            raise ValueError(f"/dev/nvidia{minor} ({uuid or 'by its number'}) is no GPU that the source sees")
        return found[0]

    def _instance(self, slot: Slot, devices: Sequence[Device]) -> str:
        told = {self.instances[cap] for cap in slot.caps if cap in self.instances}
        if len(told) != 1:
            raise ValueError(f"nvidia-cap{slot.caps[0]} is no MIG instance in /proc/driver/nvidia/capabilities")
        minor, instance = told.pop()
        board = self._board(minor, devices)
        found = [d.uuid for d in devices if d.parent == board.uuid and d.index.rpartition(":")[2] == str(instance)]
        if len(found) != 1:
            raise ValueError(f"GPU instance {instance} of /dev/nvidia{minor} is no device that the source sees")
        return found[0]


def parse_slots(text: str) -> dict[str, tuple[Slot, ...]]:
    """Read what `slurmd -G` prints to standard error; raises ValueError where it lists nothing.

    A MIG instance has several files (MultipleFiles): newer versions print them on one line, 22.05 one a line, its
    board's first.
    """
    slots: dict[str, list[Slot]] = {}
    types: dict[str, str] = {}
    for match in _LINE.finditer(text):
        name, kind, count, files = match.groups()
        if name in ON_GPUS:
            _add(slots.setdefault(name, []), files or "", int(count), same=types.get(name) == kind)
            types[name] = kind
    if not any(slots.values()):
        raise ValueError(f"no GPU in what slurmd -G printed: {text.strip()[-200:]!r}")
    return {name: tuple(each) for name, each in slots.items()}


def _add(slots: list[Slot], files: str, count: int, *, same: bool) -> None:
    """Take in one line; `same` tells whether it is of the type of the line before."""
    boards, caps = _numbers(_BOARD, files), _numbers(_CAP, files)
    if caps and not boards and same and slots and slots[-1].minor is not None:
        slots[-1] = Slot(slots[-1].minor, slots[-1].caps + caps)
    elif caps:
        slots += [Slot(boards[0], caps)] if boards else [Slot(None, (cap,)) for cap in caps]
    elif boards:
        slots += map(Slot, boards)
    else:
        slots += [Slot()] * min(count, 1024)


def _numbers(pattern: re.Pattern[str], files: str) -> tuple[int, ...]:
    names = (path.rpartition("/")[2] for path in expand_hostlist(files, most=1024))
    return tuple(int(match[1]) for match in map(pattern.fullmatch, names) if match)


def read_uuids(proc: Path) -> dict[int, str]:
    """Minor -> UUID, of /proc/driver/nvidia/gpus/*/information; empty where there is none."""
    said = (_text(path) for path in sorted(proc.glob("driver/nvidia/gpus/*/information")))
    pairs = ((_MINOR.search(text), _UUID.search(text)) for text in said)
    return {int(minor[1]): uuid[1] for minor, uuid in pairs if minor and uuid}


def read_instances(proc: Path) -> dict[int, tuple[int, int]]:
    """A capability's minor -> (its board's minor, GPU instance), of GPU and compute instances alike."""
    root = proc / "driver/nvidia/capabilities"
    paths = (*root.glob("gpu*/mig/gi*/access"), *root.glob("gpu*/mig/gi*/ci*/access"))
    return dict(_instances(root, paths))


def _instances(root: Path, paths: Iterable[Path]) -> Iterable[tuple[int, tuple[int, int]]]:
    for path in paths:
        board, _, instance = path.relative_to(root).parts[:3]
        said = _CAP_MINOR.search(_text(path))
        numbers = board.removeprefix("gpu"), instance.removeprefix("gi")
        if said and all(each.isascii() and each.isdigit() for each in numbers):
            yield int(said[1]), (int(numbers[0]), int(numbers[1]))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
