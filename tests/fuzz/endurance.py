"""Group `endurance`: an agent under a schedule of faults, a day in virtual time and some minutes of a whole daemon.

Owns the rows, the tables and the picture; what is done to the agent is `day`'s and `live`'s.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Row
from benchmarks.group import Curves, Group, Measured, Picture, Table
from tests.fuzz import day, live
from tests.fuzz.day import Day, Met
from tests.fuzz.live import Lived
from tests.fuzz.unwell import GPUS, INTERVAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEVER = float("inf")
_READING = GPUS * 1.0
"""GPU-seconds: a page shows what was read up to a second before it, at the intervals of `live`, on a busy machine."""
_HEAD = (
    "fault",
    "how often",
    "lasted",
    "unobserved, of each GPU it hid",
    "parts miss what was paid by",
    "sees all again after",
    "counted meanwhile",
    "what the operator sees",
)
_RECOVERED = 75.0
"""Seconds of virtual time: the ladder waits 60 at most between two tries; then two readings make one."""


def run() -> Measured:
    """A day, then the daemon."""
    return measured(day.day(), live.lived())


def quick() -> Measured:
    """Two hours, each fault once, and no daemon."""
    return measured(day.day(hours=2, each=1), None)


def measured(through: Day, lived: Lived | None) -> Measured:
    """Rows and tables of both."""
    rows, tables = list(_rows(through)), [_table_of_day(through)]
    if lived is not None:
        rows += _rows_of_daemon(lived)
        tables.append(_table_of_daemon(lived))
    return Measured(rows=rows, tables=tables, curves=_curves(through, lived))


def _row(  # noqa: PLR0917  in the order of the table's columns
    what: str,
    often: str,
    value: str,
    spread: str = "",
    budget: str = "",
    met: bool | None = None,
) -> Row:
    return Row(group="endurance", what=what, often=often, median=value, spread=spread, budget=budget, met=met)


def _rows(through: Day) -> Iterable[Row]:
    often = f"{through.hours:.0f} h of virtual time, {through.ticks:,} ticks, {len(through.met)} faults, seed 1"
    wrong = through.largest_error + through.conservation_errors
    yield _row(
        "largest conservation error at any tick",
        often,
        f"{through.largest_error} ns",
        f"{through.conservation_errors} ticks with one",
        "0 ns",
        wrong == 0,
    )
    yield _row(
        "seconds lost or counted twice, of any GPU, at any tick",
        often,
        f"{through.lost:.3f} s",
        "paid time against the clock",
        "0 s",
        through.lost == 0,
    )
    yield _row("counters that fell, between two ticks", often, f"{through.fell}", "", "0", through.fell == 0)
    yield _row(
        "ticks after which a scrape had nothing to tell",
        often,
        f"{through.unanswered}",
        f"{through.agent_errors} errors_total",
        "0",
        through.unanswered + through.agent_errors == 0,
    )
    yield _row(
        "GPU-seconds unobserved outside of faults",
        often,
        f"{through.needless:.1f}",
        f"{through.unobserved:,.0f} in all",
        "0",
        through.needless == 0,
    )
    times = [_NEVER if met.recovered is None else met.recovered for met in through.met]
    slowest = max(times)
    yield _row(
        "all boards seen again after a fault",
        f"{len(times)} faults",
        f"{median(times):.0f} s",
        f"{min(times):.0f} - {slowest:.0f} s",
        f"<= {_RECOVERED:g} s",
        slowest <= _RECOVERED,
    )


def _rows_of_daemon(lived: Lived) -> Iterable[Row]:
    often = (
        f"{lived.seconds:.0f} s of a whole daemon, {lived.lives} lives, {len(lived.met)} faults, {lived.pages} pages"
    )
    yield _row(
        "pages of the daemon whose parts do not add up, or with a counter that fell",
        often,
        f"{len(lived.broken)}",
        "",
        "0",
        not lived.broken,
    )
    yield _row(
        "GPU-seconds the daemon's pages miss, or have twice",
        often,
        f"{abs(lived.lost):.2f}",
        f"{GPUS} GPUs, from the first page to the last",
        f"<= {_READING:g}, one reading",
        abs(lived.lost) <= _READING,
    )
    times = [_NEVER if met.recovered is None else met.recovered for met in lived.met]
    yield _row(
        "the daemon well again after a fault",
        f"{len(times)} faults",
        f"{median(times):.1f} s",
        f"{min(times):.1f} - {max(times):.1f} s, the clock's",
    )
    yield _row(
        "scrapes without an answer while the daemon was there",
        often,
        f"{lived.refused}",
        "all while no file descriptor was left, or it hung",
    )


# -- tables --


def _table_of_day(through: Day) -> Table:
    faults = {fault.what: fault for fault in day.FAULTS}
    rows = (
        _cells(what, mets, faults[what].seen, f"{through.largest_error} ns")
        for what, mets in _by_kind(through.met).items()
    )
    about = f"A day in virtual time: {GPUS} GPUs, a reading each {INTERVAL:g} s; medians, and the most in brackets"
    return Table(about=about, head=_HEAD, rows=tuple(rows))


def _table_of_daemon(lived: Lived) -> Table:
    rows = (
        _cells(what, mets, _seen(lived, what), "0 ns" if not lived.broken else "see above")
        for what, mets in _by_kind(lived.met).items()
    )
    about = (
        f"A whole daemon on the stand-in NVML, {GPUS} GPUs, a reading each 0.2 s; unobserved until all is well again"
    )
    return Table(about=about, head=_HEAD, rows=tuple(rows))


def _seen(lived: Lived, what: str) -> str:
    said = lived.log.get(what, "").partition("Z ")[2][:110]
    hint = next(fault.seen for fault in live.FAULTS if fault.what == what)
    return f"{hint}; log: {' '.join(said.split())}" if said and "/" not in said else hint


def _by_kind(met: Iterable[Met]) -> dict[str, list[Met]]:
    kinds: dict[str, list[Met]] = {}
    for one in met:
        kinds.setdefault(one.what, []).append(one)
    return kinds


def _cells(what: str, mets: Sequence[Met], seen: str, error: str) -> tuple[str, ...]:
    counted: dict[str, int] = {}
    for met in mets:
        for kind, count in met.kinds.items():
            counted[kind] = counted.get(kind, 0) + count
    times = [_NEVER if met.recovered is None else met.recovered for met in mets]
    return (
        what,
        f"{len(mets)}",
        _spread([met.lasted for met in mets]),
        _spread([met.unobserved / GPUS for met in mets]),
        error,
        _spread(times),
        ", ".join(f"{kind} {count:,}" for kind, count in sorted(counted.items())) or "-",
        seen,
    )


def _spread(values: Sequence[float]) -> str:
    middle, most = median(values), max(values)
    return f"{middle:.0f} s" if len(values) == 1 else f"{middle:.0f} s ({most:.0f})"


# -- the picture --


def _curves(through: Day, lived: Lived | None) -> Curves:
    faults = [
        [
            met.what,
            round(met.began, 4),
            round(met.lasted / 3600, 4),
            round((met.recovered or 0) / 3600, 4),
            round(met.unobserved / GPUS),
        ]
        for met in through.met
    ]
    return {"faults": faults, "hours": through.hours, "live": [] if lived is None else lived.curve}


def draw(figure: "Figure", curves: Curves) -> None:
    """A line a kind of fault, over the day: how long it was, and what nobody saw of it."""
    from benchmarks.drawing import COLOURS, INK, PALE  # noqa: PLC0415  drawing alone needs matplotlib

    faults: list[list[Any]] = curves["faults"]
    kinds = [fault.what for fault in day.FAULTS]
    totals = {kind: sum(one[4] for one in faults if one[0] == kind) for kind in kinds}
    kinds.sort(key=lambda kind: (totals[kind], kind))
    axes = figure.subplots()
    for what, began, lasted, recovered, unobserved in faults:
        y, hidden = kinds.index(what), unobserved > 0
        shade = COLOURS[1] if hidden else COLOURS[0]
        axes.broken_barh(
            [(began, max(lasted, 0.03))],
            (y - 0.32, 0.64),
            facecolors=shade,
            hatch="////" if hidden else None,
            edgecolor="white",
            linewidth=0,
        )
        axes.broken_barh([(began + lasted, max(recovered, 0.01))], (y - 0.32, 0.64), facecolors=INK)
    for y, kind in enumerate(kinds):
        lasted = sum(one[2] for one in faults if one[0] == kind) * 60
        axes.text(
            curves["hours"] + 0.3, y, f"{lasted:.0f} min, unseen {totals[kind] / 60:.0f}", va="center", fontsize=8.5
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlim=(0, curves["hours"] + 4.2), xlabel="hours of virtual time", ylim=(-0.7, len(kinds) - 0.3))
    axes.set_xticks(range(0, int(curves["hours"]) + 1, 4 if curves["hours"] > 8 else 1))
    axes.grid(axis="y", color=PALE, linewidth=0.4)
    axes.set_title("What a fault hides is booked as unobserved; all else is seen, and no second is lost\n", fontsize=11)
    axes.text(
        0,
        len(kinds) - 0.25,
        "hatched: nobody could see the GPUs      plain: seen all the same      black: until all are seen again",
        fontsize=8.5,
        va="bottom",
    )


ENDURANCE = Group(
    name="endurance",
    title="An agent under a schedule of faults",
    about=(
        "First a day in virtual time: the real agent, observer, hands and ladder, with the hands' own thread, over "
        "a source, a scheduler, a listener and clocks that fail by a schedule (dice, seed 1). Checked at every "
        "tick: each GPU's parts against what was paid, that against the clock, each counter against the tick "
        "before. Then a whole daemon with a store over the stand-in NVML and a disk that fails by rules: its "
        "driver hangs and goes, its disk fills and hangs, its file descriptors run out under 400 connections, it "
        "is stopped, flooded and killed (kill -9 stands for the kernel's own end of a process that takes too much "
        "memory). Each page is held against those before it, over all lives. A second nobody saw is told as "
        "unobserved, with its reason: that is no error, and it is not less than the fault was long where the fault "
        "hides the GPUs. The driver is no real one; power cuts are tests/history/cuts.py's."
    ),
    measures=(
        "exporter/agent",
        "exporter/clock.py",
        "exporter/core",
        "exporter/history",
        "exporter/schedulers",
        "exporter/sources",
        "exporter/workloads.py",
        "exporter/web/server.py",
        "exporter/training/unix_socket.py",
        "exporter/training/inbox.py",
    ),
    run=run,
    quick=quick,
    pictures=(
        Picture(
            name="endurance",
            words="A day with a row for each kind of fault: bars where it lasted, hatched where no GPU could be seen,"
            " each followed"
            " by a short black mark until all are seen again; beside each row its minutes and the minutes unseen.",
            draw=draw,
            inches=(10.5, 5.2),
        ),
    ),
)
