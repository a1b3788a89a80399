"""Shapes and words of a drawing as SVG.

Owns coordinates, escaping, and that every drawing is made twice, for a desk or paper and for a phone, with a title and
a text that says the same. Colours are classes, for the page's security policy forbids styles of single elements.
Refuses to know what is drawn.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import isfinite
from typing import Protocol

from exporter.receipt.drawing.lettering import BODY

TIMES = "\N{MULTIPLICATION SIGN}"
WIDE, NARROW = 840.0, 360.0
"""Units across. Paper of A4 has about 680 of its own between margins, so words shrink by a fifth there."""
Draw = Callable[[float], tuple[float, Sequence[str]]]
"""Given how wide it may be: how high it is, and its shapes."""

_GONE = "\N{REPLACEMENT CHARACTER}"


def safe(words: str) -> str:
    """As text in HTML. Control characters, and marks that turn the direction of writing, are not passed on."""
    return escape("".join(sign if sign.isprintable() else _GONE for sign in words))


def plain(name: str) -> str:
    """A leak's name as people write it."""
    return name.replace("_", " ")


# -- shapes --


def text(x: float, y: float, words: str, *, size: float = BODY, anchor: str = "start", kind: str = "") -> str:
    """`kind`: bold, mute, or both."""
    hung = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_at(x)}" y="{_at(y)}" font-size="{size:g}"{hung}{_of(kind)}>{safe(words)}</text>'


def rect(x: float, y: float, wide: float, high: float, kind: str) -> str:
    """From its upper left corner."""
    return f'<rect x="{_at(x)}" y="{_at(y)}" width="{_at(max(wide, 0))}" height="{_at(max(high, 0))}"{_of(kind)}/>'


def line(start: tuple[float, float], end: tuple[float, float], kind: str = "rule") -> str:
    """From one point to another."""
    (a, b), (c, d) = start, end
    return f'<line x1="{_at(a)}" y1="{_at(b)}" x2="{_at(c)}" y2="{_at(d)}"{_of(kind)}/>'


def path(points: Iterable[tuple[float, float]], kind: str, *, closed: bool = False) -> str:
    """A line through all of them."""
    through = " ".join(f"{_at(x)},{_at(y)}" for x, y in points)
    return f'<{"polygon" if closed else "polyline"} points="{through}"{_of(kind)}/>'


def _at(value: float) -> str:
    if not isfinite(value):
        raise ValueError(f"{value} is no place in a drawing")
    return f"{value:.1f}".removesuffix(".0")


def _of(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


# -- figures --


def figure(key: str, title: str, said: str, draw: Draw, *, half: bool = True) -> str:
    """A drawing with its title above; `said` is for those who do not see it.

    Two stand side by side where they are `half` as wide as a desk; else one is made for a desk and one for a phone.
    """
    widths = _WIDTHS[1:] if half else _WIDTHS
    each = "".join(_svg(f"{key}-{name}", title, said, draw, units) for name, units in widths)
    return f'<figure class="{"half" if half else "whole"}"><figcaption>{safe(title)}</figcaption>{each}</figure>'


class Beside(Protocol):
    """Makes a figure that may be half as wide; empty where there is nothing to draw."""

    def __call__(self, *, half: bool) -> str:
        """One for so wide a place."""


def side_by_side(half: Sequence[Beside]) -> list[str]:
    """The last of an odd number has no other beside it, and is as wide as two."""
    made = [(each, drawn) for each in half if (drawn := each(half=True))]
    if len(made) % 2:
        made[-1] = (made[-1][0], made[-1][0](half=False))
    return [drawn for _, drawn in made]


_WIDTHS = (("wide", WIDE), ("narrow", NARROW))


def _svg(key: str, title: str, said: str, draw: Draw, units: float) -> str:
    high, shapes = draw(units)
    return (
        f'<svg class="{key.rpartition("-")[2]}" viewBox="0 0 {_at(units)} {_at(high)}" role="img"'
        f' aria-labelledby="{key}-title {key}-desc"><title id="{key}-title">{safe(title)}</title>'
        f'<desc id="{key}-desc">{safe(said)}</desc>{"".join(shapes)}</svg>'
    )
