"""What the board's own sensors make of a load: noise, quantisation, thermal inertia.

Owns the way from a mean `Load` over an interval to a `Reading`. Refuses to know what the load was for.
"""

import math
from random import Random

from exporter.core.model import MS, Process, Reading
from exporter.simulate.boards import CLOCK_STEP_HZ, Board, busy_demand, demand, governed_clock, warmed, watts
from exporter.simulate.work import CALM, Climate, Load

REASON_IDLE = 0x1
REASON_POWER_CAP = 0x4
"""`nvmlClocksEventReasonGpuIdle` and `nvmlClocksEventReasonSwPowerCap` (nvml.h)."""
_PAGE = 2 << 20
_CONTEXT_BYTES = 528 << 20
"""What a CUDA context and its loaded modules occupy before the first tensor."""
_DRIVER_BYTES = 4 << 20
_CHATTER = 60e3
"""Bytes per second that the driver's own polling moves over PCIe while a process holds the GPU."""
_JITTER = 0.2
"""How often a loaded board is seen one clock step lower than its governor wants."""


def program(board: Board, pid: int, *, share: float, name: str) -> Process:
    """Give a process that holds a context and this share of the board's memory, in whole 2 MiB pages."""
    free = board.memory_bytes - _CONTEXT_BYTES - _DRIVER_BYTES
    return Process(pid, memory_bytes=_CONTEXT_BYTES + int(free * share) // _PAGE * _PAGE, name=name)


class Meter:
    """One board's sensors and its heat: what it read last stays in its temperature.

    `noise` scales every sensor's error; 0 makes them exact (counters keep their grain). `floor` is the share of the
    limit that a board which smooths its power draws at least while a kernel is resident.
    """

    def __init__(self, board: Board, uuid: str, rng: Random, *, noise: float = 1.0, floor: float = 0.0) -> None:
        self._board = board
        self._uuid = uuid
        self._rng = rng
        self._noise = noise
        self._floor = floor * board.limit_watts
        self._celsius = board.inlet_celsius + board.kelvin_per_watt * board.idle_watts

    def read(
        self,
        start_ms: int,
        end_ms: int,
        *,
        load: Load,
        climate: Climate = CALM,
        process: Process | None = None,
    ) -> Reading:
        """Read every sensor over [start, end) milliseconds of node time, under this mean load."""
        awake = process is not None or load.engine > 0
        clock = self._clock(load, climate, awake=awake)
        power = self._power(load, clock, awake=awake)
        self._warm(power, climate, seconds=(end_ms - start_ms) / 1000)
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
            energy_joules=round(power * (end_ms - start_ms) / 1000, 3),
            temperature_celsius=float(round(self._celsius + self._error(0.2))),
            sm_clock_hz=clock,
            memory_used_bytes=float(_DRIVER_BYTES + ((process and process.memory_bytes) or 0)),
            memory_total_bytes=float(self._board.memory_bytes),
            clock_event_reasons=self._reasons(load, climate),
            processes=(process,) if process else (),
        )

    def _clock(self, load: Load, climate: Climate, *, awake: bool) -> float:
        """Without a process the clock sleeps; with one it stays up, kernel or not, as far as power allows."""
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

    def _warm(self, power: float, climate: Climate, *, seconds: float) -> None:
        inlet = self._board.inlet_celsius + climate.inlet_kelvin
        self._celsius = warmed(self._board, self._celsius, power=power, inlet=inlet, seconds=seconds)

    def _reasons(self, load: Load, climate: Climate) -> int:
        if load.engine <= 0:
            return REASON_IDLE
        capped_by_power = governed_clock(self._board, busy_demand(load)) < self._board.boost_clock_hz
        return climate.event_reasons | (REASON_POWER_CAP if capped_by_power else 0)

    def _wires(self, load: Load, *, awake: bool) -> tuple[float, float, float | None, float | None]:
        """Traffic in bytes per second: PCIe out and in, NVLink out and in (None where there is none)."""
        chatter = float(round(abs(self._error(_CHATTER)))) if awake else 0.0
        tx, rx = self._rate(load.peer_tx), self._rate(load.peer_rx)
        out, into = self._rate(load.pcie_tx) + chatter, self._rate(load.pcie_rx) + chatter
        if self._board.nvlink is None:
            return out + tx, into + rx, None, None
        return out, into, tx, rx

    def _rate(self, value: float) -> float:
        return float(round(max(0.0, value) * self._about_one(0.01)))

    def _share(self, value: float) -> float:
        """Round a share to a hundredth of a percent, as GPM does; the error vanishes at 0, nearly so at 1."""
        if value <= 0:
            return 0.0
        noisy = value + self._error(0.02 * value * max(0.0, 1 - value)) - abs(self._error(0.0002 * value))
        return min(1.0, max(0.0, round(noisy, 4)))

    def _about_one(self, sigma: float) -> float:
        return 1.0 + self._error(sigma)

    def _error(self, sigma: float) -> float:
        return self._rng.gauss(0.0, sigma) * self._noise if self._noise else 0.0
