"""Counts the series of a fleet: scraped, recorded by the rules of alerts/, and kept by a relabelling profile.

Owns the arithmetic. The series of one GPU, job or node are counted by rendering METRICS over the snapshot of a small
simulated node; rules come from data/recorded.csv and data/read_by_rules.csv. Refuses hand-written counts, and to
estimate memory and disk: the command does.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, ProcessCollector

from exporter.core.leaks import LAYERS, LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.metrics import METRICS, UNHELD_LEAKS, UNOBSERVED_REASONS, Metric
from exporter.core.model import PPM, SECOND, Allocation, Device, Health, Observation, Owner, Process, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, HistoryStatus, take_snapshot
from exporter.registry import PROFILING_SIGNALS, SOURCES
from exporter.specs import find_spec
from exporter.training.message import OUTCOMES

Counts = Mapping[str, float]
"""Series by metric."""
SERIES_OF_A_SCRAPE = 5
"""up, scrape_duration_seconds, scrape_samples_scraped, scrape_samples_post_metric_relabeling, scrape_series_added:
which Prometheus adds for every target ("Jobs and instances")."""
REPORTING_OR_SERVING, REPORTED_MFU = "reporting or serving job", "gpu_efficiency_job_reported_mfu_ratio"
"""Scope of a job that reports or whose engine is found, and the metric that both kinds of job can have."""
MISSING_SIGNALS: Mapping[str, tuple[str, ...]] = {
    name: signals
    for source, entry in SOURCES.items()
    for name, signals in ((source, entry.unsupported_signals), *entry.limited_variants.items())
}
"""By source or limited variant of one: fields of a Reading or a Health that it does not report for a whole board."""


_PUSH_OUTCOMES = 2
"""Accepted and failed. The module that counts them needs OpenTelemetry's SDK."""


class FleetSize(Struct, frozen=True, kw_only=True):
    """The size of a fleet. Numbers are of the whole fleet at one moment, unless they say "per node"."""

    nodes: int = 1
    gpus: int = 8
    """Boards per node."""
    mig_boards: int = 0
    """Boards that are partitioned into MIG instances, per node."""
    mig_instances: int = 0
    """MIG instances on all boards together, per node."""
    jobs: int = 1
    """Running jobs."""
    nodes_per_job: float = 1.0
    reporting: int = 0
    """Jobs that report."""
    serving: int = 0
    """Jobs whose serving engine is found."""
    measured: int = 0
    """Jobs whose CPU use and pressure are measured."""
    communicating: int = 0
    """Jobs whose communication an NCCL profiler plugin times."""
    trouble: int = 0
    """Jobs that have a spinning GPU, a GPU without a process, an exemption, or limits of their own."""
    spinning: int = 0
    """GPUs that spin at the same time."""
    coding: int = 0
    """GPUs that encode or decode video at the same time."""
    chip_links: int = 0
    """GPUs with a chip-to-chip link to a Grace CPU."""
    ports: int = 0
    """RDMA ports of each node."""
    shared: int = 0
    """GPUs that several jobs hold."""
    sharers: int = 2
    """Jobs on each shared GPU."""
    free: int = 0
    """Unallocated GPUs; counted as allocated in the estimate of the maximum."""
    reasons: int = 1
    """Different reasons for unobserved time of a GPU since the daemon's start."""
    churn: float = 0.0
    """Jobs that end per day."""
    models: int = 1
    """GPU models in the fleet."""
    models_per_node: int = 1
    node_accounts: int = 1
    """Triples of team, account and namespace that have held a GPU of a node since its daemon's start."""
    owners: int = 1
    """Triples of team, account and namespace in the fleet."""
    users: int = 1
    pairs: int = 1
    """Pairs of an owner and a user."""
    exemptions: int = 0
    pod_labels: int = 0
    """Labels of pods that are exported for each job."""
    leaks: int = 0
    """Leaks in which one job or node loses time at once; 0: all of them."""
    source: str = "dcgm"
    listening: bool = True
    """Jobs can report: reports.socket is not empty."""
    pushing: bool = False
    """The daemons push over OTLP."""

    @property
    def devices(self) -> int:
        """Devices of a node: boards (or the unpartitioned rest of a MIG board) and MIG instances."""
        return self.gpus + self.mig_instances

    @property
    def node_jobs(self) -> float:
        """Sum over all nodes of their jobs: a job on three nodes counts as three."""
        return self.jobs * self.nodes_per_job

    @property
    def lingering(self) -> float:
        """Ended jobs that are still exported, counted as in `node_jobs`; limited by `policy.max_jobs` per node."""
        ended = self.churn / 86_400 * Policy().job_linger_seconds * self.nodes_per_job
        return min(ended, max(0.0, self.nodes * Policy().max_jobs - self.node_jobs))


