"""Real processes with real standard outputs, and the follower thread."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from exporter.clock import SystemClock
from exporter.config import Config, FollowSettings
from exporter.core.model import SECOND
from exporter.training.logs.watcher import COUNTS, MOST_PENDING, LogFollowerThread, LogWatcher, open_log_follower
from exporter.training.message import LoggedMessage, Message
from exporter.workloads import WorkloadProcess
from tests.clocks import JumpClock
from tests.training import follow_logs as logs
from tests.waiting import PATIENCE, wait_for


class Echo:
    """A process that copies its input to its standard output."""

    def __init__(self, output: IO[bytes] | int, *command: str) -> None:
        self.process = subprocess.Popen(command or ("cat",), stdin=subprocess.PIPE, stdout=output)
        self.pid = self.process.pid

    def write(self, *lines: str) -> None:
        assert self.process.stdin
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(PATIENCE)


Start = Callable[..., Echo]


@pytest.fixture(name="start")
def _start() -> Iterator[Start]:
    started: list[Echo] = []

    def start(output: IO[bytes] | int, *command: str) -> Echo:
        started.append(Echo(output, *command))
        return started[-1]

    yield start
    for echo in started:
        echo.close()


@pytest.fixture(name="watch")
def _watch() -> Iterator[LogWatcher]:
    watch = LogWatcher([FollowSettings()])
    yield watch
    watch.close()


def until(found: Callable[[], bool]) -> None:
    wait_for(found, "it comes", step=0.01)


def written(path: Path, size: int) -> None:
    """Wait until the file has the given size."""
    until(lambda: path.stat().st_size >= size)


def poll(watch: LogWatcher, *processes: WorkloadProcess) -> list[LoggedMessage]:
    return watch.poll(time.monotonic_ns() // 1_000_000 * 1_000_000, wall=time.time_ns(), processes=processes)


def gathered(take: Callable[[], Sequence[LoggedMessage]], size: int) -> list[LoggedMessage]:
    """Poll until there are so many messages, and return them."""
    found: list[LoggedMessage] = []

    def enough() -> bool:
        found.extend(take())
        return len(found) >= size

    until(enough)
    return found


def line(step: int) -> str:
    return logs.megatron(step, ms=1000.0)


def test_the_standard_output_of_a_process_is_followed(start: Start, watch: LogWatcher, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        echo = start(output)
    process = WorkloadProcess(echo.pid, "12", rank="0")
    echo.write(line(10))
    written(tmp_path / "out", 100)
    assert poll(watch, process) == []
    (tmp_path / "out").unlink()  # as in another mount namespace: the path does not exist
    echo.write(line(20))
    found = gathered(lambda: poll(watch, process), 1)
    assert [(one.pid, one.job_id, one.message.step, one.message.steps) for one in found] == [(echo.pid, "12", 20, 10)]
    assert 0 <= time.monotonic_ns() - found[0].at < PATIENCE * SECOND


def test_of_an_ancestor_where_its_own_is_a_pipe(start: Start, watch: LogWatcher, tmp_path: Path) -> None:
    """As with torchrun --tee: the worker writes to a pipe, the launcher to the job's file."""
    with (tmp_path / "out").open("wb") as output:
        echo = start(output, "sh", "-c", "cat | cat; true")
    children = Path(f"/proc/{echo.pid}/task/{echo.pid}/children")
    until(lambda: any(is_piped(pid) for pid in children.read_text().split()))
    worker = next(int(pid) for pid in children.read_text().split() if is_piped(pid))
    poll(watch, WorkloadProcess(worker, "12"))
    echo.write(line(10))
    written(tmp_path / "out", 100)
    assert [(one.pid, one.message.step) for one in poll(watch, WorkloadProcess(worker, "12"))] == [(worker, 10)]


def is_piped(pid: str) -> bool:
    try:
        piped = str(Path(f"/proc/{pid}/fd/1").readlink()).startswith("pipe:")
        return piped and Path(f"/proc/{pid}/comm").read_text() == "cat\n"
    except OSError:
        return False


def test_an_ancestor_in_another_control_group_or_of_another_user_is_not_asked(tmp_path: Path) -> None:
    """A fake /proc: the worker's parent is in its cgroup, its grandparent is not."""
    (tmp_path / "log").touch()
    for pid, parent, group, output in (
        (30, 20, "/job", "/dev/null"),
        (20, 10, "/job", "/dev/null"),
        (10, 1, "/else", ""),
    ):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cgroup").write_text(f"0::{group}\n")
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1")
        (folder / "fd" / "1").symlink_to(output or tmp_path / "log")
    watch = LogWatcher([FollowSettings()], proc=str(tmp_path))
    watch.poll(SECOND, wall=0, processes=[WorkloadProcess(30, "12")])
    assert not watch._files
    (tmp_path / "10" / "cgroup").write_text("0::/job\n")
    watch.poll(2 * SECOND, wall=0, processes=[WorkloadProcess(30, "12")])
    assert len(watch._files) == 1
    watch.close()


