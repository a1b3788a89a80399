"""One job's hold on this node's GPUs: what is known of it, and which word about its GPUs counts.

Owns the order of trust and that a GPU once known stays the job's until it is gone: Slurm itself forgets the indices
as soon as a job leaves RUNNING. Refuses to ask; the scheduler does.
"""

from collections.abc import Sequence
from enum import IntEnum

from msgspec.structs import replace

from exporter.core.model import MS, SECOND, Device, Owner
from exporter.schedulers.rules import Rules
from exporter.schedulers.slurm.controller import Answer
from exporter.schedulers.slurm.gres import ON_GPUS
from exporter.schedulers.slurm.jobs import Job
from exporter.schedulers.slurm.places import Places
from exporter.schedulers.slurm.tasks import Tasks
from exporter.schedulers.slurm.traces import Trace

ASK_AGAIN, ASK_SELDOM = 30 * SECOND, 300 * SECOND
"""Pauses between questions about a job without a trace: the first, and the longest they double to."""
MOST_LOOKS = 3
"""Times that a job's processes are looked for before the controller is asked at its own price."""
Index = tuple[str, int]
"""A resource's name and its index on this node: ("gpu", 2)."""


class Basis(IntEnum):
    """How well a job's GPUs are known; the higher replaces the lower."""

    NONE = 0
    PART = 1
    """Of the steps that happen to run."""
    TASKS = 2
    """All of them, by the environment of its processes."""
    CONTROLLER = 3
    MAPPING = 4


