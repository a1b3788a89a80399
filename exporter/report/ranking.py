"""Renders a summary of many jobs as tables, and as one line per row for scripts."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from exporter.formatting import NO_VALUE, format_amount, format_duration, format_percent, format_time, shorten
from exporter.report.model import WaterfallPart
from exporter.report.summary import EmfuGain, FleetUsage, RentComparison, SummaryRow, TrendPoint, UsageSummary
from exporter.report.text import (
    ADVICE_TITLE,
    CARBON_UNIT,
    MAX_LEAKS,
    ReportTable,
    TableRow,
    advice_details,
    energy_suffix,
    energy_table,
    layer_product,
    more_note,
    plural,
    simulated_suffix,
)

_MIN_GPUS = 0.05
"""Smaller numbers of GPUs are not mentioned."""
_LARGE_SUM = 100_000


def worth_tables(summary: UsageSummary) -> Iterator[ReportTable]:
    """Yield the gain of a higher eMFU, and the comparison with rented GPUs."""
    if summary.raised:
        prose = tuple(_emfu_gain_text(gain, summary) for gain in summary.raised)
        yield ReportTable(title="What a higher eMFU would give back", prose=prose)
    if summary.rents:
        head = ("Own or rent", "a GPU-hour", "useful", "a useful GPU-hour", "own pays from")
        yield ReportTable(head=head, rows=tuple(_rent_rows(summary)), prose=tuple(_rent_lines(summary)))


def gpu_count(count: float) -> str:
    """Format a number of GPUs with one decimal: scrapes are not more exact."""
    return format_amount(round(count, 1))


def amount_text(value: float) -> str:
    """Format an amount with two decimals; large ones without."""
    return f"{value:,.0f}" if abs(value) >= _LARGE_SUM else f"{value:,.2f}"


def _fleet_rows(fleet: FleetUsage, summary: UsageSummary) -> Iterator[TableRow]:
    if fleet.gpus is not None:
        yield "paid for, on average", gpu_count(fleet.gpus)
    of = f" (means of {format_duration(fleet.grain_seconds)})" if fleet.grain_seconds else ""
    if fleet.held_peak is not None:
        yield "allocated, at the peak", f"{gpu_count(fleet.held_peak)}{of}"
    yield "allocated, on average", gpu_count(fleet.held)
    idle = fleet.idle
    if idle is not None and idle >= _MIN_GPUS:
        yield "kept for the peak, and idle", f"{gpu_count(idle)} GPUs on average{_worth_text(idle, summary)}"
    if fleet.gpus is not None and (free := fleet.gpus - fleet.held) >= _MIN_GPUS:
        yield "held by nobody", f"{gpu_count(free)} GPUs on average{_worth_text(free, summary)}"


def _worth_text(gpus: float, summary: UsageSummary) -> str:
    price = summary.per_gpu_hour
    return "" if price is None else f", {amount_text(gpus * summary.hours * price)} {summary.currency}"


def _emfu_gain_text(gain: EmfuGain, summary: UsageSummary) -> str:
    money = "" if gain.money is None else f", {amount_text(gain.money)} {summary.currency} in this time"
    step = f"eMFU {format_percent(summary.whole.layers.emfu)} -> {format_percent(gain.emfu)}"
    more = f"the work of {gpu_count(gain.gpus)} more GPUs{money}"
    return f"{step}: {more}; or the same work in {format_percent(gain.time_saved)} less time"


def _rent_rows(summary: UsageSummary) -> Iterator[TableRow]:
    own, product = summary.per_gpu_hour, summary.whole.layers.product
    useful = summary.rents[0].own_per_useful_hour
    yield "own", _price_text(own, summary), format_percent(product), _price_text(useful, summary), ""
    for rent in summary.rents:
        yield (
            f"rent {rent.name}", _price_text(rent.per_gpu_hour, summary), format_percent(rent.utilisation),
            _price_text(rent.per_useful_hour, summary), format_percent(rent.break_even),
        )  # fmt: skip


def _price_text(value: float | None, summary: UsageSummary) -> str:
    return NO_VALUE if value is None else f"{value:,.2f} {summary.currency}"


def _rent_lines(summary: UsageSummary) -> Iterator[str]:
    for rent in summary.rents:
        yield f"{rent.name}: {_rent_verdict(rent, summary)}"


def _rent_verdict(rent: RentComparison, summary: UsageSummary) -> str:
    own, money = rent.own_per_useful_hour, summary.whole.money
    if own is None or rent.instead is None or money is None:
        return "nothing of what is owned was useful, so any rent is cheaper an hour of use"
    break_even_text = (
        f"own GPUs pay from {format_percent(rent.break_even)} useful on;"
        f" here it is {format_percent(summary.whole.layers.product)}"
        if rent.break_even <= 1
        else "no own GPU at this price can be as cheap"
    )
    saved = money - rent.instead
    direction = "less" if saved >= 0 else "more"
    rented_text = f"{amount_text(rent.instead)} {summary.currency}, {amount_text(abs(saved))} {direction}"
    return f"the same useful hours would have cost {rented_text}; {break_even_text}"


MAX_ROWS, MAX_PARTS, MAX_PERIODS = 20, 10, 14
"""Maximum number of rows; --json has all."""
_SPARKS = "▁▂▃▄▅▆▇█"
_UNKNOWN_SPARK = "·"
_DATE_FORMAT = "%Y-%m-%d"


def summary_tables(summary: UsageSummary) -> Iterator[ReportTable]:
    """Yield all tables of a summary in order."""
    yield ReportTable(title=_summary_title(summary), prose=tuple(_summary_facts(summary)))
    if summary.fleet is not None:
        yield ReportTable(title="GPUs", rows=tuple(_fleet_rows(summary.fleet, summary)))
    yield _ranking_table(summary)
    yield _energy_table(summary)
    yield _waterfall_table(summary)
    yield energy_table(summary.parts, summary.energy_currency)
    yield ReportTable(title=ADVICE_TITLE, prose=tuple(_advice_lines(summary)))
    yield _trend_table(summary)
    yield from worth_tables(summary)
    yield ReportTable(title="How it is known", prose=(f"from {summary.source}", *summary.unseen))


def summary_lines(summary: UsageSummary) -> str:
    """Render one line per row and one for all: name, jobs, GPU-hours, product, loss, largest leak, trend."""
    rows = [_line_cells(summary_row, summary) for summary_row in (*summary.rows, summary.whole)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "".join(f"{'  '.join(_aligned_cells(row, widths)).rstrip()}\n" for row in rows)


_LEFT_COLUMNS = frozenset({0, 5, 6})


def _aligned_cells(row: TableRow, widths: Sequence[int]) -> Iterator[str]:
    for n, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if n in _LEFT_COLUMNS else cell.rjust(width)


def _line_cells(row: SummaryRow, summary: UsageSummary) -> TableRow:
    return (
        shorten(row.name, 24),
        plural(row.jobs, "job"),
        f"{row.gpu_hours:,.2f} GPU-h",
        format_percent(row.layers.product),
        f"lost {_lost_text(row, summary)}",
        row.worst or NO_VALUE,
        sparkline(row.track) if row.track else sparkline(tuple(point.product for point in summary.trend)),
    )


def sparkline(values: Sequence[float | None], *, most: float = 1.0) -> str:
    """Return a block character for each value, in eighths of `most`."""
    return "".join(
        _UNKNOWN_SPARK if value is None else _SPARKS[min(7, int(8 * value / most)) if most > 0 else 0]
        for value in values
    )


# -- heading --


def _summary_title(summary: UsageSummary) -> str:
    return f"{summary.about[:1].upper()}{summary.about[1:]}{simulated_suffix(summary)}"


def _summary_facts(summary: UsageSummary) -> Iterator[str]:
    whole = summary.whole
    length = format_duration(summary.end - summary.start)
    yield f"{format_time(summary.start)} to {format_time(summary.end)} ({length}), {plural(whole.jobs, 'job')}"
    models = f" ({', '.join(summary.models)})" if summary.models else ""
    yield f"{gpu_count(summary.gpus)} GPUs on average{models}"
    money = "" if whole.money is None else f", {amount_text(whole.money)} {summary.currency}"
    energy = f", {_energy_text(whole, summary)}" if whole.energy_kwh is not None else ""
    yield f"{amount_text(whole.gpu_hours)} GPU-hours{money}{energy}, {format_percent(whole.coverage)} observed"
    ratios = whole.layers
    yield f"{layer_product(ratios)} = {format_percent(ratios.product)}"
    if format_percent(ratios.floor) != format_percent(ratios.product):
        yield f"(at least {format_percent(ratios.floor)}: what some kernels were worth cannot be known)"
    if summary.work is not None:
        work = gpu_count(summary.work)
        yield f"{gpu_count(summary.gpus)} GPUs did the work of {work} that never wait and are never slow"
    yield f"lost: {_money_and_hours(whole.lost_gpu_hours, whole.lost_money, summary)}; {_yearly_loss(summary)}"


def _energy_text(row: SummaryRow, summary: UsageSummary) -> str:
    price = "" if row.energy_money is None else f" for {amount_text(row.energy_money)} {summary.energy_currency}"
    carbon = "" if row.co2_kg is None else f" with {format_amount(row.co2_kg)} kg of CO2"
    return f"{format_amount(row.energy_kwh)} kWh{price}{carbon}"


def _yearly_loss(summary: UsageSummary) -> str:
    money, factor = summary.whole.lost_money, summary.times_per_year
    yearly = _money_and_hours(summary.whole.lost_gpu_hours * factor, None if money is None else money * factor, summary)
    return f"at this rate {yearly} a year"


def _money_and_hours(hours: float, money: float | None, summary: UsageSummary) -> str:
    return (
        f"{amount_text(hours)} GPU-hours"
        if money is None
        else f"{amount_text(money)} {summary.currency} ({amount_text(hours)} GPU-hours)"
    )


def _lost_text(row: SummaryRow, summary: UsageSummary) -> str:
    return f"{row.lost_gpu_hours:,.2f} GPU-h" if row.lost_money is None else f"{row.lost_money:,.2f} {summary.currency}"


# -- rows and leaks --


def _ranking_table(summary: UsageSummary) -> ReportTable:
    unit, description = summary.currency or "GPU-h", "what" if summary.by == "job" else "jobs"
    columns = description, "GPU-hours", "product", f"lost {unit}", "most to", f"by {summary.every}"
    rows = tuple(_ranking_row(row, summary) for row in summary.rows[:MAX_ROWS])
    prose = more_note(len(summary.rows) - len(rows))
    return ReportTable(title="Who lost most", head=(f"By {summary.by}", *columns), rows=rows, prose=prose)


def _energy_table(summary: UsageSummary) -> ReportTable:
    """Return who used most energy; empty if neither its price nor its carbon is known."""
    priced, known = summary.whole.energy_money is not None, summary.whole.co2_kg is not None
    if not priced and not known:
        return ReportTable()
    used = [row for row in summary.rows if row.energy_kwh is not None]
    used.sort(key=lambda row: (-(row.energy_money or 0.0), -(row.energy_kwh or 0.0), row.name))
    rows = tuple(
        (
            row.name, f"{row.energy_kwh:,.2f}", *((f"{row.energy_money or 0:,.2f}",) if priced else ()),
            *((f"{row.co2_kg or 0:,.2f}",) if known else ()),
        )
        for row in used[:MAX_ROWS]
    )  # fmt: skip
    head = (
        f"Energy by {summary.by}", "kWh", *((summary.energy_currency,) if priced else ()),
        *((CARBON_UNIT,) if known else ()),
    )  # fmt: skip
    return ReportTable(head=head, rows=rows, prose=more_note(len(used) - len(rows)))


def _ranking_row(row: SummaryRow, summary: UsageSummary) -> TableRow:
    lost = row.lost_gpu_hours if row.lost_money is None else row.lost_money
    description = row.about if summary.by == "job" else format_amount(row.jobs)
    return (
        row.name, description, f"{row.gpu_hours:,.2f}", format_percent(row.layers.product), f"{lost:,.2f}",
        row.worst or NO_VALUE, sparkline(row.track[-_TREND_CHARACTERS:]),
    )  # fmt: skip


_TREND_CHARACTERS = 14
"""Number of periods, the latest, in a row's sparkline."""


