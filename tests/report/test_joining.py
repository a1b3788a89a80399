"""Reports of job records: nothing is lost or counted twice, and missing parts are mentioned."""

from collections import Counter
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from exporter.core.job_record import JobRecord
from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import Latency
from exporter.core.prices import CarbonIntensity, EnergyTerms
from exporter.core.uncertainty import Bounds
from exporter.report.html import render_html
from exporter.report.model import JobReport, ReportError
from exporter.report.records import RecordSources, join_records
from exporter.report.text import render_text, report_tables
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from tests.report.lives import Past, play
from tests.report.stated import BEGIN, HOUR, owner, sample, serves, stated, trained
from tests.scenarios.stage import SIZES
from tests.scenarios.twelve import EXPECTED

LATER = BEGIN + 1e6


def join(*statements: JobRecord, **asked: Any) -> JobReport:
    return join_records(statements, job_id="7", at=LATER, sources=RecordSources(**asked))


def booked(receipt: JobReport) -> dict[str, int]:
    """GPU-nanoseconds by leak."""
    return {part.name: part.nanoseconds for part in receipt.parts}


# -- the ledgers' figures --


@cache
def past(scenario: str, cuts: tuple[float, ...], node: int) -> Past:
    size = SIZES[scenario]
    story = simulate(
        scenario, seed=1, gpus=size.gpus, period_seconds=size.period, duration_seconds=size.duration, node=node
    )
    return play(story.observations, node=f"n{node}", cuts=[cut * size.duration for cut in cuts])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.sampled_from([name for name in SIZES if name in SCENARIOS and name != "input_starved_training"]),
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3),
    st.randoms(),
)
def test_parts_are_those_of_all_ledgers_to_the_nanosecond(
    scenario: str, cuts: list[list[float]], random: Random
) -> None:
    """Random nodes and ledgers, in any order, some of them twice."""
    told: list[JobRecord] = []
    books = Counter[str]()
    for node, moments in enumerate(cuts):
        played = past(scenario, tuple(round(moment, 2) for moment in moments), node)
        job = min(played.books)
        books.update(played.books[job])
        told += [
            replace(each, owner=replace(each.owner, job_id="7"))
            for each in played.statements
            if each.owner.job_id == job
        ]
    told += [random.choice(told)]
    random.shuffle(told)
    found = join_records(told, job_id="7", at=LATER)
    assert booked(found) == {leak: time for leak, time in books.items() if time}
    assert found.gpu_hours == found.seen_gpu_hours == pytest.approx(books.total() / HOUR)
    assert len(found.nodes) == len(cuts)
    assert found.money == pytest.approx(2 * found.gpu_hours)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(LEAK_SCENARIOS))
def test_each_of_the_twelve_leaks_is_told_as_it_was_booked(scenario: str) -> None:
    row = EXPECTED[scenario.removesuffix("_twin")]
    gpus = row.twin_gpus if scenario.endswith("_twin") else row.gpus
    story = simulate(scenario, seed=1, period_seconds=5, duration_seconds=600, stories=LEAK_SCENARIOS, gpus=gpus)
    played = play(story.observations, cuts=[250])
    for job, books in played.books.items():
        found = join_records(played.statements, job_id=job, at=LATER)
        assert booked(found) == {leak: time for leak, time in books.items() if time}


# -- figures added up by hand --


def test_two_lives_and_two_nodes() -> None:
    again = stated(life="b", end=BEGIN + 7200, parts={"useful": HOUR, "data_stall": HOUR}, money={"USD": 5.0})
    other = stated(node="n2", end=BEGIN + 7200, paid=4 * HOUR, parts={"hung": 4 * HOUR}, money={"USD": 8.0})
    found = join(again, other, stated())
    assert booked(found) == {"hung": 4 * HOUR, "data_stall": 3 * HOUR // 2, "memory_bound": HOUR // 2,
                             "useful": 2 * HOUR}  # fmt: skip
    assert (found.gpu_hours, found.gpus, found.currency) == (8, 4, "USD")
    assert found.money == pytest.approx(17)
    assert found.when.seconds == 7200
    assert [(node.name, node.gpu_hours, node.product) for node in found.nodes] == [("n2", 4, 0), ("n1", 4, 0.5)]
    assert found.energy_kwh == pytest.approx(3)
    assert found.energy_useful == pytest.approx(0.5)
    assert (found.layers.gau, found.layers.ectr, found.layers.emfu) == (1, 2.5 / 8, 2 / 2.5)
    assert "the daemon of n1 began anew in the run: its 2 parts are added" in found.unseen


