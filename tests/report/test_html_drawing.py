"""Drawings: they state what the report states, with shapes of the right size, inside the frame, without overlaps."""

from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.core.leaks import LEAK_NAMES
from exporter.report.charts import waterfall_steps, waterfall_total
from exporter.report.html import render_html
from exporter.report.model import LayerRatios
from tests.report import pages
from tests.report.drawings import Found, absent, drawn, fills, named, wide, words
from tests.report.read_page import Page, check
from tests.report.test_html import ALL


@pytest.mark.parametrize("name", ALL)
def test_all_is_inside_and_no_words_lie_over_others(name: str) -> None:
    for drawing in drawn(ALL[name]()):
        check(drawing)


@pytest.mark.parametrize("name", ALL)
def test_each_has_a_title_and_says_in_words_what_it_shows(name: str) -> None:
    for drawing in drawn(ALL[name]()):
        title, said = drawing.inside[:2]
        assert drawing.facts["aria-labelledby"] == f"{title.facts['id']} {said.facts['id']}"
        assert (title.tag, said.tag) == ("title", "desc")
        assert title.words
        assert said.words


@pytest.mark.parametrize("device", ["wide", "narrow"])
def test_who_does_not_see_the_waterfall_is_told_all_of_it(device: str) -> None:
    (said,) = named(pages.every_leak(), f"waterfall-{device}").all("desc")
    told = said.words.split("; ")
    assert (told[0], told[-1]) == (
        "paid 601.6k GPU-hours (100.0 %), 1,203,197.29 USD", "useful 150k GPU-hours (24.9 %), 300,000.00 USD",
    )  # fmt: skip
    assert len(told) == 28, "none stands together with others"
    assert "hung 56,250 GPU-hours (9.4 %), 112,500.00 USD" in told


@pytest.mark.parametrize(
    ("found", "key", "words"),
    [
        (pages.full(), "layers", "GAU: held and working 95.0 %, \N{MULTIPLICATION SIGN} ECTR: computing 71.0 %"),
        (pages.full(), "nodes", "n1 40.0 % (most lost to data stall, 20.0 %), n2 50.0 %"),
        (pages.full(), "ranks", "rank 9 on n2 2.2 s, rank 8 on n2 1.2 s"),
        (pages.full(), "quality", "accuracy over 1 h 30 min: from 0.2 to 0.7, best 0.7, target 0.65"),
        (pages.full(), "course", "Useful share over 2 h 00 min: 0.0 % at first, 38.0 % at last, least 0.0 % after 0 s"),
        (pages.two(), "both", "job 41: useful 44.7 %, lost model FLOPs (eMFU) 22.3 %"),
        (pages.two(), "differences", "useful +15.3 points (44.7 % to 60.0 %)"),
        (pages.many(), "ranking", "ada 560.00 USD (30.0 % useful, most to data stall)"),
        (pages.many(), "trend", "2026-01-01 00:00 UTC 60 GPU-hours, 60.0 % useful"),
        (pages.many(), "rents", "own 6.67 USD, rented: cloud 4.21 USD"),
    ],
)  # fmt: skip
def test_the_others_are_told_too(found: Found, key: str, words: str) -> None:
    (said,) = named(found, key).all("desc")
    assert words in said.words


def test_the_last_of_an_odd_number_is_as_wide_as_two() -> None:
    def classes(found: Found) -> list[str]:
        return [each.facts["class"] for each in Page(render_html(found, [])).all("figure")]

    assert classes(pages.full()) == ["whole", "half", "half", "half", "half", "whole"]
    found = pages.full()
    assert classes(replace(found, truth=None)) == ["whole", *["half"] * 4]
    assert classes(pages.all_useful()) == ["whole", "whole"]


amounts = st.dictionaries(st.sampled_from(sorted({*LEAK_NAMES, "useful", "unresolved", "unobserved"})),
                          st.floats(1e-6, 1e9), min_size=1)  # fmt: skip


