"""What a job leaves on its node while it is there: a socket a step, and a mapping file where there is a prolog.

Owns the two directories, read once a tick: that is all that is done while no job changes. Refuses to ask anybody.
slurmstepd binds `SlurmdSpoolDir/NODE_JOBID.STEPID[.HETCOMPONENT]` and removes it when the step is done (Slurm's
stepd_api.c); step 4294967291 is the batch script, 4294967292 the extern step that PrologFlags=Contain starts.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from exporter.schedulers.mapping_dir import JobFiles

_SOCKET = re.compile(r"(.+)_(\d{1,10})\.(\d{1,10})(?:\.\d{1,10})?")
_BATCH, _EXTERN = "4294967291", "4294967292"
_MOST = 20_000


class Trace(Struct, frozen=True):
    """What one job has here."""

    sockets: frozenset[tuple[str, int, int]] = frozenset()
    """Name, inode and change time of each; the same name with another inode is another step."""
    whole: frozenset[tuple[str, int, int]] = frozenset()
    """Of these the steps that are there as long as the job is: batch and extern."""
    files: tuple[str, ...] = ()
    """Names of its mapping files: "0", "0.7", a UUID."""
    written: int = 0
    """When the first of these was; Unix nanoseconds."""


class Seen(Struct, frozen=True):
    """What both directories say at one moment."""

    jobs: Mapping[str, Trace]
    problems: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    """Nodes whose sockets are there though they are not ours."""


class Traces:
    """Reads them."""

    def __init__(self, node: str, *, spool: Path | None, mapping: Path | None) -> None:
        """Either may be None: not there."""
        self._node, self._spool = node, spool
        self._files = None if mapping is None else JobFiles(mapping)

    def read(self, wall: int) -> Seen:
        """See now, `wall` in Unix nanoseconds; raises OSError where a directory cannot be read."""
        sockets, strangers = self._sockets() if self._spool is not None else ({}, set())
        files: dict[str, list[str]] = {}
        written: dict[str, int] = {}
        problems = []
        for name, content in sorted(self._files.read(wall).items()) if self._files else ():
            problems += [content.problem] if content.problem else []
            for job in content.jobs:
                files.setdefault(job, []).append(name)
                written[job] = min(content.written, written.get(job, content.written))
        jobs = {
            job: _trace(sockets.get(job, []), tuple(files.get(job, ())), written.get(job, 0))
            for job in sorted(sockets.keys() | files.keys())
        }
        jobs = {job: trace for job, trace in jobs.items() if trace.sockets or trace.files}
        return Seen(jobs, tuple(problems), tuple(sorted(strangers)))

    def _sockets(self) -> tuple[dict[str, list[os.DirEntry[str]]], set[str]]:
        found: dict[str, list[os.DirEntry[str]]] = {}
        strangers = set()
        with os.scandir(self._spool) as entries:
            for _, entry in zip(range(_MOST), entries, strict=False):
                match = _SOCKET.fullmatch(entry.name)
                if match is not None and match[1] == self._node:
                    found.setdefault(match[2], []).append(entry)
                elif match is not None and _mark(entry) is not None:
                    strangers.add(match[1])
        return found, strangers


def _trace(entries: list[os.DirEntry[str]], files: tuple[str, ...], written: int) -> Trace:
    sockets = frozenset(mark for mark in map(_mark, entries) if mark is not None)
    whole = frozenset(mark for mark in sockets if _step(mark[0]) in {_BATCH, _EXTERN})
    return Trace(sockets, whole, files, written)


def _step(name: str) -> str:
    match = _SOCKET.fullmatch(name)
    return match[3] if match else ""


def _mark(entry: os.DirEntry[str]) -> tuple[str, int, int] | None:
    """None: no socket, or gone since the directory was read."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    return (entry.name, status.st_ino, status.st_ctime_ns) if stat.S_ISSOCK(status.st_mode) else None
