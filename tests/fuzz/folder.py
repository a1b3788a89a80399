"""A folder for parsers that read files: in memory where the system has such, so that not the disk is measured."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.trying import Feed

_MEMORY = "/dev/shm"  # noqa: S108  # nosec B108  the folder in it is made by mkdtemp(3)


def in_folder(make: Callable[[Path], Feed]) -> Callable[[], Feed]:
    """A feed that needs files; its folder goes when the feed goes."""

    def made() -> Feed:
        folder = Path(tempfile.mkdtemp(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
        feed = make(folder)
        weakref.finalize(feed, shutil.rmtree, folder, ignore_errors=True)
        return feed

    return made
