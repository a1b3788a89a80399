"""Accepts or rejects messages, and queues the accepted ones for the receiver.

Keeps the senders with their rate limits, the interval that each message covers, the queue, and the counts by outcome.
Called from several threads; one lock guards the shared state.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from msgspec import Struct

from exporter.connections import TokenBucket
from exporter.core.model import MS, NEVER, SECOND
from exporter.training.message import OUTCOMES, Message, ReportRefusedError, decode_message
from exporter.training.peer import Peer
from exporter.workloads import WorkloadProcess

SLACK = SECOND
"""Tolerance for clock and queueing delays, in nanoseconds; within it an interval is clipped, not rejected."""
OLDEST = 3600 * SECOND
"""Maximum age of a message, in nanoseconds."""


def resolve_interval(
    message: Message, *, at: int | None, arrived: int, begun: int = NEVER, until: int = NEVER
) -> tuple[int, int]:
    """Compute [start, end) of the message, on whole milliseconds; raises ReportRefusedError.

    `at` is the reported end of the interval, `begun` the start of the process, `until` the end of its last reported
    interval: no time is reported twice. All are monotonic nanoseconds.
    """
    end = _interval_end(at, arrived)
    length = max(round(message.seconds * 1000), 1) * MS if message.seconds else 0
    start = end - length
    if start < begun - SLACK or (length and end <= begun):
        raise ReportRefusedError(
            "before_start", f"begins {_format_seconds(begun - start)} before the process did", field="$.seconds"
        )
    if (length and end <= until) or until - start > SLACK:
        raise ReportRefusedError(
            "replayed", f"the process has already reported the last {_format_seconds(until - start)}", field="$.at"
        )
    start = max(start, begun, until)
    return start, max(start, end)


def _interval_end(at: int | None, arrived: int) -> int:
    if at is None:
        return arrived
    if at > arrived + SLACK:
        raise ReportRefusedError(
            "future",
            f"is {_format_seconds(at - arrived)} in the future:"
            " nanoseconds of CLOCK_MONOTONIC are wanted, not Unix time",
            field="$.at",
        )
    if at < arrived - OLDEST:
        raise ReportRefusedError("old", f"is {_format_seconds(arrived - at)} ago: an hour is the most", field="$.at")
    return min(at // MS * MS, arrived)


def _format_seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / SECOND:.3f} s"


BURST = 5.0
"""Minimum burst of a sender's rate limit, in messages; the burst is one second's worth if that is more."""
MOST_WAITING = 16_384
"""Maximum length of the queue; further messages are rejected."""
MOST_UNIDENTIFIED = MOST_WAITING // 2
"""The same for senders that are not identified yet: any user can start processes without end."""
CONNECTIONS_EACH = 8
"""Maximum connections of one process, so that none can take them all."""
_REMEMBERED_SENDERS = 4
"""Senders kept, as a multiple of reports.processes: disconnected ones too, so that a reconnect cannot replay."""
Reply = Callable[[ReportRefusedError], None]
"""Sends a rejection to the sender of a message. Never blocks."""


class Sender(Struct, eq=False):
    """A process that sends reports. Times are monotonic nanoseconds of the daemon's clock."""

    peer: Peer
    started_at: int
    """Start of the process."""
    rate_limit: TokenBucket
    process: WorkloadProcess | None = None
    """The identified process; None: not identified."""
    looked_up_at: int = NEVER
    """Time of the last lookup of its job."""
    warned_at: int = NEVER
    """Time of the last rate limit warning."""
    reported_until: int = NEVER
    """End of the last interval it reported."""
    last_event: Message | None = None
    """The last message without an interval."""
    last_message_at: int = NEVER
    connections: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether its job has not been looked up yet."""
        return self.process is None and self.looked_up_at == NEVER

    @property
    def unidentified(self) -> bool:
        """Whether the last lookup found no job for it."""
        return self.process is None and self.looked_up_at != NEVER


class QueuedReport(Struct, eq=False):
    """An accepted message; it is applied if its sender is identified as a job's process."""

    sender: Sender
    message: Message
    start: int
    end: int
    reply: Reply | None = None


