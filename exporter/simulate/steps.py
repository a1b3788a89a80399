"""What a training step is made of, for the hardware and for the program at once.

Owns steps and spells of training that speak: the FLOPs a program counts are what its kernels did, less what the model
did not need. Refuses the order of things, which is the stories'.
"""

from typing import NamedTuple

from msgspec.structs import replace

from exporter.simulate.boards import Board
from exporter.simulate.kernels import SPIN
from exporter.simulate.programs import at_reference
from exporter.simulate.words import Step
from exporter.simulate.work import NOTHING, Cycle, Load, Mechanism, Segment, Stage

_PARAMETERS = 8e9
FLOPS_A_TOKEN = 6 * _PARAMETERS
"""Of a model trained on the tokens: two forward and four backward a parameter (Kaplan et al. 2020)."""


class Part(NamedTuple):
    """A stretch of a step, as the GPU has it, and the phase that the program takes it for."""

    segment: Segment
    phase: str = "compute"


def products(board: Board, ms: float, *, tensor: float, dram: float, sm: float = 0.92, wire: float = 0.0) -> Part:
    """Matrix products that hold the tensor cores at this share; `dram` is a share of what memory can give.

    `wire`: share of the link to the peers that is in use behind them.
    """
    rate = wire * board.peer_bytes_per_second
    load = Load(
        engine=1.0,
        sm=sm,
        occupancy=sm / 3,
        tensor=tensor,
        dram=dram * board.dram_ceiling,
        fp32=0.03,
        peer_tx=rate,
        peer_rx=rate,
    )
    return Part(Segment(ms, load, "computing"))


def kernels(board: Board, ms: float, *, sm: float, dram: float) -> Part:
    """Kernels without tensor work: activations, normalisations, optimisers."""
    load = Load(engine=1.0, sm=sm, occupancy=sm / 3, dram=dram * board.dram_ceiling, fp32=min(sm, 0.1))
    return Part(Segment(ms, load, "computing"))


def exchange(board: Board, ms: float, *, wire: float, sm: float = 0.2) -> Part:
    """A collective that nothing hides, at this share of the link; memory is read and written for every byte."""
    rate = wire * board.peer_bytes_per_second
    load = Load(engine=1.0, sm=sm, occupancy=sm / 4, dram=2 * rate / board.bandwidth, peer_tx=rate, peer_rx=rate)
    return Part(Segment(ms, load, "exchanging"), "communication")


def polls(ms: float) -> Part:
    """A stage of a pipeline polls for its neighbour's activations."""
    return Part(Segment(ms, SPIN, "waiting_peer"), "bubble")


def rests(ms: float, phase: str, *, pcie_rx: float = 0.0, pcie_tx: float = 0.0) -> Part:
    """No kernel; something may be copied meanwhile, bytes per second."""
    copies = pcie_rx + pcie_tx > 0
    mechanism: Mechanism = "copying" if copies else "waiting_input" if phase == "data" else "idle"
    return Part(Segment(ms, Load(pcie_rx=pcie_rx, pcie_tx=pcie_tx), mechanism), phase)


def flops(board: Board, cycle: Cycle) -> float:
    """What the tensor cores do in one time round at the reference clock."""
    return sum(segment.load.tensor * segment.ms / 1000 for segment in cycle.segments) * board.peak_flops


def cycle(*parts: Part) -> Cycle:
    """The parts as the GPU has them, again and again."""
    return Cycle(*(part.segment for part in parts))


def steps(
    board: Board,
    count: int,
    *parts: Part,
    after: int = 0,
    model: float = 1.0,
    padding: float = 0.0,
    highest: int | None = None,
    checkpoints: int = 0,
    counted: bool = False,
    clock: float = 1.0,
    around: tuple[Cycle, ...] = (),
) -> Stage:
    """So many optimiser steps of these parts, beginning after step `after`, clocks at this share of the reference.

    `model`: of the FLOPs those of the model's own passes, the rest being told too if they are `counted`; `padding`: of
    the tokens those that only fill up; `around`: the cycle of each rank where they differ, of the same length and
    kinds of parts.
    """
    once = around or (cycle(*parts),)
    done = clock * flops(board, once[0])
    own = model * done
    tokens = own / FLOPS_A_TOKEN
    step = Step(
        phases=tuple(part.phase for part in parts),
        model_flops=own,
        hardware_flops=done if counted else None,
        tokens=tokens,
        padding=padding * tokens,
        after=after,
        highest=highest,
        checkpoints=checkpoints,
    )
    return Stage(
        "training",
        round(count * once[0].ms),
        once,
        memory=0.85,
        climates=(replace(at_reference(board), clock_cap_hz=clock * board.reference_clock_hz),),
        step=step,
    )


def spell(
    name: str, ms: int, part: Part, *, memory: float = 0.85, checkpoints: int = 0, restart: bool = False,
    resumes: int | None = None, highest: int | None = None,
) -> Stage:  # fmt: skip
    """A stretch in which a program does one thing other than steps, and says so when it begins and when it ends."""
    told = Step(phases=(part.phase,), checkpoints=checkpoints, restart=restart, resumes=resumes, highest=highest)
    return Stage(name, ms, (cycle(part),), memory=memory, step=told)


def absent(name: str, ms: int) -> Stage:
    """No process is there."""
    return Stage(name, ms, (NOTHING,), context=False)


def starts(board: Board, ms: int) -> Stage:
    """The first of a program: weights come in over PCIe, no kernel runs."""
    return spell("weights are loaded", ms, rests(1000.0, "startup", pcie_rx=0.1 * board.pcie), memory=0.3)
