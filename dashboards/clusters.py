"""A job's number or a node's name is of one cluster: a link of a row opens the board on that row's own cluster.

Owns that part of such links, and the label they read. A fleet without the label `cluster` is one: the link opens All.
"""

import re

from msgspec.structs import replace

from dashboards.parts import Board, Column, Link, Panel, Query, Table

_OF_ONE = re.compile(r"/d/gpu-efficiency-(job|node|zombies)\?.*&var-(job_id|node)=")
_CHOSEN, _ROWS = "${cluster:queryparam}", "var-cluster=${__data.fields.home:percentencode}"
_HOME = Column(of="home", title="Cluster of the link", hidden=True)


def with_clusters(board: Board) -> Board:
    """The board with such links in its tables; the first query of each keeps the label `cluster`."""
    rows = (replace(row, panels=tuple(map(_with_home, row.panels))) for row in board.rows)
    return replace(board, rows=tuple(rows))


def _with_home(panel: Panel) -> Panel:
    if not isinstance(panel.kind, Table) or not any(_is_of_one(column.link) for column in panel.kind.columns):
        return panel
    columns = (replace(column, link=_narrowed(column.link)) for column in panel.kind.columns)
    first, *rest = panel.queries
    return replace(
        panel, kind=replace(panel.kind, columns=(*columns, _HOME)), queries=(replace(first, expr=_home(first)), *rest)
    )


def _is_of_one(link: Link | None) -> bool:
    return link is not None and _OF_ONE.search(link.url) is not None


def _narrowed(link: Link | None) -> Link | None:
    return replace(link, url=link.url.replace(_CHOSEN, _ROWS)) if link and _is_of_one(link) else link


def _home(query: Query) -> str:
    everywhere = f'label_replace({query.expr}, "home", "All", "", "")'
    return f'label_replace({everywhere}, "home", "$1", "cluster", "(.+)")'
