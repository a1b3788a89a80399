"""Nobody uses what is allocated: a zombie's waiting, and a server's to which nobody sends a request."""

from exporter.core.leaks.span import WAIT, Span
from exporter.core.model import State


def take(span: Span, left: int) -> int:
    """All waiting; of a server that polls for requests by a kernel also that kernel's time."""
    if span.voice is not None and span.voice.shares.no_demand:
        return left if span.spinning else span.pools[WAIT]
    return span.pools[WAIT] if span.state is State.ZOMBIE else 0
