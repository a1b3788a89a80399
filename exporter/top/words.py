"""Figures in as few signs as a column has.

Owns their digits. What is nothing, what was not seen and what has nothing to divide by look different.
"""

from datetime import UTC, datetime

from exporter.core.leaks import LAYER_OF, LEAKS, NAMES
from exporter.top.answers import Window

NOTHING = "-"
"""Nothing to divide by."""
UNSEEN = "?"
WINDOWS = {"last_5_minutes": "5 min", "last_hour": "1 h"}
LAYER = dict(zip(NAMES, LAYER_OF, strict=True))
FIX = {leak.name: leak.fix for leak in LEAKS} | {
    "unresolved": "a source with tensor activity: see gpu-efficiency install-check",
    "unobserved": "see why it cannot be seen: gpu-efficiency install-check",
}
"""What to do first."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TINY = 0.005
"""What would round to 0 % and is not."""


def share(value: float) -> str:
    """0-1 as whole percent, without its sign."""
    return "<1" if 0 < value < _TINY else f"{100 * value:.0f}"


def ratio(window: Window, name: str) -> str:
    """One of a window's ratios."""
    value: float | None = getattr(window, name)
    if value is not None:
        return share(value)
    unknown = not window.coverage or (name in ("emfu", "product") and window.leaks.get("unresolved"))
    return UNSEEN if unknown or name == "driver_utilization" else NOTHING


def percent(window: Window, name: str) -> str:
    """The same with its sign, for a sentence."""
    said = ratio(window, name)
    return said if said in (NOTHING, UNSEEN) else f"{said} %"


def brief(seconds: float) -> str:
    """A duration in five signs: 45s, 12m, 3h05m, 17h, 2d4h, 12d."""
    if seconds < 1.5 * _MINUTE:
        return f"{max(0, seconds):.0f}s"
    minutes = round(seconds / _MINUTE)
    if seconds < 1.5 * _HOUR:
        return f"{minutes}m"
    hours = round(seconds / _HOUR)
    if seconds < _DAY:
        return f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 10 * _MINUTE else f"{hours}h"
    return f"{hours // 24}d{hours % 24}h" if hours < 10 * 24 else f"{hours // 24}d"


def plain(name: str) -> str:
    """`low_parallelism` as people say it."""
    return name.replace("_", " ")


def clock(wall: float) -> str:
    """Unix seconds as the time of day."""
    return f"{datetime.fromtimestamp(wall, UTC):%H:%M:%S} UTC"


def gibibytes(used: float | None, whole: float | None) -> str:
    """Used of all there is."""
    if used is None:
        return ""
    return f"{used / 2**30:.0f}" + (f"/{whole / 2**30:.0f}" if whole else "")


def ranges(indices: list[str]) -> str:
    """0,1,2,5 as 0-2,5; what is no number stays as it is."""
    found: list[list[str]] = []
    for index in indices:
        follows = found and index.isdecimal() and found[-1][-1].isdecimal() and int(index) == int(found[-1][-1]) + 1
        if follows:
            found[-1].append(index)
        else:
            found.append([index])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
