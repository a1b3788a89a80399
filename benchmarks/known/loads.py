"""LOADS: every known load, one row each, in the order in which they run.

Owns what runs, for how long, and what a right ledger must say of it. Refuses to know how it is run or read.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

HANG_SECONDS = 5.0
"""The ledger of this measurement calls a spin hung after so long, so that nobody waits the daemon's five minutes."""
_MINUTE = 60.0


class Load(Struct, frozen=True, kw_only=True):
    """One row. Seconds are those of the load itself; its first `settle` and its last second are not compared."""

    name: str
    kind: Literal["nobody", "idle", "spin", "storm", "copy", "copy_kernel", "mma", "product", "transformer"]
    seconds: float = 8.0
    warm: float = 1.5
    """Before that, told of by nobody: clocks rise, libraries choose their kernels."""
    settle: float = 1.0
    state: str = "active"
    """What the ledger must call it."""
    dtype: str = ""
    size: int = 0
    blocks: int = 0
    """0: two on every SM."""
    duty: float = 1.0
    """Share of the time a kernel runs."""
    interval: float = 1.0
    """Seconds between two samples."""
    power_share: float = 0.0
    """Of the enforced power limit, set while it runs; 0: the limit stays."""
    clock_share: float = 0.0
    """Of the tensor reference clock, likewise."""
    large: bool = False
    """A large product without gaps: the target is held against these."""
    quick: bool = False
    """Runs with --quick too."""

    @property
    def changes_board(self) -> bool:
        """Does it set a limit of the board?"""
        return bool(self.power_share or self.clock_share)


def _product(dtype: str, size: int, *, quick: bool = False) -> Load:
    name = f"{dtype}_{size}"
    return Load(name=name, kind="product", dtype=dtype, size=size, large=size >= LARGE, quick=quick)


LARGE = 4096
"""From this size on a product fills any board of today, so that nothing but the product is measured."""

LOADS: tuple[Load, ...] = (
    Load(name="no_context", kind="nobody", state="stalled", quick=True),
    Load(name="idle_context", kind="idle", state="stalled", quick=True),
    Load(name="spin", kind="spin", state="hung", seconds=9 + HANG_SECONDS, settle=2 + HANG_SECONDS, quick=True),
    Load(name="spin_one_block", kind="spin", state="hung", blocks=1, seconds=9 + HANG_SECONDS, settle=2 + HANG_SECONDS),
    # host_overhead is booked once a minute, at least half of it seen, was found even: 89 s at worst.
    Load(name="small_kernels", kind="storm", blocks=1, seconds=10 + 1.5 * _MINUTE, settle=1 + 1.5 * _MINUTE),
    Load(name="copy", kind="copy", quick=True),
    Load(name="copy_kernel", kind="copy_kernel"),
    Load(name="mma", kind="mma", dtype="bf16", quick=True),
    Load(name="mma_power_capped", kind="mma", dtype="bf16", power_share=0.6),
    Load(name="mma_clock_locked", kind="mma", dtype="bf16", clock_share=0.6),
    *(_product("bf16", size, quick=size == 2 * LARGE) for size in (1024, 2048, 4096, 8192, 16384)),
    *(_product("fp16", size) for size in (4096, 8192, 16384)),
    *(_product("tf32", size) for size in (4096, 8192, 16384)),
    *(_product("fp8", size, quick=size == 2 * LARGE) for size in (4096, 8192, 16384)),
    Load(name="bf16_4096_gaps", kind="product", dtype="bf16", size=4096, duty=0.5),
    Load(name="bf16_8192_gaps", kind="product", dtype="bf16", size=8192, duty=0.5),
    Load(name="fp8_8192_gaps", kind="product", dtype="fp8", size=8192, duty=0.5),
    # 110 ms: GPM wants 100 ms between two samples, and a sample may be taken a little late.
    Load(name="bf16_8192_often", kind="product", dtype="bf16", size=8192, interval=0.11),
    Load(name="transformer", kind="transformer", dtype="bf16", seconds=10),
)


def chosen(*, quick: bool, only: Sequence[str]) -> tuple[Load, ...]:
    """Give the loads to run, in the table's order. Raises LookupError naming what is no load."""
    names = {load.name for load in LOADS}
    unknown = [name for name in only if name not in names]
    if unknown:
        raise LookupError(f"{', '.join(unknown)}: no such load; there are {', '.join(load.name for load in LOADS)}")
    return tuple(load for load in LOADS if (load.name in only if only else load.quick or not quick))


def seconds_of(loads: Sequence[Load]) -> float:
    """Give about how long they take: with each, a moment to see that it is over."""
    return sum(load.warm + load.seconds + 1.5 for load in loads)
