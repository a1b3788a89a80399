"""Queries: quoting of names and IDs in PromQL, and splitting of ranges without losing or repeating a sample."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.report.query import SCRAPE_INTERVAL_SECONDS, JobQuery, range_duration, split_range
from tests.report.answers import Scripted, row, track


def test_an_id_is_text_whatever_signs_it_has() -> None:
    asking = JobQuery(Scripted(), 'a"b\\c')
    assert asking.job_selector("info") == r'gpu_efficiency_job_info{job_id="a\"b\\c"}'


def test_matchers_narrow_every_selector() -> None:
    asking = JobQuery(Scripted(), "ns/pod-0", matchers='{cluster="a"}')
    assert asking.job_selector("info", 'x="y"') == 'gpu_efficiency_job_info{job_id="ns/pod-0",x="y",cluster="a"}'
    assert asking.metric_selector("gpu_info") == 'gpu_efficiency_gpu_info{cluster="a"}'


@pytest.mark.slow
@given(st.floats(0, 1e6), st.integers(1, 2000), st.integers(100, 10**7))
def test_parts_cover_a_time_once_and_are_small(length: float, series: int, most: int) -> None:
    found = list(split_range(5.0, 5.0 + length, series=series, max_samples=most))
    assert (found[0][0], found[-1][1]) == (5.0, 5.0 + length)
    for (_, before), (after, _) in pairwise(found):
        assert after - before == pytest.approx(0.001, abs=1e-6)
    allowed = max(60.0, most * SCRAPE_INTERVAL_SECONDS / series)
    assert all(0 <= b - a <= allowed + 0.0011 for a, b in found)


def test_a_range_is_in_milliseconds_and_never_empty() -> None:
    assert (range_duration(1.0, 2.5), range_duration(3.0, 3.0)) == ("1500ms", "1ms")


def test_samples_of_several_parts_are_one_track(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.report.query.MAX_SAMPLES_RETURNED", 4)
    server = Scripted({"x": [track((1.0, 5.0), (2.0, 6.0), instance="a"), track((1.0, 7.0), instance="b")]})
    found = JobQuery(server, "7").range_samples("x", 0.0, 120.0)
    assert len(server.asked) == 2
    assert {each.labels["instance"]: each.points for each in found} == {
        "a": [(1.0, 5.0), (2.0, 6.0)],
        "b": [(1.0, 7.0)],
    }


def test_a_mean_is_all_samples_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.report.query.MAX_SAMPLES_READ", 4)
    server = Scripted({"sum_over": [row(6.0, instance="a")], "count_over": [row(3.0, instance="a")]})
    (found,) = JobQuery(server, "7").mean("x", 0.0, 120.0)
    assert (found.value, found.instance, len(server.asked)) == (2.0, ("", "a"), 4)


def test_the_greatest_of_several_parts_is_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.report.query.MAX_SAMPLES_READ", 4)
    server = Scripted({"max_over": [row(6.0, instance="a")]})
    assert [each.value for each in JobQuery(server, "7").maximum("x", 0.0, 120.0)] == [6.0]