def _waterfall_table(summary: UsageSummary) -> ReportTable:
    priced = summary.whole.money is not None
    head = ("Where the time went", "layer", "GPU-hours", "share", *((summary.currency,) if priced else ()))
    losses = summary.losses
    shown = [*losses[:MAX_PARTS], *(part for part in summary.parts if part not in losses)]
    rows = [
        (part.name, part.layer if part in losses else "", f"{part.gpu_hours:,.2f}", format_percent(part.share),
         *((f"{part.money or 0:,.2f}",) if priced else ()))
        for part in shown
    ]  # fmt: skip
    money = (f"{summary.whole.money:,.2f}",) if priced else ()
    total = ("all", "", f"{summary.whole.gpu_hours:,.2f}", "100.0 %", *money)
    return ReportTable(head=head, rows=(*rows, total), prose=more_note(len(losses) - MAX_PARTS))


def _advice_lines(summary: UsageSummary) -> Iterator[str]:
    if not summary.losses:
        yield "Nothing was lost."
    for number, part in enumerate(summary.losses[:MAX_LEAKS], 1):
        lost = _money_and_hours(part.gpu_hours, part.money, summary)
        yield f"{number}. {part.name}: {lost}{energy_suffix(part, summary.energy_currency)}"
        if holders := _largest_holders(part, summary):
            yield f"   whose: {holders}"
        yield from advice_details(part)


