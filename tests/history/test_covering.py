"""A scrape gets only what a restart can never fall behind, whatever the disk does."""

import random
from typing import Any

from msgspec.structs import replace

from exporter.config import HistorySettings as Settings
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.recorder import CheckpointCoverage, resume_window
from tests.each import each

YOUNG = 100 * SECOND
EMPTY = take_snapshot(Ledger(), DaemonMetadata())


def at(seconds: float, **meta: Any) -> Snapshot:
    return replace(EMPTY, at=round(seconds * SECOND), meta=DaemonMetadata(**meta))


def told(covered: CheckpointCoverage, now: float) -> float | None:
    found = covered.view(at(now), round(now * SECOND))
    return None if found is None else found.at / SECOND


def test_of_an_empty_store_everything_is_told_at_once() -> None:
    assert told(CheckpointCoverage(YOUNG), 5) == 5


def test_what_is_saved_is_told_and_what_is_newer_waits() -> None:
    covered = CheckpointCoverage(YOUNG)
    covered.attempt(at(10), 10 * SECOND)
    assert told(covered, 11) == 10, "who was free was told no more than that"
    covered.succeed(at(10))
    assert told(covered, 10) == 10
    assert told(covered, 12) == 10


def test_what_waits_is_told_with_what_the_daemon_says_of_itself_now() -> None:
    covered = CheckpointCoverage(YOUNG)
    covered.attempt(at(10), 10 * SECOND)
    covered.succeed(at(10, last_error="old"))
    found = covered.view(at(12, last_error="the disk hangs"), 12 * SECOND)
    assert found is not None
    assert (found.at, found.meta.last_error) == (10 * SECOND, "the disk hangs")


def test_nothing_is_told_before_another_daemons_checkpoint_is_covered() -> None:
    covered = CheckpointCoverage(YOUNG)
    covered.inherit(10 * SECOND)
    assert told(covered, 20) is None
    assert told(covered, 110) is None
    assert told(covered, 111) == 111, "nobody would go on from it any more"


def test_a_file_that_says_that_it_was_outrun_sets_free() -> None:
    covered = CheckpointCoverage(YOUNG)
    covered.attempt(at(10), 10 * SECOND)
    covered.succeed(at(10))
    assert told(covered, 20) == 10
    covered.mark_stale()
    assert told(covered, 20) == 20


def test_a_new_attempt_does_not_take_back_what_was_told_meanwhile() -> None:
    covered = CheckpointCoverage(YOUNG)
    covered.attempt(at(10), 10 * SECOND)
    covered.succeed(at(10))
    covered.mark_stale()
    assert told(covered, 50) == 50
    covered.attempt(at(51), 51 * SECOND)
    assert told(covered, 52) == 51


def test_how_old_a_checkpoint_may_be_follows_the_interval() -> None:
    assert resume_window(Settings(checkpoint_seconds=60.0)) == 150 * SECOND


@each("seed", range(50))
def test_whatever_happens_nothing_goes_back_and_no_restart_goes_behind_it(seed: int) -> None:
    """The file may hold the last checkpoint that surely succeeded, or any attempted since."""
    chance, covered, now, seen = random.Random(seed), CheckpointCoverage(YOUNG), 0, 0  # noqa: S311
    may_hold: list[int | None] = [None]
    for _ in range(300):
        now += chance.choice((1, 10, 60))
        match chance.randrange(5):
            case 0:
                covered.attempt(at(now), now * SECOND)
                may_hold.append(now)
            case 1 if may_hold[-1] is not None:
                covered.succeed(at(may_hold[-1]))
                del may_hold[:-1]
            case 2:
                covered.mark_stale()
                may_hold = [None]
            case _:
                found = told(covered, now)
                assert found is not None
                assert found >= seen, "told less than before"
                seen = round(found)
        goes_on = [moment for moment in may_hold if moment is not None and now - moment <= YOUNG / SECOND]
        assert all(moment >= seen for moment in goes_on), "a restart would go back"
