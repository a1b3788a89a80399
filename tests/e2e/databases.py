"""Servers of Debian's packages that keep series, Prometheus and VictoriaMetrics, on loopback, while a block lasts.

Owns their processes, asks them, and compares what two of them answer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.dashboards.past import rules
from tests.e2e.running import environment, running
from tests.ports import free_port
from tests.waiting import wait_for


@contextmanager
def started(folder: Path, config: Mapping[str, Any], *words: str) -> Iterator[httpx.Client]:
    """A Prometheus with this configuration, until the block ends."""
    folder.mkdir(exist_ok=True)
    file, port = folder / "prometheus.yaml", free_port()
    file.write_text(yaml.safe_dump(dict(config)))
    line = ["prometheus", f"--config.file={file}", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *words]
    with (
        running(line, folder / "log", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        wait_for(lambda: program.alive() and ready(client), "Prometheus is ready")
        yield client
        assert program.end() == 0


def ready(client: httpx.Client, path: str = "/-/ready") -> bool:
    try:
        return client.get(path).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@contextmanager
def victoria(folder: Path, *more: str) -> Iterator[httpx.Client]:
    """VictoriaMetrics with more flags, likewise."""
    port = free_port()
    words = [
        "victoria-metrics", f"-storageDataPath={folder}/vm", f"-httpListenAddr=127.0.0.1:{port}",
        "-retentionPeriod=100y", "-search.latencyOffset=0s", "-search.disableCache", *more,
    ]  # fmt: skip
    with (
        running(words, folder / "vm.log", environment()) as program,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        wait_for(lambda: program.alive() and ready(client, "/health"), "VictoriaMetrics is ready")
        yield client
        assert program.end() == 0


def asked(client: httpx.Client, query: str, **more: str) -> dict[frozenset[tuple[str, str]], float]:
    """Return the labels of each series, its name left out, and its value."""
    answer = client.post("/api/v1/query", data={"query": query, **more}).json()
    assert answer["status"] == "success", (query, answer)
    return {
        frozenset((k, v) for k, v in row["metric"].items() if k != "__name__"): float(row["value"][1])
        for row in answer["data"]["result"]
    }


def one(client: httpx.Client, query: str, **more: str) -> float | None:
    """Return the value of the first series; None if there is none."""
    return next(iter(asked(client, query, **more).values()), None)


def agree(here: httpx.Client, there: httpx.Client, at: float) -> int:
    """Ask two servers every expression of our rules; return how many have an answer.

    Raises AssertionError at the first that they answer otherwise.
    """
    said = 0
    for rule in rules():
        expected, found = (asked(client, rule.expr, time=f"{at}") for client in (here, there))
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), f"not {rule.expr} of {there.base_url}"
        said += bool(expected)
    return said
