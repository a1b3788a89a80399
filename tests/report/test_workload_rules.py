"""Each recording rule of training and serving metrics has a test that detects a change of it."""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.alerts.packs import FOLDER, Rule, files, needed, sheets
from tests.each import each

RULES = {rule["record"]: rule for rule in files()["recording-workloads.yaml"]}
SHEET = sheets()["recording_workloads_test.yaml"]
TEXT = (FOLDER / "tests" / "recording_workloads_test.yaml").read_text()
_SWAPS = (
    ("sum by", "max by"), ("max by", "min by"), ("min by", "max by"), (" / ", " * "), ("* on", "/ on"), (" > 0", ""),
    ("|bubble", ""), (" and on", " or on"), ("^ -1", "^ 1"), ("0.5,", "1,"), ("sgn", "abs"),
)  # fmt: skip
_ONE = "a daemon has one such series: its sum is its greatest and its least"
_SIGN = "only whether it is above 0 is asked, and no part of it is negative"
SAME = {
    ("node_job:gpu_efficiency_reported:gpus", "sum by", 0): _ONE,
    ("node_job:gpu_efficiency_generated_tokens:rate5m", "sum by", 0): _ONE,
    ("job:gpu_efficiency_reported_hfu:ratio_rate5m", "max by", 0): _ONE,
    ("job:gpu_efficiency_hfu_mfu_gap:ratio_rate5m", "max by", 0): _ONE,
    ("job:gpu_efficiency_hfu_mfu_gap:ratio_rate5m", "max by", 1): _ONE,
    ("job:gpu_efficiency_batch_fill:ratio", "max by", 0): _ONE,
    ("job:gpu_efficiency_mbu:ratio", "max by", 0): _ONE,
    ("job:gpu_efficiency_tokens_per_pass:ratio_rate5m", "max by", 0): _ONE,
    ("job:gpu_efficiency_tokens:per_gpu_second_rate5m", "sum by", 1): _SIGN,
    ("job:gpu_efficiency_samples:rate5m", "sum by", 1): _SIGN,
    ("job:gpu_efficiency_reported_goodput:ratio", "sum by", 1): "it is multiplied with 0",
    ("job:gpu_efficiency_step_spread:ratio", "max by", 2): "the ranks are counted, whatever their values",
    ("job_state:gpu_efficiency_requests", "* on", 0): "the other side is 1",
}
"""Changes without effect, and why."""


def changes(rule: Rule) -> Iterator[tuple[tuple[str, str, int], str]]:
    """(record, what was changed, which occurrence), the changed expression."""
    expr = rule["expr"]
    for old, new in _SWAPS:
        for number, found in enumerate(re.finditer(re.escape(old), expr)):
            yield (rule["record"], old.strip(), number), expr[: found.start()] + new + expr[found.end() :]


CHANGES = [change for rule in RULES.values() for change in changes(rule)]


def asks(case: Any, record: str) -> bool:
    """Whether a query of the case uses the record."""
    return any(re.search(_question(each["expr"]), record) for each in case["promql_expr_test"])


def _question(expr: str) -> str:
    pattern = re.search(r'__name__=~"([^"]+)"', expr)
    name = re.search(r"[a-z_]+:gpu_efficiency_\w+(?::\w+)?", expr)
    return f"^({pattern[1]})$" if pattern else f"^{name[0]}$" if name else "^$"


def outcome(folder: Path, record: str, expr: str) -> subprocess.CompletedProcess[str]:
    """Run the tests on a copy of the rules with one of them changed."""
    folder.mkdir()
    rules = [*needed(" ".join(rule["expr"] for rule in RULES.values()), ["recording-jobs.yaml"])]
    rules += [rule | {"expr": expr} if rule["record"] == record else rule for rule in RULES.values()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "copy", "rules": rules}]}))
    (folder / "test.yaml").write_text(re.sub(r"(?:  - \.\./.*\n)+", "  - rules.yaml\n", TEXT, count=1))
    command = ["promtool", "test", "rules", f"{folder}/test.yaml"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_files_are_where_prometheus_looks() -> None:
    assert (FOLDER / "recording-workloads.yaml").exists()
    assert set(SHEET["rule_files"]) == {"../recording-jobs.yaml", "../recording-workloads.yaml"}


@each("record", RULES)
def test_every_rule_is_asked_for(record: str) -> None:
    assert any(asks(case, record) for case in SHEET["tests"])


@pytest.mark.mutation
def test_a_change_of_a_rule_fails_its_tests(tmp_path: Path) -> None:
    asked = [(("", "", 0), ""), *CHANGES]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda n: outcome(tmp_path / str(n), asked[n][0][0], asked[n][1]), range(len(asked))))
    assert (done[0].returncode, done[0].stderr) == (0, ""), done[0].stderr
    missed = {asked[n][0] for n, each in enumerate(done) if n and each.returncode == 0}
    assert missed == set(SAME)