def test_money_of_a_leak_is_at_its_own_nodes_price() -> None:
    dear = stated(node="n2", parts={"hung": 2 * HOUR}, money={"USD": 20.0})
    found = join(stated(), dear)
    assert {part.name: part.money for part in found.parts} == {
        "hung": 20, "data_stall": 1, "memory_bound": 1, "useful": 2,
    }  # fmt: skip
    assert found.money == 24


def test_a_node_without_a_price_has_the_mean_of_the_rest_and_two_currencies_are_none() -> None:
    assert join(stated(), stated(node="n2", money={})).money == 8
    assert join(stated(), stated(node="n2", money={"EUR": 1.0})).money is None
    found = join(stated(money={"GPU-hours": 2.0}))
    assert (found.currency, found.money) == ("", None)
    assert "no price, or several currencies: amounts are GPU-hours" in found.unseen


def test_what_it_reported() -> None:
    told = stated(training=trained(), reported=0.4e18, reportable=1e18)
    found = join(told)
    truth = found.truth
    assert truth is not None
    assert (truth.mfu, truth.hfu) == (0.4, 0.5)
    assert truth.gap == pytest.approx(0.1)
    assert (truth.goodput, truth.progress, truth.steps, truth.rework_steps) == (0.6, 0.9, 100, 10)
    assert (truth.tokens, truth.tokens_per_gpu_second, truth.tokens_per_second) == (72_000, 10, 20)
    assert (truth.samples_per_gpu_second, truth.padding) == (0.1, 0.1)
    assert (truth.checkpoints, truth.checkpoint_seconds, truth.restarts, truth.recovery_seconds) == (4, 180, 2, 120)
    assert (truth.cost_per_token, truth.cost_per_step, truth.loss, truth.loss_events) == (
        4 / 72_000, 0.04, 2.5, {"spike": 3},
    )  # fmt: skip
    assert truth.target is not None
    assert (truth.target.seconds, truth.target.cost) == (1800, 2)
    (quality,) = truth.qualities
    assert (quality.start, quality.last, quality.target) == (0.2, 0.7, 0.6)
    assert quality.gained == pytest.approx(0.5)
    assert quality.track == ((1800, 0.6),)
    assert quality.cost_per_unit == pytest.approx(8)
    assert [(rank.rank, rank.of_median) for rank in found.ranks] == [("0", 0.9 / 0.75), ("1", 0.6 / 0.75)]
    assert {part.name: part.evidence for part in found.parts}["data_stall"] == "reported"


def test_steps_are_the_jobs_and_tokens_the_nodes() -> None:
    other = stated(node="n2", training=trained(steps=90, tokens=8_000.0, world=64))
    found = join(stated(training=trained()), other)
    assert found.truth is not None
    assert (found.truth.steps, found.truth.tokens, found.expected_gpus) == (100, 80_000, 64)
    assert any("speaks of 64 GPUs, 4 were seen" in line for line in found.unseen)


def test_a_counter_of_two_lives_is_added_and_a_gauge_is_the_last() -> None:
    again = stated(life="b", end=BEGIN + 7200, training=trained(steps=50, loss=1.5, step=150))
    found = join(stated(training=trained()), again)
    assert found.truth is not None
    assert (found.truth.steps, found.truth.loss, found.truth.step) == (150, 1.5, 150)


def test_what_its_engines_said() -> None:
    slow = serves(running=4.0, fill=0.25, latencies=(Latency("ttft", 0.1, 0.2, 0.3),))
    quick = serves(latencies=(Latency("ttft", 0.1, 0.1, 0.1), Latency("itl", 0.01, 0.02, 0.03)))
    found = join(stated(service=quick), stated(node="n2", service=slow))
    served = found.served
    assert served is not None
    assert (served.engines, served.running, served.waiting, served.batch_fill) == (("vllm",), 12, 4, 0.375)
    assert (served.tokens["generated"], served.acceptance, served.kv_most) == (7200, 0.6, None)
    assert [(each.kind, each.percentile, each.last, each.worst) for each in served.latencies] == [
        ("ttft", "p50", 0.1, 0.1), ("ttft", "p95", 0.2, 0.2), ("ttft", "p99", 0.3, 0.3),
        ("itl", "p50", 0.01, 0.01), ("itl", "p95", 0.02, 0.02), ("itl", "p99", 0.03, 0.03),
    ]  # fmt: skip
    assert served.advice == {"speculative_decoding": 0.5}
    assert any("those told last" in line for line in found.unseen)


