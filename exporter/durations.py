"""Parses the durations of the command line: 90s, 10m, 1h30m, 2d."""

import math
import re

DURATION_FORMS = "90s, 10m, 1h30m or 2d"
"""Examples of the accepted forms, for help texts and error messages."""
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = r"(?:(\d{{1,9}}(?:\.\d{{1,6}})?){})?"
_PATTERN = re.compile("".join(_PART.format(unit) for unit in _UNITS), re.ASCII)
"""Each unit at most once, in descending order."""


def parse_duration(text: str, *, bare_seconds: bool = True) -> float:
    """Return the seconds of a duration; a number without a unit is seconds if `bare_seconds`. Raises ValueError."""
    found = _PATTERN.fullmatch(text.strip())
    if found is not None and found[0]:
        return sum(float(number or 0) * size for number, size in zip(found.groups(), _UNITS.values(), strict=True))
    seconds = _number(text) if bare_seconds else math.nan
    if not math.isfinite(seconds):
        bare = ", or a number of seconds" if bare_seconds else ""
        raise ValueError(f"{text!r} is not a duration such as {DURATION_FORMS}{bare}")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
