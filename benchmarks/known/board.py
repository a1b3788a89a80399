"""The board under test: which one, whether it can be measured now, what it is called, and its limits.

Owns the checks before the first load, and the setting of a limit while one load runs, undone whatever happens.
Refuses to set anything unless asked to (`--limits`). Takes NVML's binding as an argument: `accuracy` imports it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

from benchmarks.known.loads import Load
from exporter.clock import Clock
from exporter.core.model import SECOND, Device, Reading
from exporter.sources.base import ReadResult, SourceError, TelemetrySource

_APART = SECOND // 2
"""Between the two samples of the first look; GPM wants 100 ms."""
_BUSY = 0.01


class NotMeasuredError(Exception):
    """Nothing was measured; the message says why and what to do, `status` is the exit status."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class RefusedError(Exception):
    """A limit was not set; the message says why."""


class Facts(Struct, frozen=True):
    """What the table is about, for its head."""

    name: str
    spec: str
    driver: str
    power_limit_watts: float | None
    max_sm_clock_hz: float | None
    reference_clock_hz: float | None
    stand_in: bool
    """No GPU at all: the figures are a test's."""
    shared: str
    """Who else used the GPU; empty: nobody that could be seen."""


def first_look(source: TelemetrySource, clock: Clock, gpu: str, *, force: bool) -> tuple[Device, Reading, str]:
    """Find the GPU by ordinal or UUID, and see that it can be measured; give what disturbs it, too.

    Raises NotMeasuredError; for a disturbance, only without `force`.
    """
    try:
        source.read(clock.now())
        clock.wait(clock.now() + _APART, threading.Event())
        batch = source.read(clock.now())
    except SourceError as error:
        raise NotMeasuredError(f"{error}", status=3) from error
    device = _find(batch, gpu)
    readings = [reading for reading in batch.readings if reading.uuid == device.uuid]
    if device.condition or not readings:
        why = device.condition or "; ".join(f.message for f in batch.faults if f.uuid == device.uuid) or "no reading"
        raise NotMeasuredError(f"GPU {gpu} ({device.uuid}) cannot be read: {why}", status=3)
    _measurable(device, readings[0])
    shared = _shared(readings[0])
    if shared and not force:
        raise NotMeasuredError(f"GPU {gpu} ({device.model}) {shared}: end it, choose another GPU, or --force")
    return device, readings[0], shared


def _find(batch: ReadResult, gpu: str) -> Device:
    found = next((device for device in batch.devices if gpu in (device.index, device.uuid)), None)
    if found is None:
        there = ", ".join(f"{device.index} ({device.model})" for device in batch.devices)
        raise NotMeasuredError(f"there is no GPU {gpu}: this node has {there}; choose one with --gpu", status=3)
    if any(device.parent == found.uuid for device in batch.devices):
        raise NotMeasuredError(f"GPU {gpu} is in MIG mode: choose a whole board, or end MIG mode on it", status=3)
    return found


def _measurable(device: Device, reading: Reading) -> None:
    if reading.tensor_active is None:
        raise NotMeasuredError(
            f"GPU {device.index} ({device.model}) gives no tensor activity through NVML: GPM needs a Hopper board or "
            "later, and a user who may read it",
            status=3,
        )
    if device.spec is None or device.spec.peak_flops is None:
        raise NotMeasuredError(
            f"GPU {device.index} is a {device.model!r}, which is not in exporter/data/gpu_specs.csv: without its dense"
            " peak nothing can be expected of it; add a row",
            status=3,
        )


def _shared(reading: Reading) -> str:
    """Say who else uses the GPU: theirs would be booked as ours, and ours would disturb it. Empty: nobody."""
    pids = ", ".join(str(process.pid) for process in reading.processes or ())
    if pids:
        return f"is in use by process {pids}"
    if (reading.gr_engine_active or 0.0) >= _BUSY:
        return f"is {reading.gr_engine_active:.0%} busy though no process is listed, perhaps another container's"
    return ""


def facts(nvml: Any, device: Device, reading: Reading, *, shared: str) -> Facts:
    """Ask for the head of the table; what the driver does not say stays None."""
    driver, most = str(nvml.nvmlSystemGetDriverVersion()), None
    with suppress(nvml.NVMLError):
        most = nvml.nvmlDeviceGetMaxClockInfo(_handle(nvml, device), nvml.NVML_CLOCK_SM) * 1e6
    spec = device.spec
    return Facts(
        device.model,
        spec.name if spec else "",
        driver,
        reading.enforced_power_limit_watts,
        most,
        spec.tensor_reference_clock_hz if spec else None,
        "stand-in" in driver,
        shared,
    )


@contextmanager
def limited(nvml: Any, device: Device, load: Load, *, allowed: bool) -> Iterator[None]:
    """Hold the board to the load's limits, if it has any. Raises RefusedError, and then nothing was changed."""
    if not load.changes_board:
        yield
        return
    if not allowed:
        raise RefusedError("it changes a limit of the board: allow that with --limits (as root)")
    undo = _power(nvml, device, load) if load.power_share else _clock(nvml, device, load)
    try:
        yield
    finally:
        _undo(nvml, undo)


Call = tuple[Any, Sequence[Any], str]
"""What to call with what, and the command that does the same by hand."""


def _power(nvml: Any, device: Device, load: Load) -> Call:
    try:
        handle = _handle(nvml, device)
        before = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        least, _most = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        nvml.nvmlDeviceSetPowerManagementLimit(handle, max(least, round(before * load.power_share)))
    except nvml.NVMLError as error:
        raise RefusedError(f"the driver does not let us cap the power: {error}") from error
    by_hand = f"nvidia-smi -i {device.uuid} -pl {before / 1000:g}"
    return nvml.nvmlDeviceSetPowerManagementLimit, (handle, before), by_hand


def _clock(nvml: Any, device: Device, load: Load) -> Call:
    spec = device.spec
    if spec is None or spec.tensor_reference_clock_hz is None:
        raise RefusedError("the board's tensor reference clock is not known")
    mhz = round(spec.tensor_reference_clock_hz / 1e6 * load.clock_share)
    try:
        handle = _handle(nvml, device)
        nvml.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz)
    except nvml.NVMLError as error:
        raise RefusedError(f"the driver does not let us lock the clock: {error}") from error
    return nvml.nvmlDeviceResetGpuLockedClocks, (handle,), f"nvidia-smi -i {device.uuid} -rgc"


def _undo(nvml: Any, call: Call) -> None:
    function, arguments, by_hand = call
    try:
        function(*arguments)
    except nvml.NVMLError as error:
        raise NotMeasuredError(f"a limit of the board could not be taken back ({error}): run `{by_hand}`") from error


def _handle(nvml: Any, device: Device) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(device.index))
