"""Reads NVML's GPU performance monitoring (GPM, Hopper and later): means between two samples, and cumulative counters.

Newer drivers also have counters since reboot, whose differences lose nothing between two samples. Which of them a
driver has is not documented (names and numbers: nvml.h of NVIDIA/go-nvml, gen/nvml/nvml.h), so each is requested on its
own, and trusted by its own return code and by its agreement with the mean that it replaces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import addressof, memmove, sizeof, string_at
from functools import cache
from math import isfinite, nan
from typing import Any
from weakref import WeakKeyDictionary

from exporter.core.model import MS
from exporter.sources.cycles import Agreement, CycleCounters
from exporter.sources.nvml.calls import FieldValues, NvmlUnit

GPM_INTERVAL = 100 * MS
"""GPM's counters are updated every 100 ms, so samples must not be closer (NVML doc, nvmlGpmMetricsGet)."""
_MIB = 1024.0 * 1024.0
GPM_COMPUTE = (
    # Field of Reading, NVML's metric (nvmlGpmMetricId_t), scale from percent to ratio.
    ("gr_engine_active", "NVML_GPM_METRIC_GRAPHICS_UTIL", 0.01),
    ("sm_active", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("fp64_active", "NVML_GPM_METRIC_FP64_UTIL", 0.01),
    ("fp32_active", "NVML_GPM_METRIC_FP32_UTIL", 0.01),
    ("fp16_active", "NVML_GPM_METRIC_FP16_UTIL", 0.01),
    ("int_active", "NVML_GPM_METRIC_INTEGER_UTIL", 0.01),
)
"""Metrics of boards and GPU instances; those of an instance are relative to the instance."""
GPM_LINKS = (
    # Scale from MiB/s to bytes/s.
    ("pcie_tx_bytes_per_second", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),  # "traffic from this GPU"
    ("pcie_rx_bytes_per_second", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
    ("nvlink_tx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB),
    ("nvlink_rx_bytes_per_second", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB),
)
"""Metrics of boards only."""
C2C_RATES = (
    ("c2c_tx_bytes_per_second", "NVML_GPM_METRIC_C2C_TOTAL_TX_PER_SEC"),
    ("c2c_rx_bytes_per_second", "NVML_GPM_METRIC_C2C_TOTAL_RX_PER_SEC"),
)
"""Rates of boards with a chip-to-chip link, MiB/s; older drivers do not know them."""
_ELAPSED = "elapsed"
CYCLE_TOTALS = (
    # Cycles since reboot, and the field whose mean is their share of the elapsed cycles.
    (_ELAPSED, "NVML_GPM_METRIC_SM_CYCLES_ELAPSED"),
    ("sm_active", "NVML_GPM_METRIC_SM_CYCLES_ACTIVE"),
    ("tensor_active", "NVML_GPM_METRIC_MMA_CYCLES_ACTIVE"),
    ("int_active", "NVML_GPM_METRIC_INTEGER_CYCLES_ACTIVE"),
    ("fp64_active", "NVML_GPM_METRIC_FP64_CYCLES_ACTIVE"),
    ("fp32_active", "NVML_GPM_METRIC_FP32_CYCLES_ACTIVE"),
    ("fp16_active", "NVML_GPM_METRIC_FP16_CYCLES_ACTIVE"),
)
_MOST_LINKS = 36
LINK_TOTALS = (
    # Bytes since reboot; NVLink's are the sum over all links that have a counter.
    ("pcie_tx_bytes_per_second", ("NVML_GPM_METRIC_PCIE_TX",)),
    ("pcie_rx_bytes_per_second", ("NVML_GPM_METRIC_PCIE_RX",)),
    ("nvlink_tx_bytes_per_second", tuple(f"NVML_GPM_METRIC_NVLINK_L{n}_TX" for n in range(_MOST_LINKS))),
    ("nvlink_rx_bytes_per_second", tuple(f"NVML_GPM_METRIC_NVLINK_L{n}_RX" for n in range(_MOST_LINKS))),
)
_QUIET_BYTES_PER_SECOND = 1e6
"""E: difference of two byte rates that says nothing: an idle link still carries heartbeats."""
_LINK_SHARE = 0.1
"""E: two measurements of a link's bytes agree within a tenth; another unit would differ by more than 4 %, mostly by
orders of magnitude."""


class GpmRequest:
    """One request for some metrics, with a structure that is reused."""

    def __init__(self, nvml: Any, ids: Sequence[int]) -> None:
        self._nvml, self._request = nvml, nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(ids)
        self._slots = [self._request.metrics[index] for index in range(len(ids))]
        for slot, metric_id in zip(self._slots, ids, strict=True):
            slot.metricId, slot.nvmlReturn, slot.value = metric_id, nvml.NVML_ERROR_NO_DATA, nan
        # The request structure has room for hundreds of metrics: reset only the used part.
        used = type(self._request).metrics.offset + len(ids) * sizeof(nvml.c_nvmlGpmMetric_t)
        self._blank = string_at(addressof(self._request), used)

    def __call__(self, older: Any, newer: Any) -> list[tuple[int, float]]:
        """Return each metric's own return code and value, in the order of the ids. Raises NVMLError."""
        memmove(addressof(self._request), self._blank, len(self._blank))
        self._request.sample1, self._request.sample2 = older, newer
        self._nvml.nvmlGpmMetricsGet(self._request)
        return [(slot.nvmlReturn, slot.value) for slot in self._slots]


class UnitTotals:
    """The metrics beyond the basic ones that a board or instance has, and the last values of its counters."""

    def __init__(self, supported: Mapping[str, tuple[int, ...]]) -> None:
        """`supported`: ids of the metrics by name."""
        self.supported = supported
        self._before: dict[str, float] = {}
        pairs = {_cycles(field): field for field, _ in CYCLE_TOTALS if field != _ELAPSED}
        self._cycles = CycleCounters(_cycles(_ELAPSED), pairs)
        self._links = {
            _bytes(field): (field, Agreement(deviation=_QUIET_BYTES_PER_SECOND, share=_LINK_SHARE))
            for field, _ in LINK_TOTALS
        }

    def correct(self, values: FieldValues, totals: dict[str, float], seconds: float) -> None:
        """Replace means in `values` by exact ones, where the counters since reboot are trusted."""
        merged = {**values, **totals}
        self._cycles.correct(merged)
        values.update((field, merged[field]) for field in values)
        before, self._before = self._before, totals
        for total, (field, agreement) in self._links.items():
            if total in totals and total in before and field in values and seconds:
                exact = (totals[total] - before[total]) / seconds
                if exact >= 0.0 and agreement.add(exact, values[field]):
                    values[field] = exact


def _cycles(field: str) -> str:
    return f"cycles of {field}"


def _bytes(field: str) -> str:
    return f"bytes of {field}"


LinkTotals = tuple[tuple[str, tuple[str, ...]], ...]


class GpmReader:
    """Reads a set of GPM metrics; `links` are the byte counters of boards, which instances do not have."""

    def __init__(
        self,
        nvml: Any,
        metrics: tuple[tuple[str, str, float], ...],
        *,
        fault: Callable[[NvmlUnit, str, int], None],
        links: LinkTotals = (),
    ) -> None:
        self._nvml, self._fault = nvml, fault
        rates = C2C_RATES if links else ()
        self.fields = (*(field for field, _, _ in metrics), *(field for field, _ in rates))
        self._metrics = [(field, scale) for field, _, scale in metrics]
        self._basic = GpmRequest(nvml, [getattr(nvml, metric) for _, metric, _ in metrics])
        self._rates = frozenset(field for field, _ in rates)
        self._optional: dict[str, tuple[str, ...]] = {
            **{field: (metric,) for field, metric in rates},
            **{_cycles(field): (metric,) for field, metric in CYCLE_TOTALS},
            **{_bytes(field): metrics for field, metrics in links},
        }
        self._request = cache(lambda ids: GpmRequest(nvml, ids))
        self._totals: WeakKeyDictionary[NvmlUnit, UnitTotals] = WeakKeyDictionary()

    def __call__(self, unit: NvmlUnit, seconds: float) -> FieldValues:
        """Take a sample and return the means since the previous one; empty if there is none."""
        while len(unit.samples) < 2:  # noqa: PLR2004  a pair
            unit.samples.append(self._nvml.nvmlGpmSampleAlloc())
        older, newer = unit.samples
        primed, unit.primed = unit.primed, False
        self._sample(unit, newer)
        unit.samples, unit.primed = [newer, older], True
        if not primed:
            self._totals.pop(unit, None)
            return {}
        values = dict(self._between(unit, older, newer))
        self._add_optional(unit, older, newer, values, seconds)
        return values

    def _sample(self, unit: NvmlUnit, sample: Any) -> None:
        if unit.board is None:
            self._nvml.nvmlGpmSampleGet(unit.handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(unit.board.handle, unit.instance_id, sample)

    def _between(self, unit: NvmlUnit, older: Any, newer: Any) -> Iterator[tuple[str, float]]:
        """Yield the value of each basic metric, except those that failed or are not finite."""
        for (field, scale), (code, value) in zip(self._metrics, self._basic(older, newer), strict=True):
            if code:
                self._fault(unit, field, code)
            elif isfinite(value) and value >= 0.0:
                yield field, value * scale

    def _add_optional(self, unit: NvmlUnit, older: Any, newer: Any, values: FieldValues, seconds: float) -> None:
        """Add the rates that only some boards have, and apply the counters since reboot."""
        if unit not in self._totals:
            self._totals[unit] = UnitTotals(dict(self._supported(older, newer)))
        known = self._totals[unit]
        found = self._read_supported(known.supported, older, newer)
        known.correct(values, {name: value for name, value in found.items() if name not in self._rates}, seconds)
        values.update((name, found[name] * _MIB) for name in self._rates & found.keys())

    def _supported(self, older: Any, newer: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Request each optional metric on its own, because one that a driver does not know may fail all others."""
        for name, metrics in self._optional.items():
            numbers = (getattr(self._nvml, metric, None) for metric in metrics)
            ids = tuple(number for number in numbers if number is not None and self._works(number, older, newer))
            if ids:
                yield name, ids

    def _works(self, metric_id: int, older: Any, newer: Any) -> bool:
        with suppress(self._nvml.NVMLError):
            ((code, value),) = GpmRequest(self._nvml, (metric_id,))(older, newer)
            return not code and isfinite(value)
        return False

    def _read_supported(self, supported: Mapping[str, tuple[int, ...]], older: Any, newer: Any) -> dict[str, float]:
        """Return the optional metrics by name, each the sum of its ids; one of which an id failed is missing."""
        ids = tuple(metric_id for each in supported.values() for metric_id in each)
        if not ids:
            return {}
        try:
            results = dict(zip(ids, self._request(ids)(older, newer), strict=True))
        except self._nvml.NVMLError:
            return {}
        whole = {name: [results[metric_id] for metric_id in each] for name, each in supported.items()}
        return {
            name: sum(value for _, value in each)
            for name, each in whole.items()
            if all(not code and isfinite(value) and value >= 0.0 for code, value in each)
        }


def free_samples(nvml: Any, unit: NvmlUnit) -> None:
    """Free a unit's samples; never raises."""
    samples, unit.samples, unit.primed = unit.samples, [], False
    for sample in samples:
        with suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleFree(sample)
