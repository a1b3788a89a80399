"""Opens files, pipes and sockets of a job's process in its own file system, by no link, and only if its user owns them.

Paths come from the process's environment, so they may lead anywhere: each folder is opened on its own with O_NOFOLLOW,
starting at /proc/PID/root, which is the root of its container.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.nccl.connection import NoAnswerError
from exporter.nccl.processes import LocalProcess
from exporter.procfs import user_id

_LONGEST_PATH = 4096
_POLL_SECONDS = 0.1
_O_PATH = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC
"""Without O_PATH this module can only be imported: systems other than Linux run the demo."""


@contextmanager
def open_owned(
    path: str, process: LocalProcess, proc: Path, *, kind: Callable[[int], bool], write: bool = False
) -> Iterator[int]:
    """Open `path` as the process sees it; `kind` checks st_mode. Yields a descriptor that cannot be read (O_PATH).

    `write`: yields one that can be written to, without waiting for a reader. Raises NoAnswerError.
    """
    descriptor = -1
    try:
        folder, name = _open_folder(path, process, proc)
        try:
            descriptor = os.open(name, _O_PATH, dir_fd=folder)
        finally:
            os.close(folder)
        _check(descriptor, process, proc, kind=kind)
        if write:
            writable = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(descriptor)
            descriptor = writable
    except (OSError, ValueError) as err:
        if descriptor >= 0:
            os.close(descriptor)
        raise NoAnswerError("recorder_file", f"{path} cannot be opened: {err}") from err
    except NoAnswerError:
        os.close(descriptor)
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: str, process: LocalProcess, proc: Path) -> tuple[int, str]:
    """Open the folder of `path` step by step; return its descriptor and the last part of the path."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or len(path) > _LONGEST_PATH or ".." in parts or not parts:
        raise ValueError("not a plain absolute path")
    # /proc/PID/root itself is a link of the kernel's, to the process's own root.
    folder = os.open(proc / str(process.pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts[:-1]:
        try:
            inner = os.open(part, _O_PATH | os.O_DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder, parts[-1]


def _check(descriptor: int, process: LocalProcess, proc: Path, *, kind: Callable[[int], bool]) -> None:
    found = os.fstat(descriptor)
    if not kind(found.st_mode) or found.st_uid != user_id(proc / str(process.pid)):
        raise NoAnswerError("recorder_file", "it is of another kind, or of another user than the process")


def open_written_after(
    since: int, path: str, process: LocalProcess, proc: Path, *, seconds: float, limit: int
) -> bytes:
    """Return the content of a regular file once it has been written after `since` (Unix ns) and no longer grows.

    Waits up to `seconds`. Raises NoAnswerError.
    """
    deadline, last = time.monotonic() + seconds, (-1, -1)
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        try:
            with open_owned(path, process, proc, kind=stat.S_ISREG) as descriptor:
                found = os.fstat(descriptor)
                written = found.st_mtime_ns, found.st_size
                if found.st_mtime_ns >= since and found.st_size and written == last:
                    return _read(descriptor, limit)
                last = written
        except NoAnswerError:
            if not _may_appear(path, process, proc):
                raise
    raise NoAnswerError("recorder_timeout", f"{path} was not written in time")


def _may_appear(path: str, process: LocalProcess, proc: Path) -> bool:
    """Whether nothing is at `path` yet."""
    try:
        folder, name = _open_folder(path, process, proc)
    except (OSError, ValueError):
        return False
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(folder)
    return False


def _read(descriptor: int, limit: int) -> bytes:
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123  a descriptor has no path of its own
        data = file.read(limit + 1)
    if len(data) > limit:
        raise NoAnswerError("recorder_too_large", f"a dump of more than {limit} bytes")
    return data
