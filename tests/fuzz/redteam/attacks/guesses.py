"""Wrong passwords of twenty addresses, forty connections, for /readyz and /metrics."""

import asyncio
import ssl
from base64 import b64decode, b64encode

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.target import USER, Episode, addresses, client_tls

_CONNECTIONS = 2
CHECKED = "401 /metrics, checked"
"""A guess that is a name and a password, and for which the daemon computed a hash; others cost it nothing."""


def attack(episode: Episode) -> None:
    """Guess passwords as fast as the daemon answers."""
    tls = client_tls()
    places = [address for address in addresses(20) for _ in range(_CONNECTIONS)]
    wire.crowd(episode, [_worker(episode, address, tls) for address in places[: episode.target.many(len(places))]])


async def _worker(episode: Episode, address: str, tls: ssl.SSLContext) -> None:
    while not episode.over():
        await wire.tried(episode, lambda: _guess(episode, address, tls))
        await asyncio.sleep(episode.dice.uniform(0, 0.2))


async def _guess(episode: Episode, address: str, tls: ssl.SSLContext) -> str:
    reader, writer = await wire.connect(episode.target.port, address, tls)
    try:
        while not episode.over():
            path = episode.dice.choice(("/readyz", "/metrics"))
            header = _wrong(episode)
            writer.write(wire.get(path, f"Authorization: {header}"))
            status = await wire.reply(reader)
            episode.tally.attempt()
            forbidden = status == 200 and path == "/metrics"
            came = CHECKED if status == 401 and path == "/metrics" and is_checked(header) else f"{status} {path}"
            episode.tally.came("PROTECTED 200 with a wrong password" if forbidden else came)
        return "connection kept to the end"
    finally:
        await wire.closed(writer)


def _wrong(episode: Episode) -> str:
    dice = episode.dice
    name = dice.choice((USER, USER, "admin", "root", "", "\udcff", "x" * 2000)).encode(errors="surrogateescape")
    word = dice.choice((b"", b"\x00", dice.randbytes(12), b"p" * 73, b"p" * 4000, b":::"))
    wrong = (
        "Basic " + b64encode(name + b":" + word).decode(),
        "Basic " + b64encode(name).decode(),
        "Basic %%%",
        "Basic",
        "Bearer " + dice.randbytes(16).hex(),
        "basic " + b64encode(USER.encode() + b":" + dice.randbytes(6)).decode(),
    )
    return dice.choice((wrong[0], *wrong))


def is_checked(header: str) -> bool:
    """Whether the header has a name and a password."""
    scheme, _, coded = header.partition(" ")
    try:
        return scheme.lower() == "basic" and b":" in b64decode(coded, validate=True)
    except ValueError:
        return False
