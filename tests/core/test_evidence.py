"""Validation of a single reading: clamping, dropping, and splitting into pools."""

import math
from collections import Counter
from typing import Any

import pytest

from exporter.core.evidence import NO_SPIN, SPIN, SPIN_IF_FLAT, UTILIZATION_LAG, Evidence, evaluate
from exporter.core.ledger import Ledger
from exporter.core.model import PPM, Reading
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from tests.worlds import H100, RESTING, SPINNING, WORKING, S, cut, device, first, reading, seen

POLICY = Policy()


def evidence(signals: dict[str, Any], **changes: Any) -> Evidence:
    return evaluate(reading(0, 1, signals | changes), device(), POLICY)


def test_pools_of_a_busy_second() -> None:
    """g 0.95, t 0.45 at three quarters of the reference clock: wait 5 %, slack 50 %, clock 11.25 %, tensor 33.75 %."""
    ev = evidence(WORKING, sm_clock_hz=0.75 * 1830e6)
    assert (ev.wait, ev.slack, ev.clock_loss, ev.ofu) == (50_000, 500_000, 112_500, 337_500)
    assert ev.unresolved == 0


def test_a_clock_above_the_reference_delivers_more_than_the_peak_of_that_time() -> None:
    """An H100 that boosts to 1980 MHz: 0.45 * 1980 / 1830 = 0.486885 of the peak; the excess comes out of slack."""
    ev = evidence(WORKING, sm_clock_hz=1980e6)
    assert (ev.wait, ev.slack, ev.clock_loss, ev.ofu) == (50_000, 950_000 - 486_885, 0, 486_885)
    dense = evidence(WORKING, gr_engine_active=1.0, sm_active=1.0, tensor_active=0.95, sm_clock_hz=1980e6)
    assert (dense.slack, dense.clock_loss, dense.ofu) == (0, 0, PPM), "never more than the time a kernel ran"


@pytest.mark.parametrize("missing", ["tensor_active"])
def test_without_a_tensor_counter_kernel_time_is_unresolved(missing: str) -> None:
    ev = evidence(WORKING, **{missing: None})
    assert (ev.wait, ev.unresolved, ev.slack, ev.ofu) == (50_000, 950_000, 0, 0)


def test_an_unknown_board_has_no_peak() -> None:
    ev = evaluate(reading(0, 1), device(spec=None), POLICY)
    assert ev.unresolved == 950_000


@pytest.mark.parametrize(
    ("value", "reason", "left"),
    [
        (math.nan, "not_finite", None),
        (math.inf, "not_finite", None),
        (-math.inf, "negative", None),
        (-0.1, "negative", None),
        (1.04, "clamped", 1.0),
        (1.2, "above_one", None),
        (98.0, "above_one", None),
    ],
)
def test_a_ratio_out_of_range(value: float, reason: str, left: float | None) -> None:
    ev = evidence(WORKING, dram_active=value)
    assert ev.rejected == (reason,)
    assert ev.dram == left
    assert not ev.distrust


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e308])
def test_an_amount_out_of_range_is_not_seen(value: float) -> None:
    ev = evidence(WORKING, pcie_tx_bytes_per_second=value)
    assert ev.pcie_tx is None
    assert len(ev.rejected) == 1


@pytest.mark.parametrize(
    ("sm", "tensor", "rejected", "kept_sm", "kept_tensor"),
    [
        (0.52, 0.2, ("clamped",), 0.5, 0.2),
        (0.7, 0.2, ("order",), None, 0.2),
        (0.4, 0.42, ("clamped",), 0.4, 0.4),
        (0.4, 0.5, ("order",), 0.4, None),
        (None, 0.53, ("clamped",), None, 0.5),
    ],
)
def test_tensor_within_sm_within_engine(
    sm: float | None, tensor: float, rejected: tuple[str, ...], kept_sm: float | None, kept_tensor: float | None
) -> None:
    ev = evidence(WORKING, gr_engine_active=0.5, sm_active=sm, tensor_active=tensor)
    assert (ev.rejected, ev.sm, ev.tensor) == (rejected, kept_sm, kept_tensor)


