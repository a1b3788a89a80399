"""Tests the progress display: one redrawn line on a terminal, plain lines otherwise, nothing for short work."""

import argparse
import io
import os
import pty
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyte
import pytest

from exporter.cli import main
from exporter.cli.progress import BYTES, TIME, WAITED, ProgressBar, ProgressUnit, counted, size
from exporter.cli.serve import _record
from exporter.core.model import Observation


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("TERM", "vt100")
    return Clock()


def shown(text: str) -> str:
    """The text on a terminal's line after this output."""
    screen: list[str] = []
    for part in text.split("\r"):
        screen[: len(part)] = part
    return "".join(screen).rstrip()


def test_a_terminal_has_one_line_with_a_bar_the_rate_and_the_time_left(clock: Clock) -> None:
    stream = Terminal()
    with ProgressBar("node.jsonl.gz", 40e6, stream=stream, now=clock) as progress:
        clock.at = 100.9
        progress.update(1e6)
        assert stream.getvalue() == ""
        clock.at = 110
        progress.update(10e6)
        assert shown(stream.getvalue()) == "node.jsonl.gz  [#####...............]   25 %  1.0 MB/s  30 s left"
        clock.at = 110.2
        progress.update(11e6)
        assert "26 %" not in stream.getvalue()
        clock.at = 120
        progress.update(40e6)
        assert shown(stream.getvalue()) == "node.jsonl.gz  [####################]  100 %  2.0 MB/s  0 s left"
    assert shown(stream.getvalue()) == ""
    assert "\n" not in stream.getvalue()


def test_a_shorter_line_covers_the_longer_one_before(clock: Clock) -> None:
    stream = Terminal()
    progress = ProgressBar("x", 100.0, unit=counted("parts"), stream=stream, now=clock)
    for at, done in ((200, 1), (201, 99)):
        clock.at = at
        progress.update(done)
    assert shown(stream.getvalue()) == "x  [####################]   99 %  1.0 parts/s  1 s left"


def test_a_line_never_fills_the_screen_s_last_column(clock: Clock) -> None:
    stream = Terminal()
    progress = ProgressBar("a-very-long-name-of-a-recording-of-last-month.jsonl.gz", 1e15, stream=stream, now=clock)
    clock.at += 1e6
    progress.update(9.9e14)
    drawn = shown(stream.getvalue())
    assert len(drawn) < 80
    assert drawn == "a-very-long-na..month.jsonl.gz  [#########]   99 %  990.0 MB/s  2 h 48 min left"
    narrow = ProgressBar("recording", 100.0, stream=stream, now=clock)
    narrow._columns = lambda: 24  # type: ignore[method-assign]
    stream.truncate(0)
    clock.at += 50
    narrow.update(50)
    assert shown(stream.getvalue().lstrip("\0")) == "recording   50 %  1 B/s"


