"""The build context: which files of this tree a builder is given, by `.dockerignore`.

Owns the rule (the last pattern that matches decides) and the copy. Refuses patterns with more in them
than `*` and `**`.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path


def context(root: Path) -> Iterator[str]:
    """Yield the paths of all files that `.dockerignore` lets through, sorted, relative to `root`."""
    rules = list(_rules((root / ".dockerignore").read_text(encoding="utf-8")))
    for path in sorted(_candidates(root, rules)):
        if not _ignored(path, rules):
            yield path


def _candidates(root: Path, rules: list[tuple[bool, re.Pattern[str]]]) -> Iterator[str]:
    """All files below what of the top is not wholly ignored: .venv and .cache are large."""
    for top in root.iterdir():
        if top.is_file():
            yield top.name
        elif not _ignored(top.name, rules):
            yield from (f"{path.relative_to(root)}" for path in top.rglob("*") if not path.is_dir())


def _rules(text: str) -> Iterator[tuple[bool, re.Pattern[str]]]:
    for line in (line.strip() for line in text.splitlines()):
        if line and not line.startswith("#"):
            again = line.startswith("!")
            yield not again, re.compile(_pattern(line.removeprefix("!").strip("/")))


def _pattern(glob: str) -> str:
    """A pattern also takes all that lies below what it names."""
    if set("?[\\") & set(glob):
        raise ValueError(f".dockerignore: {glob}: these tests know * and ** only")
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*)", glob)) + "(?:/.*)?"


def _ignored(path: str, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    ignored = False
    for ignores, pattern in rules:
        if pattern.fullmatch(path):
            ignored = ignores
    return ignored


def copied(root: Path, into: Path) -> Path:
    """The context as a folder of its own."""
    for path in context(root):
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, into / path)
    return into
