"""The simulated world that boards are opened on: a fleet, and every scenario in a cluster of its own.

Owns the choice of stories and their sizes, and the order in which everything is written: history, pages, the
scheduler's page, then the rules. All ends at one moment. Cluster `fleet` is a mixed cluster of eight kinds of nodes and
two of the demo; `blind` has a node whose daemon sees nothing and one whose daemon has fallen silent; `unpriced` has no
price table; in `moves` one exporter of four starts late, one ends and one restarts; `hang_across` is one job on eight
nodes, and in `hang_moves` exporters start, end and restart around such a hang; each other is called like its scenario.
Run as `python -m tests.dashboards.world --serve` it ends now, says where its Prometheus answers, and stays until
SIGTERM.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.simulate.leak_scenarios import LEAK_SCENARIOS
from exporter.simulate.waterfalls import WATERFALL_SCENARIOS
from tests.dashboards import hang
from tests.dashboards.past import Past, prometheus, rules
from tests.dashboards.scheduler import pages
from tests.dashboards.stories import STORIES, Node, Played, Story, play
from tests.dashboards.variables import Span
from tests.dashboards.weeks import week
from tests.scenarios.stage import SIZES
from tests.scenarios.twelve import EXPECTED

__all__ = ["END", "Played", "World", "world"]

END = 1_767_873_600.0
"""Thursday, 2026-01-08 12:00 UTC."""
STARVED = 3
"""The node of the fleet that waits for its input for seconds at a time: it is read more often."""
SHOWN = 12_600
"""Seconds of the fleet's nodes; before that there is its history."""
HISTORY = 8 * 86_400
FLEET = tuple(
    Story(cluster="fleet", scenario="fleet", node=number, seconds=SHOWN, period=5.0 if number == STARVED else 30.0)
    for number in range(8)
)
DEMOS = tuple(Story(cluster="fleet", scenario="demo", node=number, seconds=SHOWN, period=30.0) for number in (8, 9))
ODD = (
    Story(cluster="blind", scenario="fleet", node=2, period=30.0, blind=True),
    Story(cluster="blind", scenario="fleet", node=6, period=30.0, silent=1800),
    Story(cluster="unpriced", scenario="healthy_training", gpus=2, period=10.0),
)
MOVES, LATE, ENDED, RESTARTED = 7200, 4200, 2400, 3000
"""Seconds of the cluster moves, and before its end: one starts, one is heard for the last time, one is back."""
MOVING = tuple(
    replace(Story(cluster="moves", scenario="fleet", node=node, gpus=2, period=30.0, seconds=MOVES), **how)
    for node, how in ((0, {}), (1, {"seconds": LATE}), (2, {"silent": ENDED}), (6, {"restarts": RESTARTED}))
)
HANGING = tuple(
    Story(cluster="hang_across", scenario="hang_across", node=node, gpus=hang.GPUS) for node in range(hang.NODES)
)
_MOVED = Story(cluster="hang_moves", scenario="hang_across", gpus=2)
HANG_MOVES = (
    _MOVED,
    replace(_MOVED, node=1, seconds=600.0),
    replace(_MOVED, node=2, silent=240),
    replace(_MOVED, node=3, restarts=120),
)
"""The same hang, seven minutes old, while one exporter has started before it, one ends in it and one restarts in it."""


class World(Struct, frozen=True):
    """A Prometheus with everything in it, and the truth about each cluster."""

    past: Past
    end: float
    """Unix seconds of the last page, and of the last sample of every rule."""
    clusters: Mapping[str, Played]

    def last(self, minutes: float) -> Span:
        """The time to open a board with. A second short: what is recorded at both its ends would be one too many."""
        return Span(self.end - minutes * 60 + 1, self.end)


def alone(name: str) -> Story:
    """A scenario in a cluster of its own, as large and as finely read as its examiners have it."""
    if name in WATERFALL_SCENARIOS:
        told = name == "carpenter_told"
        return Story(cluster=name, scenario=name, gpus=1 if told else 10, period=30.0)
    if name in LEAK_SCENARIOS:
        row, twin = EXPECTED[name.removesuffix("_twin")], name.endswith("_twin")
        return Story(cluster=name, scenario=name, gpus=row.twin_gpus if twin else row.gpus, period=row.period)
    if name in SIZES:
        return Story(cluster=name, scenario=name, gpus=SIZES[name].gpus, period=SIZES[name].period)
    return Story(cluster=name, scenario=name, gpus=8 if name == "demo" else 4, period=10.0)


def stories() -> tuple[Story, ...]:
    """All of them, those that take longest first."""
    many = {"fleet", *hang.HANG_SCENARIOS}
    return (
        *FLEET, *DEMOS, *ODD, *MOVING, *HANGING, *HANG_MOVES,
        *(alone(name) for name in reversed(STORIES) if name not in many),
    )  # fmt: skip


@contextmanager
def world(
    folder: Path, *, end: float = END, clusters: Container[str] | None = None, told: Iterable[Story] | None = None
) -> Iterator[World]:
    """Start it with these clusters; None: all. `told`: these stories, and nothing of the scheduler and of last week."""
    began = end - SHOWN
    with prometheus(folder) as past:
        if told is None:
            past.write(week("fleet", start=end - HISTORY, end=began))
            past.write(pages("fleet", start=began, end=end))
        wanted = told or (story for story in stories() if clusters is None or story.cluster in clusters)
        nodes = _played(tuple(wanted), end=end, url=past.url)
        first = min(node.moments[0].at for node in nodes)
        past.record(rules(), start=first, end=end, since={"fleet": began})
        yield World(past, end, _by_cluster(nodes, end))


def _by_cluster(nodes: list[Node], end: float) -> dict[str, Played]:
    names = dict.fromkeys(node.story.cluster for node in nodes)
    return {name: Played(name, end, tuple(node for node in nodes if node.story.cluster == name)) for name in names}


def _played(told: tuple[Story, ...], *, end: float, url: str) -> list[Node]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        return [job.result() for job in [workers.submit(play, story, end=end, url=url) for story in told]]


def _serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory() as folder, world(Path(folder), end=time.time() // 60 * 60) as made:
        sys.stdout.write(f"{made.past.url} ends at {made.end:.0f}\n")
        sys.stdout.flush()
        while True:
            time.sleep(1)


if __name__ == "__main__":
    _serve()
