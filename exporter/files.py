"""Writes small files atomically: a reader never sees a partial file.

`write_atomically` raises OSError for the caller to explain; `write_output` explains it itself.
"""

import os
import stat
import tempfile
from pathlib import Path


class OutputError(Exception):
    """A file was not written; the message has the reason and the remedy."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file with `content` and mode 0644; creates parent directories. Raises OSError."""
    _make_folder(path.parent)
    _write_and_rename(path, content, 0o644)  # mkstemp's 0600 hides it from a daemon that runs as another user


def write_output(path: Path, content: bytes) -> None:
    """Replace `path` with `content` and the umask's mode, if it is a regular file or absent.

    Refuses links, devices and directories: in a directory that others can write to (a job's own, /tmp) another user
    may have created them, and we may be root. Raises OutputError.
    """
    try:
        existing = os.lstat(path) if os.path.lexists(path) else None
        if existing is not None and not stat.S_ISREG(existing.st_mode):
            raise OutputError(f"{path}: is no plain file and is left as it is: name another")
        umask = os.umask(0)
        os.umask(umask)
        _write_and_rename(path, content, 0o666 & ~umask)
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {err.strerror or err}") from err


def _write_and_rename(path: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            # By descriptor where there is one: in a directory of others the name may lead elsewhere by now.
            os.chmod(file.fileno() if os.chmod in os.supports_fd else name, mode)  # noqa: PTH101  takes descriptors
            os.fsync(file.fileno())  # otherwise the renamed file may be empty after a power failure
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    """Create missing directories with mode 0755 whatever the umask, for the same reason."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in made:
        place.chmod(0o755)
