"""Defines the GPU time that one job, or nobody, held in a period (UsageRecord), and cuts JobRecords into periods.

A record that spans several periods is split by its samples, layer by layer; the parts add up to the whole.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from msgspec import Struct

from exporter.core.job_record import JobSample, PriceChange
from exporter.core.model import SECOND, Owner
from exporter.core.prices import CarbonIntensity, EnergyTerms
from exporter.report.build import LAYER_BY_LEAK
from exporter.report.energy import EnergyInterval, MeanIntensity, mean_intensity
from exporter.report.model import JobIdentity

PERIOD_SECONDS = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
_FIRST_MONDAY = 4 * 86_400.0
"""1970-01-05, Unix seconds: where weeks begin."""
_LONGEST_BY_PERIOD = (("hour", 2 * 86_400.0), ("day", 35 * 86_400.0))
"""Longest range, in seconds, for which a period is the default."""
NOT_SPLIT = ""
"""Key of energy that is not known by leak."""
_ENERGY_GROUP = 5
"""The last of the groups: joules, not time."""
_SAMPLE_GROUPS = {"gau": 0, "ectr": 1, "emfu": 2, "unresolved": 2, "useful": 3, "unobserved": 4}
"""Group of a JobSample in which each layer is counted."""


class Period(NamedTuple):
    """A time range in Unix seconds."""

    start: float
    end: float


class UsageInput(Protocol):
    """What summaries need of a node's record of a job: JobRecord and JobRecordSummary have it."""

    @property
    def start(self) -> float:
        """When GPUs were first held, Unix seconds."""

    @property
    def end(self) -> float:
        """When GPUs were last held, Unix seconds."""

    @property
    def running(self) -> bool:
        """Whether it holds GPUs still."""

    @property
    def whole_gpus(self) -> float:
        """The most whole GPUs held at once."""

    @property
    def node(self) -> str:
        """The node that recorded it."""

    @property
    def life(self) -> str:
        """ID of the ledger."""

    @property
    def owner(self) -> Owner:
        """Owner of the job."""

    @property
    def paid(self) -> int:
        """GPU-nanoseconds held."""

    @property
    def parts(self) -> Mapping[str, int]:
        """The same by leak, useful, unresolved, unobserved."""

    @property
    def energy(self) -> Mapping[str, float]:
        """Joules by leak, useful, unresolved, unobserved."""

    @property
    def money(self) -> Mapping[str, float]:
        """Cost by currency."""

    @property
    def models(self) -> tuple[str, ...]:
        """Models of its GPUs."""

    @property
    def samples(self) -> tuple[JobSample, ...]:
        """Samples; needed only if it spans several periods."""

    @property
    def price_changes(self) -> tuple[PriceChange, ...]:
        """What it had cost at each change of its price."""

    @property
    def simulated(self) -> bool:
        """Whether the node is simulated."""


AnyInput = TypeVar("AnyInput", bound=UsageInput)


def latest_records(records: Iterable[AnyInput]) -> tuple[AnyInput, ...]:
    """Keep the last of several records of one job, node and ledger: two sources or time ranges may have it."""
    return tuple({(each.node, each.life, each.owner.job_id, each.start): each for each in records}.values())


class UsageRecord(Struct, frozen=True, kw_only=True):
    """GPU time that one job, or nobody, held on one node in a period."""

    period: int
    """Index of the period."""
    identity: JobIdentity
    """The job; without a job ID if the GPUs were not allocated."""
    seconds: dict[str, float]
    """GPU-seconds by leak, useful, unresolved, unobserved."""
    money: dict[str, float] = {}
    """Cost by currency; empty if it has no price."""
    energy: dict[str, float] = {}
    """Joules of the boards by leak; by NOT_SPLIT if the source has only the sum."""
    energy_money: dict[str, float] = {}
    """Price of the energy by currency; empty if it is not known."""
    intensity: MeanIntensity = MeanIntensity(None, 0.0)
    """Carbon intensity of the energy."""
    attributed: bool = True
    """False if the GPUs were allocated, but no series of a job covers the time."""
    models: tuple[str, ...] = ()


class GpuHolding(NamedTuple):
    """The most whole GPUs held from `start` to `end`, Unix seconds."""

    start: float
    end: float
    whole_gpus: float


