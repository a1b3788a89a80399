"""The whole loop over fakes written by hand, and a clock that jumps: what tests of its parts share.

Owns the fakes and the law that each tick is checked against. Knows nothing of any one test.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from exporter.agent.agent import Agent
from exporter.agent.inventory import Inventory, InventoryFile
from exporter.agent.pause import PauseFile
from exporter.agent.sampler import Collected, Collector, Sampler
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import conserved
from exporter.core.model import SECOND, Allocation, Device, Fault, Health, Observation, Reading
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata
from exporter.schedulers.base import Member, Scheduler, SchedulerState
from exporter.schedulers.rules import Rules
from exporter.sources.base import ReadResult
from exporter.sources.selector import SourceSelector
from exporter.workloads import WorkloadListener
from tests.clocks import JumpClock
from tests.waiting import PATIENCE
from tests.worlds import WORKING, device, held

TWO = (device("GPU-0", "0"), device("GPU-1", "1"))


class FakeSource:
    """Reads all its GPUs as busy or as told; raises what `trouble` holds, one a read; waits while `gate` is shut."""

    name = "fake"
    signals = frozenset(WORKING)

    def __init__(self) -> None:
        self.devices: tuple[Device, ...] = TWO
        self.signals_of: dict[str, dict[str, Any]] = {}
        self.trouble: deque[Exception] = deque()
        self.faults: tuple[Fault, ...] = ()
        self.health: tuple[Health, ...] = ()
        self.late = 0
        """Nanoseconds by which its values lag."""
        self.empty = 0
        """Reads to come that give no reading; the next one covers their time."""
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.last: int | None = None
        self.reads: list[int] = []
        self.resyncs = self.pauses = self.closes = self.opens = 0

    def open(self, _name: str) -> "FakeSource":
        self.opens += 1
        self.last = None
        return self

    def read(self, now: int) -> ReadResult:
        self.reads.append(now)
        self.inside.set()
        self.gate.wait(PATIENCE)
        if self.trouble:
            raise self.trouble.popleft()
        if self.empty and self.last is not None:
            self.empty -= 1
            return ReadResult(self.devices, (), self.faults, self.health, self.last)
        before, self.last = self.last, now
        readings = () if before is None or before == now else tuple(self._reading(d.uuid, before) for d in self.devices)
        settled = now - self.late if self.late else None
        return ReadResult(self.devices, readings, self.faults, self.health, settled)

    def _reading(self, uuid: str, before: int) -> Reading:
        assert self.last is not None
        return Reading(uuid, before, self.last, **self.signals_of.get(uuid, WORKING))

    def resync(self) -> None:
        self.resyncs += 1
        self.last = None

    def pause(self) -> None:
        self.pauses += 1
        self.last = None

    def close(self) -> None:
        self.closes += 1


class FakeScheduler:
    """Says what it was told to; raises `trouble` while there is any."""

    name = node = "fake"

    def __init__(self, *allocations: Allocation) -> None:
        self.said, self.age = allocations, 0
        self.word = SchedulerState((), 0)
        self.proves = True
        self.trouble: Exception | None = None
        self.closes = 0

    def poll(self, now: int, _devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState:
        if self.trouble is not None:
            raise self.trouble
        listed = {process.pid for reading in readings for process in reading.processes or ()}
        members = {pid: member for pid, member in self.word.members.items() if pid in listed}
        return replace(self.word, allocations=self.said, at=now - self.age, members=members)

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        return {pid: self.word.members[pid] for pid in pids if self.proves and pid in self.word.members}

    def update(self, rules: Rules) -> None:
        self.said = tuple(replace(one, owner=rules.apply(one.owner)) for one in self.said)

    def close(self) -> None:
        self.closes += 1


class SlowHands:
    """Hands without a thread: `away` looks in a row find nobody back, then the answer is there."""

    def __init__(self, source: FakeSource, scheduler: Scheduler) -> None:
        self._source, self._scheduler, self._inventory = source, scheduler, Inventory()
        self.away = 0
        self.asked: list[tuple[int, bool]] = []

    def request(self, now: int, *, resync: bool) -> None:
        self.asked.append((now, resync))

    def result(self, timeout: float) -> Collected | None:
        assert timeout > 0
        if self.away:
            self.away -= 1
            return None
        now, resync = self.asked[-1]
        if resync:
            self._source.resync()
        batch = self._source.read(now)
        devices = self._inventory.update(batch.devices)
        word = self._scheduler.poll(now, devices, batch.readings)
        owners = None if word is None else word.allocations
        return Collected(
            now, batch, devices, owners, now, faults=batch.faults, source="fake", reason="told to", seconds=0.25
        )


def ladder(source: FakeSource) -> SourceSelector:
    """One rung, and waits without jitter."""
    return SourceSelector(("fake",), source.open, chance=lambda: 0.5)


class Rig:
    """An agent over fakes and a clock that jumps; `tick` checks the law each time."""

    def __init__(
        self,
        scheduler: Any = None,
        *,
        interval: float = 5.0,
        deadline: float = 10.0,
        slow: bool = False,
        record: Callable[[Observation], None] | None = None,
        policy: Policy | None = None,
        rungs: SourceSelector | None = None,
        pause: Path | None = None,
        inventory: Inventory | None = None,
        remembered: InventoryFile | None = None,
        listeners: Sequence[WorkloadListener] = (),
    ) -> None:
        self.source, self.clock = FakeSource(), JumpClock(start=1000 * SECOND)
        self.scheduler = scheduler or FakeScheduler(*(held(d.uuid, start=1000.0, gpus=2) for d in TWO))
        self.stop = threading.Event()
        self.slow = SlowHands(self.source, self.scheduler)
        self.hands = (
            cast("Collector", self.slow)
            if slow
            else Collector(
                rungs or ladder(self.source),
                self.scheduler,
                pause=None if pause is None else PauseFile(pause, self.clock.wall),
                inventory=inventory,
                inventory_file=remembered,
                listeners=listeners,
            )
        )
        self.observer = Sampler(self.hands, self.clock, interval=interval, deadline=deadline)
        self.agent = Agent(meta=DaemonMetadata(source="fake"), sampler=self.observer, record=record, policy=policy)
        self._observations = self.observer.observations(self.stop)

    def tick(self, times: int = 1) -> Observation:
        """Let so many intervals pass; return the last observation."""
        for _ in range(times):
            observation = next(self._observations)
            self.agent.process(observation)
            self.lawful()
        return observation

    def until(self, true: Callable[[], bool], *, ticks: int = 1000) -> None:
        """Tick until it is true; each tick waits for the hands for one interval of real time at most."""
        for _ in range(ticks):
            if true():
                return
            self.tick()
        pytest.fail(f"not so after {ticks} ticks")

    def lawful(self) -> None:
        assert all(conserved(gpu.book) for gpu in self.ledger.gpus.values())
        assert self.ledger.conservation_errors == 0
        snapshot = self.agent.latest()
        assert snapshot is not None
        assert all(sum(gpu.counters.now.parts) == gpu.counters.now.paid for gpu in snapshot.gpus)

    @property
    def ledger(self) -> Any:
        return self.agent.ledger

    def seconds(self, leak: str, uuid: str = "GPU-0") -> float:
        return float(self.ledger.gpus[uuid].book.parts[LEAK_NAMES.index(leak)] / SECOND)

    def paid(self, uuid: str = "GPU-0") -> float:
        return float(self.ledger.gpus[uuid].book.paid / SECOND)

    def errors(self) -> dict[str, int]:
        snapshot = self.agent.latest()
        assert snapshot is not None
        return dict(snapshot.meta.errors)

    def close(self) -> None:
        self.source.gate.set()
        self.stop.set()
        if isinstance(self.hands, Collector):
            self.hands.close()
