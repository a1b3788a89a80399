"""Decides whether a daemon resumes from the checkpoint it finds, or starts fresh where the old books end; and does it.

A counter that Prometheus has scraped must continue or restart at 0, never drop a little: that would read as a reset and
add the whole total again. So only a checkpoint of this boot that no scrape can be ahead of is resumed: one written at
shutdown, or one younger than the resume window. Otherwise the old books are closed and kept.
"""

import logging
from typing import NamedTuple

import msgspec
from msgspec import Struct

from exporter.agent.agent import Agent
from exporter.core.checkpoint import CheckpointError, CheckpointHeader, load_ledger, read_header
from exporter.core.job_record import JobRecord, NodeEvent, nonzero_by_leak
from exporter.core.ledger import Gpu, Ledger
from exporter.core.model import MS, SECOND
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.history.job_tracker import JobTracker
from exporter.history.store import UNREADABLE, ClosedBook, HistoryError, HistoryStore

# What is done with the checkpoint that another daemon has left.
#
# A counter that Prometheus has seen goes on from where it was, or begins at nought; never a little lower, for that
# reads as a reset and adds all there ever was once more. So a daemon counts on only from a checkpoint of this boot
# which no scrape can have outrun: one that was made when the daemon was told to stop, or that is young (covering.py).
# Else it begins anew, from where the books before end, and these are closed and kept. Owns this decision; refuses to
# write.


_LONGEST_GAP = 30 * 24 * 3600 * SECOND
"""A longer absence, over a boot, is a clock that was wrong, or a store of another time."""
_NO_TALLIES, _NO_SAMPLES = msgspec.msgpack.encode(({}, {})), msgspec.msgpack.encode({})


class CheckpointInfo(Struct, frozen=True):
    """Whose checkpoint it is."""

    life: str
    boot: str
    """Of the host, when its monotonic clock began."""
    clean: bool
    """The daemon was told to stop, and told nobody anything after it."""
    outrun: bool = False
    """It could not be written any more, and the daemon went on without it."""


class HostTime(NamedTuple):
    """Now, by both clocks, and what says whether these are those of then."""

    now: int
    wall: int
    boot: str


class StoredCheckpoint(NamedTuple):
    """What another daemon has left."""

    info: CheckpointInfo
    ledger: bytes
    tallies: bytes
    samples: bytes


class Resume(NamedTuple):
    """Count on from it."""

    checkpoint: StoredCheckpoint
    reason: str
    at: int
    """The moment of the checkpoint, by the monotonic clock."""


class StartFresh(NamedTuple):
    """Begin at nought."""

    reason: str
    edges: dict[str, int]
    """From where each GPU's time is paid for, by today's monotonic clock; empty: from the first word on it."""
    closed: tuple[ClosedBook, ...] = ()
    job_records: tuple[JobRecord, ...] = ()
    events: tuple[NodeEvent, ...] = ()


def read_checkpoint(store: HistoryStore) -> StoredCheckpoint | None:
    """None: there is no checkpoint in it. Raises CheckpointError, and HistoryError where the file cannot be read."""
    try:
        info_bytes, ledger_bytes = store.state("about"), store.state("ledger")
        if info_bytes is None or ledger_bytes is None:
            return None
        info = msgspec.msgpack.decode(info_bytes, type=CheckpointInfo)
        return StoredCheckpoint(
            info, ledger_bytes, store.state("tallies") or _NO_TALLIES, store.state("courses") or _NO_SAMPLES
        )
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err


def decide(checkpoint: StoredCheckpoint, host_time: HostTime, *, node: str, resume_window: int) -> Resume | StartFresh:
    """`young`: nanoseconds. Raises CheckpointError where nothing of it can be read."""
    downtime = _downtime(checkpoint, host_time)
    if (
        downtime.same_boot
        and not checkpoint.info.outrun
        and (checkpoint.info.clean or downtime.duration <= resume_window)
    ):
        return Resume(checkpoint, downtime.reason, downtime.head.at)
    return close_books(checkpoint, host_time, node=node)


class _Downtime(NamedTuple):
    """Between two daemons."""

    head: CheckpointHeader
    same_boot: bool
    duration: int
    reason: str


def _downtime(checkpoint: StoredCheckpoint, host_time: HostTime) -> _Downtime:
    try:
        head = read_header(checkpoint.ledger)
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err
    same_boot = checkpoint.info.boot == host_time.boot != "" and head.at <= host_time.now
    duration = host_time.now - head.at if same_boot else max(0, host_time.wall - head.wall)
    return _Downtime(head, same_boot, duration, f"the exporter was down for {duration / SECOND:,.0f} s")


