"""Chooses and draws the charts of a job report, of a comparison and of a summary; the waterfall comes first."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby, pairwise
from math import isfinite
from statistics import median

from msgspec import Struct

from exporter.formatting import format_amount, format_percent, format_time, readable_name
from exporter.report.model import (
    LOSS_LAYERS,
    JobReport,
    LayerRatios,
    LeakDifference,
    NodeShare,
    RankSummary,
    ReportComparison,
    WaterfallPart,
)
from exporter.report.summary import RentComparison, SummaryRow, TrendPoint, UsageSummary
from exporter.report.svg import (
    MULTIPLICATION_SIGN,
    NARROW_UNITS,
    SMALL_SIZE,
    BarRow,
    BarSegment,
    bar_chart,
    course_chart,
    first_fitting,
    legend,
    pair_charts,
    quality_chart,
    small_text,
    svg_figure,
    svg_line,
    svg_rect,
    svg_text,
    text_width,
    wrap_lines,
)
from exporter.report.text import money_suffix

KIND_ORDER = ("unobserved", "gau", "ectr", "emfu", "unresolved", "useful")
SMALL_SHARE = 0.005
"""In a chart with many losses, two or more below this share of a layer are merged."""
_MIN_MERGED = 2


class WaterfallTotal(Struct, frozen=True, kw_only=True):
    """The total that the waterfall divides: the time of one job or of many."""

    gpu_hours: float
    money: float | None
    currency: str
    parts: tuple[WaterfallPart, ...]


class WaterfallStep(Struct, frozen=True, kw_only=True):
    """One step of the waterfall, from `before` down to `after`, both shares of the total."""

    name: str
    kind: str
    before: float
    after: float
    share: str
    hours: float
    money: float | None


def waterfall_total(report: JobReport | UsageSummary) -> WaterfallTotal:
    """Return the total of one job or of many."""
    totals = report if isinstance(report, JobReport) else report.whole
    return WaterfallTotal(gpu_hours=totals.gpu_hours, money=totals.money, currency=report.currency, parts=report.parts)


def part_kind(part: WaterfallPart) -> str:
    """Return the class of its fill. A leak that only a newer daemon knows is drawn as one of the first layer."""
    return part.layer if part.layer in KIND_ORDER else part.name if part.name in KIND_ORDER else "gau"


def lost_parts(waterfall: WaterfallTotal) -> list[WaterfallPart]:
    """Return the leaks alone."""
    return [part for part in waterfall.parts if part_kind(part) in LOSS_LAYERS]


def waterfall_steps(waterfall: WaterfallTotal, *, min_share: float = 0.0) -> list[WaterfallStep]:
    """Return the steps, paid first and useful last; losses below `min_share` are merged by layer."""
    total = sum(part.gpu_hours for part in waterfall.parts)
    level = 1.0
    paid = WaterfallStep(
        name="paid", kind="paid", before=1, after=0, share=format_percent(1.0), hours=waterfall.gpu_hours,
        money=waterfall.money,
    )  # fmt: skip
    steps = [paid]
    for part in _merge_small(waterfall, min_share):
        after = max(level - part.gpu_hours / total, 0.0)
        steps.append(_waterfall_step(part, level, after))
        level = after
    return steps if steps[-1].kind == "useful" else [*steps, _no_useful_step(waterfall)]


def _waterfall_step(part: WaterfallPart, before: float, after: float) -> WaterfallStep:
    return WaterfallStep(
        name=readable_name(part.name), kind=part_kind(part), before=before, after=after,
        share=format_percent(part.share), hours=part.gpu_hours, money=part.money,
    )  # fmt: skip


def _no_useful_step(waterfall: WaterfallTotal) -> WaterfallStep:
    """Return a step of 0: nothing was useful."""
    money = None if waterfall.money is None else 0.0
    return WaterfallStep(
        name="useful", kind="useful", before=0, after=0, share=format_percent(0.0), hours=0.0, money=money
    )


def _merge_small(waterfall: WaterfallTotal, min_share: float) -> Iterator[WaterfallPart]:
    """Yield parts by layer, the largest first."""
    for kind, of_kind in groupby(sorted(waterfall.parts, key=_sort_key), key=part_kind):
        kind_parts = list(of_kind)
        small = [part for part in kind_parts if kind in LOSS_LAYERS and part.share < min_share]
        yield from (part for part in kind_parts if part not in small)
        yield from small if len(small) < _MIN_MERGED else (_merged_part(small),)


def _sort_key(part: WaterfallPart) -> tuple[int, float]:
    return KIND_ORDER.index(part_kind(part)), -part.gpu_hours


def _merged_part(small: Sequence[WaterfallPart]) -> WaterfallPart:
    money = None if small[0].money is None else sum(part.money or 0 for part in small)
    hours, share = sum(part.gpu_hours for part in small), sum(part.share for part in small)
    return WaterfallPart(
        name=f"{len(small)} smaller leaks", layer=part_kind(small[0]), gpu_hours=hours, share=share, money=money
    )


_LAYER_NAMES = {
    "gau": ("lost to allocation (GAU)", "allocation", "GAU"),
    "ectr": ("lost computing time (ECTR)", "computing time", "ECTR"),
    "emfu": ("lost model FLOPs (eMFU)", "model FLOPs", "eMFU"),
}
_MIN_COLUMN_WIDTH, _MAX_COLUMN_WIDTH = 93.0, 150.0
"""Width of a column; the longest word of a leak's name fits in the minimum."""
_WATERFALL_TOP, _WATERFALL_HEIGHT = 46.0, 220.0
_MIN_STEP_LENGTH = 1.5
"""Minimum length of a bar, so that it is visible."""
_STEP_ROW_HEIGHT, _NARROW_ROW_HEIGHT = 23.0, 58.0
"""Height of a row on a wide and on a narrow page."""
_MAX_LOSSES = 12
"""If there are more losses, small ones are merged."""


