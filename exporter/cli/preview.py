"""Command `preview`: what another threshold would have freed, and whom it would have hit."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from exporter.cli.progress import Progress, counted, progress_arguments
from exporter.cli.wiring import FAILED, config_file, configuration
from exporter.config import Config, ConfigError
from exporter.core.ledger import Ledger
from exporter.core.model import Device
from exporter.core.money import Price, price_at
from exporter.core.policy import Policy
from exporter.preview import table
from exporter.preview.choices import SHORT_NAMES, Row, duration, rows
from exporter.preview.history import History, check
from exporter.preview.prometheus import Prometheus, PrometheusError
from exporter.preview.replay import Replay
from exporter.preview.tally import Answer, listed, priced
from exporter.trace import TraceError, read_trace
from exporter.wording import without_secrets


def preview(args: argparse.Namespace) -> int:
    """Print what each threshold would have freed, and whom it would have hit."""
    config = configuration(args)
    found = rows(config.policy, args.policy)
    if bool(args.traces) == bool(args.prometheus):
        raise ConfigError("preview: give one or more traces, or --prometheus URL, and not both")
    try:
        answer = _stored(args, found) if args.prometheus else _recorded(args, config, found)
    except PrometheusError as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    sys.stdout.write(answer.json().decode() + "\n" if args.json else table.text(answer))
    return 0


def _recorded(args: argparse.Namespace, config: Config, found: list[Row]) -> Answer:
    prices = [row.price for row in config.prices]

    def money(device: Device, wall: int) -> Price | None:
        spec = "" if device.spec is None else device.spec.name
        return priced(price_at(prices, model=device.model, spec=spec, pool=config.host.pool, wall_ns=wall))

    def open_ledger(policy: Policy) -> Ledger:
        return Ledger(policy, replace(config, policy=policy).policies())

    replay = Replay(found, open_ledger=open_ledger, money=money)
    made_up = [name for name in args.traces if _replay(replay, name, quiet=args.quiet)]
    answer = replay.answer(f"Replayed{' (SIMULATED)' if made_up else ''}: {', '.join(args.traces)}")
    return replace(answer, notes=(*answer.notes, *_fixed(config, found)))


def _fixed(config: Config, found: Iterable[Row]) -> Iterator[str]:
    """What is wanted and cannot be moved, for a model has its own."""
    for field in sorted({field for row in found for field in row.settings}):
        models = [model for model, own in config.policy_by_model.items() if field in own]
        if models:
            yield f"models with a {field} of their own, which no row moves: {listed(models)}"


def _replay(replay: Replay, name: str, *, quiet: bool) -> bool:
    """Judge one recording; was it simulated?"""
    with read_trace(name) as trace:
        with Progress(name, trace.size, quiet=quiet) as progress:
            if not replay.run(progress.through(trace, lambda: trace.taken)):
                raise TraceError(f"{name} holds no observation")
        if trace.truncated:
            print(f"gpu-efficiency: {name}: {trace.truncated}", file=sys.stderr)
        return trace.header.simulated


def _stored(args: argparse.Namespace, found: list[Row]) -> Answer:
    check(found)
    end = time.time() // args.step * args.step
    with (
        Prometheus(args.prometheus, headers(args.header)) as server,
        Progress(without_secrets(args.prometheus), unit=counted("parts"), quiet=args.quiet) as progress,
    ):
        history = History(server, found, selector=args.match.strip().removeprefix("{").removesuffix("}"))
        for done, of in history.run(end - args.since, end, args.step):
            progress.tell(done, of)
    return history.answer(f"Stored in {args.prometheus}, every {args.step:g} s", end)


def headers(given: Iterable[str]) -> dict[str, str]:
    """Header lines, those of files (@FILE) among them. No error repeats one: it may be a password."""
    found: dict[str, str] = {}
    for text in given:
        for line in _lines(text):
            name, colon, value = line.partition(":")
            if not (colon and name.strip() and line.isascii() and line.isprintable()):
                where = text if text.startswith("@") else "what was given"
                raise ConfigError(f"--header: {where} is not 'Name: value' (example: 'Authorization: Bearer ...')")
            found[name.strip()] = value.strip()
    return found


def _lines(text: str) -> list[str]:
    if not text.startswith("@"):
        return [text]
    try:
        content = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"--header: {text[1:]}: cannot be read: {getattr(err, 'strerror', None) or err}") from err
    return [line for line in content.splitlines() if line.strip()]


def preview_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `preview`."""
    config_file(command)
    command.add_argument("traces", nargs="*", metavar="TRACE", help="recordings of `record`, one node each")
    command.add_argument("--prometheus", metavar="URL", help="what a Prometheus has stored, instead of traces")
    command.add_argument(
        "--policy", action="append", required=True, metavar="NAME=VALUE[,VALUE...]",
        help=f"thresholds to try: {', '.join(SHORT_NAMES)}, or any of [policy]; 90s, 30m, 2h, 1d or seconds;"
        " one row for each value",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="the same for programs")
    command.add_argument(
        "--since", type=length, default="7d", metavar="TIME", help="with --prometheus: how far back; 7d"
    )
    command.add_argument("--step", type=length, default="60s", metavar="TIME", help="... between two looks; 60s")
    command.add_argument(
        "--match", default="", metavar="SELECTOR", help="... only these series, such as 'cluster=\"a\"'"
    )
    command.add_argument(
        "--header", action="append", default=[], metavar="LINE", help="... sent with it; @FILE: the lines of a file"
    )
    progress_arguments(command)


def length(text: str) -> float:
    """A flag's type: a time of a second or more."""
    try:
        seconds = duration(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than a second")
    return seconds
