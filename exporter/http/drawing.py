"""Where a window's time went, drawn as one bar and said in words.

Owns the order of the parts and their text alternatives. SVG attributes carry size and colour, so that the page's
security policy can forbid inline styles.
"""

from exporter.core.leaks import NAMES
from exporter.http.api import WindowOut
from exporter.http.appearance import COLOURS
from exporter.http.words import duration, plain

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
    return f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{COLOURS[name]}"/></svg>'
