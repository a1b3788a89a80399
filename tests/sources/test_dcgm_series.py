"""Tests how time-stamped values are joined into intervals, without an engine."""

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from exporter.sources.cycles import CycleCounters
from exporter.sources.dcgm.client import Blank, Value
from exporter.sources.dcgm.intervals import MIN_RESEND, MeasuredInterval, SampleSeries

ENGINE, SM, TENSOR = 1001, 1002, 1004
SECOND = 1_000_000
T0 = 1_700_000_000 * SECOND


def series(*fields: int) -> SampleSeries:
    return SampleSeries(fields or (ENGINE, SM), period=SECOND, since=T0)


def fed(line: SampleSeries, rows: Iterable[tuple[int, int, Value]]) -> SampleSeries:
    for field, at, value in rows:
        line.add(field, T0 + at, value)
    return line


def ends(intervals: Iterable[MeasuredInterval]) -> list[tuple[int, int]]:
    return [(interval.start - T0, interval.end - T0) for interval in intervals]


def test_a_value_describes_the_time_since_the_one_before_it() -> None:
    line = fed(series(), [(ENGINE, 10, 0.5), (ENGINE, 1_000_010, 0.25), (ENGINE, 1_100_010, 1.0)])
    taken = line.intervals_until(T0 + 2 * SECOND)
    assert ends(taken) == [(10, 1_000_010), (1_000_010, 1_100_010)]
    assert [interval.values[ENGINE] for interval in taken] == [0.25, 1.0]


def test_the_first_value_is_only_a_baseline() -> None:
    assert fed(series(), [(ENGINE, 10, 0.5)]).intervals_until(T0 + SECOND) == []


def test_fields_of_one_cycle_belong_together_though_their_stamps_differ() -> None:
    line = fed(series(), [(ENGINE, 5, 0.5), (SM, 40, 0.4), (ENGINE, SECOND, 0.6), (SM, SECOND + 45, 0.3)])
    (only,) = line.intervals_until(T0 + SECOND + 50)
    assert only.values == {ENGINE: 0.6, SM: 0.3}


def test_a_value_half_a_period_away_belongs_to_another_cycle() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (SM, 600_000, 0.4), (ENGINE, SECOND + 1, 0.6)])
    (only,) = line.intervals_until(T0 + 2 * SECOND)
    assert only.values == {ENGINE: 0.6, SM: 0.4}
    line = fed(series(), [(ENGINE, 1, 0.5), (SM, 400_000, 0.4), (ENGINE, SECOND + 1, 0.6)])
    (only,) = line.intervals_until(T0 + 2 * SECOND)
    assert only.values == {ENGINE: 0.6}


def test_what_is_younger_than_asked_for_waits_for_its_fellows() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (ENGINE, SECOND, 0.6)])
    assert line.intervals_until(T0 + SECOND - 1) == []
    line.add(SM, T0 + SECOND + 30, 0.3)
    (only,) = line.intervals_until(T0 + SECOND)
    assert only.values == {ENGINE: 0.6, SM: 0.3}


def test_a_value_seen_twice_counts_once() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (ENGINE, SECOND, 0.6)])
    assert len(line.intervals_until(T0 + SECOND)) == 1
    fed(line, [(ENGINE, 1, 0.5), (ENGINE, SECOND, 0.6)])
    assert line.intervals_until(T0 + 9 * SECOND) == []


def test_a_blank_of_the_engine_is_an_interval_of_which_nothing_is_known() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (ENGINE, SECOND, Blank.BLANK), (SM, SECOND, Blank.NOT_PERMISSIONED)])
    (only,) = line.intervals_until(T0 + SECOND)
    assert only.blank
    assert only.values == {}


def test_a_blank_of_another_field_is_only_that_fields() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (ENGINE, SECOND, 0.6), (SM, SECOND, Blank.BLANK)])
    (only,) = line.intervals_until(T0 + SECOND)
    assert not only.blank
    assert only.values == {ENGINE: 0.6}


def test_a_field_that_does_not_exist_here_is_not_waited_for() -> None:
    line = fed(series(), [(ENGINE, 1, Blank.NOT_SUPPORTED), (SM, 2, 0.5), (SM, SECOND, 0.6)])
    assert line.fields == [SM]
    assert ends(line.intervals_until(T0 + SECOND)) == [(2, SECOND)]
    assert line.since == T0 + 2, "its next value, which may be one, is stamped before those of its cycle"


