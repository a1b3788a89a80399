"""Finds the logs of the jobs on this node, opens those that are safe to read, and reads what is appended to them.

Has a thread of its own, because a file system may hang, and a limit of bytes per poll. An existing log counts from its
end on, with its first and last lines read for constants; a new one counts from its start. Opens only regular files that
the job writes or its user owns, because the daemon may be root: see `find_logs` and `exporter.job_files`.
"""

import glob
import logging
import os
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
from exporter.connections import TokenBucket
from exporter.core.model import SECOND, Fault
from exporter.job_files import FileRefusedError, FileTail, is_open_for_writing, open_job_file
from exporter.procfs import parent_pid, read_bytes, user_id
from exporter.training.logs.formats import LineReader, LogEvent, parse_line
from exporter.training.logs.tracker import LineTime, LogTracker, TimedMessage, date_messages
from exporter.training.message import LoggedMessage, Message, ReportRefusedError, decode_message
from exporter.worker import Worker
from exporter.workloads import WorkloadProcess

# Finding the logs of jobs on this node: the standard output of a process, or, if that is a pipe or a terminal, that of
# the nearest ancestor in the same cgroup and of the same user (torchrun, srun's shell, a job script); and files by
# path. `job_files` has the rules of which are safe to open.


MOST_MATCHES = 64
"""Maximum files of one `follow` row and job."""
_JOB_PLACEHOLDER = "{job_id}"
_MOST_ANCESTORS = 16
_TEXT_BYTES = 64 * 1024


class LogLocation(Struct, frozen=True):
    """A log that may be followed."""

    path: str
    job_id: str
    process: WorkloadProcess
    """Process to which its messages are attributed: the one with the lowest rank."""
    framework: str
    allowed_owners: frozenset[int] | None = None
    """Uids that may own the file; None: a process of the job has it open for writing."""


def find_logs(
    rows: Sequence[FollowSettings], processes: Sequence[WorkloadProcess], *, proc: str, search: bool
) -> Iterator[LogLocation]:
    """Find the logs of the processes' jobs; with `search` also those of rows with a path."""
    for row in rows:
        selected = sorted((p for p in processes if p.workload_class == row.workload_class), key=_rank_order)
        if not row.path:
            yield from _stdout_logs(row, selected, Path(proc))
        elif search:
            yield from _path_logs(row, selected, Path(proc))


def _rank_order(process: WorkloadProcess) -> tuple[int, int]:
    """Sort key: rank 0 first, processes without a rank last."""
    return (int(process.rank) if process.rank.isdecimal() else 1 << 62, process.pid)


def _stdout_logs(row: FollowSettings, processes: Iterable[WorkloadProcess], proc: Path) -> Iterator[LogLocation]:
    for process in processes:
        path = next(
            (path for pid in _with_ancestors(process.pid, proc) if (path := _stdout_path(proc / str(pid)))), None
        )
        if path:
            yield LogLocation(path, process.job_id, process, row.framework)


def _stdout_path(folder: Path) -> str | None:
    """Path of the process's standard output if that is a regular file open for writing."""
    path = f"{folder}/fd/1"
    try:
        return path if is_open_for_writing(path) and stat.S_ISREG(Path(path).stat().st_mode) else None
    except PermissionError:
        return path  # opening it fails and is logged
    except OSError:
        return None


def _with_ancestors(pid: int, proc: Path) -> Iterator[int]:
    """The process and its ancestors with the same user and cgroups, which are in the same job."""
    identity = _user_and_cgroup(proc / str(pid))
    for _ in range(_MOST_ANCESTORS):
        yield pid
        pid = parent_pid(proc / str(pid))
        if pid <= 1 or identity is None or _user_and_cgroup(proc / str(pid)) != identity:
            return


def _user_and_cgroup(folder: Path) -> tuple[int, bytes] | None:
    """Uid and content of the cgroup file; None if unreadable."""
    try:
        return folder.stat().st_uid, read_bytes(folder / "cgroup", _TEXT_BYTES)
    except OSError:
        return None


def _path_logs(row: FollowSettings, processes: Sequence[WorkloadProcess], proc: Path) -> Iterator[LogLocation]:
    if _JOB_PLACEHOLDER not in row.path:
        return  # the file could belong to any job
    for job_id in sorted({process.job_id for process in processes}):
        own = [process for process in processes if process.job_id == job_id]
        users = frozenset(uid for process in own if (uid := user_id(proc / str(process.pid))) >= 0)
        for path in _matching_files(row.path, job_id):
            yield LogLocation(path, job_id, own[0], row.framework, users)


