"""Calls of `gpu-efficiency` in the pages, as arguments of its own parser."""

import re
import shlex
from collections.abc import Iterator

from exporter.cli import _COMMANDS
from tests.documents.blocks import Block, commands

NAMES = frozenset(name for name, *_ in _COMMANDS)
_PROGRAM = re.compile(r"(?:.*/)?gpu-efficiency")
_BEHIND_DASHES = frozenset({"kubectl", "runuser"})
"""Programs that run what stands behind `--`."""
_IMAGE = re.compile(r"registry\.example/|IMAGE$")


def calls(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Arguments of our program if a command of a shell block runs it, itself or through another program."""
    match words:
        case [program, *rest] if _PROGRAM.fullmatch(program):
            yield tuple(rest)
        case [_, "-m", "exporter", *rest]:
            yield tuple(rest)
        case ["docker", "run", *rest] if "--entrypoint" not in rest:
            yield tuple(rest[1 + next(n for n, word in enumerate(rest) if _IMAGE.match(word)) :])
        case ["ssh", *rest] if "gpu-efficiency" in rest[:-1]:
            yield tuple(rest[1 + rest.index("gpu-efficiency") :])
        case ["pipx", "run", "--spec", _, *rest] | ["uvx", "--from", _, *rest]:
            yield from calls(tuple(rest))
        case [program, *rest] if program in _BEHIND_DASHES and "--" in rest:
            yield from calls(tuple(rest[1 + rest.index("--") :]))


def arguments(words: tuple[str, ...]) -> list[str]:
    """Words as the shell passes them, without the brackets around optional ones."""
    plain = [word for each in words for word in shlex.split(each)]
    return [word.strip("[]") if word[:1] == "[" or word[-1:] == "]" else word for word in plain]


_SPAN = re.compile(r"`([^`]+)`")
_QUOTED = re.compile(rf"(?:gpu-efficiency )?(?:{'|'.join(sorted(NAMES))})(?: |$)")


def quoted(prose: str) -> Iterator[str]:
    """Our commands that a page quotes in its prose: with the program's name, or with a flag behind the command's."""
    for span in _SPAN.findall(prose):
        line = " ".join(span.replace("\\|", "|").split())
        if _QUOTED.match(line) and (line.startswith("gpu-efficiency ") or " -" in line):
            yield line.removeprefix("gpu-efficiency ")


def of_block(block: Block) -> Iterator[list[str]]:
    """Arguments of each of our commands in a shell block."""
    for words in commands(block.text):
        yield from map(arguments, calls(words))
