"""Sums of `report`: what many jobs or a fleet held and lost, who lost most, the trend, own or rent.

Owns the flags, and where lots come from. Refuses to add up and to lay out.
"""

import argparse
import time
from collections.abc import Iterable, Iterator

from exporter.cli.preview import headers
from exporter.cli.progress import Progress, counted
from exporter.cli.statements import in_short
from exporter.config import ConfigError
from exporter.core.statement import Wanted
from exporter.preview.prometheus import Prometheus
from exporter.receipt import ReceiptError
from exporter.receipt.sums.lots import EVERY, Passed, Period, Told, lots_of, peak, periods, unheld, usual
from exporter.receipt.sums.renting import Offer, offer, with_more
from exporter.receipt.sums.stored import Answer, Only, Stored
from exporter.receipt.sums.summary import Fleet
from exporter.receipt.sums.summing import BY, Summary
from exporter.receipt.sums.summing import summed as added
from exporter.wording import without_secrets

_GOOD_EMFU = 0.6
"""Where nobody says another: as in the figures of docs/sums.md."""
_MOST = 10_000_000
"""Statements: all of them."""


def wanted(args: argparse.Namespace) -> bool:
    """Whether sums are asked for."""
    return bool(args.all or args.rent or Only(**_only(args)).matchers)


def _only(args: argparse.Namespace) -> dict[str, str]:
    return {field: getattr(args, field) or "" for field in Only.__struct_fields__}


def summed(args: argparse.Namespace) -> Summary:
    """The sums. Raises what the sources raise, ReceiptError, and ConfigError for what cannot be had."""
    only = Only(**_only(args))
    if args.all and only.matchers:
        raise ConfigError(f"report: --all, or only {only}, and not both")
    if args.gpus is not None and only.matchers:
        raise ConfigError(f"report: --gpus is of all: others than {only} have some of them")
    at = time.time() if args.at is None else args.at
    every = args.every or usual(args.since)
    times = periods(at - args.since, at, every=every)
    found = _stored(args, only, times, every) if args.prometheus else _joined(args, only, times, every)
    try:
        return with_more(found, offers=tuple(args.rent), emfu=(args.target_emfu or _GOOD_EMFU,))
    except ValueError as err:
        raise ReceiptError(str(err)) from err


# -- a Prometheus --


def _stored(args: argparse.Namespace, only: Only, times: tuple[Period, ...], every: str) -> Summary:
    if args.gpus is not None:
        raise ConfigError("report: --gpus is for stores and nodes: a Prometheus knows how many GPUs there are")
    told = Progress(without_secrets(args.prometheus), len(times), unit=counted("parts"), quiet=args.quiet)
    with Prometheus(args.prometheus, headers(args.header)) as server, told:
        found = Stored(server, only, matchers=args.match).answer(times, progress=told.tell)
    if not found.lots:
        raise ReceiptError(f"no job{_whose(only)} held a GPU in that time, as far as it is stored there")
    return added(
        found.lots,
        times,
        about=_about(only, whole=True),
        by=args.by or "",
        every=every,
        source="Prometheus",
        start=found.known.start,
        end=found.known.end,
        fleet=found.fleet,
        unseen=tuple(_unseen(found, times)),
        simulated=found.simulated,
    )


def _about(only: Only, *, whole: bool) -> str:
    return f"{only}" if only.matchers else "the whole fleet" if whole else "all jobs"


def _whose(only: Only) -> str:
    return f" of {only}" if only.matchers else ""


def _unseen(found: Answer, times: tuple[Period, ...]) -> Iterator[str]:
    if found.known.start > times[0].start or found.known.end < times[-1].end:
        yield "less is stored than was asked for: all figures are of the time above"
    if found.anew:
        yield f"daemons began anew {found.anew} times: without a history of its own one that is down counts nothing"
    if found.by_rules:
        yield "split by leak as recording rules have it, for it is much; the time of jobs is counted to the sample"
    if any(not lot.told for lot in found.lots):
        yield "(not told): somebody had these GPUs, but no job's series say who; jobs between two scrapes are so"


# -- stores and nodes --


def _joined(args: argparse.Namespace, only: Only, times: tuple[Period, ...], every: str) -> Summary:
    span = Period(times[0].start, times[-1].end)
    whose = {field: getattr(only, field) for field in ("user", "account", "namespace")}
    wanted = Wanted(**whose, since=span.start, until=span.end, limit=_MOST)
    known = in_short(args, wanted, cuts=[span.start, *(period.end for period in times)])
    told = Passed(known.statements if known.once else _once(known.statements), team=only.team)
    lots = tuple(lots_of(told, times))
    if not lots:
        why = "; ".join((f"as far as the {known.asked.source} know", *known.asked.silent))
        raise ReceiptError(f"no job{_whose(only)} held a GPU in that time, {why}")
    span = told.within(span)
    fleet = None
    if not only.matchers:
        held = sum(sum(lot.seconds.values()) for lot in lots) / (span.end - span.start)
        fleet = Fleet(gpus=args.gpus, gpus_peak=args.gpus, held=held, held_peak=peak(told.stays, span))
        lots += tuple(unheld(lots, times, span, gpus=args.gpus)) if args.gpus is not None else ()
    return added(
        lots,
        times,
        about=_about(only, whole=args.gpus is not None),
        by=args.by or "",
        every=every,
        source=known.asked.source,
        start=span.start,
        end=span.end,
        fleet=fleet,
        unseen=(*known.asked.silent, *known.asked.notes, *_not_there(args, fleet)),
        simulated=told.simulated,
    )


def _once(told: Iterable[Told]) -> Iterable[Told]:
    """Each statement once, though two sources have it; the later word of a job that runs on."""
    found: dict[tuple[str, str, str, float], Told] = {}
    for each in sorted(told, key=lambda each: each.end):
        found[each.node, each.life, each.owner.job_id, each.start] = each
    return found.values()


def _not_there(args: argparse.Namespace, fleet: Fleet | None) -> Iterator[str]:
    if fleet is None:
        return
    if args.gpus is None:
        yield "GPUs that nobody had are in no job's receipt: say how many are paid for with --gpus, or ask a Prometheus"
    else:
        yield f"by your word {args.gpus:g} GPUs are paid for; what no job had of them costs what the jobs' GPUs do"


# -- flags --


def sums_arguments(command: argparse.ArgumentParser) -> None:
    """Flags of the sums."""
    flags = command.add_argument_group("sums", "instead of one job: who held and lost how much, and when")
    flags.add_argument("--all", action="store_true", help="all jobs, and from a Prometheus the GPUs that nobody had")
    for field in Only.__struct_fields__:
        flags.add_argument(f"--{field}", metavar="NAME", help=f"jobs of this {field}")
    flags.add_argument("--by", choices=BY, help="what is ranked; users, or namespaces where there are none")
    flags.add_argument("--every", choices=tuple(EVERY), help="the trend's steps; by how long the time is")
    flags.add_argument(
        "--rent", action="append", default=[], type=_offer, metavar="PRICE@UTILISATION",
        help="own or rent: 4.00@0.95 is 4 an hour of which 95 %% is useful; name=4.00@0.95; repeatable",
    )  # fmt: skip
    flags.add_argument(
        "--gpus", type=_gpus, metavar="N", help="that are paid for, for stores and nodes, which know of jobs alone"
    )


def _offer(words: str) -> Offer:
    try:
        return offer(words)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _gpus(words: str) -> float:
    try:
        count = float(words)
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise argparse.ArgumentTypeError(f"{words} is no number of GPUs")
    return count
