"""The GPU waits while its state is copied to the host to be saved."""

from exporter.core.leaks.span import Span
from exporter.core.told import CHECKPOINT


def take(span: Span, left: int) -> int:
    """Waiting in a reported phase; else all while much flows from device to host and the engine hardly runs (E)."""
    told = None if span.voice is None else span.told(CHECKPOINT)
    if told is not None:
        return told
    ev, policy = span.ev, span.policy
    saving = (ev.pcie_tx or 0.0) >= policy.checkpoint_pcie_bytes_per_second
    return left if saving and ev.engine < policy.checkpoint_engine else 0
