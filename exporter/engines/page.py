"""Parses a Prometheus metrics page lazily, and sums its samples and histograms over labels.

Independent of the engine. In metric names colons become underscores, the prefix `ray_` is removed and the suffix
`_total` is optional.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from math import inf, isfinite

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from exporter.core.model import Latency


class Histogram(Struct, frozen=True):
    """A Prometheus histogram with cumulative buckets."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending; the last is infinite."""
    counts: tuple[float, ...]
    """Number of values up to each bound."""
    total: float
    """Sum of all values."""

    @property
    def count(self) -> float:
        """The number of values."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """The mean; None without values."""
        return self.total / self.count if self.count > 0 else None

    def since(self, before: "Histogram") -> "Histogram | None":
        """Return the values added since `before`; None if the buckets differ or a count or the sum fell."""
        if self.bounds != before.bounds or self.total < before.total:
            return None
        grown = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        if min(grown) < 0:
            return None
        # On a page that was read during an update, a lower bucket may be ahead of a higher one.
        return Histogram(self.bounds, tuple(accumulate(grown, max)), self.total - before.total)

    def quantile(self, share: float) -> float:
        """Return the quantile as PromQL's histogram_quantile does: linear within a bucket, the first from 0.

        Beyond the last finite bound, returns that bound. Needs at least one value.
        """
        rank = share * self.count
        place = next(i for i, count in enumerate(self.counts) if count >= rank)
        if not isfinite(self.bounds[place]):
            return self.bounds[place - 1] if place else 0.0
        low, below = (self.bounds[place - 1], self.counts[place - 1]) if place else (min(0.0, self.bounds[0]), 0.0)
        inside = self.counts[place] - below
        return low + (self.bounds[place] - low) * ((rank - below) / inside if inside else 1.0)

    def latency(self, kind: str) -> Latency | None:
        """Return the quantiles 0.50, 0.95 and 0.99; None without values."""
        if self.count <= 0:
            return None
        return Latency(kind, self.quantile(0.50), self.quantile(0.95), self.quantile(0.99))


def merge_series(buckets: dict[float, list[float]], total: float, *, scale: float = 1.0) -> Histogram | None:
    """Add several series up; `buckets` has the count of each series by upper bound. None without an infinite bucket.

    Uses only bounds that all series have: otherwise the sums would not be cumulative.
    """
    series = len(buckets.get(inf, ()))
    if not series:
        return None
    bounds = sorted(bound for bound, counts in buckets.items() if len(counts) == series)
    counts = accumulate((sum(buckets[bound]) for bound in bounds), max)
    return Histogram(tuple(bound * scale for bound in bounds), tuple(counts), total * scale)


MAX_LINE_LENGTH = 4096
"""Characters. Parse time grows with the square of the length; lines of engines have a few hundred characters."""
MAX_SAMPLES_PER_NAME = 5_000
"""Maximum number of samples read of one metric."""
MAX_VALUE = 1e30
"""Larger values are ignored, because their sums could become infinite; FLOP counters reach 1e25."""


class MetricSample(Struct, frozen=True):
    """One sample."""

    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """One metrics page. A line is parsed only when its metric is read."""

    def __init__(self, text: str, *, ranks: tuple[str, ...] = ()) -> None:
        """Of samples that differ only in the labels `ranks`, only that of the lowest rank counts."""
        self._text, self._ranks, self._bad = text, ranks, set[str]()
        self._raw: dict[str, list[str]] = {}
        self._samples: dict[str, list[MetricSample]] = {}
        for line in text.split("\n"):
            if line and line[0] not in "# ":
                name = line.split("{", 1)[0].split(" ", 1)[0]
                self._raw.setdefault(_plain_name(name), []).append(line)

    def ranked(self, *ranks: str) -> "MetricsPage":
        """Return the same page with other `ranks`."""
        page = MetricsPage(self._text, ranks=ranks)
        page._bad = self._bad
        return page

    @property
    def bad(self) -> int:
        """Number of lines that could not be parsed, among those read so far."""
        return len(self._bad)

    def names(self, prefixes: tuple[str, ...]) -> list[str]:
        """Return the metric names that begin with one of `prefixes`."""
        return [name for name in self._raw if name.startswith(prefixes)]

    def help(self, name: str) -> str:
        """Return the description of a metric, of its name with or without `_total`; "" if the page has none."""
        for line in self._text.split("\n"):
            if line.startswith("# HELP "):
                described, _, text = line.removeprefix("# HELP ").partition(" ")
                if _plain_name(described).removesuffix("_total") == name:
                    return text
        return ""

    def samples(self, name: str, **labels: str) -> list[MetricSample]:
        """Return the samples of exactly `name` with these labels; leaves out NaN, negative values and huge ones."""
        if name not in self._samples:
            raws = self._raw.get(name, [])
            self._bad.update(raws[MAX_SAMPLES_PER_NAME:])
            self._samples[name] = self._without_duplicates(
                [sample for raw in raws[:MAX_SAMPLES_PER_NAME] for sample in self._parse_line(raw)]
            )
        return [sample for sample in self._samples[name] if all(sample.labels.get(k) == v for k, v in labels.items())]

    def total(self, *names: str, **labels: str) -> float | None:
        """Return the sum of the first of these metrics that the page has, with or without `_total`; else None."""
        return self._first(sum, names, labels)

    def highest(self, *names: str, **labels: str) -> float | None:
        """Return the highest value of the first of these metrics that the page has; else None."""
        return self._first(max, names, labels)

    def label(self, name: str, *names: str) -> str:
        """Return the first non-empty value of the labels `names` on the samples of metric `name`, else ""."""
        return next((sample.labels[n] for n in names for sample in self.samples(name) if sample.labels.get(n)), "")

    def histogram(self, *names: str, scale: float = 1.0, **labels: str) -> Histogram | None:
        """Return the first of these histograms that the page has, with all its series added up; else None."""
        for name in names:
            buckets: dict[float, list[float]] = {}
            for sample in self.samples(f"{name}_bucket", **labels):
                bound = _bound(sample.labels.get("le", ""))
                if bound is not None:
                    buckets.setdefault(bound, []).append(sample.value)
            whole = merge_series(buckets, self.total(f"{name}_sum", **labels) or 0.0, scale=scale)
            if whole is not None:
                return whole
        return None

    def _first(
        self, combine: Callable[[Iterable[float]], float], names: tuple[str, ...], labels: dict[str, str]
    ) -> float | None:
        for name in names:
            found = self.samples(f"{name}_total", **labels) or self.samples(name, **labels)
            if found:
                return combine(sample.value for sample in found)
        return None

    def _parse_line(self, raw: str) -> list[MetricSample]:
        if len(raw) > MAX_LINE_LENGTH:
            self._bad.add(raw)
            return []
        try:
            samples = [s for family in text_string_to_metric_families(raw) for s in family.samples]
            values = [MetricSample(s.labels, float(s.value)) for s in samples]
        except (ValueError, IndexError, KeyError, TypeError, OverflowError):
            self._bad.add(raw)
            return []
        return [sample for sample in values if 0 <= sample.value <= MAX_VALUE]

    def _without_duplicates(self, lines: list[MetricSample]) -> list[MetricSample]:
        if not self._ranks:
            return lines
        kept: dict[tuple[tuple[str, str], ...], tuple[tuple[str, ...], MetricSample]] = {}
        for sample in lines:
            rank = tuple(sample.labels.get(r, "").zfill(9) for r in self._ranks)
            series = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in self._ranks))
            if series not in kept or rank < kept[series][0]:
                kept[series] = (rank, sample)
        return [sample for _, sample in kept.values()]


def _plain_name(name: str) -> str:
    return name.replace(":", "_").removeprefix("ray_")


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if 0 <= bound <= MAX_VALUE or bound == inf else None
