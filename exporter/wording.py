"""Numbers, times and texts as people may read them.

Owns their width and digits, and that a secret inside an address is not told. Refuses to know what they are of.
"""

import re
from datetime import UTC, datetime
from math import isfinite

_MANY, _UNITS = 100_000, ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NOTHING = "-"
HIDDEN = "***"
"""Stands for a secret."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")
_AUTHORITY = re.compile(r"[^/?#]*")
_VALUE = re.compile(r"""([?&][^=&#\s]*=)[^&#\s]*?(?=['")>,:;]*(?:[&#\s]|$))""")
_NO_PORT = re.compile(r":(?!\d*$)[^\]]*$")
"""After a host stands a port, so this is no host: it is a password with a slash in it that was not written as %2F."""
_BARE = re.compile(r"(?<![^\s'\"(=<])[^\s:/@'\"(<]*:(?!//)\S+@")
"""user:password@ of an address without its scheme."""
_HEADER = re.compile(r"(?is)\b(illegal header value|authorization['\"]?\s*[:=])(\s*)\S.*")
"""What HTTP libraries repeat of a header: a token file with two lines is an illegal value of one."""


def moment(seconds: float) -> str:
    """A time of day, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def elapsed(seconds: float) -> str:
    """Two units are enough: 4.5 s, 45 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 60:  # noqa: PLR2004  a minute
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    days, left = divmod(hours, 24)
    return f"{days} d {left} h" if days else f"{hours} h {rest:02d} min"


def percent(ratio: float | None) -> str:
    """One digit after the point."""
    return NOTHING if ratio is None else f"{100 * ratio:.1f} %"


def amount(value: float | None) -> str:
    """Four digits that matter, thousands set apart; above 100,000 with a unit prefix; small ones as a power of ten."""
    if value is None:
        return NOTHING
    if not isfinite(value):
        return str(value)
    if abs(value) >= _MANY:
        scale, unit = next(pair for pair in _UNITS if abs(value) >= pair[0])
        return f"{value / scale:.4g}{unit}" if abs(value) < 1e21 else f"{value:.3e}"  # noqa: PLR2004  1,000 E
    if value == int(value) or abs(value) >= 1000:  # noqa: PLR2004  four digits before the point
        return f"{value:,.0f}"
    return f"{value:.4g}"


def short(word: str, width: int) -> str:
    """Cut in the middle: names differ at their ends. What a terminal would obey is not passed on to it."""
    word = "".join(sign if sign.isprintable() else "?" for sign in word)
    half = (width - 2) // 2
    return word if len(word) <= width else f"{word[: width - 2 - half]}..{word[-half:]}"


def without_secrets(text: str) -> str:
    """The text, or address, without what stands before an @ in its addresses, and without values in their queries."""
    if "://" in text:
        text = _ADDRESS.sub(lambda found: found[1] + _VALUE.sub(rf"\1{HIDDEN}", _without_user(found[2])), text)
    text = _BARE.sub(f"{HIDDEN}@", text) if "@" in text else text
    return _HEADER.sub(rf"\1\2{HIDDEN}", text)


def _without_user(rest: str) -> str:
    """What follows ://, its user and password hidden."""
    found = _AUTHORITY.match(rest)
    authority = found[0] if found else ""
    if "@" in authority:
        return f"{HIDDEN}@{rest[authority.rindex('@') + 1 :]}"
    if "@" in rest and _NO_PORT.search(authority):
        return f"{HIDDEN}@{rest[rest.rindex('@') + 1 :]}"
    return rest


def writable(text: str) -> str:
    """The text as UTF-8 can say it: bytes that were none, as Python reads them of names and paths, are spelt out."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
