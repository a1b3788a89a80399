"""Tests the advice on reservations: its arithmetic against brute force, its text, and what it refuses."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from exporter.cli import main
from exporter.report.model import ReportError
from exporter.report.reservation import (
    JOB_SIZES,
    STEP_SECONDS,
    WEEK_SECONDS,
    Price,
    ReservationAdvice,
    UsedGpus,
    advise_reservation,
    parse_price,
    read_used_gpus,
    shares_in_use,
)
from exporter.report.reservation_text import advice_tables
from exporter.report.text import WIDTH, render_text
from tests.report.answers import Row

MONDAY = 1_767_571_200.0
"""2026-01-05 00:00 UTC, a Monday."""
HOUR, STEPS_AN_HOUR = 3600.0, 12
H100 = "NVIDIA H100 80GB HBM3"
Value = Callable[[float], float]


def times(weeks: int) -> tuple[float, ...]:
    return tuple(MONDAY + STEP_SECONDS * n for n in range(1, round(weeks * WEEK_SECONDS / STEP_SECONDS) + 1))


def used(weeks: int, allocated: Sequence[float], *, paid: float = 16.0, price: float | None = 2.5) -> UsedGpus:
    """Weeks in which these GPUs were allocated, and half of them worked."""
    at = times(weeks)
    free = [paid - value for value in allocated]
    currency, per_hour = ("GPU-hours", 1.0) if price is None else ("USD", price)
    held = {at: value * per_hour for at, value in zip(at, allocated, strict=True)}
    unheld = {at: value * per_hour for at, value in zip(at, free, strict=True)}
    return UsedGpus(
        start=MONDAY, end=MONDAY + weeks * WEEK_SECONDS, times=at,
        tracks={
            "paid": {(H100,): dict.fromkeys(at, paid)},
            "allocated": {(H100,): dict(zip(at, allocated, strict=True))},
            "working": {(H100,): {at: value / 2 for at, value in zip(at, allocated, strict=True)}},
            "cost": {(H100, "true", currency): held, (H100, "false", currency): unheld},
            "jobs": {("8",): dict(zip(at, allocated, strict=True))},
            "queued": {}, "simulated": {},
        },
    )  # fmt: skip


def advised(of: UsedGpus, reserved: float | None = 2.0, on_demand: float | None = 4.0) -> ReservationAdvice:
    prices = [[] if price is None else [Price("", price)] for price in (reserved, on_demand)]
    return advise_reservation(of, UTC, reserved=prices[0], on_demand=prices[1])


def printed(advice: ReservationAdvice) -> str:
    text = render_text(advice_tables(advice))
    assert max(map(len, text.splitlines())) <= WIDTH
    return text


def cost(values: Sequence[float], count: int, reserved: float, on_demand: float) -> float:
    """Pay for each five minutes on their own: the reserved GPUs, and what is used beyond them."""
    return sum((count * reserved + (max(value, count) - count) * on_demand) / STEPS_AN_HOUR for value in values)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_each_number_and_the_least_are_those_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    values = [max(0.0, draw.choice((3.0, 9.0)) + draw.choice((0, 1, 0.25, -2.5))) for _ in times(2)]
    reserved, on_demand = draw.uniform(0.5, 3), draw.uniform(2, 5)
    (found,) = advised(used(2, values), reserved, on_demand).types
    by_hand = [cost(values, count, reserved, on_demand) for count in range(12)]
    allocated = found.allocated
    assert allocated.costs == pytest.approx(by_hand[: len(allocated.costs)])
    assert len(allocated.in_use) == 10
    assert allocated.reserve == by_hand.index(min(by_hand))
    halves = [cost([value / 2 for value in values], count, reserved, on_demand) for count in range(12)]
    assert found.working.reserve == halves.index(min(halves))


def test_a_gpu_is_in_use_for_the_share_of_time_in_which_more_are_allocated_than_before_it() -> None:
    assert shares_in_use([0.0, 1.0, 2.5, 2.5]) == (0.75, 0.5, 0.25)
    assert shares_in_use([0.0, 0.0]) == ()
    assert shares_in_use([3.0000000001, 2.9999999999]) == pytest.approx((1.0, 1.0, 1.0))
    draw = random.Random(1)  # noqa: S311
    values = [draw.uniform(0, 5) for _ in range(999)]
    shares = shares_in_use(values)
    assert all(before >= after for before, after in pairwise(shares))
    assert sum(shares) == pytest.approx(sum(values) / len(values))


def office(at: float) -> float:
    """14 GPUs from Monday to Friday, 9 to 17 UTC; 6 in the other hours of these days; 2 on weekends."""
    day, hour = divmod((at - STEP_SECONDS - MONDAY) // HOUR % 168, 24)
    return 2.0 if day >= 5 else 14.0 if 9 <= hour < 17 else 6.0


def test_office_hours_are_on_demand_and_nights_and_weekends_are_free() -> None:
    advice = advised(used(2, [office(at) for at in times(2)]))
    (found,) = advice.types
    assert (found.allocated.reserve, found.allocated.reserve_by_week) == (6, (6, 6))
    assert found.allocated.costs[6] == pytest.approx(2 * (168 * 6 * 2.0 + 40 * 8 * 4.0))
    assert found.cost_today == pytest.approx(2 * 168 * 16 * 2.5)
    assert [found.allocated.hours[day][hour] for day, hour in ((0, 8), (0, 9), (4, 16), (4, 17), (5, 9))] == [
        6, 14, 14, 6, 2,
    ]  # fmt: skip
    text = printed(advice)
    assert "reserve 6: 6,592.00 USD, 6,848.00 less than it was" in text
    assert "on demand: Mon-Fri 09-17; 8 beyond these, on average" in text
    assert "reserved GPUs are free: Sat-Sun 00-24; 4 for work that can wait, on average" in text
    assert "if no GPU were allocated without work: reserve 3," in text
    assert re.search(r"^Fri +6( +6){8}( 14){8}( +6){7}$", text, re.MULTILINE)
    assert re.search(r"^8 +2,272 +100.0 % +14 +11.3 +6 +2$", text, re.MULTILINE)
    assert re.search(r"^6 +71.4 % +4,032.00 +2,560.00 +6,592.00 +-6,848$", text, re.MULTILINE)


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job-reports.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(NVIDIA H100 80GB HBM3\n  paid for.*?)```", page, re.DOTALL)
    text = printed(advised(used(2, [office(at) for at in times(2)])))
    assert [line for line in shown.splitlines() if line not in {"...", *text.splitlines()}] == []


def test_advice_from_simulated_nodes_is_marked() -> None:
    measured = used(1, [4.0 for _ in times(1)])
    simulated = replace(measured, tracks={**measured.tracks, "simulated": {(): {measured.times[0]: 3.0}}})
    assert printed(advised(simulated)).startswith("How many GPUs to reserve (SIMULATED)\n")
    assert (advised(simulated).simulated, advised(measured).simulated) == (True, False)
    assert "SIMULATED" not in printed(advised(measured))


def test_hours_of_the_week_are_those_of_the_time_zone() -> None:
    """In Kolkata, five and a half hours before UTC, work begins at half past two in the afternoon."""
    advice = advise_reservation(
        used(1, [office(at) for at in times(1)]), ZoneInfo("Asia/Kolkata"), reserved=(), on_demand=()
    )
    hours = advice.types[0].allocated.hours
    assert [hours[0][hour] for hour in (13, 14, 15, 22)] == [6, 10, 14, 10]
    assert hours[0][0] == 2.0  # Sunday, in UTC


def test_large_numbers_have_two_hours_a_column() -> None:
    text = printed(advised(used(1, [100 * office(at) for at in times(1)], paid=1600.0)))
    assert re.search(r"^Mon +600 +600 +600 +600 +1000( +1400){3} +1000( +600){3}$", text, re.MULTILINE)


def test_no_gpu_is_reserved_that_costs_no_less_than_on_demand() -> None:
    (found,) = advised(used(1, [4.0 for _ in times(1)]), 4.0, 4.0).types
    assert found.allocated.reserve == 0


@pytest.mark.parametrize(
    ("reserved", "on_demand", "prices"), [(1.0, None, (1.0, 2.5)), (None, 9.0, (2.5, 9.0)), (None, None, (None, None))]
)
def test_one_missing_price_is_the_stored_one(
    reserved: float | None, on_demand: float | None, prices: tuple[float | None, float | None]
) -> None:
    (found,) = advised(used(1, [4.0 for _ in times(1)]), reserved, on_demand).types
    assert (found.reserved_price, found.on_demand_price) == prices


def test_without_two_prices_only_the_use_is_shown() -> None:
    values = [office(at) for at in times(1)]
    for advice in (advised(used(1, values), None, None), advised(used(1, values, price=None), 2.0, None)):
        (found,) = advice.types
        assert (found.allocated.reserve, found.allocated.costs) == (None, ())
        text = printed(advice)
        assert "no advice without two prices: give --reserved-price and --on-demand-price" in text
        assert re.search(r"^6 +71.4 %$", text, re.MULTILINE)
    assert found.cost_today is None


def test_the_last_price_whose_name_is_part_of_the_type_counts() -> None:
    prices = [parse_price(text) for text in ("1", "h100=2", "A100=3")]
    advice = advise_reservation(used(1, [4.0 for _ in times(1)]), UTC, reserved=prices, on_demand=prices[:1])
    assert (advice.types[0].reserved_price, advice.types[0].on_demand_price) == (2.0, 1.0)


@pytest.mark.parametrize("text", ["", "H100", "H100=", "0", "-1", "inf", "nan"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no price of a GPU-hour, such as"):
        parse_price(text)


class Stored:
    """Answers each query from what is stored at each time, by a part of the query."""

    def __init__(
        self, values: Mapping[str, Value], since: float, *, until: float = MONDAY + 8 * WEEK_SECONDS,
        missing_hour: int = -1,
    ) -> None:  # fmt: skip
        """`missing_hour`: an hour of each week of which nothing is stored."""
        self._values, self._since, self._until, self._missing_hour = values, since, until, missing_hour

    def _known(self, at: float) -> bool:
        return self._since < at <= self._until and (at - 1 - MONDAY) // HOUR % 168 != self._missing_hour

    def range_query(self, query: str, start: float, end: float, step: float) -> Sequence[Row]:
        for part, value in self._values.items():
            if part in query:
                at = [start + n * step for n in range(round((end - start) / step) + 1)]
                points = [(each, f"{value(each)}") for each in at if self._known(each)]
                return [Row(metric={"model": H100}, values=tuple(points))] if points else []
        return []


ALL = {'held="true"': office, "sum by (model) (node_model_leak": lambda _: 16.0}


def test_only_whole_weeks_are_read_however_much_is_asked_for() -> None:
    server = Stored(ALL, since=MONDAY)
    found = read_used_gpus(server, end=MONDAY + 3.5 * WEEK_SECONDS + 1234, since=5 * WEEK_SECONDS + 999)
    assert (found.start, found.end) == (MONDAY + 0.5 * WEEK_SECONDS, MONDAY + 3.5 * WEEK_SECONDS)
    assert len(found.times) == 3 * 7 * 24 * STEPS_AN_HOUR
    assert found.values("allocated", H100) == [office(at) for at in found.times]
    shorter = read_used_gpus(server, end=MONDAY + 3.5 * WEEK_SECONDS, since=2.9 * WEEK_SECONDS)
    assert (shorter.start, shorter.end) == (MONDAY + 1.5 * WEEK_SECONDS, MONDAY + 3.5 * WEEK_SECONDS)


def test_what_is_missing_in_between_is_no_hour_without_use() -> None:
    server = Stored(ALL, since=MONDAY, until=MONDAY + WEEK_SECONDS + 84 * HOUR)
    advice = advised(read_used_gpus(server, end=MONDAY + 2 * WEEK_SECONDS, since=2 * WEEK_SECONDS))
    assert advice.known == pytest.approx(0.75)
    assert "2 weeks, of which 75.0 % is stored" in printed(advice)
    assert advice.types[0].allocated.in_use[0] == 1.0
    server = Stored(ALL, since=MONDAY, missing_hour=33)
    advice = advised(read_used_gpus(server, end=MONDAY + 2 * WEEK_SECONDS, since=2 * WEEK_SECONDS))
    assert advice.types[0].allocated.hours[1][8:11] == (6.0, None, 14.0)
    assert re.search(r"^Tue +6( +6){8}  -( 14){7}( +6){7}$", printed(advice), re.MULTILINE)


@pytest.mark.parametrize(
    ("since", "until", "why"),
    [
        (MONDAY + 100 * HOUR, MONDAY + 9 * WEEK_SECONDS, "only 2 d 20 h of the rules' series are stored there"),
        (MONDAY - 1, MONDAY + 100 * HOUR, "only 4 d 4 h of the rules' series are stored there in that time, which is"),
        (MONDAY + WEEK_SECONDS, MONDAY, "no node_model_leak:gpu_efficiency_seconds:rate5m is stored there in that"),
    ],
)
def test_less_than_a_week_is_refused(since: float, until: float, why: str) -> None:
    with pytest.raises(ReportError, match=re.escape(why)):
        read_used_gpus(Stored(ALL, since, until=until), end=MONDAY + WEEK_SECONDS, since=WEEK_SECONDS)


def test_json_has_every_number_and_size() -> None:
    found = json.loads(advised(used(1, [office(at) for at in times(1)])).json())
    assert len(found["types"][0]["allocated"]["costs"]) == 15
    assert [size["gpus"] for size in found["job_sizes"]] == list(JOB_SIZES)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "the following arguments are required: --prometheus"),
        ("--prometheus p --timezone Moon/Sea", "argument --timezone: 'Moon/Sea' is no time zone that this machine"),
        ("--prometheus p --reserved-price free", "argument --reserved-price: 'free' is no price of a GPU-hour"),
    ],
)
def test_wrong_usage_is_refused(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["advise", *words.split()])
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_less_than_a_week_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--prometheus", "http://127.0.0.1:1", "--since", "6d"]) == 2
    assert "advise: --since is less than 7d" in capsys.readouterr().err


def test_a_prometheus_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--quiet", "--prometheus", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
