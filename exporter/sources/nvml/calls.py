"""Calls NVML for one board or MIG instance: the probes, their units, and what NVML's error codes mean.

It owns the baselines that rates are computed from, GPM samples (Hopper and later) and the driver's per-process
samples. A call that a board declines is dropped and not made again; faults are collected for the next read. It
never imports pynvml. Facts about per-process samples are those of nvml.h 13 and NVIDIA's open kernel modules; see
`with_sm_active`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import addressof, memmove, sizeof, string_at
from functools import partial
from math import isfinite, nan
from typing import Any, NamedTuple

from msgspec.structs import replace

from exporter.core.model import MS, NEVER, Device, Fault, Process, Spec
from exporter.sources.base import NO_ACTIVITY, NVLINK_SIGNALS, SourceError

Samples = Callable[[Any, int], list[Any]]
"""Takes a handle and a time stamp, returns newer samples; raises NVMLError."""
_PERCENT = 100
"""Percent."""
_MAX_EMPTY_READS = 30
"""Reads in a row without a new sample after which the time stamp is not believed: a clock set back, or a stray stamp
from years ahead, would hide every sample to come."""


class SampleCursor:
    """The time stamp up to which a GPU's samples were read."""

    def __init__(self) -> None:
        self.stamp: int | None = None
        """In microseconds, 0 when there was no sample yet; None: not known, so samples may be old."""
        self.empty_reads = 0
        """Reads in a row without a new sample."""


def samples_of(nvml: Any) -> tuple[Samples, ...]:
    """The binding's calls; the first is the one that every driver has."""
    return nvml.nvmlDeviceGetProcessUtilization, nvml.nvmlDeviceGetProcessesUtilizationInfo


def with_sm_active(
    nvml: Any, samples: Samples, *, handle: Any, cursor: SampleCursor, listed: tuple[Process, ...]
) -> tuple[Process, ...]:
    """`listed` with each one's `sm_active`, the mean of its samples since the last time; raises NVMLError.

    Without a sample while others have some it is 0. None: no process listed has any (none worked, or the driver samples
    more slowly than this is called), its samples are no percentages, or this is the first call and they may be old.
    """
    since, cursor.stamp = cursor.stamp, None
    newer = [sample for sample in _samples_since(nvml, samples, handle, since or 0) if sample.timeStamp > (since or 0)]
    valid = [sample for sample in newer if sample.smUtil <= _PERCENT]
    if not valid:
        cursor.empty_reads += 1
        cursor.stamp = (since or 0) if cursor.empty_reads % _MAX_EMPTY_READS else None
        return listed
    cursor.empty_reads, cursor.stamp = 0, max(sample.timeStamp for sample in valid)
    by_pid = _by_pid(valid)
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


def _by_pid(valid: list[Any]) -> dict[int, list[int]]:
    """Percentages by process: NVML promises one entry each; of two, both count."""
    by_pid: dict[int, list[int]] = {}
    for sample in valid:
        by_pid.setdefault(sample.pid, []).append(sample.smUtil)
    return by_pid


def _with_mean(process: Process, by_pid: dict[int, list[int]]) -> Process:
    percentages = by_pid.get(process.pid, [0])
    return replace(process, sm_active=sum(percentages) / len(percentages) / _PERCENT)


FieldValues = dict[str, Any]
"""Fields of `Reading`, by name; a missing one was not read."""
MIG = "mig"
"""The probe of MIG mode, which is no field of `Reading`."""


Call = Callable[["NvmlUnit", float], FieldValues]
"""Takes the unit and the seconds since its last read; raises NVMLError."""


class Probe(NamedTuple):
    """One thing to read: its fields and the calls that give them, the newest call first."""

    fields: tuple[str, ...]
    calls: tuple[Call, ...]


