"""One kept connection to a daemon on 127.0.0.1, as a Prometheus server keeps one."""

import re
import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPResponse, RemoteDisconnected
from typing import Self

METRICS = "/metrics"


class Client:
    """Gets pages again and again; a context manager."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str = METRICS, headers: Mapping[str, str] | None = None) -> tuple[HTTPResponse, bytes]:
        """Give the answer and its body as sent. Raises RuntimeError for any status but 200."""
        try:
            response = self._asked(path, headers or {})
        except RemoteDisconnected:  # the daemon closes a connection on which nothing is asked for some seconds
            response = self._asked(path, headers or {})
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}, so there is nothing to measure: {body[:300]!r}")
        return response, body

    def _asked(self, path: str, headers: Mapping[str, str]) -> HTTPResponse:
        self._connection.request("GET", path, headers=dict(headers))
        return self._connection.getresponse()

    def value(self, name: str) -> float:
        """Give the value of a series without labels. Raises LookupError when there is none."""
        _, body = self.get()
        found = re.search(rf"^{name} (\S+)$", body.decode(), flags=re.MULTILINE)
        if found is None:
            raise LookupError(f"{METRICS} has no {name}: was it renamed?")
        return float(found[1])
