"""Defines what a GPU costs, and selects the price that holds for a model, a pool and a moment.

Adds up no money: a price is a gauge beside the counters of seconds, so a wrong price can be corrected without touching
the ledger.
"""

from collections.abc import Iterable

from msgspec import Struct

ANY_MODEL = "*"


class Price(Struct, frozen=True):
    """What an hour of one GPU costs."""

    per_gpu_hour: float
    currency: str = "USD"
    model: str = ANY_MODEL
    """The driver's full name for the board, or its name in the table of specifications."""
    pool: str = ""
    """Only on nodes of that pool; empty: on any."""
    basis: str = "paid"
    """paid: every second of the GPU costs; allocated: only those in which somebody has it."""
    valid_from: int = 0
    """Unix nanoseconds."""

    @property
    def per_unheld_hour(self) -> float:
        """What an hour costs in which nobody has the GPU."""
        return 0.0 if self.basis == "allocated" else self.per_gpu_hour


NO_PRICE = Price(1.0, currency="GPU-hours")
"""Without a price every sum of money is one of GPU-hours: one an hour."""


def price_at(prices: Iterable[Price], *, model: str, spec: str, pool: str, wall_ns: int) -> Price:
    """The price of a GPU at a moment: of those that fit, the one that names more, then the latest; else NO_PRICE."""
    matching = [
        price
        for price in prices
        if price.model in (ANY_MODEL, model, spec) and price.pool in ("", pool) and price.valid_from <= wall_ns
    ]
    return max(matching, key=_specificity, default=NO_PRICE)


def _specificity(price: Price) -> tuple[bool, bool, int]:
    return price.model != ANY_MODEL, price.pool != "", price.valid_from


class Terms(Struct, frozen=True, kw_only=True):
    """What the operator has said about this node's place, prices and exemptions."""

    node: str = ""
    """Its name, as its scheduler calls it."""
    pool: str = ""
    prices: tuple[Price, ...] = ()
    per_kwh: float | None = None
    per_kwh_currency: str = ""
    grams_co2_per_kwh: float | None = None
    idle_budget: float | None = None
    """Of the whole cluster, an hour."""
    idle_budget_currency: str = ""
    exemptions: tuple[tuple[str, str, float], ...] = ()
    """Name, reason, expiry in Unix seconds."""
