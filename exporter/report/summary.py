"""Sums the GPU time of many jobs by user, account, namespace, team, job or partition, with a trend by period.

Also compares owned with rented GPUs, and estimates what a higher eMFU would save. Ratios are of sums, never averaged.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.prices import JOULES_PER_KWH, NO_PRICE
from exporter.formatting import format_amount
from exporter.report.build import LAYER_BY_LEAK, NOT_LOST, layer_ratios, waterfall_order, with_guidance
from exporter.report.energy import with_energy
from exporter.report.model import LOSS_LAYERS, JobIdentity, LayerRatios, WaterfallPart
from exporter.report.usage import NOT_SPLIT, Period, UsageRecord

HOURS_PER_YEAR = 8760.0
HOUR_SECONDS = 3600.0
"""Seconds."""


class SummaryRow(Struct, frozen=True, kw_only=True):
    """GPU time held and lost by one user, account, job and so on."""

    name: str
    about: str = ""
    """Name and user of a job; empty for other groups."""
    jobs: int
    gpu_hours: float
    coverage: float | None
    layers: LayerRatios
    money: float | None
    lost_gpu_hours: float
    lost_money: float | None
    worst: str
    """The largest leak; empty if nothing was lost."""
    energy_kwh: float | None = None
    """None if it is not known."""
    energy_money: float | None = None
    """Price of the energy; no part of `money`. None if the price of a kilowatt-hour is not known."""
    co2_kg: float | None = None
    """None if the carbon intensity of any of the energy is not known."""
    leaks: dict[str, float] = {}
    """GPU-hours by leak, the largest first."""
    track: tuple[float | None, ...] = ()
    """The product in each period; None if nothing was held or observed."""


class TrendPoint(Struct, frozen=True, kw_only=True):
    """The sums of one period."""

    start: float
    end: float
    gpu_hours: float
    product: float | None
    lost_gpu_hours: float
    lost_money: float | None


class FleetUsage(Struct, frozen=True, kw_only=True):
    """Numbers of GPUs of a whole fleet; means unless stated otherwise."""

    gpus: float | None
    """GPUs paid for; None if not known."""
    gpus_peak: float | None
    held: float
    """Allocated GPUs."""
    held_peak: float | None
    grain_seconds: float = 0.0
    """Seconds over which the values of the peak are averaged; 0 if the peak is exact."""

    @property
    def idle(self) -> float | None:
        """Peak minus mean of the allocated GPUs."""
        return None if self.held_peak is None else max(0.0, self.held_peak - self.held)


class RentComparison(Struct, frozen=True, kw_only=True):
    """Rented GPUs at a price per hour with a share of useful time, compared with the owned GPUs."""

    name: str
    per_gpu_hour: float
    utilisation: float
    per_useful_hour: float
    own_per_useful_hour: float | None
    """None if nothing was useful."""
    break_even: float
    """Useful share of the owned GPUs at which both cost the same."""
    instead: float | None
    """Price of the same useful hours if rented."""


class EmfuGain(Struct, frozen=True, kw_only=True):
    """What a higher eMFU would save, with the other layers unchanged."""

    emfu: float
    gpus: float
    """The saving as a number of GPUs at their peak."""
    gpu_hours: float
    money: float | None
    time_saved: float
    """Share of the time by which the same work would be shorter."""


class UsageSummary(Struct, frozen=True, kw_only=True):
    """The summary of many jobs. Times are Unix seconds."""

    about: str
    """The selection, such as "user ada" or "all jobs"."""
    by: str
    every: str
    start: float
    end: float
    """Start and end of the known part of the requested range."""
    source: str
    currency: str
    """Empty if no price is known, or there are several currencies."""
    energy_currency: str = ""
    """Currency of `energy_money`; empty if no price of energy is known, or there are several currencies."""
    whole: SummaryRow
    rows: tuple[SummaryRow, ...]
    """Sorted by loss, the largest first."""
    parts: tuple[WaterfallPart, ...]
    """Losses, the largest first; then useful, unresolved, unobserved."""
    trend: tuple[TrendPoint, ...]
    models: tuple[str, ...] = ()
    fleet: FleetUsage | None = None
    rents: tuple[RentComparison, ...] = ()
    raised: tuple[EmfuGain, ...] = ()
    unseen: tuple[str, ...] = ()
    """What could not be observed, in sentences."""
    simulated: bool = False
    """Whether any part is from a simulated node."""

    def json(self) -> bytes:
        """Return the summary as JSON, with derived values."""
        derived = {"hours": self.hours, "gpus": self.gpus, "work": self.work, "per_gpu_hour": self.per_gpu_hour}
        return msgspec.json.encode(msgspec.to_builtins(self) | derived)

    @property
    def losses(self) -> tuple[WaterfallPart, ...]:
        """The leaks among `parts`."""
        return tuple(part for part in self.parts if part.layer in LOSS_LAYERS)

    @property
    def hours(self) -> float:
        """Its length in hours."""
        return (self.end - self.start) / HOUR_SECONDS

    @property
    def gpus(self) -> float:
        """Mean number of GPUs."""
        return self.whole.gpu_hours / self.hours if self.hours > 0 else 0.0

    @property
    def work(self) -> float | None:
        """The useful work, as a number of GPUs at their peak."""
        return None if self.whole.layers.product is None else self.gpus * self.whole.layers.product

    @property
    def per_gpu_hour(self) -> float | None:
        """Mean price of a GPU-hour."""
        money, hours = self.whole.money, self.whole.gpu_hours
        return None if money is None or not hours else money / hours

    @property
    def times_per_year(self) -> float:
        """How often its length fits into a year."""
        return HOURS_PER_YEAR / self.hours if self.hours > 0 else 0.0


_OFFER_PATTERN = re.compile(
    r"(?:(?P<name>[^=@]+)=)?(?P<price>\d+(?:\.\d+)?|\.\d+)@(?P<share>\d+(?:\.\d+)?|\.\d+)(?P<sign>%?)"
)


_EQUAL_WITHIN = 0.0005
"""A smaller difference of two ratios does not show."""


class RentOffer(Struct, frozen=True):
    """A price of a rented GPU-hour, and the share of it that would be useful."""

    name: str
    per_gpu_hour: float
    utilisation: float


def parse_offer(text: str) -> RentOffer:
    """Parse `4.00@0.95`, `4.00@95%` or `name=4.00@0.95`. Raises ValueError with the reason."""
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
    """Compare an offer with the owned GPUs. Raises ValueError if these have no price."""
    own, product = summary.per_gpu_hour, summary.whole.layers.product
    if own is None:
        raise ValueError(
            "--rent: the owned GPUs have no price, or prices in several currencies: set [prices] in the configuration"
            " of the daemons"
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
    """Estimate the gain of a higher eMFU; None if it is that high already, or not known."""
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
    """Return the summary with these comparisons. Raises ValueError if nothing has a price."""
    gains = (emfu_gain(summary, each) for each in emfu)
    return replace(
        summary,
        rents=tuple(compare_rent(summary, each) for each in offers),
        raised=tuple(each for each in gains if each is not None),
    )


NOBODY, UNATTRIBUTED, UNNAMED = "(nobody)", "(not told)", "(none)"
"""Names of rows: unallocated GPUs, time that no job's series cover, and jobs without such a label."""
GROUPINGS = ("user", "account", "namespace", "team", "job", "partition")


