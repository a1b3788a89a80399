"""A fleet whose jobs change at every scrape, or whose daemons are restarted one after another, when it is told to.

Owns what each daemon has booked, so that it can be compared with what Prometheus has; and the paths that give orders:
/storm, /calm, /restart (all nodes, a few at each scrape), /hold (nothing moves any more), /truth. Every second daemon
keeps a history and goes on where it was; the others begin at nought. Run like `benchmarks.fleet.site`.
"""

import asyncio
import json
import re
import sys

from msgspec import Struct

from benchmarks.fleet.site import SCENARIOS, SETTLED, asked, cluster, named, role, story
from exporter.core.exposition import TEXT_CONTENT_TYPE

_USEFUL = re.compile(rb'^gpu_efficiency_node_seconds_total\{[^}]*layer="useful"[^}]*\} (\S+)$', re.MULTILINE)
AT_ONCE = 8
"""One of so many nodes is restarted at each round."""


def useful(page: bytes) -> float:
    """Useful GPU-seconds that a page tells, in all."""
    return sum(map(float, _USEFUL.findall(page)))


class Daemon(Struct):
    """One node's: which page is next, whether it is away, and what was booked by those before it."""

    pages: list[bytes]
    newborn: list[bytes]
    """Of one that begins at nought."""
    keeps: bool
    at: int = -1
    first: float = 0.0
    """What it told when it was first asked."""
    booked: float = 0.0
    away: bool = False
    due: int = -1
    """Rounds until it is restarted; -1: never."""

    def page(self, *, held: bool) -> bytes | None:
        """Give the next page; None while it is away."""
        if held and self.at >= 0:
            return self.pages[self.at]
        if self.at < 0:
            self.at, self.first = 0, useful(self.pages[0])
            return self.pages[0]
        self.at = min(self.at + 1, len(self.pages) - 1)
        if self.due >= 0:
            self.due -= 1
            self.away = self.due == -1
        if not self.away:
            return self.pages[self.at]
        self.away = False
        self._restarted()
        return None

    def _restarted(self) -> None:
        """What it booked since it was last asked is in its history, or with nobody."""
        if not self.keeps:
            self.booked += useful(self.pages[self.at]) - self.first
            self.pages, self.at, self.first = self.newborn, 0, 0.0

    def truth(self) -> float:
        """Useful GPU-seconds booked since it was first asked, by all that ran on this node."""
        return self.booked + (useful(self.pages[self.at]) - self.first if self.at >= 0 else 0.0)


class Unrest:
    """Answers GETs, and takes orders."""

    def __init__(self, nodes: int) -> None:
        kinds = {role(number, nodes)[0] for number in range(nodes)}
        stories = {kind: (story(kind), story(kind, SETTLED)) for kind in kinds if kind < len(SCENARIOS)}
        self._nodes = nodes
        self._daemons = [Daemon(*stories[role(n, nodes)[0]], keeps=n % 2 == 0) for n in range(nodes)]
        self._cluster = cluster(nodes)
        self._storm = self._held = False

    def told(self, path: str) -> bytes | None:
        """Answer one path; None: the node is away."""
        if path.isdigit():
            return self._page(int(path))
        if path in {"storm", "calm"}:
            self._storm = path == "storm"
        elif path == "hold":
            self._held = True
        elif path == "restart":
            for number, daemon in enumerate(self._daemons):
                daemon.due = number % AT_ONCE
        elif path == "truth":
            kept, lost = (sum(d.truth() for d in self._daemons if d.keeps is keeps) for keeps in (True, False))
            return json.dumps({"data": {"kept": kept, "begun_anew": lost}}).encode()
        return self._cluster if path == "cluster" else b""

    def _page(self, number: int) -> bytes | None:
        daemon = self._daemons[number]
        page = daemon.page(held=self._held)
        if page is None:
            return None
        page = named(page, number, self._nodes)
        return page.replace(b'job_id="', b'job_id="storm-%d-' % daemon.at) if self._storm else page

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the other side closes it."""
        try:
            async for path in asked(reader):
                body = self.told(path)
                status = "503 Service Unavailable" if body is None else "200 OK"
                head = (
                    f"HTTP/1.1 {status}\r\nContent-Type: {TEXT_CONTENT_TYPE}\r\n"
                    f"Content-Length: {len(body or b'')}\r\n\r\n"
                )
                writer.write(head.encode() + (body or b""))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _serve(unrest: Unrest) -> None:
    server = await asyncio.start_server(unrest.answer, "127.0.0.1", 0)
    print(f"serving http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Unrest(int(sys.argv[1]))))
