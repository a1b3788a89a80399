"""One look as plain text, for scripts and for output that is no terminal: everything, line by line, no colour.

Owns its order. The lines are those of the screen, and there are as many as there is to say.
"""

from exporter.top import columns
from exporter.top.asked import Asked
from exporter.top.drawn import Line, fitted
from exporter.top.head import head
from exporter.top.rows import Kind, listed
from exporter.top.screen import rows_of
from exporter.top.seen import View

_ALL_NODES = 1 << 20


def printed(view: View, asked: Asked, *, width: int) -> str:
    """The nodes, then their GPUs, then their jobs; of jobs alone where they are asked for."""
    lines = head(view, asked.window, width, height=_ALL_NODES)
    kinds: tuple[Kind, ...] = ("gpus", "jobs") if asked.kind == "gpus" else ("jobs",)
    for kind in kinds:
        rows = listed(rows_of(asked, view, kind), kind, text=asked.text)
        found = columns.table(rows, kind, view, width=width)
        plain = columns.Table(tuple((column, width) for column, width in found.columns if not column.trend))
        if rows:
            lines += [Line(), columns.heads(plain, kind, view, sort=None, reverse=False, top=1.0)]
            lines += [columns.drawn(row, plain, view, top=1.0) for row in rows]
    return "".join(f"{fitted(one, width, view.signs).text.rstrip()}\n" for one in lines)
