"""An immutable picture of the ledger, and the ratios that follow from it.

Owns what a reader may see: the writer swaps one reference, so a scrape never waits for a sample. Refuses to
judge anything anew: every figure here is a counter, or a quotient of two.
"""

from collections.abc import Iterable

from msgspec import Struct

from exporter.core.evidence import LARGEST
from exporter.core.leaks import LAYER_OF, LAYERS, UNOBSERVED, UNRESOLVED_TIME, USEFUL
from exporter.core.ledger import SPREAD_BINS, Account, Book, Gpu, Job, Ledger, Mark
from exporter.core.model import NEVER, Device, Health, Owner, Reading, State

SHORT = 300
"""Seconds of the window behind the gauges meant for people."""
HOUR = 3600


class Layers(Struct, frozen=True):
    """The three layers and their product, 0-1. None: nothing to divide by."""

    gau: float | None
    ectr: float | None
    emfu: float | None
    product: float | None
    """What you got for what you paid; where kernel time is unresolved, extrapolated from the rest."""
    floor: float | None
    """Useful over paid and observed: unresolved time counts as worth nothing."""
    coverage: float | None
    """Share of the paid time that was seen."""


def layers(parts: Iterable[int]) -> Layers:
    """Layers of the nanoseconds in `parts`, in the order of NAMES. Sum first, then divide (accounting, section 7)."""
    parts = tuple(parts)
    paid, useful, unresolved = sum(parts), parts[USEFUL], parts[UNRESOLVED_TIME]
    seen = paid - parts[UNOBSERVED]
    occupied = seen - _lost(parts, "gau")
    computing = occupied - _lost(parts, "ectr")
    gau, ectr = _ratio(occupied, seen), _ratio(computing, occupied)
    emfu = _ratio(useful, computing - unresolved)
    known = gau is not None and ectr is not None and emfu is not None
    product = gau * ectr * emfu if known else (0.0 if seen and not computing else None)  # type: ignore[operator]
    return Layers(gau, ectr, emfu, product, _ratio(useful, seen), _ratio(seen, paid))


