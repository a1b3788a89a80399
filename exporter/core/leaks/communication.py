"""Communication that nothing hides: kernels that only move data between GPUs, or wait for a peer to."""

from exporter.core.evidence import Evidence
from exporter.core.leaks.span import SLACK, Span
from exporter.core.model import PPM

LINK_BYTES_IN_DRAM = 2
"""A byte on the link is read from or written to memory about twice (E)."""


def take(span: Span) -> int:
    """Slack of a job of several GPUs: all while it spins or only communicates, else the share the link shows (E)."""
    if span.gpus == 1:
        return 0
    ev, slack = span.ev, span.pools[SLACK]
    link = _link(ev)
    if span.spinning:
        return slack
    if link is None:
        return 0
    if _only_communicates(span, link):
        return slack
    if ev.sm is None:
        return 0
    policy = span.policy
    share = min(link / policy.link_achieved, (ev.engine - ev.sm) / policy.collective_idle_sms)
    return int(share * PPM)


def _link(ev: Evidence) -> float | None:
    """Rate over one-way capacity of what joins the GPUs: NVLink, or PCIe on a board without it."""
    spec = ev.device.spec
    if spec is None:
        return None
    if spec.nvlink_bytes_per_second and "nvlink_tx_bytes_per_second" not in ev.device.lacks:
        return None if ev.nvlink is None else ev.nvlink / spec.nvlink_bytes_per_second
    rates = [rate for rate in (ev.pcie_tx, ev.pcie_rx) if rate is not None]
    return max(rates) / spec.pcie_bytes_per_second if rates and spec.pcie_bytes_per_second else None


def _only_communicates(span: Span, link: float) -> bool:
    ev, policy = span.ev, span.policy
    if ev.tensor is None or ev.dram is None or link < policy.link_busy * ev.engine:
        return False
    return ev.tensor < policy.link_tensor * ev.engine and _own_dram(ev) < policy.link_dram * ev.engine


def _own_dram(ev: Evidence) -> float:
    """DRAM activity less what the link's own traffic causes."""
    spec, dram = ev.device.spec, ev.dram or 0.0
    if spec is None or not spec.memory_bandwidth_bytes_per_second:
        return dram
    return dram - LINK_BYTES_IN_DRAM * (ev.nvlink or 0.0) / spec.memory_bandwidth_bytes_per_second
