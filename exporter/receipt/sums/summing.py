"""Lots added up: who held and lost how much, and when. Owns sums, ranks, trend; refuses to know where lots are from.

Ratios are of sums: no ratio is ever averaged.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from exporter.core.leaks import LEAKS
from exporter.core.money import NO_PRICE
from exporter.receipt.books import layers
from exporter.receipt.model import Layers, Part, Who
from exporter.receipt.sums.lots import LAYERS, Lot, Period
from exporter.receipt.sums.ranking import summary_lines, summary_tables
from exporter.receipt.sums.summary import HOUR, Fleet, Line, Stretch, Summary

__all__ = [
    "BY",
    "NOBODY",
    "NONE",
    "UNTOLD",
    "Summary",
    "currency_of",
    "name_of",
    "summary_lines",
    "summary_tables",
    "summed",
]

NOBODY, UNTOLD, NONE = "(nobody)", "(not told)", "(none)"
"""Rows of what no job had; of what no job's series told; of jobs without the word asked for."""
BY = ("user", "account", "namespace", "team", "job", "partition")
_NO_LOSS = ("useful", "unresolved", "unobserved")
_ROWS = {leak.name: leak for leak in LEAKS}


class _Sum:
    """Of some lots."""

    def __init__(self, currency: str) -> None:
        self._currency = currency
        self.seconds: dict[str, float] = defaultdict(float)
        self.money: dict[str, float] = defaultdict(float)
        self.jobs: set[tuple[str, str]] = set()
        self.who: Who | None = None

    def add(self, lot: Lot) -> None:
        seconds, money = self.seconds, self.money
        for leak, value in lot.seconds.items():
            seconds[leak] += value
        if self._currency:
            total = sum(lot.seconds.values())
            price = lot.money.get(self._currency, 0.0) / total if total else 0.0
            for leak, value in lot.seconds.items():
                money[leak] += price * value
        if lot.who.job_id:
            self.jobs.add((lot.who.cluster, lot.who.job_id))
            self.who = lot.who

    def merge(self, other: "_Sum") -> None:
        for mine, more in ((self.seconds, other.seconds), (self.money, other.money)):
            for leak, value in more.items():
                mine[leak] += value
        self.jobs |= other.jobs
        self.who = other.who or self.who

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def layers(self) -> Layers:
        return layers(self.seconds, _known(self.seconds))

    def lost(self, amounts: Mapping[str, float]) -> float:
        return sum(value for leak, value in amounts.items() if leak not in _NO_LOSS)

    def cost(self, amount: float) -> float | None:
        return amount if self._currency else None

    def line(self, name: str, *, about: str = "", track: tuple[float | None, ...] = ()) -> Line:
        losses = {leak: value for leak, value in self.seconds.items() if leak not in _NO_LOSS and value > 0}
        order = sorted(losses, key=lambda leak: (-losses[leak], leak))
        total = self.total
        return Line(
            name=name,
            about=about,
            jobs=len(self.jobs),
            gpu_hours=total / HOUR,
            coverage=1.0 - self.seconds.get("unobserved", 0.0) / total if total else None,
            layers=self.layers,
            money=self.cost(sum(self.money.values())),
            lost_gpu_hours=self.lost(self.seconds) / HOUR,
            lost_money=self.cost(self.lost(self.money)),
            worst=order[0] if order else "",
            leaks={leak: losses[leak] / HOUR for leak in order},
            track=track,
        )

    def parts(self) -> tuple[Part, ...]:
        sums = {leak: value for leak, value in self.seconds.items() if value > 0}
        order = sorted(sums, key=lambda leak: (_NO_LOSS.index(leak) if leak in _NO_LOSS else -1, -sums[leak], leak))
        return tuple(self._part(leak) for leak in order)

    def _part(self, leak: str) -> Part:
        row = _ROWS.get(leak)
        return Part(
            name=leak,
            layer=_known([leak])[leak],
            gpu_hours=self.seconds[leak] / HOUR,
            share=self.seconds[leak] / self.total,
            money=self.cost(self.money[leak]),
            evidence=row.evidence if row else "",
            team=row.team if row else "",
            watch=row.watch if row else "",
            fix=row.fix if row else "",
        )


