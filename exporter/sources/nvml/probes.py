"""What NVML is asked about one board: the calls, what they give, and their units.

Owns the table of probes and the baselines that rates are taken from. Refuses to judge errors: NVMLError passes
through. Takes the binding as an argument: only `nvml` imports it.
"""

from collections.abc import Callable, Iterator, Mapping
from ctypes import addressof, memmove, sizeof, string_at
from functools import partial
from math import isfinite, nan
from typing import Any, NamedTuple

from exporter.core.model import MS, Device, Process

Fields = dict[str, Any]
"""Fields of `Reading`, by name; what is not in it was not seen."""

NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
MIG = "mig"
"""The probe that tells MIG mode, which no `Reading` carries."""
GPM_SHORTEST = 100 * MS
"""GPM's counters are refreshed every 100 ms: closer samples show nothing new (NVML doc, nvmlGpmMetricsGet)."""

_MIB, _KIB = 1024.0 * 1024.0, 1024.0
_GPM_METRICS = (
    # Reading's field, NVML's metric (nvmlGpmMetricId_t), scale: percent and MiB/s there, ratios and bytes/s here.
    ("gr_engine_active", "NVML_GPM_METRIC_GRAPHICS_UTIL", 0.01),
    ("sm_active", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("fp64_active", "NVML_GPM_METRIC_FP64_UTIL", 0.01),
    ("fp32_active", "NVML_GPM_METRIC_FP32_UTIL", 0.01),
    ("fp16_active", "NVML_GPM_METRIC_FP16_UTIL", 0.01),
    ("pcie_tx_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),  # "traffic from this GPU"
    ("pcie_rx_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
    ("nvlink_tx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB),
    ("nvlink_rx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB),
)
_ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field: the sum over links; without it NVML gives link 0 alone (nvml.h: "UINT_MAX")."""
_SAMPLE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t in the order of nvmlValueType_t."""


class Probe(NamedTuple):
    """One thing to ask: the fields it gives and the calls that give it, the newer first."""

    fields: tuple[str, ...]
    calls: "tuple[Callable[[Board, float], Fields], ...]"
    """Takes the board and the seconds since its last read; raises NVMLError."""


class Board:
    """One GPU as remembered between reads. `handle` is None while the driver does not give one."""

    def __init__(self, device: Device, asked: Mapping[str, Probe]) -> None:
        self.device = device
        self.probes = asked
        self.handle: Any = None
        self.samples: list[Any] = []
        """The pair of GPM samples, the older first; meaningful while `primed`."""
        self.forget()

    def forget(self) -> None:
        """Drop every baseline, and ask again for what was declined."""
        self.since: int | None = None
        self.calls = {name: list(probe.calls) for name, probe in self.probes.items()}
        self.primed = False
        self.energy: int | None = None
        self.links: list[int] | None = None
        self.stamp: int | None = None

    def gives(self) -> Iterator[str]:
        """Yield the fields of `Reading` that it has not declined and can have."""
        for name, probe in self.probes.items():
            if name != MIG and self.calls[name]:
                yield from (field for field in probe.fields if field not in self.device.lacks)


class Gpm:
    """GPM over pairs of samples: one request, reused for every board, started afresh from a blank each time."""

    def __init__(self, nvml: Any, fault: Callable[[Board, str, int], None]) -> None:
        self._nvml, self._fault = nvml, fault
        self._request = request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_GPM_METRICS)
        self._slots = []
        for place, (field, metric, scale) in enumerate(_GPM_METRICS):
            slot = request.metrics[place]
            slot.metricId, slot.nvmlReturn, slot.value = getattr(nvml, metric), nvml.NVML_ERROR_NO_DATA, nan
            self._slots.append((field, scale, slot))
        # The request declares room for hundreds of metrics: blank only what is used.
        used = type(request).metrics.offset + len(_GPM_METRICS) * sizeof(nvml.c_nvmlGpmMetric_t)
        self._blank = string_at(addressof(request), used)

    def __call__(self, board: Board, _seconds: float) -> Fields:
        """Take a sample and give the means since the one before; nothing where there is none to compare with."""
        while len(board.samples) < 2:  # noqa: PLR2004  a pair
            board.samples.append(self._nvml.nvmlGpmSampleAlloc())
        older, newer = board.samples
        primed, board.primed = board.primed, False
        self._nvml.nvmlGpmSampleGet(board.handle, newer)
        board.samples, board.primed = [newer, older], True
        return dict(self._between(board, older, newer)) if primed else {}

    def _between(self, board: Board, older: Any, newer: Any) -> Iterator[tuple[str, float]]:
        """Yield what each metric says; one that failed, or is no number, is left out, never 0."""
        memmove(addressof(self._request), self._blank, len(self._blank))
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        for field, scale, slot in self._slots:
            code, value = slot.nvmlReturn, slot.value
            if code:
                self._fault(board, field, code)
            elif isfinite(value) and value >= 0.0:
                yield field, value * scale


def probes(nvml: Any, gpm: Gpm | None) -> dict[str, Probe]:
    """Give what to ask a board, in order; `gpm` is None where the hardware has none."""
    rates = _one("gpu_utilization", lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100)
    if gpm is not None:
        measured = Probe(tuple(field for field, _, _ in _GPM_METRICS), (gpm,))
        return {"gpm": measured, **_gauges(nvml), "utilization": rates}
    mean = Probe(rates.fields, (partial(_utilization, nvml), *rates.calls))
    return {**_gauges(nvml), "utilization": mean, "nvlink": Probe(NVLINK, (partial(_nvlink, nvml),))}


def _gauges(nvml: Any) -> dict[str, Probe]:
    """What every board is asked. Units as NVML gives them (mW, mJ, MHz, percent) end here."""
    return {
        MIG: _one(MIG, lambda h: nvml.nvmlDeviceGetMigMode(h)[0] == nvml.NVML_DEVICE_MIG_ENABLE),
        "power": _one("power_watts", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3),
        "limit": _one("enforced_power_limit_watts", lambda h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3),
        "energy": Probe(("energy_joules",), (partial(_energy, nvml),)),
        "temperature": _one(
            "temperature_celsius", lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))
        ),
        "sm_clock": _one("sm_clock_hz", lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6),
        "memory": Probe(
            ("memory_used_bytes", "memory_total_bytes"),
            # The second version keeps what the driver reserves apart; the first calls it used.
            (
                lambda b, _: _memory(nvml.nvmlDeviceGetMemoryInfo(b.handle, version=nvml.nvmlMemory_v2)),
                lambda b, _: _memory(nvml.nvmlDeviceGetMemoryInfo(b.handle)),
            ),
        ),
        "clock_event_reasons": _one(
            "clock_event_reasons",
            nvml.nvmlDeviceGetCurrentClocksEventReasons,
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,  # the same, as drivers before 535 call it
        ),
        "processes": _one(
            "processes",
            lambda h: _processes(nvml.nvmlDeviceGetComputeRunningProcesses(h)),
            lambda h: _processes(nvml.nvmlDeviceGetComputeRunningProcesses_v2(h)),  # drivers before 510
        ),
    }


def _one(field: str, *calls: Callable[[Any], Any]) -> Probe:
    def asking(call: Callable[[Any], Any]) -> Callable[[Board, float], Fields]:
        return lambda board, _: {field: call(board.handle)}

    return Probe((field,), tuple(asking(call) for call in calls))


def _memory(memory: Any) -> Fields:
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def _processes(listed: list[Any]) -> tuple[Process, ...]:
    """Give the processes with a compute context; the binding makes None of NVML_VALUE_NOT_AVAILABLE."""
    return tuple(Process(pid=each.pid, memory_bytes=each.usedGpuMemory) for each in listed)


def _energy(nvml: Any, board: Board, _seconds: float) -> Fields:
    """Difference of a counter since the driver was loaded (mJ); a smaller one was reset."""
    before, board.energy = board.energy, None
    board.energy = after = nvml.nvmlDeviceGetTotalEnergyConsumption(board.handle)
    return {} if before is None or after < before else {"energy_joules": (after - before) / 1e3}


def _nvlink(nvml: Any, board: Board, seconds: float) -> Fields:
    """Rates from the KiB counters over all links; no figure where a counter failed or went back."""
    before, board.links = board.links, None
    wanted = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    answers = nvml.nvmlDeviceGetFieldValues(board.handle, [(field, _ALL_LINKS) for field in wanted])
    for answer in answers:
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    board.links = [answer.value.ullVal for answer in answers]
    if before is None or not seconds:
        return {}
    counters = zip(NVLINK, before, board.links, strict=True)
    return {field: (new - old) * _KIB / seconds for field, old, new in counters if new >= old}


def _utilization(nvml: Any, board: Board, _seconds: float) -> Fields:
    """Mean of the driver's samples since the last read; NOT_FOUND says that there is no new one."""
    before, board.stamp = board.stamp, None
    try:
        kind, samples = nvml.nvmlDeviceGetSamples(board.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, before or 0)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_NOT_FOUND:
            raise
        board.stamp = before
        return {"gpu_utilization": nvml.nvmlDeviceGetUtilizationRates(board.handle).gpu / 100}
    board.stamp = max((sample.timeStamp for sample in samples), default=before)
    values = [getattr(sample.sampleValue, _SAMPLE_TYPES[kind]) for sample in samples]
    return {} if before is None or not values else {"gpu_utilization": sum(values) / len(values) / 100}
