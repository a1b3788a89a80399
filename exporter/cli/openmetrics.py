"""OpenMetrics text with timestamps, of any length: what `backfill` writes.

A document has each family once and each series in one piece, as OpenMetrics 1.0 wants it, so pages (all series at one
moment) must be sorted by series. That is done in slices of two hours, the length and the bounds of the blocks that
promtool makes: in memory are those of one slice. Slices become files of their own, or wait in a temporary file until
one document can be put together from them. Owns sorting and files. Refuses to know what a metric means.
"""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

SLICE = 7200
"""Seconds of a block: promtool reads a document once for each of its blocks (prometheus/prometheus#8915)."""
_END = b"# EOF\n"
_SUFFIX = ".om"


class Row(Struct, frozen=True, array_like=True):
    """A sample without its moment."""

    family: str
    head: str
    """Name and labels, as they are written."""
    value: str


class Page(Struct, frozen=True):
    """What one target said at a moment."""

    at: int
    """Unix seconds."""
    labels: str
    """That a scrape adds: `instance="n1:19400",job="x"`."""
    rows: list[Row]


class Headers:
    """What stands above each family, learned from the pages."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self.counters: set[str] = set()

    def read(self, text: str) -> list[Row]:
        """The rows of an exposition of this program's own: a family has HELP, then TYPE, then samples."""
        rows, family, told = [], "", ""
        for line in filter(None, text.split("\n")):  # splitlines() would cut at signs that may stand in a name
            if line.startswith("# HELP "):
                family, told = line.split(" ", 3)[2], line
            elif line.startswith("# TYPE "):
                if family not in self._texts:
                    self._texts[family] = f"{told}\n{line}\n"
                    if line.endswith(" counter"):
                        self.counters.add(family)
            else:
                head, _, value = line.rpartition(" ")
                rows.append(Row(family, head, value))
        return rows

    def above(self, family: str) -> bytes:
        """HELP and TYPE."""
        return self._texts[family].encode()


Key = tuple[str, str]
"""What the scrape adds, and the head."""


class _Slice:
    """Two hours of every target, sorted by series."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._families: dict[str, dict[Key, bytearray]] = {}

    def add(self, page: Page) -> None:
        families, labels = self._families, page.labels
        moment = f" {page.at}\n"
        for family, head, value in ((row.family, row.head, row.value) for row in page.rows):
            series = families.get(family)
            if series is None:
                series = families[family] = {}
            key = (labels, head)
            told = series.get(key)
            if told is None:
                told = series[key] = bytearray()
            told += (value + moment).encode()

    def pieces(self) -> Iterator[tuple[str, Key, bytes]]:
        """Family, series, and its samples as they are written, a line each."""
        for family, series in self._families.items():
            for key, told in series.items():
                head = b"\n" + _full(key).encode() + b" "
                yield family, key, head[1:] + bytes(told[:-1]).replace(b"\n", head) + b"\n"


def _full(key: Key) -> str:
    """The head with the scrape's labels in it."""
    labels, head = key
    return f"{head[:-1]},{labels}}}" if head.endswith("}") else f"{head}{{{labels}}}"


def slices(pages: Iterable[Page]) -> Iterator[_Slice]:
    """Pages, in the order of time, by two hours."""
    current: _Slice | None = None
    for page in pages:
        number = page.at // SLICE
        if current is None or current.number != number:
            if current is not None:
                yield current
            current = _Slice(number)
        current.add(page)
    if current is not None:
        yield current


def named(number: int) -> str:
    """File of a slice: sorted by name they are sorted by time."""
    return datetime.fromtimestamp(number * SLICE, UTC).strftime("%Y%m%dT%H%MZ") + _SUFFIX


def write_folder(pages: Iterable[Page], folder: Path, headers: Headers) -> Iterator[Path]:
    """One document for each slice; each is given when it is whole and has its name. Raises OSError."""
    for each in slices(pages):
        path = folder / named(each.number)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                _write_slice(each, file, headers)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        yield path


def _write_slice(each: _Slice, file: BinaryIO, headers: Headers) -> None:
    above = ""
    for family, _, text in each.pieces():
        if family != above:
            file.write(headers.above(family))
            above = family
        file.write(text)
    file.write(_END)


def write_document(pages: Iterable[Page], file: BinaryIO, headers: Headers) -> None:
    """One document: slices wait in a temporary file (in TMPDIR, as large as the document). Raises OSError."""
    with tempfile.TemporaryFile(prefix="gpu-efficiency-backfill-") as spill:
        found: dict[str, dict[Key, array[int]]] = {}
        for each in slices(pages):
            for family, key, text in each.pieces():
                found.setdefault(family, {}).setdefault(key, array("q")).extend((spill.tell(), len(text)))
                spill.write(text)
        for family, series in found.items():
            file.write(headers.above(family))
            for places in series.values():
                for start, length in zip(places[::2], places[1::2], strict=True):
                    spill.seek(start)
                    file.write(spill.read(length))
        file.write(_END)
    file.flush()


def already(folder: Path) -> list[str]:
    """Documents that are there."""
    return sorted(path.name for path in folder.glob(f"*{_SUFFIX}"))
