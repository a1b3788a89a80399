"""The jobs of this node and the allocations that follow from them.

Decides when a job's run begins and ends here, when it is queried, which source of its GPU indices is trusted most, and
how two jobs on one GPU are resolved: a suspended job yields, and a successor starts where its predecessor ended. A
socket alone does not prove a running job: sockets remain after a power loss, and the job may run elsewhere by then.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from msgspec.structs import replace

from exporter.clock import Backoff
from exporter.core.model import MS, SECOND, Allocation, Device, Owner
from exporter.schedulers.rules import Rules
from exporter.schedulers.slurm.controller import ControllerQueries, JobAnswer
from exporter.schedulers.slurm.local_node import GpuMap, JobPresence, JobTasks
from exporter.schedulers.slurm.notation import GPU_GRES, SHARED_GRES, expand_hostlist
from exporter.schedulers.slurm.parsing import SlurmJob

QUERY_AGAIN, QUERY_SELDOM = 30 * SECOND, 300 * SECOND
"""First and longest pause between queries about a job without sockets or files; it doubles in between."""
MOST_INSPECTIONS = 3
"""Searches for a job's processes before the controller's more expensive query is used."""
GresIndex = tuple[str, int]
"""A resource's name and its index on this node: ("gpu", 2)."""


class Basis(IntEnum):
    """How well a job's GPU indices are known; a higher basis replaces a lower one."""

    NONE = 0
    PART = 1
    """Only those of the steps that happen to run."""
    TASKS = 2
    """All, from the environment of its processes."""
    CONTROLLER = 3
    MAPPING = 4


