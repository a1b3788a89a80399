"""Assigns GPUs without a scheduler: by the user and the systemd unit or container of the processes on each GPU.

Needs a source that lists processes, and this daemon in the host's pid namespace. A process that cannot be read still
holds its GPU, as `unknown/<its name in the driver's list>` without a user. A start time is CLOCK_BOOTTIME less the time
suspended: after a suspend it may be too early, never too late.
"""

import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from exporter.core.model import MS, NEVER, SECOND, Allocation, Device, Owner, Process, Reading
from exporter.files import may_exist
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.procfs import SLUID, ProcessCache, UserNames, rank_of, read_process, user_name
from exporter.schedulers.rules import Rules

_UNITS = (
    # Patterns of one component of a cgroup path, in order of preference; of several matches the deepest counts.
    # The kubelet's cgroup drivers write a pod's uid with "-" (cgroupfs) or "_" (systemd); all containers of a pod have
    # one owner. Slurm puts jobs below one slurmstepd.scope. 64 hex digits are a container, of any runtime.
    (re.compile(r"(?:.*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?"), "pod-{}"),
    (re.compile(r"job_(\d+)"), "slurm-{}"),
    (re.compile(f"({SLUID})"), "slurm-{}"),
    (re.compile(r"(?:[a-z-]+-)?([0-9a-f]{12})[0-9a-f]{52}(?:\.scope)?"), "container-{}"),
    (re.compile(r"lxc\.payload\.(.+)"), "lxc-{}"),
    (re.compile(r"(.+\.(?:service|scope))"), "{}"),
)
_NO_UNIT = "no-unit"
_SESSION = re.compile(r"/session-[^/]*\.scope|/user@")
"""A login session, or a user's own systemd."""


class _ProcessOwner(Struct, frozen=True):
    """A process's owner and start, as read from /proc."""

    owner: Owner
    """As before any rule."""
    command: str
    start: int
    rank: str
    uid: int | None = None
    """None: not visible in /proc, so no rule is applied."""


