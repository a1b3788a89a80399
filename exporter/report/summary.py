"""Sums the GPU time of many jobs by user, account, namespace, team, job or partition, with a trend by period.

Also compares owned with rented GPUs, and estimates what a higher eMFU would save. Ratios are of sums, never averaged.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.prices import NO_PRICE
from exporter.report.build import LAYER_BY_LEAK, NOT_LOST, layer_ratios, waterfall_order, waterfall_part
from exporter.report.model import LOSS_LAYERS, JobIdentity, LayerRatios, WaterfallPart
from exporter.report.usage import Period, UsageRecord

HOURS_PER_YEAR = 8760.0
HOUR_SECONDS = 3600.0
"""Seconds."""


class SummaryRow(Struct, frozen=True, kw_only=True):
    """What one of those that are ranked held and lost."""

    name: str
    about: str = ""
    """Of a job: its name and whose it is."""
    jobs: int
    gpu_hours: float
    coverage: float | None
    layers: LayerRatios
    money: float | None
    lost_gpu_hours: float
    lost_money: float | None
    worst: str
    """The leak that took most; empty: none took anything."""
    leaks: dict[str, float] = {}
    """GPU-hours by leak, the largest first."""
    track: tuple[float | None, ...] = ()
    """The product of each period; None: it held nothing, or nothing was seen."""


class TrendPoint(Struct, frozen=True, kw_only=True):
    """A period's sums: a point of the trend."""

    start: float
    end: float
    gpu_hours: float
    product: float | None
    lost_gpu_hours: float
    lost_money: float | None


class FleetUsage(Struct, frozen=True, kw_only=True):
    """GPUs of a whole fleet. On average, where nothing else is said."""

    gpus: float | None
    """Paid for; None: nobody tells."""
    gpus_peak: float | None
    held: float
    """That somebody had."""
    held_peak: float | None
    grain_seconds: float = 0.0
    """The peak is of means over so long; 0: of every moment."""

    @property
    def idle(self) -> float | None:
        """What the peak needs and the mean does not."""
        return None if self.held_peak is None else max(0.0, self.held_peak - self.held)


class RentComparison(Struct, frozen=True, kw_only=True):
    """Another's GPUs at a price an hour, of whose time such a share would be useful."""

    name: str
    per_gpu_hour: float
    utilisation: float
    per_useful_hour: float
    own_per_useful_hour: float | None
    """None: nothing was useful."""
    break_even: float
    """The share of one's own time that has to be useful for both to cost the same."""
    instead: float | None
    """What the same useful hours would have cost there."""


class EmfuGain(Struct, frozen=True, kw_only=True):
    """What a higher eMFU would give back; the other layers as they are."""

    emfu: float
    gpus: float
    """GPUs whose whole work that is."""
    gpu_hours: float
    money: float | None
    time_saved: float
    """Share of the time that the same work would take less."""


class UsageSummary(Struct, frozen=True, kw_only=True):
    """All of it. Times are Unix seconds."""

    about: str
    """Whose jobs: "user ada", "all"."""
    by: str
    every: str
    start: float
    end: float
    """Of what is known of the time that was asked for."""
    source: str
    currency: str
    """Empty: no price is known, or several currencies."""
    whole: SummaryRow
    rows: tuple[SummaryRow, ...]
    """Who lost most first."""
    parts: tuple[WaterfallPart, ...]
    """Losses, the largest first; then useful, unresolved, unobserved."""
    trend: tuple[TrendPoint, ...]
    models: tuple[str, ...] = ()
    fleet: FleetUsage | None = None
    rents: tuple[RentComparison, ...] = ()
    raised: tuple[EmfuGain, ...] = ()
    unseen: tuple[str, ...] = ()
    """What could not be seen, in sentences."""
    simulated: bool = False
    """Any part of it is of a simulated node."""

    def json(self) -> bytes:
        """For programs, with what is worked out of the rest."""
        derived = {"hours": self.hours, "gpus": self.gpus, "work": self.work, "per_gpu_hour": self.per_gpu_hour}
        return msgspec.json.encode(msgspec.to_builtins(self) | derived)

    @property
    def losses(self) -> tuple[WaterfallPart, ...]:
        """Leaks alone."""
        return tuple(part for part in self.parts if part.layer in LOSS_LAYERS)

    @property
    def hours(self) -> float:
        """How long it was."""
        return (self.end - self.start) / HOUR_SECONDS

    @property
    def gpus(self) -> float:
        """On average."""
        return self.whole.gpu_hours / self.hours if self.hours > 0 else 0.0

    @property
    def work(self) -> float | None:
        """GPUs whose whole work was done, on average."""
        return None if self.whole.layers.product is None else self.gpus * self.whole.layers.product

    @property
    def per_gpu_hour(self) -> float | None:
        """What an hour of a GPU cost."""
        money, hours = self.whole.money, self.whole.gpu_hours
        return None if money is None or not hours else money / hours

    @property
    def times_per_year(self) -> float:
        """How many times that is in a year."""
        return HOURS_PER_YEAR / self.hours if self.hours > 0 else 0.0


