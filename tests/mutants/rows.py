"""Reads mutants.toml: deliberate breaks of the project, each with the tests that must notice it."""

import tomllib
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deliberate break."""

    name: str
    """What is broken, in plain words."""
    file: str
    """The file that is changed, from the root of the repository."""
    old: str
    """Exact text, which the file contains once."""
    new: str
    tests: tuple[str, ...]
    """Files or functions of which at least one must fail: pytest's, without parameters, or promtool's (*.yaml)."""

    def changed(self, text: str) -> str:
        """Apply the break to the text of its file. Raises ValueError if `old` is not in it exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"`old` occurs {found} times in {self.file}, not once: adapt the row to the new text")
        return text.replace(self.old, self.new)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


def mutants() -> tuple[Mutant, ...]:
    """Read the table. Raises msgspec.ValidationError if a row has a missing or unknown field."""
    return msgspec.convert(tomllib.loads(TABLE.read_text(encoding="utf-8")), _Table).mutant
