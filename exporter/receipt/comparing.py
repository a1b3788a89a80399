"""Two receipts side by side. Owns what can be said of two jobs and of neither alone; refuses to ask for anything.

Scaling efficiency is throughput a GPU of the larger job over that of the smaller (accounting, section 9). Time and cost
to the same quality are to the best that both have reached.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from exporter.receipt.model import Quality, Receipt


class Difference(Struct, frozen=True, kw_only=True):
    """Share of a job's time that a leak took, or that was useful, in each."""

    name: str
    layer: str
    first: float
    second: float

    @property
    def grown(self) -> float:
        """How much more it is in the second."""
        return self.second - self.first


class Same(Struct, frozen=True, kw_only=True):
    """When each first had a quality that both have reached, since its own start; cost in its own unit."""

    name: str
    quality: float
    seconds: tuple[float, float]
    cost: tuple[float, float]


class Comparison(Struct, frozen=True, kw_only=True):
    """Two jobs."""

    first: Receipt
    second: Receipt
    of: str
    """What throughput counts: tokens, samples; empty: they have none in common."""
    per_gpu: tuple[float, float] | None
    """Throughput a second and GPU."""
    per_cost: tuple[float, float] | None
    """Throughput per unit of money, or per GPU-hour; None where their units differ."""
    scaling: float | None
    """None: they are of one size, or have no throughput in common."""
    differences: tuple[Difference, ...]
    """The largest first."""
    same: tuple[Same, ...]

    def json(self) -> bytes:
        """For programs."""
        return msgspec.json.encode(self)


def compared(first: Receipt, second: Receipt) -> Comparison:
    """Hold one against the other."""
    of, per_gpu = _throughput(first, second)
    return Comparison(
        first=first,
        second=second,
        of=of,
        per_gpu=per_gpu,
        per_cost=_per_cost(first, second, of),
        scaling=_scaling(first, second, per_gpu),
        differences=tuple(sorted(_differences(first, second), key=lambda each: (-abs(each.grown), each.name))),
        same=tuple(_same(first, second)),
    )


def _throughput(first: Receipt, second: Receipt) -> tuple[str, tuple[float, float] | None]:
    for of in ("tokens", "samples"):
        a, b = (getattr(each.truth, f"{of}_per_gpu_second", None) for each in (first, second))
        if a and b:
            return of, (a, b)
    return "", None


def _per_cost(first: Receipt, second: Receipt, of: str) -> tuple[float, float] | None:
    """The inverse of what one costs."""
    name = f"cost_per_{of.removesuffix('s')}"
    a, b = (getattr(each.truth, name, None) for each in (first, second))
    return (1 / a, 1 / b) if of and a and b and first.unit == second.unit else None


def _scaling(first: Receipt, second: Receipt, per_gpu: tuple[float, float] | None) -> float | None:
    if per_gpu is None or first.gpus == second.gpus:
        return None
    a, b = per_gpu
    return a / b if first.gpus > second.gpus else b / a


def _differences(first: Receipt, second: Receipt) -> Iterator[Difference]:
    layers = {part.name: part.layer for each in (first, second) for part in each.parts}
    a, b = ({part.name: part.share for part in each.parts} for each in (first, second))
    for name, layer in layers.items():
        yield Difference(name=name, layer=layer, first=a.get(name, 0.0), second=b.get(name, 0.0))


def _same(first: Receipt, second: Receipt) -> Iterator[Same]:
    known = {quality.name: quality for quality in second.truth.qualities} if second.truth else {}
    for a in first.truth.qualities if first.truth else ():
        b = known.get(a.name)
        if b is None or a.rises != b.rises or not (a.track and b.track):
            continue
        both = min(_best(a), _best(b)) if a.rises else max(_best(a), _best(b))
        times = _reached(a, both), _reached(b, both)
        if times[0] is not None and times[1] is not None:
            costs = times[0] * first.per_hour / 3600, times[1] * second.per_hour / 3600
            yield Same(name=a.name, quality=both, seconds=(times[0], times[1]), cost=costs)


def _best(quality: Quality) -> float:
    """Of the values whose time is known."""
    values = [value for _, value in quality.track]
    return max(values) if quality.rises else min(values)


def _reached(quality: Quality, value: float) -> float | None:
    """Seconds to the first moment at which it was as good; None where only one is known at which it was better.

    Of a track only the target may have been kept: when it was half as good nobody can say.
    """
    at, had = next(point for point in quality.track if (point[1] >= value if quality.rises else point[1] <= value))
    return at if len(quality.track) > 1 or had == value or not at else None
