"""TLS handshakes that never end: four addresses with 200 connections each, or twenty with 300."""

import asyncio
import ssl

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.target import Episode, addresses, client_tls

_FLEETS = ((4, 200), (20, 300))


def attack(episode: Episode) -> None:
    """Hold as many unfinished handshakes as the daemon allows, and open anew what it closes."""
    number, each = episode.dice.choice(_FLEETS)
    hello = client_hello()
    places = [address for address in addresses(number) for _ in range(episode.target.many(each))]
    wire.crowd(episode, [_worker(episode, address, hello) for address in places])


def client_hello() -> bytes:
    """Return the first flight of a real client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_tls().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a client that needs no server")


async def _worker(episode: Episode, address: str, hello: bytes) -> None:
    await asyncio.sleep(episode.dice.uniform(0, 1))
    while not episode.over():
        await wire.tried(episode, lambda: _stall(episode, address, hello))
        await asyncio.sleep(episode.dice.uniform(0.3, 2))


async def _stall(episode: Episode, address: str, hello: bytes) -> str:
    reader, writer = await wire.connect(episode.target.port, address)
    way = episode.dice.choice(("silent", "half", "whole", "drip"))
    try:
        if way == "half":
            writer.write(hello[: episode.dice.randrange(1, len(hello))])
        elif way == "whole":
            writer.write(hello)
        elif way == "drip":
            for at in range(len(hello)):
                if writer.transport.is_closing() or episode.over():
                    break
                writer.write(hello[at : at + 1])
                await asyncio.sleep(0.3)
        try:
            while await asyncio.wait_for(reader.read(1 << 16), max(episode.left(), 0.01)):
                pass
        except TimeoutError:
            return "held to the end"
        return "closed by the daemon"
    finally:
        await wire.closed(writer)
