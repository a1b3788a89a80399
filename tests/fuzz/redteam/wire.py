"""Connections of attackers: opened from any loopback address, with or without TLS, and what the daemon answers."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from tests.fuzz.redteam.tally import outcome
from tests.fuzz.redteam.target import Episode

logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it writes a line for each connection that was reset
_PATIENCE = 15.0
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


async def connect(port: int, address: str | None = None, tls: ssl.SSLContext | None = None) -> tuple[Reader, Writer]:
    """Connect to the daemon from that address."""
    local = None if address is None else (address, 0)
    opening = asyncio.open_connection("127.0.0.1", port, ssl=tls, local_addr=local, limit=1 << 23)
    return await asyncio.wait_for(opening, _PATIENCE)


async def reply(reader: Reader, *, body: bool = True) -> int:
    """Read one response and return its status; raises EOFError where the connection was closed before its end."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE)
    status = int(head.split(b" ", 2)[1])
    if body:
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if length:
            await asyncio.wait_for(reader.readexactly(int(length[0].split(b":")[1])), _PATIENCE)
        else:
            await asyncio.wait_for(reader.read(1 << 20), _PATIENCE)
    return status


def get(path: str, *headers: str) -> bytes:
    """Return a request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


async def closed(writer: Writer) -> None:
    """Drop the connection at once, whatever state it is in."""
    writer.transport.abort()
    await asyncio.sleep(0)


async def tried(episode: Episode, attempt: Callable[[], Awaitable[str]]) -> None:
    """Make one attempt and book what came of it."""
    episode.tally.attempt()
    try:
        came = await attempt()
    except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as error:
        came = "TLS refused" if isinstance(error, ssl.SSLError) else outcome(error)
    episode.tally.came(came)


def crowd(episode: Episode, workers: Iterable[Awaitable[None]]) -> None:
    """Run the workers until the episode's end."""

    async def all_of_them() -> None:
        tasks = [asyncio.ensure_future(worker) for worker in workers]
        _, late = await asyncio.wait(tasks, timeout=max(episode.left(), 0.1) + 1)
        for task in late:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # transports that were reset: expected, and counted where they are used
    try:
        loop.run_until_complete(all_of_them())
    finally:
        loop.close()
