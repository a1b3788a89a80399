"""A test hook: plays loads with known answers on the stand-in NVML of the tests, in no time. No GPU, no child.

Owns the reading of the player's file, the stand-in's script and a clock that moves it. Refuses to work with NVIDIA's
own library. It computes nothing: what the counters show and what the load claims to have done are both the file's, so
that an error of the measurement cannot cancel out here.

The file, as JSON; `says` are lines of the stand-in's language (tests/nvml_stub/world.h):

    {"script": "/tmp/script",                       where the stand-in's script is to be written
     "multiprocessors": 132,
     "world": ["count 1", "gpu 0 idle"],            holds always
     "loads": {"bf16_8192": {"phases": [
         {"seconds": 2.0, "says": ["gpu 0 tensor 0"]},                                  warming up: tells of no lap
         {"seconds": 8.0, "says": ["gpu 0 tensor 50"], "lap": {"flops": 1e15, "busy": 8.0}}]},
       "fp8_8192": {"outcome": "skipped", "reason": "..."}}}       a load that is not there was skipped, too
"""

import os
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from benchmarks.known.loads import Load
from benchmarks.known.stage import End, Hello, Lap, Report, StageError
from exporter.core.model import MS, SECOND

_START = 5_000 * SECOND
_WALL = 1_767_225_600 * SECOND
"""2026-01-01: a player's page has the same date every time."""


class _Did(Struct, forbid_unknown_fields=True):
    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0
    busy: float = 0.0


class _Phase(Struct, forbid_unknown_fields=True):
    seconds: float
    says: list[str] = []
    lap: _Did | None = None


class _Played(Struct, forbid_unknown_fields=True):
    phases: list[_Phase] = []
    outcome: Literal["done", "skipped", "failed"] = "done"
    reason: str = ""


class _File(Struct, forbid_unknown_fields=True):
    script: str
    world: list[str] = []
    multiprocessors: int = 0
    loads: dict[str, _Played] = {}


class Player:
    """A Stage and a Clock in one: time passes only while somebody waits, and the counters run with it."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = msgspec.json.decode(file.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as error:
            raise StageError(f"{file}: is no player's file: {error}") from error
        self._script, self._writes = Path(self._file.script), 0
        self._now, self._begun = _START, _START
        self._playing = _Played()
        os.environ["NVML_STUB_SCRIPT"] = str(self._script)
        self._write()

    # -- the clock --

    def now(self) -> int:
        """See Clock."""
        return self._now

    def wall(self) -> int:
        """See Clock."""
        return self._now - _START + _WALL

    def wait(self, until: int, stop: threading.Event) -> None:
        """Move on to `until`, stopping where a phase ends, so that the stand-in sees each for as long as it lasts."""
        while self._now < until and not stop.is_set():
            ends = [end for _, end, _ in self._phases() if self._now < end < until]
            step = min([until, *ends])
            self._now, says = step, self._says_until(step)
            self._write(says)
            self._pynvml().nvmlSystemGetDriverVersion()  # any call lets the world run on

    # -- the stage --

    def begin(self, load: Load) -> None:
        """See Stage."""
        self._begun = self._now
        missing = _Played(outcome="skipped", reason="it is not in the player's file")
        self._playing = self._file.loads.get(load.name, missing)

    def over(self) -> bool:
        """See Stage."""
        return self._now >= self._begun + sum(round(phase.seconds * SECOND) for phase in self._playing.phases)

    def report(self) -> Report:
        """See Stage."""
        laps = tuple(
            Lap(start, end, phase.lap.flops, phase.lap.bytes, phase.lap.launches, phase.lap.busy)
            for start, end, phase in self._phases()
            if phase.lap is not None
        )
        return Report(laps, End(self._playing.outcome, self._playing.reason))

    def hello(self) -> Hello:
        """See Stage."""
        return Hello("played", "", self._file.multiprocessors)

    def close(self) -> None:
        """See Stage."""

    def _phases(self) -> list[tuple[int, int, _Phase]]:
        """Give each phase of the load with its start and end."""
        phases, start = [], self._begun
        for phase in self._playing.phases:
            end = start + round(phase.seconds * SECOND)
            phases.append((start, end, phase))
            start = end
        return phases

    def _says_until(self, moment: int) -> list[str]:
        """Give what the phase says that lasts up to `moment`; between loads, nothing."""
        return next((phase.says for start, end, phase in self._phases() if start < moment <= end), [])

    def _write(self, says: list[str] | None = None) -> None:
        """The library looks at the file's time to see a change, so each has a time of its own."""
        draft = self._script.with_suffix(".draft")
        draft.write_text("\n".join([*self._file.world, *(says or []), f"clock {self._now // MS}"]), encoding="utf-8")
        self._writes += 1
        os.utime(draft, (self._writes, self._writes))
        draft.replace(self._script)

    @staticmethod
    def _pynvml() -> Any:
        import pynvml  # noqa: PLC0415  as in the source

        return pynvml
