"""Runs the command `report`: one job's cost and losses, two jobs compared, or sums over many jobs.

Parses flags, collects job records (from Prometheus, stores, nodes or this node) and writes the output.
"""

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from exporter.cli import PROGRAM
from exporter.cli.own_daemon import daemon_endpoint, daemon_url, daemon_users, listening_users
from exporter.cli.progress import WAITED, ProgressBar, counted, progress_arguments
from exporter.cli.wiring import (
    ca_file_argument,
    config_file_argument,
    duration_argument,
    fail,
    parse_headers,
    read_config,
    timestamp_argument,
    tls_context,
    url_argument,
)
from exporter.config import Config, ConfigError
from exporter.core.job_record import JobRecord, JobRecordQuery
from exporter.core.model import parse_display_id
from exporter.files import OutputError, may_exist, write_output
from exporter.formatting import format_time
from exporter.preview.prometheus import PrometheusClient, PrometheusError, PrometheusSeries
from exporter.redact import redact_secrets
from exporter.report.analysis import compare_reports, estimate_changes
from exporter.report.energy import carbon_notes
from exporter.report.job_names import find_named, members_message, naming_notes, split_step
from exporter.report.model import JobIdentity, JobReport, ReportComparison, ReportError
from exporter.report.nodes import UNIX, NodeRecords, fetch_records
from exporter.report.prometheus import report_from_prometheus
from exporter.report.query import JobQuery, jobs_named
from exporter.report.ranking import summary_lines, summary_tables
from exporter.report.records import RecordSources, join_records
from exporter.report.summary import (
    GROUPINGS,
    FleetUsage,
    RentOffer,
    UsageSummary,
    parse_offer,
    summarize,
    with_comparisons,
)
from exporter.report.text import (
    ReportTable,
    comparison_tables,
    render_line,
    render_markdown,
    render_short,
    render_text,
    report_tables,
)
from exporter.report.usage import (
    PERIOD_SECONDS,
    AnyInput,
    Period,
    UsageInputs,
    default_period,
    hours_unknown,
    job_identity,
    latest_records,
    peak_gpus,
    split_periods,
    unheld_usage,
    usage_records,
)
from exporter.report.usage_prometheus import PrometheusUsage, StoredUsage, UsageFilter

if TYPE_CHECKING:
    from exporter.history.store import HistoryStore

StoreQuery = Callable[["HistoryStore"], Iterable[AnyInput]]

_RETRY_SECONDS = 0.5
_GATEWAY_NOTE = "a gateway was asked, which tells each user of his own jobs alone"
_RECENT_SECONDS = 600.0
"""Jobs that ended this many seconds ago are certainly in the store."""


class GatherError(Exception):
    """No source of job records could be read; the message gives source, reason and what to do."""


def _source_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of sources; the default is this node's store and daemon."""
    url_argument(command, "--prometheus", help="where the daemons' series are stored")
    command.add_argument("--match", default="", metavar="SELECTOR", help="only these series, such as 'cluster=\"a\"'")
    command.add_argument(
        "--store", action="append", default=[], type=Path, metavar="FILE", help="a node's store, or a copy; repeatable"
    )
    url_argument(command, "--node", action="append", default=[], help="a node's daemon, node7:19400; repeatable")
    command.add_argument("--header", action="append", default=[], metavar="LINE", help="sent with it; @FILE: its lines")
    ca_file_argument(command, "servers")


def _gather_records(args: argparse.Namespace, wanted: JobRecordQuery) -> tuple[tuple[JobRecord, ...], RecordSources]:
    """Return all matching records of the named sources. Raises GatherError, ConfigError."""
    records, sources = _gather(args, wanted, lambda store: store.job_records(wanted))
    return tuple(records), sources


def _gather(
    args: argparse.Namespace, wanted: JobRecordQuery, query: "StoreQuery[AnyInput]"
) -> tuple[Iterable[AnyInput | JobRecord], RecordSources]:
    """Return the results of the query, to be iterated once. Iterating them raises GatherError, too."""
    if args.store or args.node:
        return _from_named_sources(args, wanted, query)
    return _from_this_node(args, wanted, query)


