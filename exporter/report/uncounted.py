"""Computes for how long a node held a job's GPUs while no daemon counted them: one rule for records and Prometheus.

Time is charged only if the job is known to have held the GPUs, or if the node was silent for no longer than an outage
of its daemon lasts. What may have been held beyond that is kept apart, for a remark.
"""

from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

LOST_NODE_SECONDS = 300.0
"""Kubernetes deletes the pods of an unreachable node after five minutes, its default `tolerationSeconds`."""


class CounterSegment(Struct, frozen=True, kw_only=True):
    """A daemon's count of a job's GPU-seconds, from 0: the first value known and the last. Unix seconds."""

    start: float
    """When the job got its first GPU, as far as this daemon knew."""
    first: float
    paid_at_first: float
    """GPU-seconds counted by `first`."""
    last: float
    gpus: float
    """GPUs held on average."""
    end_known: bool = True
    """False if the job had not left the node when the count stopped, as far as it shows."""


class Tolerance(NamedTuple):
    """Differences in seconds that are ignored, because clocks, scrapes and writes differ."""

    start: float
    between: float
    end: float


class Uncounted(NamedTuple):
    """GPU-seconds that no daemon counted."""

    held: float
    unknown: float
    """Those during which nothing shows whether the job still held the GPUs."""


def uncounted(segments: Iterable[CounterSegment], *, end: float, tolerance: Tolerance, replaced: bool) -> Uncounted:
    """Sum the GPU time of one node, up to the job's end, that is outside its segments.

    `replaced` says that the job's scheduler replaces what ran on a lost node, instead of holding it to the job's end.
    """
    ordered = sorted(segments, key=attrgetter("first"))
    late = _before_first(ordered[0], ordered[0].start)
    held, unknown = late if late > ordered[0].gpus * tolerance.start else 0.0, 0.0
    for before, after in pairwise(ordered):
        returned = after.start > before.last
        if before.end_known and not returned:
            continue
        silence = after.start - before.last if returned and not before.end_known else 0.0
        charged = min(silence, LOST_NODE_SECONDS)
        gap = _before_first(after, after.start if returned else before.last) + before.gpus * charged
        held += gap if gap > after.gpus * tolerance.between else 0.0
        unknown += before.gpus * (silence - charged)
    last, silence = ordered[-1], end - ordered[-1].last
    if not last.end_known and silence > tolerance.end:
        charged = min(silence, LOST_NODE_SECONDS) if replaced else silence
        held, unknown = held + last.gpus * charged, unknown + last.gpus * (silence - charged)
    return Uncounted(held, unknown)


def _before_first(segment: CounterSegment, since: float) -> float:
    """Return the GPU-seconds from `since` to the segment's first value that it has not counted."""
    return max(0.0, segment.gpus * (segment.first - since) - segment.paid_at_first)


def unknown_note(node: str, gpu_seconds: float) -> str:
    """Return the remark on a node that fell silent."""
    return (
        f"node {node} fell silent while it held GPUs, and the job went on: {gpu_seconds / 3600:,.2f} GPU-hours are not"
        " counted, because nothing shows whether it still held them"
    )
