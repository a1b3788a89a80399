# ruff: noqa: INP001  a script beside the rules, not a package
"""Writes what a runbook says of its rule: the block between the marks, new runbooks' headings, and the index.

Owns that block, the index and the order of the sections; all of it derives from the rule files, the policy and the
table of leaks. Refuses the words in between: those are written by people, and are never touched.

Usage, from the root of the project (`make docs`): python -m alerts.build_runbooks
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from exporter.cli.reference import _docstrings
from exporter.core.leaks import LEAKS
from exporter.core.policy import Policy

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "runbooks"
INDEX = "README.md"
BEGIN, END = "<!-- from the rule: do not edit -->", "<!-- end -->"
SECTIONS = (
    "What it means",
    "Impact in money",
    "First three commands",
    "Look-alikes",
    "The fix",
    "How to tune",
    "False positives",
)
_PROMETHEUS_INTERVAL = "`evaluation_interval`"
"""Of a group that names none: Prometheus' own setting."""
SEVERITIES = ("page", "ticket", "info")
_THRESHOLD = re.compile(r'gpu_efficiency_threshold\{name="(\w+)"')
_SEVERITY = re.compile(r'"severity", "(\w+)"')
_TEAM = re.compile(r'\{\{ or \$labels\.team "(\w+)" \}\}')
_SENTENCE = re.compile(r"(.+?\.)(?:\s|$)", re.DOTALL)


class About(NamedTuple):
    """What a rule's text does not say: the leaks it is about, and thresholds that the daemon itself has judged by."""

    leaks: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()


ABOUT = {
    "GPUEfficiencyJobDeadlocked": About(
        ("hung",), ("hang_seconds", "hang_peer_seconds", "hang_suspect_seconds", "hang_stray_share")
    ),
    "GPUEfficiencyJobHungSuspected": About(("hung",), ("hang_suspect_seconds", "hang_seconds", "hang_peer_seconds")),
    "GPUEfficiencyGPUZombie": About(
        ("idle_allocation",),
        (
            "zombie_batch_seconds", "zombie_worked_factor", "zombie_worked_seconds", "zombie_interactive_seconds",
            "zombie_serving_seconds", "zombie_duty", "working_cpu_cores",
        ),
    ),
    "GPUEfficiencyGPUAllocatedWithoutProcess": About(("idle_allocation", "startup")),
    "GPUEfficiencyGPUUnownedProcess": About(("idle_allocation",), ("unowned_seconds",)),
    "GPUEfficiencyIdleAllocationCost": About(("idle_allocation",)),
    "GPUEfficiencyStragglerRank": About(("exposed_communication",), ("link_tensor", "link_busy")),
    "GPUEfficiencyGPULost": About(("unavailable",), ("fatal_xids",)),
    "GPUEfficiencyGPUThrottledCostly": About(("throttled",)),
    "GPUEfficiencyGPUOversized": About(
        ("oversized_allocation",), ("size_batch_seconds", "size_serving_seconds", "slice_memory_share")
    ),
    "GPUEfficiencyLowAllocationWithQueue": About(("idle_allocation",)),
}  # fmt: skip


class Alert(NamedTuple):
    """One alerting rule."""

    name: str
    file: str
    rule: dict[str, Any]
    """As in the file, with the `interval` of its group."""
    records: dict[str, str]
    """Expressions of the records of its own file that it reads, directly or not."""
    thresholds: tuple[str, ...]
    """Those that it or any record it reads compares with, whatever file that is in."""

    @property
    def severities(self) -> list[str]:
        """Whom it wakes: page, ticket or info; more than one, the worst first, where its records decide."""
        label = str(self.rule["labels"]["severity"])
        return [label] if label in SEVERITIES else _SEVERITY.findall(self.expressions)

    @property
    def expressions(self) -> str:
        """All that is evaluated for it, in PromQL."""
        named = [f"# {name}\n{expr}" for name, expr in self.records.items()]
        return "\n\n".join((*named, f"# {self.name}\n{self.rule['expr']}" if named else self.rule["expr"]))


class _AsWritten(yaml.SafeLoader):
    """Keeps the lines in which folded text was written: an expression on one line cannot be read."""


