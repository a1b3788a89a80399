"""Tests that the stand-in libdcgm behaves like the real one, through NVIDIA's Python bindings: one test per fact.

The facts come from NVIDIA's published source of DCGM: DcgmApi.cpp, DcgmClientHandler.cpp, DcgmCacheManager.cpp,
DcgmGpmManager.cpp, DcgmGroupManager.cpp, DcgmFieldGroup.cpp and dcgm_structs.h.
"""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.client import COMPUTE, GPU, INSTANCE, Client, S, Seen, seen_value
from tests.dcgm_stub.stub import START_US, Stub, stand_in
from tests.shared_library import compiler

GR, SM, TENSOR, DRAM, FP64, PCIE_TX, NVLINK_TX = 1001, 1002, 1004, 1005, 1006, 1009, 1011
POWER, ENERGY, UTIL, NAME, UUID, XID = 155, 156, 203, 50, 54, 230
DEAD, TIMEOUT, NOT_WATCHED, NO_DATA, LOST, UNKNOWN_FIELD, VERSION = -21, -11, -16, -14, -18, -13, -12
BADPARAM, NOT_CONFIGURED, MAX_LIMIT, DUPLICATE, UNINITIALIZED = -1, -5, -24, -26, -10
FP64_BLANK, INT64_BLANK, INT32_BLANK = 2.0**47, 0x7FFFFFFFFFFFFFF0, 0x7FFFFFF0


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in libdcgm")
    if reason := missing():
        pytest.skip(reason)
    return unpack(tmp_path_factory.mktemp("dcgm-bindings"))


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bindings: Path) -> Iterator[Stub]:
    with stand_in(tmp_path, monkeypatch, bindings) as stub:
        yield stub


@pytest.fixture
def client(stub: Stub) -> Client:
    return Client(stub)


def _run(stub: Stub, seconds: float) -> None:
    """Advance the engine's clock in one step."""
    stub.run(stub.now + round(seconds * S))


# -- the library and its versions --


def test_the_stand_in_owns_up_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bindings: Path
) -> None:
    with stand_in(tmp_path, monkeypatch, bindings) as stub:
        assert "not NVIDIA" in stub.agent.dcgmVersionInfo().rawBuildInfoString
        loaded = f"{stub.folder}/libdcgm.so.4"
        assert loaded in Path("/proc/self/maps").read_text()
    assert loaded not in Path("/proc/self/maps").read_text()
    assert "dcgm_structs" not in sys.modules


def test_without_init_nothing_is_answered(stub: Stub) -> None:
    stub.structs._dcgmInit(str(stub.folder))
    with pytest.raises(stub.structs.DCGMError) as refused:
        stub.agent.dcgmConnect_v2("localhost:5555", stub.structs.c_dcgmConnectV2Params_v2())
    assert refused.value.value == UNINITIALIZED
    client = Client(stub)
    stub.agent.dcgmShutdown()
    assert client.refusal("dcgmGetAllDevices") == UNINITIALIZED
    client.dcgmDisconnect()


@pytest.mark.parametrize(
    ("function", "struct", "before"),
    [
        ("dcgmGetDeviceAttributes", "c_dcgmDeviceAttributes_v3", (ctypes.c_int(0),)),
        ("dcgmGetGpuInstanceHierarchy", "c_dcgmMigHierarchy_v2", ()),
        ("dcgmGroupGetInfo", "c_dcgmGroupInfo_v2", (ctypes.c_void_p(0x7FFFFFFF),)),
        ("dcgmFieldGroupGetInfo", "c_dcgmFieldGroupInfo_v1", ()),
        ("dcgmFieldGroupGetAll", "c_dcgmAllFieldGroup_v1", ()),
        ("dcgmProfGetSupportedMetricGroups", "c_dcgmProfGetMetricGroups_v3", ()),
        ("dcgmModuleGetStatuses", "c_dcgmModuleGetStatuses_v1", ()),
        ("dcgmHostengineIsHealthy", "c_dcgmHostengineHealth_v1", ()),
    ],
)
def test_a_struct_of_another_version_is_refused(
    client: Client, function: str, struct: str, before: tuple[Any, ...]
) -> None:
    wrong = getattr(client.stub.structs, struct)()
    wrong.version = ctypes.sizeof(wrong) | 9 << 24
    call = client.stub.structs._dcgmGetFunctionPointer(function)
    assert call(client.handle, *before, ctypes.byref(wrong)) == VERSION


def test_connecting_with_another_version_is_refused(stub: Stub) -> None:
    stub.connect()
    params = stub.structs.c_dcgmConnectV2Params_v2()
    with pytest.raises(stub.structs.DCGMError) as refused:
        stub.agent.dcgmConnect_v2("localhost", params, version=7)
    assert refused.value.value == VERSION


def test_fields_tell_their_type(stub: Stub) -> None:
    types = {field: stub.fields.DcgmFieldGetById(field).fieldType for field in (GR, PCIE_TX, NAME, POWER, XID)}
    assert types == {GR: "d", PCIE_TX: "i", NAME: "s", POWER: "d", XID: "i"}
    assert stub.fields.DcgmFieldGetById(1084) is None
    assert stub.fields.DcgmFieldGetByTag("tensor_active").fieldId == TENSOR


