"""What may be wrong with the readings of a story that is otherwise the same: noise, coarse figures, missing fields.

Owns the list. What a story costs is not known here, nor what the core makes of it.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.model import Observation, Reading
from exporter.simulate.simulation import PROFILED, Simulation
from tests.hidden import without

_SHARES = (
    "gr_engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active",
    "fp16_active", "gpu_utilization",
)  # fmt: skip
_RATES = (
    "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second", "nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second",
)  # fmt: skip
_MIB = 1 << 20


class Condition(Struct, frozen=True, kw_only=True):
    """One way in which sensors are worse than the story's own."""

    name: str
    words: str
    noise: float = 1.0
    """Times the simulation's own error: a Gauss of about 1 % of a share, of 0.6 % of power."""
    coarse: bool = False
    """Shares in whole percents, watts whole, traffic in whole MiB/s."""
    missing: tuple[str, ...] = ()
    silent: bool = False
    """Programs and engines say nothing: what they would have told of is estimated, or found by nobody."""
    period: float = 0.0
    """Seconds of a reading, at least; 0: as the story is examined."""
    shortest: float = 0.0
    """Seconds of a reading, whatever the story is examined with; 0: as it is."""

    def seconds(self, examined: float) -> float:
        """How long a reading is in a story that is examined with readings of `examined` seconds."""
        return self.shortest or max(examined, self.period)


CONDITIONS = (
    Condition(name="as it is", words="every field, a reading each 5 s, the simulated sensors' own noise"),
    Condition(name="noise x 5", words="five times that noise", noise=5.0),
    Condition(name="percents", words="whole percents, watts and MiB/s", coarse=True),
    Condition(name="each 30 s", words="a reading each 30 s", period=30.0),
    Condition(name="no DRAM", words="DRAM activity is missing", missing=("dram_active",)),
    Condition(name="no links", words="NVLink and PCIe are missing", missing=_RATES),
    Condition(name="no SMs", words="SM activity is missing", missing=("sm_active", "sm_occupancy")),
    Condition(name="driver only", words="no performance counter at all", missing=PROFILED),
    Condition(name="no word", words="every field, and not a word from programs or engines", silent=True),
    Condition(name="no word, 1 s", words="the same, a reading each second", silent=True, shortest=1.0),
)


def heard(simulation: Simulation, condition: Condition) -> Iterator[Observation]:
    """Tell a story as a node would that has this trouble."""
    noisy = replace(simulation, plan=replace(simulation.plan, noise=simulation.plan.noise * condition.noise))
    told: Iterable[Observation] = noisy.observations
    if condition.missing:
        told = without(told, signals=condition.missing)
    for observation in told:
        seen = _coarse(observation) if condition.coarse else observation
        yield replace(seen, reports=(), serving=()) if condition.silent else seen


def _coarse(observation: Observation) -> Observation:
    return replace(observation, readings=tuple(map(coarse, observation.readings)))


def coarse(reading: Reading) -> Reading:
    """Round a reading as a driver does that counts in percents."""
    new = {name: _rounded(getattr(reading, name), 0.01) for name in _SHARES}
    new |= {name: _rounded(getattr(reading, name), _MIB) for name in _RATES}
    return replace(reading, **new, power_watts=_rounded(reading.power_watts, 1.0))


def _rounded(value: float | None, grain: float) -> float | None:
    return None if value is None else round(value / grain) * grain
