"""Time. Monotonic for all arithmetic, wall for people; a clock one can turn by hand for tests."""

import threading
import time
from typing import Protocol

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
