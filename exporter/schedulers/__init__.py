"""Who holds the GPU. One file a scheduler, one row in SCHEDULERS."""

from importlib import import_module
from typing import Any, Protocol

from exporter.core.model import Allocation, Reading


class SchedulerError(Exception):
    """The scheduler could not be asked; the message says what was tried and what to do."""


class Scheduler(Protocol):
    """Says who holds each GPU. Called on the reading thread, one call at a time."""

    name: str

    def allocations(self, now: int, readings: tuple[Reading, ...]) -> tuple[Allocation, ...] | None:
        """Every allocation that still holds a GPU, or ended since the last call (with its `end`).

        None: nothing can be said yet, which is not "nobody". `now` is monotonic nanoseconds on whole milliseconds.
        Raises SchedulerError when it cannot be told.
        """
        ...

    def close(self) -> None:
        """Give back what the scheduler holds. Never raises."""
        ...


SCHEDULERS = {"processes": "exporter.schedulers.processes:open_processes"}
"""Name -> module:opener."""


def open_scheduler(name: str, config: Any) -> Scheduler:
    """Open the scheduler called `name`; raises SchedulerError with the reason and what to do."""
    module, opener = SCHEDULERS[name].split(":")
    scheduler: Scheduler = getattr(import_module(module), opener)(config)
    return scheduler
