"""Runs the command `install-check`: checks an installation, and packs an archive for a bug report.

Owns the output, the exit status, and collecting the log, the metrics, a trace and the configuration. Everything in
the archive is redacted; the socket for training reports is not opened, because a running daemon listens on it.
Exit status 0: all that the configuration needs works; 1: something does not; 2: wrong usage; 3: no telemetry source.
"""

import argparse
import io
import logging
import os
import platform
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from exporter import __version__
from exporter.agent.sampler import Sampler
from exporter.checkup.base import CheckContext, Finding, read_text, run_checks
from exporter.checkup.bundle import (
    BundleError,
    BundleFile,
    OmittedFile,
    ProgramError,
    Redaction,
    compressed,
    describe_files,
    journal,
    known_secrets,
    log_tail,
    nvidia_smi,
    redacted,
    redacted_page,
    refuse_to_overwrite,
    register_observations,
    register_page,
    text_file,
    without_serials,
    write_bundle,
)
from exporter.checkup.files import fetch_page, listen_error
from exporter.checkup.report import CHECKS, CheckReport, as_json, as_text
from exporter.cli.serve import open_collector
from exporter.cli.tables import as_toml
from exporter.cli.wiring import config_arguments, duration_argument, fail, open_web_config, read_config
from exporter.clock import SystemClock
from exporter.config import Config, ConfigError, split_address
from exporter.core.model import Observation
from exporter.history.store import store_path
from exporter.registry import SCHEDULERS, SOURCES
from exporter.schedulers.base import SchedulerError, choose_scheduler
from exporter.schedulers.privacy import open_mask
from exporter.trace import TraceHeader, TraceWriter

SYSTEMD_UNIT = "gpu-efficiency"
_RELEVANT_VARIABLES = (
    "GPU_EFFICIENCY_",
    "NVIDIA_",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    *(name for source in SOURCES.values() for name in source.environment),
    *(name for scheduler in SCHEDULERS.values() for name in scheduler.environment),
)
"""Prefixes of the environment variables that affect this program."""


class BugReport(Struct, frozen=True):
    """Files of a bug report, and files that could not be included."""

    files: list[BundleFile] = []
    omitted: list[OmittedFile] = []


def write_bug_report(
    args: argparse.Namespace, context: CheckContext, report: CheckReport, logged: Sequence[str]
) -> None:
    """Collect the files, write the archive, and list its content on standard error. Raises BundleError."""
    key = secrets.token_bytes(32) if args.anonymous else b""
    redaction = Redaction(known_secrets(context.config, context.environ), key=key)
    bug_report = _gather(args, context, report, redaction)
    log_of_checks = text_file("check.log", "the log of install-check itself", "\n".join(logged), redaction)
    bug_report.files.append(log_of_checks)
    names = "with names of people and jobs as hashes" if args.anonymous else "with names of people and jobs as they are"
    head = redaction.text(f"gpu-efficiency {__version__} install-check, {names}: {report.summary}")
    write_bundle(args.bundle, bug_report.files, bug_report.omitted, head=head, force=args.force)
    print(f"\n{args.bundle}, {names}:\n{describe_files(bug_report.files, bug_report.omitted)}", file=sys.stderr)
    print("Known secrets are removed. Check its content before you send it.", file=sys.stderr)
    if not args.anonymous:
        print("--anonymous makes one without names of people, jobs, pods and this host.", file=sys.stderr)


