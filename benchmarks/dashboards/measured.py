"""What the dashboards cost a Prometheus on two cores that has seen 10,000 simulated GPUs.

Owns the rows: of each board the slowest panel, all of them together, and every panel above its budget by name.
`python -m benchmarks.dashboards` prints each panel as a table of Markdown; with `--serve` it leaves the server running
to be looked at, and says where. Needs Debian's package prometheus.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.dashboards.fleet import QUICK, Size
from benchmarks.dashboards.panels import LIMIT_MS, RUNS, Timed, timed
from benchmarks.dashboards.server import Filled, filled
from benchmarks.figures import TITLES, Row, cells, row, table
from benchmarks.group import Group, Measured
from benchmarks.machine import machine, state_of_code
from benchmarks.rig.daemon import Memory, memory

_GROUP = "dashboards"
_BOARD_TITLES = (
    "board", "time", "panels", "slowest panel", "median, ms", "slowest first time, ms", "all panels, ms", "above 1 s",
)  # fmt: skip
_TITLES = ("board", "time", "panel", "median, ms", "CPU, ms", "first, ms", "samples read", "series")


def dashboards(*, quick: bool = False) -> list[Row]:
    """Fill a server, open every board on it, and look at what that took."""
    with TemporaryDirectory() as folder, filled(Path(folder), QUICK if quick else Size()) as server:
        before = memory(server.pid)
        found = timed(server.past.url, server.end, pid=server.pid, runs=1 if quick else RUNS)
        return [*rows(found), *sizes(server, before, memory(server.pid))]


def rows(found: Sequence[Timed]) -> list[Row]:
    """Refuse figures of panels that could not be answered; else two rows a board, and one for each slow panel."""
    failed = [f"{panel.board}, {panel.title}: {panel.errors[0]}" for panel in found if panel.errors]
    if failed:
        raise RuntimeError(f"{len(failed)} panels were not answered: {'; '.join(failed[:3])}")
    return [line for panels in _by_board(found) for line in _board(panels)]


def _by_board(found: Sequence[Timed]) -> Iterator[list[Timed]]:
    """Those of one board over one length of time together."""
    for group in dict.fromkeys((panel.board, panel.hours) for panel in found):
        yield [panel for panel in found if (panel.board, panel.hours) == group]


def _slowest_first(panels: Sequence[Timed]) -> list[Timed]:
    return sorted(panels, key=lambda panel: -panel.median)


def _board(panels: Sequence[Timed]) -> Iterator[Row]:
    slowest, *others = _slowest_first(panels)
    name, often = f"{slowest.board}, {_length(slowest.hours)}", f"{len(slowest.again)} x, after a first"
    yield _row(f"Board {name}: slowest of {len(panels)} panels ({slowest.title})", often, slowest.again, judged=True)
    for panel in others:
        if panel.median > LIMIT_MS:
            yield _row(f"- {panel.title}", often, panel.again, judged=True)
    together = [sum(times) for times in zip(*(panel.again for panel in panels), strict=True)]
    yield _row("- all panels, one after the other", often, together)
    first = max(panel.first for panel in panels)
    yield _row("- the slowest the first time, from the disk", "once", [first])


def _row(what: str, often: str, values: Sequence[float], *, judged: bool = False) -> Row:
    budget = LIMIT_MS if judged else None
    return row(_GROUP, what, often=often, values=values, unit="ms", digits=0, budget=budget)


def _length(hours: float) -> str:
    return f"{hours / 24:g} days" if hours > 48 else f"{hours:g} hours"


def sizes(server: Filled, before: Memory, after: Memory) -> list[Row]:
    """Rows of what the server held and took."""

    def once(what: str, value: float, unit: str) -> Row:
        return row(_GROUP, what, often="once", values=[value], unit=unit, digits=0, spread="-")

    held = server.sizes
    return [
        once("Series scraped, of the last hour", held["scraped"], "series"),
        once("Series recorded, at the end", held["recorded"], "series"),
        once("Samples recorded, of eight days", held["numSamples"], "samples"),
        once("- in blocks on the disk", held["bytes"] / (1 << 20), "MiB"),
        once("Resident memory of Prometheus, filled", before.now, "MiB"),
        once("- after all boards, at its peak", after.peak, "MiB"),
        once("Filling it", server.took, "s"),
    ]


# -- by hand --


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print every panel, or serve what is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboards", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small fleet, to see whether it works")
    parser.add_argument("--serve", metavar="FOLDER", type=Path, help="fill a server in this empty folder and wait")
    parser.add_argument("boards", nargs="*", metavar="BOARD", help="only these, such as fleet")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else Size()
    if args.serve:
        return _serve(args.serve, size)
    where, when = machine(), state_of_code()
    with TemporaryDirectory() as folder, filled(Path(folder), size) as server:
        before = memory(server.pid)
        found = timed(server.past.url, server.end, pid=server.pid, only=args.boards)
        held, load = sizes(server, before, memory(server.pid)), os.getloadavg()[0]
    columns = table(TITLES, map(cells, held))
    print(f"{where}; {when}; load average {load:.1f} after it\n\n{columns}\n\n{markdown(found)}")
    return int(any(panel.median > LIMIT_MS or panel.errors for panel in found))


def _serve(folder: Path, size: Size) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with filled(folder, size) as server:
        print(f"{server.past.url}  until {server.end}; Ctrl-C ends it", file=sys.stderr, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


def markdown(found: Sequence[Timed]) -> str:
    """Two tables: a line a board, and a line a panel, the slowest of a board first."""
    boards = [_overview(panels) for panels in _by_board(found)]
    panels = [_cells(panel) for panels in _by_board(found) for panel in _slowest_first(panels)]
    return f"{_table(_BOARD_TITLES, boards)}\n\n{_table(_TITLES, panels)}"


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ("---",) * len(titles), *lines))


def _overview(panels: Sequence[Timed]) -> tuple[str, ...]:
    slowest = _slowest_first(panels)[0]
    together, first = sum(panel.median for panel in panels), max(panel.first for panel in panels)
    slow = sum(panel.median > LIMIT_MS for panel in panels)
    return (
        slowest.board, _length(slowest.hours), f"{len(panels)}", slowest.title.replace("|", "\\|"),
        f"{slowest.median:,.0f}", f"{first:,.0f}", f"{together:,.0f}", f"{slow}",
    )  # fmt: skip


def _cells(panel: Timed) -> tuple[str, ...]:
    slow = "**" if panel.median > LIMIT_MS else ""
    return (
        panel.board, _length(panel.hours), panel.title.replace("|", "\\|"), f"{slow}{panel.median:,.0f}{slow}",
        f"{panel.cpu:,.0f}", f"{panel.first:,.0f}", f"{panel.samples:,}", f"{panel.series:,}",
    )  # fmt: skip


DASHBOARDS = Group(
    name="dashboards",
    title="Dashboards",
    about=(
        "Every panel of every dashboard, opened as Grafana opens it, on a real Prometheus with two cores: raw series "
        "of 1,250 nodes of eight GPUs and of their jobs for the last hour, all recorded ones for a week and a day. "
        "How they were made, every panel by name, and what follows for larger fleets: "
        "[Prometheus](prometheus.md#the-measurement-with-10000-gpus)."
    ),
    measures=("alerts", "dashboards", "exporter/cluster", "exporter/core", "exporter/simulate"),
    run=lambda: Measured(rows=dashboards()),
    quick=lambda: Measured(rows=dashboards(quick=True)),
)
