"""Figures over time: a quality as it went, and what share of each stretch was useful.

Owns axes and their words. Refuses to smooth: what held until it changed is drawn as steps.
"""

from collections.abc import Sequence

from msgspec import Struct

from exporter.receipt.drawing.canvas import Draw, figure, line, path, text
from exporter.receipt.drawing.lettering import SMALL, fitting, width
from exporter.receipt.model import Quality
from exporter.wording import amount, elapsed

_HIGH, _TOP, _BELOW = 150.0, 14.0, 24.0
_ROOM = 18.0
"""For words above a line."""


class _Plot(Struct, frozen=True, kw_only=True):
    """Where values of two ranges are."""

    left: float
    right: float
    most: tuple[float, float]
    values: tuple[float, float]
    high: float = _HIGH

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        """Its place."""
        (first, last), (low, top) = self.most, self.values
        x = (point[0] - first) / ((last - first) or 1)
        y = (point[1] - low) / ((top - low) or 1)
        return self.left + x * (self.right - self.left), _TOP + self.high * (1 - y)


def quality(found: Quality, seconds: float, number: int, *, half: bool) -> str:
    """As it went in a job of so many seconds, with its target. Empty where it was told once only."""
    track = [(at, value) for at, value in found.track if _drawable(value)]
    if len(track) < 2:  # noqa: PLR2004  a line
        return ""
    name = found.name or "quality"
    target = "" if found.target is None else f", target {amount(found.target)}"
    said = (
        f"{name} over {elapsed(track[-1][0])}: from {amount(found.start)} to {amount(found.last)}, "
        f"best {amount(found.best)}{target}"
    )
    draw: Draw = lambda units: _quality(found, track, units, seconds)  # noqa: E731
    return figure(f"quality-{number}", f"{name} as it went", said, draw, half=half)


def _drawable(value: float) -> bool:
    """No program's "not a number", and nothing so large that a difference of two is none."""
    return abs(value) < 1e30  # noqa: PLR2004  far above any figure


def _quality(
    found: Quality, track: Sequence[tuple[float, float]], units: float, seconds: float
) -> tuple[float, list[str]]:
    values = [value for _, value in track]
    goal = found.target if found.target is not None and _drawable(found.target) else None
    ends = (min(values), max(values)) if goal is None else (min(*values, goal), max(*values, goal))
    marks = [amount(each) for each in ends]
    plot = _Plot(
        left=max(width(mark, SMALL) for mark in marks) + 8, right=units - 8,
        most=(min(track[0][0], 0.0), max(track[-1][0], seconds)), values=ends,
    )  # fmt: skip
    shapes = _axes(plot, marks)
    if goal is not None:
        shapes += _goal(plot, goal)
    shapes.append(path([plot.at(point) for point in _stepped(track, plot.most[1])], "curve"))
    return _TOP + _HIGH + _BELOW, shapes


def _stepped(track: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """It had each value until the next."""
    found = [track[0]]
    for at, value in track[1:]:
        found += [(at, found[-1][1]), (at, value)]
    return [*found, (end, found[-1][1])]


def _axes(plot: _Plot, marks: Sequence[str]) -> list[str]:
    base, (first, last) = _TOP + plot.high, plot.most
    low, top = marks
    middle = (plot.left + plot.right) / 2
    return [
        line((plot.left, base), (plot.right, base), "axis"),
        line((plot.left, _TOP), (plot.right, _TOP), "rule"),
        text(plot.left - 6, base, low, size=SMALL, anchor="end", kind="mute"),
        text(plot.left - 6, _TOP + 4, top, size=SMALL, anchor="end", kind="mute"),
        text(plot.left, base + 16, elapsed(first), size=SMALL, kind="mute"),
        text(middle, base + 16, elapsed((first + last) / 2), size=SMALL, anchor="middle", kind="mute"),
        text(plot.right, base + 16, elapsed(last), size=SMALL, anchor="end", kind="mute"),
    ]


def _goal(plot: _Plot, goal: float) -> list[str]:
    _, y = plot.at((plot.most[0], goal))
    words = fitting(plot.right - plot.left, f"target {amount(goal)}", size=SMALL)
    beside = y + 14 if y < _TOP + _ROOM else y - 5
    return [
        line((plot.left, y), (plot.right, y), "goal"),
        text(plot.left + 4, beside, words, size=SMALL),
    ]
