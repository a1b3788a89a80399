"""Tests the DCGM source with NVIDIA's real bindings on a stand-in `libdcgm.so.4` that the test controls."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from exporter.core.ledger import Ledger
from exporter.core.model import MS, PPM, SECOND, Observation, State
from exporter.core.pipeline import advance
from exporter.sources.base import SourceError
from tests.sources.conformance import LAWS, START, Law
from tests.sources.dcgm_rig import DcgmRig, gpu_of, kinds, rigged, unpacked

GONE, LOST, NOT_LOADED, REFUSED, TAKEN, NOT_SUPPORTED = -21, -18, -33, -17, -37, -36


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("bindings"))


@pytest.fixture
def closed(bindings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DcgmRig]:
    with rigged(bindings, tmp_path, monkeypatch) as rig:
        yield rig


@pytest.fixture
def rig(closed: DcgmRig) -> DcgmRig:
    closed.open()
    return closed


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_source_keeps_the_law(law: Law, rig: DcgmRig) -> None:
    law(rig)


# -- what a reading is --


def test_every_value_of_the_engine_becomes_a_reading_over_its_own_interval(rig: DcgmRig) -> None:
    """Another client's watch has a tenth of the period: all its values are read, none twice."""
    rig.say("watcher 1001 100", "watcher 1002 100", "watcher 1004 100", "watcher 1005 100")
    readings = rig.readings(0, 1, 2, 3)
    assert all(one.end == two.start for one, two in pairwise(readings))
    assert {round((reading.end - reading.start) / MS, -1) for reading in readings[5:]} == {100}
    assert all(reading.tensor_active is not None and reading.sm_active is not None for reading in readings)


def test_nothing_is_lost_when_the_reads_are_late(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 0 tensor 80")
    first = rig.readings(2)
    rig.say("gpu 0 tensor 10")
    rest = rig.readings(20)
    readings = first + rest
    assert len(rest) >= 17
    assert all(one.end == two.start for one, two in pairwise(readings))
    busy = sum(((r.end - r.start) / SECOND) * (r.tensor_active or 0.0) for r in readings if r.end > START + SECOND)
    assert busy == pytest.approx(0.8 + 0.1 * 18, abs=0.15)


def test_a_value_that_is_stored_late_is_not_lost(rig: DcgmRig) -> None:
    """The API's own "next timestamp" would skip it, so each field has a position of its own."""
    rig.say("late 1004 1500")
    readings = rig.readings(*range(10))
    assert len(readings) >= 7
    assert all(reading.gr_engine_active is not None for reading in readings)


def test_gauges_come_in_base_units(rig: DcgmRig) -> None:
    rig.say("gpu 0 power 512.5", "gpu 0 limit 700", "gpu 0 sm_clock 1755", "gpu 0 temp 61", "gpu 0 util 98")
    rig.say("gpu 0 fb_total 81559", "gpu 0 fb_used 1024", "gpu 0 reasons 4")
    (*_, last) = rig.readings(0, 1, 2, 3)
    assert (last.power_watts, last.enforced_power_limit_watts) == (512.5, 700.0)
    assert (last.sm_clock_hz, last.temperature_celsius, last.gpu_utilization) == (1.755e9, 61, 0.98)
    assert (last.memory_used_bytes, last.memory_total_bytes) == (1024 * 2**20, 81559 * 2**20)
    assert last.clock_event_reasons == 4


def test_energy_is_what_the_counter_moved(rig: DcgmRig) -> None:
    rig.say("gpu 0 power 500")
    readings = rig.readings(*range(12))
    told = [reading.energy_joules for reading in readings if reading.energy_joules is not None]
    assert sum(told[1:]) == pytest.approx(500 * (len(told) - 1), rel=0.1)


def test_links_are_bytes_per_second(rig: DcgmRig) -> None:
    rig.say("gpu 0 nvlink_tx 100", "gpu 0 pcie_rx 10")
    (*_, last) = rig.readings(0, 1, 2, 3)
    assert last.nvlink_tx_bytes_per_second == pytest.approx(100 * 2**20, rel=0.01)
    assert last.pcie_rx_bytes_per_second == pytest.approx(10 * 2**20, rel=0.01)


# -- what is blank, stale or refused --


def test_a_blank_engine_is_unobserved_time_and_not_idleness(rig: DcgmRig) -> None:
    rig.say("gpu * gpm 0")
    rig.readings(0, 1)
    rig.say("paused 1")
    *_, last = rig.readings(2, 3, 4)
    assert last.distrust == "blank"
    assert last.gr_engine_active is None
    assert last.power_watts is not None


def test_values_that_stop_coming_are_told_and_never_repeated(rig: DcgmRig) -> None:
    rig.readings(0, 1, 2)
    rig.say("gpu 0 stuck")
    rig.readings(3)
    assert rig.readings(4, 5) == []
    batch = rig.read(12)
    assert {(fault.kind, gpu_of(fault.uuid)) for fault in batch.faults} == {("stale", 0)}
    assert {gpu_of(reading.uuid) for reading in batch.readings} == {1}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (NOT_LOADED, "profiling module is not loaded"),
        (REFUSED, "administrators"),
        (TAKEN, "another program holds the counters"),
        (-29, "does not run as root"),
        (NOT_SUPPORTED, "no profiling counters"),
    ],
)
def test_a_refusal_costs_only_the_board_it_hits_and_says_what_to_do(closed: DcgmRig, code: int, words: str) -> None:
    closed.say(f"gpu 0 profiling {code}")
    closed.open()
    readings = {gpu_of(reading.uuid): reading for second in range(4) for reading in closed.read(second).readings}
    assert readings[0].gr_engine_active is None
    assert readings[0].gpu_utilization is not None
    assert readings[1].tensor_active is not None
    (fault,) = closed.read(4).faults
    assert (fault.kind, gpu_of(fault.uuid)) == ("profiling_refused", 0)
    assert words in fault.message


