"""Layer ratios of unusual books, and time that no daemon counted."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.core.leaks import LEAKS
from exporter.core.model import PHASES
from exporter.report.build import REPORTED_PHASE, layer_ratios
from exporter.report.uncounted import LOST_NODE_SECONDS, CounterSegment, Tolerance, uncounted


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


NO_TOLERANCE = Tolerance(start=0.0, between=0.0, end=0.0)


def segment(first: float, last: float, **changes: Any) -> CounterSegment:
    """A daemon's count of 8 GPUs from `first` on, of a job that it saw begin at 100."""
    fields: dict[str, Any] = {
        "start": 100.0, "first": first, "paid_at_first": 0.0, "last": last, "gpus": 8.0, "end_known": False,
    }  # fmt: skip
    return CounterSegment(**(fields | changes))


def count(
    *segments: CounterSegment, end: float, tolerance: Tolerance = NO_TOLERANCE, replaced: bool = False
) -> tuple[float, float]:
    found = uncounted(segments, end=end, tolerance=tolerance, replaced=replaced)
    return found.held / 8, found.unknown / 8


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60), st.integers(1, 5000)), min_size=1, max_size=5),
    st.floats(0.1, 16),
    st.integers(0, 5000),
)
def test_what_was_counted_and_what_was_not_is_all_the_time(
    lives: list[tuple[int, int, int]], gpus: float, silent: int
) -> None:
    """Each daemon is down for a while, restarts, is scraped, and is scraped for the last time."""
    stretches, at, counted = [], 100.0, 0.0
    for down, before, during in lives:
        begun, first = at + down, at + down + before
        at = first + during
        counted += gpus * (at - begun)
        stretches.append(segment(first, at, paid_at_first=gpus * (first - begun), gpus=gpus))
    end = at + silent
    found = uncounted(reversed(stretches), end=end, tolerance=NO_TOLERANCE, replaced=False)
    assert counted + found.held == pytest.approx(gpus * (end - 100.0))
    assert found.unknown == 0
    assert all(a.last <= b.first for a, b in pairwise(stretches))


def test_less_than_an_interval_is_how_scrapes_differ() -> None:
    tolerance = Tolerance(start=30, between=5, end=60)
    for start, end, seconds in ((71, 259, 0), (69, 259, 31), (71, 261, 61)):
        assert count(segment(100, 200, start=start), end=end, tolerance=tolerance) == (seconds, 0)
    assert count(segment(100, 200), segment(205, 300), end=300, tolerance=tolerance) == (0, 0)
    assert count(segment(100, 200), segment(206, 300), end=300, tolerance=tolerance) == (6, 0)


def test_a_daemon_that_saw_the_end_owes_nothing_after_it() -> None:
    assert count(segment(100, 200, end_known=True), end=5000) == (0, 0)


def test_a_job_that_left_and_returned_was_away() -> None:
    """Its daemon was late for 20 s of its second stay."""
    before, after = segment(100, 200, end_known=True), segment(2020, 3000, start=2000)
    assert count(before, after, end=3000) == (20, 0)
    assert count(before, segment(2020, 3000), end=3000) == (0, 0), "when it returned is not known"


def test_a_node_that_was_lost_and_returned_with_the_job_is_charged_for_an_outage() -> None:
    lost = segment(100, 200)
    assert count(lost, segment(2020, 3000, start=2000), end=3000) == (LOST_NODE_SECONDS + 20, 1800 - LOST_NODE_SECONDS)
    assert count(lost, segment(2020, 3000), end=3000) == (1820, 0), "it was held all the time"


def test_a_node_that_is_silent_to_the_end_is_held_unless_what_ran_there_is_replaced() -> None:
    assert count(segment(100, 200), end=5000) == (4800, 0)
    assert count(segment(100, 200), end=5000, replaced=True) == (LOST_NODE_SECONDS, 4800 - LOST_NODE_SECONDS)


def test_every_leak_that_can_be_told_has_its_phase() -> None:
    assert set(REPORTED_PHASE) == {leak.name for leak in LEAKS if " or " in leak.evidence}
    assert set(REPORTED_PHASE.values()) <= set(PHASES)
