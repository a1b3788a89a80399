"""Nodes that tell a story: their pages into a Prometheus, and beside them what their ledgers say.

Owns the playing: simulation, ledger and page by the exporter's own code, a page a minute, the last one at the world's
end; and the truth a test compares a panel with, which is read from the books without any query. Refuses to choose the
stories. What the simulation does not say of a job is added: who pays for it, and how long it may run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

import httpx
from msgspec import Struct
from msgspec.structs import replace

from exporter import __version__
from exporter.core.exposition import render
from exporter.core.leaks import LAYER_OF, LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Fault, Observation, Owner
from exporter.core.pipeline import advance
from exporter.core.prices import CarbonIntensity, EnergyTerms, Price, Terms
from exporter.core.snapshot import DaemonMetadata, Snapshot, sum_by_leak, take_snapshot
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import Simulation, simulate
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from tests.alerts.stories import restarted
from tests.dashboards.hang import HANG_SCENARIOS
from tests.dashboards.past import Past, Series, Target

EVERY = 60
"""Seconds between two pages."""
AWAY = 240
"""Seconds for which a daemon that restarts does not answer."""
DAY = 86_400.0
STORIES = {**SCENARIOS, **LEAK_SCENARIOS, **WATERFALL_SCENARIOS, **HANG_SCENARIOS}
PRICE = 2.5
"""USD, of a GPU-hour."""
PER_KWH = 0.12
"""USD."""
_TERMS = Terms(
    pool="reserved", prices=(Price(PRICE),), energy=EnergyTerms(PER_KWH, "USD"), carbon=CarbonIntensity(380.0),
    idle_budget=25.0, idle_budget_currency="USD",
)  # fmt: skip
_NOTHING = (0,) * len(LEAK_NAMES)
_PAYERS = {
    "pretrain": ("language", "foundation"),
    "pretrain-large": ("language", "foundation"),
    "chat": ("", "assistants"),
    "vision": ("vision", "perception"),
    "jupyter": ("vision", "perception"),
}
"""Account and team by a job's name; the rest is the account's that the simulation says, and of team science."""


class Story(Struct, frozen=True, kw_only=True):
    """One node, and what it tells."""

    cluster: str
    scenario: str
    node: int = 0
    gpus: int = 8
    period: float = 5.0
    """Seconds between readings."""
    seconds: float | None = None
    """How long it is before the end, a pre-roll included; None: as the scenario has it."""
    priced: bool = True
    blind: bool = False
    """No reading reaches its daemon."""
    silent: int = 0
    """Seconds for which its daemon has not been heard at the end."""
    restarts: int = 0
    """Seconds before the end at which its daemon, after AWAY, is back with books that begin anew; 0: it never goes."""


class Moment(Struct, frozen=True):
    """A node's books when a page was read. Nanoseconds by leak, in the order of NAMES."""

    at: float
    parts: tuple[int, ...]
    jobs: Mapping[str, tuple[int, ...]]
    joules: tuple[float, ...]
    states: Mapping[str, tuple[str, str]]
    """State and reason by the GPU's index."""


_NOTHING_YET = Moment(0.0, _NOTHING, {}, (0.0,) * len(LEAK_NAMES), {})


class Node(Struct, frozen=True):
    """A node as it was played: every page's books, and all that was known at the last."""

    story: Story
    host: str
    moments: tuple[Moment, ...]
    last: Snapshot


class Played(Struct, frozen=True):
    """A cluster as it was played."""

    cluster: str
    end: float
    nodes: tuple[Node, ...]

    def leaks(self, minutes: float | None = None, *, before: float = 0.0, job: str = "") -> dict[str, float]:
        """GPU-seconds by leak, of the last minutes (None: of all) up to `before` minutes before the end."""
        until = self.end - before * 60
        since = -1.0 if minutes is None else until - minutes * 60
        rows = [_books(node, until, job) for node in self.nodes]
        earlier = [_books(node, since, job) for node in self.nodes]
        spent = (a - b for a, b in zip(sum_by_leak(rows), sum_by_leak(earlier), strict=True))
        return {name: part / SECOND for name, part in zip(LEAK_NAMES, spent, strict=True)}

    def layers(self, minutes: float | None = None, *, before: float = 0.0, job: str = "") -> dict[str, float]:
        """The same by layer."""
        found: Counter[str] = Counter()
        for layer, spent in zip(LAYER_OF, self.leaks(minutes, before=before, job=job).values(), strict=True):
            found[layer] += spent  # type: ignore[assignment]
        return dict(found)

    def joules(self, minutes: float | None = None) -> dict[str, float]:
        """Energy by leak, of the last minutes (None: of all)."""
        since = -1.0 if minutes is None else self.end - minutes * 60
        pairs = [(_at(node, self.end), _at(node, since)) for node in self.nodes]
        return {name: sum(a.joules[i] - b.joules[i] for a, b in pairs) for i, name in enumerate(LEAK_NAMES)}

    def states(self) -> dict[str, int]:
        """GPUs by state, at the end."""
        return dict(Counter(state for node in self.nodes for state, _ in node.moments[-1].states.values()))


def _at(node: Node, moment: float, job: str = "") -> Moment:
    """The books at a moment: of the last page before, that has the job; before the first, nothing."""
    there = (each for each in reversed(node.moments) if each.at <= moment and (not job or job in each.jobs))
    return next(there, _NOTHING_YET)


