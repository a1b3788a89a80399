"""Log files that appear, grow, are rotated, truncated, replaced and deleted; their owners, and which are not opened."""

import os
import socket
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import FollowSettings
from exporter.core.model import SECOND
from exporter.job_files import BEHIND_BYTES, LINE_BYTES, FileRefusedError, FileTail, open_job_file
from exporter.training.logs.watcher import (
    ALL_BURST,
    ALL_RATE,
    COUNTS,
    FILE_BYTES,
    FRESH_BYTES,
    MOST_FILES,
    USER_BURST,
    USER_RATE,
    LogWatcher,
)
from exporter.training.message import LoggedMessage
from exporter.workloads import WorkloadProcess
from tests.training import follow_logs as logs

ME = os.getpid()


class Node:
    """Jobs whose only process is this one, with logs in a folder."""

    def __init__(self, folder: Path, *rows: FollowSettings) -> None:
        self.folder, self.now = folder, 1000 * SECOND
        self.processes = [WorkloadProcess(ME, "12", rank="0")]
        self.watch = LogWatcher(rows or (FollowSettings(path=f"{folder}/{{job_id}}*.log"),))

    def write(self, name: str, *lines: str, end: str = "\n") -> Path:
        path = self.folder / name
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(line + end for line in lines))
        return path

    def poll(self, *, after: float = 6.0) -> list[LoggedMessage]:
        """Poll after the search interval has passed."""
        self.now += int(after * SECOND)
        return self.watch.poll(self.now, wall=0, processes=self.processes)

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.watch.counts.items() if count}


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*rows: FollowSettings, folder: Path = tmp_path) -> Node:
        made.append(Node(folder, *rows))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()


def steps(found: list[LoggedMessage]) -> list[Any]:
    return [(one.message.step, one.message.steps, one.message.restart) for one in found]


def line(step: int, **more: Any) -> str:
    return logs.megatron(step, ms=1000.0, **more)


Make = Callable[..., Node]


def test_a_log_that_was_there_counts_from_its_end_on(node: Make) -> None:
    """Old lines yield the world size and the last step, and no message."""
    a = node()
    a.write("12.log", *logs.megatron_start(), *(f"noise {n} " + "x" * 100 for n in range(2000)), line(10), line(20))
    assert a.poll() == []
    a.write("12.log", line(30))
    (one,) = a.poll()
    assert (one.pid, one.job_id, one.at) == (ME, "12", a.now)
    assert (one.message.step, one.message.steps, one.message.seconds) == (30, 10, 10.0)
    assert (one.message.world_size, one.message.samples, one.message.tokens) == (16, 80.0, 80.0 * 4096)
    assert a.counts() == {"log_files": 1, "log_lines": 1, "log_understood": 1, "log_messages": 1}


def test_a_log_that_comes_later_is_read_from_its_beginning(node: Make) -> None:
    a = node()
    assert a.poll() == []
    a.write("12.log", *logs.megatron_start(), line(10), line(20))
    assert steps(a.poll()) == [(10, 10, False), (20, 10, False)]


def test_a_huge_log_is_not_read(node: Make) -> None:
    """A sparse file of four gigabytes, and a line."""
    a = node()
    path = a.write("12.log", *logs.megatron_start())
    os.truncate(path, 4 << 30)
    a.write("12.log", "", line(10))
    assert a.poll() == []
    a.write("12.log", line(20))
    (one,) = a.poll()
    assert (one.message.steps, one.message.world_size) == (10, 16)


