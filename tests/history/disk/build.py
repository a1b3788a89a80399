"""Builds the fault-injecting disk library from disk.c, and sets up processes to use it.

disk.c describes the rules and the journal.
"""

import os
from pathlib import Path

from tests.shared_library import built

LIBRARY = "libdisk.so"


def build(into: Path | None = None) -> Path:
    """Return the folder holding the library; see `built`."""
    return built(Path(__file__).resolve().parent, LIBRARY, into)


class Disk:
    """A folder on the fault-injecting disk, with its rules and journal beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve() / "disk"
        self.folder.mkdir()
        self.journal, self._rules = folder.resolve() / "disk.journal", folder.resolve() / "disk.rules"

    @property
    def env(self) -> dict[str, str]:
        """Environment of a process to whose file accesses the rules apply."""
        library = build() / LIBRARY
        return {"LD_PRELOAD": f"{library}", "DISK_FOLDER": f"{self.folder}", "DISK_RULES": f"{self._rules}"}

    @property
    def recorded(self) -> dict[str, str]:
        """The same environment, with a journal of its writes."""
        return self.env | {"DISK_JOURNAL": f"{self.journal}"}

    def fails(self, *rules: str) -> None:
        """Replace the rules; without rules no call fails."""
        draft = self._rules.with_suffix(".draft")
        draft.write_text("".join(f"{rule}\n" for rule in rules))
        os.replace(draft, self._rules)  # noqa: PTH105  a new inode makes the library read them again
