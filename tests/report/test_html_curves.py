"""Drawings over time, of two jobs and of many, and text widths: they state what the report states."""

from collections.abc import Callable, Sequence
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.report.analysis import compare_reports
from exporter.report.model import CourseInterval, JobReport, QualityMetric
from exporter.report.svg import MAX_SLICES, course_slices, first_fitting, shorten, text_width, wrap_lines
from tests.report import pages
from tests.report.drawings import absent, drawn, fills, named, wide, words
from tests.report.read_page import check

# -- over time --


def test_a_quality_is_drawn_as_steps_with_its_target() -> None:
    drawing = named(pages.full(), "quality-0")
    (curve,) = drawing.all("polyline")
    points = [tuple(map(float, each.split(","))) for each in curve.facts["points"].split()]
    assert len(points) == 8, "three rises, each of them two corners"
    assert points[1][1] == points[0][1]
    assert points[2][0] == points[1][0]
    assert points[-1][0] == max(each.number("x2") for each in drawing.all("line")), "it holds until the job's end"
    (goal,) = (each for each in drawing.all("line") if each.facts["class"] == "goal")
    low, top = points[0][1], points[-1][1]
    assert (low - goal.number("y1")) / (low - top) == pytest.approx(0.45 / 0.5, abs=0.01)
    assert "target 0.65" in words(drawing)


@pytest.mark.parametrize("values", [(nan, 1.0), (1.0,), (inf, -inf), (1e300, -1e300)])
def test_a_quality_that_is_no_curve_is_not_drawn(values: Sequence[float]) -> None:
    assert absent(with_quality(values, target=None), "quality")


@pytest.mark.parametrize(
    ("values", "target"), [((1.0, 1.0), None), ((3.0, 1.0), 0.5), ((0.0, 1.0), nan), ((-5.0, 5.0), 9)]
)
def test_any_other_quality_is(values: Sequence[float], target: float | None) -> None:
    check(named(with_quality(values, target=target), "quality"))


def with_quality(values: Sequence[float], *, target: float | None) -> JobReport:
    quality = QualityMetric(
        name="", start=values[0], last=values[-1], best=values[0], rises=True, target=target, gained=0.0,
        cost_per_unit=None, track=tuple((60.0 * n, value) for n, value in enumerate(values)),
    )  # fmt: skip
    found = pages.full()
    assert found.truth is not None
    return replace(found, truth=replace(found.truth, qualities=(quality,)))


def test_the_course_lays_its_kinds_over_one_another() -> None:
    moment = CourseInterval(start=0, end=10, gpus=4, coverage=0.5, gau=0.8, ectr=0.5, floor=0.1, watts=None)
    (piece,) = course_slices((moment,))
    assert piece.cumulative == pytest.approx((0.05, 0.2, 0.4, 0.5, 1.0))
    found = replace(pages.full(), course=(moment, replace(moment, start=10, end=20)))
    drawing = named(found, "course")
    shown = [each.facts["class"] for each in drawing.all("polygon")]
    assert shown == [f"fill {kind}" for kind in ("useful", "emfu", "ectr", "gau", "unobserved")]
    assert absent(replace(found, course=found.course[:1]), "course")


def test_a_long_course_is_put_together_by_the_time_held() -> None:
    many = course_slices(pages.course(1000))
    assert len(many) <= MAX_SLICES
    assert (many[0].start, many[-1].end) == (0, 300_000)
    held = [CourseInterval(start=n, end=n + 1, gpus=gpus, coverage=1, gau=1, ectr=1, floor=useful, watts=None)
            for n, (gpus, useful) in enumerate([(1, 0.0), (3, 1.0)] * MAX_SLICES)]  # fmt: skip
    assert {each.cumulative[0] for each in course_slices(held)} == {0.75}


@pytest.mark.parametrize("unknown", ["coverage", "gau", "ectr", "floor"])
def test_what_a_moment_does_not_tell_is_not_useful(unknown: str) -> None:
    moment = CourseInterval(start=0, end=10, gpus=4, coverage=1, gau=1, ectr=1, floor=1, watts=None)
    (piece,) = course_slices((replace(moment, **{unknown: None}),))
    assert piece.cumulative[0] == 0
    assert course_slices((replace(moment, gpus=0), replace(moment, end=0))) == []