def close_books(checkpoint: StoredCheckpoint, host_time: HostTime, *, node: str) -> StartFresh:
    """Its jobs as statements, its GPUs' books as they are, and from where another counts. Raises CheckpointError."""
    head, same_boot, duration, reason = _downtime(checkpoint, host_time)
    shift = 0 if same_boot else host_time.now - duration - head.at
    known = same_boot or duration <= _LONGEST_GAP
    edges = {gpu: (edge + shift) // MS * MS for gpu, edge in head.edges.items()} if known else {}
    ledger, tracker = Ledger(), JobTracker(node=node, ledger_id=checkpoint.info.life)
    try:
        load_ledger(ledger, checkpoint.ledger)
        tracker.load(checkpoint.tallies, checkpoint.samples)
    except (CheckpointError, *UNREADABLE) as err:
        return StartFresh(f"{reason}, and its books cannot be read: {err}", edges)
    then = take_snapshot(ledger, DaemonMetadata())
    return StartFresh(
        reason,
        edges,
        tuple(_closed_book(gpu, ledger, checkpoint.info.life) for gpu in ledger.gpus.values()),
        tuple(tracker.all_records(then)),
        (NodeEvent(at=then.wall / SECOND, kind="closed", text=f"the books up to here were closed: {reason}"),),
    )


def _closed_book(gpu: Gpu, ledger: Ledger, ledger_id: str) -> ClosedBook:
    book, now = gpu.book, ledger.at or 0
    return ClosedBook(
        uuid=gpu.device.uuid,
        life=ledger_id,
        since=(ledger.wall - (now - book.since)) / SECOND,
        until=(ledger.wall - (now - book.until)) / SECOND,
        paid=book.paid,
        parts=nonzero_by_leak(tuple(book.parts)),
    )


# How a daemon begins on what another has left: it counts on, or from where the other's books end.
#
# Owns the order in which the agent and the file are told, so that the file never says what is not so.


log = logging.getLogger(__name__)


class ResumeResult(NamedTuple):
    """What came of it."""

    tracker: JobTracker
    checkpoint_at: int | None = None
    """The moment of the checkpoint that is gone on from; None: it is begun anew."""
    closed: StartFresh | None = None
    """What of other books is to be written."""


def resume_or_start_fresh(
    store: HistoryStore, agent: Agent, tracker: JobTracker, host_time: HostTime, *, resume_window: int
) -> ResumeResult:
    """Let the agent go on from what the store holds, or begin anew; `memory` is a new life's. Raises HistoryError."""
    try:
        checkpoint = read_checkpoint(store)
        if checkpoint is None:
            return ResumeResult(tracker)
        decision = decide(checkpoint, host_time, node=tracker.node, resume_window=resume_window)
        if isinstance(decision, Resume):
            return _resume(store, agent, tracker, host_time, decision)
    except CheckpointError as err:
        log.error("%s: its last checkpoint is of no use, and counting begins anew: %s", store.path, err)  # noqa: TRY400  no bug of ours
        return ResumeResult(tracker)
    return _start_fresh(agent, tracker, host_time, decision)


def _resume(
    store: HistoryStore, agent: Agent, new_tracker: JobTracker, host_time: HostTime, decision: Resume
) -> ResumeResult:
    checkpoint, tracker = (
        decision.checkpoint,
        JobTracker(
            node=new_tracker.node, ledger_id=decision.checkpoint.info.life, sample_seconds=new_tracker.sample_seconds
        ),
    )
    try:
        tracker.load(checkpoint.tallies, checkpoint.samples)
        agent.resume(checkpoint.ledger, now=host_time.now, reason=decision.reason)
    except (CheckpointError, *UNREADABLE):
        return _start_fresh(agent, new_tracker, host_time, close_books(checkpoint, host_time, node=new_tracker.node))
    try:
        store.write(
            state=[encode_info(checkpoint.info.life, checkpoint.info.boot)], durable=False
        )  # from here on it may be outrun
    except HistoryError:  # what cannot be told so must not be gone on from
        agent.start_fresh(
            close_books(checkpoint, host_time, node=new_tracker.node).edges, now=host_time.now, reason=decision.reason
        )
        raise
    log.info("%s; counting goes on", decision.reason)
    return ResumeResult(tracker, decision.at)


def _start_fresh(agent: Agent, tracker: JobTracker, host_time: HostTime, decision: StartFresh) -> ResumeResult:
    agent.start_fresh(decision.edges, now=host_time.now, reason=decision.reason)
    log.info("%s; its books are closed, and counting begins anew", decision.reason)
    return ResumeResult(tracker, closed=decision)


def start_after_read_only(store: HistoryStore, agent: Agent, host_time: HostTime, *, node: str) -> None:
    """Of a store that can be read, but not written: count at least from where its books end. Raises HistoryError."""
    decision = unclosed_books(store, JobTracker(node=node, ledger_id=""), host_time)
    if decision is not None:
        agent.start_fresh(decision.edges, now=host_time.now, reason=decision.reason)


def unclosed_books(store: HistoryStore, tracker: JobTracker, host_time: HostTime) -> StartFresh | None:
    """Books of another life that the store holds: they are to be closed before they are written over."""
    try:
        checkpoint = read_checkpoint(store)
        return (
            None
            if checkpoint is None or checkpoint.info.life == tracker.ledger_id
            else close_books(checkpoint, host_time, node=tracker.node)
        )
    except CheckpointError as err:
        log.error("%s: its last checkpoint is of no use: %s", store.path, err)  # noqa: TRY400  likewise
        return None


def encode_info(ledger_id: str, boot: str, *, clean: bool = False, outrun: bool = False) -> tuple[str, bytes]:
    """A checkpoint's word on itself, as the store takes it."""
    return "about", msgspec.msgpack.encode(CheckpointInfo(ledger_id, boot, clean, outrun))
