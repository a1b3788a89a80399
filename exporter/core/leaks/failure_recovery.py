"""From a restart after a failure or a preemption to the first work."""

from exporter.core.leaks.span import Span


def take(span: Span, left: int) -> int:
    """All waiting of a job that the scheduler has restarted; asked only before its first work."""
    return left if span.restarts else 0
