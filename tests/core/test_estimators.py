"""Names of losses and states that were once wrong, each with the input that showed it, calculated by hand."""

from itertools import pairwise
from math import inf
from operator import sub
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import (
    NEVER,
    HostUsage,
    Observation,
    Owner,
    Process,
    Reading,
    ServingReport,
    State,
    TrainingReport,
)
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from tests.core.test_detectors import processes_of
from tests.core.test_sizing import BOARD
from tests.core.test_states import lost, state, story
from tests.core.test_told import HALF, PEAK, opened, parts, said
from tests.each import each
from tests.worlds import JOB, RESTING, SPINNING, WORKING, S, device, first, held, reading, seen

Signals = dict[str, Any]
SERVER = Owner("web", workload_class="serving")
OTHER = replace(JOB, job_id="other")


class Node:
    """A job on several GPUs that is played in readings of ten seconds."""

    def __init__(self, gpus: int = 2, *, worked: float = 60) -> None:
        self.uuids = [f"GPU-{n}" for n in range(gpus)]
        self.ledger, self.at = Ledger(), 0.0
        self.allocations = tuple(held(uuid, gpus=gpus) for uuid in self.uuids)
        boards = [device(uuid, f"{n}") for n, uuid in enumerate(self.uuids)]
        advance(self.ledger, first(boards, self.allocations))
        self.go(worked, *[WORKING] * gpus)

    def go(self, seconds: float, *signals: Signals, reports: tuple[TrainingReport, ...] = (), **more: Any) -> None:
        """Each GPU with its signals; reports come with the first reading."""
        end = self.at + seconds
        while self.at < end:
            stop = min(end, self.at + 10)
            rows = [reading(self.at, stop, s, u) for u, s in zip(self.uuids, signals, strict=True)]
            advance(self.ledger, seen(stop, *rows, reports=reports, **more))
            self.at, reports = stop, ()

    def states(self) -> list[State]:
        return [self.ledger.gpus[uuid].state for uuid in self.uuids]

    def since(self, uuid: str = "GPU-0") -> float:
        return self.ledger.gpus[uuid].since / S

    def suspected(self) -> list[bool]:
        return [gpu.hang_suspected for gpu in take_snapshot(self.ledger, DaemonMetadata()).gpus]


# -- hangs --


@pytest.mark.parametrize("cut", [(60, 900), (60, 64, 900)])
def test_a_peer_that_begins_to_spin_later_in_the_same_observation_began_then(cut: tuple[int, ...]) -> None:
    """From 64 s on both spin; until then the other worked, which proves nothing about it."""
    node = Node()
    whole = [reading(start, end, SPINNING) for start, end in pairwise(cut)]
    other = reading(60, 64, WORKING, "GPU-1"), reading(64, 900, SPINNING, "GPU-1")
    advance(node.ledger, seen(900, *whole, *other))
    assert lost(node.ledger, "hung") == 900 - 64 - 600


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation", "idle", "restore", "data", "startup"])
def test_a_phase_that_is_reported_explains_its_spin(phase: str) -> None:
    """Twelve minutes of it. A program that dies in it is believed for half an hour and hangs ten minutes later."""
    node = Node()
    node.go(720, SPINNING, SPINNING, reports=(said(50, 60, phase=phase, rank="0", uuids=("GPU-0",)),))
    assert node.states() == [State.ACTIVE] * 2
    assert node.suspected() == [False] * 2
    node.go(2000, SPINNING, SPINNING)
    assert node.states() == [State.HUNG] * 2
    assert node.since() == 70 + 1800 + 600


def test_steps_before_a_phase_do_not_end_it() -> None:
    for start, states in ((60, [State.ACTIVE] * 2), (70, [State.HUNG] * 2)):
        node = Node()
        node.go(10, SPINNING, SPINNING, reports=(said(50, 60, phase="checkpoint", uuids=tuple(node.uuids)),))
        node.go(720, SPINNING, SPINNING, reports=(said(start, 80, step=7, steps=1, uuids=tuple(node.uuids)),))
        assert node.states() == states


def test_a_phase_with_kernels_and_one_that_has_ended_explain_nothing() -> None:
    for phases in (("compute",), ("checkpoint", "compute")):
        node = Node()
        node.go(10, SPINNING, SPINNING, reports=(said(50, 60, phase=phases[0], uuids=tuple(node.uuids)),))
        node.go(700, SPINNING, SPINNING, reports=(said(60, 70, phase=phases[-1], uuids=tuple(node.uuids)),))
        assert node.states() == [State.HUNG] * 2


@pytest.mark.parametrize(
    ("other", "window", "suspected"),
    [(SPINNING, 600, 120), (RESTING | {"encoder_utilization": 0.1}, 1800, 1500), (WORKING, 3600, 1800)],
)
def test_how_long_a_gpu_may_spin_follows_from_what_the_others_do(
    other: Signals, window: float, suspected: float
) -> None:
    """All wait for each other: 600 s. One rests: half an hour, suspected five minutes earlier. One works: an hour.

    After 330 s of work no GPU is a zombie within an hour.
    """
    node = Node(worked=330)
    node.go(suspected - 10, SPINNING, other)
    assert not node.suspected()[0]
    node.go(10, SPINNING, other)
    assert node.suspected()[0]
    node.go(window - suspected, SPINNING, other)
    assert node.states()[0] is State.ACTIVE
    node.go(10, SPINNING, other)
    assert (node.states()[0], node.since()) == (State.HUNG, 330.0 + window)


@each("other, last, window", [
    (WORKING, SPINNING, 600), (RESTING, SPINNING, 600), (WORKING, RESTING, 1800),
])  # fmt: skip
def test_a_spin_while_another_gpu_worked_or_rested_proves_nothing_once_that_one_spins_or_rests(
    other: Signals, last: Signals, window: float
) -> None:
    """14 minutes of it, or 25 beside one that works: then it counts from the moment on when the other one stopped."""
    node = Node(worked=330)
    node.go(1500 if last is RESTING else 840, SPINNING, other)
    begun = node.at
    node.go(window, SPINNING, last)
    assert State.HUNG not in node.states()
    node.go(10, SPINNING, last)
    assert (node.states()[0], node.since()) == (State.HUNG, begun + window)


