"""Defines what a telemetry source is: the protocol, the result of one read, and how a source of SOURCES is opened.

A source reads GPUs and never guesses: a value it did not get is missing, not zero and not the last good value.
This file also adds the driver's process list to sources that have none. A vendor binding is imported lazily, in
its source's files only.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import PPM, Device, Fault, Health, Process, Reading, Spec
from exporter.registry import SOURCES, import_object

NVLINK_SIGNALS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
"""Fields of a Reading that a board without NVLink lacks."""
NO_ACTIVITY: Mapping[str, float] = dict.fromkeys(("gr_engine_active", "sm_active", "tensor_active", "dram_active"), 0.0)
"""Fields of a Reading of what no MIG instance has of a board: no kernel can be started on it."""
FP64_BLANK, INT32_BLANK, INT32_LAST_BLANK = 2.0**47, 0x7FFFFFF0, 0x7FFFFFFF
"""What DCGM writes for a value that it does not have: 2^47 and up, or INT32_BLANK to INT32_LAST_BLANK
(dcgm_structs.h)."""


class ReadResult(Struct, frozen=True):
    """The result of one read: the inventory, the readings, and what went wrong, GPU by GPU."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()
    health: tuple[Health, ...] = ()
    settled: int | None = None
    """Nothing more will come for the time before this (monotonic nanoseconds); None: the `now` of the read. A source
    whose values arrive late sets it, or the ledger books the time that they cover as unobserved."""


def mig_weights(slice_counts: Sequence[int], whole: int) -> list[int]:
    """Weights of MIG instances by their compute slices of `whole`, parts per million of the board.

    Rounded cumulatively, so that instances which fill the board make exactly one GPU.
    """
    edges = [end * PPM // whole for end in accumulate(slice_counts, initial=0)]
    return [after - before for before, after in pairwise(edges)]


def instance_device(
    board: Device,
    number: int | str,
    *,
    uuid: str,
    profile: str,
    weight: int,
    spec: Spec | None,
    lacks: tuple[str, ...] = NVLINK_SIGNALS,
) -> Device:
    """The MIG instance of that `number` on `board`, in the board's condition."""
    return replace(
        board,
        uuid=uuid,
        index=f"{board.index}:{number}",
        spec=spec,
        lacks=lacks,
        weight=weight,
        parent=board.uuid,
        profile=profile,
        stranded=False,
    )


class SourceError(Exception):
    """The source cannot work here or just now; the message gives what was tried, what failed and what to do."""


class TelemetrySource(Protocol):
    """Reads telemetry. Not thread-safe: one thread of its own calls it, one call at a time."""

    name: str

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` this source can give on this node's boards."""
        ...

    def read(self, now: int) -> ReadResult:
        """Readings since the last call; the first call sets the baseline and may give none.

        `now` is monotonic nanoseconds on whole milliseconds. Each reading ends at `now` or before, begins where or
        after the one before it ended, and never before the first read, the last `resync` or the last `settled`. One
        GPU's failure is a Fault and a missing reading, not an exception. Raises SourceError when nothing could be read
        at all.
        """
        ...

    def resync(self) -> None:
        """Drop the baseline: the time since the last read was given up and must not be reported later."""
        ...

    def pause(self) -> None:
        """Release the hardware counters for a profiler; the next `read` takes them again.

        Never raises. Called once at the beginning of a pause, throughout which nothing is read.
        """
        ...

    def close(self) -> None:
        """Release all resources. Never raises."""
        ...


def open_source(name: str, config: Any) -> TelemetrySource:
    """Open the source called `name`; raises SourceError with the reason and what to do."""
    source: TelemetrySource = import_object(SOURCES[name].opener)(config)
    return source


class ProcessLister(Protocol):
    """Lists processes by UUID."""

    def __call__(self) -> Mapping[str, tuple[Process, ...]]:
        """The processes as they are now. Raises SourceError."""
        ...

    def close(self) -> None:
        """Release all resources. Never raises."""
        ...


def open_process_list() -> ProcessLister:
    """The process list of the first source that has one; raises SourceError where it cannot be opened."""
    path = next((entry.process_list for entry in SOURCES.values() if entry.process_list), "")
    if not path:
        raise SourceError("no source lists processes")
    listing: ProcessLister = import_object(path)()
    return listing


class SourceWithProcesses:
    """`source`, whose readings have the processes on the GPU."""

    def __init__(self, source: TelemetrySource, list_processes: ProcessLister) -> None:
        self._source, self._list_processes = source, list_processes
        self.name = source.name

    @property
    def signals(self) -> frozenset[str]:
        """See `TelemetrySource.signals`."""
        return self._source.signals | {"processes"}

    def read(self, now: int) -> ReadResult:
        """See `TelemetrySource.read`. Where the list fails, the readings have no processes, and a Fault says why."""
        result = self._source.read(now)
        try:
            listed = self._list_processes()
        except SourceError as err:
            return replace(result, faults=(*result.faults, Fault("processes_unseen", str(err))))
        readings = tuple(
            replace(reading, processes=listed.get(reading.uuid)) if reading.processes is None else reading
            for reading in result.readings
        )
        return replace(result, readings=readings)

    def resync(self) -> None:
        """See `TelemetrySource.resync`."""
        self._source.resync()

    def pause(self) -> None:
        """See `TelemetrySource.pause`."""
        self._source.pause()

    def close(self) -> None:
        """See `TelemetrySource.close`."""
        self._source.close()
        self._list_processes.close()


def with_processes(
    source: TelemetrySource, open_lister: Callable[[], ProcessLister] = open_process_list
) -> TelemetrySource:
    """`source` with the process list; unchanged where there is no list, or where it has processes itself."""
    if "processes" in source.signals:
        return source
    try:
        return SourceWithProcesses(source, open_lister())
    except SourceError:
        return source
