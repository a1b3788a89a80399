"""A mapping directory: every format, incomplete, invalid and missing files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import Config, WorkloadRule, WorkloadSettings
from exporter.core.model import MS, SECOND, Allocation, Device, Process, Reading
from exporter.registry import MappingDirSettings
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.mapping_dir import UNKNOWN, JobFiles, MappingDirScheduler, open_mapping_dir
from exporter.schedulers.rules import Rules
from tests.schedulers.mapping import read_mapping

WALL = 1_700_000_000 * SECOND
"""Unix time of the first poll; its monotonic time is 1,000 s."""
START = 1_000 * SECOND
TWO = (Device("GPU-a", "0"), Device("GPU-b", "1"))


class Rig:
    """A directory whose files have set times, and a scheduler that polls it once a second."""

    def __init__(self, root: Path) -> None:
        self.path, self.proc = root / "jobs", root / "proc"
        self.path.mkdir()
        self.proc.mkdir()
        self.now = START
        self.scheduler: MappingDirScheduler | None = None
        self.rules = Rules()

    @property
    def wall(self) -> int:
        return WALL + self.now - START

    def write(self, name: str, content: str | bytes, *, age: float = 60.0) -> None:
        """Put a complete file in place, written `age` seconds ago."""
        new = self.path / f".{name}.new"
        new.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.date(new, age)
        new.replace(self.path / name)

    def overwrite(self, name: str, content: str) -> None:
        """Write into the existing file, just now."""
        (self.path / name).write_text(content)
        self.date(self.path / name, 0)

    def date(self, file: Path, age: float) -> None:
        written = self.wall - round(age * SECOND)
        os.utime(file, ns=(written, written))

    def look(self, *readings: Reading, devices: tuple[Device, ...] = TWO, after: float = 1.0) -> SchedulerState:
        if self.scheduler is None:
            self.scheduler = MappingDirScheduler(
                self.path, self.rules, proc=self.proc, wall=lambda: self.wall, user_of=lambda uid: f"user{uid}"
            )
        else:
            self.now += round(after * SECOND)
        state = self.scheduler.poll(self.now, devices, readings)
        assert state is not None
        assert state.at == self.now
        return state

    def held(self, *, devices: tuple[Device, ...] = TWO) -> dict[str, list[str]]:
        """Jobs by GPU, of the current allocations."""
        return by_gpu(self.look(devices=devices).allocations)

    def process(
        self, pid: int, *, environ: str = "", cgroup: str = "0::/", command: str = "python", uid: int = 1001
    ) -> Process:
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (x) S {' '.join(['0'] * 18)} 100 0\n")
        (folder / "status").write_text(f"Uid:\t{uid}\t0\t0\t0\n")
        (folder / "cgroup").write_text(cgroup + "\n")
        (folder / "environ").write_text(environ + "\0")
        (folder / "cmdline").write_text(command)
        return Process(pid)


def by_gpu(allocations: tuple[Allocation, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for allocation in allocations:
        if allocation.end is None:
            found.setdefault(allocation.uuid, []).append(allocation.owner.job_id)
    return found


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# Formats.


def test_a_file_a_gpu_a_job_a_line(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.write("1", "222\n333\n")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": ["111"], "GPU-b": ["222", "333"]}
    assert (state.faults, state.condition, state.members) == ((), "", {})
    first = state.allocations[0]
    assert (first.owner.scheduler, first.owner.user, first.gpus) == ("mapping-dir", "", 1)


@pytest.mark.parametrize(
    ("content", "jobs"),
    [
        ("111\n", ("111",)),
        ("111", ("111",)),
        ("111\r\n222\r\n", ("111", "222")),
        ("  111  \n\n\n222\n", ("111", "222")),
        ("111\n111\n", ("111",)),
        ("111 alice\n222 1001\n", ("111", "222")),
        ("12[3].pbs01.site\n", ("12[3].pbs01.site",)),
        ("", ()),
        ("\n \n", ()),
    ],
)
def test_what_a_file_says(rig: Rig, content: str, jobs: tuple[str, ...]) -> None:
    rig.write("0", content)
    assert JobFiles(rig.path).read(rig.wall)["0"].jobs == jobs
    assert JobFiles(rig.path).read(rig.wall)["0"].problem == ""
    assert read_mapping(rig.path) == {"0": jobs}


def test_what_is_no_gpus_file_is_passed_over(rig: Rig) -> None:
    for name in (".0.77", "0.tmp", "0~", "#0#", "README", "-1", "+1", "0.1.2", "12345", ".lock", "GPU-", "0 "):
        rig.write(name, "111\n")
    (rig.path / "1").mkdir()
    assert JobFiles(rig.path).read(rig.wall) == {}
    assert rig.look() == SchedulerState((), START)


def test_a_file_may_be_named_by_uuid(rig: Rig) -> None:
    rig.write("GPU-b", "111\n")
    assert rig.held() == {"GPU-b": ["111"]}


MIG = (
    Device("GPU-a", "0", weight=0),
    Device("MIG-7", "0:7", weight=500_000, parent="GPU-a", profile="3g.40gb"),
    Device("MIG-9", "0:9", weight=500_000, parent="GPU-a", profile="3g.40gb"),
    Device("GPU-b", "1"),
)


def test_an_instance_is_named_by_board_and_gpu_instance(rig: Rig) -> None:
    rig.write("0.7", "111\n")
    rig.write("1", "222\n")
    assert rig.held(devices=MIG) == {"MIG-7": ["111"], "GPU-b": ["222"]}


def test_a_boards_file_holds_the_instances_without_one_of_their_own(rig: Rig) -> None:
    rig.write("0", "222\n")
    rig.write("0.7", "111\n")
    assert rig.held(devices=MIG) == {"MIG-7": ["111"], "MIG-9": ["222"]}
    rig.write("MIG-9", "333\n")
    assert rig.held(devices=MIG) == {"MIG-7": ["111"], "MIG-9": ["333"]}


def test_a_file_for_a_gpu_that_is_not_there_is_told(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.write("7", "222\n")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": ["111"]}
    (fault,) = state.faults
    assert fault.kind == "scheduler_refused"
    assert "mapping file 7 gives job 222 a GPU that this node does not have" in fault.message
    rig.write("7", "")
    assert rig.look().faults == ()


def test_before_the_gpus_are_known_no_file_is_a_strangers(rig: Rig) -> None:
    rig.write("0", "111\n")
    assert rig.look(devices=()) == SchedulerState((), START)


# Start and end.


def test_a_job_found_at_the_start_holds_since_its_file_was_written(rig: Rig) -> None:
    rig.write("0", "111\n", age=12.0005)
    (held,) = rig.look().allocations
    assert held.start == START - 12 * SECOND
    assert held.start % MS == 0


def test_a_job_that_comes_holds_since_its_file_was_written_but_not_before_the_last_look(rig: Rig) -> None:
    rig.look()
    rig.now += SECOND
    rig.write("0", "111\n", age=0.25)
    rig.write("1", "222\n", age=3600)
    starts = {a.uuid: a.start for a in rig.look(after=0).allocations}
    assert starts == {"GPU-a": START + 750 * MS, "GPU-b": START}


@pytest.mark.parametrize(("age", "start"), [(-3600.0, START), (1e9, 0)])
def test_a_start_lies_between_boot_and_now(rig: Rig, age: float, start: int) -> None:
    rig.write("0", "111\n", age=age)
    rig.look()
    (held,) = rig.look().allocations
    assert held.start == start


def test_an_end_is_told_once_and_the_others_stay(rig: Rig) -> None:
    rig.write("0", "111\n222\n")
    rig.write("1", "111\n")
    before = {(a.uuid, a.owner.job_id): (a.start, a.gpus) for a in rig.look().allocations}
    assert before == {
        ("GPU-a", "111"): (START - 60 * SECOND, 2),
        ("GPU-a", "222"): (START - 60 * SECOND, 1),
        ("GPU-b", "111"): (START - 60 * SECOND, 2),
    }
    rig.write("0", "222\n", age=0)
    (rig.path / "1").unlink()
    after = {(a.uuid, a.owner.job_id): (a.start, a.end) for a in rig.look().allocations}
    assert after == {
        ("GPU-a", "222"): (START - 60 * SECOND, None),
        ("GPU-a", "111"): (START - 60 * SECOND, START + SECOND),
        ("GPU-b", "111"): (START - 60 * SECOND, START + SECOND),
    }
    assert by_gpu(rig.look().allocations) == {"GPU-a": ["222"]}
    assert len(rig.look().allocations) == 1


# Incomplete files.


def test_a_file_in_the_middle_of_being_written_says_what_it_said(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.look()
    for half in ("", "22"):
        rig.overwrite("0", half)
        assert rig.held() == {"GPU-a": ["111"]}, half
    rig.overwrite("0", "222\n")
    assert rig.held() == {"GPU-a": ["222"]}


def test_a_new_file_in_the_middle_of_being_written_says_its_whole_lines(rig: Rig) -> None:
    rig.look()
    rig.now += SECOND
    rig.write("0", "111\n22", age=0)
    assert by_gpu(rig.look(after=0).allocations) == {"GPU-a": ["111"]}


def test_a_file_that_stays_empty_or_without_an_end_is_believed(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.write("1", "333\n")
    rig.look()
    rig.overwrite("0", "")
    rig.overwrite("1", "444")
    assert rig.held() == {"GPU-a": ["111"], "GPU-b": ["333"]}
    assert rig.held() == {"GPU-b": ["444"]}


def test_a_change_hidden_by_a_coarse_timestamp_is_seen(rig: Rig) -> None:
    rig.write("0", "111\n", age=0)
    assert rig.held() == {"GPU-a": ["111"]}
    before = (rig.path / "0").stat()
    with (rig.path / "0").open("r+") as file:
        file.write("222\n")
    os.utime(rig.path / "0", ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert rig.held() == {"GPU-a": ["222"]}


def test_a_file_that_does_not_change_is_read_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    opening: Callable[..., int] = os.open

    def spy(path: str, *more: int, **rest: int) -> int:
        read.append(Path(path).name)
        return opening(path, *more, **rest)

    rig.write("0", "111\n")
    rig.write("1", "222\n")
    monkeypatch.setattr(os, "open", spy)
    for _ in range(3):
        rig.look()
    rig.write("1", "333\n")
    rig.look()
    assert [name for name in read if name in {"0", "1"}] == ["0", "1", "1"]


def test_read_while_others_rename_it_is_always_one_or_the_other(rig: Rig) -> None:
    stop, seen = threading.Event(), set()

    def churn() -> None:
        for turn in range(1_000_000):
            if stop.is_set():
                return
            new = rig.path / ".0.new"
            new.write_text("111\n222\n" if turn % 2 else "3333333\n")
            new.replace(rig.path / "0")

    files, writer = JobFiles(rig.path), threading.Thread(target=churn)
    rig.write("0", "3333333\n")
    writer.start()
    try:
        for _ in range(20_000):
            seen.add(files.read(2 * WALL)["0"].jobs)
            if len(seen) > 1:
                break
        for _ in range(300):
            seen.add(files.read(2 * WALL)["0"].jobs)
    finally:
        stop.set()
        writer.join()
    assert seen == {("111", "222"), ("3333333",)}


# Invalid files.


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x7fELF\0\0\1\2", "binary"),
        (b"1\n" * 40_000, "larger than 65536 bytes"),
        (b"x" * 200 + b"\n", "is no job id"),
        ("ж\n".encode(), "is no job id"),
        (b"\xff\xfe\n", "is no job id"),
        (b"Usage: job [options]\n", "is no job id"),
    ],
)
def test_a_file_that_cannot_be_believed_holds_the_gpu_for_somebody(rig: Rig, content: bytes, reason: str) -> None:
    rig.write("0", content)
    rig.write("1", "222\n")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": [UNKNOWN], "GPU-b": ["222"]}
    (fault,) = state.faults
    assert (fault.kind, fault.uuid) == ("scheduler_refused", "GPU-a")
    assert f"{rig.path}/0: " in fault.message
    assert reason in fault.message


def test_lines_that_are_no_job_ids_are_left_out_and_told(rig: Rig) -> None:
    rig.write("0", "111\n" + "x" * 129 + "\na b c\n222\n")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": ["111", "222"]}
    assert "is no job id; 2 such lines left out" in state.faults[0].message


def test_jobs_on_a_gpu_are_bounded(rig: Rig) -> None:
    rig.write("0", "".join(f"{job}\n" for job in range(100)) + "0\n")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": [str(job) for job in range(64)]}
    assert "more than 64 jobs; 36 such lines left out" in state.faults[0].message


def test_a_file_that_goes_bad_keeps_the_jobs_it_had(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.look()
    rig.write("0", b"\0\0\0")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": ["111"]}
    assert len(state.faults) == 1
    assert len(rig.look().faults) == 1, "told as long as it is so"
    rig.write("0", "222\n")
    state = rig.look()
    assert (by_gpu(state.allocations), state.faults) == ({"GPU-a": ["222"]}, ())


def test_a_fifo_blocks_nobody(rig: Rig) -> None:
    os.mkfifo(rig.path / "0")
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": [UNKNOWN]}
    assert "no regular file" in state.faults[0].message


def test_a_file_that_may_not_be_read_is_told(rig: Rig) -> None:
    (rig.path / "0").symlink_to("0")  # ELOOP: even root may not
    state = rig.look()
    assert by_gpu(state.allocations) == {"GPU-a": [UNKNOWN]}
    assert "cannot be read" in state.faults[0].message


def test_a_link_to_nothing_is_nobody(rig: Rig) -> None:
    (rig.path / "0").symlink_to("gone")
    assert rig.held() == {}


@given(content=st.one_of(st.binary(max_size=200), st.text("0123456789 \n\r\t[].a\0", max_size=200).map(str.encode)))
def test_whatever_is_in_a_file_job_ids_are_sane(garbage: Rig, content: bytes) -> None:
    garbage.write("0", content)
    (said,) = JobFiles(garbage.path).read(garbage.wall).values()
    assert all(0 < len(job) <= 128 and job.isprintable() and not set(job) & set(" \n") for job in said.jobs)
    assert len(set(said.jobs)) == len(said.jobs)
    assert said.jobs or said.problem or not content.decode(errors="replace").strip()


@pytest.fixture(scope="module")
def garbage(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("garbage"))


# The directory.


def test_a_missing_directory_at_the_start_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    config = Config(mapping_dir=MappingDirSettings(str(tmp_path / "no")))
    with pytest.raises(SchedulerError, match=r"mapping-dir: .*/no: No such file.*slurm-prolog.sh.*mapping_dir\.path"):
        open_mapping_dir(config)
    (tmp_path / "no").write_text("")
    with pytest.raises(SchedulerError, match="Not a directory"):
        open_mapping_dir(config)


def test_a_directory_that_goes_is_an_error_not_nobody_and_comes_back(rig: Rig) -> None:
    rig.write("0", "111\n")
    (before,) = rig.look().allocations
    rig.path.rename(rig.path.with_name("gone"))
    for _ in range(2):
        with pytest.raises(SchedulerError, match="No such file or directory"):
            rig.look()
    rig.path.with_name("gone").rename(rig.path)
    assert rig.look().allocations == (before,)


@pytest.mark.parametrize(("mode", "warned"), [(0o755, False), (0o775, False), (0o777, True), (0o1777, True)])
def test_a_directory_that_everybody_can_write_to_is_a_warning(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(mode)
    open_mapping_dir(Config(mapping_dir=MappingDirSettings(str(tmp_path / "jobs")))).close()
    assert ("writable by everybody" in caplog.text) == warned


def test_a_directory_of_something_else_is_refused(rig: Rig) -> None:
    for name in range(10_001):
        (rig.path / f"x{name}").touch()
    with pytest.raises(SchedulerError, match="more than 10000 files"):
        rig.look()


# Members, users, classes.


def gpu(*processes: Process) -> Reading:
    return Reading("GPU-a", START - SECOND, START, processes=processes)


@pytest.mark.parametrize(
    ("job", "environ", "cgroup", "member"),
    [
        ("111", "SLURM_JOB_ID=111", "0::/", True),
        ("111", "PBS_JOBID=111.pbs01", "0::/", True),
        ("111.pbs01", "PBS_JOBID=111.pbs01", "0::/", True),
        ("111", "LSB_JOBID=111", "0::/", True),
        ("111", "", "0::/system.slice/slurmstepd.scope/job_111/step_0/user/task_0", True),
        ("111", "", "8:devices:/slurm/uid_1001/job_111", True),
        ("111", "SLURM_JOB_ID=222", "8:devices:/slurm/uid_1001/job_111/step_batch", True),
        ("111", "SLURM_JOB_ID=112", "0::/job_1110/job_11", False),
        ("111", "MY_JOB_ID=111", "0::/", False),
        ("111", "SLURM_JOB_ID=", "0::/", False),
    ],
)
def test_a_process_is_a_member_by_cgroup_or_environment(
    rig: Rig, job: str, environ: str, cgroup: str, member: object
) -> None:
    rig.write("0", f"{job}\n")
    rig.write("1", "222\n")
    process = rig.process(10, environ=environ + "\0RANK=3", cgroup=cgroup)
    assert rig.look(gpu(process)).members == ({10: Member(job, "3")} if member else {})


@pytest.mark.parametrize(
    ("environ", "cgroup", "uid", "member"),
    [
        ("", "0::/system.slice/slurmstepd.scope/job_111/step_0", 1002, True),
        ("SLURM_JOB_ID=111", "0::/", 1001, True),
        ("SLURM_JOB_ID=111", "0::/", 1002, False),
        ("SLURM_JOB_ID=222", "0::/", 1001, False),
        ("", "0::/", 1001, False),
    ],
)
def test_a_job_is_spoken_for_by_its_cgroup_or_the_user_on_its_gpus(
    rig: Rig, environ: str, cgroup: str, uid: int, member: object
) -> None:
    rig.write("0", "111\n")
    rig.write("1", "222\n")
    rig.process(11, environ=environ + "\0RANK=3", cgroup=cgroup, uid=uid)
    before = rig.look()
    assert before.members == {}
    assert rig.scheduler is not None
    by_cgroup = {11: Member("111", "3")} if "job_111" in cgroup else {}
    assert rig.scheduler.members([11]) == by_cgroup, "nothing of the job is on a GPU, so its user is not known"
    rig.look(gpu(rig.process(10, environ="SLURM_JOB_ID=111")))
    assert rig.scheduler.members([11, 99]) == ({11: Member("111", "3")} if member else {})
    (rig.path / "0").unlink()
    rig.look()
    assert rig.scheduler.members([11]) == {}


def owners(state: SchedulerState) -> dict[str, str]:
    """The jobs' users."""
    return {a.owner.job_id: a.owner.user for a in state.allocations if a.end is None}


