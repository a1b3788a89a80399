"""Defines METRICS, one row per exported metric: its name, help, labels, scope and reader.

`docs/metrics.md` is generated from it. Values are floats, or exact decimal strings where the ledger's sums must stay
exact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Generic, TypeVar

from msgspec import Struct

from exporter.core.board_health import CLOCK_LIMITERS
from exporter.core.collectives import COLLECTIVE_NAMES, CollectiveView, CommunicationView
from exporter.core.evidence import HANG_SIGNS
from exporter.core.host import CAUSES, RESOURCES, PortState
from exporter.core.leaks import LAYER_OF, LAYERS, LEAK_NAMES, sum_by_layer
from exporter.core.model import JOULE, PPM, SECOND, State
from exporter.core.pipes import TENSOR
from exporter.core.policy import EXPORTED_THRESHOLDS
from exporter.core.progress import LOSS_EVENTS, WALL_TIME_PHASES, TrainingView
from exporter.core.serving import TOKEN_KINDS, ServingView
from exporter.core.snapshot import (
    GpuView,
    JobView,
    ModelView,
    Snapshot,
    layer_times,
    price_of,
    sum_by_leak,
    valid_value,
)

MetricSample = tuple[tuple[str, ...], float | str]
MetricReader = Callable[[Snapshot], Iterable[MetricSample]]
_LEAK_LABELS = tuple(zip(LEAK_NAMES, LAYER_OF, strict=True))
UNOBSERVED_REASONS = frozenset({
    "starting", "gap", "stale", "blank", "zero_filled", "multiplexed", "no_engine_signal", "owner_unknown", "paused",
    "profiling_refused", "source_failed", "source_hung", "gpu_lost", "gpu_missing", "clock_step",
    "mig_layout", "handle_stale", "exporter_down",
})  # fmt: skip
"""Reasons with a series of their own; any other counts as "other", so that no input can add series."""


class Metric(Struct, frozen=True):
    """One metric. `scope` is what a series belongs to: a gpu, a job, an account or a model on the node, or the node."""

    name: str
    type: str
    help: str
    read: MetricReader
    labels: tuple[str, ...] = ()
    unit: str = ""
    scope: str = "node"
    max_series: int = 1
    """Maximum number of series per instance of its scope; 1 if few label values occur (states, reasons)."""
    since: str = "ledger"
    """What a counter's first 0 began with, one of COUNTED_SINCE."""


def seconds(nanoseconds: int) -> str:
    """Exact decimal seconds: floats would break the ledger's sum in the last digit."""
    if not nanoseconds:  # most leaks of most GPUs
        return "0.0"
    whole, rest = divmod(nanoseconds, SECOND)
    return f"{whole}.{rest:09d}" if rest else f"{whole}.0"


def joules(millijoules: int) -> str:
    """Exact decimal joules, likewise."""
    whole, rest = divmod(millijoules, JOULE)
    return f"{whole}.{rest:03d}" if rest else f"{whole}.0"


COUNTED_SINCE = ("ledger", "job", "daemon", "driver")
"""The ledger and a job's part of it outlive restarts of the daemon; when a driver was loaded is not known."""
_P = "gpu_efficiency_"
Value = float | str | None
T = TypeVar("T")


class _Rows(Generic[T]):
    """Makes metrics of one scope: `things` yields what a series belongs to, with its label values."""

    def __init__(
        self,
        scope: str,
        labels: tuple[str, ...],
        things: Callable[[Snapshot], Iterable[tuple[tuple[str, ...], T]]],
        *,
        since: str = "ledger",
    ) -> None:
        self._scope, self._labels, self._things, self._since = scope, labels, things, since

    def __call__(self, name: str, value: Callable[[T], Value], about: str, *, scope: str = "") -> Metric:
        """A metric with one series per thing; none if the value is None."""

        def read(snapshot: Snapshot) -> Iterator[MetricSample]:
            for key, thing in self._things(snapshot):
                found = value(thing)
                if found is not None:
                    yield key, found

        scope = scope or self._scope
        return Metric(_P + name, _type(name), about, read, self._labels, scope=scope, since=self._since)

    def by(
        self,
        name: str,
        labels: tuple[str, ...],
        samples: Callable[[T], Iterable[MetricSample]],
        about: str,
        *,
        scope: str = "",
        max_series: int = 1,
    ) -> Metric:
        """A metric with further labels, whose values `samples` yields."""

        def read(snapshot: Snapshot) -> list[MetricSample]:
            return [(key + values, value) for key, thing in self._things(snapshot) for values, value in samples(thing)]

        labels, scope = self._labels + labels, scope or self._scope
        return Metric(
            _P + name, _type(name), about, read, labels, scope=scope, max_series=max_series, since=self._since
        )


