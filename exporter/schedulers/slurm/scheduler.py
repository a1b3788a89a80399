"""The `Scheduler` of a Slurm node: reads two small directories each poll, and queries only when a job comes or goes.

Never polls slurmctld, because ten thousand nodes must not load it. A GPU is held while anything of its job is left
here. A job whose last step ended has itself ended if its batch script, extern step (PrologFlags=Contain) or mapping
file was seen; otherwise it may be an allocation between two steps and is queried at growing pauses. While slurmctld
does not answer, known allocations stay and `unanswered_since` is set.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter.core.model import SECOND, UNKNOWN_JOB, Allocation, Device, Fault, Owner, Reading
from exporter.files import may_exist
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.procfs import JobMembers, ProcessInfo, UserNames, slurm_jobs, user_name
from exporter.schedulers.rules import Rules
from exporter.schedulers.slurm.client import CommandClient, Commands, SlurmClient
from exporter.schedulers.slurm.controller import ControllerQueries
from exporter.schedulers.slurm.job_table import AllocationTracker, JobTable
from exporter.schedulers.slurm.local_node import (
    GpuMap,
    LocalNode,
    Slot,
    SlurmConf,
    SpoolReader,
    SpoolState,
    find_conf,
    read_conf,
    short_hostname,
)
from exporter.schedulers.slurm.slurmd import list_gpus

FIRST_ANSWER_SECONDS = 0.2
"""Wait for the response about a new job, so that a job of a few seconds is billed to its account."""
_GPU_MAP_CHANGED, _GPU_MAP_PROBLEM, _GPU_MAP_EVERY = 10 * SECOND, 60 * SECOND, 600 * SECOND
"""Shortest pause between two readings of the lists of GPUs: after a change, after the first problem, otherwise.

While a problem lasts the pause doubles: the command may take half a minute, and queries wait that long.
"""
_NODE_STATE_AGAIN = 30 * SECOND
"""Shortest pause between two queries for the node's state (two RPCs each), however many jobs leave."""
_NODE_STATE_WITHIN = 10 * SECOND
"""Time within which the node's state is queried after the start and after a job: many nodes start, and leave a large
job, together."""
_UNKNOWN = Owner(UNKNOWN_JOB, "slurm", name="a job of which nobody can say what it has")


