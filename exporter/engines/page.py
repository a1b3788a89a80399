"""The text of a metrics page: its lines by name, read when they are asked for.

Owns the text format and its summing over labels. Refuses to know engines. A name's colons are underscores here, Ray's
prefix is taken off, and a counter's `_total` may be missing: engines and their exporters differ in all of these.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from exporter.engines.histograms import Histogram, joined

LONGEST_LINE = 4096
"""Characters. Time to read one grows with its square; those of engines have a few hundred."""
MOST_LINES = 20_000
"""Of one name."""
LARGEST = 1e30
"""An engine that counts FLOPs reaches 1e25: sums of what is larger would soon be infinite."""


class Line(Struct, frozen=True):
    """One sample."""

    labels: Mapping[str, str]
    value: float


class Page:
    """One page. Lines that nobody asks for cost next to nothing."""

    def __init__(self, text: str, *, ranks: tuple[str, ...] = ()) -> None:
        """Of lines that differ only in the labels `ranks` the first rank's counts: the others tell the same again."""
        self._text, self._ranks, self._bad = text, ranks, set[str]()
        self._raw: dict[str, list[str]] = {}
        self._read: dict[str, list[Line]] = {}
        for line in text.split("\n"):
            if line and line[0] not in "# ":
                name = line.split("{", 1)[0].split(" ", 1)[0]
                self._raw.setdefault(name.replace(":", "_").removeprefix("ray_"), []).append(line)

    def ranked(self, *ranks: str) -> "Page":
        """The same page, read with other ranks."""
        page = Page(self._text, ranks=ranks)
        page._bad = self._bad
        return page

    @property
    def bad(self) -> int:
        """Lines that could not be read, of those that were asked for."""
        return len(self._bad)

    def names(self, prefixes: tuple[str, ...]) -> list[str]:
        """Names that begin with one of these."""
        return [name for name in self._raw if name.startswith(prefixes)]

    def lines(self, name: str, **labels: str) -> list[Line]:
        """Those of that exact name and with these labels; without what is no number, negative or beyond LARGEST."""
        if name not in self._read:
            raws = self._raw.get(name, [])
            self._bad.update(raws[MOST_LINES:])
            self._read[name] = self._without_copies([one for raw in raws[:MOST_LINES] for one in self._line(raw)])
        return [one for one in self._read[name] if all(one.labels.get(k) == v for k, v in labels.items())]

    def total(self, *names: str, **labels: str) -> float | None:
        """The sum of the first of these that is there, with `_total` or without."""
        return self._first(sum, names, labels)

    def worst(self, *names: str, **labels: str) -> float | None:
        """The highest value of the first of these that is there."""
        return self._first(max, names, labels)

    def label(self, name: str, *names: str) -> str:
        """The value of the first of the labels `names` on a line of `name`, else empty."""
        return next((one.labels[n] for n in names for one in self.lines(name) if one.labels.get(n)), "")

    def histogram(self, *names: str, scale: float = 1.0, **labels: str) -> Histogram | None:
        """The first of these that is there, all its series together."""
        for name in names:
            buckets: dict[float, list[float]] = {}
            for one in self.lines(f"{name}_bucket", **labels):
                bound = _bound(one.labels.get("le", ""))
                if bound is not None:
                    buckets.setdefault(bound, []).append(one.value)
            whole = joined(buckets, self.total(f"{name}_sum", **labels) or 0.0, scale=scale)
            if whole is not None:
                return whole
        return None

    def _first(
        self, combine: Callable[[Iterable[float]], float], names: tuple[str, ...], labels: dict[str, str]
    ) -> float | None:
        for name in names:
            found = self.lines(f"{name}_total", **labels) or self.lines(name, **labels)
            if found:
                return combine(one.value for one in found)
        return None

    def _line(self, raw: str) -> list[Line]:
        if len(raw) > LONGEST_LINE:
            self._bad.add(raw)
            return []
        try:
            samples = [s for family in text_string_to_metric_families(raw) for s in family.samples]
            values = [Line(s.labels, float(s.value)) for s in samples]
        except (ValueError, IndexError, KeyError, TypeError, OverflowError):
            self._bad.add(raw)
            return []
        return [one for one in values if 0 <= one.value <= LARGEST]

    def _without_copies(self, lines: list[Line]) -> list[Line]:
        if not self._ranks:
            return lines
        kept: dict[tuple[tuple[str, str], ...], tuple[tuple[str, ...], Line]] = {}
        for one in lines:
            rank = tuple(one.labels.get(r, "").zfill(9) for r in self._ranks)
            whose = tuple(sorted((k, v) for k, v in one.labels.items() if k not in self._ranks))
            if whose not in kept or rank < kept[whose][0]:
                kept[whose] = (rank, one)
        return [one for _, one in kept.values()]


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if 0 <= bound <= LARGEST or bound == inf else None
