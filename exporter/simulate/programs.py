"""What a job's processes do from first to last: stages in the order a real program goes through them.

Owns the stories of single jobs. Refuses who holds the GPUs: that is `scenarios`.
"""

from collections.abc import Callable, Iterator
from random import Random

from msgspec.structs import replace

from exporter.simulate import kernels
from exporter.simulate.boards import CLOCK_STEP_HZ, Board
from exporter.simulate.work import FOREVER_MS, NOTHING, Climate, Cycle, Stage, Stages

Program = Callable[[Random], Stages]
MINUTE_MS = 60_000

_HOT_AIR = 0x40 | 0x8
_POWER_BRAKE = 0x80 | 0x8
_CLOCKS_SET = 0x2
"""NVML clock event reasons: HwThermalSlowdown, HwPowerBrakeSlowdown (each with HwSlowdown), and
ApplicationsClocksSetting (nvml.h)."""


def until(stages: Iterator[Stage], ms: int) -> Stages:
    """The first `ms` milliseconds of these stages."""
    left = ms
    for stage in stages:
        yield replace(stage, ms=min(left, stage.ms))
        left -= stage.ms
        if left <= 0:
            return


def bring_up(rng: Random, board: Board) -> Stages:
    """Container, weights, compilation: a process, then a context, then work."""
    yield Stage("the container starts", rng.randrange(5_000, 15_000), (NOTHING,), context=False)
    loading = kernels.copy_in(board, wire=0.1)
    yield Stage("weights are loaded", rng.randrange(8_000, 20_000), (loading,), memory=0.3)
    yield Stage("kernels are compiled", rng.randrange(10_000, 25_000), (kernels.warm_up(),), memory=0.5)


def _step(board: Board, ranks: int, *, pace: float = 1.0) -> Cycle:
    return kernels.training_step(board, pace=pace, alone=ranks == 1)


def _training(board: Board, ranks: int, ms: int) -> Stage:
    return Stage("training", ms, (_step(board, ranks),), memory=0.85)


def training(board: Board, ranks: int) -> Program:
    """Data-parallel training without end, a checkpoint every half hour."""

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, board)
        while True:
            yield _training(board, ranks, 30 * MINUTE_MS)
            saving = kernels.copy_out(board, rate=5e9)
            yield Stage("a checkpoint is written", rng.randrange(9_000, 14_000), (saving,), memory=0.85)

    return stages


def starving(board: Board, ranks: int) -> Program:
    """Rounds of a loader too slow for its GPUs: a wait, one big copy, and a stretch of full speed."""
    waiting, copying = (kernels.no_input(),), (kernels.copy_in(board),)
    step = (_step(board, ranks),)

    def stages(rng: Random) -> Stages:
        while True:
            yield Stage("waiting for input", rng.randrange(4_000, 9_000), waiting, memory=0.85)
            yield Stage("input is copied in", rng.randrange(400, 900), copying, memory=0.85)
            yield Stage("training", rng.randrange(5_000, 10_000), step, memory=0.85)

    return stages


def starved_training(board: Board, ranks: int) -> Program:
    """Training whose input pipeline cannot keep up."""

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, board)
        yield from starving(board, ranks)(rng)

    return stages


def decoding(board: Board, ranks: int) -> Program:
    """Serving tokens without end; the number of sequences in flight drifts."""

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, board)
        while True:
            cycle = kernels.decode(board, batch=rng.uniform(0.9, 1.1), tensor_parallel=ranks > 1)
            yield Stage("decoding", rng.randrange(30_000, 90_000), (cycle,), memory=0.9, program="server")

    return stages


def notebook(board: Board) -> Program:
    """Cells run for some minutes; then the tab is left open."""

    def stages(rng: Random) -> Stages:
        yield Stage("the container starts", rng.randrange(4_000, 9_000), (NOTHING,), context=False)
        yield Stage("libraries are imported", rng.randrange(8_000, 15_000), (kernels.warm_up(),), memory=0.1)
        for _ in range(3):
            yield Stage("a cell runs", rng.randrange(20_000, 60_000), (_step(board, 1),), memory=0.35)
            yield Stage("someone is reading", rng.randrange(30_000, 90_000), (NOTHING,), memory=0.35)
        yield Stage("nobody is at the keyboard", FOREVER_MS, (NOTHING,), memory=0.35)

    return stages


