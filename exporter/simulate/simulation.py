"""Simulates one node as a stream of Observations from a physical model.

Owns the loop that runs a plan through boards and sensors, and board health. Emits only what hardware and a scheduler
would report; the ground truth is written to another file. Of the core it imports only core.model: it must not know the
rules of classification, so that the simulation can test them independently.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import MS, Allocation, Device, Fault, Health, Observation, Reading
from exporter.simulate.boards import BOARDS, BoardModel, BoardSensors
from exporter.simulate.plan import GroundTruth, Plan, Scenario, Setting, TimelineInterval, ground_truth, timeline
from exporter.simulate.reporting import emitter, reports, servings
from exporter.simulate.scenarios import SCENARIOS
from exporter.simulate.workload import FOREVER_MS, Load, add_loads, seeded_random

HEALTH_PERIOD_MS = 10_000
"""Interval at which a daemon reads board health."""
_OFF_THE_BUS = 79
"""NVIDIA's Xid document: "GPU has fallen off the bus"."""
_SLOWDOWN_CELSIUS = 87.0
_MEMORY_ABOVE_CHIP = 6.0


_NVLINK_SIGNALS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
PROFILED = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active",
    "fp16_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second", *_NVLINK_SIGNALS,
)  # fmt: skip
"""Signals from performance counters, which serve one client at a time; the driver itself provides the others."""


class Simulation(Struct, frozen=True, kw_only=True):
    """One simulated node. `observations` and `truth` start from the beginning at each access."""

    scenario: str
    host: str
    board: BoardModel
    uuids: tuple[str, ...]
    plan: Plan
    seed: int
    node: int
    start: int
    """Monotonic nanoseconds of the first Observation."""
    wall: int
    """The same time in Unix nanoseconds."""
    period_ms: int
    preroll_ms: int
    """Time simulated first, in coarse steps, before the live part."""
    preroll_period_ms: int
    duration_ms: int
    """Total, including the pre-roll."""

    @property
    def live_from(self) -> int:
        """Monotonic nanoseconds at which the pre-roll ends; `start` if there is none."""
        return self.start + self.preroll_ms * MS

    @property
    def observations(self) -> Iterator[Observation]:
        """Yields every Observation in order; the first has devices and allocations but no reading."""
        return _observations(self)

    @property
    def truth(self) -> Iterator[GroundTruth]:
        """Yields every change of the ground truth; `at` is monotonic nanoseconds."""
        entries = ground_truth(self.plan, self.uuids, board=self.board, seed=self.seed, end_ms=self.duration_ms)
        return (replace(entry, at=self.start + entry.at) for entry in entries)

    def write_truth(self, path: str | Path) -> None:
        """Write the ground truth as JSON lines to a file other than the trace."""
        encode = msgspec.json.Encoder().encode
        with Path(path).open("wb") as file:
            file.writelines(encode(entry) + b"\n" for entry in self.truth)


def node_uuids(seed: int, node: int, gpus: int) -> tuple[str, ...]:
    """Return one UUID per GPU in the driver's format, unique across seeds and nodes."""
    rng = seeded_random(seed, node, "uuid")
    return tuple(f"GPU-{UUID(int=rng.getrandbits(128), version=4)}" for _ in range(gpus))


class _SimulatedGpu:
    """One GPU: its timeline and its sensors."""

    def __init__(self, simulation: Simulation, slot: int) -> None:
        plan, board, seed = simulation.plan, simulation.board, simulation.seed
        self._intervals = timeline(plan, slot, board=board, seed=seed)
        self._current = next(self._intervals)
        noise = seeded_random(seed, simulation.node, slot, "sensors")
        self._sensors = BoardSensors(board, simulation.uuids[slot], noise, noise=plan.noise, floor=plan.power_floor)

    def read(self, start: int, end: int, *, offset: int) -> Reading:
        """Advance from `start` to `end` and read the sensors; `offset` is added to the reading's times."""
        load, interval = self._advance(start, end)
        return self._sensors.read(
            start + offset, end + offset, load=load, climate=interval.climate, process=interval.process
        )

    def _advance(self, start: int, end: int) -> tuple[Load, TimelineInterval]:
        """Return the mean load over [start, end) milliseconds, and the timeline interval at its end."""
        total, now = Load(), start
        while now < end:
            interval = self._current
            until = min(end, interval.end)
            part = interval.cycle.integral(now - interval.origin, until - interval.origin)
            total = part if now == start else add_loads(total, part)
            if now < until == interval.end:
                self._current = next(self._intervals)
            now = until
        return Load(*[max(0.0, value / (end - start)) for value in total]), interval


