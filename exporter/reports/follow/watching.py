"""All logs that are followed, one look at a time.

Owns which files are open, how much is read at a look, and when what was read took place. A log that was there before
its job was known here counts from its end on; its beginning and its last lines are read for what holds for good (the
world's size), whose format it is, and how far the job had come. One that comes later is read from its beginning.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.config import Follow
from exporter.core.model import SECOND
from exporter.reports.follow.frameworks import Reader
from exporter.reports.follow.lines import line_of
from exporter.reports.follow.order import Moment
from exporter.reports.follow.places import Place, RefusedError, opened, places
from exporter.reports.follow.progress import Progress, Told
from exporter.reports.follow.said import Said
from exporter.reports.follow.tail import Tail
from exporter.reports.follow.timing import Heard, followed
from exporter.reports.message import Followed, Message, MessageError, decoded
from exporter.workloads import Guest

log = logging.getLogger(__name__)
COUNTS = (
    "log_files", "log_lines", "log_understood", "log_messages", "log_truncated", "log_skipped", "log_too_long",
    "log_not_a_file", "log_owner", "log_shared", "log_too_many", "log_unreadable", "log_absurd", "log_dropped",
)  # fmt: skip
"""All kinds that are ever counted. Files opened; lines read, and of those the ones that said something; messages;
files emptied, or skipped in part for having grown too fast; lines too long. Then what was refused: no regular file,
not the job's, one of two jobs, one too many, not readable; figures that no message may have; messages nobody took."""
FILES = 256
"""Followed at a time."""
FILE_BYTES = 256 * 1024
"""Read of one file at a look."""
LOOK_BYTES = 2 * 1024 * 1024
"""Read of all files at a look."""
FRESH_BYTES = 1024 * 1024
"""A larger file was not begun since the last look, whenever it was found."""
HEAD_BYTES = 64 * 1024
TAIL_BYTES = 16 * 1024
"""Read of what was written before."""
SEARCH = 5 * SECOND
"""Between two looks for files by their paths."""
GONE = 60 * SECOND
"""A file, or a job, that is not found for so long is forgotten."""
_REFUSALS = 1024

Key = tuple[int, int]
"""Device and inode."""


class _File(Struct):
    """A log that is followed."""

    tail: Tail
    reader: Reader
    name: str
    """Its path when it was found: what comes in its place after a rotation is the same writer's."""
    job_id: str
    guest: Guest
    seen: int
    """When it was last found."""


class _Job(Struct):
    """A job that has a guest here, or had one a moment ago."""

    progress: Progress
    seen: int
    until: int | None = None
    """When its last word ended."""


