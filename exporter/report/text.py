"""Renders a job report or a comparison as tables in text (80 columns) and Markdown, as eight lines, and as one line.

A value that is not known has no row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from exporter.core.hangs import HUNG, hang_cost
from exporter.core.pipes import PIPE_NOTES
from exporter.formatting import NO_VALUE, format_amount, format_duration, format_percent, format_time, shorten
from exporter.report.build import waterfall_order
from exporter.report.model import (
    CollectiveSummary,
    CommunicationSummary,
    FailureCost,
    JobReport,
    LayerRatios,
    QualityMetric,
    QualityReached,
    ReportComparison,
    ServingSummary,
    TrainingSummary,
    WaterfallPart,
    WhatIf,
)

TableRow = tuple[str, ...]


class ReportTable(Struct, frozen=True, kw_only=True):
    """A table, and lines of text below it. Without a `head` its rows are pairs of name and value."""

    title: str = ""
    head: TableRow = ()
    rows: tuple[TableRow, ...] = ()
    prose: tuple[str, ...] = ()


MAX_LEAKS = 3
"""Maximum number of leaks for which advice is given."""
ADVICE_TITLE = "What to do first"
_PLUGINS = {"inspector": "NCCL Inspector", "comma": "CoMMA"}
_FAILURE_LABELS = {
    "hung": "hung", "zombie": "zombie (its idle_allocation)", "xid": "critical errors (Xid)",
    "unavailable": "unavailable", "restart": "restarts, and what recovery took", "rework": "repeated steps",
}  # fmt: skip


def _advice_lines(report: JobReport) -> Iterator[str]:
    if not report.losses:
        yield "Nothing was lost."
    for number, part in enumerate(report.losses[:MAX_LEAKS], 1):
        costs = money_suffix(part.money, report.currency) + energy_suffix(part, report.energy_currency)
        yield f"{number}. {part.name}: {part.gpu_hours:,.2f} GPU-hours{costs}{unconfirmed_suffix(report, part)}"
        yield from advice_details(part)


def advice_details(part: WaterfallPart) -> Iterator[str]:
    """Yield what to do about a leak; nothing if only a newer daemon knows it."""
    details = ("role", part.team), ("do", part.fix), ("watch", part.watch)
    return (f"   {label}: {text}" for label, text in details if text)


def unconfirmed_suffix(report: JobReport, part: WaterfallPart) -> str:
    """Format what a hang that lasts cost before, which is booked as other leaks; empty for other parts."""
    hours = None if report.hang is UNSET or part.name != HUNG else report.hang.unconfirmed_gpu_hours
    return f", and {hours:,.2f} GPU-hours before it was confirmed" if hours and hours >= _SHOWN_HOURS else ""


def hang_title(report: JobReport) -> str:
    """Return since when and for how long the job has been hanging, if that is known; empty if it does not hang."""
    hang = report.hang
    if hang is UNSET:
        return ""
    return f"Hung since {format_time(hang.since)}, for {format_duration(hang.seconds)}" if hang.seconds else "Hung now"


def hang_lines(report: JobReport) -> Iterator[str]:
    """Yield what hangs, what it has cost so far, and what to do; nothing if the job does not hang."""
    hang = report.hang
    if hang is UNSET:
        return
    for part in hang.nodes[:MAX_NODES]:
        yield f"{part.node}: {part.text}" if len(report.nodes) > 1 else part.text
    yield from more_note(len(hang.nodes) - MAX_NODES)
    if hang.gpu_hours is not None:
        yield hang_cost(hang.gpu_hours, hang.unconfirmed_gpu_hours or 0.0)
    yield f"do: {hang.do}"


def money_suffix(money: float | None, currency: str) -> str:
    """Format money as a part of a list; empty without a price."""
    return "" if money is None else f", {money:,.2f} {currency}"


def energy_suffix(part: WaterfallPart, currency: str | UnsetType) -> str:
    """Format a leak's energy with its price as a part of a list; empty without a price."""
    if part.energy_kwh is UNSET or part.energy_money is UNSET:
        return ""
    return f", {format_amount(part.energy_kwh)} kWh for {part.energy_money:,.2f} {currency}"


CARBON_UNIT = "kg of CO2"