class Inbox:
    """Accepts messages from all listeners; safe to call from several threads."""

    def __init__(self, *, per_second: float, processes: int) -> None:
        """`processes` is the maximum of simultaneous senders, each limited to `per_second` messages a second."""
        self._per_second, self._most = per_second, _REMEMBERED_SENDERS * processes
        self._lock = threading.Lock()
        self._senders: dict[Peer, Sender] = {}
        self._queue: deque[QueuedReport] = deque()
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self.jobs: Mapping[int, str] = {}
        """Jobs of the processes on GPUs, by pid: the search for the owner of an HTTP connection starts with them."""

    def sender(self, peer: Peer, *, begun: int) -> Sender:
        """Return the sender of the process `peer`; creates it with start time `begun` if it is new."""
        with self._lock:
            known = self._senders.get(peer)
            if known is None:
                self._make_room()
                rate_limit = TokenBucket(max(BURST, self._per_second), self._per_second / SECOND)
                known = self._senders[peer] = Sender(peer, begun, rate_limit)
            return known

    def connect(self, sender: Sender) -> None:
        """Count a new connection of the sender; raises ReportRefusedError above CONNECTIONS_EACH."""
        with self._lock:
            if sender.connections >= CONNECTIONS_EACH:
                raise ReportRefusedError(
                    "too_many_connections", f"this process has {CONNECTIONS_EACH} connections already"
                )
            sender.connections += 1

    def disconnect(self, sender: Sender) -> None:
        """Count a connection of the sender as closed."""
        with self._lock:
            sender.connections -= 1

    def receive(self, sender: Sender, raw: bytes, *, pid: int | None, now: int, reply: Reply | None = None) -> None:
        """Queue the message `raw` that process `pid` sent at `now`; raises ReportRefusedError, and counts it."""
        with self._lock:
            try:
                if pid != sender.peer.pid:
                    raise _inherited_error(sender)
                self._queue.append(self._queued_report(sender, raw, now, reply))
            except ReportRefusedError as err:
                self._counts[err.outcome] += 1
                raise

    def count(self, outcome: str, messages: int = 1) -> None:
        """Count `messages` with the outcome."""
        with self._lock:
            self._counts[outcome] += messages

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Number of messages by outcome, since the daemon started."""
        with self._lock:
            return tuple(self._counts.items())

    def unidentified_senders(self) -> list[Sender]:
        """Senders without an identified process, oldest first."""
        with self._lock:
            return [sender for sender in self._senders.values() if sender.process is None]

    def drain(self, most: int) -> list[QueuedReport]:
        """Remove and return up to `most` messages, oldest first; those of senders not looked up yet stay queued."""
        ready: list[QueuedReport] = []
        waiting: list[QueuedReport] = []
        for _ in range(len(self._queue)):
            if len(ready) == most:
                break
            report = self._queue.popleft()
            (waiting if report.sender.is_pending else ready).append(report)
        self._queue.extendleft(reversed(waiting))
        return ready

    def _queued_report(self, sender: Sender, raw: bytes, now: int, reply: Reply | None) -> QueuedReport:
        sender.last_message_at = now
        self._apply_rate_limit(sender, now)
        message = decode_message(raw)
        if sender.unidentified:
            raise unidentified_error(sender)
        if len(self._queue) >= (MOST_UNIDENTIFIED if sender.is_pending else MOST_WAITING):
            raise ReportRefusedError("busy", f"{len(self._queue)} messages wait here: the daemon is behind; send fewer")
        started_at, reported_until = sender.started_at, sender.reported_until
        start, end = resolve_interval(message, at=message.at, arrived=now, begun=started_at, until=reported_until)
        if message.seconds:
            sender.reported_until = end
        else:
            _check_event(sender, message)
        return QueuedReport(sender, message, start, end, reply)

    def _apply_rate_limit(self, sender: Sender, now: int) -> None:
        if sender.rate_limit.take(now):
            return
        already_warned = now - sender.warned_at < SECOND
        sender.warned_at = sender.warned_at if already_warned else now
        reason = f"more than {self._per_second:g} messages a second (reports.per_second)"
        raise ReportRefusedError("too_many", reason, silent=already_warned)

    def _make_room(self) -> None:
        """Forget the oldest senders without a connection if there are too many."""
        disconnected = (peer for peer, sender in self._senders.items() if not sender.connections)
        for peer in list(islice(disconnected, max(0, len(self._senders) + 1 - self._most))):
            self._senders.pop(peer).looked_up_at = 0  # no longer pending: its queued messages are drained and rejected


def unidentified_error(sender: Sender) -> ReportRefusedError:
    """The rejection of a sender that belongs to no job."""
    return ReportRefusedError(
        "unknown_process",
        f"process {sender.peer.pid} belongs to no job that holds a GPU of this node, as its scheduler knows it;"
        " asked again every 10 s",
    )


def _inherited_error(sender: Sender) -> ReportRefusedError:
    return ReportRefusedError(
        "other_process", f"process {sender.peer.pid} made this connection: after a fork make one of your own"
    )


def _check_event(sender: Sender, message: Message) -> None:
    """Reject a repeated event: events are identified by their time `at`. Raises ReportRefusedError."""
    if message.at is not None and message == sender.last_event:
        raise ReportRefusedError("replayed", "the process has already sent this message", field="$.at")
    sender.last_event = message
