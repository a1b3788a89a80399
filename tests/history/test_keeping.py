"""The recorder's thread on a real file: failures are reported and retried, and block nothing."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from exporter.core.checkpoint import read_header
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.model import Observation
from exporter.history import recorder
from exporter.history.resume import read_checkpoint
from exporter.history.store import DamagedError, HistoryError, HistoryStore, open_if_readable, open_read_only
from tests.history.player import Played, part_of, story
from tests.waiting import wait_for


@cache
def seen() -> list[Observation]:
    return list(islice(story(), 420))


Live = Callable[..., Played]


@pytest.fixture(name="live")
def _live() -> Iterator[Live]:
    with ExitStack() as stack:

        def begin(path: Path, *, boot: str = "boot", every: float = 3600.0) -> Played:
            life = Played(path, boot=boot, checkpoint_seconds=every)
            stack.callback(life.end)
            return life

        yield begin


def until(true: Callable[[], object], what: str) -> None:
    wait_for(true, what, step=0.01)


def play(life: Played, first: int, last: int) -> None:
    for observation in part_of(seen(), first, last):
        life.take_in(observation)


def written(path: Path) -> list[JobRecord]:
    with closing(open_read_only(path)) as store:
        return store.job_records(JobRecordQuery())


@pytest.mark.slow
def test_the_very_first_scrape_is_told_only_what_is_saved(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    first = live(path)
    play(first, 0, 100)
    first.end()
    again = live(path)
    play(again, 100, 101)
    told = again.scrape()
    assert told is again.agent.latest()
    with closing(open_read_only(path)) as store:
        left = read_checkpoint(store)
    assert left is not None
    assert not left.info.clean
    assert left.info.life == again.history._tracker.ledger_id


@pytest.mark.slow
def test_a_job_that_has_ended_is_written_soon_though_nobody_asks(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_JOB_END_SECONDS", 0.2)
    life = live(tmp_path / "history.db")
    play(life, 0, 420)
    until(lambda: life.history.status().saved_at, "a checkpoint")
    ended = {one.owner.job_id for one in life.history.job_records(JobRecordQuery()) if not one.running}
    assert ended
    until(lambda: ended == {one.owner.job_id for one in written(tmp_path / "history.db")}, "its receipt is written")


@pytest.mark.slow
def test_who_listens_is_told_each_job_that_ends(tmp_path: Path) -> None:
    told: list[JobRecord] = []
    life = Played(tmp_path / "history.db", checkpoint_seconds=3600.0)
    life.history._on_end = told.append
    play(life, 0, 420)
    life.end()
    named = {(one.owner.job_id, one.start): one for one in told}
    assert sorted(named) == sorted((one.owner.job_id, one.start) for one in written(tmp_path / "history.db"))
    assert all(not one.running for one in told)


@pytest.mark.slow
def test_without_its_folder_it_fails_tells_and_goes_on_and_heals_when_the_folder_is_there(
    live: Live, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state" / "history.db"
    with caplog.at_level(logging.INFO):
        life = live(path, every=0.05)
        play(life, 0, 420)
    keeps = life.history.status()
    assert (keeps.works, keeps.failures > 0) == (False, True)
    assert "does its folder exist" in keeps.problem
    assert [record.message for record in caplog.records].count(
        f"{keeps.problem}; the daemon goes on, and tries again"
    ) == 1
    assert life.scrape() is life.agent.latest(), "there is nothing that a restart could go on from"
    waiting = {one.owner.job_id for one in life.history.job_records(JobRecordQuery())}
    assert waiting
    assert life.history.events(0, 10)[-1].kind == "started"
    path.parent.mkdir()
    until(lambda: life.history.status().works, "it is kept")
    assert {one.owner.job_id for one in written(path)} <= waiting
    with closing(open_read_only(path)) as store:
        assert [event.kind for event in store.events(0, 1000)].count("started") == 1
    assert {one.owner.job_id for one in life.history.job_records(JobRecordQuery())} == waiting


def test_after_a_failure_it_tries_again_long_before_the_next_checkpoint(live: Live, tmp_path: Path) -> None:
    life = live(tmp_path / "state" / "history.db", every=3600.0)
    play(life, 0, 10)
    assert not life.history.status().works
    assert life.history._seconds_left() <= recorder._RETRY_SECONDS


@pytest.mark.slow
def test_what_a_write_that_fails_would_have_kept_is_in_the_next(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "history.db", list[JobRecord]()
    life = live(path, every=0.05)
    life.history._on_end = told.append
    play(life, 0, 30)
    until(lambda: life.history.status().works, "it is kept")

    write = HistoryStore.write

    def full(store: HistoryStore, **parts: Any) -> None:
        if "ledger" in dict(parts["state"]):
            raise HistoryError("full")
        write(store, **parts)

    with monkeypatch.context() as broken:
        broken.setattr(HistoryStore, "write", full)
        play(life, 30, 420)
        before = life.history.status().failures
        until(lambda: life.history.status().failures > before + 1, "it fails with what has ended")
    until(lambda: life.history.status().works, "it is kept again")
    assert told
    assert {one.owner.job_id for one in told} <= {one.owner.job_id for one in written(path)}


@pytest.mark.slow
def test_a_store_that_turns_up_late_with_books_of_another_life_has_them_closed(live: Live, tmp_path: Path) -> None:
    old, path = tmp_path / "old.db", tmp_path / "state" / "history.db"
    before = live(old)
    play(before, 0, 200)
    before.end()
    life = live(path, every=0.05)
    play(life, 210, 260)
    assert not life.history.status().works
    late = tmp_path / "late"
    late.mkdir()
    old.replace(late / path.name)
    late.rename(path.parent)  # at once: in an empty folder the daemon would begin a store of its own
    until(lambda: life.history.status().works, "it is kept")
    with closing(open_read_only(path)) as store:
        books, left = store.closed_books(), read_checkpoint(store)
    assert len(books) == 8
    assert left is not None
    assert left.info.life == life.history._tracker.ledger_id != books[0].life


def test_a_fault_of_ours_is_logged_and_counted_and_is_not_the_last_word(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = live(tmp_path / "history.db", every=0.05)
    with monkeypatch.context() as broken:
        broken.setattr(recorder, "dump_ledger", lambda _: 1 / 0)
        play(life, 0, 10)
        until(lambda: life.history.status().failures > 1, "it was tried again")
        assert "please report this" in caplog.text
    until(lambda: life.history.status().works, "it is kept")


def test_what_was_left_there_does_not_keep_it_from_watching(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "resume_or_start_fresh", lambda *_, **__: 1 / 0)
    life = live(tmp_path / "history.db", every=0.05)
    play(life, 0, 10)
    until(lambda: life.history.status().works, "it is kept")


def test_a_damaged_file_in_its_place_is_moved_away(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    life = live(path, every=0.05)
    play(life, 0, 30)
    until(lambda: life.history.status().saved_at, "a checkpoint")
    draft = tmp_path / "draft"
    draft.write_bytes(b"no database at all\n" * 1000)
    draft.replace(path)
    until(lambda: list(tmp_path.glob("history.db.damaged-*")), "it is moved away")

    def kept_anew() -> bool:
        with open_if_readable(path) as store:
            return store is not None and store.state("ledger") is not None

    until(kept_anew, "a new one is kept")


def test_a_store_that_is_found_damaged_while_it_is_written_is_moved_away(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.db"
    life = live(path, every=0.05)
    play(life, 0, 30)
    until(lambda: life.history.status().saved_at, "a checkpoint")
    write, bad = HistoryStore.write, [DamagedError(f"{path}: damaged")]

    def once(store: HistoryStore, **parts: Any) -> None:
        if bad:
            raise bad.pop()
        write(store, **parts)

    monkeypatch.setattr(HistoryStore, "write", once)
    until(lambda: list(tmp_path.glob("history.db.damaged-*")), "it is moved away")
    until(lambda: life.history.status().works, "a new one is kept")
    assert life.history.status().failures == 1


def test_a_file_that_takes_a_word_but_no_checkpoint_is_told_that_nobody_may_go_on_from_it(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nearly full disk fails so; then newer values may be scraped at once."""
    path = tmp_path / "history.db"
    life = live(path, every=0.05)
    play(life, 380, 410)
    assert life.scrape() is life.agent.latest()
    write = HistoryStore.write

    def little(store: HistoryStore, **parts: Any) -> None:
        if "ledger" in dict(parts["state"]):
            raise HistoryError("full")
        write(store, **parts)

    monkeypatch.setattr(HistoryStore, "write", little)
    until(lambda: not life.history.status().works, "it fails")
    play(life, 410, 411)  # within the resume window
    newest = life.agent.latest()
    assert newest is not None
    until(lambda: (told := life.scrape()) is not None and told.at == newest.at, "as it was at the latest attempt")
    with closing(open_read_only(path)) as store:
        left = read_checkpoint(store)
    assert left is not None
    assert left.info.outrun
    monkeypatch.undo()
    until(lambda: life.history.status().works, "it is kept")
    with closing(open_read_only(path)) as store:
        left = read_checkpoint(store)
    assert left is not None
    assert not left.info.outrun


