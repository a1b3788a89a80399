"""Sums the CPU time of processes and their descendants of the same user, for jobs without a control group of their own.

Reads /proc/PID/stat (proc(5)). A lower bound: what a process used between the last scan and its end is not seen.
"""

import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from msgspec import Struct

from exporter.procfs import read_bytes

_STAT_BYTES = 4096
_MOST_PROCESSES = 32_768
"""Processes of one scan; the default of kernel.pid_max."""
_PARENT, _USER, _SYSTEM, _START = 1, 11, 12, 19
"""Fields 4, 14, 15 and 22 of /proc/PID/stat, counted from the third."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessTime(Struct, frozen=True):
    """A process as one scan found it."""

    parent: int
    start: int
    """Clock ticks since boot; with the pid it identifies the process."""
    ticks: int
    """CPU time, user and system."""
    uid: int


def scan(proc: Path) -> dict[int, ProcessTime]:
    """Read all processes below `proc`, at most _MOST_PROCESSES. Raises OSError if there is no such directory."""
    with os.scandir(proc) as entries:
        pids = [int(entry.name) for entry in islice(entries, 2 * _MOST_PROCESSES) if entry.name.isdecimal()]
    found = ((pid, _read(proc / str(pid))) for pid in sorted(pids)[:_MOST_PROCESSES])
    return {pid: each for pid, each in found if each is not None}


def _read(folder: Path) -> ProcessTime | None:
    try:
        fields = read_bytes(folder / "stat", _STAT_BYTES).rpartition(b")")[2].split()
        ticks = int(fields[_USER]) + int(fields[_SYSTEM])
        return ProcessTime(int(fields[_PARENT]), int(fields[_START]), ticks, folder.stat().st_uid)
    except (OSError, ValueError, IndexError):
        return None


def family(processes: Mapping[int, ProcessTime], roots: Iterable[int]) -> dict[int, ProcessTime]:
    """Return the processes `roots` and their descendants that run as the same user, by pid."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found: dict[int, ProcessTime] = {}
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = processes[pid]
            waiting += [child for child in children.get(pid, ()) if processes[child].uid == processes[pid].uid]
    return found


def used_seconds(before: Mapping[int, ProcessTime], now: Mapping[int, ProcessTime]) -> float:
    """Return the CPU seconds that the processes in both scans used between them."""
    return (
        sum(
            max(0, process.ticks - before[pid].ticks)
            for pid, process in now.items()
            if pid in before and before[pid].start == process.start
        )
        / TICKS_PER_SECOND
    )
