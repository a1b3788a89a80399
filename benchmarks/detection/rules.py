"""The rules of thumb that people page on today, and our own with one guard taken away.

Owns both tables. The rules of thumb are written from their words alone and share nothing with the core: a rule holds
for one GPU once its condition has held for its time without a break, or a mean once its window is full. Where they
are from:

- full utilisation at low power: the check for stalled NCCL jobs that ClusterMAX expects of a provider
  (clustermax.ai/expectations/health-checks); 98 % and 30 % are the figures it is commonly given, and the SM clock
  instead of the utilisation, and links at rest instead of the power, are its variants. A strict zero of the links
  would find nothing, for a spin's heartbeat crosses PCIe; the limits here are the core's own, in its favour.
- tensor <= 0.001 for 5 minutes: asked for by this project's issue 10; no publication of it was found.
- at rest for 30 minutes: gpu-pruner's default, which takes up to 1 % for zero (github.com/wseaton/gpu-pruner).
- zero for 120 minutes: jobs are cancelled after nearly 2 hours at 0 % (github.com/PrincetonUniversity/
  job_defense_shield).
- a mean below a few percent over an hour: a least utilisation in a window, as dstack's `utilization_policy` takes it
  (github.com/dstackai/dstack, issue 2374); 5 % and 1 h are ours, for it has no defaults.

The watchdog of NCCL is in `benchmarks.detection.watchdog`: it sits in the program.
"""

from collections import deque
from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.detection.cases import Detector
from exporter.core.model import SECOND, Device, Reading
from exporter.core.policy import Policy
from exporter.core.snapshot import Snapshot

Condition = Callable[[Reading, Device], bool]


def _power_share(reading: Reading) -> float:
    """Of the limit; above all limits where either is not seen."""
    if reading.power_watts is None or not reading.enforced_power_limit_watts:
        return 9.0
    return reading.power_watts / reading.enforced_power_limit_watts


def _busy_but_cool(reading: Reading, _: Device) -> bool:
    return (reading.gpu_utilization or 0.0) >= 0.98 and _power_share(reading) <= 0.3


def _fast_but_cool(reading: Reading, device: Device) -> bool:
    reference = device.spec and device.spec.tensor_reference_clock_hz
    return bool(reference and (reading.sm_clock_hz or 0.0) >= 0.9 * reference) and _power_share(reading) <= 0.3


def _no_tensor(reading: Reading, _: Device) -> bool:
    return reading.tensor_active is not None and reading.tensor_active <= 0.001


def _busy_and_silent(reading: Reading, _: Device) -> bool:
    """Links that the board does not have, or that are not seen, do not count; it takes one that is."""
    nvlink = reading.nvlink_tx_bytes_per_second, reading.nvlink_rx_bytes_per_second
    pcie = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
    quiet = [rate < 100e6 for rate in nvlink if rate is not None] + [rate < 10e6 for rate in pcie if rate is not None]
    return (reading.gpu_utilization or 0.0) >= 0.98 and bool(quiet) and all(quiet)


def _not_utilised(reading: Reading, _: Device) -> bool:
    return reading.gpu_utilization == 0.0


def _hardly_active(reading: Reading, _: Device) -> bool:
    """Of the engine's activity where it is seen, else of the utilisation: gpu-pruner asks for them in this order."""
    active = reading.gpu_utilization if reading.gr_engine_active is None else reading.gr_engine_active
    return active is not None and active <= 0.01


def _seen(reading: Reading, _: Device) -> bool:
    return reading.gpu_utilization is not None


class Thumb(Struct, frozen=True):
    """One rule of thumb: what it is used to find, its words, its condition on a reading, and for how many seconds."""

    detector: Detector
    words: str
    condition: Condition
    seconds: int
    below: float | None = None
    """The mean utilisation of those seconds must be less, too."""


