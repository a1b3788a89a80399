"""Runs the command `backfill`: turns recordings or daemons' stores into OpenMetrics history for a Prometheus.

Owns which recordings form one history, the times of its scrapes, the labels a scrape would add, and the output files.
Refuses to run promtool, to write to a server, to write simulated data without --simulated, and to invent data that a
store does not have.
"""

import argparse
import heapq
import math
import re
import shlex
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from exporter import __version__
from exporter.cli.openmetrics import FamilyHeaders, SampleLine, Scrape, existing_documents, write_document, write_folder
from exporter.cli.progress import BYTES, TIME, ProgressBar, progress_arguments
from exporter.cli.wiring import FAILED, config_file_argument, configure, duration_argument, fail
from exporter.config import Config, ConfigError
from exporter.core.exposition import render
from exporter.core.host import HostView
from exporter.core.job_record import JobRecord, JobRecordQuery, JobSample
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Book, Ledger
from exporter.core.metrics import METRICS
from exporter.core.model import JOULE, SECOND, Observation
from exporter.core.pipeline import advance
from exporter.core.prices import Terms
from exporter.core.snapshot import Counters, DaemonMetadata, JobView, Snapshot, take_snapshot
from exporter.formatting import format_time
from exporter.trace import TraceError, TraceReader, TraceSpan, read_trace, refuse_overlaps

_P = "gpu_efficiency_"
DAEMON_METRICS = frozenset(
    _P + name
    for name in (
        "ticks_total", "late_ticks_total", "read_seconds_total", "core_seconds_total", "workload_messages_total",
        "errors_total", "scheduler_unanswered_seconds", "config_last_reload_successful",
        "config_last_reload_success_timestamp_seconds", "config_restart_needed",
    )
)  # fmt: skip
"""Metrics about the running daemon itself, which a recording does not have: 0 would be wrong."""
_REPLAYED_METRICS = tuple(metric for metric in METRICS if metric.name not in DAEMON_METRICS)


class BackfillError(Exception):
    """The given files cannot form one history; the message has the reason and the fix."""


class Recording(Struct, frozen=True):
    """An open trace with the ledger that accounts it."""

    observations: Iterable[Observation]
    ledger: Ledger
    meta: DaemonMetadata


class BackfillSummary(Struct):
    """Statistics of the written history, and the headers of its metric families."""

    headers: FamilyHeaders = field(default_factory=FamilyHeaders)
    first: int = 0
    last: int = 0
    """Unix seconds of the last scrape; 0: nothing was written."""
    backwards: int = 0
    """Observations whose wall time is before a scrape that was already written."""
    conservation_errors: int = 0

    def extend(self, seconds: int) -> None:
        """Include a scrape at that Unix time."""
        self.first = min(self.first or seconds, seconds)
        self.last = max(self.last, seconds)


def with_initial_zeros(texts: Iterable[tuple[int, str]], labels: str, summary: BackfillSummary) -> Iterator[Scrape]:
    """Parse the expositions of one run of a daemon; counters that first occur in one get a 0 in the scrape before it.

    Without the 0, `increase()` would omit what a counter had at its first sample.
    """
    known, held, headers = set[str](), None, summary.headers
    for at, text in texts:
        summary.extend(at)
        rows = headers.parse(text)
        new = [row for row in rows if row.family in headers.counters and row.head not in known]
        known.update(row.head for row in new)
        if held is not None:
            held.samples.extend(SampleLine(row.family, row.head, "0.0") for row in new)
            yield held
        held = Scrape(at, labels, rows)
    if held is not None:
        yield held


