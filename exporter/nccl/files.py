"""Finds the files that NCCL's profiler plugins write in the processes of jobs, and reads what is appended to them.

A file is found among those that the process has open for writing, by the name that the plugin's settings give it. So
it is the process's own, in any container, whatever it is called, and no path of a user's is followed; what the lines
claim about host and pid is ignored. All plugins keep their file open until the process ends.

Bounded in files, and in bytes per file, user and poll; what falls behind is skipped and counted.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from exporter.core.model import SECOND, CollectiveReport
from exporter.job_files import FileRefusedError, FileTail, is_open_for_writing, open_written_file
from exporter.nccl.collectives import MICROSECOND, CollectiveAccumulator
from exporter.nccl.comma import CommaReader
from exporter.nccl.events import LINE_BYTES, CollectiveEvent, EventError
from exporter.nccl.inspector import InspectorReader
from exporter.nccl.settings import PluginSettings, read_settings
from exporter.procfs import innermost_pid, start_ticks
from exporter.workloads import WorkloadProcess

log = logging.getLogger(__name__)
PREFIX = "collective"
COUNTS = tuple(
    f"{PREFIX}_{name}"
    for name in (
        "files", "lines", "events", "malformed", "unknown_version", "no_context", "untimed", "absurd", "undated",
        "dropped", "truncated", "skipped", "too_long", "behind", "shared", "not_a_file", "not_written", "too_many",
        "unreadable", "reports_dropped",
    )
)  # fmt: skip
"""Names of all counts. Files opened, lines read, events found. Lines rejected: malformed, of an unknown version, after
a gap without the header they refer to, without a time of execution, with impossible numbers, or with a time that is
not now; events that the plugin dropped. Files truncated, or skipped in part because they grew too fast; lines too
long; polls that left something unread. Files rejected: open in two processes, not a regular file, no longer open for
writing, too many, unreadable. Reports dropped because the queue was full."""
MOST_PROCESSES = 256
"""Maximum processes whose files are read at the same time."""
MOST_PROCESSES_OF_A_JOB = 64
FILE_BYTES = 1024 * 1024
"""Maximum bytes read of one file per poll."""
USER_BYTES = 2 * 1024 * 1024
"""Maximum bytes read of one user's files per poll."""
POLL_BYTES = 4 * 1024 * 1024
"""Maximum bytes read of all files per poll."""
FRESH_BYTES = 1024 * 1024
"""A larger file is read from its end on, as one is that was there before its process was found."""
SEARCH_INTERVAL = 5 * SECOND
LONGEST_SEARCH_INTERVAL = 60 * SECOND
"""Time between two searches for a process's file; it grows with each that finds none."""
EXPIRY = 60 * SECOND
"""A process that was not listed for this long is forgotten, though it still runs."""
OLDEST = 24 * 3600 * SECOND
"""An event that ended longer ago has no valid time."""
NEWEST = SECOND
"""Likewise one that ends so long from now."""
MOST_DESCRIPTORS = 4096
"""Maximum open files of a process among which the plugin's is searched."""
_REFUSALS = 1024
"""Maximum rejections that are remembered."""

FileKey = tuple[int, int]
"""Device and inode."""


class EventReader(Protocol):
    """Parses the lines of one file in order."""

    source: str
    """Name of the plugin."""
    dropped: int
    """Events that the plugin itself has lost."""

    def read(self, raw: bytes) -> CollectiveEvent | None:
        """Parse a line; None if it has no event. Raises EventError."""
        ...

    def reset(self) -> None:
        """Forget what earlier lines said, because lines were skipped."""
        ...


class PluginFile(Struct, frozen=True):
    """A file that a plugin has open."""

    path: str
    """/proc/PID/fd/N."""
    name: str
    """The last part of its path."""
    source: str
    """The plugin: inspector or comma."""

    def open_reader(self) -> EventReader:
        """A reader of its lines."""
        return InspectorReader() if self.source == InspectorReader.source else CommaReader()


def find_plugin_file(folder: Path, settings: PluginSettings) -> PluginFile | None:
    """The file that a plugin writes in this process; None if there is none yet.

    `folder` is the process's /proc directory. Raises OSError if its open files cannot be listed.
    """
    pid = innermost_pid(folder)
    if not pid:
        return None
    with os.scandir(folder / "fd") as entries:
        for entry in islice(entries, MOST_DESCRIPTORS):
            name = _name_of(entry.path)
            source = settings.source_of(name, pid)
            if source and is_open_for_writing(entry.path):
                return PluginFile(entry.path, name, source)
    return None


