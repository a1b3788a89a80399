"""Models programs of single jobs as sequences of stages: training, serving, notebooks, hangs, waits, slow starts.

Scenarios assign them to GPUs.
"""

from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from exporter.simulate import kernels
from exporter.simulate.boards import CLOCK_STEP_HZ, BoardModel
from exporter.simulate.workload import (
    FOREVER_MS,
    IDLE_CYCLE,
    MINUTE_MS,
    Climate,
    Cycle,
    Stage,
    Stages,
    absent,
    as_program,
)

_HOT_AIR = 0x40 | 0x8
_POWER_BRAKE = 0x80 | 0x8
_CLOCKS_SET = 0x2
"""NVML clock event reasons: HwThermalSlowdown, HwPowerBrakeSlowdown (each with HwSlowdown), and
ApplicationsClocksSetting (nvml.h)."""


def until(stages: Iterator[Stage], ms: int) -> Stages:
    """Yield the first `ms` milliseconds of these stages."""
    left = ms
    for stage in stages:
        yield replace(stage, ms=min(left, stage.ms))
        left -= stage.ms
        if left <= 0:
            return


def bring_up(rng: Random, board: BoardModel) -> Stages:
    """Yield the start of a program: the container without a CUDA context, then weights, then compilation."""
    yield absent("the container starts", rng.randrange(5_000, 15_000))
    loading = kernels.copy_in(board, wire=0.1)
    yield Stage("weights are loaded", rng.randrange(8_000, 20_000), (loading,), memory=0.3)
    yield Stage("kernels are compiled", rng.randrange(10_000, 25_000), (kernels.warm_up(),), memory=0.5)


def _step(board: BoardModel, ranks: int, *, pace: float = 1.0) -> Cycle:
    return kernels.training_step(board, pace=pace, alone=ranks == 1)


def _training(board: BoardModel, ranks: int, ms: int) -> Stage:
    return Stage("training", ms, (_step(board, ranks),), memory=0.85)