def _type(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


_GPU_LABELS = ("uuid", "gpu")
_gpu = _Rows("gpu", _GPU_LABELS, lambda s: (((gpu.device.uuid, gpu.device.index), gpu) for gpu in s.gpus))
_board = _Rows(
    "gpu", _GPU_LABELS, lambda s: (((gpu.device.uuid, gpu.device.index), gpu) for gpu in s.gpus), since="driver"
)
_job = _Rows("job", ("job_id",), lambda s: (((job.owner.job_id,), job) for job in s.jobs), since="job")
_training = _Rows(
    "reporting job",
    ("job_id",),
    lambda s: (((job.owner.job_id,), job.progress) for job in s.jobs if job.progress),
    since="job",
)
_serving = _Rows(
    "serving job",
    ("job_id",),
    lambda s: (((job.owner.job_id,), job.service) for job in s.jobs if job.service),
    since="job",
)
_measured = _Rows(
    "measured job", ("job_id",), lambda s: (((job.owner.job_id,), job.host) for job in s.jobs if job.host), since="job"
)
_port = _Rows("RDMA port", ("port",), lambda s: (((state.port.name,), state) for state in s.ports), since="driver")
_communication = _Rows(
    "communicating job",
    ("job_id",),
    lambda s: (((job.owner.job_id,), job.communication) for job in s.jobs if job.communication),
    since="job",
)
_model = _Rows("model", ("model",), lambda s: (((model.model,), model) for model in s.models))
_account = _Rows("account", ("team", "account", "workload_namespace"), lambda s: s.account_totals)
_node = _Rows("node", (), lambda s: (((), s),))
_daemon = _Rows("node", (), lambda s: (((), s),), since="daemon")
_history = _Rows("node", (), lambda s: (((), s.meta.history),) if s.meta.history else (), since="daemon")
_reload = _Rows("node", (), lambda s: (((), s.meta.reload),) if s.meta.reload else ())


def _leak_seconds(view: GpuView | JobView) -> list[MetricSample]:
    return [(names, seconds(part)) for names, part in zip(_LEAK_LABELS, view.counters.now.parts, strict=True)]


def _pairs(pairs: Iterable[tuple[str, float | str]]) -> list[MetricSample]:
    """Samples with one label, from its values and theirs."""
    return [((label,), value) for label, value in pairs]


def _energy(by_layer: Mapping[str, int]) -> list[MetricSample]:
    return _pairs((layer, joules(spent)) for layer, spent in by_layer.items())


def _known(label: str, value: float | None) -> Iterable[MetricSample]:
    return () if value is None else (((label,), value),)


def _layer_seconds(parts: Iterable[int]) -> list[MetricSample]:
    return _pairs((layer, seconds(part)) for layer, part in sum_by_layer(parts).items())


def _timestamp(nanoseconds: int | None) -> float | None:
    """Convert to Unix seconds."""
    return None if nanoseconds is None else nanoseconds / SECOND


def _hang_signs(gpu: GpuView) -> Iterator[MetricSample]:
    for name, agrees in gpu.hang_signs if gpu.hang_suspected else ():
        yield (name,), int(agrees)


def _spin_dram(gpu: GpuView) -> float | None:
    return valid_value(gpu.reading, "dram_active") if gpu.live and gpu.spin_since is not None else None


_LINKS = ("nvlink", "pcie")


def _spin_links(gpu: GpuView) -> Iterator[MetricSample]:
    """The busier direction of each link."""
    if not gpu.live or gpu.spin_since is None:
        return
    for link in _LINKS:
        each = (valid_value(gpu.reading, f"{link}_{way}_bytes_per_second") for way in ("tx", "rx"))
        rates = [float(rate) for rate in each if rate is not None]
        if rates:
            yield (link,), max(rates)


def _hang_culprit(job: JobView) -> Iterator[MetricSample]:
    found = job.finding
    if found is not None:
        sequence = "" if found.sequence is None else f"{found.sequence}"
        pid = f"{found.pid}" if found.pid else ""
        place = found.rank, found.host, pid, found.gpu
        yield (*place, found.collective, sequence, found.stack, found.source), int(found.stuck)


def _job_exempt(snapshot: Snapshot) -> Iterator[MetricSample]:
    for job in snapshot.jobs:
        if job.owner.exemption and snapshot.wall < job.owner.exempt_until * SECOND:
            yield (job.owner.job_id, job.owner.exemption), 1


def _communication_bound(job: JobView, which: str) -> Value | None:
    bounds = job.bounds.get("exposed_communication")
    return None if bounds is None else seconds(getattr(bounds, which))


def _useful_pipe(job: JobView) -> Iterator[MetricSample]:
    if job.useful_pipe != TENSOR:
        yield (job.useful_pipe,), 1


def _job_slices(job: JobView) -> Iterator[MetricSample]:
    if job.smallest_slice is not None:
        yield (job.smallest_slice.profile,), job.smallest_slice.compute / PPM


def _hfu(job: JobView) -> float | None:
    """HFU: the reported MFU times hardware FLOPs over model FLOPs."""
    mfu, training = job.counters.short_ratio("reported", "reportable"), job.progress
    if mfu is None or training is None or not training.flops:
        return None
    return mfu * training.hardware_flops / training.flops


def _quality(pick: int) -> Callable[[TrainingView], Iterator[MetricSample]]:
    def samples(view: TrainingView) -> Iterator[MetricSample]:
        value = None if view.quality is None else view.quality[pick]
        if view.quality is not None and value is not None:
            yield (view.quality[0],), value

    return samples


def _parallelism(view: TrainingView) -> Iterator[MetricSample]:
    for name in () if view.parallel is None else view.parallel.__struct_fields__:
        yield (name,), getattr(view.parallel, name)


def _requests(view: ServingView) -> list[MetricSample]:
    counts = (("running", view.running), ("waiting", view.waiting))
    return _pairs((state, count) for state, count in counts if count is not None)


def _latencies(view: ServingView) -> Iterator[MetricSample]:
    for latency in view.latencies:
        for percentile, value in (("p50", latency.p50), ("p95", latency.p95), ("p99", latency.p99)):
            yield (latency.kind, percentile), value


def _collectives(value: Callable[[CollectiveView], Value]) -> Callable[[CommunicationView], Iterator[MetricSample]]:
    def samples(view: CommunicationView) -> Iterator[MetricSample]:
        for use in view.uses:
            found = value(use)
            if found is not None:
                yield (use.name,), found

    return samples


def _slowest_rank(view: CommunicationView) -> Iterator[MetricSample]:
    if view.slowest is not None:
        yield (view.slowest[0],), view.slowest[1]


def _mbu(job: JobView) -> float | None:
    rate = None if job.service is None else job.service.bytes_per_second
    return rate / job.bandwidth if rate is not None and job.bandwidth else None


def _advice(job: JobView) -> Iterator[MetricSample]:
    if job.service is not None and job.service.undrafted:
        yield ("speculative_decoding",), seconds(job.service.undrafted)


def _gau_without_oversized(snapshot: Snapshot) -> float | None:
    """GAU without the leak oversized_allocation."""
    parts = sum_by_leak(gpu.counters.parts(gpu.counters.short) for gpu in snapshot.gpus)
    times = layer_times(sum_by_layer(parts))
    return (times.occupied + parts[_OVERSIZED]) / times.seen if times.seen else None


def _model_seconds(view: ModelView) -> Iterator[MetricSample]:
    """Allocated and unallocated part of each leak; only UNHELD_LEAKS can have unallocated time."""
    for index, (names, part) in enumerate(zip(_LEAK_LABELS, view.parts, strict=True)):
        unheld = view.unheld.get(index, 0)
        yield ("true", *names), seconds(part - unheld)
        if names[0] in UNHELD_LEAKS:
            yield ("false", *names), seconds(unheld)


def _prices(snapshot: Snapshot) -> Iterator[MetricSample]:
    terms = snapshot.meta.terms
    for view in snapshot.models:
        price = price_of(terms, model=view.model, spec=view.spec, wall=snapshot.wall)
        for held, amount in (("true", price.per_gpu_hour), ("false", price.per_unheld_hour)):
            yield (view.model, terms.pool, price.currency, price.basis, held), amount


def _gpu_info(gpu: GpuView) -> Iterator[MetricSample]:
    device, smoothing = gpu.device, gpu.health.power_smoothing if gpu.health is not None else None
    spec = device.spec.name if device.spec else "unknown"
    smooths = "" if smoothing is None else ("yes" if smoothing else "no")
    yield (device.model, spec, device.profile, device.parent, smooths), 1


def _allocation_info(gpu: GpuView) -> Iterator[MetricSample]:
    for owner, ranks in zip(gpu.owners, gpu.ranks, strict=True):
        yield (owner.job_id, ranks), 1


def _job_info(job: JobView) -> Iterator[MetricSample]:
    o = job.owner
    yield (
        o.name, o.user, o.account, o.team, o.partition, o.qos, o.namespace, o.pod, o.kind, o.array_id, o.array_task_id,
        o.het_job_offset, o.workload_class, o.scheduler,
    ), 1  # fmt: skip


def _job_spread(job: JobView) -> Iterator[MetricSample]:
    for label, value in zip(_SPREAD, job.counters.percentiles(tuple(_SPREAD.values())), strict=False):
        yield (label,), value


def _window(name: str) -> Callable[[GpuView | JobView], float | None]:
    return attrgetter(f"counters.recent.{name}")


def _ofu(view: GpuView | JobView) -> float | None:
    return view.counters.short_ratio("ofu", "tensor_seen")


def _reading(name: str) -> Callable[[GpuView], float | None]:
    """The latest value while it is current, so that an old value is never shown as live."""
    return lambda gpu: valid_value(gpu.reading, name) if gpu.live else None


def _by_reason(field: str, *, scale: Callable[[int], float | str] = float) -> Callable[[GpuView], list[MetricSample]]:
    """Counts of one GPU by reason, without zeros, of which a healthy GPU would have dozens."""

    def read(gpu: GpuView) -> list[MetricSample]:
        counts: dict[str, int] = {}
        for found, count in getattr(gpu, field):
            reason = found if found in _KNOWN_REASONS[field] else "other"
            counts[reason] = counts.get(reason, 0) + count
        return [((reason,), scale(count)) for reason, count in sorted(counts.items())]

    return read


_gpu_rejected = _by_reason("rejected")


def _rejected(snapshot: Snapshot) -> Iterator[MetricSample]:
    refused = dict(snapshot.refused)
    for reason in _KNOWN_REFUSALS:
        yield ("", "", reason), refused.get(reason, 0)
    for gpu in snapshot.gpus:
        for reasons, count in _gpu_rejected(gpu):
            yield (gpu.device.uuid, gpu.device.index, *reasons), count


def _faults(snapshot: Snapshot) -> list[MetricSample]:
    """Counts by kind, including zeros of known kinds; unknown kinds count as other."""
    counts: dict[str, int] = dict.fromkeys(sorted(_KNOWN_FAULTS), 0) | {"other": 0}
    for kind, count in snapshot.faults:
        counts[kind if kind in counts else "other"] += count
    return _pairs(counts.items())


def _health(name: str, *, lasting: bool = True) -> Callable[[GpuView], float | None]:
    """A value of the latest Health; absent if not reported, or, unless `lasting`, if the GPU is not live."""

    def read(gpu: GpuView) -> float | None:
        if gpu.health is None or not (lasting or gpu.live):
            return None
        value: float | None = getattr(gpu.health, name)
        return None if value is None else float(value)

    return read


def _ecc(gpu: GpuView) -> Iterator[MetricSample]:
    for kind in ("corrected", "uncorrected"):
        count = None if gpu.health is None else getattr(gpu.health, f"ecc_{kind}")
        if count is not None:
            yield (kind,), count


def _row_remap(gpu: GpuView) -> int | None:
    health = gpu.health
    if health is None or health.row_remap_pending is health.row_remap_failed is None:
        return None
    return 2 if health.row_remap_failed else int(bool(health.row_remap_pending))


_VIDEO_ENGINES = ("encoder", "decoder")


def _video(gpu: GpuView) -> Iterator[MetricSample]:
    for engine in _VIDEO_ENGINES if gpu.live else ():
        used = valid_value(gpu.reading, f"{engine}_utilization")
        if used:
            yield (engine,), used


def _chip_link(gpu: GpuView) -> Iterator[MetricSample]:
    for direction in _DIRECTIONS if gpu.live else ():
        rate = valid_value(gpu.reading, f"c2c_{direction}_bytes_per_second")
        if rate is not None:
            yield (direction,), rate


_DIRECTIONS = ("tx", "rx")


def _port_bytes(state: PortState) -> Iterator[MetricSample]:
    for direction, count in zip(_DIRECTIONS, (state.port.transmitted_bytes, state.port.received_bytes), strict=True):
        if count is not None:
            yield (direction,), count


def _limited(gpu: GpuView) -> Iterator[MetricSample]:
    for group, nanoseconds in gpu.limited if not gpu.device.parent else ():
        yield (group,), seconds(nanoseconds)


_OVERSIZED = LEAK_NAMES.index("oversized_allocation")
_KNOWN_REFUSALS = ("clock_step", "collectives", "host", "report", "serving", "unknown_gpu")
_SPREAD = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
UNHELD_LEAKS = ("unavailable", "idle_allocation", "unobserved")
"""Leaks that can take unallocated time."""
_KNOWN_REASONS = {
    "rejected": frozenset({
        "overlap", "bad_interval", "future", "not_finite", "negative", "clamped", "above_one", "too_large", "order",
    }),
    "unobserved": UNOBSERVED_REASONS,
}  # fmt: skip
_KNOWN_FAULTS = frozenset({
    "source_failed", "source_hung", "scheduler_failed", "gpu_lost", "gpu_missing", "malformed_line",
    "conflicting_series", "profiling_refused", "mig_layout", "stale", "blank", "clock_step",
    "unknown_model", "paused", "processes_unseen", "handle_stale", "gpu_recovery", "gpu_reset_required",
    "xid_unassigned", "xids_not_told", "controller_silent", "scheduler_refused", "engine_failed", "listening_failed",
    "reports_failed", "exporter_down", "host_unread",
})  # fmt: skip


METRICS: tuple[Metric, ...] = (
    _gpu.by("seconds_total", ("leak", "layer"), _leak_seconds,
        "Paid GPU-seconds by where they went: each in exactly one leak, or useful, unresolved (computing, value "
        "unknown) or unobserved. Summed over leak they equal gpu_efficiency_paid_seconds_total.",
        max_series=len(LEAK_NAMES)),
    _gpu("paid_seconds_total", lambda g: seconds(g.counters.now.paid),
        "Paid GPU-seconds: the time the GPU is in the node's inventory; a MIG instance counts as its share of the "
        "GPU."),
    _gpu("kernel_seconds_total", lambda g: seconds(g.counters.now.engine),
        "GPU-seconds with a kernel running; divided by paid seconds this is GPU Kernel Utilization."),
    _gpu("gau_ratio", _window("gau"),
        "GPU Allocation Utilization over the last 5 minutes: occupied / observed. Occupied: allocated, no zombie, not "
        "unavailable, not beyond what the job needs."),
    _gpu("ectr_ratio", _window("ectr"),
        "Effective Compute Time Ratio over the last 5 minutes: computing / occupied."),
    _gpu("emfu_ratio", _window("emfu"),
        "Effective Model FLOPs Utilization over the last 5 minutes: useful / (computing - unresolved). Without "
        "training reports it is an upper bound from hardware counters."),
    _gpu("ofu_ratio", _ofu,
        "Share of the dense tensor peak delivered over the last 5 minutes: tensor activity x clock / reference "
        "clock."),
    _gpu("driver_utilization_ratio", lambda g: g.counters.short_ratio("utilization", "utilization_seen"),
        "The driver's own utilization over the last 5 minutes, as nvidia-smi shows it."),
    _gpu.by("state", ("state", "reason"), lambda g: (((g.state.value, g.reason), 1),),
        "1 for the current state of the GPU: unavailable, unobserved, unowned, unallocated, hung, zombie, stalled "
        "or active; the label reason says why."),
    _gpu("state_since_timestamp_seconds", lambda g: g.since / SECOND,
        "Unix time at which the GPU entered its current state."),
    _gpu("hang_suspected", lambda g: None if g.spin_since is None else int(g.hang_suspected),
        "1 while the GPU has spun without progress for longer than the suspicion threshold, 0 before that; absent "
        "while it does not spin.", scope="spinning GPU"),
    _gpu("spin_since_timestamp_seconds", lambda g: _timestamp(g.spin_since),
        "Unix time since which the GPU has spun without progress; absent while it does not spin.",
        scope="spinning GPU"),
    _gpu("hang_confidence_ratio", lambda g: g.hang_confidence,
        "While the GPU spins: share of the eight hang indicators that are measured and agree.", scope="spinning GPU"),
    _gpu.by("hang_sign", ("sign",), _hang_signs,
        "While a hang is suspected: 1 for an indicator that supports it, 0 for one that contradicts it; absent if "
        "it cannot be measured. engine_busy, tensor_rest, dram_rest, fp_rest, nvlink_rest, pcie_rest, power_flat, "
        "temperature_falling.", scope="spinning GPU", max_series=len(HANG_SIGNS)),
    _gpu("spin_dram_active_ratio", _spin_dram,
        "While the GPU spins: share of time in which its memory was read or written, latest reading.",
        scope="spinning GPU"),
    _gpu.by("spin_link_bytes_per_second", ("link",), _spin_links,
        "While the GPU spins: traffic on nvlink and pcie, the busier direction of each, latest reading.",
        scope="spinning GPU", max_series=len(_LINKS)),
    _gpu("last_work_timestamp_seconds", lambda g: _timestamp(g.worked_at),
        "Unix time at which the current job last did effective work on the GPU, or was allocated it; absent while "
        "the GPU is not allocated."),
    _gpu("power_watts", _reading("power_watts"), "Board power draw."),
    _gpu("temperature_celsius", _reading("temperature_celsius"), "GPU temperature."),
    _gpu("power_limit_watts", _reading("enforced_power_limit_watts"), "Power limit that the driver enforces."),
    _gpu("memory_temperature_celsius", _health("memory_temperature_celsius", lasting=False),
        "Temperature of the device memory; absent on boards without that sensor."),
    _gpu("temperature_margin_celsius", _health("temperature_margin_celsius", lasting=False),
        "Degrees left until the GPU throttles."),
    _gpu.by("clock_limited_seconds_total", ("reason",), _limited,
        "Seconds in which the clock was limited, by reason, as sampled: power (software power cap), thermal, "
        "hardware (slowdown, power brake), settings (application or display clocks, sync boost).",
        max_series=len(CLOCK_LIMITERS)),
    _gpu("xid_errors_total", lambda g: None if g.health is None else g.xids,
        "Critical errors (Xid) that the driver has reported since the daemon first saw the GPU."),
    _gpu("last_xid", lambda g: g.last_xid or None, "Code of the latest Xid error; absent if there was none."),
    _gpu("recovery_action", _health("recovery_action"),
        "Recovery action that the driver requests, with NVML's numbers: 0 none, 1 reset the GPU, 2 reboot the node, "
        "3 drain peers, 4 drain and reset; later drivers have more."),
    _board.by("ecc_errors_total", ("type",), _ecc,
        "ECC memory errors since the driver was loaded: corrected and uncorrected.", max_series=2),
    _gpu("row_remap", _row_remap,
        "Row remapping: 0 none needed, 1 a remap is pending a reset, 2 a remap failed: replace the board."),
    _board("nvlink_errors_total", _health("nvlink_errors"),
        "CRC, replay and recovery errors of all NVLinks since the driver was loaded."),
    _gpu("memory_used_bytes", _reading("memory_used_bytes"), "Device memory in use."),
    _gpu.by("video_engine_ratio", ("engine",), _video,
        "The driver's utilization of the video encoder and decoder (NVENC, NVDEC), which count as no kernel; absent "
        "while idle.", scope="GPU coding video", max_series=len(_VIDEO_ENGINES)),
    _gpu.by("c2c_bytes_per_second", ("direction",), _chip_link,
        "Traffic of the chip-to-chip link to a Grace CPU, latest reading: tx leaves the GPU; absent without one.",
        scope="GPU with a chip-to-chip link", max_series=len(_DIRECTIONS)),
    _gpu.by("energy_joules_total", ("layer",), lambda g: _energy(g.counters.energy_by_layer()),
        "Energy by where it went: a leak's layer, useful, unresolved or unobserved.", max_series=len(LAYERS)),
    _gpu("reading_age_seconds", lambda g: None if g.age is None else g.age / SECOND,
        "Seconds since the end of the latest accepted reading; on a healthy GPU at most one update interval of the "
        "source."),
    _gpu.by("gpu_info", ("model", "spec", "profile", "parent", "power_smoothing"), _gpu_info,
        "Model of the GPU as the driver names it and its row of the specification table; for a MIG instance its "
        "profile and parent GPU; whether the board smooths its power draw."),
    _gpu.by("allocation_info", ("job_id", "rank"), _allocation_info,
        "1 for each job to which the GPU is allocated, with the job's ranks that have processes on it."),
    _job.by("job_seconds_total", ("leak", "layer"), _leak_seconds,
        "GPU-seconds allocated to a job on this node by where they went; summed over leak they equal "
        "gpu_efficiency_job_paid_seconds_total.", max_series=len(LEAK_NAMES)),
    _job("job_exposed_communication_low_seconds_total", lambda j: _communication_bound(j, "low"),
        "The least that a job's exposed_communication on this node may be, in GPU-seconds; the bounds of other "
        "estimates are in its report. Absent where none was estimated.", scope="job on several GPUs"),
    _job("job_exposed_communication_high_seconds_total", lambda j: _communication_bound(j, "high"),
        "Upper bound of a job's exposed_communication on this node, in GPU-seconds.", scope="job on several GPUs"),
    _job("job_paid_seconds_total", lambda j: seconds(j.counters.now.paid),
        "GPU-seconds allocated to a job on this node."),
    _job.by("job_info",
        ("name", "user", "account", "team", "partition", "qos", "workload_namespace", "workload_pod", "kind",
         "array_id", "array_task_id", "het_job_offset", "workload_class", "scheduler"), _job_info,
        "Owner of a job and what the scheduler reports about it: join on job_id."),
    _job.by("job_label_info", ("key", "value"), lambda j: ((pair, 1) for pair in j.owner.labels),
        "A label of the job's pod whose key `kubernetes.pod_labels` lists. Select one key, then join on job_id.",
        scope="labelled job"),
    _job.by("job_state_gpus", ("state",), lambda j: _pairs(j.states),
        "GPUs of this node allocated to a job, by state; a state without GPUs is absent."),
    _job("job_hang_suspected_gpus", lambda j: j.suspected or None,
        "GPUs of a job that are hung or suspected to be; absent while there are none.", scope="job in trouble"),
    _job("job_spin_since_timestamp_seconds", lambda j: _timestamp(j.spin_since),
        "Unix time since which the first of the job's hung or suspected GPUs has spun.", scope="job in trouble"),
    _job.by("job_hang_culprit",
        ("rank", "host", "pid", "gpu", "collective", "sequence", "stack", "source"), _hang_culprit,
        "While GPUs of a job spin: the rank that the others wait for, by NCCL RAS or PyTorch's Flight Recorder, with "
        "its host, pid and GPU, the collective in which the others wait, and the top of the rank's stack. 1: a rank "
        "is missing, or ranks are in different collectives: the hang is proven; 0: it may be at work.",
        scope="job in trouble"),
    _job("job_last_work_timestamp_seconds", lambda j: _timestamp(j.worked_at),
        "Unix time at which any GPU of the job on this node last did effective work, or was allocated."),
    _job("job_no_process_gpus", lambda j: j.without_process or None,
        "GPUs allocated to a job on which the driver lists no process; absent if each has one.",
        scope="job in trouble"),
    _job("job_no_process_since_timestamp_seconds", lambda j: _timestamp(j.without_process_since),
        "Unix time since which the first of the job's GPUs has had no process.", scope="job in trouble"),
    _job("job_zombie_limit_seconds", lambda j: j.owner.zombie_seconds,
        "How long this job may be idle before it counts as a zombie, where that differs from the limit of its class.",
        scope="job in trouble"),
    _node.by("job_exempt", ("job_id", "exemption"), _job_exempt,
        "1 while an exemption of the operator covers the job.", scope="job in trouble"),
    _job.by("job_useful_pipe", ("pipe",), _useful_pipe,
        "1 for the pipe whose activity is a job's useful work, where that is not the tensor cores': fp64, fp32, or "
        "none: no counter shows what its kernels compute, so that their time is unresolved and eMFU does not apply.",
        scope="job without tensor work"),
    _job.by("job_price_per_hour", ("currency",), lambda j: _pairs(j.costs),
        "Price per hour of the GPUs of this node allocated to a job; shared GPUs are split equally."),
    _job.by("job_fitting_slice_ratio", ("profile",), _job_slices,
        "For a job with one GPU, after an hour (servers and notebooks: after a day): the smallest MIG slice that "
        "would have met its peak demand, as a share of the GPU; absent if only a whole GPU would.",
        scope="job on one GPU"),
    _job("job_unneeded_seconds_total", lambda j: None if j.excess is None else seconds(j.excess),
        "GPU-seconds beyond the smallest fitting MIG slice, since that slice was determined.", scope="job on one GPU"),
    _job("job_reported_mfu_ratio", lambda j: j.counters.short_ratio("reported", "reportable"),
        "Model FLOPs Utilization over the last 5 minutes as reported by the job; absent while it reports none.",
        scope="reporting job"),
    _job("job_reported_hfu_ratio", _hfu,
        "Hardware FLOPs Utilization over the last 5 minutes as reported by the job: MFU plus recomputation. The "
        "difference is the cost of recomputation.", scope="reporting job"),
    _training("job_reported_gpu_seconds_total", lambda p: seconds(p.gpu_time),
        "GPU-seconds on this node covered by the job's reports: divide its tokens, samples and FLOPs by this."),
    _training("job_model_flops_total", lambda p: p.flops or None,
        "Model FLOPs as reported by the job: the share of this node's GPUs that its reports cover; absent while none "
        "are reported, and so are tokens, padding tokens and samples."),
    _training("job_tokens_total", lambda p: p.tokens or None,
        "Training tokens, padding included: the share of this node's GPUs."),
    _training("job_padding_tokens_total", lambda p: p.padding if p.tokens else None, "Padding tokens in "
    "gpu_efficiency_job_tokens_total."),
    _training("job_samples_total", lambda p: p.samples or None, "Training samples: the share of this node's GPUs."),
    _training("job_steps_total", lambda p: p.steps,
        "Optimizer steps, repeated ones included, as counted by one process of the job."),
    _training("job_rework_steps_total", lambda p: p.rework_steps,
        "Optimizer steps that repeat steps done before a restart."),
    _training("job_step", lambda p: p.step, "Latest completed step."),
    _training("job_epoch", lambda p: p.epoch, "Passes over the data so far."),
    _training("job_world_size", lambda p: p.world or None, "GPUs of the whole job, as reported by the job."),
    _training.by("job_run_seconds_total", ("phase",),
        lambda p: _pairs((name, seconds(spent)) for name, spent in p.phases),
        "Wall time of a job by phase, as reported by one of its processes: startup, restore, data, compute, "
        "communication, bubble, checkpoint, evaluation, idle; rework (repeated steps); unreported.",
        max_series=len(WALL_TIME_PHASES)),
    _training("job_goodput_ratio", lambda p: p.goodput,
        "Share of a run's time so far, restarts included, spent in new steps."),
    _training("job_progress_ratio", lambda p: 1.0 - p.rework_steps / p.steps if p.steps else None,
        "Share of all steps that were new, not repeated after a restart."),
    _training("job_checkpoints_total", lambda p: p.checkpoints, "Checkpoints written."),
    _training("job_restarts_total", lambda p: p.restarts, "Times the program resumed from a checkpoint."),
    _training("job_recovery_seconds_total", lambda p: seconds(p.recovery),
        "Time from the last new step before each restart to the first new step after it; divided by restarts: mean "
        "time to recover."),
    _training("job_bubble_ratio", lambda p: p.bubble,
        "Share of a step in which the job's pipeline is idle (pipeline bubble); absent without pipeline parallelism."),
    _training.by("job_step_seconds", ("rank",), lambda p: _pairs((rank, step) for rank, step, _ in p.ranks),
        "Mean step time of each process, in its latest report.", scope="rank"),
    _training.by("job_rank_busy_seconds", ("rank",), lambda p: _pairs((rank, busy) for rank, _, busy in p.ranks),
        "Mean step time of each process without communication and bubbles: the rank with the largest value is the "
        "one the others wait for.", scope="rank"),
    _training("job_loss", lambda p: p.loss, "Latest reported loss; may be NaN."),
    _training("job_loss_spread_ratio", lambda p: p.loss_spread, "Standard deviation of recent losses over their mean."),
    _training.by("job_loss_events_total", ("event",), lambda p: _pairs(p.events),
        "Interruptions of convergence: spike, not_finite (NaN or infinite loss), rollback (the step went back "
        "without a restart).", max_series=len(LOSS_EVENTS)),
    _training.by("job_quality", ("name",), _quality(1),
        "Figure of merit that a job reports, such as its accuracy; the label name identifies it."),
    _training.by("job_quality_start", ("name",), _quality(2), "First reported value of the figure of merit."),
    _training.by("job_quality_target", ("name",), _quality(3), "Target value of the figure of merit."),
    _training("job_target_reached_timestamp_seconds", lambda p: _timestamp(p.target_at),
        "Unix time at which the target was reached; absent until then."),
    _training.by("job_parallelism", ("dimension",), _parallelism,
        "Degrees of parallelism: tensor, pipeline, data, context, expert.", max_series=5),
    _job("job_tensor_parallel_lost_bytes_per_second", lambda j: j.tensor_parallel_lost,
        "Lower bound of the bandwidth that each GPU loses because its tensor-parallel group is larger than its "
        "NVLink domain; absent if it is not.", scope="reporting job"),
    _training.by("job_run_info", ("run",), lambda p: (((p.run,), 1),) if p.run else (),
        "The run to which a job belongs: a job and its restarts share one run. After 16 runs of one job, further ones "
        "have the value other."),
    _serving.by("job_requests", ("state",), _requests,
        "Requests of a serving engine on this node: running in its batches, or waiting in its queue.", max_series=2),
    _serving("job_batch_fill_ratio", lambda v: v.fill,
        "Running requests / batch slots; absent if the engine does not report its slots."),
    _serving("job_kv_cache_ratio", lambda v: v.kv_use, "KV-cache usage of the fullest replica."),
    _serving("job_preemptions_total", lambda v: v.preemptions, "Requests preempted for lack of KV cache."),
    _serving.by("job_engine_tokens_total", ("kind",), lambda v: _pairs(v.tokens),
        "Tokens of a serving engine: prompt (computed), cached (not computed), generated, recomputed (after "
        "eviction), drafted, accepted.", max_series=len(TOKEN_KINDS)),
    _serving("job_draft_acceptance_ratio", lambda v: v.acceptance,
        "Accepted / proposed draft tokens, between the latest two polls."),
    _serving("job_tokens_per_pass_ratio", lambda v: v.per_pass,
        "Tokens generated per sequence and forward pass, between the latest two polls: 1 without speculative "
        "decoding."),
    _serving.by("job_latency_seconds", ("kind", "percentile"), _latencies,
        "Latency of the slowest replica, of requests that finished between the latest two polls: ttft (time to "
        "first token), itl (inter-token latency), queue, e2e.", max_series=12),
    _job("job_mbu_ratio", _mbu,
        "Memory Bandwidth Utilization from the engine's own estimate of bytes moved, between the latest two polls.",
        scope="serving job"),
    _serving.by("job_engine_info", ("engine",), lambda v: (((v.engine,), 1),), "The serving engine of a job."),
    _job.by("job_advice_seconds_total", ("advice",), _advice,
        "GPU-seconds that a change could save; they stay counted in their leak: speculative_decoding (half of the "
        "memory-bound time of a server without draft tokens).", scope="serving job"),
    _communication.by("job_collectives_total", ("collective",), _collectives(lambda use: use.calls),
        "Collectives and point-to-point transfers of a job's processes on this node, as an NCCL profiler plugin "
        "counted them.", max_series=len(COLLECTIVE_NAMES)),
    _communication.by("job_collective_seconds_total", ("collective",),
        _collectives(lambda use: seconds(use.nanoseconds)),
        "Execution time of those, summed over processes; they may overlap with each other and with computation.",
        max_series=len(COLLECTIVE_NAMES)),
    _communication.by("job_collective_bytes_total", ("collective",), _collectives(lambda use: use.bytes),
        "Message bytes of those.", max_series=len(COLLECTIVE_NAMES)),
    _communication.by("job_collective_bus_bytes_per_second", ("collective",),
        _collectives(lambda use: use.bus_bytes_per_second),
        "Bus bandwidth by NCCL's convention, mean of about the last two minutes, weighted by time; absent if the "
        "plugin does not report it.", max_series=len(COLLECTIVE_NAMES)),
    _communication.by("job_communication_ratio", ("rank",), lambda c: _pairs(c.ranks),
        "Share of each rank's time in which at least one collective executed, mean of about the last two minutes: the "
        "rank with the smallest value is the one that the others wait for.", scope="communicating rank"),
    _communication.by("job_slowest_rank", ("rank",), _slowest_rank,
        "The rank of a job on this node that the others wait for: by how much less of the time it communicates than "
        "their median; absent if none stands out."),
    _job("job_start_timestamp_seconds", lambda j: j.start / SECOND,
        "Unix time at which the job was allocated its first GPU on this node."),
    _job("job_time_limit_seconds", lambda j: j.owner.time_limit_seconds,
        "Time limit of the job in the scheduler; absent if there is none."),
    _job("job_first_work_seconds", lambda j: None if j.first_work is None else j.first_work / SECOND,
        "Time from a job's first GPU on this node to its first kernel; absent until then, and if it was not "
        "observed."),
    _job("job_ectr_ratio", _window("ectr"), "Effective Compute Time Ratio of a job over the last 5 minutes."),
    _job("job_emfu_ratio", _window("emfu"), "Effective Model FLOPs Utilization of a job over the last 5 minutes."),
    _job("job_ofu_ratio", _ofu, "Share of the dense tensor peak that a job used over the last 5 minutes."),
    _job("job_dram_active_ratio", lambda j: j.counters.short_ratio("dram", "dram_seen"),
        "Share of time in which a job's GPUs read or wrote device memory, over the last 5 minutes."),
    _job("job_memory_used_bytes", lambda j: j.memory_used, "Device memory in use on the job's GPUs on this node."),
    _job("job_arithmetic_intensity_flops_per_byte", lambda j: j.counters.short_ratio("flops", "bytes"),
        "Tensor FLOPs per byte of DRAM traffic over the last 5 minutes, from activity and the board's peaks."),
    _job("job_energy_joules_total", lambda j: joules(sum(j.counters.energy)), "Energy used by a job on this node."),
    _job.by("job_activity_ratio", ("percentile",), _job_spread,
        "Engine activity over the last 5 minutes: 10th, 50th and 90th percentile over time, in steps of 5 %.",
        max_series=3),
    _measured("job_cpu_cores", lambda h: h.cpu_cores,
        "Mean number of CPU cores that the job's processes on this node use, over the latest few seconds."),
    _measured.by("job_pressure_ratio", ("resource",), lambda h: _pairs(h.shares),
        "Share of time in which some task of the job waited for cpu, io or memory (Linux's PSI of its control group), "
        "or was stopped by its CPU quota (cpu_quota, which raises cpu too), over the latest few seconds.",
        max_series=len(RESOURCES)),
    _measured.by("job_stall_seconds_total", ("cause",),
        lambda h: _pairs((cause, seconds(spent)) for cause, spent in h.stalls),
        "GPU-seconds of the job's data_stall and unattributed_stall by what explains them best: storage, cpu_quota, "
        "memory, cpu (contention), network (RDMA, where the job has the node to itself); only those that occurred, "
        "and none of what nothing explains.", max_series=len(CAUSES)),
    _port.by("rdma_bytes_total", ("direction",), _port_bytes,
        "Bytes of an RDMA port since its driver was loaded, tx or rx: InfiniBand, RoCE and EFA.",
        max_series=len(_DIRECTIONS)),
    _port("rdma_wait_ticks_total", lambda state: state.port.wait_ticks,
        "Ticks, of a length that the device defines, in which an RDMA port had data to send and could not "
        "(port_xmit_wait); absent on adapters without that counter."),
    _port("rdma_rate_bytes_per_second", lambda state: state.port.bytes_per_second,
        "Nominal rate of an RDMA port in one direction."),
    _port.by("rdma_active", ("link",), lambda state: (((state.port.link,), int(state.port.active)),),
        "1 if the state of an RDMA port is ACTIVE; link is infiniband, roce, efa, or empty for another."),
    _account.by("account_seconds_total", ("layer",), _layer_seconds,
        "GPU-seconds allocated on this node by billing account and layer; the time of ended jobs stays counted "
        "here. Beyond policy.max_accounts, the account that has had no job for the longest time is dropped; while all "
        "have jobs, new ones count as other.", max_series=len(LAYERS)),
    _model.by("node_seconds_total", ("held", "leak", "layer"), _model_seconds,
        "Paid GPU-seconds of the node by where they went: gpu_efficiency_seconds_total summed by model; held=false "
        "is the time in which the GPU was not allocated, for prices that exclude it. Fleet rules read this metric.",
        max_series=len(LEAK_NAMES) + len(UNHELD_LEAKS)),
    _model("node_kernel_seconds_total", lambda m: seconds(m.engine),
        "GPU-seconds with a kernel on the node's GPUs of a model."),
    _model.by("node_energy_joules_total", ("layer",), lambda m: _energy(m.energy),
        "Energy used by the node's GPUs of a model, by layer.", max_series=len(LAYERS)),
    _model("node_gpus", lambda m: m.weight / PPM, "GPUs of a model in the node's inventory."),
    _model("model_peak_flops", lambda m: m.peak_flops,
        "Dense 16-bit peak of one GPU of a model, FLOP/s; absent if unknown."),
    _node.by("price_per_gpu_hour", ("model", "pool", "currency", "basis", "held"), _prices,
        "Price of a GPU-hour on this node; held=false: while the GPU is not allocated, 0 if only allocated time is "
        "paid. Without a configured price the value is 1 and the currency GPU-hours.", scope="model", max_series=2),
    _node.by("price_per_kwh", ("currency",),
        lambda s: _known(s.meta.terms.energy.currency, s.meta.terms.energy.price_per_kwh),
        "Price of a kilowatt-hour; absent if not configured."),
    _node("grams_co2_per_kwh", lambda s: s.meta.terms.carbon.at(s.wall / SECOND),
        "Carbon intensity of the hour, grams of CO2 per kilowatt-hour; absent if not configured or not known."),
    _node.by("idle_budget_per_hour", ("currency",),
        lambda s: _known(s.meta.terms.idle_budget_currency, s.meta.terms.idle_budget),
        "Budget per hour for GPUs of the whole cluster that are unallocated or idle; absent if not configured."),
    _node.by("exemption_expiry_timestamp_seconds", ("exemption", "reason"),
        lambda s: (((name, reason), expiry) for name, reason, expiry in s.meta.terms.exemptions),
        "Unix time at which a configured exemption expires.", scope="exemption"),
    _node.by("threshold", ("name",), lambda s: _pairs(s.thresholds),
        "Thresholds of this node's policy, for alert rules.", max_series=len(EXPORTED_THRESHOLDS)),
    _node.by("state_entries_total", ("state",), lambda s: _pairs(s.state_entries),
        "Times a GPU of the node entered a state.", max_series=len(State)),
    _node.by("detections_total", ("state",), lambda s: _pairs((state, count) for state, count, _ in s.detections),
        "Hangs and zombies detected on the node.", max_series=2),
    _node.by("detection_seconds_total", ("state",),
        lambda s: _pairs((state, seconds(spent)) for state, _, spent in s.detections),
        "Seconds from the first indication of a hang or zombie to its detection; divided by "
        "gpu_efficiency_detections_total: mean time to detect.", max_series=2),
    _node.by("node_info", ("node", "pool"),
        lambda s: (((s.meta.node, s.meta.terms.pool), 1),),
        "Name of the node in its scheduler, and its pool."),
    _node("observation_timestamp_seconds", lambda s: s.wall / SECOND,
        "Unix time of the latest observation, by the node's clock."),
    _node("node_gau_ratio", attrgetter("recent.gau"),
        "GPU Allocation Utilization of the node over the last 5 minutes."),
    _node("node_gau_held_ratio", _gau_without_oversized,
        "GPU Allocation Utilization as if no allocation were larger than its job needs: without "
        "oversized_allocation."),
    _node("node_ectr_ratio", attrgetter("recent.ectr"),
        "Effective Compute Time Ratio of the node over the last 5 minutes."),
    _node("node_emfu_ratio", attrgetter("recent.emfu"),
        "Effective Model FLOPs Utilization of the node over the last 5 minutes."),
    _node("node_coverage_ratio", attrgetter("recent.coverage"),
        "Share of paid time that was observed, over the last 5 minutes."),
    _daemon("conservation_errors_total", lambda s: s.conservation_errors,
        "Times the parts of a GPU's time did not add up to its paid time. Anything but 0 is a bug: please report it."),
    _node.by("rejected_total", (*_GPU_LABELS, "reason"), _rejected,
        "Readings or fields rejected, by GPU and reason. Of a GPU only reasons that occurred; with empty GPU labels: "
        "rejected for the whole node, every reason.", max_series=len(_KNOWN_REFUSALS)),
    _gpu.by("unobserved_seconds_total", ("reason",), _by_reason("unobserved", scale=seconds),
        "GPU-seconds that were not observed, by GPU and reason; only those that occurred."),
    _node.by("faults_total", ("kind",), _faults,
        "Faults by kind, such as failed reads, pauses and unknown GPU models; a lasting fault is counted once per "
        "tick.", max_series=len(_KNOWN_FAULTS) + 1),
    _node("allocations_age_seconds", lambda s: None if s.allocations_age is None else s.allocations_age / SECOND,
        "Seconds since the scheduler last confirmed GPU allocations."),
    _gpu.by("shared_seconds_total", ("basis",), lambda g: _pairs((basis, seconds(spent)) for basis, spent in g.shared),
        "Seconds in which several jobs shared the GPU, by how time was split between them: sm (SM time of their "
        "processes) or equal; only where it occurred.", scope="shared GPU"),
    _node("scheduler_unanswered_seconds", lambda s: s.meta.unanswered_seconds,
        "Seconds that the current request to the scheduler's controller or API server has been waiting for a "
        "response; 0 if none is pending."),
    _daemon("ticks_total", lambda s: s.meta.ticks, "Sampling ticks since the start."),
    _daemon("late_ticks_total", lambda s: s.meta.late_ticks, "Ticks that started more than half an interval late."),
    _daemon("read_seconds_total", lambda s: s.meta.read_seconds,
        "Wall time spent reading the source and the scheduler."),
    _daemon("core_seconds_total", lambda s: s.meta.core_seconds,
        "Wall time spent turning observations into ledger entries."),
    _daemon.by("workload_messages_total", ("outcome",),
        lambda s: _pairs(s.meta.messages),
        "Training reports received, scrapes of serving engines and questions to jobs that may hang, by outcome: "
        "accepted, or why they were rejected.",
        max_series=0),  # as many as there are outcomes where jobs can report, else none
    _daemon.by("errors_total", ("kind",), lambda s: _pairs(s.meta.errors),
        "Unexpected errors caught by the sampling loop, by kind.", max_series=4),
    _daemon.by("otlp_pushes_total", ("outcome",), lambda s: _pairs(s.meta.pushes),
        "Pushes over OTLP, by outcome: accepted or failed. What a failed push had is in the next accepted one; absent "
        "if no receiver is configured.",
        max_series=0),  # two where a receiver is configured, else none
    _reload("config_last_reload_successful", lambda view: int(not view.refused),
        "1 if the configuration file was loaded; 0 if it was rejected: the log gives the reason, and the previous "
        "configuration stays in force."),
    _reload("config_last_reload_success_timestamp_seconds", lambda view: view.at,
        "Unix time at which the configuration in force was loaded, at the start or later."),
    _reload("config_restart_needed", lambda view: int(bool(view.restart)),
        "1 while the configuration file has changes that take effect only after a restart; the log lists them."),
    _history("history_up", lambda view: int(view.works),
        "1 if the latest write to this node's history store succeeded; 0: time since then would be lost in a crash."),
    _history("history_last_checkpoint_timestamp_seconds", lambda view: view.saved_at,
        "Unix time of the latest checkpoint in the store; 0 before the first."),
    _history("history_failures_total", lambda view: view.failures,
        "Failed writes to the history store since the start; the log gives the reason."),
    _history("history_size_bytes", lambda view: view.bytes, "Size of the history store on disk."),
    _node("simulated", lambda s: int(s.meta.simulated),
        "1 if the data come from a simulation or a replay, not from hardware."),
    _node.by("source_info", ("source", "scheduler", "reason"),
        lambda s: (((s.meta.source, s.meta.scheduler, s.meta.source_reason), 1),),
        "Sources of telemetry and allocations, and why this source was selected."),
    _node.by("build_info", ("version",), lambda s: (((s.meta.version,), 1),), "Version of the exporter."),
)  # fmt: skip


SERIES_BUDGET = {"gpu": 64, "job": 45, "measured job": 10, "node": 150}
"""Maximum number of series in METRICS per GPU, per job on a node, for its CPU use and pressure, and per node with one
GPU model."""


def max_series_of_scope(scope: str) -> int:
    """Maximum number of series per instance of a scope, without process_* metrics.

    A shared GPU has one more `allocation_info` per additional owner.
    """
    return sum(metric.max_series for metric in METRICS if metric.scope == scope)
