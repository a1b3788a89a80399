"""Writes the dashboards' JSON from the boards, or says which files are not what the boards say.

Usage, from the root of the project (`make dashboards`): python -m dashboards.build [--check]
"""

import importlib
import sys
from pathlib import Path

from dashboards.clusters import with_clusters
from dashboards.currency import with_currency
from dashboards.drawing import draw
from dashboards.marks import with_marks
from dashboards.notice import with_notice
from dashboards.parts import Board

FOLDER = Path(__file__).parent


def boards() -> list[Board]:
    """Every board of the folder `boards`."""
    names = sorted(path.stem for path in (FOLDER / "boards").glob("[a-z]*.py"))
    made = (importlib.import_module(f"dashboards.boards.{name}").BOARD for name in names)
    return [with_marks(with_notice(with_clusters(with_currency(board)))) for board in made]


def main(words: list[str]) -> int:
    """Write all; with --check only compare, and give 1 where something differs or is left over."""
    files = {FOLDER / f"{board.uid}.json": draw(board) for board in boards()}
    if "--check" in words:
        there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
        differing = sorted(path.name for path in there.keys() | files if there.get(path) != files.get(path))
        print("\n".join(f"{name} is not what its board says: run `make dashboards`" for name in differing), end="")
        return bool(differing)
    for path in set(FOLDER.glob("*.json")) - files.keys():
        path.unlink()
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
