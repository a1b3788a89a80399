"""The page of a dcgm-exporter: getting it, and what each generation of names on it means.

Owns names, units and blanks, and the merging of lines into one set of figures a GPU. Refuses time: it knows one page.
"""

from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Protocol

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.core.model import Fault, Reading
from exporter.sources import SourceError

LIMIT_BYTES = 8 << 20
"""Far above any real page: 8 GPUs, 60 fields and 10 pods each make about 2 MB."""

_MIB = float(1 << 20)
_FIELDS = (
    # Figure, factor to base units, and its names: DCGM 2 to 4.6, DCGM 4.7's renames, then dcgm-exporter 1.x.
    # Several rows for a figure: the first one found wins. Source: dcgm_fields.h, DCGM 1.7 to 4.7, and the
    # exporter's etc/*.csv. GPU_UTIL_RATIO is a ratio (field 1613), the older name percent (field 203).
    ("gr_engine_active", 1.0, "PROF_GR_ENGINE_ACTIVE PROF_GR_ENGINE_UTIL_RATIO", "fi_prof_gr_engine_active"),
    ("sm_active", 1.0, "PROF_SM_ACTIVE PROF_SM_UTIL_RATIO", "fi_prof_sm_active"),
    ("sm_occupancy", 1.0, "PROF_SM_OCCUPANCY PROF_SM_OCCUPANCY_RATIO", "fi_prof_sm_occupancy"),
    ("tensor_active", 1.0, "PROF_PIPE_TENSOR_ACTIVE PROF_TENSOR_UTIL_RATIO", "fi_prof_pipe_tensor_active"),
    ("hmma", 1.0, "PROF_PIPE_TENSOR_HMMA_ACTIVE PROF_HMMA_UTIL_RATIO", ""),
    ("imma", 1.0, "PROF_PIPE_TENSOR_IMMA_ACTIVE PROF_IMMA_UTIL_RATIO", ""),
    ("dfma", 1.0, "PROF_PIPE_TENSOR_DFMA_ACTIVE PROF_DFMA_UTIL_RATIO", ""),
    ("dram_active", 1.0, "PROF_DRAM_ACTIVE PROF_DRAM_UTIL_RATIO", "fi_prof_dram_active"),
    ("fp64_active", 1.0, "PROF_PIPE_FP64_ACTIVE PROF_FP64_UTIL_RATIO", "fi_prof_pipe_fp64_active"),
    ("fp32_active", 1.0, "PROF_PIPE_FP32_ACTIVE PROF_FP32_UTIL_RATIO", "fi_prof_pipe_fp32_active"),
    ("fp16_active", 1.0, "PROF_PIPE_FP16_ACTIVE PROF_FP16_UTIL_RATIO", "fi_prof_pipe_fp16_active"),
    # Rates in bytes per second whatever TYPE says: older collector files declare them counters.
    ("pcie_tx_bytes_per_second", 1.0, "PROF_PCIE_TX_BYTES", "fi_prof_pcie_tx_bytes"),
    ("pcie_rx_bytes_per_second", 1.0, "PROF_PCIE_RX_BYTES", "fi_prof_pcie_rx_bytes"),
    ("nvlink_tx_bytes_per_second", 1.0, "PROF_NVLINK_TX_BYTES", "fi_prof_nvlink_tx_bytes"),
    ("nvlink_rx_bytes_per_second", 1.0, "PROF_NVLINK_RX_BYTES", "fi_prof_nvlink_rx_bytes"),
    ("gpu_utilization", 0.01, "DEV_GPU_UTIL", "gpu_utilization"),
    ("gpu_utilization", 1.0, "DEV_GPU_UTIL_RATIO", ""),
    ("power_watts", 1.0, "DEV_POWER_USAGE DEV_BOARD_POWER_WATTS", "power_usage"),
    ("power_watts", 1.0, "DEV_POWER_USAGE_INSTANT DEV_BOARD_POWER_RAW_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_ENFORCED_POWER_LIMIT DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_POWER_MGMT_LIMIT DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS", ""),
    ("energy", 1e-3, "DEV_TOTAL_ENERGY_CONSUMPTION", "total_energy_consumption"),
    ("energy", 1.0, "DEV_GPU_ENERGY_JOULES_TOTAL", ""),
    ("temperature_celsius", 1.0, "DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS", "gpu_temp"),
    ("sm_clock_hz", 1e6, "DEV_SM_CLOCK", "sm_clock"),
    ("sm_clock_hz", 1.0, "DEV_SM_CLOCK_HERTZ", ""),
    ("memory_used_bytes", 1.0, "DEV_FB_USED_BYTES", ""),
    ("memory_used_bytes", _MIB, "DEV_FB_USED", "fb_used"),
    ("memory_total_bytes", 1.0, "DEV_FB_CAPACITY_BYTES", ""),
    ("memory_total_bytes", _MIB, "DEV_FB_TOTAL", "fb_total"),
    ("free", 1.0, "DEV_FB_FREE_BYTES", ""),
    ("free", _MIB, "DEV_FB_FREE", "fb_free"),
    ("reserved", 1.0, "DEV_FB_RESERVED_BYTES", ""),
    ("reserved", _MIB, "DEV_FB_RESERVED", "fb_reserved"),
    ("clock_event_reasons", 1.0, "DEV_CLOCKS_EVENT_REASONS DEV_CLOCK_THROTTLE_REASONS", ""),
)
_SERIES = {
    name: (figure, factor, row)
    for row, (figure, factor, names, old) in enumerate(_FIELDS)
    for name in [*(f"DCGM_FI_{n}" for n in names.split()), *(f"dcgm_{n}" for n in old.split())]
}
_BLANK_TEXTS = ("[N/A]", "N/A", "<<<NULL>>>", "ERROR - FAILED TO CONVERT TO STRING", "SKIPPING DCGM VALUE")
_FP64_BLANK = 2.0**47
_INT32_BLANK, _INT32_MAX = 0x7FFFFFF0, 0x7FFFFFFF


