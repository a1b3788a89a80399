"""Files of plugins in real processes: found by the processes' environment, read as they grow, bounded."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.core.model import MS, SECOND, CollectiveReport
from exporter.job_files import BEHIND_BYTES
from exporter.nccl import files
from exporter.nccl.files import COUNTS, EXPIRY, SEARCH_INTERVAL, CollectiveWatcher
from exporter.nccl.settings import PluginSettings, read_settings
from exporter.procfs import innermost_pid
from exporter.workloads import WorkloadProcess
from tests.each import each
from tests.nccl.conftest import StartProcess
from tests.nccl.plugins import US, JobProcess, coll_perf, collective, comma, dump, line

WALL = 1_800_000_000 * SECOND
"""Unix nanoseconds at monotonic second 1000."""


class Node:
    """A watcher whose clock stands still but for `after`."""

    def __init__(self, proc: str = "/proc") -> None:
        self.watcher, self.now = CollectiveWatcher(proc=proc), 1000 * SECOND

    @property
    def unix(self) -> int:
        """Now, in Unix microseconds."""
        return (WALL + self.now - 1000 * SECOND) // 1000

    def poll(self, *processes: WorkloadProcess, after: float = 0.0) -> list[CollectiveReport]:
        self.now += round(after * SECOND)
        return self.watcher.poll(self.now, wall=WALL + self.now - 1000 * SECOND, processes=processes)

    def counts(self) -> dict[str, int]:
        return {name.removeprefix("collective_"): count for name, count in self.watcher.counts.items() if count}

    def line(self, ago: float, us: float = 1000, **more: object) -> bytes:
        """A collective that ended so many seconds ago."""
        return collective(self.unix - round(ago * US), us, **more)  # type: ignore[arg-type]


@pytest.fixture(name="node")
def _node() -> Iterator[Node]:
    node = Node()
    yield node
    node.watcher.close()


def rank(process: JobProcess, job: str = "41", rank: str = "0") -> WorkloadProcess:
    return WorkloadProcess(process.pid, job, (f"GPU-{rank}",), rank)


def found_empty(node: Node, process: JobProcess, **more: str) -> WorkloadProcess:
    """The process, after a poll that finds no file yet; what comes then is read from its beginning."""
    it = rank(process, **more)
    assert node.poll(it) == []
    return it


def test_a_file_is_found_by_the_environment_of_its_process_and_read_as_it_grows(
    node: Node, start: StartProcess
) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(node.line(5), node.line(4), node.line(3, coll="AllGather"))
    (report,) = node.poll(it, after=6)
    assert report.start == node.now - 11001 * MS
    assert report.end == node.now - 10 * SECOND  # a second before the last
    assert (report.job_id, report.uuids, report.rank, report.source) == ("41", ("GPU-0",), "0", "inspector")
    assert {use.name: use.calls for use in report.collectives} == {"AllReduce": 2, "AllGather": 1}
    process.write(node.line(0.5))
    (second,) = node.poll(it, after=1)
    assert (second.start, second.end) == (report.end, node.now - 2500 * MS)
    assert node.counts() == {"files": 1, "lines": 4, "events": 4}


def test_comma_s_file_is_named_by_a_pattern(node: Node, start: StartProcess, tmp_path: Path) -> None:
    process = start("lat-%p.txt", NCCL_PROFILER_LATENCY_FILE=f"{tmp_path}/lat-%p.txt")
    it = found_empty(node, process)
    process.write(comma(node.unix, 3 * US, US), comma(node.unix, 5 * US, US), comma(node.unix, 5 * US, None))
    (report,) = node.poll(it, after=6)
    assert (report.source, report.busy) == ("comma", SECOND)
    assert node.counts() == {"files": 1, "lines": 3, "events": 2, "untimed": 1}


def test_a_file_that_was_there_before_counts_from_its_end(node: Node, start: StartProcess) -> None:
    process = start()
    process.write(node.line(5), node.line(4))
    it = rank(process)
    assert node.poll(it) == []
    process.write(node.line(0), node.line(-2))
    node.poll(it, after=3)
    assert node.counts() == {"files": 1, "lines": 2, "events": 2}


def test_the_last_lines_of_a_process_that_has_ended_are_reported(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(node.line(1))
    node.poll(it, after=6)
    process.write(node.line(0.25))
    process.close()
    reports = node.poll(after=0.5)
    assert reports[-1].end == node.now - 750 * MS
    assert sum(use.calls for report in reports for use in report.collectives) == 2
    assert node.watcher._plugins == {}


def test_without_a_plugin_no_file_is_opened(node: Node, start: StartProcess, tmp_path: Path) -> None:
    """Though it has a file with such a name open."""
    for environ in (
        {"NCCL_INSPECTOR_DUMP_DIR": f"{tmp_path}/dump"},
        {"NCCL_INSPECTOR_ENABLE": "0"},
        {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_PROM_DUMP": "1"},
        {"NCCL_PROFILER_LATENCY_FILE": f"{tmp_path}/other-%p.txt"},
    ):
        process = start(**environ)
        it = found_empty(node, process)
        process.write(node.line(1))
        assert node.poll(it, after=6) == []
    assert node.counts() == {}


def test_another_process_s_file_is_not_read(node: Node, start: StartProcess) -> None:
    """A data loader inherits the descriptor; a file that is only read is not the process's own."""
    writer = start()
    writer.write(node.line(1))
    environ = {"NCCL_INSPECTOR_ENABLE": "1", "PATH": os.environ["PATH"]}
    reads = f"import sys; f = open({str(writer.path)!r}); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", reads], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert node.poll(WorkloadProcess(reader.pid, "42")) == []
        assert node.counts() == {}
        settings = PluginSettings({"NCCL_PROFILER_LATENCY_FILE": writer.path.name})
        assert files.find_plugin_file(Path(f"/proc/{reader.pid}"), settings) is None
        assert files.find_plugin_file(Path(f"/proc/{writer.pid}"), settings) is not None
        reader.communicate()


