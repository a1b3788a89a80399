"""The thread that writes: checkpoints, statements of jobs that have ended, events.

What a scrape tells is saved before it is told (`cover`): so no restart goes back behind it. Owns the order of writes,
and their pace. Refuses to hold up anybody who samples, and whoever asks for longer than a quarter of a second.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from exporter.agent import Agent
from exporter.clock import Clock
from exporter.config import History as Settings
from exporter.core.checkpoint import freeze
from exporter.core.model import SECOND
from exporter.core.snapshot import Keeping, Snapshot
from exporter.core.statement import Event, Statement, Wanted
from exporter.history.beginning import begin_beside, begun, stranger_in, told_of
from exporter.history.covering import Covered, young_of
from exporter.history.file import DamagedError, HistoryError, UnwritableError
from exporter.history.remembering import Memory
from exporter.history.resuming import Anew, Moment
from exporter.history.store import Store, opened_or_aside, readable
from exporter.history.waiting import Batch, Waiting, name_of

log = logging.getLogger(__name__)
COVER_SECONDS = 0.25
"""The longest that a scrape waits for the disk."""
_HASTE_SECONDS = 5.0
"""Between two checkpoints because jobs have ended."""
_RETRY_SECONDS = 10.0
"""After a write that failed, at most."""
_PATIENCE_SECONDS = 5.0
"""A write that takes longer is told as one that fails; and the longest that a stop waits for the last one."""
_TRIM_SECONDS, _NEVER = 3600.0, float("-inf")
_DAY, _MEBIBYTE = 86_400, 1 << 20


class History:
    """Keeps one node's history in a file; what fails is counted, told, and tried again."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        *,
        node: str,
        boot: str,
        clock: Clock,
        ended: Callable[[Statement], None] = lambda _: None,
    ) -> None:
        """`boot` names this boot of the host. `ended` is told each job that has ended; it must not block."""
        self._path, self._settings, self._clock, self._boot, self._on_end = path, settings, clock, boot, ended
        self._memory = Memory(node=node, life=uuid.uuid4().hex[:12], sample_seconds=settings.sample_seconds)
        self._agent: Agent | None = None
        self._store: Store | None = None
        self._lock = threading.Lock()
        """Over all that both threads have; never held while the disk works. An agent's comes before it."""
        self._wake = threading.Condition(self._lock)
        self._latest: Snapshot | None = None
        self._waiting, self._covered = Waiting(), Covered(young_of(settings))
        self._stop = self._ended = self._damaged = False
        self._keeping = Keeping(works=True, problem="nothing was written yet")
        self._writing: float | None = None
        """Since when the disk has been at work; None: it is not."""
        self._saved_at = self._durable_at = self._sampled_at = self._trimmed_at = _NEVER
        """By the clock of this thread."""
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    # -- from other threads --

    def begin(self, agent: Agent) -> None:
        """Give the agent what was remembered, and remember what it tells from now on; before it samples."""
        self._agent = agent
        self._happened("started", "the exporter began to watch")
        self._guarded(lambda: self._begin(agent))
        agent.remember_with(self._see, self.keeping)
        self._thread.start()

    def _begin(self, agent: Agent) -> None:
        try:
            self._store = opened_or_aside(self._path)
        except UnwritableError:
            with closing(Store(self._path, read_only=True)) as store:
                begin_beside(store, agent, self._moment, node=self._memory.node)
            raise
        self._memory, at, left = begun(self._store, agent, self._memory, self._moment, young=young_of(self._settings))
        if at is not None:
            self._covered.inherit(at)
        if left is not None:
            self._take_over(left)

    def end(self) -> None:
        """Save all that there is; after the last observation and the last scrape."""
        with self._wake:
            self._happened("stopped", "the exporter was told to stop")
            self._stop = True
            self._wake.notify_all()
        self._thread.join(timeout=_PATIENCE_SECONDS)

    def cover(self, snapshot: Snapshot) -> Snapshot | None:
        """What a scrape may be told in its place: itself, once it is saved. None: nothing yet, the disk hangs."""
        with self._wake:
            if self._covered.saved < snapshot.at and self.keeping().works:
                self._covered.asked = max(self._covered.asked, snapshot.at)
                self._wake.notify_all()
                self._wake.wait_for(
                    lambda: self._covered.saved >= snapshot.at or not self._keeping.works, COVER_SECONDS
                )
            return self._covered.of(snapshot, self._clock.now())

    def keeping(self) -> Keeping:
        """How it goes; a disk that does not answer is one that fails."""
        writing, keeping = self._writing, self._keeping
        away = 0.0 if writing is None else time.monotonic() - writing
        if away < _PATIENCE_SECONDS or not keeping.works:
            return keeping
        return replace(keeping, works=False, problem=f"history: {self._path}: its disk has not answered for a while")

    def statements(self, wanted: Wanted) -> list[Statement]:
        """Of running jobs, and of those that have ended; what ended last first."""
        with self._lock:
            found = {} if self._latest is None else {name_of(one): one for one in self._memory.statements(self._latest)}
            found = self._waiting.statements | found
        found = {name: one for name, one in found.items() if wanted.has(one)}
        with readable(self._path) as store:
            for one in store.statements(wanted) if store else ():
                found.setdefault(name_of(one), one)
        return sorted(found.values(), key=lambda one: (not one.running, -one.end))[: wanted.limit]

    def events(self, since: float, limit: int) -> list[Event]:
        """The latest first."""
        with self._lock:
            waiting = self._waiting.events_since(since)
        with readable(self._path) as store:
            return [*waiting, *(store.events(since, limit) if store else ())][:limit]

    def _see(self, snapshot: Snapshot) -> None:
        """On the sampler's thread, while the ledger rests."""
        with self._wake:
            first, self._latest = self._latest is None, snapshot
            events, ended = self._memory.take_in(snapshot)
            self._waiting.add(statements=ended, events=events)
            self._ended = self._ended or bool(ended)
            if ended or first:
                self._wake.notify_all()
        for statement in ended:
            self._on_end(statement)

    def _happened(self, kind: str, text: str) -> None:
        self._waiting.add(events=[Event(at=self._wall, kind=kind, text=text)])

    @property
    def _wall(self) -> float:
        return self._clock.wall() / SECOND

    @property
    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall(), self._boot)

    # -- the thread --

    def _run(self) -> None:
        while not self._rest():
            self._guarded(self._save)
            if time.monotonic() - self._trimmed_at >= _TRIM_SECONDS:
                self._guarded(self._trim)
        self._guarded(lambda: self._save(clean=True))
        if self._store is not None:
            self._store.close()

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except HistoryError as err:
            self._failed(err)
        except Exception as err:  # a fault of ours must not be the last that was kept
            log.exception("history failed; please report this")
            self._failed(HistoryError(f"{self._path}: {err}"))

    def _rest(self) -> bool:
        """Until there is something to do; True: it is the last."""
        with self._wake:
            while not self._stop and (left := self._left()) > 0:
                self._wake.wait(left)
            return self._stop

    def _left(self) -> float:
        """Seconds until the next checkpoint is due."""
        pace = self._settings.checkpoint_seconds
        if self._latest is None:
            return pace
        if not self._keeping.works:
            pace = min(pace, _RETRY_SECONDS)
        elif self._covered.asked > self._covered.saved:
            pace = 0.0
        elif self._ended:
            pace = min(pace, _HASTE_SECONDS)
        return self._saved_at + pace - time.monotonic()

    def _save(self, *, clean: bool = False) -> None:
        """One checkpoint. What could not be written waits for the next."""
        agent, began = self._agent, time.monotonic()
        if agent is None or self._latest is None:
            return
        self._writing = began
        try:
            self._store = store = self._opened()
            if not self._keeping.works:  # a checkpoint that seems to fail may be in the file: first say that it is old
                self._say_outrun(store)
            durable = clean or self._ended or began - self._durable_at >= self._settings.checkpoint_seconds
            sampled = clean or began - self._sampled_at >= self._settings.sample_seconds
            snapshot, state, batch = self._taken(agent, clean=clean, sampled=sampled)
            store.write(state=state, durable=durable, **batch._asdict())
            size = store.bytes
        finally:
            self._writing = None
        self._durable_at = began if durable else self._durable_at
        self._sampled_at = began if sampled else self._sampled_at
        self._done(snapshot, batch, size)

    def _opened(self) -> Store:
        """The store; one that another life has left is closed first, one that was taken away is begun anew."""
        if self._store is not None and self._store.stands:
            return self._store
        if self._store is not None:
            log.error("history: %s is not the file any more that was opened; it is opened again", self._path)
            self._store.close()
        self._store = store = opened_or_aside(self._path, damaged=self._damaged)
        self._damaged = False
        left = stranger_in(store, self._memory, self._moment)
        if left is not None:
            self._take_over(left)
        return store

    def _take_over(self, left: Anew) -> None:
        """Write with the next checkpoint what other books came to."""
        with self._lock:
            self._waiting.add(statements=left.statements, events=left.events, closed=left.closed)

    def _taken(self, agent: Agent, *, clean: bool, sampled: bool) -> tuple[Snapshot, list[tuple[str, bytes]], Batch]:
        """What is to be written, all of one moment."""
        with agent.resting, self._lock:
            snapshot, self._ended = cast("Snapshot", self._latest), False  # who saves has seen one
            self._covered.attempt(snapshot, self._clock.now())
            self._memory.look_closer(snapshot)
            about = told_of(self._memory.life, self._boot, clean=clean)
            state = [about, ("ledger", freeze(agent.ledger)), ("tallies", self._memory.frozen_tallies())]
            if sampled:
                state.append(("courses", self._memory.frozen_courses()))
            return snapshot, state, self._waiting.batch()

    def _done(self, snapshot: Snapshot, written: Batch, size: int) -> None:
        """What was written waits no more; who waited for it goes on."""
        with self._wake:
            self._waiting.forget(written)
            self._covered.succeed(snapshot)
            if not self._keeping.works:
                log.info("history: %s can be written again", self._path)
            self._keeping = replace(self._keeping, works=True, saved_at=self._wall, bytes=size, problem="")
            self._saved_at = time.monotonic()
            self._wake.notify_all()

    def _say_outrun(self, store: Store) -> None:
        store.write(state=[told_of(self._memory.life, self._boot, outrun=True)], durable=False)
        with self._lock:
            self._covered.outrun()

    def _failed(self, err: HistoryError) -> None:
        """Say so, and let nobody wait. The file is opened anew the next time, for it may be another by then.

        From here on scrapes are told what is: nothing old may look live for a file's sake. That a restart must not go
        on is said in the file, if that much can be written.
        """
        if self._store is not None:
            with suppress(HistoryError):
                self._say_outrun(self._store)
        with self._wake:
            self._covered.outrun()
            if self._keeping.problem != f"history: {err}":
                log.error("history: %s; the daemon goes on, and tries again", err)
            self._keeping = replace(
                self._keeping, works=False, failures=self._keeping.failures + 1, problem=f"history: {err}"
            )
            self._saved_at = time.monotonic()
            self._wake.notify_all()
        self._damaged = isinstance(err, DamagedError)
        if self._store is not None:
            self._store.close()
            self._store = None

    def _trim(self) -> None:
        """Forget what is too old, or too much."""
        self._trimmed_at, settings = time.monotonic(), self._settings
        if self._store is None:
            return
        gone = self._store.trim(
            before=self._wall - settings.keep_days * _DAY, most_bytes=round(settings.max_mebibytes * _MEBIBYTE)
        )
        if gone:
            log.info("history: %d statements and events of long ago were forgotten", gone)
