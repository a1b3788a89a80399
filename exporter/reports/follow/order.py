"""Which lines of a job count as steps, and over what interval.

Owns the order of what several ranks and files of a job say. Refuses to know files: a writer is only a name.

One writer speaks for a job; what others say of steps are copies while it goes on speaking. A step that does not go
on from the last one is a copy too if it was counted a moment ago, and a rollback otherwise.
"""

from msgspec import Struct

from exporter.core.model import SECOND

COPY_SECONDS = 3.0
"""No job dies, starts, loads a checkpoint and makes a step in so short a time."""
SILENT_SECONDS = 30.0
"""After which another writer may go on from the last step."""
SILENT_BACK_SECONDS = 60.0
"""The same, to go back."""
SAME_START_SECONDS = 60.0
"""Several ranks say that training starts at a step."""
_RECENT = 256
_FIRST_STEPS = 100
"""A run whose log was read from its beginning does not print its first line later, if it has loaded no checkpoint."""
_DAY = 86_400.0


class Moment(Struct, frozen=True):
    """When a line was written by its own stamp, and when it was read."""

    stamp: float | None
    now: int

    def since(self, before: "Moment") -> float:
        """Seconds; by the stamps where both lines have one."""
        if self.stamp is None or before.stamp is None:
            return (self.now - before.now) / SECOND
        return self.stamp - before.stamp


class Order:
    """Of one job. `fresh`: its log is read from the beginning."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.step: int | None = None
        """The last that counted."""
        self._fresh, self._lost, self._every = fresh, False, 0
        self._mark: Moment | None = None
        self._since = 0
        """The step at the mark."""
        self._recent: dict[int, Moment] = {}
        self._speaker, self._spoke = "", 0
        self._started: int | None = None
        self._start_seen: tuple[int, Moment] | None = None

    def counts(self, step: int, writer: str, at: Moment) -> bool:
        """Whether the line is no copy of one that has counted."""
        if self.step is None or self._started is not None:
            return True
        back = step <= self.step
        if not self.speaks(writer):
            quiet = (at.now - self._spoke) / SECOND
            return quiet > (SILENT_BACK_SECONDS if back else SILENT_SECONDS) and not (back and self._older(at))
        return not back or not (self._older(at) or self._copy(step, at))

    def restarts(self, step: int) -> bool:
        """Whether with this step the run has begun anew."""
        return bool(self._started) or (self.step is not None and step <= self.step)

    def interval(self, step: int, each: float | None, at: Moment) -> tuple[int, float]:
        """Steps that the line speaks of, and seconds; zeros where nothing tells how long they took."""
        base = self._base(step)
        if each is not None:
            steps = min(self._every or 1, step) if base is None else step - base
            seconds = each * steps
        elif base is None or self._mark is None:
            return 0, 0.0
        else:
            steps, seconds = step - (self._since if base == self.step else base), at.since(self._mark)
        return (steps, seconds) if 0.0 < seconds <= _DAY else (0, 0.0)

    def counted(self, step: int, writer: str, at: Moment) -> None:
        """Go on from this step."""
        base = self._base(step)
        if self.restarts(step):
            self._recent.clear()
        self._every = self._every if base is None else step - base
        if base is None or self._mark is None or at.since(self._mark) > 0.0:  # or the next interval has these steps too
            self._mark, self._since = at, step
        self.step, self._speaker, self._spoke = step, writer, at.now
        self._started, self._lost = None, False
        self._recent[step] = at
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def begins(self, step: int, at: Moment) -> bool:
        """Training starts, or is about to, after `step`; False if another rank has said so."""
        seen, self._start_seen = self._start_seen, (step, at)
        if seen and seen[0] == step and abs(at.since(seen[1])) < SAME_START_SECONDS and self._started is None:
            return False
        self._started, self._mark, self._since = step, at, step
        return True

    def waits(self, at: Moment) -> None:
        """The next interval begins now."""
        self._mark, self._since = at, self.step or 0

    def speaks(self, writer: str) -> bool:
        """Whether what this one says is no copy of what another says."""
        return self._speaker in ("", writer)

    def learned(self) -> None:
        """What has counted until now was written before: nobody speaks yet, and only stamps tell when it was."""
        self._speaker, self._started = "", None
        self._mark = None if self._mark is None or self._mark.stamp is None else self._mark

    def gap(self) -> None:
        """Lines were left out: nothing is known of the time between."""
        self._lost, self._every = True, 0

    def gone(self, writers: str) -> None:
        """No writer whose name begins so will write again."""
        if self._speaker.startswith(writers):
            self._speaker = ""

    def _base(self, step: int) -> int | None:
        """The step before the interval; None where it is not known."""
        if self._started is not None:
            base: int | None = self._started
        elif self.step is None:
            base = 0 if self._fresh and step <= _FIRST_STEPS else None
        else:
            base = None if self._lost else self.step
        return base if base is not None and base < step else None

    def _copy(self, step: int, at: Moment) -> bool:
        known = self._recent.get(step)
        return known is not None and at.since(known) < COPY_SECONDS

    def _older(self, at: Moment) -> bool:
        last = None if self._mark is None else self._mark.stamp
        return last is not None and at.stamp is not None and at.stamp < last
