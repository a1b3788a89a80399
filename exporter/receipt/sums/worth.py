"""GPUs, a higher eMFU, own or rent: a summary's tables of what it is worth. Owns the words; refuses layout and sums."""

from collections.abc import Iterator

from exporter.receipt.sums.summary import Fleet, Raised, Rent, Summary
from exporter.receipt.tables import Row, Table
from exporter.wording import NOTHING, amount, elapsed, percent

_AT_LEAST = 0.05
"""GPUs: less is not worth a sentence."""
_LARGE = 100_000


def worth_tables(found: Summary) -> Iterator[Table]:
    """What a change would give back, and what others ask."""
    if found.raised:
        prose = tuple(_raised(each, found) for each in found.raised)
        yield Table(title="What a higher eMFU would give back", prose=prose)
    if found.rents:
        head = ("Own or rent", "a GPU-hour", "useful", "a useful GPU-hour", "own pays from")
        yield Table(head=head, rows=tuple(_rents(found)), prose=tuple(_rented(found)))


def fleet_table(fleet: Fleet, found: Summary) -> Table:
    """How many GPUs there are, and how many somebody has."""
    return Table(title="GPUs", rows=tuple(_fleet(fleet, found)))


def gpus(count: float) -> str:
    """To a tenth: beyond it a scrape's moment is told, and no GPU."""
    return amount(round(count, 1))


def figure(value: float) -> str:
    """Cents of a large sum are noise."""
    return f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:,.2f}"


def _fleet(fleet: Fleet, found: Summary) -> Iterator[Row]:
    if fleet.gpus is not None:
        yield "paid for, on average", gpus(fleet.gpus)
    of = f" (means of {elapsed(fleet.grain_seconds)})" if fleet.grain_seconds else ""
    if fleet.held_peak is not None:
        yield "allocated, at the peak", f"{gpus(fleet.held_peak)}{of}"
    yield "allocated, on average", gpus(fleet.held)
    idle = fleet.idle
    if idle is not None and idle >= _AT_LEAST:
        yield "kept for the peak, and idle", f"{gpus(idle)} GPUs on average{_worth(idle, found)}"
    if fleet.gpus is not None and fleet.gpus - fleet.held >= _AT_LEAST:
        yield (
            "held by nobody",
            f"{gpus(fleet.gpus - fleet.held)} GPUs on average{_worth(fleet.gpus - fleet.held, found)}",
        )


def _worth(gpus: float, found: Summary) -> str:
    price = found.per_gpu_hour
    return "" if price is None else f", {figure(gpus * found.hours * price)} {found.currency}"


def _raised(each: Raised, found: Summary) -> str:
    money = "" if each.money is None else f", {figure(each.money)} {found.currency} in this time"
    step = f"eMFU {percent(found.whole.layers.emfu)} -> {percent(each.emfu)}"
    more = f"the work of {gpus(each.gpus)} more GPUs{money}"
    return f"{step}: {more}; or the same work in {percent(each.time_saved)} less time"


def _rents(found: Summary) -> Iterator[Row]:
    own, product = found.per_gpu_hour, found.whole.layers.product
    useful = found.rents[0].own_per_useful_hour
    yield "own", _price(own, found), percent(product), _price(useful, found), ""
    for each in found.rents:
        yield (
            f"rent {each.name}", _price(each.per_gpu_hour, found), percent(each.utilisation),
            _price(each.per_useful_hour, found), percent(each.break_even),
        )  # fmt: skip


def _price(value: float | None, found: Summary) -> str:
    return NOTHING if value is None else f"{value:,.2f} {found.currency}"


def _rented(found: Summary) -> Iterator[str]:
    for each in found.rents:
        yield f"{each.name}: {_verdict(each, found)}"


def _verdict(each: Rent, found: Summary) -> str:
    own, money = each.own_per_useful_hour, found.whole.money
    if own is None or each.instead is None or money is None:
        return "nothing of what is owned was useful, so any rent is cheaper an hour of use"
    even = (
        f"own GPUs pay from {percent(each.break_even)} useful on; here it is {percent(found.whole.layers.product)}"
        if each.break_even <= 1
        else "no own GPU at this price can be as cheap"
    )
    saved = money - each.instead
    word = "less" if saved >= 0 else "more"
    there = f"{figure(each.instead)} {found.currency}, {figure(abs(saved))} {word}"
    return f"the same useful hours would have cost {there}; {even}"
