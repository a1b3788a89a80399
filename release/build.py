"""Builds what a release uploads: source distribution, wheel, chart, bill of materials, checksums. `deb` has one more.

The same source and time give the same bytes: times, owners, modes and order in an archive come from neither the clock
nor the machine. `python -m release` builds twice and compares.
"""

import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = "helm/gpu-efficiency"
SUMS = "SHA256SUMS"
Member = tuple[str, bytes, bool]
"""Path in the archive, content, whether it is executable."""


class ReleaseError(Exception):
    """A release cannot be built, or what was built does not work; the message has the reason."""


def run(*words: str | Path, epoch: int = 0) -> str:
    """Run a program with SOURCE_DATE_EPOCH set and return its output. Raises ReleaseError with what it printed."""
    command = [f"{word}" for word in words]
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    env["SOURCE_DATE_EPOCH"] = f"{epoch}"
    # Modes of files that setuptools makes are part of a wheel.
    done = subprocess.run(command, env=env, umask=0o022, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def export(folder: Path) -> int:
    """Write the files of the last commit there; return the commit's time in seconds since 1970."""
    git = ("git", "-C", f"{ROOT}")
    packed = subprocess.run([*git, "archive", "--format=tar", "HEAD"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        unpack(archive, folder)
    return int(run(*git, "log", "-1", "--format=%ct"))


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract an archive of ours, with the filter for data where Python has it: from 3.11.4 on, not in Debian 12."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)  # noqa: S202  of our own making


def distributions(source: Path, into: Path, *, epoch: int) -> None:
    """Build the source distribution and the wheel with the tools of this environment.

    `source` is a copy for this build alone: setuptools writes into it, and its modes are set to git's. `epoch` is the
    time of every file, in seconds since 1970; a wheel cannot have one before 1980.
    """
    for path in source.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", into, source, epoch=epoch)
    (sdist,) = into.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        members = [(member.name, file.read(), bool(member.mode & 0o100)) for member, file in files if file]
    write_archive(sdist, members, epoch=epoch)


def chart(source: Path, into: Path, *, epoch: int) -> None:
    """Package the chart as `helm package` does, links replaced by what they lead to."""
    folder = source / CHART
    described = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    name = described["name"]
    members = [
        (f"{name}/{path.relative_to(folder)}", path.read_bytes(), False) for path in folder.rglob("*") if path.is_file()
    ]
    write_archive(into / f"{name}-{described['version']}.tgz", members, epoch=epoch)


def bill_of_materials(python: Path, source: Path, into: Path, *, epoch: int) -> None:
    """List the packages of that interpreter's environment as CycloneDX, with the tool and flags of the Dockerfile."""
    tool = Path(sys.executable).with_name("cyclonedx-py")
    run(
        tool, "environment", "--output-reproducible", "--validate", "--pyproject", source / "pyproject.toml",
        "--output-file", into / "sbom.cdx.json", python, epoch=epoch,
    )  # fmt: skip


def write_archive(file: Path, members: Iterable[Member], *, epoch: int) -> None:
    """Write a .tar.gz in which only names, contents and the executable bit are the members' own."""
    with (
        file.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content, executable in sorted(members):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), epoch, 0o755 if executable else 0o644
            archive.addfile(info, BytesIO(content))


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file by its name, the file of checksums excepted."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def must_equal(first: Path, second: Path) -> None:
    """Raise ReleaseError, naming the files, if two builds of one commit differ."""
    differ = sorted({name for name, _ in sums(first).items() ^ sums(second).items()})
    if differ:
        raise ReleaseError(f"two builds of one commit differ: {', '.join(differ)}")


def write_sums(folder: Path) -> None:
    """Write the checksums beside the files, for `sha256sum --check`."""
    lines = [f"{digest}  {name}\n" for name, digest in sums(folder).items()]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")
