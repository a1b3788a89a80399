"""Parses the HTML page of a report into elements, tables and drawings."""

from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from math import isfinite

from msgspec import Struct

from exporter.report.svg import text_width

EMPTY = frozenset({"meta", "wbr", "!doctype"})
SHAPES = frozenset({"rect", "line", "polygon", "polyline", "text"})
_SLACK = 0.6
"""Rounding tolerance in units."""


class Element(Struct, kw_only=True):
    """An element with its children."""

    tag: str
    facts: dict[str, str]
    inside: list["Element"] = []
    words: str = ""
    """Text of the element and its descendants."""

    def all(self, *tags: str) -> Iterator["Element"]:
        """Return the descendants with these tags, in order."""
        for each in self.inside:
            if each.tag in tags:
                yield each
            yield from each.all(*tags)

    def number(self, name: str) -> float:
        """Return an attribute as a number."""
        value = float(self.facts[name])
        assert isfinite(value)
        return value


class Page(HTMLParser):
    """Parser that fails on elements left open or closed in the wrong order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element(tag="", facts={})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert [each.tag for each in self._open] == [""], f"left open: {[each.tag for each in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is there twice"
        element = Element(tag=tag, facts={name: value or "" for name, value in attrs})
        self._open[-1].inside.append(element)
        if tag not in EMPTY:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"{tag} is closed in {self._open[-1].tag}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.words += data

    def all(self, *tags: str) -> list[Element]:
        """Return the elements with these tags, in order."""
        return list(self.root.all(*tags))

    def cells(self) -> list[list[str]]:
        """Return the cells of every table by row."""
        return [[cell.words for cell in row.all("td", "th")] for row in self.all("tr")]

    def drawings(self) -> list[Element]:
        """Return the drawings, without the fill patterns."""
        return [each for each in self.all("svg") if each.facts.get("role") == "img"]


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def box(shape: Element) -> Box:
    """Return the bounding box; of text with its estimated width."""
    match shape.tag:
        case "rect":
            x, y = shape.number("x"), shape.number("y")
            return x, y, x + shape.number("width"), y + shape.number("height")
        case "line":
            xs = sorted((shape.number("x1"), shape.number("x2")))
            ys = sorted((shape.number("y1"), shape.number("y2")))
            return xs[0], ys[0], xs[1], ys[1]
        case "text":
            return _words(shape)
        case _:
            points = [tuple(map(float, pair.split(","))) for pair in shape.facts["points"].split()]
            assert all(isfinite(value) for point in points for value in point)
            return (*map(min, zip(*points, strict=True)), *map(max, zip(*points, strict=True)))


def _words(shape: Element) -> Box:
    size = shape.number("font-size")
    wide = text_width(shape.words, size, bold="bold" in shape.facts.get("class", ""))
    x, y = shape.number("x"), shape.number("y")
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[shape.facts.get("text-anchor", "start")]
    return left, y - 0.76 * size, left + wide, y + 0.2 * size


def check(drawing: Element) -> None:
    """Assert that everything is inside the drawing and that no texts overlap."""
    left, top, wide, high = map(float, drawing.facts["viewbox"].split())
    assert (left, top) == (0, 0)
    for shape in drawing.all(*SHAPES):
        a, b, c, d = box(shape)
        assert -_SLACK <= a <= c <= wide + _SLACK, (shape, a, c, wide)
        assert -_SLACK <= b <= d <= high + _SLACK, (shape, b, d, high)
    for one, other in combinations(list(drawing.all("text")), 2):
        assert not _over(box(one), box(other)), (one.words, other.words)


def _over(one: Box, other: Box) -> bool:
    return min(one[2], other[2]) - max(one[0], other[0]) > 0 and min(one[3], other[3]) - max(one[1], other[1]) > 0
