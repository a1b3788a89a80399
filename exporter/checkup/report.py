"""Lists all checks in their order, and renders their findings as text, as JSON and as an exit status."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, structs

from exporter.checkup import files, machine, nccl, schedulers, telemetry
from exporter.checkup.base import FAIL, INFO, OK, WARN, Check, Finding, Verdict, always
from exporter.checkup.files import FILES, PORTS
from exporter.checkup.machine import CLOCK, DRIVER, PROFILING, PROGRAM, USER
from exporter.checkup.schedulers import JOBS
from exporter.checkup.telemetry import SAMPLE, TELEMETRY, no_source
from exporter.core.model import SECOND
from exporter.formatting import format_time
from exporter.registry import SCHEDULERS, SOURCES, import_object

AREAS = {
    PROGRAM: "Program and machine",
    USER: "User",
    CLOCK: "Clock",
    DRIVER: "NVIDIA driver",
    TELEMETRY: "Sources of telemetry",
    PROFILING: "Profiling",
    JOBS: "GPU allocation",
    FILES: "Files and folders",
    PORTS: "Addresses",
    SAMPLE: "Sample",
}
"""Area -> heading, in the order of the output."""

CHECKS = (
    Check(PROGRAM, "versions", machine.check_program),
    Check(USER, "rights", machine.check_user),
    Check(CLOCK, "synchronised", machine.check_clock),
    Check(DRIVER, "devices", machine.check_devices),
    Check(DRIVER, "module", machine.check_module),
    Check(DRIVER, "library", machine.check_library, seconds=20.0, needed=telemetry.requires_source("nvml")),
    Check(TELEMETRY, "pause", telemetry.check_pause),
    *(
        Check(TELEMETRY, name, import_object(source.check), source.check_seconds, telemetry.requires_source(name))
        for name, source in SOURCES.items()
    ),
    Check(TELEMETRY, "source", telemetry.check_source_choice, needed=always),
    Check(PROFILING, "restriction", machine.check_profiling),
    *(
        Check(JOBS, name, import_object(entry.check), entry.check_seconds, schedulers.requires_scheduler(name))
        for name, entry in SCHEDULERS.items()
    ),
    Check(JOBS, "scheduler", schedulers.check_scheduler_choice, needed=always),
    Check(JOBS, "communication", nccl.check_communication),
    Check(FILES, "folders", files.check_folders, needed=always),
    Check(FILES, "secrets", files.check_secrets, needed=always),
    Check(FILES, "store", files.check_store),
    Check(PORTS, "web config", files.check_web_config, needed=always),
    Check(PORTS, "ports", files.check_ports, seconds=15.0, needed=always),
    Check(SAMPLE, "sample", telemetry.check_sample, seconds=30.0, needed=always),
)
"""Sources and schedulers are checked before the choice among them, and the choice before the sample. Timeouts are long
because without persistence mode the driver starts for each read, which takes a second or two per GPU."""


FORMAT = 1
"""Version of the JSON; changes if a key changes its meaning."""
FAILED, NO_SOURCE = 1, 3
"""Exit statuses other than 0."""
_COLOURS = {OK: "32", INFO: "2", WARN: "33", FAIL: "31;1"}
_VERDICT_LABELS = {OK: "ok", INFO: "--", WARN: "warn", FAIL: "FAIL"}
_ADVICE_LABELS = {FAIL: "do: ", WARN: "do: ", INFO: "if wanted: ", OK: "do: "}
_NAME_WIDTH, _WORST = 24, (FAIL, WARN)


class CheckReport(Struct, frozen=True):
    """The findings of one run, and where and when it was."""

    version: str
    host: str
    wall: int
    """Unix nanoseconds."""
    user: int
    findings: tuple[Finding, ...]

    @property
    def status(self) -> int:
        """0: everything that the configuration needs works; 1: something does not; 3: no source of telemetry works."""
        if no_source(self.findings):
            return NO_SOURCE
        return FAILED if any(finding.verdict is FAIL for finding in self.findings) else 0

    @property
    def summary(self) -> str:
        """Number of findings by verdict in one line, the worst first."""
        counts = Counter(finding.verdict for finding in self.findings)
        bad = [
            f"{counts[FAIL]} thing{_plural(counts[FAIL])} {'do' if counts[FAIL] != 1 else 'does'} not work",
            f"{counts[WARN]} could be better",
        ]
        parts = [text for text, verdict in zip(bad, _WORST, strict=True) if counts[verdict]]
        return ", ".join([*parts, f"{counts[OK]} {'are' if counts[OK] != 1 else 'is'} well"])


def _plural(count: int) -> str:
    return "" if count == 1 else "s"


def as_json(report: CheckReport) -> bytes:
    """Stable keys: format, version, host, time, uid, status, summary, counts, findings.

    `said` of a finding is the deprecated name of `message`.
    """
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
        "findings": [structs.asdict(finding) | {"said": finding.message} for finding in report.findings],
    }
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"


def as_text(report: CheckReport, *, colour: bool = False, width: int = 100) -> str:
    """The summary, then all findings by area; `width` is that of the terminal in columns."""
    who = "root" if report.user == 0 else f"uid {report.user}"
    head = f"gpu-efficiency {report.version} on {report.host}, as {who}, {format_time(report.wall / SECOND)}"
    lines = [head, report.summary]
    for area, title in AREAS.items():
        found = [finding for finding in report.findings if finding.area == area]
        if found:
            lines += ["", title, *(line for finding in found for line in _lines(finding, colour=colour, width=width))]
    return "\n".join(lines) + "\n"


def _lines(finding: Finding, *, colour: bool, width: int) -> Iterator[str]:
    """Verdict, name and message of a finding; below them what to do."""
    label = f"{_VERDICT_LABELS[finding.verdict]:<4}"
    coloured = f"\x1b[{_COLOURS[finding.verdict]}m{label}\x1b[0m" if colour else label
    room = max(40, width - _NAME_WIDTH - 8)
    message_lines = _wrapped(finding.message, room)
    yield f"  {coloured}  {finding.check:<{_NAME_WIDTH}}{next(message_lines, '')}".rstrip()
    yield from (f"{'':{_NAME_WIDTH + 8}}{line}" for line in message_lines)
    if finding.do and finding.verdict is not OK:
        yield from (
            f"{'':{_NAME_WIDTH + 8}}{line}" for line in _wrapped(_ADVICE_LABELS[finding.verdict] + finding.do, room)
        )


def _wrapped(text: str, room: int) -> Iterator[str]:
    """Wrap the text, without control characters: parts of it come from other programs."""
    plain = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return iter(textwrap.wrap(plain, room, break_on_hyphens=False) or [""])
