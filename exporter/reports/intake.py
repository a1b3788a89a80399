"""What is taken of what processes say, and what is refused: one way for the socket, for HTTP and for logs.

Owns the senders, each a process with its pace and its past, the queue to the reading thread, and the counts. Refuses
to find out who a process is, or whose. Called by several threads: what they share is behind one lock.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from msgspec import Struct

from exporter.core.model import NEVER, SECOND
from exporter.reports.identity import Peer
from exporter.reports.message import MOST_BYTES, Message, MessageError, decoded
from exporter.reports.outcomes import OUTCOMES, RefusedError
from exporter.reports.placing import placed
from exporter.workloads import Guest

BURST = 5.0
"""Messages that may come at once, where a second's worth is less."""
MOST_WAITING = 16_384
"""Messages for the reading thread; more are refused."""
MOST_UNMET = MOST_WAITING // 2
"""The same, from whom it is not known yet whose he is: anybody may make processes without end."""
CONNECTIONS_EACH = 8
"""Of one process, so that none has them all."""
_SENDERS = 4
"""Times reports.processes: those that have gone are remembered, or a connection made anew could say all again."""
Back = Callable[[RefusedError], None]
"""Takes an answer to where the message came from. Never blocks."""


class Sender(Struct, eq=False):
    """A process that speaks."""

    peer: Peer
    begun: int
    """When it was started, on our clock."""
    spare: float
    """Messages that it may send now."""
    paced: int
    """When that was so."""
    guest: Guest | None = None
    asked: int = NEVER
    """When it was last asked whose it is."""
    told: int = NEVER
    """When it was last told that it is too fast."""
    until: int = NEVER
    """The end of what it has spoken of."""
    event: Message | None = None
    """The last message without an interval."""
    heard: int = NEVER
    connections: int = 0

    @property
    def unmet(self) -> bool:
        """Nobody has been asked yet whose it is."""
        return self.guest is None and self.asked == NEVER

    @property
    def stranger(self) -> bool:
        """It was asked whose it is, and is nobody's."""
        return self.guest is None and self.asked != NEVER


class Letter(Struct, eq=False):
    """A message that was taken, and will count if its sender is a job's."""

    sender: Sender
    message: Message
    start: int
    end: int
    back: Back | None = None


class Intake:
    """Where all that is said comes in."""

    def __init__(self, *, per_second: float, processes: int) -> None:
        """`processes` is the most that may speak at a time, each `per_second` messages."""
        self._rate, self._burst = per_second / SECOND, max(BURST, per_second)
        self._most = _SENDERS * processes
        self._lock = threading.Lock()
        self._senders: dict[Peer, Sender] = {}
        self._strangers: dict[Peer, Sender] = {}
        self._queue: deque[Letter] = deque()
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self.suspects: tuple[int, ...] = ()
        """Processes that GPUs list: if it is not known which one speaks, it is likely one of these."""

    def sender(self, peer: Peer, *, begun: int, now: int) -> Sender:
        """Give the sender that the process is, new or known."""
        with self._lock:
            known = self._senders.get(peer)
            if known is None:
                self._make_room()
                known = self._senders[peer] = Sender(peer, begun, self._burst, now)
                self._strangers[peer] = known
            return known

    def connect(self, sender: Sender) -> None:
        """Count a connection of the sender; raises RefusedError when it has enough."""
        with self._lock:
            if sender.connections >= CONNECTIONS_EACH:
                raise RefusedError("too_many_connections", f"this process has {CONNECTIONS_EACH} connections already")
            sender.connections += 1

    def disconnect(self, sender: Sender) -> None:
        """It has one less."""
        with self._lock:
            sender.connections -= 1

    def hear(self, sender: Sender, raw: bytes, *, pid: int | None, now: int, back: Back | None = None) -> None:
        """Take what process `pid` said at `now`, if that is the sender; raises RefusedError, which is counted."""
        with self._lock:
            try:
                if pid != sender.peer.pid:
                    raise _inherited(sender)
                self._queue.append(self._letter(sender, raw, now, back))
            except RefusedError as err:
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

    def strangers(self) -> list[Sender]:
        """Those of whom it is not known whose they are, the earliest first."""
        with self._lock:
            return list(self._strangers.values())

    def met(self, senders: Iterable[Sender]) -> None:
        """It is known now whose these are."""
        with self._lock:
            for sender in senders:
                self._strangers.pop(sender.peer, None)

    def letters(self, most: int) -> list[Letter]:
        """Give what was taken, oldest first. Of whom nobody has asked about yet, it waits."""
        ready: list[Letter] = []
        waiting: list[Letter] = []
        for _ in range(len(self._queue)):
            if len(ready) == most:
                break
            letter = self._queue.popleft()
            (waiting if letter.sender.unmet else ready).append(letter)
        self._queue.extendleft(reversed(waiting))
        return ready

    def _letter(self, sender: Sender, raw: bytes, now: int, back: Back | None) -> Letter:
        sender.heard = now
        self._pace(sender, now)
        message = _message(raw)
        if sender.stranger:
            raise nobodys(sender)
        if len(self._queue) >= (MOST_UNMET if sender.unmet else MOST_WAITING):
            raise RefusedError("busy", f"{len(self._queue)} messages wait here: the daemon is behind; send fewer")
        begun, until = sender.begun, sender.until
        start, end = placed(message, at=message.at, arrived=now, begun=begun, until=until)
        if message.seconds:
            sender.until = end
        else:
            _new(sender, message)
        return Letter(sender, message, start, end, back)

    def _pace(self, sender: Sender, now: int) -> None:
        """A token bucket: it fills at the rate, and a message takes one."""
        spare = sender.spare + (now - sender.paced) * self._rate
        sender.spare, sender.paced = min(spare, self._burst), now
        if sender.spare >= 1.0:
            sender.spare -= 1.0
            return
        silent = now - sender.told < SECOND
        sender.told = sender.told if silent else now
        most = self._rate * SECOND
        raise RefusedError("too_many", f"more than {most:g} messages a second (reports.per_second)", silent=silent)

    def _make_room(self) -> None:
        """Where there are too many, forget who came first of those that have no connection."""
        gone = (peer for peer, one in self._senders.items() if not one.connections)
        for peer in list(islice(gone, max(0, len(self._senders) + 1 - self._most))):
            gone_one = self._senders.pop(peer)
            gone_one.asked = max(gone_one.asked, gone_one.paced)  # nobody will ask for it: what waits is refused
            self._strangers.pop(peer, None)


def nobodys(sender: Sender) -> RefusedError:
    """Say why a stranger is not heard, and what to do."""
    return RefusedError(
        "unknown_process",
        f"process {sender.peer.pid} belongs to no job that holds a GPU of this node, as its scheduler knows it;"
        " asked again every 10 s",
    )


def _inherited(sender: Sender) -> RefusedError:
    return RefusedError(
        "other_process", f"process {sender.peer.pid} made this connection: after a fork make one of your own"
    )


def _message(raw: bytes) -> Message:
    if len(raw) > MOST_BYTES:
        raise RefusedError("too_large", f"longer than {MOST_BYTES} bytes")
    try:
        return decoded(raw)
    except MessageError as err:
        raise RefusedError("malformed", str(err), field=err.field) from err


def _new(sender: Sender, message: Message) -> None:
    """An event is told by when it was: the same one of the same moment is that one again."""
    if message.at is not None and message == sender.event:
        raise RefusedError("replayed", "the process has said just that", field="$.at")
    sender.event = message
