"""When GPUEfficiencyJobDeadlocked pages: its recording rule, in Python, on the same figures of every node's snapshot.

Owns that one rule (`job:gpu_efficiency_deadlocked:gpus`), but for its clauses about exporters that come and go, which
promtool tests. Refuses the judgement of single GPUs: that is the core's.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from exporter.core.leaks import LEAK_NAMES
from exporter.core.model import SECOND, State
from exporter.core.snapshot import JobView, Snapshot

_WORK = (LEAK_NAMES.index("checkpoint"), LEAK_NAMES.index("data_stall"))
_RATE = 120 * SECOND
_BLIND = 3 * 600 * SECOND
"""How much longer a spin must last while a GPU of the job cannot be seen: three times `hang_seconds`."""


class Pager(Struct):
    """Follows every job through one run."""

    moved: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    """By job: when, and nanoseconds of copies up to then, over two minutes."""

    def deadlocked(self, views: Sequence[Snapshot]) -> set[str]:
        """Jobs with GPUs that hang, of which no GPU works, copies, or may be working unseen."""
        jobs: dict[str, list[JobView]] = {}
        for view in views:
            for job in view.jobs:
                jobs.setdefault(job.owner.job_id, []).append(job)
        at, wall = views[0].at, views[0].wall
        copying = {name for name, parts in jobs.items() if self._copies(name, parts, at)}
        return {name for name, parts in jobs.items() if name not in copying and _stuck(parts, wall)}

    def _copies(self, name: str, parts: Sequence[JobView], at: int) -> bool:
        now = sum(part.counters.now.parts[leak] for part in parts for leak in _WORK)
        past = self.moved.setdefault(name, deque())
        past.append((at, now))
        while past[0][0] < at - _RATE:
            past.popleft()
        return now > past[0][1]


def _stuck(parts: Sequence[JobView], wall: int) -> bool:
    if not any(_count(part, State.HUNG) for part in parts) or any(map(_works, parts)):
        return False
    blind = any(_count(part, State.UNOBSERVED) for part in parts)
    began = min((part.spin_since for part in parts if part.spin_since is not None), default=wall)
    return not (blind and wall - began < _BLIND)


def _works(part: JobView) -> bool:
    """More GPUs of this node are active than are suspected and cannot be confirmed."""
    unsure = part.suspected - _count(part, State.HUNG)
    return _count(part, State.ACTIVE) > max(0, unsure)


def _count(part: JobView, state: State) -> int:
    return dict(part.states).get(state, 0)
