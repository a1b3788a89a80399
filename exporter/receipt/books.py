"""A job's GPU-hours and money by leak and node. Owns the waterfall, the layers, and what is in nobody's books.

What no daemon counted (it was down, or is gone, or came late) is unobserved, like what a daemon saw and could not
believe: so the parts add up to the time the job held its GPUs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct

from exporter.core.leaks import LAYER_OF, LEAKS, NAMES, Leak
from exporter.receipt.facts import Facts, weighed
from exporter.receipt.life import Stay
from exporter.receipt.model import Layers, Node, Part

HOUR = 3600.0
NO_PRICE = "GPU-hours"
"""The currency of daemons that have no price."""
_LAYERS = dict(zip(NAMES, LAYER_OF, strict=True))
_ROWS = {leak.name: leak for leak in LEAKS}
_NO_LOSS = ("useful", "unresolved", "unobserved")
TOLD_BY = {
    "failure_recovery": "restore", "startup": "startup", "checkpoint": "checkpoint", "data_stall": "data",
    "exposed_communication": "communication",
}  # fmt: skip
"""The phase in which a job tells of a leak that is otherwise measured or estimated."""


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


class Books:
    """The books of all nodes, GPU-seconds by node and leak."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.gpus = facts.gpus()
        self.seen = facts.by_node("paid_seconds")
        """GPU-seconds that daemons counted, by node."""
        self._heads = facts.heads()
        self.unseen = {node: seconds for node in self.seen if (seconds := self._unseen(node)) > 0}
        self._phases = facts.by("phase", "run_seconds")
        self._layer_of = _LAYERS | {
            count.labels.get("leak", ""): count.labels.get("layer", "") for count in facts.counts("seconds")
        }
        """By the daemons' word: theirs may be a newer version with other leaks."""
        self.parts = self._parts()
        self.currency, self._rates = self._prices()

    @property
    def held(self) -> float:
        """GPU-seconds the job held GPUs."""
        return sum(self.seen.values()) + sum(self.unseen.values())

    def money(self, seconds: Mapping[str, float]) -> float | None:
        """What so many GPU-seconds cost, by node; None without a price."""
        if not self.currency:
            return None
        return sum(each * self._rates.get(node, 0.0) for node, each in seconds.items()) / HOUR

    def cost(self, seconds: Mapping[str, float]) -> float:
        """The same, in GPU-hours where there is no price."""
        money = self.money(seconds)
        return sum(seconds.values()) / HOUR if money is None else money

    def per_hour(self) -> float:
        """What the job costs an hour, in money or GPU-hours."""
        return self.cost({node: gpus * HOUR for node, gpus in self.gpus.items()})

    # -- prices --

    def _prices(self) -> tuple[str, dict[str, float]]:
        """The one currency, and a GPU-hour's price by node; one that tells none has the mean of the rest."""
        rows = [row for row in self._facts.prices() if row.place in self._facts.nodes]
        currencies = {row.labels.get("currency", "") for row in rows}
        if len(currencies) != 1 or currencies == {NO_PRICE}:
            return "", {}
        paid, nodes = self._facts.by_place("paid_seconds"), self._facts.nodes
        weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            weights[nodes[row.place]].append((row.value, paid.get(row.place, 0.0)))
        rates = {node: rate for node, pairs in weights.items() if (rate := weighed(pairs)) is not None}
        usual = weighed([pair for pairs in weights.values() for pair in pairs]) or 0.0
        return currencies.pop(), {node: rates.get(node, usual) for node in self.seen}

    # -- time --

    def _parts(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {node: defaultdict(float) for node in self.seen}
        for count in self._facts.counts("seconds"):
            found[count.node][count.labels.get("leak", "")] += count.value
        for node, seconds in self.unseen.items():
            found[node]["unobserved"] += seconds
        return {node: {leak: value for leak, value in parts.items() if value > 0} for node, parts in found.items()}

    def _unseen(self, node: str) -> float:
        """GPU-seconds a node had the job's GPUs for, and no daemon counted."""
        life = self._facts.life
        start = min(stay.start for stay in life.stays if self._facts.nodes[stay.place] == node)
        return not_counted(self._stretches(node), start=start, end=life.end, gpus=self.gpus.get(node, 0.0))

    def _stretches(self, node: str) -> Iterator[Stretch]:
        paid = self._facts.by_place("paid_seconds")
        for stay in self._facts.life.stays:
            if self._facts.nodes[stay.place] != node:
                continue
            if stay.place in self._facts.restarted:
                yield from _cut(self._facts.restarted[stay.place].points, stay)
            else:
                first, had = self._heads.get(stay.place, (stay.end, paid[stay.place]))
                yield Stretch(
                    first=first, had=had, last=stay.end, paid=paid[stay.place], told=stay.told, interval=stay.interval
                )

    # -- what is told of it --

    def sums(self) -> dict[str, float]:
        """GPU-seconds by leak, of all nodes."""
        found: dict[str, float] = defaultdict(float)
        for parts in self.parts.values():
            for leak, seconds in parts.items():
                found[leak] += seconds
        return dict(found)

    def layers(self) -> Layers:
        """Of all nodes."""
        return layers(self.sums(), self._layer_of)

    def of_leak(self, leak: str) -> dict[str, float]:
        """GPU-seconds of one leak, by node."""
        return {node: parts.get(leak, 0.0) for node, parts in self.parts.items()}

    def waterfall(self) -> tuple[Part, ...]:
        """Losses, the largest first, then what is none."""
        sums = self.sums()
        order = sorted(sums, key=lambda leak: (_NO_LOSS.index(leak) if leak in _NO_LOSS else -1, -sums[leak], leak))
        return tuple(self._part(leak, sums[leak]) for leak in order)

    def _part(self, leak: str, seconds: float) -> Part:
        row = _ROWS.get(leak)
        return Part(
            name=leak,
            layer=self._layer_of[leak],
            gpu_hours=seconds / HOUR,
            share=seconds / self.held,
            money=self.money(self.of_leak(leak)),
            evidence=self._grade(row) if row else "",
            team=row.team if row else "",
            watch=row.watch if row else "",
            fix=row.fix if row else "",
        )

    def _grade(self, row: Leak) -> str:
        """How this job's loss is known: what can be told is otherwise measured or estimated."""
        *told, otherwise = row.evidence.split(" or ")
        return told[0] if told and self._phases.get(TOLD_BY.get(row.name, "")) else otherwise

    def nodes(self) -> tuple[Node, ...]:
        """The one with the least product first."""
        found = [self._node(name) for name in self.seen]
        return tuple(sorted(found, key=lambda node: (node.product if node.product is not None else 2.0, node.name)))

    def _node(self, name: str) -> Node:
        parts = self.parts[name]
        total = sum(parts.values())
        losses = {leak: seconds for leak, seconds in parts.items() if leak not in _NO_LOSS}
        worst = min(losses, key=lambda leak: (-losses[leak], leak), default="")
        return Node(
            name=name,
            gpus=self.gpus.get(name, 0.0),
            gpu_hours=total / HOUR,
            product=layers(parts, self._layer_of).product,
            worst=worst,
            worst_share=losses.get(worst, 0.0) / total if total else 0.0,
            unseen_gpu_hours=self.unseen.get(name, 0.0) / HOUR,
        )


def layers(parts: Mapping[str, float], layer_of: Mapping[str, str] = _LAYERS) -> Layers:
    """Three ratios and their product, of GPU-seconds by leak (accounting, section 1)."""
    by: dict[str, float] = defaultdict(float)
    for leak, seconds in parts.items():
        by[layer_of[leak]] += seconds
    resolved = by["emfu"] + by["useful"]
    computing = resolved + by["unresolved"]
    occupied = computing + by["ectr"]
    observed = occupied + by["gau"]
    gau, ectr, emfu = _ratio(occupied, observed), _ratio(computing, occupied), _ratio(by["useful"], resolved)
    floor = _ratio(by["useful"], observed)
    whole = None if gau is None or ectr is None or emfu is None else gau * ectr * emfu
    return Layers(gau=gau, ectr=ectr, emfu=emfu, product=whole if computing else floor, floor=floor)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


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
