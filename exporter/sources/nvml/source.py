"""Reads all GPUs through NVML (nvidia-ml-py); also lists processes and describes the driver.

Hopper and later have GPM counters, whose values are means over the interval. Older boards have `gpu_utilization` from
the driver's sample buffer and no profiling signal; their PCIe throughput is not read, because
nvmlDeviceGetPcieThroughput blocks 20 ms per call. What NVML did not report is None. In MIG mode an instance's energy is
its share of the board's, by weight.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from exporter.core.model import MS, PPM, SECOND, Process, Reading, Spec
from exporter.sources.base import LONGEST_READING_SECONDS, ReadResult, SourceError
from exporter.sources.nvml.calls import (
    MIG,
    UNPARTITIONED,
    FieldValues,
    NvmlBoard,
    NvmlCalls,
    NvmlUnit,
    SampleCursor,
    Samples,
    compute_processes,
    samples_of,
    with_sm_active,
)
from exporter.sources.nvml.gpm import (
    GPM_COMPUTE,
    GPM_INTERVAL,
    GPM_LINKS,
    LINK_TOTALS,
    GpmReader,
    free_samples,
)
from exporter.sources.nvml.health import HealthReader
from exporter.sources.nvml.inventory import MigTracker, NvmlInventory, require_visible


class NvmlSource:
    """A TelemetrySource over an initialised NVML, which `close` shuts down; created by `open_nvml`.

    `overrides` are the operator's specs by model name. After more than `longest_seconds` without a read all begins with
    a new baseline: the time between is unobserved. A GPU that fails stays in the inventory with a condition, and
    its handle is requested at each read; once it has one, it is read again with a new baseline.
    """

    name = "nvml"

    def __init__(
        self,
        nvml: Any,
        *,
        overrides: Mapping[str, Spec] | None = None,
        longest_seconds: float = LONGEST_READING_SECONDS,
    ) -> None:
        self._longest = round(longest_seconds * SECOND)
        self._nvml, specs = nvml, overrides or {}
        self._calls = calls = NvmlCalls(nvml)
        whole = GpmReader(nvml, GPM_COMPUTE + GPM_LINKS, fault=calls.metric_fault, links=LINK_TOTALS)
        self._mig = MigTracker(calls, (whole, GpmReader(nvml, GPM_COMPUTE, fault=calls.metric_fault)), specs)
        self._inventory = NvmlInventory(calls, whole, specs)
        self._health = HealthReader(calls)
        self._boards = self._inventory.boards
        self._closed = False
        self._inventory.refresh()
        require_visible(self._boards)
        self._health.start(self._boards.values())
        self._inventory.changed = False

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` that some board of this node can report; final after the first read."""
        units = [unit for board in self._boards.values() for unit in board.units()]
        known = UNPARTITIONED if any(board.mig for board in self._boards.values()) else ()
        return frozenset(field for unit in units for field in unit.signals()).union(known)

    def read(self, now: int) -> ReadResult:
        """Read all GPUs, see `TelemetrySource.read`. Raises SourceError if the driver is gone or the source closed."""
        if self._closed:
            raise SourceError("NVML: this source was closed: open a new one")
        self._inventory.refresh()
        boards = tuple(self._boards.values())
        readings = tuple(reading for board in boards for reading in self._read_board(board, now))
        changed, self._inventory.changed = self._inventory.changed, False
        health = tuple(self._health.read(boards, now, changed=changed))
        devices = tuple(unit.device for board in boards for unit in board.units())
        unread_since = [board.read_at for board in boards if board.read_at is not None and _too_early(board, now)]
        return ReadResult(devices, readings, self._calls.take_faults(), health, min(unread_since, default=None))

    def resync(self) -> None:
        """Drop the baselines; see `TelemetrySource.resync`. Unsupported calls are tried again."""
        for board in self._boards.values():
            board.reset()

    def pause(self) -> None:
        """Free the GPM samples; see `TelemetrySource.pause`. Critical errors are still collected."""
        for board in self._boards.values():
            board.reset()
            self._free(board)

    def close(self) -> None:
        """Free the GPM samples and the event set, and shut NVML down, once. Never raises."""
        if self._closed:
            return
        self._closed = True
        for board in self._boards.values():
            self._free(board)
        self._health.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _free(self, board: NvmlBoard) -> None:
        for unit in board.units():
            free_samples(self._nvml, unit)

    # -- the readings --

    def _read_board(self, board: NvmlBoard, now: int) -> list[Reading]:
        """Read a board and its instances; return no readings if the board is lost meanwhile."""
        if board.own.handle is None or _too_early(board, now):
            return []
        try:
            return list(self._board_readings(board, now))
        except self._nvml.NVMLError as error:
            self._calls.raise_if_fatal(error, "read the GPUs")
            condition = self._calls.lost_condition(error)
            if condition:
                self._inventory.set_unavailable(board, condition, str(error))
            else:
                self._inventory.drop_handle(board)
                message = f"rejected its handle: {error}: it was reset, or is being reset; a new handle is requested"
                self._calls.device_fault(board.own, "handle_stale", message)
            return []

    def _board_readings(self, board: NvmlBoard, now: int) -> Iterator[Reading]:
        own = board.own
        if board.read_at is not None and now - board.read_at > self._longest:
            board.reset()
        if not self._mig.update(board, now):
            board.reset()
            return
        board.read_at = now
        values = self._values(own, now)
        if not values and any(own.calls.values()):
            self._inventory.drop_handle(board)  # no call returned anything: the handle may be stale
            return
        if not board.mig:
            yield from self._reading(own, now, values)
            return
        unpartitioned = {**values, **UNPARTITIONED, **_energy_share(values, own)}
        yield from self._reading(own, now, unpartitioned)
        for unit in board.instances.values():
            instance_values = {**self._values(unit, now), **_energy_share(values, unit)}
            if "sm_clock_hz" in values:
                instance_values["sm_clock_hz"] = values["sm_clock_hz"]
            yield from self._reading(unit, now, instance_values)

    def _values(self, unit: NvmlUnit, now: int) -> FieldValues:
        seconds = 0.0 if unit.read_at is None else (now - unit.read_at) / SECOND
        values: FieldValues = {}
        for name in unit.probes:
            if name != MIG:
                values.update(self._calls.call(unit, name, seconds))
        return values

    def _reading(self, unit: NvmlUnit, now: int, values: FieldValues) -> Iterator[Reading]:
        since, unit.read_at = unit.read_at, now
        if since is None:
            return
        yield Reading(uuid=unit.device.uuid, start=since, end=now, **values)


