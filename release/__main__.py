"""Builds a release of the last commit into dist/: `make dist`.

Twice, from two exports in other folders with other umasks, and compares the digests; then installs and runs each
artefact in an empty environment. What is not committed is not in it.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter import __version__
from release import build, commands, deb, installed
from release.build import ROOT, ReleaseError, run


def builds(work: Path) -> Iterator[Path]:
    """Build twice; yield the folder of artefacts of each build, whose wheel is installed and works."""
    for name, umask in (("first", 0o022), ("second", 0o077)):
        before = os.umask(umask)
        try:
            source, dist = work / name / "source", work / name / "dist"
            dist.mkdir(parents=True)
            epoch = build.export(source)
            build.chart(source, dist, epoch=epoch)
            build.distributions(source, dist, epoch=epoch)
            python = installed.environment(work / name / "installed", source)
            installed.install_wheel(python, dist)
            build.bill_of_materials(python, source, dist, epoch=epoch)
            deb.package(python, source, dist, epoch=epoch)
            build.write_sums(dist)
        finally:
            os.umask(before)
        installed.works(python, __version__)
        print(f"{name} build: the wheel is installed in an empty environment and works")
        yield dist


def runs_with_extras(dist: Path, work: Path) -> None:
    """Run every command of the wheel with each set of extras, in an environment of its own."""
    wheels = work / "wheels"
    installed.fetch(ROOT, wheels)
    for number, extras in enumerate(commands.EXTRAS):
        folder = work / f"extras{number}"
        python = installed.with_extras(folder, extras, wheels=wheels, dist=dist)
        (folder / "ran").mkdir()
        commands.all_run(python, folder / "ran", live="top" in extras)
        print(f"The wheel{f'[{extras}]' if extras else ''} runs every command")


def main() -> int:
    """Return 0 if all was built, twice the same, and works; 1 with the reason on standard error otherwise."""
    if run("git", "-C", ROOT, "status", "--porcelain"):
        print("Uncommitted changes are not part of this release.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            first, second = builds(work)
            build.must_equal(first, second)
            python = installed.environment(work / "sdist", ROOT)
            installed.install_sdist(python, first)
            installed.works(python, __version__)
            installed.chart_renders(first, ROOT)
            runs_with_extras(first, work)
        except ReleaseError as err:
            print(f"No release: {err}", file=sys.stderr)
            return 1
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(first, ROOT / "dist")
    print("The source distribution installs and works; two builds gave the same digests:")
    print((ROOT / "dist" / build.SUMS).read_text(encoding="ascii"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
