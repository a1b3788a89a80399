"""The currency stands once, at the top of a board: a row of a table names its own only where it is another one.

Owns that variable, and how tables leave its value out: a column that no row fills is not there.
"""

from msgspec.structs import replace

from dashboards.parts import Board, Panel, Query, Table, Variable
from dashboards.series import CHOSEN

_CURRENCY = Variable(
    name="currency", label="Currency",
    query=f'label_values({{__name__=~"gpu_efficiency_price_per_gpu_hour|cluster:gpu_efficiency_cost_paid:per_hour",'
    f"{CHOSEN}}}, currency)",
    says="Of all money in tables; a row in another one names it. It converts nothing.",
)  # fmt: skip


def with_currency(board: Board) -> Board:
    """The board with its currency at the top, if it has a table of money."""
    rows = tuple(replace(row, panels=tuple(map(_without, row.panels))) for row in board.rows)
    return board if rows == board.rows else replace(board, rows=rows, variables=(*board.variables, _CURRENCY))


def _without(panel: Panel) -> Panel:
    if not isinstance(panel.kind, Table) or not any(column.of == "currency" for column in panel.kind.columns):
        return panel
    columns = tuple(replace(each, empty="") if each.of == "currency" else each for each in panel.kind.columns)
    queries = tuple(replace(query, expr=_nameless(query)) for query in panel.queries)
    return replace(panel, kind=replace(panel.kind, columns=columns), queries=queries)


def _nameless(query: Query) -> str:
    return f'label_replace({query.expr}, "currency", "", "currency", "$currency")'
