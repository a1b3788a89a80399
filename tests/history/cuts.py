"""Simulates power cuts at any point of a daemon's writes, and checks the file after each.

`python -m tests.history.cuts --pairs 5000` tries that many pairs of a point and a random seed. The file must open and
be intact, lose nothing from before the last durable write, keep every job record that was written durably, and contain
every second once.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from exporter.core.checkpoint import read_header
from exporter.core.job_record import JobRecordQuery
from exporter.core.model import SECOND
from exporter.history.resume import HostTime, StartFresh, read_checkpoint
from exporter.history.resume import close_books as books_closed
from exporter.history.store import HistoryStore
from tests.e2e.running import environment
from tests.history.disk.build import Disk
from tests.history.journal import Entry, PowerCut, entries
from tests.history.player import names

LIVES = ((0, 180, "stop"), (180, 320, "kill"), (320, 500, "kill"), (500, 640, "stop"))
"""First and last tick of each process, and how it ends."""
NAME = "history.db"
_MEMORY = Path("/dev/shm")  # noqa: S108  simulated disks need no real one, which is slower


def recorded(folder: Path, seed: int) -> list[Entry]:
    """Run several daemons one after the other and return the journal of their writes."""
    disk = Disk(folder)
    for first, last, end in LIVES:
        words = [sys.executable, "-m", "tests.history.player", f"{disk.folder / NAME}", f"{first}", f"{last}", end]
        done = subprocess.run(
            [*words, f"{seed + first}"], env=environment(**disk.recorded), check=False, capture_output=True, text=True
        )
        assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    return entries(disk.journal)


def tried(told: Sequence[Entry], point: int, seed: int, folder: Path) -> str:
    """Cut the power after `point` entries, check what is left, and return a short description of it."""
    before = list(told[:point])
    left = PowerCut([entry for entry in before if entry.name != "marks"], "disk").left(seed)
    for name, content in left.items():
        (folder / name).write_bytes(content)
    try:
        return _judged(folder / NAME, _marks(before))
    finally:
        for path in folder.iterdir():
            path.unlink()


def _marks(told: Sequence[Entry]) -> list[dict[str, Any]]:
    text = b"".join(entry.data for entry in told if entry.name == "marks" and entry.kind == "W")
    return [json.loads(line) for line in text.splitlines()]


def _judged(path: Path, marks: list[dict[str, Any]]) -> str:
    lasting = [mark for mark in marks if mark.get("durable")]
    if not path.exists():
        assert not lasting, "the file is gone"
        return "no file yet"
    with closing(HistoryStore(path)) as store:  # raises if it is damaged
        left = read_checkpoint(store)
        found = {name[:3]: name for name in names(store.job_records(JobRecordQuery(limit=10_000)))}
        books = store.closed_books()
        _whole(path)
    assert left is not None or not lasting, "no checkpoint"
    for mark in lasting:
        for job, life, start, paid in mark["ended"]:
            assert found[job, life, start][3] >= paid, f"the receipt of {job} is lost"
    if left is None:
        return "no checkpoint yet"
    head = read_header(left.ledger)
    assert head.at >= max((mark["at"] for mark in lasting), default=0), "more is lost than one interval"
    way = books_closed(left, HostTime(5 * SECOND, head.wall + 60 * SECOND, "another boot"), node="node")
    _conserved(way, [*books, *way.closed])
    return "as the last write left it" if not marks or head.at >= _latest(marks) else "as an earlier write left it"


def _latest(marks: list[dict[str, Any]]) -> int:
    return max(mark["at"] for mark in marks if "durable" in mark) if any("durable" in m for m in marks) else 0


def _whole(path: Path) -> None:
    import sqlite3  # noqa: PLC0415  beside the code under test

    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def _conserved(way: StartFresh, books: Sequence[Any]) -> None:
    """Assert that every second of every GPU is in one book, and that the parts of each book add up."""
    assert len(way.closed) == len(way.edges) == 8, (len(way.closed), len(way.edges), way.reason)
    for each in (*books, *way.job_records):
        assert sum(each.parts.values()) == each.paid
    for uuid in way.edges:
        mine = sorted((book for book in books if book.uuid == uuid), key=lambda book: book.since)
        for book in mine:
            assert abs(book.until - book.since - book.paid / SECOND) < 1e-5, "a second is not paid for"
        for before, after in pairwise(mine):
            assert abs(after.since - before.until) < 1e-5, "two books do not touch"


def _pairs(count: int, length: int, seed: int) -> list[tuple[int, int]]:
    """Yield every point once if `pairs` suffice, and random points for the rest."""
    chance = random.Random(seed)  # noqa: S311
    points = [*range(length + 1)] if count > length else []
    points += [chance.randint(0, length) for _ in range(count - len(points))]
    return [(point, chance.randrange(1 << 30)) for point in points]


def many(pairs: int, seed: int) -> Counter[str]:
    """Try power cuts on one recording and count the outcomes; raises AssertionError at the first failure."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        told = recorded(Path(folder), seed)
        left = Path(folder) / "left"
        left.mkdir()
        for point, coin in _pairs(pairs, len(told), seed):
            try:
                found[tried(told, point, coin, left)] += 1
            except BaseException as err:
                err.add_note(f"after {point} of {len(told)} entries, coin {coin}, recording {seed}")
                raise
    found["entries"] = len(told)
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args, began = parser.parse_args(), time.monotonic()
    found = many(args.pairs, args.seed)
    print(f"{args.pairs} power cuts in {time.monotonic() - began:.0f} s: {dict(found)}")  # noqa: T201  its answer


if __name__ == "__main__":
    main()
