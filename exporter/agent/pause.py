"""Reads and writes the pause file, with which an operator or a prolog frees the hardware counters for a profiler.

The file is JSON: {"until": Unix seconds, "reason": text}. A file that cannot be parsed counts as a pause of half an
hour from its last change, so a bare `touch` pauses too. The command and the daemon share nothing else.
"""

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.core.model import SECOND
from exporter.files import write_atomically

log = logging.getLogger(__name__)
LONGEST_SECONDS = 24 * 3600
"""Upper limit of a pause, whatever the file contains: a forgotten pause must not stop monitoring for good."""
BROKEN_SECONDS = 30 * 60
"""Duration of the pause for a file that cannot be parsed; the command's default duration too."""
_LONGEST_FILE = 4096
"""Bytes of the file that are read."""
_LONGEST_REASON = 200


class Pause(Struct, frozen=True):
    """The contents of the pause file."""

    until: float
    """Unix seconds."""
    reason: str = ""


class PauseFile:
    """Polls the pause file with one stat(2) a tick, and reads it only if it has changed.

    `wall` returns Unix nanoseconds, to compare with `until`. By `monotonic`, nanoseconds too, a pause ends at its
    length after the file was first seen, even if the wall clock has been set back meanwhile.
    """

    def __init__(
        self,
        path: str | Path,
        wall: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._path, self._wall, self._monotonic = Path(path), wall, monotonic
        self._ends = 0
        """When the pause is over at the latest, by `monotonic`."""
        self._last_stat: tuple[int, int, int] | None = None
        self._pause = Pause(0.0)
        self._warned = False

    def poll(self) -> str:
        """Return why readings are paused, as a message; empty if they are not. Never raises."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as err:
            return self._warn_once(f"cannot be accessed: {err.strerror or err}")
        if not stat.S_ISREG(found.st_mode):
            return self._warn_once("is not a file: remove it, or name another in sampling.pause_file")
        last_stat = (found.st_mtime_ns, found.st_size, found.st_ino)
        if last_stat != self._last_stat:
            self._last_stat, now = last_stat, self._wall() / SECOND
            self._pause = self._read(changed=min(found.st_mtime, now), ahead=max(0.0, found.st_mtime - now))
            self._ends = self._monotonic() + round(max(0.0, self._pause.until - now) * SECOND)
        is_on = self._wall() < self._pause.until * SECOND and self._monotonic() < self._ends
        return self._message() if is_on else ""

    def _read(self, *, changed: float, ahead: float) -> Pause:
        """`ahead`: seconds by which the file's time stamp lies in the future; it counts as written now."""
        try:
            with self._path.open("rb") as file:
                pause = msgspec.json.decode(os.read(file.fileno(), _LONGEST_FILE), type=Pause)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            until = changed + BROKEN_SECONDS
            log.warning(
                'the pause file %s is not {"until": Unix seconds, "reason": text} (%s); it was meant as a pause, and'
                " counts as one until %s",
                self._path,
                err,
                clock_time(until),
            )
            return Pause(until, "the file is broken")
        return Pause(min(pause.until - ahead, changed + LONGEST_SECONDS), pause.reason)

    def _message(self) -> str:
        reason = f" ({' '.join(self._pause.reason.split())[:_LONGEST_REASON]})" if self._pause.reason else ""
        return (
            f"nothing is read until {clock_time(self._pause.until)}{reason}, as {self._path} requests;"
            " `gpu-efficiency resume` ends it"
        )

    def _warn_once(self, problem: str) -> str:
        if not self._warned:
            self._warned = True
            log.warning("the pause file %s %s; nothing is paused", self._path, problem)
        return ""


def clock_time(seconds: float) -> str:
    """Format Unix seconds as a date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def write_pause(path: Path, pause: Pause) -> None:
    """Write the pause file, which pauses every daemon that polls `path`. Raises OSError."""
    write_atomically(path, msgspec.json.encode(pause) + b"\n")
