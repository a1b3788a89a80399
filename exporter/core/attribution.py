"""Splits an interval at the instants where GPU ownership changes, and divides shared GPUs among their holders.

The parts partition the interval: no gap, no overlap. Never guesses an owner.
"""

from collections.abc import Sequence
from itertools import pairwise

from exporter.core.model import PPM, Allocation, Process

OwnedInterval = tuple[int, int, tuple[Allocation, ...]]
"""[start, end) and the allocations that hold the GPU all through it; none: nobody's."""


def attribute(start: int, end: int, allocations: tuple[Allocation, ...]) -> list[OwnedInterval]:
    """Partition [start, end) by the allocations of one GPU: no gap, no overlap, in order.

    An owner that holds the GPU twice at once (two steps of one job) counts once.
    """
    if not allocations:
        return [(start, end, ())]
    if len(allocations) == 1 and allocations[0].start <= start and allocations[0].end is None:
        return [(start, end, allocations)]
    cuts = {start, end}
    for allocation in allocations:
        cuts.update(t for t in (allocation.start, allocation.end) if t is not None and start < t < end)
    edges = sorted(cuts)
    return [(a, b, _holders(a, b, allocations)) for a, b in pairwise(edges)]


def _holders(start: int, end: int, allocations: tuple[Allocation, ...]) -> tuple[Allocation, ...]:
    holding = {
        allocation.owner.job_id: allocation
        for allocation in allocations
        if allocation.start <= start and (allocation.end is None or allocation.end >= end)
    }
    return tuple(holding[job] for job in sorted(holding))


def sm_use_by_holder(processes: tuple[Process, ...] | None, holders: tuple[Allocation, ...]) -> list[int] | None:
    """SM time of each holder's processes, parts per million; None where it is not told whose time it was.

    It is not while any process on the GPU has no figure, or works and belongs to none of the holders. What runs while
    there is but one process is that one's, without a figure.
    """
    use = {allocation.owner.job_id: 0 for allocation in holders}
    if processes is not None and len(processes) == 1:
        only_job = processes[0].job_id
        return [PPM if job == only_job else 0 for job in use] if only_job in use else None
    for process in processes or ():
        active = process.sm_active
        if active is None or not 0 <= active <= 1:
            return None
        if process.job_id in use:
            use[process.job_id] += round(active * PPM)
        elif active:
            return None
    return list(use.values()) if any(use.values()) else None


def divide_proportionally(whole: int, weights: Sequence[int]) -> list[int]:
    """`whole` in parts as `weights` have it, rounded cumulatively: they add up exactly."""
    total, parts, before, reached = sum(weights), [], 0, 0
    for weight in weights:
        reached += weight
        after = whole * reached // total
        parts.append(after - before)
        before = after
    return parts
