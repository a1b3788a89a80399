"""What promtool cannot know of a rule: that its metrics, labels and words exist, and that clusters are kept apart.

Owns the checks and the labels an expression's result has. Refuses values: the tests beside the rules have those.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from exporter.cluster import metrics as cluster
from exporter.core import metrics
from exporter.core.leaks import LAYERS, LEAK_NAMES
from exporter.core.model import State
from tests.alerts.packs import groups_of
from tests.alerts.promql import SET_OPERATORS, Aggregate, Binary, Call, Literal, Node, Selector, parse, walk

FOLDER = Path(__file__).parents[2] / "alerts"
SCRAPED = frozenset({"cluster", "instance", "job"})
"""Labels a scrape or a federation adds."""
_OF_COUNTERS = frozenset({"rate", "irate", "increase", "resets"})
_OF_GAUGES = frozenset({"delta", "idelta", "deriv", "predict_linear", "holt_winters"})
_SCALARS = frozenset({"time", "scalar", "pi"})
_WORDS: Mapping[str, frozenset[str]] = {
    "leak": frozenset(LEAK_NAMES),
    "layer": frozenset(LAYERS),
    "held": frozenset({"true", "false"}),
}
_STATES = frozenset(state.value for state in State)
_LEVELS: Mapping[str, frozenset[str]] = {
    "cluster": frozenset({"cluster"}),
    "node": frozenset({"instance", "node"}),
    "job": frozenset({"job_id"}),
    "namespace": frozenset({"workload_namespace"}),
    "owner": frozenset({"account", "team", "workload_namespace"}),
    "class": frozenset({"workload_class"}),
} | {each: frozenset({each}) for each in ("model", "leak", "layer", "state", "rank", "user", "account", "team", "cause",
                                          "phase", "reason", "spread")}  # fmt: skip
"""What a word of a record's level says of its labels: it has one of these."""
_OWN = frozenset(
    {"instance", "job_id", "model", "leak", "rank", "user", "account", "team", "cause", "workload_namespace"}
) | {"workload_class"}
"""Labels that make another level, unless the level names them; the rest are attributes, such as a currency."""
_OWNER = frozenset({"user", "team"})
"""A job has one of each: of it they are attributes, too."""
_MENTIONED = re.compile(r"(?<![\w:/-])(?:[a-z_]+:)?gpu_efficiency_\w+(?::\w+)?")

Labels = frozenset[str] | None
"""None: any, for nothing can be said of them."""


class Series(NamedTuple):
    """What may be named in a rule. The type of a recorded one is gauge."""

    labels: Labels
    type: str = "gauge"


Known = Mapping[str, Series]


class Rule(NamedTuple):
    """One rule of a file."""

    file: str
    name: str
    expr: str
    record: bool
    text: str
    """All that is said to people: its annotations."""
    labels: frozenset[str] = frozenset()
    """Those the rule itself adds."""


def rules(folder: Path = FOLDER) -> list[Rule]:
    """Read every rule of every file."""
    return [
        _rule(path.name, rule)
        for path in sorted(folder.glob("*.yaml"))
        for group in groups_of(path)
        for rule in group["rules"]
    ]


def _rule(file: str, rule: Mapping[str, Any]) -> Rule:
    said = "\n".join(map(str, rule.get("annotations", {}).values()))
    name = rule.get("record") or rule["alert"]
    return Rule(file, name, rule["expr"], "record" in rule, said, frozenset(rule.get("labels", {})))


def known_to(found: list[Rule]) -> dict[str, Series]:
    """Every series a rule may name: the daemon's, the cluster's, Prometheus' own, and what the rules record."""
    rows = chain(metrics.METRICS, cluster.METRICS)
    known = {row.name: Series(SCRAPED | set(row.labels), row.type) for row in rows}
    # Of every target, and of every program with a Prometheus client library.
    known |= {"up": Series(SCRAPED), "process_start_time_seconds": Series(SCRAPED), "ALERTS": Series(None)}
    waiting = {rule.name: rule for rule in found if rule.record}
    while ready := [r for r in waiting.values() if not waiting.keys() & (set(_names(parse(r.expr))) - {r.name})]:
        for rule in ready:
            itself = {rule.name: Series(frozenset())}  # what hands on its own last value adds no labels to it
            known[rule.name] = Series(_with(labels_of(parse(rule.expr), known | itself), rule.labels))
            del waiting[rule.name]
    return known | {name: Series(None) for name in waiting}


