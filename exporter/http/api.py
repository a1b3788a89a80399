"""What the JSON API says: plain names, seconds as floats, null for unknown. The page for a person reads it too.

Owns these shapes and how a Snapshot becomes them. Refuses to judge, to format, and to speak HTTP.
"""

from collections.abc import Sequence

from msgspec import Struct

from exporter.core.leaks import NAMES, USEFUL
from exporter.core.ledger import Mark
from exporter.core.model import PPM, SECOND, Device, Health, Owner
from exporter.core.snapshot import Counters, GpuView, JobView, Snapshot, believed, layers, summed
from exporter.http.told import ServingOut, TrainingOut, serving, training


class WindowOut(Struct, frozen=True, kw_only=True):
    """A stretch of the latest past: the three layers (0-1), their product, and where its GPU-seconds went."""

    seconds: float
    """GPU-seconds paid in it; less than the window's name says where the GPU or job is younger."""
    gau: float | None
    """GPU Allocation Utilization: allocated and working / paid and seen. null: nothing to divide by."""
    ectr: float | None
    """Effective Compute Time Ratio: computing / occupied."""
    emfu: float | None
    """Effective Model FLOPs Utilization: useful / computing; without workload reports an upper bound."""
    product: float | None
    """GAU x ECTR x eMFU: what you got for what you paid."""
    floor: float | None
    """The same if kernel time of unknown worth were worth nothing."""
    coverage: float | None
    """Share of the paid time that was seen."""
    driver_utilization: float | None
    """The driver's own utilisation over the same time, as nvidia-smi shows it."""
    leaks: dict[str, float]
    """GPU-seconds by leak, and useful, unresolved, unobserved; they add up to `seconds`."""


class OwnerOut(Struct, frozen=True, kw_only=True):
    """Who holds a GPU, in the scheduler's words; empty where it has none."""

    job_id: str
    name: str
    user: str
    account: str
    partition: str
    namespace: str
    pod: str
    workload_class: str
    scheduler: str
    qos: str
    team: str
    kind: str
    array_id: str
    comment: str
    nodes: int
    """Of the whole job; 0: not known."""
    time_limit_seconds: float | None


class HealthOut(Struct, frozen=True, kw_only=True):
    """A board's condition beside its work; null where it does not say. Counters count from the load of the driver."""

    xids: int
    """Critical errors told since the daemon saw the GPU first."""
    last_xid: int | None
    recovery_action: int | None
    """What the driver wants done: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain peers, 4 drain and reset."""
    ecc_corrected: int | None
    ecc_uncorrected: int | None
    row_remap_pending: bool | None
    row_remap_failed: bool | None
    nvlink_errors: int | None
    memory_temperature_celsius: float | None
    temperature_margin_celsius: float | None
    clock_limited_seconds: dict[str, float]
    """Time the clock was held down, by reason."""


class GpuOut(Struct, frozen=True, kw_only=True):
    """One GPU. Power, temperature and memory are null unless the newest reading has them now."""

    uuid: str
    index: str
    model: str
    state: str
    reason: str
    since: float
    """Unix seconds since which it has been in this state."""
    state_seconds: float
    """The same as a duration, at the time of the sample."""
    hang_suspected: bool
    spin_since: float | None
    """Unix seconds since which it has spun without progress; null while it does not."""
    hang_confidence: float | None
    """While it spins: of the eight signs of a hang the share that were seen and agree."""
    hang_signs: dict[str, bool]
    """While it spins: each sign that can be seen, and whether it speaks for a hang."""
    last_work: float | None
    """Unix seconds at which its holder last did effective work, or got it; null while nobody has it."""
    owners: list[OwnerOut]
    ranks: dict[str, str]
    """By job_id, the ranks of that job whose processes are on it ("4,5"); empty where not known."""
    last_5_minutes: WindowOut
    last_hour: WindowOut
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    live: bool
    """The newest reading still holds: the figures above are the present."""
    age_seconds: float | None
    """Age of the newest accepted reading at the time of the sample; null before the first one."""
    peak_known: bool
    """False: the board's tensor peak is not known, so the worth of its kernel time is not either."""
    unsupported: list[str]
    """Signals this hardware cannot have."""
    share: float
    """Of one paid GPU: 1 for a whole board, less for a MIG instance and for what is left of its board."""
    profile: str
    """MIG profile; empty for a board."""
    parent: str
    """UUID of the board a MIG instance is cut from."""
    health: HealthOut


class JobOut(Struct, frozen=True, kw_only=True):
    """One job's part of this node. An ended job stays for a while, holding no GPU."""

    owner: OwnerOut
    gpus: list[str]
    """Indices (or UUIDs, where the driver gives none) of the GPUs it holds now."""
    paid_seconds: float
    """GPU-seconds it held on this node in all."""
    useful_seconds: float
    energy_joules: float
    useful_energy_joules: float
    memory_used_bytes: float | None
    started_at: float
    """Unix seconds at which it was given its first GPU here."""
    first_work_seconds: float | None
    """From then to its first kernel here; null: none yet, or it was not seen."""
    training: TrainingOut | None
    """What it reports; null: nothing."""
    serving: ServingOut | None
    """What its serving engines say; null: none was found."""
    last_5_minutes: WindowOut
    last_hour: WindowOut


class NodeOut(Struct, frozen=True, kw_only=True):
    """The node, and how far to trust what is said of it."""

    host: str
    source: str
    source_reason: str
    """Why this source, in one sentence."""
    scheduler: str
    simulated: bool
    """True: made by a model or a replay; nothing here was measured on this machine."""
    version: str
    sampled_at: float
    """Unix seconds of the sample that everything here describes."""
    age_seconds: float
    """Its age when this was asked."""
    interval_seconds: float
    last_error: str
    last_5_minutes: WindowOut
    last_hour: WindowOut


class GpusOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/gpus."""

    node: NodeOut
    gpus: list[GpuOut]


class JobsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/jobs."""

    node: NodeOut
    jobs: list[JobOut]


class Problem(Struct, frozen=True, kw_only=True):
    """Answer to what cannot be answered."""

    detail: str
    """Why, in plain words."""


def gpus_out(snapshot: Snapshot, age: int, *, live: bool = True) -> GpusOut:
    """All GPUs of the node; `age` is the snapshot's, in nanoseconds. Not `live`: its readings no longer hold."""
    late = 0 if live else age
    return GpusOut(node=node_of(snapshot, age), gpus=[_gpu(gpu, snapshot.wall, late=late) for gpu in snapshot.gpus])


def jobs_out(snapshot: Snapshot, age: int) -> JobsOut:
    """All jobs of the node; `age` is the snapshot's, in nanoseconds."""
    devices = [gpu.device for gpu in snapshot.gpus]
    return JobsOut(node=node_of(snapshot, age), jobs=[_job(job, devices) for job in snapshot.jobs])


def node_of(snapshot: Snapshot, age: int) -> NodeOut:
    """The node alone; `age` is the snapshot's, in nanoseconds."""
    books, meta = [gpu.counters for gpu in snapshot.gpus], snapshot.meta
    return NodeOut(
        host=meta.host,
        source=meta.source,
        source_reason=meta.source_reason,
        scheduler=meta.scheduler,
        simulated=meta.simulated,
        version=meta.version,
        sampled_at=snapshot.wall / SECOND,
        age_seconds=age / SECOND,
        interval_seconds=meta.interval,
        last_error=meta.last_error,
        last_5_minutes=window_of([(book, book.short) for book in books]),
        last_hour=window_of([(book, book.hour) for book in books]),
    )


def _gpu(gpu: GpuView, wall: int, *, late: int) -> GpuOut:
    device, spec = gpu.device, gpu.device.spec
    age = None if gpu.age is None else gpu.age + late
    live = gpu.reading if gpu.live and not late else None
    return GpuOut(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        state=gpu.state.value,
        reason=gpu.reason,
        since=gpu.since / SECOND,
        state_seconds=(wall - gpu.since) / SECOND,
        hang_suspected=gpu.hang_suspected,
        spin_since=None if gpu.spin_since is None else gpu.spin_since / SECOND,
        hang_confidence=gpu.hang_confidence,
        hang_signs=dict(gpu.hang_signs),
        last_work=None if gpu.worked_at is None else gpu.worked_at / SECOND,
        owners=[_owner(owner) for owner in gpu.owners],
        ranks={owner.job_id: ranks for owner, ranks in zip(gpu.owners, gpu.ranks, strict=True)},
        last_5_minutes=window_of([(gpu.counters, gpu.counters.short)]),
        last_hour=window_of([(gpu.counters, gpu.counters.hour)]),
        power_watts=believed(live, "power_watts"),
        power_limit_watts=believed(live, "enforced_power_limit_watts"),
        temperature_celsius=believed(live, "temperature_celsius"),
        memory_used_bytes=believed(live, "memory_used_bytes"),
        memory_total_bytes=believed(live, "memory_total_bytes"),
        live=live is not None,
        age_seconds=None if age is None else age / SECOND,
        peak_known=spec is not None and spec.peak_flops is not None,
        unsupported=list(device.lacks),
        share=device.weight / PPM,
        profile=device.profile,
        parent=device.parent,
        health=_health(gpu),
    )


def _health(gpu: GpuView) -> HealthOut:
    told = gpu.health or Health(gpu.device.uuid)
    return HealthOut(
        xids=gpu.xids,
        last_xid=gpu.last_xid or None,
        clock_limited_seconds={group: nanoseconds / SECOND for group, nanoseconds in gpu.limited},
        **{name: getattr(told, name) for name in HealthOut.__struct_fields__ if hasattr(told, name) and name != "xids"},
    )


def _job(job: JobView, devices: Sequence[Device]) -> JobOut:
    book = job.counters
    return JobOut(
        owner=_owner(job.owner),
        gpus=[device.index or device.uuid for device in devices if device.uuid in job.gpus],
        paid_seconds=book.now.paid / SECOND,
        useful_seconds=book.now.parts[USEFUL] / SECOND,
        energy_joules=sum(book.energy),
        useful_energy_joules=book.energy[USEFUL],
        memory_used_bytes=job.memory_used,
        started_at=job.start / SECOND,
        first_work_seconds=None if job.first_work is None else job.first_work / SECOND,
        training=training(job),
        serving=serving(job),
        last_5_minutes=window_of([(book, book.short)]),
        last_hour=window_of([(book, book.hour)]),
    )


def _owner(owner: Owner) -> OwnerOut:
    return OwnerOut(**{name: getattr(owner, name) for name in OwnerOut.__struct_fields__})


def window_of(books: Sequence[tuple[Counters, Mark]]) -> WindowOut:
    """Sum first, then divide: books and where their window begins."""
    parts = summed([book.parts(since) for book, since in books])
    found = layers(parts)
    busy = sum(book.now.utilization - since.utilization for book, since in books)
    seen = sum(book.now.utilization_seen - since.utilization_seen for book, since in books)
    return WindowOut(
        seconds=sum(parts) / SECOND,
        gau=found.gau,
        ectr=found.ectr,
        emfu=found.emfu,
        product=found.product,
        floor=found.floor,
        coverage=found.coverage,
        driver_utilization=busy / seen if seen else None,
        leaks={name: part / SECOND for name, part in zip(NAMES, parts, strict=True)},
    )
