"""What each generation of exporters calls a field, in which unit, whose it is in MIG mode, and what is no measurement.

Owns the tables of names and the blanks. Refuses lines, labels and time.
"""

_MIB = float(1 << 20)

# Figure, factor to base units, and its names: DCGM 2 to 4.6, DCGM 4.7's renames, then dcgm-exporter 1.x.
# Several rows for a figure: the first one found wins. Source: dcgm_fields.h, DCGM 1.7 to 4.7, and the
# exporter's etc/*.csv. GPU_UTIL_RATIO is a ratio (field 1613), the older name percent (field 203).
_INSTANCE = (
    ("gr_engine_active", 1.0, "PROF_GR_ENGINE_ACTIVE PROF_GR_ENGINE_UTIL_RATIO", "fi_prof_gr_engine_active"),
    ("sm_active", 1.0, "PROF_SM_ACTIVE PROF_SM_UTIL_RATIO", "fi_prof_sm_active"),
    ("sm_occupancy", 1.0, "PROF_SM_OCCUPANCY PROF_SM_OCCUPANCY_RATIO", "fi_prof_sm_occupancy"),
    ("tensor_active", 1.0, "PROF_PIPE_TENSOR_ACTIVE PROF_TENSOR_UTIL_RATIO", "fi_prof_pipe_tensor_active"),
    ("hmma", 1.0, "PROF_PIPE_TENSOR_HMMA_ACTIVE PROF_HMMA_UTIL_RATIO", ""),
    ("imma", 1.0, "PROF_PIPE_TENSOR_IMMA_ACTIVE PROF_IMMA_UTIL_RATIO", ""),
    ("dfma", 1.0, "PROF_PIPE_TENSOR_DFMA_ACTIVE PROF_DFMA_UTIL_RATIO", ""),
    ("dram_active", 1.0, "PROF_DRAM_ACTIVE PROF_DRAM_UTIL_RATIO", "fi_prof_dram_active"),
    ("fp64_active", 1.0, "PROF_PIPE_FP64_ACTIVE PROF_FP64_UTIL_RATIO", "fi_prof_pipe_fp64_active"),
    ("fp32_active", 1.0, "PROF_PIPE_FP32_ACTIVE PROF_FP32_UTIL_RATIO", "fi_prof_pipe_fp32_active"),
    ("fp16_active", 1.0, "PROF_PIPE_FP16_ACTIVE PROF_FP16_UTIL_RATIO", "fi_prof_pipe_fp16_active"),
    ("memory_used_bytes", 1.0, "DEV_FB_USED_BYTES", ""),
    ("memory_used_bytes", _MIB, "DEV_FB_USED", "fb_used"),
    ("memory_total_bytes", 1.0, "DEV_FB_CAPACITY_BYTES", ""),
    ("memory_total_bytes", _MIB, "DEV_FB_TOTAL", "fb_total"),
    ("free", 1.0, "DEV_FB_FREE_BYTES", ""),
    ("free", _MIB, "DEV_FB_FREE", "fb_free"),
    ("reserved", 1.0, "DEV_FB_RESERVED_BYTES", ""),
    ("reserved", _MIB, "DEV_FB_RESERVED", "fb_reserved"),
)
_BOARD = (
    ("power_watts", 1.0, "DEV_POWER_USAGE DEV_BOARD_POWER_WATTS", "power_usage"),
    ("power_watts", 1.0, "DEV_POWER_USAGE_INSTANT DEV_BOARD_POWER_RAW_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_ENFORCED_POWER_LIMIT DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_POWER_MGMT_LIMIT DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS", ""),
    ("energy", 1e-3, "DEV_TOTAL_ENERGY_CONSUMPTION", "total_energy_consumption"),
    ("energy", 1.0, "DEV_GPU_ENERGY_JOULES_TOTAL", ""),
    ("temperature_celsius", 1.0, "DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS", "gpu_temp"),
    ("sm_clock_hz", 1e6, "DEV_SM_CLOCK", "sm_clock"),
    ("sm_clock_hz", 1.0, "DEV_SM_CLOCK_HERTZ", ""),
    ("clock_event_reasons", 1.0, "DEV_CLOCKS_EVENT_REASONS DEV_CLOCK_THROTTLE_REASONS", ""),
    ("mig_slices", 1.0, "DEV_MIG_MAX_SLICES", ""),
    # Volatile ECC errors are those since the driver was loaded.
    ("ecc_corrected", 1.0, "DEV_ECC_SBE_VOL_TOTAL", "ecc_sbe_volatile_total"),
    ("ecc_uncorrected", 1.0, "DEV_ECC_DBE_VOL_TOTAL", "ecc_dbe_volatile_total"),
    ("row_remap_pending", 1.0, "DEV_ROW_REMAP_PENDING", ""),
    ("row_remap_failed", 1.0, "DEV_ROW_REMAP_FAILURE DEV_ROW_REMAP_FAILED", ""),
    ("recovery_action", 1.0, "DEV_GET_GPU_RECOVERY_ACTION DEV_GPU_RECOVERY_ACTION", ""),
    ("memory_temperature_celsius", 1.0, "DEV_MEMORY_TEMP DEV_MEMORY_TEMP_CELSIUS", "memory_temp"),
    ("temperature_margin_celsius", 1.0, "DEV_GPU_TEMP_LIMIT DEV_GPU_TEMP_TLIMIT DEV_GPU_TEMP_MARGIN_CELSIUS", ""),
    ("slowdown_celsius", 1.0, "DEV_SLOWDOWN_TEMP DEV_GPU_TEMP_SLOWDOWN_CELSIUS", ""),
    ("power_smoothing", 1.0, "DEV_PWR_SMOOTHING_ENABLED", ""),
    # Fields 409, 419, 429, 439; newer drivers count the same again, CRC taken together, as 497 to 499.
    *(
        (f"nvlink_{kind}", 1.0, f"DEV_NVLINK_{name}_ERROR_COUNT_TOTAL DEV_NVLINK_{name}_ERROR_TOTAL", f"nvlink_{old}")
        for kind, name, old in (
            ("crc_flit", "CRC_FLIT", "flit_crc_error_count_total"),
            ("crc_data", "CRC_DATA", "data_crc_error_count_total"),
            ("replay", "REPLAY", "replay_error_count_total"),
            ("recovery", "RECOVERY", "recovery_error_count_total"),
        )
    ),
    ("nvlink_dl_crc", 1.0, "DEV_NVLINK_ERROR_DL_CRC DEV_NVLINK_CRC_ERROR_TOTAL", ""),
    ("nvlink_dl_replay", 1.0, "DEV_NVLINK_ERROR_DL_REPLAY DEV_NVLINK_REPLAY_TOTAL", ""),
    ("nvlink_dl_recovery", 1.0, "DEV_NVLINK_ERROR_DL_RECOVERY DEV_NVLINK_RECOVERY_TOTAL", ""),
)
_WHOLE_BOARD = (
    # Rates in bytes per second whatever TYPE says: older collector files declare them counters.
    ("pcie_tx_bytes_per_second", 1.0, "PROF_PCIE_TX_BYTES", "fi_prof_pcie_tx_bytes"),
    ("pcie_rx_bytes_per_second", 1.0, "PROF_PCIE_RX_BYTES", "fi_prof_pcie_rx_bytes"),
    ("nvlink_tx_bytes_per_second", 1.0, "PROF_NVLINK_TX_BYTES", "fi_prof_nvlink_tx_bytes"),
    ("nvlink_rx_bytes_per_second", 1.0, "PROF_NVLINK_RX_BYTES", "fi_prof_nvlink_rx_bytes"),
    ("gpu_utilization", 0.01, "DEV_GPU_UTIL", "gpu_utilization"),
    ("gpu_utilization", 1.0, "DEV_GPU_UTIL_RATIO", ""),
)
_FIELDS = (*_INSTANCE, *_BOARD, *_WHOLE_BOARD)
ROWS = len(_FIELDS)
SERIES = {
    name: (figure, factor, row)
    for row, (figure, factor, names, old) in enumerate(_FIELDS)
    for name in [*(f"DCGM_FI_{n}" for n in names.split()), *(f"dcgm_{n}" for n in old.split())]
}
"""Name of a line -> figure, factor to base units, row of the table."""
OF_AN_INSTANCE = frozenset(figure for figure, *_ in _INSTANCE)
"""What a MIG instance has of its own (DCGM's fields of level GPU_I: the user guide on MIG)."""
OF_A_BOARD = frozenset(figure for figure, *_ in _BOARD)
"""What a board in MIG mode has, and DCGM tells again for each of its instances. The rest of the table is neither's:
nobody can say which instance moved the bytes."""

