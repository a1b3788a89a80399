"""Calls NVML for one board or MIG instance: the probes, their units, and the meaning of NVML's error codes.

Keeps the baselines of counters and per-process samples. A call that a board does not
support is not made again; faults are collected for the next read. Never imports pynvml. The behaviour of per-process
samples (see `with_sm_active`) is that of nvml.h 13 and NVIDIA's open kernel modules.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from exporter.core.model import NEVER, Device, Fault, Process, Spec
from exporter.sources.base import NO_ACTIVITY, NVLINK_SIGNALS, SourceError

Samples = Callable[[Any, int], list[Any]]
"""Function of a handle and a time stamp that returns newer samples; raises NVMLError."""
_PERCENT = 100
_MAX_EMPTY_READS = 30
"""Consecutive reads without a new sample after which the time stamp is discarded: if the clock was set back, or a stamp
was years ahead, no sample would ever be newer."""


class SampleCursor:
    """The time stamp up to which a GPU's samples were read."""

    def __init__(self) -> None:
        self.stamp: int | None = None
        """Microseconds; 0: no sample yet; None: unknown, so samples may be old."""
        self.empty_reads = 0
        """Consecutive reads without a new sample."""


def samples_of(nvml: Any) -> tuple[Samples, ...]:
    """Return the binding's calls for per-process samples; all drivers support the first."""
    return nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetProcessesUtilizationInfo


def with_sm_active(
    nvml: Any, samples: Samples, *, handle: Any, cursor: SampleCursor, listed: tuple[Process, ...]
) -> tuple[Process, ...]:
    """Return `listed` with the `sm_active` of each process, the mean of its samples since the last call.

    A process without samples while another has some gets 0. None: no listed process has samples (none was active, or
    the driver samples less often than this is called), the samples are not percentages, or this is the first call and
    the samples may be old. Raises NVMLError.
    """
    since, cursor.stamp = cursor.stamp, None
    newer = [sample for sample in _samples_since(nvml, samples, handle, since or 0) if sample.timeStamp > (since or 0)]
    valid = [sample for sample in newer if sample.smUtil <= _PERCENT]
    if not valid:
        cursor.empty_reads += 1
        cursor.stamp = (since or 0) if cursor.empty_reads % _MAX_EMPTY_READS else None
        return listed
    cursor.empty_reads, cursor.stamp = 0, max(sample.timeStamp for sample in valid)
    by_pid = defaultdict[int, list[int]](list)  # NVML documents one entry per process; several are all kept
    for sample in valid:
        by_pid[sample.pid].append(sample.smUtil)
    if since is None or not any(process.pid in by_pid for process in listed):
        return listed
    invalid = {sample.pid for sample in newer} - by_pid.keys()
    return tuple(process if process.pid in invalid else _with_mean(process, by_pid) for process in listed)


def _samples_since(nvml: Any, samples: Samples, handle: Any, since: int) -> list[Any]:
    try:
        return samples(handle, since)
    except nvml.NVMLError as error:
        # The binding also raises when a driver returns no samples with NVML_SUCCESS.
        if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
            raise
        return []


def _with_mean(process: Process, by_pid: Mapping[int, list[int]]) -> Process:
    percentages = by_pid.get(process.pid, [0])
    return replace(process, sm_active=sum(percentages) / len(percentages) / _PERCENT)


FieldValues = dict[str, Any]
"""Fields of `Reading` by name; a field that could not be read is missing."""
MIG = "mig"
"""Name of the probe for MIG mode, which is not a field of `Reading`."""


Call = Callable[["NvmlUnit", float], FieldValues]
"""Function of a unit and the seconds since its last read; raises NVMLError."""


class Probe(NamedTuple):
    """Fields that are read together, and the alternative calls for them, the newest first."""

    fields: tuple[str, ...]
    calls: tuple[Call, ...]


