"""What is done with the checkpoint that another daemon has left.

A counter that Prometheus has seen goes on from where it was, or begins at nought; never a little lower, for that reads
as a reset and adds all there ever was once more. So a daemon counts on only from a checkpoint of this boot which no
scrape can have outrun: one that was made when the daemon was told to stop, or that is young (covering.py). Else it
begins anew, from where the books before end, and these are closed and kept. Owns this decision; refuses to write.
"""

from typing import NamedTuple

import msgspec
from msgspec import Struct

from exporter.core.checkpoint import CheckpointError, Head, head_of, thaw
from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import MS, SECOND
from exporter.core.snapshot import Meta, take_snapshot
from exporter.core.statement import Event, Statement, amounts
from exporter.history.file import UNREADABLE
from exporter.history.remembering import Memory
from exporter.history.store import Closed, Store

_LONGEST_GAP = 30 * 24 * 3600 * SECOND
"""A longer absence, over a boot, is a clock that was wrong, or a store of another time."""
_NO_TALLIES, _NO_COURSES = msgspec.msgpack.encode(({}, {})), msgspec.msgpack.encode({})


class About(Struct, frozen=True):
    """Whose checkpoint it is."""

    life: str
    boot: str
    """Of the host, when its monotonic clock began."""
    clean: bool
    """The daemon was told to stop, and told nobody anything after it."""
    outrun: bool = False
    """It could not be written any more, and the daemon went on without it."""


class Moment(NamedTuple):
    """Now, by both clocks, and what says whether these are those of then."""

    now: int
    wall: int
    boot: str


class Left(NamedTuple):
    """What another daemon has left."""

    about: About
    frozen: bytes
    tallies: bytes
    courses: bytes


class GoOn(NamedTuple):
    """Count on from it."""

    left: Left
    why: str
    at: int
    """The moment of the checkpoint, by the monotonic clock."""


class Anew(NamedTuple):
    """Begin at nought."""

    why: str
    edges: dict[str, int]
    """From where each GPU's time is paid for, by today's monotonic clock; empty: from the first word on it."""
    closed: tuple[Closed, ...] = ()
    statements: tuple[Statement, ...] = ()
    events: tuple[Event, ...] = ()


def left_in(store: Store) -> Left | None:
    """None: there is no checkpoint in it. Raises CheckpointError, and HistoryError where the file cannot be read."""
    try:
        said, frozen = store.state("about"), store.state("ledger")
        if said is None or frozen is None:
            return None
        about = msgspec.msgpack.decode(said, type=About)
        return Left(about, frozen, store.state("tallies") or _NO_TALLIES, store.state("courses") or _NO_COURSES)
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err


def decided(left: Left, moment: Moment, *, node: str, young: int) -> GoOn | Anew:
    """`young`: nanoseconds. Raises CheckpointError where nothing of it can be read."""
    gap = _gap(left, moment)
    if gap.same_boot and not left.about.outrun and (left.about.clean or gap.away <= young):
        return GoOn(left, gap.why, gap.head.at)
    return closing(left, moment, node=node)


class _Gap(NamedTuple):
    """Between two daemons."""

    head: Head
    same_boot: bool
    away: int
    why: str


def _gap(left: Left, moment: Moment) -> _Gap:
    try:
        head = head_of(left.frozen)
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err
    same_boot = left.about.boot == moment.boot != "" and head.at <= moment.now
    away = moment.now - head.at if same_boot else max(0, moment.wall - head.wall)
    return _Gap(head, same_boot, away, f"the exporter was down for {away / SECOND:,.0f} s")


def closing(left: Left, moment: Moment, *, node: str) -> Anew:
    """Its jobs as statements, its GPUs' books as they are, and from where another counts. Raises CheckpointError."""
    head, same_boot, away, why = _gap(left, moment)
    shift = 0 if same_boot else moment.now - away - head.at
    known = same_boot or away <= _LONGEST_GAP
    edges = {gpu: (edge + shift) // MS * MS for gpu, edge in head.edges.items()} if known else {}
    ledger, memory = Ledger(), Memory(node=node, life=left.about.life)
    try:
        thaw(ledger, left.frozen)
        memory.thaw(left.tallies, left.courses)
    except (CheckpointError, *UNREADABLE) as err:
        return Anew(f"{why}, and its books cannot be read: {err}", edges)
    then = take_snapshot(ledger, Meta())
    return Anew(
        why,
        edges,
        tuple(_closed(gpu, ledger, left.about.life) for gpu in ledger.gpus.values()),
        tuple(memory.every_statement(then)),
        (Event(at=then.wall / SECOND, kind="closed", text=f"the books up to here were closed: {why}"),),
    )


def _closed(gpu: Gpu, ledger: Ledger, life: str) -> Closed:
    book, now = gpu.book, ledger.at or 0
    return Closed(
        uuid=gpu.device.uuid,
        life=life,
        since=(ledger.wall - (now - book.since)) / SECOND,
        until=(ledger.wall - (now - book.until)) / SECOND,
        paid=book.paid,
        parts=amounts(tuple(book.parts)),
    )