def test_tensor_work_over_the_boards_peak() -> None:
    found = join(stated(flops=989.4e12 * 3600 * 0.3, tensor_seen=3600.0))
    assert found.ofu == pytest.approx(0.3, rel=1e-3)
    assert join(stated(flops=1e15, tensor_seen=3600.0, models=("a", "b"))).ofu is None


def test_failures_and_what_they_cost() -> None:
    parts = {"hung": HOUR // 2, "idle_allocation": HOUR // 4, "rework": HOUR // 4, "useful": HOUR}
    found = join(stated(parts=parts, happened={"hung": 2, "zombie": 1, "xid": 3}, training=trained()))
    assert [(each.kind, each.times, each.gpu_hours, each.money) for each in found.failures] == [
        ("hung", 2, 0.5, 1), ("zombie", 1, 0.25, 0.5), ("rework", 10, 0.25, 0.5), ("xid", 3, None, None),
        ("restart", 2, 0, 0),
    ]  # fmt: skip
    other = stated(node="n2", training=trained(restarts=1), happened={"hung": 1})
    both = join(stated(training=trained(), happened={"hung": 2}), other)
    assert {each.kind: each.times for each in both.failures} == {"hung": 3, "restart": 2, "rework": 10}
    calm = join(stated(parts={"idle_allocation": HOUR, "useful": HOUR}))
    assert calm.failures == ()


def test_what_the_energy_cost_and_emitted_is_of_what_was_told() -> None:
    told = join(stated(), energy=EnergyTerms(0.12, "EUR"), carbon=CarbonIntensity(400.0))
    assert told.co2_kg == pytest.approx(0.4)
    assert told.energy_money == pytest.approx(0.12)
    assert (told.currency, told.energy_currency) == ("USD", "EUR"), "the energy has a currency of its own"
    untold = join(stated())
    assert (untold.co2_kg, untold.energy_money, untold.energy_currency) == (None, UNSET, UNSET)


def test_each_leak_has_the_price_and_the_carbon_of_its_energy() -> None:
    found = join(stated(), stated(node="n2", energy={}), energy=EnergyTerms(0.3, "EUR"), carbon=CarbonIntensity(600.0))
    assert {part.name: (part.energy_kwh, part.energy_money, part.co2_kg) for part in found.parts} == {
        "useful": approximately(0.5, 0.15, 0.3), "data_stall": approximately(1 / 6, 0.05, 0.1),
        "memory_bound": approximately(1 / 3, 0.1, 0.2),
    }  # fmt: skip
    assert sum(part.energy_kwh for part in found.parts if part.energy_kwh is not UNSET) == found.energy_kwh
    unpriced = join(stated()).losses
    assert [part.energy_kwh for part in unpriced] == [pytest.approx(1 / 6), pytest.approx(1 / 3)]
    assert {(part.energy_money, part.co2_kg) for part in unpriced} == {(UNSET, UNSET)}
    assert {part.energy_kwh for part in join(stated(energy={}), energy=EnergyTerms(0.3, "EUR")).parts} == {UNSET}


def approximately(*values: float) -> tuple[Any, ...]:
    return tuple(pytest.approx(value) for value in values)


def test_the_text_and_the_page_show_the_energy_of_each_leak_with_its_price() -> None:
    found = join(stated(), energy=EnergyTerms(0.3, "EUR"), carbon=CarbonIntensity(600.0))
    text = render_text(report_tables(found))
    assert (
        """
Where the energy went   kWh    share   EUR  kg of CO2
memory_bound           0.33   33.3 %  0.10       0.20
data_stall             0.17   16.7 %  0.05       0.10
useful                 0.50   50.0 %  0.15       0.30
all                    1.00  100.0 %  0.30       0.60
"""
        in text
    )
    assert "1. data_stall: 0.50 GPU-hours, 1.00 USD, 0.1667 kWh for 0.05 EUR\n" in text
    assert "<span>0.1667 kWh for 0.05 EUR</span></p>" in render_html(found, tuple(report_tables(found)))
    unpriced = join(stated())
    shown = render_text(report_tables(unpriced))
    assert "Where the energy went" not in shown
    assert "1. data_stall: 0.50 GPU-hours, 1.00 USD\n" in shown
    assert "kWh" not in render_html(unpriced, ()), "a card without a price"


HOURS = (int(BEGIN) // 3600, int(BEGIN) // 3600 + 1)


def test_the_carbon_intensity_of_each_hour_counts_by_the_energy_used_in_it() -> None:
    samples = (sample(30, 3600, joules=0.6e6), sample(60, 3600, joules=0.6e6), sample(90, 7200, joules=3.6e6))
    run = stated(end=BEGIN + 5400, samples=samples)
    carbon = CarbonIntensity(hours=HOURS, grams=(600.0, 100.0))
    told = join(run, carbon=carbon)
    assert told.co2_kg == pytest.approx((600 / 6 + 100 * 5 / 6) / 1000), "a sixth of the energy is of the first hour"
    assert not [line for line in told.unseen if "carbon" in line]
    assert join(replace(run, samples=()), carbon=carbon).co2_kg == pytest.approx((600 * 2 + 100) / 3 / 1000), (
        "time-mean"
    )
    both = join(run, stated(node="n2"), carbon=carbon)
    assert both.co2_kg == pytest.approx((600 / 6 + 100 * 5 / 6 + 600) / 1000), "the other node ran in the first hour"
    again = stated(life="b", start=BEGIN + 5400, end=BEGIN + 7200)
    assert join(run, again, carbon=carbon).co2_kg == pytest.approx((600 / 6 + 100 * 5 / 6 + 100) / 1000)


def test_energy_of_hours_without_a_carbon_intensity_is_named_with_what_applies() -> None:
    run, first = stated(end=BEGIN + 7200), CarbonIntensity(hours=HOURS[:1], grams=(600.0,))
    told = join(run, carbon=replace(first, otherwise=100.0))
    assert told.co2_kg == pytest.approx(0.35)
    line = "50.0 % of the energy is of hours without a carbon intensity"
    assert f"{line}: for them it is grams_co2_per_kwh, 100" in told.unseen
    unknown = join(run, carbon=first)
    assert unknown.co2_kg is None
    assert f"{line}: set grams_co2_per_kwh for them, or complete the file, and its carbon is shown" in unknown.unseen
    assert join(stated(energy={}), carbon=first).co2_kg is None


def test_the_slice_that_would_have_held_it() -> None:
    found = join(stated(fitting="3g.40gb", unneeded=HOUR))
    assert (found.fitting, found.unneeded_gpu_hours) == ("3g.40gb", 1)


def test_bounds_of_an_estimate_are_those_of_all_records_and_a_certain_one_adds_what_it_booked() -> None:
    parts = {"exposed_communication": 3 * HOUR, "useful": HOUR}
    doubtful = stated(parts=parts, bounds={"exposed_communication": Bounds(HOUR, 4 * HOUR)})
    both = join(doubtful, stated(node="n2", parts=parts))
    found = {each.name: (each.low_gpu_hours, each.high_gpu_hours) for each in both.parts}
    assert found == {"exposed_communication": (4, 7), "useful": (UNSET, UNSET)}


def test_the_evidence_of_a_leak_is_that_of_most_of_its_time() -> None:
    parts = {"exposed_communication": 3 * HOUR, "useful": HOUR}
    first = stated(parts=parts, evidence={"exposed_communication": {"calibrated": 2 * HOUR, "estimated": HOUR}})
    second = stated(node="n2", parts=parts, evidence={"exposed_communication": {"reported": 3 * HOUR}})
    assert join(first).parts[0].evidence == "calibrated"
    assert join(first, second).parts[0].evidence == "reported"


def test_the_pipe_of_its_useful_work_is_that_of_most_nodes() -> None:
    fp64 = [stated(node=f"n{n}", useful_pipe="fp64") for n in (2, 3)]
    assert join(stated(), *fp64).useful_pipe == "fp64"
    assert join(stated()).useful_pipe is UNSET
    assert join(stated(useful_pipe="of a newer daemon")).useful_pipe is UNSET


def test_a_job_to_which_emfu_does_not_apply_has_no_product() -> None:
    found = join(stated(useful_pipe="none", energy={"other_compute": 1e6}))
    assert (found.layers.emfu, found.layers.product, found.energy_useful) == (None, None, None)
    assert found.layers.ectr is not None
    assert [node.product for node in found.nodes] == [None]


def test_how_it_went() -> None:
    samples = (sample(0, 0), sample(30, 3600, useful=0, joules=3.6e6), sample(60, 7200, useful=3600, joules=3.6e6))
    other = (sample(0, 0), sample(60, 7200, useful=7200))
    first, second = join(stated(samples=samples), stated(node="n2", samples=other)).course
    assert (first.start, first.end, first.gpus, first.floor, first.watts) == (0, 1800, 4, 0.5, 2000)
    assert (second.end, second.gpus, second.floor, second.watts) == (3600, 4, 1, 0)
    assert join(stated()).course == ()


def test_the_course_of_a_life_begins_where_the_one_before_ends() -> None:
    again = stated(life="b", end=BEGIN + 7200, samples=(sample(120, 7200),))
    pieces = join(stated(samples=(sample(0, 0), sample(60, 7200))), again).course
    assert [(piece.start, piece.end, piece.gpus) for piece in pieces] == [(0, 3600, 2), (3600, 7200, 2)]


def test_a_long_course_is_told_in_few_pieces_that_hold_all_of_it() -> None:
    samples = tuple(sample(minute / 10, 12 * minute, useful=6 * minute) for minute in range(601))
    found = join(stated(samples=samples)).course
    assert len(found) <= 96
    assert sum(piece.gpus * (piece.end - piece.start) for piece in found) == pytest.approx(7200)
    assert (found[0].start, found[-1].end) == (0, 3600)


# -- time that no daemon counted --


def test_between_two_lives_nobody_counted() -> None:
    samples = (sample(105, 1800), sample(120, 3600))
    again = stated(life="b", end=BEGIN + 7200, paid=HOUR, parts={"useful": HOUR}, samples=samples, money={"USD": 2.0})
    found = join(stated(), again)
    assert booked(found)["unobserved"] == HOUR
    assert (found.gpu_hours, found.seen_gpu_hours, found.coverage) == (4, 3, 0.75)
    assert (found.nodes[0].unseen_gpu_hours, found.money) == (1, 8)
    assert "node n1: 1.00 GPU-hours are unobserved" in found.unseen[0]


def test_a_life_that_counted_from_where_the_other_ended_leaves_nothing_out() -> None:
    samples = (sample(90, 3600), sample(120, 7200))
    again = stated(life="b", end=BEGIN + 7200, samples=samples)
    assert "unobserved" not in booked(join(stated(), again))


def test_a_daemon_that_came_late() -> None:
    samples = (sample(30, 0), sample(60, 3600))
    found = join(stated(paid=HOUR, parts={"useful": HOUR}, samples=samples))
    assert booked(found) == {"useful": HOUR, "unobserved": HOUR}


def test_a_node_that_fell_silent_owes_the_rest_and_one_that_saw_the_end_does_not() -> None:
    whole = stated(node="n2", end=BEGIN + 7200, paid=4 * HOUR, parts={"useful": 4 * HOUR})
    assert booked(join(stated(running=True), whole))["unobserved"] == 2 * HOUR
    assert "unobserved" not in booked(join(stated(running=False), whole))
    young = stated(running=True, end=BEGIN + 7100, paid=HOUR, parts={"useful": HOUR})
    assert "unobserved" not in booked(join(young, whole))


def test_a_job_of_kubernetes_goes_on_without_a_node_that_was_lost() -> None:
    pod = owner(namespace="ml")
    whole = stated(node="n2", end=BEGIN + 7200, paid=4 * HOUR, parts={"useful": 4 * HOUR}, owner=pod)
    found = join(stated(running=True, owner=pod), whole)
    assert booked(found)["unobserved"] == 2 * HOUR // 12
    assert "node n1 fell silent while it held GPUs, and the job went on: 1.83 GPU-hours are not" in "\n".join(
        found.unseen
    )


def test_a_replica_that_was_away_is_not_charged() -> None:
    """In one ledger its absence is known; a new ledger only knows when it returned."""
    whole = stated(node="n2", end=BEGIN + 14_400, whole_gpus=0.0)
    for later, hours in ((stated(), 0), (stated(life="b"), 2 / 12)):
        again = replace(later, start=BEGIN + 10_800, end=BEGIN + 14_400)
        assert booked(join(whole, stated(), again)).get("unobserved", 0) == round(hours * HOUR)
        assert "unobserved" not in booked(join(whole, stated(left=True), again))
    for life, noted in (("a", False), ("b", True)):
        notes = join(whole, stated(), replace(again, life=life)).unseen
        assert any("began anew" in note for note in notes) is noted


def test_a_job_over_eight_nodes_of_which_one_tells_nothing() -> None:
    told = [stated(node=f"n{n}", owner=owner(nodes=8)) for n in range(7)]
    found = join(*told, source="nodes", unanswered=("http://n7:19400 cannot be reached (refused)",))
    assert (found.expected_nodes, len(found.nodes), found.source) == (8, 7, "nodes")
    said = "\n".join(found.unseen)
    assert "http://n7:19400 cannot be reached (refused): what it saw of the job is not in this receipt" in said
    assert "1 of the job's 8 nodes told nothing: about 2 GPUs, 2.00 GPU-hours, 12.5 % of the job" in said
    assert found.gpu_hours == 14


def test_the_job_says_how_many_gpus_are_missing() -> None:
    told = [stated(node=f"n{n}", owner=owner(nodes=4), training=trained(world=20)) for n in range(3)]
    said = join(*told).unseen
    assert [line for line in said if "about 14 GPUs" in line]
    assert not [line for line in said if "speaks of" in line]


# -- which records are one run --


def test_the_last_run_and_the_one_before() -> None:
    again = stated(start=BEGIN + 7200, end=BEGIN + 10_800)
    found = join(stated(), again)
    assert (found.when.start, found.gpu_hours) == (BEGIN + 7200, 2)
    assert any("an earlier run under the same id ended 2026-01-01 01:00 UTC" in line for line in found.unseen)
    before = join_records([stated(), again], job_id="7", at=BEGIN + 7000)
    assert (before.when.start, before.unseen[-1].startswith("an earlier")) == (BEGIN, False)


def test_nodes_that_had_it_one_after_the_other_are_one_run() -> None:
    hours = range(3)
    told = [stated(node=f"n{n}", start=BEGIN + 3600 * n, end=BEGIN + 3600 * (n + 1)) for n in hours]
    found = join(*told)
    assert (found.gpu_hours, found.when.seconds) == (6, 10_800)


def test_the_same_life_told_twice_counts_once_as_it_was_told_last() -> None:
    older = stated(running=True, end=BEGIN + 3000, paid=HOUR, parts={"useful": HOUR})
    found = join(older, stated(), stated(running=True))
    assert (found.gpu_hours, found.when.running) == (2, False)


def test_two_runs_of_one_life_that_follow_at_once_are_both_counted() -> None:
    again = stated(start=BEGIN + 3600, end=BEGIN + 7200)
    assert join(stated(), again).gpu_hours == 4


def test_it_runs_while_any_node_says_so_of_now() -> None:
    assert join(stated(running=True), stated(node="n2")).when.running is True
    old = stated(running=True, end=BEGIN + 3000)
    assert join(old, stated(node="n2")).when.running is False


def test_a_closed_life_is_no_end() -> None:
    again = stated(life="b", running=True, end=BEGIN + 7200)
    assert join(stated(), again).when.running is True


def test_a_job_nobody_knows() -> None:
    with pytest.raises(ReportError, match="no source has a record of job 8"):
        join_records([stated()], job_id="8", at=LATER)
    with pytest.raises(ReportError, match="no source has a record"):
        join_records([stated()], job_id="7", at=BEGIN - 1)
    with pytest.raises(ReportError, match=r"or other nodes and stores; n7 is down$"):
        join_records([], job_id="7", at=LATER, sources=RecordSources(unanswered=("n7 is down",)))


def test_a_leak_of_a_newer_daemon_is_a_loss() -> None:
    found = join(stated(parts={"quantum_noise": HOUR, "useful": HOUR}))
    assert [(part.name, part.layer) for part in found.losses] == [("quantum_noise", "emfu")]
    assert "quantum_noise" not in LEAK_NAMES


# -- rows that a disk has damaged --


def test_a_statement_that_ends_before_it_begins_ends_no_report() -> None:
    """Found by fuzzing the store's rows."""
    backwards = replace(stated(), end=BEGIN - 1e5)
    assert join(backwards).parts is not None


def test_moments_that_floats_cannot_tell_apart_make_no_piece() -> None:
    """Likewise: seconds since a beginning so far back that a minute is nothing beside it."""
    damaged = replace(stated(), start=-1e20, samples=(sample(1, 60.0), sample(2, 120.0), sample(3, 180.0)))
    assert all(piece.end > piece.start for piece in join(damaged).course)


def test_causes_of_waiting_add_up_over_nodes_the_most_first() -> None:
    nodes = (
        stated(stalls={"memory": HOUR // 4, "storage": HOUR // 4}),
        stated(node="n2", gpus={"GPU-c": "0", "GPU-d": "1"}, stalls={"storage": HOUR // 4}),
    )
    assert list(join_records(nodes, job_id="7", at=LATER).stalls.items()) == [("storage", 0.5), ("memory", 0.25)]
    assert join_records([stated()], job_id="7", at=LATER).stalls == {}
