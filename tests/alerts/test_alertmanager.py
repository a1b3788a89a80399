"""The example for Alertmanager holds, and sends each alert where it belongs, once."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.alerts.packs import FOLDER, alerts
from tests.alerts.test_rules import SEVERITIES

EXAMPLE = FOLDER / "examples" / "alertmanager.yaml"
PACK = "gpu-efficiency"
RETENTION = 120
"""Hours for which Alertmanager remembers what it has sent: the default of --data.retention."""
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
    return {"alertname": name, "cluster": cluster, "job_id": job_id, "pack": PACK}


def node(name: str, instance: str = "n1") -> dict[str, str]:
    return {"alertname": name, "cluster": "east", "instance": instance, "pack": PACK}


def fleet(name: str, cluster: str = "east") -> dict[str, str]:
    return {"alertname": name, "cluster": cluster, "pack": PACK}


@pytest.mark.e2e
def test_alertmanager_takes_it() -> None:
    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "team", "receivers"),
    [
        ("GPUEfficiencyJobDeadlocked", "vision", "vision-pages"),
        ("GPUEfficiencyJobDeadlocked", "speech", "platform-pages"),
        ("GPUEfficiencyIdleAllocationCost", "platform", "platform-pages"),
        ("GPUEfficiencyFleetBlind", "platform", "platform-pages"),
        ("GPUEfficiencyGPUZombie", "vision", "vision-tickets"),
        ("GPUEfficiencyGPUZombie", "speech", "platform-tickets"),
        ("GPUEfficiencyExporterDown", "platform", "platform-tickets"),
        ("GPUEfficiencyRegressed", "vision", "digest"),
    ],
)
def test_an_alert_goes_to_its_owner(name: str, team: str, receivers: str) -> None:
    labels = [f"alertname={name}", f"team={team}", f"severity={SEVERITIES[name]}", "pack=gpu-efficiency"]
    assert amtool("config", "routes", "test", f"--config.file={EXAMPLE}", *labels).strip() == receivers


@pytest.mark.parametrize(
    "name",
    ["GPUEfficiencyJobHungSuspected", "GPUEfficiencyStragglerRank", "GPUEfficiencyGPUZombie", "GPUEfficiencyRegressed"],
)
def test_a_deadlock_silences_what_it_explains_of_its_job(name: str) -> None:
    assert silenced(job("GPUEfficiencyJobDeadlocked"), job(name))
    assert not silenced(job("GPUEfficiencyJobDeadlocked"), job(name, job_id="8"))
    assert not silenced(job("GPUEfficiencyJobDeadlocked"), job(name, cluster="west"))


@pytest.mark.parametrize(
    "name", ["GPUEfficiencyExporterBlind", "GPUEfficiencyExporterClockSkew", "GPUEfficiencySchedulerDataStale"]
)
def test_an_exporter_that_is_down_is_not_blind_as_well(name: str) -> None:
    assert silenced(node("GPUEfficiencyExporterDown"), node(name))
    assert not silenced(node("GPUEfficiencyExporterDown"), node(name, "n2"))


@pytest.mark.parametrize("name", ["GPUEfficiencyExporterBlind", "GPUEfficiencySchedulerDataStale"])
def test_a_blind_fleet_is_one_page(name: str) -> None:
    assert silenced(fleet("GPUEfficiencyFleetBlind"), node(name))
    assert not silenced(fleet("GPUEfficiencyFleetBlind", "west"), node(name))


@pytest.mark.parametrize("name", ["GPUEfficiencyExporterDown", "GPUEfficiencyExporterMissing"])
def test_tickets_that_name_the_nodes_of_a_blind_fleet_or_others_stay(name: str) -> None:
    assert not silenced(fleet("GPUEfficiencyFleetBlind"), node(name))


@pytest.mark.parametrize("name", ["GPUEfficiencyExporterDown", "GPUEfficiencyExporterBlind"])
def test_another_pack_s_alert_of_the_same_name_is_neither_silenced_nor_silences(name: str) -> None:
    foreign = node(name) | {"pack": "", "team": "network", "job": "snmp"}
    sources = [
        fleet("GPUEfficiencyFleetBlind"),
        node("GPUEfficiencyExporterDown"),
        node("GPUEfficiencySchedulerDataStale"),
    ]
    assert not [source for source in sources if silenced(source, foreign)]
    assert not silenced(foreign, node("GPUEfficiencyExporterBlind"))


def routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield route
    for inner in route.get("routes", ()):
        yield from routes(inner)


def test_nothing_is_repeated_after_alertmanager_has_forgotten_it() -> None:
    hours = {"h": 1, "d": 24}
    told = [route["repeat_interval"] for route in routes(CONFIG["route"]) if "repeat_interval" in route]
    assert told
    assert all(int(each[:-1]) * hours[each[-1]] < RETENTION for each in told)


def test_all_zombies_of_a_user_are_one_ticket() -> None:
    (tickets,) = (
        route for route in CONFIG["route"]["routes"] if route["matchers"] == [f'pack="{PACK}"', 'severity="ticket"']
    )
    assert tickets["group_by"] == ["cluster", "alertname", "team", "user"]


@pytest.mark.parametrize("name", ["GPUEfficiencyGPUZombie", "GPUEfficiencyGPUAllocatedWithoutProcess"])
def test_the_owner_has_a_ticket_though_idle_money_pages(name: str) -> None:
    assert not silenced(fleet("GPUEfficiencyIdleAllocationCost"), job(name))


def test_no_page_is_silenced() -> None:
    pages = [name for name, severity in SEVERITIES.items() if severity == "page"]
    assert not [(a, b) for a in SEVERITIES for b in pages if silenced(fleet(a), fleet(b))]


def test_every_alert_it_names_exists() -> None:
    written = re.findall(r'alertname=~?"(GPUEfficiency|)\(?(.*?)\)?"', EXAMPLE.read_text())
    named = [f"{prefix}{part}" for prefix, rest in written for part in rest.split("|")]
    assert named
    assert not [part for part in named if not any(re.fullmatch(part, name) for name in alerts())]


def test_a_deadlock_is_told_within_the_sixth_minute() -> None:
    pages = next(route for route in CONFIG["route"]["routes"] if 'severity="page"' in route["matchers"])
    assert pages["group_wait"] == "10s"
    assert "instance" not in CONFIG["route"]["group_by"]
