"""Derives loss shares and a serving job's totals from a serving engine's counts and gauges."""

from msgspec import Struct, field

from exporter.core.model import PPM, SECOND, Latency, ServingReport
from exporter.core.policy import Policy

_FRESH_FOR = 60 * SECOND
"""Gauges of a replica are dropped when its last report is older."""
TOKEN_KINDS = ("prompt", "cached", "generated", "recomputed", "drafted", "accepted")
"""Token counts of `ServingReport`, without the suffix `_tokens`."""


class ServingShares(Struct, frozen=True):
    """Loss shares from an engine's last report, applied until the next; ppm of whatever the pool holds."""

    no_demand: bool = False
    """No request was running, queued or finished."""
    demand: bool = False
    """Tokens were computed, or requests are counted by gauges that are up to date."""
    past_demand: bool = False
    """No token was computed, and requests are counted only by gauges of an earlier forward pass."""
    kv_full: bool = False
    """Requests queue because the KV cache is full."""
    empty_slots: int = 0
    """Share of empty batch slots while requests queue and the KV cache has room."""
    prefill_slowdown: int = 0
    """Share of the inter-token latency that concurrent prefills added."""
    rejected_drafts: int = 0
    """Rejected draft tokens over computed tokens."""
    recomputed: int = 0
    """Tokens recomputed after eviction over computed tokens."""
    no_drafts: bool = False
    """Tokens were generated without speculative decoding."""


def serving_shares(report: ServingReport, policy: Policy, *, queued: bool = True) -> ServingShares:
    """Loss shares of one report. `queued`: requests were queued at the report before it, too."""
    waiting, generated, queue = report.waiting or 0.0, report.generated_tokens or 0.0, queued_requests(report)
    full = queue > 0 and (report.kv_use or 0.0) >= policy.kv_full_share
    served, counted = bool(generated or report.prompt_tokens), bool(report.running or waiting)
    computed = computed_tokens(report)
    drafted, accepted = report.drafted_tokens or 0.0, report.accepted_tokens or 0.0
    return ServingShares(
        no_demand=report.running == 0 == waiting and not served,
        demand=served or (counted and not report.last_pass),
        past_demand=counted and report.last_pass and not served,
        kv_full=full,
        empty_slots=0 if full or not queue or not queued else _empty_slots(report.slots, report.running),
        prefill_slowdown=_prefill_slowdown(report),
        rejected_drafts=_ppm(drafted - accepted, computed),
        recomputed=_ppm(report.recomputed_tokens or 0.0, computed),
        no_drafts=generated > 0 and not drafted,
    )


def queued_requests(report: ServingReport) -> float:
    """Requests that could join the batch."""
    return max(0.0, (report.waiting or 0.0) - (report.deferred or 0.0))


def computed_tokens(report: ServingReport) -> float:
    """Tokens computed: prompt tokens, draft tokens, and one more per sequence and forward pass."""
    drafted, accepted = report.drafted_tokens or 0.0, report.accepted_tokens or 0.0
    plain = max(0.0, (report.generated_tokens or 0.0) - accepted)
    return (report.prompt_tokens or 0.0) + drafted + plain


def _empty_slots(slots: float | None, running: float | None) -> int:
    if not slots or running is None:
        return 0
    return round(max(0.0, 1.0 - running / slots) * PPM)


def _prefill_slowdown(report: ServingReport) -> int:
    """0 without concurrent prefills."""
    observed, baseline = report.inter_token_seconds, report.calm_inter_token_seconds
    if not observed or not baseline or not report.prompt_tokens:
        return 0
    return round(max(0.0, 1.0 - baseline / observed) * PPM)


def _ppm(some: float, whole: float) -> int:
    return round(min(1.0, max(0.0, some) / whole) * PPM) if whole > 0 else 0


class ServingTotals(Struct, array_like=True, eq=False):
    """Totals of a serving job over all its replicas on this node; stored in checkpoints."""

    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOKEN_KINDS, 0.0))
    preemptions: float = 0.0
    undrafted: int = 0
    """GPU-nanoseconds that speculative decoding might save."""


