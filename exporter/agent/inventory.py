"""Determines the devices to account for: those that the source lists, and those that are missing.

Boards that were listed are remembered while the daemon runs and, in a file, across restarts. A board is a device
without `parent`; all others are MIG instances. The condition of a listed device comes from the source.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import Device, Fault, Spec
from exporter.files import write_atomically
from exporter.sources.base import UNKNOWN_PREFIX

log = logging.getLogger(__name__)
MISSING = "missing"
MISSING_PREFIX = "missing-"
"""Prefix of the placeholder UUID of an expected GPU that was never listed."""


class Inventory:
    """Listed devices, and missing ones, which are paid for and accounted for as unavailable.

    A board is missing if it was listed before, or is in `remembered` from an earlier run, and is not listed now. There
    are never more missing boards than the largest number ever listed at once minus the number listed now: a board
    beyond that was replaced. Once that many boards are listed and working, absent boards are forgotten. If fewer than
    `expected` boards are listed or missing, placeholders ("missing-1") fill the difference.
    """

    def __init__(self, remembered: Iterable[Device] = (), *, expected: int = 0) -> None:
        self._absent = {board.uuid: board for board in remembered}
        """Absent boards, and the MIG instances that they had when last listed, by UUID."""
        self._most_boards, self._expected = len(self._absent), expected
        self._listed: dict[str, Device] = {}

    def update(self, listed: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices to account for, given the devices that the source lists now."""
        before, self._listed = self._listed, {device.uuid: device for device in listed}
        gone = [device for uuid, device in before.items() if uuid not in self._listed and not _has_no_uuid(device)]
        self._absent |= {device.uuid: replace(device, condition=MISSING) for device in gone}
        boards = [device for device in listed if not device.parent]
        if sum(not board.condition and not _has_no_uuid(board) for board in boards) >= max(1, self._most_boards):
            self._absent = {}
        self._most_boards = max(self._most_boards, len(boards))
        self._absent = {device.uuid: device for device in self._absent.values() if self._still_absent(device)}
        missing = list(self._missing(self._most_boards - len(boards)))
        lacking = self._expected - len(boards) - sum(not device.parent for device in missing)
        return (*missing, *listed, *(Device(f"{MISSING_PREFIX}{n + 1}", condition=MISSING) for n in range(lacking)))

    def boards(self) -> tuple[Device, ...]:
        """Return the boards of this node whose UUIDs are known, to be saved."""
        known = (*self._listed.values(), *self._absent.values())
        return tuple(device for device in known if not device.parent and not _has_no_uuid(device))

    def _still_absent(self, device: Device) -> bool:
        """Return whether the device is absent; an instance only with its board: else the MIG layout changed."""
        return device.uuid not in self._listed and device.parent not in self._listed

    def _missing(self, most: int) -> Iterator[Device]:
        """Yield at most `most` absent boards, those listed last, each with its instances."""
        boards = [device for device in self._absent.values() if not device.parent]
        for board in boards[max(0, len(boards) - most) :]:
            yield board
            yield from (device for device in self._absent.values() if device.parent == board.uuid)


def missing_faults(devices: Iterable[Device], listed: Iterable[Device]) -> tuple[Fault, ...]:
    """Return a fault for each board in `devices` that is not in `listed`."""
    seen = {device.uuid for device in listed}
    gone = (device for device in devices if not device.parent and device.uuid not in seen)
    return tuple(Fault("gpu_missing", _missing_message(device), device.uuid) for device in gone)


def _missing_message(device: Device) -> str:
    if device.uuid.startswith(MISSING_PREFIX):
        return (
            f"{device.uuid} stands for a GPU that is expected and was never listed: look at `nvidia-smi -L` and"
            " `dmesg`, or correct inventory.expected_gpus"
        )
    return (
        f"GPU {device.index} ({device.uuid}, {device.model}) was listed before and is missing: look at `nvidia-smi -L`"
        " and `dmesg`; if it was taken out for good, restart this daemon, without inventory.file where there is one"
    )


def _has_no_uuid(device: Device) -> bool:
    return device.uuid.startswith(UNKNOWN_PREFIX)


class _SavedBoard(Struct, frozen=True):
    uuid: str
    index: str = ""
    model: str = ""
    spec: str = ""


class InventoryFile:
    """Saves boards across restarts as a JSON list. Logs the first error, then works without the file."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._saved: frozenset[str] | None = frozenset()
        """UUIDs in the file; None: the file could not be read and must not be overwritten."""
        self._warned = False

    def load(self) -> tuple[Device, ...]:
        """Return the boards in the file; empty if there is none yet."""
        try:
            boards = msgspec.json.decode(self._path.read_bytes(), type=tuple[_SavedBoard, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            self._saved = None
            self._warn_once(
                f"cannot be read: {err}: delete it or name another in inventory.file, then restart this daemon"
            )
            return ()
        self._saved = frozenset(board.uuid for board in boards)
        return tuple(_device(board) for board in boards)

    def save(self, boards: Iterable[Device]) -> None:
        """Write `boards` to the file if their UUIDs differ from those in it."""
        names = {board.uuid: board for board in boards}
        if self._saved is None or names.keys() == self._saved:
            return
        self._saved = frozenset(names)
        rows = [
            _SavedBoard(b.uuid, b.index, b.model, b.spec.name if b.spec is not None else "") for b in names.values()
        ]
        try:
            write_atomically(self._path, b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n")
        except OSError as err:
            self._warn_once(f"cannot be written: {err.strerror or err}: may this user write there?")

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the GPUs of this node are not remembered across restarts: %s %s", self._path, problem)


def _device(board: _SavedBoard) -> Device:
    spec = Spec(board.spec) if board.spec else None
    return Device(board.uuid, board.index, board.model, spec, condition=MISSING)
