"""What one job, or nobody, had of a node's GPUs in a period: the coins that a summary counts.

Owns their shape, how the time from one moment to another is cut into periods, and how what nodes told becomes lots.
Refuses to add up. A statement that lies in several periods is shared out by the samples it carries, layer by
layer; what it says of its whole time comes out again to the nanosecond's rounding.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from msgspec import Struct

from exporter.core.leaks import LAYER_OF, NAMES
from exporter.core.model import SECOND, Owner
from exporter.core.statement import Sample
from exporter.receipt.model import Who

EVERY = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
_MONDAY = 4 * 86_400.0
"""1970-01-05, Unix seconds: where weeks begin."""
_LONG = (("hour", 2 * 86_400.0), ("day", 35 * 86_400.0))
"""Up to how long a time is shown by what."""
LAYERS = dict(zip(NAMES, LAYER_OF, strict=True))
_GROUPS = {"gau": 0, "ectr": 1, "emfu": 2, "unresolved": 2, "useful": 3, "unobserved": 4}
"""What samples tell apart."""


class Period(NamedTuple):
    """Unix seconds."""

    start: float
    end: float


class Stay(Protocol):
    """GPUs that somebody had for a time: Unix seconds."""

    @property
    def start(self) -> float:
        """From when on."""

    @property
    def end(self) -> float:
        """Until when."""

    @property
    def whole_gpus(self) -> float:
        """The most at once."""


class Told(Stay, Protocol):
    """What a node told of a job, as far as sums need it: a Statement has it all, and so has what is short of one."""

    @property
    def node(self) -> str:
        """Whose word it is."""

    @property
    def life(self) -> str:
        """Of its books."""

    @property
    def owner(self) -> Owner:
        """Whose job it was."""

    @property
    def paid(self) -> int:
        """GPU-nanoseconds."""

    @property
    def parts(self) -> Mapping[str, int]:
        """The same by leak, useful, unresolved, unobserved."""

    @property
    def money(self) -> Mapping[str, float]:
        """By currency."""

    @property
    def models(self) -> tuple[str, ...]:
        """Of its GPUs."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Needed only of one that lies in several periods."""

    @property
    def simulated(self) -> bool:
        """It is of a simulated node."""


class Lot(Struct, frozen=True, kw_only=True):
    """One holder's part of a node in a period."""

    period: int
    """Its number."""
    who: Who
    """Without a job's id: nobody had them."""
    seconds: dict[str, float]
    """GPU-seconds by leak, useful, unresolved, unobserved."""
    money: dict[str, float] = {}
    """By currency; empty: it has no price."""
    told: bool = True
    """False: somebody had them, and no job's series tell whose they were."""
    models: tuple[str, ...] = ()


class _Stay(NamedTuple):
    start: float
    end: float
    whole_gpus: float


class Passed:
    """What was told, each to be looked at once, and what has to be known of all of it when all have passed by."""

    def __init__(self, told: Iterable[Told], *, team: str = "") -> None:
        """`team`: only this one's; nobody else keeps a team's apart."""
        self._told, self._team = told, team
        self.stays: list[Stay] = []
        self.simulated = False

    def __iter__(self) -> Iterator[Told]:
        for each in self._told:
            if self._team in ("", each.owner.team):
                self.stays.append(_Stay(each.start, each.end, each.whole_gpus))
                self.simulated = self.simulated or each.simulated
                yield each

    def within(self, span: Period) -> Period:
        """The part of a time from the first one's start to the last one's end."""
        first, last = min(stay.start for stay in self.stays), max(stay.end for stay in self.stays)
        return Period(max(span.start, first), min(span.end, last))


def usual(seconds: float) -> str:
    """By what a time of that length is shown."""
    return next((name for name, most in _LONG if seconds <= most), "week")


