"""The records in words: docs/benchmarks.md, and the lines of the README that name figures.

Owns words and layout; every figure comes from a record. `python -m benchmarks.page` writes all of it, and is part of
`make docs`: it measures nothing, and marks each section whose code has changed since. With --check it only compares,
which `make lint` does: any change of measured code can add a mark.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import headlines
from benchmarks.figures import TITLES, cells
from benchmarks.group import Group
from benchmarks.machine import ROOT
from benchmarks.record import Record, changed, read
from benchmarks.suite import PARTS

PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- measured: written by `make docs` -->", "<!-- measured: end -->"
OLDER = "**Older than the code**"
Records = Mapping[str, Record]

_HEAD = """# Benchmarks

<!-- Written by `make docs` from benchmarks/records; changes made here are lost. -->

What the exporter costs, how true its figures are, and how it does beside others. Every section stands on one run of one
command, named below it with its commit, its day and its machine; it is in `benchmarks/records`, sealed, and CI refuses
figures that were changed by hand or stamped anew without a run. A section whose code has changed since says so.

    make bench                                 # all of it, hours; needs a quiet machine
    python benchmarks/run.py GROUP --record    # one section
    python benchmarks/run.py --quick GROUP     # to see whether it works; nothing is kept

Medians are shown with their spread. The machines are small, shared virtual ones, and differ by a factor of 1.5 from one
day to another: a figure near its budget should be measured again on yours.

**No GPU was at hand for any figure here.** NVML calls take the driver's time on the calling core, GPM samples above
all; add it to the CPU of the daemon. DCGM's host engine takes it in its own process. `make accuracy` measures on a real
board ([accuracy](accounting.md#accuracy-on-a-real-gpu)).
"""


def markdown(records: Records) -> str:
    """The whole page: what matters first, the budgets that are missed, then part by part."""
    parts = [_HEAD, "## In short", "", *headlines.lines(records, ""), "", *_budgets(records)]
    for title, groups in PARTS.items():
        parts += [f"## {title}", "", *(section(group, records.get(group.name)) for group in groups)]
    return "\n".join(parts)


def section(group: Group, record: Record | None) -> str:
    """One group: a warning if its figures are old, what they mean, the figures, the pictures, of which run they are."""
    head = f"### {group.title}\n"
    if record is None:
        return f"{head}\n{group.about}\n\nNo record yet: `{group.command} --record`.\n"
    parts = [head, *_mark(group, record), f"{group.about}\n"]
    if record.rows:
        parts.append(_table(TITLES, map(cells, record.rows)))
    parts += [f"{_relinked(one.about)}\n\n{_table(one.head, one.rows)}" for one in record.tables]
    parts += [f"![{picture.words}](pictures/bench-{picture.name}.svg)\n" for picture in group.pictures]
    stamp = record.stamp
    of = f"{stamp.day}, commit {stamp.commit}, {stamp.machine}; it took {_time(stamp.took)}"
    parts.append(f"`{group.command} --record`: {of}.\n")
    return "\n".join(parts)


def _relinked(text: str) -> str:
    """Name pages that have moved since a record was sealed by their present file."""
    return text.replace("docs/scale.md", "docs/prometheus.md")


def _mark(group: Group, record: Record) -> Iterator[str]:
    if paths := changed(group, record):
        named = ", ".join(f"`{path}`" for path in paths)
        yield f"> {OLDER}: {named} changed since commit {record.stamp.commit}. Measure it again.\n"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _budgets(records: Records) -> Iterator[str]:
    """How many budgets are kept; each that is not, with why and what next."""
    judged = [line for record in records.values() for line in record.rows if line.met is not None]
    missed = [
        (f"{line.what} ({group.title})", line.budget, line.median, group.shortfalls.get(line.what, "-"))
        for group in groups()
        for line in (records[group.name].rows if group.name in records else ())
        if line.met is False
    ]
    yield f"**Of {len(judged)} budgets {len(judged) - len(missed)} are met.**\n"
    if missed:
        yield _table(("not met", "budget", "measured", "why, and what next"), missed)


def groups() -> list[Group]:
    """All, in the order of the page."""
    return [group for part in PARTS.values() for group in part]


def in_readme(text: str, records: Records) -> str:
    """Put the figures that matter most between their marks; raises ValueError where these are gone."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has lost its marks {BEGIN} and {END}")
    return "\n".join([before + BEGIN, *headlines.lines(records, "docs/benchmarks.md"), END + after])


def all_records() -> dict[str, Record]:
    """Those there are, by group."""
    return {group.name: record for group in groups() if (record := read(group.name)) is not None}


def outdated(records: Records) -> dict[Path, str]:
    """The text of each page that no longer agrees with the records and the code."""
    pages = {PAGE: markdown(records), README: in_readme(README.read_text(encoding="utf-8"), records)}
    return {path: text for path, text in pages.items() if path.read_text(encoding="utf-8") != text}


def main(words: Sequence[str]) -> int:
    """Write what has changed, and draw what is missing; with --check only compare, and give 1 where a page is old."""
    records = all_records()
    old = outdated(records)
    if "--check" in words:
        for path in old:
            print(f"{path.relative_to(ROOT)} is outdated: run `make docs`", file=sys.stderr)
        return 1 if old else 0
    from benchmarks import drawing  # noqa: PLC0415 - the tables do not need it

    written = [path for group in groups() if group.name in records for path in drawing.draw(group, records[group.name])]
    for path, text in old.items():
        path.write_text(text, encoding="utf-8")
    print(*(f"wrote {path.relative_to(ROOT)}" for path in (*written, *old)), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
