"""Tests the health that the NVML source reports: critical errors, memory, links, temperature and recovery actions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from exporter.core.model import SECOND, Health
from exporter.sources.base import SourceError
from tests.sources.conformance import START
from tests.sources.nvml_rig import (
    LOST,
    NO_FUNCTION,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    NvmlRig,
    conditions,
    device,
    health_of,
    kinds,
    number,
    read_of,
    rigged,
)

WELL: dict[str, Any] = {
    "recovery_action": 0,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "row_remap_pending": False,
    "row_remap_failed": False,
    "nvlink_errors": 0,
    "memory_temperature_celsius": 65.0,
    "temperature_margin_celsius": 27.0,
    "power_smoothing": False,
}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


@pytest.fixture
def opened(rig: NvmlRig) -> NvmlRig:
    rig.open()
    return rig


def uuid(gpu: int) -> str:
    return f"GPU-5700b000-0000-0000-0000-{gpu:012}"


# -- what is asked --


def test_every_board_is_examined_at_the_first_read_and_then_every_ten_seconds(opened: NvmlRig) -> None:
    examined = [second for second in range(25) if opened.read(second).health]
    assert examined == [0, 10, 20]
    batch = opened.read(30)
    assert batch.health == tuple(Health(uuid(gpu), **WELL) for gpu in range(3))
    assert batch.faults == ()


def test_one_call_asks_all_fields_of_a_board(opened: NvmlRig) -> None:
    opened.read(0)
    assert opened.calls("nvmlDeviceGetFieldValues") == 3
    opened.read(10)
    assert opened.calls("nvmlDeviceGetFieldValues") == 6


def test_memory_that_fails_is_told_in_numbers(opened: NvmlRig) -> None:
    opened.say("gpu 1 ecc_corrected 0x100000007", "gpu 1 ecc_uncorrected 3")
    opened.say("gpu 1 remap_pending 1", "gpu 1 remap_failure 1", "gpu 1 memory_temp 96")
    found = health_of(opened.read(0), 1)
    assert (found.ecc_corrected, found.ecc_uncorrected) == (0x100000007, 3)
    assert (found.row_remap_pending, found.row_remap_failed) == (True, True)
    assert found.memory_temperature_celsius == 96
    assert health_of(opened.read(10), 0).ecc_corrected == 0


def test_a_sensor_that_is_not_there_may_answer_zero(opened: NvmlRig) -> None:
    opened.say("gpu 0 memory_temp 0")
    assert health_of(opened.read(0)).memory_temperature_celsius is None


def test_errors_of_all_links_are_added_up_and_asked_link_by_link(opened: NvmlRig) -> None:
    opened.say("gpu 0 links 4", "gpu 0 field 161 1", "gpu 0 field 162 2", "gpu 0 field 163 30")
    opened.source.close()
    opened.open()
    assert health_of(opened.read(0)).nvlink_errors == 4 * 33


@pytest.mark.parametrize(
    ("fields", "errors"),
    [
        (("38 1", "45 2", "52 4", "59 8"), 15),
        (("208 1", "215 10"), 18 * 11),
        (("38 1", "45 2", "52 4", "59 8", "208 100", "215 100"), 15),
    ],
    ids=["totals", "fifth generation", "the first that answers"],
)
def test_a_board_that_counts_link_errors_otherwise_is_asked_otherwise(
    opened: NvmlRig, fields: tuple[str, ...], errors: int
) -> None:
    opened.say(*(f"gpu 0 field {field} none" for field in (161, 162, 163)), *(f"gpu 0 field {each}" for each in fields))
    assert health_of(opened.read(0)).nvlink_errors == errors
    assert health_of(opened.read(10)).nvlink_errors == errors


def test_what_counts_the_same_errors_again_is_not_asked_again(opened: NvmlRig) -> None:
    opened.say("gpu * links 2", *(f"gpu * field {field} none" for field in (161, 162, 163)))
    opened.say(*(f"gpu * field {field} 1" for field in (38, 45, 52, 59, 208, 215)))
    opened.source.close()
    opened.open()
    opened.read(0)
    before = opened.calls("field values")
    opened.read(10)
    assert opened.calls("field values") - before == 3 * (7 + 4)


def test_a_board_without_links_has_no_errors_of_links(rig: NvmlRig) -> None:
    rig.say("gpu 0 links 0")
    rig.open()
    assert health_of(rig.read(0)).nvlink_errors is None


def test_the_margin_is_negative_when_the_board_is_too_hot(opened: NvmlRig) -> None:
    opened.say("gpu 0 margin -3")
    assert health_of(opened.read(0)).temperature_margin_celsius == -3


def test_an_older_boards_margin_is_to_its_slowdown(opened: NvmlRig) -> None:
    opened.say(f"gpu 0 error nvmlDeviceGetMarginTemperature {NOT_SUPPORTED}", "gpu 0 slowdown 90", "gpu 0 temp 72")
    assert health_of(opened.read(0)).temperature_margin_celsius == 18
    opened.read(10)
    assert opened.calls("nvmlDeviceGetMarginTemperature") == 5  # not again where it was declined


@pytest.mark.parametrize(
    ("version", "fields", "smooth"),
    [
        ("570.86", ("251 1", "256 none"), True),
        ("575.57.08", ("251 987654", "256 1"), True),
        ("575.57.08", ("251 987654", "256 0"), False),
        ("580.65", ("251 1", "256 40"), True),
        ("580.65", ("251 40", "256 1"), None),
    ],
)
def test_power_smoothing_has_another_number_in_one_driver(
    rig: NvmlRig, version: str, fields: tuple[str, ...], *, smooth: bool | None
) -> None:
    rig.say(f"version {version}", *(f"gpu 0 field {field}" for field in fields))
    rig.open()
    assert health_of(rig.read(0)).power_smoothing is smooth


def test_without_a_driver_version_nothing_is_said_of_power_smoothing(rig: NvmlRig) -> None:
    rig.say(f"error nvmlSystemGetDriverVersion {UNKNOWN}", "gpu 0 smoothing 1")
    rig.open()
    assert health_of(rig.read(0)).power_smoothing is None


def test_what_a_board_does_not_support_is_none_and_not_asked_again(opened: NvmlRig) -> None:
    opened.say("gpu 0 field 3 none", "gpu 0 field 144 none")
    found = health_of(opened.read(0))
    assert (found.ecc_corrected, found.row_remap_pending, found.ecc_uncorrected) == (None, None, 0)
    opened.unsay("gpu 0 field 3 none")
    assert health_of(opened.read(10)).ecc_corrected is None
    opened.source.resync()
    assert health_of(opened.read(11)).ecc_corrected == 0


def test_a_driver_without_fields_leaves_what_else_there_is(opened: NvmlRig) -> None:
    opened.say(f"error nvmlDeviceGetFieldValues {NO_FUNCTION}")
    assert health_of(opened.read(0)) == Health(uuid(0), temperature_margin_celsius=27)
    opened.read(10)
    assert opened.calls("nvmlDeviceGetFieldValues") == 3


def test_an_examination_that_fails_is_a_fault_and_is_made_again(opened: NvmlRig) -> None:
    fault = f"gpu 1 error nvmlDeviceGetFieldValues {TIMEOUT}"
    opened.say(fault)
    batch = opened.read(0)
    assert kinds(batch) == [(1, "nvml_timeout")]
    assert health_of(batch, 1) == Health(uuid(1), temperature_margin_celsius=27)
    opened.unsay(fault)
    assert health_of(opened.read(10), 1).ecc_corrected == 0


def test_one_value_that_fails_costs_itself_and_is_asked_again(opened: NvmlRig) -> None:
    opened.say(f"gpu 0 field 3 fails {TIMEOUT}", f"gpu 0 field 162 fails {TIMEOUT}")
    batch = opened.read(0)
    assert kinds(batch) == [(0, "nvml_timeout"), (0, "nvml_timeout")]
    assert [fault.message.partition(" gave no ")[2].split(":")[0] for fault in batch.faults] == [
        "ecc_corrected",
        "nvlink_0",
    ]
    found = health_of(batch)
    assert (found.ecc_corrected, found.ecc_uncorrected, found.nvlink_errors) == (None, 0, None)
    opened.unsay(f"gpu 0 field 3 fails {TIMEOUT}", f"gpu 0 field 162 fails {TIMEOUT}")
    assert (health_of(opened.read(10)).ecc_corrected, health_of(opened.read(20)).nvlink_errors) == (0, 0)


def test_a_board_lost_while_it_is_examined_is_found_lost_by_the_next_read(opened: NvmlRig) -> None:
    opened.say(f"gpu 1 error nvmlDeviceGetFieldValues {LOST}")
    assert [number(each.uuid) for each in opened.read(0).health] == [0, 2]
    opened.say("gpu 1 lost")
    assert conditions(opened.read(1)) == ["", "lost", ""]


def test_rows_are_not_told_while_there_are_instances_and_are_again_when_there_are_none(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 1g.10gb")
    assert health_of(opened.read(0)).row_remap_pending is None
    opened.unsay("gpu 0 mig 1g.10gb")
    opened.read(1)
    assert health_of(opened.read(11)).row_remap_pending is False


def test_rows_are_asked_after_again_when_the_last_instance_goes(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 1g.10gb")
    opened.read(0)
    opened.unsay("gpu 0 mig 1g.10gb")
    opened.say("gpu 0 mig on")
    opened.read(1)
    assert health_of(opened.read(10)).row_remap_pending is False


def test_health_is_of_boards_and_never_of_instances(opened: NvmlRig) -> None:
    opened.say("gpu * mig 1g.10gb 2g.20gb")
    assert [each.uuid for each in opened.read(0).health] == [uuid(gpu) for gpu in range(3)]


# -- recovery --


def test_a_board_that_asks_for_recovery_is_marked_while_it_does_and_read_on(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 1 recovery 1")
    assert conditions(opened.read(9)) == ["", "", ""]
    batch = opened.read(10)
    assert conditions(batch) == ["", "recovery", ""]
    assert health_of(batch, 1).recovery_action == 1
    assert kinds(batch) == [(1, "gpu_recovery")]
    assert "reset the GPU" in batch.faults[0].message
    batch = opened.read(11)
    assert (conditions(batch), read_of(batch)) == (["", "recovery", ""], ["0", "1", "2"])
    assert kinds(batch) == [(1, "gpu_recovery")]
    opened.unsay("gpu 1 recovery 1")
    assert conditions(opened.read(19)) == ["", "recovery", ""]
    batch = opened.read(20)
    assert (conditions(batch), batch.faults) == (["", "", ""], ())


def test_an_imex_domain_that_is_to_be_recovered_is_told_and_makes_no_gpu_unavailable(opened: NvmlRig) -> None:
    opened.say("gpu 1 recovery 5")
    batch = opened.read(0)
    assert conditions(batch) == ["", "", ""]
    assert health_of(batch, 1).recovery_action == 5
    assert kinds(batch) == [(1, "gpu_recovery")]
    assert "IMEX" in batch.faults[0].message
    assert "unavailable" not in batch.faults[0].message


def test_recovery_is_of_the_board_and_of_all_that_is_cut_from_it(opened: NvmlRig) -> None:
    opened.say("gpu 1 recovery 4", "gpu 1 mig 3g.40gb 1g.10gb")
    opened.read(0)
    batch = opened.read(1)
    assert {device(batch, index).condition for index in ("1", "1:1", "1:2")} == {"recovery"}
    assert read_of(batch) == ["0", "1", "1:1", "1:2", "2"]
    opened.unsay("gpu 1 mig 3g.40gb 1g.10gb")
    opened.say("gpu 1 mig 3g.40gb 1g.10gb 1g.10gb")
    assert device(opened.read(2), "1:3").condition == "recovery"


def test_recovery_holds_until_the_board_says_otherwise(opened: NvmlRig) -> None:
    opened.say("gpu 1 recovery 2")
    opened.read(0)
    opened.say(f"gpu 1 error nvmlDeviceGetFieldValues {TIMEOUT}")
    assert conditions(opened.read(10)) == ["", "recovery", ""]


def test_a_board_in_recovery_that_is_lost_is_lost_and_in_recovery_again_when_it_is_back(opened: NvmlRig) -> None:
    opened.say("gpu 1 recovery 1")
    opened.read(0)
    opened.say("gpu 1 lost")
    batch = opened.read(1)
    assert (conditions(batch), kinds(batch)) == (["", "lost", ""], [(1, "gpu_lost")])
    opened.unsay("gpu 1 lost")
    assert conditions(opened.read(2)) == ["", "recovery", ""]


def test_another_boards_trouble_does_not_end_a_recovery(opened: NvmlRig) -> None:
    opened.say("gpu 1 recovery 1")
    opened.read(0)
    opened.say("gpu 2 lost")
    for second in (1, 2, 3):
        assert conditions(opened.read(second)) == ["", "recovery", "lost"]


# -- critical errors --


def test_a_critical_error_is_told_once_at_once_with_all_of_the_boards_health(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 1 xid 94", "gpu 1 xid 63", "gpu 1 ecc_uncorrected 1")
    batch = opened.read(1)
    assert batch.health == (Health(uuid(1), **{**WELL, "xids": (94, 63), "ecc_uncorrected": 1}),)
    assert opened.read(2).health == ()
    opened.say("gpu 1 xid 94", "gpu 2 xid 31")
    assert [(number(each.uuid), each.xids) for each in opened.read(3).health] == [(1, (94,)), (2, (31,))]


def test_what_happened_before_the_source_was_opened_is_not_told(rig: NvmlRig) -> None:
    rig.say("gpu 0 xid 79")
    rig.open()
    assert health_of(rig.read(0)).xids == ()


def test_what_happens_between_opening_and_the_first_read_is_told(opened: NvmlRig) -> None:
    opened.say("gpu 0 xid 79")
    assert health_of(opened.read(0)).xids == (79,)


def test_a_storm_is_told_over_several_reads_and_loses_nothing(opened: NvmlRig) -> None:
    opened.say(*["gpu 0 xid 31"] * 100)
    told = [health_of(opened.read(second)).xids for second in (0, 1)]
    assert [len(xids) for xids in told] == [64, 36]
    assert opened.read(2).health == ()


def test_the_last_word_of_a_lost_board_is_its_critical_error(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 1 xid 79")
    opened.run(START + SECOND)
    pynvml.nvmlSystemGetDriverVersion()  # the error comes first
    opened.say("gpu 1 lost")
    batch = opened.read(1)
    assert batch.health == (Health(uuid(1), xids=(79,)),)
    assert conditions(batch) == ["", "lost", ""]
    assert opened.read(12).health == tuple(Health(uuid(gpu), **WELL) for gpu in (0, 2))


def test_a_board_that_cannot_tell_leaves_the_others(rig: NvmlRig) -> None:
    rig.say("gpu 0 no_events")
    rig.open()
    rig.read(0)
    rig.say("gpu 0 xid 79", "gpu 1 xid 48")
    batch = rig.read(1)
    assert [(number(each.uuid), each.xids) for each in batch.health] == [(1, (48,))]
    assert batch.faults == ()


def test_a_board_whose_registration_fails_leaves_the_others(rig: NvmlRig) -> None:
    rig.say(f"gpu 0 error nvmlDeviceRegisterEvents {UNKNOWN}")
    rig.open()
    for second in (0, 1, 2):
        assert kinds(rig.read(second)) == [(0, "nvml_unknown")]
    rig.say("gpu 1 xid 48")
    assert health_of(rig.read(3), 1).xids == (48,)
    assert rig.held()[1] == 1
    rig.unsay(f"gpu 0 error nvmlDeviceRegisterEvents {UNKNOWN}")
    rig.say("gpu 2 lost")
    rig.read(4)
    rig.unsay("gpu 2 lost")
    assert rig.read(5).faults == ()  # another's return is the occasion to try again


def test_a_wait_that_one_lost_board_breaks_is_made_anew(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say(f"error nvmlEventSetWait_v2 {LOST}")
    assert opened.read(1).faults == ()
    opened.unsay(f"error nvmlEventSetWait_v2 {LOST}")
    opened.say("gpu 2 xid 48")
    assert health_of(opened.read(2), 2).xids == (48,)
    assert opened.held()[1] == 1
    assert opened.calls("nvmlEventSetCreate") == 2


def test_critical_errors_that_cannot_be_asked_for_are_told_as_such(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say(f"error nvmlEventSetWait_v2 {UNKNOWN}")
    assert [fault.kind for fault in opened.read(1).faults] == ["xids_not_told"]


@pytest.mark.parametrize("code", [NO_FUNCTION, UNKNOWN])
def test_a_driver_without_events_is_read_without_them(rig: NvmlRig, code: int) -> None:
    rig.say(f"error nvmlEventSetCreate {code}")
    rig.open()
    assert len(rig.read(0).health) == 3
    for second in (1, 2):
        assert [fault.kind for fault in rig.read(second).faults] == (["xids_not_told"] if code == UNKNOWN else [])
    assert rig.calls("nvmlEventSetCreate") == (1 if code == NO_FUNCTION else 4)
    assert rig.calls("nvmlEventSetWait_v2") == 0


def test_a_critical_error_of_a_gpu_that_nvml_does_not_name_is_told_as_a_fault(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("stray 79", "gpu 1 xid 48")
    batch = opened.read(1)
    assert [(number(each.uuid), each.xids) for each in batch.health] == [(1, (48,))]
    assert [(fault.kind, fault.uuid) for fault in batch.faults] == [("xid_unassigned", "")]
    assert "79" in batch.faults[0].message


def test_a_board_that_comes_back_is_listened_to_again(opened: NvmlRig) -> None:
    opened.read(0)
    opened.say("gpu 1 lost")
    opened.read(1)
    opened.unsay("gpu 1 lost")
    opened.read(2)
    opened.say("gpu 1 xid 48")
    assert health_of(opened.read(3), 1).xids == (48,)
    assert opened.held()[1] == 1


def test_a_driver_that_goes_away_while_health_is_asked_is_an_error(opened: NvmlRig) -> None:
    opened.say("error nvmlDeviceGetFieldValues 1")
    with pytest.raises(SourceError, match="NVML: read the GPUs' health"):
        opened.read(0)