def waterfall_chart(total: WaterfallTotal) -> str:
    """Return an empty string if no time was held."""
    if not sum(part.gpu_hours for part in total.parts) > 0:
        return ""
    description = "; ".join(
        f"{step.name} {format_amount(step.hours)} GPU-hours ({step.share}){money_suffix(step.money, total.currency)}"
        for step in waterfall_steps(total)
    )
    return svg_figure("waterfall", "From paid to useful", description, partial(_draw_waterfall, total), half=False)


def _draw_waterfall(total: WaterfallTotal, units: float) -> tuple[float, list[str]]:
    steps = waterfall_steps(total, min_share=SMALL_SHARE if len(lost_parts(total)) > _MAX_LOSSES else 0.0)
    if units <= NARROW_UNITS:
        rows = (_narrow_row(step, total, n * _NARROW_ROW_HEIGHT, units) for n, step in enumerate(steps))
        return _NARROW_ROW_HEIGHT * len(steps), [*chain.from_iterable(rows)]
    draw = _step_columns if len(steps) * _MIN_COLUMN_WIDTH <= units else _step_rows
    return draw(steps, total, units)


def _layer_label(step: WaterfallStep) -> str:
    """Return the layer's name, so that colour is not the only distinction."""
    return _LAYER_NAMES[step.kind][-1] if step.kind in LOSS_LAYERS else ""


# -- columns --


