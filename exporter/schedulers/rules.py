"""What kind of work a job is, which team pays, how long it may rest, who is exempt: the operator's rules, then ours.

Owns the order of rules and the built-in table of classes. Refuses to know schedulers: it sees an `Owner`'s words, a
command line and labels. The expressions are the operator's, the values are users': only the beginning of a value
is looked at.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from msgspec import Struct, structs

from exporter.config import EXEMPTED, MATCHED, Exemption, Workload, WorkloadRule, check_exemptions, check_rules
from exporter.core.model import Owner

LONGEST = 4096
"""Characters of a value that are looked at: no label or name is longer, a command line may be."""
_JUDGED_BEFORE = 256
"""Verdicts kept; a node has far fewer kinds of jobs at a time."""

_NOTEBOOK = r"jupyter|ipykernel|code-server|vscode|rstudio|rsession"
_PEOPLE = r"(?i)(?:.*[-_.])?(?:interactive|debug|dev|devel|jupyter|notebooks?|ondemand|ood)(?:[-_.\d].*)?"
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
_ONLINE = r"(?i)(?:.*[-_.])?(?:serving|serve|inference|infer)(?:[-_.\d].*)?"

DEFAULTS: tuple[tuple[WorkloadRule, str], ...] = (
    # From the surest sign to the weakest: what the user asked for, then what runs, then what wraps it, then where.
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
    (WorkloadRule(workload_class="interactive", partition=_PEOPLE), "the site keeps this partition for people at work"),
    (WorkloadRule(workload_class="interactive", qos=_PEOPLE), "the same, said by QoS"),
    (WorkloadRule(workload_class="serving", partition=_ONLINE), "the site keeps this partition for servers"),
    (WorkloadRule(workload_class="serving", qos=_ONLINE), "the same, said by QoS"),
)
"""The class where no rule of the operator's gives one, each row with its reason; what fits none is batch."""


class _Verdict(Struct, frozen=True):
    workload_class: str = ""
    team: str = ""
    zombie_seconds: float | None = None
    hang_seconds: float | None = None


class _Row(Struct, frozen=True):
    """A rule made ready: patterns by place in the owner's words, one for the command, one for a label."""

    words: tuple[tuple[int, re.Pattern[str]], ...]
    command: re.Pattern[str] | None
    label: tuple[str, re.Pattern[str]] | None
    verdict: _Verdict

    def fits(self, words: tuple[str, ...], command: str, labels: Mapping[str, str]) -> bool:
        if self.command is not None and not self.command.search(command):
            return False
        if self.label is not None:
            key, pattern = self.label
            if key not in labels or not pattern.fullmatch(labels[key]):  # absent fits nothing, not even `.*`
                return False
        return all(pattern.fullmatch(words[place]) for place, pattern in self.words)


class Rules:
    """Judges owners; raises ConfigError, where a rule cannot be used."""

    def __init__(self, workload: Workload | None = None, exemptions: Iterable[Exemption] = ()) -> None:
        workload = workload or Workload()
        check_rules(workload.rules)
        exemptions = tuple(exemptions)
        check_exemptions(exemptions)
        self._exemptions = tuple(_exemption(exemption) for exemption in exemptions)
        defaults = tuple(rule for rule, _ in DEFAULTS) if workload.defaults else ()
        self._rows = tuple(_row(rule) for rule in (*workload.rules, *defaults))
        self._keys = tuple({row.label[0] for row in self._rows if row.label is not None})
        self._verdict = lru_cache(maxsize=_JUDGED_BEFORE)(self._decide)

    def judge(self, owner: Owner, *, command: str = "", labels: Mapping[str, str] | None = None) -> Owner:
        """The owner with its class, team and limits; each from the first rule that fits and gives it.

        What no rule gives stays as it was. `command` is a process's command line, `labels` are the pod's. Of the
        exemptions that fit, the one that lasts longest counts.
        """
        owner = self._exempted(owner) if self._exemptions else owner
        words = tuple(getattr(owner, word)[:LONGEST] for word in MATCHED)
        said = tuple((key, labels[key][:LONGEST]) for key in self._keys if key in labels) if labels else ()
        verdict = self._verdict(words, command[:LONGEST], said)
        return structs.replace(
            owner,
            workload_class=verdict.workload_class or owner.workload_class,
            team=verdict.team or owner.team,
            zombie_seconds=owner.zombie_seconds if verdict.zombie_seconds is None else verdict.zombie_seconds,
            hang_seconds=owner.hang_seconds if verdict.hang_seconds is None else verdict.hang_seconds,
        )

    def _exempted(self, owner: Owner) -> Owner:
        fitting = [
            (until, name)
            for words, name, until in self._exemptions
            if all(pattern.fullmatch(getattr(owner, word)[:LONGEST]) for word, pattern in words)
        ]
        until, name = max(fitting, default=(0.0, ""))
        return structs.replace(owner, exemption=name, exempt_until=until)

    def _decide(self, words: tuple[str, ...], command: str, said: tuple[tuple[str, str], ...]) -> _Verdict:
        labels = dict(said)
        fitting = [row.verdict for row in self._rows if row.fits(words, command, labels)]
        return _Verdict(
            next((v.workload_class for v in fitting if v.workload_class), ""),
            next((v.team for v in fitting if v.team), ""),
            next((v.zombie_seconds for v in fitting if v.zombie_seconds is not None), None),
            next((v.hang_seconds for v in fitting if v.hang_seconds is not None), None),
        )


def _row(rule: WorkloadRule) -> _Row:
    key, _, pattern = rule.label.partition("=")
    return _Row(
        words=tuple((i, re.compile(p, re.DOTALL)) for i, p in enumerate(getattr(rule, w) for w in MATCHED) if p),
        command=re.compile(rule.command) if rule.command else None,
        label=(key, re.compile(pattern)) if key else None,
        verdict=_Verdict(rule.workload_class, rule.team, rule.zombie_seconds, rule.hang_seconds),
    )


def _exemption(exemption: Exemption) -> tuple[tuple[tuple[str, re.Pattern[str]], ...], str, float]:
    """Its patterns by the owner's words, its name, and when it ends."""
    given = ((word, getattr(exemption, word)) for word in EXEMPTED)
    return tuple((word, re.compile(p, re.DOTALL)) for word, p in given if p), exemption.id, exemption.expiry
