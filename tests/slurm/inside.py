"""Runs programs of another root, with the machine's /proc, /sys and /dev mounted there.

The mounts are in a mount namespace of their own (mount_namespaces(7)): other processes do not see them, and they end
with the processes in it. The root is mounted on itself, because unshare(1), run there, refuses a root that is no mount
point. Only for short commands and for programs that daemonize.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.waiting import PATIENCE

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOUNT = """
set -e
root=$1 unified=$2
shift 2
if [ "$root" != / ]; then
  mount --bind "$root" "$root"
  for tree in proc sys dev; do mount --rbind "/$tree" "$root/$tree"; done
  mount --bind /etc/hosts "$root/etc/hosts"
fi
if [ "$unified" ]; then
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mkdir -p "$root/sys/fs/cgroup/system.slice"  # systemd's, which slurmd 22.05 does not make
fi
for shared; do
  mkdir -p "$root$shared"
  mount --bind "$shared" "$root$shared"
done
echo mounted
exec sleep infinity
"""
_CONFINE = """
root=$1
shift
mount -o remount,bind,ro "$root/sys/fs/cgroup"
chown nobody "${SLURM_CONF%/*}"
exec chroot --userspec=nobody --groups= "$root" "$@"
"""


class Inside:
    """A root, `/` or a complete tree below it, whose programs can run as any user."""

    def __init__(self, root: Path, *, shared: Sequence[Path] = (), unified: bool = False) -> None:
        """`shared`: the machine's folders that its programs see too, at the same paths.

        `unified`: they see control groups v2 alone, where the machine has theirs.
        """
        self.root, self._shared, self._unified = root, [f"{folder}" for folder in shared], unified
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self.root != Path("/") or self._unified:
            words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh", f"{self.root}"]
            words.append("yes" if self._unified else "")
            words += self._shared
            self._keeper = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert self._keeper.stdout is not None
            said = self._keeper.stdout.readline()
            assert said == "mounted\n", f"{self.root}: the machine's trees cannot be mounted there"
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
            assert self._keeper.stdout is not None
            self._keeper.stdout.close()

    def confined(self, *command: str) -> list[str]:
        """Return the command line that runs it there as nobody, with control groups read-only.

        Whose folder SLURM_CONF names then is nobody's, as a daemon's own copy would be.
        """
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _CONFINE, "sh", f"{self.root}"]
        return [*self._enter(), *words, *command]

    def _enter(self) -> list[str]:
        return [] if self._keeper is None else ["nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt"]

    def words(self, *command: str, user: str = "") -> list[str]:
        """Return the command line that runs `command` there, as root or as `user`."""
        enter = self._enter()
        who = [f"--userspec={user}", "--groups="] if user else []
        change = ["chroot", *who, f"{self.root}"] if enter or user else []
        return [*enter, *change, *command]

    def run(
        self, *command: str, user: str = "", env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end. Raises AssertionError with its output if it fails and `check` is set."""
        done = subprocess.run(
            self.words(*command, user=user),
            env={"PATH": _PATH, "LC_ALL": "C"} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert not check or not done.returncode, f"{' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def start(self, *command: str, user: str = "", env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start it and return the process, with standard output and error in one pipe."""
        return subprocess.Popen(
            self.words(*command, user=user),
            env={"PATH": _PATH, "LC_ALL": "C"} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def seen(self, path: Path) -> str:
        """Return a host's path as the programs there see it."""
        return f"/{path.relative_to(self.root)}"

    def path(self, name: str) -> str:
        """Return the program's path there. Raises AssertionError if it is missing."""
        found = (f"{folder}/{name}" for folder in ("/usr/sbin", "/usr/bin") if self._has(f"{folder}/{name}"))
        path = next(found, "")
        assert path, f"{name} is not in {self.root}: `make packages` and `make slurm-trees` install Slurm"
        return path

    def _has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()
