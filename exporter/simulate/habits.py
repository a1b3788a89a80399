"""Programs that rest, start or compute in ways that are easily taken for something else.

Owns what such a job does from first to last. Refuses to say what it should be taken for.
"""

from random import Random

from exporter.simulate import kernels
from exporter.simulate.boards import Board
from exporter.simulate.programs import MINUTE_MS, Program, bring_up, training, until
from exporter.simulate.work import FOREVER_MS, NOTHING, Cycle, Stage, Stages


def _no_process(name: str, ms: int) -> Stage:
    return Stage(name, ms, (NOTHING,), context=False)


def preparing(board: Board, ranks: int, *, name: str, doing: Cycle, minutes: int) -> Program:
    """Training whose first step takes this long to get ready."""

    def stages(rng: Random) -> Stages:
        yield _no_process("the container starts", rng.randrange(5_000, 15_000))
        yield Stage(name, minutes * MINUTE_MS, (doing,), memory=0.5)
        yield Stage("training", FOREVER_MS, (kernels.training_step(board, alone=ranks == 1),), memory=0.85)

    return stages


def coming_late(board: Board, *, minutes: int) -> Program:
    """A job whose container image is pulled for long before its first process."""

    def stages(rng: Random) -> Stages:
        yield _no_process("the image is pulled", minutes * MINUTE_MS + rng.randrange(30_000))
        yield from training(board, 1)(rng)

    return stages


def in_two_parts(board: Board, *, pause_minutes: int) -> Program:
    """A batch script with work on the host between two programs that use the GPU."""

    def stages(rng: Random) -> Stages:
        yield from until(training(board, 1)(rng), 5 * MINUTE_MS + rng.randrange(30_000))
        yield _no_process("results are packed", pause_minutes * MINUTE_MS)
        yield from training(board, 1)(rng)  # another program, with a beginning of its own

    return stages


def ending(board: Board, *, after_ms: int) -> Program:
    """Training that ends by itself, whatever becomes of the hold."""
    return lambda rng: until(training(board, 1)(rng), after_ms)


def by_and_by(*rounds: tuple[str, float, Cycle], program: str = "python", memory: float = 0.4) -> Program:
    """A program's own bring-up, then these again and again: name, minutes, cycle."""

    def stages(rng: Random) -> Stages:
        yield _no_process("the container starts", rng.randrange(4_000, 9_000))
        yield Stage("libraries are imported", rng.randrange(8_000, 15_000), (kernels.warm_up(),), memory=0.1)
        while True:
            for name, minutes, cycle in rounds:
                yield Stage(name, round(minutes * MINUTE_MS), (cycle,), memory=memory, program=program)

    return stages


def fed_slowly(board: Board) -> Program:
    """Training behind a loader that takes most of a minute for each of its batches."""
    step = kernels.training_step(board, alone=True)

    def stages(rng: Random) -> Stages:
        yield from bring_up(rng, board)
        while True:
            yield Stage("waiting for input", rng.randrange(20_000, 60_000), (kernels.no_input(),), memory=0.85)
            yield Stage("input is copied in", rng.randrange(1_000, 3_000), (kernels.copy_in(board),), memory=0.85)
            yield Stage("training", rng.randrange(8_000, 20_000), (step,), memory=0.85)

    return stages
