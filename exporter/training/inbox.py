"""Accepts or refuses messages, and queues the accepted ones for the receiver.

Owns the senders with their rate limits, the interval that each message covers, the queue, and the counts by outcome.
Refuses to find out which job a process belongs to. Several threads call it; one lock guards what they share.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from msgspec import Struct

from exporter.core.model import MS, NEVER, SECOND
from exporter.training.message import MOST_BYTES, OUTCOMES, Message, MessageError, ReportRefusedError, decode_message
from exporter.training.peer import Peer
from exporter.workloads import WorkloadProcess

SLACK = SECOND
"""Clocks, schedulers and queues shift a message by so much; within it an interval is cut to what is possible."""
OLDEST = 3600 * SECOND


def resolve_interval(
    message: Message, *, at: int | None, arrived: int, begun: int = NEVER, until: int = NEVER
) -> tuple[int, int]:
    """Give [start, end) of the message, on whole milliseconds; raises RefusedError.

    `at` is when the message says that its interval ended, `begun` when its process began, `until` how far that has
    spoken: time is spoken of once.
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
            "replayed", f"the process has spoken of the last {_format_seconds(until - start)}", field="$.at"
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
"""Messages that may come at once, where a second's worth is less."""
MOST_WAITING = 16_384
"""Messages for the reading thread; more are refused."""
MOST_UNMET = MOST_WAITING // 2
"""The same, from whom it is not known yet whose he is: anybody may make processes without end."""
CONNECTIONS_EACH = 8
"""Of one process, so that none has them all."""
_REMEMBERED_SENDERS = 4
"""Times reports.processes: those that have gone are remembered, or a connection made anew could say all again."""
Reply = Callable[[ReportRefusedError], None]
"""Takes an answer to where the message came from. Never blocks."""


class Sender(Struct, eq=False):
    """A process that speaks."""

    peer: Peer
    started_at: int
    """When it was started, on our clock."""
    tokens: float
    """Messages that it may send now."""
    tokens_at: int
    """When that was so."""
    process: WorkloadProcess | None = None
    looked_up_at: int = NEVER
    """When it was last asked whose it is."""
    warned_at: int = NEVER
    """When it was last told that it is too fast."""
    reported_until: int = NEVER
    """The end of what it has spoken of."""
    last_event: Message | None = None
    """The last message without an interval."""
    last_message_at: int = NEVER
    connections: int = 0

    @property
    def is_pending(self) -> bool:
        """Nobody has been asked yet whose it is."""
        return self.process is None and self.looked_up_at == NEVER

    @property
    def unidentified(self) -> bool:
        """It was asked whose it is, and is nobody's."""
        return self.process is None and self.looked_up_at != NEVER


class QueuedReport(Struct, eq=False):
    """A message that was taken, and will count if its sender is a job's."""

    sender: Sender
    message: Message
    start: int
    end: int
    reply: Reply | None = None