def _step_columns(steps: Sequence[WaterfallStep], total: WaterfallTotal, units: float) -> tuple[float, list[str]]:
    slot = min(units / len(steps), _MAX_COLUMN_WIDTH)
    left = (units - slot * len(steps)) / 2
    names = [wrap_lines(step.name, slot - 3, size=SMALL_SIZE) for step in steps]
    base = _WATERFALL_TOP + _WATERFALL_HEIGHT
    figures = base + 22 + 15 * max(map(len, names))
    shapes = [
        svg_line((0, base), (units, base), "axis"),
        *_layer_brackets(steps, left, slot),
        *_connectors(steps, left, slot),
    ]
    for n, step in enumerate(steps):
        middle = left + (n + 0.5) * slot
        shapes += _step_column(step, middle, slot)
        for row, text in enumerate(names[n]):
            shapes.append(small_text(middle, base + 18 + 15 * row, text, anchor="middle", kind=""))
        shapes += _step_figures(step, total, (middle, figures), room=slot - 4)
    return figures + (8 if total.money is None else 24), shapes


def _step_column(step: WaterfallStep, middle: float, slot: float) -> list[str]:
    width, height = slot * 0.64, max(_WATERFALL_HEIGHT * (step.before - step.after), _MIN_STEP_LENGTH)
    y = min(_WATERFALL_TOP + _WATERFALL_HEIGHT * (1 - step.before), _WATERFALL_TOP + _WATERFALL_HEIGHT - height)
    bar = svg_rect(middle - width / 2, y, width, height, f"fill {step.kind}")
    return [bar, svg_text(middle, y - 6, step.share, anchor="middle", kind="bold")]


def _connectors(steps: Sequence[WaterfallStep], left: float, slot: float) -> Iterator[str]:
    """Yield lines from the end of each step to the start of the next."""
    for n, (_, following) in enumerate(pairwise(steps)):
        y = _WATERFALL_TOP + _WATERFALL_HEIGHT * (1 - following.before)
        yield svg_line((left + (n + 0.82) * slot, y), (left + (n + 1.18) * slot, y), "joint")


def _step_figures(step: WaterfallStep, total: WaterfallTotal, at: tuple[float, float], *, room: float) -> Iterator[str]:
    x, y = at
    hours = f"{step.hours:,.2f} GPU-h", f"{format_amount(step.hours)} GPU-h", f"{format_amount(step.hours)} h"
    yield small_text(x, y, first_fitting(room, *hours, size=SMALL_SIZE), anchor="middle")
    if step.money is not None:
        currency = total.currency
        money = f"{step.money:,.2f} {currency}", f"{format_amount(step.money)} {currency}", format_amount(step.money)
        yield small_text(x, y + 16, first_fitting(room, *money, size=SMALL_SIZE), anchor="middle")


def _layer_brackets(steps: Sequence[WaterfallStep], left: float, slot: float) -> Iterator[str]:
    """Yield a bracket with the layer's name above the losses of each layer."""
    n = 0
    for kind, of_kind in groupby(steps, key=lambda step: step.kind):
        count = len(list(of_kind))
        if kind in LOSS_LAYERS:
            start, room = left + n * slot + 4, count * slot - 8
            yield svg_rect(start, 18, room, 3, f"fill {kind}")
            name = first_fitting(room, *_LAYER_NAMES[kind], size=SMALL_SIZE)
            yield small_text(start + room / 2, 12, name, anchor="middle", kind="")
        n += count


# -- rows --


def _step_rows(steps: Sequence[WaterfallStep], total: WaterfallTotal, units: float) -> tuple[float, list[str]]:
    """Draw one row per step: name, bar, and figures in columns."""
    figures = [(step.share, f"{step.hours:,.2f} GPU-h", money_suffix(step.money, total.currency)[2:]) for step in steps]
    columns = [max(text_width(row[n], bold=not n) for row in figures) + 14 for n in range(3)]
    layer = max(text_width(_layer_label(step), SMALL_SIZE) for step in steps) + 12
    left = min(max(text_width(step.name) for step in steps), units * 0.3) + 12 + layer
    room = max(units - left - sum(columns) + (0 if columns[2] > 14 else 14), 60)  # noqa: PLR2004  the gap alone
    shapes: list[str] = []
    for n, step in enumerate(steps):
        y = n * _STEP_ROW_HEIGHT
        shapes.append(small_text(0, y + 15, _layer_label(step)))
        shapes.append(svg_text(layer, y + 15, first_fitting(left - layer - 12, step.name)))
        shapes += _falling_bar(step, left, y + 4, room, height=14)
        if step.before < 1:
            x = left + step.before * room
            shapes.append(svg_line((x, y + 18 - _STEP_ROW_HEIGHT), (x, y + 4), "joint"))
        end = left + room
        for text, width, kind in zip(figures[n], columns, ("bold", "mute", "mute"), strict=True):
            end += width
            shapes += [svg_text(end, y + 15, text, anchor="end", kind=kind)] if text else []
    return _STEP_ROW_HEIGHT * len(steps), shapes


