"""Serves POST /v1/report on loopback, for jobs that cannot mount the unix socket.

Listens on loopback addresses only, because a sender is identified by the local process that holds the other end of the
connection.
"""

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from exporter.clock import Clock
from exporter.config import ConfigError, split_address
from exporter.training.http_connections import IDLE_SECONDS, ConnectionPool, HttpConnection
from exporter.training.inbox import Inbox, unidentified_error
from exporter.training.message import MOST_BYTES, ReportRefusedError
from exporter.training.peer import Peer, PeerSearch, process_age
from exporter.training.socket_owner import Address, SocketTable
from exporter.training.unix_socket import ReportListenError
from exporter.worker import Worker

log = logging.getLogger(__name__)
_CONNECTIONS = 256
_QUEUE = 4096
"""Connections that the kernel accepts ahead of the server, at most net.core.somaxconn.

Those above wait a second for the next try, and some are reset: a burst would do that to honest reports.
"""
_AT_ONCE = 32
"""Connections that are accepted at once: they are counted only after that, and all have descriptors."""
_BODY_SECONDS = 5.0
"""Timeout for reading a request's body."""
_IDENTIFY_SECONDS = 3.0
"""Timeout for identifying a new sender; the sampling thread looks senders up about once a second."""
_RATE_LIMIT_DELAY_SECONDS = 0.5
"""Delay of the reply to a sender above its rate limit: a request costs more than a packet of the socket."""
_CHECK_EVERY_SECONDS = 0.05
_RECENT = 64
"""Recently identified processes that are searched first: a client may open a new connection for each message."""
_STATUS = {
    "too_large": 413, "too_many": 429, "too_many_connections": 429, "busy": 503, "not_visible": 403,
    "unknown_process": 403, "other_process": 403,
}  # fmt: skip
"""HTTP status by outcome; 400 for all other outcomes."""


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(_QUEUE)  # asyncio lets the kernel queue as many as are accepted at once


class _Door(socket.socket):
    """The listening socket. Closes what `admits` refuses, before the event loop makes objects of it."""

    admits: Callable[[Address], bool]

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection that is admitted. Raises BlockingIOError if there is none among the next."""
        for _ in range(_AT_ONCE):
            accepted, client = super().accept()
            if self.admits(Address(*client[:2])):
                return accepted, client
            accepted.close()
        raise BlockingIOError


class HttpListener:
    """The HTTP server and its thread."""

    def __init__(self, address: str, inbox: Inbox, *, clock: Clock, proc: Path) -> None:
        """Listen on `address`, host:port. Raises ConfigError if it is not loopback, ReportListenError."""
        self._inbox, self._clock, self._proc = inbox, clock, proc
        self._sock = _listen(*parse_loopback_address(address))
        host, self.port = self._sock.getsockname()[:2]
        self._address = Address(host, self.port)
        self._lookup_lock = asyncio.Lock()
        self._search = PeerSearch(self._address, proc)
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._app = Starlette(routes=[Route("/v1/report", self._handle_report, methods=["POST"])])
        self._server = self._new_server()
        self._stop = threading.Event()
        self.worker = Worker("reports-http", self._run, stop=self._stop)
        self.worker.start()

    def close(self) -> None:
        """Stop the server; a request in progress has one second to finish."""
        self._stop.set()
        self._server.should_exit = True
        self.worker.join(5.0)

    def _new_server(self) -> uvicorn.Server:
        self._pool = ConnectionPool(_CONNECTIONS, SocketTable(self._address, self._proc).user)
        self._sock.admits = self._pool.admits
        return _Server(_server_config(self._app, partial(HttpConnection, self._pool), self._close_overdue))

    def _run(self) -> None:
        """Serve until closed; after a failure on the same port again. Raises ReportListenError while it is taken."""
        if self.worker.failures:
            self._sock = _listen(self._address.host, self._address.port)
            self._server = self._new_server()
            self._server.should_exit = self._stop.is_set()
        with self._sock:
            if not self._stop.is_set():
                self._server.run(sockets=[self._sock])

    async def _handle_report(self, request: Request) -> Response:
        connection: HttpConnection = request.state.connection
        connection.heard()
        try:
            raw = await _body(request)
            connection.peer = connection.peer or await self._find_peer(connection)
            await self._receive(connection, connection.peer, raw)
        except ReportRefusedError as err:
            if err.outcome == "too_many" and connection.is_open:
                await asyncio.sleep(_RATE_LIMIT_DELAY_SECONDS)
            return Response(err.packet, _STATUS.get(err.outcome, 400), media_type="application/json")
        except ClientDisconnect:
            pass
        return Response(status_code=204)

    async def _receive(self, connection: HttpConnection, peer: Peer, raw: bytes) -> None:
        now = self._clock.now()
        sender = self._inbox.sender(peer, begun=now - process_age(peer))
        self._inbox.receive(sender, raw, pid=peer.pid, now=now)
        until = time.monotonic() + _IDENTIFY_SECONDS
        # The sampling thread, which looks it up, has no event loop.
        while sender.is_pending and connection.is_open and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_EVERY_SECONDS)
        if sender.unidentified:
            raise unidentified_error(sender)  # the sampling thread has counted it
        if sender.process:
            connection.heard(of_job=True)

    async def _find_peer(self, connection: HttpConnection) -> Peer:
        """Identify the client's process, one connection at a time, in a worker thread: it may take a second."""
        if connection.client is None:
            raise ReportRefusedError("not_visible", "the connection has no address")
        try:
            async with self._lookup_lock:
                if not connection.is_open:
                    raise ClientDisconnect  # nobody waits for it, and others do
                return await asyncio.to_thread(self._peer, Address(*connection.client))
        except ReportRefusedError as err:
            self._inbox.count(err.outcome)
            raise

    async def _close_overdue(self) -> None:
        self._pool.close_overdue(time.monotonic())

    def _peer(self, client: Address) -> Peer:
        likely = dict.fromkeys((*self._inbox.jobs, *self._recent))
        peer = self._search.find(client, first=likely)
        self._recent.append(peer.pid)
        return peer


def parse_loopback_address(address: str) -> tuple[str, int]:
    """Split host:port; raises ConfigError if processes of other hosts could connect to it."""
    try:
        host, port = split_address(address)
        host = "127.0.0.1" if host == "localhost" else host
        loopback = ip_address(host).is_loopback
    except (ConfigError, ValueError):
        loopback = False
    if not loopback:
        raise ConfigError(
            f"reports.http: {address!r} is not host:port on loopback (examples: 127.0.0.1:19402, [::1]:19402)"
        )
    return host, port


def _listen(host: str, port: int) -> _Door:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=_QUEUE)
    except OSError as err:
        raise ReportListenError(f"reports.http: {host} port {port}: {err.strerror or err}: set another port") from err
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by accepted connections
    return _Door(fileno=sock.detach())


async def _body(request: Request) -> bytes:
    """Read the request's body, truncated to MOST_BYTES + 1; raises ReportRefusedError on timeout."""
    raw = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_BYTES:
                    break
    except TimeoutError as err:
        raise ReportRefusedError("malformed", f"the message did not arrive within {_BODY_SECONDS:g} s") from err
    return raw[: MOST_BYTES + 1]


def _server_config(
    app: Starlette, connect: Callable[..., HttpConnection], sweep: Callable[[], Awaitable[None]]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connect,  # type: ignore[arg-type]  # uvicorn calls it for each connection
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=_AT_ONCE,
        timeout_keep_alive=int(IDLE_SECONDS),
        callback_notify=sweep,
        timeout_notify=1,
        timeout_graceful_shutdown=1,
    )
