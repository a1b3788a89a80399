"""Fetches the page of a dcgm-exporter over HTTP and turns consecutive pages into readings and health.

A reading covers the time between two successful scrapes, or only one collect interval after a gap. Readings from a page
that no longer changes are distrusted as stale. Labels that name owners are passed on, for nodes without a
scheduler. Does not use `DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL`, whose unit changed between releases.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import httpx
from msgspec import Struct, structs

from exporter.core.model import MS, PPM, SECOND, Device, Fault, Health, Reading, Spec
from exporter.core.policy import Policy
from exporter.http_body import ACCEPTED, BodyError, read_body
from exporter.redact import redact_secrets
from exporter.sources.base import (
    LONGEST_READING_SECONDS,
    NVLINK_SIGNALS,
    ReadResult,
    SourceError,
    recovery_condition,
)
from exporter.sources.dcgm_exporter.page import (
    XID_COUNTS,
    DcgmExporterPage,
    GpuLines,
    ShownNode,
    devices_of,
    figures_of,
    instance_figures,
    layout_of,
    may_leave_out_free_gpus,
    unexplained_activity,
    unpartitioned_figures,
    whole_number,
)
from exporter.sources.dcgm_fields import health_of
from exporter.sources.ports import is_chosen, require_trusted_port
from exporter.specs import find_spec, unknown_model
from exporter.workloads import OwnerLabels

LIMIT_BYTES = 8 << 20
"""Size limit of a page: 8 GPUs with 60 fields and 10 pods each make about 2 MB."""


class PageFetcher(Protocol):
    """Fetches the page."""

    def __call__(self) -> bytes:
        """Return the current page. Raises SourceError."""
        ...

    def close(self) -> None:
        """Release all resources. Never raises."""
        ...


class TrustedPageFetcher:
    """Fetches a page only while its port belongs to root or to our own user (`require_trusted_port`)."""

    def __init__(self, fetch: PageFetcher, port: int, *, proc: Path = Path("/proc/self")) -> None:
        self._fetch, self._port, self._proc = fetch, port, proc

    def __call__(self) -> bytes:
        """Fetch the page. Raises SourceError."""
        remedy = 'if that is your dcgm-exporter, set source = "dcgm-exporter"'
        require_trusted_port(self._port, remedy=remedy, proc=self._proc)
        return self._fetch()

    def close(self) -> None:
        """Close the connection."""
        self._fetch.close()


class HttpPageFetcher:
    """Fetches one URL over a persistent connection, with limits on time and size."""

    def __init__(self, url: str, *, timeout_seconds: float, limit_bytes: int = LIMIT_BYTES) -> None:
        self._url, self._timeout, self._limit = url, timeout_seconds, limit_bytes
        self._display_url = redact_secrets(url)
        # No proxy from the environment: the exporter is on this node, and localhost of a proxy is another host.
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=False, headers=ACCEPTED)

    def __call__(self) -> bytes:
        """Fetch the page. Raises SourceError for anything but a whole page with status 200."""
        try:
            with self._client.stream("GET", self._url) as response:
                return self._body(response)
        except httpx.TimeoutException as error:
            raise self._timed_out() from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            detail = redact_secrets(str(error)) or type(error).__name__
            raise SourceError(
                f"{self._display_url} could not be read ({detail}): is dcgm-exporter running"
                " on this node and is this its address? Try `curl` on it, or set dcgm_exporter.url"
            ) from error

    def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise SourceError(
                f"{self._display_url} answered HTTP {response.status_code}, not 200: read the exporter's log, and"
                " check that dcgm_exporter.url is its metrics page (it ends in /metrics)"
            )
        try:
            return read_body(response, limit=self._limit, deadline=monotonic() + self._timeout)
        except BodyError as error:
            if error.kind == "timeout":
                raise self._timed_out() from error
            raise SourceError(
                f"{self._display_url} {error}, no dcgm-exporter page is: set dcgm_exporter.url to this node's own"
                " exporter, not to a proxy or a federating Prometheus"
            ) from error

    def _timed_out(self) -> SourceError:
        return SourceError(
            f"{self._display_url} gave no whole page within {self._timeout:g} s: the exporter hangs or the node is"
            " overloaded; restart dcgm-exporter, or raise dcgm_exporter.timeout_seconds"
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


_MAX_XIDS_PER_CODE = 16
"""Maximum number of errors of one code reported per page, so that a broken counter cannot flood the daemon."""


class XidTracker:
    """Detects critical errors (Xids) of one board that occurred after the first page.

    The gauge DCGM_FI_DEV_XID_ERRORS keeps the last error for ever, so only a change is a new error, and a repeated code
    is not detected. If the exporter counts errors by code, the counts are used instead. Counts within a window fall
    when errors leave it, so they give a lower bound of new errors.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] | None = None
        self._counts: dict[str, dict[int, int]] = {}
        self._counted_from_gauge: Counter[int] = Counter()

    def new_xids(self, gpu: GpuLines) -> tuple[int, ...]:
        """Return the codes of new errors on a changed page; none on the first page."""
        first, before = self._last is None, self._last or {}
        counting = next((name for name in XID_COUNTS if name in gpu.xid_counts), "")
        new = self._newly_counted(counting, gpu.xid_counts[counting]) if counting else _changed(before, gpu.xids)
        new = [] if first else new
        # A count may follow one collection after the gauge, or its line may appear only with the first error.
        self._last, self._counts, self._counted_from_gauge = gpu.xids, gpu.xid_counts, Counter(() if counting else new)
        return tuple(new)

    @property
    def codes(self) -> frozenset[int]:
        """Codes of all errors that the last page shows, new or not."""
        return frozenset((self._last or {}).values()).union(*self._counts.values())

    def _newly_counted(self, name: str, counts: dict[int, int]) -> list[int]:
        before = self._counts.get(name, {})
        new: list[int] = []
        for code, count in sorted(counts.items()):
            known = before.get(code, 0)
            restarted = count < known and name == XID_COUNTS[0]
            rise = (count if restarted else count - known) - self._counted_from_gauge[code]
            if code:
                new += [code] * min(rise, _MAX_XIDS_PER_CODE)
        return new


