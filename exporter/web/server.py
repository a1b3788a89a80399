"""Listens, accepts connections, and runs uvicorn until SIGTERM: TLS, timeouts, and limits on connections.

When there are too many connections, it closes the one that has used up most of its timeout. Does not parse HTTP.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporter.connections import AddressBuckets, Deadline, client_network, overdue, surplus
from exporter.sockets import peer_credentials
from exporter.web.admission import Admission
from exporter.web.limits import ConnectionLimits
from exporter.web.security import (
    AccessControl,
    WebConfig,
    WebConfigWatcher,
    WebListener,
    merge_headers,
    own_host_names,
)
from exporter.worker import Worker

_SWEEP_SECONDS = 0.5
_NEW_CLIENT_PENALTY = 0.5
"""Added to the eviction rank of a connection without a completed request, so that a flood of new connections evicts
established ones only after half of their timeout."""


class HttpProtocol(H11Protocol):
    """uvicorn's protocol, subclassed to change the one response that does not come from the app."""

    def send_400_response(self, msg: str) -> None:
        """Respond 400 to invalid HTTP or too long headers, with the headers of every response."""
        connection: Connection = self.app_state["connection"]
        body = f"{msg.rstrip('.')}, or headers of more than {connection.manager.limits.header_bytes} bytes\n".encode()
        own = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        headers = [*own, (b"content-length", b"%d" % len(body)), *merge_headers((), connection.web_config)]
        # A body can be invalid while the app is about to respond: there is no place for that response any more.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Connection(asyncio.Protocol):
    """One connection, between asyncio and uvicorn's protocol; enforces timeouts and limits."""

    def __init__(
        self,
        manager: "ConnectionManager",
        sock: socket.socket,
        address: str,
        web_config: WebConfig,
        uid: int | None = None,
    ) -> None:
        """Start the timeout of the handshake. `uid` is the client's user, on a unix socket."""
        self.manager, self.address, self.web_config, self.uid = manager, address, web_config, uid
        self.wait = Deadline(time.monotonic(), manager.limits.handshake_seconds)
        self._sock = sock
        self._protocol: H11Protocol
        self._transport: asyncio.Transport | None = None
        self._idle = False
        self._requests_served = 0
        self._received_bytes = 0

    def set_protocol(self, protocol: H11Protocol) -> None:
        """Set uvicorn's protocol, which receives the data."""
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a request, after the TLS handshake if there is one."""
        assert isinstance(transport, asyncio.Transport)  # nosec B101  # noqa: S101  always so for a stream
        self._transport = transport
        self._await_request()
        if self.web_config.client_names and not _has_allowed_name(transport, self.web_config.client_names):
            transport.abort()
            return
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Forward data to uvicorn; close the connection if it exceeds the size of a request."""
        self._received_bytes += len(data)
        if self._idle:
            self._await_request()
        if self._received_bytes > self.manager.limits.request_bytes:
            self.abort()
        else:
            self._protocol.data_received(data)

    def eof_received(self) -> None:
        """Forward to uvicorn."""
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Forward to uvicorn."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Forward to uvicorn."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the manager."""
        self.manager.connections.discard(self)
        if self._protocol.transport is not None:
            self._protocol.connection_lost(exc)

    def request_started(self) -> None:
        """Start the timeout of the response."""
        self._received_bytes, self._idle = 0, False
        self.wait.restart(time.monotonic(), self.manager.limits.answer_seconds)

    def response_sent(self) -> None:
        """Start the idle timeout, once the client has read the whole response."""
        self._received_bytes, self._idle = 0, True
        self._requests_served += 1
        if self.unsent_bytes:
            self.manager.evict_slow_readers()
        else:
            self.wait.restart(time.monotonic(), self.manager.limits.idle_seconds)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request is handled; entering it may wait for others of the address."""
        return self.manager.turn(self.address)

    def note_served(self) -> None:
        """Note that the client may read what it asked for."""
        self.manager.admission.note_served(self.address, time.monotonic())

    def request_delay(self) -> float:
        """Return the seconds that this request waits before it is handled."""
        return self.manager.request_delay(self.address)

    def refusal_delay(self) -> float:
        """Return the seconds that a refusal waits before it is sent."""
        return self.manager.refusal_delay(self.address)

    def check_delivered(self) -> None:
        """Start the idle timeout if the client has read the whole response since the last check."""
        if self._idle and self.wait.allowed == self.manager.limits.answer_seconds and not self.unsent_bytes:
            self.wait.restart(time.monotonic(), self.manager.limits.idle_seconds)

    def eviction_rank(self, now: float) -> float:
        """Return the used share of its timeout, more if no request was completed; the higher, the earlier evicted."""
        return self.wait.used_share(now) + (0 if self._requests_served else _NEW_CLIENT_PENALTY)

    @property
    def shakes_hands(self) -> bool:
        """Whether its TLS handshake is in progress."""
        return self._transport is None and self.web_config.ssl_context is not None

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self._idle and not self.unsent_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that the client has not read yet."""
        closing = self._transport is None or self._transport.is_closing()
        return 0 if closing or self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the connection at once, in any state."""
        self.manager.connections.discard(self)
        if self._transport is not None:
            self._transport.abort()
        else:  # asyncio owns the socket and notices the shutdown; a cancelled handshake might continue
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _await_request(self) -> None:
        self._idle = False
        self.wait.restart(time.monotonic(), self.manager.limits.request_seconds)


