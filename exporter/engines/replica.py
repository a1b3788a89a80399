"""Computes what a replica served between two consecutive metrics pages.

Handles counter differences, restarts and estimates from the engine's own metrics. What an engine does not report is
None, never 0.
"""

from collections import deque
from collections.abc import Mapping
from statistics import quantiles
from typing import Any

from msgspec import Struct

from exporter.config import ServedModel
from exporter.core.model import SECOND, Latency, ServingReport
from exporter.engines.base import LATENCIES, EngineMetrics
from exporter.engines.page import Histogram

BASELINE_WINDOW = 600 * SECOND
"""How long an interval counts towards the baseline, nanoseconds."""
PREFILL_SHARE = 0.01
"""Share of prompt tokens among computed tokens below which an interval counts as free of prefills (estimate)."""
BATCH_SHARE = 0.25
"""Relative difference of batch sizes up to which intervals are compared: a pass takes longer with a larger batch
(estimate)."""
MIN_INTERVALS = 3
"""Number of intervals without prefills that a baseline needs."""


class BaselineLatency:
    """The inter-token latency of a replica in intervals without prefills."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, float, float]] = deque()
        """(end, requests in the batch, mean inter-token latency in seconds) of each."""

    def add(
        self, at: int, *, running: float | None, inter_token: float | None, prompt: float | None, generated: float
    ) -> None:
        """Add an interval that ended `at`, in which `prompt` tokens were prefilled and `generated` tokens generated."""
        while self._intervals and at - self._intervals[0][0] > BASELINE_WINDOW:
            self._intervals.popleft()
        if not running or inter_token is None or prompt is None or generated <= 0:
            return
        if prompt < PREFILL_SHARE * (prompt + generated):
            self._intervals.append((at, running, inter_token))

    def inter_token_seconds(self, running: float | None) -> float | None:
        """Return the lower quartile of the inter-token latency at a similar batch size; None below MIN_INTERVALS.

        The lower quartile, because an interval can be slow for other reasons: a long context, another process.
        """
        if not running:
            return None
        near = [
            inter_token for _, batch, inter_token in self._intervals if abs(batch - running) <= BATCH_SHARE * running
        ]
        return quantiles(near, n=4, method="inclusive")[0] if len(near) >= MIN_INTERVALS else None


MAX_INTERVAL = 120 * SECOND
"""Longest time between two pages over which differences count; or three scrape intervals, if longer."""
FLOPS_PER_TOKEN = 2
"""FLOPs per parameter and token: a multiplication and an addition (docs/accounting.md)."""


class ReplicaPlacement(Struct, frozen=True):
    """The job and the GPUs of a replica."""

    job_id: str
    uuids: tuple[str, ...] = ()
    """Its GPUs on this node; empty: all GPUs of the job on this node."""
    gpus: int = 0
    """Number of GPUs on all nodes, if its command line has more than this node; else 0."""
    shared: int = 0
    """Number of GPUs that compute its tokens together; 0: unknown."""


class Replica:
    """Turns the pages of one replica into ServingReports."""

    def __init__(self, models: Mapping[str, ServedModel], *, interval: int = 0) -> None:
        """`interval` is the time between two scrapes, nanoseconds."""
        self._models, self._max_interval = models, max(MAX_INTERVAL, 3 * interval)
        self._last: EngineMetrics | None = None
        self._at = 0
        self._worked_at = 0
        """When a page last had more tokens than the one before, or none to be compared with."""
        self._baseline = BaselineLatency()
        self.restarts = 0

    def update(self, metrics: EngineMetrics, at: int, *, placement: ReplicaPlacement) -> ServingReport:
        """Return the report for the time between the previous page and this one, scraped `at`.

        For the first page, and after a restart or a long gap, the report has only gauges and an empty interval (start
        equals end). A counter that fell means a restart.
        """
        before, start = self._last, self._at
        self._last, self._at = metrics, at
        if before is None or not 0 < at - start <= self._max_interval or before.engine != metrics.engine:
            return self._first_report(metrics, at, placement)
        if _went_back(before, metrics):
            self.restarts += 1
            self._baseline = BaselineLatency()
            return self._first_report(metrics, at, placement)
        # A counter that is new on the page started at 0 since the last one: most appear when first incremented.
        grown = {name: value - before.counters.get(name, 0.0) for name, value in metrics.counters.items()}
        direct = {name: grown.get(name) for name in ("preemptions", "passes", "flops", "bytes")}
        values = _tokens(grown, metrics) | direct | self._latencies(before, metrics)
        if values.get("flops") is None:
            values["flops"] = self._flops(metrics.model, values, placement)
        self._update_baseline(values, metrics.running, at)
        if values["generated_tokens"] or values["prompt_tokens"]:
            self._worked_at = at
        return _serving(metrics, (start, at), placement, values, worked_at=self._worked_at)

    def _first_report(self, metrics: EngineMetrics, at: int, placement: ReplicaPlacement) -> ServingReport:
        self._worked_at = at
        return _serving(metrics, (at, at), placement, {}, worked_at=at)

    def _latencies(self, before: EngineMetrics, now: EngineMetrics) -> dict[str, Any]:
        found = {kind: _grown_histogram(before, now, kind) for kind in LATENCIES}
        latencies = [histogram.latency(kind) for kind, histogram in found.items() if histogram is not None]
        inter_token = found["itl"]
        return {
            "latencies": tuple(histogram for histogram in latencies if isinstance(histogram, Latency)),
            "inter_token_seconds": None if inter_token is None else inter_token.mean,
        }

    def _flops(self, model: str, values: Mapping[str, Any], placement: ReplicaPlacement) -> float | None:
        """Return the FLOPs of one GPU, 2N per computed token; None if the model's size is not configured."""
        served, prompt, generated = self._models.get(model), values.get("prompt_tokens"), values.get("generated_tokens")
        if served is None or prompt is None or generated is None or not placement.shared:
            return None
        drafted, accepted = values.get("drafted_tokens") or 0.0, values.get("accepted_tokens") or 0.0
        computed = prompt + drafted + max(0.0, generated - accepted)
        return float(FLOPS_PER_TOKEN * served.active_parameters * computed / placement.shared)

    def _update_baseline(self, values: dict[str, Any], running: float | None, at: int) -> None:
        prompt, generated = values.get("prompt_tokens"), values.get("generated_tokens") or 0.0
        self._baseline.add(
            at, running=running, inter_token=values["inter_token_seconds"], prompt=prompt, generated=generated
        )
        values["calm_inter_token_seconds"] = self._baseline.inter_token_seconds(running)