# -- series of one GPU, job or node --


class SeriesCounts(Struct, frozen=True):
    """Series by metric of each kind of device, of a job and of a node, in a small node without trouble."""

    held: Counts
    """Of an allocated whole GPU."""
    free: Counts
    """Of a GPU that was allocated until minutes ago."""
    instance: Counts
    """Of a MIG instance."""
    rest: Counts
    """Of the unpartitioned rest of a board with MIG instances."""
    job: Counts
    node: Counts
    """Without a configured price of energy or budget."""


@cache
def series_counts(source: str) -> SeriesCounts:
    """Series per device, job and node with telemetry of the source (a key of MISSING_SIGNALS)."""
    ledger = Ledger()
    owner = Owner(job_id="job", time_limit_seconds=SECOND)
    devices = tuple(_devices())
    names = ("held", "instance", "free")
    held = tuple(Allocation(uuid=uuid, owner=replace(owner, job_id=uuid), start=0) for uuid in names)
    advance(ledger, Observation(0, 0, devices=devices, allocations=held))
    for second in range(1, 4):
        rows = tuple(_reading(device, second, MISSING_SIGNALS[source]) for device in devices)
        health = tuple(_health(name, MISSING_SIGNALS[source]) for name in ("held", "free", "rest"))
        now = held if second < 3 else held[:2]  # noqa: PLR2004  the last second
        advance(ledger, Observation(second * SECOND, second * SECOND, readings=rows, health=health, allocations=now))
    return _count_series(ledger)


