"""Runs known loads on one GPU and tells, lap by lap, exactly what they did. Started by `known.stage`.

Owns the pace, the warming up and the timing of every load. Refuses to read telemetry. It runs under any Python 3.10 or
later, perhaps one with PyTorch and without our packages: the standard library only.

A load comes as a line of JSON on standard input, and answers go as lines of JSON to standard output:

    {"event": "hello", "set": "torch", "versions": "...", "multiprocessors": 132, "reason": ""}    once
    {"event": "lap", "start": ns, "end": ns, "flops": n, "bytes": n, "launches": n, "busy": s}     while a load runs
    {"event": "end", "outcome": "done" | "skipped" | "failed", "reason": "..."}                    after each load

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share. A lap is a batch of launches with
nothing outstanding before and after it; `busy` is how many seconds of it a kernel ran.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.known.cuda import KINDS as CUDA_KINDS
from benchmarks.known.cuda import Cuda, UnableError, Work, open_cuda
from benchmarks.known.torch import KINDS as TORCH_KINDS
from benchmarks.known.torch import open_torch

LAP_SECONDS = 0.1
"""Long beside the microseconds of a synchronisation, short beside a reading."""
_STORM_PROBE = 500
Say = Callable[[dict[str, Any]], None]


class Stage:
    """The device and the libraries, opened once; what is missing is told when a load needs it."""

    def __init__(self) -> None:
        self.cuda: Cuda | None = None
        self.reason = ""
        self.torch, self.no_torch = open_torch()
        try:
            self.cuda = open_cuda()
        except UnableError as error:
            self.reason = str(error)

    def hello(self) -> dict[str, Any]:
        """Introduce the set of loads that can run."""
        python = "Python " + sys.version.split()[0]
        return {
            "event": "hello",
            "set": "none" if self.cuda is None else "cuda" if self.torch is None else "torch",
            "versions": python if self.torch is None else f"{python}, PyTorch {self.torch.__version__}",
            "multiprocessors": 0 if self.cuda is None else self.cuda.multiprocessors,
            "reason": self.reason or self.no_torch,
        }

    def work(self, load: dict[str, Any]) -> Work:
        """Build what the load launches. Raises UnableError."""
        kind = load["kind"]
        if self.cuda is None:
            raise UnableError(self.reason)
        if kind in CUDA_KINDS:
            return CUDA_KINDS[kind](self.cuda, load)
        if self.torch is None:
            raise UnableError(f"needs PyTorch: {self.no_torch}")
        return TORCH_KINDS[kind](self.torch, load)

    def wait(self) -> None:
        """Until nothing is outstanding on the device."""
        if self.cuda is not None:
            self.cuda.synchronize()


def perform(stage: Stage, load: dict[str, Any], say: Say) -> dict[str, Any]:
    """Run one load for its seconds, telling its laps; give how it ended. Never raises: the next load may run."""
    try:
        if load["kind"] == "idle":
            return _idle(stage, load, say)
        work = stage.work(load)
        free = work.free
        try:
            _run(stage, work, load, say)
        finally:
            del work  # what it holds goes first
            free()
    except UnableError as error:
        return {"event": "end", "outcome": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  a vendor's library can raise anything; it is told, and the next runs
        return {"event": "end", "outcome": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {"event": "end", "outcome": "done", "reason": ""}


def _run(stage: Stage, work: Work, load: dict[str, Any], say: Say) -> None:
    """Take laps until the time is up; the warming up is not told."""
    laps = _storm(stage, work) if load["kind"] == "storm" else _steady(stage, work, load["duty"])
    warm = time.monotonic_ns() + round(load["warm"] * 1e9)
    until = warm + round(load["seconds"] * 1e9)
    for lap in laps:
        if lap["start"] >= warm:
            say({"event": "lap", **lap})
        if lap["end"] >= until:
            return


def _idle(stage: Stage, load: dict[str, Any], say: Say) -> dict[str, Any]:
    """Hold the context and rest."""
    if stage.cuda is None:
        raise UnableError(stage.reason)
    until = time.monotonic() + load["seconds"]
    while time.monotonic() < until:
        start = time.monotonic_ns()
        time.sleep(LAP_SECONDS)
        say({"event": "lap", **_lap(start, time.monotonic_ns(), Work(lambda: None), 0, busy=0.0)})
    return {"event": "end", "outcome": "done", "reason": ""}


def _steady(stage: Stage, work: Work, duty: float) -> Iterator[dict[str, Any]]:
    """Launch back to back; with `duty` below 1, rest in proportion after each lap."""
    count = max(1, round(LAP_SECONDS / _each(stage, work, 1)))
    while True:
        start = time.monotonic_ns()
        for _ in range(count):
            work.launch()
        stage.wait()
        end = time.monotonic_ns()
        yield _lap(start, end, work, count)
        if duty < 1:
            time.sleep((end - start) / 1e9 * (1 - duty) / duty)


def _storm(stage: Stage, work: Work) -> Iterator[dict[str, Any]]:
    """Launch a small kernel at every other of its lengths, as a host does that cannot keep up."""
    each = _each(stage, work, _STORM_PROBE)
    count = max(1, round(LAP_SECONDS / (2 * each)))
    while True:
        start = time.monotonic_ns()
        for i in range(count):
            due = start + round(2 * each * i * 1e9)
            while time.monotonic_ns() < due:
                pass
            work.launch()
        stage.wait()
        yield _lap(start, time.monotonic_ns(), work, count, busy=each * count)


def _each(stage: Stage, work: Work, count: int) -> float:
    """Seconds of one launch, from the second `count` of them: the first loads and chooses kernels."""
    seconds = 0.0
    for _ in range(2):
        stage.wait()
        start = time.monotonic()
        for _ in range(count):
            work.launch()
        stage.wait()
        seconds = (time.monotonic() - start) / count
    return seconds


def _lap(start: int, end: int, work: Work, launches: int, *, busy: float | None = None) -> dict[str, Any]:
    return {
        "start": start,
        "end": end,
        "flops": work.flops * launches,
        "bytes": work.bytes * launches,
        "launches": launches,
        "busy": (end - start) / 1e9 if busy is None else busy,
    }


def main() -> int:
    """Serve loads until standard input ends. What a library prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def say(event: dict[str, Any]) -> None:
            answers.write(json.dumps(event) + "\n")
            answers.flush()

        stage = Stage()
        say(stage.hello())
        for line in sys.stdin:
            say(perform(stage, json.loads(line), say))
    return 0


if __name__ == "__main__":
    sys.exit(main())
