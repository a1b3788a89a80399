"""Where this node's history is kept: whether it can be, on what, and how it fares.

Owns what can be seen without opening the store, which is the daemon's. Refuses to write there.

Sources: SQLite, "Write-Ahead Logging" (all who use a file share memory, so it works on one machine's own file systems
alone); proc(5) on mountinfo.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Findings, Here, Verdict
from exporter.checkup.places import FILES
from exporter.wording import elapsed

_MEBI = 1 << 20
_HEAD = b"SQLite format 3\x00"
_OF_MANY = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "virtiofs"}
)
"""Beside all that FUSE serves."""
_FLEETING = {
    "tmpfs": "goes with the next boot, or with the pod",
    "ramfs": "goes with the next boot",
    "overlay": "goes with the container",
}


def look_at_store(here: Here, _: Findings) -> Iterator[Finding]:
    """The store's folder, its file system, its room, and the store itself where there is one."""
    path = here.store
    if path is None:
        yield _none(here.config.history.file)
        return
    folder = next((place for place in path.parents if place.exists()), Path("/"))
    yield _writable(path, folder)
    yield _system(here, path, folder)
    yield _room(here, path, folder)
    if path.exists():
        yield _written(path)


def _none(file: str) -> Finding:
    if file != "auto":
        return _finding(INFO, "no history is kept: history.file is empty")
    said = "no history is kept: systemd names no folder, and this user may not write in /var/lib/gpu-efficiency"
    do = "have systemd's StateDirectory=gpu-efficiency make it, or set history.file; a restart forgets all else"
    return _finding(WARN, said, do)


def _writable(path: Path, folder: Path) -> Finding:
    """By this user, who had better be the daemon's."""
    if not os.access(folder, os.W_OK | os.X_OK):
        said = f"{path} cannot be written: this user may not write in {folder}"
        return _finding(FAIL, said, "have systemd's StateDirectory= make it, correct its owner, or set history.file")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        do = "look at its owner: it belongs to the user that the daemon has run as before"
        return _finding(FAIL, f"{path} is there and this user may not read and write it", do)
    return _finding(OK, f"{path} can be written")


def _system(here: Here, path: Path, folder: Path) -> Finding:
    kind = file_system(here.proc / "self/mountinfo", folder)
    if kind in _OF_MANY or kind.startswith("fuse"):
        said = f"{path} is on {kind}: SQLite's log needs memory that is shared by all who use the file"
        return _finding(WARN, said, "keep it on a disk of this node's: set history.file", check="store's disk")
    if kind in _FLEETING:
        said = f"{path} is on {kind}: what it holds {_FLEETING[kind]}"
        return _finding(WARN, said, "keep it on a disk of this node's: set history.file", check="store's disk")
    return _finding(OK, f"{path} is on {kind or 'a file system that the kernel does not name'}", check="store's disk")


def _room(here: Here, path: Path, folder: Path) -> Finding:
    """For what it may grow to."""
    about = os.statvfs(folder)
    free, most = about.f_bavail * about.f_frsize / _MEBI, here.config.history.max_mebibytes
    size = sum(file.stat().st_size for file in _files(path)) / _MEBI
    said = f"{size:.0f} MiB, {most:.0f} at most (history.max_mebibytes); {free:.0f} MiB are free"
    if free < most - size:
        do = "make room, or lower history.max_mebibytes: on a full disk nothing more is kept, and sampling goes on"
        return _finding(WARN, said, do, check="store's size")
    return _finding(OK, said, check="store's size")


def _written(path: Path) -> Finding:
    try:
        with path.open("rb") as file:
            head = file.read(len(_HEAD))
    except OSError as err:
        return _finding(FAIL, f"{path} cannot be read: {err.strerror or err}", check="checkpoint")
    if head not in (b"", _HEAD):
        do = "move it away: the daemon then begins a new one"
        return _finding(FAIL, f"{path} is there and is no store", do, check="checkpoint")
    age = max(0.0, time.time() - max(file.stat().st_mtime for file in _files(path)))
    return _finding(OK, f"last written {elapsed(age)} ago", check="checkpoint")


def _files(path: Path) -> list[Path]:
    """The store and its log."""
    return [file for file in (path, path.with_name(f"{path.name}-wal")) if file.exists()]


def file_system(mounts: Path, folder: Path) -> str:
    """What kind of file system the folder is on; empty where that cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    whole = folder.resolve()
    for line in lines:
        place, kind = _mount(line)
        if kind and len(place.parts) >= longest and whole.is_relative_to(place):
            found, longest = kind, len(place.parts)  # of two at one place the later one is seen
    return found


def _mount(line: str) -> tuple[Path, str]:
    """Place and kind of a line of mountinfo, in which a space is written as an octal number."""
    fields, _, rest = line.partition(" - ")
    words = fields.split(" ")
    if len(words) < 5 or not rest:  # noqa: PLR2004  the fifth is the place
        return Path("/"), ""
    place = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
    return Path(place), rest.split(" ", 1)[0]


def _finding(verdict: Verdict, said: str, do: str = "", *, check: str = "store") -> Finding:
    return Finding(FILES, check, verdict, said, do)
