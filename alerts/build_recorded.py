# ruff: noqa: INP001  a script beside the rules, not a package
"""Writes exporter/data/recorded.csv: of every recorded series what decides how many of them there are.

Owns that file and read_by_rules.csv beside it, the daemon's series that any rule reads; both derive from the rules and
the catalogue. Refuses numbers of nodes, jobs and owners: `gpu-efficiency cardinality` is told those. One row a rule:

- `record`, and `interval`: seconds between two evaluations;
- `labels`: those of the result; `from`: the scope of the rarest series it cannot do without (docs/metrics.md, "per");
- `leaks`: values that the label leak can have, 0 where it has none;
- `words`: combinations of its labels that are neither leak, layer nor a thing of the site, as the catalogue
  bounds them;
- `sparse`: 1 where a leak that took nothing has no sample; `rare`: 1 where there is one only while something is wrong
  (the expression compares it);
- `window`: seconds for which it still tells of what has ended.

Usage, from the root of the project (`make docs`): python -m alerts.build_recorded
"""

import csv
import io
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import yaml

from exporter.cardinality import REPORTED_MFU, REPORTING_OR_SERVING
from exporter.cluster.metrics import METRICS as OF_CLUSTER
from exporter.core.leaks import LEAK_NAMES
from exporter.core.metrics import METRICS, UNOBSERVED_REASONS
from exporter.training.message import OUTCOMES
from tests.alerts.lint import FOLDER, Rule, known_to, rules
from tests.alerts.promql import Aggregate, Binary, Call, Literal, Node, Selector, parse, walk
from tests.dashboards.past import seconds

_DATA = Path(__file__).parents[1] / "exporter" / "data"
FILE, READ = _DATA / "recorded.csv", _DATA / "read_by_rules.csv"
HEAD = ("record", "interval", "labels", "from", "leaks", "words", "sparse", "rare", "window")
_WIDTH = {
    "job in trouble": 1, "job on one GPU": 1, "spinning GPU": 1, "rank": 1, "serving job": 2, "reporting job": 2,
    REPORTING_OR_SERVING: 2, "exemption": 3, "account": 3, "job": 4, "gpu": 5, "model": 6, "node": 7, "cluster": 8,
}  # fmt: skip
"""Scopes from the rare to what is always there."""
_SITE = frozenset({
    "cluster", "instance", "node", "job", "job_id", "user", "account", "team", "partition", "workload_class",
    "workload_namespace", "workload_pod", "currency", "model", "gpu", "uuid", "rank", "held", "leak", "layer",
    "exemption", "profile", "engine", "run", "spread", "version", "source", "scheduler",
})  # fmt: skip
"""Labels that things of the site have, or that the calculator counts by itself."""
_COMPARED = frozenset({">", "<", ">=", "<=", "==", "!="})
_WORDS = {"reason": len(UNOBSERVED_REASONS) + 1, "outcome": len(OUTCOMES)}
"""Of a GPU or a listener only those that occurred have a series; of a fleet all may."""
_TELLING = frozenset({REPORTING_OR_SERVING, "reporting job", "serving job", "rank"})
"""What these are compared with 0 for is whether they tell it at all."""
_CAUSES = 8
"""More causes of an interruption than `gpu-efficiency cluster` tells."""


class Found(NamedTuple):
    """What an expression's result inherits from the series it reads."""

    scope: str
    leaks: frozenset[str]
    words: Mapping[str, int]
    """Label -> combinations of the words of the metric that it is of."""
    rare: bool = False
    by_leak: bool = False
    """It is told by leak or layer: compared with 0 it lacks those that took nothing, and is not rare."""
    sparse: bool = False
    window: float = 0.0


_LEAKS = frozenset(LEAK_NAMES)
_ITSELF = Found("job in trouble", frozenset(), {}, rare=True)
"""What hands on its own last value adds nothing to what it has first."""


def rows() -> list[tuple[str, ...]]:
    """One row a rule, in the order of the files; a rule's own sources come before it in `known`, whatever file."""
    all_rules = rules()
    labels = {name: series.labels or frozenset() for name, series in known_to(all_rules).items()}
    pace, recorded = _intervals(), [rule for rule in all_rules if rule.record]
    known = dict(_raw())
    while waiting := [rule for rule in recorded if rule.name not in known]:
        ready = [rule for rule in waiting if _names(parse(rule.expr)) <= known.keys() | {rule.name}]
        if not ready:
            named = sorted(set().union(*(_names(parse(rule.expr)) for rule in waiting)) - known.keys())
            raise ValueError(f"{waiting[0].file}: the rules read what nothing exports or records: {', '.join(named)}")
        known |= {rule.name: _found(parse(rule.expr), known | {rule.name: _ITSELF}) for rule in ready}
    return [_row(rule, labels[rule.name], known[rule.name], pace[rule.name]) for rule in recorded]


