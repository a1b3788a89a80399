"""Summarizes API values as text for the page and the terminal: states, missing ratios, health, workload."""

from enum import Enum

from exporter.core.leaks import LAYER_OF, LEAK_NAMES
from exporter.formatting import latency, whole_percent
from exporter.web.api import GpuOut, HealthOut, ServingOut, TrainingOut, WindowOut

STATE_SYMBOLS = {
    "unavailable": "✕", "hung": "■", "unobserved": "?", "unowned": "▲", "zombie": "◌", "unallocated": "○",
    "stalled": "◐", "active": "●",
}  # fmt: skip
"""Symbol beside each state's name, so that colour is not needed; the most urgent state first."""
LAYER_BY_LEAK = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
_RECOVERY_ACTIONS = {
    1: "reset this GPU", 2: "reboot the node", 3: "drain peers", 4: "drain, then reset this GPU",
    5: "recover the IMEX domain", 6: "reset its PCIe bus", 7: "reboot the system",
}  # fmt: skip
"""NVML's recovery actions."""
_SHOWN_LATENCIES = ("ttft", "itl")


class Missing(Enum):
    """Why a ratio is null."""

    NO_DATA = "nothing was seen"
    NOT_REPORTED = "the driver does not report it"
    UNKNOWN = "no tensor signal, or a board whose peak is not known"
    UNDEFINED = "nothing to divide by"


def ratio_or_missing(window: WindowOut, name: str) -> float | Missing:
    """Return a ratio of the window (0-1), or the reason why it is null."""
    value: float | None = getattr(window, name)
    if value is not None:
        return value
    if not window.coverage:
        return Missing.NO_DATA
    if name == "driver_utilization":
        return Missing.NOT_REPORTED
    return Missing.UNKNOWN if name in ("emfu", "product") and window.leaks.get("unresolved") else Missing.UNDEFINED


def state_since(gpu: GpuOut) -> float:
    """Return since when a GPU is in its state, Unix seconds; a hang includes the time before it was confirmed."""
    return gpu.since if gpu.hung_since is None else gpu.hung_since


def seconds_in_state(gpu: GpuOut) -> float:
    """Return for how long it is in its state at the sample, as in `state_since`."""
    return gpu.state_seconds + gpu.since - state_since(gpu)


def health_problems(health: HealthOut) -> str:
    """List the known problems of a board; empty if there are none."""
    lost = health.ecc_uncorrected
    action = _RECOVERY_ACTIONS.get(health.recovery_action or 0, "see NVML")
    found = [
        f"Xid {health.last_xid}" if health.last_xid else "",
        f"driver recommends: {action}" if health.recovery_action else "",
        f"{lost} uncorrected ECC error{'s' if lost != 1 else ''}" if lost else "",
        "row remapping failed: replace the board" if health.row_remap_failed else "",
        "row remapping pending: reset the GPU" if health.row_remap_pending else "",
    ]
    return "; ".join(filter(None, found))


def training_summary(training: TrainingOut | None, *, space: str = " ") -> list[str]:
    """List the main values that a training job reports."""
    if training is None:
        return []
    facts = [
        f"step {training.step:,}" if training.step is not None else "",
        f"MFU {whole_percent(training.mfu, space=space)}" if training.mfu is not None else "",
        f"goodput {whole_percent(training.goodput, space=space)}" if training.goodput is not None else "",
        f"{training.rework_steps:,} steps repeated" if training.rework_steps else "",
    ]
    return list(filter(None, facts))


def serving_summary(serving: ServingOut | None, *, space: str = " ") -> list[str]:
    """List the main values that a job's serving engines report."""
    if serving is None:
        return []
    latencies = ((kind, value.p99) for kind, value in serving.latency_seconds.items() if kind in _SHOWN_LATENCIES)
    facts = [
        f"{serving.running:.0f} running" if serving.running is not None else "",
        f"{serving.waiting:.0f} waiting" if serving.waiting is not None else "",
        f"KV {whole_percent(serving.kv_cache, space=space)}" if serving.kv_cache is not None else "",
        *(f"{kind} p99 {latency(p99, space=space)}" for kind, p99 in latencies),
    ]
    return list(filter(None, facts))
