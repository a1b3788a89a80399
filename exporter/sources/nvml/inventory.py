"""The boards of the node: which there are, which were there, and why one cannot work.

Owns the match between the driver's list and the boards remembered. Refuses to forget: a GPU once seen stays.
"""

from collections.abc import Mapping
from ctypes import addressof
from typing import Any

from msgspec.structs import replace

from exporter.core.model import Device, Fault, Spec
from exporter.sources import SourceError
from exporter.sources.nvml import probes
from exporter.sources.nvml.asking import Asking, unusable
from exporter.sources.nvml.gpm import Gpm
from exporter.sources.nvml.units import NVLINK, Board, Unit
from exporter.specs import find_spec, unknown_model


class Inventory:
    """Meets boards and loses them; `boards` is in the order in which they were met, by UUID."""

    def __init__(self, asking: Asking, gpm: Gpm, overrides: Mapping[str, Spec]) -> None:
        self._asking, self._nvml, self._gpm, self._overrides = asking, asking.nvml, gpm, overrides
        self.boards: dict[str, Board] = {}
        self._count = -1
        self.changed = False
        """A board was given a handle it did not have: who registers handles must do so anew."""
        self._hidden = False
        """Some GPU is not visible to this process."""

    def refresh(self) -> None:
        """Ask anew for what is not at hand. Raises SourceError when the driver is gone."""
        count = self._ask_count()
        lacking = self._hidden or any(board.own.handle is None for board in self.boards.values())
        if count != self._count or lacking:
            self._survey(count)

    def condemn(self, board: Board, condition: str, why: str) -> None:
        """Keep a board that cannot work, with its condition, until it answers again."""
        self.drop(board)
        board.mark(condition)
        said = f"is {condition}: {why}: find its Xid in dmesg, then reset or drain it"
        self._asking.fault(board.own, f"gpu_{condition}", said)

    def drop(self, board: Board) -> None:
        """Give up a handle that is no longer good, and all that was measured with it."""
        board.own.handle = None
        board.forget()

    def _ask_count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise unusable(error, "asked for the number of GPUs") from error

    def _survey(self, count: int) -> None:
        self._count, self._hidden = count, False
        before = {uuid: board.own.handle for uuid, board in self.boards.items()}
        for board in self.boards.values():
            board.own.handle = None
        for index in range(count):
            try:
                self._meet(index, before)
            except self._nvml.NVMLError as error:
                self._unreachable(index, error)
        for board in self.boards.values():
            if board.own.handle is None and board.own.device.condition not in ("lost", "reset_required"):
                self.condemn(board, "missing", "it is no longer in the driver's list")

    def _meet(self, index: int, before: Mapping[str, Any]) -> None:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        if uuid not in self.boards:
            self.boards[uuid] = self._introduce(handle, uuid)
        board = self.boards[uuid]
        self._take(board, handle, before.get(uuid))
        if board.own.device.index != str(index):
            board.own.device = replace(board.own.device, index=str(index))
            board.layout = None  # the instances are named after it
        if board.own.device.condition != "recovery":
            board.mark("")
        self.boards.pop(_nameless(index), None)

    def _take(self, board: Board, handle: Any, before: Any) -> None:
        """Take a handle. Given again after it was dropped, it is good, and INVALID_ARGUMENT is about something else."""
        own, address = board.own, addressof(handle.contents)
        other = address != own.address
        own.handle, own.address = handle, address
        if other or before is None:
            own.doubtful = other
            self.changed = True
        if other:
            board.forget()

    def _introduce(self, handle: Any, uuid: str) -> Board:
        model = self._nvml.nvmlDeviceGetName(handle)
        spec = self._spec(handle, model)
        if spec is None:
            self._asking.tell(unknown_model(uuid, model))
        links, gpm = self._links(handle), self._has_gpm(handle)
        lacks = NVLINK if links == 0 else ()
        unit = Unit(Device(uuid=uuid, model=model, spec=spec, lacks=lacks), {})
        unit.adopt(probes.board(self._nvml, self._gpm if gpm else None))
        return Board(unit, spec=spec, gpm=gpm, links=links or 0)

    def _spec(self, handle: Any, model: str) -> Spec | None:
        """Find the board's peaks; not a vGPU's, for a guest has the PCI id of the board it is only a part of."""
        nvml = self._nvml
        if self._told(nvml.nvmlDeviceGetVirtualizationMode, handle) == nvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
            return self._overrides.get(model)
        pci = self._told(nvml.nvmlDeviceGetPciInfo, handle)
        return find_spec(model, None if pci is None else f"{pci.pciDeviceId:08x}", overrides=self._overrides)

    def _told(self, call: Any, handle: Any) -> Any:
        """Make a call that can be done without; None: it gave nothing."""
        try:
            return call(handle)
        except self._nvml.NVMLError as error:
            if self._asking.ends(error):
                raise
            return None

    def _has_gpm(self, handle: Any) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except self._nvml.NVMLError as error:
            return not self._asking.declined(error)  # any other error: reading will tell, loudly

    def _links(self, handle: Any) -> int | None:
        """Count the links; 0 only where NVML says that none is up, None: not learnt. They end at INVALID_ARGUMENT."""
        states: list[int] = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(self._nvml.nvmlDeviceGetNvLinkState(handle, link))
            except self._nvml.NVMLError as error:
                if not self._asking.declined(error) and not self._asking.stale(error):
                    return len(states) or None
                break
        return len(states) if any(states) else 0

    def _unreachable(self, index: int, error: Any) -> None:
        """Book a GPU whose handle failed: a GPU off the bus often answers UNKNOWN here, not GPU_IS_LOST."""
        self._asking.raise_if_fatal(error, "read the GPUs")
        if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
            message = f"NVML: GPU {index} is not visible to this process (no permission): it is left out"
            self._hidden = True
            self._asking.tell(Fault("nvml_no_permission", message))
            return
        same = (b for b in self.boards.values() if b.own.handle is None and b.own.device.index == str(index))
        board = next(same, None) or self._unnamed(index)
        self.boards[board.own.device.uuid] = board
        self.condemn(board, self._asking.gone(error) or "lost", str(error))

    def _unnamed(self, index: int) -> Board:
        return Board(Unit(Device(uuid=_nameless(index), index=str(index)), {}), spec=None, gpm=False, links=0)


def none_visible(boards: Mapping[str, Board]) -> None:
    """Raise SourceError when there is nothing to account for."""
    if not boards:
        raise SourceError("NVML: the driver lists no GPU that this process may see: try `nvidia-smi -L`")


def _nameless(index: int) -> str:
    """Stand for a GPU that never gave its UUID, until it does."""
    return f"unknown-{index}"