def test_a_file_of_two_processes_is_nobody_s(node: Node, start: StartProcess, tmp_path: Path) -> None:
    """CoMMA's file without %p: the lines of one rank cannot be told from those of the other."""
    name = {"NCCL_PROFILER_LATENCY_FILE": f"{tmp_path}/all.txt"}
    first, second = start("all.txt", **name), start("all.txt", **name)
    both = found_empty(node, first), found_empty(node, second, rank="1")
    first.write(comma(node.unix, US, US))
    second.write(comma(node.unix, US, US))
    node.poll(*both, after=6)
    first.write(comma(node.unix, US, US))
    assert node.poll(*both, after=3) == []
    assert node.poll(*both, after=60) == []
    assert node.counts()["shared"] == 1
    assert all(plugin.tail is None for plugin in node.watcher._plugins.values())


@pytest.mark.parametrize(
    ("name", "opened", "counted"),
    [
        ("pipe", "os.O_RDWR", {"not_a_file": 1}),
        ("folder", "os.O_RDONLY", {}),
        ("device", "os.O_WRONLY", {"not_a_file": 1}),
        ("path", "os.O_PATH", {}),
    ],
)
def test_what_is_no_file_or_not_written_is_not_read(
    name: str, opened: str, counted: dict[str, int], node: Node, tmp_path: Path
) -> None:
    path = {"device": Path("/dev/null"), "path": Path("/etc/shadow")}.get(name, tmp_path / name)
    if name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    program = f"import os, sys; f = os.open({str(path)!r}, {opened}); print(1, flush=True); sys.stdin.read()"
    environ = {"NCCL_PROFILER_LATENCY_FILE": str(path), "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(3):
            assert node.poll(WorkloadProcess(process.pid, "41"), after=60) == []
        process.communicate()
    assert node.counts() == counted  # once


def test_malformed_lines_are_counted_and_the_others_read(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(
        b"not JSON",
        node.line(3, version="v9.0"),
        line(coll_perf=coll_perf(1)),
        node.line(3, us=-1),
        node.line(48 * 3600),
        node.line(-3600),
        b'{"x":"' + b"y" * (70 * 1024) + b'"}',
        node.line(3),
        node.line(1),
    )
    assert len(node.poll(it, after=6)) == 1
    assert node.counts() == {
        "files": 1, "lines": 8, "events": 2, "malformed": 1, "unknown_version": 1, "absurd": 1, "undated": 2,
        "no_context": 1, "too_long": 1,
    }  # fmt: skip


def test_what_the_plugin_lost_is_counted(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(dump(node.unix - 3 * US, dropped=512), line(coll_perf=coll_perf(1)))
    node.poll(it, after=6)
    assert node.counts() == {"files": 1, "lines": 2, "events": 1, "dropped": 512}


def test_a_file_that_is_truncated_is_read_from_its_beginning(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(dump(node.unix), line(coll_perf=coll_perf(1)))
    node.poll(it, after=6)
    os.truncate(process.path, 0)
    with process.path.open("ab") as file:
        file.write(line(coll_perf=coll_perf(1)) + b"\n")
    node.poll(it, after=1)
    assert node.counts()["truncated"] == 1
    assert node.counts()["no_context"] == 1  # what the lines before said does not hold for these


def test_a_file_that_grows_too_fast_is_skipped_and_read_near_its_end(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    process.write(node.line(3))
    node.poll(it, after=6)
    with process.path.open("r+b") as file:
        file.truncate(BEHIND_BYTES + (1 << 20))
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + node.line(1) + b"\n")
    node.poll(it, after=1)
    assert node.counts()["skipped"] == 1
    assert node.counts()["events"] == 2


def test_a_poll_reads_no_more_than_it_may_and_nothing_is_left_out(
    node: Node, start: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of one user: together they have that user's bytes."""
    one = len(node.line(0)) + 1
    monkeypatch.setattr(files, "FILE_BYTES", 10 * one)
    monkeypatch.setattr(files, "USER_BYTES", 15 * one)
    processes = start(), start()
    both = [found_empty(node, process, rank=str(n)) for n, process in enumerate(processes)]
    for process in processes:
        process.write(*[node.line(3)] * 20)
    node.poll(*both, after=6)
    assert node.counts()["lines"] == 15
    assert node.counts()["behind"] == 2
    for _ in range(3):
        node.poll(*both, after=1)
    assert node.counts()["events"] == 40
    node.poll(*both, after=1)
    behind = node.counts()["behind"]
    node.poll(*both, after=1)
    assert node.counts()["behind"] == behind


def test_processes_beyond_the_limit_are_left_out(
    node: Node, start: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_PROCESSES", 3)
    monkeypatch.setattr(files, "MOST_PROCESSES_OF_A_JOB", 2)
    jobs = ["41", "41", "41", "42", "43"]
    node.poll(*(rank(start(), job=job, rank=str(n)) for n, job in enumerate(jobs)))
    assert [plugin.process.job_id for plugin in node.watcher._plugins.values()] == ["41", "41", "42"]
    assert node.counts() == {"too_many": 2}


def test_a_process_that_is_no_longer_listed_is_forgotten_later(node: Node, start: StartProcess) -> None:
    process = start()
    found_empty(node, process)
    node.poll(after=EXPIRY / SECOND)
    assert process.pid in node.watcher._plugins
    node.poll(after=1)
    assert node.watcher._plugins == {}


def test_a_search_that_finds_nothing_is_repeated_less_and_less_often(node: Node, start: StartProcess) -> None:
    process = start()
    it = found_empty(node, process)
    for _ in range(600):
        node.poll(it, after=1)
    assert 12 < node.watcher._plugins[process.pid].searches < 30
    process.write(node.line(0))
    node.poll(it, after=60)
    assert node.counts()["files"] == 1
    assert SEARCH_INTERVAL < EXPIRY


def test_processes_that_are_gone_or_unreadable_are_passed_over(node: Node, tmp_path: Path) -> None:
    assert node.poll(WorkloadProcess(1 << 30, "41"), WorkloadProcess(0, "41")) == []
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "stat").write_text("7 (a) S 1 " + " ".join(["1"] * 30))
    (folder / "environ").write_bytes(b"NCCL_INSPECTOR_ENABLE=1\0")
    other = Node(str(tmp_path))
    assert other.poll(WorkloadProcess(7, "41"), after=60) == []  # no status: it may have ended
    (folder / "status").write_text("Name:\ta\nNSpid:\t7\t1\n")
    assert other.poll(WorkloadProcess(7, "41"), after=60) == []  # no fd
    assert other.counts() == {"unreadable": 1}
    other.watcher.close()


# -- settings --


def process_folder(tmp_path: Path, environ: bytes) -> Path:
    """A stand-in of /proc/PID with a root of its own, as a container's process has."""
    folder = tmp_path / "proc" / "7"
    (folder / "root" / "etc").mkdir(parents=True)
    (folder / "environ").write_bytes(environ)
    return folder


def test_settings_come_from_the_environment_then_the_user_s_file_then_the_node_s(tmp_path: Path) -> None:
    folder = process_folder(tmp_path, b"NCCL_INSPECTOR_ENABLE=1\0HOME=/home/ada\0NCCL_DEBUG=INFO\0")
    (folder / "root" / "home" / "ada").mkdir(parents=True)
    (folder / "root" / "home" / "ada" / ".nccl.conf").write_text(
        "NCCL_INSPECTOR_ENABLE=0\nNCCL_INSPECTOR_DUMP_DIR=/hers\n"
    )
    (folder / "root" / "etc" / "nccl.conf").write_text(
        "# NCCL_INSPECTOR_PROM_DUMP=1\nNCCL_INSPECTOR_DUMP_DIR=/all\nNCCL_PROFILER_PLUGIN=/opt/x.so\n"
        "NCCL_DEBUG=WARN\nx\n"
    )
    settings = read_settings(folder)
    assert settings.values == {
        "NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": "/hers", "NCCL_PROFILER_PLUGIN": "/opt/x.so",
    }  # fmt: skip
    assert settings.origins == {
        "NCCL_INSPECTOR_ENABLE": "environment", "NCCL_INSPECTOR_DUMP_DIR": "/home/ada/.nccl.conf",
        "NCCL_PROFILER_PLUGIN": "/etc/nccl.conf",
    }  # fmt: skip
    assert (settings.plugin, settings.inspector, settings.dump_folder) == ("/opt/x.so", True, "/hers")


def test_a_file_that_a_variable_names_replaces_the_user_s(tmp_path: Path) -> None:
    folder = process_folder(tmp_path, b"NCCL_CONF_FILE=my.conf\0HOME=/home/ada\0")
    (folder / "cwd").mkdir()
    (folder / "cwd" / "my.conf").write_text("NCCL_PROFILER_LATENCY_FILE=/x-%p.txt")
    settings = read_settings(folder)
    assert settings.latency_file == "/x-%p.txt"
    assert settings.source_of("x-12.txt", 12) == "comma"
    assert settings.source_of("x-13.txt", 12) == ""
    assert settings.source_of("node-pid12.log", 12) == ""


@each("kind", ["fifo", "directory", "link to a device", "huge", "missing"])
def test_a_configuration_file_that_is_none_is_not_read(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = process_folder(tmp_path_factory.mktemp("node"), b"")
    path = folder / "root" / "etc" / "nccl.conf"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.write_bytes(b"x" * (1 << 20) + b"\nNCCL_INSPECTOR_ENABLE=1\n")
    assert read_settings(folder) == PluginSettings()


@each("text, number", [("1", 1), (" 7 ", 7), ("-1", -1), ("0x10", 0), ("yes", 0), ("", 0), ("9" * 400, 10**18 - 1)])
def test_numbers_are_read_as_atoi_does(text: str, number: int) -> None:
    assert PluginSettings({"NCCL_INSPECTOR_ENABLE": text}).number("NCCL_INSPECTOR_ENABLE") == number
    assert PluginSettings().number("NCCL_INSPECTOR_ENABLE", 5) == 5


def test_the_pid_is_that_of_the_process_s_own_namespace(tmp_path: Path) -> None:
    assert innermost_pid(Path(f"/proc/{os.getpid()}")) == os.getpid()
    (tmp_path / "status").write_text("Name:\tpython\nNStgid:\t9\nNSpid:\t4711\t88\t3\nNSpgid:\t1\n")
    assert innermost_pid(tmp_path) == 3
    (tmp_path / "status").write_text("Name:\tNSpid: 5\n")
    assert innermost_pid(tmp_path) == 0
    assert innermost_pid(tmp_path / "none") == 0


def test_all_counts_are_named() -> None:
    assert set(CollectiveWatcher().counts) == set(COUNTS)
