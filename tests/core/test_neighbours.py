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
