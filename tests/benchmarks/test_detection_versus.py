"""The comparison of ours with the field's rules: intervals, times, who counts, and that the delays are the alerts'."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import drawing
from benchmarks.detection import versus
from benchmarks.detection.cases import ACQUITTING, BOARDS, CASES, Case, Draw, draw
from benchmarks.detection.play import TICKET, simulations
from benchmarks.detection.rules import THUMBS, Mean, Watch
from benchmarks.detection.runs import FOR, NCCL, Run, run
from benchmarks.detection.score import Score, onsets, truth, wilson
from benchmarks.detection.table import DETECTION
from benchmarks.detection.versus import ENTRANTS, Entrant, curves, minutes, result, share, tables, where
from benchmarks.detection.watchdog import collective_timeouts, stretches
from benchmarks.record import Record, Stamp
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Device, Observation, Owner, Reading
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate.plan import GroundTruth
from exporter.simulate.simulation import simulate
from tests.alerts import packs

NAMED = {case.name: case for case in CASES}
ROOT = Path(__file__).resolve().parents[2]
DRAWN = Draw(BOARDS[0], 10, 1.0, (), 0, "nothing")


@pytest.mark.parametrize(
    ("right", "of", "least", "most"),
    [(46, 46, 0.9229, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (1, 2, 0.0945, 0.9055), (0, 0, 0.0, 1.0)],
)
def test_the_interval_is_wilsons(right: int, of: int, least: float, most: float) -> None:
    """By hand for 46 of 46: n / (n + z^2) = 46 / 49.8415; for 5 of 10: 0.5 -+ z * sqrt(2.5 + z^2 / 4) / (n + z^2)."""
    assert wilson(right, of) == pytest.approx((least, most), abs=1e-4)


def test_shares_times_and_places_in_words() -> None:
    assert share(5, 10) == "0.50 (0.24 - 0.76), 5 of 10"
    assert share(0, 0) == "-"
    assert minutes([60.0 * minute for minute in range(1, 21)]) == "10.0, 18.0, 20.0"
    assert minutes([]) == "-"
    wrong = ["a/1 false", "a/2 false missed", "b/1 missed", *(f"{name}/1 false" for name in "cdefg")]
    assert where(wrong, "false") == "a 2, c 1, d 1, e 1, f 1, and 1 more cases"
    assert where(wrong, "missed") == "a 1, b 1"
    assert where([], "false") == "none"


def _run(scores: Mapping[str, Score], took: Mapping[str, list[float]], blind: Mapping[str, Score]) -> Run:
    return Run("a", 1, DRAWN, "confirmed", dict(scores), took=dict(took), blind=dict(blind))


def test_a_result_adds_up_what_is_scored_and_the_way_to_the_reader() -> None:
    entrant = Entrant("hang", "ours", "hang", 30.0, "because")
    done = [
        _run({"hang": Score(true=1)}, {"hang": [300.0]}, {}),
        _run({"hang": Score(true=1, wrong=["a/2 false"])}, {"hang": [200.0]}, {"hang": Score(missed=1)}),
        _run({}, {"hang": [1.0]}, {"hang": Score(true=1)}),
    ]
    found = result(entrant, done)
    assert (found.score.true, found.blind, found.seconds) == (2, (1, 2), (230.0, 330.0))


def test_the_delays_are_those_of_the_alerts() -> None:
    """What is added to each time, and what was waited for in the runs, as the rules say it."""
    groups = [group for name in ("jobs.yaml", "gpus.yaml") for group in packs.groups()[name]]
    rules = {rule["alert"]: (rule, group) for group in groups for rule in group["rules"] if "alert" in rule}
    page, quick = rules["GPUEfficiencyJobDeadlocked"]
    assert "for" not in page
    assert quick["interval"] == f"{versus.FAST:.0f}s"
    ticket, slow = rules["GPUEfficiencyJobHungSuspected"]
    assert ticket["for"] == f"{TICKET // (60 * SECOND)}m"
    zombie, third = rules["GPUEfficiencyGPUZombie"]
    assert "for" not in zombie
    assert "interval" not in {**slow, **third}
    roads = {one.key: one.road for one in ENTRANTS}
    assert (roads["hang"], roads["tickets"], roads["zombie"], roads[NCCL]) == (30 + versus.FAST, 90, 90, 0)


def test_every_rule_is_in_the_comparison_and_named_once() -> None:
    keys = [one.key for one in ENTRANTS]
    assert len(set(keys)) == len(keys)
    assert {f"{index}" for index in range(len(THUMBS))} | {NCCL, "hang", "tickets", "zombie"} == set(keys)
    assert all(FOR.get(one.key, "hang") == one.detector for one in ENTRANTS)


# -- the rules that were added --

READING = Reading("GPU-0", 0, SECOND, gpu_utilization=1.0)
QUIET = {"nvlink_tx_bytes_per_second": 0.0, "pcie_rx_bytes_per_second": 9e6}


@pytest.mark.parametrize(
    ("index", "reading", "holds"),
    [
        (5, QUIET, True),
        (5, {"pcie_rx_bytes_per_second": 11e6}, False),
        (5, {**QUIET, "nvlink_rx_bytes_per_second": 1.1e8}, False),
        (5, {**QUIET, "gpu_utilization": 0.97}, False),
        (5, {}, False),
        (6, {"gpu_utilization": 0.5, "gr_engine_active": 0.01}, True),
        (6, {"gpu_utilization": 0.0, "gr_engine_active": 0.011}, False),
        (6, {"gpu_utilization": 0.01}, True),
        (6, {"gpu_utilization": None}, False),
        (7, {"gpu_utilization": None}, False),
        (7, {}, True),
    ],
)
def test_an_added_rule_holds_by_its_words(index: int, reading: dict[str, float | None], *, holds: bool) -> None:
    given = {name: reading.get(name, getattr(READING, name)) for name in READING.__struct_fields__}
    assert THUMBS[index].condition(Reading(**given), Device("GPU-0")) is holds


def _lasting(start: int, end: int, utilisation: float) -> Reading:
    return Reading("GPU-0", start * SECOND, end * SECOND, gpu_utilization=utilisation)


def test_a_mean_weighs_by_time_and_forgets() -> None:
    mean = Mean()
    assert mean.add(_lasting(0, 10, 1.0), 60 * SECOND) == 1.0
    assert mean.add(_lasting(10, 40, 0.0), 60 * SECOND) == 0.25
    assert mean.add(_lasting(40, 70, 0.5), 60 * SECOND) == 0.25
    assert mean.add(_lasting(70, 80, 0.0), 60 * SECOND) == 15 / 70


@pytest.mark.parametrize(("burst", "told"), [(0.0, 3600), (0.04, 3600), (0.06, None)])
def test_a_low_mean_pages_after_its_hour_and_not_before(burst: float, told: int | None) -> None:
    """One reading in ten is busy: 4 or 6 % of the time."""
    watch, ledger = Watch(), Ledger()
    held = (Allocation("GPU-0", Owner("1"), 0, gpus=1),)
    advance(ledger, Observation(0, 0, devices=(Device("GPU-0"),), allocations=held))
    watch.look([take_snapshot(ledger, DaemonMetadata())])
    for end in range(60, 4201, 60):
        used = burst * 10 if end % 600 == 0 else 0.0
        advance(ledger, Observation(end * SECOND, end * SECOND, readings=(_lasting(end - 60, end, used),)))
        watch.look([take_snapshot(ledger, DaemonMetadata())])
    assert watch.fired[7] == ({} if told is None else {"GPU-0": told * SECOND})


@pytest.mark.parametrize(
    ("story", "gpus", "seconds", "phase"),
    [
        ("missing_rank", 2, None, "one rank never comes"),
        ("missing_rank", 2, 900, ""),
        ("rank0_slow_checkpoint", 3, None, ""),
        ("rank0_evaluation", 3, None, "rank 0 evaluates"),
        ("one_gpu_hang", 1, None, ""),
        ("straggler", 3, 1200, ""),
    ],
)
def test_the_watchdog_ends_a_job_after_ten_minutes_in_one_collective(
    story: str, gpus: int, seconds: float | None, phase: str
) -> None:
    """From the phase in which ranks wait; one that lasts 8 minutes, or is not over 10 minutes later, ends nothing."""
    (node,) = simulations(Case(name=story, story=story, gpus=gpus, seconds=seconds), 1, DRAWN)
    begun = [entry.at - node.start for entry in node.truth if entry.phase == phase]
    assert collective_timeouts([node]) == ({"41001": begun[0] + 600 * SECOND} if phase else {})


def test_a_wait_ends_with_work_with_another_job_and_with_the_story() -> None:
    def at(second: int, share: float, job: str = "a") -> GroundTruth:
        return GroundTruth(at=second, phase="", uuid="GPU-0", job_id=job, waiting_peer_share=share)

    told = [at(0, 0.4), at(10, 1.0), at(20, 1.0), at(30, 0.9), at(40, 1.0), at(50, 1.0, "b"), at(60, 1.0, "b")]
    assert list(stretches(told, 70)) == [("a", 10, 30), ("a", 40, 50), ("b", 50, 70)]
    assert next(iter(stretches(told, 25))) == ("a", 10, 25)


# -- who counts --


def test_the_onset_of_a_zombie_is_when_it_came_to_rest() -> None:
    node = simulate("zombie_notebook", gpus=1, period_seconds=60)
    case = NAMED["forgotten_notebook"]
    (counts,), (began,) = truth(case, [node])["zombie"].values(), onsets(case, [node])["zombie"].values()
    assert counts - began == (7200 - 90) * SECOND


def _drawn(name: str, missing: tuple[str, ...]) -> Run:
    return run(name, next(seed for seed in range(300, 500) if draw(NAMED[name], seed).missing == missing))


@pytest.mark.slow
def test_a_hang_on_a_blind_board_counts_beside_the_others() -> None:
    seen, blind = _drawn("missing_rank", ()), _drawn("missing_rank", ACQUITTING[0])
    assert (seen.blind, seen.scores[NCCL].true, seen.scores["hang"].true) == ({}, 1, 1)
    assert (blind.blind[NCCL].true, blind.blind["tickets"].true, blind.scores["hang"].quiet) == (1, 1, 1)
    assert not blind.scores.keys() & {NCCL, "0", "1", "2", "5"}
    assert {"3", "4", "6", "7"} < blind.scores.keys()
    assert seen.took["hang"] == pytest.approx([1800], abs=30)  # a rank rests: it might evaluate
    assert seen.took[NCCL] == [600.0]


def test_a_rule_is_not_blamed_for_a_story_that_ends_before_it_is_due() -> None:
    told = run("idle_context", 201)
    assert (told.scores["3"].true, told.scores["3"].missed) == (1, 0)
    assert (told.scores["4"].missed, told.scores["4"].quiet) == (0, 1)
    assert run("lost_gpu", 201).scores.get(NCCL, Score()).missed == 0


# -- the tables and the picture --


@pytest.fixture(scope="module")
def done() -> list[Run]:
    return [run(name, 201) for name in ("missing_rank", "idle_poller", "one_gpu_hang")]


@pytest.mark.slow
def test_the_tables_have_a_line_for_every_rule(done: list[Run]) -> None:
    hangs, zombies = tables(done)
    assert [line[0] for line in (*hangs.rows, *zombies.rows)] == [one.name for one in ENTRANTS]
    assert all(len(line) == len(one.head) for one in (hangs, zombies) for line in one.rows)
    ours = dict(zip(hangs.head, hangs.rows[0], strict=True))
    assert ours["false alarms on"] == ours["misses"] == "none"


@pytest.mark.slow
def test_the_picture_says_how_often_ours_is_right(done: list[Run]) -> None:
    drawn = curves(done)
    drawn["rules"][0]["precision"] = [0.75, 0.6, 0.9]
    for one in drawn["rules"][2:7]:
        one["precision"] = [0.5, 0.4, 0.6]
    stamp = Stamp(commit="abc", day="2026-01-01", machine="one", took=1.0)
    record = Record(group="detection", stamp=stamp, code={}, rows=[], curves=drawn)
    (picture,) = DETECTION.pictures
    text = drawing.drawn(picture, record).decode()
    assert "is right 75% of the time" in text
    assert "the best is 50%" in text
    assert all(one.name.replace("&", "&amp;").replace(">", "&gt;").replace("<", "&lt;") in text for one in ENTRANTS)
