"""The socket and the server around the app: listen, serve, stop when told.

Owns limits, signals and the words of "cannot listen". Refuses to know any page.
"""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import uvicorn
from fastapi import FastAPI

from exporter.http.access import Door, Gate
from exporter.http.guarding import Guarding
from exporter.http.lines import Limits, Lines

BACKLOG = 256
"""Connections that the kernel holds until we take them."""
STOP_SECONDS = 3
"""How long a stop waits for answers under way."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ListenError(Exception):
    """The address cannot be listened on; the message says which, why, and what to do."""


def listen(host: str, port: int, *, name: str = "web.listen_address") -> socket.socket:
    """Open a listening TCP socket. An empty host is every address, IPv6 too where there is any; port 0 is any free one.

    `name` is the setting that it comes from. Raises ListenError.
    """
    both = host == "" and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else _family(host, port)
        sock = socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
    except OSError as err:
        where = f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"
        raise ListenError(f"cannot listen on {where}: {_why(err)}".replace("web.listen_address", name)) from err
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


def run(
    app: FastAPI,
    *,
    host: str,
    port: int,
    page: tuple[str, int] | None = None,
    guarding: Guarding | None = None,
    open_page: bool = False,
    limits: Limits | None = None,
    listening: Callable[..., None] = lambda *_ports: None,
) -> None:
    """Serve in the calling thread until SIGTERM or SIGINT, then return, at most a few seconds later.

    With `page` (host and port), only /metrics and the probes are at `host` and `port`, and all is there. `listening` is
    called once with the ports in use, when connections are accepted. Signals are heeded only in the main thread.
    Raises ListenError.
    """
    guarding = Guarding() if guarding is None else guarding
    with ExitStack() as stack:
        sockets = [stack.enter_context(listen(host, port))]
        if page is not None:
            sockets.append(stack.enter_context(listen(*page, name="web.page_address")))
        stack.enter_context(_watched(guarding))
        listening(*(sock.getsockname()[1] for sock in sockets))
        with _signals_end_here():
            asyncio.run(serve(app, doors_of(sockets, guarding, open_page=open_page), limits or Limits()))


def doors_of(
    sockets: Sequence[socket.socket], guarding: Guarding, *, open_page: bool
) -> list[tuple[socket.socket, Door]]:
    """Say what each address is for: the last one has the page."""
    return [(sock, Door(guarding, pages=sock is sockets[-1], open_page=open_page)) for sock in sockets]


async def serve(
    app: FastAPI,
    doors: Sequence[tuple[socket.socket, Door]],
    limits: Limits,
    *,
    started: Callable[[uvicorn.Server], None] = lambda _server: None,
) -> None:
    """Let uvicorn run and stop, and bring it the connections ourselves: TLS may change from one to the next.

    `started` is given the server, whose `should_exit` ends it.
    """
    configs = [settings(Gate(app, door), limits) for _, door in doors]  # type: ignore[arg-type]  # an app is an app
    server = uvicorn.Server(configs[0])
    lines = Lines(server, limits)

    for (sock, door), config in zip(doors, configs, strict=True):
        config.load()
        lines.listen(sock, config, door)
    sweeper = asyncio.create_task(lines.keep_swept(doors[0][1].guarding))
    started(server)
    try:
        await server.serve(sockets=[])
    finally:
        sweeper.cancel()
        await lines.close()


@contextmanager
def _watched(guarding: Guarding) -> Iterator[None]:
    """Look for changes of the web configuration meanwhile, in a thread: a disk may be slow."""
    stop = threading.Event()
    watcher = threading.Thread(target=guarding.watch, args=(stop,), name="web-config", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join(timeout=1.0)


def settings(app: FastAPI, limits: Limits | None = None) -> uvicorn.Config:
    """How uvicorn serves `app`: pure Python HTTP/1.1, no access log, bounded in all it keeps.

    What clients do wrong is not logged: they could fill the disk with it. What we do wrong is.
    """
    limits = limits or Limits()
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
