"""The books of what a Prometheus has stored. Owns what is in nobody's books, and prices over a run.

What no daemon counted (it was down, or is gone, or came late) is unobserved, like what a daemon saw and could not
believe: so the parts add up to the time the job held its GPUs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct

from exporter.receipt.asking import Place
from exporter.receipt.books import LAYERS_OF, NO_PRICE, Books, nanoseconds
from exporter.receipt.facts import Facts
from exporter.receipt.figures import weighed
from exporter.receipt.life import Stay


class Stretch(Struct, frozen=True, kw_only=True):
    """Paid seconds between a daemon's start and its next: the first sample and the last."""

    first: float
    had: float
    """Paid seconds at the first sample."""
    last: float
    paid: float
    told: bool = True
    """What came after it is known."""
    interval: float = 0.0

    @property
    def gpus(self) -> float:
        """Paid seconds a second."""
        return (self.paid - self.had) / (self.last - self.first) if self.last > self.first else 0.0


def counted(facts: Facts) -> Books:
    """Of all its nodes."""
    gpus, seen = facts.gpus(), facts.rows.by_node("paid_seconds")
    heads = facts.heads()
    unseen = {node: seconds for node in seen if (seconds := _unseen(facts, node, heads, gpus.get(node, 0.0))) > 0}
    currency, rates = _prices(facts, seen)
    told = {count.labels.get("leak", ""): count.labels.get("layer", "") for count in facts.rows.counts("seconds")}
    return Books(
        parts=_parts(facts, seen),
        seen=nanoseconds(seen),
        unseen=nanoseconds(unseen),
        gpus=gpus,
        currency=currency,
        rates=rates,
        layer_of=LAYERS_OF | told,
        phases=facts.rows.by("phase", "run_seconds"),
    )


def _parts(facts: Facts, nodes: Iterable[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {node: defaultdict(float) for node in nodes}
    for count in facts.rows.counts("seconds"):
        found[count.node][count.labels.get("leak", "")] += count.value
    return {node: nanoseconds(parts) for node, parts in found.items()}


def _prices(facts: Facts, nodes: Iterable[str]) -> tuple[str, dict[str, float]]:
    """The one currency, and a GPU-hour's price by node; one that tells none has the mean of the rest."""
    rows = [row for row in facts.prices() if row.place in facts.nodes]
    currencies = {row.labels.get("currency", "") for row in rows}
    if len(currencies) != 1 or currencies == {NO_PRICE}:
        return "", {}
    paid, held = facts.rows.by_place("paid_seconds"), _held(facts)
    weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if held.get(row.place):
            weights[facts.nodes[row.place]].append((row.value / held[row.place], paid.get(row.place, 0.0)))
    rates = {node: rate for node, pairs in weights.items() if (rate := weighed(pairs)) is not None}
    usual = weighed([pair for pairs in weights.values() for pair in pairs]) or 0.0
    return currencies.pop(), {node: rates.get(node, usual) for node in nodes}


_WHOLE = 0.15
"""A scrape at either end makes the seconds paid a second so much too few of a short run; smaller shares are meant."""


def _held(facts: Facts) -> dict[Place, float]:
    """GPUs by daemon, as they are paid for: an instance, or a GPU that others have too, is less than one."""
    spans: dict[Place, list[Stretch]] = defaultdict(list)
    heads = facts.heads()
    for node in set(facts.nodes.values()):
        for place, stretch in _placed(facts, node, heads):
            spans[place].append(stretch)
    found = dict(facts.devices())
    for place, stretches in spans.items():
        lasted = sum(each.last - each.first for each in stretches)
        rate = sum(each.paid - each.had for each in stretches) / lasted if lasted > 0 else 0.0
        if 0 < rate < (1 - _WHOLE) * found.get(place, 0.0):
            found[place] = rate
    return found


# -- time that nobody counted --

Heads = Mapping[Place, tuple[float, float]]
"""The first sample of each daemon: Unix seconds, paid seconds."""


def _unseen(facts: Facts, node: str, heads: Heads, gpus: float) -> float:
    """GPU-seconds a node had the job's GPUs for, and no daemon counted."""
    life = facts.life
    start = min(stay.start for stay in life.stays if facts.nodes[stay.place] == node)
    return not_counted(_stretches(facts, node, heads), start=start, end=life.end, gpus=gpus)


def _stretches(facts: Facts, node: str, heads: Heads) -> Iterator[Stretch]:
    return (stretch for _, stretch in _placed(facts, node, heads))


def _placed(facts: Facts, node: str, heads: Heads) -> Iterator[tuple[Place, Stretch]]:
    paid = facts.rows.by_place("paid_seconds")
    for stay in facts.life.stays:
        if facts.nodes[stay.place] != node:
            continue
        if stay.place in facts.restarted:
            yield from ((stay.place, stretch) for stretch in _cut(facts.restarted[stay.place].points, stay))
        else:
            first, had = heads.get(stay.place, (stay.end, paid[stay.place]))
            yield (
                stay.place,
                Stretch(
                    first=first, had=had, last=stay.end, paid=paid[stay.place], told=stay.told, interval=stay.interval
                ),
            )


def not_counted(stretches: Iterable[Stretch], *, start: float, end: float, gpus: float) -> float:
    """GPU-seconds of a node from `start` to `end` that are in none of its stretches; `gpus` where these do not tell.

    Less than an interval at the start and two at the end are how clocks and scrapes differ.
    """
    known = sorted(stretches, key=lambda stretch: stretch.first)
    usual = max((stretch.gpus for stretch in known), default=0.0) or gpus
    late, last = _gap(known[0], start, usual), known[-1]
    total = late if late > usual * known[0].interval else 0.0
    total += sum(_gap(after, before.last, usual) for before, after in pairwise(known))
    silent = end - last.last
    return total + (usual * silent if not last.told and silent > 2 * last.interval else 0.0)


def _gap(stretch: Stretch, before: float, usual: float) -> float:
    """GPU-seconds from a moment to its first sample that are not in it."""
    return max(0.0, (stretch.gpus or usual) * (stretch.first - before) - stretch.had)


def _cut(points: list[tuple[float, float]], stay: Stay) -> Iterator[Stretch]:
    """One stretch for each life of the daemon."""
    first = points[0]
    for before, after in pairwise(points):
        if after[1] < before[1]:
            yield Stretch(first=first[0], had=first[1], last=before[0], paid=before[1], interval=stay.interval)
            first = after
    yield Stretch(
        first=first[0], had=first[1], last=stay.end, paid=points[-1][1], told=stay.told, interval=stay.interval
    )
