"""Asks Thanos what our rules ask Prometheus, over two replicas that each missed something: `make thanos`.

Thanos is built from its Go module, which go.mod beside this file pins; the program lies in `.cache/thanos`. Two
Prometheus of Debian hold the pages of nine nodes and all that the rules make of them, each without a third of it, as
after an outage. A sidecar beside each, and a querier that deduplicates, must answer every expression as one Prometheus
does that has everything.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

from tests import go_module
from tests.dashboards.past import rules
from tests.e2e.databases import agree, one, ready, started
from tests.e2e.running import environment, running
from tests.e2e.test_prometheus_scale import END, NODES, nine_nodes
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
def thanos(folder: Path, *words: str) -> Iterator[tuple[str, str]]:
    """Run a component until the block ends; give the addresses of its HTTP and gRPC servers."""
    http, grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
    line = [f"{PROGRAM}", *words, f"--http-address={http}", f"--grpc-address={grpc}", "--log.level=warn"]
    with running(line, folder / f"{words[0]}-{grpc.rpartition(':')[2]}.log", environment()) as program:
        with httpx.Client(base_url=f"http://{http}", trust_env=False) as client:
            wait_for(lambda: program.alive() and ready(client), f"thanos {words[0]} is ready")
        yield http, grpc


@contextmanager
def replica(folder: Path, number: int, written: Sequence[bytes]) -> Iterator[str]:
    """Run a Prometheus that missed some of what was written, and its sidecar; give the sidecar's gRPC address."""
    config = {"global": {"external_labels": {"replica": f"{number}"}}}
    words = (
        f"--storage.tsdb.path={folder}/{number}/data", "--storage.tsdb.retention.time=100y",
        "--storage.tsdb.min-block-duration=300d", "--storage.tsdb.max-block-duration=300d",
        "--web.enable-remote-write-receiver",
    )  # fmt: skip
    with started(folder / f"{number}", config, *words) as client:
        for place, content in enumerate(written):
            if place % _OF != number:
                client.post("/api/v1/write", content=content).raise_for_status()
        sidecar = ("sidecar", f"--prometheus.url={client.base_url}", f"--tsdb.path={folder}/{number}/data")
        with thanos(folder, *sidecar) as (_, grpc):
            yield grpc


def main() -> int:
    """Return 0 if Thanos answers as Prometheus does."""
    go_module.build(HERE, "github.com/thanos-io/thanos/cmd/thanos", PROGRAM, *_FLAGS)
    found = _VERSION.search((HERE / "go.mod").read_text(encoding="utf-8"))
    assert found, "go.mod requires no Thanos"
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (everything := folder / "all").mkdir()
        stored = stack.enter_context(nine_nodes(everything))
        stores = [stack.enter_context(replica(folder, number, stored.written)) for number in range(_REPLICAS)]
        words = ("query", "--query.replica-label=replica", *(f"--endpoint={store}" for store in stores))
        http, _ = stack.enter_context(thanos(folder, *words))
        there = stack.enter_context(httpx.Client(base_url=f"http://{http}", trust_env=False, timeout=120))
        nodes = partial(one, there, "count(node:gpu_efficiency_info)", time=f"{_AT}")
        wait_for(lambda: nodes() == len(NODES), "both replicas are queried")
        said = agree(stored.client, there, _AT)
    sys.stdout.write(f"Thanos {found[1]}: {len(rules())} expressions as in Prometheus, {said} of them with data\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
