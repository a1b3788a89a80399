"""Whether memory grows: ten million readings through the core, one million through the DCGM source as well.

Owns these measurements, each in a process of its own (`python -m benchmarks.growth core|dcgm READINGS`), both at once:
they are not timed. The core is told one simulated hour again and again, each time with jobs of new names, as on a node
that works; ten million readings of eight GPUs are two weeks.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import linear_regression
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.daemon import memory
from benchmarks.figures import Row, row
from benchmarks.machine import ROOT
from benchmarks.stand_ins import START, environment, played
from benchmarks.ticks import Booked
from exporter.agent import Agent
from exporter.core.model import SECOND, Allocation, Observation, Report, Serving
from exporter.core.snapshot import Meta
from exporter.simulate import simulate

SAMPLES = 50
Word = TypeVar("Word", Report, Serving)
_HOUR = 3600
_MILLION = 1_000_000


class Case(Struct, frozen=True):
    """What is measured: in words, over how many readings, and what growth is none, KiB a million readings.

    The allocator takes pages in steps of a hundred KiB or so, which weigh more in a shorter run; one pointer kept each
    tick would be 977.
    """

    about: str
    readings: int
    quick: int
    budget: float


CASES = {
    "core": Case("core: simulated story, ledger, snapshot", 10 * _MILLION, 50_000, 32.0),
    "dcgm": Case("DCGM source over the stand-in, ledger, snapshot", _MILLION, 5_000, 256.0),
}
Curve = list[tuple[int, float]]
"""Readings so far, and resident memory in KiB."""


def growth(*, quick: bool = False) -> list[Row]:
    """Sample the resident memory fifty times on the way to so many readings."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        stand_in = {**os.environ, **environment("dcgm", Path(folder))}
        wanted = {what: case.quick if quick else case.readings for what, case in CASES.items()}
        children = {what: pool.submit(_child, what, total, stand_in) for what, total in wanted.items()}
        return [line for what, child in children.items() for line in rows(CASES[what], child.result())]


def _child(what: str, readings: int, stand_in: dict[str, str]) -> Curve:
    words = [sys.executable, "-m", "benchmarks.growth", what, str(readings)]
    done = subprocess.run(words, cwd=ROOT, env=stand_in, stdout=subprocess.PIPE, check=True)
    return [(readings, kib) for readings, kib in json.loads(done.stdout)]


def rows(case: Case, curve: Curve) -> list[Row]:
    """Give the curve at four places, and its slope after the first tenth: what is kept of an hour is there by then."""
    tenth = len(curve) // 10
    places = (0, tenth, len(curve) // 2, -1)
    lines = [_resident(case.about, *curve[place]) for place in places]
    often = f"{len(curve) - tenth} samples on {curve[-1][0] - curve[tenth][0]:,} readings"
    slope = row(
        "growth", f"Growth a million readings, after the first tenth ({case.about})", often=often,
        values=[slope_of(curve[tenth:])], unit="KiB", budget=case.budget, spread=_extent(curve[tenth:]),
    )  # fmt: skip
    return [*lines, slope]


def _resident(about: str, readings: int, kib: float) -> Row:
    what = f"Resident memory after {readings:,} readings ({about})"
    return row("growth", what, often="once", values=[kib / 1024], unit="MiB", digits=2, spread="-")


def slope_of(curve: Curve) -> float:
    """KiB a million readings, by least squares."""
    return linear_regression([readings / _MILLION for readings, _ in curve], [kib for _, kib in curve]).slope


def _extent(curve: Curve) -> str:
    sizes = [kib / 1024 for _, kib in curve]
    return f"{min(sizes):.2f} - {max(sizes):.2f} MiB resident"


# -- in the process that is measured --


def sampled(ticks: Iterable[int], total: int) -> Curve:
    """Take the memory at the start, and each time another fiftieth of `total` readings is done."""
    curve, done = [(0, _resident_kib())], 0
    for given in ticks:
        done += given
        if done * SAMPLES >= total * len(curve):
            curve.append((done, _resident_kib()))
        if len(curve) > SAMPLES:
            break
    return curve


def _resident_kib() -> float:
    return memory(os.getpid()).now * 1024


def _core(total: int) -> Curve:
    agent = Agent(meta=Meta(source="simulation"))
    story = list(simulate("demo", preroll_seconds=0, duration_seconds=_HOUR).observations)
    curve = sampled(_told(agent, story), total)
    trouble = agent.ledger.conservation_errors or agent.ledger.rejected or agent.last_error()
    if trouble:
        raise RuntimeError(f"this did not go as it should, so it measured something else: {trouble}")
    return curve


def _told(agent: Agent, story: list[Observation]) -> Iterator[int]:
    for hour in count():
        for observation in story:
            agent.take_in(retold(observation, hour))
            yield len(observation.readings)


def retold(observation: Observation, hour: int) -> Observation:
    """Tell the same so many hours later, of jobs of other names."""
    later = hour * _HOUR * SECOND
    allocations = observation.allocations
    return replace(
        observation,
        at=observation.at + later,
        wall=observation.wall + later,
        readings=tuple(replace(r, start=r.start + later, end=r.end + later) for r in observation.readings),
        reports=tuple(_said(each, hour, later) for each in observation.reports),
        serving=tuple(_said(each, hour, later) for each in observation.serving),
        allocations=None if allocations is None else tuple(_renamed(each, hour, later) for each in allocations),
    )


def _said(word: Word, hour: int, later: int) -> Word:
    return replace(word, job_id=f"{word.job_id}-{hour}", start=word.start + later, end=word.end + later)


def _renamed(held: Allocation, hour: int, later: int) -> Allocation:
    owner = replace(held.owner, job_id=f"{held.owner.job_id}-{hour}")
    return replace(held, owner=owner, start=held.start + later, end=None if held.end is None else held.end + later)


def _dcgm(total: int) -> Curve:
    booked = Booked(played("dcgm"))
    curve = sampled(_seconds(booked), total)
    booked.checked()
    return curve


def _seconds(booked: Booked) -> Iterator[int]:
    for second in count(1):
        now = START + second * SECOND
        booked.world.run(now)
        yield booked.tick(now)


def main() -> int:
    what, total = sys.argv[1:3]
    print(json.dumps({"core": _core, "dcgm": _dcgm}[what](int(total))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
