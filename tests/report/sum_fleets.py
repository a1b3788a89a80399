"""Simulated fleets for the sums in the documentation: nodes run through the real core.

A node is simulated once and appears under as many names as the fleet has nodes. The core sees only counters of GPUs,
not how much of their time was useful.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.simulate.plan import Plan, Scenario, Setting, SimulatedJob, batch_owner
from exporter.simulate.programs import at_reference
from exporter.simulate.simulation import simulate
from exporter.simulate.stages import PhaseSegment, idle_part, phase_stage, products, steps
from exporter.simulate.workload import FOREVER_MS, Cycle, ReportingOptions, Stage, Stages
from tests.dashboards.past import Series, named
from tests.e2e.running import Page

BEGIN = 1_767_225_600
"""2026-01-01 00:00 UTC: a Thursday, where simulations begin."""
HOUR = 3600
HOUR_MS = 3_600_000
ASKED_FOR = frozenset({
    f"gpu_efficiency_{name}"
    for name in (
        "job_energy_joules_total", "job_info", "job_paid_seconds_total", "job_seconds_total",
        "job_start_timestamp_seconds", "node_energy_joules_total", "node_gpus", "node_seconds_total",
        "paid_seconds_total", "price_per_gpu_hour", "ticks_total",
    )
})  # fmt: skip
"""Series that sums read; a scrape has ten times as many."""


class Fleet(Struct, frozen=True, kw_only=True):
    """A number of identical nodes. Times in seconds."""

    story: Scenario
    nodes: int
    gpus: int
    """GPUs of a node."""
    price: float
    length: int
    period: int = 60
    """Seconds between two readings."""
    scrape: int = 600
    spread: bool = False
    """Whether one job runs on all nodes; else each node has its own jobs."""


def taught(tensor: float, *, free_ms: int, works_ms: int, rests_ms: int) -> Scenario:
    """Yield a node that is unallocated first; then its job alternates between computing and waiting for input."""

    def stages(setting: Setting) -> Stages:
        part = products(setting.board, 1000, tensor=tensor, dram=0.3, sm=0.96)
        while True:
            yield _steps(part, works_ms, setting)
            yield phase_stage("no input", rests_ms, idle_part(1000.0, "data"))

    def plan(setting: Setting) -> Plan:
        owner = batch_owner(setting, 1, "carpenter")
        job = SimulatedJob(owner=owner, slots=setting.slots, stages=lambda _: stages(setting), start_ms=free_ms)
        return Plan(jobs=(job,), noise=0.0)

    return Scenario(plan, 1800, "")


def _steps(part: PhaseSegment, ms: int, setting: Setting) -> Stage:
    """Return kernels without training reports."""
    return Stage("steps", ms, (Cycle(part.segment),), memory=0.85, climates=(at_reference(setting.board),))


def trained(tensor: float, *, tells: bool) -> Scenario:
    """Yield one job on the whole node that trains continuously and may report FLOPs."""

    def stages(setting: Setting) -> Stages:
        part = products(setting.board, 1000, tensor=tensor, dram=0.3, sm=0.96)
        yield steps(setting.board, FOREVER_MS // 1000, part, counted=True)

    def plan(setting: Setting) -> Plan:
        job = SimulatedJob(
            owner=replace(batch_owner(setting, 1, "pretrain", user="grace"), nodes=0), slots=setting.slots,
            stages=lambda _: stages(setting),
            reporting=ReportingOptions(run="pretrain", every_ms=60_000) if tells else None,
        )  # fmt: skip
        return Plan(jobs=(job,), noise=0.0)

    return Scenario(plan, 1800, "")


def tidal(hours: int) -> Scenario:
    """Yield a job on a quarter of the node, and from the second hour on another on the rest for a fifth of the time."""

    def plan(setting: Setting) -> Plan:
        def stages(_: object) -> Stages:
            yield _steps(products(setting.board, 1000, tensor=0.5, dram=0.3, sm=0.96), FOREVER_MS, setting)

        quarter = setting.gpus // 4
        serve = SimulatedJob(
            owner=batch_owner(setting, 0, "serve", user="eve"), slots=setting.slots[:quarter], stages=stages
        )
        burst = SimulatedJob(
            owner=batch_owner(setting, 1, "burst"), slots=setting.slots[quarter:], stages=stages, start_ms=HOUR_MS,
            hold_ms=hours * HOUR_MS // 5,
        )  # fmt: skip
        return Plan(jobs=(serve, burst), noise=0.0)

    return Scenario(plan, 1800, "")


def played(fleet: Fleet) -> Iterator[tuple[int, Snapshot]]:
    """Yield (seconds since the start, snapshot) of one node at every scrape and at the end."""
    terms = Terms(node="gpu-node-00", prices=(Price(fleet.price),))
    meta, ledger = DaemonMetadata(version="1", source="simulation", simulated=True, terms=terms), Ledger()
    simulation = simulate(
        "story", gpus=fleet.gpus, period_seconds=fleet.period, duration_seconds=fleet.length,
        stories={"story": fleet.story}, wall=BEGIN * 1_000_000_000,
    )  # fmt: skip
    for observation in simulation.observations:
        advance(ledger, observation)
        since = round(ledger.wall / 1e9) - BEGIN
        if since % fleet.scrape == 0 or since == fleet.length:
            yield since, take_snapshot(ledger, meta)


def pages(fleet: Fleet, cluster: str) -> Series:
    """Return what Prometheus would store of the fleet."""
    found: Series = {}
    for since, snapshot in played(fleet):
        for (name, labels), value in Page(render(snapshot).decode()).samples.items():
            if name not in ASKED_FOR:
                continue
            own = dict(labels)
            for node in range(fleet.nodes):
                where = {"cluster": cluster, "instance": f"n{node:02}:19400", "job": "gpu"}
                mine = own if fleet.spread or "job_id" not in own else own | {"job_id": f"{own['job_id']}-{node}"}
                found.setdefault(named(name, **mine, **where), []).append((BEGIN + since, float(value)))
    return found
