"""Runs the real server in a thread, with the test's limits and web configuration, and opens raw connections to it.

Owns the sockets and the thread.
"""

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI

from exporter.web.limits import ConnectionLimits
from exporter.web.metrics_app import create_metrics_app
from exporter.web.security import WebConfigWatcher
from exporter.web.server import listen, serve, web_listeners
from tests.waiting import PATIENCE, wait_for

PAGE = b"gpu_efficiency_x 1\n"


def plain_app(page: bytes = PAGE, problem: str = "") -> FastAPI:
    return create_metrics_app("a page", page=lambda _: page, problem=lambda: problem)


class Served:
    """A running server and its addresses."""

    def __init__(self, ports: list[int], scheme: str, server: uvicorn.Server) -> None:
        self.ports, self.scheme, self._server = ports, scheme, server

    def until_alone(self) -> None:
        """Wait until the server has no connection left."""
        wait_for(lambda: not self._server.server_state.connections, "no connection is left", step=0.02)

    def line(self, *, here: str = "127.0.0.1") -> socket.socket:
        """Connect from a loopback address."""
        return socket.create_connection(("127.0.0.1", self.ports[0]), timeout=PATIENCE, source_address=(here, 0))

    def client(self, number: int = 0, **more: object) -> httpx.Client:
        url = f"{self.scheme}://127.0.0.1:{self.ports[number]}"
        return httpx.Client(base_url=url, trust_env=False, timeout=30, **more)  # type: ignore[arg-type]


@contextmanager
def served(
    app: FastAPI | None = None,
    *,
    limits: ConnectionLimits | None = None,
    guarding: WebConfigWatcher | None = None,
    open_page: bool = False,
    addresses: int = 1,
    listening: Callable[[str, int], socket.socket] = listen,
) -> Iterator[Served]:
    """Serve while the block runs."""
    guarding, sockets = guarding or WebConfigWatcher(), [listening("127.0.0.1", 0) for _ in range(addresses)]
    doors = web_listeners(sockets, guarding, open_page=open_page)
    servers: queue.Queue[uvicorn.Server] = queue.Queue()

    def work() -> None:
        asyncio.run(serve(app or plain_app(), doors, limits or ConnectionLimits(), on_started=servers.put))

    thread = threading.Thread(target=work)
    thread.start()
    server = servers.get(timeout=30)
    try:
        yield Served([sock.getsockname()[1] for sock in sockets], guarding.current.scheme, server)
    finally:
        server.should_exit = True
        thread.join()
        for sock in sockets:
            sock.close()


def until_cut(line: socket.socket) -> bytes:
    """Read until the server closes the connection; raises TimeoutError if it does not."""
    got = b""
    try:
        while part := line.recv(65536):
            got += part
    except ConnectionError:  # the server closed with unread data
        pass
    return got
