"""The findings in words, as JSON, and as an exit status.

Owns the order, the width and the colours. Refuses to look at anything.
"""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from exporter.checkup import FAIL, INFO, OK, WARN, Finding, Verdict
from exporter.checkup.checks import AREAS
from exporter.checkup.telemetry import no_source
from exporter.core.model import SECOND
from exporter.wording import moment

FORMAT = 1
"""Of the JSON; it changes when a key changes its meaning."""
FAILED, NO_SOURCE = 1, 3
"""Exit statuses, beside 0."""
_COLOURS = {OK: "32", INFO: "2", WARN: "33", FAIL: "31;1"}
_WORDS = {OK: "ok", INFO: "--", WARN: "warn", FAIL: "FAIL"}
_LABELS = {FAIL: "do: ", WARN: "do: ", INFO: "if wanted: ", OK: "do: "}
_NAMES, _WORST = 24, (FAIL, WARN)


class Report(Struct, frozen=True):
    """One examination."""

    version: str
    host: str
    wall: int
    """Unix nanoseconds."""
    user: int
    findings: tuple[Finding, ...]

    @property
    def status(self) -> int:
        """0: nothing is broken that the configuration needs; 1: something is; 3: there is no source of telemetry."""
        if no_source(self.findings):
            return NO_SOURCE
        return FAILED if any(finding.verdict is FAIL for finding in self.findings) else 0

    @property
    def summary(self) -> str:
        """One line, the worst first."""
        counts = Counter(finding.verdict for finding in self.findings)
        bad = [
            f"{counts[FAIL]} thing{_s(counts[FAIL])} {'do' if counts[FAIL] != 1 else 'does'} not work",
            f"{counts[WARN]} could be better",
        ]
        told = [text for text, verdict in zip(bad, _WORST, strict=True) if counts[verdict]]
        return ", ".join([*told, f"{counts[OK]} {'are' if counts[OK] != 1 else 'is'} well"])


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def as_json(report: Report) -> bytes:
    """Keys that stay: format, version, host, time, uid, status, summary, counts, findings."""
    counts = Counter(str(finding.verdict) for finding in report.findings)
    tree: dict[str, Any] = {
        "format": FORMAT,
        "version": report.version,
        "host": report.host,
        "time": report.wall / SECOND,
        "uid": report.user,
        "status": report.status,
        "summary": report.summary,
        "counts": {f"{verdict}": counts[verdict] for verdict in Verdict},
        "findings": report.findings,
    }
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"


def as_text(report: Report, *, colour: bool = False, width: int = 100) -> str:
    """All findings by area, after the summary; `width` is that of the terminal."""
    who = "root" if report.user == 0 else f"uid {report.user}"
    head = f"gpu-efficiency {report.version} on {report.host}, as {who}, {moment(report.wall / SECOND)}"
    lines = [head, report.summary]
    for area, title in AREAS.items():
        found = [finding for finding in report.findings if finding.area == area]
        if found:
            lines += ["", title, *(line for finding in found for line in _lines(finding, colour=colour, width=width))]
    return "\n".join(lines) + "\n"


def _lines(finding: Finding, *, colour: bool, width: int) -> Iterator[str]:
    """The verdict, the check's name, what was seen; below it what to do."""
    word = f"{_WORDS[finding.verdict]:<4}"
    mark = f"\x1b[{_COLOURS[finding.verdict]}m{word}\x1b[0m" if colour else word
    room = max(40, width - _NAMES - 8)
    said = _wrapped(finding.said, room)
    yield f"  {mark}  {finding.check:<{_NAMES}}{next(said, '')}".rstrip()
    yield from (f"{'':{_NAMES + 8}}{line}" for line in said)
    if finding.do and finding.verdict is not OK:
        yield from (f"{'':{_NAMES + 8}}{line}" for line in _wrapped(_LABELS[finding.verdict] + finding.do, room))


def _wrapped(text: str, room: int) -> Iterator[str]:
    """What a terminal would obey is not passed on to it: some of it was said by other programs."""
    plain = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return iter(textwrap.wrap(plain, room, break_on_hyphens=False) or [""])
