"""Whole daemons of several sizes side by side, watched through phases: alone, and scraped by three Prometheus servers.

Owns the phases and what is seen in them, from outside the daemons but for the notes of `benchmarks.rig.noted`. Refuses
to judge, and to call a daemon by a case it is not.
"""

import os
import re
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.rig.client import METRICS, Client
from benchmarks.rig.daemon import Daemon, cpu_seconds, memory, running, switches
from benchmarks.rig.noted import Note, notes, per_tick
from benchmarks.rig.scrapers import Scrapers, scraping
from benchmarks.rig.stand_ins import CUT, INSTANCES, environment

SERVERS = 3
SCRAPED = {"15 s": 15, "1 s": 1}
"""Phases after the one alone, by their names: seconds between two scrapes of each server."""
ALONE = "alone"
_SERVE = ("serve", "--web.listen-address", "127.0.0.1:0", "--source", "nvml", "--scheduler", "mapping-dir")
_AS_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}
_DEVICE, _JOB, _SERIES = (
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^gpu_efficiency_paid_seconds_total\{",
        r'^gpu_efficiency_job_info\{.*?job_id="([^"]+)"',
        r"^[^#\n]",
    )
)


class Case(Struct, frozen=True):
    """A node: boards, whether each is cut into seven instances, readings a second, and jobs that hold its GPUs."""

    gpus: int
    hertz: int
    jobs: int
    cut: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """Where a job can be: names of the files that say so."""
        boards = range(self.gpus)
        if not self.cut:
            return tuple(f"{board}" for board in boards)
        return tuple(f"{board}.{instance}" for board in boards for instance in range(1, 1 + INSTANCES))

    @property
    def devices(self) -> int:
        """What is accounted for: what no instance has of a board is one more."""
        return len(self.places) + (self.gpus if self.cut else 0)

    @property
    def size(self) -> str:
        """In words."""
        if self.cut:
            return f"{self.gpus * INSTANCES} MIG instances"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"

    @property
    def words(self) -> str:
        """All of it, in words."""
        return f"{self.size}, {self.hertz} Hz, {self.jobs} job{'' if self.jobs == 1 else 's'}"


class Pace(Struct, frozen=True):
    """How long to look, in seconds, and how often."""

    warm_up: float = 10.0
    slices: int = 3
    slice: float = 5.0
    seldom: float = 30.0
    """The phase of one scrape in fifteen seconds: two of each server, and never none at its edges."""
    asking: float = 10.0
    """GETs of our own, each daemon in turn, while the servers go on scraping."""
    between: float = 0.005
    """Between two of them."""
    counted: float = 5.0
    due: float = 0.9
    """Share of the ticks due that must have come, or the row would be mislabelled."""


QUICK = Pace(warm_up=2.0, slices=1, slice=4.0, seldom=16.0, asking=0.5, between=0.0, counted=2.5, due=0.3)


class Page(Struct, frozen=True):
    """What a daemon says of itself."""

    devices: int
    jobs: int
    series: int


class Seen(Struct, kw_only=True):
    """What was seen of one daemon; by phase where it differs."""

    came: dict[str, float] = {}
    """Share of the ticks due that came."""
    cpu: dict[str, list[float]] = {}
    """Percent of a core, slice by slice."""
    peak: dict[str, float] = {}
    """MiB resident at most since the start."""
    switches: dict[str, float] = {}
    """A second."""
    late: dict[str, list[float]] = {}
    """Milliseconds by which each tick came late."""
    servers: dict[str, list[float]] = {}
    """Milliseconds of each scrape, as the servers tell them."""
    gets: list[float] = []
    """Milliseconds of each GET, while the servers scrape every second."""
    allocations: float = 0.0
    """A tick, median."""
    kib: float = 0.0
    """Allocated a tick, median."""
    page: Page = Page(0, 0, 0)


class Watched(Struct, frozen=True):
    """A daemon that runs."""

    case: Case
    daemon: Daemon
    file: Path
    """Its notes."""


class _Look(Struct, frozen=True):
    at: float
    """`time.monotonic`, which the notes are in as well."""
    cpu: float
    switches: int


def watch(cases: Sequence[Case], pace: Pace) -> list[Seen]:
    """Run daemons for all `cases` at once through all phases. RuntimeError where one does something else."""
    with ExitStack() as stack:
        watched = [_started(stack, case) for case in cases]
        time.sleep(pace.warm_up)
        seen = _phases(watched, pace)
        for one, found in zip(watched, seen, strict=True):
            found.page = page_of(one)
            check(one.case, found, due=pace.due)
        _count(watched, seen, pace.counted)
    return seen


def _started(stack: ExitStack, case: Case) -> Watched:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "jobs").mkdir()
    for name, text in held(case).items():
        (folder / "jobs" / name).write_text(text, encoding="ascii")
    told = {
        "GPU_EFFICIENCY_SAMPLING_INTERVAL_SECONDS": f"{1 / case.hertz}",
        "GPU_EFFICIENCY_MAPPING_DIR_PATH": f"{folder / 'jobs'}",
    }
    lines = (f"count {case.gpus}", *([CUT] if case.cut else []))
    words = ["-m", "benchmarks.rig.noted", f"{folder / 'notes'}", *_SERVE]
    daemon = stack.enter_context(running(words, {**environment("nvml", folder, *lines), **told}))
    return Watched(case, daemon, folder / "notes")


