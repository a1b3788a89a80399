"""A receipt, made of what is stored. Owns the order of the questions, and what is said of all that was not seen."""

from collections import Counter
from collections.abc import Iterator

from exporter.core.policy import Policy
from exporter.receipt.asking import Asking, ReceiptError
from exporter.receipt.books import HOUR, Books
from exporter.receipt.facts import Facts, weighed
from exporter.receipt.life import DAY, find
from exporter.receipt.model import Part, Receipt, Truth, When, Who
from exporter.receipt.served import served
from exporter.receipt.truth import ranks, truth
from exporter.wording import moment, percent

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
    if not facts.counts("seconds"):
        raise ReceiptError(
            f"job {asking.job_id} is stored there without gpu_efficiency_job_seconds_total: does the scrape drop it?"
        )
    return _receipt(facts, Books(facts))


def _receipt(facts: Facts, books: Books) -> Receipt:
    life, sums = facts.life, books.sums()
    paid, waterfall = facts.by_place("paid_seconds"), books.waterfall()
    told, ofu = truth(facts, books), facts.weighed("ofu_ratio", weights=paid)
    return Receipt(
        who=_who(facts),
        when=When(start=life.start, end=life.end, running=life.running),
        nodes=books.nodes(),
        models=facts.models(),
        gpus=sum(books.gpus.values()),
        gpu_hours=books.held / HOUR,
        seen_gpu_hours=sum(books.seen.values()) / HOUR,
        coverage=1.0 - sums.get("unobserved", 0.0) / books.held if books.held else None,
        currency=books.currency,
        money=books.money({node: sum(parts.values()) for node, parts in books.parts.items()}),
        energy_kwh=_energy(facts),
        layers=books.layers(),
        parts=waterfall,
        evidence=_evidence(waterfall),
        ofu=ofu,
        activity=_activity(facts),
        activity_deviation=facts.weighed("activity_deviation_ratio", weights=paid),
        truth=told,
        served=served(facts, books),
        ranks=ranks(facts) if told else (),
        unseen=(*_unseen(facts, books), *_silence(facts, books, told), *_contradiction(told, ofu)),
    )


def _who(facts: Facts) -> Who:
    """What most of its nodes say."""
    said = Counter(
        tuple(row.labels.get(label, "") for label in _LABELS.values()) for row in facts.gauges("info")
    ).most_common(1)
    words = dict(zip(_LABELS, said[0][0], strict=True)) if said else {}
    return Who(job_id=facts.asking.job_id, cluster=next(iter(facts.nodes))[0], **words)


def _energy(facts: Facts) -> float | None:
    joules = facts.sum("energy_joules")
    return None if joules is None else joules / 3.6e6


def _evidence(waterfall: tuple[Part, ...]) -> dict[str, float]:
    """Share of all that was lost, by how a leak is known."""
    losses = [part for part in waterfall if part.evidence]
    total = sum(part.gpu_hours for part in losses)
    kinds = {part.evidence for part in losses}
    shares = {kind: sum(part.gpu_hours for part in losses if part.evidence == kind) / total for kind in kinds}
    return dict(sorted(shares.items(), key=lambda item: (-round(item[1], 6), item[0])))


def _activity(facts: Facts) -> dict[str, float]:
    """Means over the run and all nodes of what each five minutes' percentiles were."""
    paid = facts.by_place("paid_seconds")
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in facts.mean("activity_ratio", series=3):
        pairs.setdefault(row.labels.get("percentile", ""), []).append((row.value, paid.get(row.place, 0.0)))
    means = {percentile: weighed(each) for percentile, each in sorted(pairs.items())}
    return {percentile: mean for percentile, mean in means.items() if mean is not None}


def _unseen(facts: Facts, books: Books) -> Iterator[str]:
    life = facts.life
    for node, seconds in sorted(books.unseen.items()):
        yield f"node {node}: {seconds / HOUR:,.2f} GPU-hours are in nobody's books: its daemon was down or not scraped"
    if life.earlier is not None:
        yield f"an earlier run under the same id ended {moment(life.earlier)}: --at with a time before shows it"
    if facts.restarted:
        names = sorted({facts.nodes[place] for place in facts.restarted})
        yield f"daemons that began anew in the run: {', '.join(names)}; what they had counted before is added"


def _silence(facts: Facts, books: Books, told: Truth | None) -> Iterator[str]:
    if not books.currency:
        yield "no price, or several currencies: amounts are GPU-hours"
    world, gpus = facts.latest("world_size"), sum(books.gpus.values())
    if world and world > gpus:
        yield f"the job speaks of {world:g} GPUs, {gpus:g} were seen: the rest is on nodes without a daemon"
    if told is None:
        if not facts.gauges("engine_info"):
            yield "the job reported nothing: useful is the hardware's upper bound, padding and recomputation are in it"
    elif told.told_share < 0.999:  # noqa: PLR2004  what one digit shows as less than all
        yield f"reports speak of {percent(told.told_share)} of its GPU time; figures by token are of that part"


def _contradiction(told: Truth | None, ofu: float | None) -> Iterator[str]:
    """Tensor cores cannot have done less than the model needed."""
    if told is not None and told.mfu is not None and ofu is not None and told.mfu > ofu * Policy().flops_excess:
        yield (
            f"the job's count of FLOPs is wrong: it reports {percent(told.mfu)} of peak, and the tensor cores delivered"
            f" {percent(ofu)}"
        )
