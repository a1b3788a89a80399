"""Figures of a job's series, whoever has kept them. Owns sums over nodes, and what may be averaged; refuses asking."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import NamedTuple, Protocol, TypeVar

from exporter.receipt.asking import Place, Sample

Key = TypeVar("Key")


class Count(NamedTuple):
    """What a counter of one daemon has reached in the run."""

    node: str
    place: Place
    labels: dict[str, str]
    value: float


class Rows:
    """What was told last of each gauge, and what each counter has reached in the run."""

    def __init__(self, gauges: Iterable[Sample], counts: Mapping[str, list[Count]]) -> None:
        """Counters by the end of their name, without `gpu_efficiency_job_` and `_total`."""
        self._gauges, self._counts = list(gauges), counts

    def gauges(self, name: str) -> list[Sample]:
        """What was told last, before the end."""
        return [row for row in self._gauges if row.name == name]

    def latest(self, name: str) -> float | None:
        """The greatest of those, over all nodes."""
        found = [row.value for row in self.gauges(name)]
        return max((value for value in found if isfinite(value)), default=found[0] if found else None)

    def counts(self, name: str, **labels: str) -> list[Count]:
        """A counter of each daemon, by the end of its name without `_total`."""
        wanted = labels.items()
        return [count for count in self._counts.get(name, ()) if wanted <= count.labels.items()]

    def sum(self, name: str, **labels: str) -> float | None:
        """Of all nodes together; None: nobody tells."""
        found = self.counts(name, **labels)
        return sum(count.value for count in found) if found else None

    def most(self, name: str, **labels: str) -> float | None:
        """Of the node that has counted most: for what is the whole job's."""
        return max(self.by_node(name, **labels).values(), default=None)

    def by_node(self, name: str, **labels: str) -> dict[str, float]:
        """Of each node."""
        return summed((count.node, count.value) for count in self.counts(name, **labels))

    def by(self, label: str, name: str) -> dict[str, float]:
        """Of all nodes together, by a label."""
        return summed((count.labels.get(label, ""), count.value) for count in self.counts(name))

    def by_place(self, name: str) -> dict[Place, float]:
        """Of each daemon."""
        return summed((count.place, count.value) for count in self.counts(name))


class Figures(Protocol):
    """Of one job."""

    @property
    def start(self) -> float:
        """Unix seconds of the job's start."""
        ...

    @property
    def nodes(self) -> Mapping[Place, str]:
        """Node of each daemon."""
        ...

    @property
    def rows(self) -> Rows:
        """Gauges and counters."""
        ...

    def mean(self, name: str, *more: str, series: int = 1) -> list[Sample]:
        """Of each series of a gauge the mean of the run, as far as it was kept."""
        ...

    def weighed(self, name: str, *more: str, weights: Mapping[Place, float]) -> float | None:
        """The mean of a quotient that each daemon tells, over the run and all daemons."""
        ...

    def greatest(self, name: str, *more: str, series: int = 1) -> list[Sample]:
        """Of each series of a gauge the greatest value of the run."""
        ...


def weighed(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Mean of (value, weight); None where nothing weighs anything."""
    known = [(value, weight) for value, weight in pairs if weight > 0 and isfinite(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def summed(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Values that have one key, added up."""
    found: dict[Key, float] = defaultdict(float)
    for key, value in pairs:
        found[key] += value
    return dict(found)