def test_a_huge_log_that_comes_later_is_not_read_either(node: Make) -> None:
    a = node()
    a.poll()
    a.write("12.log", *(["x" * 1000] * (FRESH_BYTES // 1000 + 1)), line(10))
    assert a.poll() == []
    a.write("12.log", line(20))
    assert steps(a.poll()) == [(20, 1, False)]


def test_a_line_is_read_when_it_is_whole(node: Make) -> None:
    a = node()
    a.write("12.log", line(10))
    a.poll()
    text = line(20)
    a.write("12.log", text[:70], end="")
    assert a.poll() == []
    a.write("12.log", text[70:], end="")
    assert a.poll() == []
    a.write("12.log", "")
    assert steps(a.poll()) == [(20, 10, False)]


def test_a_line_that_had_begun_before_is_whole_too(node: Make) -> None:
    a = node()
    a.write("12.log", line(10) + "\n" + line(20)[:70], end="")
    a.poll()
    a.write("12.log", line(20)[70:])
    assert steps(a.poll()) == [(20, 10, False)]


def test_rotation_by_a_new_name(node: Make) -> None:
    a = node()
    path = a.write("12.log", line(10))
    a.poll()
    a.write("12.log", line(20))
    path.rename(path.with_suffix(".log.1"))
    a.write("12.log", line(30))
    assert steps(a.poll()) == [(20, 10, False), (30, 10, False)]
    a.write("12.log", line(40))
    assert steps(a.poll()) == [(40, 10, False)]


def test_rotation_by_copy_and_truncation(node: Make) -> None:
    """copytruncate: the copy's name has the same prefix, and it contains nothing new."""
    a = node(FollowSettings(path=f"{node().folder}/{{job_id}}*"))
    path = a.write("12.log", line(10))
    a.poll()
    a.write("12.log", line(20))
    a.poll()
    (a.folder / "12.log.1").write_bytes(path.read_bytes())
    os.truncate(path, 0)
    a.write("12.log", line(30))
    assert steps(a.poll()) == [(30, 10, False)]
    assert a.counts()["log_truncated"] == 1


def test_a_writer_that_does_not_append_leaves_a_hole(node: Make) -> None:
    a = node()
    with (a.folder / "12.log").open("w") as file:
        file.write(("x" * 100 + "\n") * 1000 + line(10) + "\n")
        file.flush()
        a.poll()
        os.truncate(file.name, 0)
        file.write(line(20) + "\n")
        file.flush()
        assert steps(a.poll()) == [(20, 10, False)]


def test_a_log_that_is_written_anew_with_more_than_it_had(node: Make) -> None:
    a = node()
    path = a.write("12.log", "first\n" + line(10))
    a.poll()
    path.write_text("second, and longer than the one before\n" + line(20) + "\n" + line(30) + "\n")
    assert steps(a.poll()) == [(20, 10, False), (30, 10, False)]
    assert a.counts()["log_truncated"] == 1


def test_a_log_that_is_deleted_and_comes_again(node: Make) -> None:
    a = node()
    path = a.write("12.log", line(10))
    a.poll()
    path.unlink()
    assert a.poll() == []
    a.write("12.log", line(20))
    assert steps(a.poll()) == [(20, 10, False)]


def test_files_that_are_gone_are_closed(node: Make) -> None:
    a = node()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    a.write("12.log", line(10))
    a.poll()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before + 1
    (a.folder / "12.log").unlink()
    for _ in range(12):
        a.poll()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_a_job_that_is_gone_is_forgotten_and_one_that_comes_again_soon_is_not(node: Make) -> None:
    a = node()
    a.write("12.log", line(500), line(510), line(520))
    a.poll()
    processes, a.processes = a.processes, []
    a.write("12.log", " loading checkpoint from /c at iteration 500", line(510))
    assert a.poll(after=30) == []
    a.processes = [WorkloadProcess(ME + 1, "12", rank="3"), *processes]
    (restore, first) = a.poll(after=20)
    assert (restore.message.phase, first.message.step, first.message.restart, first.pid) == ("restore", 510, True, ME)
    a.processes = []
    a.poll(after=61)
    assert not a.watch._files


def test_two_jobs_have_two_logs(node: Make) -> None:
    a = node()
    a.processes = [WorkloadProcess(ME, "12"), WorkloadProcess(ME, "13")]
    a.poll()
    a.write("12.log", line(10))
    a.write("13.log", line(70), line(80))
    found = a.poll()
    assert sorted((one.job_id, one.message.step) for one in found) == [("12", 10), ("13", 70), ("13", 80)]


@pytest.mark.parametrize("second", [True, False])
def test_a_log_of_two_jobs_is_nobodys(node: Make, second: bool) -> None:
    """As a pattern, 1* would match all jobs whose ID starts with 1."""
    a = node()
    a.write("12.log", line(10))
    a.processes = [WorkloadProcess(ME, "1"), *([WorkloadProcess(ME, "12")] if second else [])]
    a.poll()
    a.processes = [WorkloadProcess(ME, "1"), WorkloadProcess(ME, "12")]
    a.poll()
    a.write("12.log", line(20))
    a.write("1.log", line(70))
    assert [(one.job_id, one.message.step) for one in a.poll()] == [("1", 70)]
    assert a.counts()["log_shared"] == 1


@contextmanager
def writing(path: Path, mode: str = "w") -> Iterator[int]:
    """Pid of a process whose standard output is the file."""
    with path.open(mode) as file, subprocess.Popen(["sleep", "600"], stdout=file) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_the_next_job_may_write_to_the_file_of_the_last_one(node: Make, tmp_path: Path) -> None:
    """As with --output=train.out: the file is nobody's other's while its job has no process any more."""
    a = node(FollowSettings())
    path = tmp_path / "train.out"
    for job, gap in (("101", 1.0), ("102", 40.0), ("103", 1.0)):
        with writing(path) as pid:
            a.processes = [WorkloadProcess(pid, job)]
            a.poll(after=gap)
            a.write("train.out", line(10))
            assert [(one.job_id, one.message.step) for one in a.poll(after=1.0)] == [(job, 10)]
        a.processes = []
    assert "log_shared" not in a.counts()


@pytest.mark.parametrize("gap", [1.0, 90.0])
def test_the_next_job_in_a_file_does_not_have_the_settings_of_the_last_one(
    node: Make, tmp_path: Path, gap: float
) -> None:
    """As with --open-mode=append. Lines that the last job wrote after the last poll are not the next job's."""
    a = node(FollowSettings())
    last, path = "", tmp_path / "train.out"
    path.touch()
    for job, settings, world in (("101", logs.megatron_start(), 16), ("102", [], None), ("103", MANY_RANKS, 32)):
        with writing(path, "a") as pid:
            a.write("train.out", last, *settings)
            a.processes = [WorkloadProcess(pid, job)]
            a.poll(after=gap)
            a.write("train.out", line(10), line(20))
            found = [(one.job_id, one.message.step, one.message.world_size, one.message.run) for one in a.poll()]
            assert found == [(job, 10, world, ""), (job, 20, world, "")]
        a.processes, last = [], line(30)
        a.poll()
        a.poll(after=gap)


MANY_RANKS = [row.replace(" 16", " 32") if "world" in row else row for row in logs.megatron_start()]


def test_a_file_that_two_jobs_wrote_is_read_again_after_a_while(node: Make) -> None:
    a = node()
    a.write("12.log", line(10))
    a.processes = [WorkloadProcess(ME, "1"), WorkloadProcess(ME, "12")]
    a.poll()
    a.processes = []
    a.poll(after=61)
    a.processes = [WorkloadProcess(ME, "12")]
    a.poll()
    a.write("12.log", line(20))
    assert steps(a.poll()) == [(20, 10, False)]


def test_all_messages_of_a_job_are_of_its_lowest_rank(node: Make, tmp_path: Path) -> None:
    """A file for each rank: rank 0 writes the checkpoints, the last rank the steps."""
    a = node(FollowSettings())
    with ExitStack() as stack:
        pids = [stack.enter_context(writing(tmp_path / str(rank))) for rank in range(2)]
        a.processes = [WorkloadProcess(pid, "12", rank=str(rank)) for rank, pid in enumerate(pids)]
        a.poll()
        a.write("1", line(10))
        a.write("0", "saving checkpoint at iteration      10 to /ckpt in torch_dist format")
        found = a.poll()
    assert sorted((one.message.step or 0, one.message.phase, one.pid) for one in found) == [
        (0, "checkpoint", pids[0]), (10, "compute", pids[0]),
    ]  # fmt: skip


def test_a_log_of_trainings_beside_each_other_is_told_once(node: Make) -> None:
    a = node()
    a.poll()
    for step in range(200, 210):
        a.write("12.log", line(step), line(step - 40))
        a.poll()
    a.write("12.log", line(211))
    assert a.poll() == []
    assert a.counts()["log_mixed"] == 1


def test_only_jobs_of_the_rows_class(node: Make, tmp_path: Path) -> None:
    a = node(FollowSettings(path=f"{tmp_path}/{{job_id}}.log", workload_class="interactive"))
    a.poll()
    a.write("12.log", line(10))
    assert a.poll() == []
    a.processes = [WorkloadProcess(ME, "12", workload_class="interactive")]
    a.poll()
    a.write("12.log", line(20))
    assert steps(a.poll()) == [(20, 10, False)]


def test_a_row_that_names_its_framework_reads_no_other(node: Make, tmp_path: Path) -> None:
    a = node(FollowSettings(path=f"{tmp_path}/{{job_id}}.log", framework="maxtext"))
    a.poll()
    a.write("12.log", line(10), logs.maxtext(5, seconds=1.0))
    assert steps(a.poll()) == [(6, 6, False)]


def test_a_path_without_a_job_is_read_by_nobody(node: Make, tmp_path: Path) -> None:
    a = node(FollowSettings(path=f"{tmp_path}/*.log"))
    a.poll()
    a.write("12.log", line(10))
    assert a.poll() == []
    assert a.counts() == {}


@pytest.mark.parametrize("job_id", ["*", "?2", "[1]2", "../other/12", "..", "/", "", "12\0", "./12"])
def test_a_jobs_id_leads_to_no_other_log(tmp_path: Path, job_id: str) -> None:
    """A path matches one job's files, whatever characters its ID contains."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "other").mkdir()
    a = Node(tmp_path / "logs", FollowSettings(path=f"{tmp_path}/logs/{{job_id}}.log"))
    a.processes = [WorkloadProcess(ME, job_id)]
    a.poll()
    a.write("12.log", line(10))
    (tmp_path / "other" / "12.log").write_text(line(10) + "\n")
    assert a.poll() == []


def test_an_id_with_a_folder_in_it_is_a_folder(node: Make) -> None:
    a = node(FollowSettings(path=f"{node().folder}/{{job_id}}.log"))
    a.processes = [WorkloadProcess(ME, "team/run[1]")]
    (a.folder / "team").mkdir()
    a.poll()
    a.write("team/run[1].log", line(10))
    assert steps(a.poll()) == [(10, 10, False)]


def test_whoever_wrote_before_another_may_go_on(node: Make) -> None:
    a = node()
    a.write("12.log", f"[rank3]:{line(10)}")
    a.poll()
    a.write("12.log", f"[rank5]:{line(20)}")
    assert steps(a.poll()) == [(20, 10, False)]


def test_a_bar_that_was_there_tells_no_time(node: Make) -> None:
    """The time of an old bar is unknown: the first interval begins with the first position that was read live."""
    a = node()
    words = logs.trainer(loss=2.0, epoch=0.1)
    a.write("12.log", words + logs.bar(10, 500), words, logs.bar(10, 500))
    a.poll()
    a.write("12.log", logs.bar(12, 500), end="\r")
    assert steps(a.poll()) == [(12, 0, False)]
    a.write("12.log", logs.bar(15, 500), end="\r")
    (one,) = a.poll(after=6)
    assert (one.message.step, one.message.steps, one.message.seconds) == (15, 3, 6.0)


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "link", "device"])
def test_what_is_no_file_is_not_opened(node: Make, kind: str) -> None:
    a = node()
    path = a.folder / "12.log"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "link":
        path.symlink_to("/proc/self/cwd")
    else:
        path.symlink_to("/dev/zero")
    assert a.poll() == []
    assert a.counts() == {"log_not_a_file": 1}
    assert a.poll() == []
    assert a.counts() == {"log_not_a_file": 1}  # counted once


def refused(path: Path, *users: int) -> str:
    with pytest.raises(FileRefusedError) as caught:
        os.close(open_job_file(str(path), frozenset(users)))
    return f"log_{caught.value.kind} {caught.value}"


def accepted(path: Path, *users: int) -> bool:
    os.close(open_job_file(str(path), frozenset(users)))
    return True


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root gives files away; the rules are also tested without"
)


@needs_root
def test_a_users_file_is_his_whatever_leads_there(tmp_path: Path) -> None:
    path = tmp_path / "his.log"
    path.write_text("x")
    os.chown(path, 4711, 4711)
    (tmp_path / "latest.log").symlink_to(path)
    assert accepted(path, 4711)
    assert accepted(tmp_path / "latest.log", 4711, 0)
    assert "belongs to user 4711" in refused(path, 4712, 0)


@needs_root
def test_roots_file_must_be_out_of_the_users_reach(tmp_path: Path) -> None:
    """Even if the job runs as root, as most containers do."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert accepted(secret, 4711)
    assert accepted(secret, 0)
    his = tmp_path / "his"
    his.mkdir()
    os.chown(his, 4711, 4711)
    (his / "12.log").symlink_to(secret)
    (tmp_path / "roots-link.log").symlink_to(secret)
    (his / "13.log").write_text("x")
    for path in (his / "12.log", tmp_path / "roots-link.log", his / "13.log"):
        for user in (4711, 0):
            assert "others could have put it there" in refused(path, user)
    os.link(secret, tmp_path / "second")
    assert "others could have put it there" in refused(secret, 4711)


def test_a_folder_that_all_may_write_is_within_reach(tmp_path: Path) -> None:
    """Unless it is sticky: then other users cannot replace our file."""
    folder = tmp_path / "open"
    folder.mkdir()
    path = folder / "12.log"
    path.write_text("x")
    folder.chmod(0o777)
    assert "log_owner" in refused(path)
    folder.chmod(0o777 | stat.S_ISVTX)
    assert accepted(path)


def test_a_link_to_ours_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "12.log").symlink_to(tmp_path / "secret")
    assert "log_owner" in refused(tmp_path / "12.log")
    assert "log_owner" in refused(tmp_path / "folder" / "secret")
    assert accepted(tmp_path / "secret")


def test_many_files_are_too_many(node: Make) -> None:
    a = node()
    a.processes = [WorkloadProcess(ME, str(n)) for n in range(MOST_FILES + 2)]
    for n in range(MOST_FILES + 2):
        a.write(f"{n}x.log", line(10))
    a.watch._rows = (FollowSettings(path=f"{a.folder}/{{job_id}}x.log"),)
    a.poll()
    assert a.counts() == {"log_files": MOST_FILES, "log_too_many": 2}


@pytest.mark.slow
def test_a_look_reads_no_more_than_it_may_and_nothing_is_left_out(node: Make) -> None:
    a = node()
    a.write("12.log", line(10))
    a.poll()
    lines = [line(step) for step in range(20, 60_000, 10)]
    a.write("12.log", *lines)
    total = sum(len(text) + 1 for text in lines)
    polls = [a.poll() for _ in range(-(-total // FILE_BYTES))]
    assert [one.message.step for poll in polls for one in poll] == list(range(20, 60_000, 10))
    assert max(map(len, polls)) <= FILE_BYTES // len(lines[0])


@pytest.mark.slow
def test_all_files_have_their_turn(node: Make) -> None:
    """Twelve files larger than a poll's limit: each is read in one of three polls."""
    a = node(FollowSettings(path=f"{node().folder}/{{job_id}}.log"))
    a.processes = [WorkloadProcess(ME, f"j{n}") for n in range(12)]
    a.poll()
    for n in range(12):
        a.write(f"j{n}.log", *(line(step) for step in range(10, 20_000, 10)))
    polls = [a.poll() for _ in range(12)]
    most = max(sum(len(line(10)) for _ in poll) for poll in polls)
    assert most <= USER_BURST
    assert {one.job_id for poll in polls for one in poll} == {f"j{n}" for n in range(12)}


@pytest.mark.slow
def test_one_users_logs_are_read_at_a_bounded_rate_and_lag_is_told(
    node: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a = node()
    a.write("12.log", line(10))
    a.poll()
    read = 0
    for _ in range(40):  # a second each
        a.write("12.log", *["x" * 1023] * 1024)
        before = a.watch.counts["log_lines"]
        a.poll(after=1)
        read += a.watch.counts["log_lines"] - before
    assert 39 * USER_RATE <= read * 1024 <= USER_BURST + 41 * USER_RATE
    assert a.counts()["log_behind"] > 30
    assert len([record for record in caplog.records if "is read late" in record.message]) == 1


@pytest.mark.slow
def test_all_logs_together_are_read_at_a_bounded_rate(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many users, of whom each stays within his own."""
    for name in ("USER_RATE", "USER_BURST"):
        monkeypatch.setattr(f"exporter.training.logs.watcher.{name}", 1 << 30)
    a = node()
    names = [f"12-{n}.log" for n in range(8)]
    for name in names:
        a.write(name, line(10))
    a.poll()
    read = 0
    for _ in range(10):  # a second each
        for name in names:
            a.write(name, *["x" * 1023] * 256)
        before = a.watch.counts["log_lines"]
        a.poll(after=1)
        read += a.watch.counts["log_lines"] - before
    assert 8 * ALL_RATE <= read * 1024 <= ALL_BURST + 11 * ALL_RATE


@pytest.mark.slow
def test_the_history_of_many_logs_is_read_in_turn_and_its_steps_stay_history(node: Make) -> None:
    """Each is read at its head and its end; a user's burst is enough for seven and a part of another."""
    a = node()
    names = [f"12-{n:02}.log" for n in range(20)]
    for name in names:
        a.write(name, *["x" * 1023] * 200, line(10), line(20))
    found = [a.poll(after=1)]
    assert a.counts()["log_files"] == 8
    found += [a.poll() for _ in range(20)]
    assert a.counts()["log_files"] == 20
    assert steps([each for poll in found for each in poll]) == []
    a.write(names[-1], line(30))
    assert [step for step, _, _ in steps(a.poll())] == [30]


def test_a_file_that_is_far_ahead_is_taken_up_near_its_end(node: Make) -> None:
    a = node()
    path = a.write("12.log", line(10))
    a.poll()
    os.truncate(path, BEHIND_BYTES + (1 << 20))
    a.write("12.log", "", line(520))
    assert steps(a.poll()) == [(520, 1, False)]
    assert a.counts()["log_skipped"] == 1


def test_behind_what_was_left_out_the_first_line_is_whole(node: Make) -> None:
    a = node()
    a.write("12.log", line(10))
    a.poll()
    a.write("12.log", *["x" * 999] * (BEHIND_BYTES // 1000 + 1000))
    (file,) = a.watch._files.values()
    read = file.tail.read(1 << 20)
    assert read.gap
    assert {len(each) for each in read.lines} == {999}


def test_a_line_without_an_end_is_dropped(node: Make) -> None:
    """A line of megabytes is skipped, and the line after it is read."""
    a = node()
    a.write("12.log", line(10))
    a.poll()
    a.write("12.log", "x" * (3 * FILE_BYTES), end="")
    for _ in range(4):
        assert a.poll() == []
    assert all(len(file.tail._part) <= LINE_BYTES for file in a.watch._files.values())
    a.write("12.log", "", line(20))
    assert steps(a.poll()) == [(20, 10, False)]
    assert a.counts()["log_too_long"] == 1


def test_what_is_no_text_is_passed_over(node: Make) -> None:
    a = node()
    path = a.write("12.log", line(10))
    a.poll()
    with path.open("ab") as file:
        file.write(bytes(range(256)) * 40 + b"\n\xff\xfe" + line(20).encode() + b"\xff\n")
        file.write(line(30).encode() + b"\n")
    assert steps(a.poll()) == [(30, 20, False)]


def test_figures_that_no_message_may_have_are_counted(node: Make) -> None:
    a = node()
    a.poll()
    a.write("12.log", logs.maxtext(0, seconds=1000.0, tflops=1e28), logs.maxtext(1, seconds=1.0))
    assert steps(a.poll()) == [(2, 1, False)]
    assert a.counts()["log_absurd"] == 1


def test_a_backlog_took_place_before_now(node: Make) -> None:
    """Three steps of 2 s in a poll after 10 s: they ended 4 s ago, 2 s ago, and at the last write."""
    a = node()
    a.write("12.log", logs.maxtext(0, seconds=2.0))
    a.poll()
    path = a.write("12.log", *(logs.maxtext(step, seconds=2.0) for step in (1, 2, 3)))
    wall = path.stat().st_mtime_ns + SECOND // 2
    a.now += 10 * SECOND
    found = a.watch.poll(a.now, wall=wall, processes=a.processes)
    assert [(a.now - one.at) / SECOND for one in found] == [4.5, 2.5, 0.5]


def test_what_is_too_much_for_the_time_since_the_last_word_is_put_into_it(node: Make) -> None:
    """Three steps of 2 s within 3 s: each is shortened to 1 s and keeps its work."""
    a = node()
    a.poll()
    a.write("12.log", logs.maxtext(0, seconds=2.0))
    (one,) = a.poll()
    assert one.message.seconds == 2.0
    a.write("12.log", *(logs.maxtext(step, seconds=2.0) for step in (1, 2, 3)))
    found = a.poll(after=3)
    assert [(a.now - one.at) / SECOND for one in found] == [2.0, 1.0, 0.0]
    assert [(one.message.seconds, one.message.steps, one.message.tokens) for one in found] == [(1.0, 1, 8192.0)] * 3


def test_megatrons_first_iteration_is_in_the_mean_after_it(node: Make) -> None:
    """30 s, then nine of 1 s: the mean of ten is 3.9 s. Nine of those are the work of nine steps, done in 9 s."""
    a = node()
    a.poll()
    a.write("12.log", logs.megatron(1, ms=30_000.0, tflops=10.0))
    a.poll(after=30)
    a.write("12.log", logs.megatron(10, ms=3900.0, tflops=100.0))
    (one,) = a.poll(after=9)
    assert one.message.steps == 9
    assert one.message.seconds == pytest.approx(9.0)
    assert one.message.model_flops == pytest.approx(100e12 * 3.9 * 9)


def test_a_file_systems_clock_that_goes_behind_holds_nothing_up(node: Make) -> None:
    a = node()
    a.poll()
    a.write("12.log", logs.maxtext(0, seconds=2.0))
    a.poll()
    a.write("12.log", logs.maxtext(1, seconds=2.0))
    a.now += 6 * SECOND
    (one,) = a.watch.poll(a.now, wall=1 << 62, processes=a.processes)
    assert (one.at, one.message.seconds) == (a.now, 2.0)


HAPPENS = ("grow", "cut", "anew", "move", "drop", "hole", "poll")


@given(st.lists(st.tuples(st.sampled_from(HAPPENS), st.binary(max_size=300)), max_size=30))
def test_whatever_happens_to_a_file_nothing_is_raised(happens: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        node = Node(Path(name))
        path = node.folder / "12.log"
        node.poll()
        for what, content in happens:
            happen(node, path, what, content)
        node.poll()
        assert set(node.watch.counts) == set(COUNTS)
        assert len(node.watch._files) <= MOST_FILES
        node.watch.close()


def happen(node: Node, path: Path, what: str, content: bytes) -> None:
    if what == "poll":
        node.poll(after=len(content) / 10 + 0.1)
    elif what == "move" and path.exists():
        path.rename(path.with_name(f"12-{len(content)}.log"))
    elif what == "drop":
        path.unlink(missing_ok=True)
    elif what == "cut" and path.exists():
        os.truncate(path, min(path.stat().st_size, len(content)))
    elif what == "hole" and path.exists():
        os.truncate(path, path.stat().st_size + 100_000)
    else:
        with path.open("wb" if what == "anew" else "ab") as file:
            file.write(content + b"\n" + line(len(content)).encode() + b"\n")


@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(1, 64))
def test_lines_are_the_same_however_they_are_cut(parts: list[bytes], most: int) -> None:
    """However a file is cut into chunks, its lines are the same."""
    text = b"".join(parts)
    with tempfile.TemporaryFile() as file:
        tail = FileTail(os.dup(file.fileno()), Counter(), offset=0)
        found: list[bytes] = []
        for part in parts:
            os.write(file.fileno(), part)
            while written := tail.read(most):
                found += written.lines
                if not written.size:
                    break
        tail.close()
    whole = text.replace(b"\0", b"").replace(b"\r", b"\n")
    assert found == [piece for piece in whole.split(b"\n")[:-1] if piece]
