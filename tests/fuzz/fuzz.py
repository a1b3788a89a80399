"""Group `fuzz`: every parser of foreign input under inputs that are not what they should be, and its table.

Owns how long each is tried and who does it: processes of their own, two at a time. Refuses to read an answer kindly: a
process that dies, hangs or says nothing is a finding like any other.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from benchmarks.figures import Row
from benchmarks.group import Group, Measured, Table
from benchmarks.machine import ROOT
from tests.fuzz.bombs import BIG, BOMBS, SECONDS, Bomb, Burst
from tests.fuzz.changing import Changer
from tests.fuzz.found import FOUND
from tests.fuzz.targets import TARGETS
from tests.fuzz.trying import SECONDS_EACH, Finding, Target, Tried, tried

T = TypeVar("T")
SEED = 1
GUIDED_SECONDS, PLAIN_SECONDS = 5.0, 2.0
QUICK_INPUTS = 40
_START_SECONDS = 120.0
"""A child may take so long more before it counts as hung: its imports are instrumented first."""
_LIBRARY = ROOT / ".venv" / "fuzz"
_WORKERS = 2
_MIB = 2**20
_LARGEST = 256
"""MiB that no bomb may cost."""
Trials = dict[str, tuple[Tried, Tried]]
"""By parser: with changed samples, and led by coverage (nothing, where that cannot be had)."""


def run() -> Measured:
    """All parsers, changed samples and guided inputs; then the bombs."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        trials = dict(zip(TARGETS, pool.map(_both, TARGETS.values()), strict=True))
        bursts = list(pool.map(_burst, range(len(BOMBS))))
    return measured(trials, list(zip(BOMBS, bursts, strict=True)))


def quick() -> Measured:
    """A few inputs for each, in this process, and no bombs."""
    trials: Trials = {}
    for name, target in TARGETS.items():
        samples = target.samples()
        changer = Changer(samples, SEED)
        trials[name] = (tried(target, [*samples, *(changer.one() for _ in range(QUICK_INPUTS))]), Tried())
    return measured(trials, [])


def _both(target: Target) -> tuple[Tried, Tried]:
    plain = _child(target, PLAIN_SECONDS)
    led = _child(target, GUIDED_SECONDS, f"{_LIBRARY}", *target.modules) if _LIBRARY.is_dir() else Tried()
    return plain, led


def _child(target: Target, seconds: float, *where: str) -> Tried:
    words = ["tests.fuzz.fuzzed", target.name, f"{seconds}", f"{SEED}", *where]
    return _asked(words, seconds, Tried, lambda why: Tried(findings=[Finding(why, "the whole process", b"")]))


def _burst(number: int) -> Burst:
    return _asked(["tests.fuzz.bombs", f"{number}"], SECONDS, Burst, lambda why: Burst(SECONDS, 0, why))


