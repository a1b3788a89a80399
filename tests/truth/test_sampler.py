"""What an agent reads: exact means over any windows, latest values, and what is left out."""

import io
import itertools
import json
from typing import Any

import pytest

from tests.truth import build, write_trace
from tests.truth.causes import CAUSES, DATA_STALL
from tests.truth.loads import kernel, wait
from tests.truth.reports import Reports
from tests.truth.sampler import ZERO_NS, Fields, Options, edges_of
from tests.truth.tracks import Integrals
from tests.truth.world import Holding, Job, World, new_world, truth_windows

Line = dict[str, Any]


def trace(
    world: World, reading: float = 1.0, *, fields: Fields = "full", reports: Reports = "none", missing: float = 0.0
) -> list[Line]:
    """Return the lines of a trace, decoded."""
    file = io.StringIO()
    write_trace(world, file, reading_seconds=reading, fields=fields, reports=reports, missing=missing)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def quarter() -> World:
    """Return a GPU that runs a kernel in the first 250 ms of each second."""
    world = new_world("quarter", 0, 20, gpus=1)
    world.holdings.append(Holding(Job("1"), (0,)))
    work, rest = kernel("k", sm=0.8, tensor=0.4, dram=0.2, pcie_rx=4e9), wait(DATA_STALL)
    for _ in range(20):
        world.gpus[0].track.add(250, work)
        world.gpus[0].track.add(750, rest)
    return world.finish()


def test_means_of_a_window_by_hand() -> None:
    (reading,) = trace(quarter(), 20.0)[2]["readings"]
    assert reading["gr_engine_active"] == 0.25
    assert reading["sm_active"] == 0.2
    assert reading["tensor_active"] == 0.1
    assert reading["pcie_rx_bytes_per_second"] == 1e9
    assert reading["gpu_utilization"] == 0.25
    # 110 W, and in a quarter of the time 15 + 85 x 0.8 + 450 x 0.4 + 170 x 0.2 + 12 x 4 / 126 W more
    watts = 110 + 0.25 * (15 + 68 + 180 + 34 + 12 * 4 / 126)
    assert reading["energy_joules"] / 20 == pytest.approx(watts, rel=0.03)
    assert reading["power_watts"] == pytest.approx(watts, rel=0.08)
    assert reading["sm_clock_hz"] == 1980e6


