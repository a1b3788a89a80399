"""The command that prints the user's map of the twelve leaks: for a terminal, as docs/leaks.md, as JSON.

Owns its forms. Refuses facts: they are in `exporter.core.leaks.twelve`.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec

from exporter.core.leaks import LAYER_OF, NAMES
from exporter.core.leaks.twelve import LITERATURE, OTHERS, TWELVE, USEFUL, WATERFALLS, Expected, Other, Seed

_NARROWEST, _WIDEST = 40, 120
"""Columns: no line is cut, and none is too long to read."""
_LABEL = 9

_INTRO = """\
# The twelve leaks

Printed by `gpu-efficiency leaks --markdown` (`make docs`) from the table in `exporter/core/leaks/twelve.py`;
`gpu-efficiency leaks` prints it for a terminal, `--json` for programs.

What people call a leak is here one or more rows of [the ledger](metrics.md#values-of-leak), so that its GPU-seconds and
its money can be asked for by name: `gpu_efficiency_node_seconds_total{leak="..."}`,
`cluster_leak:gpu_efficiency_cost:per_hour{leak="..."}`.

| # | leak | layer | team | booked as | do first |
|---|---|---|---|---|---|"""
_WATCH = """
## What to watch

In the documents this project started from, the metric column of the inference table had slipped by some rows (KV-cache
pressure was given the unoccupied GPU-hour ratio); here each leak has the metric that fits it: 9 KV-cache use,
preemptions and tokens computed twice, 10 latency inflation by prefills (inter-token p99 and time to first token), 11
batch fill against queue delay, 12 draft acceptance and tokens per forward pass.

Evidence: *measured* by hardware counters and the scheduler, *reported* by the workload, told by the serving *engine*,
or *estimated* by a formula. What is reported or told takes nothing until somebody speaks.

| # | metric to watch | series | evidence | what must speak | runbook |
|---|---|---|---|---|---|"""
_EXPECT = """
## What to expect

GPU-hours lost of 100 paid. **Every range is an engineering estimate (E)**: most fleets should lie in it. The figures
beside it are what it was drawn after; each was measured on a system of its own.

| # | leak | training | inference |
|---|---|---|---|"""
_REST = """
## Rows that are none of the twelve

| row | layer | what it is | training | inference | runbook |
|---|---|---|---|---|---|"""
_LITERATURE = """
## Literature

| | who | figure |
|---|---|---|"""


def leaks(args: argparse.Namespace) -> int:
    """Print the map."""
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(_tree()), indent=2).decode() + "\n")
    elif args.markdown:
        sys.stdout.write("\n".join(_markdown()) + "\n")
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        print("\n".join(_pages(min(max(columns, _NARROWEST), _WIDEST))))
    return 0


def leaks_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `leaks`."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as docs/leaks.md")
    form.add_argument("--json", action="store_true", help="for programs, with the example waterfalls")


# -- for programs --


def _tree() -> dict[str, object]:
    return {
        "twelve": TWELVE,
        "others": OTHERS,
        "useful": dict(USEFUL),
        "literature": dict(LITERATURE),
        "waterfalls": {name: dict(hours) for name, hours in WATERFALLS.items()},
    }


# -- for a terminal --


def _pages(width: int) -> Iterator[str]:
    yield from _wrapped(
        "Where paid GPU time is lost: twelve leaks, and the rows of the ledger that book each. Expected: GPU-hours of"
        " 100 paid, all engineering estimates (E), with the figures they were drawn after; see the end.",
        width,
        indent=0,
    )
    yield from chain.from_iterable(_seed_lines(seed, width) for seed in TWELVE)
    yield from ("", "Rows that are none of the twelve")
    yield from chain.from_iterable(_other_lines(other, width) for other in OTHERS)
    yield from ("", "What is left", "", "  useful", *_ranges(USEFUL["training"], USEFUL["inference"], width))
    yield from ("", "Drawn after")
    for key, source in LITERATURE.items():
        yield from ("", f"  {key}", *_wrapped(f"{source.work}: {source.figure}", width, indent=4))


def _seed_lines(seed: Seed, width: int) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(f"{seed.number:2} {seed.name}", width, subsequent_indent="   ")
    yield from _fact("layer", f"{', '.join(seed.layers)}; team {seed.team}", width)
    yield from _fact("booked", ", ".join(seed.rows), width)
    yield from _fact("watch", seed.watch, width)
    yield from chain.from_iterable(_wrapped(name, width, indent=6) for name in seed.series)
    yield from _fact("first", seed.fix, width)
    yield from _fact("evidence", f"{', '.join(seed.evidence)}: {seed.needs}", width)
    yield from _ranges(seed.training, seed.inference, width)
    yield from _runbook(seed, width)


def _other_lines(other: Other, width: int) -> Iterator[str]:
    yield from ("", f"  {other.row}", *_wrapped(f"{other.what} ({_layer(other.row)})", width, indent=4))
    yield from _ranges(other.training, other.inference, width)
    yield from _runbook(other, width)


def _ranges(training: Expected | None, inference: Expected | None, width: int) -> list[str]:
    return [
        *_fact("training", _expected(training, " h of 100"), width),
        *_fact("infer.", _expected(inference, " h of 100"), width),
    ]


def _runbook(of: Seed | Other, width: int) -> list[str]:
    return _fact("runbook", f"docs/runbooks/{of.runbook}.md", width) if of.runbook else []


def _fact(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"    {label:<{_LABEL}}",
        subsequent_indent=" " * (4 + _LABEL),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(text: str, width: int, *, indent: int) -> list[str]:
    """Lines of a text; a series' name stays whole, so that it can be copied."""
    gap = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=gap, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False
    )


# -- for docs/leaks.md --


def _markdown() -> Iterator[str]:
    yield _INTRO
    for s in TWELVE:
        yield _row(f"{s.number}", s.name, ", ".join(s.layers), s.team, _coded(s.rows), s.fix)
    yield _WATCH
    for s in TWELVE:
        yield _row(f"{s.number}", s.watch, _coded(s.series), ", ".join(s.evidence), s.needs, _linked(s))
    yield _EXPECT
    for s in TWELVE:
        yield _row(f"{s.number}", s.name, _expected(s.training), _expected(s.inference))
    yield _row("", "**useful**", _expected(USEFUL["training"]), _expected(USEFUL["inference"]))
    yield _REST
    for o in OTHERS:
        yield _row(f"`{o.row}`", _layer(o.row), o.what, _expected(o.training), _expected(o.inference), _linked(o))
    yield _LITERATURE
    yield from (_row(f"[{key}]", source.work, source.figure) for key, source in LITERATURE.items())
    yield "\nTwo example waterfalls within these ranges, in hours and in money: [worked example](worked-example.md)."


def _row(*cells: str) -> str:
    """One row of a table; a bar in a cell, as in a selector, would end it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _linked(of: Seed | Other) -> str:
    return f"[{of.runbook}](runbooks/{of.runbook}.md)" if of.runbook else ""


# -- words for both --


def _layer(row: str) -> str:
    return LAYER_OF[NAMES.index(row)]


def _expected(of: Expected | None, unit: str = "") -> str:
    """Its hours, and what they were drawn after."""
    if of is None:
        return "does not occur"
    drawn = ", ".join(f"[{key}]" for key in of.sources) or "E: engineering estimate"
    return f"{of.low:g} to {of.high:g}{unit} ({drawn})"
