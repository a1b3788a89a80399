"""Runs tests on other Pythons than the one of `.venv`: `make test-pythons`.

    .venv/bin/python -m tests.pythons NAME ... -- ARGUMENT_OF_PYTEST ...

A name is a version such as 3.12, whose interpreter is on the PATH or among pyenv's, or `debian13`: Debian 13's own
Python 3.13 with Debian 13's libraries, in a tree below `.cache` (as root, by mmdebstrap). `debian13-arm64` is the same
for arm64; on another processor an emulator runs it, some ten times slower, without what tests/emulated.txt names. Each
has an environment of its own, with the packages of requirements.lock: wheels only, hashes checked.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests import check_skips
from tests.slurm.chroot import ChrootError, build
from tests.slurm.inside import Inside

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache/pythons"
DEBIAN = "debian13"
_MACHINES = {"arm64": "aarch64"}
"""uname(2)'s and the wheels' name of each architecture of Debian that a tree can have."""
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_EMULATED = ROOT / "tests/emulated.txt"
_DEBIAN_VERSION = "3.13"
_DEBIAN_PACKAGES = (
    "python3-venv,gcc,git,groff,iproute2,libc6-dev,man-db,openssl,procps,prometheus,prometheus-alertmanager,shellcheck,"
    "systemd"
)
"""What the quick tests start."""
_PYENV = Path(os.environ.get("PYENV_ROOT", f"{os.environ.get('HOME', '')}/.pyenv"))
_LOCK = ROOT / "requirements.lock"
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
# pyenv's shims are on the PATH for every version, and most refuse to start; Debian's python3 may have no ensurepip.
_PROBE = "import ensurepip, sys, venv; print('{}.{}'.format(*sys.version_info))"


class UnavailableError(Exception):
    """A Python cannot be had or equipped here; the message has the reason."""


class Python(NamedTuple):
    """An interpreter, its version (major and minor), the words before its command line, and its kind of processor."""

    path: str
    version: str
    enter: Sequence[str] = ()
    machine: str = platform.machine()

    def run(self, *words: str) -> int:
        """Run it in the checkout, output as it comes; return the exit status."""
        return subprocess.run([*self.enter, self.path, *words], cwd=ROOT, env=_environment(), check=False).returncode

    def must(self, *words: str) -> None:
        """Run it likewise. Raises UnavailableError if it fails."""
        if status := self.run(*words):
            raise UnavailableError(f"{self.path} {' '.join(words)}: exit {status}")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONHOME"}}


def interpreter(version: str, *, path: str, pyenv: Path) -> str:
    """Return an interpreter of that version that starts and can make environments. Raises UnavailableError."""
    folders = [Path(folder) for folder in path.split(os.pathsep)]
    folders += sorted(folder / "bin" for folder in (pyenv / "versions").glob(f"{version}.*"))
    for file in (folder / f"python{version}" for folder in folders):
        if file.is_file() and _answer(file) == version:
            return f"{file}"
    raise UnavailableError(f"no python{version} with venv on the PATH or in {pyenv}/versions")


def _answer(file: Path) -> str:
    try:
        done = subprocess.run([f"{file}", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


@contextmanager
def opened(name: str) -> Iterator[Python]:
    """The Python of that name, while it is used. Raises UnavailableError."""
    debian, _, architecture = name.partition("-")
    if debian != DEBIAN:
        yield Python(interpreter(name, path=os.environ["PATH"], pyenv=_PYENV), name)
        return
    shared = [folder for folder in (ROOT, ROOT.parent / "shared") if folder.is_dir()]
    machine = _MACHINES.get(architecture, "") if architecture else platform.machine()
    if not runs(machine, registered=_BINFMT):
        raise UnavailableError(
            f"nothing here runs programs of {architecture} in a chroot: "
            "apt-get install arch-test binfmt-support qemu-user-static"
        )
    with Inside(_tree(name, architecture), shared=shared) as inside:
        yield Python("/usr/bin/python3", _DEBIAN_VERSION, inside.words("env", f"--chdir={ROOT}"), machine)


def runs(machine: str, *, registered: Path) -> bool:
    """Tell whether programs of that processor run here, in any root: by flag F the kernel has opened their emulator."""
    if machine == platform.machine():
        return True
    entry = registered / f"qemu-{machine}"
    lines = entry.read_text(encoding="utf-8").splitlines() if entry.is_file() else []
    return "enabled" in lines and any(line.startswith("flags:") and "F" in line for line in lines)


def _tree(name: str, architecture: str) -> Path:
    """Return the tree of that name, built unless there is one with the same packages. Raises UnavailableError."""
    digest = hashlib.sha256(_DEBIAN_PACKAGES.encode()).hexdigest()[:16]
    folder = FOLDER / f"{name}-{digest}"
    if os.geteuid():
        raise UnavailableError("only root can build and mount a tree of Debian 13")
    if not (folder / ".built").is_file():
        for old in FOLDER.glob(f"{name}-{'[0-9a-f]' * len(digest)}"):
            shutil.rmtree(old)
        try:
            build(folder, packages=_DEBIAN_PACKAGES, architecture=architecture)
        except (ChrootError, OSError, subprocess.TimeoutExpired) as err:
            raise UnavailableError(f"{err}") from err
    return folder


def equipped(name: str, python: Python) -> Python:
    """Return the Python of an environment with what the lock has, made unless it is there. Raises UnavailableError."""
    folder = FOLDER / name
    inner = python._replace(path=f"{folder}/bin/python")
    stamp, now = folder / "made-of", f"{python.path}\n{hashlib.sha256(_LOCK.read_bytes()).hexdigest()}\n"
    if stamp.is_file() and stamp.read_text() == now:
        return inner
    shutil.rmtree(folder, ignore_errors=True)
    python.must("-m", "venv", f"{folder}")
    install = (*_PIP, "--isolated", "install", "--no-compile", "--no-index")
    inner.must(*install, f"--find-links={_wheels(python)}", "--require-hashes", "-r", f"{_LOCK}")
    inner.must(*install, "--no-deps", "--no-build-isolation", "--editable", ".")
    (folder / "dcgm-bindings").symlink_to(ROOT / ".venv/dcgm-bindings")  # where tests/dcgm_stub/bindings.py looks
    stamp.write_text(now)
    return inner


def _wheels(python: Python) -> Path:
    """Download the lock's wheels for that Python, for a tree has no network of its own. Raises UnavailableError."""
    folder = FOLDER / f"wheels-{python.version}-{python.machine}"
    ours = Python(sys.executable, python.version)
    ours.must(
        *_PIP, "download", "--only-binary=:all:", f"--python-version={python.version}",
        *(f"--platform={tag}_{python.machine}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")),
        "--require-hashes", f"--dest={folder}", "-r", f"{_LOCK}",
    )  # fmt: skip
    return folder


