"""The node's account as the JSON API says it: what was paid for, where it went, in time, energy and money.

Owns these shapes, and how a Snapshot becomes them. Refuses to guess: where only allocated time costs, the money of a
window is not known, for a window does not remember in which part of it a GPU was held.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from exporter.core.leaks import NAMES
from exporter.core.ledger import Book, Mark
from exporter.core.model import PPM, SECOND, State
from exporter.core.money import NO_PRICE, Price, Terms
from exporter.core.snapshot import GpuView, Snapshot, price_of
from exporter.http.api import NodeOut, WindowOut, node_of, window_of

_HOUR = 3600 * SECOND
_NOTHING = Mark(Book(0))
"""Every book before its first entry."""
Money = dict[str, dict[str, float]]


class AccountOut(Struct, frozen=True, kw_only=True):
    """A stretch of time of the node: the layers, and where its GPU-seconds, joules and money went."""

    window: WindowOut
    energy_joules: dict[str, float] | None
    """By leak; null: it is known since the start alone."""
    money: Money | None
    """By currency, then by leak, at the prices of now. Empty: no price is configured. null: not known for a window
    where only allocated time costs (prices with basis = "allocated")."""


class AccountsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/node."""

    node: NodeOut
    gpus: float
    """Whole GPUs that are paid for now: instances and what is left of their board count as their part."""
    states: dict[str, int]
    """GPUs and instances in each state."""
    prices: dict[str, float]
    """What these GPUs cost an hour while they are held, by currency; empty: no price is configured."""
    last_5_minutes: AccountOut
    last_hour: AccountOut
    since_start: AccountOut
    """Of the books: GPUs that are gone are in it."""


def accounts_out(snapshot: Snapshot, age: int) -> AccountsOut:
    """The node's account; `age` is the snapshot's, in nanoseconds."""
    node, found = node_of(snapshot, age), Counter(gpu.state for gpu in snapshot.gpus)
    priced = [(gpu, _price(gpu, snapshot)) for gpu in snapshot.gpus]
    return AccountsOut(
        node=node,
        gpus=sum(gpu.device.weight for gpu in snapshot.gpus) / PPM,
        states={state.value: found[state] for state in State},
        prices=_hourly(priced),
        last_5_minutes=AccountOut(window=node.last_5_minutes, energy_joules=None, money=_lately(priced, "short")),
        last_hour=AccountOut(window=node.last_hour, energy_joules=None, money=_lately(priced, "hour")),
        since_start=_since_start(snapshot),
    )


def priced_at(terms: Terms, model: str, spec: str, wall: int) -> Price | None:
    """What an hour costs; None where no price fits."""
    price = price_of(terms, model=model, spec=spec, wall=wall)
    return None if price.currency == NO_PRICE.currency else price


def _price(gpu: GpuView, snapshot: Snapshot) -> Price | None:
    spec = gpu.device.spec.name if gpu.device.spec is not None else ""
    return priced_at(snapshot.meta.terms, gpu.device.model, spec, snapshot.wall)


def _hourly(priced: Iterable[tuple[GpuView, Price | None]]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for gpu, price in priced:
        if price is not None:
            sums[price.currency] += price.per_gpu_hour * gpu.device.weight / PPM  # type: ignore[assignment]
    return dict(sums)


def _lately(priced: Iterable[tuple[GpuView, Price | None]], window: str) -> Money | None:
    """A book's window by leak, in money; None where one of the prices asks who held the GPU."""
    found: Money = {}
    for gpu, price in priced:
        if price is None:
            continue
        if price.of_nobody != price.per_gpu_hour:
            return None
        _add(found, price, gpu.counters.parts(getattr(gpu.counters, window)))
    return found


def _since_start(snapshot: Snapshot) -> AccountOut:
    gpus = (*snapshot.gpus, *snapshot.gone)
    found: Money = {}
    for gpu in gpus:
        price, unheld = _price(gpu, snapshot), dict(gpu.unheld)
        if price is not None:
            parts = gpu.counters.now.parts
            _add(found, price, [part - unheld.get(index, 0) for index, part in enumerate(parts)])
            _add(found, price, [unheld.get(index, 0) for index in range(len(parts))], hourly=price.of_nobody)
    joules = [sum(column) for column in zip(*(gpu.counters.energy for gpu in gpus), strict=True)] or [0.0] * len(NAMES)
    return AccountOut(
        window=window_of([(gpu.counters, _NOTHING) for gpu in gpus]),
        energy_joules=dict(zip(NAMES, joules, strict=True)),
        money=found,
    )


def _add(found: Money, price: Price, parts: Iterable[int], *, hourly: float | None = None) -> None:
    """Nanoseconds by leak, in the order of NAMES, at a price."""
    sums = found.setdefault(price.currency, dict.fromkeys(NAMES, 0.0))
    for name, part in zip(NAMES, parts, strict=True):
        sums[name] += part / _HOUR * (price.per_gpu_hour if hourly is None else hourly)
