"""Reads a journal of disk writes, and computes the files that are left if the power fails at any point.

Model: synced data survives. Of each later write every sector of 512 bytes survives at random, as do later truncations.
Of the creations, removals and renames since the folder was synced, a random number of the first survive, because file
systems keep their order. Syncing a file also makes its name durable.
"""

import random
import struct
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

SECTOR = 512
_HEAD = struct.Struct("<qqqq")


class Entry(NamedTuple):
    """One system call that changed a file."""

    kind: str
    """W write, T truncate, S sync, C create, U unlink, R rename."""
    name: str
    offset: int
    data: bytes


def entries(journal: Path) -> list[Entry]:
    """Return all entries of a journal; names are without the folder."""
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
    """A file's synced content, and the writes since."""

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
    """The disk after these entries; `folder` is the name in entries that sync the folder."""

    def __init__(self, told: list[Entry], folder: str) -> None:
        self._sure: dict[str, _File] = {}
        self._now: dict[str, _File] = {}
        self._named: list[Entry] = []
        self._files: list[_File | None] = []
        """Files of the creations, removals and renames since the folder was synced (`_named`)."""
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
        """Return the files after the power cut; with None as seed there was no power cut, and all writes survive."""
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