def test_every_module_of_the_bindings_imports_without_its_packages_namespace(bindings: Path, stub: Stub) -> None:
    assert stub.pydcgm.DcgmHandle.__module__ == "DcgmHandle"
    assert "model_analyzer." not in "".join(path.read_text() for path in bindings.glob("*.py"))


# -- 1: one cache for all clients --


def test_the_engine_samples_at_the_shortest_period_of_all_clients(client: Client) -> None:
    mine = client.watch(POWER)
    client.stub.say(f"watcher {POWER} 250")
    _run(client.stub, 2)
    assert len(client.since(mine)) == 9
    other = Client(client.stub)
    faster = other.watch(POWER, us=100_000)
    _run(client.stub, 1)
    assert len(client.since(mine, START_US + 2 * S)) == 10
    other.dcgmUnwatchFields(*faster)
    _run(client.stub, 1)
    assert len(client.since(mine, START_US + 3 * S)) == 4


def test_fields_of_one_cycle_differ_by_some_microseconds(client: Client) -> None:
    groups = client.watch(GR, TENSOR, POWER)
    _run(client.stub, 1)
    stamps = [seen.at for seen in client.since(groups, START_US + 1)]
    assert len(set(stamps)) == 3
    assert max(stamps) - min(stamps) < 100
    assert max(stamps) <= S


def test_values_are_kept_as_long_as_asked_for_and_outlive_the_watch(client: Client) -> None:
    groups = client.watch(POWER, keep=5.0)
    _run(client.stub, 60)
    assert len(client.since(groups)) == 6
    client.dcgmUnwatchFields(*groups)
    _run(client.stub, 10)
    assert len(client.since(groups)) == 6


def test_values_are_kept_by_number_too_with_some_to_spare(client: Client) -> None:
    groups = client.group(), client.field_group(POWER)
    client.dcgmWatchFields(*groups, S, 60.0, 5)
    _run(client.stub, 60)
    assert 5 <= len(client.since(groups)) <= 11


# -- 2: values since --


def test_since_is_inclusive_ascending_and_ends_at_the_time_of_the_call(client: Client) -> None:
    groups = client.watch(POWER)
    _run(client.stub, 3)
    stamps = [START_US + seen.at for seen in client.since(groups)]
    assert stamps == sorted(stamps)
    assert len(client.since(groups, stamps[1])) == 3
    assert len(client.since(groups, stamps[1] + 1)) == 2
    assert client.next == client.stub.now + 1
    assert client.since(groups, client.next) == []


def test_a_value_stored_late_escapes_who_trusts_the_next_timestamp(client: Client) -> None:
    client.stub.say(f"late {POWER} 300")
    groups = client.watch(POWER)
    _run(client.stub, 1.1)
    assert [seen.at for seen in client.since(groups)] == [0]
    trusted = client.next
    _run(client.stub, 0.4)
    assert client.since(groups, trusted) == []
    assert [round(seen.at / S) for seen in client.since(groups)] == [0, 1]


def test_what_has_no_data_is_passed_over(client: Client) -> None:
    groups = client.watch(XID, POWER, entities=((GPU, 0), (GPU, 1)))
    assert [(seen.entity[1], seen.field) for seen in client.since(groups)] == [(0, POWER), (1, POWER)]


def test_any_other_error_of_one_gpu_blinds_those_behind_it(client: Client) -> None:
    groups = client.watch(POWER, entities=((GPU, 0), (GPU, 1)))
    client.stub.say(f"gpu 0 error dcgmGetValuesSince_v2 {LOST}")
    _run(client.stub, 1)
    assert client.refusal("since", groups) == LOST
    assert client.heard == []
    client.stub.lines = [f"gpu 1 error dcgmGetValuesSince_v2 {LOST}"]
    _run(client.stub, 1)
    assert client.refusal("since", groups) == LOST
    assert {seen.entity for seen in client.heard} == {(GPU, 0)}


def test_what_nobody_watches_is_an_error_too(client: Client) -> None:
    client.watch(POWER)
    assert client.refusal("since", (client.group((GPU, 0), (GPU, 1)), client.field_group(POWER))) == NOT_WATCHED


def test_a_callback_ends_the_call_by_what_it_returns(client: Client) -> None:
    groups = client.watch(POWER)
    _run(client.stub, 3)
    heard = []

    def stop(*_: Any) -> int:
        heard.append(1)
        return 1

    ear = client.stub.agent.dcgmFieldValueEntityEnumeration_f(stop)
    assert client.dcgmGetValuesSince_v2(*groups, 5, ear, None) == 5
    assert heard == [1]


def test_the_call_for_gpus_refuses_other_entities(client: Client) -> None:
    client.stub.say("gpu 0 mig 7g.80gb")
    _run(client.stub, 0)
    groups = client.watch(GR, entities=((INSTANCE, 0),))
    ear = client.stub.agent.dcgmFieldValueEnumeration_f(lambda *_: 0)
    assert client.refusal("dcgmGetValuesSince", *groups, 0, ear, None) == -6


# -- 3: means over the time between samples --


def test_ratios_are_means_over_the_time_since_the_sample_before(client: Client) -> None:
    groups = client.watch(TENSOR)
    for percent in (0, 0, 20, 60):
        client.stub.say(f"gpu 0 tensor {percent}")
        _run(client.stub, 1)
        client.latest(TENSOR)  # any call lets the world run on
    assert [seen.value for seen in client.since(groups)][2:] == pytest.approx([0, 0.2, 0.6])