def _name_of(path: str) -> str:
    """Last part of the path that a descriptor leads to; empty if it has just been closed."""
    try:
        return Path(path).readlink().name
    except OSError:
        return ""


class _Plugin(Struct):
    """A process whose plugin writes, or may soon write, a file."""

    process: WorkloadProcess
    ticks: int
    """Start of the process, in clock ticks since boot."""
    user: int
    settings: PluginSettings
    last_seen: int
    search_at: int
    searches: int = 0
    key: FileKey | None = None
    tail: FileTail | None = None
    reader: EventReader | None = None
    accumulator: CollectiveAccumulator | None = None


class CollectiveWatcher:
    """Reads the files of all processes. Not thread-safe; calls may block on disk reads."""

    def __init__(self, *, proc: str = "/proc") -> None:
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self._proc = Path(proc)
        self._plugins: dict[int, _Plugin] = {}
        """By pid."""
        self._without: dict[int, int] = {}
        """Processes without a plugin: their pid, and their start."""
        self._refused: set[str] = set()
        self._polls = 0

    def poll(self, now: int, *, wall: int, processes: Sequence[WorkloadProcess]) -> list[CollectiveReport]:
        """Reports of what was written since the last poll; `now` must not decrease. Handles all file errors."""
        ended = self._update_processes(now, processes)
        for plugin in self._plugins.values():
            if plugin.tail is None and now >= plugin.search_at:
                self._search(plugin, now)
        spent: Counter[int] = Counter()
        for plugin in (*ended, *self._turns()):
            self._read(plugin, spent, now=now, wall=wall)
        reports = [self._report(plugin, final=True) for plugin in ended]
        reports += [self._report(plugin) for plugin in self._plugins.values()]
        for plugin in ended:
            _close(plugin)
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Close all files."""
        for plugin in self._plugins.values():
            _close(plugin)
        self._plugins.clear()

    def _update_processes(self, now: int, processes: Sequence[WorkloadProcess]) -> list[_Plugin]:
        """Add new processes with a plugin; remove and return those that have ended or are no longer listed."""
        listed = {process.pid: process for process in processes}
        ticks = {pid: start_ticks(self._proc / str(pid)) for pid in listed.keys() | self._plugins.keys()}
        ended = [
            pid
            for pid, plugin in self._plugins.items()
            if ticks[pid] != plugin.ticks or (pid not in listed and now - plugin.last_seen > EXPIRY)
        ]
        gone = [self._plugins.pop(pid) for pid in ended]
        self._without = {pid: start for pid, start in self._without.items() if ticks.get(pid) == start}
        for pid, process in listed.items():
            plugin, start = self._plugins.get(pid), ticks[pid]
            if plugin is not None:
                plugin.process, plugin.last_seen = process, now
            elif start is not None and pid not in self._without:
                self._examine(process, start, now)
        return gone

    def _examine(self, process: WorkloadProcess, ticks: int, now: int) -> None:
        """Read the settings of a new process; they do not change while it runs."""
        folder = self._proc / str(process.pid)
        settings, user = read_settings(folder), _owner(folder)
        if user is None or not (settings.inspector or settings.latency_file):
            self._without[process.pid] = ticks
            return
        of_job = sum(plugin.process.job_id == process.job_id for plugin in self._plugins.values())
        if len(self._plugins) >= MOST_PROCESSES or of_job >= MOST_PROCESSES_OF_A_JOB:
            self._refuse(
                "too_many", f"processes: those of job {process.job_id} are too many, {process.pid} is left out"
            )
            self._without[process.pid] = ticks
            return
        self._plugins[process.pid] = _Plugin(process, ticks, user, settings, now, now)

    def _search(self, plugin: _Plugin, now: int) -> None:
        """Look for the process's file, and open it."""
        existed = not plugin.searches
        plugin.searches += 1
        plugin.search_at = now + min(LONGEST_SEARCH_INTERVAL, SEARCH_INTERVAL * plugin.searches)
        pid, job_id = plugin.process.pid, plugin.process.job_id
        try:
            found = find_plugin_file(self._proc / str(pid), plugin.settings)
            if found is not None:
                self._open(plugin, found, existed=existed)
        except FileRefusedError as err:
            self._refuse(err.kind, f"process {pid} of job {job_id}: {err}")
        except OSError as err:
            self._refuse("unreadable", f"the NCCL plugin's file of process {pid}, job {job_id}: {err.strerror}")

    def _open(self, plugin: _Plugin, file: PluginFile, *, existed: bool) -> None:
        handle, pid, job_id = open_written_file(file.path), plugin.process.pid, plugin.process.job_id
        try:
            found = os.fstat(handle)
            plugin.key = (found.st_dev, found.st_ino)
            if self._is_shared(plugin):
                self._refuse("shared", f"{file.name} is written by two processes of job {job_id}")
                return
            offset = end_of_last_line(handle, found.st_size) if existed or found.st_size > FRESH_BYTES else 0
            plugin.tail = FileTail(handle, self.counts, offset=offset, prefix=PREFIX, line_bytes=LINE_BYTES)
            plugin.reader, plugin.accumulator = file.open_reader(), CollectiveAccumulator()
        finally:
            if plugin.tail is None:
                os.close(handle)
        self.counts[f"{PREFIX}_files"] += 1
        log.info("reading %r, in which process %d of job %s times its communication", file.name, pid, job_id)

    def _is_shared(self, plugin: _Plugin) -> bool:
        """Whether another process writes the same file; then nobody's is read, as no line can be attributed."""
        others = [p for p in self._plugins.values() if p is not plugin and p.key == plugin.key]
        for other in others:
            _close(other)
        return bool(others)

    def _turns(self) -> Iterator[_Plugin]:
        """All processes; the first one rotates, because POLL_BYTES may not suffice for all."""
        plugins = list(self._plugins.values())
        self._polls += 1
        first = self._polls % max(1, len(plugins))
        return iter(plugins[first:] + plugins[:first])

    def _read(self, plugin: _Plugin, spent: Counter[int], *, now: int, wall: int) -> None:
        """Read a file as far as the limits allow; `spent` are bytes by user."""
        tail, reader, accumulator = plugin.tail, plugin.reader, plugin.accumulator
        if tail is None or reader is None or accumulator is None:
            return
        most = min(FILE_BYTES, USER_BYTES - spent[plugin.user], POLL_BYTES - spent.total())
        try:
            written = tail.read(most)
        except OSError as err:
            self._refuse("unreadable", f"the NCCL plugin's file of job {plugin.process.job_id}: {err.strerror}")
            return
        spent[plugin.user] += written.size
        self.counts[f"{PREFIX}_behind"] += tail.unread() > 0
        if written.rewritten or written.gap:
            reader.reset()
        accumulator.add(list(self._events(reader, written.lines, wall)), offset=now - wall)

    def _events(self, reader: EventReader, lines: Iterable[bytes], wall: int) -> Iterator[CollectiveEvent]:
        before = reader.dropped
        for raw in lines:
            self.counts[f"{PREFIX}_lines"] += 1
            try:
                event = reader.read(raw)
            except EventError as err:
                self.counts[f"{PREFIX}_{err.kind}"] += 1
                continue
            if event is not None and not wall - OLDEST <= event.end * MICROSECOND <= wall + NEWEST:
                self.counts[f"{PREFIX}_undated"] += 1
            elif event is not None:
                self.counts[f"{PREFIX}_events"] += 1
                yield event
        self.counts[f"{PREFIX}_dropped"] += reader.dropped - before

    def _report(self, plugin: _Plugin, *, final: bool = False) -> CollectiveReport | None:
        if plugin.reader is None or plugin.accumulator is None:
            return None
        return plugin.accumulator.report(plugin.process, plugin.reader.source, final=final)

    def _refuse(self, count: str, reason: str) -> None:
        """Count and log a rejection, once per reason."""
        if reason in self._refused:
            return
        if len(self._refused) >= _REFUSALS:
            self._refused.clear()
        self._refused.add(reason)
        self.counts[f"{PREFIX}_{count}"] += 1
        log.warning("communication not read: %s", reason)


def _close(plugin: _Plugin) -> None:
    if plugin.tail is not None:
        plugin.tail.close()
        plugin.tail = None


def _owner(folder: Path) -> int | None:
    try:
        return folder.stat().st_uid
    except OSError:
        return None


def end_of_last_line(handle: int, size: int) -> int:
    """Offset behind the last whole line, or the file's size if no line of LINE_BYTES ends there. Raises OSError."""
    begin = max(0, size - LINE_BYTES)
    last = os.pread(handle, size - begin, begin)
    return begin + last.rfind(b"\n") + 1 if b"\n" in last else size