def _went_back(before: EngineMetrics, now: EngineMetrics) -> bool:
    fell = any(now.counters[name] < value for name, value in before.counters.items() if name in now.counters)
    both = ((histogram, before.histograms.get(kind)) for kind, histogram in now.histograms.items())
    return fell or any(previous is not None and histogram.count < previous.count for histogram, previous in both)


def _grown_histogram(before: EngineMetrics, now: EngineMetrics, kind: str) -> Histogram | None:
    histogram, previous = now.histograms.get(kind), before.histograms.get(kind)
    return histogram if histogram is None or previous is None else histogram.since(previous)


def _tokens(grown: Mapping[str, float], now: EngineMetrics) -> dict[str, Any]:
    """Return the numbers of tokens by kind."""
    recomputed, prompt = _recomputed(grown, now), grown.get("prefilled")
    if prompt is None and "prompt" in grown:
        # Engines count a prompt once: tokens recomputed after an eviction are not included.
        prompt = max(0.0, grown["prompt"] - grown.get("cached", 0.0)) + (recomputed or 0.0)
    drafted, accepted = _draft_tokens(grown, now)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": grown.get("cached"),
        "generated_tokens": grown.get("generated"),
        "recomputed_tokens": None if recomputed is None or prompt is None else min(recomputed, prompt),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
    }


def _recomputed(grown: Mapping[str, float], now: EngineMetrics) -> float | None:
    """Return the tokens evicted while their request ran: as reported, else preemptions times mean tokens per request.

    On average half of the answer exists when a request is preempted. All of it is recomputed unless the prefix cache
    still has it, so the estimate is an upper bound.
    """
    if "evicted" in grown:
        return grown["evicted"]
    preemptions = grown.get("preemptions")
    if not preemptions:
        return preemptions
    lengths, ended = (grown if grown.get("ended") else now.counters).get("lengths"), grown.get("ended")
    ended = ended or now.counters.get("ended")
    return preemptions * lengths / ended if lengths is not None and ended else None


def _draft_tokens(grown: Mapping[str, float], now: EngineMetrics) -> tuple[float | None, float | None]:
    """Return (drafted, accepted) tokens: as reported, else estimated from the mean draft length and acceptance."""
    if "drafted" in grown:
        return grown["drafted"], grown.get("accepted")
    if "accepted" in grown:
        drafted = None if now.draft_length is None else now.draft_length * grown.get("verified", 0.0)
        return drafted, grown["accepted"]
    if now.accept_length is None or not ("verified" in grown or "generated" in grown):
        return None, None
    passes = grown["verified"] if "verified" in grown else grown["generated"] / max(1.0, now.accept_length)
    accepted = passes * max(0.0, now.accept_length - 1)
    if now.draft_length is not None:
        return max(accepted, passes * now.draft_length), accepted
    return (accepted / now.accept_rate if now.accept_rate else None), accepted


def _serving(
    metrics: EngineMetrics,
    interval: tuple[int, int],
    placement: ReplicaPlacement,
    values: Mapping[str, Any],
    *,
    worked_at: int,
) -> ServingReport:
    return ServingReport(
        job_id=placement.job_id,
        start=interval[0],
        end=interval[1],
        engine=metrics.engine,
        gpus=placement.gpus,
        uuids=placement.uuids,
        running=metrics.running,
        waiting=metrics.waiting,
        deferred=metrics.deferred,
        last_pass=interval[1] - worked_at < metrics.outdated_seconds * SECOND,
        slots=metrics.slots,
        kv_use=metrics.kv_use,
        **values,
    )
