"""Asks Thanos what our rules ask Prometheus, over two replicas that each missed something: `make thanos`.

Thanos is built from its Go module, which go.mod beside this file pins; the program lies in `.cache/thanos`. Two
Prometheus of Debian hold the pages of nine nodes and all that the rules make of them, each without a third of it, as
after an outage. A sidecar beside each, and a querier that deduplicates, must answer every expression as one Prometheus
does that has everything; and so must a store gateway, when the blocks of both are in a bucket, which here is a folder.
Then a ruler evaluates all rules on what a Prometheus scrapes from one daemon.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import yaml

from tests import go_module
from tests.dashboards.past import rules
from tests.e2e.databases import agree, one, ready, started
from tests.e2e.running import daemon, environment, running
from tests.e2e.test_prometheus_scale import END, NODES, Stored, nine_nodes, quick_rules
from tests.ports import free_port
from tests.waiting import wait_for

HERE = Path(__file__).parent
PROGRAM = go_module.ROOT / ".cache" / "thanos" / "thanos"
_FLAGS = ("-tags", "slicelabels", "-ldflags", "-s -w")
"""As Thanos builds itself: it shares memory with Prometheus' labels, whose layout depends on the tag."""
_VERSION = re.compile(r"github.com/thanos-io/thanos v(\S+)")
_AT = END + 5.0
"""Between two samples: the ranges of Thanos, as those of Prometheus 3, leave out their first instant."""
_REPLICAS = 2
_OF = 3
"""Each replica misses one write in so many, no two the same."""


@contextmanager
def thanos(folder: Path, *words: str, grpc: str = "") -> Iterator[tuple[str, str]]:
    """Run a component until the block ends; give the addresses of its HTTP and gRPC servers."""
    http, grpc = f"127.0.0.1:{free_port()}", grpc or f"127.0.0.1:{free_port()}"
    line = [f"{PROGRAM}", *words, f"--http-address={http}", f"--grpc-address={grpc}", "--log.level=warn"]
    with running(line, folder / f"{words[0]}-{grpc.rpartition(':')[2]}.log", environment()) as program:
        with httpx.Client(base_url=f"http://{http}", trust_env=False) as client:
            wait_for(lambda: program.alive() and ready(client), f"thanos {words[0]} is ready")
        yield http, grpc


@contextmanager
def replica(folder: Path, number: int, written: Sequence[bytes]) -> Iterator[str]:
    """Run a Prometheus that missed some of what was written, and its sidecar; give the sidecar's gRPC address.

    Its blocks are uploaded to the bucket.
    """
    config = {"global": {"external_labels": {"replica": f"{number}"}}}
    words = (
        f"--storage.tsdb.path={folder}/{number}/data", "--storage.tsdb.retention.time=100y",
        "--storage.tsdb.min-block-duration=300d", "--storage.tsdb.max-block-duration=300d",
        "--web.enable-remote-write-receiver", "--web.enable-admin-api",
    )  # fmt: skip
    with started(folder / f"{number}", config, *words) as client:
        for place, content in enumerate(written):
            if place % _OF != number:
                client.post("/api/v1/write", content=content).raise_for_status()
        snapshot = client.post("/api/v1/admin/tsdb/snapshot").raise_for_status().json()["data"]["name"]
        blocks = f"--path={folder}/{number}/data/snapshots/{snapshot}"
        upload = (f"{PROGRAM}", "tools", "bucket", "upload-blocks", *bucket(folder), blocks)
        subprocess.run([*upload, f'--label=replica="{number}"'], check=True, capture_output=True)
        sidecar = ("sidecar", f"--prometheus.url={client.base_url}", f"--tsdb.path={folder}/{number}/data")
        with thanos(folder, *sidecar) as (_, grpc):
            yield grpc


def bucket(folder: Path) -> tuple[str, ...]:
    """Return the flag that names the bucket."""
    file = folder / "bucket.yaml"
    file.write_text(yaml.safe_dump({"type": "FILESYSTEM", "config": {"directory": f"{folder}/bucket"}}))
    return (f"--objstore.config-file={file}",)


