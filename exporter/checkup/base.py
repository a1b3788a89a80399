"""Defines a check, a finding and the context checks run in, and runs all checks in order.

A check that times out or raises becomes a finding like any other. Checks change nothing on the node.
Catches broadly, as the agent does, because checks call vendor libraries and other programs.
"""

import logging
import os
import platform
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.config import Config
from exporter.redact import redact_secrets

log = logging.getLogger(__name__)


class Verdict(StrEnum):
    """Result of a check."""

    OK = "ok"
    """It works."""
    INFO = "info"
    """Neither good nor bad: absent and not configured, or worth knowing."""
    WARN = "warn"
    """It could be better: something is broken, but the configuration does not require it."""
    FAIL = "fail"
    """The configuration requires it and it does not work."""


OK, INFO, WARN, FAIL = Verdict


class Finding(Struct, frozen=True):
    """One result of a check."""

    area: str
    """Part of the installation; one of AREAS."""
    check: str
    """Short name of what was checked; stable across releases."""
    verdict: Verdict
    message: str
    """What was found."""
    do: str = ""
    """What to do about it; empty: nothing."""


Findings = Sequence[Finding]


class CheckContext(Struct, frozen=True, kw_only=True):
    """The node that checks examine; tests replace its paths."""

    config: Config
    environ: Mapping[str, str] = os.environ
    proc: Path = Path("/proc")
    """/proc of this process; the host's is `config.host.proc`."""
    dev: Path = Path("/dev")
    etc: Path = Path("/etc")
    root: Path = Path("/")
    host: str = platform.node()
    store: Path | None = None
    """Path of the daemon's store; None: no store."""
    listen_error: Callable[[str, int], str] = lambda _host, _port: ""
    """Takes host and port; returns why the daemon cannot listen there, or ""."""
    web_config_error: Callable[[Path], str] = lambda _: ""
    """Takes a web configuration file; returns why it is invalid, or ""."""

    def tries_source(self, name: str) -> bool:
        """Whether the configuration allows the source of that name."""
        return self.config.source in ("auto", name)


def always(_: Config) -> bool:
    """The check is required whatever is configured."""
    return True


def never(_: Config) -> bool:
    """The check is never required."""
    return False


class Check(Struct, frozen=True):
    """A check: a function that returns findings, given those of the checks before it."""

    area: str
    name: str
    run: Callable[[CheckContext, Findings], Iterable[Finding]]
    seconds: float = 5.0
    """Timeout in seconds."""
    needed: Callable[[Config], bool] = never
    """Whether the configuration requires it, so that a timeout or exception is FAIL instead of WARN."""


def run_checks(
    checks: Iterable[Check], context: CheckContext, on_check: Callable[[str], None] = lambda _: None
) -> tuple[Finding, ...]:
    """Run the checks in order, and call `on_check` with the name of each. Never raises."""
    found: list[Finding] = []
    for check in checks:
        on_check(f"{check.area}: {check.name}")
        began = time.monotonic()
        found += _run_with_timeout(check, context, tuple(found))
        log.info("checked %s: %s in %.2f s", check.area, check.name, time.monotonic() - began)
    return tuple(found)


def _run_with_timeout(check: Check, context: CheckContext, before: Findings) -> list[Finding]:
    """Run a check in a thread, which is abandoned on a timeout: calls of vendor libraries cannot be interrupted."""
    results: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    thread = threading.Thread(
        target=lambda: results.put(_run_check(check, context, before)), name=check.name, daemon=True
    )
    thread.start()
    try:
        return results.get(timeout=check.seconds)
    except queue.Empty:
        message = f"gave no answer within {check.seconds:g} s"
        return [_failed_check(check, context, message, "what this check calls hangs: look at its log, and at `dmesg`")]


def _run_check(check: Check, context: CheckContext, before: Findings) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(_without_secrets(finding) for finding in check.run(context, before))
    except Exception as err:
        log.exception("the check %s: %s failed", check.area, check.name)
        message = f"the check itself failed: {type(err).__name__}: {err}"
        found.append(_failed_check(check, context, message, "please report this, with --bundle"))
    return found


def _without_secrets(finding: Finding) -> Finding:
    return replace(finding, message=redact_secrets(finding.message), do=redact_secrets(finding.do))


def _failed_check(check: Check, context: CheckContext, message: str, do: str) -> Finding:
    return failed(check.area, check.name, message, do, needed=check.needed(context.config))


def failed(area: str, check: str, message: str, do: str, *, needed: bool, absent: bool = False) -> Finding:
    """Finding on what does not work: FAIL if the configuration requires it, INFO if it is only absent, else WARN."""
    return Finding(area, check, FAIL if needed else INFO if absent else WARN, message, do)


def read_text(path: Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_ADVICE_START = re.compile(
    r"[:;.] (?=(?:install|run|set|try|look|check|use|reboot|name|give|grant|mount|restart|correct|pip|read|move|let"
    r"|on a|another program)\b|(?:is|are|does|may|was)\b[^?]*\?)",
    re.IGNORECASE,
)
"""Matches the place in this program's error messages at which the advice begins."""


def split_advice(text: str, otherwise: str = "") -> tuple[str, str]:
    """Split an error message of this program into problem and advice; without advice, return `otherwise`."""
    plain = " ".join(text.split())
    advice = _ADVICE_START.search(plain)
    return (plain[: advice.start()], plain[advice.end() :]) if advice else (plain, otherwise)


def findings_of(findings: Iterable[Finding], *checks: str) -> Iterator[Finding]:
    """Findings of the checks with these names."""
    return (finding for finding in findings if finding.check in checks)