def test_an_environment_makes_nobody_the_user_of_a_job_whose_gpu_he_is_not_on(rig: Rig) -> None:
    """`exec env PBS_JOBID=222.pbs python train.py` in job 111."""
    rig.write("0", "111.pbs\n")
    rig.write("1", "222.pbs\n")
    intruder = rig.process(10, environ="PBS_JOBID=222.pbs", command="vllm serve m")
    rig.process(11, environ="PBS_JOBID=222.pbs")
    assert owners(rig.look(gpu(intruder))) == {"111.pbs": "", "222.pbs": ""}
    assert rig.scheduler is not None
    assert rig.scheduler.members([10, 11]) == {}
    owner = rig.process(20, environ="PBS_JOBID=222.pbs", uid=1002)
    rig.process(21, environ="PBS_JOBID=222.pbs", uid=1002)
    there = Reading("GPU-b", START - SECOND, START, processes=(owner,))
    state = rig.look(gpu(intruder), there)
    assert owners(state) == {"111.pbs": "", "222.pbs": "user1002"}
    assert {a.owner.workload_class for a in state.allocations} == {"batch"}
    assert state.faults == ()
    assert rig.scheduler.members([10, 11, 20, 21]) == {20: Member("222.pbs"), 21: Member("222.pbs")}


