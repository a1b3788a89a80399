"""Silent, half and slow connections on the reports' HTTP door, by other users than the honest one."""

import asyncio
from random import Random

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.child import Child, together
from tests.fuzz.redteam.tally import Tally
from tests.fuzz.redteam.target import REPORTING, STRANGERS, Episode

_EACH = 1500
_REPORT = b'{"v":1,"phase":"compute"}'


def attack(episode: Episode) -> None:
    """Hold the door shut: three users, 1,500 connections each."""
    users = episode.dice.sample((*STRANGERS, REPORTING.uid), 3)
    children = [Child(_user(episode, Random(episode.dice.getrandbits(32))), uid=uid) for uid in users]  # noqa: S311
    episode.tally.add(together(children, max(episode.left(), 0) + 3))


class _User:
    def __init__(self, episode: Episode, dice: Random) -> None:
        self._episode, self._dice = episode, dice

    def __call__(self, tally: Tally) -> None:
        mine = Episode(self._episode.target, self._dice, self._episode.until, tally)
        wire.crowd(mine, [_worker(mine) for _ in range(mine.target.many(_EACH))])


_user = _User


async def _worker(episode: Episode) -> None:
    while not episode.over():
        await wire.tried(episode, lambda: _connection(episode))
        await asyncio.sleep(episode.dice.uniform(0, 0.5))


async def _connection(episode: Episode) -> str:
    reader, writer = await wire.connect(episode.target.door)
    head = f"POST /v1/report HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(_REPORT)}\r\n\r\n".encode()
    way = episode.dice.choice(("silent", "silent", "silent", "half a head", "no body", "slow", "whole", "huge"))
    try:
        if way == "half a head":
            writer.write(head[: episode.dice.randrange(1, len(head) - 1)])
        elif way == "no body":
            writer.write(head)
        elif way == "slow":
            for byte in head + _REPORT:
                if writer.transport.is_closing() or episode.over():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.5)
        elif way == "whole":
            writer.write(head + _REPORT)
        elif way == "huge":
            writer.write(b"POST /v1/report HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * (1 << 20))
        status = await asyncio.wait_for(wire.reply(reader), max(episode.left(), 0.01))
    except TimeoutError:
        return f"{way}: held to the end"
    finally:
        await wire.closed(writer)
    return f"{way}: {status}"
