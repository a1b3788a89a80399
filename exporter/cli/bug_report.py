"""The archive of `install-check --bundle`: what is gathered for a bug report, and what is told of it.

Owns the gathering: the daemon's log and page, a trace, the configuration. Refuses to let any of it past the redaction,
and to listen to workloads while it records: a running daemon has their socket.
"""

import argparse
import io
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from exporter import __version__
from exporter.agent.observer import Observer
from exporter.checkup import Finding, Here
from exporter.checkup.bundle import Missing, Piece, contents, packed, text_piece, without_serials, write_bundle
from exporter.checkup.places import ask
from exporter.checkup.programs import ProgramError, end_of, journal, nvidia_smi
from exporter.checkup.redaction import Redaction, known_secrets, met_in, met_on, redacted, redacted_page
from exporter.checkup.saying import Report, as_json, as_text
from exporter.cli.live import hands_over
from exporter.cli.words import as_toml
from exporter.clock import SystemClock
from exporter.config import Config, split_address
from exporter.core.model import Observation
from exporter.schedulers import SchedulerError
from exporter.schedulers.choice import choose
from exporter.schedulers.telling import open_mask
from exporter.trace import Header, TraceWriter

UNIT = "gpu-efficiency"
_TOLD = (
    "GPU_EFFICIENCY_", "DCGM_BINDINGS", "SLURM_CONF", "SLURMD_NODENAME", "NODE_NAME", "KUBERNETES_SERVICE_", "NVIDIA_",
    "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Beginnings of the environment variables that change anything for this program."""


class Evidence(Struct, frozen=True):
    """What a bug report holds, and what it lacks."""

    pieces: list[Piece] = []
    missing: list[Missing] = []


def write_report(args: argparse.Namespace, here: Here, report: Report, logged: Sequence[str]) -> None:
    """Gather, write, and say what is in it. Raises BundleError."""
    key = secrets.token_bytes(32) if args.anonymous else b""
    redaction = Redaction(known_secrets(here.config, here.environ), key=key)
    evidence = _gathered(args, here, report, redaction)
    log_of_checks = text_piece("check.log", "what this program logged meanwhile", "\n".join(logged), redaction)
    evidence.pieces.append(log_of_checks)
    names = "with names of people and jobs as hashes" if args.anonymous else "with names of people and jobs as they are"
    head = redaction.text(f"gpu-efficiency {__version__} install-check, {names}: {report.summary}")
    write_bundle(args.bundle, evidence.pieces, evidence.missing, head=head, force=args.force)
    print(f"\n{args.bundle}, {names}:\n{contents(evidence.pieces, evidence.missing)}", file=sys.stderr)
    print("Secrets are taken out as far as they are known. Look into it before you send it.", file=sys.stderr)
    if not args.anonymous:
        print("--anonymous makes one without names of people, jobs, pods and this host.", file=sys.stderr)


def _gathered(args: argparse.Namespace, here: Here, report: Report, redaction: Redaction) -> Evidence:
    """The trace and the page first: they tell the names that are then taken out of all other texts."""
    found = Evidence()
    _meet_host(here, redaction)
    observations = _trace(args, here.config, found)
    page = _page(here.config)
    met_in(redaction, observations)
    met_on(redaction, page)
    # Before it is wrapped: a secret that is cut in two is not found.
    told = structs.replace(report, host=redaction.text(report.host), findings=tuple(_clean(report, redaction)))
    config = "the configuration as it is used, without the files it names"
    variables = "environment variables that this program heeds"
    found.pieces.extend(
        (
            text_piece("install-check.txt", "what install-check said", as_text(told), redaction),
            Piece("install-check.json", "the same for programs", as_json(told)),
            text_piece("config.toml", config, as_toml(here.config), redaction),
            text_piece("environment.txt", variables, _environment(here.environ), redaction),
        )
    )
    _add_logs(args, found, redaction)
    if page:
        text = redacted_page(page, redaction)
        found.pieces.append(Piece("metrics.prom", "the running daemon's /metrics", text.encode()))
    else:
        found.missing.append(Missing("metrics.prom", "no daemon answers at web.listen_address, or it is guarded"))
    if observations:
        trace = _packed_trace(observations, redaction, anonymous=args.anonymous)
        found.pieces.append(Piece("trace.jsonl.gz", f"{len(observations)} observations, for `replay`", trace))
    return found


def _meet_host(here: Here, redaction: Redaction) -> None:
    redaction.meet("host", here.host, platform.node(), here.host.partition(".")[0])
    try:
        lines = (here.etc / "passwd").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    redaction.meet("user", *(line.partition(":")[0] for line in lines if _is_person(line.split(":"))))


def _is_person(fields: list[str]) -> bool:
    """Whether a line of passwd is somebody who logs in, and no service: those give our own words their names."""
    uid, shell = (fields[2], fields[-1]) if len(fields) == 7 else ("", "")  # noqa: PLR2004  passwd(5)
    return uid.isdecimal() and 1000 <= int(uid) < 65534 and not shell.endswith(("nologin", "false"))  # noqa: PLR2004


def _clean(report: Report, redaction: Redaction) -> Iterator[Finding]:
    return (
        structs.replace(finding, said=redaction.text(finding.said), do=redaction.text(finding.do))
        for finding in report.findings
    )


def _environment(environ: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in sorted(environ.items()) if name.startswith(_TOLD))


def _add_logs(args: argparse.Namespace, found: Evidence, redaction: Redaction) -> None:
    _add_log(found, redaction, "daemon.log", "the daemon's log", lambda: _log(args))
    smi = "nvidia-smi -q, without serial numbers"
    _add_log(found, redaction, "nvidia-smi.txt", smi, lambda: without_serials(nvidia_smi()))


def _log(args: argparse.Namespace) -> str:
    return end_of(args.log) if args.log else journal(UNIT)


def _add_log(found: Evidence, redaction: Redaction, name: str, why: str, ask_for: Callable[[], str]) -> None:
    try:
        text = ask_for()
    except (ProgramError, OSError) as err:
        found.missing.append(Missing(name, redaction.text(f"{err}")))
        return
    if text.strip():
        found.pieces.append(text_piece(name, why, text, redaction))
    else:
        found.missing.append(Missing(name, f"it is empty: is there a unit {UNIT}? --log names a file"))


def _page(config: Config) -> str:
    host, port = split_address(config.web.listen_address)
    return (ask(host or "127.0.0.1", port) or "") if port else ""


def _trace(args: argparse.Namespace, config: Config, found: Evidence) -> list[Observation]:
    """Observations for a while, as `record` makes them, but for what workloads report: a daemon has their socket."""
    seconds = args.trace_seconds
    if not seconds:
        found.missing.append(Missing("trace.jsonl.gz", "--trace-seconds is 0"))
        return []
    print(f"recording {seconds:g} s of trace; Ctrl-C ends it sooner", file=sys.stderr)
    try:
        scheduler = choose(config)
    except SchedulerError as err:
        found.missing.append(Missing("trace.jsonl.gz", f"no scheduler: {err}"))
        return []
    clock = SystemClock()
    hands = hands_over(config, clock, scheduler, open_mask(config.privacy))
    timing = config.sampling
    observer = Observer(hands, clock, interval=timing.interval_seconds, deadline=timing.deadline_seconds)
    try:
        return list(_until(observer, seconds))
    finally:
        hands.close()


def _until(observer: Observer, seconds: float) -> Iterator[Observation]:
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield from observer.observations(stop)
    except KeyboardInterrupt:
        return
    finally:
        timer.cancel()


def _packed_trace(observations: list[Observation], redaction: Redaction, *, anonymous: bool) -> bytes:
    raw = io.BytesIO()
    header = Header(host=redaction.text(platform.node()), created_wall=time.time_ns(), note="install-check --bundle")
    with TraceWriter(raw, header, flush_every=0) as trace:
        for observation in observations:
            trace.append(redacted(observation, redaction, anonymous=anonymous))
    return packed(raw.getvalue())
