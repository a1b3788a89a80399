"""A receipt and a comparison as tables of words. Owns which figures are said and how; refuses layout: text or Markdown.

What nobody told has no line.
"""

from collections.abc import Iterable, Iterator

from exporter.receipt.advising import advice, failed, gains
from exporter.receipt.comparing import Comparison, Same
from exporter.receipt.model import Layers, Part, Quality, Receipt, Served, Truth
from exporter.receipt.tables import Row, Table
from exporter.wording import NOTHING, amount, elapsed, moment, percent

MOST_NODES, MOST_RANKS, MOST_DIFFERENCES = 10, 3, 10
"""Shown; --json has all."""


def receipt_tables(receipt: Receipt) -> Iterator[Table]:
    """All that is said of one job, in order."""
    yield Table(title=_name(receipt), prose=tuple(_facts(receipt)))
    yield _waterfall(receipt)
    yield from (advice(receipt), gains(receipt), failed(receipt))
    if receipt.truth is not None:
        yield Table(title="Reported by the job", rows=tuple(_told(_truth(receipt.truth, receipt))))
        yield from _qualities(receipt.truth, receipt.unit)
    if receipt.served is not None:
        yield Table(title="Told by its engines", rows=tuple(_told(_served(receipt.served, receipt.unit))))
        yield from _latencies(receipt.served)
    yield from _spread(receipt)
    yield Table(title="How it is known", prose=tuple(_known(receipt)))


def comparison_tables(found: Comparison) -> Iterator[Table]:
    """All that is said of two jobs, in order."""
    head = ("", *(f"job {each.who.job_id}" for each in (found.first, found.second)))
    yield Table(title="Two jobs", head=head, rows=tuple(_side_by_side(found)), prose=tuple(_scaled(found)))
    rows = [
        (each.name, percent(each.first), percent(each.second), f"{100 * each.grown:+.1f}")
        for each in found.differences[:MOST_DIFFERENCES]
    ]
    more = len(found.differences) - len(rows)
    prose = (f"and {more} more; --json has them all",) if more > 0 else ()
    yield Table(title="Share of their time", head=(*head, "points"), rows=tuple(rows), prose=prose)
    if found.same:
        reached = tuple(row for same in found.same for row in _same(same, found))
        yield Table(title="To the quality both reached", head=head, rows=reached)
    unseen = [f"job {each.who.job_id}: {line}" for each in (found.first, found.second) for line in each.unseen]
    yield Table(title="How it is known", prose=tuple(unseen))


# -- one job --


def _name(receipt: Receipt) -> str:
    who = receipt.who
    name = f' "{who.name}"' if who.name else ""
    user = f" of {who.user}" if who.user else ""
    where = f" in {who.cluster}" if who.cluster else ""
    simulated = " (SIMULATED)" if receipt.simulated else ""
    return f"Job {who.job_id}{name}{user}{where}{simulated}"


def _facts(receipt: Receipt) -> Iterator[str]:
    who, when = receipt.who, receipt.when
    more = ("account", "team", "partition", "namespace")
    owners = [f"{label} {getattr(who, label)}" for label in more if getattr(who, label)]
    if owners:
        yield ", ".join(owners)
    state = "still running" if when.running else "ended"
    yield f"{moment(when.start)} to {moment(when.end)} ({elapsed(when.seconds)}), {state}"
    models = f" ({', '.join(receipt.models)})" if receipt.models else ""
    told, expected = len(receipt.nodes), receipt.expected_nodes
    nodes = f"{told} of {expected} nodes" if told < expected else _many(told, "node")
    yield f"{nodes}, {_many(receipt.gpus, 'GPU')}{models}"
    money = f", {receipt.money:,.2f} {receipt.currency}" if receipt.money is not None else ""
    energy = f", {receipt.energy_kwh:,.1f} kWh" if receipt.energy_kwh is not None else ""
    yield f"{receipt.gpu_hours:,.2f} GPU-hours allocated{money}{energy}, {percent(receipt.coverage)} observed"
    spent = [f"{percent(receipt.energy_useful)} useful"] if receipt.energy_useful is not None else []
    spent += [f"{amount(receipt.co2_kg)} kg of CO2"] if receipt.co2_kg is not None else []
    if spent:
        yield f"of the energy: {', '.join(spent)}"
    yield _product(receipt.layers)
    if receipt.work is not None:
        yield f"useful work: that of {amount(round(receipt.work, 1))} of {_many(receipt.gpus, 'GPU')} at their peak"


def _many(count: float, what: str) -> str:
    return f"{amount(count)} {what}" + ("" if count == 1 else "s")


def _product(layers: Layers) -> str:
    known = f"GAU {percent(layers.gau)} x ECTR {percent(layers.ectr)} x eMFU {percent(layers.emfu)}"
    floor = f" (at least {percent(layers.floor)})" if percent(layers.floor) != percent(layers.product) else ""
    return f"{known} = {percent(layers.product)}{floor}"


