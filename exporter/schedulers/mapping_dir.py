"""Reads the job mapping directory of dcgm-exporter (`--hpc-job-mapping-dir`): one file per GPU, one job id per line.

A file is named by the GPU's index ("0"), its index and MIG GPU instance ("0.7"), or its UUID; several jobs share the
GPU. A missing or empty file means no job. A file that cannot be read or parsed keeps its last jobs, or else holds the
GPU for UNKNOWN; a missing directory is an error. Sources: dcgm-exporter's README, "How to include HPC jobs in metric
labels".
"""

import errno
import logging
import os
import platform
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from exporter.core.model import MS, SECOND, UNKNOWN_JOB, Allocation, Device, Fault, Owner, Reading
from exporter.schedulers.base import Member, SchedulerError, SchedulerState
from exporter.schedulers.procfs import JobMembers, ProcessInfo, UserNames, slurm_jobs, user_name
from exporter.schedulers.rules import Rules

log = logging.getLogger(__name__)
_GPU = re.compile(r"\d{1,4}(?:\.\d{1,4})?|(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z-]{0,80}")
"""File names of GPUs; a writer's temporary files (".0.x1", "0.tmp", "0~") do not match."""
_JOB = re.compile(r"[!-~]{1,128}")
"""A job id of any scheduler: printable, without a space."""
_MOST_COLUMNS = 2
"""Columns of a line: the job id and optionally its user."""
_FILE_BYTES = 64 * 1024
JOBS_PER_GPU = 64
_NAMES = 10_000
_ROOT = 0
"""Its processes of a job, as an MPS server that a prologue started, do not make it the job's user beside another."""
_QUIET = 2 * SECOND
"""Nanoseconds without a write after which a file is complete and its timestamps prove that it has not changed."""
UNKNOWN = UNKNOWN_JOB
"""Job id for a GPU whose file is unreadable or invalid."""


class MappingFile(Struct, frozen=True):
    """The content of one file."""

    jobs: tuple[str, ...]
    written: int
    """Modification time; Unix nanoseconds."""
    problem: str = ""
    """Why the file or some of its lines were rejected; empty when it is valid."""


class _CachedFile(Struct, frozen=True):
    content: MappingFile
    fingerprint: tuple[int, ...]
    """Inode, size and times; they change with the content."""
    quiet: bool
    """The content can be reused while the fingerprint stays."""


