"""What a node costs by its size and the pace of sampling: CPU, memory, scrapes, lateness, allocations, side by side.

Owns the cases, their budgets and the table. Refuses to run anything: `benchmarks.node.watched` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Row, percentile, row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from benchmarks.node.watched import ALONE, QUICK, SERVERS, Case, Pace, Seen, watch

if TYPE_CHECKING:  # drawing alone needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAVES = (
    (
        Case(8, 1, 8), Case(1, 10, 1), Case(8, 10, 8), Case(1, 1, 1), Case(8, 10, 0), Case(8, 1, 0), Case(16, 1, 16),
    ),
    (Case(8, 1, 64), Case(16, 10, 16), Case(8, 10, 64), Case(8, 1, 56, cut=True)),
    (Case(8, 1, 200), Case(8, 10, 200)),
    (Case(8, 1, 200, cut=True), Case(8, 10, 56, cut=True)),
)  # fmt: skip
"""Run one after the other: all daemons of a wave together leave half of two cores free."""
SELDOM, OFTEN = "15 s", "1 s"
PHASES = (ALONE, SELDOM, OFTEN)
Found = list[tuple[Case, Seen]]
_USUAL, _FAST, _MIG, _MANY = Case(8, 1, 8), Case(8, 10, 8), Case(8, 1, 56, cut=True), Case(8, 1, 200)
CPU_BUDGETS = {_USUAL: 1.0, _FAST: 3.0, _MIG: 4.0, _MANY: 5.0}
"""Percent of a core, alone; the last is new: 200 jobs are a node of many small ones."""
PEAK_BUDGETS = {_USUAL: 80.0, _FAST: 80.0, _MIG: 80.0, _MANY: 100.0}
"""MiB after everything, scraped every second by three servers included; all but the first are new."""
SCRAPE_BUDGETS = {_USUAL: 10.0, _MANY: 250.0}
"""Milliseconds, 99th percentile; the last is new: a fortieth of a server's default timeout."""
LATE_BUDGETS = {_FAST: 5.0}
"""Milliseconds by which a tick comes late, 99th percentile, while three servers scrape every second; new."""


def matrix(*, quick: bool = False) -> Measured:
    """Run the waves, and tell all cases from the smallest to the largest."""
    waves, pace = (WAVES[0][:2],) if quick else WAVES, QUICK if quick else Pace()
    found = [(case, seen) for wave in waves for case, seen in zip(wave, watch(wave, pace), strict=True)]
    found.sort(key=lambda one: (one[0].cut, one[0].gpus, one[0].hertz, one[0].jobs))
    return Measured(rows=rows(found, pace), tables=[table(found)], curves=curves(found))


# -- what is held against budgets --


def rows(found: Found, pace: Pace) -> list[Row]:
    """The important cases, each with its budget."""
    lines: list[Row] = []
    for case, seen in found:
        lines += _cpu(case, seen, pace) + _peak(case, seen) + _scrape(case, seen) + _late(case, seen)
    return lines


def _cpu(case: Case, seen: Seen, pace: Pace) -> list[Row]:
    budget = CPU_BUDGETS.get(case)
    if budget is None:
        return []
    often = f"{pace.slices} x {pace.slice:g} s"
    return [
        row(
            "matrix", f"CPU of one core, {case.words}, alone", often=often, values=seen.cpu[ALONE], unit="%", digits=2,
            budget=budget, judged=sum(seen.cpu[ALONE]) / len(seen.cpu[ALONE]),
        ),
        row(
            "matrix", f"CPU of one core, {case.words}, scraped by {SERVERS} servers every {SELDOM}",
            often=f"1 x {pace.seldom:g} s, {SERVERS} scrapes", values=seen.cpu[SELDOM], unit="%", digits=2, spread="-",
            budget=budget if case == _USUAL else None,
        ),
    ]  # fmt: skip


