"""Models GPU boards: datasheet figures, power, clocks, heat and sensor readings.

Deliberately independent of exporter/data, so that tests detect a wrong figure there.
"""

import math
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import MS, Process, Reading, Spec
from exporter.simulate.workload import NORMAL_CLIMATE, Climate, Load

_SM_WEIGHT = 0.12
_TENSOR_WEIGHT = 1.25
_DRAM_WEIGHT = 0.45
_PIPE_WEIGHT = 0.3
"""Power of fully used SMs, tensor cores, DRAM and each other pipe at the boost clock, as shares of the range between
idle and limit. Their sum exceeds 1: a board with everything in use is power-capped. Estimates, chosen so that a large
GEMM is power-capped near 1.75 GHz on H100 SXM and a copy loop draws 60 %."""
_CLOCK_EXPONENT = 2.5
"""Dynamic power is f * V^2, and the voltage rises less than linearly with the frequency."""
_INLET_CELSIUS = 26.0
_COOLING_SECONDS = 45.0
"""Time constant of a heat sink: the time to 63 % of a temperature change."""
CLOCK_STEP_HZ = 15e6
"""SM clocks move in steps of 15 MHz (`nvidia-smi -q -d SUPPORTED_CLOCKS`)."""


class BoardModel(Struct, frozen=True, kw_only=True):
    """One GPU model, in watts, hertz, bytes and kelvin per watt; `peak_flops` is dense 16-bit tensor FLOP/s."""

    name: str
    driver_name: str
    peak_flops: float
    reference_clock_hz: float
    boost_clock_hz: float
    idle_clock_hz: float
    bandwidth: float
    dram_ceiling: float
    nvlink: float | None
    """Bytes per second in one direction over all links; None without NVLink."""
    pcie: float
    """Bytes per second in one direction."""
    memory_bytes: int
    sms: int
    idle_watts: float
    context_watts: float
    limit_watts: float
    kelvin_per_watt: float

    memory_gb: float = 0.0
    """Nominal memory size; MIG profiles are eighths of it."""
    mig_slices: int = 0
    """Number of MIG compute slices; 0 without MIG."""

    @property
    def spec(self) -> Spec:
        """The Spec of a Device of this model."""
        return Spec(
            name=self.name,
            peak_flops=self.peak_flops,
            tensor_reference_clock_hz=self.reference_clock_hz,
            memory_bandwidth_bytes_per_second=self.bandwidth,
            nvlink_bytes_per_second=self.nvlink,
            pcie_bytes_per_second=self.pcie,
            idle_context_watts=self.context_watts,
            dram_ceiling=self.dram_ceiling,
        )

    @property
    def sliceable_spec(self) -> Spec:
        """The same Spec with the possible MIG slices."""
        return replace(self.spec, slices=self.mig_slices, memory_gb=self.memory_gb or None)

    @property
    def peer_bytes_per_second(self) -> float:
        """Bandwidth to peers in one direction: NVLink if present, else PCIe."""
        return self.pcie if self.nvlink is None else self.nvlink


def demand(load: Load) -> float:
    """Return the power of this load at the boost clock, as a share of the range from idle with context to the limit."""
    pipes = load.fp64 + load.fp32 + load.fp16 + load.integer
    return _SM_WEIGHT * load.sm + _TENSOR_WEIGHT * load.tensor + _DRAM_WEIGHT * load.dram + _PIPE_WEIGHT * pipes


def busy_demand(load: Load) -> float:
    """Return the power demand while a kernel runs, to which the governor reacts: pauses are left out of the mean."""
    return demand(load) / load.engine if load.engine > 0 else 0.0


def governed_clock(board: BoardModel, wanted: float) -> float:
    """Return the SM clock in hertz that keeps the board within its power limit at this demand."""
    if wanted <= 1.0:
        return board.boost_clock_hz
    return board.boost_clock_hz / math.pow(wanted, 1.0 / _CLOCK_EXPONENT)


def watts(board: BoardModel, mean_demand: float, *, clock_hz: float, context: bool) -> float:
    """Return mean board power in watts: idle power, the extra power of a CUDA context, and that of the load."""
    still = board.context_watts if context else board.idle_watts
    slowed = math.pow(clock_hz / board.boost_clock_hz, _CLOCK_EXPONENT)
    return still + (board.limit_watts - board.context_watts) * mean_demand * slowed


def warmed(board: BoardModel, celsius: float, *, power: float, inlet: float, seconds: float) -> float:
    """Return the temperature after `seconds` at `power` watts, delayed by the heat sink."""
    target = inlet + board.kelvin_per_watt * power
    return target + (celsius - target) * math.exp(-seconds / _COOLING_SECONDS)


_MIB = 1 << 20

