"""A relay of TCP connections that can be cut, so that a client and a server lose each other and neither has ended."""

import socket
import threading
from contextlib import suppress


class Relay:
    """Listens on loopback and passes connections to a port, until `close`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = True
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        with self._lock:
            self._open = False
            self._end_all()

    def mend(self) -> None:
        """Pass new connections again."""
        with self._lock:
            self._open = True

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._pass(client)

    def _pass(self, client: socket.socket) -> None:
        try:
            if not self._open:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._sockets += [client, server]
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(one, other), daemon=True).start()

    def _end_all(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)
