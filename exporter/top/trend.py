"""What a figure was over the time watched, and how that is drawn in so many columns.

Owns the memory: at most MOST stretches of time, the same for all rows; when they are spent, two become one. Refuses
to invent what was before the first look, and to draw over a time in which nobody answered.
"""

from collections.abc import Hashable, Iterable

from exporter.top.signs import Signs

MOST = 256
_SCALES = (0.1, 0.25, 0.5, 1.0)


class Trends:
    """Means by row and stretch; times are of a monotonic clock, in seconds."""

    def __init__(self, start: float, stretch: float) -> None:
        self.start, self.stretch, self.last, self._latest = start, stretch, 0, 0
        self._means: dict[Hashable, dict[int, tuple[float, int]]] = {}

    def add(self, row: Hashable, value: float | None, now: float) -> None:
        """Note a row's figure; None: it has none now."""
        self.advance(now)
        if value is not None:
            means = self._means.setdefault(row, {})
            total, count = means.get(self.last, (0.0, 0))
            means[self.last] = total + value, count + 1
            self._latest = self.last

    def advance(self, now: float) -> None:
        """Let time pass."""
        self.last = max(self.last, int((now - self.start) / self.stretch))
        while self.last >= MOST:
            self._halve()

    def _halve(self) -> None:
        self.stretch *= 2
        self.last, self._latest = self.last // 2, self._latest // 2
        for row, means in self._means.items():
            merged: dict[int, tuple[float, int]] = {}
            for place, (total, count) in means.items():
                before = merged.get(place // 2, (0.0, 0))
                merged[place // 2] = before[0] + total, before[1] + count
            self._means[row] = merged

    def keep(self, rows: Iterable[Hashable]) -> None:
        """Forget all other rows."""
        kept = set(rows)
        self._means = {row: means for row, means in self._means.items() if row in kept}

    def top(self, rows: Iterable[Hashable]) -> float:
        """The end of a scale on which all these can be drawn."""
        highest = max((total / count for row in rows for total, count in self._means.get(row, {}).values()), default=0)
        return next((scale for scale in _SCALES if highest <= scale), 1.0)

    def points(self, row: Hashable, width: int) -> list[float | None]:
        """Its figures from the first look on, in at most so many columns; a stretch that has only begun may wait."""
        means, seen = self._means.get(row, {}), max(self._latest, self.last - 1) + 1
        columns = min(width, seen)
        sums = [(0.0, 0)] * columns
        for place, (total, count) in means.items():
            at = place * columns // seen
            sums[at] = sums[at][0] + total, sums[at][1] + count
        return [total / count if count else None for total, count in sums]


def spark(points: list[float | None], top: float, signs: Signs) -> str:
    """One sign a column; before the first figure there is nothing, and not a gap."""
    highest, drawn = len(signs.levels) - 1, ""
    for point in points:
        if point is None:
            drawn += signs.gap if drawn.strip() else " "
        else:
            drawn += signs.levels[min(highest, round(highest * point / top))]
    return drawn
