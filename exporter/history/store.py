"""Reads and writes the history database: checkpoints, job records, events and closed books.

Owns the SQLite file, its lock, schema migrations, row encoding, durability and size. Each write is one transaction.
Does not interpret checkpoints. Sources: SQLite's "Write-Ahead Logging", "Atomic Commit" and "PRAGMA Statements".
"""

import gc
import logging
import os
import sqlite3
import time
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, NodeEvent, PriceChange
from exporter.core.model import MS, Owner, parse_display_id
from exporter.core.progress import TrainingView
from exporter.core.serving import ServingView
from exporter.files import may_exist

DEFAULT_FOLDER = Path("/var/lib/gpu-efficiency")
_FILE_NAME = "history.db"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def store_path(file: str, environ: Mapping[str, str], usual: Path = DEFAULT_FOLDER) -> Path | None:
    """Resolve the setting `[history] file`; None if no history is kept.

    systemd passes a unit's state directories in STATE_DIRECTORY, separated by colons (systemd.exec(5)).
    """
    if file != "auto":
        return Path(file) if file else None
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given) / _FILE_NAME
    return usual / _FILE_NAME if os.access(usual, os.W_OK | os.X_OK) else None


def boot_id(path: Path = _BOOT_ID) -> str:
    """Return the kernel's boot id (random(4)); empty if unavailable: then no two boots count as the same."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


_MIGRATIONS = (
    """
    CREATE TABLE state (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE statement (
        number INTEGER PRIMARY KEY, job_id TEXT NOT NULL, life TEXT NOT NULL, start REAL NOT NULL, until REAL NOT NULL,
        user TEXT NOT NULL, account TEXT NOT NULL, namespace TEXT NOT NULL, brief BLOB NOT NULL,
        UNIQUE (job_id, life, start));
    CREATE INDEX statement_until ON statement (until);
    CREATE INDEX statement_user ON statement (user, until);
    CREATE INDEX statement_account ON statement (account, until);
    CREATE INDEX statement_namespace ON statement (namespace, until);
    CREATE TABLE rest (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
    CREATE TRIGGER statement_gone AFTER DELETE ON statement BEGIN DELETE FROM rest WHERE number = old.number; END;
    CREATE TABLE event (number INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL);
    CREATE INDEX event_at ON event (at);
    CREATE TABLE book (
        uuid TEXT NOT NULL, life TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (uuid, life)) WITHOUT ROWID;
    """,
)
"""Applied in order; `user_version` is the number already applied. A released migration never changes."""
_BUSY_SECONDS = 5.0
_MODE = 0o640
_NOTE_MARK = 577_215
"""Nanoseconds of a note after its millisecond."""
_DAMAGE = ("malformed", "not a database", "disk image", "file is encrypted")


_CURES = {
    "make room on its disk, or set history.file to another one": ("full", "No space"),
    "let this daemon write it, or set history.file to where it may": ("readonly", "Read-only"),
    "does its folder exist, and may this daemon write there? else set history.file": ("unable to open", "No such file"),
    "may this daemon write there? else set history.file": ("Permission",),
    "does another daemon use the same store?": ("locked",),
}
"""What to do about a failure, by texts in the messages of SQLite and of the system."""
_UNKNOWN_CURE = "does its disk work? see `dmesg`"
UNREADABLE = (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding a damaged row may raise."""


class HistoryError(OSError):
    """The store cannot be used; the message contains the file, the reason, and what to do."""


class DamagedError(HistoryError):
    """The file is not a history store, or a damaged one."""


class LockedError(HistoryError):
    """Another daemon has the store open for writing."""


def open_database(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open a database and migrate it to this version's schema. Call it within `translated_errors`."""
    if read_only:
        _require_readable(path)
    immutable = (
        read_only and not Path(f"{path}-wal").exists()
    )  # a copy, or no writer: then SQLite needs no shared memory
    address = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}{'&immutable=1' if immutable else ''}"
    if not (read_only or path.exists()):
        # Not world-readable, because it holds users' jobs; SQLite's other files inherit the mode. Only for a new file:
        # closing an existing file would release the locks that this process's readers have on it (fcntl(2)).
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _migrate(db, path, read_only=read_only)
    except BaseException:
        db.close()
        raise
    return db


def _require_readable(path: Path) -> None:
    """Raise HistoryError if there is no such file, or this user may not read it."""
    if not may_exist(path):
        raise HistoryError(f"{path}: there is no such store: is [history] file of the daemon another one?")
    if not os.access(path, os.R_OK):
        raise HistoryError(f"{path}: this user may not read it: ask its daemon (--node URL), or run this as root")


def lock_store(path: Path) -> int:
    """Lock the file beside the store and return its descriptor. Raises LockedError.

    On a file system without locks, every caller succeeds.
    """
    import fcntl  # noqa: PLC0415  not on Windows, where `report` asks other nodes

    lock = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LockedError(
            f"{path}: another daemon writes its history there: configure a different file for one of them"
        ) from None
    except OSError:
        pass
    return lock


def note_unsaved(path: Path, until: int) -> None:
    """Note that scrapes have returned values of times up to `until` (Unix ns) that could not be saved.

    The note is the lock file's modification time: it needs no room on a full disk. A read-only disk does not take it.
    Its last six digits tell it from the time at which the file was made or copied.
    """
    noted = until // MS * MS + _NOTE_MARK
    with suppress(OSError):
        os.utime(_lock_file(path), ns=(noted, noted))


def unsaved_until(path: Path) -> int:
    """Return the latest note, Unix ns in whole milliseconds; 0 without one."""
    try:
        modified = _lock_file(path).stat().st_mtime_ns
    except OSError:
        return 0
    return modified // MS * MS if modified % MS == _NOTE_MARK else 0


def _lock_file(path: Path) -> Path:
    return Path(f"{path}-lock")


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode number of the file, which change when it is replaced; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _migrate(db: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(_MIGRATIONS):
        raise HistoryError(
            f"{path}: written by a newer version (schema {version}, this one knows {len(_MIGRATIONS)}): "
            "install that version again, or move the file away"
        )
    if read_only:
        if version < len(_MIGRATIONS):
            raise HistoryError(f"{path}: empty, or written by an older version: start the daemon on it once")
        return
    if version == 0:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA journal_size_limit = 1048576")
    for number in range(version, len(_MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {_MIGRATIONS[number]}; PRAGMA user_version = {number + 1}; COMMIT;")


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Translate errors of SQLite, the system and decoders to HistoryError with what to do about them."""
    try:
        yield
    except HistoryError:
        raise
    except (sqlite3.Error, OSError, *UNREADABLE) as err:
        raise _history_error(err, path) from err


def _history_error(err: Exception, path: Path) -> HistoryError:
    message = str(err)
    if isinstance(err, UNREADABLE) or any(marker in message for marker in _DAMAGE):
        return DamagedError(f"{path}: damaged ({message})")
    message = message.removesuffix(f": '{_lock_file(path)}'")
    cure = next((cure for cure, texts in _CURES.items() if any(text in message for text in texts)), _UNKNOWN_CURE)
    return HistoryError(f"{path}: {message}: {cure}")


def _wal(path: Path) -> Path:
    return Path(f"{path}-wal")


def _rename(path: Path, why: str, ends: Iterable[str]) -> Path:
    """Rename these files of a store, where they exist; return the new path of the store."""
    aside = path.with_name(f"{path.name}.{why}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    with translated_errors(path):
        for end in ends:
            with suppress(FileNotFoundError):
                Path(f"{path}{end}").replace(f"{aside}{end}")
    return aside


_PRECISION = 1000
_Deltas = tuple[tuple[int, ...], ...]
"""Samples by field, in thousandths, each as the difference from the sample before."""


class JobRecordSummary(Struct, frozen=True, kw_only=True):
    """The fields of a JobRecord that usage totals need: decoding only these is faster for 50,000 records."""

    node: str
    life: str
    owner: Owner
    start: float
    end: float
    running: bool = False
    paid: int
    parts: dict[str, int]
    energy: dict[str, float] = {}
    money: dict[str, float] = {}
    models: tuple[str, ...] = ()
    whole_gpus: float = 0.0
    samples: tuple[JobSample, ...] = ()
    price_changes: tuple[PriceChange, ...] = ()
    simulated: bool = False


class _Details(Struct, array_like=True):
    """The large fields of a JobRecord: stored in a table of their own, which usage totals read for samples only."""

    training: msgspec.Raw
    service: msgspec.Raw
    course: _Deltas


_encode = msgspec.msgpack.Encoder().encode
_decode_details = msgspec.msgpack.Decoder(_Details).decode
_decode_training = msgspec.msgpack.Decoder(TrainingView | None).decode
_decode_service = msgspec.msgpack.Decoder(ServingView | None).decode
_decode_record = msgspec.msgpack.Decoder(JobRecord).decode
decode_summary = msgspec.msgpack.Decoder(JobRecordSummary).decode
"""Decode the first part of what `encode_job_record` returns."""


def encode_job_record(record: JobRecord) -> tuple[bytes, bytes]:
    """Return the record without its large fields, and the large fields compressed."""
    training, service = msgspec.Raw(_encode(record.training)), msgspec.Raw(_encode(record.service))
    rest = _Details(training, service, _encode_samples(record.samples))
    short = msgspec.structs.replace(record, training=None, service=None, samples=())
    return _encode(short), zlib.compress(_encode(rest), 6)


def decode_job_record(short: bytes, rest: bytes) -> JobRecord:
    """Decode what `encode_job_record` returned."""
    details = _decode_details(zlib.decompress(rest))
    return msgspec.structs.replace(
        _decode_record(short),
        training=_decode_training(details.training),
        service=_decode_service(details.service),
        samples=_decode_deltas(details.course),
    )


def with_samples(summary: JobRecordSummary, rest: bytes) -> JobRecordSummary:
    """Return the summary with the samples from the record's large fields."""
    details = _decode_details(zlib.decompress(rest))
    return msgspec.structs.replace(summary, samples=_decode_deltas(details.course))


def _encode_samples(samples: tuple[JobSample, ...]) -> _Deltas:
    columns = zip(*(msgspec.structs.astuple(sample) for sample in samples), strict=True)
    exact = [[0, *(round(value * _PRECISION) for value in column)] for column in columns]
    return tuple(tuple(b - a for a, b in pairwise(column)) for column in exact)


def _decode_deltas(deltas: _Deltas) -> tuple[JobSample, ...]:
    values = [[value / _PRECISION for value in accumulate(column)] for column in deltas]
    return tuple(JobSample(*row) for row in zip(*values, strict=True))


log = logging.getLogger(__name__)


_UPSERT = """
    INSERT INTO statement (job_id, life, start, until, user, account, namespace, brief) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (job_id, life, start) DO UPDATE SET until = excluded.until, user = excluded.user,
        account = excluded.account, namespace = excluded.namespace, brief = excluded.brief"""
_UPSERT_DETAILS = """
    INSERT OR REPLACE INTO rest
    SELECT number, ? FROM statement WHERE job_id = ? AND life = ? AND start = ?"""
_DELETE_RECORDS = "DELETE FROM statement WHERE number IN (SELECT number FROM statement ORDER BY until LIMIT ?)"
_DELETE_EVENTS = "DELETE FROM event WHERE number IN (SELECT number FROM event ORDER BY at LIMIT ?)"
_EVENT_SHARE = 8
"""A store that is full keeps one byte of events in so many."""
_FULL_SCAN_RATIO = 8
"""A full scan is faster than the index if more than one row in this many matches."""
_LONGEST_DOWNTIME = 30 * 24 * 3600.0
"""Seconds; what the wall clock is ahead of a store by more, between two daemons, ages no row."""
_decode_time = msgspec.msgpack.Decoder(float).decode
_decode_event = msgspec.msgpack.Decoder(NodeEvent).decode


class ClosedBook(Struct, frozen=True, kw_only=True):
    """A GPU's book in a ledger that was not continued. `since` and `until` are Unix seconds, `paid` and `parts` ns."""

    uuid: str
    life: str
    since: float
    until: float
    paid: int
    parts: dict[str, int]


_decode_closed = msgspec.msgpack.Decoder(ClosedBook).decode


class HistoryStore:
    """An open store, for use by one thread. All failures raise HistoryError.

    A lock file beside the store ensures a single writer; the kernel releases it however the writer ends.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        with ExitStack() as stack, translated_errors(path):
            if not read_only:
                stack.callback(os.close, lock_store(path))
            self._db = open_database(path, read_only=read_only)
            stack.callback(self._db.close)
            self._age_checked: float | None = None
            """Time of the latest trim, `time.monotonic`."""
            self._latest_row = None if read_only else self._find_latest_row()
            self._identity, self._wal_identity = file_identity(path), None if read_only else file_identity(_wal(path))
            self._resources = stack.pop_all()

    def _find_latest_row(self) -> float | None:
        """Return the latest time in the store, Unix seconds."""
        latest = "SELECT max(t) FROM (SELECT max(until) AS t FROM statement UNION ALL SELECT max(at) FROM event)"
        found = self._db.execute(latest).fetchone()[0]
        return None if found is None else float(found)

    def close(self) -> None:
        """Close the store; SQLite then merges the WAL, so that a copy of the file alone is complete.

        If the file was moved or replaced, SQLite leaves the WAL behind, and would merge it into the file that is there
        now. It is renamed instead.
        """
        orphaned = not self.is_current and file_identity(_wal(self.path)) == self._wal_identity is not None
        with suppress(sqlite3.Error, OSError):
            self._resources.close()
        if orphaned:
            with suppress(HistoryError):
                _rename(self.path, "replaced", ("-wal", "-shm"))

    @property
    def is_current(self) -> bool:
        """Whether `path` is still the file that is open."""
        return self._identity == file_identity(self.path)

    def state(self, name: str) -> bytes | None:
        """Return the latest value written under `name`; None if there is none. Raises zlib.error if it is damaged."""
        with translated_errors(self.path):
            row = self._db.execute("SELECT body FROM state WHERE name = ?", (name,)).fetchone()
            body = None if row is None else _blob(row[0])
        return None if body is None else zlib.decompress(body)

    def write(
        self,
        *,
        state: Iterable[tuple[str, bytes]] = (),
        job_records: Iterable[JobRecord] = (),
        events: Iterable[NodeEvent] = (),
        closed: Iterable[ClosedBook] = (),
        durable: bool = True,
    ) -> None:
        """Write everything in one transaction. With `durable` it is on disk on return, not only in the page cache."""
        with translated_errors(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(
                    "INSERT OR REPLACE INTO state VALUES (?, ?)",
                    [(name, zlib.compress(body, 1)) for name, body in state],
                )
                for record in job_records:
                    self._put(record)
                self._db.executemany(
                    "INSERT INTO event (at, body) VALUES (?, ?)", [(event.at, _encode(event)) for event in events]
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO book VALUES (?, ?, ?, ?, ?)",
                    [(book.uuid, book.life, book.since, book.until, _encode(book)) for book in closed],
                )

    def _put(self, record: JobRecord) -> None:
        owner, name = record.owner, (record.owner.job_id, record.life, record.start)
        short, rest = encode_job_record(record)
        self._db.execute(_UPSERT, (*name, record.end, owner.user, owner.account, owner.namespace, short))
        self._db.execute(_UPSERT_DETAILS, (rest, *name))

    def trim(self, *, now: float, keep_seconds: float, most_bytes: int) -> int:
        """Delete rows older than `keep_seconds`, then the oldest until the store fits; return how many.

        Of those, events go first while they take more than their share: they may come every second, and job records,
        which have the money, must not go for them.
        `now` is the wall clock's time in Unix seconds. One that is years ahead must not make all rows old: they age by
        the time that the store has seen.
        """
        with translated_errors(self.path):
            before = self._advance_age(now) - keep_seconds
            with self._db:
                gone = self._db.execute("DELETE FROM statement WHERE until < ?", (before,)).rowcount
                self._db.execute("DELETE FROM event WHERE at < ?", (before,))
            while self._bytes_used() > most_bytes and (cut := self._trim_oldest(most_bytes // _EVENT_SHARE)):
                gone += cut
            self._db.executescript(
                "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);"
            )  # runs each to its end
            return gone

    def _advance_age(self, now: float) -> float:
        """Return by which time rows age: the wall clock's, unless it is further ahead than the store can have missed.

        The first call may be ahead by a downtime, each later one by the time since the one before.
        """
        checked, self._age_checked = self._age_checked, time.monotonic()
        missed = _LONGEST_DOWNTIME if checked is None else self._age_checked - checked
        seen = self._seen_until()
        believed = now if seen is None else min(now, seen + missed)
        if seen is None or believed > seen:
            self._db.execute("INSERT OR REPLACE INTO state VALUES ('seen', ?)", (zlib.compress(_encode(believed), 1),))
        return believed

    def _seen_until(self) -> float | None:
        """Return the latest time that a trim believed, else that of the rows at opening; None for an empty store."""
        row = self._db.execute("SELECT body FROM state WHERE name = 'seen'").fetchone()
        return self._latest_row if row is None else _decode_time(zlib.decompress(_blob(row[0])))

    def _trim_oldest(self, event_bytes: int) -> int:
        """Delete the oldest twentieth of events beyond `event_bytes`, else of job records; return how many."""
        records = self._count()
        events, size = self._db.execute("SELECT count(*), coalesce(sum(length(body)), 0) FROM event").fetchone()
        of_events = size > event_bytes or not records
        with self._db:
            return self._db.execute(
                _DELETE_EVENTS if of_events else _DELETE_RECORDS, ((events if of_events else records) // 20 + 1,)
            ).rowcount

    def _bytes_used(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    @property
    def bytes(self) -> int:
        """Size on disk, including the WAL."""
        sizes = 0
        for end in ("", "-wal"):
            with suppress(OSError):
                sizes += Path(f"{self.path}{end}").stat().st_size
        return sizes

    def job_records(self, wanted: JobRecordQuery) -> list[JobRecord]:
        """Return the records that match, the latest end first."""
        where, values = _where(wanted)
        with translated_errors(self.path), _gc_paused():
            # Reading all rows is faster in the order of the file; they are sorted here.
            order = "" if self._count() <= wanted.limit else " ORDER BY until DESC, number DESC"
            rows = self._db.execute(
                "SELECT brief, (SELECT body FROM rest WHERE rest.number = statement.number)"  # nosec B608  # noqa: S608
                f" FROM statement WHERE {where}{order} LIMIT ?",
                (*values, wanted.limit),
            )
            found = [decode_job_record(_blob(short), _blob(rest)) for short, rest in rows]
        found.sort(key=attrgetter("end"), reverse=True)
        return found

    def summaries(self, wanted: JobRecordQuery, cuts: Sequence[float]) -> Generator[JobRecordSummary, None, None]:
        """Yield summaries of all records that match, ignoring the query's limit, in no order.

        Only records that span one of `cuts` (rising Unix seconds) carry samples. Yielded singly, because allocating
        memory for 50,000 takes longer than reading them. The store must stay open meanwhile.
        """
        with translated_errors(self.path), _gc_paused(), self._db:
            self._db.execute("BEGIN")  # a consistent view while a daemon writes
            where, values = _where(wanted, scan=self._covers_most(wanted.since))
            rows = self._db.execute(
                f"SELECT number, brief FROM statement WHERE {where}",  # nosec B608  # noqa: S608
                values,
            )
            for number, short in rows:
                summary = decode_summary(_blob(short))
                cut = bisect_right(cuts, summary.start) < bisect_left(cuts, summary.end)
                yield with_samples(summary, _blob(self._read_details(number))) if cut else summary

    def _read_details(self, number: int) -> object:
        row = self._db.execute("SELECT body FROM rest WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def _covers_most(self, since: float) -> bool:
        """Whether so many records ended since then that a full scan is faster."""
        later = self._db.execute("SELECT count(*) FROM statement WHERE until >= ?", (since,)).fetchone()[0]
        return bool(later * _FULL_SCAN_RATIO > self._count())

    def _count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM statement").fetchone()[0])

    def events(self, since: float, limit: int) -> list[NodeEvent]:
        """Return events since Unix time `since`, the latest first."""
        with translated_errors(self.path):
            rows = self._db.execute(
                "SELECT body FROM event WHERE at >= ? ORDER BY at DESC, number DESC LIMIT ?", (since, limit)
            )
            return [_decode_event(_blob(row[0])) for row in rows]

    def closed_books(self) -> list[ClosedBook]:
        """Return the closed books of earlier ledgers, the oldest first."""
        with translated_errors(self.path):
            rows = self._db.execute("SELECT body FROM book ORDER BY since, until, uuid")
            return [_decode_closed(_blob(row[0])) for row in rows]


def open_read_only(path: Path) -> HistoryStore:
    """Open a store for reading: a copy, or a running daemon's. Raises HistoryError."""
    return HistoryStore(path, read_only=True)


@contextmanager
def open_if_readable(path: Path) -> Iterator[HistoryStore | None]:
    """Open the store for reading; None if that fails."""
    try:
        store = HistoryStore(path, read_only=True)
    except HistoryError:
        yield None
        return
    with closing(store):
        yield store


def open_or_replace(path: Path, *, damaged: bool = False) -> HistoryStore:
    """Open the store for writing; a damaged store is renamed and replaced by a new one. Raises HistoryError."""
    why = f"{path}: damage was detected while it was open"
    try:
        if not damaged:
            return HistoryStore(path)
    except DamagedError as err:
        why = str(err)
    aside = _rename(path, "damaged", ("-wal", "-shm", ""))
    how = f"it is renamed to {aside}, and a new one is begun; `sqlite3 {aside} .recover` may recover some of it"
    log.error("%s; %s", why, how)
    return HistoryStore(path)


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection: it would repeatedly scan up to 50,000 live records."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _blob(value: object) -> bytes:
    """Check that a column holds bytes: in a damaged file it may hold any type or NULL."""
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError("malformed: a row without its body")
    return value


def _where(wanted: JobRecordQuery, *, scan: bool = False) -> tuple[str, list[object]]:
    """Return the WHERE clause and its values; with `scan` the index of ends is not used (unary plus disables it)."""
    named = {"user": wanted.user, "account": wanted.account, "namespace": wanted.namespace}
    given = {name: value for name, value in named.items() if value}
    conditions = [f"{name} = ?" for name in given]
    values: list[object] = list(given.values())
    if wanted.job_id:
        parts = _owner_conditions(*(parse_display_id(wanted.job_id) or ()))
        by_name = " AND ".join("instr(brief, ?)" for _ in parts)
        conditions.append(f"(job_id = ? OR {by_name})" if parts else "job_id = ?")
        values += [wanted.job_id, *parts]
    if wanted.array_id:
        conditions.append("instr(brief, ?)")
        values += _owner_conditions(wanted.array_id)
    if wanted.since > 0:
        conditions.append("+until >= ?" if scan else "until >= ?")
        values.append(wanted.since)
    if wanted.until != float("inf"):
        conditions.append("start <= ?")
        values.append(wanted.until)
    return " AND ".join(conditions) or "1", values


def _owner_conditions(array_id: str = "", array_task_id: str = "", het_job_offset: str = "") -> list[bytes]:
    """Return what an encoded record contains if its owner has these values; empty ones are not asked for.

    There is no column of them: a store's schema cannot change without locking out older daemons, and few rows are read.
    """
    given = {"array_id": array_id, "array_task_id": array_task_id, "het_job_offset": het_job_offset}
    return [_encode(name) + _encode(value) for name, value in given.items() if value]
