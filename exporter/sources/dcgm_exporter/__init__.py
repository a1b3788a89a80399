"""Reads an existing dcgm-exporter over HTTP, for nodes where another DCGM client already owns the counters.

Owns readings: what time a page's figures stand for, and the doubt when the page stops moving. The page itself is
`page`'s, names and units `names`'s, parts of a board in MIG mode `mig`'s, health `health`'s. Refuses to drive DCGM, to
say who holds a GPU (`pod` labels are a scheduler's business), and `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` (one sum of
both directions, in units that changed between releases).

What time a reading covers: the page shows the exporter's last collection. Profiling fields are means over its
collect interval (`--collect-interval`, 30 s unless set), device fields the value at that moment, and the page
does not say when it was: every figure is up to one interval late. A reading stands for the time between two
successful scrapes, as Prometheus takes a gauge to hold between samples. Beyond `max_gap_seconds` that is no
evidence: it then covers only the last collect interval, the window the means describe; the rest stays unseen.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from math import inf
from typing import Any

from msgspec import Struct, structs

from exporter.core.model import MS, PPM, SECOND, Device, Fault, Health, Reading, Spec
from exporter.sources import Batch, SourceError
from exporter.sources.dcgm_exporter.health import Xids, health_of
from exporter.sources.dcgm_exporter.mig import NVLINK, devices_of, instance_of, layout, rest_of
from exporter.sources.dcgm_exporter.names import whole_number
from exporter.sources.dcgm_exporter.page import GpuLines, Page, figures_of
from exporter.sources.dcgm_exporter.web import Fetch, HttpPage
from exporter.specs import find_spec, unknown_model
from exporter.wording import without_secrets

MAX_GAP_SECONDS = 90.0
COLLECT_SECONDS = 30.0
"""dcgm-exporter's default `--collect-interval` (30000 ms)."""

_BUSY = ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "gpu_utilization")


class _Track(Struct):
    """What is remembered of a board, and of its MIG instances, from page to page."""

    devices: tuple[Device, ...]
    """The board, then its instances."""
    xids: Xids
    layout: tuple[tuple[str, str], ...] = ()
    at: int | None = None
    """The last scrape that showed it; None: the next one is a baseline."""
    lines: set[tuple[str, ...]] = set()
    moved_at: int = 0
    """When its lines last changed."""
    counter: float | None = None
    """The energy counter, joules."""
    owed: float | None = None
    """Joules the counter has moved and no reading has told yet; None until it has moved once."""

    def forget(self) -> None:
        self.at = self.counter = self.owed = None


