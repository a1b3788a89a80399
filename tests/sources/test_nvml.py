"""Tests the NVML source with the real nvidia-ml-py on a stand-in `libnvidia-ml.so.1` that the test controls."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from exporter.core.model import MS, SECOND, Process, Reading, Spec
from exporter.sources.base import SourceError
from exporter.sources.nvml.source import NvmlSource, open_nvml
from tests.nvml_stub.build import LIBRARY, build
from tests.shared_library import compiler
from tests.sources.conformance import LAWS, START, Law
from tests.sources.nvml_rig import (
    LOST,
    NO_FUNCTION,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET,
    TIMEOUT,
    UNKNOWN,
    NvmlRig,
    conditions,
    kinds,
    number,
    one,
    rigged,
)

MIB = 1024 * 1024
PROFILING = {"gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active"}
NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")


@pytest.fixture(scope="session")
def library() -> Path:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in NVML")
    return build() / LIBRARY


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


@pytest.fixture
def opened(rig: NvmlRig) -> NvmlRig:
    rig.open()
    return rig


@pytest.mark.parametrize("gpm", [1, 0], ids=["gpm", "older"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_source_keeps_the_law(law: Law, gpm: int, rig: NvmlRig) -> None:
    rig.say(f"gpu * gpm {gpm}")
    rig.open()
    law(rig)


def test_the_stand_in_owns_up(opened: NvmlRig) -> None:
    assert opened.source.name == "nvml"
    assert "stand-in" in pynvml.nvmlSystemGetDriverVersion()


# -- what a board says --


def test_gpm_gives_ratios_bytes_and_directions_as_the_gpu_sees_them(opened: NvmlRig) -> None:
    opened.say("gpu 0 gr 80", "gpu 0 sm 60", "gpu 0 occ 30", "gpu 0 tensor 25", "gpu 0 dram 12.5")
    opened.say("gpu 0 fp64 1", "gpu 0 fp32 2", "gpu 0 fp16 4", "gpu 0 int 6")
    opened.say("gpu 0 pcie_tx 100", "gpu 0 pcie_rx 7", "gpu 0 nvlink_tx 9000", "gpu 0 nvlink_rx 8000")
    reading = opened.reading()
    ratios = [reading.gr_engine_active, reading.sm_active, reading.sm_occupancy, reading.tensor_active]
    ratios += [reading.dram_active, reading.fp64_active, reading.fp32_active, reading.fp16_active, reading.int_active]
    assert ratios == pytest.approx([0.8, 0.6, 0.3, 0.25, 0.125, 0.01, 0.02, 0.04, 0.06])
    assert reading.pcie_tx_bytes_per_second == pytest.approx(100 * MIB)
    assert reading.pcie_rx_bytes_per_second == pytest.approx(7 * MIB)
    assert reading.nvlink_tx_bytes_per_second == pytest.approx(9000 * MIB)
    assert reading.nvlink_rx_bytes_per_second == pytest.approx(8000 * MIB)


def test_gpm_is_the_mean_over_the_whole_interval(opened: NvmlRig) -> None:
    opened.read(0)
    for second, percent in ((1, 10), (2, 40), (3, 10)):
        opened.say(f"gpu 0 tensor {percent}")
        opened.run(START + second * SECOND)
        pynvml.nvmlSystemGetDriverVersion()  # any call lets the world run on
    assert one(opened.source.read(START + 3 * SECOND)).tensor_active == pytest.approx(0.2)


def test_boards_do_not_see_each_others_figures(opened: NvmlRig) -> None:
    opened.say("gpu 0 tensor 10", "gpu 1 tensor 20", f"gpu 2 metric 5 {NOT_SUPPORTED}")
    opened.read(0)
    batch = opened.read(1)
    assert [each.tensor_active for each in batch.readings] == [pytest.approx(0.1), pytest.approx(0.2), None]
    assert batch.faults == ()


def test_a_metric_that_the_driver_leaves_alone_is_not_the_last_boards(opened: NvmlRig) -> None:
    opened.say(f"gpu 1 metric {pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL} -1")
    opened.read(0)
    batch = opened.read(1)
    assert one(batch).tensor_active == pytest.approx(0.4)
    assert one(batch, 1).tensor_active is None
    assert kinds(batch) == [(1, "nvml_no_data")]


def test_the_gauges_are_in_base_units(opened: NvmlRig) -> None:
    opened.say("gpu 0 power_mw 612345", "gpu 0 limit_mw 650000", "gpu 0 temp 71", "gpu 0 sm_mhz 1830")
    opened.say("gpu 0 mem_total 85000000000", "gpu 0 mem_used 60000000000", "gpu 0 mem_reserved 600000000")
    opened.say("gpu 0 util 97", "gpu 0 reasons 0x24")
    reading = opened.reading()
    assert (reading.power_watts, reading.enforced_power_limit_watts) == pytest.approx((612.345, 650))
    assert (reading.temperature_celsius, reading.sm_clock_hz) == (71, 1830e6)
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (60e9, 85e9)
    assert (reading.gpu_utilization, reading.clock_event_reasons) == (0.97, 0x24)


def test_energy_is_what_the_interval_used(opened: NvmlRig) -> None:
    opened.say("gpu 0 power_mw 500000")
    opened.read(0)
    opened.read(2)
    assert one(opened.read(4)).energy_joules == pytest.approx(1000)


def test_an_energy_counter_that_was_reset_tells_nothing(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("gpu 0 energy 5")
    assert one(opened.read(2)).energy_joules is None
    opened.unsay("gpu 0 energy 5")
    assert one(opened.read(3)).energy_joules == pytest.approx(500)


def test_energy_never_covers_more_than_the_reading(opened: NvmlRig) -> None:
    fault = f"gpu 0 error nvmlDeviceGetTotalEnergyConsumption {TIMEOUT}"
    opened.reading()
    opened.say(fault)
    opened.read(2)
    opened.unsay(fault)
    assert one(opened.read(3)).energy_joules is None
    assert one(opened.read(4)).energy_joules == pytest.approx(500)


def test_a_process_whose_memory_the_driver_hides_has_none(opened: NvmlRig) -> None:
    opened.say("gpu 0 idle", "gpu 0 process 4242", "gpu 0 process 4243 1024", "gpu 1 idle")
    opened.read(0)
    batch = opened.read(1)
    assert one(batch).processes == (Process(4242), Process(4243, 1024))
    assert one(batch, 1).processes == ()


def test_the_inventory_names_model_spec_and_what_is_lacking(rig: NvmlRig) -> None:
    rig.say("gpu 1 name NVIDIA L4", "gpu 1 pci 0x27B810DE", "gpu 1 links 0")
    rig.say("gpu 2 name Some board", "gpu 2 pci 0x123410DE")
    rig.open()
    first, second, third = rig.read(0).devices
    assert (first.uuid, first.index, first.model) == (
        "GPU-5700b000-0000-0000-0000-000000000000",
        "0",
        "NVIDIA H100 80GB HBM3",
    )
    assert (first.spec and first.spec.name, first.lacks) == ("H100-SXM5-80GB", ())
    assert (second.spec and second.spec.name, second.lacks) == ("L4", NVLINK)
    assert (third.spec, third.lacks) == (None, ())


def test_the_operators_spec_wins(rig: NvmlRig) -> None:
    mine = Spec(name="mine", peak_flops=1e15)
    pynvml.nvmlInit()
    rig.source = NvmlSource(pynvml, overrides={"NVIDIA H100 80GB HBM3": mine})
    assert rig.read(0).devices[0].spec == mine


def test_a_board_without_nvlink_reads_none(rig: NvmlRig) -> None:
    rig.say("gpu * links 0")
    rig.open()
    reading = rig.reading()
    assert (reading.nvlink_tx_bytes_per_second, reading.nvlink_rx_bytes_per_second) == (None, None)
    assert rig.source.signals.isdisjoint(NVLINK)


C2C = ("c2c_tx_bytes_per_second", "c2c_rx_bytes_per_second")


def test_a_chip_to_chip_link_has_rates_where_the_board_has_one(opened: NvmlRig) -> None:
    opened.say("gpu 1 c2c 1", "gpu 1 c2c_tx 500", "gpu 1 c2c_rx 20")
    opened.read(0)
    batch = opened.read(1)
    assert [getattr(one(batch, 1), field) for field in C2C] == pytest.approx([500 * MIB, 20 * MIB])
    assert [getattr(one(batch), field) for field in C2C] == [None, None]
    assert batch.faults == ()


def test_video_engines_have_utilizations_of_their_own(opened: NvmlRig) -> None:
    opened.say("gpu 0 encoder 35", "gpu 0 decoder 70", f"gpu 1 error nvmlDeviceGetDecoderUtilization {NOT_SUPPORTED}")
    opened.read(0)
    batch = opened.read(1)
    assert (one(batch).encoder_utilization, one(batch).decoder_utilization) == (0.35, 0.7)
    assert (one(batch, 1).encoder_utilization, one(batch, 1).decoder_utilization) == (0.0, None)
    assert batch.faults == ()


# -- counters since reboot --

COUNTED = (
    "sm_active", "tensor_active", "int_active", "fp32_active", "pcie_tx_bytes_per_second", *NVLINK,
)  # fmt: skip


def _read_seconds(rig: NvmlRig, first: int, last: int) -> Reading:
    """Read once a second from `first` to `last`; return the last reading of GPU 0."""
    batches = [rig.read(second) for second in range(first, last + 1)]
    assert all(batch.faults == () for batch in batches)
    return one(batches[-1])


def _values(reading: Reading) -> list[float | None]:
    return [getattr(reading, field) for field in COUNTED]


def test_counters_since_reboot_replace_the_means_once_both_have_agreed(rig: NvmlRig) -> None:
    rig.say("gpu * cumulative 1", "gpu 0 fp32 10")
    rig.open()
    means = _values(_read_seconds(rig, 0, 12))
    rig.say("gpu 0 counted 98")  # now the two differ, by less than makes a counter doubtful
    exact = _values(_read_seconds(rig, 13, 14))
    assert means == pytest.approx([0.7, 0.4, 0.15, 0.1, 100 * MIB, 3000 * MIB, 3000 * MIB])
    assert exact == pytest.approx([0.98 * value for value in means if value is not None], rel=1e-3)


def test_counters_that_count_something_else_are_not_used(rig: NvmlRig) -> None:
    rig.say("gpu * cumulative 1", "gpu * counted 50", "gpu 0 fp32 0")
    rig.open()
    assert _values(_read_seconds(rig, 0, 14)) == pytest.approx([0.7, 0.4, 0.15, 0.0, 100 * MIB, 3000 * MIB, 3000 * MIB])


def test_each_counter_is_trusted_by_its_own_return_code(rig: NvmlRig) -> None:
    rig.say("gpu * cumulative 1", f"gpu 0 metric {pynvml.NVML_GPM_METRIC_MMA_CYCLES_ACTIVE} {UNKNOWN}")
    rig.say(
        f"gpu 0 metric {pynvml.NVML_GPM_METRIC_PCIE_TX} -1", f"gpu 0 nan {pynvml.NVML_GPM_METRIC_FP32_CYCLES_ACTIVE}"
    )
    rig.open()
    _read_seconds(rig, 0, 12)
    rig.say("gpu 0 counted 98")
    reading = _read_seconds(rig, 13, 14)
    assert (reading.tensor_active, reading.fp32_active) == pytest.approx((0.4, 0.1))
    assert reading.pcie_tx_bytes_per_second == pytest.approx(100 * MIB)
    assert reading.sm_active == pytest.approx(0.98 * 0.7, rel=1e-3)


def test_a_link_without_a_counter_counts_nothing_and_one_that_fails_later_costs_the_sum(rig: NvmlRig) -> None:
    rig.say("gpu * cumulative 1", "gpu * links 2")
    rig.open()
    _read_seconds(rig, 0, 12)
    rig.say("gpu 0 counted 98")
    assert _read_seconds(rig, 13, 14).nvlink_tx_bytes_per_second == pytest.approx(0.98 * 3000 * MIB, rel=1e-3)
    rig.say(f"gpu 0 metric {pynvml.NVML_GPM_METRIC_NVLINK_L1_TX} {UNKNOWN}")
    reading = _read_seconds(rig, 15, 15)
    assert reading.nvlink_tx_bytes_per_second == pytest.approx(3000 * MIB)
    assert reading.nvlink_rx_bytes_per_second == pytest.approx(0.98 * 3000 * MIB, rel=1e-3)


def test_counters_that_began_anew_are_compared_again_from_there(rig: NvmlRig) -> None:
    rig.say("gpu * cumulative 1")
    rig.open()
    _read_seconds(rig, 0, 12)
    rig.say("gpu 0 counted 10")  # all counters fall
    assert _values(_read_seconds(rig, 13, 13)) == pytest.approx(
        [0.7, 0.4, 0.15, 0.1, 100 * MIB, 3000 * MIB, 3000 * MIB]
    )


def test_a_driver_without_these_counters_is_asked_once(opened: NvmlRig) -> None:
    _read_seconds(opened, 0, 1)
    asked = opened.calls("nvmlGpmMetricsGet")
    _read_seconds(opened, 2, 3)
    assert opened.calls("nvmlGpmMetricsGet") == asked + 6  # three GPUs, two reads


# -- older boards --


@pytest.fixture
def older(rig: NvmlRig) -> NvmlRig:
    rig.say("gpu * gpm 0", "gpu * name NVIDIA A100-SXM4-80GB", "gpu * pci 0x20B210DE", "gpu * links 12")
    rig.open()
    return rig


def test_an_older_board_has_no_profiling_figures(older: NvmlRig) -> None:
    reading = older.reading()
    assert all(getattr(reading, field) is None for field in PROFILING)
    assert PROFILING.isdisjoint(older.source.signals)
    assert {"gpu_utilization", "power_watts", "energy_joules", *NVLINK} <= older.source.signals
    assert older.calls("nvmlGpmSampleGet") == 0


def test_an_older_boards_utilisation_is_the_mean_of_the_drivers_samples(older: NvmlRig) -> None:
    older.read(0)
    for second, percent in ((1, 100), (2, 0), (3, 0), (4, 0)):
        older.say(f"gpu 0 util {percent}")
        older.run(START + second * SECOND)
        pynvml.nvmlSystemGetDriverVersion()  # any call lets the world run on
    assert one(older.source.read(START + 4 * SECOND)).gpu_utilization == pytest.approx(0.25)


@pytest.mark.parametrize("code", [NOT_FOUND, NOT_SUPPORTED])
def test_without_samples_an_older_board_gives_the_drivers_last_figure(older: NvmlRig, code: int) -> None:
    older.say("gpu 0 util 63", f"gpu 0 error nvmlDeviceGetSamples {code}")
    assert older.reading().gpu_utilization == 0.63


def test_samples_that_come_late_are_not_lost(older: NvmlRig) -> None:
    silent = f"gpu 0 error nvmlDeviceGetSamples {NOT_FOUND}"
    older.reading()
    older.say(silent)
    older.read(2)
    older.unsay(silent)
    older.say("gpu 0 util 25")
    assert one(older.read(3)).gpu_utilization == pytest.approx((0.95 + 0.25) / 2)


def test_an_older_boards_nvlink_rates_come_from_counters_over_all_links(older: NvmlRig) -> None:
    older.say("gpu 0 nvlink_tx 1200", "gpu 0 nvlink_rx 600")
    older.read(0)
    reading = one(older.read(2))
    assert reading.nvlink_tx_bytes_per_second == pytest.approx(1200 * MIB)
    assert reading.nvlink_rx_bytes_per_second == pytest.approx(600 * MIB)


def test_nvlink_counters_that_were_reset_tell_nothing(older: NvmlRig) -> None:
    older.reading()
    older.say("gpu 0 nvlink_mib 0")
    reset = one(older.read(2))
    assert [getattr(reset, field) for field in NVLINK] == [None, None]
    older.unsay("gpu 0 nvlink_mib 0")
    assert one(older.read(3)).nvlink_tx_bytes_per_second == pytest.approx(3000 * MIB)


def test_an_nvlink_rate_never_covers_more_than_the_reading(older: NvmlRig) -> None:
    fault = f"gpu 0 error nvmlDeviceGetFieldValues {TIMEOUT}"
    older.reading()
    older.say(fault)
    older.read(2)
    older.unsay(fault)
    assert one(older.read(3)).nvlink_tx_bytes_per_second is None
    assert one(older.read(4)).nvlink_tx_bytes_per_second == pytest.approx(3000 * MIB)


def test_an_older_board_without_nvlink_reads_none(rig: NvmlRig) -> None:
    rig.say("gpu * gpm 0", "gpu * links 0")
    rig.open()
    reading = rig.reading()
    assert [getattr(reading, field) for field in NVLINK] == [None, None]
    assert rig.read(2).faults == ()


def test_a_driver_without_gpm_makes_every_board_an_older_one(rig: NvmlRig) -> None:
    rig.say(f"error nvmlGpmQueryDeviceSupport {NO_FUNCTION}")
    rig.open()
    assert PROFILING.isdisjoint(rig.source.signals)
    assert rig.reading().gpu_utilization == pytest.approx(0.95)
    assert rig.calls("nvmlGpmSampleGet") == 0


def test_what_could_not_be_learnt_is_not_held_against_a_board(rig: NvmlRig) -> None:
    rig.say(f"error nvmlGpmQueryDeviceSupport {UNKNOWN}", f"error nvmlDeviceGetNvLinkState {UNKNOWN}")
    rig.open()
    assert rig.read(0).devices[0].lacks == ()
    assert one(rig.read(1)).tensor_active == pytest.approx(0.4)


def test_an_older_driver_is_asked_in_its_own_words(opened: NvmlRig) -> None:
    opened.say(f"error nvmlDeviceGetCurrentClocksEventReasons {NO_FUNCTION}", "gpu 0 reasons 0x8")
    opened.say(f"error nvmlDeviceGetMemoryInfo_v2 {NO_FUNCTION}", "gpu 0 mem_used 70", "gpu 0 mem_reserved 30")
    reading = opened.reading()
    assert reading.clock_event_reasons == 8
    assert reading.memory_used_bytes == 100  # the older call cannot tell the reserve apart


# -- errors --


def test_what_is_not_supported_is_none_no_fault_and_not_asked_again_until_resync(opened: NvmlRig) -> None:
    call = "nvmlDeviceGetEnforcedPowerLimit"
    opened.say(f"error {call} {NOT_SUPPORTED}")
    assert opened.reading().enforced_power_limit_watts is None
    assert opened.read(2).faults == ()
    assert opened.calls(call) == 3  # once a GPU
    assert "enforced_power_limit_watts" not in opened.source.signals
    opened.unsay(f"error {call} {NOT_SUPPORTED}")
    opened.source.resync()
    assert opened.reading(after=3).enforced_power_limit_watts == 700


def test_any_other_error_costs_that_signal_a_fault_and_is_asked_again(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say(f"gpu 1 error nvmlDeviceGetTemperature {UNKNOWN}")
    batch = opened.read(1)
    assert kinds(batch) == [(1, "nvml_unknown")]
    assert "temperature" in batch.faults[0].message
    assert one(batch, 1).temperature_celsius is None
    assert one(batch, 1).power_watts == 500
    opened.unsay(f"gpu 1 error nvmlDeviceGetTemperature {UNKNOWN}")
    assert one(opened.read(2), 1).temperature_celsius == 60


def test_a_gpm_metric_that_fails_is_none_and_told(opened: NvmlRig) -> None:
    opened.say(f"gpu 0 metric {pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL} {UNKNOWN}")
    opened.read(0)
    batch = opened.read(1)
    assert one(batch).dram_active is None
    assert one(batch).sm_active is not None
    assert kinds(batch) == [(0, "nvml_unknown")]
    assert "dram_active" in batch.faults[0].message


def test_a_gpm_metric_that_is_no_number_is_none(opened: NvmlRig) -> None:
    opened.say(f"gpu 0 nan {pynvml.NVML_GPM_METRIC_SM_UTIL}")
    reading = opened.reading()
    assert reading.sm_active is None
    assert reading.gr_engine_active is not None


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_gpm_denied_is_a_fault_and_no_figure(opened: NvmlRig, call: str) -> None:
    opened.say(f"gpu 0 error {call} {NO_PERMISSION}")
    opened.read(0)
    batch = opened.read(1)
    assert (0, "nvml_no_permission") in kinds(batch)
    assert one(batch).gr_engine_active is None
    assert one(batch).power_watts == 500


def test_a_gpm_sample_that_was_missed_shortens_no_reading(opened: NvmlRig) -> None:
    opened.reading()
    opened.say(f"gpu 0 error nvmlGpmSampleGet {TIMEOUT}", "gpu 0 tensor 100")
    opened.read(2)
    opened.unsay(f"gpu 0 error nvmlGpmSampleGet {TIMEOUT}", "gpu 0 tensor 100")
    assert one(opened.read(3)).tensor_active is None
    assert one(opened.read(4)).tensor_active == pytest.approx(0.4)


def test_a_read_too_soon_for_gpm_leaves_its_time_to_the_next_one(opened: NvmlRig) -> None:
    opened.read(0)
    early = opened.read(0.05)
    assert (early.readings, early.faults, early.settled) == ((), (), START)
    assert {(each.start, each.end) for each in opened.read(0.149).readings} == {(START, START + 149 * MS)}
    late = opened.read(0.248)
    assert (late.readings, late.settled) == ((), START + 149 * MS)
    batch = opened.read(0.249)
    assert {(each.start, each.end) for each in batch.readings} == {(START + 149 * MS, START + 249 * MS)}
    assert batch.settled == START + 249 * MS


def test_a_board_without_gpm_is_read_as_often_as_asked(rig: NvmlRig) -> None:
    rig.say("gpu 1 gpm 0")
    rig.open()
    rig.read(0)
    batch = rig.read(0.05)
    assert [(number(each.uuid), each.end) for each in batch.readings] == [(1, START + 50 * MS)]
    assert batch.settled == START, "the others' time is not over"


# -- GPUs in trouble --


def test_a_lost_gpu_stays_in_the_inventory_and_leaves_the_others_alone(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("gpu 1 lost")
    for second in (2, 3):
        batch = opened.read(second)
        assert conditions(batch) == ["", "lost", ""]
        assert kinds(batch) == [(1, "gpu_lost")]
        assert [number(each.uuid) for each in batch.readings] == [0, 2]


@pytest.mark.parametrize(("code", "condition"), [(LOST, "lost"), (RESET, "reset_required")])
def test_a_gpu_lost_in_the_middle_of_a_read_gives_no_half_reading(opened: NvmlRig, code: int, condition: str) -> None:
    opened.reading()
    opened.say(f"gpu 0 error nvmlDeviceGetClockInfo {code}")
    for second in (2, 3):
        batch = opened.read(second)
        assert conditions(batch) == [condition, "", ""]
        assert kinds(batch) == [(0, f"gpu_{condition}")]
        assert [number(each.uuid) for each in batch.readings] == [1, 2]


def test_a_gpu_off_the_bus_may_answer_unknown_when_its_handle_is_asked(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("gpu 2 lost")
    opened.read(2)
    opened.unsay("gpu 2 lost")
    opened.say(f"gpu 2 error nvmlDeviceGetHandleByIndex_v2 {UNKNOWN}")
    batch = opened.read(3)
    assert conditions(batch) == ["", "", "lost"]
    assert kinds(batch) == [(2, "gpu_lost")]


def test_a_gpu_that_leaves_the_list_is_missing_and_may_come_back(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("count 2")
    batch = opened.read(2)
    assert conditions(batch) == ["", "", "missing"]
    assert kinds(batch) == [(2, "gpu_missing")]
    assert len(batch.readings) == 2
    opened.unsay("count 2")
    back = opened.read(3)
    assert (conditions(back), len(back.readings)) == (["", "", ""], 2)
    assert one(opened.read(4), 2).start == START + 3 * SECOND


def test_a_gpu_dead_from_the_start_is_in_the_inventory_without_a_name(rig: NvmlRig) -> None:
    rig.say("gpu 1 lost")
    rig.open()
    batch = rig.read(0)
    assert [(each.uuid, each.condition) for each in batch.devices if each.condition] == [("unknown-1", "lost")]
    rig.unsay("gpu 1 lost")
    assert sorted(number(each.uuid) for each in rig.read(1).devices) == [0, 1, 2]
    assert len(rig.read(2).readings) == 3


def test_a_gpu_lost_while_it_is_met_is_met_later(rig: NvmlRig) -> None:
    rig.say(f"gpu 1 error nvmlDeviceGetPciInfo_v3 {LOST}")
    rig.open()
    assert conditions(rig.read(0)) == ["", "lost", ""]
    rig.unsay(f"gpu 1 error nvmlDeviceGetPciInfo_v3 {LOST}")
    assert sorted(number(each.uuid) for each in rig.read(1).devices) == [0, 1, 2]


def test_a_gpu_this_process_may_not_see_is_left_out_and_told(rig: NvmlRig) -> None:
    rig.say(f"gpu 1 error nvmlDeviceGetHandleByIndex_v2 {NO_PERMISSION}")
    rig.open()
    for second in (0, 1):
        batch = rig.read(second)
        assert [number(each.uuid) for each in batch.devices] == [0, 2]
        assert [fault.kind for fault in batch.faults] == ["nvml_no_permission"]
    rig.unsay(f"gpu 1 error nvmlDeviceGetHandleByIndex_v2 {NO_PERMISSION}")
    batch = rig.read(2)
    assert [number(each.uuid) for each in batch.devices] == [0, 2, 1]
    assert batch.faults == ()
    asked = rig.calls("nvmlDeviceGetHandleByIndex_v2")
    rig.read(3)
    assert rig.calls("nvmlDeviceGetHandleByIndex_v2") == asked


# -- the driver and the library --


def test_a_driver_that_goes_away_is_an_error_that_says_so_until_nvml_is_opened_anew(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("driver gone")
    with pytest.raises(SourceError, match=r"^NVML: .*unloaded or updated.*reopened"):
        opened.read(2)
    opened.source.close()
    with pytest.raises(SourceError, match="kernel driver is not loaded"):
        opened.open()
    opened.unsay("driver gone")
    opened.open()
    assert len(opened.read(4).devices) == 3


def test_a_driver_that_goes_away_in_the_middle_of_a_read_is_the_same_error(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("gpu 1 error nvmlDeviceGetPowerUsage 1")
    with pytest.raises(SourceError, match="NVML: read the GPUs"):
        opened.read(2)


def test_a_node_without_gpus_cannot_be_read(rig: NvmlRig) -> None:
    rig.say("count 0")
    rig.run(START)
    with pytest.raises(SourceError, match="lists no GPU"):
        open_nvml(None)


def test_a_closed_source_says_so(opened: NvmlRig) -> None:
    opened.source.close()
    with pytest.raises(SourceError, match="closed"):
        opened.read(0)


def test_samples_are_freed_when_a_gpu_was_lost_with_them(opened: NvmlRig) -> None:
    opened.reading()
    assert opened.library.nvmlStubLiveSamples() == 6
    opened.say("gpu 1 lost")
    opened.read(2)
    opened.source.close()
    assert opened.library.nvmlStubLiveSamples() == 0


def test_a_machine_without_the_driver_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"not a library")  # found first, so a driver on this machine does not matter
    code = "from exporter.sources.nvml.source import open_nvml; open_nvml(None)"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SourceError: NVML: libnvidia-ml.so.1 not found: is the NVIDIA driver installed" in done.stderr


_LIVE = """
import json, time
from exporter.sources.nvml.source import open_nvml
source = open_nvml(None)
source.read(0)
time.sleep(0.3)
batch = source.read(300_000_000)
source.close()
print(json.dumps([[device.model for device in batch.devices], [r.gr_engine_active for r in batch.readings]]))
"""


def test_any_program_meets_the_stand_in_by_its_library_path_with_eight_busy_gpus(library: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    environment.pop("NVML_STUB_SCRIPT", None)
    done = subprocess.run([sys.executable, "-c", _LIVE], env=environment, capture_output=True, text=True, check=True)
    models, busy = json.loads(done.stdout)
    assert models == ["NVIDIA H100 80GB HBM3"] * 8
    assert len(busy) == 8
    assert all(0 <= each <= 1.05 for each in busy)
    assert sum(busy) > 1


# -- the stand-in is as strict as the library it stands for --


@pytest.mark.usefixtures("opened")
def test_the_stand_in_refuses_a_wrong_version() -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError) as wrong:
        pynvml.nvmlDeviceGetMemoryInfo(handle, version=0x03000028)
    assert wrong.value.value == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    request: Any = pynvml.c_nvmlGpmMetricsGet_t()
    with pytest.raises(pynvml.NVMLError) as wrong:
        pynvml.nvmlGpmMetricsGet(request)
    assert wrong.value.value == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_the_stand_in_sees_a_sample_freed_twice_and_one_used_after(opened: NvmlRig) -> None:
    sample = pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleFree(sample)
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlGpmSampleGet(pynvml.nvmlDeviceGetHandleByIndex(0), sample)
    assert opened.library.nvmlStubBadFrees() == 0


def test_the_stand_in_refuses_a_handle_from_before_a_reset_and_one_of_an_instance_that_went(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 1g.10gb:7")
    opened.run(START)
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, 0)
    assert pynvml.nvmlDeviceGetName(instance) == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    for call in (pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetUtilizationRates):
        with pytest.raises(pynvml.NVMLError_NotSupported):
            call(instance)
    opened.unsay("gpu 0 mig 1g.10gb:7")
    opened.run(START + SECOND)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetName(instance)
    opened.say("gpu 0 reset")
    opened.run(START + 2 * SECOND)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetName(board)


def test_the_stand_in_lets_no_pair_of_samples_span_a_reset_or_two_instances(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 1g.10gb:7 1g.10gb:8")
    opened.run(START)
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    for sample, instance in zip(samples, (7, 8), strict=True):
        pynvml.nvmlGpmMigSampleGet(board, instance, sample)
    request: Any = pynvml.c_nvmlGpmMetricsGet_t()
    request.version, request.sample1, request.sample2 = pynvml.NVML_GPM_METRICS_GET_VERSION, *samples
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpmMetricsGet(request)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlGpmMigSampleGet(board, 3, samples[0])
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)


def test_the_stand_in_tells_what_happened_after_registering_and_counts_event_sets(opened: NvmlRig) -> None:
    board, events = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.nvmlEventSetCreate()
    opened.say("gpu 0 xid 31")
    opened.run(START)
    pynvml.nvmlDeviceRegisterEvents(board, pynvml.nvmlEventTypeXidCriticalError, events)
    opened.say("gpu 0 xid 48")
    opened.run(START + SECOND)
    assert pynvml.nvmlEventSetWait_v2(events, 0).eventData == 48
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 0)
    assert opened.held()[1] == 2
    pynvml.nvmlEventSetFree(events)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlEventSetWait_v2(events, 0)
