"""Defines METRICS, one row per exported metric: name, type, help, labels, unit, stability, read.

`docs/metrics.md` is generated from it. Values are floats, or exact decimal strings where the ledger's sums must stay
exact.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct

from exporter.core.evidence import HANG_SIGNS
from exporter.core.leaks import LAYER_OF, LAYERS, LEAK_NAMES, sum_by_layer
from exporter.core.model import PPM, SECOND, State
from exporter.core.policy import EXPORTED_THRESHOLDS
from exporter.core.serving import TOKEN_KINDS, ServingView
from exporter.core.snapshot import (
    Counters,
    GpuView,
    JobView,
    Layers,
    ModelView,
    Snapshot,
    layer_times,
    price_of,
    sum_by_leak,
    valid_value,
)
from exporter.core.states import CLOCK_LIMITERS
from exporter.core.workload import LOSS_EVENTS, WALL_TIME_PHASES, TrainingView

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
    stability: str = "stable"
    max_series: int = 1
    """Maximum number of series per instance of its scope; 1 if few label values occur (states, reasons)."""


def seconds(nanoseconds: int) -> str:
    """Exact decimal seconds: floats would break the ledger's sum in the last digit."""
    whole, rest = divmod(nanoseconds, SECOND)
    return f"{whole}.{rest:09d}" if rest else f"{whole}.0"


Value = float | str | None
T = TypeVar("T")


def _readers(
    things: Callable[[Snapshot], Iterable[tuple[tuple[str, ...], T]]],
) -> tuple[
    Callable[[Callable[[T], Value]], MetricReader], Callable[[Callable[[T], Iterable[MetricSample]]], MetricReader]
]:
    """Return decorators for functions of one thing: for a value, and for samples with further labels.

    `things` yields each thing with its labels. A value of None has no series.
    """

    def one(value: Callable[[T], Value]) -> MetricReader:
        def read(snapshot: Snapshot) -> Iterator[MetricSample]:
            for labels, thing in things(snapshot):
                found = value(thing)
                if found is not None:
                    yield labels, found

        return read

    def many(samples: Callable[[T], Iterable[MetricSample]]) -> MetricReader:
        def read(snapshot: Snapshot) -> Iterator[MetricSample]:
            for labels, thing in things(snapshot):
                for more, value in samples(thing):
                    yield labels + more, value

        return read

    return one, many


_gpus, _each_gpu = _readers(lambda s: (((gpu.device.uuid, gpu.device.index), gpu) for gpu in s.gpus))
_jobs, _each_job = _readers(lambda s: (((job.owner.job_id,), job) for job in s.jobs))
_training, _each_report = _readers(lambda s: (((j.owner.job_id,), j.progress) for j in s.jobs if j.progress))
_serving, _each_serving = _readers(lambda s: (((j.owner.job_id,), j.service) for j in s.jobs if j.service))
_models, _each_model = _readers(lambda s: (((model.model,), model) for model in s.models))
_node = _readers(lambda s: (((), s),))[0]
_history = _readers(lambda s: (((), s.meta.history),) if s.meta.history else ())[0]
_reload = _readers(lambda s: (((), s.meta.reload),) if s.meta.reload else ())[0]


def _leak_seconds(view: GpuView | JobView) -> Iterator[MetricSample]:
    for names, part in zip(_LEAK_LABELS, view.counters.now.parts, strict=True):
        yield names, seconds(part)


_gpu_seconds, _job_seconds = _each_gpu(_leak_seconds), _each_job(_leak_seconds)


def _account_seconds(snapshot: Snapshot) -> Iterator[MetricSample]:
    for account, parts in snapshot.account_totals:
        for layer, part in sum_by_layer(parts).items():
            yield (*account, layer), seconds(part)


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


def _job_states(job: JobView) -> Iterator[MetricSample]:
    for state, count in job.states:
        yield (state.value,), count


def _job_exempt(snapshot: Snapshot) -> Iterator[MetricSample]:
    for job in snapshot.jobs:
        if job.owner.exemption and snapshot.wall < job.owner.exempt_until * SECOND:
            yield (job.owner.job_id, job.owner.exemption), 1


def _job_costs(job: JobView) -> Iterator[MetricSample]:
    for currency, cost in job.costs:
        yield (currency,), cost


def _job_slices(job: JobView) -> Iterator[MetricSample]:
    if job.smallest_slice is not None:
        yield (job.smallest_slice.profile,), job.smallest_slice.compute / PPM


def _hfu(job: JobView) -> float | None:
    """HFU: the reported MFU times hardware FLOPs over model FLOPs."""
    mfu, training = job.counters.short_ratio("reported", "reportable"), job.progress
    if mfu is None or training is None or not training.flops:
        return None
    return mfu * training.hardware_flops / training.flops


def _quality(pick: int) -> MetricReader:
    def samples(view: TrainingView) -> Iterator[MetricSample]:
        value = None if view.quality is None else view.quality[pick]
        if view.quality is not None and value is not None:
            yield (view.quality[0],), value

    return _each_report(samples)


def _parallelism(view: TrainingView) -> Iterator[MetricSample]:
    for name in () if view.parallel is None else view.parallel.__struct_fields__:
        yield (name,), getattr(view.parallel, name)


def _requests(view: ServingView) -> Iterator[MetricSample]:
    for state, count in (("running", view.running), ("waiting", view.waiting)):
        if count is not None:
            yield (state,), count


def _latencies(view: ServingView) -> Iterator[MetricSample]:
    for latency in view.latencies:
        for percentile, value in (("p50", latency.p50), ("p95", latency.p95), ("p99", latency.p99)):
            yield (latency.kind, percentile), value


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


@_each_model
def _model_seconds(view: ModelView) -> Iterator[MetricSample]:
    """Allocated and unallocated part of each leak; only UNHELD_LEAKS can have unallocated time."""
    for index, (names, part) in enumerate(zip(_LEAK_LABELS, view.parts, strict=True)):
        unheld = view.unheld.get(index, 0)
        yield ("true", *names), seconds(part - unheld)
        if names[0] in UNHELD_LEAKS:
            yield ("false", *names), seconds(unheld)


