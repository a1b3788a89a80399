"""A fleet of 10,000 simulated GPUs as Prometheus would have scraped it for an hour: nodes, jobs and who they belong to.

Owns who is where. What a node says are the daemon's own pages of a simulated story, one a minute; nodes of a kind are
copies of one story under other names, and a job on many nodes is one story on each, with ranks that go on. Refuses the
past (`past`) and to send anything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct

from benchmarks.fleet.site import cluster, host
from exporter.core.exposition import render
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.plan import Scenario
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from tests.dashboards.remote_write import Points
from tests.e2e.running import Labels

SCRAPE_SECONDS = 60
CLUSTER = "c1"
BIGGEST = "500000"
"""The job on most GPUs."""
_SETTLED = 3600
"""Seconds of a story before the first page."""
_OWNERS, _USERS = 50, 4
"""Teams, each with an account and a namespace; users of each."""
_JOBS = 16
"""Numbers that a story has for its jobs."""
_HEAD = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?")
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RANKED = re.compile(r"\d+")
_OWNER = {"team": "team", "account": "account", "workload_namespace": "space"}
Pairs = Mapping[str, str]
Template = Sequence[tuple[Pairs, Points]]
"""What a target said, by its labels."""


class Kind(Struct, frozen=True):
    """Nodes that tell the same story."""

    story: str
    nodes: int
    """Whose jobs are on one node each."""
    spans: tuple[int, ...] = ()
    """Beside those: for each job on several nodes, on how many."""
    board: str = "H100-SXM5-80GB"


_A100 = "A100-SXM4-80GB"
KINDS = (
    Kind("checkpoint_twin", 90, (64, 16, 16, 16, 16)),
    Kind("checkpoint", 80, (8,) * 10),
    Kind("failure_recovery", 55, (4,) * 20 + (2,) * 20),
    Kind("healthy_training", 120, (2,) * 20),
    Kind("checkpoint", 100, board=_A100),
    Kind("idle_allocation_twin", 67),
    Kind("kv_cache_wait", 8),
    Kind("kv_cache_pressure", 7),
    Kind("batching", 8),
    Kind("prefill_decode_interference", 6),
    Kind("rejected_speculation", 4),
    Kind("large_gemm", 40),
    Kind("oversized_allocation", 50),
    Kind("memory_bound_decode", 20),
    Kind("input_starved_training", 60),
    Kind("throttled", 20),
    Kind("straggler", 10),
    Kind("demo", 20),
    Kind("idle_allocation", 15),
    Kind("zombie_notebook", 4),
    Kind("idle_context", 2),
    Kind("deadlock", 3),
    Kind("spin_kernel", 1),
    Kind("nic_hang", 1),
    Kind("leaked_process", 2),
    Kind("lost_gpu", 3),
    Kind("carpenter", 86),
)
"""1,250 nodes of eight GPUs."""


class Size(Struct, frozen=True):
    """How much of everything."""

    share: float = 1.0
    """Of the nodes of each kind; one at least."""
    minutes: int = 60
    """Of raw series."""
    days: float = 8
    """Of recorded ones: a week, and the day a week ago that panels compare with."""


QUICK = Size(share=0.004, minutes=15, days=0.5)


class Node(Struct, frozen=True):
    """One of the fleet: which story it tells, and whose."""

    number: int
    kind: int
    job: int
    """Number of its job, or of the first of its jobs."""
    place: int
    """Which of the nodes of that job it is."""


def nodes(size: Size) -> Iterator[Node]:
    """All of them; a job's are one after the other, the biggest job's first."""
    number, job = 0, int(BIGGEST)
    for kind, row in enumerate(KINDS):
        spans = row.spans if size.share == 1 else row.spans[-1:]
        for span in (*spans, *(1,) * max(1, round(row.nodes * size.share))):
            for place in range(span):
                yield Node(number, kind, job, place)
                number += 1
            job += _JOBS


def raw(size: Size, end: int, *, since: int, until: int) -> Iterator[dict[Labels, Points]]:
    """What was scraped from `since` to `until`, within the last `minutes` before `end`; a target after the other."""
    templates = [_cut(_template(kind, size.minutes, end), since, until) for kind in KINDS]
    count = 0
    for node in nodes(size):
        yield copied(templates[node.kind], node)
        count += 1
    scheduler = {"cluster": CLUSTER, "instance": "scheduler:19401", "job": "gpu-efficiency-cluster"}
    page = cluster(count).decode()
    scrapes = [(at, page) for at in range(since, until + 1) if (end - at) % SCRAPE_SECONDS == 0]
    yield {frozenset({**pairs, **scheduler}.items()): points for pairs, points in _read(scrapes)}


def _cut(template: Template, since: int, until: int) -> Template:
    """Its samples of that time; copies share them."""
    cut = ((pairs, [each for each in points if since <= each[0] <= until]) for pairs, points in template)
    return [(pairs, points) for pairs, points in cut if points]


# -- a story --


@cache
def _template(kind: Kind, minutes: int, end: int) -> Template:
    """What a node of this kind said at each scrape."""
    return _read([(at, page.decode()) for at, page in _pages(kind, minutes, end)])


def _pages(kind: Kind, minutes: int, end: int) -> Iterator[tuple[int, bytes]]:
    stories: Mapping[str, Scenario] = {**LEAK_SCENARIOS, **SCENARIOS}
    length = _SETTLED + SCRAPE_SECONDS * minutes
    simulation = simulate(
        kind.story, stories=stories, board=kind.board, period_seconds=SCRAPE_SECONDS, preroll_seconds=0,
        wall=(end - length) * SECOND, duration_seconds=length + SCRAPE_SECONDS,
    )  # fmt: skip
    ledger = Ledger()
    for observation in simulation.observations:
        advance(ledger, observation)
        at = end - length + observation.at // SECOND
        if _SETTLED <= observation.at // SECOND <= length:
            yield at, render(take_snapshot(ledger, DaemonMetadata(host="node", simulated=True)))


def _read(scrapes: Sequence[tuple[int, str]]) -> Template:
    """Series of some pages of one target, and what Prometheus itself adds."""
    found: dict[str, Points] = {}
    for at, page in scrapes:
        lines = [line for line in page.splitlines() if line and line[0] != "#"]
        for line in (*lines, *_added(at, len(lines))):
            head, _, value = line.rpartition(" ")
            found.setdefault(head, []).append((at, float(value)))
    return [(_labels(head), points) for head, points in found.items()]


def _added(at: int, lines: int) -> Iterator[str]:
    yield "up 1"
    yield f"scrape_samples_scraped {lines}"
    yield f"scrape_duration_seconds {0.01 + at % 7 / 1000}"
    yield f"process_cpu_seconds_total {at % 86_400 / 250}"
    yield f"process_resident_memory_bytes {52_000_000 + at % 60}"


def _labels(head: str) -> Pairs:
    found = _HEAD.fullmatch(head)
    if found is None:
        raise ValueError(f"{head!r} is no series")
    return {"__name__": found[1], **dict(_PAIR.findall(found[2] or ""))}


# -- a copy of it --


def copied(template: Template, node: Node) -> dict[Labels, Points]:
    """The story under the names of one node."""
    jobs = {
        name: place
        for place, name in enumerate(sorted({pairs["job_id"] for pairs, _ in template if "job_id" in pairs}))
    }
    owners = {
        name: place for place, name in enumerate(sorted({_owner(pairs) for pairs, _ in template if "account" in pairs}))
    }
    target = {"cluster": CLUSTER, "instance": f"{host(node.number)}:19400", "job": "gpu-efficiency"}
    return {
        frozenset((_renamed(pairs, node, jobs, owners=owners) | target).items()): points for pairs, points in template
    }


def _owner(pairs: Pairs) -> tuple[str, ...]:
    return tuple(pairs.get(label, "") for label in _OWNER)


def _renamed(
    pairs: Pairs, node: Node, jobs: Mapping[str, int], *, owners: Mapping[tuple[str, ...], int]
) -> dict[str, str]:
    new = {label: value for label, value in pairs.items() if value}
    if "uuid" in new:
        new["uuid"] = f"GPU-{node.number:05d}-{new['uuid'].removeprefix('GPU-')}"
    if "node" in new:
        new["node"] = host(node.number)
    if "rank" in new:
        new["rank"] = _RANKED.sub(lambda rank: str(int(rank[0]) + 8 * node.place), new["rank"])
    if "job_id" in new:
        new["job_id"] = str(node.job + jobs[pairs["job_id"]])
    if "account" in pairs:
        owner = (node.job // _JOBS + owners[_owner(pairs)]) % _OWNERS
        new |= {label: f"{word}-{owner:02d}" for label, word in _OWNER.items()}
        if "user" in new:
            new["user"] = f"user-{owner:02d}-{int(new['job_id']) % _USERS}"
    return new