def _falling_bar(step: WaterfallStep, x: float, y: float, room: float, *, height: float) -> Iterator[str]:
    """Yield the bar of the step within the total."""
    yield svg_rect(x, y, room, height, "track")
    length = max((step.before - step.after) * room, _MIN_STEP_LENGTH)
    yield svg_rect(x + min(step.after * room, room - length), y, length, height, f"fill {step.kind}")


def _narrow_row(step: WaterfallStep, total: WaterfallTotal, y: float, units: float) -> Iterator[str]:
    money = money_suffix(step.money, total.currency)
    figures = f"{step.hours:,.2f} GPU-hours{money}", f"{format_amount(step.hours)} GPU-hours{money}"
    yield svg_text(0, y + 13, first_fitting(units - text_width(step.share, bold=True) - 12, step.name))
    yield svg_text(units, y + 13, step.share, anchor="end", kind="bold")
    yield small_text(0, y + 28, first_fitting(units - 44, *figures, size=SMALL_SIZE))
    if layer := _layer_label(step):
        yield small_text(units, y + 28, layer, anchor="end")
    yield from _falling_bar(step, 0, y + 34, units, height=12)


MAX_BARS, _HISTOGRAM_BINS = 10, 60
"""Maximum number of nodes or ranks with their own bar, and number of bins of the histogram of all."""
_LAYER_LABELS = (
    ("gau", "GAU: held and working"),
    ("ectr", f"{MULTIPLICATION_SIGN} ECTR: computing"),
    ("emfu", f"{MULTIPLICATION_SIGN} eMFU: useful"),
)


def job_charts(report: JobReport) -> list[str]:
    """Return the charts of a job in the order of its report."""
    seconds, qualities = report.when.seconds, report.truth.qualities if report.truth else ()
    half = [
        partial(layers_chart, report.layers), partial(course_chart, report), partial(nodes_chart, report.nodes),
        partial(ranks_chart, report.ranks),
        *(partial(quality_chart, metric, seconds, n) for n, metric in enumerate(qualities)),
    ]  # fmt: skip
    return [waterfall_chart(waterfall_total(report)), *pair_charts(half)]


def layers_chart(ratios: LayerRatios, *, half: bool) -> str:
    """Draw the layers: each bar is a share of the one above it, so that the last is the product."""
    if ratios.gau is None or ratios.product is None:
        return ""
    rows, left = [BarRow(name="paid time that was seen", value=format_percent(1.0), segments=((0, 1, "paid"),))], 1.0
    for name, label in _LAYER_LABELS:
        share = getattr(ratios, name)
        after = left * min(share or 0.0, 1.0)
        lost = (after, left, name)
        rows.append(BarRow(name=label, value=format_percent(share), segments=((0, after, "kept"), lost)))
        left = after
    rows.append(_product_bar(ratios, ratios.product))
    description = ", ".join(f"{row.name} {row.value}" for row in rows)
    return bar_chart("layers", "Three layers, multiplied", description, rows, half=half)


