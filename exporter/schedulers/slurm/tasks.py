"""What the processes of jobs on this node say of their job: their environment as slurmstepd made it.

Owns finding them, by control group where Slurm has some, else by one walk through /proc for all jobs asked about.
Refuses the words of anybody's children: only what slurmstepd itself started counts (its owner is root, or us). Even
such a process may have replaced its environment by an exec of its own, so the controller's word goes before this.

Of Slurm's variables (srun(1), sbatch(1), prolog guide): SLURM_JOB_GPUS is right on the batch script's node and is
inherited, wrong, by steps on others; SLURM_STEP_GPUS is this node's, of one step. CUDA_VISIBLE_DEVICES is renumbered
under ConstrainDevices, so it counts only where it holds UUIDs.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from exporter.schedulers.members import Facts, facts, text, user_name
from exporter.schedulers.slurm.hostlist import expand_numbers

_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpuacct", "cpu,cpuacct")
_MOST_PROCESSES = 4096
_MOST_GPUS = 1024
_NODE = re.compile("\0SLURMD_NODENAME=([^\0]*)\0")
_LISTENER = re.compile(r"/([^/\s]+)$", re.MULTILINE)


class Tasks(Struct, frozen=True):
    """Of one job, on this node."""

    user: str = ""
    command: str = ""
    """Of the batch script, or of a task."""
    batch: tuple[int, ...] | None = None
    """All its GPUs here, by Slurm's index; None: its batch script is not here or says nothing."""
    steps: frozenset[int] = frozenset()
    """GPUs of its steps that are running now: perhaps not all of the job's."""
    uuids: tuple[str, ...] = ()
    """GPUs that the batch script may see, where it is told UUIDs."""
    processes: int = 0
    """Started by slurmstepd and still there."""


class Node:
    """The node's processes."""

    def __init__(self, name: str, *, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> None:
        self._name, self._proc, self._cgroup = name, Path(proc), Path(cgroup)

    def look(self, jobs: Iterable[str]) -> dict[str, Tasks]:
        """What is to be seen of each of these jobs now. May take a while; may ask a name service."""
        wanted = set(jobs)
        found = {job: list(self._in_groups(job)) for job in wanted}
        if not all(found.values()):
            for said in self._in_proc():
                job = said.environ.get("SLURM_JOB_ID", "")
                if job in wanted and not any(said is other for other in found[job]):
                    found[job].append(said)
        return {job: _tasks([s for s in each if s.environ.get("SLURM_JOB_ID") == job]) for job, each in found.items()}

    def listening(self) -> frozenset[str]:
        """Names of all unix sockets bound in the host's network namespace; of none that may not be read, nothing."""
        try:
            with (self._proc / "1/net/unix").open(encoding="utf-8", errors="replace") as file:
                return frozenset(_LISTENER.findall(file.read(16 * 1024 * 1024)))
        except OSError:
            return frozenset()

    def _ours(self, pid: str) -> bool:
        """Several slurmds may share a host, and a job run on more than one of them."""
        match = _NODE.search("\0" + _read(self._proc / pid / "environ"))
        return match is None or match[1] == self._name

    def _in_groups(self, job: str) -> Iterator[Facts]:
        """Of the job's control group: cgroup v1 `slurm[_NODE]/uid_U/job_J`, v2 `[NODE_]slurmstepd.scope/job_J`."""
        trees = [self._cgroup / each for each in _HIERARCHIES]
        groups = [path for tree in trees for path in tree.glob(f"slurm*/uid_*/job_{job}")]
        groups += self._cgroup.glob(f"system.slice/*slurmstepd.scope/job_{job}")
        files = (file for group in groups for file in group.rglob("cgroup.procs"))
        pids = {pid for file in files for pid in _read(file).split()[:_MOST_PROCESSES] if pid.isdigit()}
        return self._started(pids)

    def _in_proc(self) -> Iterator[Facts]:
        return self._started(path.name for path in self._proc.iterdir() if path.name.isdigit())

    def _started(self, pids: Iterable[str]) -> Iterator[Facts]:
        """Of these, those that slurmstepd started."""
        trusted: dict[str, bool] = {}
        for pid in pids:
            parent = _parent(_read(self._proc / pid / "stat"))
            if parent not in trusted:
                trusted[parent] = self._is_stepd(parent)
            if trusted[parent] and self._ours(pid):
                try:
                    yield facts(self._proc / pid)
                except (OSError, ValueError):
                    continue

    def _is_stepd(self, pid: str) -> bool:
        """Whether a process is slurmstepd; a user may give a process of their own that name."""
        folder = self._proc / pid
        try:
            return _name(_read(folder / "stat")) == "slurmstepd" and folder.stat().st_uid in {0, os.geteuid()}
        except OSError:
            return False


def _tasks(processes: list[Facts]) -> Tasks:
    batch = next((said for said in processes if "SLURM_STEP_ID" not in said.environ and _is_batch(said)), None)
    steps = {gpu for said in processes for gpu in _gpus(said.environ, "SLURM_STEP_GPUS")}
    named = batch or next(iter(processes), None)
    if named is None:
        return Tasks()
    return Tasks(
        user="" if named.uid is None else user_name(named.uid),
        command=named.command,
        batch=_gpus(batch.environ, "SLURM_JOB_GPUS") or None if batch else None,
        steps=frozenset(steps),
        uuids=_uuids(batch.environ) if batch else (),
        processes=len(processes),
    )


def _is_batch(said: Facts) -> bool:
    return "SLURM_STEPID" not in said.environ and "SLURM_JOB_GPUS" in said.environ


def _gpus(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, expand_numbers(environ.get(name, ""), most=_MOST_GPUS)))
    except ValueError:
        return ()


def _uuids(environ: Mapping[str, str]) -> tuple[str, ...]:
    said = tuple(environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return said if all(each.startswith(("GPU-", "MIG-")) for each in said) else ()


def _read(path: Path) -> str:
    try:
        return text(path)
    except OSError:
        return ""


def _parent(stat: str) -> str:
    """Field 4 of /proc/PID/stat (proc(5)); the name in field 2 may hold spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return fields[1] if len(fields) > 1 else "0"


def _name(stat: str) -> str:
    return stat.partition("(")[2].rpartition(")")[0]
