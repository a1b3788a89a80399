"""Job records of simulated nodes as their daemons would have stored them, and the ledgers' times to compare with.

Everything is run through the real core, with daemons that restart on the way.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from exporter.core.job_record import JobRecord
from exporter.core.leaks import LEAK_NAMES
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND, Allocation, Device, Observation
from exporter.core.pipeline import advance
from exporter.core.prices import Price, Terms
from exporter.core.snapshot import DaemonMetadata, Snapshot, take_snapshot
from exporter.history.job_tracker import JobTracker

Books = dict[str, Counter[str]]
"""GPU-nanoseconds by job and leak."""


class Past(Struct, frozen=True, kw_only=True):
    """The records that a node has stored."""

    statements: tuple[JobRecord, ...]
    books: Books


def play(
    observations: Iterable[Observation],
    *,
    node: str = "n1",
    cuts: Sequence[float] = (),
    price: float = 2.0,
    sample_seconds: float = 300.0,
) -> Past:
    """Run observations through daemons that are killed at these seconds; each starts with a new ledger."""
    told: list[JobRecord] = []
    books: Books = {}
    meta = DaemonMetadata(version="1", source="replay", terms=Terms(node=node, prices=(Price(price),)))
    left, began = sorted(cuts), 0
    devices: tuple[Device, ...] = ()
    held: tuple[Allocation, ...] = ()
    ledger, memory = _daemon(node, 0, sample_seconds)
    last: Snapshot | None = None
    for count, seen in enumerate(observations):
        began = seen.at if count == 0 else began
        devices = devices if seen.devices is None else seen.devices
        held = held if seen.allocations is None else seen.allocations
        while left and (seen.at - began) / SECOND >= left[0]:
            left.pop(0)
            if last is not None:
                told += memory.all_records(last)
                _close(ledger, books)
                (ledger, memory), last = _daemon(node, len(cuts) - len(left), sample_seconds), None
                seen = replace(seen, devices=devices, allocations=held)  # noqa: PLW2901  a new daemon needs the full state
        advance(ledger, seen)
        last = take_snapshot(ledger, meta)
        told += memory.update(last)[1]
        _close(ledger, books, gone=True)
    if last is not None:
        told += memory.running_records(last)
    _close(ledger, books)
    return Past(statements=_latest(told), books=books)


def _daemon(node: str, life: int, sample_seconds: float) -> tuple[Ledger, JobTracker]:
    return Ledger(), JobTracker(node=node, ledger_id=f"{node}-{life}", sample_seconds=sample_seconds)


def _close(ledger: Ledger, books: Books, *, gone: bool = False) -> None:
    """Add the ledger's times of its jobs, or of those that it is about to drop."""
    for job in ledger.departed if gone else ledger.jobs.values():
        parts = dict(zip(LEAK_NAMES, job.book.parts, strict=True))
        books.setdefault(job.owner.job_id, Counter()).update(parts)


def _latest(told: Iterable[JobRecord]) -> tuple[JobRecord, ...]:
    """Keep one record per ledger and start, as a store does."""
    found = {(each.life, each.owner.job_id, each.start): each for each in told}
    return tuple(found.values())