def test_where_the_first_field_is_silent_the_next_sets_the_pace() -> None:
    line = fed(series(), [(SM, 1, 0.5), (SM, SECOND, 0.6)])
    (only,) = line.intervals_until(T0 + SECOND)
    assert only.values == {SM: 0.6}


def test_a_field_that_speaks_again_does_not_go_back_in_time() -> None:
    line = fed(series(), [(SM, 1, 0.5), (SM, SECOND, 0.6)])
    line.intervals_until(T0 + SECOND)
    fed(line, [(ENGINE, SECOND - 30, 0.7), (ENGINE, 2 * SECOND, 0.8)])
    assert ends(line.intervals_until(T0 + 2 * SECOND)) == [(SECOND, 2 * SECOND)]


def test_values_are_wanted_from_behind_the_slowest_field_but_not_for_ever() -> None:
    line = fed(series(), [(ENGINE, 500, 0.5), (SM, 400, 0.5)])
    assert line.since == T0 + 401
    line.add(ENGINE, T0 + 60 * SECOND, 0.5)
    assert line.since == T0 + 60 * SECOND - MIN_RESEND


def test_forgetting_drops_what_waits_and_what_was_stamped_before() -> None:
    line = fed(series(), [(ENGINE, 1, 0.5), (ENGINE, SECOND, 0.6)])
    line.reset(T0 + 5 * SECOND)
    fed(line, [(ENGINE, 4 * SECOND, 0.1), (ENGINE, 6 * SECOND, 0.2), (ENGINE, 7 * SECOND, 0.3)])
    assert ends(line.intervals_until(T0 + 9 * SECOND)) == [(6 * SECOND, 7 * SECOND)]


@given(
    stamps=st.lists(st.integers(1, 60 * SECOND), min_size=2, max_size=30, unique=True).map(sorted),
    reads=st.lists(st.integers(0, 61 * SECOND), max_size=10).map(sorted),
    resent=st.booleans(),
)
def test_however_it_is_read_every_moment_is_described_once(stamps: list[int], reads: list[int], resent: bool) -> None:
    line = series(ENGINE)
    taken: list[MeasuredInterval] = []
    for read in [*reads, 61 * SECOND]:
        wanted = 0 if resent else line.since - T0
        fed(line, [(ENGINE, at, 0.5) for at in stamps if wanted <= at <= read])
        taken += line.intervals_until(T0 + read)
    assert ends(taken) == list(pairwise(stamps))


ELAPSED, SM_CYCLES = 1084, 1085


def corrected(ratio: float, share: float, intervals: int) -> list[float]:
    """Return the SM ratio of each interval if the ratio field and the counters differ."""
    cycles, told = CycleCounters(ELAPSED, {SM_CYCLES: SM}), []
    for tick in range(intervals + 1):
        values = {SM: ratio, ELAPSED: 1000.0 * tick, SM_CYCLES: 1000.0 * share * tick}
        cycles.correct(values)
        told.append(values[SM])
    return told[1:]


def test_counters_of_cycles_are_believed_once_they_agree_with_the_ratios() -> None:
    assert corrected(0.50, 0.51, 12) == [0.50] * 10 + [0.51] * 2


def test_counters_that_count_something_else_are_never_believed() -> None:
    assert corrected(0.50, 0.25, 50) == [0.50] * 50


def test_a_counter_that_fell_or_stood_still_says_nothing() -> None:
    cycles = CycleCounters(ELAPSED, {SM_CYCLES: SM})
    for tick in range(20):
        cycles.correct({SM: 0.5, ELAPSED: 1000.0 * tick, SM_CYCLES: 500.0 * tick})
    for wrong in ({ELAPSED: 0.0, SM_CYCLES: 0.0}, {ELAPSED: 0.0, SM_CYCLES: 100.0}):
        values = {SM: 0.7, **wrong}
        cycles.correct(values)
        assert values[SM] == 0.7


def test_after_forgetting_the_next_values_are_a_baseline() -> None:
    cycles = CycleCounters(ELAPSED, {SM_CYCLES: SM})
    for tick in range(20):
        cycles.correct({SM: 0.5, ELAPSED: 1000.0 * tick, SM_CYCLES: 500.0 * tick})
    cycles.reset()
    values = {SM: 0.7, ELAPSED: 90_000.0, SM_CYCLES: 45_000.0}
    cycles.correct(values)
    assert values[SM] == 0.7
