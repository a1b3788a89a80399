"""A machine that systemd runs: the real one as pid 1, in namespaces of its own, over this machine's root.

Owns its start, its end, and running commands in it. All that is written there lies in memory and is gone with it. Its
network is a loopback of its own. Control groups are the unified hierarchy, which may have no controller but that of
devices: then limits of memory and CPU are taken and not kept. /dev holds what a bare node has, and two nodes of GPUs
without a driver: opening one says ENXIO where it is allowed and EPERM where it is not.

Refuses to be more than that: no udev, no D-Bus; systemctl speaks to pid 1 itself.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from tests.waiting import PATIENCE, wait_for

MISSING = "needs systemd as pid 1 of namespaces of its own"
"""Why a test is skipped where one cannot be had."""
_SYSTEMD = Path("/lib/systemd/systemd")
PYTHON = Path("/opt/python")
"""This Python's own tree, where the machine has it: below /root, say, no other user could run it."""
SITE = Path("/opt/site-packages")
"""The packages of the tests' environment, for a wheel to be installed beside."""
_BOOT = """
set -e
ip link set lo up
mount -t tmpfs machine "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
rm -rf var/lib/gpu-efficiency etc/gpu-efficiency
mount -t proc proc proc
sed '/^Character/a 195 nvidia\\n195 nvidiactl' /proc/devices > "$1/devices"
mount --bind "$1/devices" proc/devices
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for place in dev run tmp; do mount -t tmpfs -o mode=755 tmpfs "$place"; done
chmod 1777 tmp
while read -r name major minor; do mknod -m 666 "dev/$name" c "$major" "$minor"; done <<NODES
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
kmsg 1 11
tty 5 0
fuse 10 229
nvidia0 195 0
nvidiactl 195 255
NODES
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs tmpfs dev/shm
mkdir -p "./$4" "./$5"
mount --bind "$2" "./$4"
mount --bind "$3" "./$5"
printf '[Unit]\\nDefaultDependencies=no\\n' > etc/systemd/system/machine.target
rm -rf etc/systemd/system/*.wants
: > etc/machine-id
mkdir -p old
pivot_root . old
umount -l /old
exec env -i container=test PATH=/usr/sbin:/usr/bin "$6" --system --unit=machine.target --log-target=console \\
  --log-level=info --show-status=no
"""


class MachineError(Exception):
    """It cannot be started here; the message says why."""


class Machine:
    """For the length of a block; `log` is what its systemd says."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "systemd.log"
        self._path = f"{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def __enter__(self) -> Self:
        if os.geteuid() or not _SYSTEMD.exists():
            raise MachineError("root and Debian's package systemd")
        self._mount = Path(tempfile.mkdtemp(prefix="machine-"))
        self._cgroup = _unified() / self._mount.name
        self._cgroup.mkdir()
        with self.log.open("wb") as said:
            self._keeper = subprocess.Popen(self._words(), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            self._pid = wait_for(self._booted, "systemd is up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _words(self) -> list[str]:
        join = f'echo $$ > {shlex.quote(f"{self._cgroup}/cgroup.procs")}; exec "$@"'
        spaces = ["--cgroup", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--net"]
        site = next(path for path in sys.path if path.endswith("site-packages"))
        places = [f"{self._mount}", sys.base_prefix, site, f"{PYTHON}", f"{SITE}", f"{_SYSTEMD}"]
        enter = ["unshare", *spaces, "--propagation", "private", "sh", "-c", _BOOT, "boot", *places]
        return ["sh", "-c", join, "join", *enter]

    def _booted(self) -> int:
        if self._keeper.poll() is not None:
            raise MachineError(self.log.read_text(errors="replace").strip()[-300:] or "no word")
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        for pid in map(int, children):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if words.startswith(bytes(_SYSTEMD)) and self._enter(pid, "systemctl", "is-system-running").returncode == 0:
                return pid
        return 0

    def __exit__(self, *_: object) -> None:
        self._keeper.kill()  # unshare takes its child, pid 1 there, with it, and that everything else
        self._keeper.wait()
        wait_for(self._emptied, "its control group is empty")
        self._mount.rmdir()

    def _emptied(self) -> bool:
        try:
            for folder in sorted(self._cgroup.glob("**/"), reverse=True):
                folder.rmdir()
        except OSError:
            return False
        return True

    def _enter(self, pid: int, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        spaces = [f"--{kind}=/proc/{pid}/ns/{name}" for kind, name in _SPACES]
        root = [f"--root=/proc/{pid}/root", "--wd=/"]
        return subprocess.run(
            ["nsenter", *spaces, *root, *words],
            cwd="/",
            env={"PATH": self._path, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def run(self, *words: str, **env: str) -> str:
        """Run a command there as root, to its end; raises AssertionError with its words where it fails."""
        done = self.tried(*words, **env)
        assert not done.returncode, f"{shlex.join(words)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command there as root, however it ends."""
        return self._enter(self._pid, *words, **env)

    def path(self, inside: str) -> Path:
        """A path of the machine, as this one sees it."""
        return Path(f"/proc/{self._pid}/root") / inside.lstrip("/")

    def show(self, unit: str, what: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={what}", unit).strip()


_SPACES = (("mount", "mnt"), ("pid", "pid"), ("uts", "uts"), ("ipc", "ipc"), ("net", "net"), ("cgroup", "cgroup"))


def _unified() -> Path:
    """Where the unified hierarchy is mounted; raises MachineError."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    found = next((line.split()[1] for line in lines if line.split()[2] == "cgroup2"), "")
    if not found or not os.access(found, os.W_OK):
        raise MachineError("a unified hierarchy of control groups that may be written")
    return Path(found)


def have(machine: Machine, library: Path) -> None:
    """Install a shared library as a package would: in a folder that the linker knows."""
    shutil.copy(library, machine.path("/usr/lib") / library.name)
    machine.path("/etc/ld.so.conf.d/python.conf").write_text(f"{PYTHON}/lib\n")
    machine.run("ldconfig")


@contextmanager
def started(folder: Path) -> Iterator[Machine]:
    """A machine while the block runs; the test is skipped where none can run."""
    try:
        machine = Machine(folder).__enter__()
    except MachineError as err:
        pytest.skip(f"{MISSING}: {err}")
    try:
        yield machine
    finally:
        machine.__exit__()
