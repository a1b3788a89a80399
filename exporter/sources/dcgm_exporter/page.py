"""The page of a dcgm-exporter: its text, and what it says of each GPU.

Owns the lines of one page: whose they are, which are unread, and their merging into one set of figures a GPU and a MIG
instance. Refuses time: it knows one page; names and units are `names`'s.
"""

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from exporter.core.model import Fault, Reading
from exporter.sources import SourceError
from exporter.sources.dcgm_exporter.names import (
    BLANK_TEXTS,
    OF_A_BOARD,
    OF_AN_INSTANCE,
    ROWS,
    SERIES,
    XID,
    XID_COUNTS,
    seen,
    whole_number,
)

_MOST_GPUS = 1024
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
    def tells(self) -> bool:
        """Whether anything at all was measured."""
        return bool(self.figures) or any(instance.figures for instance in self.instances.values())

    def hear(self, sample: Sample) -> None:
        """Add one line."""
        name, labels, value = sample.name, sample.labels, sample.value
        instance, profile = labels.get("GPU_I_ID", ""), labels.get("GPU_I_PROFILE", "")
        self.lines.add((name, instance, labels.get("xid", ""), repr(value)))
        if instance or profile:
            whose = self.instances.setdefault(instance, GpuLines(self.index, self.model, profile))
        else:
            whose = self
        if name in XID or name in XID_COUNTS:
            self._hear_of_error(name, instance, labels.get("xid", ""), value)
        elif name in SERIES:
            self._take(name, value, whose)

    def _take(self, name: str, value: float, whose: "GpuLines") -> None:
        """A whole board's lines are its own; of an instance's some are the board's, told again."""
        figure = SERIES[name][0]
        if whose is self or figure in OF_AN_INSTANCE:
            whose.add(name, value)
        elif figure in OF_A_BOARD:
            self.add(name, value, borrowed=True)

    def add(self, name: str, value: float, *, borrowed: bool = False) -> None:
        """Add one figure, unless it is a blank. One that an instance told of its board gives way to the board's own."""
        figure, factor, row = SERIES[name]
        if not seen(value, figure):
            return
        row += ROWS * borrowed
        known = self.rows.get(figure)
        if known is None or row < known:
            self.figures[figure], self.rows[figure] = value * factor, row
        elif row == known and value * factor != self.figures[figure] and not borrowed:
            # Time-slicing repeats a GPU's line for each pod: one measurement, never to be summed.
            self.conflicts.add(name)

    def _hear_of_error(self, name: str, instance: str, xid: str, value: float) -> None:
        if not seen(value):
            return
        if name in XID:
            self.xids[instance] = int(value)
            return
        counts, code = self.xid_counts.setdefault(name, {}), whole_number(xid)
        if code is not None:
            # Repeated for each pod and instance: one count, never to be summed.
            counts[code] = max(int(value), counts.get(code, 0))


class Page:
    """The text of one URL, page after page. Lines that did not change are not parsed again."""

    def __init__(self, url: str, *, hostname: str = "") -> None:
        self._url, self._hostname = url, hostname
        self._lines: dict[str, list[Sample]] = {}

    def read(self, body: bytes, faults: list[Fault], *, known: Collection[str]) -> dict[str, GpuLines]:
        """Give this host's GPUs by UUID; `known` are those of earlier pages. What cannot be read goes to `faults`.

        Raises SourceError for what is no page of this node's exporter.
        """
        samples = self._samples(body.decode("utf-8", "replace"), faults)
        gpus = _by_gpu(self._of_one_host(samples))
        self._refuse_strangers(gpus, faults, known)
        for uuid, gpu in gpus.items():
            faults += _doubts(uuid, gpu)
        return gpus

    def _samples(self, text: str, faults: list[Fault]) -> list[Sample]:
        if text.lstrip()[:1] == "<":
            raise SourceError(
                f"{self._url} is an HTML page, not metrics: dcgm_exporter.url must name the exporter's"
                " metrics page (it ends in /metrics)"
            )
        bad: list[str] = []
        lines: dict[str, list[Sample]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            try:
                lines[line] = self._lines.get(line) or _parsed(line)
            except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
                bad.append(f"line {number} is not Prometheus text format ({error}): {line[:80]!r}")
        # Most scrapes fall between two collections and find the same lines: parsing those again is the cost.
        self._lines = lines
        if bad:
            faults.append(Fault("malformed_line", f"{self._url}: {len(bad)} of its lines unread; {bad[0]}"))
        return [sample for line in lines.values() for sample in line]

    def _of_one_host(self, samples: Iterable[Sample]) -> list[Sample]:
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

    def _refuse_strangers(self, gpus: dict[str, GpuLines], faults: list[Fault], known: Collection[str]) -> None:
        if len(gpus) > _MOST_GPUS:
            raise SourceError(
                f"{self._url} shows {len(gpus)} GPUs, and no node has so many: set dcgm_exporter.url to this node's own"
                " exporter"
            )
        if not any(gpu.tells for gpu in gpus.values()):
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


def _parsed(line: str) -> list[Sample]:
    """Give the sample of one line, none for a comment. Raises whatever the library's parser raises.

    Line by line, so that a broken one costs only itself.
    """
    line = line.strip()
    if line.startswith("#"):
        return []
    blank = next((text for text in BLANK_TEXTS if line.endswith(text)), None)
    if blank:
        line = line.removesuffix(blank) + "NaN"
    return [sample for family in text_string_to_metric_families(line) for sample in family.samples]


def _by_gpu(samples: Iterable[Sample]) -> dict[str, GpuLines]:
    gpus: dict[str, GpuLines] = {}
    for sample in samples:
        uuid = _label(sample, "UUID")
        if uuid not in gpus:
            gpus[uuid] = GpuLines(sample.labels.get("gpu", ""), sample.labels.get("modelName", ""))
        gpus[uuid].hear(sample)
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


def _doubts(uuid: str, gpu: GpuLines) -> Iterator[Fault]:
    """What on the page contradicts itself."""
    conflicts = gpu.conflicts.union(*(instance.conflicts for instance in gpu.instances.values()))
    if conflicts:
        names = ", ".join(sorted(conflicts))
        yield Fault("conflicting_series", f"GPU {gpu.index}: lines of {names} differ; first one used", uuid)


def _label(sample: Sample, name: str) -> str:
    """Give a label that other releases and old-namespace mode write in lower case."""
    return sample.labels.get(name) or sample.labels.get(name.lower()) or ""
