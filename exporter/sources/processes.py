"""A source that shows no processes, and the driver's list of them beside it.

Owns only the joining: DCGM and dcgm-exporter measure GPUs and do not say who is on them, and without that a resting GPU
belongs to nobody known. A process list is no hardware counter, so it may be read beside any source. Refuses to
fail a read for it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from exporter.core.model import Fault, Process
from exporter.sources import Batch, Source, SourceError


class Listing(Protocol):
    """Gives processes by UUID."""

    def __call__(self) -> Mapping[str, tuple[Process, ...]]:
        """As they are now. Raises SourceError."""
        ...

    def close(self) -> None:
        """Give back what it holds. Never raises."""
        ...


class WithProcesses:
    """`source`, whose readings say who is on the GPU."""

    def __init__(self, source: Source, listing: Listing) -> None:
        self._source, self._listing = source, listing
        self.name = source.name

    @property
    def signals(self) -> frozenset[str]:
        """See `Source.signals`."""
        return self._source.signals | {"processes"}

    def read(self, now: int) -> Batch:
        """See `Source.read`. Without the list the readings come without it, and a Fault says why."""
        batch = self._source.read(now)
        try:
            listed = self._listing()
        except SourceError as err:
            return replace(batch, faults=(*batch.faults, Fault("processes_unseen", str(err))))
        readings = tuple(
            replace(reading, processes=listed.get(reading.uuid)) if reading.processes is None else reading
            for reading in batch.readings
        )
        return replace(batch, readings=readings)

    def resync(self) -> None:
        """See `Source.resync`."""
        self._source.resync()

    def pause(self) -> None:
        """See `Source.pause`."""
        self._source.pause()

    def close(self) -> None:
        """See `Source.close`."""
        self._source.close()
        self._listing.close()


def with_processes(source: Source, open_listing: Callable[[], Listing]) -> Source:
    """`source` with the list beside it; as it is where there is none, or where it has its own."""
    if "processes" in source.signals:
        return source
    try:
        return WithProcesses(source, open_listing())
    except SourceError:
        return source