@pytest.mark.parametrize(
    "signals",
    [
        {"gr_engine_active": 0.1, "sm_active": 0.8, "tensor_active": 0.5},
        {"gr_engine_active": 0.0, "sm_active": 0.0, "tensor_active": 0.0, "gpu_utilization": 0.9},
    ],
)
def test_a_profiler_gone_to_zero_is_not_believed(signals: dict[str, Any]) -> None:
    assert evidence(WORKING, **signals).distrust == "zero_filled"


def test_an_engine_that_is_lower_than_its_pipes_is_of_the_layout_on_an_instance() -> None:
    """DCGM shows a 3g instance beside a 1g one on an A100 at a third: no counter is at zero, no restart helps."""
    _, instance, _ = cut(3, 1)
    third = reading(0, 1, uuid=instance.uuid, gr_engine_active=0.33, sm_active=0.98, tensor_active=0.5)
    assert evaluate(third, instance, POLICY).distrust == "mig_layout"


def unobserved(*readings: Reading) -> Counter[str]:
    """The unobserved nanoseconds of a free GPU with these readings, by reason."""
    ledger = Ledger()
    advance(ledger, first([device()]))
    for each in readings:
        advance(ledger, seen(each.end / S, each))
    return ledger.gpus["GPU-0"].unobserved


@pytest.mark.parametrize(("period", "every"), [(1.0, 3), (0.1, 4), (0.5, 4)])
def test_an_idle_moment_is_idle_although_the_driver_still_says_busy(period: float, every: int) -> None:
    """Its utilization is a mean over the last second, read up to a second later."""
    lagging = RESTING | {"gpu_utilization": 0.9}
    story = [reading(n * period, (n + 1) * period, lagging if n % every else WORKING) for n in range(40)]
    assert not unobserved(*story)


def test_counters_at_zero_beside_a_busy_driver_are_unseen_once_the_driver_cannot_lag_behind() -> None:
    gone = RESTING | {"gpu_utilization": 0.9}
    story = [reading(0, 1), *(reading(n, n + 1, gone) for n in range(1, 11))]
    assert unobserved(*story) == {"zero_filled": 10 * S - UTILIZATION_LAG}
    assert unobserved(reading(0, 1), reading(1, 31, gone)) == {"zero_filled": 30 * S}


def test_zero_beside_a_driver_at_rest_is_just_zero() -> None:
    assert not evidence(RESTING).distrust


UNSEEN: dict[str, Any] = dict.fromkeys(("sm_active", "tensor_active", "dram_active", "fp32_active"))


@pytest.mark.parametrize(("busy", "distrust"), [(0.5, "zero_filled"), (0.49, "")])
def test_without_an_engine_counter_the_sms_show_whether_the_profiler_went_to_zero(busy: float, distrust: str) -> None:
    """Fails when a board without profiling counters is called zero-filled, or utilization is taken for a counter."""
    lone = {"gr_engine_active": None, "gpu_utilization": busy, "tensor_active": 0.0}
    assert evidence(WORKING | lone, sm_active=0.0).distrust == distrust
    assert not evidence(WORKING | lone, sm_active=0.001).distrust
    assert not evidence(WORKING | lone, sm_active=None).distrust
    assert not evidence(WORKING | lone | UNSEEN).distrust


