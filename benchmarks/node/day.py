"""A day at once: 86,400 ticks through the core, its snapshot and its text; and whether anything is left of it.

Owns these measurements, of processes of their own (`benchmarks.node.day_played`) and of a live daemon beside them that
is scraped all the time and whose open files and threads are counted. None of them is timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from benchmarks.figures import Row, row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.machine import ROOT
from benchmarks.node.day_played import SCRAPE, Day, Point
from benchmarks.node.working_day import HOUR, ROUND_HOURS
from benchmarks.rig.client import Client
from benchmarks.rig.daemon import Daemon, running
from benchmarks.rig.stand_ins import GPUS, environment
from exporter.core.model import SECOND

if TYPE_CHECKING:  # drawing alone needs it
    from matplotlib.figure import Figure

DAY, DCGM_HOURS = 24 * HOUR, 9
CORE_BUDGET, DCGM_BUDGET = 8.0, 16.0
"""KiB an hour: one pointer kept each tick would be 28. The allocator takes pages in steps of a hundred KiB or so, which
weigh more in a shorter run."""
_SERVE = (
    "-m", "exporter", "serve", "--web.listen-address", "127.0.0.1:0", "--source", "nvml",
    "--sampling.interval-seconds", "0.1",
)  # fmt: skip


class Open(Struct, frozen=True):
    """What a daemon holds open."""

    files: int
    threads: int


def day(*, quick: bool = False) -> Measured:
    """Tell a day to the core, and nine hours to the DCGM source, while a daemon lives."""
    spans = {"core": DAY, "dcgm": DCGM_HOURS * HOUR}
    if quick:
        spans = {"core": 1200, "dcgm": 1200}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        stand_in = {**os.environ, **environment("dcgm", Path(folder))}
        runs = {what: pool.submit(_child, what, seconds, stand_in) for what, seconds in spans.items()}
        before, after, scrapes = lived(runs["core"].done)
        core, dcgm = (runs[what].result() for what in spans)
    lines = [*core_rows(core, spans["core"]), *_dcgm_rows(dcgm), *open_rows(before, after, scrapes)]
    return Measured(rows=lines, tables=[hours(core)], curves=_curves(core, dcgm))


def _child(what: str, seconds: int, stand_in: dict[str, str]) -> Day:
    words = [sys.executable, "-m", "benchmarks.node.day_played", what, str(seconds)]
    done = subprocess.run(words, cwd=ROOT, env=stand_in, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Day)


# -- rows --


def core_rows(core: Day, seconds: int) -> list[Row]:
    """Of the day: what is left over at its end, of time, of memory and of series."""
    often = f"{seconds:,} ticks of {GPUS} GPUs, {core.jobs} jobs"
    wrong = abs(core.paid_ns - GPUS * seconds * SECOND)
    once = partial(row, "day", often=often, spread="-")
    settled = _settled(core.points)
    return [
        once("Conservation errors of the ledger", values=[core.conservation_errors], unit="", digits=0, budget=0),
        once("GPU time of the day that is in no account, or in two", values=[wrong], unit="ns", digits=0, budget=0),
        *_memory("core, snapshot, text", core.points),
        _growth("core, snapshot, text", core.points, CORE_BUDGET),
        row(
            "day", "Live objects of Python's, gained an hour (core, snapshot, text)", often=f"{len(settled)} looks",
            values=[slope(settled, lambda point: point.blocks)], unit="blocks", spread=_extent(settled, "blocks"),
        ),
        *_series(core.points),
    ]  # fmt: skip


def _memory(about: str, points: list[Point]) -> list[Row]:
    places = (points[0], _settled(points)[0], points[-1])
    return [
        row(
            "day", f"Resident memory after {point.second / HOUR:.1f} h ({about})", often="once",
            values=[point.kib / 1024], unit="MiB", digits=2, spread="-",
        )
        for point in places
    ]  # fmt: skip


def _growth(about: str, points: list[Point], budget: float) -> Row:
    settled = _settled(points)
    return row(
        "day", f"Resident memory gained an hour ({about})", often=f"{len(settled)} looks", unit="KiB",
        values=[slope(settled, lambda point: point.kib)], budget=budget, spread=_extent(settled, "kib"),
    )  # fmt: skip


def _series(points: list[Point]) -> list[Row]:
    """The largest page of the rest of the day against the largest of its first round: the same jobs, of other names."""
    first = max(point.most for point in points if point.second <= ROUND_HOURS * HOUR)
    later = max((point.most for point in points if point.second > ROUND_HOURS * HOUR), default=first)
    return [
        row(
            "day", "Series on the largest page, against that of the first three hours", often=f"{len(points)} looks",
            values=[later - first], unit="series", digits=0, budget=50, spread=f"{first:,} then, {later:,} later",
        )
    ]  # fmt: skip


def _dcgm_rows(dcgm: Day) -> list[Row]:
    about = f"DCGM source over the stand-in, {dcgm.points[-1].second / HOUR:.1f} h"
    return [*_memory(about, dcgm.points), _growth(about, dcgm.points, DCGM_BUDGET)]


def open_rows(before: Open, after: Open, scrapes: int) -> list[Row]:
    """Of the live daemon."""
    often = f"{scrapes:,} scrapes, each on a connection of its own"
    return [
        row(
            "day", f"{what} of a live daemon at 10 Hz, gained", often=often, values=[new - old], unit="", digits=0,
            budget=0, spread=f"{old} before, {new} after",
        )
        for what, old, new in (
            ("Open files", before.files, after.files), ("Threads", before.threads, after.threads),
        )
    ]  # fmt: skip


def _settled(points: list[Point]) -> list[Point]:
    """Whole rounds, but the first five of eight: what is kept of past jobs is full by then, and rounds hold the same.

    Of less than two rounds, the second half.
    """
    rounds = points[-1].second // (ROUND_HOURS * HOUR)
    since, end = (rounds * 5 // 8) * ROUND_HOURS * HOUR, rounds * ROUND_HOURS * HOUR
    found = [point for point in points if since < point.second <= end]
    return found if rounds > 1 else points[len(points) // 2 :]


def slope(points: list[Point], of: Callable[[Point], float]) -> float:
    """What is gained an hour, by least squares; over the means of whole rounds, where there are any.

    Within a round memory follows the jobs, which would tilt a line through all points.
    """
    rounds: dict[int, list[Point]] = {}
    for point in points:
        rounds.setdefault(-(-point.second // (ROUND_HOURS * HOUR)), []).append(point)
    alike = list(rounds.values()) if len(rounds) > 1 else [[point] for point in points]
    at = [fmean(point.second / HOUR for point in held) for held in alike]
    return linear_regression(at, [fmean(of(point) for point in held) for held in alike]).slope


def _extent(points: list[Point], name: str) -> str:
    if name == "kib":
        sizes = [point.kib / 1024 for point in points]
        return f"{min(sizes):.2f} - {max(sizes):.2f} MiB resident"
    blocks = [point.blocks for point in points]
    return f"{min(blocks):,} - {max(blocks):,} live"


def hours(core: Day) -> Table:
    """The day, hour by hour."""
    return Table(
        about="The core through the day, at each hour; live objects after a full collection of garbage.",
        head=("hour", "resident MiB", "live objects", "series on the page"),
        rows=tuple(
            (f"{point.second // HOUR}", f"{point.kib / 1024:.2f}", f"{point.blocks:,}", f"{point.series:,}")
            for point in core.points
            if point.second % HOUR == 0
        ),
    )


# -- a daemon that lives meanwhile --


def lived(over: Callable[[], bool]) -> tuple[Open, Open, int]:
    """What a daemon holds open before and after it was scraped until that is over; and how often it was."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        daemon = stack.enter_context(running(_SERVE, environment("nvml", Path(folder))))
        for _ in range(20):
            _scrape(daemon)
        before, scrapes = opened(daemon.pid), 0
        while not over():
            _scrape(daemon)
            scrapes += 1
            time.sleep(0.2)
        return before, opened(daemon.pid), scrapes


