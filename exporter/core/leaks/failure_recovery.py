"""From a restart after a failure or a preemption to the first work, and loading the state to go on from."""

from exporter.core.leaks.span import Span
from exporter.core.told import RESTORE
from exporter.core.track import BEGINNING


def take(span: Span, left: int) -> int:
    """All waiting before the first work of a job that the scheduler has restarted; and reported restoring."""
    if span.restarts and BEGINNING in span.signs:
        return left
    return span.told(RESTORE) or 0
