"""A summary as tables of words, and a line each for scripts. Owns which figures are said and how; refuses layout."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from exporter.receipt.model import Part
from exporter.receipt.sums.summary import Line, Stretch, Summary
from exporter.receipt.sums.worth import figure, fleet_table, gpus, worth_tables
from exporter.receipt.tables import Row, Table
from exporter.wording import NOTHING, amount, elapsed, moment, percent, short

MOST_ROWS, MOST_PARTS, MOST_STRETCHES = 20, 10, 14
"""Shown; --json has all."""
_BIGGEST = 3
_STEPS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_DAY = "%Y-%m-%d"


def summary_tables(found: Summary) -> Iterator[Table]:
    """All that is said of it, in order."""
    yield Table(title=_title(found), prose=tuple(_facts(found)))
    if found.fleet is not None:
        yield fleet_table(found.fleet, found)
    yield _ranks(found)
    yield _waterfall(found)
    yield Table(title="What to do first", prose=tuple(_advice(found)))
    yield _trend(found)
    yield from worth_tables(found)
    yield Table(title="How it is known", prose=(f"from {found.source}", *found.unseen))


def summary_lines(found: Summary) -> str:
    """One line for each row, and one for all: name, jobs, GPU-hours, product, lost, the worst leak, the trend."""
    rows = [_short(line, found) for line in (*found.rows, found.whole)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "".join(
        "  ".join(
            cell.ljust(width) if n in _LEFT else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in rows
    )


_LEFT = frozenset({0, 5, 6})


def _short(line: Line, found: Summary) -> Row:
    return (
        short(line.name, 24),
        _many(line.jobs, "job"),
        f"{line.gpu_hours:,.2f} GPU-h",
        percent(line.layers.product),
        f"lost {_lost(line, found)}",
        line.worst or NOTHING,
        sparkline(line.track) if line.track else sparkline(tuple(each.product for each in found.trend)),
    )


def sparkline(values: Sequence[float | None], *, most: float = 1.0) -> str:
    """A sign for each: of `most` an eighth, two, ..."""
    return "".join(_UNKNOWN if v is None else _STEPS[min(7, int(8 * v / most)) if most > 0 else 0] for v in values)


# -- the head --


def _title(found: Summary) -> str:
    simulated = " (SIMULATED)" if found.simulated else ""
    return f"{found.about[:1].upper()}{found.about[1:]}{simulated}"


def _facts(found: Summary) -> Iterator[str]:
    whole = found.whole
    length = elapsed(found.end - found.start)
    yield f"{moment(found.start)} to {moment(found.end)} ({length}), {_many(whole.jobs, 'job')}"
    models = f" ({', '.join(found.models)})" if found.models else ""
    yield f"{gpus(found.gpus)} GPUs on average{models}"
    money = "" if whole.money is None else f", {figure(whole.money)} {found.currency}"
    yield f"{figure(whole.gpu_hours)} GPU-hours{money}, {percent(whole.coverage)} observed"
    known = whole.layers
    three = f"GAU {percent(known.gau)} x ECTR {percent(known.ectr)} x eMFU {percent(known.emfu)}"
    yield f"{three} = {percent(known.product)}"
    if percent(known.floor) != percent(known.product):
        yield f"(at least {percent(known.floor)}: what some kernels were worth cannot be known)"
    if found.work is not None:
        yield f"{gpus(found.gpus)} GPUs did the work of {gpus(found.work)} that never wait and are never slow"
    yield f"lost: {_both(whole.lost_gpu_hours, whole.lost_money, found)}; {_a_year(found)}"


def _a_year(found: Summary) -> str:
    money, factor = found.whole.lost_money, found.a_year
    yearly = _both(found.whole.lost_gpu_hours * factor, None if money is None else money * factor, found)
    return f"at this rate {yearly} a year"


def _both(hours: float, money: float | None, found: Summary) -> str:
    return (
        f"{figure(hours)} GPU-hours"
        if money is None
        else f"{figure(money)} {found.currency} ({figure(hours)} GPU-hours)"
    )


def _lost(line: Line, found: Summary) -> str:
    return (
        f"{line.lost_gpu_hours:,.2f} GPU-h" if line.lost_money is None else f"{line.lost_money:,.2f} {found.currency}"
    )


def _many(count: float, what: str) -> str:
    return f"{amount(count)} {what}" + ("" if count == 1 else "s")


# -- who, and where --


def _ranks(found: Summary) -> Table:
    unit = found.currency or "GPU-h"
    job = found.by == "job"
    head = (
        f"By {found.by}",
        *(("what",) if job else ("jobs",)),
        "GPU-hours",
        "product",
        f"lost {unit}",
        "most to",
        f"by {found.every}",
    )
    rows = tuple(_rank(line, found) for line in found.rows[:MOST_ROWS])
    more = len(found.rows) - len(rows)
    return Table(title="Who lost most", head=head, rows=rows, prose=_and_more(more))


def _and_more(count: int) -> tuple[str, ...]:
    return (f"and {count} more; --json has them all",) if count > 0 else ()


def _rank(line: Line, found: Summary) -> Row:
    lost = line.lost_gpu_hours if line.lost_money is None else line.lost_money
    second = line.about if found.by == "job" else amount(line.jobs)
    return (
        line.name, second, f"{line.gpu_hours:,.2f}", percent(line.layers.product), f"{lost:,.2f}",
        line.worst or NOTHING, sparkline(line.track[-_WIDE:]),
    )  # fmt: skip


_WIDE = 14
"""Signs of a row's trend: the last so many periods."""


