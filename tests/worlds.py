"""Hand-made worlds for tests: boards, readings and observations with few words. Knows nothing of the core's rules."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from exporter.core.model import PPM, Allocation, Device, Observation, Owner, Process, Reading, Spec

S = 1_000_000_000
H100 = Spec(
    name="H100",
    peak_flops=989.4e12,
    tensor_reference_clock_hz=1830e6,
    memory_bandwidth_bytes_per_second=3350e9,
    nvlink_bytes_per_second=450e9,
    pcie_bytes_per_second=64e9,
    idle_context_watts=110.0,
    dram_ceiling=0.92,
)
JOB = Owner(job_id="41", user="ada", account="nlp", scheduler="slurm")
SOMEBODY = (Process(4242, 1 << 30),)
WORKING: dict[str, Any] = {
    "gr_engine_active": 0.95,
    "sm_active": 0.8,
    "tensor_active": 0.45,
    "dram_active": 0.4,
    "fp32_active": 0.05,
    "pcie_tx_bytes_per_second": 1e8,
    "pcie_rx_bytes_per_second": 1e8,
    "nvlink_tx_bytes_per_second": 0.0,
    "nvlink_rx_bytes_per_second": 0.0,
    "gpu_utilization": 1.0,
    "power_watts": 600.0,
    "enforced_power_limit_watts": 700.0,
    "sm_clock_hz": 1830e6,
    "processes": SOMEBODY,
}
"""A busy second at the reference clock."""
RESTING: dict[str, Any] = WORKING | dict.fromkeys(
    ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active", "gpu_utilization",
     "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"), 0.0,
) | {"power_watts": 112.0}  # fmt: skip
"""A context, no kernel."""
SPINNING: dict[str, Any] = RESTING | {
    "gr_engine_active": 1.0, "sm_active": 0.1, "gpu_utilization": 1.0, "power_watts": 130.0,
}  # fmt: skip
"""A kernel that polls for ever."""


def device(uuid: str = "GPU-0", index: str = "0", **changes: Any) -> Device:
    board: dict[str, Any] = {"model": "NVIDIA H100 80GB HBM3", "spec": H100}
    return Device(uuid, index, **(board | changes))


def cut(*slices: int, board: str = "GPU-0", of: int = 7, **changes: Any) -> tuple[Device, ...]:
    """A board in MIG mode: what is left of it, then its instances of so many of its slices; together one GPU.

    An instance of the same size at the same place has the same UUID, as in life. No slices: a whole board again.
    """
    edges = [sum(slices[:n]) for n in range(len(slices) + 1)]
    weights = [(b * PPM) // of - (a * PPM) // of for a, b in pairwise(edges)]
    parts = [
        device(f"MIG-{board}-{a}-{k}g", f"0:{n}", weight=w, parent=board, profile=f"{k}g", **changes)
        for n, (a, k, w) in enumerate(zip(edges, slices, weights, strict=False))
    ]
    return (device(board, weight=PPM - sum(weights), **changes), *parts)


def reading(
    start: float, end: float, signals: dict[str, Any] | None = None, uuid: str = "GPU-0", **more: Any
) -> Reading:
    """`start` and `end` in seconds."""
    return Reading(
        uuid=uuid, start=round(start * S), end=round(end * S), **(WORKING if signals is None else signals) | more
    )


def held(uuid: str = "GPU-0", owner: Owner = JOB, start: float = 0.0, **more: Any) -> Allocation:
    return Allocation(uuid=uuid, owner=owner, start=round(start * S), **more)


def first(devices: Sequence[Device], allocations: Sequence[Allocation] = ()) -> Observation:
    """The observation that opens a ledger at second 0."""
    return Observation(0, 0, devices=tuple(devices), allocations=tuple(allocations))


def seen(at: float, *readings: Reading, **more: Any) -> Observation:
    return Observation(round(at * S), round(at * S), readings=readings, **more)
