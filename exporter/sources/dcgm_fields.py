"""The DCGM fields that are read, shared by the sources dcgm and dcgm-exporter: names, units and use.

Sources: dcgm_fields.h, DCGM 1.7 to 4.7, and the exporter's etc/*.csv.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from exporter.core.model import Health


class Field(NamedTuple):
    """A DCGM field: our name, DCGM's names without DCGM_FI_ from old to new, and the factor to base units."""

    name: str
    aliases: tuple[str, ...]
    scale: float = 1.0
    exporter_name: str = ""
    """Metric name in dcgm-exporter 1.x, without dcgm_; empty: none."""

    def field_id(self, fields: ModuleType) -> int | None:
        """Return the field's id in these bindings; None if unknown. Tries new names first: old ones cause warnings."""
        found = (getattr(fields, f"DCGM_FI_{alias}", None) for alias in reversed(self.aliases))
        return next((int(number) for number in found if number is not None), None)


def field(name: str, aliases: str, exporter_name: str = "", *, scale: float = 1.0) -> Field:
    """Make a row of the tables; `aliases` are separated by spaces."""
    return Field(name, tuple(aliases.split()), scale, exporter_name)


MIB = float(1 << 20)

# Ratios 0-1 (1001-1008, 1016).
RATIOS = (
    field("gr_engine_active", "PROF_GR_ENGINE_ACTIVE PROF_GR_ENGINE_UTIL_RATIO", "fi_prof_gr_engine_active"),
    field("sm_active", "PROF_SM_ACTIVE PROF_SM_UTIL_RATIO", "fi_prof_sm_active"),
    field("tensor_active", "PROF_PIPE_TENSOR_ACTIVE PROF_TENSOR_UTIL_RATIO", "fi_prof_pipe_tensor_active"),
    field("dram_active", "PROF_DRAM_ACTIVE PROF_DRAM_UTIL_RATIO", "fi_prof_dram_active"),
    field("fp64_active", "PROF_PIPE_FP64_ACTIVE PROF_FP64_UTIL_RATIO", "fi_prof_pipe_fp64_active"),
    field("fp32_active", "PROF_PIPE_FP32_ACTIVE PROF_FP32_UTIL_RATIO", "fi_prof_pipe_fp32_active"),
    field("fp16_active", "PROF_PIPE_FP16_ACTIVE PROF_FP16_UTIL_RATIO", "fi_prof_pipe_fp16_active"),
    field("int_active", "PROF_PIPE_INT_ACTIVE PROF_INT_UTIL_RATIO"),
)
# Cumulative counters since DCGM 4.6, summed over the SMs; none for the graphics engine and DRAM.
CYCLES = (
    field("elapsed", "PROF_SM_CYCLES_ELAPSED_TOTAL"),
    field("sm_active", "PROF_SM_CYCLES_ACTIVE_TOTAL"),
    field("tensor_active", "PROF_MMA_CYCLES_ACTIVE_TOTAL"),
    field("fp64_active", "PROF_FP64_CYCLES_ACTIVE_TOTAL"),
    field("fp32_active", "PROF_FP32_CYCLES_ACTIVE_TOTAL"),
    field("fp16_active", "PROF_FP16_CYCLES_ACTIVE_TOTAL"),
    field("int_active", "PROF_INT_CYCLES_ACTIVE_TOTAL"),
)
# Bytes per second (1009-1012), whatever their TYPE on a page: older collector files of the exporter declare counters.
LINK_RATES = (
    field("pcie_tx_bytes_per_second", "PROF_PCIE_TX_BYTES", "fi_prof_pcie_tx_bytes"),
    field("pcie_rx_bytes_per_second", "PROF_PCIE_RX_BYTES", "fi_prof_pcie_rx_bytes"),
    field("nvlink_tx_bytes_per_second", "PROF_NVLINK_TX_BYTES", "fi_prof_nvlink_tx_bytes"),
    field("nvlink_rx_bytes_per_second", "PROF_NVLINK_RX_BYTES", "fi_prof_nvlink_rx_bytes"),
    # 1076 and 1078: headers and payload, on boards with a chip-to-chip link to a Grace CPU (GH200, GB200).
    field("c2c_tx_bytes_per_second", "PROF_C2C_TX_ALL_BYTES"),
    field("c2c_rx_bytes_per_second", "PROF_C2C_RX_ALL_BYTES"),
)
# Profiling fields of which only the latest value is read.
RATES = (field("sm_occupancy", "PROF_SM_OCCUPANCY PROF_SM_OCCUPANCY_RATIO", "fi_prof_sm_occupancy"), *LINK_RATES)
GAUGES = (
    field("gpu_utilization", "DEV_GPU_UTIL DEV_GPU_UTIL_RATIO", "gpu_utilization", scale=0.01),
    field("encoder_utilization", "DEV_ENC_UTIL", "enc_utilization", scale=0.01),
    field("decoder_utilization", "DEV_DEC_UTIL", "dec_utilization", scale=0.01),
    field("power_watts", "DEV_POWER_USAGE DEV_BOARD_POWER_WATTS", "power_usage"),
    field("enforced_power_limit_watts", "DEV_ENFORCED_POWER_LIMIT DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
    field("energy", "DEV_TOTAL_ENERGY_CONSUMPTION", "total_energy_consumption", scale=1e-3),
    field("temperature_celsius", "DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS", "gpu_temp"),
    field("sm_clock_hz", "DEV_SM_CLOCK", "sm_clock", scale=1e6),
    field("memory_used_bytes", "DEV_FB_USED", "fb_used", scale=MIB),
    field("memory_total_bytes", "DEV_FB_TOTAL", "fb_total", scale=MIB),
    field("clock_event_reasons", "DEV_CLOCKS_EVENT_REASONS DEV_CLOCK_THROTTLE_REASONS"),
    field("xid", "DEV_XID_ERRORS DEV_XID_ERROR", "xid_errors"),
)
INSTANCE = ("sm_occupancy", "memory_used_bytes", "memory_total_bytes")
"""Fields of RATES and GAUGES that exist per MIG instance; links, power and utilisation exist per board only."""
# Volatile ECC errors are counted since the driver was loaded. NVLink: fields 409, 419, 429, 439.
HEALTH = (
    field("ecc_corrected", "DEV_ECC_SBE_VOL_TOTAL", "ecc_sbe_volatile_total"),
    field("ecc_uncorrected", "DEV_ECC_DBE_VOL_TOTAL", "ecc_dbe_volatile_total"),
    field("row_remap_pending", "DEV_ROW_REMAP_PENDING"),
    field("row_remap_failed", "DEV_ROW_REMAP_FAILURE DEV_ROW_REMAP_FAILED"),
    field("recovery_action", "DEV_GET_GPU_RECOVERY_ACTION DEV_GPU_RECOVERY_ACTION"),
    *(
        field(f"nvlink_{name}", f"DEV_NVLINK_{dcgm}_ERROR_COUNT_TOTAL DEV_NVLINK_{dcgm}_ERROR_TOTAL", f"nvlink_{old}")
        for name, dcgm, old in (
            ("crc_flit", "CRC_FLIT", "flit_crc_error_count_total"),
            ("crc_data", "CRC_DATA", "data_crc_error_count_total"),
            ("replay", "REPLAY", "replay_error_count_total"),
            ("recovery", "RECOVERY", "recovery_error_count_total"),
        )
    ),
    field("memory_temperature_celsius", "DEV_MEMORY_TEMP DEV_MEMORY_TEMP_CELSIUS", "memory_temp"),
    field("temperature_margin_celsius", "DEV_GPU_TEMP_TLIMIT DEV_GPU_TEMP_MARGIN_CELSIUS"),
    field("slowdown_celsius", "DEV_SLOWDOWN_TEMP DEV_GPU_TEMP_SLOWDOWN_CELSIUS"),
    field("power_smoothing", "DEV_PWR_SMOOTHING_ENABLED"),
)
STATIC = (
    field("model", "DEV_NAME DEV_GPU_NAME"),
    field("index", "DEV_NVML_INDEX"),
    field("uuid", "DEV_UUID DEV_GPU_UUID"),
    field("pci", "DEV_PCI_COMBINED_ID"),
    field("mig", "DEV_MIG_MODE"),
    field("slices", "DEV_MIG_MAX_SLICES"),
)
UUID = STATIC[2]
VISIBLE = field("visible", "DEV_CUDA_VISIBLE_DEVICES_STR CUDA_GPU_VISIBLE_DEVICES")
"""CUDA's name of an entity. For a MIG device: its UUID, or in DCGM 3.1 to 4.6 MIG-<board>/<instance>/<compute>."""

_PLAIN: Mapping[str, Callable[[float], int]] = {
    "recovery_action": int,
    "ecc_corrected": int,
    "ecc_uncorrected": int,
    "row_remap_pending": bool,
    "row_remap_failed": bool,
    "power_smoothing": bool,
}
"""Types of the fields of `Health` that are a single value."""
_NVLINK = (
    ("nvlink_crc_flit", "nvlink_crc_data", "nvlink_replay", "nvlink_recovery"),
    ("nvlink_dl_crc", "nvlink_dl_replay", "nvlink_dl_recovery"),
)
"""Two sets of counters for the same errors: the first set with any value is used."""


def health_of(uuid: str, values: Mapping[str, float], xids: tuple[int, ...] = ()) -> Health:
    """Make a board's Health from its values by field name; what is missing is None."""
    plain: dict[str, Any] = {name: convert(values[name]) for name, convert in _PLAIN.items() if name in values}
    shown = next(filter(None, ([values[name] for name in names if name in values] for names in _NVLINK)), None)
    margin = values.get("temperature_margin_celsius")
    if margin is None and {"slowdown_celsius", "temperature_celsius"} <= values.keys():
        margin = values["slowdown_celsius"] - values["temperature_celsius"]
    return Health(
        uuid,
        xids=xids,
        nvlink_errors=None if shown is None else int(sum(shown)),
        memory_temperature_celsius=values.get("memory_temperature_celsius") or None,
        temperature_margin_celsius=margin,
        **plain,
    )
