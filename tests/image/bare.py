"""Stands in for `python:3.11-slim-bookworm` where no registry can be asked: a bare Debian 12 with Debian's Python.

The same release of Debian, the same 3.11, `python` on the path at /usr/local/bin. What differs: there Python is built
from its own sources below /usr/local, has its own pip, and is of a later bugfix release; the root has fewer packages.
Owns making it, once, with mmdebstrap.
"""

import shutil
import subprocess
from pathlib import Path

from tests.image.build import Image
from tests.image.cache import kept
from tests.slurm.chroot import ChrootError, mirror

ENV = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_RELEASE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates"
_NOT_IN_AN_IMAGE = ("dev", "var/cache/apt", "var/lib/apt/lists")


def python(root: Path) -> Image:
    """A copy of the base image in `root`; raises ChrootError."""
    subprocess.run(["cp", "-a", "--reflink=auto", f"{bare() / 'root'}", f"{root}"], check=True)
    return Image(root, env=dict(ENV), command=["python3"])


def bare() -> Path:
    """The folder with the bare root, as `root`; raises ChrootError."""
    return kept("base", [Path(__file__).read_bytes()], _debian)


def _debian(folder: Path) -> None:
    root = folder / "root"
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", _RELEASE, f"{root}", mirror()]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    if done.returncode:
        raise ChrootError(f"mmdebstrap: exit {done.returncode}: {done.stderr.strip()[-600:]}")
    for name in _NOT_IN_AN_IMAGE:
        shutil.rmtree(root / name)
        (root / name).mkdir()
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