def _raw() -> Iterable[tuple[str, Found]]:
    for metric in METRICS:
        words = {label: _WORDS.get(label, metric.max_series) for label in metric.labels if label not in _SITE}
        scope = REPORTING_OR_SERVING if metric.name == REPORTED_MFU else metric.scope
        yield metric.name, Found(scope, _LEAKS, words, by_leak="layer" in metric.labels)
    for metric in OF_CLUSTER:
        yield metric.name, Found("cluster", _LEAKS, {label: _CAUSES for label in metric.labels if label == "cause"})
    yield "up", Found("node", _LEAKS, {})
    yield "process_start_time_seconds", Found("node", _LEAKS, {})


def _names(node: Node) -> set[str]:
    match node:
        case Selector(name=name):
            return {name}
        case Binary(left=left, right=right):
            return _names(left) | _names(right)
        case Call(args=args) | Aggregate(args=args):
            return set().union(*map(_names, args))
        case _:
            return set()


def _found(node: Node, known: Mapping[str, Found]) -> Found:
    match node:
        case Selector():
            return _selected(node, known)
        case Binary():
            return _joined(node, known)
        case Call(args=args) | Aggregate(args=args):
            vectors = [each for each in args if not isinstance(each, Literal)]
            return _found(vectors[-1 if isinstance(node, Aggregate) else 0], known) if vectors else _anything()
        case _:
            return _anything()


def _anything() -> Found:
    return Found("cluster", _LEAKS, {})


def _selected(node: Selector, known: Mapping[str, Found]) -> Found:
    found = known.get(node.name, Found("cluster", _LEAKS, {}))
    leaks = found.leaks
    for matcher in node.matchers:
        if matcher.label == "leak":
            said = frozenset(matcher.value.split("|"))
            leaks = leaks & said if matcher.operator in {"=", "=~"} else leaks - said
    span = seconds(node.range.strip("[] ")) if node.range else 0.0
    return found._replace(leaks=leaks, window=found.window + span)


def _joined(node: Binary, known: Mapping[str, Found]) -> Found:
    left, right = _found(node.left, known), _found(node.right, known)
    narrow, wide = sorted((left, right), key=lambda one: _WIDTH[one.scope])
    words, by_leak = {**left.words, **right.words}, left.by_leak or right.by_leak
    if node.operator == "or":
        rare, sparse = left.rare and right.rare, left.sparse and right.sparse
        return Found(wide.scope, left.leaks | right.leaks, words, rare, by_leak, sparse, max(left.window, right.window))
    if node.operator == "unless":
        return left
    if node.operator in _COMPARED:
        usual = _usual(left, node.right)
        return left._replace(rare=left.rare or not usual, sparse=left.sparse or (usual and left.by_leak))
    # A quotient a / (b > 0) is there whenever b is: that only keeps from dividing by zero.
    rare = left.rare or (node.operator == "and" and right.rare)
    sparse, window = left.sparse or right.sparse, min(left.window, right.window)
    return Found(narrow.scope, left.leaks & right.leaks, words, rare, by_leak, sparse, window)


def _usual(found: Found, bound: Node) -> bool:
    """What is compared is there as long as nothing is wrong: a leak that took something, a job that tells it."""
    return isinstance(bound, Literal) and bound.text == "0" and (found.by_leak or found.scope in _TELLING)


def _intervals() -> dict[str, float]:
    groups = [g for path in sorted(FOLDER.glob("*.yaml")) for g in yaml.safe_load(path.read_text())["groups"]]
    return {
        rule["record"]: seconds(group.get("interval", "1m"))
        for group in groups
        for rule in group["rules"]
        if "record" in rule
    }


def _row(rule: Rule, labels: frozenset[str], found: Found, interval: float) -> tuple[str, ...]:
    own = {label: count for label, count in found.words.items() if label in labels}
    # Labels of one metric bound each other: together they have as many combinations as the metric has series.
    words = max(own.values(), default=1) if len(own) <= 2 else prod(own.values())  # noqa: PLR2004
    leaks = len(found.leaks) if "leak" in labels else 0
    return (
        rule.name, f"{interval:g}", " ".join(sorted(labels)), found.scope, str(leaks), str(words),
        str(int(found.sparse)), str(int(found.rare)), f"{found.window:g}",
    )  # fmt: skip


def read() -> list[tuple[str, str]]:
    """The daemon's own series that some rule reads; with them the leaks that are asked for, if only some are."""
    found: dict[str, set[str]] = {}
    own = {metric.name for metric in METRICS}
    for rule in rules():
        for node in walk(parse(rule.expr)):
            if isinstance(node, Selector) and node.name in own:
                found.setdefault(node.name, set()).add(_leaks_asked(node))
    return [
        (name, "" if "" in asked else " ".join(sorted(set(" ".join(asked).split()))))
        for name, asked in sorted(found.items())
    ]


def _leaks_asked(node: Selector) -> str:
    """Empty: all of them."""
    said = (m.value.replace("|", " ") for m in node.matchers if m.label == "leak" and m.operator in {"=", "=~"})
    return next(said, "")


def text() -> str:
    """FILE as it has to be."""
    return _written(HEAD, rows())


def text_read() -> str:
    """READ as it has to be."""
    return _written(("metric", "leaks"), read())


def _written(head: tuple[str, ...], found: Iterable[tuple[str, ...]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *found])
    return out.getvalue()


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    READ.write_text(text_read(), encoding="utf-8")
    sys.exit(0)
