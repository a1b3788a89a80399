"""Defines the job report and the comparison of two, as `report --json` prints them (docs/receipt.schema.json).

Times are Unix seconds, durations seconds, GPU time GPU-hours, ratios 0 to 1; money is in `currency`, and costs are in
money, or in GPU-hours if there is no price. A value that no source reports is None or empty, never 0. The field names
are public.
"""

import msgspec
from msgspec import UNSET, Struct, UnsetType

from exporter.core.hangs import HUNG

LOSS_LAYERS = ("gau", "ectr", "emfu")
"""Layers of the waterfall in which GPU time is lost, in the order in which their ratios are multiplied."""


class RankSummary(Struct, frozen=True, kw_only=True):
    """Mean time for which a step keeps a rank busy, without the time it waits for other ranks."""

    rank: str
    node: str
    busy_seconds: float
    of_median: float


class QualityMetric(Struct, frozen=True, kw_only=True):
    """A quality metric of the model, such as an evaluation score, over the run."""

    name: str
    start: float
    last: float
    best: float
    rises: bool
    """Whether higher is better: derived from the target, or from the trend if there is none."""
    target: float | None
    gained: float
    """Improvement since the start."""
    cost_per_unit: float | None
    """Cost of one unit of improvement; None if there was none."""
    track: tuple[tuple[float, float], ...] = ()
    """Points (seconds since the job's start, value) at which the value changed."""


class TargetReached(Struct, frozen=True, kw_only=True):
    """When the stated target was first reached."""

    seconds: float
    cost: float
    """Cost of the job until then."""


class TrainingSummary(Struct, frozen=True, kw_only=True):
    """What the job itself reported. Costs are in money, or GPU-hours if there is no price."""

    told_share: float
    """Share of the job's GPU time that its reports cover."""
    mfu: float | None = None
    hfu: float | None = None
    gap: float | None = None
    goodput: float | None = None
    phases: dict[str, float] = {}
    """Share of the run's time by phase."""
    progress: float | None = None
    step: float | None = None
    steps: float | None = None
    rework_steps: float | None = None
    tokens: float | None = None
    """Tokens on the GPUs that reports cover."""
    tokens_per_gpu_second: float | None = None
    tokens_per_second: float | None = None
    """Throughput of all GPUs of the job."""
    samples: float | None = None
    samples_per_gpu_second: float | None = None
    padding: float | None = None
    """Share of tokens that are padding."""
    checkpoints: float | None = None
    checkpoint_seconds: float | None = None
    """Mean duration of a checkpoint."""
    checkpoint_gpu_hours: float = 0.0
    checkpoint_money: float | None = None
    restarts: float | None = None
    recovery_seconds: float | None = None
    """Mean recovery time after a restart."""
    bubble: float | None = None
    loss: float | None = None
    loss_spread: float | None = None
    loss_events: dict[str, float] = {}
    lost_bytes_per_second: float | None = None
    """Bandwidth that each GPU loses because tensor-parallel groups are larger than an NVLink domain."""
    cost_per_step: float | None = None
    cost_per_token: float | None = None
    cost_per_sample: float | None = None
    tokens_per_cost: float | None = None
    qualities: tuple[QualityMetric, ...] = ()
    target: TargetReached | None = None


class LatencySummary(Struct, frozen=True, kw_only=True):
    """Latency of the slowest replica in seconds: the last value, and the highest of the run."""

    kind: str
    percentile: str
    last: float | None
    worst: float


class ServingSummary(Struct, frozen=True, kw_only=True):
    """What the job's inference engines reported."""

    engines: tuple[str, ...] = ()
    running: float | None = None
    """Mean number of running requests of all replicas together."""
    waiting: float | None = None
    batch_fill: float | None = None
    kv_mean: float | None = None
    kv_most: float | None = None
    preemptions: float | None = None
    tokens: dict[str, float] = {}
    """Tokens by kind."""
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    mbu: float | None = None
    latencies: tuple[LatencySummary, ...] = ()
    generated_per_cost: float | None = None
    advice: dict[str, float] = {}
    """GPU-hours that each suggested change might save. They are also part of the losses."""


