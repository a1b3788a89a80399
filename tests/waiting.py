"""Waits in real time for what another thread or process does: for a condition, with a generous limit."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 150.0
"""Seconds until a test says that nothing comes: many times what it takes on the busiest machine."""
Found = TypeVar("Found")


def wait_for(ask: Callable[[], Found | None], what: str, *, seconds: float = PATIENCE, step: float = 0.05) -> Found:
    """Ask every `step` until the answer is true, and return it; raises AssertionError naming `what`."""
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, f"{what}: not so after {seconds:g} s"
        time.sleep(step)
    return found