def energy_table(parts: Sequence[WaterfallPart], currency: str | UnsetType) -> ReportTable:
    """Return the energy of each leak, the most first; empty if neither its price nor its carbon is known."""
    kwh = {part.name: part.energy_kwh for part in parts if part.energy_kwh is not UNSET and part.energy_kwh > 0}
    money = {part.name: part.energy_money for part in parts if part.energy_money is not UNSET}
    carbon = {part.name: part.co2_kg for part in parts if part.co2_kg is not UNSET}
    if not kwh or not (money or carbon):
        return ReportTable()
    total, amounts = sum(kwh.values()), [each for each in (money, carbon) if each]
    rows = [
        (name, f"{kwh[name]:,.2f}", format_percent(kwh[name] / total), *(f"{each[name]:,.2f}" for each in amounts))
        for name in waterfall_order(kwh)
    ]
    head = (
        "Where the energy went", "kWh", "share", *((f"{currency}",) if money else ()),
        *((CARBON_UNIT,) if carbon else ()),
    )  # fmt: skip
    last = ("all", f"{total:,.2f}", "100.0 %", *(f"{sum(each.values()):,.2f}" for each in amounts))
    return ReportTable(head=head, rows=(*rows, last))


def more_note(count: int) -> tuple[str, ...]:
    """Return the note below a table from which this many rows are left out."""
    return (f"and {count} more; --json has them all",) if count > 0 else ()


def layer_product(layers: LayerRatios) -> str:
    """Format the three ratios as factors."""
    return f"GAU {format_percent(layers.gau)} x ECTR {format_percent(layers.ectr)} x eMFU {format_percent(layers.emfu)}"


def _what_if_lines(report: JobReport, change: WhatIf) -> Iterator[str]:
    yield f"{_change_label(report, change)}:"
    money = money_suffix(change.money, report.currency)
    yield f"   the same work with {change.gpu_hours:,.2f} GPU-hours less ({format_percent(change.share)}){money}:"
    sooner = "" if change.sooner is None else f", or done {format_duration(change.sooner)} sooner"
    yield f"   {format_amount(round(change.fewer_gpus, 2))} GPUs fewer{sooner}"
    if change.gained_gpus is not None:
        money = "" if change.gained_money is None else f", which cost {change.gained_money:,.2f} {report.currency}"
        gained = format_amount(round(change.gained_gpus, 2))
        yield f"   or, in the same time, more work: that of {gained} GPUs at their peak{money}"


def _change_label(report: JobReport, change: WhatIf) -> str:
    match change.kind:
        case "right_size":
            return change.of if change.of.startswith("without") else f"MIG slice {change.of} instead of a whole GPU"
        case "fix_leak":
            return f"no {change.of}"
        case _:
            return f"eMFU {change.of} instead of {format_percent(report.layers.emfu)}"


def _failure_table(report: JobReport) -> ReportTable:
    priced = report.money is not None
    head = ("What failed", "times", "GPU-hours", *((report.currency,) if priced else ()))
    return ReportTable(head=head, rows=tuple(_failure_row(failure, priced=priced) for failure in report.failures))


def _failure_row(failure: FailureCost, *, priced: bool) -> TableRow:
    hours = NO_VALUE if failure.gpu_hours is None else f"{failure.gpu_hours:,.2f}"
    money = (NO_VALUE if failure.money is None else f"{failure.money:,.2f}",) if priced else ()
    return (_FAILURE_LABELS.get(failure.kind, failure.kind), format_amount(failure.times), hours, *money)


MAX_NODES, MAX_RANKS, MAX_DIFFERENCES = 10, 3, 10
"""Maximum number of rows; --json has all."""


