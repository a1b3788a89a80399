"""Renders the advice on reservations as tables: cost by number of reserved GPUs, and GPUs by hour of the week."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from exporter.formatting import NO_VALUE, format_amount, format_percent, format_time
from exporter.report.ranking import amount_text, gpu_count
from exporter.report.reservation import DAYS, GpuTypeAdvice, JobSizeUse, Reservation, ReservationAdvice, WeekHours
from exporter.report.text import ReportTable, TableRow, plural, simulated_suffix

_TABLE_STEPS = 8
"""Rows of the table of costs, about; --json has all numbers."""
_TWO_DIGITS = 99.5
"""Means from here on need more than two digits, and two hours of a day share a column."""
_COUNTED = 0.5
"""A mean of fewer GPUs rounds to none."""
_WORKING_HOURS = range(8, 20)
_WEEKEND = frozenset({"Sat", "Sun"})


def advice_tables(advice: ReservationAdvice) -> Iterator[ReportTable]:
    """Yield all tables of the advice in order."""
    known = "" if advice.known > 1 - 1e-9 else f", of which {format_percent(advice.known)} is stored"
    weeks = plural(advice.weeks, "week")
    span = f"{format_time(advice.start)} to {format_time(advice.end)}, {weeks}{known}"
    title = f"How many GPUs to reserve{simulated_suffix(advice)}"
    yield ReportTable(title=title, prose=(span, f"hours of the week: {advice.timezone}"))
    for gpu_type in advice.types:
        yield from _type_tables(gpu_type, advice)
    if any(size.gpu_hours for size in advice.job_sizes):
        yield _job_size_table(advice)
    yield ReportTable(title="How it is known", prose=tuple(_assumptions(advice)))


def _type_tables(gpu_type: GpuTypeAdvice, advice: ReservationAdvice) -> Iterator[ReportTable]:
    allocated, working = gpu_type.allocated, gpu_type.working
    rows = [
        ("paid for, on average", gpu_count(gpu_type.paid)),
        ("allocated, on average", f"{gpu_count(sum(allocated.in_use))}, at most {len(allocated.in_use)}"),
        ("allocated and working", f"{gpu_count(sum(working.in_use))}, at most {len(working.in_use)}"),
    ]
    if gpu_type.cost_today is not None:
        rows.append(("cost, as it was", f"{amount_text(gpu_type.cost_today)} {gpu_type.currency}"))
    yield ReportTable(title=gpu_type.model or "GPUs of unknown type", rows=tuple(rows), prose=_verdict(gpu_type))
    yield _cost_table(gpu_type, advice.known_hours)
    yield ReportTable(title="Allocated, by hour of the week", prose=tuple(_heat_lines(allocated.hours)))
    if allocated.reserve is not None and any(_counted(allocated.on_demand_hours)):
        title = f"Beyond {allocated.reserve} reserved, by hour of the week"
        yield ReportTable(title=title, prose=tuple(_heat_lines(allocated.on_demand_hours)))


# -- the number --


def _verdict(gpu_type: GpuTypeAdvice) -> tuple[str, ...]:
    allocated, working = gpu_type.allocated, gpu_type.working
    reserved, on_demand = gpu_type.reserved_price, gpu_type.on_demand_price
    if allocated.reserve is None or reserved is None or on_demand is None:
        return (
            (
                "no advice without two prices: give --reserved-price and --on-demand-price; the n-th GPU is worth a"
                " reservation if it is in use for a larger share of the time than the quotient of the two"
            ),
        )
    break_even = f"(reserving a GPU pays if it is in use more than {format_percent(reserved / on_demand)} of the time)"
    return (
        f"reserve {allocated.reserve}: {_cost_text(allocated, allocated.reserve, gpu_type)} {break_even}",
        f"of each week alone: {', '.join(map(str, allocated.reserve_by_week))}",
        (
            f"if no GPU were allocated without work: reserve {working.reserve},"
            f" {_cost_text(working, working.reserve or 0, gpu_type)}"
        ),
        *_named_hours("on demand", "beyond these", allocated.on_demand_hours),
        *_named_hours("reserved GPUs are free", "for work that can wait", allocated.free_hours),
    )


def _cost_text(reservation: Reservation, count: int, gpu_type: GpuTypeAdvice) -> str:
    cost = reservation.costs[count]
    text = f"{amount_text(cost)} {gpu_type.currency}".rstrip()
    if gpu_type.cost_today is None:
        return text
    saved = gpu_type.cost_today - cost
    return f"{text}, {amount_text(abs(saved))} {'less' if saved >= 0 else 'more'} than it was"


def _cost_table(gpu_type: GpuTypeAdvice, known_hours: float) -> ReportTable:
    """Return the cost of some numbers of reserved GPUs; without prices only how much of the time each is in use."""
    allocated, paid = gpu_type.allocated, round(gpu_type.paid)
    highest = len(allocated.in_use)
    step = max(1, math.ceil(highest / _TABLE_STEPS))
    shown = {*range(0, highest + 1, step), highest, allocated.reserve or 0, min(paid, highest)}
    priced = ("reserved", "on demand", "in all", "change") if allocated.costs else ()
    rows = tuple(_cost_row(gpu_type, count, known_hours) for count in sorted(shown))
    return ReportTable(head=("Reserve", "use of the last GPU", *priced), rows=rows)


def _cost_row(gpu_type: GpuTypeAdvice, count: int, known_hours: float) -> TableRow:
    allocated = gpu_type.allocated
    share = format_percent(allocated.in_use[count - 1]) if count else NO_VALUE
    if not allocated.costs or gpu_type.reserved_price is None:
        return str(count), share
    cost, reserved = allocated.costs[count], count * gpu_type.reserved_price * known_hours
    change = NO_VALUE if gpu_type.cost_today is None else f"{cost - gpu_type.cost_today:+,.0f}"
    return str(count), share, amount_text(reserved), amount_text(cost - reserved), amount_text(cost), change


# -- hours of the week --


def _heat_lines(hours: WeekHours) -> Iterator[str]:
    """Yield a head and a line for each day; means of two hours where numbers have more than two digits."""
    wide = max((mean for day in hours for mean in day if mean is not None), default=0.0) >= _TWO_DIGITS
    width, columns = (6, range(0, 24, 2)) if wide else (3, range(24))
    yield "   " + "".join(f"{hour:{width}}" for hour in columns)
    for name, day in zip(DAYS, hours, strict=True):
        cells = (_mean(day[hour : hour + (2 if wide else 1)]) for hour in columns)
        yield name + "".join(f"{_cell(mean):>{width}}" for mean in cells)


def _cell(mean: float | None) -> str:
    return NO_VALUE if mean is None else f"{mean:.0f}" if mean >= _COUNTED else "."


def _mean(means: Iterable[float | None]) -> float | None:
    known = [mean for mean in means if mean is not None]
    return sum(known) / len(known) if known else None


def _counted(hours: WeekHours) -> Iterator[float]:
    return (mean for day in hours for mean in day if mean is not None and mean >= _COUNTED)


def _named_hours(what: str, about: str, hours: WeekHours) -> Iterator[str]:
    """Yield in one line which hours have GPUs; nothing if none has."""
    if counts := list(_counted(hours)):
        yield f"{what}: {', '.join(_hour_ranges(hours))}; {gpu_count(sum(counts) / len(counts))} {about}, on average"


def _hour_ranges(hours: WeekHours) -> Iterator[str]:
    """Yield ranges of hours with GPUs, such as `Mon-Fri 09-18`; consecutive days with the same hours together."""
    days = [(name, tuple(_day_ranges(day))) for name, day in zip(DAYS, hours, strict=True)]
    for ranges, group in groupby(days, key=lambda day: day[1]):
        names = [name for name, _ in group]
        if ranges:
            yield f"{names[0] if len(names) == 1 else f'{names[0]}-{names[-1]}'} {' '.join(ranges)}"


def _day_ranges(day: tuple[float | None, ...]) -> Iterator[str]:
    for counted, group in groupby(range(24), key=lambda hour: (day[hour] or 0.0) >= _COUNTED):
        if counted:
            found = list(group)
            yield f"{found[0]:02d}-{found[-1] + 1:02d}"


# -- jobs --


def _job_size_table(advice: ReservationAdvice) -> ReportTable:
    total = sum(size.gpu_hours for size in advice.job_sizes)
    head = ("GPUs of a job", "GPU-hours", "share", "most GPUs", "Mon-Fri 08-20", "nights", "weekend")
    rows = tuple(_job_size_row(size, total) for size in advice.job_sizes)
    prose = (
        "the last three: GPUs on average; all types together, since a job's series do not name the type",
        (
            "sizes that hold GPUs at all hours suit a reservation of the scheduler; those that hold them by day suit a"
            " partition whose limits are wider at night and on weekends"
        ),
    )
    return ReportTable(title="Jobs by size", head=head, rows=rows, prose=prose)


def _job_size_row(size: JobSizeUse, total: float) -> TableRow:
    days = list(zip(DAYS, size.hours, strict=True))
    weekdays = [day for name, day in days if name not in _WEEKEND]
    by_day = _mean(mean for day in weekdays for hour, mean in enumerate(day) if hour in _WORKING_HOURS)
    by_night = _mean(mean for day in weekdays for hour, mean in enumerate(day) if hour not in _WORKING_HOURS)
    weekend = _mean(mean for name, day in days if name in _WEEKEND for mean in day)
    means = (NO_VALUE if mean is None else gpu_count(mean) for mean in (by_day, by_night, weekend))
    share = format_percent(size.gpu_hours / total)
    return size.gpus, f"{size.gpu_hours:,.0f}", share, gpu_count(size.peak), *means


# -- assumptions --


def _assumptions(advice: ReservationAdvice) -> Iterator[str]:
    yield "from recording rules in Prometheus: numbers of GPUs are means of five minutes, more is not seen"
    yield "the weeks to come are taken to be like these: compare the numbers of each week alone"
    yield (
        "a reserved GPU costs its price in every hour, used or not; on demand one pays while a job holds a GPU, to the"
        " second, and a GPU is there at once, at any time: where it is not, reserve more"
    )
    yield "discounts by quantity, whole nodes as the least unit, moves of data and spot prices are not considered"
    if stored := [each for each in advice.types if each.stored_price is not None]:
        prices = ", ".join(f"{each.model} {format_amount(each.stored_price)} {each.currency}" for each in stored)
        yield f"a price that was not given is the stored one of an allocated GPU-hour: {prices}"
    yield '"allocated and working" leaves out what the layer GAU has lost; time without telemetry counts as working'
    yield "only jobs that ran are counted: what a longer queue or a smaller fleet kept from running is not"
    if advice.queued is None:
        yield "not known: the queue; gpu-efficiency cluster would export it"
    else:
        yield f"pending jobs requested {gpu_count(advice.queued)} GPUs on average: they are not in the numbers above"
    yield from advice.notes