def periods(start: float, end: float, *, every: str) -> tuple[Period, ...]:
    """From `start` to `end`, cut at full hours, days or Mondays, UTC."""
    length = EVERY[every]
    offset = _MONDAY if every == "week" else 0.0
    at = ((start - offset) // length + 1) * length + offset
    cuts = [start]
    while at < end:
        cuts.append(at)
        at += length
    return tuple(Period(a, b) for a, b in pairwise([*cuts, end]))


def lots_of(statements: Iterable[Told], times: Sequence[Period]) -> Iterator[Lot]:
    """What they held in these periods, which rise; those that held nothing in one have no lot there."""
    starts, ends = [period.start for period in times], [period.end for period in times]
    for statement in statements:
        first, end = bisect_right(ends, statement.start), bisect_left(starts, statement.end)
        if first >= end:
            continue
        who, total = who_of(statement), statement.paid / SECOND
        for number in range(first, end):
            seconds = _within(statement, times[number])
            share = sum(seconds.values()) / total if total else 0.0
            if share > 0:
                money = {currency: share * amount for currency, amount in statement.money.items()}
                yield Lot(period=number, who=who, seconds=seconds, money=money, models=statement.models)


def who_of(statement: Told) -> Who:
    """Whose it is."""
    owner = statement.owner
    return Who(
        job_id=owner.job_id, name=owner.name, user=owner.user, account=owner.account, team=owner.team,
        partition=owner.partition, namespace=owner.namespace, workload_class=owner.workload_class,
    )  # fmt: skip


def _within(statement: Told, period: Period) -> dict[str, float]:
    """GPU-seconds by leak."""
    whole = {leak: value / SECOND for leak, value in statement.parts.items()}
    if period.start <= statement.start and statement.end <= period.end:
        return whole
    points = _points(statement, whole)
    before, after = _at(points, period.start), _at(points, period.end)
    shares = [
        (late - early) / total if total else 0.0
        for early, late, total in zip(before, after, points[-1][1], strict=True)
    ]
    found = {leak: value * shares[_GROUPS[LAYERS.get(leak, "gau")]] for leak, value in whole.items()}
    return {leak: value for leak, value in found.items() if value > 0}


_Point = tuple[float, tuple[float, ...]]


def _points(statement: Told, whole: dict[str, float]) -> list[_Point]:
    """What each group had come to, from nothing at the start to all at the end; it never shrinks."""
    sums: dict[int, float] = defaultdict(float)
    for leak, value in whole.items():
        sums[_GROUPS[LAYERS.get(leak, "gau")]] += value
    total = tuple(sums[group] for group in range(5))
    points: list[_Point] = [(statement.start, (0.0,) * 5)]
    for s in statement.samples:
        if points[-1][0] < s.at < statement.end:
            told = (s.seen - s.occupied, s.occupied - s.computing, s.computing - s.useful, s.useful, s.paid - s.seen)
            points.append((s.at, tuple(map(_between, points[-1][1], told, total))))
    return [*points, (statement.end, total)]


def _between(least: float, value: float, most: float) -> float:
    return min(max(least, value), most)


def _at(points: Sequence[_Point], moment: float) -> tuple[float, ...]:
    """At a moment, on the line between two points."""
    after = bisect_left(points, moment, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (a, low), (b, high) = points[after - 1], points[after]
    share = (moment - a) / (b - a)
    return tuple(x + share * (y - x) for x, y in zip(low, high, strict=True))


def peak(stays: Iterable[Stay], span: Period) -> float:
    """The most whole GPUs that were held at once."""
    steps: dict[float, float] = defaultdict(float)
    for stay in stays:
        start, end = max(stay.start, span.start), min(stay.end, span.end)
        if start < end:
            steps[start] += stay.whole_gpus
            steps[end] -= stay.whole_gpus
    most = now = 0.0
    for moment in sorted(steps):
        now += steps[moment]
        most = max(most, now)
    return most


def unheld(lots: Sequence[Lot], times: Sequence[Period], span: Period, *, gpus: float) -> Iterator[Lot]:
    """Of so many GPUs what no lot has, at the lots' mean price, in each period of the span."""
    held, paid = [0.0] * len(times), 0.0
    money: dict[str, float] = defaultdict(float)
    for lot in lots:
        seconds = sum(lot.seconds.values())
        held[lot.period] += seconds
        paid += seconds
        for currency, amount in lot.money.items():
            money[currency] += amount
    for number, period in enumerate(times):
        free = gpus * (min(period.end, span.end) - max(period.start, span.start)) - held[number]
        if free > 0:
            price = {currency: amount * free / paid for currency, amount in money.items()}
            yield Lot(period=number, who=Who(job_id=""), seconds={"idle_allocation": free}, money=price)