def test_elsewhere_there_is_nothing_for_ten_seconds_and_then_lines_that_get_rarer(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressBar("x", 4000.0, unit=TIME, stream=stream, now=clock) as progress:
        for second in range(1, 2001):
            clock.at = 100.0 + second
            progress.update(second)
            if second < 10:
                assert stream.getvalue() == ""
    lines = stream.getvalue().splitlines()
    assert lines[0] == "gpu-efficiency: x:   0 %, 1 times as fast, 1 h 06 min left"
    assert "\r" not in stream.getvalue()
    assert len(lines) == 66  # twenty in 200 s, then one each 5 %


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_total_it_says_how_much_and_for_how_long(clock: Clock, *, terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    progress = ProgressBar("pipe", None, unit=BYTES, stream=stream, now=clock)
    clock.at += 90
    progress.update(180e6)
    said = shown(stream.getvalue()) if terminal else stream.getvalue()
    assert said == ("pipe  180.0 MB  2.0 MB/s  2 min so far" if terminal else
                    "gpu-efficiency: pipe: 180.0 MB, 2.0 MB/s, 2 min so far\n")  # fmt: skip


def test_a_total_may_become_known_and_may_be_passed(clock: Clock) -> None:
    stream = io.StringIO()
    progress = ProgressBar("x", unit=counted("parts"), stream=stream, now=clock)
    clock.at += 20
    progress.update(3, 4)
    clock.at += 20
    progress.update(5)
    assert stream.getvalue().splitlines() == [
        "gpu-efficiency: x:  75 %, 0.1 parts/s, 7 s left",
        "gpu-efficiency: x: 100 %, 0.1 parts/s, 0 s left",
    ]


def test_what_is_waited_for_has_no_rate_and_too_soon_no_time_left(clock: Clock) -> None:
    stream = Terminal()
    progress = ProgressBar("out.jsonl", 60.0, unit=WAITED, stream=stream, now=clock)
    clock.at += 1.5
    progress.update(1.5)
    assert shown(stream.getvalue()) == "out.jsonl  [....................]    2 %"
    clock.at += 13.5
    progress.update(15)
    assert shown(stream.getvalue()) == "out.jsonl  [#####...............]   25 %  45 s left"


def test_quiet_is_quiet_and_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    with ProgressBar("x", 10.0, quiet=True, stream=stream, now=clock) as progress:
        clock.at += 1000
        progress.update(5)
        assert list(progress.through([1, 2], lambda: 5.0)) == [1, 2]
    assert stream.getvalue() == ""
    monkeypatch.setenv("TERM", "dumb")
    progress = ProgressBar("x", 10.0, stream=stream, now=clock)
    clock.at += 1000
    progress.update(5)
    assert stream.getvalue().endswith("\n")
    assert "\r" not in stream.getvalue()


def test_items_pass_through_and_how_far_is_asked_only_when_a_line_is_due(clock: Clock) -> None:
    stream, asked = io.StringIO(), []

    def done() -> float:
        asked.append(clock.at)
        return 5.0

    def items() -> Iterator[int]:
        for number in range(100):
            clock.at += 0.5
            yield number

    progress = ProgressBar("x", 10.0, stream=stream, now=clock)
    assert list(progress.through(items(), done)) == list(range(100))
    assert asked == [110.0, 120.0, 130.0, 140.0, 150.0]


def interrupted(progress: ProgressBar, clock: Clock) -> None:
    clock.at += 5
    progress.update(5)
    raise KeyboardInterrupt


def test_the_end_wipes_it_out_when_something_broke_too(clock: Clock) -> None:
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), ProgressBar("x", 10.0, stream=stream, now=clock) as progress:
        interrupted(progress, clock)
    assert shown(stream.getvalue()) == ""
    clock.at += 5
    progress.update(6)
    assert shown(stream.getvalue()) == ""


def test_nobody_to_read_it_does_not_stop_the_work(clock: Clock) -> None:
    class Gone(Terminal):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with ProgressBar("x", 10.0, stream=Gone(), now=clock) as progress:
        clock.at += 5
        progress.update(5)
        clock.at += 5
        progress.update(6)


@pytest.mark.parametrize(
    ("bytes_", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (4e12, "4000.0 GB")]
)  # fmt: skip
def test_sizes(bytes_: float, said: str) -> None:
    assert size(bytes_) == said


def test_a_unit_without_a_rate_is_left_out(clock: Clock) -> None:
    stream = io.StringIO()
    progress = ProgressBar("x", unit=ProgressUnit(str, lambda _: ""), stream=stream, now=clock)
    clock.at += 60
    progress.update(7)
    assert stream.getvalue() == "gpu-efficiency: x: 7, 1 min so far\n"


def on_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """All that the command writes to the terminal; read concurrently, because the terminal's buffer is small."""
    pieces, (master, slave) = list[bytes](), pty.openpty()

    def read() -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(master, 65_536):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", terminal)
        assert main(words) == 0
    reader.join(30)
    os.close(master)
    return b"".join(pieces).decode()


@pytest.mark.parametrize(
    "line",
    ["simulate healthy_training --gpus 1 --duration 600 -o again.jsonl", "replay {trace}", "replay {packed}",
     "preview {trace} --policy zombie.batch=15m", "backfill {packed} --simulated -o history.om"],
)  # fmt: skip
def test_every_long_command_draws_on_a_real_terminal_and_leaves_it_clean(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error is a pseudo-terminal; the initial delay is disabled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("trace.jsonl", "packed.jsonl.gz"):
        assert main(["simulate", "healthy_training", "--gpus", "1", "--duration", "300", "-o", name]) == 0
    capsys.readouterr()
    monkeypatch.setattr("exporter.cli.progress._DELAY_SECONDS", 0.0)
    words = line.format(trace="trace.jsonl", packed="packed.jsonl.gz").split()
    assert main([*words, "--quiet"]) == 0
    assert "\r" not in capsys.readouterr().err
    (tmp_path / "again.jsonl").unlink(missing_ok=True)
    (tmp_path / "history.om").unlink(missing_ok=True)
    drawn = on_a_terminal(words, monkeypatch)
    assert "[#" in drawn or "[." in drawn
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(drawn)
    assert [row for row in screen.display if "%" in row] == []
    assert screen.cursor.x == 0


@pytest.mark.parametrize(("duration", "lines"), [(30.0, 3), (None, 0)])
def test_a_recording_with_an_end_says_how_far_it_is(
    duration: float | None, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a duration there is no progress."""
    said, trace = io.StringIO(), str(tmp_path / "a.jsonl")
    monkeypatch.setattr("exporter.cli.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr("exporter.cli.progress._LINE_FRACTION", float("inf"))  # else a busy machine spaces the lines
    monkeypatch.setattr("exporter.cli.serve._stop_after", lambda _: threading.Event())  # else it takes pytest's Ctrl-C
    monkeypatch.setattr("sys.stderr", said)
    _record(argparse.Namespace(duration=duration, quiet=False, output=trace, force=False), Three())  # type: ignore[arg-type]
    told = said.getvalue().splitlines()
    assert [line.split(": ")[2].strip() for line in told[:-1]] == ["0 %"] * lines
    assert told[-1] == f"3 observations in {trace}"


class Three:
    """Yields three observations."""

    def observations(self, _: threading.Event) -> Iterator[Observation]:
        yield from (Observation(at, at) for at in range(3))
