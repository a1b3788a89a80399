"""Rows with a bar each: a name, what it is drawn to, its figure, and a note where there is one.

Owns how such rows are laid out on a desk and on a phone. Refuses what they are of.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from exporter.receipt.drawing.canvas import NARROW, Draw, figure, line, rect, text
from exporter.receipt.drawing.lettering import SMALL, cut, fitting, width

Piece = tuple[float, float, str]
"""From, to, as shares of the room; and the class of its fill."""
_LEAST, _NONE = 1.5, 1e-6
"""Units in which a piece is seen; and the share that is a rounding of nothing."""
_ROW, _HIGH, _TALL = 26.0, 14.0, 44.0
_LABEL, _NOTE = 0.32, 0.42
"""Of the width, at most."""
_GAP = 10.0


class Bar(Struct, frozen=True, kw_only=True):
    """One row."""

    name: str
    said: str
    pieces: tuple[Piece, ...] = ()
    note: str = ""
    ticks: tuple[float, ...] = ()
    """Marks, as shares of the room."""
    hills: tuple[float, ...] = ()
    """How many there are along the room, as shares of the most."""
    loud: bool = False


def bars(
    key: str, title: str, said: str, rows: Sequence[Bar], *, keys: Sequence[tuple[str, str]] = (), half: bool = True
) -> str:
    """A figure of them; `keys` says what fills mean, each with its words. Empty without any row."""
    if not rows:
        return ""
    draw: Draw = lambda units: _drawn(rows, units, keys)  # noqa: E731
    return figure(key, title, said, draw, half=half)


def _drawn(rows: Sequence[Bar], units: float, keys: Sequence[tuple[str, str]]) -> tuple[float, list[str]]:
    shapes: list[str] = []
    y = 2.0
    one = _one_line(rows, units) if units > NARROW else None
    for row in rows:
        if one is None:
            shapes += _stacked(row, y, units)
            y += _TALL + (16 if row.note else 0)
        else:
            shapes += _inline(row, y, one)
            y += _ROW
    more, high = legend(keys, y + 4, units)
    return y + high, shapes + more


class _Columns(Struct, frozen=True):
    """Where the bar and what follows it are."""

    bar: float
    end: float
    said: float
    note: float
    units: float


def _one_line(rows: Sequence[Bar], units: float) -> _Columns:
    """As wide as the words need."""
    label = min(max(width(row.name, bold=row.loud) for row in rows), units * _LABEL) + _GAP
    said = max(width(row.said, bold=True) for row in rows)
    note = min(max(width(row.note, SMALL) for row in rows), units * _NOTE)
    end = units - said - _GAP - (note + _GAP if note else 0)
    return _Columns(bar=label, end=max(end, label + 40), said=end + _GAP + said, note=note, units=units)


def _inline(row: Bar, y: float, at: _Columns) -> Iterator[str]:
    yield text(0, y + 15, cut(row.name, at.bar - _GAP, bold=row.loud), kind=_weight(row))
    yield from _bar(row, at.bar, y + 4, at.end - at.bar)
    yield text(at.said, y + 15, row.said, anchor="end", kind="bold")
    if row.note:
        room = at.units - at.said - _GAP
        yield text(at.said + _GAP, y + 15, cut(row.note, room, size=SMALL), size=SMALL, kind="mute")


def _stacked(row: Bar, y: float, units: float) -> Iterator[str]:
    said = fitting(units * 0.6, row.said, bold=True)
    room = units - width(said, bold=True) - _GAP
    yield text(0, y + 13, cut(row.name, room, bold=row.loud), kind=_weight(row))
    yield text(units, y + 13, said, anchor="end", kind="bold")
    if row.note:
        yield text(0, y + 28, cut(row.note, units, size=SMALL), size=SMALL, kind="mute")
        y += 16
    yield from _bar(row, 0, y + 20, units)


def _weight(row: Bar) -> str:
    return "bold" if row.loud else ""


def _bar(row: Bar, x: float, y: float, room: float) -> Iterator[str]:
    yield rect(x, y, room, _HIGH, "track")
    for start, end, kind in row.pieces:
        if end - start > _NONE:
            long = max((end - start) * room, _LEAST)
            yield rect(x + min(start * room, room - long), y, long, _HIGH, f"fill {kind}")
    for n, hill in enumerate(row.hills):
        if hill:
            wide, high = room / len(row.hills), max(hill * _HIGH, _LEAST)
            yield rect(x + n * wide, y + _HIGH - high, wide, high, "fill busy")
    for tick in row.ticks:
        yield line((x + tick * room, y - 3), (x + tick * room, y + _HIGH + 3), "tick")


def legend(keys: Sequence[tuple[str, str]], y: float, units: float) -> tuple[list[str], float]:
    """Fills and their words, in as many lines as they need."""
    shapes: list[str] = []
    x, first = 0.0, y
    for kind, words in keys:
        long = 16 + width(words, SMALL)
        if x and x + long > units:
            x, y = 0.0, y + 18
        shapes += [rect(x, y + 3, 11, 11, f"fill {kind}"), text(x + 16, y + 13, words, size=SMALL)]
        x += long + 14
    return shapes, (y - first + 22 if keys else 0.0)
