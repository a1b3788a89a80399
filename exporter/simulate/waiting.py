"""Programs in which ranks wait for one another: for a while, as healthy jobs do, or for ever.

Owns what each rank does meanwhile. Refuses to say which wait is too long.
"""

from random import Random

from exporter.simulate import kernels
from exporter.simulate.boards import Board
from exporter.simulate.programs import MINUTE_MS, Program, bring_up, training, until
from exporter.simulate.work import FOREVER_MS, Cycle, Stage, Stages


def _begun(rng: Random, board: Board, ranks: int) -> Stages:
    """Training for five to seven minutes: what follows begins at no particular moment."""
    yield from until(training(board, ranks)(rng), rng.randrange(5 * MINUTE_MS, 7 * MINUTE_MS))


def _steps(board: Board, *, alone: bool = False) -> Stage:
    return Stage("training", FOREVER_MS, (kernels.training_step(board, alone=alone),), memory=0.85)


def alone_for_a_while(
    board: Board, ranks: int, *, name: str, doing: Cycle, ms: int, chief: bool = True, begun: bool = True
) -> Program:
    """Training, in which rank 0 once does something alone, while all others wait in a collective.

    `chief`: rank 0 is on this node. `begun`: steps were taken before it.
    """
    parts = tuple(doing if chief and rank == 0 else kernels.polling() for rank in range(ranks))

    def stages(rng: Random) -> Stages:
        yield from _begun(rng, board, 2) if begun else bring_up(rng, board)
        yield Stage(name, ms, parts, memory=0.85)
        yield _steps(board)

    return stages


def stuck(
    board: Board, ranks: int, *, name: str, waits: Cycle, absent: Cycle | None = None, begun: bool = True
) -> Program:
    """Training until every rank here waits for what never comes; with `absent`, rank 0 does that instead.

    `begun`: steps were taken before it.
    """
    parts = (waits,) if absent is None else (absent, *[waits] * (ranks - 1))

    def stages(rng: Random) -> Stages:
        yield from _begun(rng, board, ranks) if begun else bring_up(rng, board)
        yield Stage(name, FOREVER_MS, parts, memory=0.85)

    return stages


def busy_together(board: Board, ranks: int, *, name: str, doing: Cycle, ms: int) -> Program:
    """Training, in which all ranks once do something else than steps."""

    def stages(rng: Random) -> Stages:
        yield from _begun(rng, board, ranks)
        yield Stage(name, ms, (doing,), memory=0.85)
        yield _steps(board, alone=ranks == 1)

    return stages
