"""The lines that are written to a file from now on.

Owns what files go through: growing, being truncated, written anew, cut in the middle of a line. Refuses to read more
than it is given leave for, and to keep a line that has no end.
"""

import os
import re
from collections import Counter

from msgspec import Struct

LINE_BYTES = 16 * 1024
"""A longer one is no line of a training log."""
BEHIND_BYTES = 16 * 1024 * 1024
"""A file that has got so far ahead is taken up again near its end."""
_AGAIN_BYTES = 64 * 1024
_HEAD_BYTES = 64
_ENDS = re.compile(rb"[\r\n]+")
"""A progress bar ends its lines with a carriage return."""


class Written(Struct, frozen=True):
    """What has come to a file."""

    lines: tuple[bytes, ...] = ()
    size: int = 0
    """Bytes read."""
    anew: bool = False
    """Before these lines the file was emptied or written anew."""
    gap: bool = False
    """Lines before these were left out."""


class Tail:
    """One open file, which it owns and closes."""

    def __init__(self, handle: int, counts: Counter[str], *, offset: int) -> None:
        """Follow `handle` from `offset` on; counts log_truncated, log_skipped, log_too_long. Raises OSError."""
        self._handle, self._counts, self._offset = handle, counts, offset
        self._part, self._endless = b"", False
        self._head = os.pread(handle, _HEAD_BYTES, 0)

    def read(self, most: int) -> Written:
        """What was written since, `most` bytes of it at most; raises OSError."""
        size = os.fstat(self._handle).st_size
        anew = self._is_anew(size)
        if anew:
            self._counts["log_truncated"] += 1
            self._go(0)
        gap = size - self._offset > BEHIND_BYTES
        if gap:
            self._counts["log_skipped"] += 1
            self._go(size - _AGAIN_BYTES)
            self._endless = True  # the first piece is the end of a line
        chunk = os.pread(self._handle, most, self._offset)
        self._offset += len(chunk)
        return Written(self._split(chunk.replace(b"\0", b"")), len(chunk), anew, gap)

    def written(self) -> int:
        """When somebody last wrote to it, Unix nanoseconds; 0 where the file system does not say."""
        try:
            return os.fstat(self._handle).st_mtime_ns
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def _is_anew(self, size: int) -> bool:
        """Shorter than what was read, or with another beginning: both are done to a file that others write to."""
        if size < self._offset:
            self._head = os.pread(self._handle, _HEAD_BYTES, 0)
            return True
        head = os.pread(self._handle, _HEAD_BYTES, 0) if size > self._offset else self._head
        known, self._head = self._head, head
        return not head.startswith(known)

    def _go(self, offset: int) -> None:
        self._offset, self._part, self._endless = offset, b"", False

    def _split(self, chunk: bytes) -> tuple[bytes, ...]:
        *lines, part = _ENDS.split(self._part + chunk)
        if self._endless and lines:
            lines, self._endless = lines[1:], False
        whole = tuple(line for line in lines if line and len(line) <= LINE_BYTES)
        self._counts["log_too_long"] += sum(len(line) > LINE_BYTES for line in lines)
        if len(part) > LINE_BYTES and not self._endless:
            self._counts["log_too_long"] += 1
            self._endless = True
        self._part = b"" if self._endless else part
        return whole
