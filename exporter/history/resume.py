"""Decides whether a daemon resumes from the checkpoint it finds or starts fresh where the old books end; and does so.

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
from exporter.history.store import UNREADABLE, ClosedBook, HistoryError, HistoryStore, unsaved_until

log = logging.getLogger(__name__)
_LONGEST_GAP = 30 * 24 * 3600 * SECOND
"""A longer downtime across a reboot means that a clock was wrong, or that the store is an old copy."""
_NO_TALLIES, _NO_SAMPLES = msgspec.msgpack.encode(({}, {})), msgspec.msgpack.encode({})


class CheckpointInfo(Struct, frozen=True):
    """Describes who wrote a checkpoint, and whether a restart may resume from it. Stored: field names must stay."""

    life: str
    """Id of the ledger."""
    boot: str
    """The host's boot id: the monotonic clock is comparable within one boot only."""
    clean: bool
    """Whether it was written at shutdown, after the last scrape."""
    outrun: bool = False
    """Whether scrapes may have returned newer values, because later checkpoints could not be written."""


class HostTime(NamedTuple):
    """Current time by the monotonic and the wall clock in nanoseconds, and the host's boot id."""

    now: int
    wall: int
    boot: str


class StoredCheckpoint(NamedTuple):
    """A previous daemon's checkpoint as read from the store."""

    info: CheckpointInfo
    ledger: bytes
    tallies: bytes
    samples: bytes
    unsaved_until: int
    """Until when scrapes have returned values that could not be saved (Unix ns); older than the checkpoint: never."""


class Resume(NamedTuple):
    """Decision to resume from a checkpoint."""

    reason: str
    at: int
    """Time of the checkpoint in monotonic nanoseconds."""


class StartFresh(NamedTuple):
    """Decision to start counters at 0, with what must be stored of the previous daemon's books."""

    reason: str
    edges: dict[str, int]
    """Monotonic nanoseconds, of this boot, from which each GPU's time is accounted; without an entry, from the GPU's
    first reading."""
    closed: tuple[ClosedBook, ...] = ()
    job_records: tuple[JobRecord, ...] = ()
    events: tuple[NodeEvent, ...] = ()


def read_checkpoint(store: HistoryStore) -> StoredCheckpoint | None:
    """Read the checkpoint; None if there is none.

    Raises CheckpointError if it is damaged, and HistoryError if the file cannot be read.
    """
    try:
        info_bytes, ledger_bytes = store.state("about"), store.state("ledger")
        if info_bytes is None or ledger_bytes is None:
            return None
        info = msgspec.msgpack.decode(info_bytes, type=CheckpointInfo)
        tallies, samples = store.state("tallies") or _NO_TALLIES, store.state("courses") or _NO_SAMPLES
        return StoredCheckpoint(info, ledger_bytes, tallies, samples, unsaved_until(store.path))
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err


def decide(checkpoint: StoredCheckpoint, host_time: HostTime, *, node: str, resume_window: int) -> Resume | StartFresh:
    """Decide what to do with a checkpoint; `resume_window` is in nanoseconds.

    Raises CheckpointError if none of it can be read.
    """
    downtime = _downtime(checkpoint, host_time)
    if downtime.same_boot and not downtime.outrun and (checkpoint.info.clean or downtime.duration <= resume_window):
        return Resume(downtime.reason, downtime.head.at)
    return close_books(checkpoint, host_time, node=node)


class _Downtime(NamedTuple):
    """Time between two daemons: the old checkpoint's header, and `duration` in nanoseconds."""

    head: CheckpointHeader
    same_boot: bool
    duration: int
    outrun: bool
    """Whether scrapes have returned newer values than the checkpoint's."""
    unsaved_until: int | None
    """Monotonic ns, of this boot, until when; None if they have not, or it is unknown."""

    @property
    def reason(self) -> str:
        what = "was down or could not save" if self.outrun else "was down"
        return f"the exporter {what} for {self.duration / SECOND:,.0f} s"


def _downtime(checkpoint: StoredCheckpoint, host_time: HostTime) -> _Downtime:
    try:
        head = read_header(checkpoint.ledger)
    except UNREADABLE as err:
        raise CheckpointError(f"it cannot be read: {err}") from err
    same_boot = checkpoint.info.boot == host_time.boot != "" and head.at <= host_time.now
    duration = host_time.now - head.at if same_boot else max(0, host_time.wall - head.wall)
    until, written = checkpoint.unsaved_until, head.wall // MS * MS  # a note is in whole milliseconds
    noted = written <= until <= host_time.wall  # else: before it, or of a wrong clock
    outrun = checkpoint.info.outrun or (noted and until > written)
    return _Downtime(head, same_boot, duration, outrun, host_time.now - (host_time.wall - until) if noted else None)


