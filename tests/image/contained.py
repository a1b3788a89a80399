"""A process in a container of runc's: what an engine would tell runc for a step of a build, or for `docker run`.

Owns the specification and the container's end. Refuses images, pulls and layers: a root file system is a folder.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.running import Program, running

MISSING = "needs runc in cgroups of its own"
ENGINES_OWN = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)
"""Capabilities that Docker leaves to root in a container, and so to a step of a build."""
_NUMBERS = count()
_HIDDEN = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware")
_FIXED = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


class Process(NamedTuple):
    """What is run, and with what power."""

    words: Sequence[str]
    env: Mapping[str, str]
    folder: str = "/"
    user: tuple[int, int] = (0, 0)
    capabilities: Sequence[str] = ()
    writable: bool = False
    """The root file system; an engine's --read-only is its contrary."""
    binds: Mapping[str, Path] = {}
    """Folders and files of this machine, by where they are seen; read-only."""
    host_network: bool = False


def why_not() -> str:
    """Say why no container can be run here, as the reason of a skip; empty when one can."""
    lacking = [name for name in ("runc", "mmdebstrap") if shutil.which(name) is None]
    if os.geteuid() != 0:
        lacking.append("root")
    return f"{MISSING}: {', '.join(lacking)}" if lacking else ""


def _mount(at: str, kind: str, *options: str, source: str = "") -> dict[str, Any]:
    return {"destination": at, "type": kind, "source": source or kind, "options": list(options)}


def specification(root: Path, process: Process) -> dict[str, Any]:
    """What runc is told, after Docker's own defaults; without a seccomp profile, which is the engine's to bring."""
    powers = [f"CAP_{name}" for name in process.capabilities]
    kinds = ["mount", "pid", "ipc", "uts", *([] if process.host_network else ["network"])]
    binds = [
        _mount(at, "bind", "rbind", "ro", "nosuid", "nodev", source=f"{path}") for at, path in process.binds.items()
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": "node",
        "process": {
            "user": {"uid": process.user[0], "gid": process.user[1]},
            "args": list(process.words),
            "env": [f"{name}={value}" for name, value in process.env.items()],
            "cwd": process.folder,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), powers),
            "noNewPrivileges": True,
        },
        "root": {"path": f"{root}", "readonly": not process.writable},
        "mounts": [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),  # noqa: S108
            _mount("/sys", "bind" if process.host_network else "sysfs", "rbind" if process.host_network else "nosuid",
                   "noexec", "nodev", "ro", source="/sys"),
            *binds,
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "maskedPaths": list(_HIDDEN),
            "readonlyPaths": list(_FIXED),
        },
    }  # fmt: skip


class Container(NamedTuple):
    """One that runs."""

    name: str
    runc: list[str]
    program: Program

    def does(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside its process, with the same user and power: what a health check is."""
        return self._asked("exec", self.name, *words)

    def signal(self, name: str) -> None:
        self._asked("kill", self.name, name).check_returncode()

    def pid(self) -> int:
        """Its first process, as this machine counts; 0 while there is none."""
        done = self._asked("state", self.name)
        return int(json.loads(done.stdout)["pid"]) if done.returncode == 0 else 0

    def _asked(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.runc, verb, *words], capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def container(root: Path, process: Process, folder: Path) -> Iterator[Container]:
    """Run it for the length of a block, with `folder` for what runc needs; it is killed and deleted at the end."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(specification(root, process)))
    name = f"gpu-efficiency-{os.getpid()}-{next(_NUMBERS)}"
    runc = ["runc", "--root", f"{folder / 'state'}"]
    words = [*runc, "run", "--bundle", f"{folder}", name]
    try:
        with running(words, folder / "said", os.environ) as program:
            yield Container(name, runc, program)
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=False, capture_output=True, timeout=60)


def ran(root: Path, process: Process, folder: Path) -> tuple[int, str]:
    """Run it to its end; its exit status and what it said."""
    with container(root, process, folder) as alone:
        status = alone.program.process.wait(600)
        return status, alone.program.log()
