"""What a serving engine says, as shares of a GPU's time, and the figures of a job that serves.

Owns what follows from an engine's counts and gauges. Refuses pools and pouring: a share is of whatever the pool holds.
"""

from msgspec import Struct

from exporter.core.model import PPM, SECOND, Latency, Serving
from exporter.core.policy import Policy

_FRESH = 60 * SECOND
"""Gauges of a replica that has been silent for longer are not shown."""
KINDS = ("prompt", "cached", "generated", "recomputed", "drafted", "accepted")
"""Of tokens, as `Serving` counts them."""


class Shares(Struct, frozen=True):
    """What an engine's last word says of the time that follows, ppm."""

    no_demand: bool = False
    """No request ran, queued or ended."""
    kv_full: bool = False
    """Requests queue because the KV cache is full."""
    empty: int = 0
    """Empty slots of the batch, while requests queue and the KV cache has room."""
    stretched: int = 0
    """Of the time between two tokens what prefills have added."""
    rejected: int = 0
    """Draft tokens thrown away, of the tokens computed."""
    again: int = 0
    """Tokens computed a second time after eviction, likewise."""
    undrafted: bool = False
    """Tokens were generated, and no drafts were used."""


def shares_of(serving: Serving, policy: Policy) -> Shares:
    """What one interval says of the next."""
    waiting, generated = serving.waiting or 0.0, serving.generated_tokens or 0.0
    full = waiting > 0 and (serving.kv_use or 0.0) >= policy.kv_full_share
    computed = computed_tokens(serving)
    drafted, accepted = serving.drafted_tokens or 0.0, serving.accepted_tokens or 0.0
    return Shares(
        no_demand=serving.running == 0 == waiting and not generated and not serving.prompt_tokens,
        kv_full=full,
        empty=0 if full or not waiting else _share(serving.slots, serving.running),
        stretched=_stretched(serving),
        rejected=_part(drafted - accepted, computed),
        again=_part(serving.recomputed_tokens or 0.0, computed),
        undrafted=generated > 0 and not drafted,
    )


def computed_tokens(serving: Serving) -> float:
    """Tokens that went through the model: prompts, drafts, and one more of each sequence at each pass."""
    drafted, accepted = serving.drafted_tokens or 0.0, serving.accepted_tokens or 0.0
    plain = max(0.0, (serving.generated_tokens or 0.0) - accepted)
    return (serving.prompt_tokens or 0.0) + drafted + plain


def _share(slots: float | None, running: float | None) -> int:
    if not slots or running is None:
        return 0
    return round(max(0.0, 1.0 - running / slots) * PPM)


def _stretched(serving: Serving) -> int:
    """Only while prefills run."""
    observed, calm = serving.inter_token_seconds, serving.calm_inter_token_seconds
    if not observed or not calm or not serving.prompt_tokens:
        return 0
    return round(max(0.0, 1.0 - calm / observed) * PPM)


def _part(some: float, whole: float) -> int:
    return round(min(1.0, max(0.0, some) / whole) * PPM) if whole > 0 else 0


class Service:
    """Figures of a job that serves, of all its replicas on this node."""

    __slots__ = ("last", "latencies", "preemptions", "tokens", "undrafted")

    def __init__(self) -> None:
        self.last: dict[tuple[str, ...], Serving] = {}
        """The latest word, by the replica's GPUs."""
        self.latencies: dict[tuple[str, ...], tuple[int, tuple[Latency, ...]]] = {}
        """When requests of a replica ended last, and how long those had taken."""
        self.tokens = dict.fromkeys(KINDS, 0.0)
        self.preemptions = 0.0
        self.undrafted = 0
        """Nanoseconds that drafts might save."""

    def hear(self, serving: Serving) -> None:
        """Take in one interval of one replica."""
        self.last[serving.uuids] = serving
        if serving.latencies:
            self.latencies[serving.uuids] = serving.end, serving.latencies
        for kind in KINDS:
            self.tokens[kind] += getattr(serving, f"{kind}_tokens") or 0.0
        self.preemptions += serving.preemptions or 0.0


class ServiceView(Struct, frozen=True):
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


def serve_view(service: Service, at: int) -> ServiceView:
    """The figures; gauges that are no longer fresh are left out."""
    live = [one for one in service.last.values() if at - one.end <= _FRESH]
    drafted, accepted = _sum(live, "drafted_tokens"), _sum(live, "accepted_tokens")
    slots, running = _sum([one for one in live if one.slots], "slots"), _sum(live, "running")
    return ServiceView(
        engine=next((one.engine for one in service.last.values()), ""),
        tokens=tuple(service.tokens.items()),
        preemptions=service.preemptions,
        running=running,
        waiting=_sum(live, "waiting"),
        fill=min(1.0, running / slots) if running is not None and slots else None,
        kv_use=max((one.kv_use for one in live if one.kv_use is not None), default=None),
        acceptance=min(1.0, accepted / drafted) if drafted and accepted is not None else None,
        per_pass=_per_pass(live),
        latencies=_slowest([taken for end, taken in service.latencies.values() if at - end <= _FRESH]),
        bytes_per_second=_bytes(live),
        undrafted=service.undrafted,
    )


def _sum(live: list[Serving], name: str) -> float | None:
    told = [value for one in live if (value := getattr(one, name)) is not None]
    return sum(told) if told else None


def _per_pass(live: list[Serving]) -> float | None:
    """Tokens of a sequence at each pass: 1 without drafts; each pass gives one and those accepted."""
    generated, accepted = _sum(live, "generated_tokens"), _sum(live, "accepted_tokens") or 0.0
    if not generated:
        return None
    return generated / max(generated - accepted, 1.0)


def _slowest(replicas: list[tuple[Latency, ...]]) -> tuple[Latency, ...]:
    worst: dict[str, Latency] = {}
    for latency in (each for latencies in replicas for each in latencies):
        known = worst.get(latency.kind)
        if known is None or latency.p99 > known.p99:
            worst[latency.kind] = latency
    return tuple(worst[kind] for kind in sorted(worst))


def _bytes(live: list[Serving]) -> float | None:
    told = [one for one in live if one.bytes is not None]
    seconds = sum(one.end - one.start for one in told) / SECOND
    return sum(one.bytes or 0.0 for one in told) / seconds if seconds else None
