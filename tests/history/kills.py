"""Kills the whole daemon with SIGKILL in a loop, while jobs start and end and a client scrapes continuously.

`python -m tests.history.kills --times 200` is the long run. At the end, no scraped counter may ever have decreased,
every exported job must have one job record, and every second must be booked once.
"""

import argparse
import random
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from exporter.core.checkpoint import load_ledger
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.ledger import Ledger, conserved
from exporter.core.model import SECOND
from exporter.history.resume import read_checkpoint
from exporter.history.store import open_read_only
from tests.history.served import Node, Served


class Came(NamedTuple):
    """Result of a run."""

    pages: int
    receipts: int
    jobs_told: int
    kills: int
    down: float
    """GPU-seconds of downtime that the daemon reports."""
    seconds: float


def killed(folder: Path, *, times: int, seed: int, longest: float) -> Came:
    """Start and kill the daemon `times` times, within at most `longest` seconds each, and check what is left."""
    node, chance, began = Node(folder, seed=seed), random.Random(seed), time.monotonic()  # noqa: S311
    with node.jobs.at_random():
        for _ in range(times):
            with node.running() as served:
                _live(served, chance, longest)
    with node.running() as served:
        page = served.first()
        time.sleep(1.0)
        down = float(page.total("unobserved_seconds_total", reason="exporter_down"))
        assert served.program.end() == 0, served.program.log()
    receipts = judged(node)
    return Came(node.told.pages, receipts, len(node.told.jobs), times, down, time.monotonic() - began)


def _live(served: Served, chance: random.Random, longest: float) -> None:
    """Scrape until a random time; one daemon in five is killed during start-up."""
    early = chance.random() < 0.2
    if not early:
        served.first()
    killer = threading.Timer(chance.uniform(0.0, longest), served.program.process.kill)
    killer.start()
    while killer.is_alive():
        if early:
            time.sleep(0.02)
        else:
            served.scraped()
    killer.join()


def judged(node: Node) -> int:
    """Check the store that the last daemon left; return the number of its job records."""
    with closing(open_read_only(node.store)) as store:
        left = read_checkpoint(store)
        statements, books = store.job_records(JobRecordQuery(limit=100_000)), store.closed_books()
    assert left is not None
    assert left.info.clean
    assert not books, "it did not always go on"
    _one_each(node, statements)
    _booked(left.ledger, statements)
    return len(statements)


def _one_each(node: Node, statements: list[JobRecord]) -> None:
    by_job = {statement.owner.job_id: statement for statement in statements}
    assert len(by_job) == len(statements), "two receipts of one job"
    assert node.told.jobs.keys() <= by_job.keys(), f"lost: {sorted(node.told.jobs.keys() - by_job.keys())}"
    for job, told in node.told.jobs.items():
        assert by_job[job].paid / SECOND >= float(told) - 1e-9, f"{job} was told more than its receipt says"
        assert not by_job[job].running


def _booked(frozen: bytes, statements: list[JobRecord]) -> None:
    ledger = Ledger()
    load_ledger(ledger, frozen)
    assert ledger.conservation_errors == 0
    for gpu in ledger.gpus.values():
        assert conserved(gpu.book)
        assert gpu.book.paid == gpu.book.until - gpu.book.since
    for job in ledger.jobs.values():
        mine = next(one for one in statements if one.owner.job_id == job.owner.job_id)
        assert mine.paid == job.book.paid == sum(mine.parts.values())
    held = sum(gpu.book.paid - sum(gpu.book.unheld.values()) for gpu in ledger.gpus.values())
    assert held == sum(one.paid for one in statements), "the jobs' receipts are not what their GPUs cost"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(killed(Path(folder), times=args.times, seed=args.seed, longest=4.0))  # noqa: T201  its answer


if __name__ == "__main__":
    main()
