"""Each group of rules is evaluated often enough for all that read its series, as shipped and in the faster profile.

Prometheus uses a sample for five minutes. One minute of them is left for an evaluation that comes late; who reads what
is recorded more rarely says how far it looks back.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import series
from tests.alerts.packs import FOLDER, groups_of
from tests.dashboards.past import seconds

ROOT = FOLDER.parent
LOOKBACK, LATE = 300.0, 60.0
DEFAULT = "1m"
_READ = re.compile(r"(?P<name>[a-z_]+:gpu_efficiency_\w+(?::\w+)?)(?:\{[^{}]*\}|%s)*(?:\[(?P<range>\$?\w+)\])?")


def documented() -> str:
    """Return the command of the faster profile, as docs/alerts.md has it."""
    text = " ".join((ROOT / "docs" / "alerts.md").read_text(encoding="utf-8").split())
    (command,) = re.findall(r"`(sed -i 's/interval: [^`]*)`", text)
    return str(command)


@pytest.fixture(name="folder", params=["as shipped", "faster"])
def _folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkout's `alerts`."""
    alerts = tmp_path / "alerts"
    alerts.mkdir()
    for path in FOLDER.glob("*.yaml"):
        shutil.copy(path, alerts)
    if request.param == "faster":
        subprocess.run(["sh", "-c", documented()], cwd=tmp_path, check=True, timeout=60)
    return alerts


def intervals(folder: Path) -> dict[str, float]:
    """Recorded series -> seconds between its samples."""
    return {
        rule["record"]: seconds(group.get("interval", DEFAULT))
        for path in sorted(folder.glob("*.yaml"))
        for group in groups_of(path)
        for rule in group["rules"]
        if "record" in rule
    }


def readers(folder: Path) -> Iterator[tuple[str, str, frozenset[str]]]:
    """(who, what it asks, what is recorded in the same breath): rules, alerts' texts, and panels."""
    for path in sorted(folder.glob("*.yaml")):
        for group in groups_of(path):
            beside = frozenset(rule["record"] for rule in group["rules"] if "record" in rule)
            for rule in group["rules"]:
                name = rule.get("record") or rule["alert"]
                yield name, rule["expr"], beside
                yield from ((name, text, beside) for text in rule.get("annotations", {}).values())
    for board in sorted((ROOT / "dashboards").glob("*.json")):
        panels = re.findall(r'"expr":"((?:[^"\\]|\\.)*)"', board.read_text())
        yield from ((board.name, expr, frozenset()) for expr in panels)


def misses(text: str, every: dict[str, float], beside: frozenset[str] = frozenset()) -> list[str]:
    """What a query reads, and between two of whose samples it would find none."""
    return [
        found[0]
        for found in _READ.finditer(text)
        if found["name"] in every.keys() - beside and every[found["name"]] + LATE > _back(found["range"] or "")
    ]


def _back(written: str) -> float:
    """How far a range looks back; what Grafana puts in is the time shown, hours or days."""
    if not written:
        return LOOKBACK
    return float("inf") if written.startswith("$") else seconds(written)


def test_nobody_looks_between_two_samples(folder: Path) -> None:
    every = intervals(folder)
    missed = {(who, read) for who, text, beside in readers(folder) for read in misses(text, every, beside)}
    assert missed == set()


def test_boards_made_after_the_change_count_each_sample_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = intervals(folder)
    monkeypatch.setattr(series, "ALERTS", folder)
    series._recorded.cache_clear()
    try:
        factors = {name: float(series.hours(name).rpartition(" * ")[2]) for name in every if series.recorded(name)}
    finally:
        monkeypatch.undo()
        series._recorded.cache_clear()
    assert factors
    assert {name: factor * 3600 for name, factor in factors.items()} == pytest.approx(
        {name: every[name] for name in factors}, rel=1e-5
    )


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("a:gpu_efficiency_b:c", ["a:gpu_efficiency_b:c"]),
        ('max(last_over_time(a:gpu_efficiency_b:c{x="1"}[10m]))', ['a:gpu_efficiency_b:c{x="1"}[10m]']),
        ("last_over_time(a:gpu_efficiency_b:c%s[11m])", []),
        ("sum_over_time(a:gpu_efficiency_b:c[$__range]) + d:gpu_efficiency_e:f", []),
    ],
)
def test_a_look_between_two_samples_is_found(text: str, missed: list[str]) -> None:
    assert misses(text, {"a:gpu_efficiency_b:c": 600.0, "d:gpu_efficiency_e:f": 240.0}) == missed