def _asked(words: Sequence[str], seconds: float, kind: type[T], failed: Callable[[str], T]) -> T:
    """What a child of this project says at its end."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, timeout=seconds + _START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return failed("hung: it did not end")
    try:
        return msgspec.json.decode(done.stdout, type=kind)
    except msgspec.MsgspecError:
        return failed(f"the process ended with {done.returncode}: {done.stderr[-300:].decode(errors='replace')}")


# -- the tables --


def measured(trials: Trials, bursts: Sequence[tuple[Bomb, Burst]]) -> Measured:
    """Rows and tables of what was found."""
    tables = [_parsers(trials), *([_bombs(bursts)] if bursts else []), _findings(trials), FOUND]
    return Measured(rows=list(_rows(trials, [burst for _, burst in bursts])), tables=tables)


def _rows(trials: Trials, bursts: Sequence[Burst]) -> Iterable[Row]:
    every = [one for both in trials.values() for one in both]
    inputs, findings = sum(one.inputs for one in every), sum(len(one.findings) for one in every)
    refused, slowest = sum(one.refused for one in every), max(one.slowest for one in every)
    often = f"{inputs:,} inputs to {len(trials)} parsers, seed {SEED}"
    yield _row("inputs that broke the law: another error, no reason, no end", often, f"{findings}", "", 0, findings)
    yield _row("refused, with a reason", often, f"{refused:,}", f"{100 * refused / inputs:.0f} % of all")
    yield _row(
        "the slowest input",
        often,
        f"{slowest:.3f} s",
        "its time is the clock's, others ran beside it",
        SECONDS_EACH,
        slowest,
    )
    if bursts:
        bad = sum(one.became not in ("taken", "refused") for one in bursts)
        dearest = max(one.memory for one in bursts) / _MIB
        often = f"{len(bursts)} bombs, a process each"
        yield _row("bombs that went off: another error, no end", often, f"{bad}", "", 0, bad)
        yield _row(
            "the dearest bomb",
            often,
            f"{dearest:.0f} MiB more",
            f"{max(one.seconds for one in bursts):.1f} s the slowest",
            _LARGEST,
            dearest,
        )


def _row(  # noqa: PLR0917  in the order of the table's columns
    what: str, often: str, value: str, spread: str, budget: float | None = None, held: float = 0
) -> Row:
    met = None if budget is None else held <= budget
    return Row(
        group="fuzz",
        what=what,
        often=often,
        median=value,
        spread=spread,
        budget="" if budget is None else f"<= {budget:g}",
        met=met,
    )


def _parsers(trials: Trials) -> Table:
    head = (
        "parser",
        "what it reads",
        "inputs changed by dice",
        "a second",
        "led by coverage",
        "a second",
        "taken",
        "refused",
        "slowest",
        "memory",
        "edges: samples > end",
        "findings",
    )
    rows = (_cells(TARGETS[name], *both) for name, both in trials.items())
    return Table(about="What was given to each parser, and what it did", head=head, rows=tuple(rows))


def _cells(target: Target, plain: Tried, led: Tried) -> tuple[str, ...]:
    from_samples, in_the_end = led.coverage
    return (
        target.name,
        target.what,
        f"{plain.inputs:,}",
        _rate(plain),
        f"{led.inputs:,}" if led.inputs else "-",
        _rate(led),
        f"{plain.taken + led.taken:,}",
        f"{plain.refused + led.refused:,}",
        f"{1e3 * max(plain.slowest, led.slowest):.0f} ms",
        f"{max(0, plain.memory) / _MIB:.0f} MiB",
        f"{from_samples:,} > {in_the_end:,}" if in_the_end else "-",
        f"{len(plain.findings) + len(led.findings)}",
    )


def _rate(one: Tried) -> str:
    return f"{one.inputs / one.seconds:,.0f}" if one.seconds else "-"


def _bombs(bursts: Sequence[tuple[Bomb, Burst]]) -> Table:
    rows = tuple(
        (bomb.what, bomb.target.name, burst.became, f"{1e3 * burst.seconds:,.0f} ms", f"{burst.memory / _MIB:.0f} MiB")
        for bomb, burst in bursts
    )
    about = f"Small things that grow: each to a process of its own; {BIG // 10**6} MB in gzip are 0.4 MB on the wire"
    return Table(about=about, head=("bomb", "given to", "it was", "in", "memory more"), rows=rows)


def _findings(trials: Trials) -> Table:
    rows = tuple(
        (name, found.error, found.where) for name, both in trials.items() for one in both for found in one.findings
    )
    return Table(
        about="What broke the law in this run", head=("parser", "error", "where"), rows=rows or (("none", "", ""),)
    )


FUZZ = Group(
    name="fuzz",
    title="Parsers under fuzz",
    about=(
        "Each parser of what others write gets samples of the project's own tests, then inputs made of them: "
        "changed by dice (bytes, lines, numbers beyond all bounds, nesting), and by atheris, which keeps what "
        "reaches new branches of the parser. An input is lawful where it is taken, or refused by the error that "
        f"the parser's docstring names, with a reason, within {SECONDS_EACH:g} s and a GiB. Beside that: a good "
        "input after a bad one is taken, refusals are counted, and what a page, a report or a recording leads to "
        "in the core leaves its books whole. SQLite, TOML, YAML, JSON and protobuf are libraries' and met as the "
        "daemon meets them. That nothing was found says nothing of inputs that were not tried."
    ),
    shortfalls={
        "inputs that broke the law: another error, no reason, no end": "two damaged rows of the history, one that ends "
        "before it begins and one with two samples of a moment, ended `report`; mended after this run, with tests",
    },
    measures=(
        "exporter/agent",
        "exporter/cluster",
        "exporter/config.py",
        "exporter/core",
        "exporter/engines",
        "exporter/history",
        "exporter/host",
        "exporter/job_files.py",
        "exporter/web/web_config.py",
        "exporter/report",
        "exporter/training",
        "exporter/schedulers",
        "exporter/simulate",
        "exporter/sources",
        "exporter/specs.py",
        "exporter/trace.py",
        "exporter/workloads.py",
    ),
    run=run,
    quick=quick,
)
