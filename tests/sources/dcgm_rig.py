"""A DCGM source with NVIDIA's real bindings on a stand-in `libdcgm.so.4`, with the clocks of both in a test's hands.

@pytest.fixture
def closed(bindings, tmp_path, monkeypatch):
    with rigged(bindings, tmp_path, monkeypatch) as rig:
        yield rig
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.core.model import MS, SECOND, Reading
from exporter.sources.base import ReadResult
from exporter.sources.dcgm.client import DcgmClient
from exporter.sources.dcgm.connection import Bindings, connect, load_bindings
from exporter.sources.dcgm.source import DcgmSource
from tests.clocks import JumpClock
from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.stub import Stub, stand_in
from tests.shared_library import compiler
from tests.sources.conformance import START

ADDRESS = "unix:/tests/engine"
WALL = 1_700_000_000 * SECOND
"""Of the clock's beginning."""


class DcgmRig:
    """A source over the stand-in, with the clocks of both."""

    lag = SECOND + 200 * MS
    source: DcgmSource

    def __init__(self, stub: Stub, bindings: Bindings) -> None:
        self.stub, self.bindings = stub, bindings
        self.clock = JumpClock(START - 10 * SECOND, wall=WALL)
        self.say(f"listen {ADDRESS.removeprefix('unix:')}")
        self.run(START - 10 * SECOND)

    def say(self, *lines: str) -> None:
        self.stub.say(*lines)

    def unsay(self, *lines: str) -> None:
        self.stub.unsay(*lines)

    def run(self, until: int) -> None:
        """Advance both clocks to that time."""
        self.clock._now = until
        self.stub.run(self.clock.wall() // 1000)

    def open(self, *, period: float = 1.0, at: int = START - 5 * SECOND) -> DcgmSource:
        self.run(at)
        handle = connect(self.bindings, ADDRESS, timeout_seconds=1.0)
        self.source = DcgmSource(
            DcgmClient(self.bindings, handle, address=ADDRESS), period_seconds=period, clock=self.clock
        )
        return self.source

    def read(self, second: float) -> ReadResult:
        now = START + round(second * 1000) * MS
        self.run(now)
        return self.source.read(now)

    def readings(self, *seconds: float, gpu: int = 0) -> list[Reading]:
        """Return all readings of one GPU from reads at these seconds."""
        return [reading for second in seconds for reading in self.read(second).readings if gpu_of(reading.uuid) == gpu]

    # -- what the conformance suite does to it --

    def fail(self, uuid: str) -> None:
        self.say(f"gpu {gpu_of(uuid)} lost")

    def mend(self, uuid: str) -> None:
        self.unsay(f"gpu {gpu_of(uuid)} lost")

    def hide(self, uuid: str) -> str:
        self.say(f"gpu {gpu_of(uuid)} blank 155 blank")
        return "power_watts"


def gpu_of(uuid: str) -> int:
    return int(uuid.rsplit("-", 1)[1])


def kinds(batch: ReadResult) -> set[str]:
    return {fault.kind for fault in batch.faults}


@contextmanager
def rigged(bindings: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DcgmRig]:
    """A rig without a connection."""
    with stand_in(folder, monkeypatch, bindings) as stub:
        rig = DcgmRig(stub, load_bindings(str(bindings), str(stub.folder)))
        yield rig
        if hasattr(rig, "source"):
            rig.source.close()


def unpacked(folder: Path) -> Path:
    """NVIDIA's bindings, unpacked; the test is skipped where the stand-in cannot be built."""
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in DCGM")
    if reason := missing():
        pytest.skip(reason)
    return unpack(folder)
