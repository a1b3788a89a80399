"""By how much a gauge that is looked at now and then errs, and a counter does not: the same work, asked of Prometheus.

Owns the comparison. The truth is a wave's integral. Ours is what the core counts from readings of a second, as a
counter; the other is what most exporters publish, the mean of the second before the scrape, as a gauge. Both are
written into one real Prometheus at the same moments, and asked as people ask: `increase()` and
`avg_over_time()` of an hour.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

from msgspec import Struct

from benchmarks.figures import Row, percentile
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.truth.waves import WAVES, Wave
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner, Process, Reading
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.specs import find_spec
from tests.dashboards.past import Past, named, prometheus
from tests.dashboards.remote_write import Points
from tests.e2e.running import Labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOUR = 3_600
BEFORE = 127
"""Seconds of a run before the hour that is asked for: its edges fall between scrapes, as in life."""
EVERY = (15, 30, 60)
"""Seconds between scrapes."""
SEED = 7
MODEL = "NVIDIA H100 80GB HBM3"
_BEGIN = 1_700_000_000
"""When the runs begin, Unix seconds: any time will do."""
_USEFUL = re.compile(r'^gpu_efficiency_seconds_total\{uuid="GPU-(\d+)".*leak="useful".*\} (\S+)$', re.MULTILINE)
Found = dict[tuple[str, int, str], list[float]]
"""Errors in points of a hundred, by wave, seconds between scrapes, and method; one a phase."""


class Run(Struct, frozen=True, kw_only=True):
    """One wave, begun at another moment each time: what was true, and what was read at each second."""

    wave: Wave
    phases: tuple[int, ...]
    """Milliseconds of the wave that had passed when the run began."""
    counted: list[list[float]]
    """By second since the beginning, then by phase: seconds of useful work, as the counter says."""

    def truth(self, phase: int) -> float:
        """Share of the hour that was busy."""
        return self.wave.share(phase + BEFORE * 1000, phase + (BEFORE + HOUR) * 1000)

    def gauge(self, phase: int, second: int) -> float:
        """The mean of the second before."""
        return self.wave.share(phase + (second - 1) * 1000, phase + second * 1000)


def counted(wave: Wave, phases: Sequence[int], seconds: int) -> list[list[float]]:
    """Have the core count a node of as many GPUs as there are phases; its own text, read second by second."""
    devices = tuple(Device(f"GPU-{n}", f"{n}", model=MODEL, spec=find_spec(MODEL)) for n in range(len(phases)))
    holds = tuple(Allocation(one.uuid, Owner(job_id=f"job-{one.index}", scheduler="slurm"), 0) for one in devices)
    ledger, said = Ledger(), [[0.0] * len(phases)]
    advance(ledger, Observation(0, _BEGIN * SECOND, devices=devices, allocations=holds))
    for second in range(1, seconds + 1):
        readings = tuple(
            _reading(f"GPU-{n}", second, wave.share(phase + (second - 1) * 1000, phase + second * 1000))
            for n, phase in enumerate(phases)
        )
        at = second * SECOND
        advance(ledger, Observation(at, _BEGIN * SECOND + at, readings=readings, allocations_at=at))
        if second % min(EVERY) == 0:
            text = render(take_snapshot(ledger, DaemonMetadata(host="node-0"))).decode()
            now = {int(n): float(value) for n, value in _USEFUL.findall(text)}
            said.append([now.get(n, 0.0) for n in range(len(phases))])
    return said


def _reading(uuid: str, second: int, share: float) -> Reading:
    spec = find_spec(MODEL)
    return Reading(
        uuid, (second - 1) * SECOND, second * SECOND, gr_engine_active=share, sm_active=share, tensor_active=share,
        dram_active=0.3 * share, gpu_utilization=1.0 if share else 0.0, power_watts=120 + 500 * share,
        enforced_power_limit_watts=700.0, sm_clock_hz=spec.tensor_reference_clock_hz if spec else 0.0,
        processes=(Process(4242, 1 << 30),),
    )  # fmt: skip


def ran(wave: Wave, count: int) -> Run:
    """Begin a wave at `count` moments of its own, drawn with a seed."""
    dice = Random(f"{SEED} {wave.name}")  # noqa: S311 - a draw, no secret
    whole = wave.pause_every or wave.period
    phases = tuple(dice.randrange(whole) for _ in range(count))
    return Run(wave=wave, phases=phases, counted=counted(wave, phases, BEFORE + HOUR))


def stored(past: Past, run: Run) -> None:
    """Scrape both at the same moments into a Prometheus."""
    for every in EVERY:
        moments = range(every, BEFORE + HOUR + 1, every)
        series: dict[Labels, Points] = {}
        for n, phase in enumerate(run.phases):
            labels = {"wave": run.wave.name, "every": f"{every}", "phase": f"{n}"}
            step = min(EVERY)
            series[named("seconds_total", **labels)] = [(_BEGIN + at, run.counted[at // step][n]) for at in moments]
            series[named("active", **labels)] = [(_BEGIN + at, run.gauge(phase, at)) for at in moments]
        past.write(series)


def asked(past: Past, runs: Sequence[Run]) -> Found:
    """What both say of the hour, less what was true."""
    queries = {"counter": f"increase(seconds_total[{HOUR}s]) / {HOUR}", "gauge": f"avg_over_time(active[{HOUR}s])"}
    found: Found = {}
    truth = {run.wave.name: [run.truth(phase) for phase in run.phases] for run in runs}
    for method, query in queries.items():
        for labels, value in past.ask(query, _BEGIN + BEFORE + HOUR):
            key = labels["wave"], int(labels["every"]), method
            found.setdefault(key, []).append(100 * (value - truth[labels["wave"]][int(labels["phase"])]))
    return found


def unseen(wave: Wave, every: int) -> float:
    """Share of a wave's jobs of which no scrape shows anything; the second before a scrape is what it shows."""
    return max(0.0, 1 - (wave.busy + 1000) / (every * 1000))