def _waterfall(receipt: Receipt) -> Table:
    priced = receipt.money is not None
    head = ("Where the time went", "layer", "evidence", "GPU-hours", "share", *((receipt.currency,) if priced else ()))
    rows = [_part(part, priced=priced) for part in receipt.parts]
    total = ("allocated", "", "", f"{receipt.gpu_hours:,.2f}", "100.0 %")
    return Table(head=head, rows=(*rows, (*total, *((f"{receipt.money:,.2f}",) if priced else ()))))


def _part(part: Part, *, priced: bool) -> Row:
    layer = part.layer if part.evidence else ""
    money = (f"{part.money or 0:,.2f}",) if priced else ()
    return (part.name, layer, part.evidence, f"{part.gpu_hours:,.2f}", percent(part.share), *money)


def _told(rows: Iterable[tuple[str, str]]) -> Iterator[Row]:
    return (row for row in rows if row[1] and NOTHING not in row[1].split())


def _truth(truth: Truth, receipt: Receipt) -> Iterator[tuple[str, str]]:
    yield "MFU", percent(truth.mfu)
    yield "HFU", percent(truth.hfu)
    yield "HFU - MFU (recomputation)", percent(truth.gap)
    yield "goodput", percent(truth.goodput)
    yield "time by phase", ", ".join(f"{phase} {percent(share)}" for phase, share in truth.phases.items())
    yield "steps", amount(truth.steps)
    yield "steps repeated", amount(truth.rework_steps)
    yield "progress (steps not repeated)", percent(truth.progress)
    yield "tokens", amount(truth.tokens)
    yield "tokens a second", amount(truth.tokens_per_second)
    yield "tokens a second and GPU", amount(truth.tokens_per_gpu_second)
    yield "samples", amount(truth.samples)
    yield "padding", percent(truth.padding)
    yield "pipeline bubble", percent(truth.bubble)
    yield from _interruptions(truth, receipt)
    yield from _outcomes(truth, receipt.unit)


def _outcomes(truth: Truth, unit: str) -> Iterator[tuple[str, str]]:
    yield "cost a step", f"{amount(truth.cost_per_step)} {unit}"
    yield "cost a token", f"{amount(truth.cost_per_token)} {unit}"
    yield "cost a sample", f"{amount(truth.cost_per_sample)} {unit}"
    yield "loss", amount(truth.loss)
    yield "loss events", ", ".join(f"{event} {amount(count)}" for event, count in truth.loss_events.items())
    if truth.lost_bytes_per_second is not None:
        lost = f"{amount(truth.lost_bytes_per_second)}B/s of each GPU: groups are larger than what NVLink joins"
        yield "tensor parallelism loses", lost
    if truth.target is not None:
        yield "time to target", elapsed(truth.target.seconds)
        yield "cost to target", f"{amount(truth.target.cost)} {unit}"


def _interruptions(truth: Truth, receipt: Receipt) -> Iterator[tuple[str, str]]:
    if truth.checkpoints is not None:
        each = "" if truth.checkpoint_seconds is None else f", {elapsed(truth.checkpoint_seconds)} each"
        money = "" if truth.checkpoint_money is None else f", {truth.checkpoint_money:,.2f} {receipt.currency}"
        yield "checkpoints", f"{amount(truth.checkpoints)}{each}, {truth.checkpoint_gpu_hours:,.2f} GPU-hours{money}"
    if truth.restarts is not None:
        each = "" if truth.recovery_seconds is None else f", {elapsed(truth.recovery_seconds)} to recover"
        yield "restarts", f"{amount(truth.restarts)}{each}"


def _qualities(truth: Truth, unit: str) -> Iterator[Table]:
    if truth.qualities:
        head = ("Quality", "start", "last", "best", "target", f"{unit} a unit")
        yield Table(head=head, rows=tuple(map(_quality, truth.qualities)))


def _quality(quality: Quality) -> Row:
    figures = (quality.start, quality.last, quality.best, quality.target, quality.cost_per_unit)
    return (quality.name or "quality", *map(amount, figures))


def _served(served: Served, unit: str) -> Iterator[tuple[str, str]]:
    yield "engines", ", ".join(served.engines)
    yield "requests running", amount(served.running)
    yield "requests waiting", amount(served.waiting)
    yield "batch fill", percent(served.batch_fill)
    if served.kv_mean is not None:
        yield "KV cache in use", f"{percent(served.kv_mean)}, {percent(served.kv_most)} at most"
    yield "preemptions", amount(served.preemptions)
    yield "tokens", ", ".join(f"{kind} {amount(count)}" for kind, count in served.tokens.items())
    yield "draft acceptance", percent(served.acceptance)
    yield "tokens a pass", amount(served.tokens_per_pass)
    yield "memory bandwidth used (MBU)", percent(served.mbu)
    yield f"tokens generated per {unit.removesuffix('s')}", amount(served.generated_per_cost)
    for name, hours in served.advice.items():
        yield name.replace("_", " "), f"might save {hours:,.2f} GPU-hours"