def _wait_for_end(args: argparse.Namespace, wanted: JobRecordQuery) -> tuple[tuple[JobRecord, ...], RecordSources]:
    """Return matching records once the job has ended, or after `args.wait` seconds."""
    began = time.monotonic()
    with ProgressBar("waiting for the job's end", args.wait, unit=WAITED, quiet=args.quiet) as progress:
        while (spent := time.monotonic() - began) < args.wait:
            with suppress(GatherError):  # the daemon may not have created its store yet
                records, sources = _gather_records(args, wanted)
                if records and not max(records, key=attrgetter("end")).running:
                    return records, sources
            progress.update(spent)
            time.sleep(min(_RETRY_SECONDS, args.wait - spent))
    return _gather_records(args, wanted)


def _from_named_sources(
    args: argparse.Namespace, wanted: JobRecordQuery, query: "StoreQuery[AnyInput]"
) -> tuple[Iterable[AnyInput | JobRecord], RecordSources]:
    response = _fetch(args.node, wanted, args) if args.node else NodeRecords(records=(), unanswered=())
    if len(response.unanswered) == len(args.node) and not args.store:
        raise GatherError(f"no node answered: {'; '.join(response.unanswered)}")
    sources = RecordSources(
        source="nodes" if args.node else "stores", unanswered=response.unanswered, notes=response.notes,
    )  # fmt: skip
    sources = _with_energy(sources, read_config(args)) if getattr(args, "config", None) else sources
    return chain(chain.from_iterable(_read_store(path, query) for path in args.store), response.records), sources


def _fetch(urls: Sequence[str], wanted: JobRecordQuery, args: argparse.Namespace) -> NodeRecords:
    return fetch_records(urls, wanted, headers=parse_headers(args.header), verify=tls_context(args.ca_file))


def _read_store(path: Path, query: "StoreQuery[AnyInput]") -> Iterator[AnyInput]:
    from exporter.history.store import HistoryError, open_read_only  # noqa: PLC0415  imports SQLite only if a store is read

    try:
        with closing(open_read_only(path)) as reader:
            yield from query(reader)
    except HistoryError as err:
        raise GatherError(str(err)) from err


def _from_this_node(
    args: argparse.Namespace, wanted: JobRecordQuery, query: "StoreQuery[AnyInput]"
) -> tuple[Iterable[AnyInput | JobRecord], RecordSources]:
    """Read this node's store for ended jobs and its daemon for running ones; one of them suffices.

    Without a store that can be read, such as on a login node, ask a gateway if there is one. Only then: root's epilog
    on a node, and whoever else reads that node's own store, is not to be told of his own jobs alone.
    """
    config = read_config(args)
    path = _default_store(config)
    stored: tuple[AnyInput, ...] | None = None
    why = ""
    if path is not None:
        try:
            stored = tuple(_read_store(path, query))
        except GatherError as err:
            why = f"{err}; "
    recent = wanted if stored is None else replace(wanted, since=max(wanted.since, time.time() - _RECENT_SECONDS))
    asks_gateway = stored is None and Path(config.gateway.socket).is_socket()
    if asks_gateway:
        response = _fetch([f"{UNIX}{config.gateway.socket}"], recent, args)
    else:
        response = _ask_daemon(config, path, recent, args)
    if stored is None and response.unanswered:
        raise GatherError(
            f"{why}{response.unanswered[0]}; name a source with --store FILE, --node URL or --prometheus URL"
        )
    sources = RecordSources(source="nodes" if stored is None else "stores", notes=response.notes)
    if asks_gateway and not response.records:
        sources = replace(sources, unanswered=(_GATEWAY_NOTE,))
    elif asks_gateway and not (wanted.job_id or wanted.array_id):
        sources = replace(sources, notes=(*sources.notes, _GATEWAY_NOTE))
    return latest_records((*(stored or ()), *response.records)), _with_energy(sources, config)


def _default_store(config: Config) -> Path | None:
    """Return the store of this node's daemon, even if it is read-only here; None if there is none."""
    from exporter.history.store import DEFAULT_FOLDER, store_path  # noqa: PLC0415  as above

    path = store_path(config.history.file, os.environ)
    path = DEFAULT_FOLDER / "history.db" if path is None and config.history.file == "auto" else path
    return path if path is not None and may_exist(path) else None