def _product_bar(ratios: LayerRatios, product: float) -> BarRow:
    floor = product if ratios.floor is None else min(ratios.floor, product)
    segments: tuple[BarSegment, ...] = ((0, floor, "useful"), (floor, product, "unresolved"))
    value, least = format_percent(product), format_percent(floor)
    note = "" if least == value else f"at least {least}: the rest of it is not resolved"
    return BarRow(name="= useful", value=value, segments=segments, note=note, bold=True)


def nodes_chart(shown: Sequence[NodeShare], *, half: bool) -> str:
    """Draw the nodes, the lowest product first; empty for a single node."""
    if len(shown) == 1:
        return ""
    products = [node.product for node in shown if node.product is not None]
    rows = [_node_bar(node) for node in shown[:MAX_BARS]]
    if len(shown) > MAX_BARS and products:
        rows.append(_histogram_bar(f"all {len(shown)} nodes", products, 1.0, format_percent(median(products))))
    description = ", ".join(f"{row.name} {row.value} ({row.note})" for row in rows)
    return bar_chart("nodes", "Useful share of each node", description, rows, half=half)


def _node_bar(node: NodeShare) -> BarRow:
    most = f"most lost to {readable_name(node.worst)}, {format_percent(node.worst_share)}"
    segments = ((0.0, min(node.product or 0.0, 1.0), "useful"),)
    note = most if node.worst else "nothing lost"
    return BarRow(name=node.name, value=format_percent(node.product), segments=segments, note=note)


def _histogram_bar(name: str, values: Sequence[float], most: float, median_text: str) -> BarRow:
    """Return a row with the histogram and the median of values."""
    counts = [0] * _HISTOGRAM_BINS
    for value in values:
        counts[min(int(value / most * _HISTOGRAM_BINS), _HISTOGRAM_BINS - 1)] += 1
    histogram = tuple(count / max(counts) for count in counts)
    ticks, note = (min(median(values) / most, 1.0),), "how many have how much; the median"
    return BarRow(name=name, value=median_text, histogram=histogram, ticks=ticks, note=note, bold=True)


def ranks_chart(shown: Sequence[RankSummary], *, half: bool) -> str:
    """Draw the busy time per step of each rank, the slowest first, with the median of all as a tick."""
    shown = [rank for rank in shown if isfinite(rank.busy_seconds)]
    if len(shown) < 2 or not (most := max(rank.busy_seconds for rank in shown)) > 0:  # noqa: PLR2004  a spread
        return ""
    median_seconds = median(rank.busy_seconds for rank in shown)
    rows = [
        BarRow(
            name=f"rank {rank.rank} on {rank.node}", value=f"{format_amount(rank.busy_seconds)} s",
            segments=((0, rank.busy_seconds / most, "busy"),), ticks=(median_seconds / most,),
            note=f"{rank.of_median:.2f} of the median",
        )
        for rank in shown[:MAX_BARS]
    ]  # fmt: skip
    if len(shown) > MAX_BARS:
        values = [rank.busy_seconds for rank in shown]
        rows.append(_histogram_bar(f"all {len(shown)} ranks", values, most, f"{format_amount(median_seconds)} s"))
    description = ", ".join(f"{row.name} {row.value}" for row in rows)
    return bar_chart("ranks", "Busy time a step of the slowest ranks", description, rows, half=half)


MAX_DIFFERENCES = 12
_KIND_LABELS = {
    "useful": "useful", "unresolved": "not resolved", "emfu": "lost model FLOPs (eMFU)",
    "ectr": "lost computing time (ECTR)", "gau": "lost to allocation (GAU)", "unobserved": "not seen",
}  # fmt: skip


def comparison_charts(comparison: ReportComparison) -> list[str]:
    """Return a chart of both jobs, then one of their differences."""
    return [_both_jobs_chart((comparison.first, comparison.second)), _differences_chart(comparison.differences)]


