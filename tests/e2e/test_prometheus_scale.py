"""Prometheus itself, as docs/prometheus.md sets it up.

Agents that write to a store, profiles that drop detail, and the number of series against `gpu-efficiency cardinality`.
VictoriaMetrics, where it is installed, is asked what Prometheus is asked.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from msgspec.structs import replace

from exporter.cardinality import (
    PROFILES,
    SERIES_OF_A_SCRAPE,
    FleetSize,
    kept_share,
    max_samples,
    recorded_series,
    recording_rules,
    scraped_series,
)
from exporter.cli.cardinality import USUAL_LEAKS
from tests.alerts.packs import FOLDER
from tests.dashboards.past import Past, prometheus, rules
from tests.dashboards.stories import Story, played
from tests.e2e.databases import agree, asked, one, started, victoria
from tests.e2e.running import ROOT, Daemon, Page, daemon
from tests.fleets import fleet_of
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
EXAMPLES = ROOT / "examples" / "prometheus"
END = 1_767_873_600.0
NODES = (
    *(Story(cluster="a", scenario="fleet", node=number, seconds=2400, period=10) for number in range(8)),
    Story(cluster="a", scenario="demo", node=8),
)
"""Eight kinds of nodes, and the demo: trainings, servers, notebooks, hangs, one GPU that is lost."""


@pytest.fixture(name="demo", scope="module")
def _demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("demo"), "demo") as served:
        yield served


# -- agent mode --


def quick_rules(folder: Path) -> list[Path]:
    """Copies of our rules, at the pace of the server that evaluates them."""
    (quick := folder / "alerts").mkdir()
    for path in FOLDER.glob("*.yaml"):
        (quick / path.name).write_text(re.sub(r"(?m)^ *interval: .*\n", "", path.read_text()))
    return sorted(quick.iterdir())


def quick_agent(folder: Path, served: Daemon, url: str) -> dict[str, Any]:
    """The example of an agent, for one daemon, every second, into an open store."""
    agent: dict[str, Any] = yaml.safe_load((EXAMPLES / "agent.yaml").read_text())
    agent["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    nodes = folder / "nodes.yaml"
    nodes.write_text(yaml.safe_dump([{"targets": [f"127.0.0.1:{served.port}"]}]))
    agent["scrape_configs"][0]["file_sd_configs"] = [{"files": [f"{nodes}"]}]
    (write,) = agent["remote_write"]
    del write["tls_config"], write["basic_auth"]
    write["url"] = url
    return agent


def agent_mode() -> str:
    """The flag of the Prometheus on the PATH: version 3 has one of its own."""
    said = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
    return "--enable-feature=agent" if "version 2." in said.stdout + said.stderr else "--agent"


def test_an_agent_writes_a_node_s_useful_share_into_a_store_with_the_rules(demo: Daemon, tmp_path: Path) -> None:
    """The two examples with other addresses and a faster pace; nothing else of them is changed."""
    central = yaml.safe_load((EXAMPLES / "central.yaml").read_text())
    del central["alerting"]
    central |= {"rule_files": [f"{file}" for file in quick_rules(tmp_path)], "global": {"evaluation_interval": "1s"}}
    words = (f"--storage.tsdb.path={tmp_path / 'tsdb'}", "--web.enable-remote-write-receiver")
    with started(tmp_path / "store", central, *words) as store:
        agent = quick_agent(tmp_path, demo, f"{store.base_url}/api/v1/write")
        folder = f"--storage.agent.path={tmp_path / 'wal'}"
        with started(tmp_path / "agent", agent, agent_mode(), folder):
            query = 'cluster:gpu_efficiency_product:ratio_rate5m{cluster="alps"}'
            share = wait_for(lambda: one(store, query), "the useful share of the cluster is recorded in the store")
            page = demo.page()
            assert 0 < share < 1
            assert asked(store, 'up{cluster="alps",instance="127.0.0.1"}')
            assert one(store, 'sum(gpu_efficiency_node_gpus{cluster="alps"})') == page.total("node_gpus")
            assert one(store, 'count(gpu_efficiency_job_info{cluster="alps"})') == len(page.rows("job_info"))
            shown = 'cluster:gpu_efficiency_kernel_utilization:ratio_rate5m{cluster="alps"}'
            assert share < wait_for(lambda: one(store, shown), "what nvidia-smi shows")
            assert asked(store, '{__name__=~"go_.*"}') == {}


# -- profiles --


def fleet_of_page(page: Page) -> FleetSize:
    """What the page of one node says that there is."""
    gpus = {labels["uuid"] for labels, _ in page.rows("paid_seconds_total")}
    held = {labels["uuid"] for labels, _ in page.rows("allocation_info")}
    accounts = {
        tuple(labels[k] for k in ("team", "account", "workload_namespace"))
        for labels, _ in page.rows("account_seconds_total")
    }
    return FleetSize(
        gpus=len(gpus), jobs=len(page.rows("job_info")), free=len(gpus - held),
        spinning=len(page.rows("hang_suspected")),
        trouble=len(page.rows("job_hang_suspected_gpus")), serving=len(page.rows("job_engine_info")),
        reporting=len({labels["job_id"] for labels, _ in page.rows("job_reported_gpu_seconds_total")}),
        node_accounts=len(accounts), listening=bool(page.rows("workload_messages_total")),
    )  # fmt: skip


def test_what_prometheus_keeps_by_each_profile_is_what_the_calculator_says(demo: Daemon, tmp_path: Path) -> None:
    """A demo's daemon four times, with the relabelling of the examples; and a limit of one below the truth refuses."""
    fleet = fleet_of_page(demo.page())
    jobs = [_job(demo, profile, max_samples(fleet, profile)) for profile in PROFILES]
    tight = _job(demo, "full", 100) | {"job_name": "tight"}
    pace = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config = {"global": pace, "scrape_configs": [*jobs, tight]}
    with started(tmp_path / "prometheus", config, f"--storage.tsdb.path={tmp_path / 'tsdb'}") as client:
        wait_for(lambda: one(client, "count(count_over_time(up[1m]) >= 2)") == len(PROFILES) + 1, "two scrapes of each")
        for profile in PROFILES:
            assert one(client, f'up{{job="{profile}"}}') == 1
            stored = one(client, f'count({{job="{profile}"}})')
            assert stored is not None
            fleet = fleet_of_page(demo.page())
            most = sum(count * kept_share(name, profile) for name, count in scraped_series(fleet).items())
            assert stored <= most <= stored * 1.15, (profile, stored, most)
            assert one(client, f'count({{job="{profile}",__name__=~"up|scrape_.+"}})') == SERIES_OF_A_SCRAPE
        assert one(client, 'up{job="tight"}') == 0
        (target,) = [t for t in client.get("/api/v1/targets").json()["data"]["activeTargets"]
                     if t["labels"]["job"] == "tight"]  # fmt: skip
        assert "sample limit exceeded" in target["lastError"]


