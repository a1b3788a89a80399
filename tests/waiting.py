"""Waits in real time for what another thread or process does: for a condition, with a generous limit."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 150.0
"""Seconds until a test says that nothing comes: many times what it takes on the busiest machine."""
_LONGEST_STEP = 0.5
Found = TypeVar("Found")


def wait_for(ask: Callable[[], Found | None], what: str, *, seconds: float = PATIENCE, step: float = 0.05) -> Found:
    """Ask until the answer is true, and return it; raises AssertionError naming `what`.

    It asks every `step`, later every fifth of what it has waited: asking a daemon costs both of them time.
    """
    began = time.monotonic()
    while not (found := ask()):
        waited = time.monotonic() - began
        assert waited < seconds, f"{what}: not so after {seconds:g} s"
        time.sleep(max(step, min(_LONGEST_STEP, waited / 5)))
    return found
