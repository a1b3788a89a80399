"""Several jobs on one GPU, of which some stay while others come and go."""

from typing import Any

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import Owner, Process, State
from exporter.core.pipeline import advance
from tests.worlds import RESTING, SPINNING, WORKING, S, device, first, held, reading, seen


class Shared:
    """One GPU in readings of ten seconds. Job `a` holds it from the start, and works for half a minute."""

    def __init__(self) -> None:
        self.ledger, self.at = Ledger(), 0.0
        self.starts: dict[str, float] = {}
        advance(self.ledger, first([device()]))
        self.go(30, WORKING, a=1.0)

    def go(self, seconds: float, signals: dict[str, Any], **uses: float) -> None:
        """`uses`: the jobs that hold it, each with a process that uses so much of the SMs."""
        self.starts = {job: self.starts.get(job, self.at) for job in uses}
        owners = [held(owner=Owner(job), start=start) for job, start in self.starts.items()]
        processes = tuple(Process(ord(job), job_id=job, sm_active=use) for job, use in uses.items())
        for _ in range(round(seconds / 10)):
            self.at += 10
            one = reading(self.at - 10, self.at, signals | {"processes": processes})
            advance(self.ledger, seen(self.at, one, allocations=tuple(owners)))

    def states(self) -> dict[str, State]:
        """By job."""
        (gpu,) = self.ledger.gpus.values()
        return {job: gpu.state_of(job) for job in self.starts}

    def lost(self, job: str, leak: str) -> float:
        return self.ledger.jobs[job].book.parts[LEAK_NAMES.index(leak)] / S


def test_neighbours_that_come_and_go_end_no_zombie_and_are_none_before_their_time() -> None:
    """The minute in which `a` worked counts as work: it is a zombie at 1,860 s. `b` is there from 1,530 s on."""
    gpu = Shared()
    gpu.go(1500, RESTING, a=0.0)
    gpu.go(400, RESTING, a=0.0, b=0.0)
    assert gpu.states() == {"a": State.ZOMBIE, "b": State.STALLED}
    assert (gpu.lost("a", "idle_allocation"), gpu.lost("b", "idle_allocation")) == (35.0, 0.0)
    assert gpu.lost("b", "unattributed_stall") == 200.0
    gpu.go(1100, RESTING, a=0.0, c=0.0)
    assert gpu.states() == {"a": State.ZOMBIE, "c": State.STALLED}
    gpu.go(800, RESTING, a=0.0, c=0.0)
    assert gpu.states() == {"a": State.ZOMBIE, "c": State.ZOMBIE}
    assert gpu.lost("c", "idle_allocation") == 50.0, "from 1,930 + 1,800 s to 3,830 s, half of it"


def test_who_is_left_has_idled_no_longer_than_it_has_held_the_gpu() -> None:
    gpu = Shared()
    gpu.go(1700, RESTING, a=0.0)
    gpu.go(200, RESTING, a=0.0, b=0.0)
    assert gpu.states() == {"a": State.ZOMBIE, "b": State.STALLED}
    gpu.go(10, RESTING, b=0.0)
    assert gpu.states() == {"b": State.STALLED}
    gpu.go(1580, RESTING, b=0.0)
    assert gpu.states() == {"b": State.STALLED}
    gpu.go(20, RESTING, b=0.0)
    assert (gpu.states(), gpu.ledger.gpus["GPU-0"].since) == ({"b": State.ZOMBIE}, (1730 + 1800) * S)


def test_a_neighbour_that_joins_or_leaves_ends_no_hang_of_another() -> None:
    gpu = Shared()
    gpu.go(700, SPINNING, a=1.0)
    assert gpu.states() == {"a": State.HUNG}
    for neighbour in ("b", "c"):
        gpu.go(10, SPINNING, a=1.0, **{neighbour: 0.0})
        assert gpu.states() == {"a": State.HUNG, neighbour: State.ACTIVE}
    gpu.go(10, SPINNING, a=1.0)
    assert gpu.states() == {"a": State.HUNG}
    assert gpu.ledger.gpus["GPU-0"].timers.hangs == 1


def test_a_spin_leaves_with_the_job_whose_kernel_spins() -> None:
    """For a while after the leaver's last reading the other one would be hung, though it never spun."""
    gpu = Shared()
    gpu.go(700, SPINNING, a=1.0, b=0.0)
    assert gpu.states() == {"a": State.HUNG, "b": State.ACTIVE}
    gpu.go(10, RESTING, b=0.0)
    assert gpu.states() == {"b": State.STALLED}
    assert gpu.lost("b", "hung") == 0.0
    both = Shared()
    both.go(700, SPINNING, a=1.0, b=1.0)
    both.go(10, SPINNING, b=1.0)
    assert both.states() == {"b": State.HUNG}


