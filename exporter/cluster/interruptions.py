"""Counts which jobs were interrupted, what that cost, and which job preempted which, from successive answers.

A preemption counts if the scheduler reports it. Slurm forgets one by PreemptMode=REQUEUE once the job has left its
nodes (measured, 22.05 to 26.05), so there one counts too if a job that may preempt the requeued one took one of its
nodes between the same two answers. A node that failed is the cause before that.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from exporter.cluster.model import POWERED_DOWN, ClusterJob, Nodes, Partition

MOST_PARTITIONS_COUNTED = 199
"""Partitions counted under their own names; all others, however many come and go, count as "other"."""
MOST_PREEMPTION_KINDS = 199
"""Pairs of preempted and preempting partition and QOS counted under their own names; all others count as "other"."""
MOST_FAILURES = 50
"""Most recent node failures and preemptions kept by name."""
UNKNOWN = "unknown"
"""The preempting job, where it was not found."""
_MOST_OPEN = 100_000
"""Most interruptions that wait for further answers."""
_SEVERITY = {"draining": 1, "drained": 1, "cordoned": 1, "down": 2, POWERED_DOWN: 2, "not_ready": 2}
InterruptionKey = tuple[str, str, str]
"""Partition, cause, outcome."""
PreemptionKey = tuple[str, str, str, str]
"""Partition and QOS of the preempted job, then of the preempting one."""


class NodeFailure(Struct, frozen=True):
    """A node failure that interrupted a job."""

    node: str
    job_id: str
    partition: str
    at: float
    """Unix seconds."""


class Preemption(Struct, frozen=True):
    """One job preempted by another."""

    job_id: str
    by_job_id: str
    """Or UNKNOWN."""
    at: float
    """Unix seconds."""


class _JobBefore(Struct, frozen=True):
    restarts: int
    ended: bool
    running: bool
    left: float | None
    ran: ClusterJob
    """As it was when last seen running; if it never was, as it is."""
    severity: Mapping[str, int]
    """Of its nodes, at that time."""


class _Interruption(Struct):
    """One or several interruptions of a job between two answers."""

    run: ClusterJob
    before: _JobBefore
    times: int
    outcome: str
    cause: str
    """If the scheduler reports it."""
    at: float
    """Unix seconds of the answer that showed it."""
    by: ClusterJob | None = None
    """The job that may have preempted it."""
    answers: int = 0
    """About jobs, with the one that showed it."""
    nodes_seen: bool = False
    """Whether the nodes were seen since."""

    @property
    def gpus(self) -> int:
        return self.times * self.run.each or self.times * sum(self.before.ran.gpus.values())

    @property
    def gpu_seconds(self) -> float:
        """From the start of its run, or of the first of several, to its end."""
        started, left = self.before.ran.started, self.run.left
        if started is None:
            return 0
        seconds = max(0, (self.at if left is None or left < started else left) - started)
        return seconds * (self.gpus if self.run.each else sum(self.before.ran.gpus.values()))


class Interruptions:
    """The counts so far."""

    def __init__(self) -> None:
        self.jobs = Counter[InterruptionKey]()
        self.gpus = Counter[InterruptionKey]()
        self.gpu_seconds: defaultdict[InterruptionKey, float] = defaultdict(int)
        self.preemptions = Counter[PreemptionKey]()
        self.preempted_gpu_seconds: defaultdict[PreemptionKey, float] = defaultdict(int)
        self.failures: deque[NodeFailure] = deque(maxlen=MOST_FAILURES)
        self.latest: deque[Preemption] = deque(maxlen=MOST_FAILURES)
        self.costs: dict[tuple[str, str], float] = {}
        """GPU-seconds lost to preemptions that a job began, by its id and partition; the latest last."""
        self._past: dict[str, _JobBefore] = {}
        self._severity: dict[str, int] = {}
        self._tiers: Mapping[str, Partition] = {}
        self._partitions: set[str] = set()
        """The first partitions seen, which are counted under their own names."""
        self._open: deque[_Interruption] = deque(maxlen=_MOST_OPEN)
        self._began: dict[str, tuple[str, str]] = {}
        """By preempted job: id and partition of the job whose start began the chain."""

    def update_jobs(self, runs: Sequence[ClusterJob], *, at: float) -> None:
        """Compare with the last answer; `at` is Unix seconds."""
        past = self._past
        for run in runs:
            before = past.get(run.job_id)
            if before is not None:
                self._compare(run, before, at=at)
        if self._open:
            self._find_preempting(runs, past)
        self._past = {run.job_id: self._remember(run, past.get(run.job_id)) for run in runs}
        self._began = {job_id: began for job_id, began in self._began.items() if job_id in self._past}

    def update_nodes(self, nodes: Nodes) -> None:
        """Update the nodes' severity, and decide the interruptions that wait for it."""
        self._severity = {node.name: _SEVERITY[node.state] for node in nodes.nodes if node.state in _SEVERITY}
        self._tiers = nodes.partitions
        for interruption in self._open:
            interruption.nodes_seen = True
        self._decide_known()

    def _remember(self, run: ClusterJob, before: _JobBefore | None) -> _JobBefore:
        if run.running or before is None or not before.ran.running:
            severity = {name: self._severity.get(name, 0) for name in run.nodes}
            return _JobBefore(run.restarts, run.ended, run.running, run.left, run, severity)
        return structs.replace(before, restarts=run.restarts, ended=run.ended, running=False, left=run.left)

    def _compare(self, run: ClusterJob, before: _JobBefore, *, at: float) -> None:
        times = run.restarts - before.restarts
        cause = run.cause or ("preempted" if before.ran.in_grace else "")
        if times > 0:
            self._open.append(_Interruption(run, before, times, "requeued", cause, at, run.by))
        elif run.ended and not before.ended and cause:
            self._open.append(_Interruption(run, before, 1, "ended", cause, at))
        elif not run.ended and _left_since(run, before):
            self._open.append(_Interruption(run, before, 1, "requeued", cause, at))

    def _find_preempting(self, runs: Iterable[ClusterJob], past: Mapping[str, _JobBefore]) -> None:
        """Find for each open interruption the job that took a node of it since the last answer."""
        by_node: defaultdict[str, list[ClusterJob]] = defaultdict(list)
        for run in runs:
            for name in _new_nodes(run, past.get(run.job_id)):
                by_node[name].append(run)
        for interruption in self._open:
            interruption.answers += 1
            if interruption.by is None:
                interruption.by = self._preempting(interruption, by_node)
        self._decide_known()

    def _preempting(self, interruption: _Interruption, by_node: Mapping[str, list[ClusterJob]]) -> ClusterJob | None:
        """Return, of the jobs that may preempt it, the one that started next to its end; the largest, of several."""
        victim, left = interruption.before.ran, interruption.run.left or interruption.at
        found = {run.job_id: run for name in victim.nodes for run in by_node.get(name, ())}
        found.pop(victim.job_id, None)
        return min(
            (run for run in found.values() if self._may_preempt(run, victim)),
            key=lambda run: (abs((run.started or interruption.at) - left), -sum(run.gpus.values())),
            default=None,
        )

    def _may_preempt(self, run: ClusterJob, victim: ClusterJob) -> bool:
        mine, theirs = self._tier(run), self._tier(victim)
        return mine > theirs or (mine == theirs and run.qos != victim.qos)

    def _tier(self, run: ClusterJob) -> int:
        partition = self._tiers.get(run.partition)
        return run.priority if partition is None else partition.tier

    def _decide_known(self) -> None:
        waiting = [each for each in self._open if not self._decide(each)]
        self._open.clear()
        self._open.extend(waiting)

    def _decide(self, interruption: _Interruption) -> bool:
        """Count the interruption, or return False while a further answer may tell its cause or the preempting job."""
        worse = [name for name, then in interruption.before.severity.items() if self._severity.get(name, 0) > then]
        node = interruption.run.culprit or max(worse, key=lambda name: self._severity[name], default="")
        if interruption.cause == "preempted":
            if interruption.by is None and interruption.answers < 2:  # noqa: PLR2004  it may start a little later
                return False
            self._count(interruption, "preempted")
        elif interruption.cause == "node_failure" or node:
            self._count(interruption, "node_failure")
            if node:
                ran = interruption.before.ran
                self.failures.append(NodeFailure(node, ran.job_id, ran.partition, interruption.at))
        elif not interruption.nodes_seen:
            return False
        else:
            victim = self._tiers.get(interruption.before.ran.partition)
            inferred = interruption.by is not None and victim is not None and victim.preemptable
            self._count(interruption, "preempted" if inferred else "unknown")
        return True

    def _count(self, interruption: _Interruption, cause: str) -> None:
        key = (self._name(interruption.before.ran.partition), cause, interruption.outcome)
        self.jobs[key] += interruption.times
        self.gpus[key] += interruption.gpus
        self.gpu_seconds[key] += interruption.gpu_seconds
        self._began.pop(interruption.run.job_id, None)
        if cause == "preempted" and interruption.gpus:
            self._count_preemption(interruption)

    def _count_preemption(self, interruption: _Interruption) -> None:
        victim, by = interruption.before.ran, interruption.by
        key = (victim.partition, victim.qos, by.partition if by else UNKNOWN, by.qos if by else "")
        if key not in self.preemptions and len(self.preemptions) >= MOST_PREEMPTION_KINDS:
            key = ("other", "other", "other", "other")
        self.preemptions[key] += interruption.times
        self.preempted_gpu_seconds[key] += interruption.gpu_seconds
        self.latest.append(Preemption(victim.job_id, by.job_id if by else UNKNOWN, interruption.at))
        if by is not None and by.job_id != UNKNOWN:
            began = self._began.get(by.job_id, (by.job_id, by.partition))
            self._began[victim.job_id] = began
            self.costs[began] = self.costs.pop(began, 0) + interruption.gpu_seconds
            while len(self.costs) > MOST_FAILURES:
                del self.costs[next(iter(self.costs))]

    def _name(self, partition: str) -> str:
        if len(self._partitions) < MOST_PARTITIONS_COUNTED:
            self._partitions.add(partition)
        return partition if partition in self._partitions else "other"


def _left_since(run: ClusterJob, before: _JobBefore) -> bool:
    """Whether a run ended. Slurm counts no restart if there was a grace time (measured, 22.05.8 and 24.11.5)."""
    if not before.running or run.left is None or before.ran.started is None:
        return False
    return run.left > max(before.ran.started, before.left or 0)


def _new_nodes(run: ClusterJob, before: _JobBefore | None) -> tuple[str, ...]:
    """Return the nodes on which the job was not yet at the last answer."""
    if not run.running:
        return ()
    if before is None or not before.running:
        return run.nodes
    # A job of Kubernetes restarts pod by pod while its other pods run on.
    if before.restarts != run.restarts and before.ran.started != run.started:
        return run.nodes
    return tuple(name for name in run.nodes if name not in before.ran.nodes)
