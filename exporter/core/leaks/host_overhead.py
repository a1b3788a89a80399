"""The host cannot launch kernels fast enough: even activity, small kernels, gaps between them."""

from exporter.core.leaks.span import WAIT, Span


def take(span: Span) -> int:
    """All waiting while the engine is evenly part-busy and its kernels fill less than half the SMs (E)."""
    ev, policy = span.ev, span.policy
    part_busy = policy.host_bound_engine_low <= ev.engine <= policy.host_bound_engine_high
    small = ev.sm is not None and ev.sm < policy.small_kernel_share * ev.engine
    return span.pools[WAIT] if span.minute.flat and part_busy and small else 0
