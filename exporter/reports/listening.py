"""The unix socket on which jobs report: one thread that waits for nobody.

Owns the socket, its connections and what each may cost: packets that come too fast are refused, and what a connection
sends after that is left in its own buffer for a while. Refuses to read a message: that is the intake's.

The socket is open to all users, for who speaks is proven (identity): by the credentials of whoever connected, and by
those of the sender of each packet, since a child inherits the connection.
"""

import heapq
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from exporter.clock import Clock
from exporter.reports.binding import listen, room
from exporter.reports.identity import CREDENTIALS_SPACE, age_of, peer_of, sender_pid
from exporter.reports.intake import Back, Intake, Sender
from exporter.reports.message import MOST_BYTES
from exporter.reports.outcomes import RefusedError

log = logging.getLogger(__name__)
_ANSWER_BYTES = 4096
"""Kept by the kernel for a peer that does not read."""
_PAUSE = 0.05
"""Seconds from one look to the next: to be woken for each message of 512 ranks would be most of what they cost."""
_TURNS = 64
"""Packets of one connection at a look, one after another with all the others."""
_ACCEPTS, _ACCEPTS_PER_SECOND, _ACCEPTS_BURST = 64, 500.0, 1024.0
_EXCESS = 32
"""Refused packets after which a connection is not read for a while."""
_MUTED, _MUTED_MOST = 0.25, 8.0
"""Seconds that lasts; twice as long each time, until it has been good for half a minute."""
_GOOD = 30.0
_COSTLY = frozenset({"too_many", "other_process"})


class _Connection(Struct, eq=False):
    sock: socket.socket
    sender: Sender
    back: Back
    excess: int = 0
    """Packets refused since it was last muted, because they were too many."""
    muted: float = 0.0
    """For how long it was, last."""
    good: float = 0.0
    """When that will be forgotten."""


