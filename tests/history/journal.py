"""What a disk was told, write by write, and what is left of it when the power goes at any point.

Owns one model of a disk that loses its power: what was synced is there; of each later write every sector of 512 bytes
is there or is not, by a coin; later truncations likewise; files that were created, removed or renamed since the folder
was synced are so up to some point of their order, for file systems keep that. A file's own sync keeps its name too.
"""

import random
import struct
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

SECTOR = 512
_HEAD = struct.Struct("<qqqq")


class Entry(NamedTuple):
    """One call that changed something."""

    kind: str
    """W wrote, T truncated, S synced, C created, U unlinked, R renamed."""
    name: str
    offset: int
    data: bytes


def entries(journal: Path) -> list[Entry]:
    """All that a journal tells; names are without the folder."""
    return list(_parsed(journal.read_bytes()))


def _parsed(told: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(told):
        kind, offset, named, size = _HEAD.unpack_from(told, at)
        at += _HEAD.size
        path, data = told[at : at + named].decode(), told[at + named : at + named + size]
        at += named + size
        yield Entry(chr(kind), PurePath(path).name, offset, data)


class _File:
    """What lies on the disk for sure, and what was written since."""

    def __init__(self) -> None:
        self.sure, self.pending = bytearray(), list[Entry]()

    def sync(self) -> None:
        for entry in self.pending:
            _apply(self.sure, entry)
        self.pending.clear()

    def left(self, coin: random.Random | None) -> bytes:
        content = bytearray(self.sure)
        for entry in self.pending:
            for part in [entry] if coin is None else _kept(entry, coin):
                _apply(content, part)
        return bytes(content)


def _kept(entry: Entry, coin: random.Random) -> Iterator[Entry]:
    if entry.kind == "T":
        yield from [entry] * coin.randrange(2)
        return
    start, end = entry.offset, entry.offset + len(entry.data)
    while start < end:
        until = min(end, (start // SECTOR + 1) * SECTOR)
        if coin.randrange(2):
            yield entry._replace(offset=start, data=entry.data[start - entry.offset : until - entry.offset])
        start = until


def _apply(content: bytearray, entry: Entry) -> None:
    if entry.kind == "T":
        del content[entry.offset :]
        content.extend(bytes(entry.offset - len(content)))
        return
    content.extend(bytes(max(0, entry.offset - len(content))))
    content[entry.offset : entry.offset + len(entry.data)] = entry.data


class PowerCut:
    """The disk after a number of entries; `folder`: the name that the folder's own syncs have."""

    def __init__(self, told: list[Entry], folder: str) -> None:
        self._sure: dict[str, _File] = {}
        self._now: dict[str, _File] = {}
        self._named: list[Entry] = []
        self._files: list[_File | None] = []
        """Names that were given or taken since the folder was synced, and to which file."""
        for entry in told:
            self._take(entry, folder)

    def _take(self, entry: Entry, folder: str) -> None:
        if entry.kind in "CUR":
            self._name(entry)
        elif entry.kind == "S" and entry.name == folder:
            self._sure = dict(self._now)
            self._named, self._files = [], []
        elif entry.kind == "S":
            if entry.name in self._now:
                self._now[entry.name].sync()
                self._sure[entry.name] = self._now[entry.name]
        else:
            self._now.setdefault(entry.name, _File()).pending.append(entry)

    def _name(self, entry: Entry) -> None:
        file = _File() if entry.kind == "C" else self._now.get(entry.name)
        self._named.append(entry)
        self._files.append(file)
        _rename(self._now, entry, file)

    def left(self, seed: int | None) -> dict[str, bytes]:
        """What is there when the power comes back; None: the power was not cut, and all is there."""
        if seed is None:
            return {name: file.left(None) for name, file in self._now.items()}
        coin, files = random.Random(seed), dict(self._sure)  # noqa: S311
        count = coin.randint(0, len(self._named))
        for entry, file in zip(self._named[:count], self._files, strict=False):
            _rename(files, entry, file)
        return {name: file.left(coin) for name, file in sorted(files.items())}


def _rename(files: dict[str, _File], entry: Entry, file: _File | None) -> None:
    if entry.kind != "C":
        files.pop(entry.name, None)
    if entry.kind != "U" and file is not None:
        files[entry.name if entry.kind == "C" else PurePath(entry.data.decode()).name] = file
