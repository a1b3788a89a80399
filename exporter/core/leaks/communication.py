"""Communication that nothing hides: kernels that only move data between GPUs, or wait for a peer to."""

from exporter.core.evidence import Evidence, busier
from exporter.core.leaks.span import Span
from exporter.core.told import COMMUNICATION

LINK_BYTES_IN_DRAM = 2
"""A byte on the link is read from or written to memory about twice (E)."""


def take(span: Span, left: int) -> int:
    """Slack of a job of several GPUs: all while it spins, else what it reports, else what the link shows (E)."""
    if span.gpus == 1:
        return 0
    if span.spinning:
        return left
    told = None if span.voice is None else span.told(COMMUNICATION)
    return _estimated(span, left) if told is None else told


def _estimated(span: Span, left: int) -> int:
    """All while it only communicates, or the share of the time that the link's traffic and idle SMs tell of."""
    ev = span.ev
    rate, capacity = _link(ev)
    if rate is None or not capacity:
        return 0
    if _only_communicates(span, rate, capacity):
        return left
    if ev.sm is None:
        return 0
    policy = span.policy
    share = min(rate / capacity / policy.link_achieved, (ev.engine - ev.sm) / policy.collective_idle_sms)
    return int(share * span.whole)


def _link(ev: Evidence) -> tuple[float | None, float | None]:
    """Rate and one-way capacity of what joins the GPUs: NVLink, or PCIe on a board without it; bytes per second."""
    spec = ev.device.spec
    if spec is None:
        return None, None
    if spec.nvlink_bytes_per_second and "nvlink_tx_bytes_per_second" not in ev.device.lacks:
        return ev.nvlink, spec.nvlink_bytes_per_second
    return busier(ev.pcie_tx, ev.pcie_rx), spec.pcie_bytes_per_second


def _only_communicates(span: Span, rate: float, capacity: float) -> bool:
    ev, policy = span.ev, span.policy
    if ev.tensor is None or ev.dram is None or rate < policy.link_busy * ev.engine * capacity:
        return False
    spec = ev.device.spec
    bandwidth = spec.memory_bandwidth_bytes_per_second if spec is not None else None
    own_dram = ev.dram - LINK_BYTES_IN_DRAM * rate / bandwidth if bandwidth else ev.dram
    return ev.tensor < policy.link_tensor * ev.engine and own_dram < policy.link_dram * ev.engine
