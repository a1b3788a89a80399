"""Refuses a test run in which a test was skipped for a reason nobody allowed.

Owns the reading of pytest's JUnit reports and of `allowed_skips.txt`. Refuses to judge failures: pytest does.

Usage: python tests/check_skips.py ALLOWED REPORT [REPORT ...]
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET


def allowed(text: str) -> tuple[str, ...]:
    """Give the allowed parts of a reason; each line of `text` is `part of the reason | why it is allowed`.

    Raises ValueError for a line without both halves.
    """
    lines = (line.strip() for line in text.splitlines())
    return tuple(_part(line) for line in lines if line and not line.startswith("#"))


def _part(line: str) -> str:
    part, _, why = (half.strip() for half in line.partition("|"))
    if not (part and why):
        raise ValueError(f"{line!r} is not `part of the reason | why it is allowed`; give both halves")
    return part


def skips(report: str) -> Iterator[tuple[str, str]]:
    """Yield (test, reason) for each test skipped, or failing as expected, in a JUnit report.

    A whole module skipped says "collection skipped" as message and the reason in the text, so both count as
    the reason. Raises ValueError if the report holds no test at all: nothing was proven then.
    """
    cases = list(ET.fromstring(report).iter("testcase"))  # noqa: S314  written by our own pytest a moment ago
    if not cases:
        raise ValueError("the report holds no test: did pytest collect anything?")
    for case in cases:
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        for skip in case.iter("skipped"):
            yield name, " ".join(f"{skip.get('message', '')} {skip.text or ''}".split())


def refused(found: Iterable[tuple[str, str]], parts: tuple[str, ...]) -> list[str]:
    """Give one line for each skip whose reason holds none of the allowed `parts`."""
    return [f"{test}: {reason}" for test, reason in found if not any(part in reason for part in parts)]


def main(arguments: list[str]) -> int:
    """Return 0 if every skip is allowed, 1 if one is not, 2 for wrong usage or an unreadable file."""
    if len(arguments) < 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        parts = allowed(Path(arguments[0]).read_text(encoding="utf-8"))
        found = [skip for path in arguments[1:] for skip in skips(Path(path).read_text(encoding="utf-8"))]
    except (OSError, ValueError, ET.ParseError) as error:
        sys.stderr.write(f"The skipped tests could not be checked: {error}\n")
        return 2
    return _tell(found, refused(found, parts), arguments[0])


def _tell(found: list[tuple[str, str]], lines: list[str], path: str) -> int:
    if lines:
        told = "\n  ".join(lines)
        sys.stderr.write(
            f"Skipped for a reason that {path} does not allow:\n  {told}\n"
            "Make the test run, or add its reason there with why it may stay unrun.\n"
        )
        return 1
    sys.stdout.write(f"{len(found)} skipped, each for an allowed reason\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
