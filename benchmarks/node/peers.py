"""Our daemon beside others that read NVML in Python: the same stand-in library, the same machine, the same minutes.

Owns the comparison and the processes it starts. Peers come from the package index into an environment of their own
(`make .venv/peers/.installed`), as they are, with one reading a second. What cannot run here is quoted with its source,
in a table of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from benchmarks.figures import Row, percentile, row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.machine import ROOT
from benchmarks.node.peers_quoted import QUOTED
from benchmarks.rig.client import Client
from benchmarks.rig.daemon import cpu_seconds, memory, switches
from benchmarks.rig.stand_ins import GPUS
from tests.nvml_stub.build import build
from tests.ports import free_port

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PEERS = ROOT / ".venv" / "peers" / "bin"
_PATIENCE = 60.0
_OF_A_GPU = re.compile(r"[{,](?:gpu|gpu_id|uuid|index)=\"")
_AS_PROMETHEUS = {"Accept-Encoding": "gzip"}
_GETS = 200


class Peer(Struct, frozen=True, kw_only=True):
    """A program that serves GPU figures, and the words that start it; PORT and FOLDER are put in."""

    name: str
    words: tuple[str, ...]
    ours: bool = False
    tells: str
    """What its page says of a GPU, as read off it."""
    about: str = ""
    """How it differs in kind."""


OURS = Peer(
    name="gpu-efficiency-exporter", ours=True,
    words=(sys.executable, "-m", "exporter", "serve", "--source", "nvml", "--web.listen-address", "127.0.0.1:PORT"),
    tells="24 leaks of tensor, SM and DRAM activity, state, hang, energy, health: counters; whose and money if told",
    about="reads GPM samples and processes too; keeps counters and a store",
)  # fmt: skip
BASELINE = Peer(
    name="40 lines of prometheus_client",
    words=(sys.executable, "-m", "benchmarks.node.peer_baseline", "PORT"),
    tells="utilisation, memory, power, temperature, clock: gauges",
    about="`benchmarks/node/peer_baseline.py`: the least that can be done",
)
OTHERS = (
    Peer(
        name="nvitop-exporter 1.7.2",
        words=(f"{PEERS / 'nvitop-exporter'}", "--bind-address", "127.0.0.1", "--port", "PORT", "--interval", "1"),
        tells="utilisation, memory, power, temperature, clocks, processes, and the host: gauges",
        about="serves NaN for what the stand-in lacks, which a real board would be asked for",
    ),
    Peer(
        name="glances 4.5.8, GPUs alone",
        words=(f"{PEERS / 'glances'}", "-C", "FOLDER/glances.conf", "--export", "prometheus", "-q", "-t", "1",
               "--disable-plugin", "all", "--enable-plugin", "gpu"),
        tells="utilisation, memory share, temperature: gauges",
        about="a monitor of whole machines; all but its GPU plugin is switched off",
    ),
)  # fmt: skip
_GLANCES = (
    "[prometheus]\nhost=127.0.0.1\nport=PORT\nprefix=glances\nlabels=src:glances\n[gpu]\ndisable=False\nrefresh=1\n"
)


class Running(Struct, frozen=True):
    """A peer that answers, and where."""

    peer: Peer
    pid: int
    port: int


class Seen(Struct, frozen=True, kw_only=True):
    """What was measured of one peer. CPU in percent of a core by slice, memory in MiB, times in ms."""

    peer: Peer
    idle: list[float]
    scraped: list[float]
    resident: float
    switches: float
    """A second, idle."""
    times: list[float]
    series: int
    size: int


class Pace(Struct, frozen=True):
    """How long to watch."""

    warm_up: float
    slices: int
    seconds: float


FULL, QUICK = Pace(10.0, 5, 10.0), Pace(2.0, 1, 2.0)


@contextmanager
def started(peer: Peer, environ: Mapping[str, str], folder: Path) -> Iterator[Running]:
    """Start one and wait for its first page; ended by its own handle. Raises RuntimeError where none comes."""
    port = free_port()
    (folder / "glances.conf").write_text(_GLANCES.replace("PORT", f"{port}"))
    words = [word.replace("FOLDER", f"{folder}").replace("PORT", f"{port}") for word in peer.words]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environ}, stdout=said, stderr=said)
        try:
            _await(port, process, peer)
            yield Running(peer, process.pid, port)
        finally:
            process.terminate()
            try:
                process.wait(timeout=_PATIENCE)
            finally:
                process.kill()


def _await(port: int, process: subprocess.Popen[bytes], peer: Peer) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            with Client(port) as client:
                if gpu_series(client.get()[1].decode()):
                    return
        except (OSError, RuntimeError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{peer.name} serves nothing of a GPU (exit status {process.poll()}), so it cannot be measured")


def gpu_series(page: str) -> list[str]:
    """Series of a page that name their GPU: what a node, a job, a process or a host says of itself is not counted."""
    return [line for line in page.splitlines() if line[:1] != "#" and _OF_A_GPU.search(line)]


def peers(which: Sequence[Peer] = (OURS, BASELINE, *OTHERS), pace: Pace = FULL) -> Measured:
    """Run all side by side: watch them alone, then scraped once a second, then ask each as fast as it answers."""
    if missing := [peer.name for peer in which if not Path(peer.words[0]).exists()]:
        raise RuntimeError(f"{', '.join(missing)} not installed: make .venv/peers/.installed")
    library = f"{build()}"
    with ExitStack() as stack:
        running = []
        for peer in which:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            environ = {"LD_LIBRARY_PATH": library, "STATE_DIRECTORY": f"{folder}", "HOME": f"{folder}"}
            running.append(stack.enter_context(started(peer, environ, folder)))
        seen = watched(running, pace)
    return Measured(rows=list(rows(seen, pace)), tables=[table(seen), QUOTED], curves=curves(seen))


def watched(running: Sequence[Running], pace: Pace) -> list[Seen]:
    """Three looks at each: idle, scraped, asked again and again."""
    time.sleep(pace.warm_up)
    begun, before = time.monotonic(), [switches(one.pid) for one in running]
    idle = _slices(running, pace, [])
    rates = [(switches(one.pid) - old) / (time.monotonic() - begun) for one, old in zip(running, before, strict=True)]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(one.port)) for one in running]
        scraped = _slices(running, pace, clients)
        pages = [client.get()[1] for client in clients]
        times = [_times(client) for client in clients]
    return [
        Seen(
            peer=one.peer, idle=idle[n], scraped=scraped[n], resident=memory(one.pid).peak, switches=rates[n],
            times=times[n], series=len(gpu_series(pages[n].decode())), size=len(pages[n]),
        )
        for n, one in enumerate(running)
    ]  # fmt: skip


def _slices(running: Sequence[Running], pace: Pace, clients: Sequence[Client]) -> list[list[float]]:
    """Percent of a core that each used, slice by slice; with `clients` each is scraped once a second."""
    found: list[list[float]] = [[] for _ in running]
    for _ in range(pace.slices):
        looks = [(time.perf_counter(), cpu_seconds(one.pid)) for one in running]
        for _ in range(round(pace.seconds)):
            time.sleep(1)
            for client in clients:
                client.get(headers=_AS_PROMETHEUS)
        for each, one, (at, cpu) in zip(found, running, looks, strict=True):
            each.append(100 * (cpu_seconds(one.pid) - cpu) / (time.perf_counter() - at))
    return found


def _times(client: Client) -> list[float]:
    times = []
    for _ in range(_GETS):
        begun = time.perf_counter()
        client.get(headers=_AS_PROMETHEUS)
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def rows(seen: Sequence[Seen], pace: Pace) -> Iterator[Row]:
    """Ours; who is cheaper is in the table."""
    often = f"{pace.slices} x {pace.seconds:.0f} s"
    for one in seen:
        if one.peer.ours:
            yield row("peers", "CPU of one core, ours, scraped once a second", often=often, values=one.scraped,
                      unit="%", digits=2)  # fmt: skip
            yield row("peers", "Resident memory, ours", often="peak", values=[one.resident], unit="MiB", spread="-")


def table(seen: Sequence[Seen]) -> Table:
    """A line a program."""
    lines = tuple(
        (
            one.peer.name, f"{median(one.idle):.2f} %", f"{median(one.scraped):.2f} %", f"{one.resident:.0f} MiB",
            f"{one.switches:.0f} /s", f"{median(one.times):.1f} / {percentile(one.times, 0.99):.1f} ms",
            f"{one.series / GPUS:.0f}", f"{one.size / 1000:.0f} kB", one.peer.tells, one.peer.about,
        )
        for one in seen
    )  # fmt: skip
    head = (
        "program", "CPU, nobody asks", "CPU, scraped each second", "memory, peak", "switches", "scrape, median / p99",
        "series a GPU", "page", "what it tells of a GPU", "in kind",
    )  # fmt: skip
    about = f"{GPUS} GPUs, a reading a second, all at the same time; CPU is of one core, the median of the slices."
    return Table(about=about, head=head, rows=lines)


# -- the picture --


def curves(seen: Sequence[Seen]) -> Curves:
    """Three figures a program."""
    return {
        "names": [one.peer.name for one in seen],
        "ours": [one.peer.ours for one in seen],
        "CPU, scraped each second, %": [median(one.scraped) for one in seen],
        "resident memory, peak, MiB": [one.resident for one in seen],
        "scrape, 99th percentile, ms": [percentile(one.times, 0.99) for one in seen],
        "series a GPU": [one.series / GPUS for one in seen],
    }


def draw(figure: Figure, told: Curves) -> None:
    """Four rows of bars, a program a bar."""
    from benchmarks.drawing import COLOURS  # noqa: PLC0415 - the tables need no matplotlib

    figures = [name for name in told if name not in ("names", "ours")]
    places = range(len(told["names"]))
    colours = [COLOURS[0] if ours else COLOURS[5] for ours in told["ours"]]
    for axes, name in zip(figure.subplots(1, len(figures), sharey=True), figures, strict=True):
        bars = axes.barh(places, told[name], color=colours, height=0.6)
        axes.bar_label(bars, fmt="{:.1f}" if max(told[name]) < 20 else "{:.0f}", padding=3, fontsize=9)
        axes.set_xlabel(name, fontsize=9)
        axes.set_yticks(places, told["names"])
        axes.invert_yaxis() if axes.get_subplotspec().is_first_col() else None
        axes.margins(x=0.25)
        axes.grid(visible=False)
        axes.tick_params(axis="x", labelsize=8)
    title = "What it costs to say more: eight GPUs, one reading a second, the same library beneath"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=12)


SIDE_BY_SIDE = Group(
    name="peers",
    title="Beside others",
    about=(
        "Whole processes, each over the stand-in NVML (`tests/nvml_stub`), whose boards move on, all at the same time "
        "on the same two cores; watched through the process's CPU clock and /proc. Peers are the releases named, from "
        "the package index, as they are but for an interval of one second (nvitop-exporter's default, not glances'). "
        "Seven functions that nvitop calls are not in the stand-in; it asks for each once and goes on: its figures are "
        "too low by those. No process is real. Scrapes ask for gzip, as Prometheus does. The driver's own time is in "
        "none of these figures. Where a peer is cheaper, it reads and says less: see the last columns."
    ),
    measures=(
        "exporter/agent", "exporter/cli", "exporter/core", "exporter/history", "exporter/web", "exporter/schedulers",
        "exporter/sources", "benchmarks/node/peer_baseline.py", "requirements.peers.lock",
    ),
    run=peers,
    quick=lambda: peers((OURS, BASELINE), QUICK),
    pictures=(
        Picture(
            name="peers", draw=draw, inches=(11.0, 3.4),
            words="Bars for our daemon, forty lines of prometheus_client, nvitop-exporter and glances: processor, "
            "memory, time of a scrape and series a GPU.",
        ),
    ),
)  # fmt: skip
