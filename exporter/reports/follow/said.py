"""What a line of a training log says, in words that all frameworks share.

Owns those words and the reading of numbers. Refuses to know any framework.
"""

import math
import re
from typing import Literal

from msgspec import Struct

Kind = Literal[
    "step",  # steps ended
    "bar",  # a progress bar stands at `step` of `total`
    "words",  # loss or epoch, without a step
    "save",  # a checkpoint begins to be written
    "saved",  # one was
    "detached",  # one is being written beside the training
    "load",  # a checkpoint begins to be read
    "loaded",
    "start",  # training begins, after `step`
    "validate",  # a validation begins
    "evaluated",  # one has lasted that long
    "validated",  # one has given a value
    "facts",
]
Fact = tuple[str, float | str]
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,3})?|\.\d{1,30}|nan|inf)", re.IGNORECASE)
_MOST_DIGITS = 15


class Said(Struct, frozen=True):
    """One line. None: it does not say."""

    kind: Kind
    step: int | None = None
    """The last that ended, the first step of a run being 1."""
    total: int | None = None
    each: float | None = None
    """Seconds of one step, a mean over those since the last line."""
    flops: float | None = None
    """Model FLOP/s of one GPU."""
    hardware_flops: float | None = None
    """The same with recomputation."""
    mfu: float | None = None
    """0-1, of the peak that the log has told as a fact."""
    tokens: float | None = None
    """A second, of one GPU."""
    samples: float | None = None
    """Of one step, of all GPUs."""
    trained: float | None = None
    """Tokens of one step that are no padding, of all GPUs."""
    loss: float | None = None
    epoch: float | None = None
    lasted: float | None = None
    """Seconds of what has ended."""
    value: float | None = None
    """Of a validation: less is better."""
    facts: tuple[Fact, ...] = ()


def number(text: str | None) -> float | None:
    """The number that the text is, with commas between thousands or without; None where it is none."""
    stripped = (text or "").strip()
    return float(stripped.replace(",", "")) if _NUMBER.fullmatch(stripped) else None


def amount(text: str | None) -> float | None:
    """The same, finite and not negative."""
    found = number(text)
    return found if found is not None and 0.0 <= found < math.inf else None


def times(value: float | None, factor: float) -> float | None:
    """Their product; None where there is no value."""
    return None if value is None else value * factor


def whole(text: str | None) -> int | None:
    """A count: decimal digits alone, no more than a counter of steps has."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and len(stripped) <= _MOST_DIGITS else None


def last(pattern: re.Pattern[str], text: str) -> tuple[re.Match[str], str] | None:
    """Its last match and what follows: before it may be a line that was cut, when its writer was killed."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007  the last is wanted
        pass
    return None if found is None else (found, text[found.end() :].rstrip())
