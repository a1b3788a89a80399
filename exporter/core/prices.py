"""Defines GPU prices, and selects the price that applies to a model, a pool and a moment.

Costs are not accumulated: a price is a gauge beside the counters of seconds, so a wrong price can be corrected later
without touching the ledger.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from msgspec import Struct

from exporter.core.model import Device

ANY_MODEL = "*"


class Price(Struct, frozen=True):
    """Price of one GPU-hour."""

    per_gpu_hour: float
    currency: str = "USD"
    model: str = ANY_MODEL
    """The driver's full name of the board, or its name in the specifications table; ANY_MODEL: all."""
    pool: str = ""
    """Node pool to which the price applies; empty: any."""
    basis: str = "paid"
    """paid: every second is charged; allocated: only allocated seconds are."""
    valid_from: int = 0
    """Unix nanoseconds."""

    @property
    def per_unheld_hour(self) -> float:
        """Price of an unallocated GPU-hour."""
        return 0.0 if self.basis == "allocated" else self.per_gpu_hour


NO_PRICE = Price(1.0, currency="GPU-hours")
"""Used if no price is configured: costs are then in GPU-hours."""


def price_at(prices: Iterable[Price], *, model: str, spec: str, pool: str, wall_ns: int) -> Price:
    """The price of a GPU at a moment: the most specific match, then the latest; else NO_PRICE."""
    matching = [
        price
        for price in prices
        if price.model in (ANY_MODEL, model, spec) and price.pool in ("", pool) and price.valid_from <= wall_ns
    ]
    return max(matching, key=_specificity, default=NO_PRICE)


def unpriced_models(prices: Iterable[Price], devices: Iterable[Device], *, pool: str, wall_ns: int) -> tuple[str, ...]:
    """Models of boards that none of the prices fits, sorted; empty if there are no prices at all."""
    rows = tuple(prices)
    boards = {(each.model, each.spec.name if each.spec is not None else "") for each in devices if not each.parent}
    return tuple(
        sorted(
            model
            for model, spec in boards
            if rows and model and price_at(rows, model=model, spec=spec, pool=pool, wall_ns=wall_ns) is NO_PRICE
        )
    )


def unmatched_models(prices: Iterable[Price], devices: Iterable[Device]) -> tuple[str, ...]:
    """Models that prices name and no board has, sorted; on a node of a mixed fleet these may be other nodes'."""
    boards = [each for each in devices if not each.parent]
    here = {each.model for each in boards} | {each.spec.name for each in boards if each.spec is not None}
    return tuple(sorted({price.model for price in prices} - here - {ANY_MODEL}))


def _specificity(price: Price) -> tuple[bool, bool, int]:
    return price.model != ANY_MODEL, price.pool != "", price.valid_from


JOULES_PER_KWH = 3.6e6


def energy_amount(joules: float, per_kwh: float) -> float:
    """Return the amount, of money or of CO2, for so much energy."""
    return joules / JOULES_PER_KWH * per_kwh


class EnergyTerms(Struct, frozen=True):
    """What a kilowatt-hour costs; None: not known."""

    price_per_kwh: float | None = None
    currency: str = ""

    def money(self, joules: float) -> dict[str, float]:
        """Return the price of energy by currency; empty if it is not known, or there is no energy."""
        price = self.price_per_kwh
        return {} if price is None or not joules else {self.currency: energy_amount(joules, price)}


HOUR_SECONDS = 3600
_ROUNDING_SECONDS = 1e-3


class CarbonIntensity(Struct, frozen=True):
    """Carbon intensity of the electricity, grams of CO2 per kilowatt-hour: of known hours, and otherwise."""

    otherwise: float | None = None
    """Of all hours that are not in `hours`; None: not known."""
    hours: tuple[int, ...] = ()
    """Hours since 1970-01-01 00:00 UTC, ascending."""
    grams: tuple[float, ...] = ()
    """The intensity of each of `hours`."""

    def at(self, seconds: float) -> float | None:
        """Return the intensity of the hour of a moment, Unix seconds."""
        found = bisect_left(self.hours, hour := int(seconds // HOUR_SECONDS))
        known = found < len(self.hours) and self.hours[found] == hour
        return self.grams[found] if known else self.otherwise

    def emitted(self, joules: float) -> float | None:
        """Return the grams of CO2 of energy of unknown hours; None if not known, or if these differ by the hour."""
        return None if self.hours or self.otherwise is None else energy_amount(joules, self.otherwise)

    def mean_of_hours(self, start: float, end: float) -> tuple[float, float]:
        """Return the time-mean of an interval with 0 where `hours` has no value, and the share of that time."""
        end, known, weighted = max(end, start + 1.0), 0.0, 0.0
        first = bisect_left(self.hours, start // HOUR_SECONDS)
        last = bisect_right(self.hours, end // HOUR_SECONDS)
        for hour, grams in zip(self.hours[first:last], self.grams[first:last], strict=True):
            seconds = min(end, (hour + 1) * HOUR_SECONDS) - max(start, hour * HOUR_SECONDS)
            known, weighted = known + seconds, weighted + seconds * grams
        length, unknown = end - start, end - start - known
        return weighted / length, unknown / length if unknown > _ROUNDING_SECONDS else 0.0


class Terms(Struct, frozen=True, kw_only=True):
    """This node's name, pool, prices and exemptions, from the configuration."""

    node: str = ""
    """The node's name in its scheduler."""
    pool: str = ""
    prices: tuple[Price, ...] = ()
    unknown_models: tuple[str, ...] = ()
    """Models that prices name and that are in no table of specifications, perhaps because they are misspelt."""
    energy: EnergyTerms = EnergyTerms()
    carbon: CarbonIntensity = CarbonIntensity()
    idle_budget: float | None = None
    """Allowed cost of idle GPUs of the whole cluster, per hour."""
    idle_budget_currency: str = ""
    exemptions: tuple[tuple[str, str, float], ...] = ()
    """Name, reason, expiry in Unix seconds."""


def price_problems(terms: Terms, devices: Iterable[Device], *, wall_ns: int) -> Iterator[str]:
    """Yield in a sentence each which boards no price fits, and which prices fit no board here or known elsewhere."""
    boards = tuple(devices)
    if missing := unpriced_models(terms.prices, boards, pool=terms.pool, wall_ns=wall_ns):
        yield f"no row of [[prices]] fits {', '.join(missing)}: what these GPUs cost is counted in GPU-hours"
    if unknown := [model for model in unmatched_models(terms.prices, boards) if model in terms.unknown_models]:
        yield (
            f"no GPU here is called {', '.join(unknown)}, as rows of [[prices]] are, and no table of specifications"
            " knows that model: write it as `nvidia-smi -L` does"
        )
