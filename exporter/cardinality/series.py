"""How many series the daemons of a fleet of some size and kind show.

Owns the arithmetic. What one GPU, one job or one node shows is read from the catalogue: METRICS over the snapshot of a
node in miniature, made by the core from what a source of that kind says, and `at_most` of the same table. Refuses
figures of its own; what rules make of the series is in `recordings`, what a scrape keeps in `profiles`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, ProcessCollector

from exporter.core.catalog import METRICS, Metric, at_most
from exporter.core.ledger import Ledger
from exporter.core.model import PPM, SECOND, Allocation, Device, Health, Observation, Owner, Process, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import Keeping, Meta, take_snapshot
from exporter.reports.outcomes import OUTCOMES
from exporter.specs import find_spec

Counts = Mapping[str, float]
"""Series by metric."""
OF_A_SCRAPE = 5
"""up, scrape_duration_seconds, scrape_samples_scraped, scrape_samples_post_metric_relabeling, scrape_series_added:
Prometheus' own of every target ("Jobs and instances")."""
_PROFILED = ("gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active",
             "fp32_active", "fp16_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second")  # fmt: skip
SPEAKING, TOLD_BY_SERVERS = "speaking job", "gpu_efficiency_job_reported_mfu_ratio"
"""A job that reports or whose engine is found; what both can tell."""
LACKS: Mapping[str, tuple[str, ...]] = {
    "dcgm": (),
    "nvml": (),
    "driver": _PROFILED,
    "dcgm-exporter": (
        "sm_active", "sm_occupancy", "fp64_active", "fp32_active", "fp16_active", "enforced_power_limit_watts",
        "clock_event_reasons", "ecc_corrected", "ecc_uncorrected", "recovery_action", "nvlink_errors",
        "temperature_margin_celsius", "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second",
    ),
}  # fmt: skip
"""What each kind of source does not say of a whole board: of a Reading or a Health. driver: NVML on boards before
Hopper. dcgm-exporter: with its default counters; with more of them it comes close to dcgm."""


class Fleet(Struct, frozen=True, kw_only=True):
    """What there is. Numbers of the whole fleet at one moment, unless they say "a node"."""

    nodes: int = 1
    gpus: int = 8
    """Boards a node."""
    mig_boards: int = 0
    """Of them cut into instances, a node."""
    mig_instances: int = 0
    """On all of these together, a node."""
    jobs: int = 1
    """Running."""
    nodes_per_job: float = 1.0
    reporting: int = 0
    """Jobs that report."""
    serving: int = 0
    """Jobs whose engine is found."""
    trouble: int = 0
    """Jobs with a GPU that spins or lacks a process, an exemption or a limit of their own."""
    spinning: int = 0
    """GPUs."""
    shared: int = 0
    """GPUs that several jobs hold."""
    sharers: int = 2
    """Jobs on each of those."""
    free: int = 0
    """GPUs that nobody holds; counted as if held where the most is asked for."""
    reasons: int = 1
    """For which a GPU was not seen, since the daemon's start."""
    churn: float = 0.0
    """Jobs that end in a day."""
    models: int = 1
    """Of boards."""
    models_per_node: int = 1
    node_accounts: int = 1
    """Triples of team, account and namespace that have held a GPU of a node since its daemon's start."""
    owners: int = 1
    """Such triples in the fleet."""
    users: int = 1
    pairs: int = 1
    """Of an owner and a user."""
    exemptions: int = 0
    leaks: int = 0
    """To which a job or a node loses at once; 0: to all there are."""
    source: str = "dcgm"
    listening: bool = True
    """Jobs can report: reports.socket is not empty."""

    @property
    def devices(self) -> int:
        """Of a node: boards, what instances leave of some, and the instances."""
        return self.gpus + self.mig_instances

    @property
    def node_jobs(self) -> float:
        """Jobs on nodes: one on three nodes is three."""
        return self.jobs * self.nodes_per_job

    @property
    def lingering(self) -> float:
        """Those that have ended and are still told of, as `node_jobs`; never more than a node keeps."""
        ended = self.churn / 86_400 * Policy().job_linger_seconds * self.nodes_per_job
        return min(ended, max(0.0, self.nodes * Policy().max_jobs - self.node_jobs))


# -- what one thing shows --


class Shown(Struct, frozen=True):
    """Series by metric, as the catalogue reads them of a node in miniature where nothing has gone wrong."""

    held: Counts
    """Of a whole GPU."""
    free: Counts
    """Of one that somebody had minutes ago."""
    instance: Counts
    rest: Counts
    """Of a board that is cut into instances."""
    job: Counts
    node: Counts
    """Where no price of energy and no budget is configured."""