def _peak(case: Case, seen: Seen) -> list[Row]:
    if case not in PEAK_BUDGETS:
        return []
    what = f"Resident memory at its peak, {case.words}, scraped too"
    values = [seen.peak[OFTEN]]
    return [
        row("matrix", what, often="once", values=values, unit="MiB", spread="-", budget=PEAK_BUDGETS[case]),
    ]  # fmt: skip


def _scrape(case: Case, seen: Seen) -> list[Row]:
    if case not in SCRAPE_BUDGETS:
        return []
    return [
        _tail(
            f"GET /metrics, {case.words}, while {SERVERS} servers scrape every {OFTEN}", seen.gets, "GETs",
            budget=SCRAPE_BUDGETS[case],
        )
    ]  # fmt: skip


def _late(case: Case, seen: Seen) -> list[Row]:
    if case not in LATE_BUDGETS:
        return []
    what = f"A tick comes late by, {case.words}, while {SERVERS} servers scrape every {OFTEN}"
    return [_tail(what, seen.late[OFTEN], "ticks", budget=LATE_BUDGETS[case])]


def _tail(what: str, values: list[float], of: str, *, budget: float) -> Row:
    """Judged by its 99th percentile."""
    p99 = percentile(values, 0.99)
    spread = f"p99 {p99:.2f}, max {max(values):.2f}"
    return row(
        "matrix", what, often=f"{len(values)} {of}", values=values, unit="ms", digits=2, budget=budget, judged=p99,
        spread=spread,
    )  # fmt: skip


# -- side by side --

HEAD = (
    "node", "series", f"ticks of those due, %: {ALONE} / {OFTEN}", f"CPU %: {ALONE} / {SELDOM} / {OFTEN}",
    f"peak MiB: {ALONE} / {OFTEN}",
    f"context switches/s: {ALONE} / {OFTEN}", "GET ms: p50 / p99 / max", f"by the servers, {OFTEN}, ms: p50 / max",
    f"tick late by ms, {ALONE}: p50 / p99 / max", f"the same, {OFTEN}", "allocations a tick (KiB)",
)  # fmt: skip
_ABOUT = (
    f"A row a case; {ALONE}: nobody asks; {SELDOM}, {OFTEN}: three Prometheus servers scrape, each at that interval. "
    f"GETs are asked by a client of our own as a server asks (OpenMetrics, gzip), while the three go on every {OFTEN}; "
    "what the servers tell includes their own storing. Allocations are calls to Python's allocators in one tick, "
    "medians, with the bytes asked for."
)


def table(found: Found) -> Table:
    """All cases, all figures."""
    return Table(about=_ABOUT, head=HEAD, rows=tuple(_cells(case, seen) for case, seen in found))


def _cells(case: Case, seen: Seen) -> tuple[str, ...]:
    return (
        case.words,
        f"{seen.page.series:,}",
        " / ".join(f"{100 * seen.came[phase]:.0f}" for phase in (ALONE, OFTEN)),
        " / ".join(f"{median(seen.cpu[phase]):.2f}" for phase in PHASES),
        " / ".join(f"{seen.peak[phase]:.1f}" for phase in (ALONE, OFTEN)),
        " / ".join(f"{seen.switches[phase]:.0f}" for phase in (ALONE, OFTEN)),
        _three(seen.gets),
        f"{median(seen.servers[OFTEN]):.1f} / {max(seen.servers[OFTEN]):.1f}",
        _three(seen.late[ALONE]),
        _three(seen.late[OFTEN]),
        f"{seen.allocations:,.0f} ({seen.kib:,.0f})",
    )


def _three(values: list[float]) -> str:
    return f"{median(values):.2f} / {percentile(values, 0.99):.2f} / {max(values):.2f}"


# -- pictures --


def curves(found: Found) -> Curves:
    """What the pictures are drawn of."""
    return {
        "cases": [
            {
                "size": case.size, "hertz": case.hertz, "jobs": case.jobs, "places": len(case.places),
                "cut": case.cut, "cpu": {phase: median(seen.cpu[phase]) for phase in PHASES},
                "peak": seen.peak[OFTEN], "series": seen.page.series,
            }
            for case, seen in found
        ]
    }  # fmt: skip


