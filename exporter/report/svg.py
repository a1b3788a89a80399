"""Draws SVG: text that fits, shapes, rows of bars, and curves over time.

Every drawing is made for a wide and for a narrow page, with a title and a description that state the same. Colours
are classes, because the security policy of the page forbids inline styles.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from math import isfinite
from typing import Protocol

from msgspec import Struct

from exporter.formatting import format_amount, format_duration, format_percent
from exporter.report.model import CourseInterval, JobReport, QualityMetric

_REGULAR = """
32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53 100 68 69 70 77 63 58
77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50 50 61 63 55 63 62 35 63 63 28 28 58 28 97 63
61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84
"""
_BOLD = """
35 46 52 84 70 100 87 31 46 46 52 84 38 42 38 37 70 70 70 70 70 70 70 70 70 70 40 40 84 84 84 58 100 77 76 73 83 68 68
82 84 37 37 77 64 100 84 85 73 85 77 72 68 81 77 110 77 72 73 46 37 46 84 50 50 67 72 59 72 68 44 72 71 34 34 67 34 104
71 69 72 72 49 60 48 71 65 92 65 65 58 71 37 71 84
"""
_CHARACTER_WIDTHS = tuple(
    {chr(32 + n): int(each) / 100 for n, each in enumerate(row.split())} for row in (_REGULAR, _BOLD)
)
"""Widths of printable ASCII characters, regular and bold, relative to the font size."""
_OTHER_WIDTH = 1.05
"""Width of any other character: Chinese ones are as wide as they are high."""
BODY_SIZE, SMALL_SIZE = 13.0, 11.5


def text_width(text: str, size: float = BODY_SIZE, *, bold: bool = False) -> float:
    """Return the width of a text in units."""
    widths = _CHARACTER_WIDTHS[bold]
    return sum(widths.get(character, _OTHER_WIDTH) for character in text) * size


def first_fitting(room: float, *choices: str, size: float = BODY_SIZE, bold: bool = False) -> str:
    """Return the first choice that fits; else the last, shortened."""
    for text in choices:
        if text_width(text, size, bold=bold) <= room:
            return text
    return shorten(choices[-1], room, size=size, bold=bold)


def shorten(text: str, room: float, *, size: float = BODY_SIZE, bold: bool = False) -> str:
    """Shorten a text to fit, in the middle: names differ at their ends."""
    if text_width(text, size, bold=bold) <= room:
        return text
    keep = min(len(text) - 1, int(room / size / 0.27))
    while keep and text_width(_without_middle(text, keep), size, bold=bold) > room:
        keep -= 1
    return _without_middle(text, keep) if keep else ""


def _without_middle(text: str, keep: int) -> str:
    end = keep // 2
    return f"{text[: keep - end]}…{text[len(text) - end :]}"


def wrap_lines(text: str, room: float, *, size: float = BODY_SIZE) -> list[str]:
    """Break a text into lines between words."""
    wrapped = [""]
    for token in text.split():
        longer = f"{wrapped[-1]} {token}".strip()
        if text_width(longer, size) <= room:
            wrapped[-1] = longer
        else:
            wrapped.append(shorten(token, room, size=size))
    return [line for line in wrapped if line]


MULTIPLICATION_SIGN = "\N{MULTIPLICATION SIGN}"
WIDE_UNITS, NARROW_UNITS = 840.0, 360.0
"""Width of a drawing in units. An A4 page has about 680 between margins, so text shrinks by a fifth there."""
DrawFunction = Callable[[float], tuple[float, Sequence[str]]]
"""Takes the width in units and returns the height and the shapes."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def escaped(text: str) -> str:
    """Escape a text for HTML. Control characters and marks that change the writing direction are replaced."""
    return escape("".join(character if character.isprintable() else _REPLACEMENT for character in text))


# -- shapes --


def svg_text(x: float, y: float, text: str, *, size: float = BODY_SIZE, anchor: str = "start", kind: str = "") -> str:
    """Return a text; `kind` is bold, mute, or both."""
    anchor_attribute = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{_coordinate(x)}" y="{_coordinate(y)}" font-size="{size:g}"'
        f"{anchor_attribute}{_class_attribute(kind)}>{escaped(text)}</text>"
    )


def small_text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "mute") -> str:
    """Return a text in the smaller size, muted by default."""
    return svg_text(x, y, text, size=SMALL_SIZE, anchor=anchor, kind=kind)