def _by_layer(joules: Mapping[str, float]) -> Iterator[MetricSample]:
    return (((layer,), amount) for layer, amount in joules.items())


_model_energy = _each_model(lambda model: _by_layer(model.energy))
_energy = _each_gpu(lambda gpu: _by_layer(gpu.counters.energy_by_layer()))


def _prices(snapshot: Snapshot) -> Iterator[MetricSample]:
    terms = snapshot.meta.terms
    for view in snapshot.models:
        price = price_of(terms, model=view.model, spec=view.spec, wall=snapshot.wall)
        for held, amount in (("true", price.per_gpu_hour), ("false", price.per_unheld_hour)):
            yield (view.model, terms.pool, price.currency, price.basis, held), amount


def _per_kwh(snapshot: Snapshot) -> Iterator[MetricSample]:
    terms = snapshot.meta.terms
    if terms.per_kwh is not None:
        yield (terms.per_kwh_currency,), terms.per_kwh


def _idle_budget(snapshot: Snapshot) -> Iterator[MetricSample]:
    terms = snapshot.meta.terms
    if terms.idle_budget is not None:
        yield (terms.idle_budget_currency,), terms.idle_budget


def _exemptions(snapshot: Snapshot) -> Iterator[MetricSample]:
    for name, reason, expiry in snapshot.meta.terms.exemptions:
        yield (name, reason), expiry


def _node_info(snapshot: Snapshot) -> Iterator[MetricSample]:
    terms = snapshot.meta.terms
    yield (terms.node or snapshot.meta.host, terms.pool), 1


@_each_gpu
def _state(gpu: GpuView) -> Iterator[MetricSample]:
    yield (gpu.state.value, gpu.reason), 1


@_each_gpu
def _gpu_info(gpu: GpuView) -> Iterator[MetricSample]:
    device, smoothing = gpu.device, gpu.health.power_smoothing if gpu.health is not None else None
    spec = device.spec.name if device.spec else "unknown"
    smooths = "" if smoothing is None else ("yes" if smoothing else "no")
    yield (device.model, spec, device.profile, device.parent, smooths), 1


@_each_gpu
def _allocation_info(gpu: GpuView) -> Iterator[MetricSample]:
    for owner, ranks in zip(gpu.owners, gpu.ranks, strict=True):
        yield (owner.job_id, ranks), 1


@_each_job
def _job_info(job: JobView) -> Iterator[MetricSample]:
    o = job.owner
    yield (
        o.name, o.user, o.account, o.team, o.partition, o.qos, o.namespace, o.pod, o.kind, o.array_id, o.workload_class,
        o.scheduler,
    ), 1  # fmt: skip


@_each_job
def _job_spread(job: JobView) -> Iterator[MetricSample]:
    for label, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        value = job.counters.percentile(share)
        if value is not None:
            yield (label,), value


def _window(name: str) -> Callable[[GpuView | JobView], float | None]:
    pick: Callable[[Layers], float | None] = attrgetter(name)
    return lambda view: pick(view.counters.recent)


def _ofu(view: GpuView | JobView) -> float | None:
    return view.counters.short_ratio("ofu", "tensor_seen")


def _reading(name: str) -> MetricReader:
    """The latest value while it is current, so that an old value is never shown as live."""
    return _gpus(lambda gpu: valid_value(gpu.reading, name) if gpu.live else None)


def _sum_layers(name: str) -> MetricReader:
    pick: Callable[[Layers], float | None] = attrgetter(name)
    return _node(lambda snapshot: pick(snapshot.recent))


def _intensity(counters: Counters) -> float | None:
    return counters.short_ratio("flops", "bytes")


def _by_reason(field: str, *, scale: Callable[[int], float | str] = float) -> Callable[[GpuView], list[MetricSample]]:
    """Counts of one GPU by reason, without zeros, of which a healthy GPU would have dozens."""

    def read(gpu: GpuView) -> list[MetricSample]:
        counts: Counter[str] = Counter()
        for reason, count in getattr(gpu, field):
            counts[reason if reason in _KNOWN_REASONS[field] else "other"] += count
        return [((reason,), scale(count)) for reason, count in sorted(counts.items())]

    return read


def _rejected(snapshot: Snapshot) -> Iterator[MetricSample]:
    refused = dict.fromkeys(_KNOWN_REFUSALS, 0) | dict(snapshot.refused)
    for reason in _KNOWN_REFUSALS:
        yield ("", "", reason), refused[reason]
    yield from _each_gpu(_by_reason("rejected"))(snapshot)


def _faults(snapshot: Snapshot) -> Iterator[MetricSample]:
    """Counts by kind, including zeros of known kinds; unknown kinds count as other."""
    counts: dict[str, int] = dict.fromkeys(sorted(_KNOWN_FAULTS), 0) | {"other": 0}
    for kind, count in snapshot.faults:
        counts[kind if kind in counts else "other"] += count
    for kind, count in counts.items():
        yield (kind,), count


def _health(name: str, *, lasting: bool = True) -> MetricReader:
    """A value of the latest Health; absent if not reported, or, unless `lasting`, if the GPU is not live."""

    def read(gpu: GpuView) -> float | None:
        if gpu.health is None or not (lasting or gpu.live):
            return None
        value: float | None = getattr(gpu.health, name)
        return None if value is None else float(value)

    return _gpus(read)


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


def _limited(gpu: GpuView) -> Iterator[MetricSample]:
    for group, nanoseconds in gpu.limited if not gpu.device.parent else ():
        yield (group,), seconds(nanoseconds)


def _shared(gpu: GpuView) -> Iterator[MetricSample]:
    for basis, nanoseconds in gpu.shared:
        yield (basis,), seconds(nanoseconds)


_OVERSIZED = LEAK_NAMES.index("oversized_allocation")
_KNOWN_REFUSALS = ("clock_step", "report", "serving", "unknown_gpu")
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
    "reports_failed", "exporter_down",
})  # fmt: skip


