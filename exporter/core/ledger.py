"""Keeps the books: per GPU and leak, never evicted; per job and leak, evicted some time after the job ends.

Guarantees the conservation law: for every GPU, at any time, the parts add up to what was paid, as integers. Also finds
the smallest MIG slice that would have sufficed for a job. Entries are never reversed.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import floor
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.board_health import BoardHealth
from exporter.core.collectives import CollectiveStats
from exporter.core.communication import LevelTracker
from exporter.core.criteria import Criteria, criteria_of
from exporter.core.evidence import Evidence
from exporter.core.host import JobHost, PortState
from exporter.core.leaks import LEAK_NAMES, LeakShares
from exporter.core.model import MS, NEVER, PPM, SECOND, Allocation, Device, HangFinding, Owner, Reading, Spec, State
from exporter.core.policy import Policy
from exporter.core.progress import TrainingProgress, TrainingRun
from exporter.core.serving import ServingStats
from exporter.core.timers import GpuTimers
from exporter.core.uncertainty import Uncertainty
from exporter.core.workload import WorkloadCredit

_MIG_SLICES = {7: ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4)), 4: ((1, 1), (2, 2))}
"""Compute slices of a whole board -> compute and memory slices of each MIG profile, smallest first."""


class MigSlice(Struct, frozen=True):
    """A MIG profile and its share of the board."""

    profile: str
    """Profile name, such as 1g.10gb."""
    compute: int
    """Share of the compute slices, ppm."""
    memory: float
    """Share of memory and of memory bandwidth, 0-1."""


def mig_slices(spec: Spec) -> tuple[MigSlice, ...]:
    """MIG profiles smaller than the whole board, smallest first; empty without MIG or if unknown."""
    whole, memory = spec.slices, spec.memory_gb
    if whole not in _MIG_SLICES or memory is None:
        return ()
    parts = 8 if whole == 7 else 4  # noqa: PLR2004  memory slices, by NVIDIA's MIG user guide
    return tuple(
        MigSlice(f"{g}g.{floor(memory * m / parts + 0.5)}gb", g * PPM // whole, m / parts)
        for g, m in _MIG_SLICES[whole]
    )


class PeakDemand(Struct, eq=False):
    """Peak use of a GPU by a single-GPU job or its replicas, and the GPU time beyond the smallest sufficient slice."""

    sm: float = 0.0
    bandwidth: float = 0.0
    memory: float = 0.0
    """Peaks, as shares of the GPU, 0-1."""
    known: bool = True
    """No required signal was ever missing."""
    seen: int = 0
    """Observed nanoseconds."""
    fitting: MigSlice | None = None
    unneeded: int = 0
    """GPU-nanoseconds beyond the slice, since it was determined."""
    until: int = NEVER
    """Up to when it was seen."""

    def add_interval(self, ev: Evidence, start: int, end: int, *, owner: Owner, policy: Policy) -> None:
        """Add an interval of a whole GPU that the job does not share."""
        reading = ev.reading
        used, total = reading.memory_used_bytes, reading.memory_total_bytes
        if ev.distrust or ev.sm is None or ev.dram is None or used is None or not total:
            if not ev.distrust:  # demand cannot be bounded without the signal
                self.known, self.fitting = False, None
            return
        self.seen += max(0, end - max(start, self.until))  # a minute of two replicas is one
        self.until = max(self.until, end)
        share = used / total
        # While kernels ran: two seconds of full load in a minute need the whole GPU, whatever the mean of the minute.
        busy = max(ev.engine, policy.stalled_engine)
        sm, bandwidth = min(1.0, ev.sm / busy), min(1.0, ev.dram / busy)
        if sm > self.sm or bandwidth > self.bandwidth or share > self.memory:
            self.sm, self.bandwidth = max(self.sm, sm), max(self.bandwidth, bandwidth)
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
"""An hour of samples, one per minute, and the one before."""
SPREAD_BINS = 20
"""Bins of the engine activity histogram, 5 % each."""
CounterAmounts = tuple[int, float, float, float, float, float, float, float, float]
"""Increments in an interval of the counters that `Book.observe` names, in its order."""


def counter_amounts(ev: Evidence, ms: int, share: int = PPM) -> CounterAmounts | None:
    """Counter increments of `ms` milliseconds, of which `share` ppm count; None if the reading is untrusted."""
    if ev.distrust:
        return None
    weight, duration = ev.device.weight, ms * share / (1000 * PPM)
    seconds = duration * weight / PPM
    engine = (PPM - ev.wait) * ms
    if weight != PPM or share != PPM:
        engine = (PPM - ev.wait) * weight // PPM * ms * share // PPM
    utilization = dram = transferred = ofu = flops = 0.0
    utilization_seen = dram_seen = tensor_seen = 0.0
    if ev.utilization is not None:
        utilization, utilization_seen = ev.utilization * seconds, seconds
    if ev.dram is not None:
        dram, dram_seen, transferred = ev.dram * seconds, seconds, ev.bytes * duration
    if ev.tensor is not None and not ev.unresolved:
        ofu, tensor_seen, flops = ev.ofu * seconds / PPM, seconds, ev.flops * duration
    return engine, utilization, utilization_seen, dram, dram_seen, transferred, ofu, tensor_seen, flops


@dataclass(slots=True, eq=False)
class CounterTotals:
    """Totals of one GPU or one job up to `until`, in the order in which a checkpoint stores them.

    Times are integer nanoseconds; the rest are floats for ratios. A field `X_seen` is the time in seconds in which X
    was available.
    """

    since: int = 0
    until: int = 0
    anchor: int = 0
    weight: int = PPM
    """Share of a GPU since `anchor`, ppm."""
    due_before: int = 0
    """Nanoseconds due up to `anchor`."""
    paid: int = 0
    engine: int = 0
    """GPU-nanoseconds with a kernel."""
    ofu: float = 0.0
    tensor_seen: float = 0.0
    dram: float = 0.0
    dram_seen: float = 0.0
    utilization: float = 0.0
    utilization_seen: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    reported: float = 0.0
    """Model FLOPs reported by the job."""
    reportable: float = 0.0
    """Peak FLOPs of its GPUs over the time that its reports cover."""


COUNTER_FIELDS = tuple(field.name for field in fields(CounterTotals))
counter_values = attrgetter(*COUNTER_FIELDS)


@dataclass(slots=True, eq=False)
class CounterSample(CounterTotals):
    """A book's counters at one moment, as the beginning or end of a window."""

    parts: tuple[int, ...] = ()
    spread: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Book(CounterTotals):
    """Counters of one GPU or one job, in total and by leak, with a sample per minute of the last hour."""

    parts: list[int] = field(default_factory=lambda: [0] * len(LEAK_NAMES))
    """Nanoseconds by leak, in the order of LEAK_NAMES; they add up to `paid`."""
    energy: list[int] = field(default_factory=lambda: [0] * len(LEAK_NAMES))
    """Millijoules by leak."""
    unheld: Counter[int] = field(default_factory=Counter)
    """The part of `parts` in which the GPU was unallocated, by index into LEAK_NAMES."""
    spread: list[int] = field(default_factory=lambda: [0] * SPREAD_BINS)
    """Histogram of engine activity, milliseconds; of jobs only."""
    samples: deque[CounterSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES), init=False)
    next_sample: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Take the first sample, with which the first window begins."""
        self.sample()

    @classmethod
    def starting_at(cls, start: int, weight: int = PPM) -> "Book":
        """An empty book of a device that counts as `weight` ppm of a GPU."""
        return cls(since=start, until=start, anchor=start, weight=weight)

    def post(self, taken: LeakShares, whole: int, ms: int, energy: int) -> None:
        """Add `ms` milliseconds, of which `whole` ppm are split by `taken`. Ppm times milliseconds are nanoseconds.

        `paid` is not the sum of `taken`, so that `conserved` can check the two against each other. The millijoules of
        `energy` are divided as the time is, rounded cumulatively so that they add up exactly.
        """
        parts, spent, reached, before = self.parts, self.energy, 0, 0
        divisor = whole or 1  # of several owners one may have no part
        for index, ppm in taken:
            parts[index] += ppm * ms
            reached += ppm
            after = energy * reached // divisor
            spent[index] += after - before
            before = after
        self.paid += whole * ms

    def post_unheld(self, taken: LeakShares, ms: int) -> None:
        """Count what was just posted as unallocated time."""
        for index, ppm in taken:
            self.unheld[index] += ppm * ms

    def observe(self, amounts: CounterAmounts | None) -> None:
        """Add counter increments; None: unobserved."""
        if amounts is None:
            return
        engine, utilization, utilization_seen, dram, dram_seen, transferred, ofu, tensor_seen, flops = amounts
        self.engine += engine
        self.utilization += utilization
        self.utilization_seen += utilization_seen
        self.dram += dram
        self.dram_seen += dram_seen
        self.bytes += transferred
        self.ofu += ofu
        self.tensor_seen += tensor_seen
        self.flops += flops

    def skip_to(self, until: int) -> None:
        """Skip the time up to `until`, in which the GPU was not in the inventory and so not paid for."""
        left_out = max(0, until - self.until)
        self.since += left_out
        self.anchor += left_out
        self.until += left_out

    def set_weight(self, weight: int) -> None:
        """Change the device's share of a GPU from now on, after MIG instances were created or destroyed."""
        self.due_before, self.anchor, self.weight = self.due(), self.until, weight

    def due(self) -> int:
        """Nanoseconds that must have been paid, from time and weight alone."""
        return self.due_before + (self.until - self.anchor) // MS * self.weight

    def sample(self) -> None:
        """Store the counters of this minute as the beginning of a window."""
        self.samples.append(self.counters())
        self.next_sample = (self.until // SAMPLE_INTERVAL + 1) * SAMPLE_INTERVAL

    def counters(self) -> CounterSample:
        """Copy the current counters."""
        sample = CounterSample(*counter_values(self))
        sample.parts, sample.spread = tuple(self.parts), tuple(self.spread)
        return sample

    def window(self, seconds: int) -> CounterSample:
        """The latest sample at least `seconds` old, or the oldest."""
        horizon = self.until - seconds * SECOND
        return next((sample for sample in reversed(self.samples) if sample.until <= horizon), self.samples[0])


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU or MIG instance: its book, its timers, and its latest reading."""

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
    """Nanoseconds held by several owners, by how they were divided: sm or equal."""
    listed: bool = True
    """Whether it is in the inventory now; books are kept for ever, but only listed GPUs are paid for."""
    reading: Reading | None = None
    last_evidence: Evidence | None = None
    """The latest trusted evidence."""
    holders: tuple[Allocation, ...] = ()
    bystanders: frozenset[str] = frozenset()
    """Of several holders, the job IDs of those without a part in a hang: their processes use no SMs."""
    states_beside: dict[str, State] = field(default_factory=dict)
    """By job ID, the state of bystanders while the GPU is hung, and of newcomers while it is a zombie."""
    held_clock: float | None = None
    """SM clock over the reference clock, when it was last read while the GPU worked."""
    worked_at: int = NEVER
    """End of the last reading in which its engine worked."""
    credits: dict[str, WorkloadCredit] = field(default_factory=dict)
    """Balances from its holders' reports, by job ID."""

    @classmethod
    def starting_at(cls, start: int, device: Device, criteria: Criteria) -> "Gpu":
        """A GPU that is paid for since `start`."""
        return cls(device, start, criteria, Book.starting_at(start, device.weight))

    def saw_start(self, allocation: Allocation, watched_since: int) -> bool:
        """Whether the daemon was running when the allocation began."""
        return allocation.start >= max(self.book.since, watched_since)

    def held_by(self, job_id: str) -> bool:
        """Whether the job holds the GPU now."""
        return any(allocation.owner.job_id == job_id for allocation in self.holders)

    def state_of(self, job_id: str) -> State:
        """The GPU's state, as far as it concerns one of its holders."""
        return self.states_beside.get(job_id, self.state)

    def has_no_own_report(self, job_id: str, at: int) -> bool:
        """Whether no process of the job that uses this GPU has reported for a minute."""
        credit = self.credits.get(job_id)
        return credit is None or at - credit.own_report_at > SAMPLE_INTERVAL


AccountKey = tuple[str, str, str]
"""Team, account and namespace that are billed."""
OTHER_ACCOUNTS: AccountKey = ("other", "other", "other")


@dataclass(slots=True, eq=False)
class Job:
    """One job's part on this node; its book is the sum over its GPUs."""

    owner: Owner
    account: AccountKey
    book: Book
    start: int
    """When it was allocated its first GPU on this node."""
    awaits_work: bool
    """Its first kernel has not been seen, and its start was observed."""
    billed: tuple[int, ...] = (0,) * len(LEAK_NAMES)
    """The book's parts that are already in an account."""
    first_work: int | None = None
    """Nanoseconds from the start to the first kernel."""
    peak_demand: PeakDemand | None = None
    """Peak use of its GPU, for a job on one GPU."""
    progress: TrainingProgress | None = None
    """Progress from its training reports; None: no report."""
    service: ServingStats | None = None
    """Totals from its serving engines' reports; None: no report."""
    level_tracker: LevelTracker = field(default_factory=LevelTracker)
    """SM activity of its computing and communicating kernels."""
    host: JobHost | None = None
    """Its CPU use and pressure on this node; None: not measured."""
    finding: HangFinding | None = None
    """The latest finding about a hang; None: it was never asked."""
    communication: CollectiveStats | None = None
    """Totals of what a profiler plugin timed; None: no report."""
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    """How certain its leaks are."""

    def add_activity(self, ev: Evidence, end: int, ms: int, amounts: CounterAmounts | None) -> None:
        """Add `ms` milliseconds of one of its GPUs up to `end`; `amounts`: the job's part of the counters."""
        book = self.book
        if end > book.until:
            book.until = end
        book.observe(amounts)
        if not ev.distrust:
            book.spread[(PPM - ev.wait) * SPREAD_BINS // (PPM + 1)] += ms
        if book.until >= book.next_sample:
            book.sample()


class Ledger:
    """The accounting state of a node: its GPUs, its jobs, and counts of rejected input."""

    def __init__(self, policy: Policy | None = None, by_model: Mapping[str, Policy] | None = None) -> None:
        """`by_model`: policies of single GPU models, by the driver's full name or that in the specifications table."""
        self._set_policy(policy or Policy(), by_model or {})
        self.state_entries: Counter[State] = Counter()
        """Times a GPU entered a state."""
        self.gpus: dict[str, Gpu] = {}
        self.jobs: dict[str, Job] = {}
        self.accounts: dict[AccountKey, list[int]] = {}
        """Billed nanoseconds by leak, in the order of LEAK_NAMES; `account_totals` first adds those of current jobs.

        The account that a job left latest is last.
        """
        self.allocations: dict[str, tuple[Allocation, ...]] = {}
        self.holding: set[str] = set()
        """IDs of jobs known to hold a GPU."""
        self.allocations_at = NEVER
        self.refused: Counter[str] = Counter()
        """Rejected input that belongs to no single GPU, by reason."""
        self.faults: Counter[str] = Counter()
        self.runs: dict[tuple[str, str, str], TrainingRun] = {}
        """By user, namespace and run ID; the most recently reported run is last."""
        self.conservation_errors = 0
        self.ports: dict[str, PortState] = {}
        """The node's RDMA ports by name, as last read."""
        self.departed: list[Job] = []
        """Jobs evicted in the last step."""
        self.paid_since: Mapping[str, int] = {}
        """By UUID, since when a GPU is paid for if earlier than its first reading: where an earlier ledger ended."""
        self.watched_since = NEVER
        """When this process started to observe, if the books are older."""
        self.first: tuple[int, int] | None = None
        """Monotonic and Unix time of its first observation, when all its counters were 0; kept across restarts."""
        self.at: int | None = None
        self.wall = 0
        self.source = ""

    def _set_policy(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        self.policy = policy
        self.criteria = criteria_of(policy)
        self._criteria_by_model = {model: criteria_of(own) for model, own in by_model.items()}

    def began(self, at: int) -> int:
        """Convert a moment at which counting began to Unix nanoseconds: to the same at each call, on any clock."""
        first_at, first_wall = self.first or (self.at or 0, self.wall)
        return first_wall + (at - first_at)

    def update_policy(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        """Apply other thresholds from now on. Booked time and running timers are kept."""
        self._set_policy(policy, by_model)
        for gpu in self.gpus.values():
            before, gpu.criteria = gpu.criteria, self.criteria_for(gpu.device)
            if gpu.criteria != before:
                gpu.timers.update_criteria(gpu.criteria)

    def criteria_for(self, device: Device) -> Criteria:
        """The criteria of the GPU's model, else the default."""
        criteria = self._criteria_by_model.get(device.model)
        if criteria is None and device.spec is not None:
            criteria = self._criteria_by_model.get(device.spec.name)
        return criteria or self.criteria

    @property
    def rejected(self) -> Counter[str]:
        """Rejected readings and fields of the whole node, by reason."""
        return sum((gpu.rejected for gpu in self.gpus.values()), self.refused.copy())

    @property
    def unobserved(self) -> Counter[str]:
        """Unobserved GPU-nanoseconds of the whole node, by reason."""
        return sum((gpu.unobserved for gpu in self.gpus.values()), Counter[str]())

    def set_allocations(self, allocations: tuple[Allocation, ...]) -> None:
        """Replace all allocations, and update the owners of known jobs."""
        self.allocations = {}
        self.holding = {allocation.owner.job_id for allocation in allocations if allocation.end is None}
        for allocation in map(_on_whole_milliseconds, allocations):
            self.allocations[allocation.uuid] = (*self.allocations.get(allocation.uuid, ()), allocation)
            job = self.jobs.get(allocation.owner.job_id)
            if job is not None and job.owner is not allocation.owner:
                self._update_owner(job, allocation.owner)

    def open_job(self, gpu: Gpu, allocation: Allocation, start: int) -> Job:
        """Create a job whose book begins at `start`, with its first GPU.

        If its allocation began unobserved, its first kernel may have been missed.
        """
        account, awaits_work = self._account_of(allocation.owner), gpu.saw_start(allocation, self.watched_since)
        job = Job(allocation.owner, account, Book.starting_at(start), allocation.start, awaits_work)
        job.peak_demand = PeakDemand() if allocation.gpus == 1 else None
        self.jobs[job.owner.job_id] = job
        return job

    def _update_owner(self, job: Job, owner: Owner) -> None:
        """Update a job's attributes; time billed before stays with the previous account."""
        job.owner, account = owner, self._account_of(owner)
        if account != job.account:
            self._close_account(job)
            job.account = account

    def _account_of(self, owner: Owner) -> AccountKey:
        """The account that is billed; OTHER_ACCOUNTS if so many others have jobs that there is no room for it."""
        account = (owner.team, owner.account, owner.namespace)
        if account not in self.accounts and not self._make_room_for_account():
            account = OTHER_ACCOUNTS
        self.accounts.setdefault(account, [0] * len(LEAK_NAMES))
        return account

    def _make_room_for_account(self) -> bool:
        """Whether one more account is within the limit, after dropping those that have been without a job for longest.

        What they were billed is in the last scrapes already, so no other account may get it. Their counters begin at 0
        if they return.
        """
        surplus = len(self.accounts.keys() - {OTHER_ACCOUNTS}) + 1 - self.policy.max_accounts
        if surplus <= 0:
            return True
        kept = {job.account for job in self.jobs.values()} | {OTHER_ACCOUNTS}
        unused = [account for account in self.accounts if account not in kept]
        for account in unused[:surplus]:
            del self.accounts[account]
        return len(unused) >= surplus

    def _bill(self, job: Job) -> None:
        """Add unbilled time to the job's account."""
        account = self.accounts[job.account]
        for index, (now, before) in enumerate(zip(job.book.parts, job.billed, strict=True)):
            account[index] += now - before
        job.billed = tuple(job.book.parts)

    def _close_account(self, job: Job) -> None:
        """Bill the job for the last time; its account is now the one that was left latest."""
        self._bill(job)
        self.accounts[job.account] = self.accounts.pop(job.account)

    def account_totals(self) -> dict[AccountKey, tuple[int, ...]]:
        """Nanoseconds by leak of each account so far, of current and evicted jobs."""
        for job in self.jobs.values():
            self._bill(job)
        return {account: tuple(parts) for account, parts in self.accounts.items()}

    def evict(self, at: int) -> None:
        """Drop jobs that ended long ago, and the oldest ended jobs beyond the limit; never a job that holds a GPU."""
        self.departed = []
        if self.jobs.keys() <= self.holding:
            return
        linger = round(self.policy.job_linger_seconds * 1000) * MS
        ended = sorted((job.book.until, name) for name, job in self.jobs.items() if name not in self.holding)
        surplus = len(self.jobs) - self.policy.max_jobs
        for rank, (until, name) in enumerate(ended):
            if rank < surplus or at - until > linger:
                job = self.jobs.pop(name)
                self._close_account(job)
                self.departed.append(job)


def conserved(book: Book) -> bool:
    """The conservation law: losses, useful, unresolved and unobserved add up to what was paid, to the nanosecond."""
    return sum(book.parts) == book.paid == book.due()


def _on_whole_milliseconds(allocation: Allocation) -> Allocation:
    """Round times down to milliseconds: schedulers do so already, but a third-party trace may not."""
    ends = allocation.end is None or not allocation.end % MS
    if ends and not allocation.start % MS:
        return allocation
    end = None if allocation.end is None else allocation.end - allocation.end % MS
    return replace(allocation, start=allocation.start - allocation.start % MS, end=end)