class CollectiveSummary(Struct, frozen=True, kw_only=True):
    """One kind of collective or point-to-point transfer, over all processes of the job."""

    name: str
    """NCCL's name of the function."""
    calls: int
    seconds: float
    """Execution time on the GPUs, which may overlap with each other and with computation."""
    bytes: float
    """Message bytes."""
    bus_bytes_per_second: float | None = None
    """Bus bandwidth by NCCL's convention, mean of the last minutes on each node."""


class WaitedForRank(Struct, frozen=True, kw_only=True):
    """The rank that the others wait for in collectives."""

    rank: str
    node: str
    behind: float
    """By how much less of the time it communicates than the median of the others, 0 to 1."""


class CommunicationSummary(Struct, frozen=True, kw_only=True):
    """What NCCL's profiler plugins timed of the job's communication."""

    sources: tuple[str, ...]
    """inspector or comma."""
    share: float | None
    """Share of its processes' time in which a collective executed, overlap with computation included."""
    collectives: tuple[CollectiveSummary, ...]
    link_bytes_per_second: float | None = None
    """Bandwidth of a GPU's NVLinks in one direction, for a job on one node."""
    waited_for: WaitedForRank | None = None


class JobIdentity(Struct, frozen=True, kw_only=True):
    """The job's ID, name and owner."""

    job_id: str
    display_id: str = ""
    """The id under which users know the job, as squeue and sacct show it: 6_1 in an array, 7+0 in a heterogeneous job,
    else `job_id`."""
    cluster: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    team: str = ""
    partition: str = ""
    namespace: str = ""
    workload_class: str = ""

    @property
    def shown_id(self) -> str:
        """The id to show to users."""
        return self.display_id or self.job_id


class RunPeriod(Struct, frozen=True, kw_only=True):
    """Time from the job's first GPU to the last sample in which it had one."""

    start: float
    end: float
    running: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class LayerRatios(Struct, frozen=True, kw_only=True):
    """Ratios of the three layers. A ratio is None if its denominator is 0 (docs/accounting.md)."""

    gau: float | None
    ectr: float | None
    emfu: float | None
    product: float | None
    floor: float | None
    """The product if all unresolved time were lost."""


class WaterfallPart(Struct, frozen=True, kw_only=True):
    """One line of the waterfall: a leak, or useful, unresolved, unobserved."""

    name: str
    layer: str
    gpu_hours: float
    share: float
    """Share of the time for which GPUs were held."""
    money: float | None
    evidence: str = ""
    team: str = ""
    watch: str = ""
    fix: str = ""
    nanoseconds: int = 0
    """The same GPU time; exact if the report is built from job records."""
    low_gpu_hours: float | UnsetType = UNSET
    high_gpu_hours: float | UnsetType = UNSET
    """The least and the most that it may be; absent if it rests on no estimate, or the source has no bounds."""
    energy_kwh: float | UnsetType = UNSET
    """Energy used in this time. Absent if the source has only the sum of all."""
    energy_money: float | UnsetType = UNSET
    """Its price; no part of `money`. Absent as that of the sum is."""
    co2_kg: float | UnsetType = UNSET


class NodeShare(Struct, frozen=True, kw_only=True):
    """One node's part of the job."""

    name: str
    gpus: float
    gpu_hours: float
    product: float | None
    worst: str
    """The largest leak; empty if nothing was lost."""
    worst_share: float
    unseen_gpu_hours: float = 0.0
    """Time that the job held GPUs and no daemon counted."""
    gau: float | None = None
    """0 if the job never ran a kernel on this node."""


