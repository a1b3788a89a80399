"""What a real host engine does to its clients, each first a law of the stand-in: seen on DCGM 4.6 with eight H100s."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from exporter.core.model import SECOND
from exporter.sources.base import SourceError
from exporter.sources.dcgm.connection import connect
from exporter.sources.selector import SourceSelector
from tests.dcgm_stub.client import COMPUTE, GPU, Client, Seen
from tests.sources.conformance import START
from tests.sources.dcgm_rig import ADDRESS, DcgmRig, gpu_of, kinds, rigged, unpacked

NOT_SUPPORTED = -6


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


def an_engine(rig: DcgmRig) -> Client:
    """Another client of the engine, which sees what it says."""
    rig.stub.unsay("listen /tests/engine")
    rig.stub.run(rig.stub.now)
    return Client(rig.stub)


FACTS = {
    "E1": "the engine's UUID of a MIG instance is the driver's, its name for CUDA is its own",
    "E2": "an engine that lost the driver lists all GPUs, has no value, and forgets events, until it is restarted",
    "E3": "of several Xids between two questions each is kept",
    "E4": "the latest values are one request, the values since a moment one for each field and entity",
    "E5": "the stamps of one cycle lie apart, in any order",
    "E6": "each sample of a counter that the driver lacks writes a line to the engine's log",
    "E7": "the driver's utilization is the mean of a window of its own, and may be 0 beside busy counters",
    "E8": "where another client watches, a sample may be younger than its stamp says",
    "E9": "profiling of boards with GPM cannot be paused, and goes on",
    "E10": "a board that is bound anew is blank for seconds and gives all boards new indices",
    "E11": "a board whose driver calls fail is listed as usable, without values",
    "E12": "a board that answers slowly holds up the values of all, and every live question",
    "E13": "who listens and answers nothing holds up a connection far beyond its timeout",
    "E14": "an engine that was killed may be back at once",
}
"""Seen on a real engine; the docstring of a law of the stand-in begins with its number."""


def test_each_fact_about_a_real_engine_is_a_law_of_the_stand_in() -> None:
    texts = (path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_dcgm*.py"))
    assert {name for text in texts for name in re.findall(r'^    """(E\d+)[.:]', text, re.MULTILINE)} == {*FACTS}


BOTH = ((GPU, 0), (GPU, 1))


def known(client: Client) -> set[tuple[int, int]]:
    """Each GPU and field with a value, of those that are sampled and of those that are asked of the driver."""
    seen = [one for entity in BOTH for one in client.latest(230, *FIELDS_OF_A_BOARD, entity=entity)]
    seen += [one for entity in BOTH for one in client.latest(*NAMES_OF_A_BOARD, entity=entity, live=True)]
    values = [one for one in seen if one.status == 0 and one.value != "<<<NULL>>>"]
    return {(one.entity[1], one.field) for one in values if not isinstance(one.value, float | int) or one.value < 2**46}


# -- MIG instances have the driver's names --


def test_an_engines_name_for_cuda_is_not_the_drivers_and_its_uuid_is(closed: DcgmRig) -> None:
    """E1."""
    closed.say("gpu 0 mig 3g.40gb 2g.20gb")
    client = an_engine(closed)
    visible = client.value(68, entity=(COMPUTE, 1), live=True)
    assert visible.startswith("MIG-GPU-00000000-")
    assert visible.count("/") == 2
    assert client.value(54, entity=(COMPUTE, 1), live=True) == "MIG-00000000-0000-0000-0005-000000000001"


def test_an_instance_is_known_by_the_drivers_uuid(closed: DcgmRig) -> None:
    """The scheduler's and CUDA's name of it; the engine's own is found on no device."""
    closed.say("gpu 0 mig 3g.40gb 2g.20gb")
    closed.open()
    parts = [device.uuid for device in closed.read(0).devices if device.parent]
    assert parts == [f"MIG-00000000-0000-0000-0005-00000000000{number}" for number in (0, 1)]


def test_where_the_engine_gives_no_uuid_cudas_name_is_taken_unless_it_is_the_engines_own(closed: DcgmRig) -> None:
    closed.say("gpu 0 mig 3g.40gb", "gpu 0 instance 0 blank 54 not_supported")
    closed.open()
    (part,) = [device.uuid for device in closed.read(0).devices if device.parent]
    assert part == "GPU-00000000-0000-0000-0000-000000000000/1"


