"""`top` and `report` ask remote nodes on systems without Unix's own modules, such as Windows, in any encoding.

On macOS every command starts, and the demo runs. Stand-ins: in a process of its own these modules cannot be imported,
and what `os`, `select`, `signal` and `socket` have on Unix or on Linux alone is removed. They show nothing of terminals
or paths on a real Windows; the macOS one still has /proc.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import ROOT, environment, running
from tests.top.terminal import terminal
from tests.waiting import wait_for

pytestmark = pytest.mark.e2e
UNIX_ONLY = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
ELSEWHERE = f"""
import functools, os, select, signal, socket, sys
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # Windows has one of another family
for name in {UNIX_ONLY!r}:
    sys.modules[name] = None  # "import NAME" then raises ModuleNotFoundError
for module, names in (
    (os, ("geteuid", "getuid", "getegid", "getgid", "getpgid", "uname", "sched_getaffinity", "statvfs",
          "fchmod", "O_CLOEXEC")),
    (signal, ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGKILL", "pthread_sigmask")),
    (select, ("poll", "epoll")),
    (socket, ("AF_UNIX", "SO_PEERCRED", "SCM_RIGHTS")),
):
    for name in names:
        delattr(module, name)
os.supports_fd.discard(os.chmod)
os.environ.pop("TERM", None)
from exporter.cli import main
sys.exit(main())
"""
MACOS = """
import os, signal, socket, sys
for module, names in (
    (os, ("O_PATH", "O_TMPFILE", "copy_file_range", "eventfd", "getrandom", "memfd_create", "pidfd_open", "pipe2",
          "posix_fadvise", "sched_getaffinity", "setns", "splice", "unshare")),
    (signal, ("SIGRTMIN", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo")),
    (socket, ("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SCM_CREDENTIALS", "SOCK_CLOEXEC", "SOCK_NONBLOCK",
              "SO_PASSCRED", "SO_PEERCRED")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
class Socket(socket.socket):
    def __init__(self, family=-1, type=-1, *others, **named):
        if type == socket.SOCK_SEQPACKET:
            raise OSError(43, "Protocol not supported")
        super().__init__(family, type, *others, **named)
socket.socket = Socket
from exporter.cli import main
sys.exit(main())
"""
"""Linux has more than macOS; macOS' unix sockets have no packets."""


def elsewhere(
    *words: str, encoding: str = "utf-8", system: str = ELSEWHERE, **env: str
) -> subprocess.CompletedProcess[bytes]:
    env = environment(PYTHONIOENCODING=encoding, **env)
    return subprocess.run(
        [sys.executable, "-c", system, *words], cwd=ROOT, env=env, capture_output=True, timeout=120, check=False
    )


def _address(log: str) -> str | None:
    found = re.search(r"http://(127\.0\.0\.1:\d+)", log)
    return found[1] if found else None


@pytest.fixture(name="node", scope="module")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a simulated node."""
    with _demo(tmp_path_factory.mktemp("demo"), "-m", "exporter") as address:
        yield address


@contextmanager
def _demo(folder: Path, *python: str) -> Iterator[str]:
    """Run it with these arguments of Python; give its address."""
    words = [sys.executable, *python, "demo", "--web.listen-address", "127.0.0.1:0"]
    with running(words, folder / "log", environment()) as demo:
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


def test_top_is_live_on_a_console(node: str, job: str) -> None:
    """Its console has no TERM; a driver that needs no Unix terminal replaces Textual's for Windows."""
    script = f"import platformdirs{ELSEWHERE}"  # before: it goes by sys.platform, which is still Linux
    words = [sys.executable, "-c", script, "top", "--url", node]
    env = environment(LANG="C.UTF-8", TEXTUAL_DRIVER="tests.top.console:Console")
    with terminal(words, columns=160, env=env) as top:
        top.shows(job, "[GPUs]", "q quit")
        top.press("h\n")
        top.shows("this help")
        top.press("qq\n")
        assert top.ended() == 0


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
    broken = ELSEWHERE.replace("from exporter.cli import main", "import exporter.cli.scratch")
    said = subprocess.run([sys.executable, "-c", broken], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "fcntl" in said.stderr


@pytest.mark.parametrize(
    ("source", "message"), [((), b"--node URL"), (("--store", "no/such.db"), b"no/such.db: there is no such store")]
)
def test_report_without_a_node_says_what_is_missing(source: tuple[str, ...], message: bytes) -> None:
    done = elsewhere("report", *source, "4711")
    assert done.returncode != 0
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


NOWHERE = ("--source", "dcgm-exporter", "--dcgm-exporter-url", "http://127.0.0.1:1/metrics")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("serve", *NOWHERE), 3),
        (("install-check", *NOWHERE), 3),
        (("completion", "bash"), 0),
        (("check-config",), 0),
        (("metrics",), 0),
        (("nccl",), 0),
        *(
            ((name, "--help"), 0)
            for name in ("record", "replay", "preview", "backfill", "advise", "cluster", "gateway")
        ),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_commands_start_on_macos(words: tuple[str, ...], status: int, tmp_path: Path) -> None:
    done = elsewhere(*words, system=MACOS, GPU_EFFICIENCY_REPORTS_SOCKET=f"{tmp_path}/report.sock")
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr


def test_the_demo_runs_on_macos(tmp_path: Path) -> None:
    with _demo(tmp_path, "-c", MACOS) as address:
        done = elsewhere("top", "--once", "--url", address, system=MACOS)
    assert done.returncode == 0, done.stderr
