"""A fleet of simulated nodes behind one port on 127.0.0.1, each with a page of its own that moves on at every scrape.

Owns the pages: some nodes are simulated through the daemon's own core and text, the rest are copies of them under other
names. Run as `python -m benchmarks.fleet.site NODES` it serves /0, /1, ... and /cluster until SIGTERM.
"""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

from exporter.cluster.metrics import page as cluster_page
from exporter.cluster.model import ClusterNode
from exporter.cluster.watcher import ClusterView, QuestionStatus, QueueTotals
from exporter.core.exposition import TEXT_CONTENT_TYPE, render
from exporter.core.ledger import Ledger
from exporter.core.model import SECOND
from exporter.core.pipeline import advance
from exporter.core.snapshot import DaemonMetadata, take_snapshot
from exporter.simulate.simulation import simulate

SCRAPE_SECONDS = 60
SCENARIOS = (*("fleet",) * 8, "demo", "straggler", "lost_gpu", "demo")
"""Of nodes 0, 1, ...; the fleet's differ by their number. Twelve kinds: every state there is, jobs of 1 to 16 GPUs."""
_CALM = (0, 1, 2, 3, 5, 6, 7)
"""Kinds in which nothing hangs, is lost or leaks: all nodes but the first copies, for alerts that fire cost by
themselves, and a tenth of a fleet does not hang."""
_CALM_BESIDE_ONE = 125
"""Nodes for each copy of all twelve kinds: so many troubles a GPU, however large the fleet."""
SETTLED = 3600
"""Seconds of a story before the first page: windows are full, hangs have hung."""
_CLOCK = re.compile(rb"^(gpu_efficiency_observation_timestamp_seconds ).*", re.MULTILINE)
_PAGES = 40
"""Of each kind; scraped more often, the last one stays."""
_ACCOUNTS, _USERS = 50, 200


def story(number: int, begins: int = 0) -> list[bytes]:
    """Give the pages of one kind of node, a scrape interval apart; of a daemon that begins at second `begins` of it."""
    host = f"gpu-node-{number:02d}"
    simulation = simulate(
        SCENARIOS[number], node=number, period_seconds=SCRAPE_SECONDS, preroll_seconds=0,
        wall=time.time_ns() - SETTLED * SECOND,
        duration_seconds=SETTLED + SCRAPE_SECONDS * _PAGES,
    )  # fmt: skip
    ledger, pages = Ledger(), list[bytes]()
    for observation in simulation.observations:
        if observation.at < begins * SECOND:
            continue
        advance(ledger, observation)
        if observation.at >= SETTLED * SECOND:
            pages.append(render(take_snapshot(ledger, DaemonMetadata(host=host, simulated=True))))
    return pages


def role(number: int, nodes: int) -> tuple[int, int]:
    """Give a node's kind, and which copy of the kinds it belongs to: jobs of two nodes are of one copy."""
    troubled = max(1, nodes // _CALM_BESIDE_ONE)
    calm = number - troubled * len(SCENARIOS)
    if calm < 0:
        return number % len(SCENARIOS), number // len(SCENARIOS)
    return _CALM[calm % len(_CALM)], troubled + calm // len(_CALM)


def named(page: bytes, number: int, nodes: int) -> bytes:
    """Make a page that of node `number`: boards, jobs, host and owners of its own; jobs of two nodes stay so."""
    kind, copy = role(number, nodes)
    page = page.replace(b'uuid="GPU-', b'uuid="GPU-%05d-' % number).replace(b'job_id="', b'job_id="%d-' % copy)
    page = page.replace(b'node="gpu-node-%02d"' % kind, b'node="%s"' % host(number).encode())
    page = page.replace(b'account="research"', b'account="research-%d"' % (copy % _ACCOUNTS))
    page = page.replace(b'team=""', b'team="team-%d"' % (copy % _ACCOUNTS))
    page = re.sub(rb'user="(\w+)"', rb'user="\1-%d"' % (copy % _USERS), page)
    # Its clock is right: who scrapes more slowly than a page a minute would see all clocks off, and an alert for each.
    return _CLOCK.sub(rb"\g<1>%.3f" % time.time(), page)


def host(number: int) -> str:
    """Name a node."""
    return f"gpu-node-{number:05d}"


def cluster(nodes: int) -> bytes:
    """Give the page of `gpu-efficiency cluster` for this fleet."""
    view = ClusterView(
        scheduler="slurm",
        questions=tuple(QuestionStatus(name, 60 * SECOND, 0) for name in ("jobs", "nodes")),
        queue=QueueTotals({("gpu", "resources"): 40}, {("gpu", "resources"): 400}, {"gpu": 900.0}),
        nodes=tuple(
            ClusterNode(host(n), {"h100": 8}, {"h100": 6}, state="mixed", partitions=("gpu",)) for n in range(nodes)
        ),
        interrupted_jobs={("gpu", "node_failure", "requeued"): 3},
    )
    return cluster_page(view, now=0)


async def asked(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Give the name of each page a connection asks for, until the other side closes it."""
    while True:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        yield request.split(b" ", 2)[1].decode().removeprefix("/")


class Site:
    """Answers GETs: what Prometheus needs of HTTP, and no more."""

    def __init__(self, nodes: int) -> None:
        self._stories = [story(kind) for kind in range(len(SCENARIOS))]
        self._cluster = cluster(nodes)
        self._nodes = nodes
        self._seen = Counter[int]()

    def _page(self, name: str) -> bytes:
        if name == "cluster":
            return self._cluster
        number = int(name)
        pages = self._stories[role(number, self._nodes)[0]]
        page = pages[min(self._seen[number], len(pages) - 1)]
        self._seen[number] += 1
        return named(page, number, self._nodes)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the other side closes it."""
        try:
            async for name in asked(reader):
                body = self._page(name)
                writer.write(
                    (
                        f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
                    ).encode()
                )
                writer.write(body)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _serve(site: Site) -> None:
    server = await asyncio.start_server(site.answer, "127.0.0.1", 0)
    print(f"serving http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Site(int(sys.argv[1]))))
