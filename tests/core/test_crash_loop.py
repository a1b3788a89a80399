"""Jobs that worked, crash, and crash again in every attempt."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.ledger import Ledger
from exporter.core.model import Observation, Owner, Process, State, TrainingReport
from exporter.core.pipeline import advance
from tests.core.test_checkpoint import again
from tests.core.test_states import Signals, lost, state, story
from tests.worlds import JOB, RESTING, WORKING, S, held, reading, seen

FREE: Signals = {"memory_used_bytes": 0.5e9, "memory_total_bytes": 85e9, "processes": None}
FULL: Signals = FREE | {"memory_used_bytes": 40e9}
ATTEMPT = [(60.0, RESTING | FREE), (60.0, RESTING | FULL)]
"""Two minutes: nothing, then weights are loaded, and no work is done."""


def crashing(
    attempts: int, *, runs: float = 600, owner: Owner = JOB, last: tuple[float, Signals] | None = None
) -> Ledger:
    phases = [(10.0, RESTING | FREE), (runs, WORKING | FULL), *ATTEMPT * attempts]
    return story(phases if last is None else [*phases, last], owner=owner)


def test_a_job_that_restarts_without_getting_to_work_is_hung() -> None:
    """The first restart is no failure yet; the fifth after it comes ten minutes later, at 610 + 6 x 120 - 60 s."""
    assert state(crashing(5))[0] is State.STALLED
    ledger = crashing(6)
    assert state(ledger) == (State.HUNG, "crash_loop", 1270.0)
    assert lost(ledger, "hung") == 60.0
    assert lost(ledger, "failure_recovery") == 600.0
    timers = ledger.gpus["GPU-0"].timers
    assert (timers.hangs, timers.to_hang) == (1, 600 * S)
    assert state(crashing(9)) == (State.HUNG, "crash_loop", 1270.0), "it stays hung until it works"


def test_work_or_steps_end_a_crash_loop() -> None:
    """Ten seconds of work: 10.5 at 95 %."""
    assert state(crashing(6, last=(10.0, WORKING | FULL)))[0] is State.HUNG
    assert state(crashing(6, last=(20.0, WORKING | FULL)))[0] is State.ACTIVE
    ledger = crashing(6)
    report = TrainingReport("41", 1300 * S, 1320 * S, gpus=1, uuids=("GPU-0",), step=9, steps=1)
    advance(ledger, seen(1340, reading(1330, 1340, RESTING | FULL), reports=(report,)))
    assert state(ledger)[0] is State.STALLED


@pytest.mark.parametrize(("runs", "owner", "kind"), [
    (330, JOB, State.HUNG), (300, JOB, State.STALLED), (600, replace(JOB, workload_class="interactive"), State.STALLED),
])  # fmt: skip
def test_short_programs_one_after_another_are_no_loop(runs: float, owner: Owner, kind: State) -> None:
    """Five minutes of work are 316 s; a notebook's kernel may be restarted as often as one likes."""
    assert state(crashing(6, runs=runs, owner=owner))[0] is kind


@pytest.mark.parametrize(("works", "kind"), [(5.2, State.HUNG), (5.4, State.STALLED)])
def test_programs_that_do_half_the_work_of_a_start_up_are_no_attempts_that_fail(works: float, kind: State) -> None:
    """Five seconds at 95 %, as of a script that trains and then evaluates its checkpoints, with a process for each.

    The attempts of a crash loop may compute, too: a trial step, before the one that fails.
    """
    program = [(80.0, RESTING | FREE), (10.0, RESTING | FULL), (works, WORKING | FULL)]
    assert state(story([(600.0, WORKING | FULL), *program * 8, (10.0, RESTING | FREE)], step=1.0))[0] is kind


def test_a_program_that_works_between_attempts_that_fail_ends_their_row() -> None:
    """After four restarts without work a short program, and then four more: five in a row would be a loop."""
    begun, program = [(600.0, WORKING | FULL)], [*ATTEMPT, (6.0, WORKING | FULL)]
    assert state(story([*begun, *ATTEMPT * 4, *program, *ATTEMPT * 4, (1.0, RESTING | FREE)]))[0] is State.STALLED
    assert state(story([*begun, *ATTEMPT * 9, (1.0, RESTING | FREE)]))[0] is State.HUNG


def test_attempts_that_are_quick_need_ten_minutes_too() -> None:
    quick = [(30.0, RESTING | FREE), (30.0, RESTING | FULL)]
    phases = [(10.0, RESTING | FREE), (600.0, WORKING | FULL)]
    assert state(story([*phases, *quick * 10]))[0] is State.STALLED
    assert state(story([*phases, *quick * 11]))[0] is State.HUNG


def test_processes_that_replace_each_other_show_restarts_as_well() -> None:
    """With a list of processes memory counts no restart once more."""

    def phases() -> Iterator[tuple[float, Signals]]:
        yield 600, WORKING | FULL | {"processes": (Process(1, 1 << 30),)}
        for pid in range(2, 9):
            yield 60, RESTING | FREE | {"processes": ()}
            yield 60, RESTING | FULL | {"processes": (Process(pid, 1 << 30),)}

    ledger = story(phases())
    assert state(ledger) == (State.HUNG, "crash_loop", 1260.0)
    assert ledger.gpus["GPU-0"].timers.attempts == 6


def test_a_crash_loop_outlives_a_restart_of_the_daemon_and_a_change_of_limits() -> None:
    ledger = again(crashing(6))
    changed = held(owner=replace(JOB, hang_seconds=7200.0))
    at = 1340.0
    advance(ledger, seen(at, reading(1330, at, RESTING | FULL), allocations=(changed,)))
    assert state(ledger)[:2] == (State.HUNG, "crash_loop")


def test_another_holder_begins_anew() -> None:
    ledger = crashing(6)
    other: Any = held(owner=replace(JOB, job_id="42"), start=1330.0)
    advance(
        ledger, Observation(1340 * S, 1340 * S, readings=(reading(1330, 1340, RESTING | FULL),), allocations=(other,))
    )
    assert state(ledger)[0] is State.STALLED
    timers = ledger.gpus["GPU-0"].timers
    assert (timers.looping, timers.attempts, timers.work_before) == (False, 0, 0)
