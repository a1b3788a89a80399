"""The simulated node obeys physics, is reproducible to the byte, and does not import the classification rules."""

import ast
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

import msgspec
import pytest

import exporter.simulate.simulation
from exporter.core.model import MS, SECOND, Allocation, Observation, Reading
from exporter.simulate.boards import BOARDS
from exporter.simulate.plan import GroundTruth, timeline
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.workload import Cycle, Load, Segment
from tests.hidden import without

pytestmark = pytest.mark.slow

H100 = "H100-SXM5-80GB"
NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
IDLE, POWER_CAP = 0x1, 0x4


def to_bytes(simulation: Simulation, count: int = 200) -> bytes:
    return b"\n".join(map(msgspec.json.encode, islice(simulation.observations, count)))


def by_gpu(observations: Iterable[Observation]) -> dict[str, list[Reading]]:
    readings = defaultdict(list)
    for observation in observations:
        for reading in observation.readings:
            readings[reading.uuid].append(reading)
    return readings


def story(scenario: str, *, gpu: int, board: str = H100, period: float = 1.0, gpus: int = 8) -> list[Reading]:
    simulation = simulate(scenario, board=board, period_seconds=period, gpus=gpus)
    return by_gpu(simulation.observations)[simulation.uuids[gpu]]


def mean(readings: Iterable[Reading], signal: str) -> float:
    return fmean(getattr(reading, signal) for reading in readings)


def phases(simulation: Simulation, uuid: str) -> list[GroundTruth]:
    return [entry for entry in simulation.truth if entry.uuid == uuid]


def during(readings: Iterable[Reading], start: float, end: float) -> list[Reading]:
    return [r for r in readings if start * SECOND <= r.start and r.end <= end * SECOND]


def check_reading(reading: Reading, simulation: Simulation) -> None:
    """Assert what holds for every physical board."""
    board = simulation.board
    signals = msgspec.structs.asdict(reading)
    assert signals.pop("int_active") is None  # the boards here do not count integer instructions
    ratios = [value for name, value in signals.items() if name.endswith("_active")]
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert reading.tensor_active is not None
    assert reading.sm_active is not None
    assert reading.gr_engine_active is not None
    assert reading.tensor_active <= reading.sm_active <= reading.gr_engine_active
    assert reading.dram_active is not None
    assert reading.dram_active <= board.dram_ceiling
    assert reading.start % MS == reading.end % MS == 0
    assert reading.power_watts is not None
    assert reading.energy_joules is not None
    assert 0.95 * board.idle_watts < reading.power_watts < 1.05 * board.limit_watts
    seconds = (reading.end - reading.start) / SECOND
    assert reading.energy_joules == pytest.approx(reading.power_watts * seconds, rel=0.05)
    assert reading.temperature_celsius is not None
    assert 20 <= reading.temperature_celsius <= 100
    assert reading.temperature_celsius == int(reading.temperature_celsius)
    assert reading.memory_used_bytes is not None
    assert reading.memory_total_bytes == board.memory_bytes
    assert reading.memory_used_bytes <= board.memory_bytes
    assert reading.sm_clock_hz is not None
    assert reading.sm_clock_hz <= board.boost_clock_hz
    for name, ceiling in (("nvlink", board.nvlink), ("pcie", board.pcie)):
        for way in ("tx", "rx"):
            rate = getattr(reading, f"{name}_{way}_bytes_per_second")
            assert (rate is None) == (ceiling is None)
            assert ceiling is None or 0 <= rate <= ceiling


