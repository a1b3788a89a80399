"""The detection benchmark scores what it says it does; and on a few of its cases nobody is paged for nothing."""

from collections import Counter

import pytest

from benchmarks.detection.cases import (
    ACQUITTING,
    BEYOND,
    BOARDS,
    CASES,
    DETECTORS,
    DRIVER_ONLY,
    FP,
    HARMLESS,
    PERIODS,
    Draw,
    draw,
)
from benchmarks.detection.rules import GUARDS, THUMBS, without_guard
from benchmarks.detection.runs import SCORING, TUNING, Run, run
from benchmarks.detection.score import Score, merged, provable, truth
from exporter.core.model import SECOND, Device, Reading
from exporter.core.policy import Policy
from exporter.simulate.simulation import simulate
from tests.lookalikes import LOOKALIKES

NAMED = {case.name: case for case in (*CASES, *BEYOND)}
QUICK = (
    "missing_rank", "one_gpu_hang", "missing_node", "lost_gpu", "rank0_long_checkpoint", "rank0_evaluation",
    "idle_poller", "pointer_chase", "host_gather", "integers_in_registers", "thin_fp64", "long_first_step",
    "nic_hang", "checkpoint_of_8_minutes", "profiler_attached", "evaluation_on_a_dark_node",
)  # fmt: skip
"""Cheap ones, with a true hang of each kind, and a look-alike for each guard."""
SEEDS = (201, 202)


def drawn(**given: object) -> Draw:
    plain = {"board": BOARDS[0], "period": 10, "noise": 1.0, "missing": (), "start_ms": 0, "leftover": "nothing"}
    return Draw(**{**plain, **given})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", QUICK)
def test_nobody_is_paged_for_nothing_and_every_hang_is_found_in_time(name: str, seed: int) -> None:
    told = run(name, seed)
    wrong = [line for detector in DETECTORS for line in told.scores[detector].wrong]
    assert (wrong, told.late) == ([], ()), told.drawn


def test_there_are_forty_cases_and_every_detector_has_true_ones_and_look_alikes() -> None:
    assert len(CASES) >= 40
    assert len(NAMED) == len(CASES) + len(BEYOND)
    labels = Counter(label.detector for case in CASES for label in case.labels)
    assert set(labels) == set(DETECTORS)
    assert labels["hang"] >= 10
    assert labels["zombie"] >= 4
    assert not set(SCORING) & {*TUNING, *SEEDS}


def test_draws_repeat_themselves_and_vary() -> None:
    draws = [draw(case, seed) for case in CASES for seed in SCORING]
    assert draws == [draw(case, seed) for case in CASES for seed in SCORING]
    assert {d.board for d in draws} == set(BOARDS)
    assert {d.period for d in draws} == set(PERIODS)
    assert {d.missing for d in draws} == {(), *HARMLESS, *ACQUITTING, *DRIVER_ONLY}
    assert all(not draw(NAMED["mig_hang"], seed).missing for seed in range(20))


