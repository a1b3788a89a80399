"""The leak guide is consistent with the table of leaks, the metrics, the rules and the runbooks."""

import re
from collections import Counter
from pathlib import Path

import pytest

from exporter.core.leak_guide import (
    EVIDENCE_KINDS,
    EXAMPLE_WATERFALLS,
    EXPECTED_USEFUL,
    LEAK_GUIDE,
    LITERATURE,
    OTHER_LEAKS,
    ExpectedLoss,
    LeakGuideEntry,
    OtherLeak,
)
from exporter.core.leaks import LAYER_OF, LEAK_NAMES, LEAKS, TENSOR
from exporter.core.metrics import METRICS
from tests.alerts import packs

ROOT = Path(__file__).parents[2]
ROWS = {leak.name: leak for leak in LEAKS}
LAYER = dict(zip(LEAK_NAMES, LAYER_OF, strict=True))
SERIES = {metric.name: metric for metric in METRICS}
EVERY: tuple[LeakGuideEntry | OtherLeak, ...] = (*LEAK_GUIDE, *OTHER_LEAKS)
seeds = pytest.mark.parametrize("seed", LEAK_GUIDE, ids=lambda seed: f"{seed.number}")
kinds = pytest.mark.parametrize("kind", EXAMPLE_WATERFALLS)


RECORDS = {name: rule["expr"] for name, rule in packs.records(*packs.files()).items()}


def expected(of: LeakGuideEntry | OtherLeak, kind: str) -> ExpectedLoss | None:
    found: ExpectedLoss | None = getattr(of, kind)
    return found


def ranges(kind: str) -> list[ExpectedLoss]:
    return [*filter(None, (expected(of, kind) for of in EVERY)), EXPECTED_USEFUL[kind]]


def test_they_are_twelve_in_the_words_of_the_field() -> None:
    assert [seed.number for seed in LEAK_GUIDE] == list(range(1, 13))
    assert [seed.name for seed in LEAK_GUIDE] == [
        "memory-bound and low-parallelism kernels",
        "idle allocation",
        "oversized allocation",
        "host overhead (CPU-bound launching)",
        "failures and recovery",
        "exposed communication",
        "pipeline bubbles",
        "recomputation",
        "KV-cache pressure",
        "prefill-decode interference",
        "under-filled batches",
        "rejected speculative decoding",
    ]


def test_every_row_of_the_ledger_belongs_to_one_of_the_twelve_or_to_the_others() -> None:
    placed = Counter([row for seed in LEAK_GUIDE for row in seed.rows] + [other.row for other in OTHER_LEAKS])
    assert placed == Counter(list(ROWS))
    assert [other.row for other in OTHER_LEAKS] == [name for name in ROWS if name in {o.row for o in OTHER_LEAKS}]
    assert all(seed.rows for seed in LEAK_GUIDE)


@seeds
def test_a_leak_has_the_layers_and_the_team_of_its_rows(seed: LeakGuideEntry) -> None:
    assert seed.layers == tuple(dict.fromkeys(LAYER[row] for row in seed.rows))
    assert {ROWS[row].team for row in seed.rows} == {seed.team}


@seeds
def test_a_leak_says_who_must_speak(seed: LeakGuideEntry) -> None:
    """At least the evidence of its rows; that of servers is reported by the engine or estimated."""
    assert seed.evidence == tuple(kind for kind in EVIDENCE_KINDS if kind in seed.evidence)
    assert seed.evidence
    named = {kind for row in seed.rows for kind in ROWS[row].evidence.split(" or ")}
    assert set(seed.evidence) - named == ({"engine", "estimated"} if seed.number == 2 else set())
    assert named <= set(seed.evidence)
    assert [text for text in (seed.needs, seed.watch, seed.fix) if not text.strip()] == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (9, ("KV-cache use", "preemptions", "tokens computed twice")),
        (10, ("latency", "inter-token p99", "time to first token")),
        (11, ("batch fill", "queue delay")),
        (12, ("acceptance", "tokens per forward pass")),
    ],
)
def test_a_leak_of_serving_has_the_metric_that_fits_it(number: int, words: tuple[str, ...]) -> None:
    seed = LEAK_GUIDE[number - 1]
    assert [word for word in words if word not in seed.watch] == []
    assert [name for name in seed.series if "unoccupied" in name] == []
    assert [s.number for s in LEAK_GUIDE if "unoccupied" in s.watch] == [2]


