"""Tests trends: means, gaps, and bounded size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.top.view import ASCII, MAX_INTERVALS, UNICODE, Trends, sparkline


def watched(*figures: float | None, stretch: float = 2.0) -> Trends:
    trends = Trends(0.0, stretch)
    for place, figure in enumerate(figures):
        trends.add("row", figure, place * stretch)
    return trends


def test_figures_stand_in_the_order_they_came_and_the_last_is_the_newest() -> None:
    assert watched(0.1, 0.2, 0.3).points("row", 8) == [0.1, 0.2, 0.3]


def test_several_looks_within_a_stretch_are_one_mean() -> None:
    trends = Trends(0.0, 10.0)
    for at, figure in ((0.0, 0.2), (3.0, 0.4), (11.0, 0.9)):
        trends.add("row", figure, at)
    assert trends.points("row", 8) == [pytest.approx(0.3), 0.9]


def test_time_without_an_answer_is_a_gap_and_what_was_before_the_first_look_is_nothing() -> None:
    trends = watched(0.1, None, None, 0.4)
    assert trends.points("row", 8) == [0.1, None, None, 0.4]
    assert sparkline(trends.points("row", 8), 0.5, UNICODE) == "▂··▇"
    assert trends.points("other", 8) == [None] * 4


def test_a_stretch_that_has_only_begun_is_no_gap_yet() -> None:
    trends = watched(0.1, 0.2)
    trends.advance(4.5)
    assert trends.points("row", 8) == [0.1, 0.2]
    trends.advance(6.5)
    assert trends.points("row", 8) == [0.1, 0.2, None]


def test_more_than_fits_is_drawn_as_means() -> None:
    assert watched(0.0, 0.2, 0.4, 0.6).points("row", 2) == [pytest.approx(0.1), pytest.approx(0.5)]


def test_a_week_of_watching_takes_no_more_memory_than_an_hour() -> None:
    trends = Trends(0.0, 2.0)
    for at in range(0, 7 * 86400, 60):
        trends.add("row", 0.25 if at < 3.5 * 86400 else 0.75, float(at))
    points = trends.points("row", 10_000)
    assert MAX_INTERVALS / 2 <= len(points) <= MAX_INTERVALS
    assert points[0] == 0.25
    assert points[-1] == 0.75
    assert 0.45 <= points.index(0.75) / len(points) <= 0.55


def test_rows_share_one_scale_of_round_figures() -> None:
    trends = watched(0.02)
    assert trends.scale_of(["row"]) == 0.1
    trends.add("other", 0.3, 1.0)
    assert trends.scale_of(["row", "other"]) == 0.5
    assert trends.scale_of([]) == 0.1


def test_rows_that_are_gone_are_forgotten() -> None:
    trends = watched(0.1)
    trends.add("gone", 0.9, 0.0)
    trends.retain(["row"])
    assert trends.points("gone", 4) == [None]
    assert trends.points("row", 4) == [0.1]


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 12))
def test_a_trend_fits_its_room_whatever_came(figures: list[float | None], width: int) -> None:
    points = watched(*figures).points("row", width)
    assert len(points) <= width
    for signs in (UNICODE, ASCII):
        assert len(sparkline(points, 0.1, signs)) == len(points)


def test_the_ends_of_the_scale_are_the_lowest_and_the_highest_sign() -> None:
    assert sparkline([0.0, 1.0, 5.0], 1.0, UNICODE) == "▁██"


def test_before_a_rows_first_figure_there_is_nothing_and_not_a_gap() -> None:
    assert sparkline([None, None, 0.0, None, 1.0], 1.0, UNICODE) == "  ▁·█"
