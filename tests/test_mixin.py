"""The mixin holds what the files hold: every rule, every board, and the addresses that an operator gives."""

import json
from pathlib import Path
from typing import Any

import _gojsonnet
import pytest

from tests.alerts import packs

ROOT = Path(__file__).parents[1]


def evaluated(expr: str) -> Any:
    """What Jsonnet makes of an expression, in which `mixin` is ours."""
    text = f"local mixin = import 'mixin.libsonnet'; {expr}"
    return json.loads(_gojsonnet.evaluate_snippet("test", text, jpathdir=[f"{ROOT}"]))


def groups_of(*, recording: bool) -> list[Any]:
    found = (groups for name, groups in packs.groups().items() if name.startswith("recording") is recording)
    return sorted((group for groups in found for group in groups), key=lambda group: str(group["name"]))


@pytest.mark.parametrize(("field", "recording"), [("prometheusAlerts", False), ("prometheusRules", True)])
def test_it_holds_every_rule(field: str, *, recording: bool) -> None:
    got = evaluated(f"mixin.{field}")["groups"]
    assert sorted(got, key=lambda group: str(group["name"])) == groups_of(recording=recording)


@pytest.mark.slow
def test_it_holds_every_board() -> None:
    files = {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")}
    assert evaluated("mixin.grafanaDashboards") == files


@pytest.mark.slow
def test_the_address_of_logs_is_the_operators() -> None:
    boards = evaluated("(mixin + { _config+:: { logsUrl: 'https://grafana.example/d/logs' } }).grafanaDashboards")
    asked = {
        name: [each["query"] for each in board["templating"]["list"] if each["name"] == "logs"]
        for name, board in boards.items()
    }
    assert {name.split("-")[-1] for name, found in asked.items() if found} == {
        "job.json", "node.json", "quality.json", "zombies.json",
    }  # fmt: skip
    assert {query for found in asked.values() for query in found} == {"https://grafana.example/d/logs"}


@pytest.mark.slow
def test_the_address_of_runbooks_is_the_operators_on_boards_too() -> None:
    own = "(mixin + { _config+:: { runbookBaseUrl: 'https://wiki.example/runbooks/' } }).grafanaDashboards"
    found = evaluated(own)["gpu-efficiency-zombies.json"]["templating"]["list"]
    assert [each["query"] for each in found if each["name"] == "runbooks"] == ["https://wiki.example/runbooks"]


def test_addresses_and_labels_of_alerts_are_the_operators() -> None:
    own = {
        "runbookBaseUrl": "https://wiki.example/runbooks/", "dashboardBaseUrl": "https://grafana.example",
        "alertLabels": {"routed": "x"},
    }  # fmt: skip
    before = {rule["alert"]: rule for rule in alerts_in(groups_of(recording=False))}
    after = alerts_in(evaluated(f"(mixin + {{ _config+:: {json.dumps(own)} }}).prometheusAlerts")["groups"])
    assert {rule["alert"] for rule in after} == set(before)
    for rule in after:
        said, was = rule["annotations"], before[rule["alert"]]
        assert said["runbook_url"] == f"https://wiki.example/runbooks/{rule['alert']}.md"
        assert said["dashboard_url"] == "https://grafana.example" + was["annotations"]["dashboard_url"]
        assert rule["labels"] == was["labels"] | {"routed": "x"}
        assert rule["expr"] == was["expr"]


def alerts_in(groups: list[Any]) -> list[Any]:
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]
