"""What a GPU costs: prices, and which of them holds.

Owns the choice of a price. Refuses to add up money: a price is a gauge beside the counters of seconds, so that a
price that was typed in wrongly can be mended without touching the ledger.
"""

from collections.abc import Iterable

from msgspec import Struct

ANY = "*"


class Price(Struct, frozen=True):
    """What an hour of one GPU costs."""

    per_gpu_hour: float
    currency: str = "USD"
    model: str = ANY
    """The driver's full name for the board, or its name in the table of specifications."""
    pool: str = ""
    """Only on nodes of that pool; empty: on any."""
    basis: str = "paid"
    """paid: every second of the GPU costs; allocated: only those in which somebody has it."""
    valid_from: int = 0
    """Unix nanoseconds."""

    @property
    def of_nobody(self) -> float:
        """What an hour costs in which nobody has the GPU."""
        return 0.0 if self.basis == "allocated" else self.per_gpu_hour


NO_PRICE = Price(1.0, currency="GPU-hours")
"""Without a price every sum of money is one of GPU-hours: one an hour."""


def price_at(prices: Iterable[Price], *, model: str, spec: str, pool: str, wall_ns: int) -> Price:
    """The price of a GPU at a moment: of those that fit, the one that names more, then the latest; else NO_PRICE."""
    fitting = [
        price
        for price in prices
        if price.model in (ANY, model, spec) and price.pool in ("", pool) and price.valid_from <= wall_ns
    ]
    return max(fitting, key=_how_close, default=NO_PRICE)


def _how_close(price: Price) -> tuple[bool, bool, int]:
    return price.model != ANY, price.pool != "", price.valid_from


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
