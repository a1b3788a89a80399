"""Tests the pause file, its effect on the main loop, and the commands that write and remove it."""

import json
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.agent.inventory import Inventory
from exporter.agent.pause import Pause, PauseFile, write_pause
from exporter.agent.sampler import Collector
from exporter.cli import main
from exporter.config import load
from exporter.core.model import SECOND, State
from exporter.schedulers.base import SchedulerError
from exporter.sources.base import SourceError
from exporter.sources.selector import SourceSelector
from tests.rigs import FakeScheduler, FakeSource, Rig, ladder

NOON = 1_700_000_000
"""Unix seconds: 2023-11-14 22:13:20 UTC, where the wall clock of a rig starts."""


def look(path: Path, at: float) -> str:
    return PauseFile(path, lambda: round(at * SECOND)).poll()


def touched(path: Path, content: str, *, at: float = NOON) -> Path:
    path.write_text(content)
    os.utime(path, (at, at))
    return path


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "pause"


# -- the file --


def test_without_a_file_nothing_is_paused_and_nothing_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert look(path, NOON) == ""
    path.parent.write_text("a file where a folder should be")
    assert look(path, NOON) == ""
    assert caplog.records == []


def test_a_pause_lasts_until_the_time_it_names_and_says_why(path: Path) -> None:
    write_pause(path, Pause(NOON + 60, "Nsight on\nGPU 3"))
    os.utime(path, (NOON, NOON))
    words = look(path, NOON + 59.9)
    assert words == (
        f"nothing is read until 2023-11-14 22:14:20 UTC (Nsight on GPU 3), as {path} requests;"
        " `gpu-efficiency resume` ends it"
    )
    assert look(path, NOON + 60) == ""


def test_a_file_once_read_is_not_read_again_until_it_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pause(path, Pause(NOON + 60))
    os.utime(path, (NOON, NOON))
    reads: list[Path] = []
    read = Path.open

    def counted(self: Path, *args: Any, **more: Any) -> Any:
        reads.extend([self] if args == ("rb",) else [])
        return read(self, *args, **more)

    monkeypatch.setattr(Path, "open", counted)
    file = PauseFile(path, lambda: NOON * SECOND)
    assert [bool(file.poll()) for _ in range(5)] == [True] * 5
    assert reads == [path]
    touched(path, '{"until": 0}', at=NOON + 1)
    assert [file.poll() for _ in range(5)] == [""] * 5
    assert reads == [path] * 2
    path.unlink()
    assert file.poll() == ""
    write_pause(path, Pause(NOON + 90))
    os.utime(path, (NOON, NOON))
    assert "22:14:50" in file.poll()


BROKEN = ("", "pause", '{"until": "noon"}', '{"reason": "no time"}', "[1]", '{"until": 1' + " " * 9000 + "}", "\0")


