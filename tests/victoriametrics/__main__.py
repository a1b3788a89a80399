"""Lets a current VictoriaMetrics take the place of Prometheus: `make victoriametrics`.

Debian unstable's is in the tree of `make prometheus-3`. It answers every expression of the rules as Prometheus does,
and every panel of every board has data of the simulated world, whose rules it has evaluated itself. Then it scrapes a
node, and vmalert evaluates all rules on that: Alertmanager is told of an exporter that is down, until `keep_firing_for`
is over.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.alerts import packs
from tests.alerts.test_templates import alertmanager
from tests.dashboards.past import rules
from tests.e2e.databases import ready, victoria
from tests.e2e.pace import faster_rules
from tests.e2e.running import environment, running
from tests.e2e.test_page import node
from tests.ports import free_port
from tests.prometheus3 import TREE, build_tree, run_tests
from tests.waiting import wait_for

_STORE = ("victoria-metrics",)
_DIFFER = ("test_a_panel_says_what_the_ledger_says", "Exporters")
"""Tests with numbers or marks that differ where a series begins: docs/prometheus.md says how."""
_DOWN = "GPUEfficiencyExporterDown"


def vmalert(folder: Path, store: str, manager: str, stack: ExitStack) -> httpx.Client:
    """Run it with all rules, at the pace of the tests of alerts, until the stack ends."""
    (folder / "rules").mkdir()
    for name in packs.files():
        (folder / "rules" / name).write_text(faster_rules((packs.FOLDER / name).read_text()))
    port = free_port()
    words = [
        f"{TREE}/usr/bin/vmalert", f"-rule={folder}/rules/*.yaml", f"-datasource.url={store}",
        f"-remoteWrite.url={store}", f"-remoteRead.url={store}", f"-notifier.url={manager}",
        "-evaluationInterval=2s", "-rule.evalDelay=0s", f"-httpListenAddr=127.0.0.1:{port}",
    ]  # fmt: skip
    program = stack.enter_context(running(words, folder / "vmalert.log", environment()))
    client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60))
    wait_for(lambda: program.alive() and ready(client), "vmalert is ready")
    return client


def evaluated(client: httpx.Client) -> bool:
    """Whether all rules were. Raises AssertionError if one cannot be."""
    found = [rule for group in client.get("/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    bad = {rule["name"]: rule["lastError"] for rule in found if rule["lastError"]}
    assert bad == {}
    return all(rule["lastEvaluation"] > "0001-01-01T00:00:00Z" for rule in found)


def state(client: httpx.Client) -> dict[str, Any]:
    """Return the alert on an exporter that is down as vmalert has it; empty if it is not active."""
    active = client.get("/api/v1/alerts").json()["data"]["alerts"]
    return next((each for each in active if each["name"] == _DOWN), {})


def check_vmalert(folder: Path) -> None:
    """Raises AssertionError if a rule fails, or the alert does not come, stay and go as it says."""
    port = free_port()
    job = {"job_name": "gpu-efficiency", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    (folder / "scrape.yaml").write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    with ExitStack() as stack:
        store = stack.enter_context(victoria(folder, f"-promscrape.config={folder}/scrape.yaml"))
        # It resolves by itself what it has not been told again for a while; vmalert tells it the end.
        quiet = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}
        manager = stack.enter_context(alertmanager(quiet, folder))
        with node(folder, port):
            client = vmalert(folder, f"{store.base_url}", f"{manager.base_url}", stack)
            wait_for(lambda: evaluated(client), "every rule is evaluated", seconds=300)
            assert not state(client)

        def told() -> list[Any]:
            found: list[Any] = manager.get("/api/v2/alerts", params={"filter": f"alertname={_DOWN}"}).json()
            return found

        (alert,) = wait_for(told, "Alertmanager is told")
        assert "does not answer" in alert["annotations"]["summary"]
        with node(folder, port):
            wait_for(lambda: _up(store), "it answers again")
            kept = wait_for(_kept(client), "it is kept firing though nothing is wrong")
            assert kept["state"] == "firing"
            wait_for(lambda: not told() and not state(client), "it ends")
            assert evaluated(client)


def _up(store: httpx.Client) -> bool:
    found = store.get("/api/v1/query", params={"query": "up == 1"}).json()["data"]["result"]
    return bool(found)


def _kept(client: httpx.Client) -> Callable[[], dict[str, Any] | None]:
    def look() -> dict[str, Any] | None:
        found = state(client)
        return found if found.get("stabilizing") else None

    return look


def main() -> int:
    """Return 0 if it does all that. Raises AssertionError or CalledProcessError."""
    build_tree()
    run_tests(_STORE, "tests/e2e/test_prometheus_scale.py", "-k", "victoriametrics")
    panels = "tests/dashboards/test_panels.py"
    run_tests(_STORE, "-p", "tests.victoriametrics.store", panels, "-k", f"not {' and not '.join(_DIFFER)}")
    os.environ["PATH"] = f"{TREE}/usr/bin:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        check_vmalert(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
