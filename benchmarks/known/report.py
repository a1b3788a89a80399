"""The result on paper: one Markdown page and the same as JSON.

Owns the words and the rounding. Refuses to hide: what did not run, was not seen, or missed the target is told there,
and a page made without a GPU says so in its first line.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

from benchmarks.known.board import Facts
from benchmarks.known.compare import TARGET, Row, mean_absolute_error
from benchmarks.known.questions import QUESTIONS, Results
from benchmarks.known.stage import Hello

_FIGURES = (("OFU", "ofu"), ("wait", "wait"), ("memory_bound", "memory_bound"), ("host_overhead", "host_overhead"))
_NO_ANSWER = "Not answered: its loads did not run, or differ too little."
_SETS = {
    "torch": "PyTorch and libcuda",
    "cuda": "the reduced set, through libcuda alone: no matrix product of a library, so the target cannot be judged",
    "none": "none: libcuda could not be used",
    "played": "played back from a file: no kernel ran",
}


class Result(Struct, frozen=True, kw_only=True):
    """All of one run."""

    facts: Facts
    when: str
    """UTC, to the second."""
    code: str
    """Date and commit of the code."""
    minutes: float
    quick: bool
    hello: Hello
    rows: tuple[Row, ...]
    not_run: tuple[tuple[str, str], ...]
    """Load and reason."""
    results: Results

    @property
    def error(self) -> float | None:
        """Mean absolute error of OFU on large products, 0-1."""
        return mean_absolute_error(self.rows)[0]


def verdict(result: Result) -> str:
    """Hold the mean absolute error against its target, in one line."""
    error, count = mean_absolute_error(result.rows)
    target = f"{100 * TARGET:g} percentage points"
    if error is None:
        return f"NOT JUDGED: no large matrix product was measured, so nothing is known about the target of {target}."
    said = f"the mean absolute error of OFU on {count} large products is {100 * error:.2f} percentage points"
    return f"{'meets' if error <= TARGET else 'MISSES'} the target: {said} (target: at most {target})."


def as_json(result: Result) -> bytes:
    """Everything, with nothing rounded; shares 0-1, base units."""
    head = {
        "stand_in": result.facts.stand_in,
        "board": result.facts,
        "when": result.when,
        "code": result.code,
        "minutes": result.minutes,
        "quick": result.quick,
        "loads": result.hello,
        "mean_absolute_error": result.error,
        "target": TARGET,
        "rows": result.rows,
        "not_run": dict(result.not_run),
        "questions": {question.ask: question.answer(result.results) for question in QUESTIONS},
    }
    return msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n"


def as_markdown(result: Result) -> str:
    """Give the page."""
    return "\n".join(_page(result)) + "\n"


def _page(result: Result) -> Iterator[str]:
    facts = result.facts
    yield f"# Accuracy on {facts.name}\n"
    if facts.stand_in:
        yield "**NOT A MEASUREMENT: the driver was a stand-in, and no GPU ran anything.**\n"
    yield from _head(result)
    yield f"\nIt {verdict(result)}" if result.error is not None else f"\n{verdict(result)}"
    yield "\n## Expected and reported\n"
    yield (
        "Shares of the observed time in per cent, errors in percentage points; a dash: not known, or not seen. `wait`"
        " is the time without a kernel. A row in brackets was unobserved for more than 5 % of its time: not judged.\n"
    )
    yield from _table(_header(), (_cells(row) for row in result.rows))
    yield "\n## What the board said\n"
    yield "Means over the same time.\n"
    yield from _table(_SIGNAL_COLUMNS, (_signals(row) for row in result.rows))
    yield "\n## Open questions\n"
    for question in QUESTIONS:
        yield f"- {question.ask} {question.answer(result.results) or _NO_ANSWER}"
    if result.not_run:
        yield "\n## Not run\n"
        yield from (f"- `{name}`: {reason}" for name, reason in result.not_run)


def _head(result: Result) -> Iterator[str]:
    facts = result.facts
    yield f"- driver {facts.driver}, spec {facts.spec}; {result.when}, {result.code}; {result.minutes:.1f} minutes"
    yield (
        f"- power limit {_of(facts.power_limit_watts, 1, 'W')}; SM clock at most"
        f" {_of(facts.max_sm_clock_hz, 1e6, 'MHz')}, tensor reference clock {_of(facts.reference_clock_hz, 1e6, 'MHz')}"
    )
    yield f"- loads: {_SETS.get(result.hello.set, result.hello.set)}{' (--quick)' if result.quick else ''}"
    if facts.shared:
        yield f"- **FORCED: the GPU {facts.shared}, whose work is in these figures**"
    if result.hello.versions:
        yield f"- {result.hello.versions}"


def _of(value: float | None, unit: float, name: str) -> str:
    return "not told" if value is None else f"{value / unit:,.0f} {name}"


def _header() -> tuple[str, ...]:
    figures = [cell for name, _ in _FIGURES for cell in (f"{name} exp.", "rep.", "error")]
    return ("load", "s", *figures, "state exp.", "rep.")


def _cells(row: Row) -> Iterable[str]:
    yield row.load.name if row.judged else f"({row.load.name})"
    yield f"{row.seconds:.1f}"
    for _, name in _FIGURES:
        yield _per_cent(getattr(row.expected, name), "{:.1f}")
        yield _per_cent(getattr(row.reported, name), "{:.1f}")
        yield _per_cent(getattr(row.errors, name), "{:+.1f}")
    yield row.expected.state
    yield f"**{row.reported.state}**" if row.errors.state else row.reported.state


def _per_cent(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(100 * value)


_SIGNAL_COLUMNS = (
    "load", "gr_engine", "sm", "tensor", "dram", "fp32", "SM clock, MHz", "power, W", "TFLOP/s", "GB/s", "unobserved",
    "booked",
)  # fmt: skip
_FORMS: tuple[tuple[str, Callable[[float], str]], ...] = (
    *(
        (name, "{:.4f}".format)
        for name in ("gr_engine_active", "sm_active", "tensor_active", "dram_active", "fp32_active")
    ),
    ("sm_clock_hz", lambda hertz: f"{hertz / 1e6:.0f}"),
    ("power_watts", "{:.0f}".format),
)


def _signals(row: Row) -> Iterable[str]:
    yield row.load.name
    for name, form in _FORMS:
        yield form(row.signals[name]) if name in row.signals else "-"
    yield f"{row.truth.flops / 1e12:.1f}"
    yield f"{row.truth.bytes / 1e9:.0f}"
    yield f"{row.unobserved:.1%}"
    most = sorted(row.leaks.items(), key=lambda item: -item[1])
    yield ", ".join(f"{name} {share:.1%}" for name, share in most if share >= 0.0005)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    columns = list(header)
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(columns) - 1))} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
