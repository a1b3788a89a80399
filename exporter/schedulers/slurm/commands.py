"""Slurm's own commands, run and waited for.

Owns the processes: no shell, an environment of their own, killed with all they started and reaped at the timeout.
Refuses to read what was printed.
"""

import contextlib
import os
import subprocess  # there is no other way to run scontrol  # nosec B404
import threading
from collections.abc import Mapping

from msgspec import Struct

_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Of our environment: what finds and admits to the cluster, but nothing that changes what is printed or asked."""
_FIXED = {
    "TZ": "UTC0",  # scontrol prints local time
    "LC_ALL": "C",
    "SLURM_TIME_FORMAT": "standard",  # the one form that `parse_time` reads
    "SLURM_BITSTR_LEN": "0",  # else the list of an array's tasks ends in "..." after 64 characters (squeue(1))
}
_SAID = 300


class SilentError(Exception):
    """No answer: the command, what it said, and what to do."""


class Ran(Struct, frozen=True):
    """What a command did."""

    out: str
    errors: str
    """What it printed to standard error."""
    status: int

    @property
    def words(self) -> str:
        """The end of its errors on one line."""
        return " ".join(self.errors.split())[-_SAID:]


class Commands:
    """Runs one command after another; `close` may come from another thread."""

    def __init__(self, *, bin_dir: str = "", conf: str = "", timeout: float = 5.0) -> None:
        """`bin_dir` "": on PATH; `conf` "": as the commands find it; `timeout` in seconds, of each."""
        self._bin, self._timeout = bin_dir, timeout
        self._environ = _environ(os.environ, conf)
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, command: str, *arguments: str) -> Ran:
        """Run it to its end, however it ends; raises SilentError where it does not start or does not end in time."""
        path = os.path.join(self._bin, command) if self._bin else command  # noqa: PTH118  "" is PATH, not "."
        try:
            child = self._start([path, *arguments])
        except OSError as err:
            raise SilentError(f"{path}: cannot be started: {err.strerror or err}. Set slurm.bin_dir") from err
        out, errors = self._wait(child, f"{command} {' '.join(arguments)}")
        return Ran(out.decode(errors="replace"), errors.decode(errors="replace"), child.returncode)

    def printed(self, command: str, *arguments: str) -> str:
        """What it printed; raises SilentError, with what it said, where it failed."""
        ran = self.run(command, *arguments)
        if ran.status:
            raise SilentError(f"{command} {' '.join(arguments)}: exit {ran.status}: {ran.words or 'without a word'}")
        return ran.out

    def close(self) -> None:
        """End what is running and start nothing more. Never raises."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                _kill(self._child)

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OSError("this daemon is being stopped")
            self._child = subprocess.Popen(  # nosec B603  # noqa: S603  a list of our own; numbers and the node's name are checked
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
            return self._child

    def _wait(self, child: subprocess.Popen[bytes], asked: str) -> tuple[bytes, bytes]:
        try:
            return child.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired as err:
            _kill(child)
            child.communicate()
            raise SilentError(
                f"{asked}: no answer within {self._timeout:g} s: is slurmctld up and reachable from here?"
            ) from err
        finally:
            with self._lock:
                self._child = None


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, 9)


def _environ(ours: Mapping[str, str], conf: str) -> dict[str, str]:
    kept = {name: ours[name] for name in _KEPT if name in ours}
    return kept | _FIXED | ({"SLURM_CONF": conf} if conf else {})
