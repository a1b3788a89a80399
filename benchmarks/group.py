"""A group of figures: what is run, which code it measures, what its figures mean, and the pictures made of them.

Owns these shapes alone. A module that measures names its group at its end; `benchmarks.suite` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from benchmarks.figures import Row

if TYPE_CHECKING:  # drawing alone needs it, and it is not small
    from matplotlib.figure import Figure

Curves = dict[str, Any]
"""What a picture is drawn of: figures in lists, by name, as JSON can hold them."""


class Table(Struct, frozen=True, kw_only=True):
    """A table with columns of its own, where rows of one figure each would hide what is to be compared."""

    about: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Measured(Struct, frozen=True, kw_only=True):
    """What one run of a group found."""

    rows: list[Row]
    tables: list[Table] = []
    curves: Curves = {}


class Picture(Struct, frozen=True, kw_only=True):
    """One picture of a group, drawn from its curves alone: `docs/pictures/bench-NAME.svg`."""

    name: str
    words: str
    """What is to be seen on it, for those who cannot see it."""
    draw: Callable[[Figure, Curves], None]
    inches: tuple[float, float] = (9.0, 4.5)


class Group(Struct, frozen=True, kw_only=True):
    """One section of docs/benchmarks.md, and what makes it."""

    name: str
    title: str
    about: str
    measures: tuple[str, ...]
    """Files and folders whose change makes the figures older than the code."""
    run: Callable[[], Measured]
    quick: Callable[[], Measured] | None = None
    """A short form: it shows that the group works, and its figures mean little."""
    needs: Path | None = None
    """Recorded input beside the repository; a run of all groups leaves this one out where it is absent."""
    shortfalls: dict[str, str] = field(default_factory=dict)
    """Of a budget that is missed, by the row's `what`: why, and what would be done next."""
    pictures: tuple[Picture, ...] = ()

    @property
    def command(self) -> str:
        """What measures it again, here."""
        return f"python benchmarks/run.py {self.name}"
