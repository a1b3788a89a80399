"""Computes how many GPUs of each type to reserve, from the GPUs that were in use in whole weeks of five-minute steps.

Reads the series of recording rules. Of two prices, one for each hour of a reservation and one for the hours that are
used on demand, the n-th GPU is worth a reservation if it is in use for a larger share of the time than their quotient.
Refuses to advise on less than a week.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from exporter.core.prices import HOUR_SECONDS, NO_PRICE
from exporter.formatting import format_duration
from exporter.report.model import ReportError
from exporter.report.query import DAY_SECONDS, QueriedSeries, without_braces

STEP_SECONDS = 300.0
"""Seconds between two samples: as long as the means that the rules record."""
WEEK_SECONDS = 7 * DAY_SECONDS
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HOURS = 24
JOB_SIZES = ("1", "2-7", "8", "9-64", ">64")
"""GPUs of a job, by which its GPU-hours are counted."""
_SIZE_LIMITS = (1.5, 7.5, 8.5, 64.5)
"""Upper limit of each size but the last. A job on MIG instances has a fraction of a GPU: it counts as one of 1."""
_ROUNDING = 1e-6
"""A smaller part of a GPU is due to the rounding of rates."""
WeekHours = tuple[tuple[float | None, ...], ...]
"""A mean for each day, Monday first, and hour of it; None if nothing is stored of it."""


class RangeQueryServer(Protocol):
    """Evaluates PromQL range queries."""

    def range_query(self, query: str, start: float, end: float, step: float) -> Sequence[QueriedSeries]:
        """Return the values of each series from `start` to `end`, both inclusive."""


class Price(NamedTuple):
    """A price of a GPU-hour of the types whose name contains `model`."""

    model: str
    per_gpu_hour: float


def parse_price(text: str) -> Price:
    """Parse `2.50` or `H100=2.50`. Raises ValueError with the reason."""
    model, _, price = text.rpartition("=")
    try:
        per_gpu_hour = float(price)
    except ValueError:
        per_gpu_hour = 0.0
    if not 0 < per_gpu_hour < math.inf:
        raise ValueError(f"{text!r} is no price of a GPU-hour, such as 2.50 or H100=2.50")
    return Price(model, per_gpu_hour)


class Reservation(Struct, frozen=True, kw_only=True):
    """What each number of reserved GPUs of one type would have cost in these weeks, for one kind of use."""

    in_use: tuple[float, ...]
    """Share of the time in which the first, second, ... GPU is in use; each is at most the one before."""
    reserve: int | None
    """Number of GPUs for which the cost is least; None without two prices."""
    reserve_by_week: tuple[int, ...]
    """The same of each week alone."""
    costs: tuple[float, ...]
    """Cost of these weeks if 0, 1, ... GPUs are reserved and the rest is on demand; empty without two prices."""
    hours: WeekHours
    """GPUs in use."""
    on_demand_hours: WeekHours
    """GPUs in use beyond the reserved ones; empty without two prices, as `free_hours`."""
    free_hours: WeekHours
    """Reserved GPUs that are not in use."""


class GpuTypeAdvice(Struct, frozen=True, kw_only=True):
    """Use of the GPUs of one type, and the reservation for it."""

    model: str
    paid: float
    """Mean number of GPUs, as the others without another unit."""
    currency: str
    """Empty if no price is stored, or prices in several currencies."""
    cost_today: float | None
    """Cost of these weeks at the stored prices."""
    reserved_price: float | None
    on_demand_price: float | None
    """Price of a GPU-hour; None if it is neither given nor stored."""
    stored_price: float | None
    """Price of an allocated GPU-hour in the daemons' configuration."""
    allocated: Reservation
    working: Reservation
    """Of GPUs that are allocated and not lost in the layer GAU; time without telemetry counts as working."""


class JobSizeUse(Struct, frozen=True, kw_only=True):
    """GPUs that jobs of one size held, of all types together."""

    gpus: str
    gpu_hours: float
    peak: float
    hours: WeekHours


class ReservationAdvice(Struct, frozen=True, kw_only=True):
    """The advice for all types. Times are Unix seconds."""

    start: float
    end: float
    timezone: str
    known: float
    """Share of the time of which something is stored; all figures are of this part."""
    types: tuple[GpuTypeAdvice, ...]
    job_sizes: tuple[JobSizeUse, ...]
    queued: float | None
    """Mean number of GPUs that pending jobs requested; None if no `gpu-efficiency cluster` is scraped."""
    simulated: bool = False
    """Whether any node of these clusters was simulated in that time."""
    notes: tuple[str, ...] = ()
    """Warnings of the Prometheus."""

    @property
    def weeks(self) -> int:
        """Number of whole weeks."""
        return round((self.end - self.start) / WEEK_SECONDS)

    @property
    def known_hours(self) -> float:
        """Hours of which something is stored."""
        return self.known * (self.end - self.start) / HOUR_SECONDS

    def json(self) -> bytes:
        """Return the advice as JSON."""
        return msgspec.json.encode(self)


# -- reading --

