"""What every alert says and carries, whatever it watches."""

import re

import pytest

from exporter.core.policy import EXPORTED_THRESHOLDS
from tests.alerts.packs import FOLDER, Rule, alerts, files, plain, sheet, texts_of
from tests.alerts.promql import Binary, Literal, parse, walk

SEVERITIES = {
    "GPUEfficiencyJobDeadlocked": "page",
    "GPUEfficiencyJobHungSuspected": "ticket",
    "GPUEfficiencyStragglerRank": "ticket",
    "GPUEfficiencyJobFlopsMisreported": "ticket",
    "GPUEfficiencyRegressed": "info",
    "GPUEfficiencyGPUZombie": "ticket",
    "GPUEfficiencyGPUAllocatedWithoutProcess": "ticket",
    "GPUEfficiencyGPUUnownedProcess": "ticket",
    "GPUEfficiencyGPULost": "ticket",
    "GPUEfficiencyGPUOversized": "info",
    "GPUEfficiencyGPUThrottledCostly": "ticket",
    "GPUEfficiencyIdleAllocationCost": "page",
    "GPUEfficiencyLowAllocationWithQueue": "ticket",
    "GPUEfficiencyExporterDown": "ticket",
    "GPUEfficiencyExporterMissing": "ticket",
    "GPUEfficiencyNodeScrapedTwice": "ticket",
    "GPUEfficiencyExporterBlind": "ticket",
    "GPUEfficiencyFleetBlind": "page",
    "GPUEfficiencyExporterProfilingBlocked": "ticket",
    "GPUEfficiencyExporterClockSkew": "ticket",
    "GPUEfficiencyHistoryFailing": "ticket",
    "GPUEfficiencySchedulerDataStale": "ticket",
    "GPUEfficiencyConservationBroken": "ticket",
    "GPUEfficiencyExemptionExpired": "ticket",
}
OF_JOBS = {name for name in SEVERITIES if "job_id" in alerts()[name]["annotations"]["summary"]}
ON_EXEMPT_JOBS = (
    "GPUEfficiencyGPUZombie",
    "GPUEfficiencyGPUAllocatedWithoutProcess",
    "GPUEfficiencyGPUOversized",
    "GPUEfficiencyIdleAllocationCost",
)
BY_SIZE = "{{ $labels.severity }}"
"""The severity of an alert whose records decide: a page, or below a size a ticket."""
WRITTEN = {0.0, 1.0, 3.0}
"""Numbers an expression may say itself: none, all, and for how many times the hang threshold an unseen GPU excuses."""

EMPTY = re.compile(r"^\s|\s$|\s\s|\s[,.;:)]|[:,;][,.;:]|\(\s*\)|\b(?:of|by|rank|costs?)[,.;)]", re.IGNORECASE)
"""What is left of a text where a field is empty, such as `of , team` and `()`."""


def test_the_severities_are_those_agreed_and_three_page() -> None:
    said = {name: rule["labels"]["severity"] for name, rule in alerts().items()}
    assert said == SEVERITIES | {"GPUEfficiencyJobDeadlocked": BY_SIZE}


def test_no_alert_has_a_name_that_another_exporters_may_have() -> None:
    assert all(name.startswith("GPUEfficiency") for name in SEVERITIES)


def test_names_are_unique() -> None:
    names = [rule["alert"] for rules in files().values() for rule in rules if "alert" in rule]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SEVERITIES)
def test_an_alert_carries_its_pack_and_its_owner_s_team(name: str) -> None:
    labels = alerts()[name]["labels"]
    owner = '{{ or $labels.team "platform" }}' if name in OF_JOBS else "platform"
    severity = BY_SIZE if name == "GPUEfficiencyJobDeadlocked" else SEVERITIES[name]
    assert labels == {"severity": severity, "pack": "gpu-efficiency", "team": owner}


@pytest.mark.parametrize("name", SEVERITIES)
def test_an_alert_tells_a_person_what_to_do(name: str) -> None:
    said = alerts()[name]["annotations"]
    assert set(said) == {"summary", "description", "runbook_url", "dashboard_url"}
    assert said["runbook_url"] == f"docs/runbooks/{name}.md"
    boards = re.findall(r"/d/gpu-efficiency-(\w+)", said["dashboard_url"])
    assert boards
    files_ = (FOLDER.parent / "dashboards").glob("*.json")
    assert set(boards) <= {path.stem.removeprefix("gpu-efficiency-") for path in files_}
    assert "First: " in plain(said["description"])