def test_however_the_others_change_a_gpu_that_spins_for_an_hour_is_hung() -> None:
    node = Node(worked=330)
    for _ in range(6):
        node.go(510, SPINNING, WORKING)
        node.go(90, SPINNING, SPINNING)
    assert State.HUNG not in node.states()
    node.go(10, SPINNING, SPINNING)
    assert (node.states()[0], node.since()) == (State.HUNG, 330 + 3600)


def test_one_stray_reading_of_another_gpu_delays_a_hang_of_all_by_no_more_than_its_own() -> None:
    """Ten seconds at rest take 190 s from the spin of the second GPU alone."""
    node = Node()
    node.go(300, SPINNING, SPINNING)
    node.go(10, SPINNING, RESTING)
    node.go(600, SPINNING, SPINNING)
    assert [gpu.since / S for gpu in node.ledger.gpus.values()] == [60 + 600, 60 + 310 + 490]


def test_before_its_first_work_a_job_may_spin_for_half_an_hour() -> None:
    node = Node(worked=0)
    node.go(1800, SPINNING, SPINNING)
    assert node.states() == [State.ACTIVE] * 2
    assert lost(node.ledger, "startup") == 1800.0
    node.go(10, SPINNING, SPINNING)
    assert (node.states(), node.since()) == ([State.HUNG] * 2, 1800.0)


@pytest.mark.parametrize(("other", "spun", "window"), [(SPINNING, 550, 672), (RESTING, 1200, 2440)])
def test_a_job_that_spun_for_long_and_worked_then_may_do_so_again(other: Signals, spun: float, window: float) -> None:
    """1.2 times the longest spin, or twice if a GPU rests; the work that ends a spin of s seconds is part of it.

    WORKING has 225 times the tensor activity of a spin: credit falls that many seconds a second, or 600 at most.
    """
    node = Node()
    node.go(spun, SPINNING, other)
    node.go(60, WORKING, WORKING)
    longest = node.ledger.gpus["GPU-0"].timers.longest_spin / S
    assert longest == pytest.approx(spun + spun / 225, abs=0.01)
    factor = 1.2 if other is SPINNING else 2.0
    start = node.at
    node.go(1.1 * window, SPINNING, other)
    assert node.states()[0] is (State.HUNG)
    assert node.since() - start == pytest.approx(max(factor * longest, 600 if other is SPINNING else 1800), abs=0.01)


def test_a_resting_rank_is_waited_for_though_allocations_are_read_again_and_again() -> None:
    """Fails when each new list of allocations brings the window for GPUs that all spin."""
    node = Node()
    for n in range(180):
        fresh = tuple(replace(each, owner=replace(each.owner, name=f"{n}")) for each in node.allocations)
        node.go(10, SPINNING, RESTING, allocations=fresh)
    assert State.HUNG not in node.states()
    node.go(10, SPINNING, RESTING)
    assert node.since() == 1860.0


def test_one_stray_rest_after_a_long_wait_is_no_hang() -> None:
    node = Node()
    node.go(1500, SPINNING, RESTING)
    node.go(10, RESTING, RESTING, allocations=tuple(replace(each) for each in node.allocations))
    assert State.HUNG not in node.states()
    assert node.ledger.gpus["GPU-0"].timers.spin == (1500 - 190) * S


FUTILE = SPINNING | {"gr_engine_active": 0.9, "power_watts": 300.0}
"""A livelock: a busy engine with gaps, at 300 W, that computes nothing."""


def test_kernels_that_compute_nothing_for_half_an_hour_are_a_hang_of_a_job_that_used_the_tensor_cores() -> None:
    """134 s of WORKING are more than a minute of tensor work."""
    for worked, hung in ((140, True), (130, False)):
        node = Node(worked=worked)
        node.go(1810, FUTILE, FUTILE)
        assert (node.states()[0] is State.HUNG) is hung


@each("signals, hung", [
    ({"gr_engine_active": 0.1}, True),
    ({"gr_engine_active": 0.099}, False),
    ({"nvlink_tx_bytes_per_second": 1e8}, False),
    ({"pcie_tx_bytes_per_second": 0.99e8}, True),
    ({"pcie_tx_bytes_per_second": 1e8}, False),
    ({"pcie_rx_bytes_per_second": 1e8}, False),
    ({"decoder_utilization": 0.009}, True),
    ({"decoder_utilization": 0.01}, False),
    ({"encoder_utilization": 0.9}, False),
])  # fmt: skip
def test_light_kernels_beside_which_something_works_are_no_hang(signals: Signals, hung: bool) -> None:
    """A program that decodes video or copies in its second part, or a notebook at rest; they trained before."""
    node = Node(1, worked=140)
    node.go(1810, FUTILE | signals)
    assert (node.states() == [State.HUNG]) is hung


def test_light_kernels_are_only_suspected_where_nobody_sees_pcie_traffic() -> None:
    node = Node(1, worked=140)
    node.go(1810, FUTILE | {"pcie_tx_bytes_per_second": None, "pcie_rx_bytes_per_second": None})
    assert (node.states(), node.suspected()) == ([State.ACTIVE], [True])


@pytest.mark.parametrize("counters", [SPINNING, {"gpu_utilization": 1.0, "power_watts": 130.0, "processes": None}])
def test_a_kernel_that_spins_beside_a_video_engine_that_works_is_no_hang(counters: Signals) -> None:
    """It waits for the next frame. Without profiling fields it would be suspected."""
    for decoder, suspected in ((0.0, True), (0.5, False)):
        ledger = Ledger()
        advance(ledger, first([device(spec=replace(BOARD, power_limit_watts=700.0))], [held()]))
        advance(ledger, seen(900, reading(0, 900, counters | {"decoder_utilization": decoder})))
        assert take_snapshot(ledger, DaemonMetadata()).gpus[0].hang_suspected is suspected


