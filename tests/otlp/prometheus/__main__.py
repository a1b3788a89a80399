"""Pushes from a daemon into a real Prometheus 3 that also scrapes it: a part of `make prometheus-3`.

Both must give the same series, by each of Prometheus' ways to name what is pushed, and an outage of the server must
reset no counter and cost the daemon one line of its log.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from tests.e2e.running import Daemon, daemon, environment, running
from tests.otlp.prometheus.build import PROGRAM, build
from tests.ports import free_port
from tests.prometheus3 import values
from tests.waiting import wait_for

ALERTS = Path(__file__).resolve().parents[3] / "alerts"
STRATEGIES = {
    "UnderscoreEscapingWithSuffixes": "hw_gpu_utilization_ratio",
    "NoUTF8EscapingWithSuffixes": "hw.gpu.utilization_ratio",
    "NoTranslation": "hw.gpu.utilization",
}
"""Prometheus' ways to name what is pushed, its default first, and what one metric is called by each."""
_PUSHED, _SCRAPED = 'job="gpu-efficiency"', 'job="gpus"'
_LAW = (
    f"sum by (uuid) (gpu_efficiency_seconds_total{{{_PUSHED}}})"
    f" - sum by (uuid) (gpu_efficiency_paid_seconds_total{{{_PUSHED}}})"
)
_ROUNDED = 1e-3
"""Seconds by which sums of floats may differ."""
_MOVING = 5
"""Series that may come or go between a push and a scrape of a node at work."""


@contextmanager
def server(folder: Path, port: int, target: str, strategy: str) -> Iterator[httpx.Client]:
    """Run Prometheus with its data in `folder`, our rules and the receiver, until the block ends."""
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: ['{ALERTS}/*.yaml']\n"
        f"otlp: {{translation_strategy: {strategy}}}\n"
        f"scrape_configs: [{{job_name: gpus, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    words = [
        f"{PROGRAM}", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--web.enable-otlp-receiver",
    ]  # fmt: skip
    with (
        running(words, folder / "log", environment()),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


def series(client: httpx.Client, selector: str) -> set[frozenset[tuple[str, str]]]:
    """Return our series that have a value now, without job and instance; empty while the server starts."""
    query = f'{{__name__=~"gpu_efficiency_.+", {selector}}}'
    try:
        found = client.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
    except (httpx.TransportError, ValueError):
        return set()
    return {frozenset((k, v) for k, v in row["metric"].items() if k not in ("job", "instance")) for row in found}


def same_series(client: httpx.Client) -> int:
    """Return the number of series that are pushed, if they are those that are scraped."""
    pushed, scraped = series(client, _PUSHED), series(client, _SCRAPED)
    return len(pushed) if pushed and len(pushed ^ scraped) <= _MOVING else 0


def failed_pushes(served: Daemon) -> int:
    """Return the daemon's own count."""
    return int(served.page().total("otlp_pushes_total", outcome="failed"))


def check(served: Daemon, port: int, folder: Path, strategy: str) -> None:
    """Check one way to name series, with an outage. Raises AssertionError."""
    run = partial(server, folder, port, f"127.0.0.1:{served.port}", strategy)
    with run() as client:
        count = wait_for(partial(same_series, client), f"{strategy}: the series of a scrape are pushed")
        hardware = f'{{"{STRATEGIES[strategy]}", {_PUSHED}}}'
        assert values(client, hardware), f"{strategy}: no series {hardware}"
        lost = values(client, _LAW)
        assert lost, f"{strategy}: no GPU's time is there"
        assert all(abs(seconds) < _ROUNDED for seconds in lost), f"{strategy}: leaks do not add up: {lost}"
    before = failed_pushes(served)
    wait_for(lambda: failed_pushes(served) > before, "a push fails while the server is down")
    with run() as client:
        more = f'increase(gpu_efficiency_otlp_pushes_total{{outcome="failed", {_PUSHED}}}[5m]) > 0'
        wait_for(partial(values, client, more), f"{strategy}: it is pushed again")
        fallen = values(client, f"resets(gpu_efficiency_seconds_total{{{_PUSHED}}}[5m]) > 0")
        assert not fallen, f"{strategy}: {len(fallen)} counters fell"
    sys.stdout.write(f"OTLP, {strategy}: {count} series as in a scrape, none reset by an outage\n")
    sys.stdout.flush()


def main() -> int:
    """Return 0 if Prometheus has what the daemon pushes."""
    build()
    subprocess.run([f"{PROGRAM}", "--version"], check=True)
    port = free_port()
    settings = {
        "GPU_EFFICIENCY_OTLP_ENDPOINT": f"http://127.0.0.1:{port}/api/v1/otlp/v1/metrics",
        "GPU_EFFICIENCY_OTLP_INTERVAL_SECONDS": "1",
        "GPU_EFFICIENCY_OTLP_TIMEOUT_SECONDS": "2",
    }
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder), "demo", **settings) as served:
        for strategy in STRATEGIES:
            data = Path(folder) / strategy
            data.mkdir()
            check(served, port, data, strategy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
