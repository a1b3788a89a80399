"""What one tick costs: eight GPUs read over DCGM and over NVML, booked, and a snapshot taken of the ledger.

Owns these measurements, each in a process of its own (`python -m benchmarks.node.ticks SOURCE TICKS whole|split`), for
the bindings are altered to be timed. The bindings are NVIDIA's, the libraries beneath them stand-ins: what a real one
takes is not in the figures. The scheduler is left out: who holds the GPUs is said once.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from os import environ
from pathlib import Path

from msgspec.structs import astuple

from benchmarks.figures import Row, row
from benchmarks.group import Group, Measured
from benchmarks.machine import ROOT
from benchmarks.rig.meter import BINDINGS, LEDGER, LIBRARY, OURS, Meter
from benchmarks.rig.stand_ins import GPUS, START, Played, environment, played
from exporter.agent.agent import Agent
from exporter.core.model import SECOND, Allocation, Observation, Owner, Reading
from exporter.core.snapshot import DaemonMetadata
from exporter.sources.base import ReadResult

BUDGET_MS = 5.0
FIELDS = 20
"""At least so many figures must be in a reading, or the row would be mislabelled."""
_NAMES = {"dcgm": "DCGM", "nvml": "NVML"}
_TICKS, _TICKS_QUICK = 400, 30
_SETTLING = 5
"""Ticks before those that count: the first have no readings, for there is no baseline, or they come late."""
_OWNER = Owner(job_id="41", scheduler="slurm", user="ada")


def tick(*, quick: bool = False) -> list[Row]:
    """Time ticks over either source: undivided, and divided by whose time it was."""
    return [line for source in _NAMES for line in _rows(source, _TICKS_QUICK if quick else _TICKS)]


def _rows(source: str, ticks: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        stand_in = {**environ, **environment(source, Path(folder))}
        fields, whole = _child(source, ticks, "whole", stand_in)
        _, split = _child(source, ticks, "split", stand_in)
    name, often = _NAMES[source], f"{ticks} ticks"
    line = partial(_row, often=often)
    ours = [spent[OURS] + spent[LEDGER] for spent in split]
    tick_of = f"A tick of {GPUS} GPUs x {fields} fields from {name}"
    return [
        line(f"{tick_of}, our own part: source, ledger, snapshot", ours, budget=BUDGET_MS),
        line(f"- of which ledger and snapshot ({name})", [spent[LEDGER] for spent in split]),
        line(f"- beside it, NVIDIA's Python bindings of {name}", [spent[BINDINGS] for spent in split]),
        line(f"- beside it, the stand-in for {name}'s library", [spent[LIBRARY] for spent in split]),
        line(f"{tick_of}, all of it, nothing timed within: CPU", [sum(spent) for spent in whole]),
    ]


def _row(what: str, nanoseconds: list[int], *, often: str, budget: float | None = None) -> Row:
    values = [each / 1e6 for each in nanoseconds]
    spread = f"{min(values):.2f} - {max(values):.2f}, mean {sum(values) / len(values):.2f}"
    return row("tick", what, often=often, values=values, unit="ms", digits=2, budget=budget, spread=spread)


def _child(source: str, ticks: int, how: str, stand_in: Mapping[str, str]) -> tuple[int, list[list[int]]]:
    """Fields of a reading, and nanoseconds of every tick by side."""
    words = [sys.executable, "-m", "benchmarks.node.ticks", source, str(ticks), how]
    done = subprocess.run(words, cwd=ROOT, env=stand_in, stdout=subprocess.PIPE, check=True)
    said = json.loads(done.stdout)
    return said["fields"], said["ticks"]


# -- in the process that is measured --


def _whole(source: str, ticks: int) -> tuple[int, list[list[int]]]:
    booked = Booked(played(source))
    spent = []
    for now in _moments(ticks):
        booked.world.run(now)
        began = time.thread_time_ns()
        booked.tick(now)
        spent.append([time.thread_time_ns() - began])
    return booked.checked(), spent[_SETTLING:]


def _split(source: str, ticks: int) -> tuple[int, list[list[int]]]:
    meter = Meter()
    booked = Booked(played(source, meter.split), around=meter.timed)
    spent = []
    for now in _moments(ticks):
        booked.world.run(now)
        meter.take()
        booked.tick(now)
        spent.append(meter.take())
    return booked.checked(), spent[_SETTLING:]


def _moments(ticks: int) -> range:
    return range(START + SECOND, START + (1 + _SETTLING + ticks) * SECOND, SECOND)


class Booked:
    """A ledger that takes in what a source over a stand-in reads; the GPUs are held by one job from the start."""

    def __init__(
        self, world: Played, *, around: Callable[[Callable[..., None], int], Callable[..., None]] = lambda take, _: take
    ) -> None:
        self.world, self.agent = world, Agent(meta=DaemonMetadata(source="stand-in"))
        self._take_in = around(self.agent.process, LEDGER)
        self._known: tuple[object, ...] = ()
        self._last: tuple[Reading, ...] = ()

    def tick(self, now: int) -> int:
        """Read and book; give the number of readings."""
        batch = self.world.source.read(now)
        self._take_in(self._observation(batch, now))
        self._last = batch.readings
        return len(batch.readings)

    def _observation(self, batch: ReadResult, now: int) -> Observation:
        """As the observer makes one: inventory and holders only where they are not what was said last."""
        same, self._known = batch.devices == self._known, batch.devices
        held = (Allocation(device.uuid, _OWNER, START, gpus=len(batch.devices)) for device in batch.devices)
        return Observation(
            at=now,
            wall=self.world.clock.wall(),
            readings=batch.readings,
            settled=batch.settled,
            devices=None if same else batch.devices,
            allocations=None if same else tuple(held),
            faults=batch.faults,
            health=batch.health,
        )

    def checked(self) -> int:
        """Give the figures of a reading; raises RuntimeError where not all was read and booked as it should be."""
        ledger = self.agent.ledger
        fields = min((_figures(reading) for reading in self._last), default=0)
        wrong = {
            "fields of a reading": fields if fields < FIELDS else 0,
            "readings of a tick": len(self._last) if len(self._last) != GPUS else 0,
            "conservation errors": ledger.conservation_errors,
            "refused": dict(ledger.rejected),
            "faults": dict(ledger.faults),
            "our own": self.agent.last_error(),
        }
        if any(wrong.values()):
            raise RuntimeError(f"this did not go as it should, so it measured something else: {wrong}")
        return fields


def _figures(reading: Reading) -> int:
    """How much was seen, identity and time apart."""
    return sum(value is not None for value in astuple(reading)[3:-1])


def main() -> int:
    source, ticks, how = islice(sys.argv, 1, 4)
    fields, spent = (_split if how == "split" else _whole)(source, int(ticks))
    print(json.dumps({"fields": fields, "ticks": spent}))
    return 0


TICK = Group(
    name="tick",
    title="A tick",
    about=(
        "One read of eight H100s through a source, its posts to the ledger and a snapshot, in a tight loop without the "
        "scheduler. NVIDIA's own Python bindings run over stand-ins for the libraries beneath them (`tests/dcgm_stub`, "
        "`tests/nvml_stub`), whose boards move on between two ticks: what a driver or a host engine takes to answer is "
        "not in these figures. Our own part is all but the calls: reading values out of the bindings' structures is in "
        "it, though their access to a member is Python of NVIDIA's. The wall clock divides, at every call across. The "
        "last row of each is another run, in processor time, with nothing timed within. Every tenth tick looks at the "
        "inventory and the boards' health too, so the mean is above the median."
    ),
    measures=("exporter/agent", "exporter/core", "exporter/sources"),
    run=lambda: Measured(rows=tick()),
    quick=lambda: Measured(rows=tick(quick=True)),
)


if __name__ == "__main__":
    sys.exit(main())
