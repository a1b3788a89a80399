"""Defines the JSON of the API, and builds that of /api/v1/node, /gpus and /jobs from a Snapshot.

Seconds and ratios are floats; null means unknown. The pages and `top` use the same classes. A daemon sends every field;
the defaults are for `top`, when it queries an older daemon that lacks a field. Refuses to classify, to format, and to
import HTTP code. Where only allocated time costs money, the cost of a window is null, because a window does not record
how much of it each GPU was allocated.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct

from exporter.core.findings import describe_culprit
from exporter.core.hangs import Hang, gpu_name
from exporter.core.host import HostView, PortState
from exporter.core.job_record import JobRecord, NodeEvent
from exporter.core.leaks import LEAK_NAMES, USEFUL_INDEX
from exporter.core.ledger import Book, CounterSample
from exporter.core.model import JOULE, PPM, SECOND, Device, HangFinding, Health, State
from exporter.core.pipes import TENSOR
from exporter.core.prices import NO_PRICE, EnergyTerms, Price, Terms, energy_amount
from exporter.core.snapshot import Counters, GpuView, JobView, Snapshot, layers, price_of, sum_by_leak, valid_value
from exporter.web.spans import SpanOut, hour_spans


class TrainingOut(Struct, frozen=True, kw_only=True):
    """What a training job reports. Tokens, samples and FLOPs cover only those of this node's GPUs that report."""

    run: str = ""
    step: int | None = None
    steps: int = 0
    rework_steps: int = 0
    """Steps that the run had already made before a restart; included in `steps`."""
    epoch: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization over the last 5 minutes as the job reports it, 0-1."""
    goodput: float | None = None
    """Share of the run's wall time spent in new steps, 0-1."""
    tokens: float = 0.0
    padding_tokens: float = 0.0
    samples: float = 0.0
    model_flops: float = 0.0
    gpu_seconds: float = 0.0
    """GPU-seconds on this node that the reports cover."""
    phase_seconds: dict[str, float] = {}
    """Wall time in seconds by phase of the job."""
    checkpoints: int = 0
    restarts: int = 0
    recovery_seconds: float = 0.0
    bubble: float | None = None
    loss: float | None = None
    """null also while it is NaN or infinite: see loss_events."""
    loss_events: dict[str, int] = {}
    quality: float | None = None
    quality_name: str = ""
    quality_target: float | None = None
    target_reached_at: float | None = None
    """Unix seconds; null until `quality` reaches `quality_target`."""


class LatencyOut(Struct, frozen=True, kw_only=True):
    """Latency quantiles of the slowest replica in seconds, at its latest scrape."""

    p50: float
    p95: float
    p99: float


class ServingOut(Struct, frozen=True, kw_only=True):
    """What a job's serving engines report."""

    engine: str = ""
    running: float | None = None
    waiting: float | None = None
    batch_fill: float | None = None
    kv_cache: float | None = None
    preemptions: float = 0.0
    tokens: dict[str, float] = {}
    draft_acceptance: float | None = None
    tokens_per_pass: float | None = None
    latency_seconds: dict[str, LatencyOut] = {}
    """By kind: ttft, itl, queue, e2e."""


_READINGS = (
    "power_watts", "temperature_celsius", "memory_used_bytes", "memory_total_bytes", "encoder_utilization",
    "decoder_utilization", "c2c_tx_bytes_per_second", "c2c_rx_bytes_per_second",
)  # fmt: skip
OutT = TypeVar("OutT", bound=Struct)


def from_attributes(shape: type[OutT], source: Struct, **values: Any) -> OutT:
    """Build a `shape` from `values`, and from attributes of `source` that have the names of its other fields."""
    for name in _shared_names(shape, type(source)):
        values.setdefault(name, getattr(source, name))
    return shape(**values)


@cache
def _shared_names(shape: type[Struct], source: type[Struct]) -> list[str]:
    return [name for name in shape.__struct_fields__ if hasattr(source, name)]