def _scrape(daemon: Daemon) -> None:
    with Client(daemon.port) as client:
        client.get()


def opened(pid: int) -> Open:
    """Count under /proc."""
    return Open(*(len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task")))


# -- a picture --


def _curves(core: Day, dcgm: Day) -> Curves:
    return {
        name: {"hours": [p.second / HOUR for p in of.points], "mib": [p.kib / 1024 for p in of.points]}
        for name, of in (("core", core), ("dcgm", dcgm))
    } | {"series": [point.series for point in core.points]}


def draw(figure: Figure, curves: Curves) -> None:
    """Memory above, series below, over the hours of the day."""
    from benchmarks.drawing import COLOURS  # noqa: PLC0415  drawing alone needs it

    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    core, dcgm = curves["core"], curves["dcgm"]
    above.plot(core["hours"], core["mib"], color=COLOURS[0])
    above.plot(dcgm["hours"], dcgm["mib"], color=COLOURS[1], linestyle="--")
    above.annotate("core, snapshot and text", (core["hours"][-1], core["mib"][-1]), xytext=(0, 6),
                   textcoords="offset points", ha="right")  # fmt: skip
    above.annotate("DCGM source over the stand-in", (dcgm["hours"][-1], dcgm["mib"][-1]), xytext=(6, -6),
                   textcoords="offset points", va="center")  # fmt: skip
    above.set_title("Memory levels off while jobs come and go: what is kept of them is bounded")
    above.set_ylabel("resident, MiB")
    above.set_ylim(bottom=0, top=1.25 * max(core["mib"] + dcgm["mib"]))
    below.plot(core["hours"], curves["series"], color=COLOURS[0], linewidth=0.8)
    below.set_ylabel("series")
    below.set_ylim(bottom=0)
    below.set_xlabel("simulated hours, a tick a second")
    below.set_xticks(range(0, 25, 3))


DAY_GROUP = Group(
    name="day",
    title="A day",
    about=(
        f"A simulated day of eight GPUs, a tick a second, as fast as it goes: every observation through the agent's "
        f"loop, which takes a snapshot, and every {SCRAPE} s the text of a scrape. The same three hours come eight "
        "times, each with 27 jobs of new names (four GPUs that train and report, a deadlock, a notebook, sweeps of "
        "short jobs, half of which report) beside a server that stays, so at the same minute of each round the node "
        "holds the same, and what grows is kept by mistake. Memory is VmRSS every five minutes, after a full "
        "collection; growth is the slope of a line through the means of the rounds after the fifth (for DCGM, the "
        "first): what is kept of past jobs, bounded, is full by then. Before that memory rises, by 1.6 MiB in a first "
        "run, whose line began at the third hour and missed its budget; the picture has all of it. The simulator is "
        f"in the same process. The DCGM source reads its stand-in for {DCGM_HOURS} such hours. Meanwhile a daemon over "
        "the stand-in NVML samples at 10 Hz and is scraped five times a second, each time on a new connection; the "
        "first twenty of them are its warm-up."
    ),
    shortfalls={
        "Resident memory gained an hour (core, snapshot, text)": "it moves in steps, half a MiB at the 18th hour; "
        "Python's live objects grow fewer, and every page stays as large: the allocator's arenas, by all signs, and no "
        "leak. A line through nine hours cannot tell the two apart; a run of a week would",
    },
    measures=(
        "exporter/agent",
        "exporter/cli",
        "exporter/core",
        "exporter/web",
        "exporter/simulate",
        "exporter/sources",
    ),
    run=day,
    quick=lambda: day(quick=True),
    pictures=(
        Picture(
            name="day",
            words=(
                "Resident memory over 24 simulated hours, which rises gently while what is kept of past jobs fills and "
                "is level then; below it the number of series on the page, which follows the jobs every three hours."
            ),
            draw=draw,
        ),
    ),
)