def _edges(downtime: _Downtime, host_time: HostTime) -> dict[str, int]:
    """Return from when each GPU's time is in no earlier ledger and was in no scrape."""
    head, same_boot, duration, outrun, unsaved_until = downtime
    if (outrun and unsaved_until is None) or not (same_boot or duration <= _LONGEST_GAP):
        return {}
    shift = 0 if same_boot else host_time.now - duration - head.at
    edges = {gpu: edge + shift for gpu, edge in head.edges.items()}
    if unsaved_until is not None:
        edges = {gpu: max(edge, unsaved_until) for gpu, edge in edges.items()}
    return {gpu: edge // MS * MS for gpu, edge in edges.items()}


def close_books(checkpoint: StoredCheckpoint, host_time: HostTime, *, node: str) -> StartFresh:
    """Turn a checkpoint into final job records and closed books, and compute where new books begin.

    Raises CheckpointError if its header cannot be read.
    """
    downtime = _downtime(checkpoint, host_time)
    reason, edges = downtime.reason, _edges(downtime, host_time)
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


class ResumeResult(NamedTuple):
    """Outcome of `resume_or_start_fresh`."""

    tracker: JobTracker
    checkpoint_at: int | None = None
    """Time of the resumed checkpoint in monotonic nanoseconds; None if the agent starts fresh."""
    closed: StartFresh | None = None
    """The previous daemon's books, still to be written; None if there are none."""


def resume_or_start_fresh(
    store: HistoryStore, agent: Agent, tracker: JobTracker, host_time: HostTime, *, resume_window: int
) -> ResumeResult:
    """Resume the agent from the store's checkpoint, or start it fresh with `tracker`. Raises HistoryError."""
    try:
        checkpoint = read_checkpoint(store)
        if checkpoint is None:
            return ResumeResult(tracker)
        decision = decide(checkpoint, host_time, node=tracker.node, resume_window=resume_window)
        if isinstance(decision, Resume):
            return _resume(store, agent, checkpoint, tracker, host_time=host_time, decision=decision)
    except CheckpointError as err:
        log.error("%s: its last checkpoint cannot be used, and counters restart at 0: %s", store.path, err)  # noqa: TRY400  no bug of ours
        return ResumeResult(tracker)
    return _start_fresh(agent, tracker, host_time, decision)


def _resume(
    store: HistoryStore,
    agent: Agent,
    checkpoint: StoredCheckpoint,
    new_tracker: JobTracker,
    *,
    host_time: HostTime,
    decision: Resume,
) -> ResumeResult:
    node, info = new_tracker.node, checkpoint.info
    tracker = JobTracker(node=node, ledger_id=info.life, sample_seconds=new_tracker.sample_seconds)
    try:
        tracker.load(checkpoint.tallies, checkpoint.samples)
        agent.resume(checkpoint.ledger, now=host_time.now, reason=decision.reason)
    except (CheckpointError, *UNREADABLE):
        return _start_fresh(agent, new_tracker, host_time, close_books(checkpoint, host_time, node=node))
    try:  # no longer marked as clean: from here on scrapes may return newer values
        store.write(state=[encode_info(info.life, info.boot)], durable=False)
    except HistoryError:  # the old mark may stay in the file: resuming would be unsafe after a crash
        edges = close_books(checkpoint, host_time, node=node).edges
        agent.start_fresh(edges, now=host_time.now, reason=decision.reason)
        raise
    log.info("%s; counters continue from its checkpoint", decision.reason)
    return ResumeResult(tracker, decision.at)


def _start_fresh(agent: Agent, tracker: JobTracker, host_time: HostTime, decision: StartFresh) -> ResumeResult:
    agent.start_fresh(decision.edges, now=host_time.now, reason=decision.reason)
    log.info("%s; its books are closed, and counters restart at 0", decision.reason)
    return ResumeResult(tracker, closed=decision)


def unclosed_books(store: HistoryStore, tracker: JobTracker, host_time: HostTime) -> StartFresh | None:
    """Close the books of another ledger's checkpoint in the store, before it is overwritten; None if there is none."""
    try:
        checkpoint = read_checkpoint(store)
        return (
            None
            if checkpoint is None or checkpoint.info.life == tracker.ledger_id
            else close_books(checkpoint, host_time, node=tracker.node)
        )
    except CheckpointError as err:
        log.error("%s: its last checkpoint cannot be used: %s", store.path, err)  # noqa: TRY400  likewise
        return None


def encode_info(ledger_id: str, boot: str, *, clean: bool = False, outrun: bool = False) -> tuple[str, bytes]:
    """Return a CheckpointInfo as name and value for `HistoryStore.write`."""
    return "about", msgspec.msgpack.encode(CheckpointInfo(ledger_id, boot, clean, outrun))
