"""Tests the keys: what each changes, and that the selected row stays selected."""

import pytest
from msgspec.structs import replace

from exporter.top.columns import SORTS, RowKey
from exporter.top.screen import KEYS, MAX_FILTER, ScreenContext, ViewState, handle_key

ROWS: list[RowKey] = [("gpu", "a", f"{number}") for number in range(8)]
JOB: RowKey = ("job", "a", "4711")
BEFORE = ScreenContext(rows=ROWS, page=4, lines=20, job_of=lambda key: JOB if key[2] == "2" else None)


def keys(*pressed_ones: str, start: ViewState | None = None, before: ScreenContext = BEFORE) -> ViewState:
    asked = start or ViewState(chosen=ROWS[0])
    for key in pressed_ones:
        asked = handle_key(asked, key, before, char={"space": " "}.get(key, key if len(key) == 1 else None))
    return asked


@pytest.mark.parametrize(
    ("moves", "at"),
    [
        (("down",), 1), (("j", "j"), 2), (("down", "up"), 0), (("up",), 0), (("end",), 7), (("G", "down"), 7),
        (("end", "home"), 0), (("pagedown",), 3), (("pagedown", "pagedown", "pagedown"), 7), (("end", "pageup"), 4),
        (("G", "g"), 0), (("down", "k"), 0),
    ],
)  # fmt: skip
def test_the_cursor_moves_and_stops_at_the_ends(moves: tuple[str, ...], at: int) -> None:
    assert keys(*moves).chosen == ROWS[at]


def test_the_cursor_moves_on_from_its_row_wherever_sorting_has_put_it() -> None:
    turned = ScreenContext(rows=ROWS[::-1], page=4)
    assert keys("down", start=ViewState(chosen=ROWS[5]), before=turned).chosen == ROWS[4]


def test_enter_opens_the_job_and_where_there_is_none_the_gpu() -> None:
    assert keys("down", "down", "enter").opened == JOB
    assert keys("enter").opened == ROWS[0]
    assert keys("down", "down", "d").opened == ROWS[2]


@pytest.mark.parametrize("back", ["escape", "backspace", "q"])
def test_from_a_page_one_comes_back_to_the_list_and_its_row(back: str) -> None:
    asked = keys("down", "down", "enter", back)
    assert (asked.opened, asked.chosen, asked.quit) == (None, ROWS[2], False)


def test_q_leaves_the_list_and_ctrl_c_leaves_everything() -> None:
    assert keys("q").quit
    assert keys("enter", "ctrl+c").quit
    assert keys("slash", "ctrl+c").quit
    assert keys("question_mark", "ctrl+q").quit


def test_a_page_scrolls_between_its_ends() -> None:
    asked = keys("enter", "pagedown", "down")
    assert asked.first == 4
    assert keys("end", start=asked).first == 16
    assert keys("end", "home", "up", start=asked).first == 0


def test_a_filter_is_typed_with_letters_that_are_keys_elsewhere() -> None:
    asked = keys("slash", "q", "s", "space", "backspace", "w")
    assert (asked.text, asked.typing, asked.quit) == ("qsw", True, False)
    assert keys("enter", start=asked).text == "qsw"
    assert not keys("enter", start=asked).typing
    assert keys("escape", start=asked) == replace(asked, text="", typing=False)
    assert keys("ctrl+u", start=asked).text == ""


def test_while_a_filter_is_typed_the_arrows_move() -> None:
    assert keys("slash", "a", "down").chosen == ROWS[1]
    assert keys("slash", "a", "tab").text == "a"


def test_a_filter_has_an_end_and_takes_no_control_characters() -> None:
    asked = ViewState(typing=True)
    for sign in ("\x1b", "\x00", "\n"):
        asked = handle_key(asked, "x", BEFORE, char=sign)
    assert asked.text == ""
    for _ in range(2 * MAX_FILTER):
        asked = handle_key(asked, "x", BEFORE, char="x")
    assert asked.text == "x" * MAX_FILTER


def test_escape_in_the_list_shows_all_rows_again() -> None:
    assert keys("slash", "a", "enter", "escape").text == ""


def test_sorting_goes_round_and_each_list_has_its_own() -> None:
    asked = keys("s", "s", "r")
    assert (asked.sort, asked.reverse) == (2, True)
    other = keys("tab", start=asked)
    assert (other.kind, other.sort, other.reverse) == ("jobs", 0, False)
    assert keys("tab", "tab", start=asked).sort == 2
    assert keys(*["s"] * len(SORTS["gpus"])).sort == 0


def test_the_window_and_holding_go_there_and_back() -> None:
    assert keys("w").window == "last_hour"
    assert keys("w", "w").window == "last_5_minutes"
    assert keys("space").held
    assert not keys("space", "space").held


def test_help_is_over_everything_and_goes_again() -> None:
    asked = keys("down", "question_mark")
    assert asked.help
    assert keys("question_mark", start=asked) == keys("escape", start=asked) == replace(asked, help=False)


def test_without_a_row_no_key_fails() -> None:
    nothing = ScreenContext(rows=[], page=1)
    for names, *_ in KEYS:
        for key in names:
            keys(key, "enter", start=ViewState(), before=nothing)


def test_no_key_means_two_things_and_each_is_explained() -> None:
    named = [key for names, *_ in KEYS for key in names]
    assert len(named) == len(set(named))
    assert all(about for *_, about in KEYS)
