"""A receipt: what one job cost, where its time went, what it and its engines said. Owns the shape; refuses to compute.

Times are Unix seconds, durations seconds, time on GPUs GPU-hours, ratios 0 to 1. Money is in `currency`, None where no
price is known, or more than one currency. What nobody tells is None or empty, never 0.
"""

import msgspec
from msgspec import Struct

from exporter.receipt.reported import Latency, Quality, Rank, Served, Target, Truth


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
    """Of the time it held its GPUs."""
    money: float | None
    evidence: str = ""
    team: str = ""
    watch: str = ""
    fix: str = ""
    nanoseconds: int = 0
    """The same GPU time; of statements exactly what the ledgers hold, and what is in nobody's books."""


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
    gau: float | None = None
    """0: it never ran a kernel there."""


class Failure(Struct, frozen=True, kw_only=True):
    """What went wrong, how often, and what it cost. No GPU-hour is in two of them."""

    kind: str
    """hung, zombie, unavailable, xid, restart, rework."""
    times: float | None
    """None: nobody counts it. Of rework: steps."""
    leak: str = ""
    """Where its cost is booked; empty: it has none of its own."""
    gpu_hours: float | None = None
    money: float | None = None


class WhatIf(Struct, frozen=True, kw_only=True):
    """What a change would gain, in one of three ways: fewer GPUs, sooner, or more work.

    They are never added, and nor are two changes: each is of the job as it was.
    """

    kind: str
    """right_size, fix_leak, raise_emfu."""
    of: str
    """The MIG slice, or GPUs to leave out; the leak; the eMFU wanted."""
    gpu_hours: float
    """That the same work would not have needed."""
    share: float
    """Of those it held."""
    money: float | None
    """For them."""
    fewer_gpus: float
    """The same work in the same time."""
    sooner: float | None
    """The same work with the same GPUs: seconds; None: it would not be done sooner."""
    gained_gpus: float | None
    """Or the same GPUs for the same time, and more work: that of so many GPUs at their peak."""
    gained_money: float | None
    """What so many GPUs cost for that time."""


class Moment(Struct, frozen=True, kw_only=True):
    """A part of a job's course, on all nodes that tell it."""

    start: float
    """Seconds since the job's start."""
    end: float
    gpus: float
    """Held, on average."""
    coverage: float | None
    gau: float | None
    ectr: float | None
    floor: float | None
    """Useful of what was seen."""
    watts: float | None
    """Of all its GPUs."""


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
    source: str = "Prometheus"
    """Who told it: Prometheus, stores, nodes."""
    simulated: bool = False
    """Any part of it is of a simulated node."""
    failures: tuple[Failure, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    energy_useful: float | None = None
    """Share of the energy that went into useful time."""
    co2_kg: float | None = None
    """None: nobody says how much a kilowatt-hour is."""
    expected_nodes: int = 0
    """Of the whole job; 0: not told."""
    expected_gpus: int = 0
    """By the job's own word; 0: not told."""
    fitting: str = ""
    """The smallest MIG slice that would have held it."""
    unneeded_gpu_hours: float = 0.0
    """Beyond that slice, since it was known."""
    course: tuple[Moment, ...] = ()
    """How it went, in pieces that follow one another."""

    def json(self) -> bytes:
        """For programs."""
        return msgspec.json.encode(self)

    @property
    def losses(self) -> tuple[Part, ...]:
        """Leaks alone."""
        return tuple(part for part in self.parts if part.layer in {"gau", "ectr", "emfu"})

    @property
    def work(self) -> float | None:
        """Its useful work, as that of so many GPUs at their peak for the same time."""
        return None if self.layers.product is None else self.layers.product * self.gpus

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


__all__ = [
    "Failure",
    "Latency",
    "Layers",
    "Moment",
    "Node",
    "Part",
    "Quality",
    "Rank",
    "Receipt",
    "Served",
    "Target",
    "Truth",
    "WhatIf",
    "When",
    "Who",
]