@pytest.mark.parametrize("content", BROKEN)
def test_what_cannot_be_understood_is_a_pause_of_half_an_hour_and_told_once(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = touched(tmp_path / "pause", content)
    now = NOON
    file = PauseFile(path, lambda: now * SECOND)
    for now in range(NOON, NOON + 1800, 100):  # noqa: B007  the file's clock reads it
        assert "until 2023-11-14 22:43:20 UTC (the file is broken)" in file.poll()
    now = NOON + 1800
    assert file.poll() == ""
    assert len(caplog.records) == 1
    assert f"{path} is not " in caplog.text
    assert "counts as one until 2023-11-14 22:43:20 UTC" in caplog.text


def test_a_file_that_may_not_be_read_is_a_pause_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pause(path, Pause(NOON + 10))
    os.utime(path, (NOON, NOON))

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert "(the file is broken)" in look(path, NOON + 20)


@pytest.mark.parametrize("content", ["", json.dumps({"until": NOON + 9e8 + 1800})])
def test_a_time_stamp_in_the_future_counts_as_now(content: str, tmp_path: Path) -> None:
    """It was written by a clock that was ahead, and was meant for half an hour."""
    path = touched(tmp_path / "pause", content, at=NOON + 9e8)
    now = NOON
    file = PauseFile(path, lambda: now * SECOND, lambda: now * SECOND)
    assert "until 2023-11-14 22:43:20 UTC" in file.poll()
    now = NOON + 1799
    assert file.poll()
    now = NOON + 1800
    assert file.poll() == ""


def test_a_clock_that_is_set_back_during_a_pause_does_not_prolong_it(tmp_path: Path) -> None:
    path = touched(tmp_path / "pause", json.dumps({"until": NOON + 60}))
    wall, monotonic = NOON, 0
    file = PauseFile(path, lambda: wall * SECOND, lambda: monotonic * SECOND)
    assert file.poll()
    wall, monotonic = NOON - 86400, 59
    assert file.poll()
    monotonic = 60
    assert file.poll() == ""


@pytest.mark.parametrize("until", [NOON + 10 * 86400, 1e300, (NOON + 60) * 1000])
def test_no_file_pauses_for_longer_than_a_day(until: float, tmp_path: Path) -> None:
    path = touched(tmp_path / "pause", json.dumps({"until": until}))
    assert "until 2023-11-15 22:13:20 UTC" in look(path, NOON + 86399)
    assert look(path, NOON + 86400) == ""


def test_what_is_no_file_pauses_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = PauseFile(tmp_path)  # a container runtime makes a folder where a file to be mounted is missing
    assert [file.poll(), file.poll()] == ["", ""]
    assert [record.message for record in caplog.records] == [
        f"the pause file {tmp_path} is not a file: remove it, or name another in sampling.pause_file; nothing is paused"
    ]


def test_a_file_that_cannot_be_looked_at_pauses_nothing_and_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    file = PauseFile(path)
    assert [file.poll(), file.poll()] == ["", ""]
    assert [record.message for record in caplog.records] == [
        f"the pause file {path} cannot be accessed: Permission denied; nothing is paused"
    ]


def test_the_file_may_be_read_by_a_daemon_of_another_user_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_pause(path, Pause(NOON))
    finally:
        os.umask(before)
    assert [oct(place.stat().st_mode & 0o777) for place in (path, path.parent)] == ["0o644", "0o755"]


# -- the loop --


def paused(rig: Rig, path: Path, seconds: int) -> None:
    """Pause that many ticks, a second apart."""
    now = rig.clock.wall() / SECOND
    write_pause(path, Pause(now + seconds + 0.5, "ncu"))
    os.utime(path, (now, now))


def test_a_pause_lets_go_of_the_counters_once_and_reads_nothing_and_its_time_is_unobserved(
    rigs: Callable[..., Rig], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(interval=1.0, pause=path)
    rig.tick(11)
    reads = len(rig.source.reads)
    paused(rig, path, 30)
    during = [rig.tick() for _ in range(30)]
    assert [fault.kind for observation in during for fault in observation.faults] == ["paused"] * 30
    assert (len(rig.source.reads), rig.source.pauses, rig.source.closes) == (reads, 1, 0)
    gpu = rig.ledger.gpus["GPU-0"]
    assert (gpu.state, gpu.reason) == (State.UNOBSERVED, "paused")
    assert rig.agent.last_error().startswith("nothing is read until ")
    rig.tick(11)
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE
    assert rig.paid() == 51.0
    assert rig.seconds("unobserved") == 31.0  # and the second in which the counters began anew
    assert dict(gpu.unobserved) == {"paused": 31 * SECOND}
    assert gpu.rejected == {}
    assert rig.source.resyncs == 1
    assert rig.source.pauses == 1
    lines = [r.message for r in caplog.records if "pause" in r.message]
    assert [line.split(" (")[0] for line in lines] == [
        "paused: nothing is read until 2023-11-14 22:14:00 UTC",
        "paused is over after 31 s",
    ]


def test_a_pause_that_is_taken_back_or_made_longer_takes_effect_at_the_next_tick(
    rigs: Callable[..., Rig], path: Path
) -> None:
    rig = rigs(interval=1.0, pause=path)
    rig.tick(2)
    paused(rig, path, 5)
    rig.tick(3)
    paused(rig, path, 60)
    assert [fault.kind for fault in rig.tick(10).faults] == ["paused"]
    path.unlink()
    rig.tick()
    assert rig.tick().readings != ()
    assert (rig.source.pauses, rig.source.resyncs) == (1, 1)


def test_a_source_that_refuses_after_a_pause_is_waited_for_as_ever(rigs: Callable[..., Rig], path: Path) -> None:
    rig = rigs(interval=1.0, pause=path)
    rig.tick(2)
    paused(rig, path, 5)
    rig.tick(5)
    rig.source.trouble.append(SourceError("the engine went away meanwhile"))
    assert [fault.kind for fault in rig.tick().faults] == ["paused", "source_failed"]
    rig.tick(3)
    assert rig.tick().faults == ()
    assert rig.ledger.gpus["GPU-0"].state is State.ACTIVE


def test_a_source_that_had_died_is_not_opened_during_a_pause(rigs: Callable[..., Rig], path: Path) -> None:
    rig = rigs(interval=1.0, pause=path)
    rig.tick(2)
    rig.source.trouble.append(SourceError("gone"))
    rig.tick()
    paused(rig, path, 100)
    rig.tick(100)
    assert (rig.source.opens, rig.source.pauses) == (1, 0)
    rig.tick(2)
    assert (rig.source.opens, rig.source.pauses) == (2, 1)


def test_nothing_better_is_looked_for_during_a_pause(rigs: Callable[..., Rig], path: Path) -> None:
    asked: list[str] = []
    source = FakeSource()

    def opened(name: str) -> FakeSource:
        asked.append(name)
        if name == "better":
            raise SourceError("not there")
        return source.open(name)

    rig = rigs(interval=1.0, pause=path, rungs=SourceSelector(("better", "fake"), opened))
    rig.tick(2)
    paused(rig, path, 1000)
    rig.tick(1000)
    assert asked == ["better", "fake"]
    rig.tick(2)
    assert asked == ["better", "fake", "better"]


def test_a_daemon_that_starts_during_a_pause_opens_nothing_before_its_end(path: Path) -> None:
    source = FakeSource()
    write_pause(path, Pause(NOON + 60))
    os.utime(path, (NOON, NOON))
    hands = Collector(
        ladder(source), FakeScheduler(), pause=PauseFile(path, lambda: NOON * SECOND), inventory=Inventory()
    )
    first = hands.collect_now(SECOND)
    hands.close()
    assert [fault.kind for fault in first.faults] == ["paused"]
    assert (first.batch, source.opens) == (None, 0)


def test_the_scheduler_is_left_alone_while_nothing_is_read(rigs: Callable[..., Rig], path: Path) -> None:
    rig = rigs(interval=1.0, pause=path)
    rig.tick(2)
    rig.scheduler.trouble = SchedulerError("it was asked")
    paused(rig, path, 5)
    assert [fault.kind for fault in rig.tick(5).faults] == ["paused"]


# -- the commands --


@pytest.fixture(name="run")
def _run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path
) -> Iterator[Callable[..., Any]]:
    """Run the command with a pause file in the test's folder; return exit status, stdout and stderr."""
    monkeypatch.setenv("GPU_EFFICIENCY_SAMPLING_PAUSE_FILE", str(path))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(line: str) -> tuple[int, str, str]:
        try:
            status = main(shlex.split(line))
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(name="listening")
def _listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server where the configuration has the daemon; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("GPU_EFFICIENCY_WEB_LISTEN_ADDRESS", address)
        yield address


def test_without_a_daemon_nothing_is_said_to_be_paused(
    run: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as reserved:  # bound, but not listening: no other process can take the port
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv("GPU_EFFICIENCY_WEB_LISTEN_ADDRESS", address)
        status, out, _ = run("pause")
    assert status == 0
    assert out.startswith(f"no daemon listens on {address}, so nothing is paused now; one that starts before ")
    assert path.exists()


@pytest.mark.parametrize(
    ("flags", "seconds"), [("", 1800), ("--for 30s", 30), ("--for 90m", 5400), ("--for 2h", 7200), ("--for 24h", 86400)]
)
def test_pause_writes_what_the_daemon_reads(
    run: Callable[..., Any],
    path: Path,
    flags: str,
    seconds: int,
    listening: str,  # noqa: ARG001
) -> None:
    before = time.time()
    status, out, err = run(f"pause {flags} --reason 'Nsight, GPU 3'")
    after = time.time()
    assert (status, err) == (0, "")
    said = json.loads(path.read_bytes())
    assert said.keys() == {"until", "reason"}
    assert before + seconds <= said["until"] <= after + seconds
    assert said["reason"] == "Nsight, GPU 3"
    assert re.fullmatch(r"paused until [-0-9]{10} [:0-9]{8} UTC, at the daemon's next sample: (.+); .+\n", out)
    assert f"{path}; `gpu-efficiency resume` ends it" in out
    assert "(Nsight, GPU 3)" in look(path, after)


def test_resume_ends_it_and_says_so_and_twice_is_no_error(run: Callable[..., Any], path: Path) -> None:
    run("pause")
    assert run("resume") == (0, f"the pause is over at the daemon's next sample: {path} is removed\n", "")
    assert not path.exists()
    assert run("resume") == (0, f"nothing was paused: there is no {path}\n", "")


@pytest.mark.parametrize("time_", ["0s", "30", "half an hour", "-5m", ""])
def test_a_time_that_is_none_is_wrong_usage(run: Callable[..., Any], path: Path, time_: str) -> None:
    status, out, err = run(f"pause --for={shlex.quote(time_)}")
    assert (status, out) == (2, "")
    assert re.search(r"argument --for: .* is (less than 1s|not a duration such as 90s, 10m, 1h30m or 2d)\n", err)
    assert not path.exists()


@pytest.mark.parametrize("time_", ["25h", "86401s", "30d", "1d1s"])
def test_a_time_that_is_too_long_is_wrong_usage(run: Callable[..., Any], path: Path, time_: str) -> None:
    status, out, err = run(f"pause --for={time_}")
    assert (status, out) == (2, "")
    assert f"argument --for: '{time_}' is longer than 24h: a pause that was forgotten must not" in err
    assert not path.exists()


def test_a_reason_longer_than_the_daemon_repeats_is_wrong_usage(run: Callable[..., Any], path: Path) -> None:
    assert run(f"pause --reason {'x' * 200}")[0] == 0
    status, _, err = run(f"pause --reason {'x' * 201}")
    assert status == 2
    assert "201 characters; 200 at most" in err
    assert "x" * 200 in look(path, time.time())


def test_without_permission_both_say_what_to_do(run: Callable[..., Any], path: Path) -> None:
    path.mkdir(parents=True)  # root may write anywhere, but not a file over a folder
    for command, what in (("pause", "cannot be written"), ("resume", "cannot be removed")):
        status, out, err = run(command)
        assert (status, out) == (1, "")
        assert err.startswith(f"gpu-efficiency: {path} {what}: ")
        assert "run this as root or as the daemon's user, or have sampling.pause_file name a file" in err
        assert err.count("\n") == 1
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_file_name_is_a_configuration_nobody_can_pause(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_SAMPLING_PAUSE_FILE", "")
    for command in ("pause", "resume"):
        status, _, err = run(command)
        assert status == 2
        assert "sampling.pause_file is empty" in err


def test_the_file_named_in_the_configuration_is_the_one(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPU_EFFICIENCY_SAMPLING_PAUSE_FILE")
    toml = tmp_path / "mine.toml"
    toml.write_text(f"[sampling]\npause_file = '{tmp_path}/elsewhere'\n")
    assert run(f"pause --config {toml}")[0] == 0
    assert PauseFile(load(toml, environ={}).sampling.pause_file).poll() != ""
    assert run(f"resume --config {toml}")[0] == 0
    assert not (tmp_path / "elsewhere").exists()
