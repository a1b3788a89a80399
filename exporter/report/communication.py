"""Sums up what NCCL's profiler plugins timed of a job on all its nodes."""

from collections.abc import Iterable, Sequence
from statistics import median

from exporter.core.collectives import CLEARLY_LESS, COLLECTIVE_NAMES, CollectiveView, CommunicationView
from exporter.core.job_record import JobRecord
from exporter.core.model import SECOND
from exporter.report.model import CollectiveSummary, CommunicationSummary, WaitedForRank


def communication_summary(records: Sequence[JobRecord]) -> CommunicationSummary | None:
    """Sum up the records of one run, oldest first on each node; None if no plugin timed it."""
    timed = [record for record in records if record.communication is not None]
    views = [record.communication for record in timed if record.communication is not None]
    if not views:
        return None
    covered = sum(view.covered for view in views)
    names = [name for name in COLLECTIVE_NAMES if any(use.name == name for view in views for use in view.uses)]
    return CommunicationSummary(
        sources=tuple(sorted({view.source for view in views})),
        share=sum(view.busy for view in views) / covered if covered else None,
        collectives=tuple(_collective(name, views) for name in names),
        link_bytes_per_second=next((record.link for record in reversed(timed) if record.link is not None), None),
        waited_for=_waited_for(timed),
    )


def _collective(name: str, views: Iterable[CommunicationView]) -> CollectiveSummary:
    uses = [use for view in views for use in view.uses if use.name == name]
    return CollectiveSummary(
        name=name,
        calls=sum(use.calls for use in uses),
        seconds=sum(use.nanoseconds for use in uses) / SECOND,
        bytes=sum(use.bytes for use in uses),
        bus_bytes_per_second=_mean_bandwidth(uses),
    )


def _mean_bandwidth(uses: Iterable[CollectiveView]) -> float | None:
    """Mean of the nodes' bus bandwidths, weighted by time."""
    known = [(use.bus_bytes_per_second, use.nanoseconds) for use in uses if use.bus_bytes_per_second is not None]
    time = sum(nanoseconds for _, nanoseconds in known)
    return sum(rate * nanoseconds for rate, nanoseconds in known) / time if time else None


def _waited_for(records: Iterable[JobRecord]) -> WaitedForRank | None:
    """The rank that communicates least, and clearly less than the median of the others: they wait in collectives."""
    last = {record.node: record for record in records}
    shares = [
        (share, rank, node)
        for node, record in last.items()
        for rank, share in (record.communication.ranks if record.communication is not None else ())
    ]
    if len(shares) < 2:  # noqa: PLR2004  a rank and one that waits for it
        return None
    least = min(shares)
    behind = median(share for share, *place in shares if tuple(place) != least[1:]) - least[0]
    return WaitedForRank(rank=least[1], node=least[2], behind=behind) if behind >= CLEARLY_LESS else None
