"""All expectations by board, and the clusters that they and the boards' own panels name."""

import importlib

from dashboards.build import boards
from tests.dashboards.expected import moving
from tests.dashboards.expected.row import Expected

BOARDS = {board.name: board for board in boards()}
MAIN = "fleet"
TABLES: dict[str, tuple[Expected, ...]] = {
    name: (*importlib.import_module(f"tests.dashboards.expected.{name}").ROWS, *moving.ROWS.get(name, ()))
    for name in BOARDS
}
EXPECTED = [(board, row) for name, board in BOARDS.items() for row in TABLES[name]]
FILLED = [
    (board, story) for board in BOARDS.values() for story in dict.fromkeys(p.fills for p in board.panels()) if story
]
"""Stories that fill a panel which the main cluster leaves empty."""
ODD = ("blind", "unpriced")
WHOLE = ("moves", "hang_across", "hang_moves")
"""Clusters whose leaks have to add up to what is paid, at every moment and over all."""
CLUSTERS = frozenset({MAIN, *ODD, *WHOLE, *(row.scenario for _, row in EXPECTED), *(story for _, story in FILLED)})
"""Those that a test opens; no other scenario needs to be played for them."""