@pytest.mark.parametrize("counters", [SPINNING, {"gpu_utilization": 1.0, "power_watts": 130.0}])
def test_of_several_jobs_one_s_video_engine_hides_no_spin_of_another_but_none_is_proven(counters: Signals) -> None:
    video = counters | {"decoder_utilization": 0.05, "enforced_power_limit_watts": 700.0}
    ledger = board_of_two({"41": 1.0, "42": 0.0}, 7200, video)
    assert state(ledger)[0] is State.ACTIVE
    jobs = {job.owner.job_id: job.suspected for job in take_snapshot(ledger, DaemonMetadata()).jobs}
    assert jobs == {"41": 1, "42": 0}


def test_a_server_with_requests_that_produces_no_token_hangs() -> None:
    """Requests wait: its spin is no polling for them. A token, and it polls again."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=SERVER)]))
    advance(ledger, seen(60, reading(0, 60)))
    stuck = ServingReport("web", 50 * S, 60 * S, "vllm", running=3.0, generated_tokens=0.0, prompt_tokens=0.0)
    advance(ledger, seen(60, serving=(stuck, stuck)))
    advance(ledger, seen(700, reading(60, 700, SPINNING)))
    assert state(ledger) == (State.HUNG, "spinning", 660.0)
    served = replace(stuck, start=690 * S, end=700 * S, generated_tokens=5.0)
    advance(ledger, seen(710, reading(700, 710, SPINNING), serving=(served,)))
    assert state(ledger)[:2] == (State.ACTIVE, "idle_spin")


def board_of_two(uses: dict[str, float | None], spun: float = 1000, signals: Signals = SPINNING) -> Ledger:
    """Jobs 41 and 42 share a board that works for a minute; `uses`: SM time of a process by job."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(), held(owner=Owner("42"))]))
    advance(ledger, seen(60, reading(0, 60, processes_of(WORKING, dict.fromkeys(uses)))))
    advance(ledger, seen(60 + spun, reading(60, 60 + spun, processes_of(signals, uses))))
    for job_id in ("41", "42"):
        assert sum(ledger.jobs[job_id].book.parts) == ledger.jobs[job_id].book.paid
    together = [sum(two) for two in zip(*(job.book.parts for job in ledger.jobs.values()), strict=True)]
    assert together == ledger.gpus["GPU-0"].book.parts
    assert ledger.conservation_errors == 0
    return ledger


def of_job(ledger: Ledger, job_id: str, leak: str) -> float:
    return ledger.jobs[job_id].book.parts[LEAK_NAMES.index(leak)] / S


def test_the_neighbour_of_a_hung_job_on_one_board_is_not_hung() -> None:
    """Job 41 spins; in a hundredth of the time nothing runs, in which both wait.

    Whose kernels ran in the minute of work is unknown, so each pays for half of it.
    """
    ledger = board_of_two({"41": 0.1, "42": 0.0}, signals=SPINNING | {"gr_engine_active": 0.99})
    assert state(ledger)[:2] == (State.HUNG, "spinning")
    assert of_job(ledger, "41", "hung") == pytest.approx(400 * (0.99 + 0.005))
    assert (of_job(ledger, "42", "hung"), of_job(ledger, "42", "idle_allocation")) == (0.0, 0.0)
    assert ledger.jobs["42"].book.paid == (30 + 1000 * 0.005) * S
    jobs = {job.owner.job_id: job for job in take_snapshot(ledger, DaemonMetadata()).jobs}
    assert dict(jobs["41"].states) == {State.HUNG: 1}
    assert dict(jobs["42"].states) == {State.ACTIVE: 1}
    assert (jobs["41"].suspected, jobs["42"].suspected) == (1, 0)


def test_of_two_that_spin_both_are_hung() -> None:
    ledger = board_of_two({"41": 0.05, "42": 0.05})
    assert of_job(ledger, "41", "hung") == of_job(ledger, "42", "hung") == 200.0


def test_a_job_without_a_limit_of_its_own_is_waited_for_as_usual_beside_one_with_a_short_limit() -> None:
    """Both spin; job 42's operator set a minute."""
    both = {"41": 0.05, "42": 0.05}
    ledger = Ledger()
    advance(ledger, first([device()], [held(), held(owner=Owner("42", hang_seconds=60.0))]))
    advance(ledger, seen(60, reading(0, 60, processes_of(WORKING, both))))
    for at in range(60, 860, 100):
        advance(ledger, seen(at + 100, reading(at, at + 100, processes_of(SPINNING, both))))
    assert state(ledger) == (State.HUNG, "spinning", 660.0)


@pytest.mark.parametrize("uses", [{"41": None, "42": 0.1}, {"": 0.1, "41": 0.1}, {"41": 0.0, "42": 0.0}])
def test_where_it_is_unknown_whose_kernel_spins_nobody_is_hung(uses: dict[str, float | None]) -> None:
    ledger = board_of_two(uses)
    assert state(ledger)[0] is State.ACTIVE
    assert lost(ledger, "hung") == 0.0
    assert (ledger.gpus["GPU-0"].timers.hangs, ledger.gpus["GPU-0"].timers.hung) == (0, False)
    assert [job.suspected for job in take_snapshot(ledger, DaemonMetadata()).jobs] == [1, 1]


def test_a_hang_that_was_known_to_be_one_s_is_nobody_s_while_it_is_unknown() -> None:
    ledger = board_of_two({"41": 0.1, "42": 0.0})
    advance(ledger, seen(1070, reading(1060, 1070, SPINNING | {"processes": None})))
    assert state(ledger)[0] is State.ACTIVE
    sees = processes_of(SPINNING, {"41": 0.1, "42": 0.0})
    advance(ledger, seen(1080, reading(1070, 1080, sees)))
    assert state(ledger) == (State.HUNG, "spinning", 1070.0)