@pytest.mark.parametrize("tensor", [0.0, None])
@pytest.mark.parametrize("engine", [0.1, 0.6, 1.0])
def test_a_busy_engine_without_a_single_warp_was_counted_at_another_time(engine: float, tensor: float | None) -> None:
    """Two metric groups are multiplexed on an older board: engine activity was measured, SM activity was not.

    Fails when `_check_order` accepts a nonzero SM activity, or needs more than the engine counter.
    """
    ev = evidence(WORKING, gr_engine_active=engine, sm_active=0.0, tensor_active=tensor)
    assert ev.distrust == "multiplexed"
    assert ev.wait == PPM


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gr_engine_active": 0.0999}, "a kernel of a few microseconds rounds to no SM"),
        ({"sm_active": 1 / 132 / 1000, "gr_engine_active": 1.0}, "a spin on one SM for a moment"),
        ({"sm_active": 1 / 132, "gr_engine_active": 1.0}, "a spin on one SM"),
        ({"sm_active": None}, "the SMs were not asked"),
        ({"sm_active": None, "tensor_active": None}, "neither were the tensor pipes"),
        ({"tensor_active": 0.001}, "the tensor pipes worked: a skew between counters"),
        ({"sm_active": 0.9, "gr_engine_active": 1.0, "dram_active": 0.92}, "a copy from memory to memory"),
        ({"gr_engine_active": 0.0, "pcie_rx_bytes_per_second": 2e10, "dram_active": 0.1}, "the copy engine alone"),
        ({"gr_engine_active": None, "gpu_utilization": 0.45}, "the driver's word is no counter"),
    ],
)
def test_what_is_not_multiplexed(change: dict[str, Any], why: str) -> None:
    quiet = {"gr_engine_active": 0.5, "sm_active": 0.0, "tensor_active": 0.0, "gpu_utilization": 0.4}
    assert evidence(WORKING | quiet | change).distrust == "", why


def test_how_busy_an_engine_without_a_warp_may_be_is_the_policys_word() -> None:
    row = reading(0, 1, WORKING | {"gr_engine_active": 0.5, "sm_active": 0.0, "tensor_active": 0.0})
    assert not evaluate(row, device(), Policy(multiplexed_engine=0.51)).distrust
    assert evaluate(row, device(), Policy(multiplexed_engine=0.5)).distrust == "multiplexed"


@pytest.mark.parametrize(("engine", "runs"), [(0.0099, False), (0.01, True)])
def test_a_kernel_runs_from_one_percent_of_the_engine_on(engine: float, runs: bool) -> None:
    assert evidence(RESTING, gr_engine_active=engine, gpu_utilization=engine).kernel_runs is runs


def test_no_engine_signal_at_all() -> None:
    assert evidence(WORKING, gr_engine_active=None, gpu_utilization=None).distrust == "no_engine_signal"


def test_the_drivers_word_stands_in_for_the_engine() -> None:
    ev = evidence(WORKING, gr_engine_active=None, tensor_active=None, gpu_utilization=0.6)
    assert (ev.wait, ev.unresolved) == (400_000, 600_000)
    assert ev.spin == NO_SPIN


def test_a_source_that_does_not_vouch_is_not_believed() -> None:
    assert evaluate(reading(0, 1, distrust="stale"), device(), POLICY).distrust == "stale"


def test_energy_comes_from_the_counter_or_from_the_power() -> None:
    assert evidence(WORKING, energy_joules=500.0015).energy == 500_002
    assert evidence(WORKING).energy == 600_000
    assert evidence(WORKING, power_watts=None).energy == 0


def test_flops_and_bytes_from_activity_and_peaks() -> None:
    ev = evidence(WORKING)
    assert ev.flops == pytest.approx(0.45 * 989.4e12)
    assert ev.bytes == pytest.approx(0.4 * 3350e9)


def test_a_spin() -> None:
    ev = evidence(SPINNING)
    assert (ev.spin, ev.suspect_only, ev.work) == (SPIN, False, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gr_engine_active": 0.9}, "the engine rests now and then"),
        ({"tensor_active": 0.01}, "tensor work"),
        ({"dram_active": 0.02}, "memory traffic"),
        ({"fp32_active": 0.05}, "arithmetic"),
        ({"nvlink_tx_bytes_per_second": 2e8}, "link traffic"),
        ({"pcie_rx_bytes_per_second": 5e9}, "host traffic"),
        ({"power_watts": 300.0}, "it draws what work draws"),
        ({"tensor_active": None}, "nobody saw the tensor pipes"),
    ],
)
def test_what_acquits(change: dict[str, Any], why: str) -> None:
    assert evidence(SPINNING, **change).spin == NO_SPIN, why


@pytest.mark.parametrize(
    "gone",
    ["dram_active", "nvlink_tx_bytes_per_second nvlink_rx_bytes_per_second",
     "pcie_tx_bytes_per_second pcie_rx_bytes_per_second"],
)  # fmt: skip
def test_what_is_missing_leaves_only_suspicion(gone: str) -> None:
    ev = evidence(SPINNING, **dict.fromkeys(gone.split()))
    assert (ev.spin, ev.suspect_only) == (SPIN, True)


