"""Connections: accepting them, TLS, and how long each may keep us waiting.

Owns deadlines and numbers: for the handshake, for a request, for reading an answer, for a pause; in all and of one
address. When there are too many, the one that has used up most of its time makes room: who finishes what they begin
is served, however many others do not. Refuses to read HTTP, which is uvicorn's.
"""

import asyncio
import contextlib
import errno
import socket
import time
from typing import Any

import h11
import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporter.connections import Buckets, Wait, household, overdue, surplus
from exporter.http.access import Door, fixed_headers
from exporter.http.guarding import Guard, Guarding

_SWEEP_SECONDS = 0.5
_UNPROVEN = 0.5
"""Who kept a connection for a scrape is not put out by a crowd of new ones until half its time is gone."""


class Limits(Struct, frozen=True):
    """What connections may take; docs/web.md has the table."""

    connections: int = 128
    """A node has a handful of readers, and each keeps one open."""
    of_address: int = 32
    new_burst: float = 100
    """New ones of an address at once, and a second: a handshake costs about a millisecond of a core."""
    new_per_second: float = 20
    handshake_seconds: float = 10
    goodbye_seconds: float = 1
    """For the end of TLS; the connection ends without it all the same."""
    request_seconds: float = 10
    """From the first byte of a request, or from the connection's beginning, to its end."""
    answer_seconds: float = 30
    """Until the client has taken the whole answer."""
    idle_seconds: float = 75
    """Between two requests: longer than the usual scrape interval of a minute."""
    refusals_burst: float = 100
    refusals_per_second: float = 10
    """Refused requests of an address (no password, no such page); beyond, each waits for its answer:"""
    refusal_seconds: float = 1
    header_bytes: int = 16 * 1024
    request_bytes: int = 64 * 1024
    """Everything that comes with one request: a body is read to its end and means nothing."""
    unread_bytes: int = 32 * 1024 * 1024
    """Answers made and not yet taken, of all connections."""


class Http(H11Protocol):
    """uvicorn's. Subclassed, for there is no other way to its one answer that does not come from the app."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too long, with the headers of every answer."""
        line: Line = self.app_state["line"]
        body = f"{msg.rstrip('.')}, or headers of more than {line.lines.limits.header_bytes} bytes\n".encode()
        own = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        headers = [*own, (b"content-length", b"%d" % len(body)), *fixed_headers(line.guard)]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Line(asyncio.Protocol):
    """One connection, between asyncio and uvicorn's protocol. The base is asyncio's name for these methods."""

    def __init__(self, lines: "Lines", sock: socket.socket, address: str, guard: Guard) -> None:
        """Wait for the handshake."""
        self.lines, self.address, self.guard = lines, address, guard
        self.wait = Wait(time.monotonic(), lines.limits.handshake_seconds)
        self._sock = sock
        self._inner: H11Protocol
        self._transport: asyncio.Transport | None = None
        self._resting = False
        self._finished = 0
        self._taken = 0

    def speak(self, inner: H11Protocol) -> None:
        """Let `inner` read what comes."""
        self._inner = inner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request, after the handshake if there is one."""
        assert isinstance(transport, asyncio.Transport)  # nosec B101  # noqa: S101  for TCP it is
        self._transport = transport
        self._await_request()
        if self.guard.names and not _is_named(transport, self.guard.names):
            transport.abort()
            return
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on what came, unless it is more than one request can be."""
        self._taken += len(data)
        if self._resting:
            self._await_request()
        if self._taken > self.lines.limits.request_bytes:
            self.cut()
        else:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        """Pass on."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.lines.open.discard(self)
        if self._inner.transport is not None:
            self._inner.connection_lost(exc)

    def asked(self) -> None:
        """Wait for the answer and for its being taken."""
        self._taken, self._resting = 0, False
        self.wait.begin(time.monotonic(), self.lines.limits.answer_seconds)

    def answered(self) -> None:
        """Rest until the next request, once all is taken."""
        self._taken, self._resting = 0, True
        self._finished += 1
        if self.unread:
            self.lines.relieve()
        else:
            self.wait.begin(time.monotonic(), self.lines.limits.idle_seconds)

    def penalty(self) -> float:
        """Seconds that a refusal waits before it is sent."""
        return self.lines.penalty(self.address)

    def look(self) -> None:
        """See whether an answer has been taken meanwhile."""
        if self._resting and self.wait.allowed == self.lines.limits.answer_seconds and not self.unread:
            self.wait.begin(time.monotonic(), self.lines.limits.idle_seconds)

    def rank(self, now: float) -> float:
        """How soon it goes when there are too many: by its time used up, and sooner if it never finished a request."""
        return self.wait.spent(now) + (0 if self._finished else _UNPROVEN)

    @property
    def at_rest(self) -> bool:
        """Nothing is under way on it."""
        return self._resting and not self.unread

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to take them."""
        closing = self._transport is None or self._transport.is_closing()
        return 0 if closing or self._transport is None else self._transport.get_write_buffer_size()

    def cut(self) -> None:
        """Hang up at once, whatever state it is in."""
        self.lines.open.discard(self)
        if self._transport is not None:
            self._transport.abort()
        else:  # asyncio has the socket, and sees the end of it: a cancelled handshake may go on
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _await_request(self) -> None:
        self._resting = False
        self.wait.begin(time.monotonic(), self.lines.limits.request_seconds)