def _too_early(board: NvmlBoard, now: int) -> bool:
    """Return whether it is too early to read the board again; its next reading then covers this time too."""
    if board.read_at is None:
        return False
    shortest = GPM_INTERVAL if any(unit.calls.get("gpm") for unit in board.units()) else MS
    return now - board.read_at < shortest


def _energy_share(values: FieldValues, unit: NvmlUnit) -> FieldValues:
    """Return the unit's share of the board's energy, by weight."""
    energy = values.get("energy_joules")
    return {} if energy is None else {"energy_joules": energy * unit.device.weight / PPM}


def open_nvml(config: Any) -> NvmlSource:
    """Initialise NVML on this node. Raises SourceError if the library, the driver or all GPUs are missing."""
    nvml = initialize_nvml()
    try:
        if config is None:
            return NvmlSource(nvml)
        longest = max(LONGEST_READING_SECONDS, 2 * config.sampling.interval_seconds)
        return NvmlSource(nvml, overrides=config.overrides(), longest_seconds=longest)
    except SourceError:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        raise


def initialize_nvml(explain: Callable[[Any, Any], SourceError] | None = None) -> Any:
    """Initialise NVML and return the binding; the caller must call nvmlShutdown.

    Raises the SourceError that `explain` returns for the binding and its error; by default one with what to do.
    """
    import pynvml  # noqa: PLC0415  only a node with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise (explain or _open_error)(pynvml, error) from error
    return pynvml


def _open_error(nvml: Any, error: Any) -> SourceError:
    """Return the SourceError for nvmlInit's error, with what to do."""
    advice = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 not found: is the NVIDIA driver installed on this"
        " node, and in a container, mounted by the NVIDIA runtime (NVIDIA_DRIVER_CAPABILITIES=utility)?",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the kernel driver is not loaded: run `nvidia-smi`, then see dmesg",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "libnvidia-ml.so.1 and the loaded kernel driver differ in"
        " version: reboot or reload the driver, then restart this process",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to talk to the driver: may this user open /dev/nvidiactl?",
    }
    return SourceError(f"NVML: {advice.get(error.value, f'nvmlInit failed: {error} (error {error.value})')}")


class _SharedGpu:
    """State of a GPU that several processes share, kept between two calls."""

    def __init__(self, calls: tuple[Samples, ...]) -> None:
        self.cursor, self.calls = SampleCursor(), list(calls)


