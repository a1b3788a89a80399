"""Parses one page of a dcgm-exporter into figures for each GPU and MIG instance.

Contains the metric names of all releases, their units and blanks, and the weights of MIG instances. Rejects pages of
other nodes, and MIG layouts that do not add up to a board.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping

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
from exporter.sources.dcgm_fields import (
    GAUGES,
    HEALTH,
    INSTANCE,
    LINK_RATES,
    MIB,
    RATES,
    RATIOS,
    field,
)
from exporter.specs import mig_instance_spec
from exporter.workloads import OwnerLabels

log = logging.getLogger(__name__)

# Metrics that only the exporter has. A figure may be exported under several names: the first one of SERIES wins, so
# these come before the shared fields where they are more exact, else after them.
_PREFERRED = (
    field("memory_used_bytes", "DEV_FB_USED_BYTES"),
    field("memory_total_bytes", "DEV_FB_CAPACITY_BYTES"),
    field("free", "DEV_FB_FREE_BYTES"),
    field("reserved", "DEV_FB_RESERVED_BYTES"),
    field("temperature_margin_celsius", "DEV_GPU_TEMP_LIMIT"),
)
_ALTERNATIVES = (
    field("hmma", "PROF_PIPE_TENSOR_HMMA_ACTIVE PROF_HMMA_UTIL_RATIO"),
    field("imma", "PROF_PIPE_TENSOR_IMMA_ACTIVE PROF_IMMA_UTIL_RATIO"),
    field("dfma", "PROF_PIPE_TENSOR_DFMA_ACTIVE PROF_DFMA_UTIL_RATIO"),
    field("free", "DEV_FB_FREE", "fb_free", scale=MIB),
    field("reserved", "DEV_FB_RESERVED", "fb_reserved", scale=MIB),
    field("power_watts", "DEV_POWER_USAGE_INSTANT DEV_BOARD_POWER_RAW_WATTS"),
    field("enforced_power_limit_watts", "DEV_POWER_MGMT_LIMIT DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS"),
    field("energy", "DEV_GPU_ENERGY_JOULES_TOTAL"),
    field("sm_clock_hz", "DEV_SM_CLOCK_HERTZ"),
    field("mig_slices", "DEV_MIG_MAX_SLICES"),
    # Fields 497 to 499 of newer drivers: the same errors as the nvlink_* of HEALTH, with one CRC counter.
    field("nvlink_dl_crc", "DEV_NVLINK_ERROR_DL_CRC DEV_NVLINK_CRC_ERROR_TOTAL"),
    field("nvlink_dl_replay", "DEV_NVLINK_ERROR_DL_REPLAY DEV_NVLINK_REPLAY_TOTAL"),
    field("nvlink_dl_recovery", "DEV_NVLINK_ERROR_DL_RECOVERY DEV_NVLINK_RECOVERY_TOTAL"),
    # A ratio (field 1613), while DEV_GPU_UTIL is a percentage (field 203).
    field("gpu_utilization", "DEV_GPU_UTIL_RATIO"),
)
_FIELDS = (*_PREFERRED, *RATIOS, *RATES, *GAUGES, *HEALTH, *_ALTERNATIVES)
ROWS = len(_FIELDS)
SERIES = {
    name: (each.name, each.scale, row)
    for row, each in enumerate(_FIELDS)
    for name in (*(f"DCGM_FI_{alias}" for alias in each.aliases), each.exporter_name and f"dcgm_{each.exporter_name}")
    if name
}
"""Metric name -> figure, factor to base units, row of the table."""
OF_AN_INSTANCE = {each.name for each in RATIOS} | {*INSTANCE, "hmma", "imma", "dfma", "free", "reserved"}
"""Figures measured per MIG instance (DCGM's fields of level GPU_I: the user guide on MIG)."""
_OF_NEITHER = {"gpu_utilization", "encoder_utilization", "decoder_utilization", *(each.name for each in LINK_RATES)}
OF_A_BOARD = {each.name for each in _FIELDS} - OF_AN_INSTANCE - _OF_NEITHER
"""Figures of a board in MIG mode, which DCGM repeats for each instance. The remaining figures are used for neither: it
is not known which instance transferred the bytes."""

_PER_POD = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED")
"""Metrics whose lines with a pod have that pod's share, beside the device's own line without one, with
--kubernetes-virtual-gpus since NVIDIA/dcgm-exporter#594; in earlier releases each line has the device's value."""

XID = frozenset(name for name, (figure, *_) in SERIES.items() if figure == "xid")
"""Gauges that keep the code of the last critical error; many exporters omit them before the first error."""
XID_COUNTS = ("DCGM_EXP_XID_ERRORS_TOTAL", "DCGM_EXP_XID_ERRORS_COUNT")
"""Numbers of errors by code, in the label xid: since the exporter's start (preferred), or within its last window."""

BLANK_TEXTS = ("[N/A]", "N/A", "<<<NULL>>>", "ERROR - FAILED TO CONVERT TO STRING", "SKIPPING DCGM VALUE")
_HOT = 1000.0
_DIGITS = 9


def is_measured(value: float, figure: str = "") -> bool:
    """Return whether `value` is a measurement, not NaN or one of DCGM's blanks.

    Only the margin to the slowdown temperature may be negative. Boards without a memory temperature sensor report 0.
    """
    if figure == "temperature_margin_celsius":
        return -_HOT < value < _HOT
    if figure == "memory_temperature_celsius":
        return 0.0 < value < _HOT
    return 0.0 <= value < FP64_BLANK and not INT32_BLANK <= value <= INT32_LAST_BLANK


def whole_number(text: str) -> int | None:
    """Parse a label as a non-negative integer; None if it is not one, or has more than nine digits."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


_POD_LABELS = (("exported_pod", "exported_namespace"), ("pod_name", "pod_namespace"), ("pod", "namespace"))
"""Labels with a pod's name and namespace: as Prometheus renames them, of old releases (--use-old-namespace), and of
others (dcgm-exporter's internal/pkg/transformation/const.go)."""


def owner_labels(labels: Mapping[str, str]) -> OwnerLabels | None:
    """Return the labels of a line that name an owner; None if it has none of them, not even empty ones.

    On lines that passed through a Prometheus (labels job and instance), `pod` may be the exporter's own pod.
    """
    passed_on = "job" in labels and "instance" in labels
    for pod, namespace in _POD_LABELS[: 2 if passed_on else 3]:
        if pod in labels:
            return OwnerLabels(labels.get(namespace, ""), labels[pod], labels.get("hpc_job", ""))
    return OwnerLabels(hpc_job=labels["hpc_job"]) if "hpc_job" in labels else None


_MAX_GPUS = 1024
"""Maximum number of GPUs of a node; a page with more is one of a whole cluster, and is rejected."""


class GpuLines(Struct):
    """The lines of one GPU, or of one MIG instance, on a page."""

    index: str
    model: str
    profile: str = ""
    figures: dict[str, float] = {}
    rows: dict[str, int] = {}
    """Table row from which each figure comes; lower rows are preferred."""
    conflicts: set[str] = set()
    """Metric names with several different values for this GPU."""
    lines: set[tuple[str, ...]] = set()
    """All values of the board and its instances, known or not: if none changes, the exporter collected nothing."""
    instances: dict[str, "GpuLines"] = {}
    """MIG instances by GPU_I_ID."""
    xids: dict[str, int] = {}
    """Code of the last critical error by GPU_I_ID; the board's own under ""."""
    xid_counts: dict[str, dict[int, int]] = {}
    """Numbers of critical errors by metric name and code."""
    owner_labels: set[OwnerLabels] = set()
    """Labels of all its lines that name an owner, one for each pod or job that shares it."""
    virtual: bool = False
    """A line has the label vgpu, which only --kubernetes-virtual-gpus adds, and only to a shared GPU's."""

    @property
    def has_figures(self) -> bool:
        """True if the board or an instance has any measurement."""
        return bool(self.figures) or any(instance.figures for instance in self.instances.values())

    @property
    def pods(self) -> frozenset[tuple[str, str]]:
        """Namespace and name of each pod on lines of the board and its instances."""
        named = self.owner_labels.union(*(instance.owner_labels for instance in self.instances.values()))
        return frozenset((each.namespace, each.pod) for each in named if each.pod)

    def add_sample(self, sample: Sample) -> None:
        """Add one sample."""
        name, labels, value = sample.name, sample.labels, sample.value
        instance, profile = labels.get("GPU_I_ID", ""), labels.get("GPU_I_PROFILE", "")
        self.lines.add((name, instance, labels.get("xid", ""), repr(value)))
        self.virtual = self.virtual or "vgpu" in labels
        owner = self
        if instance or profile:
            owner = self.instances.setdefault(instance, GpuLines(self.index, self.model, profile))
        if (named := owner_labels(labels)) is not None:
            owner.owner_labels.add(named)
        if name in XID or name in XID_COUNTS:
            self._add_xid(name, instance, labels.get("xid", ""), value)
        elif name in SERIES:
            figure = SERIES[name][0]
            if owner is self or figure in OF_AN_INSTANCE:
                owner.add_figure(name, value, of_pod=name in _PER_POD and named is not None and named.pod != "")
            elif figure in OF_A_BOARD:
                self.add_figure(name, value, borrowed=True)

    def add_figure(self, name: str, value: float, *, borrowed: bool = False, of_pod: bool = False) -> None:
        """Add one figure unless it is blank.

        Its own line has priority over one that an instance repeats (`borrowed`) and over a pod's share (`of_pod`).
        """
        figure, factor, row = SERIES[name]
        if not is_measured(value, figure):
            return
        row += ROWS * (borrowed or of_pod)
        known = self.rows.get(figure)
        if known is None or row < known:
            self.figures[figure], self.rows[figure] = value * factor, row
            self.conflicts.discard(name)
        elif row == known and value * factor != self.figures[figure] and not borrowed:
            # With time-slicing a GPU's line is repeated for each pod: the same measurement, so never add them up.
            self.conflicts.add(name)

    def _add_xid(self, name: str, instance: str, xid: str, value: float) -> None:
        if not is_measured(value):
            return
        if name in XID:
            self.xids[instance] = int(value)
            return
        counts, code = self.xid_counts.setdefault(name, {}), whole_number(xid)
        if code is not None:
            # Repeated for each pod and instance: the same count, so never add them up.
            counts[code] = max(int(value), counts.get(code, 0))


RENAMED_AFTER = 45
"""Refusals in a row after which a page of one other host is this node's: ten minutes, as sources are opened again."""


class ShownNode(Struct):
    """What the pages of one address have shown of their node."""

    host: str = ""
    """The host that the last page named."""
    uuids: set[str] = set()
    shows_free: bool = False
    """A page of it had a GPU without a pod, so that its exporter leaves none out."""
    refused_host: str = ""
    """The host of the pages that were refused since then, and how many of them in a row."""
    refusals: int = 0

    def accept(self, host: str, gpus: Mapping[str, GpuLines]) -> None:
        """Take a page for one of this node's."""
        if self.host and host != self.host and self.uuids.isdisjoint(gpus):
            log.warning("dcgm-exporter: the pages of host %s are this node's: it is known by that name now", host)
            self.uuids = set()
        self.host, self.refused_host, self.refusals = host, "", 0
        self.uuids.update(gpus)
        self.shows_free = self.shows_free or not may_leave_out_free_gpus(gpus.values())

    def refuse(self, host: str) -> None:
        """Count a refused page that may leave out free GPUs."""
        self.refused_host, self.refusals = host, self.refusals + 1 if host == self.refused_host else 1

    def is_named(self, host: str) -> bool:
        """Return whether it has this name, or has got it: a pod's name, which is another once the pod was replaced.

        Behind a load-balanced Service the pages that are refused are of several hosts, or this node's come between.
        """
        renamed = host == self.refused_host and self.refusals >= RENAMED_AFTER and not self.shows_free
        return host != "" and (host == self.host or renamed)


class DcgmExporterPage:
    """Parses successive pages of one URL. Unchanged lines are not parsed again."""

    def __init__(self, url: str, *, hostname: str = "", node: ShownNode | None = None) -> None:
        """`node` is what earlier pages have shown."""
        self._url, self._hostname = url, hostname
        self._node = node or ShownNode()
        self._parsed_lines: dict[str, list[Sample]] = {}

    def read(self, body: bytes, faults: list[Fault]) -> dict[str, GpuLines]:
        """Return this host's GPUs by UUID, and add a fault for lines that cannot be parsed.

        Raises SourceError if it is not a page of this node's exporter.
        """
        samples = self._samples(body.decode("utf-8", "replace"), faults)
        of_host = self._samples_of_host(samples)
        gpus = _lines_by_gpu(of_host)
        host = next((host for sample in of_host if (host := _label(sample, "Hostname"))), "")
        self._refuse_unusable(samples, gpus, faults)
        self._refuse_other_nodes(gpus, host)
        self._node.accept(host, gpus)
        for uuid, gpu in gpus.items():
            conflicts = gpu.conflicts.union(*(instance.conflicts for instance in gpu.instances.values()))
            if conflicts:
                what = f"GPU {gpu.index}: lines of {', '.join(sorted(conflicts))} differ; first one used"
                faults.append(Fault("conflicting_series", what, uuid))
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
        # Most scrapes return the same lines, as they are more frequent than collections; parsing is the main cost.
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

    def _refuse_unusable(self, samples: Collection[Sample], gpus: dict[str, GpuLines], faults: list[Fault]) -> None:
        if len(gpus) > _MAX_GPUS:
            raise SourceError(
                f"{self._url} shows {len(gpus)} GPUs, and no node has so many: set dcgm_exporter.url to this node's own"
                " exporter"
            )
        if not any(gpu.has_figures for gpu in gpus.values()):
            what, do = _unusable_content(samples)
            raise SourceError(f"{self._url} shows {what}. {faults[0].message + '. ' if faults else ''}{do}")

    def _refuse_other_nodes(self, gpus: dict[str, GpuLines], host: str) -> None:
        if not self._node.uuids or not gpus.keys().isdisjoint(self._node.uuids):
            return
        # On the same node, pods may have come to other GPUs while all pods of the known ones ended.
        leaves_out = may_leave_out_free_gpus(gpus.values())
        if leaves_out and self._node.is_named(host):
            return
        self._node.refuse(host if leaves_out else "")
        raise SourceError(
            f"{self._url} shows none of the GPUs it showed before, but {len(gpus)} others: a"
            " load-balanced Service answers for another node each time. Set dcgm_exporter.url to this"
            " node's own exporter (host IP and port), or dcgm_exporter.hostname to this node's name on the page; then,"
            " or after exchanging the GPUs, restart this daemon"
        )


def may_leave_out_free_gpus(gpus: Collection[GpuLines]) -> bool:
    """Return whether all GPUs on a page have pods.

    Then it may leave out the others, as that of a dcgm-exporter up to 4.8.1 with --kubernetes-virtual-gpus does
    (NVIDIA/dcgm-exporter#611), and of 4.5.2 with --kubernetes-enable-dra (#569).
    """
    return all(gpu.pods for gpu in gpus)


_ENGINE_LOST = "If so the exporter lost its GPUs or its host engine: read its log and restart it"
_NO_POD = "Or has no pod a GPU? With --kubernetes-virtual-gpus, releases before 4.5.2 export none then: update it"
_SHOWN_NAMES = 4


def _unusable_content(samples: Collection[Sample]) -> tuple[str, str]:
    """Return what a page without a figure of any GPU shows, and what to do."""
    fields = [sample for sample in samples if sample.name in SERIES or sample.name.startswith("DCGM_")]
    names = sorted({field.name for field in fields})
    shown = ", ".join(names[:_SHOWN_NAMES]) + (f" and {len(names) - _SHOWN_NAMES} more" if names[_SHOWN_NAMES:] else "")
    if not fields:
        others = ", ".join(sorted({sample.name for sample in samples})[:_SHOWN_NAMES])
        here = f", but {others}" if others else ""
        do = f"Is it dcgm-exporter's metrics page? {_ENGINE_LOST}. {_NO_POD}"
        return f"no DCGM field of any GPU{here}", do
    if not any(_label(field, "UUID") for field in fields):
        labels = ", ".join(sorted({label for field in fields for label in field.labels})) or "none"
        do = "Let whatever rewrites the page (a relabelling, a proxy, a template) keep that label"
        return f"{shown} without the label UUID, by which a GPU is known; labels there: {labels}", do
    if any(name in SERIES and name not in XID for name in names):
        return f"{shown}, and no value of a GPU that is a measurement", f"Do other pages have values? {_ENGINE_LOST}"
    do = "Have the exporter's file of fields (-f) name DCGM_FI_PROF_GR_ENGINE_ACTIVE and others of docs/sources.md"
    return f"of its GPUs only {shown}, which measures no activity", do


def _parse_line(line: str) -> list[Sample]:
    """Parse one line; a comment has no sample. Raises whatever the library's parser raises.

    Lines are parsed one by one, so that a broken line does not affect the others.
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
    """Return the fields of `Reading`, without energy.

    If the field for all tensor pipes is missing, adds up the pipes, provided that both pipes that every board has are
    there: without IMMA an INT8 server would look idle. Total memory is used + free + reserved (fields 250-253).
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


def _label(sample: Sample, name: str) -> str:
    """Return the value of a label; some releases and the old-namespace mode write its name in lower case."""
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
"""Compute slices by prefix of the model's name, if not seven (MIG user guide, supported GPUs)."""
_MEMORY_SLICES = 8
_MEMORY_SLICES_BY_SLICES = {2: 2, 3: 4, 4: 4, 7: 8}
"""Memory slices of a profile by its compute slices, for boards with seven; one compute slice has one or two (same
guide)."""
_SMALLEST_MEMORY_SHARE = 1 / 8
"""Smallest share of a board's memory that any profile has."""


def layout_of(gpu: GpuLines) -> tuple[tuple[str, str], ...]:
    """Return the MIG layout of a board, to detect changes: sorted (instance id, profile)."""
    return tuple(sorted((instance, lines.profile) for instance, lines in gpu.instances.items()))


def devices_of(board: Device, gpu: GpuLines) -> tuple[Device, ...]:
    """Return the board with the weight of its unpartitioned part, then its instances; all weights add up to PPM.

    Returns nothing if the profiles on the page do not fit the board.
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


_UNEXPLAINED = 0.1
"""Engine activity by which a board's own line may exceed what its instances explain: they are sampled one by one."""


def unexplained_activity(gpu: GpuLines) -> tuple[float, float] | None:
    """Return the board's own engine activity and the most its instances explain, if it is more; None if it is not.

    Then the page leaves instances out, and the rest of the board is not free.
    """
    own = gpu.figures.get("gr_engine_active")
    parts = [instance.figures.get("gr_engine_active") for instance in gpu.instances.values()]
    known = [part for part in parts if part is not None]
    if own is None or not known or len(known) < len(parts):
        return None
    explained = min(1.0, sum(known))
    return (own, explained) if own > explained + _UNEXPLAINED else None


def unpartitioned_figures(gpu: GpuLines) -> dict[str, float | int]:
    """Return the figures of a board's unpartitioned part: the board's own, and zero activity.

    Activity that the instances do not report is left out: the exporter does not collect it.
    """
    shown = set().union(*(figures_of(instance) for instance in gpu.instances.values()))
    own: dict[str, float | int] = {k: v for k, v in figures_of(gpu).items() if k in OF_A_BOARD}
    return own | {"gr_engine_active": 0.0} | {name: 0.0 for name in NO_ACTIVITY if name in shown}


def instance_figures(gpu: GpuLines, instance: str) -> dict[str, float | int]:
    """Return the figures of an instance: its own, and the SM clock of its board."""
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
    """Return an instance's share of memory in whole slices, as measured, else by its profile; None: unknown."""
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
    """Return the compute slices of a profile: 3 for "3g.40gb", "1c.3g.40gb" and "3g.40gb+me"; 0 if not a profile."""
    found = _PROFILE.search(profile)
    return int(found[1]) if found else 0


def _out_of_memory(gpu: GpuLines) -> bool:
    """Return whether the free memory is too small for any profile; False if unknown."""
    whole = figures_of(gpu).get("memory_total_bytes")
    parts = (figures_of(instance).get("memory_total_bytes", 0.0) for instance in gpu.instances.values())
    return whole is not None and whole - sum(parts) < whole * _SMALLEST_MEMORY_SHARE