def report_tables(report: JobReport) -> Iterator[ReportTable]:
    """Yield all tables of a job's report in order."""
    yield ReportTable(title=_report_title(report), prose=tuple(_report_facts(report)))
    yield ReportTable(title=hang_title(report), prose=tuple(hang_lines(report)))
    yield _waterfall_table(report)
    yield energy_table(report.parts, report.energy_currency)
    yield ReportTable(title="Why it waited", prose=tuple(_stall_lines(report)))
    yield ReportTable(title=ADVICE_TITLE, prose=tuple(_advice_lines(report)))
    what_if = tuple(line for change in report.what_if for line in _what_if_lines(report, change))
    yield ReportTable(title="What if (each alone: no two of these lines are to be added)", prose=what_if)
    yield _failure_table(report)
    if report.truth is not None:
        yield ReportTable(title="Reported by the job", rows=_rows_with_values(_training_rows(report.truth, report)))
        yield from _quality_tables(report.truth, report.cost_unit)
    if report.served is not None:
        rows = _rows_with_values(_serving_rows(report.served, report.cost_unit))
        yield ReportTable(title="Reported by its engines", rows=rows)
        yield from _latency_tables(report.served)
    yield from _communication_tables(report.communication)
    yield from _node_and_rank_tables(report)
    yield ReportTable(title="How it is known", prose=tuple(_evidence_lines(report)))


def comparison_tables(comparison: ReportComparison) -> Iterator[ReportTable]:
    """Yield all tables of a comparison in order."""
    reports = comparison.first, comparison.second
    head = ("", *(f"job {report.who.shown_id}" for report in reports))
    title = f"Two jobs{simulated_suffix(*reports)}"
    yield ReportTable(
        title=title, head=head, rows=tuple(_comparison_rows(comparison)), prose=tuple(_scaling_lines(comparison))
    )
    rows = tuple(
        (leak.name, format_percent(leak.first), format_percent(leak.second), f"{100 * leak.change:+.1f}")
        for leak in comparison.differences[:MAX_DIFFERENCES]
    )
    prose = more_note(len(comparison.differences) - len(rows))
    yield ReportTable(title="Share of their time", head=(*head, "points"), rows=rows, prose=prose)
    if comparison.same:
        reached = tuple(row for quality in comparison.same for row in _quality_reached_rows(quality, comparison))
        yield ReportTable(title="To the quality both reached", head=head, rows=reached)
    unseen = tuple(f"job {report.who.shown_id}: {line}" for report in reports for line in report.unseen)
    yield ReportTable(title="How it is known", prose=unseen)


# -- one job --


def _report_title(report: JobReport) -> str:
    identity = report.who
    name = f' "{identity.name}"' if identity.name else ""
    user = f" of {identity.user}" if identity.user else ""
    where = f" in {identity.cluster}" if identity.cluster else ""
    return f"Job {identity.shown_id}{name}{user}{where}{simulated_suffix(report)}"


def _report_facts(report: JobReport) -> Iterator[str]:
    identity, period = report.who, report.when
    more = ("account", "team", "partition", "namespace")
    owner_labels = [f"{label} {getattr(identity, label)}" for label in more if getattr(identity, label)]
    if identity.shown_id != identity.job_id:
        owner_labels.insert(0, f"JobIDRaw {identity.job_id}")
    if owner_labels:
        yield ", ".join(owner_labels)
    state = "still running" if period.running else "ended"
    yield f"{format_time(period.start)} to {format_time(period.end)} ({format_duration(period.seconds)}), {state}"
    models = f" ({', '.join(report.models)})" if report.models else ""
    node_count, expected = len(report.nodes), report.expected_nodes
    nodes = f"{node_count} of {expected} nodes" if node_count < expected else plural(node_count, "node")
    yield f"{nodes}, {plural(report.gpus, 'GPU')}{models}"
    money = money_suffix(report.money, report.currency)
    energy = f", {report.energy_kwh:,.1f} kWh" if report.energy_kwh is not None else ""
    yield f"{report.gpu_hours:,.2f} GPU-hours allocated{money}{energy}, {format_percent(report.coverage)} observed"
    spent = [f"{format_percent(report.energy_useful)} useful"] if report.energy_useful is not None else []
    spent += [_energy_money(report)] if report.energy_money is not UNSET else []
    spent += [f"{format_amount(report.co2_kg)} kg of CO2"] if report.co2_kg is not None else []
    if spent:
        yield f"of the energy: {', '.join(spent)}"
    yield _product_equation(report.layers)
    if report.useful_pipe is not UNSET:
        yield PIPE_NOTES[report.useful_pipe]
    if report.equivalent_gpus is not None:
        yield (
            f"useful work: that of {format_amount(round(report.equivalent_gpus, 1))}"
            f" of {plural(report.gpus, 'GPU')} at their peak"
        )


def plural(count: float, noun: str) -> str:
    """Format a count with its noun: 1 node, 2 nodes."""
    return f"{format_amount(count)} {noun}" + ("" if count == 1 else "s")


