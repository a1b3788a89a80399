"""Encodes a ledger as bytes and decodes it, so that another process can continue counting.

Leaks are stored by name because another version may order them differently; time of an unknown leak becomes
`unresolved`. Times are of the host's monotonic clock and are valid until the next boot. Recent windows and the last
values of serving engines are not stored.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field, structs

from exporter.core.board_health import BoardHealth
from exporter.core.collectives import CollectiveStats
from exporter.core.communication import LevelTracker
from exporter.core.host import JobHost
from exporter.core.leaks import LEAK_NAMES, UNRESOLVED_INDEX, Amount
from exporter.core.ledger import (
    COUNTER_FIELDS,
    SPREAD_BINS,
    AccountKey,
    Book,
    Gpu,
    Job,
    Ledger,
    PeakDemand,
    conserved,
    counter_values,
)
from exporter.core.model import JOULE, Allocation, Device, HangFinding, Owner, State
from exporter.core.progress import TrainingProgress, TrainingRun, run_key
from exporter.core.serving import TOKEN_KINDS, ServingStats, ServingTotals
from exporter.core.timers import GpuTimers
from exporter.core.uncertainty import Uncertainty

_FORMAT = 1


class CheckpointError(Exception):
    """The bytes are not a checkpoint that this version can read; the message gives the reason."""


class CheckpointHeader(Struct, frozen=True, array_like=True):
    """The part of a checkpoint that can be decoded without the body."""

    form: int
    at: int
    """Monotonic nanoseconds."""
    wall: int
    """The same moment in Unix nanoseconds."""
    leaks: tuple[str, ...]
    edges: dict[str, int]
    """By UUID, up to when each GPU of the inventory is booked, monotonic nanoseconds."""
    body: Raw


class _SavedBook(Struct, array_like=True):
    """A book; its columns map the index of a leak or bin to the amount, without zeros."""

    counters: Annotated[tuple[int | float, ...], Meta(min_length=len(COUNTER_FIELDS), max_length=len(COUNTER_FIELDS))]
    parts: dict[int, int]
    energy: dict[int, float]
    """Joules."""
    unheld: dict[int, int]
    spread: dict[int, int]
    millijoules: bool = False
    """Whether `energy` is of whole millijoules; older versions added up floats."""


class _SavedGpu(Struct, array_like=True):
    """The stored fields of `Gpu`, under the same names."""

    device: Device
    listed: bool
    book: _SavedBook
    timers: GpuTimers
    board_health: BoardHealth
    rejected: dict[str, int]
    unobserved: dict[str, int]
    shared: dict[str, int]
    state: State
    reason: str
    since: int
    held_clock: float | None = None


class _SavedJob(Struct, array_like=True):
    """The stored fields of `Job`, under the same names."""

    owner: Owner
    account: AccountKey
    book: _SavedBook
    start: int
    awaits_work: bool
    billed: dict[int, int]
    first_work: int | None
    peak_demand: PeakDemand | None
    progress: TrainingProgress | None
    service: ServingTotals | None
    level_tracker: LevelTracker = field(default_factory=LevelTracker)
    host: JobHost | None = None
    finding: HangFinding | None = None
    communication: CollectiveStats | None = None
    uncertainty: dict[str, dict[int, int]] = {}
    """By field of Uncertainty."""


class _SavedLedger(Struct, array_like=True):
    gpus: list[_SavedGpu]
    jobs: list[_SavedJob]
    accounts: list[tuple[AccountKey, dict[int, int]]]
    entries: dict[State, int]
    allocations: list[Allocation]
    allocations_at: int
    runs: list[tuple[tuple[str, str, str], TrainingRun]]
    refused: dict[str, int]
    faults: dict[str, int]
    source: str
    first: tuple[int, int] | None = None


Saved = TypeVar("Saved", bound=Struct)
_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(CheckpointHeader).decode
_decode_body = msgspec.msgpack.Decoder(_SavedLedger).decode


def dump_ledger(ledger: Ledger) -> bytes:
    """Encode a ledger, which must not change meanwhile."""
    edges = {uuid: gpu.book.until for uuid, gpu in ledger.gpus.items() if gpu.listed}
    body = Raw(_encode(_save_ledger(ledger)))
    return _encode(CheckpointHeader(_FORMAT, ledger.at or 0, ledger.wall, LEAK_NAMES, edges, body))


def read_header(data: bytes) -> CheckpointHeader:
    """Decode the header of a checkpoint. Raises CheckpointError if it is unreadable or of another form."""
    try:
        header = _decode_header(data)
    except msgspec.DecodeError as err:
        raise CheckpointError(f"it cannot be read: {err}") from err
    if header.form != _FORMAT:
        raise CheckpointError(f"it has form {header.form}, this version reads form {_FORMAT}")
    return header


def load_ledger(ledger: Ledger, data: bytes) -> None:
    """Restore a checkpoint into a new ledger, which keeps its own policy. Raises CheckpointError if unreadable."""
    header = read_header(data)
    try:
        body = _decode_body(header.body)
    except msgspec.DecodeError as err:
        raise CheckpointError(f"its books cannot be read: {err}") from err
    leak_index = [LEAK_NAMES.index(leak) if leak in LEAK_NAMES else UNRESOLVED_INDEX for leak in header.leaks]
    ledger.at, ledger.wall, ledger.source = header.at, header.wall, body.source
    ledger.runs = dict(body.runs)
    for gpu in body.gpus:
        ledger.gpus[gpu.device.uuid] = _load_gpu(ledger, gpu, leak_index)
        if not conserved(ledger.gpus[gpu.device.uuid].book):
            raise CheckpointError(f"the books of {gpu.device.uuid} do not add up")
    since = min((gpu.book.since for gpu in ledger.gpus.values()), default=header.at)
    ledger.first = body.first or (since, header.wall - (header.at - since))  # an older version did not store it
    for job in body.jobs:
        ledger.jobs[job.owner.job_id] = _load_job(ledger, job, leak_index)
    ledger.accounts = {account: _load_column(parts, leak_index) for account, parts in body.accounts}
    ledger.state_entries, ledger.refused = Counter(body.entries), Counter(body.refused)
    ledger.faults = Counter(body.faults)
    ledger.set_allocations(tuple(body.allocations))
    ledger.allocations_at = body.allocations_at


def _save_ledger(ledger: Ledger) -> _SavedLedger:
    return _SavedLedger(
        gpus=[_save(_SavedGpu, gpu, book=_save_book(gpu.book)) for gpu in ledger.gpus.values()],
        jobs=[_save_job(job) for job in ledger.jobs.values()],
        accounts=[(account, _sparse(parts)) for account, parts in ledger.accounts.items()],
        entries=ledger.state_entries,
        allocations=[allocation for allocations in ledger.allocations.values() for allocation in allocations],
        allocations_at=ledger.allocations_at,
        runs=list(ledger.runs.items()),
        refused=ledger.refused,
        faults=ledger.faults,
        source=ledger.source,
        first=ledger.first,
    )


def _save_job(job: Job) -> _SavedJob:
    service = None if job.service is None else _save(ServingTotals, job.service)
    uncertainty = {name: _sparse(column) for name, column in structs.asdict(job.uncertainty).items()}
    return _save(
        _SavedJob, job, book=_save_book(job.book), billed=_sparse(job.billed), service=service, uncertainty=uncertainty
    )


def _save_book(book: Book) -> _SavedBook:
    columns = {name: _sparse(getattr(book, name)) for name in ("parts", "spread")}
    energy = {index: spent / JOULE for index, spent in _sparse(book.energy).items()}
    return _SavedBook(
        counters=counter_values(book), energy=energy, unheld=dict(book.unheld), millijoules=True, **columns
    )


def _save(kind: type[Saved], source: object, **converted: Any) -> Saved:
    """Create a `kind` from the fields of the same names in `source`, except those given in `converted`."""
    return kind(**{name: getattr(source, name) for name in kind.__struct_fields__} | converted)


def _sparse(column: Iterable[Amount]) -> dict[int, Amount]:
    return {index: amount for index, amount in enumerate(column) if amount}


def _load_gpu(ledger: Ledger, saved: _SavedGpu, leak_index: Sequence[int]) -> Gpu:
    values = structs.asdict(saved)
    values |= {name: Counter(values[name]) for name in ("rejected", "unobserved", "shared")}
    values["book"] = _load_book(saved.book, leak_index)
    gpu = Gpu(criteria=ledger.criteria_for(saved.device), **values)
    gpu.timers.flags &= gpu.timers.signs  # an older version stored `signs` alone
    gpu.timers.update_criteria(gpu.criteria)
    return gpu


def _load_job(ledger: Ledger, saved: _SavedJob, leak_index: Sequence[int]) -> Job:
    values = structs.asdict(saved)
    values["book"] = _load_book(saved.book, leak_index)
    values["billed"] = tuple(_load_column(saved.billed, leak_index))
    columns = {name: _load_column(column, leak_index) for name, column in saved.uncertainty.items()}
    values["uncertainty"] = Uncertainty(**columns)
    job = Job(**values | {"service": None})
    if saved.service is not None:
        job.service = ServingStats(*structs.astuple(saved.service))
        job.service.tokens = dict.fromkeys(TOKEN_KINDS, 0.0) | saved.service.tokens
    if job.progress is not None:  # jobs that name the same run share it
        job.progress.run = ledger.runs.get(run_key(job.owner, job.progress.run_id), job.progress.run)
    return job


def _load_book(saved: _SavedBook, leak_index: Sequence[int]) -> Book:
    values: dict[str, Any] = dict(zip(COUNTER_FIELDS, saved.counters, strict=True))
    unheld, spread = Counter[int](), [0] * SPREAD_BINS
    for index, amount in saved.unheld.items():
        unheld[leak_index[index]] += amount
    for index, amount in saved.spread.items():
        spread[index % SPREAD_BINS] += amount
    older = 0 if saved.millijoules else 1  # more than a sum of floats was: a counter must not decrease
    spent = {index: round(joules * JOULE) + older for index, joules in saved.energy.items()}
    parts, energy = _load_column(saved.parts, leak_index), _load_column(spent, leak_index)
    return Book(parts=parts, energy=energy, unheld=unheld, spread=spread, **values)


def _load_column(saved: Mapping[int, Amount], leak_index: Sequence[int]) -> list[Amount]:
    """Convert a stored column to amounts in the order of LEAK_NAMES."""
    column: list[Amount] = [0] * len(LEAK_NAMES)
    for index, amount in saved.items():
        column[leak_index[index]] += amount
    return column