def replayed_scrapes(recording: Recording, step: int, summary: BackfillSummary) -> Iterator[tuple[int, str]]:
    """Yield the exposition (Unix seconds, text) at the start, at each step of the wall clock, and at the end.

    There is none for steps without an observation: the daemon did not run, or did not answer.
    """
    due, written, latest = 0, 0, 0
    for observation in recording.observations:
        seconds = -(-observation.wall // SECOND)
        if written < due < seconds:
            yield due, _exposition(recording)
            written = due
        summary.backwards += seconds < written
        advance(recording.ledger, observation)
        if not written:
            yield seconds, _exposition(recording)
            written = seconds
        latest, due = seconds, -(-seconds // step) * step
    if latest > written:
        yield latest, _exposition(recording)
    summary.conservation_errors += recording.ledger.conservation_errors


def _exposition(recording: Recording) -> str:
    return render(take_snapshot(recording.ledger, recording.meta), openmetrics=True, metrics=_REPLAYED_METRICS).decode()


class TraceFile(Struct, frozen=True):
    """A trace file, and its metadata."""

    name: str
    node: str
    simulated: bool
    start: int
    """Unix nanoseconds of the first observation."""
    size: int
    """Bytes."""

    @property
    def first(self) -> int:
        """Unix seconds of its first scrape."""
        return -(-self.start // SECOND)


class Recordings:
    """Traces of any number of nodes, replayed in parallel. Raises BackfillError and TraceError."""

    def __init__(self, names: Iterable[str], config: Config, summary: BackfillSummary) -> None:
        self._config, self._summary = config, summary
        self._sources = sorted((inspect_trace(name) for name in names), key=lambda trace_file: trace_file.start)
        self._open: dict[str, TraceReader] = {}
        self._done = 0
        self.truncated: list[tuple[str, str]] = []
        """Names of truncated traces, and the reason."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, sorted."""
        return sorted({trace_file.node for trace_file in self._sources})

    @property
    def simulated(self) -> list[str]:
        """Names of the simulated traces."""
        return [trace_file.name for trace_file in self._sources if trace_file.simulated]

    @property
    def size(self) -> int:
        """Bytes of all traces."""
        return sum(trace_file.size for trace_file in self._sources)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._done + sum(trace.bytes_read for trace in self._open.values())

    def scrapes(self, labels: Mapping[str, str], step: int) -> Iterator[Scrape]:
        """Yield scrapes of all nodes in order of time; `labels` maps a node to the labels of its target."""
        rows = [self._node_scrapes(node, labels[node], step) for node in self.nodes]
        return heapq.merge(*rows, key=lambda scrape: scrape.at)

    def _node_scrapes(self, node: str, labels: str, step: int) -> Iterator[Scrape]:
        """Yield one node's traces in order: each is another run of its daemon."""
        before: TraceSpan | None = None
        for trace_file in (each for each in self._sources if each.node == node):
            span = TraceSpan(node, "", trace_file.first * SECOND, trace_file.first * SECOND, trace_file.name)
            refuse_overlaps([before, span] if before else [span])
            last = trace_file.first
            for scrape in self._replay(trace_file, labels, step):
                yield scrape
                last = scrape.at
            before = span._replace(last=last * SECOND)

    def _replay(self, trace_file: TraceFile, labels: str, step: int) -> Iterator[Scrape]:
        config, host = self._config, trace_file.node
        meta = DaemonMetadata(
            version=__version__, source="replay", simulated=trace_file.simulated, host=host, terms=config.terms(host)
        )
        with read_trace(trace_file.name) as trace:
            self._open[trace_file.name] = trace
            recording = Recording(trace, Ledger(config.policy, config.policies()), meta)
            yield from with_initial_zeros(replayed_scrapes(recording, step, self._summary), labels, self._summary)
            del self._open[trace_file.name]
            self._done += trace_file.size
            if trace.truncated:
                self.truncated.append((trace_file.name, trace.truncated))


def inspect_trace(name: str) -> TraceFile:
    """Read the metadata of a trace, and the time of its first observation."""
    with read_trace(name) as trace:
        if trace.size is None:
            raise BackfillError(f"{name} is a pipe, but a recording is read twice: give a file")
        first = next(iter(trace), None)
        if first is None:
            raise BackfillError(f"{name} holds no observation")
        header = trace.header
        return TraceFile(name, header.host or Path(name).name, header.simulated, first.wall, trace.size)


_NODE_METRICS = frozenset({_P + "node_info", _P + "build_info", _P + "simulated"})
SAMPLED_METRICS = frozenset({
    _P + "job_paid_seconds_total", _P + "job_energy_joules_total", _P + "job_start_timestamp_seconds", _P + "job_info",
})  # fmt: skip
"""Metrics of a job that a store has at each sample."""
FINAL_METRICS = frozenset(
    _P + name
    for name in (
        "job_seconds_total", "job_unneeded_seconds_total", "job_advice_seconds_total", "job_stall_seconds_total",
        "job_first_work_seconds", "job_reported_gpu_seconds_total",
        "job_model_flops_total", "job_tokens_total", "job_padding_tokens_total", "job_samples_total",
        "job_steps_total", "job_rework_steps_total", "job_run_seconds_total", "job_checkpoints_total",
        "job_restarts_total", "job_recovery_seconds_total", "job_loss_events_total", "job_preemptions_total",
        "job_engine_tokens_total", "job_world_size", "job_step", "job_epoch", "job_goodput_ratio",
        "job_progress_ratio", "job_loss", "job_quality", "job_quality_start", "job_quality_target", "job_run_info",
        "job_engine_info", "job_target_reached_timestamp_seconds", "job_collectives_total",
        "job_collective_seconds_total", "job_collective_bytes_total", "job_useful_pipe",
        "job_exposed_communication_low_seconds_total", "job_exposed_communication_high_seconds_total",
    )
)  # fmt: skip
"""Metrics of a job that a store has only at its end; counters were 0 at its start."""


class _JobPoint(Struct, frozen=True):
    """One job at one moment (Unix seconds)."""

    at: int
    job: JobView
    begins: bool = False
    ends: bool = False


def stored_scrapes(
    records: Iterable[JobRecord], node: str, *, labels: str, summary: BackfillSummary
) -> Iterator[Scrape]:
    """Yield scrapes of one node from its job records, in order of time."""
    lifetimes = list(_unique_records(records))
    simulated = any(each.simulated for each, _ in lifetimes)
    meta = DaemonMetadata(version=__version__, source="store", simulated=simulated, host=node, terms=Terms(node=node))
    empty = take_snapshot(Ledger(), meta)
    points = heapq.merge(*(_job_points(each, after) for each, after in lifetimes), key=_by_time)
    for at, group in groupby(points, key=_by_time):
        summary.extend(at)
        yield Scrape(at, labels, list(_samples_at(empty, list(group), summary.headers)))


_by_time = attrgetter("at")


def _unique_records(records: Iterable[JobRecord]) -> Iterator[tuple[JobRecord, int]]:
    """Yield distinct records by start, each with the Unix time up to which another record of its job covers it.

    Two copies of a store have the same record twice; the one with the later end is used.
    """
    once: dict[tuple[str, str, float], JobRecord] = {}
    for each in records:
        key = each.owner.job_id, each.life, each.start
        if key not in once or once[key].end < each.end:
            once[key] = each
    covered_until: dict[str, int] = {}
    for each in sorted(once.values(), key=lambda one: (one.start, one.end)):
        yield each, covered_until.get(each.owner.job_id, 0)
        covered_until[each.owner.job_id] = _bounds(each, covered_until.get(each.owner.job_id, 0))[1]


def _bounds(record: JobRecord, after: int) -> tuple[int, int]:
    """First and last Unix second of a record after `after`, at least one apart."""
    begin = max(math.floor(record.start), after + 1)
    return begin, max(begin + 1, math.ceil(record.end))


def _job_points(record: JobRecord, after: int) -> Iterator[_JobPoint]:
    """Yield the start of a record, each sample between, and its end."""
    last, end = _bounds(record, after)
    ended = _final_view(record)
    yield _JobPoint(last, ended, begins=True)
    for sample in record.samples:
        at = math.ceil(sample.at)
        if last < at < end:
            yield _JobPoint(at, _sampled_view(record, sample))
            last = at
    yield _JobPoint(end, ended, ends=True)


def _samples_at(empty: Snapshot, points: Sequence[_JobPoint], headers: FamilyHeaders) -> Iterator[SampleLine]:
    yield from _render_jobs(empty, (), _NODE_METRICS, headers)
    begun = [each.job for each in points if each.begins]
    for line in _render_jobs(empty, begun, SAMPLED_METRICS | FINAL_METRICS, headers):
        if line.family in headers.counters:
            yield replace(line, value="0.0")
        elif line.family in SAMPLED_METRICS:
            yield line
    yield from _render_jobs(empty, [each.job for each in points if not each.begins], SAMPLED_METRICS, headers)
    yield from _render_jobs(empty, [each.job for each in points if each.ends], FINAL_METRICS, headers)


def _render_jobs(
    empty: Snapshot, jobs: Sequence[JobView], names: frozenset[str], headers: FamilyHeaders
) -> list[SampleLine]:
    selected = [metric for metric in METRICS if metric.name in names]
    return headers.parse(render(replace(empty, jobs=tuple(jobs)), openmetrics=True, metrics=selected).decode())


def _final_view(record: JobRecord) -> JobView:
    """The view of the job at the record's end, as far as it is stored."""
    parts = [record.parts.get(name, 0) for name in LEAK_NAMES]
    energy = tuple(round(record.energy.get(name, 0.0) * JOULE) for name in LEAK_NAMES)
    return JobView(
        owner=record.owner,
        counters=_counters(parts, record.paid, energy),
        gpus=(),
        memory_used=None,
        start=round(record.start * SECOND),
        first_work=None if record.first_work is None else round(record.first_work * SECOND),
        excess=record.unneeded or None,
        progress=record.training,
        service=record.service,
        host=HostView(record.cpu_seconds, None, (), tuple(record.stalls.items())) if record.stalls else None,
        communication=record.communication,
        link=record.link,
        useful_pipe=record.useful_pipe,
        bounds=record.bounds,
    )


def _sampled_view(record: JobRecord, sample: JobSample) -> JobView:
    """The view of the job at a sample, which has paid time and energy only."""
    counters = _counters([0] * len(LEAK_NAMES), round(sample.paid * SECOND), (round(sample.joules * JOULE),))
    return JobView(owner=record.owner, counters=counters, gpus=(), memory_used=None, start=round(record.start * SECOND))


def _counters(parts: list[int], paid: int, energy: tuple[int, ...]) -> Counters:
    sample = Book(parts=parts, paid=paid).counters()
    return Counters(sample, sample, sample, energy)


_LONGEST_STEP = 120.0
"""Seconds: Prometheus looks back five minutes for a sample, and rate() needs several in its window."""
_HEAD_SECONDS = 3 * 3600
"""Seconds that may still be in the head block of a running Prometheus; its storage documentation warns of it."""
_RETENTION_SECONDS = 15 * 86_400
"""Seconds: the default of --storage.tsdb.retention.time, after which Prometheus deletes data."""
_LONG_DOCUMENT_SECONDS = 12 * 3600
"""Seconds: promtool reads a document once for each two hours in it, which is slow for longer ones."""
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = frozenset({"instance", "job"}).union(*(metric.labels for metric in METRICS))
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def backfill(args: argparse.Namespace) -> int:
    """Write the history, and print on standard error how to import it."""
    if bool(args.traces) == bool(args.store):
        raise ConfigError(
            "backfill: give recordings, or --store FILE, and not both: the same jobs would be written twice"
        )
    if args.output and args.folder:
        raise ConfigError("backfill: --output or --folder, not both")
    config = configure(args)
    summary = BackfillSummary()
    try:
        with closing(_from_stores(args, summary) if args.store else _from_recordings(args, config, summary)) as history:
            _write(args, history, summary.headers)
    except BackfillError as err:
        return fail(err)
    for line in _notes(args, summary, time.time()):
        print(f"gpu-efficiency: {line}", file=sys.stderr)
    return FAILED if summary.conservation_errors or not summary.last else 0


def _from_recordings(args: argparse.Namespace, config: Config, summary: BackfillSummary) -> Generator[Scrape]:
    """Inspect the traces and their labels at once; the result replays them. Raises BackfillError."""
    recordings = Recordings(args.traces, config, summary)
    _refuse_simulated(args, recordings.simulated)
    return _replayed(args, recordings, _target_labels(args, recordings.nodes))


def _replayed(args: argparse.Namespace, recordings: Recordings, labels: Mapping[str, str]) -> Generator[Scrape]:
    with ProgressBar("backfill", recordings.size, unit=BYTES, quiet=args.quiet or _on_screen(args)) as progress:
        for scrape in recordings.scrapes(labels, round(args.step)):
            progress.update(recordings.bytes_read)
            yield scrape
    for name, why in recordings.truncated:
        print(f"gpu-efficiency: {name}: {why}", file=sys.stderr)


def _refuse_simulated(args: argparse.Namespace, simulated: Sequence[str]) -> None:
    if simulated and not args.simulated:
        raise BackfillError(
            f"{', '.join(simulated)}: SIMULATED: a model made these figures, and in a Prometheus only"
            " gpu_efficiency_simulated shows it; for a test give --simulated, and a --label to distinguish them"
        )


def _from_stores(args: argparse.Namespace, summary: BackfillSummary) -> Generator[Scrape]:
    nodes: dict[str, list[JobRecord]] = {}
    for name in args.store:
        for record in _read_records(Path(name)):
            nodes.setdefault(record.node, []).append(record)
    _refuse_simulated(args, [node for node, records in nodes.items() if any(each.simulated for each in records)])
    labels = _target_labels(args, nodes)
    histories = [stored_scrapes(records, node, labels=labels[node], summary=summary) for node, records in nodes.items()]
    every = [each for records in nodes.values() for each in records]
    return _with_progress(args, heapq.merge(*histories, key=lambda scrape: scrape.at), every)


def _with_progress(
    args: argparse.Namespace, history: Iterator[Scrape], every: Sequence[JobRecord]
) -> Generator[Scrape]:
    begin, end = min((each.start for each in every), default=0.0), max((each.end for each in every), default=0.0)
    with ProgressBar("backfill", end - begin, unit=TIME, quiet=args.quiet or _on_screen(args)) as progress:
        for scrape in history:
            progress.update(scrape.at - begin)
            yield scrape


def _read_records(path: Path) -> list[JobRecord]:
    from exporter.history.store import HistoryError, open_read_only  # noqa: PLC0415  recordings need no SQLite

    try:
        with closing(open_read_only(path)) as store:
            return store.job_records(JobRecordQuery(limit=sys.maxsize))
    except HistoryError as err:
        raise BackfillError(str(err)) from err


def _target_labels(args: argparse.Namespace, nodes: Iterable[str]) -> dict[str, str]:
    """Labels that a scrape of each node would add, as they are written."""
    own = dict(_parse_label(text) for text in args.label)
    found = {node: {"instance": args.instance.replace("{host}", node), "job": args.job, **own} for node in nodes}
    if len({labels["instance"] for labels in found.values()}) < len(found):
        raise ConfigError(
            f"--instance {args.instance}: {len(found)} nodes would be one; write {{host}} where the name belongs"
        )
    return {
        node: ",".join(f'{k}="{v.translate(_ESCAPED)}"' for k, v in labels.items()) for node, labels in found.items()
    }


def _parse_label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and value and _LABEL.fullmatch(name)):
        raise ConfigError(f"--label {text}: not NAME=VALUE (example: cluster=alps)")
    if name in _RESERVED_LABELS:
        raise ConfigError(f"--label {text}: series have a label {name} of their own; choose another name")
    return name, value


def _on_screen(args: argparse.Namespace) -> bool:
    """Whether the history is written to the terminal, so that a progress line would overwrite it."""
    return not (args.output or args.folder) and sys.stdout.isatty()


def _write(args: argparse.Namespace, history: Iterator[Scrape], headers: FamilyHeaders) -> None:
    if args.folder:
        _into_folder(Path(args.folder), history, headers, force=args.force)
    elif args.output in (None, "-"):
        write_document(history, sys.stdout.buffer, headers)
    else:
        _into_file(Path(args.output), history, headers, force=args.force)


def _into_file(path: Path, history: Iterator[Scrape], headers: FamilyHeaders, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{path}: a file of that name exists; name another one, or give --force")
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            write_document(history, file, headers)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _into_folder(folder: Path, history: Iterator[Scrape], headers: FamilyHeaders, *, force: bool) -> None:
    existing = existing_documents(folder)
    if existing and not force:
        raise ConfigError(
            f"{folder}: has {len(existing)} files of a history, {existing[0]} first; name another folder,"
            " or give --force"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in existing:
        (folder / name).unlink()
    whole = 0
    try:
        for _ in write_folder(history, folder, headers):
            whole += 1
    except (BackfillError, TraceError):
        if whole:
            print(f"gpu-efficiency: {folder}: {whole} complete files are kept", file=sys.stderr)
        raise


def _notes(args: argparse.Namespace, summary: BackfillSummary, now: float) -> Iterator[str]:
    if not summary.last:
        yield "nothing to write: the history is empty"
        return
    yield f"{format_time(summary.first)} to {format_time(summary.last)} is written"
    if summary.conservation_errors:
        yield f"{summary.conservation_errors} conservation errors: the figures do not add up; please report this"
    if summary.backwards:
        yield (
            f"the wall clock went back: {summary.backwards} observations are in time that was written already; they"
            " are part of the next sample"
        )
    if args.folder:
        where = shlex.quote(str(Path(args.folder)))
        yield (
            f"make blocks: mkdir blocks && for file in {where}/*.om; do promtool tsdb create-blocks-from openmetrics"
            ' --quiet "$file" blocks || break; done'
        )
    elif args.output not in (None, "-"):
        name = shlex.quote(args.output)
        yield f"make blocks: promtool tsdb create-blocks-from openmetrics --quiet {name} blocks"
        if summary.last - summary.first > _LONG_DOCUMENT_SECONDS:
            yield "promtool reads one file once for each two hours in it: --folder instead of --output is faster"
    yield "then move the content of blocks to Prometheus' --storage.tsdb.path, as the user that it runs as"
    if now - summary.first > _RETENTION_SECONDS:
        yield "some of it is older than 15 days: Prometheus deletes it unless --storage.tsdb.retention.time is longer"
    if now - summary.last < _HEAD_SECONDS:
        yield "some of it is of the last 3 hours, which a Prometheus that runs has in memory: move blocks in later"


def backfill_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `backfill`."""
    config_file_argument(command)
    command.add_argument("traces", nargs="*", metavar="TRACE", help="recordings of `record`, of any number of nodes")
    command.add_argument(
        "--store", action="append", default=[], metavar="FILE", help="a daemon's store instead; repeatable"
    )
    command.add_argument("-o", "--output", metavar="FILE", help="one document of OpenMetrics; default: standard output")
    command.add_argument(
        "--folder", metavar="FOLDER", help="... or one file for each two hours, which promtool reads faster"
    )
    command.add_argument("--force", action="store_true", help="overwrite existing files")
    command.add_argument(
        "--step", type=step, default="15s", metavar="TIME", help="time between two scrapes of a recording; 15s"
    )
    command.add_argument(
        "--instance", default="{host}:19400", metavar="TEXT", help="label instance of a node; {host}:19400"
    )
    command.add_argument("--job", default="gpu-efficiency", metavar="TEXT", help="label job; gpu-efficiency")
    command.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="additional label, such as cluster=alps"
    )
    command.add_argument("--simulated", action="store_true", help="accept simulated data")
    progress_arguments(command)


def step(text: str) -> float:
    """Argument type: whole seconds up to two minutes."""
    seconds = duration_argument(1)(text)
    if seconds != round(seconds) or seconds > _LONGEST_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole seconds, {_LONGEST_STEP:g}s at most")
    return seconds
