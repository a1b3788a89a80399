"""What the GPU did. One file a source, one row in SOURCES; a vendor binding lives in its own source's file only."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from msgspec import Struct

from exporter.core.model import Device, Fault, Reading


class Batch(Struct, frozen=True):
    """What one read gave: the inventory as it stands, the readings, and what went wrong, GPU by GPU."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()


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

        `now` is monotonic nanoseconds on whole milliseconds. Each reading lies within [last `now`, `now`] and never
        overlaps an earlier one. One GPU's failure is a Fault and a missing reading, not an exception.
        Raises SourceError when nothing could be read at all.
        """
        ...

    def resync(self) -> None:
        """Forget the baseline: the time since the last read was given up and must not be reported later."""
        ...

    def close(self) -> None:
        """Give back what the source holds. Never raises."""
        ...


SOURCES = {
    "nvml": "exporter.sources.nvml:open_nvml",
    "dcgm-exporter": "exporter.sources.dcgm_exporter:open_dcgm_exporter",
}
"""Name -> module:opener, in the order in which `--source auto` tries them. Imported only when tried."""


def open_source(name: str, config: Any) -> Source:
    """Open the source called `name`; raises SourceError with the reason and what to do."""
    module, opener = SOURCES[name].split(":")
    source: Source = getattr(import_module(module), opener)(config)
    return source


def open_first(config: Any, names: Sequence[str]) -> Source:
    """Open the first of `names` that works; raises SourceError with a line for what each one said."""
    said = []
    for name in names:
        try:
            return open_source(name, config)
        except SourceError as err:
            said.append(f"{name}: {err}")
    raise SourceError("\n".join(said))
