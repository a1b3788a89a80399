"""Marks what GPUs that work together do to each other: one keeps the hung ones waiting, or all wait while one saves.

Takes the intervals of one observation. Sees the GPUs of one node; does not judge a GPU by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from exporter.core.evidence import SPIN, Evidence
from exporter.core.holders import jobs_that_compute
from exporter.core.ledger import Gpu
from exporter.core.model import PPM, UNKNOWN_JOB, Allocation
from exporter.core.states import StateInterval
from exporter.core.timers import SAVING, is_mixture, saves

GpuIntervals = tuple[Gpu, Evidence, list[StateInterval]]
"""A GPU, the evidence of one reading, and the reading's state intervals."""
TimesByGroup = dict[tuple[str, str], list[tuple[int, int]]]
"""Job ID and group -> intervals in which any of its GPUs was hung."""


class Save(NamedTuple):
    """An interval in which a GPU saved."""

    start: int
    end: int
    uuid: str
    share: int
    """The part of it, ppm: all, but for a long reading in which it also worked."""


SavesByGroup = dict[tuple[str, str], list[Save]]
"""Job ID and group -> when its GPUs saved."""


def group_of(allocation: Allocation) -> tuple[str, str]:
    """Which GPUs it works together with: those of the same job and group."""
    return allocation.owner.job_id, allocation.group


def _hung_groups(ev: Evidence, interval: StateInterval) -> Iterator[tuple[str, str]]:
    """The holders to which the state hung applies; not the unknown job, which may be several that do not wait."""
    holders = interval.last_known or interval.holders
    jobs = jobs_that_compute(ev, holders) - {UNKNOWN_JOB} if interval.hung else frozenset()
    return (group_of(allocation) for allocation in holders if allocation.owner.job_id in jobs)


def times_of_hangs(gpu_intervals: Iterable[GpuIntervals]) -> TimesByGroup:
    """When each group had a hung GPU."""
    hangs: TimesByGroup = {}
    for _, ev, intervals in gpu_intervals:
        for interval in intervals:
            for group in _hung_groups(ev, interval):
                hangs.setdefault(group, []).append((interval.start, interval.end))
    return hangs


def with_culprits(
    gpu: Gpu, ev: Evidence, intervals: Iterable[StateInterval], hangs: TimesByGroup
) -> Iterator[StateInterval]:
    """Mark an idle GPU as culprit while another of its job or group is hung, splitting its intervals at those times.

    A GPU that copies its state to the host is exempt: the others wait for a checkpoint.
    """
    saving = saves(ev, gpu.criteria.policy)
    for interval in intervals:
        hung = [
            (allocation.owner.job_id, *bounds)
            for allocation in interval.last_known or interval.holders
            for bounds in hangs.get(group_of(allocation), ())
        ]
        if ev.distrust or ev.kernel_runs or saving or not hung:
            yield interval
            continue
        for start, end in _cuts(interval, [(since, until) for _, since, until in hung]):
            culprits = frozenset(job_id for job_id, since, until in hung if since <= start and end <= until)
            yield replace(interval, start=start, end=end, culprits=culprits)


def times_of_saves(gpu_intervals: Iterable[GpuIntervals]) -> SavesByGroup:
    """When each group had a GPU that saved. Of a GPU with several holders it is unknown whose state it is."""
    found: SavesByGroup = {}
    for gpu, ev, intervals in gpu_intervals:
        works = ev.engine >= gpu.criteria.policy.checkpoint_engine and ev.spin != SPIN
        for interval in intervals:
            if SAVING in interval.signs and len(interval.holders) == 1:
                save = Save(interval.start, interval.end, gpu.device.uuid, ev.wait if works else PPM)
                found.setdefault(group_of(interval.holders[0]), []).append(save)
    return found


def beside_saves(
    gpu: Gpu, ev: Evidence, intervals: Iterable[StateInterval], saves_by_group: SavesByGroup
) -> Iterator[StateInterval]:
    """Note for how much of each interval others of the group save, one after the other, splitting it at those times.

    It waits for them without a kernel or in one that polls. Of a reading of several steps, it may do so for a part.
    """
    waits = not ev.distrust and (ev.spin == SPIN or not ev.kernel_runs or is_mixture(ev))
    for interval in intervals:
        of_group = saves_by_group.get(group_of(interval.holders[0]), ()) if len(interval.holders) == 1 else ()
        others = [save for save in of_group if save.uuid != gpu.device.uuid]
        if not (waits and others):
            yield interval
            continue
        for start, end in _cuts(interval, [(save.start, save.end) for save in others]):
            share = sum(save.share for save in others if save.start <= start and end <= save.end)
            yield replace(interval, start=start, end=end, peers_save=min(share, PPM))


def _cuts(interval: StateInterval, others: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Cut an interval where others begin or end."""
    inside = sorted({t for bounds in others for t in bounds if interval.start < t < interval.end})
    return pairwise([interval.start, *inside, interval.end])