class FailureCost(Struct, frozen=True, kw_only=True):
    """A kind of failure, how often it happened, and what it cost. No GPU-hour is counted in two of them."""

    kind: str
    """hung, zombie, unavailable, xid, restart or rework."""
    times: float | None
    """Number of failures; None if it is not counted. For rework: the number of steps."""
    leak: str = ""
    """The leak in which its cost is counted; empty if it has no cost of its own."""
    gpu_hours: float | None = None
    money: float | None = None


class NodeHang(Struct, frozen=True, kw_only=True):
    """A node's part of a hang."""

    node: str
    gpus: float
    """Number of GPUs that hang."""
    text: str
    """Which of them spin and which the others wait for, as far as that is known."""


class OngoingHang(Struct, frozen=True, kw_only=True):
    """A hang that lasts at the end of the report."""

    since: float
    """Unix seconds at which the first GPU began to spin."""
    seconds: float
    """From then to the end of the report."""
    nodes: tuple[NodeHang, ...]
    do: str
    """What to do."""
    gpu_hours: float | None = None
    """GPU-hours since then; None if the source is Prometheus, as is the next."""
    unconfirmed_gpu_hours: float | None = None
    """Those before the hang was confirmed, which are booked as other leaks."""


class WhatIf(Struct, frozen=True, kw_only=True):
    """What a change would gain, in one of three ways: fewer GPUs, less time, or more work.

    The three are alternatives, and so are two changes: each is an estimate of the job as it ran, so never add them.
    """

    kind: str
    """right_size, fix_leak or raise_emfu."""
    of: str
    """The MIG slice or the nodes to leave out, the leak, or the target eMFU."""
    gpu_hours: float
    """GPU-hours that the same work would not have needed."""
    share: float
    """Their share of the GPU-hours held."""
    money: float | None
    """Their price."""
    fewer_gpus: float
    """Number of GPUs less for the same work in the same time."""
    sooner: float | None
    """Seconds less for the same work with the same GPUs; None if it would take as long."""
    gained_gpus: float | None
    """Additional work of the same GPUs in the same time, as a number of GPUs at their peak."""
    gained_money: float | None
    """Price of that number of GPUs for that time."""


class CourseInterval(Struct, frozen=True, kw_only=True):
    """A time interval of the job, summed over the nodes that have samples of it."""

    start: float
    """Seconds since the job's start, as is `end`."""
    end: float
    gpus: float
    """Mean number of GPUs held."""
    coverage: float | None
    gau: float | None
    ectr: float | None
    floor: float | None
    """Share of the observed time that was useful."""
    watts: float | None
    """Mean power of all its GPUs."""


