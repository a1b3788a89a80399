"""A ledger as bytes, and back: so that another process can go on counting where this one stopped.

Owns what is worth remembering and its form. Leaks go by name, for the next version may order them otherwise; time of a
leak that it does not know is `unresolved` there. Moments are of the host's monotonic clock: they mean something until
the host boots again. Windows of the latest past begin anew, and so does what engines said last.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from exporter.core.health import Vitals
from exporter.core.leaks import NAMES, UNRESOLVED_TIME
from exporter.core.ledger import MARK_EVERY, MARKS, SPREAD_BINS, Account, Book, Gpu, Job, Ledger, Mark, conserved
from exporter.core.model import Allocation, Device, Owner, State
from exporter.core.progress import Progress, Run
from exporter.core.served import Service
from exporter.core.sizing import Need
from exporter.core.track import Track

_FORM = 1
_SCALARS = (
    "since", "until", "anchor", "weight", "due_before", "paid", "engine", "pure", "tensor_seen", "dram", "dram_seen",
    "utilization", "utilization_seen", "flops", "bytes", "reported", "reportable",
)  # fmt: skip
_Scalars = tuple[
    int, int, int, int, int, int, int, float, float, float, float, float, float, float, float, float, float
]


class CheckpointError(Exception):
    """The bytes are no checkpoint that this version can read; the message says why."""


class Head(Struct, frozen=True, array_like=True):
    """What can be read of a checkpoint whatever became of the rest."""

    form: int
    at: int
    """Monotonic nanoseconds."""
    wall: int
    """The same moment in Unix nanoseconds."""
    leaks: tuple[str, ...]
    edges: dict[str, int]
    """Up to when each GPU of the inventory is booked."""
    body: Raw


class _Book(Struct, array_like=True):
    scalars: _Scalars
    parts: dict[int, int]
    energy: dict[int, float]
    unheld: dict[int, int]
    spread: dict[int, int]


class _Gpu(Struct, array_like=True):
    device: Device
    listed: bool
    book: _Book
    track: Track
    vitals: Vitals
    rejected: dict[str, int]
    unobserved: dict[str, int]
    shared: dict[str, int]
    state: State
    reason: str
    since: int


class _Service(Struct, array_like=True):
    tokens: dict[str, float]
    preemptions: float
    undrafted: int


class _Job(Struct, array_like=True):
    owner: Owner
    account: Account
    book: _Book
    start: int
    awaits_work: bool
    billed: dict[int, int]
    first_work: int | None
    need: Need | None
    progress: Progress | None
    service: _Service | None


class _Body(Struct, array_like=True):
    gpus: list[_Gpu]
    jobs: list[_Job]
    accounts: list[tuple[Account, dict[int, int]]]
    entries: dict[State, int]
    allocations: list[Allocation]
    allocations_at: int
    runs: list[tuple[tuple[str, str, str], Run]]
    refused: dict[str, int]
    faults: dict[str, int]
    source: str


Amount = TypeVar("Amount", int, float)
_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_body = msgspec.msgpack.Decoder(_Body).decode


def freeze(ledger: Ledger) -> bytes:
    """All that must not be forgotten, as bytes. The ledger must rest meanwhile."""
    edges = {uuid: gpu.book.until for uuid, gpu in ledger.gpus.items() if gpu.listed}
    body = Raw(_encode(_body(ledger)))
    return _encode(Head(_FORM, ledger.at or 0, ledger.wall, NAMES, edges, body))


def head_of(frozen: bytes) -> Head:
    """What any version can read of it. Raises CheckpointError."""
    try:
        head = _decode_head(frozen)
    except msgspec.DecodeError as err:
        raise CheckpointError(f"it cannot be read: {err}") from err
    if head.form != _FORM:
        raise CheckpointError(f"it has form {head.form}, this version reads form {_FORM}")
    return head


def thaw(ledger: Ledger, frozen: bytes) -> None:
    """Fill a new ledger, which keeps its own policy, with all that was remembered. Raises CheckpointError."""
    head = head_of(frozen)
    try:
        body = _decode_body(head.body)
    except msgspec.DecodeError as err:
        raise CheckpointError(f"its books cannot be read: {err}") from err
    place = [NAMES.index(leak) if leak in NAMES else UNRESOLVED_TIME for leak in head.leaks]
    ledger.at, ledger.wall, ledger.source = head.at, head.wall, body.source
    ledger.runs = dict(body.runs)
    for gpu in body.gpus:
        ledger.gpus[gpu.device.uuid] = _gpu(ledger, gpu, place)
        if not conserved(ledger.gpus[gpu.device.uuid].book):
            raise CheckpointError(f"the books of {gpu.device.uuid} do not add up")
    for job in body.jobs:
        ledger.jobs[job.owner.job_id] = _job(ledger, job, place)
    ledger.accounts = {account: _column(parts, place) for account, parts in body.accounts}
    ledger.entries, ledger.refused, ledger.faults = Counter(body.entries), Counter(body.refused), Counter(body.faults)
    ledger.allocate(tuple(body.allocations))
    ledger.allocations_at = body.allocations_at


def _body(ledger: Ledger) -> _Body:
    return _Body(
        gpus=[_frozen_gpu(gpu) for gpu in ledger.gpus.values()],
        jobs=[_frozen_job(job) for job in ledger.jobs.values()],
        accounts=[(account, _sparse(parts)) for account, parts in ledger.accounts.items()],
        entries=ledger.entries,
        allocations=[held for all_held in ledger.allocations.values() for held in all_held],
        allocations_at=ledger.allocations_at,
        runs=list(ledger.runs.items()),
        refused=ledger.refused,
        faults=ledger.faults,
        source=ledger.source,
    )


def _frozen_gpu(gpu: Gpu) -> _Gpu:
    return _Gpu(
        device=gpu.device,
        listed=gpu.listed,
        book=_frozen_book(gpu.book),
        track=gpu.track,
        vitals=gpu.vitals,
        rejected=gpu.rejected,
        unobserved=gpu.unobserved,
        shared=gpu.shared,
        state=gpu.state,
        reason=gpu.reason,
        since=gpu.since,
    )


def _frozen_job(job: Job) -> _Job:
    service = job.service
    return _Job(
        owner=job.owner,
        account=job.account,
        book=_frozen_book(job.book),
        start=job.start,
        awaits_work=job.awaits_work,
        billed=_sparse(job.billed),
        first_work=job.first_work,
        need=job.need,
        progress=job.progress,
        service=None if service is None else _Service(service.tokens, service.preemptions, service.undrafted),
    )


def _frozen_book(book: Book) -> _Book:
    scalars: _Scalars = tuple([getattr(book, name) for name in _SCALARS])
    return _Book(scalars, _sparse(book.parts), _sparse(book.energy), dict(book.unheld), _sparse(book.spread))


def _sparse(column: Iterable[Amount]) -> dict[int, Amount]:
    return {index: amount for index, amount in enumerate(column) if amount}


def _gpu(ledger: Ledger, kept: _Gpu, place: Sequence[int]) -> Gpu:
    gpu = Gpu(kept.device, kept.since, ledger.standard(kept.device))
    gpu.book, gpu.track, gpu.vitals = _book(kept.book, place), kept.track, kept.vitals
    gpu.track.adopt(gpu.standard.rules)
    gpu.rejected, gpu.unobserved, gpu.shared = Counter(kept.rejected), Counter(kept.unobserved), Counter(kept.shared)
    gpu.state, gpu.reason, gpu.listed = kept.state, kept.reason, kept.listed
    return gpu


def _job(ledger: Ledger, kept: _Job, place: Sequence[int]) -> Job:
    job = Job(Allocation("", kept.owner, kept.start), kept.account, kept.start, awaits_work=kept.awaits_work)
    job.book = _book(kept.book, place)
    job.billed = tuple(_column(kept.billed, place))
    job.first_work, job.need, job.progress = kept.first_work, kept.need, kept.progress
    if job.progress is not None:  # runs are shared by those who name them
        key = job.owner.user, job.owner.namespace, job.progress.run_id
        job.progress.run = ledger.runs.get(key, job.progress.run)
    if kept.service is not None:
        job.service = Service()
        job.service.tokens |= kept.service.tokens
        job.service.preemptions, job.service.undrafted = kept.service.preemptions, kept.service.undrafted
    return job


def _book(kept: _Book, place: Sequence[int]) -> Book:
    book = Book(0)
    for name, value in zip(_SCALARS, kept.scalars, strict=True):
        setattr(book, name, value)
    book.parts, book.energy = _column(kept.parts, place), _column(kept.energy, place)
    for index, amount in kept.unheld.items():
        book.unheld[place[index]] += amount
    for index, amount in kept.spread.items():
        book.spread[index % SPREAD_BINS] += amount
    book.marks = deque([Mark(book)], maxlen=MARKS)
    book.next_mark = (book.until // MARK_EVERY + 1) * MARK_EVERY
    return book


def _column(kept: Mapping[int, Amount], place: Sequence[int]) -> list[Amount]:
    """Amounts by leak in this version's order."""
    column: list[Amount] = [0] * len(NAMES)
    for index, amount in kept.items():
        column[place[index]] += amount
    return column
