"""Samples as Prometheus stores them: chunks of XORed floats, variable-length numbers, and Castagnoli's checksum.

Owns the bits: Facebook's Gorilla encoding as Prometheus has it in `tsdb/chunkenc/xor.go`. Refuses files (`blocks`).
"""

import struct
from collections.abc import Sequence
from itertools import pairwise

XOR = 1
"""The encoding's number in a chunk's head."""
_POLYNOMIAL = 0x82F63B78
_FULL = 0xFFFFFFFF
_NONE = 0xFF
_DOUBLE, _BITS = struct.Struct(">d"), struct.Struct(">Q")


def _table() -> tuple[int, ...]:
    rows = list(range(256))
    for _ in range(8):
        rows = [row >> 1 ^ (_POLYNOMIAL if row & 1 else 0) for row in rows]
    return tuple(rows)


_TABLE = _table()


def checksum(content: bytes) -> bytes:
    """CRC-32C of it, as four bytes."""
    state, table = _FULL, _TABLE
    for byte in content:
        state = table[(state ^ byte) & 0xFF] ^ state >> 8
    return (state ^ _FULL).to_bytes(4, "big")


def unsigned(number: int) -> bytes:
    """A number in as few bytes as it needs, seven bits in each."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def signed(number: int) -> bytes:
    """The same of a number that may be negative."""
    return unsigned(number << 1 if number >= 0 else (-number << 1) - 1)


def chunk(points: Sequence[tuple[int, float]]) -> bytes:
    """One chunk: moments in milliseconds, rising, and values."""
    bits = _Bits()
    first, value = points[0]
    bits.take_bytes(len(points).to_bytes(2, "big") + signed(first) + _DOUBLE.pack(value))
    values = [_BITS.unpack(_DOUBLE.pack(value))[0] for _, value in points]
    before = 0
    for place, ((earlier, _), (later, _)) in enumerate(pairwise(points)):
        gap = later - earlier
        if place:
            bits.take_gap(gap - before)
        else:
            bits.take_bytes(unsigned(gap))
        bits.take_change(values[place] ^ values[place + 1])
        before = gap
    return bits.content()


class _Bits:
    """A string of bits that grows, as text until it is asked for."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._leading, self._trailing = _NONE, 0

    def take_bytes(self, content: bytes) -> None:
        self._parts.append(f"{int.from_bytes(content, 'big'):0{8 * len(content)}b}")

    def take_gap(self, change: int) -> None:
        """How much later than expected a sample came; here they come on time, or a little off."""
        if not change:
            self._parts.append("0")
        else:
            self._parts.append(f"1111{change & (1 << 64) - 1:064b}")

    def take_change(self, change: int) -> None:
        """What differs between a value's bits and those of the one before."""
        if not change:
            self._parts.append("0")
            return
        leading, trailing = min(64 - change.bit_length(), 31), (change & -change).bit_length() - 1
        if self._leading != _NONE and leading >= self._leading and trailing >= self._trailing:
            self._parts.append(f"10{change >> self._trailing:0{64 - self._leading - self._trailing}b}")
            return
        self._leading, self._trailing = leading, trailing
        length = 64 - leading - trailing
        self._parts.append(f"11{leading:05b}{length & 63:06b}{change >> trailing:0{length}b}")

    def content(self) -> bytes:
        text = "".join(self._parts)
        text += "0" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big")
