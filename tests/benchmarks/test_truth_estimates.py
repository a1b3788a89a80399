"""The errors of leaks are told as they are: sensors made worse, sums and signs by hand, stories played in earnest."""

from typing import Any

import pytest

from benchmarks.truth.conditions import CONDITIONS, coarse, heard
from benchmarks.truth.estimates import ESTIMATES, SUBJECTS, Found, curves, errors, examined, losers, rows, table
from benchmarks.truth.mechanisms import MECHANISMS
from benchmarks.truth.mechanisms import found as found_alone
from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import Reading
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.simulation import simulate

BY_NAME = {condition.name: condition for condition in CONDITIONS}
PLACES = {condition.name: place for place, condition in enumerate(CONDITIONS)}


def found(condition: str = "as it is", **said: Any) -> Found:
    row: dict[str, Any] = {
        "subject": 0, "condition": PLACES[condition], "seed": 1, "expected": 0.5, "booked": 0.5,
        "spent": {"memory_bound": 0.5, "useful": 0.5}, "lost": 0, "readings": 10,
    }  # fmt: skip
    return Found(**(row | said))


def everywhere(**said: Any) -> list[Found]:
    return [found(condition.name, **said) for condition in CONDITIONS]


def test_every_leak_has_its_story() -> None:
    """Of the three outcomes what is worth unknown is no leak, and shows where counters are missing."""
    named = {name for subject in SUBJECTS for name in subject.names}
    assert set(LEAK_NAMES) - named == {"unresolved"}


def test_a_coarse_reading_counts_in_whole_units() -> None:
    reading = coarse(
        Reading("GPU-0", 0, 1, gr_engine_active=0.987, tensor_active=None, power_watts=321.4,
                pcie_tx_bytes_per_second=1_500_000.0, sm_clock_hz=1_815e6)
    )  # fmt: skip
    assert reading.gr_engine_active == pytest.approx(0.99)
    assert (reading.tensor_active, reading.power_watts) == (None, 321.0)
    assert (reading.pcie_tx_bytes_per_second, reading.sm_clock_hz) == (1 << 20, 1_815e6)


@pytest.mark.parametrize("name", [condition.name for condition in CONDITIONS])
def test_a_condition_spoils_what_it_says_and_no_more(name: str) -> None:
    story = simulate("memory_bound", stories=LEAK_SCENARIOS, gpus=1, period_seconds=5, seed=1, duration_seconds=200)
    clean, spoilt = (list(heard(story, BY_NAME[which])) for which in ("as it is", name))
    assert len(clean) == len(spoilt)
    said = [[] if BY_NAME[name].silent else one.reports for one in clean]
    assert [list(one.reports) for one in spoilt] == list(map(list, said)), "what programs say is not the sensors'"
    changed = {
        field
        for a, b in zip(clean, spoilt, strict=True)
        for x, y in zip(a.readings, b.readings, strict=True)
        for field in Reading.__struct_fields__
        if getattr(x, field) != getattr(y, field)
    }
    missing = set(BY_NAME[name].missing)
    assert missing <= changed | {field for field in missing if getattr(clean[-1].readings[0], field) is None}
    if name in ("as it is", "each 30 s", "no word", "no word, 1 s"):
        assert not changed
    elif missing:
        assert changed <= missing
    else:
        assert {"dram_active", "power_watts"} <= changed


def test_errors_are_booked_less_true_in_points() -> None:
    told = errors([found(booked=0.47), found(booked=0.52, seed=2), found("no DRAM", booked=0.0)])
    assert told[0, PLACES["as it is"]] == pytest.approx([-3.0, 2.0])
    assert told[0, PLACES["no DRAM"]] == pytest.approx([-50.0])


def test_a_nanosecond_that_is_nowhere_is_a_missed_budget() -> None:
    assert next(rows(everywhere())).met is True
    lost = next(rows([*everywhere(), found(lost=1)]))
    assert (lost.median, lost.met) == ("1 ns", False)


def test_the_worst_leak_is_named_whatever_its_sign() -> None:
    told = {line.what.partition(":")[0]: line for line in rows([*everywhere(), *everywhere(subject=1, booked=0.48)])}
    first = told["Error of a leak, as it is"]
    assert (first.median, first.spread, first.met) == (
        "1.00 points", f"largest -2.00 ({SUBJECTS[1].leak})", False,
    )  # fmt: skip
    assert told["Error of a leak, no DRAM"].met is None


