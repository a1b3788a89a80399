"""What a job's serving engines said, over its run. Owns these figures; quantiles are the worst replica's, no means."""

from exporter.receipt.asking import Sample
from exporter.receipt.books import Books
from exporter.receipt.figures import Figures
from exporter.receipt.model import Latency, Served
from exporter.receipt.truth import ratio

_ORDER = ("ttft", "itl", "queue", "e2e")


def served(facts: Figures, books: Books) -> Served | None:
    """None: no engine said anything."""
    tokens = facts.rows.by("kind", "engine_tokens")
    requests = facts.mean("requests", series=2)
    if not tokens and not requests:
        return None
    weights = facts.rows.by_place("paid_seconds")
    kv = [row.value for row in facts.greatest("kv_cache_ratio")]
    spent = books.cost(books.seen)
    return Served(
        engines=tuple(sorted({row.labels.get("engine", "") for row in facts.rows.gauges("engine_info")})),
        running=_sum(requests, "running"),
        waiting=_sum(requests, "waiting"),
        batch_fill=facts.weighed("batch_fill_ratio", weights=weights),
        kv_mean=facts.weighed("kv_cache_ratio", weights=weights),
        kv_most=max(kv, default=None),
        preemptions=facts.rows.sum("preemptions"),
        tokens={kind: count for kind, count in sorted(tokens.items()) if count},
        acceptance=ratio(tokens.get("accepted"), tokens.get("drafted")),
        tokens_per_pass=_per_pass(facts),
        mbu=facts.weighed("mbu_ratio", weights=weights),
        latencies=tuple(_latencies(facts)),
        generated_per_cost=ratio(tokens.get("generated"), spent),
        advice={name: seconds / 3600 for name, seconds in facts.rows.by("advice", "advice_seconds").items() if seconds},
    )


def _sum(rows: list[Sample], state: str) -> float | None:
    found = [row.value for row in rows if row.labels.get("state") == state]
    return sum(found) if found else None


def _per_pass(facts: Figures) -> float | None:
    """All tokens over all passes; a daemon's passes are its tokens over its tokens a pass."""
    each = {row.place: row.value for row in facts.mean("tokens_per_pass_ratio") if row.value > 0}
    made = {count.place: count.value for count in facts.rows.counts("engine_tokens", kind="generated")}
    both = each.keys() & made.keys()
    return ratio(sum(made[place] for place in both), sum(made[place] / each[place] for place in both))


def _latencies(facts: Figures) -> list[Latency]:
    worst = _greatest(facts.greatest("latency_seconds", series=12))
    last = _greatest(facts.rows.gauges("latency_seconds"))
    order = sorted(worst, key=lambda key: (_ORDER.index(key[0]) if key[0] in _ORDER else len(_ORDER), key))
    return [Latency(kind=key[0], percentile=key[1], last=last.get(key), worst=worst[key]) for key in order]


def _greatest(rows: list[Sample]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row.labels.get("kind", ""), row.labels.get("percentile", "")
        found[key] = max(found.get(key, 0.0), row.value)
    return found
