"""Asks Mimir what our rules ask Prometheus, of which it has two replicas each: `make mimir`.

Mimir and mimirtool are built from Mimir's Go module, which go.mod beside this file pins; the programs lie in `.cache`.
One Mimir with all its parts has tenants with the limits of examples/prometheus/mimir-limits.yaml, and one without.

The pages of nine nodes and all that the rules make of them are written by two pairs of replicas, of which the elected
ones fail halfway: every expression must be answered as by one Prometheus that has everything. Then two agents of
Debian's Prometheus scrape one daemon, the rules run in Mimir's ruler, and one of the agents ends.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests import go_module
from tests.alerts import packs
from tests.dashboards.past import rules
from tests.dashboards.remote_write import labelled
from tests.e2e.databases import agree, asked, one, ready, started
from tests.e2e.running import daemon, environment, running
from tests.e2e.test_prometheus_scale import END, EXAMPLES, NODES, agent_mode, nine_nodes, quick_agent, quick_rules
from tests.ports import free_port
from tests.waiting import wait_for

HERE = Path(__file__).parent
_FLAGS = ("-tags", "netgo,stringlabels", "-ldflags", "-s -w")
"""As Mimir builds itself."""
_EXAMPLE: dict[str, Any] = yaml.safe_load((EXAMPLES / "mimir-limits.yaml").read_text(encoding="utf-8"))["overrides"]
((_TENANT, _LIMITS),) = _EXAMPLE.items()
_PAST, _PLAIN = "past", "plain"
"""Tenants with the same limits, but for what is written months late; and with Mimir's defaults, but for replicas."""
_AT = END + 5.0
"""Between two samples: the ranges of Mimir, as those of Prometheus 3, leave out their first instant."""


def built(name: str) -> Path:
    """Build a program of Mimir's module, unless it was; return its path."""
    program = go_module.ROOT / ".cache" / name / name
    go_module.build(HERE, f"github.com/grafana/mimir/cmd/{name}", program, *_FLAGS)
    return program


@contextmanager
def mimir(folder: Path, **more: Any) -> Iterator[str]:
    """Run one with all its parts, and more settings, until the block ends; give its address."""
    folder.mkdir()
    ring = {"instance_addr": "127.0.0.1"}
    loopback = {"http_listen_address": "127.0.0.1", "grpc_listen_address": "127.0.0.1"}
    ports = {"http_listen_port": free_port(), "grpc_listen_port": free_port()}
    config = {
        "server": {**loopback, **ports, "log_level": "warn"},
        "common": {"storage": {"backend": "filesystem", "filesystem": {"dir": f"{folder}/objects"}}},
        "blocks_storage": {"storage_prefix": "blocks"},
        "ruler_storage": {"storage_prefix": "rules"},
        "memberlist": {"bind_addr": ["127.0.0.1"], "bind_port": free_port()},
        "distributor": {"ring": ring, "ha_tracker": {"enable_ha_tracker": True}},
        "ingester": {"ring": ring | {"replication_factor": 1, "min_ready_duration": "0s"}},
        "store_gateway": {"sharding_ring": ring | {"replication_factor": 1}},
        "compactor": {"sharding_ring": ring},
        "query_scheduler": {"ring": ring},
        "querier": {"ring": ring},
        "frontend": {"address": "127.0.0.1"},
        "ruler": {"ring": ring, "evaluation_interval": "5s"},
        "usage_stats": {"enabled": False},
        "runtime_config": {"file": f"{folder}/limits.yaml"},
        "limits": {
            "ha_tracker_update_timeout": "1s",
            "ha_tracker_update_timeout_jitter_max": "0s",
            "ha_tracker_failover_timeout": "10s",
        },
        **more,
    }
    # Of months ago, within seconds, and one node after another.
    late = {
        "query_ingesters_within": "0s", "ingestion_rate": 1e9, "ingestion_burst_size": 10**9,
        "out_of_order_time_window": "1d",
    }  # fmt: skip
    plain = {"accept_ha_samples": True} | late
    limits = {"overrides": {_TENANT: _LIMITS, _PAST: _LIMITS | late, _PLAIN: plain}}
    (folder / "mimir.yaml").write_text(yaml.safe_dump(config))
    (folder / "limits.yaml").write_text(yaml.safe_dump(limits))
    url = f"http://127.0.0.1:{ports['http_listen_port']}"
    line = [f"{built('mimir')}", f"-config.file={folder}/mimir.yaml"]
    with running(line, folder / "mimir.log", environment()) as program, client_of(url) as client:
        wait_for(lambda: program.alive() and ready(client, "/ready"), "Mimir is ready")
        yield url


def client_of(url: str, tenant: str = _TENANT) -> httpx.Client:
    """Ask as a tenant."""
    return httpx.Client(base_url=url, headers={"X-Scope-OrgID": tenant}, trust_env=False, timeout=120)


def taken(client: httpx.Client, content: bytes, **labels: str) -> bool:
    """Write with more labels on each series; False if Mimir dropped it because another replica is elected."""
    answer = client.post("/api/v1/push", content=labelled(content, frozenset(labels.items())))
    assert answer.status_code in (httpx.codes.OK, httpx.codes.ACCEPTED), answer.text
    return answer.status_code == httpx.codes.OK


