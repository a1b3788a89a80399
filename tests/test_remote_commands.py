"""`top` and `report` ask remote nodes on systems without Unix's own modules, such as Windows, in any encoding.

A stand-in: in a process of its own these modules cannot be imported, and what `os`, `signal` and `socket` have on Unix
alone is removed. It shows nothing of terminals or paths on a real Windows.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import ROOT, environment, running
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
UNIX_ONLY = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
ELSEWHERE = f"""
import os, signal, socket, sys
for name in {UNIX_ONLY!r}:
    sys.modules[name] = None  # "import NAME" then raises ModuleNotFoundError
for module, names in (
    (os, ("geteuid", "getuid", "getegid", "getgid", "getpgid", "uname", "sched_getaffinity", "statvfs",
          "fchmod", "O_CLOEXEC")),
    (signal, ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGKILL", "pthread_sigmask")),
    (socket, ("AF_UNIX", "SO_PEERCRED", "SCM_RIGHTS")),
):
    for name in names:
        delattr(module, name)
os.supports_fd.discard(os.chmod)
from exporter.cli import main
sys.exit(main())
"""


def elsewhere(*words: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    env = os.environ | {"PYTHONIOENCODING": encoding}
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *words], cwd=ROOT, env=env, capture_output=True, timeout=120, check=False
    )


def _address(log: str) -> str | None:
    found = re.search(r"http://(127\.0\.0\.1:\d+)", log)
    return found[1] if found else None


@pytest.fixture(name="node", scope="module")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a simulated node."""
    words = [sys.executable, "-m", "exporter", "demo", "--web.listen-address", "127.0.0.1:0"]
    log = tmp_path_factory.mktemp("demo") / "log"
    with running(words, log, environment() | {"PYTHONUNBUFFERED": "1"}) as demo:
        found = wait_for(lambda: _address(demo.log()) if demo.alive() else None, "it serves")
        wait_for(lambda: httpx.get(f"http://{found}/readyz", trust_env=False).is_success, "/readyz")
        yield found


@pytest.fixture(name="job", scope="module")
def _job(node: str) -> str:
    """A job of that node."""
    jobs = httpx.get(f"http://{node}/api/v1/jobs", trust_env=False).json()["jobs"]
    return str(jobs[0]["owner"]["job_id"])


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
def test_top_shows_a_remote_node(node: str, job: str, encoding: str) -> None:
    done = elsewhere("top", "--once", "--jobs", "--url", node, encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert job in done.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252", "cp437", "ascii"])
def test_report_tells_of_a_job_of_a_remote_node(node: str, job: str, encoding: str) -> None:
    done = elsewhere("report", "--quiet", "--node", node, job, encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert job in done.stdout.decode(encoding)


def test_report_writes_a_page_and_json(node: str, job: str, tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    done = elsewhere("report", "--quiet", "--node", node, "--html", "-o", f"{page}", job, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert job in page.read_text(encoding="utf-8")
    said = elsewhere("report", "--quiet", "--node", node, "--json", job, encoding="cp1252")
    assert json.loads(said.stdout.decode("cp1252"))["who"]["job_id"] == job


@pytest.mark.parametrize("form", [(), ("--markdown",)])
def test_report_sums_up_a_remote_node(node: str, form: tuple[str, ...]) -> None:
    words = ("report", "--quiet", "--node", node, "--all", "--by", "user", "--since", "1d", *form)
    done = elsewhere(*words, encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert b"user" in done.stdout.lower()


def test_the_stand_in_takes_unix_away() -> None:
    broken = ELSEWHERE.replace("from exporter.cli import main", "import exporter.history.store")
    said = subprocess.run([sys.executable, "-c", broken], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "fcntl" in said.stderr
