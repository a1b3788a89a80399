"""What is written to the store and taken from it: checkpoints, statements, events, closed books.

Owns rows, durability and room. Every write is one transaction: after a crash the file is as it was after one of them.
Refuses to know what a checkpoint says.
"""

import gc
import logging
import os
import sqlite3
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.core.statement import Event, Statement, Wanted
from exporter.history.file import DamagedError, HistoryError, locked, mark_of, opened, set_aside, told
from exporter.history.rows import Brief, brief_of, split, whole, with_course

log = logging.getLogger(__name__)


_UPSERT = """
    INSERT INTO statement (job_id, life, start, until, user, account, namespace, brief) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (job_id, life, start) DO UPDATE SET until = excluded.until, user = excluded.user,
        account = excluded.account, namespace = excluded.namespace, brief = excluded.brief"""
_APART = """
    INSERT OR REPLACE INTO rest
    SELECT number, ? FROM statement WHERE job_id = ? AND life = ? AND start = ?"""
_MOST_OF_IT = 8
"""Where more than one in so many is wanted, the whole table is read faster than these by an index."""
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(Event).decode


class Closed(Struct, frozen=True, kw_only=True):
    """A GPU's book of a life that is over. Times are Unix seconds; nanoseconds by leak."""

    uuid: str
    life: str
    since: float
    until: float
    paid: int
    parts: dict[str, int]


_decode_closed = msgspec.msgpack.Decoder(Closed).decode


class Store:
    """An open store; belongs to one thread. Whatever fails raises HistoryError.

    Who may write to it is the only one who does: a lock beside the file says so, and the kernel gives it back whatever
    ends its holder.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        with ExitStack() as stack, told(path):
            if not read_only:
                stack.callback(os.close, locked(path))
            self._db = opened(path, read_only=read_only)
            stack.callback(self._db.close)
            self._mark = mark_of(path)
            self._held = stack.pop_all()

    def close(self) -> None:
        """Leave the file as one that a copy of it alone would be whole."""
        with suppress(sqlite3.Error, OSError):
            self._held.close()

    @property
    def stands(self) -> bool:
        """Whether the file that is open is still the one of that name."""
        return self._mark == mark_of(self.path)

    def state(self, name: str) -> bytes | None:
        """What was written under that name last; None: nothing. Raises zlib.error where that is damaged."""
        with told(self.path):
            row = self._db.execute("SELECT body FROM state WHERE name = ?", (name,)).fetchone()
            body = None if row is None else _blob(row[0])
        return None if body is None else zlib.decompress(body)

    def write(
        self,
        *,
        state: Iterable[tuple[str, bytes]] = (),
        statements: Iterable[Statement] = (),
        events: Iterable[Event] = (),
        closed: Iterable[Closed] = (),
        durable: bool = True,
    ) -> None:
        """All of it or nothing. `durable`: it is on the disk when this returns, not only with the kernel."""
        with told(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(
                    "INSERT OR REPLACE INTO state VALUES (?, ?)",
                    [(name, zlib.compress(body, 1)) for name, body in state],
                )
                for statement in statements:
                    self._put(statement)
                self._db.executemany(
                    "INSERT INTO event (at, body) VALUES (?, ?)", [(event.at, _encode(event)) for event in events]
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO book VALUES (?, ?, ?, ?, ?)",
                    [(book.uuid, book.life, book.since, book.until, _encode(book)) for book in closed],
                )

    def _put(self, statement: Statement) -> None:
        owner, name = statement.owner, (statement.owner.job_id, statement.life, statement.start)
        short, rest = split(statement)
        self._db.execute(_UPSERT, (*name, statement.end, owner.user, owner.account, owner.namespace, short))
        self._db.execute(_APART, (rest, *name))

    def trim(self, *, before: float, most_bytes: int) -> int:
        """Forget what ended before that Unix time, and the oldest beyond the size; how many statements went."""
        with told(self.path):
            with self._db:
                gone = self._db.execute("DELETE FROM statement WHERE until < ?", (before,)).rowcount
                self._db.execute("DELETE FROM event WHERE at < ?", (before,))
            while self._used() > most_bytes and (cut := self._cut()):
                gone += cut
            self._db.executescript(
                "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);"
            )  # runs each to its end
            return gone

    def _cut(self) -> int:
        """Forget a twentieth, the oldest first."""
        with self._db:
            count = self._count()
            events = self._db.execute("SELECT count(*) FROM event").fetchone()[0]
            cut = self._db.execute(
                "DELETE FROM statement WHERE number IN (SELECT number FROM statement ORDER BY until LIMIT ?)",
                (count // 20 + 1,),
            ).rowcount
            cut += self._db.execute(
                "DELETE FROM event WHERE number IN (SELECT number FROM event ORDER BY at LIMIT ?)", (events // 20 + 1,)
            ).rowcount
        return cut

    def _used(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    @property
    def bytes(self) -> int:
        """On disk: the file and what waits to be put into it."""
        sizes = 0
        for end in ("", "-wal"):
            with suppress(OSError):
                sizes += Path(f"{self.path}{end}").stat().st_size
        return sizes

    def statements(self, wanted: Wanted) -> list[Statement]:
        """Those wanted, the one that ended last first."""
        where, values = _where(wanted)
        with told(self.path), _no_collection():
            # All that there are come faster as they lie in the file, and are put in order here.
            order = "" if self._count() <= wanted.limit else " ORDER BY until DESC, number DESC"
            rows = self._db.execute(
                "SELECT brief, (SELECT body FROM rest WHERE rest.number = statement.number)"  # nosec B608  # noqa: S608
                f" FROM statement WHERE {where}{order} LIMIT ?",
                (*values, wanted.limit),
            )
            found = [whole(_blob(short), _blob(rest)) for short, rest in rows]
        found.sort(key=attrgetter("end"), reverse=True)
        return found

    def briefs(self, wanted: Wanted, cuts: Sequence[float]) -> Generator[Brief, None, None]:
        """What sums need of those wanted, of all of them whatever the limit, in no order; while the store is open.

        `cuts`: Unix seconds, rising. Who ran on both sides of one is told with samples, and nobody else. One after the
        other: the memory for fifty thousand at once takes longer to get than they take to be read.
        """
        with told(self.path), _no_collection(), self._db:
            self._db.execute("BEGIN")  # what a daemon writes meanwhile is not seen
            where, values = _where(wanted, scan=self._mostly(wanted.since))
            rows = self._db.execute(
                f"SELECT number, brief FROM statement WHERE {where}",  # nosec B608  # noqa: S608
                values,
            )
            for number, short in rows:
                brief = brief_of(_blob(short))
                cut = bisect_right(cuts, brief.start) < bisect_left(cuts, brief.end)
                yield with_course(brief, _blob(self._rest(number))) if cut else brief

    def _rest(self, number: int) -> object:
        row = self._db.execute("SELECT body FROM rest WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def _mostly(self, since: float) -> bool:
        """Whether most of what there is has ended since."""
        later = self._db.execute("SELECT count(*) FROM statement WHERE until >= ?", (since,)).fetchone()[0]
        return bool(later * _MOST_OF_IT > self._count())

    def _count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM statement").fetchone()[0])

    def events(self, since: float, limit: int) -> list[Event]:
        """Those since that Unix time, the latest first."""
        with told(self.path):
            rows = self._db.execute(
                "SELECT body FROM event WHERE at >= ? ORDER BY at DESC, number DESC LIMIT ?", (since, limit)
            )
            return [_decode_event(_blob(row[0])) for row in rows]

    def closed(self) -> list[Closed]:
        """Books of all lives that are over, in the order of time."""
        with told(self.path):
            rows = self._db.execute("SELECT body FROM book ORDER BY since, uuid")
            return [_decode_closed(_blob(row[0])) for row in rows]


def read_store(path: Path) -> Store:
    """A store for reading alone: a daemon's, while it writes, or a copy. Raises HistoryError."""
    return Store(path, read_only=True)


