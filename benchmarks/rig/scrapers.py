"""Real Prometheus servers that scrape daemons, at a pace that can be changed while they run.

Owns the servers it starts, on ports of 127.0.0.1 that the kernel chooses, and ends them by their own handle; and what
they say of their scrapes. Needs Debian's package prometheus.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from benchmarks.rig.client import Client
from tests.ports import free_port

_PATIENCE = 60.0
_LOADED = "prometheus_config_last_reload_success_timestamp_seconds"
Durations = Mapping[int, Sequence[float]]
"""Milliseconds of every scrape, by the port that was scraped."""


class Scrapers(Struct, frozen=True):
    """Servers that scrape the same daemons."""

    folders: Mapping[int, Path]
    """By port."""
    pids: Mapping[int, int]
    targets: tuple[int, ...]

    def pace(self, seconds: int) -> None:
        """Scrape every so many seconds from now on; return when all servers do."""
        if all(_pace(folder) == seconds for folder in self.folders.values()):
            return
        before = {port: self._loaded(port) for port in self.folders}
        time.sleep(1.1)  # what they say of a reload is in whole seconds
        for port, folder in self.folders.items():
            _write(folder, self.targets, seconds)
            os.kill(self.pids[port], signal.SIGHUP)
        _until(lambda: all(self._loaded(port) > before[port] for port in self.folders), "Prometheus reads no new pace")

    def durations(self, seconds: float) -> Durations:
        """What the scrapes of the last seconds took: from the request to all series stored."""
        query = quote(f"scrape_duration_seconds[{max(1, round(seconds))}s]")
        found = [series for port in self.folders for series in _asked(port, query)]
        return {target: [1e3 * value for series in found for value in _of(series, target)] for target in self.targets}

    def _loaded(self, port: int) -> float:
        with Client(port) as client:
            return client.value(_LOADED)


def _of(series: Mapping[str, Any], target: int) -> list[float]:
    if series["metric"]["instance"] != f"127.0.0.1:{target}":
        return []
    return [float(value) for _, value in series["values"]]


def _asked(port: int, query: str) -> list[dict[str, Any]]:
    with Client(port) as client:
        found: list[dict[str, Any]] = json.loads(client.get(f"/api/v1/query?query={query}")[1])["data"]["result"]
    return found


@contextmanager
def scraping(folder: Path, targets: Sequence[int], *, servers: int, seconds: int) -> Iterator[Scrapers]:
    """Start so many servers that scrape `targets`; RuntimeError where there is no Prometheus, or it does not listen."""
    if shutil.which("prometheus") is None:
        raise RuntimeError("prometheus is not installed: on Debian, apt-get install prometheus")
    with ExitStack() as stack:
        folders, pids = dict[int, Path](), dict[int, int]()
        for number in range(servers):
            port, home = free_port(), folder / f"prometheus-{number}"
            home.mkdir()
            _write(home, targets, seconds)
            pids[port], folders[port] = stack.enter_context(_running(home, port)), home
        yield Scrapers(folders, pids, tuple(targets))


@contextmanager
def _running(folder: Path, port: int) -> Iterator[int]:
    words = [
        "prometheus", f"--config.file={folder / 'config.json'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stderr=log)
    try:
        _until(lambda: _ready(process, port, folder), f"Prometheus does not listen, see {folder / 'log'}")
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=_PATIENCE)


def _ready(process: subprocess.Popen[bytes], port: int, folder: Path) -> bool:
    if process.poll() is not None:
        said = (folder / "log").read_text(errors="replace")[-500:]
        raise RuntimeError(f"Prometheus ended with status {process.returncode}: {said}")
    try:
        with Client(port) as client:
            client.get("/-/ready")
    except (OSError, RuntimeError):
        return False
    return True


def _until(true: Any, otherwise: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not true():
        if time.monotonic() > until:
            raise RuntimeError(otherwise)
        time.sleep(0.1)


def _pace(folder: Path) -> int:
    config: dict[str, dict[str, str]] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config["global"]["scrape_interval"].removesuffix("s"))


def _write(folder: Path, targets: Sequence[int], seconds: int) -> None:
    """Its configuration; JSON is YAML."""
    at = [{"targets": [f"127.0.0.1:{port}" for port in targets]}]
    config = {
        "global": {"scrape_interval": f"{seconds}s", "scrape_timeout": f"{min(10, seconds)}s"},
        "scrape_configs": [{"job_name": "gpu-efficiency", "static_configs": at}],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
