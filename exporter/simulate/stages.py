"""Builds stages of training and serving whose reported FLOPs and tokens are exactly what their kernels did."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from exporter.core.model import Latency
from exporter.simulate.boards import BoardModel
from exporter.simulate.kernels import SPIN
from exporter.simulate.programs import at_reference
from exporter.simulate.workload import (
    FOREVER_MS,
    IDLE_CYCLE,
    Cycle,
    Load,
    Mechanism,
    Segment,
    ServingCounts,
    Stage,
    StepCounts,
    absent,
)

_PARAMETERS = 8e9
FLOPS_A_TOKEN = 6 * _PARAMETERS
"""Of a model trained on the tokens: two forward and four backward a parameter (Kaplan et al. 2020)."""


class PhaseSegment(NamedTuple):
    """A stretch of a step, as the GPU has it, and the phase that the program takes it for."""

    segment: Segment
    phase: str = "compute"


def products(
    board: BoardModel, ms: float, *, tensor: float, dram: float, sm: float = 0.92, wire: float = 0.0
) -> PhaseSegment:
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
    return PhaseSegment(Segment(ms, load, "computing"))


def other_kernels(board: BoardModel, ms: float, *, sm: float, dram: float) -> PhaseSegment:
    """Kernels without tensor work: activations, normalisations, optimisers."""
    load = Load(engine=1.0, sm=sm, occupancy=sm / 3, dram=dram * board.dram_ceiling, fp32=min(sm, 0.1))
    return PhaseSegment(Segment(ms, load, "computing"))


def exchange(board: BoardModel, ms: float, *, wire: float, sm: float = 0.2) -> PhaseSegment:
    """A collective that nothing hides, at this share of the link; memory is read and written for every byte."""
    rate = wire * board.peer_bytes_per_second
    load = Load(engine=1.0, sm=sm, occupancy=sm / 4, dram=2 * rate / board.bandwidth, peer_tx=rate, peer_rx=rate)
    return PhaseSegment(Segment(ms, load, "exchanging"), "communication")


def polling_part(ms: float) -> PhaseSegment:
    """A stage of a pipeline polls for its neighbour's activations."""
    return PhaseSegment(Segment(ms, SPIN, "waiting_peer"), "bubble")


def idle_part(ms: float, phase: str, *, pcie_rx: float = 0.0, pcie_tx: float = 0.0) -> PhaseSegment:
    """No kernel; something may be copied meanwhile, bytes per second."""
    copies = pcie_rx + pcie_tx > 0
    mechanism: Mechanism = "copying" if copies else "waiting_input" if phase == "data" else "idle"
    return PhaseSegment(Segment(ms, Load(pcie_rx=pcie_rx, pcie_tx=pcie_tx), mechanism), phase)


def flops(board: BoardModel, cycle: Cycle) -> float:
    """What the tensor cores do in one time round at the reference clock."""
    return sum(segment.load.tensor * segment.ms / 1000 for segment in cycle.segments) * board.peak_flops


def cycle(*parts: PhaseSegment) -> Cycle:
    """The parts as the GPU has them, again and again."""
    return Cycle(*(part.segment for part in parts))


