"""Defines the job report, the comparison of two, and the JSON Schema of `report --json` (docs/receipt.schema.json).

Times are Unix seconds, durations seconds, GPU time GPU-hours, ratios 0 to 1; money is in `currency`. A value that no
source reports is None or empty, never 0. The field names are public. Refuses to compute more than properties.
"""

import json

import msgspec
from msgspec import Struct

LOSS_LAYERS = ("gau", "ectr", "emfu")
"""Layers of the waterfall in which GPU time is lost, in the order in which their ratios are multiplied."""


class RankSummary(Struct, frozen=True, kw_only=True):
    """How long a step keeps a rank busy, without waiting for others; the mean of the run."""

    rank: str
    node: str
    busy_seconds: float
    of_median: float


class QualityMetric(Struct, frozen=True, kw_only=True):
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


class TargetReached(Struct, frozen=True, kw_only=True):
    """When the stated target was first reached."""

    seconds: float
    cost: float
    """In money, or GPU-hours."""


class TrainingSummary(Struct, frozen=True, kw_only=True):
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
    qualities: tuple[QualityMetric, ...] = ()
    target: TargetReached | None = None


class LatencySummary(Struct, frozen=True, kw_only=True):
    """Of the worst replica: what was told last, and the worst of the run."""

    kind: str
    percentile: str
    last: float | None
    worst: float


class ServingSummary(Struct, frozen=True, kw_only=True):
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
    latencies: tuple[LatencySummary, ...] = ()
    generated_per_cost: float | None = None
    advice: dict[str, float] = {}
    """GPU-hours that a change might save; they stay booked where they were lost."""


class JobIdentity(Struct, frozen=True, kw_only=True):
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


class RunPeriod(Struct, frozen=True, kw_only=True):
    """From its first GPU to the last sample in which it had one."""

    start: float
    end: float
    running: bool

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start


class LayerRatios(Struct, frozen=True, kw_only=True):
    """Where the denominator is 0 a ratio is None, and the product 0 (accounting, section 1)."""

    gau: float | None
    ectr: float | None
    emfu: float | None
    product: float | None
    floor: float | None
    """The same with all unresolved time lost."""


class WaterfallPart(Struct, frozen=True, kw_only=True):
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


class NodeShare(Struct, frozen=True, kw_only=True):
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


class FailureCost(Struct, frozen=True, kw_only=True):
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


class CourseInterval(Struct, frozen=True, kw_only=True):
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


class JobReport(Struct, frozen=True, kw_only=True):
    """All of it."""

    who: JobIdentity
    when: RunPeriod
    nodes: tuple[NodeShare, ...]
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
    layers: LayerRatios
    parts: tuple[WaterfallPart, ...]
    """Losses, the largest first; then useful, unresolved, unobserved. Those that are 0 are left out."""
    evidence: dict[str, float]
    """Share of the loss by how it is known."""
    ofu: float | None
    """Share of the dense tensor peak, by the hardware."""
    activity: dict[str, float]
    """10th, 50th and 90th percentile of engine activity in five minutes, on average."""
    activity_deviation: float | None
    truth: TrainingSummary | None
    served: ServingSummary | None
    ranks: tuple[RankSummary, ...]
    """The slowest first."""
    unseen: tuple[str, ...]
    """What could not be seen, in sentences."""
    source: str = "Prometheus"
    """Who told it: Prometheus, stores, nodes."""
    simulated: bool = False
    """Any part of it is of a simulated node."""
    failures: tuple[FailureCost, ...] = ()
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
    course: tuple[CourseInterval, ...] = ()
    """How it went, in pieces that follow one another."""

    def json(self) -> bytes:
        """For programs."""
        return msgspec.json.encode(self)

    @property
    def losses(self) -> tuple[WaterfallPart, ...]:
        """Leaks alone."""
        return tuple(part for part in self.parts if part.layer in LOSS_LAYERS)

    @property
    def equivalent_gpus(self) -> float | None:
        """Its useful work, as that of so many GPUs at their peak for the same time."""
        return None if self.layers.product is None else self.layers.product * self.gpus

    @property
    def cost_unit(self) -> str:
        """What costs are in."""
        return self.currency or "GPU-hours"

    @property
    def cost(self) -> float:
        """Of the time it held its GPUs, in money or GPU-hours."""
        return self.gpu_hours if self.money is None else self.money

    @property
    def cost_per_hour(self) -> float:
        """What it costs an hour, in money or GPU-hours."""
        return self.cost / self.gpu_hours * self.gpus if self.gpu_hours else 0.0


def report_schema_text() -> str:
    """Give the same as `docs/receipt.schema.json` has it."""
    (report, comparison), components = msgspec.json.schema_components(
        [JobReport, ReportComparison], ref_template="#/$defs/{name}"
    )
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What `gpu-efficiency report JOBID --json` and `report --compare JOBID JOBID --json` say",
        "anyOf": [report, comparison],
        "$defs": components,
    }
    return json.dumps(schema, indent=2) + "\n"


class ReportError(Exception):
    """No receipt can be made of what is stored; the message says why and what to do."""


class LeakDifference(Struct, frozen=True, kw_only=True):
    """Share of a job's time that a leak took, or that was useful, in each."""

    name: str
    layer: str
    first: float
    second: float

    @property
    def change(self) -> float:
        """How much more it is in the second."""
        return self.second - self.first


class QualityReached(Struct, frozen=True, kw_only=True):
    """When each first had a quality that both have reached, since its own start; cost in its own unit."""

    name: str
    quality: float
    seconds: tuple[float, float]
    cost: tuple[float, float]


class ReportComparison(Struct, frozen=True, kw_only=True):
    """Two jobs."""

    first: JobReport
    second: JobReport
    of: str
    """What throughput counts: tokens, samples; empty: they have none in common."""
    per_gpu: tuple[float, float] | None
    """Throughput a second and GPU."""
    per_cost: tuple[float, float] | None
    """Throughput per unit of money, or per GPU-hour; None where their units differ."""
    scaling: float | None
    """None: they are of one size, or have no throughput in common."""
    differences: tuple[LeakDifference, ...]
    """The largest first."""
    same: tuple[QualityReached, ...]

    def json(self) -> bytes:
        """For programs."""
        return msgspec.json.encode(self)
