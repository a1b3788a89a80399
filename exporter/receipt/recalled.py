"""Statements as the figures that a Prometheus would have of them. Owns that; refuses to make up what they do not hold.

Counters of the lives of one node are added up; a gauge is that of the last life. Of a gauge there is the last value
alone, where a Prometheus has the mean of the run: except MFU and HFU, which are of all of it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from exporter.core.model import SECOND
from exporter.core.progress import ProgressView
from exporter.core.served import ServiceView
from exporter.core.statement import Statement
from exporter.receipt.asking import Place, Sample
from exporter.receipt.figures import Count, Rows, summed, weighed
from exporter.receipt.runs import Run

_PREFIX = "gpu_efficiency_job_"
Row = tuple[str, dict[str, str], float]
"""Name, labels, value."""


class Recalled:
    """Of one run of a job."""

    def __init__(self, run: Run) -> None:
        self.start = run.start
        self.nodes: Mapping[Place, str] = {("", stay.node): stay.node for stay in run.stays}
        gauges = [_sample(stay.node, row) for stay in run.stays for row in _gauges(stay.last)]
        self.rows = Rows(gauges, _counted(run))
        self._means = [
            *(_sample(stay.node, row) for stay in run.stays for row in _ratios(stay.lives)),
            *(row for row in gauges if row.name != "latency_seconds"),
        ]

    def mean(self, name: str, *_: str, series: int = 1) -> list[Sample]:  # noqa: ARG002  as it is asked of a server
        """What was kept: the last value, and of MFU and HFU the mean."""
        return [row for row in self._means if row.name == name]

    def weighed(self, name: str, *more: str, weights: Mapping[Place, float]) -> float | None:
        """Of all nodes."""
        return weighed((row.value, weights.get(row.place, 0.0)) for row in self.mean(name, *more))

    def greatest(self, name: str, *_: str, series: int = 1) -> list[Sample]:  # noqa: ARG002  likewise
        """What was told last: nobody has kept the greatest."""
        return [row for row in self.rows.gauges(name) if name != "kv_cache_ratio"]


def _sample(node: str, row: Row) -> Sample:
    name, labels, value = row
    return Sample({"__name__": _PREFIX + name, "instance": node, **labels}, value)


def _counted(run: Run) -> dict[str, list[Count]]:
    found = summed(
        ((name, life.node, tuple(sorted(labels.items()))), value)
        for life in run.statements
        for name, labels, value in _counts(life)
    )
    rows: dict[str, list[Count]] = defaultdict(list)
    for (name, node, labels), value in found.items():
        rows[name].append(Count(node, ("", node), dict(labels), value))
    return rows


def _counts(life: Statement) -> Iterator[Row]:
    yield "paid_seconds", {}, life.paid / SECOND
    yield from (("happened", {"kind": kind}, times) for kind, times in life.happened.items())
    if life.training is not None:
        yield from _progress_counts(life.training)
    if life.service is not None:
        yield "preemptions", {}, life.service.preemptions
        yield from (("engine_tokens", {"kind": kind}, count) for kind, count in life.service.tokens)
        yield "advice_seconds", {"advice": "speculative_decoding"}, life.service.undrafted / SECOND


def _progress_counts(told: ProgressView) -> Iterator[Row]:
    """By the catalogue's names; what it leaves out while it is 0 is left out."""
    yield "reported_gpu_seconds", {}, told.gpu_time / SECOND
    yield "tokens", {}, told.tokens
    yield "padding_tokens", {}, told.padding
    yield "samples", {}, told.samples
    yield "steps", {}, told.steps
    yield "rework_steps", {}, told.rework_steps
    yield "checkpoints", {}, told.checkpoints
    yield "restarts", {}, told.restarts
    yield "recovery_seconds", {}, told.recovery / SECOND
    yield from (("run_seconds", {"phase": phase}, spent / SECOND) for phase, spent in told.phases)
    yield from (("loss_events", {"event": event}, count) for event, count in told.events)


def _gauges(life: Statement) -> Iterator[Row]:
    if life.training is not None:
        yield from _progress_gauges(life.training)
    if life.service is not None:
        yield from _service_gauges(life.service)


def _progress_gauges(told: ProgressView) -> Iterator[Row]:
    known = {
        "step": told.step, "world_size": told.world or None, "bubble_ratio": told.bubble, "loss": told.loss,
        "loss_spread_ratio": told.loss_spread,
        "target_reached_timestamp_seconds": None if told.target_at is None else told.target_at / SECOND,
    }  # fmt: skip
    yield from ((name, {}, float(value)) for name, value in known.items() if value is not None)
    yield from (("rank_busy_seconds", {"rank": rank}, busy) for rank, _, busy in told.ranks)


def _service_gauges(told: ServiceView) -> Iterator[Row]:
    yield "engine_info", {"engine": told.engine}, 1.0
    known = {
        "batch_fill_ratio": told.fill, "kv_cache_ratio": told.kv_use, "tokens_per_pass_ratio": told.per_pass,
    }  # fmt: skip
    yield from ((name, {}, value) for name, value in known.items() if value is not None)
    requests = {"running": told.running, "waiting": told.waiting}
    yield from (("requests", {"state": state}, count) for state, count in requests.items() if count is not None)
    for latency in told.latencies:
        for percentile in ("p50", "p95", "p99"):
            labels = {"kind": latency.kind, "percentile": percentile}
            yield "latency_seconds", labels, float(getattr(latency, percentile))


def _ratios(lives: tuple[Statement, ...]) -> Iterator[Row]:
    """Of all the time that reports, or an engine, speak of."""
    reportable = sum(life.reportable for life in lives)
    if not reportable:
        return
    mfu = sum(life.reported for life in lives) / reportable
    yield "reported_mfu_ratio", {}, mfu
    told = [life.training for life in lives if life.training is not None]
    flops = sum(each.flops for each in told)
    if flops:
        yield "reported_hfu_ratio", {}, mfu * sum(each.hardware_flops for each in told) / flops
