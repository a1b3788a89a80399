"""A table of words, which text, Markdown and HTML lay out. Owns the shape."""

from msgspec import Struct

Row = tuple[str, ...]


class Table(Struct, frozen=True, kw_only=True):
    """`head` empty: rows of a figure's name and its value. `prose` comes below."""

    title: str = ""
    head: Row = ()
    rows: tuple[Row, ...] = ()
    prose: tuple[str, ...] = ()
