"""Whole daemons as the operating system sees them: started, watched from outside through /proc, ended.

Owns the processes it starts and ends them by their own handle. Refuses to ask a daemon what it costs.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from benchmarks.machine import ROOT

_SERVING = re.compile(rb"serving https?://[^ ]*:(\d+)/")
_PATIENCE = 60.0
"""Seconds a daemon may take to listen: far more than it ever does, on a machine that is busy."""


class Daemon(Struct, frozen=True):
    """A running daemon: its process and its port on 127.0.0.1."""

    pid: int
    port: int


class Memory(Struct, frozen=True):
    """Resident memory in MiB: now, and at its highest."""

    now: float
    peak: float


@contextmanager
def running(words: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Start `python WORDS` in the project's folder, wait until it listens, end it with SIGTERM.

    Raises RuntimeError with what it said when it ends before it listens, or does not listen in a minute.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, **(environ or {})}, stderr=said
        )
        try:
            yield Daemon(process.pid, _port(process, said.fileno()))
        finally:
            process.terminate()
            process.wait(timeout=_PATIENCE)


def _port(process: subprocess.Popen[bytes], log: int) -> int:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        text = os.pread(log, 1 << 20, 0)
        found = _SERVING.search(text)
        if found:
            return int(found[1])
        if process.poll() is not None:
            break
        time.sleep(0.05)
    words = os.pread(log, 1 << 20, 0).decode(errors="replace")
    raise RuntimeError(f"the daemon to be measured does not listen (exit status {process.poll()}). It said:\n{words}")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads, those that ended too; the sum /proc/PID/stat gives, but in nanoseconds.

    Source: clock_getcpuclockid(3).
    """
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, f"process {pid}: {os.strerror(error)}")
    return time.clock_gettime_ns(clock.value) / 1e9


def memory(pid: int) -> Memory:
    """VmRSS and VmHWM of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return Memory(_field(status, "VmRSS") / 1024, _field(status, "VmHWM") / 1024)


def switches(pid: int) -> int:
    """Context switches of all living threads, voluntary or not; /proc/PID/status has those of the main one only."""
    texts = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(
        _field(text, kind) for text in texts for kind in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    )


def _field(status: str, name: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))
