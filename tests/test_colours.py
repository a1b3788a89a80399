"""One table of colours: page, report, boards and terminal take theirs from it, and all of it can be read."""

import re

import pytest

from dashboards import words
from exporter import colours
from exporter.colours import LARGE_CONTRAST, TERMINAL, TEXT_CONTRAST, contrast, shade
from exporter.core.leaks import LAYERS
from exporter.core.model import State
from exporter.report.html import DARK_COLOURS, LIGHT_COLOURS
from exporter.top.app import _COLOUR_STYLES, _PLAIN_STYLES
from exporter.top.columns import LOUD_STATES
from exporter.web.page import LEAK_COLOURS, STYLE

GROUNDS = {"light": ("#FFFFFF", "#FAF9F7"), "dark": ("#131312", "#1C1B1A")}
"""What the page has behind its text, as its style sheet says."""


def test_every_layer_and_state_is_in_the_table_and_everybody_takes_it_from_there() -> None:
    assert tuple(colours.LAYERS) == LAYERS
    assert set(colours.STATES) == {state.value for state in State}
    assert (words.LAYERS, words.STATES) == (colours.LAYERS, colours.STATES)
    assert LEAK_COLOURS["useful"] == colours.LAYERS["useful"]
    assert LIGHT_COLOURS["useful"] == shade(colours.LAYERS["useful"], LIGHT_COLOURS["track"], TEXT_CONTRAST)
    assert DARK_COLOURS["ectr"] == shade(colours.LAYERS["ectr"], DARK_COLOURS["track"], LARGE_CONTRAST)


@pytest.mark.parametrize("theme", GROUNDS)
def test_the_page_names_each_state_in_its_colour_and_it_can_be_read(theme: str) -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme:dark){.active")
    rules = dict(re.findall(r"\.(\w+)\{--is:(#[0-9A-F]{6})\}", light if theme == "light" else ".active" + dark))
    assert set(rules) == set(colours.STATES)
    for ground in GROUNDS[theme]:
        assert ground.lower() in STYLE.lower() or ground == "#FFFFFF"
        assert {state: found for state, found in rules.items() if contrast(found, ground) < TEXT_CONTRAST} == {}
    assert rules["hung"] != rules["zombie"]


def test_a_shade_is_the_colour_itself_where_that_can_be_read() -> None:
    assert shade("#86319E", "#FFFFFF", TEXT_CONTRAST) == "#86319E"
    assert shade("#86319E", "#1C1B1A", TEXT_CONTRAST) != "#86319E"
    assert (shade("#808080", "#FFFFFF", 22), shade("#808080", "#000000", 22)) == ("#000000", "#FFFFFF")


def test_a_terminal_has_a_style_for_each_and_without_colours_only_weight() -> None:
    assert set(TERMINAL) <= {*colours.LAYERS, *colours.STATES} <= set(_COLOUR_STYLES)
    assert all(_COLOUR_STYLES[name].color for name in TERMINAL)
    assert not any(style.color for style in _PLAIN_STYLES.values())
    assert all(_COLOUR_STYLES[state].bold and _PLAIN_STYLES[state].bold for state in LOUD_STATES)
