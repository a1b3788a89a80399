"""Defines the JSON of the API, and builds that of /api/v1/node, /gpus and /jobs from a Snapshot.

Seconds and ratios are floats; null is unknown. The pages and `top` read these values too. A daemon sends every field;
defaults stand for fields that an older daemon, which `top` asks, does not have. Refuses to judge, to format, and to
know HTTP. Where only allocated time costs money, the cost of a window is null, because a window does not keep
which part of it a GPU was allocated.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from exporter.core.job_record import JobRecord, NodeEvent
from exporter.core.leaks import LEAK_NAMES, USEFUL_INDEX
from exporter.core.ledger import Book, CounterSample
from exporter.core.model import PPM, SECOND, Device, Health, Owner, State
from exporter.core.prices import NO_PRICE, Price, Terms
from exporter.core.snapshot import Counters, GpuView, JobView, Snapshot, layers, price_of, sum_by_leak, valid_value


class TrainingOut(Struct, frozen=True, kw_only=True):
    """What a training job reports. Tokens, samples and FLOPs are those of the GPUs here that its reports speak of."""

    run: str = ""
    step: int | None = None
    steps: int = 0
    rework_steps: int = 0
    """Of the steps those that the run had made before."""
    epoch: float | None = None
    mfu: float | None = None
    """Over the last 5 minutes, by the job's own count, 0-1."""
    goodput: float | None = None
    """Of the run's time so far the share in steps that were new."""
    tokens: float = 0.0
    padding_tokens: float = 0.0
    samples: float = 0.0
    model_flops: float = 0.0
    gpu_seconds: float = 0.0
    """GPU-seconds here that the reports speak of."""
    phase_seconds: dict[str, float] = {}
    """Wall time by what the job did."""
    checkpoints: int = 0
    restarts: int = 0
    recovery_seconds: float = 0.0
    bubble: float | None = None
    loss: float | None = None
    """null also while it is no number: see loss_events."""
    loss_events: dict[str, int] = {}
    quality: float | None = None
    quality_name: str = ""
    quality_target: float | None = None
    target_reached_at: float | None = None
    """Unix seconds."""


class LatencyOut(Struct, frozen=True, kw_only=True):
    """Seconds below which so many requests of the slowest replica stayed, at the last look."""

    p50: float
    p95: float
    p99: float


class ServingOut(Struct, frozen=True, kw_only=True):
    """What a job's serving engines say."""

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


def training_out(job: JobView) -> TrainingOut | None:
    """None where the job has reported nothing."""
    progress = job.progress
    if progress is None:
        return None
    name, value, _, target = progress.quality or ("", None, None, None)
    finite = progress.loss is not None and abs(progress.loss) < float("inf")
    return TrainingOut(
        run=progress.run,
        step=progress.step,
        steps=progress.steps,
        rework_steps=progress.rework_steps,
        epoch=progress.epoch,
        mfu=job.counters.short_ratio("reported", "reportable"),
        goodput=progress.goodput,
        tokens=progress.tokens,
        padding_tokens=progress.padding,
        samples=progress.samples,
        model_flops=progress.flops,
        gpu_seconds=progress.gpu_time / SECOND,
        phase_seconds={phase: spent / SECOND for phase, spent in progress.phases},
        checkpoints=progress.checkpoints,
        restarts=progress.restarts,
        recovery_seconds=progress.recovery / SECOND,
        bubble=progress.bubble,
        loss=progress.loss if finite else None,
        loss_events=dict(progress.events),
        quality=value,
        quality_name=name,
        quality_target=target,
        target_reached_at=None if progress.target_at is None else progress.target_at / SECOND,
    )


def serving_out(job: JobView) -> ServingOut | None:
    """None where no engine of the job was found."""
    service = job.service
    if service is None:
        return None
    return ServingOut(
        engine=service.engine,
        running=service.running,
        waiting=service.waiting,
        batch_fill=service.fill,
        kv_cache=service.kv_use,
        preemptions=service.preemptions,
        tokens=dict(service.tokens),
        draft_acceptance=service.acceptance,
        tokens_per_pass=service.per_pass,
        latency_seconds={one.kind: LatencyOut(p50=one.p50, p95=one.p95, p99=one.p99) for one in service.latencies},
    )