class ServingStats(ServingTotals, eq=False):
    """The totals, with the latest report of each replica."""

    latest: dict[tuple[str, ...], ServingReport] = {}
    """Latest report, by the replica's GPUs."""
    latencies: dict[tuple[str, ...], tuple[int, tuple[Latency, ...]]] = {}
    """Time and values of the latest latencies, by the replica's GPUs."""

    def add(self, report: ServingReport) -> None:
        """Add one report of one replica."""
        self.latest[report.uuids] = report
        if report.latencies:
            self.latencies[report.uuids] = report.end, report.latencies
        for kind in TOKEN_KINDS:
            self.tokens[kind] += getattr(report, f"{kind}_tokens") or 0.0
        self.preemptions += report.preemptions or 0.0


class ServingView(Struct, frozen=True):
    """Totals and current gauges of a serving job, in a snapshot."""

    engine: str
    tokens: tuple[tuple[str, float], ...]
    preemptions: float
    running: float | None
    waiting: float | None
    fill: float | None
    """Batch fill: running requests over slots, 0-1."""
    kv_use: float | None
    """KV cache use of the fullest replica, 0-1."""
    acceptance: float | None
    """Accepted over drafted tokens, in the latest interval."""
    per_pass: float | None
    """Tokens generated per forward pass and sequence."""
    latencies: tuple[Latency, ...]
    """Latencies of the slowest replica, by kind."""
    bytes_per_second: float | None
    """Device memory traffic per GPU, by the engine's estimate."""
    undrafted: int


def serving_view(stats: ServingStats, at: int) -> ServingView:
    """Build the view at `at`, without outdated gauges."""
    live = [report for report in stats.latest.values() if at - report.end <= _FRESH_FOR]
    drafted, accepted = _sum_field(live, "drafted_tokens"), _sum_field(live, "accepted_tokens")
    slots, running = _sum_field([report for report in live if report.slots], "slots"), _sum_field(live, "running")
    return ServingView(
        engine=next((report.engine for report in stats.latest.values()), ""),
        tokens=tuple(stats.tokens.items()),
        preemptions=stats.preemptions,
        running=running,
        waiting=_sum_field(live, "waiting"),
        fill=min(1.0, running / slots) if running is not None and slots else None,
        kv_use=max((report.kv_use for report in live if report.kv_use is not None), default=None),
        acceptance=min(1.0, accepted / drafted) if drafted and accepted is not None else None,
        per_pass=_tokens_per_pass(live),
        latencies=_slowest_latencies([taken for end, taken in stats.latencies.values() if at - end <= _FRESH_FOR]),
        bytes_per_second=_bytes_per_second(live),
        undrafted=stats.undrafted,
    )


def _sum_field(live: list[ServingReport], name: str) -> float | None:
    known = [value for report in live if (value := getattr(report, name)) is not None]
    return sum(known) if known else None


def _tokens_per_pass(live: list[ServingReport]) -> float | None:
    """Tokens per pass and sequence: each pass yields one token plus the accepted drafts; 1 without drafts."""
    generated, accepted = _sum_field(live, "generated_tokens"), _sum_field(live, "accepted_tokens") or 0.0
    if not generated:
        return None
    return generated / max(generated - accepted, 1.0)


def _slowest_latencies(replicas: list[tuple[Latency, ...]]) -> tuple[Latency, ...]:
    worst: dict[str, Latency] = {}
    for latency in (each for latencies in replicas for each in latencies):
        known = worst.get(latency.kind)
        if known is None or latency.p99 > known.p99:
            worst[latency.kind] = latency
    return tuple(worst[kind] for kind in sorted(worst))


def _bytes_per_second(live: list[ServingReport]) -> float | None:
    known = [report for report in live if report.bytes is not None]
    seconds = sum(report.end - report.start for report in known) / SECOND
    return sum(report.bytes or 0.0 for report in known) / seconds if seconds else None