def summed(columns: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Nanoseconds by leak of several books together, in the order of NAMES; of none: all zero."""
    rows = list(columns)
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * len(LAYER_OF)


def _lost(parts: tuple[int, ...], layer: str) -> int:
    return sum(part for part, of in zip(parts, LAYER_OF, strict=True) if of == layer)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


class Counters(Struct, frozen=True):
    """A book as it stands, with what it was five minutes and an hour ago. Nanoseconds."""

    now: Mark
    short: Mark
    hour: Mark
    energy: tuple[float, ...]
    """Joules by leak, in the order of NAMES."""

    def parts(self, since: Mark) -> tuple[int, ...]:
        """Nanoseconds by leak since a mark."""
        return tuple(a - b for a, b in zip(self.now.parts, since.parts, strict=True))

    def energy_by_layer(self) -> dict[str, float]:
        """Joules by layer, every layer there."""
        sums = dict.fromkeys(LAYERS, 0.0)
        for layer, joules in zip(LAYER_OF, self.energy, strict=True):
            sums[layer] += joules
        return sums

    def short_ratio(self, part: str, whole: str) -> float | None:
        """Quotient of two counters over the short window."""
        now, then = self.now, self.short
        return _ratio(getattr(now, part) - getattr(then, part), getattr(now, whole) - getattr(then, whole))

    def percentile(self, share: float) -> float | None:
        """Engine activity below which the GPU stayed for `share` of the short window: the bin's middle, 0-1."""
        bins = [a - b for a, b in zip(self.now.spread, self.short.spread, strict=True)]
        total, below = sum(bins), 0
        for i, time in enumerate(bins):
            below += time
            if total and below >= share * total:
                return (i + 0.5) / SPREAD_BINS
        return None


class GpuView(Struct, frozen=True):
    """One GPU as it stands."""

    device: Device
    counters: Counters
    state: State
    reason: str
    since: int
    """Unix nanoseconds."""
    hang_suspected: bool
    owners: tuple[Owner, ...]
    ranks: tuple[str, ...]
    """Of each owner, the ranks that are on this GPU."""
    reading: Reading | None
    """The latest that was accepted."""
    live: bool
    """It was believed, and nothing after it has been given up as unseen: its values are the present."""
    age: int | None
    """Nanoseconds since that reading ended."""
    rejected: tuple[tuple[str, int], ...] = ()
    """Fields and readings refused, by reason."""
    unobserved: tuple[tuple[str, int], ...] = ()
    """GPU-nanoseconds nobody saw, by reason."""
    health: Health | None = None
    xids: int = 0
    """Critical errors told since the daemon saw the GPU first, and the last of them (0: none)."""
    last_xid: int = 0
    limited: tuple[tuple[str, int], ...] = ()
    """Nanoseconds with the clock held down, by group of reasons."""
    shared: tuple[tuple[str, int], ...] = ()
    """Nanoseconds held by several owners, by how they were split."""


class JobView(Struct, frozen=True):
    """One job's part of this node."""

    owner: Owner
    counters: Counters
    gpus: tuple[str, ...]
    """GPUs it holds now."""
    memory_used: float | None
    """Bytes, on all of them."""
    start: int = 0
    """Unix nanoseconds at which it was given its first GPU here."""
    first_work: int | None = None
    """Nanoseconds from then to its first kernel here; None: none yet, or it was not seen."""


class Meta(Struct, frozen=True, kw_only=True):
    """What the daemon says of itself."""

    version: str = ""
    source: str = ""
    source_reason: str = ""
    scheduler: str = ""
    simulated: bool = False
    host: str = ""
    started: float = 0.0
    """Unix seconds."""
    interval: float = 0.0
    """Seconds between samples, as configured."""
    ticks: int = 0
    late_ticks: int = 0
    read_seconds: float = 0.0
    """Spent in the source and the scheduler, in all."""
    core_seconds: float = 0.0
    """Spent between an observation and its ledger entries, in all."""
    unanswered_seconds: float | None = None
    """For how long a question to the scheduler's controller has had no answer; None: the scheduler has none."""
    errors: tuple[tuple[str, int], ...] = ()
    """Failures the loop caught, by kind."""
    last_error: str = ""


class Snapshot(Struct, frozen=True):
    """The node at one moment."""

    at: int
    wall: int
    gpus: tuple[GpuView, ...]
    jobs: tuple[JobView, ...]
    bills: tuple[tuple[Account, tuple[int, ...]], ...]
    """Nanoseconds by leak, in the order of NAMES, of each account since the start, jobs that are gone included."""
    refused: tuple[tuple[str, int], ...]
    """What cannot be laid to any one GPU, by reason."""
    faults: tuple[tuple[str, int], ...]
    conservation_errors: int
    allocations_age: int | None
    """Nanoseconds since the scheduler's word was known to be true; None if it never was."""
    meta: Meta


def take_snapshot(ledger: Ledger, meta: Meta) -> Snapshot:
    """Copy what readers need; costs a few microseconds a GPU and shares nothing mutable."""
    at = ledger.at or 0
    return Snapshot(
        at=at,
        wall=ledger.wall,
        gpus=tuple(_gpu(ledger, gpu, at) for gpu in sorted(ledger.gpus.values(), key=_order) if gpu.listed),
        jobs=tuple(_job(ledger, job, at) for _, job in sorted(ledger.jobs.items())),
        bills=tuple(sorted(ledger.bills().items())),
        refused=tuple(sorted(ledger.refused.items())),
        faults=tuple(sorted(ledger.faults.items())),
        conservation_errors=ledger.conservation_errors,
        allocations_age=None if ledger.allocations_at == NEVER else max(0, at - ledger.allocations_at),
        meta=meta,
    )


def _order(gpu: Gpu) -> tuple[int, str, str]:
    index = gpu.device.index
    return (int(index) if index.isdigit() else 1 << 30, index, gpu.device.uuid)


def _counters(book: Book) -> Counters:
    return Counters(Mark(book), book.window(SHORT), book.window(HOUR), tuple(book.energy))


def _gpu(ledger: Ledger, gpu: Gpu, at: int) -> GpuView:
    return GpuView(
        device=gpu.device,
        counters=_counters(gpu.book),
        state=gpu.state,
        reason=gpu.reason,
        since=ledger.wall - (at - gpu.since),
        hang_suspected=gpu.track.spin >= ledger.rules.suspect,
        owners=tuple(held.owner for held in gpu.holders),
        ranks=tuple(held.ranks for held in gpu.holders),
        reading=gpu.reading,
        live=_live(gpu),
        age=None if gpu.reading is None else at - gpu.reading.end,
        rejected=tuple(sorted(gpu.rejected.items())),
        unobserved=tuple(sorted(gpu.unobserved.items())),
        health=gpu.vitals.health,
        xids=gpu.vitals.xids,
        last_xid=gpu.vitals.last_xid,
        limited=tuple(gpu.vitals.limited.items()),
        shared=tuple(sorted(gpu.shared.items())),
    )


def _live(gpu: Gpu) -> bool:
    return gpu.reading is not None and gpu.reading.end == gpu.book.until and not gpu.reading.distrust


def believed(reading: Reading | None, name: str) -> float | None:
    """One amount of a reading as it may be shown: finite and not negative, else None."""
    value: float | None = None if reading is None else getattr(reading, name)
    return value if value is not None and 0 <= value < LARGEST else None


def _job(ledger: Ledger, job: Job, at: int) -> JobView:
    name = job.owner.job_id
    holding = [g for g in ledger.gpus.values() if g.listed and any(h.owner.job_id == name for h in g.holders)]
    used = [believed(gpu.reading, "memory_used_bytes") for gpu in holding if _live(gpu)]
    known = [bytes_ for bytes_ in used if bytes_ is not None]
    return JobView(
        owner=job.owner,
        counters=_counters(job.book),
        gpus=tuple(sorted(gpu.device.uuid for gpu in holding)),
        memory_used=sum(known) if known else None,
        start=ledger.wall - (at - job.start),
        first_work=job.first_work,
    )


__all__ = [
    "HOUR",
    "LAYERS",
    "SHORT",
    "Counters",
    "GpuView",
    "JobView",
    "Layers",
    "Meta",
    "Snapshot",
    "believed",
    "layers",
    "summed",
]