@pytest.mark.parametrize("order", [1, -1])
def test_of_a_job_that_several_users_claim_no_user_is_named(rig: Rig, order: int) -> None:
    """On a GPU that both their jobs hold."""
    rig.write("0", "111\n222\n")
    claims = [rig.process(10, environ="LSB_JOBID=222"), rig.process(20, environ="LSB_JOBID=222", uid=1002)][::order]
    assert owners(rig.look(gpu(claims[0])))["222"] in {"user1001", "user1002"}
    for reading in (gpu(*claims), gpu(claims[1])):
        state = rig.look(reading)
        assert owners(state) == {"111": "", "222": ""}
        assert [fault.kind for fault in state.faults] == ["scheduler_refused"]
        assert "several users on a GPU of job 222" in state.faults[0].message
    assert rig.scheduler is not None
    assert rig.scheduler.members([10, 20]) == {}
    proven = rig.process(30, environ="LSB_JOBID=222", cgroup="8:devices:/slurm/uid_1003/job_222", uid=1003)
    for reading in (gpu(*claims, proven), gpu(*claims)):
        state = rig.look(reading)
        assert (owners(state), state.faults) == ({"111": "", "222": "user1003"}, ()), "its control group goes before"
    assert rig.scheduler.members([10, 20, 30]) == {30: Member("222")}
    rig.write("0", "111\n")
    rig.look(gpu(*claims))
    rig.write("0", "111\n222\n")
    assert owners(rig.look(gpu(claims[0])))["222"] in {"user1001", "user1002"}, "another job of that id"


