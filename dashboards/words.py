"""What dashboards have in common to the eye: the colour of each leak, layer and state, bands, and units.

Owns every colour. Layers, states and judgements wear those of Okabe and Ito ("Color Universal Design", 2008), which
people with any colour vision tell apart; leaks wear shades of their layer's. What is not known is grey, never the
colour of what is good. Refuses queries.
"""

from collections.abc import Mapping
from types import MappingProxyType

from exporter.core.leaks import LEAKS as ROWS
from exporter.web.page import LEAK_COLOURS

GOOD, EXPECTED, WATCH, BAD = "#009E73", "#56B4E9", "#E69F00", "#D55E00"
UNKNOWN, QUIET = "#8C96A3", "#5F6772"
"""Not known; and lines that are only there to compare with."""

EIGHT = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#D0D5DB")
"""For what has a number and no meaning: the GPUs of a node."""

LEAKS: Mapping[str, str] = MappingProxyType(LEAK_COLOURS | {"unresolved": "#B9C0C8", "unobserved": QUIET})
"""As the daemon's page has them: allocation losses warm, compute-time losses purple, model-FLOPs losses blue."""

LEAK_NAMES: Mapping[str, str] = MappingProxyType({name: name.replace("_", " ") for name in LEAKS})
"""How a reader sees a leak's label."""

LAYERS: Mapping[str, str] = MappingProxyType({
    "gau": BAD, "ectr": "#CC79A7", "emfu": EXPECTED, "useful": GOOD, "unresolved": "#B9C0C8", "unobserved": QUIET,
})  # fmt: skip

STATES: Mapping[str, str] = MappingProxyType({
    "active": GOOD,
    "stalled": "#CC79A7",
    "hung": "#86319E",
    "zombie": BAD,
    "unowned": "#F0E442",
    "unallocated": WATCH,
    "unavailable": "#AF2C1F",
    "unobserved": QUIET,
})  # fmt: skip

SEVERITIES: Mapping[str, str] = MappingProxyType({"page": BAD, "ticket": WATCH, "info": EXPECTED})

PHASES: Mapping[str, str] = MappingProxyType({
    "compute": GOOD, "communication": "#E3679F", "bubble": "#0B7D9E", "data": "#962E8A", "checkpoint": "#F0A1F6",
    "startup": "#AD52B4", "restore": "#CB75D9", "evaluation": EXPECTED, "rework": "#95B6FD", "idle": WATCH,
    "unreported": UNKNOWN,
})  # fmt: skip

_NO_LOSS = dict.fromkeys(("useful", "unresolved", "unobserved"), "-")
TEAMS: Mapping[str, str] = MappingProxyType({row.name: row.team for row in ROWS} | _NO_LOSS)
FIXES: Mapping[str, str] = MappingProxyType({row.name: row.fix for row in ROWS} | _NO_LOSS)
"""Who usually acts on a leak, and what to do first."""

LAYER_WORDS: Mapping[str, str] = MappingProxyType({
    "gau": "lost: not allocated or not working (GAU)",
    "ectr": "lost: allocated, not computing (ECTR)",
    "emfu": "lost: computing, not useful FLOPs (eMFU)",
    "useful": "useful",
    "unresolved": "computing, worth unknown",
    "unobserved": "not seen",
})  # fmt: skip

BANDS: Mapping[str, tuple[float, float]] = MappingProxyType({
    "gau": (0.65, 0.85), "ectr": (0.70, 0.90), "emfu": (0.30, 0.50), "product": (0.1365, 0.3825),
})  # fmt: skip
"""Where most fleets lie, after the documents this project started from; the product's are those of its three."""

_LIGHT_TEXT, _DARK_TEXT = "#F7F8FA", "#202226"
"""What Grafana writes with on a coloured cell: light where the brightness of the colour is below half."""
_BRIGHT = 128
_READABLE = 4.5
"""Contrast that WCAG 2.2 asks of text (level AA)."""


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21 (WCAG 2.2)."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _parts(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    shares = (part / 255 for part in _parts(colour))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)  # noqa: PLR2004 - the formula of sRGB
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_on(colour: str) -> str:
    """The colour of the text that Grafana writes on it."""
    red, green, blue = _parts(colour)
    return _LIGHT_TEXT if 0.299 * red + 0.587 * green + 0.114 * blue < _BRIGHT else _DARK_TEXT


def under_text(colour: str) -> str:
    """The shade of it on which text can be read: as it is, or a little darker or lighter."""
    text, found, parts = text_on(colour), colour, _parts(colour)
    for percent in range(99, 0, -1):
        if contrast(found, text) >= _READABLE:
            break
        away = 0 if text == _LIGHT_TEXT else 255
        found = "#" + "".join(f"{round(away + (part - away) * percent / 100):02X}" for part in parts)
    return found


_ENDINGS = (
    ("timestamp_seconds", "dateTimeAsIso"),
    (":flops_per_byte", "none"),
    ("flops_per_byte", "none"),
    ("bytes_per_second", "Bps"),
    (":per_gpu_second_rate5m", "none"),
    (":grams_per_hour", "massg"),
    ("_bytes", "bytes"),
    (":bytes", "bytes"),
    ("_watts", "watt"),
    (":watts", "watt"),
    ("_celsius", "celsius"),
    ("_joules_total", "joule"),
    ("_seconds:rate5m", "none"),
    (":mean_seconds", "s"),
    (":mean_seconds_1d", "s"),
    ("_seconds", "s"),
    (":seconds", "s"),
    ("_seconds_total", "s"),
    (":gpus_1d", "none"),
    (":gpus", "none"),
    ("_gpus", "none"),
)
_RATIOS = ("ratio", "share", "coverage", "median")
_MONEY = ("cost", "price", "budget")


def unit_of(name: str) -> str:
    """Grafana's name for the unit of a series, from the series' own name; `short` where it is a plain number.

    Money has no unit of Grafana's: its currency is a label, and is written beside the figure.
    """
    if any(word in name for word in _MONEY):
        return "short"
    last = name.rsplit(":", 1)[-1]
    if any(word in last for word in _RATIOS) and "per_cost" not in name:
        return "percentunit" if "flops_per_byte" not in name else "none"
    return next((unit for ending, unit in _ENDINGS if name.endswith(ending)), "short")
