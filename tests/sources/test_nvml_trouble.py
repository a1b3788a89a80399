"""Tests the NVML source with resets, reopening, pauses and in a virtual machine."""

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from exporter.config import BoardSettings, Config
from exporter.core.model import PPM, SECOND, Spec
from exporter.sources.base import SourceError
from exporter.sources.nvml.source import NvmlSource, open_nvml
from tests.sources.conformance import START
from tests.sources.nvml_rig import (
    INVALID,
    TIMEOUT,
    UNKNOWN,
    NvmlRig,
    conditions,
    device,
    health_of,
    kinds,
    one,
    read_of,
    reading_of,
    rigged,
)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


@pytest.fixture
def opened(rig: NvmlRig) -> NvmlRig:
    rig.open()
    return rig


# -- a GPU that is reset --


def test_a_gpu_that_was_reset_is_met_again_under_its_new_handle(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("gpu 1 reset")
    batch = opened.read(2)
    assert kinds(batch) == [(1, "handle_stale")]
    assert (conditions(batch), read_of(batch)) == (["", "", ""], ["0", "2"])
    batch = opened.read(3)
    assert (kinds(batch), read_of(batch)) == ([], ["0", "2"])
    batch = opened.read(4)
    assert one(batch, 1).start == START + 3 * SECOND
    assert one(batch, 1).energy_joules == pytest.approx(500)
    assert one(batch, 1).tensor_active == pytest.approx(0.4)


def test_a_gpu_can_be_reset_again_and_again(opened: NvmlRig) -> None:
    opened.read(0)
    for times in range(1, 5):
        opened.say(f"gpu 1 reset {times}")
        for second in (0, 1, 2):
            batch = opened.read(times * 10 + second)
        assert one(batch, 1).start == START + (times * 10 + 1) * SECOND
    assert opened.held()[:2] == (6, 1)


def test_a_reset_found_while_another_gpu_is_looked_for_begins_anew_as_well(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 2 lost")
    opened.read(1)
    opened.say("gpu 1 reset")
    batch = opened.read(2)
    assert (kinds(batch), read_of(batch)) == ([(2, "gpu_lost")], ["0"])
    batch = opened.read(3)
    assert one(batch, 1).start == START + 2 * SECOND


def test_after_a_reset_critical_errors_are_told_of_the_new_handle(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 1 reset")
    opened.read(1)
    opened.read(2)
    opened.say("gpu 1 xid 48")
    assert health_of(opened.read(3), 1).xids == (48,)


def test_a_reset_of_a_board_in_mig_mode_is_no_reset_of_its_layout(rig: NvmlRig) -> None:
    rig.say("gpu 1 mig 3g.40gb 1g.10gb")
    rig.open()
    rig.read(0)
    rig.say("gpu 1 reset")
    assert kinds(rig.read(1)) == [(1, "handle_stale")]
    rig.read(2)
    batch = rig.read(3)
    assert read_of(batch) == ["0", "1", "1:1", "1:2", "2"]
    assert reading_of(batch, "1:1").start == START + 2 * SECOND
    assert batch.faults == ()


def test_an_argument_that_the_driver_refuses_by_a_good_handle_costs_one_signal(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say(f"gpu 1 error nvmlDeviceGetTemperature {INVALID}")
    assert kinds(opened.read(1)) == [(1, "handle_stale")]
    assert kinds(opened.read(2)) == [(1, "nvml_invalid_argument")]
    batch = opened.read(3)
    assert kinds(batch) == [(1, "nvml_invalid_argument")]
    assert (one(batch, 1).temperature_celsius, one(batch, 1).power_watts) == (None, 500)
    opened.say("gpu 1 reset")  # and yet a reset is found out
    opened.read(4)
    opened.unsay(f"gpu 1 error nvmlDeviceGetTemperature {INVALID}")
    opened.read(5)
    assert one(opened.read(6), 1).start == START + 5 * SECOND


def test_a_gpu_that_says_nothing_at_all_is_asked_for_its_handle(opened: NvmlRig) -> None:
    calls = [
        "nvmlGpmSampleGet", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMigMode", "nvmlDeviceGetEncoderUtilization",
        "nvmlDeviceGetDecoderUtilization",
    ]  # fmt: skip
    opened.read(0)
    silence = [f"gpu 1 error {call} {TIMEOUT}" for call in calls]
    opened.say(*silence)
    asked = opened.calls("nvmlDeviceGetHandleByIndex_v2")
    for second in (1, 2):
        assert read_of(opened.read(second)) == ["0", "2"]
    assert opened.calls("nvmlDeviceGetHandleByIndex_v2") == asked + 3
    opened.unsay(*silence)
    opened.read(3)
    assert one(opened.read(4), 1).start == START + 3 * SECOND


# -- NVML opened anew --


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another user of NVML"])
def test_a_source_opened_anew_leaves_nothing_of_the_last(rig: NvmlRig, others: int) -> None:
    rig.say("gpu 1 mig 3g.40gb")
    rig.run(START)
    for _ in range(others):
        pynvml.nvmlInit()
    for again in range(5):
        rig.open()
        rig.read(again * 10)
        assert len(rig.read(again * 10 + 1).readings) == 4
        rig.source.close()
        assert rig.held() == (0, 0, others, 0)
    for _ in range(others):
        pynvml.nvmlShutdown()


def test_a_driver_reloaded_under_a_source_is_met_again_by_a_new_one(opened: NvmlRig) -> None:
    opened.reading()
    opened.say("driver gone")
    with pytest.raises(SourceError, match="reopened"):
        opened.read(2)
    opened.source.close()
    opened.unsay("driver gone")
    opened.say("gpu * reset")
    opened.open()
    opened.read(3)
    batch = opened.read(4)
    assert (read_of(batch), batch.faults) == (["0", "1", "2"], ())


def test_a_source_that_cannot_begin_leaves_nothing(rig: NvmlRig) -> None:
    rig.say("count 0")
    rig.run(START)
    with pytest.raises(SourceError, match="lists no GPU"):
        open_nvml(None)
    assert rig.held() == (0, 0, 0, 0)


# -- a pause --


def test_a_pause_gives_the_counters_back_and_the_next_read_takes_them_again(rig: NvmlRig) -> None:
    rig.say("gpu 1 mig 3g.40gb 1g.10gb")
    rig.open()
    rig.read(0)
    assert rig.held()[0] == 2 * 4
    rig.source.pause()
    assert rig.held()[0] == 0
    rig.source.pause()
    batch = rig.read(60)
    assert (batch.readings, batch.faults) == ((), ())
    assert [each.index for each in batch.devices] == ["0", "1", "1:1", "1:2", "2"]
    assert rig.held()[0] == 2 * 4
    assert {reading.start for reading in rig.read(61).readings} == {START + 60 * SECOND}


def test_critical_errors_during_a_pause_are_told_after_it(opened: NvmlRig) -> None:
    opened.read(0)
    opened.source.pause()
    opened.say("gpu 2 xid 48")
    assert health_of(opened.read(60), 2).xids == (48,)


# -- a virtual machine --


@pytest.fixture
def guest(rig: NvmlRig) -> NvmlRig:
    rig.say("gpu * vgpu", "gpu * name NVIDIA H100-20C")
    rig.open()
    return rig


def test_a_guest_reads_what_there_is_and_nothing_else(guest: NvmlRig) -> None:
    first = guest.read(0)
    assert [fault.kind for fault in first.faults] == ["unknown_model"] * 3
    reading = one(guest.read(1))
    assert (reading.gpu_utilization, reading.sm_clock_hz) == (0.95, 1755e6)
    assert reading.memory_used_bytes == 40e9
    assert reading.processes
    assert (reading.power_watts, reading.energy_joules, reading.temperature_celsius) == (None, None, None)
    assert (reading.gr_engine_active, reading.clock_event_reasons) == (None, None)
    assert (guest.read(2).faults, guest.read(3).health) == ((), ())
    assert guest.source.signals == {
        "gpu_utilization", "memory_used_bytes", "memory_total_bytes", "processes", "sm_clock_hz",
        "encoder_utilization", "decoder_utilization",
    }  # fmt: skip


def test_a_guest_is_asked_once_for_what_it_does_not_have(guest: NvmlRig) -> None:
    for second in range(25):
        guest.read(second)
    for call in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMigMode", "nvmlDeviceGetSamples"):
        assert guest.calls(call) == 3
    assert guest.calls("nvmlDeviceGetFieldValues") == 2 * 3  # for links and for health
    assert guest.held()[1] == 0
    assert guest.calls("nvmlEventSetWait_v2") == 0


def test_a_part_of_a_board_has_not_the_peaks_of_the_whole(rig: NvmlRig) -> None:
    rig.say("gpu 0 vgpu", f"gpu 1 error nvmlDeviceGetVirtualizationMode {UNKNOWN}")
    rig.open()
    first, second, _ = rig.read(0).devices
    assert first.spec is None  # though its name and PCI id are those of a board
    assert (second.spec, second.weight) == (rig.read(1).devices[2].spec, PPM)


def test_a_guests_peaks_may_be_configured(rig: NvmlRig) -> None:
    rig.say("gpu 0 vgpu", "gpu 0 name NVIDIA H100-20C")
    rig.run(START)
    config = Config(specs={"NVIDIA H100-20C": BoardSettings(peak_flops=2e14)})
    rig.source = open_nvml(config)
    batch = rig.read(0)
    assert device(batch, "0").spec == Spec(name="NVIDIA H100-20C", peak_flops=2e14)
    assert batch.faults == ()


def test_a_board_that_nobody_knows_is_told_once(rig: NvmlRig) -> None:
    rig.say("gpu 0 name Some board", "gpu 0 pci 0x123410DE")
    rig.open()
    assert [fault.kind for fault in rig.read(0).faults] == ["unknown_model"]
    rig.say("gpu 0 lost")
    rig.read(1)
    rig.unsay("gpu 0 lost")
    assert rig.read(2).faults == ()


def test_an_unopened_source_takes_the_overrides_it_is_given(rig: NvmlRig) -> None:
    rig.run(START)
    pynvml.nvmlInit()
    rig.source = NvmlSource(pynvml)
    assert rig.read(0).devices[0].spec is not None
