"""Builds stages of training and serving that report exactly the FLOPs and tokens that their kernels execute."""

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
FLOPS_PER_TOKEN = 6 * _PARAMETERS
"""FLOPs per training token: 2 per parameter forward and 4 backward (Kaplan et al. 2020)."""


SMALL_JOB = Load(engine=0.6, sm=0.06, occupancy=0.02, tensor=0.03, dram=0.02, fp32=0.01)
"""A job that uses a small part of a GPU."""


class PhaseSegment(NamedTuple):
    """A part of a training step: the GPU's activity, and the phase that the program reports for it."""

    segment: Segment
    phase: str = "compute"


def products(
    board: BoardModel, ms: float, *, tensor: float, dram: float, sm: float = 0.92, wire: float = 0.0
) -> PhaseSegment:
    """Matrix products at this tensor-core activity; `dram` is a share of the achievable memory bandwidth.

    `wire` is the share of the link to the peers used by overlapped communication.
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


def exchange(board: BoardModel, ms: float, *, wire: float) -> PhaseSegment:
    """An exposed collective at this share of the link; memory is read and written for every byte."""
    rate = wire * board.peer_bytes_per_second
    load = Load(engine=1.0, sm=0.2, occupancy=0.05, dram=2 * rate / board.bandwidth, peer_tx=rate, peer_rx=rate)
    return PhaseSegment(Segment(ms, load, "exchanging"), "communication")


def polling_part(ms: float) -> PhaseSegment:
    """A pipeline stage that polls for its neighbour's activations."""
    return PhaseSegment(Segment(ms, SPIN, "waiting_peer"), "bubble")


def idle_part(ms: float, phase: str, *, pcie_rx: float = 0.0, pcie_tx: float = 0.0) -> PhaseSegment:
    """No kernel; PCIe copies, in bytes per second, may run meanwhile."""
    copies = pcie_rx + pcie_tx > 0
    mechanism: Mechanism = "copying" if copies else "waiting_input" if phase == "data" else "idle"
    return PhaseSegment(Segment(ms, Load(pcie_rx=pcie_rx, pcie_tx=pcie_tx), mechanism), phase)


def flops(board: BoardModel, cycle: Cycle) -> float:
    """Tensor-core FLOPs of one cycle at the reference clock."""
    return sum(segment.load.tensor * segment.ms / 1000 for segment in cycle.segments) * board.peak_flops


def cycle(*parts: PhaseSegment) -> Cycle:
    """The GPU's activity in these parts, as a cycle."""
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
    """Build a stage of `count` optimiser steps of these parts, after step `after`, at a share of the reference clock.

    `model` is the model's own share of the FLOPs; with `counted` the program reports all FLOPs too. `padding` is the
    share of padding tokens. `cycle_by_rank` gives each rank's cycle where they differ, with the same length and phases.
    """
    once = cycle_by_rank or (cycle(*parts),)
    done = clock * flops(board, once[0])
    own = model * done
    tokens = own / FLOPS_PER_TOKEN
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
    """Build a stage of one phase outside training steps, which the program reports when it begins and when it ends."""
    counts = StepCounts(
        phases=(part.phase,), checkpoints=checkpoints, restart=restart, resumes=resumes, highest=highest
    )
    return Stage(name, ms, (cycle(part),), memory=memory, step=counts)


def loading_weights(board: BoardModel, ms: int) -> Stage:
    """Build the first stage of a training program: weights are copied in over PCIe, no kernel runs."""
    return phase_stage("weights are loaded", ms, idle_part(1000.0, "startup", pcie_rx=0.1 * board.pcie), memory=0.3)


def restore_after_failure(step: int, *, restart_ms: int, restore_ms: int, highest: int) -> Iterator[Stage]:
    """Build a restart after a failure: the program restores its state of `step`, having reached step `highest`."""
    yield absent("the program starts anew", restart_ms)
    reads = idle_part(1000.0, "restore", pcie_rx=0.3e9)
    yield phase_stage("state is restored", restore_ms, reads, memory=0.4, restart=True, resumes=step, highest=highest)


TOKENS_PER_MS = 60.0
"""Tokens per millisecond at a board's peak FLOP/s. An H100 would reach 62 with a model of 8e9 parameters (2 FLOPs per
parameter and token); on other boards the model's size is scaled with their peak."""


def forward_passes(board: BoardModel, ms: float, tokens: float, *, dram: float, sm: float = 0.7) -> Segment:
    """Forward passes of this many tokens in total; `dram` is a share of the achievable memory bandwidth."""
    tensor = tokens / (TOKENS_PER_MS * ms)
    load = Load(engine=1.0, sm=sm, occupancy=sm / 4, tensor=tensor, dram=dram * board.dram_ceiling, fp32=0.02)
    return Segment(ms, load, "computing")


def cache_swaps(board: BoardModel, ms: float, *, wire: float) -> Segment:
    """KV-cache blocks are swapped with host memory at this share of PCIe bandwidth; no kernel runs meanwhile."""
    rate = wire * board.pcie
    return Segment(ms, Load(pcie_tx=rate, pcie_rx=rate, dram=2 * rate / board.bandwidth), "copying")


def scheduling_pause(ms: float) -> Segment:
    """A pause while the host schedules the next batch."""
    return Segment(ms, Load(), "idle")


def serving(board: BoardModel, name: str, *segments: Segment, counts: ServingCounts, ms: int = FOREVER_MS) -> Stage:
    """Build a stage of a serving engine that repeats these segments at the reference clock.

    Its FLOPs and bytes are computed from the segments.
    """
    cycle = Cycle(*segments)
    tensor = sum(segment.load.tensor * segment.ms / 1000 for segment in segments)
    dram = sum(segment.load.dram * segment.ms / 1000 for segment in segments)
    counted = replace(counts, flops=tensor * board.peak_flops, bytes=dram * board.bandwidth)
    return Stage(
        name, ms, (cycle,), memory=0.9, program="server", climates=(at_reference(board),), service=counted
    )  # fmt: skip


def loading_server(board: BoardModel, ms: int) -> Stage:
    """Build the stage before a serving engine is ready: weights are copied in over PCIe."""
    copying = Segment(1000.0, Load(pcie_rx=0.1 * board.pcie), "copying")
    return Stage("weights are loaded", ms, (Cycle(copying),), memory=0.3, program="server")


def idle_server() -> Stage:
    """Build an endless stage of a serving engine without requests."""
    return Stage("nobody asks", FOREVER_MS, (IDLE_CYCLE,), memory=0.9, program="server", service=ServingCounts())


def latencies(*, ttft: float, itl: float, queue: float) -> tuple[Latency, ...]:
    """Return latencies in seconds from these medians, for answers of 200 tokens.

    p95 is 1.6 and p99 2.5 times the median, as in interactive traffic.
    """
    medians = {"ttft": queue + ttft, "itl": itl, "queue": queue, "e2e": queue + ttft + 200 * itl}
    return tuple(Latency(kind, p50=value, p95=1.6 * value, p99=2.5 * value) for kind, value in medians.items())
