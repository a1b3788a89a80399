"""The table of frameworks whose logs can be followed, and how one is told by its lines.

Owns the choice. One row and one module add a framework.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from exporter.reports.follow import huggingface, maxtext, megatron, nanotron, torchtitan
from exporter.reports.follow.said import Said


class Framework(Struct, frozen=True):
    """How the lines of one framework are read."""

    marks: tuple[bytes, ...]
    """A line that has none of these is none of its."""
    read: Callable[[str], Said | None]


FRAMEWORKS = {
    "megatron": Framework(megatron.MARKS, megatron.read),
    "torchtitan": Framework(torchtitan.MARKS, torchtitan.read),
    "maxtext": Framework(maxtext.MARKS, maxtext.read),
    "nanotron": Framework(nanotron.MARKS, nanotron.read),
    "huggingface": Framework(huggingface.MARKS, huggingface.read),
}
_DECIDING = ("step", "words")
"""What only one of them would say so."""


class Reader:
    """Reads the lines of one file; with `auto` the first line that only one framework writes decides for good."""

    def __init__(self, name: str = "auto") -> None:
        self._auto = name == "auto"
        self._choose(FRAMEWORKS if self._auto else (name,))

    def _choose(self, names: Iterable[str]) -> None:
        self._all = {name: FRAMEWORKS[name] for name in names}
        self._marks = tuple({mark for row in self._all.values() for mark in row.marks})

    def may_be(self, raw: bytes) -> bool:
        """Whether the line is worth a closer look."""
        return any(mark in raw for mark in self._marks)

    def read(self, text: str) -> Said | None:
        """What the line says."""
        for name, row in self._all.items():
            said = row.read(text)
            if said is not None:
                if self._auto and len(self._all) > 1 and said.kind in _DECIDING:
                    self._choose((name,))
                return said
        return None

    def forget(self) -> None:
        """The file is another one now."""
        if self._auto:
            self._choose(FRAMEWORKS)
