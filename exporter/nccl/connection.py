"""Exchanges bytes with a server of a job, which may be slow, endless or hostile: bounded in bytes and time."""

import socket
import time

_CHUNK = 65_536


class NoAnswerError(Exception):
    """A process of a job gave no usable answer. `outcome` is the name under which it is counted."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class BoundedConnection:
    """A connected stream socket with one deadline for the whole conversation, and a limit of the bytes received.

    Every method raises NoAnswerError with an outcome of `prefix` and _timeout, _too_large or _closed.
    """

    def __init__(self, sock: socket.socket, *, seconds: float, limit: int, prefix: str) -> None:
        """`seconds` is the time for everything that is sent and received from now on."""
        self._socket, self._deadline = sock, time.monotonic() + seconds
        self._left, self._prefix, self._buffer = limit, prefix, bytearray()

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            self._set_timeout()
            self._socket.sendall(data)
        except TimeoutError as err:
            raise self._error("timeout", "does not read in time") from err
        except OSError as err:
            raise self._error("closed", f"closed the connection: {err}") from err

    def line(self, most: int = 4096) -> bytes:
        """Receive a line of at most `most` bytes; return it without the line feed."""
        while b"\n" not in self._buffer and len(self._buffer) <= most:
            if not self._receive():
                raise self._error("closed", "closed the connection in the middle of a line")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        if len(line) > most:
            raise self._error("too_large", f"sent a line of more than {most} bytes")
        self._buffer = bytearray(rest)
        return line.rstrip(b"\r")

    def rest(self) -> bytes:
        """Receive all that comes until the other end closes the connection."""
        while self._receive():
            pass
        return bytes(self._buffer)

    def _receive(self) -> bool:
        """Receive some bytes; False at the end."""
        try:
            self._set_timeout()
            found = self._socket.recv(_CHUNK)
        except TimeoutError as err:
            raise self._error("timeout", "gave no whole answer in time") from err
        except OSError as err:
            raise self._error("closed", f"closed the connection: {err}") from err
        self._left -= len(found)
        if self._left < 0:
            raise self._error("too_large", "sent more bytes than an answer has")
        self._buffer += found
        return bool(found)

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _error(self, kind: str, what: str) -> NoAnswerError:
        return NoAnswerError(f"{self._prefix}_{kind}", what)
