"""Parses values of flags that several commands share: numbers, time spans, HTTP headers.

Raises argparse.ArgumentTypeError or ConfigError, which name the flag and the reason.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from exporter.config import ConfigError
from exporter.preview.scoring import (
    parse_duration,
)


def parse_headers(given: Iterable[str]) -> dict[str, str]:
    """Parse header lines, given directly or as @FILE. Errors do not repeat a line: it may hold a password."""
    found: dict[str, str] = {}
    for text in given:
        for line in _header_lines(text):
            name, colon, value = line.partition(":")
            if not (colon and name.strip() and line.isascii() and line.isprintable()):
                where = text if text.startswith("@") else "what was given"
                raise ConfigError(f"--header: {where} is not 'Name: value' (example: 'Authorization: Bearer ...')")
            found[name.strip()] = value.strip()
    return found


def _header_lines(text: str) -> list[str]:
    if not text.startswith("@"):
        return [text]
    try:
        content = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"--header: {text[1:]}: cannot be read: {getattr(err, 'strerror', None) or err}") from err
    return [line for line in content.splitlines() if line.strip()]


def time_span(text: str) -> float:
    """Argument type: a duration of at least a second, in seconds."""
    try:
        seconds = parse_duration(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than a second")
    return seconds


def at_least(least: float) -> Callable[[str], float]:
    """Return an argument type: a finite number of at least `least`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more")
        return value

    return number
