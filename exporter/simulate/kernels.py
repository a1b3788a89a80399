"""How programs use a board: the cycles of kernels, copies and waits of known kinds of work.

Owns the mechanisms and their figures, each from what such kernels do to the units of a GPU; they are
estimates, not measurements. Refuses to arrange them into stories: that is `scenarios`.
"""

from exporter.simulate.boards import Board
from exporter.simulate.work import Cycle, Load, Mechanism, Segment

_STEP_MS = 450.0
"""Kernels of one micro-batch, forward and backward."""
_GRADIENT_BYTES = 14e9
"""What a ring all-reduce of 8 GB of gradients sends from each GPU: 2 x 7/8 of them."""
_LINK_EFFICIENCY = 0.8
"""Share of the wire that NCCL's large collectives reach."""

SPIN = Load(engine=1.0, sm=0.15, occupancy=0.04, dram=0.001, pcie_rx=1.2e6)
"""A collective that waits: its thread blocks hold some 20 SMs and poll a flag, moving nothing."""


def _training_kernels(board: Board, pace: float) -> Load:
    """Fused attention and GEMMs of a transformer with its normalisations; some exchange is overlapped."""
    overlapped = 0.08 * board.peer_bytes_per_second * pace
    return Load(
        engine=1.0,
        sm=0.92,
        occupancy=0.38,
        tensor=0.49,
        dram=0.50 * pace,
        fp32=0.06,
        fp16=0.02,
        peer_tx=overlapped,
        peer_rx=overlapped,
    )


def _exchange(board: Board, payload: float) -> Segment:
    """Move `payload` bytes from each GPU in a collective; HBM is read and written for every byte sent."""
    rate = _LINK_EFFICIENCY * board.peer_bytes_per_second
    sm = 0.2 if board.nvlink else 0.08
    traffic = Load(
        engine=1.0,
        sm=sm,
        occupancy=sm / 4,
        dram=2 * rate / board.bandwidth,
        fp32=0.008,
        peer_tx=rate,
        peer_rx=rate,
    )
    return Segment(1000 * payload / rate, traffic, "exchanging")


def _small_exchanges(board: Board) -> Segment:
    """All-reduces of a few hundred kilobytes, two a layer: latency rules them, not the wire."""
    rate = 0.05 * board.peer_bytes_per_second
    traffic = Load(engine=1.0, sm=0.08, occupancy=0.03, dram=0.01, peer_tx=rate, peer_rx=rate)
    return Segment(2.0 if board.nvlink else 5.0, traffic, "exchanging")


def training_step(board: Board, *, pace: float = 1.0, peer_wait_ms: float = 0.0, alone: bool = False) -> Cycle:
    """One optimiser step of data-parallel training.

    `pace` slows the kernels (1: at the boost clock); `peer_wait_ms` is spent in the collective until the last
    rank arrives. Over PCIe, gradients of eight micro-batches are accumulated before each exchange.
    """
    batches = 1 if board.nvlink or alone else 8
    kernels = _training_kernels(board, pace)
    if alone:
        kernels = kernels._replace(peer_tx=0.0, peer_rx=0.0)
    segments = [Segment(batches * _STEP_MS / pace, kernels, "computing")]
    if peer_wait_ms:
        segments.append(Segment(peer_wait_ms, SPIN, "waiting_peer"))
    if not alone:
        segments.append(_exchange(board, _GRADIENT_BYTES))
    return Cycle(*segments, Segment(12.0, Load(), "idle"))


def step_ms(board: Board) -> float:
    """Milliseconds of kernels in one `training_step` at full pace."""
    return _STEP_MS * (1 if board.nvlink else 8)


def starved_rank(board: Board, pace: float) -> Cycle:
    """Give a rank whose host launches kernels late: the same kernels with microseconds between them."""
    busy = _training_kernels(board, 1.0)
    gappy = Load(*[value * pace for value in busy])
    kernels = Segment(step_ms(board) / pace, gappy, "computing")
    return Cycle(kernels, _exchange(board, _GRADIENT_BYTES), Segment(12.0, Load(), "idle"))


def decode(board: Board, *, batch: float = 1.0, tensor_parallel: bool = False) -> Cycle:
    """Generate tokens, one thin matrix product after another, with the odd prefill between them.

    `batch` scales with how many sequences are in flight; each kernel streams the weights, whatever the batch.
    """
    weights = min(0.97, 0.85 * (0.9 + 0.1 * batch)) * board.dram_ceiling
    thin = Load(engine=1.0, sm=0.72, occupancy=0.2, tensor=0.026 * batch, dram=weights, fp32=0.03, fp16=0.02 * batch)
    prefill = Load(engine=1.0, sm=0.95, occupancy=0.2, tensor=0.55, dram=0.3, fp32=0.03)
    return Cycle(
        Segment(24.0, thin, "computing"),
        Segment(0.75, prefill, "computing"),
        *([_small_exchanges(board)] if tensor_parallel else []),
        Segment(0.4, Load(), "idle"),
    )


def copy_in(board: Board, *, wire: float = 0.5) -> Cycle:
    """Host to device by the copy engine at this share of the link: no kernel runs for it."""
    rate = wire * board.pcie
    return _only(Load(pcie_rx=rate, dram=rate / board.bandwidth), "copying")


def copy_out(board: Board, *, rate: float) -> Cycle:
    """Device to host at `rate` bytes per second, as a checkpoint is written."""
    return _only(Load(pcie_tx=rate, dram=rate / board.bandwidth), "copying")


def copy_on_board(board: Board) -> Cycle:
    """Copy device memory to device memory without a pause, by kernels that load and store."""
    load = Load(engine=1.0, sm=0.9, occupancy=0.85, dram=0.985 * board.dram_ceiling)
    return _only(load, "computing")


