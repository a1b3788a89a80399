"""Unpacks archives that tests have made."""

import subprocess
from pathlib import Path


def unpack(archive: Path, into: Path) -> None:
    """Unpack it into a folder, which is made unless it is there.

    By tar(1), because `tarfile` extracts with a filter from Python 3.11.4 on, and warns without one from 3.12 on.
    """
    into.mkdir(parents=True, exist_ok=True)
    words = ["tar", "--extract", "--no-same-owner", f"--file={archive}", f"--directory={into}"]
    subprocess.run(words, check=True)
