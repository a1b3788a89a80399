"""The GPU waits for its input."""

from exporter.core.leaks.span import Span
from exporter.core.told import DATA
from exporter.core.track import STARVED


def take(span: Span, left: int) -> int:
    """Waiting in a reported phase; else all of it while the GPU starves: it works or waits, and input bursts in (E)."""
    told = span.told(DATA)
    if told is not None:
        return told
    return left if STARVED in span.signs else 0