class ProcessList:
    """Lists processes by UUID of the GPU or MIG device; created by `open_nvml_processes`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml, self._is_declined = nvml, NvmlCalls(nvml).is_declined
        self._shared: dict[str, _SharedGpu] = {}

    def __call__(self) -> dict[str, tuple[Process, ...]]:
        """Return the processes of all devices that can be read. Raises SourceError if the driver fails.

        If several share a GPU, each has its `sm_active` since the last call (`with_sm_active`), or None if that failed.
        """
        nvml = self._nvml
        try:
            found = dict(pair for index in range(nvml.nvmlDeviceGetCount()) for pair in self._of_board(index))
        except nvml.NVMLError as error:
            raise SourceError(f"the driver's process list could not be read: {error}") from error
        self._shared = {uuid: shared for uuid, shared in self._shared.items() if len(found.get(uuid, ())) > 1}
        return found

    def close(self) -> None:
        """Shut NVML down. Never raises."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _of_board(self, index: int) -> Iterator[tuple[str, tuple[Process, ...]]]:
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # a GPU that fails has no processes; the others do
            board = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(board)
            if self._in_mig_mode(board):
                yield uuid, ()
                yield from self._of_instances(board, uuid)
            else:
                yield uuid, self._with_use(board, uuid, self._processes(board))

    def _with_use(self, board: Any, uuid: str, listed: tuple[Process, ...]) -> tuple[Process, ...]:
        if len(listed) < 2:  # noqa: PLR2004  one process does not share the GPU
            return listed
        shared = self._shared.setdefault(uuid, _SharedGpu(samples_of(self._nvml)))
        while shared.calls:
            try:
                return with_sm_active(self._nvml, shared.calls[0], handle=board, cursor=shared.cursor, listed=listed)
            except self._nvml.NVMLError as error:
                if not self._is_declined(error):
                    break
                del shared.calls[0]
        return listed

    def _in_mig_mode(self, board: Any) -> bool:
        with suppress(self._nvml.NVMLError):
            return bool(self._nvml.nvmlDeviceGetMigMode(board)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE)
        return False

    def _of_instances(self, board: Any, uuid: str) -> Iterator[tuple[str, tuple[Process, ...]]]:
        """Yield the processes by UUID of the MIG device, and by the board's UUID / GPU instance id."""
        nvml, by_instance = self._nvml, dict[str, tuple[Process, ...]]()
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
            with suppress(nvml.NVMLError):  # NOT_FOUND for an unused index
                device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, index)
                found = self._processes(device)
                instance = f"{uuid}/{nvml.nvmlDeviceGetGpuInstanceId(device)}"
                by_instance[instance] = (*by_instance.get(instance, ()), *found)
                yield nvml.nvmlDeviceGetUUID(device), found
        yield from by_instance.items()

    def _processes(self, handle: Any) -> tuple[Process, ...]:
        return compute_processes(self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def open_nvml_processes() -> ProcessList:
    """Initialise NVML only to list processes. Raises SourceError if there is no driver library."""
    return ProcessList(
        initialize_nvml(lambda _, error: SourceError(f"the driver's process list is not available: {error}"))
    )


class BoardDescription(Struct, frozen=True):
    """One GPU; a field is None if NVML does not report it."""

    index: int
    name: str = ""
    uuid: str = ""
    gpm: bool | None = None
    mig: bool | None = None
    persistence_mode: bool | None = None
    """True: the driver stays loaded while the GPU is not used."""
    error: str = ""
    """NVML's error if it has no handle; else empty."""


class DriverDescription(Struct, frozen=True):
    """The driver and its boards."""

    driver: str
    boards: tuple[BoardDescription, ...]


def describe_nvml() -> DriverDescription:
    """Open NVML, describe the driver and shut NVML down. Raises SourceError as `open_nvml` does."""
    nvml = initialize_nvml()
    try:
        return DriverDescription(_result_or_none(nvml, nvml.nvmlSystemGetDriverVersion) or "", tuple(_boards(nvml)))
    except nvml.NVMLError as error:
        raise SourceError(f"NVML: the driver's GPUs cannot be counted: {error}") from error
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _boards(nvml: Any) -> Iterator[BoardDescription]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            yield BoardDescription(index, error=f"{error}")
            continue
        mig = _result_or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
        persistence = _result_or_none(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
        gpm = _result_or_none(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        yield BoardDescription(
            index,
            name=_result_or_none(nvml, nvml.nvmlDeviceGetName, handle) or "",
            uuid=_result_or_none(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
            gpm=None if gpm is None else bool(gpm.isSupportedDevice),
            mig=None if mig is None else bool(mig[0]),
            persistence_mode=None if persistence is None else bool(persistence),
        )


def _result_or_none(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the call; None if it fails."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
