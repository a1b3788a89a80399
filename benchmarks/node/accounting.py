"""What the core costs: an observation into the ledger, a recorded week, a snapshot and its text.

Owns these measurements, all in processor time unless a row says otherwise. Refuses the network.
"""

import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from benchmarks.figures import Row, own_garbage_only, row
from benchmarks.group import Group, Measured
from benchmarks.machine import ROOT
from benchmarks.rig.story import history
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Observation
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.simulation import simulate
from exporter.trace import TraceHeader, TraceWriter, read_trace
from exporter.web.responses import GZIP_LEVEL

READING_BUDGET_US = 10.0
REPLAY_BUDGET_S = 2.0
WEEK_READINGS = 80_640
_LIVE_SECONDS = 1300
"""Times eight GPUs: 10,400 readings."""
_DAY_SECONDS = 24 * 3600
_WEEK_SECONDS = 7 * _DAY_SECONDS
_REPEATS = 9
_CALLS = 200
_META = DaemonMetadata(version="0", source="nvml", scheduler="processes", host="gpu-node-00")


def readings() -> list[Row]:
    """Time `advance` on two stories of eight GPUs at 1 s, every signal there."""
    return [_advance("healthy_training", "training, one job on 8 GPUs"), _advance("demo", "four tenants, all states")]


def _advance(scenario: str, about: str) -> Row:
    simulation = simulate(scenario, duration_seconds=_LIVE_SECONDS)
    story = list(simulation.observations)
    before = [o for o in story if o.at <= simulation.live_from]
    live = story[len(before) :]
    count = sum(len(o.readings) for o in live)
    with own_garbage_only():
        micros = [_through(before, live) / count * 1e6 for _ in range(_REPEATS)]
    return row(
        "advance",
        f"Observation to ledger, a reading ({about})",
        often=f"{_REPEATS} x {count:,} readings",
        values=micros,
        unit="us",
        digits=2,
        budget=READING_BUDGET_US,
    )


def _through(before: Sequence[Observation], live: Sequence[Observation]) -> float:
    """Seconds of processor time that `live` takes a ledger which has seen what came before."""
    ledger = Ledger()
    for observation in before:
        advance(ledger, observation)
    began = time.process_time()
    for observation in live:
        advance(ledger, observation)
    spent = time.process_time() - began
    if ledger.conservation_errors or ledger.rejected.total():
        raise RuntimeError(f"the ledger refused readings, so this measured something else: {dict(ledger.rejected)}")
    return spent


def replay() -> list[Row]:
    """Time `gpu-efficiency replay` of a node's week in which nobody speaks, and of a day with all that is said."""
    with tempfile.TemporaryDirectory() as folder:
        week, day = Path(folder) / "week.jsonl", Path(folder) / "day.jsonl"
        readings, _ = _write(week, seconds=_WEEK_SECONDS, said=False)
        if readings != WEEK_READINGS:
            raise RuntimeError(
                f"the week has {readings:,} readings, not {WEEK_READINGS:,}: the row would be mislabelled"
            )
        seen, words = _write(day, seconds=_DAY_SECONDS, said=True)
        silent, told = ([_command(trace) for _ in range(5)] for trace in (week, day))
        decoding = [_seconds(lambda: sum(len(o.readings) for o in read_trace(week))) for _ in range(5)]
    return [
        *_replayed(f"8 GPUs x 1 week at 60 s, {WEEK_READINGS:,} readings", silent, budget=REPLAY_BUDGET_S),
        row(
            "replay", "- of which reading and decoding the file: CPU", often="5 x", values=decoding, unit="s", digits=2
        ),
        *_replayed(f"8 GPUs x 1 day at 60 s, {seen:,} readings and {words:,} reports and answers of engines", told),
    ]


def _replayed(what: str, runs: Sequence[tuple[float, float]], *, budget: float | None = None) -> list[Row]:
    return [
        row(
            "replay", f"Replay of {what}: {clock}", often="5 runs of the command", values=values, unit="s", digits=2,
            budget=budget,
        )
        for clock, values in zip(("wall", "CPU"), zip(*runs, strict=True), strict=True)
    ]  # fmt: skip


def _write(trace: Path, *, seconds: int, said: bool) -> tuple[int, int]:
    """Write the demo node's story; give its readings, and what workloads and engines say in it."""
    story = simulate("demo", period_seconds=60, preroll_seconds=0, duration_seconds=seconds)
    readings = words = 0
    with TraceWriter(trace, TraceHeader(host=story.host, simulated=True), flush_every=0) as writer:
        for observation in story.observations:
            told = observation if said else replace(observation, reports=(), serving=())
            writer.append(told)
            readings += len(told.readings)
            words += len(told.reports) + len(told.serving)
    return readings, words