def _job(demo: Daemon, profile: str, limit: float) -> dict[str, Any]:
    found = {} if profile == "full" else yaml.safe_load((EXAMPLES / f"relabel-{profile}.yaml").read_text())
    target = {"targets": [f"127.0.0.1:{demo.port}"]}
    return {"job_name": profile, "sample_limit": int(limit), "static_configs": [target], **found}


# -- what rules record --


class Kept:
    """Past's client, which keeps all that is written, for another store."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.written: list[bytes] = []

    def post(self, path: str, **more: Any) -> httpx.Response:
        if path == "/api/v1/write":
            self.written.append(more["content"])
        return self._client.post(path, **more)


class Stored(NamedTuple):
    """A Prometheus with pages of nine nodes, of forty minutes, and everything the rules make of them."""

    past: Past
    client: httpx.Client
    fleet: FleetSize
    written: list[bytes]


@contextmanager
def nine_nodes(folder: Path) -> Iterator[Stored]:
    """Run it until the block ends."""
    with prometheus(folder) as server, httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
        kept, snapshots = Kept(client), []
        past = Past(server.url, kept)  # type: ignore[arg-type]
        for story in NODES:
            node, series = played(story, end=END)
            past.write(series)
            snapshots.append(node.last)
        past.record(rules(), start=END - 1500, end=END)
        yield Stored(past, client, fleet_of(*snapshots), kept.written)


@pytest.fixture(name="stored", scope="module")
def _stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    with nine_nodes(tmp_path_factory.mktemp("past")) as stored:
        yield stored


def test_no_rule_records_more_than_the_calculator_says(stored: Stored) -> None:
    past, fleet = stored.past, stored.fleet
    ended = {labels["job_id"] for labels, _ in past.ask("count by (job_id) (job:gpu_efficiency_gau:median_1d)", END)}
    fleet = replace(fleet, churn=24.0 * (len(ended) - fleet.jobs + 1))  # so many have ended within the hour
    found = {labels["__name__"]: value for labels, value in past.ask('count by (__name__) ({__name__=~".+:.+"})', END)}
    most = {rule.record: recorded_series(fleet, rule) for rule in recording_rules()}
    assert found.keys() <= most.keys()
    # Ended jobs are a mean, and no whole number.
    assert {name: (value, most[name]) for name, value in found.items() if value > ceil(most[name])} == {}
    usual = replace(fleet, leaks=USUAL_LEAKS, churn=0.0)
    total = sum(recorded_series(usual, rule, calm=True) for rule in recording_rules())
    truth = sum(found.values())
    assert truth <= total <= truth * 1.4, (truth, total)


def test_the_usual_number_of_leaks_at_once_is_the_measured_one(stored: Stored) -> None:
    past, fleet = stored.past, stored.fleet
    of_jobs = past.ask("count(job_leak:gpu_efficiency_seconds:rate5m) / count(job:gpu_efficiency_info)", END)[0][1]
    of_nodes = past.ask("count(node_leak:gpu_efficiency_seconds:rate5m)", END)[0][1] / fleet.nodes
    assert (round(of_jobs, 1), round(of_nodes, 1)) == (3.7, 5.1)
    assert round(max(of_jobs, of_nodes)) == USUAL_LEAKS


# -- VictoriaMetrics --


@pytest.mark.skipif(shutil.which("victoria-metrics") is None, reason="needs VictoriaMetrics")
def test_victoriametrics_answers_every_rule_s_expression_as_prometheus_does(stored: Stored, tmp_path: Path) -> None:
    """Both hold the same samples. Scrapes of whole minutes, so that no range has one sample more in one of them."""
    with victoria(tmp_path) as other:
        for content in stored.written:
            other.post("/api/v1/write", content=content).raise_for_status()
        other.get("/internal/force_flush").raise_for_status()
        wait_for(lambda: one(other, "count(node:gpu_efficiency_info)", time=f"{END}") == len(NODES), "all is readable")
        assert agree(stored.client, other, END) > 0.8 * len(rules())
