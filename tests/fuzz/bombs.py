"""Small things that grow: nested without end, packed beyond all measure, one line as long as a film.

Owns one such input for each way in, and what it costs to refuse it: seconds, and memory of a process of its own. Run as
`python -m tests.fuzz.bombs NUMBER` it answers for one.
"""

import asyncio
import gzip
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
from msgspec import Struct

from exporter.engines.base import ScrapeFailure
from exporter.engines.scraper import fetch
from exporter.sources.base import SourceError
from exporter.sources.dcgm_exporter.source import HttpPageFetcher
from tests.fuzz.targets import TARGETS
from tests.fuzz.trying import Feed, Target, Trial, limit_memory

BIG = 100 * 10**6
SECONDS = 20.0
"""For one; what is longer is a finding."""
_DEEP = 100_000


class Bomb(Struct, frozen=True, kw_only=True):
    """An input, and whom it meets."""

    what: str
    target: Target
    made: Callable[[], bytes]


class _Handler(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        """Answer with the packed bytes."""
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", f"{len(self.body)}")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@contextmanager
def _served(body: bytes) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"body": body})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _from_exporter() -> Feed:
    def feed(data: bytes) -> None:
        with _served(data) as url:
            page = HttpPageFetcher(url, timeout_seconds=20)
            try:
                page()
            finally:
                page.close()

    return feed


def _from_engine() -> Feed:
    async def asked(url: str) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await fetch(client, url, seconds=20)

    def feed(data: bytes) -> None:
        with _served(data) as url:
            asyncio.run(asked(url))

    return feed


def _target(name: str, make: Callable[[], Feed], refuses: type[Exception]) -> Target:
    return Target(name=name, what="over HTTP", samples=list, make=make, refuses=(refuses,))


def _packed(*parts: bytes, times: int) -> bytes:
    """Compressed without ever being whole in memory."""
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
        packed.write(parts[0])
        for _ in range(times):
            packed.write(parts[1])
    return file.getvalue()


_ZEROS = partial(_packed, b"", bytes(10**6), times=BIG // 10**6)
_HEADER = b'{"format":"gpu-efficiency-trace","version":1}\n'
_LAUGHS = b"".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10 if n else ['ha'] * 10)}]\n".encode() for n in range(10)
)
"""Each list holds the one before ten times: 10^10 words, were they written out."""


def _nested(before: bytes, after: bytes = b"") -> Callable[[], bytes]:
    return lambda: before + b"[" * _DEEP + b"]" * _DEEP + after


BOMBS: tuple[Bomb, ...] = tuple(
    Bomb(what=what, target=target if isinstance(target, Target) else TARGETS[target], made=made)
    for what, target, made in (
        ("100 MB of nothing in gzip", _target("dcgm-exporter's page", _from_exporter, SourceError), _ZEROS),
        ("a line of 8 MB", "dcgm-exporter's page", lambda: b"DCGM_FI_DEV_GPU_UTIL{" + b"a" * (8 << 20)),
        (
            "200,000 GPUs",
            "dcgm-exporter's page",
            lambda: b"".join(b'DCGM_FI_DEV_GPU_UTIL{gpu="%d",UUID="GPU-%d"} 1\n' % (n, n) for n in range(200_000))[
                : 4 << 20
            ],
        ),
        ("100 MB of nothing in gzip", _target("engines' pages", _from_engine, ScrapeFailure), _ZEROS),
        ("a line of 4 MB", "engines' pages", lambda: b'vllm:num_requests_running{a="' + b"b" * (4 << 20) + b'"} 1\n'),
        ("100,000 brackets", "workloads' reports", _nested(b'{"loss":', b"}")),
        ("a line of 64 MB", "log: megatron", lambda: b" iteration " * (6 << 20)),
        ("three brackets of 65,536 names each", "sinfo, slurmd -G, GRES, hostlists", lambda: b"n" + b"[1-65536]" * 3),
        ("2,000 brackets", "sinfo, slurmd -G, GRES, hostlists", lambda: b"n" + b"[1-2]" * 2000),
        ("65,536 names of 60,000 letters", "sinfo, slurmd -G, GRES, hostlists", lambda: b"n" * 60_000 + b"[1-65536]"),
        ("100,000 brackets", "scontrol --json, slurmrestd", _nested(b'{"jobs":', b"}")),
        ("100,000 brackets", "squeue, sinfo of a cluster", _nested(b'{"jobs":[{"job_id":1,"x":', b"}]}")),
        ("it includes itself", "slurm.conf", lambda: b"Include slurm.conf\n" * 1000),
        ("10 MB", "job files of a prolog", lambda: b"41\n" * (10**7 // 3)),
        ("1,000,000 nested messages", "kubelet's protobuf", lambda: b"\x0a\x00" * 10**6),
        ("100,000 brackets", "watch of the API server", _nested(b'{"type":"ADDED","object":', b"}\n")),
        ("an event of 100 MB without an end", "watch of the API server", lambda: b'{"type":"' + b"A" * BIG),
        ("100,000 brackets", "configuration", _nested(b"a = ")),
        ("a key of 100,000 parts", "configuration", lambda: b"a." * _DEEP + b"a = 1\n"),
        ("a number of 1,000,000 digits", "configuration", lambda: b"a = " + b"9" * 10**6),
        ("a billion laughs", "web configuration", lambda: _LAUGHS),
        ("100,000 brackets", "web configuration", _nested(b"a: ")),
        ("100,000 brackets", "recording", _nested(_HEADER + b'{"at":1,"wall":1,"x":', b"}\n")),
        ("100 MB of nothing in gzip", "packed recording", lambda: _packed(_HEADER, bytes(10**6), times=BIG // 10**6)),
        ("100,000 brackets", "inventory file", _nested(b'[{"x":', b"}]")),
        ("4,000 brackets", "pause file", lambda: b'{"x":' + b"[" * 4000),
    )
)


class Burst(Struct, frozen=True):
    """What came of one."""

    seconds: float
    memory: int
    became: str


def burst(bomb: Bomb) -> Burst:
    """Let it go off in this process; its limits hold."""
    data = bomb.made()
    trial = Trial(bomb.target, seconds_each=SECONDS)
    trial.one(data)
    found = trial.done()
    words = "; ".join(f"{one.error} at {one.where}" for one in found.findings)
    return Burst(found.slowest, max(0, found.memory), words or ("refused" if found.refused else "taken"))


if __name__ == "__main__":
    logging.disable()
    limit_memory()
    sys.stdout.buffer.write(msgspec.json.encode(burst(BOMBS[int(sys.argv[1])])))
