"""How a job went, of the samples that its nodes kept. Owns putting them on one time; refuses to guess between nodes.

A counter grew evenly between two samples, as far as anybody knows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter

from exporter.core.statement import Sample
from exporter.receipt.model import Moment
from exporter.receipt.runs import Run, Stay, began

MOST = 96
"""Pieces."""
_FIELDS = ("paid", "seen", "occupied", "computing", "useful", "joules")


def course(run: Run) -> tuple[Moment, ...]:
    """In pieces from its start to its end; none where no more than the ends are known."""
    start, end = run.start, run.end
    tracks = [track for stay in run.stays for track in _tracks(stay)]
    inner = sorted({point.at for track in tracks for point in track if start < point.at < end})
    if not inner:
        return ()
    every = max(1, -(-(len(inner) + 1) // MOST))
    edges = [start, *inner[every - 1 :: every], end]
    edges = [a for a, b in pairwise(edges) if b - a >= 1.0] + [end]
    sums = [[sum(values) for values in zip(*(_at(track, edge) for track in tracks), strict=True)] for edge in edges]
    pieces = zip(pairwise(edges), pairwise(sums), strict=True)
    return tuple(
        _pieces((a - start, b - start, dict(zip(_FIELDS, _less(x, y), strict=True))) for (a, b), (x, y) in pieces)
    )


def _tracks(stay: Stay) -> Iterator[list[Sample]]:
    """Of each life, from when its books begin."""
    before = stay.lives[0].start
    for life in stay.lives:
        if life.samples:
            nothing = Sample(min(began(life, before), life.samples[0].at), *(0.0,) * len(_FIELDS))
            yield [nothing, *life.samples]
        before = life.end


def _at(track: list[Sample], at: float) -> list[float]:
    """Counters at a moment."""
    after = bisect_right(track, at, key=attrgetter("at"))
    if after == 0:
        return [0.0] * len(_FIELDS)
    before, then = track[after - 1], track[min(after, len(track) - 1)]
    part = (at - before.at) / (then.at - before.at) if then.at > before.at else 0.0
    return [(1 - part) * getattr(before, name) + part * getattr(then, name) for name in _FIELDS]


def _less(before: list[float], after: list[float]) -> list[float]:
    return [max(0.0, b - a) for a, b in zip(before, after, strict=True)]


def _pieces(found: Iterable[tuple[float, float, dict[str, float]]]) -> Iterator[Moment]:
    for start, end, grown in found:
        if end <= start:  # two samples of one moment: a damaged row
            continue
        yield Moment(
            start=start,
            end=end,
            gpus=grown["paid"] / (end - start),
            coverage=_ratio(grown["seen"], grown["paid"]),
            gau=_ratio(grown["occupied"], grown["seen"]),
            ectr=_ratio(grown["computing"], grown["occupied"]),
            floor=_ratio(grown["useful"], grown["seen"]),
            watts=grown["joules"] / (end - start),
        )


def _ratio(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None
