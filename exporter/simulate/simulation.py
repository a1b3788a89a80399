"""A node that never was, telling its story as Observations.

Owns the loop that plays a plan through sensors, and `without`, which takes a signal away. Refuses to look at what
becomes of the Observations.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from exporter.core.model import MS, Allocation, Device, Fault, Observation, Reading, Report, Serving
from exporter.simulate.boards import Board
from exporter.simulate.plan import Piece, Plan, Truth, timeline, truth
from exporter.simulate.sensors import Meter
from exporter.simulate.speaking import reports, servings, teller
from exporter.simulate.vitals import vitals
from exporter.simulate.work import Load, add, dice

_NVLINK_SIGNALS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
PROFILED = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active",
    "fp16_active", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second", *_NVLINK_SIGNALS,
)  # fmt: skip
"""What the hardware's performance counters give, one client at a time; the rest is the driver's own."""


class Simulation(Struct, frozen=True, kw_only=True):
    """One node's story. Both `observations` and `truth` start anew each time they are asked for."""

    scenario: str
    host: str
    board: Board
    uuids: tuple[str, ...]
    plan: Plan
    seed: int
    node: int
    start: int
    """Monotonic nanoseconds of the first Observation."""
    wall: int
    """The same moment in Unix nanoseconds."""
    period_ms: int
    preroll_ms: int
    """How much of the story comes first, in coarse steps, to be fed before anyone watches."""
    preroll_period_ms: int
    duration_ms: int
    """How long the story is altogether, the pre-roll included."""

    @property
    def live_from(self) -> int:
        """Monotonic nanoseconds at which the pre-roll is over: `start` when there is none."""
        return self.start + self.preroll_ms * MS

    @property
    def observations(self) -> Iterator[Observation]:
        """Every Observation in order, lazily; the first has devices and allocations and no reading."""
        return _observations(self)

    @property
    def truth(self) -> Iterator[Truth]:
        """What really went on, change by change, for a file of its own; `at` is monotonic nanoseconds."""
        entries = truth(self.plan, self.uuids, board=self.board, seed=self.seed, end_ms=self.duration_ms)
        return (replace(entry, at=self.start + entry.at) for entry in entries)

    def write_truth(self, target: str | Path | BinaryIO) -> None:
        """Write the truth as JSON lines, to a path or an open binary file: never into the trace itself."""
        if isinstance(target, (str, Path)):
            with Path(target).open("wb") as file:
                self.write_truth(file)
            return
        encode = msgspec.json.Encoder().encode
        target.writelines(encode(entry) + b"\n" for entry in self.truth)


def node_uuids(seed: int, node: int, gpus: int) -> tuple[str, ...]:
    """Names as the driver makes them up, one a GPU; no two seeds or nodes share one."""
    rng = dice(seed, node, "uuid")
    return tuple(f"GPU-{UUID(int=rng.getrandbits(128), version=4)}" for _ in range(gpus))


