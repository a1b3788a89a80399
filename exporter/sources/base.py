"""Defines the TelemetrySource protocol and the result of a read, and opens the sources listed in SOURCES.

A source never guesses: a value that could not be read is missing, neither zero nor the last good value. Sources
without a process list get the driver's. A vendor's binding is imported lazily, and only in its source's files.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import PPM, Device, Fault, Health, Process, Reading, Spec
from exporter.registry import SOURCES, import_object
from exporter.workloads import OwnerLabels

NVLINK_SIGNALS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
"""Fields of Reading that a board without NVLink does not have."""
UNKNOWN_PREFIX = "unknown-"
"""Prefix of the placeholder UUID that a source uses until a GPU's own UUID can be read."""
LONGEST_READING_SECONDS = 90.0
"""A daemon that stood still for longer (SIGSTOP, a frozen machine) cannot vouch for what happened meanwhile."""
NO_ACTIVITY: Mapping[str, float] = dict.fromkeys(("gr_engine_active", "sm_active", "tensor_active", "dram_active"), 0.0)
"""Fields of Reading for the unpartitioned part of a board in MIG mode: no kernel can run there."""
FP64_BLANK, INT32_BLANK, INT32_LAST_BLANK = 2.0**47, 0x7FFFFFF0, 0x7FFFFFFF
"""DCGM's blank values: FP64_BLANK and above, and INT32_BLANK to INT32_LAST_BLANK (dcgm_structs.h)."""


class ReadResult(Struct, frozen=True):
    """The result of one read: devices, readings, faults and health."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()
    health: tuple[Health, ...] = ()
    settled: int | None = None
    """Monotonic nanoseconds before which no more readings will arrive; None: the `now` of the read. A source whose
    values arrive late must set it, or the ledger books the time that they cover as unobserved."""
    owner_labels: Mapping[str, frozenset[OwnerLabels]] | None = None
    """Labels that name owners, by device UUID; only devices whose lines have such labels, which may be empty. None: the
    source has no labels."""


def mig_weights(slice_counts: Sequence[int], whole: int) -> list[int]:
    """Return the weight of each MIG instance in parts per million of the board, from its compute slices out of `whole`.

    Rounds cumulatively, so that the weights of instances that fill the board add up to exactly one GPU.
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
    """Return the Device of MIG instance `number` on `board`, with the board's condition."""
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


_RECOVER_IMEX_DOMAIN = 5


def recovery_condition(action: float) -> str:
    """Return the condition of a board whose driver requests this recovery action (nvmlDeviceGpuRecoveryAction_t).

    Recovering the IMEX domain is nothing that prevents a GPU from working: NVIDIA's DRA driver allocates such a GPU
    (kubernetes-sigs/dra-driver-nvidia-gpu#1441).
    """
    return "recovery" if action and action != _RECOVER_IMEX_DOMAIN else ""


class SourceError(Exception):
    """The source cannot be opened or read; the message states what was tried, what failed and what to do."""


class TelemetrySource(Protocol):
    """Reads telemetry. Not thread-safe: a single thread makes all calls."""

    name: str

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that this source can report for this node's boards."""
        ...

    def read(self, now: int) -> ReadResult:
        """Return the readings since the last call; the first call sets the baseline and may return none.

        `now` is monotonic nanoseconds, a whole number of milliseconds. Readings of a device do not overlap and end at
        `now` or before; none begins before the first read, the last `resync` or the last `settled`. The failure of one
        GPU gives a Fault and no reading. Raises SourceError if nothing could be read at all.
        """
        ...

    def resync(self) -> None:
        """Drop the baseline: the time since the last read counts as unobserved and must not be reported later."""
        ...

    def pause(self) -> None:
        """Release the hardware counters for a profiler; the next `read` acquires them again.

        Called once when a pause begins, or when a source is opened after it; `read` is not called before its end. Never
        raises.
        """
        ...

    def close(self) -> None:
        """Release all resources. Never raises."""
        ...


def open_source(name: str, config: Any) -> TelemetrySource:
    """Open the source `name`. Raises SourceError with the reason and what to do."""
    source: TelemetrySource = import_object(SOURCES[name].opener)(config)
    return source


class ProcessLister(Protocol):
    """Lists the processes on each device."""

    def __call__(self) -> Mapping[str, tuple[Process, ...]]:
        """Return the current processes by device UUID. Raises SourceError."""
        ...

    def close(self) -> None:
        """Release all resources. Never raises."""
        ...


def open_process_list() -> ProcessLister:
    """Open the process list of the first source that has one. Raises SourceError if it cannot be opened."""
    path = next((entry.process_list for entry in SOURCES.values() if entry.process_list), "")
    if not path:
        raise SourceError("no source lists processes")
    listing: ProcessLister = import_object(path)()
    return listing


class SourceWithProcesses:
    """A TelemetrySource that adds the driver's process list to the readings of another source."""

    def __init__(self, source: TelemetrySource, list_processes: ProcessLister) -> None:
        self._source, self._list_processes = source, list_processes
        self.name, self.resync, self.pause = source.name, source.resync, source.pause

    @property
    def signals(self) -> frozenset[str]:
        """See `TelemetrySource.signals`."""
        return self._source.signals | {"processes"}

    def read(self, now: int) -> ReadResult:
        """See `TelemetrySource.read`. If listing processes fails, adds a Fault and leaves the processes None."""
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

    def close(self) -> None:
        """See `TelemetrySource.close`."""
        self._source.close()
        self._list_processes.close()


def with_processes(
    source: TelemetrySource, open_lister: Callable[[], ProcessLister] = open_process_list
) -> TelemetrySource:
    """Add the process list to `source`, unless it lists processes itself or no list can be opened."""
    if "processes" in source.signals:
        return source
    try:
        return SourceWithProcesses(source, open_lister())
    except SourceError:
        return source
