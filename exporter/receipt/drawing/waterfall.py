"""From paid to useful: a step for every loss.

Owns the shapes: columns that fall to the right where all of them can be labelled; else, and on a phone, rows that fall
downward.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from exporter.receipt.drawing.canvas import NARROW, Draw, figure, line, rect, text
from exporter.receipt.drawing.lettering import SMALL, fitting, lines, width
from exporter.receipt.drawing.steps import LITTLE, LOSSES, Step, Whole, losses, steps
from exporter.wording import amount

_LAYERS = {
    "gau": ("lost to allocation (GAU)", "allocation", "GAU"),
    "ectr": ("lost computing time (ECTR)", "computing time", "ECTR"),
    "emfu": ("lost model FLOPs (eMFU)", "model FLOPs", "eMFU"),
}
_SLOT, _BROADEST = 93.0, 150.0
"""Of a column: the longest word of a leak's name fits in the first."""
_TOP, _PLOT = 46.0, 220.0
_LEAST = 1.5
"""What is there is seen."""
_ROW, _TALL = 23.0, 58.0
"""Of a row on a desk, and on a phone."""
_MANY = 12
"""Losses: where there are more, the smallest stand together."""


def waterfall(whole: Whole) -> str:
    """Empty where no time was held."""
    if not sum(part.gpu_hours for part in whole.parts) > 0:
        return ""
    said = "; ".join(
        f"{step.name} {amount(step.hours)} GPU-hours ({step.share}){_priced(step, whole)}" for step in steps(whole)
    )
    draw: Draw = lambda units: _drawn(whole, units)  # noqa: E731
    return figure("waterfall", "From paid to useful", said, draw, half=False)


def _drawn(whole: Whole, units: float) -> tuple[float, list[str]]:
    found = steps(whole, least=LITTLE if len(losses(whole)) > _MANY else 0.0)
    if units <= NARROW:
        return _tall_rows(found, whole, units)
    return _columns(found, whole, units) if len(found) * _SLOT <= units else _rows(found, whole, units)


def _priced(step: Step, whole: Whole) -> str:
    return "" if step.money is None else f", {step.money:,.2f} {whole.currency}"


def _layer(step: Step) -> str:
    """A colour alone says nothing to some."""
    return _LAYERS[step.kind][-1] if step.kind in LOSSES else ""


# -- columns --


def _columns(found: Sequence[Step], whole: Whole, units: float) -> tuple[float, list[str]]:
    slot = min(units / len(found), _BROADEST)
    left = (units - slot * len(found)) / 2
    named = [lines(step.name, slot - 3, size=SMALL) for step in found]
    base = _TOP + _PLOT
    figures = base + 22 + 15 * max(map(len, named))
    shapes = [line((0, base), (units, base), "axis"), *_brackets(found, left, slot), *_joints(found, left, slot)]
    for n, step in enumerate(found):
        middle = left + (n + 0.5) * slot
        shapes += _column(step, middle, slot)
        for row, words in enumerate(named[n]):
            shapes.append(text(middle, base + 18 + 15 * row, words, size=SMALL, anchor="middle"))
        shapes += _figures(step, whole, (middle, figures), room=slot - 4)
    return figures + (8 if whole.money is None else 24), shapes


def _column(step: Step, middle: float, slot: float) -> list[str]:
    wide, high = slot * 0.64, max(_PLOT * (step.before - step.after), _LEAST)
    y = min(_TOP + _PLOT * (1 - step.before), _TOP + _PLOT - high)
    bar = rect(middle - wide / 2, y, wide, high, f"fill {step.kind}")
    return [bar, text(middle, y - 6, step.share, anchor="middle", kind="bold")]


def _joints(found: Sequence[Step], left: float, slot: float) -> Iterator[str]:
    """From what is left after a step to where the next begins."""
    for n, (_, following) in enumerate(pairwise(found)):
        y = _TOP + _PLOT * (1 - following.before)
        yield line((left + (n + 0.82) * slot, y), (left + (n + 1.18) * slot, y), "joint")