def _gather(args: argparse.Namespace, context: CheckContext, report: CheckReport, redaction: Redaction) -> BugReport:
    """Collect the files; trace and metrics first, because they have the names that are redacted in all other texts."""
    found = BugReport()
    _register_host(context, redaction)
    observations = _record_trace(args, context.config, found)
    page = _fetch_metrics(context.config)
    register_observations(redaction, observations)
    register_page(redaction, page)
    # Before lines are wrapped: a secret that spans two lines is not found.
    redacted_report = structs.replace(
        report, host=redaction.text(report.host), findings=tuple(_redacted_findings(report, redaction))
    )
    config = "the configuration in force, without the files it names"
    variables = "environment variables that affect this program"
    found.files.extend(
        (
            text_file("install-check.txt", "the output of install-check", as_text(redacted_report), redaction),
            BundleFile("install-check.json", "the same as JSON", as_json(redacted_report)),
            text_file("config.toml", config, as_toml(context.config), redaction),
            text_file("environment.txt", variables, _environment(context.environ), redaction),
        )
    )
    _add_logs(args, found, redaction)
    if page:
        text = redacted_page(page, redaction)
        found.files.append(BundleFile("metrics.prom", "the running daemon's /metrics", text.encode()))
    else:
        found.omitted.append(
            OmittedFile("metrics.prom", "no daemon answers at web.listen_address, or it requires authentication")
        )
    if observations:
        trace = _packed_trace(observations, redaction, anonymous=args.anonymous)
        found.files.append(BundleFile("trace.jsonl.gz", f"{len(observations)} observations, for `replay`", trace))
    return found


def _register_host(context: CheckContext, redaction: Redaction) -> None:
    redaction.register("host", context.host, platform.node(), context.host.partition(".")[0])
    entries = [line.split(":") for line in read_text(context.etc / "passwd").splitlines()]
    redaction.register("user", *(entry[0] for entry in entries if _is_person(entry)))


def _is_person(fields: list[str]) -> bool:
    """Whether a line of passwd is a login user; names of services are words that occur in our own texts."""
    uid, shell = (fields[2], fields[-1]) if len(fields) == 7 else ("", "")  # noqa: PLR2004  passwd(5)
    return uid.isdecimal() and 1000 <= int(uid) < 65534 and not shell.endswith(("nologin", "false"))  # noqa: PLR2004


def _redacted_findings(report: CheckReport, redaction: Redaction) -> Iterator[Finding]:
    return (
        structs.replace(finding, message=redaction.text(finding.message), do=redaction.text(finding.do))
        for finding in report.findings
    )


def _environment(environ: Mapping[str, str]) -> str:
    return "".join(
        f"{name}={value}\n" for name, value in sorted(environ.items()) if name.startswith(_RELEVANT_VARIABLES)
    )


def _add_logs(args: argparse.Namespace, found: BugReport, redaction: Redaction) -> None:
    _add_log(found, redaction, "daemon.log", "the daemon's log", lambda: _daemon_log(args))
    smi = "nvidia-smi -q, without serial numbers"
    _add_log(found, redaction, "nvidia-smi.txt", smi, lambda: without_serials(nvidia_smi()))


def _daemon_log(args: argparse.Namespace) -> str:
    return log_tail(args.log) if args.log else journal(SYSTEMD_UNIT)


def _add_log(found: BugReport, redaction: Redaction, name: str, why: str, fetch: Callable[[], str]) -> None:
    try:
        text = fetch()
    except (ProgramError, OSError) as err:
        found.omitted.append(OmittedFile(name, redaction.text(f"{err}")))
        return
    if text.strip():
        found.files.append(text_file(name, why, text, redaction))
    else:
        found.omitted.append(OmittedFile(name, f"it is empty: is there a unit {SYSTEMD_UNIT}? --log names a file"))


def _fetch_metrics(config: Config) -> str:
    host, port = split_address(config.web.listen_address)
    return (fetch_page(host or "127.0.0.1", port) or "") if port else ""