class Fetch(Protocol):
    """Gives the page's bytes, or raises SourceError."""

    def __call__(self) -> bytes:
        """Get the page as it is now."""
        ...

    def close(self) -> None:
        """Give back what it holds. Never raises."""
        ...


class HttpPage:
    """One URL, got again and again over one kept connection; bounded in time and size."""

    def __init__(self, url: str, *, timeout_seconds: float, limit_bytes: int = LIMIT_BYTES) -> None:
        self._url, self._timeout, self._limit = url, timeout_seconds, limit_bytes
        # No proxy from the environment: the exporter is on this node, a proxy would answer for another.
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=False)

    def __call__(self) -> bytes:
        """Raise SourceError for anything but a whole page with status 200."""
        try:
            with self._client.stream("GET", self._url) as response:
                return self._body(response)
        except httpx.TimeoutException as error:
            raise self._late() from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(
                f"{self._url} could not be read ({error or type(error).__name__}): is dcgm-exporter running"
                " on this node and is this its address? Try `curl` on it, or set dcgm_exporter.url"
            ) from error

    def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise SourceError(
                f"{self._url} answered HTTP {response.status_code}, not 200: read the exporter's log, and"
                " check that dcgm_exporter.url is its metrics page (it ends in /metrics)"
            )
        body, deadline = bytearray(), monotonic() + self._timeout
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > self._limit:
                raise SourceError(
                    f"{self._url} is longer than {self._limit} bytes, no dcgm-exporter page is: set"
                    " dcgm_exporter.url to this node's own exporter, not to a federating Prometheus"
                )
            # httpx times each wait, not the whole: a page that drips would hold the reading thread for ever.
            if monotonic() > deadline:
                raise self._late()
        return bytes(body)

    def _late(self) -> SourceError:
        return SourceError(
            f"{self._url} gave no whole page within {self._timeout:g} s: the exporter hangs or the node is"
            " overloaded; restart dcgm-exporter, or raise dcgm_exporter.timeout_seconds"
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class GpuLines(Struct):
    """One GPU's lines on one page."""

    index: str
    model: str
    figures: dict[str, float] = {}
    rows: dict[str, int] = {}
    """The row of _FIELDS each figure came from: a lower one is preferred."""
    lines: set[tuple[str, str]] = set()
    """All its values, mapped or not: when none of them changes, nothing was collected."""
    conflicts: set[str] = set()
    mig: bool = False

    def take(self, name: str, value: float) -> None:
        """Add one line, unless it is a blank."""
        self.lines.add((name, repr(value)))
        figure, factor, row = _SERIES.get(name, ("", 0.0, 0))
        if not figure or not _seen(value):
            return
        known = self.rows.get(figure)
        if known is None or row < known:
            self.figures[figure], self.rows[figure] = value * factor, row
        elif row == known and value * factor != self.figures[figure]:
            # Time-slicing repeats a GPU's line for each pod: one measurement, never to be summed.
            self.conflicts.add(name)


def parsed(line: str) -> list[Sample]:
    """Give the sample of one line, none for a comment. Raises whatever the library's parser raises.

    Line by line, so that a broken one costs only itself.
    """
    line = line.strip()
    if line.startswith("#"):
        return []
    blank = next((text for text in _BLANK_TEXTS if line.endswith(text)), None)
    if blank:
        line = line.removesuffix(blank) + "NaN"
    return [sample for family in text_string_to_metric_families(line) for sample in family.samples]


def by_gpu(samples: Iterable[Sample]) -> dict[str, GpuLines]:
    """Merge lines into figures by UUID; a MIG instance's lines only mark its parent."""
    gpus: dict[str, GpuLines] = {}
    for sample in samples:
        labels, uuid = sample.labels, label(sample, "UUID")
        gpu = gpus.setdefault(uuid, GpuLines(labels.get("gpu", ""), labels.get("modelName", "")))
        if labels.get("GPU_I_ID") or labels.get("GPU_I_PROFILE"):
            gpu.mig = True
        else:
            gpu.take(sample.name, sample.value)
    return gpus


def figures_of(gpu: GpuLines) -> dict[str, float | int]:
    """Fields of `Reading`, energy apart.

    Without the field for any tensor pipe its parts are added, if the two that every board has are there: half
    of them would make an INT8 server look idle. The whole memory is used + free + reserved (fields 250-253).
    """
    parts = gpu.figures
    figures: dict[str, float | int] = {k: v for k, v in parts.items() if k in Reading.__struct_fields__}
    if "tensor_active" not in parts and {"hmma", "imma"} <= parts.keys():
        figures["tensor_active"] = parts["hmma"] + parts["imma"] + parts.get("dfma", 0.0)
    if "memory_total_bytes" not in parts and {"memory_used_bytes", "free"} <= parts.keys():
        whole = parts["memory_used_bytes"] + parts["free"] + parts.get("reserved", 0.0)
        figures["memory_total_bytes"] = whole
    if "clock_event_reasons" in parts:
        figures["clock_event_reasons"] = int(parts["clock_event_reasons"])
    return figures


def doubts(uuid: str, gpu: GpuLines) -> Iterator[Fault]:
    """What on the page cannot be read, or contradicts itself."""
    if gpu.mig:
        yield Fault("mig_not_read", f"GPU {gpu.index} is in MIG mode: its instances are not read yet", uuid)
    if gpu.conflicts:
        names = ", ".join(sorted(gpu.conflicts))
        yield Fault("conflicting_series", f"GPU {gpu.index}: lines of {names} differ; first one used", uuid)


def _seen(value: float) -> bool:
    """Tell a measurement from NaN and DCGM's blanks: 2^47 and up, 0x7ffffff0 to 0x7fffffff (dcgm_structs.h)."""
    return 0.0 <= value < _FP64_BLANK and not _INT32_BLANK <= value <= _INT32_MAX


def label(sample: Sample, name: str) -> str:
    """Give a label that other releases and old-namespace mode write in lower case."""
    return sample.labels.get(name) or sample.labels.get(name.lower()) or ""