def _errors(snapshot: Snapshot) -> Iterator[MetricSample]:
    for kind, count in snapshot.meta.errors:
        yield (kind,), count


def _build(snapshot: Snapshot) -> Iterator[MetricSample]:
    meta = snapshot.meta
    yield (meta.version,), 1


def _source(snapshot: Snapshot) -> Iterator[MetricSample]:
    meta = snapshot.meta
    yield (meta.source, meta.scheduler, meta.source_reason), 1


_GPU_LABELS = ("uuid", "gpu")
_P = "gpu_efficiency_"

METRICS: tuple[Metric, ...] = (
    Metric(
        _P + "seconds_total", "counter",
        "Paid GPU-seconds by where they went: each in exactly one leak, or useful, unresolved (computing, value "
        "unknown) or unobserved. Summed over leak they equal gpu_efficiency_paid_seconds_total.",
        _gpu_seconds, (*_GPU_LABELS, "leak", "layer"), "seconds", "gpu", max_series=len(LEAK_NAMES),
    ),
    Metric(
        _P + "paid_seconds_total", "counter",
        "Paid GPU-seconds: the time the GPU is in the node's inventory; a MIG instance counts as its share of the "
        "GPU.",
        _gpus(lambda g: seconds(g.counters.now.paid)), _GPU_LABELS, "seconds", "gpu",
    ),
    Metric(
        _P + "kernel_seconds_total", "counter",
        "GPU-seconds with a kernel running; divided by paid seconds this is GPU Kernel Utilization.",
        _gpus(lambda g: seconds(g.counters.now.engine)), _GPU_LABELS, "seconds", "gpu",
    ),
    Metric(
        _P + "gau_ratio", "gauge",
        "GPU Allocation Utilization over the last 5 minutes: allocated and working / paid and observed.",
        _gpus(_window("gau")), _GPU_LABELS, "ratio", "gpu",
    ),
    Metric(
        _P + "ectr_ratio", "gauge",
        "Effective Compute Time Ratio over the last 5 minutes: computing / allocated and working.",
        _gpus(_window("ectr")), _GPU_LABELS, "ratio", "gpu",
    ),
    Metric(
        _P + "emfu_ratio", "gauge",
        "Effective Model FLOPs Utilization over the last 5 minutes: useful / computing. Without training reports it "
        "is an upper bound from hardware counters.",
        _gpus(_window("emfu")), _GPU_LABELS, "ratio", "gpu",
    ),
    Metric(
        _P + "ofu_ratio", "gauge",
        "Share of the dense tensor peak delivered over the last 5 minutes: tensor activity x clock / reference clock.",
        _gpus(_ofu), _GPU_LABELS, "ratio", "gpu",
    ),
    Metric(
        _P + "driver_utilization_ratio", "gauge",
        "The driver's own utilization over the last 5 minutes, as nvidia-smi shows it.",
        _gpus(lambda g: g.counters.short_ratio("utilization", "utilization_seen")), _GPU_LABELS, "ratio", "gpu",
    ),
    Metric(
        _P + "state", "gauge",
        "1 for the current state of the GPU: unavailable, unobserved, unowned, unallocated, hung, zombie, stalled "
        "or active; the label reason says why.",
        _state, (*_GPU_LABELS, "state", "reason"), "", "gpu",
    ),
    Metric(
        _P + "state_since_timestamp_seconds", "gauge", "Unix time at which the GPU entered its current state.",
        _gpus(lambda g: g.since / SECOND), _GPU_LABELS, "seconds", "gpu",
    ),
    Metric(
        _P + "hang_suspected", "gauge",
        "1 while the GPU has spun without progress for longer than the suspicion threshold, 0 before that; absent "
        "while it does not spin.",
        _gpus(lambda g: None if g.spin_since is None else int(g.hang_suspected)), _GPU_LABELS, "", "spinning GPU",
    ),
    Metric(
        _P + "spin_since_timestamp_seconds", "gauge",
        "Unix time since which the GPU has spun without progress; absent while it does not spin.",
        _gpus(lambda g: _timestamp(g.spin_since)), _GPU_LABELS, "seconds", "spinning GPU",
    ),
    Metric(
        _P + "hang_confidence_ratio", "gauge",
        "While the GPU spins: share of the eight hang indicators that are measured and agree.",
        _gpus(lambda g: g.hang_confidence), _GPU_LABELS, "ratio", "spinning GPU",
    ),
    Metric(
        _P + "hang_sign", "gauge",
        "While a hang is suspected: 1 for an indicator that supports it, 0 for one that contradicts it; absent if "
        "it cannot be measured. engine_busy, tensor_rest, dram_rest, fp_rest, nvlink_rest, pcie_rest, power_flat, "
        "temperature_falling.",
        _each_gpu(_hang_signs), (*_GPU_LABELS, "sign"), "", "spinning GPU", max_series=len(HANG_SIGNS),
    ),
    Metric(
        _P + "spin_dram_active_ratio", "gauge",
        "While the GPU spins: share of time in which its memory was read or written, latest reading.",
        _gpus(_spin_dram), _GPU_LABELS, "ratio", "spinning GPU",
    ),
    Metric(
        _P + "spin_link_bytes_per_second", "gauge",
        "While the GPU spins: traffic on nvlink and pcie, the busier direction of each, latest reading.",
        _each_gpu(_spin_links), (*_GPU_LABELS, "link"), "bytes_per_second", "spinning GPU", max_series=len(_LINKS),
    ),
    Metric(
        _P + "last_work_timestamp_seconds", "gauge",
        "Unix time at which the current job last did effective work on the GPU, or was allocated it; absent while "
        "the GPU is not allocated.",
        _gpus(lambda g: _timestamp(g.worked_at)), _GPU_LABELS, "seconds", "gpu",
    ),
    Metric(
        _P + "power_watts", "gauge", "Board power draw.", _reading("power_watts"), _GPU_LABELS, "watts", "gpu",
    ),
    Metric(
        _P + "temperature_celsius", "gauge", "GPU temperature.",
        _reading("temperature_celsius"), _GPU_LABELS, "celsius", "gpu",
    ),
    Metric(
        _P + "power_limit_watts", "gauge", "Power limit that the driver enforces.",
        _reading("enforced_power_limit_watts"), _GPU_LABELS, "watts", "gpu",
    ),
    Metric(
        _P + "memory_temperature_celsius", "gauge",
        "Temperature of the device memory; absent on boards without that sensor.",
        _health("memory_temperature_celsius", lasting=False), _GPU_LABELS, "celsius", "gpu",
    ),
    Metric(
        _P + "temperature_margin_celsius", "gauge", "Degrees left until the GPU throttles.",
        _health("temperature_margin_celsius", lasting=False), _GPU_LABELS, "celsius", "gpu",
    ),
    Metric(
        _P + "clock_limited_seconds_total", "counter",
        "Seconds in which the clock was limited, by reason, as sampled: power (software power cap), thermal, "
        "hardware (slowdown, power brake), settings (application or display clocks, sync boost).",
        _each_gpu(_limited), (*_GPU_LABELS, "reason"), "seconds", "gpu", max_series=len(CLOCK_LIMITERS),
    ),
    Metric(
        _P + "xid_errors_total", "counter",
        "Critical errors (Xid) that the driver has reported since the daemon first saw the GPU.",
        _gpus(lambda g: None if g.health is None else g.xids), _GPU_LABELS, "", "gpu",
    ),
    Metric(
        _P + "last_xid", "gauge", "Code of the latest Xid error; absent if there was none.",
        _gpus(lambda g: g.last_xid or None), _GPU_LABELS, "", "gpu",
    ),
    Metric(
        _P + "recovery_action", "gauge",
        "Recovery action that the driver requests, with NVML's numbers: 0 none, 1 reset the GPU, 2 reboot the node, "
        "3 drain peers, 4 drain and reset; later drivers have more.",
        _health("recovery_action"), _GPU_LABELS, "", "gpu",
    ),
    Metric(
        _P + "ecc_errors_total", "counter",
        "ECC memory errors since the driver was loaded: corrected and uncorrected.",
        _each_gpu(_ecc), (*_GPU_LABELS, "type"), "", "gpu", max_series=2,
    ),
    Metric(
        _P + "row_remap", "gauge",
        "Row remapping: 0 none needed, 1 a remap is pending a reset, 2 a remap failed: replace the board.",
        _gpus(_row_remap), _GPU_LABELS, "", "gpu",
    ),
    Metric(
        _P + "nvlink_errors_total", "counter",
        "CRC, replay and recovery errors of all NVLinks since the driver was loaded.",
        _health("nvlink_errors"), _GPU_LABELS, "", "gpu",
    ),
    Metric(
        _P + "memory_used_bytes", "gauge", "Device memory in use.",
        _reading("memory_used_bytes"), _GPU_LABELS, "bytes", "gpu",
    ),
    Metric(
        _P + "energy_joules_total", "counter",
        "Energy by where it went: a leak's layer, useful, unresolved or unobserved.",
        _energy, (*_GPU_LABELS, "layer"), "joules", "gpu", max_series=len(LAYERS),
    ),
    Metric(
        _P + "reading_age_seconds", "gauge", "Age of the latest accepted reading; at most one interval on a live GPU.",
        _gpus(lambda g: None if g.age is None else g.age / SECOND), _GPU_LABELS, "seconds", "gpu",
    ),
    Metric(
        _P + "gpu_info", "gauge",
        "Model of the GPU as the driver names it and its row of the specification table; for a MIG instance its "
        "profile and parent GPU; whether the board smooths its power draw.",
        _gpu_info, (*_GPU_LABELS, "model", "spec", "profile", "parent", "power_smoothing"), "", "gpu",
    ),
    Metric(
        _P + "allocation_info", "gauge",
        "1 for each job to which the GPU is allocated, with the job's ranks that have processes on it.",
        _allocation_info, (*_GPU_LABELS, "job_id", "rank"), "", "gpu",
    ),
    Metric(
        _P + "job_seconds_total", "counter",
        "GPU-seconds allocated to a job on this node by where they went; summed over leak they equal "
        "gpu_efficiency_job_paid_seconds_total.",
        _job_seconds, ("job_id", "leak", "layer"), "seconds", "job", max_series=len(LEAK_NAMES),
    ),
    Metric(
        _P + "job_paid_seconds_total", "counter", "GPU-seconds allocated to a job on this node.",
        _jobs(lambda j: seconds(j.counters.now.paid)), ("job_id",), "seconds", "job",
    ),
    Metric(
        _P + "job_info", "gauge", "Owner of a job and what the scheduler reports about it: join on job_id.", _job_info,
        ("job_id", "name", "user", "account", "team", "partition", "qos", "workload_namespace", "workload_pod", "kind",
         "array_id", "workload_class", "scheduler"), "", "job",
    ),
    Metric(
        _P + "job_state_gpus", "gauge",
        "GPUs of this node allocated to a job, by state; a state without GPUs is absent.",
        _each_job(_job_states), ("job_id", "state"), "", "job",
    ),
    Metric(
        _P + "job_hang_suspected_gpus", "gauge",
        "GPUs of a job that are hung or suspected to be; absent while there are none.",
        _jobs(lambda j: j.suspected or None), ("job_id",), "", "job in trouble",
    ),
    Metric(
        _P + "job_spin_since_timestamp_seconds", "gauge",
        "Unix time since which the first of the job's hung or suspected GPUs has spun.",
        _jobs(lambda j: _timestamp(j.spin_since)), ("job_id",),
        "seconds", "job in trouble",
    ),
    Metric(
        _P + "job_last_work_timestamp_seconds", "gauge",
        "Unix time at which any GPU of the job on this node last did effective work, or was allocated.",
        _jobs(lambda j: _timestamp(j.worked_at)), ("job_id",), "seconds", "job",
    ),
    Metric(
        _P + "job_no_process_gpus", "gauge",
        "GPUs allocated to a job on which the driver lists no process; absent if each has one.",
        _jobs(lambda j: j.without_process or None), ("job_id",), "", "job in trouble",
    ),
    Metric(
        _P + "job_no_process_since_timestamp_seconds", "gauge",
        "Unix time since which the first of the job's GPUs has had no process.",
        _jobs(lambda j: _timestamp(j.without_process_since)),
        ("job_id",), "seconds", "job in trouble",
    ),
    Metric(
        _P + "job_zombie_limit_seconds", "gauge",
        "How long this job may be idle before it counts as a zombie, where that differs from the limit of its "
        "class.",
        _jobs(lambda j: j.owner.zombie_seconds), ("job_id",), "seconds", "job in trouble",
    ),
    Metric(
        _P + "job_exempt", "gauge", "1 while an exemption of the operator covers the job.", _job_exempt,
        ("job_id", "exemption"), "", "job in trouble",
    ),
    Metric(
        _P + "job_price_per_hour", "gauge",
        "Price per hour of the GPUs of this node allocated to a job; shared GPUs are split equally.",
        _each_job(_job_costs), ("job_id", "currency"), "", "job",
    ),
    Metric(
        _P + "job_fitting_slice_ratio", "gauge",
        "For a job with one GPU, after an hour (servers and notebooks: after a day): the smallest MIG slice that "
        "would have met its peak demand, as a share of the GPU; absent if only a whole GPU would.",
        _each_job(_job_slices), ("job_id", "profile"), "ratio", "job on one GPU",
    ),
    Metric(
        _P + "job_unneeded_seconds_total", "counter", "GPU-seconds beyond that slice since it was determined.",
        _jobs(lambda j: None if j.excess is None else seconds(j.excess)), ("job_id",), "seconds", "job on one GPU",
    ),
    Metric(
        _P + "job_reported_mfu_ratio", "gauge",
        "Model FLOPs Utilization over the last 5 minutes as reported by the job; absent while it reports none.",
        _jobs(lambda j: j.counters.short_ratio("reported", "reportable")), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_reported_hfu_ratio", "gauge",
        "Hardware FLOPs Utilization over the last 5 minutes as reported by the job: MFU plus recomputation. The "
        "difference is the cost of recomputation.",
        _jobs(_hfu), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_reported_gpu_seconds_total", "counter",
        "GPU-seconds on this node covered by the job's reports: divide its tokens, samples and FLOPs by this.",
        _training(lambda p: seconds(p.gpu_time)), ("job_id",), "seconds", "reporting job",
    ),
    Metric(
        _P + "job_model_flops_total", "counter",
        "Model FLOPs as reported by the job: the share of this node's GPUs that its reports cover; absent, as the "
        "next three, while none are reported.",
        _training(lambda p: p.flops or None), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_tokens_total", "counter", "Training tokens, padding included: the share of this node's GPUs.",
        _training(lambda p: p.tokens or None), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_padding_tokens_total", "counter", "Padding tokens among them.",
        _training(lambda p: p.padding if p.tokens else None), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_samples_total", "counter", "Training samples: the share of this node's GPUs.",
        _training(lambda p: p.samples or None), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_steps_total", "counter",
        "Optimizer steps, repeated ones included, as counted by one process of the job.",
        _training(lambda p: p.steps), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_rework_steps_total", "counter",
        "Steps among them that repeat steps the run had already done before a restart.",
        _training(lambda p: p.rework_steps), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_step", "gauge", "Latest completed step.", _training(lambda p: p.step), ("job_id",), "",
        "reporting job",
    ),
    Metric(
        _P + "job_epoch", "gauge", "Passes over the data so far.", _training(lambda p: p.epoch), ("job_id",), "",
        "reporting job",
    ),
    Metric(
        _P + "job_world_size", "gauge", "GPUs of the whole job, as reported by the job.",
        _training(lambda p: p.world or None), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_run_seconds_total", "counter",
        "Wall time of a job by phase, as reported by one of its processes: startup, restore, data, compute, "
        "communication, bubble, checkpoint, evaluation, idle; rework (repeated steps); unreported.",
        _each_report(lambda p: (((name,), seconds(spent)) for name, spent in p.phases)), ("job_id", "phase"), "seconds",
        "reporting job", max_series=len(WALL_TIME_PHASES),
    ),
    Metric(
        _P + "job_goodput_ratio", "gauge",
        "Share of a run's time so far, restarts included, spent in new steps.",
        _training(lambda p: p.goodput), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_progress_ratio", "gauge", "Share of all steps that were new, not repeated after a restart.",
        _training(lambda p: 1.0 - p.rework_steps / p.steps if p.steps else None), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_checkpoints_total", "counter",
        "Checkpoints written.", _training(lambda p: p.checkpoints), ("job_id",),
        "", "reporting job",
    ),
    Metric(
        _P + "job_restarts_total", "counter", "Times the program resumed from a checkpoint.",
        _training(lambda p: p.restarts), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_recovery_seconds_total", "counter",
        "Time from the last new step before each restart to the first new step after it; divided by restarts: mean "
        "time to recover.",
        _training(lambda p: seconds(p.recovery)), ("job_id",), "seconds", "reporting job",
    ),
    Metric(
        _P + "job_bubble_ratio", "gauge",
        "Share of a step in which the job's pipeline is idle (pipeline bubble); absent without pipeline "
        "parallelism.",
        _training(lambda p: p.bubble), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_step_seconds", "gauge", "Mean step time of each process, in its latest report.",
        _each_report(lambda p: (((rank,), step) for rank, step, _ in p.ranks)), ("job_id", "rank"), "seconds", "rank",
    ),
    Metric(
        _P + "job_rank_busy_seconds", "gauge",
        "Mean step time of each process without communication and bubbles: the rank with the largest value is the "
        "one the others wait for.",
        _each_report(lambda p: (((rank,), busy) for rank, _, busy in p.ranks)), ("job_id", "rank"), "seconds", "rank",
    ),
    Metric(
        _P + "job_loss", "gauge", "Latest reported loss; may be NaN.", _training(lambda p: p.loss),
        ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_loss_spread_ratio", "gauge", "Standard deviation of recent losses over their mean.",
        _training(lambda p: p.loss_spread), ("job_id",), "ratio", "reporting job",
    ),
    Metric(
        _P + "job_loss_events_total", "counter",
        "Interruptions of convergence: spike, not_finite (NaN or infinite loss), rollback (the step went back "
        "without a restart).",
        _each_report(lambda p: (((event,), count) for event, count in p.events)), ("job_id", "event"), "",
        "reporting job", max_series=len(LOSS_EVENTS),
    ),
    Metric(
        _P + "job_quality", "gauge", "Figure of merit that a job reports; the label metric is its name.", _quality(1),
        ("job_id", "name"), "", "reporting job",
    ),
    Metric(
        _P + "job_quality_start", "gauge",
        "First reported value of the figure of merit.", _quality(2), ("job_id", "name"), "",
        "reporting job",
    ),
    Metric(
        _P + "job_quality_target", "gauge",
        "Target value of the figure of merit.", _quality(3), ("job_id", "name"), "",
        "reporting job",
    ),
    Metric(
        _P + "job_target_reached_timestamp_seconds", "gauge",
        "Unix time at which the target was reached; absent until then.",
        _training(lambda p: _timestamp(p.target_at)), ("job_id",), "seconds", "reporting job",
    ),
    Metric(
        _P + "job_parallelism", "gauge", "Degrees of parallelism: tensor, pipeline, data, context, expert.",
        _each_report(_parallelism), ("job_id", "dimension"), "", "reporting job", max_series=5,
    ),
    Metric(
        _P + "job_tensor_parallel_lost_bytes_per_second", "gauge",
        "Lower bound of the bandwidth that each GPU loses because its tensor-parallel group is larger than its "
        "NVLink domain; absent if it is not.",
        _jobs(lambda j: j.tensor_parallel_lost), ("job_id",), "", "reporting job",
    ),
    Metric(
        _P + "job_run_info", "gauge", "The run to which a job belongs: a job and its restarts share one run.",
        _each_report(lambda p: (((p.run,), 1),) if p.run else ()), ("job_id", "run"), "", "reporting job",
    ),
    Metric(
        _P + "job_requests", "gauge",
        "Requests of a serving engine on this node: running in its batches, or waiting in its queue.",
        _each_serving(_requests), ("job_id", "state"), "", "serving job", max_series=2,
    ),
    Metric(
        _P + "job_batch_fill_ratio", "gauge",
        "Running requests / batch slots; absent if the engine does not report its slots.",
        _serving(lambda v: v.fill), ("job_id",), "ratio", "serving job",
    ),
    Metric(
        _P + "job_kv_cache_ratio", "gauge", "KV-cache usage of the fullest replica.", _serving(lambda v: v.kv_use),
        ("job_id",), "ratio", "serving job",
    ),
    Metric(
        _P + "job_preemptions_total", "counter", "Requests preempted for lack of KV cache.",
        _serving(lambda v: v.preemptions), ("job_id",), "", "serving job",
    ),
    Metric(
        _P + "job_engine_tokens_total", "counter",
        "Tokens of a serving engine: prompt (computed), cached (not computed), generated, recomputed (after eviction), "
        "drafted, accepted.",
        _each_serving(lambda v: (((kind,), count) for kind, count in v.tokens)), ("job_id", "kind"), "", "serving job",
        max_series=len(TOKEN_KINDS),
    ),
    Metric(
        _P + "job_draft_acceptance_ratio", "gauge", "Accepted / proposed draft tokens, between the latest two polls.",
        _serving(lambda v: v.acceptance), ("job_id",), "ratio", "serving job",
    ),
    Metric(
        _P + "job_tokens_per_pass_ratio", "gauge",
        "Tokens generated per sequence and forward pass, between the latest two polls: 1 without speculative "
        "decoding.",
        _serving(lambda v: v.per_pass), ("job_id",), "ratio", "serving job",
    ),
    Metric(
        _P + "job_latency_seconds", "gauge",
        "Latency of the slowest replica, of requests that finished between the latest two polls: ttft (time to "
        "first token), itl (inter-token latency), queue, e2e.",
        _each_serving(_latencies), ("job_id", "kind", "percentile"), "seconds", "serving job", max_series=12,
    ),
    Metric(
        _P + "job_mbu_ratio", "gauge",
        "Memory Bandwidth Utilization from the engine's own estimate of bytes moved, between the latest two polls.",
        _jobs(_mbu), ("job_id",), "ratio", "serving job",
    ),
    Metric(
        _P + "job_engine_info", "gauge", "The serving engine of a job.",
        _each_serving(lambda v: (((v.engine,), 1),)), ("job_id", "engine"), "", "serving job",
    ),
    Metric(
        _P + "job_advice_seconds_total", "counter",
        "GPU-seconds that a change could save; they stay counted in their leak: speculative_decoding (half of the "
        "memory-bound time of a server without draft tokens).",
        _each_job(_advice), ("job_id", "advice"), "seconds", "serving job",
    ),
    Metric(
        _P + "job_start_timestamp_seconds", "gauge",
        "Unix time at which the job was allocated its first GPU on this node.",
        _jobs(lambda j: j.start / SECOND), ("job_id",), "seconds", "job",
    ),
    Metric(
        _P + "job_time_limit_seconds", "gauge", "Time limit of the job in the scheduler; absent if there is none.",
        _jobs(lambda j: j.owner.time_limit_seconds), ("job_id",), "seconds", "job",
    ),
    Metric(
        _P + "job_first_work_seconds", "gauge",
        "Time from a job's first GPU on this node to its first kernel; absent until then, and if it was not "
        "observed.",
        _jobs(lambda j: None if j.first_work is None else j.first_work / SECOND), ("job_id",), "seconds", "job",
    ),
    Metric(
        _P + "job_ectr_ratio", "gauge", "Effective Compute Time Ratio of a job over the last 5 minutes.",
        _jobs(_window("ectr")), ("job_id",), "ratio", "job",
    ),
    Metric(
        _P + "job_emfu_ratio", "gauge", "Effective Model FLOPs Utilization of a job over the last 5 minutes.",
        _jobs(_window("emfu")), ("job_id",), "ratio", "job",
    ),
    Metric(
        _P + "job_ofu_ratio", "gauge", "Share of the dense tensor peak that a job used over the last 5 minutes.",
        _jobs(_ofu), ("job_id",), "ratio", "job",
    ),
    Metric(
        _P + "job_dram_active_ratio", "gauge",
        "Share of time in which a job's GPUs read or wrote device memory, over the last 5 minutes.",
        _jobs(lambda j: j.counters.short_ratio("dram", "dram_seen")), ("job_id",), "ratio", "job",
    ),
    Metric(
        _P + "job_memory_used_bytes", "gauge", "Device memory in use on the job's GPUs on this node.",
        _jobs(lambda j: j.memory_used), ("job_id",), "bytes", "job",
    ),
    Metric(
        _P + "job_arithmetic_intensity_flops_per_byte", "gauge",
        "Tensor FLOPs per byte of DRAM traffic over the last 5 minutes, from activity and the board's peaks.",
        _jobs(lambda j: _intensity(j.counters)), ("job_id",), "", "job",
    ),
    Metric(
        _P + "job_energy_joules_total", "counter", "Energy used by a job on this node.",
        _jobs(lambda j: sum(j.counters.energy)), ("job_id",), "joules", "job",
    ),
    Metric(
        _P + "job_activity_ratio", "gauge",
        "Engine activity over the last 5 minutes: 10th, 50th and 90th percentile over time, in steps of 5 %.",
        _job_spread, ("job_id", "percentile"), "ratio", "job", max_series=3,
    ),
    Metric(
        _P + "account_seconds_total", "counter",
        "GPU-seconds allocated on this node by billing account and layer; the time of ended jobs stays counted "
        "here. Accounts beyond policy.max_accounts are summed as other.",
        _account_seconds, ("team", "account", "workload_namespace", "layer"), "seconds", "account",
        max_series=len(LAYERS),
    ),
    Metric(
        _P + "node_seconds_total", "counter",
        "Paid GPU-seconds of the node by where they went: gpu_efficiency_seconds_total summed by model; held=false "
        "is the time in which the GPU was not allocated, for prices that exclude it. Fleet rules read this metric.",
        _model_seconds, ("model", "held", "leak", "layer"), "seconds", "model",
        max_series=len(LEAK_NAMES) + len(UNHELD_LEAKS),
    ),
    Metric(
        _P + "node_kernel_seconds_total", "counter", "GPU-seconds with a kernel on the node's GPUs of a model.",
        _models(lambda m: seconds(m.engine)), ("model",), "seconds", "model",
    ),
    Metric(
        _P + "node_energy_joules_total", "counter", "Energy used by the node's GPUs of a model, by layer.",
        _model_energy, ("model", "layer"), "joules", "model", max_series=len(LAYERS),
    ),
    Metric(
        _P + "node_gpus", "gauge", "GPUs of a model in the node's inventory.",
        _models(lambda m: m.weight / PPM), ("model",), "", "model",
    ),
    Metric(
        _P + "model_peak_flops", "gauge", "Dense 16-bit peak of one GPU of a model, FLOP/s; absent if unknown.",
        _models(lambda m: m.peak_flops), ("model",), "", "model",
    ),
    Metric(
        _P + "price_per_gpu_hour", "gauge",
        "Price of a GPU-hour on this node; held=false: while the GPU is not allocated, 0 if only allocated time is "
        "paid. Without a configured price the value is 1 and the currency GPU-hours.",
        _prices, ("model", "pool", "currency", "basis", "held"), "", "model", max_series=2,
    ),
    Metric(
        _P + "price_per_kwh", "gauge", "Price of a kilowatt-hour; absent if not configured.", _per_kwh,
        ("currency",), "", "node",
    ),
    Metric(
        _P + "grams_co2_per_kwh", "gauge",
        "Carbon intensity, grams of CO2 per kilowatt-hour; absent if not configured.",
        _node(lambda s: s.meta.terms.grams_co2_per_kwh),
    ),
    Metric(
        _P + "idle_budget_per_hour", "gauge",
        "Budget per hour for GPUs of the whole cluster that are unallocated or idle; absent if not configured.",
        _idle_budget, ("currency",), "", "node",
    ),
    Metric(
        _P + "exemption_expiry_timestamp_seconds", "gauge", "Unix time at which a configured exemption expires.",
        _exemptions, ("exemption", "reason"), "seconds", "exemption",
    ),
    Metric(
        _P + "threshold", "gauge", "Thresholds of this node's policy, for alert rules.",
        lambda s: (((name,), value) for name, value in s.thresholds), ("name",), max_series=len(EXPORTED_THRESHOLDS),
    ),
    Metric(
        _P + "state_entries_total", "counter", "Times a GPU of the node entered a state.",
        lambda s: (((state.value,), count) for state, count in s.state_entries), ("state",), max_series=len(State),
    ),
    Metric(
        _P + "detections_total", "counter", "Hangs and zombies detected on the node.",
        lambda s: (((state.value,), count) for state, count, _ in s.detections), ("state",), max_series=2,
    ),
    Metric(
        _P + "detection_seconds_total", "counter",
        "Seconds from the first indication of a hang or zombie to its detection; divided by "
        "gpu_efficiency_detections_total: mean time to detect.",
        lambda s: (((state.value,), seconds(spent)) for state, _, spent in s.detections), ("state",), "seconds",
        max_series=2,
    ),
    Metric(
        _P + "node_info", "gauge", "Name of the node in its scheduler, and its pool.", _node_info,
        ("node", "pool"),
    ),
    Metric(
        _P + "observation_timestamp_seconds", "gauge", "Unix time of the latest observation, by the node's clock.",
        _node(lambda s: s.wall / SECOND), (), "seconds",
    ),
    Metric(
        _P + "node_gau_ratio", "gauge", "GPU Allocation Utilization of the node over the last 5 minutes.",
        _sum_layers("gau"), (), "ratio",
    ),
    Metric(
        _P + "node_gau_held_ratio", "gauge",
        "GPU Allocation Utilization as if no allocation were larger than its job needs: without "
        "oversized_allocation.",
        _node(_gau_without_oversized), (), "ratio",
    ),
    Metric(
        _P + "node_ectr_ratio", "gauge", "Effective Compute Time Ratio of the node over the last 5 minutes.",
        _sum_layers("ectr"), (), "ratio",
    ),
    Metric(
        _P + "node_emfu_ratio", "gauge", "Effective Model FLOPs Utilization of the node over the last 5 minutes.",
        _sum_layers("emfu"), (), "ratio",
    ),
    Metric(
        _P + "node_coverage_ratio", "gauge", "Share of paid time that was observed, over the last 5 minutes.",
        _sum_layers("coverage"), (), "ratio",
    ),
    Metric(
        _P + "conservation_errors_total", "counter",
        "Times the parts of a GPU's time did not add up to its paid time. Anything but 0 is a bug: please report "
        "it.",
        _node(lambda s: s.conservation_errors),
    ),
    Metric(
        _P + "rejected_total", "counter",
        "Readings or fields rejected, by GPU and reason; only those that occurred. Without a GPU label: rejected "
        "for the whole node.",
        _rejected, (*_GPU_LABELS, "reason"), max_series=len(_KNOWN_REFUSALS),
    ),
    Metric(
        _P + "unobserved_seconds_total", "counter",
        "GPU-seconds that were not observed, by GPU and reason; only those that occurred.",
        _each_gpu(_by_reason("unobserved", scale=seconds)), (*_GPU_LABELS, "reason"), "seconds", "gpu",
    ),
    Metric(
        _P + "faults_total", "counter", "Failed reads, by kind; a fault that lasts is counted at every tick.",
        _faults, ("kind",), max_series=len(_KNOWN_FAULTS) + 1,
    ),
    Metric(
        _P + "allocations_age_seconds", "gauge", "Seconds since the scheduler last confirmed GPU allocations.",
        _node(lambda s: None if s.allocations_age is None else s.allocations_age / SECOND), (), "seconds",
    ),
    Metric(
        _P + "shared_seconds_total", "counter",
        "Seconds in which several jobs shared the GPU, by how time was split between them: sm (SM time of their "
        "processes) or equal; only where it occurred.",
        _each_gpu(_shared), (*_GPU_LABELS, "basis"), "seconds", "shared GPU",
    ),
    Metric(
        _P + "scheduler_unanswered_seconds", "gauge",
        "Seconds that the current request to the scheduler's controller or API server has been waiting for a "
        "response; 0 if none is pending.",
        _node(lambda s: s.meta.unanswered_seconds), (), "seconds",
    ),
    Metric(
        _P + "ticks_total", "counter", "Sampling ticks since the start.", _node(lambda s: s.meta.ticks),
    ),
    Metric(
        _P + "late_ticks_total", "counter", "Ticks that started more than half an interval late.",
        _node(lambda s: s.meta.late_ticks),
    ),
    Metric(
        _P + "read_seconds_total", "counter", "Wall time spent reading the source and the scheduler.",
        _node(lambda s: s.meta.read_seconds), (), "seconds",
    ),
    Metric(
        _P + "core_seconds_total", "counter", "Wall time spent turning observations into ledger entries.",
        _node(lambda s: s.meta.core_seconds), (), "seconds",
    ),
    Metric(
        _P + "workload_messages_total", "counter",
        "Training reports received, by outcome: accepted, or why they were rejected.",
        lambda s: (((outcome,), count) for outcome, count in s.meta.messages), ("outcome",),
        max_series=0,  # as many as there are outcomes where jobs can report, else none
    ),
    Metric(
        _P + "errors_total", "counter",
        "Unexpected errors caught by the sampling loop, by kind.", _errors, ("kind",), max_series=4,
    ),
    Metric(
        _P + "config_last_reload_successful", "gauge",
        "1 if the configuration file was loaded; 0 if it was rejected: the log gives the reason, and the previous "
        "configuration stays in force.",
        _reload(lambda view: int(not view.refused)),
    ),
    Metric(
        _P + "config_last_reload_success_timestamp_seconds", "gauge",
        "Unix time at which the configuration in force was loaded, at the start or later.",
        _reload(lambda view: view.at), (), "seconds",
    ),
    Metric(
        _P + "config_restart_needed", "gauge",
        "1 while the configuration file has changes that take effect only after a restart; the log lists them.",
        _reload(lambda view: int(bool(view.restart))),
    ),
    Metric(
        _P + "history_up", "gauge",
        "1 if the latest write to this node's history store succeeded; 0: time since then would be lost in a crash.",
        _history(lambda view: int(view.works)),
    ),
    Metric(
        _P + "history_last_checkpoint_timestamp_seconds", "gauge",
        "Unix time of the latest checkpoint in the store; 0 before the first.",
        _history(lambda view: view.saved_at), (), "seconds",
    ),
    Metric(
        _P + "history_failures_total", "counter",
        "Failed writes to the history store since the start; the log gives the reason.",
        _history(lambda view: view.failures),
    ),
    Metric(
        _P + "history_size_bytes", "gauge", "Size of the history store on disk.",
        _history(lambda view: view.bytes), (), "bytes",
    ),
    Metric(
        _P + "simulated", "gauge", "1 if the data come from a simulation or a replay, not from hardware.",
        _node(lambda s: int(s.meta.simulated)),
    ),
    Metric(
        _P + "source_info", "gauge",
        "Sources of telemetry and allocations, and why this source was selected.",
        _source, ("source", "scheduler", "reason"),
    ),
    Metric(
        _P + "build_info", "gauge", "Version of the exporter.", _build, ("version",),
    ),
)  # fmt: skip


SERIES_BUDGET = {"gpu": 64, "job": 45, "node": 150}
"""Maximum number of series in METRICS per GPU, per job on a node, and per node with one GPU model."""


def max_series_of_scope(scope: str) -> int:
    """Maximum number of series per instance of a scope, without process_* metrics.

    A shared GPU has one more `allocation_info` per additional owner.
    """
    return sum(metric.max_series for metric in METRICS if metric.scope == scope)