def svg_rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle from its upper left corner."""
    return (
        f'<rect x="{_coordinate(x)}" y="{_coordinate(y)}" width="{_coordinate(max(width, 0))}"'
        f' height="{_coordinate(max(height, 0))}"{_class_attribute(kind)}/>'
    )


def svg_line(start: tuple[float, float], end: tuple[float, float], kind: str = "rule") -> str:
    """Return a line between two points."""
    (a, b), (c, d) = start, end
    return (
        f'<line x1="{_coordinate(a)}" y1="{_coordinate(b)}" x2="{_coordinate(c)}" y2="{_coordinate(d)}"'
        f"{_class_attribute(kind)}/>"
    )


def svg_path(points: Iterable[tuple[float, float]], kind: str, *, closed: bool = False) -> str:
    """Return a line through all points."""
    coordinates = " ".join(f"{_coordinate(x)},{_coordinate(y)}" for x, y in points)
    return f'<{"polygon" if closed else "polyline"} points="{coordinates}"{_class_attribute(kind)}/>'


def _coordinate(value: float) -> str:
    if not isfinite(value):
        raise ValueError(f"{value} is no place in a drawing")
    return f"{value:.1f}".removesuffix(".0")


def _class_attribute(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


# -- figures --


def svg_figure(key: str, title: str, description: str, draw: DrawFunction, *, half: bool = True) -> str:
    """Return a figure with its title; `description` is for screen readers.

    Two figures of `half` width fit side by side on a wide page and are drawn once; others for a wide and a narrow page.
    """
    widths = _FIGURE_WIDTHS[1:] if half else _FIGURE_WIDTHS
    elements = "".join(_svg_element(f"{key}-{name}", title, description, draw, units) for name, units in widths)
    return f'<figure class="{"half" if half else "whole"}"><figcaption>{escaped(title)}</figcaption>{elements}</figure>'


class HalfWidthChart(Protocol):
    """Draws a figure of half or full width; empty if there is nothing to draw."""

    def __call__(self, *, half: bool) -> str:
        """Draw it in that width."""


def pair_charts(half: Sequence[HalfWidthChart]) -> list[str]:
    """Draw charts side by side in pairs; the last of an odd number gets the full width."""
    charts = [(chart, drawn) for chart in half if (drawn := chart(half=True))]
    if len(charts) % 2:
        charts[-1] = (charts[-1][0], charts[-1][0](half=False))
    return [drawn for _, drawn in charts]


_FIGURE_WIDTHS = (("wide", WIDE_UNITS), ("narrow", NARROW_UNITS))


def _svg_element(key: str, title: str, description: str, draw: DrawFunction, units: float) -> str:
    height, shapes = draw(units)
    return (
        f'<svg class="{key.rpartition("-")[2]}" viewBox="0 0 {_coordinate(units)} {_coordinate(height)}" role="img"'
        f' aria-labelledby="{key}-title {key}-desc"><title id="{key}-title">{escaped(title)}</title>'
        f'<desc id="{key}-desc">{escaped(description)}</desc>{"".join(shapes)}</svg>'
    )


BarSegment = tuple[float, float, str]
"""Start and end as shares of the bar's length, and the class of the fill."""
_MIN_LENGTH, _NEGLIGIBLE = 1.5, 1e-6
"""Minimum visible length in units, and the share below which a segment is a rounding error."""
_ROW_HEIGHT, _BAR_HEIGHT, _STACKED_HEIGHT = 26.0, 14.0, 44.0
_MAX_LABEL_SHARE, _MAX_NOTE_SHARE = 0.32, 0.42
"""Maximum shares of the width."""
_COLUMN_GAP = 10.0


class BarRow(Struct, frozen=True, kw_only=True):
    """A row of a bar chart."""

    name: str
    value: str
    segments: tuple[BarSegment, ...] = ()
    note: str = ""
    ticks: tuple[float, ...] = ()
    """Marks, as shares of the bar's length."""
    histogram: tuple[float, ...] = ()
    """Heights of the histogram's bins, as shares of the largest."""
    bold: bool = False


def bar_chart(
    key: str,
    title: str,
    description: str,
    rows: Sequence[BarRow],
    *,
    keys: Sequence[tuple[str, str]] = (),
    half: bool = True,
) -> str:
    """Return a figure of bars with a legend of `keys`, (fill, text); empty without rows."""
    if not rows:
        return ""
    return svg_figure(key, title, description, partial(_draw_bars, rows, keys), half=half)


