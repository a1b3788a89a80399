"""The table: which groups there are, how they are run, and where the result is written.

Owns the order of the groups, the table on the terminal and `docs/benchmarks.md`. Refuses to compare with earlier
runs: another machine, or the same one on another day, is another table.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.accounting import readings, replay, text
from benchmarks.daemons import serve
from benchmarks.dashboards import dashboards
from benchmarks.detection_table import detection
from benchmarks.figures import Row
from benchmarks.growth import growth
from benchmarks.history import history
from benchmarks.imports import imports
from benchmarks.machine import ROOT, machine, state_of_code
from benchmarks.report import markdown, table
from benchmarks.reporter import reporter
from benchmarks.reports import reports
from benchmarks.rules import rules
from benchmarks.sampling import sampling
from benchmarks.schedulers import schedulers
from benchmarks.scrape import scrape
from benchmarks.ticks import tick

GROUPS: dict[str, Callable[[], list[Row]]] = {
    "advance": readings,
    "tick": tick,
    "text": text,
    "replay": replay,
    "imports": imports,
    "scrape": scrape,
    "serve": serve,
    "schedulers": schedulers,
    "sampling": sampling,
    "rules": rules,
    "dashboards": dashboards,
    "reporter": reporter,
    "reports": reports,
    "growth": growth,
    "history": history,
    "detection": detection,
}
QUICK: dict[str, Callable[[], list[Row]]] = {
    "tick": partial(tick, quick=True),
    "sampling": partial(sampling, quick=True),
    "rules": partial(rules, quick=True),
    "dashboards": partial(dashboards, quick=True),
    "reporter": partial(reporter, quick=True),
    "reports": partial(reports, quick=True),
    "growth": partial(growth, quick=True),
    "history": partial(history, quick=True),
    "detection": partial(detection, quick=True),
}
"""Those that have a short form: it shows that they work, and its figures mean little."""
PAGE = ROOT / "docs" / "benchmarks.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the groups named, all without a name; the exit status is 1 when one could not be measured.

    A missed budget is told and is no failure: this measures, and the machine may have been busy.
    """
    args = _arguments(argv)
    where, when = machine(), state_of_code()
    began = time.monotonic()
    try:
        rows = [line for name in args.groups or GROUPS for line in _measured(name, quick=args.quick)]
    except (RuntimeError, OSError, LookupError, subprocess.CalledProcessError) as error:
        print(f"benchmarks: not measured, and no page written: {error}", file=sys.stderr)
        return 1
    print(f"{where}; {when}\n\n{table(rows)}", flush=True)
    if not (args.groups or args.quick):
        _write(markdown(rows, where=where, when=when, minutes=(time.monotonic() - began) / 60))
    missed = [line.what for line in rows if line.met is False]
    print("".join(f"\nBUDGET NOT MET: {what}" for what in missed), file=sys.stderr, end="\n" if missed else "")
    return 0


def _measured(name: str, *, quick: bool) -> Iterable[Row]:
    began = time.monotonic()
    rows = ({**GROUPS, **QUICK} if quick else GROUPS)[name]()
    print(f"{name}: {len(rows)} rows in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def _write(page: str) -> None:
    PAGE.parent.mkdir(exist_ok=True)
    draft = PAGE.with_name(f".{PAGE.name}.{os.getpid()}")
    draft.write_text(page, encoding="utf-8")
    draft.replace(PAGE)
    print(f"\nwritten to {PAGE.relative_to(Path(ROOT))}", file=sys.stderr)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description="Measure what the exporter costs. All groups: docs/benchmarks.md is written anew."
    )
    short = ", ".join(QUICK)
    parser.add_argument("--quick", action="store_true", help=f"shorten {short}, to see whether they work; no page")
    parser.add_argument("groups", nargs="*", metavar="GROUP", type=_group, help=", ".join(GROUPS))
    return parser.parse_args(argv)


def _group(name: str) -> str:
    """Refuse what is no group; `choices` would refuse an empty list too."""
    if name not in GROUPS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(GROUPS)}")
    return name