def test_the_neighbour_of_a_culprit_is_none() -> None:
    """Job 41 spins on GPU-0 and rests on GPU-1, which it shares with job 42, for an hour."""
    ledger = Ledger()
    patient = Owner("42", zombie_seconds=9000.0)
    two = [held(gpus=2), held("GPU-1", gpus=2), held("GPU-1", patient)]
    advance(ledger, first([device(), device("GPU-1", "1")], two))
    advance(ledger, seen(60, reading(0, 60), reading(0, 60, uuid="GPU-1")))
    advance(ledger, seen(3660, reading(60, 3660, SPINNING), reading(60, 3660, RESTING, "GPU-1")))
    assert state(ledger, "GPU-1") == (State.HUNG, "culprit", 1860.0)
    assert of_job(ledger, "42", "hung") == 0.0
    assert lost(ledger, "hung", "GPU-1") == 900.0
    jobs = {job.owner.job_id: dict(job.states) for job in take_snapshot(ledger, DaemonMetadata()).jobs}
    assert jobs == {"41": {State.HUNG: 2}, "42": {State.STALLED: 1}}


@pytest.mark.parametrize(("uses", "hung_at"), [
    ({"41": 0.0, "42": 0.9}, 1860.0), ({"41": 0.1, "42": 0.8}, 2460.0), ({"41": None, "42": 0.9}, 2460.0),
])  # fmt: skip
def test_kernels_of_a_neighbour_on_another_gpu_do_not_excuse_a_spin(
    uses: dict[str, float | None], hung_at: float
) -> None:
    """Job 41 spins on GPU-0 from 60 s on, and has GPU-1 together with job 42.

    Until 660 s kernels run there now and then: of job 42 alone, of both, or nobody knows of whom.
    """
    ledger = Ledger()
    two = [held(gpus=2), held("GPU-1", gpus=2), held("GPU-1", Owner("42"))]
    advance(ledger, first([device(), device("GPU-1", "1")], two))
    advance(ledger, seen(60, reading(0, 60), reading(0, 60, uuid="GPU-1")))
    for at in range(60, 2700, 20):
        runs = at < 660 and at % 200 == 40
        beside = processes_of(WORKING if runs else RESTING, uses if runs else {"41": 0.0, "42": 0.0})
        advance(ledger, seen(at + 20, reading(at, at + 20, SPINNING), reading(at, at + 20, beside, "GPU-1")))
    assert state(ledger) == (State.HUNG, "spinning", hung_at)


# -- zombies --


def mean(share: float) -> Signals:
    """WORKING for `share` of a reading, RESTING for the rest."""
    names = ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active")
    return RESTING | {name: share * WORKING[name] for name in names}


@pytest.mark.untraced
@pytest.mark.parametrize("step", [1.0, 57.0])
def test_leaving_a_zombie_does_not_depend_on_the_length_of_readings(step: float) -> None:
    """13 s of work in every 57 s. Within the first 57 s it is over, as it would never have become one."""
    phases = [(13, WORKING), (44, RESTING)] if step == 1.0 else [(57, mean(13 / 57))]
    ledger = story([(1900, RESTING), *phases], step=step)
    assert not ledger.gpus["GPU-0"].timers.zombie
    assert lost(ledger, "idle_allocation") < 100 + 57
    always = story([*phases * 60], step=step)
    assert always.gpus["GPU-0"].timers.zombies == 0


def test_a_steady_load_of_15_percent_is_never_a_zombie_and_ends_one() -> None:
    """Each second takes back 200 * .15 - 1 = 29 of 1,800, and the minute that ends at 1,920 s another 120: 1,957.932.

    Engine time with tensor activity is work.
    """
    load = mean(0.15 / 0.95)
    assert story([(14_400, load)]).gpus["GPU-0"].timers.zombies == 0
    ledger = story([(1900, RESTING), (600, load)])
    assert state(ledger) == (State.ACTIVE, "computing", 1957.932)


@pytest.mark.parametrize(("engine", "zombies"), [(0.0011, 0), (0.0009, 1)])
def test_the_lowest_use_that_goes_on_minute_after_minute_is_no_zombie(engine: float, zombies: int) -> None:
    """0.1 % of each minute; a kernel that computes nothing that a counter sees."""
    ledger = story([(7200, RESTING | {"gr_engine_active": engine})], step=60.0)
    assert ledger.gpus["GPU-0"].timers.zombies == zombies


def test_a_minute_of_low_use_ends_a_zombie_at_its_end() -> None:
    """One with a window of a minute: at 120 s nothing is left of its idleness, at 180 s it is a zombie again."""
    low = RESTING | {"gr_engine_active": 0.01, "sm_active": 0.01}
    quick = replace(JOB, zombie_seconds=60.0)
    assert state(story([(90, RESTING), (80, low)], owner=quick)) == (State.ACTIVE, "computing", 120.0)
    assert state(story([(90, RESTING), (29, low)], owner=quick))[0] is State.ZOMBIE


def test_a_batch_job_that_has_worked_may_wait_twice_as_long() -> None:
    """A minute of work is 64 s at 95 %; an owner's own limit stays what it is, even if it is the class's."""
    assert state(story([(60, WORKING), (1810, RESTING)])) == (State.ZOMBIE, "idle_context", 1860.0)
    assert state(story([(120, WORKING), (3600, RESTING)]))[0] is State.STALLED
    assert state(story([(120, WORKING), (3610, RESTING)])) == (State.ZOMBIE, "idle_context", 3720.0)
    same = replace(JOB, zombie_seconds=1800.0)
    assert state(story([(120, WORKING), (1810, RESTING)], owner=same)) == (State.ZOMBIE, "idle_context", 1920.0)
    own = replace(JOB, zombie_seconds=600.0)
    assert state(story([(360, WORKING), (610, RESTING)], owner=own)) == (State.ZOMBIE, "idle_context", 960.0)


