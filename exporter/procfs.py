"""Reads small files of /proc/PID (proc(5)): a process's name, parent, start, pid and environment.

`folder` is /proc/PID, possibly below another root. A process may end at any moment; then the functions return an empty
value instead of raising. The command name may contain spaces and brackets, so fields are counted from its last bracket.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

_STAT_BYTES = 4096
_STATUS_BYTES = 8192
_ENVIRONMENT_BYTES = 256 * 1024
"""Bytes read of one environment; the kernel allows megabytes."""
_VALUE_CHARS = 4096
_NSPID = re.compile(rb"^NSpid:((?:\s+\d+)+)", re.MULTILINE)
_UID = re.compile(rb"^Uid:\s+(\d+)", re.MULTILINE)


def command_name(folder: Path) -> str:
    """Field 2, the command name without its brackets; empty if unknown."""
    return _stat(folder)[0]


def parent_pid(folder: Path) -> int:
    """Field 4, the parent's pid; 0 if unknown."""
    return _number(folder, 4) or 0


def start_ticks(folder: Path) -> int | None:
    """Field 22, the start of the process in clock ticks since boot; None if unknown."""
    return _number(folder, 22)


def innermost_pid(folder: Path) -> int:
    """The pid in the process's own pid namespace (NSpid of /proc/PID/status); 0 if unknown."""
    try:
        found = _NSPID.search(read_bytes(folder / "status", _STATUS_BYTES))
    except OSError:
        return 0
    return int(found[1].split()[-1]) if found else 0


def user_id(folder: Path) -> int:
    """The real user id of the process; -1 if unknown."""
    try:
        found = _UID.search(read_bytes(folder / "status", _STATUS_BYTES))
    except OSError:
        return -1
    return int(found[1]) if found else -1


def environment(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Those of `names` that were in the environment when the process started. Raises OSError."""
    pairs = (entry.partition(b"=") for entry in read_bytes(folder / "environ", _ENVIRONMENT_BYTES).split(b"\0"))
    decoded = ((os.fsdecode(name), os.fsdecode(value)) for name, _, value in pairs)
    return {name: value for name, value in decoded if name in names}


def _number(folder: Path, field: int) -> int | None:
    try:
        return int(_stat(folder)[1][field - 3])
    except (ValueError, IndexError):
        return None


def _stat(folder: Path) -> tuple[str, list[bytes]]:
    """The command name, and the fields from the third on."""
    try:
        name, _, fields = read_bytes(folder / "stat", _STAT_BYTES).partition(b"(")[2].rpartition(b")")
    except OSError:
        return "", []
    return name.decode(errors="replace"), fields.split()


def read_environ(folder: Path, kept: re.Pattern[bytes]) -> dict[str, str]:
    """Return the variables at the program's start whose whole name matches; empty when unreadable.

    The first of duplicates counts, as in getenv(3); a truncated entry is dropped.
    """
    try:
        whole = read_bytes(folder / "environ", _ENVIRONMENT_BYTES)
    except OSError:
        return {}
    entries = whole.split(b"\0")
    found: dict[str, str] = {}
    for name, equals, value in (entry.partition(b"=") for entry in entries[:-1]):
        if equals and kept.fullmatch(name):
            found.setdefault(name.decode(errors="replace"), value[:_VALUE_CHARS].decode(errors="replace"))
    return found


def read_bytes(path: Path, limit: int) -> bytes:
    """Read the first `limit` bytes of a file of /proc. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third cheaper than a file object, and called often
    try:
        found = b""
        while len(found) < limit and (more := os.read(descriptor, limit - len(found))):
            found += more
        return found
    finally:
        os.close(descriptor)