def _names(node: Node) -> Iterator[str]:
    return (each.name for each in walk(node) if isinstance(each, Selector))


def _with(labels: Labels, more: frozenset[str]) -> Labels:
    return None if labels is None else labels | more


# -- labels of a result --


def labels_of(node: Node, known: Known) -> Labels:
    """Labels the result can have (Prometheus, "Operators": vector matching, aggregation)."""
    match node:
        case Selector(name=name):
            return known[name].labels if name in known else None
        case Aggregate():
            return _aggregated(node, known)
        case Binary():
            return _joined(node, known)
        case Call():
            return _called(node, known)
        case Literal():
            return frozenset()


def _called(node: Call, known: Known) -> Labels:
    match node:
        case Call(name="label_replace", args=(inner, Literal(text=word), *_)):
            return _with(labels_of(inner, known), frozenset({word[1:-1]}))
        case Call(name="absent" | "absent_over_time", args=(Selector(matchers=matchers),)):
            return frozenset(each.label for each in matchers if each.operator == "=")
        case _:
            vectors = (each for each in node.args if not isinstance(each, Literal))
            return next((labels_of(each, known) for each in vectors), frozenset())


def _aggregated(node: Aggregate, known: Known) -> Labels:
    inner = labels_of(node.args[-1], known)
    if node.operator in {"topk", "bottomk"}:
        return inner
    if node.clause == "without":
        return None if inner is None else inner - set(node.labels) | _counted(node)
    return frozenset(node.labels) | _counted(node)


def _counted(node: Aggregate) -> frozenset[str]:
    """count_values makes a label of each value."""
    first = node.args[0]
    if node.operator == "count_values" and isinstance(first, Literal):
        return frozenset({first.text[1:-1]})
    return frozenset()


def _joined(node: Binary, known: Known) -> Labels:
    left, right = labels_of(node.left, known), labels_of(node.right, known)
    if _scalar(node.left) or _scalar(node.right):
        return right if _scalar(node.left) else left
    if node.operator in SET_OPERATORS:
        return left if node.operator != "or" or left is None or right is None else left | right
    if node.group:
        return _with(left if node.group == "left" else right, frozenset(node.include))
    if node.match == "on":
        return frozenset(node.labels)
    return None if left is None else left - set(node.labels)


def _scalar(node: Node) -> bool:
    match node:
        case Literal():
            return True
        case Call(name="neg", args=(inner,)):
            return _scalar(inner)
        case Call(name=name):
            return name in _SCALARS
        case Binary(left=left, right=right):
            return _scalar(left) and _scalar(right)
        case _:
            return False


# -- faults --


def faults(rule: Rule, known: Known) -> list[str]:
    """Say all that is wrong with a rule."""
    tree = parse(rule.expr)
    found = [fault for node in walk(tree) for fault in _CHECKS.get(type(node), _nothing)(node, known)]
    labels = labels_of(tree, known)
    if labels is not None and "cluster" not in labels:
        found.append("its result has lost the label cluster")
    if rule.record:
        found += _level(rule.name, _with(labels, rule.labels))
    found += [f"its annotations name {name}, which nobody exports" for name in _unknown(rule.text, known)]
    return found


def faults_of_query(expr: str, known: Known) -> list[str]:
    """What is wrong with a dashboard's query, which may sum over the clusters that were chosen."""
    found = (fault for node in walk(parse(expr)) for fault in _CHECKS.get(type(node), _nothing)(node, known))
    return [fault for fault in found if not fault.endswith("mixes clusters")]


