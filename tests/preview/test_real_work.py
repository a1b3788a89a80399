"""Tests what counts as real work: single readings, sums that do not depend on their length, and real recordings."""

import csv
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.detection.samples import CAPTURES, SAMPLES
from exporter.core.model import PPM, Device, Health, Observation, Reading
from exporter.core.policy import Policy
from exporter.preview.real_work import Activity, ActivityReader, WorkMeter, is_real_work, work_share
from exporter.specs import find_spec
from tests.worlds import RESTING, SPINNING, WORKING, S, cut, device, first, reading, seen

needs_samples = pytest.mark.skipif(not SAMPLES.exists(), reason="needs ../shared")
POLICY = Policy()
DRIVER_ONLY: dict[str, Any] = dict.fromkeys(
    ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active"), None
)


def share(signals: dict[str, Any], **more: Any) -> float | None:
    return work_share(reading(0, 1, signals, **more), device(), POLICY)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"gr_engine_active": 0.4, "tensor_active": 0.1}, 0.4),
        ({"gr_engine_active": 0.4, "dram_active": 0.1}, 0.4),
        ({"gr_engine_active": 0.4, "fp64_active": 0.1}, 0.4),
        ({"gr_engine_active": 0.4}, 0.0),
        ({"gr_engine_active": 0.4, "dram_active": None}, 0.4),
        ({"gr_engine_active": 0.4, "power_watts": 400.0}, 0.4),
        ({"gr_engine_active": 0.005, "dram_active": 0.1}, 0.0),
        ({"gr_engine_active": 1.04, "dram_active": 0.1}, 1.0),
        ({"gr_engine_active": float("nan"), "gpu_utilization": 0.3, "dram_active": 0.1}, 0.3),
        ({"encoder_utilization": 0.3}, 0.3),
        ({"decoder_utilization": 0.2, "encoder_utilization": 0.3}, 0.3),
        ({"decoder_utilization": 0.01}, 0.0),
    ],
)
def test_work_is_engine_time_with_active_pipes_or_power_and_video(changes: dict[str, Any], expected: float) -> None:
    assert share(RESTING | changes) == pytest.approx(expected)


def test_a_kernel_that_polls_does_no_work() -> None:
    assert (share(SPINNING), share(WORKING)) == (0.0, 0.95)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpu_utilization": 0.6, "power_watts": 400.0}, 0.6),
        ({"gpu_utilization": 1.0}, 0.0),
        ({"gpu_utilization": 0.1}, 0.1),
        ({"gpu_utilization": 1.0, "power_watts": None}, 1.0),
        ({"gpu_utilization": 1.0, "power_watts": None, "processes": ()}, 0.0),
        ({"gpu_utilization": None, "power_watts": 400.0}, 1.0),
        ({"gpu_utilization": None}, 0.0),
        ({"gpu_utilization": None, "power_watts": None}, None),
        ({"gpu_utilization": None, "power_watts": None, "encoder_utilization": 0.2}, 0.2),
    ],
)
def test_the_driver_s_utilization_is_work_unless_the_board_shows_that_it_is_idle(
    changes: dict[str, Any], expected: float | None
) -> None:
    assert share(RESTING | DRIVER_ONLY | changes) == expected


def test_counters_that_were_zero_filled_do_not_hide_work() -> None:
    assert share(RESTING | {"gpu_utilization": 0.8, "power_watts": 400.0}) == 0.8


