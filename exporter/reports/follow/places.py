"""Where the logs of the jobs here are, and which of them may be opened.

Owns what is safe to open. Refuses everything but regular files, and by a path those of others than the job's user:
this daemon may be root, and whoever can write a folder could lead it anywhere.

- The standard output of a process is opened through /proc/PID/fd/1 (proc(5)), whatever mount namespace it is in, and
  only if the process has it open for writing. Where its own is a pipe or a terminal, that of the nearest ancestor
  which is in the same control group and is the same user's: torchrun, srun's shell, a job script.
- A path's file must be owned by a user (not root) who runs the job: what he leads us to he could read himself. Or by
  root or this daemon's user, as container runtimes write them, if nobody else could have put it there: no symbolic
  link on the way, no second name, each folder theirs and writable by them alone (or sticky).
- A file is first opened as a mere name (O_PATH, open(2)), looked at, and only then for reading, so that no device is
  woken and no pipe waited for.
"""

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.config import Follow
from exporter.workloads import Guest

MOST_MATCHES = 64
"""Files of one row and job."""
_JOB = "{job_id}"
_GENERATIONS = 16
_TEXT_BYTES = 64 * 1024
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RefusedError(Exception):
    """The file is not followed; the first word is the count's name, the rest is for people."""


class Place(Struct, frozen=True):
    """A log that may be followed."""

    path: str
    job_id: str
    guest: Guest
    """Who speaks in it: the process of the lowest rank."""
    framework: str
    users: frozenset[int] | None = None
    """Who may own it; None: a process of the job has it open for writing."""


def places(rows: Sequence[Follow], guests: Sequence[Guest], *, proc: str, search: bool) -> Iterator[Place]:
    """Logs of the guests' jobs by the rows; with `search` also those that are looked for by a path."""
    for row in rows:
        fitting = sorted((g for g in guests if g.workload_class == row.workload_class), key=_order)
        if not row.path:
            yield from _outputs(row, fitting, Path(proc))
        elif search:
            yield from _searched(row, fitting, Path(proc))


def opened(place: Place) -> int:
    """A file descriptor to read it; raises RefusedError, and OSError where it cannot be opened."""
    name = os.open(place.path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(name)
        if not stat.S_ISREG(found.st_mode):
            raise RefusedError(f"log_not_a_file {place.path} is no regular file")
        if place.users is not None:
            _check_owner(place.path, found, place.users)
        return os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(name)


def _order(guest: Guest) -> tuple[int, int]:
    """Rank 0 first, who has none last."""
    return (int(guest.rank) if guest.rank.isdecimal() else 1 << 62, guest.pid)


def _outputs(row: Follow, guests: Iterable[Guest], proc: Path) -> Iterator[Place]:
    for guest in guests:
        path = next((path for pid in _line_of(guest.pid, proc) if (path := _output(proc / str(pid)))), None)
        if path:
            yield Place(path, guest.job_id, guest, row.framework)


def _output(folder: Path) -> str | None:
    """Its standard output, if that is a regular file which it may write to."""
    path = f"{folder}/fd/1"
    try:
        writes = os.lstat(path).st_mode & stat.S_IWUSR  # the link's mode is how it was opened: proc(5)
        return path if writes and stat.S_ISREG(Path(path).stat().st_mode) else None
    except PermissionError:
        return path  # opening it will say why
    except OSError:
        return None


def _line_of(pid: int, proc: Path) -> Iterator[int]:
    """The process and its ancestors as far as they are surely in the same job."""
    family = _family(proc / str(pid))
    for _ in range(_GENERATIONS):
        yield pid
        pid = _parent(proc / str(pid))
        if pid <= 1 or family is None or _family(proc / str(pid)) != family:
            return


def _family(folder: Path) -> tuple[int, bytes] | None:
    """User and control groups; None where they may not be known."""
    try:
        with (folder / "cgroup").open("rb") as file:
            return folder.stat().st_uid, file.read(_TEXT_BYTES)
    except OSError:
        return None


def _parent(folder: Path) -> int:
    """Fourth field of /proc/PID/stat, behind a name that may hold anything; 0 where it is not known."""
    try:
        return int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _searched(row: Follow, guests: Sequence[Guest], proc: Path) -> Iterator[Place]:
    if _JOB not in row.path:
        return  # it would be anybody's
    for job_id in sorted({guest.job_id for guest in guests}):
        own = [guest for guest in guests if guest.job_id == job_id]
        users = frozenset(uid for guest in own if (uid := _user(proc / str(guest.pid))) is not None)
        for path in _matches(row.path, job_id):
            yield Place(path, job_id, own[0], row.framework, users)


def _matches(pattern: str, job_id: str) -> list[str]:
    """Oldest first. A job's id is text that others may have chosen: it leads nowhere and matches only itself."""
    if not job_id or job_id.startswith("/") or {"..", "."} & set(job_id.split("/")) or "\0" in job_id:
        return []
    found = islice(glob.iglob(pattern.replace(_JOB, glob.escape(job_id))), MOST_MATCHES)  # noqa: PTH207  it is absolute
    return sorted(found, key=_written)


def _written(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _user(folder: Path) -> int | None:
    try:
        return folder.stat().st_uid
    except OSError:
        return None


def _check_owner(path: str, found: os.stat_result, users: frozenset[int]) -> None:
    if found.st_uid != 0 and found.st_uid in users:
        return
    ours = {0, os.geteuid()}
    if found.st_uid not in ours:
        raise RefusedError(f"log_owner {path} belongs to user {found.st_uid}, who does not run the job")
    if found.st_nlink > 1 or not _is_out_of_reach(path, found, ours):
        raise RefusedError(
            f"log_owner {path} belongs to this daemon's user or root, and others could have put it there: each"
            " folder above it must be writable by them alone, no link may lead to it, and it may have no second name"
        )


def _is_out_of_reach(path: str, found: os.stat_result, ours: set[int]) -> bool:
    """Whether nobody else could have chosen what is at `path`."""
    name = os.lstat(path)
    if (name.st_dev, name.st_ino) != (found.st_dev, found.st_ino):
        return False
    folders = [os.lstat(folder) for folder in Path(path).absolute().parents]
    return all(
        stat.S_ISDIR(folder.st_mode)
        and folder.st_uid in ours
        and (not folder.st_mode & _OTHERS_WRITE or folder.st_mode & stat.S_ISVTX)
        for folder in folders
    )