_OFFER_PATTERN = re.compile(
    r"(?:(?P<name>[^=@]+)=)?(?P<price>\d+(?:\.\d+)?|\.\d+)@(?P<share>\d+(?:\.\d+)?|\.\d+)(?P<sign>%?)"
)


_EQUAL_WITHIN = 0.0005
"""Ratios that read the same."""


class RentOffer(Struct, frozen=True):
    """What somebody asks for an hour of a GPU, and the share of that hour that would be useful there."""

    name: str
    per_gpu_hour: float
    utilisation: float


def parse_offer(text: str) -> RentOffer:
    """Of `4.00@0.95`, `4.00@95%` or `name=4.00@0.95`; raises ValueError, which says what is wrong."""
    match = _OFFER_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not PRICE@UTILISATION, such as 4.00@0.95 or cloud=4.00@95%")
    price, share = float(match["price"]), float(match["share"]) / (100 if match["sign"] else 1)
    if price <= 0:
        raise ValueError(f"{text!r}: a price is above 0")
    if not 0 < share <= 1:
        raise ValueError(f"{text!r}: the utilisation is above 0 and at most 1, or 100%")
    return RentOffer(match["name"] or f"{price:.2f} at {100 * share:g} %", price, share)


def compare_rent(summary: UsageSummary, offer: RentOffer) -> RentComparison:
    """The offer beside what is owned; raises ValueError where that has no price."""
    own, product = summary.per_gpu_hour, summary.whole.layers.product
    if own is None:
        raise ValueError(
            "--rent: what is owned has no price, or several currencies, so there is nothing to compare with: give"
            " [prices] in the configuration of the daemons"
        )
    useful = offer.per_gpu_hour / offer.utilisation
    return RentComparison(
        name=offer.name,
        per_gpu_hour=offer.per_gpu_hour,
        utilisation=offer.utilisation,
        per_useful_hour=useful,
        own_per_useful_hour=own / product if product else None,
        break_even=own / useful,
        instead=None if product is None else summary.whole.gpu_hours * product * useful,
    )


def emfu_gain(summary: UsageSummary, emfu: float) -> EmfuGain | None:
    """What it would give back; None where it is that high already, or not known."""
    ratios = summary.whole.layers
    if ratios.gau is None or ratios.ectr is None or not ratios.emfu or emfu - ratios.emfu < _EQUAL_WITHIN:
        return None
    share = ratios.gau * ratios.ectr * (emfu - ratios.emfu)
    return EmfuGain(
        emfu=emfu,
        gpus=summary.gpus * share,
        gpu_hours=summary.whole.gpu_hours * share,
        money=None if summary.whole.money is None else summary.whole.money * share,
        time_saved=1.0 - ratios.emfu / emfu,
    )


def with_comparisons(
    summary: UsageSummary, *, offers: tuple[RentOffer, ...] = (), emfu: tuple[float, ...] = ()
) -> UsageSummary:
    """The same with these comparisons; raises ValueError."""
    gains = (emfu_gain(summary, each) for each in emfu)
    return replace(
        summary,
        rents=tuple(compare_rent(summary, each) for each in offers),
        raised=tuple(each for each in gains if each is not None),
    )


NOBODY, UNATTRIBUTED, UNNAMED = "(nobody)", "(not told)", "(none)"
"""Rows of what no job had; of what no job's series told; of jobs without the word asked for."""
GROUPINGS = ("user", "account", "namespace", "team", "job", "partition")


