"""Reads the body of an HTTP response within limits of size and time.

httpx limits the time of each read alone, and decompresses a whole chunk at once, however large it becomes: a few bytes
of gzip may hold more than the memory.
"""

import time
import zlib
from collections.abc import Callable, Iterator
from math import inf
from typing import Literal

import httpx

ACCEPTED = {"Accept-Encoding": "gzip"}
"""Header of requests whose responses are read here."""
_MAX_ENCODING_CHARS = 20
_PART_BYTES = 256 << 10
"""Decompressed at once."""


class BodyError(Exception):
    """The body is not accepted; the message completes a sentence that begins with its address."""

    def __init__(self, kind: Literal["encoding", "half_page", "timeout", "too_large"], what: str) -> None:
        super().__init__(what)
        self.kind = kind


def read_body(
    response: httpx.Response, *, limit: int, deadline: float = inf, count: Callable[[int], None] = lambda _: None
) -> bytes:
    """Return the body of a streamed response, which may be compressed with gzip. Raises BodyError, httpx.HTTPError.

    It may have `limit` bytes, decompressed, and must be complete before time.monotonic() is `deadline`. `count` is
    called with the number of bytes of each part, and what it raises is raised.
    """
    body = _Body(response, limit, count)
    for chunk in response.iter_raw():
        body.add(chunk)
        if time.monotonic() > deadline:
            raise BodyError("timeout", "was not complete in time")
    return body.complete()


async def read_body_async(response: httpx.Response, *, limit: int) -> bytes:
    """Like `read_body`, for an asynchronous client, whose caller limits the time."""
    body = _Body(response, limit, lambda _: None)
    async for chunk in response.aiter_raw():
        body.add(chunk)
    return body.complete()


class _Body:
    def __init__(self, response: httpx.Response, limit: int, count: Callable[[int], None]) -> None:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise BodyError("encoding", f"is encoded as {encoding[:_MAX_ENCODING_CHARS]!r}, not gzip")
        self._unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        self._limit, self._count, self._content = limit, count, bytearray()

    def add(self, chunk: bytes) -> None:
        """Append a chunk as it was received. Raises BodyError."""
        for part in (chunk,) if self._unpack is None else _decompressed(self._unpack, chunk):
            self._content += part
            self._count(len(part))
            if len(self._content) > self._limit:
                raise BodyError("too_large", f"is longer than {self._limit} bytes")

    def complete(self) -> bytes:
        """Return the content at its end. Raises BodyError."""
        if self._unpack is not None and not self._unpack.eof:
            raise BodyError("half_page", "ends in the middle of its gzip stream")
        return bytes(self._content)


def _decompressed(unpack: "zlib._Decompress", chunk: bytes) -> Iterator[bytes]:
    while True:
        try:
            part = unpack.decompress(chunk, _PART_BYTES)
        except zlib.error as error:
            raise BodyError("encoding", f"is not gzip ({error})") from error
        yield part
        chunk = unpack.unconsumed_tail
        if not chunk and len(part) < _PART_BYTES:
            return
