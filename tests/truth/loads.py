"""Describes what a GPU does while nothing changes: one kernel, a wait without a kernel, or a fine mixture of both.

Shares run from 0 to 1 of the time (and of the SMs, where the hardware counts SMs); rates are bytes per second from the
GPU's point of view. A `Load` contains its true causes: the tensor share becomes useful or throttled time, as the clock
decides, and `losses` divide the rest, by the nature of the kernel itself and not by any threshold on its counters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tests.truth.causes import (
    CAUSES,
    EXPOSED_COMMUNICATION,
    LOW_PARALLELISM,
    MEMORY_BOUND,
    OTHER_COMPUTE,
    UNALLOCATED,
)

GB = 1e9
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Load:
    """Activity of one GPU during a segment, with its true causes."""

    name: str
    resident: float = 0.0
    """Share of the time with a kernel resident (graphics/compute engine active)."""
    sm: float = 0.0
    """Share of SM time with at least one warp."""
    tensor: float = 0.0
    dram: float = 0.0
    occupancy: float = 0.0
    """Resident warps as a share of the maximum."""
    fp64: float = 0.0
    fp32: float = 0.0
    fp16: float = 0.0
    pcie_tx: float = 0.0
    pcie_rx: float = 0.0
    nvlink_tx: float = 0.0
    nvlink_rx: float = 0.0
    codec: float = 0.0
    """Share of the time that video encoders and decoders are busy; telemetry lacks it, power shows it."""
    driver: float = 0.0
    """Utilization as the driver sees it; gaps that are too short for its sampling count as busy."""
    watts: float = 0.0
    """Power beyond what the activities explain, such as integer pipes or polling."""
    context: bool = True
    """A process has a CUDA context: the board stays awake."""
    counts: bool = True
    """Tensor work is worth something; a hung or evading job's is not."""
    losses: tuple[tuple[str, float], ...] = ()
    """Shares of the time by cause, all but the tensor share that counts; they add up to 1 with it."""
    doubts: tuple[tuple[str, str, float], ...] = ()
    """Shares of the time for which a fair judge accepts a second cause: cause, second cause, share."""

    def __post_init__(self) -> None:
        """Refuse what no GPU can do."""
        assert -1e-9 <= self.tensor <= self.sm + 1e-9, self
        assert self.sm <= self.resident + 1e-9, self
        assert self.resident <= 1 + 1e-9, self
        assert 0 <= self.dram <= 1, self
        assert max(self.fp64, self.fp32, self.fp16) <= self.sm + 1e-9, self
        total = sum(share for _, share in self.losses) + (self.tensor if self.counts else 0.0)
        assert abs(total - 1) < 1e-9, self
        assert all(cause in CAUSES for cause, _ in self.losses), self


def _losses(**shares: float) -> tuple[tuple[str, float], ...]:
    return tuple((cause, share) for cause, share in shares.items() if share > 0)


def kernel(
    name: str,
    *,
    sm: float,
    tensor: float = 0.0,
    dram: float = 0.0,
    memory_bound: bool = False,
    occupancy: float | None = None,
    fp64: float = 0.0,
    fp32: float = 0.0,
    fp16: float = 0.0,
    pcie_tx: float = 0.0,
    pcie_rx: float = 0.0,
    nvlink: float = 0.0,
    watts: float = 0.0,
) -> Load:
    """Return a kernel that computes and stays resident; `nvlink` is traffic each way that it overlaps with."""
    rest = MEMORY_BOUND if memory_bound else OTHER_COMPUTE
    return Load(
        name=name, resident=1.0, sm=sm, tensor=tensor, dram=dram, fp64=fp64, fp32=fp32, fp16=fp16, driver=1.0,
        occupancy=sm * 0.4 if occupancy is None else occupancy, pcie_tx=pcie_tx, pcie_rx=pcie_rx, nvlink_tx=nvlink,
        nvlink_rx=nvlink, watts=watts, losses=_losses(**{LOW_PARALLELISM: 1.0 - sm, rest: sm - tensor}),
    )  # fmt: skip