class _UsageSum:
    """Of some lots."""

    def __init__(self, currency: str) -> None:
        self._currency = currency
        self.seconds: dict[str, float] = defaultdict(float)
        self.money: dict[str, float] = defaultdict(float)
        self.jobs: set[tuple[str, str]] = set()
        self.identity: JobIdentity | None = None

    def add(self, record: UsageRecord) -> None:
        seconds, money = self.seconds, self.money
        for leak, value in record.seconds.items():
            seconds[leak] += value
        if self._currency:
            total = sum(record.seconds.values())
            price = record.money.get(self._currency, 0.0) / total if total else 0.0
            for leak, value in record.seconds.items():
                money[leak] += price * value
        if record.identity.job_id:
            self.jobs.add((record.identity.cluster, record.identity.job_id))
            self.identity = record.identity

    def merge(self, other: "_UsageSum") -> None:
        for mine, more in ((self.seconds, other.seconds), (self.money, other.money)):
            for leak, value in more.items():
                mine[leak] += value
        self.jobs |= other.jobs
        self.identity = other.identity or self.identity

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def layer_ratios(self) -> LayerRatios:
        return layer_ratios(self.seconds, _layer_by_leak(self.seconds))

    def lost_amount(self, amounts: Mapping[str, float]) -> float:
        return sum(value for leak, value in amounts.items() if leak not in NOT_LOST)

    def money_or_none(self, amount: float) -> float | None:
        return amount if self._currency else None

    def summary_row(self, name: str, *, about: str = "", track: tuple[float | None, ...] = ()) -> SummaryRow:
        losses = {leak: value for leak, value in self.seconds.items() if leak not in NOT_LOST and value > 0}
        order = sorted(losses, key=lambda leak: (-losses[leak], leak))
        total = self.total
        return SummaryRow(
            name=name,
            about=about,
            jobs=len(self.jobs),
            gpu_hours=total / HOUR_SECONDS,
            coverage=1.0 - self.seconds.get("unobserved", 0.0) / total if total else None,
            layers=self.layer_ratios,
            money=self.money_or_none(sum(self.money.values())),
            lost_gpu_hours=self.lost_amount(self.seconds) / HOUR_SECONDS,
            lost_money=self.money_or_none(self.lost_amount(self.money)),
            worst=order[0] if order else "",
            leaks={leak: losses[leak] / HOUR_SECONDS for leak in order},
            track=track,
        )

    def parts(self) -> tuple[WaterfallPart, ...]:
        sums = {leak: value for leak, value in self.seconds.items() if value > 0}
        return tuple(self._waterfall_part(leak) for leak in waterfall_order(sums))

    def _waterfall_part(self, leak: str) -> WaterfallPart:
        return waterfall_part(
            leak,
            _layer_by_leak([leak])[leak],
            gpu_hours=self.seconds[leak] / HOUR_SECONDS,
            share=self.seconds[leak] / self.total,
            money=self.money_or_none(self.money[leak]),
            evidence=attrgetter("evidence"),
        )


def _layer_by_leak(leaks: Iterable[str]) -> dict[str, str]:
    """Layers. A leak of a newer daemon is taken for one of the first layer: lost it is in any case."""
    more = {leak: "gau" for leak in leaks if leak not in LAYER_BY_LEAK}
    return LAYER_BY_LEAK | more if more else LAYER_BY_LEAK


