"""Samples in the words of Prometheus' remote-write protocol: protobuf in one literal of Snappy.

Owns the bytes, and the number that says that a series has ended. Refuses to send them.
"""

import struct
from collections.abc import Iterable
from functools import cache

from tests.e2e.running import Labels

Points = list[tuple[float, float | None]]
"""Unix seconds and a value; None: the series ended before then."""
_STALE = struct.pack("<Q", 0x7FF0000000000002)


def request(series: Iterable[tuple[Labels, Points]]) -> bytes:
    """One write of these series; their labels have `__name__` among them."""
    return _snappy(b"".join(_field(1, _encoded(labels, points)) for labels, points in series))


def labelled(content: bytes, labels: Labels) -> bytes:
    """The same request by a sender that adds these labels to each series."""
    size, _ = _number(content, 0)
    parts, at, more = [], len(content) - size, _pairs(labels)
    while at < len(content):
        length, at = _number(content, at + 1)
        parts.append(_field(1, more + content[at : at + length]))
        at += length
    return _snappy(b"".join(parts))


def _encoded(labels: Labels, points: Points) -> bytes:
    """A time series of the remote-write protocol."""
    pack = struct.Struct("<d").pack
    return _pairs(labels) + b"".join(
        b"\x12\x10\x09" + (_STALE if value is None else pack(value)) + _moment(at) for at, value in points
    )


def _pairs(labels: Labels) -> bytes:
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in sorted(labels) if value
    )


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


@cache
def _moment(at: float) -> bytes:
    """Of a sample: milliseconds, which take six bytes from 1971 to 2109."""
    return b"\x10" + _varint(round(at * 1000))


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(content: bytes, at: int) -> tuple[int, int]:
    """The varint there, and where it ends."""
    number = shift = 0
    while content[at] > 0x7F:
        number |= (content[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | content[at] << shift, at + 1


def _snappy(content: bytes) -> bytes:
    """Snappy's block format with nothing made smaller: one literal."""
    return _varint(len(content)) + b"\xfc" + struct.pack("<I", len(content) - 1) + content