def test_power_shows_nothing_on_a_board_that_smooths_it() -> None:
    """Nor on its instances, of which it has none."""
    busy = RESTING | {"gr_engine_active": 0.5, "power_watts": 600.0}
    boards = (device(), *cut(3, board="GPU-1"))
    told = seen(1, *(reading(0, 1, busy, board.uuid) for board in boards))
    plain, smoothed = ActivityReader(POLICY), ActivityReader(POLICY)
    plain.read(first(boards))
    smoothed.read(Observation(0, 0, devices=boards, health=(Health("GPU-0", power_smoothing=True),)))
    smoothed.read(Observation(0, 0, health=(Health("GPU-1", power_smoothing=True),)))
    assert {each.work for (each,) in plain.read(told).values()} == {PPM // 2}
    assert {each.work for (each,) in smoothed.read(told).values()} == {0}
    smoothed.read(Observation(0, 0, health=(Health("GPU-0", power_smoothing=False),)))
    later = seen(2, reading(1, 2, busy))
    assert [each.work for each in smoothed.read(later)["GPU-0"]] == [PPM // 2]


def test_readings_that_overlap_or_cannot_be_trusted_are_left_out() -> None:
    reader = ActivityReader(POLICY)
    reader.read(first([device()]))
    told = seen(
        10, reading(4, 6), reading(0, 2), reading(1, 3), reading(5, 7), reading(8, 8), reading(9, 11),
        reading(6, 7, distrust="stale"), reading(7, 8, uuid="GPU-9"),
    )  # fmt: skip
    assert [(each.start, each.end) for each in reader.read(told)["GPU-0"]] == [(0, 2 * S), (4 * S, 6 * S)]
    assert reader.read(seen(11, reading(5, 11))) == {}


@pytest.mark.parametrize(
    ("work", "observed", "real"),
    [(10.0, 1000.0, False), (10.1, 1000.0, True), (600.0, 1e6, False), (600.1, 1e6, True), (0.0, 0.0, False)],
)
def test_real_work_is_more_than_one_percent_or_ten_minutes(work: float, observed: float, *, real: bool) -> None:
    assert is_real_work(work, observed) is real


PIECES = st.lists(st.tuples(st.integers(1, 10**10), st.integers(0, PPM)), min_size=1, max_size=8)


@given(PIECES, st.integers(0, 10**10), st.integers(0, 10**11), st.data())
def test_cutting_an_activity_changes_no_sum(
    pieces: list[tuple[int, int]], since: int, until: int, data: st.DataObject
) -> None:
    whole, parts = WorkMeter(since), WorkMeter(since)
    now = 0
    for length, work in pieces:
        at = now + data.draw(st.integers(0, length))
        whole.add([Activity(now, now + length, work)])
        parts.add([Activity(start, end, work) for start, end in ((now, at), (at, now + length)) if start < end])
        parts.settle(min(until, at))
        now += length
    for meter in (whole, parts):
        meter.settle(until)
    assert (parts.work_ppm_ns, parts.observed_ns, parts.first_work) == (
        whole.work_ppm_ns, whole.observed_ns, whole.first_work,
    )  # fmt: skip
    assert whole.observed_ns == max(0, min(now, until) - since)
    assert sum(each.end - each.start for each in parts.pending) == max(0, now - max(until, since))


# -- real recordings --


@needs_samples
@pytest.mark.parametrize(("name", "capture"), CAPTURES)
def test_a_recorded_board_works_where_it_was_busy(name: str, capture: Callable[[], tuple[Device, Reading]]) -> None:
    board, told = capture()
    found = work_share(told, board, POLICY)
    busy = None if "MIG" in name else 1.0 if "gpu_burn" in name else 0.0
    assert found == busy or (busy is None and found in (None, 0.0, 1.0))


def square_wave() -> tuple[list[Reading], float]:
    """Readings of an A100 under a load that is half on and half off, and the share of them at more than idle power."""
    with (Path(SAMPLES) / "smi-series/square-wave-A100.csv").open(encoding="utf-8", newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)][1:]
    times = [round(datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f").timestamp() * 1000) for row in rows]  # noqa: DTZ007
    found = [
        Reading("GPU-0", (a - times[0]) * 10**6, (b - times[0]) * 10**6, gpu_utilization=float(row[1]) / 100,
                power_watts=float(row[5]), enforced_power_limit_watts=400.0)
        for a, b, row in zip(times, times[1:], rows[1:], strict=False) if a < b
    ]  # fmt: skip
    return found, sum(float(row[5]) > 100 for row in rows) / len(rows)


@needs_samples
def test_a_recorded_square_wave_works_about_half_of_the_time() -> None:
    readings, share_powered = square_wave()
    reader, meter = ActivityReader(POLICY), WorkMeter(0)
    reader.read(first([Device("GPU-0", model="NVIDIA A100-SXM4-40GB", spec=find_spec("NVIDIA A100-SXM4-40GB"))]))
    for told in readings:
        meter.add(reader.read(Observation(told.end, told.end, readings=(told,))).get("GPU-0", ()))
    meter.settle(readings[-1].end)
    assert meter.observed_ns == readings[-1].end
    assert meter.work_seconds / (readings[-1].end / S) == pytest.approx(share_powered, abs=0.2)
