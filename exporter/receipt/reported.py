"""What a job and its engines said of themselves, in its receipt. Owns these shapes; refuses to compute.

Durations are seconds, ratios 0 to 1. Costs are in money, or GPU-hours where there is no price.
"""

from msgspec import Struct


class Rank(Struct, frozen=True, kw_only=True):
    """How long a step keeps a rank busy, without waiting for others; the mean of the run."""

    rank: str
    node: str
    busy_seconds: float
    of_median: float


class Quality(Struct, frozen=True, kw_only=True):
    """A figure of what the model is good for."""

    name: str
    start: float
    last: float
    best: float
    rises: bool
    """More is better: as the target says, else as it went."""
    target: float | None
    gained: float
    """Since the start, in the direction that is better."""
    cost_per_unit: float | None
    """In money, or GPU-hours; None where nothing was gained."""
    track: tuple[tuple[float, float], ...] = ()
    """(seconds since the start, value) where it changed."""


class Target(Struct, frozen=True, kw_only=True):
    """When the stated target was first reached."""

    seconds: float
    cost: float
    """In money, or GPU-hours."""


class Truth(Struct, frozen=True, kw_only=True):
    """What the job itself reported. Costs are in money, or GPU-hours where there is no price."""

    told_share: float
    """Of its GPU time, what reports speak of."""
    mfu: float | None = None
    hfu: float | None = None
    gap: float | None = None
    goodput: float | None = None
    phases: dict[str, float] = {}
    """Share of the run by phase."""
    progress: float | None = None
    step: float | None = None
    steps: float | None = None
    rework_steps: float | None = None
    tokens: float | None = None
    """Of the GPUs that reports speak of."""
    tokens_per_gpu_second: float | None = None
    tokens_per_second: float | None = None
    """Of all its GPUs."""
    samples: float | None = None
    samples_per_gpu_second: float | None = None
    padding: float | None = None
    """Share of tokens."""
    checkpoints: float | None = None
    checkpoint_seconds: float | None = None
    """Each."""
    checkpoint_gpu_hours: float = 0.0
    checkpoint_money: float | None = None
    restarts: float | None = None
    recovery_seconds: float | None = None
    """Each, on average."""
    bubble: float | None = None
    loss: float | None = None
    loss_spread: float | None = None
    loss_events: dict[str, float] = {}
    lost_bytes_per_second: float | None = None
    """Of each GPU, because tensor-parallel groups are larger than what NVLink joins."""
    cost_per_step: float | None = None
    cost_per_token: float | None = None
    cost_per_sample: float | None = None
    tokens_per_cost: float | None = None
    qualities: tuple[Quality, ...] = ()
    target: Target | None = None


class Latency(Struct, frozen=True, kw_only=True):
    """Of the worst replica: what was told last, and the worst of the run."""

    kind: str
    percentile: str
    last: float | None
    worst: float


class Served(Struct, frozen=True, kw_only=True):
    """What its serving engines said."""

    engines: tuple[str, ...] = ()
    running: float | None = None
    """Requests, of all replicas, on average."""
    waiting: float | None = None
    batch_fill: float | None = None
    kv_mean: float | None = None
    kv_most: float | None = None
    preemptions: float | None = None
    tokens: dict[str, float] = {}
    """By kind."""
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    mbu: float | None = None
    latencies: tuple[Latency, ...] = ()
    generated_per_cost: float | None = None
    advice: dict[str, float] = {}
    """GPU-hours that a change might save; they stay booked where they were lost."""
