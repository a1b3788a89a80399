"""Malformed training reports: random bytes, huge numbers, NaN, deep JSON, ten thousand messages a second."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from random import Random

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.attacks.impostors import pretend
from tests.fuzz.redteam.child import Child, together
from tests.fuzz.redteam.tally import Tally, outcome, reason
from tests.fuzz.redteam.target import REPORTING, STRANGERS, Episode, Job, enter

_PER_SECOND = 10_000
_NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e308", "1e999", "-1e308", "-1", "0", "9" * 400, "1e-320", "-0.0"),
    *(str(2**63), str(2**64), str(-(2**63)), str(2**31), "0.1", "true", "null", '"1"', "[]", "{}", '"nan"', "1E400"),
)
_FIELDS = (
    *("at", "seconds", "rank", "world_size", "gpus", "step", "steps", "highest_step", "epoch", "tokens", "padding"),
    *("samples", "model_flops", "hardware_flops", "model_flops_16bit", "checkpoints", "loss", "restart", "v"),
)


def attack(episode: Episode) -> None:
    """Send nonsense from a process of a job, from one of no job, and over HTTP."""
    seed = episode.dice.getrandbits
    children = [
        Child(_Sender(episode, Random(seed(32)), REPORTING), uid=REPORTING.uid, first=_joining(episode)),  # noqa: S311
        Child(_Sender(episode, Random(seed(32)), None), uid=episode.dice.choice(STRANGERS)),  # noqa: S311
        Child(_Poster(episode, Random(seed(32))), uid=REPORTING.uid, first=_joining(episode)),  # noqa: S311
    ]
    episode.tally.add(together(children, max(episode.left(), 0) + 3))


def _joining(episode: Episode) -> Callable[[], None]:
    """Return what puts a process into the attacker's own job, where its user could not go by himself."""
    return lambda: enter(REPORTING, episode.target.cgroups)


class _Sender:
    """Sends over the socket, on eight connections."""

    def __init__(self, episode: Episode, dice: Random, job: Job | None) -> None:
        self._target, self._until, self._dice, self._job = episode.target, episode.until, dice, job

    def __call__(self, tally: Tally) -> None:
        if self._job is not None:
            pretend({"SLURM_JOB_ID": str(self._job.id)})
        lines: list[socket.socket] = []
        began, sent, rate = time.monotonic(), 0, self._target.many(_PER_SECOND)
        while time.monotonic() < self._until:
            if len(lines) < 8:
                lines += _opened(str(self._target.socket), tally)
            if lines:
                line = self._dice.choice(lines)
                if not _send(line, message(self._dice), tally):
                    lines.remove(line)
                    line.close()
            sent += 1
            ahead = sent / rate - (time.monotonic() - began)
            if ahead > 0.01:
                time.sleep(ahead)


def _opened(path: str, tally: Tally) -> list[socket.socket]:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)  # noqa: FBT003
    try:
        line.connect(path)
    except OSError as error:
        line.close()
        tally.came(
            "connection: backlog full" if isinstance(error, BlockingIOError) else f"connection: {outcome(error)}"
        )
        return []
    return [line]


def _send(line: socket.socket, text: bytes, tally: Tally) -> bool:
    """Return whether the connection still stands."""
    tally.attempt()
    try:
        line.send(text)
    except BlockingIOError:
        tally.came("left in the sender's buffer")
    except OSError as error:
        tally.came("too long for the socket" if error.errno == 90 else outcome(error))
        return error.errno == 90
    else:
        tally.came("sent")
    try:
        answer = line.recv(4096)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if answer:
        tally.came(reason(answer))
    return bool(answer)


class _Poster:
    """Sends over HTTP."""

    def __init__(self, episode: Episode, dice: Random) -> None:
        self._episode, self._dice = episode, dice

    def __call__(self, tally: Tally) -> None:
        mine = Episode(self._episode.target, self._dice, self._episode.until, tally)
        wire.crowd(mine, [_posting(mine) for _ in range(mine.target.many(16))])


async def _posting(episode: Episode) -> None:
    while not episode.over():
        await wire.tried(episode, lambda: _post(episode))
        await asyncio.sleep(episode.dice.uniform(0, 0.05))


async def _post(episode: Episode) -> str:
    reader, writer = await wire.connect(episode.target.door)
    try:
        body = message(episode.dice)
        length = episode.dice.choice((len(body), len(body), len(body), -1, 2**70, "x", len(body) + 5))
        method = episode.dice.choice(("POST", "POST", "POST", "PUT", "GET", "\x00"))
        path = episode.dice.choice(("/v1/report", "/v1/report", "/metrics", "/" + "a" * 9000))
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        return f"HTTP {await wire.reply(reader)}"
    finally:
        await wire.closed(writer)


def message(dice: Random) -> bytes:
    """Return one message, seldom a good one."""
    makers = (_bytes, _deep, _huge, _numbers, _numbers, _numbers, _words, _good)
    return dice.choice(makers)(dice)


def _bytes(dice: Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 7, 300, 4096)))


def _deep(dice: Random) -> bytes:
    depth = dice.choice((50, 1000, 2040))
    return dice.choice((b'{"v":' + b"[" * depth + b"]" * depth + b"}", b'{"model":' * 400, b"[" * 4090))


def _huge(dice: Random) -> bytes:
    return b'{"v":1,"run":"' + b"r" * dice.choice((4096, 5000, 60_000, 200_000)) + b'"}'


def _numbers(dice: Random) -> bytes:
    now = time.monotonic_ns()
    fields = {"v": "1", "at": str(now), "seconds": "0.05", "run": '"attack"'}
    for name in dice.sample(_FIELDS, dice.randrange(1, 5)):
        fields[name] = dice.choice(_NUMBERS)
    if dice.random() < 0.3:
        phase = dice.choice(("data", "checkpoint", "bubble", "nonsense", ""))
        fields["phases"] = "{" + f'"{phase}": {dice.choice(_NUMBERS)}' + "}"
    if dice.random() < 0.3:
        fields["model"] = "{" + f'"parameters": {dice.choice(_NUMBERS)}, "layers": {dice.choice(_NUMBERS)}' + "}"
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


def _words(dice: Random) -> bytes:
    word = dice.choice(('"', "\\", "\n", "\x00", "\ud800", "\u202e", "}} 1\n", "é" * 400, "a" * 3000, "<script>"))
    quality = {"name": word, "value": dice.choice((1, 1e300, -5)), "target": dice.choice((None, 3, "x"))}
    fields = {"v": 1, "run": word + str(dice.randrange(1000)), "quality": quality, "seconds": 0}
    return json.dumps(fields, ensure_ascii=dice.random() < 0.5).encode(errors="surrogatepass")


def _good(dice: Random) -> bytes:
    figures = {"v": 1, "at": time.monotonic_ns(), "seconds": 0.001, "run": f"r{dice.randrange(5000)}"}
    return json.dumps(
        {**figures, "step": dice.randrange(1 << 40), "steps": 1, "rank": dice.randrange(1 << 20)}
    ).encode()
