"""Builds trees of other Debian releases beside the machine's own, for tests only: each with another Slurm.

`python -m tests.slurm.chroot`, as root, builds those of RELEASES that are missing, with mmdebstrap, from the Debian
mirror of this machine's apt. Mounts nothing there: see `inside`. `.built` lists the packages of a complete one.
`tests.pythons` builds another, for its Python.
"""

import shutil
import subprocess
import sys
from pathlib import Path

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_DEBIAN_13 = "trixie"
RELEASES = {"24.11": _DEBIAN_13, "26.05": "unstable"}
"""The release of Debian that has this version of Slurm. The machine's own is 22.05, of Debian 12."""
_PACKAGES = "slurmctld,slurmd,slurm-client,munge,slurm-wlm-basic-plugins,slurmdbd,slurmrestd,mariadb-server-core"
_SECONDS = 3600.0
"""Half a minute is usual; an emulated processor takes twenty times as long."""


class ChrootError(Exception):
    """The tree cannot be built; the message has the reason and how to fix it."""


def folder_of(version: str) -> Path:
    """Return the folder of the tree with this version of Slurm."""
    return _CACHE / f"slurm-{version.partition('.')[0]}"


def built(version: str) -> Path | None:
    """Return the tree with this version of Slurm, or None if `make slurm-trees` could not download the packages."""
    folder, mark = folder_of(version), folder_of(version) / ".built"
    return folder if mark.is_file() and mark.read_text(encoding="utf-8") == _PACKAGES else None


def missing(version: str) -> str:
    """Return the reason for skipping a test without the tree."""
    return f"needs Slurm {version}: `make slurm-trees` has not made it, for Debian's packages could not be had"


def build(
    folder: Path, *, release: str = _DEBIAN_13, packages: str = _PACKAGES, architecture: str = "", version: str = ""
) -> None:
    """Build it with these packages, completely or not at all; `version` is the Slurm it must have. Raises ChrootError.

    `architecture`: Debian's name, if it is not the machine's own; an emulator must be registered for it.

    apt's own settings hold here too: Debian unstable's lists expire after a week, and a mirror may be older.
    """
    if shutil.which("mmdebstrap") is None:
        raise ChrootError("mmdebstrap is not installed: apt-get install mmdebstrap")
    draft = folder.with_name(f"{folder.name}.draft")
    for old in (draft, folder):
        if old.exists():
            shutil.rmtree(old)
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", f"--aptopt={_expiry()}"]
    words += [f"--architectures={architecture}"] if architecture else []
    done = subprocess.run(
        [*words, release, f"{draft}", mirror()], stderr=subprocess.PIPE, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        shutil.rmtree(draft, ignore_errors=True)
        raise ChrootError(f"mmdebstrap: exit {done.returncode}: {done.stderr.strip()[-600:]}")
    if version:
        _check(draft, version)
    (draft / "etc/hosts").touch()
    (draft / ".built").write_text(packages, encoding="utf-8")
    draft.rename(folder)


def _check(tree: Path, version: str) -> None:
    found = _output("chroot", f"{tree}", "dpkg-query", "--showformat=${Version}", "--show", "slurmctld")
    if not found.startswith(version):
        shutil.rmtree(tree)
        raise ChrootError(f"Debian {RELEASES[version]} has Slurm {found} now: change RELEASES in tests/slurm/chroot.py")


def _expiry() -> str:
    """Return this machine's setting for lists that have expired; apt checks their signature in any case."""
    said = _output("apt-config", "shell", "CHECK", "Acquire::Check-Valid-Until")
    return f'Acquire::Check-Valid-Until "{"false" if "false" in said else "true"}"'


def mirror() -> str:
    """Return the Debian mirror of this machine's apt. Raises ChrootError."""
    said = _output("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages")
    found = (line.partition(" ")[2] for line in said.splitlines() if line.startswith("Debian "))
    address = next(found, "")
    if not address:
        raise ChrootError("apt-get indextargets names no Debian mirror: run apt-get update")
    return address


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except OSError as err:
        raise ChrootError(f"{words[0]}: {err}: this needs Debian") from err


def main() -> int:
    """Return 0 when all trees are there; 1, with the reasons on standard error, if one cannot be built."""
    failed = False
    for version, release in RELEASES.items():
        try:
            if built(version) is None:
                build(folder_of(version), release=release, version=version)
        except (ChrootError, OSError, subprocess.TimeoutExpired) as err:
            sys.stderr.write(f"Slurm {version} in {folder_of(version)}: {err}\n")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
