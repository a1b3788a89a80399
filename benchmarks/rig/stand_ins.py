"""Eight stand-in H100s beneath NVIDIA's own Python bindings, of DCGM and of NVML, set up to be measured.

Owns the scripts of both stand-ins, the environment in which a process meets them, and a source over one whose clock
moves only when told. Refuses to measure.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pynvml

from exporter.core.model import MS, SECOND
from exporter.sources.base import TelemetrySource
from exporter.sources.dcgm.client import DcgmClient
from exporter.sources.dcgm.connection import connect, load_bindings
from exporter.sources.dcgm.source import DcgmSource
from exporter.sources.nvml.source import open_nvml
from tests.clocks import JumpClock
from tests.dcgm_stub.bindings import missing, unpack
from tests.dcgm_stub.build import build as build_dcgm
from tests.nvml_stub.build import build as build_nvml

GPUS = 8
INSTANCES = 7
"""Of a board in MIG mode."""
CUT = "gpu * mig" + " 1g.10gb" * INSTANCES
"""Line of either script: every board in as many instances as it can have."""
START = 1000 * SECOND
_DCGM, _ADDRESS, _NVML = "DCGM_STUB_SCRIPT", "GPU_EFFICIENCY_DCGM_ADDRESS", "NVML_STUB_SCRIPT"
Prepare = Callable[[ModuleType, ModuleType], None]
"""Called with the binding's module of functions and the module that holds the library, before a source is opened."""


def environment(source: str, folder: Path, *lines: str) -> dict[str, str]:
    """Give what a process needs to meet the stand-in of `source`; `folder` must outlive it.

    Raises RuntimeError where there is no compiler or no binding, CalledProcessError where it does not compile.
    """
    script = folder / f"{source}-script"
    return _dcgm_environment(script, lines) if source == "dcgm" else _nvml_environment(script, lines)


def _dcgm_environment(script: Path, lines: tuple[str, ...]) -> dict[str, str]:
    if reason := missing():
        raise RuntimeError(reason)
    library = build_dcgm()
    bindings = unpack(script.parent / "bindings", library=library)
    engine = script.parent / "engine"
    script.write_text("\n".join([f"count {GPUS}", f"listen {engine}", *lines, ""]))
    # The engine is another process in life: a message to it costs a switch there and back.
    return {
        _DCGM: str(script),
        "DCGM_BINDINGS": str(bindings),
        "DCGM_STUB_ROUND_TRIPS": "1",
        _ADDRESS: f"unix:{engine}",
    }


def _nvml_environment(script: Path, lines: tuple[str, ...]) -> dict[str, str]:
    script.write_text("\n".join([f"count {GPUS}", *lines, ""]))
    return {_NVML: str(script), "LD_LIBRARY_PATH": str(build_nvml())}


class _Script:
    """A stand-in's script, written anew to move its clock."""

    def __init__(self, path: Path) -> None:
        self._path, self._draft = path, path.with_suffix(".draft")
        self._lines, self._writes = path.read_text(), 0

    def move(self, clock: int) -> None:
        self._draft.write_text(f"{self._lines}clock {clock}\n")
        self._writes += 1
        os.utime(self._draft, (self._writes, self._writes))  # the library looks at the file's time to see a change
        self._draft.replace(self._path)


class Played:
    """A source over a stand-in whose time stands still between two `run`."""

    def __init__(
        self, source: TelemetrySource, clock: JumpClock, move: Callable[[], None], wake: Callable[[], object]
    ) -> None:
        self.source, self.clock = source, clock
        self._move, self._wake = move, wake

    def run(self, until: int) -> None:
        """Let the boards work until then (monotonic nanoseconds); what the stand-in does meanwhile it does here."""
        self.clock.wait(until, threading.Event())
        self._move()
        self._wake()


def played(source: str, prepare: Prepare = lambda _calls, _holder: None) -> Played:
    """Open `source` over the stand-in of this process's environment, at START."""
    return _played_dcgm(prepare) if source == "dcgm" else _played_nvml(prepare)


def _played_dcgm(prepare: Prepare) -> Played:
    clock, script, address = JumpClock(START), _Script(Path(os.environ[_DCGM])), os.environ[_ADDRESS]

    def move() -> None:
        script.move(clock.wall() // 1000)

    move()
    bindings = load_bindings()
    prepare(bindings.agent, bindings.structs)
    handle = connect(bindings, address, timeout_seconds=5.0)
    source = DcgmSource(DcgmClient(bindings, handle, address=address), period_seconds=1.0, clock=clock)
    return Played(source, clock, move, lambda: bindings.agent.dcgmGetAllDevices(handle))


def _played_nvml(prepare: Prepare) -> Played:
    clock, script = JumpClock(START), _Script(Path(os.environ[_NVML]))

    def move() -> None:
        script.move(clock.now() // MS)

    move()
    pynvml.nvmlInit()
    prepare(pynvml, pynvml)
    return Played(open_nvml(None), clock, move, pynvml.nvmlDeviceGetCount)