BOARDS: dict[str, BoardModel] = {
    board.name: board
    for board in (
        # H100 datasheet and whitepaper: 989.4 TFLOP/s dense at the tensor boost clock of 1,830 MHz.
        BoardModel(
            name="H100-SXM5-80GB", driver_name="NVIDIA H100 80GB HBM3",
            memory_bytes=81559 * _MIB, memory_gb=80.0, sms=132, mig_slices=7,
            peak_flops=989.4e12, reference_clock_hz=1830e6, boost_clock_hz=1980e6, idle_clock_hz=345e6,
            bandwidth=3.35e12, dram_ceiling=0.92, nvlink=450e9, pcie=63e9,
            idle_watts=70.0, context_watts=114.0, limit_watts=700.0, kelvin_per_watt=0.055,
        ),
        # H200 datasheet: the H100's compute with 141 GB of HBM3e at 4.8 TB/s.
        BoardModel(
            name="H200-SXM", driver_name="NVIDIA H200",
            memory_bytes=143771 * _MIB, memory_gb=141.0, sms=132, mig_slices=7,
            peak_flops=989.4e12, reference_clock_hz=1830e6, boost_clock_hz=1980e6, idle_clock_hz=345e6,
            bandwidth=4.8e12, dram_ceiling=0.92, nvlink=450e9, pcie=63e9,
            idle_watts=76.0, context_watts=120.0, limit_watts=700.0, kelvin_per_watt=0.055,
        ),
        # A100 80GB datasheet: 108 SMs x 2,048 FLOP a cycle make 312 TFLOP/s at 1,411 MHz.
        BoardModel(
            name="A100-SXM4-80GB", driver_name="NVIDIA A100-SXM4-80GB",
            memory_bytes=81920 * _MIB, memory_gb=80.0, sms=108, mig_slices=7,
            peak_flops=312e12, reference_clock_hz=1411e6, boost_clock_hz=1410e6, idle_clock_hz=210e6,
            bandwidth=2.039e12, dram_ceiling=0.80, nvlink=300e9, pcie=31.5e9,
            idle_watts=62.0, context_watts=75.0, limit_watts=400.0, kelvin_per_watt=0.085,
        ),
        # L40S datasheet: 362 TFLOP/s dense (733 is sparse), GDDR6 at 864 GB/s, PCIe 4.0 x16, no NVLink.
        BoardModel(
            name="L40S", driver_name="NVIDIA L40S",
            memory_bytes=46068 * _MIB, sms=142,
            peak_flops=362e12, reference_clock_hz=2490e6, boost_clock_hz=2520e6, idle_clock_hz=210e6,
            bandwidth=864e9, dram_ceiling=0.80, nvlink=None, pcie=31.5e9,
            idle_watts=33.0, context_watts=84.0, limit_watts=350.0, kelvin_per_watt=0.11,
        ),
        # L4 datasheet: 121 TFLOP/s dense, GDDR6 at 300 GB/s, 72 W from the slot alone, no NVLink.
        BoardModel(
            name="L4", driver_name="NVIDIA L4",
            memory_bytes=23034 * _MIB, sms=58,
            peak_flops=121e12, reference_clock_hz=2037e6, boost_clock_hz=2040e6, idle_clock_hz=210e6,
            bandwidth=300e9, dram_ceiling=0.80, nvlink=None, pcie=31.5e9,
            idle_watts=15.0, context_watts=28.0, limit_watts=72.0, kelvin_per_watt=0.5,
        ),
        # DGX B200 datasheet, an eighth of it, without sparsity: 2.25 PFLOP/s, HBM3e at 7.7 TB/s, 1,000 W.
        BoardModel(
            name="B200-SXM", driver_name="NVIDIA B200",
            memory_bytes=183359 * _MIB, memory_gb=180.0, sms=148, mig_slices=7,
            peak_flops=2250e12, reference_clock_hz=1856e6, boost_clock_hz=1965e6, idle_clock_hz=120e6,
            bandwidth=7.7e12, dram_ceiling=0.92, nvlink=900e9, pcie=63e9,
            idle_watts=140.0, context_watts=190.0, limit_watts=1000.0, kelvin_per_watt=0.04,
        ),
    )
}  # fmt: skip


REASON_IDLE = 0x1
REASON_POWER_CAP = 0x4
"""`nvmlClocksEventReasonGpuIdle` and `nvmlClocksEventReasonSwPowerCap` (nvml.h)."""
_PAGE = 2 << 20
_CONTEXT_BYTES = 528 << 20
"""Memory of a CUDA context and its loaded modules."""
_DRIVER_BYTES = 4 << 20
_POLLING_BYTES_PER_SECOND = 60e3
"""PCIe traffic of the driver's own polling while a process has a context."""
_JITTER = 0.2
"""Probability that a loaded board's clock is read one step lower than its governor sets it."""