class NvmlUnit:
    """What makes one Device: a board, the unpartitioned part of one in MIG mode, or a GPU instance.

    `handle` is None while the driver does not give one; an instance has a handle for each compute instance in it.
    """

    def __init__(self, device: Device, probes: Mapping[str, Probe]) -> None:
        self.device = device
        self.handle: Any = None
        self.address: int | None = None
        """Where the last handle pointed: with another one, the baselines are void."""
        self.handles: tuple[Any, ...] = ()
        self.board: NvmlUnit | None = None
        """Of an instance, its board."""
        self.instance_id = -1
        """Of an instance, its GPU instance id."""
        self.doubtful = True
        """INVALID_ARGUMENT may mean that the handle is stale; False once NVML has given the same handle again."""
        self.samples: list[Any] = []
        """The pair of GPM samples, the older first; meaningful while `primed`."""
        self.set_probes(probes)

    def set_probes(self, probes: Mapping[str, Probe]) -> None:
        """Read these from now on, with new baselines."""
        self.probes = probes
        self.reset()

    def reset(self) -> None:
        """Drop every baseline, and restore the calls that were declined."""
        self.read_at: int | None = None
        self.calls = {name: list(probe.calls) for name, probe in self.probes.items()}
        self.primed = False
        self.energy: int | None = None
        self.links: list[int] | None = None
        self.stamp: int | None = None
        self.processes: tuple[Process, ...] = ()
        """Its processes, as this read found them."""
        self.cursor = SampleCursor()

    def signals(self) -> Iterator[str]:
        """Yield the fields of `Reading` that it has not declined and can have."""
        for name, probe in self.probes.items():
            if name != MIG and self.calls[name]:
                yield from (field for field in probe.fields if field not in self.device.lacks)


class NvmlBoard:
    """A board: its own unit, the instances cut from it, and what is known of it for good."""

    def __init__(self, own: NvmlUnit, *, spec: Spec | None, gpm: bool, links: int) -> None:
        self.own, self.spec, self.gpm, self.links = own, spec, gpm, links
        self.instances: dict[str, NvmlUnit] = {}
        self.mig: bool | None = None
        """MIG mode as last read; None: never read."""
        self.layout: tuple[str, ...] | None = None
        """UUIDs of the MIG devices that `instances` was made from; None: to be read again."""
        self.layout_read_at = NEVER
        self.device_indices: dict[str, tuple[int, ...]] = {}
        """Of each instance, where its handles stand among those devices."""
        self.max_devices = 0
        self.read_at: int | None = None
        """When its energy counter was last read."""
        self.recovery_action = 0
        """The nvmlDeviceGpuRecoveryAction_t that it requires; 0: none."""
        self.health_read_at: int | None = None
        """When its health was last read."""
        self.checks: dict[str, list[Call]] | None = None
        self.health_fields: list[tuple[str, int, int]] | None = None
        """Health fields that it has not declined: name, field id and scope. None: all, as at the start."""

    def units(self) -> Iterator[NvmlUnit]:
        """Yield what is a Device: the board itself and its instances."""
        yield self.own
        yield from self.instances.values()

    def set_condition(self, condition: str) -> None:
        """Set why the board and its instances cannot work; empty: they can."""
        if condition != self.own.device.condition or self.instances:
            for unit in self.units():
                unit.device = replace(unit.device, condition=condition)

    def reset(self) -> None:
        """Drop the baseline of each unit."""
        self.read_at = self.health_read_at = self.checks = self.health_fields = None
        for unit in self.units():
            unit.reset()


_DECLINED = ("not_supported", "function_not_found", "argument_version_mismatch", "deprecated")
"""This driver or board does not have the call at all: not a fault, and not worth a second call."""
_FATAL = ("uninitialized", "driver_not_loaded", "lib_rm_version_mismatch")
"""The driver was unloaded or updated while NVML was open."""
_GONE = {"gpu_is_lost": "lost", "gpu_not_found": "lost", "reset_required": "reset_required"}
"""The GPU cannot work: its condition."""


