"""Who makes a load happen, as the measurement sees them; and the real one, a child process on the chosen GPU.

Owns the child's life and the reading of its answers. Refuses to know what a load is worth. What a child says is
checked when it is read: a line that is no answer ends the measurement with the line in the error.
"""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from benchmarks.known.loads import Load
from benchmarks.machine import ROOT
from exporter.clock import Clock
from exporter.core.model import SECOND

LATE_SECONDS = 120
"""Longer than any load may take beyond its own time: PyTorch's import and a first launch are in it."""


class StageError(Exception):
    """The loads cannot go on; the message says what was seen and where to look."""


class Lap(Struct, frozen=True, tag_field="event", tag="lap"):
    """A part of a load with nothing outstanding before and after it. Nanoseconds, monotonic."""

    start: int
    end: int
    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0
    busy: float = 0.0
    """Seconds during which a kernel ran."""


class Hello(Struct, frozen=True, tag_field="event", tag="hello"):
    """Which set of loads there is."""

    set: str = "none"
    versions: str = ""
    multiprocessors: int = 0
    reason: str = ""
    """Why the set is not the whole one."""


class End(Struct, frozen=True, tag_field="event", tag="end"):
    """How a load ended: done, skipped or failed."""

    outcome: Literal["done", "skipped", "failed"] = "done"
    reason: str = ""


class Report(Struct, frozen=True):
    """What became of a load."""

    laps: tuple[Lap, ...] = ()
    end: End = End()


class Stage(Protocol):
    """Makes loads happen, one at a time."""

    def begin(self, load: Load) -> None:
        """Set it going; returns at once."""
        ...

    def over(self) -> bool:
        """Has it ended?"""
        ...

    def report(self) -> Report:
        """Say what became of the load that is over."""
        ...

    def hello(self) -> Hello:
        """Introduce the set; known once a load has ended."""
        ...

    def close(self) -> None:
        """Let go of the GPU. Never raises."""
        ...


class Empty:
    """The stage on which nobody is: the GPU without a context, for as long as the load lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start, self._seconds = 0, 0.0

    def begin(self, load: Load) -> None:
        """See Stage."""
        self._start, self._seconds = self._clock.now(), load.seconds

    def over(self) -> bool:
        """See Stage."""
        return self._clock.now() >= self._start + round(self._seconds * SECOND)

    def report(self) -> Report:
        """Nothing was done, from beginning to end."""
        return Report(laps=(Lap(self._start, self._clock.now()),))

    def hello(self) -> Hello:
        """See Stage."""
        return Hello()

    def close(self) -> None:
        """See Stage."""


class Child:
    """A process of `python` that runs `known.child` on the GPU `uuid`; started when first needed.

    What it says is kept in `folder`: child.jsonl, and child.log for what it writes to standard error.
    """

    def __init__(self, *, python: str, uuid: str, folder: Path, clock: Clock) -> None:
        self._python, self._uuid, self._clock = python, uuid, clock
        self._told, self._log = folder / "child.jsonl", folder / "child.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._read, self._deadline = 0, 0
        self._hello = Hello()
        self._laps: list[Lap] = []
        self._end: End | None = None

    def begin(self, load: Load) -> None:
        """See Stage. Raises StageError when the interpreter cannot be started."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        self._process = self._process or self._start()
        self._laps, self._end = [], None
        self._deadline = self._clock.now() + round((load.seconds + LATE_SECONDS) * SECOND)
        assert self._process.stdin is not None  # noqa: S101  a pipe was asked for
        try:
            self._process.stdin.write(msgspec.json.encode(load) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._end = End("failed", self._last_words())

    def over(self) -> bool:
        """See Stage. A child that died, or takes far too long, has ended its load by that."""
        dead = self._process is None or self._process.poll() is not None
        self._hear()
        if self._end is None and dead:
            self._end = End("failed", self._last_words())
        elif self._end is None and self._clock.now() > self._deadline:
            self.close(patience=0)
            self._end = End("failed", f"no end after {LATE_SECONDS} s more than it should take")
        return self._end is not None

    def report(self) -> Report:
        """See Stage."""
        return Report(tuple(self._laps), self._end or End("failed", "it has not ended"))

    def hello(self) -> Hello:
        """See Stage."""
        return self._hello

    def close(self, *, patience: float = 5.0) -> None:
        """End the child; kill it if it does not go within `patience` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._uuid}
        self._read = 0
        with self._told.open("wb") as told, self._log.open("ab") as log:
            try:
                return subprocess.Popen(
                    [self._python, "-m", "benchmarks.known.child"],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=told,
                    stderr=log,
                )
            except OSError as error:
                raise StageError(f"{self._python}: cannot be started: {error.strerror or error}") from error

    def _hear(self) -> None:
        """Take in the whole lines that came since the last time."""
        with self._told.open("rb") as told:
            told.seek(self._read)
            new = told.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            answer = msgspec.json.decode(line, type=Lap | Hello | End)
        except msgspec.DecodeError as error:
            raise StageError(f"{self._told}: a load said {line[:200]!r}, which is no answer: {error}") from error
        if isinstance(answer, Lap):
            self._laps.append(answer)
        elif isinstance(answer, Hello):
            self._hello = answer
        else:
            self._end = answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"the child ended: {lines[-1] if lines else 'it said nothing'} ({self._log})"