def _ticks(simulation: Simulation) -> Iterator[int]:
    """Yield the times of Observations, in milliseconds after the first: coarse in the pre-roll, then every period."""
    yield from range(simulation.preroll_period_ms, simulation.preroll_ms, simulation.preroll_period_ms)
    if simulation.preroll_ms:
        yield simulation.preroll_ms
    first = simulation.preroll_ms + simulation.period_ms
    yield from range(first, simulation.duration_ms + 1, simulation.period_ms)


def _observations(simulation: Simulation) -> Iterator[Observation]:
    plan, uuids, board, seed = simulation.plan, simulation.uuids, simulation.board, simulation.seed
    gpus = [_SimulatedGpu(simulation, slot) for slot in range(len(uuids))]
    new_reports = emitter(reports(plan, uuids, board=board, seed=seed), simulation.start)
    new_polls = emitter(servings(plan, uuids, board=board, seed=seed), simulation.start)
    yield _observation(simulation, -1, 0, readings=())
    before = 0
    was_silent = False
    for now in _ticks(simulation):
        if plan.stands_still(now):
            was_silent = True
            continue
        offset = simulation.start // MS
        readings = tuple(gpu.read(before, now, offset=offset) for gpu in gpus)
        silent = plan.silent(now)
        # The first response after a silence only sets the counters' baseline: rates need two.
        visible = () if silent or was_silent else _visible_readings(simulation, readings, now)
        observation = _observation(simulation, before, now, readings=visible)
        yield replace(observation, reports=new_reports(now * MS), serving=new_polls(now * MS))
        before, was_silent = now, silent


def _visible_readings(simulation: Simulation, readings: tuple[Reading, ...], now: int) -> tuple[Reading, ...]:
    plan = simulation.plan
    answered = tuple(r for slot, r in enumerate(readings) if not plan.lost(slot, now))
    return tuple(_left_by_profiler(r, plan) for r in answered) if plan.profiled(now) else answered


def _left_by_profiler(reading: Reading, plan: Plan) -> Reading:
    if plan.profiler_leaves == "stale":
        return replace(reading, distrust="stale")
    left = 0.0 if plan.profiler_leaves == "zeros" else None
    blank: dict[str, float | None] = {name: left for name in PROFILED if getattr(reading, name) is not None}
    return replace(reading, **blank)


def _observation(simulation: Simulation, before: int, now: int, *, readings: tuple[Reading, ...]) -> Observation:
    """Build the Observation at `now`, with devices and allocations only if they changed after `before`."""
    plan = simulation.plan

    def changed(*times_ms: int) -> bool:
        return before < 0 or any(before < at <= now for at in times_ms)

    devices_changed = changed(*plan.lost_ms.values(), *plan.drained_ms.values())
    answered = plan.answered_ms(now)
    allocations_changed = changed(*(at for job in plan.jobs for at in (job.start_ms, job.end_ms)))
    return Observation(
        at=simulation.start + now * MS,
        wall=simulation.wall + (now + plan.clock_ahead_ms) * MS,
        readings=readings,
        devices=_devices(simulation, now) if devices_changed else None,
        allocations=_allocations(simulation, before, now) if allocations_changed else None,
        allocations_at=None if answered is None else simulation.start + answered * MS,
        source="simulation",
        faults=_faults(simulation, now),
        health=_health_readings(simulation, readings, before, now),
    )


def _devices(simulation: Simulation, now: int) -> tuple[Device, ...]:
    board = simulation.board
    return tuple(
        Device(
            uuid=uuid,
            index=str(slot),
            model=board.driver_name,
            spec=board.sliceable_spec if simulation.plan.slices_known else board.spec,
            lacks=() if board.nvlink else _NVLINK_SIGNALS,
            condition=simulation.plan.condition(slot, now),
        )
        for slot, uuid in enumerate(simulation.uuids)
    )


def _allocations(simulation: Simulation, before: int, now: int) -> tuple[Allocation, ...]:
    """Return allocations that are active at `now` or ended since `before`."""
    return tuple(
        replace(held, start=simulation.start + held.start, end=held.end and simulation.start + held.end)
        for job in simulation.plan.jobs
        if job.start_ms <= now and job.end_ms > before
        for held in (job.allocation(slot, simulation.uuids[slot], now_ms=now) for slot in job.slots)
    )


def _health_readings(
    simulation: Simulation, readings: tuple[Reading, ...], before: int, now: int
) -> tuple[Health, ...]:
    """Return board health if due between two ticks (milliseconds), and the Xid of each GPU lost between them."""
    plan = simulation.plan
    health = [
        Health(simulation.uuids[slot], xids=(_OFF_THE_BUS,))
        for slot, lost_at in sorted(plan.lost_ms.items())
        if before < lost_at <= now
    ]
    if now // HEALTH_PERIOD_MS > before // HEALTH_PERIOD_MS:
        health += [_healthy(reading, simulation.board, smooths=plan.power_floor > 0) for reading in readings]
    return tuple(health)