def _draw_bars(rows: Sequence[BarRow], keys: Sequence[tuple[str, str]], units: float) -> tuple[float, list[str]]:
    shapes: list[str] = []
    y = 2.0
    columns = _bar_columns(rows, units) if units > NARROW_UNITS else None
    for row in rows:
        if columns is None:
            shapes += _stacked_row(row, y, units)
            y += _STACKED_HEIGHT + (16 if row.note else 0)
        else:
            shapes += _inline_row(row, y, columns)
            y += _ROW_HEIGHT
    legend_shapes, height = legend(keys, y + 4, units)
    return y + height, shapes + legend_shapes


class _BarColumns(Struct, frozen=True):
    """Positions of the columns of a row."""

    bar: float
    end: float
    value: float
    note: float
    units: float


def _bar_columns(rows: Sequence[BarRow], units: float) -> _BarColumns:
    """Compute the columns from the widths of the texts."""
    label = min(max(text_width(row.name, bold=row.bold) for row in rows), units * _MAX_LABEL_SHARE) + _COLUMN_GAP
    value_width = max(text_width(row.value, bold=True) for row in rows)
    note = min(max(text_width(row.note, SMALL_SIZE) for row in rows), units * _MAX_NOTE_SHARE)
    end = units - value_width - _COLUMN_GAP - (note + _COLUMN_GAP if note else 0)
    return _BarColumns(
        bar=label, end=max(end, label + 40), value=end + _COLUMN_GAP + value_width, note=note, units=units
    )


def _inline_row(row: BarRow, y: float, columns: _BarColumns) -> Iterator[str]:
    yield svg_text(
        0, y + 15, shorten(row.name, columns.bar - _COLUMN_GAP, bold=row.bold), kind="bold" if row.bold else ""
    )
    yield from _bar_shapes(row, columns.bar, y + 4, columns.end - columns.bar)
    yield svg_text(columns.value, y + 15, row.value, anchor="end", kind="bold")
    if row.note:
        room = columns.units - columns.value - _COLUMN_GAP
        yield small_text(columns.value + _COLUMN_GAP, y + 15, shorten(row.note, room, size=SMALL_SIZE))


def _stacked_row(row: BarRow, y: float, units: float) -> Iterator[str]:
    value = first_fitting(units * 0.6, row.value, bold=True)
    room = units - text_width(value, bold=True) - _COLUMN_GAP
    yield svg_text(0, y + 13, shorten(row.name, room, bold=row.bold), kind="bold" if row.bold else "")
    yield svg_text(units, y + 13, value, anchor="end", kind="bold")
    if row.note:
        yield small_text(0, y + 28, shorten(row.note, units, size=SMALL_SIZE))
        y += 16
    yield from _bar_shapes(row, 0, y + 20, units)


def _bar_shapes(row: BarRow, x: float, y: float, room: float) -> Iterator[str]:
    yield svg_rect(x, y, room, _BAR_HEIGHT, "track")
    for start, end, kind in row.segments:
        if end - start > _NEGLIGIBLE:
            length = max((end - start) * room, _MIN_LENGTH)
            yield svg_rect(x + min(start * room, room - length), y, length, _BAR_HEIGHT, f"fill {kind}")
    for n, share in enumerate(row.histogram):
        if share:
            width, height = room / len(row.histogram), max(share * _BAR_HEIGHT, _MIN_LENGTH)
            yield svg_rect(x + n * width, y + _BAR_HEIGHT - height, width, height, "fill busy")
    for tick in row.ticks:
        yield svg_line((x + tick * room, y - 3), (x + tick * room, y + _BAR_HEIGHT + 3), "tick")


def legend(keys: Sequence[tuple[str, str]], y: float, units: float) -> tuple[list[str], float]:
    """Return the shapes and the height of a legend, wrapped to the width."""
    shapes: list[str] = []
    x, first = 0.0, y
    for kind, text in keys:
        length = 16 + text_width(text, SMALL_SIZE)
        if x and x + length > units:
            x, y = 0.0, y + 18
        shapes += [svg_rect(x, y + 3, 11, 11, f"fill {kind}"), small_text(x + 16, y + 13, text, kind="")]
        x += length + 14
    return shapes, (y - first + 22 if keys else 0.0)


_PLOT_HEIGHT, _PLOT_TOP, _PLOT_BOTTOM = 150.0, 14.0, 24.0
_LABEL_SPACE = 18.0
"""Space for a text above a line."""


class _Plot(Struct, frozen=True, kw_only=True):
    """The area of a plot and the ranges of its axes."""

    left: float
    right: float
    times: tuple[float, float]
    values: tuple[float, float]

    def position(self, point: tuple[float, float]) -> tuple[float, float]:
        """Return the position of a point (seconds, value)."""
        (first, last), (low, top) = self.times, self.values
        x = (point[0] - first) / ((last - first) or 1)
        y = (point[1] - low) / ((top - low) or 1)
        return self.left + x * (self.right - self.left), _PLOT_TOP + _PLOT_HEIGHT * (1 - y)