def test_the_truth_comes_from_the_simulation_and_begins_where_it_says() -> None:
    case = NAMED["lost_gpu"]
    node = simulate("lost_gpu", gpus=3, period_seconds=10, start=7_000_000_000, duration_seconds=1150)
    assert truth(case, [node]) == {
        "hang": {"41001": 600_400 * SECOND // 1000},
        "lost": {node.uuids[2]: 600_400 * SECOND // 1000},
    }
    zombie = simulate("zombie_notebook", gpus=1, period_seconds=60)
    (rested,) = (e.at for e in zombie.truth if e.phase == "nobody is at the keyboard")
    assert truth(NAMED["forgotten_notebook"], [zombie])["zombie"] == {zombie.uuids[0]: rested + (7200 - 90) * SECOND}
    short = simulate("missing_rank", gpus=2, period_seconds=10, duration_seconds=60, stories=LOOKALIKES)
    assert truth(NAMED["missing_rank"], [short]) == {"hang": {}}


@pytest.mark.parametrize(
    ("name", "given", "proof"),
    [
        ("missing_rank", {}, "confirmed"),
        ("missing_rank", {"missing": FP}, "confirmed"),
        ("missing_rank", {"missing": ("power_watts",)}, "confirmed"),
        ("missing_rank", {"missing": ACQUITTING[0]}, "suspected"),
        ("missing_rank", {"missing": ACQUITTING[1]}, "suspected"),
        ("missing_rank", {"missing": ACQUITTING[1], "board": "L4"}, "confirmed"),
        ("missing_rank", {"missing": ACQUITTING[2], "board": "L4"}, "suspected"),
        ("missing_rank", {"missing": ACQUITTING[3]}, "suspected"),
        ("missing_rank", {"missing": DRIVER_ONLY[0]}, "suspected"),
        ("smoothed_hang", {"missing": FP}, "suspected"),
        ("smoothed_hang", {"missing": DRIVER_ONLY[0]}, "nothing"),
    ],
)
def test_how_far_a_hang_can_be_proven_depends_on_the_fields_there_are(
    name: str, given: dict[str, object], proof: str
) -> None:
    assert provable(NAMED[name], drawn(**given)) == proof


@pytest.mark.parametrize(
    ("told", "subjects", "counts"),
    [
        ({}, {}, (0, 0, 0, 1)),
        ({"a": 9}, {"a": 5}, (1, 0, 0, 0)),
        ({}, {"a": 5}, (0, 0, 1, 0)),
        ({"b": 9}, {}, (0, 1, 0, 0)),
        ({"a": 9, "b": 9}, {"a": 5}, (0, 1, 0, 0)),
        ({"a": 3}, {"a": 5}, (0, 1, 0, 0)),
        ({"b": 9}, {"a": 5}, (0, 1, 1, 0)),
        ({"a": 9}, {"a": 5, "b": 5}, (0, 0, 1, 0)),
    ],
    ids=["silence", "right", "missed", "false", "too-many", "too-early", "the-wrong-one", "too-few"],
)
def test_a_run_is_right_when_all_that_is_in_trouble_is_named_and_nothing_else(
    told: dict[str, int], subjects: dict[str, int], counts: tuple[int, int, int, int]
) -> None:
    score = Score()
    score.judge("x/1", told, subjects)
    assert (score.true, score.false, score.missed, score.quiet) == counts
    assert bool(score.wrong) == bool(score.false or score.missed)


def test_scores_add_up() -> None:
    first, second = Score(true=2, false=1, times=[3.0], wrong=["a/1 false"]), Score(true=1, missed=1, times=[5.0])
    total = merged([first, second])
    assert (total.precision, total.recall, total.took()) == (0.75, 0.75, "median 4 s, longest 5 s")
    assert first.times == [3.0]
    assert (Score().precision, Score().recall, Score().took()) == (1.0, 1.0, "-")


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_can_be_taken_away(guard: str) -> None:
    assert without_guard(guard) != Policy()


READING = Reading("GPU-0", 0, SECOND, gpu_utilization=1.0, power_watts=120.0, enforced_power_limit_watts=700.0)


@pytest.mark.parametrize(
    ("index", "reading", "holds"),
    [
        (0, {}, True),
        (0, {"power_watts": 211.0}, False),
        (0, {"power_watts": None}, False),
        (0, {"gpu_utilization": 0.97}, False),
        (2, {"tensor_active": 0.001}, True),
        (2, {"tensor_active": 0.0011}, False),
        (2, {}, False),
        (3, {"gpu_utilization": 0.0}, True),
        (3, {}, False),
        (4, {"gpu_utilization": None}, False),
    ],
)  # fmt: skip
def test_a_rule_of_thumb_holds_by_its_words(index: int, reading: dict[str, float | None], *, holds: bool) -> None:
    played = {name: reading.get(name, getattr(READING, name)) for name in READING.__struct_fields__}
    assert THUMBS[index].condition(Reading(**played), Device("GPU-0")) is holds


def test_the_rule_of_thumb_pages_where_ours_is_silent() -> None:
    """The first rule on the spin of a server without requests, and on work that only moves a little memory."""
    for name in ("idle_poller", "pointer_chase"):
        told = _with_all_fields(name)
        assert told.scores["0"].false == 1, name
        assert told.scores["hang"].false == 0, name


def _with_all_fields(name: str, *, guards: bool = False) -> Run:
    """The first seed whose draw leaves every field, on a board on which the power says little."""
    seeds = (seed for seed in range(300, 400) if not draw(NAMED[name], seed).missing)
    return run(name, next(seed for seed in seeds if draw(NAMED[name], seed).board == BOARDS[0]), guards=guards)


def test_without_its_guard_a_look_alike_is_paged_for() -> None:
    told = _with_all_fields("pointer_chase", guards=True)
    assert {guard for guard, score in told.guards.items() if score.false} == {"DRAM at rest"}
