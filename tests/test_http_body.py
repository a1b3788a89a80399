"""Bodies of HTTP responses that are too long, too slow, compressed or broken."""

import gzip
import tracemalloc
from collections.abc import Callable, Iterable
from math import inf

import httpx
import pytest

from exporter.http_body import ACCEPTED, BodyError, read_body


def read(parts: Iterable[bytes], encoding: str = "", **limits: float) -> bytes:
    """Read what a server sends in these parts."""
    headers = {"Content-Encoding": encoding} if encoding else {}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=iter(parts)))
    with httpx.Client(transport=transport, headers=ACCEPTED) as client, client.stream("GET", "http://node") as response:
        return read_body(response, limit=int(limits.get("limit", 1000)), deadline=limits.get("deadline", inf))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_body_is_read_whole(pack: Callable[[bytes], bytes]) -> None:
    text, encoding = b"a 1\n" * 250, "GZIP" if pack is gzip.compress else "identity"
    packed = pack(text)
    assert read([packed[:7], packed[7:]], encoding) == text


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_too_much_is_refused(pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BodyError, match=r"^is longer than 1000 bytes$") as caught:
        read([pack(bytes(1001))], "gzip" if pack is gzip.compress else "")
    assert caught.value.kind == "too_large"


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyError, match="is longer than"):
            read([bomb], "gzip", limit=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("body", "encoding", "kind", "what"),
    [
        (b"x", "br", "encoding", "is encoded as 'br', not gzip"),
        (b"x", "gzip, gzip", "encoding", "is encoded as 'gzip, gzip', not gzip"),
        (b"no gzip", "gzip", "encoding", "is not gzip (Error -3 while decompressing data: incorrect header check)"),
        (gzip.compress(b"a 1\n" * 9)[:-9], "gzip", "half_page", "ends in the middle of its gzip stream"),
    ],
    ids=["br", "twice", "no-gzip", "cut"],  # compressed bytes contain the time
)
def test_what_cannot_be_unpacked_is_refused(body: bytes, encoding: str, kind: str, what: str) -> None:
    with pytest.raises(BodyError) as caught:
        read([body], encoding)
    assert (caught.value.kind, str(caught.value)) == (kind, what)


def test_a_body_that_comes_too_late_is_given_up() -> None:
    with pytest.raises(BodyError, match="was not complete in time") as caught:
        read([b"a", b"b"], deadline=0.0)
    assert caught.value.kind == "timeout"
