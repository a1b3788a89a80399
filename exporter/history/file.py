"""The file below the store: how it is opened, locked, brought to this version's schema, and moved away when damaged.

Owns migrations, and what an operator is told of an error. Refuses to know what the tables hold. Sources: SQLite's
documents "Write-Ahead Logging", "Atomic Commit" and "PRAGMA Statements".
"""

import fcntl
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

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
"""Applied in order; `user_version` counts those that were. One that has been released never changes."""
_BUSY_SECONDS = 5.0
_MODE = 0o640
_DAMAGE = ("malformed", "not a database", "disk image", "file is encrypted")


UNREADABLE = (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a damaged row may bring about."""


class HistoryError(OSError):
    """The store cannot be used; the message says which file, why, and what to do."""


class DamagedError(HistoryError):
    """What the file says is no store of ours, or not a whole one."""


class UnwritableError(HistoryError):
    """It can perhaps be read, but not written."""


class TakenError(HistoryError):
    """Another daemon writes to it."""


def opened(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection to a store of this version's schema. Call it within `told`."""
    if read_only and not path.exists():
        raise HistoryError(f"{path}: there is no such store: is [history] file of the daemon another one?")
    alone = read_only and not Path(f"{path}-wal").exists()  # a copy, or nobody writes: then it needs no shared memory
    address = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}{'&immutable=1' if alone else ''}"
    if not (read_only or path.exists()):
        # Whose jobs ran here is not for every user of the node; SQLite's other files take its mode. Never of a file
        # that is there: to close it would give back the locks that this process's readers have on it (fcntl(2)).
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path, read_only=read_only)
    except BaseException:
        db.close()
        raise
    return db


def locked(path: Path) -> int:
    """The lock beside the file. A file system that knows no locks gives one to everybody."""
    lock = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise TakenError(f"{path}: another daemon keeps its history there: give one of them another file") from None
    except OSError:
        pass
    return lock


def mark_of(path: Path) -> tuple[int, int] | None:
    """What tells the file of that name from another that comes in its place; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _prepare(db: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(_MIGRATIONS):
        raise HistoryError(
            f"{path}: written by a newer version (schema {version}, this one knows {len(_MIGRATIONS)}): "
            "install that version again, or move the file away"
        )
    if read_only:
        if version < len(_MIGRATIONS):
            raise HistoryError(f"{path}: no store yet, or of an older version: start the daemon on it once")
        return
    if version == 0:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA journal_size_limit = 1048576")
    for number in range(version, len(_MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {_MIGRATIONS[number]}; PRAGMA user_version = {number + 1}; COMMIT;")


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Errors of SQLite, and of the system below it, in an operator's words."""
    try:
        yield
    except HistoryError:
        raise
    except (sqlite3.Error, OSError, *UNREADABLE) as err:
        raise _named(err, path) from err


def _named(err: Exception, path: Path) -> HistoryError:
    said = str(err)
    if isinstance(err, UNREADABLE) or any(word in said for word in _DAMAGE):
        return DamagedError(f"{path}: damaged ({said})")
    said = said.removesuffix(f": '{path}-lock'")
    cures = {
        "full": "make room on its disk, or set history.file to another one",
        "No space": "make room on its disk, or set history.file to another one",
        "readonly": "let this daemon write it, or set history.file to where it may",
        "Read-only": "let this daemon write it, or set history.file to where it may",
        "unable to open": "does its folder exist, and may this daemon write there? else set history.file",
        "No such file": "does its folder exist, and may this daemon write there? else set history.file",
        "Permission": "may this daemon write there? else set history.file",
        "locked": "does another daemon use the same store?",
    }
    cure = next((cure for sign, cure in cures.items() if sign in said), "is its disk well? `dmesg` may say")
    kind = UnwritableError if cure == cures["readonly"] or "Permission" in said else HistoryError
    return kind(f"{path}: {said}: {cure}")


def set_aside(path: Path) -> Path:
    """Move a damaged store out of the way, with what belongs to it; where it is now."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    with told(path):
        for end in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(f"{path}{end}").replace(f"{aside}{end}")
    return aside
