"""Processes of the runner: forked, as any user, ended with it, each returns a tally through a pipe."""

import codecs
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

from tests.fuzz.redteam.tally import Tally

# Loaded here, while the process may read the interpreter's files.
for _name in ("ascii", "latin-1", "idna"):
    codecs.lookup(_name)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
_DUMPABLE = 4  # PR_SET_DUMPABLE
_LIBC = ctypes.CDLL(None)
Work = Callable[[Tally], None]


class Child:
    """A forked process that does `work` as user `uid`, in a process group of its own if `group`."""

    def __init__(
        self,
        work: Work,
        *,
        uid: int | None = None,
        nice: int = 0,
        cpus: Iterable[int] | None = None,
        group: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        read, write = os.pipe()
        sys.stderr.flush()
        self.pid, self._pipe, self._text, self._ended = os.fork(), read, b"", False
        if self.pid == 0:
            os.close(read)
            _be(work, write, lambda: _become(uid, nice, cpus, group=group, first=first))
        os.close(write)
        os.set_blocking(read, False)

    def ended(self) -> bool:
        """Read what there is, and return whether the process is gone."""
        self._drain()
        if not self._ended:
            with contextlib.suppress(ChildProcessError):
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self._ended

    def wait(self, seconds: float) -> Tally:
        """Return its tally; it is killed when it does not end in time."""
        until = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < until:
            time.sleep(0.01)
        return self.end()

    def end(self, *, group: bool = False) -> Tally:
        """Kill it if it lives, with its process group if it has one of its own."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._ended = True
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._drain()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            return Tally.load(self._text)
        except ValueError:
            return Tally()

    def _drain(self) -> None:
        if self._pipe < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                self._text += part


def together(children: Sequence[Child], seconds: float) -> Tally:
    """Return the sum of what they did; those that do not end in time are killed."""
    until, total = time.monotonic() + seconds, Tally()
    for child in children:
        total.add(child.wait(max(until - time.monotonic(), 0.0)))
    return total


def _become(
    uid: int | None, nice: int, cpus: Iterable[int] | None, *, group: bool, first: Callable[[], None] | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a job's standard output is its log: this process has none
    if group:
        os.setsid()
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if nice > 0 or (nice < 0 and os.getuid() == 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if first is not None:
        first()
    become(uid)
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # a change of user clears it: after that


def become(uid: int | None) -> None:
    """Change to that user for good, if root can; others stay who they are."""
    if uid is not None and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _LIBC.prctl(_DUMPABLE, 1)  # as a process is that was started by that user


def _be(work: Work, write: int, become: Callable[[], None]) -> None:
    status = 1
    try:
        become()
        tally = Tally()
        try:
            work(tally)
        finally:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(tally.dump())
        status = 0
    except BaseException:  # noqa: BLE001  a forked process must never return into its parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
