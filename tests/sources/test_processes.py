"""Tests the driver's process list with a source that has none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.core.model import SECOND, Device, Process, Reading
from exporter.sources.base import ReadResult, SourceError, SourceWithProcesses, TelemetrySource, with_processes
from exporter.sources.nvml.source import ProcessList, open_nvml_processes
from tests.sources.conformance import START
from tests.sources.nvml_rig import LOST, NOT_SUPPORTED, TIMEOUT, NvmlRig, rigged


class Plain:
    """A source of two GPUs without processes."""

    name = "dcgm"
    signals = frozenset({"gr_engine_active"})

    def __init__(self, *uuids: str) -> None:
        self.uuids, self.told = uuids, list[str]()

    def read(self, now: int) -> ReadResult:
        devices = tuple(Device(uuid) for uuid in self.uuids)
        return ReadResult(devices, tuple(Reading(uuid, now - SECOND, now, gr_engine_active=0.5) for uuid in self.uuids))

    def resync(self) -> None:
        self.told.append("resync")

    def pause(self) -> None:
        self.told.append("pause")

    def close(self) -> None:
        self.told.append("close")


class Listed:
    def __init__(self, **by_uuid: tuple[Process, ...]) -> None:
        self.by_uuid, self.closed, self.broken = by_uuid, False, ""

    def __call__(self) -> dict[str, tuple[Process, ...]]:
        if self.broken:
            raise SourceError(self.broken)
        return self.by_uuid

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    yield from rigged(tmp_path, monkeypatch)


def test_readings_say_who_is_there_and_that_nobody_is() -> None:
    source = SourceWithProcesses(Plain("a", "b", "c"), Listed(a=(Process(7),), b=()))
    found = {reading.uuid: reading.processes for reading in source.read(SECOND).readings}
    assert found == {"a": (Process(7),), "b": (), "c": None}
    assert source.signals == {"gr_engine_active", "processes"}


def test_what_a_source_says_itself_is_left_alone() -> None:
    class Knows(Plain):
        def read(self, now: int) -> ReadResult:
            batch = super().read(now)
            return replace(batch, readings=tuple(replace(one, processes=()) for one in batch.readings))

    (reading,) = SourceWithProcesses(Knows("a"), Listed(a=(Process(7),))).read(SECOND).readings
    assert reading.processes == ()


def test_without_the_list_the_readings_come_without_it_and_it_is_told() -> None:
    listing = Listed(a=())
    listing.broken = "the driver is gone"
    batch = SourceWithProcesses(Plain("a"), listing).read(SECOND)
    assert [reading.processes for reading in batch.readings] == [None]
    assert [(fault.kind, fault.message) for fault in batch.faults] == [("processes_unseen", "the driver is gone")]


def test_everything_else_is_the_sources() -> None:
    inner, listing = Plain("a"), Listed()
    source = SourceWithProcesses(inner, listing)
    source.resync()
    source.pause()
    source.close()
    assert inner.told == ["resync", "pause", "close"]
    assert (source.name, listing.closed) == ("dcgm", True)


def test_where_there_is_no_list_or_no_need_of_one_the_source_is_left_as_it_is() -> None:
    def none() -> Listed:
        raise SourceError("no driver library")

    plain: TelemetrySource = Plain("a")
    assert with_processes(plain, none) is plain
    seen = with_processes(plain, Listed)
    assert seen is not plain
    assert with_processes(seen, Listed) is seen


def test_the_drivers_list_by_gpu(rig: NvmlRig) -> None:
    rig.say("gpu 1 idle", "gpu 2 idle", "gpu 2 process 4711 1024")
    rig.run(rig.now)
    listing = open_nvml_processes()
    listed = listing()
    listing.close()
    by_gpu = {int(uuid[-1]): [(each.pid, each.memory_bytes) for each in found] for uuid, found in listed.items()}
    assert (by_gpu[1], by_gpu[2]) == ([], [(4711, 1024)])
    assert rig.held()[2] == 0


@pytest.fixture
def shared(rig: NvmlRig) -> Iterator[ProcessList]:
    """The list for a rig in which processes 1 and 2 share GPU 0, and only process 1 is active."""
    rig.say("gpu 0 idle", "gpu 0 process 1", "gpu 0 process 2", "gpu 0 use 1 60")
    rig.run(START)
    listing = open_nvml_processes()
    yield listing
    listing.close()


def used(rig: NvmlRig, listing: ProcessList, second: float) -> dict[int, float | None]:
    """List at `second`, and return each process's use of GPU 0 by pid."""
    rig.run(START + int(second * SECOND))
    (found,) = (found for uuid, found in listing().items() if uuid.endswith("-000000000000"))
    return {each.pid: each.sm_active for each in found}


