"""One parser of foreign input, and what became of each thing it was given.

Owns the law: an input is taken, or refused by the error that the parser's docstring names, with a reason in words, soon
and in little memory; all else is a finding. Refuses to know any parser; `targets_*` do.
"""

import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from msgspec import Struct, field

from benchmarks.machine import ROOT

SECONDS_EACH = 5.0
"""An input that takes longer is a finding: far more than the slowest good one needs, on a machine that is busy."""
MEMORY_BYTES = 1 << 30
"""What a process may have more than at its beginning; beyond it gets a MemoryError, which is a finding."""
_FINDINGS = 40
_SHOWN = 200
_KEPT = 1 << 16
"""Bytes of an input that is a finding."""
Feed = Callable[[bytes], object]


class Target(Struct, frozen=True, kw_only=True):
    """A parser."""

    name: str
    what: str
    """Whose words it reads."""
    samples: Callable[[], list[bytes]]
    """Good input."""
    make: Callable[[], Feed]
    """A fresh parser, which takes one input after the other, as the daemon's does; an AssertionError of it tells that a
    promise beside the law was broken."""
    refuses: tuple[type[Exception], ...] = ()
    """What it may raise."""
    modules: tuple[str, ...] = ()
    """Whose lines are counted where the inputs are led by coverage."""


class Finding(Struct, frozen=True):
    """An input that broke the law."""

    error: str
    where: str
    """The last line of the project that was running."""
    data: bytes


class Tried(Struct):
    """What became of all of them."""

    inputs: int = 0
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    memory: int = 0
    """Bytes that the process's highest rose by."""
    coverage: tuple[int, int] = (0, 0)
    """Edges seen with the samples alone, and in the end; (0, 0): nobody counted."""
    findings: list[Finding] = field(default_factory=list)


class TooLongError(Exception):
    """Its time is over."""


class Trial:
    """One target under trial; `one` judges an input, and never raises for what it does."""

    def __init__(self, target: Target, *, seconds_each: float = SECONDS_EACH) -> None:
        self._target, self._feed, self.tried = target, target.make(), Tried()
        self._each = seconds_each
        self._begun, self._peak = time.monotonic(), _peak()

    def one(self, data: bytes) -> None:
        """Judge one input."""
        began = time.perf_counter()
        try:
            with _at_most(self._each):
                self._judged(data)
        except TooLongError as error:
            self._found(error, data)
        self.tried.inputs += 1
        self.tried.slowest = max(self.tried.slowest, time.perf_counter() - began)

    def done(self) -> Tried:
        """What it came to until now."""
        self.tried.seconds, self.tried.memory = time.monotonic() - self._begun, _peak() - self._peak
        return self.tried

    def _judged(self, data: bytes) -> None:
        try:
            self._feed(data)
        except TooLongError:
            raise
        except self._target.refuses as error:
            self.tried.refused += 1
            if not f"{error}".strip():
                self._found(error, data)
        except Exception as error:  # noqa: BLE001  to find those is what this is for
            self._found(error, data)
        else:
            self.tried.taken += 1

    def _found(self, error: Exception, data: bytes) -> None:
        """Each place once; after a finding the parser is a fresh one."""
        words = f"{type(error).__name__}: {error}"[:_SHOWN]
        found = Finding(words, _place(error), data[:_KEPT])
        known = {(one.error.partition(":")[0], one.where) for one in self.tried.findings}
        if (type(error).__name__, found.where) not in known and len(known) < _FINDINGS:
            self.tried.findings.append(found)
        self._feed = self._target.make()


def promise(kept: object, words: str) -> None:
    """What a feed holds a parser to beside the law; raises AssertionError with the words."""
    if not kept:
        raise AssertionError(words)


def tried(target: Target, inputs: Iterable[bytes], *, seconds: float = float("inf")) -> Tried:
    """Try these, or as many as so many seconds allow."""
    trial, until = Trial(target), time.monotonic() + seconds
    for data in inputs:
        trial.one(data)
        if time.monotonic() > until:
            break
    return trial.done()


def limit_memory() -> None:
    """For the rest of this process; its address space counts, for the kernel limits no other."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, hard))


def _place(error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if f"{ROOT / 'exporter'}" in one.filename]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "outside the project"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rings(_signal: int, _frame: FrameType | None) -> None:
    raise TooLongError("took too long")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _rings)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
