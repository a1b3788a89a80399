"""Keeps the two sets of books: per GPU and leak, never evicted; per job and leak, evicted a while after the job ends.

Owns posting, and the law: for every GPU, always, the parts add up to what was paid, as integers. Also owns the smallest
MIG slice that would have held a job. Refuses to judge: what it posts was decided elsewhere. Entries are never reversed.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import floor
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.evidence import Evidence
from exporter.core.leaks import LEAK_NAMES, LeakShares
from exporter.core.model import MS, NEVER, PPM, SECOND, Allocation, Device, Owner, Reading, Spec, State
from exporter.core.policy import Policy
from exporter.core.serving import ServingStats
from exporter.core.states import BoardHealth, GpuTimers, Thresholds, thresholds_of
from exporter.core.workload import TrainingProgress, TrainingRun, WorkloadCredit

_MIG_SLICES = {7: ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4)), 4: ((1, 1), (2, 2))}
"""By the compute slices of a whole board: compute and memory slices of each profile, the smallest first."""


class MigSlice(Struct, frozen=True):
    """A MIG profile, as a part of its board."""

    profile: str
    """As NVIDIA writes it: 1g.10gb."""
    compute: int
    """Parts per million of the board's compute slices."""
    memory: float
    """Share of its memory, and of its bandwidth."""


