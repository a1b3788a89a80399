"""What a detector may look at, and the four pools it may take from."""

from msgspec import Struct

from exporter.core.evidence import YES, Evidence
from exporter.core.model import State
from exporter.core.policy import Policy
from exporter.core.told import Voice
from exporter.core.track import NO_SIGNS

WAIT, SLACK, CLOCK, TENSOR, UNRESOLVED = range(5)
"""Waiting (no kernel); a kernel without tensor work; tensor time lost to the clock; tensor time at full clock;
kernel time whose worth cannot be known."""
SPEAKS = "speaks"
"""The sign of a stretch whose owner, or the owner's serving engine, says what it does."""
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
    ms: int = 0
    """How long it lasts; needed where somebody speaks."""
    voice: Voice | None = None
    """What the owner says of itself, while that holds."""
    model: int | None = None
    """What of the tensor work is known to be that of steps, repeated ones included, ppm; None: nobody says."""
    surplus: int = 0
    """What of the GPU its owner has never needed, parts per million of the whole stretch."""

    def told(self, balance: int) -> int | None:
        """What the owner's word still covers, ppm; None: it has never said anything of that."""
        voice = self.voice
        return None if voice is None or balance not in voice.speaks else voice.can(balance, self.ms)

    @property
    def spinning(self) -> bool:
        """The kernel only waits for a peer."""
        return self.ev.spin == YES