def deadlocking(board: Board, ranks: int, *, after_ms: int) -> Program:
    """Training, until one rank never reaches a collective that all the others are in."""

    def stages(rng: Random) -> Stages:
        missing = rng.randrange(ranks)
        yield from until(training(board, ranks)(rng), after_ms)
        yield Stage("one rank never comes", FOREVER_MS, _all_but(missing, ranks), memory=0.85)

    return stages


def _all_but(missing: int, ranks: int) -> tuple[Cycle, ...]:
    return tuple(NOTHING if rank == missing else kernels.polling() for rank in range(ranks))


def losing(board: Board, ranks: int, *, missing: int, after_ms: int) -> Program:
    """Training, until one rank's GPU is gone and the rest wait for it until the watchdog ends the job."""

    def stages(rng: Random) -> Stages:
        yield from until(training(board, ranks)(rng), after_ms)
        yield Stage("a peer is gone", FOREVER_MS, _all_but(missing, ranks), memory=0.85)

    return stages


def straggling(board: Board, ranks: int, *, pace: float = 0.64) -> Program:
    """Training in which one rank's host cannot launch kernels fast enough, and all others wait every step."""
    wait = kernels.step_ms(board) / pace - kernels.step_ms(board)
    slow = kernels.starved_rank(board, pace)
    waiting = kernels.training_step(board, peer_wait_ms=wait)

    def stages(rng: Random) -> Stages:
        late = rng.randrange(ranks)
        yield from bring_up(rng, board)
        cycles = tuple(slow if rank == late else waiting for rank in range(ranks))
        yield Stage("training with one slow rank", FOREVER_MS, cycles, memory=0.85)

    return stages


def slowed_clock(board: Board) -> float:
    """Give the clock in hertz that a slowdown of about a third leaves: 1,200 MHz on an H100."""
    return CLOCK_STEP_HZ * round(0.656 * board.reference_clock_hz / CLOCK_STEP_HZ)


def _slowed(board: Board, ranks: int, ms: int, *, hot: bool) -> Stage:
    cap = slowed_clock(board)
    hot_air = Climate(cap, event_reasons=_HOT_AIR, inlet_kelvin=45.0)
    climate = hot_air if hot else Climate(cap, event_reasons=_POWER_BRAKE)
    name = "training in hot air" if hot else "training under a power brake"
    step = _step(board, ranks, pace=cap / board.boost_clock_hz)
    return Stage(name, ms, (step,), memory=0.85, climates=(climate,))


def slowed_training(board: Board, ranks: int) -> Program:
    """Training: five minutes undisturbed, ten in air too hot, then under the power supply's brake."""

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, board)
        yield _training(board, ranks, 5 * MINUTE_MS)
        yield _slowed(board, ranks, 10 * MINUTE_MS, hot=True)
        yield _slowed(board, ranks, FOREVER_MS, hot=False)

    return stages


def eventful_training(board: Board, ranks: int, *, calm_ms: int) -> Program:
    """Training that meets, after a calm stretch, slow input and hot air by turns."""

    def stages(rng: Random) -> Stages:
        yield from until(training(board, ranks)(rng), calm_ms)
        while True:
            yield from until(starving(board, ranks)(rng), 3 * MINUTE_MS)
            yield _training(board, ranks, 3 * MINUTE_MS)
            yield _slowed(board, ranks, 3 * MINUTE_MS, hot=True)
            yield _training(board, ranks, 4 * MINUTE_MS)

    return stages


def one_thing(name: str, cycle: Cycle, *, memory: float = 0.1, program: str = "python") -> Program:
    """One cycle from first to last."""

    def stages(_: Random) -> Stages:
        yield Stage(name, FOREVER_MS, (cycle,), memory=memory, program=program)

    return stages


def at_reference(board: Board) -> Climate:
    """Clocks set to the one at which the dense peak holds."""
    return Climate(board.reference_clock_hz, event_reasons=_CLOCKS_SET)


def by_turns(board: Board) -> Program:
    """Twenty minutes of even work and ten of nothing, again and again, at the reference clock."""
    climates = (at_reference(board),)

    def stages(_: Random) -> Stages:
        while True:
            for name, minutes, cycle in (("working", 20, kernels.steady(tensor=0.4)), ("pausing", 10, NOTHING)):
                yield Stage(name, minutes * MINUTE_MS, (cycle,), memory=0.5, climates=climates)

    return stages
