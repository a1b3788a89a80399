"""Tests the NVML source on boards in MIG mode: instances, the unpartitioned part, and layout changes."""

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from exporter.core.ledger import Ledger
from exporter.core.model import PPM, SECOND, Observation, Process, Spec
from exporter.core.pipeline import advance
from exporter.sources.base import ReadResult
from exporter.sources.nvml.source import NvmlSource
from exporter.specs import find_spec
from tests.sources.conformance import LAWS, START, Law
from tests.sources.nvml_rig import (
    LOST,
    NO_FUNCTION,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    NvmlRig,
    conditions,
    device,
    kinds,
    read_of,
    reading_of,
    rigged,
)

CUT = "gpu 1 mig 3g.40gb:2 2g.20gb:3 1g.10gb:7"
BOARD = "GPU-5700b000-0000-0000-0000-000000000001"
ALL = ["0", "1", "1:2", "1:3", "1:7", "2"]
NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
COMPUTE = {"gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active"}
A100 = ("gpu * name NVIDIA A100-SXM4-40GB", "gpu * pci 0x20B010DE", "gpu * gpm 0")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


@pytest.fixture
def cut(rig: NvmlRig) -> NvmlRig:
    """Three H100s, the second partitioned into 3g, 2g and 1g: six slices of seven."""
    rig.say(CUT)
    rig.open()
    return rig


def again(rig: NvmlRig, *lines: str) -> None:
    """Partition the second board again, without its former lines."""
    rig.unsay(CUT)
    rig.say(*lines)


@pytest.mark.parametrize("world", [(), A100], ids=["gpm", "older"])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_source_keeps_the_law_on_a_node_in_mig_mode(law: Law, world: tuple[str, ...], rig: NvmlRig) -> None:
    sizes = ("3g.20gb", "2g.10gb", "1g.5gb") if world else ("3g.40gb", "2g.20gb", "1g.10gb")
    rig.say(*world, f"gpu 1 mig {sizes[0]} {sizes[1]}", f"gpu 2 mig {sizes[2]} {sizes[2]}")
    rig.hides = ("sm_clock_hz", "nvmlDeviceGetClockInfo")
    rig.open()
    law(rig)


# -- the inventory --


def test_every_instance_is_a_device_beside_what_is_left(cut: NvmlRig) -> None:
    batch = cut.read(0)
    assert [each.index for each in batch.devices] == ALL
    first = device(batch, "1:2")
    assert (first.uuid, first.parent, first.profile) == ("MIG-5700b000-0002-0000-0000-000000000001", BOARD, "3g.40gb")
    assert (first.model, first.condition, first.stranded) == ("NVIDIA H100 80GB HBM3", "", False)
    assert first.lacks == NVLINK
    assert [device(batch, index).profile for index in ("1", "1:3", "1:7")] == ["", "2g.20gb", "1g.10gb"]
    assert (device(batch, "1").uuid, device(batch, "1").parent) == (BOARD, "")
    assert device(batch, "0").weight == PPM


def test_weights_are_compute_slices_and_make_one_gpu_together(cut: NvmlRig) -> None:
    batch = cut.read(0)
    weights = [device(batch, index).weight for index in ("1:2", "1:3", "1:7", "1")]
    assert sum(weights) == PPM
    assert weights == pytest.approx([3 / 7 * PPM, 2 / 7 * PPM, 1 / 7 * PPM, 1 / 7 * PPM], abs=1)


