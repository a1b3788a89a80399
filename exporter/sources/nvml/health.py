"""A board's condition beside its work: memory errors, links, heat, what it needs to recover.

Owns which NVML fields say it, and how often they are asked. Refuses to judge, but for one thing: a board that asks
for a recovery action says itself that it cannot work on.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from exporter.core.model import SECOND, Health
from exporter.sources.nvml.asking import Asking
from exporter.sources.nvml.events import Events
from exporter.sources.nvml.probes import value_of
from exporter.sources.nvml.units import Board, Fields, Unit

EVERY = 10 * SECOND
"""Between two examinations of a board, except that a critical error calls for one at once: counters of errors and
the memory's heat change slowly, and a hundred fields of 18 links take the driver a millisecond."""
_FIELDS = (
    ("ecc_corrected", "NVML_FI_DEV_ECC_SBE_VOL_TOTAL"),
    ("ecc_uncorrected", "NVML_FI_DEV_ECC_DBE_VOL_TOTAL"),
    ("row_remap_pending", "NVML_FI_DEV_REMAPPED_PENDING"),
    ("row_remap_failed", "NVML_FI_DEV_REMAPPED_FAILURE"),
    ("recovery_action", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
    ("memory_temperature_celsius", "NVML_FI_DEV_MEMORY_TEMP"),
)
_LINK_ERRORS = (
    # The first family that answers counts. Replay, recovery and CRC errors of each link, "unsupported for Blackwell+";
    # the totals of older boards, by kind of CRC; and packets with errors and recoveries of the fifth generation
    # (nvml.h, field ids 161-163, 38-59 and 208-215; all but the totals want the link as scope).
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
"""Field id of "power smoothing enabled" by driver branch, where it is not _SMOOTHING_ELSEWHERE: CUDA 12.9's nvml.h
has it at 256, and at 251 a counter of nanoseconds; those of 12.8 and of 13 have it at 251."""
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


class Examiner:
    """Asks after the boards' health, and keeps the conditions that follow from it."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._nvml = asking, asking.nvml
        self._events = Events(asking)
        self._smoothing: int | None = None

    def begin(self, boards: Iterable[Board]) -> None:
        """Listen from now on for critical errors."""
        self._smoothing = self._smoothing_field()
        self._events.take(boards, changed=True)

    def examine(self, boards: Iterable[Board], now: int, *, changed: bool) -> Iterator[Health]:
        """Yield what is known anew, board by board; `changed` where a board was given a new handle.

        Raises SourceError when the driver is gone.
        """
        told = self._events.take(boards, changed=changed)
        for board in boards:
            xids = told.get(board.own.device.uuid, [])
            due = board.examined_at is None or now - board.examined_at >= EVERY
            fields = self._look(board, now) if due or xids else {}
            if board.recovery and board.own.handle is not None:
                wanted = _RECOVERY.get(board.recovery, f"action {board.recovery}")
                said = f"asks to be recovered: {wanted}: until then it is unavailable"
                self._asking.fault(board.own, "gpu_recovery", said)
            if fields or xids:
                yield Health(board.own.device.uuid, xids=tuple(xids), **fields)

    def close(self) -> None:
        """Stop listening; never raises."""
        self._events.close()

    def _look(self, board: Board, now: int) -> Fields:
        """Ask all at once, and nothing of a board without a handle: its last words are its critical errors."""
        if board.own.handle is None:
            return {}
        board.examined_at = now
        if board.checks is None:
            board.checks = {"health": [partial(self._ask_fields, board)], "margin": [self._margin, self._to_slowdown]}
        try:
            fields: Fields = {}
            for what, calls in board.checks.items():
                fields.update(self._asking.first(board.own, calls, what=what))
        except self._nvml.NVMLError as error:
            self._asking.raise_if_fatal(error, "examined the GPUs")
            return {}  # the next read finds it lost
        self._heed(board, fields.get("recovery_action"))
        return fields

    def _heed(self, board: Board, action: int | None) -> None:
        """Keep the condition "recovery" from the first word of it to the first word against it."""
        board.recovery = board.recovery if action is None else action
        board.mark("recovery" if board.recovery else "")

    def _ask_fields(self, board: Board, unit: Unit, _seconds: float) -> Fields:
        if board.wanted is None:
            board.wanted = list(self._all(board))
        if not board.wanted:
            return {}
        answers = self._nvml.nvmlDeviceGetFieldValues(unit.handle, [(field, scope) for _, field, scope in board.wanted])
        seen, kept = self._sorted(board, answers)
        links = next((name for name in _LINKS if seen.get(name)), None)
        board.wanted = [want for want in kept if links is None or want[0] == links or want[0] not in _LINKS]
        return dict(_health(seen, links))

    def _sorted(self, board: Board, answers: Any) -> tuple[dict[str, list[int]], list[tuple[str, int, int]]]:
        """Give the values by name, without names of which one failed, and what is worth asking again."""
        seen: dict[str, list[int]] = {}
        kept, failed = [], {}
        for want, answer in zip(board.wanted or (), answers, strict=True):
            code = answer.nvmlReturn
            if code in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_INVALID_ARGUMENT):
                continue  # a driver that does not know a field says either
            kept.append(want)
            if code:
                failed[want[0]] = code
            else:
                seen.setdefault(want[0], []).append(value_of(answer))
        for name, code in failed.items():
            seen.pop(name, None)
            self._asking.signal_fault(board.own, name, code)
        return seen, kept

    def _all(self, board: Board) -> Iterator[tuple[str, int, int]]:
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
            return None  # the same number means something else elsewhere
        return _SMOOTHING.get(branch, _SMOOTHING_ELSEWHERE)

    def _margin(self, unit: Unit, _seconds: float) -> Fields:
        return {"temperature_margin_celsius": float(self._nvml.nvmlDeviceGetMarginTemperature(unit.handle))}

    def _to_slowdown(self, unit: Unit, _seconds: float) -> Fields:
        """As boards before Ada and Hopper tell it: a threshold and a temperature."""
        nvml, handle = self._nvml, unit.handle
        limit = nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        now = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return {"temperature_margin_celsius": float(limit - now)}


def _health(seen: dict[str, list[int]], links: str | None) -> Iterator[tuple[str, Any]]:
    """Turn values into fields of `Health`; one that cannot be is not taken for an answer."""
    for name, values in seen.items():
        value = values[0]
        if name in ("row_remap_pending", "row_remap_failed"):
            yield name, bool(value)
        elif name == "memory_temperature_celsius":
            if value:  # some boards answer 0 for a sensor they do not have
                yield name, float(value)
        elif name == "power_smoothing":
            if value in _ON_OFF:
                yield name, bool(value)
        elif name not in _LINKS:
            yield name, value
    if links is not None:
        yield "nvlink_errors", sum(seen[links])