def summarize(
    usage: Sequence[UsageRecord], periods: Sequence[Period], *, about: str, by: str, every: str, source: str,
    start: float, end: float, fleet: FleetUsage | None = None, unseen: tuple[str, ...] = (), simulated: bool = False,
) -> UsageSummary:  # fmt: skip
    """Lots of these periods, by what they are ranked by; an empty `by` takes what most jobs have a word for."""
    by = by or _default_grouping(usage)
    currency = single_currency(usage)
    sums_by_row = _sums_by_row(usage, by, currency)
    rows = {
        name: _merged_sum((sums_by_period[n] for n in sorted(sums_by_period)), currency)
        for name, sums_by_period in sums_by_row.items()
    }
    total = _merged_sum(rows.values(), currency)
    shown = [number for number, period in enumerate(periods) if period.end > start and period.start < end]
    sums_by_number = {
        n: _merged_sum((sums_by_period[n] for sums_by_period in sums_by_row.values() if n in sums_by_period), currency)
        for n in shown
    }
    lines = [
        row_sum.summary_row(
            name, about=_job_description(row_sum.identity, by), track=_products_by_period(sums_by_row[name], shown)
        )
        for name, row_sum in rows.items()
    ]
    return UsageSummary(
        about=about,
        by=by,
        every=every,
        start=start,
        end=end,
        source=source,
        currency=currency,
        whole=total.summary_row("all"),
        rows=tuple(
            sorted(
                lines,
                key=lambda summary_row: (
                    -(summary_row.lost_money or 0.0),
                    -summary_row.lost_gpu_hours,
                    summary_row.name,
                ),
            )
        ),
        parts=total.parts(),
        trend=tuple(_trend_point(sums_by_number[n], periods[n]) for n in shown),
        models=tuple(sorted({model for record in usage for model in record.models})),
        fleet=fleet,
        unseen=(*unseen, *_unpriced_notes(usage, currency)),
        simulated=simulated,
    )


def _sums_by_row(usage: Iterable[UsageRecord], by: str, currency: str) -> dict[str, dict[int, _UsageSum]]:
    """Each row's sums by period: every lot is added up once, and all else is sums of these."""
    sums: dict[str, dict[int, _UsageSum]] = defaultdict(dict)
    for record in usage:
        sums_by_period = sums[row_name(record, by)]
        if record.period not in sums_by_period:
            sums_by_period[record.period] = _UsageSum(currency)
        sums_by_period[record.period].add(record)
    return sums


def _merged_sum(sums: Iterable[_UsageSum], currency: str) -> _UsageSum:
    result = _UsageSum(currency)
    for usage_sum in sums:
        result.merge(usage_sum)
    return result


def _products_by_period(sums_by_period: Mapping[int, _UsageSum], shown: Iterable[int]) -> tuple[float | None, ...]:
    return tuple(sums_by_period[n].layer_ratios.product if n in sums_by_period else None for n in shown)


def single_currency(usage: Iterable[UsageRecord]) -> str:
    """The one that there is; empty: none, or several."""
    currencies = {currency for record in usage for currency in record.money} - {NO_PRICE.currency}
    return currencies.pop() if len(currencies) == 1 else ""


def _unpriced_notes(usage: Iterable[UsageRecord], currency: str) -> tuple[str, ...]:
    if not currency:
        return ("no price, or several currencies: amounts are GPU-hours, and who lost most of them is first",)
    hours = sum(sum(record.seconds.values()) for record in usage if currency not in record.money) / HOUR_SECONDS
    if hours <= 0:
        return ()
    return (f"{hours:,.2f} GPU-hours have no price: they are in the hours, and not in the money",)


def _default_grouping(usage: Iterable[UsageRecord]) -> str:
    jobs = {
        (record.identity.cluster, record.identity.job_id): record.identity for record in usage if record.identity.job_id
    }
    counts = {by: sum(bool(getattr(identity, by)) for identity in jobs.values()) for by in ("user", "namespace")}
    best = max(counts, key=lambda by: counts[by])
    return best if counts[best] else "job"


def row_name(record: UsageRecord, by: str) -> str:
    """In which row it is."""
    if not record.attributed:
        return UNATTRIBUTED
    if not record.identity.job_id:
        return NOBODY
    return record.identity.job_id if by == "job" else getattr(record.identity, by) or UNNAMED


def _job_description(identity: JobIdentity | None, by: str) -> str:
    return (
        ""
        if identity is None or by != "job"
        else " ".join(filter(None, (identity.name, identity.user and f"of {identity.user}")))
    )


def _trend_point(period_sum: _UsageSum, period: Period) -> TrendPoint:
    return TrendPoint(
        start=period.start,
        end=period.end,
        gpu_hours=period_sum.total / HOUR_SECONDS,
        product=period_sum.layer_ratios.product,
        lost_gpu_hours=period_sum.lost_amount(period_sum.seconds) / HOUR_SECONDS,
        lost_money=period_sum.money_or_none(period_sum.lost_amount(period_sum.money)),
    )
