"""An engine of a serving job whose pages are huge, slow, endless, compressed bombs or malformed."""

import asyncio
import gzip
import time
import zlib
from collections.abc import AsyncIterator
from functools import cache
from random import Random

from tests.fuzz.redteam import wire
from tests.fuzz.redteam.tally import Tally, outcome
from tests.fuzz.redteam.target import Episode, Target

_MIB = 1 << 20
_WELCOME = 0.6
_NOTES, _HOSTILE = "engine-notes", "engine-hostile"
"""Files: what came of each page, and until when the engine is hostile."""
_GOOD = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} {running}
vllm:num_requests_waiting{{model_name="m"}} 2
vllm:gpu_cache_usage_perc{{model_name="m"}} 0.5
vllm:kv_cache_usage_perc{{model_name="m"}} 0.5
vllm:prompt_tokens_total{{model_name="m"}} {tokens}
vllm:generation_tokens_total{{model_name="m"}} {tokens}
vllm:num_preemptions_total{{model_name="m"}} 1
vllm:time_to_first_token_seconds_bucket{{model_name="m",le="0.1"}} {tokens}
vllm:time_to_first_token_seconds_bucket{{model_name="m",le="+Inf"}} {tokens}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} 5
vllm:time_to_first_token_seconds_count{{model_name="m"}} {tokens}
"""
_ODD = ("NaN", "+Inf", "-Inf", "1e308", "1e999", "-1", "1e-320", "9" * 400, "0x10", "1_0", "", "True", "\uff11")


def attack(episode: Episode) -> None:
    """Let the engine serve such pages on all ports that the daemon scrapes, until the end."""
    notes = episode.target.folder / _NOTES
    read = notes.stat().st_size
    _switch(episode.target, episode.until)
    time.sleep(max(episode.left(), 0))
    with notes.open(encoding="utf-8") as file:
        file.seek(read)
        for came in file:
            episode.tally.attempt()
            episode.tally.came(came.strip())


def _switch(target: Target, until: float) -> None:
    draft = target.folder / f"{_HOSTILE}.draft"
    draft.write_text(str(until), encoding="ascii")
    draft.replace(target.folder / _HOSTILE)


class Engine:
    """The engine: honest until it is told to be hostile, so that the daemon has come to know it."""

    def __init__(self, target: Target, dice: Random, until: float) -> None:
        self._target, self._dice, self._until = target, dice, until
        self._notes = (target.folder / _NOTES).open("a", encoding="utf-8", buffering=1)

    def __call__(self, tally: Tally) -> None:
        del tally
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # scrapes that were given up: counted where they are served
        loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        for port in self._target.engine_ports:
            await asyncio.start_server(self._answer, "127.0.0.1", port)
        await asyncio.sleep(max(self._until - time.monotonic(), 0))

    async def _answer(self, reader: wire.Reader, writer: wire.Writer) -> None:
        hostile = self._hostile()
        name, parts = _page(self._dice) if hostile else ("good", _good_page(self._dice))
        try:
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            async for part in parts:
                writer.write(part)
                await asyncio.wait_for(writer.drain(), 30)
            writer.close()
            came = "sent whole"
        except (OSError, EOFError, TimeoutError) as error:
            writer.transport.abort()
            came = outcome(error)
        if hostile:
            self._notes.write(f"{name}: {came}\n")

    def _hostile(self) -> bool:
        path = self._target.folder / _HOSTILE
        return path.exists() and time.monotonic() < float(path.read_text(encoding="ascii"))


def good(dice: Random) -> bytes:
    """Return a page of vLLM with plausible figures, or figures that went back."""
    return _GOOD.format(running=dice.randrange(9), tokens=dice.randrange(1_000_000)).encode()


def _head(length: int | None, *more: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: text/plain; version=0.0.4", "Connection: close", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _good_page(dice: Random) -> AsyncIterator[bytes]:
    page = good(dice)
    return _whole(_head(len(page)) + page)


def _page(dice: Random) -> tuple[str, AsyncIterator[bytes]]:
    """Return a page; most are such that the daemon comes back soon: it waits longer after each failure."""
    name = dice.choice(("good", "4 MiB", "many series")) if dice.random() < _WELCOME else dice.choice(sorted(_WAYS))
    return name, _good_page(dice) if name == "good" else _WAYS[name](dice)


async def _whole(text: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(text), 1 << 16):
        yield text[at : at + (1 << 16)]


def _large(dice: Random) -> AsyncIterator[bytes]:
    """Just below four MiB, in as many lines as fit, or in one."""
    page = good(dice)
    line = dice.choice(
        (b"x 1\n", b"# " + b"c" * 500 + b"\n", b'vllm:y{model_name="m%d"} 1\n', b'vllm:z_bucket{le="1"} 1\n')
    )
    page += line * ((4 * _MIB - 4096 - len(page)) // len(line))
    return _whole(_head(len(page)) + page)


_READ = (
    b"time_to_first_token_seconds_bucket", b"e2e_request_latency_seconds_bucket", b"prompt_tokens_total",
    b"generation_tokens_total", b"num_requests_running", b"num_requests_waiting",
)  # fmt: skip
"""Metrics of vLLM that a reader of its efficiency needs."""


def _many_series(dice: Random) -> AsyncIterator[bytes]:
    """As many different series as the most lines that the daemon takes hold, or more, of one metric or of several."""
    number, names = dice.choice(((19_900, 6), (19_900, 1), (4_900, 1), (49_900, 1)))
    page = good(dice) + b"".join(
        b'vllm:%s{model_name="m%d",le="%d"} %d\n' % (_READ[n % names], n % 700, n, n) for n in range(number)
    )
    return _whole(_head(len(page)) + page)


def _too_large(dice: Random) -> AsyncIterator[bytes]:
    page = good(dice) + b"# " + b"x" * dice.choice((5, 20, 64)) * _MIB
    return _whole(_head(None if dice.random() < 0.5 else len(page)) + page)


@cache
def _packed(mebibytes: int) -> bytes:
    pack = zlib.compressobj(9, zlib.DEFLATED, 31)
    text = pack.compress(good(Random(1)))  # noqa: S311  dice, no secret
    return text + b"".join(pack.compress(bytes(_MIB)) for _ in range(mebibytes)) + pack.flush()


@cache
def _again(text: bytes) -> bytes:
    return gzip.compress(text, 1)


async def _slow(dice: Random) -> AsyncIterator[bytes]:
    page = good(dice)
    yield _head(len(page))
    for byte in page:
        yield bytes([byte])
        await asyncio.sleep(0.1)


async def _endless(dice: Random) -> AsyncIterator[bytes]:
    yield _head(None) if dice.random() < 0.5 else _head(1 << 60)
    yield good(dice)
    while True:
        yield b"vllm:x 1\n" * 7000


async def _endless_head(dice: Random) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X-%d: y\r\n" % dice.randrange(1 << 30) * 2000


def _bomb(dice: Random) -> AsyncIterator[bytes]:
    """A few kilobytes that unpack to as much as a gigabyte."""
    text = _packed(dice.choice((8, 100, 400)))
    coding = dice.choice(("gzip", "gzip", "gzip, gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip"))
    if coding == "gzip, gzip":
        text = _again(text)
    return _whole(_head(len(text), f"Content-Encoding: {coding}") + text)


def _chunked(dice: Random) -> AsyncIterator[bytes]:
    size = dice.choice((b"ffffffffffffffff", b"-1", b"7fffffff", b"0" * 9000 + b"1", b"zz", b"5;" + b"e" * 70_000))
    return _whole(_head(None, "Transfer-Encoding: chunked") + size + b"\r\n" + good(dice) * 100)


def _malformed(dice: Random) -> AsyncIterator[bytes]:
    page = good(dice)
    name = b'vllm:num_requests_running{model_name="'
    page += dice.choice(
        (
            name + b'm"} ' + dice.choice(_ODD).encode() + b"\n",
            b"vllm:prompt_tokens_total " + dice.choice(_ODD).encode() + b"\n",
            name + b"x" * _MIB + b'"} 1\n',
            name + b"\\" * 999 + b'"} 1\n',
            name + b'm" 1\n',
            b"{" * 5000 + b"\n",
            b",".join(b'a%d="b"' % n for n in range(20_000)).join((b"vllm:x{", b"} 1\n")),
            dice.randbytes(4000),
            b"\xff\xfe\x00\n",
            b"vllm:generation_tokens_total 1 " + b"9" * 5000 + b"\n",
        )
    )
    length = len(page) + dice.choice((0, 0, -10, 1000))
    return _whole(_head(length) + page)


def _other(dice: Random) -> AsyncIterator[bytes]:
    page = good(dice)
    return _whole(
        dice.choice(
            (
                _head(0, "Location: file:///etc/shadow", status="302 Found"),
                _head(0, "Location: http://169.254.169.254/", status="307 Temporary Redirect"),
                _head(len(page), status="500 Internal Server Error") + page,
                _head(len(page), status="abc") + page,
                _head(-5) + page,
                _head(len(page), f"Content-Length: {len(page) * 2}") + page,
                _head(len(page), "Content-Type: text/plain; charset=utf-7") + page,
                b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + _head(len(page)) + page,
                b"HTTP/0.9 200\r\n\r\n" + page,
                b"<html>" + b"<p>" * 1_000_000,
                b"",
                dice.randbytes(5000),
            )
        )
    )


_WAYS = {
    "4 MiB": _large,
    "many series": _many_series,
    "too large": _too_large,
    "slow": _slow,
    "endless": _endless,
    "endless head": _endless_head,
    "bomb": _bomb,
    "chunked": _chunked,
    "malformed": _malformed,
    "other": _other,
}
