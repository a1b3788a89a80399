"""What is known of a board's condition beside its work, and what follows from it.

Owns the counting of critical errors and of time under a clock limit, and whether a fatal error has been outlived.
Refuses to judge the GPU's state: it only names a condition.
"""

from msgspec import Struct

from exporter.core.evidence import Evidence
from exporter.core.model import Health

LIMITERS = {"power": 0x04, "thermal": 0x20 | 0x40, "hardware": 0x08 | 0x80, "settings": 0x02 | 0x10 | 0x100}
"""Groups of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*): software power cap; software and hardware
thermal slowdown; hardware slowdown and power brake; application and display clocks, sync boost. 0x01 is idleness."""


class Vitals(Struct, eq=False):
    """One board's latest Health, and what has been counted since the daemon saw it first.

    A MIG instance has no Health of its own: its board's tells whether it can work.
    """

    health: Health | None = None
    xids: int = 0
    last_xid: int = 0
    fatal_since: int | None = None
    """When the latest fatal Xid was told; None: never."""
    outlived: int | None = None
    """Since when a kernel has been seen to outlive it; None: not yet."""
    limited: dict[str, int] = {}
    """Nanoseconds with the clock held down, by group; empty until the reasons were seen."""

    def hear(self, health: Health, at: int, fatal_xids: tuple[int, ...]) -> None:
        """Take in what was read at `at`."""
        self.health = health
        self.xids += len(health.xids)
        if health.xids:
            self.last_xid = health.xids[-1]
        if any(xid in fatal_xids for xid in health.xids):
            self.fatal_since, self.outlived = at, None

    def see(self, ev: Evidence) -> None:
        """Take in one reading of the device itself: time under a limit."""
        bits = ev.reading.clock_event_reasons
        if bits is None or ev.distrust:
            return
        if not self.limited:
            self.limited = dict.fromkeys(LIMITERS, 0)
        if bits > 1:
            for name, mask in LIMITERS.items():
                if bits & mask:
                    self.limited[name] += ev.reading.end - ev.reading.start

    def outlive(self, ev: Evidence, fatal_since: int) -> None:
        """Take in one reading of the board or of an instance: a kernel that runs after a fatal error disproves it."""
        start = ev.reading.start
        if ev.runs and not ev.distrust and start >= fatal_since:
            self.outlived = start if self.outlived is None else min(start, self.outlived)

    def condition(self, start: int) -> str:
        """Why the GPU cannot work from `start` on once a fatal error was told: "xid", or empty if one outlived it."""
        return "xid" if self.outlived is None or start < self.outlived else ""

    @property
    def power_smoothed(self) -> bool:
        """The board keeps its power flat on purpose."""
        return self.health is not None and bool(self.health.power_smoothing)
