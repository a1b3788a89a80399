"""What a scrape may be told, so that no restart goes back behind it.

A restart goes on from a checkpoint that is young (`young_of`), and only then can it go back behind what was told. So
while the file may hold a young checkpoint, a scrape is told what the latest checkpoint covers, and no more; once
there is none, or the file itself says that it was outrun, it is told what is. With a disk that answers that is always
the newest. With one that hangs, counters stand still for as long as a restart would go on from where they stand.

Owns this rule. Refuses locks, threads and files: who shares it holds a lock.
"""

from msgspec.structs import replace

from exporter.config import History as Settings
from exporter.core.model import NEVER, SECOND
from exporter.core.snapshot import Snapshot


def young_of(settings: Settings) -> int:
    """Nanoseconds for which a checkpoint that nobody closed may be gone on from: two of them, and time to start."""
    return round((2 * settings.checkpoint_seconds + 30) * SECOND)


class Covered:
    """Up to when everything is saved, and what follows for a scrape."""

    def __init__(self, young: int) -> None:
        self._young = young
        self._told: Snapshot | None = None
        """The latest that a checkpoint covers."""
        self._attempted = NEVER
        """The moment of the latest checkpoint that may be in the file: one that failed may be there all the same."""
        self.asked = self.saved = NEVER
        """Up to when somebody wants all to be saved, and up to when it is."""

    def inherit(self, at: int) -> None:
        """The file holds a checkpoint of that moment, which another daemon has written."""
        self._attempted = at

    def attempt(self, snapshot: Snapshot, now: int) -> None:
        """From now on the file may hold a checkpoint of the newest Snapshot, and a restart go on from there.

        Who was free to be told anything was told no more than this, and must not be told less from here on.
        """
        if self.free(now):
            self._told = snapshot
        self._attempted = snapshot.at

    def succeed(self, snapshot: Snapshot) -> None:
        """It does."""
        self._told, self.saved = snapshot, snapshot.at

    def outrun(self) -> None:
        """The file says that nobody may go on from it."""
        self._attempted = NEVER

    def free(self, now: int) -> bool:
        """Whether nobody would go on from the file, whatever it holds."""
        return now - self._attempted > self._young

    def of(self, snapshot: Snapshot, now: int) -> Snapshot | None:
        """What may be told in its place; None: nothing yet."""
        if self.saved >= snapshot.at or self.free(now):
            return snapshot
        return None if self._told is None else replace(self._told, meta=snapshot.meta)
