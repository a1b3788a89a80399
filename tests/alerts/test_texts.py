"""Every alert's text, as Prometheus writes it.

It begins with whether the node is simulated and which cluster it is in, and has no gap where a job's name and user, a
rank and the prices are not known.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.packs import alerts, needed, sheet
from tests.alerts.test_mutations import written
from tests.alerts.test_rules import EMPTY

pytestmark = pytest.mark.slow

_SERIES = re.compile(r"(?P<name>[\w:]+)\s*(?:\{(?P<labels>.*)\})?\s*", re.DOTALL)
_LABEL = re.compile(r'(cluster|instance)="([^"]*)"')
_TEXTS = re.compile(r'Annotations:\{.*?description="((?:[^"\\]|\\.)*)".*?summary="((?:[^"\\]|\\.)*)"')
_MAY_BE_UNKNOWN = re.compile(r'(?<=[{,\s])(?:name|user|team|rank)="[^"]*"(?:,\s*)?')
ABOUT_MONEY = {"GPUEfficiencyIdleAllocationCost"}
"""These do not fire where no price is known."""


def _that_fire(alert: str) -> list[tuple[Any, str]]:
    """One case for each kind of subject with which it fires (a job, a whole cluster), and when."""
    found: dict[frozenset[str], tuple[Any, str]] = {}
    for case in sheet(alert)["tests"]:
        for asked in case["alert_rule_test"]:
            for fires in asked["exp_alerts"]:
                found.setdefault(frozenset(fires["exp_labels"]) - {"cluster"}, (case, asked["eval_time"]))
    return list(found.values())


def _in_a_cluster(series: str) -> str:
    """The series with a label cluster, if it has none."""
    found = _SERIES.fullmatch(series)
    assert found, series
    labels = found["labels"] or ""
    return series if 'cluster="' in labels else f'{found["name"]}{{cluster="east",{labels}}}'


def _marks(series: list[str], *, simulated: bool) -> list[dict[str, str]]:
    """What simulated nodes, and a simulated scheduler, say of themselves."""
    owners = {tuple(dict(_LABEL.findall(each)).get(name, "") for name in ("cluster", "instance")) for each in series}
    scheduler, node = ("simulation", "1x4000") if simulated else ("slurm", "0x4000")
    rows = []
    for cluster, instance in sorted(owners):
        labels = f'cluster="{cluster}",instance="{instance}"'
        rows.append({"series": f"gpu_efficiency_simulated{{{labels}}}", "values": node})
        info = f'gpu_efficiency_cluster_build_info{{{labels},scheduler="{scheduler}"}}'
        rows.append({"series": info, "values": "1x4000"})
    return rows


def _texts(alert: str, folder: Path, *, simulated: bool, unknown: bool = False) -> list[tuple[str, str]]:
    """Give (description, summary) of each alert that fires."""
    found = []
    for case, at in _that_fire(alert):
        rows = [row | {"series": _in_a_cluster(row["series"])} for row in case["input_series"]]
        if unknown:
            rows = list(_less_known(alert, rows))
        found += _rendered(alert, case | {"input_series": rows}, at, folder, simulated=simulated)
    return found


def _less_known(alert: str, rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The case as it would be where nobody has told the jobs' names and users, the ranks, and what a GPU costs."""
    for row in rows:
        name = row["series"].partition("{")[0]
        if "_threshold" in name:
            yield row
        elif alert in ABOUT_MONEY or not ("_price" in name or "_cost" in name):
            yield row | {"series": _MAY_BE_UNKNOWN.sub("", row["series"])}


def _rendered(alert: str, case: Any, at: str, folder: Path, *, simulated: bool) -> list[tuple[str, str]]:
    asked, rows = sheet(alert), case["input_series"]
    # A case that begins with what is recorded lacks what it was recorded from, which the text asks for.
    recorded = [row for row in rows if row["series"].startswith("job:gpu_efficiency_info{")]
    raw = 'gpu_efficiency_job_info{instance="n1",'
    rows += [row | {"series": raw + row["series"].partition("{")[2]} for row in recorded]
    marks = _marks([row["series"] for row in rows], simulated=simulated)
    # A case that is itself about a simulated node has the mark already.
    rows = [row for row in rows if not row["series"].startswith("gpu_efficiency_simulated")] + marks
    rules = [*needed(alerts()[alert]["expr"], asked["rule_files"]), alerts()[alert]]
    written(folder / "rules.yaml", {"groups": [{"name": "copy", "rules": rules}]})
    test = {"eval_time": at, "alertname": alert, "exp_alerts": []}
    content = asked | {
        "rule_files": ["rules.yaml"], "group_eval_order": ["copy"],
        "tests": [{"interval": case["interval"], "input_series": rows, "alert_rule_test": [test]}],
    }  # fmt: skip
    written(folder / "test.yaml", content)
    command = ["promtool", "test", "rules", f"{folder}/test.yaml"]
    env = os.environ | {"GOGC": "400"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    found = _TEXTS.findall(done.stderr)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_its_text_begins_with_whether_it_is_simulated_and_where(alert: str, tmp_path: Path) -> None:
    begins = re.compile(r"SIMULATED: (east|west): \S")
    marked = [summary for _, summary in _texts(alert, tmp_path, simulated=True)]
    assert [text for text in marked if not begins.match(text)] == []


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_what_is_not_known_leaves_no_gap_in_its_text(alert: str, tmp_path: Path) -> None:
    found = _texts(alert, tmp_path, simulated=False, unknown=True)
    assert [text for texts in found for text in texts if EMPTY.search(text) or "SIMULATED" in text] == []