def cuda_process(board: BoardModel, pid: int, *, share: float, name: str) -> Process:
    """Return a process with a CUDA context and this share of the board's memory, in whole 2 MiB pages."""
    free = board.memory_bytes - _CONTEXT_BYTES - _DRIVER_BYTES
    return Process(pid, memory_bytes=_CONTEXT_BYTES + int(free * share) // _PAGE * _PAGE, name=name)


class BoardSensors:
    """Simulates one board's sensors; the board's temperature is kept from one read to the next.

    `noise` scales every sensor's error; 0 makes them exact (values are still rounded as counters are). `floor` is the
    minimum share of the power limit drawn while a kernel is resident (power smoothing).
    """

    def __init__(self, board: BoardModel, uuid: str, rng: Random, *, noise: float = 1.0, floor: float = 0.0) -> None:
        self._board = board
        self._uuid = uuid
        self._rng = rng
        self._noise = noise
        self._floor = floor * board.limit_watts
        self._celsius = _INLET_CELSIUS + board.kelvin_per_watt * board.idle_watts

    def read(
        self,
        start_ms: int,
        end_ms: int,
        *,
        load: Load,
        climate: Climate = NORMAL_CLIMATE,
        process: Process | None = None,
    ) -> Reading:
        """Return a reading of all sensors over [start, end) milliseconds of node time, under this mean load."""
        awake = process is not None or load.engine > 0
        clock = self._clock(load, climate, awake=awake)
        power = self._power(load, clock, awake=awake)
        seconds = (end_ms - start_ms) / 1000
        inlet = _INLET_CELSIUS + climate.inlet_kelvin
        self._celsius = warmed(self._board, self._celsius, power=power, inlet=inlet, seconds=seconds)
        g = self._share(load.engine)
        s = min(g, self._share(load.sm))
        pcie_tx, pcie_rx, link_tx, link_rx = self._wires(load, awake=awake)
        return Reading(
            uuid=self._uuid,
            start=start_ms * MS,
            end=end_ms * MS,
            gr_engine_active=g,
            sm_active=s,
            sm_occupancy=min(s, self._share(load.occupancy)),
            tensor_active=min(s, self._share(load.tensor)),
            dram_active=self._share(load.dram),
            fp64_active=min(s, self._share(load.fp64)),
            fp32_active=min(s, self._share(load.fp32)),
            fp16_active=min(s, self._share(load.fp16)),
            pcie_tx_bytes_per_second=pcie_tx,
            pcie_rx_bytes_per_second=pcie_rx,
            nvlink_tx_bytes_per_second=link_tx,
            nvlink_rx_bytes_per_second=link_rx,
            gpu_utilization=math.ceil(min(1.0, load.engine) * 100 - 1e-6) / 100,
            power_watts=round(power * self._about_one(0.006), 3),
            enforced_power_limit_watts=self._board.limit_watts,
            energy_joules=round(power * (end_ms - start_ms) / 1000, 3),  # not seconds: rounded differently
            temperature_celsius=float(round(self._celsius + self._error(0.2))),
            sm_clock_hz=clock,
            memory_used_bytes=float(_DRIVER_BYTES + ((process and process.memory_bytes) or 0)),
            memory_total_bytes=float(self._board.memory_bytes),
            clock_event_reasons=self._reasons(load, climate),
            processes=(process,) if process else (),
        )

    def _clock(self, load: Load, climate: Climate, *, awake: bool) -> float:
        """Return the SM clock: low without a process, else as high as power and cap allow, even without kernels."""
        if not awake:
            return self._board.idle_clock_hz
        clock = min(governed_clock(self._board, busy_demand(load)), climate.clock_cap_hz)
        if not self._noise:
            return clock
        below = load.engine > 0 and self._rng.random() < _JITTER
        return CLOCK_STEP_HZ * (clock // CLOCK_STEP_HZ - below)

    def _power(self, load: Load, clock: float, *, awake: bool) -> float:
        drawn = watts(self._board, demand(load), clock_hz=clock, context=awake)
        floor = self._floor * min(1.0, load.engine)
        return min(self._board.limit_watts, max(floor, drawn))

    def _reasons(self, load: Load, climate: Climate) -> int:
        if load.engine <= 0:
            return REASON_IDLE
        capped_by_power = governed_clock(self._board, busy_demand(load)) < self._board.boost_clock_hz
        return climate.event_reasons | (REASON_POWER_CAP if capped_by_power else 0)

    def _wires(self, load: Load, *, awake: bool) -> tuple[float, float, float | None, float | None]:
        """Return traffic in bytes per second: PCIe out and in, NVLink out and in (None without NVLink)."""
        chatter = float(round(abs(self._error(_POLLING_BYTES_PER_SECOND)))) if awake else 0.0
        tx, rx = self._rate(load.peer_tx), self._rate(load.peer_rx)
        out, into = self._rate(load.pcie_tx) + chatter, self._rate(load.pcie_rx) + chatter
        if self._board.nvlink is None:
            return out + tx, into + rx, None, None
        return out, into, tx, rx

    def _rate(self, value: float) -> float:
        return float(round(max(0.0, value) * self._about_one(0.01)))

    def _share(self, value: float) -> float:
        """Add noise to a share and round it to 0.01 %, as GPM does; there is no noise at 0 and little at 1."""
        if value <= 0:
            return 0.0
        noisy = value + self._error(0.02 * value * max(0.0, 1 - value)) - abs(self._error(0.0002 * value))
        return min(1.0, max(0.0, round(noisy, 4)))

    def _about_one(self, sigma: float) -> float:
        return 1.0 + self._error(sigma)

    def _error(self, sigma: float) -> float:
        return self._rng.gauss(0.0, sigma) * self._noise if self._noise else 0.0
