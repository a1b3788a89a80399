"""`/metrics` of every scenario is byte for byte what it was, and every reader of it finds the law kept."""

import re
from collections import defaultdict
from decimal import Decimal
from functools import cache

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from exporter.core.exposition import render
from exporter.core.leaks import LEAK_NAMES
from exporter.core.snapshot import Snapshot
from exporter.simulate.scenarios import SCENARIOS
from tests.scenarios import goldens

every_story = pytest.mark.parametrize("scenario", goldens.GOLDENS)
LINE = re.compile(r"^(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


@cache
def picture(scenario: str) -> Snapshot:
    return goldens.picture(scenario)


def golden(scenario: str) -> str:
    return goldens.path(scenario).read_text(encoding="utf-8")


def decimals(text: str, name: str) -> list[tuple[dict[str, str], Decimal]]:
    """Every sample of one metric with its labels, as the exact decimal that was printed."""
    matches = (LINE.match(line) for line in text.splitlines())
    return [(dict(LABEL.findall(m["labels"])), Decimal(m["value"])) for m in matches if m and m["name"] == name]


def key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...], float]:
    return sample.name, tuple(sorted(sample.labels.items())), sample.value


def test_every_scenario_has_a_golden_text() -> None:
    assert set(goldens.GOLDENS) == set(SCENARIOS)
    assert {folder.name for folder in goldens.FOLDER.iterdir()} == set(SCENARIOS)


@pytest.mark.slow
@every_story
def test_the_text_is_what_it_was(scenario: str) -> None:
    told = goldens.difference(scenario, render(picture(scenario)))
    assert not told, told


def test_a_difference_is_told_in_lines_with_the_way_to_accept_it() -> None:
    text = golden("copy_loop").replace('state="active"', 'state="zombie"').encode()
    told = goldens.difference("copy_loop", text)
    assert "-gpu_efficiency_state{" in told
    assert 'state="zombie"' in told
    assert "tests.scenarios.write_goldens copy_loop" in told


@pytest.mark.slow
@every_story
def test_both_parsers_find_the_same_samples(scenario: str) -> None:
    """prometheus_client is the oracle of both forms; the first is the golden text, or the test above fails."""
    openmetrics = render(picture(scenario), openmetrics=True).decode() + "# EOF\n"
    text = [key(s) for family in parse_text(render(picture(scenario)).decode()) for s in family.samples]
    families = parse_openmetrics(openmetrics)  # type: ignore[no-untyped-call]
    other = [key(s) for family in families for s in family.samples]
    assert text
    assert sorted(text) == sorted(other)
    assert len({(name, labels) for name, labels, _ in text}) == len(text)


@every_story
@pytest.mark.parametrize(
    ("parts", "whole", "owner"),
    [
        ("gpu_efficiency_seconds_total", "gpu_efficiency_paid_seconds_total", "uuid"),
        ("gpu_efficiency_job_seconds_total", "gpu_efficiency_job_paid_seconds_total", "job_id"),
    ],
)
def test_the_parts_add_up_to_what_was_paid_in_the_text_itself(
    scenario: str, parts: str, whole: str, owner: str
) -> None:
    """Exactly, as decimals: the law survives the trip through the text format."""
    sums: defaultdict[str, Decimal] = defaultdict(Decimal)
    leaks: defaultdict[str, set[str]] = defaultdict(set)
    for labels, value in decimals(golden(scenario), parts):
        sums[labels[owner]] += value
        leaks[labels[owner]].add(labels["leak"])
    paid = {labels[owner]: value for labels, value in decimals(golden(scenario), whole)}
    assert sums == paid
    assert sums or scenario == "fleet"
    assert all(names == set(LEAK_NAMES) for names in leaks.values())


@every_story
def test_no_sample_is_negative_or_not_a_number(scenario: str) -> None:
    values = [s.value for family in parse_text(golden(scenario)) for s in family.samples]
    assert all(0 <= value < float("inf") for value in values)


FINAL_STATES = {
    "carpenter": {("stalled", "idle_context")},
    "copy_loop": {("active", "computing")},
    "deadlock": {("hung", "spinning"), ("hung", "culprit")},
    "demo": {("active", "computing"), ("zombie", "idle_context"), ("hung", "spinning"), ("hung", "culprit")},
    "fleet": {("active", "computing")},
    "healthy_training": {("active", "computing")},
    "idle_context": {("zombie", "idle_context")},
    "idle_poller": {("active", "idle_spin")},
    "input_starved_training": {("stalled", "idle_context")},
    "large_gemm": {("active", "computing")},
    "leaked_process": {("unowned", "leaked_process"), ("unallocated", "free")},
    "long_first_step": {("active", "computing")},
    "lost_gpu": {("unavailable", "lost"), ("unallocated", "free")},
    "memory_bound_decode": {("active", "computing")},
    "nic_hang": {("hung", "spinning")},
    "rank0_checkpoint": {("active", "computing")},
    "rank0_evaluation": {("active", "computing")},
    "serving_lull": {("active", "computing")},
    "spin_kernel": {("hung", "spinning")},
    "straggler": {("active", "computing")},
    "telemetry_outage": {("active", "computing")},
    "throttled": {("active", "computing")},
    "zombie_notebook": {("zombie", "idle_context")},
}


@every_story
def test_the_state_in_the_text_is_the_one_the_story_is_named_after(scenario: str) -> None:
    """So that a golden text cannot be rewritten into nonsense unnoticed."""
    found = {(labels["state"], labels["reason"]) for labels, _ in decimals(golden(scenario), "gpu_efficiency_state")}
    assert found == FINAL_STATES[scenario]
