"""Loads our rules in Prometheus 3 and scrapes a daemon with it: `make prometheus-3`.

Debian unstable's Prometheus, Alertmanager and VictoriaMetrics are put into a tree below `.cache` (as root, by
mmdebstrap), once. Its promtool checks all rules; its server loads them and scrapes the simulated node of
`gpu-efficiency demo` with each negotiation of formats that its configuration allows, and must have every series of the
page and no failed rule. Then it and its Alertmanager take the place of Debian 12's in tests: every panel of every board
has data of the simulated world, the examples of configuration are valid, a scrape shows its certificate, an agent
writes into a store that evaluates the rules, and whoever is concerned is told of an incident in a small fleet.

The tests of the rules, and of the numbers on boards, are not run: their values are those of closed ranges, of
Prometheus 2. From 3.0 on a range leaves out its first instant, so that values at whole minutes differ by one sample.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.running import Daemon, Page, daemon, environment, running
from tests.ports import free_port
from tests.slurm.chroot import build
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".cache/prometheus-3"
_PACKAGES = "prometheus,prometheus-alertmanager,victoria-metrics"
NEGOTIATIONS = {
    "as it is by default": ("", ()),
    "native histograms: protobuf first": ("", ("--enable-feature=native-histograms",)),
    "text 1.0.0, names in UTF-8": ("scrape_protocols: [PrometheusText1.0.0, PrometheusText0.0.4]", ()),
    "names as before version 3": (
        "metric_name_validation_scheme: legacy, metric_name_escaping_scheme: underscores", (),
    ),
}  # fmt: skip
"""Settings of a scrape job, and flags of the server."""


def inside(*words: str) -> list[str]:
    """Return the command line that runs one of the tree's programs."""
    return ["chroot", f"{TREE}", *words]


_INNER = "/var/tmp"  # noqa: S108  of the tree, which is nobody else's
_RULES = "alerts"


def check_rules() -> None:
    """Copy all rules into the tree and check them with promtool. Raises CalledProcessError."""
    copy = TREE / _INNER.lstrip("/") / _RULES
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    names = [shutil.copy2(file, copy) and file.name for file in sorted((ROOT / "alerts").glob("*.yaml"))]
    subprocess.run(inside("promtool", "check", "rules", *(f"{_INNER}/{_RULES}/{name}" for name in names)), check=True)


@contextmanager
def prometheus(target: str, setting: str, flags: Sequence[str]) -> Iterator[httpx.Client]:
    """Run a server that scrapes `target`, until the block ends."""
    folder, port = Path(tempfile.mkdtemp(dir=TREE / _INNER.lstrip("/"))), free_port()
    job = ", ".join(filter(None, ("job_name: gpus", setting, f"static_configs: [{{targets: ['{target}']}}]")))
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: ['{_INNER}/{_RULES}/*.yaml']\nscrape_configs: [{{{job}}}]\n"
    )
    seen = f"{_INNER}/{folder.name}"
    words = ("prometheus", f"--config.file={seen}/prometheus.yml", f"--storage.tsdb.path={seen}/data")
    try:
        with (
            running(inside(*words, f"--web.listen-address=127.0.0.1:{port}", *flags), folder / "log", environment()),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            yield client
    finally:
        shutil.rmtree(folder)


def values(client: httpx.Client, query: str) -> list[float]:
    """Evaluate an instant query; empty while the server starts."""
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    return [float(row["value"][1]) for row in answer.json()["data"]["result"]] if answer.status_code == 200 else []


def scrape(served: Daemon) -> None:
    """Scrape with each negotiation. Raises AssertionError if a series is missing, or a rule fails."""
    for name, (setting, flags) in NEGOTIATIONS.items():
        with prometheus(f"127.0.0.1:{served.port}", setting, flags) as client:
            wait_for(partial(_is_up, client), f"{name}: up is 1")
            (stored,) = values(client, 'count({__name__=~"gpu_efficiency_.+"})')
            page = Page(served.get("/metrics").text)
            there = sum(metric.startswith("gpu_efficiency_") for metric, _ in page.samples)
            assert abs(stored - there) <= _MOVING, f"{name}: {stored} series stored, {there} on the page"
            rules = [rule for group in _groups(client) for rule in group["rules"]]
            failed = [rule["name"] for rule in rules if rule.get("lastError")]
            assert rules and not failed, f"{name}: these rules fail: {failed}"  # noqa: PT018  no test
            sys.stdout.write(f"{name}: {stored:.0f} series, {len(rules)} rules\n")


_PROGRAMS = ("prometheus", "prometheus-alertmanager", "amtool")
_TESTS = (
    "tests/dashboards/test_panels.py", "tests/test_prometheus_examples.py",
    "tests/e2e/test_web.py::test_only_with_a_certificate_and_prometheus_has_one",
    "tests/e2e/test_prometheus_scale.py::test_an_agent_writes_a_node_s_useful_share_into_a_store_with_the_rules",
    "tests/alerts/test_alertmanager.py", "tests/alerts/test_templates.py", "tests/e2e/test_alerts.py",
    "-k", "not test_a_panel_says_what_the_ledger_says",
)  # fmt: skip


def build_tree() -> None:
    """Build it, unless it has these packages. Raises ChrootError."""
    mark = TREE / ".built"
    if not mark.is_file() or mark.read_text(encoding="utf-8") != _PACKAGES:
        build(TREE, release="unstable", packages=_PACKAGES)


def run_tests(programs: Sequence[str], *words: str) -> None:
    """Run pytest with these programs of the tree first on the PATH. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        for name in programs:
            (Path(folder) / name).symlink_to(TREE / "usr/bin" / name)
        env = environment(PATH=f"{folder}:{os.environ['PATH']}")
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *words], cwd=ROOT, env=env, check=True)


_MOVING = 5
"""Series that may come or go between two looks at a node at work."""


def _is_up(client: httpx.Client) -> bool:
    return values(client, "up") == [1.0]


def _groups(client: httpx.Client) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = client.get("/api/v1/rules").json()["data"]["groups"]
    return groups


def main() -> int:
    """Return 0 if rules and scrapes work in Prometheus 3."""
    build_tree()
    for name in _PROGRAMS:
        subprocess.run(inside(name, "--version"), check=True)
    check_rules()
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder), "demo") as served:
        scrape(served)
    run_tests(_PROGRAMS, *_TESTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
