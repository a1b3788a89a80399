"""Runs the command `completion`: prints a completion script for bash, zsh or fish, derived from the parser.

The scripts complete subcommands, flags, values with choices, and paths. They never run `gpu-efficiency`.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping

from exporter.cli import PROGRAM
from exporter.cli.command_line import Argument, Command, describe_commands

_BASH_HEAD = """\
# bash completion of gpu-efficiency: source <(gpu-efficiency completion bash)
_gpu_efficiency_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$1")
}
_gpu_efficiency() {
    local command=${COMP_WORDS[1]} current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local flags="" words="" files=""
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    COMPREPLY=()"""
_BASH_TAIL = """\
    if [[ $current == -* ]]; then
        words=$flags
    elif [[ $files ]]; then
        _gpu_efficiency_files "$current"
        return
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -F _gpu_efficiency gpu-efficiency"""
_ZSH_HEAD = """\
#compdef gpu-efficiency
# zsh completion of gpu-efficiency: a file called _gpu-efficiency in a folder of $fpath, or
# source <(gpu-efficiency completion zsh)
_gpu_efficiency() {
    local -a commands"""
_ZSH_MIDDLE = """\
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in"""
_ZSH_TAIL = """\
    esac
}
if [[ $funcstack[1] == _gpu_efficiency || $funcstack[1] == _gpu-efficiency ]]; then
    _gpu_efficiency "$@"
else
    compdef _gpu_efficiency gpu-efficiency
fi"""
_FISH_HEAD = """\
# fish completion of gpu-efficiency: gpu-efficiency completion fish > ~/.config/fish/completions/gpu-efficiency.fish
function __gpu_efficiency_runs
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]
end
function __gpu_efficiency_runs_none
    test (count (commandline -opc)) -eq 1
end
complete -c gpu-efficiency -f"""


def completion(args: argparse.Namespace) -> int:
    """Print the script."""
    print("\n".join(_SHELLS[args.shell](describe_commands())))
    return 0


def completion_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `completion`."""
    command.add_argument("shell", choices=tuple(_SHELLS), help="the shell that reads the script")


# -- bash --


def _bash(commands: Iterable[Command]) -> Iterator[str]:
    every = tuple(commands)
    yield _BASH_HEAD
    yield "    if (( COMP_CWORD == 1 )); then"
    yield f'        mapfile -t COMPREPLY < <(compgen -W "{" ".join(each.name for each in every)}" -- "$current")'
    yield "        return"
    yield "    fi"
    yield '    case "$command $previous" in'
    for command in every:
        yield from (f"        {_bash_case(command, flag)}" for flag in command.flags if flag.values)
    yield "    esac"
    yield "    case $command in"
    yield from (f"        {_bash_command(command)} ;;" for command in every)
    yield "    esac"
    yield _BASH_TAIL


def _bash_case(command: Command, flag: Argument) -> str:
    """Return the case of a flag's value."""
    patterns = "|".join(f'"{command.name} {name}"' for name in flag.flags)
    if flag.path:
        return f'{patterns}) _gpu_efficiency_files "$current"; return ;;'
    words = f'mapfile -t COMPREPLY < <(compgen -W {shlex.quote(" ".join(flag.choices))} -- "$current"); '
    return f"{patterns}) {words if flag.choices else ''}return ;;"


def _bash_command(command: Command) -> str:
    """Return the case of a subcommand: its flags, and what its operands are."""
    words = [choice for operand in command.operands for choice in operand.choices]
    files = "; files=yes" if any(operand.path for operand in command.operands) else ""
    flags = " ".join(name for flag in command.flags for name in flag.flags)
    return f"{command.name}) flags={shlex.quote(flags)}; words={shlex.quote(' '.join(words))}{files}"


# -- zsh --


def _zsh(commands: Iterable[Command]) -> Iterator[str]:
    every = tuple(commands)
    yield _ZSH_HEAD
    yield "    commands=("
    yield from (f"        {_quoted(f'{each.name}:{_zsh_text(each.about)}')}" for each in every)
    yield "    )"
    yield _ZSH_MIDDLE
    for command in every:
        specs = [spec for argument in command.arguments for spec in _zsh_specs(argument)]
        yield f"        {command.name}) _arguments {' '.join(map(_quoted, specs))} ;;"
    yield _ZSH_TAIL


def _zsh_specs(argument: Argument) -> Iterator[str]:
    """Yield what `_arguments` reads: a line for each spelling of a flag."""
    action = f"({' '.join(argument.choices)})" if argument.choices else "_files" if argument.path else " "
    values = "".join(f":{_zsh_text(value)}:{action}" for value in argument.values)
    if not argument.flags:
        yield f"*{values}" if argument.repeatable else values
    for name in argument.flags:
        equals = "=" if len(argument.values) == 1 and name.startswith("--") else ""
        yield f"{'*' if argument.repeatable else ''}{name}{equals}[{_zsh_text(argument.about)}]{values}"


def _zsh_text(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\[]:" else char for char in text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# -- fish --


def _fish(commands: Iterable[Command]) -> Iterator[str]:
    yield _FISH_HEAD
    for command in commands:
        about = _fish_text(command.about)
        yield f"complete -c {PROGRAM} -n __gpu_efficiency_runs_none -a {command.name} -d {about}"
        runs = f"complete -c {PROGRAM} -n '__gpu_efficiency_runs {command.name}'"
        yield from (f"{runs} {_fish_options(argument)}" for argument in command.arguments if _completes(argument))


def _completes(argument: Argument) -> bool:
    return bool(argument.flags or argument.path or argument.choices)


def _fish_options(argument: Argument) -> str:
    """Return the options of `complete` for an argument."""
    names = [f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in argument.flags]
    choices = [f"-a {_fish_text(' '.join(argument.choices))}"] if argument.choices else []
    value = ["-F" if argument.path else "-f"]
    required = ["-r"] if argument.flags and argument.values else []
    wanted = required + value if argument.values else []
    return " ".join((*names, *wanted, *choices, f"-d {_fish_text(argument.about)}"))


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SHELLS: Mapping[str, Callable[[Iterable[Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
