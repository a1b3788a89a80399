"""What dashboards have in common to the eye: the colour of each leak, layer and state, and units.

Owns the colours of judgements, phases and single curves. Those of layers and states are the table that the daemon's
page, reports and `top` use, too (`exporter.colours`); leaks have theirs in the ledger's table. Refuses queries.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from exporter import colours
from exporter.core.leaks import LEAKS as ROWS
from exporter.web.page import LEAK_COLOURS

LAYERS, STATES, QUIET = colours.LAYERS, colours.STATES, colours.UNKNOWN
GOOD, EXPECTED, WATCH, BAD = LAYERS["useful"], LAYERS["emfu"], STATES["unallocated"], LAYERS["gau"]
UNKNOWN = "#8C96A3"
"""Not known; and lines that are only there to compare with."""

EIGHT = ("#CC8400", "#3C9CD8", "#18906C", "#849C60", "#186CA8", "#CC5400", "#B478A8", "#8478F0")
"""For what has a number and no meaning, the GPUs of a node: lines that can be seen on Grafana's light ground and dark
one, and told apart on both."""

LEAKS: Mapping[str, str] = MappingProxyType(
    LEAK_COLOURS | {name: LAYERS[name] for name in ("unresolved", "unobserved")}
)
"""As the daemon's page has them: allocation losses warm, compute-time losses purple, model-FLOPs losses blue."""

LEAK_NAMES: Mapping[str, str] = MappingProxyType({name: name.replace("_", " ") for name in LEAKS})
"""How a reader sees a leak's label."""


def prose(text: str) -> str:
    """A text with the labels of leaks in it as a reader sees them."""
    return re.sub(r"[a-z]+(?:_[a-z]+)+", lambda found: LEAK_NAMES.get(found[0], found[0]), text)


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

_LIGHT_TEXT, _DARK_TEXT, _BRIGHT = "#F7F8FA", "#202226", 180
"""What Grafana 11.6 to 12.4 write with on a coloured cell: light up to that brightness (@grafana/ui, utils/colors)."""


def text_on(colour: str) -> str:
    """The colour of the text that Grafana writes on it."""
    red, green, blue = colours.channels(colour)
    return _DARK_TEXT if 0.299 * red + 0.587 * green + 0.114 * blue > _BRIGHT else _LIGHT_TEXT


def under_text(colour: str) -> str:
    """The nearest shade of it on which Grafana's text can be read: as it is, or a little darker or lighter."""
    shades = (colours.mixed(colour, end, percent) for percent in range(101) for end in (colours.WHITE, colours.BLACK))
    return next(found for found in shades if colours.contrast(found, text_on(found)) >= colours.TEXT_CONTRAST)


GROUNDS = ("#FFFFFF", "#181B1F")
"""Of Grafana's panels, light and dark: a board has one colour for both (@grafana/data, themes/createColors)."""


def on_both(colour: str) -> str:
    """The shade of it in which large figures can be read, and thin lines seen, on both grounds.

    No colour has 4.5 to 1 on both, so text of normal size has no colour of its own: it stands on one (`under_text`).
    What can be read as it is takes the darker shade of cells, so that it stays apart from what has to be darkened.
    """
    if all(colours.contrast(colour, ground) >= colours.LARGE_CONTRAST for ground in GROUNDS):
        colour = under_text(colour)
    for ground in GROUNDS:
        colour = colours.shade(colour, ground, colours.LARGE_CONTRAST)
    return colour


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