class _Player:
    """Follows one GPU's timeline, and gives its mean load over one interval after another."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._now = next(pieces)

    def play(self, start: int, end: int) -> tuple[Load, Piece]:
        """Mean load over [start, end) milliseconds, and the piece that is on at its end."""
        total, here = Load(), start
        while here < end:
            piece = self._now
            until = min(end, piece.end)
            part = piece.cycle.integral(here - piece.origin, until - piece.origin)
            total = part if here == start else add(total, part)
            if here < until == piece.end:
                self._now = next(self._pieces)
            here = until
        return Load(*[max(0.0, value / (end - start)) for value in total]), piece


class _Gpu:
    """One GPU: what is done to it, and what its sensors say."""

    def __init__(self, simulation: Simulation, slot: int) -> None:
        plan, board, seed = simulation.plan, simulation.board, simulation.seed
        uuid = simulation.uuids[slot]
        self._player = _Player(timeline(plan, slot, board=board, seed=seed))
        noise = dice(seed, simulation.node, slot, "sensors")
        self._meter = Meter(board, uuid, noise, noise=plan.noise, floor=plan.power_floor)

    def read(self, start: int, end: int, *, offset: int) -> Reading:
        """Play on from `start` to `end`, and read the sensors; time in the reading is moved by `offset`."""
        load, piece = self._player.play(start, end)
        return self._meter.read(start + offset, end + offset, load=load, climate=piece.climate, process=piece.process)


def _ticks(simulation: Simulation) -> Iterator[int]:
    """Milliseconds after the first Observation: coarse through the pre-roll, then every period."""
    yield from range(simulation.preroll_period_ms, simulation.preroll_ms, simulation.preroll_period_ms)
    if simulation.preroll_ms:
        yield simulation.preroll_ms
    first = simulation.preroll_ms + simulation.period_ms
    yield from range(first, simulation.duration_ms + 1, simulation.period_ms)


def _observations(simulation: Simulation) -> Iterator[Observation]:
    gpus = [_Gpu(simulation, slot) for slot in range(len(simulation.uuids))]
    reported, answered = _told(simulation)
    yield _observation(simulation, -1, 0, readings=())
    before = 0
    blind = False
    for now in _ticks(simulation):
        offset = simulation.start // MS
        readings = tuple(gpu.read(before, now, offset=offset) for gpu in gpus)
        silent = simulation.plan.silent(now)
        # The first answer after a silence only sets the counters' baseline: rates need two.
        kept = () if silent or blind else _answering(simulation, readings, now)
        seen = _observation(simulation, before, now, readings=kept)
        yield replace(seen, reports=reported(now * MS), serving=answered(now * MS))
        before, blind = now, silent


def _told(simulation: Simulation) -> tuple[Callable[[int], tuple[Report, ...]], Callable[[int], tuple[Serving, ...]]]:
    """Give two functions of time (ns from the first Observation): what processes and engines have said since."""
    plan, uuids, board, seed = simulation.plan, simulation.uuids, simulation.board, simulation.seed
    reported = reports(plan, uuids, board=board, seed=seed)
    answered = servings(plan, uuids, board=board, seed=seed)
    return teller(reported, simulation.start), teller(answered, simulation.start)


def _answering(simulation: Simulation, readings: tuple[Reading, ...], now: int) -> tuple[Reading, ...]:
    plan = simulation.plan
    heard = tuple(r for slot, r in enumerate(readings) if not plan.lost(slot, now))
    return tuple(_left_by_profiler(r, plan) for r in heard) if plan.profiled(now) else heard


def _left_by_profiler(reading: Reading, plan: Plan) -> Reading:
    if plan.profiler_leaves == "stale":
        return replace(reading, distrust="stale")
    left = None if plan.profiler_leaves == "nothing" else 0.0
    blank: dict[str, float | None] = {name: left for name in PROFILED if getattr(reading, name) is not None}
    return replace(reading, **blank)


def _observation(simulation: Simulation, before: int, now: int, *, readings: tuple[Reading, ...]) -> Observation:
    """Tell what changed after `before` and up to `now`."""
    first = before < 0
    return Observation(
        at=simulation.start + now * MS,
        wall=simulation.wall + now * MS,
        readings=readings,
        devices=_devices(simulation, now) if first or _changed_between(simulation.plan, before, now) else None,
        allocations=_allocations(simulation, before, now) if first or _moved(simulation, before, now) else None,
        source="simulation",
        faults=_faults(simulation, now),
        health=vitals(simulation.plan, simulation.board, simulation.uuids, readings, before=before, now=now),
    )


def _changed_between(plan: Plan, before: int, now: int) -> bool:
    return any(before < moment <= now for moment in (*plan.lost_ms.values(), *plan.drained_ms.values()))


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


def _moved(simulation: Simulation, before: int, now: int) -> bool:
    return any(before < moment <= now for job in simulation.plan.jobs for moment in (job.start_ms, job.end_ms))


def _allocations(simulation: Simulation, before: int, now: int) -> tuple[Allocation, ...]:
    """Every hold that is on at `now`, or ended since `before`."""
    return tuple(
        replace(held, start=simulation.start + held.start, end=held.end and simulation.start + held.end)
        for job in simulation.plan.jobs
        if job.start_ms <= now and job.end_ms > before
        for held in (job.allocation(simulation.uuids[slot], now_ms=now) for slot in job.slots)
    )


def _faults(simulation: Simulation, now: int) -> tuple[Fault, ...]:
    if simulation.plan.silent(now):
        return (Fault("source_failed", "simulated: the telemetry source does not answer"),)
    return tuple(
        Fault("gpu_lost", "simulated: the GPU has fallen off the bus", uuid)
        for slot, uuid in enumerate(simulation.uuids)
        if simulation.plan.lost(slot, now)
    )


_SIGNALS = frozenset(field.name for field in fields(Reading)) - {"uuid", "start", "end", "distrust"}
_WHOLE = frozenset({"owner", "spec"})


def without(observations: Iterable[Observation], *, signals: Collection[str]) -> Iterator[Observation]:
    """Tell the same story as a node that cannot see these signals: fields of Reading, "owner" or "spec".

    "owner" takes the allocations away, "spec" what is known of the board. Raises ValueError for any other name.
    """
    unknown = sorted(set(signals) - _SIGNALS - _WHOLE)
    if unknown:
        known = ", ".join(sorted(_SIGNALS | _WHOLE))
        raise ValueError(f"no signal is called {', '.join(unknown)}; there are {known}")
    blank: dict[str, None] = dict.fromkeys(_SIGNALS.intersection(signals))
    return (_blanked(observation, blank, frozenset(signals) & _WHOLE) for observation in observations)


def _blanked(observation: Observation, blank: dict[str, None], whole: frozenset[str]) -> Observation:
    devices = observation.devices
    if devices is not None and "spec" in whole:
        devices = tuple(replace(device, spec=None) for device in devices)
    return replace(
        observation,
        readings=tuple(replace(reading, **blank) for reading in observation.readings),
        devices=devices,
        allocations=None if "owner" in whole else observation.allocations,
    )
