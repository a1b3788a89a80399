"""Floods of /metrics: four addresses, 128 connections of eight addresses, 400 connections of twenty."""

import asyncio
import ssl

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.target import Episode, addresses, client_tls

_FLEETS = ((4, 8), (8, 16), (20, 20))
_PROTECTED = 200


def attack(episode: Episode) -> None:
    """Request /metrics as fast as it is answered: with the right password or none, kept or fresh connections."""
    number, each = episode.dice.choice(_FLEETS)
    tls = client_tls()
    places = [address for address in addresses(number) for _ in range(episode.target.many(each))]
    wire.crowd(episode, [_worker(episode, address, tls) for address in places])


async def _worker(episode: Episode, address: str, tls: ssl.SSLContext) -> None:
    right = episode.dice.random() < 0.6
    headers = [f"Authorization: {episode.target.authorization()}"] if right else []
    if episode.dice.random() < 0.5:
        headers.append("Accept-Encoding: gzip")
    request = wire.get("/metrics", *headers)
    way = episode.dice.choice(("kept", "fresh", "pipelined", "deaf"))
    while not episode.over():
        await wire.tried(episode, lambda: _connection(episode, address, tls, request, way, right=right))
        await asyncio.sleep(episode.dice.uniform(0, 0.05))


async def _connection(
    episode: Episode, address: str, tls: ssl.SSLContext, request: bytes, way: str, *, right: bool
) -> str:
    reader, writer = await wire.connect(episode.target.port, address, tls)
    try:
        if way == "deaf":
            return await _deaf(episode, writer, request)
        answered = "not sent"
        while not episode.over():
            number = 8 if way == "pipelined" else 1
            writer.write(request * number)
            for _ in range(number):
                status = await wire.reply(reader)
                answered = _named(status, right=right)
                if way != "fresh":
                    episode.tally.attempt()
                    episode.tally.came(answered)
            if way == "fresh":
                break
        return answered if way == "fresh" else "connection kept to the end"
    finally:
        await wire.closed(writer)


async def _deaf(episode: Episode, writer: wire.Writer, request: bytes) -> str:
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport can
    for _ in range(200):
        if episode.over() or writer.transport.is_closing():
            return "reads nothing: closed by the daemon"
        writer.write(request * 4)
        await asyncio.sleep(0.2)
    return "reads nothing: kept"


def _named(status: int, *, right: bool) -> str:
    if status == _PROTECTED and not right:
        return "PROTECTED 200 without a password"
    return str(status)
