"""What a calculator of series is to be asked about a node that was really played, and what the node really shows.

Owns the reading of a snapshot for both. Refuses to compute any number of series.
"""

from msgspec.structs import replace

from exporter.cardinality import FleetSize, scraped_series
from exporter.core.exposition import render
from exporter.core.snapshot import HistoryStatus, JobView, Snapshot

BESIDE = ("process", "scrape", "gpu_efficiency_workload_messages_total")
"""What a snapshot alone has none of: the daemon's process, Prometheus' own, and a listener's."""


def lines(page: str) -> list[str]:
    """Samples of a page."""
    return [line for line in page.splitlines() if line and not line.startswith("#")]


def as_served(snapshot: Snapshot) -> Snapshot:
    """With what a daemon says of itself: errors by kind, that its scheduler answers and its history is kept."""
    errors = tuple((kind, 0) for kind in "abcd")
    meta = replace(snapshot.meta, unanswered_seconds=0.0, errors=errors, history=HistoryStatus(works=True))
    return replace(snapshot, meta=meta)


def shown(snapshot: Snapshot) -> int:
    """Series that a node really shows."""
    return len(lines(render(as_served(snapshot)).decode()))


def told(fleet: FleetSize, *, calm: bool = False) -> float:
    """The calculator's word for it."""
    return sum(count for name, count in scraped_series(fleet, calm=calm).items() if name not in BESIDE)


def fleet_of(*snapshots: Snapshot, source: str = "dcgm") -> FleetSize:
    """What there is on these nodes, counted without a look at any series."""
    gpus = [gpu for snapshot in snapshots for gpu in snapshot.gpus]
    jobs = [job for snapshot in snapshots for job in snapshot.jobs]
    instances = [gpu for gpu in gpus if gpu.device.parent]
    nodes, names = len(snapshots), {job.owner.job_id for job in jobs}
    shared = [gpu for gpu in gpus if len(gpu.owners) > 1]
    return FleetSize(
        nodes=nodes,
        gpus=(len(gpus) - len(instances)) // nodes,
        mig_boards=len({gpu.device.parent for gpu in instances}) // nodes,
        mig_instances=len(instances) // nodes,
        jobs=len(names),
        nodes_per_job=len(jobs) / len(names) if names else 1.0,
        reporting=len({job.owner.job_id for job in jobs if job.progress is not None}),
        serving=len({job.owner.job_id for job in jobs if job.service is not None}),
        communicating=len({job.owner.job_id for job in jobs if job.communication is not None}),
        trouble=len({job.owner.job_id for job in jobs if _in_trouble(job)}),
        spinning=sum(gpu.spin_since is not None for gpu in gpus),
        shared=len(shared),
        sharers=max((len(gpu.owners) for gpu in shared), default=2),
        free=sum(not gpu.owners for gpu in gpus if not gpu.device.unpartitioned),
        reasons=max((len(gpu.unobserved) for gpu in gpus), default=0),
        models=len({gpu.device.model for gpu in gpus}),
        node_accounts=max(len(snapshot.account_totals) for snapshot in snapshots),
        owners=len({account for snapshot in snapshots for account, _ in snapshot.account_totals}),
        users=len({job.owner.user for job in jobs}),
        pairs=len({(job.owner.team, job.owner.account, job.owner.namespace, job.owner.user) for job in jobs}),
        source=source,
        listening=False,
    )


def _in_trouble(job: JobView) -> bool:
    return bool(job.suspected or job.without_process or job.owner.zombie_seconds or job.owner.exemption)