class NvmlCalls:
    """Makes a unit's calls; takes the binding as an argument, because only `initialize_nvml` imports it."""

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
        """Make the first of `calls` that is not declined; a declined one is dropped and not made again.

        Raises NVMLError when the GPU, the driver, or the handle itself is no longer good. Any other error costs the
        signal a fault.
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
        """Whether this driver or board has no such call."""
        return self._names.get(error.value) in _DECLINED

    def lost_condition(self, error: Any) -> str:
        """The condition of a GPU that gave this error; empty where the error is of another kind."""
        return _GONE.get(self._names.get(error.value, ""), "")

    def is_fatal(self, error: Any) -> bool:
        """Whether the driver was unloaded or updated while NVML was open."""
        return self._names.get(error.value) in _FATAL

    def is_final(self, error: Any) -> bool:
        """Whether this GPU, or the driver, cannot be read any more."""
        return bool(self.lost_condition(error)) or self.is_fatal(error)

    def is_stale(self, error: Any) -> bool:
        """Whether the handle is no longer good: a GPU that was reset has another."""
        return bool(error.value == self.nvml.NVML_ERROR_INVALID_ARGUMENT)

    def is_lost(self, unit: NvmlUnit, error: Any) -> bool:
        """Whether the unit cannot be read any more, or not by this handle."""
        return self.is_final(error) or (unit.doubtful and self.is_stale(error))

    def raise_if_fatal(self, error: Any, action: str) -> None:
        """Turn the loss of the driver into a SourceError."""
        if self.is_fatal(error):
            raise driver_gone(error, action) from error

    def metric_fault(self, unit: NvmlUnit, field: str, code: int) -> None:
        """Add a fault for a GPM metric that failed; a metric that the board does not have is none."""
        if code != self.nvml.NVML_ERROR_NOT_SUPPORTED:
            self.signal_fault(unit, field, code)

    def signal_fault(self, unit: NvmlUnit, what: str, code: int) -> None:
        """Add a fault for a signal that failed, with NVML's name of the error."""
        kind = self._names.get(code, str(code))
        self.device_fault(unit, f"nvml_{kind}", f"gave no {what}: {kind} (error {code})")

    def device_fault(self, unit: NvmlUnit, kind: str, what: str) -> None:
        """Add a fault of a GPU or of an instance of it."""
        device = unit.device
        self.add_fault(Fault(kind, f"NVML: GPU {device.index} ({device.uuid}) {what}", device.uuid))

    def add_fault(self, fault: Fault) -> None:
        """Keep a fault for the next `take_faults`."""
        self._faults.append(fault)

    def take_faults(self) -> tuple[Fault, ...]:
        """The faults since the last call, each once; a fault that lasts is added at every read."""
        faults, self._faults = tuple(dict.fromkeys(self._faults)), []
        return faults


def driver_gone(error: Any, action: str) -> SourceError:
    """The error for a driver that this process cannot use any more, with what to do."""
    return SourceError(
        f"NVML: {action}, and the driver answered {error} (error {error.value}): it was unloaded or updated under"
        " this process. If `nvidia-smi` works, NVML must be opened anew; after an update, restart this process"
    )