def _changed(before: dict[str, int], now: dict[str, int]) -> list[int]:
    """Return the codes on changed lines, except a new instance's line that repeats a code of the previous page."""
    old = set(before.values())
    changed = ((line, code) for line, code in now.items() if code and code != before.get(line))
    return sorted({code for line, code in changed if line in before or code not in old})


COLLECT_SECONDS = 30.0
"""dcgm-exporter's default `--collect-interval` (30000 ms)."""

_BUSY = ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "gpu_utilization")


class _BoardState(Struct):
    """The state of a board and its MIG instances that is kept from page to page. Times are monotonic nanoseconds."""

    devices: tuple[Device, ...]
    """The board, then its instances."""
    xids: XidTracker
    layout: tuple[tuple[str, str], ...] = ()
    scraped_at: int | None = None
    """Time of the last page with the board; None: the next page sets the baseline."""
    lines: set[tuple[str, ...]] = set()
    pods: frozenset[tuple[str, str]] = frozenset()
    """Pods on the last page with the board."""
    changed_at: int = 0
    """Time at which its lines last changed."""
    energy_counter: float | None = None
    """Last value of the energy counter, joules."""
    unreported_joules: float | None = None
    """Joules counted but not yet part of a reading; None until the counter has changed once."""

    def reset(self) -> None:
        self.scraped_at = self.energy_counter = self.unreported_joules = None