def test_the_table_has_the_median_and_the_farthest() -> None:
    seeds = [everywhere(seed=seed, booked=booked) for seed, booked in ((1, 0.5), (2, 0.5), (3, 0.6))]
    line = table([one for each in seeds for one in each]).rows[0]
    assert line[:5] == ("memory_bound", "memory bound", "measured", "50.0 %", "+0.0 (+10.0)")
    assert table(everywhere(booked=0.51)).rows[0][4] == "+1.0"


def test_where_lost_time_goes_is_named() -> None:
    whole = found()
    blind = found("no DRAM", booked=0.0, spent={"other_compute": 0.45, "useful": 0.55})
    assert losers([whole, blind]).rows == (("no DRAM", "memory_bound", "50.0", "other_compute", "45.0"),)
    assert not losers([whole, found("no DRAM", booked=0.485)]).rows, "below two points"


def test_a_story_is_played_and_its_leak_is_found() -> None:
    right = examined(0, PLACES["as it is"], 1)
    assert right.booked == pytest.approx(right.expected, abs=0.01)
    assert (right.lost, right.readings > 200) == (0, True)
    assert examined(0, PLACES["no DRAM"], 1).booked == 0.0, "without DRAM activity nothing is memory bound"


def test_what_nobody_tells_is_not_guessed() -> None:
    """A slow link behind which a program waits: the estimate finds most of it; a full KV cache none.

    A checkpoint at 1.2 GB/s is seen. Exchange: g 1, s 0.4 x 0.92 + 0.6 x 0.2 = 0.488, link 0.12: 85 % of the way from
    0.12/0.75 = 0.16 to (0.955 - 0.488)/0.815 = 0.573, but a tenth until the first minute's SM activity is known.
    """
    told = {}
    for leak in ("exposed_communication", "checkpoint", "kv_cache_wait"):
        place = next(n for n, subject in enumerate(SUBJECTS) if subject.leak == leak)
        told[leak] = examined(place, PLACES["no word"], 1)
    assert told["exposed_communication"].booked == pytest.approx((0.2013 * 40 + 0.511 * 1140) / 1200, abs=0.005)
    assert told["checkpoint"].booked == pytest.approx(6 * 96 / 1200, abs=0.02)
    assert told["kv_cache_wait"].booked == 0.0, "an engine's word"
    assert all(one.lost == 0 for one in told.values())


def test_readings_are_as_long_as_a_condition_says() -> None:
    assert [BY_NAME[name].seconds(5.0) for name in ("as it is", "each 30 s", "no word, 1 s")] == [5.0, 30.0, 1.0]
    assert BY_NAME["each 30 s"].seconds(60.0) == 60.0
    seen = [examined(0, PLACES[name], 1).readings for name in ("no word", "no word, 1 s", "each 30 s")]
    assert seen == [240, 1200, 40], "20 minutes of one GPU"


def test_a_scenario_is_judged_by_its_own_record() -> None:
    place = next(n for n, subject in enumerate(SUBJECTS) if subject.leak == "unobserved")
    seen = examined(place, 0, 1)
    assert seen.expected > 0.1
    assert seen.booked == pytest.approx(seen.expected, abs=0.01)


def test_the_picture_has_a_square_for_each() -> None:
    told = curves(everywhere())
    assert (told["leaks"], len(told["errors"][0])) == (["memory_bound"], len(CONDITIONS))
    assert ESTIMATES.pictures[0].name == "estimates"


def test_a_mechanism_is_counted_in_the_timeline_and_not_by_a_rule() -> None:
    """600 of 1,000 ms in an exchange, after 20 s of start-up: 59 % of 1,200 s."""
    slow = next(one for one in MECHANISMS if one.story == "exposed_communication")
    true, booked = found_alone(slow, 10.0)
    assert true == pytest.approx(0.6 * 1180 / 1200, abs=0.002)
    assert 0.45 < booked < true, "the estimate goes by idle SMs, not by bytes, of which a slow link moves few"


@pytest.mark.slow
def test_waits_for_input_are_found_in_long_readings_too() -> None:
    """By what arrives in a minute, not by how it is spread over it."""
    starved = next(one for one in MECHANISMS if one.story == "input_starved_training")
    assert found_alone(starved, 1.0)[1] > 0.4
    assert found_alone(starved, 30.0)[1] > 0.4
