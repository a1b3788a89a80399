"""Job and rank of a process: on a made-up /proc, and on the real one with real processes."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import SECOND, Process, Reading
from exporter.schedulers.base import Member
from exporter.schedulers.procfs import (
    JobMembers,
    ProcessCache,
    ProcessInfo,
    UserNames,
    rank_of,
    read_process,
    user_name,
)


def process(
    root: Path, pid: int, *, environ: bytes = b"", cgroup: str = "0::/job_7\n", ticks: int = 100, command: str = "a\0b"
) -> Path:
    folder = root / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} (py thon) S {' '.join(['0'] * 18)} {ticks} 0\n")
    (folder / "status").write_text("Name:\tpython\nUid:\t1001\t0\t0\t0\n")
    (folder / "cgroup").write_text(cgroup)
    (folder / "cmdline").write_text(command)
    (folder / "environ").write_bytes(environ)
    return folder


def text_of(environ: Mapping[str, str]) -> bytes:
    return b"".join(f"{name}={value}\0".encode() for name, value in environ.items())


def gpu(*pids: int) -> Reading:
    return Reading("GPU-0", 0, SECOND, processes=tuple(map(Process, pids)))


def of_cgroup(said: ProcessInfo) -> str:
    return said.cgroup.strip().rpartition("/")[2].removeprefix("job_")


# Members.


def test_each_process_of_a_job_is_its_member_with_its_rank(tmp_path: Path) -> None:
    process(tmp_path, 10, environ=b"RANK=3\0")
    process(tmp_path, 11, cgroup="0::/job_8\n")
    process(tmp_path, 12, cgroup="0::/\n")
    other = Reading("GPU-1", 0, SECOND, processes=(Process(11),))
    found = JobMembers(of_cgroup, proc=tmp_path).of_readings((gpu(10, 12, 99), other, Reading("GPU-2", 0, SECOND)))
    assert found == {10: Member("7", "3"), 11: Member("8")}


def test_proc_is_asked_once_for_a_process(tmp_path: Path) -> None:
    folder = process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path)
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}
    (folder / "cgroup").write_text("0::/job_8\n")
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}


def test_a_pid_used_again_is_somebody_else(tmp_path: Path) -> None:
    process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path)
    asked.of_readings((gpu(10),))
    process(tmp_path, 10, cgroup="0::/job_8\n", ticks=101)
    assert asked.of_readings((gpu(10),)) == {10: Member("8")}


def test_one_that_is_used_again_and_cannot_be_asked_is_not_the_one_before(tmp_path: Path) -> None:
    process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path)
    asked.of_readings((gpu(10),))
    (process(tmp_path, 10, ticks=101) / "cgroup").unlink()
    assert asked.of_readings((gpu(10),)) == {}


def test_one_that_has_just_ended_is_still_who_it_was_until_no_longer_listed(tmp_path: Path) -> None:
    folder = process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path)
    asked.of_readings((gpu(10),))
    (folder / "stat").unlink()
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}
    assert asked.of_readings((gpu(),)) == {}
    assert asked.of_readings((gpu(10),)) == {}, "forgotten when it was not listed"


def test_a_job_learnt_of_later_has_its_members_at_once(tmp_path: Path) -> None:
    process(tmp_path, 10)
    known: set[str] = set()
    asked = JobMembers(lambda said: of_cgroup(said) if of_cgroup(said) in known else "", proc=tmp_path)
    assert asked.of_readings((gpu(10),)) == {}
    known.add("7")
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}


def test_seen_drops_what_raises_and_keeps_the_rest(tmp_path: Path) -> None:
    def ask(folder: Path, ticks: int) -> int:
        if folder.name == "11":
            raise ValueError
        return ticks

    process(tmp_path, 10, ticks=5)
    process(tmp_path, 11)
    assert ProcessCache(tmp_path, ask).refresh([10, 11, 10]) == {10: 5}


# Processes that no GPU lists.


def test_of_those_that_report_proc_is_asked_once_whoever_else_is_asked_about(tmp_path: Path) -> None:
    folder = process(tmp_path, 10, environ=b"RANK=3\0")
    process(tmp_path, 11, cgroup="0::/job_8\n")
    asked = JobMembers(of_cgroup, proc=tmp_path)
    assert asked.of_pids([10, 99]) == {10: Member("7", "3")}
    (folder / "cgroup").write_text("0::/job_9\n")
    assert asked.of_pids([11]) == {11: Member("8")}
    assert asked.of_readings(()) == {}
    assert asked.of_pids([10, 11]) == {10: Member("7", "3"), 11: Member("8")}
    process(tmp_path, 10, cgroup="0::/job_9\n", ticks=101)
    assert asked.of_pids([10]) == {10: Member("9")}, "a pid used again"


def test_asking_about_others_forgets_none_that_a_gpu_lists(tmp_path: Path) -> None:
    folder = process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path)
    asked.of_readings((gpu(10),))
    asked.of_pids([10])
    (folder / "stat").unlink()
    asked.of_pids([])
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}


def test_a_job_is_proven_where_nobody_vouches(tmp_path: Path) -> None:
    process(tmp_path, 10)
    asked = JobMembers(of_cgroup, proc=tmp_path, proven=lambda _: "")
    assert asked.of_readings((gpu(10),)) == {10: Member("7")}
    assert asked.of_pids([10]) == {}


def test_as_many_are_kept_as_there_is_room_for_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.schedulers.procfs._MOST_CACHED", 2)
    asked = list[str]()

    def ask(folder: Path, _ticks: int) -> str:
        asked.append(folder.name)
        return folder.name

    for pid in (10, 11, 12):
        process(tmp_path, pid)
    seen = ProcessCache(tmp_path, ask)
    assert [seen.lookup([pid]) for pid in (10, 11, 10, 12, 11, 10)] == [
        {pid: f"{pid}"} for pid in (10, 11, 10, 12, 11, 10)
    ]
    assert asked == ["10", "11", "12", "11", "10"], "10 was asked about after 11"
    assert seen.lookup([10, 11, 12, 12]) == {10: "10", 11: "11", 12: "12"}, "all that are asked for, whatever the room"


# Fields of a process.


def test_of_an_environment_only_what_launchers_and_schedulers_set_is_kept(tmp_path: Path) -> None:
    environ = {
        "RANK": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "MY_RANK": "5",
        "OMPI_COMM_WORLD_RANK": "2",
        "PMIX_RANK": "3",
        "PBS_JOBID": "9.host",
        "LSB_JOBID": "10",
        "JOB_COMPLETION_INDEX": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "WANDB_API_KEY": "secret",
    }
    said = read_process(process(tmp_path, 10, environ=text_of(environ)))
    secret = {"SLURM_JWT", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_RANK"}
    assert said.environ == {name: value for name, value in environ.items() if name not in secret}
    assert (said.cgroup, said.command, said.uid) == ("0::/job_7\n", "a b", 1001)


def test_the_first_of_two_of_a_name_counts_as_for_getenv(tmp_path: Path) -> None:
    assert read_process(process(tmp_path, 10, environ=b"RANK=1\0RANK=2\0")).environ == {"RANK": "1"}


def test_an_entry_cut_by_the_limit_is_not_believed(tmp_path: Path) -> None:
    filler = b"X=" + b"x" * (256 * 1024 - len(b"RANK=1\0X=\0RANK=1")) + b"\0"
    said = read_process(process(tmp_path, 10, environ=b"RANK=1\0" + filler + b"RANK=12\0SLURM_PROCID=4\0"))
    assert said.environ == {"RANK": "1"}
    cut = read_process(process(tmp_path, 11, environ=b"XXXX=1\0" + filler + b"RANK=12\0"))
    assert cut.environ == {}, "RANK=1 is all that was read of RANK=12"


def test_what_may_not_be_read_is_empty(tmp_path: Path) -> None:
    folder = process(tmp_path, 10)
    (folder / "environ").unlink()
    (folder / "cmdline").unlink()
    assert read_process(folder) == ProcessInfo("0::/job_7\n", {}, "", 1001)


@pytest.fixture(scope="module")
def garbage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return process(tmp_path_factory.mktemp("proc"), 10)


@given(environ=st.binary(max_size=300), cgroup=st.binary(max_size=100), stat=st.binary(max_size=100))
def test_garbage_in_proc_is_read_or_refused_never_fatal(
    garbage: Path, environ: bytes, cgroup: bytes, stat: bytes
) -> None:
    for name, content in (("environ", environ), ("cgroup", cgroup), ("stat", stat), ("status", cgroup)):
        (garbage / name).write_bytes(content)
    said = read_process(garbage)
    assert all("\0" not in name + value for name, value in said.environ.items())
    found = JobMembers(lambda _: "1", proc=garbage.parent).of_readings((gpu(10),))
    assert all(member.rank == "" or member.rank.isdigit() for member in found.values())


# Ranks.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_PROCID": "5"}, "5"),
        ({"SLURM_PROCID": "1", "RANK": "9"}, "9"),  # torchrun under srun: eight workers inherit one SLURM_PROCID
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "6"}, "6"),  # mpirun in a batch script, which is task 0
        ({"SLURM_PROCID": "0", "PMIX_RANK": "2"}, "2"),
        ({"PMI_RANK": "4"}, "4"),
        ({"MV2_COMM_WORLD_RANK": "4"}, "4"),
        ({"JOB_COMPLETION_INDEX": "3"}, "3"),
        ({"JOB_COMPLETION_INDEX": "3", "RANK": "25"}, "25"),
        ({"RANK": "", "SLURM_PROCID": "7"}, "7"),
        ({"RANK": "-1", "SLURM_PROCID": "7"}, "7"),
        ({"RANK": "gold"}, ""),
        ({"RANK": "²"}, ""),
        ({"RANK": "1" * 40}, ""),
        ({}, ""),
    ],
)
def test_the_innermost_launcher_knows_the_rank(environ: dict[str, str], expected: str) -> None:
    assert rank_of(environ) == expected


# On this machine.


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    environ = {"PATH": os.environ["PATH"], "RANK": "3", "SLURM_JOB_ID": "42", "TOKEN": "secret"}
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], env=environ, stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.communicate(b"\n")


def test_a_real_process_tells_its_job_and_rank(worker: subprocess.Popen[bytes]) -> None:
    asked = JobMembers(lambda said: said.environ.get("SLURM_JOB_ID", ""))
    assert asked.of_readings((gpu(worker.pid),)) == {worker.pid: Member("42", "3")}
    said = read_process(Path("/proc") / str(worker.pid))
    assert said.uid == os.getuid()
    assert said.command.endswith("input()")
    assert set(said.environ) == {"RANK", "SLURM_JOB_ID"}


def test_a_user_s_name_that_is_no_utf_8_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an old Latin-1 /etc/passwd: Python decodes such a byte as a surrogate."""
    entry = pwd.struct_passwd(("zo\udceb", "x", 1001, 1001, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    assert user_name(1001) == "zo\\udceb"
    assert user_name(1001).encode()


def test_a_name_is_asked_for_once_and_a_user_without_one_each_minute() -> None:
    directory, asked, now = {1001: "ada"}, list[int](), [5.0]

    def user_of(uid: int) -> str:
        asked.append(uid)
        return directory.get(uid, str(uid))

    names = UserNames(user_of, clock=lambda: now[0])
    assert [names(uid) for uid in (1001, 1002, 1001, 1002)] == ["ada", "1002", "ada", "1002"]
    assert asked == [1001, 1002]
    directory[1002] = "bob"
    now[0] = 64.9
    assert names(1002) == "1002"
    now[0] = 65.0
    assert [names(1002), names(1002)] == ["bob", "bob"]
    directory.clear()
    now[0] = 1e9
    assert [names(1001), names(1002)] == ["ada", "bob"]
    assert asked == [1001, 1002, 1002]