def _product_equation(layers: LayerRatios) -> str:
    product, floor = format_percent(layers.product), format_percent(layers.floor)
    return f"{layer_product(layers)} = {product}" + ("" if floor == product else f" (at least {floor})")


def _waterfall_table(report: JobReport) -> ReportTable:
    priced = report.money is not None
    between = any(_between(part, report) for part in report.parts)
    head = (
        "Where the time went", "layer", "evidence", "GPU-hours", "share", *(("between",) if between else ()),
        *((report.currency,) if priced else ()),
    )  # fmt: skip
    rows = [_waterfall_row(part, report, priced=priced, between=between) for part in report.parts]
    total = ("allocated", "", "", f"{report.gpu_hours:,.2f}", "100.0 %", *(("",) if between else ()))
    return ReportTable(head=head, rows=(*rows, (*total, *((f"{report.money:,.2f}",) if priced else ()))))


_STALL_CAUSES: Mapping[str, str] = {
    "storage": "storage (its tasks waited for I/O)",
    "cpu_quota": "its CPU quota (its tasks were throttled)",
    "memory": "memory (its tasks waited for it to be reclaimed)",
    "cpu": "CPU contention (its tasks waited for a core)",
    "network": "the network (a busy or congested RDMA port)",
}


def _stall_lines(report: JobReport) -> Iterator[str]:
    """Yield one line per cause of data_stall and unattributed_stall, and one for what nothing explains."""
    if not report.stalls:
        return
    waited = sum(part.gpu_hours for part in report.parts if part.name in ("data_stall", "unattributed_stall"))
    for cause, hours in report.stalls.items():
        yield f"{hours:,.2f} GPU-hours: {_STALL_CAUSES.get(cause, cause)}"
    rest = waited - sum(report.stalls.values())
    if rest >= _SHOWN_HOURS:
        yield f"{rest:,.2f} GPU-hours: not explained by the host"


_SHOWN_HOURS = 0.005
"""Least GPU-hours that do not round to 0.00."""


def _waterfall_row(part: WaterfallPart, report: JobReport, *, priced: bool, between: bool) -> TableRow:
    layer = part.layer if part.evidence else ""
    money = (f"{part.money or 0:,.2f}",) if priced else ()
    bounds = (_between(part, report),) if between else ()
    return (part.name, layer, part.evidence, f"{part.gpu_hours:,.2f}", format_percent(part.share), *bounds, *money)


def _between(part: WaterfallPart, report: JobReport) -> str:
    """Format the shares between which an estimate lies; empty for what rests on none."""
    low, high = part.low_gpu_hours, part.high_gpu_hours
    if low is UNSET or high is UNSET or not report.gpu_hours:
        return ""
    low, high = low / report.gpu_hours, high / report.gpu_hours
    return f"{100 * low:.1f} - {100 * high:.1f} %" if high - low >= _SHOWN_DOUBT else ""


_SHOWN_DOUBT = 0.0005
"""Least distance of two shares that do not round to the same tenth of a percent."""


def _rows_with_values(rows: Iterable[TableRow]) -> tuple[TableRow, ...]:
    return tuple(row for row in rows if row[1] and NO_VALUE not in row[1].split())


def _training_rows(training: TrainingSummary, report: JobReport) -> Iterator[tuple[str, str]]:
    yield "MFU", format_percent(training.mfu)
    yield "HFU", format_percent(training.hfu)
    yield "HFU - MFU (recomputation)", format_percent(training.gap)
    yield "goodput", format_percent(training.goodput)
    yield "time by phase", ", ".join(f"{phase} {format_percent(share)}" for phase, share in training.phases.items())
    yield "steps", format_amount(training.steps)
    yield "repeated steps", format_amount(training.rework_steps)
    yield "progress (steps not repeated)", format_percent(training.progress)
    yield "tokens", format_amount(training.tokens)
    yield "tokens a second", format_amount(training.tokens_per_second)
    yield "tokens a second and GPU", format_amount(training.tokens_per_gpu_second)
    yield "samples", format_amount(training.samples)
    yield "padding", format_percent(training.padding)
    yield "pipeline bubble", format_percent(training.bubble)
    yield from _interruption_rows(training, report)
    yield from _outcome_rows(training, report.cost_unit)