XID = frozenset({"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", "dcgm_xid_errors"})
"""The last critical error, for ever; many exporters have no such line before there was one."""
XID_COUNTS = ("DCGM_EXP_XID_ERRORS_TOTAL", "DCGM_EXP_XID_ERRORS_COUNT")
"""Errors by code, in the label xid: since the exporter began, or within its last window. The first is the better."""

BLANK_TEXTS = ("[N/A]", "N/A", "<<<NULL>>>", "ERROR - FAILED TO CONVERT TO STRING", "SKIPPING DCGM VALUE")
_FP64_BLANK = 2.0**47
_INT32_BLANK, _INT32_MAX = 0x7FFFFFF0, 0x7FFFFFFF
_HOT = 1000.0
_DIGITS = 9


def seen(value: float, figure: str = "") -> bool:
    """Tell a measurement from NaN and DCGM's blanks: 2^47 and up, 0x7ffffff0 to 0x7fffffff (dcgm_structs.h).

    Only the margin to the slowdown temperature may be below zero. Boards without a sensor for their memory say 0.
    """
    if figure == "temperature_margin_celsius":
        return -_HOT < value < _HOT
    if figure == "memory_temperature_celsius":
        return 0.0 < value < _HOT
    return 0.0 <= value < _FP64_BLANK and not _INT32_BLANK <= value <= _INT32_MAX


def whole_number(text: str) -> int | None:
    """Give the whole number that a label is; None when it is none, or longer than any real one."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None
