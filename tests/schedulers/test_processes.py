"""Allocations without a scheduler: on a made-up /proc, and on the real one with real processes."""

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from exporter.config import Config, HostSettings, WorkloadRule, WorkloadSettings
from exporter.core.model import MS, SECOND, Allocation, Process, Reading
from exporter.schedulers.base import Member, SchedulerError
from exporter.schedulers.processes import ProcessesScheduler, open_processes
from exporter.schedulers.procfs import UserNames

HERTZ = os.sysconf("SC_CLK_TCK")
ALICE, BOB = 1001, 1002
CONTAINER = "8f4e2c1ab0d9" + "0123456789abcdef" * 3 + "0123"
POD = "0a1b2c3d-1111-2222-3333-444455556666"


class Proc:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        pid: int,
        *,
        uid: int = ALICE,
        started: float = 1.0,
        cgroup: str = "0::/system.slice/train.service",
        command: str = "python\0train.py\0",
        comm: str = "python",
    ) -> Process:
        folder = self.root / str(pid)
        folder.mkdir()
        ticks = round(started * HERTZ)
        fields = ["S", *["0"] * 18, str(ticks), *["0"] * 30]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUmask:\t0022\nUid:\t{uid}\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
        (folder / "cgroup").write_text(cgroup + "\n")
        (folder / "cmdline").write_text(command)
        return Process(pid, name="/usr/bin/python3")

    def end(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def scheduler(proc: Proc, asleep: int = 0) -> ProcessesScheduler:
    users = {ALICE: "alice", BOB: "bob"}
    return ProcessesScheduler(proc=proc.root, user_of=lambda uid: users[uid], suspended=lambda: asleep)


def gpu(index: int, *processes: Process, at: int = 100 * SECOND) -> Reading:
    return Reading(f"GPU-{index}", at - SECOND, at, processes=processes)


def blind(index: int, at: int = 100 * SECOND) -> Reading:
    return Reading(f"GPU-{index}", at - SECOND, at)


def told(asked: ProcessesScheduler, now: int, *readings: Reading) -> tuple[Allocation, ...]:
    state = asked.poll(now, (), readings)
    assert state is not None
    return state.allocations


def look(asked: ProcessesScheduler, *readings: Reading) -> tuple[Allocation, ...]:
    return told(asked, readings[0].end, *readings)


def test_several_processes_of_one_unit_are_one_owner_since_the_earliest(proc: Proc) -> None:
    first, second = proc.add(10, started=7.0), proc.add(11, started=5.0)
    (held,) = look(scheduler(proc), gpu(0, first, second))
    assert held.uuid == "GPU-0"
    assert (held.owner.job_id, held.owner.user, held.owner.name) == (
        "alice/train.service",
        "alice",
        "train.service",
    )
    assert (held.owner.scheduler, held.owner.workload_class) == ("processes", "batch")
    assert (held.start, held.end, held.gpus) == (5 * SECOND, None, 1)


def test_two_users_on_one_gpu_are_two_owners(proc: Proc) -> None:
    held = look(scheduler(proc), gpu(0, proc.add(10), proc.add(11, uid=BOB)))
    assert sorted(a.owner.job_id for a in held) == ["alice/train.service", "bob/train.service"]


def test_gpus_counts_all_that_the_owner_holds_and_follows_them(proc: Proc) -> None:
    asked, ours, theirs = scheduler(proc), proc.add(10), proc.add(11, uid=BOB)
    held = look(asked, gpu(0, ours), gpu(1, ours), gpu(2, theirs))
    assert {(a.uuid, a.owner.user, a.gpus) for a in held} == {
        ("GPU-0", "alice", 2),
        ("GPU-1", "alice", 2),
        ("GPU-2", "bob", 1),
    }
    later = look(asked, gpu(0, ours, at=101 * SECOND), gpu(1, at=101 * SECOND), gpu(2, theirs, at=101 * SECOND))
    assert {(a.uuid, a.end, a.gpus) for a in later} == {
        ("GPU-0", None, 1),
        ("GPU-1", 101 * SECOND, 2),
        ("GPU-2", None, 1),
    }


def test_an_end_is_told_once_at_the_look_that_missed_the_last_process(proc: Proc) -> None:
    asked, one, two = scheduler(proc), proc.add(10, started=5), proc.add(11, started=6)
    look(asked, gpu(0, one, two))
    proc.end(10)
    (still,) = look(asked, gpu(0, two, at=101 * SECOND))
    assert (still.start, still.end) == (5 * SECOND, None)
    proc.end(11)
    (ended,) = look(asked, gpu(0, at=102 * SECOND))
    assert (ended.start, ended.end, ended.gpus) == (5 * SECOND, 102 * SECOND, 1)
    assert look(asked, gpu(0, at=103 * SECOND)) == ()


def test_an_invisible_list_keeps_the_owner(proc: Proc) -> None:
    asked, one = scheduler(proc), proc.add(10)
    before = look(asked, gpu(0, one))
    proc.end(10)
    assert look(asked, blind(0, at=101 * SECOND)) == before
    assert told(asked, 102 * SECOND) == before
    assert [a.end for a in look(asked, gpu(0, at=103 * SECOND))] == [103 * SECOND]


def test_no_list_at_all_is_an_error_not_an_idle_machine(proc: Proc) -> None:
    with pytest.raises(SchedulerError, match=r"process list.*nvml source"):
        look(scheduler(proc), blind(0), blind(1))
    assert scheduler(proc).poll(0, (), ()) is None, "nothing was seen yet: that is not nobody"
    assert look(scheduler(proc), blind(0), gpu(1)) == ()


def test_a_tick_without_readings_ends_no_blindness(proc: Proc) -> None:
    asked = scheduler(proc)
    for second, readings in enumerate(((blind(0),), ())):
        with pytest.raises(SchedulerError, match="no GPU's process list"):
            asked.poll((100 + second) * SECOND, (), readings)
    assert look(asked, gpu(0)) == ()


def test_a_missing_proc_is_an_error(tmp_path: Path) -> None:
    asked = ProcessesScheduler(proc=tmp_path / "no")
    with pytest.raises(SchedulerError, match=r"no is no directory: mount"):
        look(asked, gpu(0, Process(1)))


def test_every_listed_process_is_a_member_of_its_owner_with_its_rank(proc: Proc) -> None:
    first, second, hidden = proc.add(10), proc.add(11, uid=BOB), Process(77, name="/opt/python")
    (proc.root / "10" / "environ").write_bytes(b"RANK=5\0")
    state = scheduler(proc).poll(100 * SECOND, (), (gpu(0, first, hidden), gpu(1, second), blind(2)))
    assert state is not None
    assert state.members == {
        10: Member("alice/train.service", "5"),
        11: Member("bob/train.service"),
        77: Member("unknown/python"),
    }


def test_whoever_has_a_process_on_a_gpu_is_the_owner_of_all_of_that_user_and_unit(proc: Proc) -> None:
    asked = scheduler(proc)
    proc.add(11), proc.add(12, uid=BOB), proc.add(13, cgroup="0::/system.slice/other.service")
    assert asked.members([11]) == {}, "nobody holds anything yet"
    (proc.root / "11" / "environ").write_bytes(b"RANK=5\0")
    one = proc.add(10)
    asked.poll(100 * SECOND, (), (gpu(0, one),))
    proc.add(14)
    (proc.root / "14" / "environ").write_bytes(b"RANK=6\0")
    assert asked.members([10, 11, 12, 13, 14, 99]) == {
        10: Member("alice/train.service"),
        11: Member("alice/train.service"),  # as when it was first read
        14: Member("alice/train.service", "6"),
    }
    asked.poll(101 * SECOND, (), (gpu(0, at=101 * SECOND),))
    assert asked.members([10, 11]) == {}


def test_what_is_known_grows_old_while_no_list_is_seen(proc: Proc) -> None:
    asked, one = scheduler(proc), proc.add(10)
    ticks: list[tuple[Reading, ...]] = [(gpu(0, one),), (blind(0),), (), (blind(0),), (blind(0), gpu(1))]
    words = [asked.poll((100 + second) * SECOND, (), readings) for second, readings in enumerate(ticks)]
    ages = [None if state is None else 100 + second - state.at // SECOND for second, state in enumerate(words)]
    assert ages == [0, 1, 0, 1, 0], "a tick without readings says nothing of anybody's sight"


# Start and end.


def test_time_asleep_is_taken_off_and_ticks_round_up_to_whole_milliseconds(proc: Proc) -> None:
    (held,) = look(scheduler(proc, asleep=2 * SECOND - 1), gpu(0, proc.add(10, started=7.5)))
    assert held.start == 5_501 * MS
    (exact,) = look(scheduler(proc, asleep=2 * SECOND), gpu(0, Process(10)))
    assert exact.start == 5_500 * MS


def test_a_start_is_never_later_than_now(proc: Proc) -> None:
    (held,) = look(scheduler(proc), gpu(0, proc.add(10, started=500)))
    assert held.start == 100 * SECOND


def test_an_old_process_that_was_not_on_the_last_list_held_nothing_before_it(proc: Proc) -> None:
    asked, notebook = scheduler(proc), proc.add(10, started=5)
    assert look(asked, gpu(0)) == ()
    (held,) = look(asked, gpu(0, notebook, at=101 * SECOND))
    assert held.start == 100 * SECOND
    fresh = proc.add(11, uid=BOB, started=101.25)
    both = look(asked, gpu(0, notebook, fresh, at=102 * SECOND))
    assert {(a.owner.user, a.start) for a in both} == {("alice", 100 * SECOND), ("bob", 101_250 * MS)}


def test_an_owner_that_comes_back_never_overlaps_its_own_past(proc: Proc) -> None:
    asked, one = scheduler(proc), proc.add(10, started=5)
    look(asked, gpu(0, one))
    (ended,) = look(asked, gpu(0, at=101 * SECOND))
    (again,) = look(asked, gpu(0, one, at=102 * SECOND))
    assert ended.end == again.start == 101 * SECOND


# Owners.


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/train.service", "train.service"),
        ("0::/user.slice/user-1001.slice/session-3.scope", "session-3.scope"),
        (
            "0::/user.slice/user-1001.slice/user@1001.service/app.slice/run-r1.scope",
            "run-r1.scope",
        ),
        (r"0::/system.slice/system-jupyter\x2dhub.slice/jupyter\x2dhub@a.service", "jupyter-hub@a.service"),
        ("1:name=systemd:/system.slice/old.service", "old.service"),
        ("4:memory:/\n1:name=systemd:/system.slice/old.service\n0::/", "old.service"),
        ("1:name=systemd:/a.service\n0::/b.service", "b.service"),
        ("4:memory:/docker/" + CONTAINER + "\n1:name=systemd:/init.scope", "init.scope"),
        ("4:memory:/docker/" + CONTAINER + "\n0::/", "container-8f4e2c1ab0d9"),
        (f"0::/system.slice/docker-{CONTAINER}.scope", "container-8f4e2c1ab0d9"),
        (f"0::/machine.slice/libpod-{CONTAINER}.scope/container", "container-8f4e2c1ab0d9"),
        (
            f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope",
            f"pod-{POD}",
        ),
        (f"11:devices:/kubepods/besteffort/pod{POD}/{CONTAINER}", f"pod-{POD}"),
        ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "slurm-42"),
        ("8:devices:/slurm/uid_1001/job_42/step_batch", "slurm-42"),
        ("0::/system.slice/n1_slurmstepd.scope/s321M8E9Y2V700/step_0/user/task_0", "slurm-s321M8E9Y2V700"),
        ("0::/lxc.payload.web1/system.slice", "lxc-web1"),
        ("0::/", "no-unit"),
        ("", "no-unit"),
        ("nonsense", "no-unit"),
        ("0::/../../..", "no-unit"),
    ],
)
def test_the_unit_is_the_last_name_people_know(proc: Proc, cgroup: str, unit: str) -> None:
    (held,) = look(scheduler(proc), gpu(0, proc.add(10, cgroup=cgroup)))
    assert (held.owner.job_id, held.owner.name) == (f"alice/{unit}", unit)