def _outcome_rows(training: TrainingSummary, unit: str) -> Iterator[tuple[str, str]]:
    yield "cost a step", f"{format_amount(training.cost_per_step)} {unit}"
    yield "cost a token", f"{format_amount(training.cost_per_token)} {unit}"
    yield "cost a sample", f"{format_amount(training.cost_per_sample)} {unit}"
    yield "loss", format_amount(training.loss)
    yield "loss events", ", ".join(f"{event} {format_amount(count)}" for event, count in training.loss_events.items())
    if training.lost_bytes_per_second is not None:
        lost = f"{format_amount(training.lost_bytes_per_second)}B/s"
        yield "tensor parallelism loses", f"{lost} of each GPU: groups are larger than what NVLink joins"
    if training.target is not None:
        yield "time to target", format_duration(training.target.seconds)
        yield "cost to target", f"{format_amount(training.target.cost)} {unit}"


def _interruption_rows(training: TrainingSummary, report: JobReport) -> Iterator[tuple[str, str]]:
    if training.checkpoints is not None:
        each, hours = training.checkpoint_seconds, training.checkpoint_gpu_hours
        duration = "" if each is None else f", {format_duration(each)} each"
        money = money_suffix(training.checkpoint_money, report.currency)
        yield "checkpoints", f"{format_amount(training.checkpoints)}{duration}, {hours:,.2f} GPU-hours{money}"
    if training.restarts is not None:
        recovery = training.recovery_seconds
        duration = "" if recovery is None else f", {format_duration(recovery)} to recover"
        yield "restarts", f"{format_amount(training.restarts)}{duration}"


def _quality_tables(training: TrainingSummary, unit: str) -> Iterator[ReportTable]:
    if training.qualities:
        head = ("Quality", "start", "last", "best", "target", f"{unit} a unit")
        yield ReportTable(head=head, rows=tuple(map(_quality_row, training.qualities)))


def _quality_row(quality: QualityMetric) -> TableRow:
    figures = (quality.start, quality.last, quality.best, quality.target, quality.cost_per_unit)
    return (quality.name or "quality", *map(format_amount, figures))


def _serving_rows(serving: ServingSummary, unit: str) -> Iterator[tuple[str, str]]:
    yield "engines", ", ".join(serving.engines)
    yield "requests running", format_amount(serving.running)
    yield "requests waiting", format_amount(serving.waiting)
    yield "batch fill", format_percent(serving.batch_fill)
    if serving.kv_mean is not None:
        yield "KV cache in use", f"{format_percent(serving.kv_mean)}, {format_percent(serving.kv_most)} at most"
    yield "preemptions", format_amount(serving.preemptions)
    yield "tokens", ", ".join(f"{kind} {format_amount(count)}" for kind, count in serving.tokens.items())
    yield "draft acceptance", format_percent(serving.acceptance)
    yield "tokens a pass", format_amount(serving.tokens_per_pass)
    yield "memory bandwidth used (MBU)", format_percent(serving.mbu)
    yield f"tokens generated per {unit.removesuffix('s')}", format_amount(serving.generated_per_cost)
    for name, hours in serving.advice.items():
        yield name.replace("_", " "), f"might save {hours:,.2f} GPU-hours"


def _latency_tables(serving: ServingSummary) -> Iterator[ReportTable]:
    if serving.latencies:
        rows = [
            (f"{latency.kind} {latency.percentile}", _seconds_text(latency.last), _seconds_text(latency.worst))
            for latency in serving.latencies
        ]
        yield ReportTable(head=("Latency of the worst replica", "last", "worst"), rows=tuple(rows))


def _seconds_text(value: float | None) -> str:
    return NO_VALUE if value is None else f"{format_amount(value)} s"


def _node_and_rank_tables(report: JobReport) -> Iterator[ReportTable]:
    rows = [
        (node.name, format_amount(node.gpus), f"{node.gpu_hours:,.2f}", format_percent(node.product),
         node.worst or NO_VALUE, format_percent(node.worst_share))
        for node in report.nodes[:MAX_NODES]
    ]  # fmt: skip
    head = ("Node", "GPUs", "GPU-hours", "product", "worst leak", "share")
    yield ReportTable(head=head, rows=tuple(rows), prose=more_note(len(report.nodes) - len(rows)))
    if report.ranks:
        slowest = [
            (rank.rank, rank.node, f"{format_amount(rank.busy_seconds)} s", f"{rank.of_median:.2f}")
            for rank in report.ranks[:MAX_RANKS]
        ]
        yield ReportTable(head=("Slowest rank", "node", "busy a step", "of median"), rows=tuple(slowest))


