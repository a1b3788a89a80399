"""compose.yaml as far as it can be held true without a container engine: its words, its paths, who may look.

Its nodes and its Prometheus are run by tests/e2e/test_compose.py. Not run anywhere: Docker, Grafana.
"""

import json
import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from compose import inbox
from exporter.cli import wiring
from exporter.cli.simulate import demo_simulation
from exporter.clock import SystemClock
from exporter.config import DEFAULT_PORT
from exporter.simulate.simulation import Simulation
from exporter.simulate.workload import FOREVER_MS
from tests.composed import COMPOSE, NODES, ROOT, SERVICES, arguments, flag, mounts, outside, settings

KNOWN = {
    "build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck", "image", "network_mode",
    "ports", "pull_policy", "read_only", "restart", "security_opt", "tmpfs", "volumes",
}  # fmt: skip
"""Keys of a service in the Compose specification, as far as they are used: a slip of the pen is none of them."""
BOARDS = ("fleet", "chargeback", "job", "node", "training", "inference", "zombies", "quality")


def simulated(node: str) -> Simulation:
    return demo_simulation(arguments(node), SystemClock())


# -- words and paths --


def test_every_word_is_compose_s() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "volumes"}
    assert {key for service in SERVICES.values() for key in service} <= KNOWN
    assert set(COMPOSE["volumes"]) == {
        source for name in SERVICES for source, _, _ in mounts(name) if not source.startswith(".")
    }
    named = {other for service in SERVICES.values() for other in service.get("depends_on", [])}
    named |= {
        service["network_mode"].removeprefix("service:") for service in SERVICES.values() if "network_mode" in service
    }
    assert named <= set(SERVICES)


def test_it_listens_on_the_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    published = [re.fullmatch(r"127\.0\.0\.1:(\d+):\d+", port) for port in ports]
    assert sorted(int(m[1]) for m in published if m) == [3000, 9090, 9093, 19400]
    assert all(published)


def test_what_is_mounted_is_there_and_cannot_be_written() -> None:
    bound = [mount for name in SERVICES for mount in mounts(name) if mount[0].startswith(".")]
    assert len(bound) >= len(NODES) + 6
    assert not [source for source, _, mode in bound if mode != "ro" or not (ROOT / source).exists()]


def test_images_are_pinned_and_ours_is_built_once_and_asked_of_no_registry() -> None:
    ours = {name: s for name, s in SERVICES.items() if s["image"].startswith("gpu-efficiency-exporter:")}
    assert set(ours) == set(NODES) | {"inbox"}
    assert {name: s["pull_policy"] for name, s in ours.items() if s["pull_policy"] != "never"} == {
        "gpu-node-00": "build"
    }
    assert [name for name, s in SERVICES.items() if "build" in s] == ["gpu-node-00"]
    assert all("gpu-node-00" in s["depends_on"] for name, s in ours.items() if name != "gpu-node-00")
    others = [s["image"] for name, s in SERVICES.items() if name not in ours]
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?", image) for image in others)


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_more_power_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] or name == "grafana"


# -- the nodes --


@pytest.mark.parametrize("node", NODES)
def test_a_node_has_the_name_it_is_scraped_by_and_never_ends(node: str) -> None:
    simulation = simulated(node)
    assert simulation.host == node
    assert simulation.duration_ms - simulation.preroll_ms >= FOREVER_MS
    assert abs(simulation.live_from - SystemClock().now()) < 60e9


def test_no_two_nodes_share_a_gpu_and_one_job_spans_two() -> None:
    fleet = [simulated(node) for node in NODES]
    assert len({uuid for node in fleet for uuid in node.uuids}) == 8 * len(fleet)
    jobs = [job for node in fleet for job in {job.owner.job_id for job in node.plan.jobs}]
    assert {job for job in jobs if jobs.count(job) > 1} == {"40000"}


@pytest.mark.parametrize("node", NODES)
def test_a_node_answers_others_than_itself(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICES[node]["environment"].items():
        monkeypatch.setenv(name, value)
    config = wiring.configure(arguments(node), loopback=True)
    assert config.web.listen_address == f"0.0.0.0:{DEFAULT_PORT}"
    assert config.web.open_page == ("ports" in SERVICES[node]), "a published port is not the container's loopback"
    assert config.prices
    assert config.budget.idle_per_hour


# -- Prometheus, Alertmanager, and who is told --


def test_prometheus_scrapes_every_node_loads_every_rule_and_knows_alertmanager() -> None:
    config = settings()
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{node}:{DEFAULT_PORT}" for node in NODES]
    (rules,) = config["rule_files"]
    folder = outside("prometheus", rules.rpartition("/")[0])
    assert set(folder.glob(rules.rpartition("/")[2])) == set((ROOT / "alerts").glob("*.yaml"))
    (target,) = config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert target == "alertmanager:9093"
    assert outside("alertmanager", flag("alertmanager", "config.file")) == ROOT / "alerts/examples/alertmanager.yaml"


def test_the_inbox_is_where_the_example_tells_its_receivers() -> None:
    example = (ROOT / "alerts/examples/alertmanager.yaml").read_text()
    host, port = inbox.ADDRESS
    assert set(re.findall(r"url: http://([^/]+)/", example)) == {f"{host}:{port}"}
    assert SERVICES["inbox"]["network_mode"] == "service:alertmanager"
    assert outside("inbox", SERVICES["inbox"]["entrypoint"][1]) == Path(inbox.__file__)


def test_the_inbox_prints_who_is_told_of_what(capfd: pytest.CaptureFixture[str]) -> None:
    alert = {"status": "firing", "labels": {}, "annotations": {"summary": "job 7 is deadlocked"}}
    with ThreadingHTTPServer(("127.0.0.1", 0), inbox.Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/pages/platform"
            answer = httpx.post(url, json={"alerts": [alert, alert]}, trust_env=False)
        finally:
            server.shutdown()
            thread.join()
    assert answer.status_code == 200
    assert capfd.readouterr().out.splitlines() == ["/pages/platform firing: job 7 is deadlocked"] * 2


# -- Grafana --


def provisioned(what: str) -> dict[str, Any]:
    """What Grafana reads of its one data source or its one provider of dashboards."""
    file = outside("grafana", f"/etc/grafana/provisioning/{what}/gpu-efficiency.yaml")
    (found,) = yaml.safe_load(file.read_text())["providers" if what == "dashboards" else what]
    return dict(found)


def test_grafana_finds_the_eight_boards_and_opens_the_fleet_s() -> None:
    folder = outside("grafana", provisioned("dashboards")["options"]["path"])
    assert {path.stem for path in folder.glob("*.json")} == {f"gpu-efficiency-{name}" for name in BOARDS}
    home = outside("grafana", SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert json.loads(home.read_text())["uid"] == "gpu-efficiency-fleet"


def test_the_boards_ask_for_a_data_source_of_the_kind_that_is_provisioned() -> None:
    source = provisioned("datasources")
    assert source["isDefault"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == settings()["global"]["scrape_interval"]
    for path in outside("grafana", provisioned("dashboards")["options"]["path"]).glob("*.json"):
        variables = {v["name"]: v for v in json.loads(path.read_text())["templating"]["list"]}
        assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", source["type"])


def test_grafana_has_no_user_whose_password_one_could_guess() -> None:
    told = SERVICES["grafana"]["environment"]
    assert told["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert told["GF_AUTH_BASIC_ENABLED"] == "false"
    assert told["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not [name for name in told if "PASSWORD" in name]
