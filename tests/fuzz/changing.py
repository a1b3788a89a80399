"""Bad input made of good: what a changed byte, a doubled line or a number beyond all bounds does to a sample.

Owns the changes, and their dice. Knows no parser: what it takes for words and numbers, any text has. Refuses chance of
its own: the same seed makes the same inputs.
"""

import random
import re
from collections.abc import Callable, Sequence

MOST_BYTES = 1 << 16
"""Longer inputs are `bombs`' business."""
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w.-]{1,40}")
_NUMBERS = (
    b"0", b"-1", b"1e308", b"1e309", b"-1e309", b"NaN", b"Inf", b"9" * 19, b"-" + b"9" * 19, b"9" * 400,
    b"9" * 5000, b"1e-320", b"0x10", b"1_000", "٣".encode(), "²".encode(), b"+5", b"00", b"1e5", b"1" + b"0" * 20,
    b"true", b"null", b'""', b"[]", b"{}",
)  # fmt: skip
"""What a field that held a number may hold another day, in another release, or by malice."""
_BYTES = (
    b"\0", b"\n", b"\r", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b" ", b"\t", b"(", b")", b"-", b"%",
    b"\x1b[31m", b"\xff", b"\xc3(", b"\xed\xa0\x80", "\u2028".encode(), "\u202e".encode(), b"\xef\xbb\xbf",
    b"..", b"/", b"#",
)  # fmt: skip
Change = Callable[[bytes, random.Random], bytes]


class Changer:
    """Inputs without end, from these samples."""

    def __init__(self, samples: Sequence[bytes], seed: int) -> None:
        self._samples, self._dice = list(samples), random.Random(seed)  # nosec B311  # noqa: S311  dice, no secret
        self._words = sorted({word for sample in samples for word in _WORD.findall(sample)}) or [b"x"]

    def one(self) -> bytes:
        """A sample with one to eight changes; now and then nothing of it is left."""
        dice = self._dice
        found = dice.choice(self._samples)
        for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 5, 8))):
            found = self._changed(found)
        return found[:MOST_BYTES]

    def _changed(self, text: bytes) -> bytes:
        dice = self._dice
        if dice.random() < 0.15:
            return self._crossed(text)
        if dice.random() < 0.15:
            return _replaced(text, _WORD, dice.choice(self._words), dice)
        return dice.choice(CHANGES)(text, dice)

    def _crossed(self, text: bytes) -> bytes:
        """The beginning of one sample, and the end of another."""
        other = self._dice.choice(self._samples)
        return text[: self._dice.randint(0, len(text))] + other[self._dice.randint(0, len(other)) :]


def _replaced(text: bytes, pattern: re.Pattern[bytes], by: bytes, dice: random.Random) -> bytes:
    places = [found.span() for found in pattern.finditer(text)]
    if not places:
        return text + by
    start, end = dice.choice(places)
    return text[:start] + by + text[end:]


def _number(text: bytes, dice: random.Random) -> bytes:
    return _replaced(text, _NUMBER, dice.choice(_NUMBERS), dice)


def _flipped(text: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(text) or 1)
    return text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]


def _inserted(text: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(text))
    return text[:at] + dice.choice(_BYTES) * dice.choice((1, 1, 1, 2, 50)) + text[at:]


def _cut_off(text: bytes, dice: random.Random) -> bytes:
    return text[: dice.randint(0, len(text))]


def _cut_out(text: bytes, dice: random.Random) -> bytes:
    start = dice.randint(0, len(text))
    return text[:start] + text[start + dice.choice((1, 1, 4, 30, 300)) :]


def _repeated(text: bytes, dice: random.Random) -> bytes:
    start = dice.randint(0, len(text))
    piece = text[start : start + dice.choice((1, 8, 60, 400))]
    return text[:start] + piece * dice.choice((2, 2, 3, 40)) + text[start:]


def _line(text: bytes, dice: random.Random) -> bytes:
    """A line twice, gone, or elsewhere."""
    lines = text.split(b"\n")
    one = lines.pop(dice.randrange(len(lines)))
    for _ in range(dice.choice((0, 1, 2))):
        lines.insert(dice.randint(0, len(lines)), one)
    return b"\n".join(lines)


def _nested(text: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(text))
    opened, closed = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"<", b">")))
    deep = dice.choice((3, 60, 2000))
    return text[:at] + opened * deep + b"1" + closed * deep + text[at:]


CHANGES: tuple[Change, ...] = (
    _number, _number, _flipped, _inserted, _cut_off, _cut_out, _repeated, _line, _nested,
)  # fmt: skip