@pytest.mark.parametrize(
    ("cgroup", "command", "kind"),
    [
        ("0::/user.slice/user-1001.slice/session-3.scope", "python\0a.py", "interactive"),
        ("0::/user.slice/user-1001.slice/user@1001.service/tmux.scope", "python\0a.py", "interactive"),
        ("0::/system.slice/jupyter-alice.service", "python\0a.py", "interactive"),
        (f"0::/docker/{CONTAINER}", "python\0-m\0ipykernel_launcher\0-f\0k.json", "interactive"),
        (f"0::/docker/{CONTAINER}", "python\0train.py", "batch"),
        (f"0::/docker/{CONTAINER}", "vllm\0serve\0m", "serving"),
        ("0::/system.slice/session-manager.service", "python\0a.py", "batch"),
    ],
)
def test_people_at_work_are_interactive_and_servers_serve(proc: Proc, cgroup: str, command: str, kind: str) -> None:
    (held,) = look(scheduler(proc), gpu(0, proc.add(10, cgroup=cgroup, command=command)))
    assert held.owner.workload_class == kind


def test_the_operators_rules_judge_and_the_hosts_proc_is_read(proc: Proc) -> None:
    process = proc.add(10, uid=ALICE, command="python\0eval.py\0--all")
    rule = WorkloadRule(workload_class="serving", team="search", zombie_seconds=90.0, command=r"eval\.py --all")
    asked = open_processes(Config(host=HostSettings(proc=str(proc.root)), workload=WorkloadSettings((rule,))))
    (held,) = look(asked, gpu(0, process))
    assert (held.owner.workload_class, held.owner.team, held.owner.zombie_seconds) == ("serving", "search", 90.0)


