"""Kernels of deep-learning jobs, and steps made of them. Shares are typical of an H100; each job draws its own.

Assumptions, from published profiles of transformer training: large matrix products keep the tensor pipe 65-90 % active,
fused attention 35-60 %; element-wise kernels, norms and the optimiser run at 70-90 % of the DRAM's bandwidth and
use no tensor pipe; a collective occupies 8 to 32 of 132 SMs whether it moves data or polls.
"""

from dataclasses import dataclass
from random import Random

from tests.truth.causes import HOST_OVERHEAD
from tests.truth.loads import GB, Load, collective, kernel, launch_bound, mix, wait
from tests.truth.tracks import Pattern, pattern

HOST_GAP = wait(HOST_OVERHEAD)


def gemm(rng: Random, *, nvlink: float = 0.0, pcie: float = 0.0, tensor: float | None = None) -> Load:
    """Return a large matrix product."""
    active = rng.uniform(0.65, 0.88) if tensor is None else tensor
    return kernel(
        "gemm", sm=max(rng.uniform(0.93, 0.99), active), tensor=active, dram=rng.uniform(0.2, 0.38), nvlink=nvlink,
        pcie_tx=pcie, pcie_rx=pcie, occupancy=rng.uniform(0.15, 0.3), fp32=0.02,
    )  # fmt: skip


def attention(rng: Random, *, nvlink: float = 0.0, pcie: float = 0.0) -> Load:
    """Return fused attention."""
    return kernel(
        "attention", sm=rng.uniform(0.9, 0.98), tensor=rng.uniform(0.35, 0.6), dram=rng.uniform(0.1, 0.25),
        fp32=rng.uniform(0.15, 0.3), nvlink=nvlink, pcie_tx=pcie, pcie_rx=pcie,
    )  # fmt: skip


def elementwise(rng: Random, *, nvlink: float = 0.0, pcie: float = 0.0) -> Load:
    """Return an element-wise or normalising kernel, limited by DRAM."""
    return kernel(
        "elementwise", sm=rng.uniform(0.9, 0.98), dram=rng.uniform(0.68, 0.88), memory_bound=True,
        fp32=rng.uniform(0.08, 0.2), occupancy=rng.uniform(0.5, 0.8), nvlink=nvlink, pcie_tx=pcie, pcie_rx=pcie,
    )  # fmt: skip


def optimiser(rng: Random) -> Load:
    """Return the update of the parameters, limited by DRAM."""
    return kernel(
        "optimiser", sm=rng.uniform(0.93, 0.99), dram=rng.uniform(0.78, 0.9), memory_bound=True,
        fp32=rng.uniform(0.05, 0.12), occupancy=rng.uniform(0.5, 0.85),
    )  # fmt: skip


def small_kernel(rng: Random) -> Load:
    """Return a small kernel that leaves most SMs without a warp."""
    sm = rng.uniform(0.25, 0.6)
    return kernel("small", sm=sm, tensor=sm * rng.uniform(0.1, 0.35), dram=rng.uniform(0.08, 0.25), fp32=sm * 0.1)


def nvlink_collective(rng: Random) -> Load:
    """Return a collective inside the node."""
    return collective(
        sm=rng.uniform(0.1, 0.24), dram=rng.uniform(0.1, 0.25), nvlink=rng.uniform(180, 340) * GB,
        watts=rng.uniform(10, 60),
    )  # fmt: skip


def network_collective(rng: Random, *, gigabytes: float, rdma: bool = True) -> Load:
    """Return a collective that the network limits to `gigabytes` per second and GPU, each way.

    With GPUDirect RDMA (and without it, through host memory) the same bytes cross the GPU's PCIe link.
    """
    pcie = gigabytes * GB * (1.0 if rdma else 1.1)
    return collective(
        sm=rng.uniform(0.06, 0.18), dram=rng.uniform(0.02, 0.08), nvlink=gigabytes * rng.uniform(1.0, 2.0) * GB,
        pcie=pcie, watts=rng.uniform(10, 50),
    )  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """What a training step consists of, as weights of its time on the GPU."""

    gemm: float = 0.6
    attention: float = 0.12
    elementwise: float = 0.18
    inner: float = 0.04
    """Collectives inside the forward and backward passes that nothing overlaps with."""
    gaps: float = 0.02
    """Gaps between kernels that the CPU launches too slowly."""
    optimiser: float = 0.06
    overlap_nvlink: float = 0.0
    """Bytes per second each way, overlapped with the backward pass."""
    overlap_pcie: float = 0.0
    """Bytes per second each way of GPUDirect RDMA, overlapped with the backward pass."""