def _healthy(reading: Reading, board: BoardModel, *, smooths: bool) -> Health:
    celsius = reading.temperature_celsius or 0.0
    return Health(
        uuid=reading.uuid,
        recovery_action=0,
        ecc_corrected=0,
        ecc_uncorrected=0,
        row_remap_pending=False,
        row_remap_failed=False,
        nvlink_errors=0 if board.nvlink else None,
        memory_temperature_celsius=celsius + _MEMORY_ABOVE_CHIP,
        temperature_margin_celsius=_SLOWDOWN_CELSIUS - celsius,
        power_smoothing=smooths,
    )


def _faults(simulation: Simulation, now: int) -> tuple[Fault, ...]:
    plan = simulation.plan
    if plan.silent(now):
        return (Fault("source_failed", "simulated: the telemetry source does not answer"),)
    refuses = plan.profiler_leaves == "refusal" and plan.profiled(now)
    refused = (Fault("profiling_refused", "simulated: the driver refuses the performance counters"),) if refuses else ()
    return refused + tuple(
        Fault("gpu_lost", "simulated: the GPU has fallen off the bus", uuid)
        for slot, uuid in enumerate(simulation.uuids)
        if plan.lost(slot, now)
    )


DEFAULT_WALL = 1_767_225_600 * 1_000_000_000
"""2026-01-01 00:00 UTC in Unix nanoseconds: fixed, so that the same seed gives the same bytes."""
_PREROLL_PERIOD_MS = 60_000
_MS_GRAIN = 1e-6
"""Tolerance in milliseconds for rounding seconds to whole milliseconds."""

Row = TypeVar("Row")


def simulate(
    scenario: str,
    *,
    seed: int = 0,
    board: str = "H100-SXM5-80GB",
    period_seconds: float = 1.0,
    duration_seconds: float | None = None,
    preroll_seconds: float | None = None,
    gpus: int = 8,
    node: int = 0,
    stories: Mapping[str, Scenario] = SCENARIOS,
    start: int = 0,
    wall: int = DEFAULT_WALL,
) -> Simulation:
    """Set up the simulation of one node; Observations are computed only when they are iterated.

    `start` is monotonic nanoseconds on a whole millisecond, `wall` Unix nanoseconds of the same time.
    `duration_seconds` is added to `preroll_seconds` (both default to the scenario's own; the duration may be infinite).
    Nodes of one fleet share the seed and differ in `node`. `stories` is the table that contains `scenario`, for
    example SCENARIOS, LEAK_SCENARIOS or WATERFALL_SCENARIOS. The same arguments give the same bytes.
    Raises ValueError for an unknown scenario or board, a time that is not whole milliseconds, or too few GPUs.
    """
    row = _lookup(scenario, stories, "scenario")
    if gpus < row.min_gpus:
        raise ValueError(f"scenario {scenario} needs at least {row.min_gpus} GPUs, not {gpus}")
    if start % MS:
        raise ValueError(f"start is {start} ns: it must lie on a whole millisecond")
    preroll = _whole_ms(row.preroll_seconds if preroll_seconds is None else preroll_seconds, "preroll_seconds")
    duration = _whole_ms(row.duration_seconds if duration_seconds is None else duration_seconds, "duration_seconds")
    period = _positive_ms(period_seconds, "period_seconds")
    setting = Setting(
        board=_lookup(board, BOARDS, "board"),
        gpus=gpus,
        node=node,
        preroll_ms=preroll,
        duration_ms=preroll + duration,
    )
    return Simulation(
        scenario=scenario,
        host=f"gpu-node-{node:02d}",
        board=setting.board,
        uuids=node_uuids(seed, node, gpus),
        plan=row.plan(setting),
        seed=seed,
        node=node,
        start=start,
        wall=wall,
        period_ms=period,
        preroll_ms=preroll,
        preroll_period_ms=max(_PREROLL_PERIOD_MS, period),
        duration_ms=setting.duration_ms,
    )


def _lookup(name: str, table: Mapping[str, Row], kind: str) -> Row:
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(table)}") from None


def _whole_ms(seconds: float, name: str) -> int:
    if seconds == math.inf:
        return FOREVER_MS
    ms = seconds * 1000
    if not ms >= 0 or abs(ms - round(ms)) > _MS_GRAIN:
        raise ValueError(f"{name} is {seconds}: it must be seconds in whole milliseconds, 0 or more")
    return round(ms)


def _positive_ms(seconds: float, name: str) -> int:
    ms = _whole_ms(seconds, name)
    if ms < 1:
        raise ValueError(f"{name} is {seconds}: it must be a millisecond or more")
    return ms