def _books(node: Node, moment: float, job: str) -> tuple[int, ...]:
    found = _at(node, moment, job)
    return found.jobs.get(job, _NOTHING) if job else found.parts


def play(story: Story, *, end: float, url: str) -> Node:
    """Tell a story into the Prometheus at `url`, so that it ends at `end`."""
    node, series = played(story, end=end)
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        Past(url, client).write(series)
    return node


def played(story: Story, *, end: float) -> tuple[Node, Series]:
    """Tell a story that ends at `end`: what its ledgers say, and what Prometheus would store of it."""
    simulation = _simulation(story, end)
    target = Target(cluster=story.cluster, instance=f"{simulation.host}:19400", job="gpu-efficiency")
    moments, last = list[Moment](), None
    for at, page in _pages(simulation, story, end=end):
        if page is None:
            target.failed(at)
            continue
        target.scraped(at, render(page.snapshot).decode() + _process(at, page.began))
        moments.append(_moment(at, page))
        last = page.snapshot
    assert last is not None, f"{story.scenario} has no page"
    return Node(story, simulation.host, tuple(moments), last), target.series


def _simulation(story: Story, end: float) -> Simulation:
    row = STORIES[story.scenario]
    seconds = row.duration_seconds + row.preroll_seconds if story.seconds is None else story.seconds
    return simulate(
        story.scenario, stories=STORIES, seed=crc32(story.cluster.encode()) % 1000, node=story.node, gpus=story.gpus,
        period_seconds=story.period, duration_seconds=seconds - row.preroll_seconds,
        wall=round((end - seconds) * SECOND),
    )  # fmt: skip


class _Page(NamedTuple):
    """What a daemon has at a moment."""

    ledger: Ledger
    snapshot: Snapshot
    began: float
    """Unix seconds of its start."""
    before: Moment
    """All that an earlier daemon of the node had booked."""


def _pages(simulation: Simulation, story: Story, *, end: float) -> Iterator[tuple[float, _Page | None]]:
    """What a scrape gets each minute, counted from the end; the first before anything has been read."""
    ledger, began, before, page = Ledger(), simulation.wall / SECOND, _NOTHING_YET, None
    owners: dict[Owner, Owner] = {}
    due, ticks, back = 0.0, 0, end - story.restarts if story.restarts else 0.0
    for observation in simulation.observations:
        seen, at = _owned(observation, owners), observation.wall / SECOND
        away = back - AWAY <= at < back
        if back <= at and began < back:
            assert page is not None
            ledger, began, before, ticks = restarted(ledger, seen), at, _moment(at, page), 0
        elif not away:
            advance(ledger, _blinded(seen) if story.blind else seen)
        ticks += 1
        if at >= due:
            silent = away or at > end - story.silent
            snapshot = take_snapshot(ledger, _meta(simulation, story, ticks, began=began))
            page = page if away else _Page(ledger, snapshot, began, before)
            yield at, None if silent else page
            due = end - (end - at - 1) // EVERY * EVERY


def _owned(observation: Observation, owners: dict[Owner, Owner]) -> Observation:
    if observation.allocations is None:
        return observation
    return replace(observation, allocations=tuple(_paid_for(held, owners) for held in observation.allocations))


def _paid_for(held: Allocation, owners: dict[Owner, Owner]) -> Allocation:
    owner = held.owner
    if owner not in owners:
        account, team = _PAYERS.get(owner.name, (owner.account, "science"))
        limit = DAY if owner.scheduler == "slurm" else None
        owners[owner] = replace(owner, account=account, team=team, time_limit_seconds=limit)
    return replace(held, owner=owners[owner])


def _blinded(observation: Observation) -> Observation:
    fault = Fault("source_failed", "the telemetry source does not answer")
    return replace(observation, readings=(), faults=(fault,), health=())


def _meta(simulation: Simulation, story: Story, ticks: int, *, began: float) -> DaemonMetadata:
    terms = replace(_TERMS if story.priced else Terms(), node=simulation.host)
    return DaemonMetadata(
        version=__version__, source="simulation", scheduler="slurm", simulated=True, host=simulation.host, terms=terms,
        started=began, interval=story.period, ticks=ticks, read_seconds=0.002 * ticks,
        core_seconds=0.0005 * ticks,
    )  # fmt: skip


def _process(at: float, began: float) -> str:
    """What the daemon's own process says beside."""
    return (
        f"process_start_time_seconds {began}\nprocess_cpu_seconds_total {(at - began) / 100}\n"
        "process_resident_memory_bytes 47185920\n"
    )


def _moment(at: float, page: _Page) -> Moment:
    ledger, before = page.ledger, page.before
    books = [gpu.book for gpu in ledger.gpus.values()]
    jobs = {name: tuple(job.book.parts) for name, job in ledger.jobs.items()}
    joules = (millijoules / 1000 for millijoules in sum_by_leak(book.energy for book in books))
    return Moment(
        at,
        _added(before.parts, sum_by_leak(book.parts for book in books)),
        {**before.jobs, **{name: _added(before.jobs.get(name, _NOTHING), parts) for name, parts in jobs.items()}},
        tuple(a + b for a, b in zip(before.joules, joules, strict=True)),
        {gpu.device.index: (gpu.state.value, gpu.reason) for gpu in page.snapshot.gpus},
    )


def _added(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(before, now, strict=True))