def training_out(job: JobView) -> TrainingOut | None:
    """Convert what the job has reported; None if it has reported nothing."""
    progress = job.progress
    if progress is None:
        return None
    name, value, _, target = progress.quality or ("", None, None, None)
    finite = progress.loss is not None and abs(progress.loss) < float("inf")
    return from_attributes(
        TrainingOut,
        progress,
        mfu=job.counters.short_ratio("reported", "reportable"),
        padding_tokens=progress.padding,
        model_flops=progress.flops,
        gpu_seconds=progress.gpu_time / SECOND,
        phase_seconds={phase: spent / SECOND for phase, spent in progress.phases},
        recovery_seconds=progress.recovery / SECOND,
        loss=progress.loss if finite else None,
        loss_events=dict(progress.events),
        quality=value,
        quality_name=name,
        quality_target=target,
        target_reached_at=_seconds(progress.target_at),
    )


def serving_out(job: JobView) -> ServingOut | None:
    """Convert what the job's serving engines report; None if none was found."""
    service = job.service
    if service is None:
        return None
    return from_attributes(
        ServingOut,
        service,
        batch_fill=service.fill,
        kv_cache=service.kv_use,
        tokens=dict(service.tokens),
        draft_acceptance=service.acceptance,
        tokens_per_pass=service.per_pass,
        latency_seconds={latency.kind: from_attributes(LatencyOut, latency) for latency in service.latencies},
    )


class CollectiveOut(Struct, frozen=True, kw_only=True):
    """One kind of collective or point-to-point transfer of a job, over its processes on this node."""

    calls: int = 0
    seconds: float = 0.0
    """Execution time on the GPUs, which may overlap with each other and with computation."""
    bytes: float = 0.0
    """Message bytes."""
    bus_bytes_per_second: float | None = None
    """Bus bandwidth by NCCL's convention, mean of about the last two minutes."""


class CommunicationOut(Struct, frozen=True, kw_only=True):
    """What an NCCL profiler plugin timed of a job's communication."""

    source: str = ""
    """inspector or comma."""
    share: float | None = None
    """Share of its processes' time in which a collective executed, 0-1; overlap with computation is included."""
    collectives: dict[str, CollectiveOut] = {}
    link_bytes_per_second: float | None = None
    """Bandwidth of a GPU's NVLinks in one direction, for a job on one node."""
    rank_shares: dict[str, float] = {}
    """The same share by rank, over about the last two minutes."""
    slowest_rank: str = ""
    """The rank of this node that the others wait for; empty: none stands out."""


def communication_out(job: JobView) -> CommunicationOut | None:
    """Convert what a plugin timed; None if there is none."""
    found = job.communication
    if found is None:
        return None
    return CommunicationOut(
        source=found.source,
        share=found.busy / found.covered if found.covered else None,
        collectives={
            use.name: from_attributes(CollectiveOut, use, seconds=use.nanoseconds / SECOND) for use in found.uses
        },
        link_bytes_per_second=job.link,
        rank_shares=dict(found.ranks),
        slowest_rank="" if found.slowest is None else found.slowest[0],
    )


class WindowOut(Struct, frozen=True, kw_only=True):
    """A time window that ends now: the three layers (0-1), their product, and its GPU-seconds by leak."""

    seconds: float
    """GPU-seconds paid; fewer than the window's name suggests if the GPU or job is younger than the window."""
    gau: float | None = None
    """GPU Allocation Utilization: allocated and working / paid and observed. null: nothing to divide by."""
    ectr: float | None = None
    """Effective Compute Time Ratio: computing / occupied."""
    emfu: float | None = None
    """Effective Model FLOPs Utilization: useful / computing; without workload reports an upper bound."""
    product: float | None = None
    """GAU x ECTR x eMFU: the useful share of what was paid."""
    floor: float | None = None
    """The product if unresolved kernel time counts as not useful: a lower bound."""
    coverage: float | None = None
    """Share of the paid time that was observed, 0-1."""
    driver_utilization: float | None = None
    """The driver's own utilization over the same time, as nvidia-smi shows it, 0-1."""
    leaks: dict[str, float] = {}
    """GPU-seconds by leak, and useful, unresolved, unobserved; they add up to `seconds`."""


_NO_TIME = WindowOut(seconds=0.0)


class OwnerOut(Struct, frozen=True, kw_only=True):
    """Who holds a GPU, as the scheduler names it; fields that the scheduler does not have are empty."""

    job_id: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    pod: str = ""
    workload_class: str = ""
    scheduler: str = ""
    qos: str = ""
    team: str = ""
    kind: str = ""
    array_id: str = ""
    array_task_id: str = ""
    het_job_offset: str = ""
    display_id: str = ""
    """The id under which users know the job: 6_1 in an array, 7+0 in a heterogeneous job, else `job_id`."""
    comment: str = ""
    nodes: int = 0
    """Nodes of the whole job; 0: not known."""
    time_limit_seconds: float | None = None


