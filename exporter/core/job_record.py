"""Defines a node's record of one job, and builds it from a Snapshot's view of the job.

If the daemon restarted with a new ledger, a job has one record per ledger: their times do not overlap, and together
they are the node's part of the job. Records of several nodes are joined in `report/`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from exporter.core.collectives import CommunicationView
from exporter.core.hangs import Hang
from exporter.core.leaks import LEAK_NAMES, Amount, sum_by_layer
from exporter.core.model import JOULE, SECOND, Owner
from exporter.core.pipes import TENSOR
from exporter.core.progress import TrainingView
from exporter.core.serving import ServingView
from exporter.core.snapshot import JobView, Layers, layer_times, layers
from exporter.core.uncertainty import Bounds


class JobSample(Struct, frozen=True, array_like=True):
    """A job's cumulative counters at one moment, for its coarse history."""

    at: float
    """Unix seconds."""
    paid: float
    """GPU-seconds, as are the following fields except the last."""
    seen: float
    occupied: float
    computing: float
    useful: float
    joules: float


class PriceChange(Struct, frozen=True, array_like=True):
    """What a job had cost when the price of its GPUs changed."""

    paid: int
    """GPU-nanoseconds."""
    money: dict[str, float]
    """Cost by currency."""


class JobRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node's part of a job. Times are Unix seconds; nanoseconds are of whole GPUs, integers, and add up exactly."""

    node: str
    life: str
    """Ledger ID, unique for each new ledger of any daemon."""
    owner: Owner
    start: float
    """When it was allocated its first GPU on this node, as far as this ledger knows."""
    end: float
    """Up to when its time is booked."""
    running: bool
    paid: int
    """GPU-nanoseconds."""
    parts: dict[str, int]
    """`paid` by leak, useful, unresolved and unobserved, without zeros."""
    energy: dict[str, float]
    """Joules by leak."""
    money: dict[str, float] = {}
    """Cost by currency; empty without a price."""
    gpus: dict[str, str] = {}
    """GPUs it has held on this node: UUID to the driver's index."""
    models: tuple[str, ...] = ()
    whole_gpus: float = 0.0
    """Maximum number of GPUs held at once on this node; instances and shared GPUs count by their share."""
    engine: int = 0
    """GPU-nanoseconds with a kernel."""
    flops: float = 0.0
    """FLOPs from tensor pipe activity."""
    tensor_seen: float = 0.0
    """GPU-seconds in which tensor activity was available."""
    reported: float = 0.0
    """Model FLOPs reported by the job."""
    reportable: float = 0.0
    """Peak FLOPs of its GPUs over the time that its reports cover."""
    first_work: float | None = None
    """Seconds from the start to the first kernel; None: no kernel, or the start was not observed."""
    fitting: str = ""
    """Profile of the smallest MIG slice that would have sufficed."""
    unneeded: int = 0
    """GPU-nanoseconds beyond that slice."""
    happened: dict[str, int] = {}
    """Counts of hung, zombie and xid events of its GPUs."""
    cpu_seconds: float = 0.0
    """CPU time of all cores on this node, as far as it was measured."""
    stalls: dict[str, int] = {}
    """GPU-nanoseconds of data_stall and unattributed_stall by what explained them best (see `core.host`)."""
    training: TrainingView | None = None
    service: ServingView | None = None
    communication: CommunicationView | None = None
    link: float | None = None
    """Bandwidth of its GPUs' NVLinks, one direction, bytes per second; None: several nodes, or unknown."""
    samples: tuple[JobSample, ...] = ()
    simulated: bool = False
    useful_pipe: str = TENSOR
    """The pipe whose activity was its useful work at the end, one of PIPES; none: eMFU does not apply."""
    bounds: dict[str, Bounds] = {}
    """Of the leaks that rest on an estimate, the least and the most that they may be."""
    evidence: dict[str, dict[str, int]] = {}
    """GPU-nanoseconds by kind of evidence, of the leaks that can have several."""
    price_changes: tuple[PriceChange, ...] = ()
    """In order of time; between two of them the cost grows with `paid`."""
    left: bool = False
    """Whether it had released its GPUs by `end`, as far as this ledger saw."""
    hang: Hang | None = None
    """The hang it was in at `end`; None for a job that has ended."""

    @property
    def layers(self) -> Layers:
        """Layers of this record alone."""
        return layers(self.parts.get(name, 0) for name in LEAK_NAMES)


class NodeEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event on this node."""

    at: float
    """Unix seconds."""
    kind: str
    """hung, zombie, xid, unavailable, and the same with _over; started, stopped, began_anew."""
    uuid: str = ""
    gpu: str = ""
    """The driver's index."""
    job_id: str = ""
    text: str = ""
    """One sentence for display."""