def _both_jobs_chart(reports: Sequence[JobReport]) -> str:
    rows = [_job_bar(report) for report in reports]
    used = {kind for row in rows for _, _, kind in row.segments}
    keys = [(kind, label) for kind, label in _KIND_LABELS.items() if kind in used]
    description = "; ".join(f"{row.name}: {_segments_text(row.segments)}" for row in rows)
    return bar_chart("both", "Where the time of each went", description, rows, keys=keys, half=False)


def _job_bar(report: JobReport) -> BarRow:
    segments, value = tuple(kind_segments(report)), format_percent(report.layers.product)
    return BarRow(name=f"job {report.who.shown_id}", value=value, segments=segments, bold=True)


def kind_segments(report: JobReport) -> Iterator[BarSegment]:
    """Yield the job's time as consecutive segments by kind, useful first."""
    whole = sum(part.gpu_hours for part in report.parts)
    start = 0.0
    for kind in reversed(KIND_ORDER):
        hours = sum(part.gpu_hours for part in report.parts if part_kind(part) == kind)
        if hours > 0:
            yield start, min(start + hours / whole, 1.0), kind
            start += hours / whole


def _segments_text(segments: Sequence[BarSegment]) -> str:
    return ", ".join(f"{_KIND_LABELS[kind]} {format_percent(end - start)}" for start, end, kind in segments)


def _differences_chart(differences: Sequence[LeakDifference]) -> str:
    most = max((abs(difference.change) for difference in differences), default=0.0)
    if not most > 0:
        return ""
    rows = [_difference_bar(difference, most) for difference in differences[:MAX_DIFFERENCES] if difference.change]
    description = ", ".join(f"{row.name} {row.value} points ({row.note})" for row in rows)
    title = "Share of time in the second job against the first, in points"
    return bar_chart("differences", title, description, rows, half=False)


def _difference_bar(difference: LeakDifference, most: float) -> BarRow:
    """Return a bar from the middle: to the right if the second job has more of it."""
    reach = 0.5 + 0.5 * difference.change / most
    kind = difference.layer if difference.layer in KIND_ORDER else "gau"
    return BarRow(
        name=readable_name(difference.name), value=f"{100 * difference.change:+.1f}",
        segments=((min(0.5, reach), max(0.5, reach), kind),),
        note=f"{format_percent(difference.first)} to {format_percent(difference.second)}", ticks=(0.5,),
    )  # fmt: skip


MAX_RANKED = 15
"""Maximum number of rows drawn of a ranking; tables have more."""
MAX_PERIODS = 60
"""Maximum number of periods drawn, the latest."""
_LOST_KEYS = (("lost", "lost"), ("kept", "useful, not resolved or not seen"))
_TREND_TOP, _TREND_HEIGHT = 30.0, 170.0


def summary_charts(summary: UsageSummary) -> list[str]:
    """Return the charts of a summary in the order of its tables."""
    half = [partial(layers_chart, summary.whole.layers), partial(_rent_chart, summary.rents, summary.currency)]
    whole = waterfall_chart(waterfall_total(summary)), _ranking_chart(summary), _trend_chart(summary)
    return [*whole, *pair_charts(half)]


def _ranking_chart(summary: UsageSummary) -> str:
    most = max((row.gpu_hours for row in summary.rows), default=0.0)
    if len(summary.rows) < 2 or not most > 0:  # noqa: PLR2004  a rank
        return ""
    rows = [_ranking_bar(row, most, summary.currency) for row in summary.rows[:MAX_RANKED]]
    description = ", ".join(f"{row.name} {row.value} ({row.note})" for row in rows)
    return bar_chart("ranking", f"Who lost most, by {summary.by}", description, rows, keys=_LOST_KEYS, half=False)


def _ranking_bar(row: SummaryRow, most: float, currency: str) -> BarRow:
    lost, held = row.lost_gpu_hours / most, row.gpu_hours / most
    value = f"{row.lost_gpu_hours:,.2f} GPU-h" if row.lost_money is None else f"{row.lost_money:,.2f} {currency}"
    worst = f", most to {readable_name(row.worst)}" if row.worst else ""
    note = f"{format_percent(row.layers.product)} useful{worst}"
    return BarRow(name=row.name, value=value, segments=((0, lost, "lost"), (lost, held, "kept")), note=note)


