"""Control groups: a memory limit around the daemon, and the groups that Slurm would make for its jobs; v1 and v2."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from tests.fuzz.redteam.target import JOBS, group_of

_V1_OF_SLURM = ("freezer", "memory", "cpuacct", "devices")


class Memory(Struct, frozen=True):
    """What the kernel counted of the daemon's memory."""

    how: str
    peak: int
    out_of_memory: int
    limit_reached: int


class MemoryGroup:
    """A group that limits the daemon's memory; without a right to make one the resident set is watched instead."""

    def __init__(self, limit: int) -> None:
        self.limit, self._peak, self._folder = limit, 0, None
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        for base, names in ((v1, _V1), (v2, _V2)):
            folder = base / f"redteam-memory-{os.getpid()}"
            if not (base / names.present).exists():
                continue
            try:
                folder.mkdir()
                (folder / names.limit).write_text(str(limit))
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            self._folder, self._names = folder, names
            break

    def join(self) -> None:
        """Put this process into it."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def watch(self, pid: int) -> int:
        """Return the resident bytes of the daemon."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            size = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "kB" in line}
            self._peak = max(self._peak, size.get("VmHWM", 0))
            return size.get("VmRSS", 0)
        return 0

    def read(self) -> Memory:
        """Return what was counted so far."""
        if self._folder is None:
            return Memory("no control group: the resident set was watched", self._peak, 0, 0)
        peak = self._number(self._names.peak)
        counts = _pairs((self._folder / self._names.events).read_text(encoding="utf-8"))
        if self._names is _V1:
            return Memory("v1", peak, counts.get("oom_kill", 0), self._number("memory.failcnt"))
        return Memory("v2", peak, counts.get("oom_kill", 0) + counts.get("oom", 0), counts.get("max", 0))

    def _number(self, name: str) -> int:
        assert self._folder is not None
        try:
            return int((self._folder / name).read_text(encoding="utf-8"))
        except OSError:  # memory.peak came with Linux 5.19
            return self._peak

    def peak_resident(self) -> int:
        return self._peak

    def remove(self) -> None:
        """Take it away, once the daemon has left."""
        for _ in range(50):
            if self._folder is None or not self._folder.exists():
                return
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            time.sleep(0.1)


class _Names(Struct, frozen=True):
    present: str
    limit: str
    peak: str
    events: str


_V1 = _Names("memory.limit_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
_V2 = _Names("cgroup.controllers", "memory.max", "memory.peak", "memory.events")


def _pairs(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (line.partition(" ") for line in text.splitlines())}


@contextmanager
def weight() -> Iterator[Path | None]:
    """Make a group with the unit's CPUWeight=500, five times that of others; None where there is none to be had."""
    base = Path("/sys/fs/cgroup/cpu")
    name, value = ("cpu.shares", 5120) if (base / "cpu.shares").exists() or base.is_dir() else ("cpu.weight", 500)
    folder = (base if base.is_dir() else Path("/sys/fs/cgroup")) / f"redteam-cpu-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(value))
    except OSError:
        _remove([folder])
        yield None
        return
    try:
        yield folder
    finally:
        _remove([folder])


@contextmanager
def of_jobs() -> Iterator[tuple[Path, ...]]:
    """Make the groups of the jobs where Slurm would; gives the roots in which they are, none where that is denied."""
    roots = tuple(root for root in _roots() if os.access(root, os.W_OK) and os.getuid() == 0)
    made: list[Path] = []
    try:
        for root in roots:
            for job in JOBS:
                made += _made(root, Path(group_of(job)))
        yield roots
    finally:
        _remove(made)


def _roots() -> list[Path]:
    base = Path("/sys/fs/cgroup")
    found = [base / name for name in _V1_OF_SLURM if (base / name / "cgroup.procs").exists()]
    return found or ([base] if (base / "cgroup.controllers").exists() else [])


def delegated_roots() -> tuple[Path, ...]:
    """Return where a user may be given a group of his own: every hierarchy."""
    base = Path("/sys/fs/cgroup")
    if os.getuid() != 0:
        return ()
    more = [base / name for name in ("systemd", "unified") if (base / name / "cgroup.procs").exists()]
    return (*_roots(), *more)


def _made(root: Path, below: Path) -> list[Path]:
    """Return the folders that are to be removed: those of these jobs, and what they are in where it is new."""
    made, folder = [], root
    for part in below.parts:
        folder /= part
        if not folder.exists() or folder.parent != root:
            folder.mkdir(exist_ok=True)
            made.append(folder)
    return made


def _remove(folders: list[Path]) -> None:
    """Remove them once their processes are gone; what another run still uses stays."""
    until = time.monotonic() + 5
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        while folder.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.01)
