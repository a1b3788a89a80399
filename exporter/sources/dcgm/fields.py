"""DCGM's fields: number, names of both generations, unit; and what a raw value means.

Owns the table and the blanks (dcgm_structs.h: values near the end of each type's range say that there is no value).
Refuses to know when something was measured.
"""

from enum import Enum
from math import isfinite
from types import ModuleType
from typing import Any, NamedTuple

_MIB = float(1 << 20)


class Blank(Enum):
    """Why there is no value."""

    BLANK = "blank"
    NOT_FOUND = "not_found"
    NOT_SUPPORTED = "not_supported"
    NOT_PERMISSIONED = "not_permissioned"
    UNKNOWN_FIELD = "unknown_field"


Value = float | int | str | bytes | Blank


class Field(NamedTuple):
    """One row: what it is here, its names in DCGM, the older first, and the factor to base units."""

    name: str
    aliases: tuple[str, ...]
    scale: float = 1.0

    def number(self, fields: ModuleType) -> int | None:
        """The field's id in these bindings; None where they do not have it. Later ones warn of the older names."""
        found = (getattr(fields, f"DCGM_FI_{alias}", None) for alias in reversed(self.aliases))
        return next((int(number) for number in found if number is not None), None)


RATIOS = (
    # Every value of these is taken, each over its own interval. Ratios 0-1 (dcgm_fields.h, 1001-1008).
    Field("gr_engine_active", ("PROF_GR_ENGINE_ACTIVE", "PROF_GR_ENGINE_UTIL_RATIO")),
    Field("sm_active", ("PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO")),
    Field("tensor_active", ("PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO")),
    Field("dram_active", ("PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO")),
    Field("fp64_active", ("PROF_PIPE_FP64_ACTIVE", "PROF_FP64_UTIL_RATIO")),
    Field("fp32_active", ("PROF_PIPE_FP32_ACTIVE", "PROF_FP32_UTIL_RATIO")),
    Field("fp16_active", ("PROF_PIPE_FP16_ACTIVE", "PROF_FP16_UTIL_RATIO")),
)
CYCLES = (
    # Cumulative since DCGM 4.6; there is none for the engine nor for DRAM. All are sums of cycles over the SMs.
    Field("elapsed", ("PROF_SM_CYCLES_ELAPSED_TOTAL",)),
    Field("sm_active", ("PROF_SM_CYCLES_ACTIVE_TOTAL",)),
    Field("tensor_active", ("PROF_MMA_CYCLES_ACTIVE_TOTAL",)),
    Field("fp64_active", ("PROF_FP64_CYCLES_ACTIVE_TOTAL",)),
    Field("fp32_active", ("PROF_FP32_CYCLES_ACTIVE_TOTAL",)),
    Field("fp16_active", ("PROF_FP16_CYCLES_ACTIVE_TOTAL",)),
)
RATES = (
    # Profiling fields of which the latest value is enough. Rates in bytes per second (1009-1012).
    Field("sm_occupancy", ("PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO")),
    Field("pcie_tx_bytes_per_second", ("PROF_PCIE_TX_BYTES",)),
    Field("pcie_rx_bytes_per_second", ("PROF_PCIE_RX_BYTES",)),
    Field("nvlink_tx_bytes_per_second", ("PROF_NVLINK_TX_BYTES",)),
    Field("nvlink_rx_bytes_per_second", ("PROF_NVLINK_RX_BYTES",)),
)
GAUGES = (
    Field("gpu_utilization", ("DEV_GPU_UTIL", "DEV_GPU_UTIL_RATIO"), 0.01),
    Field("power_watts", ("DEV_POWER_USAGE", "DEV_BOARD_POWER_WATTS")),
    Field("enforced_power_limit_watts", ("DEV_ENFORCED_POWER_LIMIT", "DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS")),
    Field("energy", ("DEV_TOTAL_ENERGY_CONSUMPTION",), 1e-3),
    Field("temperature_celsius", ("DEV_GPU_TEMP", "DEV_GPU_TEMP_CELSIUS")),
    Field("sm_clock_hz", ("DEV_SM_CLOCK",), 1e6),
    Field("memory_used_bytes", ("DEV_FB_USED",), _MIB),
    Field("memory_total_bytes", ("DEV_FB_TOTAL",), _MIB),
    Field("clock_event_reasons", ("DEV_CLOCKS_EVENT_REASONS", "DEV_CLOCK_THROTTLE_REASONS")),
    Field("xid", ("DEV_XID_ERRORS", "DEV_XID_ERROR")),
)
INSTANCE = ("sm_occupancy", "memory_used_bytes", "memory_total_bytes")
"""What of RATES and GAUGES exists for a MIG instance: it has no links, power or driver's utilisation of its own."""
HEALTH = (
    Field("ecc_corrected", ("DEV_ECC_SBE_VOL_TOTAL",)),
    Field("ecc_uncorrected", ("DEV_ECC_DBE_VOL_TOTAL",)),
    Field("row_remap_pending", ("DEV_ROW_REMAP_PENDING",)),
    Field("row_remap_failed", ("DEV_ROW_REMAP_FAILURE", "DEV_ROW_REMAP_FAILED")),
    Field("recovery_action", ("DEV_GET_GPU_RECOVERY_ACTION", "DEV_GPU_RECOVERY_ACTION")),
    Field("nvlink_crc_flit", ("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_FLIT_ERROR_TOTAL")),
    Field("nvlink_crc_data", ("DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_DATA_ERROR_TOTAL")),
    Field("nvlink_replay", ("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "DEV_NVLINK_REPLAY_ERROR_TOTAL")),
    Field("nvlink_recovery", ("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "DEV_NVLINK_RECOVERY_ERROR_TOTAL")),
    Field("memory_temperature_celsius", ("DEV_MEMORY_TEMP", "DEV_MEMORY_TEMP_CELSIUS")),
    Field("temperature_margin_celsius", ("DEV_GPU_TEMP_TLIMIT", "DEV_GPU_TEMP_MARGIN_CELSIUS")),
    Field("slowdown", ("DEV_SLOWDOWN_TEMP", "DEV_GPU_TEMP_SLOWDOWN_CELSIUS")),
    Field("power_smoothing", ("DEV_PWR_SMOOTHING_ENABLED",)),
)
STATIC = (
    Field("model", ("DEV_NAME", "DEV_GPU_NAME")),
    Field("index", ("DEV_NVML_INDEX",)),
    Field("uuid", ("DEV_UUID", "DEV_GPU_UUID")),
    Field("pci", ("DEV_PCI_COMBINED_ID",)),
    Field("mig", ("DEV_MIG_MODE",)),
    Field("slices", ("DEV_MIG_MAX_SLICES",)),
)
VISIBLE = Field("visible", ("DEV_CUDA_VISIBLE_DEVICES_STR", "CUDA_GPU_VISIBLE_DEVICES"))
"""How CUDA names an entity: the UUID of a MIG device."""

_STATUSES = {-6: Blank.NOT_SUPPORTED, -13: Blank.UNKNOWN_FIELD, -17: Blank.NOT_PERMISSIONED}
"""DCGM_ST_NOT_SUPPORTED, _UNKNOWN_FIELD, _NO_PERMISSION; any other status is a plain blank."""
_FP64_BLANK, _INT64_BLANK = 2.0**47, 0x7FFFFFFFFFFFFFF0
_INT32_BLANK, _INT32_LAST = 0x7FFFFFF0, 0x7FFFFFFF
_KINDS = (Blank.BLANK, Blank.NOT_FOUND, Blank.NOT_SUPPORTED, Blank.NOT_PERMISSIONED)
_TEXTS = {"<<<NOT_FOUND>>>": Blank.NOT_FOUND, "<<<NOT_SUPPORTED>>>": Blank.NOT_SUPPORTED, "<<<NOT_PERM>>>": _KINDS[3]}
_DOUBLE, _STRING, _INTEGERS = ord("d"), ord("s"), (ord("i"), ord("t"))
plain = object.__getattribute__
"""A member of one of the bindings' structures: their own access looks for classes and text in every value, and costs
a multiple."""


def decoded(raw: Any) -> Value:
    """What a c_dcgmFieldValue_v1 or _v2 says; a Blank for every way to say nothing, as a status that is not OK."""
    status = plain(raw, "status")
    if status:
        return _STATUSES.get(status, Blank.BLANK)
    kind, value = plain(raw, "fieldType"), plain(raw, "value")
    if kind == _DOUBLE:
        return _double(plain(value, "dbl"))
    if kind in _INTEGERS:
        return _integer(plain(value, "i64"))
    if kind == _STRING:
        return _text(plain(value, "str"))
    return bytes(plain(value, "blob"))


def _double(value: float) -> float | Blank:
    if not isfinite(value):
        return Blank.BLANK
    return value if value < _FP64_BLANK else _kind(int(value - _FP64_BLANK))


def _integer(value: int) -> int | Blank:
    if value >= _INT64_BLANK:
        return _kind(value - _INT64_BLANK)
    if _INT32_BLANK <= value <= _INT32_LAST:
        return _kind(value - _INT32_BLANK)
    return value


def _text(value: str | bytes) -> str | Blank:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return _TEXTS.get(text, Blank.BLANK) if text.startswith("<<<") else text


def _kind(offset: int) -> Blank:
    return _KINDS[offset] if offset < len(_KINDS) else Blank.BLANK
