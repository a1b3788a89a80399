"""Reads an existing dcgm-exporter over HTTP, for nodes where another DCGM client already owns the counters.

Owns readings: what time a page's figures stand for, and the doubt when the page stops moving; the page itself is
`page`'s. Refuses to drive DCGM, to read MIG instances, to say
who holds a GPU (`pod` labels are a scheduler's business), and `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` (one sum of both
directions, in units that changed between releases).

What time a reading covers: the page shows the exporter's last collection. Profiling fields are means over its
collect interval (`--collect-interval`, 30 s unless set), device fields the value at that moment, and the page
does not say when it was: every figure is up to one interval late. A reading stands for the time between two
successful scrapes, as Prometheus takes a gauge to hold between samples. Beyond `max_gap_seconds` that is no
evidence: it then covers only the last collect interval, the window the means describe; the rest stays unseen.
"""

from collections.abc import Callable, Iterable
from functools import cache
from math import inf
from typing import Any

from msgspec import Struct, structs
from prometheus_client.samples import Sample

from exporter.core.model import MS, SECOND, Device, Fault, Reading, Spec
from exporter.sources import Batch, SourceError
from exporter.sources.dcgm_exporter.page import Fetch, GpuLines, HttpPage, by_gpu, doubts, figures_of, label, parsed
from exporter.specs import find_spec

MAX_GAP_SECONDS = 90.0
COLLECT_SECONDS = 30.0
"""dcgm-exporter's default `--collect-interval` (30000 ms)."""

_NVLINK = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
_BUSY = ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "gpu_utilization")