# -- two jobs, and many --


def test_differences_grow_from_the_middle() -> None:
    drawing = named(pages.two(), "differences-wide")
    (middle,) = {each.number("x1") for each in drawing.all("line")}
    (useful,) = fills(drawing, "useful")
    assert useful.number("x") == pytest.approx(middle, abs=0.1)
    (allocation,) = fills(drawing, "gau")
    assert allocation.number("x") + allocation.number("width") == pytest.approx(middle, abs=0.1)
    assert allocation.number("width") / useful.number("width") == pytest.approx(0.05 / (0.6 - 14.3 / 32), abs=0.01)
    assert {"+15.3", "-5.0", "44.7 % to 60.0 %"} <= set(words(drawing))
    assert absent(compare_reports(pages.full(), pages.full()), "differences")


def test_both_jobs_are_whole() -> None:
    drawing = named(pages.two(), "both-wide")
    tracks = [each for each in drawing.all("rect") if each.facts["class"] == "track"]
    first = [each for each in drawing.all("rect") if each.number("y") == tracks[0].number("y")]
    assert sum(each.number("width") for each in first if each is not tracks[0]) == pytest.approx(
        tracks[0].number("width"), abs=0.5
    )
    assert "lost to allocation (GAU)" in words(drawing)


def test_who_lost_most_is_first_and_drawn_to_who_held_most() -> None:
    drawing = named(pages.many(), "ranking-wide")
    lost, kept = wide(drawing, "lost"), wide(drawing, "kept")
    assert lost[0] / (lost[0] + kept[0]) == pytest.approx(0.7, abs=0.01)
    assert (lost[1] + kept[1]) / (lost[0] + kept[0]) == pytest.approx(0.5, abs=0.01)
    assert words(drawing)[:3] == ["ada", "560.00 USD", "30.0 % useful, most to data stall"]


def test_a_trend_has_a_column_for_each_period() -> None:
    drawing = named(pages.many(), "trend-wide")
    lost = [each for each in fills(drawing, "lost") if each.number("height") != 11]
    assert len(lost) == 14
    assert lost[3].number("height") == 0
    assert lost[0].number("height") / 170 == pytest.approx(60 * 0.4 / 125, abs=0.01)
    assert {"60.0 %", "34.0 %", "2026-01-01", "2026-01-14", "-"} <= set(words(drawing))


def test_prices_of_a_useful_hour_are_side_by_side() -> None:
    drawing = named(pages.many(), "rents")
    own, rented = wide(drawing, "busy")
    assert rented / own == pytest.approx(4.21 / 6.67, abs=0.001)
    assert "own is cheaper from 47.5 % useful on" in words(drawing)


def test_a_sum_of_little_is_drawn_as_far_as_it_goes() -> None:
    found = pages.many()
    little = replace(found, rows=found.rows[:1], trend=found.trend[:1], rents=())
    assert {each.facts["aria-labelledby"].partition("-")[0] for each in drawn(little)} == {"waterfall", "layers"}
    assert drawn(replace(little, parts=(), whole=replace(found.whole, layers=pages.unseen().layers))) == []


# -- text widths --


@given(st.text(max_size=60), st.floats(0, 400))
def test_what_is_cut_fits(name: str, room: float) -> None:
    assert text_width(shorten(name, room)) <= room
    assert text_width(first_fitting(room, name, name)) <= room
    for line in wrap_lines(name, room):
        assert text_width(line) <= room


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: shorten("gpu-node-0001", 50), "gp…01"), (lambda: shorten("short", 500), "short"),
        (lambda: first_fitting(60, "much too long", "shorter", "s"), "shorter"),
        (lambda: wrap_lines("a b c", 500), ["a b c"]),
        (lambda: wrap_lines("exposed communication", 101), ["exposed", "communication"]),
    ],
)  # fmt: skip
def test_words_give_way(made: Callable[[], object], said: object) -> None:
    assert made() == said
