"""Provides monotonic and wall-clock time, and exponential backoff."""

import threading
import time
from typing import Generic, Protocol, TypeVar

from exporter.core.model import MS


class Clock(Protocol):
    """Monotonic clock and wall clock of the host, in nanoseconds."""

    def now(self) -> int:
        """Return monotonic nanoseconds, rounded down to whole milliseconds."""
        ...

    def wall(self) -> int:
        """Return Unix nanoseconds."""
        ...

    def wait(self, until: int, stop: threading.Event) -> None:
        """Block until monotonic time `until`, or until `stop` is set."""
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


N = TypeVar("N", int, float)
_MOST_DOUBLINGS = 32


class Backoff(Generic[N]):
    """Waiting times that double with each failure, in the unit of `first` and `most`."""

    def __init__(self, first: N, most: N) -> None:
        """`first` is the wait after one failure, `most` the longest wait."""
        self._first: N = first
        self._most: N = most
        self.failures = 0
        """Failures since the last success."""

    def fail(self) -> N:
        """Count a failure and return the wait before the next try."""
        pause: N = min(self._most, self._first * 2 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return pause

    def reset(self) -> None:
        """Record a success: the next failure waits `first` again."""
        self.failures = 0
