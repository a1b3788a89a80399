"""The rules of thumb that people page on today, and our own with one guard taken away.

Owns both tables. The rules of thumb are written from their words alone and share nothing with the core: a rule holds
for one GPU once its condition has held for its time without a break.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.detection_cases import Detector
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


def _not_utilised(reading: Reading, _: Device) -> bool:
    return reading.gpu_utilization == 0.0


class Thumb(Struct, frozen=True):
    """One rule of thumb: what it is used to find, its words, its condition on a reading, and for how many seconds."""

    detector: Detector
    words: str
    condition: Condition
    seconds: int


THUMBS: tuple[Thumb, ...] = (
    Thumb("hang", "utilisation >= 98 % and power <= 30 % of the limit for 5 min", _busy_but_cool, 300),
    Thumb("hang", "SM clock up and power <= 30 % of the limit for 5 min", _fast_but_cool, 300),
    Thumb("hang", "tensor activity <= 0.001 for 5 min", _no_tensor, 300),
    Thumb("zombie", "utilisation 0 for 30 min", _not_utilised, 1800),
    Thumb("zombie", "utilisation 0 for 120 min", _not_utilised, 7200),
)


class Watch(Struct):
    """Follows all rules of thumb through one run: allocated GPUs only, and a job is paged for any GPU of it."""

    fired: list[dict[str, int]] = field(default_factory=lambda: [{} for _ in THUMBS])
    since: dict[tuple[int, str], int] = field(default_factory=dict)
    first: int | None = None

    def look(self, views: list[Snapshot]) -> None:
        """Take in what every node shows of its GPUs."""
        at = views[0].at
        self.first = at if self.first is None else self.first
        for gpu in (gpu for view in views for gpu in view.gpus):
            reading = gpu.reading if gpu.live and gpu.owners else None
            for index, rule in enumerate(THUMBS):
                key = (index, gpu.device.uuid)
                if reading is None or not rule.condition(reading, gpu.device):
                    self.since.pop(key, None)
                    continue
                begun = self.since.setdefault(key, reading.start)
                if at - begun >= rule.seconds * SECOND:
                    named = gpu.owners[0].job_id if rule.detector == "hang" else gpu.device.uuid
                    self.fired[index].setdefault(named, at - self.first)


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