class NvmlUnit:
    """The state of one Device: a board, the unpartitioned part of one in MIG mode, or a GPU instance.

    `handle` is None while the driver has none; an instance has one handle per compute instance, in `handles`.
    """

    def __init__(self, device: Device, probes: Mapping[str, Probe]) -> None:
        self.device = device
        self.handle: Any = None
        self.address: int | None = None
        """Address of the last handle; a different one makes the baselines invalid."""
        self.handles: tuple[Any, ...] = ()
        self.board: NvmlUnit | None = None
        """The board of an instance; None for a board."""
        self.instance_id = -1
        """GPU instance id of an instance; -1 for a board."""
        self.doubtful = True
        """True if INVALID_ARGUMENT may mean a stale handle; False once NVML has returned the same handle again."""
        self.samples: list[Any] = []
        """The two GPM samples, the older first; the newer is valid if `primed`."""
        self.set_probes(probes)

    def set_probes(self, probes: Mapping[str, Probe]) -> None:
        """Set the probes to read, and drop the baselines."""
        self.probes = probes
        self.reset()

    def reset(self) -> None:
        """Drop all baselines, and restore unsupported calls."""
        self.read_at: int | None = None
        self.calls = {name: list(probe.calls) for name, probe in self.probes.items()}
        self.primed = False
        self.energy: int | None = None
        self.links: list[int] | None = None
        self.stamp: int | None = None
        self.processes: tuple[Process, ...] = ()
        """Its processes as listed by the current read."""
        self.cursor = SampleCursor()

    def signals(self) -> Iterator[str]:
        """Yield the fields of `Reading` that it supports."""
        for name, probe in self.probes.items():
            if name != MIG and self.calls[name]:
                yield from (field for field in probe.fields if field not in self.device.lacks)


class NvmlBoard:
    """A board: its own unit, its MIG instances, and its permanent properties."""

    def __init__(self, own: NvmlUnit, *, spec: Spec | None, gpm: bool, links: int) -> None:
        self.own, self.spec, self.gpm, self.links = own, spec, gpm, links
        self.instances: dict[str, NvmlUnit] = {}
        self.mig: bool | None = None
        """MIG mode as last read; None: never read."""
        self.layout: tuple[str, ...] | None = None
        """UUIDs of the MIG devices from which `instances` was made; None: must be read again."""
        self.layout_read_at = NEVER
        self.device_indices: dict[str, tuple[int, ...]] = {}
        """Indices of each instance's MIG devices in `layout`."""
        self.max_devices = 0
        self.read_at: int | None = None
        """When its energy counter was last read, monotonic nanoseconds."""
        self.recovery_action = 0
        """The nvmlDeviceGpuRecoveryAction_t that it requires; 0: none."""
        self.health_read_at: int | None = None
        """When its health was last read, monotonic nanoseconds."""
        self.checks: dict[str, list[Call]] | None = None
        self.health_fields: list[tuple[str, int, int]] | None = None
        """(name, field id, scope) of the supported health fields; None: not known yet."""

    def units(self) -> Iterator[NvmlUnit]:
        """Yield the board's own unit and its instances."""
        yield self.own
        yield from self.instances.values()

    def set_condition(self, condition: str) -> None:
        """Set the condition of the board and its instances; empty: they work."""
        if condition != self.own.device.condition or self.instances:
            for unit in self.units():
                unit.device = replace(unit.device, condition=condition)

    def reset(self) -> None:
        """Drop the baselines of all units."""
        self.read_at = self.health_read_at = self.checks = self.health_fields = None
        for unit in self.units():
            unit.reset()


_DECLINED = ("not_supported", "function_not_found", "argument_version_mismatch", "deprecated")
"""Errors for a call that this driver or board does not support: no fault, and the call is not made again."""
_FATAL = ("uninitialized", "driver_not_loaded", "lib_rm_version_mismatch")
"""Errors after the driver was unloaded or updated while NVML was open."""
_GONE = {"gpu_is_lost": "lost", "gpu_not_found": "lost", "reset_required": "reset_required"}
"""Errors of a GPU that cannot work, and its condition."""


