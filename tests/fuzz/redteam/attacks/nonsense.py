"""Nonsense over HTTP and TLS: smuggled requests, huge headers, slow loris, bad methods, old TLS."""

import asyncio
import contextlib
import ssl
import warnings
from collections.abc import Awaitable, Callable
from random import Random

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.attacks.handshakes import client_hello
from tests.fuzz.redteam.target import Episode, addresses, client_tls

_WORKERS = 60
_LORIS = 100
_PROTECTED = 200


def attack(episode: Episode) -> None:
    """Send what no client sends, from twelve addresses, beside a hundred slow ones from six more."""
    places = addresses(18)
    workers = [_worker(episode, places[n % 12]) for n in range(episode.target.many(_WORKERS))]
    slow = [_loris(episode, places[12 + n % 6]) for n in range(episode.target.many(_LORIS))]
    wire.crowd(episode, [*workers, *slow])


async def _worker(episode: Episode, address: str) -> None:
    ways: tuple[Callable[[Episode, str], Awaitable[str]], ...] = (_request, _request, _request, _old_tls, _raw)
    while not episode.over():
        way = episode.dice.choice(ways)
        await wire.tried(episode, lambda way=way: way(episode, address))  # type: ignore[misc]  # bound at once
        await asyncio.sleep(episode.dice.uniform(0, 0.2))


async def _request(episode: Episode, address: str) -> str:
    name, text = nonsense(episode.dice)
    reader, writer = await wire.connect(episode.target.port, address, client_tls())
    statuses: list[int] = []
    try:
        writer.write(text)
        with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError):
            statuses.append(await wire.reply(reader, body=not text.startswith(b"HEAD")))
            for _ in range(2):  # answers to requests inside the first one's body
                statuses.append(await asyncio.wait_for(wire.reply(reader), 0.5))  # noqa: PERF401  an error ends it
    finally:
        await wire.closed(writer)
    if _PROTECTED in statuses:
        return f"{name}: PROTECTED 200 without a password"
    return f"{name}: {statuses[0] if statuses else 'no answer'}"


def nonsense(dice: Random) -> tuple[str, bytes]:
    """Return a request and what it is called."""
    inner = wire.get("/api/v1/node")
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\n"
    smuggled = b"0\r\n\r\n" + inner
    ways: dict[str, bytes] = {
        "both lengths": post
        + f"Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        + smuggled,
        "two lengths": post + b"Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + inner,
        "odd chunked": post + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + smuggled,
        "chunk size": post + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * dice.choice((8, 16, 400)) + b"\r\nx",
        "folded": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: b\r\n c: d\r\n\r\n",
        "huge header": b"GET /metrics HTTP/1.1\r\nHost: x\r\nA: " + b"a" * dice.choice((17_000, 70_000, 1 << 20)),
        "many headers": b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(3000)) + b"\r\n",
        "huge path": b"GET /" + b"%2e%2e/" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "traversal": wire.get("/../../../../etc/passwd"),
        "absolute": b"GET http://127.0.0.1/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "bare newlines": b"GET /metrics HTTP/1.1\nHost: x\n\n",
        "version": b"GET /metrics HTTP/%s\r\nHost: x\r\n\r\n" % dice.choice((b"9.9", b"0.9", b"1.0", b"2.0", b"-1")),
        "no version": b"GET /metrics\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "upgrade": wire.get("/metrics", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        "expect": post + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n",
        "bytes": dice.randbytes(dice.choice((1, 100, 9000))),
        "NUL": b"GET /met\x00rics HTTP/1.1\r\nHost: \x00\r\nAuthorization: \xff\xfe\r\n\r\n",
        "body": post + b"Content-Length: 1000000000\r\n\r\n" + b"x" * 100_000,
        "pipelined": wire.get("/metrics") * 500,
        "range": wire.get("/metrics", "Range: bytes=0-1,1-2," + ",".join(f"{n}-" for n in range(900))),
        "path": wire.get(dice.choice(("/metrics/", "//metrics", "/metrics%00", "/METRICS", "/healthz/../metrics"))),
        "forwarded": wire.get("/metrics", "X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1"),
    }
    ways["method"] = (
        dice.choice((b"TRACE", b"CONNECT", b"DELETE", b"OPTIONS", b"HEAD", b"PROPFIND", b"G" * 5000, b"get", b"\x00"))
        + b" /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    name = dice.choice(sorted(ways))
    return name, ways[name]


async def _old_tls(episode: Episode, address: str) -> str:
    context = client_tls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = episode.dice.choice((ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1))
    context.set_ciphers("ALL:@SECLEVEL=0")
    _, writer = await wire.connect(episode.target.port, address, context)
    await wire.closed(writer)
    return "OLD TLS accepted"


async def _raw(episode: Episode, address: str) -> str:
    """Speak something else than TLS, or broken TLS, where TLS is expected."""
    hello = bytearray(client_hello())
    for _ in range(episode.dice.randrange(1, 20)):
        hello[episode.dice.randrange(len(hello))] = episode.dice.randrange(256)
    ways = {
        "plain HTTP": wire.get("/metrics", f"Authorization: {episode.target.authorization()}"),
        "SSLv2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + episode.dice.randbytes(37),
        "broken hello": bytes(hello),
        "heartbeat": client_hello() + b"\x18\x03\x03\x00\x03\x01\x40\x00",
        "endless records": b"\x17\x03\x03\x40\x00" + episode.dice.randbytes(1 << 17),
        "hellos": client_hello() * 20,
    }
    name = episode.dice.choice(sorted(ways))
    reader, writer = await wire.connect(episode.target.port, address)
    try:
        writer.write(ways[name])
        answer = await asyncio.wait_for(reader.read(64), 12)
    finally:
        await wire.closed(writer)
    if answer.startswith(b"HTTP/1.1 200"):
        return f"{name}: PROTECTED 200 over plain HTTP"
    return f"{name}: {'answered' if answer else 'closed'}"


async def _loris(episode: Episode, address: str) -> None:
    while not episode.over():
        await wire.tried(episode, lambda: _slow(episode, address))
        await asyncio.sleep(episode.dice.uniform(0, 1))


async def _slow(episode: Episode, address: str) -> str:
    reader, writer = await wire.connect(episode.target.port, address, client_tls())
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        for n in range(60):
            if episode.over():
                return "slow loris: held to the end"
            if writer.transport.is_closing() or reader.at_eof():
                return "slow loris: closed by the daemon"
            writer.write(b"X-%d: y\r\n" % n)
            await asyncio.sleep(episode.dice.uniform(0.2, 1.5))
    finally:
        await wire.closed(writer)
    return "slow loris: held for a minute"