def test_while_a_file_takes_nothing_scrapes_are_told_what_a_restart_would_go_on_from(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or broken disk takes not even the mark; killed and restarted on a disk that works again, it goes on."""
    path = tmp_path / "history.db"
    life = live(path, every=0.05)
    play(life, 380, 410)
    saved = life.scrape()
    assert saved is life.agent.latest()
    assert saved is not None

    def nothing(_: HistoryStore, **__: Any) -> None:
        raise HistoryError("full")

    monkeypatch.setattr(HistoryStore, "write", nothing)
    until(lambda: not life.history.status().works, "it fails")
    play(life, 410, 412)  # within the resume window
    assert (told := life.scrape()) is not None
    assert told.at == saved.at
    with closing(open_read_only(path)) as store:
        assert (left := read_checkpoint(store)) is not None
    assert not left.info.outrun
    assert read_header(left.ledger).at == saved.at, "a daemon that starts now continues from what was scraped last"
    play(life, 412, 420)  # beyond it
    assert life.scrape() is life.agent.latest()


@pytest.mark.parametrize("boot", ["boot", "another"])
def test_what_a_disk_did_not_take_is_not_counted_again_by_the_next_daemon(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    """Prometheus adds up what it scraped of all of them."""
    path, paid = tmp_path / "history.db", list[int]()

    def nothing(_: HistoryStore, **__: Any) -> None:
        raise HistoryError("full")

    def stop(life: Played) -> None:
        until(lambda: life.scrape() is life.agent.latest(), "the newest values are scraped")
        paid.append(_paid(life))
        life.end()

    stopped = live(path)
    play(stopped, 0, 20)
    stop(stopped)
    with monkeypatch.context() as broken:
        broken.setattr(HistoryStore, "write", nothing)
        never_saved = live(path, every=0.05)
        play(never_saved, 21, 40)
        stop(never_saved)
    later = live(path, every=0.05)
    play(later, 41, 60)
    until(lambda: later.history.status().saved_at, "a checkpoint")
    with monkeypatch.context() as broken:
        broken.setattr(HistoryStore, "write", nothing)
        until(lambda: not later.history.status().works, "it fails")
        play(later, 60, 80)
        stop(later)
    last = live(path, boot=boot)
    play(last, 81, 83)
    paid.append(_paid(last))
    whole = live(tmp_path / "whole.db")
    play(whole, 0, 83)
    assert sum(paid) == _paid(whole)


def _paid(life: Played) -> int:
    newest = life.agent.latest()
    assert newest is not None
    return sum(gpu.counters.now.paid for gpu in newest.gpus)


def test_two_of_them_on_one_file_do_not_meet(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    one, other = live(path, every=0.05), live(path, every=0.05)
    play(one, 0, 50)
    play(other, 0, 50)
    assert "another daemon" in other.history.status().problem
    assert one.history.status().works
    one.end()
    until(lambda: other.history.status().works, "the other one has it")


def test_a_stop_before_anything_was_seen_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    first = Played(path)
    play(first, 0, 100)
    first.end()
    again = Played(path)
    again.clock.at, again.clock.wall_at = seen()[100].at, seen()[100].wall
    again.history.begin(again.agent)
    again.history.end()
    with closing(HistoryStore(path)) as store:
        left = read_checkpoint(store)
    assert left is not None
    third = Played(path)
    third.take_in(_told_again(100))
    assert third.agent.ledger.gpus.keys() == first.agent.ledger.gpus.keys()
    third.end()


def _told_again(number: int) -> Observation:
    return next(part_of(seen(), number, number + 1))
