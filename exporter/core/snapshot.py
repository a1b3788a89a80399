"""Copies the ledger into an immutable `Snapshot`, and derives ratios from it.

The agent replaces one reference, so a scrape never waits for a sample. Every figure is a counter, or a ratio of two.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from msgspec import Struct

from exporter.core.collectives import CommunicationView, communication_view
from exporter.core.evidence import HANG_SIGNS, LARGEST_AMOUNT, hang_signs
from exporter.core.findings import current_finding
from exporter.core.hangs import Hang, current_hang
from exporter.core.host import HostView, PortState, current_ports, host_view
from exporter.core.leaks import LAYER_OF, sum_by_layer
from exporter.core.ledger import SPREAD_BINS, AccountKey, Book, CounterSample, Gpu, Job, Ledger, MigSlice
from exporter.core.model import NEVER, PPM, Device, HangFinding, Health, Owner, Reading, State
from exporter.core.pipes import TENSOR
from exporter.core.policy import EXPORTED_THRESHOLDS
from exporter.core.prices import Price, Terms, price_at
from exporter.core.progress import TrainingView, training_view
from exporter.core.serving import ServingView, serving_view
from exporter.core.uncertainty import Bounds, bounds_by_leak, evidence_by_leak

SHORT_WINDOW = 300
"""Window of the ratio gauges, seconds."""
HOUR_WINDOW = 3600


class Layers(Struct, frozen=True):
    """The three layers and their product, 0-1. None: the denominator is 0."""

    gau: float | None
    ectr: float | None
    emfu: float | None
    product: float | None
    """GAU x ECTR x eMFU: the useful share of paid time; unresolved kernel time is extrapolated from the rest."""
    floor: float | None
    """Useful time over observed time, counting unresolved time as useless."""
    coverage: float | None
    """Observed share of the paid time."""


class LayerTimes(NamedTuple):
    """Paid time, and what is left of it after subtracting unobserved time and the losses of each layer in turn."""

    paid: float
    seen: float
    occupied: float
    computing: float
    resolved: float
    """Computing without kernel time whose usefulness is unknown."""
    useful: float


def layer_times(by_layer: Mapping[str, float]) -> LayerTimes:
    """The times of the layers, from the time that each of LAYERS took."""
    useful = by_layer["useful"]
    resolved = by_layer["emfu"] + useful
    computing = resolved + by_layer["unresolved"]
    occupied = computing + by_layer["ectr"]
    seen = occupied + by_layer["gau"]
    return LayerTimes(seen + by_layer["unobserved"], seen, occupied, computing, resolved, useful)


def layer_ratios(times: LayerTimes) -> Layers:
    """GAU, ECTR, eMFU and their product (accounting, section 1). Sum first, then divide (section 7)."""
    gau, ectr = _ratio(times.occupied, times.seen), _ratio(times.computing, times.occupied)
    emfu, floor = _ratio(times.useful, times.resolved), _ratio(times.useful, times.seen)
    product = None if gau is None or ectr is None or emfu is None else gau * ectr * emfu
    return Layers(gau, ectr, emfu, product if times.computing else floor, floor, _ratio(times.seen, times.paid))


def layers(parts: Iterable[int]) -> Layers:
    """Layers of nanoseconds in the order of LEAK_NAMES."""
    return layer_ratios(layer_times(sum_by_layer(parts)))


def sum_by_leak(columns: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Sum columns of nanoseconds in the order of LEAK_NAMES; all zero for no columns."""
    rows = list(columns)
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(LAYER_OF)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


