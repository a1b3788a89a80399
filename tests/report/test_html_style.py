"""Colours of a page: contrast with the background, and distinction for any colour vision."""

from itertools import combinations

import pytest

from exporter.colours import contrast
from exporter.report.html import DARK_COLOURS, FILL_COLOURS, LIGHT_COLOURS, STYLESHEET

Linear = tuple[float, float, float]
SIGHT = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""How colours look to people without one kind of cone: Machado, Oliveira and Fernandes, 2009, at full severity."""
LAYERS = ("gau", "ectr", "emfu", "useful")
schemes = pytest.mark.parametrize("colours", [LIGHT_COLOURS, DARK_COLOURS], ids=["light", "dark"])


def linear(colour: str) -> Linear:
    values = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return red, green, blue


def lab(seen: Linear) -> Linear:
    """CIE 1976, D65."""
    red, green, blue = (min(max(value, 0), 1) for value in seen)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    a, b, c = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


def distance(one: str, other: str, sight: str) -> float:
    seen = []
    for colour in (one, other):
        rows = [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in SIGHT[sight]]
        seen.append(lab((rows[0], rows[1], rows[2])))
    return float(sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5)


@schemes
def test_words_and_fills_stand_out(colours: dict[str, str]) -> None:
    for ground in ("bg", "card"):
        assert contrast(colours["ink"], colours[ground]) >= 7
        for word in ("mute", "useful"):
            assert contrast(colours[word], colours[ground]) >= 4.5
    for fill in FILL_COLOURS:
        for ground in ("card", "track"):
            least = 1.5 if fill == "kept" and ground == "track" else 3
            assert contrast(colours[fill], colours[ground]) >= least - 0.25, (fill, ground)


@schemes
@pytest.mark.parametrize("sight", SIGHT)
def test_layers_are_told_apart_by_any_eye(colours: dict[str, str], sight: str) -> None:
    for one, other in combinations(LAYERS, 2):
        assert distance(colours[one], colours[other], sight) >= 10, (one, other)


def test_every_fill_has_its_rule_and_both_schemes_have_every_colour() -> None:
    assert LIGHT_COLOURS.keys() == DARK_COLOURS.keys()
    for fill in FILL_COLOURS:
        assert f".fill.{fill}{{fill:var(--{fill})}}" in STYLESHEET
    assert all(f"var(--{name})" in STYLESHEET or f"--{name}:" in STYLESHEET for name in LIGHT_COLOURS)


def test_paper_is_white() -> None:
    assert "@media screen and (prefers-color-scheme:dark)" in STYLESHEET
    assert STYLESHEET.count("prefers-color-scheme") == 1
    assert "size:A4" in STYLESHEET