class Entry:
    """One run of one job: a requeued job begins another."""

    def __init__(self, job_id: str, run: int, trace: Trace, *, now: int) -> None:
        self.job_id, self.run, self.trace, self.seen = job_id, run, trace, now
        self.whole = bool(trace.whole or trace.files)
        """It had a trace that lasts as long as the job: without any it has ended."""
        self.job: Job | None = None
        self.tasks: Tasks | None = None
        self.gone = False
        """The controller does not know it."""
        self.refused = ""
        self.heard: int | None = None
        """When the controller last answered about it."""
        self.basis, self.indices = Basis.NONE, frozenset[Index]()
        self.looks, self.look_at, self.detailed = 0, now, False
        self.absent: int | None = None
        self.pause, self.ask_at = ASK_AGAIN, now
        self.rivals = frozenset[int]()
        """Runs that seemed to hold the same GPU when it was last asked why."""
        self.stale = self.asked = False
        self.bound = True
        """One of its sockets was bound, or a process of it was there, when that was last looked at."""
        self._start: int | None = None

    @property
    def over(self) -> bool:
        """The controller says that it has nothing here any more."""
        return self.gone or (self.job is not None and self.job.over)

    @property
    def dark(self) -> bool:
        """It is here, and neither the controller nor any process of it says what it has."""
        told = self.job is not None or self.gone or (self.tasks is not None and self.tasks.processes > 0)
        return not (told or self.stale or self.basis > Basis.NONE)

    @property
    def ending(self) -> bool:
        """It is over, or will start nothing more: then nothing of it is here where no process is."""
        return self.over or (self.job is not None and "COMPLETING" in self.job.states)

    @property
    def looking(self) -> bool:
        """Its GPUs are not all known, and may yet be."""
        if self.basis >= Basis.TASKS or self.stale or not self.job_id.isdigit():
            return False
        if self.job is None:
            return self.basis == Basis.NONE
        return self.job.on_gpus and not self.job.over

    @property
    def suspended(self) -> bool:
        """As the controller last said."""
        return self.job is not None and "SUSPENDED" in self.job.states

    def take(self, answer: Answer, *, node: str, now: int, wall: int) -> None:
        """Take in what was learnt at `now` (monotonic), which was `wall` (Unix), both in nanoseconds."""
        self.tasks = _newer(self.tasks, answer.tasks)
        if answer.job is not None or answer.gone or answer.refused:
            self.heard, self.asked = now, False
            self.gone, self.refused = answer.gone, answer.refused
        if answer.job is not None:
            if self.basis <= Basis.PART and self.job is None:
                self.basis, self.indices = Basis.NONE, frozenset()  # it can now be seen whether that was all
            self.job = answer.job
            self._start = self._begun(answer.job, now=now, wall=wall)
        self._learn(*indices_here(self.job, self.tasks, node))

    def map(self, files: Sequence[str]) -> None:
        """Take in the mapping files that name it."""
        if files:
            self._learn(Basis.MAPPING, frozenset(map(_named, files)))

    def uuids(self, places: Places, devices: Sequence[Device]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The GPUs, and why some could not be found."""
        found: dict[str, None] = {}
        problems = []
        for name, index in sorted(self.indices):
            try:
                found |= dict.fromkeys(_find(name, index, places, devices))
            except ValueError as err:
                problems.append(f"job {self.job_id}: {err}")
        if (problems or not found) and self.tasks is not None:
            known = {device.uuid for device in devices}
            found |= dict.fromkeys(uuid for uuid in self.tasks.uuids if uuid in known)
        return tuple(found), tuple(problems)

    def start(self, *, wall: int, now: int) -> int:
        """Since when it holds its GPUs: as the controller, the mapping file, or the first sight says."""
        if self._start is not None:
            return self._start
        if self.trace.written:
            return min(self.seen, now - max(0, wall - self.trace.written) // MS * MS)
        return self.seen

    def gpus(self, here: int) -> int:
        """Of the whole job, given how many it has here."""
        return max(here, 1, (self.job.gpus if self.job else None) or 0)

    def owner(self, rules: Rules) -> Owner:
        """Who it is, as far as is known."""
        job, tasks = self.job, self.tasks or Tasks()
        if job is None:
            return rules.judge(Owner(self.job_id, "slurm", tasks.user), command=tasks.command)
        owner = Owner(
            self.job_id,
            "slurm",
            job.user or tasks.user,
            job.account,
            job.partition,
            name=job.name,
            qos=job.qos,
            kind=_kind_of(job),
            array_id=job.array_id or job.het_id,
            comment=job.comment,
            nodes=job.nodes,
            time_limit_seconds=job.time_limit_seconds,
        )
        return rules.judge(owner, command=f"{job.command} {tasks.command}".strip())

    def _learn(self, basis: Basis, indices: frozenset[Index]) -> None:
        if basis == self.basis == Basis.PART:
            self.indices |= indices
        elif indices and basis >= self.basis:
            self.basis, self.indices = basis, indices

    def _begun(self, job: Job, *, now: int, wall: int) -> int | None:
        """Turn its StartTime into our clock's; of a job that waits to start again that is in the future: never mind."""
        if job.start is None or job.start * SECOND > wall:
            return self._start
        return (now - (wall - job.start * SECOND)) // MS * MS


def indices_here(job: Job | None, tasks: Tasks | None, node: str) -> tuple[Basis, frozenset[Index]]:
    """Which of the node's GPUs the job has, by the best word there is.

    The controller's list by node is put together from names and places (scontrol does the same), so on several nodes
    it must agree with what runs here.
    """
    steps = frozenset(("gpu", gpu) for gpu in tasks.steps) if tasks else frozenset[Index]()
    batch = frozenset(("gpu", gpu) for gpu in tasks.batch or ()) if tasks else frozenset[Index]()
    given = (job.given or {}).get(node, ()) if job else ()
    told = frozenset((each.name, index) for each in given if each.name in ON_GPUS for index in each.indices)
    here = job.gpus_here if job else None
    if told and (not steps or {gpu for _, gpu in steps} <= {gpu for _, gpu in told}):
        return Basis.CONTROLLER, told
    if batch and here in {None, len(batch)}:
        return (Basis.PART if job is None else Basis.TASKS), batch
    return (Basis.NONE if not steps else Basis.TASKS if len(steps) == here else Basis.PART), steps


def _newer(before: Tasks | None, now: Tasks | None) -> Tasks | None:
    """Keep what processes said that are gone."""
    if before is None or now is None or not now.processes:
        return before if now is None else replace(before, processes=0) if before else now
    return replace(
        now,
        batch=now.batch or before.batch,
        steps=now.steps | before.steps,
        uuids=now.uuids or before.uuids,
    )


def _kind_of(job: Job) -> str:
    if job.batch is False:
        return "interactive"
    return "array" if job.array_id else "het" if job.het_id else "batch"


def _named(file: str) -> Index:
    """Our prolog's files have Slurm's index; others the driver's index and instance, or a UUID."""
    return ("gpu", int(file)) if file.isdigit() else (file, -1)


def _find(name: str, index: int, places: Places, devices: Sequence[Device]) -> tuple[str, ...]:
    if index >= 0:
        return places.find(name, index, devices)
    found = tuple(d.uuid for d in devices if name in {d.uuid, d.index.replace(":", ".")})
    if not found:
        raise ValueError(f"mapping file {name} names no GPU of this node")
    return found