def quality_chart(metric: QualityMetric, seconds: float, number: int, *, half: bool) -> str:
    """Draw a quality metric over a job of `seconds`, with its target; empty if it has a single value."""
    track = [(at, value) for at, value in metric.track if _is_drawable(value)]
    if len(track) < 2:  # noqa: PLR2004  a line
        return ""
    name = metric.name or "quality"
    target = "" if metric.target is None else f", target {format_amount(metric.target)}"
    description = (
        f"{name} over {format_duration(track[-1][0])}: "
        f"from {format_amount(metric.start)} to {format_amount(metric.last)}, best {format_amount(metric.best)}{target}"
    )
    draw = partial(_draw_quality, metric, track, seconds)
    return svg_figure(f"quality-{number}", f"{name} as it went", description, draw, half=half)


def _is_drawable(value: float) -> bool:
    """Whether the value is a number, and small enough for differences to be exact."""
    return abs(value) < 1e30  # noqa: PLR2004  far above any figure


def _draw_quality(
    metric: QualityMetric, track: Sequence[tuple[float, float]], seconds: float, units: float
) -> tuple[float, list[str]]:
    values = [value for _, value in track]
    goals = [] if metric.target is None or not _is_drawable(metric.target) else [metric.target]
    ends = min(values + goals), max(values + goals)
    marks = [format_amount(limit) for limit in ends]
    plot = _Plot(
        left=max(text_width(mark, SMALL_SIZE) for mark in marks) + 8, right=units - 8,
        times=(min(track[0][0], 0.0), max(track[-1][0], seconds)), values=ends,
    )  # fmt: skip
    shapes = _plot_axes(plot, marks)
    for goal in goals:
        shapes += _target_line(plot, goal)
    shapes.append(svg_path([plot.position(point) for point in _as_steps(track, plot.times[1])], "curve"))
    return _PLOT_TOP + _PLOT_HEIGHT + _PLOT_BOTTOM, shapes