def _communication_tables(found: CommunicationSummary | None) -> Iterator[ReportTable]:
    """Yield the table of a job's communication; none if no plugin timed it."""
    if found is None:
        return
    head = ("Communication", "calls", "bytes each", "GPU-seconds", "bus bandwidth", "of the link")
    rows = tuple(_collective_row(use, found.link_bytes_per_second) for use in found.collectives)
    yield ReportTable(head=head, rows=rows, prose=tuple(_communication_notes(found)))


def _collective_row(use: CollectiveSummary, link: float | None) -> TableRow:
    rate = use.bus_bytes_per_second
    return (
        use.name,
        format_amount(use.calls),
        format_amount(use.bytes / use.calls) if use.calls else NO_VALUE,
        format_amount(use.seconds),
        NO_VALUE if rate is None else f"{format_amount(rate)}B/s",
        format_percent(rate / link if rate is not None and link else None),
    )


def _communication_notes(found: CommunicationSummary) -> Iterator[str]:
    plugins = " and ".join(_PLUGINS.get(source, source) for source in found.sources)
    yield (
        f"timed by {plugins}: a collective executed in {format_percent(found.share)} of the time of its processes,"
        " overlap with computation included"
    )
    slow = found.waited_for
    if slow is not None:
        yield (
            f"the others wait for rank {slow.rank} on {slow.node}: it communicates {format_percent(slow.behind)} of the"
            " time less than their median"
        )


def _evidence_lines(report: JobReport) -> Iterator[str]:
    if report.evidence:
        yield "of the loss: " + ", ".join(f"{kind} {format_percent(share)}" for kind, share in report.evidence.items())
    if any(_between(part, report) for part in report.parts):
        yield "an estimated or calibrated loss lies between the bounds; useful time depends on no estimate"
    if report.ofu is not None:
        yield f"by the hardware {format_percent(report.ofu)} of the dense tensor peak were delivered (OFU)"
    if report.activity:
        activity = ", ".join(f"{name} {format_percent(value)}" for name, value in report.activity.items())
        yield f"engine activity within five minutes: {activity}"
    yield from report.unseen


# -- two jobs --


def _comparison_rows(comparison: ReportComparison) -> Iterator[TableRow]:
    reports = comparison.first, comparison.second
    yield ("GPUs", *(format_amount(report.gpus) for report in reports))
    yield ("GPU-hours", *(f"{report.gpu_hours:,.2f}" for report in reports))
    yield ("cost", *(f"{report.cost:,.2f} {report.cost_unit}" for report in reports))
    yield ("time", *(format_duration(report.when.seconds) for report in reports))
    yield from _row_unless_empty("energy, kWh", (format_amount(report.energy_kwh) for report in reports))
    yield from _row_unless_empty("energy, cost", map(_energy_money, reports))
    if comparison.per_gpu is not None:
        yield (f"{comparison.of} a second and GPU", *map(format_amount, comparison.per_gpu))
    if comparison.per_cost is not None:
        unit = reports[0].cost_unit.removesuffix("s")
        yield (f"{comparison.of} per {unit}", *map(format_amount, comparison.per_cost))
    yield from _row_unless_empty(
        "MFU", (format_percent(report.truth.mfu if report.truth else None) for report in reports)
    )
    for name in ("gau", "ectr", "emfu", "product"):
        shown = {"emfu": "eMFU", "product": "GAU x ECTR x eMFU"}.get(name, name.upper())
        yield (shown, *(format_percent(getattr(report.layers, name)) for report in reports))
    for cost in ("step", "token", "sample"):
        yield from _row_unless_empty(f"cost a {cost}", (_cost_text(report, cost) for report in reports))
    for percentile in sorted({name for report in reports for name in report.activity}):
        yield (f"activity {percentile}", *(format_percent(report.activity.get(percentile)) for report in reports))
    deviations = (format_percent(report.activity_deviation) for report in reports)
    yield from _row_unless_empty("activity, deviation", deviations)


