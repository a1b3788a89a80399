"""A receipt put together of figures and books, whoever told them. Owns what is said of all that was not seen."""

from collections.abc import Iterator

from msgspec import Struct

from exporter.core.policy import Policy
from exporter.receipt.books import HOUR, Books
from exporter.receipt.failing import failures
from exporter.receipt.figures import Figures
from exporter.receipt.model import Moment, Part, Quality, Receipt, Truth, When, Who
from exporter.receipt.served import served
from exporter.receipt.truth import ranks, truth
from exporter.wording import percent

_ALL = 0.999
"""What one digit shows as less than all."""
JOULES_OF_KWH = 3.6e6


class Known(Struct, frozen=True, kw_only=True):
    """What the sources tell each in their own way."""

    source: str
    who: Who
    when: When
    models: tuple[str, ...]
    joules: float | None
    ofu: float | None
    qualities: tuple[Quality, ...]
    unseen: tuple[str, ...]
    grams_co2_per_kwh: float | None = None
    energy_useful: float | None = None
    activity: dict[str, float] = {}
    activity_deviation: float | None = None
    fitting: str = ""
    unneeded: float = 0.0
    """GPU-hours."""
    expected_nodes: int = 0
    course: tuple[Moment, ...] = ()
    simulated: bool = False


def put_together(known: Known, figures: Figures, books: Books) -> Receipt:
    """All of it."""
    waterfall, sums = books.waterfall(), books.sums()
    told = truth(figures, books, qualities=known.qualities)
    kwh = None if known.joules is None else known.joules / JOULES_OF_KWH
    grams, world = known.grams_co2_per_kwh, int(figures.rows.latest("world_size") or 0)
    return Receipt(
        who=known.who,
        when=known.when,
        nodes=books.nodes(),
        models=known.models,
        gpus=sum(books.gpus.values()),
        gpu_hours=books.held / HOUR,
        seen_gpu_hours=sum(books.seen.values()) / HOUR,
        coverage=1.0 - sums.get("unobserved", 0) / books.held if books.held else None,
        currency=books.currency,
        money=books.money({node: sum(parts.values()) for node, parts in books.parts.items()}),
        energy_kwh=kwh,
        layers=books.layers(),
        parts=waterfall,
        evidence=_evidence(waterfall),
        ofu=known.ofu,
        activity=known.activity,
        activity_deviation=known.activity_deviation,
        truth=told,
        served=served(figures, books),
        ranks=ranks(figures) if told else (),
        unseen=tuple(_unseen(known, figures, books, told)),
        source=known.source,
        simulated=known.simulated,
        failures=failures(figures, waterfall),
        energy_useful=known.energy_useful,
        co2_kg=None if kwh is None or grams is None else kwh * grams / 1000,
        expected_nodes=known.expected_nodes,
        expected_gpus=world,
        fitting=known.fitting,
        unneeded_gpu_hours=known.unneeded,
        course=known.course,
    )


def _evidence(waterfall: tuple[Part, ...]) -> dict[str, float]:
    """Share of all that was lost, by how a leak is known."""
    losses = [part for part in waterfall if part.evidence]
    total = sum(part.gpu_hours for part in losses)
    kinds = {part.evidence for part in losses}
    shares = {kind: sum(part.gpu_hours for part in losses if part.evidence == kind) / total for kind in kinds}
    return dict(sorted(shares.items(), key=lambda item: (-round(item[1], 6), item[0])))


def _unseen(known: Known, figures: Figures, books: Books, told: Truth | None) -> Iterator[str]:
    for node, time in sorted(books.unseen.items()):
        why = "not scraped" if known.source == "Prometheus" else "has not told the rest"
        yield f"node {node}: {time / HOUR:,.2f} GPU-hours are in nobody's books: its daemon was down or {why}"
    yield from known.unseen
    if not books.currency:
        yield "no price, or several currencies: amounts are GPU-hours"
    world, gpus = figures.rows.latest("world_size"), sum(books.gpus.values())
    if world and world > gpus and known.expected_nodes <= len(books.seen):
        yield f"the job speaks of {world:g} GPUs, {gpus:g} were seen: the rest is on nodes without a daemon"
    yield from _silence(figures, told)
    yield from _contradiction(told, known.ofu)


def _silence(figures: Figures, told: Truth | None) -> Iterator[str]:
    if told is None:
        if not figures.rows.gauges("engine_info"):
            yield "the job reported nothing: useful is the hardware's upper bound, padding and recomputation are in it"
    elif told.told_share < _ALL:
        yield f"reports speak of {percent(told.told_share)} of its GPU time; figures by token are of that part"


def _contradiction(told: Truth | None, ofu: float | None) -> Iterator[str]:
    """Tensor cores cannot have done less than the model needed."""
    if told is not None and told.mfu is not None and ofu is not None and told.mfu > ofu * Policy().flops_excess:
        yield (
            f"the job's count of FLOPs is wrong: it reports {percent(told.mfu)} of peak, and the tensor cores delivered"
            f" {percent(ofu)}"
        )