def _latencies(served: Served) -> Iterator[Table]:
    if served.latencies:
        rows = [
            (f"{each.kind} {each.percentile}", _seconds(each.last), _seconds(each.worst)) for each in served.latencies
        ]
        yield Table(head=("Latency of the worst replica", "last", "worst"), rows=tuple(rows))


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{amount(value)} s"


def _spread(receipt: Receipt) -> Iterator[Table]:
    rows = [
        (node.name, amount(node.gpus), f"{node.gpu_hours:,.2f}", percent(node.product), node.worst or NOTHING,
         percent(node.worst_share))
        for node in receipt.nodes[:MOST_NODES]
    ]  # fmt: skip
    more = len(receipt.nodes) - len(rows)
    prose = (f"and {more} more; --json has them all",) if more > 0 else ()
    yield Table(head=("Node", "GPUs", "GPU-hours", "product", "worst leak", "share"), rows=tuple(rows), prose=prose)
    if receipt.ranks:
        slowest = [
            (each.rank, each.node, f"{amount(each.busy_seconds)} s", f"{each.of_median:.2f}")
            for each in receipt.ranks[:MOST_RANKS]
        ]
        yield Table(head=("Slowest rank", "node", "busy a step", "of median"), rows=tuple(slowest))


def _known(receipt: Receipt) -> Iterator[str]:
    if receipt.evidence:
        yield "of the loss: " + ", ".join(f"{kind} {percent(share)}" for kind, share in receipt.evidence.items())
    if receipt.ofu is not None:
        yield f"by the hardware {percent(receipt.ofu)} of the dense tensor peak were delivered (OFU)"
    if receipt.activity:
        yield f"engine activity within five minutes: {_activity(receipt)}"
    yield from receipt.unseen


def _activity(receipt: Receipt) -> str:
    return ", ".join(f"{name} {percent(value)}" for name, value in receipt.activity.items())


# -- two jobs --


def _side_by_side(found: Comparison) -> Iterator[Row]:
    pair = found.first, found.second
    yield ("GPUs", *(amount(each.gpus) for each in pair))
    yield ("GPU-hours", *(f"{each.gpu_hours:,.2f}" for each in pair))
    yield ("cost", *(f"{each.cost:,.2f} {each.unit}" for each in pair))
    yield ("time", *(elapsed(each.when.seconds) for each in pair))
    yield from _both("energy, kWh", (amount(each.energy_kwh) for each in pair))
    if found.per_gpu is not None:
        yield (f"{found.of} a second and GPU", *map(amount, found.per_gpu))
    if found.per_cost is not None:
        yield (f"{found.of} per {pair[0].unit.removesuffix('s')}", *map(amount, found.per_cost))
    yield from _both("MFU", (percent(each.truth.mfu) if each.truth else NOTHING for each in pair))
    for name in ("gau", "ectr", "emfu", "product"):
        shown = {"emfu": "eMFU", "product": "GAU x ECTR x eMFU"}.get(name, name.upper())
        yield (shown, *(percent(getattr(each.layers, name)) for each in pair))
    for cost in ("step", "token", "sample"):
        yield from _both(f"cost a {cost}", (_cost(each, cost) for each in pair))
    for percentile in sorted({name for each in pair for name in each.activity}):
        yield (f"activity {percentile}", *(percent(each.activity.get(percentile)) for each in pair))
    yield from _both("activity, deviation", (percent(each.activity_deviation) for each in pair))


def _both(name: str, cells: Iterable[str]) -> Iterator[Row]:
    """A line, unless there is nothing in it."""
    row = (name, *cells)
    if set(row[1:]) != {NOTHING}:
        yield row


def _cost(receipt: Receipt, of: str) -> str:
    value = getattr(receipt.truth, f"cost_per_{of}", None)
    return NOTHING if value is None else f"{amount(value)} {receipt.unit}"


def _scaled(found: Comparison) -> Iterator[str]:
    if found.scaling is not None:
        small, large = sorted((found.first, found.second), key=lambda each: each.gpus)
        yield (
            f"scaling efficiency {percent(found.scaling)}: {found.of} a second and GPU on {amount(large.gpus)} GPUs"
            f" over those on {amount(small.gpus)}"
        )


def _same(same: Same, found: Comparison) -> Iterator[Row]:
    name = f"{same.name or 'quality'} {amount(same.quality)}"
    yield (f"{name}: time", *map(elapsed, same.seconds))
    units = found.first.unit, found.second.unit
    yield (f"{name}: cost", *(f"{amount(cost)} {unit}" for cost, unit in zip(same.cost, units, strict=True)))


__all__ = ["Row", "Table", "comparison_tables", "receipt_tables"]