@pytest.mark.parametrize("selector", [name for seed in LEAK_GUIDE for name in seed.series])
def test_what_is_to_be_watched_is_published(selector: str) -> None:
    name, _, labels = selector.partition("{")
    assert name in SERIES or name in RECORDS
    for label, value in re.findall(r'(\w+)=~?"([^"]*)"', labels):
        assert label in SERIES[name].labels if name in SERIES else label in RECORDS[name]
        if label == "leak":
            assert value in LEAK_NAMES


@pytest.mark.parametrize("of", [of for of in EVERY if of.runbook], ids=lambda of: of.runbook)
def test_a_runbook_is_there_and_its_alert(of: LeakGuideEntry | OtherLeak) -> None:
    assert (ROOT / "docs" / "runbooks" / f"{of.runbook}.md").is_file()
    assert of.runbook in packs.alerts()


@kinds
def test_what_to_expect_is_possible(kind: str) -> None:
    for of in ranges(kind):
        assert 0 <= of.low < of.high <= 100
    assert sum(of.low for of in ranges(kind)) < 100 < sum(of.high for of in ranges(kind))


def test_leaks_of_serving_are_not_expected_of_training_nor_recomputation_of_serving() -> None:
    assert [s.number for s in LEAK_GUIDE if s.training is None] == [9, 10, 11, 12]
    assert [s.number for s in LEAK_GUIDE if s.inference is None] == [8]


def test_all_figures_that_are_named_are_there_and_used() -> None:
    used = {key for kind in EXAMPLE_WATERFALLS for of in ranges(kind) for key in of.sources}
    assert used == set(LITERATURE)
    for key, source in LITERATURE.items():
        assert re.search(r"\d", source.figure), key
        assert key == "roofline" or f" {key[-4:]}," in source.work + ",", key
    assert list(LITERATURE) == sorted(LITERATURE)


@kinds
def test_a_waterfall_is_a_hundred_whole_hours_within_what_is_expected(kind: str) -> None:
    hours = EXAMPLE_WATERFALLS[kind]
    assert sum(hours.values()) == 100
    assert all(type(amount) is int and amount > 0 for amount in hours.values())
    assert hours.keys() <= ROWS.keys() | {"useful"}
    for of in EVERY:
        booked = sum(hours.get(row, 0) for row in (of.rows if isinstance(of, LeakGuideEntry) else (of.row,)))
        within = expected(of, kind)
        assert within.low <= booked <= within.high if within else booked == 0, of
    assert EXPECTED_USEFUL[kind].low <= hours["useful"] <= EXPECTED_USEFUL[kind].high


@kinds
def test_a_waterfall_goes_layer_by_layer(kind: str) -> None:
    layers = ("gau", "ectr", "emfu", "useful")
    order = [(layers.index(LAYER[row]), LEAK_NAMES.index(row)) for row in EXAMPLE_WATERFALLS[kind]]
    assert [layer for layer, _ in order] == sorted(layer for layer, _ in order)


@kinds
def test_a_waterfall_can_be_poured(kind: str) -> None:
    """Full recomputation takes no more than a quarter of tensor time."""
    hours = EXAMPLE_WATERFALLS[kind]
    tensor = [row for row in hours if row == "useful" or TENSOR in ROWS[row].pools]
    assert hours.get("recomputation", 0) * 4 <= sum(hours[row] for row in tensor)


def test_the_two_examples_multiply_to_what_the_page_says() -> None:
    """GAU, ECTR and eMFU in percent, calculated by hand."""
    found = {}
    for kind, hours in EXAMPLE_WATERFALLS.items():
        lost = Counter(dict.fromkeys(("gau", "ectr"), 0))
        for row, amount in hours.items():
            lost[LAYER[row]] += amount
        occupied = 100 - lost["gau"]
        computing = occupied - lost["ectr"]
        found[kind] = (occupied, computing, lost["useful"])
    assert found == {"training": (87, 63, 28), "inference": (68, 45, 10)}