def _largest_holders(part: WaterfallPart, summary: UsageSummary) -> str:
    """Return who has most of a leak; empty if it is all of one row."""
    most = sorted((row for row in summary.rows if part.name in row.leaks), key=lambda row: -row.leaks[part.name])
    if len(most) < 2:  # noqa: PLR2004  one row has all of it
        return ""
    return ", ".join(f"{row.name} {format_percent(row.leaks[part.name] / part.gpu_hours)}" for row in most[:MAX_LEAKS])


# -- trend --


def _trend_table(summary: UsageSummary) -> ReportTable:
    unit = summary.currency or "GPU-h"
    head = (f"By {summary.every}", "GPU-hours", "product", "", f"lost {unit}", "")
    shown = summary.trend[-MAX_PERIODS:]
    most = max((_lost_amount(point) for point in shown), default=0.0)
    rows = tuple(
        (
            _period_label(point, summary.every), f"{point.gpu_hours:,.2f}", format_percent(point.product),
            sparkline((point.product,)), f"{_lost_amount(point):,.2f}", sparkline((_lost_amount(point),), most=most),
        )
        for point in shown
    )  # fmt: skip
    more = len(summary.trend) - len(shown)
    before = (f"and {more} before; --json has them all",) if more > 0 else ()
    return ReportTable(title="Trend", head=head, rows=rows, prose=(*_trend_lines(summary), *before))


