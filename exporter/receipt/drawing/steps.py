"""The steps from the time that was paid down to the time that was useful. Owns their order; refuses to draw them."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Struct

from exporter.receipt.drawing.canvas import plain
from exporter.receipt.model import Part, Receipt
from exporter.receipt.sums.summary import Summary
from exporter.wording import percent

ORDER = ("unobserved", "gau", "ectr", "emfu", "unresolved", "useful")
LOSSES = frozenset({"gau", "ectr", "emfu"})
LITTLE = 0.005
"""Losses below half a per cent stand together, from two on, where there are many."""
_FEW = 2


class Whole(Struct, frozen=True, kw_only=True):
    """What is divided: a job's time, or that of many."""

    gpu_hours: float
    money: float | None
    currency: str
    parts: tuple[Part, ...]


class Step(Struct, frozen=True, kw_only=True):
    """It takes what is above `after` of the whole, and up to `before`."""

    name: str
    kind: str
    before: float
    after: float
    share: str
    hours: float
    money: float | None


def whole_of(found: Receipt | Summary) -> Whole:
    """Of a job, or of many."""
    of = found if isinstance(found, Receipt) else found.whole
    return Whole(gpu_hours=of.gpu_hours, money=of.money, currency=found.currency, parts=found.parts)


def kind_of(part: Part) -> str:
    """What it is drawn as. A leak of a newer daemon is one of the first layer, as in sums: lost it is in any case."""
    return part.layer if part.layer in ORDER else part.name if part.name in ORDER else "gau"


def losses(whole: Whole) -> list[Part]:
    """Leaks alone."""
    return [part for part in whole.parts if kind_of(part) in LOSSES]


def steps(whole: Whole, *, least: float = 0.0) -> list[Step]:
    """Paid first and useful last; losses of a smaller share than `least` together, by layer."""
    total = sum(part.gpu_hours for part in whole.parts)
    level = 1.0
    paid = Step(name="paid", kind="paid", before=1, after=0, share=percent(1.0), hours=whole.gpu_hours,
                money=whole.money)  # fmt: skip
    found = [paid]
    for part in _together(whole, least):
        after = max(level - part.gpu_hours / total, 0.0)
        found.append(_step(part, level, after))
        level = after
    return found if found[-1].kind == "useful" else [*found, _nothing(whole)]


def _step(part: Part, before: float, after: float) -> Step:
    return Step(name=plain(part.name), kind=kind_of(part), before=before, after=after, share=percent(part.share),
                hours=part.gpu_hours, money=part.money)  # fmt: skip


def _nothing(whole: Whole) -> Step:
    """Nothing was useful, and that is said."""
    money = None if whole.money is None else 0.0
    return Step(name="useful", kind="useful", before=0, after=0, share=percent(0.0), hours=0.0, money=money)


def _together(whole: Whole, least: float) -> Iterator[Part]:
    """In the order of the layers, the larger first."""
    for kind, of_kind in groupby(sorted(whole.parts, key=_place), key=kind_of):
        these = list(of_kind)
        small = [part for part in these if kind in LOSSES and part.share < least]
        yield from (part for part in these if part not in small)
        yield from small if len(small) < _FEW else (_sum(small),)


def _place(part: Part) -> tuple[int, float]:
    return ORDER.index(kind_of(part)), -part.gpu_hours


def _sum(small: Sequence[Part]) -> Part:
    money = None if small[0].money is None else sum(part.money or 0 for part in small)
    hours, share = sum(part.gpu_hours for part in small), sum(part.share for part in small)
    return Part(name=f"{len(small)} smaller leaks", layer=kind_of(small[0]), gpu_hours=hours, share=share, money=money)
