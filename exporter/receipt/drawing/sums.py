"""What is drawn of many jobs: where their time went, who lost most, how it went, and what another's GPUs would cost."""

from collections.abc import Iterator, Sequence
from functools import partial

from exporter.receipt.drawing.bars import Bar, bars, legend
from exporter.receipt.drawing.canvas import Draw, figure, line, plain, rect, side_by_side, text
from exporter.receipt.drawing.job import layers
from exporter.receipt.drawing.lettering import SMALL, fitting, width
from exporter.receipt.drawing.steps import whole_of
from exporter.receipt.drawing.waterfall import waterfall
from exporter.receipt.sums.summary import Line, Rent, Stretch, Summary
from exporter.wording import amount, moment, percent

SHOWN = 15
"""Rows of a ranking that are drawn; the tables have more."""
MOST = 60
"""Periods: the latest."""
_KEYS = (("lost", "lost"), ("kept", "useful, not resolved or not seen"))
_TOP, _HIGH = 30.0, 170.0


def sums(found: Summary) -> list[str]:
    """In the order of a summary."""
    half = [partial(layers, found.whole.layers), partial(_rents, found.rents, found.currency)]
    return [waterfall(whole_of(found)), _ranking(found), _trend(found), *side_by_side(half)]


def _ranking(found: Summary) -> str:
    most = max((row.gpu_hours for row in found.rows), default=0.0)
    if len(found.rows) < 2 or not most > 0:  # noqa: PLR2004  a rank
        return ""
    rows = [_ranked(row, most, found.currency) for row in found.rows[:SHOWN]]
    said = ", ".join(f"{row.name} {row.said} ({row.note})" for row in rows)
    return bars("ranking", f"Who lost most, by {found.by}", said, rows, keys=_KEYS, half=False)


def _ranked(row: Line, most: float, currency: str) -> Bar:
    lost, held = row.lost_gpu_hours / most, row.gpu_hours / most
    said = f"{row.lost_gpu_hours:,.2f} GPU-h" if row.lost_money is None else f"{row.lost_money:,.2f} {currency}"
    worst = f", most to {plain(row.worst)}" if row.worst else ""
    pieces = ((0, lost, "lost"), (lost, held, "kept"))
    return Bar(name=row.name, said=said, pieces=pieces, note=f"{percent(row.layers.product)} useful{worst}")


def _trend(found: Summary) -> str:
    """A column for each period: how much was held, how much of that was lost, and which share was useful."""
    shown = found.trend[-MOST:]
    if len(shown) < 2 or not any(each.gpu_hours > 0 for each in shown):  # noqa: PLR2004  a trend
        return ""
    said = ", ".join(
        f"{moment(each.start)} {amount(each.gpu_hours)} GPU-hours, {percent(each.product)} useful" for each in shown
    )
    draw: Draw = lambda units: _columns(shown, units)  # noqa: E731
    return figure("trend", "GPU-hours held and lost, and the useful share", said, draw, half=False)


def _columns(shown: Sequence[Stretch], units: float) -> tuple[float, list[str]]:
    most = max(each.gpu_hours for each in shown)
    left = width(amount(most), SMALL) + 8
    slot, base = (units - left) / len(shown), _TOP + _HIGH
    shapes = [
        line((left, base), (units, base), "axis"),
        line((left, _TOP), (units, _TOP), "rule"),
        text(left - 6, _TOP + 4, amount(most), size=SMALL, anchor="end", kind="mute"),
        text(left - 6, base, "0", size=SMALL, anchor="end", kind="mute"),
    ]
    for n, each in enumerate(shown):
        shapes += _period(each, left + n * slot, slot, most)
    for at, anchor, each in ((left, "start", shown[0]), (units, "end", shown[-1])):
        shapes.append(text(at, base + 17, _day(each.start), size=SMALL, anchor=anchor, kind="mute"))
    more, high = legend(_KEYS, base + 26, units)
    return base + 26 + high, shapes + more


def _period(each: Stretch, x: float, slot: float, most: float) -> Iterator[str]:
    base, wide = _TOP + _HIGH, slot * 0.72
    held, lost = (_HIGH * hours / most for hours in (each.gpu_hours, each.lost_gpu_hours))
    lost = min(lost, held)
    yield rect(x + (slot - wide) / 2, base - held, wide, held - lost, "fill kept")
    yield rect(x + (slot - wide) / 2, base - lost, wide, lost, "fill lost")
    words = next((each for each in _shares(each) if width(each, SMALL, bold=True) <= slot - 3), "")
    if words:
        yield text(x + slot / 2, base - held - 6, words, size=SMALL, anchor="middle", kind="bold")


def _shares(each: Stretch) -> tuple[str, ...]:
    return (percent(each.product), "" if each.product is None else f"{100 * each.product:.0f} %")


def _day(at: float) -> str:
    return moment(at).partition(" ")[0]


def _rents(found: Sequence[Rent], currency: str, *, half: bool) -> str:
    """What an hour of useful work costs here and there."""
    own = found[0].own_per_useful_hour if found else None
    prices = [*([] if own is None else [("own", own, "")]), *(_rent(each) for each in found)]
    most = max((price for _, price, _ in prices), default=0.0)
    if not most > 0:
        return ""
    rows = [
        Bar(name=name, said=f"{price:,.2f} {currency}", pieces=((0, price / most, "busy"),), note=note)
        for name, price, note in prices
    ]
    said = ", ".join(f"{row.name} {row.said}" for row in rows)
    return bars("rents", "What a useful GPU-hour costs", said, rows, half=half)


def _rent(each: Rent) -> tuple[str, float, str]:
    name = fitting(300, f"rented: {each.name}", "rented")
    note = f"own is cheaper from {percent(each.break_even)} useful on"
    return name, each.per_useful_hour, note