class WindowOut(Struct, frozen=True, kw_only=True):
    """A stretch of the latest past: the three layers (0-1), their product, and where its GPU-seconds went."""

    seconds: float
    """GPU-seconds paid in it; less than the window's name says where the GPU or job is younger."""
    gau: float | None = None
    """GPU Allocation Utilization: allocated and working / paid and seen. null: nothing to divide by."""
    ectr: float | None = None
    """Effective Compute Time Ratio: computing / occupied."""
    emfu: float | None = None
    """Effective Model FLOPs Utilization: useful / computing; without workload reports an upper bound."""
    product: float | None = None
    """GAU x ECTR x eMFU: what you got for what you paid."""
    floor: float | None = None
    """The same if kernel time of unknown worth were worth nothing."""
    coverage: float | None = None
    """Share of the paid time that was seen."""
    driver_utilization: float | None = None
    """The driver's own utilisation over the same time, as nvidia-smi shows it."""
    leaks: dict[str, float] = {}
    """GPU-seconds by leak, and useful, unresolved, unobserved; they add up to `seconds`."""


_NO_TIME = WindowOut(seconds=0.0)


class OwnerOut(Struct, frozen=True, kw_only=True):
    """Who holds a GPU, in the scheduler's words; empty where it has none."""

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
    comment: str = ""
    nodes: int = 0
    """Of the whole job; 0: not known."""
    time_limit_seconds: float | None = None


class HealthOut(Struct, frozen=True, kw_only=True):
    """A board's condition beside its work; null where it does not say. Counters count from the load of the driver."""

    xids: int = 0
    """Critical errors told since the daemon saw the GPU first."""
    last_xid: int | None = None
    recovery_action: int | None = None
    """What the driver wants done: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain peers, 4 drain and reset."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    nvlink_errors: int | None = None
    memory_temperature_celsius: float | None = None
    temperature_margin_celsius: float | None = None
    clock_limited_seconds: dict[str, float] = {}
    """Time the clock was held down, by reason."""


class GpuOut(Struct, frozen=True, kw_only=True):
    """One GPU. Power, temperature and memory are null unless the newest reading has them now."""

    uuid: str
    index: str
    model: str
    state: str
    reason: str = ""
    since: float = 0.0
    """Unix seconds since which it has been in this state."""
    state_seconds: float = 0.0
    """The same as a duration, at the time of the sample."""
    hang_suspected: bool = False
    spin_since: float | None = None
    """Unix seconds since which it has spun without progress; null while it does not."""
    hang_confidence: float | None = None
    """While it spins: of the eight signs of a hang the share that were seen and agree."""
    hang_signs: dict[str, bool] = {}
    """While it spins: each sign that can be seen, and whether it speaks for a hang."""
    last_work: float | None = None
    """Unix seconds at which its holder last did effective work, or got it; null while nobody has it."""
    owners: list[OwnerOut] = []
    ranks: dict[str, str] = {}
    """By job_id, the ranks of that job whose processes are on it ("4,5"); empty where not known."""
    last_5_minutes: WindowOut
    last_hour: WindowOut
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    live: bool = True
    """The newest reading still holds: the figures above are the present."""
    age_seconds: float | None = None
    """Age of the newest accepted reading at the time of the sample; null before the first one."""
    peak_known: bool = False
    """False: the board's tensor peak is not known, so the worth of its kernel time is not either."""
    unsupported: list[str] = []
    """Signals this hardware cannot have."""
    share: float = 1.0
    """Of one paid GPU: 1 for a whole board, less for a MIG instance and for what is left of its board."""
    profile: str = ""
    """MIG profile; empty for a board."""
    parent: str = ""
    """UUID of the board a MIG instance is cut from."""
    health: HealthOut = HealthOut()


class JobOut(Struct, frozen=True, kw_only=True):
    """One job's part of this node. An ended job stays for a while, holding no GPU."""

    owner: OwnerOut
    gpus: list[str] = []
    """Indices (or UUIDs, where the driver gives none) of the GPUs it holds now."""
    paid_seconds: float = 0.0
    """GPU-seconds it held on this node in all."""
    useful_seconds: float = 0.0
    energy_joules: float = 0.0
    useful_energy_joules: float = 0.0
    memory_used_bytes: float | None = None
    started_at: float = 0.0
    """Unix seconds at which it was given its first GPU here."""
    first_work_seconds: float | None = None
    """From then to its first kernel here; null: none yet, or it was not seen."""
    training: TrainingOut | None = None
    """What it reports; null: nothing."""
    serving: ServingOut | None = None
    """What its serving engines say; null: none was found."""
    last_5_minutes: WindowOut
    last_hour: WindowOut


