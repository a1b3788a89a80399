"""Changing thresholds of a running ledger: booked time stays, timers continue, nothing is reversed."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Gpu, Ledger, conserved
from exporter.core.model import SECOND, Observation, Owner, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from tests.worlds import JOB, RESTING, SPINNING, WORKING, device, first, held, reading, seen

DEFAULT = Policy()


def resting(seconds: float, signals: dict[str, Any] | None = None, *, owner: Owner | None = JOB) -> Ledger:
    """A GPU with constant activity for `seconds`."""
    ledger = Ledger()
    advance(ledger, first([device()], [] if owner is None else [held(owner=owner)]))
    goes_on(ledger, 0, seconds, signals)
    return ledger


def goes_on(ledger: Ledger, start: float, end: float, signals: dict[str, Any] | None = None) -> None:
    """Advance in steps of a minute, and check that no counter decreases."""
    at = start
    while at < end:
        step = min(at + 60, end)
        before = list(gpu(ledger).book.parts)
        advance(ledger, seen(step, reading(at, step, signals or RESTING)))
        assert all(now >= then for now, then in zip(gpu(ledger).book.parts, before, strict=True))
        assert conserved(gpu(ledger).book)
        at = step
    assert ledger.conservation_errors == 0


def gpu(ledger: Ledger) -> Gpu:
    return ledger.gpus["GPU-0"]


def state(ledger: Ledger) -> tuple[State, float]:
    return gpu(ledger).state, gpu(ledger).since / SECOND


def test_a_lower_threshold_holds_from_now_on() -> None:
    """A GPU idle for longer than the new limit is a zombie from now on; booked time is not rewritten."""
    ledger = resting(1200)
    assert state(ledger) == (State.STALLED, 0)
    ledger.update_policy(Policy(zombie_batch_seconds=600), {})
    goes_on(ledger, 1200, 1260)
    assert state(ledger) == (State.ZOMBIE, 1200)
    assert (gpu(ledger).timers.zombies, gpu(ledger).timers.to_zombie) == (1, 1200 * SECOND)
    assert gpu(ledger).book.paid == 1260 * SECOND


def test_what_is_due_at_once_begins_without_a_moment_of_what_was_before() -> None:
    ledger = resting(1200)
    goes_on(ledger, 1200, 1201, WORKING)
    assert ledger.state_entries[State.STALLED] == 1
    ledger.update_policy(Policy(zombie_batch_seconds=600), {})
    goes_on(ledger, 1201, 1260)
    assert state(ledger) == (State.ZOMBIE, 1201)
    assert (ledger.state_entries[State.STALLED], ledger.state_entries[State.ZOMBIE]) == (1, 1)


def test_a_threshold_not_reached_yet_counts_the_time_before() -> None:
    ledger = resting(1200)
    ledger.update_policy(Policy(zombie_batch_seconds=1250), {})
    goes_on(ledger, 1200, 1320)
    assert state(ledger) == (State.ZOMBIE, 1250)


def test_a_zombie_that_is_one_by_the_new_threshold_too_stays_one_since_when_it_was() -> None:
    ledger = resting(2400)
    assert state(ledger) == (State.ZOMBIE, 1800)
    ledger.update_policy(Policy(zombie_batch_seconds=900), {})
    goes_on(ledger, 2400, 2520)
    assert state(ledger) == (State.ZOMBIE, 1800)
    assert gpu(ledger).timers.zombies == 1


def test_a_higher_threshold_lets_a_zombie_go_until_it_is_one_again() -> None:
    ledger = resting(2400)
    ledger.update_policy(Policy(zombie_batch_seconds=3600), {})
    goes_on(ledger, 2400, 2460)
    assert state(ledger) == (State.STALLED, 2400)
    goes_on(ledger, 2460, 5000)
    assert state(ledger)[0] is State.ZOMBIE


def test_a_lower_limit_of_an_owner_reverses_nothing_either() -> None:
    """Owner attributes learned late or changed by a reload take effect in the same way."""
    ledger = resting(6000, owner=replace(JOB, zombie_seconds=7200.0))
    paid = list(gpu(ledger).book.parts)
    owner = replace(JOB, zombie_seconds=1800.0)
    advance(ledger, Observation(6000 * SECOND, 6000 * SECOND, allocations=(held(owner=owner),)))
    goes_on(ledger, 6000, 6060)
    assert state(ledger) == (State.ZOMBIE, 6000)
    grown = {n: b - a for n, a, b in zip(LEAK_NAMES, paid, gpu(ledger).book.parts, strict=True) if a != b}
    assert sum(grown.values()) == 60 * SECOND
    assert all(part > 0 for part in grown.values())


def test_hangs_follow_likewise() -> None:
    ledger = resting(60, WORKING)
    goes_on(ledger, 60, 310, SPINNING)
    assert state(ledger)[0] is State.ACTIVE
    ledger.update_policy(Policy(hang_seconds=130), {})
    goes_on(ledger, 310, 320, SPINNING)
    assert state(ledger) == (State.HUNG, 310)
    ledger.update_policy(Policy(hang_seconds=900), {})
    goes_on(ledger, 320, 330, SPINNING)
    assert state(ledger)[0] is State.ACTIVE


def test_a_leaked_kernel_likewise() -> None:
    ledger = resting(120, WORKING, owner=None)
    assert state(ledger)[0] is State.UNOWNED
    ledger.update_policy(Policy(unowned_seconds=300), {})
    goes_on(ledger, 120, 180, WORKING)
    assert state(ledger)[0] is not State.UNOWNED
    ledger.update_policy(Policy(unowned_seconds=30), {})
    goes_on(ledger, 180, 240, WORKING)
    assert state(ledger) == (State.UNOWNED, 180)


def test_one_model_may_have_thresholds_of_its_own_and_lose_them() -> None:
    ledger = resting(1200)
    ledger.update_policy(DEFAULT, {"H100": Policy(zombie_batch_seconds=600)})
    goes_on(ledger, 1200, 1260)
    assert state(ledger)[0] is State.ZOMBIE
    ledger.update_policy(DEFAULT, {})
    goes_on(ledger, 1260, 1320)
    assert state(ledger)[0] is State.STALLED


def test_the_same_thresholds_change_nothing() -> None:
    once, again = resting(2400), resting(2400)
    again.update_policy(Policy(), {})
    for ledger in (once, again):
        goes_on(ledger, 2400, 3000)
    assert gpu(once).book.parts == gpu(again).book.parts
    assert state(once) == state(again)


@pytest.mark.untraced
@settings(deadline=None)  # a day in minutes
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4000), st.sampled_from([RESTING, SPINNING, WORKING]),
            st.integers(1, 5000), st.integers(1, 1000), st.integers(1, 300),
        ),
        min_size=1, max_size=6,
    ),
    st.booleans(),
)  # fmt: skip
def test_whatever_is_adopted_whenever_the_books_stay_whole(
    story: Sequence[tuple[int, dict[str, Any], int, int, int]], owned: bool
) -> None:
    ledger = resting(60, owner=JOB if owned else None)
    at = 60.0
    for seconds, signals, zombie, hang, wake in story:
        ledger.update_policy(
            Policy(zombie_batch_seconds=zombie, hang_seconds=hang, hang_suspect_seconds=hang / 2, wake_seconds=wake,
                   unowned_seconds=hang), {},
        )  # fmt: skip
        goes_on(ledger, at, at + seconds, signals)
        at += seconds
    assert gpu(ledger).book.paid == at * SECOND
    assert sum(gpu(ledger).book.parts) == gpu(ledger).book.paid


@pytest.mark.parametrize("goal", [0, 1, 10**15])
def test_a_credit_beyond_its_goal_is_due_now_and_never_in_the_past(goal: int) -> None:
    from exporter.core.states import _time_to  # noqa: PLC0415  the one that once pointed backwards

    assert _time_to(10**12, goal, 10**6) >= 0
