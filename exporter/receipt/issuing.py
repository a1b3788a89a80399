"""A receipt, made of what a Prometheus has stored. Owns the order of the questions, and words for what it lacks."""

from collections import Counter
from collections.abc import Iterator

from exporter.receipt.asking import Asking, ReceiptError
from exporter.receipt.books import Books
from exporter.receipt.counting import counted
from exporter.receipt.facts import Facts
from exporter.receipt.figures import weighed
from exporter.receipt.life import DAY, find
from exporter.receipt.model import Receipt, When, Who
from exporter.receipt.putting import Known, put_together
from exporter.receipt.truth import qualities
from exporter.wording import moment

SINCE = 30 * DAY
"""How far back a job is looked for, unless said."""
_LABELS = {
    "name": "name", "user": "user", "account": "account", "team": "team", "partition": "partition",
    "namespace": "workload_namespace", "workload_class": "workload_class",
}  # fmt: skip


def issued(asking: Asking, at: float, *, since: float = SINCE) -> Receipt:
    """The receipt of a job's last run that began before `at`. Raises ReceiptError."""
    life = find(asking, at, since=since)
    facts = Facts(asking, life)
    if not facts.rows.counts("seconds"):
        raise ReceiptError(
            f"job {asking.job_id} is stored there without gpu_efficiency_job_seconds_total: does the scrape drop it?"
        )
    return _receipt(facts, counted(facts))


def _receipt(facts: Facts, books: Books) -> Receipt:
    life, rows = facts.life, facts.rows
    paid = rows.by_place("paid_seconds")
    known = Known(
        source="Prometheus",
        who=_who(facts),
        when=When(start=life.start, end=life.end, running=life.running),
        models=facts.models(),
        joules=rows.sum("energy_joules"),
        grams_co2_per_kwh=facts.grams(),
        ofu=facts.weighed("ofu_ratio", weights=paid),
        activity=_activity(facts),
        activity_deviation=facts.weighed("activity_deviation_ratio", weights=paid),
        qualities=qualities(facts, books),
        fitting=next((row.labels.get("profile", "") for row in rows.gauges("fitting_slice_ratio")), ""),
        unneeded=(rows.sum("unneeded_seconds") or 0.0) / 3600,
        unseen=tuple(_unseen(facts)),
    )
    return put_together(known, facts, books)


def _who(facts: Facts) -> Who:
    """What most of its nodes say."""
    said = Counter(
        tuple(row.labels.get(label, "") for label in _LABELS.values()) for row in facts.rows.gauges("info")
    ).most_common(1)
    words = dict(zip(_LABELS, said[0][0], strict=True)) if said else {}
    return Who(job_id=facts.asking.job_id, cluster=next(iter(facts.nodes))[0], **words)


def _activity(facts: Facts) -> dict[str, float]:
    """Means over the run and all nodes of what each five minutes' percentiles were."""
    paid = facts.rows.by_place("paid_seconds")
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in facts.mean("activity_ratio", series=3):
        pairs.setdefault(row.labels.get("percentile", ""), []).append((row.value, paid.get(row.place, 0.0)))
    means = {percentile: weighed(each) for percentile, each in sorted(pairs.items())}
    return {percentile: mean for percentile, mean in means.items() if mean is not None}


def _unseen(facts: Facts) -> Iterator[str]:
    life = facts.life
    if life.earlier is not None:
        yield f"an earlier run under the same id ended {moment(life.earlier)}: --at with a time before shows it"
    if facts.restarted:
        names = sorted({facts.nodes[place] for place in facts.restarted})
        yield f"daemons that began anew in the run: {', '.join(names)}; what they had counted before is added"
