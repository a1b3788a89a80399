"""Splits an interval where GPU ownership changes and divides shared GPUs among their holders; never guesses owners."""

from collections.abc import Sequence
from itertools import pairwise

from exporter.core.model import PPM, Allocation, Process

OwnedInterval = tuple[int, int, tuple[Allocation, ...]]
"""[start, end) and the allocations that hold the GPU throughout; empty: unallocated."""


def attribute(start: int, end: int, allocations: tuple[Allocation, ...]) -> list[OwnedInterval]:
    """Partition [start, end) by the allocations of one GPU: in order, without gaps or overlaps.

    A job that holds the GPU twice at the same time (two steps of one job) counts once.
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
    """SM time of each holder's processes, parts per million; None if it cannot be attributed.

    That is so if any process on the GPU has no SM figure, or is active and belongs to none of the holders. If all
    processes on the GPU are one holder's, it gets all of the time and needs no figure.
    """
    use = {allocation.owner.job_id: 0 for allocation in holders}
    jobs = {process.job_id for process in processes or ()}
    if len(jobs) == 1:
        return [PPM if job in jobs else 0 for job in use] if jobs & use.keys() else None
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
    """Divide `whole` in proportion to `weights`, rounding cumulatively so that the parts add up exactly."""
    total, parts, before, reached = sum(weights), [], 0, 0
    for weight in weights:
        reached += weight
        after = whole * reached // total
        parts.append(after - before)
        before = after
    return parts