def _matching_files(pattern: str, job_id: str) -> list[str]:
    """Files that match the pattern, oldest first. Users may choose the job's ID: it is escaped and cannot traverse."""
    if not job_id or job_id.startswith("/") or {"..", "."} & set(job_id.split("/")) or "\0" in job_id:
        return []
    found = islice(glob.iglob(pattern.replace(_JOB_PLACEHOLDER, glob.escape(job_id))), MOST_MATCHES)  # noqa: PTH207  it is absolute
    return sorted(found, key=_modified_at)


def _modified_at(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


# Polling all followed logs.
#
# A log that existed before its job was detected counts from its end on; its beginning and its last lines are read for
# constants (the world size), the framework and the last step. A log created later is read from its beginning.


log = logging.getLogger(__name__)
COUNTS = (
    "log_files", "log_lines", "log_understood", "log_messages", "log_truncated", "log_behind", "log_skipped",
    "log_too_long",
    "log_not_a_file", "log_owner", "log_shared", "log_too_many", "log_unreadable", "log_absurd", "log_dropped",
    "log_mixed",
)  # fmt: skip
"""Names of all counts. Files opened; lines read, and lines parsed; messages; files truncated, left for later because
they or others of their user grow too fast, or then skipped in part; lines too long. Then rejections: not a regular
file, not the job's, used by two jobs, too many files, not readable; messages with invalid values; messages dropped
because the queue was full; logs of several trainings beside each other."""
MOST_FILES = 256
"""Maximum files followed at the same time."""
FILE_BYTES = 256 * 1024
"""Maximum bytes read of one file per poll."""
USER_RATE, USER_BURST = 256 * 1024, 1024 * 1024
"""Maximum bytes read of all files of one user, a second and at once: lines are parsed, which costs processor time."""
ALL_RATE, ALL_BURST = 512 * 1024, 2 * 1024 * 1024
"""Maximum bytes read of all files."""
FRESH_BYTES = 1024 * 1024
"""A larger file is treated as one that existed before its job was detected."""
HEAD_BYTES = 128 * 1024
TAIL_BYTES = 16 * 1024
"""Bytes read at the beginning and at the end of an existing log."""
SEARCH_INTERVAL = 5 * SECOND
"""Time between two searches for files by path."""
EXPIRY = 60 * SECOND
"""A file or job that was not found for this long is forgotten."""
_REFUSALS = 1024
"""Maximum rejections, shared files and files followed before that are remembered."""

FileKey = tuple[int, int]
"""Device and inode."""


class _OpenLog(Struct):
    """A followed log."""

    tail: FileTail
    reader: LineReader
    name: str
    """Path and newline, the prefix of its writers' names; after a rotation the new file has the same writers."""
    job_id: str
    process: WorkloadProcess
    last_seen: int
    """Time at which it was last found."""
    owner: int = -1
    """Uid of the file."""
    begin: int = 0
    """Offset of the job's first line; before it are those of another job."""
    behind: bool = False
    """Whether it grows faster than it may be read."""


class _Part(Struct, frozen=True):
    """The part of a file that a job wrote, as far as it was followed."""

    job_id: str
    begin: int
    end: int


class _JobLogs(Struct):
    """A job with a process on this node, now or until EXPIRY ago."""

    tracker: LogTracker
    last_seen: int
    reported_until: int | None = None
    """End of its last message."""
    covered_until: int | None = None
    """End of its last message about an interval; a loss or a phase alone covers no time."""


class LogWatcher:
    """Follows the logs of all jobs. Not thread-safe; calls may block on disk reads."""

    def __init__(self, rows: Sequence[FollowSettings], *, proc: str = "/proc") -> None:
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self._rows, self._proc = rows, proc
        self._files: dict[FileKey, _OpenLog] = {}
        self._jobs: dict[str, _JobLogs] = {}
        self._present: set[FileKey] = set()
        self._running: set[str] = set()
        """Jobs with a process at this poll."""
        self._shared: dict[FileKey, int] = {}
        """Files of two jobs, and when they were last found."""
        self._parts: dict[FileKey, _Part] = {}
        """Of files that were followed before, by the last job that wrote them."""
        self._postponed: set[FileKey] = set()
        """Logs of jobs that were new, whose history is not read yet."""
        self._refused: set[str] = set()
        self._searched_at, self._polls = -SEARCH_INTERVAL, 0
        self._budget = TokenBucket(ALL_BURST, ALL_RATE / SECOND)
        self._budgets: dict[int, TokenBucket] = {}
        """Bytes that may be read of each user with a followed log."""

    def poll(self, now: int, *, wall: int, processes: Sequence[WorkloadProcess]) -> list[LoggedMessage]:
        """Messages from what was written since the last poll; `now` must not decrease. Handles all file errors."""
        job_ids = self._running = {process.job_id for process in processes}
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
        return [message for job_id, files in turns for message in self._read_job(self._jobs[job_id], files, now, wall)]

    def close(self) -> None:
        """Close all files."""
        for key in tuple(self._files):
            self._close(key)

    def _visit(self, location: LogLocation, now: int, *, new: bool) -> None:
        """Mark a log as found, and open it if it is new."""
        try:
            found = Path(location.path).stat()
        except OSError as err:
            if not isinstance(err, FileNotFoundError):
                self._refuse("log_unreadable", f"{location.path}: {err.strerror}")
            return
        key = (found.st_dev, found.st_ino)
        file = self._files.get(key)
        if file is not None and file.job_id not in self._running:
            self._close(key)  # its job has ended, and the next one writes to the same file
            file = None
        if key in self._shared or (file is not None and file.job_id != location.job_id):
            self._reject_shared(key, location, now)
        elif file is None:
            self._open(key, location, now, new=new)
        elif key not in self._present:  # the first one found in a poll has the lowest rank
            self._present.add(key)
            file.process, file.last_seen = location.process, now

    def _reject_shared(self, key: FileKey, location: LogLocation, now: int) -> None:
        """Stop following a file that two jobs write to: its lines cannot be attributed."""
        self._refuse("log_shared", f"{location.path} is the log of two jobs")
        if len(self._shared) >= _REFUSALS:
            self._shared.clear()
        self._shared[key] = now
        if key in self._files:
            self._close(key)
            del self._parts[key]

    def _open(self, key: FileKey, location: LogLocation, now: int, *, new: bool) -> None:
        if len(self._files) >= MOST_FILES:
            self._refuse("log_too_many", f"files: {MOST_FILES} are followed at a time, {location.path} is not")
            return
        try:
            handle = open_job_file(location.path, location.allowed_owners)
            try:
                self._start_reading(key, location, handle, now, new=new)
            finally:
                if key not in self._files:
                    os.close(handle)
        except FileRefusedError as err:
            self._refuse(f"log_{err.kind}", str(err))
        except OSError as err:
            self._refuse("log_unreadable", f"{location.path}: {err.strerror}")

    def _start_reading(self, key: FileKey, location: LogLocation, handle: int, now: int, *, new: bool) -> None:
        found, reader = os.fstat(handle), LineReader(location.framework)
        if (found.st_dev, found.st_ino) != key:
            return  # replaced in between: the next poll handles the new file
        tracker = self._jobs[location.job_id].tracker
        part = self._parts.pop(key, None)
        if part is None or part.end > found.st_size:  # a rewritten file is this job's
            part = _Part(location.job_id, 0, 0)
        own = part.job_id == location.job_id
        begin, offset = part.begin if own else part.end, 0
        new = new or key in self._postponed
        if new or begin or found.st_size > FRESH_BYTES:
            if min(self._budget_of(found.st_uid).available(now), self._budget.available(now)) <= 0:
                self._postpone(key, part, new=new)
                return
            self._spend(found.st_uid, min(found.st_size, HEAD_BYTES + TAIL_BYTES))
            # After another job's part may be last lines of it that were not read: their steps are not this job's.
            offset = _read_history(handle, found.st_size, reader, tracker, now=now, begin=begin, steps=new and own)
        else:
            tracker.start_fresh()
        tail = FileTail(handle, self.counts, offset=offset)
        name = f"{location.path}\n"
        self._postponed.discard(key)
        self._files[key] = _OpenLog(tail, reader, name, location.job_id, location.process, now, found.st_uid, begin)
        self._present.add(key)
        self.counts["log_files"] += 1
        log.info("following %r, the log of job %s", location.path, location.job_id)

    def _postpone(self, key: FileKey, part: "_Part", *, new: bool) -> None:
        """Leave a log for a later poll, which then knows as much about it."""
        for kept in (self._parts, self._postponed):
            if len(kept) >= _REFUSALS:
                kept.clear()
        self._parts[key] = part
        if new:
            self._postponed.add(key)
        self.counts["log_behind"] += 1

    def _budget_of(self, owner: int) -> TokenBucket:
        return self._budgets.setdefault(owner, TokenBucket(USER_BURST, USER_RATE / SECOND))

    def _spend(self, owner: int, size: int) -> None:
        self._budget_of(owner).spend(size)
        self._budget.spend(size)

    def _reading_order(self, job_ids: Iterable[str]) -> list[tuple[str, list[_OpenLog]]]:
        """Jobs with their files; the first job rotates, because there may not be enough bytes for all.

        A job's files are sorted by modification time, so that after a rotation the old file is read first.
        """
        files: dict[str, list[_OpenLog]] = {job_id: [] for job_id in sorted(job_ids)}
        for file in sorted(self._files.values(), key=lambda file: file.tail.modified_at()):
            if file.job_id in files:
                files[file.job_id].append(file)
        self._polls += 1
        turns = list(files.items())
        first = self._polls % max(1, len(turns))
        return turns[first:] + turns[:first]

    def _read_job(self, job: _JobLogs, files: Sequence[_OpenLog], now: int, wall: int) -> list[LoggedMessage]:
        if not files:
            return []
        if job.tracker.ambiguous:
            self._refuse("log_mixed", f"several trainings beside each other write those of job {files[0].job_id}")
        messages: list[tuple[TimedMessage, WorkloadProcess]] = []
        # One process for all: rank 0 may write the checkpoints and another one the steps.
        process = min((file.process for file in files), key=_rank_order)
        end = 0  # the last write to one of the logs
        for file in files:
            read = [(message, process) for message in self._read_file(job.tracker, file, now)]
            if read:
                messages += read
                end = max(end, min(now, now - (wall - file.tail.modified_at())))
        if not messages:
            return []
        if job.reported_until is not None and end <= job.reported_until:
            end = now  # the file system's clock has gone back
        dated = date_messages(messages, end=end, until=job.covered_until)
        valid = [logged for logged in dated if self._is_valid(logged.message)]
        job.reported_until = end
        job.covered_until = max((one.at for one in valid if one.message.seconds), default=job.covered_until)
        self.counts["log_messages"] += len(valid)
        return valid

    def _read_file(self, tracker: LogTracker, file: _OpenLog, now: int) -> list[TimedMessage]:
        most = int(min(FILE_BYTES, self._budget_of(file.owner).available(now), self._budget.available(now)))
        most = max(0, most)  # a history may have taken more than was left
        self._note_lag(file, most)
        try:
            written = file.tail.read(most)
        except OSError as err:
            self._refuse("log_unreadable", f"log of job {file.job_id}: {err.strerror}")
            return []
        self._spend(file.owner, written.size)
        if written.rewritten:
            file.reader.reset()
            file.begin = 0
        if written.gap:
            tracker.sequence.mark_gap()
        messages = [
            message
            for event, writer, timestamp in _parse_lines(written.lines, file.reader, self.counts)
            for message in tracker.handle(event, writer=file.name + writer, at=LineTime(timestamp, now))
        ]
        return messages + tracker.flush_bar()

    def _note_lag(self, file: _OpenLog, most: int) -> None:
        """Count a file of which a part is left for later, and log it once for as long as that lasts."""
        unread = file.tail.unread()
        if unread > most:
            self.counts["log_behind"] += 1
            if not file.behind:
                log.warning(
                    "log of job %s is read late: %d KiB are unread; all logs of a user are read at %d KiB/s at most",
                    file.job_id, unread // 1024, USER_RATE // 1024,
                )  # fmt: skip
        file.behind = unread > most

    def _is_valid(self, message: Message) -> bool:
        if message == Message():
            return False
        try:
            decode_message(msgspec.json.encode(message))
        except ReportRefusedError:
            self.counts["log_absurd"] += 1
            return False
        return True

    def _expire(self, now: int) -> None:
        for job_id in [job_id for job_id, job in self._jobs.items() if now - job.last_seen > EXPIRY]:
            del self._jobs[job_id]
        for key in [k for k, f in self._files.items() if f.job_id not in self._jobs or now - f.last_seen > EXPIRY]:
            self._close(key)
        self._shared = {key: found for key, found in self._shared.items() if now - found <= EXPIRY}
        owners = {file.owner for file in self._files.values()}
        self._budgets = {owner: budget for owner, budget in self._budgets.items() if owner in owners}

    def _close(self, key: FileKey) -> None:
        file = self._files.pop(key)
        if len(self._parts) >= _REFUSALS:
            self._parts.clear()
        self._parts[key] = _Part(file.job_id, file.begin, file.tail.offset)
        file.tail.close()
        job = self._jobs.get(file.job_id)
        if job is not None and all(other.name != file.name for other in self._files.values()):
            job.tracker.sequence.remove_writers(file.name)

    def _refuse(self, count: str, reason: str) -> None:
        """Count and log a rejection, once per reason."""
        if reason in self._refused:
            return
        if len(self._refused) >= _REFUSALS:
            self._refused.clear()
        self._refused.add(reason)
        self.counts[count] += 1
        log.warning("log not followed: %s", reason)


def _read_history(
    handle: int, size: int, reader: LineReader, tracker: LogTracker, *, now: int, begin: int, steps: bool
) -> int:
    """Read the constants, and with `steps` the last step, of a log that exists from `begin` on.

    Returns the offset to continue from. Raises OSError.
    """
    for event, _, _ in _parse_chunk(os.pread(handle, HEAD_BYTES, begin), reader):
        if event.kind == "facts":
            tracker.handle(event, writer="", at=LineTime(None, now))
    tail = max(begin, size - TAIL_BYTES)
    last = os.pread(handle, size - tail, tail)
    whole, newline, part = last.rpartition(b"\n")
    if steps:
        tracker.reset()
    for event, writer, timestamp in _parse_chunk(whole.partition(b"\n")[2] if tail > begin else whole, reader):
        if steps or event.kind == "facts":
            tracker.handle(event, writer=writer, at=LineTime(timestamp, now))
    if steps:
        tracker.end_history()
    return size - len(part) if newline else size


def _parse_chunk(chunk: bytes, reader: LineReader) -> Iterator[tuple[LogEvent, str, float | None]]:
    lines = chunk.replace(b"\r", b"\n").split(b"\n")
    return _parse_lines((raw for raw in lines if len(raw) <= TAIL_BYTES), reader, Counter())


def _parse_lines(
    lines: Iterable[bytes], reader: LineReader, counts: Counter[str]
) -> Iterator[tuple[LogEvent, str, float | None]]:
    """Events with their writer and timestamp; counts log_lines and log_understood."""
    for raw in lines:
        counts["log_lines"] += 1
        if reader.may_match(raw):
            log_line = parse_line(raw)
            event = reader.read(log_line.text)
            if event is not None:
                counts["log_understood"] += 1
                yield event, log_line.writer, log_line.timestamp


# The thread that polls the logs, once for each call of `poll`: about once a second. A file system that hangs blocks
# only this thread.


MOST_PENDING = 4096
"""Maximum length of the queue; the oldest messages are dropped."""
_WAIT_SECONDS = 5.0


class LogFollowerThread:
    """Follows logs on a thread of its own."""

    def __init__(self, rows: Sequence[FollowSettings], clock: Clock, *, proc: str = "/proc") -> None:
        self._watcher, self._clock = LogWatcher(rows, proc=proc), clock
        self._counts = dict(self._watcher.counts)
        self._pending: deque[LoggedMessage] = deque(maxlen=MOST_PENDING)
        self._processes: tuple[WorkloadProcess, ...] = ()
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._worker = Worker("log-followers", self._run, stop=self._stop)
        self._worker.start()

    def poll(self, processes: Sequence[WorkloadProcess]) -> tuple[LoggedMessage, ...]:
        """Messages found since the last call; the thread then polls the logs of `processes`. Does not block."""
        with self._lock:
            self._processes = tuple(processes)
            found = tuple(self._pending)
            self._pending.clear()
        self._wake.set()
        return found

    def faults(self) -> tuple[Fault, ...]:
        """Return a fault if the thread has failed since the last call."""
        return self._worker.faults("reports_failed")

    def counts(self) -> Mapping[str, int]:
        """Totals since the daemon started, by kind: see COUNTS."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Stop the thread and close the files; gives up after 5 s if a file system hangs."""
        self._stop.set()
        self._wake.set()
        self._worker.join(_WAIT_SECONDS)
        if not self._worker.alive:
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
    """Follow the logs of the configuration's `follow` rows; logs a warning for a row that cannot match."""
    for index, row in enumerate(config.follow):
        if row.path and "{job_id}" not in row.path:
            log.warning(
                "follow[%d].path %r has no {job_id}: a log cannot be attributed to a job, none is read", index, row.path
            )
    return LogFollowerThread(config.follow, clock, proc=config.host.proc)
