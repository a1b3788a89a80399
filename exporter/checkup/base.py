"""Defines a check, a finding and the context checks run in, and runs all checks in order.

A check that exceeds its time limit or raises becomes a finding like any other. Checks change nothing on the node.
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
    """How well something is."""

    OK = "ok"
    """It works."""
    INFO = "info"
    """Neither good nor bad: it is not here and not asked for, or worth knowing."""
    WARN = "warn"
    """It could be better: something is here and broken though the configuration does not insist on it."""
    FAIL = "fail"
    """The configuration needs it and it does not work."""


OK, INFO, WARN, FAIL = Verdict


class Finding(Struct, frozen=True):
    """What one look has shown."""

    area: str
    """Part of the installation; one of AREAS."""
    check: str
    """What was looked at, a short name that stays the same from release to release."""
    verdict: Verdict
    said: str
    do: str = ""
    """What to do about it; empty where nothing need be."""


Findings = Sequence[Finding]


class CheckContext(Struct, frozen=True, kw_only=True):
    """The node as checks see it; tests put other trees in the place of its own."""

    config: Config
    environ: Mapping[str, str] = os.environ
    proc: Path = Path("/proc")
    """This process's own; the host's is `config.host.proc`."""
    dev: Path = Path("/dev")
    etc: Path = Path("/etc")
    root: Path = Path("/")
    host: str = platform.node()
    store: Path | None = None
    """Where the daemon would keep its history; None: nowhere."""
    listen_error: Callable[[str, int], str] = lambda _host, _port: ""
    """Why an address cannot be listened on; empty where it can be."""
    web_config_error: Callable[[Path], str] = lambda _: ""
    """Why a web configuration file cannot be used; empty where it can be."""

    def tries_source(self, name: str) -> bool:
        """Whether the configuration has the source of that name tried."""
        return self.config.source in ("auto", name)


def always(_: Config) -> bool:
    """It is needed whatever is configured."""
    return True


def never(_: Config) -> bool:
    """Nothing depends on it."""
    return False


class Check(Struct, frozen=True):
    """One look: gives findings, and knows those before it."""

    area: str
    name: str
    run: Callable[[CheckContext, Findings], Iterable[Finding]]
    seconds: float = 5.0
    """After which it is given up."""
    needed: Callable[[Config], bool] = never
    """Whether the daemon cannot do without, so that no answer is a failure and not a warning."""


def run_checks(
    checks: Iterable[Check], context: CheckContext, on_check: Callable[[str], None] = lambda _: None
) -> tuple[Finding, ...]:
    """Run the checks in their order; `told` is called with what is looked at. Never raises."""
    found: list[Finding] = []
    for check in checks:
        on_check(f"{check.area}: {check.name}")
        began = time.monotonic()
        found += _run_with_timeout(check, context, tuple(found))
        log.info("checked %s: %s in %.2f s", check.area, check.name, time.monotonic() - began)
    return tuple(found)


def _run_with_timeout(check: Check, context: CheckContext, before: Findings) -> list[Finding]:
    """What it finds; whoever does not come back is left to the end of the process, as a vendor's call cannot be cut."""
    results: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    thread = threading.Thread(
        target=lambda: results.put(_run_check(check, context, before)), name=check.name, daemon=True
    )
    thread.start()
    try:
        return results.get(timeout=check.seconds)
    except queue.Empty:
        message = f"gave no answer within {check.seconds:g} s"
        return [_failed_check(check, context, message, "what is asked here hangs: look at its log, and at `dmesg`")]


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
    return replace(finding, said=redact_secrets(finding.said), do=redact_secrets(finding.do))


def _failed_check(check: Check, context: CheckContext, message: str, do: str) -> Finding:
    return Finding(check.area, check.name, FAIL if check.needed(context.config) else WARN, message, do)


_ADVICE_START = re.compile(
    r"[:;.] (?=(?:install|run|set|try|look|reboot|name|give|grant|mount|restart|correct|pip|read|move|let|on a"
    r"|another program)\b|(?:is|are|does|may|was)\b[^?]*\?)",
    re.IGNORECASE,
)
"""Where the errors of this program stop to say what is wrong and begin to say what to do."""


def split_advice(text: str, otherwise: str = "") -> tuple[str, str]:
    """Split an error of ours into what is wrong and what to do; `otherwise` is done where it does not say."""
    plain = " ".join(text.split())
    place = next((found for found in _ADVICE_START.finditer(plain)), None)
    if place is None:
        return plain, otherwise
    return plain[: place.start()], plain[place.end() :]


def findings_of(findings: Iterable[Finding], *checks: str) -> Iterator[Finding]:
    """Those of the checks of these names."""
    return (finding for finding in findings if finding.check in checks)
