"""One figure of the table, and the ways to take it on a machine that has other things to do.

Owns rows, medians and their spread. Refuses to time anything itself.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from msgspec import Struct


class Row(Struct, frozen=True, kw_only=True):
    """One line of the table, in words."""

    group: str
    what: str
    often: str
    median: str
    spread: str
    budget: str = ""
    met: bool | None = None
    """None: no budget was set for it."""


def row(
    group: str,
    what: str,
    *,
    often: str,
    values: Sequence[float],
    unit: str,
    digits: int = 1,
    budget: float | None = None,
    judged: float | None = None,
    spread: str = "",
) -> Row:
    """Build a row from repeats in `unit`; a budget is held against `judged`, by default the median."""
    middle = median(values)
    held = middle if judged is None else judged
    return Row(
        group=group,
        what=what,
        often=often,
        median=f"{middle:,.{digits}f} {unit}",
        spread=spread or f"{min(values):,.{digits}f} - {max(values):,.{digits}f}",
        budget="" if budget is None else f"<= {budget:g} {unit}",
        met=None if budget is None else held <= budget,
    )


TITLES = ("what", "how often", "median", "spread (min - max unless named)", "budget", "met")


def cells(line: Row) -> tuple[str, ...]:
    """Give what stands below `TITLES`."""
    met = {None: "-", True: "yes", False: "NO"}[line.met]
    return line.what, line.often, line.median, line.spread, line.budget or "-", met


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align rows in columns for a terminal, a line each."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([told[0], "-" * max(map(len, told)), *told[1:]])


def percentile(values: Sequence[float], share: float) -> float:
    """Give the smallest value that at least `share` of `values` do not exceed: one that was really measured."""
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, rank - 1)]


@contextmanager
def own_garbage_only() -> Iterator[None]:
    """Keep the collector from walking the benchmark's own input, which a daemon does not hold; collection goes on."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
