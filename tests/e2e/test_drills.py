"""`gpu-efficiency demo --drill` as an operator runs it: what it prints goes into a real Prometheus, whose alert fires.

Those whose trouble lies in the daemon's own parts, one of the cluster's, a page, and one that needs a past. Rules come
faster than in the world, and without `for`: how long a drill takes is in `tests/alerts/test_drills.py`.
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.alerts.packs import alerts, files, needed
from tests.e2e.databases import started
from tests.e2e.fleet import RULES
from tests.e2e.pace import faster_rules, sooner
from tests.e2e.running import Program, command, environment, running
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e
NAMES = (
    "GPUEfficiencyConservationBroken",
    "GPUEfficiencyExemptionExpired",
    "GPUEfficiencyExporterMissing",
    "GPUEfficiencyHistoryFailing",
    "GPUEfficiencyJobDeadlocked",
)


def _snippet(program: Program) -> list[dict[str, Any]]:
    """The scrape jobs that a drill prints."""
    lines = program.log().splitlines()
    begin = next((n for n, line in enumerate(lines) if "scrape_configs" in line), None)
    if begin is None or not any("afterwards" in line for line in lines):
        return []
    found: list[dict[str, Any]] = yaml.safe_load(
        "\n".join(line for line in lines[begin + 1 :] if line.startswith("    "))
    )
    return found


PAST = "GPUEfficiencyRegressed"
"""The drill that needs a past."""


def _often(rules: str) -> str:
    """The rules as they are, each second."""
    tree = yaml.safe_load(rules)
    for group in tree["groups"]:
        group["interval"] = "1s"
    return yaml.safe_dump(tree)


def _eager(rules: str, names: Sequence[str]) -> str:
    """The alerts of the drills, and what they and their texts read: all other rules are most of what rules cost."""
    read = {rule["record"] for rule in needed(str([alerts()[name] for name in names]), list(files()))}
    tree = yaml.safe_load(rules)
    for group in tree["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") in names or rule.get("record") in read]
        for rule in group["rules"]:
            rule.pop("for", None)
    tree["groups"] = [group for group in tree["groups"] if group["rules"]]
    return yaml.safe_dump(tree, width=1 << 20)


@contextmanager
def _prometheus(
    folder: Path, names: Sequence[str], jobs: Sequence[dict[str, Any]], pace: Callable[[str], str]
) -> Iterator[httpx.Client]:
    """Run a Prometheus that scrapes the drills, with their rules."""
    for path in RULES:
        (folder / f"rules-{path.name}").write_text(_eager(pace(path.read_text()), names))
    config = {
        "global": {"evaluation_interval": sooner("1m")},
        "rule_files": [f"{folder}/rules-*.yaml"],
        "scrape_configs": [job | {"scrape_interval": "1s", "scrape_timeout": "1s"} for job in jobs],
    }
    with started(folder, config, f"--storage.tsdb.path={folder / 'tsdb'}") as client:
        yield client


@pytest.fixture(name="client", scope="module")
def _client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("drills")
    with ExitStack() as stack:
        jobs = [job for name in NAMES for job in _started(stack, folder, name)]
        yield stack.enter_context(_prometheus(folder, NAMES, jobs, faster_rules))


def _started(stack: ExitStack, folder: Path, name: str) -> list[dict[str, Any]]:
    words = command("demo", "--drill", name, "--web.listen-address", f"127.0.0.1:{free_port()}")
    program = stack.enter_context(running(words, folder / f"{name}.log", environment()))
    return wait_for(lambda: _snippet(program) if program.alive() else None, f"{name} says what to scrape")


def _alerts(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    try:
        answer = client.get("/api/v1/alerts")
    except httpx.TransportError:
        return []
    alerts = answer.json()["data"]["alerts"] if answer.status_code == 200 else []
    of_drill = (alert for alert in alerts if alert["labels"]["cluster"] == f"drill-{name}")
    return [alert for alert in of_drill if alert["labels"]["alertname"] == name and alert["state"] == "firing"]


@pytest.mark.parametrize("name", NAMES)
def test_a_drill_fires_its_alert_in_a_real_prometheus(client: httpx.Client, name: str) -> None:
    (alert,) = wait_for(lambda: _alerts(client, name), f"{name} fires", seconds=3 * PATIENCE)
    assert f"drill-{name}" in alert["annotations"]["summary"]
    assert alert["labels"]["severity"] == ("page" if name == "GPUEfficiencyJobDeadlocked" else "ticket")


def test_a_drill_that_needs_a_past_fires_after_what_it_prints_was_done(tmp_path: Path) -> None:
    """Its rules look as far back as they do; only their turns come each second."""
    with ExitStack() as stack:
        jobs = _started(stack, tmp_path, PAST)
        printed = (tmp_path / f"{PAST}.log").read_text()
        assert f"demo --drill {PAST} --past > past.txt" in printed
        past = subprocess.check_output(command("demo", "--drill", PAST, "--past"), env=environment())
        (tmp_path / "past.txt").write_bytes(past)
        assert "promtool tsdb create-blocks-from openmetrics past.txt DATA" in printed
        words = ("promtool", "tsdb", "create-blocks-from", "openmetrics", "past.txt", "tsdb")
        subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        client = stack.enter_context(_prometheus(tmp_path, (PAST,), jobs, _often))
        (alert,) = wait_for(lambda: _alerts(client, PAST), f"{PAST} fires", seconds=3 * PATIENCE)
    assert alert["annotations"]["summary"] == f"SIMULATED: drill-{PAST}: The cluster: gau has fallen to 0%"
    assert "its usual is 90% (of the week)" in alert["annotations"]["description"]
