"""The whole daemon under faults that need a real one: its driver, disk, sockets and processor are taken from it.

Owns what is done to it, from outside, and what its pages say before, meanwhile and after. The driver is the stand-in
NVML, the disk the failing one of tests/history; each page is held against the one before by those tests' own law.
Refuses to look into the process.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path

import httpx
from msgspec import Struct

from tests.e2e.running import Page
from tests.fuzz.day import Met
from tests.history.disk.build import Disk
from tests.history.served import GPUS, Node, Served

SECONDS = 6.0
_RECOVERY = 60.0
_INTERVAL = 0.2
_TIMEOUT = 3.0
_BOOKS = re.compile(r"gpu_efficiency_(?:job_)?(?:paid_|unobserved_)?seconds_total|gpu_efficiency_energy_joules_total")
"""What Prometheus adds up over the daemon's lives."""
_FLOOD = 5_000
_SOCKETS = 400
_FILES = 24
"""What it may have open when files are short: fewer than it has at that moment, so that it gets no more."""


class Rig(Struct):
    """One node, and the daemon's life that is on now."""

    node: Node
    disk: Disk
    folder: Path
    served: Served
    stack: ExitStack

    def world(self, *lines: str) -> None:
        """From now on the boards are so; without lines they are well."""
        draft = self.folder / "draft.txt"
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self.folder / "world.txt")

    @property
    def pid(self) -> int:
        """Of the life that is on."""
        return self.served.program.process.pid


class Fault(Struct, frozen=True, kw_only=True):
    """What is done while the block lasts."""

    what: str
    during: Callable[[Rig], contextlib.AbstractContextManager[None]]
    seen: str
    seconds: float = SECONDS


class Lived(Struct):
    """What the daemon went through."""

    met: list[Met] = []
    pages: int = 0
    refused: int = 0
    """Scrapes without an answer while the daemon was there."""
    broken: list[str] = []
    """Pages that broke a law: parts that do not add up, counters that fell."""
    lost: float = 0.0
    """GPU-seconds by which all that was paid misses GPUs times the time from first to last page."""
    seconds: float = 0.0
    lives: int = 1
    curve: list[list[float]] = []
    """Second, and share of the boards that was observed then; -1: no answer."""
    log: dict[str, str] = {}
    """The first line that the log got during a fault."""


# -- the faults --


@contextmanager
def _world(rig: Rig, *lines: str) -> Iterator[None]:
    rig.world(*lines)
    yield
    rig.world()


@contextmanager
def _disk(rig: Rig, rule: str) -> Iterator[None]:
    rig.disk.fails(rule)
    yield
    rig.disk.fails()


@contextmanager
def _stopped(rig: Rig) -> Iterator[None]:
    os.kill(rig.pid, signal.SIGSTOP)
    yield
    os.kill(rig.pid, signal.SIGCONT)


@contextmanager
def _few_files(rig: Rig) -> Iterator[None]:
    """Its limit falls below what it has open, and a crowd takes every connection that it can get."""
    before = resource.prlimit(rig.pid, resource.RLIMIT_NOFILE)
    with ExitStack() as crowd:
        resource.prlimit(rig.pid, resource.RLIMIT_NOFILE, (_FILES, before[1]))
        for _ in range(_SOCKETS):
            sock = crowd.enter_context(socket.socket())
            sock.settimeout(0)
            sock.connect_ex(("127.0.0.1", rig.served.port))
        yield
    resource.prlimit(rig.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def _no_jobs(rig: Rig) -> Iterator[None]:
    away = rig.folder / "jobs-away"
    rig.node.jobs.folder.rename(away)
    yield
    away.rename(rig.node.jobs.folder)


@contextmanager
def _flood(rig: Rig) -> Iterator[None]:
    """As many messages as it takes, from a process of no job, and some that are none."""
    sent = 0
    while sent < _FLOOD:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.05)
            sock.connect(f"{rig.folder / 'reports.sock'}")
            for _ in range(200):
                sock.send(b'{"v":1,"step":1,"seconds":0.1}' if sent % 2 else b"[" * 3000)
                sent += 1
        sent += 1
    yield


@contextmanager
def _killed(rig: Rig) -> Iterator[None]:
    """As the kernel ends who takes too much memory; a supervisor starts it again after the block."""
    rig.served.kill()
    yield
    rig.stack.close()
    rig.served = rig.stack.enter_context(rig.node.running())


FAULTS: tuple[Fault, ...] = (
    Fault(
        what="NVML hangs",
        during=lambda rig: _world(rig, "sleep nvmlDeviceGetPowerUsage 15000"),
        seen="source_hung",
        seconds=20.0,
    ),
    Fault(what="the driver is gone", during=lambda rig: _world(rig, "driver gone"), seen="source_failed"),
    Fault(what="one GPU falls off the bus", during=lambda rig: _world(rig, "gpu 3 lost"), seen="gpu_lost"),
    Fault(what="the disk is full", during=lambda rig: _disk(rig, "write * 1 0 ENOSPC"), seen="history_up 0"),
    Fault(what="the disk hangs", during=lambda rig: _disk(rig, "sync * 1 0 hang"), seen="history_up 0"),
    Fault(what="no file descriptor is left", during=_few_files, seen="no answer to new scrapes"),
    Fault(what="the process is stopped", during=_stopped, seen="late_ticks_total"),
    Fault(what="the scheduler's directory is gone", during=_no_jobs, seen="scheduler_failed"),
    Fault(what="a flood of reports", during=_flood, seen="workload_messages_total", seconds=2.0),
    *[Fault(what="kill -9, started again", during=_killed, seen="exporter_down", seconds=3.0)] * 3,
)


