"""Computes means from cumulative hardware counters, once these have proved to agree with the vendor's own means.

A difference of two counters is exact over its interval and loses nothing between two samples, while a mean that the
vendor computes may describe a longer or shorter time. What a counter counts depends on the driver, so none is used
unchecked.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

_TRUSTED_AFTER = 10
"""Number of intervals over which a counter is compared with the vendor's mean before it is used."""
_RATIO_DEVIATION = 0.03
"""Largest mean difference from the vendor's ratio at which a cycle counter is used."""


class Agreement:
    """Compares two ways to measure one thing, and decides whether the exact one can be used."""

    def __init__(self, *, deviation: float = _RATIO_DEVIATION, share: float = 0.0) -> None:
        """They agree while their mean difference is at most `deviation`, plus `share` of the mean."""
        self._deviation, self._share = deviation, share
        self._compared = 0
        self._difference = self._sum = 0.0

    def add(self, exact: float, mean: float) -> bool:
        """Compare the two values of one interval; return whether they have agreed for long enough."""
        self._compared += 1
        self._difference += exact - mean
        self._sum += mean
        most = self._deviation * self._compared + self._share * self._sum
        return self._compared > _TRUSTED_AFTER and abs(self._difference) <= most


K = TypeVar("K", bound=Hashable)


class CycleCounters(Generic[K]):
    """Computes ratios from cumulative cycle counters. A counter is used if its mean is within 3 percentage points."""

    def __init__(self, elapsed: K, pairs: Mapping[K, K]) -> None:
        self._elapsed, self._pairs = elapsed, pairs
        """Key of a counter -> key of the ratio that it replaces."""
        self._before: dict[K, float] = {}
        self._agreements = {counter: Agreement() for counter in pairs}

    def reset(self) -> None:
        """Drop the counters' last values."""
        self._before = {}

    def correct(self, values: dict[K, float]) -> None:
        """Replace the ratios in one interval's `values` by those of counters that are trusted."""
        before, self._before = self._before, dict(values)
        elapsed = values.get(self._elapsed, 0.0) - before.get(self._elapsed, 0.0)
        if self._elapsed not in before or elapsed <= 0:
            return
        for counter, ratio in self._pairs.items():
            if counter in values and counter in before and ratio in values:
                exact = (values[counter] - before[counter]) / elapsed
                if self._agreements[counter].add(exact, values[ratio]) and 0.0 <= exact <= 1.0:
                    values[ratio] = exact
