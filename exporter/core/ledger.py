"""The two books: per GPU x leak, never evicted, and per job x leak, evicted a while after the job's end.

Owns posting and the law: for every GPU, always, the parts add up to what was paid, as integers. Refuses to
judge: what it posts was decided elsewhere. Entries are never reversed.
"""

from collections import Counter, deque
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.evidence import Evidence
from exporter.core.health import Vitals
from exporter.core.leaks import NAMES, Taken
from exporter.core.model import MS, NEVER, PPM, SECOND, Allocation, Device, Owner, Reading, State
from exporter.core.policy import Policy
from exporter.core.progress import Progress, Run
from exporter.core.served import Service
from exporter.core.sizing import Need
from exporter.core.told import Voice
from exporter.core.track import Limits, Track, limits

MARK_EVERY = 60 * SECOND
MARKS = 61
"""An hour of marks, a minute apart, and the one before."""
SPREAD_BINS = 20
"""Engine activity is spread over bins of 5 %."""
_COUNTERS = (
    "bytes", "dram", "dram_seen", "engine", "flops", "paid", "pure", "reportable", "reported", "tensor_seen", "until",
    "utilization", "utilization_seen",
)  # fmt: skip


Amounts = tuple[int, float, float, float, float, float, float, float, float]
"""What the counters said of a while, as `Book.observe` adds it up."""


def amounts(ev: Evidence, ms: int, share: int = PPM) -> Amounts | None:
    """What they said for `ms` milliseconds, `share` parts per million of it; None where they are not believed."""
    if ev.distrust:
        return None
    weight, lasted = ev.device.weight, ms * share / (1000 * PPM)
    seconds = lasted * weight / PPM
    engine = (PPM - ev.wait) * ms
    if weight != PPM or share != PPM:
        engine = (PPM - ev.wait) * weight // PPM * ms * share // PPM
    utilization = dram = transferred = pure = flops = 0.0
    utilization_seen = dram_seen = tensor_seen = 0.0
    if ev.utilization is not None:
        utilization, utilization_seen = ev.utilization * seconds, seconds
    if ev.dram is not None:
        dram, dram_seen, transferred = ev.dram * seconds, seconds, ev.bytes * lasted
    if ev.tensor is not None and not ev.unresolved:
        pure, tensor_seen, flops = ev.pure * seconds / PPM, seconds, ev.flops * lasted
    return engine, utilization, utilization_seen, dram, dram_seen, transferred, pure, tensor_seen, flops


