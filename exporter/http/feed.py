"""Where snapshots come from, and whether the newest may be called live. Owns that judgement; refuses to speak HTTP."""

from collections.abc import Callable

from msgspec import Struct

from exporter.core.model import SECOND
from exporter.core.snapshot import Snapshot


class Seen(Struct, frozen=True):
    """The newest snapshot, how old it is in nanoseconds, and why it may not be called live, if so."""

    snapshot: Snapshot | None
    age: int = 0
    problem: str = ""


class Feed(Struct, frozen=True, kw_only=True):
    """Where snapshots come from, and how old one may be."""

    latest: Callable[[], Snapshot | None]
    now: Callable[[], int]
    """Monotonic nanoseconds, the clock of `Snapshot.at`."""
    max_age_seconds: float
    why_not: Callable[[], str]

    def look(self) -> Seen:
        """Take the newest snapshot once: the reference may change at any moment."""
        snapshot = self.latest()
        if snapshot is None:
            why = self.why_not() or "the first takes one interval; if this lasts, read the exporter's log"
            return Seen(None, problem=f"nothing has been sampled yet: {why}")
        age = max(0, self.now() - snapshot.at)
        if age <= self.max_age_seconds * SECOND:
            return Seen(snapshot, age)
        why = self.why_not() or "the sampling loop gives no reason; read the exporter's log and restart it"
        limit = f"{self.max_age_seconds:g} s allowed"
        return Seen(snapshot, age, f"the newest sample is {age / SECOND:.0f} s old ({limit}): {why}")
