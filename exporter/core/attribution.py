"""Who held the GPU when: an interval and its allocations become parts that partition it.

Owns the cutting of time at the instants where ownership changes. Refuses to guess an owner.
"""

from itertools import pairwise

from exporter.core.model import Allocation

Part = tuple[int, int, tuple[Allocation, ...]]
"""[start, end) and the allocations that hold the GPU all through it; none: nobody's."""


def attribute(start: int, end: int, allocations: tuple[Allocation, ...]) -> list[Part]:
    """Partition [start, end) by the allocations of one GPU: no gap, no overlap, in order.

    An owner that holds the GPU twice at once (two steps of one job) counts once.
    """
    if not allocations:
        return [(start, end, ())]
    if len(allocations) == 1 and allocations[0].start <= start and allocations[0].end is None:
        return [(start, end, allocations)]
    cuts = {start, end}
    for held in allocations:
        cuts.update(t for t in (held.start, held.end) if t is not None and start < t < end)
    edges = sorted(cuts)
    return [(a, b, _holders(a, b, allocations)) for a, b in pairwise(edges)]


def _holders(start: int, end: int, allocations: tuple[Allocation, ...]) -> tuple[Allocation, ...]:
    holding = {
        held.owner.job_id: held for held in allocations if held.start <= start and (held.end is None or held.end >= end)
    }
    return tuple(holding[job] for job in sorted(holding))
