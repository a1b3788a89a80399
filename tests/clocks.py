"""Provides a manual clock for tests."""

import threading

from exporter.core.model import MS


class JumpClock:
    """A clock that advances only in `wait`, which returns at once: a test can simulate days."""

    def __init__(self, start: int = 0, wall: int = 1_700_000_000_000_000_000) -> None:
        self._now, self._offset = start, wall - start

    def now(self) -> int:
        """See Clock."""
        return self._now // MS * MS

    def wall(self) -> int:
        """See Clock."""
        return self._now + self._offset

    def wait(self, until: int, stop: threading.Event) -> None:
        """Advance to `until` and return at once."""
        if not stop.is_set():
            self._now = max(self._now, until)

    def step_wall(self, nanoseconds: int) -> None:
        """Step the wall clock alone, as NTP or an operator does."""
        self._offset += nanoseconds
