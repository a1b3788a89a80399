"""Tables of words as text, 80 columns wide, and as Markdown. Owns widths; refuses to choose or compute figures."""

from collections.abc import Iterable, Iterator
from textwrap import wrap

from exporter.receipt.tables import Row, Table
from exporter.wording import short

WIDTH = 80
_GAP = 2
_LABEL = 30


def text(tables: Iterable[Table]) -> str:
    """Lines for a terminal."""
    blocks = ["\n".join(_block(table)) for table in tables]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _block(table: Table) -> Iterator[str]:
    if not (table.rows or table.prose):
        return
    if table.title:
        yield from wrap(safe(table.title), WIDTH)
    yield from _aligned(table) if table.head else _pairs(table.rows)
    for line in table.prose:
        inside = " " * (len(line) - len(line.lstrip()))
        yield from wrap(safe(line.lstrip()), WIDTH, initial_indent=inside, subsequent_indent=inside + "  ")


def _pairs(rows: Iterable[Row]) -> Iterator[str]:
    for name, value in rows:
        start = f"  {name:{_LABEL}}  "
        yield from wrap(safe(value), WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _aligned(table: Table) -> Iterator[str]:
    """Columns as wide as they need to be; where that is too much, the widest give."""
    rows = [tuple(map(safe, row)) for row in (table.head, *table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    while sum(widths) + _GAP * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    left = {0} | {column for column in range(len(widths)) if _wordy(table.rows, column)}
    for row in rows:
        cells = [_cell(cell, width, left=n in left) for n, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield (" " * _GAP).join(cells).rstrip()


def _wordy(rows: Iterable[Row], column: int) -> bool:
    """No number in it."""
    return not any(sign.isdigit() for row in rows for sign in row[column])


def _cell(cell: str, width: int, *, left: bool) -> str:
    fitted = short(cell, width)
    return fitted.ljust(width) if left else fitted.rjust(width)


def safe(words: str) -> str:
    """What a terminal, or a line of a comment, would obey is not passed on to it."""
    return "".join(sign if sign.isprintable() else "?" for sign in words)


# -- Markdown --


def markdown(tables: Iterable[Table]) -> str:
    """A page with headings and tables."""
    return "\n\n".join("\n".join(_section(table)) for table in tables if table.rows or table.prose) + "\n"


def _section(table: Table) -> Iterator[str]:
    if table.title:
        yield f"## {_escaped(table.title)}"
        yield ""
    if table.rows:
        head = table.head or ("", "")
        yield _row(head)
        yield "|---" + "|---:" * (len(head) - 1) + "|"
        yield from map(_row, table.rows)
    if table.rows and table.prose:
        yield ""
    yield from (f"- {_escaped(line.strip())}" for line in table.prose)


def _row(cells: Row) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(words: str) -> str:
    """Names are text, whatever signs they have."""
    return "".join(f"\\{sign}" if sign in "\\`*_|<>[]" else sign for sign in safe(words))
