"""What the rules cost a real Prometheus that scrapes 10,000 simulated GPUs, and what they would at 100,000.

The budget is held against processor time: of the same server with its rules and without them, one after the other. What
it tells itself of a group's evaluation is wall time, and on a busy machine most of that is waiting.

Owns the Prometheus it starts, its history and the reading of its own figures (`/api/v1/rules`). The day behind it,
which the rules with long ranges read, is written beforehand by promtool. Needs Debian's package prometheus.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from benchmarks.client import Client
from benchmarks.daemon import cpu_seconds, memory, running
from benchmarks.figures import Row, row
from benchmarks.machine import ROOT
from benchmarks.rules_fleet import host
from tests.e2e.running import free_port

SCALE = 10
"""To 100,000 GPUs."""
SHARE = 0.25
"""Of its interval that an evaluation of everything may take there, on one core."""
_SLOWEST = 8
_PATIENCE = 120.0
Group = Mapping[str, Any]
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
    looks: int = 3
    own_intervals: bool = True
    """Whether groups keep the interval that they have of their own."""


QUICK = Size(nodes=24, scrape=3, every=6, warm_up=24, looks=1, own_intervals=False)


class _Server(Struct, frozen=True):
    """A running Prometheus."""

    pid: int
    port: int

    def ask(self, path: str) -> Any:
        """Give what lies in an answer's `data`."""
        with Client(self.port) as client:
            return json.loads(client.get(f"/api/v1/{path}")[1])["data"]

    def value(self, query: str) -> float:
        """Give the value of an expression that has one sample."""
        return float(self.ask(f"query?query={quote(query)}")["result"][0]["value"][1])


def rules(*, quick: bool = False) -> list[Row]:
    """Scrape, wait until the windows are full, and look at some evaluations."""
    size = QUICK if quick else Size()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        fleet = stack.enter_context(running(["-m", "benchmarks.rules_fleet", f"{size.nodes}"]))
        server = stack.enter_context(_prometheus(folder, fleet.port, size))
        time.sleep(size.warm_up)
        looks, spent = list[list[Group]](), list[float]()
        for _ in range(size.looks):
            before, began = cpu_seconds(server.pid), time.monotonic()
            looks.append(_look(server, size))
            spent.append((cpu_seconds(server.pid) - before) / (time.monotonic() - began))
        _check(server, looks[-1], size.nodes + 1)
        sizes = _sizes(server)
        without = _without(server, folder, size)
        return [*rows(looks), *shares(spent, without, 8 * size.nodes), *sizes]


def _without(server: _Server, folder: Path, size: Size) -> float:
    """Processor time a second of the same server after its rules are taken away."""
    config = folder / "prometheus.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"rule_files": []}))
    os.kill(server.pid, signal.SIGHUP)
    while server.ask("rules")["groups"]:
        time.sleep(0.5)
    before, began = cpu_seconds(server.pid), time.monotonic()
    time.sleep(size.looks * size.every)
    return (cpu_seconds(server.pid) - before) / (time.monotonic() - began)


def _look(server: _Server, size: Size) -> list[Group]:
    time.sleep(size.every)
    found: list[Group] = server.ask("rules")["groups"]
    return found


def _check(server: _Server, groups: Sequence[Group], targets: int) -> None:
    """Refuse figures of rules that failed, or of nodes that were not there."""
    every = [rule for group in groups for rule in group["rules"]]
    failed = [f"{rule['name']}: {rule.get('lastError')}" for rule in every if rule["health"] != "ok"]
    up = server.value("sum(up)")
    if failed or up != targets:
        raise RuntimeError(f"{up:.0f} of {targets} targets answer; rules that fail: {failed[:3] or 'none'}")


# -- rows --


def rows(looks: Sequence[Sequence[Group]]) -> list[Row]:
    """Rows of all groups, and of the slowest rules: wall time, as the server tells it."""
    groups = {group["name"]: [_of(look, group["name"]) for look in looks] for look in looks[:1] for group in look}
    return [*(_group(name, seen) for name, seen in groups.items()), *_slowest(looks)]


def shares(spent: Sequence[float], without: float, gpus: int) -> list[Row]:
    """Rows of the whole set: the share of one core it takes, here and ten times larger."""
    percents = [100 * (each - without) for each in spent]
    often = f"{len(spent)} minutes with, as many without"
    return [
        row(
            "rules", f"CPU of all rules, {gpus:,} GPUs, share of a core", often=often, values=percents, unit="%",
            budget=100 * SHARE / SCALE,
        ),
        row(
            "rules", f"- extrapolated to {gpus * SCALE:,} GPUs", often=f"{SCALE} x the row above",
            values=[SCALE * each for each in percents], unit="%", budget=100 * SHARE,
        ),
        row(
            "rules", f"CPU of scraping and storing alone, {gpus:,} GPUs, share of a core", often="once",
            values=[100 * without], unit="%", spread="-",
        ),
    ]  # fmt: skip


