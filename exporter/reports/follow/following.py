"""Logs, followed in a thread of their own.

Owns the thread. It looks once each time that `take` is called: about once a second. A file system that hangs stops
this thread, and nobody else.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from exporter.clock import Clock
from exporter.config import Config, Follow
from exporter.reports.follow.watching import Watch
from exporter.reports.message import Followed
from exporter.workloads import Guest

log = logging.getLogger(__name__)
KEPT = 4096
"""Messages that wait to be taken; the oldest are dropped."""
_WAIT_SECONDS = 5.0


class Followers:
    """What the logs of the jobs here say. Without rows it does nothing, and has no thread."""

    def __init__(self, rows: Sequence[Follow], clock: Clock, *, proc: str = "/proc") -> None:
        self._watch, self._clock = Watch(rows, proc=proc), clock
        self._counts = dict(self._watch.counts)
        self._found: deque[Followed] = deque(maxlen=KEPT)
        self._guests: tuple[Guest, ...] = ()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-followers", daemon=True)
        if rows:
            self._thread.start()

    def take(self, _now: int, guests: Sequence[Guest]) -> tuple[Followed, ...]:
        """All that was found since the last call; the next look is for these guests' logs. Does not wait."""
        with self._lock:
            self._guests = tuple(guests)
            found = tuple(self._found)
            self._found.clear()
        self._wake.set()
        return found

    def counts(self) -> Mapping[str, int]:
        """Since the start, by kind: see `watching.COUNTS`, which are all there are."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the thread and close the files; gives up waiting for a file system that hangs."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)
        if not self._thread.is_alive():
            self._watch.close()

    def _run(self) -> None:
        while self._wake.wait() and not self._stop.is_set():
            self._wake.clear()
            with self._lock:
                guests = self._guests
            found = self._watch.look(self._clock.now(), wall=self._clock.wall(), guests=guests)
            with self._lock:
                lost = max(0, len(self._found) + len(found) - KEPT)
                self._watch.counts["log_dropped"] += lost
                self._found.extend(found)
                self._counts = dict(self._watch.counts)


def open_followers(config: Config, clock: Clock) -> Followers:
    """Follow what the configuration's rows name."""
    for index, row in enumerate(config.follow):
        if row.path and "{job_id}" not in row.path:
            log.warning(
                "follow[%d].path %r has no {job_id}: nothing tells whose log it is, none is read", index, row.path
            )
    return Followers(config.follow, clock, proc=config.host.proc)
