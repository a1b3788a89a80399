"""Runs the real agent, core and history on a simulated node, as fast as possible.

As a process (`python -m tests.history.player STORE FROM TO END SEED`) it plays a part of the scenario and logs its
writes and scrapes to a file `marks` beside the store, one JSON object per line; END is `stop` or `kill` (SIGKILL).
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter.agent.agent import Agent
from exporter.config import HistorySettings as Settings
from exporter.core.checkpoint import read_header
from exporter.core.model import Observation
from exporter.core.snapshot import DaemonMetadata, Snapshot
from exporter.history.recorder import HistoryRecorder
from exporter.history.store import HistoryStore
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.simulation import simulate
from tests.waiting import PATIENCE

STORY = "demo"
TICK_SECONDS = 10.0


class PlayedClock:
    """A clock that shows the time of the latest observation."""

    def __init__(self) -> None:
        self.at = self.wall_at = 0

    def now(self) -> int:
        return self.at

    def wall(self) -> int:
        return self.wall_at

    def wait(self, until: int, stop: threading.Event) -> None:
        raise NotImplementedError


def story(scenario: str = STORY, **more: Any) -> Iterable[Observation]:
    """Return the observations of a scenario, always the same."""
    return simulate(scenario, stories=SCENARIOS, **({"gpus": 8, "period_seconds": TICK_SECONDS} | more)).observations


def part_of(told: Iterable[Observation], first: int, last: int) -> Iterator[Observation]:
    """Yield observations from `first` to `last`; the first has devices and allocations, as after a daemon's start."""
    devices = owners = None
    for number, seen in enumerate(islice(told, last)):
        devices, owners = seen.devices or devices, owners if seen.allocations is None else seen.allocations
        if number == first:
            yield replace(seen, devices=devices, allocations=owners)
        elif number > first:
            yield seen


class Played:
    """One daemon: takes observations and serves scrapes."""

    def __init__(self, path: Path, *, boot: str = "boot", checkpoint_seconds: float = 0.05) -> None:
        self.clock = PlayedClock()
        settings = Settings(checkpoint_seconds=checkpoint_seconds, sample_seconds=600.0)
        self.history = HistoryRecorder(path, settings, node="node", boot=boot, clock=self.clock)
        self.agent = Agent(meta=DaemonMetadata(source="simulation"))
        self._begun = False

    def take_in(self, observation: Observation) -> None:
        self.clock.at, self.clock.wall_at = observation.at, observation.wall
        if not self._begun:
            self._begun = True
            self.history.begin(self.agent)
        self.agent.process(observation)

    def scrape(self) -> Snapshot | None:
        """Return what a scrape gets; repeated while the disk works but is slow, as on a busy machine."""
        newest, deadline = self.agent.latest(), time.monotonic() + PATIENCE
        assert newest is not None
        told = self.history.checkpointed_view(newest)
        while told is not newest and self.history.status().works and time.monotonic() < deadline:
            told = self.history.checkpointed_view(newest)
        return told

    def end(self) -> None:
        self.history.end()


def names(statements: Iterable[Any]) -> list[tuple[str, str, float, int]]:
    """Return each record's key and paid time, for comparisons."""
    return [(one.owner.job_id, one.life, one.start, one.paid) for one in statements]


def mark(path: Path, **said: Any) -> None:
    with path.with_name("marks").open("ab", buffering=0) as file:
        file.write(json.dumps(said).encode() + b"\n")


def _marking(write: Any) -> Any:
    def marking(store: HistoryStore, **parts: Any) -> None:
        parts |= {"state": list(parts.get("state", ())), "job_records": list(parts.get("job_records", ()))}
        write(store, **parts)
        frozen = dict(parts["state"]).get("ledger")
        if frozen is not None:
            said = {"at": read_header(frozen).at, "ended": names(parts["job_records"])}
            mark(store.path, durable=parts.get("durable", True), **said)

    return marking


def play(path: Path, part: Iterator[Observation], *, boot: str, chance: random.Random) -> Played:
    """Run one daemon, with scrapes at random times."""
    life = Played(path, boot=boot)
    for observation in part:
        life.take_in(observation)
        if chance.random() < 0.1:
            told = life.scrape()
            if told is not None:
                mark(path, told=told.at, paid=sum(gpu.counters.now.paid for gpu in told.gpus))
    return life


def main(store: str, first: str, last: str, end: str, seed: str) -> None:
    """Run one daemon as a process."""
    HistoryStore.write = _marking(HistoryStore.write)  # type: ignore[method-assign]
    part = part_of(story(), int(first), int(last))
    life = play(Path(store), part, boot="boot", chance=random.Random(int(seed)))  # noqa: S311
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    life.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