class SlurmScheduler:
    """The `Scheduler` of a Slurm node."""

    name = "slurm"

    def __init__(
        self,
        node: str,
        spool: SpoolReader,
        controller: ControllerQueries,
        *,
        rules: Rules | None = None,
        proc: str | Path = "/proc",
        node_state_seconds: float = 300.0,
        wall: Callable[[], int] = time.time_ns,
        phase: Callable[[], float] = random.random,
        user_of: Callable[[int], str] = user_name,
    ) -> None:
        """`wall` returns Unix nanoseconds, `phase` a random number in [0, 1), `user_of` a uid's name."""
        self.node, self._spool, self._controller, self._wall = node, spool, controller, wall
        self._jobs = JobTable(controller, node)
        self._tracker = AllocationTracker(rules or Rules())
        self._members = JobMembers(self._job_of, proc=proc, proven=self._proven)
        self._user_of = UserNames(user_of)
        self._gpu_map: GpuMap | None = None
        self._gpu_map_at: int | None = None
        self._gpu_map_of: frozenset[str] = frozenset()
        """The devices at the last request for the lists of GPUs."""
        self._gpu_map_pause, self._conf_at = _GPU_MAP_PROBLEM, 0
        self._last_list: tuple[Mapping[str, tuple[Slot, ...]] | None, frozenset[str]] | None = None
        """The last list that slurmd gave, and the devices then."""
        self._every, self._phase = int(node_state_seconds * SECOND), phase
        self._node_state_at = self._node_state_again = 0
        self._condition = ""
        self._pending_faults: tuple[Fault, ...] = ()

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """Return one allocation per job and GPU, and once, with `end=now`, each that has ended.

        None until Slurm's GPU indices can be resolved. Raises SchedulerError if the directories cannot be read: starts
        and ends are unknown then.
        """
        if not self._controller.alive:
            raise SchedulerError("scheduler slurm: its thread has ended: please report it with this daemon's log")
        spool, wall = self._read(), self._wall()
        first = self._gpu_map_at is None
        self._keep_gpu_map(now, devices)
        if self._jobs.update(spool.jobs, now) or first:
            self._controller.wait_settled(FIRST_ANSWER_SECONDS)
        updates = self._controller.take_updates()
        if updates.gpu_map is not None:
            self._gpu_map = self._with_last_list(updates.gpu_map, devices)
        self._condition = updates.node.condition if updates.node else self._condition
        self._jobs.apply_answers(updates.answers, now=now, wall=wall)
        self._jobs.follow_up(now)
        allocations = self._tracker.update(self._jobs, self._gpu_map, devices, now=now, wall=wall)
        self._jobs.recheck(self._tracker.contested, now)
        self._request_node_state(now, devices)
        self._pending_faults += (*updates.faults, *self._faults(spool))
        if self._gpu_map is None:
            return None
        faults, self._pending_faults = self._pending_faults, ()
        return SchedulerState(
            (*allocations, *self._unidentified(spool, now, devices)),
            now,
            self._condition,
            self._members.of_readings(readings),
            faults,
            self._controller.unanswered_since,
        )

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`."""
        return self._members.of_pids(pids)

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: each poll applies the rules to all jobs."""
        self._tracker.rules = rules

    def close(self) -> None:
        """Stop the thread and its running command. Never raises."""
        self._controller.close()

    def _unidentified(self, spool: SpoolState, now: int, devices: Sequence[Device]) -> Iterator[Allocation]:
        """While a job's GPUs are unknown, yield every unallocated GPU as held by an unknown job."""
        if spool.misnamed or any(entry.unidentified for entry in self._jobs):
            held = self._tracker.held_uuids()
            for device in devices:
                if device.uuid not in held and not device.unpartitioned:
                    yield Allocation(device.uuid, _UNKNOWN, now)

    def _read(self) -> SpoolState:
        try:
            return self._spool.read(self._wall())
        except OSError as err:
            raise SchedulerError(
                f"scheduler slurm: {err.filename or 'the spool directory'}: {err.strerror or err}. Does slurmd run"
                " here, and may this daemon read its SlurmdSpoolDir? Set slurm.spool_dir, slurm.mapping_dir"
            ) from err

    def _keep_gpu_map(self, now: int, devices: Sequence[Device]) -> None:
        """Request the lists of GPUs at first, after a change, while something is wrong with them, and seldom."""
        uuids = frozenset(device.uuid for device in devices)
        problem = bool(self._tracker.problems or (self._gpu_map and self._gpu_map.problem))
        if not problem:
            self._gpu_map_pause = _GPU_MAP_PROBLEM
        pause = _GPU_MAP_CHANGED if uuids != self._gpu_map_of else self._gpu_map_pause if problem else _GPU_MAP_EVERY
        if self._gpu_map_at is None or now - self._gpu_map_at >= pause:
            self._gpu_map_pause = min(self._gpu_map_pause * (2 if problem else 1), _GPU_MAP_EVERY)
            self._gpu_map_at, self._gpu_map_of = now, uuids
            self._controller.request_gpu_map()
        if now - self._conf_at >= _GPU_MAP_CHANGED:
            self._conf_at = now
            self._controller.check_conf()

    def _with_last_list(self, read: GpuMap, devices: Sequence[Device]) -> GpuMap:
        """Return what was read; if slurmd gave no list, with its last one, unless other devices have come since.

        Once there was a list, an index is never taken for a minor: slurmd may be missing for a moment.
        """
        uuids = frozenset(device.uuid for device in devices)
        if not read.problem:
            self._last_list = read.slots, uuids
        elif self._last_list is not None:
            slots, then = self._last_list
            return replace(read, slots=slots if uuids <= then else {})
        return read

    def _request_node_state(self, now: int, devices: Sequence[Device]) -> None:
        """Query the node's state after a job has left, and regularly while a GPU is unallocated."""
        if not self._every or not devices:
            return
        if not self._node_state_at:
            self._node_state_at = self._soon(now)
        if self._jobs.job_left:
            self._jobs.job_left = False
            soon = max(self._node_state_again, self._soon(now))
            # While a job had all GPUs, the regular query has become due, on all of the job's nodes.
            self._node_state_at = min(self._node_state_at, soon) if self._node_state_at > now else soon
        held = self._tracker.held_uuids()
        free = any(device.uuid not in held for device in devices if not device.unpartitioned)
        if free and now >= self._node_state_at:
            self._node_state_at = now + self._every // 2 + int(self._phase() * self._every)
            self._node_state_again = now + min(self._every, _NODE_STATE_AGAIN)
            self._controller.request_node_state()

    def _soon(self, now: int) -> int:
        return now + int(self._phase() * min(self._every, _NODE_STATE_WITHIN))

    def _faults(self, spool: SpoolState) -> Iterator[Fault]:
        """Yield one fault with all current problems."""
        problems = {*self._tracker.problems, *spool.problems, *self._foreign_sockets(spool)}
        problems |= {self._gpu_map.fault} if self._gpu_map and self._gpu_map.fault else set()
        problems |= {_refused_message(e.job_id, e.refused) for e in self._jobs if e.refused}
        problems |= {_stale_message(e.job_id) for e in self._jobs if e.stale}
        problems |= {_disputed_message(e.job_id, e.disputed) for e in self._jobs if e.disputed}
        if problems:
            yield Fault("scheduler_refused", f"Slurm: {'; '.join(sorted(problems))}")

    def _foreign_sockets(self, spool: SpoolState) -> list[str]:
        if not spool.misnamed:
            return []
        return [
            f"the spool directory has steps of node {spool.foreign_nodes[0]}, not of {self.node}: set slurm.node_name"
        ]

    def _job_of(self, process: ProcessInfo) -> str:
        """Return the job in the cgroup, or else in the environment, which the user can change.

        Tasks of a heterogeneous step have its leader's id in SLURM_JOB_ID; their own is among SLURM_JOB_ID_HET_GROUP_*.
        """
        names = (*slurm_jobs(process.cgroup), process.environ.get("SLURM_JOB_ID", ""))
        groups = (job for name, job in process.environ.items() if name.startswith("SLURM_JOB_ID_HET_GROUP_"))
        return next((job for name in (*names, *groups) if (job := self._jobs.known_as(name))), "")

    def _proven(self, process: ProcessInfo) -> str:
        """Return the job; a job from the environment counts only if the process runs as the job's user."""
        job = self._job_of(process)
        if not job or job in map(self._jobs.known_as, slurm_jobs(process.cgroup)):
            return job
        user = self._jobs.user(job)
        return job if user and process.uid is not None and self._user_of(process.uid) == user else ""


def open_slurm(config: Any) -> SlurmScheduler:
    """Open this node's Slurm. Raises SchedulerError if there is neither a spool nor a mapping directory."""
    slurm = config.slurm
    conf = _conf(find_conf(slurm.conf, os.environ))
    node = _node_name(slurm.node_name, conf)
    spool = Path(slurm.spool_dir) if slurm.spool_dir else conf.spool_dir(node) if conf else None
    mapping = Path(slurm.mapping_dir) if slurm.mapping_dir else None
    there = spool is not None and may_exist(spool)
    if mapping is None and not there:
        raise SchedulerError(
            f"scheduler slurm: {spool or 'SlurmdSpoolDir'} is not there"
            f" ({conf.path if conf else 'no slurm.conf was found'}). On a Slurm node set slurm.conf or slurm.spool_dir,"
            " or slurm.mapping_dir where the prolog writes one"
        )
    proc = Path(config.host.proc)
    commands = Commands(bin_dir=slurm.bin_dir, conf=conf.path if conf else "", timeout=slurm.timeout_seconds)
    local = LocalNode(
        node,
        slots=lambda: list_gpus(commands, node, proc=proc),
        proc=proc,
        cgroup=config.host.cgroup,
        conf=commands.conf,
    )
    controller = ControllerQueries(_client(slurm, commands), local, node=node, clock=time.monotonic_ns)
    return SlurmScheduler(
        node,
        SpoolReader(node, spool=spool if there else None, mapping=mapping),
        controller,
        rules=Rules(config.workload, config.exemptions),
        proc=proc,
        node_state_seconds=slurm.node_state_seconds,
    )


def _client(slurm: Any, commands: Commands) -> SlurmClient:
    if not slurm.restd_url:
        return CommandClient(commands)
    from exporter.schedulers.slurm.restd import RestClient  # noqa: PLC0415  an HTTP client is 13 MiB

    try:
        return RestClient(slurm.restd_url, token_file=slurm.restd_token_file, timeout=slurm.timeout_seconds)
    except ValueError as err:
        raise SchedulerError(f"scheduler slurm: {err}") from err


def _conf(path: str) -> SlurmConf | None:
    try:
        return read_conf(path) if path else None
    except (OSError, ValueError) as err:
        raise SchedulerError(f"scheduler slurm: {path}: {err}. Set slurm.conf, or make it readable") from err


def _node_name(configured: str, conf: SlurmConf | None) -> str:
    name = configured or os.environ.get("SLURMD_NODENAME", "")
    if name or conf is None or not conf.nodes:
        return name or short_hostname()
    if len(conf.nodes) > 1:
        names = ", ".join(conf.nodes[:4])
        raise SchedulerError(
            f"scheduler slurm: several nodes of {conf.path} are this host ({names}): set slurm.node_name"
        )
    return conf.nodes[0]


def _refused_message(job_id: str, why: str) -> str:
    return f"the controller's data about job {job_id} is rejected: {why}. It holds its GPUs without name and account"


def _stale_message(job_id: str) -> str:
    return f"job {job_id} has ended or runs elsewhere, and left a socket or mapping file here: it holds nothing"


def _disputed_message(job_id: str, why: str) -> str:
    return (
        f"job {job_id}: {why}, which its user can change. It is billed for what the controller lists: if that is wrong,"
        " set slurm.mapping_dir and install the prolog"
    )