def _text(_: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    buffer = node.start_mark.buffer
    if node.style != ">" or buffer is None:
        return str(node.value)
    return dedent(buffer[node.start_mark.pointer : node.end_mark.pointer].partition("\n")[2]).strip()


_AsWritten.add_constructor("tag:yaml.org,2002:str", _text)


def alerts(folder: Path = ROOT / "alerts") -> list[Alert]:
    """Read every alerting rule of every file; raises ValueError where two have one name."""
    files = {path: _rules(path) for path in sorted(folder.glob("*.yaml"))}
    records = {name: expr for rules in files.values() for name, expr in _records(rules).items()}
    found = [alert for path, rules in files.items() for alert in _of(path, rules, records)]
    names = [alert.name for alert in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{folder}: two rules are called {twice[0]}: one runbook cannot be both's; rename one")
    return found


def _rules(path: Path) -> list[dict[str, Any]]:
    """Give each rule of a file with the `interval` of its group."""
    tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_AsWritten)  # noqa: S506  a safe loader
    return [
        {"interval": group.get("interval", _PROMETHEUS_INTERVAL)} | rule
        for group in tree["groups"]
        for rule in group["rules"]
    ]


def _records(rules: Iterable[dict[str, Any]]) -> dict[str, str]:
    return {rule["record"]: rule["expr"] for rule in rules if "record" in rule}


def _of(path: Path, rules: Sequence[dict[str, Any]], records: dict[str, str]) -> Iterator[Alert]:
    """Give the alerts of one file; `records` are those of all files."""
    own = _records(rules)
    for rule in rules:
        if "alert" in rule:
            expr = rule["expr"]
            compared = _THRESHOLD.findall("\n".join((expr, *_read(expr, records).values())))
            thresholds = tuple(dict.fromkeys(compared))
            yield Alert(rule["alert"], path.name, rule, _read(expr, own), thresholds)


def _read(expr: str, records: dict[str, str]) -> dict[str, str]:
    """Give the records that an expression reads, directly or through others, in the order of the file."""
    wanted = {name for name in records if name in expr}
    while more := {name for name in records for by in wanted if name in records[by]} - wanted:
        wanted |= more
    return {name: expr for name, expr in records.items() if name in wanted}


# -- the block --


def block(alert: Alert) -> str:
    """What the tables and the rule say, between the marks."""
    parts = [_facts(alert), f"```promql\n{alert.expressions}\n```", _thresholds(alert), _leaks(alert)]
    return "\n\n".join(("\n".join((BEGIN, parts[0])), *filter(None, parts[1:]))) + f"\n{END}"


def _facts(alert: Alert) -> str:
    rule = alert.rule
    labels = ", ".join(f"`{key}={_team(value)}`" for key, value in rule["labels"].items() if key != "severity")
    rows = (
        ("severity", " or ".join(f"**{severity}**" for severity in alert.severities)),
        ("evaluated every", rule["interval"]),
        ("for", rule.get("for", "0: at once")),
        ("keep_firing_for", rule.get("keep_firing_for", "0")),
        ("labels", labels),
        ("rule", f"[alerts/{alert.file}](../../alerts/{alert.file})"),
    )
    head = " | ".join(name for name, _ in rows)
    return f"| {head} |\n{'|---' * len(rows)}|\n| {' | '.join(value for _, value in rows)} |"


def _team(value: str) -> str:
    return _TEAM.sub(r"the job's, else \1", value)


def _thresholds(alert: Alert) -> str:
    read = dict.fromkeys(alert.thresholds, "the rule")
    judged = ABOUT.get(alert.name, About()).judged
    read |= {name: "both" if name in read else "the daemon" for name in judged}
    rows = [f"| `{name}` | {_default(name)} | {by} | {_why(name)} |" for name, by in read.items()]
    return "\n".join(("| `[policy]` | default | read by | why |", "|---|---|---|---|", *rows)) if rows else ""


def _default(name: str) -> str:
    value = getattr(Policy(), name, "-")
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if value != "-" else "-"


def _why(name: str) -> str:
    return _docstrings(Policy).get(name, "not in the policy")


def _leaks(alert: Alert) -> str:
    wanted = ABOUT.get(alert.name, About()).leaks
    rows = [f"| `{k.name}` | {k.layer} | {k.team} | {k.watch} | {k.fix} |" for k in LEAKS if k.name in wanted]
    return "\n".join(("| leak | layer | role | watch | do first |", "|---|---|---|---|---|", *rows)) if rows else ""


# -- the files --


def refreshed(text: str, alert: Alert) -> str:
    """A runbook with its block as it has to be; raises ValueError where the marks are gone."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/runbooks/{alert.name}.md: needs the lines {BEGIN} and {END}: put them below its title")
    return f"{before}{block(alert)}{after}"


def skeleton(alert: Alert) -> str:
    """A new runbook: the block and the headings, for somebody to write what belongs there."""
    return "\n\n".join((f"# {alert.name}", block(alert), *(f"## {name}" for name in SECTIONS))) + "\n"


def sections(text: str) -> dict[str, str]:
    """What a runbook says below each of its headings."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def index(found: Iterable[Alert], runbooks: dict[str, str]) -> str:
    """The table of all alerts, what wakes people first; a meaning is its runbook's first sentence."""
    ordered = sorted(found, key=lambda alert: (SEVERITIES.index(alert.severities[0]), alert.name))
    rows = (
        f"| [{a.name}]({a.name}.md) | {' or '.join(a.severities)} | {_meaning(runbooks.get(a.name, ''))} |"
        for a in ordered
    )
    return "\n".join((_HEAD, *rows)) + "\n"


def _meaning(text: str) -> str:
    found = _SENTENCE.match(sections(text).get(SECTIONS[0], ""))
    return " ".join(found[1].split()) if found else ""


_HEAD = """# Runbooks

`make docs` writes this page, and in each runbook the block between the marks, from the rules in `alerts/`. The rest of
a runbook is written by people.

Words in capitals are for you to fill in: NODE is a node's host name (in a query, and for `amtool`, the value of the
alert's label `instance` or `node`), JOB the alert's `job_id`, GPU an index on the node, PID a process, POD and NS a pod
and its namespace: the job's, but for `port-forward` and the daemon's log the daemon's pod on that node. A query can be
asked from a shell: `promtool query instant http://PROMETHEUS:9090 'QUERY'`. The daemon answers on port 19400 of each
node, `gpu-efficiency cluster` on 19401. Its unit is called `gpu-efficiency` here; yours may have another name.

`nvidia-smi`, `dcgmi`, `ps`, `dmesg`, `journalctl`, `systemctl` and `gpu-efficiency` are run on the node, and so is what
fetches from `localhost:19400`: the page and the JSON API are served there only, unless you have configured users or
certificates ([security.md](../security.md#who-can-access-what)). On Kubernetes run `kubectl -n NS port-forward POD
19400` beside it, leave out `ssh NODE`, and run `gpu-efficiency` by `kubectl -n NS exec POD -- gpu-efficiency ...`.
Where `web.config_file` configures TLS and users, it is `curl -k -u USER https://localhost:19400/...`.

- Money is in the currency of `[[prices]]`; without a price table it is in GPU-hours. (E) marks an estimate.
- Prices, thresholds, rules for jobs and exemptions are reloaded within seconds of a change of the configuration file,
  or on SIGHUP; other settings need a restart of the daemon ([reload](../operations.md#reload)).
- `[[exemptions]]` cover GPUEfficiencyGPUZombie, GPUEfficiencyGPUAllocatedWithoutProcess, GPUEfficiencyGPUOversized and
  the budget of GPUEfficiencyIdleAllocationCost, until their date. Nothing else: for the rest there are thresholds, and
  silences with an end (`amtool silence add`; tell it `--alertmanager.url` unless its configuration file has that).
- What looks wrong: `gpu-efficiency record FILE --duration 600` on the node while it lasts, and report it with that
  file. It holds names of users and jobs.

| alert | severity | what it means |
|---|---|---|"""


def main() -> int:
    """Refresh every block, begin missing runbooks, write the index; say what has no rule."""
    found = alerts()
    FOLDER.mkdir(exist_ok=True)
    for alert in found:
        path = FOLDER / f"{alert.name}.md"
        text = refreshed(path.read_text(encoding="utf-8"), alert) if path.exists() else skeleton(alert)
        path.write_text(text, encoding="utf-8")
    there = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md") if path.name != INDEX}
    (FOLDER / INDEX).write_text(index(found, there), encoding="utf-8")
    for name in sorted(there.keys() - {alert.name for alert in found}):
        sys.stderr.write(f"docs/runbooks/{name}.md: no rule is called so: rename the rule, or remove the runbook\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
