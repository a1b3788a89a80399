"""Writes OpenMetrics text with timestamps, of any length, for `backfill`.

OpenMetrics 1.0 requires each family once and each series in one piece, so scrapes are sorted by series in slices of two
hours, the length of promtool's blocks. Memory holds one slice; slices are written to files, or to a temporary file.
"""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

SLICE_SECONDS = 7200
"""Seconds of a block: promtool reads a document once for each of its blocks (prometheus/prometheus#8915)."""
_END = b"# EOF\n"
_SUFFIX = ".om"


class SampleLine(Struct, frozen=True, array_like=True):
    """A sample without its timestamp."""

    family: str
    head: str
    """Name and labels in exposition format."""
    value: str


class Scrape(Struct, frozen=True):
    """Samples of one target at one moment."""

    at: int
    """Unix seconds."""
    labels: str
    """Labels that a scrape adds: `instance="n1:19400",job="x"`."""
    samples: list[SampleLine]


class FamilyHeaders:
    """HELP and TYPE lines of each family, collected from the parsed expositions."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self.counters: set[str] = set()

    def parse(self, text: str) -> list[SampleLine]:
        """Parse an exposition of this program, in which a family has HELP, then TYPE, then samples."""
        samples, family, help_line = [], "", ""
        for line in filter(
            None, text.split("\n")
        ):  # splitlines() also splits at characters that may be part of a label value
            if line.startswith("# HELP "):
                family, help_line = line.split(" ", 3)[2], line
            elif line.startswith("# TYPE "):
                if family not in self._texts:
                    self._texts[family] = f"{help_line}\n{line}\n"
                    if line.endswith(" counter"):
                        self.counters.add(family)
            else:
                head, _, value = line.rpartition(" ")
                samples.append(SampleLine(family, head, value))
        return samples

    def header(self, family: str) -> bytes:
        """HELP and TYPE lines of a family."""
        return self._texts[family].encode()


SeriesKey = tuple[str, str]
"""Labels that the scrape adds, and the head of the sample."""


class _Slice:
    """Two hours of all targets, sorted by series."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._families: dict[str, dict[SeriesKey, bytearray]] = {}

    def add(self, scrape: Scrape) -> None:
        families, labels = self._families, scrape.labels
        suffix = f" {scrape.at}\n"
        for family, head, value in ((row.family, row.head, row.value) for row in scrape.samples):
            series = families.get(family)
            if series is None:
                series = families[family] = {}
            key = (labels, head)
            samples = series.get(key)
            if samples is None:
                samples = series[key] = bytearray()
            samples += (value + suffix).encode()

    def series_texts(self) -> Iterator[tuple[str, SeriesKey, bytes]]:
        """Yield family, series, and its samples in exposition format, a line each."""
        for family, series in self._families.items():
            for key, samples in series.items():
                head = b"\n" + _with_labels(key).encode() + b" "
                yield family, key, head[1:] + bytes(samples[:-1]).replace(b"\n", head) + b"\n"


def _with_labels(key: SeriesKey) -> str:
    """The head with the scrape's labels added."""
    labels, head = key
    return f"{head[:-1]},{labels}}}" if head.endswith("}") else f"{head}{{{labels}}}"


def slices(scrapes: Iterable[Scrape]) -> Iterator[_Slice]:
    """Group scrapes, which are in order of time, by two hours."""
    for number, group in groupby(scrapes, key=lambda scrape: scrape.at // SLICE_SECONDS):
        current = _Slice(number)
        for scrape in group:
            current.add(scrape)
        yield current


def slice_name(number: int) -> str:
    """File name of a slice; names sort by time."""
    return datetime.fromtimestamp(number * SLICE_SECONDS, UTC).strftime("%Y%m%dT%H%MZ") + _SUFFIX


def write_folder(scrapes: Iterable[Scrape], folder: Path, headers: FamilyHeaders) -> Iterator[Path]:
    """Write one document for each slice; yield its path once it is complete. Raises OSError."""
    for each in slices(scrapes):
        path = folder / slice_name(each.number)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                _write_slice(each, file, headers)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        yield path


def _write_slice(each: _Slice, file: BinaryIO, headers: FamilyHeaders) -> None:
    current = ""
    for family, _, text in each.series_texts():
        if family != current:
            file.write(headers.header(family))
            current = family
        file.write(text)
    file.write(_END)


def write_document(scrapes: Iterable[Scrape], file: BinaryIO, headers: FamilyHeaders) -> None:
    """Write one document. Slices are kept in a temporary file (in TMPDIR, as large as the document). Raises OSError."""
    with tempfile.TemporaryFile(prefix="gpu-efficiency-backfill-") as spill:
        found: dict[str, dict[SeriesKey, array[int]]] = {}
        for each in slices(scrapes):
            for family, key, text in each.series_texts():
                found.setdefault(family, {}).setdefault(key, array("q")).extend((spill.tell(), len(text)))
                spill.write(text)
        for family, series in found.items():
            file.write(headers.header(family))
            for places in series.values():
                for start, length in zip(places[::2], places[1::2], strict=True):
                    spill.seek(start)
                    file.write(spill.read(length))
        file.write(_END)
    file.flush()


def existing_documents(folder: Path) -> list[str]:
    """Names of the documents in a folder."""
    return sorted(path.name for path in folder.glob(f"*{_SUFFIX}"))