@pytest.mark.parametrize("order", [1, -1])
def test_root_s_process_of_a_job_is_not_its_user_s(rig: Rig, order: int) -> None:
    """As an MPS server that a prologue started."""
    rig.write("0", "111\n")
    processes = [rig.process(10, environ="PBS_JOBID=111", uid=0), rig.process(20, environ="PBS_JOBID=111")]
    rig.look(gpu(processes[::order][0]))
    for _ in range(2):
        state = rig.look(gpu(*processes[::order]))
        assert (owners(state), state.faults) == ({"111": "user1001"}, ())


def test_the_first_process_of_a_job_keeps_its_command(rig: Rig) -> None:
    rig.write("0", "111\n")
    group = "0::/system.slice/slurmstepd.scope/job_111"
    server = rig.process(10, cgroup=group, command="vllm serve m")
    for reading in (gpu(server), gpu(server, rig.process(11, cgroup=group)), gpu(rig.process(12, cgroup=group))):
        assert [a.owner.workload_class for a in rig.look(reading).allocations] == ["serving"]


def test_whoever_only_reports_is_not_the_job_s_user(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.process(11, cgroup="0::/system.slice/slurmstepd.scope/job_111", uid=1002)
    rig.look()
    assert rig.scheduler is not None
    assert rig.scheduler.members([11]) == {11: Member("111")}
    assert [allocation.owner.user for allocation in rig.look().allocations] == [""]


def test_the_user_and_the_class_are_those_of_the_jobs_process(rig: Rig) -> None:
    rig.rules = Rules(WorkloadSettings((WorkloadRule(team="hep", user="user1001"),)))
    rig.write("0", "111\n")
    rig.write("1", "222\n")
    owners = {a.owner.job_id: a.owner for a in rig.look().allocations}
    assert (owners["111"].user, owners["111"].workload_class, owners["111"].team) == ("", "batch", "")
    process = rig.process(10, environ="SLURM_JOB_ID=111", command="vllm serve m")
    rig.look(gpu(process))
    for reading in (gpu(process), gpu()):  # it stays known after the process has ended
        owners = {a.owner.job_id: a.owner for a in rig.look(reading).allocations}
        assert (owners["111"].user, owners["111"].workload_class, owners["111"].team) == ("user1001", "serving", "hep")
        assert (owners["222"].user, owners["222"].workload_class, owners["222"].team) == ("", "batch", "")


def test_a_job_that_is_over_has_no_members(rig: Rig) -> None:
    rig.write("0", "111\n")
    process = rig.process(10, environ="SLURM_JOB_ID=111")
    assert rig.look(gpu(process)).members == {10: Member("111")}
    (rig.path / "0").unlink()
    assert rig.look(gpu(process)).members == {}


def test_a_job_id_used_again_is_another_job(rig: Rig) -> None:
    rig.write("0", "111\n")
    rig.look(gpu(rig.process(10, environ="SLURM_JOB_ID=111")))
    (rig.path / "0").unlink()
    rig.look()
    rig.write("0", "111\n")
    (held,) = rig.look().allocations
    assert held.owner.user == ""


def test_opened_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("111\n")
    config = Config(mapping_dir=MappingDirSettings(str(tmp_path)), workload=WorkloadSettings((WorkloadRule(team="t"),)))
    asked = open_mapping_dir(config)
    state = asked.poll(START, TWO, ())
    assert state is not None
    assert [(a.owner.job_id, a.owner.team) for a in state.allocations] == [("111", "t")]
    asked.close()