class UsageInputs:
    """Iterates over inputs once, and collects the holdings of all and whether any is running or simulated."""

    def __init__(self, inputs: Iterable[UsageInput], *, team: str = "") -> None:
        """Keep only inputs of `team`, if given: stores and nodes cannot filter by team."""
        self._inputs, self._team = inputs, team
        self._holdings: dict[tuple[str, str], list[GpuHolding]] = defaultdict(list)
        """By node and job."""
        self.running = self.simulated = False

    def __iter__(self) -> Iterator[UsageInput]:
        for usage_input in self._inputs:
            if self._team in ("", usage_input.owner.team):
                holding = GpuHolding(usage_input.start, usage_input.end, usage_input.whole_gpus)
                self._holdings[usage_input.node, usage_input.owner.job_id].append(holding)
                self.running = self.running or usage_input.running
                self.simulated = self.simulated or usage_input.simulated
                yield usage_input

    @property
    def holdings(self) -> list[GpuHolding]:
        """All holdings. A new ledger's record has the job's start: its holding begins where the one before ended."""
        found = list[GpuHolding]()
        for of_one in self._holdings.values():
            before = float("-inf")
            for holding in sorted(of_one, key=attrgetter("end")):
                found.append(holding._replace(start=max(holding.start, before)))
                before = holding.end
        return found

    def clip(self, period: Period) -> Period:
        """Clip a period to the time from the first start to the last end of all holdings."""
        holdings = self.holdings
        first, last = min(holding.start for holding in holdings), max(holding.end for holding in holdings)
        return Period(max(period.start, first), min(period.end, last))


def default_period(seconds: float) -> str:
    """Return the period by which a range of that length is divided unless one is chosen."""
    return next((name for name, longest in _LONGEST_BY_PERIOD if seconds <= longest), "week")