def test_a_process_without_a_readable_command_line_is_still_known(proc: Proc) -> None:
    process = proc.add(10)
    (proc.root / "10" / "cmdline").unlink()
    assert [a.owner.user for a in look(scheduler(proc), gpu(0, process))] == ["alice"]


def test_brackets_in_a_name_do_not_shift_the_fields(proc: Proc) -> None:
    (held,) = look(scheduler(proc), gpu(0, proc.add(10, started=7, comm="a) S (b) 1 2 3")))
    assert held.start == 7 * SECOND


def test_a_uid_without_a_name_is_its_number(proc: Proc) -> None:
    used = {entry.pw_uid for entry in pwd.getpwall()}
    nobody = next(uid for uid in range(3_000_000, 3_001_000) if uid not in used)
    asked = ProcessesScheduler(proc=proc.root, suspended=lambda: 0)
    (held,) = look(asked, gpu(0, proc.add(10, uid=nobody)))
    assert held.owner.user == str(nobody)


def test_a_name_is_asked_once(proc: Proc) -> None:
    asked_for: list[int] = []

    def user_of(uid: int) -> str:
        asked_for.append(uid)
        return "alice"

    asked = ProcessesScheduler(proc=proc.root, user_of=user_of, suspended=lambda: 0)
    look(asked, gpu(0, proc.add(10), proc.add(11)))
    look(asked, gpu(0, proc.add(12), at=101 * SECOND))
    assert asked_for == [ALICE]