def _add_times(sums: dict[str, float], amounts: Mapping[str, float], factor: float) -> None:
    for leak, value in amounts.items():
        sums[leak] += factor * value


class _UsageSum:
    """The sum of usage records."""

    def __init__(self, currency: str, energy_currency: str) -> None:
        self._currency, self._energy_currency = currency, energy_currency
        self.seconds: dict[str, float] = defaultdict(float)
        self.money: dict[str, float] = defaultdict(float)
        self.joules: dict[str, float] = defaultdict(float)
        self.energy_money: dict[str, float] = defaultdict(float)
        self.grams: dict[str, float] = defaultdict(float)
        self.intensity_known = True
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
        if record.energy:
            self._add_energy(record)
        if record.identity.job_id:
            self.jobs.add((record.identity.cluster, record.identity.job_id))
            self.identity = record.identity

    def _add_energy(self, record: UsageRecord) -> None:
        total, grams_per_kwh = sum(record.energy.values()), record.intensity.grams_per_kwh
        price = record.energy_money.get(self._energy_currency, 0.0) / total if total else 0.0
        _add_times(self.joules, record.energy, 1.0)
        if price:
            _add_times(self.energy_money, record.energy, price)
        if grams_per_kwh:
            _add_times(self.grams, record.energy, grams_per_kwh / JOULES_PER_KWH)
        self.intensity_known = self.intensity_known and grams_per_kwh is not None

    def merge(self, other: "_UsageSum") -> None:
        for name in ("seconds", "money", "joules", "energy_money", "grams"):
            mine = getattr(self, name)
            for leak, value in getattr(other, name).items():
                mine[leak] += value
        self.intensity_known = self.intensity_known and other.intensity_known
        self.jobs |= other.jobs
        self.identity = other.identity or self.identity

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def layer_ratios(self) -> LayerRatios:
        unknown = {leak: "gau" for leak in self.seconds if leak not in LAYER_BY_LEAK}  # of a newer daemon: lost time
        return layer_ratios(self.seconds, LAYER_BY_LEAK | unknown if unknown else LAYER_BY_LEAK)

    def lost_amount(self, amounts: Mapping[str, float]) -> float:
        return sum(value for leak, value in amounts.items() if leak not in NOT_LOST)

    def money_or_none(self, amount: float) -> float | None:
        return amount if self._currency else None

    def summary_row(self, name: str, *, about: str = "", track: tuple[float | None, ...] = ()) -> SummaryRow:
        losses = {leak: value for leak, value in self.seconds.items() if leak not in NOT_LOST and value > 0}
        order = sorted(losses, key=lambda leak: (-losses[leak], leak))
        total, kwh = self.total, sum(self.joules.values()) / JOULES_PER_KWH or None
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
            energy_kwh=kwh,
            energy_money=sum(self.energy_money.values()) if kwh is not None and self._energy_currency else None,
            co2_kg=sum(self.grams.values()) / 1000 if kwh is not None and self.intensity_known else None,
            leaks={leak: losses[leak] / HOUR_SECONDS for leak in order},
            track=track,
        )

    def parts(self) -> tuple[WaterfallPart, ...]:
        sums = {leak: value for leak, value in self.seconds.items() if value > 0}
        return with_energy(
            (self._waterfall_part(leak) for leak in waterfall_order(sums)),
            {} if NOT_SPLIT in self.joules else self.joules,
            money=self.energy_money if self._energy_currency else None,
            grams=self.grams if self.intensity_known else None,
        )

    def _waterfall_part(self, leak: str) -> WaterfallPart:
        part = WaterfallPart(
            name=leak,
            layer=LAYER_BY_LEAK.get(leak, "gau"),
            gpu_hours=self.seconds[leak] / HOUR_SECONDS,
            share=self.seconds[leak] / self.total,
            money=self.money_or_none(self.money[leak]),
        )
        return with_guidance(part, attrgetter("evidence"))