class Inbox:
    """Where all that is said comes in."""

    def __init__(self, *, per_second: float, processes: int) -> None:
        """`processes` is the most that may speak at a time, each `per_second` messages."""
        self._rate, self._burst = per_second / SECOND, max(BURST, per_second)
        self._most = _REMEMBERED_SENDERS * processes
        self._lock = threading.Lock()
        self._senders: dict[Peer, Sender] = {}
        self._unidentified: dict[Peer, Sender] = {}
        self._queue: deque[QueuedReport] = deque()
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self.likely_pids: tuple[int, ...] = ()
        """Processes that GPUs list: if it is not known which one speaks, it is likely one of these."""

    def sender(self, peer: Peer, *, begun: int, now: int) -> Sender:
        """Give the sender that the process is, new or known."""
        with self._lock:
            known = self._senders.get(peer)
            if known is None:
                self._make_room()
                known = self._senders[peer] = Sender(peer, begun, self._burst, now)
                self._unidentified[peer] = known
            return known

    def connect(self, sender: Sender) -> None:
        """Count a connection of the sender; raises RefusedError when it has enough."""
        with self._lock:
            if sender.connections >= CONNECTIONS_EACH:
                raise ReportRefusedError(
                    "too_many_connections", f"this process has {CONNECTIONS_EACH} connections already"
                )
            sender.connections += 1

    def disconnect(self, sender: Sender) -> None:
        """It has one less."""
        with self._lock:
            sender.connections -= 1

    def receive(self, sender: Sender, raw: bytes, *, pid: int | None, now: int, reply: Reply | None = None) -> None:
        """Take what process `pid` said at `now`, if that is the sender; raises RefusedError, which is counted."""
        with self._lock:
            try:
                if pid != sender.peer.pid:
                    raise _inherited_error(sender)
                self._queue.append(self._queued_report(sender, raw, now, reply))
            except ReportRefusedError as err:
                self._counts[err.outcome] += 1
                raise

    def count(self, outcome: str, messages: int = 1) -> None:
        """Count that something became of so many messages."""
        with self._lock:
            self._counts[outcome] += messages

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Messages by outcome, since the start."""
        with self._lock:
            return tuple(self._counts.items())

    def unidentified_senders(self) -> list[Sender]:
        """Those of whom it is not known whose they are, the earliest first."""
        with self._lock:
            return list(self._unidentified.values())

    def mark_identified(self, senders: Iterable[Sender]) -> None:
        """It is known now whose these are."""
        with self._lock:
            for sender in senders:
                self._unidentified.pop(sender.peer, None)

    def drain(self, most: int) -> list[QueuedReport]:
        """Give what was taken, oldest first. Of whom nobody has asked about yet, it waits."""
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
        self._take_token(sender, now)
        message = _decode(raw)
        if sender.unidentified:
            raise unidentified_error(sender)
        if len(self._queue) >= (MOST_UNMET if sender.is_pending else MOST_WAITING):
            raise ReportRefusedError("busy", f"{len(self._queue)} messages wait here: the daemon is behind; send fewer")
        started_at, reported_until = sender.started_at, sender.reported_until
        start, end = resolve_interval(message, at=message.at, arrived=now, begun=started_at, until=reported_until)
        if message.seconds:
            sender.reported_until = end
        else:
            _check_event(sender, message)
        return QueuedReport(sender, message, start, end, reply)

    def _take_token(self, sender: Sender, now: int) -> None:
        """A token bucket: it fills at the rate, and a message takes one."""
        tokens = sender.tokens + (now - sender.tokens_at) * self._rate
        sender.tokens, sender.tokens_at = min(tokens, self._burst), now
        if sender.tokens >= 1.0:
            sender.tokens -= 1.0
            return
        already_warned = now - sender.warned_at < SECOND
        sender.warned_at = sender.warned_at if already_warned else now
        most = self._rate * SECOND
        raise ReportRefusedError(
            "too_many", f"more than {most:g} messages a second (reports.per_second)", silent=already_warned
        )

    def _make_room(self) -> None:
        """Where there are too many, forget who came first of those that have no connection."""
        gone = (peer for peer, one in self._senders.items() if not one.connections)
        for peer in list(islice(gone, max(0, len(self._senders) + 1 - self._most))):
            gone_one = self._senders.pop(peer)
            gone_one.looked_up_at = max(
                gone_one.looked_up_at, gone_one.tokens_at
            )  # nobody will ask for it: what waits is refused
            self._unidentified.pop(peer, None)


def unidentified_error(sender: Sender) -> ReportRefusedError:
    """Say why a stranger is not heard, and what to do."""
    return ReportRefusedError(
        "unknown_process",
        f"process {sender.peer.pid} belongs to no job that holds a GPU of this node, as its scheduler knows it;"
        " asked again every 10 s",
    )


def _inherited_error(sender: Sender) -> ReportRefusedError:
    return ReportRefusedError(
        "other_process", f"process {sender.peer.pid} made this connection: after a fork make one of your own"
    )


def _decode(raw: bytes) -> Message:
    if len(raw) > MOST_BYTES:
        raise ReportRefusedError("too_large", f"longer than {MOST_BYTES} bytes")
    try:
        return decode_message(raw)
    except MessageError as err:
        raise ReportRefusedError("malformed", str(err), field=err.field) from err


def _check_event(sender: Sender, message: Message) -> None:
    """An event is told by when it was: the same one of the same moment is that one again."""
    if message.at is not None and message == sender.last_event:
        raise ReportRefusedError("replayed", "the process has said just that", field="$.at")
    sender.last_event = message