def _ask_daemon(config: Config, store: Path | None, wanted: JobRecordQuery, args: argparse.Namespace) -> NodeRecords:
    """Ask this node's daemon, unless another user listens on its port, as anyone may while it is down."""
    url, (_, port) = daemon_url(config), daemon_endpoint(config)
    try:
        users = listening_users(config)
    except OSError as err:
        return NodeRecords(records=(), unanswered=(f"who listens on port {port} cannot be read ({err})",))
    if not users:
        return NodeRecords(records=(), unanswered=(f"{url} cannot be reached (nobody listens there)",))
    if strangers := sorted(users - daemon_users(store)):
        why = f"port {port} is user {strangers[0]}'s, who is not the daemon's and was not believed"
        return NodeRecords(records=(), unanswered=(why,), notes=(why,))
    return _fetch([url], wanted, args)


def _with_energy(sources: RecordSources, config: Config) -> RecordSources:
    return replace(sources, energy=config.energy.terms, carbon=config.energy.carbon)


_DEFAULT_TARGET_EMFU = 0.6
"""Default target eMFU; docs/job-reports.md uses it, too."""
_MAX_RECORDS = 10_000_000
"""Maximum number of records: in effect all."""


def _wants_sums(args: argparse.Namespace) -> bool:
    """Return whether the arguments select sums over many jobs."""
    return bool(args.all or args.rent or _usage_filter(args).matchers)


def _usage_filter(args: argparse.Namespace) -> UsageFilter:
    return UsageFilter(**{field: getattr(args, field) or "" for field in UsageFilter.__struct_fields__})


def _summed_jobs(args: argparse.Namespace) -> UsageSummary:
    """Return the summary. Raises ReportError, ConfigError for conflicting flags, and the errors of the sources."""
    only = _usage_filter(args)
    if args.all and only.matchers:
        raise ConfigError(f"report: --all, or only {only}, and not both")
    if args.gpus is not None and only.matchers:
        raise ConfigError(f"report: --gpus is the size of the whole fleet and cannot be combined with {only}")
    at = time.time() if args.at is None else args.at
    every = args.every or default_period(args.since)
    spans = split_periods(at - args.since, at, every=every)
    read = _sums_from_prometheus if args.prometheus else _sums_from_records
    found = read(args, only, spans, every)
    try:
        return with_comparisons(found, offers=tuple(args.rent), emfu=(args.target_emfu or _DEFAULT_TARGET_EMFU,))
    except ValueError as err:
        raise ReportError(str(err)) from err


# -- a Prometheus --


def _prometheus(args: argparse.Namespace) -> PrometheusClient:
    return PrometheusClient(args.prometheus, parse_headers(args.header), tls_context(args.ca_file))


def _sums_from_prometheus(
    args: argparse.Namespace, only: UsageFilter, spans: tuple[Period, ...], every: str
) -> UsageSummary:
    if args.gpus is not None:
        raise ConfigError("report: --gpus is for stores and nodes: a Prometheus knows how many GPUs there are")
    progress = ProgressBar(redact_secrets(args.prometheus), len(spans), unit=counted("parts"), quiet=args.quiet)
    with _prometheus(args) as server, progress:
        found = PrometheusUsage(server, only, matchers=args.match).read(spans, progress=progress.update)
    if not found.usage:
        raise ReportError(f"no job{_filter_text(only)} held a GPU in that time, as far as it is stored there")
    return summarize(
        found.usage, spans, about=_scope_text(only, whole=True), by=args.by or "", every=every, source="Prometheus",
        start=found.known_period.start, end=found.known_period.end, fleet=found.fleet,
        unseen=(*_coverage_notes(found, spans), *server.remarks), simulated=found.simulated,
    )  # fmt: skip


def _scope_text(only: UsageFilter, *, whole: bool) -> str:
    return f"{only}" if only.matchers else "the whole fleet" if whole else "all jobs"


def _filter_text(only: UsageFilter) -> str:
    return f" of {only}" if only.matchers else ""


def _coverage_notes(found: StoredUsage, spans: tuple[Period, ...]) -> Iterator[str]:
    if found.known_period.start > spans[0].start or found.known_period.end < spans[-1].end:
        yield "less is stored than was asked for: all figures are of the time above"
    if found.daemon_restarts:
        yield (
            f"daemons began anew {found.daemon_restarts} times:"
            " without a history of its own one that is down counts nothing"
        )
    if found.gaps:
        yield f"daemons not scraped for over an hour as a period began or ended: {found.gaps}; it is in the later one"
    if found.from_recording_rules:
        yield "split by leak as recording rules have it, for it is much; the time of jobs is counted to the sample"
    if any(not record.attributed for record in found.usage):
        yield "(not told): somebody had these GPUs, but no job's series say who; jobs between two scrapes are so"