def test_a_slower_field_averages_over_its_own_period(client: Client) -> None:
    groups = client.watch(TENSOR, us=2 * S), client.watch(GR, us=S)
    for percent in (10, 30) * 4:
        client.stub.say(f"gpu 0 tensor {percent}", f"gpu 0 gr {percent}")
        _run(client.stub, 1)
        client.latest(TENSOR)
    assert client.since(groups[0])[-1].value == pytest.approx(0.2)
    assert client.since(groups[1])[-1].value == pytest.approx(0.3)


def test_without_a_baseline_a_ratio_is_blank(client: Client) -> None:
    groups = client.watch(GR, PCIE_TX)
    _run(client.stub, 3)
    values = [seen.value for seen in client.since(groups)]
    assert values[:4] == [FP64_BLANK, FP64_BLANK, pytest.approx(0.9), pytest.approx(0.9)]
    assert values[4:] == [INT64_BLANK, INT64_BLANK, 100 << 20, 100 << 20]


def test_before_hopper_only_the_first_value_is_blank(client: Client) -> None:
    client.stub.say("gpu 0 gpm 0")
    _run(client.stub, 0)
    groups = client.watch(GR)
    _run(client.stub, 2)
    assert [seen.value for seen in client.since(groups)] == [FP64_BLANK, pytest.approx(0.9), pytest.approx(0.9)]


def test_a_cycle_that_comes_late_is_told_twice_over_two_periods(client: Client) -> None:
    client.stub.say("jitter 50000")
    groups = client.watch(TENSOR)
    for percent in (0, 0, 0, 100, 0, 0):
        client.stub.say(f"gpu 0 tensor {percent}")
        _run(client.stub, 1)
        client.latest(TENSOR)
    ratios = [(round(seen.at / S, 1), seen.value) for seen in client.since(groups)][2:]
    assert ratios == [(2.0, 0), (3.0, 0), (4.0, pytest.approx(0.5)), (5.0, pytest.approx(0.5))]


# -- 4: blanks --


@pytest.mark.parametrize(
    ("kind", "offset"), [("blank", 0), ("not_found", 1), ("not_supported", 2), ("not_permissioned", 3)]
)
def test_every_type_has_its_blanks(client: Client, kind: str, offset: int) -> None:
    client.stub.say(*(f"gpu 0 blank {field} {kind}" for field in (POWER, TENSOR, UTIL, NAME)))
    client.stub.say(f"gpu 0 blank {ENERGY} int32_{kind}")
    _run(client.stub, 0)
    client.watch(POWER, TENSOR, UTIL, NAME, ENERGY)
    _run(client.stub, 5)
    power, tensor, util, name, energy = (client.value(field) for field in (POWER, TENSOR, UTIL, NAME, ENERGY))
    assert (power, tensor, util, energy) == (
        FP64_BLANK + offset,
        FP64_BLANK + offset,
        INT64_BLANK + offset,
        INT32_BLANK + offset,
    )
    assert name == ("<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>")[offset]
    assert client.stub.pydcgm is not None


def test_a_status_comes_with_a_zero_that_is_no_value(client: Client) -> None:
    client.watch(POWER)
    client.stub.say(f"gpu 0 status {POWER} -6")
    _run(client.stub, 1)
    assert client.latest(POWER) == [Seen((GPU, 0), POWER, 0, -6, 0)]
    (raw,) = client.dcgmEntityGetLatestValues(GPU, 0, [POWER])
    assert chr(raw.fieldType) == "i"  # whatever the field's own type is


def test_a_board_without_nvlink_does_not_support_its_rates(client: Client) -> None:
    client.stub.say("gpu 0 links 0")
    client.watch(NVLINK_TX, PCIE_TX)
    _run(client.stub, 3)
    assert [client.value(NVLINK_TX), client.value(PCIE_TX)] == [INT64_BLANK + 2, 100 << 20]


# -- 5: profiling --


@pytest.mark.parametrize("code", [-33, -36, -37, -29, -17])
def test_profiling_can_be_refused_while_the_rest_is_watched(client: Client, code: int) -> None:
    client.stub.say(f"profiling {code}")
    _run(client.stub, 0)
    assert client.refusal("watch", GR, POWER) == code
    assert client.stub.count("watches") == 0
    assert client.refusal("dcgmProfGetSupportedMetricGroups", 0) == code
    client.watch(POWER)
    assert client.stub.count("watches") == 1


def test_profiling_can_be_refused_on_one_gpu(client: Client) -> None:
    client.stub.say("gpu 1 profiling -36")
    _run(client.stub, 0)
    client.watch(GR)
    group = client.group((GPU, 0), (GPU, 1))
    assert client.refusal("dcgmWatchFields", group, client.field_group(SM), S, 60.0, 0) == -36
    assert client.stub.count("watches") == 1


def test_a_module_that_is_not_loaded_says_so_in_its_status(client: Client) -> None:
    assert client.dcgmModuleGetStatuses().statuses[8].status == client.stub.structs.DcgmModuleStatusLoaded
    client.stub.say("profiling -33")
    _run(client.stub, 0)
    assert client.dcgmModuleGetStatuses().statuses[8].status == client.stub.structs.DcgmModuleStatusFailed