def split_periods(start: float, end: float, *, every: str) -> tuple[Period, ...]:
    """Split the range at full hours, days or Mondays, UTC."""
    length = PERIOD_SECONDS[every]
    offset = _FIRST_MONDAY if every == "week" else 0.0
    at = ((start - offset) // length + 1) * length + offset
    cuts = [start]
    while at < end:
        cuts.append(at)
        at += length
    return tuple(Period(a, b) for a, b in pairwise([*cuts, end]))


_NO_PRICE, _NO_INTENSITY = EnergyTerms(), CarbonIntensity()


def usage_records(
    inputs: Iterable[UsageInput],
    times: Sequence[Period],
    *,
    energy: EnergyTerms = _NO_PRICE,
    carbon: CarbonIntensity = _NO_INTENSITY,
) -> Iterator[UsageRecord]:
    """Split inputs into the given ascending periods; a period in which nothing was held has no record."""
    starts, ends = [period.start for period in times], [period.end for period in times]
    for usage_input in inputs:
        first, end = bisect_right(ends, usage_input.start), bisect_left(starts, usage_input.end)
        if first >= end:
            continue
        identity = job_identity(usage_input.owner)
        points = cache(partial(_cumulative_points, usage_input))  # most inputs lie in one period, and need none
        for number in range(first, end):
            seconds, joules = _amounts_within(usage_input, times[number], points)
            intensity = mean_intensity(_energy_intervals(usage_input, times[number], points), carbon)
            if (held := sum(seconds.values())) > 0:
                money = _money_within(usage_input, times[number], points, held)
                yield UsageRecord(
                    period=number, identity=identity, seconds=seconds, money=money, energy=joules,
                    energy_money=energy.money(sum(joules.values())), intensity=intensity, models=usage_input.models,
                )  # fmt: skip


def hours_unknown(usage: Iterable[UsageRecord]) -> float:
    """Return the share of the energy that was used in hours for which there is no carbon intensity of their own."""
    weighted = [(sum(record.energy.values()), record.intensity.hours_unknown) for record in usage]
    total = sum(joules for joules, _ in weighted)
    return sum(joules * unknown for joules, unknown in weighted) / total if total else 0.0


def job_identity(owner: Owner) -> JobIdentity:
    """Return the identity of the owner's job. A node does not know its cluster."""
    return JobIdentity(
        job_id=owner.job_id, display_id=owner.display_id, name=owner.name, user=owner.user, account=owner.account,
        team=owner.team, partition=owner.partition, namespace=owner.namespace, workload_class=owner.workload_class,
    )  # fmt: skip


_Point = tuple[float, tuple[float, ...]]
_Points = Callable[[], list[_Point]]
"""Returns an input's `_cumulative_points`."""


def _amounts_within(
    usage_input: UsageInput, period: Period, points: _Points
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the GPU-seconds and the joules of the input in a period, by leak."""
    by_leak = {leak: value / SECOND for leak, value in usage_input.parts.items()}
    if period.start <= usage_input.start and usage_input.end <= period.end:
        return by_leak, dict(usage_input.energy)
    before, after = _interpolate(points(), period.start), _interpolate(points(), period.end)
    shares = [
        (late - early) / total if total else 0.0
        for early, late, total in zip(before, after, points()[-1][1], strict=True)
    ]
    within = {leak: value * shares[_SAMPLE_GROUPS[LAYER_BY_LEAK.get(leak, "gau")]] for leak, value in by_leak.items()}
    joules = {leak: value * shares[_ENERGY_GROUP] for leak, value in usage_input.energy.items()}
    return {leak: value for leak, value in within.items() if value > 0}, joules


def _money_within(usage_input: UsageInput, period: Period, points: _Points, seconds: float) -> dict[str, float]:
    """Return the cost of the input in a period, in which it held `seconds`, by currency: each has its own price."""
    if not usage_input.price_changes:
        share = seconds / (usage_input.paid / SECOND) if usage_input.paid else 0.0
        return {currency: share * amount for currency, amount in usage_input.money.items()}
    before, after = (
        _cost_of(usage_input, sum(_interpolate(points(), when)[:_ENERGY_GROUP])) for when in (period.start, period.end)
    )
    return {
        currency: after[currency] - before[currency]
        for currency, total in usage_input.money.items()
        if after[currency] > before[currency] or not total
    }


def _cost_of(usage_input: UsageInput, seconds: float) -> dict[str, float]:
    """Return the cost of the first GPU-seconds of the input, by currency."""
    known = [(change.paid, change.money) for change in usage_input.price_changes] + [
        (usage_input.paid, usage_input.money)
    ]
    points = [(0.0, (0.0,) * len(usage_input.money))]
    for paid, money in known:
        if paid / SECOND > points[-1][0]:
            points.append((paid / SECOND, tuple(money.get(currency, 0.0) for currency in usage_input.money)))
    return dict(zip(usage_input.money, _interpolate(points, seconds), strict=True))


def _energy_intervals(usage_input: UsageInput, period: Period, points: _Points) -> Iterator[EnergyInterval]:
    """Yield the energy of a period between consecutive samples."""
    edges = max(period.start, usage_input.start), min(period.end, usage_input.end)
    inside = [when for when, _ in points() if edges[0] < when < edges[1]]
    for start, end in pairwise((edges[0], *inside, edges[1])):
        before, after = (_interpolate(points(), when)[_ENERGY_GROUP] for when in (start, end))
        yield EnergyInterval(start, end, after - before)


def _cumulative_points(usage_input: UsageInput) -> list[_Point]:
    """Return (Unix seconds, sum of each group), from 0 at the start to the total at the end; sums never decrease."""
    sums = [0.0] * _ENERGY_GROUP
    for leak, value in usage_input.parts.items():
        sums[_SAMPLE_GROUPS[LAYER_BY_LEAK.get(leak, "gau")]] += value / SECOND
    total = (*sums, sum(usage_input.energy.values()))
    points: list[_Point] = [(usage_input.start, (0.0,) * len(total))]
    for sample in usage_input.samples:
        if points[-1][0] < sample.at < usage_input.end:
            counters = sample.seen, sample.occupied, sample.computing, sample.useful, 0.0
            groups = (*(a - b for a, b in pairwise(counters)), sample.paid - sample.seen, sample.joules)
            points.append((sample.at, tuple(map(_clamp, points[-1][1], groups, total))))
    return [*points, (usage_input.end, total)]


def _clamp(least: float, value: float, maximum: float) -> float:
    return min(max(least, value), maximum)


def _interpolate(points: Sequence[_Point], when: float) -> tuple[float, ...]:
    """Interpolate linearly between the two points around `when`, the first of each pair."""
    after = bisect_left(points, when, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (a, low), (b, high) = points[after - 1], points[after]
    share = (when - a) / (b - a)
    return tuple(x + share * (y - x) for x, y in zip(low, high, strict=True))


def peak_gpus(holdings: Iterable[GpuHolding], period: Period) -> float:
    """Return the most whole GPUs held at once in the period."""
    steps: dict[float, float] = defaultdict(float)
    for holding in holdings:
        start, end = max(holding.start, period.start), min(holding.end, period.end)
        if start < end:
            steps[start] += holding.whole_gpus
            steps[end] -= holding.whole_gpus
    maximum = current = 0.0
    for when in sorted(steps):
        current += steps[when]
        maximum = max(maximum, current)
    return maximum


def unheld_usage(
    usage: Sequence[UsageRecord], times: Sequence[Period], whole_period: Period, *, gpus: float
) -> Iterator[UsageRecord]:
    """Return the time of `gpus` GPUs that no record holds, by period, at the mean price of records with one."""
    held_seconds = [0.0] * len(times)
    priced_seconds: dict[str, float] = defaultdict(float)
    money: dict[str, float] = defaultdict(float)
    for record in usage:
        seconds = sum(record.seconds.values())
        held_seconds[record.period] += seconds
        for currency, amount in record.money.items():
            money[currency] += amount
            priced_seconds[currency] += seconds
    for number, period in enumerate(times):
        length = min(period.end, whole_period.end) - max(period.start, whole_period.start)
        free = gpus * length - held_seconds[number]
        if free > 0:
            price = {currency: amount * free / priced_seconds[currency] for currency, amount in money.items()}
            identity, by_leak = JobIdentity(job_id=""), {"idle_allocation": free}
            yield UsageRecord(period=number, identity=identity, seconds=by_leak, money=price)