def lived(faults: tuple[Fault, ...] = FAULTS, *, scale: float = 1.0) -> Lived:
    """Begin, meet each fault in turn, end. Raises RuntimeError where the daemon does not start."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, found = Path(name), Lived()
        disk = Disk(folder)
        env = {"GPU_EFFICIENCY_HISTORY_CHECKPOINT_SECONDS": "1", **disk.env}
        env |= {"GPU_EFFICIENCY_REPORTS_SOCKET": f"{folder / 'reports.sock'}"}
        node = _Reporting(folder, store=disk.folder / "history.db", env=env)
        for gpu in range(GPUS // 2):
            node.jobs.begin(gpu)
        try:
            rig = Rig(node, disk, folder, stack.enter_context(node.running()), stack)
            _through(rig, faults, found, scale)
        except AssertionError as error:
            raise RuntimeError(f"the daemon does not go on: {error}") from error
    return found


class _Reporting(Node):
    """A Node whose daemon listens to reports, too: its own environment would switch that off."""

    def __init__(self, folder: Path, *, store: Path, env: dict[str, str]) -> None:
        super().__init__(folder, store=store, env=env)
        self._env |= env


def _through(rig: Rig, faults: tuple[Fault, ...], found: Lived, scale: float) -> None:
    watch = _Watch(rig, found)
    first = watch.well(watch.begun)
    for fault in faults:
        watch.meet(fault, fault.seconds * scale)
    last = watch.well(time.monotonic())
    found.seconds = watch.at - watch.first_at
    found.lost = float(last.total("paid_seconds_total") - first.total("paid_seconds_total")) - GPUS * found.seconds
    found.lives = 1 + sum("kill" in fault.what for fault in faults)


class _Watch:
    """The pages, one after the other."""

    def __init__(self, rig: Rig, found: Lived) -> None:
        self._rig, self._found = rig, found
        self.begun = time.monotonic()
        self.at = self.first_at = 0.0
        self._told: dict[tuple[str, frozenset[tuple[str, str]]], Decimal] = {}

    def meet(self, fault: Fault, seconds: float) -> None:
        """One fault, and its recovery."""
        found, before = self._found, self.well(time.monotonic())
        began, log = time.monotonic(), len(self._rig.served.program.log())
        with fault.during(self._rig):
            while time.monotonic() < began + seconds:
                self._look(quiet="kill" in fault.what or "stopped" in fault.what)
        ended = time.monotonic()
        after = self.well(ended)
        lasted = ended - began
        met = Met(fault.what, (began - self.begun) / 3600, lasted, recovered=time.monotonic() - ended)
        met.unobserved = float(after.total("unobserved_seconds_total") - before.total("unobserved_seconds_total"))
        met.paid = float(after.total("paid_seconds_total") - before.total("paid_seconds_total"))
        met.reasons, met.kinds = _grown(before, after, "reason", "unobserved_seconds_total"), _kinds(before, after)
        lines = self._rig.served.program.log()[log if "kill" not in fault.what else 0 :].splitlines()
        found.log.setdefault(
            fault.what, next((line for line in lines if "warn" in line.lower() or "error" in line.lower()), "")
        )
        found.met.append(met)

    def well(self, since: float) -> Page:
        """The first page on which all boards are seen, the store is kept, and a tick has come."""
        while time.monotonic() < since + _RECOVERY:
            page = self._look(quiet=True)
            if page is not None and _is_well(page):
                return page
        raise AssertionError(f"not well again after {_RECOVERY:g} s")

    def _look(self, *, quiet: bool = False) -> Page | None:
        """A page, judged; where there is none, or it breaks a law, that is kept."""
        page = None
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"http://127.0.0.1:{self._rig.served.port}/metrics", timeout=_TIMEOUT, trust_env=False)
            page = Page(answer.text) if answer.status_code == httpx.codes.OK else None
        if page is not None:
            self._judge(page)
        self.at = time.monotonic()
        self.first_at = self.first_at or self.at
        self._found.refused += page is None and not quiet
        seen = -1.0 if page is None else sum(_seen(state) for state, _ in page.states().values()) / GPUS
        self._found.curve.append([round(self.at - self.begun, 2), seen])
        time.sleep(_INTERVAL)
        return page

    def _judge(self, page: Page) -> None:
        """Its parts must add up, and no counter of the books may be less than before, in whatever life."""
        self._found.pages += 1
        try:
            page.keeps_the_law()
        except AssertionError as error:
            self._found.broken.append(f"{error}"[:200])
        books = {key: value for key, value in page.samples.items() if _BOOKS.fullmatch(key[0])}
        fell = [key for key, value in books.items() if value < self._told.get(key, value)]
        self._found.broken += [f"{name} fell" for name, _ in fell]
        self._told |= books


def _seen(state: str) -> bool:
    return state not in ("unobserved", "unavailable")


def _is_well(page: Page) -> bool:
    states = page.states()
    return len(states) == GPUS and all(_seen(state) for state, _ in states.values()) and page.total("history_up") == 1


def _grown(before: Page, after: Page, label: str, name: str) -> dict[str, float]:
    old = before.by(label, name)
    grown = {key: float(value) - float(old.get(key, 0)) for key, value in after.by(label, name).items()}
    return {key: round(value, 1) for key, value in grown.items() if value > 0}


def _kinds(before: Page, after: Page) -> dict[str, int]:
    """What a page counts of failures; a new life counts its own from nought."""
    found = _grown(before, after, "kind", "faults_total") | _grown(before, after, "outcome", "workload_messages_total")
    late = float(after.total("late_ticks_total") - before.total("late_ticks_total"))
    failed = float(after.total("history_failures_total") - before.total("history_failures_total"))
    found |= {"late ticks": late} if late > 0 else {}
    found |= {"history_failures": failed} if failed > 0 else {}
    return {key: int(value) for key, value in found.items()}
