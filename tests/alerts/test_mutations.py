"""An alert whose threshold is moved or whose guard is cut out fails one of its tests: those of mutations.yaml, each."""

import copy
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.alerts.packs import Rule, alerts, files, needed, plain, sheet
from tests.alerts.promql import Binary, parse, walk

MUTATIONS: dict[str, list[dict[str, str]]] = yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text())


def own_records(alert: str) -> dict[str, Rule]:
    """Recording rules beside the alert that this one reads, directly or not, and none before it."""
    rules = next(rules for rules in files().values() if any(rule.get("alert") == alert for rule in rules))
    found: dict[str, Rule] = {}
    for rule in rules:
        if "alert" in rule:
            used = {each["record"]: each for each in needed(rule["expr"], list(files())) if each["record"] in found}
            if rule["alert"] == alert:
                return used
            found = {name: each for name, each in found.items() if name not in used}
        else:
            found[rule["record"]] = rule
    raise AssertionError(alert)


def guards(expr: str) -> int:
    """How many clauses keep an expression from what looks alike."""
    return sum(isinstance(node, Binary) and node.operator in {"and", "unless"} for node in walk(parse(expr)))


def changed(rule: Rule, mutation: dict[str, str]) -> Rule:
    """Give the rule with one text replaced, which must be there once."""
    other = copy.deepcopy(rule)
    *path, key = mutation.get("part", "expr").split(".")
    holder = other
    for step in path:
        holder = holder[step]
    text = plain(holder[key])
    assert text.count(plain(mutation["from"])) == 1, f"{mutation['from']!r} is not there once: {text}"
    holder[key] = text.replace(plain(mutation["from"]), mutation["to"])
    assert holder[key] != text
    return other


def outcome(alert: str, folder: Path, mutation: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run the alert's own tests on a copy of the rules it needs."""
    asked = sheet(alert, case=mutation.get("case") if mutation else None)
    bare = {key: value for key, value in alerts()[alert].items() if key != "annotations"}
    rules = [*needed(bare["expr"], asked["rule_files"]), bare]
    if mutation is not None:
        target = mutation.get("in", alert)
        assert target in {rule.get("record", rule.get("alert")) for rule in rules}
        rules = [
            changed(rule, mutation) if target in (rule.get("record"), rule.get("alert")) else rule for rule in rules
        ]
    folder.mkdir()
    written(folder / "rules.yaml", {"groups": [{"name": "copy", "rules": rules}]})
    written(folder / "test.yaml", asked | {"rule_files": ["rules.yaml"], "group_eval_order": ["copy"]})
    command = ["promtool", "test", "rules", f"{folder}/test.yaml"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def written(path: Path, content: Any) -> None:
    path.write_text(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))


def test_every_alert_is_here() -> None:
    assert set(MUTATIONS) == set(alerts())


@pytest.mark.parametrize("alert", MUTATIONS)
def test_its_threshold_and_each_of_its_guards_is_changed(alert: str) -> None:
    kinds = [mutation["kind"] for mutation in MUTATIONS[alert]]
    clauses = guards(alerts()[alert]["expr"]) + sum(guards(rule["expr"]) for rule in own_records(alert).values())
    assert len(kinds) >= 2
    assert "threshold" in kinds
    assert kinds.count("guard") >= clauses
    assert ("hold" in kinds) == ("keep_firing_for" in alerts()[alert])


@pytest.mark.mutation
@pytest.mark.parametrize("alert", MUTATIONS)
def test_a_change_of_it_fails_its_tests(alert: str, tmp_path: Path) -> None:
    asked = [None, *MUTATIONS[alert]]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda n: outcome(alert, tmp_path / str(n), asked[n]), range(len(asked))))
    assert (done[0].returncode, done[0].stderr) == (0, ""), done[0].stderr
    # What promtool cannot evaluate fails too, and shows nothing: it must have got other alerts.
    missed = [asked[n] for n, each in enumerate(done) if n and not (each.returncode and "got:" in each.stderr)]
    assert missed == []