class Book:
    """Counters of one GPU or one job.

    The law's own are integer nanoseconds: `parts`, `paid`, `engine` (with a kernel). The rest are floats for ratios:
    seconds weighted by a share of one, seconds seen, FLOPs, bytes; `energy` is joules by leak. `reported` is what the
    job itself counts as model FLOPs, `reportable` what its GPUs could have done in the time reports speak of.
    """

    __slots__ = (
        *_COUNTERS, "anchor", "due_before", "energy", "marks", "next_mark", "parts", "since", "spread",
        "unheld", "weight",
    )  # fmt: skip

    def __init__(self, start: int, weight: int = PPM) -> None:
        self.since = self.until = self.anchor = start
        self.weight, self.due_before = weight, 0
        """Parts per million of a GPU since `anchor`, and what was due until then."""
        self.paid = self.engine = 0
        self.pure = self.tensor_seen = self.dram = self.dram_seen = 0.0
        self.utilization = self.utilization_seen = self.flops = self.bytes = self.reported = self.reportable = 0.0
        self.parts = [0] * len(NAMES)
        self.energy = [0.0] * len(NAMES)
        self.unheld: Counter[int] = Counter()
        """Of the parts, the nanoseconds in which nobody had the GPU, by index into NAMES."""
        self.spread = [0] * SPREAD_BINS
        """Milliseconds by engine activity; a job's alone."""
        self.marks: deque[Mark] = deque([Mark(self)], maxlen=MARKS)
        self.next_mark = (start // MARK_EVERY + 1) * MARK_EVERY

    def post(self, taken: Taken, whole: int, ms: int, ev: Evidence) -> None:
        """Add `ms` milliseconds, of which `whole` ppm are split by `taken`. Ppm times milliseconds are nanoseconds.

        `paid` does not add up `taken`: that the two agree is what `conserved` checks.
        """
        parts, energy, rate = self.parts, self.energy, ev.joules * ms
        for index, ppm in taken:
            parts[index] += ppm * ms
            energy[index] += ppm * rate
        self.paid += whole * ms

    def post_unheld(self, taken: Taken, ms: int) -> None:
        """Say of what was just posted that nobody had the GPU."""
        for index, ppm in taken:
            self.unheld[index] += ppm * ms

    def observe(self, said: Amounts | None) -> None:
        """Add what the counters said; None: nobody saw."""
        if said is None:
            return
        engine, utilization, utilization_seen, dram, dram_seen, transferred, pure, tensor_seen, flops = said
        self.engine += engine
        self.utilization += utilization
        self.utilization_seen += utilization_seen
        self.dram += dram
        self.dram_seen += dram_seen
        self.bytes += transferred
        self.pure += pure
        self.tensor_seen += tensor_seen
        self.flops += flops

    def rest(self, until: int) -> None:
        """Leave out the time up to `until`: the GPU was not in the inventory, and nobody paid for it."""
        left_out = max(0, until - self.until)
        self.since += left_out
        self.anchor += left_out
        self.until += left_out

    def reweigh(self, weight: int) -> None:
        """From here on the device is another share of a GPU: instances were cut from it, or given back."""
        self.due_before, self.anchor, self.weight = self.due(), self.until, weight

    def due(self) -> int:
        """What time and weight alone say must have been paid, nanoseconds."""
        return self.due_before + (self.until - self.anchor) // MS * self.weight

    def mark(self) -> None:
        """Keep the counters of this minute as the beginning of a window."""
        self.marks.append(Mark(self))
        self.next_mark = (self.until // MARK_EVERY + 1) * MARK_EVERY

    def window(self, seconds: int) -> "Mark":
        """The latest mark that lies at least `seconds` back, or the oldest there is."""
        horizon = self.until - seconds * SECOND
        return next((mark for mark in reversed(self.marks) if mark.until <= horizon), self.marks[0])


class Mark:
    """A book's counters at one moment: what a window begins with."""

    __slots__ = (*_COUNTERS, "parts", "spread")

    def __init__(self, book: Book) -> None:
        self.until, self.paid, self.engine = book.until, book.paid, book.engine
        self.pure, self.tensor_seen, self.dram, self.dram_seen = (
            book.pure,
            book.tensor_seen,
            book.dram,
            book.dram_seen,
        )
        self.utilization, self.utilization_seen = book.utilization, book.utilization_seen
        self.flops, self.bytes = book.flops, book.bytes
        self.reported, self.reportable = book.reported, book.reportable
        self.parts, self.spread = tuple(book.parts), tuple(book.spread)


class Standard(Struct, frozen=True):
    """What one model of GPU is judged by."""

    policy: Policy
    rules: Limits


class Gpu:
    """One GPU of the inventory: its book, its track, and what was last seen of it."""

    __slots__ = (
        "book", "device", "holders", "listed", "reading", "reason", "rejected", "seen", "shared", "since", "standard",
        "state", "track", "unobserved", "vitals", "voices",
    )  # fmt: skip

    def __init__(self, device: Device, start: int, standard: Standard) -> None:
        self.standard = standard
        self.seen: Evidence | None = None
        """The latest that was believed."""
        self.device, self.book, self.track, self.vitals = device, Book(start, device.weight), Track(), Vitals()
        self.rejected: Counter[str] = Counter()
        self.unobserved: Counter[str] = Counter()
        self.shared: Counter[str] = Counter()
        """Nanoseconds held by several owners, by how they were split: sm or equal."""
        self.state, self.reason, self.since = State.UNOBSERVED, "starting", start
        self.reading: Reading | None = None
        self.holders: tuple[Allocation, ...] = ()
        self.voices: dict[str, Voice] = {}
        """What its holders say of themselves, by job."""
        self.listed = True
        """In the inventory now; a book is kept for ever, but only what is listed is paid for."""

    def saw_begin(self, held: Allocation, watched_since: int) -> bool:
        """Whether somebody looked when that hold began."""
        return held.start >= max(self.book.since, watched_since)

    def held_by(self, job_id: str) -> bool:
        """Does that job have it now?"""
        return any(held.owner.job_id == job_id for held in self.holders)

    def unspoken_for(self, job_id: str, at: int) -> bool:
        """Has no process of the job that works on this very GPU said anything for a minute?"""
        voice = self.voices.get(job_id)
        return voice is None or at - voice.own_at > MARK_EVERY


Account = tuple[str, str, str]
"""Team, account, namespace: who is billed."""
OTHERS: Account = ("other", "other", "other")


class Job:
    """One job's part of this node: its book adds up over its GPUs."""

    __slots__ = (
        "account", "awaits_work", "billed", "book", "first_work", "need", "owner", "progress", "service", "start",
    )  # fmt: skip

    def __init__(self, held: Allocation, account: Account, start: int, *, awaits_work: bool) -> None:
        self.owner, self.account, self.book = held.owner, account, Book(start)
        self.start, self.awaits_work = held.start, awaits_work
        """When it was given its first GPU here, and whether its first kernel is still to come, as far as was seen."""
        self.billed = (0,) * len(NAMES)
        """What of the book is in an account for good."""
        self.first_work: int | None = None
        """Nanoseconds from then to that kernel."""
        self.need = Need() if held.gpus == 1 else None
        """Of a job on one GPU: what it needs of it."""
        self.progress: Progress | None = None
        """What it says of its training; None: nothing."""
        self.service: Service | None = None
        """What its serving engines say."""

    def saw(self, ev: Evidence, end: int, ms: int, said: Amounts | None) -> None:
        """Add what one of its GPUs did for `ms` milliseconds up to `end`, and what was said of the job's part of it."""
        book = self.book
        if end > book.until:
            book.until = end
        book.observe(said)
        if not ev.distrust:
            book.spread[(PPM - ev.wait) * SPREAD_BINS // (PPM + 1)] += ms
        if book.until >= book.next_mark:
            book.mark()


class Ledger:
    """All that is known of a node: its GPUs, its jobs, and counts of what was refused."""

    def __init__(self, policy: Policy | None = None, by_model: Mapping[str, Policy] | None = None) -> None:
        """`by_model`: policies of models that have one of their own, by the driver's full name or the table's."""
        self._judge_by(policy or Policy(), by_model or {})
        self.entries: Counter[State] = Counter()
        """Times a GPU entered a state."""
        self.gpus: dict[str, Gpu] = {}
        self.jobs: dict[str, Job] = {}
        self.accounts: dict[Account, list[int]] = {}
        """Nanoseconds by leak, in the order of NAMES, of jobs that are gone; those still here are added when read."""
        self.allocations: dict[str, tuple[Allocation, ...]] = {}
        self.holding: set[str] = set()
        """Jobs that hold a GPU, as far as is known."""
        self.allocations_at = NEVER
        self.refused: Counter[str] = Counter()
        """What was refused and cannot be laid to any one GPU."""
        self.faults: Counter[str] = Counter()
        self.runs: dict[tuple[str, str, str], Run] = {}
        """By user, namespace and the name that they gave it; the one heard of last is the last."""
        self.conservation_errors = 0
        self.departed: list[Job] = []
        """Jobs that were dropped in this step."""
        self.edges: Mapping[str, int] = {}
        """GPUs that are paid for since a moment that lies before the first word on them: others counted up to then."""
        self.watched_since = NEVER
        """When this process began to watch, if the books are older than that."""
        self.at: int | None = None
        self.wall = 0
        self.source = ""

    def _judge_by(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        self.policy = policy
        self.rules: Limits = limits(policy)
        self._standard = Standard(policy, self.rules)
        self._by_model = {model: Standard(own, limits(own)) for model, own in by_model.items()}

    def adopt(self, policy: Policy, by_model: Mapping[str, Policy]) -> None:
        """Judge by other thresholds from here on. What is booked stays, and so does since when anything is true."""
        self._judge_by(policy, by_model)
        for gpu in self.gpus.values():
            before, gpu.standard = gpu.standard, self.standard(gpu.device)
            if gpu.standard != before:
                gpu.track.adopt(gpu.standard.rules)

    def standard(self, device: Device) -> Standard:
        """What a GPU is judged by: its model's own thresholds, else those of all."""
        own = self._by_model.get(device.model)
        if own is None and device.spec is not None:
            own = self._by_model.get(device.spec.name)
        return own or self._standard

    @property
    def rejected(self) -> Counter[str]:
        """Readings and fields refused, on the whole node, by reason."""
        return sum((gpu.rejected for gpu in self.gpus.values()), self.refused.copy())

    @property
    def unobserved(self) -> Counter[str]:
        """GPU-nanoseconds nobody saw, on the whole node, by reason."""
        return sum((gpu.unobserved for gpu in self.gpus.values()), Counter[str]())

    def allocate(self, allocations: tuple[Allocation, ...]) -> None:
        """Replace what is known about who holds what."""
        self.allocations = {}
        self.holding = {held.owner.job_id for held in allocations if held.end is None}
        for held in map(_on_whole_milliseconds, allocations):
            self.allocations[held.uuid] = (*self.allocations.get(held.uuid, ()), held)
            job = self.jobs.get(held.owner.job_id)
            if job is not None and job.owner is not held.owner:
                self._rename(job, held.owner)

    def open(self, held: Allocation, start: int, *, awaits_work: bool) -> Job:
        """A new job's book, beginning at `start`."""
        account = self._account(held.owner)
        job = self.jobs[held.owner.job_id] = Job(held, account, start, awaits_work=awaits_work)
        return job

    def _rename(self, job: Job, owner: Owner) -> None:
        """More is known of a job; what was billed before stays where it was billed."""
        job.owner, account = owner, self._account(owner)
        if account != job.account:
            self._bill(job)
            job.account = account

    def _account(self, owner: Owner) -> Account:
        """Who is billed; beyond the limit, all others together."""
        account = (owner.team, owner.account, owner.namespace)
        if account not in self.accounts and len(self.accounts) >= self.policy.max_accounts:
            account = OTHERS
        self.accounts.setdefault(account, [0] * len(NAMES))
        return account

    def _bill(self, job: Job) -> None:
        """Put into the job's account what is not in one yet."""
        account = self.accounts[job.account]
        for index, (now, then) in enumerate(zip(job.book.parts, job.billed, strict=True)):
            account[index] += now - then
        job.billed = tuple(job.book.parts)

    def bills(self) -> dict[Account, tuple[int, ...]]:
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


def _on_whole_milliseconds(held: Allocation) -> Allocation:
    """Schedulers say so already; a trace of somebody else's may not, and a piece of a millisecond would be lost."""
    ends = held.end is None or not held.end % MS
    if ends and not held.start % MS:
        return held
    end = None if held.end is None else held.end - held.end % MS
    return replace(held, start=held.start - held.start % MS, end=end)
