"""What the history's file may hold after damage: whole pages, and single rows. Owns these doors alone."""

import sqlite3
import tempfile
import zlib
from contextlib import closing
from itertools import islice
from pathlib import Path

from benchmarks.faults.folder import in_folder
from benchmarks.faults.trying import Feed, Target
from exporter.agent import Agent
from exporter.core.checkpoint import CheckpointError, freeze
from exporter.core.model import SECOND, Owner
from exporter.core.snapshot import Meta
from exporter.core.statement import Event, Sample, Statement, Wanted
from exporter.history.beginning import told_of
from exporter.history.file import HistoryError
from exporter.history.remembering import Memory
from exporter.history.resuming import Moment, decided, left_in
from exporter.history.store import Closed, Store, read_store
from exporter.receipt.asking import ReceiptError
from exporter.receipt.joining import joined
from exporter.simulate import simulate


def _statement(job: str) -> Statement:
    owner = Owner(job, "slurm", user="ada", account="nlp")
    return Statement(
        node="n",
        life="a",
        owner=owner,
        start=1e9,
        end=1e9 + 100,
        running=False,
        paid=100 * SECOND,
        parts={"useful": 70 * SECOND, "unobserved": 30 * SECOND},
        energy={"useful": 1.5},
        samples=tuple(Sample(1e9 + n, 1.25, 1, 1, 1, 1, 9) for n in range(3)),
    )


def _bodies() -> dict[str, bytes]:
    """A checkpoint of a node that has worked."""
    agent, memory = Agent(meta=Meta()), Memory(node="n", life="a")
    for one in islice(simulate("demo").observations, 30):
        agent.take_in(one)
        snapshot = agent.latest()
        if snapshot is not None:
            memory.take_in(snapshot)
            memory.look_closer(snapshot)
    name, about = told_of("a", "boot", clean=True)
    states = {name: about, "ledger": freeze(agent.ledger)}
    return states | {"tallies": memory.frozen_tallies(), "courses": memory.frozen_courses()}


def _written(path: Path) -> None:
    events = [Event(at=1e9 + n, kind="started", text="began") for n in range(5)]
    book = Closed(uuid="GPU-0", life="a", since=1e9, until=1e9 + 5, paid=5 * SECOND, parts={"useful": 5 * SECOND})
    with closing(Store(path)) as store:
        store.write(
            state=_bodies().items(), statements=[_statement(f"{n}") for n in range(9)], events=events, closed=[book]
        )


def store_file() -> bytes:
    """A whole history as it lies on a disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.db"
        _written(path)
        return path.read_bytes()


def _look(path: Path) -> None:
    """All that daemon, page and commands read of it."""
    with closing(read_store(path)) as store:
        list(store.briefs(Wanted(), (1e9 + 50,)))
        found = store.statements(Wanted())
        store.events(0.0, 10)
        store.closed()
        left = left_in(store)
        if left is not None:
            decided(left, Moment(10**18, 1_700_000_000 * SECOND, "boot"), node="n", young=SECOND)
            decided(left, Moment(10**18, 1_700_000_000 * SECOND, "other"), node="n", young=SECOND)
    if found:
        joined(found, job_id=found[0].owner.job_id, at=float("inf"))


def _store(folder: Path) -> Feed:
    def feed(data: bytes) -> None:
        (folder / "history.db").write_bytes(data)
        _look(folder / "history.db")

    return feed


_ROWS = (
    "UPDATE state SET body = ? WHERE name = 'about'",
    "UPDATE state SET body = ? WHERE name = 'ledger'",
    "UPDATE state SET body = ? WHERE name = 'tallies'",
    "UPDATE state SET body = ? WHERE name = 'courses'",
    "UPDATE statement SET brief = ?",
    "UPDATE rest SET body = ?",
    "UPDATE event SET body = ?",
    "UPDATE book SET body = ?",
)
_PACKED = (0, 1, 2, 3, 5)
"""Of these rows what lies in the file is compressed."""


_FIRST = (
    "SELECT brief FROM statement LIMIT 1",
    "SELECT body FROM rest LIMIT 1",
    "SELECT body FROM event LIMIT 1",
    "SELECT body FROM book LIMIT 1",
)


def _row_samples() -> list[bytes]:
    """The first byte says which row, and whether it is packed well (below 128)."""
    with tempfile.TemporaryDirectory() as folder:
        _written(Path(folder) / "history.db")
        with closing(sqlite3.connect(Path(folder) / "history.db")) as db:
            asked: list[tuple[str, tuple[str, ...]]] = [
                ("SELECT body FROM state WHERE name = ?", (name,)) for name in ("about", "ledger", "tallies", "courses")
            ]
            asked += [(each, ()) for each in _FIRST]
            bodies = [db.execute(*one).fetchone()[0] for one in asked]
    plain = [zlib.decompress(body) if number in _PACKED else body for number, body in enumerate(bodies)]
    return [bytes([number]) + body for number, body in enumerate(plain)]


def _rows(folder: Path) -> Feed:
    path = folder / "history.db"
    path.write_bytes(store_file())
    whole = path.read_bytes()

    def feed(data: bytes) -> None:
        head, body = data[:1] or b"\0", data[1:]
        number = head[0] % len(_ROWS)
        packed = zlib.compress(body, 1) if number in _PACKED and head[0] < 128 else body
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("PRAGMA synchronous = OFF")
            db.execute(_ROWS[number], (packed,))
        try:
            _look(path)
        finally:
            for end in ("-wal", "-shm"):
                Path(f"{path}{end}").unlink(missing_ok=True)
            path.write_bytes(whole)

    return feed


_H = (HistoryError, CheckpointError, ReceiptError)
HISTORY: tuple[Target, ...] = (
    Target(
        name="history: pages",
        what="SQLite's file, damaged",
        refuses=_H,
        samples=lambda: [store_file()],
        make=in_folder(_store),
        modules=("exporter.history", "exporter.core.checkpoint"),
    ),
    Target(
        name="history: rows",
        what="checkpoints and receipts, damaged",
        refuses=_H,
        samples=_row_samples,
        make=in_folder(_rows),
        modules=("exporter.history", "exporter.core.checkpoint", "exporter.receipt"),
    ),
)
