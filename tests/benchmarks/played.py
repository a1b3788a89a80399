"""Worlds with known answers, for the player of benchmarks/known/player.py.

Owns the arithmetic between what a board does and what its counters show, written down here from NVIDIA's data sheet
alone: nothing of what is tested is used.
"""

import json
from pathlib import Path
from typing import Any

PEAK, REFERENCE_MHZ, BANDWIDTH = 989.4e12, 1830, 3.35e12
"""An H100 SXM: dense BF16 FLOP/s, the clock they hold at, bytes a second."""
RATIO = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
_SIGNALS = "util gr sm occ tensor dram fp64 fp32 fp16 int pcie_tx pcie_rx nvlink_tx nvlink_rx"
IDLE = "; ".join(f"{name} 0" for name in _SIGNALS.split())
PRODUCTS = [
    (f"{dtype}_{size}", dtype)
    for dtype, sizes in (
        ("bf16", (1024, 2048, 4096, 8192, 16384)),
        *((d, (4096, 8192, 16384)) for d in RATIO if d != "bf16"),
    )
    for size in sizes
]


def says(text: str) -> list[str]:
    """Lines about GPU 0: "gr 100; sm 50"."""
    return [f"gpu 0 {part.strip()}" for part in text.split(";")]


def load(text: str, *, seconds: float = 6.0, settle: float = 1.0, **did: float) -> dict[str, Any]:
    """Play a load: it warms up for 1.5 s, and after a first second does `did` a second until its last second.

    What the counters show in the first and the last second is far from true, and so is what it claims of them: a
    measurement that counts either is wrong. `seconds` are left to measure when it has settled.
    """
    wrong = {"flops": 3e15, "bytes": 9e12, "launches": 9, "busy": 0.1}
    lasted = settle - 1 + seconds
    steady = {name: rate * lasted for name, rate in did.items()}
    return {
        "phases": [
            {"seconds": 1.5, "says": says("gr 50; sm 50; tensor 50; dram 50")},
            {"seconds": 1.0, "says": says("gr 77; sm 77; tensor 33; dram 11"), "lap": wrong},
            {"seconds": lasted, "says": says(text), "lap": steady},
            {"seconds": 1.0, "says": says("gr 20; sm 9; tensor 7; dram 99"), "lap": wrong},
        ]
    }


def product(
    dtype: str, *, tensor: float = 60.0, mhz: int = 1525, duty: float = 1.0, off: float = 0.0
) -> dict[str, Any]:
    """Play a product: `tensor` per cent of the pipes are busy while it runs, and its OFU reads `off` points wrong."""
    clock = mhz / REFERENCE_MHZ
    flops = tensor / 100 * clock * duty * PEAK * RATIO[dtype]
    shown = tensor * duty + off / clock
    text = f"gr {100 * duty}; sm {96 * duty}; tensor {shown}; dram {20 * duty}; sm_mhz {mhz}; power_mw 600000; util 100"
    return load(text, flops=flops, launches=100, busy=duty)


def exact() -> dict[str, Any]:
    """A world whose counters are right, all loads of it."""
    spin = "gr 100; sm 100; power_mw 120000"
    return {
        "no_context": {"phases": [{"seconds": 8.0, "lap": {}}]},
        "idle_context": {"phases": [{"seconds": 8.0, "says": says("power_mw 110000"), "lap": {}}]},
        "spin": load(spin, settle=7.0, busy=1.0),
        "spin_one_block": load(f"gr 100; sm {100 / 132}; power_mw 112000", settle=7.0, busy=1.0),
        "small_kernels": load("gr 50; sm 0.4; power_mw 130000", settle=91.0, busy=0.5, launches=1e4),
        "copy": load("gr 100; sm 100; dram 93; power_mw 400000", bytes=0.93 * BANDWIDTH, busy=1.0),
        "copy_kernel": load("gr 100; sm 100; dram 92.5; power_mw 420000", bytes=0.925 * BANDWIDTH, busy=1.0),
        "mma": load(
            "gr 100; sm 100; tensor 62; sm_mhz 1980; power_mw 500000; util 100",
            flops=0.62 * 1980 / REFERENCE_MHZ * PEAK,
            busy=1.0,
        ),
        **{name: product(dtype) for name, dtype in PRODUCTS},
        "bf16_4096_gaps": product("bf16", duty=0.5),
        "bf16_8192_gaps": product("bf16", duty=0.5, mhz=1980),
        "fp8_8192_gaps": product("fp8", duty=0.5),
        "bf16_8192_often": product("bf16"),
        "transformer": product("bf16", tensor=45),
    }


def write(folder: Path, loads: dict[str, Any], *world: str) -> Path:
    """Write a player's file; `world` adds lines that hold always."""
    lines = ["count 1", "gpu 0 idle", *says(IDLE), "gpu 0 power_mw 80000", "gpu 0 sm_mhz 1980", *world]
    file = folder / "played.json"
    file.write_text(
        json.dumps({"script": str(folder / "script"), "world": lines, "multiprocessors": 132, "loads": loads})
    )
    return file
