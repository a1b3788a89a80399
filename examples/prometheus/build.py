# ruff: noqa: INP001  a script beside what it writes, not a package
"""Writes relabel-*.yaml here, and in docs/prometheus.md the table of what each profile leaves.

Owns these files and the block between the marks; all of it derives from `gpu-efficiency cardinality`, the rules and the
boards. Refuses the words around it.

Usage, from the root of the project (`make docs`): python -m examples.prometheus.build
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from dashboards.build import boards
from exporter.cardinality import PROFILES, FleetSize, kept_share, read_by_rules
from exporter.cli.cardinality import estimate, relabel_text
from exporter.core.leaks import LEAK_NAMES
from exporter.core.metrics import METRICS
from tests.alerts.lint import rules
from tests.alerts.promql import Selector, parse, walk

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "prometheus.md"
BEGIN, END = "<!-- from the rules and the boards: do not edit -->", "<!-- end -->"
_GRAFANA = re.compile(r"\$\{?__(?:range|rate_interval|interval)\}?")
NODE = FleetSize(gpus=8, jobs=2, reporting=1, serving=1)
"""What the table counts: a node with a training that reports and a server."""


def lost(expr: str, profile: str, gone: frozenset[str] = frozenset()) -> bool:
    """Whether an expression asks for what the profile drops, or for a record that is gone with it."""
    return any(node.name in gone or _dropped(node, profile) for node in _selectors(expr))


@cache
def _selectors(expr: str) -> tuple[Selector, ...]:
    return tuple(node for node in walk(parse(_GRAFANA.sub("5m", expr))) if isinstance(node, Selector))


def _dropped(node: Selector, profile: str) -> bool:
    if node.name not in _LABELS:
        return False
    share = kept_share(node.name, profile)
    if "uuid" in _LABELS[node.name] and profile in {"jobs", "nodes"}:
        return True
    return share == 0 or (share < 1 and not _leaks(node) <= read_by_rules()[node.name])


_LABELS = {metric.name: metric.labels for metric in METRICS}


def _leaks(node: Selector) -> frozenset[str]:
    """Leaks that are asked for; those of another form of question are all."""
    said = [m.value.split("|") for m in node.matchers if m.label == "leak" and m.operator in {"=", "=~"}]
    return frozenset(said[0]) if said and frozenset(said[0]) <= frozenset(LEAK_NAMES) else frozenset(LEAK_NAMES)


@cache
def rules_lost(profile: str) -> tuple[frozenset[str], frozenset[str]]:
    """Records and alerts that have no sample, or fewer, once a profile is used: those they rest on, too."""
    gone: frozenset[str] = frozenset()
    every = rules()
    while True:
        more = frozenset(rule.name for rule in every if rule.record and lost(rule.expr, profile, gone))
        if more == gone:
            break
        gone = more
    return gone, frozenset(rule.name for rule in every if not rule.record and lost(rule.expr, profile, gone))


@cache
def panels_lost(profile: str) -> Mapping[str, tuple[int, int]]:
    """Title of each board -> its panels of which a query asks for what is gone, and all of its panels."""
    gone, _ = rules_lost(profile)
    found = {board.title: list(board.panels()) for board in boards()}
    return {
        title: (sum(any(lost(query.expr, profile, gone) for query in panel.queries) for panel in panels), len(panels))
        for title, panels in found.items()
    }


def block() -> str:
    """What stands between the marks."""
    lines = (line for name in PROFILES if name != "full" for line in _lost(name))
    return "\n".join((BEGIN, *_summary(), "", *lines, END))


def _summary() -> Iterator[str]:
    node = "a node with 8 GPUs, a job that reports and a server"
    yield f"| profile | keeps | series of {node} | rules that record | alerts | panels that lack nothing |"
    yield "|---|---|---|---|---|---|"
    every = rules()
    records, alerts = (sum(rule.record is kind for rule in every) for kind in (True, False))
    panels = sum(len(list(board.panels())) for board in boards())
    for name, about in PROFILES.items():
        gone, silent = rules_lost(name)
        empty = sum(some for some, _ in panels_lost(name).values())
        yield (
            f"| `{name}` | {about} | {estimate(NODE, profile=name).scraped:,} | {records - len(gone)} of {records} | "
            f"{alerts - len(silent)} of {alerts} | {panels - empty} of {panels} |"
        )


def _lost(profile: str) -> Iterator[str]:
    _, silent = rules_lost(profile)
    named = ", ".join(f"*{title}* ({some} of {every})" for title, (some, every) in panels_lost(profile).items() if some)
    yield f"- `{profile}` takes from these boards panels, or parts of them: {named or 'none'}."
    if silent:
        yield f"  Alerts that are silent or poorer then: {', '.join(f'`{name}`' for name in sorted(silent))}."


def refreshed(text: str) -> str:
    """The page with its block as it has to be; raises ValueError where the marks are gone."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: needs the lines {BEGIN} and {END}")
    return f"{before}{block()}{after}"


if __name__ == "__main__":
    for each in PROFILES:
        if each != "full":
            (HERE / f"relabel-{each}.yaml").write_text(relabel_text(each), encoding="utf-8")
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