@contextmanager
def readable(path: Path) -> Iterator[Store | None]:
    """The store as it is on the disk; None where it cannot be read."""
    try:
        store = Store(path, read_only=True)
    except HistoryError:
        yield None
        return
    with closing(store):
        yield store


def opened_or_aside(path: Path, *, damaged: bool = False) -> Store:
    """The store, to be written to; a damaged one is moved away, and another begun. Raises HistoryError."""
    why = f"{path}: it was found to be damaged while it was open"
    try:
        if not damaged:
            return Store(path)
    except DamagedError as err:
        why = str(err)
    aside = set_aside(path)
    how = f"it is {aside} now, and a new one is begun; `sqlite3 {aside} .recover` may save some"
    log.error("%s; %s", why, how)
    return Store(path)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector: of fifty thousand statements none is garbage, and to see that takes a while."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _blob(value: object) -> bytes:
    """What a row holds of ours; damage may leave anything there that SQLite knows, or nothing."""
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError("malformed: a row without its body")
    return value


def _where(wanted: Wanted, *, scan: bool = False) -> tuple[str, list[object]]:
    """`scan`: not by the index of ends (a plus makes SQLite take none)."""
    named = {"job_id": wanted.job_id, "user": wanted.user, "account": wanted.account, "namespace": wanted.namespace}
    given = {name: value for name, value in named.items() if value}
    conditions = [f"{name} = ?" for name in given]
    values: list[object] = list(given.values())
    if wanted.since > 0:
        conditions.append("+until >= ?" if scan else "until >= ?")
        values.append(wanted.since)
    if wanted.until != float("inf"):
        conditions.append("start <= ?")
        values.append(wanted.until)
    return " AND ".join(conditions) or "1", values
