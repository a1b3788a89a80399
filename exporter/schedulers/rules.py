"""Assigns each job its workload class, team, time limits and exemption, from the operator's and the built-in rules.

The operator's rules come first. Rules read only an `Owner`'s fields, a command line and labels, never a scheduler.
Users control the matched values, so only their first LONGEST characters are matched.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from msgspec import Struct, structs

from exporter.config import EXEMPTED, MATCHED, Exemption, WorkloadRule, WorkloadSettings, check_exemptions, check_rules
from exporter.core.model import Owner

LONGEST = 4096
"""Matched characters of a value. Labels and names are shorter; command lines may be longer."""
_CACHED_VERDICTS = 256
"""Size of the cache of results; a node has far fewer kinds of jobs at a time."""

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

DEFAULTS: tuple[tuple[WorkloadRule, str], ...] = (
    # From the strongest evidence to the weakest: what the user requested, what runs, its controller, its queue.
    (
        WorkloadRule(workload_class="interactive", kind="interactive|notebook|session"),
        "a terminal, a notebook or a login session was asked for: whatever runs in it, a person is at work",
    ),
    (
        WorkloadRule(workload_class="interactive", command=_NOTEBOOK),
        "a notebook or an editor, even as a Deployment or a batch job: it waits for a person",
    ),
    (
        WorkloadRule(workload_class="interactive", name=rf"(?i).*(?:{_NOTEBOOK}).*|sys/dashboard/.*"),
        "named so by JupyterHub, by systemd units of such servers, and by Open OnDemand's apps",
    ),
    (
        WorkloadRule(workload_class="serving", command=_SERVERS),
        "an inference server, even as a batch job: it waits for requests",
    ),
    (
        WorkloadRule(workload_class="serving", kind=_SERVICES),
        "made to run until somebody takes it away: on real clusters nearly all of these serve",
    ),
    (
        WorkloadRule(workload_class="interactive", partition=_INTERACTIVE_QUEUES),
        "the site keeps this partition for people at work",
    ),
    (WorkloadRule(workload_class="interactive", qos=_INTERACTIVE_QUEUES), "the same, by QoS"),
    (WorkloadRule(workload_class="serving", partition=_SERVING_QUEUES), "the site keeps this partition for servers"),
    (WorkloadRule(workload_class="serving", qos=_SERVING_QUEUES), "the same, by QoS"),
)
"""Built-in rules, each with its reason. They apply where no operator's rule sets a class; the default is batch."""


class _Verdict(Struct, frozen=True):
    workload_class: str = ""
    team: str = ""
    zombie_seconds: float | None = None
    hang_seconds: float | None = None


class _CompiledRule(Struct, frozen=True):
    """A rule with compiled patterns: by index into the owner's values, for the command, and for one label."""

    patterns: tuple[tuple[int, re.Pattern[str]], ...]
    command: re.Pattern[str] | None
    label: tuple[str, re.Pattern[str]] | None
    verdict: _Verdict

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
        defaults = tuple(rule for rule, _ in DEFAULTS) if workload.defaults else ()
        self._rows = tuple(_compile_rule(rule) for rule in (*workload.rules, *defaults))
        self._keys = tuple({row.label[0] for row in self._rows if row.label is not None})
        self._verdict = lru_cache(maxsize=_CACHED_VERDICTS)(self._decide)

    def apply(self, owner: Owner, *, command: str = "", labels: Mapping[str, str] | None = None) -> Owner:
        """Return the owner with class, team and limits, each taken from the first matching rule that sets it.

        Fields that no rule sets keep their value. `command` is a process's command line, `labels` are the pod's. Of
        several matching exemptions the one that expires last applies.
        """
        owner = self._with_exemption(owner) if self._exemptions else owner
        values = tuple(getattr(owner, field)[:LONGEST] for field in MATCHED)
        label_items = tuple((key, labels[key][:LONGEST]) for key in self._keys if key in labels) if labels else ()
        verdict = self._verdict(values, command[:LONGEST], label_items)
        return structs.replace(
            owner,
            workload_class=verdict.workload_class or owner.workload_class,
            team=verdict.team or owner.team,
            zombie_seconds=owner.zombie_seconds if verdict.zombie_seconds is None else verdict.zombie_seconds,
            hang_seconds=owner.hang_seconds if verdict.hang_seconds is None else verdict.hang_seconds,
        )

    def _with_exemption(self, owner: Owner) -> Owner:
        matching = [
            (until, name)
            for patterns, name, until in self._exemptions
            if all(pattern.fullmatch(getattr(owner, field)[:LONGEST]) for field, pattern in patterns)
        ]
        until, name = max(matching, default=(0.0, ""))
        return structs.replace(owner, exemption=name, exempt_until=until)

    def _decide(self, values: tuple[str, ...], command: str, label_items: tuple[tuple[str, str], ...]) -> _Verdict:
        labels = dict(label_items)
        matching = [row.verdict for row in self._rows if row.matches(values, command, labels)]
        return _Verdict(
            next((v.workload_class for v in matching if v.workload_class), ""),
            next((v.team for v in matching if v.team), ""),
            next((v.zombie_seconds for v in matching if v.zombie_seconds is not None), None),
            next((v.hang_seconds for v in matching if v.hang_seconds is not None), None),
        )


def _compile_rule(rule: WorkloadRule) -> _CompiledRule:
    key, _, pattern = rule.label.partition("=")
    return _CompiledRule(
        patterns=tuple((i, re.compile(p, re.DOTALL)) for i, p in enumerate(getattr(rule, w) for w in MATCHED) if p),
        command=re.compile(rule.command) if rule.command else None,
        label=(key, re.compile(pattern)) if key else None,
        verdict=_Verdict(rule.workload_class, rule.team, rule.zombie_seconds, rule.hang_seconds),
    )


def _compile_exemption(exemption: Exemption) -> tuple[tuple[tuple[str, re.Pattern[str]], ...], str, float]:
    """Return its compiled patterns by owner field, its name, and its expiry (Unix seconds)."""
    given = ((field, getattr(exemption, field)) for field in EXEMPTED)
    return tuple((field, re.compile(p, re.DOTALL)) for field, p in given if p), exemption.id, exemption.expiry
