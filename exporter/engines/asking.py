"""One address and what came of asking it: when it is asked next, and what stands against it.

Owns the pace: how often an engine that answers is asked, and how long one is left alone that does not. Refuses the
connection (`web`) and the words (`known`).
"""

from collections.abc import Callable

from exporter.core.model import SECOND, Fault
from exporter.engines.finding import Target
from exporter.engines.intervals import Replica
from exporter.engines.known import engine_of
from exporter.engines.web import Trouble
from exporter.wording import without_secrets

ALONE = 300 * SECOND
"""For which an address is left alone that answers nothing of ours."""
PATIENCE = 60 * SECOND
"""The longest wait between two tries at an engine that has answered before, or that starts."""
GRACE = 600 * SECOND
"""For which a known engine may say nothing: large weights take minutes to load."""
JITTER = 0.1
"""Of the interval, to either side: engines on many nodes are not all asked at once."""
_STARTING = ("refused", "timeout", "half_page")
"""What an engine may do that is not ready yet."""


class Asked:
    """A target, its replica, and its pace."""

    def __init__(self, target: Target, replica: Replica, *, interval: int, chance: Callable[[], float]) -> None:
        """`interval` in nanoseconds; `chance` gives 0-1."""
        self.target, self.replica = target, replica
        self.due = 0
        self.busy = False
        self.front = False
        self.path = 0
        self.heard_at: int | None = None
        """The last page of an engine; None: there was none."""
        self.trouble: Trouble | None = None
        self._since = 0
        self._interval, self._chance, self._failures = interval, chance, 0

    def answers(self, now: int) -> bool:
        """Whether it is an engine, and was one lately."""
        return self.heard_at is not None and now - self.heard_at <= ALONE

    def heard(self, now: int, *, front: bool) -> None:
        """A page came, at `now`."""
        self.heard_at, self.trouble, self._failures, self.front = now, None, 0, front
        self._wait(now, self._interval)

    def failed(self, now: int, trouble: Trouble) -> None:
        """None came. Waits double up to PATIENCE; what is no engine at all is left alone."""
        self._since = now if self.trouble is None else self._since
        self.trouble = trouble
        self._failures += 1
        if self.heard_at is None and trouble.kind not in _STARTING:
            self._wait(now, ALONE)
        else:
            longest = max(PATIENCE, self._interval)
            self._wait(now, min(self._interval * 2 ** min(self._failures, 16), longest))

    def fault(self, now: int, *, alone: bool) -> Fault | None:
        """What stands against an engine that answered before, or an address that the operator gave.

        Of a process whose command line is an engine's also, once GRACE is over, where nothing else of its job answers
        (`alone`). None for the others: that a port is somebody else's is no fault.
        """
        trouble = self.trouble
        if trouble is None:
            return None
        known = self.heard_at is not None or not self.target.owner or trouble.kind == "dialect"
        late = alone and now - self._since >= GRACE and engine_of(self.target.command) is not None
        if not (known or late):
            return None
        address = without_secrets(f"{self.target.base}{self.target.paths[self.path]}")
        where = f"serving engine of job {self.target.holder.job_id}: {address}"
        goes_on = "Its job's efficiency comes from hardware counters alone until then"
        return Fault("engine_failed", f"{where} {trouble.what}: {trouble.remedy}. {goes_on}")

    def _wait(self, now: int, span: int) -> None:
        self.due = now + int(span * (1 + JITTER * (2 * self._chance() - 1)))