def _as_steps(track: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Return the points of a step curve."""
    points = [track[0]]
    for at, value in track[1:]:
        points += [(at, points[-1][1]), (at, value)]
    return [*points, (end, points[-1][1])]


def _plot_axes(plot: _Plot, marks: Sequence[str]) -> list[str]:
    base, (first, last) = _PLOT_TOP + _PLOT_HEIGHT, plot.times
    low, top = marks
    middle = (plot.left + plot.right) / 2
    return [
        svg_line((plot.left, base), (plot.right, base), "axis"),
        svg_line((plot.left, _PLOT_TOP), (plot.right, _PLOT_TOP), "rule"),
        small_text(plot.left - 6, base, low, anchor="end"),
        small_text(plot.left - 6, _PLOT_TOP + 4, top, anchor="end"),
        small_text(plot.left, base + 16, format_duration(first)),
        small_text(middle, base + 16, format_duration((first + last) / 2), anchor="middle"),
        small_text(plot.right, base + 16, format_duration(last), anchor="end"),
    ]


def _target_line(plot: _Plot, goal: float) -> list[str]:
    _, y = plot.position((plot.times[0], goal))
    text = first_fitting(plot.right - plot.left, f"target {format_amount(goal)}", size=SMALL_SIZE)
    beside = y + 14 if y < _PLOT_TOP + _LABEL_SPACE else y - 5
    return [svg_line((plot.left, y), (plot.right, y), "goal"), small_text(plot.left + 4, beside, text, kind="")]


MAX_SLICES = 160
"""Maximum number of slices drawn; more intervals are merged."""
COURSE_KEYS = (("useful", "useful"), ("emfu", "lost model FLOPs, or not resolved"), ("ectr", "lost computing time"),
        ("gau", "lost to allocation"), ("unobserved", "not seen"))  # fmt: skip
_COURSE_HEIGHT, _COURSE_TOP, _COURSE_BOTTOM = 150.0, 12.0, 26.0
_MIN_VISIBLE_SHARE = 0.0005
"""Kinds below this share are not drawn."""


class CourseSlice(Struct, frozen=True, kw_only=True):
    """A slice of time, with the cumulative share of each kind in the order of COURSE_KEYS."""

    start: float
    end: float
    gpu_seconds: float
    """GPU-seconds held."""
    cumulative: tuple[float, ...]


def course_chart(report: JobReport, *, half: bool) -> str:
    """Draw the job over time; empty with fewer than two slices."""
    slices = course_slices(report.course)
    if len(slices) < 2:  # noqa: PLR2004  a course
        return ""
    return svg_figure("course", "How it went", _course_description(slices), partial(_draw_course, slices), half=half)


def course_slices(intervals: Sequence[CourseInterval]) -> list[CourseSlice]:
    """Merge intervals into at most MAX_SLICES slices, with means weighted by the time held."""
    slices = [_course_slice(each) for each in intervals if each.end > each.start and each.gpus > 0]
    size = -(-len(slices) // MAX_SLICES) or 1
    return [_merge_slices(slices[n : n + size]) for n in range(0, len(slices), size)]


def _course_slice(interval: CourseInterval) -> CourseSlice:
    observed = interval.coverage or 0.0
    working = observed * (interval.gau or 0.0)
    computing = working * (interval.ectr or 0.0)
    useful = min(observed * (interval.floor or 0.0), computing)
    cumulative = useful, computing, working, observed, 1.0
    gpu_seconds = (interval.end - interval.start) * interval.gpus
    return CourseSlice(start=interval.start, end=interval.end, gpu_seconds=gpu_seconds, cumulative=cumulative)


def _merge_slices(slices: Sequence[CourseSlice]) -> CourseSlice:
    gpu_seconds = sum(each.gpu_seconds for each in slices)
    sums = (sum(each.cumulative[n] * each.gpu_seconds for each in slices) for n in range(len(COURSE_KEYS)))
    cumulative = tuple(each / gpu_seconds for each in sums)
    return CourseSlice(start=slices[0].start, end=slices[-1].end, gpu_seconds=gpu_seconds, cumulative=cumulative)


def _course_description(slices: Sequence[CourseSlice]) -> str:
    least, most = (choose(slices, key=lambda time_slice: time_slice.cumulative[0]) for choose in (min, max))
    return (
        f"Useful share over {format_duration(slices[-1].end)}: {format_percent(slices[0].cumulative[0])} at first, "
        f"{format_percent(slices[-1].cumulative[0])} at last, "
        f"least {format_percent(least.cumulative[0])} after {format_duration(least.start)}, "
        f"most {format_percent(most.cumulative[0])} after {format_duration(most.start)}"
    )


def _draw_course(slices: Sequence[CourseSlice], units: float) -> tuple[float, list[str]]:
    left, end = text_width("100 %", SMALL_SIZE) + 8, slices[-1].end
    room, foot = units - left, _COURSE_TOP + _COURSE_HEIGHT + _COURSE_BOTTOM
    shapes, keys = [], []
    for n, key in enumerate(COURSE_KEYS):
        if max(each.cumulative[n] - _lower_edge(each, n) for each in slices) > _MIN_VISIBLE_SHARE:
            outline = _slice_outline(slices, n)
            points = [(left + x / end * room, _COURSE_TOP + _COURSE_HEIGHT * (1 - y)) for x, y in outline]
            shapes.append(svg_path(points, f"fill {key[0]}", closed=True))
            keys.append(key)
    shapes += _course_axes(left, units, end)
    legend_shapes, height = legend(keys, foot, units)
    return foot + height, shapes + legend_shapes


def _lower_edge(time_slice: CourseSlice, n: int) -> float:
    """Return the lower edge of a kind."""
    return time_slice.cumulative[n - 1] if n else 0.0


def _slice_outline(slices: Sequence[CourseSlice], n: int) -> Iterator[tuple[float, float]]:
    """Yield the outline: forward along the upper edge, back along the lower."""
    for time_slice in slices:
        yield time_slice.start, time_slice.cumulative[n]
        yield time_slice.end, time_slice.cumulative[n]
    for time_slice in reversed(slices):
        yield time_slice.end, _lower_edge(time_slice, n)
        yield time_slice.start, _lower_edge(time_slice, n)


def _course_axes(left: float, units: float, end: float) -> Iterator[str]:
    base = _COURSE_TOP + _COURSE_HEIGHT
    for share in (0.0, 0.5, 1.0):
        y = base - share * _COURSE_HEIGHT
        yield svg_line((left, y), (units, y), "axis" if not share else "rule")
        yield small_text(left - 6, y + 4, f"{100 * share:.0f} %", anchor="end")
    yield small_text(left, base + 16, "start")
    yield small_text((left + units) / 2, base + 16, format_duration(end / 2), anchor="middle")
    yield small_text(units, base + 16, format_duration(end), anchor="end")
