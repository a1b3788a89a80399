"""A daemon resumes from a previous checkpoint or starts fresh where its books end; counters never decrease a little."""

import os
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from exporter.agent.agent import Agent
from exporter.core.checkpoint import CheckpointHeader, dump_ledger, read_header
from exporter.core.ledger import Ledger
from exporter.core.model import MS, SECOND
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata
from exporter.history.job_tracker import JobTracker
from exporter.history.resume import (
    HostTime,
    decide,
    encode_info,
    read_checkpoint,
    resume_or_start_fresh,
    unclosed_books,
)
from exporter.history.store import HistoryError, HistoryStore, boot_id, note_unsaved, store_path
from tests.history.player import story

YOUNG = 150 * SECOND


class Left(NamedTuple):
    """A daemon's state some way into a scenario."""

    ledger: Ledger
    memory: JobTracker

    @property
    def at(self) -> int:
        return self.ledger.at or 0

    @property
    def wall(self) -> int:
        return self.ledger.wall


@cache
def left_behind() -> Left:
    """Play it once, and not when the tests are collected: every worker collects every file."""
    from exporter.core.snapshot import take_snapshot  # noqa: PLC0415  here alone

    ledger, memory = Ledger(), JobTracker(node="node", ledger_id="before")
    for observation in islice(story(), 200):
        advance(ledger, observation)
        memory.update(take_snapshot(ledger, DaemonMetadata()))
    return Left(ledger, memory)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[HistoryStore]:
    with closing(HistoryStore(tmp_path / "history.db")) as store:
        fill(store)
        yield store


def fill(store: HistoryStore, *, frozen: bytes | None = None, **about: Any) -> None:
    store.write(
        state=[
            encode_info("before", "boot", **about),
            ("ledger", dump_ledger(left_behind().ledger) if frozen is None else frozen),
            ("tallies", left_behind().memory.dump_tallies()),
            ("courses", left_behind().memory.dump_samples()),
        ]
    )


def moment(away: float, *, wall_away: float | None = None, boot: str = "boot") -> HostTime:
    wall_away = away if wall_away is None else wall_away
    return HostTime(left_behind().at + round(away * SECOND), left_behind().wall + round(wall_away * SECOND), boot)


def came(store: HistoryStore, now: HostTime) -> tuple[Agent, Any]:
    agent = Agent(meta=DaemonMetadata())
    return agent, resume_or_start_fresh(
        store, agent, JobTracker(node="node", ledger_id="after"), now, resume_window=YOUNG
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("about", "away", "goes_on"),
    [
        ({}, {"away": 0}, True),
        ({}, {"away": 150}, True),
        ({}, {"away": 150.001}, False),
        ({"clean": True}, {"away": 86_400}, True),
        ({"clean": True, "outrun": True}, {"away": 1}, False),
        ({"outrun": True}, {"away": 1}, False),
        ({"clean": True}, {"away": 1, "boot": "another"}, False),
        ({"clean": True}, {"away": 1, "boot": ""}, False),
        ({}, {"away": -1}, False),
        ({}, {"away": 10, "wall_away": -7200}, True),
    ],
)
def test_it_goes_on_only_where_no_scrape_can_have_outrun_it(
    store: HistoryStore, about: dict[str, Any], away: dict[str, Any], *, goes_on: bool
) -> None:
    fill(store, **about)
    agent, found = came(store, moment(**away))
    assert (found.checkpoint_at == left_behind().at) is goes_on
    assert (found.tracker.ledger_id == "before") is goes_on
    assert (found.closed is None) is goes_on
    assert bool(agent.ledger.gpus) is goes_on
    if goes_on:
        assert found.tracker.tallies == left_behind().memory.tallies
        assert found.tracker.samples == left_behind().memory.samples


def test_an_empty_boot_id_is_no_boot(store: HistoryStore) -> None:
    store.write(state=[encode_info("before", "", clean=True)])
    assert came(store, moment(1, boot=""))[1].checkpoint_at is None


def test_who_goes_on_says_in_the_file_that_it_may_be_outrun_from_now_on(store: HistoryStore) -> None:
    fill(store, clean=True)
    came(store, moment(86_400))
    left = read_checkpoint(store)
    assert left is not None
    assert not left.info.clean
    assert came(store, moment(86_401))[1].checkpoint_at is None


