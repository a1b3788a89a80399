"""Listens on the unix socket on which training jobs report, in one thread that never blocks on a client.

All users may connect: a sender is identified by the credentials of the process that connected and of each packet's
sender (a child inherits the connection). A sender above its rate is rejected first, and then not read for a while.
Replaces only a socket on which no process listens.
"""

import errno
import heapq
import logging
import os
import resource
import select
import socket
import stat
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from exporter.clock import Clock
from exporter.connections import TokenBucket
from exporter.training.inbox import Inbox, Reply, Sender
from exporter.training.message import MOST_BYTES, ReportRefusedError
from exporter.training.peer import CREDENTIALS_SPACE, connected_peer, process_age, sender_pid
from exporter.worker import Worker

_BACKLOG = 1024


class ReportListenError(Exception):
    """A listener cannot be opened; the message names the address, the reason and a remedy."""


def bind_socket(
    path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET, *, key: str = "reports.socket"
) -> socket.socket:
    """Create the socket, writable for all users, and its directory; replaces a stale one. Raises ReportListenError.

    `key` is the setting that has the path, for messages.
    """
    try:
        _make_folder(path.parent)
        _remove_stale(path, kind, key)
        return _bind(path, kind, key)
    except OSError as err:
        why = err.strerror or err
        raise ReportListenError(f"{path}: {why}: run as root, or set {key} to a path that can be created") from err


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        folder.chmod(0o755)


