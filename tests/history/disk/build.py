"""Builds the failing disk from the C beside it, and says how a process is put upon it.

Owns the environment of such a process, and the rules while it runs. What the disk can do, disk.c says.
"""

import os
from pathlib import Path

from tests.shared_library import built

LIBRARY = "libdisk.so"


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library; see `built`."""
    return built(Path(__file__).resolve().parent, LIBRARY, into)


class Disk:
    """One folder whose files lie on the failing disk; its rules and its journal lie beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve() / "disk"
        self.folder.mkdir()
        self.journal, self._rules = folder.resolve() / "disk.journal", folder.resolve() / "disk.rules"

    @property
    def env(self) -> dict[str, str]:
        """For a process whose writes are judged by the rules."""
        library = build() / LIBRARY
        return {"LD_PRELOAD": f"{library}", "DISK_FOLDER": f"{self.folder}", "DISK_RULES": f"{self._rules}"}

    @property
    def recorded(self) -> dict[str, str]:
        """For one whose writes are put into the journal as well."""
        return self.env | {"DISK_JOURNAL": f"{self.journal}"}

    def fails(self, *rules: str) -> None:
        """From now on it behaves so; without rules it is well."""
        draft = self._rules.with_suffix(".draft")
        draft.write_text("".join(f"{rule}\n" for rule in rules))
        os.replace(draft, self._rules)  # noqa: PTH105  the inode is what tells the disk that they are others
