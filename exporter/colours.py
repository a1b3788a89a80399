"""The one table of colours of layers and states, and their shades on the page, reports, boards and in terminals.

The base colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any colour vision tell
apart. A state wears a hue of the layer that its time is lost to; so does each leak (`core.leaks`). What is not known is
grey. Owns what makes text legible on or beside them (WCAG 2.2).
"""

from collections.abc import Mapping

UNKNOWN = "#5F6772"
"""Of what was not observed."""
LAYERS: Mapping[str, str] = {
    "gau": "#D55E00", "ectr": "#CC79A7", "emfu": "#56B4E9", "useful": "#009E73", "unresolved": "#B9C0C8",
    "unobserved": UNKNOWN,
}  # fmt: skip
STATES: Mapping[str, str] = {
    "active": LAYERS["useful"],
    "stalled": LAYERS["ectr"],
    "hung": "#86319E",
    "zombie": LAYERS["gau"],
    "unowned": "#F0E442",
    "unallocated": "#E69F00",
    "unavailable": "#AF2C1F",
    "unobserved": UNKNOWN,
}
TERMINAL: Mapping[str, str] = {
    "useful": "green", "gau": "yellow", "ectr": "magenta", "emfu": "bright_blue",
    "active": "green", "stalled": "magenta", "hung": "bright_magenta", "zombie": "yellow", "unowned": "yellow",
    "unallocated": "yellow", "unavailable": "bright_red",
}  # fmt: skip
"""The nearest of a terminal's sixteen colours, which its theme makes legible; what is missing here is dim."""

TEXT_CONTRAST, LARGE_CONTRAST = 4.5, 3.0
"""Contrast of text, and of large text or the parts of a chart, with what is behind them: WCAG 2.2, level AA."""
BLACK, WHITE = "#000000", "#FFFFFF"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21 (WCAG 2.2)."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def shade(colour: str, ground: str, least: float) -> str:
    """Return the colour, or as little of black or white in it as gives it that contrast with a ground."""
    end = BLACK if contrast(BLACK, ground) > contrast(WHITE, ground) else WHITE
    return next((mix for percent in range(101) if contrast(mix := mixed(colour, end, percent), ground) >= least), end)


def mixed(colour: str, other: str, percent: int) -> str:
    """Return the colour with that much of another in it."""
    pairs = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(one + (two - one) * percent / 100):02X}" for one, two in pairs)


def channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of #RRGGBB, 0 to 255."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    shares = (part / 255 for part in channels(colour))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)  # noqa: PLR2004 - the formula of sRGB
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