def _command(trace: Path) -> tuple[float, float]:
    """Wall and processor seconds of the whole command, the interpreter's start included."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "exporter", "replay", str(trace)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
    )
    wall, after = time.perf_counter() - began, os.times()
    children = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, children


def _seconds(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def text() -> list[Row]:
    """Time a snapshot and its text on a node of eight GPUs held by eight jobs, an hour old; count series and bytes."""
    ledger = Ledger()
    for observation in history(2 * 3600 * SECOND).observations:
        advance(ledger, observation)
    picture = take_snapshot(ledger, _META)
    plain, openmetrics = render(picture), render(picture, openmetrics=True)
    where = "8 GPUs, 8 jobs"

    def fresh() -> Snapshot:
        """As a scrape finds it: nothing of it worked out yet."""
        return take_snapshot(ledger, _META)

    return [
        _call(f"Snapshot ({where})", lambda _: take_snapshot(ledger, _META), of=fresh),
        _call(f"Text format ({where})", render, of=fresh),
        _call(f"OpenMetrics ({where})", lambda each: render(each, openmetrics=True), of=fresh),
        _call(f"gzip of the text, level {GZIP_LEVEL}", lambda _: gzip.compress(plain, GZIP_LEVEL, mtime=0), of=fresh),
        _size(
            "Series of a scrape", series_in(picture), "series", f"{len(picture.gpus)} GPUs, {len(picture.jobs)} jobs"
        ),
        _size("Bytes of a scrape, text", len(plain), "bytes", f"{_packed(plain):,} with gzip"),
        _size("Bytes of a scrape, OpenMetrics", len(openmetrics), "bytes", f"{_packed(openmetrics):,} with gzip"),
    ]


def series_in(picture: Snapshot) -> int:
    """Count the samples of an exposition, `process_*` not among them."""
    return sum(not line.startswith(b"#") for line in render(picture).splitlines())


def _packed(body: bytes) -> int:
    return len(gzip.compress(body, GZIP_LEVEL, mtime=0))


def _call(what: str, act: Callable[[Snapshot], object], *, of: Callable[[], Snapshot]) -> Row:
    with own_garbage_only():
        milliseconds = [_once(act, of()) for _ in range(_CALLS)]
    return row("text", what, often=f"{_CALLS} x", values=milliseconds, unit="ms", digits=3)


def _once(act: Callable[[Snapshot], object], picture: Snapshot) -> float:
    return _seconds(lambda: act(picture)) * 1e3


def _size(what: str, count: int, unit: str, beside: str) -> Row:
    return row("text", what, often="once", values=[count], unit=unit, digits=0, spread=beside)


_MEASURES = ("exporter/core", "exporter/web/responses.py", "exporter/simulate", "exporter/trace.py")
_SHORT_STEPS = (
    "Some fifty short Python calls a reading, none of them large: weighing the counters is about a fifth, checking 17"
    " ranges 7 % by instructions. Next: check a field where it is used; post to both books in one pass."
)


ADVANCE = Group(
    name="advance",
    title="Observation to ledger",
    about=(
        "One core, in a tight loop, on readings with every signal; processor time (`time.process_time`), the garbage "
        "collector on. The simulation is made beforehand. In a daemon that wakes once a second the caches are cold: "
        "the last lines of [`serve`](#the-daemon) show what the same work takes there, by the daemon's own clock."
    ),
    measures=_MEASURES,
    shortfalls={
        f"Observation to ledger, a reading ({about})": why
        for about, why in (
            ("training, one job on 8 GPUs", _SHORT_STEPS),
            ("four tenants, all states", f"{_SHORT_STEPS} Here a hundred: what jobs and servers say is taken in, too."),
        )
    },
    run=lambda: Measured(rows=readings()),
)


TEXT = Group(
    name="text",
    title="Snapshot and text",
    about=(
        "A node of eight GPUs, each held by a job of its own, with an hour of history. A snapshot is taken every tick, "
        "the text is made for every scrape. `process_*` series are not counted."
    ),
    measures=_MEASURES,
    run=lambda: Measured(rows=text()),
)


REPLAY = Group(
    name="replay",
    title="Replay",
    about=(
        "`gpu-efficiency replay` of the demo node, as a command: the start of Python and the printing are in it, the "
        "making of the trace is not. The budget is of readings alone, as when it was set; since then the demo's jobs "
        "and engines speak, a hundred words a minute, and each word costs more than a reading."
    ),
    shortfalls={
        f"Replay of 8 GPUs x 1 week at 60 s, {WEEK_READINGS:,} readings: {clock}": "1.8 s on a faster machine, where "
        "the core took 12.6 us a reading: this is the shortfall of a reading, 80,640 times, with the same next "
        "steps"
        for clock in ("wall", "CPU")
    },
    measures=("exporter/cli/simulate.py", *_MEASURES),
    run=lambda: Measured(rows=replay()),
)
