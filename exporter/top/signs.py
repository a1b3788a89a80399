"""The signs that are drawn: two sets, one for every terminal that shows Unicode and one of ASCII alone.

Owns the sets, how wide a text is on a terminal, and that a name which somebody chose is shown as text: what a terminal
would obey, or would not give a place of its own, is replaced. Refuses colour: a state has its own sign and its word.
"""

from unicodedata import category, east_asian_width, normalize

from msgspec import Struct


class Signs(Struct, frozen=True, kw_only=True):
    """One set."""

    ascii: bool
    marks: dict[str, str]
    """By state."""
    suspect: str
    other: str
    """Of a state that is not known here."""
    fills: dict[str, str]
    """Of a bar, by layer."""
    levels: str
    """Of a trend, from 0 up."""
    gap: str
    """In a trend: nothing was seen."""
    times: str
    cut: str
    dot: str
    down: str
    up: str
    cursor: str
    rule: str

    def name(self, text: str) -> str:
        """Make text that somebody chose safe to show, one cell or two a sign."""
        shown = "".join(map(_shown, normalize("NFC", text)))
        return shown.encode("ascii", "replace").decode() if self.ascii else shown


def _shown(sign: str) -> str:
    if sign.isascii():
        return sign if sign.isprintable() else "?"
    return "?" if not sign.isprintable() or category(sign)[0] == "M" else sign


UNICODE = Signs(
    ascii=False,
    marks={
        "unavailable": "✕", "hung": "■", "unobserved": "?", "unowned": "▲", "zombie": "◌", "unallocated": "○",
        "stalled": "◐", "active": "●",
    },
    suspect="!",
    other="·",
    fills={"useful": "█", "emfu": "▓", "ectr": "▒", "gau": "░", "unresolved": "~", "unobserved": "?"},
    levels="▁▂▃▄▅▆▇█",
    gap="·",
    times="\N{MULTIPLICATION SIGN}",
    cut="…",
    dot="·",
    down="▾",
    up="▴",
    cursor="▸",
    rule="─",
)  # fmt: skip
ASCII = Signs(
    ascii=True,
    marks={
        "unavailable": "X", "hung": "#", "unobserved": "?", "unowned": "^", "zombie": "z", "unallocated": "o",
        "stalled": "-", "active": "*",
    },
    suspect="!",
    other=".",
    fills={"useful": "#", "emfu": "+", "ectr": "-", "gau": ".", "unresolved": "~", "unobserved": "?"},
    levels="_.:-=+*#",
    gap=" ",
    times="x",
    cut="~",
    dot="-",
    down="v",
    up="^",
    cursor=">",
    rule="-",
)  # fmt: skip


def cells(text: str) -> int:
    """Columns that a text of `Signs.name` takes."""
    return len(text) if text.isascii() else sum(2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def cut(text: str, width: int, signs: Signs) -> str:
    """The beginning of it, in so many columns at most."""
    return text if cells(text) <= width else _start(text, width - 1) + signs.cut if width > 0 else ""


def middle(text: str, width: int, signs: Signs) -> str:
    """Both ends of it: ids and names differ there."""
    if cells(text) <= width or width < 5:  # noqa: PLR2004  a sign in the middle and two at each end
        return cut(text, width, signs)
    end = _start(text[::-1], (width - 1) // 2)[::-1]
    return _start(text, width - 1 - cells(end)) + signs.cut + end


def padded(text: str, width: int, *, right: bool = False) -> str:
    """With blanks up to the width."""
    blank = " " * (width - cells(text))
    return blank + text if right else text + blank


def _start(text: str, width: int) -> str:
    taken = 0
    for place, sign in enumerate(text):
        taken += cells(sign)
        if taken > width:
            return text[:place]
    return text
