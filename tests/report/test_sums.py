"""Periods, job records split into them, and sums, small enough to add up by hand."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core.job_record import JobRecord, JobSample, PriceChange
from exporter.core.model import Owner
from exporter.core.prices import CarbonIntensity
from exporter.report.model import JobIdentity
from exporter.report.ranking import sparkline, summary_lines, summary_tables
from exporter.report.summary import UsageSummary, summarize
from exporter.report.text import render_markdown, render_text
from exporter.report.usage import (
    GpuHolding,
    Period,
    UsageRecord,
    default_period,
    peak_gpus,
    split_periods,
    unheld_usage,
    usage_records,
)
from exporter.report.usage_prometheus import PrometheusUsage, UsageFilter
from tests.report.answers import Scripted

DAY, HOUR = 86_400.0, 3600.0
THURSDAY = 1_767_225_600.0
"""2026-01-01."""
S = 1_000_000_000


def statement(**changed: Any) -> JobRecord:
    """Four GPUs for an hour from THURSDAY on: a quarter each idle, waiting, slow and useful."""
    quarter = 3600 * S
    made = JobRecord(
        node="n1", life="l1", owner=Owner("7", user="ada", account="nlp", name="train"), start=THURSDAY,
        end=THURSDAY + HOUR, running=False, paid=4 * quarter,
        parts={"idle_allocation": quarter, "data_stall": quarter, "memory_bound": quarter, "useful": quarter},
        energy={}, money={"USD": 8.0}, whole_gpus=4.0,
    )  # fmt: skip
    return replace(made, **changed)


def lot(job: str = "7", *, period: int = 0, money: float | None = None, told: bool = True, **more: Any) -> UsageRecord:
    """Build a record; `more` are hours by leak and fields of the owner."""
    words = {name: more.pop(name) for name in ("user", "name", "namespace", "cluster") if name in more}
    price = {} if money is None else {"USD": money}
    seconds = {leak: hours * HOUR for leak, hours in more.items()}
    return UsageRecord(
        period=period, identity=JobIdentity(job_id=job, **words), seconds=seconds, money=price, attributed=told
    )


def sums(*lots: UsageRecord, times: tuple[Period, ...] = (Period(0, HOUR),), **more: Any) -> UsageSummary:
    told: dict[str, Any] = {
        "about": "all jobs",
        "by": "user",
        "every": "hour",
        "source": "stores",
        "start": times[0].start,
    }
    return summarize(lots, times, **(told | {"end": times[-1].end} | more))


# -- periods --


def test_periods_are_cut_at_midnight_and_on_mondays() -> None:
    noon = THURSDAY + DAY / 2
    assert split_periods(noon, noon + 2 * DAY, every="day") == (
        Period(noon, THURSDAY + DAY), Period(THURSDAY + DAY, THURSDAY + 2 * DAY),
        Period(THURSDAY + 2 * DAY, noon + 2 * DAY),
    )  # fmt: skip
    assert split_periods(THURSDAY, THURSDAY + 8 * DAY, every="week") == (
        Period(THURSDAY, THURSDAY + 4 * DAY), Period(THURSDAY + 4 * DAY, THURSDAY + 8 * DAY),
    )  # fmt: skip
    assert split_periods(THURSDAY, THURSDAY + DAY, every="day") == (Period(THURSDAY, THURSDAY + DAY),)


@given(st.floats(0, 4e9), st.floats(1, 4e7), st.sampled_from(["day", "week"]))
def test_periods_touch_and_leave_nothing_out(start: float, length: float, every: str) -> None:
    found = split_periods(start, start + length, every=every)
    assert (found[0].start, found[-1].end) == (start, start + length)
    assert all(a.end == b.start for a, b in pairwise(found))
    assert all(each.start < each.end for each in found)


def test_a_long_time_is_shown_by_the_week() -> None:
    assert [default_period(length * DAY) for length in (1, 2, 3, 35, 36, 400)] == [
        "hour",
        "hour",
        "day",
        "day",
        "week",
        "week",
    ]


# -- job records --


def test_a_statement_within_a_period_is_that_to_the_digit() -> None:
    (found,) = usage_records([statement()], [Period(THURSDAY, THURSDAY + HOUR)])
    assert found.seconds == dict.fromkeys(("idle_allocation", "data_stall", "memory_bound", "useful"), HOUR)
    assert (found.money, found.identity.job_id, found.identity.user) == ({"USD": 8.0}, "7", "ada")


def test_each_period_has_the_money_of_its_time_though_the_price_changed() -> None:
    """Twenty days of one GPU at 2 and then at 4 USD an hour; then ten of them in another currency."""
    half, cut = 240 * 3600 * S, THURSDAY + 10 * DAY
    job = statement(
        end=THURSDAY + 20 * DAY, paid=2 * half, parts={"useful": 2 * half}, money={"USD": 1440.0},
        price_changes=(PriceChange(half, {"USD": 480.0}),),
    )  # fmt: skip
    months = [Period(THURSDAY, cut), Period(cut, THURSDAY + 20 * DAY)]
    assert [found.money for found in usage_records([job], months)] == [{"USD": 480.0}, {"USD": 960.0}]
    days = [Period(THURSDAY + day * DAY, THURSDAY + (day + 1) * DAY) for day in range(20)]
    assert [found.money["USD"] for found in usage_records([job], days)] == pytest.approx([48] * 10 + [96] * 10)
    moved = replace(job, money={"USD": 480.0, "EUR": 960.0})
    assert [found.money for found in usage_records([moved], months)] == [{"USD": 480.0}, {"EUR": 960.0}]


def test_one_over_two_periods_is_shared_by_its_samples_layer_by_layer() -> None:
    # The first half hour: three quarters idle, the rest useful. All else was later.
    half = JobSample(THURSDAY + HOUR / 2, paid=7200, seen=7200, occupied=3600, computing=3600, useful=3600, joules=0)
    cut = THURSDAY + HOUR / 2
    first, second = usage_records([statement(samples=(half,))], [Period(THURSDAY, cut), Period(cut, THURSDAY + HOUR)])
    assert first.seconds == {"idle_allocation": pytest.approx(3600), "useful": pytest.approx(3600)}
    assert second.seconds == {"data_stall": pytest.approx(3600), "memory_bound": pytest.approx(3600)}
    assert [first.money, second.money] == [{"USD": pytest.approx(4)}] * 2


def test_energy_of_a_period_is_that_between_its_samples() -> None:
    half = JobSample(THURSDAY + HOUR / 2, paid=7200, seen=7200, occupied=3600, computing=3600, useful=3600, joules=1e6)
    run = statement(samples=(half,), energy={"useful": 3e6, "data_stall": 1e6})
    cut = THURSDAY + HOUR / 2
    periods = [Period(THURSDAY, cut), Period(cut, THURSDAY + HOUR)]
    first, second = (
        {"useful": pytest.approx(part * 3e6), "data_stall": pytest.approx(part * 1e6)} for part in (0.25, 0.75)
    )
    assert [each.energy for each in usage_records([run], periods)] == [first, second]
    assert [each.energy for each in usage_records([run], [Period(THURSDAY, THURSDAY + HOUR)])] == [run.energy]
    even = usage_records([replace(run, samples=())], periods)
    assert [sum(each.energy.values()) for each in even] == [pytest.approx(2e6)] * 2


def test_each_period_has_the_carbon_of_its_hours() -> None:
    half = JobSample(THURSDAY + HOUR / 2, paid=7200, seen=7200, occupied=3600, computing=3600, useful=3600, joules=1e6)
    run = statement(start=THURSDAY - HOUR / 2, end=THURSDAY + HOUR, samples=(half,), energy={"useful": 4e6})
    number = int(THURSDAY // HOUR)
    carbon = CarbonIntensity(100.0, hours=(number - 1, number), grams=(600.0, 300.0))
    periods = [Period(THURSDAY - HOUR, THURSDAY + HOUR / 4), Period(THURSDAY + HOUR / 4, THURSDAY + 2 * HOUR)]
    first, second = (each.intensity for each in usage_records([run], periods, carbon=carbon))
    assert first == pytest.approx((500, 0)), "a third of the energy up to then is of the second hour"
    assert second == pytest.approx((300, 0))
    (whole,) = usage_records([run], [Period(THURSDAY - HOUR, THURSDAY + 2 * HOUR)], carbon=carbon)
    assert whole.intensity == pytest.approx(((0.5 * 600 + 3.5 * 300) / 4, 0))
    lone = replace(carbon, hours=(number,), grams=(300.0,), otherwise=None)
    assert [each.intensity for each in usage_records([run], periods, carbon=lone)] == [
        (None, pytest.approx(2 / 3)), (pytest.approx(300), 0),
    ]  # fmt: skip


def test_without_samples_time_is_even() -> None:
    (found,) = usage_records([statement()], [Period(THURSDAY + HOUR / 4, THURSDAY + HOUR / 2)])
    assert found.seconds == dict.fromkeys(
        ("idle_allocation", "data_stall", "memory_bound", "useful"), pytest.approx(900)
    )
    assert found.money == {"USD": pytest.approx(2)}


@given(st.lists(st.floats(-100, 3700), max_size=6), st.lists(st.integers(0, 20_000), min_size=5, max_size=5))
def test_periods_that_touch_share_out_all_of_it_whatever_the_samples_say(cuts: list[float], told: list[int]) -> None:
    samples = tuple(
        JobSample(
            THURSDAY + 600 * (n + 1),
            paid=v,
            seen=v * 0.9,
            occupied=v * 0.5,
            computing=v * 0.4,
            useful=v * 0.3,
            joules=0,
        )
        for n, v in enumerate(told)
    )
    edges = sorted({THURSDAY - 200, THURSDAY + 3800, *(THURSDAY + cut for cut in cuts)})
    times = [Period(a, b) for a, b in pairwise(edges)]
    found = list(usage_records([statement(samples=samples)], times))
    for leak in ("idle_allocation", "data_stall", "memory_bound", "useful"):
        assert sum(each.seconds.get(leak, 0.0) for each in found) == pytest.approx(HOUR)
    assert sum(each.money["USD"] for each in found) == pytest.approx(8)
    assert all(value >= 0 for each in found for value in each.seconds.values())


def test_what_does_not_touch_a_period_has_no_lot() -> None:
    times = [Period(THURSDAY - HOUR, THURSDAY), Period(THURSDAY + HOUR, THURSDAY + 2 * HOUR)]
    assert (
        list(
            usage_records([statement(), statement(paid=0, parts={}, start=THURSDAY + HOUR, end=THURSDAY + HOUR)], times)
        )
        == []
    )


def test_the_peak_is_of_what_was_held_at_once() -> None:
    first = GpuHolding(THURSDAY, THURSDAY + HOUR, 4.0)
    later = GpuHolding(THURSDAY + 1800, THURSDAY + 5400, 3.0)
    after = GpuHolding(THURSDAY + 5400, THURSDAY + 9000, 6.0)
    assert peak_gpus([first, later, after], Period(THURSDAY, THURSDAY + DAY)) == 7
    assert peak_gpus([first, later, after], Period(THURSDAY + 3600, THURSDAY + DAY)) == 6


def test_what_nobody_had_is_the_rest_of_what_is_paid_for_at_the_mean_price() -> None:
    times = (Period(0, HOUR), Period(HOUR, 2 * HOUR))
    found = list(
        unheld_usage([lot(useful=3, money=6.0), lot(period=1, useful=1, money=6.0)], times, Period(0, 2 * HOUR), gpus=4)
    )
    assert [each.seconds for each in found] == [{"idle_allocation": HOUR}, {"idle_allocation": 3 * HOUR}]
    assert [each.money for each in found] == [{"USD": 3.0}, {"USD": 9.0}]
    assert not list(unheld_usage([lot(useful=9)], times[:1], Period(0, HOUR), gpus=4))


def test_hours_without_a_price_make_those_of_nobody_no_cheaper() -> None:
    usage = [lot(useful=1, money=2.0), lot(useful=2), replace(lot(useful=1), money={"GPU-hours": 1.0})]
    (found,) = unheld_usage(usage, (Period(0, HOUR),), Period(0, HOUR), gpus=8)
    assert found.seconds == {"idle_allocation": 4 * HOUR}
    assert found.money == {"USD": 8.0, "GPU-hours": 4.0}


def test_jobs_and_what_no_job_had_are_no_more_than_the_node() -> None:
    """Even if a job's leaks were counted a sample later than the node's."""
    usage = PrometheusUsage(Scripted(), UsageFilter())
    node = {"useful": 80.0, "hung": 20.0, "zombie": 100.0}
    assert usage._uncovered_seconds(node, {"useful": 100.0}) == pytest.approx({"hung": 100 / 6, "zombie": 500 / 6})
    assert usage._uncovered_seconds(node, {"useful": 190.0}) == {}


# -- sums --


def test_ratios_are_of_sums_and_the_most_lost_is_first() -> None:
    found = sums(
        lot("1", user="ada", money=4, useful=1, data_stall=1),
        lot("2", user="bob", money=60, useful=1, idle_allocation=5),
        lot("3", user="bob", money=1, useful=10),
    )
    assert [(row.name, row.jobs, row.lost_money, row.worst) for row in found.rows] == [
        ("bob", 2, 50.0, "idle_allocation"), ("ada", 1, 2.0, "data_stall"),
    ]  # fmt: skip
    assert found.rows[0].layers.product == pytest.approx(11 / 16)
    assert (found.whole.gpu_hours, found.whole.money, found.whole.lost_gpu_hours) == (18, 65, 6)
    assert [(part.name, part.gpu_hours, part.money) for part in found.parts] == [
        ("idle_allocation", 5, 50.0), ("data_stall", 1, 2.0), ("useful", 12, pytest.approx(13.0)),
    ]  # fmt: skip


def test_what_was_not_seen_is_neither_lost_nor_useful() -> None:
    found = sums(lot(useful=2, data_stall=1, unobserved=1, unresolved=0))
    assert (found.whole.lost_gpu_hours, found.whole.coverage) == (1, 0.75)
    assert found.whole.layers.product == pytest.approx(2 / 3)


def test_nobody_and_those_without_the_word_have_rows_of_their_own() -> None:
    found = sums(
        lot("", idle_allocation=3),
        lot("", told=False, useful=1),
        lot("5", useful=1, data_stall=1),
        lot("6", user="ada", useful=1),
    )
    assert {row.name for row in found.rows} == {"(nobody)", "(not told)", "(none)", "ada"}
    assert {row.name: row.jobs for row in found.rows}["(nobody)"] == 0
    assert found.whole.jobs == 2


def test_without_a_word_users_are_ranked_or_what_there_is() -> None:
    assert sums(lot(user="ada", useful=1), by="").by == "user"
    assert sums(lot(namespace="inference", useful=1), by="").by == "namespace"
    assert sums(lot(useful=1), by="").by == "job"


def test_jobs_of_two_clusters_with_one_id_are_two() -> None:
    assert sums(lot(useful=1, cluster="a"), lot(useful=1, cluster="b")).whole.jobs == 2


def test_several_currencies_or_none_are_gpu_hours() -> None:
    other = replace(lot(useful=1), money={"EUR": 1.0})
    for lots in (
        (lot(useful=1, money=2), other),
        (lot(useful=1),),
        (replace(lot(useful=1), money={"GPU-hours": 1.0}),),
    ):
        found = sums(*lots)
        assert (found.currency, found.whole.money, found.per_gpu_hour) == ("", None, None)
        assert "amounts are GPU-hours" in found.unseen[-1]


def test_what_has_no_price_beside_what_has_one_is_said() -> None:
    found = sums(lot(useful=1, money=2), lot("8", useful=3))
    assert (found.currency, found.whole.money) == ("USD", 2)
    assert found.unseen == ("3.00 GPU-hours have no price: they are in the hours, and not in the money",)


def test_the_trend_leaves_out_what_is_not_known_and_keeps_what_is_empty() -> None:
    times = tuple(Period(n * HOUR, (n + 1) * HOUR) for n in range(4))
    found = sums(
        lot(user="a", period=1, useful=1, data_stall=3), lot(user="b", period=3, useful=1), times=times, start=HOUR
    )
    assert [(each.start, each.gpu_hours, each.product) for each in found.trend] == [
        (HOUR, 4, 0.25), (2 * HOUR, 0, None), (3 * HOUR, 1, 1.0),
    ]  # fmt: skip
    assert {row.name: row.track for row in found.rows} == {"a": (0.25, None, None), "b": (None, None, 1.0)}


def test_a_leak_that_this_program_does_not_know_is_lost_all_the_same() -> None:
    found = sums(lot(useful=1, leak_of_tomorrow=1))
    assert (found.whole.lost_gpu_hours, found.whole.worst) == (1, "leak_of_tomorrow")


# -- text --


def test_signs_of_a_trend() -> None:
    assert sparkline([0, 0.124, 0.5, 0.99, 1.0, None]) == "▁▁▅██·"
    assert sparkline([0, 5, 10], most=10) == "▁▅█"
    assert sparkline([0.0], most=0) == "▁"


def test_everything_fits_into_80_columns_and_into_markdown() -> None:
    times = tuple(Period(THURSDAY + n * DAY, THURSDAY + (n + 1) * DAY) for n in range(40))
    lots = [
        lot(
            f"job-with-a-long-name-{n}",
            user=f"user-{n}",
            period=n % 40,
            money=123_456.0,
            useful=1000 + n,
            data_stall=n,
            memory_bound=n,
        )
        for n in range(80)
    ]
    for by in ("user", "job"):
        found = sums(*lots, times=times, by=by, every="day")
        said = render_text(summary_tables(found))
        assert max(map(len, said.splitlines())) <= 80
        assert "and 60 more; --json has them all" in said
        assert "and 26 before; --json has them all" in said
        assert render_markdown(summary_tables(found)).count("\n## ") >= 4


def test_lines_are_one_for_each_row_and_one_for_all() -> None:
    lines = summary_lines(
        sums(lot(user="ada", useful=1, money=2), lot("8", user="bob", data_stall=1, money=2))
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["bob", "ada", "all"]
    assert lines[0].split("  ")[0] == "bob"
    assert "lost 2.00 USD" in lines[0]
    assert len({line.index("GPU-h") for line in lines}) == 1


def test_of_each_leak_it_is_said_whose_it_is_unless_it_is_one_s_alone() -> None:
    said = render_text(summary_tables(sums(lot(user="ada", data_stall=3, hung=2), lot("8", user="bob", data_stall=1))))
    assert "1. data_stall: 4.00 GPU-hours\n   whose: ada 75.0 %, bob 25.0 %\n" in said
    assert "2. hung: 2.00 GPU-hours\n   role" in said


def test_large_sums_have_no_cents_and_programs_get_what_is_worked_out() -> None:
    found = sums(lot(user="ada", useful=1, data_stall=1, money=250_000.25))
    assert "2.00 GPU-hours, 250,000 USD" in render_text(summary_tables(found))
    told = json.loads(found.json())
    assert (told["gpus"], told["work"], told["per_gpu_hour"], told["hours"]) == (2, 1, 125_000.125, 1)
    assert told["rows"][0]["leaks"] == {"data_stall": 1}


def test_the_second_half_is_held_against_the_first() -> None:
    times = tuple(Period(n * HOUR, (n + 1) * HOUR) for n in range(4))
    lots = [lot(period=n, useful=useful, data_stall=10 - useful) for n, useful in enumerate((2, 4, 6, 8))]
    assert "30.0 % in the first half, 70.0 % in the second (+40.0 points)" in render_text(
        summary_tables(sums(*lots, times=times))
    )