def gauges(*, phases: int = 40, waves: Sequence[Wave] = WAVES) -> Measured:
    """Compare on every wave."""
    runs = [ran(wave, phases) for wave in waves]
    with tempfile.TemporaryDirectory() as folder, prometheus(Path(folder)) as past:
        for run in runs:
            stored(past, run)
        found = asked(past, runs)
    return Measured(rows=list(rows(found, phases)), tables=[table(found, waves)], curves=curves(found, waves))


def rows(found: Found, phases: int) -> Iterator[Row]:
    """The worst of each method, and the jobs that nobody saw."""
    for method, words in (("counter", "increase() of our counter"), ("gauge", "avg_over_time() of a gauge")):
        for every in EVERY:
            errors = [error for key, values in found.items() if key[1:] == (every, method) for error in values]
            budget = 100 * every / HOUR if method == "counter" else None
            worst = max(map(abs, errors))
            yield Row(
                group="gauges", what=f"Error over an hour, {words}, scraped every {every} s",
                often=f"{len(errors) // phases} kinds of work x {phases} phases",
                median=f"{percentile([abs(error) for error in errors], 0.5):.2f} points",
                spread=f"p90 {percentile([abs(error) for error in errors], 0.9):.2f}, worst {worst:.2f}",
                budget="" if budget is None else f"<= {budget:.2f} points, worst",
                met=None if budget is None else worst <= budget,
            )  # fmt: skip
    short = WAVES[-1]
    for every in EVERY:
        yield Row(
            group="gauges", what=f"Jobs of {short.busy // 1000} s of which no scrape shows anything, every {every} s",
            often="in closed form", median=f"{100 * unseen(short, every):.0f} %", spread="ours: each has its receipt",
        )  # fmt: skip


def table(found: Found, waves: Sequence[Wave]) -> Table:
    """By kind of work, at 30 seconds: mean error, and the worst."""
    lines = []
    for wave in waves:
        true = 100 * wave.share(0, (wave.pause_every or wave.period) * 50)
        cells = [wave.name, wave.about, f"{true:.1f} %"]
        for method in ("counter", "gauge"):
            cells += [_said(found[wave.name, every, method]) for every in EVERY]
        lines.append(tuple(cells))
    head = ("work", "what it does", "truth", *(f"{who}, {every} s" for who in ("counter", "gauge") for every in EVERY))
    about = "Error of an hour's answer in points of a hundred: the mean over all phases, and the worst of them."
    return Table(about=about, head=head, rows=tuple(lines))


def _said(errors: Sequence[float]) -> str:
    return f"{mean(errors):+.2f}, worst {max(errors, key=abs):+.2f}"