class Watch:
    """All that is followed. One call at a time; it may wait for a disk."""

    def __init__(self, rows: Sequence[Follow], *, proc: str = "/proc") -> None:
        self.counts = Counter(dict.fromkeys(COUNTS, 0))
        self._rows, self._proc = rows, proc
        self._files: dict[Key, _File] = {}
        self._jobs: dict[str, _Job] = {}
        self._present: set[Key] = set()
        self._shared: set[Key] = set()
        self._refused: set[str] = set()
        self._searched, self._turn = -SEARCH, 0

    def look(self, now: int, *, wall: int, guests: Sequence[Guest]) -> list[Followed]:
        """What has been written since the last look; `now` never falls. Never raises what a file could cause."""
        here = {guest.job_id for guest in guests}
        new = here - self._jobs.keys()
        search = bool(new) or now - self._searched >= SEARCH
        self._searched = now if search else self._searched
        for job_id in here:
            self._jobs.setdefault(job_id, _Job(Progress(), now)).seen = now
        self._present.clear()
        for place in places(self._rows, guests, proc=self._proc, search=search):
            self._find(place, now, new=place.job_id in new)
        self._forget(now)
        turns = self._turns(here)
        return [one for job_id, files in turns for one in self._read(self._jobs[job_id], files, now, wall)]

    def close(self) -> None:
        """Close all files."""
        for key in tuple(self._files):
            self._close(key)

    def _find(self, place: Place, now: int, *, new: bool) -> None:
        """Take note of a log, and open it if it is not."""
        try:
            found = Path(place.path).stat()
        except OSError as err:
            if not isinstance(err, FileNotFoundError):
                self._refuse(f"log_unreadable {place.path}: {err.strerror}")
            return
        key = (found.st_dev, found.st_ino)
        file = self._files.get(key)
        if key in self._shared or (file is not None and file.job_id != place.job_id):
            self._share(key, place)
        elif file is None:
            self._open(key, place, now, new=new)
        elif key not in self._present:  # the first of a look has the lowest rank
            self._present.add(key)
            file.guest, file.seen = place.guest, now

    def _share(self, key: Key, place: Place) -> None:
        """Whose words they are cannot be known: it is nobody's log."""
        self._refuse(f"log_shared {place.path} is the log of two jobs")
        if len(self._shared) >= _REFUSALS:
            self._shared.clear()
        self._shared.add(key)
        if key in self._files:
            self._close(key)

    def _open(self, key: Key, place: Place, now: int, *, new: bool) -> None:
        if len(self._files) >= FILES:
            self._refuse(f"log_too_many files: {FILES} are followed at a time, {place.path} is not")
            return
        try:
            handle = opened(place)
            try:
                self._begin(key, place, handle, now, new=new)
            finally:
                if key not in self._files:
                    os.close(handle)
        except RefusedError as err:
            self._refuse(str(err))
        except OSError as err:
            self._refuse(f"log_unreadable {place.path}: {err.strerror}")

    def _begin(self, key: Key, place: Place, handle: int, now: int, *, new: bool) -> None:
        found, reader = os.fstat(handle), Reader(place.framework)
        if (found.st_dev, found.st_ino) != key:
            return  # changed in between: the next look sees what it is
        progress = self._jobs[place.job_id].progress
        offset = 0
        if new or found.st_size > FRESH_BYTES:
            offset = _learn(handle, found.st_size, reader, progress, now=now, steps=new)
        else:
            progress.fresh()
        tail = Tail(handle, self.counts, offset=offset)
        self._files[key] = _File(tail, reader, f"{place.path}\n", place.job_id, place.guest, now)
        self._present.add(key)
        self.counts["log_files"] += 1
        log.info("following %r, the log of job %s", place.path, place.job_id)

    def _turns(self, here: Iterable[str]) -> list[tuple[str, list[_File]]]:
        """Jobs with their files. Another job is the first each time, for there may be more than is read at a look.

        Of one job the file that was written to last is the last: after a rotation that is the new one.
        """
        files: dict[str, list[_File]] = {job_id: [] for job_id in sorted(here)}
        for file in sorted(self._files.values(), key=lambda file: file.tail.written()):
            if file.job_id in files:
                files[file.job_id].append(file)
        self._turn += 1
        self._left = LOOK_BYTES
        turns = list(files.items())
        first = self._turn % max(1, len(turns))
        return turns[first:] + turns[:first]

    def _read(self, job: _Job, files: Iterable[_File], now: int, wall: int) -> list[Followed]:
        heard = Heard([], 0)
        for file in files:
            told = self._told(job.progress, file, now)
            if told:
                heard.told += [(one, file.guest) for one in told]
                heard.end = max(heard.end, min(now, now - (wall - file.tail.written())))
        if not heard.told:
            return []
        if job.until is not None and heard.end <= job.until:
            heard.end = now  # by its clock the file system has gone back
        found = [one for one in followed(heard, job.until) if self._is_good(one.message)]
        job.until = heard.end
        self.counts["log_messages"] += len(found)
        return found

    def _told(self, progress: Progress, file: _File, now: int) -> list[Told]:
        try:
            written = file.tail.read(min(FILE_BYTES, self._left))
        except OSError as err:
            self._refuse(f"log_unreadable log of job {file.job_id}: {err.strerror}")
            return []
        self._left -= written.size
        if written.anew:
            file.reader.forget()
        if written.gap:
            progress.gap()
        told = [
            one
            for said, writer, stamp in self._said(written.lines, file.reader)
            for one in progress.hear(said, writer=file.name + writer, at=Moment(stamp, now))
        ]
        return told + progress.look_ends()

    def _said(self, lines: Iterable[bytes], reader: Reader) -> Iterator[tuple[Said, str, float | None]]:
        for raw in lines:
            self.counts["log_lines"] += 1
            if reader.may_be(raw):
                line = line_of(raw)
                said = reader.read(line.text)
                if said is not None:
                    self.counts["log_understood"] += 1
                    yield said, line.writer, line.stamp

    def _is_good(self, message: Message) -> bool:
        if message == Message():
            return False
        try:
            decoded(msgspec.json.encode(message))
        except MessageError:
            self.counts["log_absurd"] += 1
            return False
        return True

    def _forget(self, now: int) -> None:
        for job_id in [job_id for job_id, job in self._jobs.items() if now - job.seen > GONE]:
            del self._jobs[job_id]
        for key in [k for k, f in self._files.items() if f.job_id not in self._jobs or now - f.seen > GONE]:
            self._close(key)

    def _close(self, key: Key) -> None:
        file = self._files.pop(key)
        file.tail.close()
        job = self._jobs.get(file.job_id)
        if job is not None and all(other.name != file.name for other in self._files.values()):
            job.progress.gone(file.name)

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


def _learn(handle: int, size: int, reader: Reader, progress: Progress, *, now: int, steps: bool) -> int:
    """Read what holds for good in a log that was there before; where to go on from. Raises OSError."""
    for said, _, _ in _understood(os.pread(handle, HEAD_BYTES, 0), reader):
        if said.kind == "facts":
            progress.hear(said, writer="", at=Moment(None, now))
    begin = max(0, size - TAIL_BYTES)
    last = os.pread(handle, size - begin, begin)
    whole, newline, part = last.rpartition(b"\n")
    if steps:
        progress.reset()
    for said, writer, stamp in _understood(whole.partition(b"\n")[2] if begin else whole, reader):
        if steps or said.kind == "facts":
            progress.hear(said, writer=writer, at=Moment(stamp, now))
    if steps:
        progress.learned()
    return size - len(part) if newline else size


def _understood(chunk: bytes, reader: Reader) -> Iterator[tuple[Said, str, float | None]]:
    for raw in chunk.replace(b"\r", b"\n").split(b"\n"):
        if len(raw) <= TAIL_BYTES and reader.may_be(raw):
            line = line_of(raw)
            said = reader.read(line.text)
            if said is not None:
                yield said, line.writer, line.stamp
