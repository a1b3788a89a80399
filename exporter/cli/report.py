"""Command `report`: what a job cost, where its time went, what it said; two jobs side by side; sums over many."""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from exporter.cli import sums
from exporter.cli.preview import headers, length
from exporter.cli.progress import Progress, counted, progress_arguments
from exporter.cli.statements import GatherError, finished, gathered, source_arguments
from exporter.cli.wiring import FAILED, config_file
from exporter.config import ConfigError
from exporter.core.statement import Wanted
from exporter.preview.prometheus import Prometheus, PrometheusError, Series
from exporter.receipt import Asking, Comparison, Receipt, ReceiptError, compared, issued, joined
from exporter.receipt.placing import PlaceError, place
from exporter.receipt.saying import Table, comparison_tables, receipt_tables
from exporter.receipt.short import line, short
from exporter.receipt.sums.summing import Summary, summary_lines, summary_tables
from exporter.receipt.text import markdown, text
from exporter.receipt.what_if import what_if
from exporter.wording import without_secrets

_FORMS = ("json", "markdown", "html", "short", "line")


def report(args: argparse.Namespace) -> int:
    """Print a job's receipt, two held against each other, or sums over many jobs."""
    _check(args)
    try:
        found = sums.summed(args) if sums.wanted(args) else _found(args)
        _put(_said(found, args), args.output)
    except (GatherError, PlaceError, PrometheusError, ReceiptError) as err:
        print(f"gpu-efficiency: {err}", file=sys.stderr)
        return FAILED
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what is asked twice or not at all."""
    if bool(args.job) + bool(args.compare) + sums.wanted(args) != 1:
        raise ConfigError(
            "report: give a job's id, or --compare and two, or what to sum up (--all, --user NAME, ...), and not both"
        )
    if sum(bool(getattr(args, form)) for form in _FORMS) > 1:
        raise ConfigError(f"report: only one of {', '.join(f'--{form}' for form in _FORMS)}")
    if (args.short and not args.job) or (args.line and args.compare):
        raise ConfigError("report: --short is of one job, --line of one or of sums")
    if args.prometheus and (args.store or args.node or args.wait):
        raise ConfigError("report: --prometheus, or --store and --node (and --wait), and not both")


def _found(args: argparse.Namespace) -> Receipt | Comparison:
    at = time.time() if args.at is None else args.at
    receipts = _stored(args, at) if args.prometheus else _joined(args, at)
    receipts = [replace(each, what_if=what_if(each, emfu=args.target_emfu)) for each in receipts]
    return receipts[0] if args.job else compared(receipts[0], receipts[1])


def _jobs(args: argparse.Namespace) -> list[str]:
    return list(args.compare or [args.job])


def _stored(args: argparse.Namespace, at: float) -> list[Receipt]:
    """What a Prometheus has of each job."""
    told = Progress(without_secrets(args.prometheus), unit=counted("questions"), quiet=args.quiet)
    with Prometheus(args.prometheus, headers(args.header)) as server, told:
        asked = _Counted(server, told)
        return [issued(Asking(asked, job, matchers=args.match), at, since=args.since) for job in _jobs(args)]


class _Counted:
    """A Prometheus whose questions are told as they go: a long run over many nodes takes hundreds."""

    def __init__(self, server: Prometheus, told: Progress) -> None:
        self._server, self._told, self._count = server, told, 0

    def now(self, query: str, at: float) -> Sequence[Series]:
        """As the server."""
        self._count += 1
        self._told.tell(self._count)
        return self._server.now(query, at)


def _joined(args: argparse.Namespace, at: float) -> list[Receipt]:
    """What stores or nodes have of each job."""
    found = []
    for job in _jobs(args):
        wanted = Wanted(job_id=job, since=at - args.since, until=at)
        known = finished(args, wanted) if args.wait else gathered(args, wanted)
        found.append(joined(known.statements, job_id=job, at=at, asked=known.asked))
    return found


# -- how it is said --


def _said(found: Receipt | Comparison | Summary, args: argparse.Namespace) -> str:
    if args.json:
        return found.json().decode() + "\n"
    if args.line and isinstance(found, Summary):
        return summary_lines(found)
    if (args.line or args.short) and isinstance(found, Receipt):
        return line(found) + "\n" if args.line else short(found)
    if args.html:
        from exporter.receipt.html import html  # noqa: PLC0415  only who wants a page pays for it

        return html(found, _tables(found))
    return (markdown if args.markdown else text)(_tables(found))


def _tables(found: Receipt | Comparison | Summary) -> list[Table]:
    if isinstance(found, Receipt):
        return list(receipt_tables(found))
    if isinstance(found, Comparison):
        return list(comparison_tables(found))
    return list(summary_tables(found))


def _put(words: str, file: Path | None) -> None:
    if file is None or str(file) == "-":
        sys.stdout.write(words)
    else:
        place(file, words.encode())


# -- flags --


def report_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of `report`."""
    config_file(command)
    progress_arguments(command)
    command.add_argument("job", nargs="?", metavar="JOBID", help="as the metrics have it; Kubernetes: namespace/pod")
    command.add_argument("--compare", nargs=2, metavar=("JOBID", "JOBID"), help="two jobs side by side, instead of one")
    sums.sums_arguments(command)
    source_arguments(command)
    command.add_argument(
        "--at", type=_moment, metavar="TIME", help="the last run that began before; Unix seconds or 2026-01-31T12:00;"
        " now"
    )  # fmt: skip
    command.add_argument("--since", type=length, default="30d", metavar="TIME", help="how far back to look; 30d")
    command.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="for an epilog: until the node has seen the job's end,"
        " so many seconds at most"
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


def _ratio(words: str) -> float:
    """A flag's type: more than 0, and 1 at most; 60 % is 0.6."""
    try:
        value = float(words.removesuffix("%").strip()) / (100 if words.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{words} is no ratio between 0 and 1, such as 0.6")
    return value


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
