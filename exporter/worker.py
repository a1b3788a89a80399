"""Runs a loop in a thread of its own that begins anew after a failure, and reports that it failed.

A thread that ended silently would look like a node on which nothing happens.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from exporter.core.model import Fault

log = logging.getLogger(__name__)
AFTER_FAILURE_SECONDS = 1.0
"""Time before work that failed begins anew, so that a failure that repeats costs little."""
_NICE = 10
"""On one processor a thread that serves or samples gets nine times as much of it as one that gives way."""


def give_way() -> None:
    """Lower the priority of the calling thread, which on Linux has one of its own, below those that serve and sample.

    What it may compute for long is what others send. While it holds the interpreter's lock it has the processor all the
    same, as those who wait for the lock need none.
    """
    with suppress(OSError):  # a filter of system calls denies it
        os.nice(_NICE)


class Worker:
    """A daemon thread that calls `run` until it returns; if it raises, it is called again after a second."""

    def __init__(self, name: str, run: Callable[[], object], *, stop: threading.Event) -> None:
        """`run` returns once `stop` is set, and at once if it is set before; then it releases what it serves.

        The thread does not start yet.
        """
        self._run, self._stop = run, stop
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._error, self.failures = "", 0
        self._reported = 0

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self._thread.name

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread.ident is None:
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the thread, if it was started; one that is blocked ends with the process."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def faults(self, kind: str) -> tuple[Fault, ...]:
        """Return a fault if the thread has failed since the last call, or has ended although it was not stopped."""
        failed, self._reported = self.failures > self._reported, self.failures
        if failed:
            return (Fault(kind, f"thread {self.name} failed and began anew ({self._error}); please report this"),)
        if self._thread.ident is not None and not self.alive and not self._stop.is_set():
            return (Fault(kind, f"thread {self.name} has ended: restart the daemon, and please report this"),)
        return ()

    def _work(self) -> None:
        give_way()
        while True:
            try:
                self._run()
            except Exception as error:
                if self._error != repr(error):  # a failure that repeats every second is logged once
                    log.exception("thread %s failed and begins anew; please report this", self.name)
                self._error = repr(error)
                self.failures += 1
                if self._stop.wait(AFTER_FAILURE_SECONDS):
                    return
            else:
                return
