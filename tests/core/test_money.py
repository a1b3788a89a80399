"""Prices: selection, unallocated time, and costs of GPUs and jobs."""

import pytest

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import Owner
from exporter.core.pipeline import advance
from exporter.core.prices import (
    NO_PRICE,
    CarbonIntensity,
    EnergyTerms,
    Price,
    Terms,
    price_at,
    price_problems,
    unmatched_models,
    unpriced_models,
)
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from tests.core.test_exposition import lines
from tests.worlds import H100, RESTING, cut, device, first, held, reading, seen

MODEL = "NVIDIA H100 80GB HBM3"


def at(*prices: Price, pool: str = "", wall: int = 0) -> Price:
    return price_at(prices, model=MODEL, spec="H100", pool=pool, wall_ns=wall)


def test_without_a_price_an_hour_costs_an_hour() -> None:
    assert at() == NO_PRICE
    assert at(Price(2.0, model="NVIDIA L4"), Price(3.0, pool="spot"), Price(4.0, valid_from=1)) == NO_PRICE


@pytest.mark.parametrize("model", [MODEL, "H100"])
def test_the_price_that_names_more_wins_and_then_the_latest(model: str) -> None:
    old, new = Price(1.0), Price(2.0, valid_from=5)
    named, pooled = Price(3.0, model=model), Price(4.0, model=model, pool="spot")
    assert at(old, new, wall=4) == old
    assert at(new, old, wall=5) == new
    assert at(named, old, new, wall=9) == named
    assert at(pooled, named, pool="spot") == pooled
    assert at(pooled, named, pool="reserved") == named
    assert at(Price(5.0, pool="spot"), old, pool="spot").per_gpu_hour == 5.0


def node(terms: Terms) -> Snapshot:
    """Two boards for two minutes: one is shared by two jobs, the other is unallocated."""
    ledger = Ledger()
    both = [held(owner=Owner("a")), held(owner=Owner("b"))]
    advance(ledger, first([device(), device("GPU-1", "1")], both))
    rest = RESTING | {"processes": ()}
    advance(ledger, seen(120, reading(0, 120, RESTING), reading(0, 120, rest, uuid="GPU-1")))
    return take_snapshot(ledger, DaemonMetadata(terms=terms))


def test_a_job_costs_its_part_of_what_it_holds() -> None:
    found = node(Terms(prices=(Price(3.0, currency="EUR"),)))
    assert lines(found, "job_price_per_hour") == [
        'job_price_per_hour{job_id="a",currency="EUR"} 1.5', 'job_price_per_hour{job_id="b",currency="EUR"} 1.5',
    ]  # fmt: skip


@pytest.mark.parametrize(("basis", "of_nobody"), [("paid", "3.0"), ("allocated", "0.0")])
def test_nobody_s_time_costs_nothing_where_only_allocated_time_is_paid(basis: str, of_nobody: str) -> None:
    labels = f'model="{MODEL}",pool="spot",currency="USD",basis="{basis}"'
    found = node(Terms(pool="spot", prices=(Price(3.0, basis=basis),)))
    assert lines(found, "price_per_gpu_hour") == [
        f'price_per_gpu_hour{{{labels},held="true"}} 3.0', f'price_per_gpu_hour{{{labels},held="false"}} {of_nobody}',
    ]  # fmt: skip


def seconds(found: Snapshot, leak: str) -> list[str]:
    return [line.partition("node_seconds_total")[2] for line in lines(found, "node_seconds_total") if leak in line]


def test_the_node_s_seconds_are_told_apart_by_who_had_them() -> None:
    found = node(Terms())
    assert seconds(found, "idle_allocation") == [
        f'{{model="{MODEL}",held="true",leak="idle_allocation",layer="gau"}} 0.0',
        f'{{model="{MODEL}",held="false",leak="idle_allocation",layer="gau"}} 120.0',
    ]
    assert seconds(found, "startup") == [f'{{model="{MODEL}",held="true",leak="startup",layer="ectr"}} 120.0']
    assert lines(found, "node_gpus") == [f'node_gpus{{model="{MODEL}"}} 2.0']
    assert lines(found, "model_peak_flops") == [f'model_peak_flops{{model="{MODEL}"}} 989400000000000.0']