@cache
def shown(source: str) -> Shown:
    """What things show where telemetry comes from a source of that kind, a name in LACKS."""
    ledger = Ledger()
    owner = Owner(job_id="job", time_limit_seconds=SECOND)
    devices = tuple(_devices())
    names = ("held", "instance", "free")
    held = tuple(Allocation(uuid=uuid, owner=replace(owner, job_id=uuid), start=0) for uuid in names)
    advance(ledger, Observation(0, 0, devices=devices, allocations=held))
    for second in range(1, 4):
        rows = tuple(_reading(device, second, LACKS[source]) for device in devices)
        health = tuple(_health(name, LACKS[source]) for name in ("held", "free", "rest"))
        now = held if second < 3 else held[:2]  # noqa: PLR2004  the last second
        advance(ledger, Observation(second * SECOND, second * SECOND, readings=rows, health=health, allocations=now))
    return _counted(ledger)


def _devices() -> Iterator[Device]:
    model = "NVIDIA H100 80GB HBM3"
    spec = find_spec(model)
    yield Device("held", "0", model, spec)
    yield Device("free", "1", model, spec)
    yield Device("rest", "2", model, spec, weight=PPM - PPM // 7)
    yield Device("instance", "2:0", model, spec, weight=PPM // 7, parent="rest", profile="1g.10gb")


_OF_A_BOARD = frozenset({
    "power_watts", "enforced_power_limit_watts", "temperature_celsius", "gpu_utilization", "clock_event_reasons",
})  # fmt: skip
"""No instance has these (`docs/sources.md`, MIG)."""


def _reading(device: Device, second: int, lacks: tuple[str, ...]) -> Reading:
    """A second in which all is busy that is held, and nothing else."""
    busy = device.uuid in {"held", "instance"} or (device.uuid == "free" and second < 3)  # noqa: PLR2004
    ratios = (*_PROFILED[:8], "gpu_utilization")
    said = dict.fromkeys(ratios, 0.5 if busy else 0.0) | dict.fromkeys(
        (*_PROFILED[8:], "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second", "power_watts", "memory_used_bytes",
         "enforced_power_limit_watts", "energy_joules", "temperature_celsius"), 1.0,
    )  # fmt: skip
    gone = {*lacks, *(_OF_A_BOARD if device.parent else ())}
    kept = {name: value for name, value in said.items() if name not in gone}
    more = {} if "clock_event_reasons" in gone else {"clock_event_reasons": 0}
    # A process that the driver lists acquits what it is on of being unowned or bare.
    processes = (Process(1),) if busy else ()
    span = {"start": (second - 1) * SECOND, "end": second * SECOND}
    return Reading(uuid=device.uuid, sm_clock_hz=1e9, processes=processes, **span, **kept, **more)  # type: ignore[arg-type]


def _health(uuid: str, lacks: tuple[str, ...]) -> Health:
    said = {
        "recovery_action": 0, "ecc_corrected": 0, "ecc_uncorrected": 0, "row_remap_failed": False, "nvlink_errors": 0,
        "memory_temperature_celsius": 1.0, "temperature_margin_celsius": 1.0,
    }  # fmt: skip
    return Health(uuid, **{name: value for name, value in said.items() if name not in lacks})  # type: ignore[arg-type]


def _counted(ledger: Ledger) -> Shown:
    found: dict[str, Counter[str]] = {name: Counter() for name in Shown.__struct_fields__}
    errors = next(at_most(metric) for metric in METRICS if metric.name == "gpu_efficiency_errors_total")
    failed = tuple((str(n), 0) for n in range(errors))
    snapshot = take_snapshot(ledger, Meta(unanswered_seconds=0.0, errors=failed, keeping=Keeping(works=True)))
    for metric in METRICS:
        for labels, _ in metric.read(snapshot):
            if metric.scope == "gpu":
                found[labels[0]][metric.name] += 1
            elif metric.scope == "node" or (metric.scope == "job" and labels[0] == "held"):
                found[metric.scope][metric.name] += 1
    return Shown(**found)


# -- what is scraped --


def scraped(fleet: Fleet, *, calm: bool = False) -> dict[str, float]:
    """Series by metric of the whole fleet: at most; or, if `calm`, while nothing has ever gone wrong.

    Beside the catalogue's names there are `process` and `scrape`: what the daemon's process and Prometheus add.
    """
    found = {metric.name: _of(metric, fleet, calm=calm) for metric in METRICS}
    found["process"] = float(fleet.nodes * _of_the_process())
    found["scrape"] = float(fleet.nodes * OF_A_SCRAPE)
    return {name: count for name, count in found.items() if count}


def _of(metric: Metric, fleet: Fleet, *, calm: bool) -> float:
    if metric.scope == "gpu":
        return fleet.nodes * _of_gpus(metric, fleet, calm=calm) + _held_by_more(metric, fleet)
    if metric.scope == "job":
        mixed = metric.name == "gpu_efficiency_job_state_gpus" and not calm
        more = further_states(fleet, fleet.node_jobs) if mixed else 0.0
        return (fleet.node_jobs + fleet.lingering) * _each(metric, shown(fleet.source).job, calm=calm) + more
    if metric.name == "gpu_efficiency_workload_messages_total":
        return float(fleet.nodes * len(OUTCOMES) * fleet.listening)
    if calm and metric.scope == "node":
        return float(fleet.nodes * shown(fleet.source).node.get(metric.name, 0))
    # What is known of a job on one GPU is known late, and only if it is too large.
    if calm and metric.scope == "job on one GPU":
        return 0.0
    return population(SPEAKING if metric.name == TOLD_BY_SERVERS else metric.scope, fleet) * at_most(metric)


def _of_gpus(metric: Metric, fleet: Fleet, *, calm: bool) -> float:
    """Of one node, each GPU held by one job."""
    kinds, free = shown(fleet.source), fleet.free / fleet.nodes if calm else 0.0
    whole = fleet.gpus - fleet.mig_boards - free
    each = (
        (whole, kinds.held),
        (free, kinds.free),
        (fleet.mig_boards, kinds.rest),
        (fleet.mig_instances, kinds.instance),
    )
    series = sum(count * _each(metric, shows, calm=calm) for count, shows in each)
    if calm or metric.name != "gpu_efficiency_unobserved_seconds_total":
        return series
    return fleet.devices * fleet.reasons


def _each(metric: Metric, shows: Counts, *, calm: bool) -> float:
    """At most: what it shows, and what may yet occur of which even the best seen GPU shows nothing now."""
    best = shown("dcgm").held if metric.scope == "gpu" else shown("dcgm").job
    return shows.get(metric.name, 0) + (0 if calm else max(0, at_most(metric) - best.get(metric.name, 0)))


def _held_by_more(metric: Metric, fleet: Fleet) -> float:
    return float(fleet.shared * (fleet.sharers - 1)) if metric.name == "gpu_efficiency_allocation_info" else 0.0


def population(scope: str, fleet: Fleet) -> float:
    """Things of that scope, on all nodes."""
    return {
        "node": fleet.nodes,
        "model": fleet.nodes * fleet.models_per_node,
        "account": fleet.nodes * min(fleet.node_accounts, Policy().max_accounts + 1),
        "exemption": fleet.nodes * fleet.exemptions,
        "spinning GPU": fleet.spinning,
        "shared GPU": fleet.shared * 2,  # by SM time and, where that was not seen, by equal parts
        "job in trouble": fleet.trouble * fleet.nodes_per_job,
        "job on one GPU": max(0.0, fleet.node_jobs if fleet.nodes_per_job == 1 else 0.0),
        "reporting job": fleet.reporting * fleet.nodes_per_job,
        SPEAKING: (fleet.reporting + fleet.serving) * fleet.nodes_per_job,
        "rank": fleet.reporting * fleet.nodes_per_job * _gpus_of_a_job(fleet),
        "serving job": fleet.serving * fleet.nodes_per_job,
    }[scope]


def _gpus_of_a_job(fleet: Fleet) -> float:
    """On one of its nodes; a process each."""
    held = fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    return min(float(fleet.devices), math.ceil(held / fleet.node_jobs)) if fleet.node_jobs else 0.0


def further_states(fleet: Fleet, jobs: float) -> float:
    """In which so many jobs' GPUs can be beside one of each job's: a GPU is in one, and a job cannot be in all."""
    held = fleet.nodes * fleet.devices + fleet.shared * (fleet.sharers - 1)
    return min(len(_HELD) * jobs, max(jobs, held)) - jobs


_HELD = frozenset(State) - {State.UNOWNED, State.UNALLOCATED}


@cache
def _of_the_process() -> int:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return sum(len(family.samples) for family in registry.collect())
