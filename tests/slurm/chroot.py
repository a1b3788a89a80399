"""Builds trees of Debian 13 beside the machine's own, for tests only: one with another Slurm, 24.11.

`python -m tests.slurm.chroot FOLDER`, as root, with mmdebstrap, from the Debian mirror of this machine's apt. Mounts
nothing there: see `inside`. A folder with `.built` in it is complete. `tests.pythons` builds another, for its Python.
"""

import shutil
import subprocess
import sys
from pathlib import Path

BUILT = Path(__file__).resolve().parents[2] / ".cache/slurm-24"
"""The folder of `make slurm-24`."""
MISSING = "needs Slurm 24.11: `make slurm-24` has not made it, for Debian 13's packages could not be had"
"""Reason for skipping a test without it."""
_RELEASE = "trixie"
_PACKAGES = "slurmctld,slurmd,slurm-client,munge,slurm-wlm-basic-plugins"
_SECONDS = 600.0


class ChrootError(Exception):
    """The tree cannot be built; the message has the reason and how to fix it."""


def built(folder: Path = BUILT) -> Path | None:
    """Return the tree, or None if `make slurm-24` could not download the packages."""
    return folder if (folder / ".built").is_file() else None


def build(folder: Path, *, packages: str = _PACKAGES) -> None:
    """Build it with these packages, completely or not at all. Raises ChrootError."""
    if shutil.which("mmdebstrap") is None:
        raise ChrootError("mmdebstrap is not installed: apt-get install mmdebstrap")
    draft = folder.with_name(f"{folder.name}.draft")
    for old in (draft, folder):
        if old.exists():
            shutil.rmtree(old)
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", _RELEASE, f"{draft}", mirror()]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        shutil.rmtree(draft, ignore_errors=True)
        raise ChrootError(f"mmdebstrap: exit {done.returncode}: {done.stderr.strip()[-600:]}")
    (draft / "etc/hosts").touch()
    (draft / ".built").touch()
    draft.rename(folder)


def mirror() -> str:
    """Return the Debian mirror of this machine's apt. Raises ChrootError."""
    words = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except OSError as err:
        raise ChrootError(f"apt-get: {err}: this needs Debian") from err
    found = (line.partition(" ")[2] for line in said.splitlines() if line.startswith("Debian "))
    address = next(found, "")
    if not address:
        raise ChrootError("apt-get indextargets names no Debian mirror: run apt-get update")
    return address


def main(arguments: list[str]) -> int:
    """Return 0 when the tree is there; 1, with the reason on standard error, if it cannot be built."""
    folder = Path(arguments[0]) if arguments else BUILT
    try:
        build(folder)
    except (ChrootError, OSError, subprocess.TimeoutExpired) as err:
        sys.stderr.write(f"Slurm 24.11 in {folder}: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
