"""Runs the command `advise`: how many GPUs of each type to reserve, and which hours of the week to leave on demand."""

import argparse
import sys
import time
from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec.structs import replace

from exporter.cli.progress import ProgressBar, counted, progress_arguments
from exporter.cli.wiring import (
    ca_file_argument,
    duration_argument,
    fail,
    parse_headers,
    timestamp_argument,
    tls_context,
    url_argument,
)
from exporter.config import ConfigError
from exporter.preview.prometheus import PrometheusClient, PrometheusError
from exporter.redact import redact_secrets
from exporter.report.model import ReportError
from exporter.report.reservation import WEEK_SECONDS, Price, advise_reservation, parse_price, read_used_gpus
from exporter.report.reservation_text import advice_tables
from exporter.report.text import render_text


def advise(args: argparse.Namespace) -> int:
    """Print the advice."""
    if args.since < WEEK_SECONDS:
        raise ConfigError("advise: --since is less than 7d, so it has not every hour of the week")
    try:
        with (
            PrometheusClient(args.prometheus, parse_headers(args.header), tls_context(args.ca_file)) as server,
            ProgressBar(redact_secrets(args.prometheus), unit=counted("days"), quiet=args.quiet) as progress,
        ):
            end = time.time() if args.at is None else args.at
            used = read_used_gpus(server, end=end, since=args.since, matchers=args.match, progress=progress.update)
    except (PrometheusError, ReportError) as err:
        return fail(err)
    advice = advise_reservation(used, args.timezone, reserved=args.reserved_price, on_demand=args.on_demand_price)
    advice = replace(advice, notes=tuple(server.remarks))
    sys.stdout.write(advice.json().decode() + "\n" if args.json else render_text(advice_tables(advice)))
    return 0


def advise_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of `advise`."""
    url_argument(command, "--prometheus", required=True, help="where the series of the rules in alerts/ are stored")
    for flag, about in (("--reserved-price", "each hour of a reservation"), ("--on-demand-price", "on demand")):
        command.add_argument(
            flag, action="append", default=[], type=_price, metavar="[MODEL=]PRICE",
            help=f"of a GPU-hour, {about}; MODEL: part of the type's name; repeatable; if only one of the two prices is"
            " given, the other is that of [[prices]]",
        )  # fmt: skip
    command.add_argument(
        "--since", type=duration_argument(1), default="28d", metavar="TIME",
        help="whole weeks of this time are read; 28d",
    )  # fmt: skip
    command.add_argument("--at", type=timestamp_argument, metavar="TIME", help="end of these weeks; default: now")
    command.add_argument(
        "--timezone",
        type=_timezone,
        default=UTC,
        metavar="NAME",
        help="time zone of the hours of the week, such as Europe/Paris; default UTC",
    )
    command.add_argument("--match", default="", metavar="SELECTOR", help="only these series, such as 'cluster=\"a\"'")
    command.add_argument("--header", action="append", default=[], metavar="LINE", help="sent with it; @FILE: its lines")
    ca_file_argument(command, "a Prometheus")
    command.add_argument("--json", action="store_true", help="print JSON, with every number of GPUs")
    progress_arguments(command)


def _price(argument: str) -> Price:
    try:
        return parse_price(argument)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _timezone(argument: str) -> tzinfo:
    try:
        return UTC if argument == "UTC" else ZoneInfo(argument)  # an image may have no data of time zones
    except (ZoneInfoNotFoundError, ValueError, OSError) as err:
        raise argparse.ArgumentTypeError(f"{argument!r} is no time zone that this machine knows") from err