def test_a_job_that_holds_memory_may_prepare_its_first_work_twice_as_long() -> None:
    """Its first stage may run on the CPU. A context holds less than 2 %; a keeper has run a kernel."""
    loaded = RESTING | {"memory_used_bytes": 1.7e9, "memory_total_bytes": 85e9}
    assert state(story([(3590, loaded)]))[0] is State.STALLED
    assert state(story([(3610, loaded)])) == (State.ZOMBIE, "idle_context", 3600.0)
    assert state(story([(1810, loaded | {"memory_used_bytes": 1.6e9})]))[0] is State.ZOMBIE
    assert state(story([(1, WORKING), (2000, loaded)]))[0] is State.ZOMBIE


@pytest.mark.parametrize(("cores", "kind"), [(2.0, State.STALLED), (1.99, State.ZOMBIE), (None, State.ZOMBIE)])
def test_a_job_that_works_on_the_cpu_is_no_zombie(cores: float | None, kind: State) -> None:
    """Reports of 30 s; each holds for a minute."""
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    for at in range(30, 3630, 30):
        used = HostUsage("41", (at - 30) * S, at * S, cpu_seconds=None if cores is None else cores * 30)
        advance(ledger, seen(at, reading(at - 30, at, RESTING), hosts=(used,)))
    assert state(ledger)[0] is kind
    advance(ledger, seen(5500, reading(3600, 5500, RESTING)))
    assert state(ledger) == (State.ZOMBIE, "idle_context", {State.STALLED: 5460.0}.get(kind, 1800.0))


@pytest.mark.parametrize("usage", [
    HostUsage("41", S, S, cpu_seconds=9.0), HostUsage("41", 0, S, cpu_seconds=inf),
    HostUsage("41", 0, 99 * S, cpu_seconds=999.0), HostUsage("42", 0, S, cpu_seconds=9.0),
])  # fmt: skip
def test_cpu_use_that_cannot_be_or_is_another_job_s_shows_nothing(usage: HostUsage) -> None:
    ledger = story([(10, RESTING)])
    advance(ledger, seen(20, reading(10, 20, RESTING), hosts=(usage,)))
    assert ledger.gpus["GPU-0"].timers.cpu_until == NEVER


@pytest.mark.parametrize(
    "signals",
    [
        RESTING | {"encoder_utilization": 0.5},
        RESTING | {"decoder_utilization": 0.01},
        SPINNING | {"power_watts": 300.0},
        SPINNING | {"int_active": 0.3, "power_watts": None},
        RESTING | {"nvlink_rx_bytes_per_second": 0.01 * 450e9},
        RESTING | {"pcie_rx_bytes_per_second": 0.01 * 64e9},
    ],
    ids=["NVENC", "NVDEC", "integer work at 300 W", "integer pipes", "copies over NVLink", "copies over PCIe"],
)
def test_work_that_no_tensor_core_does_is_work(signals: Signals) -> None:
    ledger = story([(7200, signals)], step=60.0)
    assert (ledger.gpus["GPU-0"].timers.zombies, ledger.gpus["GPU-0"].timers.hangs) == (0, 0)
    assert lost(ledger, "idle_allocation") == lost(ledger, "hung") == 0.0


def test_time_of_the_video_engines_is_no_waiting() -> None:
    """NVENC is used for half of the time, kernels run for a fifth: .3 of the .8 without a kernel is work.

    At half of the time, the ten seconds of work that end start-up take twenty: it takes the other half of waiting.
    """
    encodes = RESTING | {"encoder_utilization": 0.5, "gr_engine_active": 0.2, "sm_active": 0.2, "fp32_active": 0.2}
    ledger = story([(100, encodes)])
    assert lost(ledger, "startup") == pytest.approx(20 * 0.5)
    assert lost(ledger, "unattributed_stall") == pytest.approx(80 * 0.5)
    assert lost(ledger, "other_compute") == pytest.approx(100 * (0.2 + 0.3))


# -- idle servers --


@pytest.mark.parametrize("told", [True, False])
def test_a_server_on_two_gpus_that_polls_for_requests_by_a_kernel_is_idle(told: bool) -> None:
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=SERVER, gpus=2)]))
    advance(ledger, seen(10, reading(0, 10)))
    before = lost(ledger, "idle_allocation")
    word = ServingReport("web", 5 * S, 10 * S, "vllm", running=0.0, waiting=0.0)
    advance(ledger, seen(20, reading(10, 20, SPINNING), serving=(word,) if told else ()))
    assert lost(ledger, "idle_allocation") - before == 10.0


def test_a_zombie_that_spins_is_idle() -> None:
    """A job with patience for a hang of a day."""
    ledger = Ledger()
    advance(ledger, first([device()], [held(owner=replace(JOB, hang_seconds=86400.0), gpus=2)]))
    advance(ledger, seen(60, reading(0, 60)))
    advance(ledger, seen(2460, reading(60, 2460, SPINNING)))
    assert state(ledger)[0] is State.ZOMBIE
    assert lost(ledger, "idle_allocation") == 600.0


# -- start-up, saving --


def test_start_up_ends_with_ten_seconds_of_work() -> None:
    """Loading weights is no work; compiling runs a kernel for 2 s; 8 s later, at 95 %, it is over. Servers need 1 s."""
    loads = RESTING | {"pcie_rx_bytes_per_second": 30e9}
    phases = [(100, loads), (2, WORKING), (50, RESTING), (10, WORKING), (50, RESTING)]
    ledger = story(phases, step=1.0)
    assert lost(ledger, "startup") == pytest.approx(100 + 0.05 * 2 + 50 + 0.05 * (10 / 0.95 - 2), abs=0.001)
    server = story(phases, step=1.0, owner=SERVER)
    assert lost(server, "startup") == pytest.approx(100 + 0.05 / 0.95, abs=0.001)


def test_other_processes_than_those_that_worked_have_restarted() -> None:
    """A crash loop inside the allocation: from then on waiting is recovery, until 10 s of work."""
    old, new = ({"processes": (Process(pid),)} for pid in (7, 8))
    ledger = story([(60, WORKING | old), (60, RESTING | new), (60, WORKING | new), (60, RESTING | new)])
    assert lost(ledger, "failure_recovery") == pytest.approx(60 + 0.05 * 10 / 0.95, abs=0.001)
    again = story([(60, WORKING | old), (60, RESTING | {"processes": (Process(7), Process(8))}), (60, RESTING | new)])
    assert lost(again, "failure_recovery") == 0.0, "one of them is still there"
    early = story([(5, WORKING | old), (60, RESTING | new)], step=1.0)
    assert lost(early, "failure_recovery") == 0.0, "they had not worked enough"
    assert lost(early, "startup") == pytest.approx(60 + 0.05 * 5)


