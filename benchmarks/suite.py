"""The groups, in the order of the page, and what runs them: for the terminal, or for the record.

Owns that order and the command line. Refuses to compare with earlier runs: another machine, or the same one on another
day, is another table.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.dashboards.measured import DASHBOARDS
from benchmarks.detection.table import DETECTION
from benchmarks.figures import TITLES, cells, table
from benchmarks.fleet.rules import RULES
from benchmarks.fleet.storm import STORM
from benchmarks.group import Group
from benchmarks.machine import commit, machine, today
from benchmarks.node.accounting import ADVANCE, REPLAY, TEXT
from benchmarks.node.daemons import SERVE
from benchmarks.node.day import DAY_GROUP
from benchmarks.node.history import HISTORY
from benchmarks.node.imports import IMPORTS
from benchmarks.node.matrix import MATRIX
from benchmarks.node.otlp import OTLP
from benchmarks.node.peers import SIDE_BY_SIDE
from benchmarks.node.reporter import REPORTER
from benchmarks.node.reports import REPORTS
from benchmarks.node.sampling import SAMPLING
from benchmarks.node.schedulers import SCHEDULERS
from benchmarks.node.scrape import SCRAPE
from benchmarks.node.ticks import TICK
from benchmarks.record import RecordError, Stamp, made, uncommitted, write
from benchmarks.truth.estimates import ESTIMATES
from benchmarks.truth.gauges import GAUGES
from benchmarks.truth.second_opinion import SECOND_OPINION
from benchmarks.truth.zombies import ZOMBIES
from tests.fuzz.endurance import ENDURANCE
from tests.fuzz.fuzz import FUZZ
from tests.fuzz.soak import SOAK

PARTS: dict[str, tuple[Group, ...]] = {
    "Cost of a node": (
        SERVE, MATRIX, SIDE_BY_SIDE, SCRAPE, OTLP, SAMPLING, SCHEDULERS, ADVANCE, TICK, TEXT, REPORTER, REPORTS,
        HISTORY, REPLAY, IMPORTS, DAY_GROUP,
    ),
    "Cost of a fleet": (RULES, STORM, DASHBOARDS),
    "Accuracy": (SECOND_OPINION, ESTIMATES, GAUGES),
    "Detection": (DETECTION, ZOMBIES),
    "Robustness": (FUZZ, ENDURANCE, SOAK),
}  # fmt: skip
GROUPS = {group.name: group for part in PARTS.values() for group in part}
_FAILURES = (RuntimeError, OSError, LookupError, subprocess.CalledProcessError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the groups named, all without a name; the exit status is 1 when one could not be measured.

    A missed budget is told and is no failure: this measures, and the machine may have been busy.
    """
    args = _arguments(argv)
    failed = [name for name in args.groups or _measurable() if not _measured(GROUPS[name], args)]
    if failed:
        print(f"benchmarks: not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measurable() -> list[str]:
    """All groups but those whose recorded input is not here, which are told."""
    absent = [name for name, group in GROUPS.items() if group.needs is not None and not group.needs.exists()]
    for name in absent:
        print(f"{name}: left out: its recorded input is not here, {GROUPS[name].needs}", file=sys.stderr, flush=True)
    return [name for name in GROUPS if name not in absent]


def _measured(group: Group, args: argparse.Namespace) -> bool:
    """Run one and tell it; the others go on where it fails."""
    try:
        if args.record and (changed := uncommitted(group.measures)):
            raise RecordError(f"{', '.join(changed[:3])} is not committed: commit it, or leave out --record")
        where, begun = machine(), time.monotonic()
        found = (group.quick if args.quick and group.quick else group.run)()
        took = time.monotonic() - begun
        if args.record:
            write(made(group, found, Stamp(commit=commit(), day=today(), machine=where, took=took)))
    except _FAILURES as error:
        print(f"{group.name}: not measured: {error}", file=sys.stderr, flush=True)
        return False
    print(f"\n{group.title}: {where}; {took:.0f} s\n\n{table(TITLES, map(cells, found.rows))}", flush=True)
    for one in found.tables:
        print(f"\n{one.about}\n\n{table(one.head, one.rows)}", flush=True)
    missed = [line.what for line in found.rows if line.met is False]
    print("".join(f"\nBUDGET NOT MET: {what}" for what in missed), file=sys.stderr, flush=True)
    return True


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Measure what the exporter costs, and how right it is; `make docs` writes the page."
    )
    short = ", ".join(name for name, group in GROUPS.items() if group.quick)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help=f"shorten {short}, to see whether they work")
    how.add_argument("--record", action="store_true", help="keep the figures in benchmarks/records; commit them")
    parser.add_argument("groups", nargs="*", metavar="GROUP", type=_group, help=", ".join(GROUPS))
    return parser.parse_intermixed_args(argv)


def _group(name: str) -> str:
    """Refuse what is no group; `choices` would refuse an empty list too."""
    if name not in GROUPS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(GROUPS)}")
    return name
