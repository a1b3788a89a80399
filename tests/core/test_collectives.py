"""What a profiler plugin timed: totals by kind, the rank that others wait for, and the delay line of a GPU."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core import collectives
from exporter.core.checkpoint import dump_ledger, load_ledger
from exporter.core.collectives import (
    COLLECTIVE_NAMES,
    CollectiveStats,
    CommunicationLine,
    communication_view,
    is_credible_communication,
)
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS
from exporter.core.model import MS, PPM, CollectiveReport, CollectiveUse, Owner
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, JobView, take_snapshot
from exporter.core.workload import WorkloadCredit
from tests.each import each
from tests.worlds import JOB, S, device, first, held, reading, seen

REDUCE = CollectiveUse("AllReduce", 2, S // 2, 1e9, 2e11)


def timed(start: float, end: float, busy: float = 0.0, **more: Any) -> CollectiveReport:
    """A report of job 41 on GPU-0; times in seconds."""
    values = {"uuids": ("GPU-0",), "rank": "0", "source": "inspector", "collectives": (REDUCE,)} | more
    return CollectiveReport("41", round(start * S), round(end * S), round(busy * S), **values)


def opened(*gpus: str, owner: Owner = JOB) -> Ledger:
    ledger, uuids = Ledger(), gpus or ("GPU-0",)
    advance(ledger, first([device(uuid) for uuid in uuids], [held(uuid, owner, gpus=2) for uuid in uuids]))
    advance(ledger, seen(1, *(reading(0, 1, uuid=uuid) for uuid in uuids)))
    return ledger


def at(ledger: Ledger, moment: float, *reports: CollectiveReport) -> Ledger:
    now = moment - 1
    gpus = (reading(now, moment, uuid=uuid) for uuid in ledger.gpus)
    advance(ledger, replace(seen(moment, *gpus), collectives=reports))
    return ledger


def job_view(ledger: Ledger) -> JobView:
    (job,) = take_snapshot(ledger, DaemonMetadata()).jobs
    return job


def samples(ledger: Ledger) -> dict[tuple[str, ...], float | str]:
    """Series of the metrics that plugins give, by name and labels after job_id."""
    snapshot = take_snapshot(ledger, DaemonMetadata())
    return {
        (metric.name.removeprefix("gpu_efficiency_job_"), *labels[1:]): value
        for metric in METRICS
        if metric.scope in ("communicating job", "communicating rank")
        for labels, value in metric.read(snapshot)
    }


# -- totals --


def test_reports_add_up_by_kind_and_are_exported() -> None:
    ledger = at(
        opened(), 2, timed(0, 1, 0.5), timed(1, 2, 0.25, collectives=(REDUCE, CollectiveUse("Send", 1, 8, 3.0)))
    )
    assert samples(ledger) == {
        ("collectives_total", "AllReduce"): 4, ("collectives_total", "Send"): 1,
        ("collective_seconds_total", "AllReduce"): "1.0", ("collective_seconds_total", "Send"): "0.000000008",
        ("collective_bytes_total", "AllReduce"): 2e9, ("collective_bytes_total", "Send"): 3.0,
        ("collective_bus_bytes_per_second", "AllReduce"): pytest.approx(4e11),
        ("communication_ratio", "0"): pytest.approx(0.375, rel=0.02),
    }  # fmt: skip
    view = job_view(ledger).communication
    assert view is not None
    assert (view.source, view.busy, view.covered) == ("inspector", 750 * MS, 2 * S)


def test_an_unknown_kind_is_other() -> None:
    ledger = at(
        opened(), 2, timed(0, 1, collectives=(CollectiveUse("\n" * 99, 1, 1, 1.0), CollectiveUse("x", 1, 1, 1.0)))
    )
    view = job_view(ledger).communication
    assert view is not None
    assert [(use.name, use.calls) for use in view.uses] == [("other", 2)]
    assert len(COLLECTIVE_NAMES) <= 16


def test_bandwidth_follows_the_recent_reports() -> None:
    stats = CollectiveStats()
    stats.add(timed(0, 1, collectives=(CollectiveUse("AllReduce", 1, S, 1.0, 4e11),)))
    stats.add(timed(600, 601, collectives=(CollectiveUse("AllReduce", 1, S, 1.0, 1e11),)))
    (use,) = communication_view(stats, 601 * S).uses
    assert use.bus_bytes_per_second == pytest.approx(1e11, rel=0.01)
    assert (use.calls, use.nanoseconds) == (2, 2 * S)


def test_the_link_is_known_where_a_job_has_one_node() -> None:
    for nodes, link in ((1, 450e9), (2, None), (0, None)):
        assert job_view(at(opened(owner=replace(JOB, nodes=nodes)), 2, timed(0, 1))).link == link
    assert job_view(opened(owner=replace(JOB, nodes=1))).link is None


def ranks(*shares: float, end: float = 10) -> CollectiveStats:
    stats = CollectiveStats()
    for n, share in enumerate(shares):
        stats.add(timed(end - 10, end, 10 * share, rank=str(n)))
    return stats


@each("shares, slowest", [
    ((0.5, 0.5, 0.1, 0.5), ("2", 0.4)),
    ((0.5, 0.1), ("1", 0.4)),
    ((0.5, 0.48, 0.5), None),
    ((0.5,), None),
    ((), None),
])  # fmt: skip
def test_the_slowest_rank_is_the_one_that_waits_least(shares: tuple[float, ...], slowest: Any) -> None:
    rank, behind = communication_view(ranks(*shares), 10 * S).slowest or ("", 0.0)
    assert (rank, round(behind, 6)) == (slowest or ("", 0.0))


def test_a_rank_that_is_silent_is_no_longer_compared() -> None:
    stats = ranks(0.5, 0.1)
    stats.add(timed(75, 80, 2, rank="0"))
    assert [rank for rank, _ in communication_view(stats, 80 * S).ranks] == ["0"]


def test_ranks_are_bounded_and_in_their_order() -> None:
    stats = CollectiveStats()
    for n in range(100):
        stats.add(timed(0, 10, 1, rank=str(n)))
    stats.add(timed(0, 10, 1, rank=""))
    stats.add(timed(10, 20, 10, rank="5"))
    view = communication_view(stats, 20 * S)
    assert [rank for rank, _ in view.ranks] == [str(n) for n in range(64)]
    assert view.covered == 102 * 10 * S


def test_the_slowest_rank_is_exported() -> None:
    ledger = at(opened(), 11, *(timed(0, 10, busy, rank=str(n)) for n, busy in enumerate((5, 5, 1))))
    assert samples(ledger)["slowest_rank", "2"] == pytest.approx(0.4)


def test_totals_are_kept_in_a_checkpoint() -> None:
    ledger, other = at(opened(), 2, timed(0, 1, 0.5), timed(0, 1, 0.25, rank="1")), Ledger()
    load_ledger(other, dump_ledger(ledger))
    assert job_view(other).communication == job_view(ledger).communication
    at(other, 3, timed(1, 2, 0.5))
    assert samples(other)["collectives_total", "AllReduce"] == 6


# -- what is refused --


@each("report", [
    timed(1, 1), timed(1, 0.5), timed(1, 2.001), timed(0, 1, 1.001), timed(0, 1, -0.001),
    timed(0, 1, rank="x"), timed(0, 1, rank="1" * 10), timed(0, 1, collectives=(REDUCE,) * 17),
    timed(0, 1, collectives=(CollectiveUse("AllReduce", -1, 1, 1.0),)),
    timed(0, 1, collectives=(CollectiveUse("AllReduce", 1, -1, 1.0),)),
    timed(0, 1, collectives=(CollectiveUse("AllReduce", 1, 1, float("nan")),)),
    timed(0, 1, collectives=(CollectiveUse("AllReduce", 1, 1, 1.0, float("inf")),)),
    timed(0, 1, collectives=(CollectiveUse("AllReduce", 10**400, 1, 1.0),)),
    replace(timed(0, 1), job_id="nobody"), replace(timed(0, 1), uuids=("GPU-7",)),
])  # fmt: skip
def test_a_report_that_cannot_be_is_refused(report: CollectiveReport) -> None:
    ledger = at(opened(), 2, report)
    assert ledger.refused["collectives"] == 1
    assert job_view(ledger).communication is None
    assert not ledger.gpus["GPU-0"].credits


def test_a_report_may_come_before_the_job_s_first_interval() -> None:
    ledger = Ledger()
    advance(ledger, replace(first([device()], [held(gpus=2)]), at=2 * S, collectives=(timed(0, 1, 0.5),)))
    assert job_view(ledger).communication is not None


@given(st.lists(st.integers(-(1 << 62), 1 << 62), min_size=4, max_size=4), st.text(max_size=3))
def test_of_any_report_it_is_known_whether_it_can_be(times: list[int], rank: str) -> None:
    start, end, busy, now = times
    report = CollectiveReport("41", start, end, busy, rank=rank)
    assert is_credible_communication(report, now) in (True, False)
    if is_credible_communication(report, now):
        stats = CollectiveStats()
        stats.add(report)
        communication_view(stats, now)


# -- the delay line --


def shares(line: CommunicationLine, *intervals: tuple[int, int]) -> list[int | None]:
    return [line.take(start, end) for start, end in intervals]


def test_reported_time_reaches_the_time_that_is_booked_after_it() -> None:
    line = CommunicationLine()
    assert line.take(0, 10) is None
    line.add(0, 10, 4)
    line.add(10, 20, 10)
    assert shares(line, (10, 20), (20, 30), (30, 40)) == [400_000, PPM, None]


def test_a_share_is_the_same_when_it_is_asked_for_again() -> None:
    line = CommunicationLine()
    line.add(0, 10, 4)
    assert shares(line, (10, 20), (10, 20), (10, 15), (20, 30), (20, 30)) == [400_000, 400_000, None, None, None]


def test_time_that_is_booked_without_asking_passes_through_too() -> None:
    line = CommunicationLine()
    for n in range(4):
        line.add(10 * n, 10 * n + 10, n)
    assert shares(line, (40, 50), (60, 70)) == [0, 200_000]


def test_where_nothing_was_reported_there_is_no_share() -> None:
    """Between 10 and 30 no report covers the time; an interval that is half covered has what the half has."""
    line = CommunicationLine()
    line.add(0, 10, 10)
    line.add(30, 40, 10)
    assert shares(line, (40, 50), (50, 60), (60, 75), (75, 85)) == [PPM, None, 333_333, 500_000]


def test_what_is_reported_twice_counts_once() -> None:
    line = CommunicationLine()
    line.add(0, 10, 10)
    line.add(0, 10, 10)
    line.add(5, 20, 6)  # a third of it is known: 4 are left
    assert (line.length, line.frontier) == (20, 20)
    assert shares(line, (20, 30), (30, 40), (40, 50)) == [PPM, 400_000, None]


def test_time_that_is_too_old_is_dropped() -> None:
    line = CommunicationLine()
    line.add(0, 50 * S, 50 * S)
    line.add(50 * S, 80 * S, 0)
    assert line.length == 60 * S
    assert line.take(80 * S, 110 * S) == PPM
    line.add(10_000 * S, 10_001 * S, S)  # after a long gap
    assert line.length <= 60 * S


def test_a_line_has_few_segments() -> None:
    line = CommunicationLine()
    for n in range(10_000):
        line.add(n, n + 1, 1)
    assert len(line.segments) <= collectives._MOST_SEGMENTS
    assert line.take(10_000, 10_100) == PPM


REPORTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(0, 100)), min_size=1, max_size=20)


def filled(reports: Iterable[tuple[int, int, int]]) -> tuple[CommunicationLine, int, int]:
    """A line with reports after gaps: of so many milliseconds, with so many percent of communication."""
    line, end, total = CommunicationLine(), 0, 0
    for gap, length, percent in reports:
        start, end = end + gap * MS, end + (gap + length) * MS
        line.add(start, end, length * MS * percent // 100)
        total += length * MS * percent // 100
    return line, end, total


@given(REPORTS, st.lists(st.integers(1, 70), max_size=60))
def test_what_was_reported_is_available_once(reports: list[tuple[int, int, int]], lengths: list[int]) -> None:
    line, now, total = filled(reports)
    taken = 0
    for length in lengths:
        taken += (line.take(now, now + length * MS) or 0) * length * MS
        now += length * MS
        assert taken <= total * PPM
    end = now + 10_000 * MS
    taken += (line.take(now, end) or 0) * (end - now)
    assert (line.length, taken + line.rest) == (0, total * PPM)  # to the nanosecond: what is rounded off comes later
    assert line.rest < end - now


@given(REPORTS, st.integers(2, 900), st.data())
def test_cutting_a_reading_in_two_changes_nothing(
    reports: list[tuple[int, int, int]], length: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, length - 1))
    (whole, now, _), (parts, _, _) = filled(reports), filled(reports)
    once = (whole.take(now, now + length * MS) or 0) * length * MS
    first_part = (parts.take(now, now + cut * MS) or 0) * cut * MS
    second_part = (parts.take(now + cut * MS, now + length * MS) or 0) * (length - cut) * MS
    assert once + whole.rest == first_part + second_part + parts.rest
    assert whole.segments == parts.segments
    assert (whole.length, whole.until) == (parts.length, parts.until)


def test_a_credit_has_the_line_of_its_gpu_and_job() -> None:
    ledger = opened("GPU-0", "GPU-1")
    at(ledger, 2, timed(0, 1, 0.25))
    credit = ledger.gpus["GPU-0"].credits["41"]
    assert credit.collective_share(S, 2 * S) == 250_000
    at(ledger, 3, timed(1, 2, 0.5, uuids=()))
    assert credit.collective_share(2 * S, 3 * S) == 500_000
    assert ledger.gpus["GPU-1"].credits["41"].collective_share(2 * S, 3 * S) == 500_000
    assert WorkloadCredit().collective_share(3 * S, 4 * S) is None


@pytest.mark.parametrize(("busy", "share"), [(None, 0.0131595), (0.0, 0.0), (0.05, 0.05), (0.9, 0.131595)])
def test_exposed_communication_is_what_was_timed_and_no_more_than_idle_sms_allow(
    busy: float | None, share: float
) -> None:
    """By the policy's levels (.955 * .95 - .8) / (.955 - .14) at most; without a plugin a tenth of that."""
    ledger = opened()
    leak = LEAK_NAMES.index("exposed_communication")
    before = ledger.gpus["GPU-0"].book.parts[leak]
    for n in range(2, 8):
        at(ledger, n, *(() if busy is None else (timed(n - 2, n - 1, busy),)))
    assert (ledger.gpus["GPU-0"].book.parts[leak] - before) / S == pytest.approx(6 * share, abs=1e-4)
    assert ledger.conservation_errors == 0
