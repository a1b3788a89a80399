"""From an allocation to its first work: image pulls, weights, compilation; or recovery, after a restart."""

from exporter.core.leaks.span import WAIT, Span


def take(span: Span) -> int:
    """All waiting before the first work of a job that has not been restarted."""
    return 0 if span.worked or span.restarts else span.pools[WAIT]


def take_restart(span: Span) -> int:
    """All waiting before the first work after a failure or a preemption."""
    return span.pools[WAIT] if span.restarts and not span.worked else 0
