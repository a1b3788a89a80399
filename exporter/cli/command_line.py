"""Describes the command line as data, from the parser's own tables, for shell completion and the man page."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from exporter.cli import build_parser
from exporter.config import Config
from exporter.config_errors import choices_at

_PATHS = ("FILE", "FOLDER", "TRACE")
"""Metavars of arguments that are paths."""


class Argument(Struct, frozen=True, kw_only=True):
    """A flag or an operand."""

    flags: tuple[str, ...]
    """Spellings; empty: an operand."""
    values: tuple[str, ...]
    """Names of its values; empty: it takes none."""
    about: str
    choices: tuple[str, ...]
    path: bool
    """Whether its value is a file or a folder."""
    repeatable: bool


class Command(Struct, frozen=True, kw_only=True):
    """A subcommand."""

    name: str
    about: str
    arguments: tuple[Argument, ...]
    examples: str
    """The end of its help text."""

    @property
    def flags(self) -> Iterator[Argument]:
        """Arguments that are flags."""
        return (argument for argument in self.arguments if argument.flags)

    @property
    def operands(self) -> Iterator[Argument]:
        """Arguments that are not flags."""
        return (argument for argument in self.arguments if not argument.flags)


def describe_commands() -> tuple[Command, ...]:
    """Return all subcommands in their order."""
    return tuple(
        Command(
            name=name,
            about=parser.description or "",
            arguments=tuple(_describe(action, parser.prog) for action in parser._actions),  # noqa: SLF001  not public
            examples=parser.epilog or "",
        )
        for name, parser in _subparsers(build_parser())
    )


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:  # noqa: SLF001  argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  likewise
            yield from action.choices.items()


def _describe(action: argparse.Action, prog: str) -> Argument:
    choices = action.choices if action.choices is not None else choices_at(Config, tuple(action.dest.split(".")))
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    values = metavar if isinstance(metavar, tuple) else (metavar,)
    return Argument(
        flags=tuple(action.option_strings),
        values=() if action.nargs == 0 else values,
        about=(action.help or "") % {**vars(action), "prog": prog},
        choices=tuple(map(str, choices)),
        path=action.type is Path or values[0] in _PATHS,
        repeatable=isinstance(action, argparse._AppendAction) or action.nargs == "*",  # noqa: SLF001  likewise
    )