def _is_named(transport: asyncio.Transport, names: frozenset[str]) -> bool:
    from exporter.http.tls import names_in  # noqa: PLC0415  only under TLS

    return bool(names & names_in(transport.get_extra_info("peercert") or {}))


class Lines:
    """All connections of the process's listening sockets."""

    def __init__(self, server: uvicorn.Server, limits: Limits) -> None:
        """Keep connections for `server`, which ends them when it stops."""
        self.limits = limits
        self.open: set[Line] = set()
        self._server = server
        self._new = Buckets(limits.new_burst, limits.new_per_second)
        self._refused = Buckets(limits.refusals_burst, limits.refusals_per_second)
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, sock: socket.socket, config: uvicorn.Config, door: Door) -> None:
        """Take connections from now on; call it in the loop."""
        sock.settimeout(0)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock, config, door)

    def _accept(self, sock: socket.socket, config: uvicorn.Config, door: Door) -> None:
        """Take what waits, a handful at a time, so that requests get their turn as well."""
        loop = asyncio.get_running_loop()
        for _ in range(16):
            try:
                connection, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                loop.remove_reader(sock)
                if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    loop.call_later(1.0, self.listen, sock, config, door)
                    self._make_room(len(self.open) // 2)
                return
            if self._server.should_exit or not self._new.at(peer[0]).take(time.monotonic()):
                connection.close()
            else:
                self._begin(connection, peer[0], config, door)

    def _begin(self, connection: socket.socket, address: str, config: uvicorn.Config, door: Door) -> None:
        connection.settimeout(0)
        line = Line(self, connection, household(address), door.guarding.now)
        line.speak(Http(config=config, server_state=self._server.server_state, app_state={"line": line}))
        self.open.add(line)
        task = asyncio.get_running_loop().create_task(self._connect(line, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._make_room(self.limits.connections, spare=line)

    async def _connect(self, line: Line, connection: socket.socket) -> None:
        secure: dict[str, Any] = {}
        if line.guard.context is not None:
            secure = {"ssl": line.guard.context, "ssl_handshake_timeout": self.limits.handshake_seconds}
            secure["ssl_shutdown_timeout"] = self.limits.goodbye_seconds
        with contextlib.suppress(OSError):  # the handshake came to nothing; ssl's errors are of this kind
            await asyncio.get_running_loop().connect_accepted_socket(lambda: line, connection, **secure)
            return
        self.open.discard(line)

    def _make_room(self, most: int, *, spare: Line | None = None) -> None:
        """Hang up on the worst, of this one's own address first; `spare` is the one that room is made for."""
        now = time.monotonic()
        others = self.open - {spare}
        if spare is not None:
            own = [line for line in others if line.address == spare.address]
            for line in surplus(own, self.limits.of_address - 1, worst=lambda line: line.rank(now)):
                line.cut()
        for line in surplus(others & self.open, most - (spare is not None), worst=lambda line: line.rank(now)):
            line.cut()

    def penalty(self, address: str) -> float:
        """Seconds that a refusal of that address waits; most wait none."""
        enough = self._refused.at(address).take(time.monotonic())
        return 0 if enough else self.limits.refusal_seconds

    def relieve(self) -> None:
        """Hang up on those that do not take their answers, the longest first, while too much waits for them."""
        now = time.monotonic()
        late = sorted((line for line in self.open if line.unread), key=lambda line: line.wait.spent(now))
        held = sum(line.unread for line in late)
        while held > self.limits.unread_bytes and late:
            held -= late[-1].unread
            late.pop().cut()

    async def keep_swept(self, guarding: Guarding) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep(guarding.now)

    def sweep(self, guard: Guard) -> None:
        """Hang up on those whose time is up, and on those at rest that came in under other certificates than now."""
        for line in self.open:
            line.look()
        stale = [line for line in self.open if line.at_rest and line.guard.context is not guard.context]
        for line in [*stale, *overdue({line: line.wait for line in self.open}, time.monotonic())]:
            line.cut()

    async def close(self) -> None:
        """End all that is left."""
        for line in list(self.open):
            line.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*self._tasks, return_exceptions=True)