class Counters(Struct, frozen=True, dict=True):
    """A book's counters now, five minutes ago and an hour ago."""

    now: CounterSample
    short: CounterSample
    hour: CounterSample
    energy: tuple[int, ...]
    """Millijoules by leak, in the order of LEAK_NAMES."""

    def parts(self, since: CounterSample) -> tuple[int, ...]:
        """Nanoseconds by leak since a sample."""
        return tuple(map(sub, self.now.parts, since.parts))

    @cached_property
    def recent(self) -> Layers:
        """Layers of the short window; cached because several metrics of a scrape show them."""
        return layers(self.parts(self.short))

    def energy_by_layer(self) -> dict[str, int]:
        """Millijoules by layer, including zeros."""
        return sum_by_layer(self.energy)

    def short_ratio(self, part: str, whole: str) -> float | None:
        """Ratio of two counters over the short window."""
        now, then = self.now, self.short
        return _ratio(getattr(now, part) - getattr(then, part), getattr(now, whole) - getattr(then, whole))

    def percentiles(self, shares: Sequence[float]) -> tuple[float, ...]:
        """Percentiles of engine activity over the short window, each as the middle of a bin, 0-1; none if no time.

        `shares` are ascending fractions between 0 and 1, exclusive.
        """
        below = list(accumulate(map(sub, self.now.spread, self.short.spread)))
        total = below[-1]
        return tuple((bisect_left(below, share * total) + 0.5) / SPREAD_BINS for share in shares) if total else ()


class GpuView(Struct, frozen=True):
    """One GPU at the time of the snapshot."""

    device: Device
    counters: Counters
    state: State
    reason: str
    since: int
    """Unix nanoseconds."""
    hang_suspected: bool
    owners: tuple[Owner, ...]
    ranks: tuple[str, ...]
    """For each owner, its ranks on this GPU."""
    reading: Reading | None
    """The latest accepted reading."""
    live: bool
    """The latest reading is trusted and no unobserved time follows it: its values are current."""
    age: int | None
    """Nanoseconds since the end of the latest reading."""
    rejected: tuple[tuple[str, int], ...] = ()
    """Rejected fields and readings, by reason."""
    unobserved: tuple[tuple[str, int], ...] = ()
    """Unobserved GPU-nanoseconds, by reason."""
    health: Health | None = None
    xids: int = 0
    """Number of Xid errors since the daemon first saw the GPU, and the last Xid (0: none)."""
    last_xid: int = 0
    limited: tuple[tuple[str, int], ...] = ()
    """Nanoseconds with the clock limited, by group of clock event reasons."""
    shared: tuple[tuple[str, int], ...] = ()
    """Nanoseconds held by several owners, by how they were divided: sm or equal."""
    unheld: tuple[tuple[int, int], ...] = ()
    """Unallocated nanoseconds by leak, as index into LEAK_NAMES."""
    worked_at: int | None = None
    """When its holder last did effective work, or was allocated it, Unix nanoseconds; None: unallocated."""
    spin_since: int | None = None
    """Since when it has been spinning, Unix nanoseconds; None: not spinning."""
    hang_signs: tuple[tuple[str, bool], ...] = ()
    """While it spins: each available hang indicator, and whether it points to a hang."""
    minutes: tuple[CounterSample, ...] = ()
    """Its counters about a minute apart, over the last hour, the oldest first."""

    @property
    def hang_confidence(self) -> float | None:
        """Share of all hang indicators that are available and point to a hang; None while not spinning."""
        return None if self.spin_since is None else sum(sign for _, sign in self.hang_signs) / len(HANG_SIGNS)


