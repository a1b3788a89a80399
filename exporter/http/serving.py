"""The socket and the server around the app: listen, serve, stop when told.

Owns limits, signals and the words of "cannot listen". Refuses to know any page.
"""

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

MAX_CONNECTIONS = 128
"""Beyond it: 503 at once. A node has a handful of readers, and each keeps a connection open."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the usual scrape interval of a minute, so that Prometheus need not connect anew each time."""
STOP_SECONDS = 3
"""How long a stop waits for answers under way."""
MAX_HEADER_BYTES = 16 * 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ListenError(Exception):
    """The address cannot be listened on; the message says which, why, and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. An empty host is every address, IPv6 too where there is any; port 0 is any free one.

    Raises ListenError.
    """
    both = host == "" and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else _family(host, port)
        sock = socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=MAX_CONNECTIONS)
    except OSError as err:
        where = f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"
        raise ListenError(f"cannot listen on {where}: {_why(err)}") from err
    # Connections inherit it. asyncio sets it only where the protocol is named, which create_server does not; without
    # it every answer waits 40 ms, for the kernel holds the body back until the client has acknowledged the headers.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _family(host: str, port: int) -> int:
    if host == "":
        return socket.AF_INET
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]


_CURES = {
    errno.EADDRINUSE: "address in use: another program, or a second exporter, has this port; find it with "
    "`ss -ltnp` and stop it, or set web.listen_address to another port",
    errno.EACCES: "permission denied: ports below 1024 need CAP_NET_BIND_SERVICE; set web.listen_address to a "
    "higher port",
    errno.EADDRNOTAVAIL: "no such address on this machine: set web.listen_address to one that `ip address` shows, or "
    "leave the host empty for every address",
}


def _why(err: OSError) -> str:
    if isinstance(err, socket.gaierror):
        return f"the name does not resolve ({err.strerror}): check the host in web.listen_address"
    return _CURES.get(err.errno or 0, f"{err.strerror or err}: check web.listen_address")


def run(app: FastAPI, *, host: str, port: int, listening: Callable[[int], None] = lambda _port: None) -> None:
    """Serve in the calling thread until SIGTERM or SIGINT, then return, at most a few seconds later.

    `listening` is called once with the port in use, when connections are accepted. Signals are heeded only in the
    main thread. Raises ListenError.
    """
    with listen(host, port) as sock:
        server = uvicorn.Server(settings(app))
        listening(sock.getsockname()[1])
        with _signals_end_here():
            server.run(sockets=[sock])


def settings(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves `app`: pure Python HTTP/1.1, no access log, bounded in all it keeps."""
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


@contextmanager
def _signals_end_here() -> Iterator[None]:
    """Once it has stopped, uvicorn raises the signal again; unheeded, that would kill us before we could tidy up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
