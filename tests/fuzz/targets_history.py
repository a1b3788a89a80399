"""What the history's file may hold after damage: whole pages, and single rows. Owns these doors alone."""

import sqlite3
import tempfile
import zlib
from contextlib import closing
from itertools import islice
from pathlib import Path

from exporter.agent.agent import Agent
from exporter.core.checkpoint import CheckpointError, dump_ledger
from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample, NodeEvent
from exporter.core.model import SECOND, Owner
from exporter.core.snapshot import DaemonMetadata
from exporter.history.job_tracker import JobTracker
from exporter.history.resume import HostTime, decide, encode_info, read_checkpoint
from exporter.history.store import ClosedBook, HistoryError, HistoryStore, open_read_only
from exporter.report.model import ReportError
from exporter.report.records import join_records
from exporter.simulate.simulation import simulate
from tests.fuzz.folder import in_folder
from tests.fuzz.trying import Feed, Target


def _statement(job: str) -> JobRecord:
    owner = Owner(job, "slurm", user="ada", account="nlp")
    return JobRecord(
        node="n",
        life="a",
        owner=owner,
        start=1e9,
        end=1e9 + 100,
        running=False,
        paid=100 * SECOND,
        parts={"useful": 70 * SECOND, "unobserved": 30 * SECOND},
        energy={"useful": 1.5},
        samples=tuple(JobSample(1e9 + n, 1.25, 1, 1, 1, 1, 9) for n in range(3)),
    )


def _bodies() -> dict[str, bytes]:
    """A checkpoint of a node that has worked."""
    agent, memory = Agent(meta=DaemonMetadata()), JobTracker(node="n", ledger_id="a")
    for one in islice(simulate("demo").observations, 30):
        agent.process(one)
        snapshot = agent.latest()
        if snapshot is not None:
            memory.update(snapshot)
            memory.update_jobs(snapshot)
    name, about = encode_info("a", "boot", clean=True)
    states = {name: about, "ledger": dump_ledger(agent.ledger)}
    return states | {"tallies": memory.dump_tallies(), "courses": memory.dump_samples()}


def _written(path: Path) -> None:
    events = [NodeEvent(at=1e9 + n, kind="started", text="began") for n in range(5)]
    book = ClosedBook(uuid="GPU-0", life="a", since=1e9, until=1e9 + 5, paid=5 * SECOND, parts={"useful": 5 * SECOND})
    with closing(HistoryStore(path)) as store:
        store.write(
            state=_bodies().items(), job_records=[_statement(f"{n}") for n in range(9)], events=events, closed=[book]
        )


def store_file() -> bytes:
    """A whole history as it lies on a disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.db"
        _written(path)
        return path.read_bytes()


def _look(path: Path) -> None:
    """All that daemon, page and commands read of it."""
    with closing(open_read_only(path)) as store:
        list(store.summaries(JobRecordQuery(), (1e9 + 50,)))
        found = store.job_records(JobRecordQuery())
        store.events(0.0, 10)
        store.closed_books()
        left = read_checkpoint(store)
        if left is not None:
            decide(left, HostTime(10**18, 1_700_000_000 * SECOND, "boot"), node="n", resume_window=SECOND)
            decide(left, HostTime(10**18, 1_700_000_000 * SECOND, "other"), node="n", resume_window=SECOND)
    if found:
        join_records(found, job_id=found[0].owner.job_id, at=float("inf"))


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


_H = (HistoryError, CheckpointError, ReportError)
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
        modules=("exporter.history", "exporter.core.checkpoint", "exporter.report"),
    ),
)
