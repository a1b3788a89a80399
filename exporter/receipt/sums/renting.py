"""Own or rent, and what a higher eMFU gives back. Owns both comparisons; refuses to know where a summary is from.

A GPU-hour of which a share is useful costs its price over that share for each useful hour, one's own like another's.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from exporter.receipt.sums.summary import Raised, Rent, Summary

_OFFER = re.compile(r"(?:(?P<name>[^=@]+)=)?(?P<price>\d+(?:\.\d+)?|\.\d+)@(?P<share>\d+(?:\.\d+)?|\.\d+)(?P<sign>%?)")


_SAME = 0.0005
"""Ratios that read the same."""


class Offer(Struct, frozen=True):
    """What somebody asks for an hour of a GPU, and the share of that hour that would be useful there."""

    name: str
    per_gpu_hour: float
    utilisation: float


def offer(words: str) -> Offer:
    """Of `4.00@0.95`, `4.00@95%` or `name=4.00@0.95`; raises ValueError, which says what is wrong."""
    found = _OFFER.fullmatch(words.strip())
    if found is None:
        raise ValueError(f"{words!r} is not PRICE@UTILISATION, such as 4.00@0.95 or cloud=4.00@95%")
    price, share = float(found["price"]), float(found["share"]) / (100 if found["sign"] else 1)
    if price <= 0:
        raise ValueError(f"{words!r}: a price is above 0")
    if not 0 < share <= 1:
        raise ValueError(f"{words!r}: the utilisation is above 0 and at most 1, or 100%")
    return Offer(found["name"] or f"{price:.2f} at {100 * share:g} %", price, share)


def rented(found: Summary, offer: Offer) -> Rent:
    """The offer beside what is owned; raises ValueError where that has no price."""
    own, product = found.per_gpu_hour, found.whole.layers.product
    if own is None:
        raise ValueError(
            "--rent: what is owned has no price, or several currencies, so there is nothing to compare with: give"
            " [prices] in the configuration of the daemons"
        )
    useful = offer.per_gpu_hour / offer.utilisation
    return Rent(
        name=offer.name,
        per_gpu_hour=offer.per_gpu_hour,
        utilisation=offer.utilisation,
        per_useful_hour=useful,
        own_per_useful_hour=own / product if product else None,
        break_even=own / useful,
        instead=None if product is None else found.whole.gpu_hours * product * useful,
    )


def raised(found: Summary, emfu: float) -> Raised | None:
    """What it would give back; None where it is that high already, or not known."""
    known = found.whole.layers
    if known.gau is None or known.ectr is None or not known.emfu or emfu - known.emfu < _SAME:
        return None
    share = known.gau * known.ectr * (emfu - known.emfu)
    return Raised(
        emfu=emfu,
        gpus=found.gpus * share,
        gpu_hours=found.whole.gpu_hours * share,
        money=None if found.whole.money is None else found.whole.money * share,
        time_saved=1.0 - known.emfu / emfu,
    )


def with_more(found: Summary, *, offers: tuple[Offer, ...] = (), emfu: tuple[float, ...] = ()) -> Summary:
    """The same with these comparisons; raises ValueError."""
    better = (raised(found, each) for each in emfu)
    return replace(
        found,
        rents=tuple(rented(found, each) for each in offers),
        raised=tuple(each for each in better if each is not None),
    )
