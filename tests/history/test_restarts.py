"""Job records equal the ledger to the nanosecond, however often the daemon was restarted."""

import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from exporter.core.checkpoint import dump_ledger, load_ledger, read_header
from exporter.core.job_record import JobRecord, JobRecordQuery, nonzero_by_leak
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.resume import read_checkpoint
from exporter.history.store import ClosedBook, HistoryError, open_read_only
from exporter.simulate.scenarios import SCENARIOS
from tests.history.player import Played, part_of, story
from tests.waiting import PATIENCE

PARTS = dict[str, Counter[str]]


def uninterrupted(observations: list[Observation], edges: Sequence[int] = ()) -> tuple[Ledger, PARTS]:
    """Return the ledger of a daemon that never stopped, and the time of each job by leak.

    At `edges` it drops what a checkpoint omits: the workloads' current values (tested in tests/core).
    """
    ledger, found = Ledger(), PARTS()
    for number, observation in enumerate(observations):
        if number in edges:
            frozen, ledger = dump_ledger(ledger), Ledger()
            load_ledger(ledger, frozen)
        advance(ledger, observation)
        for job in [*ledger.departed, *ledger.jobs.values()]:
            found[job.owner.job_id] = Counter(nonzero_by_leak(tuple(job.book.parts)))
    return ledger, found


class Kept:
    """Content of a store after several daemons."""

    def __init__(self, path: Path) -> None:
        with closing(open_read_only(path)) as store:
            left = read_checkpoint(store)
            assert left is not None
            self.statements, self.books = store.job_records(JobRecordQuery(limit=10_000)), store.closed_books()
        self.about, self.ledger = left.info, Ledger()
        load_ledger(self.ledger, left.ledger)

    def jobs(self) -> PARTS:
        """Return the time of each job by leak over all daemons, including running jobs."""
        named = {(one.owner.job_id, one.life, one.start): one for one in self.statements}
        found: PARTS = {}
        for one in named.values():
            found.setdefault(one.owner.job_id, Counter()).update(one.parts)
        ended = {one.owner.job_id for one in self.statements if one.life == self.about.life}
        for job in self.ledger.jobs.values():
            if job.owner.job_id not in ended or job.owner.job_id in self.ledger.holding:
                found.setdefault(job.owner.job_id, Counter()).update(nonzero_by_leak(tuple(job.book.parts)))
        return found


def lives(observations: list[Observation], edges: list[int], path: Path, ways: list[str]) -> Path:
    """Run one daemon after the other; each ends at an edge in one of the ways. Return the last one's store."""
    boot = 0
    for (first, last), way in zip(pairwise(edges), ways, strict=True):
        life = Played(path, boot=f"{boot}", checkpoint_seconds=3600.0)
        for observation in part_of(observations, first, last):
            life.take_in(observation)
        if way == "kill":  # a copy of the files after a scrape of the newest values
            _saved(life, path)
            path = copied(path)
        life.end()
        boot += way == "boot"
    return path


def _saved(life: Played, path: Path) -> None:
    """Scrape until the file has the newest values: a busy machine may need longer than a scrape waits."""
    newest, deadline = life.agent.latest(), time.monotonic() + PATIENCE
    assert newest is not None
    while True:
        assert life.scrape() is not None
        with suppress(HistoryError), closing(open_read_only(path)) as store:
            left = read_checkpoint(store)
            if left is not None and read_header(left.ledger).at == newest.at:
                return
        assert time.monotonic() < deadline, "it is not saved"
        time.sleep(0.01)


def copied(path: Path) -> Path:
    """Copy both files as they are at one moment: while a transaction reads, the writer does not restart the log."""
    copy = path.with_name(f"x{path.name}")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    return copy