def test_what_proc_does_not_show_is_unknown_but_still_an_owner(proc: Proc) -> None:
    hidden = (Process(77, name="/opt/conda/bin/python"), Process(78, name="/usr/bin/python"), Process(79))
    held = look(scheduler(proc), gpu(0, *hidden))
    assert {(a.owner.job_id, a.owner.user, a.start) for a in held} == {
        ("unknown/python", "", 99 * SECOND),
        ("unknown/process", "", 99 * SECOND),
    }
    assert all("not visible in /proc" in a.owner.name for a in held)


def test_a_process_that_ended_since_the_list_was_made_is_still_who_it_was(proc: Proc) -> None:
    asked, one = scheduler(proc), proc.add(10, started=5)
    look(asked, gpu(0, one))
    proc.end(10)
    (held,) = look(asked, gpu(0, one, at=101 * SECOND))
    assert (held.owner.user, held.start, held.end) == ("alice", 5 * SECOND, None)


def test_a_pid_used_again_is_somebody_else(proc: Proc) -> None:
    asked, one = scheduler(proc), proc.add(10, started=5)
    look(asked, gpu(0, one))
    proc.end(10)
    other = proc.add(10, uid=BOB, started=100.5)
    held = look(asked, gpu(0, other, at=101 * SECOND))
    assert {(a.owner.user, a.start, a.end) for a in held} == {
        ("alice", 5 * SECOND, 101 * SECOND),
        ("bob", 100_500 * MS, None),
    }