def write(client: httpx.Client, written: Sequence[bytes]) -> None:
    """Write by two pairs in turn; halfway the elected replica of each falls silent, and is back at the end."""
    half = len(written) // 2
    for place, content in enumerate(written):
        pair = f"{place % 2}"
        first, second = ({"ha_pair": pair, "__replica__": f"{pair}-{name}"} for name in "ab")
        if place < half:
            assert taken(client, content, **first)
            assert not taken(client, content, **second)
        else:
            wait_for(partial(taken, client, content, **second), "the other replica is elected")
            assert place < len(written) - 1 or not taken(client, content, **first)


def load(url: str, tenant: str, files: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run mimirtool, as docs/prometheus.md says."""
    words = (f"{built('mimirtool')}", "rules", "load", f"--address={url}", f"--id={tenant}")
    return subprocess.run([*words, *files], capture_output=True, text=True, check=False)


def check_rules(url: str) -> None:
    """The ruler takes all groups of a tenant with our limits, and not those of one with its defaults."""
    files = [packs.FOLDER / name for name in packs.files()]
    done = load(url, _TENANT, files)
    assert done.returncode == 0, done.stderr
    with client_of(f"{url}/prometheus") as client:
        found = yaml.safe_load(client.get("/config/v1/rules").content)
    groups = {Path(name).stem: [group["name"] for group in each] for name, each in packs.groups().items()}
    assert {name: sorted(group["name"] for group in each) for name, each in found.items()} == {
        name: sorted(each) for name, each in groups.items()
    }
    done = load(url, _PLAIN, files)
    assert done.returncode != 0
    assert "per-user rules per rule group limit" in done.stderr, done.stderr


def check_agents(folder: Path) -> None:
    """Two agents scrape one daemon, one of them ends, and the rules run on what they write."""
    with ExitStack() as stack:
        # Debian 12's Prometheus leaves out the headers of remote_write, and so the tenant.
        url = stack.enter_context(mimir(folder / "live", multitenancy_enabled=False, no_auth_tenant=_TENANT))
        assert load(url, _TENANT, quick_rules(folder)).returncode == 0
        served = stack.enter_context(daemon(folder, "demo"))
        client = stack.enter_context(client_of(f"{url}/prometheus"))
        agents = []
        for name in "ab":
            config = quick_agent(folder, served, f"{url}/api/v1/push")
            config["global"]["external_labels"] |= {"ha_pair": "alps-0", "__replica__": name}
            words = (agent_mode(), f"--storage.agent.path={folder}/wal-{name}")
            agents.append(stack.enter_context(ExitStack()))
            agents[-1].enter_context(started(folder / name, config, *words))
            wait_for(lambda: one(client, 'up{cluster="alps"}'), "one agent is elected")
        agents[0].close()
        newest = 'timestamp(up{cluster="alps"})'
        ended = one(client, newest)
        assert ended
        wait_for(lambda: (one(client, newest) or 0) > ended + 15, "the other agent is elected")
        query = 'cluster:gpu_efficiency_product:ratio_rate5m{cluster="alps"}'
        share = wait_for(lambda: one(client, query), "the useful share is recorded")
        assert 0 < share < 1
        age = one(client, f"time() - timestamp({query})")
        assert age
        assert age >= 30, "results are as old as the evaluation delay"
        assert asked(client, '{__replica__!=""}') == asked(client, '{ha_pair!=""}') == {}
        wait_for(lambda: evaluated(client), "every rule is evaluated")


def evaluated(client: httpx.Client) -> bool:
    """Whether all rules were. Raises AssertionError if one cannot be."""
    found = [rule for group in client.get("/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    assert len(found) == len(rules())
    bad = {rule["name"]: rule["lastError"] for rule in found if rule["health"] == "err"}
    assert bad == {}
    return all(rule["health"] == "ok" for rule in found)


def main() -> int:
    """Return 0 if Mimir answers as Prometheus does, and takes our rules."""
    version = next(line.split()[1] for line in _pins() if line.startswith("github.com/grafana/mimir "))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (everything := folder / "all").mkdir()
        url = stack.enter_context(mimir(folder / "mimir"))
        stored = stack.enter_context(nine_nodes(everything))
        # Without our limits the label `cluster` names a pair: of two pairs in one cluster, the second is lost.
        with client_of(url, _PLAIN) as plain:
            assert taken(plain, stored.written[0], __replica__="0-a")
            assert not taken(plain, stored.written[1], __replica__="1-a")
        with client_of(url, _PAST) as past:
            write(past, stored.written)
        there = stack.enter_context(client_of(f"{url}/prometheus", _PAST))
        assert one(there, "count(node:gpu_efficiency_info)", time=f"{_AT}") == len(NODES)
        said = agree(stored.client, there, _AT)
        check_rules(url)
        check_agents(folder)
    sys.stdout.write(f"Mimir {version}: {len(rules())} expressions as in Prometheus, {said} of them with data\n")
    return 0


def _pins() -> list[str]:
    return [line.strip() for line in (HERE / "go.mod").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