def test_the_same_output_of_several_ranks_is_followed_once(start: Start, watch: LogWatcher, tmp_path: Path) -> None:
    """Messages are attributed to the lowest rank, even if its pid is the highest."""
    with (tmp_path / "out").open("ab") as output:
        third, first, unknown = start(output), start(output), start(output)
    processes = [
        WorkloadProcess(unknown.pid, "12"),
        WorkloadProcess(third.pid, "12", rank="10"),
        WorkloadProcess(first.pid, "12", rank="9"),
    ]
    poll(watch, *processes)
    third.write(line(10))
    written(tmp_path / "out", 100)
    assert [(one.pid, one.message.step) for one in poll(watch, *processes)] == [(first.pid, 10)]
    assert watch.counts["log_files"] == 1
    third.write(line(20))
    written(tmp_path / "out", 500)
    assert [one.pid for one in poll(watch, *processes[:2])] == [third.pid]


def test_what_it_only_reads_is_no_log(start: Start, watch: LogWatcher, tmp_path: Path) -> None:
    """A process's standard output is followed only if it is open for writing."""
    (tmp_path / "secret").write_text(line(10) + "\n")
    with (tmp_path / "secret").open("rb") as output:
        echo = start(output, "sleep", "600")
    try:
        poll(watch, WorkloadProcess(echo.pid, "12"))
    finally:
        echo.process.terminate()
    opened = [Path(f"/proc/self/fd/{file.tail._handle}").readlink().name for file in watch._files.values()]
    assert "secret" not in opened


def test_processes_that_are_gone_or_have_no_file_are_passed_over(start: Start, watch: LogWatcher) -> None:
    echo = start(subprocess.DEVNULL)
    gone = start(subprocess.DEVNULL)
    gone.close()
    assert (
        poll(
            watch,
            WorkloadProcess(echo.pid, "12"),
            WorkloadProcess(gone.pid, "12"),
            WorkloadProcess(0, "13"),
            WorkloadProcess(1 << 30, "14"),
        )
        == []
    )
    assert {name for name, count in watch.counts.items() if count} <= {"log_files"}


@pytest.fixture(name="followers")
def _followers() -> Iterator[LogFollowerThread]:
    followers = open_log_follower(Config(follow=(FollowSettings(framework="megatron"),)), SystemClock())
    yield followers
    followers.close()


@pytest.mark.e2e
def test_the_thread_follows_who_is_here(start: Start, followers: LogFollowerThread, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        echo = start(output)
    processes = [WorkloadProcess(echo.pid, "12")]
    until(lambda: followers.poll(processes) == () and followers.counts()["log_files"] == 1)
    echo.write(line(10), line(20))
    found = gathered(lambda: followers.poll(processes), 2)
    assert [(one.message.step, one.message.steps) for one in found] == [(10, 1), (20, 10)]
    assert followers.counts()["log_messages"] == 2
    assert set(followers.counts()) == set(COUNTS)


def test_closing_ends_the_thread(followers: LogFollowerThread) -> None:
    followers.poll([])
    followers.close()
    assert not followers._worker.alive
    assert followers.poll([]) == ()


def test_taking_does_not_wait_for_a_look(followers: LogFollowerThread) -> None:
    """A hanging file system blocks only the follower thread."""
    entered, leave = threading.Event(), threading.Event()

    def hangs(now: int, *, wall: int, processes: Sequence[WorkloadProcess]) -> list[LoggedMessage]:
        del now, wall, processes
        entered.set()
        leave.wait(PATIENCE)
        return [LoggedMessage(1, "12", Message(step=n), 0) for n in range(MOST_PENDING + 2)]

    followers._watcher.poll = hangs  # type: ignore[method-assign]
    followers.poll([])
    assert entered.wait(PATIENCE)
    assert followers.poll([]) == ()
    followers._stop.set()
    leave.set()
    until(lambda: followers.counts()["log_dropped"] == 2)
    taken = followers.poll([])
    assert len(taken) == MOST_PENDING
    assert taken[0].message.step == 2


def test_a_path_that_names_no_job_is_told(caplog: pytest.LogCaptureFixture) -> None:
    open_log_follower(Config(follow=(FollowSettings(path="/logs/*.log"),)), JumpClock()).close()
    assert "follow[0].path" in caplog.text
    assert "{job_id}" in caplog.text