def test_a_gpu_that_is_gone_stays_in_the_node_s_counters() -> None:
    ledger = Ledger()
    advance(ledger, first([device(), device("GPU-1", "1")], []))
    rest = RESTING | {"processes": ()}
    advance(ledger, seen(60, reading(0, 60, rest), reading(0, 60, rest, uuid="GPU-1")))
    advance(ledger, seen(60, devices=(device(),)))
    found = take_snapshot(ledger, DaemonMetadata())
    assert seconds(found, "idle_allocation")[1].endswith(" 120.0")
    assert lines(found, "node_gpus") == [f'node_gpus{{model="{MODEL}"}} 1.0']


def test_a_board_in_mig_mode_is_one_gpu_with_the_peak_of_a_whole_one() -> None:
    ledger = Ledger()
    peak = H100.peak_flops or 0.0
    board, *parts = cut(3, 2)
    sliced = [
        device(p.uuid, p.index, weight=p.weight, parent=p.parent, profile=p.profile, spec=_slice(p.weight, peak))
        for p in parts
    ]
    advance(ledger, first([board, *sliced]))
    (view,) = take_snapshot(ledger, DaemonMetadata()).models
    assert view.weight == 1_000_000
    assert view.peak_flops == pytest.approx(peak, rel=1e-5)
    advance(ledger, seen(10, devices=(device(spec=None),)))
    assert take_snapshot(ledger, DaemonMetadata()).models[0].peak_flops == pytest.approx(peak, rel=1e-5)


def _slice(weight: int, peak: float):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from msgspec.structs import replace  # noqa: PLC0415

    return replace(H100, peak_flops=peak * weight / 1_000_000)


def test_what_the_operator_said_is_told_and_what_not_is_absent() -> None:
    said = node(Terms(
        node="n1", pool="spot", energy=EnergyTerms(0.12, "EUR"), carbon=CarbonIntensity(380.0), idle_budget=50.0,
        idle_budget_currency="USD", exemptions=(("eval", "nightly runs", 100.0),),
    ))  # fmt: skip
    names = ("price_per_kwh", "idle_budget_per_hour", "exemption_expiry_timestamp_seconds")
    assert [lines(said, name) for name in names] == [
        ['price_per_kwh{currency="EUR"} 0.12'],
        ['idle_budget_per_hour{currency="USD"} 50.0'],
        ['exemption_expiry_timestamp_seconds{exemption="eval",reason="nightly runs"} 100.0'],
    ]  # fmt: skip
    assert lines(said, "node_info") == ['node_info{node="n1",pool="spot"} 1']
    assert "\ngpu_efficiency_grams_co2_per_kwh 380.0\n" in render(said).decode()
    assert [lines(node(Terms()), name) for name in names] == [[]] * 3
    assert "grams_co2_per_kwh 0" not in render(node(Terms())).decode()


def test_energy_costs_and_emits_by_the_kilowatt_hour_and_what_is_not_known_is_no_zero() -> None:
    assert EnergyTerms(0.2, "EUR").money(1.8e6) == {"EUR": 0.1}
    assert EnergyTerms(0.0, "EUR").money(1.8e6) == {"EUR": 0.0}
    assert EnergyTerms().money(1.8e6) == EnergyTerms(0.2, "EUR").money(0.0) == {}
    assert CarbonIntensity(400.0).emitted(1.8e6) == 200.0
    assert CarbonIntensity().emitted(1.8e6) is CarbonIntensity(400.0, (10,), (100.0,)).emitted(1.8e6) is None


HOURS = CarbonIntensity(400.0, hours=(10, 11, 13), grams=(100.0, 300.0, 50.0))


def test_the_carbon_intensity_is_that_of_the_hour_and_otherwise_of_the_rest() -> None:
    moments = (0, 36_000 - 1, 36_000, 39_599, 39_600, 43_200, 46_800, 50_400)
    assert [HOURS.at(at) for at in moments] == [400, 400, 100, 100, 300, 400, 50, 400]
    assert CarbonIntensity(hours=(10,), grams=(100.0,)).at(0) is None
    assert CarbonIntensity(380.0).at(36_000) == 380


