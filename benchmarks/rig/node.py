"""A node of eight GPUs held by eight jobs, simulated, behind the real loop and the real server.

Owns a source and a scheduler that tell a simulation's story at the pace they are asked. Unlike `gpu-efficiency
demo` it goes through the reading thread and the observer, which count late ticks; unlike the stand-in NVML it has
a job of its own on every GPU. Run as `python -m benchmarks.rig.node [WEB-CONFIG]` it serves on a free port
until SIGTERM.
"""

import sys
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from benchmarks.rig.story import SCENARIO, history
from exporter.agent.agent import Agent
from exporter.agent.sampler import Collector, Sampler
from exporter.cli.wiring import daemon_metadata, publish
from exporter.clock import SystemClock
from exporter.config import load
from exporter.core.model import Allocation, Device, Reading
from exporter.logs import configure_logging
from exporter.schedulers.base import Member, SchedulerState
from exporter.schedulers.rules import Rules
from exporter.simulate.simulation import simulate
from exporter.sources.base import ReadResult
from exporter.sources.selector import SourceSelector


class SimulatedSource:
    """A `Source` whose readings come from a simulation; they cover whatever time lies between two calls."""

    name = "simulation"
    signals = frozenset(Reading.__struct_fields__)

    def __init__(self) -> None:
        self._story = simulate(SCENARIO, duration_seconds=float("inf")).observations
        self._devices = next(self._story).devices or ()
        self._last: int | None = None

    def read(self, now: int) -> ReadResult:
        """Play one second on."""
        last, self._last = self._last, now
        readings = next(self._story).readings
        if last is None or last >= now:
            return ReadResult(self._devices)
        return ReadResult(self._devices, tuple(replace(reading, start=last, end=now) for reading in readings))

    def resync(self) -> None:
        """Forget the baseline."""
        self._last = None

    def pause(self) -> None:
        """There is nobody to let go for."""

    def close(self) -> None:
        """Nothing is held open."""


class SimulatedScheduler:
    """A `Scheduler` whose word never changes."""

    name = node = "simulation"

    def __init__(self, allocations: tuple[Allocation, ...]) -> None:
        self._allocations = allocations

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState:  # noqa: ARG002
        """Say what was said before."""
        return SchedulerState(self._allocations, now)

    def update(self, rules: Rules) -> None:
        """Nobody is judged by rules."""

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:  # noqa: ARG002
        """Nobody's: no process is real."""
        return {}

    def close(self) -> None:
        """Nothing is held open."""


def main() -> int:
    """Serve; the exit status is the server's."""
    flags = {"web.listen_address": "127.0.0.1:0", "web.config_file": "".join(sys.argv[1:2])}
    config = load(None, environ={}, flags=flags)
    configure_logging(form="text", level="info")
    clock = SystemClock()
    before = list(history(clock.now()).observations)
    scheduler = SimulatedScheduler(before[0].allocations or ())
    hands = Collector(SourceSelector(("simulation",), lambda _: SimulatedSource()), scheduler)
    observer = Sampler(hands, clock, interval=1.0, deadline=10.0)
    agent = Agent(
        meta=daemon_metadata(config, source="simulation", simulated=True, host="gpu-node-00"), sampler=observer
    )
    for observation in before:
        agent.process(observation)
    try:
        return publish(agent, config, observer.observations)
    finally:
        hands.close()


if __name__ == "__main__":
    sys.exit(main())
