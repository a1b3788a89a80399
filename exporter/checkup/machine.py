"""What runs here, as whom, on which machine, and whether its clock is right.

Owns the reading of this process's own rights. Refuses to judge what they are good for: what needs them
does.

Sources: proc(5) for /proc/PID/status, capabilities(7) for the bits, adjtimex(2) for the clock.
"""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from exporter import __version__
from exporter.checkup import INFO, OK, WARN, Finding, Findings, Here
from exporter.core.model import SECOND

PROGRAM, USER, CLOCK = "program", "user", "clock"
CAPABILITIES = {
    1: "DAC_OVERRIDE", 2: "DAC_READ_SEARCH", 10: "NET_BIND_SERVICE", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 38: "PERFMON",
}  # fmt: skip
"""Those that change anything for this daemon, by their bit."""
_ALL = 40
"""More bits than that, and it is everything: a plain root has 41."""
_SECCOMP = {"0": "no seccomp", "1": "strict seccomp", "2": "a seccomp filter"}
SERVICE_USER = "gpu-efficiency"
"""As whom the packaged unit runs."""


class Rights(Struct, frozen=True):
    """Of this process."""

    uid: int = 0
    capabilities: int = 0
    """The effective set's bits."""
    seccomp: str = "0"
    no_new_privileges: bool = False

    def has(self, *names: str) -> bool:
        """Whether any of these is effective."""
        return any(self.capabilities >> bit & 1 for bit, name in CAPABILITIES.items() if name in names)

    @property
    def words(self) -> str:
        """The capabilities in words."""
        if self.capabilities.bit_count() >= _ALL:
            return "all capabilities"
        held = [name for bit, name in CAPABILITIES.items() if self.capabilities >> bit & 1]
        if not self.capabilities:
            return "no capability"
        return f"{self.capabilities.bit_count()} capabilities ({', '.join(held) or 'none that matters here'})"


def rights(proc: Path) -> Rights:
    """Read them; raises OSError."""
    lines = (proc / "self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    said = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return Rights(
        uid=int(said["Uid"][1]),
        capabilities=int(said["CapEff"][0], 16),
        seccomp=said.get("Seccomp", ["0"])[0],
        no_new_privileges=said.get("NoNewPrivs") == ["1"],
    )


def look_at_program(here: Here, _: Findings) -> Iterator[Finding]:
    """Versions, operating system, container."""
    packages = ("nvidia-ml-py", "msgspec", "httpx", "fastapi", "uvicorn", "grpcio")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    said = f"gpu-efficiency {__version__}, Python {platform.python_version()}; {versions}"
    yield Finding(PROGRAM, "versions", OK, said)
    machine = f"{_system(here)}, Linux {platform.release()}, {platform.machine()}"
    yield Finding(PROGRAM, "machine", OK, f"{here.host}: {machine}, {_where(here)}")
    cgroup = Path(here.config.host.cgroup)
    unified = (cgroup / "cgroup.controllers").exists()
    said = f"{cgroup} is {'cgroup v2' if unified else 'cgroup v1, or none: both are understood'}"
    yield Finding(PROGRAM, "cgroup", OK if unified else INFO, said)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system(here: Here) -> str:
    try:
        text = (here.etc / "os-release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "an unknown system"
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return found[1] if found else "an unknown system"


def _where(here: Here) -> str:
    if here.environ.get("KUBERNETES_SERVICE_HOST"):
        return "in a pod"
    marks = (here.root / ".dockerenv", here.root / "run/.containerenv")
    return "in a container" if any(mark.exists() for mark in marks) else "not in a container that says so"


def look_at_user(here: Here, _: Findings) -> Iterator[Finding]:
    """Who we are, and whether the daemon is somebody else."""
    mine = rights(here.proc)
    who = "root" if mine.uid == 0 else f"uid {mine.uid}"
    more = (
        _SECCOMP.get(mine.seccomp, "seccomp"),
        "no new privileges" if mine.no_new_privileges else "",
        "a read-only root" if os.statvfs(here.root).f_flag & os.ST_RDONLY else "a writable root",
    )
    yield Finding(USER, "rights", OK, f"{who}, with {mine.words}; {', '.join(part for part in more if part)}")
    service = _service_uid(here)
    if service is not None and service != mine.uid:
        said = f"the daemon's own user is {SERVICE_USER} (uid {service}); what follows is true of {who}"
        do = f"check as the daemon: `runuser -u {SERVICE_USER} -- gpu-efficiency install-check`"
        yield Finding(USER, "same user", INFO, said, do)


def _service_uid(here: Here) -> int | None:
    try:
        lines = (here.etc / "passwd").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split(":") for line in lines if line.startswith(f"{SERVICE_USER}:")), ())
    return int(found[2]) if len(found) > 2 and found[2].isdecimal() else None  # noqa: PLR2004  name:password:uid


class Timex(ctypes.Structure):
    """The beginning of struct timex (adjtimex(2)), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC; adjtimex then returns TIME_ERROR too."""
_TIME_ERROR = 5


def kernel_clock(timex: Timex) -> int:
    """adjtimex(2), asking only: `modes` is 0. Gives its return value; raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    state = int(library.adjtimex(ctypes.byref(timex)))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return state


def look_at_clock(_here: Here, _before: Findings, ask: Callable[[Timex], int] = kernel_clock) -> Iterator[Finding]:
    """Whether the kernel holds its clock for right: a trace, DCGM's stamps and an alert on skew rest on it."""
    timex = Timex()
    try:
        state = ask(timex)
    except OSError as err:
        blocked = err.errno in (errno.EPERM, errno.ENOSYS)
        said = f"the kernel cannot be asked ({err.strerror}{': seccomp forbids it' if blocked else ''})"
        yield Finding(CLOCK, "synchronised", INFO, said, "look on the host: `timedatectl`")
        return
    if state == _TIME_ERROR or timex.status & _UNSYNCHRONISED:
        said = "nobody keeps the clock right: the kernel holds it for unsynchronised"
        do = "run chrony or systemd-timesyncd on the host (`timedatectl`), or nodes cannot be compared in time"
        yield Finding(CLOCK, "synchronised", WARN, said, do)
        return
    said = f"synchronised, wrong by {timex.maxerror * 1000 / SECOND:.3f} s at most"
    yield Finding(CLOCK, "synchronised", OK, said)
