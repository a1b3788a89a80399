"""From an allocation to the first work: image, weights, compilation."""

from exporter.core.leaks.span import Span
from exporter.core.told import STARTUP
from exporter.core.track import BEGINNING


def take(span: Span, left: int) -> int:
    """All waiting before the first work, and what the job later calls its start-up."""
    return left if BEGINNING in span.signs else span.told(STARTUP) or 0
