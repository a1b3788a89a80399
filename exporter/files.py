"""Writes small files atomically: a reader never sees half of one.

`write_atomically` passes OSError on to the caller, who knows what the file is for; `write_output` explains it.
"""

import os
import stat
import tempfile
from pathlib import Path


class OutputError(Exception):
    """A file was not written; the message says why and what to do."""


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` (mode 0644) in the place of whatever `path` was; folders above it are made. Raises OSError."""
    _make_folder(path.parent)
    _write_and_rename(path, content, 0o644)  # mkstemp's 0600 hides it from a daemon that runs as somebody else


def write_output(path: Path, content: bytes) -> None:
    """Replace `path` with `content`, with the rights that the umask leaves, if it is a plain file or absent.

    A link, a device or a folder is refused: in a directory that others may write to (a job's own, /tmp) it may be
    theirs, and we may be root. Raises OutputError.
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
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())  # or a power cut leaves the new name on an empty file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    """With mode 0755 whatever the umask, for the same reason."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in made:
        place.chmod(0o755)