def _record_trace(args: argparse.Namespace, config: Config, found: BugReport) -> list[Observation]:
    """Record observations as `record` does, but without training reports: a running daemon has their socket."""
    seconds = args.trace_seconds
    if not seconds:
        found.omitted.append(OmittedFile("trace.jsonl.gz", "--trace-seconds is 0"))
        return []
    print(f"recording {seconds:g} s of trace; Ctrl-C ends it sooner", file=sys.stderr)
    try:
        scheduler = choose_scheduler(config)
    except SchedulerError as err:
        found.omitted.append(OmittedFile("trace.jsonl.gz", f"no scheduler: {err}"))
        return []
    clock = SystemClock()
    collector = open_collector(config, clock, scheduler, open_mask(config.privacy))
    timing = config.sampling
    sampler = Sampler(collector, clock, interval=timing.interval_seconds, deadline=timing.deadline_seconds)
    try:
        return list(_until(sampler, seconds))
    finally:
        collector.close()


def _until(sampler: Sampler, seconds: float) -> Iterator[Observation]:
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield from sampler.observations(stop)
    except KeyboardInterrupt:
        return
    finally:
        timer.cancel()


def _packed_trace(observations: list[Observation], redaction: Redaction, *, anonymous: bool) -> bytes:
    raw = io.BytesIO()
    header = TraceHeader(
        host=redaction.text(platform.node()), created_wall=time.time_ns(), note="install-check --bundle"
    )
    with TraceWriter(raw, header, flush_every=0) as trace:
        for observation in observations:
            trace.append(redacted(observation, redaction, anonymous=anonymous))
    return compressed(raw.getvalue())


_LONGEST_TRACE = 600.0


class LogCollector(logging.Handler):
    """Collects the log lines of this program for the archive instead of the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self.lines.append(self.format(record))


def install_check(args: argparse.Namespace) -> int:
    """Run the checks, print the findings, and write the archive if requested."""
    config = read_config(args)
    logs = _collect_logs()
    store = store_path(config.history.file, os.environ)
    context = CheckContext(
        config=config, listen_error=listen_error, web_config_error=lambda _: _web_config_error(config), store=store
    )
    if args.bundle is not None:
        try:
            refuse_to_overwrite(args.bundle, force=args.force)
        except BundleError as err:
            return fail(err)
    findings = run_checks(CHECKS, context, _progress_line() if sys.stderr.isatty() else lambda _: None)
    report = CheckReport(__version__, context.host, time.time_ns(), os.geteuid(), findings)
    _print(report, args)
    if args.bundle is None:
        return report.status
    try:
        write_bug_report(args, context, report, logs.lines)
    except BundleError as err:
        return fail(err)
    return report.status


def _collect_logs() -> LogCollector:
    logs = LogCollector()
    logging.basicConfig(handlers=[logs], level=logging.INFO, force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logs


def _progress_line() -> Callable[[str], None]:
    def show(what: str) -> None:
        print(f"\r\x1b[Kchecking {what} ", end="", file=sys.stderr, flush=True)

    return show


def _print(report: CheckReport, args: argparse.Namespace) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if args.json:
        sys.stdout.write(as_json(report).decode())
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write(as_text(report, colour=colour, width=shutil.get_terminal_size((100, 24)).columns))


def _web_config_error(config: Config) -> str:
    try:
        open_web_config(config)
    except ConfigError as err:
        return str(err)
    return ""


def _trace_seconds(text: str) -> float:
    value = duration_argument()(text)
    if value > _LONGEST_TRACE:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_LONGEST_TRACE:g}s: use `gpu-efficiency record`")
    return value


def install_check_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `install-check`."""
    config_arguments(command)
    command.add_argument("--json", action="store_true", help="print JSON: docs/install-check.md lists the keys")
    command.add_argument("--bundle", type=Path, metavar="FILE", help="write a .tar.gz for a bug report")
    command.add_argument("--anonymous", action="store_true", help="names of people and jobs in it as hashes")
    command.add_argument(
        "--trace-seconds",
        type=_trace_seconds,
        default=60.0,
        metavar="TIME",
        help="length of the trace in it, in seconds or as 2m; default 60, 0: none",
    )
    command.add_argument("--log", type=Path, metavar="FILE", help="the daemon's log, if it is not in the journal")
    command.add_argument("--force", action="store_true", help="overwrite FILE")
