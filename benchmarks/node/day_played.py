"""A day, in the process that plays it: through the core, its snapshot and its text, or through the DCGM source.

Owns the looks that a process takes at itself on the way. Run as `python -m benchmarks.node.day_played core|dcgm
SECONDS` it prints them as JSON. Refuses to judge them.
"""

import gc
import os
import sys
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from benchmarks.node.ticks import Booked
from benchmarks.node.working_day import told
from benchmarks.rig.daemon import memory
from benchmarks.rig.stand_ins import START, played
from exporter.agent.agent import Agent
from exporter.core.exposition import render
from exporter.core.model import SECOND
from exporter.core.snapshot import DaemonMetadata

SCRAPE = 15
"""Seconds between two texts."""
EVERY = 300
"""Seconds between two looks at the memory."""


class Point(Struct, frozen=True):
    """The process at one moment of the day."""

    second: int
    kib: float
    """Resident."""
    blocks: int = 0
    """Live allocations of Python's, after a full collection."""
    series: int = 0
    """On the page then."""
    most: int = 0
    """On the largest page since the last look."""


class Day(Struct, frozen=True):
    """One run: its points, what the ledger counted, and what it refused."""

    points: list[Point]
    conservation_errors: int
    paid_ns: int
    """GPU time accounted for, of all GPUs."""
    jobs: int
    """That were ever seen."""


class Pages:
    """What is served of an agent, as OpenMetrics."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.series = self.most = 0

    def write(self) -> None:
        """As a scrape does."""
        snapshot = self._agent.latest()
        if snapshot is None:
            raise RuntimeError(f"there is nothing to serve: {self._agent.last_error()}")
        text = render(snapshot, openmetrics=True)
        self.series = text.count(b"\n") - text.count(b"\n#") - text.startswith(b"#")
        self.most = max(self.most, self.series)

    def largest(self) -> int:
        """Series on the largest page since the last time."""
        most, self.most = self.most, 0
        return most


def _core(seconds: int) -> Day:
    agent = Agent(meta=DaemonMetadata(source="simulation"))
    pages, jobs = Pages(agent), set[str]()
    points = looks(_told(agent, pages, jobs, seconds), pages)
    ledger = agent.ledger
    if trouble := dict(ledger.rejected) or agent.last_error():
        raise RuntimeError(f"this did not go as it should, so it measured something else: {trouble}")
    paid = sum(gpu.book.paid for gpu in ledger.gpus.values())
    return Day(points, ledger.conservation_errors, paid, len(jobs))


def _told(agent: Agent, pages: Pages, jobs: set[str], seconds: int) -> Iterator[int]:
    for second, observation in enumerate(told(seconds)):
        agent.process(observation)
        if second % SCRAPE == 0:
            pages.write()
        jobs.update(held.owner.job_id for held in observation.allocations or ())
        yield second


def looks(seconds: Iterable[int], pages: Pages | None = None) -> list[Point]:
    """Look at this process every five minutes of the story."""
    found = []
    for second in seconds:
        if second % EVERY == 0:
            gc.collect()
            kib, blocks = memory(os.getpid()).now * 1024, sys.getallocatedblocks()
            series, most = (pages.series, pages.largest()) if pages else (0, 0)
            found.append(Point(second, kib, blocks, series, most))
    return found


def _dcgm(seconds: int) -> Day:
    booked = Booked(played("dcgm"))
    points = looks(_ticked(booked, seconds))
    booked.checked()
    return Day(points, booked.agent.ledger.conservation_errors, 0, 1)


def _ticked(booked: Booked, seconds: int) -> Iterator[int]:
    for second in range(seconds + 1):
        now = START + (1 + second) * SECOND
        booked.world.run(now)
        booked.tick(now)
        yield second


def main() -> int:
    what, seconds = sys.argv[1:3]
    print(msgspec.json.encode({"core": _core, "dcgm": _dcgm}[what](int(seconds))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