def test_a_pause_makes_blanks_for_everybody_until_it_ends(client: Client) -> None:
    client.stub.say("gpu * gpm 0")
    _run(client.stub, 0)
    groups = client.watch(GR, POWER)
    _run(client.stub, 3)
    other = Client(client.stub)
    other.dcgmProfPause()
    _run(client.stub, 2)
    assert client.value(GR) == FP64_BLANK
    assert client.value(POWER) == 500
    other.dcgmProfResume()
    _run(client.stub, 3)
    blanks = [seen.value == FP64_BLANK for seen in client.since(groups) if seen.field == GR]
    assert blanks == [True, False, False, False, True, True, True, False, False]


def test_hopper_reads_all_in_one_pass_and_older_boards_in_several(client: Client) -> None:
    client.stub.say("gpu 1 gpm 0")
    _run(client.stub, 0)
    new, old = (client.dcgmProfGetSupportedMetricGroups(gpu) for gpu in (0, 1))
    assert new.numMetricGroups == 1
    assert {GR, TENSOR, PCIE_TX} <= set(new.metricGroups[0].fieldIds[: new.metricGroups[0].numFieldIds])
    majors = [old.metricGroups[i].majorId for i in range(old.numMetricGroups)]
    assert majors.count(1) == 3


def test_two_passes_show_zeros_in_turn(client: Client) -> None:
    client.stub.say("gpu 0 gpm 0", "gpu 0 fp64 50")
    _run(client.stub, 0)
    groups = client.watch(TENSOR, FP64, DRAM)
    _run(client.stub, 4)
    rows = {field: [s.value for s in client.since(groups) if s.field == field][1:] for field in (TENSOR, FP64, DRAM)}
    assert sorted(rows[TENSOR]) == pytest.approx([0, 0, 0.4, 0.4])
    assert [(tensor == 0) != (fp64 == 0) for tensor, fp64 in zip(rows[TENSOR], rows[FP64], strict=True)] == [True] * 4
    assert rows[DRAM] == pytest.approx([0.3] * 4)


def test_one_pass_alone_has_no_zeros(client: Client) -> None:
    client.stub.say("gpu 0 gpm 0")
    _run(client.stub, 0)
    groups = client.watch(TENSOR, SM, DRAM)
    _run(client.stub, 4)
    assert min(seen.value for seen in client.since(groups)) > 0


def test_more_than_five_passes_are_too_many(client: Client) -> None:
    fields = (1002, 1003, 1004, 1006, 1007, 1008)
    client.stub.say("gpu 0 gpm 0", *(f"gpu 0 group 1 {minor} {field}" for minor, field in enumerate(fields)))
    _run(client.stub, 0)
    assert client.refusal("watch", *fields) == -38
    client.watch(*fields[:5])
    assert client.refusal("watch", fields[5]) == -38


# -- 6: latest values --


def test_the_latest_value_is_the_newest_of_the_cache_or_a_status(client: Client) -> None:
    client.watch(POWER, XID)
    client.stub.say("gpu 0 power 123")
    _run(client.stub, 1.5)
    power, util, xid, none = client.latest(POWER, UTIL, XID, 9999)
    assert (power.value, round(power.at / S)) == (123, 1)
    assert (util.status, util.value, util.at) == (NOT_WATCHED, 0, 0)
    assert (xid.status, xid.value, xid.at) == (NO_DATA, 0, 0)
    assert none.status == UNKNOWN_FIELD


def test_live_data_comes_from_the_driver_except_for_profiling(client: Client) -> None:
    client.stub.say("gpu 0 power 77")
    _run(client.stub, 0.5)
    assert client.value(POWER, live=True) == 77
    assert client.latest(GR, live=True)[0].status == NOT_WATCHED
    assert client.stub.count("watches") == 0


def test_the_three_ways_to_the_latest_values_agree(client: Client) -> None:
    groups = client.watch(POWER, UUID)
    ear = client.ear()
    client.dcgmGetLatestValues_v2(*groups, ear, None)
    single = [seen_value((GPU, 0), raw) for raw in client.dcgmEntityGetLatestValues(GPU, 0, [POWER, UUID])]
    assert client.heard == single == client.latest(POWER, UUID)


def test_an_empty_group_has_no_latest_values(client: Client) -> None:
    empty, fields = client.dcgmGroupCreate(1, "empty"), client.field_group(POWER)
    assert client.refusal("dcgmGetLatestValues_v2", empty, fields, client.ear(), None) == -35


# -- 7: connections --


def test_a_handle_is_dead_for_ever_after_a_restart(client: Client) -> None:
    groups = client.watch(POWER)
    client.stub.restart()
    assert client.refusal("dcgmGetAllDevices") == DEAD
    assert client.refusal("since", groups) == DEAD
    assert [client.stub.count(what) for what in ("groups", "field_groups", "watches", "connections")] == [0] * 4
    again = Client(client.stub)
    assert again.dcgmGetAllDevices() == [0, 1]
    assert again.latest(POWER)[0].status == NOT_WATCHED
    assert client.refusal("dcgmGetAllDevices") == DEAD


def test_an_engine_that_is_down_cannot_be_reached(client: Client) -> None:
    client.stub.say("engine down")
    _run(client.stub, 0)
    assert client.refusal("dcgmGetAllDevices") == DEAD
    with pytest.raises(client.stub.structs.DCGMError) as refused:
        client.stub.connect()
    assert refused.value.value == DEAD
    client.stub.unsay("engine down")
    _run(client.stub, 1)
    assert Client(client.stub).dcgmGetAllDevices() == [0, 1]
    assert client.refusal("dcgmGetAllDevices") == DEAD


