"""Command `backfill`: history into a Prometheus that was not there, from recordings or from daemons' stores.

Owns what may be put together to one history, the labels of a scrape, and what to do with the files. Refuses to run
promtool, to write to a server, and to pass figures that a model made for measured ones.
"""

import argparse
import heapq
import re
import shlex
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from exporter.cli.openmetrics import Headers, Page, already, write_document, write_folder
from exporter.cli.preview import length
from exporter.cli.progress import BYTES, TIME, Progress, progress_arguments
from exporter.cli.restated import restated
from exporter.cli.scraped import DisorderError, Recordings, Told
from exporter.cli.wiring import FAILED, config_file, configuration
from exporter.config import Config, ConfigError
from exporter.core.catalog import METRICS
from exporter.core.statement import Statement, Wanted
from exporter.trace import TraceError
from exporter.wording import moment

_LONGEST_STEP = 120.0
"""Seconds: a sample counts for five minutes, and a rate wants several."""
_HEAD_SECONDS = 3 * 3600
"""What a running Prometheus may still have in its head block; the storage documentation warns of it."""
_KEPT_SECONDS = 15 * 86_400
"""Prometheus deletes what is older than --storage.tsdb.retention.time, and so much is its default."""
_LONG_SECONDS = 12 * 3600
"""Of one document: promtool reads it once for each two hours."""
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset({"instance", "job"}).union(*(metric.labels for metric in METRICS))
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def backfill(args: argparse.Namespace) -> int:
    """Write the history, and say on standard error what to do with it."""
    if bool(args.traces) == bool(args.store):
        raise ConfigError("backfill: give recordings, or --store FILE, and not both: the same jobs would be told twice")
    if args.output and args.folder:
        raise ConfigError("backfill: --output or --folder, not both")
    config = configuration(args)
    told = Told()
    try:
        with closing(_stored(args, told) if args.store else _recorded(args, config, told)) as history:
            _write(args, history, told.headers)
    except DisorderError as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    for line in _notes(args, told, time.time()):
        print(f"gpu-efficiency: {line}", file=sys.stderr)
    return FAILED if told.conservation_errors or not told.last else 0


def _recorded(args: argparse.Namespace, config: Config, told: Told) -> Generator[Page]:
    """Refuses at once what can be seen at once, before any file is touched."""
    recordings = Recordings(args.traces, config, told)
    _refuse_simulated(args, recordings.simulated)
    return _replayed(args, recordings, _labels(args, recordings.nodes))


def _replayed(args: argparse.Namespace, recordings: Recordings, labels: Mapping[str, str]) -> Generator[Page]:
    with Progress("backfill", recordings.size, unit=BYTES, quiet=args.quiet or _on_screen(args)) as progress:
        for page in recordings.pages(labels, round(args.step)):
            progress.tell(recordings.taken)
            yield page
    for name, why in recordings.truncated:
        print(f"gpu-efficiency: {name}: {why}", file=sys.stderr)


def _refuse_simulated(args: argparse.Namespace, made_up: Sequence[str]) -> None:
    if made_up and not args.simulated:
        raise DisorderError(
            f"{', '.join(made_up)}: SIMULATED: a model made these figures, and in a Prometheus nothing would say so"
            " but gpu_efficiency_simulated; for a test give --simulated, and a --label that tells them apart"
        )


def _stored(args: argparse.Namespace, told: Told) -> Generator[Page]:
    nodes: dict[str, list[Statement]] = {}
    for name in args.store:
        for statement in _statements(Path(name)):
            nodes.setdefault(statement.node, []).append(statement)
    _refuse_simulated(args, [node for node, group in nodes.items() if any(each.simulated for each in group)])
    labels = _labels(args, nodes)
    rows = [restated(group, node, labels=labels[node], told=told) for node, group in nodes.items()]
    every = [each for group in nodes.values() for each in group]
    return _metered(args, heapq.merge(*rows, key=lambda page: page.at), every)


def _metered(args: argparse.Namespace, history: Iterator[Page], every: Sequence[Statement]) -> Generator[Page]:
    begin, end = min((each.start for each in every), default=0.0), max((each.end for each in every), default=0.0)
    with Progress("backfill", end - begin, unit=TIME, quiet=args.quiet or _on_screen(args)) as progress:
        for page in history:
            progress.tell(page.at - begin)
            yield page


def _statements(path: Path) -> list[Statement]:
    from exporter.history import HistoryError, read_store  # noqa: PLC0415  recordings need no SQLite

    try:
        with closing(read_store(path)) as store:
            return store.statements(Wanted(limit=sys.maxsize))
    except HistoryError as err:
        raise DisorderError(str(err)) from err


