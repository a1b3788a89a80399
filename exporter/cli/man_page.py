"""Writes docs/gpu-efficiency.1, which the wheel has, from the parser: `python -m exporter.cli.man_page` (make docs)."""

import sys
from collections.abc import Iterator

from exporter import __version__
from exporter.cli import DESCRIPTION, PROGRAM
from exporter.cli.command_line import Argument, Command, describe_commands
from exporter.cli.wiring import FAILED, NO_SOURCE, USAGE
from exporter.config import PREFIX
from exporter.durations import DURATION_FORMS

_EXIT_STATUS = (
    (0, "Done."),
    (FAILED, "Failed while running."),
    (USAGE, "Wrong usage or configuration."),
    (NO_SOURCE, "No usable source of telemetry."),
)
_CONVENTIONS = (
    f"A TIME is a duration such as {DURATION_FORMS}; without a unit, where that is accepted, it is seconds.",
    "A URL can be given without http://: host:port is http://host:port.",
)
_ENVIRONMENT = (
    "Sets a key of the configuration: the key's path in capitals, with _ for the dots."
    f" {PREFIX}WEB_LISTEN_ADDRESS sets web.listen_address. Variables override the file, and flags override both."
)


def man_page() -> str:
    """Return the page in the man macros of roff."""
    return "\n".join(_lines(describe_commands())) + "\n"


def _lines(commands: tuple[Command, ...]) -> Iterator[str]:
    yield rf".\" Written by `make docs` from the parser of {PROGRAM}."
    yield f'.TH {PROGRAM.upper()} 1 "" "gpu\\-efficiency\\-exporter {__version__}" "User Commands"'
    yield from (".SH NAME", rf"{_text(PROGRAM)} \- {_text(DESCRIPTION[0].lower() + DESCRIPTION[1:].rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_text(PROGRAM)}", r".I COMMAND", r"[\fIARGUMENT\fR]...")
    yield ".SH DESCRIPTION"
    yield from _paragraphs((DESCRIPTION, *_CONVENTIONS))
    yield ".SH COMMANDS"
    for command in commands:
        yield from _command(command)
    yield ".SH EXIT STATUS"
    for status, about in _EXIT_STATUS:
        yield from (".TP", f".B {status}", _text(about))
    yield from (".SH ENVIRONMENT", ".TP", rf".BI {PREFIX} KEY", _text(_ENVIRONMENT))


def _paragraphs(texts: tuple[str, ...]) -> Iterator[str]:
    for text in texts:
        yield from (".PP", _text(text))


def _command(command: Command) -> Iterator[str]:
    operands = "".join(f" [{' '.join(operand.values)}]" for operand in command.operands)
    yield f".SS {_text(f'{PROGRAM} {command.name} [FLAG]...{operands}')}"
    yield _text(command.about)
    for argument in (*command.operands, *command.flags):
        if "--help" in argument.flags:
            continue
        yield from (".TP", _heading(argument), _text(_about(argument)))
    yield ".PP"
    head, *lines = command.examples.split("\n")
    yield from (_text(head[0].upper() + head[1:]), ".PP", ".nf", *(_text(line) for line in lines), ".fi")


def _heading(argument: Argument) -> str:
    """Return the spellings of a flag and the names of its values, or the operand's name."""
    values = " ".join(rf"\fI{_text(value)}\fR" for value in argument.values)
    if not argument.flags:
        return values
    return ", ".join(rf"\fB{_text(name)}\fR" for name in argument.flags) + (f" {values}" if values else "")


def _about(argument: Argument) -> str:
    """Return the help text, with the choices that it does not mention."""
    named = all(choice in argument.about for choice in argument.choices)
    return argument.about if named else f"{argument.about}; one of {', '.join(argument.choices)}"


def _text(text: str) -> str:
    """Escape a text for roff; hyphens stay as typed, so that commands can be copied."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("~", r"\(ti").replace("^", r"\(ha")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    sys.stdout.write(man_page())