@pytest.mark.parametrize("persist", [False, True])
def test_a_broken_connection_takes_its_watches_along_unless_they_are_to_stay(stub: Stub, *, persist: bool) -> None:
    client, other = Client(stub, persist=persist), Client(stub)
    client.watch(POWER)
    stub.drop()
    assert client.refusal("dcgmGetAllDevices") == DEAD
    assert other.refusal("dcgmGetAllDevices") == DEAD
    assert [stub.count(what) for what in ("groups", "field_groups", "watches")] == [persist] * 3
    assert (Client(stub).latest(POWER)[0].status == 0) or not persist


def test_disconnecting_is_ok_even_for_a_dead_handle_and_frees_what_was_held(client: Client) -> None:
    client.watch(POWER)
    client.dcgmDisconnect()
    assert [client.stub.count(what) for what in ("groups", "field_groups", "watches", "connections")] == [0] * 4
    client.dcgmDisconnect()
    assert client.refusal("dcgmGetAllDevices") == DEAD


def test_the_classes_of_the_bindings_outlive_a_dead_engine(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    handle = stub.pydcgm.DcgmHandle(ipAddress="localhost:5555")
    group = handle.GetSystem().GetGroupWithGpuIds("mine", [0, 1])
    fields = stub.pydcgm.DcgmFieldGroup(handle, "mine", [POWER])
    group.samples.WatchFields(fields, S, 60.0, 0)
    stub.restart()
    with pytest.raises(stub.structs.DCGMError):
        group.samples.GetLatest_v2(fields)
    with pytest.raises(stub.structs.DCGMError):
        group.Delete()
    del group, fields, handle
    gc.collect()
    assert ignored == []
    assert stub.calls("dcgmDisconnect") == 1


def test_a_destructor_complains_where_disconnecting_fails(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    handle = stub.pydcgm.DcgmHandle(ipAddress="localhost:5555")
    stub.say(f"error dcgmDisconnect {DEAD}")
    _run(stub, 0)
    del handle
    gc.collect()
    assert [type(each.exc_value).__name__ for each in ignored] == ["DCGMError_ConnectionNotValid"]


def test_groups_of_fields_are_unique_by_name_and_may_not_name_unknown_fields(client: Client) -> None:
    client.dcgmFieldGroupCreate([POWER], "same")
    assert client.refusal("dcgmFieldGroupCreate", [UTIL], "same") == DUPLICATE
    assert client.refusal("dcgmFieldGroupCreate", [POWER, 9999], "other") == BADPARAM
    assert client.dcgmFieldGroupGetAll().numFieldGroups == 1


def test_there_is_room_for_62_groups_beside_the_engines_own_two(client: Client) -> None:
    made = [client.dcgmGroupCreate(1, "same name") for _ in range(62)]
    assert client.refusal("dcgmGroupCreate", 1, "one more") == MAX_LIMIT
    assert len(client.dcgmGroupGetAllIds()) == 64
    client.dcgmGroupDestroy(made[7])
    assert client.refusal("dcgmGroupDestroy", made[7]) == NOT_CONFIGURED
    client.dcgmGroupCreate(1, "one more")


def test_there_is_room_for_64_groups_of_fields(client: Client) -> None:
    for _ in range(64):
        client.field_group(POWER)
    assert client.refusal("field_group", POWER) == MAX_LIMIT


def test_a_destroyed_group_leaves_its_watches_until_the_client_goes(client: Client) -> None:
    group, fields = client.watch(POWER)
    client.dcgmGroupDestroy(group)
    client.dcgmFieldGroupDestroy(fields)
    assert client.stub.count("watches") == 1
    assert client.refusal("dcgmUnwatchFields", group, fields) == NOT_CONFIGURED
    client.dcgmDisconnect()
    assert client.stub.count("watches") == 0


def test_groups_tell_what_is_in_them(client: Client) -> None:
    group = client.group((GPU, 1), (GPU, 0))
    assert [entity.entityId for entity in client.dcgmGroupGetInfo(group).entityList[:2]] == [1, 0]
    assert client.refusal("dcgmGroupAddDevice", group, 1) == BADPARAM
    client.dcgmGroupRemoveEntity(group, GPU, 1)
    assert client.dcgmGroupGetInfo(group).count == 1
    assert client.dcgmGroupGetInfo(0x7FFFFFFF).count == 2
    assert list(client.dcgmFieldGroupGetInfo(client.field_group(POWER, UTIL)).fieldIds[:2]) == [POWER, UTIL]


def test_the_engine_answers_where_it_listens(stub: Stub) -> None:
    stub.say("listen 127.0.0.1:6666", "listen /run/engine.sock")
    _run(stub, 0)
    assert stub.connect("127.0.0.1:6666")
    assert stub.connect("/run/engine.sock")
    for nobody in ("localhost", "127.0.0.1:5555", "/run/other.sock"):
        with pytest.raises(stub.structs.DCGMError):
            stub.connect(nobody)
    params = stub.structs.c_dcgmConnectV2Params_v2()
    params.addressIsUnixSocket = 1
    with pytest.raises(stub.structs.DCGMError):
        stub.agent.dcgmConnect_v2("127.0.0.1:6666", params)


def test_an_embedded_engine_lives_in_this_process_and_only_once(stub: Stub) -> None:
    stub.structs._dcgmInit(str(stub.folder))
    stub.agent.dcgmInit()
    client = Client.__new__(Client)
    client.stub, client.made = stub, 0
    client.handle = stub.agent.dcgmStartEmbedded(stub.structs.DCGM_OPERATION_MODE_AUTO)
    client.watch(POWER)
    stub.restart()
    assert client.value(POWER) == 500
    assert stub.agent.dcgmStartEmbedded(1).value is None  # OK, and the null handle
    stub.agent.dcgmStopEmbedded(client.handle)
    assert client.refusal("dcgmGetAllDevices") == UNINITIALIZED
    assert stub.count("watches") == 0


def test_an_embedded_engine_may_not_start(stub: Stub) -> None:
    stub.say("embedded -7")
    _run(stub, 0)
    stub.connect()
    with pytest.raises(stub.structs.DCGMError) as refused:
        stub.agent.dcgmStartEmbedded(1)
    assert refused.value.value == -7


# -- 8: slow, failing and hung --


def test_a_call_can_be_slow(client: Client) -> None:
    client.stub.say("sleep dcgmGetAllDevices 30")
    _run(client.stub, 0)
    before = time.monotonic()
    client.dcgmGetAllDevices()
    assert time.monotonic() - before >= 0.03


def test_a_call_can_fail_as_a_whole_or_on_one_gpu(client: Client) -> None:
    client.stub.say("error dcgmGetAllDevices -3", "gpu 1 error dcgmGetDeviceAttributes -8")
    _run(client.stub, 0)
    assert client.refusal("dcgmGetAllDevices") == -3
    assert client.refusal("dcgmGetDeviceAttributes", 1) == -8
    assert client.dcgmGetDeviceAttributes(0).identifiers.deviceName == "NVIDIA H100 80GB HBM3"


def test_a_request_to_a_hung_engine_times_out_and_the_connection_lives(client: Client) -> None:
    client.stub.say("engine hung 5")
    _run(client.stub, 0)
    assert client.refusal("dcgmGetAllDevices") == TIMEOUT
    client.stub.unsay("engine hung 5")
    _run(client.stub, 0)
    assert client.dcgmGetAllDevices() == [0, 1]


def test_a_request_waits_until_the_engine_answers_again_and_blocks_nobody_else(client: Client) -> None:
    client.stub.say("engine hung")
    _run(client.stub, 0)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.dcgmGetAllDevices()))
    waiting.start()
    while not client.stub.calls("dcgmGetAllDevices"):
        pass
    assert answers == []
    client.stub.unsay("engine hung")
    _run(client.stub, 0)
    waiting.join()
    assert answers == [[0, 1]]


