"""A receipt's place on disk: written whole or not at all. Owns that; refuses to write through somebody else's link."""

import os
import stat
import tempfile
from pathlib import Path


class PlaceError(Exception):
    """It was not written; the message says why and what to do."""


def place(path: Path, content: bytes) -> None:
    """Put `content` in the place of what `path` is, if that is a plain file or nothing.

    A link, a device or a folder is not followed: in a folder that others may write to (a job's own, /tmp) it may be
    theirs, and we may be root. A new file is made beside it, and takes its name. Raises PlaceError.
    """
    folder = path.parent
    try:
        known = os.lstat(path) if os.path.lexists(path) else None
        if known is not None and not stat.S_ISREG(known.st_mode):
            raise PlaceError(f"{path}: is no plain file and is left as it is: name another")
        _write(folder, path, content)
    except OSError as err:
        raise PlaceError(f"{path}: cannot be written: {err.strerror or err}") from err


def _write(folder: Path, path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
