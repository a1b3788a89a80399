"""The demo of compose.yaml without containers: two of its nodes, Prometheus with its configuration and every rule."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.composed import ROOT, outside, settings, words
from tests.e2e.running import Daemon, daemon, environment, running
from tests.ports import free_port
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e


def here(folder: Path, ports: dict[str, int], manager: int) -> Path:
    """The demo's configuration of Prometheus with the paths and addresses of this machine; only nodes with a port."""
    config = settings()
    config["rule_files"] = [f"{outside('prometheus', path.rpartition('/')[0])}/*.yaml" for path in config["rule_files"]]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{manager}"]
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    (targets,) = job["static_configs"]
    targets["targets"] = [target for target in targets["targets"] if target.split(":")[0] in ports]
    # The nodes' own names stay their addresses, as in the demo; each is reached through this machine's loopback.
    job["relabel_configs"] += [
        {"source_labels": ["__address__"], "regex": f"{node}:.+", "target_label": "__address__", "replacement": there}
        for node, there in ((node, f"127.0.0.1:{port}") for node, port in ports.items())
    ]
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def prometheus(config: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (
        running(command, config.parent / "prometheus.log", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=PATIENCE) as client,
    ):
        wait_for(lambda: program.alive() and answers(client), "Prometheus is ready")
        yield client
        assert program.end() == 0


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/status/buildinfo").status_code == 200
    except httpx.TransportError:
        return False


def asked(client: httpx.Client, query: str) -> list[dict[str, str]]:
    """Labels of what the query finds."""
    return [row["metric"] for row in client.get("/query", params={"query": query}).json()["data"]["result"]]


def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    file = here(tmp_path, {"gpu-node-00": 1}, 2)
    done = subprocess.run(
        ["promtool", "check", "config", f"{file}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_nodes_and_prometheus_with_every_rule(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes: dict[str, Daemon] = {}
        for node in ("gpu-node-00", "gpu-node-02"):
            (tmp_path / node).mkdir()
            nodes[node] = stack.enter_context(daemon(tmp_path / node, *words(node)))
        file = here(tmp_path, {node: served.port for node, served in nodes.items()}, free_port())
        client = stack.enter_context(prometheus(file))
        up = 'up{cluster="demo"} == 1'
        wait_for(lambda: {row["instance"] for row in asked(client, up)} == set(nodes), "both nodes are scraped")
        groups = client.get("/rules").json()["data"]["groups"]
        assert {Path(group["file"]).name for group in groups} == {
            path.name for path in (ROOT / "alerts").glob("*.yaml")
        }
        told = {(row["instance"], row["node"]) for row in asked(client, "gpu_efficiency_node_info")}
        assert told == {(node, node) for node in nodes}
        teams = {row["team"] for row in asked(client, 'gpu_efficiency_job_info{instance="gpu-node-02"}')}
        assert teams == {"chat", "notebooks", "evaluation", "pretraining"}