class NvmlCalls:
    """Makes NVML calls and handles their errors; the caller passes the binding, which is never imported here."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        prefix = "NVML_ERROR_"
        self._names: dict[int, str] = {
            getattr(nvml, name): name.removeprefix(prefix).lower() for name in dir(nvml) if name.startswith(prefix)
        }
        self._faults: list[Fault] = []

    def call(self, unit: NvmlUnit, name: str, seconds: float = 0.0) -> FieldValues:
        """Make the probe's call; see `call_first`."""
        return self.call_first(unit, unit.calls[name], what=name, seconds=seconds)

    def call_first(self, unit: NvmlUnit, calls: list[Call], *, what: str, seconds: float = 0.0) -> FieldValues:
        """Make the first of `calls` that is supported; unsupported ones are removed from the list.

        Raises NVMLError if the GPU, the driver or the handle can no longer be used. Any other error gives a fault.
        """
        while calls:
            try:
                return calls[0](unit, seconds)
            except self.nvml.NVMLError as error:
                if self.is_declined(error):
                    del calls[0]
                    continue
                if self.is_lost(unit, error):
                    raise
                self.signal_fault(unit, what, error.value)
                return {}
        return {}

    def is_declined(self, error: Any) -> bool:
        """Return whether the driver or board does not support the call."""
        return self._names.get(error.value) in _DECLINED

    def lost_condition(self, error: Any) -> str:
        """Return the condition of a GPU with this error; empty if the error does not mean that the GPU is lost."""
        return _GONE.get(self._names.get(error.value, ""), "")

    def is_fatal(self, error: Any) -> bool:
        """Return whether the driver was unloaded or updated while NVML was open."""
        return self._names.get(error.value) in _FATAL

    def is_final(self, error: Any) -> bool:
        """Return whether this GPU, or the driver, can no longer be read."""
        return bool(self.lost_condition(error)) or self.is_fatal(error)

    def is_stale(self, error: Any) -> bool:
        """Return whether the handle may be stale: a GPU gets a new one when it is reset."""
        return bool(error.value == self.nvml.NVML_ERROR_INVALID_ARGUMENT)

    def is_lost(self, unit: NvmlUnit, error: Any) -> bool:
        """Return whether the unit can no longer be read, or not by this handle."""
        return self.is_final(error) or (unit.doubtful and self.is_stale(error))

    def raise_if_fatal(self, error: Any, action: str) -> None:
        """Raise SourceError if the error means that the driver is gone."""
        if self.is_fatal(error):
            raise driver_gone(error, action) from error

    def metric_fault(self, unit: NvmlUnit, field: str, code: int) -> None:
        """Add a fault for a GPM metric that failed, unless the board does not support it."""
        if code != self.nvml.NVML_ERROR_NOT_SUPPORTED:
            self.signal_fault(unit, field, code)

    def signal_fault(self, unit: NvmlUnit, what: str, code: int) -> None:
        """Add a fault for a signal that failed, with NVML's name of the error."""
        kind = self._names.get(code, str(code))
        self.device_fault(unit, f"nvml_{kind}", f"gave no {what}: {kind} (error {code})")

    def device_fault(self, unit: NvmlUnit, kind: str, what: str) -> None:
        """Add a fault of a GPU or MIG instance."""
        device = unit.device
        self.add_fault(Fault(kind, f"NVML: GPU {device.index} ({device.uuid}) {what}", device.uuid))

    def add_fault(self, fault: Fault) -> None:
        """Keep a fault for the next `take_faults`."""
        self._faults.append(fault)

    def take_faults(self) -> tuple[Fault, ...]:
        """Return the faults since the last call, without duplicates; a persistent fault is added at every read."""
        faults, self._faults = tuple(dict.fromkeys(self._faults)), []
        return faults