@pytest.mark.parametrize("reading", [0.1, 1.0, 10.0, 30.0])
def test_integrals_agree_with_the_sum_over_segments(reading: float) -> None:
    """Every window of a trace, summed segment by segment, gives the reading."""
    world = build("training_pipeline_polling", seed=3, seconds=90)
    edges = edges_of(world, Options(reading_seconds=reading))
    gpu = world.gpus[5]
    rows = Integrals(gpu.track, lambda load: [load.tensor, load.nvlink_tx]).until(edges)
    segments = list(gpu.track.segments())
    for k in range(0, len(edges) - 1, max(1, len(edges) // 40)):
        begin, end = edges[k], edges[k + 1]
        inside = [(max(0.0, min(s.end, end) - max(s.start, begin)), s.load) for s in segments]
        assert rows[0][k + 1] - rows[0][k] == pytest.approx(sum(t * x.tensor for t, x in inside) / 1e3, abs=1e-9)
        assert rows[1][k + 1] - rows[1][k] == pytest.approx(
            sum(t * x.nvlink_tx for t, x in inside) / 1e3, rel=1e-9, abs=1e-3
        )


def test_any_cut_of_time_gives_the_same_sum() -> None:
    world = build("random_training_job", seed=11, seconds=300)
    rng = world.random("cut")
    cuts = sorted([0.0, 300.0, *(rng.uniform(0, 300) for _ in range(200))])
    windows, whole = truth_windows(world, cuts), truth_windows(world, (0.0, 300.0))
    for uuid, rows in windows.items():
        for k, row in enumerate(rows):
            assert sum(row.values()) == pytest.approx(cuts[k + 1] - cuts[k], abs=1e-9)
        for cause in CAUSES:
            assert sum(row[cause] for row in rows) == pytest.approx(whole[uuid][0][cause], abs=1e-9)


def test_windows_join_and_have_jitter() -> None:
    lines = trace(build("training_text", seed=1, seconds=60))
    readings = [line["readings"][0] for line in lines[2:]]
    assert readings[0]["start"] == ZERO_NS
    assert readings[-1]["end"] == ZERO_NS + 60 * 10**9
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(readings))
    assert all(line["at"] == line["readings"][0]["end"] for line in lines[2:])
    assert len({r["end"] - r["start"] for r in readings}) > 10
    assert all((r["end"] - r["start"]) % 10**6 == 0 for r in readings)


def test_the_order_of_activities_survives_rounding() -> None:
    for line in trace(build("random_training_job", seed=5, seconds=120), 0.1)[2:]:
        for r in line["readings"]:
            assert 0 <= r["tensor_active"] <= r["sm_active"] <= r["gr_engine_active"] <= 1


def test_stock_fields_lack_sm_pipes_and_nvlink() -> None:
    full, stock = (
        trace(build("training_text", seed=1, seconds=5), fields=f)[2]["readings"][0] for f in ("full", "stock")
    )
    assert set(full) - set(stock) == {
        "sm_active", "sm_occupancy", "fp64_active", "fp32_active", "fp16_active", "nvlink_tx_bytes_per_second",
        "nvlink_rx_bytes_per_second", "enforced_power_limit_watts", "clock_event_reasons",
    }  # fmt: skip
    assert set(stock) <= set(full)


def test_boards_without_nvlink_do_not_report_it() -> None:
    lines = trace(build("training_l40s", seed=1, seconds=5))
    assert "nvlink_tx_bytes_per_second" in lines[1]["devices"][0]["lacks"]
    assert "nvlink_tx_bytes_per_second" not in lines[2]["readings"][0]


def test_missing_samples_are_missing() -> None:
    readings = [
        r for line in trace(build("training_text", seed=1, seconds=60), missing=0.2)[2:] for r in line["readings"]
    ]
    there = sum("tensor_active" in r for r in readings) / len(readings)
    assert 0.7 < there < 0.9
    assert all("power_watts" in r for r in readings)


def test_the_same_name_and_seed_give_the_same_bytes() -> None:
    texts = []
    for _ in range(2):
        file = io.StringIO()
        write_trace(build("training_straggler", seed=4, seconds=60), file, reading_seconds=1, reports="timed")
        texts.append(file.getvalue())
    assert texts[0] == texts[1]
    file = io.StringIO()
    write_trace(build("training_straggler", seed=5, seconds=60), file, reading_seconds=1, reports="timed")
    assert file.getvalue() != texts[0]


def test_allocations_change_when_a_job_ends() -> None:
    lines = trace(build("shared_node", seed=1, seconds=300), 10.0)
    changes = [line["allocations"] for line in lines[1:] if "allocations" in line]
    assert len(changes) == 2
    assert len(changes[0]) == 7
    assert sum("end" in row for row in changes[1]) == 1


@pytest.mark.parametrize("reports", ["usual", "timed"])
@pytest.mark.parametrize("name", ["training_crashing", "training_pipeline_idle", "training_images_long_stalls"])
def test_reports_cover_the_steps_and_no_more_than_their_time(name: str, reports: Reports) -> None:
    world = build(name, seed=2, seconds=1200)
    rows = [r for line in trace(world, 10.0, reports=reports)[2:] for r in line.get("reports", ())]
    of_one = [r for r in rows if r["rank"] == "0"]
    assert sum(r.get("steps", 0) for r in of_one) == sum(p.steps for p in world.progress)
    for row in rows:
        assert sum(value for _, value in row.get("phases", ())) <= row["end"] - row["start"]
    phases = {phase for row in rows for phase, _ in row.get("phases", ())}
    assert ("communication" in phases) == (reports == "timed")
    covered = [r for r in of_one if r["end"] > r["start"]]
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(covered))


def test_a_report_arrives_with_the_first_reading_after_its_end() -> None:
    for line in trace(build("training_text", seed=2, seconds=200), 1.0, reports="usual")[2:]:
        for row in line.get("reports", ()):
            assert line["readings"][0]["start"] < row["end"] <= line["at"]


def test_reported_flops_are_the_useful_seconds_of_a_steady_job() -> None:
    """Model FLOPs are the tensor pipe's work, less what the job's own recomputation and tiles waste."""
    world = build("training_large_batches", seed=2, seconds=600)
    first, last = world.progress[1], world.progress[-1]
    (rows, *_) = truth_windows(world, (first.start / 1e3, last.end / 1e3)).values()
    reported = sum(row.flops for row in world.progress) / 989.4e12
    assert 0.65 < reported / rows[0]["useful"] < 1.0