class JobFiles:
    """Reads the files of one directory again only after they have changed."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._cached: dict[str, _CachedFile] = {}

    def read(self, wall: int) -> Mapping[str, MappingFile]:
        """Return the content of each GPU's file at `wall` (Unix nanoseconds), by file name.

        Raises OSError, and keeps the cache, if the directory cannot be read.
        """
        found = ((name, self._file(name, wall)) for name in _names(self._path))
        self._cached = {name: known for name, known in found if known is not None}
        return {name: known.content for name, known in self._cached.items()}

    def _file(self, name: str, wall: int) -> _CachedFile | None:
        path, before = self._path / name, self._cached.get(name)
        try:
            fingerprint = _fingerprint(path.stat())
            if before is not None and before.quiet and before.fingerprint == fingerprint:
                return before
            data, status = _read(path)
        except FileNotFoundError:
            return None
        except OSError as err:
            return _unreadable(before, f"{path}: cannot be read: {err.strerror or err}", wall)
        quiet = wall - status.st_mtime_ns > _QUIET or (
            before is not None and before.fingerprint == _fingerprint(status)
        )
        if not quiet and not data.endswith(b"\n"):
            return _incomplete(before, data, status)
        return _parsed(before, data, path=path, status=status, quiet=quiet)


class MappingDirScheduler:
    """The `Scheduler` of a node whose prolog or job launcher maintains a mapping directory.

    The files hold only job ids: the user, and the command line for the rules, come from a process of the job. Its
    control group says whose it is, or else its environment, which its user can change: that counts only on a GPU that
    the job holds, and only while no other user's process there says the same.
    """

    name = "mapping-dir"

    def __init__(
        self,
        path: str | Path,
        rules: Rules | None = None,
        *,
        proc: str | Path = "/proc",
        wall: Callable[[], int] = time.time_ns,
        user_of: Callable[[int], str] = user_name,
    ) -> None:
        """`wall` returns Unix nanoseconds, `user_of` a uid's name. Raises SchedulerError if `path` cannot be read."""
        self.node = platform.node()
        self._path, self._rules, self._wall = Path(path), rules or Rules(), wall
        self._user_of = UserNames(user_of)
        self._files = JobFiles(self._path)
        self._members = JobMembers(self._find_job, proc=proc, proven=self._proven)
        self._listed: frozenset[str] = frozenset()
        self._job_processes: dict[str, ProcessInfo] = {}
        """One process per job, for its user and command."""
        self._contested: set[str] = set()
        """Jobs that the environments of several users' processes name; none is its user."""
        self._held: dict[tuple[str, str], Allocation] = {}
        self._polled_at: int | None = None
        self._read()
        if self._path.stat().st_mode & stat.S_IWOTH:
            log.warning(
                "mapping_dir.path %s is writable by everybody: any user can assign GPUs to any job: chmod o-w",
                self._path,
            )

    def poll(self, now: int, devices: Sequence[Device], readings: Sequence[Reading]) -> SchedulerState | None:
        """Return one allocation per job and GPU, and once, with `end=now`, each that has ended.

        A new job has held the GPU since its file was written. Raises SchedulerError while the directory cannot be read:
        starts and ends are unknown then.
        """
        files = self._read()
        holders, faults = _holders(files, devices)
        self._listed = frozenset(job for held in holders.values() for job in held.jobs)
        members = self._members.of_readings(readings)
        present = {(uuid, job): held.written for uuid, held in holders.items() for job in held.jobs}
        self._note_users(members, present.keys(), readings)
        counts = Counter(job for _, job in present)
        ended = [structs.replace(a, end=now) for key, a in self._held.items() if key not in present]
        self._held = {
            key: self._allocation(key, written, gpus=counts[key[1]], now=now) for key, written in present.items()
        }
        self._polled_at = now
        problems = (Fault("scheduler_refused", held.problem, uuid) for uuid, held in holders.items() if held.problem)
        faults += [_contested(job) for job in sorted(self._contested)]
        return SchedulerState((*self._held.values(), *ended), now, members=members, faults=(*faults, *problems))

    def members(self, pids: Sequence[int]) -> Mapping[int, Member]:
        """See `Scheduler.members`; the job's user is that of its process on a GPU."""
        return self._members.of_pids(pids)

    def update(self, rules: Rules) -> None:
        """See `Scheduler.update`: each poll applies the rules to all jobs."""
        self._rules = rules

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _read(self) -> Mapping[str, MappingFile]:
        try:
            return self._files.read(self._wall())
        except OSError as err:
            raise SchedulerError(
                f"scheduler mapping-dir: {self._path}: {err.strerror or err}. Let the prolog make it (slurm-prolog.sh"
                " does), or systemd-tmpfiles at boot, and let this daemon read it; or set mapping_dir.path"
            ) from err

    def _allocation(self, key: tuple[str, str], written: int, *, gpus: int, now: int) -> Allocation:
        uuid, job = key
        before, owner = self._held.get(key), self._owner(job)
        start = self._start(written, now) if before is None else before.start
        return Allocation(uuid, owner, start, gpus=gpus)

    def _start(self, written: int, now: int) -> int:
        """Return when the job's file was written (monotonic), at the earliest at boot or the last poll."""
        age = max(0, self._wall() - written) // MS * MS
        return max(now - age, self._polled_at or 0)

    def _owner(self, job: str) -> Owner:
        if job == UNKNOWN:
            return Owner(UNKNOWN, self.name, name="mapping file cannot be believed")
        process = self._known(job)
        user = "" if process is None or process.uid is None else self._user_of(process.uid)
        return self._rules.apply(Owner(job, self.name, user), command=process.command if process else "")

    def _note_users(
        self, members: Mapping[int, Member], held: Collection[tuple[str, str]], readings: Sequence[Reading]
    ) -> None:
        """Keep one process of each job for its user, of those on its GPUs; its control group goes before all."""
        self._job_processes = {job: process for job, process in self._job_processes.items() if job in self._listed}
        self._contested &= self._listed
        for uuid, pid in [(reading.uuid, each.pid) for reading in readings for each in reading.processes or ()]:
            if pid in members:
                job = members[pid].job_id
                self._note_user(job, self._members.on_gpus[pid], on_its_gpu=(uuid, job) in held)

    def _note_user(self, job: str, process: ProcessInfo, *, on_its_gpu: bool) -> None:
        known = self._job_processes.get(job)
        if known is not None and _is_in_group(known, job):
            return
        if _is_in_group(process, job):
            self._job_processes[job] = process
            self._contested.discard(job)
        elif on_its_gpu and process.uid is not None:
            if known is None or known.uid == _ROOT != process.uid:
                self._job_processes[job] = process
            elif process.uid not in {_ROOT, known.uid}:
                self._contested.add(job)

    def _known(self, job: str) -> ProcessInfo | None:
        """Return the process that shows the job's user and command; None while users dispute it."""
        return None if job in self._contested else self._job_processes.get(job)

    def _find_job(self, process: ProcessInfo) -> str:
        """Return the job in the cgroup, or else in the environment, which the user can change."""
        names = (*slurm_jobs(process.cgroup), *_environment_jobs(process.environ))
        return next((name for name in names if name in self._listed), "")

    def _proven(self, process: ProcessInfo) -> str:
        """Return the job; a job from the environment counts only if the process runs as the job's user."""
        job = self._find_job(process)
        if _is_in_group(process, job):
            return job
        known = self._known(job)
        return job if known is not None and known.uid is not None and known.uid == process.uid else ""


def open_mapping_dir(config: Any) -> MappingDirScheduler:
    """Open the configured directory. Raises SchedulerError."""
    return MappingDirScheduler(
        config.mapping_dir.path, Rules(config.workload, config.exemptions), proc=config.host.proc
    )