class NodeOut(Struct, frozen=True, kw_only=True):
    """The node, and how far to trust what is said of it."""

    host: str
    source: str = ""
    source_reason: str = ""
    """Why this source, in one sentence."""
    scheduler: str = ""
    simulated: bool = False
    """True: made by a model or a replay; nothing here was measured on this machine."""
    version: str = ""
    sampled_at: float
    """Unix seconds of the sample that everything here describes."""
    age_seconds: float = 0.0
    """Its age when this was asked."""
    interval_seconds: float = 0.0
    last_error: str = ""
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


Money = dict[str, dict[str, float]]


class AccountOut(Struct, frozen=True, kw_only=True):
    """A stretch of time of the node: the layers, and where its GPU-seconds, joules and money went."""

    window: WindowOut = _NO_TIME
    energy_joules: dict[str, float] | None = None
    """By leak; null: it is known since the start alone."""
    money: Money | None = None
    """By currency, then by leak, at the prices of now. Empty: no price is configured. null: not known for a window
    where only allocated time costs (prices with basis = "allocated")."""


_NO_NODE = NodeOut(host="", sampled_at=0.0, last_5_minutes=_NO_TIME, last_hour=_NO_TIME)


class AccountsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/node."""

    node: NodeOut = _NO_NODE
    gpus: float = 0.0
    """Whole GPUs that are paid for now: instances and what is left of their board count as their part."""
    states: dict[str, int] = {}
    """GPUs and instances in each state."""
    prices: dict[str, float] = {}
    """What these GPUs cost an hour while they are held, by currency; empty: no price is configured."""
    last_5_minutes: AccountOut = AccountOut()
    last_hour: AccountOut = AccountOut()
    since_start: AccountOut = AccountOut()
    """Of the books: GPUs that are gone are in it."""


class ReceiptsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/receipts."""

    node: str = ""
    """What its scheduler calls it."""
    host: str = ""
    at: float = 0.0
    """Unix seconds of the newest sample; 0 before the first."""
    kept: bool = False
    """False: nothing is kept on this node, and only jobs that it holds now, or held lately, are told of."""
    cut: bool = False
    """True: there are more, but the answer would be too large: ask for fewer."""
    receipts: list[JobRecord]
    """The newest end first; running jobs are among them."""


class EventsOut(Struct, frozen=True, kw_only=True):
    """Answer of /api/v1/events."""

    node: str = ""
    host: str = ""
    at: float = 0.0
    kept: bool = False
    events: list[NodeEvent]
    """The newest first."""


class Problem(Struct, frozen=True, kw_only=True):
    """Answer to what cannot be answered."""

    detail: str
    """Why, in plain words."""


def gpus_out(snapshot: Snapshot, age: int, *, live: bool = True) -> GpusOut:
    """All GPUs of the node; `age` is the snapshot's, in nanoseconds. Not `live`: its readings no longer hold."""
    late = 0 if live else age
    return GpusOut(
        node=node_out(snapshot, age), gpus=[_gpu_out(gpu, snapshot.wall, late=late) for gpu in snapshot.gpus]
    )


def jobs_out(snapshot: Snapshot, age: int) -> JobsOut:
    """All jobs of the node; `age` is the snapshot's, in nanoseconds."""
    devices = [gpu.device for gpu in snapshot.gpus]
    return JobsOut(node=node_out(snapshot, age), jobs=[_job_out(job, devices) for job in snapshot.jobs])


def node_out(snapshot: Snapshot, age: int) -> NodeOut:
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
        last_5_minutes=window_out([(book, book.short) for book in books]),
        last_hour=window_out([(book, book.hour) for book in books]),
    )


def _gpu_out(gpu: GpuView, wall: int, *, late: int) -> GpuOut:
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
        owners=[_owner_out(owner) for owner in gpu.owners],
        ranks={owner.job_id: ranks for owner, ranks in zip(gpu.owners, gpu.ranks, strict=True)},
        last_5_minutes=window_out([(gpu.counters, gpu.counters.short)]),
        last_hour=window_out([(gpu.counters, gpu.counters.hour)]),
        power_watts=valid_value(live, "power_watts"),
        power_limit_watts=valid_value(live, "enforced_power_limit_watts"),
        temperature_celsius=valid_value(live, "temperature_celsius"),
        memory_used_bytes=valid_value(live, "memory_used_bytes"),
        memory_total_bytes=valid_value(live, "memory_total_bytes"),
        live=live is not None,
        age_seconds=None if age is None else age / SECOND,
        peak_known=spec is not None and spec.peak_flops is not None,
        unsupported=list(device.lacks),
        share=device.weight / PPM,
        profile=device.profile,
        parent=device.parent,
        health=_health_out(gpu),
    )


