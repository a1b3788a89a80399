"""The command install-check: looks at an installation, and packs what a bug report needs.

Owns what is printed, the exit status, and the wiring of what the checks may not import themselves: the web server's way
to read its configuration file. Exit status 0: all that the configuration needs works; 1: something does not; 2: wrong
usage or configuration; 3: there is no source of telemetry.
"""

import argparse
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from exporter import __version__
from exporter.checkup import Here, examine
from exporter.checkup.bundle import BundleError, refuse_to_overwrite
from exporter.checkup.checks import CHECKS
from exporter.checkup.places import why_not_listen
from exporter.checkup.saying import Report, as_json, as_text
from exporter.cli.bug_report import write_report
from exporter.cli.wiring import FAILED, at_least, configured, guarding_of, read
from exporter.config import Config, ConfigError
from exporter.history import place_of

_LONGEST_TRACE = 600.0


class Kept(logging.Handler):
    """What this program's own parts log meanwhile: not for the terminal, but for a bug report."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self.lines.append(self.format(record))


def install_check(args: argparse.Namespace) -> int:
    """Look, print, pack."""
    config = read(args)
    kept = _quiet()
    store = place_of(config.history.file, os.environ)
    here = Here(config=config, listens=why_not_listen, web_config=lambda _: _why_not_guard(config), store=store)
    if args.bundle is not None:
        try:
            refuse_to_overwrite(args.bundle, force=args.force)
        except BundleError as err:
            return _refused(err)
    findings = examine(CHECKS, here, _progress() if sys.stderr.isatty() else lambda _: None)
    report = Report(__version__, here.host, time.time_ns(), os.geteuid(), findings)
    _print(report, args)
    if args.bundle is None:
        return report.status
    try:
        write_report(args, here, report, kept.lines)
    except BundleError as err:
        return _refused(err)
    return report.status


def _quiet() -> Kept:
    kept = Kept()
    logging.basicConfig(handlers=[kept], level=logging.INFO, force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return kept


def _refused(err: Exception) -> int:
    print(f"gpu-efficiency: {err}", file=sys.stderr)
    return FAILED


def _progress() -> Callable[[str], None]:
    def tell(what: str) -> None:
        print(f"\r\x1b[Klooking at {what} ", end="", file=sys.stderr, flush=True)

    return tell


def _print(report: Report, args: argparse.Namespace) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if args.json:
        sys.stdout.write(as_json(report).decode())
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write(as_text(report, colour=colour, width=shutil.get_terminal_size((100, 24)).columns))


def _why_not_guard(config: Config) -> str:
    try:
        guarding_of(config)
    except ConfigError as err:
        return str(err)
    return ""


def _seconds(text: str) -> float:
    value = at_least(0)(text)
    if value > _LONGEST_TRACE:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LONGEST_TRACE:g}: use `gpu-efficiency record`")
    return value


def arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `install-check`."""
    configured(command)
    command.add_argument("--json", action="store_true", help="for programs: docs/install-check.md names the keys")
    command.add_argument("--bundle", type=Path, metavar="FILE", help="write a .tar.gz for a bug report")
    command.add_argument("--anonymous", action="store_true", help="names of people and jobs in it as hashes")
    command.add_argument(
        "--trace-seconds", type=_seconds, default=60.0, metavar="S", help="of trace in it; default 60, 0: none"
    )
    command.add_argument("--log", type=Path, metavar="FILE", help="the daemon's log, where it is not in the journal")
    command.add_argument("--force", action="store_true", help="overwrite FILE")