def _row_unless_empty(name: str, cells: Iterable[str]) -> Iterator[TableRow]:
    """Yield the row unless all its cells are empty."""
    row = (name, *cells)
    if set(row[1:]) != {NO_VALUE}:
        yield row


def _energy_money(report: JobReport) -> str:
    return NO_VALUE if report.energy_money is UNSET else f"{report.energy_money:,.2f} {report.energy_currency}"


def _cost_text(report: JobReport, unit: str) -> str:
    value = getattr(report.truth, f"cost_per_{unit}", None)
    return NO_VALUE if value is None else f"{format_amount(value)} {report.cost_unit}"


def _scaling_lines(comparison: ReportComparison) -> Iterator[str]:
    if comparison.scaling is not None:
        small, large = map(format_amount, sorted((comparison.first.gpus, comparison.second.gpus)))
        yield (
            f"scaling efficiency {format_percent(comparison.scaling)}: {comparison.of} a second and GPU"
            f" on {large} GPUs over those on {small}"
        )


def _quality_reached_rows(quality: QualityReached, comparison: ReportComparison) -> Iterator[TableRow]:
    name = f"{quality.name or 'quality'} {format_amount(quality.quality)}"
    yield (f"{name}: time", *map(format_duration, quality.seconds))
    units = comparison.first.cost_unit, comparison.second.cost_unit
    yield (f"{name}: cost", *(f"{format_amount(cost)} {unit}" for cost, unit in zip(quality.cost, units, strict=True)))


WIDTH = 80
_COLUMN_GAP = 2
_LABEL_WIDTH = 30


