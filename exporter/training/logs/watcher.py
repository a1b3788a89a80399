"""Finds the logs of the jobs on this node, opens those that are safe to read, and reads what is appended to them.

Owns the open files, the thread, and the bytes read at each poll; a file system that hangs blocks this thread alone. An
existing log counts from its end on, with its first and last lines read for constants; a new one counts from its start.
Refuses to open anything but regular files that the job writes or its user owns, for the daemon may be root: see
`find_logs` and `open_log`.
"""

import glob
import logging
import os
import re
import stat
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.clock import Clock
from exporter.config import Config, FollowSettings
from exporter.core.model import SECOND
from exporter.procfs import parent_pid
from exporter.training.logs.formats import LineReader, LogEvent, parse_line
from exporter.training.logs.tracker import LineTime, LogBatch, LogTracker, TimedMessage, timed_messages
from exporter.training.message import LoggedMessage, Message, MessageError, decode_message
from exporter.workloads import WorkloadProcess

# Where the logs of the jobs here are, and which of them may be opened.
#
# Owns what is safe to open. Refuses everything but regular files, and by a path those of others than the job's user:
# this daemon may be root, and whoever can write a folder could lead it anywhere.
#
# - The standard output of a process is opened through /proc/PID/fd/1 (proc(5)), whatever mount namespace it is in, and
#   only if the process has it open for writing. Where its own is a pipe or a terminal, that of the nearest ancestor
#   which is in the same control group and is the same user's: torchrun, srun's shell, a job script.
# - A path's file must be owned by a user (not root) who runs the job: what he leads us to he could read himself. Or by
#   root or this daemon's user, as container runtimes write them, if nobody else could have put it there: no symbolic
#   link on the way, no second name, each folder theirs and writable by them alone (or sticky).
# - A file is first opened as a mere name (O_PATH, open(2)), looked at, and only then for reading, so that no device is
#   woken and no pipe waited for.


MOST_MATCHES = 64
"""Files of one row and job."""
_JOB_PLACEHOLDER = "{job_id}"
_MOST_ANCESTORS = 16
_TEXT_BYTES = 64 * 1024
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class LogRefusedError(Exception):
    """The file is not followed; the first word is the count's name, the rest is for people."""


class LogLocation(Struct, frozen=True):
    """A log that may be followed."""

    path: str
    job_id: str
    process: WorkloadProcess
    """Who speaks in it: the process of the lowest rank."""
    framework: str
    allowed_owners: frozenset[int] | None = None
    """Who may own it; None: a process of the job has it open for writing."""


def find_logs(
    rows: Sequence[FollowSettings], processes: Sequence[WorkloadProcess], *, proc: str, search: bool
) -> Iterator[LogLocation]:
    """Logs of the guests' jobs by the rows; with `search` also those that are looked for by a path."""
    for row in rows:
        fitting = sorted((p for p in processes if p.workload_class == row.workload_class), key=_rank_order)
        if not row.path:
            yield from _stdout_logs(row, fitting, Path(proc))
        elif search:
            yield from _path_logs(row, fitting, Path(proc))