# -- stores and nodes --


def _sums_from_records(
    args: argparse.Namespace, only: UsageFilter, spans: tuple[Period, ...], every: str
) -> UsageSummary:
    span = Period(spans[0].start, spans[-1].end)
    owner = {field: getattr(only, field) for field in ("user", "account", "namespace")}
    wanted = JobRecordQuery(**owner, since=span.start, until=span.end, limit=_MAX_RECORDS)
    cuts = [span.start, *(period.end for period in spans)]
    records, sources = _gather(args, wanted, lambda store: store.summaries(wanted, cuts))
    unique = len(args.store) == 1 and not args.node
    passed = UsageInputs(records if unique else latest_records(sorted(records, key=attrgetter("end"))), team=only.team)
    usage = tuple(usage_records(passed, spans, energy=sources.energy, carbon=sources.carbon))
    if not usage:
        why = "; ".join((f"as far as the {sources.source} know", *sources.unanswered))
        raise ReportError(f"no job{_filter_text(only)} held a GPU in that time, {why}")
    known = passed.clip(span)
    span = known if args.gpus is None else span
    fleet = None
    if not only.matchers:
        held = sum(sum(record.seconds.values()) for record in usage) / (span.end - span.start)
        fleet = FleetUsage(gpus=args.gpus, gpus_peak=args.gpus, held=held, held_peak=peak_gpus(passed.holdings, span))
        usage += tuple(unheld_usage(usage, spans, span, gpus=args.gpus)) if args.gpus is not None else ()
    return summarize(
        usage, spans, about=_scope_text(only, whole=args.gpus is not None), by=args.by or "", every=every,
        source=sources.source, start=span.start, end=span.end, fleet=fleet,
        unseen=(
            *sources.unanswered, *sources.notes, *_unheld_notes(args, fleet),
            *_period_notes(args, spans, known, running=passed.running),
            *carbon_notes(hours_unknown(usage), sources.carbon),
        ),
        simulated=passed.simulated,
    )  # fmt: skip


def _unheld_notes(args: argparse.Namespace, fleet: FleetUsage | None) -> Iterator[str]:
    if fleet is None:
        return
    if args.gpus is None:
        yield "GPUs that nobody had are in no job's receipt: say how many are paid for with --gpus, or ask a Prometheus"
    else:
        yield f"by your word {args.gpus:g} GPUs are paid for; what no job had of them costs what the jobs' GPUs do"
        if fleet.held > args.gpus:
            yield f"jobs held {fleet.held:,.1f} GPUs on average, more than are paid for by your word: all count"


_GAP_SECONDS = 60.0
"""A daemon's records of running jobs are as old."""


def _period_notes(
    args: argparse.Namespace, spans: tuple[Period, ...], known: Period, *, running: bool
) -> Iterator[str]:
    """Mention that no job is known of a part of the period: whether it had none is known to nobody here."""
    gaps = []
    if known.start - spans[0].start >= _GAP_SECONDS:
        gaps.append(f"before {format_time(known.start)}")
    if spans[-1].end - known.end >= _GAP_SECONDS and not running:
        gaps.append(f"after {format_time(known.end)}")
    if args.gpus is not None and gaps:
        yield (
            f"no job is known {' and '.join(gaps)}: the GPUs count as unallocated there; use --since and --at if that"
            " is not so, as before the daemon was installed"
        )


# -- flags --


def _sums_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of sums."""
    flags = command.add_argument_group("sums", "instead of one job: who held and lost how much, and when")
    flags.add_argument("--all", action="store_true", help="all jobs, and from a Prometheus the GPUs that nobody had")
    for field in UsageFilter.__struct_fields__:
        flags.add_argument(f"--{field}", metavar="NAME", help=f"jobs of this {field}")
    flags.add_argument("--by", choices=GROUPINGS, help="what is ranked; users, or namespaces where there are none")
    flags.add_argument("--every", choices=tuple(PERIOD_SECONDS), help="the trend's steps; by how long the time is")
    flags.add_argument(
        "--rent", action="append", default=[], type=_offer, metavar="PRICE@UTILISATION",
        help="own or rent: 4.00@0.95 is 4 an hour of which 95 %% is useful; name=4.00@0.95; repeatable",
    )  # fmt: skip
    flags.add_argument(
        "--gpus", type=_gpu_count, metavar="N", help="that are paid for, for stores and nodes, which know of jobs alone"
    )


def _offer(argument: str) -> RentOffer:
    try:
        return parse_offer(argument)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _gpu_count(argument: str) -> float:
    try:
        count = float(argument)
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise argparse.ArgumentTypeError(f"{argument} is no number of GPUs")
    return count


_USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where any user's shell looks for programs; an epilog's PATH is shorter."""
_FORMS = ("json", "markdown", "html", "short", "line")