# -- an engine that went blind --


@pytest.mark.parametrize("stands", [True, False])
def test_a_blind_engine_has_no_value_of_any_field_and_tells_no_xid_until_another_answers(
    closed: DcgmRig, *, stands: bool
) -> None:
    """E2."""
    client = an_engine(closed)
    client.watch(230, *FIELDS_OF_A_BOARD, entities=BOTH)

    closed.stub.run(closed.stub.now + 5_000_000)
    every = {(gpu, field) for gpu in (0, 1) for field in (*FIELDS_OF_A_BOARD, *NAMES_OF_A_BOARD)}
    assert known(client) == every
    closed.say("engine blind", "gpu 1 xid 119 1")
    closed.stub.run(closed.stub.now + 5_000_000)
    assert client.dcgmGetAllDevices() == [0, 1]
    assert known(client) == set()
    if not stands:
        closed.unsay("engine blind")
    closed.stub.run(closed.stub.now + 5_000_000)
    assert known(client) == set()
    closed.stub.restart()
    client = Client(closed.stub)
    client.watch(230, *FIELDS_OF_A_BOARD, entities=BOTH)
    closed.stub.run(closed.stub.now + 5_000_000)
    assert known(client) == every


def test_a_blind_engine_is_named_with_what_to_do(rig: DcgmRig) -> None:
    rig.readings(0, 1, 2)
    rig.say("engine blind", "gpu 1 xid 119 1")
    for second in (3, 4, 5):
        assert kinds(rig.read(second)) == set()
    with pytest.raises(SourceError, match=r"lists 2 GPUs .*systemctl restart nvidia-dcgm"):
        rig.read(6)


def test_a_blind_engine_gives_no_devices_without_a_name(closed: DcgmRig) -> None:
    """They would be booked as other GPUs, and the file of the known ones would be emptied."""
    closed.say("engine blind")
    with pytest.raises(SourceError, match="names none of them"):
        closed.open()
    assert closed.stub.count("connections") == 1  # until it is closed: `open_dcgm` does


def test_a_gpu_whose_driver_calls_fail_is_listed_and_has_no_value(closed: DcgmRig) -> None:
    """E11."""
    client = an_engine(closed)
    client.watch(*FIELDS_OF_A_BOARD, entities=BOTH)
    closed.say("gpu 0 failing")
    closed.stub.run(closed.stub.now + 5_000_000)
    assert client.dcgmGetAllDevices() == [0, 1]
    assert known(client) == {(1, field) for field in (*FIELDS_OF_A_BOARD, *NAMES_OF_A_BOARD)}


def test_one_blind_gpu_is_named_and_the_others_go_on(rig: DcgmRig) -> None:
    rig.readings(0, 1, 2)
    rig.say("gpu 0 failing")
    quiet = [rig.read(second) for second in (3, 4)]
    assert {kind for batch in quiet for kind in kinds(batch)} == set()
    batches = [rig.read(second) for second in range(5, 12)]
    (fault,) = batches[-1].faults
    assert (fault.kind, gpu_of(fault.uuid)) == ("blank", 0)
    assert "its driver calls fail" in fault.message
    assert {gpu_of(r.uuid) for batch in batches for r in batch.readings if r.tensor_active is not None} == {1}
    rig.unsay("gpu 0 failing")
    assert [kinds(rig.read(second)) for second in range(12, 15)][-1] == set()


NAMES_OF_A_BOARD = (50, 52, 54, 57, 67)
FIELDS_OF_A_BOARD = (
    *(100, 112, 150, 155, 156, 164, 203, 206, 207, 250, 252, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008),
    *(1009, 1010, 1011, 1012, 1016),
)


def test_a_gpu_without_a_name_beside_others_is_not_lost(closed: DcgmRig) -> None:
    """What was known of it stays: only its getters fail."""
    closed.open()
    closed.readings(0, 1)
    closed.say("gpu 0 blank 54 blank", "gpu 0 blank 52 blank", "gpu 0 blank 67 blank")
    batch = [closed.read(second) for second in range(2, 14)][-1]
    assert [device.index for device in batch.devices] == ["0", "1"]
    assert not any(device.uuid.startswith("unknown") for device in batch.devices)


