"""Layer ratios of unusual books, and time that no daemon counted."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.leaks import LEAKS
from exporter.core.model import PHASES
from exporter.report.build import REPORTED_PHASE, layer_ratios
from exporter.report.prometheus import CounterSegment, uncounted_gpu_seconds


def test_the_carpenter() -> None:
    found = layer_ratios({"idle_allocation": 2, "unattributed_stall": 2, "memory_bound": 2.4, "useful": 1.6})
    assert [found.gau, found.ectr, found.emfu] == pytest.approx([0.75, 2 / 3, 0.4])
    assert found.product == found.floor == pytest.approx(0.2)


def test_nothing_observed_says_nothing() -> None:
    found = layer_ratios({"unobserved": 5})
    assert (found.gau, found.ectr, found.emfu, found.product, found.floor) == (None,) * 5


def test_where_nothing_computed_the_product_is_0() -> None:
    found = layer_ratios({"hung": 5})
    assert (found.gau, found.ectr, found.emfu, found.product) == (1, 0, None, 0)


def test_unresolved_time_is_taken_to_be_like_the_rest_and_lost_in_the_floor() -> None:
    found = layer_ratios({"unresolved": 5, "useful": 3, "memory_bound": 2})
    assert [found.emfu, found.product, found.floor] == pytest.approx([0.6, 0.6, 0.3])


def test_where_all_of_it_is_unresolved_there_is_no_product() -> None:
    found = layer_ratios({"unresolved": 5})
    assert (found.ectr, found.emfu, found.product) == (1, None, None)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60), st.integers(1, 5000)), min_size=1, max_size=5),
    st.floats(0.1, 16),
    st.integers(0, 5000),
)
def test_what_was_counted_and_what_was_not_is_all_the_time(
    lives: list[tuple[int, int, int]], gpus: float, silent: int
) -> None:
    """Each daemon is down for a while, restarts, is scraped, and is scraped for the last time."""
    stretches, at = [], 100.0
    for down, before, during in lives:
        begun, first = at + down, at + down + before
        at = first + during
        stretches.append(
            CounterSegment(
                first=first,
                paid_at_first=gpus * (first - begun),
                last=at,
                paid_at_last=gpus * (at - begun),
                end_known=False,
            )
        )
    end = at + silent
    counted = sum(stretch.paid_at_last for stretch in stretches)
    found = uncounted_gpu_seconds(reversed(stretches), start=100.0, end=end, gpus=0.0)
    assert counted + found == pytest.approx(gpus * (end - 100.0))
    assert all(a.last <= b.first for a, b in pairwise(stretches))


def test_less_than_an_interval_is_how_scrapes_differ() -> None:
    stretch = CounterSegment(
        first=100, paid_at_first=0, last=200, paid_at_last=800, end_known=False, scrape_interval=30
    )
    assert uncounted_gpu_seconds([stretch], start=71, end=259, gpus=8) == 0
    assert uncounted_gpu_seconds([stretch], start=69, end=259, gpus=8) == 8 * 31
    assert uncounted_gpu_seconds([stretch], start=71, end=261, gpus=8) == 8 * 61


def test_a_daemon_that_saw_the_end_owes_nothing_after_it() -> None:
    stretch = CounterSegment(first=100, paid_at_first=0, last=200, paid_at_last=800, end_known=True, scrape_interval=30)
    assert uncounted_gpu_seconds([stretch], start=100, end=5000, gpus=8) == 0


def test_a_single_sample_tells_no_rate_so_the_gpus_count() -> None:
    stretch = CounterSegment(first=100, paid_at_first=80, last=100, paid_at_last=80, end_known=False, scrape_interval=5)
    assert uncounted_gpu_seconds([stretch], start=80, end=200, gpus=8) == (8 * 20 - 80) + 8 * 100


def test_every_leak_that_can_be_told_has_its_phase() -> None:
    assert set(REPORTED_PHASE) == {leak.name for leak in LEAKS if " or " in leak.evidence}
    assert set(REPORTED_PHASE.values()) <= set(PHASES)