def report(args: argparse.Namespace) -> int:
    """Print a job's report, a comparison of two jobs, or sums over many jobs."""
    _check(args)
    try:
        found = _summed_jobs(args) if _wants_sums(args) else _build_reports(args)
        _write_output(_rendered(found, args), args.output)
    except (GatherError, OutputError, PrometheusError, ReportError) as err:
        return fail(err)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for conflicting or missing arguments."""
    if bool(args.job) + bool(args.compare) + _wants_sums(args) != 1:
        raise ConfigError(
            "report: give a job's id, or --compare and two, or what to sum up (--all, --user NAME, ...), and not both"
        )
    if sum(bool(getattr(args, form)) for form in _FORMS) > 1:
        raise ConfigError(f"report: only one of {', '.join(f'--{form}' for form in _FORMS)}")
    if (args.short and not args.job) or (args.line and args.compare):
        raise ConfigError("report: --short is of one job, --line of one or of sums")
    if args.prometheus and (args.store or args.node or args.wait):
        raise ConfigError("report: --prometheus, or --store and --node (and --wait), and not both")


def _build_reports(args: argparse.Namespace) -> JobReport | ReportComparison:
    at = time.time() if args.at is None else args.at
    reports = _reports_from_prometheus(args, at) if args.prometheus else _reports_from_records(args, at)
    reports = [replace(each, what_if=estimate_changes(each, emfu=args.target_emfu)) for each in reports]
    return reports[0] if args.job else compare_reports(reports[0], reports[1])


def _reports_from_prometheus(args: argparse.Namespace, at: float) -> list[JobReport]:
    """Build each job's report from Prometheus."""
    progress = ProgressBar(redact_secrets(args.prometheus), unit=counted("questions"), quiet=args.quiet)
    with _prometheus(args) as server, progress:
        counting = _CountingPrometheus(server, progress)
        return [_report_from_prometheus(counting, name, args, at) for name in args.compare or [args.job]]


def _report_from_prometheus(server: "_CountingPrometheus", name: str, args: argparse.Namespace, at: float) -> JobReport:
    job, step = split_step(name)
    query = JobQuery(server, job, matchers=args.match)
    if parse_display_id(job) is not None:
        named = find_named(job, jobs_named(query, job, at, since=args.since))
        query = JobQuery(server, job if named is None else named.job_id, matchers=args.match)
    found = report_from_prometheus(query, at, since=args.since)
    return replace(found, unseen=(*found.unseen, *naming_notes(found, job, step), *server.remarks))


class _CountingPrometheus:
    """Counts queries for the progress bar: a long run on many nodes takes hundreds."""

    def __init__(self, server: PrometheusClient, progress: ProgressBar) -> None:
        self._server, self._progress, self._count = server, progress, 0

    def instant_query(self, query: str, at: float) -> Sequence[PrometheusSeries]:
        """Evaluate a query and update the progress."""
        self._count += 1
        self._progress.update(self._count)
        return self._server.instant_query(query, at)

    @property
    def remarks(self) -> Iterator[str]:
        """Warnings of the server."""
        return self._server.remarks


def _reports_from_records(args: argparse.Namespace, at: float) -> list[JobReport]:
    """Build each job's report from stores or nodes."""
    return [_report_from_records(args, name, at) for name in args.compare or [args.job]]


def _report_from_records(args: argparse.Namespace, name: str, at: float) -> JobReport:
    job, step = split_step(name)
    wanted = JobRecordQuery(job_id=job, since=at - args.since, until=at, limit=_MAX_RECORDS)
    gather = _wait_for_end if args.wait else _gather_records
    records, sources = gather(args, wanted)
    named = find_named(job, _identities(records))
    if named is None and job.isdigit():
        whole, _ = _gather_records(args, replace(wanted, job_id="", array_id=job))
        if members := members_message(job, _identities(whole)):
            raise ReportError("; ".join((members, *sources.unanswered)))
    elif named is not None and named.job_id != job:  # also its records of an older daemon, which lack the name
        records, sources = gather(args, replace(wanted, job_id=named.job_id))
    found = join_records(records, job_id=job if named is None else named.job_id, at=at, sources=sources)
    return replace(found, unseen=(*found.unseen, *naming_notes(found, job, step)))