def test_without_power_and_fp_pipes_there_is_only_suspicion() -> None:
    assert evidence(SPINNING, power_watts=None, fp32_active=None).suspect_only
    assert not evidence(SPINNING, power_watts=None).suspect_only
    assert not evidence(SPINNING, fp32_active=None).suspect_only


def test_power_is_judged_more_strictly_where_the_fp_pipes_are_not_seen() -> None:
    """Idle-with-context 110 W and a limit of 700 W: 166 W without FP pipes, 215 W with them."""
    assert evidence(SPINNING, fp32_active=None, power_watts=180.0).spin == NO_SPIN
    assert evidence(SPINNING, power_watts=180.0).spin == SPIN


def smoothed(**changes: Any) -> Evidence:
    return evaluate(reading(0, 1, SPINNING | changes), device(), POLICY, power_smoothed=True)


@pytest.mark.parametrize("watts", [0.0, 130.0, 300.0, 700.0, None])
def test_the_power_of_a_board_that_smooths_it_neither_acquits_nor_proves(watts: float | None) -> None:
    """With idle FP pipes it is a spin; without FP counters, power cannot replace them.

    Fails when `_check_spin` uses `_power_near_idle` or `_power_is_conclusive` for such a board.
    """
    assert (smoothed(power_watts=watts).spin, smoothed(power_watts=watts).suspect_only) == (SPIN, False)
    blind = smoothed(power_watts=watts, fp32_active=None)
    assert (blind.spin, blind.suspect_only) == (SPIN, True)


@pytest.mark.parametrize(
    "change",
    [{"tensor_active": 0.01}, {"dram_active": 0.02}, {"fp32_active": 0.05}, {"gr_engine_active": 0.9},
     {"nvlink_tx_bytes_per_second": 2e8}, {"pcie_rx_bytes_per_second": 5e9}],
)  # fmt: skip
def test_all_but_power_still_acquits_on_a_board_that_smooths(change: dict[str, Any]) -> None:
    assert smoothed(**change).spin == NO_SPIN


@pytest.mark.parametrize("gone", ["dram_active", "nvlink_tx_bytes_per_second nvlink_rx_bytes_per_second",
                                  "pcie_tx_bytes_per_second pcie_rx_bytes_per_second"])  # fmt: skip
def test_what_is_missing_still_leaves_only_suspicion_on_a_board_that_smooths(gone: str) -> None:
    assert smoothed(**dict.fromkeys(gone.split())).suspect_only


def test_what_the_hardware_cannot_have_is_zero_not_missing() -> None:
    lacks = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "dram_active")
    gone: dict[str, Any] = dict.fromkeys(lacks)
    ev = evaluate(reading(0, 1, SPINNING | gone), device(lacks=lacks), POLICY)
    assert (ev.spin, ev.suspect_only, ev.nvlink, ev.dram) == (SPIN, False, 0.0, 0.0)


def test_polling_of_host_memory_is_judged_by_its_evenness() -> None:
    """30 MB/s is more than a heartbeat, and far below 5 % of 64 GB/s."""
    assert evidence(SPINNING, pcie_rx_bytes_per_second=3e7).spin == SPIN_IF_FLAT
    unknown = evaluate(reading(0, 1, SPINNING | {"pcie_rx_bytes_per_second": 3e7}), device(spec=None), POLICY)
    assert unknown.spin == NO_SPIN


def test_effective_work_needs_more_than_an_engine() -> None:
    assert evidence(WORKING).work == 950_000
    assert evidence(SPINNING).work == 0
    assert evidence(WORKING, tensor_active=None, dram_active=None, fp32_active=None).work == 950_000


def test_power_cannot_be_judged_on_an_unknown_board() -> None:
    ev = evaluate(reading(0, 1, SPINNING | {"power_watts": 600.0}), device(spec=None), POLICY)
    assert ev.spin == SPIN
    assert H100.idle_context_watts
