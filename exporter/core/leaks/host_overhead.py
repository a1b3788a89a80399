"""The host cannot launch kernels fast enough: even activity, small kernels, gaps between them."""

from exporter.core.leaks.span import Span


def take(span: Span, left: int) -> int:
    """All waiting while the engine is part-busy and its kernels fill less than half the SMs (E); asked only if even."""
    ev, policy = span.ev, span.policy
    part_busy = policy.host_bound_engine_low <= ev.engine <= policy.host_bound_engine_high
    small = ev.sm is not None and ev.sm < policy.small_kernel_share * ev.engine
    return left if part_busy and small else 0