PRICE = re.compile(r"\d\.\d\d [A-Z][\w-]+ an hour")
LASTS = re.compile(
    r"\b(?:for|in) (?:up to )?\d+[dhms]\b|\bfor (?:five minutes|ten minutes|a quarter of an hour) or longer"
    r"|\bover the last (?:half )?hour",
    re.IGNORECASE,
)
"""How long it has lasted; where nothing tells since when, how long it has at least."""
WITHOUT_MONEY = {
    "GPUEfficiencyJobFlopsMisreported": "no money is lost, and the text says so",
    "GPUEfficiencyExporterMissing": "the node's daemon tells its price, and there is none",
    "GPUEfficiencyExporterProfilingBlocked": "the node's time is booked, only less finely",
    "GPUEfficiencyExporterClockSkew": "the node's time is booked",
    "GPUEfficiencyHistoryFailing": "the node's time is booked and scraped",
    "GPUEfficiencyConservationBroken": "the node's own money cannot be trusted",
    "GPUEfficiencyNodeScrapedTwice": "the node's own money is there twice",
    "GPUEfficiencyExemptionExpired": "what it covered has alerts of its own again",
}
"""Alerts whose texts need not tell what an hour costs and how long it has lasted; all others are on money that runs."""


@pytest.mark.parametrize("name", sorted(SEVERITIES.keys() - WITHOUT_MONEY))
def test_an_alert_on_money_that_runs_tells_what_an_hour_costs_and_how_long_it_has_lasted(name: str) -> None:
    assert [text for text in texts_of(name) if PRICE.search(text) and LASTS.search(text)]


def test_only_alerts_that_do_not_tell_both_are_excused() -> None:
    assert not [name for name in WITHOUT_MONEY for text in texts_of(name) if PRICE.search(text) and LASTS.search(text)]


@pytest.mark.parametrize("name", SEVERITIES)
def test_no_text_has_a_field_without_what_belongs_there(name: str) -> None:
    assert [text for text in texts_of(name) if EMPTY.search(text)] == []


_COUNTED = re.compile(r"\{\{[^{}]*(?:\$value|\.Value|\$\w+)[^{}]*\}\}\s+(?:GPUs|times|slow ranks|jobs|nodes)\b")
"""A number before a noun that is always in the plural."""
NEVER_ONE = {"GPUEfficiencyFleetBlind": ["{{ .Value }} GPUs"], "GPUEfficiencyNodeScrapedTwice": ["{{ $value }} times"]}
"""These fire for two nodes and two targets, at least."""


@pytest.mark.parametrize("name", SEVERITIES)
def test_one_of_a_thing_is_not_many(name: str) -> None:
    found = _COUNTED.findall(" ".join(map(plain, alerts()[name]["annotations"].values())))
    assert found == NEVER_ONE.get(name, [])


@pytest.mark.parametrize("name", sorted(OF_JOBS))
def test_an_alert_on_a_job_names_it_and_its_owner(name: str) -> None:
    for label in ("job_id", "name", "user", "team"):
        assert f"$labels.{label}" in alerts()[name]["annotations"]["summary"]


RULES = [rule for file, rules in files().items() if not file.startswith("recording") for rule in rules]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_thresholds_are_the_daemons(rule: Rule) -> None:
    compared = [node for node in walk(parse(rule["expr"])) if isinstance(node, Binary)]
    numbers = [part.text for node in compared for part in (node.left, node.right) if isinstance(part, Literal)]
    assert [text for text in numbers if float(text) not in WRITTEN] == []


@pytest.mark.parametrize("name", SEVERITIES)
def test_a_blip_does_not_resolve_an_alert(name: str) -> None:
    assert "keep_firing_for" in alerts()[name]


@pytest.mark.parametrize("name", ON_EXEMPT_JOBS)
def test_an_exempt_job_is_left_alone(name: str) -> None:
    assert "gpu_efficiency_job_exempt" in alerts()[name]["expr"]


def test_every_threshold_named_is_exported() -> None:
    named = {
        threshold
        for rules in files().values()
        for rule in rules
        for threshold in re.findall(r'_threshold\{name="(\w+)"', rule["expr"])
    }
    assert named <= set(EXPORTED_THRESHOLDS)


@pytest.mark.parametrize("name", SEVERITIES)
def test_the_tests_of_an_alert_see_it_fire_and_not(name: str) -> None:
    asked = [each for case in sheet(name)["tests"] for each in case["alert_rule_test"]]
    assert {bool(each["exp_alerts"]) for each in asked} == {True, False}
    last = [case["alert_rule_test"][-1]["exp_alerts"] for case in sheet(name)["tests"]]
    assert [] in last, "none of its tests ends with it resolved"