def held(case: Case) -> dict[str, str]:
    """Who holds what: files by their names, jobs dealt out in turn; where there are more than places, they share."""
    dealt: dict[str, str] = defaultdict(str)
    for number in range(case.jobs):
        dealt[case.places[number % len(case.places)]] += f"{41_000 + number}\n"
    return dict(dealt)


def page_of(one: Watched) -> Page:
    """Ask a daemon for its page."""
    with Client(one.daemon.port) as client:
        return page_in(client.get()[1].decode())


def page_in(text: str) -> Page:
    """Read what a daemon says of itself off its /metrics."""
    return Page(
        devices=len(_DEVICE.findall(text)),
        jobs=len(set(_JOB.findall(text))),
        series=len(_SERIES.findall(text)),
    )


def check(case: Case, seen: Seen, *, due: float) -> None:
    """Raise RuntimeError for a daemon that did something else than its case says, or in which nothing was seen."""
    page, came = seen.page, seen.came[ALONE]
    if not (seen.gets and all(seen.late.values()) and all(seen.servers.values())):
        raise RuntimeError(f"{case.words}: no tick or no scrape in one of the phases; is the machine busy?")
    if (page.devices, page.jobs) != (case.devices, case.jobs) or came < due:
        raise RuntimeError(
            f"{case.words}: {page.devices} devices, {page.jobs} jobs and {100 * came:.0f} % of the ticks that were due:"
            " this measured something else; is the machine busy?"
        )


# -- phases --


def _phases(watched: Sequence[Watched], pace: Pace) -> list[Seen]:
    seen = [Seen() for _ in watched]
    _look_on(watched, seen, ALONE, slices=pace.slices, seconds=pace.slice)
    ports = [one.daemon.port for one in watched]
    first, *_ = SCRAPED.values()
    with (
        tempfile.TemporaryDirectory() as folder,
        scraping(Path(folder), ports, servers=SERVERS, seconds=first) as scrapers,
    ):
        for name, seconds in SCRAPED.items():
            _scraped(watched, seen, scrapers, (name, seconds), pace)
        for found, gets in zip(seen, _gets(ports, pace), strict=True):
            found.gets = gets
    return seen


def _scraped(
    watched: Sequence[Watched], seen: Sequence[Seen], scrapers: Scrapers, phase: tuple[str, int], pace: Pace
) -> None:
    """One phase under the servers: a slice where scrapes are seldom must hold as many as the next."""
    name, seconds = phase
    scrapers.pace(seconds)
    slices, lasts = (pace.slices, pace.slice) if seconds == 1 else (1, pace.seldom)
    _look_on(watched, seen, name, slices=slices, seconds=lasts)
    told = scrapers.durations(slices * lasts)
    until = time.monotonic() + 2 * seconds + 2
    while not all(told[one.daemon.port] for one in watched) and time.monotonic() < until:
        time.sleep(
            0.5
        )  # the first scrape comes up to an interval after the servers begin, and is stored a little later
        told = scrapers.durations(slices * lasts)
    for one, found in zip(watched, seen, strict=True):
        found.servers[name] = list(told[one.daemon.port])


def _look_on(watched: Sequence[Watched], seen: Sequence[Seen], name: str, *, slices: int, seconds: float) -> None:
    looks = [[_look(one.daemon.pid)] for one in watched]
    for _ in range(slices):
        time.sleep(seconds)
        for one, each in zip(watched, looks, strict=True):
            each.append(_look(one.daemon.pid))
    for one, each, found in zip(watched, looks, seen, strict=True):
        first, last = each[0], each[-1]
        found.cpu[name] = [100 * (new.cpu - old.cpu) / (new.at - old.at) for old, new in pairwise(each)]
        found.peak[name] = memory(one.daemon.pid).peak
        found.switches[name] = (last.switches - first.switches) / (last.at - first.at)
        found.late[name] = list(late(notes(one.file), first.at, last.at))
        found.came[name] = len(found.late[name]) / round((last.at - first.at) * one.case.hertz)


def _look(pid: int) -> _Look:
    return _Look(time.monotonic(), cpu_seconds(pid), switches(pid))


def late(noted: Sequence[Note], start: float, end: float) -> Iterator[float]:
    """Milliseconds by which each tick that was due between two moments came late."""
    return (note.late_ms for note in noted if start <= note.due / 1e9 < end)


def _gets(ports: Sequence[int], pace: Pace) -> list[list[float]]:
    """Milliseconds of GETs as Prometheus asks, each daemon in turn, so that a busy moment falls on all alike."""
    times: Mapping[int, list[float]] = {port: [] for port in ports}
    with ExitStack() as stack:
        clients = {port: stack.enter_context(Client(port)) for port in ports}
        until = time.monotonic() + pace.asking
        while time.monotonic() < until:
            for port, client in clients.items():
                began = time.perf_counter()
                client.get(METRICS, _AS_PROMETHEUS)
                times[port].append((time.perf_counter() - began) * 1e3)
                time.sleep(pace.between)
    return list(times.values())


def _count(watched: Sequence[Watched], seen: Sequence[Seen], seconds: float) -> None:
    """What a tick allocates; nobody scrapes any more."""
    for one in watched:
        os.kill(one.daemon.pid, signal.SIGUSR1)
    time.sleep(seconds)
    for one, found in zip(watched, seen, strict=True):
        counted = list(per_tick(notes(one.file)))
        if not counted:
            raise RuntimeError(f"{one.case.words}: no allocation was counted; is the machine busy?")
        found.allocations = median(calls for calls, _ in counted)
        found.kib = median(size for _, size in counted) / 1024