def test_a_gpu_that_answers_slowly_delays_the_values_of_all_and_every_live_question(closed: DcgmRig) -> None:
    """E12."""
    ms = 1000
    client = an_engine(closed)
    groups = client.watch(155, 1004, entities=((GPU, 0), (GPU, 1)), us=20 * ms)

    def gaps() -> list[int]:
        """Milliseconds between two values of GPU 0 in half a second."""
        begin = closed.stub.now
        closed.stub.run(begin + 500 * ms)
        stamps = [one.at for one in client.since(groups, begin) if one.entity == (GPU, 0) and one.field == 155]
        return [round((two - one) / ms) for one, two in pairwise(stamps)]

    def waited(gpu: int) -> float:
        began = time.monotonic()
        client.value(150, entity=(GPU, gpu), live=True)
        return time.monotonic() - began

    assert set(gaps()) == {20}
    closed.say("gpu 1 slow 50")
    assert set(gaps()) <= {50, 60}
    assert len(client.since(groups)) > 0
    assert waited(1) >= 0.05
    others = []
    for _ in range(6):
        closed.stub.run(closed.stub.now + 10 * ms)
        others.append(waited(0))
    assert max(others) >= 0.03
    closed.unsay("gpu 1 slow 50")
    gaps()
    assert set(gaps()) == {20}


