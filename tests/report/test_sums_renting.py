"""Own or rent, and the gain of a higher eMFU, computed by hand."""

import pytest

from exporter.report.ranking import summary_tables
from exporter.report.summary import RentOffer, compare_rent, emfu_gain, parse_offer, with_comparisons
from exporter.report.text import render_text
from tests.report.test_sums import lot, sums


def test_offers_as_people_write_them() -> None:
    assert parse_offer("4.00@0.95") == parse_offer("4@95%") == RentOffer("4.00 at 95 %", 4.0, 0.95)
    assert parse_offer("spot=.5@1") == RentOffer("spot", 0.5, 1.0)


@pytest.mark.parametrize(
    "words", ["4.00", "@0.9", "4@", "a=@0.9", "-4@0.9", "4@1.5", "4@0", "4@101%", "0@0.5", "nan@0.5", "4@0,9"]
)
def test_what_is_no_offer_says_what_one_is(words: str) -> None:
    with pytest.raises(ValueError, match=r"such as 4\.00@0\.95|above 0"):
        parse_offer(words)


def test_a_useful_hour_is_the_price_over_the_share() -> None:
    found = compare_rent(sums(lot(useful=3, idle_allocation=7, money=20)), parse_offer("4@0.8"))
    assert found.own_per_useful_hour == pytest.approx(20 / 3)
    assert found.per_useful_hour == 5
    assert found.break_even == pytest.approx(0.4)
    assert found.instead == pytest.approx(15)


def test_it_is_said_who_is_cheaper_and_from_when_on() -> None:
    dear = sums(lot(useful=3, idle_allocation=7, money=20))
    assert "15.00 USD, 5.00 less; own GPUs pay from 40.0 % useful on; here it is 30.0 %" in told(dear, "4@0.8")
    cheap = sums(lot(useful=9, idle_allocation=1, money=20))
    assert "45.00 USD, 25.00 more; own GPUs pay from 40.0 % useful on; here it is 90.0 %" in told(cheap, "4@0.8")
    assert "no own GPU at this price can be as cheap" in told(dear, "1@1")


def told(found: object, *offers: str) -> str:
    made = with_comparisons(found, offers=tuple(map(parse_offer, offers)))  # type: ignore[arg-type]
    return " ".join(render_text(summary_tables(made)).split())


def test_nothing_useful_is_beaten_by_any_rent() -> None:
    found = sums(lot(idle_allocation=7, money=20))
    assert compare_rent(found, parse_offer("4@0.8")).own_per_useful_hour is None
    assert "any rent is cheaper" in told(found, "4@0.8")


def test_without_a_price_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match=r"no price.*\[prices\]"):
        compare_rent(sums(lot(useful=1)), parse_offer("4@0.8"))


def test_a_higher_emfu_gives_back_the_difference_times_what_computes() -> None:
    # 10 GPUs for an hour, half of them computing, at 40 %.
    found = emfu_gain(sums(lot(idle_allocation=5, memory_bound=3, useful=2, money=20)), 0.6)
    assert found is not None
    assert [found.gpus, found.gpu_hours, found.money] == pytest.approx([1, 1, 2])
    assert found.time_saved == pytest.approx(1 / 3)


def test_what_is_that_high_or_not_known_has_nothing_to_give() -> None:
    assert emfu_gain(sums(lot(useful=6, memory_bound=4)), 0.6) is None
    assert emfu_gain(sums(lot(useful=5.9999, memory_bound=4.0001)), 0.6) is None
    assert emfu_gain(sums(lot(idle_allocation=1)), 0.6) is None
    assert emfu_gain(sums(lot(unresolved=1)), 0.6) is None
    assert with_comparisons(sums(lot(useful=1)), emfu=(0.6,)).raised == ()
