"""What the GPU did. One file a source, one row in SOURCES; a vendor binding lives in its own source's file only."""

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, Protocol

from msgspec import Struct

from exporter.core.model import PPM, Device, Fault, Health, Reading


class Batch(Struct, frozen=True):
    """What one read gave: the inventory as it stands, the readings, and what went wrong, GPU by GPU."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()
    health: tuple[Health, ...] = ()
    settled: int | None = None
    """Nothing more will come for the time before this (monotonic nanoseconds); None: the `now` of the read. A source
    whose values arrive late says so here, or the ledger books the time they stand for as unobserved."""


def shares(slices: Sequence[int], whole: int) -> list[int]:
    """Weights of MIG instances by their compute slices of `whole`, parts per million of the board.

    Rounded cumulatively, so that instances which fill the board make exactly one GPU.
    """
    edges = [end * PPM // whole for end in accumulate(slices, initial=0)]
    return [after - before for before, after in pairwise(edges)]


class SourceError(Exception):
    """The source cannot work here or just now; the message says what was tried, what came back, what to do."""


class Source(Protocol):
    """Reads telemetry. Not thread-safe: one thread of its own calls it, one call at a time."""

    name: str

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` this source can give on this node's boards."""
        ...

    def read(self, now: int) -> Batch:
        """Readings since the last call; the first call sets the baseline and may give none.

        `now` is monotonic nanoseconds on whole milliseconds. Each reading ends at `now` or before, begins where or
        after the one before it ended, and never before the first read, the last `resync` or the last `settled`. One
        GPU's failure is a Fault and a missing reading, not an exception. Raises SourceError when nothing could be read
        at all.
        """
        ...

    def resync(self) -> None:
        """Forget the baseline: the time since the last read was given up and must not be reported later."""
        ...

    def pause(self) -> None:
        """Let go of the hardware counters, so that a profiler can have them; the next `read` takes them again.

        Never raises. Called once at the beginning of a pause, throughout which nothing is read.
        """
        ...

    def close(self) -> None:
        """Give back what the source holds. Never raises."""
        ...


SOURCES = {
    "dcgm": "exporter.sources.dcgm:open_dcgm",
    "dcgm-exporter": "exporter.sources.dcgm_exporter:open_dcgm_exporter",
    "nvml": "exporter.sources.nvml:open_nvml",
}
"""Name -> module:opener, in the order in which `--source auto` tries them. Imported only when tried."""


def open_source(name: str, config: Any) -> Source:
    """Open the source called `name`; raises SourceError with the reason and what to do."""
    module, opener = SOURCES[name].split(":")
    source: Source = getattr(import_module(module), opener)(config)
    return source