def _devices() -> Iterator[Device]:
    model = "NVIDIA H100 80GB HBM3"
    spec = find_spec(model)
    yield Device("held", "0", model, spec)
    yield Device("free", "1", model, spec)
    yield Device("rest", "2", model, spec, weight=PPM - PPM // 7)
    yield Device("instance", "2:0", model, spec, weight=PPM // 7, parent="rest", profile="1g.10gb")


_RATE = "_per_second"
_BOARD_SIGNALS = frozenset({
    "power_watts", "enforced_power_limit_watts", "temperature_celsius", "gpu_utilization", "clock_event_reasons",
})  # fmt: skip
"""Signals that no MIG instance has (`docs/sources.md`, MIG)."""


def _reading(device: Device, second: int, missing_signals: tuple[str, ...]) -> Reading:
    """A reading of one second in which the allocated devices are busy and the others idle."""
    busy = device.uuid in {"held", "instance"} or (device.uuid == "free" and second < 3)  # noqa: PLR2004
    ratios = (*(name for name in PROFILING_SIGNALS if not name.endswith(_RATE)), "gpu_utilization")
    rates = (name for name in PROFILING_SIGNALS if name.endswith(_RATE))
    values = dict.fromkeys(ratios, 0.5 if busy else 0.0) | dict.fromkeys(
        (*rates, "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "power_watts",
         "memory_used_bytes", "enforced_power_limit_watts", "energy_joules", "temperature_celsius"), 1.0,
    )  # fmt: skip
    missing = {*missing_signals, *(_BOARD_SIGNALS if device.parent else ())}
    present = {name: value for name, value in values.items() if name not in missing}
    more = {} if "clock_event_reasons" in missing else {"clock_event_reasons": 0}
    # With a process in the driver's list, the device is neither unowned nor without a process.
    processes = (Process(1),) if busy else ()
    span = {"start": (second - 1) * SECOND, "end": second * SECOND}
    return Reading(uuid=device.uuid, sm_clock_hz=1e9, processes=processes, **span, **present, **more)  # type: ignore[arg-type]


def _health(uuid: str, missing_signals: tuple[str, ...]) -> Health:
    values = {
        "recovery_action": 0, "ecc_corrected": 0, "ecc_uncorrected": 0, "row_remap_failed": False, "nvlink_errors": 0,
        "memory_temperature_celsius": 1.0, "temperature_margin_celsius": 1.0,
    }  # fmt: skip
    return Health(uuid, **{name: value for name, value in values.items() if name not in missing_signals})  # type: ignore[arg-type]


def _count_series(ledger: Ledger) -> SeriesCounts:
    found: dict[str, Counter[str]] = {name: Counter() for name in SeriesCounts.__struct_fields__}
    errors = next(metric.max_series for metric in METRICS if metric.name == "gpu_efficiency_errors_total")
    failed = tuple((str(n), 0) for n in range(errors))
    snapshot = take_snapshot(
        ledger, DaemonMetadata(unanswered_seconds=0.0, errors=failed, history=HistoryStatus(works=True))
    )
    for metric in METRICS:
        for labels, _ in metric.read(snapshot):
            if metric.scope == "gpu":
                found[labels[0]][metric.name] += 1
            elif metric.scope == "node" or (metric.scope == "job" and labels[0] == "held"):
                found[metric.scope][metric.name] += 1
    return SeriesCounts(**found)


# -- scraped series --


def scraped_series(fleet: FleetSize, *, calm: bool = False) -> dict[str, float]:
    """Series by metric of the whole fleet: the maximum; or, if `calm`, the number as long as nothing goes wrong.

    Besides the names in METRICS there are `process` (metrics of the daemon's process) and `scrape` (of Prometheus).
    """
    found = {metric.name: _metric_series(metric, fleet, calm=calm) for metric in METRICS}
    found["process"] = float(fleet.nodes * _process_series())
    found["scrape"] = float(fleet.nodes * SERIES_OF_A_SCRAPE)
    return {name: count for name, count in found.items() if count}


def _metric_series(metric: Metric, fleet: FleetSize, *, calm: bool) -> float:
    if metric.scope == "gpu":
        return fleet.nodes * _gpu_series(metric, fleet, calm=calm) + _sharer_series(metric, fleet)
    if metric.scope == "job":
        mixed = metric.name == "gpu_efficiency_job_state_gpus" and not calm
        more = extra_states(fleet, fleet.node_jobs) if mixed else 0.0
        return (fleet.node_jobs + fleet.lingering) * _series_of_one(
            metric, series_counts(fleet.source).job, calm=calm
        ) + more
    by_outcome = {
        "gpu_efficiency_workload_messages_total": len(OUTCOMES) * fleet.listening,
        "gpu_efficiency_otlp_pushes_total": _PUSH_OUTCOMES * fleet.pushing,
    }
    if metric.name in by_outcome:
        return float(fleet.nodes * by_outcome[metric.name])
    if calm and metric.scope == "node":
        return float(fleet.nodes * series_counts(fleet.source).node.get(metric.name, 0))
    # Metrics of a job on one GPU appear late, and only if its GPU is too large for it; most jobs use the tensor cores.
    if calm and metric.scope in {"job on one GPU", "job without tensor work"}:
        return 0.0
    return population(REPORTING_OR_SERVING if metric.name == REPORTED_MFU else metric.scope, fleet) * metric.max_series


def _gpu_series(metric: Metric, fleet: FleetSize, *, calm: bool) -> float:
    """Series of one metric on one node where each GPU is allocated to one job."""
    kinds, free = series_counts(fleet.source), fleet.free / fleet.nodes if calm else 0.0
    whole = fleet.gpus - fleet.mig_boards - free
    each = (
        (whole, kinds.held),
        (free, kinds.free),
        (fleet.mig_boards, kinds.rest),
        (fleet.mig_instances, kinds.instance),
    )
    series = sum(count * _series_of_one(metric, counts, calm=calm) for count, counts in each)
    if calm or metric.name != "gpu_efficiency_unobserved_seconds_total":
        return series
    return fleet.devices * fleet.reasons


def _series_of_one(metric: Metric, counts: Counts, *, calm: bool) -> float:
    """Series in `counts`, and unless `calm` those that METRICS allows but even a GPU of the best source lacks."""
    best = series_counts("dcgm").held if metric.scope == "gpu" else series_counts("dcgm").job
    return counts.get(metric.name, 0) + (0 if calm else max(0, metric.max_series - best.get(metric.name, 0)))


def _sharer_series(metric: Metric, fleet: FleetSize) -> float:
    return float(fleet.shared * (fleet.sharers - 1)) if metric.name == "gpu_efficiency_allocation_info" else 0.0


def population(scope: str, fleet: FleetSize) -> float:
    """Number of entities of that scope on all nodes."""
    return {
        "node": fleet.nodes,
        "model": fleet.nodes * fleet.models_per_node,
        "account": fleet.nodes * min(fleet.node_accounts, Policy().max_accounts + 1),
        "exemption": fleet.nodes * fleet.exemptions,
        "spinning GPU": fleet.spinning,
        "GPU coding video": fleet.coding,
        "GPU with a chip-to-chip link": fleet.chip_links,
        "RDMA port": fleet.nodes * fleet.ports,
        "measured job": fleet.measured * fleet.nodes_per_job,
        "shared GPU": fleet.shared * 2,  # divided by SM time and, where that is unknown, in equal parts
        "job in trouble": fleet.trouble * fleet.nodes_per_job,
        "job on one GPU": max(0.0, fleet.node_jobs if fleet.nodes_per_job == 1 else 0.0),
        "job without tensor work": fleet.node_jobs,
        "labelled job": fleet.node_jobs * fleet.pod_labels,
        "job on several GPUs": fleet.node_jobs if fleet.nodes_per_job * _gpus_per_job(fleet) > 1 else 0.0,
        "reporting job": fleet.reporting * fleet.nodes_per_job,
        REPORTING_OR_SERVING: (fleet.reporting + fleet.serving) * fleet.nodes_per_job,
        "rank": fleet.reporting * fleet.nodes_per_job * _gpus_per_job(fleet),
        "serving job": fleet.serving * fleet.nodes_per_job,
        "communicating job": fleet.communicating * fleet.nodes_per_job,
        "communicating rank": fleet.communicating * fleet.nodes_per_job * _gpus_per_job(fleet),
    }[scope]


def _gpus_per_job(fleet: FleetSize) -> float:
    """GPUs of a job on one of its nodes; each has a process."""
    held = fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    return min(float(fleet.devices), math.ceil(held / fleet.node_jobs)) if fleet.node_jobs else 0.0


def extra_states(fleet: FleetSize, jobs: float) -> float:
    """States beyond the first of each job that its GPUs can be in: a GPU is in one state, so that GPUs limit them."""
    held = fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    return min(len(_HELD_STATES) * jobs, max(jobs, held)) - jobs


_HELD_STATES = frozenset(State) - {State.UNOWNED, State.UNALLOCATED}


@cache
def _process_series() -> int:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return sum(len(family.samples) for family in registry.collect())


class RecordingRule(Struct, frozen=True):
    """A recording rule, as `alerts/build_recorded.py` describes it."""

    record: str
    interval: float
    labels: frozenset[str]
    scope: str
    leaks: int
    label_values: int
    sparse: bool
    rare: bool
    window: float


def _data_rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("exporter") / "data" / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


@cache
def recording_rules() -> tuple[RecordingRule, ...]:
    """All recording rules."""
    return tuple(
        RecordingRule(
            row["record"], float(row["interval"]), frozenset(row["labels"].split()), row["from"], int(row["leaks"]),
            int(row["words"]), row["sparse"] == "1", row["rare"] == "1", float(row["window"]),
        )
        for row in _data_rows("recorded.csv")
    )  # fmt: skip


@cache
def read_by_rules() -> Mapping[str, frozenset[str]]:
    """Metrics of the daemon that some rule reads -> the leaks it selects; empty: all leaks."""
    return {row["metric"]: frozenset(row["leaks"].split()) for row in _data_rows("read_by_rules.csv")}


def recorded_series(fleet: FleetSize, rule: RecordingRule, *, calm: bool = False) -> float:
    """Series of one rule: the maximum; or, if `calm`, without series that exist only in trouble."""
    if (calm and rule.rare) or not _applies(rule.scope, fleet):
        return 0.0
    each = _series_by_leak(rule, fleet) * rule.label_values * (3 if "spread" in rule.labels else 1)
    # States of a job's GPUs; states of a server's requests are counted by `label_values`.
    mixed = not calm and {"job_id", "state"} <= rule.labels and rule.label_values == 1
    return _entities(rule, fleet) * each + (extra_states(fleet, fleet.jobs) if mixed else 0.0)


def _applies(scope: str, fleet: FleetSize) -> bool:
    return scope in {"cluster", "gpu", "job"} or population(scope, fleet) > 0


def _entities(rule: RecordingRule, fleet: FleetSize) -> float:
    """Number of entities (jobs, nodes, jobs on nodes, GPUs or owners) that the labels identify."""
    labels = rule.labels
    if "gpu" in labels:
        return fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    if "job_id" in labels:
        return _jobs(rule, fleet) * (fleet.nodes_per_job if "instance" in labels else 1)
    if labels & {"instance", "node"}:
        return fleet.nodes * (fleet.models_per_node if "model" in labels else 1)
    return _site_entities(labels, fleet)


def _jobs(rule: RecordingRule, fleet: FleetSize) -> float:
    """Running jobs of the rule's scope, and ended ones that its window covered when it was last evaluated."""
    jobs_by_scope = {
        "reporting job": fleet.reporting, "rank": fleet.reporting, "serving job": fleet.serving,
        REPORTING_OR_SERVING: fleet.reporting + fleet.serving, "job in trouble": fleet.trouble,
        "communicating job": fleet.communicating, "communicating rank": fleet.communicating,
    }  # fmt: skip
    running = jobs_by_scope.get(rule.scope, fleet.jobs)
    ended = fleet.churn / 86_400 * (rule.window + rule.interval + Policy().job_linger_seconds)
    return running + ended * running / max(1, fleet.jobs)


def _site_entities(labels: frozenset[str], fleet: FleetSize) -> float:
    each = {
        "model": fleet.models, "exemption": fleet.exemptions, "workload_class": len(_WORKLOAD_CLASSES),
    }  # fmt: skip
    owned, used = bool(labels & {"team", "account", "workload_namespace"}), "user" in labels
    people = (1, fleet.users, fleet.owners, fleet.pairs)[2 * owned + used]
    return math.prod((people, *(count for label, count in each.items() if label in labels)))


_WORKLOAD_CLASSES = ("batch", "interactive", "serving")


def _series_by_leak(rule: RecordingRule, fleet: FleetSize) -> int:
    """Series that the labels leak, layer and held make: each leak has one layer, and a leak without loss no sample."""
    lost = fleet.leaks if fleet.leaks and rule.sparse else len(LEAK_NAMES)
    if "leak" in rule.labels:
        return min(lost, rule.leaks) + (len(UNHELD_LEAKS) if "held" in rule.labels else 0)
    if "layer" in rule.labels:
        return min(lost, len(LAYERS))
    return 2 if "held" in rule.labels else 1


PROFILES: Mapping[str, str] = {
    "full": "everything",
    "rules": "of single GPUs only what rules of alerts/ read",
    "jobs": "nothing of single GPUs",
    "nodes": "nothing of single GPUs and jobs",
}
"""Relabelling profiles, each dropping more than the one before: name -> what is kept."""


def kept_share(metric: str, profile: str) -> float:
    """The share (0 to 1) of a metric's series that a profile keeps."""
    labels = next((each.labels for each in METRICS if each.name == metric and each.scope != "node"), ())
    if profile == "full" or not {"uuid", "job_id"} & set(labels):
        return 1.0  # metrics of a node without a GPU have an empty uuid, and are kept
    if "uuid" not in labels:
        return float(profile != "nodes")
    if profile != "rules":
        return 0.0
    leaks = read_by_rules().get(metric)
    return 0.0 if leaks is None else (len(leaks) / len(LEAK_NAMES) if leaks and "leak" in labels else 1.0)


def relabel_configs(profile: str) -> list[dict[str, object]]:
    """The profile as `metric_relabel_configs`."""
    if profile == "rules":
        return [*_unread_configs()]
    gone = {"jobs": ("uuid",), "nodes": ("uuid", "job_id")}.get(profile, ())
    return [{"source_labels": [label], "regex": ".+", "action": "drop"} for label in gone]


def _unread_configs() -> Iterator[dict[str, object]]:
    of_gpus = [metric for metric in METRICS if "uuid" in metric.labels]
    names = [m.name.removeprefix("gpu_efficiency_") for m in of_gpus if not kept_share(m.name, "rules")]
    yield {"source_labels": ["__name__"], "regex": f"gpu_efficiency_({'|'.join(names)})", "action": "drop"}
    for metric in of_gpus:
        if 0 < kept_share(metric.name, "rules") < 1:
            unread = [name for name in LEAK_NAMES if name not in read_by_rules()[metric.name]]
            regex = f"{metric.name};({'|'.join(unread)})"
            yield {"source_labels": ["__name__", "leak"], "regex": regex, "action": "drop"}


def max_samples(fleet: FleetSize, profile: str = "full") -> float:
    """Most samples of one scrape: on each GPU a job of its own, in trouble, with every reason of unobserved time."""
    jobs = fleet.devices * (fleet.sharers if fleet.shared else 1)
    ended = math.ceil(fleet.lingering / fleet.nodes)
    one = replace(
        fleet, nodes=1, jobs=jobs + ended, nodes_per_job=1.0, churn=0.0, trouble=jobs, spinning=fleet.devices, free=0,
        measured=jobs if fleet.measured else 0, reporting=jobs if fleet.reporting else 0,
        serving=jobs if fleet.serving else 0,
        communicating=jobs if fleet.communicating else 0,
        shared=fleet.devices if fleet.shared else 0, reasons=len(UNOBSERVED_REASONS) + 1,
        node_accounts=Policy().max_accounts + 1,
    )  # fmt: skip
    return sum(count * kept_share(name, profile) for name, count in scraped_series(one).items()) - SERIES_OF_A_SCRAPE
