"""The client of training jobs: the messages it sends, and that no error slows or breaks the training."""

import ast
import copy
import json
import logging
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from exporter.training import client
from exporter.training.client import Reporter
from exporter.training.message import MOST_BYTES, Message, Phase, decode_message
from tests.training.recorder import Recorder, WebRecorder, summed
from tests.waiting import wait_for

SECOND = 1_000_000_000
SOURCE = Path(client.__file__)
SHAPE = {"parameters": 1e9, "layers": 24, "heads": 16, "head_size": 64, "sequence": 2048}


class Clock:
    """A manual clock in monotonic nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000 * SECOND

    def __call__(self) -> int:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("GPU_EFFICIENCY_", "SLURM_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with Recorder(tmp_path / "report.sock") as one:
        yield one
        assert not one.refused


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Iterator[Callable[..., Reporter]]:
    """Create reporters that use the recorder's socket and the manual clock; closed after the test."""
    made = []

    def one(**options: Any) -> Reporter:
        usual = {"socket": str(tmp_path / "report.sock"), "http": "", "clock": clock}
        made.append(Reporter(**{**usual, **options}))
        return made[-1]

    yield one
    for each in made:
        each.close()


# -- one file, nothing else --


def test_it_is_one_file_of_the_standard_library_in_the_python_of_old_images() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"), feature_version=(3, 8))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in found for name in _imported(node)}
    assert names <= set(sys.stdlib_module_names), "a training image has nothing else"
    assert all(isinstance(node, ast.Import) or node.level == 0 for node in found)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    full = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
    return [name.partition(".")[0] for name in full]


def test_a_copy_reports_from_a_bare_interpreter_and_importing_it_does_nothing(
    tmp_path: Path, recorder: Recorder
) -> None:
    shutil.copy(SOURCE, tmp_path / "reporting.py")
    told = _run(
        f"""
        import atexit, functools, importlib, json, logging, os, socket, sys, threading, typing
        sys.path.insert(0, {str(tmp_path)!r})
        before = sorted(os.listdir("/proc/self/fd")), atexit._ncallbacks()
        import reporting
        after = sorted(os.listdir("/proc/self/fd")), atexit._ncallbacks()
        print(before == after, threading.active_count())
        one = reporting.Reporter(socket={recorder.path!r})
        one.step(tokens=5)
        print(threading.active_count(), one.dropped, one.error)
        """
    )
    assert told.split() == ["True", "1", "1", "0"]
    assert summed(recorder.wait(3))["tokens"] == 5


def _run(script: str, *, environment: dict[str, str] | None = None) -> str:
    lines = script.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    text = "\n".join(line[indent:] for line in lines)
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- messages, and when they are sent --