def _has_allowed_name(transport: asyncio.Transport, names: frozenset[str]) -> bool:
    from exporter.web.web_config import certificate_names  # noqa: PLC0415  only with TLS

    return bool(names & certificate_names(transport.get_extra_info("peercert") or {}))


class _Turn(Struct, eq=False):
    """The requests of one address that are handled or wait."""

    semaphore: asyncio.Semaphore
    users: int = 0


_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOT_LISTENING = (errno.EBADF, errno.EINVAL)
"""What accept(2) reports of the listening socket itself. Other errors, such as those of the network or of a firewall,
concern one connection."""


class ConnectionManager:
    """Accepts connections of all listening sockets and enforces the limits on them."""

    def __init__(self, server: uvicorn.Server, limits: ConnectionLimits) -> None:
        """Create connections for `server`, which closes them when it stops."""
        self.limits = limits
        self.connections: set[Connection] = set()
        self._server = server
        self.admission = Admission(limits)
        self._refusals = AddressBuckets(limits.refusals_burst, limits.refusals_per_second)
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, _Turn] = {}

    def listen(self, sock: socket.socket, config: uvicorn.Config, listener: WebListener) -> None:
        """Start to accept connections; call it in the event loop."""
        sock.settimeout(0)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock, config, listener)

    def _accept(self, sock: socket.socket, config: uvicorn.Config, listener: WebListener) -> None:
        """Accept at most 16 pending connections, so that requests are handled in between."""
        loop = asyncio.get_running_loop()
        for _ in range(16):
            try:
                client_socket, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                loop.remove_reader(sock)
                if err.errno in _NOT_LISTENING:
                    log.error("no connections are accepted any more: %s: restart the daemon", err.strerror)  # noqa: TRY400  for operators
                    return
                log.warning("no connections are accepted for a second: %s", err.strerror)
                loop.call_later(1.0, self.listen, sock, config, listener)
                if err.errno in _FULL:
                    self._make_room(len(self.connections) // 2)
                return
            uid = peer_credentials(client_socket)[1] if client_socket.family == socket.AF_UNIX else None
            address = peer[0] if uid is None else f"uid {uid}"
            if self._server.should_exit or not self.admission.admits(address, time.monotonic()):
                client_socket.close()
            else:
                self._start(client_socket, address, uid, config, listener)

    def _start(
        self,
        client_socket: socket.socket,
        address: str,
        uid: int | None,
        config: uvicorn.Config,
        listener: WebListener,
    ) -> None:
        client_socket.settimeout(0)
        connection = Connection(self, client_socket, client_network(address), listener.watcher.current, uid)
        connection.set_protocol(
            HttpProtocol(config=config, server_state=self._server.server_state, app_state={"connection": connection})
        )
        self.connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._connect(connection, client_socket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._make_room(self.limits.connections, spare=connection)

    async def _connect(self, connection: Connection, client_socket: socket.socket) -> None:
        tls_options: dict[str, Any] = {}
        if connection.web_config.ssl_context is not None:
            tls_options = {
                "ssl": connection.web_config.ssl_context,
                "ssl_handshake_timeout": self.limits.handshake_seconds,
                "ssl_shutdown_timeout": self.limits.tls_shutdown_seconds,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client_socket, **tls_options)
        except OSError as err:  # the handshake failed; ssl.SSLError is an OSError
            # Its frames refer to asyncio's protocol and so to a buffer of 256 KiB, and one of them to the error.
            err.__traceback__ = err.__context__ = None
            self.connections.discard(connection)

    def _make_room(self, limit: int, *, spare: Connection | None = None) -> None:
        """Evict connections over the limits, first those of `spare`'s address; `spare` is the new connection."""
        now, of_address = time.monotonic(), Counter(connection.address for connection in self.connections)

        def rank(connection: Connection) -> tuple[int, bool, float]:
            """Rank those of the address with most connections first, then those of addresses not known for long."""
            address = connection.address
            return of_address[address], not self.admission.is_regular(address, now), connection.eviction_rank(now)

        others = self.connections - {spare}
        if spare is not None:
            own = [connection for connection in others if connection.address == spare.address]
            shaking = [connection for connection in own if connection.shakes_hands]
            all_shaking = [connection for connection in others if connection.shakes_hands]
            for candidates, most in (
                (own, self.limits.per_address),
                (shaking, self.limits.handshakes_per_address),
                (all_shaking, self.limits.handshakes),
            ):
                present = [connection for connection in candidates if connection in self.connections]
                for connection in surplus(present, most - 1, worst=rank):
                    connection.abort()
        for connection in surplus(others & self.connections, limit - (spare is not None), worst=rank):
            connection.abort()

    @contextlib.asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait until fewer requests of the address are handled than may be at once: those of others need not wait."""
        turn = self._turns.setdefault(address, _Turn(asyncio.Semaphore(self.limits.requests_per_address)))
        turn.users += 1
        try:
            async with turn.semaphore:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[address]

    def request_delay(self, address: str) -> float:
        """Return the seconds that a request of that address waits: 0 while it is alone or sends few."""
        if all(connection.address == address for connection in self.connections):
            return 0.0
        return self.admission.request_delay(address, time.monotonic())

    def refusal_delay(self, address: str) -> float:
        """Return the seconds that a refusal to that address waits: 0 while its rate limit is not exceeded."""
        enough = self._refusals.bucket_of(address).take(time.monotonic())
        return 0 if enough else self.limits.refusal_seconds

    def evict_slow_readers(self) -> None:
        """Close connections with unread responses, the slowest first, until the limit on unsent bytes is met."""
        now = time.monotonic()
        late = sorted(
            (connection for connection in self.connections if connection.unsent_bytes),
            key=lambda connection: connection.wait.used_share(now),
        )
        held = sum(connection.unsent_bytes for connection in late)
        while held > self.limits.unsent_bytes and late:
            held -= late[-1].unsent_bytes
            late.pop().abort()

    async def sweep_forever(self, watcher: WebConfigWatcher) -> None:
        """Call `sweep` every half second until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep(watcher.current)

    def sweep(self, web_config: WebConfig) -> None:
        """Close connections whose timeout has passed, and idle ones that use a replaced TLS context."""
        now = time.monotonic()
        for connection in self.connections:
            connection.check_delivered()
        late = overdue({connection: connection.wait for connection in self.connections}, now)
        stale = [
            connection
            for connection in self.connections
            if connection.is_idle and connection.web_config.ssl_context is not web_config.ssl_context
        ]
        for connection in [*stale, *late]:
            connection.abort()

    async def close(self) -> None:
        """Close all connections and wait up to a second for their tasks."""
        for connection in list(self.connections):
            connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*self._tasks, return_exceptions=True)


log = logging.getLogger(__name__)
BACKLOG = 256
"""Length of the kernel's queue of connections to accept."""
STOP_SECONDS = 3
"""How long a shutdown waits for responses in progress."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WebListenError(Exception):
    """Cannot listen on an address; the message has the address, the reason and the remedy."""


def listen(host: str, port: int, *, name: str = "web.listen_address") -> socket.socket:
    """Open a listening TCP socket. An empty host means every address, including IPv6; port 0 means any free port.

    `name` is the setting that has the address, for messages. Raises WebListenError.
    """
    both = host == "" and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else _family(host, port)
        sock = socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as err:
        where = f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"
        raise WebListenError(
            f"cannot listen on {where}: {_explain_listen_error(err)}".replace("web.listen_address", name)
        ) from err
    # Accepted connections inherit TCP_NODELAY; asyncio sets it only on sockets with an explicit protocol number, which
    # create_server does not set. Without it every response takes 40 ms longer: the kernel delays the body until the
    # client has acknowledged the headers.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _family(host: str, port: int) -> int:
    if host == "":
        return socket.AF_INET
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


_ADVICE = {
    errno.EADDRINUSE: "address in use: another program, or a second exporter, has this port; find it with "
    "`ss -ltnp` and stop it, or set web.listen_address to another port",
    errno.EACCES: "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE; set web.listen_address to a "
    "higher port",
    errno.EADDRNOTAVAIL: "no such address on this machine: set web.listen_address to one that `ip address` shows, or "
    "leave the host empty for every address",
}


def _explain_listen_error(err: OSError) -> str:
    if isinstance(err, socket.gaierror):
        return f"the name does not resolve ({err.strerror}): check the host in web.listen_address"
    return _ADVICE.get(err.errno or 0, f"{err.strerror or err}: check web.listen_address")


def run(
    app: FastAPI,
    *,
    host: str,
    port: int,
    page: tuple[str, int] | None = None,
    watcher: WebConfigWatcher | None = None,
    open_page: bool = False,
    on_listening: Callable[..., None] = lambda *_ports: None,
) -> None:
    """Serve in the calling thread until SIGTERM or SIGINT, then return within a few seconds.

    With `page` (host and port), `host` and `port` serve only /metrics and the probes, and `page` serves everything.
    `on_listening` is called once with the ports in use, when the sockets listen. Signals are handled only in the main
    thread. Raises WebListenError.
    """
    watcher = WebConfigWatcher() if watcher is None else watcher
    with ExitStack() as stack:
        sockets = [stack.enter_context(listen(host, port))]
        if page is not None:
            sockets.append(stack.enter_context(listen(*page, name="web.page_address")))
        stack.enter_context(_watch_config(watcher))
        listeners = web_listeners(sockets, watcher, open_page=open_page)
        ports = (sock.getsockname()[1] for sock in sockets)
        run_listeners(app, listeners, ConnectionLimits(), on_listening=partial(on_listening, *ports))


def run_listeners(
    app: FastAPI,
    listeners: Sequence[tuple[socket.socket, WebListener]],
    limits: ConnectionLimits,
    *,
    on_listening: Callable[[], None],
) -> None:
    """Serve on listening sockets in the calling thread until SIGTERM or SIGINT, then return within a few seconds.

    `on_listening` is called once, when a signal already ends the serving.
    """
    with _stopped_by_signals() as started:
        on_listening()
        asyncio.run(serve(app, listeners, limits, on_started=started))


def web_listeners(
    sockets: Sequence[socket.socket], watcher: WebConfigWatcher, *, open_page: bool
) -> list[tuple[socket.socket, WebListener]]:
    """Pair each socket with what it serves: only the last one serves the page."""
    names = own_host_names()
    return [
        (sock, WebListener(watcher, serves_pages=sock is sockets[-1], open_page=open_page, own_names=names))
        for sock in sockets
    ]


async def serve(
    app: FastAPI,
    listeners: Sequence[tuple[socket.socket, WebListener]],
    limits: ConnectionLimits,
    *,
    on_started: Callable[[uvicorn.Server], None] = lambda _server: None,
) -> None:
    """Run uvicorn on connections that we accept ourselves, because the TLS context may change between two of them.

    `on_started` is called with the server; setting its `should_exit` stops it.
    """
    configs = [uvicorn_config(AccessControl(app, listener), limits) for _, listener in listeners]  # type: ignore[arg-type]  # any ASGI app
    server = uvicorn.Server(configs[0])
    manager = ConnectionManager(server, limits)

    for (sock, listener), config in zip(listeners, configs, strict=True):
        config.load()
        manager.listen(sock, config, listener)
    sweeper = asyncio.create_task(manager.sweep_forever(listeners[0][1].watcher))
    on_started(server)
    try:
        await server.serve(sockets=[])
    finally:
        sweeper.cancel()
        await manager.close()


@contextmanager
def _watch_config(watcher: WebConfigWatcher) -> Iterator[None]:
    """Watch the web configuration in a thread while the block runs, because reading from disk may be slow."""
    stop = threading.Event()
    worker = Worker("web-config", partial(watcher.watch, stop), stop=stop)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join(1.0)


def uvicorn_config(app: FastAPI, limits: ConnectionLimits | None = None) -> uvicorn.Config:
    """Configure uvicorn for `app`: pure Python HTTP/1.1, no access log, bounded buffers.

    Errors of clients are not logged, because clients could fill the disk with them; errors of the app are.
    """
    limits = limits or ConnectionLimits()
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.idle_seconds) + 1,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=limits.header_bytes,
    )


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[uvicorn.Server], None]]:
    """Have signals stop the server also before uvicorn handles them; give what must be called with the server.

    The signal that uvicorn raises again after it has stopped would end the process before cleanup: it changes nothing.
    """
    servers: list[uvicorn.Server] = []
    came = threading.Event()

    def stop(*_: object) -> None:
        came.set()
        for server in servers:
            server.should_exit = True

    def started(server: uvicorn.Server) -> None:
        servers.append(server)
        if came.is_set():
            server.should_exit = True

    if threading.current_thread() is not threading.main_thread():
        yield started
        return
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
