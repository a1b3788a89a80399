"""Where a command has its statements from: stores, nodes, this node's own. Owns the flags; refuses to judge."""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.cli.preview import headers
from exporter.cli.progress import WAITED, Progress
from exporter.cli.wiring import read
from exporter.config import Config, ConfigError, split_address
from exporter.core.statement import Statement, Wanted
from exporter.receipt.joining import Asked
from exporter.receipt.nodes import NodesError, ask_nodes
from exporter.receipt.sums.lots import Told

if TYPE_CHECKING:
    from exporter.history import Store

_Each = TypeVar("_Each", bound=Told)

_AGAIN_SECONDS = 0.5
_LATELY_SECONDS = 600.0
"""What ended before is in the store for certain."""


class GatherError(Exception):
    """Nobody could be asked; the message says who, why, and what to do."""


class Gathered(Struct, frozen=True, kw_only=True):
    """What was told, and by whom."""

    statements: tuple[Statement, ...]
    asked: Asked


class InShort(Struct, frozen=True, kw_only=True):
    """What sums need of what was told, to be looked at once, and who was asked."""

    statements: Iterable[Told]
    asked: Asked
    once: bool
    """None of them is told twice."""


def source_arguments(command: argparse.ArgumentParser) -> None:
    """Flags that say where to look. Without any: this node's store and its daemon."""
    command.add_argument("--prometheus", metavar="URL", help="where the daemons' series are stored")
    command.add_argument("--match", default="", metavar="SELECTOR", help="only these series, such as 'cluster=\"a\"'")
    command.add_argument(
        "--store", action="append", default=[], type=Path, metavar="FILE", help="a node's store, or a copy; repeatable"
    )
    command.add_argument(
        "--node", action="append", default=[], metavar="URL", help="a node's daemon, http://node:19400; repeatable"
    )
    command.add_argument("--header", action="append", default=[], metavar="LINE", help="sent with it; @FILE: its lines")
    command.add_argument("--ca-file", type=Path, metavar="FILE", help="certificate authority of nodes that have TLS")


def gathered(args: argparse.Namespace, wanted: Wanted) -> Gathered:
    """All statements that are wanted, of every source that was named. Raises GatherError, ConfigError."""
    told, asked = _gathered(args, wanted, lambda store: store.statements(wanted))
    return Gathered(statements=tuple(told), asked=asked)


def in_short(args: argparse.Namespace, wanted: Wanted, *, cuts: Sequence[float]) -> InShort:
    """The same for sums that are cut at these moments. Who looks at them is raised the same errors, too."""
    told, asked = _gathered(args, wanted, lambda store: store.briefs(wanted, cuts))
    return InShort(statements=told, asked=asked, once=len(args.store) == 1 and not args.node)


def _gathered(
    args: argparse.Namespace, wanted: Wanted, look: "Callable[[Store], Iterable[_Each]]"
) -> tuple[Iterable[_Each | Statement], Asked]:
    if args.prometheus:
        raise ConfigError("--prometheus has no statements: give --store or --node")
    if args.store or args.node:
        return _named(args, wanted, look)
    return _own(args, wanted, look)


def finished(args: argparse.Namespace, wanted: Wanted) -> Gathered:
    """The same, once no statement says that the job still runs; after `args.wait` seconds as it is."""
    began = time.monotonic()
    with Progress("waiting for the job's end", args.wait, unit=WAITED, quiet=args.quiet) as told:
        while (spent := time.monotonic() - began) < args.wait:
            with suppress(GatherError):  # the daemon may be about to make its store
                found = gathered(args, wanted)
                if _ended(found):
                    return found
            told.tell(spent)
            time.sleep(min(_AGAIN_SECONDS, args.wait - spent))
    return gathered(args, wanted)


def _ended(found: Gathered) -> bool:
    """What was told last of it is its end."""
    latest = max(found.statements, key=lambda each: each.end, default=None)
    return latest is not None and not latest.running


def _named(
    args: argparse.Namespace, wanted: Wanted, look: "Callable[[Store], Iterable[_Each]]"
) -> tuple[Iterable[_Each | Statement], Asked]:
    told: tuple[Statement, ...] = ()
    silent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if args.node:
        try:
            answer = ask_nodes(args.node, wanted, headers=headers(args.header), ca_file=args.ca_file)
        except NodesError as err:
            raise GatherError(str(err)) from err
        told = answer.statements
        silent, notes = answer.silent, answer.notes
        if len(silent) == len(args.node) and not args.store:
            raise GatherError(f"no node gave an answer: {'; '.join(silent)}")
    source = "nodes" if args.node else "stores"
    asked = Asked(source=source, silent=silent, notes=notes, grams_co2_per_kwh=_grams(args))
    return chain(chain.from_iterable(_stored(path, look) for path in args.store), told), asked


def _stored(path: Path, look: "Callable[[Store], Iterable[_Each]]") -> Iterator[_Each]:
    from exporter.history import HistoryError, read_store  # noqa: PLC0415  SQLite is only for who has a store

    try:
        reader = read_store(path)
        try:
            yield from look(reader)
        finally:
            reader.close()
    except HistoryError as err:
        raise GatherError(str(err)) from err


def _own(
    args: argparse.Namespace, wanted: Wanted, look: "Callable[[Store], Iterable[_Each]]"
) -> tuple[Iterable[_Each | Statement], Asked]:
    """This node's store, which has what ended, and its daemon, which has what runs; one of them is enough."""
    config = read(args)
    grams, path = config.energy.grams_co2_per_kwh, _store(config)
    told: tuple[_Each, ...] | None = None
    why = ""
    if path is not None:
        try:
            told = tuple(_stored(path, look))
        except GatherError as err:
            why = f"{err}; "
    lately = wanted if told is None else replace(wanted, since=max(wanted.since, time.time() - _LATELY_SECONDS))
    try:
        answer = ask_nodes([_address(config)], lately, headers=headers(args.header), ca_file=args.ca_file)
    except NodesError as err:
        raise GatherError(str(err)) from err
    if told is None and answer.silent:
        raise GatherError(
            f"{why}{answer.silent[0]}; say where to look with --store FILE, --node URL or --prometheus URL"
        )
    asked = Asked(source="nodes" if told is None else "stores", notes=answer.notes, grams_co2_per_kwh=grams)
    return _once((*(told or ()), *answer.statements)), asked


def _once(told: Iterable[_Each]) -> Iterable[_Each]:
    """Of what both say of one job, what the second says: it is the younger."""
    return {(each.node, each.life, each.owner.job_id, each.start): each for each in told}.values()


def _store(config: Config) -> Path | None:
    """Where this node's daemon keeps it; one may be read that may not be written."""
    from exporter.history.place import USUAL, place_of  # noqa: PLC0415  as above

    path = place_of(config.history.file, os.environ)
    path = USUAL / "history.db" if path is None and config.history.file == "auto" else path
    return path if path is not None and path.exists() else None


def _address(config: Config) -> str:
    host, port = split_address(config.web.page_address or config.web.listen_address)
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104  what is listened on, and where to ask
    scheme = "https" if config.web.config_file else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _grams(args: argparse.Namespace) -> float | None:
    """By a configuration that was named."""
    return read(args).energy.grams_co2_per_kwh if getattr(args, "config", None) else None