class HealthOut(Struct, frozen=True, kw_only=True):
    """A board's health; null where it does not report a value. Counters start when the driver is loaded."""

    xids: int = 0
    """Critical errors (Xid) reported since the daemon first saw the GPU."""
    last_xid: int | None = None
    recovery_action: int | None = None
    """nvmlDeviceGpuRecoveryAction_t: 0 none, 1 reset the GPU, 2 reboot the node, 3 drain peers, 4 drain and reset."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    nvlink_errors: int | None = None
    memory_temperature_celsius: float | None = None
    temperature_margin_celsius: float | None = None
    clock_limited_seconds: dict[str, float] = {}
    """Seconds that the clock was throttled, by reason."""


class GpuOut(Struct, frozen=True, kw_only=True):
    """One GPU. Power, temperature and memory are null unless the newest reading is live and has them."""

    uuid: str
    index: str
    model: str
    state: str
    reason: str = ""
    since: float = 0.0
    """Unix seconds at which it entered this state."""
    state_seconds: float = 0.0
    """Seconds from `since` to the sample."""
    hang_suspected: bool = False
    spin_since: float | None = None
    """Unix seconds at which it began to spin without progress; null unless it does now."""
    hung_since: float | None = None
    """While it is hung: Unix seconds at which the hang began, some minutes before it was confirmed (`since`)."""
    hang_confidence: float | None = None
    """While it spins: share of the eight indicators of a hang that are observed and point to one, 0-1."""
    hang_signs: dict[str, bool] = {}
    """While it spins: each indicator that can be observed, and whether it points to a hang."""
    last_work: float | None = None
    """Unix seconds of the owner's last effective work, or of the allocation if later; null while unallocated."""
    owners: list[OwnerOut] = []
    ranks: dict[str, str] = {}
    """By job_id, the ranks of the job's processes on this GPU ("4,5"); empty if not known."""
    pids: list[int] = []
    """Processes that have a context on it, by the driver's list; empty also while that is not current."""
    hour: list[SpanOut] = []
    """What the minutes of the last hour went to, the earliest first; after a restart, those since."""
    last_5_minutes: WindowOut
    last_hour: WindowOut
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    encoder_utilization: float | None = None
    """The driver's utilization of the video encoder, 0-1; null also where there is none."""
    decoder_utilization: float | None = None
    c2c_tx_bytes_per_second: float | None = None
    """Traffic of the chip-to-chip link to a Grace CPU; tx leaves the GPU. null without such a link."""
    c2c_rx_bytes_per_second: float | None = None
    live: bool = True
    """True if the newest reading is fresh, so that the values above are current."""
    age_seconds: float | None = None
    """Age of the newest accepted reading at the time of the sample; null before the first one."""
    peak_known: bool = False
    """False: the board's peak FLOPS is not known, so eMFU cannot be derived from hardware counters."""
    unsupported: list[str] = []
    """Signals that this hardware cannot report."""
    share: float = 1.0
    """Share of one paid GPU: 1 for a whole board, less for a MIG instance or a board's unpartitioned part."""
    profile: str = ""
    """MIG profile; empty for a board."""
    parent: str = ""
    """UUID of the board of a MIG instance; empty for a board."""
    health: HealthOut = HealthOut()


class CulpritOut(Struct, frozen=True, kw_only=True):
    """The rank that the other ranks of a job wait for, by NCCL's RAS or PyTorch's Flight Recorder."""

    text: str
    """All of the following, for display."""
    stuck: bool
    """The rank is missing, or ranks are in different collectives, which proves a hang; false: it may be at work."""
    rank: str
    """Empty, as the other texts: unknown."""
    host: str
    pid: int
    """0: unknown."""
    gpu: str
    collective: str
    """The collective in which the others wait."""
    sequence: int | None
    stack: str
    """Top of the rank's stack."""
    source: str
    """nccl_ras or flight_recorder."""


class EstimateOut(Struct, frozen=True, kw_only=True):
    """GPU-seconds of a leak as they were booked, and the least and the most that they may be."""

    booked: float
    low: float
    high: float
    evidence: dict[str, float] = {}
    """Of those booked, by kind of evidence: measured, reported, calibrated (by levels measured for this job) or
    estimated; empty for a leak that has one kind alone."""


