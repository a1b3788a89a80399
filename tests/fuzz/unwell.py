"""A node that can be made unwell: a source, a scheduler, a listener and clocks with a switch for each way to fail.

Owns these stand-ins; agent, observer and hands above them are the real ones, with the hands' own thread. Time is
virtual: a day passes in a minute, and a source that hangs for five minutes holds nobody up.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

from msgspec.structs import replace

from exporter.agent.agent import Agent
from exporter.agent.sampler import Collected, Collector, Sampler
from exporter.core.model import MS, SECOND, Device, Observation, Reading
from exporter.core.snapshot import DaemonMetadata
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.rules import Rules
from exporter.sources.base import ReadResult, SourceError
from exporter.sources.selector import SourceSelector
from exporter.workloads import ProcessLookup, WorkloadProcess, WorkloadUpdate
from tests.clocks import JumpClock
from tests.worlds import WORKING, device, held

GPUS = 8
INTERVAL, DEADLINE = 5.0, 10.0
PATIENCE = 60.0
"""Real seconds for which the hands' thread is waited for, where it does not hang on purpose."""
LONGEST = 60 * SECOND
"""A source gives no reading over a longer time: like a counter that may have wrapped, it begins anew."""
BOARDS = tuple(device(f"GPU-{n}", f"{n}") for n in range(GPUS))
_NONSENSE: tuple[Mapping[str, Any], ...] = (
    {"gr_engine_active": nan}, {"gr_engine_active": inf, "sm_active": -1.0}, {"tensor_active": 1e300},
    {"power_watts": -5.0}, {"sm_clock_hz": nan, "dram_active": 17.0}, {"energy_joules": -1e12},
    {"gpu_utilization": 400.0},
)  # fmt: skip


class Clock(JumpClock):
    """A JumpClock, which is the repository's own; its wait may take longer than it was asked for."""

    def __init__(self) -> None:
        super().__init__(start=1000 * SECOND)
        self.oversleeps = 0
        """Nanoseconds by which the next waits are late, as on a host that gives us no processor."""

    def wait(self, until: int, stop: threading.Event) -> None:
        """See Clock."""
        super().wait(until + self.oversleeps, stop)


class Source:
    """Reads eight busy boards, until `trouble` says otherwise."""

    name = "unwell"
    signals = frozenset(WORKING)

    def __init__(self) -> None:
        self.trouble = ""
        self.present: tuple[Device, ...] = BOARDS
        self.well = threading.Event()
        """While it is not set, a read does not come back."""
        self.well.set()
        self._dice = random.Random(7)  # nosec B311  # noqa: S311  dice, no secret
        self._last: int | None = None

    def open(self, _name: str) -> "Source":
        """As the ladder opens a source anew."""
        if self.trouble == "raises":
            raise SourceError("the driver is not loaded")
        self._last = None
        return self

    def read(self, now: int) -> ReadResult:
        """See Source."""
        self.well.wait(PATIENCE)
        if self.trouble == "raises":
            raise SourceError("the driver is not loaded")
        if self.trouble == "breaks":
            raise ZeroDivisionError("a bug of a vendor's binding")
        before, self._last = self._last, now
        if before is None or not 0 < now - before <= LONGEST:
            return ReadResult(self.present)
        readings = tuple(Reading(one.uuid, before, now, **WORKING) for one in self.present)
        return ReadResult(self.present, tuple(map(self._absurd, readings)) if self.trouble == "nonsense" else readings)

    def _absurd(self, reading: Reading) -> Reading:
        """What no board can say, in figures, in time or in name."""
        dice, length = self._dice, reading.end - reading.start
        return dice.choice((
            replace(reading, **dice.choice(_NONSENSE)),
            replace(reading, start=reading.start + length, end=reading.start),
            replace(reading, end=reading.end + 3600 * SECOND),
            replace(reading, start=reading.start - 3600 * SECOND),
            replace(reading, end=reading.end - MS // 2),
            replace(reading, uuid="GPU-of-somebody-else"),
        ))  # fmt: skip

    def resync(self) -> None:
        """See Source."""
        self._last = None

    def pause(self) -> None:
        """See Source."""
        self._last = None

    def close(self) -> None:
        """Nothing is held open."""


class Scheduler:
    """Eight boards held by two jobs, as long as it can be reached."""

    name = node = "unwell"

    def __init__(self) -> None:
        self.silent = False
        self._said = tuple(held(one.uuid, start=1000.0, gpus=GPUS) for one in BOARDS)

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState:  # noqa: ARG002  as a Scheduler
        """See Scheduler."""
        if self.silent:
            raise SchedulerError("slurmctld gives no answer")
        return SchedulerState(self._said, now)

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:  # noqa: ARG002  as a Scheduler
        """No process is real."""
        return {}

    def update(self, rules: Rules) -> None:
        """Nobody is judged by rules."""

    def close(self) -> None:
        """Nothing is held open."""


class Ear:
    """A listener that breaks, or hears nothing."""

    def __init__(self) -> None:
        self.breaks = False

    def poll(self, _now: int, _guests: Sequence[WorkloadProcess], _whose: ProcessLookup) -> WorkloadUpdate:
        """See Listener."""
        if self.breaks:
            raise LookupError("a bug of ours")
        return WorkloadUpdate()

    def close(self) -> None:
        """Nothing is held open."""


class Patient:
    """The real hands, asked without a wait where they are known to hang: virtual time passes instead."""

    def __init__(self, hands: Collector, source: Source) -> None:
        self._hands, self._source = hands, source

    def request(self, now: int, *, resync: bool) -> None:
        """See Hands."""
        self._hands.request(now, resync=resync)

    def result(self, timeout: float) -> Collected | None:
        """See Hands."""
        return self._hands.result(timeout=0.0 if not self._source.well.is_set() else max(timeout, PATIENCE))


class Node:
    """The whole loop on it; `tick` lets one interval pass."""

    def __init__(self) -> None:
        self.clock, self.source, self.scheduler, self.ear = Clock(), Source(), Scheduler(), Ear()
        rungs = SourceSelector(("unwell",), self.source.open, chance=lambda: 0.5)
        self._hands = Collector(rungs, self.scheduler, listeners=(self.ear,))
        patient: Any = Patient(self._hands, self.source)
        self.observer = Sampler(patient, self.clock, interval=INTERVAL, deadline=DEADLINE)
        self.agent = self.new_agent()
        self.stopped = threading.Event()
        self._observations = self.observer.observations(self.stopped)

    def new_agent(self) -> Agent:
        """As a daemon that starts has it."""
        return Agent(meta=DaemonMetadata(source="unwell"), sampler=self.observer)

    def tick(self) -> Observation:
        """One observation, taken in."""
        observation = next(self._observations)
        self.agent.process(observation)
        return observation

    def close(self) -> None:
        """End the hands' thread."""
        self.source.well.set()
        self.stopped.set()
        self._hands.close()