def test_the_mean_of_hours_is_over_time_and_says_how_much_of_it_has_no_value() -> None:
    assert HOURS.mean_of_hours(36_000, 43_200) == (200, 0)
    assert HOURS.mean_of_hours(36_000 + 1800, 36_000 + 4500) == pytest.approx(((1800 * 100 + 900 * 300) / 2700, 0))
    assert HOURS.mean_of_hours(39_600, 41_400) == (300, 0)
    assert HOURS.mean_of_hours(41_000, 41_400) == (300, 0), "the hour before has no part"
    assert HOURS.mean_of_hours(36_000, 50_400) == (450 / 4, 0.25)
    assert HOURS.mean_of_hours(0, 3600) == CarbonIntensity(400.0).mean_of_hours(36_000, 43_200) == (0, 1)
    assert HOURS.mean_of_hours(36_001, 36_001) == HOURS.mean_of_hours(36_001, 7) == (100, 0), "the hour it began in"
    assert HOURS.mean_of_hours(36_000.3, 39_600.7)[1] == 0, "rounding is no time without a value"


def test_a_job_on_two_models_costs_each() -> None:
    ledger = Ledger()
    other = device("GPU-1", "1", model="NVIDIA L4", spec=None)
    advance(ledger, first([device(), other], [held(gpus=2), held("GPU-1", gpus=2)]))
    advance(ledger, seen(10, reading(0, 10), reading(0, 10, uuid="GPU-1")))
    prices = (Price(3.0, model="H100"), Price(1.0, model="NVIDIA L4", currency="EUR"))
    (job,) = take_snapshot(ledger, DaemonMetadata(terms=Terms(prices=prices))).jobs
    assert job.costs == (("EUR", 1.0), ("USD", 3.0))


def test_the_newest_observation_is_dated_by_the_node_s_clock() -> None:
    ledger = Ledger()
    advance(ledger, seen(7.5))
    assert (
        "\ngpu_efficiency_observation_timestamp_seconds 7.5\n"
        in render(take_snapshot(ledger, DaemonMetadata())).decode()
    )


def test_a_model_that_no_price_fits_is_named_and_one_without_prices_is_not() -> None:
    """A price for another model would otherwise be ignored without a word."""
    boards = (device(), device("GPU-1", "1", model="NVIDIA A100-SXM4-80GB"), device("MIG-x", "0:1", parent="GPU-0"))
    only = (Price(2.0, model=device().model),)
    assert unpriced_models(only, boards, pool="", wall_ns=0) == ("NVIDIA A100-SXM4-80GB",)
    assert unpriced_models((*only, Price(1.0)), boards, pool="", wall_ns=0) == ()
    assert unpriced_models((), boards, pool="", wall_ns=0) == ()
    assert unpriced_models((Price(1.0, pool="spot"),), boards[:1], pool="", wall_ns=0) == (device().model,)


def test_a_price_whose_model_no_board_has_is_named_if_no_table_knows_it() -> None:
    boards = (device(), device("MIG-x", "0:1", model="MIG 1g.5gb", parent="GPU-0"))
    names = ("*", device().model, "H100-SXM", "NVIDIA A100-SXM4-80GB", "NVIDIA H1OO")
    prices = tuple(Price(2.0, model=name) for name in names)
    spec = device().spec
    assert spec is not None
    assert unmatched_models((*prices, Price(1.0, model=spec.name)), boards) == names[2:]
    terms = Terms(prices=prices, unknown_models=names[3:])
    (problem,) = price_problems(Terms(prices=prices, unknown_models=names[4:]), boards, wall_ns=0)
    assert problem.startswith("no GPU here is called NVIDIA H1OO, as rows of [[prices]] are")
    (problem,) = price_problems(terms, (*boards, device("GPU-1", "1", model=names[3])), wall_ns=0)
    assert "called NVIDIA H1OO, as" in problem
    assert list(price_problems(Terms(), boards, wall_ns=0)) == []
    (problem,) = price_problems(Terms(prices=prices[2:3]), boards, wall_ns=0)
    assert problem.startswith(f"no row of [[prices]] fits {device().model}: ")
