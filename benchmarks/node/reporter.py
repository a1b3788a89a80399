"""What a report costs a training process: calls of `Reporter.step()`, with a daemon, without one, and with a stuck one.

Owns the listener it reports to, a process of its own. Refuses to measure a listener that hears nothing.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from benchmarks.figures import Row, own_garbage_only, percentile, row
from benchmarks.group import Group, Measured
from exporter.training.client import Reporter

BUDGET = 5.0
"""Microseconds of a call, the messages spread over all calls between them."""
_CALLS = 200_000
_REPEATS = 5
_MESSAGES = 2_000
_SHAPE = {"parameters": 7e9, "layers": 32, "heads": 32, "head_size": 128, "sequence": 4096}
_PARALLEL = {"tensor": 8, "pipeline": 2, "data": 32}


def reporter(*, quick: bool = False) -> list[Row]:
    """Time calls in a loop that does nothing else, which is the worst case for the mean: messages are by the clock."""
    calls, repeats = (20_000, 2) if quick else (_CALLS, _REPEATS)
    with TemporaryDirectory() as folder, own_garbage_only():
        path = Path(folder) / "report.sock"
        return [
            *_case("nobody listening", path, calls=calls, repeats=repeats),
            *_heard(path, calls=calls, repeats=repeats),
            *_stuck(path.with_name("stuck.sock"), calls=calls, repeats=repeats),
        ]


def _heard(path: Path, *, calls: int, repeats: int) -> list[Row]:
    with _listening(path) as heard:
        rows = [*_case("a listener", path, calls=calls, repeats=repeats), *_phases(path, calls=calls, repeats=repeats)]
        sent = _each_sent(path, messages=min(_MESSAGES, calls // 10))
    if heard.recv() < len(sent):
        raise RuntimeError("the listener has not heard all that was sent to it")
    return [*rows, _spread("- a call that sends, every one of them", sent)]


def _stuck(path: Path, *, calls: int, repeats: int) -> list[Row]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen(16)
        return _case("a listener that never reads, its queue full", path, calls=calls, repeats=repeats, fill=1_000)


# -- measuring --


def _case(beside: str, path: Path, *, calls: int, repeats: int, fill: int = 0) -> list[Row]:
    """Rows of the mean of a call, over repeats, and of single calls, which have the clock's own cost in them."""
    means, singles = list[float](), list[float]()
    for _ in range(repeats):
        with _reporting(path) as (one, step):
            _fill(one, fill)
            means.append(_mean(step, calls))
            singles += _singles(step, calls // 4)
    return [
        row("reporter", f"step(), {beside}, mean", often=f"{repeats} x {calls:,}", values=means, unit="us", digits=2,
            budget=BUDGET, judged=max(means)),
        _spread("- single calls, two clock reads included", singles),
    ]  # fmt: skip


def _phases(path: Path, *, calls: int, repeats: int) -> list[Row]:
    def phase(one: Reporter) -> None:
        with one.phase("data"):
            pass

    means = list[float]()
    for _ in range(repeats):
        with _reporting(path) as (one, _):
            means.append(_mean(partial(phase, one), calls))
    what = 'with phase("data"), a listener, mean'
    return [row("reporter", what, often=f"{repeats} x {calls:,}", values=means, unit="us", digits=2, budget=BUDGET)]


def _each_sent(path: Path, *, messages: int) -> list[float]:
    """Time calls of which each sends: the clock is turned on by ten seconds before each."""
    turned = [time.monotonic_ns()]

    def clock() -> int:
        return turned[0]

    one = Reporter(model=_SHAPE, parallel=_PARALLEL, socket=str(path), http="", clock=clock)
    took = list[float]()
    for _ in range(messages):
        turned[0] += 10_000_000_000
        began = time.perf_counter_ns()
        one.step(tokens=8192, padding=128, loss=2.5)
        took.append((time.perf_counter_ns() - began) / 1e3)
        time.sleep(0.0002)
    one.close()
    if one.dropped:
        raise RuntimeError(f"{one.dropped} messages could not be sent: the listener is too slow for this machine")
    return took


def _fill(one: Reporter, messages: int) -> None:
    """Send until nothing more goes out."""
    for _ in range(messages):
        before = one.dropped
        one.quality("loss", 1.0)
        one._due = 0  # noqa: SLF001 - the queue is filled by messages that no clock has asked for
        one.step(tokens=1)
        if one.dropped > before:
            return


def _mean(call: Callable[[], None], calls: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - began) / calls / 1e3


def _singles(call: Callable[[], None], calls: int) -> list[float]:
    took = list[float]()
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - began) / 1e3)
    return took


def _spread(what: str, values: Sequence[float]) -> Row:
    words = f"p99 {percentile(values, 0.99):.2f}, max {max(values):.0f}"
    return row("reporter", what, often=f"{len(values):,} calls", values=values, unit="us", digits=2, spread=words)


# -- both ends --


@contextmanager
def _reporting(path: Path) -> Iterator[tuple[Reporter, Callable[[], None]]]:
    one = Reporter(model=_SHAPE, parallel=_PARALLEL, socket=str(path), http="")
    try:
        yield one, partial(one.step, tokens=8192, padding=128, loss=2.5)
    finally:
        one.close()


@contextmanager
def _listening(path: Path) -> Iterator[Connection]:
    """Start a process that reads whatever comes; it gives the number of messages when it is told to end."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_listen, args=[str(path), its], daemon=True)
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        ours.send("end")
        process.join(timeout=30)


def _listen(path: str, told: Connection) -> None:
    heard, ended = [0], Event()

    def read(link: socket.socket) -> None:
        with link:
            while link.recv(65536):
                heard[0] += 1

    def accept(server: socket.socket) -> None:
        while not ended.is_set():
            Thread(target=read, args=[server.accept()[0]], daemon=True).start()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen(64)
        Thread(target=accept, args=[server], daemon=True).start()
        told.send("ready")
        told.recv()
        ended.set()
        told.send(heard[0])


REPORTER = Group(
    name="reporter",
    title="A call of the client",
    about=(
        "What `exporter/training/client.py` costs a training thread, in a tight loop of calls: with a real listener on "
        "a socket, with none, and with one that never reads. Most calls only count; one every two seconds sends. "
        "Processor and wall time are the same here: nothing waits."
    ),
    measures=("exporter/training/client.py",),
    run=lambda: Measured(rows=reporter()),
    quick=lambda: Measured(rows=reporter(quick=True)),
)
