"""The union of a process's collectives, however late and in whatever order they come, and the reports made of it."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from exporter.core.model import MS, SECOND, CollectiveReport, CollectiveUse
from exporter.nccl.collectives import (
    LONGEST_REPORT,
    MOST_INTERVALS,
    SETTLE,
    CollectiveAccumulator,
    IntervalUnion,
    place_events,
)
from exporter.nccl.events import CollectiveEvent
from exporter.workloads import WorkloadProcess

PROCESS = WorkloadProcess(7, "41", ("GPU-0",), "3")
MS_US = 1000
"""Microseconds of a millisecond."""


def event(start: float, end: float, *, comm: str = "0x1", name: str = "AllReduce", **more: object) -> CollectiveEvent:
    """An event at these milliseconds."""
    first, last = round(start * MS_US), round(end * MS_US)
    values = {"bytes": 1000, "rank": 0, "bus_bandwidth": 1e9} | more
    return CollectiveEvent(name=name, end=last, duration=last - first, communicator=comm, **values)  # type: ignore[arg-type]


def measure(intervals: Sequence[tuple[int, int]]) -> int:
    """Milliseconds in at least one of the intervals, counted one by one."""
    return len({moment for start, end in intervals for moment in range(start, end)})


INTERVALS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=40
)


# -- the union --


@given(INTERVALS, st.integers(0, 340), st.integers(0, 340))
def test_a_union_is_what_is_covered(intervals: list[tuple[int, int]], a: int, b: int) -> None:
    union = IntervalUnion()
    added = sum(union.add(start, end) for start, end in intervals)
    assert added == measure(intervals) == union.covered(0, 1000)
    assert union.covered(a, b) == measure([(max(start, a), min(end, b)) for start, end in intervals])


@given(INTERVALS, INTERVALS, st.integers(0, 340))
def test_what_is_forgotten_is_neither_known_nor_added(
    before: list[tuple[int, int]], after: list[tuple[int, int]], moment: int
) -> None:
    union = IntervalUnion()
    for start, end in before:
        union.add(start, end)
    union.forget(moment)
    kept = union.covered(moment, 1000)
    assert kept == measure([(max(start, moment), end) for start, end in before])
    added = sum(union.add(start, end) for start, end in after)
    assert kept + added == measure([(max(start, moment), end) for start, end in (*before, *after)])


def test_a_union_is_bounded() -> None:
    union = IntervalUnion()
    for n in range(10):
        union.add(10 * n, 10 * n + 1)
    union.forget(0, most=4)
    assert len(union) == 4
    assert union.covered(0, 1000) == 4
    assert union.add(0, 1) == 0  # it may have been covered: nothing is known of it any more


# -- where events without times are placed --


def test_events_of_one_dump_are_placed_one_after_the_other() -> None:
    """Three were dumped at 100 ms: the last may have ended then, the others ended before it began."""
    dumped = [event(100 - spent, 100, exact=False) for spent in (10, 20, 5)]
    assert place_events(dumped) == [(65 * MS_US, 75 * MS_US), (75 * MS_US, 95 * MS_US), (95 * MS_US, 100 * MS_US)]


def test_those_of_another_communicator_may_have_run_beside_them() -> None:
    dumped = [event(90, 100, exact=False), event(90, 100, comm="0x2", exact=False)]
    assert place_events(dumped) == [(90 * MS_US, 100 * MS_US)] * 2


def test_a_send_and_a_receive_run_at_once_and_two_sends_to_one_peer_do_not() -> None:
    sends = [event(90, 100, name="Send", peer=1, exact=False) for _ in range(2)]
    receive = event(90, 100, name="Recv", peer=1, exact=False)
    other = event(90, 100, name="Send", peer=2, exact=False)
    assert place_events([*sends, receive, other]) == [
        (80 * MS_US, 90 * MS_US), *[(90 * MS_US, 100 * MS_US)] * 3,
    ]  # fmt: skip


def test_an_event_with_a_time_stays_where_it_is() -> None:
    known = event(40, 60)
    assert place_events([known, event(50, 70, exact=False)]) == [(40 * MS_US, 60 * MS_US), (50 * MS_US, 70 * MS_US)]


# -- reports --


def reports_of(batches: Sequence[Sequence[CollectiveEvent]]) -> tuple[list[CollectiveReport], CollectiveAccumulator]:
    """The reports after each batch, and the last one."""
    accumulator = CollectiveAccumulator()
    found = []
    for batch in batches:
        accumulator.add(batch, offset=0)
        found.append(accumulator.report(PROCESS, "inspector"))
    found.append(accumulator.report(PROCESS, "inspector", final=True))
    return [report for report in found if report is not None], accumulator


def test_a_report_ends_a_second_before_the_last_event() -> None:
    accumulator = CollectiveAccumulator()
    accumulator.add([event(1000, 1100), event(1050, 1200, comm="0x2"), event(2000, 2500)], offset=5 * SECOND)
    report = accumulator.report(PROCESS, "inspector")
    assert report == CollectiveReport(
        "41", 6 * SECOND, 6500 * MS, 200 * MS, ("GPU-0",), "3",
        (CollectiveUse("AllReduce", 3, 750 * MS, 3000.0, 0.75e9),), "inspector",
    )  # fmt: skip
    assert accumulator.report(PROCESS, "inspector") is None
    last = accumulator.report(PROCESS, "inspector", final=True)
    assert last is not None
    assert (last.start, last.end, last.busy, last.collectives) == (6500 * MS, 7500 * MS, 500 * MS, ())


def test_a_process_without_a_rank_has_that_of_its_largest_communicator() -> None:
    accumulator = CollectiveAccumulator()
    accumulator.add([event(0, 10, rank=1, ranks=2), event(0, 10, rank=5, ranks=8), event(0, 9, rank=0)], offset=0)
    report = accumulator.report(WorkloadProcess(7, "41"), "comma", final=True)
    assert report is not None
    assert (report.rank, report.source) == ("5", "comma")


def test_kinds_are_added_up_apart() -> None:
    (report,), _ = reports_of([[event(0, 10), event(0, 5, name="Send", peer=1, bus_bandwidth=None), event(20, 30)]])
    assert [(use.name, use.calls, use.nanoseconds, use.bus_bytes) for use in report.collectives] == [
        ("AllReduce", 2, 20 * MS, 2e7),
        ("Send", 1, 5 * MS, None),
    ]


def test_what_comes_late_is_reported_with_what_comes_next() -> None:
    found, accumulator = reports_of([
        [event(0, 100), event(1900, 2000)],
        [event(500, 600), event(50, 150), event(2900, 3000)],
    ])  # fmt: skip
    assert [(r.start // MS, r.end // MS, r.busy // MS) for r in found] == [
        (0, 1000, 100),  # 500 to 600 was not known yet
        (1000, 2000, 100 + 150),  # and 100 to 150
        (2000, 3000, 100),
    ]
    assert accumulator.late == 0


def test_after_a_long_silence_only_the_end_is_reported() -> None:
    found, _ = reports_of([[event(0, 1500)], [event(3_600_000, 3_602_000)]])
    assert found[1].end - found[1].start == LONGEST_REPORT
    assert found[1].busy == 1 * SECOND


def test_of_very_many_intervals_the_latest_are_known() -> None:
    accumulator = CollectiveAccumulator()
    accumulator.add([event(2 * n, 2 * n + 1) for n in range(MOST_INTERVALS + 1000)], offset=0)
    report = accumulator.report(PROCESS, "inspector", final=True)
    assert report is not None
    assert report.busy == MOST_INTERVALS * MS


EVENTS = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(0, 3000), st.sampled_from(("0x1", "0x2"))).map(
        lambda drawn: event(drawn[0], drawn[0] + drawn[1], comm=drawn[2])
    ),
    min_size=1,
    max_size=30,
)


@given(EVENTS, st.lists(st.integers(1, 5), max_size=30))
def test_reports_are_consecutive_and_their_communication_is_the_union(
    events: list[CollectiveEvent], sizes: list[int]
) -> None:
    """In any order, however they are divided among polls: nothing twice, and nothing is lost but what has no room."""
    batches: list[list[CollectiveEvent]] = []
    rest = events
    for size in sizes:
        batches, rest = [*batches, rest[:size]], rest[size:]
    found, accumulator = reports_of([*batches, rest])
    for before, after in pairwise(found):
        assert before.end == after.start
    assert all(0 <= report.busy <= report.end - report.start for report in found)
    assert all(report.start % MS == 0 == report.end % MS for report in found)
    whole = measure([(each.start // MS_US, each.end // MS_US) for each in events]) * MS
    assert sum(report.busy for report in found) + accumulator.late == whole
    assert sum(use.calls for report in found for use in report.collectives) <= len(events)


@given(EVENTS.map(lambda events: sorted(events, key=lambda each: each.end)))
def test_in_the_order_of_their_ends_every_call_is_reported_and_short_ones_in_time(
    events: list[CollectiveEvent],
) -> None:
    """An event that is no longer than the settling time has not begun before what is already reported."""
    found, accumulator = reports_of([[each] for each in events])
    assert sum(use.calls for report in found for use in report.collectives) in (len(events), 0)
    assert (len(found) == 0) == (max(each.end for each in events) - min(each.start for each in events) == 0)
    if max(each.duration for each in events) * 1000 <= SETTLE:
        assert accumulator.late == 0
