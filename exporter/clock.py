"""Provides the monotonic clock for arithmetic, the wall clock for people, and a clock that tests advance by hand.

Also `Backoff`: how long to wait before whatever failed is tried again.
"""

import threading
import time
from typing import Generic, Protocol, TypeVar

from exporter.core.model import MS


class Clock(Protocol):
    """Both clocks of the host, in nanoseconds, and the way to wait."""

    def now(self) -> int:
        """Monotonic nanoseconds on whole milliseconds."""
        ...

    def wall(self) -> int:
        """Unix nanoseconds."""
        ...

    def wait(self, until: int, stop: threading.Event) -> None:
        """Return at monotonic `until`, or as soon as `stop` is set."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC and CLOCK_REALTIME (clock_gettime(2)): the first never steps, the second may."""

    def now(self) -> int:
        """See Clock."""
        return time.monotonic_ns() // MS * MS

    def wall(self) -> int:
        """See Clock."""
        return time.time_ns()

    def wait(self, until: int, stop: threading.Event) -> None:
        """See Clock."""
        stop.wait(max(0.0, (until - time.monotonic_ns()) / 1e9))


class JumpClock:
    """A clock that stands still until somebody waits, then jumps: whole days pass in a test at once."""

    def __init__(self, start: int = 0, wall: int = 1_700_000_000_000_000_000) -> None:
        self._now, self._offset = start, wall - start

    def now(self) -> int:
        """See Clock."""
        return self._now // MS * MS

    def wall(self) -> int:
        """See Clock."""
        return self._now + self._offset

    def wait(self, until: int, stop: threading.Event) -> None:
        """Jump to `until` at once."""
        if not stop.is_set():
            self._now = max(self._now, until)

    def step_wall(self, nanoseconds: int) -> None:
        """Do what NTP or an operator does: move the wall clock alone."""
        self._offset += nanoseconds


N = TypeVar("N", int, float)
_MOST_DOUBLINGS = 32


class Backoff(Generic[N]):
    """Pauses that double with each failure, in the unit of `first` and `most`."""

    def __init__(self, first: N, most: N) -> None:
        """`first` is the pause after one failure, `most` the longest."""
        self._first: N = first
        self._most: N = most
        self.failures = 0
        """Since the last success."""

    def fail(self) -> N:
        """Count a failure; give the pause before the next try."""
        pause: N = min(self._most, self._first * 2 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return pause

    def reset(self) -> None:
        """Start again with the first pause."""
        self.failures = 0