@as_program
def training(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Data-parallel training without end, with a checkpoint every half hour."""
    yield from bring_up(rng, board)
    while True:
        yield _training(board, ranks, 30 * MINUTE_MS)
        saving = kernels.copy_out(board, rate=5e9)
        yield Stage("a checkpoint is written", rng.randrange(9_000, 14_000), (saving,), memory=0.85)


@as_program
def starving(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Training with a slow data loader: a wait, a large copy, and some seconds of full speed, repeatedly."""
    waiting, copying = (kernels.no_input(),), (kernels.copy_in(board),)
    step = (_step(board, ranks),)
    while True:
        yield Stage("waiting for input", rng.randrange(4_000, 9_000), waiting, memory=0.85)
        yield Stage("input is copied in", rng.randrange(400, 900), copying, memory=0.85)
        yield Stage("training", rng.randrange(5_000, 10_000), step, memory=0.85)


@as_program
def starved_training(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Training whose input pipeline cannot keep up."""
    yield from bring_up(rng, board)
    yield from starving(board, ranks)(rng)


@as_program
def decoding(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Token generation without end, with a varying number of sequences in flight."""
    yield from bring_up(rng, board)
    while True:
        cycle = kernels.decode(board, batch=rng.uniform(0.9, 1.1), tensor_parallel=ranks > 1)
        yield Stage("decoding", rng.randrange(30_000, 90_000), (cycle,), memory=0.9, program="server")


@as_program
def notebook(rng: Random, board: BoardModel) -> Stages:
    """A notebook whose cells run for some minutes, and which is then left open."""
    yield absent("the container starts", rng.randrange(4_000, 9_000))
    yield Stage("libraries are imported", rng.randrange(8_000, 15_000), (kernels.warm_up(),), memory=0.1)
    for _ in range(3):
        yield Stage("a cell runs", rng.randrange(20_000, 60_000), (_step(board, 1),), memory=0.35)
        yield Stage("someone is reading", rng.randrange(30_000, 90_000), (IDLE_CYCLE,), memory=0.35)
    yield Stage("nobody is at the keyboard", FOREVER_MS, (IDLE_CYCLE,), memory=0.35)


@as_program
def deadlocking(rng: Random, board: BoardModel, ranks: int, *, after_ms: int) -> Stages:
    """Training until one rank does not reach a collective in which all others wait."""
    missing = rng.randrange(ranks)
    yield from until(training(board, ranks)(rng), after_ms)
    yield Stage("one rank never comes", FOREVER_MS, _all_but(missing, ranks), memory=0.85)


def _all_but(missing: int, ranks: int) -> tuple[Cycle, ...]:
    return tuple(IDLE_CYCLE if rank == missing else kernels.polling() for rank in range(ranks))


@as_program
def losing(rng: Random, board: BoardModel, ranks: int, *, missing: int, after_ms: int) -> Stages:
    """Training until one rank's GPU is lost; the others wait for it until the watchdog ends the job."""
    yield from until(training(board, ranks)(rng), after_ms)
    yield Stage("a peer is gone", FOREVER_MS, _all_but(missing, ranks), memory=0.85)


@as_program
def straggling(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Training in which one rank's host launches kernels too slowly, and all others wait for it in every step."""
    pace = 0.64
    wait = kernels.step_ms(board) / pace - kernels.step_ms(board)
    slow = kernels.starved_rank(board, pace)
    waiting = kernels.training_step(board, peer_wait_ms=wait)
    late = rng.randrange(ranks)
    yield from bring_up(rng, board)
    cycles = tuple(slow if rank == late else waiting for rank in range(ranks))
    yield Stage("training with one slow rank", FOREVER_MS, cycles, memory=0.85)


def slowed_clock(board: BoardModel) -> float:
    """Return the SM clock in hertz after a slowdown by about a third: 1,200 MHz on an H100."""
    return CLOCK_STEP_HZ * round(0.656 * board.reference_clock_hz / CLOCK_STEP_HZ)


def _slowed(board: BoardModel, ranks: int, ms: int, *, hot: bool) -> Stage:
    cap = slowed_clock(board)
    hot_air = Climate(cap, event_reasons=_HOT_AIR, inlet_kelvin=45.0)
    climate = hot_air if hot else Climate(cap, event_reasons=_POWER_BRAKE)
    name = "training in hot air" if hot else "training under a power brake"
    step = _step(board, ranks, pace=cap / board.boost_clock_hz)
    return Stage(name, ms, (step,), memory=0.85, climates=(climate,))


@as_program
def slowed_training(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Training for 5 minutes without a slowdown, 10 minutes with hot inlet air, then under a power brake."""
    yield from bring_up(rng, board)
    yield _training(board, ranks, 5 * MINUTE_MS)
    yield _slowed(board, ranks, 10 * MINUTE_MS, hot=True)
    yield _slowed(board, ranks, FOREVER_MS, hot=False)


@as_program
def disturbed_training(rng: Random, board: BoardModel, ranks: int, *, undisturbed_ms: int) -> Stages:
    """Training without disturbance for some time, then with slow input and hot inlet air in turn."""
    yield from until(training(board, ranks)(rng), undisturbed_ms)
    while True:
        yield from until(starving(board, ranks)(rng), 3 * MINUTE_MS)
        yield _training(board, ranks, 3 * MINUTE_MS)
        yield _slowed(board, ranks, 3 * MINUTE_MS, hot=True)
        yield _training(board, ranks, 4 * MINUTE_MS)


@as_program
def single_cycle(_: Random, name: str, cycle: Cycle, *, memory: float = 0.1, program: str = "python") -> Stages:
    """A program that repeats one cycle without end."""
    yield Stage(name, FOREVER_MS, (cycle,), memory=memory, program=program)


def at_reference(board: BoardModel) -> Climate:
    """Clocks locked to the reference clock, at which the dense peak holds."""
    return Climate(board.reference_clock_hz, event_reasons=_CLOCKS_SET)


@as_program
def alternating(_: Random, board: BoardModel) -> Stages:
    """Twenty minutes of constant work and ten of idling in turn, at the reference clock."""
    climates = (at_reference(board),)
    while True:
        for name, minutes, cycle in (("working", 20, kernels.steady()), ("pausing", 10, IDLE_CYCLE)):
            yield Stage(name, minutes * MINUTE_MS, (cycle,), memory=0.5, climates=climates)


def first_minutes(rng: Random, board: BoardModel, ranks: int) -> Stages:
    """Training for a random time of five to seven minutes."""
    yield from until(training(board, ranks)(rng), rng.randrange(5 * MINUTE_MS, 7 * MINUTE_MS))


def endless_training(board: BoardModel, *, alone: bool = False) -> Stage:
    """Training until the job is ended."""
    return Stage("training", FOREVER_MS, (kernels.training_step(board, alone=alone),), memory=0.85)


@as_program
def rank0_alone(
    rng: Random,
    board: BoardModel,
    ranks: int,
    *,
    name: str,
    doing: Cycle,
    ms: int,
    rank0_here: bool = True,
    begun: bool = True,
) -> Stages:
    """Training in which rank 0 once does something alone, while all others wait in a collective.

    `rank0_here`: rank 0 is on this node. `begun`: training steps precede it.
    """
    parts = tuple(doing if rank0_here and rank == 0 else kernels.polling() for rank in range(ranks))
    yield from first_minutes(rng, board, 2) if begun else bring_up(rng, board)
    yield Stage(name, ms, parts, memory=0.85)
    yield endless_training(board)


@as_program
def hanging(
    rng: Random,
    board: BoardModel,
    ranks: int,
    *,
    name: str,
    waits: Cycle,
    absent: Cycle | None = None,
    begun: bool = True,
) -> Stages:
    """Training until all ranks of this node wait without end; if `absent` is given, rank 0 does that instead.

    `begun`: training steps precede it.
    """
    parts = (waits,) if absent is None else (absent, *[waits] * (ranks - 1))
    yield from first_minutes(rng, board, ranks) if begun else bring_up(rng, board)
    yield Stage(name, FOREVER_MS, parts, memory=0.85)


@as_program
def long_preparation(rng: Random, board: BoardModel, ranks: int, *, name: str, doing: Cycle, minutes: int) -> Stages:
    """Training after a preparation of this many minutes."""
    yield absent("the container starts", rng.randrange(5_000, 15_000))
    yield Stage(name, minutes * MINUTE_MS, (doing,), memory=0.5)
    yield _training(board, ranks, FOREVER_MS)


@as_program
def repeating(rng: Random, *rounds: tuple[str, float, Cycle], program: str = "python", memory: float = 0.4) -> Stages:
    """A start, then these rounds repeatedly: name, minutes, cycle."""
    yield absent("the container starts", rng.randrange(4_000, 9_000))
    yield Stage("libraries are imported", rng.randrange(8_000, 15_000), (kernels.warm_up(),), memory=0.1)
    while True:
        for name, minutes, cycle in rounds:
            yield Stage(name, round(minutes * MINUTE_MS), (cycle,), memory=memory, program=program)