def test_instances_that_fill_the_board_leave_nothing(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig" + " 1g.10gb" * 7)
    rig.open()
    batch = rig.read(0)
    assert device(batch, "0").weight == 0
    assert sum(each.weight for each in batch.devices if each.parent) == PPM
    assert not device(batch, "0").stranded


def test_an_a30_has_four_slices(rig: NvmlRig) -> None:
    rig.say("gpu 0 name NVIDIA A30", "gpu 0 pci 0x20B710DE", "gpu 0 gpm 0", "gpu 0 mig 2g.12gb 1g.6gb")
    rig.open()
    batch = rig.read(0)
    assert [device(batch, index).weight for index in ("0:1", "0:2", "0")] == [500_000, 250_000, 250_000]


def test_an_instances_peaks_are_by_its_own_multiprocessors_and_memory(cut: NvmlRig) -> None:
    whole = find_spec("NVIDIA H100 80GB HBM3")
    again(cut, "gpu 1 mig 3g.40gb:2 1g.20gb:3")
    batch = cut.read(0)
    assert whole is not None
    for index, multiprocessors, megabytes in (("1:2", 60, 40448), ("1:3", 26, 20096)):
        spec = device(batch, index).spec
        assert spec is not None
        assert spec.name == whole.name
        assert spec.peak_flops == pytest.approx((whole.peak_flops or 0) * multiprocessors / 132)
        bandwidth = (whole.memory_bandwidth_bytes_per_second or 0) * megabytes / 81152
        assert spec.memory_bandwidth_bytes_per_second == pytest.approx(bandwidth)
    assert device(batch, "1").spec == whole


@pytest.mark.parametrize(
    ("said", "of"), [((), 108), ((f"error nvmlDeviceGetNumGpuCores {NOT_SUPPORTED}",), 98)], ids=["cores", "profile"]
)
def test_an_a100s_largest_profile_is_not_all_of_it(rig: NvmlRig, said: tuple[str, ...], of: int) -> None:
    rig.say(*A100, "gpu 0 mig 1g.5gb", *said)
    rig.open()
    spec = device(rig.read(0), "0:1").spec
    assert spec is not None
    assert spec.peak_flops == pytest.approx(312e12 * 14 / of)


def test_a_board_without_a_spec_has_instances_without_one(rig: NvmlRig) -> None:
    rig.say("gpu 0 name Some board", "gpu 0 pci 0x123410DE", "gpu 0 mig 1g.10gb")
    rig.open()
    assert device(rig.read(0), "0:1").spec is None


def test_the_operators_spec_for_an_instance_wins(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 1g.10gb 2g.20gb")
    rig.run(START)
    mine = Spec(name="mine", peak_flops=1e14)
    pynvml.nvmlInit()
    rig.source = NvmlSource(pynvml, overrides={"NVIDIA H100 80GB HBM3 MIG 1g.10gb": mine})
    batch = rig.read(0)
    assert device(batch, "0:1").spec == mine
    assert device(batch, "0:2").spec != mine


def test_compute_instances_of_one_gpu_instance_are_one_device(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 3g.40gb:2/3 1g.10gb:7", "gpu 0 gi 2 idle", "gpu 0 gi 2 mem_used 777")
    rig.say("gpu 0 gi 2 process 1 10 0", "gpu 0 gi 2 process 2 20 2")
    rig.open()
    rig.read(0)
    batch = rig.read(1)
    joint = device(batch, "0:2")
    assert joint.uuid == "GPU-5700b000-0000-0000-0000-000000000000/2"
    assert (joint.profile, joint.weight) == ("3g.40gb", 3 * PPM // 7)
    assert joint.spec
    assert joint.spec.peak_flops == pytest.approx((device(batch, "0").spec or joint.spec).peak_flops or 0, rel=0.6)
    assert reading_of(batch, "0:2").processes == (Process(1, 10), Process(2, 20))
    assert reading_of(batch, "0:2").memory_used_bytes == 777


def test_a_gpu_instance_of_which_all_compute_instances_are_smaller_counts_whole(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 3g.40gb:2/2")
    rig.open()
    board, joint = (device(rig.read(0), index).spec for index in ("0", "0:2"))
    assert board
    assert joint
    assert (joint.peak_flops or 0) / (board.peak_flops or 1) == pytest.approx(60 / 132)


def test_a_gpu_instance_without_a_compute_instance_is_left_over_but_not_stranded(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 7g.80gb:1/0")
    rig.open()
    batch = rig.read(0)
    assert [(each.index, each.weight, each.stranded) for each in batch.devices][:1] == [("0", PPM, False)]


def test_slices_that_no_profile_can_reach_are_stranded(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 3g.40gb 3g.40gb", "gpu 1 mig 4g.40gb 2g.20gb", "gpu 2 mig on")
    rig.open()
    batch = rig.read(0)
    stranded = {each.index: each.stranded for each in batch.devices if not each.parent}
    assert stranded == {"0": True, "1": False, "2": False}


def test_nothing_is_called_stranded_where_the_capacity_is_refused(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 3g.40gb 3g.40gb", f"error nvmlDeviceGetGpuInstanceRemainingCapacity {NO_PERMISSION}")
    rig.open()
    batch = rig.read(0)
    assert not device(batch, "0").stranded
    assert batch.faults == ()


def test_an_older_driver_names_no_profile_and_is_understood_by_size(rig: NvmlRig) -> None:
    rig.say(f"error nvmlDeviceGetGpuInstanceProfileInfoV {NO_FUNCTION}", "gpu 0 mig 3g.40gb:1/3")
    rig.open()
    found = device(rig.read(0), "0:1")
    assert (found.profile, found.weight) == ("3g.40gb", 3 * PPM // 7)
    assert found.spec


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED])
def test_without_profiles_the_slices_are_as_many_as_devices_fit(rig: NvmlRig, code: int) -> None:
    rig.say(f"error nvmlDeviceGetGpuInstanceProfileInfoV {code}", "gpu 0 mig 3g.40gb")
    rig.open()
    found = device(rig.read(0), "0:1")
    assert (found.profile, found.weight, found.spec) == ("3g.40gb", 3 * PPM // 7, None)


# -- the readings --


def test_an_instances_figures_are_its_own(cut: NvmlRig) -> None:
    cut.say("gpu 1 gi 2 tensor 80", "gpu 1 gi 2 mem_used 5000", "gpu 1 gi 3 gr 10", "gpu 1 gi 3 tensor 5")
    cut.say("gpu 1 gi 2 idle", "gpu 1 gi 2 process 42 7", "gpu 1 gi 3 idle")
    cut.read(0)
    batch = cut.read(1)
    assert read_of(batch) == ALL
    large, middle, small = (reading_of(batch, index) for index in ("1:2", "1:3", "1:7"))
    assert [each.tensor_active for each in (large, middle, small)] == pytest.approx([0.8, 0.05, 0.4])
    assert [each.gr_engine_active for each in (large, middle, small)] == pytest.approx([0.9, 0.1, 0.9])
    assert [each.processes for each in (large, middle)] == [(Process(42, 7),), ()]
    assert (large.memory_used_bytes, large.memory_total_bytes) == (5000, 40448 * 1024 * 1024)
    assert {reading.start for reading in batch.readings} == {START}


def test_what_does_not_exist_per_instance_is_absent(cut: NvmlRig) -> None:
    cut.read(0)
    batch = cut.read(1)
    for index in ("1:2", "1:3", "1:7"):
        reading = reading_of(batch, index)
        assert reading.gpu_utilization is None
        assert (reading.power_watts, reading.enforced_power_limit_watts, reading.temperature_celsius) == (None,) * 3
        assert (reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second) == (None, None)
        assert (reading.nvlink_tx_bytes_per_second, reading.nvlink_rx_bytes_per_second) == (None, None)
        assert reading.clock_event_reasons is None
    assert batch.faults == ()
    assert cut.calls("nvmlDeviceGetUtilizationRates") == 4  # of the two whole boards


def test_energy_is_the_boards_by_weight_and_the_clock_is_the_boards(cut: NvmlRig) -> None:
    cut.say("gpu 1 power_mw 700000", "gpu 1 sm_mhz 1500")
    cut.read(0)
    cut.read(1)
    batch = cut.read(3)
    parts = [reading_of(batch, index) for index in ("1:2", "1:3", "1:7", "1")]
    assert [each.energy_joules for each in parts] == pytest.approx([600, 400, 200, 200], rel=1e-5)
    assert [each.sm_clock_hz for each in parts] == [1.5e9] * 4


def test_what_the_board_does_not_say_no_instance_says(cut: NvmlRig) -> None:
    cut.say(f"gpu 1 error nvmlDeviceGetClockInfo {UNKNOWN}")
    cut.say(f"gpu 1 error nvmlDeviceGetTotalEnergyConsumption {UNKNOWN}")
    cut.read(0)
    batch = cut.read(1)
    parts = [reading_of(batch, index) for index in ("1:2", "1:3", "1:7", "1")]
    assert [(each.energy_joules, each.sm_clock_hz) for each in parts] == [(None, None)] * 4


def test_an_instances_energy_never_covers_more_than_its_reading(cut: NvmlRig) -> None:
    cut.read(0)
    again(cut, "gpu 1 mig 3g.40gb:2 1g.10gb:8")
    cut.read(2)
    batch = cut.read(3)
    assert reading_of(batch, "1:8").energy_joules == pytest.approx(500 / 7, rel=1e-4)
    assert reading_of(batch, "1:2").energy_joules == pytest.approx(500 * 3 / 7, rel=1e-4)


def test_what_is_left_runs_nothing_and_has_the_boards_sensors(cut: NvmlRig) -> None:
    cut.say("gpu 1 power_mw 612000", "gpu 1 temp 55", "gpu 1 reasons 0x4")
    cut.read(0)
    left = reading_of(cut.read(1), "1")
    assert (left.gr_engine_active, left.sm_active, left.tensor_active, left.dram_active) == (0.0,) * 4
    assert left.processes == ()
    assert (left.power_watts, left.enforced_power_limit_watts, left.temperature_celsius) == (612, 700, 55)
    assert left.clock_event_reasons == 4
    assert (left.memory_used_bytes, left.gpu_utilization, left.pcie_tx_bytes_per_second) == (None, None, None)


def test_an_older_boards_instances_have_no_counters_and_say_so_by_silence(rig: NvmlRig) -> None:
    rig.say(*A100, "gpu * mig 3g.20gb 2g.10gb")
    rig.open()
    rig.read(0)
    batch = rig.read(1)
    small = reading_of(batch, "1:2")
    assert all(getattr(small, field) is None for field in COMPUTE)
    assert small.memory_total_bytes == 9856 * 1024 * 1024
    assert small.energy_joules == pytest.approx(500 * 2 / 7, rel=1e-5)
    assert reading_of(batch, "1").gr_engine_active == 0.0
    assert rig.calls("nvmlGpmMigSampleGet") == 0
    assert batch.faults == ()


def test_one_instances_counters_failing_leave_the_others_alone(cut: NvmlRig) -> None:
    cut.read(0)
    cut.say(f"gpu 1 gi 3 error nvmlGpmMigSampleGet {UNKNOWN}")
    batch = cut.read(1)
    assert kinds(batch) == [(1, "nvml_unknown")]
    assert "GPU 1:3" in batch.faults[0].message
    assert reading_of(batch, "1:3").gr_engine_active is None
    assert reading_of(batch, "1:2").gr_engine_active == pytest.approx(0.9)


def test_a_lost_board_takes_its_instances_with_it(cut: NvmlRig) -> None:
    cut.read(0)
    cut.say("gpu 1 lost")
    for second in (1, 2):
        batch = cut.read(second)
        assert conditions(batch) == ["", "lost", "lost", "lost", "lost", ""]
        assert read_of(batch) == ["0", "2"]
    cut.unsay("gpu 1 lost")
    assert conditions(cut.read(3)) == [""] * 6
    batch = cut.read(4)
    assert read_of(batch) == ALL
    assert reading_of(batch, "1:2").start == START + 3 * SECOND


@pytest.mark.parametrize("where", ["gi 7 error nvmlGpmMigSampleGet", "error nvmlDeviceGetMigDeviceHandleByIndex"])
def test_a_board_lost_while_an_instance_is_read_gives_no_half_reading(cut: NvmlRig, where: str) -> None:
    cut.read(0)
    cut.say(f"gpu 1 {where} {LOST}")
    batch = cut.read(1)
    assert read_of(batch) == ["0", "2"]
    assert device(batch, "1:2").condition == "lost"


# -- a layout that changes --


def test_whatever_is_cut_the_ledger_pays_each_board_once(rig: NvmlRig) -> None:
    ledger = Ledger()
    rig.open()
    layouts = ["", CUT, "gpu 1 mig 3g.40gb:2 1g.10gb:7 1g.10gb:8", "gpu 1 mig on", "gpu 1 mig" + " 1g.10gb" * 7, ""]
    for second in range(24):
        rig.lines = ["count 3", *[layouts[second // 4]][: bool(layouts[second // 4])]]
        batch = rig.read(second)
        now = START + second * SECOND
        seen = Observation(now, 0, readings=batch.readings, devices=batch.devices, faults=batch.faults)
        advance(ledger, seen)
    paid = {"0": 0, "1": 0, "2": 0}
    for gpu in ledger.gpus.values():
        paid[gpu.device.index.partition(":")[0]] += gpu.book.paid
    assert paid == dict.fromkeys(paid, 23 * SECOND)
    assert ledger.conservation_errors == 0
    assert ledger.rejected == {}


def test_a_board_that_is_cut_up_while_it_runs_begins_anew_as_its_instances(rig: NvmlRig) -> None:
    rig.open()
    rig.reading()
    rig.say(CUT)
    batch = rig.read(2)
    assert [each.index for each in batch.devices] == ALL
    assert read_of(batch) == ["0", "2"]
    batch = rig.read(3)
    assert read_of(batch) == ALL
    assert {reading.start for reading in batch.readings} == {START + 2 * SECOND}
    rig.unsay(CUT)
    batch = rig.read(4)
    assert [(each.index, each.weight) for each in batch.devices] == [("0", PPM), ("1", PPM), ("2", PPM)]
    assert read_of(batch) == ["0", "2"]
    assert reading_of(rig.read(5), "1").tensor_active == pytest.approx(0.4)


def test_instances_come_and_go_and_the_others_read_on(cut: NvmlRig) -> None:
    cut.read(0)
    cut.read(1)
    again(cut, "gpu 1 mig 3g.40gb:2 1g.10gb:7 1g.10gb:8")
    batch = cut.read(2)
    assert [each.index for each in batch.devices] == ["0", "1", "1:2", "1:7", "1:8", "2"]
    assert read_of(batch) == ["0", "1:2", "1:7", "2"]  # the rest may have been an instance's until just now
    assert reading_of(batch, "1:7").energy_joules == pytest.approx(500 / 7, rel=1e-4)
    assert device(batch, "1").weight == pytest.approx(2 / 7 * PPM, abs=1)
    assert batch.faults == ()
    assert read_of(cut.read(3)) == ["0", "1", "1:2", "1:7", "1:8", "2"]


def test_an_instance_made_anew_in_the_place_of_another_is_found_out(cut: NvmlRig) -> None:
    before = cut.read(0)
    cut.read(9)
    again(cut, "gpu 1 mig 3g.40gb:2 1g.20gb:3 1g.10gb:7")  # as large in memory, and with the same UUID
    batch = cut.read(10)
    assert (device(batch, "1:3").uuid, device(batch, "1:3").profile) == (device(before, "1:3").uuid, "1g.20gb")
    assert read_of(batch) == ["0", "1:2", "1:7", "2"]
    assert sum(each.weight for each in batch.devices) == 3 * PPM
    assert read_of(cut.read(11)) == ALL


def test_a_layout_asked_again_and_found_the_same_costs_nothing(cut: NvmlRig) -> None:
    for second in range(8):
        cut.read(second)
    for second in range(8, 30):
        assert read_of(cut.read(second)) == ALL
    assert cut.calls("nvmlDeviceGetAttributes_v2") == 3 * 3  # at 0, 10 and 20


def test_samples_of_instances_that_go_are_given_back(cut: NvmlRig) -> None:
    cut.read(0)
    assert cut.held()[0] == 2 * (2 + 3)
    again(cut, "gpu 1 mig 3g.40gb:2")
    cut.read(1)
    assert cut.held()[0] == 2 * (2 + 1)
    cut.unsay("gpu 1 mig 3g.40gb:2")
    cut.read(2)
    assert cut.held()[0] == 2 * 3


def test_instances_are_named_after_the_place_their_board_has_now(cut: NvmlRig) -> None:
    cut.read(0)
    cut.say("gpu 0 lost")
    cut.read(1)
    again(cut, CUT.replace("gpu 1", "gpu 2"), f"gpu 2 uuid {BOARD}", f"gpu 1 uuid {BOARD[:-1]}2")
    batch = cut.read(2)
    assert [each.index for each in batch.devices] == ["0", "2", "2:2", "2:3", "2:7", "1"]
    assert read_of(batch) == []
    assert read_of(cut.read(3)) == ["2", "2:2", "2:3", "2:7", "1"]


def test_handles_are_used_again_for_other_instances(cut: NvmlRig) -> None:
    cut.say("gpu 1 gi 7 mem_used 7", "gpu 1 gi 3 mem_used 3")
    cut.read(0)
    again(cut, "gpu 1 mig - 1g.10gb:7 2g.20gb:3 -")
    cut.read(1)
    batch = cut.read(2)
    assert [reading_of(batch, index).memory_used_bytes for index in ("1:3", "1:7")] == [3, 7]


def test_what_does_not_change_is_asked_once(cut: NvmlRig) -> None:
    cut.read(0)
    static = ("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetName", "nvmlDeviceGetGpuInstanceProfileInfoV")
    before = [cut.calls(name) for name in static]
    for second in range(1, 5):
        cut.read(second)
    assert [cut.calls(name) for name in static] == before
    assert cut.calls("nvmlGpmMigSampleGet") == 5 * 3


@pytest.mark.parametrize(
    "call",
    [
        f"nvmlDeviceGetMigDeviceHandleByIndex {NO_PERMISSION}",
        f"nvmlDeviceGetAttributes_v2 {UNKNOWN}",
        f"nvmlDeviceGetGpuInstanceProfileInfoV {UNKNOWN}",
    ],
)
def test_a_board_that_does_not_say_how_it_is_cut_is_unobserved(rig: NvmlRig, call: str) -> None:
    rig.say(CUT, f"gpu 1 error {call}")
    rig.open()
    for second in (0, 1, 2):
        batch = rig.read(second)
        assert kinds(batch) == [(1, "mig_layout")]
        assert "1" not in read_of(batch)
    rig.unsay(f"gpu 1 error {call}")
    rig.read(3)
    assert read_of(rig.read(4)) == ALL


def test_a_layout_that_cannot_be_asked_for_a_while_is_not_another(cut: NvmlRig) -> None:
    cut.read(0)
    cut.say(f"gpu 1 error nvmlDeviceGetMigDeviceHandleByIndex {TIMEOUT}")
    batch = cut.read(1)
    assert [each.index for each in batch.devices] == ALL
    assert read_of(batch) == ["0", "2"]
    cut.unsay(f"gpu 1 error nvmlDeviceGetMigDeviceHandleByIndex {TIMEOUT}")
    assert read_of(cut.read(2)) == ["0", "2"]
    batch = cut.read(3)
    assert read_of(batch) == ALL
    assert {reading_of(batch, index).start for index in ("1", "1:2")} == {START + 2 * SECOND}


def test_a_mode_that_cannot_be_asked_is_the_mode_it_was_in(cut: NvmlRig) -> None:
    cut.read(0)
    cut.say(f"error nvmlDeviceGetMigMode {UNKNOWN}")
    batch = cut.read(1)
    assert read_of(batch) == ALL
    assert set(kinds(batch)) == {(gpu, "nvml_unknown") for gpu in range(3)}


def test_a_mode_that_was_never_told_is_not_taken_for_whole(rig: NvmlRig) -> None:
    rig.say(CUT, f"gpu 1 error nvmlDeviceGetMigMode {UNKNOWN}")
    rig.open()
    rig.read(0)
    batch = rig.read(1)
    assert read_of(batch) == ["0", "2"]


def test_a_board_that_cannot_be_cut_is_whole(rig: NvmlRig) -> None:
    rig.say(f"error nvmlDeviceGetMigMode {NOT_SUPPORTED}")
    rig.open()
    rig.read(0)
    batch: ReadResult = rig.read(1)
    assert read_of(batch) == ["0", "1", "2"]
    assert rig.calls("nvmlDeviceGetMaxMigDeviceCount") == 0


def test_an_index_without_a_device_is_not_the_end(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig - 1g.10gb - 2g.20gb")
    rig.open()
    assert [each.index for each in rig.read(0).devices if each.parent] == ["0:1", "0:2"]
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError) as hole:
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    assert hole.value.value == NOT_FOUND
