"""Fleets that never were, for sums of which the documents give the answer: nodes simulated, run through the real core.

A node is played once, and stands under as many names as the fleet has nodes: they are alike, and only their number
counts. What a GPU does is told by its counters; nobody tells the core how much of it was useful. Refuses to know what
comes out.
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
        "job_info", "job_paid_seconds_total", "job_seconds_total", "job_start_timestamp_seconds", "node_gpus",
        "node_seconds_total", "paid_seconds_total", "price_per_gpu_hour",
        "ticks_total",
    )
})  # fmt: skip
"""Series that sums are made of; a page has ten times as many."""


class Fleet(Struct, frozen=True, kw_only=True):
    """So many nodes of one kind. Seconds."""

    story: Scenario
    nodes: int
    gpus: int
    """Of a node."""
    price: float
    length: int
    period: int = 60
    """Between two readings."""
    scrape: int = 600
    spread: bool = False
    """Its nodes have one job together; else each has jobs of its own."""


def taught(tensor: float, *, free_ms: int, works_ms: int, rests_ms: int) -> Scenario:
    """First nobody has the node; then, by turns, its one job holds the tensor cores so far, and has no input."""

    def stages(setting: Setting) -> Stages:
        part = products(setting.board, 1000, tensor=tensor, dram=0.3, sm=0.9)
        while True:
            yield _steps(part, works_ms, setting)
            yield phase_stage("no input", rests_ms, idle_part(1000.0, "data"))

    def plan(setting: Setting) -> Plan:
        owner = batch_owner(setting, 1, "carpenter")
        job = SimulatedJob(owner=owner, slots=setting.slots, stages=lambda _: stages(setting), start_ms=free_ms)
        return Plan(jobs=(job,), noise=0.0)

    return Scenario(plan, 1800, "")


def _steps(part: PhaseSegment, ms: int, setting: Setting) -> Stage:
    """Without a word of what they are good for."""
    return Stage("steps", ms, (Cycle(part.segment),), memory=0.85, climates=(at_reference(setting.board),))


def trained(tensor: float, *, tells: bool) -> Scenario:
    """One job on the whole node that trains without a pause, and may tell its FLOPs."""

    def stages(setting: Setting) -> Stages:
        part = products(setting.board, 1000, tensor=tensor, dram=0.3, sm=0.9)
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
    """A job has a quarter of the node all the time, another the rest for a fifth of it, from the second hour on."""

    def plan(setting: Setting) -> Plan:
        def stages(_: object) -> Stages:
            yield _steps(products(setting.board, 1000, tensor=0.5, dram=0.3, sm=0.9), FOREVER_MS, setting)

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
    """One of its nodes: seconds since the beginning, and what its daemon knows then, at every scrape and the end."""
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
    """What a Prometheus has of the fleet."""
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