def large_gemm() -> Cycle:
    """Large square BF16 matrix products back to back, with random operands."""
    load = Load(engine=1.0, sm=0.985, occupancy=0.12, tensor=0.87, dram=0.35, fp32=0.005)
    return _only(load, "computing")


def steady(*, tensor: float) -> Cycle:
    """Kernels that never pause and hold the tensor cores at this share."""
    return _only(Load(engine=1.0, sm=0.8, occupancy=0.4, tensor=tensor, dram=0.35), "computing")


def warm_up() -> Cycle:
    """Compilation and tuning: short kernels with long pauses on the host."""
    return Cycle(
        Segment(60.0, Load(engine=1.0, sm=0.5, occupancy=0.2, tensor=0.1, dram=0.2, fp32=0.05), "computing"),
        Segment(240.0, Load(), "idle"),
    )


def one_block(board: Board) -> Cycle:
    """Give a kernel of one thread block that loops on a flag in registers until somebody sets it."""
    return _only(Load(engine=1.0, sm=1.0 / board.sms, occupancy=0.0005, dram=0.0002), "waiting_peer")


def polling() -> Cycle:
    """All of this rank's time in a collective whose peers never come."""
    return _only(SPIN, "waiting_peer")


def polling_host(board: Board) -> Cycle:
    """Poll a flag in host memory, which a network card would set: a thin, even stream of reads over PCIe."""
    return _only(SPIN._replace(pcie_rx=0.008 * board.pcie), "waiting_peer")


def polling_queue(board: Board) -> Cycle:
    """Poll an empty queue of requests in device memory: a persistent kernel of a server, ready at once."""
    return _only(Load(engine=1.0, sm=8.0 / board.sms, occupancy=0.004, dram=0.0005), "waiting_input")


def exchanging(board: Board) -> Cycle:
    """One long collective after another, nothing computed: weights or experts are laid out anew."""
    return _only(_exchange(board, _GRADIENT_BYTES).load, "exchanging")


def one_pipe(pipe: str, share: float, *, sm: float = 0.9) -> Cycle:
    """Kernels that live in registers or on chip and use one pipe of the SM (a field of Load) at this share."""
    return _only(Load(engine=1.0, sm=sm, occupancy=sm / 2, dram=0.001)._replace(**{pipe: share}), "computing")


def walking(board: Board) -> Cycle:
    """Follow pointers through a graph in HBM: every access waits for the last, and no pipe has work."""
    return _only(Load(engine=1.0, sm=0.3, occupancy=0.1, dram=0.05 * board.dram_ceiling), "computing")


def gathering(board: Board) -> Cycle:
    """Read rows of a table in host memory over PCIe as a kernel asks for them (zero copy), sums kept in registers."""
    return _only(Load(engine=1.0, sm=0.25, occupancy=0.1, dram=0.002, pcie_rx=0.35 * board.pcie), "computing")


def passing_on(board: Board) -> Cycle:
    """Small messages from SM to SM of the neighbours (one-sided puts), forwarded without a stop in HBM."""
    rate = 0.01 * board.peer_bytes_per_second
    return _only(Load(engine=1.0, sm=0.2, occupancy=0.05, dram=0.004, peer_tx=rate, peer_rx=rate), "exchanging")


def evaluation() -> Cycle:
    """Forward passes of a validation set: no gradients, no exchange, the odd pause for the next batch."""
    forward = Load(engine=1.0, sm=0.85, occupancy=0.35, tensor=0.42, dram=0.4, fp32=0.05)
    return Cycle(Segment(300.0, forward, "computing"), Segment(40.0, Load(), "waiting_input"))


def pipeline(board: Board, *, bubble: float) -> Cycle:
    """One stage of a pipeline-parallel step; for `bubble` of the time it polls for its neighbour's activations."""
    kernels = _training_kernels(board, 1.0)
    handed_on = Segment(3.0, _exchange(board, _GRADIENT_BYTES).load, "exchanging")
    work = Segment(1200.0 * (1 - bubble), kernels, "computing")
    return Cycle(Segment(1200.0 * bubble, SPIN, "waiting_peer"), work, handed_on)


def tuning() -> Cycle:
    """Candidates of one kernel run for a moment each, between compilations on the host."""
    candidate = Load(engine=1.0, sm=0.9, occupancy=0.3, tensor=0.5, dram=0.3)
    return Cycle(Segment(400.0, candidate, "computing"), Segment(2600.0, Load(), "idle"))


def now_and_then() -> Cycle:
    """A short kernel every half minute, while the host compiles: constants folded, shapes tried."""
    short = Load(engine=1.0, sm=0.4, occupancy=0.1, dram=0.1, fp32=0.02)
    return Cycle(Segment(29_950.0, Load(), "idle"), Segment(50.0, short, "computing"))


def tiny_kernels(board: Board) -> Cycle:
    """Short integer kernels on a few SMs, as a simulator or a tokenizer launches them, and the host between them."""
    step = Load(engine=1.0, sm=6.0 / board.sms, occupancy=0.01, dram=0.003, integer=0.01)
    return Cycle(Segment(3.0, step, "computing"), Segment(1.0, Load(), "idle"))


def few_tokens(board: Board) -> Cycle:
    """One short conversation at a time: a second of decoding, then nobody asks for a while."""
    thin = decode(board, batch=0.05).segments[0].load
    return Cycle(Segment(1_000.0, thin, "computing"), Segment(6_000.0, Load(), "idle"))


def no_input() -> Cycle:
    """Nothing to do until the host has the next batch ready."""
    return _only(Load(), "waiting_input")


def _only(load: Load, mechanism: Mechanism) -> Cycle:
    return Cycle(Segment(1000.0, load, mechanism))
