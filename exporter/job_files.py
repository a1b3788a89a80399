"""Opens files that jobs write if they are safe to read, and reads what is appended to them.

The daemon may be root, and a user who can write to a directory could direct it to any file. So only regular files are
opened, and by path only those of the job's user:

- A file that a process has open is opened through /proc/PID/fd/N (proc(5)), in any mount namespace, and only if the
  process has it open for writing.
- A file found by path must be owned by a user (not root) who runs the job and so could read the file without the
  daemon; or by root or the daemon's user, as container runtimes write them, if no other user can have created it: no
  symbolic link in the path, no second hard link, each directory owned and writable by them alone (or sticky).
- A file is first opened with O_PATH (open(2)) and checked, and only then for reading, so that opening a device or a
  pipe has no side effects.
"""

import os
import re
import stat
from collections import Counter
from pathlib import Path

from msgspec import Struct

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FileRefusedError(Exception):
    """The file is not read; `kind` is not_a_file, owner or not_written."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def is_open_for_writing(path: str) -> bool:
    """Whether /proc/PID/fd/N is open for writing: the link's mode is the mode of the open file. Raises OSError."""
    return bool(os.lstat(path).st_mode & stat.S_IWUSR)


def open_job_file(path: str, allowed_owners: frozenset[int] | None) -> int:
    """Open a regular file for reading; returns the file descriptor. Raises FileRefusedError and OSError.

    `allowed_owners` are the uids that may own it; None: `path` is /proc/PID/fd/N of a process of the job, which has it
    open for writing.
    """
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise FileRefusedError("not_a_file", f"{path} is no regular file")
        if allowed_owners is not None:
            _check_owner(path, found, allowed_owners)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def open_written_file(path: str) -> int:
    """Open /proc/PID/fd/N if the process still has that file open for writing; otherwise as `open_job_file`."""
    handle = open_job_file(path, None)
    try:
        _check_written(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_written(path: str, opened: os.stat_result) -> None:
    """Refuse a file that the process does not write: it may have replaced the descriptor in between."""
    named = Path(path).stat()
    if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino) or not is_open_for_writing(path):
        raise FileRefusedError("not_written", f"{path} is not open for writing")


def _check_owner(path: str, found: os.stat_result, users: frozenset[int]) -> None:
    if found.st_uid != 0 and found.st_uid in users:
        return
    ours = {0, os.geteuid()}
    if found.st_uid not in ours:
        raise FileRefusedError("owner", f"{path} belongs to user {found.st_uid}, who does not run the job")
    if found.st_nlink > 1 or not _is_protected(path, found, ours):
        raise FileRefusedError(
            "owner",
            f"{path} belongs to this daemon's user or root, and others could have put it there: each"
            " folder above it must be writable by them alone, no link may lead to it, and it may have no second name",
        )


def _is_protected(path: str, found: os.stat_result, ours: set[int]) -> bool:
    """Whether only the users in `ours` could have placed the file at `path`."""
    entry = os.lstat(path)
    if (entry.st_dev, entry.st_ino) != (found.st_dev, found.st_ino):
        return False
    folders = [os.lstat(folder) for folder in Path(path).absolute().parents]
    return all(
        stat.S_ISDIR(folder.st_mode)
        and folder.st_uid in ours
        and (not folder.st_mode & _OTHERS_WRITE or folder.st_mode & stat.S_ISVTX)
        for folder in folders
    )


# Reading the lines appended to a file, which may grow, be truncated, be rewritten or end in an incomplete line.


LINE_BYTES = 16 * 1024
"""Maximum length of a line; longer ones are skipped."""
BEHIND_BYTES = 16 * 1024 * 1024
"""Maximum backlog of unread bytes; above it, reading continues near the end of the file."""
_RESTART_BYTES = 64 * 1024
"""Bytes before the end from which reading continues then."""
_HEAD_BYTES = 64
_LINE_ENDS = re.compile(rb"[\r\n]+")
"""A progress bar ends its lines with a carriage return."""


class TailChunk(Struct, frozen=True):
    """The lines appended to a file since the last read."""

    lines: tuple[bytes, ...] = ()
    size: int = 0
    """Bytes read."""
    rewritten: bool = False
    """The file was truncated or rewritten before these lines."""
    gap: bool = False
    """Lines before these were skipped."""


class FileTail:
    """An open file that is read as it grows; closes it."""

    def __init__(
        self, handle: int, counts: Counter[str], *, offset: int, prefix: str = "log", line_bytes: int = LINE_BYTES
    ) -> None:
        """Follow `handle` from `offset` on; counts log_truncated, log_skipped, log_too_long. Raises OSError.

        `prefix` replaces "log" in these names; longer lines than `line_bytes` are skipped.
        """
        self._handle, self._counts, self._offset = handle, counts, offset
        self._prefix, self._line_bytes = prefix, line_bytes
        self._part, self._in_long_line = b"", False
        self._head = os.pread(handle, _HEAD_BYTES, 0)

    @property
    def offset(self) -> int:
        """Bytes that were read or skipped."""
        return self._offset

    def read(self, most: int) -> TailChunk:
        """Read what was appended, at most `most` bytes; raises OSError."""
        size = os.fstat(self._handle).st_size
        rewritten = self._was_rewritten(size)
        if rewritten:
            self._counts[f"{self._prefix}_truncated"] += 1
            self._seek(0)
        gap = size - self._offset > BEHIND_BYTES
        if gap:
            self._counts[f"{self._prefix}_skipped"] += 1
            self._seek(size - _RESTART_BYTES)
            self._in_long_line = True  # skip the end of an incomplete line
        chunk = os.pread(self._handle, most, self._offset)
        self._offset += len(chunk)
        return TailChunk(self._split(chunk.replace(b"\0", b"")), len(chunk), rewritten, gap)

    def unread(self) -> int:
        """Bytes that were appended and not read yet; 0 if unknown."""
        try:
            return max(0, os.fstat(self._handle).st_size - self._offset)
        except OSError:
            return 0

    def modified_at(self) -> int:
        """Time of the last write in Unix nanoseconds; 0 if unknown."""
        try:
            return os.fstat(self._handle).st_mtime_ns
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _was_rewritten(self, size: int) -> bool:
        """Whether the file is shorter than what was read, or its first bytes have changed."""
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
        whole = tuple(line for line in lines if line and len(line) <= self._line_bytes)
        self._counts[f"{self._prefix}_too_long"] += sum(len(line) > self._line_bytes for line in lines)
        if len(part) > self._line_bytes and not self._in_long_line:
            self._counts[f"{self._prefix}_too_long"] += 1
            self._in_long_line = True
        self._part = b"" if self._in_long_line else part
        return whole
