"""The daemon as it is, with a clock that notes when each tick was due and when it came.

Owns the notes, fixed records at the end of a file, and the count of allocations that SIGUSR1 begins: before it, a note
is all that this adds to a tick. Run as `python -m benchmarks.rig.noted NOTES serve ...`. Refuses to judge the notes.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct as Packed

from msgspec import Struct

from exporter.cli import main, serve
from exporter.clock import SystemClock
from tests.shared_library import built

_PACKED = Packed("<qqqq")
_LIBRARY = "liballocations.so"


class Note(Struct, frozen=True):
    """A tick: when it was due and when it came (monotonic nanoseconds), and all that was allocated until then."""

    due: int
    woke: int
    allocations: int = 0
    """0 until they are counted."""
    bytes: int = 0

    @property
    def late_ms(self) -> float:
        """How late it came."""
        return (self.woke - self.due) / 1e6


def notes(file: Path) -> list[Note]:
    """All that a daemon has noted so far; the last may be half written, and is left out then."""
    said = file.read_bytes()
    whole = len(said) // _PACKED.size * _PACKED.size
    return [Note(*fields) for fields in _PACKED.iter_unpack(said[:whole])]


class Noted:
    """A `Clock` that notes what becomes of each wait."""

    def __init__(self, file: int, library: ctypes.PyDLL) -> None:
        self._file, self._clock = file, SystemClock()
        self._calls, self._bytes = library.counted_calls, library.counted_bytes
        self.now, self.wall = self._clock.now, self._clock.wall

    def wait(self, until: int, stop: threading.Event) -> None:
        """See Clock."""
        self._clock.wait(until, stop)
        if not stop.is_set():
            os.write(self._file, _PACKED.pack(until, time.monotonic_ns(), self._calls(), self._bytes()))


def opened() -> ctypes.PyDLL:
    """The library that counts; it is called with the interpreter's lock held."""
    library = ctypes.PyDLL(str(built(Path(__file__).parent / "allocations", _LIBRARY) / _LIBRARY))
    for function in (library.counted_calls, library.counted_bytes):
        function.restype = ctypes.c_long
    return library


def per_tick(noted: list[Note]) -> Iterator[tuple[int, int]]:
    """Allocations and their bytes between one tick and the next, where they were counted at both."""
    counted = [note for note in noted if note.allocations]
    for before, after in pairwise(counted):
        yield after.allocations - before.allocations, after.bytes - before.bytes


def _run(file: str, words: list[str]) -> int:
    library = opened()
    to = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    signal.signal(signal.SIGUSR1, lambda *_: library.begin_counting())
    vars(serve)["SystemClock"] = lambda: Noted(to, library)  # the one thing that is not as in life
    return main(words)


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], sys.argv[2:]))