class JobView(Struct, frozen=True):
    """One job's part on this node."""

    owner: Owner
    counters: Counters
    gpus: tuple[str, ...]
    """UUIDs of the GPUs it holds now."""
    memory_used: float | None
    """Bytes, over all its GPUs."""
    start: int = 0
    """When it was allocated its first GPU on this node, Unix nanoseconds."""
    counted_since: int = 0
    """When its counters were 0, Unix nanoseconds; stays the same while they go on."""
    first_work: int | None = None
    """Nanoseconds from `start` to its first kernel; None: no kernel yet, or the start was not observed."""
    states: tuple[tuple[State, int], ...] = ()
    """Number of its GPUs by state."""
    suspected: int = 0
    """Number of its GPUs that are hung or suspected to be."""
    spin_since: int | None = None
    """Since when the first of those has been spinning, Unix nanoseconds."""
    worked_at: int | None = None
    """When one of its GPUs last did effective work, or was allocated to it, Unix nanoseconds; None: it holds none."""
    without_process: int = 0
    """Number of its GPUs on which the driver lists no process."""
    without_process_since: int | None = None
    """Since when the first of those has had no process, Unix nanoseconds."""
    costs: tuple[tuple[str, float], ...] = ()
    """Price per hour of its GPUs, by currency."""
    smallest_slice: MigSlice | None = None
    excess: int | None = None
    """GPU-nanoseconds beyond `smallest_slice`."""
    progress: TrainingView | None = None
    """Progress from its training reports."""
    service: ServingView | None = None
    """Totals and gauges of its serving engines."""
    communication: CommunicationView | None = None
    """What a profiler plugin timed of its communication."""
    link: float | None = None
    """Bandwidth of the NVLinks of one of its GPUs, one direction, bytes per second, if it communicates over no other
    link: it runs on one node. None otherwise, and if unknown."""
    bandwidth: float | None = None
    """Peak memory bandwidth of one of its GPUs, bytes per second."""
    host: HostView | None = None
    """CPU use, pressure and causes of waiting; None: not measured."""
    tensor_parallel_lost: float | None = None
    """Bandwidth tensor-parallel groups lose by exceeding an NVLink domain, bytes per second; None: none or unknown."""
    finding: HangFinding | None = None
    """The rank that the others wait for, while they spin; None: they do not, or it is unknown."""
    hang: Hang | None = None
    """None: it does not hang now, or that is not confirmed."""
    useful_pipe: str = TENSOR
    """The pipe whose activity is its useful work, one of PIPES; none: eMFU does not apply."""
    bounds: Mapping[str, Bounds] = {}
    """Of the leaks that rest on an estimate, the least and the most that they may be."""
    evidence: Mapping[str, Mapping[str, int]] = {}
    """Nanoseconds by kind of evidence, of the leaks that can have several."""


class ModelView(Struct, frozen=True):
    """Totals of all GPUs of one model in this node's inventory, now or earlier."""

    model: str
    spec: str
    parts: tuple[int, ...]
    """Nanoseconds by leak, in the order of LEAK_NAMES."""
    unheld: Mapping[int, int]
    """Unallocated nanoseconds by leak, as index into LEAK_NAMES."""
    engine: int
    energy: Mapping[str, int]
    """Millijoules by layer."""
    weight: int
    """GPUs in the inventory now, in ppm of one GPU."""
    peak_flops: float | None


class ReloadStatus(Struct, frozen=True, kw_only=True):
    """Status of reloading the configuration file."""

    at: float
    """When the current configuration was loaded, Unix seconds."""
    refused: str = ""
    """Why the current file was rejected; empty: it was loaded."""
    restart: tuple[str, ...] = ()
    """Dotted names of changed settings that take effect only after a restart."""


class HistoryStatus(Struct, frozen=True, kw_only=True):
    """Status of this node's history store."""

    works: bool
    """The latest write succeeded."""
    saved_at: float = 0.0
    """Time of the latest checkpoint, Unix seconds; 0: none yet."""
    bytes: int = 0
    """Size on disk."""
    failures: int = 0
    """Failed writes since the start."""
    problem: str = ""
    """Why the latest write failed."""


class DaemonMetadata(Struct, frozen=True, kw_only=True):
    """Metadata and self-monitoring of the daemon."""

    version: str = ""
    source: str = ""
    source_reason: str = ""
    scheduler: str = ""
    simulated: bool = False
    host: str = ""
    started: float = 0.0
    """Unix seconds."""
    interval: float = 0.0
    """Seconds between samples, as configured."""
    ticks: int = 0
    late_ticks: int = 0
    read_seconds: float = 0.0
    """Total time spent in the source and the scheduler."""
    core_seconds: float = 0.0
    """Total time spent between an observation and its ledger entries."""
    unanswered_seconds: float | None = None
    """Age of the pending request to the scheduler's controller; None: the scheduler has no controller."""
    errors: tuple[tuple[str, int], ...] = ()
    """Exceptions the sampling loop caught, by kind."""
    messages: tuple[tuple[str, int], ...] = ()
    """Messages from workloads, by outcome."""
    last_error: str = ""
    terms: Terms = Terms()
    history: HistoryStatus | None = None
    """None: no history is stored."""
    pushes: tuple[tuple[str, int], ...] = ()
    """Pushes over OTLP by outcome; empty: none is configured."""
    reload: ReloadStatus | None = None
    """None: the configuration file is not watched."""

    @property
    def node(self) -> str:
        """The node's name in its scheduler, else its host name, which in a pod is the pod's."""
        return self.terms.node or self.host