def test_from_a_copy_to_the_host_until_kernels_run_the_wait_is_for_a_save() -> None:
    """20 s of copying beside few kernels, 100 s of writing to storage; then work; then a rest for another reason."""
    copies = RESTING | {"pcie_tx_bytes_per_second": 1e9, "gr_engine_active": 0.29, "sm_active": 0.2}
    ledger = story([(60, WORKING), (20, copies), (100, RESTING), (60, WORKING), (100, RESTING)])
    assert lost(ledger, "checkpoint") == pytest.approx(0.71 * 20 + 100)
    busy = copies | {"gr_engine_active": 0.3}
    assert lost(story([(60, WORKING), (20, busy), (100, RESTING)]), "checkpoint") == 0.0
    early = story([(20, copies), (100, RESTING)])
    assert lost(early, "checkpoint") == 0.0, "it has not worked yet"


COPIES = RESTING | {"pcie_tx_bytes_per_second": 5e9}


@pytest.mark.parametrize("waits", [SPINNING, RESTING])
def test_who_waits_while_a_peer_saves_waits_for_the_save(waits: Signals) -> None:
    """20 s of copies and 40 s of writing; then all wait for something else."""
    node = Node(3)
    node.go(20, COPIES, waits, WORKING)
    node.go(40, RESTING, waits, WORKING)
    node.go(10, WORKING, WORKING, WORKING)
    node.go(50, RESTING, waits, WORKING)
    assert [lost(node.ledger, "checkpoint", uuid) for uuid in node.uuids] == [60.0, 60.0, 0.0]


def test_only_the_part_of_a_reading_in_which_a_peer_saves_is_for_the_save() -> None:
    """From 60 to 70 s one saves; the other's reading is from 65 to 75 s."""
    node = Node()
    rows = (reading(60, 70, COPIES), reading(60, 65, WORKING, "GPU-1"), reading(65, 75, SPINNING, "GPU-1"))
    advance(node.ledger, seen(75, *rows, reading(70, 75, WORKING)))
    assert lost(node.ledger, "checkpoint", "GPU-1") == 5.0


def test_who_has_saved_and_polls_waits_for_those_that_still_save_on_other_nodes() -> None:
    node = Node()
    node.go(20, COPIES, SPINNING)
    node.go(40, SPINNING, SPINNING)
    node.go(10, WORKING, WORKING)
    node.go(50, SPINNING, SPINNING)
    assert [lost(node.ledger, "checkpoint", uuid) for uuid in node.uuids] == [60.0, 60.0]


@pytest.mark.parametrize("step", [10, 30])
def test_a_reading_of_several_steps_holds_work_before_the_save_too(step: int) -> None:
    """Half a minute, half of it work; then one saves and the other polls, as its idle SMs show: for 15.8 s at most."""
    mixture = {"gr_engine_active": 1.0, "sm_active": 0.45, "tensor_active": 0.22, "dram_active": 0.1}
    polls = WORKING | mixture | {"power_watts": 300.0}
    copies = polls | {"gr_engine_active": 0.5, "pcie_tx_bytes_per_second": 3e9}
    node = Node()
    for at in range(60, 90, step):
        rows = [reading(at, at + step, each, uuid) for each, uuid in zip((copies, polls), node.uuids, strict=True)]
        advance(node.ledger, seen(at + step, *rows))
    saved = 15.0 if step == 30 else 0.0
    assert [lost(node.ledger, "checkpoint", uuid) for uuid in node.uuids] == pytest.approx([saved, saved])


@pytest.mark.parametrize("case", ["another job", "another group", "shared", "who saves is shared"])
def test_who_waits_for_something_else_while_one_saves_does_not_wait_for_the_save(case: str) -> None:
    saver, waiter = (held(uuid, gpus=2) for uuid in ("GPU-0", "GPU-1"))
    if case == "another job":
        waiter = replace(waiter, owner=OTHER)
    if case == "another group":
        waiter = replace(waiter, group="1")
    beside = {"shared": [held("GPU-1", OTHER)], "who saves is shared": [held("GPU-0", OTHER)]}.get(case, [])
    ledger = Ledger()
    advance(ledger, first([device("GPU-0"), device("GPU-1", "1")], (saver, waiter, *beside)))
    for at, signals in enumerate([WORKING] * 6 + [COPIES] * 6):
        rest = WORKING if at < 6 else SPINNING
        rows = (reading(at * 10, at * 10 + 10, signals), reading(at * 10, at * 10 + 10, rest, "GPU-1"))
        advance(ledger, seen(at * 10 + 10, *rows))
    assert lost(ledger, "checkpoint") == 60.0
    assert lost(ledger, "checkpoint", "GPU-1") == 0.0


def test_copies_of_a_job_without_kernels_are_no_saves() -> None:
    """A cache that network cards read: no kernel has kept the GPU busy, so there is no state to save."""
    ledger = story([(300, COPIES), (60, RESTING), (60, COPIES)])
    assert lost(ledger, "checkpoint") == 0.0
    after = story([(60, WORKING), (60, COPIES)])
    assert lost(after, "checkpoint") == 60.0


@pytest.mark.parametrize(("rate", "seconds"), [(1e9, 10.0), (2e9, 10.0), (1e8, 100.0), (0.99e8, 300.0)])
def test_results_that_are_sent_to_the_host_end_the_start_up(rate: float, seconds: float) -> None:
    """As of a video engine whose use no counter shows; at full share from 1 GB/s on, from 0.1 GB/s."""
    ledger = story([(300, RESTING | {"pcie_tx_bytes_per_second": rate})])
    assert lost(ledger, "startup") == pytest.approx(seconds)


