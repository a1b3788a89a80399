# ruff: noqa: INP001  a script beside the rules, not a package
"""Writes the table of drills in docs/alerts.md, between the marks, from `exporter.simulate.drills`.

Usage, from the root of the project (`make docs`): python -m alerts.build_drills
"""

from collections.abc import Iterator
from pathlib import Path

from exporter.simulate.drills import DRILLS

FILE = Path(__file__).parents[1] / "docs" / "alerts.md"
BEGIN, END = "<!-- from exporter/simulate/drills.py: do not edit -->\n", "<!-- end -->"


def document() -> str:
    """Return the page with the table as it should be."""
    text = FILE.read_text()
    before, rest = text.split(BEGIN)
    return "".join((before, BEGIN, *(f"{line}\n" for line in _table()), END, rest.split(END, 1)[1]))


def _table() -> Iterator[str]:
    yield "| drill | fires within | what happens | other alerts that fire |"
    yield "|---|---|---|---|"
    for name, drill in sorted(DRILLS.items()):
        also = ", ".join(f"`{each}`" for each in drill.companions)
        yield f"| [{name}](runbooks/{name}.md) | {drill.minutes} min | {drill.about} | {also} |"


if __name__ == "__main__":
    FILE.write_text(document())