class _Track(Struct):
    """What is remembered of a GPU from page to page."""

    device: Device
    at: int | None = None
    """The last scrape that showed it; None: the next one is a baseline."""
    lines: set[tuple[str, str]] = set()
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
        self._url, self._hostname, self._lookup = url, hostname, cache(lookup)
        self._fetch = HttpPage(url, timeout_seconds=timeout_seconds) if fetch is None else fetch
        self._max_gap, self._collect = _nanoseconds(max_gap_seconds), _nanoseconds(collect_interval_seconds)
        self._tracks: dict[str, _Track] = {}
        self._lines: dict[str, list[Sample]] = {}
        self._signals: frozenset[str] = frozenset()

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` seen on any page so far: profiling fields may appear some collections late.

        Stock dcgm-exporter gives neither `sm_active` nor NVLink rates.
        """
        return self._signals

    def probe(self) -> None:
        """Get the page once, for `signals`; sets no baseline. Raises SourceError."""
        self._page([])

    def read(self, now: int) -> Batch:
        """Get the page and give one reading for each GPU that the last page showed too.

        Faults: malformed_line, conflicting_series, mig_not_read (and no reading: a parent's lines do not
        describe its instances), gpu_missing (was there before, siblings still are). Raises SourceError.
        """
        faults: list[Fault] = []
        gpus = self._page(faults)
        readings = [self._reading(uuid, gpu, now=now) for uuid, gpu in gpus.items()]
        faults += [self._missing(uuid) for uuid in sorted(self._tracks.keys() - gpus.keys())]
        devices = sorted((track.device for track in self._tracks.values()), key=_order)
        return Batch(tuple(devices), tuple(r for r in readings if r is not None), tuple(faults))

    def resync(self) -> None:
        """Forget where the next reading would start; the last page is kept, to know a frozen one."""
        for track in self._tracks.values():
            track.forget()

    def close(self) -> None:
        """Close the connection."""
        self._fetch.close()

    def _page(self, faults: list[Fault]) -> dict[str, GpuLines]:
        samples = self._samples(self._fetch().decode("utf-8", "replace"), faults)
        gpus = by_gpu(self._of_one_host(samples))
        self._refuse_strangers(gpus, faults)
        for uuid, gpu in gpus.items():
            faults += doubts(uuid, gpu)
            self._signals |= figures_of(gpu).keys() | ({"energy_joules"} if "energy" in gpu.figures else set())
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
                lines[line] = self._lines.get(line) or parsed(line)
            except (ValueError, IndexError, KeyError, TypeError) as error:
                bad.append(f"line {number} is not Prometheus text format ({error}): {line[:80]!r}")
        # Most scrapes fall between two collections and find the same lines: parsing those again is the cost.
        self._lines = lines
        if bad:
            faults.append(Fault("malformed_line", f"{self._url}: {len(bad)} of its lines unread; {bad[0]}"))
        return [sample for line in lines.values() for sample in line]

    def _of_one_host(self, samples: Iterable[Sample]) -> list[Sample]:
        on_gpus = [(label(s, "Hostname"), s) for s in samples if label(s, "UUID")]
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

    def _refuse_strangers(self, gpus: dict[str, GpuLines], faults: list[Fault]) -> None:
        if not any(gpu.figures or gpu.mig for gpu in gpus.values()):
            raise SourceError(
                f"{self._url} shows no DCGM field of any GPU. {faults[0].message + '. ' if faults else ''}Is"
                " it dcgm-exporter's metrics page? If so the exporter lost its GPUs or its host engine: read"
                " its log and restart it"
            )
        if self._tracks and self._tracks.keys().isdisjoint(gpus):
            raise SourceError(
                f"{self._url} shows none of the GPUs it showed before, but {len(gpus)} others: a"
                " load-balanced Service answers for another node each time. Set dcgm_exporter.url to this"
                " node's own exporter (host IP and port); after exchanging the GPUs, restart this daemon"
            )

    def _reading(self, uuid: str, gpu: GpuLines, *, now: int) -> Reading | None:
        track = self._tracks.setdefault(uuid, _Track(Device(uuid)))
        track.device = self._device(uuid, gpu)
        if gpu.lines != track.lines:
            track.lines, track.moved_at = gpu.lines, now
        before, track.at = track.at, now
        if gpu.mig or before is None or before >= now:
            track.counter, track.owed = gpu.figures.get("energy"), None
            return None
        start = before if now - before <= self._max_gap else now - min(self._collect, self._max_gap)
        joules = self._joules(track, gpu.figures.get("energy"), covers=now - start, whole=start == before)
        figures: dict[str, Any] = figures_of(gpu)
        distrust = self._distrust(gpu.figures, still=now - track.moved_at)
        return Reading(uuid, start, now, energy_joules=joules, distrust=distrust, **figures)

    def _device(self, uuid: str, gpu: GpuLines) -> Device:
        spec = self._lookup(gpu.model)
        no_nvlink = spec is not None and not spec.nvlink_bytes_per_second
        return Device(uuid, gpu.index, gpu.model, spec, _NVLINK if no_nvlink else ())

    def _missing(self, uuid: str) -> Fault:
        track = self._tracks[uuid]
        track.device = structs.replace(track.device, condition="missing")
        track.forget()
        track.lines = set()  # its return is a change, even with the figures it left with
        return Fault(
            "gpu_missing",
            f"GPU {track.device.index} is gone from {self._url} while others are there: it fell off the bus"
            " or was taken from the exporter; look at `nvidia-smi` and `dmesg`",
            uuid,
        )

    def _distrust(self, figures: dict[str, float], *, still: int) -> str:
        """Tell "stale" when a GPU's lines have not changed for longer than a live exporter can explain.

        An energy counter moves with every collection of a powered board, and a board at work never repeats
        power and ratios to the last digit: 3 collections. An idle one without that counter may well repeat
        itself, but its power sensor, in milliwatts, hardly 20 times running. Without power nothing need move.
        """
        if not figures:
            return "blank"
        moves = figures.get("energy") or any(figures.get(name) for name in _BUSY)
        patience = 3.0 if moves else 20.0 if "power_watts" in figures else inf
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
    )
    try:
        source.probe()
    except SourceError:
        source.close()
        raise
    return source


def _order(device: Device) -> tuple[int, str, str]:
    return (int(device.index) if device.index.isdecimal() else 1 << 30, device.index, device.uuid)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND / MS) * MS