GPM_INTERVAL = 100 * MS
"""GPM's counters are refreshed every 100 ms: closer samples show nothing new (NVML doc, nvmlGpmMetricsGet)."""
_MIB = 1024.0 * 1024.0
GPM_COMPUTE = (
    # Reading's field, NVML's metric (nvmlGpmMetricId_t), scale: percent there, ratios here.
    ("gr_engine_active", "NVML_GPM_METRIC_GRAPHICS_UTIL", 0.01),
    ("sm_active", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("fp64_active", "NVML_GPM_METRIC_FP64_UTIL", 0.01),
    ("fp32_active", "NVML_GPM_METRIC_FP32_UTIL", 0.01),
    ("fp16_active", "NVML_GPM_METRIC_FP16_UTIL", 0.01),
)
"""What a GPU instance has too, relative to itself."""
GPM_LINKS = (
    # MiB/s there, bytes/s here.
    ("pcie_tx_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),  # "traffic from this GPU"
    ("pcie_rx_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
    ("nvlink_tx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB),
    ("nvlink_rx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB),
)
"""What a board alone has."""


class GpmReader:
    """One request, reused for every unit of a kind, and blanked before each use."""

    def __init__(
        self, nvml: Any, metrics: tuple[tuple[str, str, float], ...], *, fault: Callable[[NvmlUnit, str, int], None]
    ) -> None:
        self._nvml, self._fault = nvml, fault
        self.fields = tuple(field for field, _, _ in metrics)
        self._request = request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        self._slots = []
        for index, (field, metric, scale) in enumerate(metrics):
            slot = request.metrics[index]
            slot.metricId, slot.nvmlReturn, slot.value = getattr(nvml, metric), nvml.NVML_ERROR_NO_DATA, nan
            self._slots.append((field, scale, slot))
        # The request declares room for hundreds of metrics: blank only what is used.
        used = type(request).metrics.offset + len(metrics) * sizeof(nvml.c_nvmlGpmMetric_t)
        self._blank = string_at(addressof(request), used)

    def __call__(self, unit: NvmlUnit, _seconds: float) -> FieldValues:
        """Take a sample and return the means since the previous one; empty where there is none."""
        while len(unit.samples) < 2:  # noqa: PLR2004  a pair
            unit.samples.append(self._nvml.nvmlGpmSampleAlloc())
        older, newer = unit.samples
        primed, unit.primed = unit.primed, False
        self._sample(unit, newer)
        unit.samples, unit.primed = [newer, older], True
        return dict(self._between(unit, older, newer)) if primed else {}

    def _sample(self, unit: NvmlUnit, sample: Any) -> None:
        if unit.board is None:
            self._nvml.nvmlGpmSampleGet(unit.handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(unit.board.handle, unit.instance_id, sample)

    def _between(self, unit: NvmlUnit, older: Any, newer: Any) -> Iterator[tuple[str, float]]:
        """Yield the value of each metric; one that failed, or is no number, is left out, never 0."""
        memmove(addressof(self._request), self._blank, len(self._blank))
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        for field, scale, slot in self._slots:
            code, value = slot.nvmlReturn, slot.value
            if code:
                self._fault(unit, field, code)
            elif isfinite(value) and value >= 0.0:
                yield field, value * scale


def free_samples(nvml: Any, unit: NvmlUnit) -> None:
    """Free a unit's samples; never raises."""
    samples, unit.samples, unit.primed = unit.samples, [], False
    for sample in samples:
        with suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleFree(sample)


Probes = dict[str, Probe]

UNPARTITIONED: FieldValues = {**NO_ACTIVITY, "processes": ()}
"""Fields of what no instance has of a board: nothing can run on it, so NVML need not be asked."""
_KIB = 1024.0
_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field: the sum over links; without it NVML gives link 0 alone (nvml.h: "UINT_MAX")."""
_SAMPLE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t in the order of nvmlValueType_t."""


def board_probes(nvml: Any, gpm: GpmReader | None) -> Probes:
    """The probes of a board, in order; `gpm` is None where the hardware has none."""
    rates = _field_probe("gpu_utilization", lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100)
    # The second call is for drivers before 510.
    running = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses_v2)
    probes = {
        **unpartitioned_probes(nvml),
        "memory": _memory_probe(nvml),
        "processes": Probe(("processes",), tuple(_process_call(call) for call in running)),
        "sm_active of processes": Probe((), tuple(partial(_shared_use, nvml, call) for call in samples_of(nvml))),
    }
    if gpm is not None:
        return {"gpm": Probe(gpm.fields, (gpm,)), **probes, "utilization": rates}
    mean = Probe(rates.fields, (partial(_utilization, nvml), *rates.calls))
    return {**probes, "utilization": mean, "nvlink": Probe(NVLINK_SIGNALS, (partial(_nvlink, nvml),))}


def unpartitioned_probes(nvml: Any) -> Probes:
    """The probes of a board in any mode, so those of its unpartitioned part in MIG mode."""
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
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,  # the same, as drivers before 535 call it
        ),
    }


def instance_probes(nvml: Any, gpm: GpmReader | None) -> Probes:
    """The probes of a GPU instance; without GPM, NVML does not measure its activity."""
    listing = Probe(("processes",), (lambda unit, _: {"processes": _instance_processes(nvml, unit.handles)},))
    probes = {"memory": _memory_probe(nvml), "processes": listing}
    return probes if gpm is None else {"gpm": Probe(gpm.fields, (gpm,)), **probes}


def value_of(answer: Any) -> Any:
    """The member of an nvmlFieldValue_t that its type names; the others are undefined (nvml.h)."""
    return getattr(answer.value, _SAMPLE_TYPES[answer.valueType])


def _field_probe(field: str, *calls: Callable[[Any], Any]) -> Probe:
    def read_field(call: Callable[[Any], Any]) -> Callable[[NvmlUnit, float], FieldValues]:
        return lambda unit, _: {field: call(unit.handle)}

    return Probe((field,), tuple(read_field(call) for call in calls))


def _memory_probe(nvml: Any) -> Probe:
    return Probe(
        ("memory_used_bytes", "memory_total_bytes"),
        # The second version keeps what the driver reserves apart; the first calls it used.
        (
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle, version=nvml.nvmlMemory_v2)),
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle)),
        ),
    )


