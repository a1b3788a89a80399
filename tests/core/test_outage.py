"""The owners of GPUs are unknown for a while, because the scheduler does not answer."""

from typing import Any

import pytest

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Owner, Process, State
from exporter.core.pipeline import advance
from tests.core.test_states import Signals, lost, state
from tests.core.test_told import said
from tests.worlds import JOB, RESTING, SOMEBODY, SPINNING, WORKING, S, device, first, held, reading, seen


class Outage:
    """Job 41 on GPU-0 and GPU-1, and job 42 on GPU-2, in readings of ten seconds."""

    def __init__(self) -> None:
        self.ledger, self.at, self.known = Ledger(), 0.0, 0.0
        owners = {"GPU-0": JOB, "GPU-1": JOB, "GPU-2": Owner("42", zombie_seconds=9e4)}
        self.allocations = tuple(held(uuid, owner, gpus=2) for uuid, owner in owners.items())
        boards = [device(uuid, uuid[-1]) for uuid in owners]
        advance(self.ledger, first(boards, self.allocations))

    def go(self, seconds: float, *signals: Signals, answers: bool = True, **more: Any) -> None:
        """Each GPU with its signals; without an answer the last one is 90 s old before the owners are unknown."""
        for _ in range(round(seconds / 10)):
            start, self.at = self.at, self.at + 10
            self.known = self.at if answers else self.known
            rows = [reading(start, self.at, each, f"GPU-{n}") for n, each in enumerate(signals)]
            advance(self.ledger, seen(self.at, *rows, allocations_at=round(self.known * S), **more))
            more = {}

    def states(self) -> list[State]:
        return [gpu.state for gpu in self.ledger.gpus.values()]

    def holders(self) -> set[str]:
        return {each.owner.job_id for gpu in self.ledger.gpus.values() for each in gpu.holders}


def test_a_hang_outlives_a_scheduler_that_does_not_answer_and_is_detected_once() -> None:
    """GPU-0 is hung and GPU-1 its culprit, before, meanwhile, and afterwards; the job on GPU-2 rests by itself."""
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    node.go(1900, SPINNING, RESTING, RESTING)
    states = [State.HUNG, State.HUNG, State.STALLED]
    assert (node.states(), node.holders()) == (states, {"41", "42"})
    node.go(200, SPINNING, RESTING, RESTING, answers=False)
    assert (node.states(), node.holders()) == (states, {"unknown"})
    startup = lost(node.ledger, "startup")
    node.go(10, SPINNING, RESTING, RESTING)
    assert (node.states(), node.holders()) == (states, {"41", "42"})
    assert lost(node.ledger, "startup") == startup
    assert lost(node.ledger, "hung") == 2200 + 10 - (300 + 1800) + 200
    assert node.ledger.gpus["GPU-0"].timers.hangs == 1


def test_a_spin_goes_on_while_its_owner_is_unknown() -> None:
    """Of the 600 s, 400 are seen before, 110 meanwhile, and 90 in which the last answer was young enough."""
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    node.go(400, SPINNING, SPINNING, WORKING)
    node.go(190, SPINNING, SPINNING, WORKING, answers=False)
    assert State.HUNG not in node.states()
    node.go(20, SPINNING, SPINNING, WORKING)
    assert state(node.ledger) == (State.HUNG, "spinning", 900.0)


def test_a_zombie_outlives_a_scheduler_that_does_not_answer() -> None:
    node = Outage()
    node.go(30, WORKING, WORKING, WORKING)
    node.go(2000, RESTING, RESTING, RESTING)
    node.go(200, RESTING, RESTING, RESTING, answers=False)
    before = lost(node.ledger, "idle_allocation")
    node.go(100, RESTING, RESTING, RESTING)
    assert lost(node.ledger, "idle_allocation") - before == 100.0
    assert node.ledger.gpus["GPU-0"].timers.zombies == 1