def told(scenario: str) -> list[Observation]:
    return list(story(scenario, period_seconds=30.0))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_statements_of_a_story_in_four_lives_are_the_ledger_of_one(scenario: str, tmp_path: Path) -> None:
    observations = told(scenario)
    edges = [len(observations) * n // 4 for n in range(5)]
    path = lives(observations, edges, tmp_path / "history.db", ["kill", "stop", "kill", "stop"])
    ledger, truth = uninterrupted(observations, edges[1:-1])
    kept = Kept(path)
    assert kept.jobs() == truth
    assert {uuid: gpu.book.paid for uuid, gpu in kept.ledger.gpus.items()} == {
        uuid: gpu.book.paid for uuid, gpu in ledger.gpus.items()
    }
    assert not kept.books
    for one in kept.statements:
        assert sum(one.parts.values()) == one.paid
        assert one.samples[-1].paid == pytest.approx(one.paid / SECOND)
        assert [sample.at for sample in one.samples] == sorted(sample.at for sample in one.samples)


SOME = ("demo", "deadlock", "zombie_notebook", "lost_gpu", "fleet")


@pytest.mark.slow
@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a life takes seconds: no shrinking
@given(scenario=st.sampled_from(SOME), seed=st.integers(0, 1 << 30), count=st.integers(1, 5))
def test_over_any_restarts_no_second_is_lost_or_counted_twice(
    tmp_path_factory: pytest.TempPathFactory, scenario: str, seed: int, count: int
) -> None:
    chance, observations = random.Random(seed), told(scenario)  # noqa: S311
    edges = sorted({0, len(observations), *(chance.randrange(1, len(observations)) for _ in range(count))})
    ways = [chance.choice(("kill", "stop", "boot")) for _ in edges[1:]]
    path = lives(observations, edges, tmp_path_factory.mktemp("lives") / "history.db", [*ways[:-1], "stop"])
    kept, (ledger, truth) = Kept(path), uninterrupted(observations)
    for uuid, gpu in ledger.gpus.items():
        mine = [book for book in kept.books if book.uuid == uuid]
        assert sum(book.paid for book in mine) + kept.ledger.gpus[uuid].book.paid == gpu.book.paid
        _touch(mine)
    for book in kept.books:
        assert sum(book.parts.values()) == book.paid
    assert {job: parts.total() for job, parts in kept.jobs().items()} == {
        job: parts.total() for job, parts in truth.items()
    }


def _touch(books: list[ClosedBook]) -> None:
    for before, after in pairwise(books):
        assert after.since == pytest.approx(before.until, abs=1e-5)


def test_a_scrape_is_told_what_is_saved(tmp_path: Path) -> None:
    """When `checkpointed_view` returns, the store holds the scraped values to the nanosecond."""
    path, life = tmp_path / "history.db", Played(tmp_path / "history.db", checkpoint_seconds=3600.0)
    for number, observation in enumerate(story("deadlock", period_seconds=30.0)):
        life.take_in(observation)
        if number % 10 == 0:
            seen = life.agent.latest()
            assert isinstance(seen, Snapshot)
            _saved(life, path)
            ledger = Kept(path).ledger
            assert [view.counters.now.parts for view in take_snapshot(ledger, DaemonMetadata()).gpus] == [
                view.counters.now.parts for view in seen.gpus
            ]
    life.end()


@pytest.mark.slow
def test_running_jobs_are_told_with_those_that_ended(tmp_path: Path) -> None:
    life = Played(tmp_path / "history.db", checkpoint_seconds=3600.0)
    for observation in list(story("demo"))[:300]:
        life.take_in(observation)
    life.scrape()
    found = life.history.job_records(JobRecordQuery())
    running = [one for one in found if one.running]
    assert running
    assert [one.running for one in found] == sorted((one.running for one in found), reverse=True)
    one: JobRecord = running[0]
    assert life.history.job_records(JobRecordQuery(job_id=one.owner.job_id)) == [one]
    assert life.history.job_records(JobRecordQuery(limit=1)) == found[:1]
    assert [event.kind for event in life.history.events(0, 10)][-1] == "started"
    life.end()
