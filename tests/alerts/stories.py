"""Simulated nodes of one job or several, through the real core: what every scrape of every node gets.

Owns the stories that only alerts need, and what befalls a node: its scrapes fail, its daemon restarts. Refuses to know
any rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.metrics import Metric
from exporter.core.model import SECOND, Observation
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate import kernels, programs
from exporter.simulate.plan import Leftover, Plan, Scenario, Setting, SimulatedJob, batch_owner, whole_node
from exporter.simulate.programs import bring_up, training
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.workload import IDLE_CYCLE, Program, Stage, Stages
from tests.hidden import without
from tests.lookalikes import LOOKALIKES

BOARD = "H100-SXM5-80GB"
Span = tuple[int, int]
"""Seconds of the story: [start, end)."""


# -- stories that only matter to alerts --


def _across(setting: Setting, program: Program) -> Plan:
    """One job on this node and another."""
    owner = replace(batch_owner(setting, 0, "pretrain-large"), job_id="40500")
    return Plan(jobs=(SimulatedJob(owner=owner, slots=setting.slots, stages=program, gpus=2 * setting.gpus),))


def _healthy_across(setting: Setting) -> Plan:
    return _across(setting, training(setting.board, setting.gpus))


def _missing_across(setting: Setting) -> Plan:
    absent = IDLE_CYCLE if setting.node else None
    program = programs.hanging(
        setting.board, setting.gpus, name="one rank never comes", waits=kernels.polling(), absent=absent
    )
    return _across(setting, program)


def _uneven(setting: Setting) -> Plan:
    """Rank 0 has twice the work of the others, half a minute of it at a time."""
    step = kernels.training_step(setting.board, alone=True)
    parts = (step, *[kernels.polling()] * (setting.gpus - 1))

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, setting.board)
        while True:
            yield Stage("all compute", 30_000, (step,), memory=0.85)
            yield Stage("rank 0 computes on", 30_000, parts, memory=0.85)

    return Plan(jobs=(whole_node(setting, "pretrain", stages),))


def _profiled_first(setting: Setting) -> Plan:
    """A profiler on the first node of several."""
    plan = LOOKALIKES["profiler_attached"].plan(setting)
    return replace(plan, profiler_ms=()) if setting.node else plan


def _row(plan: Callable[[Setting], Plan], seconds: int) -> Scenario:
    return Scenario(plan, seconds, "")


TABLE: Mapping[str, Scenario] = {
    **SCENARIOS,
    **LOOKALIKES,
    "healthy_across": _row(_healthy_across, 1800),
    "missing_across": _row(_missing_across, 1320),
    "uneven": _row(_uneven, 1800),
    "profiled_first": _row(_profiled_first, 1500),
}


class Story(Struct, frozen=True, kw_only=True):
    """Which nodes are played, and what befalls their scrapes."""

    name: str
    gpus: int = 2
    others: int = 0
    """GPUs of each node but the first; 0: as many as there."""
    nodes: int = 1
    seconds: int = 0
    """How much of it is played; 0: all."""
    period: int = 10
    """Seconds between two readings."""
    every: int = 30
    """Seconds between two scrapes, and between two evaluations."""
    missing: tuple[str, ...] = ()
    """Fields the boards do not give."""
    leaves: Leftover = "nothing"
    """What a profiler leaves for others."""
    unanswered: Span = (0, 0)
    """When scrapes of the first node fail."""
    away: Span = (0, 0)
    """When the first node's daemon is gone; it comes back with a new ledger."""
    down: Span = (0, 0)
    """When Prometheus is gone."""

    @property
    def length(self) -> int:
        """Seconds that are played: whole scrapes."""
        whole = self.seconds or TABLE[self.name].duration_seconds
        return whole // self.every * self.every


# -- nodes --


def simulation(story: Story, node: int) -> Simulation:
    """One node, whose wall clock and monotonic clock both begin at 0."""
    made = simulate(
        story.name, board=BOARD, period_seconds=story.period, duration_seconds=story.length, preroll_seconds=0,
        gpus=(node and story.others) or story.gpus, node=node, stories=TABLE, start=0, wall=0,
    )  # fmt: skip
    return replace(made, plan=replace(made.plan, profiler_leaves=story.leaves))


def began(story: Story, phase: str) -> int:
    """The second in which a phase of the story begins: on the first node that has it."""
    entries = (entry for node in range(story.nodes) for entry in simulation(story, node).truth)
    return next(entry.at // SECOND for entry in entries if entry.phase == phase)


def within(moment: int, span: Span) -> bool:
    return span[0] <= moment < span[1]


def pages(story: Story, node: int, metrics: Sequence[Metric]) -> Iterator[bytes | None]:
    """What each scrape of a node gets; None: no answer."""
    ledger, meta = Ledger(), _meta(node, "1.0")
    for seen in without(simulation(story, node).observations, signals=story.missing):
        now = seen.at // SECOND
        away = node == 0 and within(now, story.away)
        if node == 0 and now == story.away[1] > 0:
            ledger, meta = restarted(ledger, seen), _meta(node, "1.1")
        elif not away:
            advance(ledger, seen)
        if now % story.every == 0:
            refused = away or (node == 0 and within(now, story.unanswered))
            yield None if refused else render(take_snapshot(ledger, meta), metrics=metrics)


def _meta(node: int, version: str) -> DaemonMetadata:
    price = Price(2.0, currency="USD")
    return DaemonMetadata(version=version, source="simulation", terms=Terms(node=f"node-{node}", prices=(price,)))


def restarted(ledger: Ledger, seen: Observation) -> Ledger:
    """Give a daemon that comes back knowing nothing but the inventory and the owners, as it is told them again."""
    fresh = Ledger()
    devices = tuple(gpu.device for gpu in ledger.gpus.values())
    held = tuple(each for owners in ledger.allocations.values() for each in owners)
    advance(fresh, replace(seen, readings=(), devices=devices, allocations=held))
    return fresh