def render_text(tables: Iterable[ReportTable]) -> str:
    """Render tables for a terminal, 80 columns wide."""
    blocks = ["\n".join(_text_block(table)) for table in tables]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _text_block(table: ReportTable) -> Iterator[str]:
    if not (table.rows or table.prose):
        return
    if table.title:
        yield from wrap(printable(table.title), WIDTH)
    yield from _text_columns(table) if table.head else _text_pairs(table.rows)
    for line in table.prose:
        indent = " " * (len(line) - len(line.lstrip()))
        yield from wrap(printable(line.lstrip()), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _text_pairs(rows: Iterable[TableRow]) -> Iterator[str]:
    for name, value in rows:
        start = f"  {name:{_LABEL_WIDTH}}  "
        yield from wrap(printable(value), WIDTH, initial_indent=start, subsequent_indent=" " * len(start))


def _text_columns(table: ReportTable) -> Iterator[str]:
    """Yield aligned rows; the widest columns are shortened until the table fits."""
    rows = [tuple(map(printable, row)) for row in (table.head, *table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    while sum(widths) + _COLUMN_GAP * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    left_columns = {0} | {column for column in range(len(widths)) if _without_digits(table.rows, column)}
    for row in rows:
        cells = enumerate(map(shorten, row, widths))
        aligned = (cell.ljust(widths[n]) if n in left_columns else cell.rjust(widths[n]) for n, cell in cells)
        yield (" " * _COLUMN_GAP).join(aligned).rstrip()


def _without_digits(rows: Iterable[TableRow], column: int) -> bool:
    """Whether no cell of the column has a digit."""
    return not any(character.isdigit() for row in rows for character in row[column])


def printable(text: str) -> str:
    """Replace control characters, which a terminal would execute."""
    return "".join(character if character.isprintable() else "?" for character in text)


# -- Markdown --


def render_markdown(tables: Iterable[ReportTable]) -> str:
    """Render tables as Markdown."""
    return "\n\n".join("\n".join(_markdown_section(table)) for table in tables if table.rows or table.prose) + "\n"


def _markdown_section(table: ReportTable) -> Iterator[str]:
    if table.title:
        yield f"## {_markdown_escaped(table.title)}"
        yield ""
    if table.rows:
        head = table.head or ("", "")
        yield _markdown_row(head)
        yield "|---" + "|---:" * (len(head) - 1) + "|"
        yield from map(_markdown_row, table.rows)
    if table.rows and table.prose:
        yield ""
    yield from (f"- {_markdown_escaped(line.strip())}" for line in table.prose)


def _markdown_row(cells: TableRow) -> str:
    return "| " + " | ".join(map(_markdown_escaped, cells)) + " |"


def _markdown_escaped(text: str) -> str:
    """Escape Markdown's special characters."""
    return "".join(f"\\{character}" if character in "\\`*_|<>[]" else character for character in printable(text))


def render_line(report: JobReport) -> str:
    """Render the report as one line, without a line break."""
    worst = "".join(f"; most lost to {part.name}, {format_percent(part.share)}" for part in report.losses[:1])
    worst = worst if report.hang is UNSET else f"; {hang_title(report).replace('Hung', 'hung')}"
    money = "" if report.money is None else f"; {report.money:,.2f} {report.currency}"
    observed = "" if _fully_observed(report) else f"; {format_percent(report.coverage)} of it observed"
    nodes = f"; {len(report.nodes)} of {report.expected_nodes} nodes" if _nodes_missing(report) else ""
    return printable(
        f"job {report.who.shown_id}{simulated_suffix(report)}:"
        f" {format_percent(report.layers.product)} useful ({layer_product(report.layers)}) of"
        f" {report.gpu_hours:,.2f} GPU-hours on {plural(report.gpus, 'GPU')} in {format_duration(report.when.seconds)}"
        f"{worst}{money}{observed}{nodes}"
    )


def render_short(report: JobReport, *, program: str = "gpu-efficiency", sources: str = "", where: str = "") -> str:
    """Render the report in at most eight lines of 80 columns.

    The last one is longer if it must be: it is the command for all of it, with `sources`, its further flags, and
    `where` it works, such as "on node n1", if that is not everywhere.
    """
    lines = (shorten(line, WIDTH) for line in _short_lines(report))
    where = f", {where}" if where else ""
    return "\n".join((*lines, printable(f"  all of it{where}: {program} report {report.who.shown_id}{sources}"), ""))


def _short_lines(report: JobReport) -> Iterator[str]:
    identity, state = report.who, "so far" if report.when.running else "ended"
    user = f" of {identity.user}" if identity.user else ""
    yield (
        f"GPU efficiency of job {identity.shown_id}{user}: {format_duration(report.when.seconds)} {state}"
        f"{simulated_suffix(report)}"
    )
    if report.hang is not UNSET:
        yield f"  {hang_title(report)}, on {plural(sum(node.gpus for node in report.hang.nodes), 'GPU')}"
        yield from wrap(f"do: {report.hang.do}", WIDTH, initial_indent="    ", subsequent_indent="      ")[:2]
    money = money_suffix(report.money, report.currency)
    energy = "" if report.energy_kwh is None else f", {format_amount(report.energy_kwh)} kWh"
    energy += "" if report.energy_money is UNSET else f" for {_energy_money(report)}"
    yield f"  {report.gpu_hours:,.2f} GPU-hours on {plural(report.gpus, 'GPU')}{money}{energy}"
    yield f"  {format_percent(report.layers.product)} useful = {layer_product(report.layers)}"
    for part in report.losses[:1] if report.hang is UNSET else ():  # no line is left for what it lost before
        cost = money_suffix(part.money, report.currency)
        yield f"  lost most to {part.name}: {format_percent(part.share)}, {part.gpu_hours:,.2f} GPU-hours{cost}"
        if part.fix:
            yield f"    do: {part.fix}"
    failed = [f"{failure.kind} {format_amount(failure.times)}" for failure in report.failures if failure.times]
    if failed and report.hang is UNSET:
        yield f"  failed: {', '.join(failed)}"
    if not _fully_observed(report) or _nodes_missing(report):
        nodes = f", {len(report.nodes)} of {report.expected_nodes} nodes told of it" if _nodes_missing(report) else ""
        yield f"  {format_percent(report.coverage)} of the time was observed{nodes}"


class _MaybeSimulated(Protocol):
    @property
    def simulated(self) -> bool: ...


def simulated_suffix(*results: _MaybeSimulated) -> str:
    """Return the mark of what no hardware measured, if any of these is such."""
    return " (SIMULATED)" if any(result.simulated for result in results) else ""


def _fully_observed(report: JobReport) -> bool:
    return format_percent(report.coverage) == "100.0 %"


def _nodes_missing(report: JobReport) -> bool:
    return len(report.nodes) < report.expected_nodes