class Snapshot(Struct, frozen=True, dict=True):
    """The node at one moment."""

    at: int
    wall: int
    gpus: tuple[GpuView, ...]
    jobs: tuple[JobView, ...]
    departed: tuple[JobView, ...]
    """Jobs evicted in this step."""
    removed: tuple[GpuView, ...]
    """GPUs that are no longer in the inventory; their time stays in the node's counters."""
    state_entries: tuple[tuple[State, int], ...]
    """Times a GPU entered each state."""
    detections: tuple[tuple[State, int, int], ...]
    """Number of detected hangs and zombies, and total nanoseconds from the first indicator to detection."""
    thresholds: tuple[tuple[str, float], ...]
    """Policy thresholds for alert rules."""
    account_totals: tuple[tuple[AccountKey, tuple[int, ...]], ...]
    """Nanoseconds by leak, in the order of LEAK_NAMES, of each account since the start, including evicted jobs."""
    refused: tuple[tuple[str, int], ...]
    """Rejected input that belongs to no single GPU, by reason."""
    faults: tuple[tuple[str, int], ...]
    ports: tuple[PortState, ...]
    """The node's RDMA ports that were read lately."""
    conservation_errors: int
    counted_since: int
    """When the counters of the ledger were 0, Unix nanoseconds; stays the same while they go on."""
    allocations_age: int | None
    """Nanoseconds since the scheduler last confirmed the allocations; None: never."""
    meta: DaemonMetadata

    @cached_property
    def recent(self) -> Layers:
        """Layers of the whole node over the short window."""
        return layers(sum_by_leak(gpu.counters.parts(gpu.counters.short) for gpu in self.gpus))

    @cached_property
    def hung_since(self) -> Mapping[str, float]:
        """When each GPU that is in a hang began to make no progress, Unix seconds, by its index or UUID."""
        hung = [gpu for job in self.jobs if job.hang is not None for gpu in job.hang.gpus]
        return {gpu.gpu: gpu.since for gpu in sorted(hung, key=lambda gpu: -gpu.since)}

    @cached_property
    def models(self) -> tuple[ModelView, ...]:
        """The node's totals by model, including removed GPUs, as counters must not decrease."""
        found: dict[str, list[GpuView]] = {}
        for gpu in (*self.gpus, *self.removed):
            found.setdefault(gpu.device.model, []).append(gpu)
        here = {gpu.device.uuid for gpu in self.gpus}
        return tuple(_model(model, gpus, here) for model, gpus in sorted(found.items()))


def take_snapshot(ledger: Ledger, meta: DaemonMetadata) -> Snapshot:
    """Copy the ledger; takes a few microseconds per GPU and shares nothing mutable."""
    at = ledger.at or 0
    all_timers = [gpu.timers for gpu in ledger.gpus.values()]
    return Snapshot(
        at=at,
        wall=ledger.wall,
        gpus=tuple(_gpu(ledger, gpu, at) for gpu in sorted(ledger.gpus.values(), key=_device_order) if gpu.listed),
        jobs=tuple(_job(ledger, job, at, meta.terms) for _, job in sorted(ledger.jobs.items())),
        departed=tuple(_job(ledger, job, at, meta.terms) for job in ledger.departed),
        removed=tuple(_gpu(ledger, gpu, at) for gpu in ledger.gpus.values() if not gpu.listed),
        state_entries=tuple((state, ledger.state_entries[state]) for state in State),
        detections=(
            (State.HUNG, sum(timers.hangs for timers in all_timers), sum(timers.to_hang for timers in all_timers)),
            (
                State.ZOMBIE,
                sum(timers.zombies for timers in all_timers),
                sum(timers.to_zombie for timers in all_timers),
            ),
        ),
        thresholds=tuple((name, getattr(ledger.policy, name)) for name in EXPORTED_THRESHOLDS),
        account_totals=tuple(sorted(ledger.account_totals().items())),
        refused=tuple(sorted(ledger.refused.items())),
        faults=tuple(sorted(ledger.faults.items())),
        ports=tuple(current_ports(ledger.ports.values(), at)),
        conservation_errors=ledger.conservation_errors,
        counted_since=ledger.first[1] if ledger.first else ledger.wall,
        allocations_age=None if ledger.allocations_at == NEVER else max(0, at - ledger.allocations_at),
        meta=meta,
    )