def _labels(args: argparse.Namespace, nodes: Iterable[str]) -> dict[str, str]:
    """What a scrape of each node would have put on its series."""
    own = dict(_own_label(text) for text in args.label)
    found = {node: {"instance": args.instance.replace("{host}", node), "job": args.job, **own} for node in nodes}
    if len({labels["instance"] for labels in found.values()}) < len(found):
        raise ConfigError(
            f"--instance {args.instance}: {len(found)} nodes would be one; write {{host}} where the name belongs"
        )
    return {
        node: ",".join(f'{k}="{v.translate(_ESCAPED)}"' for k, v in labels.items()) for node, labels in found.items()
    }


def _own_label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and value and _LABEL.fullmatch(name)):
        raise ConfigError(f"--label {text}: not NAME=VALUE (example: cluster=alps)")
    if name in _TAKEN:
        raise ConfigError(f"--label {text}: series have a label {name} of their own; choose another name")
    return name, value


def _on_screen(args: argparse.Namespace) -> bool:
    """The history itself goes to the terminal, where no line may be drawn over."""
    return not (args.output or args.folder) and sys.stdout.isatty()


def _write(args: argparse.Namespace, history: Iterator[Page], headers: Headers) -> None:
    if args.folder:
        _into_folder(Path(args.folder), history, headers, force=args.force)
    elif args.output in (None, "-"):
        write_document(history, sys.stdout.buffer, headers)
    else:
        _into_file(Path(args.output), history, headers, force=args.force)


def _into_file(path: Path, history: Iterator[Page], headers: Headers, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{path}: a file of that name exists; name another one, or give --force")
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            write_document(history, file, headers)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _into_folder(folder: Path, history: Iterator[Page], headers: Headers, *, force: bool) -> None:
    there = already(folder)
    if there and not force:
        raise ConfigError(
            f"{folder}: has {len(there)} files of a history, {there[0]} first; name another folder, or give --force"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in there:
        (folder / name).unlink()
    whole = 0
    try:
        for _ in write_folder(history, folder, headers):
            whole += 1
    except (DisorderError, TraceError):
        if whole:
            print(f"gpu-efficiency: {folder}: {whole} files of the time before are whole and stay", file=sys.stderr)
        raise


def _notes(args: argparse.Namespace, told: Told, now: float) -> Iterator[str]:
    if not told.last:
        yield "nothing is kept there: the history is empty"
        return
    yield f"{moment(told.first)} to {moment(told.last)} is written"
    if told.conservation_errors:
        yield f"{told.conservation_errors} conservation errors: the figures do not add up; please report this"
    if told.backwards:
        yield (
            f"the wall clock went back: {told.backwards} observations fell in time that was told already; what they"
            " came to is in the next sample"
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
        if told.last - told.first > _LONG_SECONDS:
            yield "promtool reads one file once for each two hours in it: --folder instead of --output is faster"
    yield "then move what is in blocks to Prometheus' --storage.tsdb.path, as the user that it runs as"
    if now - told.first > _KEPT_SECONDS:
        yield "some of it is older than 15 days: Prometheus deletes it unless --storage.tsdb.retention.time is longer"
    if now - told.last < _HEAD_SECONDS:
        yield "some of it is of the last 3 hours, which a Prometheus that runs has in memory: move blocks in later"


def backfill_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `backfill`."""
    config_file(command)
    command.add_argument("traces", nargs="*", metavar="TRACE", help="recordings of `record`, of any number of nodes")
    command.add_argument(
        "--store", action="append", default=[], metavar="FILE", help="a daemon's store, instead; several"
    )
    command.add_argument("-o", "--output", metavar="FILE", help="one document of OpenMetrics; default: standard output")
    command.add_argument(
        "--folder", metavar="FOLDER", help="... or a file for each two hours there, as promtool likes it"
    )
    command.add_argument("--force", action="store_true", help="overwrite what is there")
    command.add_argument(
        "--step", type=step, default="15s", metavar="TIME", help="between two scrapes of a recording; 15s"
    )
    command.add_argument(
        "--instance", default="{host}:19400", metavar="TEXT", help="label instance of a node; {host}:19400"
    )
    command.add_argument("--job", default="gpu-efficiency", metavar="TEXT", help="label job; gpu-efficiency")
    command.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="one more, such as cluster=alps"
    )
    command.add_argument("--simulated", action="store_true", help="take figures that a model made, too")
    progress_arguments(command)


def step(text: str) -> float:
    """A flag's type: whole seconds up to two minutes."""
    seconds = length(text)
    if seconds != round(seconds) or seconds > _LONGEST_STEP:
        raise argparse.ArgumentTypeError(f"{text} is not whole seconds, {_LONGEST_STEP:g} at most")
    return seconds
