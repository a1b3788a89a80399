"""What NVML is asked about a board, what is left of one, and a GPU instance: the calls, and their units.

Owns the tables of probes. Refuses to judge errors: NVMLError passes through.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from exporter.core.model import Process
from exporter.sources.nvml.gpm import Gpm
from exporter.sources.nvml.sharing import Samples, Taken, samples_of, with_use
from exporter.sources.nvml.units import MIG, NVLINK, Call, Fields, Probe, Unit

Probes = dict[str, Probe]

NOTHING_RUNS: Fields = {
    "gr_engine_active": 0.0,
    "sm_active": 0.0,
    "tensor_active": 0.0,
    "dram_active": 0.0,
    "processes": (),
}
"""Of what no instance has: it cannot be used, so that nothing runs on it is known without asking."""
_KIB = 1024.0
_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field: the sum over links; without it NVML gives link 0 alone (nvml.h: "UINT_MAX")."""
_SAMPLE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t in the order of nvmlValueType_t."""


def board(nvml: Any, gpm: Gpm | None) -> Probes:
    """Give what to ask a board, in order; `gpm` is None where the hardware has none."""
    rates = _one("gpu_utilization", lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100)
    # The second call is for drivers before 510.
    running = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses_v2)
    asked = {
        **rest(nvml),
        "memory": _memory_probe(nvml),
        "processes": Probe(("processes",), tuple(_listing(call) for call in running)),
        "sm_active of processes": Probe((), tuple(partial(_shared, nvml, call) for call in samples_of(nvml))),
    }
    if gpm is not None:
        return {"gpm": Probe(gpm.fields, (gpm,)), **asked, "utilization": rates}
    mean = Probe(rates.fields, (partial(_utilization, nvml), *rates.calls))
    return {**asked, "utilization": mean, "nvlink": Probe(NVLINK, (partial(_nvlink, nvml),))}


def rest(nvml: Any) -> Probes:
    """Give what to ask a board in any mode, so what is left of one in MIG mode."""
    return {
        MIG: _one(MIG, lambda h: nvml.nvmlDeviceGetMigMode(h)[0] == nvml.NVML_DEVICE_MIG_ENABLE),
        "power": _one("power_watts", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3),
        "limit": _one("enforced_power_limit_watts", lambda h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
        "energy": Probe(("energy_joules",), (partial(_energy, nvml),)),
        "temperature": _one(
            "temperature_celsius", lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))
        ),
        "sm_clock": _one("sm_clock_hz", lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6),
        "clock_event_reasons": _one(
            "clock_event_reasons",
            nvml.nvmlDeviceGetCurrentClocksEventReasons,
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,  # the same, as drivers before 535 call it
        ),
    }


def instance(nvml: Any, gpm: Gpm | None) -> Probes:
    """Give what to ask a GPU instance; without GPM, NVML has no figure of what it does."""
    listing = Probe(("processes",), (lambda unit, _: {"processes": _of_all(nvml, unit.handles)},))
    asked = {"memory": _memory_probe(nvml), "processes": listing}
    return asked if gpm is None else {"gpm": Probe(gpm.fields, (gpm,)), **asked}


def value_of(answer: Any) -> Any:
    """Give the member of an nvmlFieldValue_t that its type names; the others are undefined (nvml.h)."""
    return getattr(answer.value, _SAMPLE_TYPES[answer.valueType])


def _one(field: str, *calls: Callable[[Any], Any]) -> Probe:
    def asking(call: Callable[[Any], Any]) -> Callable[[Unit, float], Fields]:
        return lambda unit, _: {field: call(unit.handle)}

    return Probe((field,), tuple(asking(call) for call in calls))


def _memory_probe(nvml: Any) -> Probe:
    return Probe(
        ("memory_used_bytes", "memory_total_bytes"),
        # The second version keeps what the driver reserves apart; the first calls it used.
        (
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle, version=nvml.nvmlMemory_v2)),
            lambda unit, _: _memory(nvml.nvmlDeviceGetMemoryInfo(unit.handle)),
        ),
    )


def _memory(memory: Any) -> Fields:
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def _processes(listed: list[Any]) -> tuple[Process, ...]:
    """Give the processes with a compute context; the binding makes None of NVML_VALUE_NOT_AVAILABLE."""
    return tuple(Process(pid=each.pid, memory_bytes=each.usedGpuMemory) for each in listed)


def _listing(call: Callable[[Any], list[Any]]) -> Call:
    def listing(unit: Unit, _seconds: float) -> Fields:
        unit.listed = ()  # a call that fails must leave no list behind
        unit.listed = _processes(call(unit.handle))
        return {"processes": unit.listed}

    return listing


def _shared(nvml: Any, samples: Samples, unit: Unit, _seconds: float) -> Fields:
    """Give the processes just listed again, with what each of several used."""
    if len(unit.listed) < 2:  # noqa: PLR2004  with one there is nothing to share
        unit.taken = Taken()
        return {}
    return {"processes": with_use(nvml, samples, handle=unit.handle, taken=unit.taken, listed=unit.listed)}


def _of_all(nvml: Any, handles: tuple[Any, ...]) -> tuple[Process, ...]:
    """Give the processes of every compute instance."""
    return tuple(each for h in handles for each in _processes(nvml.nvmlDeviceGetComputeRunningProcesses(h)))


def _energy(nvml: Any, unit: Unit, _seconds: float) -> Fields:
    """Difference of a counter since the driver was loaded (mJ); a smaller one was reset."""
    before, unit.energy = unit.energy, None
    unit.energy = after = nvml.nvmlDeviceGetTotalEnergyConsumption(unit.handle)
    return {} if before is None or after < before else {"energy_joules": (after - before) / 1e3}


def _nvlink(nvml: Any, unit: Unit, seconds: float) -> Fields:
    """Rates from the KiB counters over all links; no figure where a counter failed or went back."""
    before, unit.links = unit.links, None
    wanted = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    answers = nvml.nvmlDeviceGetFieldValues(unit.handle, [(field, _ALL_LINKS) for field in wanted])
    for answer in answers:
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    unit.links = [answer.value.ullVal for answer in answers]
    if before is None or not seconds:
        return {}
    counters = zip(NVLINK, before, unit.links, strict=True)
    return {field: (new - old) * _KIB / seconds for field, old, new in counters if new >= old}


def _utilization(nvml: Any, unit: Unit, _seconds: float) -> Fields:
    """Mean of the driver's samples since the last read; NOT_FOUND says that there is no new one."""
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
