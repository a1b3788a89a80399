"""Makes the demo's temporary folder, and removes those that demos left behind when they were killed.

A running demo holds a lock on a file in its folder; the kernel releases it with the process, however that ends.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "gpu-efficiency-demo-"
_LOCK = "in-use"


@contextmanager
def scratch_folder() -> Iterator[str]:
    """Make a folder that ends with the process; yield "" if that is impossible, as in a read-only container."""
    try:
        made = TemporaryDirectory(prefix=_PREFIX)
    except OSError:
        yield ""
        return
    with made as folder, _locked(Path(folder, _LOCK)):
        _remove_abandoned()
        yield folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Named only once it is locked: between the two another demo could lock it, and remove the folder as abandoned.
    unlocked = path.with_name("starting")
    handle = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        unlocked.rename(path)
        yield
    finally:
        os.close(handle)


def _remove_abandoned() -> None:
    """Remove this user's folders whose lock nobody holds; a folder without a lock may be a demo that is starting."""
    with suppress(OSError):
        for entry in os.scandir(gettempdir()):
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(folder: os.DirEntry[str]) -> None:
    """Raises OSError if the lock is held or missing."""
    if folder.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    handle = os.open(Path(folder.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder.path)
    finally:
        os.close(handle)