def summarize(
    usage: Sequence[UsageRecord], periods: Sequence[Period], *, about: str, by: str, every: str, source: str,
    start: float, end: float, fleet: FleetUsage | None = None, unseen: tuple[str, ...] = (), simulated: bool = False,
) -> UsageSummary:  # fmt: skip
    """Sum usage records of the periods, grouped by `by`; if it is empty, by the label that most jobs have."""
    by = by or _default_grouping(usage)
    currency = single_currency(record.money for record in usage)
    energy_currency = single_currency(record.energy_money for record in usage)
    empty = partial(_UsageSum, currency, energy_currency)
    sums_by_row = _sums_by_row(usage, by, empty)
    sums = {
        name: _merged_sum((by_period[n] for n in sorted(by_period)), empty) for name, by_period in sums_by_row.items()
    }
    total = _merged_sum(sums.values(), empty)
    shown = [number for number, period in enumerate(periods) if period.end > start and period.start < end]
    trend = {n: _merged_sum((each[n] for each in sums_by_row.values() if n in each), empty) for n in shown}
    rows = [
        row.summary_row(name, about=_job_description(row.identity, by), track=_products(sums_by_row[name], shown))
        for name, row in sums.items()
    ]
    return UsageSummary(
        about=about,
        by=by,
        every=every,
        start=start,
        end=end,
        source=source,
        currency=currency,
        energy_currency=energy_currency,
        whole=total.summary_row("all"),
        rows=tuple(sorted(rows, key=lambda row: (-(row.lost_money or 0.0), -row.lost_gpu_hours, row.name))),
        parts=total.parts(),
        trend=tuple(_trend_point(trend[n], periods[n]) for n in shown),
        models=tuple(sorted({model for record in usage for model in record.models})),
        fleet=fleet,
        unseen=(*unseen, *_unpriced_notes(usage, currency), *_unpriced_energy_notes(usage, energy_currency)),
        simulated=simulated,
    )