def _device_order(gpu: Gpu) -> tuple[int, str, str]:
    index = gpu.device.index
    return (int(index) if index.isdigit() else 1 << 30, index, gpu.device.uuid)


def _counters(book: Book) -> Counters:
    return Counters(book.counters(), book.window(SHORT_WINDOW), book.window(HOUR_WINDOW), tuple(book.energy))


def _gpu(ledger: Ledger, gpu: Gpu, at: int) -> GpuView:
    return GpuView(
        device=gpu.device,
        counters=_counters(gpu.book),
        state=gpu.state,
        reason=gpu.reason,
        since=ledger.wall - (at - gpu.since),
        hang_suspected=_hang_suspected(gpu),
        owners=tuple(allocation.owner for allocation in gpu.holders),
        ranks=tuple(allocation.ranks for allocation in gpu.holders),
        reading=gpu.reading,
        live=_live(gpu),
        age=None if gpu.reading is None else at - gpu.reading.end,
        rejected=tuple(sorted(gpu.rejected.items())),
        unobserved=tuple(sorted(gpu.unobserved.items())),
        health=gpu.board_health.health,
        xids=gpu.board_health.xids,
        last_xid=gpu.board_health.last_xid,
        limited=tuple(gpu.board_health.limited.items()),
        shared=tuple(sorted(gpu.shared.items())),
        unheld=tuple(gpu.book.unheld.items()),
        worked_at=_wall(ledger, at, gpu.timers.worked_at) if gpu.holders else None,
        spin_since=_wall(ledger, at, gpu.timers.spin_since),
        hang_signs=_hang_signs(gpu),
        minutes=tuple(gpu.book.samples),
    )


def _wall(ledger: Ledger, at: int, moment: int | None) -> int | None:
    """Convert monotonic to Unix nanoseconds."""
    return None if moment is None else ledger.wall - (at - moment)


def _hang_suspected(gpu: Gpu) -> bool:
    return gpu.timers.hung or gpu.timers.spin >= gpu.timers.suspect


def _hang_signs(gpu: Gpu) -> tuple[tuple[str, bool], ...]:
    if gpu.timers.spin_since is None or gpu.last_evidence is None:
        return ()
    return hang_signs(gpu.last_evidence, gpu.criteria.policy, celsius=gpu.timers.celsius)


def _model(model: str, gpus: list[GpuView], here: set[str]) -> ModelView:
    unheld: Counter[int] = Counter()
    energy: Counter[str] = Counter()
    for gpu in gpus:
        unheld.update(dict(gpu.unheld))
        energy.update(gpu.counters.energy_by_layer())
    return ModelView(
        model=model,
        spec=next((gpu.device.spec.name for gpu in gpus if gpu.device.spec is not None), ""),
        parts=sum_by_leak(gpu.counters.now.parts for gpu in gpus),
        unheld=unheld,
        engine=sum(gpu.counters.now.engine for gpu in gpus),
        energy=energy,
        weight=sum(gpu.device.weight for gpu in gpus if gpu.device.uuid in here),
        peak_flops=next((peak for gpu in gpus if (peak := _peak(gpu.device)) is not None), None),
    )


def _peak(device: Device) -> float | None:
    """Peak FLOP/s of a whole GPU of the device's model; None for the unpartitioned remainder of a board."""
    if device.unpartitioned or device.spec is None or device.spec.peak_flops is None:
        return None
    return device.spec.peak_flops * PPM / device.weight


def price_of(terms: Terms, *, model: str, spec: str, wall: int) -> Price:
    """Price per hour of a whole GPU of a model on this node at Unix time `wall`, nanoseconds."""
    return price_at(terms.prices, model=model, spec=spec, pool=terms.pool, wall_ns=wall)


def _live(gpu: Gpu) -> bool:
    return gpu.reading is not None and gpu.reading.end == gpu.book.until and not gpu.reading.distrust


def valid_value(reading: Reading | None, name: str) -> float | None:
    """One amount of a reading, if finite and not negative, else None."""
    value: float | None = None if reading is None else getattr(reading, name)
    return value if value is not None and 0 <= value < LARGEST_AMOUNT else None


