"""What a detector may look at, and the four pools it may take from."""

from msgspec import Struct

from exporter.core.evidence import YES, Evidence
from exporter.core.model import State
from exporter.core.policy import Policy
from exporter.core.track import NO_SIGNS

WAIT, SLACK, CLOCK, TENSOR, UNRESOLVED = range(5)
"""Waiting (no kernel); a kernel without tensor work; tensor time lost to the clock; tensor time at full clock;
kernel time whose worth cannot be known."""
POOLS = ("wait", "slack", "clock", "tensor", "unresolved")


class Span(Struct, gc=False):
    """One owner's part of a stretch of one GPU's time, in one state."""

    ev: Evidence
    state: State
    policy: Policy
    pools: list[int]
    """What each pool holds, parts per million of the whole stretch; pouring empties them."""
    whole: int
    """This owner's share of the stretch, parts per million."""
    gpus: int = 1
    restarts: int = 0
    signs: frozenset[str] = NO_SIGNS

    @property
    def spinning(self) -> bool:
        """The kernel only waits for a peer."""
        return self.ev.spin == YES