def _trend_lines(summary: UsageSummary) -> Iterator[str]:
    """Compare the second half of the trend with the first."""
    seen = [point for point in summary.trend if point.product is not None and point.gpu_hours > 0]
    if len(seen) < 4:  # noqa: PLR2004  two and two
        return
    halves = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    first, second = (_mean_product(half) for half in halves)
    losses = [_lost_amount(point) for point in summary.trend]
    gained = f"{100 * (second - first):+.1f} points"
    yield f"product {sparkline([point.product for point in summary.trend])}"
    yield f"lost    {sparkline(losses, most=max(losses))}"
    yield f"product: {format_percent(first)} in the first half, {format_percent(second)} in the second ({gained})"


def _mean_product(half: Iterable[TrendPoint]) -> float:
    """Return the mean product, weighted by GPU-hours."""
    pairs = [(point.product or 0.0, point.gpu_hours) for point in half]
    return sum(product * hours for product, hours in pairs) / sum(hours for _, hours in pairs)


def _lost_amount(point: TrendPoint) -> float:
    return point.lost_gpu_hours if point.lost_money is None else point.lost_money


def _period_label(point: TrendPoint, every: str) -> str:
    at = datetime.fromtimestamp(point.start, UTC)
    return at.strftime(f"{_DATE_FORMAT} %H:%M" if every == "hour" else _DATE_FORMAT)