# -- the picture --

_SHOWN = "loader, 15 s"


def curves(found: Found, waves: Sequence[Wave]) -> Curves:
    """Errors at 30 s by work and method; two minutes of one wave, and where a scrape every 15 s looks at it."""
    shown = next((wave for wave in waves if wave.name == _SHOWN), waves[0])
    phase = 6_000
    return {
        "works": [wave.name for wave in waves],
        "errors": {method: [found[wave.name, 30, method] for wave in waves] for method in ("counter", "gauge")},
        "shown": shown.name,
        "each second": [shown.share(phase + s * 1000, phase + (s + 1) * 1000) for s in range(120)],
        "scraped": [[s, shown.share(phase + (s - 1) * 1000, phase + s * 1000)] for s in range(15, 121, 15)],
        "truth": shown.share(phase, phase + 120_000),
    }


def draw(figure: Figure, told: Curves) -> None:
    """Above, how a scrape in step with the work sees one side of it; below, the errors of an hour."""
    from benchmarks.drawing import COLOURS, INK  # noqa: PLC0415 - the tables need no matplotlib

    above, below = figure.subplots(2, 1, height_ratios=(2, 3))
    seconds, scraped = told["each second"], told["scraped"]
    above.step(range(len(seconds)), [100 * s for s in seconds], where="post", color=INK, linewidth=0.9)
    above.plot([at for at, _ in scraped], [100 * s for _, s in scraped], "o", color=COLOURS[1], markersize=6)
    above.hlines(100 * told["truth"], 0, 120, color=COLOURS[0], linewidth=1.6)
    seen = 100 * mean(s for _, s in scraped)
    above.text(
        121, 100 * told["truth"], f" truth, and counter: {100 * told['truth']:.0f} %", va="center", color=COLOURS[0]
    )
    above.text(121, seen, f" gauge: {seen:.0f} %", va="center", color=COLOURS[1])
    above.set(xlim=(0, 158), ylim=(-6, 108), ylabel="tensor active, %", xlabel="seconds", xticks=range(0, 121, 15))
    above.set_title("A gauge sees the second before its scrape; a counter has all of them")
    for method, shift, colour, mark in (("counter", 0.16, COLOURS[0], "s"), ("gauge", -0.16, COLOURS[1], "o")):
        for place, errors in enumerate(told["errors"][method]):
            below.plot(errors, [-place + shift] * len(errors), mark, color=colour, alpha=0.35, markersize=4)
        below.plot([], [], mark, color=colour, label=f"{method}, scraped every 30 s")
    below.axvline(0, color=INK, linewidth=0.8)
    below.set_yticks([-place for place in range(len(told["works"]))], told["works"])
    below.set(xlabel="error of an hour's answer, points of a hundred; a dot a phase")
    below.legend(loc="lower right")


GAUGES = Group(
    name="gauges",
    title="What a scrape of gauges misses",
    about=(
        "Six kinds of work whose busy share is known in closed form, each begun at 40 moments of its beat (drawn by a "
        'seed). Ours: readings of a second through the real core, `gpu_efficiency_seconds_total{leak="useful"}` of its '
        "own text. The other: the mean of the second before the scrape, as a gauge, which flatters exporters whose "
        "value is older. Both are written into a real Prometheus at the same moments and asked for one hour, with "
        "`increase()` and `avg_over_time()`. Sensors are exact here: the errors are the sampling's alone. What is left "
        "of the counter's error is Prometheus' own: it extrapolates to the edges of the hour, between scrapes: the "
        "budget is one interval of the hour, beyond which no edge can hide anything."
    ),
    measures=("exporter/core", "exporter/data/gpu_specs.csv", "exporter/specs.py", "benchmarks/truth/waves.py"),
    run=gauges,
    quick=lambda: gauges(phases=3, waves=WAVES[-3:]),
    pictures=(
        Picture(
            name="gauges", draw=draw, inches=(9.0, 6.4),
            words="Above: a loader that is busy 5 of every 15 seconds, scraped every 15: all samples see the same "
            "moment; the gauge says something else than the truth, which the counter has. Below: errors of an hour's "
            "answer for six kinds of work; the counter's lie at nought, the gauge's spread over many points.",
        ),
    ),
)  # fmt: skip