class JobOut(Struct, frozen=True, kw_only=True):
    """One job's usage of this node. An ended job stays listed for a while, without GPUs."""

    owner: OwnerOut
    gpus: list[str] = []
    """Indices (or UUIDs, if the driver reports no index) of the GPUs it holds now."""
    paid_seconds: float = 0.0
    """GPU-seconds that it has held on this node in total."""
    useful_seconds: float = 0.0
    energy_joules: float = 0.0
    useful_energy_joules: float = 0.0
    energy_money: dict[str, float] = {}
    """Price of `energy_joules` by currency, at the present price of a kilowatt-hour; empty: not known."""
    co2_grams: float | None = None
    """What that energy emitted; null: the carbon intensity is not known, or differs by the hour."""
    memory_used_bytes: float | None = None
    started_at: float = 0.0
    """Unix seconds at which it was allocated its first GPU on this node."""
    first_work_seconds: float | None = None
    """Seconds from `started_at` to its first kernel on this node; null: none yet, or not observed."""
    cpu_seconds: float | None = None
    """CPU time of all cores on this node, as far as it was measured; null: not measured."""
    cpu_cores: float | None = None
    """Mean number of CPU cores in use over the latest few seconds; null: not measured now."""
    pressure: dict[str, float] = {}
    """Share of the latest few seconds in which a task of the job waited for cpu, io or memory, or was stopped by its
    CPU quota (cpu_quota); empty: not measured now."""
    stall_seconds: dict[str, float] = {}
    """GPU-seconds of data_stall and unattributed_stall by what explains them best: storage, cpu_quota, memory, cpu,
    network."""
    useful_pipe: str = TENSOR
    """The pipe whose activity is its useful work: tensor, fp64, fp32, or none, to which eMFU does not apply."""
    estimates: dict[str, EstimateOut] = {}
    """By leak that rests on an estimate: what was booked on this node in total, and its bounds."""
    training: TrainingOut | None = None
    """Its training reports; null: none were received."""
    serving: ServingOut | None = None
    """What its serving engines report; null: none was found."""
    hang_culprit: CulpritOut | None = None
    """While its GPUs spin without progress: the rank that the others wait for; null: unknown, or they do not spin."""
    hang: Hang | None = None
    """The hang it is in now; null: none is confirmed."""
    communication: CommunicationOut | None = None
    """What an NCCL profiler plugin timed; null: none does."""
    last_5_minutes: WindowOut
    last_hour: WindowOut


class NodeOut(Struct, frozen=True, kw_only=True):
    """The node, the source of its data, and how fresh that is."""

    node: str = ""
    """The node's name in its scheduler, else its host name."""
    host: str
    """The host name of the daemon: in a pod without the host's network, the pod's."""
    source: str = ""
    source_reason: str = ""
    """Why this source was selected, in one sentence."""
    scheduler: str = ""
    simulated: bool = False
    """True: generated by a model or a replay; nothing here was measured on this machine."""
    version: str = ""
    sampled_at: float
    """Unix seconds of the sample from which all values were computed."""
    age_seconds: float = 0.0
    """Age of the sample in seconds at the time of the request."""
    interval_seconds: float = 0.0
    last_error: str = ""
    last_5_minutes: WindowOut
    last_hour: WindowOut


class GpusOut(Struct, frozen=True, kw_only=True):
    """Response of /api/v1/gpus."""

    node: NodeOut
    gpus: list[GpuOut]


class JobsOut(Struct, frozen=True, kw_only=True):
    """Response of /api/v1/jobs."""

    node: NodeOut
    jobs: list[JobOut]


Money = dict[str, dict[str, float]]


class AccountOut(Struct, frozen=True, kw_only=True):
    """A time window of the node: the layers, and GPU-seconds, joules and money by leak."""

    window: WindowOut = _NO_TIME
    energy_joules: dict[str, float] | None = None
    """By leak; null for windows, because energy is only known since the start."""
    money: Money | None = None
    """By currency, then by leak, at the current prices. Empty: no price is configured. null: not known, for a window
    where only allocated time costs money (prices with basis = "allocated")."""
    energy_money: Money | None = None
    """Price of `energy_joules` by currency, then by leak, likewise; no part of `money`. null where that is null."""
    co2_grams: float | None = None
    """What that energy emitted; null: the carbon intensity is not known, or differs by the hour."""