class JobReport(Struct, frozen=True, kw_only=True):
    """The report of one job."""

    who: JobIdentity
    when: RunPeriod
    nodes: tuple[NodeShare, ...]
    """Sorted by product, the lowest first."""
    models: tuple[str, ...]
    gpus: float
    gpu_hours: float
    """GPU-hours held: those that daemons counted, and those that no daemon counted."""
    seen_gpu_hours: float
    """GPU-hours that daemons counted."""
    coverage: float | None
    """Share of the time held that was observed."""
    currency: str
    """Empty if no price is known."""
    money: float | None
    """Price of `gpu_hours`."""
    energy_kwh: float | None
    layers: LayerRatios
    parts: tuple[WaterfallPart, ...]
    """Losses, the largest first, then useful, unresolved and unobserved; parts of 0 are left out."""
    evidence: dict[str, float]
    """Share of the loss by kind of evidence."""
    ofu: float | None
    """Share of the dense tensor peak that was delivered, by hardware counters."""
    activity: dict[str, float]
    """Means of the 10th, 50th and 90th percentile of engine activity within five minutes."""
    activity_deviation: float | None
    truth: TrainingSummary | None
    served: ServingSummary | None
    ranks: tuple[RankSummary, ...]
    """Sorted by busy time, the slowest first."""
    unseen: tuple[str, ...]
    """What could not be observed, in sentences."""
    source: str = "Prometheus"
    """Prometheus, stores or nodes."""
    simulated: bool = False
    """Whether any part is from a simulated node."""
    failures: tuple[FailureCost, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    energy_useful: float | None = None
    """Share of the energy that was used in useful time."""
    co2_kg: float | None = None
    """None if the carbon intensity of the electricity is not known."""
    energy_money: float | UnsetType = UNSET
    """Price of the energy; no part of `money`. Absent if the price of a kilowatt-hour is not known."""
    energy_currency: str | UnsetType = UNSET
    """Present with `energy_money`."""
    expected_nodes: int = 0
    """Number of nodes of the whole job; 0 if not known."""
    expected_gpus: int = 0
    """World size that the job reports; 0 if it reports none."""
    fitting: str = ""
    """The smallest MIG slice that would have fitted the job; empty if none."""
    unneeded_gpu_hours: float = 0.0
    """GPU-hours in excess of that slice."""
    course: tuple[CourseInterval, ...] = ()
    """The job over time: consecutive intervals."""
    stalls: dict[str, float] = {}
    """GPU-hours of data_stall and unattributed_stall by what explained them best, the most first: storage, cpu_quota,
    memory, cpu, network."""
    communication: CommunicationSummary | None = None
    """Only in reports from stores or nodes."""
    useful_pipe: str | UnsetType = UNSET
    """fp64 or fp32: the pipe whose activity is its useful work; none: eMFU does not apply; absent: the tensor cores."""
    hang: OngoingHang | UnsetType = UNSET
    """Absent unless the job hangs now."""

    def json(self) -> bytes:
        """Return the report as JSON."""
        return msgspec.json.encode(self)

    @property
    def losses(self) -> tuple[WaterfallPart, ...]:
        """The leaks among `parts`; that of a hang that lasts comes first."""
        losses = (part for part in self.parts if part.layer in LOSS_LAYERS)
        return tuple(sorted(losses, key=lambda part: self.hang is UNSET or part.name != HUNG))

    @property
    def equivalent_gpus(self) -> float | None:
        """The useful work, as a number of GPUs at their peak for the same time."""
        return None if self.layers.product is None else self.layers.product * self.gpus

    @property
    def cost_unit(self) -> str:
        """The unit of costs: the currency, or GPU-hours."""
        return self.currency or "GPU-hours"

    @property
    def cost(self) -> float:
        """Cost of the time for which it held GPUs."""
        return self.gpu_hours if self.money is None else self.money

    @property
    def cost_per_hour(self) -> float:
        """Cost of an hour."""
        return self.cost / self.gpu_hours * self.gpus if self.gpu_hours else 0.0


class ReportError(Exception):
    """The report cannot be built from what is stored; the message gives the reason and what to do."""


class LeakDifference(Struct, frozen=True, kw_only=True):
    """Share of each job's time in one line of the waterfall."""

    name: str
    layer: str
    first: float
    second: float

    @property
    def change(self) -> float:
        """The second share minus the first."""
        return self.second - self.first


class QualityReached(Struct, frozen=True, kw_only=True):
    """Time since its start, and cost in its own unit, after which each job reached a quality that both reached."""

    name: str
    quality: float
    seconds: tuple[float, float]
    cost: tuple[float, float]


class ReportComparison(Struct, frozen=True, kw_only=True):
    """The comparison of two jobs."""

    first: JobReport
    second: JobReport
    of: str
    """Unit of throughput: tokens or samples; empty if the jobs have none in common."""
    per_gpu: tuple[float, float] | None
    """Throughput per second and GPU."""
    per_cost: tuple[float, float] | None
    """Throughput per unit of money, or per GPU-hour; None if their units differ."""
    scaling: float | None
    """Scaling efficiency; None if they have the same number of GPUs, or no throughput in common."""
    differences: tuple[LeakDifference, ...]
    """Sorted by size of the change, the largest first."""
    same: tuple[QualityReached, ...]

    def json(self) -> bytes:
        """Return the comparison as JSON."""
        return msgspec.json.encode(self)
