"""The pipe whose activity is a job's useful work: the tensor cores', else FP64 or FP32, else none that counts."""

from typing import Any

import pytest

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import Allocation, Owner, TrainingReport
from exporter.core.pipeline import advance
from exporter.core.pipes import PIPES
from exporter.core.snapshot import DaemonMetadata, JobView, layers, take_snapshot
from tests.core.test_checkpoint import again
from tests.core.test_communication import lost, opened
from tests.worlds import SPINNING, WORKING, S, held, reading, seen

COMPUTES: dict[str, Any] = WORKING | {
    "gr_engine_active": 0.9, "sm_active": 0.8, "tensor_active": 0.0, "dram_active": 0.2, "fp64_active": 0.0,
    "fp32_active": 0.0, "fp16_active": 0.0, "int_active": 0.6,
}  # fmt: skip
"""A kernel that computes with no floating-point pipe, at the power of one that does."""
FP64 = COMPUTES | {"fp64_active": 0.5, "fp32_active": 0.02}
FP32 = COMPUTES | {"fp32_active": 0.4}
ALONE = (held(start=-60.0),)


def after_two_minutes(signals: dict[str, Any], *holders: Allocation) -> Ledger:
    ledger = opened(*(holders or ALONE))
    for at in (0, 60):
        advance(ledger, seen(at + 60, reading(at, at + 60, signals)))
    return ledger


def job(ledger: Ledger) -> JobView:
    return take_snapshot(ledger, DaemonMetadata()).jobs[0]


@pytest.mark.parametrize(
    ("signals", "pipe"),
    [
        (FP64, "fp64"),
        (FP32, "fp32"),
        (COMPUTES, "none"),
        (FP32 | {"tensor_active": 0.0045}, "tensor"),
        (FP32 | {"tensor_active": 0.0044}, "fp32"),
        (FP64 | {"tensor_active": 0.49}, "fp64"),
        (FP64 | {"tensor_active": 0.51}, "tensor"),
        (COMPUTES | {"fp32_active": 0.0449}, "none"),
        (COMPUTES | {"fp32_active": 0.045}, "fp32"),
        (COMPUTES | {"fp32_active": 0.1, "fp64_active": 0.2}, "fp64"),
        (COMPUTES | {"fp16_active": 0.1}, "tensor"),
        (COMPUTES | {"dram_active": 0.36}, "tensor"),
        (COMPUTES | {"dram_active": 0.35}, "none"),
        *[(FP64 | {field: None}, "tensor") for field in ("tensor_active", "dram_active", "fp64_active", "fp32_active")],
    ],
)
def test_which_pipe_a_job_computes_with(signals: dict[str, Any], pipe: str) -> None:
    assert job(after_two_minutes(signals)).useful_pipe == pipe
    assert pipe in PIPES


def test_kernels_that_poll_do_not_count() -> None:
    ledger = after_two_minutes(FP64)
    lost(ledger, 120, 3600, SPINNING | {"fp64_active": 0.0, "fp32_active": 0.0, "fp16_active": 0.0})
    assert job(ledger).useful_pipe == "fp64"


def test_a_minute_of_kernels_must_be_seen_and_counts_from_the_next_minute_on() -> None:
    ledger = opened(*ALONE)
    assert "useful" not in lost(ledger, 0, 60, FP64)
    assert "useful" not in lost(ledger, 60, 120, FP64), "54 s of kernels"
    assert lost(ledger, 120, 180, FP64)["useful"] == pytest.approx(0.5)


def test_trial_kernels_of_the_start_up_do_not_count() -> None:
    """A tenth of ten seconds of work before the job begins, as while libraries choose their kernels."""
    ledger = opened(held(start=0.0))
    trial = COMPUTES | {"gr_engine_active": 0.1, "sm_active": 0.1, "tensor_active": 0.1}
    lost(ledger, 0, 90, trial)
    assert lost(ledger, 100, 300, FP32)
    assert job(ledger).useful_pipe == "fp32"


def test_the_time_of_the_pipe_is_useful_and_the_rest_is_lost() -> None:
    """Of 90 % with a kernel on 80 % of the SMs: half is FP64, .1 has no warp, and the DRAM activity feeds the pipe."""
    parts = {"useful": 0.5, "low_parallelism": 0.1, "other_compute": 0.3, "host_overhead": 0.1}
    assert lost(after_two_minutes(FP64), 120, 180, FP64) == pytest.approx(parts, abs=2e-6)


