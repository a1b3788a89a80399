"""A block of Prometheus' storage, written as compaction leaves one: chunks, index and what they are of.

Owns the files of a block (`tsdb/docs/format` of Prometheus: index version 2, chunks version 1). Series that have the
same samples share them as bytes already encoded, which is what makes a billion samples a matter of minutes. Refuses to
know what the series mean.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

from msgspec import Struct

from benchmarks.dashboards.chunks import XOR, checksum, chunk, signed, unsigned

Refs = tuple[int, ...]
"""A series' labels: of each, sorted, the number of its name and of its value in the table of symbols."""
_SEGMENT_BYTES = 512 << 20
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_NUMBERS = count()


class Samples(Struct, frozen=True):
    """What one or more series hold in a block, encoded."""

    content: bytes
    """Chunks as they lie in a segment, one after the other."""
    first: bytes
    """Of the index: number of chunks and the time of the first."""
    rest: bytes
    """Of the index: the other chunks, each by what it is after the one before."""
    chunks: int
    samples: int


def samples(windows: Iterable[Sequence[tuple[int, float]]]) -> Samples:
    """Encode the points of some windows, a chunk each; empty ones are none."""
    filled = [points for points in windows if points]
    return joined([(points[0][0], points[-1][0], len(points), stored(points)) for points in filled])


Chunk = tuple[int, int, int, bytes]
"""First and last moment in milliseconds, number of samples, and the bytes in a segment."""


def stored(points: Sequence[tuple[int, float]]) -> bytes:
    """A chunk as it lies in a segment."""
    content = chunk(points)
    body = bytes((XOR,)) + content
    return unsigned(len(content)) + body + checksum(body)


def joined(chunks: Sequence[Chunk]) -> Samples:
    """Chunks of a series, one after the other."""
    (begin, end, _, content), *others = chunks
    rest = bytearray()
    before, size = end, len(content)
    for start, stop, _, following in others:
        rest += unsigned(start - before) + unsigned(stop - start) + signed(size)
        before, size = stop, len(following)
    return Samples(
        content=b"".join(each[3] for each in chunks),
        first=unsigned(len(chunks)) + signed(begin) + unsigned(end - begin),
        rest=bytes(rest),
        chunks=len(chunks),
        samples=sum(each[2] for each in chunks),
    )


def block(
    folder: Path, symbols: Sequence[str], series: Iterable[tuple[Refs, Samples]], *, begin: int, end: int
) -> Mapping[str, int]:
    """Write a block for [begin, end) in milliseconds; series come in the order of their refs. Returns its sizes."""
    name = _name(begin)
    home = folder / name
    (home / "chunks").mkdir(parents=True)
    with (home / "index").open("wb") as file:
        sizes = _Index(file.write, symbols).written(_placed(home / "chunks", series))
    about = {
        "ulid": name, "minTime": begin, "maxTime": end, "stats": sizes, "version": 1,
        "compaction": {"level": 3, "sources": [name]},
    }  # fmt: skip
    (home / "meta.json").write_text(json.dumps(about))
    return sizes | {"bytes": sum(path.stat().st_size for path in home.glob("**/*") if path.is_file())}


def _name(moment: int) -> str:
    """An identifier of 26 letters, the time first."""
    number = moment << 80 | next(_NUMBERS)
    return "".join(_LETTERS[number >> 5 * place & 31] for place in reversed(range(26)))


def _placed(folder: Path, series: Iterable[tuple[Refs, Samples]]) -> Iterator[tuple[Refs, Samples, int]]:
    """Write the chunks of each into segments, and say where they lie."""
    segment, at, file = -1, _SEGMENT_BYTES, None
    try:
        for refs, found in series:
            if at + len(found.content) > _SEGMENT_BYTES or file is None:
                if file is not None:
                    file.close()
                segment += 1
                file = (folder / f"{segment + 1:06d}").open("wb", buffering=1 << 20)
                at = file.write(bytes.fromhex("85BD40DD01000000"))
            file.write(found.content)
            yield refs, found, segment << 32 | at
            at += len(found.content)
    finally:
        if file is not None:
            file.close()


class _Index:
    """The index of a block, written from front to back."""

    def __init__(self, write: Callable[[bytes], object], symbols: Sequence[str]) -> None:
        self._write_on, self._symbols, self._at = write, symbols, 0
        self._postings: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._all: list[int] = []

    def written(self, series: Iterable[tuple[Refs, Samples, int]]) -> dict[str, int]:
        """Write all of it; says how much there is."""
        self._write(bytes.fromhex("BAAAD70002"))
        symbols = self._at
        self._section(_counted([_worded(symbol) for symbol in self._symbols]))
        rows = self._at
        sizes = self._series(series)
        labels = self._at
        self._section(_counted([]))
        postings, places = self._at, self._write_postings()
        table = self._at
        self._section(_counted(places))
        contents = b"".join(at.to_bytes(8, "big") for at in (symbols, rows, labels, labels, postings, table))
        self._write(contents + checksum(contents))
        return sizes

    def _series(self, series: Iterable[tuple[Refs, Samples, int]]) -> dict[str, int]:
        pairs: dict[tuple[int, int], bytes] = {}
        chunks = samples_ = 0
        for refs, found, place in series:
            labels = list(zip(refs[::2], refs[1::2], strict=True))
            self._write(bytes(-self._at % 16))
            number = self._at // 16
            self._all.append(number)
            words = [unsigned(len(labels))]
            for pair in labels:
                self._postings[pair].append(number)
                words.append(pairs.get(pair) or pairs.setdefault(pair, unsigned(pair[0]) + unsigned(pair[1])))
            entry = b"".join((*words, found.first, unsigned(place), found.rest))
            self._write(unsigned(len(entry)) + entry + checksum(entry))
            chunks += found.chunks
            samples_ += found.samples
        return {"numSeries": len(self._all), "numChunks": chunks, "numSamples": samples_}

    def _write_postings(self) -> list[bytes]:
        """Write which series have a label, for each label; says where each such list begins."""
        places = []
        for pair, numbers in chain([(None, self._all)], sorted(self._postings.items())):
            self._write(bytes(-self._at % 4))
            words = [self._symbols[each] for each in pair] if pair else ["", ""]
            places.append(b"\x02" + b"".join(map(_worded, words)) + unsigned(self._at))
            self._section(_counted([number.to_bytes(4, "big") for number in numbers]))
        return places

    def _section(self, content: bytes) -> None:
        self._write(len(content).to_bytes(4, "big") + content + checksum(content))

    def _write(self, content: bytes) -> None:
        self._write_on(content)
        self._at += len(content)


def _worded(text: str) -> bytes:
    content = text.encode()
    return unsigned(len(content)) + content


def _counted(parts: Sequence[bytes]) -> bytes:
    return len(parts).to_bytes(4, "big") + b"".join(parts)