class DcgmExporterSource:
    """The TelemetrySource of one dcgm-exporter URL. Blank values are left out.

    `hostname` selects one host of a page with several. `collect_interval_seconds` is the exporter's own interval: it
    determines when an unchanged page is stale and over which time a change of the energy counter is spread. A GPU that
    vanishes after one of `fatal_xids` is missing in any case.
    """

    name = "dcgm-exporter"

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        max_gap_seconds: float = LONGEST_READING_SECONDS,
        collect_interval_seconds: float = COLLECT_SECONDS,
        hostname: str = "",
        fatal_xids: Collection[int] = Policy().fatal_xids,
        lookup: Callable[[str], Spec | None] = find_spec,
        fetch: PageFetcher | None = None,
        node: ShownNode | None = None,
    ) -> None:
        """`node` is what an earlier source of the same address has seen."""
        self._url, self._model = redact_secrets(url), cache(partial(_known_model, lookup=lookup))
        self._fetch = HttpPageFetcher(url, timeout_seconds=timeout_seconds) if fetch is None else fetch
        self._page = DcgmExporterPage(self._url, hostname=hostname, node=node)
        self._max_gap, self._collect_interval = _nanoseconds(max_gap_seconds), _nanoseconds(collect_interval_seconds)
        self._boards: dict[str, _BoardState] = {}
        self._signals: frozenset[str] = frozenset()
        self._shows_free_gpus = False
        """A page had GPUs with pods and GPUs without: then one that a page does not have is not there."""
        self._leaves_out_free_gpus = False
        """Pages were seen that only an exporter makes which leaves out GPUs without a pod."""
        self._fatal_xids = frozenset(fatal_xids)

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Reading` on any page so far; profiling fields may first appear after some collections.

        By default dcgm-exporter exports neither `sm_active` nor NVLink rates.
        """
        return self._signals

    def probe(self) -> None:
        """Fetch the page once to determine `signals`; sets no baseline. Raises SourceError."""
        self._gpus([])

    def read(self, now: int) -> ReadResult:
        """Fetch the page; return one reading for each GPU and MIG instance that was also on the last page.

        Faults: malformed_line, conflicting_series, gpu_missing (gone while other GPUs are still there), blank (has no
        lines, and the page may leave out GPUs without a pod), mig_layout (the instances do not add up to a board, which
        then has no reading, or do not explain the board's own activity) and, once per GPU, unknown_model. Health is
        reported whenever a GPU's lines changed. Raises SourceError.
        """
        faults: list[Fault] = []
        readings: list[Reading] = []
        health: list[Health] = []
        gpus = self._gpus(faults)
        self._leaves_out_free_gpus |= self._shows_left_out(gpus)
        for uuid, gpu in gpus.items():
            state = self._update_board(uuid, gpu, faults)
            if gpu.lines != state.lines:
                state.lines, state.changed_at = gpu.lines, now
                board_health = health_of(uuid, gpu.figures, state.xids.new_xids(gpu))
                health += [board_health] if board_health != Health(uuid) else []
            readings += self._readings(state, gpu, now)
        faults += self._absent_faults(gpus)
        boards = sorted((state.devices for state in self._boards.values()), key=lambda devices: _sort_key(devices[0]))
        return ReadResult(
            tuple(d for devices in boards for d in devices),
            tuple(readings),
            tuple(faults),
            tuple(health),
            owner_labels=_owner_labels(gpus),
        )

    def resync(self) -> None:
        """Drop the baseline; keep the last page, to detect a stale one."""
        for state in self._boards.values():
            state.reset()

    def pause(self) -> None:
        """Drop the baseline; there is nothing to release, because the exporter's DCGM holds the counters.

        To free them for a profiler, use `dcgmi profile --pause`, and `--resume` afterwards. The exporter then exports
        no profiling fields.
        """
        self.resync()

    def close(self) -> None:
        """Close the connection."""
        self._fetch.close()

    def _gpus(self, faults: list[Fault]) -> dict[str, GpuLines]:
        gpus = self._page.read(self._fetch(), faults)
        for gpu in gpus.values():
            board = unpartitioned_figures(gpu) if gpu.instances else figures_of(gpu)
            parts = (instance_figures(gpu, instance) for instance in gpu.instances)
            self._signals = self._signals.union(board, *parts, {"energy_joules"} if _gives_energy(gpu) else ())
        return gpus

    def _update_board(self, uuid: str, gpu: GpuLines, faults: list[Fault]) -> _BoardState:
        """Update the state of a board from this page; a new MIG layout drops the baseline."""
        model, spec = self._model(gpu.model)
        if uuid not in self._boards:
            self._boards[uuid] = _BoardState((), XidTracker())
            faults += [unknown_model(uuid, gpu.model)] if spec is None else []
        state, new = self._boards[uuid], layout_of(gpu)
        state.pods = gpu.pods
        if new != state.layout:
            state.layout = new
            state.reset()
        lacks = NVLINK_SIGNALS if spec is not None and not spec.nvlink_bytes_per_second else ()
        condition = recovery_condition(gpu.figures.get("recovery_action", 0))
        board = Device(uuid, gpu.index, model, spec, lacks, condition)
        state.devices = devices_of(board, gpu) if gpu.instances else (board,)
        if not state.devices:
            state.devices = (board,)
            faults.append(_layout_fault(board, new))
        elif (activity := unexplained_activity(gpu)) is not None:
            faults.append(_activity_fault(board, *activity))
        return state

    def _readings(self, state: _BoardState, gpu: GpuLines, now: int) -> Iterator[Reading]:
        before, state.scraped_at = state.scraped_at, now
        unreadable = gpu.instances and len(state.devices) == 1
        if unreadable or before is None or before >= now:
            state.energy_counter, state.unreported_joules = gpu.figures.get("energy"), None
            return
        start = before if now - before <= self._max_gap else now - min(self._collect_interval, self._max_gap)
        joules = self._joules(state, gpu.figures.get("energy"), covers=now - start, whole=start == before)
        stale = self._stale(gpu, still=now - state.changed_at)
        if not gpu.instances:
            doubt = stale if gpu.has_figures else "blank"
            whole: dict[str, Any] = figures_of(gpu)
            yield Reading(
                uuid=state.devices[0].uuid, start=start, end=now, energy_joules=joules, distrust=doubt, **whole
            )
            return
        if joules is None and "power_watts" in gpu.figures:
            joules = gpu.figures["power_watts"] * (now - start) / SECOND
        for device in state.devices:
            yield _mig_reading(device, gpu, (start, now), joules, stale)

    def _absent_faults(self, gpus: Mapping[str, GpuLines]) -> Iterator[Fault]:
        """Yield a fault for each known GPU that is not on the page."""
        pods = frozenset[tuple[str, str]]().union(*(gpu.pods for gpu in gpus.values()))
        pods_only = may_leave_out_free_gpus(gpus.values())
        self._shows_free_gpus |= bool(pods) and not pods_only
        for uuid in sorted(self._boards.keys() - gpus.keys()):
            state = self._boards[uuid]
            state.reset()
            state.lines = set()  # when it returns, its lines count as changed, even if they are the same
            # A pod keeps its GPUs: one whose pod is still there was not freed.
            held = state.devices[0].condition == "missing" or not state.pods.isdisjoint(pods)
            # One without a pod went as the first pod came: nothing else than that mode does that.
            known = self._leaves_out_free_gpus or not state.pods
            failed = not self._fatal_xids.isdisjoint(state.xids.codes)
            free = pods_only and known and not (self._shows_free_gpus or held or failed)
            yield self._left_out(uuid) if free else self._missing(uuid)

    def _shows_left_out(self, gpus: Mapping[str, GpuLines]) -> bool:
        """Return whether this page shows that the exporter leaves out GPUs without a pod.

        That all GPUs have pods shows nothing: so it is on a fully occupied node with any exporter. A line for a virtual
        GPU does, and a GPU that arrives only with a pod, one that it did not leave with.
        """
        if any(gpu.virtual for gpu in gpus.values()):
            return True
        if not self._boards or not may_leave_out_free_gpus(gpus.values()):
            return False
        new = _BoardState((), XidTracker())
        states = ((gpu.pods, self._boards.get(uuid, new)) for uuid, gpu in gpus.items())
        return any(not state.lines and state.pods.isdisjoint(pods) for pods, state in states)

    def _left_out(self, uuid: str) -> Fault:
        return Fault(
            "blank",
            f"GPU {self._boards[uuid].devices[0].index} has no lines on {self._url}, whose other GPUs all have pods: it"
            " is not observed. With --kubernetes-virtual-gpus, releases up to 4.8.1 export only GPUs that have a pod:"
            " switch that off, update dcgm-exporter, or use the source nvml or dcgm",
            uuid,
        )

    def _missing(self, uuid: str) -> Fault:
        state = self._boards[uuid]
        state.devices = tuple(structs.replace(device, condition="missing") for device in state.devices)
        return Fault(
            "gpu_missing",
            f"GPU {state.devices[0].index} is gone from {self._url} while others are there: it fell off the bus"
            " or was taken from the exporter; look at `nvidia-smi` and `dmesg`",
            uuid,
        )

    def _stale(self, gpu: GpuLines, *, still: int) -> str:
        """Return "stale" if a GPU's lines have not changed for longer than plausible with a working exporter, else "".

        The energy counter of a powered board changes with every collection, and a busy board never repeats power and
        ratios exactly: limit 3 collections. An idle board without that counter may repeat values, but hardly its power
        in milliwatts 20 times in a row: limit 20. Without power there is no limit.
        """
        figures = gpu.figures
        busy = any(one.figures.get(name) for one in (gpu, *gpu.instances.values()) for name in _BUSY)
        collections = 3.0 if busy or figures.get("energy") else 20.0 if "power_watts" in figures else inf
        return "stale" if still > collections * self._collect_interval else ""

    def _joules(self, state: _BoardState, counter: float | None, *, covers: int, whole: bool) -> float | None:
        """Return the energy of a reading: the change of the counter, spread over about one collect interval.

        If scrapes are more frequent than collections, the counter is constant and then jumps, which would give 0 W,
        0 W, 2100 W. The sum over all readings equals the change of the counter. None until the counter has changed, if
        the reading does not cover all the time since the last one (not `whole`), and if the counter fell (driver
        reloaded).
        """
        if counter is None:
            return None
        before, state.energy_counter = state.energy_counter, counter
        if before is None or counter < before or not whole:
            state.unreported_joules = None
            return None
        if state.unreported_joules is None and counter == before:
            return None
        unreported = (state.unreported_joules or 0.0) + counter - before
        reported = unreported * min(1.0, covers / self._collect_interval)
        state.unreported_joules = unreported - reported
        return reported


def page_fetcher(config: Any) -> PageFetcher:
    """Return what fetches the page of `config.dcgm_exporter`; the default address is believed only if it was chosen."""
    section = config.dcgm_exporter
    fetch = HttpPageFetcher(section.url, timeout_seconds=section.timeout_seconds)
    if is_chosen(config, section, "url"):
        return fetch
    return TrustedPageFetcher(fetch, httpx.URL(section.url).port or 80)


_NODES: dict[tuple[str, str], ShownNode] = {}
"""By URL and host name. A refused page closes the source, and the next one must not take another node's page either."""


def open_dcgm_exporter(config: Any) -> DcgmExporterSource:
    """Open the exporter configured in `config.dcgm_exporter`. Raises SourceError if its page cannot be read now."""
    section = config.dcgm_exporter
    source = DcgmExporterSource(
        section.url,
        fetch=page_fetcher(config),
        max_gap_seconds=section.max_gap_seconds,
        collect_interval_seconds=section.collect_interval_seconds,
        hostname=section.hostname,
        fatal_xids=config.policy.fatal_xids,
        lookup=partial(find_spec, overrides=config.overrides()),
        node=_NODES.setdefault((section.url, section.hostname), ShownNode()),
    )
    try:
        source.probe()
    except SourceError:
        source.close()
        raise
    return source


_MOST_PARTS = 9
"""As many parts between dashes as the longest name of a board has."""


def _known_model(shown: str, *, lookup: Callable[[str], Spec | None]) -> tuple[str, Spec | None]:
    """Return the driver's name of a model and its spec; the name on the page and None if no spelling is known."""
    return next(((name, spec) for name in _spellings(shown) if (spec := lookup(name))), (shown, None))


def _spellings(shown: str) -> Iterator[str]:
    """Yield a name, then all that dcgm-exporter may have made it of with --replace-blanks-in-model-name."""
    yield shown
    parts = shown.split("-")
    if " " not in shown and len(parts) <= _MOST_PARTS:
        for joints in product(" -", repeat=len(parts) - 1):
            yield "".join(map("".join, zip(parts, (*joints, ""), strict=True)))


def _mig_reading(device: Device, gpu: GpuLines, span: tuple[int, int], joules: float | None, stale: str) -> Reading:
    """Make the reading of a MIG instance, or of the unpartitioned part; its energy is a share of the board's."""
    if device.parent:
        instance = device.uuid.removeprefix(device.parent + "/")
        figures: dict[str, Any] = instance_figures(gpu, instance)
        has_figures = bool(gpu.instances[instance].figures)
    else:
        figures, has_figures = unpartitioned_figures(gpu), gpu.has_figures
    share = None if joules is None else joules * device.weight / PPM
    distrust = stale if has_figures else "blank"
    if not (distrust or device.parent) and unexplained_activity(gpu) is not None:
        distrust = "mig_layout"
    return Reading(device.uuid, *span, energy_joules=share, distrust=distrust, **figures)


def _owner_labels(gpus: Mapping[str, GpuLines]) -> dict[str, frozenset[OwnerLabels]]:
    lines = {f"{uuid}/{name}": instance for uuid, gpu in gpus.items() for name, instance in gpu.instances.items()}
    return {uuid: frozenset(one.owner_labels) for uuid, one in {**gpus, **lines}.items() if one.owner_labels}


def _gives_energy(gpu: GpuLines) -> bool:
    return "energy" in gpu.figures or (bool(gpu.instances) and "power_watts" in gpu.figures)


def _activity_fault(board: Device, own: float, explained: float) -> Fault:
    return Fault(
        "mig_layout",
        f"GPU {board.index} is in MIG mode; its own line has an engine activity of {own:.1%}, and the instances on the"
        f" page explain {explained:.1%} at most: what is left of the board is not observed. Let dcgm-exporter export"
        " all instances (its option -d), or restart it after a change of instances",
        board.uuid,
    )


def _layout_fault(board: Device, parts: tuple[tuple[str, str], ...]) -> Fault:
    shown = ", ".join(f"{instance or '?'} {profile or '?'}" for instance, profile in parts)
    return Fault(
        "mig_layout",
        f"GPU {board.index} is in MIG mode, and its instances ({shown}) do not add up to a {board.model or 'board'}: it"
        " is not observed. Compare with `nvidia-smi mig -lgi`; after a change of instances restart dcgm-exporter",
        board.uuid,
    )


def _sort_key(device: Device) -> tuple[int, str, str]:
    index = whole_number(device.index)
    return (1 << 30 if index is None else index, device.index, device.uuid)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND / MS) * MS