def _memory(memory: Any) -> FieldValues:
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def compute_processes(processes: list[Any]) -> tuple[Process, ...]:
    """The processes with a compute context; the binding makes None of NVML_VALUE_NOT_AVAILABLE."""
    return tuple(Process(pid=process.pid, memory_bytes=process.usedGpuMemory) for process in processes)


def _process_call(call: Callable[[Any], list[Any]]) -> Call:
    def listing(unit: NvmlUnit, _seconds: float) -> FieldValues:
        unit.processes = ()  # a call that fails must leave no list behind
        unit.processes = compute_processes(call(unit.handle))
        return {"processes": unit.processes}

    return listing


def _shared_use(nvml: Any, samples: Samples, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """The processes just listed, with the `sm_active` of each where there are several."""
    if len(unit.processes) < 2:  # noqa: PLR2004  with one there is nothing to share
        unit.cursor = SampleCursor()
        return {}
    return {"processes": with_sm_active(nvml, samples, handle=unit.handle, cursor=unit.cursor, listed=unit.processes)}


def _instance_processes(nvml: Any, handles: tuple[Any, ...]) -> tuple[Process, ...]:
    """The processes of all compute instances."""
    return tuple(
        process for h in handles for process in compute_processes(nvml.nvmlDeviceGetComputeRunningProcesses(h))
    )


def _energy(nvml: Any, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """The difference of a counter that counts mJ since the driver was loaded; a smaller value means a reset."""
    before, unit.energy = unit.energy, None
    unit.energy = after = nvml.nvmlDeviceGetTotalEnergyConsumption(unit.handle)
    return {} if before is None or after < before else {"energy_joules": (after - before) / 1e3}


def _nvlink(nvml: Any, unit: NvmlUnit, seconds: float) -> FieldValues:
    """Rates from the KiB counters over all links; none where a counter failed or went back."""
    before, unit.links = unit.links, None
    wanted = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    answers = nvml.nvmlDeviceGetFieldValues(unit.handle, [(field, _ALL_LINKS) for field in wanted])
    for answer in answers:
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    unit.links = [answer.value.ullVal for answer in answers]
    if before is None or not seconds:
        return {}
    counters = zip(NVLINK_SIGNALS, before, unit.links, strict=True)
    return {field: (new - old) * _KIB / seconds for field, old, new in counters if new >= old}


def _utilization(nvml: Any, unit: NvmlUnit, _seconds: float) -> FieldValues:
    """Mean of the driver's samples since the last read; NOT_FOUND means that there is no new one."""
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