def _sums_by_row(
    usage: Iterable[UsageRecord], by: str, empty: Callable[[], _UsageSum]
) -> dict[str, dict[int, _UsageSum]]:
    """Return each row's sums by period. Records are read once; all other sums are sums of these."""
    sums: dict[str, dict[int, _UsageSum]] = defaultdict(lambda: defaultdict(empty))
    for record in usage:
        sums[row_name(record, by)][record.period].add(record)
    return sums


def _merged_sum(sums: Iterable[_UsageSum], empty: Callable[[], _UsageSum]) -> _UsageSum:
    result = empty()
    for usage_sum in sums:
        result.merge(usage_sum)
    return result


def _products(by_period: Mapping[int, _UsageSum], shown: Iterable[int]) -> tuple[float | None, ...]:
    return tuple(by_period[n].layer_ratios.product if n in by_period else None for n in shown)


def single_currency(amounts: Iterable[Mapping[str, float]]) -> str:
    """Return the only currency of amounts by currency; empty if there is none, or several."""
    currencies = {currency for amount in amounts for currency in amount} - {NO_PRICE.currency}
    return currencies.pop() if len(currencies) == 1 else ""


def _unpriced_notes(usage: Iterable[UsageRecord], currency: str) -> tuple[str, ...]:
    if not currency:
        return ("no price, or several currencies: amounts are GPU-hours, and who lost most of them is first",)
    hours = sum(sum(record.seconds.values()) for record in usage if currency not in record.money) / HOUR_SECONDS
    if hours <= 0:
        return ()
    return (f"{hours:,.2f} GPU-hours have no price: they are in the hours, and not in the money",)


def _unpriced_energy_notes(usage: Sequence[UsageRecord], currency: str) -> Iterator[str]:
    if not currency:
        if any(record.energy_money for record in usage):
            yield "the price of energy has several currencies: what it cost is not added up"
        return
    joules = sum(sum(record.energy.values()) for record in usage if currency not in record.energy_money)
    if joules > 0:
        kwh = format_amount(joules / JOULES_PER_KWH)
        yield f"{kwh} kWh have no price: they are in the energy, and not in what it cost"


def _default_grouping(usage: Iterable[UsageRecord]) -> str:
    identities = (record.identity for record in usage if record.identity.job_id)
    jobs = {(identity.cluster, identity.job_id): identity for identity in identities}
    counts = {by: sum(bool(getattr(identity, by)) for identity in jobs.values()) for by in ("user", "namespace")}
    best = max(counts, key=lambda by: counts[by])
    return best if counts[best] else "job"


def row_name(record: UsageRecord, by: str) -> str:
    """Return the name of the row in which a record is counted."""
    if not record.attributed:
        return UNATTRIBUTED
    if not record.identity.job_id:
        return NOBODY
    return record.identity.job_id if by == "job" else getattr(record.identity, by) or UNNAMED


def _job_description(identity: JobIdentity | None, by: str) -> str:
    if identity is None or by != "job":
        return ""
    shown = identity.shown_id if identity.shown_id != identity.job_id else ""
    return " ".join(filter(None, (shown, identity.name, identity.user and f"of {identity.user}")))


def _trend_point(period_sum: _UsageSum, period: Period) -> TrendPoint:
    return TrendPoint(
        start=period.start,
        end=period.end,
        gpu_hours=period_sum.total / HOUR_SECONDS,
        product=period_sum.layer_ratios.product,
        lost_gpu_hours=period_sum.lost_amount(period_sum.seconds) / HOUR_SECONDS,
        lost_money=period_sum.money_or_none(period_sum.lost_amount(period_sum.money)),
    )
