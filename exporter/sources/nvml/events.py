"""Critical errors (Xids) as NVML tells them: by events, each of which is told once.

Owns the event set. Refuses to judge an Xid: the policy knows which are fatal.
"""

from collections.abc import Iterable
from contextlib import suppress
from ctypes import addressof
from typing import Any

from exporter.core.model import Fault
from exporter.sources.nvml.asking import Asking
from exporter.sources.nvml.units import Board

_MOST, _LAST = 64, 4096
"""Events taken in one read, for a storm can be told over several; and from a set that is about to be freed."""


class Events:
    """The event set of all boards; what happened before a board was registered is not told (NVML doc)."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._nvml = asking, asking.nvml
        self._set: Any = None
        self._watched: dict[int, str] = {}
        self._broken = False
        self._deaf: list[tuple[Board, int]] = []
        """Boards that could not be registered, and why."""

    def take(self, boards: Iterable[Board], *, changed: bool) -> dict[str, list[int]]:
        """Give the Xids since the last call, by board, oldest first; 999 is NVML's word for one it does not know.

        Registers anew where boards have `changed` their handles, or where the set is of no more use.
        """
        told = self._drain(_LAST if changed else _MOST)
        if changed or self._broken:
            self._deaf = []
            self._renew([board for board in boards if board.own.handle is not None])
        for board, code in self._deaf:
            self._asking.signal_fault(board.own, "critical errors", code)
        return told

    def _drain(self, most: int) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {}
        for _ in range(most if self._set is not None else 0):
            event = self._next()
            if event is None:
                break
            told.setdefault(self._whose(event), []).append(int(event.eventData))
        for xid in told.pop("", []):
            self._asking.tell(Fault("xid_unassigned", f"NVML: critical error (Xid) {xid} of a GPU that is not known"))
        return told

    def close(self) -> None:
        """Free the set; never raises."""
        held, self._set, self._watched = self._set, None, {}
        if held is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(held)

    def _next(self) -> Any:
        try:
            return self._nvml.nvmlEventSetWait_v2(self._set, 0)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                self._broken = True  # one lost board may silence the others
                self._tell(error)
            return None

    def _whose(self, event: Any) -> str:
        return self._watched.get(addressof(event.device.contents), "") if event.device else ""

    def _renew(self, boards: list[Board]) -> None:
        """Make a set of those that can be registered; a refusal other than "not supported" makes it void (NVML doc)."""
        self.close()
        self._broken = False
        try:
            self._set = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError as error:
            self._broken = not self._asking.declined(error)
            self._tell(error)
            return
        for board in boards:
            try:
                self._register(board)
            except self._nvml.NVMLError as error:
                self._deaf.append((board, error.value))
                self._renew([other for other in boards if other is not board])
                return
        if not self._watched:
            self.close()

    def _register(self, board: Board) -> None:
        own, nvml = board.own, self._nvml
        try:
            nvml.nvmlDeviceRegisterEvents(own.handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError as error:
            if not self._asking.declined(error):
                raise
            return
        self._watched[addressof(own.handle.contents)] = own.device.uuid

    def _tell(self, error: Any) -> None:
        """Tell that critical errors are not told; a lost GPU or driver is told elsewhere."""
        if not self._asking.declined(error) and not self._asking.ends(error):
            said = f"NVML: critical errors (Xids) could not be asked for: {error} (error {error.value})"
            self._asking.tell(Fault("xids_not_told", said))