def mig_slices(spec: Spec) -> tuple[MigSlice, ...]:
    """Profiles smaller than the whole board, the smallest first; none where it has no MIG or is not known."""
    whole, memory = spec.slices, spec.memory_gb
    if whole not in _MIG_SLICES or memory is None:
        return ()
    parts = 8 if whole == 7 else 4  # noqa: PLR2004  as the guide has it
    return tuple(
        MigSlice(f"{g}g.{floor(memory * m / parts + 0.5)}gb", g * PPM // whole, m / parts)
        for g, m in _MIG_SLICES[whole]
    )


class PeakDemand(Struct, eq=False):
    """The most that a job on one GPU has used of it so far, and the time beyond the slice that would have held it."""

    sm: float = 0.0
    bandwidth: float = 0.0
    memory: float = 0.0
    """Peaks, as shares of the GPU."""
    known: bool = True
    """Nothing that must be known was ever missing."""
    seen: int = 0
    """Nanoseconds of readings."""
    fitting: MigSlice | None = None
    unneeded: int = 0
    """Nanoseconds of the GPU beyond the slice, since it was known."""

    def add_interval(self, ev: Evidence, start: int, end: int, *, owner: Owner, policy: Policy) -> None:
        """Take in one piece of a reading of a whole GPU that the job has for itself."""
        reading = ev.reading
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        if ev.distrust or ev.sm is None or ev.dram is None or used is None or not total:
            if not ev.distrust:  # what was not told may have been needed
                self.known, self.fitting = False, None
            return
        self.seen += end - start
        share = used / total
        if ev.sm > self.sm or ev.dram > self.bandwidth or share > self.memory:
            self.sm, self.bandwidth = max(self.sm, ev.sm), max(self.bandwidth, ev.dram)
            self.memory = max(self.memory, share)
            self.fitting = None
        wait = policy.size_batch_seconds if owner.workload_class == "batch" else policy.size_serving_seconds
        if self.fitting is None and self.known and self.seen >= wait * SECOND:
            self.fitting = self._smallest_slice(ev.device.spec, policy)
        if self.fitting is not None and self.known:
            self.unneeded += (end - start) * (PPM - self.fitting.compute) // PPM

    def _smallest_slice(self, spec: Spec | None, policy: Policy) -> MigSlice | None:
        for candidate in mig_slices(spec) if spec is not None else ():
            fits = self.memory <= candidate.memory * policy.slice_memory_share and self.bandwidth <= candidate.memory
            if fits and self.sm * PPM <= candidate.compute:
                return candidate
        return None


SAMPLE_INTERVAL = 60 * SECOND
MAX_SAMPLES = 61
"""An hour of marks, a minute apart, and the one before."""
SPREAD_BINS = 20
"""Engine activity is spread over bins of 5 %."""
CounterAmounts = tuple[int, float, float, float, float, float, float, float, float]
"""What the counters said of a while, as `Book.observe` adds it up."""


def counter_amounts(ev: Evidence, ms: int, share: int = PPM) -> CounterAmounts | None:
    """What they said for `ms` milliseconds, `share` parts per million of it; None where they are not believed."""
    if ev.distrust:
        return None
    weight, duration = ev.device.weight, ms * share / (1000 * PPM)
    seconds = duration * weight / PPM
    engine = (PPM - ev.wait) * ms
    if weight != PPM or share != PPM:
        engine = (PPM - ev.wait) * weight // PPM * ms * share // PPM
    utilization = dram = transferred = pure = flops = 0.0
    utilization_seen = dram_seen = tensor_seen = 0.0
    if ev.utilization is not None:
        utilization, utilization_seen = ev.utilization * seconds, seconds
    if ev.dram is not None:
        dram, dram_seen, transferred = ev.dram * seconds, seconds, ev.bytes * duration
    if ev.tensor is not None and not ev.unresolved:
        pure, tensor_seen, flops = ev.ofu * seconds / PPM, seconds, ev.flops * duration
    return engine, utilization, utilization_seen, dram, dram_seen, transferred, pure, tensor_seen, flops


@dataclass(slots=True, eq=False)
class CounterTotals:
    """The totals of one GPU or one job up to `until`, in the order in which a checkpoint stores them.

    The law's own are integer nanoseconds; the rest are floats for ratios. A field `..._seen` is the time in seconds in
    which its neighbour was known.
    """

    since: int = 0
    until: int = 0
    anchor: int = 0
    weight: int = PPM
    """Parts per million of a GPU since `anchor`."""
    due_before: int = 0
    """What was due until `anchor`."""
    paid: int = 0
    engine: int = 0
    """With a kernel."""
    ofu: float = 0.0
    tensor_seen: float = 0.0
    dram: float = 0.0
    dram_seen: float = 0.0
    utilization: float = 0.0
    utilization_seen: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    reported: float = 0.0
    """Model FLOPs by the job's own count."""
    reportable: float = 0.0
    """FLOPs that its GPUs could have done in the time that its reports cover."""


COUNTER_FIELDS = tuple(field.name for field in fields(CounterTotals))
counter_values = attrgetter(*COUNTER_FIELDS)


@dataclass(slots=True, eq=False)
class CounterSample(CounterTotals):
    """A book's counters at one moment: the beginning or the end of a window."""

    parts: tuple[int, ...] = ()
    spread: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Book(CounterTotals):
    """Counters of one GPU or one job, by leak as well, with a sample of them for each minute of the last hour."""

    parts: list[int] = field(default_factory=lambda: [0] * len(LEAK_NAMES))
    """Nanoseconds by leak, in the order of LEAK_NAMES; together they are `paid`."""
    energy: list[float] = field(default_factory=lambda: [0.0] * len(LEAK_NAMES))
    """Joules by leak."""
    unheld: Counter[int] = field(default_factory=Counter)
    """Of the parts, the nanoseconds in which nobody had the GPU, by index into LEAK_NAMES."""
    spread: list[int] = field(default_factory=lambda: [0] * SPREAD_BINS)
    """Milliseconds by engine activity; a job's alone."""
    samples: deque[CounterSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES), init=False)
    next_sample: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """A window begins with the book."""
        self.sample()

    @classmethod
    def starting_at(cls, start: int, weight: int = PPM) -> "Book":
        """An empty book of a device that is `weight` parts per million of a GPU."""
        return cls(since=start, until=start, anchor=start, weight=weight)

    def post(self, taken: LeakShares, whole: int, ms: int, ev: Evidence) -> None:
        """Add `ms` milliseconds, of which `whole` ppm are split by `taken`. Ppm times milliseconds are nanoseconds.

        `paid` does not add up `taken`: that the two agree is what `conserved` checks.
        """
        parts, energy, rate = self.parts, self.energy, ev.joules * ms
        for index, ppm in taken:
            parts[index] += ppm * ms
            energy[index] += ppm * rate
        self.paid += whole * ms

    def post_unheld(self, taken: LeakShares, ms: int) -> None:
        """Say of what was just posted that nobody had the GPU."""
        for index, ppm in taken:
            self.unheld[index] += ppm * ms

    def observe(self, amounts: CounterAmounts | None) -> None:
        """Add what the counters said; None: nobody saw."""
        if amounts is None:
            return
        engine, utilization, utilization_seen, dram, dram_seen, transferred, pure, tensor_seen, flops = amounts
        self.engine += engine
        self.utilization += utilization
        self.utilization_seen += utilization_seen
        self.dram += dram
        self.dram_seen += dram_seen
        self.bytes += transferred
        self.ofu += pure
        self.tensor_seen += tensor_seen
        self.flops += flops

    def skip_to(self, until: int) -> None:
        """Leave out the time up to `until`: the GPU was not in the inventory, and nobody paid for it."""
        left_out = max(0, until - self.until)
        self.since += left_out
        self.anchor += left_out
        self.until += left_out

    def set_weight(self, weight: int) -> None:
        """From here on the device is another share of a GPU: instances were cut from it, or given back."""
        self.due_before, self.anchor, self.weight = self.due(), self.until, weight

    def due(self) -> int:
        """What time and weight alone say must have been paid, nanoseconds."""
        return self.due_before + (self.until - self.anchor) // MS * self.weight

    def sample(self) -> None:
        """Keep the counters of this minute as the beginning of a window."""
        self.samples.append(self.counters())
        self.next_sample = (self.until // SAMPLE_INTERVAL + 1) * SAMPLE_INTERVAL

    def counters(self) -> CounterSample:
        """The counters as they stand."""
        sample = CounterSample(*counter_values(self))
        sample.parts, sample.spread = tuple(self.parts), tuple(self.spread)
        return sample

    def window(self, seconds: int) -> CounterSample:
        """The latest sample that lies at least `seconds` back, or the oldest there is."""
        horizon = self.until - seconds * SECOND
        return next((sample for sample in reversed(self.samples) if sample.until <= horizon), self.samples[0])


class Criteria(Struct, frozen=True):
    """What one model of GPU is judged by."""

    policy: Policy
    thresholds: Thresholds


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU of the inventory: its book, its timers, and its latest reading."""

    device: Device
    since: int
    criteria: Criteria
    book: Book
    timers: GpuTimers = field(default_factory=GpuTimers)
    board_health: BoardHealth = field(default_factory=BoardHealth)
    state: State = State.UNOBSERVED
    reason: str = "starting"
    rejected: Counter[str] = field(default_factory=Counter)
    unobserved: Counter[str] = field(default_factory=Counter)
    shared: Counter[str] = field(default_factory=Counter)
    """Nanoseconds held by several owners, by how they were split: sm or equal."""
    listed: bool = True
    """In the inventory now; a book is kept for ever, but only what is listed is paid for."""
    reading: Reading | None = None
    last_evidence: Evidence | None = None
    """The latest that was believed."""
    holders: tuple[Allocation, ...] = ()
    credits: dict[str, WorkloadCredit] = field(default_factory=dict)
    """What its holders report, by job."""

    @classmethod
    def starting_at(cls, start: int, device: Device, criteria: Criteria) -> "Gpu":
        """A GPU that is paid for from `start` on."""
        return cls(device, start, criteria, Book.starting_at(start, device.weight))

    def saw_start(self, allocation: Allocation, watched_since: int) -> bool:
        """Whether somebody looked when that hold began."""
        return allocation.start >= max(self.book.since, watched_since)

    def held_by(self, job_id: str) -> bool:
        """Does that job have it now?"""
        return any(allocation.owner.job_id == job_id for allocation in self.holders)

    def has_no_own_report(self, job_id: str, at: int) -> bool:
        """Has no process of the job that works on this very GPU said anything for a minute?"""
        credit = self.credits.get(job_id)
        return credit is None or at - credit.own_report_at > SAMPLE_INTERVAL


AccountKey = tuple[str, str, str]
"""Team, account, namespace: who is billed."""
OTHER_ACCOUNTS: AccountKey = ("other", "other", "other")


@dataclass(slots=True, eq=False)
class Job:
    """One job's part of this node: its book adds up over its GPUs."""

    owner: Owner
    account: AccountKey
    book: Book
    start: int
    """When it was given its first GPU here."""
    awaits_work: bool
    """Its first kernel is still to come, as far as was seen."""
    billed: tuple[int, ...] = (0,) * len(LEAK_NAMES)
    """Those of the book's parts that are in an account already."""
    first_work: int | None = None
    """Nanoseconds from the start to that kernel."""
    peak_demand: PeakDemand | None = None
    """Of a job on one GPU: the most that it has used of it."""
    progress: TrainingProgress | None = None
    """What it reports of its training; None: nothing."""
    service: ServingStats | None = None
    """What its serving engines report."""

    def add_activity(self, ev: Evidence, end: int, ms: int, amounts: CounterAmounts | None) -> None:
        """Add what one of its GPUs did for `ms` milliseconds up to `end`, and what was said of the job's part of it."""
        book = self.book
        if end > book.until:
            book.until = end
        book.observe(amounts)
        if not ev.distrust:
            book.spread[(PPM - ev.wait) * SPREAD_BINS // (PPM + 1)] += ms
        if book.until >= book.next_sample:
            book.sample()


class Ledger:
    """All that is known of a node: its GPUs, its jobs, and counts of what was refused."""

    def __init__(self, policy: Policy | None = None, by_model: Mapping[str, Policy] | None = None) -> None:
        """`by_model`: policies of models that have one of their own, by the driver's full name or the table's."""
        self._set_policy(policy or Policy(), by_model or {})
        self.state_entries: Counter[State] = Counter()
        """Times a GPU entered a state."""
        self.gpus: dict[str, Gpu] = {}
        self.jobs: dict[str, Job] = {}
        self.accounts: dict[AccountKey, list[int]] = {}
        """Nanoseconds by leak, in the order of NAMES, of jobs that are gone; those still here are added when read."""
        self.allocations: dict[str, tuple[Allocation, ...]] = {}
        self.holding: set[str] = set()
        """Jobs that hold a GPU, as far as is known."""
        self.allocations_at = NEVER
        self.refused: Counter[str] = Counter()
        """What was refused and cannot be laid to any one GPU."""
        self.faults: Counter[str] = Counter()
        self.runs: dict[tuple[str, str, str], TrainingRun] = {}
        """By user, namespace and the name that they gave it; the one heard of last is the last."""
        self.conservation_errors = 0
        self.departed: list[Job] = []
        """Jobs that were dropped in this step."""
        self.paid_since: Mapping[str, int] = {}
        """GPUs that are paid for since a moment that lies before the first word on them: others counted up to then."""
        self.watched_since = NEVER
        """When this process began to watch, if the books are older than that."""
        self.at: int | None = None
        self.wall = 0
        self.source = ""

    def _set_policy(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        self.policy = policy
        self.thresholds: Thresholds = thresholds_of(policy)
        self._default_criteria = Criteria(policy, self.thresholds)
        self._criteria_by_model = {
            model: Criteria(model_policy, thresholds_of(model_policy)) for model, model_policy in by_model.items()
        }

    def update_policy(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        """Judge by other thresholds from here on. What is booked stays, and so does since when anything is true."""
        self._set_policy(policy, by_model)
        for gpu in self.gpus.values():
            before, gpu.criteria = gpu.criteria, self.criteria_for(gpu.device)
            if gpu.criteria != before:
                gpu.timers.update_thresholds(gpu.criteria.thresholds)

    def criteria_for(self, device: Device) -> Criteria:
        """What a GPU is judged by: its model's own thresholds, else those of all."""
        criteria = self._criteria_by_model.get(device.model)
        if criteria is None and device.spec is not None:
            criteria = self._criteria_by_model.get(device.spec.name)
        return criteria or self._default_criteria

    @property
    def rejected(self) -> Counter[str]:
        """Readings and fields refused, on the whole node, by reason."""
        return sum((gpu.rejected for gpu in self.gpus.values()), self.refused.copy())

    @property
    def unobserved(self) -> Counter[str]:
        """GPU-nanoseconds nobody saw, on the whole node, by reason."""
        return sum((gpu.unobserved for gpu in self.gpus.values()), Counter[str]())

    def set_allocations(self, allocations: tuple[Allocation, ...]) -> None:
        """Replace what is known about who holds what."""
        self.allocations = {}
        self.holding = {allocation.owner.job_id for allocation in allocations if allocation.end is None}
        for allocation in map(_on_whole_milliseconds, allocations):
            self.allocations[allocation.uuid] = (*self.allocations.get(allocation.uuid, ()), allocation)
            job = self.jobs.get(allocation.owner.job_id)
            if job is not None and job.owner is not allocation.owner:
                self._update_owner(job, allocation.owner)

    def open_job(self, allocation: Allocation, start: int, *, awaits_work: bool) -> Job:
        """A new job's book, beginning at `start`."""
        account = self._account_of(allocation.owner)
        job = Job(allocation.owner, account, Book.starting_at(start), allocation.start, awaits_work)
        job.peak_demand = PeakDemand() if allocation.gpus == 1 else None
        self.jobs[job.owner.job_id] = job
        return job

    def _update_owner(self, job: Job, owner: Owner) -> None:
        """More is known of a job; what was billed before stays where it was billed."""
        job.owner, account = owner, self._account_of(owner)
        if account != job.account:
            self._bill(job)
            job.account = account

    def _account_of(self, owner: Owner) -> AccountKey:
        """Who is billed; beyond the limit, all others together."""
        account = (owner.team, owner.account, owner.namespace)
        if account not in self.accounts and len(self.accounts) >= self.policy.max_accounts:
            account = OTHER_ACCOUNTS
        self.accounts.setdefault(account, [0] * len(LEAK_NAMES))
        return account

    def _bill(self, job: Job) -> None:
        """Put into the job's account what is not in one yet."""
        account = self.accounts[job.account]
        for index, (now, before) in enumerate(zip(job.book.parts, job.billed, strict=True)):
            account[index] += now - before
        job.billed = tuple(job.book.parts)

    def account_totals(self) -> dict[AccountKey, tuple[int, ...]]:
        """Nanoseconds by leak of each account so far: jobs that are gone, and those that are here."""
        for job in self.jobs.values():
            self._bill(job)
        return {account: tuple(parts) for account, parts in self.accounts.items()}

    def evict(self, at: int) -> None:
        """Drop jobs that ended long ago, and the oldest ended ones beyond the limit; never one that holds a GPU."""
        self.departed = []
        if self.jobs.keys() <= self.holding:
            return
        linger = round(self.policy.job_linger_seconds * 1000) * MS
        ended = sorted((job.book.until, name) for name, job in self.jobs.items() if name not in self.holding)
        surplus = len(self.jobs) - self.policy.max_jobs
        for rank, (until, name) in enumerate(ended):
            if rank < surplus or at - until > linger:
                job = self.jobs.pop(name)
                self._bill(job)
                self.departed.append(job)


def conserved(book: Book) -> bool:
    """The law: what was lost, useful, unresolved and unobserved is what was paid, to the nanosecond."""
    return sum(book.parts) == book.paid == book.due()


def _on_whole_milliseconds(allocation: Allocation) -> Allocation:
    """Schedulers say so already; a trace of somebody else's may not, and a piece of a millisecond would be lost."""
    ends = allocation.end is None or not allocation.end % MS
    if ends and not allocation.start % MS:
        return allocation
    end = None if allocation.end is None else allocation.end - allocation.end % MS
    return replace(allocation, start=allocation.start - allocation.start % MS, end=end)
