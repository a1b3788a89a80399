"""How true our figures are: known kernels on a real GPU, read through the NVML source and booked by the ledger.

    .venv/bin/python -m benchmarks.accuracy [--gpu 0] [--out FOLDER] [--quick] [--python PATH]

Owns the command: its options, the order of things, the exit status. The loads are `known.loads`, what they mean
`known.compare`, the page `known.report`. Refuses to write outside its folder.

Exit status: 0 measured, whatever came out; 1 not measured; 2 the command line is wrong; 3 there is no GPU that can be
measured; 130 and 143 interrupted.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.known.board import Facts, NotMeasuredError, RefusedError, facts, first_look, limited
from benchmarks.known.compare import Row, UnfitError, compare
from benchmarks.known.loads import Load, chosen, seconds_of
from benchmarks.known.player import Player
from benchmarks.known.questions import Results
from benchmarks.known.record import Bench, record, trace_of
from benchmarks.known.report import Result, as_json, as_markdown, verdict
from benchmarks.known.stage import Child, Empty, Stage, StageError
from benchmarks.machine import ROOT, state_of_code
from exporter.clock import Clock, SystemClock
from exporter.config import Config
from exporter.core.model import SECOND, Spec
from exporter.sources.base import SourceError, TelemetrySource, open_source
from exporter.trace import TraceError, TraceHeader

FOLDER = ROOT / ".cache" / "accuracy"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the page and write it; see the module for the exit status."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = _measured(args, _loads(args))
    except NotMeasuredError as error:
        print(f"accuracy: not measured: {error}", file=sys.stderr)
        return error.status
    except (SourceError, StageError, TraceError, OSError) as error:
        print(f"accuracy: not measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("accuracy: interrupted: nothing was written but the traces so far", file=sys.stderr)
        return 130
    page = as_markdown(result)
    (args.out / "accuracy.md").write_text(page, encoding="utf-8")
    (args.out / "accuracy.json").write_bytes(as_json(result))
    print(page)
    print(
        f"accuracy: {verdict(result)}\nwritten to {args.out}: accuracy.md, accuracy.json, a trace a load",
        file=sys.stderr,
    )
    return 0


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    try:
        return chosen(quick=args.quick, only=args.only or ())
    except LookupError as error:
        raise NotMeasuredError(error.args[0], status=2) from error


def _measured(args: argparse.Namespace, loads: Sequence[Load]) -> Result:
    with ExitStack() as stack:
        player = Player(args.player) if args.player else None
        clock: Clock = player or SystemClock()
        source = _open(stack)
        device, reading, shared = first_look(source, clock, args.gpu, force=args.force)
        nvml = importlib.import_module("pynvml")
        head = facts(nvml, device, reading, shared=shared)
        if player is not None and not head.stand_in:
            raise NotMeasuredError(
                f"--player needs the tests' stand-in NVML, and this is driver {head.driver}", status=2
            )
        args.out.mkdir(parents=True, exist_ok=True)
        header = TraceHeader(simulated=head.stand_in, note=f"{head.name}, driver {head.driver}")
        bench = Bench(source, clock, device, args.out, header)
        crew = player or Child(python=args.python, uuid=device.uuid, folder=args.out, clock=clock)
        stack.callback(crew.close)
        run = _Run(bench, crew, player or Empty(clock), nvml, limits=args.limits)
        return _all(run, loads, head=head, quick=args.quick)


def _open(stack: ExitStack) -> TelemetrySource:
    try:
        source = open_source("nvml", Config())
    except SourceError as error:
        raise NotMeasuredError(f"{error}", status=3) from error
    stack.callback(source.close)
    return source


class _Run(NamedTuple):
    """What runs a load."""

    bench: Bench
    crew: Stage
    nobody: Stage
    nvml: Any
    limits: bool


def _all(run: _Run, loads: Sequence[Load], *, head: Facts, quick: bool) -> Result:
    """Run every load; one that fails costs its row. Raises NotMeasuredError when none but the empty board ran."""
    clock, began, when = run.bench.clock, run.bench.clock.now(), run.bench.clock.wall()
    spec = run.bench.device.spec or Spec(name="")  # first_look has refused a board without
    rows, not_run = list[Row](), list[tuple[str, str]]()
    print(f"{head.name}: {len(loads)} loads, about {seconds_of(loads) / 60:.0f} minutes", file=sys.stderr, flush=True)
    for load in loads:
        outcome = _one(run, load, spec)
        if isinstance(outcome, Row):
            rows.append(outcome)
        else:
            not_run.append((load.name, outcome))
        print(f"{load.name}: {_in_short(outcome)}", file=sys.stderr, flush=True)
    if all(row.load.kind == "nobody" for row in rows):
        raise NotMeasuredError("no load could run: " + "; ".join(dict.fromkeys(why for _, why in not_run)))
    hello = run.crew.hello()
    judged = {row.load.name: row for row in rows if row.judged}
    return Result(
        facts=head,
        when=datetime.fromtimestamp(when // SECOND, tz=UTC).isoformat(),
        code=state_of_code(),
        minutes=(clock.now() - began) / SECOND / 60,
        quick=quick,
        hello=hello,
        rows=tuple(rows),
        not_run=tuple(not_run),
        results=Results(judged, spec, hello.multiprocessors),
    )


def _one(run: _Run, load: Load, spec: Spec) -> Row | str:
    """Give the load's row, or why there is none; the trace of a load that did not run is not kept."""
    stage = run.nobody if load.kind == "nobody" else run.crew
    try:
        with limited(run.nvml, run.bench.device, load, allowed=run.limits):
            recording = record(run.bench, stage, load)
        end = recording.report.end
        if end.outcome == "done":
            return compare(recording, spec)
    except (RefusedError, UnfitError) as error:
        return str(error)
    trace_of(run.bench.folder, load).unlink()
    return f"{end.outcome}: {end.reason}"


def _in_short(outcome: Row | str) -> str:
    if isinstance(outcome, str):
        return f"not run: {outcome}"
    expected, reported = outcome.expected.ofu, outcome.reported.ofu
    ofu = "OFU not known" if expected is None or reported is None else f"OFU {expected:.1%}, reported {reported:.1%}"
    return f"{ofu}; {outcome.expected.state}, reported {outcome.reported.state}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description="Run known kernels on a GPU nobody else uses, and hold what the exporter says against the truth.",
    )
    parser.add_argument("--gpu", default="0", help="ordinal or UUID (default: 0)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of page and traces (default: .cache/accuracy)")
    parser.add_argument("--quick", action="store_true", help="one load of a kind: a minute and a half instead of seven")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the loads, one that has PyTorch")
    parser.add_argument("--only", nargs="+", metavar="LOAD", help="these loads alone")
    parser.add_argument("--force", action="store_true", help="measure although another process uses the GPU")
    parser.add_argument(
        "--limits",
        action="store_true",
        help="cap the power and lock the clock for two of the loads (root; the power limit is set back, and any lock of"
        " the clock is ended, one that was there before too)",
    )
    parser.add_argument("--player", type=Path, help=argparse.SUPPRESS)  # for tests: see known/player.py
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
