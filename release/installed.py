"""Installs what a release uploads into an empty environment and runs it there."""

import re
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

from release.build import ReleaseError, run, unpack

LOCK = "requirements-runtime.lock"
_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PATIENCE = 60.0
"""Seconds until a command that does not end, or does not serve, has failed."""
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONUNBUFFERED": "1", "TERM": "xterm-256color"}


def environment(folder: Path, source: Path) -> Path:
    """Make an environment with what the runtime lock names and nothing else, hashes checked; return its Python.

    Without byte code, which has this folder in it.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    run(sys.executable, *_PIP, "--python", python, "install", "--no-compile", "--require-hashes", "-r", source / LOCK)
    return python


def fetch(source: Path, into: Path) -> None:
    """Fetch the wheels that the runtime lock names, hashes checked."""
    run(sys.executable, *_PIP, "download", "--no-deps", "--only-binary", ":all:", "--require-hashes",
        "--dest", into, "-r", source / LOCK)  # fmt: skip


def with_extras(folder: Path, extras: str, *, wheels: Path, dist: Path) -> Path:
    """Make an environment with the wheel in `dist` and what these extras need, all as locked; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    words = ("install", "--no-compile", "--no-index", "--only-binary", ":all:")
    name = f"gpu-efficiency-exporter[{extras}]" if extras else "gpu-efficiency-exporter"
    run(sys.executable, *_PIP, "--python", python, *words, "--find-links", wheels, "--find-links", dist, name)
    return python


def install_wheel(python: Path, dist: Path) -> None:
    """Install the wheel by its name, so that the environment does not record where on this machine it lay."""
    words = ("install", "--no-compile", "--no-index", "--find-links", f"{dist}", "--only-binary", ":all:")
    run(sys.executable, *_PIP, "--python", python, *words, "gpu-efficiency-exporter")


def install_sdist(python: Path, dist: Path) -> None:
    """Install the source distribution as pip does: in an isolated build that fetches setuptools."""
    (sdist,) = dist.glob("*.tar.gz")
    run(sys.executable, *_PIP, "--python", python, "install", "--no-deps", sdist)


def works(python: Path, version: str) -> None:
    """Ask the command for its version and the demo for a scrape. Raises ReleaseError if either is not as it must be."""
    command = python.with_name("gpu-efficiency")
    said = run(command, "--version")
    if said != f"gpu-efficiency {version}\n":
        raise ReleaseError(f"{command} --version printed {said!r}, not version {version}")
    with demo(command) as address:
        with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE) as answer:  # noqa: S310  our own demo
            page = answer.read().decode()
        if "\ngpu_efficiency_paid_seconds_total{" not in page:
            raise ReleaseError(f"{command} demo: /metrics has no gpu_efficiency_paid_seconds_total:\n{page[:2000]}")


@contextmanager
def demo(command: Path) -> Iterator[str]:
    """Serve a simulated node for the length of a block; give its address once it has sampled."""
    with serving([f"{command}", "demo", "--web.listen-address", "127.0.0.1:0"], _ADDRESS) as address:
        _ready(address)
        yield address


@contextmanager
def serving(line: list[str], until: re.Pattern[str], folder: Path | None = None) -> Iterator[str]:
    """Run a command until the block ends; give what it printed first that matches.

    Raises ReleaseError if it prints nothing that does, or if it does not end by SIGTERM with status 0 and no traceback.
    """
    with Popen(line, stdout=PIPE, stderr=STDOUT, text=True, env=ENVIRONMENT, cwd=folder) as server:
        limit, said, found = _kill_later(server), "", None
        try:
            for printed in server.stdout or ():
                said += printed
                if found := until.search(printed):
                    limit.cancel()
                    yield found[0]
                    break
        finally:
            limit.cancel()
            limit = _kill_later(server)
            server.terminate()
            said += server.communicate()[0]
            limit.cancel()
    if server.returncode or "Traceback" in said or not found:
        raise ReleaseError(f"{' '.join(line)}: exit {server.returncode}\n{said[-3000:]}")


def _kill_later(program: Popen[str]) -> threading.Timer:
    limit = threading.Timer(PATIENCE, program.kill)
    limit.start()
    return limit


def _ready(address: str) -> None:
    """Wait until the demo has sampled."""
    pause, limit = threading.Event(), time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{address}/readyz", timeout=PATIENCE):  # noqa: S310  our own demo
                return
        except urllib.error.HTTPError:  # 503 until the first sample
            pause.wait(0.2)
        except OSError as err:
            raise ReleaseError(f"{address}/readyz: {err}") from err
    raise ReleaseError(f"{address}/readyz: not ready within {PATIENCE:g} s")


def chart_renders(dist: Path, source: Path) -> None:
    """Render the packaged chart and the folder by Helm's library; raise ReleaseError where they differ."""
    from helm_python.chart import Chart  # noqa: PLC0415  all of Helm, which no other command needs

    (packed,) = dist.glob("*.tgz")
    values = {"image": {"repository": "registry.example/gpu-efficiency"}}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(packed) as archive:
            unpack(archive, Path(folder))
        (unpacked,) = Path(folder).iterdir()
        rendered = [
            Chart.load(chart).render(values, name="gpu-efficiency", namespace="gpus")
            for chart in (unpacked, source / "helm/gpu-efficiency")
        ]
    if rendered[0] != rendered[1]:
        raise ReleaseError(f"{packed.name} renders otherwise than helm/gpu-efficiency")
