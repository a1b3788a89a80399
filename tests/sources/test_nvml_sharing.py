"""Tests the share of a GPU that each of several processes used: the NVML source on the stand-in `libnvidia-ml.so.1`."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import MS, SECOND, Process
from exporter.sources.nvml.calls import SampleCursor, with_sm_active
from tests.sources.conformance import START
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
    one,
    reading_of,
    rigged,
)

CALL, NEWER = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo"
INSUFFICIENT_SIZE, VERSION_MISMATCH = 7, 25
FOREVER = "gpu 0 use_stamp 9223372036854775807"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    """A rig in which processes 1 and 2 share GPU 0, and the other GPUs have one process each."""
    for rig in rigged(tmp_path, monkeypatch):
        rig.say("gpu 0 idle", "gpu 0 process 1", "gpu 0 process 2")
        yield rig


@pytest.fixture
def opened(rig: NvmlRig) -> NvmlRig:
    rig.open()
    return rig


def used(rig: NvmlRig, second: float) -> dict[int, float | None]:
    """Read at `second`, and return each process's use of GPU 0 by pid."""
    return {each.pid: each.sm_active for each in one(rig.read(second)).processes or ()}


# -- shares --


def test_each_of_two_processes_has_its_own_share(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 60", "gpu 0 use 2 20")
    opened.read(0)
    batch = opened.read(1)
    assert one(batch).processes == (Process(1, sm_active=0.6), Process(2, sm_active=0.2))
    assert batch.faults == ()


def test_a_share_is_the_mean_since_the_last_reading(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 2 10")
    opened.read(0)
    opened.say("gpu 0 use 1 80")
    opened.run(START + SECOND)
    pynvml.nvmlSystemGetDriverVersion()  # any call lets the world run on
    opened.unsay("gpu 0 use 1 80")
    assert used(opened, 4) == {1: 0.2, 2: 0.1}
    assert used(opened, 5) == {1: 0.0, 2: 0.1}


def test_a_process_that_rests_beside_one_that_works_used_nothing(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 2 35")
    opened.read(0)
    assert used(opened, 1) == {1: 0.0, 2: 0.35}


def test_where_nobody_has_a_sample_nothing_is_known_and_nothing_is_wrong(opened: NvmlRig) -> None:
    opened.read(0)
    batch = opened.read(1)
    assert [each.sm_active for each in one(batch).processes or ()] == [None, None]
    assert batch.faults == ()
    opened.say("gpu 0 use 1 50")
    assert used(opened, 2)[1] is not None


def test_samples_that_come_late_are_not_lost(opened: NvmlRig) -> None:
    silent = f"gpu 0 error {CALL} {NOT_FOUND}"
    opened.say("gpu 0 use 1 50")
    opened.reading()
    opened.say(silent, "gpu 0 use 2 40")
    assert used(opened, 2) == {1: None, 2: None}
    opened.unsay(silent, "gpu 0 use 2 40")
    assert used(opened, 3) == {1: 0.5, 2: 0.2}


def test_a_gpu_with_one_process_or_none_is_not_asked(opened: NvmlRig) -> None:
    opened.unsay("gpu 0 process 2")
    opened.say("gpu 0 use 1 50", "gpu 1 idle")
    opened.read(0)
    assert used(opened, 1) == {1: None}
    assert opened.calls(CALL) == opened.calls(NEWER) == 0


def test_the_rest_of_the_reading_does_not_depend_on_it(opened: NvmlRig) -> None:
    opened.say(f"error {CALL} {UNKNOWN}")
    shared = opened.reading()
    assert shared.power_watts == 500
    assert shared.gr_engine_active == pytest.approx(0.9)
    assert "processes" in opened.source.signals


# -- processes come and go --


def test_what_was_used_before_the_gpu_was_shared_counts_for_nobody(opened: NvmlRig) -> None:
    opened.unsay("gpu 0 process 2")
    opened.say("gpu 0 use 2 90")  # another process, of that pid, which has ended
    opened.read(0)
    opened.read(1)
    opened.unsay("gpu 0 use 2 90")
    opened.say("gpu 0 process 2", "gpu 0 use 1 10")
    assert used(opened, 2) == {1: None, 2: None}
    assert used(opened, 3) == {1: 0.1, 2: 0.0}


def test_a_process_that_was_left_alone_for_a_while_begins_anew(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 50")
    opened.read(0)
    opened.unsay("gpu 0 process 2")
    assert used(opened, 1) == {1: None}
    opened.say("gpu 0 process 2")
    assert used(opened, 2) == {1: None, 2: None}
    assert used(opened, 3) == {1: 0.5, 2: 0.0}


def test_a_process_that_ended_takes_its_share_with_it(opened: NvmlRig) -> None:
    opened.say("gpu 0 process 3", "gpu 0 use 1 10", "gpu 0 use 3 70")
    opened.read(0)
    opened.unsay("gpu 0 process 3")
    assert used(opened, 1) == {1: 0.1, 2: 0.0}


def test_the_next_process_of_the_same_pid_is_not_given_what_the_last_one_used(opened: NvmlRig) -> None:
    opened.say("gpu 0 process 3")
    opened.read(0)
    opened.unsay("gpu 0 process 3")
    opened.say("gpu 0 use 3 70")
    opened.read(1)
    opened.say("gpu 0 process 3", "gpu 0 use 1 10")
    opened.unsay("gpu 0 use 3 70")
    assert used(opened, 2) == {1: 0.1, 2: 0.0, 3: 0.0}


def test_figures_of_processes_that_are_not_listed_say_nothing_of_those_that_are(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 99 80")  # as of another pid namespace, or of a server that computes for them
    opened.read(0)
    assert used(opened, 1) == {1: None, 2: None}


def test_a_list_that_could_not_be_read_is_not_the_last_one(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 50")
    opened.reading()
    asked = opened.calls(CALL)
    opened.say(f"gpu 0 error nvmlDeviceGetComputeRunningProcesses_v3 {TIMEOUT}")
    assert one(opened.read(2)).processes is None
    assert opened.calls(CALL) == asked


# -- samples that make no sense --


@pytest.mark.parametrize("percent", [101, 2147483632, 4294967295])
def test_more_than_everything_is_no_figure(opened: NvmlRig, percent: int) -> None:
    opened.say(f"gpu 0 use 1 {percent}", "gpu 0 use 2 40")
    opened.read(0)
    assert used(opened, 1) == {1: None, 2: 0.4}
    opened.unsay("gpu 0 use 2 40")
    assert used(opened, 2) == {1: None, 2: None}


def test_all_of_it_is_a_figure(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 100")
    opened.read(0)
    assert used(opened, 1) == {1: 1.0, 2: 0.0}


def test_samples_whose_time_does_not_move_count_once(opened: NvmlRig) -> None:
    stuck = f"gpu 0 use_stamp {(START + SECOND) // 1000}"
    opened.say("gpu 0 use 1 50")
    opened.read(0)
    opened.say(stuck)
    assert used(opened, 1) == {1: pytest.approx(0.16), 2: 0.0}  # of all that the driver remembers, as it then says
    assert used(opened, 2) == {1: None, 2: None}
    assert used(opened, 3) == {1: None, 2: None}
    opened.unsay(stuck)
    assert used(opened, 4) == {1: 0.5, 2: 0.0}


def test_a_time_from_years_ahead_is_given_up_in_the_end(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 50")
    opened.read(0)
    opened.say(FOREVER)
    assert used(opened, 1) == {1: pytest.approx(0.16), 2: 0.0}
    opened.unsay(FOREVER)
    assert used(opened, 2) == {1: None, 2: None}
    seen = [used(opened, second)[1] for second in range(3, 40)]
    assert seen == [None] * 30 + [0.5] * 7


def test_silences_with_samples_between_them_are_no_reason_to_give_the_time_up(opened: NvmlRig) -> None:
    silent = f"gpu 0 error {CALL} {NOT_FOUND}"
    opened.say("gpu 0 use 1 50")
    opened.reading()
    for start in (2, 18):
        opened.say(silent)
        assert {used(opened, start + second)[1] for second in range(15)} == {None}
        opened.unsay(silent)
        assert used(opened, start + 15)[1] == 0.5


class Codes:
    """The binding's error codes."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
    NVML_SUCCESS = pynvml.NVML_SUCCESS


_NUMBERS = st.integers(0, 2**32 - 1)
_SAMPLES = st.lists(
    st.builds(
        SimpleNamespace,
        pid=st.integers(0, 4) | _NUMBERS,
        timeStamp=st.integers(0, 50) | st.integers(0, 2**64 - 1),
        smUtil=st.integers(0, 110) | _NUMBERS,
    ),
    max_size=8,
)


@given(
    readings=st.lists(_SAMPLES | st.sampled_from([NOT_FOUND, UNKNOWN, 0]), max_size=8), pids=st.sets(st.integers(0, 4))
)
def test_whatever_the_driver_gives_the_list_stays_and_shares_are_shares(readings: list[Any], pids: set[int]) -> None:
    listed, taken = tuple(Process(pid, 7, "python") for pid in sorted(pids)), SampleCursor()
    for given_now in readings:
        before = taken.stamp

        def samples(_handle: Any, _since: int, said: Any = given_now) -> list[Any]:
            if isinstance(said, int):
                raise pynvml.NVMLError(said)
            return list(said)

        if given_now == UNKNOWN:
            with pytest.raises(pynvml.NVMLError):
                with_sm_active(Codes, samples, handle=None, cursor=taken, listed=listed)
            assert taken.stamp is None
            continue
        found = with_sm_active(Codes, samples, handle=None, cursor=taken, listed=listed)
        assert [(each.pid, each.memory_bytes, each.name) for each in found] == [(p.pid, 7, "python") for p in listed]
        shares = [each.sm_active for each in found if each.sm_active is not None]
        assert all(0 <= share <= 1 for share in shares)
        assert not shares or (before is not None and taken.stamp is not None and taken.stamp > before)
        assert not shares or any(each.pid in pids and each.smUtil <= 100 for each in given_now)


def test_a_driver_that_calls_nothing_a_success_said_nothing() -> None:
    def nothing(_handle: Any, _since: int) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_SUCCESS)  # what the binding makes of it

    listed = (Process(1), Process(2))
    assert with_sm_active(Codes, nothing, handle=None, cursor=SampleCursor(), listed=listed) == listed


# -- errors --


def test_a_board_without_it_is_asked_once_and_again_after_resync(opened: NvmlRig) -> None:
    refusals = [f"error {call} {NOT_SUPPORTED}" for call in (CALL, NEWER)]
    opened.say("gpu 0 use 1 50", *refusals)
    opened.read(0)
    batch = opened.read(1)
    assert [each.sm_active for each in one(batch).processes or ()] == [None, None]
    assert batch.faults == ()
    assert (opened.calls(CALL), opened.calls(NEWER)) == (1, 1)
    opened.unsay(*refusals)
    opened.source.resync()
    opened.read(2)
    assert used(opened, 3) == {1: 0.5, 2: 0.0}


def test_a_driver_that_dropped_the_older_call_is_asked_by_the_newer(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 50", "gpu 0 use 2 25", f"error {CALL} {NO_FUNCTION}")
    opened.read(0)
    assert used(opened, 1) == {1: 0.5, 2: 0.25}
    assert opened.calls(CALL) == 1


@pytest.mark.parametrize("code", [UNKNOWN, NO_PERMISSION, TIMEOUT])
def test_any_other_error_is_a_fault_and_costs_the_figures_alone(opened: NvmlRig, code: int) -> None:
    fails = f"gpu 0 error {CALL} {code}"
    opened.say("gpu 0 use 1 50")
    opened.reading()
    opened.say(fails)
    batch = opened.read(2)
    assert one(batch).processes == (Process(1), Process(2))
    assert [gpu for gpu, _ in kinds(batch)] == [0]
    assert "gave no sm_active of processes" in batch.faults[0].message
    opened.unsay(fails)
    assert used(opened, 3) == {1: None, 2: None}, "its samples are also of the reading before"
    assert used(opened, 4) == {1: 0.5, 2: 0.0}


def test_a_gpu_lost_just_then_is_lost(opened: NvmlRig) -> None:
    opened.reading()
    opened.say(f"gpu 0 error {CALL} {LOST}")
    assert conditions(opened.read(2)) == ["lost", "", ""]


# -- MIG --


def test_instances_and_the_board_they_are_cut_from_are_not_asked(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 3g.40gb:2", "gpu 0 gi 2 process 8 1024", "gpu 0 use 8 50")
    opened.read(0)
    batch = opened.read(1)
    assert [each.sm_active for each in reading_of(batch, "0:2").processes or ()] == [None, None]
    assert device(batch, "0:2").parent == one(batch).uuid
    assert opened.calls(CALL) == opened.calls(NEWER) == 0
    assert batch.faults == ()


def test_a_board_that_leaves_mig_mode_is_asked_again(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 3g.40gb:2", "gpu 0 use 1 50")
    opened.read(0)
    opened.unsay("gpu 0 mig 3g.40gb:2")
    opened.read(1)
    assert used(opened, 2) == {1: 0.5, 2: 0.0}


# -- the stand-in is as strict as the library it stands for --


def test_the_stand_in_gives_what_is_newer_by_either_call(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 60", "gpu 0 use 2 20")
    opened.run(START)
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    opened.run(START + SECOND)
    older = pynvml.nvmlDeviceGetProcessUtilization(board, START // 1000)
    newer = pynvml.nvmlDeviceGetProcessesUtilizationInfo(board, START // 1000)
    wanted = [(1, 60, (START + SECOND) // 1000), (2, 20, (START + SECOND) // 1000)]
    assert [(each.pid, each.smUtil, each.timeStamp) for each in older] == wanted
    assert [(each.pid, each.smUtil, each.timeStamp) for each in newer] == wanted
    for call in (pynvml.nvmlDeviceGetProcessUtilization, pynvml.nvmlDeviceGetProcessesUtilizationInfo):
        with pytest.raises(pynvml.NVMLError_NotFound):
            call(board, wanted[0][2])


def test_the_stand_in_takes_its_samples_however_often_it_is_called(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 60")
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    for millisecond in range(0, 1001, 50):
        opened.run(START + millisecond * MS)
        pynvml.nvmlSystemGetDriverVersion()
    (sample,) = pynvml.nvmlDeviceGetProcessUtilization(board, START // 1000 + 800_000)
    assert (sample.smUtil, sample.timeStamp) == (60, START // 1000 + 1_000_000)


def test_the_stand_in_knows_no_processes_shares_in_mig_mode(opened: NvmlRig) -> None:
    opened.say("gpu 0 mig 1g.10gb:7", "gpu 0 use 1 60")
    opened.run(START)
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    for handle in (board, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, 0)):
        for call in (pynvml.nvmlDeviceGetProcessUtilization, pynvml.nvmlDeviceGetProcessesUtilizationInfo):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                call(handle, 0)


def test_the_stand_in_wants_room_and_the_right_version(opened: NvmlRig) -> None:
    opened.say("gpu 0 use 1 60", "gpu 0 use 2 20")
    opened.run(START)
    board, count = pynvml.nvmlDeviceGetHandleByIndex(0), ctypes.c_uint(0)
    ask = opened.library.nvmlDeviceGetProcessUtilization
    assert ask(board, None, ctypes.byref(count), ctypes.c_ulonglong(0)) == INSUFFICIENT_SIZE
    assert count.value > 2
    room = (pynvml.c_nvmlProcessUtilizationSample_t * 1)()
    count.value = 1
    assert ask(board, room, ctypes.byref(count), ctypes.c_ulonglong(0)) == INSUFFICIENT_SIZE
    assert ask(board, room, None, ctypes.c_ulonglong(0)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    request = pynvml.c_nvmlProcessesUtilizationInfo_v1_t(version=1)
    assert opened.library.nvmlDeviceGetProcessesUtilizationInfo(board, ctypes.byref(request)) == VERSION_MISMATCH