def test_the_gpu_whose_slow_calls_hold_up_the_others_is_named(closed: DcgmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has one loop for all GPUs. The stand-in sleeps for each field, so it sleeps less than a sick GPU."""
    monkeypatch.setattr("exporter.sources.dcgm.source._SLOW_SECONDS", 0.02)
    closed.say("count 4")
    closed.open()
    closed.readings(0, 1, 2)
    closed.say("gpu * stuck")
    closed.read(3)
    closed.say("gpu 2 sleep dcgmEntitiesGetLatestValues 40")
    messages = {gpu_of(fault.uuid): fault.message for fault in closed.read(9).faults}
    assert messages.keys() == {0, 1, 2, 3}
    assert all("GPU 2 (GPU-00000000-0000-0000-0000-000000000002) takes" in message for message in messages.values())


# -- every Xid --


def test_the_engine_keeps_every_xid_between_two_reads(closed: DcgmRig) -> None:
    """E3."""
    client = an_engine(closed)
    groups = client.watch(230, keep=600.0)
    closed.say("gpu 0 xid 79 1", "gpu 0 xid 154 2")
    closed.stub.run(closed.stub.now + 1_000_000)
    assert [seen.value for seen in client.since(groups)] == [79, 154]
    assert client.value(230) == 154


def test_every_xid_between_two_reads_is_counted(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 0 xid 79 1", "gpu 0 xid 120 2", "gpu 0 xid 154 3")
    heard = [health.xids for second in (2, 3, 4) for health in rig.read(second).health if health.xids]
    assert heard == [(79, 120, 154)]


def test_an_xid_that_the_driver_and_the_kernels_log_report_is_one(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 0 xid 79 1", "gpu 0 xid 79 2", "gpu 0 xid 31 3", "gpu 0 xid 31 4")
    heard = [xid for second in (2, 3) for health in rig.read(second).health for xid in health.xids]
    assert heard == [79, 31, 31]
    rig.say("gpu 0 xid 79 5")
    heard = [xid for second in (30, 31) for health in rig.read(second).health for xid in health.xids]
    assert heard == [79]


# -- what a read costs --


def test_the_latest_values_of_many_fields_are_one_request_and_those_since_a_time_one_each(closed: DcgmRig) -> None:
    """E4."""
    client = an_engine(closed)
    groups = client.watch(1001, 1004, entities=((GPU, 0), (GPU, 1)))
    closed.stub.run(closed.stub.now + 1_000_000)
    before = closed.stub.count("requests")
    client.latest(1001, 1004)
    assert closed.stub.count("requests") == before + 1
    client.since(groups)
    assert closed.stub.count("requests") == before + 5


def test_a_read_of_eight_gpus_asks_once_unless_a_value_would_be_missed(closed: DcgmRig) -> None:
    closed.say("count 8", "gpu * tensor 40")
    closed.open()
    closed.readings(*range(10))
    before = closed.stub.count("requests")
    readings = closed.readings(*range(10, 30))
    # One for the values of all; the health of all every ten seconds, with the inventory.
    assert closed.stub.count("requests") - before <= 20 + 3 * 3
    assert all(one.end == two.start for one, two in pairwise(readings))
    closed.say("gpu * tensor 80")
    late = closed.readings(32)  # three values at once
    assert len(late) == 3
    assert all(one.end == two.start for one, two in pairwise([*readings, *late]))


def test_another_client_that_begins_to_sample_faster_is_noticed(rig: DcgmRig) -> None:
    rig.readings(*range(10))
    rig.say("watcher 1001 100", "watcher 1004 100")
    readings = rig.readings(*range(10, 60))
    assert all(one.end == two.start for one, two in pairwise(readings))
    assert round((readings[-1].end - readings[-1].start) / SECOND, 1) == 0.1


# -- the order of what was measured together --


@pytest.mark.parametrize("scatter", [0, 46_000])
def test_the_values_of_one_cycle_are_of_one_sample_and_stamped_when_each_was_processed(
    closed: DcgmRig, scatter: int
) -> None:
    """E5."""
    second = 1_000_000
    closed.say(f"scatter {scatter}" if scatter else "")
    client = an_engine(closed)
    begin = closed.stub.now = (closed.stub.now // second + 1) * second
    closed.stub.run(begin)
    groups = client.watch(1001, 1002, 1004, keep=600.0)
    for number in range(1, 60):
        closed.stub.lines = [line for line in closed.stub.lines if not line.startswith("gpu 0")]
        closed.say(*(f"gpu 0 {key} {number}" for key in ("gr", "sm", "tensor")))
        closed.stub.run(begin + number * second + second // 10)
    cycles: dict[int, list[Seen]] = {}
    for one in client.since(groups, begin + 3 * second - 100):
        cycles.setdefault((one.at + 100) // second, []).append(one)
    assert len(cycles) > 50
    assert all(len(cycle) == 3 and len({one.value for one in cycle}) == 1 for cycle in cycles.values())
    spreads = [max(one.at for one in cycle) - min(one.at for one in cycle) for cycle in cycles.values()]
    assert max(spreads) <= max(scatter, 60) + 60
    assert max(spreads) > scatter / 2


@pytest.mark.parametrize("period", [0.1, 1.0])
def test_the_values_of_one_cycle_stay_together_however_they_are_stamped(closed: DcgmRig, period: float) -> None:
    """Tensor is active only while an SM is, and an SM only while the engine is: also in the cycle of a change."""
    closed.say("scatter 46000")
    closed.open(period=period)
    reads = round(12 / period)
    readings = []
    for number in range(reads):
        busy = number // 3 % 2
        closed.stub.lines = [line for line in closed.stub.lines if not line.startswith("gpu 0")]
        closed.say(*(f"gpu 0 {key} {level * busy}" for key, level in (("gr", 90), ("sm", 70), ("tensor", 60))))
        readings += closed.readings(number * period)
    known = [r for r in readings if r.tensor_active is not None]
    assert len(known) > reads / 2
    for reading in known:
        assert (reading.tensor_active or 0) <= (reading.sm_active or 0) + 1e-9
        assert (reading.sm_active or 0) <= (reading.gr_engine_active or 0) + 1e-9


# -- counters that the driver does not have --


def test_the_engine_writes_a_line_for_each_sample_of_a_counter_that_its_driver_lacks(closed: DcgmRig) -> None:
    """E6."""
    closed.say("gpu 0 blank 1008 blank")
    client = an_engine(closed)
    client.watch(1008)
    before = closed.stub.count("errors_logged")
    closed.stub.run(closed.stub.now + 10_000_000)
    assert closed.stub.count("errors_logged") == before + 10
    client.latest(1016)  # watched by nobody
    assert closed.stub.count("errors_logged") == before + 11


def test_a_counter_that_stays_blank_is_given_up_and_asked_for_again_an_hour_later(closed: DcgmRig) -> None:
    closed.say("gpu * blank 1008 blank")
    closed.open()
    closed.readings(*range(90))
    before = closed.stub.count("errors_logged")
    readings = closed.readings(*range(90, 120))
    assert closed.stub.count("errors_logged") == before
    assert all(reading.tensor_active is not None and reading.fp16_active is None for reading in readings)
    closed.unsay("gpu * blank 1008 blank")
    assert all(reading.fp16_active is None for reading in closed.readings(*range(120, 140)))
    closed.readings(*range(3600, 3700, 5))
    assert closed.readings(3701, 3702, 3703)[-1].fp16_active == pytest.approx(0.05)


@pytest.mark.parametrize("older", [True, False])
def test_the_end_of_one_profiling_watch_ends_all_of_its_group_before_hopper(closed: DcgmRig, *, older: bool) -> None:
    """The profiling module, which samples older boards, is told the group alone; it is so after a refused watch too."""
    closed.say(f"gpu * gpm {int(not older)}")
    client = an_engine(closed)
    tensor, dram = client.field_group(1004), client.field_group(1005)
    both, power = client.field_group(1004, 1005), client.field_group(155)
    group = client.group((GPU, 0))

    def sampled() -> tuple[int, int]:
        """How many values of tensor activity and of power come in ten seconds."""
        before = closed.stub.now
        closed.stub.run(before + 10_000_000)
        return len(client.since((group, tensor), before + 1)), len(client.since((group, power), before + 1))

    for fields in (both, power):
        client.dcgmWatchFields(group, fields, 1_000_000, 60.0, 0)
    assert sampled() == (10, 10)
    client.dcgmUnwatchFields(group, dram)
    assert sampled() == ((0 if older else 10), 10)
    client.dcgmWatchFields(group, both, 1_000_000, 60.0, 0)
    assert sampled() == (10, 10)
    closed.say("gpu 0 error dcgmWatchFields -6")
    closed.stub.run(closed.stub.now)
    client.refusal("dcgmWatchFields", group, dram, 1_000_000, 60.0, 0)
    assert sampled() == ((0 if older else 10), 10)


def test_giving_up_a_blank_counter_leaves_the_others_sampled_before_hopper_too(closed: DcgmRig) -> None:
    closed.say("gpu * gpm 0", "gpu * blank 1007 blank")
    closed.open()
    assert seconds_with_tensor(closed, 0, 90) > 85
    before = closed.stub.count("errors_logged")
    assert seconds_with_tensor(closed, 90, 120) == 30
    assert closed.stub.count("errors_logged") == before
    closed.unsay("gpu * blank 1007 blank")
    closed.readings(*range(3600, 3700, 5), *range(3700, 3710))
    assert seconds_with_tensor(closed, 3710, 3720) == 10
    assert closed.readings(3720)[-1].fp32_active is not None


@pytest.mark.slow
def test_a_counter_that_is_refused_when_it_is_asked_for_again_leaves_the_others_sampled(
    closed: DcgmRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Another client watches counters that cannot be read together with it: no fault, for the activity is measured."""
    others = (1007, 1008, 1009, 1010, 1011)
    groups = (f"gpu * group 2 {minor} {field}" for minor, field in enumerate((1006, *others)))
    closed.say("gpu * gpm 0", "gpu * group 1 0 1001 1002 1004 1005", *groups, "gpu * blank 1006 blank")
    closed.open()
    closed.readings(*range(90))
    closed.say(*(f"watcher {field} 1000" for field in others))
    closed.unsay("gpu * blank 1006 blank")
    closed.readings(*range(3600, 3700, 5), *range(3700, 3720))
    assert seconds_with_tensor(closed, 3720, 3740) == 20
    assert kinds(closed.read(3741)) == set()
    closed.readings(*range(3750, 5000, 5))  # asked for again, and refused, every ten minutes
    lines = [record.getMessage() for record in caplog.records if "does not give fp64_active" in record.getMessage()]
    assert [gpu_of(line.partition("(")[2].partition(")")[0]) for line in lines] == [0, 1]
    assert all("another client" in line for line in lines)


def test_links_of_a_partitioned_board_are_not_watched_and_do_not_hinder_its_activity(
    closed: DcgmRig, caplog: pytest.LogCaptureFixture
) -> None:
    """No instance has any, and the board's are shown of none; they may be refused for good, activity for a while."""
    in_use = "gpu 0 refuse 1004 -37"
    closed.say("gpu 0 mig 3g.40gb 2g.20gb", in_use, f"gpu 0 refuse 1011 {NOT_SUPPORTED}")
    closed.open()
    (fault,) = closed.read(1).faults
    assert "another program holds the counters" in fault.message
    closed.unsay(in_use)
    batches = [closed.read(second) for second in range(2, 20)]
    parts = {device.uuid for device in batches[-1].devices if device.parent}
    assert kinds(batches[-1]) == set()
    assert len(parts) == 2
    assert caplog.records == []
    assert {reading.uuid for reading in batches[-1].readings if reading.tensor_active} >= parts


def test_a_refused_watch_that_ended_all_profiling_is_retried_and_meanwhile_there_are_gauges(closed: DcgmRig) -> None:
    closed.say("gpu * gpm 0", "gpu * blank 1007 blank")
    closed.open()
    closed.readings(*range(50))
    closed.say("gpu * error dcgmWatchFields -33")
    readings = [reading for second in range(50, 100) for reading in closed.read(second).readings]
    assert "profiling_refused" in kinds(closed.read(100))
    assert readings[-1].tensor_active is None
    assert readings[-1].gpu_utilization is not None
    closed.unsay("gpu * error dcgmWatchFields -33")
    closed.readings(*range(101, 125))
    assert seconds_with_tensor(closed, 125, 135) == 10
    assert kinds(closed.read(136)) == set()


def seconds_with_tensor(rig: DcgmRig, start: int, end: int) -> float:
    """Seconds with tensor activity that readings of so many reads, one a second, have of a GPU."""
    found = [reading for reading in rig.readings(*range(start, end)) if reading.tensor_active is not None]
    return sum(reading.end - reading.start for reading in found) / SECOND


def test_what_was_given_up_stays_so_when_the_board_is_watched_anew_and_comes_back_in_its_hour(closed: DcgmRig) -> None:
    closed.say("gpu * blank 1008 blank")
    closed.open()
    closed.readings(*range(90))
    closed.say("gpu 0 index 7")  # the driver has numbered its GPUs anew
    closed.readings(*range(90, 110))
    before = closed.stub.count("errors_logged")
    closed.readings(*range(110, 130))
    assert closed.stub.count("errors_logged") == before
    closed.unsay("gpu * blank 1008 blank")
    closed.readings(*range(3600, 3700, 5))
    assert closed.readings(3701, 3702, 3703)[-1].fp16_active == pytest.approx(0.05)


def test_nothing_is_asked_that_the_engine_would_complain_of(closed: DcgmRig) -> None:
    """Links of MIG instances, and profiling values of a board on which none are watched."""
    closed.say("count 3", "gpu 0 mig 3g.40gb 2g.20gb", f"gpu 1 profiling {NOT_SUPPORTED}")
    closed.open()
    before = closed.stub.count("errors_logged")
    batches = [closed.read(second) for second in range(12)]
    assert closed.stub.count("errors_logged") == before
    assert {gpu_of(r.uuid) for batch in batches for r in batch.readings if r.tensor_active} >= {0, 2}


# -- a pause that is refused --


@pytest.mark.parametrize("without", ["", "1", "*"])
def test_a_pause_is_refused_where_every_board_has_gpm_and_stops_only_the_boards_without(
    closed: DcgmRig, without: str
) -> None:
    """E9."""
    closed.say(f"gpu {without} gpm 0" if without else "")
    client = an_engine(closed)
    client.watch(1004, 155, entities=((GPU, 0), (GPU, 1)))
    closed.stub.run(closed.stub.now + 5_000_000)
    if without:
        client.dcgmProfPause()
    else:
        assert client.refusal("dcgmProfPause") == client.refusal("dcgmProfResume") == NOT_SUPPORTED
    closed.stub.run(closed.stub.now + 5_000_000)
    measured = [gpu for gpu in (0, 1) if client.value(1004, entity=(GPU, gpu)) == pytest.approx(0.4)]
    assert measured == {"": [0, 1], "1": [0], "*": []}[without]
    assert [client.value(155, entity=(GPU, gpu)) for gpu in (0, 1)] == [500, 500]


def test_a_pause_that_these_boards_do_not_need_is_told_at_once(rig: DcgmRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.readings(0, 1)
    rig.run(START + 2 * SECOND)
    with caplog.at_level(logging.WARNING):
        rig.source.pause()
    (record,) = caplog.records
    assert "a profiler can run beside this" in record.getMessage()
    assert kinds(rig.read(60)) == set()
    assert all(reading.tensor_active for reading in rig.readings(61, 62))


def test_a_pause_that_a_killed_daemon_left_on_the_engine_is_over_with_the_first_read_of_the_next(
    closed: DcgmRig,
) -> None:
    closed.say("gpu * gpm 0")
    closed.run(START - 8 * SECOND)
    closed.stub.agent.dcgmProfPause(closed.stub.connect(ADDRESS.removeprefix("unix:")))
    selector = SourceSelector(("dcgm",), lambda _: closed.open())
    selector.pause()
    closed.run(START - 5 * SECOND)
    batches = [selector.read(closed.clock.now())]
    for second in range(5):
        closed.run(START + second * SECOND)
        batches.append(selector.read(closed.clock.now()))
    assert all(reading.tensor_active for reading in batches[-1].readings)
    assert [kinds(batch) for batch in batches] == [set()] * 6
    assert closed.stub.calls("dcgmProfResume") == 1


# -- GPUs that are unbound and bound again --


def test_one_board_that_is_bound_anew_gives_others_new_indices(closed: DcgmRig) -> None:
    """E10."""
    closed.say("count 4")
    client = an_engine(closed)
    client.watch(52, entities=tuple((GPU, number) for number in range(4)))
    closed.say(f"gpu 1 bound {closed.stub.now + 2_000_000}")
    closed.stub.run(closed.stub.now + 5_000_000)
    assert [client.value(52, entity=(GPU, number), live=True) for number in range(4)] == [0, 3, 1, 2]


def test_the_indices_of_all_boards_follow_the_driver(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say(f"gpu 0 bound {rig.stub.now + 2_000_000}")
    batch = [rig.read(second) for second in range(2, 14)][-1]
    assert {gpu_of(device.uuid): device.index for device in batch.devices} == {0: "1", 1: "0"}
    assert {gpu_of(reading.uuid) for reading in rig.readings(14, 15)} == {0}


def test_a_gpu_detached_on_purpose_is_missing_and_not_lost(rig: DcgmRig) -> None:
    rig.readings(0, 1)
    rig.say("gpu 1 detached")
    batch = [rig.read(second) for second in range(2, 14)][-1]
    assert {gpu_of(device.uuid): device.condition for device in batch.devices} == {0: "", 1: "missing"}
    assert kinds(batch) == {"gpu_missing"}


def test_a_gpu_that_comes_back_under_another_number_is_one(closed: DcgmRig) -> None:
    closed.say("count 3", "gpu 2 gone")
    closed.open()
    closed.readings(0, 1)
    closed.unsay("gpu 2 gone")
    closed.say("gpu 1 gone", "gpu 2 uuid GPU-00000000-0000-0000-0000-000000000001")
    batch = [closed.read(second) for second in range(2, 14)][-1]
    assert sorted(gpu_of(device.uuid) for device in batch.devices) == [0, 1]
    assert [device.condition for device in batch.devices] == ["", ""]


# -- a listener that answers nothing --


def test_a_listener_that_answers_nothing_holds_nobody_beyond_the_time_limit(closed: DcgmRig) -> None:
    """libdcgm waits much longer than its timeout says."""
    address = closed.stub.listen()
    closed.say("engine hung 4000")
    closed.run(START)
    with pytest.raises(SourceError, match=r"has not answered for 0.2 s"):
        connect(closed.bindings, address, timeout_seconds=0.2)
    assert [thread.name for thread in threading.enumerate()].count("dcgm-connect") == 1
    with pytest.raises(SourceError, match="earlier attempt"):
        connect(closed.bindings, address, timeout_seconds=0.2)
    assert [thread.name for thread in threading.enumerate()].count("dcgm-connect") == 1
    closed.unsay("engine hung 4000")
    closed.run(START + SECOND)
    for thread in threading.enumerate():
        if thread.name == "dcgm-connect":
            thread.join(30)
    assert closed.stub.count("connections") == 0