def test_what_was_refused_is_tried_again(closed: DcgmRig) -> None:
    closed.say(f"gpu 0 profiling {TAKEN}")
    closed.open()
    closed.readings(0, 1)
    closed.unsay(f"gpu 0 profiling {TAKEN}")
    *_, last = closed.readings(*range(2, 16))
    assert last.tensor_active is not None
    assert kinds(closed.read(16)) == set()


def test_of_an_older_boards_groups_one_pass_is_watched_and_tensor_comes_first(closed: DcgmRig) -> None:
    closed.say("gpu * gpm 0")
    closed.open()
    *_, last = closed.readings(0, 1, 2, 3, 4)
    assert last.tensor_active == pytest.approx(last.tensor_active or 0.0)
    assert last.tensor_active
    assert last.gr_engine_active
    ratios = {last.gr_engine_active, last.sm_active, last.tensor_active, last.dram_active, last.fp32_active}
    assert 0.0 not in ratios


def test_the_integer_pipe_and_the_video_engines_are_read(rig: DcgmRig) -> None:
    rig.say("gpu 0 int 25", "gpu 0 enc_util 35", "gpu 0 dec_util 70")
    *_, last = rig.readings(0, 1, 2, 3, 4)
    assert last.int_active == pytest.approx(0.25)
    assert (last.encoder_utilization, last.decoder_utilization) == pytest.approx((0.35, 0.7))


def test_a_chip_to_chip_link_has_rates_where_bindings_engine_and_board_have_it(
    closed: DcgmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed.bindings.fields, "DCGM_FI_PROF_C2C_TX_ALL_BYTES", 1076, raising=False)
    monkeypatch.setattr(closed.bindings.fields, "DCGM_FI_PROF_C2C_RX_ALL_BYTES", 1078, raising=False)
    closed.say("gpu 0 c2c 1", "gpu 0 c2c_tx 500", "gpu 0 c2c_rx 20")
    closed.open()
    batch = [closed.read(second) for second in range(5)][-1]
    rates = {
        gpu_of(reading.uuid): (reading.c2c_tx_bytes_per_second, reading.c2c_rx_bytes_per_second)
        for reading in batch.readings
    }
    assert rates == {0: (pytest.approx(500 * 2**20), pytest.approx(20 * 2**20)), 1: (None, None)}


def test_an_engine_that_names_no_metric_groups_is_not_asked_for_what_few_boards_have(closed: DcgmRig) -> None:
    closed.say("error dcgmProfGetSupportedMetricGroups -6")
    closed.open()
    *_, last = closed.readings(0, 1, 2, 3)
    assert last.tensor_active == pytest.approx(0.4)
    assert last.int_active is None


