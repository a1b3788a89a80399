"""Runs code without the rights that root has, as an ordinary user of a node has none to the daemon's folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def hidden(folder: Path) -> Iterator[None]:
    """Hide what is in the folder from this process while the block runs, whoever runs the tests."""
    mode, groups, root = folder.stat().st_mode, os.getgroups(), os.geteuid() == 0
    folder.chmod(0)
    if root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, 0)
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups(groups)
        folder.chmod(mode)