def test_another_job_that_is_there_after_the_outage_begins_anew() -> None:
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    node.go(700, SPINNING, SPINNING, WORKING)
    node.go(200, SPINNING, SPINNING, WORKING, answers=False)
    assert node.states()[0] is State.HUNG
    other = tuple(held(f"GPU-{n}", Owner("43"), start=1100.0) for n in range(3))
    node.go(10, SPINNING, SPINNING, WORKING, allocations=other)
    assert (node.states()[0], node.holders()) == (State.ACTIVE, {"43"})


INTEGER: Signals = SPINNING | {"sm_active": 0.6, "power_watts": 500.0}
"""Kernels of integer work, which only the power shows: of a job that has used the tensor cores they would be a spin."""
OTHERS = (Process(4343, 1 << 30),)


@pytest.mark.parametrize("ends", [True, False])
def test_other_processes_that_are_there_while_owners_are_unknown_are_another_job(*, ends: bool) -> None:
    """Job 41 ends unseen, and somebody else computes; its own processes would hang."""
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    node.go(120, RESTING, RESTING, WORKING, answers=False)
    node.go(2000, INTEGER | {"processes": OTHERS if ends else SOMEBODY}, RESTING, WORKING, answers=False)
    assert node.states()[0] is (State.ACTIVE if ends else State.HUNG)
    unknown = node.ledger.jobs["unknown"].book.parts
    assert unknown[LEAK_NAMES.index("failure_recovery")] == 0
    assert (unknown[LEAK_NAMES.index("startup")] > 0) is ends


def test_the_next_attempt_of_a_crash_loop_is_no_other_job() -> None:
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    timers = node.ledger.gpus["GPU-0"].timers
    timers.hung = timers.looping = True
    for pid in range(5001, 5005):
        node.go(60, RESTING | {"processes": (Process(pid, 1 << 30),)}, WORKING, WORKING, answers=False)
        assert node.states()[0] is State.HUNG
    node.go(10, RESTING | {"processes": OTHERS}, WORKING, WORKING)
    assert node.states()[0] is State.HUNG


def test_other_processes_after_a_zombie_are_none() -> None:
    node = Outage()
    node.go(30, WORKING, WORKING, WORKING)
    node.go(2000, RESTING, RESTING, WORKING)
    node.go(100, RESTING, RESTING, WORKING, answers=False)
    node.go(100, RESTING | {"processes": OTHERS}, RESTING, WORKING, answers=False)
    assert node.states()[:2] == [State.STALLED, State.ZOMBIE]


def test_the_unknown_job_may_be_several_that_do_not_wait_for_each_other() -> None:
    """From the start of the daemon on nobody knows who holds what: GPU-0 hangs, GPU-1 rests."""
    ledger = Ledger()
    advance(ledger, first([device(), device("GPU-1", "1")]))
    for at in range(100, 4000, 100):
        rows = reading(at - 100, at, SPINNING), reading(at - 100, at, RESTING, "GPU-1")
        advance(ledger, seen(at, *rows, allocations_at=-100 * S))
    assert state(ledger)[:2] == (State.HUNG, "spinning")
    assert state(ledger, "GPU-1")[0] is State.ZOMBIE


@pytest.mark.parametrize("processes", [SOMEBODY, ()])
def test_what_a_job_reports_of_a_time_in_which_its_gpu_was_nobody_s_is_not_booked_later(processes: object) -> None:
    """Of 300 s in which it loads data 110 were the unknown job's, or unobserved: 190 are booked, as it goes on so."""
    rests = RESTING | {"processes": processes}
    node = Outage()
    node.go(300, WORKING, WORKING, WORKING)
    node.go(100, rests, WORKING, WORKING, reports=(said(290, 300, uuids=("GPU-0",)),))
    node.go(200, rests, WORKING, WORKING, answers=False)
    told = said(300, 600, uuids=("GPU-0",), phases={"data": 300.0})
    node.go(300, rests, WORKING, WORKING, reports=(told,))
    booked = node.ledger.jobs["41"].book.parts[LEAK_NAMES.index("data_stall")] / S
    assert booked == pytest.approx(190.0)