def test_several_on_one_gpu_have_their_shares_since_the_last_time(rig: NvmlRig, shared: ProcessList) -> None:
    assert used(rig, shared, 0) == {1: None, 2: None}
    rig.say("gpu 0 use 2 20")
    assert used(rig, shared, 1) == {1: 0.6, 2: 0.2}
    rig.unsay("gpu 0 use 1 60")
    assert used(rig, shared, 2) == {1: 0.0, 2: 0.2}


def test_shares_reach_the_readings(rig: NvmlRig, shared: ProcessList) -> None:
    uuid = "GPU-5700b000-0000-0000-0000-000000000000"
    source = SourceWithProcesses(Plain(uuid), shared)
    source.read(START)
    rig.run(START + SECOND)
    (reading,) = source.read(START + SECOND).readings
    assert [each.sm_active for each in reading.processes or ()] == [0.6, 0.0]


def test_one_alone_is_not_asked_about_and_begins_anew_in_company(rig: NvmlRig, shared: ProcessList) -> None:
    used(rig, shared, 0)
    rig.unsay("gpu 0 process 2")
    asked = rig.calls("nvmlDeviceGetProcessUtilization")
    assert used(rig, shared, 1) == {1: None}
    assert rig.calls("nvmlDeviceGetProcessUtilization") == asked
    rig.say("gpu 0 process 2")
    assert used(rig, shared, 2) == {1: None, 2: None}
    assert used(rig, shared, 3) == {1: 0.6, 2: 0.0}


def test_a_gpu_that_has_no_shares_is_asked_once_while_it_is_shared(rig: NvmlRig, shared: ProcessList) -> None:
    calls = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")
    refusals = [f"gpu 0 error {call} {NOT_SUPPORTED}" for call in calls]
    rig.say(*refusals)
    for second in (0, 1, 2):
        assert used(rig, shared, second) == {1: None, 2: None}
    assert [rig.calls(call) for call in calls] == [1, 1]
    rig.unsay(*refusals, "gpu 0 process 2")
    used(rig, shared, 3)
    rig.say("gpu 0 process 2")
    used(rig, shared, 4)
    assert used(rig, shared, 5) == {1: 0.6, 2: 0.0}


def test_shares_that_could_not_be_had_cost_nothing_else(rig: NvmlRig, shared: ProcessList) -> None:
    used(rig, shared, 0)
    rig.say(f"error nvmlDeviceGetProcessUtilization {TIMEOUT}")
    assert used(rig, shared, 1) == {1: None, 2: None}
    rig.unsay(f"error nvmlDeviceGetProcessUtilization {TIMEOUT}")
    assert used(rig, shared, 2) == {1: None, 2: None}
    assert used(rig, shared, 3) == {1: 0.6, 2: 0.0}


def test_instances_have_no_shares(rig: NvmlRig, shared: ProcessList) -> None:
    rig.say("gpu 0 mig 3g.40gb:2", "gpu 0 gi 2 process 8")
    rig.run(START)
    assert sorted(len(found) for found in shared().values()) == [0, 1, 1, 2, 2]
    assert rig.calls("nvmlDeviceGetProcessUtilization") == 0


def test_a_gpu_in_trouble_shows_none_and_the_others_do(rig: NvmlRig) -> None:
    rig.say("gpu 0 lost", f"gpu 1 error nvmlDeviceGetMigMode {LOST}")
    rig.run(rig.now)
    listing = open_nvml_processes()
    assert sorted(int(uuid[-1]) for uuid in listing()) == [1, 2]
    listing.close()


def test_a_driver_that_is_gone_is_an_error_that_says_so(rig: NvmlRig) -> None:
    listing = open_nvml_processes()
    rig.say("driver gone")
    rig.run(rig.now)
    with pytest.raises(SourceError, match="process list could not be read"):
        listing()
    with pytest.raises(SourceError, match="is not available"):
        open_nvml_processes()
    listing.close()


def test_instances_are_named_as_the_sources_name_them(rig: NvmlRig) -> None:
    rig.say("gpu 0 mig 3g.40gb 1g.10gb")
    rig.open()
    batch = rig.read(0)
    listing = open_nvml_processes()
    listed = listing()
    listing.close()
    board, *parts = [device for device in batch.devices if device.index.split(":")[0] == "0"]
    assert listed[board.uuid] == ()
    assert all(listed[part.uuid] for part in parts)
    assert len(parts) == 2
