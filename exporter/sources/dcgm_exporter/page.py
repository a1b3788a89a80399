"""Parses one page of a dcgm-exporter into figures for each GPU and MIG instance.

It owns the names that releases give each field, their units and blanks, and the weights of MIG instances. It
refuses pages of other nodes and layouts that do not add up. It knows a single page, not time.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct, structs
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.core.model import PPM, Device, Fault, Reading, Spec
from exporter.sources.base import (
    FP64_BLANK,
    INT32_BLANK,
    INT32_LAST_BLANK,
    NO_ACTIVITY,
    SourceError,
    instance_device,
    mig_weights,
)
from exporter.specs import mig_instance_spec

_MIB = float(1 << 20)

# Figure, factor to base units, and its names: DCGM 2 to 4.6, DCGM 4.7's renames, then dcgm-exporter 1.x.
# Several rows for a figure: the first one found wins. Source: dcgm_fields.h, DCGM 1.7 to 4.7, and the
# exporter's etc/*.csv. GPU_UTIL_RATIO is a ratio (field 1613), the older name percent (field 203).
_INSTANCE = (
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
    ("memory_used_bytes", 1.0, "DEV_FB_USED_BYTES", ""),
    ("memory_used_bytes", _MIB, "DEV_FB_USED", "fb_used"),
    ("memory_total_bytes", 1.0, "DEV_FB_CAPACITY_BYTES", ""),
    ("memory_total_bytes", _MIB, "DEV_FB_TOTAL", "fb_total"),
    ("free", 1.0, "DEV_FB_FREE_BYTES", ""),
    ("free", _MIB, "DEV_FB_FREE", "fb_free"),
    ("reserved", 1.0, "DEV_FB_RESERVED_BYTES", ""),
    ("reserved", _MIB, "DEV_FB_RESERVED", "fb_reserved"),
)
_BOARD = (
    ("power_watts", 1.0, "DEV_POWER_USAGE DEV_BOARD_POWER_WATTS", "power_usage"),
    ("power_watts", 1.0, "DEV_POWER_USAGE_INSTANT DEV_BOARD_POWER_RAW_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_ENFORCED_POWER_LIMIT DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", ""),
    ("enforced_power_limit_watts", 1.0, "DEV_POWER_MGMT_LIMIT DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS", ""),
    ("energy", 1e-3, "DEV_TOTAL_ENERGY_CONSUMPTION", "total_energy_consumption"),
    ("energy", 1.0, "DEV_GPU_ENERGY_JOULES_TOTAL", ""),
    ("temperature_celsius", 1.0, "DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS", "gpu_temp"),
    ("sm_clock_hz", 1e6, "DEV_SM_CLOCK", "sm_clock"),
    ("sm_clock_hz", 1.0, "DEV_SM_CLOCK_HERTZ", ""),
    ("clock_event_reasons", 1.0, "DEV_CLOCKS_EVENT_REASONS DEV_CLOCK_THROTTLE_REASONS", ""),
    ("mig_slices", 1.0, "DEV_MIG_MAX_SLICES", ""),
    # Volatile ECC errors are those since the driver was loaded.
    ("ecc_corrected", 1.0, "DEV_ECC_SBE_VOL_TOTAL", "ecc_sbe_volatile_total"),
    ("ecc_uncorrected", 1.0, "DEV_ECC_DBE_VOL_TOTAL", "ecc_dbe_volatile_total"),
    ("row_remap_pending", 1.0, "DEV_ROW_REMAP_PENDING", ""),
    ("row_remap_failed", 1.0, "DEV_ROW_REMAP_FAILURE DEV_ROW_REMAP_FAILED", ""),
    ("recovery_action", 1.0, "DEV_GET_GPU_RECOVERY_ACTION DEV_GPU_RECOVERY_ACTION", ""),
    ("memory_temperature_celsius", 1.0, "DEV_MEMORY_TEMP DEV_MEMORY_TEMP_CELSIUS", "memory_temp"),
    ("temperature_margin_celsius", 1.0, "DEV_GPU_TEMP_LIMIT DEV_GPU_TEMP_TLIMIT DEV_GPU_TEMP_MARGIN_CELSIUS", ""),
    ("slowdown_celsius", 1.0, "DEV_SLOWDOWN_TEMP DEV_GPU_TEMP_SLOWDOWN_CELSIUS", ""),
    ("power_smoothing", 1.0, "DEV_PWR_SMOOTHING_ENABLED", ""),
    # Fields 409, 419, 429, 439; newer drivers count the same again, CRC taken together, as 497 to 499.
    *(
        (f"nvlink_{kind}", 1.0, f"DEV_NVLINK_{name}_ERROR_COUNT_TOTAL DEV_NVLINK_{name}_ERROR_TOTAL", f"nvlink_{old}")
        for kind, name, old in (
            ("crc_flit", "CRC_FLIT", "flit_crc_error_count_total"),
            ("crc_data", "CRC_DATA", "data_crc_error_count_total"),
            ("replay", "REPLAY", "replay_error_count_total"),
            ("recovery", "RECOVERY", "recovery_error_count_total"),
        )
    ),
    ("nvlink_dl_crc", 1.0, "DEV_NVLINK_ERROR_DL_CRC DEV_NVLINK_CRC_ERROR_TOTAL", ""),
    ("nvlink_dl_replay", 1.0, "DEV_NVLINK_ERROR_DL_REPLAY DEV_NVLINK_REPLAY_TOTAL", ""),
    ("nvlink_dl_recovery", 1.0, "DEV_NVLINK_ERROR_DL_RECOVERY DEV_NVLINK_RECOVERY_TOTAL", ""),
)
_WHOLE_BOARD = (
    # Rates in bytes per second whatever their TYPE: older collector files declare them counters.
    ("pcie_tx_bytes_per_second", 1.0, "PROF_PCIE_TX_BYTES", "fi_prof_pcie_tx_bytes"),
    ("pcie_rx_bytes_per_second", 1.0, "PROF_PCIE_RX_BYTES", "fi_prof_pcie_rx_bytes"),
    ("nvlink_tx_bytes_per_second", 1.0, "PROF_NVLINK_TX_BYTES", "fi_prof_nvlink_tx_bytes"),
    ("nvlink_rx_bytes_per_second", 1.0, "PROF_NVLINK_RX_BYTES", "fi_prof_nvlink_rx_bytes"),
    ("gpu_utilization", 0.01, "DEV_GPU_UTIL", "gpu_utilization"),
    ("gpu_utilization", 1.0, "DEV_GPU_UTIL_RATIO", ""),
)
_FIELDS = (*_INSTANCE, *_BOARD, *_WHOLE_BOARD)
ROWS = len(_FIELDS)
SERIES = {
    name: (figure, factor, row)
    for row, (figure, factor, names, old) in enumerate(_FIELDS)
    for name in [*(f"DCGM_FI_{n}" for n in names.split()), *(f"dcgm_{n}" for n in old.split())]
}
"""Name of a line -> figure, factor to base units, row of the table."""
OF_AN_INSTANCE = frozenset(figure for figure, *_ in _INSTANCE)
"""What a MIG instance has of its own (DCGM's fields of level GPU_I: the user guide on MIG)."""
OF_A_BOARD = frozenset(figure for figure, *_ in _BOARD)
"""What a board in MIG mode has, and DCGM repeats for each of its instances. The rest of the table is neither's: it is
not known which instance moved the bytes."""

XID = frozenset({"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", "dcgm_xid_errors"})
"""The last critical error, for ever; many exporters have no such line before there was one."""
XID_COUNTS = ("DCGM_EXP_XID_ERRORS_TOTAL", "DCGM_EXP_XID_ERRORS_COUNT")
"""Errors by code, in the label xid: since the exporter began, or within its last window. The first is the better."""

BLANK_TEXTS = ("[N/A]", "N/A", "<<<NULL>>>", "ERROR - FAILED TO CONVERT TO STRING", "SKIPPING DCGM VALUE")
_HOT = 1000.0
_DIGITS = 9


def is_measured(value: float, figure: str = "") -> bool:
    """Whether `value` is a measurement, not NaN or one of DCGM's blanks.

    Only the margin to the slowdown temperature may be below zero. Boards without a sensor for their memory report 0.
    """
    if figure == "temperature_margin_celsius":
        return -_HOT < value < _HOT
    if figure == "memory_temperature_celsius":
        return 0.0 < value < _HOT
    return 0.0 <= value < FP64_BLANK and not INT32_BLANK <= value <= INT32_LAST_BLANK


def whole_number(text: str) -> int | None:
    """The whole number that a label is; None when it is none, or longer than any real one."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


_MAX_GPUS = 1024
"""Of one node, without their instances; a page of the whole cluster would be booked as this node's."""


class GpuLines(Struct):
    """One GPU's lines on one page, or those of one of its MIG instances."""

    index: str
    model: str
    profile: str = ""
    figures: dict[str, float] = {}
    rows: dict[str, int] = {}
    """The row of the table that each figure came from: a lower one is preferred."""
    conflicts: set[str] = set()
    lines: set[tuple[str, ...]] = set()
    """All values of the board and its instances, mapped or not: when none changes, nothing was collected."""
    instances: dict[str, "GpuLines"] = {}
    """By GPU_I_ID."""
    xids: dict[str, int] = {}
    """The last critical error, by GPU_I_ID; the board's own under ""."""
    xid_counts: dict[str, dict[int, int]] = {}
    """By name of the line and code."""

    @property
    def has_figures(self) -> bool:
        """Whether anything at all was measured."""
        return bool(self.figures) or any(instance.figures for instance in self.instances.values())

    def add_sample(self, sample: Sample) -> None:
        """Add one line."""
        name, labels, value = sample.name, sample.labels, sample.value
        instance, profile = labels.get("GPU_I_ID", ""), labels.get("GPU_I_PROFILE", "")
        self.lines.add((name, instance, labels.get("xid", ""), repr(value)))
        if instance or profile:
            owner = self.instances.setdefault(instance, GpuLines(self.index, self.model, profile))
        else:
            owner = self
        if name in XID or name in XID_COUNTS:
            self._add_xid(name, instance, labels.get("xid", ""), value)
        elif name in SERIES:
            self._add_value(name, value, owner)

    def _add_value(self, name: str, value: float, owner: "GpuLines") -> None:
        """A whole board's lines are its own; some of an instance's repeat the board's."""
        figure = SERIES[name][0]
        if owner is self or figure in OF_AN_INSTANCE:
            owner.add_figure(name, value)
        elif figure in OF_A_BOARD:
            self.add_figure(name, value, borrowed=True)

    def add_figure(self, name: str, value: float, *, borrowed: bool = False) -> None:
        """Add one figure, unless it is a blank. The board's own line wins over one that an instance repeats."""
        figure, factor, row = SERIES[name]
        if not is_measured(value, figure):
            return
        row += ROWS * borrowed
        known = self.rows.get(figure)
        if known is None or row < known:
            self.figures[figure], self.rows[figure] = value * factor, row
        elif row == known and value * factor != self.figures[figure] and not borrowed:
            # Time-slicing repeats a GPU's line for each pod: one measurement, never to be summed.
            self.conflicts.add(name)

    def _add_xid(self, name: str, instance: str, xid: str, value: float) -> None:
        if not is_measured(value):
            return
        if name in XID:
            self.xids[instance] = int(value)
            return
        counts, code = self.xid_counts.setdefault(name, {}), whole_number(xid)
        if code is not None:
            # Repeated for each pod and instance: one count, never to be summed.
            counts[code] = max(int(value), counts.get(code, 0))


class DcgmExporterPage:
    """The text of one URL, page after page. Lines that did not change are not parsed again."""

    def __init__(self, url: str, *, hostname: str = "") -> None:
        self._url, self._hostname = url, hostname
        self._parsed_lines: dict[str, list[Sample]] = {}

    def read(self, body: bytes, faults: list[Fault], *, known: Collection[str]) -> dict[str, GpuLines]:
        """This host's GPUs by UUID; `known` are those of earlier pages. Lines that cannot be read go to `faults`.

        Raises SourceError for what is no page of this node's exporter.
        """
        samples = self._samples(body.decode("utf-8", "replace"), faults)
        gpus = _lines_by_gpu(self._samples_of_host(samples))
        self._refuse_other_nodes(gpus, faults, known)
        for uuid, gpu in gpus.items():
            faults += _contradictions(uuid, gpu)
        return gpus

    def _samples(self, text: str, faults: list[Fault]) -> list[Sample]:
        if text.lstrip()[:1] == "<":
            raise SourceError(
                f"{self._url} is an HTML page, not metrics: dcgm_exporter.url must name the exporter's"
                " metrics page (it ends in /metrics)"
            )
        unread: list[str] = []
        lines: dict[str, list[Sample]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            try:
                lines[line] = self._parsed_lines.get(line) or _parse_line(line)
            except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
                unread.append(f"line {number} is not Prometheus text format ({error}): {line[:80]!r}")
        # Most scrapes fall between two collections and find the same lines: parsing those again is the cost.
        self._parsed_lines = lines
        if unread:
            faults.append(Fault("malformed_line", f"{self._url}: {len(unread)} of its lines unread; {unread[0]}"))
        return [sample for line in lines.values() for sample in line]

    def _samples_of_host(self, samples: Iterable[Sample]) -> list[Sample]:
        on_gpus = [(_label(s, "Hostname"), s) for s in samples if _label(s, "UUID")]
        hosts = sorted({host for host, _ in on_gpus if host})
        if self._hostname and self._hostname not in hosts:
            raise SourceError(
                f"{self._url} shows no GPU of host {self._hostname!r}, only of: {', '.join(hosts) or 'none'};"
                " correct dcgm_exporter.hostname"
            )
        if len(hosts) > 1 and not self._hostname:
            raise SourceError(
                f"{self._url} shows GPUs of {len(hosts)} hosts ({', '.join(hosts[:3])}), this daemon is for"
                " one: set dcgm_exporter.url to this node's own exporter, or dcgm_exporter.hostname to one"
            )
        return [sample for host, sample in on_gpus if not self._hostname or host == self._hostname]

    def _refuse_other_nodes(self, gpus: dict[str, GpuLines], faults: list[Fault], known: Collection[str]) -> None:
        if len(gpus) > _MAX_GPUS:
            raise SourceError(
                f"{self._url} shows {len(gpus)} GPUs, and no node has so many: set dcgm_exporter.url to this node's own"
                " exporter"
            )
        if not any(gpu.has_figures for gpu in gpus.values()):
            raise SourceError(
                f"{self._url} shows no DCGM field of any GPU. {faults[0].message + '. ' if faults else ''}Is"
                " it dcgm-exporter's metrics page? If so the exporter lost its GPUs or its host engine: read"
                " its log and restart it"
            )
        if known and gpus.keys().isdisjoint(known):
            raise SourceError(
                f"{self._url} shows none of the GPUs it showed before, but {len(gpus)} others: a"
                " load-balanced Service answers for another node each time. Set dcgm_exporter.url to this"
                " node's own exporter (host IP and port); after exchanging the GPUs, restart this daemon"
            )


def _parse_line(line: str) -> list[Sample]:
    """The sample of one line, none for a comment. Raises whatever the library's parser raises.

    Line by line, so that a broken one costs only itself.
    """
    line = line.strip()
    if line.startswith("#"):
        return []
    blank = next((text for text in BLANK_TEXTS if line.endswith(text)), None)
    if blank:
        line = line.removesuffix(blank) + "NaN"
    return [sample for family in text_string_to_metric_families(line) for sample in family.samples]


def _lines_by_gpu(samples: Iterable[Sample]) -> dict[str, GpuLines]:
    gpus: dict[str, GpuLines] = {}
    for sample in samples:
        uuid = _label(sample, "UUID")
        if uuid not in gpus:
            gpus[uuid] = GpuLines(sample.labels.get("gpu", ""), sample.labels.get("modelName", ""))
        gpus[uuid].add_sample(sample)
    return gpus


def figures_of(gpu: GpuLines) -> dict[str, float | int]:
    """Fields of `Reading`, energy apart.

    Without the field for any tensor pipe its parts are added, if the two that every board has are there: half
    of them would show an INT8 server as idle. The whole memory is used + free + reserved (fields 250-253).
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


def _contradictions(uuid: str, gpu: GpuLines) -> Iterator[Fault]:
    """Faults for lines of the page that contradict each other."""
    conflicts = gpu.conflicts.union(*(instance.conflicts for instance in gpu.instances.values()))
    if conflicts:
        names = ", ".join(sorted(conflicts))
        yield Fault("conflicting_series", f"GPU {gpu.index}: lines of {names} differ; first one used", uuid)


def _label(sample: Sample, name: str) -> str:
    """The value of a label, which other releases and old-namespace mode write in lower case."""
    return sample.labels.get(name) or sample.labels.get(name.lower()) or ""


_MEMORY = re.compile(r"(?<![0-9])([0-9]{1,4})GB")
_PROFILE = re.compile(r"(?<![0-9])([0-9]{1,2})g\.([0-9]{1,4})gb")
_DEFAULT_SLICES = 7
_SLICES_BY_MODEL = (
    ("NVIDIA A30", 4),
    ("NVIDIA RTX PRO 6000 Blackwell", 4),
    ("NVIDIA RTX PRO 5000 Blackwell", 2),
    ("NVIDIA RTX PRO 4500 Blackwell", 2),
)
"""Compute slices by the beginning of the model's name, where they are not seven (MIG user guide, supported GPUs)."""
_MEMORY_SLICES = 8
_MEMORY_SLICES_BY_SLICES = {2: 2, 3: 4, 4: 4, 7: 8}
"""Memory slices of a profile by its compute slices, on boards with seven; one slice has one or two (same guide)."""
_SMALLEST_MEMORY_SHARE = 1 / 8
"""Of a board's memory: no profile has less, so nothing can be made of less."""


def layout_of(gpu: GpuLines) -> tuple[tuple[str, str], ...]:
    """What distinguishes one partition of a board from another."""
    return tuple(sorted((instance, lines.profile) for instance, lines in gpu.instances.items()))


def devices_of(board: Device, gpu: GpuLines) -> tuple[Device, ...]:
    """The board with its unpartitioned part, then its instances; nothing when the page's profiles do not add up.

    All weights together are exactly PPM.
    """
    whole = _board_slices(board.model, gpu)
    if None in map(whole_number, gpu.instances):
        return ()
    sizes = {instance: _profile_slices(gpu.instances[instance].profile) for instance in sorted(gpu.instances, key=int)}
    if not all(sizes.values()) or sum(sizes.values()) > whole:
        return ()
    weights = mig_weights(tuple(sizes.values()), whole)
    instances = (
        _instance_device(board, gpu, instance, weight=weight, slices=(size, whole))
        for (instance, size), weight in zip(sizes.items(), weights, strict=True)
    )
    left = PPM - sum(weights)
    return (structs.replace(board, weight=left, stranded=left > 0 and _out_of_memory(gpu)), *instances)


def unpartitioned_figures(gpu: GpuLines) -> dict[str, float | int]:
    """Figures of the unpartitioned part of a board: its power and clocks, and no activity: no kernel can run there.

    Activity that its instances do not have is left out: the exporter does not collect it.
    """
    shown = set().union(*(figures_of(instance) for instance in gpu.instances.values()))
    own: dict[str, float | int] = {k: v for k, v in figures_of(gpu).items() if k in OF_A_BOARD}
    return own | {"gr_engine_active": 0.0} | {name: 0.0 for name in NO_ACTIVITY if name in shown}


def instance_figures(gpu: GpuLines, instance: str) -> dict[str, float | int]:
    """Figures of an instance: its own, and the clock that it shares with its board."""
    clock = {"sm_clock_hz": gpu.figures["sm_clock_hz"]} if "sm_clock_hz" in gpu.figures else {}
    return figures_of(gpu.instances[instance]) | clock


def _instance_device(board: Device, gpu: GpuLines, instance: str, *, weight: int, slices: tuple[int, int]) -> Device:
    return instance_device(
        board,
        instance,
        uuid=f"{board.uuid}/{instance}",
        profile=gpu.instances[instance].profile,
        weight=weight,
        spec=None if board.spec is None else _instance_spec(board, board.spec, gpu, instance, slices=slices),
    )


def _instance_spec(board: Device, whole: Spec, gpu: GpuLines, instance: str, *, slices: tuple[int, int]) -> Spec:
    memory = _memory_share(board.model, whole, gpu, gpu.instances[instance], slices=slices)
    part = mig_instance_spec(whole, compute=slices[0] / slices[1], memory=memory or 1.0)
    return part if memory else structs.replace(part, memory_bandwidth_bytes_per_second=None)


def _memory_share(model: str, spec: Spec, gpu: GpuLines, lines: GpuLines, *, slices: tuple[int, int]) -> float | None:
    """Whole memory slices of the board's: as measured, else by the profile; None: not known."""
    own, all_slices = slices
    if all_slices != _DEFAULT_SLICES:
        return own / all_slices
    part, whole = (figures_of(one).get("memory_total_bytes") for one in (lines, gpu))
    if part and whole:
        return min(max(round(part / whole * _MEMORY_SLICES), 1), _MEMORY_SLICES) / _MEMORY_SLICES
    if own in _MEMORY_SLICES_BY_SLICES:
        return _MEMORY_SLICES_BY_SLICES[own] / _MEMORY_SLICES
    named, profile = _MEMORY.search(model), _PROFILE.search(lines.profile)
    gigabytes = float(named[1]) if named else spec.memory_gb
    if profile is None or not gigabytes:
        return None
    return {1: 1 / 8, 2: 2 / 8}.get(round(float(profile[2]) / gigabytes * _MEMORY_SLICES))


def _board_slices(model: str, gpu: GpuLines) -> int:
    shown = int(gpu.figures.get("mig_slices", 0))
    return shown or next((slices for name, slices in _SLICES_BY_MODEL if model.startswith(name)), _DEFAULT_SLICES)


def _profile_slices(profile: str) -> int:
    """Compute slices of a GPU instance: 3 of "3g.40gb", of "1c.3g.40gb" and of "3g.40gb+me"; 0 when it is none."""
    found = _PROFILE.search(profile)
    return int(found[1]) if found else 0


def _out_of_memory(gpu: GpuLines) -> bool:
    """Whether what is left is known to be too little for any profile; False where it is not known."""
    whole = figures_of(gpu).get("memory_total_bytes")
    parts = (figures_of(instance).get("memory_total_bytes", 0.0) for instance in gpu.instances.values())
    return whole is not None and whole - sum(parts) < whole * _SMALLEST_MEMORY_SHARE