def left_out(python: Python) -> list[str]:
    """Return pytest's arguments that leave out what cannot run on that processor here."""
    emulated = python.machine != platform.machine()
    tests = check_skips.allowed(_EMULATED.read_text(encoding="utf-8")) if emulated else ()
    return [f"--deselect={test}" for test in tests]


def outcome(name: str, words: Sequence[str]) -> str:
    """Run the tests on that Python; return why that is no success, or an empty string."""
    report = FOLDER / f"{name}.xml"
    try:
        with opened(name) as python:
            inner = equipped(name, python)
            inner.must("-VV")
            report_to = ("-p", "no:cacheprovider", f"--junitxml={report}")
            status = inner.run("-m", "pytest", "-q", *report_to, *words, *left_out(python))
    except UnavailableError as err:
        return f"not run: {err}"
    if status:
        return f"failed: pytest's exit status is {status}"
    refused = check_skips.main([f"{ROOT}/tests/allowed_skips.txt", f"{report}"])
    return "failed: tests were skipped without leave" if refused else ""


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the tests passed on every Python named; 1 if not, or if one of them cannot be had here."""
    end = arguments.index("--")
    results = dict(_results(arguments[:end], arguments[end + 1 :]))
    for name, (problem, seconds) in results.items():
        sys.stdout.write(f"== {name}: {problem or 'passed'} ({seconds:.0f} s)\n")
    return int(any(problem for problem, _ in results.values()))


def _results(names: Iterable[str], words: Sequence[str]) -> Iterator[tuple[str, tuple[str, float]]]:
    for name in names:
        since = time.monotonic()
        problem = outcome(name, words)
        yield name, (problem, time.monotonic() - since)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