_NO_NODE = NodeOut(host="", sampled_at=0.0, last_5_minutes=_NO_TIME, last_hour=_NO_TIME)


class PortOut(Struct, frozen=True, kw_only=True):
    """An RDMA port of the node, as last read; null where its adapter does not report a value."""

    name: str
    """Device and port number, mlx5_0:1."""
    link: str = ""
    """infiniband, roce, efa, or empty for another."""
    active: bool = False
    bytes_per_second: float | None = None
    """Nominal rate in one direction."""
    tx_bytes_per_second: float | None = None
    """Rate between the latest two reads; rx likewise."""
    rx_bytes_per_second: float | None = None
    waiting: float | None = None
    """Share of the link's ticks in which data had to wait (port_xmit_wait), an estimate."""


class AccountsOut(Struct, frozen=True, kw_only=True):
    """Response of /api/v1/node."""

    node: NodeOut = _NO_NODE
    gpus: float = 0.0
    """GPUs that are paid for now; a MIG instance and the unpartitioned part of a board count as fractions."""
    states: dict[str, int] = {}
    """Number of GPUs and MIG instances in each state."""
    prices: dict[str, float] = {}
    """Price of these GPUs per hour while allocated, by currency; empty: no price is configured."""
    grams_co2_per_kwh: float | None = None
    """Carbon intensity of the hour; null: not known."""
    ports: list[PortOut] = []
    last_5_minutes: AccountOut = AccountOut()
    last_hour: AccountOut = AccountOut()
    since_start: AccountOut = AccountOut()
    """Since the ledger began; includes GPUs that have been removed."""


class ReceiptsOut(Struct, frozen=True, kw_only=True):
    """Response of /api/v1/receipts."""

    node: str = ""
    """The node's name in its scheduler."""
    host: str = ""
    at: float = 0.0
    """Unix seconds of the newest sample; 0 before the first."""
    kept: bool = False
    """False: this node has no store, so only running and recently ended jobs are listed."""
    cut: bool = False
    """True: the response was truncated at its maximum size; request fewer."""
    receipts: list[JobRecord]
    """Job records, the latest end first; includes running jobs."""


class EventsOut(Struct, frozen=True, kw_only=True):
    """Response of /api/v1/events."""

    node: str = ""
    host: str = ""
    at: float = 0.0
    kept: bool = False
    events: list[NodeEvent]
    """Newest first."""


class Problem(Struct, frozen=True, kw_only=True):
    """Body of an error response."""

    detail: str
    """The reason for a person."""


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / SECOND


def gpus_out(snapshot: Snapshot, age: int, *, live: bool = True) -> GpusOut:
    """List all GPUs of the node. `age` is the snapshot's, in nanoseconds; if not `live`, readings are left out."""
    late = 0 if live else age
    return GpusOut(node=node_out(snapshot, age), gpus=[_gpu_out(gpu, snapshot, late=late) for gpu in snapshot.gpus])


def jobs_out(snapshot: Snapshot, age: int) -> JobsOut:
    """List all jobs of the node. `age` is the snapshot's, in nanoseconds."""
    devices, terms = [gpu.device for gpu in snapshot.gpus], snapshot.meta.terms
    return JobsOut(node=node_out(snapshot, age), jobs=[_job_out(job, devices, terms) for job in snapshot.jobs])


def node_out(snapshot: Snapshot, age: int) -> NodeOut:
    """Describe the node. `age` is the snapshot's, in nanoseconds."""
    books, meta = [gpu.counters for gpu in snapshot.gpus], snapshot.meta
    return from_attributes(
        NodeOut,
        meta,
        sampled_at=snapshot.wall / SECOND,
        age_seconds=age / SECOND,
        interval_seconds=meta.interval,
        last_5_minutes=window_out([(book, book.short) for book in books]),
        last_hour=window_out([(book, book.hour) for book in books]),
    )


