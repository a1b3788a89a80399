# ruff: noqa: INP001  a script beside the chart, not a package
"""Writes the chart's README: what a person writes is in README.tmpl.md, the table comes from values.yaml.

Owns that table: one row a key that has a comment, with its default. Refuses a key without a comment, and to judge
what a comment says.

Usage, from the root of the project: python -m helm.build_readme
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parent / "gpu-efficiency"
TEMPLATE = Path(__file__).parent / "README.tmpl.md"
README = CHART / "README.md"
MARK = "<!-- values -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w./-]*):")
_COMMENT = re.compile(r"^ *# ?(?P<text>.*)$")


class Row(NamedTuple):
    """One key of values.yaml."""

    path: str
    default: str
    """As JSON; empty for a section that has rows of its own."""
    about: str


def readme() -> str:
    """The whole of it; raises ValueError naming a key that nothing is said of."""
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    table = ["| key | default | |", "|---|---|---|", *(_line(row) for row in rows(values))]
    return TEMPLATE.read_text(encoding="utf-8").replace(MARK, "\n".join(table))


def rows(text: str) -> list[Row]:
    """A row a key, as they come; what lies below a key without comments is its default."""
    said = list(_said(text))
    values = yaml.safe_load(text)
    found = []
    for path, about in said:
        section = any(other.startswith(f"{path}.") and words for other, words in said)
        if any(path.startswith(f"{other}.") and _leaf(other, said) for other, _ in said):
            continue
        if not (about or section):
            raise ValueError(f"values.yaml: {path} has no comment")
        if about:
            found.append(Row(path, "" if section else _default(values, path), about))
    return found


def _leaf(path: str, said: list[tuple[str, str]]) -> bool:
    """Whether nothing below it has a comment."""
    return not any(other.startswith(f"{path}.") and about for other, about in said)


def _said(text: str) -> Iterator[tuple[str, str]]:
    """Each key's path and the comment right above it."""
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if told := _COMMENT.match(line):
            comment.append(told["text"])
            continue
        if key := _KEY.match(line):
            depth = len(key["indent"])
            parents = [*(p for p in parents if p[0] < depth), (depth, key["key"])]
            yield ".".join(name for _, name in parents), " ".join(comment)
        comment = []


def _default(values: Any, path: str) -> str:
    for name in path.split("."):
        values = values[name]
    return json.dumps(values)


def _line(row: Row) -> str:
    default = f"`{row.default}`".replace("|", "\\|") if row.default else ""
    about = row.about.replace("|", "\\|").replace("<", "&lt;")
    return f"| `{row.path}` | {default} | {about} |"


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