def test_a_crash_loop_leaves_with_a_neighbour_and_a_server_s_silence_too() -> None:
    gpu = Shared()
    gpu.go(10, RESTING, a=0.0, b=0.0)
    timers = gpu.ledger.gpus["GPU-0"].timers
    timers.hung = timers.looping = timers.unserved = True
    gpu.go(10, RESTING, a=0.0, b=0.0, c=0.0)
    assert (timers.hung, timers.looping, timers.unserved) == (True, True, True)
    gpu.go(10, RESTING, a=0.0, b=0.0)
    assert (timers.hung, timers.looping, timers.unserved) == (False, False, False)


INTEGER: dict[str, Any] = RESTING | {
    "gr_engine_active": 1.0, "sm_active": 0.6, "dram_active": 0.001, "power_watts": 500.0, "gpu_utilization": 1.0,
}  # fmt: skip
"""Kernels of integer work, which only the power shows."""


def test_who_is_left_is_not_judged_by_what_the_first_one_did() -> None:
    """`a` used the tensor cores, so that such kernels of its own would be a spin."""
    gpu = Shared()
    gpu.go(170, WORKING, a=1.0)
    gpu.go(60, INTEGER, a=0.5, b=0.5)
    gpu.go(900, INTEGER, b=0.9)
    assert gpu.states() == {"b": State.ACTIVE}
    assert gpu.lost("b", "hung") == 0.0


def test_who_is_left_starts_up_after_the_first_one_worked() -> None:
    gpu = Shared()
    gpu.go(10, RESTING, a=0.0, b=0.0)
    gpu.go(100, RESTING, b=0.0)
    assert gpu.lost("b", "startup") == 100.0


def test_who_is_left_idles_no_longer_for_what_the_first_one_did() -> None:
    """`a` worked for long enough to idle for an hour; `b` for 24 s, which count as idle from 200 s each on."""
    gpu = Shared()
    gpu.go(270, WORKING, a=1.0)
    gpu.go(30, RESTING, a=0.0, b=0.0)
    gpu.go(30, WORKING, b=1.0)
    gpu.go(1800, RESTING, b=0.0)
    assert gpu.states() == {"b": State.STALLED}
    gpu.go(100, RESTING, b=0.0)
    assert gpu.states() == {"b": State.ZOMBIE}


def test_a_neighbour_that_comes_and_goes_takes_nothing_from_the_first_one() -> None:
    """`a` has worked for long enough to idle for an hour, and has no second start-up."""
    gpu = Shared()
    gpu.go(300, WORKING, a=1.0)
    startup = gpu.lost("a", "startup")
    gpu.go(10, RESTING, a=0.0, b=0.0)
    gpu.go(3000, RESTING, a=0.0)
    assert (gpu.states(), gpu.lost("a", "startup")) == ({"a": State.STALLED}, startup)


def test_of_two_that_came_at_once_none_inherits_what_the_other_did() -> None:
    """`a` alone uses the SMs."""
    gpu = Shared()
    gpu.starts = {"a": gpu.at, "b": gpu.at}
    gpu.go(200, WORKING, a=1.0, b=0.0)
    gpu.go(10, RESTING, b=0.0)
    assert gpu.lost("b", "startup") == 10.0


def test_who_is_left_and_has_used_the_gpu_does_not_start_up_again() -> None:
    gpu = Shared()
    gpu.go(200, WORKING, a=0.5, b=0.5)
    startup = gpu.lost("b", "startup")
    gpu.go(5000, RESTING, b=0.0)
    assert (gpu.states(), gpu.lost("b", "startup")) == ({"b": State.ZOMBIE}, startup)


def test_a_crash_loop_leaves_with_the_first_one_although_the_other_computes() -> None:
    gpu = Shared()
    gpu.go(10, WORKING, a=0.5, b=0.5)
    timers = gpu.ledger.gpus["GPU-0"].timers
    timers.hung = timers.looping = True
    gpu.go(10, WORKING, b=0.5)
    assert (timers.hung, timers.looping) == (False, False)


def test_a_newcomer_beside_a_hang_is_no_zombie_before_its_time() -> None:
    gpu = Shared()
    gpu.go(2400, SPINNING, a=1.0)
    gpu.go(1500, SPINNING, a=1.0, b=0.0)
    assert gpu.states() == {"a": State.HUNG, "b": State.ACTIVE}
    gpu.go(400, SPINNING, a=1.0, b=0.0, c=0.0)
    assert gpu.states() == {"a": State.HUNG, "b": State.ZOMBIE, "c": State.ACTIVE}


def test_work_that_ends_no_zombie_ends_none_when_a_neighbour_comes_either() -> None:
    """A second of work, of some ten that end a zombie."""
    gpu = Shared()
    gpu.go(2000, RESTING, a=0.0)
    little = {name: 0.1 * value for name, value in WORKING.items() if name.endswith("_active")}
    gpu.go(10, WORKING | little, a=0.1)
    assert gpu.states() == {"a": State.ZOMBIE}
    gpu.go(10, RESTING, a=0.0, b=0.0)
    assert gpu.states() == {"a": State.ZOMBIE, "b": State.STALLED}