class NodeJob:
    """One run of one job; a requeued job starts another run."""

    def __init__(self, job_id: str, run: int, presence: JobPresence, *, now: int) -> None:
        self.job_id, self.run, self.presence, self.seen_at = job_id, run, presence, now
        self.lasting = bool(presence.lasting or presence.files)
        """It has had a socket or file that lasts as long as the job, so without any it has ended."""
        self.job: SlurmJob | None = None
        self.tasks: JobTasks | None = None
        self.gone = False
        """The controller does not know it."""
        self.refused = ""
        self.answered_at: int | None = None
        """When the controller last answered about it."""
        self.basis, self.indices = Basis.NONE, frozenset[GresIndex]()
        self.unresolved = self.without_gpus = False
        """The last `uuids` found no GPU for one of its indices; it has resources here, and none is a GPU."""
        self.inspections, self.inspect_at, self.detailed = 0, now, False
        self.absent_since: int | None = None
        self.backoff, self.query_at = Backoff(QUERY_AGAIN, QUERY_SELDOM), now
        self.rivals = frozenset[int]()
        """Runs that shared a GPU with it when the controller was last queried about that."""
        self.stale = self.query_pending = False
        self.bound = True
        """At the last inspection one of its sockets was bound, or it had a process."""
        self._start: int | None = None

    @property
    def ended(self) -> bool:
        """The controller reports that it holds nothing any more."""
        return self.gone or (self.job is not None and self.job.ended)

    @property
    def unidentified(self) -> bool:
        """It may hold a GPU here that `uuids` does not return."""
        if self.stale or self.unresolved:
            return self.unresolved and not self.stale
        if self.job is not None:
            return self.gpus_incomplete
        known = self.gone or (self.tasks is not None and self.tasks.processes > 0)
        return not (known or self.basis > Basis.NONE)

    @property
    def ending(self) -> bool:
        """It is over or completing: without processes it holds nothing here."""
        return self.ended or (self.job is not None and "COMPLETING" in self.job.states)

    @property
    def gpus_incomplete(self) -> bool:
        """Not all of its GPUs are known, and more may become known."""
        if self.basis >= Basis.TASKS or self.stale or not self.job_id.isdigit():
            return False
        if self.job is None:
            return self.basis == Basis.NONE
        return self.job.on_gpus and not self.job.ended and not self.without_gpus

    @property
    def disputed(self) -> str:
        """What the controller lists that steps of a job on several nodes contradict; empty if nothing.

        Their list by node is assembled from names and positions (as scontrol does), so it may be another node's.
        """
        listed, steps = {index for _, index in self.indices}, self.tasks.steps if self.tasks else frozenset[int]()
        several = self.job is not None and self.job.nodes > 1
        if self.basis != Basis.CONTROLLER or not several or steps <= listed:
            return ""
        first, second = (", ".join(map(str, sorted(gpus))) for gpus in (listed, steps))
        return f"the controller lists GPU {first} for this node, and the environment of its steps has GPU {second}"

    @property
    def suspended(self) -> bool:
        """Whether the controller last reported it as suspended."""
        return self.job is not None and "SUSPENDED" in self.job.states

    def query_at_once(self, now: int) -> None:
        """Make the next query due now, and reset the pauses between queries."""
        self.query_at = now
        self.backoff.reset()

    def apply(self, answer: JobAnswer, *, node: str, now: int, wall: int) -> None:
        """Apply results received at `now` (monotonic) and `wall` (Unix), both in nanoseconds."""
        self.tasks = _merged_tasks(self.tasks, answer.tasks)
        if answer.job is not None or answer.gone or answer.refused:
            self.answered_at, self.query_pending = now, False
            self.gone, self.refused = answer.gone, answer.refused
        if answer.job is not None:
            if self.basis <= Basis.PART and self.job is None:
                self.basis, self.indices = Basis.NONE, frozenset()  # now it can be checked whether those were all
            self.job = answer.job
            given = (answer.job.given or {}).get(node)
            self.without_gpus = given is not None and all(each.name not in GPU_GRES for each in given)
            self._start = self._start_of(answer.job, now=now, wall=wall)
        self._set_indices(*indices_here(self.job, self.tasks, node))

    def apply_mapping(self, files: Sequence[str]) -> None:
        """Apply the names of its mapping files."""
        if files:
            self._set_indices(Basis.MAPPING, frozenset(map(_index_of_file, files)))

    def uuids(self, gpu_map: GpuMap, devices: Sequence[Device]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return its GPUs, and why some could not be resolved."""
        found: dict[str, None] = {}
        problems = []
        for name, index in sorted(self.indices):
            try:
                found |= dict.fromkeys(_uuids_of(name, index, gpu_map, devices))
            except ValueError as err:
                problems.append(f"job {self.job_id}: {err}")
        if (problems or not found) and self.tasks is not None:
            known = {device.uuid for device in devices}
            found |= dict.fromkeys(uuid for uuid in self.tasks.uuids if uuid in known)
        self.unresolved = bool(problems) and len(found) < len(self.indices)
        return tuple(found), tuple(problems)

    def start(self, *, wall: int, now: int) -> int:
        """Return when it began to hold its GPUs: as the controller or mapping file has it, else when first seen."""
        if self._start is not None:
            return self._start
        if self.presence.written:
            return min(self.seen_at, now - max(0, wall - self.presence.written) // MS * MS)
        return self.seen_at

    def gpus(self, here: int) -> int:
        """Return the GPUs of the whole job, given how many it has here."""
        return max(here, 1, (self.job.gpus if self.job else None) or 0)

    def owner(self, rules: Rules) -> Owner:
        """Return its owner, as far as is known."""
        job, tasks = self.job, self.tasks or JobTasks()
        if job is None:
            return rules.apply(Owner(self.job_id, "slurm", tasks.user), command=tasks.command)
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
            array_task_id=job.array_task_id,
            het_job_offset=job.het_offset,
            comment=job.comment,
            nodes=job.nodes,
            time_limit_seconds=job.time_limit_seconds,
        )
        return rules.apply(owner, command=f"{job.command} {tasks.command}".strip())

    def _set_indices(self, basis: Basis, indices: frozenset[GresIndex]) -> None:
        if basis == self.basis == Basis.PART:
            self.indices |= indices
        elif indices and basis >= self.basis:
            self.basis, self.indices = basis, indices

    def _start_of(self, job: SlurmJob, *, now: int, wall: int) -> int | None:
        """Return its StartTime in monotonic nanoseconds; a future one, of a job to be restarted, is ignored."""
        if job.start is None or job.start * SECOND > wall:
            return self._start
        return (now - (wall - job.start * SECOND)) // MS * MS


def indices_here(job: SlurmJob | None, tasks: JobTasks | None, node: str) -> tuple[Basis, frozenset[GresIndex]]:
    """Return the job's GPU indices on this node, from the most trusted source.

    The controller's list counts whatever the environment of the job's processes says, which its user can change.
    """
    steps = frozenset(("gpu", gpu) for gpu in tasks.steps) if tasks else frozenset[GresIndex]()
    batch = frozenset(("gpu", gpu) for gpu in tasks.batch or ()) if tasks else frozenset[GresIndex]()
    given = (job.given or {}).get(node, ()) if job else ()
    listed = frozenset((each.name, index) for each in given if each.name in GPU_GRES for index in each.indices)
    here = job.gpus_here if job else None
    if listed:
        return Basis.CONTROLLER, listed
    if batch and here in {None, len(batch)}:
        return (Basis.PART if job is None else Basis.TASKS), batch
    return (Basis.NONE if not steps else Basis.TASKS if len(steps) == here else Basis.PART), steps


def _merged_tasks(before: JobTasks | None, now: JobTasks | None) -> JobTasks | None:
    """Keep what was read of processes that have ended."""
    if before is None or now is None or not now.processes:
        return before if now is None else replace(before, processes=0) if before else now
    return replace(
        now,
        batch=now.batch or before.batch,
        steps=now.steps | before.steps,
        uuids=now.uuids or before.uuids,
    )


def _kind_of(job: SlurmJob) -> str:
    if job.batch is False:
        return "interactive"
    return "array" if job.array_id else "het" if job.het_id else "batch"


def _index_of_file(file: str) -> GresIndex:
    """Our prolog's files are named by Slurm's index, others by the driver's index and instance, or by UUID."""
    return ("gpu", int(file)) if file.isdigit() else (file, -1)


def _uuids_of(name: str, index: int, gpu_map: GpuMap, devices: Sequence[Device]) -> tuple[str, ...]:
    if index >= 0:
        return gpu_map.uuids_at(name, index, devices)
    found = tuple(d.uuid for d in devices if name in {d.uuid, d.index.replace(":", ".")})
    if not found:
        raise ValueError(f"mapping file {name} names no GPU of this node")
    return found


MOST_JOBS = 10_000
"""Limit per node; Slurm's own tables would not hold more."""
CHECK_EVERY, CHECK_AFTER_STEP = 60 * SECOND, 5 * SECOND


class JobTable:
    """The jobs on this node, by id."""

    def __init__(self, controller: ControllerQueries, node: str) -> None:
        self._controller, self._node = controller, node
        self._by_job: dict[str, NodeJob] = {}
        self._runs = 0
        self._checked_at = 0
        self._saw_bound_socket = False
        """One of our sockets was once seen bound, so the list of sockets is of the right network namespace."""
        self.job_left = False
        """Whether a job that had a GPU has ended since this was last set to False."""

    def __iter__(self) -> Iterator[NodeJob]:
        return iter(self._by_job.values())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._by_job

    def known_as(self, name: str) -> str:
        """Return the id of the job with this id or SLUID; empty if there is none."""
        if name in self._by_job:
            return name
        return next((entry.job_id for entry in self if name and entry.job and entry.job.sluid == name), "")

    def user(self, job_id: str) -> str:
        """Return the job's user, from the controller or else its processes; empty when unknown."""
        entry = self._by_job.get(job_id)
        sources = (entry.job, entry.tasks) if entry is not None else ()
        return next((one.user for one in sources if one is not None and one.user), "")

    def update(self, presences: Mapping[str, JobPresence], now: int) -> bool:
        """Apply the jobs that are present now; return whether one is new."""
        new = False
        for job_id, presence in presences.items():
            entry = self._by_job.get(job_id)
            if entry is None or _is_new_run(entry, presence):
                new = self._begin(job_id, presence, now) or new
            elif entry.presence != presence or entry.absent_since is not None:
                self._changed(entry, presence, now)
        for entry in [entry for job_id, entry in self._by_job.items() if job_id not in presences]:
            self._missing(entry, now)
        self._controller.drop_others(self._by_job.keys())
        return new

    def apply_answers(self, answers: Iterable[JobAnswer], *, now: int, wall: int) -> None:
        """Apply results; those about an earlier run are dropped."""
        for answer in answers:
            entry = self._by_job.get(answer.job_id)
            if entry is not None and entry.run == answer.run:
                entry.apply(answer, node=self._node, now=now, wall=wall)
                self._check_alive(entry, answer, now)

    def follow_up(self, now: int) -> None:
        """Inspect jobs whose GPUs are incomplete again, and finally send one detailed query."""
        self._inspect_all(now)
        for entry in self._by_job.values():
            if not entry.gpus_incomplete or entry.absent_since is not None or now < entry.inspect_at:
                continue
            entry.inspections += 1
            entry.inspect_at = now + (SECOND if entry.inspections <= MOST_INSPECTIONS else QUERY_AGAIN)
            if entry.inspections > MOST_INSPECTIONS and entry.job is not None and not entry.detailed:
                entry.detailed = True
                self._controller.query(entry.job_id, entry.run, detail=True)
            else:
                self._controller.inspect(entry.job_id, entry.run)

    def query(self, entry: NodeJob, now: int) -> None:
        """Query the controller about a job again if due; pauses double."""
        if entry.query_pending or now < entry.query_at or not entry.job_id.isdigit():
            return
        entry.query_pending, entry.query_at = True, now + entry.backoff.fail()
        self._controller.query(entry.job_id, entry.run)

    def recheck(self, contested: Iterable[NodeJob], now: int) -> None:
        """Query jobs that share a GPU, but for the latest, at once if that is new."""
        runs = {entry.run: entry for entry in contested}
        for entry in [runs[run] for run in sorted(runs)[:-1]]:
            if entry.rivals != runs.keys():
                entry.rivals = frozenset(runs)
                entry.query_at_once(now)
            self.query(entry, now)

    def _begin(self, job_id: str, presence: JobPresence, now: int) -> bool:
        if len(self._by_job) >= MOST_JOBS and job_id not in self._by_job:
            return False
        self._end(job_id)
        self._runs += 1
        entry = self._by_job[job_id] = NodeJob(job_id, self._runs, presence, now=now)
        entry.apply_mapping(presence.files)
        if not job_id.isdigit():
            return False
        entry.query_pending, entry.inspect_at = True, now + SECOND
        self._controller.query(job_id, entry.run)
        return True

    def _changed(self, entry: NodeJob, presence: JobPresence, now: int) -> None:
        """A step started or ended, or the job is present again after an absence."""
        came = entry.absent_since is not None or entry.presence.sockets.isdisjoint(presence.sockets)
        if not entry.presence.sockets <= presence.sockets:
            # Slurm 24.11 sometimes fails to remove an extern step's socket ("Unable to unlink domain socket").
            self._checked_at = min(self._checked_at, now - CHECK_EVERY + CHECK_AFTER_STEP)
        entry.presence, entry.absent_since, entry.stale = presence, None, False
        entry.lasting = entry.lasting or bool(presence.lasting or presence.files)
        entry.apply_mapping(presence.files)
        if entry.gpus_incomplete:
            entry.inspections, entry.inspect_at = 0, now
        if came and entry.answered_at is not None and now - entry.answered_at >= QUERY_AGAIN:
            entry.query_at_once(now)
            self.query(entry, now)

    def _missing(self, entry: NodeJob, now: int) -> None:
        """Nothing of the job is left here: it has ended, or is an allocation between two steps."""
        if entry.lasting or not entry.indices:
            self._end(entry.job_id)
            return
        if entry.absent_since is None:
            entry.absent_since = now
            entry.query_at_once(now)
        self.query(entry, now)

    def _inspect_all(self, now: int) -> None:
        """Regularly inspect jobs with sockets, because a slurmstepd that was killed leaves its socket."""
        if now - self._checked_at >= CHECK_EVERY:
            self._checked_at = now
            for entry in self._by_job.values():
                if (entry.presence.sockets or entry.ending) and entry.indices:
                    self._controller.inspect(entry.job_id, entry.run)

    def _check_alive(self, entry: NodeJob, answer: JobAnswer, now: int) -> None:
        if entry.absent_since is not None:
            if (answer.job is not None or answer.gone) and (entry.ending or not self._is_here(entry)):
                self._end(entry.job_id)
            return
        if answer.tasks is not None:
            names = {name for name, _, _ in entry.presence.sockets}
            bound = not names.isdisjoint(answer.listening)
            self._saw_bound_socket = self._saw_bound_socket or bound
            entry.bound = bound or bool(answer.tasks.processes)
        # The prolog's files stay while a job completes, until our epilog has run: a slow one may run before it.
        left = entry.ended or (not entry.presence.files and (entry.ending or not self._is_here(entry)))
        entry.stale = not entry.bound and left
        if answer.tasks is not None and not (entry.bound or entry.stale) and (self._saw_bound_socket or entry.ending):
            self.query(entry, now)  # never upon the controller's own answer: an inspection before it may be older

    def _is_here(self, entry: NodeJob) -> bool:
        hosts = entry.job.hosts if entry.job else ""
        try:
            return not hosts or self._node in expand_hostlist(hosts)
        except ValueError:
            return True

    def _end(self, job_id: str) -> None:
        entry = self._by_job.pop(job_id, None)
        self.job_left = self.job_left or (entry is not None and entry.basis > Basis.NONE)


def _is_new_run(entry: NodeJob, presence: JobPresence) -> bool:
    """Whether another run began: its lasting step has another socket."""
    return bool(entry.presence.lasting and presence.lasting) and entry.presence.lasting.isdisjoint(presence.lasting)


HoldKey = tuple[str, str, int]
"""GPU, job, and run of the job."""


class AllocationTracker:
    """Compares the allocations of each poll with those of the last one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._held: dict[HoldKey, Allocation] = {}
        self._earliest_starts: dict[HoldKey, int] = {}
        self._freed_at: dict[str, int] = {}
        self.contested: tuple[NodeJob, ...] = ()
        """Jobs that hold a whole GPU which another job holds too."""
        self.problems: tuple[str, ...] = ()

    def held_uuids(self) -> frozenset[str]:
        """Return the GPUs that are held."""
        return frozenset(uuid for uuid, _, _ in self._held)

    def update(
        self, entries: Iterable[NodeJob], gpu_map: GpuMap | None, devices: Sequence[Device], *, now: int, wall: int
    ) -> tuple[Allocation, ...]:
        """Return all allocations at `now`, and once, with `end=now`, each that has ended."""
        claims, problems = self._claims(entries, gpu_map, devices)
        self.problems = tuple(problems)
        whole = {uuid: [e for e in its if not _has_shared_gres(e)] for uuid, its in claims.items()}
        rivals = {uuid: its for uuid, its in whole.items() if len(its) > 1}
        self.contested = tuple({e.run: e for its in rivals.values() for e in its}.values())
        present: dict[HoldKey, Allocation] = {}
        counts = {e.run: sum(e in its for its in claims.values()) for its in claims.values() for e in its}
        for uuid, its in claims.items():
            others = rivals.get(uuid, [])
            running = any(not e.suspended for e in others)
            for entry in its:
                if not (running and entry.suspended and entry in others):
                    key = (uuid, entry.job_id, entry.run)
                    present[key] = self._allocation(key, entry, gpus=counts[entry.run], now=now, wall=wall)
        return self._compare(present, now)

    def _claims(
        self, entries: Iterable[NodeJob], gpu_map: GpuMap | None, devices: Sequence[Device]
    ) -> tuple[dict[str, list[NodeJob]], list[str]]:
        claims: dict[str, list[NodeJob]] = {}
        problems: list[str] = []
        for entry in entries:
            if gpu_map is not None and not entry.stale:
                found, unresolved = entry.uuids(gpu_map, devices)
                problems += unresolved
                for uuid in found:
                    claims.setdefault(uuid, []).append(entry)
        return claims, problems

    def _allocation(self, key: HoldKey, entry: NodeJob, *, gpus: int, now: int, wall: int) -> Allocation:
        earliest = self._earliest_starts.setdefault(key, self._freed_at.get(key[0], 0))
        start = min(max(entry.start(wall=wall, now=now), earliest), now)
        restarts = entry.job.restarts if entry.job else 0
        return Allocation(key[0], entry.owner(self.rules), start, gpus=entry.gpus(gpus), restarts=restarts)

    def _compare(self, present: dict[HoldKey, Allocation], now: int) -> tuple[Allocation, ...]:
        ended = [replace(self._held[key], end=now) for key in self._held.keys() - present.keys()]
        self._freed_at |= {allocation.uuid: now for allocation in ended}
        self._held = present
        self._earliest_starts = {key: earliest for key, earliest in self._earliest_starts.items() if key in present}
        return (*present.values(), *ended)


def _has_shared_gres(entry: NodeJob) -> bool:
    """Whether it has parts of GPUs; other jobs may have the rest. The prolog's files do not show it."""
    named = not SHARED_GRES.isdisjoint(name for name, _ in entry.indices)
    return named or (entry.job is not None and entry.job.on_shares)
