"""How a job went: which share of its time was useful, and which was lost to what, from its start to its end.

Owns how pieces of time are put together and laid over one another. Refuses to guess between them: each is drawn flat.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from exporter.receipt.drawing.bars import legend
from exporter.receipt.drawing.canvas import Draw, figure, line, path, text
from exporter.receipt.drawing.lettering import SMALL, width
from exporter.receipt.model import Moment, Receipt
from exporter.wording import elapsed, percent

MOST = 160
"""Pieces that a drawing has; a year of samples is put together into so many."""
KEYS = (("useful", "useful"), ("emfu", "lost model FLOPs, or not resolved"), ("ectr", "lost computing time"),
        ("gau", "lost to allocation"), ("unobserved", "not seen"))  # fmt: skip
_HIGH, _TOP, _BELOW = 150.0, 12.0, 26.0
_SHOWN = 0.0005
"""A share that rounds to 0.1 % has its word."""


class Stretch(Struct, frozen=True, kw_only=True):
    """A piece: up to which share of the time held each kind reaches, in the order of KEYS."""

    start: float
    end: float
    held: float
    """GPU-seconds."""
    upto: tuple[float, ...]


def course(receipt: Receipt, *, half: bool) -> str:
    """Empty where nobody kept it, or in one piece only."""
    found = stretches(receipt.course)
    if len(found) < 2:  # noqa: PLR2004  a course
        return ""
    draw: Draw = lambda units: _drawn(found, units)  # noqa: E731
    return figure("course", "How it went", _said(found), draw, half=half)


def stretches(moments: Sequence[Moment]) -> list[Stretch]:
    """At most so many, each with the mean of what it has, by the time held."""
    found = [_stretch(each) for each in moments if each.end > each.start and each.gpus > 0]
    size = -(-len(found) // MOST) or 1
    return [_joined(found[n : n + size]) for n in range(0, len(found), size)]


def _stretch(moment: Moment) -> Stretch:
    seen = moment.coverage or 0.0
    working = seen * (moment.gau or 0.0)
    computing = working * (moment.ectr or 0.0)
    useful = min(seen * (moment.floor or 0.0), computing)
    held = (moment.end - moment.start) * moment.gpus
    return Stretch(start=moment.start, end=moment.end, held=held, upto=(useful, computing, working, seen, 1.0))


def _joined(found: Sequence[Stretch]) -> Stretch:
    held = sum(each.held for each in found)
    upto = tuple(sum(each.upto[n] * each.held for each in found) / held for n in range(len(KEYS)))
    return Stretch(start=found[0].start, end=found[-1].end, held=held, upto=upto)


def _said(found: Sequence[Stretch]) -> str:
    least, most = (pick(found, key=lambda each: each.upto[0]) for pick in (min, max))
    return (
        f"Useful share over {elapsed(found[-1].end)}: {percent(found[0].upto[0])} at first, "
        f"{percent(found[-1].upto[0])} at last, least {percent(least.upto[0])} after {elapsed(least.start)}, "
        f"most {percent(most.upto[0])} after {elapsed(most.start)}"
    )


def _drawn(found: Sequence[Stretch], units: float) -> tuple[float, list[str]]:
    left, end = width("100 %", SMALL) + 8, found[-1].end
    room = units - left
    used = [n for n in range(len(KEYS)) if max(each.upto[n] - _foot(each, n) for each in found) > _SHOWN]
    shapes = []
    for n in used:
        outline = [(left + x / end * room, _TOP + _HIGH * (1 - y)) for x, y in _outline(found, n)]
        shapes.append(path(outline, f"fill {KEYS[n][0]}", closed=True))
    shapes += _axes(left, units, end)
    more, high = legend([KEYS[n] for n in used], _TOP + _HIGH + _BELOW, units)
    return _TOP + _HIGH + _BELOW + high, shapes + more


def _foot(stretch: Stretch, n: int) -> float:
    """From where a kind is."""
    return stretch.upto[n - 1] if n else 0.0


def _outline(found: Sequence[Stretch], n: int) -> Iterator[tuple[float, float]]:
    """There along the top, and back along the foot."""
    for each in found:
        yield each.start, each.upto[n]
        yield each.end, each.upto[n]
    for each in reversed(found):
        yield each.end, _foot(each, n)
        yield each.start, _foot(each, n)


def _axes(left: float, units: float, end: float) -> Iterator[str]:
    base = _TOP + _HIGH
    for share in (0.0, 0.5, 1.0):
        y = base - share * _HIGH
        yield line((left, y), (units, y), "axis" if not share else "rule")
        yield text(left - 6, y + 4, f"{100 * share:.0f} %", size=SMALL, anchor="end", kind="mute")
    yield text(left, base + 16, "start", size=SMALL, kind="mute")
    yield text((left + units) / 2, base + 16, elapsed(end / 2), size=SMALL, anchor="middle", kind="mute")
    yield text(units, base + 16, elapsed(end), size=SMALL, anchor="end", kind="mute")