def _of(look: Sequence[Group], name: str) -> Group:
    return next(group for group in look if group["name"] == name)


def _group(name: str, seen: Sequence[Group]) -> Row:
    times = [1e3 * group["evaluationTime"] for group in seen]
    what = f"Group {name}: {len(seen[0]['rules'])} rules every {seen[0]['interval']:.0f} s, wall"
    return row("rules", what, often=f"{len(seen)} evaluations", values=times, unit="ms", digits=0)


def _slowest(looks: Sequence[Sequence[Group]]) -> list[Row]:
    times: dict[tuple[str, int, str], list[float]] = {}
    for look in looks:
        for group in look:
            for place, rule in enumerate(group["rules"]):
                times.setdefault((group["name"], place, rule["name"]), []).append(1e3 * rule["evaluationTime"])
    slowest = sorted(times.items(), key=lambda item: -median(item[1]))[:_SLOWEST]
    return [
        row("rules", f"- {name}, wall", often=f"{len(values)} evaluations", values=values, unit="ms", digits=0)
        for (_, _, name), values in slowest
    ]


def _sizes(server: _Server) -> list[Row]:
    def once(what: str, value: float, unit: str) -> Row:
        return row("rules", what, often="once", values=[value], unit=unit, digits=0, spread="-")

    return [
        once("Series scraped", server.value("sum(scrape_samples_scraped)"), "series"),
        once("Series recorded", server.value('count({__name__=~".+:.+"})'), "series"),
        once("Resident memory of Prometheus", memory(server.pid).now, "MiB"),
    ]


# -- a Prometheus --


@contextmanager
def _prometheus(folder: Path, fleet: int, size: Size) -> Iterator[_Server]:
    """Start one on the fleet, with a day of history; end it by its own handle. RuntimeError where it cannot be."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        raise RuntimeError("prometheus or promtool is not installed: on Debian, apt-get install prometheus")
    port, config = free_port(), folder / "prometheus.json"
    config.write_text(json.dumps(_config(fleet, size) | {"rule_files": _rule_files(folder, size)}))
    _remember(folder, size.nodes)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stderr=log,
        )  # fmt: skip
        try:
            _await(port, process)
            yield _Server(process.pid, port)
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE)


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            with Client(port) as client:
                client.get("/-/ready")
                return
        except (OSError, RuntimeError):
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


def _rule_files(folder: Path, size: Size) -> list[str]:
    """The rules as they are, but that none is evaluated so seldom that this run would not see it: medians."""
    seldom, often = (r"interval: 20m", "interval: 4m") if size.own_intervals else (r"(?m)^ *interval: .*\n", "")
    files = sorted((ROOT / "alerts").glob("*.yaml"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        (folder / file.name).write_text(re.sub(seldom, often, text), encoding="utf-8")
    return [f"{folder / file.name}" for file in files]


def _remember(folder: Path, nodes: int) -> None:
    """Write the day before: what the rules with long ranges read, at the pace at which it is recorded."""
    past = folder / "past.om"
    now = int(time.time()) - 120
    with past.open("w", encoding="ascii") as file:
        file.writelines(past_of(nodes, now))
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", f"{past}", f"{folder / 'tsdb'}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    past.unlink()
    if made.returncode:
        raise RuntimeError(f"promtool could not write the history: {made.stderr[-500:]}")


_PAST = {
    "node:gpu_efficiency_gpus": (60, '{{node="{0}"}}'),
    "node:gpu_efficiency_cost_unheld:per_hour": (60, '{{node="{0}",currency="GPU-hours"}}'),
    "job:gpu_efficiency_gau:ratio_mean1h": (240, '{{job_id="past-{0}"}}'),
    "job:gpu_efficiency_ectr:ratio_mean1h": (240, '{{job_id="past-{0}"}}'),
    "job:gpu_efficiency_emfu:ratio_mean1h": (240, '{{job_id="past-{0}"}}'),
}
"""What a range of a day is read of: seconds between samples, and the labels, two jobs a node."""
_JOBS_A_NODE = 2


def past_of(nodes: int, now: int) -> Iterator[str]:
    """Lines of OpenMetrics: the day before `now`."""
    for name, (every, labels) in _PAST.items():
        yield f"# TYPE {name} gauge\n"
        many = nodes * (_JOBS_A_NODE if name.startswith("job") else 1)
        for number in range(many):
            head = name + labels.format(host(number) if name.startswith("node") else number)
            yield "".join(f"{head} 8 {at}\n" for at in range(now - 86_400, now, every))
    yield "# EOF\n"