def test_an_engine_older_than_the_bindings_is_asked_only_for_what_it_knows(
    closed: DcgmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed.bindings.fields, "DCGM_FI_DEV_GPU_RECOVERY_ACTION", 1523, raising=False)
    monkeypatch.setattr(closed.bindings.fields, "DCGM_FI_PROF_SM_CYCLES_ELAPSED_TOTAL", 1084, raising=False)
    closed.say("lacks 1008")
    closed.open()
    *_, last = closed.readings(0, 1, 2, 3)
    assert last.tensor_active is not None
    assert last.fp16_active is None


# -- the engine's troubles --


def test_a_restarted_engine_is_a_source_error_and_a_new_connection_sees_again(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("engine up 2")
    rig.run(START + 2 * SECOND)
    with pytest.raises(SourceError, match="connection"):
        rig.source.read(START + 2 * SECOND)
    rig.source.close()
    rig.open(at=START + 3 * SECOND)
    assert rig.readings(4, 5, 6)
    assert rig.stub.count("connections") == 1


def test_nothing_is_left_behind_on_the_engine(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    assert rig.stub.count("connections") == 1
    rig.source.close()
    assert [rig.stub.count(what) for what in ("connections", "groups", "field_groups", "watches")] == [0, 0, 0, 0]


def test_many_layouts_leak_no_group(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    before = rig.stub.count("groups")
    for turn in range(100):
        rig.say(f"gpu 1 mig {'1g.10gb' if turn % 2 else '3g.40gb'}")
        rig.read(20 + 11 * turn)
    assert rig.stub.count("groups") == before + 1  # of the instances


def test_a_lost_gpu_is_lost_and_the_others_go_on(rig: DcgmRig) -> None:
    rig.readings(0, 1, 2)
    rig.say("gpu 0 lost")
    for second in (3, 4, 5):
        batch = rig.read(second)
        assert {gpu_of(reading.uuid) for reading in batch.readings} == {1}
    assert [device.condition for device in batch.devices] == ["lost", ""]
    assert kinds(batch) == {"gpu_lost"}


def test_a_gpu_no_longer_listed_is_missing(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 0 gone")
    batch = rig.read(12)
    assert [device.condition for device in batch.devices] == ["missing", ""]


def test_an_engine_without_a_gpu_is_refused_with_words(closed: DcgmRig) -> None:
    closed.say("count 0")
    with pytest.raises(SourceError, match="lists no GPU"):
        closed.open()


# -- time --


def test_a_wall_clock_that_is_set_costs_its_moment_and_is_told(rig: DcgmRig) -> None:
    before = rig.readings(0, 1, 2, 3)
    rig.clock.step_wall(3600 * SECOND)
    stepped = rig.read(4)
    assert kinds(stepped) == {"clock_step"}
    after = rig.readings(5, 6, 7)
    assert after
    assert all(reading.start >= before[-1].end for reading in after)
    assert all(reading.end <= START + 7 * SECOND for reading in after)


# -- MIG --


def test_instances_and_what_is_left_make_onegpu_of(closed: DcgmRig) -> None:
    closed.say("gpu 0 mig 3g.40gb 2g.20gb")
    closed.open()
    devices = closed.read(0).devices
    board, *parts = [device for device in devices if "-000000000000" in device.uuid and (device.index + ":")[0] == "0"]
    parts = [device for device in devices if device.parent == board.uuid]
    assert [part.weight for part in parts] == [3 * PPM // 7, 5 * PPM // 7 - 3 * PPM // 7]
    assert board.weight + sum(part.weight for part in parts) == PPM
    assert [part.index.split(":")[0] for part in parts] == ["0", "0"]
    assert all(part.uuid.startswith("MIG-") for part in parts)


def test_an_instance_has_its_own_activity_and_no_links(closed: DcgmRig) -> None:
    closed.say("gpu 0 mig 3g.40gb 2g.20gb", "gpu 0 instance 0 tensor 70", "gpu 0 instance 1 tensor 5")
    closed.open()
    found = {reading.uuid: reading for second in range(4) for reading in closed.read(second).readings}
    parts = [device for device in closed.read(4).devices if device.parent]
    assert [found[part.uuid].tensor_active for part in parts] == [pytest.approx(0.7), pytest.approx(0.05)]
    for part in parts:
        reading = found[part.uuid]
        assert reading.gpu_utilization is reading.power_watts is reading.pcie_tx_bytes_per_second is None
        assert reading.sm_clock_hz is not None


def test_what_is_not_partitioned_runs_nothing_and_carries_the_boards_power(closed: DcgmRig) -> None:
    closed.say("gpu 0 mig 3g.40gb", "gpu 0 power 300")
    closed.open()
    board = closed.read(0).devices[0]
    (*_, last) = [r for second in range(1, 5) for r in closed.read(second).readings if r.uuid == board.uuid]
    assert (last.gr_engine_active, last.tensor_active, last.power_watts) == (0.0, 0.0, 300.0)


def test_a_new_layout_is_seen_while_running(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 1 mig 1g.10gb")
    batches = [rig.read(second) for second in range(2, 18)]
    assert [device.index for device in batches[-1].devices] == ["0", "1", "1:1"] or len(batches[-1].devices) == 3
    untouched = [r for batch in batches for r in batch.readings if _is(r.uuid, 0)]
    assert all(one.end == two.start for one, two in pairwise(untouched))
    assert {r.uuid for r in batches[-1].readings} == {device.uuid for device in batches[-1].devices}


def _is(uuid: str, gpu: int) -> bool:
    return uuid.startswith("GPU-") and uuid.endswith(f"{gpu}") and "/" not in uuid


# -- health --


def test_an_xid_is_told_once_and_an_old_one_never(closed: DcgmRig) -> None:
    closed.say("gpu 0 xid 31")
    closed.open()
    told = [health.xids for second in range(3) for health in closed.read(second).health]
    assert not any(told)
    closed.say("gpu 0 xid 79 2")
    heard = [(gpu_of(health.uuid), health.xids) for second in (3, 4, 5) for health in closed.read(second).health]
    assert heard == [(0, (79,))]


def test_health_is_read_every_ten_seconds(rig: DcgmRig) -> None:
    rig.say("gpu 0 ecc_dbe 2", "gpu 0 remap_pending 1", "gpu 0 nvlink_replay 5", "gpu 0 memory_temp 70")
    rig.say("gpu 0 slowdown 90", "gpu 0 temp 78")
    given = [len(rig.read(second).health) for second in range(25)]
    assert given.count(2) == 3
    found = {gpu_of(health.uuid): health for second in range(25, 40) for health in rig.read(second).health}
    health = found[0]
    assert (health.ecc_uncorrected, health.row_remap_pending, health.nvlink_errors) == (2, True, 5)
    assert (health.temperature_margin_celsius, health.memory_temperature_celsius) == (12, 70)
    assert health.recovery_action is None  # this DCGM does not know the field


def test_a_wanted_recovery_is_the_boards_condition_while_it_lasts(
    closed: DcgmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed.bindings.fields, "DCGM_FI_DEV_GPU_RECOVERY_ACTION", 1523, raising=False)
    closed.say("knows 1523", "gpu 0 recovery 1")
    closed.open()
    *_, batch = [closed.read(second) for second in range(22)]
    assert [device.condition for device in batch.devices] == ["recovery", ""]
    assert {gpu_of(reading.uuid) for reading in batch.readings} == {0, 1}
    for action, seconds in ((5, range(22, 44)), (0, range(44, 66))):
        closed.say(f"gpu 0 recovery {action}")
        *_, batch = [closed.read(second) for second in seconds]
        assert [device.condition for device in batch.devices] == ["", ""], action


# -- pausing --


def test_a_pause_frees_the_counters_for_everybody_and_ends_with_the_next_read(rig: DcgmRig) -> None:
    rig.say("gpu * gpm 0")
    rig.readings(0, 1)
    rig.source.pause()
    assert rig.stub.calls("dcgmProfPause") == 1
    rig.readings(60, 61, 62)
    assert rig.stub.calls("dcgmProfResume") == 1


def test_closing_leaves_no_pause_behind(rig: DcgmRig) -> None:
    rig.say("gpu * gpm 0")
    rig.readings(0)
    rig.source.pause()
    rig.source.close()
    assert rig.stub.calls("dcgmProfResume") == 1


def test_what_is_not_partitioned_is_free_though_its_instances_keep_the_driver_busy(closed: DcgmRig) -> None:
    closed.say("gpu 0 mig 3g.40gb", "gpu 0 util 100")
    closed.open()
    board = closed.read(0).devices[0]
    ledger = Ledger()
    for second in range(1, 6):
        batch = closed.read(second)
        at = START + second * SECOND
        advance(ledger, Observation(at, at, batch.readings, batch.settled, batch.devices, allocations_at=0))
    assert (ledger.gpus[board.uuid].state, ledger.gpus[board.uuid].reason) == (State.UNALLOCATED, "free")
    assert ledger.conservation_errors == 0
