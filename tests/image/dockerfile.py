"""A Dockerfile as words: its stages, their instructions, and what a variable stands for.

Owns the grammar as far as ours uses it. Refuses, with the line, whatever it does not know: an instruction that is
skipped would make a test that proves nothing.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KNOWN = frozenset(
    "FROM ARG ENV COPY RUN WORKDIR USER ENTRYPOINT CMD LABEL EXPOSE HEALTHCHECK STOPSIGNAL".split()  # noqa: SIM905
)
_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})|\$")


class DockerfileError(Exception):
    """It says what these tests do not know, or what no builder takes; the message has the line."""


class Instruction(NamedTuple):
    """One of them, its continued lines joined."""

    line: int
    name: str
    flags: dict[str, str]
    rest: str

    def error(self, why: str) -> DockerfileError:
        return DockerfileError(f"Dockerfile:{self.line}: {self.name}: {why}")


class Stage(NamedTuple):
    """What one FROM begins."""

    base: str
    name: str
    instructions: list[Instruction]


def instructions(text: str) -> Iterator[Instruction]:
    """Yield them in order; raises DockerfileError for one that is unknown."""
    begun, words = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (words or line.strip()):
            continue
        begun = begun or number
        words += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield _instruction(begun, words.strip())
            begun, words = 0, ""
    if words:
        raise DockerfileError(f"Dockerfile:{begun}: the last line goes on")


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    if name not in KNOWN:
        raise DockerfileError(f"Dockerfile:{line}: {name}: these tests do not know this instruction")
    flags: dict[str, str] = {}
    rest = rest.lstrip()
    while found := _FLAG.match(rest):
        flags[found[1]], rest = found[2], rest[found.end() :]
    return Instruction(line, name, flags, rest)


def stages(text: str, given: Mapping[str, str]) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, with what is given for them, and the stages; a nameless one is numbered."""
    before: dict[str, str] = {}
    found: list[Stage] = []
    for each in instructions(text):
        if each.name == "FROM":
            found.append(_stage(each, before, len(found)))
        elif found:
            found[-1].instructions.append(each)
        elif each.name == "ARG":
            name, _, default = each.rest.partition("=")
            before[name] = given.get(name, default)
        else:
            raise each.error("stands before any FROM")
    return before, found


def _stage(each: Instruction, before: Mapping[str, str], number: int) -> Stage:
    words = expanded(each, before).split()
    if each.flags or len(words) not in (1, 3) or (len(words) == 3 and words[1] != "AS"):
        raise each.error("is not FROM image [AS name]")
    return Stage(words[0], words[2] if len(words) == 3 else f"{number}", [])


def expanded(each: Instruction, variables: Mapping[str, str], text: str | None = None) -> str:
    """What it says with its variables' values. One that is not there is refused, where Docker takes it as empty."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise each.error(f"{found[0]} is not declared in this stage, or not a plain variable")
        return variables[name]

    return _VARIABLE.sub(value, each.rest if text is None else text)


def pairs(each: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """What ENV or LABEL sets."""
    found = [word.partition("=") for word in shlex.split(each.rest)]
    if not found or not all(equals for _, equals, _ in found):
        raise each.error("is not name=value ...")
    return {name: expanded(each, variables, value) for name, _, value in found}
