"""Clients that mean harm: fifty at once, of ten kinds, against a server with TLS and passwords on 127.0.0.1.

Owns what they do, in a process of its own (`python -m tests.fuzz.hostile PORT PASSWORD`, until SIGTERM), which
prints what it got at the end. They come from addresses 127.0.0.2 and on, five workers to a kind, a few from the address
that the honest reader has too. The process is nice: who attacks a node from elsewhere does not take its CPU either.
Refuses any other address than the loopback's.
"""

import asyncio
import base64
import contextlib
import logging
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

EACH = 5
_HOSTS = 8
_TROUBLE = (OSError, asyncio.IncompleteReadError, TimeoutError)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Attacker:
    """One worker: where it comes from, and what it counts."""

    def __init__(self, port: int, word: str, number: int, done: Counter[str]) -> None:
        self._port, self.number, self.done = port, number, done
        self.right, self.wrong = _basic(word), _basic(f"{word}{number}")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    async def connect(self, *, tls: bool = True) -> Streams:
        """Connect from the worker's own address."""
        here = f"127.0.0.{1 + self.number % _HOSTS}"
        secure = {"ssl": self._context, "ssl_handshake_timeout": 20} if tls else {}
        return await asyncio.open_connection("127.0.0.1", self._port, local_addr=(here, 0), **secure)  # type: ignore[arg-type]

    def ask(self, word: str, path: str = "/metrics") -> bytes:
        """Write a request."""
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {word}\r\n\r\n".encode()


def _basic(word: str) -> str:
    return "Basic " + base64.b64encode(f"ada:{word}".encode()).decode()


async def _until_cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes = b"") -> None:
    """Send a byte every other second, if any, until the server hangs up."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                if not await reader.read(1 << 16):
                    return
        if drip:
            writer.write(drip)
            await writer.drain()


async def silent(one: Attacker) -> None:
    """Connects and never begins its handshake."""
    await _until_cut(*await one.connect(tls=False))


async def half_hello(one: Attacker) -> None:
    """Begins a handshake and adds a byte now and then."""
    reader, writer = await one.connect(tls=False)
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    await _until_cut(reader, writer, b"\x00")


async def slow_header(one: Attacker) -> None:
    """Sends its request a byte at a time."""
    reader, writer = await one.connect()
    writer.write(b"GET / HTTP/1.1\r\nX: ")
    await _until_cut(reader, writer, b"a")


async def deaf(one: Attacker) -> None:
    """Asks for the page of metrics again and again, with the password, and never reads."""
    _, writer = await one.connect()
    with contextlib.suppress(AttributeError):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    while not writer.transport.is_closing():
        writer.write(one.ask(one.right))
        async with asyncio.timeout(60):
            await writer.drain()
        await asyncio.sleep(0.5)


async def idle_crowd(one: Attacker) -> None:
    """Holds sixty connections that have said nothing."""
    async with asyncio.timeout(30):
        lines = await asyncio.gather(*(one.connect() for _ in range(60)), return_exceptions=True)
    open_ones = [line for line in lines if not isinstance(line, BaseException)]
    try:
        await asyncio.sleep(5)
    finally:
        for _, writer in open_ones:
            writer.transport.abort()


async def guesser(one: Attacker) -> None:
    """Tries passwords, as fast as they are refused."""
    reader, writer = await one.connect()
    while True:
        writer.write(one.ask(one.wrong))
        head = await reader.readuntil(b"\r\n\r\n")
        one.done[f"guesser got {head[9:12].decode()}"] += 1
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))


async def flood(one: Attacker) -> None:
    """Connects and is gone again."""
    _, writer = await one.connect(tls=False)
    writer.transport.abort()
    await asyncio.sleep(0.002)


async def huge(one: Attacker) -> None:
    """Sends headers, or a body, without end."""
    _, writer = await one.connect()
    endless = b"Content-Length: 99999999\r\n\r\n" if one.number % 2 else b"X: "
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + endless)
    while not writer.transport.is_closing():
        writer.write(b"x" * 4096)
        await writer.drain()
        await asyncio.sleep(0)  # where TLS has ended and the transport does not say so, nothing else gives way


async def pipeliner(one: Attacker) -> None:
    """Sends a hundred requests before it reads one answer."""
    reader, writer = await one.connect()
    writer.write(one.ask(one.right, "/") * 100)
    await _until_cut(reader, writer)


async def hammer(one: Attacker) -> None:
    """Asks for the whole page, with the password, again and again."""
    reader, writer = await one.connect()
    while True:
        writer.write(one.ask(one.right))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        one.done["hammer got an answer"] += 1
        await asyncio.sleep(0.1)


KINDS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    silent, half_hello, slow_header, deaf, idle_crowd, guesser, flood, huge, pipeliner, hammer,
)  # fmt: skip


async def _again_and_again(kind: Callable[[Attacker], Awaitable[None]], one: Attacker) -> None:
    while True:
        one.done[f"{kind.__name__} began"] += 1
        try:
            await kind(one)
        except _TROUBLE:
            await asyncio.sleep(0.02)  # it was hung up on: the next


async def attack(port: int, word: str, done: Counter[str]) -> None:
    """Never ends."""
    pairs = [(kind, number) for number, kind in enumerate(KINDS * EACH)]
    await asyncio.gather(*(_again_and_again(kind, Attacker(port, word, number, done)) for kind, number in pairs))


async def _main(port: int, word: str) -> None:
    done: Counter[str] = Counter()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end, done)
    await attack(port, word, done)


def _end(done: Counter[str]) -> None:
    """Say what was got and be gone at once, with all connections as they are."""
    print(*(f"{what}: {count}" for what, count in sorted(done.items())), sep="\n", flush=True)
    os._exit(0)


if __name__ == "__main__":
    os.nice(10)
    logging.disable()  # asyncio tells of every connection that is cut
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2]))
