"""Assigns each job its workload class, team, time limits and exemption, from the operator's and the built-in rules.

The operator's rules come first. Rules read only an `Owner`'s fields, a command line and labels, never a scheduler.
Users control the matched values, so only their first LONGEST characters are matched.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, structs

from exporter.config import EXEMPTED, MATCHED, Exemption, WorkloadRule, WorkloadSettings, check_exemptions, check_rules
from exporter.core.model import Owner

LONGEST = 4096
"""Matched characters of a value. Labels and names are shorter; command lines may be longer."""
_CACHED_RESULTS = 256
"""Size of the cache of results; a node has far fewer kinds of jobs at a time."""

_SET_BY_RULES = ("workload_class", "team", "useful_pipe", "zombie_seconds", "hang_seconds")
_NOTEBOOK = r"jupyter|ipykernel|code-server|vscode|rstudio|rsession"
_INTERACTIVE_QUEUES = r"(?i)(?:.*[-_.])?(?:interactive|debug|dev|devel|jupyter|notebooks?|ondemand|ood)(?:[-_.\d].*)?"
_SERVERS = (
    r"(?:^|[\s/])(?:vllm serve|vllm\.entrypoints|VLLM::|sglang\.launch_server|sglang serve|sglang::|ray::ServeReplica"
    r"|dynamo(?:\.\w+|[ -](?:run|serve))|ollama (?:serve|runner)|lmdeploy serve|bentoml serve"
    r"|(?:tritonserver|text-generation-(?:launcher|server)|text-embeddings-router|trtllm-serve|llama-server"
    r"|tensorflow_model_server|torchserve|mlserver)(?=\s|$))"
)
_SERVICES = (
    r"deployment|replicaset|statefulset|daemonset|inferenceservice|ksvc|knativeservice|service|revision"
    r"|leaderworkerset|rayservice|seldondeployment|nimservice|dynamographdeployment|llminferenceservice"
)
_SERVING_QUEUES = r"(?i)(?:.*[-_.])?(?:serving|serve|inference|infer)(?:[-_.\d].*)?"

DEFAULTS = (
    # From the strongest evidence to the weakest: what the user requested, what runs, its controller, its queue.
    # A terminal, a notebook or a login session was requested: whatever runs in it, a person is at work.
    WorkloadRule(workload_class="interactive", kind="interactive|notebook|session"),
    # A notebook or an editor waits for a person, even as a Deployment or a batch job.
    WorkloadRule(workload_class="interactive", command=_NOTEBOOK),
    # Names given by JupyterHub, by systemd units of such servers, and by Open OnDemand's apps.
    WorkloadRule(workload_class="interactive", name=rf"(?i).*(?:{_NOTEBOOK}).*|sys/dashboard/.*"),
    # An inference server waits for requests, even as a batch job.
    WorkloadRule(workload_class="serving", command=_SERVERS),
    # Controllers that run without end: on real clusters nearly all of these serve.
    WorkloadRule(workload_class="serving", kind=_SERVICES),
    # The site keeps this partition, or this QoS, for interactive work or for servers.
    WorkloadRule(workload_class="interactive", partition=_INTERACTIVE_QUEUES),
    WorkloadRule(workload_class="interactive", qos=_INTERACTIVE_QUEUES),
    WorkloadRule(workload_class="serving", partition=_SERVING_QUEUES),
    WorkloadRule(workload_class="serving", qos=_SERVING_QUEUES),
)
"""Built-in rules. They apply where no operator's rule sets a class; the default is batch."""


class _CompiledRule(Struct, frozen=True):
    """A rule with compiled patterns: by index into the owner's values, for the command, and for one label."""

    patterns: tuple[tuple[int, re.Pattern[str]], ...]
    command: re.Pattern[str] | None
    label: tuple[str, re.Pattern[str]] | None
    rule: WorkloadRule

    def matches(self, values: tuple[str, ...], command: str, labels: Mapping[str, str]) -> bool:
        if self.command is not None and not self.command.search(command):
            return False
        if self.label is not None:
            key, pattern = self.label
            if key not in labels or not pattern.fullmatch(labels[key]):  # absent: matches nothing, not even `.*`
                return False
        return all(pattern.fullmatch(values[place]) for place, pattern in self.patterns)


class Rules:
    """The configured and built-in rules, compiled. Raises ConfigError for a rule that cannot be used."""

    def __init__(self, workload: WorkloadSettings | None = None, exemptions: Iterable[Exemption] = ()) -> None:
        workload = workload or WorkloadSettings()
        check_rules(workload.rules)
        exemptions = tuple(exemptions)
        check_exemptions(exemptions)
        self._exemptions = tuple(_compile_exemption(exemption) for exemption in exemptions)
        defaults = DEFAULTS if workload.defaults else ()
        self._rows = tuple(_compile_rule(rule) for rule in (*workload.rules, *defaults))
        self._keys = tuple({row.label[0] for row in self._rows if row.label is not None})
        self._changes = lru_cache(maxsize=_CACHED_RESULTS)(self._find_changes)

    def apply(self, owner: Owner, *, command: str = "", labels: Mapping[str, str] | None = None) -> Owner:
        """Return the owner with class, team and limits, each taken from the first matching rule that sets it.

        Fields that no rule sets keep their value. `command` is a process's command line, `labels` are the pod's. Of
        several matching exemptions the one that expires last applies.
        """
        owner = self._with_exemption(owner) if self._exemptions else owner
        values = tuple(getattr(owner, field)[:LONGEST] for field in MATCHED)
        label_items = tuple((key, labels[key][:LONGEST]) for key in self._keys if key in labels) if labels else ()
        return structs.replace(owner, **self._changes(values, command[:LONGEST], label_items))

    def _with_exemption(self, owner: Owner) -> Owner:
        matching = [
            (until, name)
            for patterns, name, until in self._exemptions
            if all(pattern.fullmatch(getattr(owner, field)[:LONGEST]) for field, pattern in patterns)
        ]
        until, name = max(matching, default=(0.0, ""))
        return structs.replace(owner, exemption=name, exempt_until=until)

    def _find_changes(
        self, values: tuple[str, ...], command: str, label_items: tuple[tuple[str, str], ...]
    ) -> dict[str, Any]:
        """Return the owner's fields that rules set, each as the first matching rule has it."""
        labels = dict(label_items)
        changes: dict[str, Any] = {}
        for row in self._rows:
            if row.matches(values, command, labels):
                given = {field: getattr(row.rule, field) for field in _SET_BY_RULES}
                changes = {field: value for field, value in given.items() if value not in ("", None)} | changes
        return changes


def _compile_rule(rule: WorkloadRule) -> _CompiledRule:
    key, _, pattern = rule.label.partition("=")
    return _CompiledRule(
        patterns=tuple((i, re.compile(p, re.DOTALL)) for i, p in enumerate(getattr(rule, w) for w in MATCHED) if p),
        command=re.compile(rule.command) if rule.command else None,
        label=(key, re.compile(pattern)) if key else None,
        rule=rule,
    )


def _compile_exemption(exemption: Exemption) -> tuple[tuple[tuple[str, re.Pattern[str]], ...], str, float]:
    """Return its compiled patterns by owner field, its name, and its expiry (Unix seconds)."""
    given = ((field, getattr(exemption, field)) for field in EXEMPTED)
    return tuple((field, re.compile(p, re.DOTALL)) for field, p in given if p), exemption.id, exemption.expiry