def answers(folder: Path, stored: Stored, *endpoints: str) -> int:
    """Ask a querier of these endpoints every expression; return how many have data.

    Raises AssertionError at the first that Prometheus answers otherwise.
    """
    words = ("query", "--query.replica-label=replica", *(f"--endpoint={each}" for each in endpoints))
    with (
        thanos(folder, *words) as (http, _),
        httpx.Client(base_url=f"http://{http}", trust_env=False, timeout=120) as there,
    ):
        nodes = partial(one, there, "count(node:gpu_efficiency_info)", time=f"{_AT}")
        wait_for(lambda: nodes() == len(NODES), "all nodes are found")
        return agree(stored.client, there, _AT)


def check_ruler(folder: Path) -> None:
    """Raises AssertionError if a rule cannot be evaluated, or the querier does not find what was recorded."""
    folder.mkdir()
    with ExitStack() as stack:
        served = stack.enter_context(daemon(folder, "demo"))
        target = {"targets": [f"127.0.0.1:{served.port}"], "labels": {"cluster": "alps"}}
        config = {
            "global": {"scrape_interval": "1s", "external_labels": {"replica": "0"}},
            "scrape_configs": [{"job_name": "gpu-efficiency", "static_configs": [target]}],
        }
        data = f"{folder}/scraping/data"
        prometheus = stack.enter_context(started(folder / "scraping", config, f"--storage.tsdb.path={data}"))
        sidecar = ("sidecar", f"--prometheus.url={prometheus.base_url}", f"--tsdb.path={data}")
        _, scraped = stack.enter_context(thanos(folder, *sidecar))
        ruled = f"127.0.0.1:{free_port()}"
        labels = ("--query.replica-label=replica", "--query.replica-label=ruler")
        query = ("query", *labels, f"--endpoint={scraped}", f"--endpoint={ruled}")
        http, _ = stack.enter_context(thanos(folder, *query))
        files = (f"--rule-file={file}" for file in quick_rules(folder))
        words = (
            "rule",
            f"--data-dir={folder}/rule",
            f"--query={http}",
            '--label=ruler="a"',
            "--eval-interval=2s",
            *files,
        )
        own, _ = stack.enter_context(thanos(folder, *words, grpc=ruled))
        there, ruler = (
            stack.enter_context(httpx.Client(base_url=f"http://{each}", trust_env=False, timeout=120))
            for each in (http, own)
        )
        wait_for(lambda: evaluated(ruler), "every rule is evaluated")
        share = wait_for(lambda: one(there, 'cluster:gpu_efficiency_product:ratio_rate5m{cluster="alps"}'), "the share")
        assert 0 < share < 1


def evaluated(ruler: httpx.Client) -> bool:
    """Whether all rules were. Raises AssertionError if one cannot be."""
    found = [rule for group in ruler.get("/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    bad = {rule["name"]: rule["lastError"] for rule in found if rule["health"] == "err"}
    assert bad == {}
    return len(found) == len(rules()) and all(rule["health"] == "ok" for rule in found)


def main() -> int:
    """Return 0 if Thanos answers as Prometheus does, and takes our rules."""
    go_module.build(HERE, "github.com/thanos-io/thanos/cmd/thanos", PROGRAM, *_FLAGS)
    found = _VERSION.search((HERE / "go.mod").read_text(encoding="utf-8"))
    assert found, "go.mod requires no Thanos"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (everything := folder / "all").mkdir()
        stored = stack.enter_context(nine_nodes(everything))
        stores = [stack.enter_context(replica(folder, number, stored.written)) for number in range(_REPLICAS)]
        said = answers(folder, stored, *stores)
        words = ("store", f"--data-dir={folder}/store", *bucket(folder))
        _, gateway = stack.enter_context(thanos(folder, *words))
        assert answers(folder, stored, gateway) == said
        check_ruler(folder / "ruler")
    sys.stdout.write(f"Thanos {found[1]}: {len(rules())} expressions as in Prometheus, {said} of them with data\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
