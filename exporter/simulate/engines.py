"""What a serving engine's round is made of, for the hardware and for the engine at once.

Owns stages that serve and answer when asked: a token through the model costs tensor time, whatever becomes of it.
Refuses the order of things, which is the stories'.
"""

from msgspec.structs import replace

from exporter.core.model import Latency
from exporter.simulate.boards import Board
from exporter.simulate.programs import at_reference
from exporter.simulate.words import Service
from exporter.simulate.work import FOREVER_MS, NOTHING, Cycle, Load, Segment, Stage

TOKENS_A_MS = 60.0
"""Tokens that a board could put through this model in a millisecond if it reached its peak: of a model of 8e9
parameters (2 FLOPs each a token) on an H100 62; on other boards the model is as much smaller as their peak is."""


def passes(board: Board, ms: float, tokens: float, *, dram: float, sm: float = 0.7) -> Segment:
    """Forward passes of this many tokens together; `dram` is a share of what memory can give."""
    tensor = tokens / (TOKENS_A_MS * ms)
    load = Load(engine=1.0, sm=sm, occupancy=sm / 4, tensor=tensor, dram=dram * board.dram_ceiling, fp32=0.02)
    return Segment(ms, load, "computing")


def swaps(board: Board, ms: float, *, wire: float) -> Segment:
    """Blocks of the KV cache go out to the host's memory and others come in; nothing can be computed meanwhile."""
    rate = wire * board.pcie
    return Segment(ms, Load(pcie_tx=rate, pcie_rx=rate, dram=2 * rate / board.bandwidth), "copying")


def pause(ms: float) -> Segment:
    """The host schedules the next batch."""
    return Segment(ms, Load(), "idle")


def serving(board: Board, name: str, *segments: Segment, does: Service, ms: int = FOREVER_MS) -> Stage:
    """An engine that does this in each time round, clocks at the reference; FLOPs and bytes are its kernels'."""
    cycle = Cycle(*segments)
    tensor = sum(segment.load.tensor * segment.ms / 1000 for segment in segments)
    dram = sum(segment.load.dram * segment.ms / 1000 for segment in segments)
    counted = replace(does, flops=tensor * board.peak_flops, bytes=dram * board.bandwidth)
    return Stage(
        name, ms, (cycle,), memory=0.9, program="server", climates=(at_reference(board),), service=counted
    )  # fmt: skip


def loading(board: Board, ms: int) -> Stage:
    """An engine before it answers: weights come in over PCIe."""
    copying = Segment(1000.0, Load(pcie_rx=0.1 * board.pcie), "copying")
    return Stage("weights are loaded", ms, (Cycle(copying),), memory=0.3, program="server")


def unasked(ms: int = FOREVER_MS) -> Stage:
    """An engine that nobody asks."""
    return Stage("nobody asks", ms, (NOTHING,), memory=0.9, program="server", service=Service())


def latencies(*, ttft: float, itl: float, queue: float, tokens: int = 200) -> tuple[Latency, ...]:
    """Medians, in seconds, with tails as wide as interactive traffic has them: 1.6 and 2.5 times as long."""
    medians = {"ttft": queue + ttft, "itl": itl, "queue": queue, "e2e": queue + ttft + tokens * itl}
    return tuple(Latency(kind, p50=value, p95=1.6 * value, p99=2.5 * value) for kind, value in medians.items())