_SHOWN: tuple[Callable[[Mapping[str, Any]], float], ...] = (lambda one: one["cpu"][SELDOM], lambda one: one["peak"])


def draw(figure: Figure, told: Curves) -> None:
    """CPU above memory; left by what is sampled, right by jobs."""
    axes = figure.subplots(2, 2, sharex="col")
    sizes = [one for one in told["cases"] if one["jobs"] == one["places"]]
    jobs = [one for one in told["cases"] if one["size"] == "8 GPUs"]
    for column, (cases, key) in enumerate(((sizes, "places"), (jobs, "jobs"))):
        for line, of in enumerate(_SHOWN):
            for hertz in (1, 10):
                points = sorted((one[key], of(one)) for one in cases if one["hertz"] == hertz)
                _line(axes[line][column], points, hertz)
    figure.suptitle("CPU follows size, pace and jobs; memory hardly does", x=0.01, ha="left", weight="bold")
    _named(axes)


def _line(axes: Axes, points: list[tuple[float, float]], hertz: int) -> None:
    from benchmarks.drawing import COLOURS  # noqa: PLC0415  drawing alone needs it

    style: dict[str, Any] = {"linestyle": "-" if hertz == 1 else "--", "marker": "o" if hertz == 1 else "s"}
    axes.plot(*zip(*points, strict=True), color=COLOURS[0 if hertz == 1 else 1], markersize=4, **style)
    place = (6, -7 if hertz == 1 else 7)  # where lines lie on each other, both can be read
    axes.annotate(f"{hertz} Hz", points[-1], xytext=place, textcoords="offset points", va="center")


def _named(axes: Any) -> None:
    (cpu, cpu_jobs), (peak, peak_jobs) = axes
    cpu.set_title("By size, a job on each")
    cpu_jobs.set_title("By jobs, on 8 GPUs")
    cpu.set_ylabel("CPU, % of a core")
    peak.set_ylabel("peak memory, MiB")
    peak.set_xlabel("GPUs: 1, 8, 16; 56: MIG instances on 8 boards")
    peak_jobs.set_xlabel("jobs")
    for each in (cpu, cpu_jobs, peak, peak_jobs):
        each.margins(x=0.12)
        each.set_ylim(bottom=0, top=1.15 * each.get_ylim()[1])


MATRIX = Group(
    name="matrix",
    title="A node, by size and pace",
    about=(
        "Whole daemons (`gpu-efficiency serve`) over the stand-in NVML, which costs next to nothing and is no driver; "
        "job files in a mapping directory say who holds what, jobs dealt out in turn (200 on eight GPUs: 25 share "
        "each). Two to seven daemons at a time go through phases: alone, then scraped by three real Prometheus "
        "servers every 15 s and every 1 s, then asked by a client of our own besides. CPU is the process's own clock, "
        "memory VmHWM from the start on, switches those of all threads. A tick is late by the time between the moment "
        "it was due on the grid and the moment its thread woke: the daemon's clock notes both, one write to a file a "
        "tick, which is in its CPU. Allocations are counted last, by a wrapper around Python's allocators, all threads "
        "together; what Python takes from its own free lists (small tuples, floats) is not among them. Nothing that "
        "a real driver takes for its answers is in any figure, and no history is kept."
    ),
    measures=(
        "exporter/agent",
        "exporter/cli",
        "exporter/core",
        "exporter/web",
        "exporter/schedulers",
        "exporter/sources",
    ),
    run=matrix,
    quick=lambda: matrix(quick=True),
    pictures=(
        Picture(
            name="matrix",
            words=(
                "Four plots: processor time above, memory below; left by the number of GPUs and MIG instances, right "
                "by the number of jobs on eight GPUs; a line for one reading a second and one for ten."
            ),
            draw=draw,
            inches=(9.0, 6.0),
        ),
    ),
)
