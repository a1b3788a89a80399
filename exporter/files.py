"""Writes small files atomically, so that a reader never sees a partial file, and looks for files without failing.

`write_atomically` raises OSError for the caller to explain; `write_output` explains it itself.
"""

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


class OutputError(Exception):
    """A file was not written; the message has the reason and the remedy."""


def may_exist(path: Path) -> bool:
    """Return whether the path exists, or is hidden by a folder that this user may not search.

    Opening a hidden one then gives the reason; `Path.exists` raises it, or, since Python 3.14, denies that it exists.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def readable_part(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths of a listing or a glob, up to a folder that has just gone or may not be read."""
    with suppress(OSError):
        yield from paths


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
