"""Models GPU work as cycles of kernels, copies and waits: training steps, decoding, collectives, polling.

The figures are estimates of the utilization by such kernels, not measurements.
"""

from exporter.simulate.boards import BoardModel
from exporter.simulate.workload import Cycle, Load, Mechanism, Segment

_STEP_MS = 450.0
"""Kernels of one micro-batch, forward and backward."""
_GRADIENT_BYTES = 14e9
"""Bytes that each GPU sends in a ring all-reduce of 8 GB of gradients: 2 x 7/8 of them."""
_LINK_EFFICIENCY = 0.8
"""Share of the link bandwidth that NCCL's large collectives reach."""

SPIN = Load(engine=1.0, sm=0.15, occupancy=0.04, dram=0.001, pcie_rx=1.2e6)
"""A waiting collective: its thread blocks occupy some 20 SMs and poll a flag, without data transfer."""


def training_kernels(board: BoardModel, pace: float) -> Load:
    """Fused attention, GEMMs and normalisations of a transformer, with some overlapped communication."""
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


def gradient_exchange(board: BoardModel) -> Segment:
    """One all-reduce of the gradients; HBM is read and written for every byte sent."""
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
    return Segment(1000 * _GRADIENT_BYTES / rate, traffic, "exchanging")


def _small_exchanges(board: BoardModel) -> Segment:
    """All-reduces of a few hundred kilobytes, two per layer, bound by latency rather than bandwidth."""
    rate = 0.05 * board.peer_bytes_per_second
    traffic = Load(engine=1.0, sm=0.08, occupancy=0.03, dram=0.01, peer_tx=rate, peer_rx=rate)
    return Segment(2.0 if board.nvlink else 5.0, traffic, "exchanging")


def training_step(board: BoardModel, *, pace: float = 1.0, peer_wait_ms: float = 0.0, alone: bool = False) -> Cycle:
    """One optimiser step of data-parallel training.

    `pace` is the kernels' speed relative to the boost clock; `peer_wait_ms` is the wait in the collective for the last
    rank. `alone` omits communication. Over PCIe, gradients of eight micro-batches are accumulated before each exchange.
    """
    batches = 1 if board.nvlink or alone else 8
    kernels = training_kernels(board, pace)
    if alone:
        kernels = kernels._replace(peer_tx=0.0, peer_rx=0.0)
    segments = [Segment(batches * _STEP_MS / pace, kernels, "computing")]
    if peer_wait_ms:
        segments.append(Segment(peer_wait_ms, SPIN, "waiting_peer"))
    if not alone:
        segments.append(gradient_exchange(board))
    return Cycle(*segments, Segment(12.0, Load(), "idle"))


def step_ms(board: BoardModel) -> float:
    """Milliseconds of kernels in one `training_step` at full pace."""
    return _STEP_MS * (1 if board.nvlink else 8)


def starved_rank(board: BoardModel, pace: float) -> Cycle:
    """A training step of a rank whose host launches kernels late: the same kernels with microseconds between them."""
    busy = training_kernels(board, 1.0)
    gappy = Load(*[value * pace for value in busy])
    kernels = Segment(step_ms(board) / pace, gappy, "computing")
    return Cycle(kernels, gradient_exchange(board), Segment(12.0, Load(), "idle"))


def decode(board: BoardModel, *, batch: float = 1.0, tensor_parallel: bool = False) -> Cycle:
    """Token generation by small matrix products, with an occasional prefill.

    `batch` is the relative number of sequences in flight; each kernel reads all weights, whatever the batch.
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


def copy_in(board: BoardModel, *, wire: float = 0.5) -> Cycle:
    """Host-to-device copy by the copy engine at this share of PCIe bandwidth, without a kernel."""
    rate = wire * board.pcie
    return uniform(Load(pcie_rx=rate, dram=rate / board.bandwidth), "copying")


def copy_out(board: BoardModel, *, rate: float) -> Cycle:
    """Device-to-host copy at `rate` bytes per second, as when a checkpoint is written."""
    return uniform(Load(pcie_tx=rate, dram=rate / board.bandwidth), "copying")


def copy_on_board(board: BoardModel) -> Cycle:
    """Continuous device-to-device copy by kernels that load and store."""
    load = Load(engine=1.0, sm=0.9, occupancy=0.85, dram=0.985 * board.dram_ceiling)
    return uniform(load, "computing")


def large_gemm() -> Cycle:
    """Large square BF16 matrix products back to back, with random operands."""
    load = Load(engine=1.0, sm=0.985, occupancy=0.12, tensor=0.87, dram=0.35, fp32=0.005)
    return uniform(load, "computing")


def steady() -> Cycle:
    """Kernels without a pause at a tensor-core activity of 0.4."""
    return uniform(Load(engine=1.0, sm=0.8, occupancy=0.4, tensor=0.4, dram=0.35), "computing")


def warm_up() -> Cycle:
    """Compilation and autotuning: short kernels with long pauses on the host."""
    return Cycle(
        Segment(60.0, Load(engine=1.0, sm=0.5, occupancy=0.2, tensor=0.1, dram=0.2, fp32=0.05), "computing"),
        Segment(240.0, Load(), "idle"),
    )


def one_block(board: BoardModel) -> Cycle:
    """A kernel of one thread block that spins on a flag."""
    return uniform(Load(engine=1.0, sm=1.0 / board.sms, occupancy=0.0005, dram=0.0002), "waiting_peer")


def polling() -> Cycle:
    """A rank that waits in a collective for peers that never arrive."""
    return uniform(SPIN, "waiting_peer")


def polling_host(board: BoardModel) -> Cycle:
    """A kernel that polls a flag in host memory, which a NIC would set: a low, constant rate of PCIe reads."""
    return uniform(SPIN._replace(pcie_rx=0.008 * board.pcie), "waiting_peer")


def polling_queue(board: BoardModel) -> Cycle:
    """A server's persistent kernel that polls an empty request queue in device memory."""
    return uniform(Load(engine=1.0, sm=8.0 / board.sms, occupancy=0.004, dram=0.0005), "waiting_input")


def evaluation() -> Cycle:
    """Forward passes over a validation set, without communication, with short waits for the next batch."""
    forward = Load(engine=1.0, sm=0.85, occupancy=0.35, tensor=0.42, dram=0.4, fp32=0.05)
    return Cycle(Segment(300.0, forward, "computing"), Segment(40.0, Load(), "waiting_input"))


def now_and_then() -> Cycle:
    """A short kernel every half minute, while the host compiles."""
    short = Load(engine=1.0, sm=0.4, occupancy=0.1, dram=0.1, fp32=0.02)
    return Cycle(Segment(29_950.0, Load(), "idle"), Segment(50.0, short, "computing"))


def no_input() -> Cycle:
    """A wait for the next batch from the host."""
    return uniform(Load(), "waiting_input")


def uniform(load: Load, mechanism: Mechanism) -> Cycle:
    """Return a cycle of constant load."""
    return Cycle(Segment(1000.0, load, mechanism))
