"""Where time went, drawn and said in words: a window as one bar, a step of a waterfall, the course of a job.

Owns the order of the parts and their text alternatives. SVG attributes carry size and colour, so that the page's
security policy can forbid inline styles.
"""

from collections.abc import Sequence

from exporter.core.leaks import NAMES
from exporter.http.api import WindowOut
from exporter.http.appearance import BAND_COLOURS, COLOURS
from exporter.http.lives import Stretch
from exporter.http.words import duration, moment, percent, plain

_WORST = 3
"""Losses named beside a bar."""


def bar(window: WindowOut, *, height: int) -> str:
    """One stacked bar `height` pixels high; its label says the same in words."""
    shown = parts(window)
    if not shown:
        return '<p class="none">no time yet</p>'
    said = ", ".join(f"{plain(name)} {duration(seconds)}" for name, seconds in shown)
    drawn, x = [], 0.0
    for name, seconds in shown:
        width = 100 * seconds / window.seconds
        drawn.append(
            f'<rect x="{x:.3f}%" width="{width:.3f}%" height="{height}" fill="{COLOURS[name]}">'
            f"<title>{plain(name)}: {duration(seconds)}</title></rect>"
        )
        x += width
    return f'<svg class="bar" height="{height}" role="img" aria-label="{said}">{"".join(drawn)}</svg>'


def worst(hour: WindowOut) -> str:
    """Useful work and the largest losses, in words."""
    named = [("useful", hour.leaks["useful"]), *losses(hour)[:_WORST]]
    items = "".join(f"<li>{swatch(name)}{plain(name)} <b>{duration(seconds)}</b></li>" for name, seconds in named)
    return f'<ul class="losses" aria-label="useful work and the largest losses">{items}</ul>'


def parts(window: WindowOut) -> list[tuple[str, float]]:
    """(leak, GPU-seconds) of all that is not nothing: useful work first, then in the order of the leaks."""
    order = ("useful", *(name for name in NAMES if name != "useful"))
    return [(name, window.leaks[name]) for name in order if window.leaks[name] > 0]


def losses(window: WindowOut) -> list[tuple[str, float]]:
    """All but useful work, the largest first."""
    return sorted((part for part in parts(window) if part[0] != "useful"), key=lambda part: -part[1])


def swatch(name: str) -> str:
    """The colour of a leak, for beside its name."""
    return _square(COLOURS[name])


def step(begin: float, width: float, fill: str) -> str:
    """One bar of a waterfall, shares of the whole: what is left of it was gone before. The words stand beside it."""
    return (
        '<svg class="step" height="14" aria-hidden="true">'
        f'<rect class="rest" width="100%" height="14"/>'
        f'<rect x="{100 * begin:.3f}%" width="{100 * width:.3f}%" height="14" fill="{fill}"/></svg>'
    )


def timeline(stretches: Sequence[Stretch], *, now: float) -> str:
    """Shares of what was paid over time, useful work at the bottom; white where nothing was booked."""
    start, end = stretches[0].start, stretches[-1].end
    paths = "".join(
        f'<path d="{_band(stretches, index)}" fill="{fill}"><title>{word}</title></path>'
        for index, (word, fill) in enumerate(BAND_COLOURS)
    )
    key = "".join(f"<li>{_square(fill)}{word}</li>" for word, fill in BAND_COLOURS)
    return (
        f'<figure class="course"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{_said(stretches)}">{paths}</svg><figcaption><span>{moment(start, now=now)}</span>'
        f'<ul class="key">{key}</ul><span>{moment(end, now=now)}</span></figcaption></figure>'
    )


def _band(stretches: Sequence[Stretch], index: int) -> str:
    """Rectangles of one band: moved to, drawn across, down, back."""
    start = stretches[0].start
    scale = 1000 / (stretches[-1].end - start)
    drawn = []
    for one in stretches:
        whole, below, part = sum(one.bands), sum(one.bands[:index]), one.bands[index]
        if part > 0:
            x, width = (one.start - start) * scale, (one.end - one.start) * scale
            top, high = 100 - 100 * (below + part) / whole, 100 * part / whole
            drawn.append(f"M{x:.1f} {top:.1f}h{width:.1f}v{high:.1f}h-{width:.1f}z")
    return "".join(drawn)


def _said(stretches: Sequence[Stretch]) -> str:
    """The course in words: useful work in each quarter of it."""
    quarter = max(1, len(stretches) // 4)
    groups = [stretches[at : at + quarter] for at in range(0, len(stretches), quarter)]
    useful = [percent(sum(one.bands[0] for one in group) / sum(sum(one.bands) for one in group)) for group in groups]
    return f"useful share of what was paid, from first to last: {', '.join(useful)}"


def _square(fill: str) -> str:
    return f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{fill}"/></svg>'
