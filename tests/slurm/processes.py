"""Finds and ends the processes and cgroups of one cluster among all others of the machine.

A process belongs to a cluster if a file it has open is in the cluster's directory, or its environment names one of the
cluster's nodes.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_PATIENCE = 10.0


def processes(directory: Path, nodes: Iterable[str]) -> list[int]:
    """Return the pids of the rig in `directory` (as the host sees it)."""
    marks = {f"SLURMD_NODENAME={node}".encode() for node in nodes}
    own = os.getpid()
    return [pid for pid in _pids() if pid != own and (marks & _environ(pid) or _open(pid, f"{directory}/"))]


def task(node: str, job: str, rank: int) -> int | None:
    """Return the pid of a job's task with that rank, if on the node: started by srun, or a child of that."""
    marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
    return next((pid for pid in _pids() if marks <= _environ(pid)), None)


def end(directory: Path, nodes: Iterable[str]) -> None:
    """Terminate them, and kill those that remain. Raises AssertionError if one survives."""
    names = tuple(nodes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _PATIENCE / 2
        _signal(processes(directory, names), number)
        while processes(directory, names) and time.monotonic() < deadline:
            time.sleep(0.05)
    left = processes(directory, names)
    assert not left, f"processes of the cluster in {directory} are still there: {left}"


def remove_groups(nodes: Iterable[str]) -> None:
    """Remove the nodes' cgroups, the deepest first; those in use stay."""
    for node in nodes:
        names = (f"*/slurm_{node}", f"*/{node}_slurmstepd.scope", f"*/*.slice/{node}_slurmstepd.scope")
        for top in (path for name in names for path in _GROUPS.glob(name)):
            inner = [Path(path) for path, _, _ in os.walk(top, topdown=False)]
            for group in inner:
                with contextlib.suppress(OSError):
                    group.rmdir()
            if top.parent.suffix == ".slice" and top.parent.name != "system.slice":
                with contextlib.suppress(OSError):
                    top.parent.rmdir()


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _environ(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _open(pid: int, below: str) -> bool:
    try:
        return any(_target(link).startswith(below) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return f"{link.readlink()}"
    except OSError:
        return ""
