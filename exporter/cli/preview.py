"""Runs the command `preview`: shows what other thresholds would have freed, and which jobs they would have hit."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from exporter.cli.progress import ProgressBar, counted, progress_arguments
from exporter.cli.wiring import (
    ca_file_argument,
    config_file_argument,
    configure,
    duration_argument,
    fail,
    parse_headers,
    tls_context,
    url_argument,
)
from exporter.config import Config, ConfigError
from exporter.core.ledger import Ledger
from exporter.core.model import Device, Observation
from exporter.core.policy import Policy
from exporter.core.prices import Price, price_at
from exporter.preview import scoring
from exporter.preview.history import PrometheusPreview, check_policies
from exporter.preview.prometheus import PrometheusClient, PrometheusError
from exporter.preview.replay import TracePreview
from exporter.preview.scoring import (
    SHORT_NAMES,
    PolicyRow,
    PreviewResult,
    known_price,
    name_some,
    policy_rows,
)
from exporter.redact import redact_secrets
from exporter.trace import TraceError, TraceSpan, read_trace, refuse_overlaps


def preview(args: argparse.Namespace) -> int:
    """Print what each threshold would have freed, and which jobs it would have hit."""
    config = configure(args)
    found = policy_rows(config.policy, args.policy)
    if bool(args.traces) == bool(args.prometheus):
        raise ConfigError("preview: give one or more traces, or --prometheus URL, and not both")
    try:
        result = _from_prometheus(args, found) if args.prometheus else _from_traces(args, config, found)
    except PrometheusError as err:
        return fail(err)
    sys.stdout.write(result.json().decode() + "\n" if args.json else scoring.preview_text(result))
    return 0


def _from_traces(args: argparse.Namespace, config: Config, found: list[PolicyRow]) -> PreviewResult:
    prices = [row.price for row in config.prices]

    def money(device: Device, wall: int) -> Price | None:
        spec = "" if device.spec is None else device.spec.name
        return known_price(price_at(prices, model=device.model, spec=spec, pool=config.host.pool, wall_ns=wall))

    def open_ledger(policy: Policy) -> Ledger:
        return Ledger(policy, replace(config, policy=policy).policies())

    replay = TracePreview(found, open_ledger=open_ledger, price_of=money)
    recorded = [_replay(replay, name, quiet=args.quiet) for name in args.traces]
    refuse_overlaps(recorded)
    simulated = [each.name for each in recorded if each.simulated]
    result = replay.result(f"Replayed{' (SIMULATED)' if simulated else ''}: {', '.join(args.traces)}")
    return replace(result, notes=(*result.notes, *_override_notes(config, found)))


def _override_notes(config: Config, found: Iterable[PolicyRow]) -> Iterator[str]:
    """Notes on thresholds to try that some GPU models override in `policy_by_model`."""
    for field in sorted({field for row in found for field in row.settings}):
        models = [model for model, own in config.policy_by_model.items() if field in own]
        if models:
            yield f"models with a {field} of their own, which no row changes: {name_some(models)}"


def _replay(replay: TracePreview, name: str, *, quiet: bool) -> TraceSpan:
    """Replay one trace."""
    times: list[int] = []
    gpus: set[str] = set()

    def timed(observations: Iterable[Observation]) -> Iterator[Observation]:
        for observation in observations:
            times[1:] = [observation.wall]
            gpus.update(device.uuid for device in observation.devices or ())
            yield observation

    with read_trace(name) as trace:
        with ProgressBar(name, trace.size, quiet=quiet) as progress:
            if not replay.run(timed(progress.through(trace, lambda: trace.bytes_read))):
                raise TraceError(f"{name} holds no observation")
        if trace.truncated:
            print(f"gpu-efficiency: {name}: {trace.truncated}", file=sys.stderr)
        node = trace.header.host or Path(name).name
        return TraceSpan(node, min(gpus, default=""), times[0], times[-1], name, trace.header.simulated)


def _from_prometheus(args: argparse.Namespace, found: list[PolicyRow]) -> PreviewResult:
    check_policies(found)
    end = time.time() // args.step * args.step
    with (
        PrometheusClient(args.prometheus, parse_headers(args.header), tls_context(args.ca_file)) as server,
        ProgressBar(redact_secrets(args.prometheus), unit=counted("parts"), quiet=args.quiet) as progress,
    ):
        history = PrometheusPreview(server, found, selector=args.match.strip().removeprefix("{").removesuffix("}"))
        for done, of in history.run(end - args.since, end, args.step):
            progress.update(done, of)
    return history.result(f"Stored in {redact_secrets(args.prometheus)}, every {args.step:g} s", end)


def preview_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `preview`."""
    config_file_argument(command)
    command.add_argument("traces", nargs="*", metavar="TRACE", help="recordings of `record`, one node each")
    url_argument(command, "--prometheus", help="use data stored in a Prometheus instead of traces")
    command.add_argument(
        "--policy", action="append", required=True, metavar="NAME=VALUE[,VALUE...]",
        help=f"thresholds to try: {', '.join(SHORT_NAMES)}, or any of [policy]; times as 90s, 1h30m, 2d or seconds;"
        " one row for each value",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--since", type=duration_argument(1), default="7d", metavar="TIME", help="with --prometheus: how far back; 7d"
    )
    command.add_argument(
        "--step", type=duration_argument(1), default="60s", metavar="TIME", help="... between two samples; 60s"
    )
    command.add_argument(
        "--match", default="", metavar="SELECTOR", help="... only these series, such as 'cluster=\"a\"'"
    )
    command.add_argument(
        "--header", action="append", default=[], metavar="LINE", help="... HTTP header; @FILE: the lines of a file"
    )
    ca_file_argument(command, "a Prometheus")
    progress_arguments(command)