def _bind(path: Path, kind: socket.SocketKind, key: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        if kind == socket.SOCK_SEQPACKET:  # each packet has its sender
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # inherited by accepted connections
        sock.settimeout(0.0)
        sock.bind(os.fspath(path))
        _allow_all_users(path, key)
        sock.listen(_BACKLOG)
    except (OSError, ReportListenError):
        sock.close()
        raise
    return sock


def _allow_all_users(path: Path, key: str) -> None:
    """Make the new socket writable for all users; raises ReportListenError if another user has replaced the file."""
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        created = os.fstat(handle)
        if not stat.S_ISSOCK(created.st_mode) or created.st_uid != os.geteuid() or created.st_nlink > 1:
            raise ReportListenError(f"{path}: another user can write to its directory: set {key} to another path")
        Path(f"/proc/self/fd/{handle}").chmod(0o666)
    finally:
        os.close(handle)


def _remove_stale(path: Path, kind: socket.SocketKind, key: str) -> None:
    """Remove the socket of a daemon that no longer runs; raises ReportListenError if it is in use or no socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ReportListenError(f"{path}: exists and is no socket: move it away, or set {key} to another path")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(0.0)
        answer = probe.connect_ex(os.fspath(path))
    if answer != errno.ECONNREFUSED:
        raise ReportListenError(
            f"{path}: in use by another process ({os.strerror(answer) if answer else 'it answers'}): stop the second"
            f" daemon, or set {key} to another path"
        )
    path.unlink()


OTHER_DESCRIPTORS = 1024
"""Open files that are no connections of jobs."""


def connection_limit(most: int) -> int:
    """Raise the limit of open files for `most` connections; returns how many connections that limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * most + OTHER_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return most if soft == resource.RLIM_INFINITY else soft // 2


log = logging.getLogger(__name__)
_SEND_BUFFER_BYTES = 4096
"""Send buffer of a connection: replies that the kernel keeps for a peer that does not read."""
_PAUSE = 0.05
"""Seconds between two polls: with 512 ranks, a wake-up for each message would cost more than the messages."""
_PACKETS_PER_ROUND = 64
"""Maximum packets of one connection per poll; each round reads one packet of every connection."""
_ACCEPTS, _ACCEPTS_PER_SECOND, _ACCEPTS_BURST = 64, 500.0, 1024.0
"""Maximum connections accepted per round, per second and at once, so that reconnecting clients cost little."""
_REFUSED_BEFORE_MUTE = 32
"""Rejected packets after which a connection is muted: it is not read for a while."""
_MUTED, _MUTED_MOST = 0.25, 8.0
"""First and maximum duration of muting, in seconds; it doubles each time."""
_FORGIVEN_AFTER = 30.0
"""Seconds after muting until the duration starts from `_MUTED` again."""
_COSTLY = frozenset({"too_many", "other_process"})
"""Outcomes that count towards muting."""


class _SocketConnection(Struct, eq=False):
    sock: socket.socket
    sender: Sender
    reply: Reply
    refused_packets: int = 0
    """Packets with a `_COSTLY` outcome since the connection was last muted."""
    muted_seconds: float = 0.0
    """Duration of the last muting."""
    forgiven_at: float = 0.0
    """Time from which the next muting is short again."""


class SocketListener:
    """The socket and the thread that reads it."""

    def __init__(self, path: str | Path, inbox: Inbox, *, clock: Clock, proc: Path, most: int) -> None:
        """Listen on `path` for up to `most` connections; raises ReportListenError. `proc` is the host's /proc."""
        self._path, self._inbox, self._clock, self._proc = Path(path), inbox, clock, proc
        self._most = min(most, connection_limit(most))
        self._listener = bind_socket(self._path)
        self._inode = self._path.lstat().st_ino
        self._connections: dict[int, _SocketConnection] = {}
        self._muted: list[tuple[float, int]] = []
        self._responses: deque[tuple[socket.socket, ReportRefusedError]] = deque()
        self._accepts = TokenBucket(_ACCEPTS_BURST, _ACCEPTS_PER_SECOND)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = self._new_epoll()
        self._full = False
        self._stop = threading.Event()
        self.cpu_seconds = 0.0
        """CPU seconds used by the thread, updated at the end of each poll."""
        self.worker = Worker("reports", self._run, stop=self._stop)
        self.worker.start()

    def close(self) -> None:
        """Close all connections, and remove the socket unless another process has replaced it."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self.worker.join(2.0)
        if not self.worker.alive:
            self._release()
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()

    def _run(self) -> None:
        if self.worker.failures:
            self._begin_anew()
        self._serve()

    def _serve(self) -> None:
        while not self._stop.is_set():
            turns, timeout = _PACKETS_PER_ROUND, self._poll_timeout()
            while self._serve_round(timeout) and turns and not self._stop.is_set():
                turns, timeout = turns - 1, 0.0
            self.cpu_seconds = time.thread_time()
            time.sleep(_PAUSE)

    def _begin_anew(self) -> None:
        """Close all connections, which their senders open again, and watch the listening socket only."""
        for connection in list(self._connections.values()):
            with suppress(Exception):
                self._drop(connection)
        self._connections.clear()
        self._muted.clear()
        self._epoll.close()
        self._epoll = self._new_epoll()

    def _new_epoll(self) -> select.epoll:
        epoll = select.epoll()
        for descriptor in (self._listener.fileno(), self._wake):
            epoll.register(descriptor, select.EPOLLIN)
        return epoll

    def _serve_round(self, timeout: float) -> bool:
        """Read one packet of each ready connection; returns False if no event was pending."""
        events = self._epoll.poll(timeout, maxevents=4096)
        for descriptor, _ in events:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._read(connection)
            elif descriptor == self._wake:
                self._send_responses()
            elif descriptor == self._listener.fileno():
                self._accept()
            # Any other belongs to a connection that was closed in this round to make room.
        self._unmute()
        return bool(events)

    def _release(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    # Connections.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._accepts.take(time.monotonic()):
                self._mute(self._listener.fileno(), 1 / _ACCEPTS_PER_SECOND)
                return
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if not self._full:
                    log.warning("reports: no more connections can be accepted for now: %s", err.strerror)
                self._full = True
                self._mute(self._listener.fileno(), 1.0)
                return
            self._full = False
            self._add_connection(sock)

    def _add_connection(self, sock: socket.socket) -> None:
        sock.settimeout(0.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        try:
            connection = _SocketConnection(sock, self._sender(sock), partial(self._queue_response, sock))
        except ReportRefusedError as err:
            self._inbox.count(err.outcome)
            _send_refusal(sock, err)
            _close_after_response(sock)
            return
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _sender(self, sock: socket.socket) -> Sender:
        peer = connected_peer(sock, self._proc)
        if len(self._connections) >= self._most:
            self._make_room(self._inbox.jobs.get(peer.pid, ""))
        if len(self._connections) >= self._most:
            raise ReportRefusedError(
                "too_many_connections", f"{self._most} connections are open, the maximum (reports.processes)"
            )
        now = self._clock.now()
        sender = self._inbox.sender(peer, begun=now - process_age(peer))
        self._inbox.connect(sender)
        return sender

    def _make_room(self, job_id: str) -> None:
        """Close the connections of senders that belong to no job; they may reconnect.

        If there are none, and a process of job `job_id` connects, close the newest of the job that has most of them.
        """
        muted = {descriptor for _, descriptor in self._muted}
        connections = [each for descriptor, each in self._connections.items() if descriptor not in muted]
        if unidentified := [each for each in connections if each.sender.unidentified]:
            for connection in unidentified:
                self._drop(connection)
            return
        by_job: dict[str, list[_SocketConnection]] = {job_id: []}
        for connection in connections:
            if (process := connection.sender.process) is not None:
                by_job.setdefault(process.job_id, []).append(connection)
        largest = max(by_job.values(), key=len)
        if job_id and len(largest) > len(by_job[job_id]) + 1:
            self._drop(largest[-1])

    def _drop(self, connection: _SocketConnection) -> None:
        del self._connections[connection.sock.fileno()]
        with suppress(OSError):  # it is not registered while it is muted
            self._epoll.unregister(connection.sock)
        connection.sock.close()
        self._inbox.disconnect(connection.sender)

    # Packets.

    def _read(self, connection: _SocketConnection) -> None:
        try:
            data, ancillary, _, _ = connection.sock.recvmsg(MOST_BYTES + 1, CREDENTIALS_SPACE)
        except (BlockingIOError, ConnectionResetError):  # closed with unread replies: its packets can still be read
            return
        except OSError:
            data, ancillary = b"", []
        if not data and not ancillary:  # end of connection; an empty packet has credentials
            self._drop(connection)
            return
        pid, now = sender_pid(ancillary), self._clock.now()
        try:
            self._inbox.receive(connection.sender, data, pid=pid, now=now, reply=connection.reply)
        except ReportRefusedError as err:
            self._handle_refusal(connection, err)

    def _handle_refusal(self, connection: _SocketConnection, err: ReportRefusedError) -> None:
        _send_refusal(connection.sock, err)
        connection.refused_packets += err.outcome in _COSTLY
        if connection.refused_packets < _REFUSED_BEFORE_MUTE:
            return
        now = time.monotonic()
        seconds = min(_MUTED_MOST, 2.0 * connection.muted_seconds) if now < connection.forgiven_at else _MUTED
        connection.refused_packets, connection.muted_seconds = 0, seconds
        connection.forgiven_at = now + seconds + _FORGIVEN_AFTER
        self._mute(connection.sock.fileno(), seconds)

    def _mute(self, descriptor: int, seconds: float) -> None:
        """Stop reading the descriptor for a while; the kernel blocks the sender once the buffer is full."""
        self._epoll.unregister(descriptor)
        heapq.heappush(self._muted, (time.monotonic() + seconds, descriptor))

    def _unmute(self) -> None:
        now = time.monotonic()
        while self._muted and self._muted[0][0] <= now:
            self._epoll.register(heapq.heappop(self._muted)[1], select.EPOLLIN)

    def _poll_timeout(self) -> float:
        return max(0.0, self._muted[0][0] - time.monotonic()) if self._muted else -1.0

    # Replies.

    def _queue_response(self, sock: socket.socket, refused: ReportRefusedError) -> None:
        """Queue a reply; called by other threads."""
        self._responses.append((sock, refused))
        with suppress(OSError):  # the eventfd may be closed already
            os.eventfd_write(self._wake, 1)

    def _send_responses(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._responses:
            _send_refusal(*self._responses.popleft())


def _send_refusal(sock: socket.socket, refused: ReportRefusedError) -> None:
    """Send the reason unless the sender's buffer is full."""
    if not refused.silent:
        with suppress(OSError):
            sock.send(refused.packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _close_after_response(sock: socket.socket) -> None:
    """Close a connection after draining it: closing with unread data would discard the reply."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(1):
            pass
    sock.close()