def steps(
    board: BoardModel,
    count: int,
    *parts: PhaseSegment,
    after: int = 0,
    model: float = 1.0,
    padding: float = 0.0,
    highest: int | None = None,
    checkpoints: int = 0,
    counted: bool = False,
    clock: float = 1.0,
    cycle_by_rank: tuple[Cycle, ...] = (),
) -> Stage:
    """So many optimiser steps of these parts, beginning after step `after`, clocks at this share of the reference.

    `model`: of the FLOPs those of the model's own passes, the rest being told too if they are `counted`; `padding`: of
    the tokens those that only fill up; `around`: the cycle of each rank where they differ, of the same length and
    kinds of parts.
    """
    once = cycle_by_rank or (cycle(*parts),)
    done = clock * flops(board, once[0])
    own = model * done
    tokens = own / FLOPS_A_TOKEN
    step = StepCounts(
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


def phase_stage(
    name: str, ms: int, part: PhaseSegment, *, memory: float = 0.85, checkpoints: int = 0, restart: bool = False,
    resumes: int | None = None, highest: int | None = None,
) -> Stage:  # fmt: skip
    """A stretch in which a program does one thing other than steps, and says so when it begins and when it ends."""
    counts = StepCounts(
        phases=(part.phase,), checkpoints=checkpoints, restart=restart, resumes=resumes, highest=highest
    )
    return Stage(name, ms, (cycle(part),), memory=memory, step=counts)


def loading_weights(board: BoardModel, ms: int) -> Stage:
    """The first of a program: weights come in over PCIe, no kernel runs."""
    return phase_stage("weights are loaded", ms, idle_part(1000.0, "startup", pcie_rx=0.1 * board.pcie), memory=0.3)


def restore_after_failure(step: int, *, restart_ms: int, restore_ms: int, highest: int) -> Iterator[Stage]:
    """A program starts again after a failure and reads its state, to go on after `step`; it had come to `highest`."""
    yield absent("the program starts anew", restart_ms)
    reads = idle_part(1000.0, "restore", pcie_rx=0.3e9)
    yield phase_stage("state is restored", restore_ms, reads, memory=0.4, restart=True, resumes=step, highest=highest)


TOKENS_A_MS = 60.0
"""Tokens that a board could put through this model in a millisecond if it reached its peak: of a model of 8e9
parameters (2 FLOPs each a token) on an H100 62; on other boards the model is as much smaller as their peak is."""


def forward_passes(board: BoardModel, ms: float, tokens: float, *, dram: float, sm: float = 0.7) -> Segment:
    """Forward passes of this many tokens together; `dram` is a share of what memory can give."""
    tensor = tokens / (TOKENS_A_MS * ms)
    load = Load(engine=1.0, sm=sm, occupancy=sm / 4, tensor=tensor, dram=dram * board.dram_ceiling, fp32=0.02)
    return Segment(ms, load, "computing")


def cache_swaps(board: BoardModel, ms: float, *, wire: float) -> Segment:
    """Blocks of the KV cache go out to the host's memory and others come in; nothing can be computed meanwhile."""
    rate = wire * board.pcie
    return Segment(ms, Load(pcie_tx=rate, pcie_rx=rate, dram=2 * rate / board.bandwidth), "copying")


def scheduling_pause(ms: float) -> Segment:
    """The host schedules the next batch."""
    return Segment(ms, Load(), "idle")


def serving(board: BoardModel, name: str, *segments: Segment, counts: ServingCounts, ms: int = FOREVER_MS) -> Stage:
    """An engine that does this in each time round, clocks at the reference; FLOPs and bytes are its kernels'."""
    cycle = Cycle(*segments)
    tensor = sum(segment.load.tensor * segment.ms / 1000 for segment in segments)
    dram = sum(segment.load.dram * segment.ms / 1000 for segment in segments)
    counted = replace(counts, flops=tensor * board.peak_flops, bytes=dram * board.bandwidth)
    return Stage(
        name, ms, (cycle,), memory=0.9, program="server", climates=(at_reference(board),), service=counted
    )  # fmt: skip


def loading_server(board: BoardModel, ms: int) -> Stage:
    """An engine before it answers: weights come in over PCIe."""
    copying = Segment(1000.0, Load(pcie_rx=0.1 * board.pcie), "copying")
    return Stage("weights are loaded", ms, (Cycle(copying),), memory=0.3, program="server")


def idle_server(ms: int = FOREVER_MS) -> Stage:
    """An engine that nobody asks."""
    return Stage("nobody asks", ms, (IDLE_CYCLE,), memory=0.9, program="server", service=ServingCounts())


def latencies(*, ttft: float, itl: float, queue: float, tokens: int = 200) -> tuple[Latency, ...]:
    """Medians, in seconds, with tails as wide as interactive traffic has them: 1.6 and 2.5 times as long."""
    medians = {"ttft": queue + ttft, "itl": itl, "queue": queue, "e2e": queue + ttft + tokens * itl}
    return tuple(Latency(kind, p50=value, p95=1.6 * value, p99=2.5 * value) for kind, value in medians.items())