def _job(ledger: Ledger, job: Job, at: int, terms: Terms) -> JobView:
    name = job.owner.job_id
    holding = [gpu for gpu in ledger.gpus.values() if gpu.listed and gpu.held_by(name)]
    states = Counter(gpu.state_of(name) for gpu in holding)
    suspects = (gpu for gpu in holding if name not in gpu.bystanders and _hang_suspected(gpu))
    spinning = [gpu.timers.spin_since for gpu in suspects]
    without_process = [gpu.timers.bare_since for gpu in holding if gpu.timers.bare_since is not None]
    used = [valid_value(gpu.reading, "memory_used_bytes") for gpu in holding if _live(gpu)]
    finding = current_finding(job, holding)
    known = [bytes_ for bytes_ in used if bytes_ is not None]
    return JobView(
        owner=job.owner,
        counters=_counters(job.book),
        gpus=tuple(sorted(gpu.device.uuid for gpu in holding)),
        memory_used=sum(known) if known else None,
        start=ledger.wall - (at - job.start),
        counted_since=ledger.began(job.book.since),
        first_work=job.first_work,
        states=tuple(sorted(states.items())),
        suspected=len(spinning),
        spin_since=_wall(ledger, at, min((since for since in spinning if since is not None), default=None)),
        worked_at=_wall(ledger, at, max((gpu.timers.worked_at for gpu in holding), default=None)),
        without_process=len(without_process),
        without_process_since=_wall(ledger, at, min(without_process, default=None)),
        costs=_costs(holding, terms, ledger.wall),
        smallest_slice=None if job.peak_demand is None else job.peak_demand.fitting,
        excess=None if job.peak_demand is None or not job.peak_demand.unneeded else job.peak_demand.unneeded,
        progress=None if job.progress is None else training_view(job.progress, at=at, wall=ledger.wall),
        service=None if job.service is None else serving_view(job.service, at),
        communication=None if job.communication is None else communication_view(job.communication, at),
        link=_link(job, holding) if job.communication is not None else None,
        bandwidth=_bandwidth(holding) if job.service is not None else None,
        host=None if job.host is None else host_view(job.host, at),
        tensor_parallel_lost=_tensor_parallel_lost(job, holding),
        finding=finding,
        hang=current_hang(name, holding, finding, at=at, wall=ledger.wall),
        useful_pipe=job.owner.useful_pipe or job.level_tracker.pipes.pipe(),
        bounds=bounds_by_leak(job.book.parts, job.uncertainty),
        evidence=evidence_by_leak(job.book.parts, job.uncertainty),
    )


def _bandwidth(holding: list[Gpu]) -> float | None:
    specs = [gpu.device.spec for gpu in holding if gpu.device.spec is not None]
    return next((spec.memory_bandwidth_bytes_per_second for spec in specs), None)


def _link(job: Job, holding: list[Gpu]) -> float | None:
    if job.owner.nodes != 1:
        return None
    return next((gpu.device.spec.nvlink_bytes_per_second for gpu in holding if gpu.device.spec is not None), None)


def _tensor_parallel_lost(job: Job, holding: list[Gpu]) -> float | None:
    """Bandwidth lost if a group exceeds the NVLink domain: traffic is then limited by PCIe, even over the network."""
    parallel = None if job.progress is None else job.progress.parallel
    spec = next((gpu.device.spec for gpu in holding if gpu.device.spec is not None), None)
    if parallel is None or spec is None or not spec.nvlink_bytes_per_second:
        return None
    if parallel.tensor <= max(len(holding), spec.nvlink_domain):
        return None
    return spec.nvlink_bytes_per_second - (spec.pcie_bytes_per_second or 0.0)


def _costs(holding: list[Gpu], terms: Terms, wall: int) -> tuple[tuple[str, float], ...]:
    """Each GPU's price, divided among its holders."""
    costs: dict[str, float] = {}
    for gpu in holding:
        device = gpu.device
        price = price_of(terms, model=device.model, spec=device.spec.name if device.spec else "", wall=wall)
        share = price.per_gpu_hour * device.weight / PPM / len(gpu.holders)
        costs[price.currency] = costs.get(price.currency, 0.0) + share
    return tuple(sorted(costs.items()))