class ProcessesScheduler:
    """The `Scheduler` of a shared machine without a scheduler; needs a source that lists processes."""

    name = "processes"

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        proc: str | Path = "/proc",
        user_of: Callable[[int], str] = user_name,
        suspended: Callable[[], int] | None = None,
    ) -> None:
        """`user_of` maps a uid to a name, `suspended` returns the nanoseconds spent suspended since boot."""
        self.node = platform.node()
        self._proc, self._rules = Path(proc), rules or Rules()
        self._user_of = UserNames(user_of)
        self._suspended = suspended or _suspended_nanoseconds
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._seen, self._others = ProcessCache(self._proc, self._identify), ProcessCache(self._proc, self._identify)
        self._held: dict[tuple[str, str], Allocation] = {}
        self._identities: dict[tuple[str, str], _ProcessOwner] = {}
        """The first process of each held allocation."""
        self._listed_at: dict[str, int] = {}
        self._at = NEVER
        self._no_lists = False
        """Readings have come, but never a process list; a poll without readings does not change that."""

    def poll(self, now: int, _devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """Return one allocation per owner and GPU, and once, with `end=now`, each that has ended.

        None before the first reading. A GPU without a list (None) keeps its owners; without any list the state is not
        confirmed anew. Raises SchedulerError while no list has ever come: a source that cannot list processes must not
        make every GPU look unallocated.
        """
        lists = {r.uuid: r for r in readings if r.processes is not None}
        self._require_lists(readings, lists)
        if not lists and not self._listed_at:
            return None
        seen = self._seen.refresh(process.pid for r in lists.values() for process in r.processes or ())
        known = {pid: self._named(who) for pid, who in seen.items()}
        ended = [gone for reading in lists.values() for gone in self._update_gpu(reading, known, now=now)]
        counts = Counter(job for _, job in self._held)
        self._held = {key: structs.replace(a, gpus=counts[key[1]]) for key, a in self._held.items()}
        if lists or not readings:
            self._at = now
        return SchedulerState((*self._held.values(), *ended), self._at, members=_members(lists.values(), known))

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`: all processes of a user's unit belong to that unit's job on a GPU."""
        holders = {job for _, job in self._held}
        found = ((pid, self._named(who)) for pid, who in self._others.lookup(pids).items())
        return {pid: Member(who.owner.job_id, who.rank) for pid, who in found if who.owner.job_id in holders}

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: the rules are applied to each allocation's first process again."""
        self._rules = rules
        self._held = {
            key: structs.replace(held, owner=self._apply_rules(self._identities[key]))
            for key, held in self._held.items()
        }

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _require_lists(self, readings: Sequence[Reading], lists: dict[str, Reading]) -> None:
        self._no_lists = not lists and not self._listed_at and (self._no_lists or bool(readings))
        if self._no_lists:
            raise SchedulerError(
                "scheduler processes: no GPU's process list can be seen. dcgm-exporter never gives one: use the"
                " nvml source; with nvml, run as root and in the host's pid namespace"
            )
        if lists and not may_exist(self._proc):
            raise SchedulerError(f"scheduler processes: {self._proc} is no directory: mount the host's /proc there")

    def _update_gpu(self, reading: Reading, known: Mapping[int, _ProcessOwner], *, now: int) -> list[Allocation]:
        """Apply one GPU's process list; return the allocations that ended on it."""
        uuid, present = reading.uuid, _present(reading, known)
        for who in present.values():
            key = (uuid, who.owner.job_id)
            if key in self._held:
                continue
            # It was not on the previous list, so it did not use the GPU then, however old the process: a notebook that
            # only now creates a context. On the first poll there is no previous list and the process's start counts.
            begun = min(max(who.start, self._listed_at.get(uuid, who.start)), now)
            self._held[key], self._identities[key] = Allocation(uuid, self._apply_rules(who), begun), who
        self._listed_at[uuid] = now
        gone = [key for key in self._held if key[0] == uuid and key[1] not in present]
        for key in gone:
            del self._identities[key]
        return [structs.replace(self._held.pop(key), end=now) for key in gone]

    def _identify(self, folder: Path, ticks: int) -> _ProcessOwner:
        process = read_process(folder)
        if process.uid is None:
            raise ValueError(f"{folder}/status: no uid")
        kind = "session" if _SESSION.search(process.cgroup) else ""
        owner = _owned_by(self._user_of(process.uid), Owner("", "processes", name=_unit(process.cgroup), kind=kind))
        return _ProcessOwner(owner, process.command, self._started(ticks), rank_of(process.environ), process.uid)

    def _named(self, who: _ProcessOwner) -> _ProcessOwner:
        """Return the process with its user's name, which may not have been known when it was read."""
        user = who.owner.user if who.uid is None else self._user_of(who.uid)
        return who if user == who.owner.user else structs.replace(who, owner=_owned_by(user, who.owner))

    def _apply_rules(self, who: _ProcessOwner) -> Owner:
        return who.owner if who.uid is None else self._rules.apply(who.owner, command=who.command)

    def _started(self, ticks: int) -> int:
        nanoseconds = ticks * SECOND // self._hertz - self._suspended()
        return -(-nanoseconds // MS) * MS


def open_processes(config: Any) -> ProcessesScheduler:
    """Open with the host's /proc as configured."""
    return ProcessesScheduler(Rules(config.workload, config.exemptions), proc=config.host.proc)


def _present(reading: Reading, known: Mapping[int, _ProcessOwner]) -> dict[str, _ProcessOwner]:
    """Return the owners on the GPU by job id, each with its earliest process's start."""
    present: dict[str, _ProcessOwner] = {}
    for process in reading.processes or ():
        # An unknown process's start is not visible; it existed when the list was made for this reading.
        who = known.get(process.pid) or _ProcessOwner(_unknown(process), "", reading.start, "")
        job = who.owner.job_id
        present[job] = structs.replace(who, start=min(who.start, present.get(job, who).start))
    return present


def _owned_by(user: str, owner: Owner) -> Owner:
    return structs.replace(owner, job_id=f"{user}/{owner.name}", user=user)


def _members(readings: Iterable[Reading], known: Mapping[int, _ProcessOwner]) -> dict[int, Member]:
    listed = (process for reading in readings for process in reading.processes or ())
    owners = ((process, known.get(process.pid)) for process in listed)
    return {p.pid: Member(who.owner.job_id, who.rank) if who else Member(_unknown(p).job_id) for p, who in owners}


def _unknown(process: Process) -> Owner:
    """Return the owner for a process not in /proc: just ended, hidden (`hidepid`), or in another pid namespace."""
    name = process.name.split("\0")[0].rsplit("/", 1)[-1]
    return Owner(f"unknown/{name or 'process'}", "processes", name="process not visible in /proc")


def _unit(cgroups: str) -> str:
    """Return the unit in /proc/PID/cgroup (`hierarchy:controllers:path` lines); unified and systemd's come first."""
    lines = [line.split(":", 2) for line in cgroups.splitlines() if line.count(":") >= 2]  # noqa: PLR2004  id:controllers:path
    lines.sort(key=lambda line: (line[0] != "0", line[1] != "name=systemd"))
    found = (_unit_of_path(path) for _, _, path in lines)
    return next((unit for unit in found if unit), _NO_UNIT)


def _unit_of_path(path: str) -> str:
    components = [part.replace(r"\x2d", "-") for part in reversed(path.split("/"))]
    for pattern, form in _UNITS:
        for match in map(pattern.fullmatch, components):
            if match:
                return form.format(match[1].replace("_", "-") if form == "pod-{}" else match[1])
    return ""


def _suspended_nanoseconds() -> int:
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - monotonic