def _figures(step: Step, whole: Whole, at: tuple[float, float], *, room: float) -> Iterator[str]:
    x, y = at
    hours = f"{step.hours:,.2f} GPU-h", f"{amount(step.hours)} GPU-h", f"{amount(step.hours)} h"
    yield text(x, y, fitting(room, *hours, size=SMALL), size=SMALL, anchor="middle", kind="mute")
    if step.money is not None:
        coin = whole.currency
        money = f"{step.money:,.2f} {coin}", f"{amount(step.money)} {coin}", amount(step.money)
        yield text(x, y + 16, fitting(room, *money, size=SMALL), size=SMALL, anchor="middle", kind="mute")


def _brackets(found: Sequence[Step], left: float, slot: float) -> Iterator[str]:
    """Which layer the losses below it are of."""
    n = 0
    for kind, of_kind in groupby(found, key=lambda step: step.kind):
        count = len(list(of_kind))
        if kind in LOSSES:
            start, room = left + n * slot + 4, count * slot - 8
            yield rect(start, 18, room, 3, f"fill {kind}")
            yield text(start + room / 2, 12, fitting(room, *_LAYERS[kind], size=SMALL), size=SMALL, anchor="middle")
        n += count


# -- rows --


def _rows(found: Sequence[Step], whole: Whole, units: float) -> tuple[float, list[str]]:
    """A line for each: its name, where it falls, and its figures in columns."""
    told = [(step.share, f"{step.hours:,.2f} GPU-h", _priced(step, whole)[2:]) for step in found]
    columns = [max(width(row[n], bold=not n) for row in told) + 14 for n in range(3)]
    layer = max(width(_layer(step), SMALL) for step in found) + 12
    left = min(max(width(step.name) for step in found), units * 0.3) + 12 + layer
    room = max(units - left - sum(columns) + (0 if columns[2] > 14 else 14), 60)  # noqa: PLR2004  the gap alone
    shapes: list[str] = []
    for n, step in enumerate(found):
        y = n * _ROW
        shapes.append(text(0, y + 15, _layer(step), size=SMALL, kind="mute"))
        shapes.append(text(layer, y + 15, fitting(left - layer - 12, step.name)))
        shapes += _fall(step, left, y + 4, room, high=14)
        if step.before < 1:
            x = left + step.before * room
            shapes.append(line((x, y + 18 - _ROW), (x, y + 4), "joint"))
        end = left + room
        for words, wide, kind in zip(told[n], columns, ("bold", "mute", "mute"), strict=True):
            end += wide
            shapes += [text(end, y + 15, words, anchor="end", kind=kind)] if words else []
    return _ROW * len(found), shapes


def _fall(step: Step, x: float, y: float, room: float, *, high: float) -> Iterator[str]:
    """Where it is in the whole."""
    yield rect(x, y, room, high, "track")
    long = max((step.before - step.after) * room, _LEAST)
    yield rect(x + min(step.after * room, room - long), y, long, high, f"fill {step.kind}")


def _tall_rows(found: Sequence[Step], whole: Whole, units: float) -> tuple[float, list[str]]:
    shapes: list[str] = []
    for n, step in enumerate(found):
        shapes += _tall_row(step, whole, n * _TALL, units)
    return _TALL * len(found), shapes


def _tall_row(step: Step, whole: Whole, y: float, units: float) -> Iterator[str]:
    money = _priced(step, whole)
    figures = f"{step.hours:,.2f} GPU-hours{money}", f"{amount(step.hours)} GPU-hours{money}"
    yield text(0, y + 13, fitting(units - width(step.share, bold=True) - 12, step.name))
    yield text(units, y + 13, step.share, anchor="end", kind="bold")
    yield text(0, y + 28, fitting(units - 44, *figures, size=SMALL), size=SMALL, kind="mute")
    if layer := _layer(step):
        yield text(units, y + 28, layer, size=SMALL, anchor="end", kind="mute")
    yield from _fall(step, 0, y + 34, units, high=12)
