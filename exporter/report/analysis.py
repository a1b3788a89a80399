"""Estimates what a change to a job would save, and compares the reports of two jobs.

Each estimate is of the job as it ran: estimates are never added to one another (docs/job-reports.md).
"""

from collections.abc import Iterator

from exporter.report.model import (
    JobReport,
    LeakDifference,
    QualityMetric,
    QualityReached,
    ReportComparison,
    WaterfallPart,
    WhatIf,
)

_OVERSIZED = "oversized_allocation"
"""A leak of a part of a GPU: without it the job does not end earlier."""


def estimate_changes(report: JobReport, *, emfu: float | None = None) -> tuple[WhatIf, ...]:
    """Estimate right-sizing, fixing the largest leak, and a higher eMFU; changes without a gain are left out."""
    if not report.gpu_hours or not report.when.seconds:
        return ()
    changes = [*_right_sized(report), *_leak_fixed(report), *_emfu_raised(report, emfu)]
    return tuple(change for change in changes if change.gpu_hours > 0)


def _right_sized(report: JobReport) -> Iterator[WhatIf]:
    """Estimate a MIG slice instead of a GPU, and leaving out nodes that never ran a kernel."""
    if report.fitting:
        yield _estimate(
            report, kind="right_size", of=report.fitting, hours=report.unneeded_gpu_hours, finishes_sooner=False
        )
    idle = [node for node in report.nodes if node.gau == 0]
    if idle:
        names = ", ".join(node.name for node in idle)
        hours = sum(node.gpu_hours - node.unseen_gpu_hours for node in idle)
        yield _estimate(report, kind="right_size", of=f"without {names}", hours=hours, finishes_sooner=False)


def _leak_fixed(report: JobReport) -> Iterator[WhatIf]:
    """Estimate the largest leak removed; the other time could then be longer by that much."""
    for part in report.losses[:1]:
        remaining = (
            sum(part_seen.gpu_hours for part_seen in report.parts if part_seen.layer != "unobserved") - part.gpu_hours
        )
        useful = _layer_hours(report, "useful")
        extra_hours = useful * part.gpu_hours / remaining if remaining > 0 and part.name != _OVERSIZED else None
        yield _estimate(
            report, kind="fix_leak", of=part.name, hours=part.gpu_hours, finishes_sooner=part.name != _OVERSIZED,
            extra_hours=extra_hours, money=part.money,
        )  # fmt: skip


def _emfu_raised(report: JobReport, wanted: float | None) -> Iterator[WhatIf]:
    """Estimate less kernel time for the same work, or more work in the same kernel time."""
    current = report.layers.emfu
    if wanted is None or current is None:
        return
    kernels = sum(_layer_hours(report, layer) for layer in ("emfu", "useful", "unresolved"))
    yield _estimate(
        report, kind="raise_emfu", of=f"{100 * wanted:g} %", hours=kernels * (1 - current / wanted),
        finishes_sooner=True, extra_hours=kernels * (wanted - current),
    )  # fmt: skip


def _estimate(
    report: JobReport,
    *,
    kind: str,
    of: str,
    hours: float,
    finishes_sooner: bool,
    extra_hours: float | None = None,
    money: float | None = None,
) -> WhatIf:
    """Build the estimate: `hours` GPU-hours less, or additional work of `extra_hours` GPU-hours at their peak."""
    run_hours = report.when.seconds / 3600
    return WhatIf(
        kind=kind,
        of=of,
        gpu_hours=hours,
        share=hours / report.gpu_hours,
        money=_money_for(report, hours) if money is None else money,
        fewer_gpus=hours / run_hours,
        sooner=hours / report.gpu_hours * report.when.seconds if finishes_sooner else None,
        gained_gpus=None if extra_hours is None else extra_hours / run_hours,
        gained_money=None if extra_hours is None else _money_for(report, extra_hours),
    )


def _money_for(report: JobReport, hours: float) -> float | None:
    """Return the price of GPU-hours at the job's mean rate."""
    return None if report.money is None else hours / report.gpu_hours * report.money


def _layer_hours(report: JobReport, layer: str) -> float:
    parts: Iterator[WaterfallPart] = (part for part in report.parts if part.layer == layer)
    return sum(part.gpu_hours for part in parts)


def compare_reports(first: JobReport, second: JobReport) -> ReportComparison:
    """Compare two jobs."""
    unit, per_gpu = _common_throughput(first, second)
    return ReportComparison(
        first=first,
        second=second,
        of=unit,
        per_gpu=per_gpu,
        per_cost=_per_cost(first, second, unit),
        scaling=_scaling_efficiency(first, second, per_gpu),
        differences=tuple(
            sorted(_leak_differences(first, second), key=lambda difference: (-abs(difference.change), difference.name))
        ),
        same=tuple(_qualities_reached(first, second)),
    )


def _common_throughput(first: JobReport, second: JobReport) -> tuple[str, tuple[float, float] | None]:
    for unit in ("tokens", "samples"):
        a, b = (getattr(report.truth, f"{unit}_per_gpu_second", None) for report in (first, second))
        if a and b:
            return unit, (a, b)
    return "", None


def _per_cost(first: JobReport, second: JobReport, unit: str) -> tuple[float, float] | None:
    """Return throughput per cost: the inverse of the cost of a token or sample."""
    name = f"cost_per_{unit.removesuffix('s')}"
    a, b = (getattr(each.truth, name, None) for each in (first, second))
    return (1 / a, 1 / b) if unit and a and b and first.cost_unit == second.cost_unit else None


def _scaling_efficiency(first: JobReport, second: JobReport, per_gpu: tuple[float, float] | None) -> float | None:
    if per_gpu is None or first.gpus == second.gpus:
        return None
    a, b = per_gpu
    return a / b if first.gpus > second.gpus else b / a


def _leak_differences(first: JobReport, second: JobReport) -> Iterator[LeakDifference]:
    layers = {part.name: part.layer for report in (first, second) for part in report.parts}
    a, b = ({part.name: part.share for part in report.parts} for report in (first, second))
    for name, layer in layers.items():
        yield LeakDifference(name=name, layer=layer, first=a.get(name, 0.0), second=b.get(name, 0.0))


def _qualities_reached(first: JobReport, second: JobReport) -> Iterator[QualityReached]:
    second_by_name = {quality.name: quality for quality in second.truth.qualities} if second.truth else {}
    for a in first.truth.qualities if first.truth else ():
        b = second_by_name.get(a.name)
        if b is None or a.rises != b.rises or not (a.track and b.track):
            continue
        common = min(_best_value(a), _best_value(b)) if a.rises else max(_best_value(a), _best_value(b))
        times = _seconds_to_reach(a, common), _seconds_to_reach(b, common)
        if times[0] is not None and times[1] is not None:
            costs = times[0] * first.cost_per_hour / 3600, times[1] * second.cost_per_hour / 3600
            yield QualityReached(name=a.name, quality=common, seconds=(times[0], times[1]), cost=costs)


def _best_value(quality: QualityMetric) -> float:
    """Return the best value in the track."""
    values = [value for _, value in quality.track]
    return max(values) if quality.rises else min(values)


def _seconds_to_reach(quality: QualityMetric, value: float) -> float | None:
    """Return the seconds until the metric reached a value; None if it is only known to have been exceeded.

    A job record keeps only the time at which the target was reached, so lower values have no time.
    """
    at, reached_value = next(
        point for point in quality.track if (point[1] >= value if quality.rises else point[1] <= value)
    )
    return at if len(quality.track) > 1 or reached_value == value or not at else None
