"""Jobs thrown back or ended by something else than themselves, and the node that failed them.

Owns the counters since this instance began. A job whose restart count grew between two looks was requeued; whether a
node failed it is decided by the first look at the nodes after that, so counting may lag by one. The first look
counts nothing. Refuses to infer a preemption: Slurm forgets it the moment the job is pending again (22.05, 24.11), so
only what the scheduler says in so many words is one; the rest is `unknown`.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from msgspec import Struct

from exporter.cluster.model import Node, Run

MOST = 199
"""Partitions counted under their own names; all others, however many come and go, as "other"."""
EVENTS = 50
"""Node failures remembered by name."""
_OPEN = 100_000
"""Interruptions that wait for a look at the nodes, at most."""
_BADNESS = {"draining": 1, "drained": 1, "cordoned": 1, "down": 2, "not_ready": 2}


class Interruption(Struct, frozen=True):
    """What happened to one job."""

    job_id: str
    partition: str
    nodes: Mapping[str, int]
    """Where it ran, and how bad each was then."""
    gpus: int
    times: int
    outcome: str
    cause: str
    culprit: str
    at: float
    """Unix seconds of the look that saw it."""


class Failure(Struct, frozen=True):
    """A node that failed a job."""

    node: str
    job_id: str
    partition: str
    at: float
    """Unix seconds."""


class _Past(Struct, frozen=True):
    restarts: int
    ended: bool
    nodes: Mapping[str, int]
    gpus: int


class Interruptions:
    """Fed with every answer, in the order in which they come."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str, str], int] = {}
        """By partition, cause and outcome."""
        self.gpus: dict[tuple[str, str, str], int] = {}
        """GPUs those jobs had."""
        self.failures: deque[Failure] = deque(maxlen=EVENTS)
        self._past: dict[str, _Past] | None = None
        self._bad: dict[str, int] = {}
        self._partitions: set[str] = set()
        """Those counted under their own names: the first ones."""
        self._open: deque[Interruption] = deque(maxlen=_OPEN)

    def look_at_jobs(self, runs: Iterable[Run], *, at: float) -> None:
        """Compare with the last look; `at` is Unix seconds."""
        now: dict[str, _Past] = {}
        for run in runs:
            before = None if self._past is None else self._past.get(run.job_id)
            if before is not None:
                self._compare(run, before, at=at)
            now[run.job_id] = self._remember(run, before)
        self._past = now

    def look_at_nodes(self, nodes: Iterable[Node]) -> None:
        """See which nodes are bad, and decide what waits for it."""
        self._bad = {node.name: _BADNESS[node.state] for node in nodes if node.state in _BADNESS}
        while self._open:
            self._decide(self._open.popleft())

    def _remember(self, run: Run, before: _Past | None) -> _Past:
        """Where it was last seen at work, and how these nodes were then as far as was known."""
        if run.running:
            nodes = {name: self._bad.get(name, 0) for name in run.nodes}
            return _Past(run.restarts, run.ended, nodes, sum(run.gpus.values()))
        return _Past(run.restarts, run.ended, before.nodes if before else {}, before.gpus if before else 0)

    def _compare(self, run: Run, before: _Past, *, at: float) -> None:
        times = run.restarts - before.restarts
        if times > 0:
            self._notice(run, before, times=times, outcome="requeued", at=at)
        elif run.ended and not before.ended and run.cause:
            self._notice(run, before, times=1, outcome="ended", at=at)

    def _notice(self, run: Run, before: _Past, *, times: int, outcome: str, at: float) -> None:
        self._weigh(
            Interruption(
                run.job_id,
                run.partition,
                before.nodes,
                run.each or before.gpus,
                times,
                outcome,
                run.cause,
                run.culprit,
                at,
            )
        )

    def _weigh(self, what: Interruption) -> None:
        """Decide it where the reason is known by now; else it waits for the next look at the nodes."""
        if what.cause or self._worse(what):
            self._decide(what)
        else:
            self._open.append(what)

    def _worse(self, what: Interruption) -> list[str]:
        return [name for name, then in what.nodes.items() if self._bad.get(name, 0) > then]

    def _decide(self, what: Interruption) -> None:
        node = what.culprit or max(self._worse(what), key=lambda name: self._bad[name], default="")
        cause = what.cause or ("node_failure" if node else "unknown")
        key = (self._name(what.partition), cause, what.outcome)
        self.jobs[key] = self.jobs.get(key, 0) + what.times
        self.gpus[key] = self.gpus.get(key, 0) + what.times * what.gpus
        if cause == "node_failure" and node:
            self.failures.append(Failure(node, what.job_id, what.partition, what.at))

    def _name(self, partition: str) -> str:
        if len(self._partitions) < MOST:
            self._partitions.add(partition)
        return partition if partition in self._partitions else "other"