def _gpu_out(gpu: GpuView, snapshot: Snapshot, *, late: int) -> GpuOut:
    device, spec, wall = gpu.device, gpu.device.spec, snapshot.wall
    hung_since = snapshot.hung_since.get(gpu_name(device)) if gpu.state is State.HUNG else None
    age = None if gpu.age is None else gpu.age + late
    live = gpu.reading if gpu.live and not late else None
    return from_attributes(
        GpuOut,
        device,
        state=gpu.state.value,
        reason=gpu.reason,
        since=gpu.since / SECOND,
        state_seconds=(wall - gpu.since) / SECOND,
        hang_suspected=gpu.hang_suspected,
        spin_since=_seconds(gpu.spin_since),
        hang_confidence=gpu.hang_confidence,
        hang_signs=dict(gpu.hang_signs),
        last_work=_seconds(gpu.worked_at),
        owners=[from_attributes(OwnerOut, owner) for owner in gpu.owners],
        ranks={owner.job_id: ranks for owner, ranks in zip(gpu.owners, gpu.ranks, strict=True)},
        pids=sorted(process.pid for process in (live and live.processes) or ()),
        hung_since=hung_since,
        hour=hour_spans(gpu, wall, hung_since=hung_since),
        last_5_minutes=window_out([(gpu.counters, gpu.counters.short)]),
        last_hour=window_out([(gpu.counters, gpu.counters.hour)]),
        power_limit_watts=valid_value(live, "enforced_power_limit_watts"),
        **{name: valid_value(live, name) for name in _READINGS},
        live=live is not None,
        age_seconds=_seconds(age),
        peak_known=spec is not None and spec.peak_flops is not None,
        unsupported=list(device.lacks),
        share=device.weight / PPM,
        health=_health_out(gpu),
    )


def _health_out(gpu: GpuView) -> HealthOut:
    health = gpu.health or Health(gpu.device.uuid)
    limited = {group: nanoseconds / SECOND for group, nanoseconds in gpu.limited}
    return from_attributes(
        HealthOut, health, xids=gpu.xids, last_xid=gpu.last_xid or None, clock_limited_seconds=limited
    )


def _job_out(job: JobView, devices: Sequence[Device], terms: Terms) -> JobOut:
    book = job.counters
    joules = sum(book.energy) / JOULE
    return JobOut(
        owner=from_attributes(OwnerOut, job.owner),
        gpus=[device.index or device.uuid for device in devices if device.uuid in job.gpus],
        paid_seconds=book.now.paid / SECOND,
        useful_seconds=book.now.parts[USEFUL_INDEX] / SECOND,
        energy_joules=joules,
        useful_energy_joules=book.energy[USEFUL_INDEX] / JOULE,
        energy_money=terms.energy.money(joules),
        co2_grams=terms.carbon.emitted(joules),
        memory_used_bytes=job.memory_used,
        started_at=job.start / SECOND,
        first_work_seconds=_seconds(job.first_work),
        **_host_values(job.host),
        useful_pipe=job.useful_pipe,
        estimates=_estimates_out(job),
        training=training_out(job),
        serving=serving_out(job),
        hang_culprit=_culprit_out(job.finding),
        hang=job.hang,
        communication=communication_out(job),
        last_5_minutes=window_out([(book, book.short)]),
        last_hour=window_out([(book, book.hour)]),
    )


def _estimates_out(job: JobView) -> dict[str, EstimateOut]:
    parts = job.counters.now.parts
    return {
        leak: EstimateOut(
            booked=parts[LEAK_NAMES.index(leak)] / SECOND,
            low=bounds.low / SECOND,
            high=bounds.high / SECOND,
            evidence={kind: amount / SECOND for kind, amount in job.evidence.get(leak, {}).items()},
        )
        for leak, bounds in job.bounds.items()
    }


def _host_values(host: HostView | None) -> dict[str, Any]:
    if host is None:
        return {}
    return {
        "cpu_seconds": host.cpu_seconds,
        "cpu_cores": host.cpu_cores,
        "pressure": dict(host.shares),
        "stall_seconds": {cause: spent / SECOND for cause, spent in host.stalls},
    }


def _culprit_out(finding: HangFinding | None) -> CulpritOut | None:
    return None if finding is None else from_attributes(CulpritOut, finding, text=describe_culprit(finding))


def window_out(books: Sequence[tuple[Counters, CounterSample]]) -> WindowOut:
    """Sum counters over (counters, sample at the window's start), then compute ratios of the sums."""
    parts = sum_by_leak([book.parts(since) for book, since in books])
    busy = sum(book.now.utilization - since.utilization for book, since in books)
    seen = sum(book.now.utilization_seen - since.utilization_seen for book, since in books)
    return from_attributes(
        WindowOut,
        layers(parts),
        seconds=sum(parts) / SECOND,
        driver_utilization=busy / seen if seen else None,
        leaks={name: part / SECOND for name, part in zip(LEAK_NAMES, parts, strict=True)},
    )