@given(amounts, st.sampled_from([None, 2.0, 1e6]))
def test_whatever_was_lost_it_can_be_drawn_and_the_steps_end_at_what_is_useful(
    hours: dict[str, float], price: float | None
) -> None:
    found = replace(pages.full(), parts=pages.parts(hours, price=price), gpu_hours=sum(hours.values()),
                    money=price and sum(hours.values()) * price)  # fmt: skip
    for drawing in drawn(found):
        check(drawing)
    whole, falls = sum(hours.values()), waterfall_steps(waterfall_total(found))
    assert (falls[0].name, falls[-1].name) == ("paid", "useful")
    for one, following in pairwise(falls[1:]):
        assert following.before == pytest.approx(one.after, abs=1e-9)
    assert falls[1].before == pytest.approx(1 if len(falls) > 2 or hours.get("useful") else 0)
    assert falls[-1].before == pytest.approx(hours.get("useful", 0) / whole, abs=1e-9)
    for step in falls[1:-1]:
        assert step.before - step.after == pytest.approx(step.hours / whole, abs=1e-9)


# -- the waterfall --


def test_steps_stand_in_the_order_of_layers_the_larger_first() -> None:
    assert [step.name for step in waterfall_steps(waterfall_total(pages.full()))] == [
        "paid", "unobserved", "idle allocation", "exposed communication", "data stall", "checkpoint", "throttled",
        "memory bound", "useful",
    ]  # fmt: skip


def test_small_losses_of_a_layer_stand_together_with_their_sums() -> None:
    found = waterfall_steps(
        waterfall_total(pages.made({"hung": 1, "startup": 2, "checkpoint": 500, "throttled": 3, "useful": 494})),
        min_share=0.005,
    )
    assert [step.name for step in found] == ["paid", "checkpoint", "2 smaller leaks", "throttled", "useful"]
    together = found[2]
    assert (together.kind, together.hours, together.money, together.share) == ("ectr", 3, 6, "0.3 %")


def test_columns_are_as_high_as_their_share_and_named_with_their_figures() -> None:
    drawing = named(pages.full(), "waterfall-wide")
    high = {each.facts["class"]: each.number("height") for each in drawing.all("rect")}
    assert high["fill useful"] / high["fill paid"] == pytest.approx(14.3 / 32, abs=0.001)
    assert high["fill gau"] / high["fill paid"] == pytest.approx(0.05, abs=0.001)
    said = words(drawing)
    for each in ("exposed", "communication", "12.3 %", "3.95 GPU-h", "7.90 USD", "lost computing time (ECTR)", "0.6 %"):
        assert each in said
    tops = [each.number("y") for each in drawing.all("rect") if each.facts["class"].startswith("fill")
            and each.number("height") > 3]  # fmt: skip
    assert tops[0] == 46
    assert tops == sorted(tops), "each begins where the one before ended"


def test_where_columns_have_no_room_there_are_rows_and_none_is_without_its_layer() -> None:
    drawing = named(pages.every_leak(), "waterfall-wide")
    said = words(drawing)
    assert "prefill decode interference" in said
    assert "9 smaller leaks" in said
    assert [said.count(layer) for layer in ("GAU", "ECTR", "eMFU")] == [3, 11, 2]
    assert "1,203,197.29 USD" in said
    assert sum(wide(drawing, "gau")) / wide(drawing, "paid")[0] == pytest.approx(0.2911, abs=0.006)


def test_on_a_phone_every_step_is_a_row() -> None:
    drawing = named(pages.full(), "waterfall-narrow")
    assert drawing.facts["viewbox"].startswith("0 0 360 ")
    assert wide(drawing, "paid") == [360]
    assert wide(drawing, "useful") == [pytest.approx(360 * 14.3 / 32, abs=0.1)]
    (allocation,) = fills(drawing, "gau")
    assert allocation.number("x") + allocation.number("width") == pytest.approx(360 * (1 - 0.2 / 32), abs=0.1)
    assert {"3.95 GPU-hours, 7.90 USD", "exposed communication", "ECTR"} <= set(words(drawing))


def test_what_was_not_seen_and_what_cannot_be_judged_look_different() -> None:
    drawing = named(pages.every_leak(), "waterfall-wide")
    assert len(fills(drawing, "unobserved")) == len(fills(drawing, "unresolved")) == 1
    assert {"unobserved", "unresolved"} <= set(words(drawing))


def test_without_time_there_is_no_waterfall_and_without_use_there_is_a_zero() -> None:
    assert absent(pages.empty(), "waterfall")
    drawing = named(pages.one_leak(), "waterfall-wide")
    assert words(drawing).count("0.00 GPU-h") == 1
    assert not any("USD" in each for each in words(drawing))


