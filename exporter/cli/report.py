"""Command `report`: what a job cost, where its time went, what it said; and two jobs side by side."""

import argparse
import sys
import time
from datetime import UTC, datetime

from exporter.cli.preview import headers, length
from exporter.cli.wiring import FAILED
from exporter.config import ConfigError
from exporter.preview.prometheus import Prometheus, PrometheusError
from exporter.receipt import Asking, Comparison, Receipt, ReceiptError, compared, issued
from exporter.receipt.saying import Table, comparison_tables, receipt_tables
from exporter.receipt.text import markdown, text


def report(args: argparse.Namespace) -> int:
    """Print a job's receipt, or two held against each other."""
    if bool(args.job) == bool(args.compare):
        raise ConfigError("report: give a job's id, or --compare and two, and not both")
    if args.json and args.markdown:
        raise ConfigError("report: --json or --markdown, not both")
    try:
        found = _found(args)
    except (PrometheusError, ReceiptError) as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    sys.stdout.write(_said(found, args))
    return 0


def _found(args: argparse.Namespace) -> Receipt | Comparison:
    at = time.time() if args.at is None else args.at
    with Prometheus(args.prometheus, headers(args.header)) as server:
        jobs = args.compare or [args.job]
        receipts = [issued(Asking(server, job, matchers=args.match), at, since=args.since) for job in jobs]
    return receipts[0] if args.job else compared(receipts[0], receipts[1])


def _said(found: Receipt | Comparison, args: argparse.Namespace) -> str:
    if args.json:
        return found.json().decode() + "\n"
    return (markdown if args.markdown else text)(_tables(found))


def _tables(found: Receipt | Comparison) -> list[Table]:
    return list(receipt_tables(found) if isinstance(found, Receipt) else comparison_tables(found))


def report_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `report`."""
    command.add_argument("job", nargs="?", metavar="JOBID", help="as the metrics have it; Kubernetes: namespace/pod")
    command.add_argument("--compare", nargs=2, metavar=("JOBID", "JOBID"), help="two jobs side by side, instead of one")
    command.add_argument("--prometheus", metavar="URL", required=True, help="where the daemons' series are stored")
    command.add_argument(
        "--at", type=_moment, metavar="TIME", help="the last run that began before; Unix seconds or 2026-01-31T12:00;"
        " now"
    )  # fmt: skip
    command.add_argument("--since", type=length, default="30d", metavar="TIME", help="how far back to look; 30d")
    command.add_argument("--match", default="", metavar="SELECTOR", help="only these series, such as 'cluster=\"a\"'")
    command.add_argument("--header", action="append", default=[], metavar="LINE", help="sent with it; @FILE: its lines")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("--markdown", action="store_true", help="for a page")


def _moment(words: str) -> float:
    """A flag's type: Unix seconds; or a date and time, UTC unless it says otherwise."""
    try:
        return float(words)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(words)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{words} is neither Unix seconds nor like 2026-01-31T12:00") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
