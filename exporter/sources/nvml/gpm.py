"""GPM, NVML's hardware counters of Hopper and later: means between two samples.

Owns the request and the samples' life. Refuses to keep an old figure: each request starts from a blank.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import addressof, memmove, sizeof, string_at
from math import isfinite, nan
from typing import Any

from exporter.core.model import MS
from exporter.sources.nvml.units import Fields, Unit

SHORTEST = 100 * MS
"""GPM's counters are refreshed every 100 ms: closer samples show nothing new (NVML doc, nvmlGpmMetricsGet)."""
_MIB = 1024.0 * 1024.0
COMPUTE = (
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
LINKS = (
    # MiB/s there, bytes/s here.
    ("pcie_tx_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),  # "traffic from this GPU"
    ("pcie_rx_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
    ("nvlink_tx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB),
    ("nvlink_rx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB),
)
"""What a board alone has."""


class Gpm:
    """One request, reused for every unit of a kind, started afresh from a blank each time."""

    def __init__(
        self, nvml: Any, metrics: tuple[tuple[str, str, float], ...], *, fault: Callable[[Unit, str, int], None]
    ) -> None:
        self._nvml, self._fault = nvml, fault
        self.fields = tuple(field for field, _, _ in metrics)
        self._request = request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        self._slots = []
        for place, (field, metric, scale) in enumerate(metrics):
            slot = request.metrics[place]
            slot.metricId, slot.nvmlReturn, slot.value = getattr(nvml, metric), nvml.NVML_ERROR_NO_DATA, nan
            self._slots.append((field, scale, slot))
        # The request declares room for hundreds of metrics: blank only what is used.
        used = type(request).metrics.offset + len(metrics) * sizeof(nvml.c_nvmlGpmMetric_t)
        self._blank = string_at(addressof(request), used)

    def __call__(self, unit: Unit, _seconds: float) -> Fields:
        """Take a sample and give the means since the one before; nothing where there is none to compare with."""
        while len(unit.samples) < 2:  # noqa: PLR2004  a pair
            unit.samples.append(self._nvml.nvmlGpmSampleAlloc())
        older, newer = unit.samples
        primed, unit.primed = unit.primed, False
        self._sample(unit, newer)
        unit.samples, unit.primed = [newer, older], True
        return dict(self._between(unit, older, newer)) if primed else {}

    def _sample(self, unit: Unit, sample: Any) -> None:
        if unit.board is None:
            self._nvml.nvmlGpmSampleGet(unit.handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(unit.board.handle, unit.gi, sample)

    def _between(self, unit: Unit, older: Any, newer: Any) -> Iterator[tuple[str, float]]:
        """Yield what each metric says; one that failed, or is no number, is left out, never 0."""
        memmove(addressof(self._request), self._blank, len(self._blank))
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        for field, scale, slot in self._slots:
            code, value = slot.nvmlReturn, slot.value
            if code:
                self._fault(unit, field, code)
            elif isfinite(value) and value >= 0.0:
                yield field, value * scale


def free(nvml: Any, unit: Unit) -> None:
    """Give a unit's samples back; never raises."""
    samples, unit.samples, unit.primed = unit.samples, [], False
    for sample in samples:
        with suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleFree(sample)
