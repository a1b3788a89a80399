"""Gains of changes: the figures of the documentation on simulated jobs, and no gain is counted twice."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.report.analysis import estimate_changes
from exporter.report.model import JobReport, WhatIf
from exporter.report.records import join_records
from exporter.report.text import WIDTH, render_text, report_tables
from exporter.simulate.simulation import simulate
from tests.report.answers import layers, part, receipt
from tests.report.lives import play
from tests.report.stated import BEGIN
from tests.report.sum_fleets import trained

DAY = 86_400.0
HOUR = 3600.0


@cache
def job(nodes: int, days: int, *, gpus: int = 8) -> JobReport:
    """Simulate nodes of H100 at 2.50 USD whose tensor cores run at 40 % all the time."""
    stories = {"story": trained(0.4, tells=False)}
    period = min(days, 4) * HOUR
    story = simulate("story", gpus=gpus, period_seconds=period, duration_seconds=days * DAY, stories=stories)
    (told,) = play(story.observations, price=2.5, sample_seconds=DAY).statements
    return join_records(
        [replace(told, node=f"n{n}", life=f"n{n}") for n in range(nodes)],
        job_id=told.owner.job_id,
        at=BEGIN + 400 * DAY,
    )


def only(found: JobReport, kind: str, **wanted: float) -> WhatIf:
    (each,) = [each for each in estimate_changes(found, **wanted) if each.kind == kind]
    return each


def test_128_gpus_at_40_percent_do_the_work_of_51_and_60_percent_give_back_about_25() -> None:
    found = job(16, 1)
    assert found.gpus == 128
    assert found.equivalent_gpus == pytest.approx(51.2, rel=1e-3)
    assert only(found, "raise_emfu", emfu=0.6).gained_gpus == pytest.approx(25.6, rel=1e-2)
    said = render_text(report_tables(replace(found, what_if=estimate_changes(found, emfu=0.6))))
    assert "useful work: that of 51.2 of 128 GPUs at their peak" in said
    assert "more work: that of 25.6 GPUs at their peak" in said
    assert max(map(len, said.splitlines())) <= WIDTH


@pytest.mark.slow
def test_256_gpus_for_90_days() -> None:
    found = job(128, 90, gpus=2)
    assert (found.gpus, found.when.seconds) == (256, 90 * DAY)
    assert found.money == pytest.approx(1_382_400)
    raised = only(found, "raise_emfu", emfu=0.6)
    assert raised.gained_gpus == pytest.approx(51.2, rel=1e-2)
    assert raised.gained_money == pytest.approx(276_480, rel=1e-2)
    assert raised.sooner == pytest.approx(30 * DAY, rel=1e-2)
    assert raised.share == pytest.approx(1 / 3, rel=1e-2)
    assert raised.money == pytest.approx(460_800, rel=1e-2)
    assert raised.fewer_gpus == pytest.approx(256 / 3, rel=1e-2)


# -- added up by hand: 8 GPUs for 10 hours --


def half(name: str = "data_stall", layer: str = "ectr", **changed: object) -> JobReport:
    """Build a report: half useful, a quarter lost in kernels, a quarter to another leak; 2 USD an hour."""
    parts = (
        part(name, 20, share=0.25, layer=layer), part("memory_bound", 20, share=0.25, layer="emfu"),
        part("useful", 40, share=0.5, layer="useful", evidence=""),
    )  # fmt: skip
    return receipt(parts=parts, layers=layers({name: 20, "memory_bound": 20, "useful": 40}), money=160.0,
                   currency="USD", **changed)  # fmt: skip


def test_without_the_biggest_leak() -> None:
    (each,) = estimate_changes(half())
    assert (each.kind, each.of, each.gpu_hours, each.share) == ("fix_leak", "data_stall", 20, 0.25)
    assert (each.money, each.fewer_gpus, each.sooner) == (40, 2, 2.5 * HOUR)
    # The same time would hold 80 / 60 of the work: 13.3 GPU-hours at their peak more, on 1.33 GPUs.
    assert each.gained_gpus == pytest.approx(40 * 20 / 60 / 10)
    assert each.gained_money == pytest.approx(2 * 40 * 20 / 60)


def test_a_higher_emfu_moves_only_time_in_kernels() -> None:
    each = only(half(), "raise_emfu", emfu=0.8)
    # Of 60 GPU-hours in kernels two thirds are useful; at 80 % the same work needs 50.
    assert each.gpu_hours == pytest.approx(10)
    assert each.sooner == pytest.approx(10 / 80 * 10 * HOUR)
    assert each.gained_gpus == pytest.approx(60 * (0.8 - 2 / 3) / 10)
    assert each.of == "80 %"


def test_unobserved_time_stays() -> None:
    parts = (*half().parts, part("unobserved", 80, share=0.5, layer="unobserved", evidence=""))
    found = replace(half(), gpu_hours=160.0, parts=parts, money=320.0)
    assert estimate_changes(found)[0].gained_gpus == pytest.approx(40 * 20 / 60 / 10)
    assert only(found, "raise_emfu", emfu=0.8).gpu_hours == pytest.approx(10)


@pytest.mark.parametrize("wanted", [0.5, 2 / 3])
def test_an_emfu_it_has_already_gains_nothing(wanted: float) -> None:
    assert [each.kind for each in estimate_changes(half(), emfu=wanted)] == ["fix_leak"]


def test_a_smaller_slice_frees_a_part_and_hurries_nobody() -> None:
    found = estimate_changes(half(fitting="1g.10gb", unneeded_gpu_hours=40.0))
    assert [each.kind for each in found] == ["right_size", "fix_leak"]
    assert (found[0].of, found[0].money, found[0].fewer_gpus) == ("1g.10gb", 80, 4)
    assert (found[0].sooner, found[0].gained_gpus, found[0].gained_money) == (None, None, None)


def test_without_what_is_too_large_it_is_not_sooner_done() -> None:
    each = only(half("oversized_allocation", "gau"), "fix_leak")
    assert (each.gpu_hours, each.sooner, each.gained_gpus) == (20, None, None)


def test_nodes_that_never_ran_a_kernel_can_be_left_out() -> None:
    (node,) = half().nodes
    idle = replace(node, name="b", gau=0.0, gpu_hours=10.0, unseen_gpu_hours=2.0)
    each = only(half(nodes=(idle, replace(node, gau=1.0))), "right_size")
    assert (each.of, each.gpu_hours) == ("without b", 8)


def test_a_job_that_lost_all_cannot_say_what_more_work_would_be() -> None:
    parts = (part("hung", 80, share=1.0),)
    (each,) = estimate_changes(receipt(parts=parts, layers=layers({"hung": 80})))
    assert (each.gpu_hours, each.gained_gpus, each.money) == (80, None, None)


def test_a_job_of_no_time_or_no_loss_has_nothing_to_gain() -> None:
    assert estimate_changes(receipt(gpu_hours=0.0)) == ()
    assert estimate_changes(receipt(when=replace(receipt().when, end=0.0))) == ()
    assert estimate_changes(receipt(parts=(part("useful", 80, share=1.0, layer="useful", evidence=""),))) == ()


@given(st.floats(0.01, 1.0), st.lists(st.floats(0.001, 50), min_size=4, max_size=4))
def test_no_change_gives_back_more_than_was_lost(wanted: float, hours: list[float]) -> None:
    gau, ectr, emfu, useful = hours
    total = sum(hours)
    parts = tuple(
        part(name, each, share=each / total, layer=layer)
        for name, layer, each in (
            ("idle_allocation", "gau", gau), ("hung", "ectr", ectr), ("memory_bound", "emfu", emfu),
            ("useful", "useful", useful),
        )
    )  # fmt: skip
    by_leak = {each.name: each.gpu_hours for each in parts}
    order = tuple(sorted(parts, key=lambda each: -each.gpu_hours))
    found = receipt(parts=order, gpu_hours=total, layers=layers(by_leak))
    lost = gau + ectr + emfu
    for each in estimate_changes(found, emfu=wanted):
        assert 0 < each.gpu_hours <= lost * (1 + 1e-9)
        assert each.gained_gpus is not None
        assert each.gained_gpus * 10 <= lost * (1 + 1e-9) or each.kind == "fix_leak"
        if each.kind == "raise_emfu":
            assert each.gpu_hours <= emfu * (1 + 1e-9)
            assert each.gained_gpus * 10 <= emfu * (1 + 1e-9)
        assert each.sooner is not None
        assert each.sooner < 10 * HOUR