@pytest.mark.parametrize("engine", [0.0, 0.2])
def test_traffic_between_gpus_that_goes_both_ways_is_neither_a_save_nor_input(engine: float) -> None:
    """GPUDirect RDMA of a pipeline's stage: 5 GB/s to and from the NIC, with bubbles."""
    direct = {"pcie_tx_bytes_per_second": 5e9, "pcie_rx_bytes_per_second": 5.5e9 - 5e8}
    waits = RESTING | direct | {"gr_engine_active": engine, "sm_active": engine}
    ledger = story([(60, WORKING | direct), *[(2, WORKING | direct), (2, waits)] * 60], step=2.0)
    assert lost(ledger, "checkpoint") == lost(ledger, "data_stall") == 0.0


# -- reports --


def test_waits_for_data_are_booked_though_the_pace_of_reports_varies() -> None:
    """Each minute of work, reported every ten seconds, is followed by a minute without data, reported at its end.

    A wait is booked when the next one comes: of five minutes four.
    """
    ledger = opened()
    advance(ledger, seen(10, reading(1, 10)))
    at, last = 10, 1
    for _ in range(5):
        for signals, length in ((HALF | {"gr_engine_active": 1.0}, 60), (RESTING, 60)):
            for _ in range(length // 10):
                told = signals is not RESTING or last == at
                report = (said(last, at, phases={} if last + 10 >= at else {"data": 60.0}),) if at > last else ()
                advance(ledger, seen(at + 10, reading(at, at + 10, signals), reports=report if told else ()))
                last = at if told and report else last
                at += 10
        assert ledger.refused["report"] == 0
    assert lost(ledger, "data_stall") == pytest.approx(240, abs=10)


def test_a_checkpoint_is_booked_on_ranks_that_spin_in_its_barrier() -> None:
    """Four minutes, reported by four ranks, of which one copies and three spin."""
    node = Node(4)
    begins = tuple(said(50, 60, phase="checkpoint", rank=f"{n}", uuids=(u,)) for n, u in enumerate(node.uuids))
    node.go(240, RESTING | {"pcie_tx_bytes_per_second": 5e9}, *[SPINNING] * 3, reports=begins)
    assert [lost(node.ledger, "checkpoint", uuid) for uuid in node.uuids] == [240.0] * 4
    assert lost(node.ledger, "exposed_communication", "GPU-1") < 10


def test_honest_flops_are_no_padding_though_a_step_stalls_now_and_then() -> None:
    """25 steps of a second, then one that waits for 7 s; readings of 32 s hold one such round.

    The tensor work of a round is 25 * .45 s, and so are its FLOPs.
    """
    ledger = opened()
    advance(ledger, seen(32, reading(1, 32)))
    before, step = parts(ledger), 0.45 * PEAK
    for n in range(1, 11):
        start = 32 * n
        told = [said(start + k, start + k + 1, model_flops=step) for k in range(24)]
        told.append(said(start + 24, start + 32, model_flops=step))
        share = 25 / 32
        signals = WORKING | {k: share * WORKING[k] for k in ("gr_engine_active", "sm_active", "tensor_active")}
        advance(ledger, seen(start + 32, reading(start, start + 32, signals), reports=tuple(told)))
    grown = {name: (after - before[name]) / S for name, after in parts(ledger).items()}
    assert grown["useful"] == pytest.approx(0.45 * 250, rel=1e-3)
    assert grown["padding"] == pytest.approx(0.0, abs=0.1)


def test_a_step_that_is_reported_in_the_message_that_ends_it_is_believed() -> None:
    """A step of ten seconds at MFU 0.3 in a message of 82 ms; without a message before, nobody knows when it began."""
    brief = said(19.918, 20, model_flops=0.3 * 10 * PEAK, rank="0", uuids=("GPU-0",))
    for earlier, refused in ((said(1, 10, rank="0", uuids=("GPU-0",)), 0), (said(1, 10, rank="1"), 1)):
        ledger = opened()
        advance(ledger, seen(10, reading(1, 10), reports=(earlier,)))
        advance(ledger, seen(20, reading(10, 20), reports=(brief,)))
        assert ledger.refused["report"] == refused
    ledger = opened()
    advance(ledger, seen(20, reading(1, 20), reports=(brief,)))
    assert ledger.refused["report"] == 1


def test_start_up_that_was_measured_is_not_booked_again_from_a_report() -> None:
    """A minute of start-up is measured; the program reports it at its first step, with five seconds of restoring."""
    ledger = Ledger()
    advance(ledger, first([device()], [held()]))
    advance(ledger, seen(60, reading(0, 60, RESTING)))
    advance(ledger, seen(80, reading(60, 80)))
    told = said(0, 80, phases={"startup": 55.0, "restore": 5.0})
    advance(ledger, seen(100, reading(80, 100, RESTING), reports=(told,)))
    assert lost(ledger, "startup") == pytest.approx(60 + 0.05 * 10 / 0.95, abs=0.001)
    assert lost(ledger, "failure_recovery") == 0.0


# -- clocks, shared boards, sizes --


@pytest.mark.parametrize("rest", [{"gpu_utilization": 0.19}, {"power_watts": 137.5}])
def test_a_clock_that_was_read_at_rest_is_not_the_clock_of_the_work(rest: Signals) -> None:
    """An idle H100 reads 345 MHz; the last clock of a GPU at work holds, or else the reference clock."""
    idle = WORKING | rest | {"sm_clock_hz": 345e6}
    ledger = story([(10, WORKING | {"sm_clock_hz": 1647e6}), (10, idle)])
    assert lost(ledger, "useful") == pytest.approx(0.45 * 0.9 * 20)
    assert lost(ledger, "throttled") == pytest.approx(0.45 * 0.1 * 20)
    assert lost(story([(10, idle)]), "useful") == pytest.approx(4.5)
    works = idle | {"gpu_utilization": 0.2, "power_watts": 137.6}
    assert lost(story([(10, works)]), "useful") == pytest.approx(4.5 * 345 / 1830, abs=1e-4)


def test_a_boost_beyond_the_data_sheet_is_useful() -> None:
    """An H100 at 1980 MHz with tensor activity 0.459: 49.66 % of the peak."""
    ledger = story([(100, WORKING | {"tensor_active": 0.459, "sm_clock_hz": 1980e6})])
    assert lost(ledger, "useful") == pytest.approx(45.9 * 1980 / 1830, abs=1e-4)
    assert lost(ledger, "throttled") == 0.0


def test_a_tenant_without_a_process_has_no_part_in_what_the_other_does() -> None:
    """No process has an SM figure, and all are job 41's; waiting is shared, as both hold the GPU."""
    own = (Process(1, job_id="41"), Process(2, job_id="41"))
    ledger = Ledger()
    advance(ledger, first([device()], [held(), held(owner=Owner("42"))]))
    advance(ledger, seen(100, reading(0, 100, WORKING | {"processes": own})))
    assert (of_job(ledger, "41", "useful"), of_job(ledger, "42", "useful")) == (45.0, 0.0)
    assert ledger.jobs["42"].book.paid == pytest.approx(2.5 * S)


@pytest.mark.parametrize("length", [2, 10, 30, 60])
def test_two_seconds_of_full_load_a_minute_need_the_whole_gpu(length: int) -> None:
    """However long the readings are: a peak of means is none."""
    memory = {"memory_used_bytes": 5e9, "memory_total_bytes": 80e9}
    ledger = Ledger(Policy(size_batch_seconds=600.0))
    advance(ledger, first([device(spec=BOARD)], [held()]))
    for at in range(0, 1200, length):
        signals = mean(min(1.0, 2 / length)) if at % 60 == 0 else RESTING
        advance(ledger, seen(at + length, reading(at, at + length, signals | memory)))
    assert take_snapshot(ledger, DaemonMetadata()).jobs[0].smallest_slice is None
    assert lost(ledger, "oversized_allocation") == 0.0


def test_a_spin_is_seen_without_a_power_limit_by_the_data_sheet_s() -> None:
    """Eight percent of 700 W above an idle context: 166 W."""
    plain: Signals = {"gpu_utilization": 1.0, "power_watts": 150.0}
    for spec, suspected in ((replace(BOARD, power_limit_watts=700.0), True), (BOARD, False)):
        ledger = Ledger()
        advance(ledger, first([device(spec=spec)], [held()]))
        advance(ledger, seen(2000, Reading("GPU-0", 0, 2000 * S, **plain)))
        assert take_snapshot(ledger, DaemonMetadata()).gpus[0].hang_suspected is suspected


def test_the_monotonic_clock_may_be_negative() -> None:
    """As that of the demo's hours before now is on a machine that has just booted."""
    found = []
    dense = WORKING | {"sm_active": 0.94}
    for begin in (-7200, 7200):
        ledger = Ledger()
        rows = [held(uuid, start=begin, gpus=2) for uuid in ("GPU-0", "GPU-1")]
        boards = (device("GPU-0", "0"), device("GPU-1", "1"))
        advance(ledger, Observation(begin * S, 0, devices=boards, allocations=tuple(rows)))
        for at in range(begin + 10, begin + 5000, 10):
            signals = dense if at < begin + 600 else RESTING
            advance(ledger, seen(at, *(reading(at - 10, at, signals, uuid) for uuid in ("GPU-0", "GPU-1"))))
        levels = ledger.jobs["41"].level_tracker.at(ledger.at or 0)
        found.append((state(ledger)[:2], ledger.gpus["GPU-0"].book.parts, levels))
    assert found[0] == found[1]
    assert levels.dense
    assert found[0][0] == (State.ZOMBIE, "idle_context")


# The start-up of jobs whose kernels are few, or whose first work is not on the GPU.

LOADED: Signals = RESTING | {"memory_used_bytes": 40e9, "memory_total_bytes": 80e9}
RARE: Signals = LOADED | {"gr_engine_active": 0.003, "sm_active": 0.002, "dram_active": 0.02, "power_watts": 150.0}
"""Kernels for 0.3 % of the time."""


def waited(*phases: tuple[int, Signals], owner: Owner = JOB) -> list[str]:
    """The leak that took most of each minute of a job that began with the first one."""
    ledger, found, at = Ledger(), list[str](), 0
    advance(ledger, first((device(),), (held(owner=owner),)))
    for minutes, signals in phases:
        for _ in range(minutes):
            before = list(ledger.gpus["GPU-0"].book.parts)
            advance(ledger, seen(at + 60, reading(at, at + 60, signals)))
            gained = map(sub, ledger.gpus["GPU-0"].book.parts, before)
            found.append(max(zip(gained, LEAK_NAMES, strict=True))[1])
            at += 60
    return found


def test_kernels_in_three_minutes_in_a_row_end_the_start_up_however_few_they_are() -> None:
    assert waited((5, RARE)) == ["startup"] * 3 + ["unattributed_stall"] * 2
    assert waited((2, RARE), (1, LOADED), (2, RARE), (1, LOADED)) == ["startup"] * 6


def test_a_job_that_holds_memory_and_loads_nothing_for_three_minutes_is_not_starting_up() -> None:
    """It waits for something else; when it goes on loading, that is its start-up again."""
    found = waited((2, RESTING), (6, LOADED), (1, LOADED | {"memory_used_bytes": 50e9}), (1, LOADED))
    assert found == ["startup"] * 6 + ["unattributed_stall"] * 3 + ["startup"]


@pytest.mark.parametrize("change", [
    {"pcie_rx_bytes_per_second": 20e6}, {"memory_used_bytes": 1e9}, {"gr_engine_active": 0.001},
])  # fmt: skip
def test_what_shows_that_it_is_still_starting_up(change: Signals) -> None:
    assert waited((9, LOADED | change)) == ["startup"] * 9


def test_a_server_that_has_loaded_its_weights_is_starting_up_until_it_serves() -> None:
    assert set(waited((9, LOADED), owner=replace(JOB, workload_class="serving"))) == {"startup"}
