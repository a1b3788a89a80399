"""Tests what derives from the parser: examples in help texts, forms of values, shell completion and the man page."""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.cli import _COMMANDS, build_parser, main
from exporter.cli.command_line import Argument, Command, describe_commands
from exporter.cli.man_page import man_page
from exporter.urls import complete_url

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu-efficiency.1"
COMMANDS = {command.name: command for command in describe_commands()}
PATH = "/usr/bin:/bin"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


PARSERS = subparsers()


def test_the_parser_has_every_command() -> None:
    assert list(PARSERS) == list(COMMANDS) == [name for name, *_ in _COMMANDS]
    assert len(PARSERS) >= 18


# -- help --


def examples(name: str) -> list[str]:
    """Command lines at the end of a command's help text, each with a comment above it."""
    head, *lines = (PARSERS[name].epilog or "").splitlines()
    assert head == "examples:"
    assert all(line.startswith("  # ") for line in lines[::2])
    return [line.strip() for line in lines[1::2]]


@pytest.mark.parametrize("name", PARSERS)
def test_the_help_of_a_command_ends_with_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert printed.endswith(f"{PARSERS[name].epilog}\n")
    assert len(set(examples(name))) >= 2
    for line in examples(name):
        program, *words = shlex.split(line)
        assert (program, words[0]) == ("gpu-efficiency", name)
        assert build_parser(name).parse_args(words).run
        assert len(line) <= 116


@pytest.mark.parametrize("name", PARSERS)
def test_every_argument_has_a_help_text(name: str) -> None:
    assert [argument for argument in COMMANDS[name].arguments if not argument.about] == []


