"""Tests the durations of the command line: one parser, used by every flag that takes one."""

import argparse
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cli.wiring import duration_argument
from exporter.durations import DURATION_FORMS, parse_duration
from exporter.formatting import short_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("2d4h", 187_200),
        ("1d1h1m1s", 90_061), ("1.5h", 5400), ("0s", 0), (" 30m ", 1800), ("45", 45), ("0.5", 0.5), ("1e3", 1000),
        ("999999999d", 999_999_999 * 86400),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "soon", "1w", "30m1h", "1h1h", "1h 30m", "h30", "inf", "nan", "-5m", "1H", "\u0661s"]
)
def test_what_is_no_duration_is_an_error_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration such as 90s, 10m, 1h30m or 2d, or a number of seconds$"):
        parse_duration(text)


def test_a_unit_can_be_required() -> None:
    assert parse_duration("1h30m", bare_seconds=False) == 5400
    with pytest.raises(ValueError, match=f"^'30' is not a duration such as {DURATION_FORMS}$"):
        parse_duration("30", bare_seconds=False)


@given(st.integers(0, 10**7))
def test_what_the_screens_show_can_be_typed(seconds: int) -> None:
    """`top` shows 3h05m: pasted into a flag it is the same duration, as exactly as it is shown."""
    shown = short_duration(seconds)
    unit = parse_duration(f"1{shown[-1]}")
    assert abs(parse_duration(shown, bare_seconds=False) - seconds) <= unit


def test_a_flag_has_a_least_duration_and_may_be_endless() -> None:
    assert duration_argument(1)("1s") == 1
    with pytest.raises(argparse.ArgumentTypeError, match=r"'0\.5' is less than 1s"):
        duration_argument(1)("0.5")
    with pytest.raises(argparse.ArgumentTypeError, match="'inf' is not a duration"):
        duration_argument()("inf")
    assert duration_argument(endless=True)("inf") == math.inf