def _health_out(gpu: GpuView) -> HealthOut:
    health = gpu.health or Health(gpu.device.uuid)
    return HealthOut(
        xids=gpu.xids,
        last_xid=gpu.last_xid or None,
        clock_limited_seconds={group: nanoseconds / SECOND for group, nanoseconds in gpu.limited},
        **{
            name: getattr(health, name)
            for name in HealthOut.__struct_fields__
            if hasattr(health, name) and name != "xids"
        },
    )


def _job_out(job: JobView, devices: Sequence[Device]) -> JobOut:
    book = job.counters
    return JobOut(
        owner=_owner_out(job.owner),
        gpus=[device.index or device.uuid for device in devices if device.uuid in job.gpus],
        paid_seconds=book.now.paid / SECOND,
        useful_seconds=book.now.parts[USEFUL_INDEX] / SECOND,
        energy_joules=sum(book.energy),
        useful_energy_joules=book.energy[USEFUL_INDEX],
        memory_used_bytes=job.memory_used,
        started_at=job.start / SECOND,
        first_work_seconds=None if job.first_work is None else job.first_work / SECOND,
        training=training_out(job),
        serving=serving_out(job),
        last_5_minutes=window_out([(book, book.short)]),
        last_hour=window_out([(book, book.hour)]),
    )


def _owner_out(owner: Owner) -> OwnerOut:
    return OwnerOut(**{name: getattr(owner, name) for name in OwnerOut.__struct_fields__})


def window_out(books: Sequence[tuple[Counters, CounterSample]]) -> WindowOut:
    """Sum first, then divide: books and where their window begins."""
    parts = sum_by_leak([book.parts(since) for book, since in books])
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
        leaks={name: part / SECOND for name, part in zip(LEAK_NAMES, parts, strict=True)},
    )


_HOUR = 3600 * SECOND
_EMPTY = Book().counters()
"""Every book before its first entry."""


def accounts_out(snapshot: Snapshot, age: int) -> AccountsOut:
    """The node's account; `age` is the snapshot's, in nanoseconds."""
    node, found = node_out(snapshot, age), Counter(gpu.state for gpu in snapshot.gpus)
    priced = [(gpu, _price_of_gpu(gpu, snapshot)) for gpu in snapshot.gpus]
    return AccountsOut(
        node=node,
        gpus=sum(gpu.device.weight for gpu in snapshot.gpus) / PPM,
        states={state.value: found[state] for state in State},
        prices=_hourly_prices(priced),
        last_5_minutes=AccountOut(window=node.last_5_minutes, energy_joules=None, money=_window_money(priced, "short")),
        last_hour=AccountOut(window=node.last_hour, energy_joules=None, money=_window_money(priced, "hour")),
        since_start=_since_start(snapshot),
    )


def price_or_none(terms: Terms, model: str, spec: str, wall: int) -> Price | None:
    """What an hour costs; None where no price fits."""
    price = price_of(terms, model=model, spec=spec, wall=wall)
    return None if price.currency == NO_PRICE.currency else price


def _price_of_gpu(gpu: GpuView, snapshot: Snapshot) -> Price | None:
    spec = gpu.device.spec.name if gpu.device.spec is not None else ""
    return price_or_none(snapshot.meta.terms, gpu.device.model, spec, snapshot.wall)


def _hourly_prices(priced: Iterable[tuple[GpuView, Price | None]]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for gpu, price in priced:
        if price is not None:
            sums[price.currency] += price.per_gpu_hour * gpu.device.weight / PPM  # type: ignore[assignment]
    return dict(sums)


def _window_money(priced: Iterable[tuple[GpuView, Price | None]], window: str) -> Money | None:
    """A book's window by leak, in money; None where one of the prices asks who held the GPU."""
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
    joules = [sum(column) for column in zip(*(gpu.counters.energy for gpu in gpus), strict=True)] or [0.0] * len(
        LEAK_NAMES
    )
    return AccountOut(
        window=window_out([(gpu.counters, _EMPTY) for gpu in gpus]),
        energy_joules=dict(zip(LEAK_NAMES, joules, strict=True)),
        money=found,
    )


def _add_cost(found: Money, price: Price, parts: Iterable[int], *, hourly: float | None = None) -> None:
    """Nanoseconds by leak, in the order of NAMES, at a price."""
    sums = found.setdefault(price.currency, dict.fromkeys(LEAK_NAMES, 0.0))
    for name, part in zip(LEAK_NAMES, parts, strict=True):
        sums[name] += part / _HOUR * (price.per_gpu_hour if hourly is None else hourly)