def driver_gone(error: Any, action: str) -> SourceError:
    """Return the error for a driver that this process can no longer use, with what to do."""
    return SourceError(
        f"NVML: {action}, and the driver answered {error} (error {error.value}): it was unloaded or updated while this"
        " process was running. If `nvidia-smi` works, NVML must be reopened; after an update, restart this process"
    )


class GpmProbe(Protocol):
    """Reads the GPM metrics of a board or instance: a `Call` with the fields that it can return."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of `Reading`."""
        ...

    def __call__(self, unit: NvmlUnit, seconds: float, /) -> FieldValues:
        """Return the means since the last call."""
        ...


Probes = dict[str, Probe]

UNPARTITIONED: FieldValues = {**NO_ACTIVITY, "processes": ()}
"""Fields of the unpartitioned part of a board, where nothing can run; no NVML call is needed."""
_KIB = 1024.0
_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field: the sum over links; without it NVML gives link 0 alone (nvml.h: "UINT_MAX")."""
_SAMPLE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t in the order of nvmlValueType_t."""


def board_probes(nvml: Any, gpm: GpmProbe | None) -> Probes:
    """Return the probes of a board, in order; `gpm` is None if the board does not support GPM."""
    rates = _field_probe("gpu_utilization", lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100)
    # The second call is for drivers before 510.
    running = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses_v2)
    video = {
        "encoder": _field_probe("encoder_utilization", lambda h: nvml.nvmlDeviceGetEncoderUtilization(h)[0] / 100),
        "decoder": _field_probe("decoder_utilization", lambda h: nvml.nvmlDeviceGetDecoderUtilization(h)[0] / 100),
    }
    probes = {
        **unpartitioned_probes(nvml),
        **video,
        "memory": _memory_probe(nvml),
        "processes": Probe(("processes",), tuple(_process_call(call) for call in running)),
        "sm_active of processes": Probe((), tuple(partial(_shared_use, nvml, call) for call in samples_of(nvml))),
    }
    if gpm is not None:
        return {"gpm": Probe(gpm.fields, (gpm,)), **probes, "utilization": rates}
    mean = Probe(rates.fields, (partial(_utilization, nvml), *rates.calls))
    return {**probes, "utilization": mean, "nvlink": Probe(NVLINK_SIGNALS, (partial(_nvlink, nvml),))}


def unpartitioned_probes(nvml: Any) -> Probes:
    """Return the probes that a board has in any mode; in MIG mode, they are those of its unpartitioned part."""
    return {
        MIG: _field_probe(MIG, lambda h: nvml.nvmlDeviceGetMigMode(h)[0] == nvml.NVML_DEVICE_MIG_ENABLE),
        "power": _field_probe("power_watts", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3),
        "limit": _field_probe("enforced_power_limit_watts", lambda h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
        "energy": Probe(("energy_joules",), (partial(_energy, nvml),)),
        "temperature": _field_probe(
            "temperature_celsius", lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))
        ),
        "sm_clock": _field_probe("sm_clock_hz", lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6),
        "clock_event_reasons": _field_probe(
            "clock_event_reasons",
            nvml.nvmlDeviceGetCurrentClocksEventReasons,
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,  # its name in drivers before 535
        ),
    }


def instance_probes(nvml: Any, gpm: GpmProbe | None) -> Probes:
    """Return the probes of a GPU instance; without GPM, NVML does not measure its activity."""
    listing = Probe(("processes",), (lambda unit, _: {"processes": _instance_processes(nvml, unit.handles)},))
    probes = {"memory": _memory_probe(nvml), "processes": listing}
    return probes if gpm is None else {"gpm": Probe(gpm.fields, (gpm,)), **probes}


def value_of(field_value: Any) -> Any:
    """Return the member of an nvmlFieldValue_t selected by its type; the others are undefined (nvml.h)."""
    return getattr(field_value.value, _SAMPLE_TYPES[field_value.valueType])