def _known(leaks: Iterable[str]) -> dict[str, str]:
    """Layers. A leak of a newer daemon is taken for one of the first layer: lost it is in any case."""
    more = {leak: "gau" for leak in leaks if leak not in LAYERS}
    return LAYERS | more if more else LAYERS


def summed(
    lots: Sequence[Lot], times: Sequence[Period], *, about: str, by: str, every: str, source: str,
    start: float, end: float, fleet: Fleet | None = None, unseen: tuple[str, ...] = (), simulated: bool = False,
) -> Summary:  # fmt: skip
    """Lots of these periods, by what they are ranked by; an empty `by` takes what most jobs have a word for."""
    by = by or _usual(lots)
    currency = currency_of(lots)
    tracks = _tracks(lots, by, currency)
    rows = {name: _merged((track[n] for n in sorted(track)), currency) for name, track in tracks.items()}
    whole = _merged(rows.values(), currency)
    shown = [number for number, period in enumerate(times) if period.end > start and period.start < end]
    stretches = {n: _merged((track[n] for track in tracks.values() if n in track), currency) for n in shown}
    lines = [
        row.line(name, about=_about(row.who, by), track=_products(tracks[name], shown)) for name, row in rows.items()
    ]
    return Summary(
        about=about,
        by=by,
        every=every,
        start=start,
        end=end,
        source=source,
        currency=currency,
        whole=whole.line("all"),
        rows=tuple(sorted(lines, key=lambda line: (-(line.lost_money or 0.0), -line.lost_gpu_hours, line.name))),
        parts=whole.parts(),
        trend=tuple(_stretch(stretches[n], times[n]) for n in shown),
        models=tuple(sorted({model for lot in lots for model in lot.models})),
        fleet=fleet,
        unseen=(*unseen, *_unpriced(lots, currency)),
        simulated=simulated,
    )


def _tracks(lots: Iterable[Lot], by: str, currency: str) -> dict[str, dict[int, _Sum]]:
    """Each row's sums by period: every lot is added up once, and all else is sums of these."""
    found: dict[str, dict[int, _Sum]] = defaultdict(dict)
    for lot in lots:
        track = found[name_of(lot, by)]
        if lot.period not in track:
            track[lot.period] = _Sum(currency)
        track[lot.period].add(lot)
    return found


def _merged(sums: Iterable[_Sum], currency: str) -> _Sum:
    found = _Sum(currency)
    for each in sums:
        found.merge(each)
    return found


def _products(track: Mapping[int, _Sum], shown: Iterable[int]) -> tuple[float | None, ...]:
    return tuple(track[n].layers.product if n in track else None for n in shown)


def currency_of(lots: Iterable[Lot]) -> str:
    """The one that there is; empty: none, or several."""
    found = {currency for lot in lots for currency in lot.money} - {NO_PRICE.currency}
    return found.pop() if len(found) == 1 else ""


def _unpriced(lots: Iterable[Lot], currency: str) -> tuple[str, ...]:
    if not currency:
        return ("no price, or several currencies: amounts are GPU-hours, and who lost most of them is first",)
    hours = sum(sum(lot.seconds.values()) for lot in lots if currency not in lot.money) / HOUR
    if hours <= 0:
        return ()
    return (f"{hours:,.2f} GPU-hours have no price: they are in the hours, and not in the money",)


def _usual(lots: Iterable[Lot]) -> str:
    jobs = {(lot.who.cluster, lot.who.job_id): lot.who for lot in lots if lot.who.job_id}
    known = {by: sum(bool(getattr(who, by)) for who in jobs.values()) for by in ("user", "namespace")}
    best = max(known, key=lambda by: known[by])
    return best if known[best] else "job"


def name_of(lot: Lot, by: str) -> str:
    """In which row it is."""
    if not lot.told:
        return UNTOLD
    if not lot.who.job_id:
        return NOBODY
    return lot.who.job_id if by == "job" else getattr(lot.who, by) or NONE


def _about(who: Who | None, by: str) -> str:
    return "" if who is None or by != "job" else " ".join(filter(None, (who.name, who.user and f"of {who.user}")))


def _stretch(found: _Sum, period: Period) -> Stretch:
    return Stretch(
        start=period.start,
        end=period.end,
        gpu_hours=found.total / HOUR,
        product=found.layers.product,
        lost_gpu_hours=found.lost(found.seconds) / HOUR,
        lost_money=found.cost(found.lost(found.money)),
    )
