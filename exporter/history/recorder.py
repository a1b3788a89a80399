"""Writes checkpoints, records of ended jobs and events to the store, in a thread of its own.

A Snapshot is saved before a scrape returns it (`checkpointed_view`), so that counters never decrease after a restart:
while the file may hold a checkpoint inside the resume window, scrapes get the latest checkpointed Snapshot.
Never blocks sampling, nor a scrape for more than a quarter of a second.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from msgspec.structs import replace

from exporter.agent.agent import Agent
from exporter.clock import Clock
from exporter.config import HistorySettings as Settings
from exporter.core.checkpoint import dump_ledger
from exporter.core.job_record import JobRecord, JobRecordQuery, NodeEvent
from exporter.core.model import NEVER, SECOND
from exporter.core.snapshot import HistoryStatus, Snapshot
from exporter.history.job_tracker import JobTracker
from exporter.history.resume import (
    HostTime,
    StartFresh,
    encode_info,
    resume_or_start_fresh,
    unclosed_books,
)
from exporter.history.store import (
    ClosedBook,
    DamagedError,
    HistoryError,
    HistoryStore,
    LockedError,
    note_unsaved,
    open_if_readable,
    open_or_replace,
)


def resume_window(settings: Settings) -> int:
    """Maximum age in ns at which a checkpoint of a daemon that crashed is resumed: two intervals, and 30 s to start."""
    return round((2 * settings.checkpoint_seconds + 30) * SECOND)


class CheckpointCoverage:
    """Tracks which Snapshot is saved in the file, and from that which Snapshot a scrape may return."""

    def __init__(self, window: int) -> None:
        self._resume_window = window
        self._checkpointed: Snapshot | None = None
        """The latest saved Snapshot."""
        self._attempted_at = NEVER
        """Time of the latest checkpoint that the file may hold: a write that seemed to fail may have succeeded."""
        self.requested_at = self.saved_at = NEVER
        """Time of the latest Snapshot that a scrape wants saved, and of the latest that is saved (monotonic ns)."""

    def inherit(self, at: int) -> None:
        """Note that the file holds a checkpoint of time `at`, written by a previous daemon."""
        self._attempted_at = at

    def attempt(self, snapshot: Snapshot, now: int) -> None:
        """Note that the file may from now on hold a checkpoint of `snapshot`, from which a restart would resume.

        Scrapes were unrestricted so far and have returned at most this Snapshot; from now on they return no less.
        """
        if self.cannot_resume(now):
            self._checkpointed = snapshot
        self._attempted_at = snapshot.at

    def succeed(self, snapshot: Snapshot) -> None:
        """Note that a checkpoint of `snapshot` was written."""
        self._checkpointed, self.saved_at = snapshot, snapshot.at

    def mark_stale(self) -> None:
        """Note that the checkpoint in the file is marked as not resumable."""
        self._attempted_at = NEVER

    def cannot_resume(self, now: int) -> bool:
        """Whether a restart now would not resume from the file, whatever it holds."""
        return now - self._attempted_at > self._resume_window

    def view(self, snapshot: Snapshot, now: int) -> Snapshot | None:
        """Return the Snapshot that a scrape may return instead of `snapshot`; None if none is saved yet."""
        if self.saved_at >= snapshot.at or self.cannot_resume(now):
            return snapshot
        return None if self._checkpointed is None else replace(self._checkpointed, meta=snapshot.meta)


MOST_QUEUED = 10_000
"""Queued job records, and likewise events; beyond it the oldest are dropped."""


class WriteBatch(NamedTuple):
    """Queued rows that one write includes."""

    job_records: tuple[JobRecord, ...]
    events: tuple[NodeEvent, ...]
    closed: tuple[ClosedBook, ...]


class WriteQueue:
    """Job records, events and closed books that are not on disk yet."""

    def __init__(self) -> None:
        self.job_records: dict[tuple[str, str, float], JobRecord] = {}
        self._events: deque[NodeEvent] = deque(maxlen=MOST_QUEUED)
        self._closed: dict[tuple[str, str], ClosedBook] = {}

    def add(
        self,
        *,
        job_records: Iterable[JobRecord] = (),
        events: Iterable[NodeEvent] = (),
        closed: Iterable[ClosedBook] = (),
    ) -> None:
        """Queue them until they are written; a job record replaces a queued record with the same key."""
        self._events.extend(events)
        self._closed |= {(book.uuid, book.life): book for book in closed}
        for record in job_records:
            self.job_records[record_key(record)] = record
        while len(self.job_records) > MOST_QUEUED:
            del self.job_records[next(iter(self.job_records))]

    def events_since(self, at: float) -> list[NodeEvent]:
        """Return queued events since Unix time `at`, the latest first."""
        return [event for event in reversed(self._events) if event.at >= at]

    def batch(self) -> WriteBatch:
        """Return everything that is queued now."""
        return WriteBatch(tuple(self.job_records.values()), tuple(self._events), tuple(self._closed.values()))

    def remove_written(self, written: WriteBatch) -> None:
        """Remove what was written from the queue; rows added since then stay queued."""
        for record in written.job_records:
            if self.job_records.get(record_key(record)) is record:
                del self.job_records[record_key(record)]
        ours = {id(event) for event in written.events}
        while self._events and id(self._events[0]) in ours:
            self._events.popleft()
        for book in written.closed:
            self._closed.pop((book.uuid, book.life), None)


def record_key(record: JobRecord) -> tuple[str, str, float]:
    """Return the key of a job record on its node: a record with the same key replaces the earlier record."""
    return record.owner.job_id, record.life, record.start


log = logging.getLogger(__name__)
CHECKPOINT_WAIT_SECONDS = 0.25
"""Longest time a scrape waits for the disk."""
_JOB_END_SECONDS = 5.0
"""Minimum interval of checkpoints that are made because jobs have ended."""
_RETRY_SECONDS = 10.0
"""Longest time before a failed write is retried."""
_DISK_TIMEOUT_SECONDS = 5.0
"""A write that takes longer is reported as failed. A shutdown waits this long for its last write."""
_TRIM_SECONDS, _NEVER = 3600.0, float("-inf")
_DAY, _MEBIBYTE = 86_400, 1 << 20


class HistoryRecorder:
    """Records one node's history in a file; failures are counted, logged and retried."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        *,
        node: str,
        boot: str,
        clock: Clock,
        ended: Callable[[JobRecord], None] = lambda _: None,
    ) -> None:
        """`boot` is the host's boot id. `ended` is called with the record of each ended job and must not block."""
        self._path, self._settings, self._clock, self._boot, self._on_end = path, settings, clock, boot, ended
        self._tracker = JobTracker(node=node, ledger_id=uuid.uuid4().hex[:12], sample_seconds=settings.sample_seconds)
        self._agent: Agent | None = None
        self._store: HistoryStore | None = None
        self._lock = threading.Lock()
        """Guards all state that the threads share. Never held during disk access; taken after the agent's lock."""
        self._wake = threading.Condition(self._lock)
        self._latest: Snapshot | None = None
        self._queue, self._coverage = WriteQueue(), CheckpointCoverage(resume_window(settings))
        self._stop = self._job_ended = self._damaged = False
        self._status = HistoryStatus(works=True, problem="nothing was written yet")
        self._writing_since: float | None = None
        """When the write in progress began (`time.monotonic`); None if there is none."""
        self._saved_at = self._durable_at = self._sampled_at = self._trimmed_at = _NEVER
        """Times of `time.monotonic`."""
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    # -- from other threads --

    def begin(self, agent: Agent) -> None:
        """Restore the agent from the store and start recording; called before the agent's first sample."""
        self._agent = agent
        self._add_event("started", "the exporter began to watch")
        self._guard(lambda: self._begin(agent))
        agent.set_history(self._on_snapshot, self.status)
        self._thread.start()

    def _begin(self, agent: Agent) -> None:
        self._store = open_or_replace(self._path)
        self._tracker, at, old_books = resume_or_start_fresh(
            self._store, agent, self._tracker, self._host_time, resume_window=resume_window(self._settings)
        )
        if at is not None:
            self._coverage.inherit(at)
        self._queue_old_books(old_books)

    def end(self) -> None:
        """Save everything and stop; called after the last observation and the last scrape."""
        with self._wake:
            self._add_event("stopped", "the exporter was told to stop")
            self._stop = True
            self._wake.notify_all()
        self._thread.join(timeout=_DISK_TIMEOUT_SECONDS)

    def checkpointed_view(self, snapshot: Snapshot) -> Snapshot | None:
        """Wait until `snapshot` is saved, and return it; if the disk is too slow, return the latest saved Snapshot.

        None if no Snapshot is saved yet.
        """
        with self._wake:
            if self._coverage.saved_at < snapshot.at and self.status().works:
                self._coverage.requested_at = max(self._coverage.requested_at, snapshot.at)
                self._wake.notify_all()
                self._wake.wait_for(
                    lambda: self._coverage.saved_at >= snapshot.at or not self._status.works, CHECKPOINT_WAIT_SECONDS
                )
            return self._coverage.view(snapshot, self._clock.now())

    def status(self) -> HistoryStatus:
        """Return the current status; a disk that does not respond counts as a failure."""
        writing, status = self._writing_since, self._status
        busy_seconds = 0.0 if writing is None else time.monotonic() - writing
        if busy_seconds < _DISK_TIMEOUT_SECONDS or not status.works:
            return status
        return replace(status, works=False, problem=f"history: {self._path}: its disk does not respond")

    def job_records(self, wanted: JobRecordQuery) -> list[JobRecord]:
        """Return records of running jobs, then of ended jobs, the latest end first."""
        with self._lock:
            running = () if self._latest is None else self._tracker.running_records(self._latest)
            found = self._queue.job_records | {record_key(record): record for record in running}
        found = {key: record for key, record in found.items() if wanted.matches(record)}
        with open_if_readable(self._path) as store:
            for record in store.job_records(wanted) if store else ():
                found.setdefault(record_key(record), record)
        return sorted(found.values(), key=lambda record: (not record.running, -record.end))[: wanted.limit]

    def events(self, since: float, limit: int) -> list[NodeEvent]:
        """Return at most `limit` events since Unix time `since`, the latest first."""
        with self._lock:
            waiting = self._queue.events_since(since)
        with open_if_readable(self._path) as store:
            return [*waiting, *(store.events(since, limit) if store else ())][:limit]

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        """Handle a new Snapshot; called on the sampler's thread, while the ledger does not change."""
        with self._wake:
            first, self._latest = self._latest is None, snapshot
            events, ended = self._tracker.update(snapshot)
            self._queue.add(job_records=ended, events=events)
            self._job_ended = self._job_ended or bool(ended)
            if ended or first:
                self._wake.notify_all()
        for record in ended:
            self._on_end(record)

    def _add_event(self, kind: str, text: str) -> None:
        self._queue.add(events=[NodeEvent(at=self._wall, kind=kind, text=text)])

    @property
    def _wall(self) -> float:
        return self._clock.wall() / SECOND

    @property
    def _host_time(self) -> HostTime:
        return HostTime(self._clock.now(), self._clock.wall(), self._boot)

    # -- the thread --

    def _run(self) -> None:
        while not self._wait_until_due():
            self._guard(self._save)
            if time.monotonic() - self._trimmed_at >= _TRIM_SECONDS:
                self._guard(self._trim)
        self._guard(lambda: self._save(clean=True))
        if self._store is not None:
            self._store.close()

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except HistoryError as err:
            self._handle_failure(err)
        except Exception as err:  # a bug of ours must not end the recording
            log.exception("history failed; please report this")
            self._handle_failure(HistoryError(f"{self._path}: {err}"))

    def _wait_until_due(self) -> bool:
        """Block until a checkpoint is due; return True if it is the last one, at shutdown."""
        with self._wake:
            while not self._stop and (seconds := self._seconds_left()) > 0:
                self._wake.wait(seconds)
            return self._stop

    def _seconds_left(self) -> float:
        """Seconds until the next checkpoint is due."""
        pace = self._settings.checkpoint_seconds
        if self._latest is None:
            return pace
        if not self._status.works:
            pace = min(pace, _RETRY_SECONDS)
        elif self._coverage.requested_at > self._coverage.saved_at:
            pace = 0.0
        elif self._job_ended:
            pace = min(pace, _JOB_END_SECONDS)
        return self._saved_at + pace - time.monotonic()

    def _save(self, *, clean: bool = False) -> None:
        """Write one checkpoint; rows that cannot be written stay queued for the next."""
        agent, began = self._agent, time.monotonic()
        if agent is None or self._latest is None:
            return
        self._writing_since = began
        try:
            self._store = store = self._open_store()
            if not self._status.works:  # the failed write may be in the file all the same: mark it stale first
                self._mark_stale(store)
            durable = clean or self._job_ended or began - self._durable_at >= self._settings.checkpoint_seconds
            sampled = clean or began - self._sampled_at >= self._settings.sample_seconds
            snapshot, state, batch = self._collect(agent, clean=clean, sampled=sampled)
            store.write(state=state, durable=durable, **batch._asdict())
            size = store.bytes
        finally:
            self._writing_since = None
        self._durable_at = began if durable else self._durable_at
        self._sampled_at = began if sampled else self._sampled_at
        self._mark_written(snapshot, batch, size)

    def _open_store(self) -> HistoryStore:
        """Return the open store; open it again if it was closed, or if the file was moved or replaced."""
        if self._store is not None and self._store.is_current:
            return self._store
        if self._store is not None:
            log.error("history: %s was moved or replaced while it was open; it is opened again", self._path)
            self._store.close()
            with self._lock:
                self._coverage.mark_stale()  # a restart does not find it there
        self._store = store = open_or_replace(self._path, damaged=self._damaged)
        self._damaged = False
        self._queue_old_books(unclosed_books(store, self._tracker, self._host_time))
        return store

    def _queue_old_books(self, old_books: StartFresh | None) -> None:
        """Queue a previous daemon's closed books, if any, for the next checkpoint."""
        if old_books is not None:
            with self._lock:
                self._queue.add(job_records=old_books.job_records, events=old_books.events, closed=old_books.closed)

    def _collect(
        self, agent: Agent, *, clean: bool, sampled: bool
    ) -> tuple[Snapshot, list[tuple[str, bytes]], WriteBatch]:
        """Collect what is to be written, all as of the same Snapshot."""
        with agent.ledger_lock, self._lock:
            snapshot, self._job_ended = cast("Snapshot", self._latest), False  # `_save` checks that there is one
            self._coverage.attempt(snapshot, self._clock.now())
            self._tracker.update_jobs(snapshot)
            info = encode_info(self._tracker.ledger_id, self._boot, clean=clean)
            state = [info, ("ledger", dump_ledger(agent.ledger)), ("tallies", self._tracker.dump_tallies())]
            if sampled:
                state.append(("courses", self._tracker.dump_samples()))
            return snapshot, state, self._queue.batch()

    def _mark_written(self, snapshot: Snapshot, written: WriteBatch, size: int) -> None:
        """Remove the written rows from the queue and wake scrapes that wait for the checkpoint."""
        with self._wake:
            self._queue.remove_written(written)
            self._coverage.succeed(snapshot)
            if not self._status.works:
                log.info("history: %s can be written again", self._path)
            self._status = replace(self._status, works=True, saved_at=self._wall, bytes=size, problem="")
            self._saved_at = time.monotonic()
            self._wake.notify_all()

    def _mark_stale(self, store: HistoryStore) -> None:
        store.write(state=[encode_info(self._tracker.ledger_id, self._boot, outrun=True)], durable=False)
        with self._lock:
            self._coverage.mark_stale()

    def _handle_failure(self, err: HistoryError) -> None:
        """Log and count the failure, wake waiting scrapes, and close the file; it is opened again at the next write.

        If still possible, the checkpoint in the file is marked stale, so that a restart does not resume from it. From
        then on scrapes get the newest Snapshot: an old value must not look live because a disk fails. Without the mark
        they get the saved one until the resume window is over: a restart might resume from it, and counters would
        decrease. Once they get newer ones, a note says until when, so that a restart does not count that time again.
        """
        if self._store is not None:
            with suppress(HistoryError):
                self._mark_stale(self._store)
        if not isinstance(err, LockedError) and (until := self._exported_until()) is not None:
            note_unsaved(self._path, until)
        with self._wake:
            if self._status.problem != f"history: {err}":
                log.error("history: %s; the daemon goes on, and tries again", err)
            self._status = replace(
                self._status, works=False, failures=self._status.failures + 1, problem=f"history: {err}"
            )
            self._saved_at = time.monotonic()
            self._wake.notify_all()
        self._damaged = isinstance(err, DamagedError)
        if self._store is not None:
            self._store.close()
            self._store = None

    def _exported_until(self) -> int | None:
        """Return until when scrapes have, or before the next write will have, values that are not saved (Unix ns)."""
        with self._lock:
            free = self._coverage.cannot_resume(self._clock.now() + round(_RETRY_SECONDS * SECOND))
            return self._latest.wall if free and self._latest is not None else None

    def _trim(self) -> None:
        """Delete rows that exceed the configured age or size."""
        self._trimmed_at, settings = time.monotonic(), self._settings
        if self._store is None:
            return
        gone = self._store.trim(
            now=self._wall,
            keep_seconds=settings.keep_days * _DAY,
            most_bytes=round(settings.max_mebibytes * _MEBIBYTE),
        )
        if gone:
            log.info("history: %d old job records and events were deleted", gone)