_Track = dict[float, float]
"""Value by Unix time."""
_SeriesKey = tuple[str, ...]


def _queries(matchers: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the queries by name, each with the labels of its result."""

    def time(*more: str) -> str:
        return f"node_model_leak:gpu_efficiency_seconds:rate5m{{{','.join(filter(None, (*more, matchers)))}}}"

    held, busy = 'held="true"', 'layer!="gau"'
    price = f"node_model:gpu_efficiency_price:per_gpu_hour{{{matchers}}}"
    cost = f"{time()} * on (cluster, instance, model, held) group_left (currency) {price}"
    return {
        "paid": (f"sum by (model) ({time()})", ("model",)),
        "allocated": (f"sum by (model) ({time(held)})", ("model",)),
        "working": (f"sum by (model) ({time(held, busy)})", ("model",)),
        "cost": (f"sum by (model, held, currency) ({cost})", ("model", "held", "currency")),
        "jobs": (_job_size_query(f"job:gpu_efficiency_gpus{{{matchers}}}"), ("size",)),
        "queued": (f"sum(cluster:gpu_efficiency_queued:gpus{{{matchers}}})", ()),
        "simulated": (f"sum(cluster:gpu_efficiency_simulated:nodes{{{matchers}}}) > 0", ()),
    }


def _job_size_query(selector: str) -> str:
    bounds = zip(JOB_SIZES, (0.0, *_SIZE_LIMITS), (*_SIZE_LIMITS, math.inf), strict=True)
    sized = (
        f'label_replace(sum({selector} >= {low} < {"+Inf" if high == math.inf else high}), "size", "{size}", "", "")'
        for size, low, high in bounds
    )
    return " or ".join(sized)


class UsedGpus(Struct, frozen=True, kw_only=True):
    """The stored series of a time range, by name of the query and labels."""

    start: float
    end: float
    times: tuple[float, ...]
    """Ends of the steps of which something is stored, Unix seconds."""
    tracks: Mapping[str, Mapping[_SeriesKey, _Track]]

    def values(self, name: str, *labels: str) -> list[float]:
        """Return the value at each of `times`, 0 where there is none."""
        track = self.tracks[name].get(labels, {})
        return [track.get(at, 0.0) for at in self.times]


def read_used_gpus(
    server: RangeQueryServer, *, end: float, since: float, matchers: str = "",
    progress: Callable[[float, float], None] = lambda _, __: None,
) -> UsedGpus:  # fmt: skip
    """Read the whole weeks before the full hour `end`, `since` seconds at most. Raises ReportError if there is none."""
    end = end // HOUR_SECONDS * HOUR_SECONDS
    start = end - since // WEEK_SECONDS * WEEK_SECONDS
    matchers = without_braces(matchers)
    tracks: dict[str, dict[_SeriesKey, _Track]] = defaultdict(lambda: defaultdict(dict))
    days = round((end - start) / DAY_SECONDS)
    for day in range(days):
        progress(day, days)
        first = start + day * DAY_SECONDS + STEP_SECONDS
        for name, (query, labels) in _queries(matchers).items():
            for row in server.range_query(query, first, first + DAY_SECONDS - STEP_SECONDS, STEP_SECONDS):
                key = tuple(row.metric.get(label, "") for label in labels)
                tracks[name][key] |= {at: float(value) for at, value in row.values}
    stored = sorted({at for track in tracks["paid"].values() for at in track})
    if not stored:
        raise ReportError(
            "no node_model_leak:gpu_efficiency_seconds:rate5m is stored there in that time: does that Prometheus"
            " evaluate the rules of alerts/? Try --at with a time at which it did, or another --match"
        )
    weeks = (end - stored[0] + STEP_SECONDS) // WEEK_SECONDS
    times = tuple(at for at in stored if at > end - weeks * WEEK_SECONDS)
    if len(times) * STEP_SECONDS < WEEK_SECONDS:
        raise ReportError(
            f"only {format_duration(len(times or stored) * STEP_SECONDS)} of the rules' series are stored there in that"
            " time, which is less than a week: no advice"
        )
    return UsedGpus(start=end - weeks * WEEK_SECONDS, end=end, times=times, tracks=tracks)


# -- computing --


def shares_in_use(values: Sequence[float]) -> tuple[float, ...]:
    """Return the share of the time in which the first, second, ... GPU is in use, from the GPUs in use at each time."""
    highest = math.ceil(max(values, default=0.0) - _ROUNDING)
    full, part = [0.0] * (highest + 1), [0.0] * (highest + 1)
    for value in values:
        whole = math.floor(value + _ROUNDING)
        full[min(whole, highest)] += 1
        part[min(whole, highest)] += max(0.0, value - whole)
    at_least = [*accumulate(reversed(full))][::-1]
    return tuple((at_least[number + 1] + part[number]) / len(values) for number in range(highest))


def reserved_count(in_use: Sequence[float], break_even: float) -> int:
    """Return how many GPUs are in use for a larger share of the time than `break_even`."""
    return sum(share > break_even for share in in_use)


def advise_reservation(
    used: UsedGpus, timezone: tzinfo, *, reserved: Sequence[Price], on_demand: Sequence[Price]
) -> ReservationAdvice:
    """Return the advice for all types, those with most GPUs first. Of several prices for a type the last one counts."""
    calendar = _Calendar(used.times, timezone)
    models = sorted((model for (model,) in used.tracks["paid"]), key=lambda model: -sum(used.values("paid", model)))
    queued = used.values("queued")
    return ReservationAdvice(
        start=used.start,
        end=used.end,
        timezone=str(timezone),
        known=len(used.times) * STEP_SECONDS / (used.end - used.start),
        types=tuple(_advise_type(used, model, calendar, reserved, on_demand) for model in models),
        job_sizes=tuple(_job_size(used, size, calendar) for size in JOB_SIZES),
        queued=sum(queued) / len(queued) if used.tracks["queued"] else None,
        simulated=bool(used.tracks["simulated"]),
    )


class _Calendar:
    """Assigns steps to the hours of the week."""

    def __init__(self, times: Iterable[float], timezone: tzinfo) -> None:
        starts = (datetime.fromtimestamp(at - STEP_SECONDS, timezone) for at in times)
        self._hours = [_HOURS * start.weekday() + start.hour for start in starts]

    def means(self, values: Iterable[float]) -> WeekHours:
        """Return the mean of the values by hour of the week."""
        sums, counts = [0.0] * _HOURS * len(DAYS), [0] * _HOURS * len(DAYS)
        for hour, value in zip(self._hours, values, strict=True):
            sums[hour] += value
            counts[hour] += 1
        means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        return tuple(tuple(means[_HOURS * day : _HOURS * (day + 1)]) for day in range(len(DAYS)))


def _advise_type(
    used: UsedGpus, model: str, calendar: _Calendar, reserved: Sequence[Price], on_demand: Sequence[Price]
) -> GpuTypeAdvice:
    paid, allocated = used.values("paid", model), used.values("allocated", model)
    currencies = {key[2] for key in used.tracks["cost"] if key[0] == model}
    currency = currencies.pop() if len(currencies) == 1 and currencies != {NO_PRICE.currency} else ""
    held_cost = sum(used.values("cost", model, "true", currency))
    cost = (held_cost + sum(used.values("cost", model, "false", currency))) * STEP_SECONDS / HOUR_SECONDS
    stored = held_cost / sum(allocated) if currency and sum(allocated) else None
    given = _price_of(model, reserved), _price_of(model, on_demand)
    prices = given if given == (None, None) else (given[0] or stored, given[1] or stored)
    return GpuTypeAdvice(
        model=model,
        paid=sum(paid) / len(paid),
        currency=currency,
        cost_today=cost if currency else None,
        reserved_price=prices[0],
        on_demand_price=prices[1],
        stored_price=stored,
        allocated=_reservation(used, allocated, calendar, *prices),
        working=_reservation(used, used.values("working", model), calendar, *prices),
    )


def _price_of(model: str, prices: Sequence[Price]) -> float | None:
    matching = [price.per_gpu_hour for price in prices if price.model.casefold() in model.casefold()]
    return matching[-1] if matching else None


def _reservation(
    used: UsedGpus, values: Sequence[float], calendar: _Calendar, reserved: float | None, on_demand: float | None
) -> Reservation:
    in_use, hours = shares_in_use(values), calendar.means(values)
    if reserved is None or on_demand is None:
        return Reservation(
            in_use=in_use, reserve=None, reserve_by_week=(), costs=(), hours=hours, on_demand_hours=(), free_hours=()
        )
    break_even = reserved / on_demand
    count = reserved_count(in_use, break_even)
    weekly = (reserved_count(shares_in_use(week), break_even) for week in _by_week(used, values))
    known_hours = len(values) * STEP_SECONDS / HOUR_SECONDS
    beyond = [*accumulate(reversed(in_use), initial=0.0)][::-1]
    return Reservation(
        in_use=in_use,
        reserve=count,
        reserve_by_week=tuple(weekly),
        costs=tuple(known_hours * (n * reserved + gpus * on_demand) for n, gpus in enumerate(beyond)),
        hours=hours,
        on_demand_hours=calendar.means(max(0.0, value - count) for value in values),
        free_hours=calendar.means(max(0.0, count - value) for value in values),
    )


def _by_week(used: UsedGpus, values: Sequence[float]) -> Iterator[list[float]]:
    """Yield the values of each week of which something is stored."""
    weeks: dict[int, list[float]] = defaultdict(list)
    for at, value in zip(used.times, values, strict=True):
        weeks[int((at - STEP_SECONDS - used.start) // WEEK_SECONDS)].append(value)
    return (weeks[week] for week in sorted(weeks))


def _job_size(used: UsedGpus, size: str, calendar: _Calendar) -> JobSizeUse:
    values = used.values("jobs", size)
    gpu_hours = sum(values) * STEP_SECONDS / HOUR_SECONDS
    return JobSizeUse(gpus=size, gpu_hours=gpu_hours, peak=max(values), hours=calendar.means(values))
