"""A receipt: what one job cost, where its time went, what it and its engines said. Owns the shape; refuses to compute.

Times are Unix seconds, durations seconds, time on GPUs GPU-hours, ratios 0 to 1. Money is in `currency`, None where no
price is known, or more than one currency. What nobody tells is None or empty, never 0.
"""

import msgspec
from msgspec import Struct


class Who(Struct, frozen=True, kw_only=True):
    """Whose job it is."""

    job_id: str
    cluster: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    team: str = ""
    partition: str = ""
    namespace: str = ""
    workload_class: str = ""


class When(Struct, frozen=True, kw_only=True):
    """From its first GPU to the last sample in which it had one."""

    start: float
    end: float
    running: bool

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start


class Layers(Struct, frozen=True, kw_only=True):
    """Where the denominator is 0 a ratio is None, and the product 0 (accounting, section 1)."""

    gau: float | None
    ectr: float | None
    emfu: float | None
    product: float | None
    floor: float | None
    """The same with all unresolved time lost."""


class Part(Struct, frozen=True, kw_only=True):
    """One line of the waterfall: a leak, or useful, unresolved, unobserved."""

    name: str
    layer: str
    gpu_hours: float
    share: float
    """Of the paid time that daemons counted."""
    money: float | None
    evidence: str = ""
    team: str = ""
    watch: str = ""
    fix: str = ""


class Node(Struct, frozen=True, kw_only=True):
    """One node's part."""

    name: str
    gpus: float
    gpu_hours: float
    product: float | None
    worst: str
    """The leak that took most; empty: none took anything."""
    worst_share: float
    unseen_gpu_hours: float = 0.0
    """Held, and in nobody's books."""


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


class Receipt(Struct, frozen=True, kw_only=True):
    """All of it."""

    who: Who
    when: When
    nodes: tuple[Node, ...]
    """The worst first."""
    models: tuple[str, ...]
    gpus: float
    gpu_hours: float
    """Held: what daemons counted, and what was in nobody's books."""
    seen_gpu_hours: float
    """What daemons counted."""
    coverage: float | None
    """Share of the time held that was observed."""
    currency: str
    """Empty: no price is known."""
    money: float | None
    """For `gpu_hours`."""
    energy_kwh: float | None
    layers: Layers
    parts: tuple[Part, ...]
    """Losses, the largest first; then useful, unresolved, unobserved. Those that are 0 are left out."""
    evidence: dict[str, float]
    """Share of the loss by how it is known."""
    ofu: float | None
    """Share of the dense tensor peak, by the hardware."""
    activity: dict[str, float]
    """10th, 50th and 90th percentile of engine activity in five minutes, on average."""
    activity_deviation: float | None
    truth: Truth | None
    served: Served | None
    ranks: tuple[Rank, ...]
    """The slowest first."""
    unseen: tuple[str, ...]
    """What could not be seen, in sentences."""

    def json(self) -> bytes:
        """For programs."""
        return msgspec.json.encode(self)

    @property
    def losses(self) -> tuple[Part, ...]:
        """Leaks alone."""
        return tuple(part for part in self.parts if part.layer in {"gau", "ectr", "emfu"})

    @property
    def unit(self) -> str:
        """What costs are in."""
        return self.currency or "GPU-hours"

    @property
    def cost(self) -> float:
        """Of the time it held its GPUs, in money or GPU-hours."""
        return self.gpu_hours if self.money is None else self.money

    @property
    def per_hour(self) -> float:
        """What it costs an hour, in money or GPU-hours."""
        return self.cost / self.gpu_hours * self.gpus if self.gpu_hours else 0.0
