"""Scenarios of hung and forgotten jobs, and of healthy jobs that resemble them, show the intended hardware activity."""

from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from msgspec.structs import replace

from exporter.core.model import MS, SECOND, Reading
from exporter.simulate.boards import BOARDS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import PROFILED, Simulation, simulate
from tests.lookalikes import LOOKALIKES
from tests.test_simulate import by_gpu, check_allocations, check_gaps, check_reading, during, mean, phases

pytestmark = pytest.mark.slow

H100 = "H100-SXM5-80GB"
PIPES = ("tensor_active", "fp64_active", "fp32_active", "fp16_active")


def told(story: str, *, gpus: int = 2, node: int = 0, period: float = 5.0, board: str = H100) -> Simulation:
    return simulate(story, stories=LOOKALIKES, gpus=gpus, node=node, period_seconds=period, board=board)


def within(simulation: Simulation, phase: str, slot: int = 0) -> list[Reading]:
    """Return the readings of one GPU that lie entirely within the phase."""
    uuid = simulation.uuids[slot]
    entries = phases(simulation, uuid)
    start = next(entry.at for entry in entries if entry.phase == phase)
    end = next((e.at for e in entries if e.at > start and e.phase != phase), simulation.duration_ms * MS)
    return during(by_gpu(simulation.observations)[uuid], start / SECOND, end / SECOND)


