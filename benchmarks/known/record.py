"""One load through the real source and the real ledger, sample by sample, and into a trace that can be kept.

Owns the pace of sampling and what is remembered of the ledger after each sample. Refuses to compare anything. The
sampling is a plain loop: source, Observation, `advance`; the agent's deadline and retries have nothing to say here.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.known.loads import HANG_SECONDS, Load
from benchmarks.known.stage import Report, Stage
from exporter.clock import Clock
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import MS, SECOND, Allocation, Device, Observation, Owner, Reading, State
from exporter.core.pipeline import advance
from exporter.core.policy import Policy
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.sources.base import TelemetrySource
from exporter.trace import TraceHeader, TraceWriter

POLICY = Policy(hang_suspect_seconds=HANG_SECONDS / 2, hang_seconds=HANG_SECONDS, hang_peer_seconds=HANG_SECONDS)
"""The daemon's own, but for the time until a spin is called hung."""
USER = "accuracy"


class Tick(Struct, frozen=True):
    """The ledger's book of the GPU after one sample. Nanoseconds, since the recording began."""

    at: int
    paid: int
    parts: dict[str, int]
    """By leak and outcome."""
    engine: int
    """With a kernel."""
    state: State
    reason: str
    suspected: bool
    """Of hanging."""
    reading: Reading | None
    """The latest that was accepted."""


class Recording(Struct, frozen=True):
    """A load as the ledger saw it, and as it tells of itself."""

    load: Load
    ticks: tuple[Tick, ...]
    report: Report
    faults: tuple[str, ...] = ()
    """What the source said went wrong, each once."""


class Bench(Struct, frozen=True):
    """What every recording needs."""

    source: TelemetrySource
    clock: Clock
    device: Device
    folder: Path
    header: TraceHeader


def record(bench: Bench, stage: Stage, load: Load) -> Recording:
    """Sample from before the load begins until it is over. Raises SourceError, StageError and TraceError."""
    ledger, ticks, faults = Ledger(POLICY), list[Tick](), dict[str, None]()
    bench.source.resync()
    with TraceWriter(trace_of(bench.folder, load), _header(bench, load), overwrite=True) as trace:
        for observation in _observations(bench, stage, load):
            trace.append(observation)
            advance(ledger, observation)
            faults.update((fault.message or fault.kind, None) for fault in observation.faults)
            ticks.append(_tick(ledger, bench.device.uuid))
    if ledger.conservation_errors:
        raise AssertionError(f"{load.name}: the ledger does not add up: this is a fault of ours, please report it")
    return Recording(load, tuple(ticks), stage.report(), tuple(faults))


def trace_of(folder: Path, load: Load) -> Path:
    """Where a load's trace is kept."""
    return folder / f"{load.name}.jsonl.gz"


def _header(bench: Bench, load: Load) -> TraceHeader:
    return replace(bench.header, created_wall=bench.clock.wall(), note=f"accuracy: {load.name}; {bench.header.note}")


def _observations(bench: Bench, stage: Stage, load: Load) -> Iterator[Observation]:
    """One observation an interval; the first, the source's baseline, before the load begins."""
    clock, nobody_stops = bench.clock, threading.Event()
    due, step = clock.now(), round(load.interval * 1000) * MS
    yield replace(_observe(bench, due), devices=(bench.device,), allocations=(_held(bench.device, load, due),))
    stage.begin(load)
    while not stage.over():
        due = max(due + step, clock.now() + step // 2)
        clock.wait(due, nobody_stops)
        yield _observe(bench, clock.now())


def _observe(bench: Bench, now: int) -> Observation:
    """What the source says of the one GPU; the others of the node are no part of this."""
    uuid, batch = bench.device.uuid, bench.source.read(now)
    return Observation(
        at=now,
        wall=bench.clock.wall(),
        readings=tuple(reading for reading in batch.readings if reading.uuid == uuid),
        settled=batch.settled,
        source=bench.source.name,
        faults=tuple(fault for fault in batch.faults if fault.uuid in ("", uuid)),
        health=tuple(health for health in batch.health if health.uuid == uuid),
    )


def _held(device: Device, load: Load, now: int) -> Allocation:
    """The load holds the GPU, and has for a while: it is past its start-up, whose waiting is booked apart."""
    return Allocation(device.uuid, Owner(f"accuracy/{load.name}", "accuracy", USER), start=now - SECOND)


def _tick(ledger: Ledger, uuid: str) -> Tick:
    (gpu,) = (gpu for gpu in take_snapshot(ledger, DaemonMetadata()).gpus if gpu.device.uuid == uuid)
    book = gpu.counters.now
    parts = dict(zip(LEAK_NAMES, book.parts, strict=True))
    return Tick(book.until, book.paid, parts, book.engine, gpu.state, gpu.reason, gpu.hang_suspected, gpu.reading)
