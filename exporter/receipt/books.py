"""A job's GPU time and money by leak and node, whoever told it. Owns the waterfall and the layers.

Time is in nanoseconds of whole GPUs. Sums of integers stay integers: the one division comes last.
"""

from collections import defaultdict
from collections.abc import Mapping

from exporter.core.leaks import LAYER_OF, LEAKS, NAMES, Leak
from exporter.receipt.model import Layers, Node, Part

SECOND = 1_000_000_000
HOUR = 3600 * SECOND
"""Nanoseconds."""
NO_PRICE = "GPU-hours"
"""The currency of daemons that have no price."""
LAYERS_OF = dict(zip(NAMES, LAYER_OF, strict=True))
_ROWS = {leak.name: leak for leak in LEAKS}
_NO_LOSS = ("useful", "unresolved", "unobserved")
TOLD_BY = {
    "failure_recovery": "restore", "startup": "startup", "checkpoint": "checkpoint", "data_stall": "data",
    "exposed_communication": "communication",
}  # fmt: skip
"""The phase in which a job tells of a leak that is otherwise measured or estimated."""


class Books:
    """The books of all nodes: GPU-nanoseconds by node and leak, integers where ledgers told them."""

    def __init__(
        self,
        *,
        parts: Mapping[str, Mapping[str, float]],
        seen: Mapping[str, float],
        unseen: Mapping[str, float],
        gpus: Mapping[str, float],
        currency: str,
        rates: Mapping[str, float],
        layer_of: Mapping[str, str],
        phases: Mapping[str, float],
    ) -> None:
        """`rates`: money of a GPU-hour by node; `phases`: what of the run the job itself told, by phase."""
        self.seen, self.unseen, self.gpus = dict(seen), dict(unseen), dict(gpus)
        """What daemons counted; what is in nobody's books; GPUs, the most at once. By node."""
        self.currency, self._rates = currency, dict(rates)
        self._layer_of, self._phases = layer_of, phases
        """Layers by the daemons' word: theirs may be a newer version with other leaks."""
        self.parts = {node: _with(parts[node], unseen.get(node, 0)) for node in parts}

    @property
    def held(self) -> float:
        """The time the job held GPUs."""
        return sum(self.seen.values()) + sum(self.unseen.values())

    def money(self, time: Mapping[str, float]) -> float | None:
        """What so much GPU time costs, by node; None without a price."""
        if not self.currency:
            return None
        return sum(each * self._rates.get(node, 0.0) for node, each in time.items()) / HOUR

    def cost(self, time: Mapping[str, float]) -> float:
        """The same, in GPU-hours where there is no price."""
        money = self.money(time)
        return sum(time.values()) / HOUR if money is None else money

    def per_hour(self) -> float:
        """What the job costs an hour, in money or GPU-hours."""
        return self.cost({node: gpus * HOUR for node, gpus in self.gpus.items()})

    # -- what is told of it --

    def sums(self) -> dict[str, float]:
        """GPU time by leak, of all nodes."""
        found: dict[str, float] = defaultdict(int)
        for parts in self.parts.values():
            for leak, time in parts.items():
                found[leak] += time
        return dict(found)

    def layers(self) -> Layers:
        """Of all nodes."""
        return layers(self.sums(), self._layer_of)

    def of_leak(self, leak: str) -> dict[str, float]:
        """GPU time of one leak, by node."""
        return {node: parts.get(leak, 0) for node, parts in self.parts.items()}

    def waterfall(self) -> tuple[Part, ...]:
        """Losses, the largest first, then what is none."""
        sums = self.sums()
        order = sorted(sums, key=lambda leak: (_NO_LOSS.index(leak) if leak in _NO_LOSS else -1, -sums[leak], leak))
        return tuple(self._part(leak, sums[leak]) for leak in order)

    def _part(self, leak: str, time: float) -> Part:
        row = _ROWS.get(leak)
        return Part(
            name=leak,
            layer=self._layer_of[leak],
            gpu_hours=time / HOUR,
            share=time / self.held,
            money=self.money(self.of_leak(leak)),
            evidence=self._grade(row) if row else "",
            team=row.team if row else "",
            watch=row.watch if row else "",
            fix=row.fix if row else "",
            nanoseconds=round(time),
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
        total, told = sum(parts.values()), layers(parts, self._layer_of)
        losses = {leak: seconds for leak, seconds in parts.items() if leak not in _NO_LOSS}
        worst = min(losses, key=lambda leak: (-losses[leak], leak), default="")
        return Node(
            name=name,
            gpus=self.gpus.get(name, 0.0),
            gpu_hours=total / HOUR,
            product=told.product,
            gau=told.gau,
            worst=worst,
            worst_share=losses.get(worst, 0.0) / total if total else 0.0,
            unseen_gpu_hours=self.unseen.get(name, 0.0) / HOUR,
        )


def layers(parts: Mapping[str, float], layer_of: Mapping[str, str] = LAYERS_OF) -> Layers:
    """Three ratios and their product, of GPU time by leak (accounting, section 1)."""
    by: dict[str, float] = defaultdict(int)
    for leak, time in parts.items():
        by[layer_of[leak]] += time
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


def nanoseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by whatever, as books have them."""
    return {key: each * SECOND for key, each in seconds.items()}


def _with(parts: Mapping[str, float], unseen: float) -> dict[str, float]:
    """What is in nobody's books is unobserved."""
    found = dict(parts)
    if unseen:
        found["unobserved"] = found.get("unobserved", 0) + unseen
    return {leak: time for leak, time in found.items() if time > 0}