def check_gaps(simulation: Simulation, readings: list[Reading]) -> None:
    """Assert that a GPU's readings are contiguous, except while the source is silent."""
    for before, after in pairwise(readings):
        if before.end != after.start:
            assert simulation.plan.silent(before.end // MS + simulation.period_ms)
            assert before.end < after.start


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_gives_readings_that_physics_allows(scenario: str, board: str) -> None:
    seed, gpus = list(BOARDS).index(board), 8 if scenario == "demo" else 4
    simulation = simulate(scenario, seed=seed, board=board, period_seconds=60, gpus=gpus, node=seed)
    first, *rest = simulation.observations
    assert first.at == simulation.start == 0
    assert not first.readings
    assert first.devices is not None
    assert first.allocations is not None
    assert [device.uuid for device in first.devices] == list(simulation.uuids)
    assert [o.at for o in rest] == [60 * SECOND * (k + 1) for k in range(len(rest))]
    assert rest[-1].at == simulation.duration_ms * MS
    assert all(r.start < r.end <= o.at for o in rest for r in o.readings)
    readings = by_gpu(rest)
    assert set(readings) == set(simulation.uuids)
    for gpu in readings.values():
        check_gaps(simulation, gpu)
        for reading in gpu:
            check_reading(reading, simulation)


def test_the_same_seed_gives_the_same_bytes() -> None:
    for scenario in SCENARIOS:
        once, again = simulate(scenario, seed=3), simulate(scenario, seed=3)
        assert to_bytes(once, 50) == to_bytes(again, 50) == to_bytes(once, 50)
        assert list(islice(once.truth, 20)) == list(islice(again.truth, 20))


def test_other_seeds_and_nodes_give_other_figures_and_other_gpus() -> None:
    base = simulate("input_starved_training", seed=1)
    for other in (simulate("input_starved_training", seed=2), simulate("input_starved_training", seed=1, node=1)):
        assert not set(base.uuids) & set(other.uuids)
        ours, theirs = (by_gpu(islice(s.observations, 200))[s.uuids[0]] for s in (base, other))
        assert [r.power_watts for r in ours] != [r.power_watts for r in theirs]
        assert [e.at for e in islice(base.truth, 200)] != [e.at for e in islice(other.truth, 200)]


def test_start_and_wall_only_move_the_story() -> None:
    moved = simulate("healthy_training", start=5 * SECOND, wall=9)
    for ours, theirs in zip(
        islice(simulate("healthy_training").observations, 60), islice(moved.observations, 60), strict=True
    ):
        assert theirs.at == ours.at + 5 * SECOND
        assert theirs.wall == ours.at + 9
        assert [r.start for r in theirs.readings] == [r.start + 5 * SECOND for r in ours.readings]
        assert [r.power_watts for r in theirs.readings] == [r.power_watts for r in ours.readings]
    first = next(iter(moved.observations))
    assert first.allocations is not None
    assert first.allocations[0].start == 5 * SECOND
    assert next(moved.truth).at == 5 * SECOND


@pytest.mark.parametrize("scenario", ["input_starved_training", "straggler", "leaked_process"])
def test_energy_and_work_do_not_depend_on_how_often_one_looks(scenario: str) -> None:
    totals = []
    for period in (1, 7, 60):
        simulation = simulate(scenario, period_seconds=period, gpus=2, duration_seconds=1680)
        readings = by_gpu(simulation.observations)[simulation.uuids[0]]
        seconds = [(r.end - r.start) / SECOND for r in readings]
        totals.append(
            [
                sum((r.tensor_active or 0) * s for r, s in zip(readings, seconds, strict=True)),
                sum((r.gr_engine_active or 0) * s for r, s in zip(readings, seconds, strict=True)),
                sum(r.energy_joules or 0 for r in readings),
            ]
        )
    for other in totals[1:]:
        assert other == pytest.approx(totals[0], rel=0.01)


@pytest.mark.parametrize("scenario", ["input_starved_training", "memory_bound_decode", "deadlock", "throttled"])
def test_the_truth_is_what_the_sensors_see(scenario: str) -> None:
    simulation = simulate(scenario, gpus=4, period_seconds=10)
    for uuid, readings in by_gpu(simulation.observations).items():
        entries = phases(simulation, uuid)
        ends = [*(entry.at for entry in entries[1:]), simulation.duration_ms * MS]
        weights = [(end - entry.at) / SECOND for entry, end in zip(entries, ends, strict=True)]
        for signal, field in (("tensor_active", "tensor_active"), ("gr_engine_active", "engine_active")):
            intended = sum(getattr(e, field) * w for e, w in zip(entries, weights, strict=True))
            seen = sum(getattr(r, signal) * (r.end - r.start) / SECOND for r in readings)
            assert seen == pytest.approx(intended, rel=0.02)


def test_the_truth_stays_out_of_the_observations() -> None:
    simulation = simulate("demo")
    observed = to_bytes(simulation, 400)
    names = {entry.phase for entry in simulation.truth} - {"free"}
    assert len(names) > 10
    assert not [name for name in names if name.encode() in observed]
    assert b"share" not in observed


def test_the_truth_goes_to_a_file_of_its_own(tmp_path: Path) -> None:
    simulation = simulate("deadlock", gpus=2)
    simulation.write_truth(tmp_path / "truth.jsonl")
    lines = (tmp_path / "truth.jsonl").read_bytes().splitlines()
    entries = [msgspec.json.decode(line, type=GroundTruth) for line in lines]
    assert entries == list(simulation.truth)
    assert [e.at for e in entries] == sorted(e.at for e in entries)
    assert {e.uuid for e in entries} == set(simulation.uuids)


def test_the_simulation_imports_the_values_and_nothing_else_of_the_project() -> None:
    allowed = ("exporter.core.model", "exporter.simulate")
    for file in Path(exporter.simulate.simulation.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [module for module in modules if module.startswith("exporter")]
            assert all(module.startswith(allowed) for module in ours), file.name


def check_allocations(simulation: Simulation) -> list[Observation]:
    observations = list(simulation.observations)
    told: tuple[Allocation, ...] | None = None
    for before, observation in pairwise(observations):
        held = observation.allocations
        if held is not None:
            assert held != told
            told = held
            assert all(a.start <= observation.at for a in held)
            assert all(a.end is None or before.at < a.end <= observation.at for a in held)
    return observations


def test_allocations_are_change_points_and_never_foresee_an_end() -> None:
    for scenario in ("leaked_process", "lost_gpu", "zombie_notebook", "demo"):
        observations = check_allocations(simulate(scenario, period_seconds=7))
        changes = sum(o.allocations is not None for o in observations)
        assert 1 < changes < len(observations) / 4


def test_a_hold_may_begin_between_two_readings() -> None:
    simulation = simulate("zombie_notebook", duration_seconds=10)
    starts = {a.start for o in simulation.observations for a in o.allocations or ()}
    assert starts == {2_345 * MS, 7_345 * MS}


def test_a_cycle_adds_up_over_any_interval() -> None:
    segments = [Segment(ms, Load(engine=e), "computing") for ms, e in ((3.0, 1.0), (2.0, 0.25), (5.0, 0.0))]
    cycle = Cycle(*segments)
    each_ms = [1.0] * 3 + [0.25] * 2 + [0.0] * 5
    for start in range(23):
        for end in range(start, 41):
            expected = sum(each_ms[ms % 10] for ms in range(start, end))
            assert cycle.integral(start, end).engine == pytest.approx(expected, abs=1e-9)
    assert cycle.mean().engine == pytest.approx(0.35)


def test_the_end_of_a_hold_does_not_disturb_the_process() -> None:
    simulation = simulate("leaked_process")
    pieces = list(islice(timeline(simulation.plan, 0, board=simulation.board, seed=0), 10))
    after = next(piece for piece in pieces if piece.start == 600_250)
    before = pieces[pieces.index(after) - 1]
    assert before.end == after.start
    assert (before.origin, before.process, before.cycle.ms) == (after.origin, after.process, after.cycle.ms)


def test_healthy_training_keeps_its_tensor_cores_half_busy() -> None:
    readings = during(story("healthy_training", gpu=0), 120, 1500)
    assert mean(readings, "gr_engine_active") == pytest.approx(0.97, abs=0.01)
    assert mean(readings, "sm_active") == pytest.approx(0.85, abs=0.02)
    assert mean(readings, "tensor_active") == pytest.approx(0.45, abs=0.02)
    assert mean(readings, "dram_active") == pytest.approx(0.45, abs=0.03)
    assert 30e9 < mean(readings, "nvlink_tx_bytes_per_second") < 200e9
    assert 550 < mean(readings, "power_watts") < 680


def test_without_nvlink_gradients_go_over_pcie() -> None:
    readings = during(story("healthy_training", gpu=0, board="L40S"), 120, 1500)
    assert max(r.pcie_tx_bytes_per_second or 0 for r in readings) > 10e9
    assert all(getattr(r, signal) is None for r in readings for signal in NVLINK)
    device = (next(simulate("healthy_training", board="L40S").observations).devices or ())[0]
    assert device.lacks == NVLINK
    assert device.spec is not None
    assert device.spec.nvlink_bytes_per_second is None


def test_decode_streams_weights_and_leaves_tensor_cores_alone() -> None:
    simulation = simulate("memory_bound_decode", period_seconds=5)
    readings = by_gpu(simulation.observations)
    together, single = (during(readings[simulation.uuids[slot]], 120, 1800) for slot in (0, 7))
    assert mean(single, "gr_engine_active") == pytest.approx(0.98, abs=0.01)
    assert mean(single, "tensor_active") == pytest.approx(0.04, abs=0.01)
    assert mean(single, "sm_active") == pytest.approx(0.7, abs=0.03)
    assert mean(single, "dram_active") == pytest.approx(0.75, abs=0.02)
    assert mean(single, "nvlink_tx_bytes_per_second") == 0
    assert mean(together, "nvlink_tx_bytes_per_second") > 1e9
    allocations = next(simulation.observations).allocations or ()
    assert sorted(a.gpus for a in allocations) == [1, 1, 1, 1, 4, 4, 4, 4]
    assert {a.owner.workload_class for a in allocations} == {"serving"}


def test_starved_training_alternates_and_copies_after_each_wait() -> None:
    readings = during(story("input_starved_training", gpu=0), 120, 1800)
    busy = [r.gr_engine_active or 0 for r in readings]
    assert pstdev(busy) > 0.4
    assert 0.4 < fmean(busy) < 0.7
    waits = sum(a.gr_engine_active == 0 < (b.gr_engine_active or 0) for a, b in pairwise(readings))
    bursts = [
        before.gr_engine_active or 0
        for before, burst in pairwise(readings)
        if (burst.pcie_rx_bytes_per_second or 0) > 2e9 > (before.pcie_rx_bytes_per_second or 0)
    ]
    assert waits > 60
    assert len(bursts) > 60
    assert fmean(bursts) < 0.1


def test_a_forgotten_notebook_holds_its_context_and_does_nothing() -> None:
    readings = story("zombie_notebook", gpu=3, period=10)
    early, late = during(readings, 0, 700), during(readings, 800, 10_800)
    assert late[-1].end - late[0].start > 2.5 * 3600 * SECOND
    assert max(r.gr_engine_active or 0 for r in early) > 0.9
    assert {r.gr_engine_active for r in late} == {0.0}
    assert all(r.processes and (r.memory_used_bytes or 0) > 10e9 for r in late)
    assert mean(late, "power_watts") == pytest.approx(BOARDS[H100].context_watts, rel=0.02)
    assert {r.clock_event_reasons for r in late} == {IDLE}


def test_a_leaked_process_computes_on_after_its_hold() -> None:
    simulation = simulate("leaked_process", period_seconds=1)
    observations = list(simulation.observations)
    last_told = [o.allocations for o in observations if o.allocations is not None][-1]
    assert {a.end for a in last_told} == {600_250 * MS}
    readings = by_gpu(observations)
    for slot, uuid in enumerate(simulation.uuids):
        late = during(readings[uuid], 601, 1800)
        assert all(bool(r.processes) == (slot < 2) for r in late)
        assert (mean(late, "tensor_active") > 0.4) == (slot < 2)


@pytest.mark.parametrize("board", [H100, "L40S"])
def test_in_a_deadlock_one_rank_rests_and_the_rest_poll(board: str) -> None:
    simulation = simulate("deadlock", board=board, period_seconds=10)
    stuck = {u: during(r, 1300, 2700) for u, r in by_gpu(simulation.observations).items()}
    culprits = [u for u, readings in stuck.items() if mean(readings, "gr_engine_active") == 0]
    assert len(culprits) == 1
    assert all(reading.processes for reading in stuck[culprits[0]])
    awake = BOARDS[board].context_watts
    for uuid in set(stuck) - set(culprits):
        readings = stuck[uuid]
        assert {r.gpu_utilization for r in readings} == {1.0}
        assert mean(readings, "gr_engine_active") > 0.999
        assert {r.tensor_active for r in readings} == {0.0}
        assert mean(readings, "dram_active") < 0.002
        assert mean(readings, "sm_active") < 0.2
        assert max(getattr(r, NVLINK[0]) or 0 for r in readings) == 0
        assert awake < mean(readings, "power_watts") < awake + 0.04 * BOARDS[board].limit_watts
        working = during(by_gpu(simulation.observations)[uuid], 600, 900)
        assert mean(readings, "temperature_celsius") < mean(working, "temperature_celsius") - 15


def test_everyone_waits_for_a_straggler() -> None:
    simulation = simulate("straggler", period_seconds=10)
    late = {u: during(r, 120, 1800) for u, r in by_gpu(simulation.observations).items()}
    gaps = {uuid: 1 - mean(readings, "gr_engine_active") for uuid, readings in late.items()}
    slow = max(gaps, key=lambda uuid: gaps[uuid])
    assert gaps[slow] > 0.3
    entry = next(e for e in simulation.truth if e.phase == "training with one slow rank" and e.uuid != slow)
    assert entry.waiting_peer_share > 0.25
    for uuid in set(late) - {slow}:
        assert gaps[uuid] < 0.03
        assert mean(late[uuid], "power_watts") < 520
        assert mean(late[uuid], "tensor_active") == pytest.approx(mean(late[slow], "tensor_active"), rel=0.03)


def test_throttled_training_keeps_its_share_of_cycles_at_fewer_hertz() -> None:
    readings = story("throttled", gpu=0, period=5)
    free, hot, braked = during(readings, 90, 300), during(readings, 480, 900), during(readings, 1100, 1800)
    for slowed, bit in ((hot, 0x40), (braked, 0x80)):
        assert {r.clock_event_reasons for r in slowed} == {bit | 0x8}
        assert mean(slowed, "sm_clock_hz") == pytest.approx(1200e6, abs=10e6)
        assert mean(slowed, "tensor_active") == pytest.approx(mean(free, "tensor_active"), rel=0.08)
        assert mean(slowed, "power_watts") < 0.6 * mean(free, "power_watts")
    assert mean(hot, "temperature_celsius") > mean(braked, "temperature_celsius") + 20


def test_a_lost_gpu_falls_silent_and_its_job_fails_later() -> None:
    simulation = simulate("lost_gpu")
    observations = list(simulation.observations)
    changed = [o for o in observations if o.devices is not None]
    assert [o.at for o in changed] == [0, 601 * SECOND]
    assert [d.condition for d in changed[1].devices or ()] == [""] * 7 + ["lost"]
    readings = by_gpu(observations)
    assert readings[simulation.uuids[7]][-1].end == 600 * SECOND
    assert {f.uuid for o in observations for f in o.faults} == {simulation.uuids[7]}
    waiting = during(readings[simulation.uuids[0]], 602, 1200)
    assert mean(waiting, "gr_engine_active") > 0.999
    assert mean(waiting, "tensor_active") == 0
    assert not readings[simulation.uuids[0]][-1].processes


def test_an_outage_gives_faults_and_no_readings_while_work_goes_on() -> None:
    simulation = simulate("telemetry_outage", gpus=2)
    observations = list(simulation.observations)
    silent = [o for o in observations if o.faults]
    assert len(silent) == 300
    assert not [o for o in silent if o.readings]
    assert [o.at // SECOND for o in observations if not o.readings] == [0, *range(601, 902)]
    temperatures = [r.temperature_celsius for o in observations[590:920] for r in o.readings]
    assert max(map(float, filter(None, temperatures))) - min(map(float, filter(None, temperatures))) < 4
    notes = [entry.phase for entry in simulation.truth if not entry.uuid]
    assert notes == ["the telemetry source is silent", "the telemetry source answers again"]


@pytest.mark.parametrize(
    ("scenario", "g", "s", "t", "d"),
    [
        ("copy_loop", 1.0, 0.9, 0.0, 0.9),
        ("large_gemm", 1.0, 0.98, 0.87, 0.35),
        ("spin_kernel", 1.0, 0.0076, 0.0, 0.0),
        ("idle_context", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_single_kernels_use_the_units_they_should(scenario: str, g: float, s: float, t: float, d: float) -> None:
    readings = story(scenario, gpu=0, gpus=1, period=5)
    signals = ("gr_engine_active", "sm_active", "tensor_active", "dram_active")
    assert [mean(readings, signal) for signal in signals] == pytest.approx([g, s, t, d], abs=0.01)


@pytest.mark.parametrize("board", BOARDS)
def test_power_rules_the_clock_of_a_large_gemm(board: str) -> None:
    readings = during(story("large_gemm", gpu=0, gpus=1, period=5, board=board), 60, 600)
    figures = BOARDS[board]
    assert {r.clock_event_reasons for r in readings} == {POWER_CAP}
    assert mean(readings, "power_watts") > 0.95 * figures.limit_watts
    assert 0.8 < mean(readings, "sm_clock_hz") / figures.boost_clock_hz < 0.95
    assert {(r.sm_clock_hz or 0) % 15e6 for r in readings} == {0.0}


def test_a_spin_kernel_and_an_idle_context_draw_the_same() -> None:
    spin, still = (story(name, gpu=0, gpus=1, period=5) for name in ("spin_kernel", "idle_context"))
    assert mean(spin, "power_watts") == pytest.approx(mean(still, "power_watts"), rel=0.01)
    assert {r.gpu_utilization for r in spin} == {1.0}
    assert {r.gpu_utilization for r in still} == {0.0}


def test_the_carpenter_computes_half_of_eight_hours_exactly() -> None:
    simulation = simulate("carpenter", gpus=1, period_seconds=60)
    readings = by_gpu(simulation.observations)[simulation.uuids[0]]
    assert len(readings) == 480
    free, held = readings[:120], readings[120:]
    assert {(bool(r.processes), r.gr_engine_active) for r in free} == {(False, 0.0)}
    figures = [(r.gr_engine_active, r.tensor_active, r.sm_clock_hz) for r in held]
    assert figures.count((1.0, 0.4, 1830e6)) == 240
    assert figures.count((0.0, 0.0, 1830e6)) == 120
    assert [a.start for o in simulation.observations for a in o.allocations or ()] == [2 * 3600 * SECOND]


def test_a_heat_sink_takes_its_time() -> None:
    temperatures = [r.temperature_celsius or 0 for r in story("large_gemm", gpu=0, gpus=1)]
    assert temperatures[0] < 33
    assert temperatures[30] < temperatures[90] - 5 < temperatures[400]
    assert fmean(temperatures[400:]) == pytest.approx(26 + 0.055 * 690, abs=2)


def test_the_demo_tells_three_hours_before_anyone_watches() -> None:
    simulation = simulate("demo", duration_seconds=600)
    observations = list(simulation.observations)
    before = [o for o in observations if o.at <= simulation.live_from]
    assert simulation.live_from == 3 * 3600 * SECOND
    assert len(before) == 1 + 180
    assert len(observations) - len(before) == 600
    assert {b.at - a.at for a, b in pairwise(observations[180:])} == {SECOND}
    owners = {a.owner.name for o in before for a in o.allocations or ()}
    assert owners == {"pretrain", "chat", "jupyter", "ablation"}
    phases_seen = {e.phase for e in simulation.truth if e.at > simulation.live_from}
    assert phases_seen >= {"waiting for input", "training in hot air", "the container starts", "free"}
    fewer = simulate("demo", duration_seconds=60, preroll_seconds=0, gpus=2)
    assert len(list(fewer.observations)) == 61


def test_the_demo_can_go_on_for_ever() -> None:
    simulation = simulate("demo", duration_seconds=math.inf, period_seconds=60)
    late = next(islice(simulation.observations, 1500, None))
    assert late.at > 24 * 3600 * SECOND
    assert len(late.readings) == 8


def test_a_fleet_shares_a_job_across_two_nodes_and_no_gpu() -> None:
    nodes = [simulate("fleet", node=node, period_seconds=60) for node in range(10)]
    uuids = [uuid for node in nodes for uuid in node.uuids]
    assert len(uuids) == len(set(uuids))
    assert len({node.host for node in nodes}) == 10
    jobs = [{a.owner.job_id for a in next(n.observations).allocations or ()} for n in nodes]
    assert jobs[0] == jobs[1] != jobs[8] == jobs[9]
    assert jobs[7] == set()
    own = [job for node in nodes[2:7] for job in node.plan.jobs]
    assert len({job.owner.job_id for job in own}) == len(own)
    first, second = ([(e.at, e.phase) for e in phases(n, n.uuids[0])] for n in nodes[:2])
    assert first == second
    assert {a.gpus for a in next(nodes[0].observations).allocations or ()} == {16}


def test_without_takes_away_what_it_is_told_and_nothing_else() -> None:
    observations = list(islice(simulate("healthy_training", gpus=2).observations, 30))
    fewer = list(without(observations, signals=("tensor_active", "processes")))
    for before, after in zip(observations, fewer, strict=True):
        assert after.devices == before.devices
        assert after.allocations == before.allocations
        for reading, blank in zip(before.readings, after.readings, strict=True):
            assert blank == msgspec.structs.replace(reading, tensor_active=None, processes=None)


def test_without_takes_the_owner_or_the_board_away() -> None:
    observations = list(islice(simulate("healthy_training", gpus=2).observations, 3))
    ownerless = list(without(observations, signals={"owner"}))
    assert all(o.allocations is None for o in ownerless)
    assert [o.readings for o in ownerless] == [o.readings for o in observations]
    unknown = next(without(observations, signals={"spec"}))
    assert [d.spec for d in unknown.devices or ()] == [None, None]
    assert unknown.allocations == observations[0].allocations


def test_without_refuses_a_name_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"unknown signal tensor; known: .*tensor_active"):
        without([], signals=["tensor"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "nap"}, "unknown scenario 'nap'; known: demo, healthy"),
        ({"board": "H1000"}, "unknown board 'H1000'; known: H100-SXM5-80GB"),
        ({"scenario": "deadlock", "gpus": 1}, "deadlock needs at least 2 GPUs, not 1"),
        ({"gpus": 0}, "needs at least 1 GPUs"),
        ({"period_seconds": 0}, "period_seconds is 0: it must be a millisecond or more"),
        ({"period_seconds": 0.0015}, "whole milliseconds"),
        ({"duration_seconds": -1}, "duration_seconds is -1"),
        ({"duration_seconds": math.nan}, "duration_seconds is nan"),
        ({"start": 1}, "start is 1 ns: it must lie on a whole millisecond"),
    ],
)
def test_impossible_wishes_are_refused_in_words(arguments: dict[str, object], message: str) -> None:
    wanted = {"scenario": "healthy_training", **arguments}
    with pytest.raises(ValueError, match=message):
        simulate(**wanted)  # type: ignore[arg-type]


def test_two_jobs_on_one_gpu_are_refused() -> None:
    simulation = simulate("healthy_training", gpus=1)
    (job,) = simulation.plan.jobs
    later = msgspec.structs.replace(job, start_ms=5_000)
    broken = msgspec.structs.replace(simulation.plan, jobs=(job, later))
    with pytest.raises(ValueError, match="is still on GPU 0 when the next one starts"):
        list(msgspec.structs.replace(simulation, plan=broken).observations)
