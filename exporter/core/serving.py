"""Derives shares of a GPU's time, and the totals of a serving job, from a serving engine's counts and gauges.

Knows no pools: a share is of whatever the pool holds.
"""

from msgspec import Struct, field

from exporter.core.model import PPM, SECOND, Latency, ServingReport
from exporter.core.policy import Policy

_FRESH_FOR = 60 * SECOND
"""Gauges of a replica that has been silent for longer are not shown."""
TOKEN_KINDS = ("prompt", "cached", "generated", "recomputed", "drafted", "accepted")
"""Of tokens, as `Serving` counts them."""


class ServingShares(Struct, frozen=True):
    """What an engine's last word says of the time that follows, ppm."""

    no_demand: bool = False
    """No request ran, queued or ended."""
    kv_full: bool = False
    """Requests queue because the KV cache is full."""
    empty_slots: int = 0
    """Empty slots of the batch, while requests queue and the KV cache has room."""
    prefill_slowdown: int = 0
    """Of the time between two tokens what prefills have added."""
    rejected_drafts: int = 0
    """Draft tokens thrown away, of the tokens computed."""
    recomputed: int = 0
    """Tokens computed a second time after eviction, likewise."""
    no_drafts: bool = False
    """Tokens were generated, and no drafts were used."""


def serving_shares(report: ServingReport, policy: Policy) -> ServingShares:
    """What one interval says of the next."""
    waiting, generated = report.waiting or 0.0, report.generated_tokens or 0.0
    full = waiting > 0 and (report.kv_use or 0.0) >= policy.kv_full_share
    computed = computed_tokens(report)
    drafted, accepted = report.drafted_tokens or 0.0, report.accepted_tokens or 0.0
    return ServingShares(
        no_demand=report.running == 0 == waiting and not generated and not report.prompt_tokens,
        kv_full=full,
        empty_slots=0 if full or not waiting else _empty_slots(report.slots, report.running),
        prefill_slowdown=_prefill_slowdown(report),
        rejected_drafts=_ppm(drafted - accepted, computed),
        recomputed=_ppm(report.recomputed_tokens or 0.0, computed),
        no_drafts=generated > 0 and not drafted,
    )


def computed_tokens(report: ServingReport) -> float:
    """Tokens that went through the model: prompts, drafts, and one more of each sequence at each pass."""
    drafted, accepted = report.drafted_tokens or 0.0, report.accepted_tokens or 0.0
    plain = max(0.0, (report.generated_tokens or 0.0) - accepted)
    return (report.prompt_tokens or 0.0) + drafted + plain


def _empty_slots(slots: float | None, running: float | None) -> int:
    if not slots or running is None:
        return 0
    return round(max(0.0, 1.0 - running / slots) * PPM)


def _prefill_slowdown(report: ServingReport) -> int:
    """Only while prefills run."""
    observed, baseline = report.inter_token_seconds, report.calm_inter_token_seconds
    if not observed or not baseline or not report.prompt_tokens:
        return 0
    return round(max(0.0, 1.0 - baseline / observed) * PPM)


def _ppm(some: float, whole: float) -> int:
    return round(min(1.0, max(0.0, some) / whole) * PPM) if whole > 0 else 0


class ServingTotals(Struct, array_like=True, eq=False):
    """What a checkpoint keeps of a job that serves, of all its replicas on this node."""

    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOKEN_KINDS, 0.0))
    preemptions: float = 0.0
    undrafted: int = 0
    """Nanoseconds that drafts might save."""


class ServingStats(ServingTotals, eq=False):
    """The same, with the latest values of each replica."""

    latest: dict[tuple[str, ...], ServingReport] = {}
    """The latest report, by the replica's GPUs."""
    latencies: dict[tuple[str, ...], tuple[int, tuple[Latency, ...]]] = {}
    """When requests of a replica ended last, and how long those had taken."""

    def add(self, report: ServingReport) -> None:
        """Take in one interval of one replica."""
        self.latest[report.uuids] = report
        if report.latencies:
            self.latencies[report.uuids] = report.end, report.latencies
        for kind in TOKEN_KINDS:
            self.tokens[kind] += getattr(report, f"{kind}_tokens") or 0.0
        self.preemptions += report.preemptions or 0.0


class ServingView(Struct, frozen=True):
    """The same as a snapshot has it."""

    engine: str
    tokens: tuple[tuple[str, float], ...]
    preemptions: float
    running: float | None
    waiting: float | None
    fill: float | None
    """Requests in the batch over its slots, 0-1."""
    kv_use: float | None
    """Of the fullest replica."""
    acceptance: float | None
    """Drafts accepted over drafted, in the latest interval."""
    per_pass: float | None
    """Tokens generated at a forward pass of one sequence."""
    latencies: tuple[Latency, ...]
    """Of the slowest replica, by kind."""
    bytes_per_second: float | None
    """Of one GPU, from and to device memory, by the engine's estimate."""
    undrafted: int


def serving_view(stats: ServingStats, at: int) -> ServingView:
    """The figures; gauges that are no longer fresh are left out."""
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
    """Tokens of a sequence at each pass: 1 without drafts; each pass gives one and those accepted."""
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
