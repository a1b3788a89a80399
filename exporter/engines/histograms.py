"""Histograms of a metrics page: what came between two of them, and what that says of latency.

Owns the arithmetic. Refuses names and units: those are the engines'.
"""

from itertools import accumulate
from math import inf, isfinite

from msgspec import Struct

from exporter.core.model import Latency


class Histogram(Struct, frozen=True):
    """Cumulative buckets, as Prometheus has them."""

    bounds: tuple[float, ...]
    """Upper bounds, rising; the last is infinite."""
    counts: tuple[float, ...]
    """Values up to each bound."""
    total: float
    """Sum of all values."""

    @property
    def count(self) -> float:
        """How many values."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self.total / self.count if self.count > 0 else None

    def since(self, before: "Histogram") -> "Histogram | None":
        """What came after `before`; None where the two cannot be compared: other buckets, or fewer values."""
        if self.bounds != before.bounds or self.total < before.total:
            return None
        grown = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        if min(grown) < 0:
            return None
        # A page read while it is written to may show a lower bucket ahead of a higher one.
        return Histogram(self.bounds, tuple(accumulate(grown, max)), self.total - before.total)

    def quantile(self, share: float) -> float:
        """Linear within its bucket, the first beginning at 0; beyond the last finite bound, that bound.

        As PromQL's histogram_quantile does it. Needs at least one value.
        """
        rank = share * self.count
        place = next(i for i, count in enumerate(self.counts) if count >= rank)
        if not isfinite(self.bounds[place]):
            return self.bounds[place - 1] if place else 0.0
        low, below = (self.bounds[place - 1], self.counts[place - 1]) if place else (min(0.0, self.bounds[0]), 0.0)
        inside = self.counts[place] - below
        return low + (self.bounds[place] - low) * ((rank - below) / inside if inside else 1.0)

    def latency(self, kind: str) -> Latency | None:
        """Its three quantiles; None without values."""
        if self.count <= 0:
            return None
        return Latency(kind, self.quantile(0.50), self.quantile(0.95), self.quantile(0.99))


def joined(buckets: dict[float, list[float]], total: float, *, scale: float = 1.0) -> Histogram | None:
    """Of several series one: `buckets` has each series' count by upper bound. None without an infinite bucket.

    Only bounds that all series have count: a sum over fewer would not be cumulative.
    """
    series = len(buckets.get(inf, ()))
    if not series:
        return None
    bounds = sorted(bound for bound, counts in buckets.items() if len(counts) == series)
    counts = accumulate((sum(buckets[bound]) for bound in bounds), max)
    return Histogram(tuple(bound * scale for bound in bounds), tuple(counts), total * scale)
