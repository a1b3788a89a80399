"""Code blocks of the Markdown pages, and the commands in those that are shell.

An indented block is shell. Everything else is fenced, and the fence names its language.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from tests.test_documents import PAGES

ROOT = Path(__file__).parents[2]
RECORDS = {"CHANGELOG.md", "docs/benchmarks.md"}
"""Pages about the past: the record of changes, and records of benchmarks."""
LANGUAGES = frozenset({"sh", "promql", "toml", "yaml", "python", "ini", "text"})
_LIST = re.compile(r"( *)(?:[-*]|\d+\.) +")
_FENCE = re.compile(r" *```(\w*)")


class Block(NamedTuple):
    """One block of a page; `language` is empty if its fence names none."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Find the fenced and the indented blocks of a page."""
    lines, number, margin = text.splitlines(), 0, 0
    while number < len(lines):
        line, start = lines[number], number
        if fence := _FENCE.match(line):
            number = next(n for n in range(start + 1, len(lines)) if lines[n].strip() == "```")
            yield Block(page, start + 1, fence[1], _text(lines[start + 1 : number]))
        elif _is_code(line, margin) and (not start or not lines[start - 1].strip() or lines[start - 1][0] == "#"):
            while number + 1 < len(lines) and (not lines[number + 1].strip() or _is_code(lines[number + 1], margin)):
                number += 1
            yield Block(page, start + 1, "sh", _text(lines[start : number + 1]))
        elif item := _LIST.match(line):
            margin = item.end()
        elif line.strip() and len(line) - len(line.lstrip()) < margin:
            margin = 0
        number += 1


def prose(page: str, text: str) -> str:
    """Give a page without its blocks."""
    lines = text.splitlines()
    for block in blocks(page, text):
        fenced = lines[block.line - 1].lstrip().startswith("```")
        end = block.line - 1 + block.text.count("\n") + (2 if fenced else 0)
        lines[block.line - 1 : end + 1] = [""] * (end + 1 - (block.line - 1))
    return "\n".join(lines)


def _is_code(line: str, margin: int) -> bool:
    """Whether a line is indented beyond the text of the list in which it is."""
    return bool(line.strip()) and line.startswith(" " * (margin + 4))


def _text(lines: list[str]) -> str:
    return dedent("\n".join(lines)).strip("\n")


def every_block() -> list[Block]:
    """All blocks of all pages but the records."""
    return [
        block
        for page in PAGES
        if page not in RECORDS
        for block in blocks(page, (ROOT / page).read_text(encoding="utf-8"))
    ]


# -- shell --

_TOKEN = re.compile(
    r"""(?P<here><<-?\s*['"]?(?P<mark>\w+)['"]?[^\n]*\n.*?\n(?P=mark)(?=\n|$))
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<redirect>\d*>>?\s*&?|<(?!\())
    |(?P<end>\n|;|&&|\|\||\||&|[$<]?\(|\))
    |(?P<word>(?:"(?:\\.|[^"\\])*"|'[^']*'|\\[^\n]|[^\s;|&()<>"'\\])+)
    |(?P<space>(?:[ \t]|\\\n)+)""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS = frozenset({"do", "then", "else", "{", "}", "!", "done", "fi"})
_ASSIGNMENT = re.compile(r"\w+=")


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """Give the words of each command of a script, as written; raises ValueError for what is not understood."""
    words: list[str] = []
    at, target = 0, False
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"no shell: {text[at : at + 30]!r}")
        at = token.end()
        if token["end"]:
            yield from _command(words)
            words = []
        elif token["redirect"]:
            target = True
        elif token["word"] and not target:
            words.append(token["word"])
        elif token["word"]:
            target = False
    yield from _command(words)


def _command(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Leave out keywords, assignments and the head of a loop."""
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
        words = words[1:]
    if words and words[0] != "for":
        yield tuple(words)