class Listening:
    """The thread, while it lives."""

    def __init__(self, path: str | Path, intake: Intake, *, clock: Clock, proc: Path, most: int) -> None:
        """Listen on `path` for `most` connections; raises ListenError. `proc` is the host's process tree."""
        self._path, self._intake, self._clock, self._proc = Path(path), intake, clock, proc
        self._most = min(most, room(most))
        self._listener = listen(self._path)
        self._inode = self._path.lstat().st_ino
        self._connections: dict[int, _Connection] = {}
        self._muted: list[tuple[float, int]] = []
        self._answers: deque[tuple[socket.socket, RefusedError]] = deque()
        self._gate, self._gate_at = _ACCEPTS_BURST, time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for descriptor in (self._listener.fileno(), self._wake):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._stopping = self._full = False
        self.spent = 0.0
        """Seconds of the processor that the thread has used, when it last slept."""
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether anybody is heard."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Hang up on all and take the socket away, if it still is ours."""
        self._stopping = True
        if self._thread.is_alive():
            with suppress(OSError):
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=2.0)
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()

    def _run(self) -> None:
        try:
            while not self._stopping:
                turns, patience = _TURNS, self._patience()
                while self._round(patience) and turns and not self._stopping:
                    turns, patience = turns - 1, 0.0
                self.spent = time.thread_time()
                time.sleep(_PAUSE)
        except Exception:
            log.exception("reports: the socket's thread has failed; please report this")
        finally:
            self._let_go()

    def _round(self, patience: float) -> bool:
        """One packet of each connection that has some; False: there was nothing."""
        events = self._epoll.poll(patience, maxevents=4096)
        for descriptor, _ in events:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._read(connection)
            elif descriptor == self._wake:
                self._answer()
            else:
                self._accept()
        self._unmute()
        return bool(events)

    def _let_go(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    # Connections.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._let_in():
                self._mute(self._listener.fileno(), 1 / _ACCEPTS_PER_SECOND)
                return
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if not self._full:
                    log.warning("reports: nobody more can be let in for now: %s", err.strerror)
                self._full = True
                self._mute(self._listener.fileno(), 1.0)
                return
            self._full = False
            self._greet(sock)

    def _let_in(self) -> bool:
        """A token bucket: whoever connects without end costs no more than so much."""
        now = time.monotonic()
        filled = self._gate + (now - self._gate_at) * _ACCEPTS_PER_SECOND
        self._gate, self._gate_at = min(filled, _ACCEPTS_BURST), now
        if self._gate < 1.0:
            return False
        self._gate -= 1.0
        return True

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(0.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANSWER_BYTES)
        try:
            connection = _Connection(sock, self._sender(sock), partial(self._later, sock))
        except RefusedError as err:
            self._intake.count(err.outcome)
            _say(sock, err)
            _hang_up(sock)
            return
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _sender(self, sock: socket.socket) -> Sender:
        if len(self._connections) >= self._most:
            self._make_room()
        if len(self._connections) >= self._most:
            raise RefusedError(
                "too_many_connections", f"{self._most} are connected, as many as may be (reports.processes)"
            )
        peer, now = peer_of(sock, self._proc), self._clock.now()
        sender = self._intake.sender(peer, begun=now - age_of(peer), now=now)
        self._intake.connect(sender)
        return sender

    def _make_room(self) -> None:
        """Hang up on those who are nobody's: they may come again, and others want their place."""
        muted = {descriptor for _, descriptor in self._muted}
        for descriptor, connection in list(self._connections.items()):
            if connection.sender.stranger and descriptor not in muted:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        with suppress(OSError):  # it is not looked at while it is muted
            self._epoll.unregister(connection.sock)
        connection.sock.close()
        self._intake.disconnect(connection.sender)

    # Packets.

    def _read(self, connection: _Connection) -> None:
        try:
            data, ancillary, _, _ = connection.sock.recvmsg(MOST_BYTES + 1, CREDENTIALS_SPACE)
        except (
            BlockingIOError,
            ConnectionResetError,
        ):  # it went without reading its answers: what it said is still here
            return
        except OSError:
            data, ancillary = b"", []
        if not data and not ancillary:  # an empty packet has credentials, the end of a connection has none
            self._drop(connection)
            return
        pid, now = sender_pid(ancillary), self._clock.now()
        try:
            self._intake.hear(connection.sender, data, pid=pid, now=now, back=connection.back)
        except RefusedError as err:
            self._refused(connection, err)

    def _refused(self, connection: _Connection, err: RefusedError) -> None:
        _say(connection.sock, err)
        connection.excess += err.outcome in _COSTLY
        if connection.excess >= _EXCESS:
            now = time.monotonic()
            again = min(_MUTED_MOST, 2.0 * connection.muted) if now < connection.good else _MUTED
            connection.excess, connection.muted, connection.good = 0, again, now + again + _GOOD
            self._mute(connection.sock.fileno(), again)

    def _mute(self, descriptor: int, seconds: float) -> None:
        """Do not look at it for a while; what it sends stays in its own buffer, and then is not accepted."""
        self._epoll.unregister(descriptor)
        heapq.heappush(self._muted, (time.monotonic() + seconds, descriptor))

    def _unmute(self) -> None:
        now = time.monotonic()
        while self._muted and self._muted[0][0] <= now:
            self._epoll.register(heapq.heappop(self._muted)[1], select.EPOLLIN)

    def _patience(self) -> float:
        return max(0.0, self._muted[0][0] - time.monotonic()) if self._muted else -1.0

    # Answers.

    def _later(self, sock: socket.socket, refused: RefusedError) -> None:
        """Called by other threads."""
        self._answers.append((sock, refused))
        with suppress(OSError):  # it may just have been closed
            os.eventfd_write(self._wake, 1)

    def _answer(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._answers:
            _say(*self._answers.popleft())


def _say(sock: socket.socket, refused: RefusedError) -> None:
    """Tell why, if it reads; one that does not has only itself to thank."""
    if not refused.silent:
        with suppress(OSError):
            sock.send(refused.packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _hang_up(sock: socket.socket) -> None:
    """Close a connection so that its answer can be read: with something unread it would be reset."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1):
            pass
    sock.close()