@pytest.mark.parametrize("file", ["stat", "status", "cgroup"])
@pytest.mark.parametrize("text", ["", "garbage", "\udcff)", "1 (a) S 2"])
def test_nonsense_in_proc_is_an_unknown_owner(proc: Proc, file: str, text: str) -> None:
    process = proc.add(10)
    (proc.root / "10" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    (held,) = look(scheduler(proc), gpu(0, process))
    expected = "alice/no-unit" if file == "cgroup" else "unknown/python3"
    assert held.owner.job_id == expected


# On this machine.


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


def my_name() -> str:
    """Return the user's name; a container may run as a uid that has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"{os.getuid()}"


def test_a_real_process_is_known_since_it_began_until_it_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    now = -(-time.monotonic_ns() // MS) * MS
    asked = open_processes(Config())
    listed = Process(sleeper.pid, name=sys.executable)
    (held,) = told(asked, now, Reading("GPU-0", now - SECOND, now, processes=(listed,)))
    me = my_name()
    assert held.owner.user == me
    assert held.owner.job_id.startswith(f"{me}/")
    assert held.start % MS == 0
    # It started after this test's own process and before `now`: a wrong clock would be off by far more.
    me_too = Reading("GPU-0", now - SECOND, now, processes=(Process(os.getpid()),))
    (mine,) = told(ProcessesScheduler(), now, me_too)
    assert mine.start <= held.start <= now
    sleeper.kill()
    sleeper.wait()
    (ended,) = told(asked, now + SECOND, Reading("GPU-0", now, now + SECOND, processes=()))
    assert (ended.start, ended.end) == (held.start, now + SECOND)
    asked.close()


def test_a_real_start_lies_between_the_moments_around_it() -> None:
    before = time.monotonic_ns()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        now = -(-time.monotonic_ns() // MS) * MS
        reading = Reading("GPU-0", now - SECOND, now, processes=(Process(child.pid),))
        (held,) = told(ProcessesScheduler(), now, reading)
    finally:
        child.communicate(b"\n")
    tick = SECOND // HERTZ
    assert before - tick - MS <= held.start <= now


def test_of_a_user_without_a_name_the_name_service_is_asked_ever_more_rarely() -> None:
    """What it answers is waited for, by the thread that reads the GPUs."""
    asked, now = list[float](), [0.0]

    def user_of(uid: int) -> str:
        asked.append(now[0])
        return str(uid)

    names = UserNames(user_of, clock=lambda: now[0])
    for second in range(0, 4 * 3600, 10):
        now[0] = float(second)
        assert names(1001) == "1001"
    apart = [after - before for before, after in pairwise(asked)]
    assert apart == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_who_had_no_name_at_boot_is_called_by_it_as_soon_as_it_is_known(proc: Proc) -> None:
    """The name service came up after the daemon: the job of the number ends, the one of the name begins."""
    directory, now = dict[int, str](), [0.0]
    asked = scheduler(proc)
    asked._user_of = UserNames(lambda uid: directory.get(uid, str(uid)), clock=lambda: now[0])
    worker, other = proc.add(10), proc.add(11)
    (held,) = look(asked, gpu(0, worker, at=100 * SECOND))
    assert (held.owner.job_id, held.owner.user) == ("1001/train.service", "1001")
    directory[ALICE] = "alice"
    now[0] = 60.0
    ended, held = sorted(look(asked, gpu(0, worker, at=160 * SECOND)), key=lambda each: each.end is None)
    assert (ended.owner.job_id, ended.end) == ("1001/train.service", 160 * SECOND)
    assert (held.owner.job_id, held.owner.user, held.owner.name) == ("alice/train.service", "alice", "train.service")
    assert held.start == 100 * SECOND
    assert asked.members([other.pid]) == {11: Member("alice/train.service", "")}
    assert look(asked, gpu(0, worker, at=161 * SECOND)) == (held,)
