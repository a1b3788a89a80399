"""The alert rules, the tests beside them, and a small copy of both for one alert.

Owns reading the files and cutting out what one alert needs: its own rule, the recording rules it reads, directly or
not, and the test cases that ask for it, without what is said to people. Refuses to run anything.
"""

import functools
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "alerts"
Rule = dict[str, Any]
_ASKED = "alert_rule_test"
_NAME = re.compile(r"[a-z_]+:gpu_efficiency_\w+(?::\w+)?")


@functools.cache
def groups() -> dict[str, tuple[dict[str, Any], ...]]:
    """File name -> its groups, in order; those that others read come first."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: (not path.name.startswith("recording"), path.name))
    # `recording.yaml` before its sequels: they read it.
    paths.sort(key=lambda path: path.name != "recording.yaml")
    return {path.name: groups_of(path) for path in paths}


def groups_of(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the groups of one file."""
    return tuple(yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"])


@functools.cache
def files() -> dict[str, tuple[Rule, ...]]:
    """File name -> its rules, in order; those that others read come first."""
    return {name: tuple(rule for group in found for rule in group["rules"]) for name, found in groups().items()}


@functools.cache
def alerts() -> dict[str, Rule]:
    """Name -> rule; a name that is there twice counts once."""
    return {rule["alert"]: rule for rules in files().values() for rule in rules if "alert" in rule}


def records(*names: str) -> dict[str, Rule]:
    """Name -> rule, of some files, in an order in which each comes after those it reads."""
    return {rule["record"]: rule for name in names for rule in files()[name] if "record" in rule}


def needed(expr: str, paths: list[str]) -> list[Rule]:
    """Give the recording rules of some files that an expression reads, directly or not, in the order of the files."""
    known = records(*(Path(path).name for path in paths))
    wanted: set[str] = set()
    more = set(_NAME.findall(expr)) & known.keys()
    while more:
        wanted |= more
        more = set(_NAME.findall(" ".join(known[name]["expr"] for name in more))) & known.keys() - wanted
    return [rule for name, rule in known.items() if name in wanted]


class _AsWritten(yaml.CSafeLoader):
    """Text stays text: to promtool `0x20` is twenty zeros, to YAML it is 32."""


_AsWritten.yaml_implicit_resolvers = {"<": yaml.CSafeLoader.yaml_implicit_resolvers["<"]}


@functools.cache
def sheets() -> dict[str, Any]:
    """Every file of promtool tests, by name."""
    paths = sorted((FOLDER / "tests").glob("*_test.yaml"))
    return {path.name: yaml.load(path.read_text(), _AsWritten) for path in paths}  # noqa: S506  a kind of SafeLoader


def sheet(alert: str, *, case: str | None = None) -> Any:
    """Give the file of tests that asks for the alert, with the cases that do, or one of them, and nothing else."""
    for content in sheets().values():
        found = [_only(each, alert) for each in content["tests"] if _asks(each, alert) and case in (None, each["name"])]
        if found:
            return content | {"tests": found}
    raise LookupError(f"no test in alerts/tests asks for {alert}")


@functools.cache
def texts_of(alert: str) -> frozenset[str]:
    """Each summary and its description, in one, that promtool has to see of an alert."""
    asked = (each for content in sheets().values() for case in content["tests"] for each in case.get(_ASKED, ()))
    fired = (fires["exp_annotations"] for each in asked if each["alertname"] == alert for fires in each["exp_alerts"])
    return frozenset(f"{text['summary']}. {text['description']}" for text in fired)


def _asks(case: Any, alert: str) -> bool:
    return any(each["alertname"] == alert for each in case.get(_ASKED, ()))


def _only(case: Any, alert: str) -> Any:
    asked = [_labels_only(each) for each in case["alert_rule_test"] if each["alertname"] == alert]
    return {key: value for key, value in case.items() if key != "promql_expr_test"} | {"alert_rule_test": asked}


def _labels_only(asked: Any) -> Any:
    return asked | {"exp_alerts": [{"exp_labels": each["exp_labels"]} for each in asked["exp_alerts"]]}


def plain(text: str) -> str:
    """Text with its white space made single."""
    return " ".join(text.split())
