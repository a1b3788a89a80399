"""Training of the twelve stories: what costs it time, and the same work without that.

Owns the steps, their figures and who runs them. Refuses to say what a loss is: a story is what kernels and programs do.
"""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from exporter.core.model import Parallel
from exporter.simulate.boards import Board
from exporter.simulate.plan import Job, Plan
from exporter.simulate.setting import Setting, batch
from exporter.simulate.steps import Part, absent, cycle, exchange, kernels, polls, products, rests, spell, starts, steps
from exporter.simulate.words import Voice
from exporter.simulate.work import FOREVER_MS, NOTHING, Cycle, Load, Segment, Stage, Stages

START_MS = 20_000
"""Every program here needs so long to get ready."""
STEPS = 1180
"""What most trainers here do, with a leak or without: one second a step where there is one."""

Made = Iterable[Stage]
Make = Callable[[Board], Made]


def _program(board: Board, made: Callable[[], Made]) -> Callable[[Random], Stages]:
    def stages(_: Random) -> Stages:
        yield starts(board, START_MS)
        yield from made()

    return stages


def trainer(setting: Setting, slots: tuple[int, ...], make: Make, **voice: Any) -> Job:
    """A training job that speaks, on these GPUs."""
    owner = batch(setting, slots[0], "pretrain")
    return Job(
        owner=owner,
        slots=slots,
        stages=_program(setting.board, lambda: make(setting.board)),
        voice=Voice(run=f"run-{owner.job_id}", **voice),
    )


def each(make: Make, **voice: Any) -> Callable[[Setting], Plan]:
    """A job of its own on every GPU."""
    return lambda setting: Plan(jobs=tuple(trainer(setting, (slot,), make, **voice) for slot in setting.slots))


def together(make: Make, **voice: Any) -> Callable[[Setting], Plan]:
    """One job on all GPUs."""
    return lambda setting: Plan(jobs=(trainer(setting, setting.slots, make, **voice),))


def always(*parts: Callable[[Board], Part], count: int = STEPS, **what: Any) -> Make:
    """So many steps of these parts."""
    return lambda board: [steps(board, count, *(part(board) for part in parts), **what)]


# 1: kernels that memory or too few blocks hold up.


def dense(ms: float, tensor: float = 0.6, **what: float) -> Callable[[Board], Part]:
    """Matrix products of so many milliseconds that hardly wait for memory."""
    return lambda board: products(board, ms, tensor=tensor, **{"dram": 0.15} | what)


def _other(ms: float, *, sm: float, dram: float) -> Callable[[Board], Part]:
    return lambda board: kernels(board, ms, sm=sm, dram=dram)


UNFUSED = always(dense(400), _other(600, sm=0.9, dram=0.9))
FUSED = always(dense(400), _other(60, sm=0.9, dram=0.3))
NARROW = always(dense(300), _other(700, sm=0.08, dram=0.03))
WIDE = always(dense(300), _other(40, sm=0.9, dram=0.3))

# 3: jobs smaller than their GPU.


def sweep(beside: int) -> Callable[[Setting], Plan]:
    """Seven seeds of a sweep, so many of them side by side on each GPU."""
    ran = Load(engine=0.6, sm=0.06, occupancy=0.02, tensor=0.03, dram=0.02, fp32=0.01)
    together = Load(*[min(1.0, beside * value) for value in ran])
    doing = Stage("a sweep's seeds", FOREVER_MS, (Cycle(Segment(10.0, together, "computing")),), memory=0.08 * beside)

    def plan(setting: Setting) -> Plan:
        jobs = tuple(
            Job(owner=batch(setting, slot, "sweep"), slots=(slot,), stages=lambda _: iter((doing,)))
            for slot in setting.slots
        )
        return Plan(jobs=jobs, slices_known=True)

    return plan


# 4: a host too slow for its GPU. A step is one short kernel.