def test_connecting_to_a_hung_engine_gives_a_handle_that_is_dead(stub: Stub) -> None:
    """E13."""
    stub.say("engine hung 5")
    _run(stub, 0)
    client = Client(stub)
    stub.unsay("engine hung 5")
    _run(stub, 0)
    assert client.refusal("dcgmGetAllDevices") == DEAD


# -- 9: GPUs that go --


def test_a_lost_gpu_stays_listed_and_says_blank(client: Client) -> None:
    groups = client.watch(POWER, GR, UTIL, entities=((GPU, 0), (GPU, 1)))
    _run(client.stub, 3)
    client.stub.say("gpu 0 lost")
    _run(client.stub, 1)
    assert client.dcgmGetAllDevices() == [0, 1]
    assert [client.status(gpu) for gpu in (0, 1)] == [4, 1]
    assert [client.value(field) for field in (POWER, GR, UTIL)] == [FP64_BLANK, FP64_BLANK, INT64_BLANK]
    assert client.latest(POWER, live=True)[0].status == LOST
    assert client.refusal("group", (GPU, 0)) == LOST
    assert {seen.entity for seen in client.since(groups)} == {(GPU, 0), (GPU, 1)}
    client.stub.unsay("gpu 0 lost")
    _run(client.stub, 1)
    assert client.value(POWER) == 500


def test_a_gpu_that_was_lost_before_it_said_anything_ends_the_call_for_all(client: Client) -> None:
    client.stub.say(f"late {POWER} 0", "gpu 0 stuck")
    _run(client.stub, 0)
    groups = client.watch(POWER, entities=((GPU, 0), (GPU, 1)))
    client.stub.say("gpu 0 lost")
    _run(client.stub, 1)
    assert client.refusal("since", groups) == LOST
    assert client.heard == []
    assert client.latest(POWER)[0].status == LOST


def test_a_detached_gpu_is_not_listed_and_an_unsupported_one_refused(client: Client) -> None:
    client.stub.say("count 4", "gpu 1 detached", "gpu 2 unsupported", "gpu 3 gone")
    _run(client.stub, 0)
    assert client.dcgmGetAllDevices() == [0, 2]
    assert client.dcgmGetAllSupportedDevices() == [0]
    assert list(client.dcgmGetEntityGroupEntities(GPU, 1)) == [0]
    assert [client.status(gpu) for gpu in range(4)] == [1, 7, 2, 0]
    assert [client.refusal("group", (GPU, gpu)) for gpu in (1, 2, 3)] == [BADPARAM, -22, BADPARAM]