def test_dram_activity_beyond_what_feeds_the_pipe_limits_kernels() -> None:
    """Of 50 %, .6 x .5 feed it; the ceiling is .96 x .92, and of 90 % with a kernel 80 % have a warp."""
    found = lost(after_two_minutes(FP64 | {"dram_active": 0.5}), 120, 180, FP64 | {"dram_active": 0.5})
    assert found["memory_bound"] == pytest.approx(0.2 / (0.96 * 0.92) * 0.8 / 0.9, abs=2e-6)


def test_at_a_low_clock_a_part_of_it_is_throttled() -> None:
    slow = FP64 | {"sm_clock_hz": 1830e6 * 0.8}
    found = lost(after_two_minutes(slow), 120, 180, slow)
    assert (found["useful"], found["throttled"]) == pytest.approx((0.4, 0.1), abs=2e-6)


def test_where_no_counter_shows_it_the_kernels_are_unresolved_and_emfu_does_not_apply() -> None:
    found = lost(ledger := after_two_minutes(COMPUTES), 120, 180, COMPUTES)
    assert found == pytest.approx({"unresolved": 0.9, "host_overhead": 0.1})
    for at in range(180, 600, 60):
        lost(ledger, at, at + 60, COMPUTES)
    view = job(ledger)
    assert (view.counters.recent.emfu, view.counters.recent.product) == (None, None)
    assert view.counters.recent.ectr == pytest.approx(0.9)


def test_video_engines_at_work_are_no_lost_compute() -> None:
    video = COMPUTES | {"gr_engine_active": 0.0, "sm_active": 0.0, "dram_active": 0.05, "int_active": 0.0,
                        "encoder_utilization": 0.8, "gpu_utilization": 0.0}  # fmt: skip
    ledger = after_two_minutes(video)
    assert lost(ledger, 120, 180, video) == pytest.approx({"unresolved": 0.8, "unattributed_stall": 0.2})


def test_a_job_that_begins_to_use_the_tensor_cores_is_measured_by_them() -> None:
    ledger = after_two_minutes(FP32)
    lost(ledger, 120, 180, WORKING | {"fp64_active": 0.0, "fp16_active": 0.0})
    assert lost(ledger, 180, 240, FP32).keys() == {
        "low_parallelism",
        "memory_bound",
        "other_compute",
        "host_overhead",
    }


@pytest.mark.parametrize(
    ("rule", "expected"), [("fp64", {"useful": 0.5}), ("tensor", {}), ("none", {"unresolved": 0.9})]
)
def test_a_rule_of_the_operator_goes_before_what_is_seen(rule: str, expected: dict[str, float]) -> None:
    ledger = opened(held(owner=Owner("41", useful_pipe=rule), start=-60.0))
    found = lost(ledger, 0, 60, FP64)
    assert {leak: found[leak] for leak in found if leak in ("useful", "unresolved")} == pytest.approx(expected)
    assert job(ledger).useful_pipe == rule
    page = render(take_snapshot(ledger, DaemonMetadata())).decode()
    line = f'gpu_efficiency_job_useful_pipe{{job_id="41",pipe="{rule}"}} 1\n'
    assert (line in page) == (rule != "tensor")


def test_reported_flops_of_the_tensor_cores_say_nothing_about_another_pipe() -> None:
    """They would make what is beyond them padding."""
    ledger = after_two_minutes(FP64)
    report = TrainingReport("41", 120 * S, 180 * S, model_flops=1e12)
    advance(ledger, seen(180, reading(120, 180, FP64), reports=(report,)))
    parts = take_snapshot(ledger, DaemonMetadata()).gpus[0].counters.now.parts
    assert layers(parts).emfu is not None
    assert "padding" not in lost(ledger, 180, 240, FP64)


def test_of_a_shared_gpu_the_tensor_cores_count() -> None:
    both = [held(owner=Owner(name, useful_pipe="fp64"), start=-60.0) for name in ("41", "42")]
    assert "useful" not in lost(opened(*both), 0, 60, FP64)


def test_it_survives_a_restart() -> None:
    ledger = after_two_minutes(FP64)
    lost(ledger, 120, 180, FP64)
    assert job(again(ledger)).useful_pipe == "fp64"
    assert lost(again(ledger), 180, 240, FP64)["useful"] == pytest.approx(0.5)


def test_a_kernel_that_polls_is_not_unresolved() -> None:
    """It computes with no pipe either, but what it is, is known."""
    ledger = after_two_minutes(COMPUTES)
    assert "unresolved" not in lost(ledger, 120, 180, SPINNING)
