"""Reads each board's health from NVML: Xid events, ECC and NVLink errors, temperatures and the recovery action.

Which Xids are fatal is decided by the policy, not here.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from ctypes import addressof
from functools import partial
from typing import Any

from exporter.core.model import SECOND, Fault, Health
from exporter.sources.base import recovery_condition
from exporter.sources.nvml.calls import FieldValues, NvmlBoard, NvmlCalls, NvmlUnit, value_of

_MAX_EVENTS, _MAX_FINAL_EVENTS = 64, 4096
"""Maximum number of events handled in one read (the next read continues), and of a set before it is freed."""


class XidEvents:
    """The event set of all boards. Errors before a board was registered are not reported (NVML doc)."""

    def __init__(self, calls: NvmlCalls) -> None:
        self._calls, self._nvml = calls, calls.nvml
        self._set: Any = None
        self._registered: dict[int, str] = {}
        self._broken = False
        self._unregistered: list[tuple[NvmlBoard, int]] = []
        """Boards that could not be registered, with NVML's error."""

    def collect(self, boards: Iterable[NvmlBoard], *, changed: bool) -> dict[str, list[int]]:
        """Return the Xids since the last call by the board's UUID, oldest first; 999 means unknown to NVML.

        Registers all boards again if handles have `changed`, or if the set is broken.
        """
        xids = self._drain(_MAX_FINAL_EVENTS if changed else _MAX_EVENTS)
        if changed or self._broken:
            self._unregistered = []
            self._renew([board for board in boards if board.own.handle is not None])
        for board, code in self._unregistered:
            self._calls.signal_fault(board.own, "critical errors", code)
        return xids

    def _drain(self, limit: int) -> dict[str, list[int]]:
        xids: dict[str, list[int]] = {}
        for _ in range(limit if self._set is not None else 0):
            event = self._next()
            if event is None:
                break
            uuid = self._registered.get(addressof(event.device.contents), "") if event.device else ""
            xids.setdefault(uuid, []).append(int(event.eventData))
        for xid in xids.pop("", []):
            self._calls.add_fault(Fault("xid_unassigned", f"NVML: critical error (Xid) {xid} of an unknown GPU"))
        return xids

    def close(self) -> None:
        """Free the set; never raises."""
        event_set, self._set, self._registered = self._set, None, {}
        if event_set is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(event_set)

    def _next(self) -> Any:
        try:
            return self._nvml.nvmlEventSetWait_v2(self._set, 0)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                self._broken = True  # a lost board may block the events of the others
                self._add_failure(error)
            return None

    def _renew(self, boards: list[NvmlBoard]) -> None:
        """Create a set with the boards that can be registered.

        An error other than "not supported" makes a set undefined (NVML doc), so a new one is made without that board.
        """
        self.close()
        self._broken = False
        try:
            self._set = self._nvml.nvmlEventSetCreate()
        except self._nvml.NVMLError as error:
            self._broken = not self._calls.is_declined(error)
            self._add_failure(error)
            return
        for board in boards:
            try:
                self._register(board)
            except self._nvml.NVMLError as error:
                self._unregistered.append((board, error.value))
                self._renew([other for other in boards if other is not board])
                return
        if not self._registered:
            self.close()

    def _register(self, board: NvmlBoard) -> None:
        own, nvml = board.own, self._nvml
        try:
            nvml.nvmlDeviceRegisterEvents(own.handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError as error:
            if not self._calls.is_declined(error):
                raise
            return
        self._registered[addressof(own.handle.contents)] = own.device.uuid

    def _add_failure(self, error: Any) -> None:
        """Add a fault that critical errors are not reported; a lost GPU or driver has a fault of its own."""
        if not self._calls.is_declined(error) and not self._calls.is_final(error):
            message = f"NVML: critical errors (Xids) could not be read: {error} (error {error.value})"
            self._calls.add_fault(Fault("xids_not_told", message))


HEALTH_INTERVAL = 10 * SECOND
"""Interval of health reads of a board; a critical error causes one at once. Error counters and memory temperature
change slowly, and reading a hundred fields of 18 links takes the driver a millisecond."""
_FIELDS = (
    ("ecc_corrected", "NVML_FI_DEV_ECC_SBE_VOL_TOTAL"),
    ("ecc_uncorrected", "NVML_FI_DEV_ECC_DBE_VOL_TOTAL"),
    ("row_remap_pending", "NVML_FI_DEV_REMAPPED_PENDING"),
    ("row_remap_failed", "NVML_FI_DEV_REMAPPED_FAILURE"),
    ("recovery_action", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
    ("memory_temperature_celsius", "NVML_FI_DEV_MEMORY_TEMP"),
)
_LINK_ERRORS = (
    # (per link, fields) by family; the first supported family is used. Replay, recovery and CRC errors of each link,
    # "unsupported for Blackwell+"; totals of older boards, by kind of CRC; packets with errors and recoveries of the
    # fifth generation (nvml.h, field ids 161-163, 38-59 and 208-215; all but the totals have the link as scope).
    (True, ("ERROR_DL_REPLAY", "ERROR_DL_RECOVERY", "ERROR_DL_CRC")),
    (
        False,
        (
            "CRC_FLIT_ERROR_COUNT_TOTAL",
            "CRC_DATA_ERROR_COUNT_TOTAL",
            "REPLAY_ERROR_COUNT_TOTAL",
            "RECOVERY_ERROR_COUNT_TOTAL",
        ),
    ),
    (True, ("COUNT_RCV_ERRORS", "COUNT_LINK_RECOVERY_EVENTS")),
)
_LINKS = tuple(f"nvlink_{family}" for family in range(len(_LINK_ERRORS)))
_SMOOTHING = {"575": 256}
"""Field id of "power smoothing enabled" by driver branch, if not _SMOOTHING_ELSEWHERE: in nvml.h of CUDA 12.9 it is
256, and 251 is a counter of nanoseconds; in those of 12.8 and 13 it is 251."""
_SMOOTHING_ELSEWHERE = 251
_ON_OFF = (0, 1)
_RECOVERY = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain the work of its peers",
    4: "drain the work of its peers and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset its PCIe bus",
    7: "reboot the system",
}
"""nvmlDeviceGpuRecoveryAction_t."""


class HealthReader:
    """Reads the boards' health, and sets the conditions that follow from it."""

    def __init__(self, calls: NvmlCalls) -> None:
        self._calls, self._nvml = calls, calls.nvml
        self._events = XidEvents(calls)
        self._smoothing: int | None = None

    def start(self, boards: Iterable[NvmlBoard]) -> None:
        """Start collecting critical errors."""
        self._smoothing = self._smoothing_field()
        self._events.collect(boards, changed=True)

    def read(self, boards: Iterable[NvmlBoard], now: int, *, changed: bool) -> Iterator[Health]:
        """Yield the health of boards that are due or have new Xids; `changed`: a board has a new handle.

        Raises SourceError if the driver is gone.
        """
        xids_by_board = self._events.collect(boards, changed=changed)
        for board in boards:
            xids = xids_by_board.get(board.own.device.uuid, [])
            due = board.health_read_at is None or now - board.health_read_at >= HEALTH_INTERVAL
            fields = self._read_board(board, now) if due or xids else {}
            if board.recovery_action and board.own.handle is not None:
                wanted = _RECOVERY.get(board.recovery_action, f"action {board.recovery_action}")
                blocks = recovery_condition(board.recovery_action)
                until = ": until then it is unavailable, except to work that still runs on it" if blocks else ""
                message = f"requires recovery: {wanted}{until}"
                self._calls.device_fault(board.own, "gpu_recovery", message)
            if fields or xids:
                yield Health(board.own.device.uuid, xids=tuple(xids), **fields)

    def close(self) -> None:
        """Stop collecting critical errors; never raises."""
        self._events.close()

    def _read_board(self, board: NvmlBoard, now: int) -> FieldValues:
        """Read all fields in one call; a board without a handle has none, only critical errors."""
        if board.own.handle is None:
            return {}
        board.health_read_at = now
        if board.checks is None:
            board.checks = {"health": [partial(self._read_fields, board)], "margin": [self._margin, self._to_slowdown]}
        try:
            fields: FieldValues = {}
            for what, calls in board.checks.items():
                fields.update(self._calls.call_first(board.own, calls, what=what))
        except self._nvml.NVMLError as error:
            self._calls.raise_if_fatal(error, "read the GPUs' health")
            return {}  # the next read finds it lost
        self._set_recovery(board, fields.get("recovery_action"))
        return fields

    def _set_recovery(self, board: NvmlBoard, action: int | None) -> None:
        """Set the condition of the action that NVML reports; None: not reported, so nothing changes."""
        board.recovery_action = board.recovery_action if action is None else action
        board.set_condition(recovery_condition(board.recovery_action))

    def _read_fields(self, board: NvmlBoard, unit: NvmlUnit, _seconds: float) -> FieldValues:
        if board.health_fields is None:
            board.health_fields = list(self._all_fields(board))
        if not board.health_fields:
            return {}
        field_values = self._nvml.nvmlDeviceGetFieldValues(
            unit.handle, [(field, scope) for _, field, scope in board.health_fields]
        )
        seen, kept = self._sort_values(board, field_values)
        links = next((name for name in _LINKS if seen.get(name)), None)
        board.health_fields = [
            field_key for field_key in kept if links is None or field_key[0] == links or field_key[0] not in _LINKS
        ]
        return dict(_health(seen, links))

    def _sort_values(
        self, board: NvmlBoard, field_values: Any
    ) -> tuple[dict[str, list[int]], list[tuple[str, int, int]]]:
        """Return the values by name, without names of which any failed, and the fields to read next time."""
        seen: dict[str, list[int]] = {}
        kept, failed = [], {}
        for field_key, field_value in zip(board.health_fields or (), field_values, strict=True):
            code = field_value.nvmlReturn
            if code in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_INVALID_ARGUMENT):
                continue  # a driver returns either error for an unknown field
            kept.append(field_key)
            if code:
                failed[field_key[0]] = code
            else:
                seen.setdefault(field_key[0], []).append(value_of(field_value))
        for name, code in failed.items():
            seen.pop(name, None)
            self._calls.signal_fault(board.own, name, code)
        return seen, kept

    def _all_fields(self, board: NvmlBoard) -> Iterator[tuple[str, int, int]]:
        for name, constant in _FIELDS:
            yield name, getattr(self._nvml, constant), 0
        if self._smoothing is not None:
            yield "power_smoothing", self._smoothing, 0
        for name, (by_link, constants) in zip(_LINKS, _LINK_ERRORS, strict=True):
            for link in range(board.links if by_link else min(1, board.links)):
                for constant in constants:
                    yield name, getattr(self._nvml, f"NVML_FI_DEV_NVLINK_{constant}"), link

    def _smoothing_field(self) -> int | None:
        try:
            branch = self._nvml.nvmlSystemGetDriverVersion().partition(".")[0]
        except self._nvml.NVMLError:
            return None  # the meaning of the id depends on the driver branch
        return _SMOOTHING.get(branch, _SMOOTHING_ELSEWHERE)

    def _margin(self, unit: NvmlUnit, _seconds: float) -> FieldValues:
        return {"temperature_margin_celsius": float(self._nvml.nvmlDeviceGetMarginTemperature(unit.handle))}

    def _to_slowdown(self, unit: NvmlUnit, _seconds: float) -> FieldValues:
        """Compute the margin from the threshold and the temperature, for boards before Ada and Hopper."""
        nvml, handle = self._nvml, unit.handle
        limit = nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        now = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return {"temperature_margin_celsius": float(limit - now)}


def _health(seen: dict[str, list[int]], links: str | None) -> Iterator[tuple[str, Any]]:
    """Turn values into fields of `Health`, without impossible values."""
    for name, values in seen.items():
        value = values[0]
        if name in ("row_remap_pending", "row_remap_failed"):
            yield name, bool(value)
        elif name == "memory_temperature_celsius":
            if value:  # some boards report 0 for a sensor they do not have
                yield name, float(value)
        elif name == "power_smoothing":
            if value in _ON_OFF:
                yield name, bool(value)
        elif name not in _LINKS:
            yield name, value
    if links is not None:
        yield "nvlink_errors", sum(seen[links])
