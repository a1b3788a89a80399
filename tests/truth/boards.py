"""Power, clock and capability of GPU boards, as a function of what a GPU does.

Peaks, idle powers and reference clocks are NVIDIA's data sheet figures. Power is linear in the activities, as most
published GPU power models are; its coefficients are assumptions chosen so that an H100 draws about 600 W in large
matrix products, 370 W in copies and 150 W while polling for a peer. Dynamic power is taken to rise with the 2.4th power
of the clock (frequency times the square of a voltage that rises less than in proportion), which gives the clock under
a power limit.
"""

from dataclasses import dataclass

from tests.truth.loads import Load

CLOCK_EXPONENT = 2.4
CLOCK_STEP_HZ = 15e6
"""Clocks change in steps of 15 MHz."""


@dataclass(frozen=True)
class Board:
    """A GPU model."""

    model: str
    name: str
    flops: float
    """Dense 16-bit tensor FLOP/s; a format's factor is in `factors`."""
    factors: tuple[tuple[str, float], ...]
    reference_hz: float
    max_hz: float
    idle_hz: float
    dram_bytes: float
    """Bytes per second."""
    nvlink_bytes: float | None
    """Bytes per second in one direction; None: no NVLink."""
    pcie_bytes: float
    idle_watts: float
    """No context."""
    context_watts: float
    """A context and no kernel."""
    limit_watts: float
    scale: float
    """Dynamic power as a multiple of the H100's."""
    memory_gb: float
    slices: int
    instant_power: bool = False
    """The power reading is instantaneous, not the mean of the last second."""

    def factor(self, dtype: str) -> float:
        """Peak FLOP/s of a number format over the 16-bit peak."""
        return dict(self.factors).get(dtype, 1.0)

    def dynamic_watts(self, load: Load) -> float:
        """Power above the context's, at the highest clock."""
        link = (load.nvlink_tx + load.nvlink_rx) / (2 * (self.nvlink_bytes or 450e9))
        bus = (load.pcie_tx + load.pcie_rx) / (2 * self.pcie_bytes)
        h100 = (
            15 * load.resident + 85 * load.sm + 450 * load.tensor + 170 * load.dram + 330 * load.fp64
            + 230 * load.fp32 + 200 * load.fp16 + 30 * link + 12 * bus + 45 * load.codec + load.watts
        )  # fmt: skip
        return self.scale * h100

    def spec(self) -> dict[str, object]:
        """The board's peaks, in the names of the trace format."""
        result: dict[str, object] = {
            "name": self.name,
            "peak_flops": self.flops,
            "peak_flops_tf32": self.flops * self.factor("tf32"),
            "tensor_reference_clock_hz": self.reference_hz,
            "memory_bandwidth_bytes_per_second": self.dram_bytes,
            "pcie_bytes_per_second": self.pcie_bytes,
            "idle_context_watts": self.context_watts,
            "memory_gb": self.memory_gb,
        }
        if self.factor("fp8") != 1.0:
            result["peak_flops_fp8"] = self.flops * self.factor("fp8")
        if self.nvlink_bytes:
            result["nvlink_bytes_per_second"] = self.nvlink_bytes
        if self.slices:
            result["slices"] = self.slices
        return result


H100 = Board(
    model="NVIDIA H100 80GB HBM3", name="H100-SXM5-80GB", flops=989.4e12, factors=(("tf32", 0.5), ("fp8", 2.0)),
    reference_hz=1830e6, max_hz=1980e6, idle_hz=345e6, dram_bytes=3350e9, nvlink_bytes=450e9, pcie_bytes=63e9,
    idle_watts=69.0, context_watts=110.0, limit_watts=700.0, scale=1.0, memory_gb=80.0, slices=7,
)  # fmt: skip
A100 = Board(
    model="NVIDIA A100-SXM4-80GB", name="A100-SXM4-80GB", flops=312e12, factors=(("tf32", 0.5),),
    reference_hz=1410e6, max_hz=1410e6, idle_hz=210e6, dram_bytes=2039e9, nvlink_bytes=300e9, pcie_bytes=31.5e9,
    idle_watts=63.0, context_watts=73.0, limit_watts=400.0, scale=0.56, memory_gb=80.0, slices=7, instant_power=True,
)  # fmt: skip
L40S = Board(
    model="NVIDIA L40S", name="L40S", flops=362e12, factors=(("tf32", 0.5), ("fp8", 2.0)),
    reference_hz=2490e6, max_hz=2520e6, idle_hz=210e6, dram_bytes=864e9, nvlink_bytes=None, pcie_bytes=31.5e9,
    idle_watts=30.0, context_watts=80.0, limit_watts=350.0, scale=0.45, memory_gb=48.0, slices=0,
)  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """What distinguishes one board of a model from another."""

    board: Board
    limit_watts: float
    silicon: float = 1.0
    """Dynamic power as a multiple of the model's typical."""
    locked_hz: float | None = None
    """Highest clock an administrator allows."""

    def power_and_clock(self, load: Load) -> tuple[float, float]:
        """Settled board power (watts) and SM clock (Hz) under `load`, within the power limit."""
        board = self.board
        if not load.context:
            return board.idle_watts, board.idle_hz
        top = min(self.locked_hz or board.max_hz, board.max_hz)
        dynamic = self.silicon * board.dynamic_watts(load) * (top / board.max_hz) ** CLOCK_EXPONENT
        room = self.limit_watts - board.context_watts
        if dynamic <= room:
            return board.context_watts + dynamic, top
        clock = top * (room / dynamic) ** (1 / CLOCK_EXPONENT)
        return self.limit_watts, max(board.idle_hz, clock // CLOCK_STEP_HZ * CLOCK_STEP_HZ)

    def clock_ratio(self, load: Load) -> float:
        """Clock over the reference clock; above 1 on a board that boosts beyond the clock of its data sheet's peak."""
        return self.power_and_clock(load)[1] / self.board.reference_hz