LAUNCHED = always(dense(5, 0.25, sm=0.4), lambda _: rests(7.0, "compute"), count=STEPS * 1000 // 12)
REPLAYED = always(dense(5, 0.25, sm=0.4), lambda _: rests(0.02, "compute"), count=STEPS * 1000 // 12)

# 5: failures.


def stuck(setting: Setting) -> Plan:
    """Training until the last rank stops, and the others wait in a collective for ever."""

    def make(board: Board) -> Made:
        yield from calm(580)(board)
        polling = cycle(polls(1000.0))
        waits = (*[polling] * (setting.gpus - 1), NOTHING)
        yield Stage("one rank never comes", FOREVER_MS, waits, memory=0.85)

    return together(make)(setting)


def calm(count: int) -> Make:
    """Training without a fault: one step a second, of which 60 ms are an exchange that nothing hides."""
    return always(dense(900), lambda b: exchange(b, 60.0, wire=0.8), lambda _: rests(40.0, "data"), count=count)


def failing(board: Board) -> Made:
    """Every two minutes a node is lost: the program starts anew, and reads its state from slow storage."""
    done = 0
    while True:
        yield steps(board, 115, dense(1000)(board), after=done)
        done += 115
        yield from _back(done, anew_ms=10_000, restore_ms=170_000, highest=done)


def _back(step: int, *, anew_ms: int, restore_ms: int, highest: int) -> Iterator[Stage]:
    yield absent("the program starts anew", anew_ms)
    reads = rests(1000.0, "restore", pcie_rx=0.3e9)
    yield spell("state is restored", restore_ms, reads, memory=0.4, restart=True, resumes=step, highest=highest)


def saving(board: Board) -> Made:
    """A hundred steps, then the whole state is written while all wait."""
    done = 0
    while True:
        yield steps(board, 100, dense(1000)(board), after=done)
        done += 100
        writes = rests(1000.0, "checkpoint", pcie_tx=1.2e9)
        yield spell("a checkpoint is written", 96_000, writes, checkpoints=1)


def snapshotting(board: Board) -> Made:
    """The same state, written behind the steps that follow."""
    load = dense(1000)(board).segment.load._replace(pcie_tx=1.15e9)
    part = Part(Segment(1000.0, load, "computing"))
    done = 0
    while True:
        yield steps(board, 100, part, after=done, checkpoints=1)
        done += 100


def falling_back(*, to: int) -> Make:
    """Two failures at step 300, after each of which the run goes on from step `to`."""

    def make(board: Board) -> Made:
        part = dense(1000, 0.65, sm=0.95, dram=0.2)(board)
        yield steps(board, 300, part)
        yield from _back(to, anew_ms=5_000, restore_ms=10_000, highest=300)
        if to < 300:  # noqa: PLR2004  where it failed, for the first time and the second
            yield steps(board, 300 - to, part, after=to, highest=300)
        yield from _back(to, anew_ms=5_000, restore_ms=10_000, highest=300)
        yield steps(board, 590 - to, part, after=to, highest=300)

    return make


# 6 and 7: waiting for other GPUs.

EXPOSED = always(dense(400), lambda board: exchange(board, 600.0, wire=0.2))
HIDDEN = always(lambda board: products(board, 400, tensor=0.6, dram=0.15, wire=0.3))


def pipeline(microbatches: int | None) -> Callable[[Setting], Plan]:
    """As many stages as GPUs; of a step each microbatch takes 100 ms a stage. None: a schedule without bubbles."""

    def plan(setting: Setting) -> Plan:
        stages = setting.gpus
        empty = 0 if microbatches is None else stages - 1
        bubble = empty / ((microbatches or 1) + empty)
        work = 100.0 * (microbatches or 4)

        def make(board: Board) -> Made:
            parts = (polls(0.0), dense(work)(board), polls(100.0 * empty))
            each = tuple(
                cycle(polls(100.0 * rank * bool(empty)), parts[1], polls(100.0 * max(0, empty - rank)))
                for rank in range(stages)
            )
            yield steps(board, 1685, *parts, around=each)

        return together(make, times=(), bubble=bubble, parallel=Parallel(pipeline=stages))(setting)

    return plan


# 8, and the data pipeline.

RECOMPUTED = always(dense(1000, 0.8, sm=0.96, dram=0.12), model=0.75)
KEPT = always(dense(750, 0.8, sm=0.96, dram=0.12))
PADDED = always(dense(1000, 0.75, sm=0.95), padding=0.5)
PACKED = always(dense(500, 0.75, sm=0.95))
STARVED = always(
    lambda _: rests(550.0, "data"), lambda board: rests(50.0, "data", pcie_rx=0.2 * board.pcie), dense(400)
)
FED = always(dense(400))