def transformer_step(
    rng: Random, mixture: Mixture, inner: Load | None = None, *, tensor: float | None = None
) -> Pattern:
    """Return a step's computation: forward pass, backward pass with overlapped communication, optimiser."""
    alone = nvlink_collective(rng) if inner is None else inner
    passes = []
    for nvlink, pcie in ((mixture.overlap_nvlink * 0.3, 0.0), (mixture.overlap_nvlink, mixture.overlap_pcie)):
        passes.append(
            mix("pass", (
                (mixture.gemm, gemm(rng, nvlink=nvlink, pcie=pcie, tensor=tensor)),
                (mixture.attention, attention(rng, nvlink=nvlink, pcie=pcie)),
                (mixture.elementwise, elementwise(rng, nvlink=nvlink, pcie=pcie)),
                (mixture.inner, alone), (mixture.gaps, HOST_GAP),
            ))
        )  # fmt: skip
    rest = 1.0 - mixture.optimiser
    return pattern("step", (rest * 0.34, passes[0]), (rest * 0.66, passes[1]), (mixture.optimiser, optimiser(rng)))


def convolution_step(rng: Random) -> Pattern:
    """Return a step of an image model: convolutions, many DRAM-limited kernels, batches over PCIe."""
    images = rng.uniform(0.5, 4) * GB
    conv = kernel("conv", sm=rng.uniform(0.85, 0.96), tensor=rng.uniform(0.3, 0.55), dram=rng.uniform(0.35, 0.55),
                  pcie_rx=images)  # fmt: skip
    norm = elementwise(rng)
    work = mix("images", ((0.55, conv), (0.38, norm), (0.04, small_kernel(rng)), (0.03, HOST_GAP)))
    return pattern("step", (0.94, work), (0.06, optimiser(rng)))


def fp32_step(rng: Random) -> Pattern:
    """Return a step without tensor pipe: FP32 matrix products."""
    product = kernel("sgemm", sm=rng.uniform(0.9, 0.98), dram=rng.uniform(0.15, 0.35), fp32=rng.uniform(0.5, 0.8))
    work = mix("fp32", ((0.75, product), (0.2, elementwise(rng)), (0.05, HOST_GAP)))
    return pattern("step", (0.95, work), (0.05, optimiser(rng)))


def host_bound_step(rng: Random, busy: float) -> Pattern:
    """Return a step of small kernels that the CPU launches too slowly; `busy` is the share with a kernel."""
    work = launch_bound(small_kernel(rng), busy, cause=HOST_OVERHEAD, driver=min(1.0, busy + rng.uniform(0.1, 0.4)))
    return pattern("step", (0.97, work), (0.03, optimiser(rng)))


def decode(rng: Random, *, batch: float, gaps: float = 0.05, inner: Load | None = None, share: float = 0.0) -> Load:
    """Return token generation at a batch fill of 0 to 1: DRAM-limited, with gaps on the CPU between iterations."""
    tensor = 0.02 + 0.14 * batch
    weights = kernel("decode", sm=rng.uniform(0.8, 0.95), tensor=tensor, dram=0.62 + 0.2 * batch, memory_bound=True,
                     occupancy=rng.uniform(0.15, 0.35), fp32=0.05)  # fmt: skip
    small = kernel("sampling", sm=rng.uniform(0.15, 0.4), dram=0.1, fp32=0.05)
    parts = [(0.88 - share, weights), (0.07, small), (gaps, HOST_GAP)]
    if inner is not None and share:
        parts.append((share, inner))
    return mix("decode", parts, driver=min(1.0, 1.0 - gaps / 2))


def prefill(rng: Random) -> Load:
    """Return prompt processing: matrix products and attention."""
    return mix("prefill", ((0.68, gemm(rng)), (0.18, attention(rng)), (0.1, elementwise(rng)), (0.04, HOST_GAP)))