def test_where_the_file_cannot_be_told_so_it_does_not_go_on(store: HistoryStore, tmp_path: Path) -> None:
    store.close()
    with closing(HistoryStore(tmp_path / "history.db", read_only=True)) as unwritable:
        agent = Agent(meta=DaemonMetadata())
        with pytest.raises(HistoryError):
            resume_or_start_fresh(
                unwritable, agent, JobTracker(node="node", ledger_id="after"), moment(1), resume_window=YOUNG
            )
    assert not agent.ledger.gpus
    assert agent.ledger.paid_since == read_header(dump_ledger(left_behind().ledger)).edges


def test_who_begins_anew_counts_from_where_the_other_stopped_and_closes_its_books(store: HistoryStore) -> None:
    agent, found = came(store, moment(3600))
    assert agent.ledger.paid_since == {uuid: gpu.book.until for uuid, gpu in left_behind().ledger.gpus.items()}
    closed = {book.uuid: book for book in found.closed.closed}
    for uuid, gpu in left_behind().ledger.gpus.items():
        assert closed[uuid].paid == gpu.book.paid == sum(closed[uuid].parts.values())
        assert closed[uuid].until - closed[uuid].since == pytest.approx(gpu.book.paid / SECOND, abs=1e-5)
        assert closed[uuid].life == "before"
    statements = {one.owner.job_id: one for one in found.closed.job_records}
    assert statements.keys() == left_behind().ledger.jobs.keys()
    for job_id, job in left_behind().ledger.jobs.items():
        assert statements[job_id].paid == job.book.paid
        assert not statements[job_id].running
    assert [event.kind for event in found.closed.events] == ["closed"]


@pytest.mark.parametrize("wall_away", [-3600.0, 0.0, 60.0])
def test_over_a_boot_books_end_at_the_same_time_of_day(store: HistoryStore, wall_away: float) -> None:
    """If the clock was set back, the downtime is 0, not negative."""
    now = HostTime(5 * SECOND, left_behind().wall + round(wall_away * SECOND), "another")
    agent, _ = came(store, now)
    for uuid, gpu in left_behind().ledger.gpus.items():
        behind = left_behind().at - gpu.book.until + round(max(0.0, wall_away) * SECOND)
        assert agent.ledger.paid_since[uuid] == (now.now - behind) // MS * MS
        assert agent.ledger.paid_since[uuid] % MS == 0


def test_over_a_month_it_is_not_believed_that_anybody_paid(store: HistoryStore) -> None:
    agent, found = came(store, HostTime(SECOND, left_behind().wall + 31 * 86_400 * SECOND, "another"))
    assert not agent.ledger.paid_since
    assert found.closed.closed


@pytest.mark.parametrize(
    "frozen",
    [b"", b"\x00", b"\xc1\xff", msgspec.msgpack.encode(CheckpointHeader(99, 1, 1, (), {}, msgspec.Raw(b"\x90")))],
)
def test_of_a_checkpoint_that_cannot_be_read_it_begins_from_nothing(store: HistoryStore, frozen: bytes) -> None:
    fill(store, frozen=frozen, clean=True)
    agent, found = came(store, moment(1))
    assert (found.checkpoint_at, found.closed, found.tracker.ledger_id) == (None, None, "after")
    assert not agent.ledger.paid_since


def test_of_books_that_cannot_be_read_the_edges_still_count(store: HistoryStore) -> None:
    head = msgspec.structs.replace(read_header(dump_ledger(left_behind().ledger)), body=msgspec.Raw(b"\xc0"))
    fill(store, frozen=msgspec.msgpack.encode(head), clean=True)
    agent, found = came(store, moment(1))
    assert found.checkpoint_at is None
    assert found.closed.closed == ()
    assert "cannot be read" in found.closed.reason
    assert agent.ledger.paid_since == head.edges


def test_of_tallies_that_cannot_be_read_it_is_as_of_books(store: HistoryStore) -> None:
    store.write(state=[("tallies", b"\xc1")])
    agent, found = came(store, moment(1))
    assert (found.checkpoint_at, found.tracker.ledger_id) == (None, "after")
    assert agent.ledger.paid_since


def test_a_torn_page_in_a_checkpoint_is_one_that_cannot_be_read(store: HistoryStore) -> None:
    store._db.execute("UPDATE state SET body = x'0102' WHERE name = 'ledger'")
    assert came(store, moment(1))[1].checkpoint_at is None
    assert unclosed_books(store, JobTracker(node="node", ledger_id="after"), moment(1)) is None


