"""What is known of a board beside its readings: its condition, and what limits its clocks."""

from msgspec import Struct

from exporter.core.evidence import Evidence
from exporter.core.model import Health

CLOCK_LIMITERS = {"power": 0x04, "thermal": 0x20 | 0x40, "hardware": 0x08 | 0x80, "settings": 0x02 | 0x10 | 0x100}
"""Groups of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*): software power cap; software and hardware
thermal slowdown; hardware slowdown and power brake; application and display clocks, sync boost. 0x01 is GPU idle."""


class BoardHealth(Struct, eq=False):
    """One board's latest Health, and counters since the daemon first saw the board.

    A MIG instance has no Health of its own; its board's applies.
    """

    health: Health | None = None
    xids: int = 0
    last_xid: int = 0
    fatal_since: int | None = None
    """When the latest fatal Xid was reported; None: never."""
    outlived: int | None = None
    """Start of the first reading after it in which a kernel ran, which disproves it; None: not yet."""
    recovery: int = 0
    """The recovery action that the driver requests (`Health.recovery_action`); 0: none."""
    recovery_since: int = 0
    """When that action was first reported."""
    works_since: int | None = None
    """Start of the first reading after it in which a kernel ran; None: not yet."""
    limited: dict[str, int] = {}
    """Nanoseconds with the clock limited, by group of CLOCK_LIMITERS; empty until clock event reasons are available."""

    def update(self, health: Health, at: int, fatal_xids: tuple[int, ...]) -> None:
        """Store the Health read at `at`."""
        if health.recovery_action is not None and health.recovery_action != self.recovery:
            self.recovery, self.recovery_since, self.works_since = health.recovery_action, at, None
        self.health = health
        self.xids += len(health.xids)
        if health.xids:
            self.last_xid = health.xids[-1]
        if any(xid in fatal_xids for xid in health.xids):
            self.fatal_since, self.outlived = at, None

    def add_clock_limits(self, ev: Evidence) -> None:
        """Add one reading of the device itself to `limited`."""
        bits = ev.reading.clock_event_reasons
        if bits is None or ev.distrust:
            return
        if not self.limited:
            self.limited = dict.fromkeys(CLOCK_LIMITERS, 0)
        if bits > 1:
            for name, mask in CLOCK_LIMITERS.items():
                if bits & mask:
                    self.limited[name] += ev.reading.end - ev.reading.start

    @property
    def in_trouble(self) -> bool:
        """A fatal Xid was reported, or the driver requests a recovery action."""
        return self.fatal_since is not None or self.recovery != 0

    def check_outlived(self, ev: Evidence) -> None:
        """Check one reading of the board or an instance: a kernel that runs after a fatal Xid disproves it."""
        start = ev.reading.start
        if not ev.kernel_runs or ev.distrust:
            return
        if self.fatal_since is not None and start >= self.fatal_since:
            self.outlived = start if self.outlived is None else min(start, self.outlived)
        if self.recovery and start >= self.recovery_since:
            self.works_since = start if self.works_since is None else min(start, self.works_since)

    def set_condition(self, ev: Evidence) -> None:
        """Set the condition of one reading.

        After a fatal Xid the GPU is unusable until a kernel has run. While a recovery action is requested, too; then it
        is usable for its holders only: new work should go elsewhere, but NVIDIA lets what runs finish, for instance
        before a reset (docs.nvidia.com, "GPU Memory Error Management", Error Recovery and Response Flags).
        """
        start = ev.reading.start
        ev.usable_by_holders = ev.condition == "recovery" and _is_past(self.works_since, start)
        unusable = self.fatal_since is not None and not _is_past(self.outlived, start)
        if unusable and (ev.usable_by_holders or not ev.condition):
            ev.condition, ev.usable_by_holders = "xid", False

    @property
    def power_smoothed(self) -> bool:
        """Power smoothing is enabled."""
        return self.health is not None and bool(self.health.power_smoothing)


def _is_past(moment: int | None, now: int) -> bool:
    return moment is not None and now >= moment
