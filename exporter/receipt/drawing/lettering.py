"""How wide words are, and what is written where they do not fit. Refuses to draw.

Widths are those of DejaVu Sans, the widest of the fonts that a browser may take here: what fits in it fits in the
others. Measured with a browser; `tests/e2e/test_html_report.py` measures again.
"""

_PLAIN = """
32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53 100 68 69 70 77 63 58
77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50 50 61 63 55 63 62 35 63 63 28 28 58 28 97 63
61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84
"""
_BOLD = """
35 46 52 84 70 100 87 31 46 46 52 84 38 42 38 37 70 70 70 70 70 70 70 70 70 70 40 40 84 84 84 58 100 77 76 73 83 68 68
82 84 37 37 77 64 100 84 85 73 85 77 72 68 81 77 110 77 72 73 46 37 46 84 50 50 67 72 59 72 68 44 72 71 34 34 67 34 104
71 69 72 72 49 60 48 71 65 92 65 65 58 71 37 71 84
"""
_WIDTHS = tuple({chr(32 + n): int(each) / 100 for n, each in enumerate(row.split())} for row in (_PLAIN, _BOLD))
"""Of printable ASCII, from the space on, in hundredths of the size."""
_FOREIGN = 1.05
"""Of any other sign: a Chinese one is as wide as it is high."""
BODY, SMALL = 13.0, 11.5


def width(words: str, size: float = BODY, *, bold: bool = False) -> float:
    """How far they reach."""
    known = _WIDTHS[bold]
    return sum(known.get(sign, _FOREIGN) for sign in words) * size


def fitting(room: float, *choices: str, size: float = BODY, bold: bool = False) -> str:
    """The first that fits; else the last, cut."""
    for words in choices:
        if width(words, size, bold=bold) <= room:
            return words
    return cut(choices[-1], room, size=size, bold=bold)


def cut(words: str, room: float, *, size: float = BODY, bold: bool = False) -> str:
    """What fits of it. Cut in the middle: names differ at their ends."""
    if width(words, size, bold=bold) <= room:
        return words
    keep = min(len(words) - 1, int(room / size / 0.27))
    while keep and width(_without_middle(words, keep), size, bold=bold) > room:
        keep -= 1
    return _without_middle(words, keep) if keep else ""


def _without_middle(words: str, keep: int) -> str:
    end = keep // 2
    return f"{words[: keep - end]}…{words[len(words) - end :]}"


def lines(words: str, room: float, *, size: float = BODY) -> list[str]:
    """Broken between words."""
    found = [""]
    for word in words.split():
        longer = f"{found[-1]} {word}".strip()
        if width(longer, size) <= room:
            found[-1] = longer
        else:
            found.append(cut(word, room, size=size))
    return [line for line in found if line]