def _trend_chart(summary: UsageSummary) -> str:
    """Draw a column per period: GPU-hours held and lost, and the useful share."""
    shown = summary.trend[-MAX_PERIODS:]
    if len(shown) < 2 or not any(point.gpu_hours > 0 for point in shown):  # noqa: PLR2004  a trend
        return ""
    description = ", ".join(
        f"{format_time(point.start)} {format_amount(point.gpu_hours)} GPU-hours, {format_percent(point.product)} useful"
        for point in shown
    )
    title = "GPU-hours held and lost, and the useful share"
    return svg_figure("trend", title, description, partial(_trend_columns, shown), half=False)


def _trend_columns(shown: Sequence[TrendPoint], units: float) -> tuple[float, list[str]]:
    most = max(point.gpu_hours for point in shown)
    left = text_width(format_amount(most), SMALL_SIZE) + 8
    slot, base = (units - left) / len(shown), _TREND_TOP + _TREND_HEIGHT
    shapes = [
        svg_line((left, base), (units, base), "axis"),
        svg_line((left, _TREND_TOP), (units, _TREND_TOP), "rule"),
        small_text(left - 6, _TREND_TOP + 4, format_amount(most), anchor="end"),
        small_text(left - 6, base, "0", anchor="end"),
    ]
    for n, point in enumerate(shown):
        shapes += _trend_column(point, left + n * slot, slot, most)
    for at, anchor, point in ((left, "start", shown[0]), (units, "end", shown[-1])):
        shapes.append(small_text(at, base + 17, format_time(point.start).partition(" ")[0], anchor=anchor))
    legend_shapes, height = legend(_LOST_KEYS, base + 26, units)
    return base + 26 + height, shapes + legend_shapes


def _trend_column(point: TrendPoint, x: float, slot: float, most: float) -> Iterator[str]:
    base, width = _TREND_TOP + _TREND_HEIGHT, slot * 0.72
    held, lost = (_TREND_HEIGHT * hours / most for hours in (point.gpu_hours, point.lost_gpu_hours))
    lost = min(lost, held)
    yield svg_rect(x + (slot - width) / 2, base - held, width, held - lost, "fill kept")
    yield svg_rect(x + (slot - width) / 2, base - lost, width, lost, "fill lost")
    labels = (format_percent(point.product), "" if point.product is None else f"{100 * point.product:.0f} %")
    label = next((each for each in labels if text_width(each, SMALL_SIZE, bold=True) <= slot - 3), "")
    if label:
        yield small_text(x + slot / 2, base - held - 6, label, anchor="middle", kind="bold")


def _rent_chart(rents: Sequence[RentComparison], currency: str, *, half: bool) -> str:
    """Draw the price of a useful GPU-hour, owned and rented."""
    own = rents[0].own_per_useful_hour if rents else None
    prices = [*([] if own is None else [("own", own, "")]), *(_rent_price(rent) for rent in rents)]
    most = max((price for _, price, _ in prices), default=0.0)
    if not most > 0:
        return ""
    rows = [
        BarRow(name=name, value=f"{price:,.2f} {currency}", segments=((0, price / most, "busy"),), note=note)
        for name, price, note in prices
    ]
    description = ", ".join(f"{row.name} {row.value}" for row in rows)
    return bar_chart("rents", "What a useful GPU-hour costs", description, rows, half=half)


def _rent_price(rent: RentComparison) -> tuple[str, float, str]:
    name = first_fitting(300, f"rented: {rent.name}", "rented")
    note = f"own is cheaper from {format_percent(rent.break_even)} useful on"
    return name, rent.per_useful_hour, note