def test_the_number_of_gpus_can_change(client: Client) -> None:
    assert client.dcgmGetAllDevices() == [0, 1]
    client.stub.say("count 8")
    _run(client.stub, 1)
    assert len(client.dcgmGetAllDevices()) == 8
    assert client.value(UUID, entity=(GPU, 7), live=True) == "GPU-00000000-0000-0000-0000-000000000007"


def test_a_gpu_can_stop_being_sampled_without_a_word(client: Client) -> None:
    groups = client.watch(POWER)
    client.stub.say("gpu 0 stuck")
    _run(client.stub, 5)
    assert [seen.at for seen in client.since(groups)] == [0]
    assert client.value(POWER) == 500


# -- 10: MIG --


def test_the_hierarchy_lists_instances_with_their_compute_instances(client: Client) -> None:
    client.stub.say("gpu 1 mig 1g.10gb 3g.40gb/2 2g.20gb/0")
    _run(client.stub, 0)
    hierarchy = client.dcgmGetGpuInstanceHierarchy()
    rows = [
        (row.entity.entityGroupId, row.entity.entityId, row.parent.entityId, row.info.nvmlProfileSlices)
        for row in hierarchy.entityList[: hierarchy.count]
    ]
    assert rows == [
        (INSTANCE, 8, 1, 1),
        (COMPUTE, 8, 8, 1),
        (INSTANCE, 9, 1, 3),
        (COMPUTE, 9, 9, 1),
        (COMPUTE, 10, 9, 1),
        (INSTANCE, 10, 1, 2),
    ]
    first = hierarchy.entityList[0].info
    assert (first.gpuUuid, first.nvmlGpuIndex, first.nvmlInstanceId) == (
        "GPU-00000000-0000-0000-0000-000000000001",
        1,
        7,
    )
    assert list(client.dcgmGetEntityGroupEntities(INSTANCE, 0)) == [8, 9, 10]
    assert client.value(67, entity=(GPU, 1), live=True) == 1
    assert client.value(67, live=True) == 0


def test_more_instances_than_a_question_has_room_for_are_an_error(client: Client) -> None:
    client.stub.say("count 16", *(f"gpu {gpu} mig {' '.join(['1g.10gb'] * 7)}" for gpu in range(10)))
    _run(client.stub, 0)
    assert client.refusal("dcgmGetEntityGroupEntities", INSTANCE, 0) == -31
    assert client.dcgmGetGpuInstanceHierarchy().count == 140


def test_instances_have_ratios_of_their_own(client: Client) -> None:
    client.stub.say("gpu 0 mig 1g.10gb 3g.40gb", "gpu 0 instance 0 tensor 5", "gpu 0 instance 1 tensor 25")
    _run(client.stub, 0)
    client.watch(TENSOR, DRAM, entities=((INSTANCE, 0), (INSTANCE, 1)))
    _run(client.stub, 3)
    assert [client.value(TENSOR, entity=(INSTANCE, k)) for k in (0, 1)] == pytest.approx([0.05, 0.25])
    assert client.value(250, entity=(INSTANCE, 1), live=True) == 40 * 1024


def test_what_an_instance_does_not_have_is_no_data_or_not_supported(client: Client) -> None:
    client.stub.say("gpu 0 mig 1g.10gb")
    _run(client.stub, 0)
    client.watch(PCIE_TX, NVLINK_TX, UTIL, entities=((INSTANCE, 0),))
    _run(client.stub, 3)
    assert [seen.status for seen in client.latest(PCIE_TX, NVLINK_TX, entity=(INSTANCE, 0))] == [NO_DATA] * 2
    assert client.value(UTIL, entity=(INSTANCE, 0)) == INT64_BLANK + 2


def test_an_instance_without_compute_instances_has_no_profiling(client: Client) -> None:
    client.stub.say("gpu 0 mig 1g.10gb/0")
    _run(client.stub, 0)
    groups = client.watch(GR, entities=((INSTANCE, 0),))
    _run(client.stub, 3)
    assert client.since(groups) == []


def test_mig_devices_have_names_and_attributes(client: Client) -> None:
    client.stub.say("gpu 0 mig 3g.40gb")
    _run(client.stub, 0)
    names = [client.value(68, entity=(kind, 0), live=True) for kind in (GPU, INSTANCE, COMPUTE)]
    assert names[0].startswith("GPU-")
    assert len(set(names)) == 3
    assert all(name.startswith("MIG-") for name in names[1:])
    pair = client.stub.structs.c_dcgmGroupEntityPair_t(COMPUTE, 0)
    (raw,) = client.dcgmEntitiesGetLatestValues([pair], [75], 1)
    told = client.stub.structs.c_dcgmDeviceMigAttributes_v1.from_buffer_copy(bytes(map(_unsigned, raw.value.blob)))
    assert (told.migAttributesInfo.gpuInstanceSliceCount, told.migAttributesInfo.memorySizeMB) == (3, 40 * 1024)


def _unsigned(byte: int) -> int:
    return byte % 256


def test_a_new_layout_ends_the_watches_of_the_old(client: Client) -> None:
    client.stub.say("gpu 0 mig 1g.10gb")
    _run(client.stub, 0)
    groups = client.watch(GR, entities=((INSTANCE, 0),))
    _run(client.stub, 3)
    assert client.since(groups) != []
    client.stub.say("gpu 0 mig 3g.40gb 3g.40gb")
    _run(client.stub, 1)
    assert client.refusal("since", groups) == NOT_WATCHED
    client.dcgmWatchFields(*groups, S, 60.0, 0)
    _run(client.stub, 3)
    assert client.value(GR, entity=(INSTANCE, 0)) == pytest.approx(0.9)


