"""Which job a process on a GPU belongs to, and as which rank.

Owns what /proc says of a process, asked once and kept while a GPU lists it. Refuses to know what a job is: each
scheduler says that of a process's `Facts`. Of an environment only what schedulers and launchers put there is kept.

Pids are the driver's, in the host's pid namespace: `proc` must be the host's, or no process is anybody's member.
"""

import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct

from exporter.core.model import Reading
from exporter.schedulers import Member
from exporter.wording import writable

T = TypeVar("T")
_ENVIRON_BYTES = 256 * 1024
"""Read of one environment; the kernel allows megabytes."""
_TEXT_BYTES = 64 * 1024
"""Read of any other file of a process."""
_VALUE_CHARS = 4096
_RECALLED = 4096
"""Processes that are kept though no GPU lists them."""
_COMMAND_CHARS = 4096
_RANK_DIGITS = 9
_RANKS = (
    # The innermost launcher's word first: what is outside it is inherited by all ranks alike. torchrun's workers keep
    # the SLURM_PROCID of the task that started them, and mpirun's keep that of the batch script or of its own daemon.
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_KEPT = re.compile(
    rb"(?:LOCAL_|GROUP_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|JOB_COMPLETION_INDEX|CUDA_VISIBLE_DEVICES"
    rb"|(?:OMPI|MV2|JSM|PMIX?|PBS|LSB)_\w+|SLURMD?_(?!JWT)\w+"
)
"""Names of an environment worth keeping; SLURM_JWT is somebody's password."""

_UID = re.compile(r"^Uid:\s+(\d{1,10})\s", re.MULTILINE)


class Facts(Struct, frozen=True):
    """What /proc says of one process."""

    cgroup: str
    """Text of /proc/PID/cgroup: `hierarchy:controllers:path` lines (cgroups(7))."""
    environ: Mapping[str, str]
    """As at the program's start, what launchers and schedulers set; empty when it may not be read."""
    command: str
    """Its arguments with a space between; empty when they may not be read."""
    uid: int | None = None
    """Of the user who runs it (the real one)."""


class Seen(Generic[T]):
    """What was learnt of each process, asked for once; a pid used again is somebody else, told by its start.

    Either by `look`, which forgets whom it is not asked about, or by `recall`, which keeps as many as it has room for.
    """

    def __init__(self, proc: str | Path, ask: Callable[[Path, int], T]) -> None:
        """`ask` gets the process's folder and its start in clock ticks since boot; it may raise OSError, ValueError."""
        self._proc, self._ask = Path(proc), ask
        self._known: dict[int, tuple[int, T]] = {}

    def look(self, pids: Iterable[int]) -> dict[int, T]:
        """What is known of these, of one that has just ended what was; the others are forgotten.

        Without those that /proc does not show.
        """
        found = ((pid, self._look(pid, self._known.get(pid))) for pid in set(pids))
        self._known = {pid: known for pid, known in found if known is not None}
        return {pid: what for pid, (_, what) in self._known.items()}

    def recall(self, pids: Iterable[int]) -> dict[int, T]:
        """What is known of these; of the others those that were asked about last stay known."""
        asked = dict.fromkeys(pids)
        found = {pid: known for pid in asked if (known := self._look(pid, self._known.pop(pid, None))) is not None}
        self._known |= found
        for pid in list(islice(self._known, max(0, len(self._known) - _RECALLED))):
            del self._known[pid]
        return {pid: what for pid, (_, what) in found.items()}

    def _look(self, pid: int, known: tuple[int, T] | None) -> tuple[int, T] | None:
        folder = self._proc / str(pid)
        try:
            ticks = _ticks(text(folder / "stat"))
        except (OSError, ValueError, IndexError):
            return known
        if known is not None and known[0] == ticks:
            return known
        try:
            return ticks, self._ask(folder, ticks)
        except (OSError, ValueError, IndexError):
            return None


class Members:
    """The jobs of the processes that GPUs list; `job_of` names a process's job, or gives "" for none of ours."""

    def __init__(
        self,
        job_of: Callable[[Facts], str],
        *,
        proc: str | Path = "/proc",
        proven: Callable[[Facts], str] | None = None,
    ) -> None:
        """`proven` is `job_of` where nobody vouches for the process, as a GPU's list does; None: the same."""
        self._job_of, self._proven = job_of, proven or job_of
        self._seen, self._others = Seen(proc, facts), Seen(proc, facts)

    def look(self, readings: Sequence[Reading]) -> dict[int, Member]:
        """By pid, those of the readings' processes that are in a job.

        `job_of` is asked each time, for it may have learnt of a job since; /proc only once for each process.
        """
        known = self._seen.look(p.pid for reading in readings for p in reading.processes or ())
        jobs = ((pid, self._job_of(said), said) for pid, said in known.items())
        return {pid: Member(job, rank(said.environ)) for pid, job, said in jobs if job}

    def of(self, pids: Iterable[int]) -> dict[int, Member]:
        """Of these processes, on a GPU or not, those that are proven to be in a job."""
        jobs = ((pid, self._proven(said), said) for pid, said in self._others.recall(pids).items())
        return {pid: Member(job, rank(said.environ)) for pid, job, said in jobs if job}


def facts(folder: Path, _ticks: int = 0) -> Facts:
    """Ask /proc of the process with this folder; raises OSError when it is not there."""
    cgroup, uid = text(folder / "cgroup"), _uid(text(folder / "status"))
    return Facts(cgroup, _environ(folder), _command(folder), uid)


def rank(environ: Mapping[str, str]) -> str:
    """Global rank in the job, digits; empty: not known.

    The names are those of torchrun, Open MPI, MVAPICH, jsrun, PMIx, PMI, srun and Kubernetes' indexed Jobs.
    """
    said = (environ.get(name, "") for name in _RANKS)
    return next((r for r in said if r.isascii() and r.isdigit() and len(r) <= _RANK_DIGITS), "")


def user_name(uid: int) -> str:
    """The user's name, or the number where it has none. May ask a name service: keep the answer."""
    try:
        return writable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def _uid(status: str) -> int | None:
    """Real uid: the first number of the `Uid:` line."""
    found = _UID.search(status)
    return int(found[1]) if found else None


def _command(folder: Path) -> str:
    """The command line with a space for each NUL; empty when it may not be read."""
    try:
        return text(folder / "cmdline").replace("\0", " ").strip()[:_COMMAND_CHARS]
    except OSError:
        return ""


def text(path: Path) -> str:
    """The beginning of a file of /proc; raises OSError."""
    return _bytes(path, _TEXT_BYTES).decode(errors="replace")


def _environ(folder: Path) -> dict[str, str]:
    """Of a name that is there twice the first counts, as for getenv(3); an entry cut by the limit is dropped."""
    try:
        whole = _bytes(folder / "environ", _ENVIRON_BYTES)
    except OSError:
        return {}
    entries = whole.split(b"\0")
    kept: dict[str, str] = {}
    for name, equals, value in (entry.partition(b"=") for entry in entries[:-1]):
        if equals and _KEPT.fullmatch(name):
            kept.setdefault(name.decode(errors="replace"), value[:_VALUE_CHARS].decode(errors="replace"))
    return kept


def _bytes(path: Path, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third cheaper than a file object: it adds up
    try:
        found = b""
        while len(found) < limit and (more := os.read(descriptor, limit - len(found))):
            found += more
        return found
    finally:
        os.close(descriptor)


def _ticks(stat: str) -> int:
    """Field 22 of /proc/PID/stat (proc(5)); the name in field 2 may hold spaces and brackets."""
    return int(stat.rpartition(")")[2].split()[19])
