"""Stand-in GPUs below the real nvidia-ml-py, which a test controls by a script.

Loads and unloads the stand-in `libnvidia-ml.so.1`. A test file makes its fixture from `rigged`:

    @pytest.fixture
    def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
        yield from rigged(tmp_path, monkeypatch)
"""

import _ctypes
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from exporter.core.model import MS, SECOND, Device, Health, Reading
from exporter.sources.base import ReadResult
from exporter.sources.nvml.source import NvmlSource, open_nvml
from tests.nvml_stub.build import LIBRARY, build
from tests.shared_library import compiler
from tests.sources.conformance import START

INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TIMEOUT, NO_FUNCTION, LOST, RESET, UNKNOWN = (
    2,
    3,
    4,
    6,
    10,
    13,
    15,
    16,
    999,
)


class NvmlRig:
    """The stand-in library, its script, and the source opened over it; a `Rig` of the conformance suite."""

    source: NvmlSource
    lag = 0

    def __init__(self, script: Path, library: ctypes.CDLL) -> None:
        self.script, self.library = script, library
        self.lines: list[str] = ["count 3"]
        self.writes = 0
        self.hides = ("power_watts", "nvmlDeviceGetPowerUsage")
        self.run(START - SECOND)

    def say(self, *lines: str) -> None:
        """Add lines to the script; they apply from the last `run` on, and the library reads them at the next."""
        self.lines += lines

    def unsay(self, *lines: str) -> None:
        self.lines = [line for line in self.lines if line not in lines]

    def run(self, until: int) -> None:
        self.now = until
        draft = self.script.with_suffix(".draft")
        draft.write_text("\n".join([*self.lines, f"clock {until // MS}"]))
        self.writes += 1
        os.utime(draft, (self.writes, self.writes))  # the library looks at the file's time to see a change
        draft.replace(self.script)

    def calls(self, name: str) -> int:
        self.library.nvmlStubCalls.restype = ctypes.c_ulong
        return int(self.library.nvmlStubCalls(name.encode()))

    def held(self) -> tuple[int, int, int, int]:
        """Return the resources in use (samples, event sets, initialisations) and the number of invalid frees."""
        names = ("nvmlStubLiveSamples", "nvmlStubLiveSets", "nvmlStubInitialised", "nvmlStubBadFrees")
        samples, sets, initialised, bad = (int(getattr(self.library, name)()) for name in names)
        return samples, sets, initialised, bad

    def fail(self, uuid: str) -> None:
        self.say(f"gpu {number(uuid)} lost")

    def mend(self, uuid: str) -> None:
        self.unsay(f"gpu {number(uuid)} lost")

    def hide(self, uuid: str) -> str:
        field, call = self.hides
        self.say(f"gpu {number(uuid)} error {call} {NOT_SUPPORTED}")
        return field

    def open(self) -> NvmlSource:
        self.run(self.now)
        self.source = open_nvml(None)
        return self.source

    def read(self, second: float) -> ReadResult:
        now = START + int(second * SECOND)
        self.run(now)
        return self.source.read(now)

    def reading(self, gpu: int = 0, *, after: float = 0.0) -> Reading:
        """Read twice, a second apart, and return one GPU's reading."""
        self.read(after)
        return one(self.read(after + 1), gpu)


def number(uuid: str) -> int:
    """Return the index of a stand-in's GPU, or of an instance's board."""
    return int(uuid.partition("/")[0].rsplit("-", 1)[1])


def one(batch: ReadResult, gpu: int = 0) -> Reading:
    """Return the reading of a whole GPU, or of its unpartitioned part."""
    (reading,) = [each for each in batch.readings if each.uuid.startswith("GPU-") and number(each.uuid) == gpu]
    return reading


def read_of(batch: ReadResult) -> list[str]:
    """Return the indices of the devices that were read: "0", "1:2"."""
    named = {device.uuid: device.index for device in batch.devices}
    return [named[reading.uuid] for reading in batch.readings]


def device(batch: ReadResult, index: str) -> Device:
    (found,) = [each for each in batch.devices if each.index == index]
    return found


def reading_of(batch: ReadResult, index: str) -> Reading:
    uuid = device(batch, index).uuid
    (found,) = [each for each in batch.readings if each.uuid == uuid]
    return found


def health_of(batch: ReadResult, gpu: int = 0) -> Health:
    (found,) = [each for each in batch.health if number(each.uuid) == gpu]
    return found


def kinds(batch: ReadResult) -> list[tuple[int, str]]:
    return [(number(fault.uuid), fault.kind) for fault in batch.faults]


def conditions(batch: ReadResult) -> list[str]:
    return [each.condition for each in batch.devices]


def rigged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    """Yield a rig of three H100s, not yet opened; at the end, check that all resources were released."""
    if compiler() is None:
        pytest.skip("needs a C compiler to build the stand-in NVML")
    monkeypatch.setenv("NVML_STUB_SCRIPT", str(folder / "script"))
    # pynvml gets the library of that SONAME which is already loaded.
    library = ctypes.CDLL(str(build() / LIBRARY))
    rig = NvmlRig(folder / "script", library)
    try:
        yield rig
        if hasattr(rig, "source"):
            rig.source.close()
        assert rig.held() == (0, 0, 0, 0)
    finally:
        _unload(library)


def _unload(library: ctypes.CDLL) -> None:
    """Unload the stand-in, so that the next test in this process loads the machine's NVML."""
    if pynvml.nvmlLib is not None:
        _ctypes.dlclose(pynvml.nvmlLib._handle)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0
    _ctypes.dlclose(library._handle)
    with pytest.raises(OSError, match=LIBRARY):
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
