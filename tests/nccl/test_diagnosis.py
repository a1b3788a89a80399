"""What `gpu-efficiency nccl --check` finds of real processes, and of /proc of processes that cannot run here."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from exporter.cli import main
from exporter.cli.nccl import GUIDES
from exporter.nccl.diagnosis import INTERVAL, ProcessDiagnosis, diagnose_processes
from exporter.nccl.settings import PluginSettings, read_settings
from tests.each import each
from tests.nccl.conftest import StartProcess
from tests.nccl.plugins import US, JobProcess, collective, comma, microseconds

PLUGIN = "/opt/nccl/libnccl-profiler-inspector.so"
SET_UP = {"NCCL_PROFILER_PLUGIN": PLUGIN, "NCCL_INSPECTOR_ENABLE": "1", INTERVAL: "100000"}
MAPS = "7f00-7f01 r-xp 00000000 08:01 12 {}\n"
"""A line of /proc/PID/maps (proc(5))."""


def found(process: JobProcess) -> ProcessDiagnosis:
    (one,) = [each for each in diagnose_processes(Path("/proc"), wall=time.time_ns()) if each.pid == process.pid]
    return one


def problems(one: ProcessDiagnosis) -> str:
    assert all(problem.do for problem in one.problems)
    return "; ".join(problem.message for problem in one.problems)


def test_a_process_whose_plugin_writes_has_no_problem(start: StartProcess) -> None:
    process = start()
    process.write(collective(microseconds(time.time_ns()) - 5 * US, 10, coll="AllGather"))
    one = found(process)
    assert (one.file, one.last_event, one.problems) == (f"node-pid{process.pid}.log", "AllGather", ())
    assert one.age_seconds == pytest.approx(5, abs=20)
    assert one.bytes == process.path.stat().st_size


def test_old_or_missing_events_and_lines_that_are_none_are_problems(start: StartProcess) -> None:
    process = start()
    process.write(b"x", b"y")
    assert problems(found(process)) == (
        "2 of its last lines are no JSON of this plugin; the end of its file has no timed collective"
    )
    process.write(collective(microseconds(time.time_ns()) - 600 * US, 10))
    assert "its last collective ended 60" in problems(found(process))


def test_a_file_of_all_processes_is_a_problem(start: StartProcess, tmp_path: Path) -> None:
    process = start("all.txt", NCCL_PROFILER_LATENCY_FILE=f"{tmp_path}/all.txt")
    process.write(comma(1, 5, None), comma(microseconds(time.time_ns()), 5, 5))
    assert problems(found(process)) == (
        "1 of its last lines have no time of execution; NCCL_PROFILER_LATENCY_FILE has no %p: the processes of a job"
        " write the same file, which is not read"
    )


@pytest.fixture(name="fake")
def _fake(tmp_path: Path) -> Callable[..., ProcessDiagnosis]:
    """Diagnose a stand-in of /proc with one process, which has these variables and libraries."""

    def diagnose(*libraries: str, there: tuple[str, ...] = (PLUGIN,), **environ: str) -> ProcessDiagnosis:
        proc = tmp_path / f"proc{len(list(tmp_path.iterdir()))}"
        folder = proc / "7"
        (folder / "fd").mkdir(parents=True)
        for path in there:
            (folder / "root" / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (folder / "root" / path[1:]).touch()
        (folder / "stat").write_text("7 (train) S 1 1")
        (folder / "status").write_text("NSpid:\t7\n")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))
        (folder / "maps").write_text("".join(MAPS.format(library) for library in libraries))
        (one,) = diagnose_processes(proc, wall=time.time_ns())
        return one

    return diagnose


NCCL = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.28.9"


@each("libraries, changed, expected", [
    ((NCCL,), {"NCCL_PROFILER_PLUGIN": None}, "no plugin is set for it"),
    ((NCCL,), {}, f"{PLUGIN} is not loaded"),
    ((NCCL,), {"NCCL_PROFILER_PLUGIN": "/nowhere/x.so"}, "/nowhere/x.so does not exist where the process runs"),
    ((NCCL, PLUGIN), {"NCCL_INSPECTOR_ENABLE": "0"}, "NCCL_INSPECTOR_ENABLE is not 1"),
    ((NCCL, PLUGIN), {"NCCL_INSPECTOR_PROM_DUMP": "1"}, "writes means only"),
    ((NCCL, PLUGIN), {INTERVAL: None}, "nothing is written before the job ends"),
    ((NCCL, PLUGIN), {INTERVAL: "0"}, "nothing is written before the job ends"),
    ((NCCL, PLUGIN), {"NCCL_INSPECTOR_DUMP_DIR": "/gone"}, "/gone does not exist where the process runs"),
    ((NCCL, PLUGIN), {}, "it has no file of the plugin open"),
    ((), {}, "it has no file of the plugin open"),
])  # fmt: skip
def test_what_is_set_up_wrongly_is_named(
    libraries: tuple[str, ...], changed: dict[str, str | None], expected: str, fake: Callable[..., ProcessDiagnosis]
) -> None:
    environ = {name: value for name, value in (SET_UP | changed).items() if value is not None}
    one = fake(*libraries, **environ)
    assert expected in problems(one)
    assert one.command == "train"
    assert one.loaded == tuple(path for path in libraries if path == PLUGIN)


def test_a_plugin_that_no_variable_names_may_be_loaded(fake: Callable[..., ProcessDiagnosis]) -> None:
    """NCCL loads libnccl-profiler.so by itself, as in images that have CoMMA."""
    one = fake(NCCL, "/usr/lib/libnccl-profiler.so", NCCL_PROFILER_LATENCY_FILE="/x-%p.txt")
    assert problems(one) == "it has no file of the plugin open"


def test_processes_without_nccl_are_left_out(tmp_path: Path) -> None:
    for pid in ("7", "8", "self"):
        (tmp_path / pid).mkdir()
    assert list(diagnose_processes(tmp_path, wall=0)) == []


# -- the command --


def test_the_check_prints_what_it_finds(start: StartProcess, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = start(), start()
    good.write(collective(microseconds(time.time_ns()), 10))
    assert main(["nccl", "--check"]) == 1
    printed = capsys.readouterr().out
    of_good = printed.partition(f"process {good.pid} ")[2].partition("\nprocess ")[0]
    of_bad = printed.partition(f"process {bad.pid} ")[2].partition("\nprocess ")[0]
    assert "last collective AllReduce" in of_good
    assert "problem" not in of_good
    assert "problem: no plugin is set for it" in of_bad
    assert "do: write /etc/nccl.conf" in of_bad
    main(["nccl", "--check", "--json"])
    rows = msgspec.json.decode(capsys.readouterr().out)
    assert {row["pid"]: len(row["problems"]) for row in rows if row["pid"] in (good.pid, bad.pid)} == {
        good.pid: 0, bad.pid: 1,
    }  # fmt: skip


def test_a_node_without_nccl_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_HOST_PROC", str(tmp_path))
    assert main(["nccl", "--check"]) == 1
    assert capsys.readouterr().out.startswith("No process on this node uses NCCL")


@each("plugin", sorted(GUIDES))
def test_what_the_guide_has_empty_files_hourly_leaves_small_ones_and_links_alone(
    plugin: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, guide = tmp_path_factory.mktemp("dump"), GUIDES[plugin]
    script = guide.partition("     #!/bin/sh\n")[2].partition("\n\n")[0]
    dumped = script.partition("find ")[2].split()[0]
    assert f"     d {dumped} 1777 root root" in guide
    sizes = {"large": 2 << 30, "small": 1 << 20, "elsewhere/large": 2 << 30, "linked": 2 << 30}
    (folder / "elsewhere").mkdir()
    for name, size in sizes.items():
        (folder / name).touch()
        os.truncate(folder / name, size)
    (folder / "hard").hardlink_to(folder / "linked")
    (folder / "soft").symlink_to("linked")
    subprocess.run(["sh", "-c", script.replace(dumped, f"{folder}")], check=True)
    assert {name: (folder / name).stat().st_size for name in sizes} == sizes | {"large": 0}


@each("plugin", sorted(GUIDES))
def test_what_the_guide_has_one_write_to_etc_nccl_conf_is_what_the_daemon_reads(
    plugin: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nccl", "--plugin", plugin]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 120 for line in printed.splitlines())
    folder = tmp_path_factory.mktemp("node") / "7"
    (folder / "root" / "etc").mkdir(parents=True)
    lines = [line.strip() for line in printed.splitlines() if line.startswith("     NCCL_")]
    (folder / "root" / "etc" / "nccl.conf").write_text("\n".join(lines) + "\n")
    settings = read_settings(folder)
    assert len(settings.values) == len(lines) == 4
    assert settings.source_of("n1-pid9.log" if plugin == "inspector" else "9.txt", 9) == plugin
    written = settings.dump_folder or settings.latency_file.rpartition("/")[0]
    assert f"d {written} 1777 root root" in printed
    assert settings != PluginSettings()