def open_log(location: LogLocation) -> int:
    """A file descriptor to read it; raises RefusedError, and OSError where it cannot be opened."""
    name = os.open(location.path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(name)
        if not stat.S_ISREG(found.st_mode):
            raise LogRefusedError(f"log_not_a_file {location.path} is no regular file")
        if location.allowed_owners is not None:
            _check_owner(location.path, found, location.allowed_owners)
        return os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(name)


def _rank_order(process: WorkloadProcess) -> tuple[int, int]:
    """Rank 0 first, who has none last."""
    return (int(process.rank) if process.rank.isdecimal() else 1 << 62, process.pid)


def _stdout_logs(row: FollowSettings, processes: Iterable[WorkloadProcess], proc: Path) -> Iterator[LogLocation]:
    for process in processes:
        path = next(
            (path for pid in _with_ancestors(process.pid, proc) if (path := _stdout_path(proc / str(pid)))), None
        )
        if path:
            yield LogLocation(path, process.job_id, process, row.framework)


def _stdout_path(folder: Path) -> str | None:
    """Its standard output, if that is a regular file which it may write to."""
    path = f"{folder}/fd/1"
    try:
        writes = os.lstat(path).st_mode & stat.S_IWUSR  # the link's mode is how it was opened: proc(5)
        return path if writes and stat.S_ISREG(Path(path).stat().st_mode) else None
    except PermissionError:
        return path  # opening it will say why
    except OSError:
        return None


def _with_ancestors(pid: int, proc: Path) -> Iterator[int]:
    """The process and its ancestors as far as they are surely in the same job."""
    identity = _user_and_cgroup(proc / str(pid))
    for _ in range(_MOST_ANCESTORS):
        yield pid
        pid = parent_pid(proc / str(pid))
        if pid <= 1 or identity is None or _user_and_cgroup(proc / str(pid)) != identity:
            return


def _user_and_cgroup(folder: Path) -> tuple[int, bytes] | None:
    """User and control groups; None where they may not be known."""
    try:
        with (folder / "cgroup").open("rb") as file:
            return folder.stat().st_uid, file.read(_TEXT_BYTES)
    except OSError:
        return None


def _path_logs(row: FollowSettings, processes: Sequence[WorkloadProcess], proc: Path) -> Iterator[LogLocation]:
    if _JOB_PLACEHOLDER not in row.path:
        return  # it would be anybody's
    for job_id in sorted({process.job_id for process in processes}):
        own = [process for process in processes if process.job_id == job_id]
        users = frozenset(uid for process in own if (uid := _owner(proc / str(process.pid))) is not None)
        for path in _matching_files(row.path, job_id):
            yield LogLocation(path, job_id, own[0], row.framework, users)


def _matching_files(pattern: str, job_id: str) -> list[str]:
    """Oldest first. A job's id is text that others may have chosen: it leads nowhere and matches only itself."""
    if not job_id or job_id.startswith("/") or {"..", "."} & set(job_id.split("/")) or "\0" in job_id:
        return []
    found = islice(glob.iglob(pattern.replace(_JOB_PLACEHOLDER, glob.escape(job_id))), MOST_MATCHES)  # noqa: PTH207  it is absolute
    return sorted(found, key=_modified_at)


def _modified_at(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _owner(folder: Path) -> int | None:
    try:
        return folder.stat().st_uid
    except OSError:
        return None


def _check_owner(path: str, found: os.stat_result, users: frozenset[int]) -> None:
    if found.st_uid != 0 and found.st_uid in users:
        return
    ours = {0, os.geteuid()}
    if found.st_uid not in ours:
        raise LogRefusedError(f"log_owner {path} belongs to user {found.st_uid}, who does not run the job")
    if found.st_nlink > 1 or not _is_protected(path, found, ours):
        raise LogRefusedError(
            f"log_owner {path} belongs to this daemon's user or root, and others could have put it there: each"
            " folder above it must be writable by them alone, no link may lead to it, and it may have no second name"
        )


def _is_protected(path: str, found: os.stat_result, ours: set[int]) -> bool:
    """Whether nobody else could have chosen what is at `path`."""
    name = os.lstat(path)
    if (name.st_dev, name.st_ino) != (found.st_dev, found.st_ino):
        return False
    folders = [os.lstat(folder) for folder in Path(path).absolute().parents]
    return all(
        stat.S_ISDIR(folder.st_mode)
        and folder.st_uid in ours
        and (not folder.st_mode & _OTHERS_WRITE or folder.st_mode & stat.S_ISVTX)
        for folder in folders
    )


# The lines that are written to a file from now on.
#
# Owns what files go through: growing, being truncated, written anew, cut in the middle of a line. Refuses to read more
# than it is given leave for, and to keep a line that has no end.


LINE_BYTES = 16 * 1024
"""A longer one is no line of a training log."""
BEHIND_BYTES = 16 * 1024 * 1024
"""A file that has got so far ahead is taken up again near its end."""
_RESTART_BYTES = 64 * 1024
_HEAD_BYTES = 64
_LINE_ENDS = re.compile(rb"[\r\n]+")
"""A progress bar ends its lines with a carriage return."""


class TailChunk(Struct, frozen=True):
    """What has come to a file."""

    lines: tuple[bytes, ...] = ()
    size: int = 0
    """Bytes read."""
    rewritten: bool = False
    """Before these lines the file was emptied or written anew."""
    gap: bool = False
    """Lines before these were left out."""


class FileTail:
    """One open file, which it owns and closes."""

    def __init__(self, handle: int, counts: Counter[str], *, offset: int) -> None:
        """Follow `handle` from `offset` on; counts log_truncated, log_skipped, log_too_long. Raises OSError."""
        self._handle, self._counts, self._offset = handle, counts, offset
        self._part, self._in_long_line = b"", False
        self._head = os.pread(handle, _HEAD_BYTES, 0)

    def read(self, most: int) -> TailChunk:
        """What was written since, `most` bytes of it at most; raises OSError."""
        size = os.fstat(self._handle).st_size
        rewritten = self._was_rewritten(size)
        if rewritten:
            self._counts["log_truncated"] += 1
            self._seek(0)
        gap = size - self._offset > BEHIND_BYTES
        if gap:
            self._counts["log_skipped"] += 1
            self._seek(size - _RESTART_BYTES)
            self._in_long_line = True  # the first piece is the end of a line
        chunk = os.pread(self._handle, most, self._offset)
        self._offset += len(chunk)
        return TailChunk(self._split(chunk.replace(b"\0", b"")), len(chunk), rewritten, gap)

    def modified_at(self) -> int:
        """When somebody last wrote to it, Unix nanoseconds; 0 where the file system does not say."""
        try:
            return os.fstat(self._handle).st_mtime_ns
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _was_rewritten(self, size: int) -> bool:
        """Shorter than what was read, or with another beginning: both are done to a file that others write to."""
        if size < self._offset:
            self._head = os.pread(self._handle, _HEAD_BYTES, 0)
            return True
        head = os.pread(self._handle, _HEAD_BYTES, 0) if size > self._offset else self._head
        known, self._head = self._head, head
        return not head.startswith(known)

    def _seek(self, offset: int) -> None:
        self._offset, self._part, self._in_long_line = offset, b"", False

    def _split(self, chunk: bytes) -> tuple[bytes, ...]:
        *lines, part = _LINE_ENDS.split(self._part + chunk)
        if self._in_long_line and lines:
            lines, self._in_long_line = lines[1:], False
        whole = tuple(line for line in lines if line and len(line) <= LINE_BYTES)
        self._counts["log_too_long"] += sum(len(line) > LINE_BYTES for line in lines)
        if len(part) > LINE_BYTES and not self._in_long_line:
            self._counts["log_too_long"] += 1
            self._in_long_line = True
        self._part = b"" if self._in_long_line else part
        return whole


# All logs that are followed, one look at a time.
#
# Owns which files are open, how much is read at a look, and when what was read took place. A log that was there before
# its job was known here counts from its end on; its beginning and its last lines are read for what holds for good (the
# world's size), whose format it is, and how far the job had come. One that comes later is read from its beginning.


log = logging.getLogger(__name__)
COUNTS = (
    "log_files", "log_lines", "log_understood", "log_messages", "log_truncated", "log_skipped", "log_too_long",
    "log_not_a_file", "log_owner", "log_shared", "log_too_many", "log_unreadable", "log_absurd", "log_dropped",
)  # fmt: skip
"""All kinds that are ever counted. Files opened; lines read, and of those the ones that said something; messages;
files emptied, or skipped in part for having grown too fast; lines too long. Then what was refused: no regular file,
not the job's, one of two jobs, one too many, not readable; figures that no message may have; messages nobody took."""
MOST_FILES = 256
"""Followed at a time."""
FILE_BYTES = 256 * 1024
"""Read of one file at a look."""
POLL_BYTES = 2 * 1024 * 1024
"""Read of all files at a look."""
FRESH_BYTES = 1024 * 1024
"""A larger file was not begun since the last look, whenever it was found."""
HEAD_BYTES = 64 * 1024
TAIL_BYTES = 16 * 1024
"""Read of what was written before."""
SEARCH_INTERVAL = 5 * SECOND
"""Between two looks for files by their paths."""
EXPIRY = 60 * SECOND
"""A file, or a job, that is not found for so long is forgotten."""
_REFUSALS = 1024

FileKey = tuple[int, int]
"""Device and inode."""


class _OpenLog(Struct):
    """A log that is followed."""

    tail: FileTail
    reader: LineReader
    name: str
    """Its path when it was found: what comes in its place after a rotation is the same writer's."""
    job_id: str
    process: WorkloadProcess
    last_seen: int
    """When it was last found."""


class _JobLogs(Struct):
    """A job that has a guest here, or had one a moment ago."""

    tracker: LogTracker
    last_seen: int
    reported_until: int | None = None
    """When its last word ended."""


class LogWatcher:
    """All that is followed. One call at a time; it may wait for a disk."""

    def __init__(self, rows: Sequence[FollowSettings], *, proc: str = "/proc") -> None:
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self._rows, self._proc = rows, proc
        self._files: dict[FileKey, _OpenLog] = {}
        self._jobs: dict[str, _JobLogs] = {}
        self._present: set[FileKey] = set()
        self._shared: set[FileKey] = set()
        self._refused: set[str] = set()
        self._searched_at, self._polls = -SEARCH_INTERVAL, 0

    def poll(self, now: int, *, wall: int, processes: Sequence[WorkloadProcess]) -> list[LoggedMessage]:
        """What has been written since the last look; `now` never falls. Never raises what a file could cause."""
        job_ids = {process.job_id for process in processes}
        new = job_ids - self._jobs.keys()
        search = bool(new) or now - self._searched_at >= SEARCH_INTERVAL
        self._searched_at = now if search else self._searched_at
        for job_id in job_ids:
            self._jobs.setdefault(job_id, _JobLogs(LogTracker(), now)).last_seen = now
        self._present.clear()
        for location in find_logs(self._rows, processes, proc=self._proc, search=search):
            self._visit(location, now, new=location.job_id in new)
        self._expire(now)
        turns = self._reading_order(job_ids)
        return [one for job_id, files in turns for one in self._read_job(self._jobs[job_id], files, now, wall)]

    def close(self) -> None:
        """Close all files."""
        for key in tuple(self._files):
            self._close(key)

    def _visit(self, location: LogLocation, now: int, *, new: bool) -> None:
        """Take note of a log, and open it if it is not."""
        try:
            found = Path(location.path).stat()
        except OSError as err:
            if not isinstance(err, FileNotFoundError):
                self._refuse(f"log_unreadable {location.path}: {err.strerror}")
            return
        key = (found.st_dev, found.st_ino)
        file = self._files.get(key)
        if key in self._shared or (file is not None and file.job_id != location.job_id):
            self._reject_shared(key, location)
        elif file is None:
            self._open(key, location, now, new=new)
        elif key not in self._present:  # the first of a look has the lowest rank
            self._present.add(key)
            file.process, file.last_seen = location.process, now

    def _reject_shared(self, key: FileKey, location: LogLocation) -> None:
        """Whose words they are cannot be known: it is nobody's log."""
        self._refuse(f"log_shared {location.path} is the log of two jobs")
        if len(self._shared) >= _REFUSALS:
            self._shared.clear()
        self._shared.add(key)
        if key in self._files:
            self._close(key)

    def _open(self, key: FileKey, location: LogLocation, now: int, *, new: bool) -> None:
        if len(self._files) >= MOST_FILES:
            self._refuse(f"log_too_many files: {MOST_FILES} are followed at a time, {location.path} is not")
            return
        try:
            handle = open_log(location)
            try:
                self._start_reading(key, location, handle, now, new=new)
            finally:
                if key not in self._files:
                    os.close(handle)
        except LogRefusedError as err:
            self._refuse(str(err))
        except OSError as err:
            self._refuse(f"log_unreadable {location.path}: {err.strerror}")

    def _start_reading(self, key: FileKey, location: LogLocation, handle: int, now: int, *, new: bool) -> None:
        found, reader = os.fstat(handle), LineReader(location.framework)
        if (found.st_dev, found.st_ino) != key:
            return  # changed in between: the next look sees what it is
        tracker = self._jobs[location.job_id].tracker
        offset = 0
        if new or found.st_size > FRESH_BYTES:
            offset = _read_history(handle, found.st_size, reader, tracker, now=now, steps=new)
        else:
            tracker.start_fresh()
        tail = FileTail(handle, self.counts, offset=offset)
        self._files[key] = _OpenLog(tail, reader, f"{location.path}\n", location.job_id, location.process, now)
        self._present.add(key)
        self.counts["log_files"] += 1
        log.info("following %r, the log of job %s", location.path, location.job_id)

    def _reading_order(self, job_ids: Iterable[str]) -> list[tuple[str, list[_OpenLog]]]:
        """Jobs with their files. Another job is the first each time, for there may be more than is read at a look.

        Of one job the file that was written to last is the last: after a rotation that is the new one.
        """
        files: dict[str, list[_OpenLog]] = {job_id: [] for job_id in sorted(job_ids)}
        for file in sorted(self._files.values(), key=lambda file: file.tail.modified_at()):
            if file.job_id in files:
                files[file.job_id].append(file)
        self._polls += 1
        self._bytes_left = POLL_BYTES
        turns = list(files.items())
        first = self._polls % max(1, len(turns))
        return turns[first:] + turns[:first]

    def _read_job(self, job: _JobLogs, files: Iterable[_OpenLog], now: int, wall: int) -> list[LoggedMessage]:
        batch = LogBatch([], 0)
        for file in files:
            messages = self._read_file(job.tracker, file, now)
            if messages:
                batch.messages += [(one, file.process) for one in messages]
                batch.end = max(batch.end, min(now, now - (wall - file.tail.modified_at())))
        if not batch.messages:
            return []
        if job.reported_until is not None and batch.end <= job.reported_until:
            batch.end = now  # by its clock the file system has gone back
        found = [one for one in timed_messages(batch, job.reported_until) if self._is_valid(one.message)]
        job.reported_until = batch.end
        self.counts["log_messages"] += len(found)
        return found

    def _read_file(self, tracker: LogTracker, file: _OpenLog, now: int) -> list[TimedMessage]:
        try:
            written = file.tail.read(min(FILE_BYTES, self._bytes_left))
        except OSError as err:
            self._refuse(f"log_unreadable log of job {file.job_id}: {err.strerror}")
            return []
        self._bytes_left -= written.size
        if written.rewritten:
            file.reader.reset()
        if written.gap:
            tracker.mark_gap()
        messages = [
            one
            for event, writer, timestamp in self._parse(written.lines, file.reader)
            for one in tracker.handle(event, writer=file.name + writer, at=LineTime(timestamp, now))
        ]
        return messages + tracker.flush_bar()

    def _parse(self, lines: Iterable[bytes], reader: LineReader) -> Iterator[tuple[LogEvent, str, float | None]]:
        for raw in lines:
            self.counts["log_lines"] += 1
            if reader.may_match(raw):
                log_line = parse_line(raw)
                event = reader.read(log_line.text)
                if event is not None:
                    self.counts["log_understood"] += 1
                    yield event, log_line.writer, log_line.timestamp

    def _is_valid(self, message: Message) -> bool:
        if message == Message():
            return False
        try:
            decode_message(msgspec.json.encode(message))
        except MessageError:
            self.counts["log_absurd"] += 1
            return False
        return True

    def _expire(self, now: int) -> None:
        for job_id in [job_id for job_id, job in self._jobs.items() if now - job.last_seen > EXPIRY]:
            del self._jobs[job_id]
        for key in [k for k, f in self._files.items() if f.job_id not in self._jobs or now - f.last_seen > EXPIRY]:
            self._close(key)

    def _close(self, key: FileKey) -> None:
        file = self._files.pop(key)
        file.tail.close()
        job = self._jobs.get(file.job_id)
        if job is not None and all(other.name != file.name for other in self._files.values()):
            job.tracker.remove_writers(file.name)

    def _refuse(self, reason: str) -> None:
        """Count it, and say why, once."""
        if reason in self._refused:
            return
        if len(self._refused) >= _REFUSALS:
            self._refused.clear()
        self._refused.add(reason)
        kind, _, text = reason.partition(" ")
        self.counts[kind] += 1
        log.warning("log not followed: %s", text)


def _read_history(handle: int, size: int, reader: LineReader, tracker: LogTracker, *, now: int, steps: bool) -> int:
    """Read what holds for good in a log that was there before; where to go on from. Raises OSError."""
    for event, _, _ in _parse_chunk(os.pread(handle, HEAD_BYTES, 0), reader):
        if event.kind == "facts":
            tracker.handle(event, writer="", at=LineTime(None, now))
    begin = max(0, size - TAIL_BYTES)
    last = os.pread(handle, size - begin, begin)
    whole, newline, part = last.rpartition(b"\n")
    if steps:
        tracker.reset()
    for event, writer, timestamp in _parse_chunk(whole.partition(b"\n")[2] if begin else whole, reader):
        if steps or event.kind == "facts":
            tracker.handle(event, writer=writer, at=LineTime(timestamp, now))
    if steps:
        tracker.end_history()
    return size - len(part) if newline else size


def _parse_chunk(chunk: bytes, reader: LineReader) -> Iterator[tuple[LogEvent, str, float | None]]:
    for raw in chunk.replace(b"\r", b"\n").split(b"\n"):
        if len(raw) <= TAIL_BYTES and reader.may_match(raw):
            log_line = parse_line(raw)
            event = reader.read(log_line.text)
            if event is not None:
                yield event, log_line.writer, log_line.timestamp


# Logs, followed in a thread of their own.
#
# Owns the thread. It looks once each time that `take` is called: about once a second. A file system that hangs stops
# this thread, and nobody else.


MOST_PENDING = 4096
"""Messages that wait to be taken; the oldest are dropped."""
_WAIT_SECONDS = 5.0


class LogFollowerThread:
    """What the logs of the jobs here say. Without rows it does nothing, and has no thread."""

    def __init__(self, rows: Sequence[FollowSettings], clock: Clock, *, proc: str = "/proc") -> None:
        self._watcher, self._clock = LogWatcher(rows, proc=proc), clock
        self._counts = dict(self._watcher.counts)
        self._pending: deque[LoggedMessage] = deque(maxlen=MOST_PENDING)
        self._processes: tuple[WorkloadProcess, ...] = ()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-followers", daemon=True)
        if rows:
            self._thread.start()

    def poll(self, _now: int, processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        """All that was found since the last call; the next look is for these guests' logs. Does not wait."""
        with self._lock:
            self._processes = tuple(processes)
            found = tuple(self._pending)
            self._pending.clear()
        self._wake.set()
        return found

    def counts(self) -> Mapping[str, int]:
        """Since the start, by kind: see `watching.COUNTS`, which are all there are."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the thread and close the files; gives up waiting for a file system that hangs."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)
        if not self._thread.is_alive():
            self._watcher.close()

    def _run(self) -> None:
        while self._wake.wait() and not self._stop.is_set():
            self._wake.clear()
            with self._lock:
                processes = self._processes
            found = self._watcher.poll(self._clock.now(), wall=self._clock.wall(), processes=processes)
            with self._lock:
                dropped = max(0, len(self._pending) + len(found) - MOST_PENDING)
                self._watcher.counts["log_dropped"] += dropped
                self._pending.extend(found)
                self._counts = dict(self._watcher.counts)


def open_log_follower(config: Config, clock: Clock) -> LogFollowerThread:
    """Follow what the configuration's rows name."""
    for index, row in enumerate(config.follow):
        if row.path and "{job_id}" not in row.path:
            log.warning(
                "follow[%d].path %r has no {job_id}: nothing tells whose log it is, none is read", index, row.path
            )
    return LogFollowerThread(config.follow, clock, proc=config.host.proc)