def _waterfall(found: Summary) -> Table:
    priced = found.whole.money is not None
    head = ("Where the time went", "layer", "GPU-hours", "share", *((found.currency,) if priced else ()))
    losses = [part for part in found.parts if part.layer in {"gau", "ectr", "emfu"}]
    shown = [*losses[:MOST_PARTS], *(part for part in found.parts if part not in losses)]
    rows = [
        (part.name, part.layer if part in losses else "", f"{part.gpu_hours:,.2f}", percent(part.share),
         *((f"{part.money or 0:,.2f}",) if priced else ()))
        for part in shown
    ]  # fmt: skip
    total = ("all", "", f"{found.whole.gpu_hours:,.2f}", "100.0 %", *((f"{found.whole.money:,.2f}",) if priced else ()))
    return Table(head=head, rows=(*rows, total), prose=_and_more(len(losses) - MOST_PARTS))


def _advice(found: Summary) -> Iterator[str]:
    losses = [part for part in found.parts if part.layer in {"gau", "ectr", "emfu"}]
    if not losses:
        yield "Nothing was lost."
    for number, part in enumerate(losses[:_BIGGEST], 1):
        yield f"{number}. {part.name}: {_both(part.gpu_hours, part.money, found)}"
        for word, said in (
            ("whose", _whose(part, found)),
            ("team", part.team),
            ("do", part.fix),
            ("watch", part.watch),
        ):
            if said:
                yield f"   {word}: {said}"


def _whose(part: Part, found: Summary) -> str:
    """Who has most of a leak; nothing where all of it is one's."""
    most = sorted((line for line in found.rows if part.name in line.leaks), key=lambda line: -line.leaks[part.name])
    if len(most) < 2:  # noqa: PLR2004  whose all of it is
        return ""
    return ", ".join(f"{line.name} {percent(line.leaks[part.name] / part.gpu_hours)}" for line in most[:_BIGGEST])


# -- when --


def _trend(found: Summary) -> Table:
    unit = found.currency or "GPU-h"
    head = (f"By {found.every}", "GPU-hours", "product", "", f"lost {unit}", "")
    shown = found.trend[-MOST_STRETCHES:]
    most = max((_lost_of(each) for each in shown), default=0.0)
    rows = tuple(
        (
            _when(each, found.every), f"{each.gpu_hours:,.2f}", percent(each.product), sparkline((each.product,)),
            f"{_lost_of(each):,.2f}", sparkline((_lost_of(each),), most=most),
        )
        for each in shown
    )  # fmt: skip
    more = len(found.trend) - len(shown)
    before = (f"and {more} before; --json has them all",) if more > 0 else ()
    return Table(title="Trend", head=head, rows=rows, prose=(*_turned(found), *before))


def _turned(found: Summary) -> Iterator[str]:
    """How the second half was, beside the first."""
    known = [each for each in found.trend if each.product is not None and each.gpu_hours > 0]
    if len(known) < 4:  # noqa: PLR2004  two and two
        return
    halves = known[: len(known) // 2], known[len(known) // 2 :]
    first, second = (_mean(half) for half in halves)
    losses = [_lost_of(each) for each in found.trend]
    gained = f"{100 * (second - first):+.1f} points"
    yield f"product {sparkline([each.product for each in found.trend])}"
    yield f"lost    {sparkline(losses, most=max(losses))}"
    yield f"product: {percent(first)} in the first half, {percent(second)} in the second ({gained})"


def _mean(half: Iterable[Stretch]) -> float:
    """Of the time paid for."""
    pairs = [(each.product or 0.0, each.gpu_hours) for each in half]
    return sum(product * hours for product, hours in pairs) / sum(hours for _, hours in pairs)


def _lost_of(each: Stretch) -> float:
    return each.lost_gpu_hours if each.lost_money is None else each.lost_money


def _when(each: Stretch, every: str) -> str:
    at = datetime.fromtimestamp(each.start, UTC)
    return at.strftime(f"{_DAY} %H:%M" if every == "hour" else _DAY)