def test_startup_and_the_first_step_are_told_at_once_the_rest_every_other_second(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    clock.forward(5)
    one.step(tokens=10, padding=1, samples=2)
    for _ in range(7):
        clock.forward(0.5)
        one.step(tokens=10, padding=1, samples=2)
    said = recorder.wait(3)
    assert [(each.phase, each.seconds, each.steps, each.step) for each in said] == [
        ("startup", 0.0, 0, None),
        ("", 5.0, 1, 1),
        ("", 2.0, 4, 5),
    ]
    assert said[1].phases == {"startup": 5.0}
    assert said[2].phases == {}
    one.close()
    last = recorder.all()[3]
    assert (last.at, last.seconds, last.steps) == (clock.now, 1.5, 3)
    assert {name: summed(recorder.messages)[name] for name in ("tokens", "padding", "samples", "steps", "seconds")} == {
        "tokens": 80, "padding": 8, "samples": 16, "steps": 8, "seconds": 8.5,
    }  # fmt: skip


def test_a_message_of_a_fraction_of_a_millisecond_takes_no_time_from_the_next(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    """Steps need an interval, so its end may lie ahead of the clock; phases until then belong to it."""
    reporter = make()
    clock.forward(1)
    reporter.step()
    clock.now += 50_000
    reporter.step()
    with reporter.phase("evaluation"):
        clock.now += 2_400_000
    reporter.close()
    short, evaluation = (each for each in recorder.all() if each.seconds == 0.001)
    assert (short.steps, evaluation.steps) == (1, 0)
    assert evaluation.phases == {"evaluation": pytest.approx(0.00145)}


def test_intervals_join_without_a_gap_on_whole_milliseconds(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make(every=0.2)
    for _ in range(50):
        clock.now += 77_777_777
        with one.phase("data"):
            clock.now += 3_333_333
        one.step(tokens=1)
    one.close()
    clock.forward(1)
    said = recorder.all()
    ends = [each.at or 0 for each in said]
    assert all(end % 1_000_000 == 0 for end in ends)
    lengths = [round(each.seconds * 1000) * 1_000_000 for each in said[1:]]
    assert [end - took for end, took in zip(ends[1:], lengths, strict=True)] == ends[:-1]
    assert summed(said)["phases"]["data"] == pytest.approx(50 * 0.003333333, abs=1e-6)


def test_the_time_of_an_inner_phase_is_not_the_outer_ones(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    one.started()
    clock.forward(1)
    with one.evaluation():
        clock.forward(2)
        with one.phase("data"):
            clock.forward(3)
            with one.phase("idle"):
                clock.forward(4)
            clock.forward(0.25)
        clock.forward(0.5)
    clock.forward(7)
    one.close()
    said = recorder.all()
    assert summed(said)["phases"] == {"compute": 8.0, "evaluation": 2.5, "data": 3.25, "idle": 4.0}
    assert [each.phase for each in said] == ["startup", "", "evaluation", "idle", "evaluation", "", ""]


@pytest.mark.parametrize("name", [name for name in get_args(Phase) if name])
def test_every_phase_of_the_schema_can_be_told(
    name: str, recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    assert name in client.PHASES
    one = make()
    clock.forward(1)
    one.step()
    with one.phase(name):
        clock.forward(3)
    one.close()
    recorder.all()
    assert summed(recorder.messages)["phases"].get(name) == (4 if name == "startup" else 3)


def test_long_phases_are_told_when_they_begin_and_when_they_end(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    one.started()
    with one.checkpoint():
        assert recorder.wait(3)[2].phase == "checkpoint"
        clock.forward(60)
    last = recorder.wait(4)[3]
    assert (last.phase, last.seconds, last.phases, last.checkpoints) == ("", 60.0, {"checkpoint": 60.0}, 1)
    with one.phase("data"):
        clock.forward(0.1)
    one.step()
    assert len(recorder.wait(5)) == 5, "the first step is told, a phase of data is not"


def test_phases_that_come_and_go_quickly_do_not_flood_the_daemon(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    for _ in range(2_000):
        one.step()
        with one.evaluation():
            clock.forward(0.005)
        with one.checkpoint():
            clock.forward(0.005)
    clock.forward(3)
    one.close()
    done = summed(recorder.all())
    assert len(recorder.messages) < 20 * 4 + 12 + 10 + 3, "20 seconds: 4 a second at most, and a burst"
    assert (done["checkpoints"], done["steps"], one.dropped) == (2_000, 2_000, 0)
    assert done["phases"]["checkpoint"] == pytest.approx(10, abs=0.001)
    # A message of a step that has taken no time takes a millisecond; of these there are some in a burst.
    assert done["phases"]["evaluation"] == pytest.approx(9.998, abs=0.001)


def test_a_loader_is_timed_item_by_item_and_keeps_its_length(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    class Loader:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            clock.forward(10)
            for each in range(3):
                clock.forward(1)
                yield each

    one = make()
    clock.forward(2)
    timed = one.iterate(Loader())
    assert len(timed) == 3
    for _ in timed:
        clock.forward(0.5)
        one.step()
    one.close()
    recorder.all()
    assert summed(recorder.messages)["phases"] == {"startup": 2.0, "data": 13.0, "compute": 1.5}
    assert list(one.iterate(iter("ab"))) == ["a", "b"], "one without a length is as good"


def test_what_the_training_raises_goes_through(make: Callable[..., Reporter], recorder: Recorder, clock: Clock) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("of the loader")

    one = make()
    with pytest.raises(KeyError, match="of the loader"):
        list(one.iterate(broken()))
    with pytest.raises(OSError, match="disk full"), one.checkpoint():
        _disk_full(clock)
    one.close()
    recorder.all()
    assert summed(recorder.messages)["checkpoints"] == 0, "it was not written"
    assert summed(recorder.messages)["phases"] == {"compute": 0.0, "checkpoint": 2.0}


def _disk_full(clock: Clock) -> None:
    clock.forward(2)
    raise OSError("disk full")


def test_hooks_turn_from_phase_to_phase(recorder: Recorder, make: Callable[..., Reporter], clock: Clock) -> None:
    one = make()
    for name in ("data", "compute", "data", "checkpoint", "checkpoint", "no such phase", "data"):
        clock.forward(1)
        one.enter(name)
    one.enter("idle", only_from="compute")
    clock.forward(4)
    one.close()
    recorder.all()
    assert summed(recorder.messages)["phases"] == {"startup": 1, "data": 6, "compute": 1, "checkpoint": 3}
    assert [each.phase for each in recorder.messages].count("checkpoint") == 1, "it is told once that it goes on"


def test_after_a_restart_the_step_goes_on_and_the_highest_is_told(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make(run="r")
    with one.phase("restore"):
        clock.forward(9)
    one.restored(100, highest_step=140)
    clock.forward(1)
    one.step()
    said = recorder.wait(5)
    assert [(each.restart, each.step, each.highest_step) for each in said[3:]] == [(True, 100, 140), (False, 101, 140)]
    assert [each.step for each in said[:3]] == [None, None, None], "no step is claimed before it is known"
    clock.forward(1)
    one.step()
    one.restored(50)
    said = recorder.wait(7)
    assert (said[5].step, said[5].steps, said[5].restart) == (102, 1, False), "what was done before is told first"
    assert (said[6].step, said[6].highest_step, said[6].restart) == (50, 140, True)
    clock.forward(3)
    one.step()
    assert (recorder.wait(8)[7].step, recorder.messages[7].restart) == (51, False)


def test_a_restart_is_not_lost_when_nobody_listens(make: Callable[..., Reporter], tmp_path: Path, clock: Clock) -> None:
    one = make()
    one.step()
    clock.forward(1)
    one.restored(0)
    with Recorder(tmp_path / "report.sock") as recorder:
        clock.forward(20)
        one.step()
        assert recorder.wait(1)[0].restart
        assert recorder.messages[0].highest_step == 1


def test_qualities_go_one_a_message(recorder: Recorder, make: Callable[..., Reporter], clock: Clock) -> None:
    one = make()
    one.started()
    one.quality("accuracy", 0.5, 0.75)
    one.quality("perplexity", 9, 8, falls=True)
    one.quality("unknown", math.nan)
    told = [each.quality for each in recorder.wait(4)[2:]]
    assert [(each.name, each.value, each.target, each.falls) for each in told if each] == [
        ("accuracy", 0.5, 0.75, False),
        ("perplexity", 9.0, 8.0, True),
    ]
    clock.forward(3)
    one.step()
    assert recorder.wait(5)[4].quality is None


def test_no_quality_is_lost_for_others(make: Callable[..., Reporter], tmp_path: Path, clock: Clock) -> None:
    one = make()
    for number in range(100):
        one.quality(f"q{number}", number)
    with Recorder(tmp_path / "report.sock") as recorder:
        for _ in range(20):
            clock.forward(20)
            one.step()
        told = [each.quality.name for each in recorder.wait(20) if each.quality]
    assert told == [f"q{number}" for number in range(16)]


def test_a_loss_that_is_no_number_is_not_hidden_by_later_ones(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    one.step(loss=3.0)
    for loss in (2.0, math.nan, 1.0, 1.5, math.inf, 0.5, 0.25):
        clock.forward(0.7)
        one.step(loss=loss)
    assert [each.loss for each in recorder.wait(4)[1:]] == [3.0, "nan", "inf"]


class Tensor:
    """A fake tensor: reading it synchronises the device, and it keeps its graph in memory."""

    def __init__(self, value: float, *, detached: bool = False) -> None:
        self.value = value
        self.detached = detached
        self.read = 0

    def detach(self) -> "Tensor":
        return Tensor(self.value, detached=True)

    def __float__(self) -> float:
        assert self.detached
        self.read += 1
        return self.value

    def __add__(self, _: object) -> "Tensor":
        return self

    __radd__ = __add__

    def __bool__(self) -> bool:
        raise AssertionError("that would wait for the device")

    def __eq__(self, _: object) -> bool:
        raise AssertionError("that would wait for the device")

    __hash__ = None  # type: ignore[assignment]


def test_tensors_are_read_when_a_message_goes_out_and_only_then(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    one.step(loss=0.0)
    clock.forward(0.1)
    tokens: Any = Tensor(7.0, detached=True)
    one.step(loss=Tensor(2.5), tokens=tokens)
    assert tokens.read == 0
    clock.forward(2)
    one.step()
    last = recorder.wait(3)[2]
    assert (last.loss, last.tokens, tokens.read, one.error) == (2.5, 7.0, 1, "")


def test_figures_told_once_are_told_as_zero_while_there_are_none(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make(model=SHAPE)
    one.step(tokens=10)
    clock.forward(1)
    with one.checkpoint():
        clock.forward(5)
    said = recorder.wait(4)
    assert [each.tokens for each in said] == [None, 10.0, 0.0, 0.0]
    assert said[3].padding is None


def test_steps_that_are_counted_from_zero_are_no_lie(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    for step in range(3):
        one.step(step=step)
        clock.forward(2)
    assert [(each.step, each.steps) for each in recorder.wait(4)[1:]] == [(0, 0), (1, 1), (2, 1)]


# -- ranks and processes --


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (None, None)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "16"}, (5, 16)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "64"}, (7, 64)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "64"}, (None, None)),
        ({"WORLD_SIZE": "8", "NODE_RANK": "0", "LOCAL_RANK": "3"}, (None, None)),
        ({"RANK": "first", "WORLD_SIZE": "-1"}, (None, None)),
    ],
)
def test_the_place_is_the_launchers_word(
    environment: dict[str, str],
    place: tuple[int | None, int | None],
    recorder: Recorder,
    make: Callable[..., Reporter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    make()
    said = recorder.wait(1)[0]
    assert (said.rank, said.world_size, said.gpus) == (*place, 1)
    make(rank=1, world_size=2)
    assert (recorder.wait(2)[1].rank, recorder.messages[1].world_size) == (1, 2)


def test_figures_are_of_the_gpus_that_share_a_batch(recorder: Recorder, make: Callable[..., Reporter]) -> None:
    make(parallel={"tensor": 4, "pipeline": 2, "context": 2, "data": 8, "expert": 8}, world_size=128)
    make(parallel={"tensor": 4}, world_size=128, gpus=128)
    said = sorted(recorder.wait(2), key=lambda each: each.gpus or 0)
    assert [(each.gpus, each.world_size) for each in said] == [(16, 128), (128, 128)]
    assert said[0].parallel is not None
    assert said[0].parallel.expert == 8


def test_everything_that_can_be_told_fits_a_message(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    class Counted:
        def __index__(self) -> int:
            return 32

        def __float__(self) -> float:
            raise AssertionError("it is a whole number")

    one = make(
        run="\N{GREEK SMALL LETTER MU}" * 500, rank=10**6, world_size=10**6, model={**SHAPE, "layers": Counted()},
        parallel=dict.fromkeys(("tensor", "pipeline", "data", "context", "expert"), 10**6), gpus=10**6,
        pipeline={"stages": 64, "microbatches": 10**6, "chunks": 2, "schedule": "interleaved"}, dtype="fp8",
        recompute="selective",
    )  # fmt: skip
    for name in client.PHASES:
        with one.phase(name):
            clock.now += 1_234_567_891
    one.quality("q" * 500, 1 / 3, 1 / 7)
    one.restored(10**14, highest_step=10**15)
    clock.forward(9)
    one.step(tokens=1e29 / 3, padding=1e28 / 3, samples=1e28 / 7, flops=1e29 / 7, hardware_flops=1e29 / 3, epoch=1 / 3)
    one.close()
    said = recorder.all()
    assert len(said[0].run) == 128
    assert said[0].model is not None
    assert said[0].model.layers == 32
    longest = max(len(json.dumps(_words(each))) for each in said)
    assert 500 < longest < MOST_BYTES / 2
    assert one.error == one.refusal == ""


def _words(message: Message) -> dict[str, Any]:
    return {name: str(getattr(message, name)) for name in message.__struct_fields__}


def test_the_ways_are_those_of_the_environment(
    tmp_path: Path, recorder: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_EFFICIENCY_SOCKET", recorder.path)
    monkeypatch.setenv("GPU_EFFICIENCY_RUN", "of the environment")
    Reporter(clock=clock).close()
    assert {each.run for each in recorder.wait(2)} == {"of the environment"}
    monkeypatch.setenv("GPU_EFFICIENCY_SOCKET", "")
    one = Reporter(clock=clock)
    one.step()
    assert (one.closed, one.dropped, len(recorder.messages)) == (True, 0, 2)
    monkeypatch.setenv("GPU_EFFICIENCY_SOCKET", str(tmp_path / "nobody.sock"))
    with WebRecorder(tmp_path / "web.sock") as web:
        monkeypatch.setenv("GPU_EFFICIENCY_HTTP", web.url)
        Reporter(clock=clock).close()
        web.recorder.wait(1)


# -- no daemon, or one that does not read --


def test_figures_wait_for_a_daemon_that_is_away(make: Callable[..., Reporter], tmp_path: Path, clock: Clock) -> None:
    one = make()
    for _ in range(25):
        one.step(tokens=10)
        with one.phase("data"):
            clock.forward(1)
    assert one.dropped == 4, "startup, the first step, and every ten seconds"
    with Recorder(tmp_path / "report.sock") as recorder:
        for _ in range(20):
            clock.forward(1)
            one.step(tokens=10)
        said = recorder.wait(2)
    assert said[0].seconds == pytest.approx(30, abs=1)
    assert said[0].phases == {"data": 25.0}
    assert said[0].steps * 10 == said[0].tokens


def test_figures_of_more_than_a_day_are_let_go(make: Callable[..., Reporter], tmp_path: Path, clock: Clock) -> None:
    one = make()
    for _ in range(30):
        one.step(tokens=1)
        clock.forward(3600)
    with Recorder(tmp_path / "report.sock") as recorder:
        one.step(tokens=1)
        told = recorder.wait(1)[0]
        assert not recorder.refused
    assert told.step == 31
    assert told.steps == told.tokens == pytest.approx(told.seconds / 3600, abs=2)
    assert told.seconds < 86400


def test_a_daemon_that_comes_back_is_found_again(make: Callable[..., Reporter], tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "report.sock"
    with Recorder(path) as first:
        one = make()
        one.step(tokens=1)
        first.wait(2)
    with Recorder(path) as second:
        clock.forward(3)
        one.step(tokens=2)
        assert one.dropped == 1, "a connection was made three seconds ago"
        clock.forward(6.9)
        one.step(tokens=4)
        assert second.connections == 0
        clock.forward(0.2)
        one.step(tokens=8)
        assert second.wait(1)[0].tokens == 14
        assert one.dropped == 1


def test_a_daemon_that_does_not_read_is_not_waited_for(make: Callable[..., Reporter], tmp_path: Path) -> None:
    clock = Clock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(tmp_path / "report.sock"))
        deaf.listen(1)
        one = make(clock=clock)
        began = time.monotonic()
        for _ in range(3_000):
            clock.forward(2)
            one.step(tokens=1)
        assert time.monotonic() - began < 20
        assert one.dropped > 100, "the kernel keeps some packets only"
        received = _drained(deaf)
        clock.forward(20)
        one.step(tokens=1)
        received += _drained(deaf)
    assert sum(each.tokens or 0 for each in received) == 3_001, "what could not be sent has joined the next"


def _drained(server: socket.socket) -> list[Message]:
    """Read everything sent, on all connections."""
    server.settimeout(0)
    received: list[Message] = []
    while True:
        try:
            link, _ = server.accept()
        except BlockingIOError:
            return received
        with link:
            received += _packets(link)


def _packets(link: socket.socket) -> list[Message]:
    link.settimeout(0)
    received: list[Message] = []
    while True:
        try:
            packet = link.recv(65536)
        except BlockingIOError:
            return received
        if not packet:
            return received
        received.append(decode_message(packet))


def test_what_the_daemon_refuses_is_kept_and_logged_once(
    tmp_path: Path, make: Callable[..., Reporter], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(tmp_path / "report.sock", refuse={"error": "no job", "field": "$.rank"}) as recorder:
        one = make()
        for number in range(5):
            clock.forward(3)
            one.step()
            recorder.wait(number + 2)
        _until(lambda: _refusal(one, clock) == "$.rank: no job")
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert said == ["gpu-efficiency: the daemon refuses what this process reports: $.rank: no job"]


def _refusal(one: Reporter, clock: Clock) -> str:
    """The reply to an earlier message is read when the next one is sent."""
    clock.forward(3)
    one.step()
    return one.refusal


def _until(true: Callable[[], bool]) -> None:
    wait_for(true, "the reply is there", step=0.01)


@pytest.mark.parametrize("answer", [b"nonsense", b"[]", b'{"error": {"a": 1}}', b"\xff\xfe", b"HTTP/1.1\r\n\r\n"])
def test_answers_that_make_no_sense_do_no_harm(
    answer: bytes, make: Callable[..., Reporter], tmp_path: Path, clock: Clock
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "report.sock"))
        server.listen(1)
        one = make()
        link, _ = server.accept()
        with link:
            for _ in range(5):
                link.send(answer)
            clock.forward(3)
            one.step(tokens=5)
            assert (one.dropped, one.error) == (0, "")
            assert one.refusal
            assert summed(_packets(link))["tokens"] == 5


# -- by HTTP --


def test_by_http_where_there_is_no_socket(tmp_path: Path, make: Callable[..., Reporter], clock: Clock) -> None:
    with WebRecorder(tmp_path / "recorder.sock") as web:
        one = make(socket=str(tmp_path / "nobody.sock"), http=web.url)
        for number in range(5):
            clock.forward(3)
            one.step(tokens=7)
            web.recorder.wait(number + 2)
        one.close()
        assert summed(web.recorder.wait(7))["tokens"] == 35
        assert not web.recorder.refused
        assert web.callers == 1, "the connection is kept, so it is told once whose it is"
    assert (one.dropped, one.refusal, one.error) == (0, "", "")


def test_what_http_refuses_is_kept(tmp_path: Path, make: Callable[..., Reporter], clock: Clock) -> None:
    with WebRecorder(tmp_path / "recorder.sock", refuse={"error": "too many", "field": ""}) as web:
        one = make(socket="", http=web.url)
        _until(lambda: _refusal(one, clock) == "too many")
        one.close()


def test_nobody_at_the_port_is_nobody(make: Callable[..., Reporter], clock: Clock) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        one = make(socket="", http=f"http://127.0.0.1:{free.getsockname()[1]}/v1/report")
    for _ in range(30):
        clock.forward(1)
        one.step()
    assert (one.dropped, one.error) == (5, "")


def test_a_server_that_never_answers_is_waited_for_at_the_end_only_and_not_long(make: Callable[..., Reporter]) -> None:
    clock = Clock()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(4)
        one = make(socket="", http=f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/report", clock=clock)
        began = time.monotonic()
        for _ in range(100):
            clock.forward(20)
            one.step()
        one.close()
        assert time.monotonic() - began < 4


def test_half_a_message_is_no_message(make: Callable[..., Reporter]) -> None:
    """After a partial write the message's figures are sent again on the next connection."""
    clock = Clock()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        one = make(socket="", http=f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/report", clock=clock)
        one.step(tokens=1)
        sent = 1
        while one.dropped == 0:
            clock.forward(20)
            one.step(tokens=1)
            sent += 1
        link, _ = deaf.accept()
        with link, link.makefile("rb") as stream:
            received = stream.read().split(b"POST ")[1:]
    bodies = [each.partition(b"\r\n\r\n")[2] for each in received]
    whole = [each for each in bodies if each.endswith(b"}")]
    assert sum(decode_message(each).tokens or 0 for each in whole) == sent - 1
    assert len(bodies) - len(whole) in (0, 1)


@pytest.mark.parametrize("url", ["https://127.0.0.1:1/", "http://example.org:80/", "http://127.0.0.1/", "127.0.0.1:80"])
def test_other_addresses_are_not_used_and_that_is_said(
    url: str, make: Callable[..., Reporter], caplog: pytest.LogCaptureFixture
) -> None:
    assert make(socket="", http=url).closed
    assert "so it is not used" in caplog.text


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1"])
def test_names_of_loopback(host: str, make: Callable[..., Reporter]) -> None:
    assert not make(socket="", http=f"http://{host}:1/v1/report").closed


# -- nothing breaks the training --


@pytest.mark.usefixtures("recorder")
def test_no_argument_is_bad_enough_to_raise(
    make: Callable[..., Reporter], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = make(run=3, rank="a", parallel={"tensor": "x"}, every="soon")
    for bad in ("text", object(), [1], -1, math.nan, -math.inf):
        one.step(tokens=bad, padding=bad, samples=bad, loss=bad, flops=bad, hardware_flops=bad, epoch=bad)  # type: ignore[arg-type]
        one.step(step=bad)  # type: ignore[arg-type]
        one.note(loss=bad, epoch=bad, flops=bad)  # type: ignore[arg-type]
        one.restored(bad)  # type: ignore[arg-type]
        one.quality("q", bad, bad)  # type: ignore[arg-type]
        one.enter(bad)  # type: ignore[arg-type]
        with one.phase(bad):  # type: ignore[arg-type]
            clock.forward(11)
    assert one.error
    assert len([each for each in caplog.records if "something could not be reported" in each.getMessage()]) == 1


def test_a_figure_that_is_none_spoils_no_other(recorder: Recorder, make: Callable[..., Reporter], clock: Clock) -> None:
    one = make()
    one.step(tokens=math.nan, samples=3, flops=-1.0)
    told = recorder.wait(2)[1]
    assert (told.tokens, told.samples, told.model_flops) == (None, 3.0, None)
    clock.forward(3)
    one.step(tokens=4, samples=3)
    assert recorder.wait(3)[2].tokens == 4.0, "a message later it is well again"


def test_an_unknown_phase_is_told_once_and_its_time_is_the_outer_ones(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    one.step(tokens=1)
    with one.evaluation(), one.phase("coffee"):
        clock.forward(4)
    one.close()
    recorder.all()
    assert "coffee" in one.error
    # The step has the millisecond that every step needs.
    assert summed(recorder.messages)["phases"] == pytest.approx({"evaluation": 3.999, "compute": 0.001})
    assert summed(recorder.messages)["tokens"] == 1


def test_logging_that_raises_is_survived(
    make: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of a handler")

    one = make()
    monkeypatch.setattr(logging.getLogger("gpu_efficiency"), "warning", broken)
    one.phase("coffee").__enter__()
    one.step(tokens=1)
    assert recorder.wait(2)[1].tokens == 1


def test_a_fork_is_silent_and_leaves_the_parents_connection_alone(recorder: Recorder) -> None:
    told = _run(
        f"""
        import os, sys
        sys.path.insert(0, {str(SOURCE.parent)!r})
        from client import Reporter
        one = Reporter(socket={recorder.path!r}, every=0.2)
        one.step(tokens=1)
        child = os.fork()
        if not child:
            for _ in range(100_000):
                one.step(tokens=1000, loss=float("nan"))
            with one.checkpoint():
                pass
            print(one.closed, one.error, flush=True)
            sys.exit(0)  # runs the atexit handlers
        os.waitpid(child, 0)
        one.step(tokens=2)
        one.close()
        print(one.dropped)
        """
    )
    assert told.split() == ["True", "0"]
    assert summed(recorder.all())["tokens"] == 3
    assert recorder.connections == 1
    assert summed(recorder.messages)["checkpoints"] == 0


def test_copies_are_silent(recorder: Recorder, make: Callable[..., Reporter], clock: Clock) -> None:
    one = make()
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), copy.copy(one)):  # noqa: S301 - its own
        clock.forward(30)
        other.step(tokens=10**9)
        with other.checkpoint():
            pass
        assert (other.closed, other.dropped) == (True, 0)
    one.close()
    assert summed(recorder.all())["tokens"] == 0


def test_a_checkpoint_written_beside_the_training_takes_none_of_its_time(
    recorder: Recorder, make: Callable[..., Reporter], clock: Clock
) -> None:
    one = make()
    with one.phase("data"):
        clock.forward(1)

    def beside() -> None:
        with one.checkpoint():
            clock.forward(30)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    one.close()
    recorder.all()
    done = summed(recorder.messages)
    assert (done["checkpoints"], done["phases"]) == (1, {"data": 1.0, "compute": 30.0})


def test_what_is_left_is_told_when_the_process_ends_and_only_then_it_is_over(recorder: Recorder) -> None:
    _run(
        f"""
        import sys
        sys.path.insert(0, {str(SOURCE.parent)!r})
        from client import Reporter
        one = Reporter(socket={recorder.path!r}, every=3600)
        for _ in range(10):
            one.step(tokens=1)
        """
    )
    assert summed(recorder.all())["tokens"] == 10


def test_after_close_it_is_silent(recorder: Recorder, make: Callable[..., Reporter], clock: Clock) -> None:
    one = make()
    one.step(tokens=1)
    one.close()
    one.close()
    clock.forward(60)
    one.step(tokens=1)
    with one.checkpoint():
        clock.forward(60)
    one.quality("q", 1.0)
    one.restored(3)
    assert (len(recorder.all()), one.error, one.closed) == (3, "", True)
