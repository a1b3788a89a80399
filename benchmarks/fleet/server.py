"""A real Prometheus on a fleet of simulated nodes: started, asked, stripped of its rules, ended.

Owns the process, its configuration and the reading of what it tells of itself. Refuses to judge any figure.
Needs Debian's package prometheus.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from msgspec import Struct

from benchmarks.fleet.site import host
from benchmarks.machine import ROOT
from benchmarks.rig.daemon import cpu_seconds
from tests.ports import free_port

_PATIENCE = 120.0
Evaluated = Mapping[str, Any]
"""A group as `/api/v1/rules` tells it."""


class Size(Struct, frozen=True):
    """How much is measured, and for how long; seconds."""

    nodes: int = 1250
    """Of eight GPUs."""
    scrape: int = 60
    every: int = 60
    """Between evaluations of groups that say nothing else."""
    warm_up: int = 310
    """Until every window of five minutes is full."""
    looks: int = 4
    """The longest interval of a group is four times `every`: all are in the figure as often as in life."""
    own_intervals: bool = True
    """Whether groups keep the interval that they have of their own."""
    rules: bool = True
    without: int = 120
    """How long it is watched after its rules are taken away."""


class Server(Struct, frozen=True):
    """A running Prometheus."""

    pid: int
    port: int
    folder: Path

    def ask(self, path: str) -> Any:
        """Give what lies in an answer's `data`."""
        return json.loads(_page(self.port, f"/api/v1/{path}"))["data"]

    def value(self, query: str) -> float:
        """Give the value of an expression that has one sample; 0 where it has none."""
        found = self.ask(f"query?query={quote(query)}")["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def own(self, metric: str) -> float:
        """Give the sum of one of its own metrics, by its page: it does not scrape itself."""
        page = _page(self.port, "/metrics").decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{metric}[ {{]", line))

    def groups(self) -> list[Evaluated]:
        """Give its groups of rules, with what their last evaluation took."""
        found: list[Evaluated] = self.ask("rules")["groups"]
        return found

    def forget_rules(self, *, scrapes: bool = False) -> None:
        """Take its rules away, and with `scrapes` all that it scrapes; it goes on."""
        config = self.folder / "prometheus.json"
        gone = ("rule_files", "scrape_configs") if scrapes else ("rule_files",)
        told = json.loads(config.read_text(encoding="utf-8")) | {each: [] for each in gone}
        config.write_text(json.dumps(told))
        os.kill(self.pid, signal.SIGHUP)
        while self.groups():
            time.sleep(0.5)


def _page(port: int, path: str) -> bytes:
    """Ask a server that may be long about it: RuntimeError where it refuses, OSError where it does not answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    with closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    if response.status != 200:
        raise RuntimeError(f"Prometheus answered {response.status} to {path}: {body[:300]!r}")
    return body


def settled(server: Server, targets: int) -> None:
    """Wait until all targets answer, as they do once each was scraped; `check` says which do not."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and server.value("sum(up)") != targets:
        time.sleep(0.5)
    check(server, targets)


def busy(server: Server, seconds: float) -> float:
    """Wait, and give the share of a core that it used meanwhile."""
    before, began = cpu_seconds(server.pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(server.pid) - before) / (time.monotonic() - began)


def check(server: Server, targets: int) -> None:
    """Refuse figures of rules that failed, or of nodes that were not there."""
    every = [rule for group in server.groups() for rule in group["rules"]]
    failed = [f"{rule['name']}: {rule.get('lastError')}" for rule in every if rule["health"] not in {"ok", "unknown"}]
    up = server.value("sum(up)")
    if failed or up != targets:
        raise RuntimeError(f"{up:.0f} of {targets} targets answer; rules that fail: {failed[:3] or 'none'}")


@contextmanager
def prometheus(
    folder: Path,
    fleet: int,
    size: Size,
    remember: Callable[[Path, int], None] | None = None,
    *,
    others: Sequence[Path] = (),
) -> Iterator[Server]:
    """Start one on the fleet at a port, after `remember` has written its past; RuntimeError where it cannot be.

    It records what our rules do, and what only those of `others` do, folders of rule files.
    """
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        raise RuntimeError("prometheus or promtool is not installed: on Debian, apt-get install prometheus")
    port, config = free_port(), folder / "prometheus.json"
    files = rule_files(folder, own_intervals=size.own_intervals) if size.rules else []
    if others:
        (folder / "others.json").write_text(json.dumps({"groups": [{"name": "others", "rules": only_in(others)}]}))
        files.append(f"{folder / 'others.json'}")
    config.write_text(json.dumps(_config(fleet, size) | {"rule_files": files}))
    if remember is not None:
        remember(folder, size.nodes)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, port), stderr=log)
        try:
            _await(port, process)
            yield Server(process.pid, port, folder)
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE)


def _command(folder: Path, port: int) -> Sequence[str]:
    return (
        "prometheus", f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    )  # fmt: skip


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, RuntimeError):
            _page(port, "/-/ready")
            return
        time.sleep(0.5)
    raise RuntimeError(f"Prometheus does not listen (exit status {process.poll()})")


def _config(fleet: int, size: Size) -> dict[str, Any]:
    """Give its configuration; JSON is YAML."""
    paths = {host(number): f"/{number}" for number in range(size.nodes)} | {"cluster": "/cluster"}
    targets = [
        {"targets": [f"127.0.0.1:{fleet}"], "labels": {"instance": name, "__metrics_path__": path}}
        for name, path in paths.items()
    ]
    return {
        "global": {
            "scrape_interval": f"{size.scrape}s", "scrape_timeout": f"{min(10, size.scrape)}s",
            "evaluation_interval": f"{size.every}s",
        },
        "scrape_configs": [{"job_name": "gpu-efficiency", "static_configs": targets}],
    }  # fmt: skip


def rule_files(folder: Path, *, own_intervals: bool) -> list[str]:
    """The rules as they are, but that none is evaluated so seldom that this run would not see it."""
    seldom, often = (r"interval: [12]0m", "interval: 4m") if own_intervals else (r"(?m)^ *interval: .*\n", "")
    files = sorted((ROOT / "alerts").glob("*.yaml"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        (folder / file.name).write_text(re.sub(seldom, often, text), encoding="utf-8")
    return [f"{folder / file.name}" for file in files]


def only_in(others: Sequence[Path]) -> list[dict[str, str]]:
    """Give the recording rules of folders that ours do not have, one of a name, in their order."""
    ours = {rule["record"] for rule in _records(ROOT / "alerts")}
    found = {rule["record"]: rule for other in reversed(others) for rule in _records(other)}
    return [rule for name, rule in found.items() if name not in ours]


def _records(folder: Path) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from (rule for rule in group["rules"] if "record" in rule)