THUMBS: tuple[Thumb, ...] = (
    Thumb("hang", "utilisation >= 98 % and power <= 30 % of the limit for 5 min", _busy_but_cool, 300),
    Thumb("hang", "SM clock up and power <= 30 % of the limit for 5 min", _fast_but_cool, 300),
    Thumb("hang", "tensor activity <= 0.001 for 5 min", _no_tensor, 300),
    Thumb("zombie", "utilisation 0 for 30 min", _not_utilised, 1800),
    Thumb("zombie", "utilisation 0 for 120 min", _not_utilised, 7200),
    Thumb("hang", "utilisation >= 98 %, NVLink < 100 MB/s and PCIe < 10 MB/s for 5 min", _busy_and_silent, 300),
    Thumb("zombie", "engine active <= 1 % for 30 min (gpu-pruner)", _hardly_active, 1800),
    Thumb("zombie", "mean utilisation < 5 % over 1 h", _seen, 3600, below=0.05),
)


class Mean(Struct):
    """The mean utilisation of the last so many seconds, each reading by how long it lasted."""

    kept: deque[tuple[int, int, float]] = field(default_factory=deque)
    total: float = 0.0

    def add(self, reading: Reading, window: int) -> float:
        """Take in one more, forget what has left the window, and give the mean."""
        length, value = reading.end - reading.start, reading.gpu_utilization or 0.0
        self.kept.append((reading.end, length, value))
        self.total += value * length
        while self.kept[0][0] <= reading.end - window:
            _, gone, was = self.kept.popleft()
            self.total -= was * gone
        return self.total / sum(length for _, length, _ in self.kept)


class Watch(Struct):
    """Follows all rules of thumb through one run: allocated GPUs only, and a job is paged for any GPU of it."""

    fired: list[dict[str, int]] = field(default_factory=lambda: [{} for _ in THUMBS])
    since: dict[tuple[int, str], int] = field(default_factory=dict)
    means: dict[tuple[int, str], Mean] = field(default_factory=dict)
    first: int | None = None

    def look(self, views: list[Snapshot]) -> None:
        """Take in what every node shows of its GPUs."""
        at = views[0].at
        self.first = at if self.first is None else self.first
        for gpu in (gpu for view in views for gpu in view.gpus):
            reading = gpu.reading if gpu.live and gpu.owners else None
            for index, rule in enumerate(THUMBS):
                if self._holds((index, gpu.device.uuid), rule, reading, gpu.device, at):
                    named = gpu.owners[0].job_id if rule.detector == "hang" else gpu.device.uuid
                    self.fired[index].setdefault(named, at - self.first)

    def _holds(self, key: tuple[int, str], rule: Thumb, reading: Reading | None, device: Device, at: int) -> bool:
        """Whether a rule has held for its time, and its mean is as low as it asks."""
        if reading is None or not rule.condition(reading, device):
            self.since.pop(key, None)
            self.means.pop(key, None)
            return False
        long = at - self.since.setdefault(key, reading.start) >= rule.seconds * SECOND
        if rule.below is None:
            return long
        return self.means.setdefault(key, Mean()).add(reading, rule.seconds * SECOND) < rule.below and long


_ALWAYS, _NEVER = 1.0, 1e15
GUARDS: Mapping[str, dict[str, float]] = {
    "tensor cores at rest": {"working_tensor": _ALWAYS},
    "DRAM at rest": {"working_dram": _ALWAYS},
    "FP pipes at rest": {"working_fp": _ALWAYS},
    "NVLink at rest": {"spin_nvlink_bytes_per_second": _NEVER},
    "PCIe at rest": {"spin_pcie_bytes_per_second": _NEVER},
    "power near idle": {"spin_power_share": 1.0, "spin_power_share_with_fp": 1.0},
    "engine busy without a pause": {"spin_engine": 0.5},
    "even host polling is no work": {"spin_pcie_flat_share": 0.0},
    "stray readings do not restart it": {"hang_stray_share": 1e-6},
    "five minutes": {"hang_seconds": 121.0},
}
"""Each guard of the hang rule, and thresholds that make it toothless."""


def without_guard(name: str) -> Policy:
    """The policy without one guard."""
    return replace(Policy(), **GUARDS[name])
