"""A kernel runs, yet some SMs have no warp at all: too few blocks, long tails."""

from exporter.core.leaks.span import Span


def take(span: Span, left: int) -> int:
    """Of the slack, the share of the engine's time an SM stood empty; nothing where SM activity is not seen."""
    ev = span.ev
    if ev.sm is None or not ev.engine:
        return 0
    return int(left * (1.0 - ev.sm / ev.engine))