class DcgmExporterSource:
    """The `Source` behind one dcgm-exporter URL. Ratios pass as found; blanks and sentinels are not seen.

    `hostname` chooses one host of a page that carries several. `collect_interval_seconds` is the exporter's
    own: it sets how long an unchanged page is believed and how a late energy counter is spread.
    """

    name = "dcgm-exporter"

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        max_gap_seconds: float = MAX_GAP_SECONDS,
        collect_interval_seconds: float = COLLECT_SECONDS,
        hostname: str = "",
        lookup: Callable[[str], Spec | None] = find_spec,
        fetch: Fetch | None = None,
    ) -> None:
        self._url, self._lookup = without_secrets(url), cache(lookup)
        self._fetch = HttpPage(url, timeout_seconds=timeout_seconds) if fetch is None else fetch
        self._page = Page(self._url, hostname=hostname)
        self._max_gap, self._collect = _nanoseconds(max_gap_seconds), _nanoseconds(collect_interval_seconds)
        self._tracks: dict[str, _Track] = {}
        self._signals: frozenset[str] = frozenset()

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` seen on any page so far: profiling fields may appear some collections late.

        Stock dcgm-exporter gives neither `sm_active` nor NVLink rates.
        """
        return self._signals

    def probe(self) -> None:
        """Get the page once, for `signals`; sets no baseline. Raises SourceError."""
        self._gpus([])

    def read(self, now: int) -> Batch:
        """Get the page and give one reading for each GPU and MIG instance that the last page showed too.

        Faults: malformed_line, conflicting_series, gpu_missing (was there before, other GPUs still are), mig_layout
        (the instances do not add up to a board, which then has no reading) and, once a GPU, unknown_model. Health is
        told of each page that was collected anew. Raises SourceError.
        """
        faults: list[Fault] = []
        readings: list[Reading] = []
        health: list[Health] = []
        gpus = self._gpus(faults)
        for uuid, gpu in gpus.items():
            track = self._meet(uuid, gpu, faults)
            if gpu.lines != track.lines:
                track.lines, track.moved_at = gpu.lines, now
                told = health_of(uuid, gpu, track.xids.news(gpu))
                health += [told] if told else []
            readings += self._readings(track, gpu, now)
        faults += [self._missing(uuid) for uuid in sorted(self._tracks.keys() - gpus.keys())]
        boards = sorted((track.devices for track in self._tracks.values()), key=lambda devices: _order(devices[0]))
        return Batch(tuple(d for devices in boards for d in devices), tuple(readings), tuple(faults), tuple(health))

    def resync(self) -> None:
        """Forget where the next reading would start; the last page is kept, to know a frozen one."""
        for track in self._tracks.values():
            track.forget()

    def pause(self) -> None:
        """Forget the baseline, which is all there is to let go of: the counters are the exporter's.

        A profiler that needs them must have the exporter's own DCGM give them up: `dcgmi profile --pause`, and
        `--resume` afterwards. The exporter then shows no profiling fields.
        """
        self.resync()

    def close(self) -> None:
        """Close the connection."""
        self._fetch.close()

    def _gpus(self, faults: list[Fault]) -> dict[str, GpuLines]:
        gpus = self._page.read(self._fetch(), faults, known=self._tracks.keys())
        for gpu in gpus.values():
            board = rest_of(gpu) if gpu.instances else figures_of(gpu)
            parts = (instance_of(gpu, instance) for instance in gpu.instances)
            self._signals = self._signals.union(board, *parts, {"energy_joules"} if _gives_energy(gpu) else ())
        return gpus

    def _meet(self, uuid: str, gpu: GpuLines, faults: list[Fault]) -> _Track:
        """Bring what is known of a board up to this page; a new partition of it begins with a new baseline."""
        spec = self._lookup(gpu.model)
        if uuid not in self._tracks:
            self._tracks[uuid] = _Track((), Xids())
            faults += [unknown_model(uuid, gpu.model)] if spec is None else []
        track, new = self._tracks[uuid], layout(gpu)
        if new != track.layout:
            track.layout = new
            track.forget()
        lacks = NVLINK if spec is not None and not spec.nvlink_bytes_per_second else ()
        condition = "recovery" if gpu.figures.get("recovery_action") else ""
        board = Device(uuid, gpu.index, gpu.model, spec, lacks, condition)
        track.devices = devices_of(board, gpu) if gpu.instances else (board,)
        if not track.devices:
            track.devices = (board,)
            faults.append(_unreadable(board, new))
        return track

    def _readings(self, track: _Track, gpu: GpuLines, now: int) -> Iterator[Reading]:
        before, track.at = track.at, now
        unreadable = gpu.instances and len(track.devices) == 1
        if unreadable or before is None or before >= now:
            track.counter, track.owed = gpu.figures.get("energy"), None
            return
        start = before if now - before <= self._max_gap else now - min(self._collect, self._max_gap)
        joules = self._joules(track, gpu.figures.get("energy"), covers=now - start, whole=start == before)
        stale = self._stale(gpu, still=now - track.moved_at)
        if not gpu.instances:
            doubt = stale if gpu.tells else "blank"
            whole: dict[str, Any] = figures_of(gpu)
            yield Reading(
                uuid=track.devices[0].uuid, start=start, end=now, energy_joules=joules, distrust=doubt, **whole
            )
            return
        if joules is None and "power_watts" in gpu.figures:
            joules = gpu.figures["power_watts"] * (now - start) / SECOND
        for device in track.devices:
            yield _part(device, gpu, (start, now), joules, stale)

    def _missing(self, uuid: str) -> Fault:
        track = self._tracks[uuid]
        track.devices = tuple(structs.replace(device, condition="missing") for device in track.devices)
        track.forget()
        track.lines = set()  # its return is a change, even with the figures it left with
        return Fault(
            "gpu_missing",
            f"GPU {track.devices[0].index} is gone from {self._url} while others are there: it fell off the bus"
            " or was taken from the exporter; look at `nvidia-smi` and `dmesg`",
            uuid,
        )

    def _stale(self, gpu: GpuLines, *, still: int) -> str:
        """Tell "stale" when a GPU's lines have not changed for longer than a live exporter can explain.

        An energy counter moves with every collection of a powered board, and a board at work never repeats
        power and ratios to the last digit: 3 collections. An idle one without that counter may well repeat
        itself, but its power sensor, in milliwatts, hardly 20 times running. Without power nothing need move.
        """
        figures = gpu.figures
        busy = any(one.figures.get(name) for one in (gpu, *gpu.instances.values()) for name in _BUSY)
        patience = 3.0 if busy or figures.get("energy") else 20.0 if "power_watts" in figures else inf
        return "stale" if still > patience * self._collect else ""

    def _joules(self, track: _Track, counter: float | None, *, covers: int, whole: bool) -> float | None:
        """Energy for a reading: what the counter moved, spread over about one collect interval.

        Scraped more often than collected, the counter stands still and then leaps: told as it comes, that
        is 0 W, 0 W, 2100 W. The sum over readings is the counter's own. None until it has moved, where the
        reading leaves out part of the time since the last one, and where the counter fell (driver reloaded).
        """
        if counter is None:
            return None
        before, track.counter = track.counter, counter
        if before is None or counter < before or not whole:
            track.owed = None
            return None
        if track.owed is None and counter == before:
            return None
        owed = (track.owed or 0.0) + counter - before
        told = owed * min(1.0, covers / self._collect)
        track.owed = owed - told
        return told


def open_dcgm_exporter(config: Any) -> DcgmExporterSource:
    """Open what `config.dcgm_exporter` names. Raises SourceError if the page cannot be read now."""
    section = config.dcgm_exporter
    source = DcgmExporterSource(
        section.url,
        timeout_seconds=section.timeout_seconds,
        max_gap_seconds=section.max_gap_seconds,
        collect_interval_seconds=section.collect_interval_seconds,
        hostname=section.hostname,
        lookup=partial(find_spec, overrides=config.overrides()),
    )
    try:
        source.probe()
    except SourceError:
        source.close()
        raise
    return source


def _part(device: Device, gpu: GpuLines, span: tuple[int, int], joules: float | None, stale: str) -> Reading:
    """The reading of a MIG instance, or of what none has. Nobody measures their energy: each has its share."""
    if device.parent:
        instance = device.uuid.removeprefix(device.parent + "/")
        figures: dict[str, Any] = instance_of(gpu, instance)
        tells = bool(gpu.instances[instance].figures)
    else:
        figures, tells = rest_of(gpu), gpu.tells
    share = None if joules is None else joules * device.weight / PPM
    distrust = stale if tells else "blank"
    return Reading(device.uuid, *span, energy_joules=share, distrust=distrust, **figures)


def _gives_energy(gpu: GpuLines) -> bool:
    return "energy" in gpu.figures or (bool(gpu.instances) and "power_watts" in gpu.figures)


def _unreadable(board: Device, parts: tuple[tuple[str, str], ...]) -> Fault:
    told = ", ".join(f"{instance or '?'} {profile or '?'}" for instance, profile in parts)
    return Fault(
        "mig_layout",
        f"GPU {board.index} is in MIG mode, and its instances ({told}) do not add up to a {board.model or 'board'}: it"
        " is not observed. Compare with `nvidia-smi mig -lgi`; after a change of instances restart dcgm-exporter",
        board.uuid,
    )


def _order(device: Device) -> tuple[int, str, str]:
    index = whole_number(device.index)
    return (1 << 30 if index is None else index, device.index, device.uuid)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND / MS) * MS
