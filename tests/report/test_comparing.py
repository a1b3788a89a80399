"""Comparisons of two reports: what can be compared, and what cannot."""

import pytest
from msgspec.structs import replace

from exporter.report.analysis import compare_reports
from exporter.report.model import QualityMetric
from exporter.report.text import comparison_tables, render_text
from tests.report.answers import part, receipt, told


def quality(*track: tuple[float, float], rises: bool = True, name: str = "q") -> QualityMetric:
    values = [value for _, value in track]
    return QualityMetric(
        name=name, start=values[0], last=values[-1], best=max(values) if rises else min(values), rises=rises,
        target=None, gained=1, cost_per_unit=None, track=track,
    )  # fmt: skip


def test_a_falling_quality_is_compared_at_the_worse_of_both_bests() -> None:
    first = told(qualities=(quality((0, 3.0), (10, 1.0), (20, 1.5), rises=False),))
    second = told(qualities=(quality((0, 4.0), (30, 2.0), rises=False),))
    (same,) = compare_reports(receipt(truth=first), receipt(truth=second, gpus=4, gpu_hours=40)).same
    assert (same.quality, same.seconds) == (2.0, (10, 30))
    assert list(same.cost) == pytest.approx([8 * 10 / 3600, 4 * 30 / 3600])


def test_a_quality_that_rises_here_and_falls_there_is_another() -> None:
    first = told(qualities=(quality((0, 1.0)), quality((0, 1.0), name="only here")))
    second = told(qualities=(quality((0, 1.0), rises=False),))
    assert compare_reports(receipt(truth=first), receipt(truth=second)).same == ()


def test_of_a_target_alone_only_the_same_target_can_be_compared() -> None:
    """If only a better value is stored, the time at which the common value was reached is not known."""
    first, second = (receipt(truth=told(qualities=(quality((at, value)),))) for at, value in ((10, 0.6), (5, 0.7)))
    assert compare_reports(first, second).same == ()
    (same,) = compare_reports(first, first).same
    assert (same.quality, same.seconds) == (0.6, (10, 10))
    nothing = replace(quality((0, 0.2)), track=())
    assert compare_reports(first, receipt(truth=told(qualities=(nothing,)))).same == ()
    at_once = receipt(truth=told(qualities=(quality((0, 0.7)),)))
    assert compare_reports(first, at_once).same[0].seconds == (10, 0)


def test_scaling_is_the_larger_over_the_smaller_whichever_comes_first() -> None:
    small = receipt(truth=told(tokens_per_gpu_second=100.0))
    large = receipt(truth=told(tokens_per_gpu_second=80.0), gpus=16)
    assert compare_reports(small, large).scaling == compare_reports(large, small).scaling == 0.8
    assert compare_reports(small, small).scaling is None


def test_samples_stand_in_where_one_tells_no_tokens() -> None:
    first = receipt(truth=told(tokens_per_gpu_second=1.0, samples_per_gpu_second=3.0, cost_per_sample=0.5))
    second = receipt(truth=told(samples_per_gpu_second=2.0, cost_per_sample=0.25))
    found = compare_reports(first, second)
    assert (found.of, found.per_gpu, found.per_cost) == ("samples", (3.0, 2.0), (2.0, 4.0))


def test_money_is_not_compared_with_gpu_hours() -> None:
    known = {"tokens_per_gpu_second": 1.0, "cost_per_token": 0.5}
    found = compare_reports(receipt(truth=told(**known)), receipt(truth=told(**known), currency="USD", money=9.0))
    assert found.per_cost is None


def test_jobs_that_told_nothing_are_compared_by_their_books() -> None:
    other = receipt(parts=(part("hung", 20, share=0.25), part("useful", 60, share=0.75, layer="useful", evidence="")))
    found = compare_reports(receipt(), other)
    assert (found.of, found.per_gpu, found.scaling, found.same) == ("", None, None, ())
    assert [(each.name, each.change) for each in found.differences] == [
        ("data_stall", -0.5), ("hung", 0.25), ("useful", 0.25),
    ]  # fmt: skip
    assert "data_stall  50.0 %   0.0 %   -50.0" in render_text(comparison_tables(found))
