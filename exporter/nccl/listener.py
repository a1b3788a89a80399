"""Runs the thread that reads the files of NCCL's profiler plugins, and passes its reports on to the agent.

The files are polled once for each call of `poll`, about once a second. A file system that hangs blocks only this
thread.
"""

import threading
from collections import deque
from collections.abc import Sequence

from exporter.clock import Clock
from exporter.config import Config
from exporter.core.model import CollectiveReport
from exporter.nccl.files import PREFIX, CollectiveWatcher
from exporter.worker import Worker
from exporter.workloads import ProcessLookup, WorkloadProcess, WorkloadUpdate

MOST_PENDING = 4096
"""Maximum length of the queue; the oldest reports are dropped."""
_WAIT_SECONDS = 5.0


class CollectiveListener:
    """The `WorkloadListener` of communication that plugins time."""

    def __init__(self, clock: Clock, *, proc: str = "/proc") -> None:
        self._watcher, self._clock = CollectiveWatcher(proc=proc), clock
        self._counts: tuple[tuple[str, int], ...] = ()
        self._pending: deque[CollectiveReport] = deque(maxlen=MOST_PENDING)
        self._processes: tuple[WorkloadProcess, ...] = ()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._worker = Worker("nccl-files", self._run, stop=self._stop)
        self._worker.start()

    def poll(self, now: int, processes: Sequence[WorkloadProcess], lookup: ProcessLookup) -> WorkloadUpdate:  # noqa: ARG002  the protocol's
        """See `WorkloadListener.poll`: reports since the last call; the thread then reads for these processes."""
        with self._lock:
            self._processes = tuple(processes)
            found, counts = tuple(self._pending), self._counts
            self._pending.clear()
        self._wake.set()
        return WorkloadUpdate(collectives=found, faults=self._worker.faults("listening_failed"), counts=counts)

    def close(self) -> None:
        """Stop the thread and close the files; gives up after 5 s if a file system hangs."""
        self._stop.set()
        self._wake.set()
        self._worker.join(_WAIT_SECONDS)
        if not self._worker.alive:
            self._watcher.close()

    def _run(self) -> None:
        while self._wake.wait() and not self._stop.is_set():
            self._wake.clear()
            with self._lock:
                processes = self._processes
            found = self._watcher.poll(self._clock.now(), wall=self._clock.wall(), processes=processes)
            counts = self._watcher.counts
            with self._lock:
                counts[f"{PREFIX}_reports_dropped"] += max(0, len(self._pending) + len(found) - MOST_PENDING)
                self._pending.extend(found)
                self._counts = tuple((name, count) for name, count in counts.items() if count)


def open_collectives(config: Config, clock: Clock) -> CollectiveListener:
    """Read the files of plugins in the processes of the node's jobs."""
    return CollectiveListener(clock, proc=config.host.proc)
