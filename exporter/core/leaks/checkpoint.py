"""The GPU waits while its state is copied to the host to be saved."""

from exporter.core.leaks.span import Span


def take(span: Span, left: int) -> int:
    """All waiting while much flows from device to host and the engine hardly runs (E)."""
    ev, policy = span.ev, span.policy
    saving = (ev.pcie_tx or 0.0) >= policy.checkpoint_pcie_bytes_per_second
    return left if saving and ev.engine < policy.checkpoint_engine else 0