def collective(
    name: str = "collective",
    *,
    sm: float = 0.15,
    dram: float = 0.1,
    nvlink: float = 0.0,
    pcie: float = 0.0,
    watts: float = 20.0,
) -> Load:
    """Return a collective kernel alone; `nvlink` and `pcie` are its traffic each way."""
    return Load(
        name=name, resident=1.0, sm=sm, dram=dram, occupancy=sm * 0.3, driver=1.0, nvlink_tx=nvlink, nvlink_rx=nvlink,
        pcie_tx=pcie, pcie_rx=pcie, watts=watts, losses=((EXPOSED_COMMUNICATION, 1.0),),
    )  # fmt: skip


def spin(
    cause: str = EXPOSED_COMMUNICATION,
    *,
    sm: float = 0.12,
    watts: float = 20.0,
    dram: float = 0.002,
    pcie: float = 0.0,
    doubt: str = "",
) -> Load:
    """Return a kernel that polls for a peer; all of it is lost to `cause`, or as fairly to `doubt`."""
    return Load(
        name=f"spin:{cause}", resident=1.0, sm=sm, dram=dram, occupancy=sm * 0.3, driver=1.0, pcie_tx=pcie,
        pcie_rx=pcie, watts=watts, losses=((cause, 1.0),), doubts=((cause, doubt, 1.0),) if doubt else (),
    )  # fmt: skip


def wait(
    cause: str,
    *,
    pcie_tx: float = 0.0,
    pcie_rx: float = 0.0,
    dram: float = 0.0,
    nvlink: float = 0.0,
    codec: float = 0.0,
    watts: float = 0.0,
    context: bool = True,
    doubt: str = "",
) -> Load:
    """Return time without a kernel; copy engines may move data meanwhile."""
    return Load(
        name=f"wait:{cause}", pcie_tx=pcie_tx, pcie_rx=pcie_rx, dram=dram, nvlink_tx=nvlink, nvlink_rx=nvlink,
        codec=codec, watts=watts, context=context, losses=((cause, 1.0),),
        doubts=((cause, doubt, 1.0),) if doubt else (),
    )  # fmt: skip


UNUSED = wait(UNALLOCATED, context=False)
"""No job holds the GPU."""


def worthless(load: Load, cause: str) -> Load:
    """Return the same activity with all its time lost to `cause`, its tensor work included."""
    return replace(load, name=f"{load.name}:{cause}", counts=False, losses=((cause, 1.0),), doubts=())


_SUMS = (
    "resident", "sm", "tensor", "dram", "occupancy", "fp64", "fp32", "fp16", "pcie_tx", "pcie_rx", "nvlink_tx",
    "nvlink_rx", "codec", "driver", "watts",
)  # fmt: skip


def mix(name: str, parts: Iterable[tuple[float, Load]], *, driver: float | None = None) -> Load:
    """Return the mean of loads that alternate faster than a millisecond; weights need not add up to 1."""
    chosen = [(weight, load) for weight, load in parts if weight > 0]
    total = sum(weight for weight, _ in chosen)
    shares = [(weight / total, load) for weight, load in chosen]
    sums = {field: sum(share * getattr(load, field) for share, load in shares) for field in _SUMS}
    losses: dict[str, float] = {}
    doubts: dict[tuple[str, str], float] = {}
    for share, load in shares:
        for cause, part in load.losses:
            losses[cause] = losses.get(cause, 0.0) + share * part
        for cause, second, part in load.doubts:
            doubts[cause, second] = doubts.get((cause, second), 0.0) + share * part
    if driver is not None:
        sums["driver"] = driver
    return Load(
        name=name,
        losses=tuple(losses.items()),
        doubts=tuple((cause, second, share) for (cause, second), share in doubts.items()),
        context=all(load.context for _, load in shares),
        counts=all(load.counts for _, load in shares),
        **_clipped(sums),
    )


def _clipped(sums: Mapping[str, float]) -> dict[str, float]:
    """Rounding of a mean must not break the order of the shares."""
    result = dict(sums)
    result["resident"] = min(1.0, result["resident"])
    result["driver"] = min(1.0, result["driver"])
    return result


def launch_bound(work: Load, busy: float, *, cause: str, driver: float) -> Load:
    """Return small kernels with gaps: `busy` is the share of the time with a kernel, gaps are lost to `cause`."""
    return mix(f"small {work.name}", ((busy, work), (1.0 - busy, wait(cause))), driver=driver)
