"""The engine's clock and ours: it stamps with the wall clock, we account in monotonic time.

Owns the translation and the noticing of a wall clock that was set. Refuses to know what that costs.
"""

from exporter.clock import Clock
from exporter.core.model import MS

STEP_MS = 500
"""A wall clock that moves this much against the monotonic one was set, not disciplined."""
_LOOKS = 3


class Clocks:
    """Translates by the difference of the two clocks as it was at the last `follow`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = self._skew()
        self._floor = 0
        """Stamps before it may be from before the wall clock was set back."""

    def follow(self) -> int:
        """Take the difference anew; give the milliseconds by which the wall clock was set since, mostly 0."""
        before, self._ahead = self._ahead, self._skew()
        moved = self._ahead - before
        if moved < -STEP_MS:
            self._floor = self.stamp() - moved * 1000
        return moved if abs(moved) > STEP_MS else 0

    def now(self) -> int:
        """Monotonic nanoseconds on whole milliseconds."""
        return self._clock.now()

    def stamp(self) -> int:
        """Now, as the engine stamps its values: microseconds since 1970."""
        return self._clock.wall() // 1000

    def since(self, back: int = 0) -> int:
        """Stamp from which values can be believed to be of now, or of up to `back` microseconds ago.

        When the clock was set back, the engine samples nothing until it has passed its last stamps, and what it stamps
        then cannot be told from what it stamped before.
        """
        return max(self.stamp() - back, self._floor)

    def stamped(self, now: int) -> int:
        """A monotonic time as the engine would stamp it."""
        return (now // MS + self._ahead) * 1000

    def host(self, stamp: int) -> int:
        """An engine's stamp as monotonic nanoseconds on whole milliseconds."""
        return (stamp // 1000 - self._ahead) * MS

    def _skew(self) -> int:
        """Milliseconds by which the wall clock is ahead.

        Whoever is put to sleep between the two clocks makes it look less: the largest of a few is the truest.
        """
        return max((self._clock.wall() - self._clock.now()) // MS for _ in range(_LOOKS))