def test_of_an_empty_store_nothing_comes(tmp_path: Path) -> None:
    with closing(HistoryStore(tmp_path / "empty.db")) as store:
        assert came(store, moment(1))[1].closed is None


@pytest.mark.parametrize("boot", ["boot", "another"])
@pytest.mark.parametrize("about", [{}, {"clean": True}, {"outrun": True}])
def test_what_was_scraped_and_not_saved_is_not_counted_again(
    store: HistoryStore, about: dict[str, Any], boot: str
) -> None:
    fill(store, **about)
    note_unsaved(store.path, left_behind().wall + 5 * SECOND)
    now = moment(20, boot=boot)
    agent, found = came(store, now)
    assert found.checkpoint_at is None
    assert set(agent.ledger.paid_since.values()) == {now.now - 15 * SECOND}
    assert agent.ledger.paid_since.keys() == left_behind().ledger.gpus.keys()
    assert found.closed.reason == "the exporter was down or could not save for 20 s"


def test_a_lock_file_that_was_made_or_copied_after_the_checkpoint_is_no_note(store: HistoryStore) -> None:
    fill(store, clean=True)
    made = left_behind().wall + 5 * SECOND
    os.utime(f"{store.path}-lock", ns=(made, made))
    assert came(store, moment(20))[1].checkpoint_at == left_behind().at


def test_where_nobody_noted_how_much_was_scraped_it_counts_from_the_first_reading(store: HistoryStore) -> None:
    fill(store, outrun=True)
    agent, found = came(store, moment(20))
    assert not agent.ledger.paid_since
    assert found.closed.closed


@pytest.mark.parametrize("away", [-3600, 0, 21])
def test_a_note_from_before_the_checkpoint_or_of_the_future_says_nothing(store: HistoryStore, away: int) -> None:
    note_unsaved(store.path, left_behind().wall + away * SECOND)
    assert came(store, moment(20))[1].checkpoint_at == left_behind().at


def test_of_a_checkpoint_that_nothing_outran_the_note_says_that_its_edges_count(store: HistoryStore) -> None:
    """The mark is made whatever has failed; a store that was only too large was not outrun."""
    fill(store, outrun=True)
    note_unsaved(store.path, left_behind().wall)
    agent, found = came(store, moment(20))
    assert found.checkpoint_at is None
    assert set(agent.ledger.paid_since.values()) == {left_behind().at}


def test_books_of_another_life_are_closed_before_they_are_written_over_and_ones_own_are_not(
    store: HistoryStore,
) -> None:
    assert unclosed_books(store, JobTracker(node="node", ledger_id="before"), moment(20)) is None
    found = unclosed_books(store, JobTracker(node="node", ledger_id="after"), moment(20))
    assert found is not None
    assert len(found.closed) == len(left_behind().ledger.gpus)


def test_a_decision_is_told_in_words(store: HistoryStore) -> None:
    left = read_checkpoint(store)
    assert left is not None
    assert decide(left, moment(4000), node="node", resume_window=YOUNG).reason == "the exporter was down for 4,000 s"


@pytest.mark.parametrize(
    ("file", "environ", "place"),
    [
        ("", {"STATE_DIRECTORY": "/state"}, None),
        ("/somewhere/else.db", {"STATE_DIRECTORY": "/state"}, "/somewhere/else.db"),
        ("auto", {"STATE_DIRECTORY": "/state"}, "/state/history.db"),
        ("auto", {"STATE_DIRECTORY": "/state:/other"}, "/state/history.db"),
        ("auto", {"STATE_DIRECTORY": ""}, "usual"),
        ("auto", {}, "usual"),
    ],
)
def test_where_it_is_kept(tmp_path: Path, file: str, environ: dict[str, str], place: str | None) -> None:
    wanted = tmp_path / "history.db" if place == "usual" else None if place is None else Path(place)
    assert store_path(file, environ, usual=tmp_path) == wanted


def test_where_nothing_is_there_to_keep_it_nothing_is_kept(tmp_path: Path) -> None:
    assert store_path("auto", {}, usual=tmp_path / "nowhere") is None


def test_what_boot_it_is(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("5e1f\n")
    assert boot_id(tmp_path / "boot_id") == "5e1f"
    assert boot_id(tmp_path / "nothing") == ""
    assert boot_id() == boot_id() != ""
