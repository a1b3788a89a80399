"""The demo's temporary folder ends with it; what a killed one left goes at the next start, and nothing else."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.cli.scratch import scratch_folder

PROGRAM = """
from exporter.cli.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


def started(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"TMPDIR": str(folder)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def folder_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout
    return Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_demo_goes_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    other = tmp_path / "gpu-efficiency-demo-starting"
    other.mkdir()
    with started(tmp_path) as killed, started(tmp_path) as running:
        left, used = folder_of(killed), folder_of(running)
        (left / "history.db").write_text("x")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with started(tmp_path) as following:
            own = folder_of(following)
            assert {path.name for path in tmp_path.iterdir()} == {other.name, used.name, own.name}
            following.communicate("\n")
        running.communicate("\n")
    assert list(tmp_path.iterdir()) == [other]


def test_a_demo_that_is_just_starting_is_not_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another demo finds before the lock is held, it leaves alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = fcntl.flock

    def while_another_starts(handle: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        other = started(tmp_path)
        folder_of(other)
        other.communicate("\n")
        lock(handle, operation)

    monkeypatch.setattr("fcntl.flock", while_another_starts)
    with scratch_folder() as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["in-use"]


def test_a_link_to_somebody_elses_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "in-use").touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / "gpu-efficiency-demo-link").symlink_to(theirs)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with scratch_folder():
        pass
    assert (theirs / "in-use").exists()


def test_where_nothing_can_be_written_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with scratch_folder() as folder:
        assert folder == ""