_HOUR = 3600 * SECOND
_EMPTY = Book().counters()
"""Counters of a book before its first entry."""


def accounts_out(snapshot: Snapshot, age: int) -> AccountsOut:
    """Account for the node's time, energy and money. `age` is the snapshot's, in nanoseconds."""
    node, found = node_out(snapshot, age), Counter(gpu.state for gpu in snapshot.gpus)
    priced = [(gpu, _price_of_gpu(gpu, snapshot)) for gpu in snapshot.gpus]
    return AccountsOut(
        node=node,
        gpus=sum(gpu.device.weight for gpu in snapshot.gpus) / PPM,
        states={state.value: found[state] for state in State},
        prices=_hourly_prices(priced),
        grams_co2_per_kwh=snapshot.meta.terms.carbon.at(snapshot.wall / SECOND),
        ports=[_port_out(state) for state in snapshot.ports],
        last_5_minutes=AccountOut(window=node.last_5_minutes, money=_window_money(priced, "short")),
        last_hour=AccountOut(window=node.last_hour, money=_window_money(priced, "hour")),
        since_start=_since_start(snapshot),
    )


def _port_out(state: PortState) -> PortOut:
    return from_attributes(
        PortOut, state.port, tx_bytes_per_second=state.sent, rx_bytes_per_second=state.received, waiting=state.waiting
    )


def _price_of_gpu(gpu: GpuView, snapshot: Snapshot) -> Price | None:
    """Return the price of this GPU; None if no configured price matches."""
    device, spec = gpu.device, gpu.device.spec.name if gpu.device.spec is not None else ""
    price = price_of(snapshot.meta.terms, model=device.model, spec=spec, wall=snapshot.wall)
    return None if price.currency == NO_PRICE.currency else price


def _hourly_prices(priced: Iterable[tuple[GpuView, Price | None]]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for gpu, price in priced:
        if price is not None:
            sums[price.currency] += price.per_gpu_hour * gpu.device.weight / PPM  # type: ignore[assignment]
    return dict(sums)


def _window_money(priced: Iterable[tuple[GpuView, Price | None]], window: str) -> Money | None:
    """Sum the money of a window by leak; None if a price depends on whether the GPU was allocated."""
    found: Money = {}
    for gpu, price in priced:
        if price is None:
            continue
        if price.per_unheld_hour != price.per_gpu_hour:
            return None
        _add_cost(found, price, gpu.counters.parts(getattr(gpu.counters, window)))
    return found


def _since_start(snapshot: Snapshot) -> AccountOut:
    gpus = (*snapshot.gpus, *snapshot.removed)
    found: Money = {}
    for gpu in gpus:
        price, unheld = _price_of_gpu(gpu, snapshot), dict(gpu.unheld)
        if price is not None:
            parts = gpu.counters.now.parts
            _add_cost(found, price, [part - unheld.get(index, 0) for index, part in enumerate(parts)])
            _add_cost(found, price, [unheld.get(index, 0) for index in range(len(parts))], hourly=price.per_unheld_hour)
    energy, terms = sum_by_leak(gpu.counters.energy for gpu in gpus), snapshot.meta.terms
    joules = {leak: spent / JOULE for leak, spent in zip(LEAK_NAMES, energy, strict=True)}
    return AccountOut(
        window=window_out([(gpu.counters, _EMPTY) for gpu in gpus]),
        energy_joules=joules,
        money=found,
        energy_money=_energy_money(terms.energy, joules),
        co2_grams=terms.carbon.emitted(sum(energy) / JOULE),
    )


def _energy_money(terms: EnergyTerms, joules: dict[str, float]) -> Money:
    price = terms.price_per_kwh
    return {} if price is None else {terms.currency: {leak: energy_amount(j, price) for leak, j in joules.items()}}


def _add_cost(found: Money, price: Price, parts: Iterable[int], *, hourly: float | None = None) -> None:
    """Add the cost of `parts`, nanoseconds in the order of LEAK_NAMES, to `found`."""
    sums = found.setdefault(price.currency, dict.fromkeys(LEAK_NAMES, 0.0))
    for name, part in zip(LEAK_NAMES, parts, strict=True):
        sums[name] += part / _HOUR * (price.per_gpu_hour if hourly is None else hourly)