# -- 11: errors, counters, health --


def test_an_xid_is_an_event_with_its_own_time_that_stays(client: Client) -> None:
    groups = client.watch(XID)
    _run(client.stub, 2)
    assert client.since(groups) == []
    client.stub.say("gpu 0 xid 79")
    _run(client.stub, 0.25)
    client.latest(XID)
    _run(client.stub, 10)
    assert client.since(groups) == [Seen((GPU, 0), XID, 2_250_000, 0, 79)]
    client.stub.say("gpu 0 xid 79 1")
    _run(client.stub, 1)
    assert [seen.value for seen in client.since(groups)] == [79, 79]
    assert client.value(XID, live=True) == INT64_BLANK


def test_energy_and_cumulative_counters_integrate_their_rates(client: Client) -> None:
    client.stub.say("knows 1084", "knows 1085", "knows 1091", "gpu 0 energy 5000")
    _run(client.stub, 0)
    client.watch(ENERGY, 1084, 1085, 1091)
    client.stub.unsay("gpu 0 energy 5000")
    before = [client.value(field) for field in (ENERGY, 1084, 1085, 1091)]
    assert before[0] == 5000
    client.stub.say("gpu 0 power 300", "gpu 0 sm 50")
    _run(client.stub, 4)
    energy, elapsed, active, sent = (
        client.value(f) - b for f, b in zip((ENERGY, 1084, 1085, 1091), before, strict=True)
    )
    assert energy == 4 * 300_000
    assert active / elapsed == pytest.approx(0.5)
    assert sent == 400 << 20


@pytest.mark.parametrize("field", [1084, 1096, 1425, 1523])
def test_older_versions_do_not_know_the_newer_fields(client: Client, field: int) -> None:
    assert client.latest(field)[0].status == UNKNOWN_FIELD
    assert client.refusal("field_group", field) == BADPARAM
    client.stub.say(f"knows {field}", f"lacks {UTIL}")
    _run(client.stub, 0)
    client.watch(field)
    assert client.latest(UTIL)[0].status == UNKNOWN_FIELD


HEALTH = {
    "ecc_sbe": 310, "ecc_dbe": 311, "remap_failure": 395, "remap_pending": 396, "nvlink_flit": 409, "nvlink_data": 419,
    "nvlink_replay": 429, "nvlink_recovery": 439, "reasons": 112, "temp": 150, "memory_temp": 140, "margin": 153,
    "slowdown": 158, "sm_clock": 100, "util": 203, "fb_total": 250, "fb_used": 252, "fb_reserved": 253,
    "recovery": 1523, "smoothing": 1425, "virtual": 500, "slices": 69,
}  # fmt: skip


@pytest.mark.parametrize(("key", "field"), HEALTH.items())
def test_every_figure_can_be_told(client: Client, key: str, field: int) -> None:
    client.stub.say("knows 1523", "knows 1425", f"gpu 0 {key} 7", "gpu 1 field 310 9")
    _run(client.stub, 0)
    assert client.value(field, live=True) == 7
    assert client.value(310, entity=(GPU, 1), live=True) == 9


def test_a_board_is_told_apart_by_name_index_uuid_and_pci(client: Client) -> None:
    client.stub.say("gpu 1 name NVIDIA A100-SXM4-80GB", "gpu 1 pci 20B210DE", "gpu 1 uuid GPU-x", "gpu 1 limit 400.5")
    _run(client.stub, 0)
    told = [client.value(field, entity=(GPU, 1), live=True) for field in (NAME, 52, UUID, 58, 164)]
    assert told == ["NVIDIA A100-SXM4-80GB", 1, "GPU-x", 0x20B210DE, 400.5]


def test_without_a_script_the_world_runs_on_the_real_clock(client: Client) -> None:
    client.stub.script.write_text("count 1\n")
    client.watch(POWER, us=1000)
    before = time.time_ns() // 1000
    while client.latest(POWER)[0].at + START_US < before:
        pass
    assert client.value(POWER) == 500


def test_a_typing_error_in_the_script_ends_the_process(bindings: Path, tmp_path: Path, stub: Stub) -> None:
    script = tmp_path / "wrong"
    script.write_text("gpu 0 tensr 5\n")
    code = (
        f"import sys; sys.path[:0] = [{str(bindings)!r}]; import dcgm_structs as s; s._dcgmInit({str(stub.folder)!r})"
    )
    code += "; import dcgm_agent; dcgm_agent.dcgmInit()"
    environment = {**os.environ, "DCGM_STUB_SCRIPT": str(script)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert "unknown key in the script: gpu 0 tensr 5" in done.stderr


def test_any_program_meets_the_stand_in_by_the_folder_of_its_bindings(tmp_path: Path, stub: Stub) -> None:
    folder = unpack(tmp_path / "bindings", library=stub.folder)
    code = "import pydcgm; print(pydcgm.DcgmHandle(ipAddress='localhost').GetSystem().discovery.GetAllGpuIds())"
    environment = {name: value for name, value in os.environ.items() if name != "DCGM_STUB_SCRIPT"}
    environment["PYTHONPATH"] = str(folder)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1]"