def _identities(records: Iterable[JobRecord]) -> list[JobIdentity]:
    return [job_identity(record.owner) for record in records]


# -- output --


def _rendered(found: JobReport | ReportComparison | UsageSummary, args: argparse.Namespace) -> str:
    if args.json:
        return found.json().decode() + "\n"
    if args.line and isinstance(found, UsageSummary):
        return summary_lines(found)
    if (args.line or args.short) and isinstance(found, JobReport):
        return render_line(found) + "\n" if args.line else _short(found, args)
    if args.html:
        from exporter.report.html import render_html  # noqa: PLC0415  imports Jinja2 only for HTML

        return render_html(found, _tables(found))
    return (render_markdown if args.markdown else render_text)(_tables(found))


def _short(report: JobReport, args: argparse.Namespace) -> str:
    """Render the short form; its last line names a command for any user: by name where shells find it."""
    named = shutil.which(PROGRAM, path=f"{_USUAL_PATH}:{os.environ.get('PATH', '')}") is not None
    own = Path(sys.argv[0]).absolute()
    program = f"{own}" if own.name == PROGRAM and not named else PROGRAM
    given = [("--prometheus", args.prometheus)] if args.prometheus else []
    given += [("--store", path) for path in args.store] + [("--node", url) for url in args.node]
    where, config = "", read_config(args)
    if not given and config.gateway.nodes:
        where = "on a login node"
    elif not given and report.nodes:
        where = f"on node {report.nodes[0].name}"
        if (address := daemon_url(config)) != daemon_url(Config()):
            given = [("--node", address)]  # its configuration file is not for every user
    sources = "".join(f" {flag} {shlex.quote(redact_secrets(f'{value}'))}" for flag, value in given)
    return render_short(report, program=program, sources=sources, where=where)


def _tables(found: JobReport | ReportComparison | UsageSummary) -> list[ReportTable]:
    if isinstance(found, JobReport):
        return list(report_tables(found))
    if isinstance(found, ReportComparison):
        return list(comparison_tables(found))
    return list(summary_tables(found))


def _write_output(content: str, file: Path | None) -> None:
    if file is None or str(file) == "-":
        sys.stdout.write(content)
    else:
        write_output(file, content.encode())


# -- flags --


def report_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    config_file_argument(command)
    progress_arguments(command)
    command.add_argument(
        "job",
        nargs="?",
        metavar="JOBID",
        help="Slurm: 4711, 6_1, 7+0; Kubernetes: namespace/kind/name, such as ml/job/train",
    )
    command.add_argument("--compare", nargs=2, metavar=("JOBID", "JOBID"), help="two jobs side by side, instead of one")
    _sums_arguments(command)
    _source_arguments(command)
    command.add_argument(
        "--at", type=timestamp_argument, metavar="TIME",
        help="report the last run that began before this time: Unix seconds or 2026-01-31T12:00; default: now"
    )  # fmt: skip
    command.add_argument(
        "--since", type=duration_argument(1), default="30d", metavar="TIME", help="how far back to look; 30d"
    )
    command.add_argument(
        "--wait", type=duration_argument(endless=True), default=0.0, metavar="TIME",
        help="for an epilog: wait at most this long, such as 30s, until the node has seen the job end"
    )  # fmt: skip
    command.add_argument(
        "--target-emfu", "--target-mfu", type=_ratio, metavar="R", help="what an eMFU of R would gain, such as 0.6"
    )
    command.add_argument("--json", action="store_true", help="for programs: docs/receipt.schema.json")
    command.add_argument("--markdown", action="store_true", help="for a page")
    command.add_argument("--html", action="store_true", help="a page of its own, with everything in it")
    command.add_argument("--short", action="store_true", help="eight lines at most, for an epilog")
    command.add_argument("--line", action="store_true", help="one line")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="into a file, whole or not at all")


def _ratio(argument: str) -> float:
    """Parse a ratio above 0 and at most 1; `60%` is 0.6."""
    try:
        value = float(argument.removesuffix("%").strip()) / (100 if argument.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{argument} is no ratio between 0 and 1, such as 0.6")
    return value
