"""What to do about a job, what a change would gain, what failed: as tables of words. Owns how these are said."""

from collections.abc import Iterator

from exporter.receipt.model import Failure, Part, Receipt, WhatIf
from exporter.receipt.tables import Row, Table
from exporter.wording import NOTHING, amount, elapsed, percent

_BIGGEST = 3
_FAILED = {
    "hung": "hung", "zombie": "zombie (time at rest)", "xid": "critical errors (Xid)", "unavailable": "unavailable",
    "restart": "restarts, and what recovery took", "rework": "steps made again",
}  # fmt: skip


def advice(receipt: Receipt) -> Table:
    """The biggest leaks, and what to do about each."""
    return Table(title="What to do first", prose=tuple(_leaks(receipt)))


def _leaks(receipt: Receipt) -> Iterator[str]:
    if not receipt.losses:
        yield "Nothing was lost."
    for number, part in enumerate(receipt.losses[:_BIGGEST], 1):
        yield f"{number}. {part.name}: {part.gpu_hours:,.2f} GPU-hours{_money(receipt, part.money)}"
        yield from (f"   {word}: {said}" for word, said in _ways(part) if said)


def _ways(part: Part) -> tuple[tuple[str, str], ...]:
    """Empty for a leak that a newer daemon has and this program does not know."""
    return ("team", part.team), ("do", part.fix), ("watch", part.watch)


def _money(receipt: Receipt, money: float | None) -> str:
    return "" if money is None else f", {money:,.2f} {receipt.currency}"


# -- what if --


def gains(receipt: Receipt) -> Table:
    """What each change alone would gain."""
    found = tuple(line for each in receipt.what_if for line in _gain(receipt, each))
    return Table(title="What if (each alone: no two of these lines are to be added)", prose=found) if found else Table()


def _gain(receipt: Receipt, each: WhatIf) -> Iterator[str]:
    yield f"{_change(receipt, each)}:"
    less = f"{each.gpu_hours:,.2f} GPU-hours less ({percent(each.share)}){_money(receipt, each.money)}"
    yield f"   the same work with {less}:"
    sooner = "" if each.sooner is None else f", or done {elapsed(each.sooner)} sooner"
    yield f"   {amount(_rounded(each.fewer_gpus))} GPUs fewer{sooner}"
    if each.gained_gpus is not None:
        money = "" if each.gained_money is None else f", which cost {each.gained_money:,.2f} {receipt.currency}"
        gained = amount(_rounded(each.gained_gpus))
        yield f"   or, in the same time, more work: that of {gained} GPUs at their peak{money}"


def _change(receipt: Receipt, each: WhatIf) -> str:
    match each.kind:
        case "right_size":
            return each.of if each.of.startswith("without") else f"MIG slice {each.of} instead of a whole GPU"
        case "fix_leak":
            return f"no {each.of}"
        case _:
            return f"eMFU {each.of} instead of {percent(receipt.layers.emfu)}"


def _rounded(gpus: float) -> float:
    return round(gpus, 2)


# -- what failed --


def failed(receipt: Receipt) -> Table:
    """How often, and what it cost."""
    priced = receipt.money is not None
    rows = tuple(_failure(each, priced=priced) for each in receipt.failures)
    head = ("What failed", "times", "GPU-hours", *((receipt.currency,) if priced else ()))
    return Table(head=head, rows=rows) if rows else Table()


def _failure(each: Failure, *, priced: bool) -> Row:
    hours = NOTHING if each.gpu_hours is None else f"{each.gpu_hours:,.2f}"
    money = (NOTHING if each.money is None else f"{each.money:,.2f}",) if priced else ()
    return (_FAILED.get(each.kind, each.kind), amount(each.times), hours, *money)
