"""Tests text on a terminal: its width, and that names that users chose cannot control the terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.top.view import ASCII, UNICODE, Glyphs, cell_width, pad, truncate, truncate_middle

HOSTILE = (
    "\x1b[2J\x1b[31mred", "\x9b31m", "a\rb\nc\td", "\x07bell", "\u202eright to left", "\u2066isolate",
    "zero\u200bwidth",
    "e\u0301", "\ud800", "[bold red]markup[/]", "\x1b]0;title\x07", "\x00", "🇩🇪", "漢字", "\u0e33",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("signs", [UNICODE, ASCII])
def test_no_name_reaches_the_terminal_as_a_command(name: str, signs: Glyphs) -> None:
    shown = signs.printable(name)
    assert shown.isprintable()
    assert shown.encode()
    assert not signs.ascii or shown.isascii()


def test_markup_is_text() -> None:
    assert UNICODE.printable("[bold red]x[/] [link=http://a]") == "[bold red]x[/] [link=http://a]"


def test_letters_of_two_marks_are_shown_as_one_and_lone_marks_are_not() -> None:
    assert UNICODE.printable("e\u0301") == "é"
    assert UNICODE.printable("\u0301") == "?"


@pytest.mark.parametrize(
    ("text", "width", "begin", "both"),
    [
        ("pretrain", 8, "pretrain", "pretrain"),
        ("pretrain", 7, "pretra…", "pre…ain"),
        ("pretrain", 6, "pretr…", "pre…in"),
        ("pretrain", 4, "pre…", "pre…"),
        ("漢字漢字", 5, "漢字…", "漢…字"),
        ("漢字漢字", 4, "漢…", "漢…"),
        ("x", 0, "", ""),
    ],
)
def test_what_is_too_long_is_cut_and_says_so(text: str, width: int, begin: str, both: str) -> None:
    assert truncate(text, width, UNICODE) == begin
    assert truncate_middle(text, width, UNICODE) == both


@given(st.text(), st.integers(0, 30), st.sampled_from([UNICODE, ASCII]))
def test_nothing_is_ever_wider_than_its_room(text: str, width: int, signs: Glyphs) -> None:
    name = signs.printable(text)
    for shown in (truncate(name, width, signs), truncate_middle(name, width, signs)):
        assert cell_width(shown) <= width
        assert cell_width(pad(shown, width)) == width
    assert truncate(name, cell_width(name), signs) == truncate_middle(name, cell_width(name), signs) == name
