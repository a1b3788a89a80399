"""Runs the conformance tests on a source that replays a recorded trace."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.core.model import MS, SECOND, Device, Fault, Observation, Reading
from exporter.simulate.simulation import simulate
from exporter.sources.base import ReadResult
from exporter.trace import TraceHeader, TraceWriter, read_trace
from tests.sources.conformance import LAWS, START, Law


class Played:
    """A source that replays a trace's observations; each reading is returned by the first read after its end."""

    name = "played"

    def __init__(self, story: list[Observation]) -> None:
        self._story = story
        self._devices: tuple[Device, ...] = ()
        self._since: int | None = None
        self.failing: set[str] = set()
        self.hidden: dict[str, str] = {}
        self._back: set[str] = set()

    @property
    def signals(self) -> frozenset[str]:
        told = [reading for observation in self._story for reading in observation.readings[:1]][:3]
        fields = set(Reading.__struct_fields__) - {"uuid", "start", "end", "distrust"}
        return frozenset(field for field in fields if any(getattr(one, field) is not None for one in told))

    def read(self, now: int) -> ReadResult:
        since, self._since = self._since, now
        for observation in self._story:
            if observation.at <= now and observation.devices is not None:
                self._devices = observation.devices
        faults = tuple(Fault("gpu_lost", f"{uuid} does not answer", uuid) for uuid in sorted(self.failing))
        readings = () if since is None else tuple(self._between(since, now))
        self._back = set(self.failing)
        return ReadResult(self._devices, readings, faults)

    def _between(self, since: int, now: int) -> Iterator[Reading]:
        for observation in self._story:
            for one in observation.readings if since < observation.at <= now else ():
                if one.start >= since and one.uuid not in self.failing | self._back:
                    yield replace(one, **dict.fromkeys([self.hidden[one.uuid]])) if one.uuid in self.hidden else one

    def resync(self) -> None:
        self._since = None

    def pause(self) -> None:
        self._since = None

    def close(self) -> None:
        """Nothing to close."""


class PlayedRig:
    """A rig that breaks the replaying source, because a trace cannot be broken."""

    lag = 0

    def __init__(self, source: Played) -> None:
        self.source = source

    def run(self, until: int) -> None:
        """Nothing to do: the trace has been recorded."""

    def fail(self, uuid: str) -> None:
        self.source.failing.add(uuid)

    def mend(self, uuid: str) -> None:
        self.source.failing.remove(uuid)

    def hide(self, uuid: str) -> str:
        self.source.hidden[uuid] = "power_watts"
        return "power_watts"


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record 330 seconds of two GPUs, as the command `record` does."""
    path = tmp_path_factory.mktemp("trace") / "played.jsonl.gz"
    story = simulate("healthy_training", gpus=2, duration_seconds=330, start=START - 5 * SECOND)
    with TraceWriter(path, TraceHeader(simulated=True)) as trace:
        for observation in story.observations:
            trace.append(observation)
    return path


@pytest.fixture
def rig(recording: Path) -> PlayedRig:
    with read_trace(recording) as trace:
        return PlayedRig(Played(list(trace)))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_recorded_trace_keeps_the_law(law: Law, rig: PlayedRig) -> None:
    law(rig)


def test_the_recording_is_on_whole_milliseconds(rig: PlayedRig) -> None:
    rig.source.read(START)
    readings = rig.source.read(START + 10 * SECOND).readings
    assert len(readings) == 20
    assert all(one.start % MS == one.end % MS == 0 for one in readings)