def _field_probe(field: str, *calls: Callable[[Any], Any]) -> Probe:
    def read_field(call: Callable[[Any], Any]) -> Callable[[NvmlUnit, float], FieldValues]:
        return lambda unit, _: {field: call(unit.handle)}

    return Probe((field,), tuple(read_field(call) for call in calls))


def _memory_probe(nvml: Any) -> Probe:
    return Probe(
        ("memory_used_bytes", "memory_total_bytes"),
        # Version 2 excludes memory reserved by the driver from `used`; version 1 includes it.
        (
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle, version=nvml.nvmlMemory_v2)),
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle)),
        ),
    )


def _memory(memory: Any) -> FieldValues:
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def compute_processes(processes: list[Any]) -> tuple[Process, ...]:
    """Convert NVML's processes with a compute context; the binding turns NVML_VALUE_NOT_AVAILABLE into None."""
    return tuple(Process(pid=process.pid, memory_bytes=process.usedGpuMemory) for process in processes)


def _process_call(call: Callable[[Any], list[Any]]) -> Call:
    def listing(unit: NvmlUnit, _seconds: float) -> FieldValues:
        unit.processes = ()  # in case the call fails
        unit.processes = compute_processes(call(unit.handle))
        return {"processes": unit.processes}

    return listing


def _shared_use(nvml: Any, samples: Samples, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """Return the processes just listed with the `sm_active` of each, if there are several."""
    if len(unit.processes) < 2:  # noqa: PLR2004  one process does not share the GPU
        unit.cursor = SampleCursor()
        return {}
    return {"processes": with_sm_active(nvml, samples, handle=unit.handle, cursor=unit.cursor, listed=unit.processes)}


def _instance_processes(nvml: Any, handles: tuple[Any, ...]) -> tuple[Process, ...]:
    """Return the processes of all compute instances."""
    return tuple(
        process for h in handles for process in compute_processes(nvml.nvmlDeviceGetComputeRunningProcesses(h))
    )


def _energy(nvml: Any, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """Return the difference of the energy counter (mJ since the driver was loaded); none after a reset."""
    before, unit.energy = unit.energy, None
    unit.energy = after = nvml.nvmlDeviceGetTotalEnergyConsumption(unit.handle)
    return {} if before is None or after < before else {"energy_joules": (after - before) / 1e3}


def _nvlink(nvml: Any, unit: NvmlUnit, seconds: float) -> FieldValues:
    """Return the rates from the KiB counters over all links; none if a counter failed or fell."""
    before, unit.links = unit.links, None
    wanted = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    field_values = nvml.nvmlDeviceGetFieldValues(unit.handle, [(field, _ALL_LINKS) for field in wanted])
    for field_value in field_values:
        if field_value.nvmlReturn:
            raise nvml.NVMLError(field_value.nvmlReturn)
    unit.links = [field_value.value.ullVal for field_value in field_values]
    if before is None or not seconds:
        return {}
    counters = zip(NVLINK_SIGNALS, before, unit.links, strict=True)
    return {field: (new - old) * _KIB / seconds for field, old, new in counters if new >= old}


def _utilization(nvml: Any, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """Return the mean of the driver's samples since the last read; NOT_FOUND means that there is no new sample."""
    before, unit.stamp = unit.stamp, None
    try:
        kind, samples = nvml.nvmlDeviceGetSamples(unit.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, before or 0)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_FOUND:
            raise
        unit.stamp = before
        return {"gpu_utilization": nvml.nvmlDeviceGetUtilizationRates(unit.handle).gpu / 100}
    unit.stamp = max((sample.timeStamp for sample in samples), default=before)
    values = [getattr(sample.sampleValue, _SAMPLE_TYPES[kind]) for sample in samples]
    return {} if before is None or not values else {"gpu_utilization": sum(values) / len(values) / 100}