def _nothing(_: Any, __: Known) -> Iterator[str]:
    return iter(())


def _unknown(text: str, known: Known) -> list[str]:
    return sorted(name for name in set(_MENTIONED.findall(text)) if name not in known)


def _of_selector(node: Selector, known: Known) -> Iterator[str]:
    if node.name not in known:
        yield f"{node.name or 'a selector without a name'}: nobody exports it"
        return
    labels = known[node.name].labels
    for matcher in node.matchers:
        if labels is not None and matcher.label not in labels:
            yield f"{node.name} has no label {matcher.label}"
        words = _WORDS.get(matcher.label, _STATES if _is_state(node.name, matcher.label) else None)
        for word in matcher.value.split("|") if words and re.fullmatch(r"[\w|]+", matcher.value) else ():
            if word not in (words or ()):
                yield f"{matcher.label} is never {word}"


def _is_state(name: str, label: str) -> bool:
    """The scheduler has states of nodes, and servers of requests, which are other words."""
    return label == "state" and not name.startswith("gpu_efficiency_cluster_") and not name.endswith("_requests")


def _of_call(node: Call, known: Known) -> Iterator[str]:
    for inner in node.args:
        if not isinstance(inner, Selector) or inner.name not in known:
            continue
        counter = known[inner.name].type == "counter"
        if (node.name in _OF_COUNTERS and not counter) or (node.name in _OF_GAUGES and counter):
            yield f"{node.name} of {inner.name}, which is {'a counter' if counter else 'no counter'}"


def _of_aggregate(node: Aggregate, known: Known) -> Iterator[str]:
    if node.clause != ("by" if "cluster" in node.labels else "without"):
        yield f"{node.operator} {node.clause} ({', '.join(node.labels)}) mixes clusters"
    yield from _absent(node.labels, labels_of(node.args[-1], known), f"what {node.operator} is of")


def _of_binary(node: Binary, known: Known) -> Iterator[str]:
    if _scalar(node.left) or _scalar(node.right):
        return
    left, right = labels_of(node.left, known), labels_of(node.right, known)
    if not node.match:
        if node.operator != "or" and None not in {left, right} and left != right:
            yield f"{node.operator} never matches: {_listed(left)} against {_listed(right)}"
        return
    if ("cluster" in node.labels) != (node.match == "on"):
        yield f"{node.operator} {node.match} ({', '.join(node.labels)}) mixes clusters"
    if node.match == "on":
        yield from _absent(node.labels, left, f"what is left of {node.operator}")
        yield from _absent(node.labels, right, f"what is right of {node.operator}")
    yield from _absent(
        node.include, right if node.group == "left" else left, "what group_left or group_right takes from"
    )


def _absent(wanted: tuple[str, ...], labels: Labels, what: str) -> Iterator[str]:
    return (f"{what} has no label {label}" for label in wanted if labels is not None and label not in labels)


def _listed(labels: Labels) -> str:
    return ", ".join(sorted(labels or ()))


_CHECKS: Mapping[type, Callable[[Any, Known], Iterator[str]]] = {
    Selector: _of_selector,
    Call: _of_call,
    Aggregate: _of_aggregate,
    Binary: _of_binary,
}


def _level(name: str, labels: Labels) -> list[str]:
    """A record is level:metric or level:metric:operation, and the level tells its labels."""
    level, *rest = name.split(":")
    if len(rest) not in {1, 2}:
        return ["a record is named level:metric:operation"]
    found = [f"{word} is no level" for word in level.split("_") if word not in _LEVELS]
    if found or labels is None:
        return found
    said = [_LEVELS[word] for word in level.split("_")]
    found += [f"its level says {'/'.join(sorted(one))}, it has {_listed(labels)}" for one in said if not one & labels]
    if not name.endswith("_info"):
        of_job = _OWNER if "job_id" in labels else frozenset()
        more = sorted((labels & _OWN) - of_job.union(*said))
        found += [f"it has the label {label}, of which its level says nothing" for label in more]
    return found