def test_only_the_chosen_command_is_imported() -> None:
    code = (
        "import sys\nfrom exporter.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('exporter')))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.splitlines()[-1] == "exporter exporter.cli"


# -- forms of values --


def actions() -> Iterator[tuple[str, argparse.Action]]:
    for name, parser in PARSERS.items():
        yield from (
            (f"{name} {action.option_strings[-1]}", action) for action in parser._actions if action.option_strings
        )


DURATIONS = {where: each for where, each in actions() if each.metavar == "TIME" and not where.endswith("--at")}


def test_flags_of_durations_are_known_by_their_metavar() -> None:
    assert {where.split()[1] for where in DURATIONS} == {
        "--sampling.interval-seconds", "--preroll", "--duration", "--since", "--step", "--wait", "--interval",
        "--period", "--cluster.refresh-seconds", "--for", "--trace-seconds",
    }  # fmt: skip
    by_name = [where for where, each in actions() if "seconds" in where and where not in DURATIONS]
    assert by_name == []
    assert [where for where, each in actions() if each.metavar in ("S", "SECONDS")] == []


@pytest.mark.parametrize("where", DURATIONS)
def test_every_flag_of_a_duration_accepts_one_form_and_names_it(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    convert = DURATIONS[where].type
    assert callable(convert)
    assert convert("1m30s") == 90
    name, flag = where.split()
    with pytest.raises(SystemExit):
        build_parser(name).parse_args([name, flag, "5 min"])
    error = capsys.readouterr().err
    assert f"argument {'/'.join(DURATIONS[where].option_strings)}: '5 min' is not a duration such as 90s, 10m" in error


@pytest.mark.parametrize("where", DURATIONS)
def test_flags_that_took_bare_seconds_still_do(where: str) -> None:
    convert = DURATIONS[where].type
    assert callable(convert)
    if where == "pause --for":
        with pytest.raises(argparse.ArgumentTypeError):
            convert("60")
    else:
        assert convert("60") == 60


def test_every_flag_of_a_url_accepts_it_without_a_scheme() -> None:
    urls = {where: each for where, each in actions() if each.metavar == "URL" or "http://" in (each.help or "")}
    assert set(urls) >= {
        "serve --dcgm-exporter-url", "report --prometheus", "report --node", "preview --prometheus", "top --url",
    }  # fmt: skip
    assert [where for where, each in urls.items() if each.type is not complete_url] == []


# -- completion --


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed_by_bash(text: str, lines: list[list[str]], folder: Path) -> list[list[str]]:
    """What bash offers for the last word of each line."""
    (folder / "completion.bash").write_text(text, encoding="utf-8")
    calls = "".join(
        f"COMP_WORDS=({shlex.join(['gpu-efficiency', *words])}); COMP_CWORD={len(words)}; _gpu_efficiency\n"
        'printf "%s\\n" "${COMPREPLY[@]}"; echo --\n'
        for words in lines
    )
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", f"set -u\nsource ./completion.bash\n{calls}"],
        capture_output=True, text=True, check=True, cwd=folder, env={"PATH": PATH},
    )  # fmt: skip
    assert done.stderr == ""
    return [sorted(filter(None, part.split("\n"))) for part in done.stdout.split("--\n")[:-1]]


def flags_of(command: Command) -> list[str]:
    return sorted(name for flag in command.flags for name in flag.flags)


def test_bash_completes_every_command_flag_and_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, expected = [[""], ["re"]], [sorted(COMMANDS), ["record", "replay", "report", "resume"]]
    for name, command in COMMANDS.items():
        lines.append([name, "-"])
        expected.append(flags_of(command))
        for flag in command.flags:
            if flag.choices:
                lines += [[name, flag.flags[0], ""], [name, flag.flags[0], "="], [name, flag.flags[0], "=", ""]]
                expected += [sorted(filter(None, flag.choices))] * 3
    assert completed_by_bash(script("bash", capsys), lines, tmp_path) == expected
    assert len(lines) > 50


def test_bash_completes_files_where_a_file_is_expected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a trace.jsonl").touch()
    offered = completed_by_bash(
        script("bash", capsys),
        [
            ["replay", "a"], ["report", "--store", "a"], ["report", "-o", "a"], ["backfill", "--folder", "a"],
            ["report", "--since", "a"], ["report", "a"], ["leaks", "a"], ["completion", ""], ["completion", "z"],
            ["pause", "--for", ""], ["no-such-command", "a"],
        ],
        tmp_path,
    )  # fmt: skip
    assert offered == [["a trace.jsonl"]] * 4 + [[]] * 3 + [["bash", "fish", "zsh"], ["zsh"], [], []]


def checked(shell: str, text: str) -> None:
    """Let the shell check the syntax, if it is installed; the callers check the content in any case."""
    found = shutil.which(shell)
    if found is not None:
        done = subprocess.run([found, "-n", "/dev/stdin"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_zsh_gets_every_command_flag_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("zsh", capsys)
    checked("zsh", text)
    assert text.startswith("#compdef gpu-efficiency\n")
    rows = {line.split(")")[0].strip(): shlex.split(line) for line in text.splitlines() if ") _arguments " in line}
    assert list(rows) == list(COMMANDS)
    for name, command in COMMANDS.items():
        _, called, *specs, end = rows[name]
        assert (called, end) == ("_arguments", ";;")
        assert sorted(spec.lstrip("*").split("[")[0].rstrip("=") for spec in specs if "[" in spec) == flags_of(command)
        for flag in command.flags:
            spec = next(
                each for each in specs if each.lstrip("*").startswith((f"{flag.flags[0]}[", f"{flag.flags[0]}=["))
            )
            assert spec.startswith("*") == flag.repeatable
            assert spec.endswith(zsh_action(flag)), spec


def zsh_action(flag: Argument) -> str:
    if not flag.values:
        return "]"
    return f":({' '.join(flag.choices)})" if flag.choices else ":_files" if flag.path else ": "


def test_fish_gets_every_command_flag_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("fish", capsys)
    checked("fish", text)
    lines = text.splitlines()
    for name, command in COMMANDS.items():
        assert [line for line in lines if f"-n __gpu_efficiency_runs_none -a {name} -d '" in line], name
        own = [line for line in lines if f"-n '__gpu_efficiency_runs {name}' " in line]
        for flag in command.flags:
            long = next((each for each in flag.flags if each.startswith("--")), "")
            (line,) = (each for each in own if f" -l {long.removeprefix('--')} " in each)
            assert (" -r " in line) == bool(flag.values)
            assert (" -F " in line) == (flag.path and bool(flag.values))
            assert (f" -a '{' '.join(flag.choices)}'" in line) == bool(flag.choices)
    assert all(line.replace("\\'", "").count("'") % 2 == 0 for line in lines)


def test_an_unknown_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert [shell for shell in ("bash", "zsh", "fish") if shell not in error] == []


# -- man page --


def test_the_man_page_is_the_generated_one() -> None:
    """After a change of flags or help texts: make docs."""
    assert PAGE.read_text(encoding="ascii") == man_page()


def test_the_man_page_has_every_command_flag_and_example() -> None:
    plain = PAGE.read_text(encoding="ascii").replace("\\-", "-").replace("\\(ti", "~")
    for name, command in COMMANDS.items():
        section = plain.partition(f".SS gpu-efficiency {name} ")[2].partition("\n.S")[0]
        assert [flag for flag in flags_of(command) if f"\\fB{flag}\\fR" not in section] == ["--help", "-h"]
        assert all(line in section for line in examples(name))


def test_the_man_page_is_formatted_without_warnings() -> None:
    lines = PAGE.read_text(encoding="ascii").splitlines()
    assert lines[1].startswith(".TH GPU-EFFICIENCY 1 ")
    requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
    assert requests == {'.\\"', ".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".BI", ".I", ".nf", ".fi"}
    assert lines.count(".nf") == lines.count(".fi") == len(COMMANDS)
    found = shutil.which("groff")
    if found is not None:
        done = subprocess.run(
            [found, "-man", "-Tutf8", "-ww", "-z", f"{PAGE}"], capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == ("", "")