class JobRecordQuery(Struct, frozen=True, kw_only=True):
    """A filter of job records; empty fields match all."""

    job_id: str = ""
    """The job's id, or the one under which users know it (`Owner.display_id`)."""
    array_id: str = ""
    user: str = ""
    account: str = ""
    namespace: str = ""
    since: float = 0.0
    """Unix seconds; records that ended earlier do not match."""
    until: float = float("inf")
    """Those that began after are left out."""
    limit: int = 1000
    """The latest so many."""

    def matches(self, record: JobRecord) -> bool:
        """Whether it is one of those."""
        owner = record.owner
        return (
            self.job_id in ("", owner.job_id, owner.display_id)
            and self.array_id in ("", owner.array_id)
            and self.user in ("", owner.user)
            and self.account in ("", owner.account)
            and self.namespace in ("", owner.namespace)
            and record.end >= self.since
            and record.start <= self.until
        )


def job_sample(job: JobView, wall: int) -> JobSample:
    """The job's counters at Unix time `wall`, nanoseconds."""
    times = layer_times(sum_by_layer(job.counters.now.parts))
    return JobSample(
        at=wall / SECOND,
        paid=times.paid / SECOND,
        seen=times.seen / SECOND,
        occupied=times.occupied / SECOND,
        computing=times.computing / SECOND,
        useful=times.useful / SECOND,
        joules=sum(job.counters.energy) / JOULE,
    )


def nonzero_by_leak(values: Iterable[Amount]) -> dict[str, Amount]:
    """Convert a column in the order of LEAK_NAMES to a dict by leak, without zeros."""
    return {name: value for name, value in zip(LEAK_NAMES, values, strict=True) if value}


def sum_bounds(records: Sequence[JobRecord]) -> dict[str, Bounds]:
    """Sum the bounds of each leak; a record without bounds of a leak is certain of it."""
    sums: dict[str, Bounds] = {}
    for leak in sorted({leak for record in records for leak in record.bounds}):
        booked = ((record, record.parts.get(leak, 0)) for record in records)
        each = [record.bounds.get(leak, Bounds(certain, certain)) for record, certain in booked]
        sums[leak] = Bounds(sum(bounds.low for bounds in each), sum(bounds.high for bounds in each))
    return sums


def sum_evidence(records: Iterable[JobRecord]) -> dict[str, dict[str, int]]:
    """Sum nanoseconds by leak and kind of evidence."""
    sums: dict[str, Counter[str]] = {}
    for record in records:
        for leak, kinds in record.evidence.items():
            sums.setdefault(leak, Counter()).update(kinds)
    return {leak: dict(kinds) for leak, kinds in sums.items()}


def build_job_record(
    job: JobView,
    *,
    node: str,
    life: str,
    until: float,
    money: Mapping[str, float],
    gpus: Mapping[str, str],
    models: tuple[str, ...],
    whole_gpus: float,
    happened: Mapping[str, int],
    samples: tuple[JobSample, ...],
    simulated: bool,
    price_changes: tuple[PriceChange, ...] = (),
) -> JobRecord:
    """Build a record from a job's view and its tracked history. `until`: Unix seconds up to which it is booked."""
    now = job.counters.now
    return JobRecord(
        node=node,
        life=life,
        owner=job.owner,
        start=min(job.start / SECOND, until),
        end=until,
        running=bool(job.gpus),
        paid=now.paid,
        parts=nonzero_by_leak(now.parts),
        energy={leak: spent / JOULE for leak, spent in nonzero_by_leak(job.counters.energy).items()},
        money=dict(money),
        gpus=dict(gpus),
        models=models,
        whole_gpus=whole_gpus,
        engine=now.engine,
        flops=now.flops,
        tensor_seen=now.tensor_seen,
        reported=now.reported,
        reportable=now.reportable,
        first_work=None if job.first_work is None else job.first_work / SECOND,
        fitting="" if job.smallest_slice is None else job.smallest_slice.profile,
        unneeded=job.excess or 0,
        happened={kind: times for kind, times in happened.items() if times},
        cpu_seconds=0.0 if job.host is None else job.host.cpu_seconds,
        stalls={} if job.host is None else dict(job.host.stalls),
        training=job.progress,
        service=job.service,
        communication=job.communication,
        link=job.link,
        samples=samples,
        simulated=simulated,
        useful_pipe=job.useful_pipe,
        bounds=dict(job.bounds),
        evidence={leak: dict(kinds) for leak, kinds in job.evidence.items()},
        price_changes=price_changes,
        left=not job.gpus,
        hang=job.hang,
    )
