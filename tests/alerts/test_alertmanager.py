"""The example for Alertmanager holds, and sends each alert where it belongs, once."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.alerts.packs import FOLDER, alerts
from tests.alerts.test_rules import SEVERITIES

EXAMPLE = FOLDER / "examples" / "alertmanager.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())


def amtool(*command: str) -> str:
    """Run it, and give what it says. Fails where it fails."""
    done = subprocess.run(["amtool", *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def silenced(source: dict[str, str], target: dict[str, str]) -> bool:
    """Does an alert that fires keep another from being told? As Alertmanager's inhibition does it."""
    return any(
        matched(rule["source_matchers"], source)
        and matched(rule["target_matchers"], target)
        and all(source.get(label, "") == target.get(label, "") for label in rule["equal"])
        for rule in CONFIG["inhibit_rules"]
    )


def matched(matchers: list[str], labels: dict[str, str]) -> bool:
    for matcher in matchers:
        label, operator, value = re.fullmatch(r'(\w+)(=~?)"(.*)"', matcher).groups()  # type: ignore[union-attr]
        if not re.fullmatch(value if operator == "=~" else re.escape(value), labels.get(label, "")):
            return False
    return True


def job(name: str, *, cluster: str = "east", job_id: str = "7") -> dict[str, str]:
    return {"alertname": name, "cluster": cluster, "job_id": job_id}


def node(name: str, instance: str = "n1") -> dict[str, str]:
    return {"alertname": name, "cluster": "east", "instance": instance}


@pytest.mark.e2e
def test_alertmanager_takes_it() -> None:
    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "team", "receivers"),
    [
        ("JobDeadlocked", "vision", "vision-pages"),
        ("JobDeadlocked", "speech", "platform-pages"),
        ("IdleAllocationCost", "platform", "platform-pages"),
        ("FleetBlind", "platform", "platform-pages"),
        ("GPUZombie", "vision", "vision-tickets"),
        ("GPUZombie", "speech", "platform-tickets"),
        ("ExporterDown", "platform", "platform-tickets"),
        ("EfficiencyRegressed", "vision", "digest"),
    ],
)
def test_an_alert_goes_to_its_owner(name: str, team: str, receivers: str) -> None:
    labels = [f"alertname={name}", f"team={team}", f"severity={SEVERITIES[name]}", "pack=gpu-efficiency"]
    assert amtool("config", "routes", "test", f"--config.file={EXAMPLE}", *labels).strip() == receivers


@pytest.mark.parametrize("name", ["JobHungSuspected", "StragglerRank", "GPUZombie", "EfficiencyRegressed"])
def test_a_deadlock_silences_what_it_explains_of_its_job(name: str) -> None:
    assert silenced(job("JobDeadlocked"), job(name))
    assert not silenced(job("JobDeadlocked"), job(name, job_id="8"))
    assert not silenced(job("JobDeadlocked"), job(name, cluster="west"))


@pytest.mark.parametrize("name", ["ExporterBlind", "ExporterClockSkew", "SchedulerDataStale"])
def test_an_exporter_that_is_down_is_not_blind_as_well(name: str) -> None:
    assert silenced(node("ExporterDown"), node(name))
    assert not silenced(node("ExporterDown"), node(name, "n2"))


@pytest.mark.parametrize("name", ["ExporterDown", "ExporterBlind", "ExporterMissing"])
def test_a_blind_fleet_is_one_page(name: str) -> None:
    assert silenced({"alertname": "FleetBlind", "cluster": "east"}, node(name))
    assert not silenced({"alertname": "FleetBlind", "cluster": "west"}, node(name))


@pytest.mark.parametrize("name", ["GPUZombie", "GPUAllocatedWithoutProcess"])
def test_the_owner_has_a_ticket_though_idle_money_pages(name: str) -> None:
    assert not silenced({"alertname": "IdleAllocationCost", "cluster": "east"}, job(name))


def test_no_page_is_silenced() -> None:
    pages = [name for name, severity in SEVERITIES.items() if severity == "page"]
    assert not [(a, b) for a in SEVERITIES for b in pages if silenced({"alertname": a}, {"alertname": b})]


def test_every_alert_it_names_exists() -> None:
    written = re.findall(r'alertname=~?"(.*?)"', EXAMPLE.read_text())
    assert not [
        part for text in written for part in text.split("|") if not any(re.fullmatch(part, name) for name in alerts())
    ]


def test_a_deadlock_is_told_within_the_sixth_minute() -> None:
    pages = next(route for route in CONFIG["route"]["routes"] if 'severity="page"' in route["matchers"])
    assert pages["group_wait"] == "10s"
    assert "instance" not in CONFIG["route"]["group_by"]
