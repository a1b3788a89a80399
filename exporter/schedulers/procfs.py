"""Reads /proc to find the job, and the rank in it, of a process.

Each process is read once and cached while a GPU lists it. Each scheduler maps a `ProcessInfo` to a job. Of an
environment only variables set by schedulers and launchers are kept. Pids are the driver's, in the host's pid
namespace: `proc` must be the host's /proc, or no process is matched to a job.
"""

import pwd
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct

from exporter.core.model import Reading
from exporter.files import readable_part
from exporter.formatting import escape_surrogates
from exporter.procfs import read_bytes, read_environ, start_ticks
from exporter.schedulers.base import Member

T = TypeVar("T")
_TEXT_BYTES = 64 * 1024
"""Bytes read of any other file of a process."""
_MOST_CACHED = 4096
"""Processes kept in the cache though no GPU lists them."""
_NAMELESS_SECONDS = 60.0
_MOST_NAMELESS_SECONDS = 3600.0
_COMMAND_CHARS = 4096
_RANK_DIGITS = 9
_RANK_VARIABLES = (
    # The innermost launcher's variable first: all ranks inherit the outer ones alike. torchrun's workers keep the
    # SLURM_PROCID of the task that started them, and mpirun's keep that of the batch script or of its own daemon.
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_KEPT_VARIABLES = re.compile(
    rb"(?:LOCAL_|GROUP_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|JOB_COMPLETION_INDEX|CUDA_VISIBLE_DEVICES"
    rb"|(?:OMPI|MV2|JSM|PMIX?|PBS|LSB)_\w+|SLURMD?_(?!JWT)\w+"
)
"""Environment variables to keep; SLURM_JWT is a credential."""

_UID = re.compile(r"^Uid:\s+(\d{1,10})\s", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d{1,4})\s*$", re.MULTILINE)
_GPU_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)

SLUID = r"s[0-9A-HJKMNP-TV-Z]{13}"
"""Slurm's own name of a job since 25.11: `s` and 13 characters of Crockford's base 32."""
_SLURM_JOB = re.compile(
    r"^\d+:[^:\n]*:(?:/\.\.)*/(?:(?:[^/\n]+\.slice/)+[^/\n]*slurmstepd\.scope|slurm[^/\n]*/uid_\d+)"
    rf"/(?:job_(\d{{1,10}})|({SLUID}))(?=/|$)",
    re.MULTILINE,
)


def slurm_jobs(cgroup: str) -> list[str]:
    """Return the ids or SLUIDs of the Slurm jobs whose own groups a text of /proc/PID/cgroup names.

    That is v2 `system.slice/[NODE_]slurmstepd.scope/job_J` (from 26.05 on the SLUID, unless cgroup.conf sets
    CgroupJobIdPaths, and the slice that CgroupSlice names) or v1 `slurm[_NODE]/uid_U/job_J`, from the top of the tree:
    slurmstepd made those as root. Users can name groups below their own as they like, which all are below a service or
    scope: systemd delegates no slice (systemd.resource-control(5), Delegate=).
    """
    return [job or sluid for job, sluid in _SLURM_JOB.findall(cgroup)]


class ProcessInfo(Struct, frozen=True):
    """What /proc shows of one process."""

    cgroup: str
    """Text of /proc/PID/cgroup: `hierarchy:controllers:path` lines (cgroups(7))."""
    environ: Mapping[str, str]
    """Kept variables, as at the program's start; empty when unreadable."""
    command: str
    """Command line, arguments separated by spaces; empty when unreadable."""
    uid: int | None = None
    """Real uid of the process."""


class ProcessCache(Generic[T]):
    """Caches one value per process. A reused pid is detected by its start time.

    `refresh` forgets all other processes; `lookup` keeps the most recent _MOST_CACHED.
    """

    def __init__(self, proc: str | Path, read: Callable[[Path, int], T]) -> None:
        """`read` gets a process's directory and start in clock ticks since boot; may raise OSError, ValueError."""
        self._proc, self._read_new = Path(proc), read
        self._cached: dict[int, tuple[int, T]] = {}

    def refresh(self, pids: Iterable[int]) -> dict[int, T]:
        """Return the values of these processes and forget all others.

        A process that has just ended keeps its value; one that /proc does not show is left out.
        """
        found = ((pid, self._read(pid, self._cached.get(pid))) for pid in set(pids))
        self._cached = {pid: known for pid, known in found if known is not None}
        return {pid: what for pid, (_, what) in self._cached.items()}

    def lookup(self, pids: Iterable[int]) -> dict[int, T]:
        """Return the values of these processes; of the others the most recently requested stay cached."""
        requested = dict.fromkeys(pids)
        found = {pid: known for pid in requested if (known := self._read(pid, self._cached.pop(pid, None))) is not None}
        self._cached |= found
        for pid in list(islice(self._cached, max(0, len(self._cached) - _MOST_CACHED))):
            del self._cached[pid]
        return {pid: what for pid, (_, what) in found.items()}

    def _read(self, pid: int, known: tuple[int, T] | None) -> tuple[int, T] | None:
        folder = self._proc / str(pid)
        ticks = start_ticks(folder)
        if ticks is None or (known is not None and known[0] == ticks):
            return known
        try:
            return ticks, self._read_new(folder, ticks)
        except (OSError, ValueError, IndexError):
            return None