def _is_in_group(process: ProcessInfo, job: str) -> bool:
    """Whether the process is in the control group that Slurm made for the job."""
    return job in slurm_jobs(process.cgroup)


def _contested(job: str) -> Fault:
    return Fault(
        "scheduler_refused",
        f"processes of several users on a GPU of job {job} have its id in their environment, which their users can"
        " change: no user is named, and only processes in the job's control group report for it",
    )


def _environment_jobs(environ: Mapping[str, str]) -> Iterator[str]:
    """Return the job ids in Slurm's, PBS' and LSF's variables; PBS' also without its server's name."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        value = environ.get(name, "")
        yield from (value, value.partition(".")[0])


def _holders(files: Mapping[str, MappingFile], devices: Sequence[Device]) -> tuple[dict[str, MappingFile], list[Fault]]:
    """Return the files' content by UUID, and a fault for each file that names no GPU of this node."""
    file_names = {device.uuid: _file_names(device, devices) for device in devices}
    used = {name for names in file_names.values() for name in names}
    unmatched = [name for name, content in files.items() if name not in used and content.jobs]
    found = {uuid: next((files[name] for name in names if name in files), None) for uuid, names in file_names.items()}
    holders = {uuid: content for uuid, content in found.items() if content is not None}
    return holders, [_unknown_gpu(name, files[name]) for name in unmatched] if devices else []


def _file_names(device: Device, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the GPU's possible file names, its own before its board's; none for a board's unpartitioned rest."""
    if device.unpartitioned:
        return ()
    own = (device.uuid, device.index.replace(":", "."))
    return own + tuple(name for board in devices if board.uuid == device.parent for name in (board.uuid, board.index))


def _unknown_gpu(name: str, content: MappingFile) -> Fault:
    jobs = ", ".join(content.jobs[:3])
    return Fault(
        "scheduler_refused",
        f"mapping file {name} gives job {jobs} a GPU that this node does not have: is it named by the driver's index?",
    )


def _names(path: Path) -> list[str]:
    """Return the names of the GPUs' files."""
    with os.scandir(path) as entries:
        first = list(islice(entries, _NAMES + 1))
    if len(first) > _NAMES:
        raise OSError(errno.EFBIG, f"more than {_NAMES} files, so it is no directory of jobs by GPU")
    return sorted(
        entry.name for entry in first if _GPU.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
    )


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return a file's bytes, at most _FILE_BYTES + 1. Raises OSError. Never waits for a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return file.read(_FILE_BYTES + 1), status


def _fingerprint(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _incomplete(before: _CachedFile | None, data: bytes, status: os.stat_result) -> _CachedFile:
    """The file may be half written: return its previous content, or else its complete lines."""
    if before is not None:
        return structs.replace(before, fingerprint=_fingerprint(status), quiet=False)
    jobs, _ = _jobs(data[: data.rfind(b"\n") + 1])
    return _CachedFile(MappingFile(jobs, status.st_mtime_ns), _fingerprint(status), quiet=False)


def _parsed(before: _CachedFile | None, data: bytes, *, path: Path, status: os.stat_result, quiet: bool) -> _CachedFile:
    if len(data) > _FILE_BYTES or b"\0" in data:
        why = "binary" if b"\0" in data else f"larger than {_FILE_BYTES} bytes"
        doubted = _unreadable(before, f"{path}: {why}, so it is no list of jobs", status.st_mtime_ns)
        return structs.replace(doubted, fingerprint=_fingerprint(status), quiet=quiet)
    jobs, refused = _jobs(data)
    problem = f"{path}: {refused[0]}; {len(refused)} such lines left out" if refused else ""
    if refused and not jobs:
        jobs = (UNKNOWN,)
    return _CachedFile(MappingFile(jobs, status.st_mtime_ns, problem), _fingerprint(status), quiet)


def _unreadable(before: _CachedFile | None, problem: str, wall: int) -> _CachedFile:
    """The GPU is held, by its previous jobs or else by UNKNOWN."""
    if before is None or not before.content.jobs:
        return _CachedFile(MappingFile((UNKNOWN,), wall, problem), (), quiet=False)
    return _CachedFile(structs.replace(before.content, problem=problem), (), quiet=False)


def job_of_line(line: str) -> str:
    """Return the job id of a line of a file; empty if it has none."""
    columns = line.split()
    valid = 0 < len(columns) <= _MOST_COLUMNS and _JOB.fullmatch(columns[0])
    return columns[0] if valid else ""


def _jobs(data: bytes) -> tuple[tuple[str, ...], list[str]]:
    """Return the distinct job ids and why lines were rejected. Empty lines are ignored."""
    jobs: dict[str, None] = {}
    refused: list[str] = []
    for line in data.decode(errors="replace").split("\n"):
        job = job_of_line(line)
        if not line.strip():
            continue
        if not job:
            refused.append(f"{line.strip()[:40]!r} is no job id")
        elif len(jobs) < JOBS_PER_GPU:
            jobs[job] = None
        elif job not in jobs:
            refused.append(f"more than {JOBS_PER_GPU} jobs")
    return tuple(jobs), refused