# -- layers, nodes, ranks --


def test_each_layer_is_a_share_of_the_one_above() -> None:
    drawing = named(pages.full(), "layers")
    total = wide(drawing, "paid")[0]
    kept = [each / total for each in wide(drawing, "kept")]
    known = pages.full().layers
    assert known.gau
    assert known.ectr
    assert kept == [pytest.approx(value, abs=0.001) for value in (known.gau, known.gau * known.ectr, known.product)]
    assert wide(drawing, "useful")[0] / total == pytest.approx(0.4497, abs=0.001)
    assert not fills(drawing, "unresolved")
    assert sum(wide(drawing, "gau")) / total == pytest.approx(1 - known.gau, abs=0.001)


def test_what_is_not_resolved_lies_between_the_least_and_the_most() -> None:
    drawing = named(pages.every_leak(), "layers")
    total = wide(drawing, "paid")[0]
    known = pages.every_leak().layers
    assert known.product
    assert known.floor
    assert wide(drawing, "useful")[0] / total == pytest.approx(known.floor, abs=0.002)
    assert wide(drawing, "unresolved")[0] / total == pytest.approx(known.product - known.floor, abs=0.002)
    assert any(each.startswith("at least 25.4 %") for each in words(drawing))


def test_layers_that_nobody_knows_are_not_drawn_and_one_that_is_not_known_is_nothing() -> None:
    assert absent(pages.unseen(), "layers")
    known = LayerRatios(gau=0.5, ectr=None, emfu=None, product=0.0, floor=0.0)
    drawing = named(replace(pages.full(), layers=known), "layers")
    assert words(drawing).count("-") == 2
    assert not fills(drawing, "useful")


def test_a_single_node_has_no_spread_and_many_have_one() -> None:
    assert absent(pages.all_useful(), "nodes")
    two = named(pages.full(), "nodes")
    assert wide(two, "useful") == [pytest.approx(144), pytest.approx(180)]
    assert "most lost to data stall, 20.0 %" in words(two)
    many = named(pages.every_leak(), "nodes")
    assert "all 128 nodes" in words(many)
    assert len([each for each in words(many) if each.startswith("gpu-node-")]) == 10
    assert len(fills(many, "busy")) == 39, "60 bins over 0 to 100 %, and they have 0 to 63.5 %"


def test_ranks_are_drawn_to_the_slowest_with_the_median_as_a_mark() -> None:
    drawing = named(pages.full(), "ranks")
    assert wide(drawing, "busy") == [pytest.approx(360 * busy / 2.2, abs=0.1) for busy in (2.2, 1.2, 1.1, 1.0)]
    assert [each.number("x1") for each in drawing.all("line")] == [pytest.approx(360 * 1.15 / 2.2, abs=0.1)] * 4
    assert "1.91 of the median" in words(drawing)
    assert absent(replace(pages.full(), ranks=pages.full().ranks[:1]), "ranks")
    assert "all 1024 ranks" in words(named(pages.every_leak(), "ranks"))


def test_a_rank_that_told_no_number_is_not_drawn_and_spoils_nothing() -> None:
    found = pages.full().ranks
    odd = (replace(found[0], busy_seconds=nan), replace(found[1], busy_seconds=inf), *found[2:])
    assert wide(named(replace(pages.full(), ranks=odd), "ranks"), "busy") == [360, pytest.approx(327.3)]
    assert absent(replace(pages.full(), ranks=odd[:3]), "ranks")
    assert absent(replace(pages.full(), ranks=tuple(replace(each, busy_seconds=0.0) for each in found)), "ranks")


def test_the_tenth_step_makes_rows_of_columns_and_no_name_is_cut() -> None:
    names = (
        "hung",
        "startup",
        "data_stall",
        "throttled",
        "exposed_communication",
        "unattributed_stall",
        "low_parallelism",
    )
    nine = named(pages.made(dict.fromkeys((*names, "useful"), 1.0)), "waterfall-wide")
    ten = named(pages.made(dict.fromkeys((*names, "padding", "useful"), 1.0)), "waterfall-wide")
    assert "lost computing time (ECTR)" in words(nine)
    assert "lost computing time (ECTR)" not in words(ten)
    assert not any("…" in each for drawing in (nine, ten) for each in words(drawing))