@pytest.mark.parametrize("story", LOOKALIKES)
def test_every_story_gives_readings_that_physics_allows(story: str) -> None:
    for board in ("A100-SXM4-80GB", "L4", "B200-SXM"):
        simulation = told(story, gpus=4, node=1, period=60, board=board)
        readings = by_gpu(check_allocations(simulation))
        for gpu in readings.values():
            check_gaps(simulation, gpu)
            for reading in gpu:
                if not simulation.plan.profiled(reading.end // MS):
                    check_reading(reading, simulation)


def test_what_people_would_like_to_watch_is_a_scenario() -> None:
    public = {"rank0_checkpoint", "rank0_evaluation", "long_first_step", "serving_lull", "idle_poller", "nic_hang"}
    assert set(SCENARIOS) & set(LOOKALIKES) == public
    with pytest.raises(ValueError, match="unknown scenario 'demo'; known: missing_rank"):
        told("demo")


@pytest.mark.parametrize(("story", "seconds"), [("rank0_checkpoint", 90), ("rank0_long_checkpoint", 240)])
def test_rank_0_copies_out_while_the_others_poll_and_then_all_go_on(story: str, seconds: int) -> None:
    simulation = told(story, gpus=3)
    chief, other = (within(simulation, "rank 0 writes a checkpoint", slot) for slot in (0, 2))
    assert seconds - 10 <= (chief[-1].end - chief[0].start) / SECOND <= seconds
    assert mean(chief, "pcie_tx_bytes_per_second") == pytest.approx(3e9, rel=0.02)
    assert {r.gr_engine_active for r in chief} == {0.0}
    assert mean(other, "gr_engine_active") > 0.999
    assert {r.tensor_active for r in other} == {0.0}
    after = [r for r in by_gpu(simulation.observations)[simulation.uuids[2]] if r.start > other[-1].end + 10 * SECOND]
    assert min(r.tensor_active or 0 for r in after) > 0.3
    assert [e.phase for e in phases(simulation, simulation.uuids[0])][-2:] == ["rank 0 writes a checkpoint", "training"]


def test_rank_0_evaluates_on_one_node_and_all_of_the_other_wait() -> None:
    here, there = (told("evaluation_elsewhere", node=node, period=10) for node in (0, 1))
    assert [(e.at, e.phase) for e in phases(here, here.uuids[0])] == [
        (e.at, e.phase) for e in phases(there, there.uuids[0])
    ]
    owners = {a.owner.job_id for n in (here, there) for a in next(n.observations).allocations or ()}
    assert len(owners) == 1
    assert {a.gpus for a in next(here.observations).allocations or ()} == {4}
    tensor = [mean(within(n, "rank 0 evaluates", slot), "tensor_active") for n in (here, there) for slot in (0, 1)]
    assert tensor[0] > 0.3
    assert tensor[1:] == [0, 0, 0]


def test_one_node_of_two_stands_still_with_its_processes() -> None:
    waits = within(told("missing_node"), "the other node never comes")
    rests = within(told("missing_node", node=1), "the node's processes stand still")
    assert (mean(waits, "gr_engine_active") > 0.999, mean(rests, "gr_engine_active")) == (True, 0)
    assert all(r.processes for r in rests)
    assert waits[0].start == rests[0].start


def test_a_collective_that_waits_for_its_network_card_reads_the_host_evenly() -> None:
    for board in (H100, "L4"):
        rates = [
            r.pcie_rx_bytes_per_second or 0
            for r in within(told("nic_hang", board=board), "the network card never answers")
        ]
        assert fmean(rates) == pytest.approx(0.008 * BOARDS[board].pcie, rel=0.02)
        assert pstdev(rates) < 0.03 * fmean(rates)


def test_boards_that_smooth_their_power_draw_it_while_nothing_is_done() -> None:
    simulation = told("smoothed_hang", board="B200-SXM")
    waiting = within(simulation, "all ranks wait")
    assert mean(waiting, "power_watts") == pytest.approx(450, rel=0.02)
    assert {r.tensor_active for r in waiting} == {0.0}
    assert {h.power_smoothing for o in simulation.observations for h in o.health} == {True}
    assert {h.power_smoothing for o in told("nic_hang").observations for h in o.health} == {False}


@pytest.mark.parametrize(
    ("story", "phase", "seen", "watts"),
    [
        ("fp64_in_registers", "integrating", "fp64_active", 250),
        ("fp32_in_registers", "integrating", "fp32_active", 250),
        ("integers_in_registers", "searching", None, 300),
        ("thin_fp64", "integrating", "fp64_active", 114),
        ("thin_tensor", "recurring", "tensor_active", 114),
        ("tiny_kernels", "stepping", None, 114),
    ],
)
def test_some_work_shows_in_one_pipe_only_or_in_its_power_alone(
    story: str, phase: str, seen: str | None, watts: float
) -> None:
    readings = within(told(story), phase)
    assert {name for name in PIPES if mean(readings, name) > 0.015} == ({seen} if seen else set())
    assert mean(readings, "dram_active") < 0.005
    assert watts < mean(readings, "power_watts") < watts + 100


def test_a_long_first_step_has_a_process_and_next_to_no_kernel_for_22_minutes() -> None:
    simulation = told("long_first_step", period=1)
    readings = within(simulation, "first step")
    assert (readings[-1].end - readings[0].start) / SECOND == pytest.approx(22 * 60, abs=3)
    assert all(r.processes for r in readings)
    assert 0 < mean(readings, "gr_engine_active") < 0.003
    assert max(r.gr_engine_active or 0 for r in readings) > 0.04
    assert mean(within(simulation, "training"), "tensor_active") > 0.4


@pytest.mark.parametrize(
    ("story", "phase", "between"),
    [("serving_lull", "nobody asks", 248), ("used_notebook", "a cell runs", 100), ("keeper", "keeping", 29)],
)
def test_rests_are_as_long_as_they_are_said_to_be(story: str, phase: str, between: float) -> None:
    simulation = told(story, period=60)
    begun = [e.at / SECOND for e in phases(simulation, simulation.uuids[0]) if e.phase == phase]
    assert len(begun) >= 2
    assert {(b - a) / 60 for a, b in pairwise(begun)} == {between}


def test_a_poller_keeps_the_engine_busy_with_a_handful_of_blocks() -> None:
    for story, rate in (("idle_poller", 0), ("host_poller", 0.008 * BOARDS[H100].pcie)):
        readings = within(told(story), "polling")
        assert {r.gpu_utilization for r in readings} == {1.0}
        assert mean(readings, "sm_active") < 0.2
        assert mean(readings, "pcie_rx_bytes_per_second") == pytest.approx(rate, rel=0.02, abs=1e5)


@pytest.mark.parametrize("leaves", ["nothing", "zeros", "stale"])
def test_a_profiler_takes_the_counters_and_leaves_the_drivers_own_figures(leaves: str) -> None:
    plain = told("profiler_attached", gpus=1)
    simulation = replace(plain, plan=replace(plain.plan, profiler_leaves=leaves))
    (readings,) = by_gpu(simulation.observations).values()
    taken = during(readings, 305, 900)
    assert len(taken) == 119
    for reading in taken:
        values = {getattr(reading, name) for name in PROFILED}
        assert reading.distrust == ("stale" if leaves == "stale" else "")
        assert leaves == "stale" or values == {None if leaves == "nothing" else 0.0}
        assert reading.gpu_utilization
        assert reading.power_watts
    assert all(r.tensor_active for r in [*during(readings, 100, 300), *during(readings, 905, 1500)])


def test_drained_gpus_work_on_until_their_job_ends() -> None:
    simulation = told("drained_gpus", gpus=4)
    changed = [(o.at, [d.condition for d in o.devices]) for o in simulation.observations if o.devices is not None]
    assert changed == [(0, [""] * 4), (605 * SECOND, ["drained", "drained", "", ""])]
    readings = by_gpu(simulation.observations)[simulation.uuids[0]]
    assert mean(during(readings, 610, 950), "tensor_active") > 0.4
    assert mean(during(readings, 970, 1500), "gr_engine_active") == 0


def test_a_slow_epilog_kills_45_seconds_late_and_a_dead_program_leaves_its_hold() -> None:
    late = told("slow_epilog", gpus=1, period=1)
    readings = by_gpu(late.observations)[late.uuids[0]]
    assert [r.end // SECOND for r in readings if r.processes][-1] == 645 == 600 + 45
    dead = told("dead_program", gpus=1, period=60)
    entry = phases(dead, dead.uuids[0])[-1]
    assert (entry.phase, entry.held, entry.process, entry.at) == ("held without a process", True, False, 600_123 * MS)


def test_a_stuck_job_leaves_its_neighbour_alone() -> None:
    simulation = told("hang_beside_training", gpus=4)
    late = {u: during(r, 600, 1080) for u, r in by_gpu(simulation.observations).items()}
    assert [mean(late[uuid], "tensor_active") > 0.4 for uuid in simulation.uuids] == [False, False, True, True]
    assert len({a.owner.job_id for a in next(simulation.observations).allocations or ()}) == 2