class JobMembers:
    """Finds the jobs of processes; `job_of` returns a process's job id, or "" for a process of no known job."""

    def __init__(
        self,
        job_of: Callable[[ProcessInfo], str],
        *,
        proc: str | Path = "/proc",
        proven: Callable[[ProcessInfo], str] | None = None,
    ) -> None:
        """`proven` replaces `job_of` for processes that no GPU lists; it must not trust what a user can write."""
        self._job_of, self._proven = job_of, proven or job_of
        self._on_gpus, self._others = ProcessCache(proc, read_process), ProcessCache(proc, read_process)
        self.on_gpus: Mapping[int, ProcessInfo] = {}
        """The processes of the last readings, by pid."""

    def of_readings(self, readings: Sequence[Reading]) -> dict[int, Member]:
        """Return, by pid, the members among the readings' processes.

        `job_of` is called each time, because a job may become known later; /proc is read once per process.
        """
        self.on_gpus = self._on_gpus.refresh(p.pid for reading in readings for p in reading.processes or ())
        jobs = ((pid, self._job_of(process), process) for pid, process in self.on_gpus.items())
        return {pid: Member(job, rank_of(process.environ)) for pid, job, process in jobs if job}

    def of_pids(self, pids: Iterable[int]) -> dict[int, Member]:
        """Return the members among these pids, on a GPU or not, as far as proven."""
        jobs = ((pid, self._proven(process), process) for pid, process in self._others.lookup(pids).items())
        return {pid: Member(job, rank_of(process.environ)) for pid, job, process in jobs if job}


def read_process(folder: Path, _ticks: int = 0) -> ProcessInfo:
    """Read the process with this /proc directory. Raises OSError if it does not exist."""
    cgroup, uid = read_text(folder / "cgroup"), _uid(read_text(folder / "status"))
    return ProcessInfo(cgroup, read_environ(folder, _KEPT_VARIABLES), _command(folder), uid)


def rank_of(environ: Mapping[str, str]) -> str:
    """Return the global rank in the job, as digits; empty when unknown.

    Reads the variables of torchrun, Open MPI, MVAPICH, jsrun, PMIx, PMI, srun and Kubernetes' indexed Jobs.
    """
    values = (environ.get(name, "") for name in _RANK_VARIABLES)
    return next((r for r in values if r.isascii() and r.isdigit() and len(r) <= _RANK_DIGITS), "")


def user_name(uid: int) -> str:
    """Return the user's name, or the uid if it has none. May query a name service: see `UserNames`."""
    try:
        return escape_surrogates(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


class UserNames:
    """Returns users' names and remembers them, because the name service may be remote, and the caller must not wait.

    That a user has no name is believed for a minute only, because at boot the service may not be up yet; then for twice
    as long each time, up to an hour, because of some users it never knows one.
    """

    def __init__(
        self, user_of: Callable[[int], str] = user_name, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`user_of` returns a uid's name, or the uid if it has none."""
        self._user_of, self._clock = user_of, clock
        self._names: dict[int, str] = {}
        self._nameless: dict[int, tuple[float, float]] = {}
        """For how many seconds it is believed that a user has no name, and until when."""

    def __call__(self, uid: int) -> str:
        """Return the user's name, or the uid if it has none."""
        name = self._names.get(uid)
        seconds, until = self._nameless.get(uid, (_NAMELESS_SECONDS / 2, 0.0))
        if name is None and self._clock() >= until:
            name = self._user_of(uid)
            if name == str(uid):
                seconds = min(2 * seconds, _MOST_NAMELESS_SECONDS)
                self._nameless[uid] = seconds, self._clock() + seconds
            else:
                self._names[uid] = name
        return str(uid) if name is None else name


def _uid(status: str) -> int | None:
    """Return the real uid: the first number of the `Uid:` line."""
    found = _UID.search(status)
    return int(found[1]) if found else None


def _command(folder: Path) -> str:
    """Return the command line with spaces for NULs; empty when unreadable."""
    try:
        return read_text(folder / "cmdline").replace("\0", " ").strip()[:_COMMAND_CHARS]
    except OSError:
        return ""


def read_text(path: Path) -> str:
    """Return the first _TEXT_BYTES of a /proc file. Raises OSError."""
    return read_bytes(path, _TEXT_BYTES).decode(errors="replace")


def read_uuids(proc: Path) -> dict[int, str]:
    """Return the GPUs' UUIDs by minor number, as in the driver's /proc; empty in a container without the host's."""
    return dict(_numbered_uuids(readable_part(proc.glob("driver/nvidia/gpus/*/information"))))


def _numbered_uuids(paths: Iterable[Path]) -> Iterator[tuple[int, str]]:
    for path in sorted(paths):
        try:
            text = read_text(path)
        except OSError:
            continue
        minor, uuid = _MINOR.search(text), _GPU_UUID.search(text)
        if minor and uuid:
            yield int(minor[1]), uuid[1]
